"""The progress bar says what a round did and cost, and stays silent where nobody looks."""

import functools
import io
import re
import sys

import nbformat
import pytest
from nbclient import NotebookClient

import numpyro_dppvi as dppvi
from numpyro_dppvi.privacy import accounting
from numpyro_dppvi.protocol import planning
from numpyro_dppvi.run import progress as module

NUM_ROUNDS, NUM_CLIENTS = 4, 3
RUN = planning.resolve(
    dppvi.DPOptimization(),
    num_clients=NUM_CLIENTS,
    schedule=dppvi.synchronous,
    num_rounds=NUM_ROUNDS,
    trusted_aggregator=False,
)
BUDGETS = [dppvi.PrivacyBudget(epsilon) for epsilon in (1.0, 2.0, 1.5)]
PLAN = dppvi.plan_privacy(
    dppvi.DPOptimization(),
    BUDGETS,
    num_rounds=NUM_ROUNDS,
    client_sizes=[100] * NUM_CLIENTS,
    schedule=dppvi.synchronous,
)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def ledger_after(num_rounds, plan=PLAN):
    ledger = plan.ledger() if plan else dppvi.privacy.Ledger()
    for number in range(num_rounds):
        ledger = ledger.charge(
            dppvi.privacy.Entry(number, m, client.mechanism.dp_event, client.releases_per_visit)
            for m, client in enumerate(plan.clients)
        )
    return ledger


def show(monkeypatch, shown, stream=io.StringIO, plan=PLAN, first=0, spent=None):
    """What is written while rounds go by."""
    written = stream()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", written)
        spent = ledger_after(first, plan) if spent is None else spent
        patch.setattr(module, "tqdm", functools.partial(module.tqdm, mininterval=0))
        with module.progress(RUN, first, plan, spent, shown) as update:
            for number in range(first, NUM_ROUNDS):
                update(number, 1.25 / (number + 1))
    return written.getvalue()


@pytest.mark.parametrize(
    ("shown", "stream", "visible"),
    [
        (None, io.StringIO, False),
        (None, Terminal, True),
        (True, io.StringIO, True),
        (True, Terminal, True),
        (False, io.StringIO, False),
        (False, Terminal, False),
    ],
)
def test_it_is_shown_on_a_terminal_or_where_it_is_asked_for(monkeypatch, shown, stream, visible):
    assert bool(show(monkeypatch, shown, stream)) == visible


def test_it_says_what_a_round_did(monkeypatch):
    last = show(monkeypatch, True).strip().split("\r")[-1]
    assert "rounds: 100%" in last
    assert "4/4" in last
    assert "3 clients, epsilon 2, moved 0.312 nats" in last


def test_where_nothing_is_shown_nothing_is_computed(monkeypatch):
    def never(*args):
        raise AssertionError

    monkeypatch.setattr(accounting, "epsilon", never)
    show(monkeypatch, False)
    with pytest.raises(AssertionError):
        show(monkeypatch, True)


def test_it_goes_on_where_a_checkpoint_was(monkeypatch):
    written = show(monkeypatch, True, first=3)
    assert "75%" in written
    assert "4/4" in written
    assert "epsilon 2," in written


def test_without_privacy_there_is_no_epsilon(monkeypatch):
    written = show(monkeypatch, True, plan=None)
    assert "3 clients, moved" in written
    assert "epsilon" not in written


def test_epsilon_is_the_largest_of_the_ledger(monkeypatch):
    written = show(monkeypatch, True)
    shown = [float(e) for e in re.findall(r"epsilon ([\d.]+),", written)]
    spent = [float(f"{ledger_after(n).spent().max():.3g}") for n in range(1, NUM_ROUNDS + 1)]
    assert list(dict.fromkeys(shown)) == spent  # the last one is drawn twice


def test_what_other_runs_have_spent_counts(monkeypatch):
    written = show(monkeypatch, True, spent=ledger_after(2), first=0)
    # Two rounds of another run and one of this one have cost what three rounds cost.
    first = re.search(r"epsilon ([\d.]+),", written)[1]
    assert float(first) == float(f"{ledger_after(3).spent().max():.3g}")


@pytest.mark.parametrize("most", ["clients", "sampled"])
def test_an_epsilon_that_takes_time_is_not_shown(monkeypatch, most):
    plan = PLAN
    if most == "clients":
        monkeypatch.setattr(module, "_MOST_CLIENTS", NUM_CLIENTS - 1)
    else:
        method = dppvi.DPOptimization(sampler=dppvi.PoissonSampling(0.1))
        plan = dppvi.plan_privacy(
            method, BUDGETS, num_rounds=NUM_ROUNDS, client_sizes=[100] * NUM_CLIENTS
        )
    monkeypatch.setattr(accounting, "epsilon", None)
    written = show(monkeypatch, True, plan=plan)
    assert "3 clients, moved" in written
    assert "epsilon" not in written


NOTEBOOK = """
import numpyro_dppvi as dppvi
from numpyro_dppvi.protocol import planning
from numpyro_dppvi.run.progress import progress
method, schedule = dppvi.NonPrivate(), dppvi.sequential
clients = {"num_clients": 1, "trusted_aggregator": False}
run = planning.resolve(method, schedule=schedule, num_rounds=2, **clients)
with progress(run, 0, None, dppvi.privacy.Ledger(()), SHOWN) as update:
    for number in range(2):
        update(number, 0.5)
"""


@pytest.mark.slow
@pytest.mark.parametrize("shown", [None, True, False])
def test_a_notebook_shows_the_bar(shown):
    """With widgets or without."""
    cell = nbformat.v4.new_code_cell(NOTEBOOK.replace("SHOWN", str(shown)))
    ran = NotebookClient(nbformat.v4.new_notebook(cells=[cell]), kernel_name="python3").execute()
    outputs = ran.cells[0].outputs
    text = "".join(output.get("text", "") for output in outputs)
    is_widget = any("widget-view" in kind for o in outputs for kind in o.get("data", {}))
    assert (is_widget or "rounds: 100%" in text) == (shown is not False)
