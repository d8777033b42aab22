import numpy as np
import pytest

from numpyro_dppvi.datasets import load_support2

KNOWN_LATER = (
    *("death", "d.time", "slos", "charges", "totcst", "totmcst", "surv2m", "surv6m", "prg2m"),
    *("prg6m", "dnr", "dnrday", "sps", "aps", "hday", "avtisst", "sfdm2", "hospdead", "id"),
    *("edu", "income", "adlp", "adls", "adlsc"),
)


@pytest.fixture(scope="module")
def data():
    return load_support2()


def test_as_many_survive_as_die_and_four_fifths_train(data):
    assert len(data.y_train) + len(data.y_test) == 2 * 2360
    assert data.y_train.sum() + data.y_test.sum() == 2360
    assert len(data.y_train) == 3776
    assert data.X_train.shape == (3776, len(data.feature_names))


def test_nothing_that_is_known_later_is_a_feature(data):
    names = {name.split("=")[0].split(" ")[0] for name in data.feature_names}
    assert not names & set(KNOWN_LATER)


def test_features_are_finite_and_of_comparable_width(data):
    both = np.concatenate([data.X_train, data.X_test])
    assert np.isfinite(both).all()
    assert np.abs(both).max() <= 4
    assert (both[:, 0] == 1).all()
    spread = both[:, 1:18].std(axis=0)
    assert (spread > 0.6).all()
    assert (spread < 1.4).all()


def test_every_patient_has_one_disease_group_one_sex_and_one_kind_of_cancer(data):
    for column in ("sex", "dzgroup", "ca"):
        which = [name.startswith(f"{column}=") for name in data.feature_names]
        np.testing.assert_array_equal(data.X_train[:, which].sum(axis=1), 1)
