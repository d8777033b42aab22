"""A process that charges a ledger file, releases, and is killed on the way: see test_ledger_file.

    python killed.py FOLDER fit|charges

For every place in a round a run is started that kills itself there, with signal 9, and then one
that goes on where it was until its budget refuses. A release is written down as soon as it begins.
"""

import os
import signal
import sys
import warnings
from pathlib import Path

import dp_accounting as dpa

from numpyro_dppvi.privacy import BudgetExceededError, Entry, Ledger, LedgerFile, PrivacyBudget
from numpyro_dppvi.privacy import ledger_file as module
from numpyro_dppvi.protocol import rounds

BUDGETS = (PrivacyBudget(1.0), PrivacyBudget(1.0))
EVENT = dpa.GaussianDpEvent(20.0)  # five of them fit the budget
NUM_RELEASES = 2
AT_VISIT = 3  # opening the file passes some places, too: killed in the second or third round


class Place:
    """Kills the process when it reaches a place for the third time."""

    def __init__(self, name):
        self.name = name
        self.visits = 0

    def reached(self, name):
        if name == self.name:
            self.visits += 1
            if self.visits == AT_VISIT:
                os.kill(os.getpid(), signal.SIGKILL)


def watch(place, folder):
    """Lets a run pass through places where it may be killed."""
    fsync, encoded, charge, run = os.fsync, module._encoded, LedgerFile.charge, rounds.run_round

    def synced(number):
        place.reached("written, not synced")
        fsync(number)

    def half_written(entries, check):
        data, check = encoded(entries, check)
        if place.name == "half written" and place.visits == AT_VISIT - 1:
            with open(folder / "ledger", "ab") as file:
                file.write(data[: len(data) * 2 // 3])
        place.reached("half written")
        return data, check

    def charged(self, ledger, entries):
        place.reached("not charged")
        ledger = charge(self, ledger, entries)
        place.reached("charged")
        return ledger

    def released(*arguments):
        begin(folder)
        place.reached("releasing")
        out = run(*arguments)
        place.reached("released")
        return out

    os.fsync, module._encoded = synced, half_written
    LedgerFile.charge, rounds.run_round = charged, released


def begin(folder):
    """Writes down that a round releases something."""
    with open(folder / "released", "a") as file:
        file.write(f"{NUM_RELEASES}\n")


PLACES = (
    "not charged",
    "half written",
    "written, not synced",
    "charged",
    "releasing",
    "released",
)


def charges(folder):
    """The ledger's part of a run, without the computations."""
    file = LedgerFile(folder / "ledger")
    ledger = file.open(Ledger(BUDGETS))
    for number in range(100):
        new = [Entry(number, client, EVENT, NUM_RELEASES) for client in range(len(BUDGETS))]
        ledger = file.charge(ledger, new)
        rounds.run_round()


def fit(folder):
    """A whole run, on a plan for three rounds."""
    import jax
    import numpy as np
    import numpyro
    import numpyro.distributions as dist

    import numpyro_dppvi as dppvi

    def normal_mean(y):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with numpyro.plate("records", y.shape[0]):
            numpyro.sample("y", dist.Normal(mu, 1), obs=y)

    dppvi.fit(
        normal_mean,
        None,
        {"y": np.linspace(-1, 1, 10)},
        rng_key=jax.random.key(0),
        clients=2,
        method=dppvi.DPOptimization(num_local_steps=NUM_RELEASES),
        budget=BUDGETS,
        num_rounds=3,
        progress_bar=False,
        ledger_file=folder / "ledger",
    )
    raise BudgetExceededError  # the plan has been carried out


def child(run, folder, place):
    """Runs to the end in a process of its own; the signal that ended it."""
    number = os.fork()
    if number:
        return os.WTERMSIG(os.waitpid(number, 0)[1])
    if run is charges:
        rounds.run_round = lambda: None
    watch(Place(place), folder)
    try:
        run(folder)
    except BudgetExceededError:
        os._exit(0)
    os._exit(1)


def main():
    warnings.simplefilter("ignore")  # that os.fork is called: no thread has been started yet
    folder, run = Path(sys.argv[1]), {"fit": fit, "charges": charges}[sys.argv[2]]
    places = sys.argv[3:] or PLACES
    for place in places:
        inside = folder / place
        inside.mkdir()
        signals = [child(run, inside, place), child(run, inside, None)]
        sys.stdout.write("\t".join([place, *map(str, signals)]) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
