import numpy as np
import pytest

from models.evaluation import selection_split
from numpyro_dppvi.datasets import load_adult

NUMERIC = ("age", "fnlwgt", "education_num", "capital_gain", "capital_loss", "hours_per_week")


@pytest.fixture(scope="module")
def data():
    return load_adult()


@pytest.fixture(scope="module")
def every_row(data):
    return np.concatenate([data.X_test, data.X_train])


@pytest.mark.slow
def test_halves_have_109_columns(data):
    assert data.X_train.shape == data.X_test.shape == (24421, 109)
    assert data.y_train.shape == data.y_test.shape == (24421,)
    assert len(data.feature_names) == len(set(data.feature_names)) == 109
    assert {array.dtype for array in (data.X_train, data.X_test)} == {np.dtype(np.float32)}
    assert {array.dtype for array in (data.y_train, data.y_test)} == {np.dtype(np.int32)}


@pytest.mark.slow
def test_majority_shares_are_those_of_the_papers_split(data):
    assert np.mean(data.y_test == 0) == pytest.approx(0.7633, abs=5e-5)
    assert np.mean(data.y_train == 0) == pytest.approx(0.7582, abs=5e-5)
    assert set(data.y_train) == set(data.y_test) == {0, 1}
    # What the repository's own documentation says of both files together.
    assert data.y_train.sum() + data.y_test.sum() == 7841 + 3846


def test_halves_are_one_permutation_of_the_file(data):
    # Where the first and the last row of the file must have gone.
    order = np.random.RandomState(0).permutation(48842)
    row_of = np.empty_like(order)
    row_of[order] = np.arange(48842)
    both = np.concatenate([data.X_test, data.X_train])
    name = data.feature_names.index
    first, last = both[row_of[0]], both[row_of[48841]]
    assert first[name("workclass=State-gov")] == first[name("marital_status=Never-married")] == 1
    assert last[name("workclass=Self-emp-inc")] == last[name("relationship=Husband")] == 1
    labels = np.concatenate([data.y_test, data.y_train])
    assert (labels[row_of[0]], labels[row_of[48841]]) == (0, 1)


def test_bias_comes_first_then_numbers_then_categories_in_order(data):
    assert data.feature_names[0] == "bias"
    assert data.feature_names[1:7] == NUMERIC
    categorical = [name.split("=") for name in data.feature_names[7:]]
    columns = list(dict.fromkeys(column for column, _ in categorical))
    assert columns == [
        "workclass",
        "education",
        "marital_status",
        "occupation",
        "relationship",
        "race",
        "sex",
        "native_country",
    ]
    for column in columns:
        categories = [category for name, category in categorical if name == column]
        assert categories == sorted(categories)
    assert "workclass=Private" in data.feature_names
    with_missing = [column for column, category in categorical if category == "?"]
    assert with_missing == ["workclass", "occupation", "native_country"]


def test_numeric_columns_are_standardised_over_all_rows(every_row):
    numeric = every_row[:, 1:7].astype(np.float64)
    np.testing.assert_allclose(numeric.mean(axis=0), 0, atol=1e-6)
    np.testing.assert_allclose(numeric.std(axis=0), 1, atol=1e-6)


def test_indicators_name_one_category_per_column(every_row):
    assert (every_row[:, 0] == 1).all()
    indicators = every_row[:, 7:]
    assert set(np.unique(indicators)) == {0, 1}
    assert (indicators.sum(axis=1) == 8).all()
    assert (indicators.sum(axis=0) > 0).all()


def test_selection_split_is_the_training_half_and_nothing_else(data):
    selection = selection_split(data)
    assert (len(selection.y_train), len(selection.y_test)) == (19536, 4885)
    np.testing.assert_array_equal(
        np.concatenate([selection.X_train, selection.X_test]), data.X_train
    )
    np.testing.assert_array_equal(
        np.concatenate([selection.y_train, selection.y_test]), data.y_train
    )
    assert selection.feature_names == data.feature_names
    assert not np.shares_memory(selection.X_test, data.X_test)
