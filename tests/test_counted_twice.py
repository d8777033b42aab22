"""A posterior that becomes the prior of the records that shaped it: refused, or warned of."""

import json
import warnings

import jax
import numpy as np
import pytest

import numpyro_dppvi as dppvi
from tests.dry import dry_rounds
from tests.test_checkpoint import means

BUDGET = dppvi.PrivacyBudget(1.0)
NAMED = {name: {"y": np.zeros((4, 2))} for name in ("Helsinki", "Turku", "Oulu")}
UNNAMED = list(NAMED.values())


def fit(data=UNNAMED, **changes):
    arguments = {
        "rng_key": jax.random.key(0),
        "method": dppvi.DPOptimization(num_local_steps=1),
        "budget": BUDGET,
        "num_rounds": 1,
        "progress_bar": False,
        **changes,
    }
    with dry_rounds():
        return dppvi.fit(means, None, data, **arguments)


def only(*numbers):
    """A schedule that visits some clients only."""
    return lambda round_number, num_clients: np.array([numbers])


@pytest.fixture
def ledger(tmp_path):
    return tmp_path / "ledger.jsonl"


@pytest.fixture(autouse=True)
def no_other_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


class TestOneLedgerFile:
    words = "used those of client 0, client 1 and client 2, as the ledger file .* shows"

    def again(self, prior, ledger, **changes):
        changes = {"budget": dppvi.PrivacyBudget(2.0), **changes}
        return fit(prior=prior, ledger_file=ledger, **changes)

    def test_is_refused_before_anything_is_charged(self, ledger):
        prior = fit(ledger_file=ledger).posterior.as_prior()
        before = ledger.read_bytes()
        with pytest.raises(ValueError, match=f"must come from other records, got .* {self.words}"):
            self.again(prior, ledger)
        assert ledger.read_bytes() == before

    def test_also_from_a_file_and_where_other_studies_lie_between(self, ledger, tmp_path):
        fit(ledger_file=ledger).posterior.save(tmp_path / "first.npz")
        first = dppvi.load(tmp_path / "first.npz", means)
        second = fit(prior=first.as_prior()).posterior  # of records without a ledger file
        with pytest.raises(ValueError, match=self.words):
            self.again(second.as_prior(), ledger)

    @pytest.mark.slow
    def test_clients_that_were_not_visited_may_go_on_from_it(self, ledger):
        prior = fit(schedule=only(0, 1), ledger_file=ledger).posterior.as_prior()
        self.again(prior, ledger, schedule=only(2))
        with pytest.raises(ValueError, match="that used those of client 1,"):
            self.again(prior, ledger, schedule=only(1, 2), budget=dppvi.PrivacyBudget(3.0))

    @pytest.mark.slow
    def test_another_run_or_another_file_is_no_matter(self, ledger):
        fit(ledger_file=ledger)
        prior = fit().posterior.as_prior()  # of other records, as far as anybody can tell
        self.again(prior, ledger)
        prior = fit(ledger_file=ledger.with_name("other.jsonl")).posterior.as_prior()
        self.again(prior, ledger, budget=dppvi.PrivacyBudget(3.0))

    @pytest.mark.slow
    def test_a_run_that_is_resumed_keeps_its_name(self, ledger, tmp_path):
        arguments = {"ledger_file": ledger, "checkpoint": tmp_path / "run.npz"}
        runs = [fit(**arguments).posterior.attrs["ledger_runs"] for _ in range(2)]
        assert runs[0] == runs[1]
        charged = {json.loads(line).get("run") for line in ledger.read_text().splitlines()}
        assert set(json.loads(runs[0])) == charged - {None}


class TestNames:
    @pytest.mark.slow
    def test_clients_of_the_same_name_are_warned_of(self):
        prior = fit(NAMED).posterior.as_prior()
        words = "^Helsinki and Oulu took part in the study whose posterior is the prior: records"
        with pytest.warns(UserWarning, match=words):
            again = fit({name: NAMED[name] for name in ("Helsinki", "Oulu")}, prior=prior)
        assert json.loads(again.posterior.attrs["prior_clients"]) == list(NAMED)
        with pytest.warns(UserWarning, match="^Turku took part"):  # in the study before the last
            fit({"Turku": NAMED["Turku"]}, prior=again.posterior.as_prior())

    @pytest.mark.slow
    def test_other_names_and_none_are_not(self):
        prior = fit(NAMED).posterior.as_prior()
        fit({"Vaasa": NAMED["Turku"]}, prior=prior)
        fit(prior=prior)
        fit(NAMED, prior=fit().posterior.as_prior())


@pytest.mark.parametrize("name", ["clients", "prior_clients", "ledger_runs"])
@pytest.mark.parametrize("text", ["[", "7", '{"a": 1}', "[1]"])
def test_files_from_elsewhere_may_hold_any_attributes(ledger, name, text):
    first = fit(NAMED).posterior
    attrs = {**first.attrs, "clients": "[]", name: text}
    prior = dppvi.posterior.Posterior(**{**vars(first), "attrs": attrs}).as_prior()
    fit(NAMED, prior=prior, ledger_file=ledger)
