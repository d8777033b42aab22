"""The progress bar: round, clients, what was spent, and how far the posterior moved."""

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from tqdm.auto import tqdm

from numpyro_dppvi import _validate
from numpyro_dppvi.privacy import Ledger, PrivacyPlan, accounting
from numpyro_dppvi.privacy.accounting import Composition
from numpyro_dppvi.protocol.planning import RunSpec

# With more clients than this, the bar shows no epsilon.
_MOST_CLIENTS = 100


@contextlib.contextmanager
def progress(
    run: RunSpec, first: int, plan: PrivacyPlan | None, spent: Ledger, shown: bool | None
) -> Iterator[Callable[[int, float], None]]:
    """Shows how a run goes: yields what to call after each round with its number and movement.

    ``first`` rounds have run already, and the ledger holds what this run and others that share it
    have ``spent``. Where a run ends when it has settled, rounds have no total. ``shown`` says
    whether to show anything; ``None`` for: on a terminal or in a notebook.
    """
    by_itself = False if _in_notebook() else None  # tqdm's None: hidden but on a terminal
    hidden = by_itself if shown is None else not _validate.flag("progress_bar", shown)
    by_round = [np.bincount(of_round.ravel(), minlength=run.num_clients) for of_round in run.groups]
    before = [spent.composition(number) for number in range(run.num_clients)]
    visits = np.zeros(run.num_clients, int)  # in this call
    total = None if run.until_settled else len(run.groups)
    with tqdm(total=total, initial=first, desc="rounds", disable=hidden) as bar:

        def update(number: int, movement: float) -> None:
            # Accounting takes time, and nobody would see the answer.
            if bar.disable:
                return
            nonlocal visits
            visits = visits + by_round[number]
            cost = None if plan is None else _spent(plan, before, visits)
            facts = [f"{np.count_nonzero(by_round[number])} clients", cost]
            said = [fact for fact in (*facts, f"moved {movement:.3g} nats") if fact]
            bar.set_postfix_str(", ".join(said), refresh=False)
            bar.update()

        yield update


def _in_notebook() -> bool:
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return hasattr(shell, "kernel")


def _spent(plan: PrivacyPlan, before: Sequence[Composition], visits: np.ndarray) -> str | None:
    """The largest epsilon of all clients so far, where that is known in milliseconds."""
    if len(before) > _MOST_CLIENTS:
        return None
    kinds = {  # clients of equal plans and visits have one epsilon
        (
            accounting.compose([*others, (mine.mechanism.dp_event, n * mine.releases_per_visit)]),
            mine.budget,
        )
        for others, mine, n in zip(before, plan.clients, visits.tolist(), strict=True)
    }
    # A closed form takes a millisecond; other accountants can take longer than a round.
    if not all(accounting.is_gaussian(composition) for composition, _ in kinds):
        return None
    most = max(accounting.epsilon(c, budget.delta, budget.relation) for c, budget in kinds)
    return f"epsilon {most:.3g}"
