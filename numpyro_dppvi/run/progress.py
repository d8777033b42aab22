"""The progress bar: round, clients, what was spent, and how far the posterior moved."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import dp_accounting as dpa
import numpy as np
from tqdm.auto import tqdm

from numpyro_dppvi import _validate
from numpyro_dppvi.privacy import Ledger, PrivacyPlan, accounting
from numpyro_dppvi.privacy.accounting import Composition

# The bar's accounting may take so much of the run's time. How long an accountant takes is not
# known before its first answer: a closed form is a matter of a millisecond, others take longer.
_SHARE_OF_TIME = 0.01
_CLOSED_FORM_SECONDS, _OTHER_SECONDS = 1e-3, 1.0


@contextlib.contextmanager
def progress(
    groups: Sequence[np.ndarray],
    first: int,
    plan: PrivacyPlan | None,
    spent: Ledger,
    num_clients: int,
    shown: bool | None,
    is_limit: bool = False,
) -> Iterator[Callable[[int, float], None]]:
    """Shows how a run goes.

    Args:
        groups: The clients that each round visits.
        first: Rounds that have run already.
        plan: The run's plan; ``None`` without privacy.
        spent: What the ledger holds already: of this run, and of others that share it.
        num_clients: Clients of the run.
        shown: Whether to show anything; ``None`` for: on a terminal or in a notebook.
        is_limit: Whether there may be fewer rounds, because the run ends when it has settled.

    Raises:
        TypeError: If ``shown`` is neither a flag nor ``None``.

    Yields:
        A function to be called after each round with its number, from 0, and its movement. It does
        nothing where nothing is shown.
    """
    by_itself = False if _in_notebook() else None  # tqdm's None: hidden but on a terminal
    hidden = by_itself if shown is None else not _validate.flag("progress_bar", shown)
    visits = [np.bincount(of_round.ravel(), minlength=num_clients) for of_round in groups]
    meter = _meter(plan, spent, num_clients)
    total = None if is_limit else len(groups)
    with tqdm(total=total, initial=first, desc="rounds", disable=hidden) as bar:

        def update(number: int, movement: float) -> None:
            # Accounting takes time, and nobody would see the answer.
            if bar.disable:
                return
            by_client = visits[number]
            facts = [f"{np.count_nonzero(by_client)} clients"]
            if meter is not None:
                facts.append(meter.read(number, by_client))
            facts.append(f"moved {movement:.3g} nats")
            bar.set_postfix_str(", ".join(facts), refresh=False)
            bar.update()

        yield update


def _in_notebook() -> bool:
    """Whether a Jupyter kernel runs this."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return hasattr(shell, "kernel")


@dataclass
class _Meter:
    """The largest epsilon of all clients so far, as fresh as the time for it allows."""

    plan: PrivacyPlan
    before: tuple[Composition, ...]
    visited: np.ndarray
    seconds_each: float
    start: float = field(default_factory=time.perf_counter)
    seconds: float = 0.0
    text: str = ""
    computed: int = -1

    def read(self, number: int, visits: np.ndarray) -> str:
        """The text to show after a round."""
        self.visited = self.visited + visits
        elapsed = time.perf_counter() - self.start
        # Asked only where the answer fits into its share of the time, by what the last one took.
        if self._is_known() or self.seconds + self.seconds_each <= _SHARE_OF_TIME * elapsed:
            before = time.perf_counter()
            self.text = f"epsilon {self._epsilon():.3g}"
            self.seconds_each = time.perf_counter() - before
            self.seconds += self.seconds_each
            self.computed = number
            return self.text
        return f"{self.text} after round {self.computed + 1}" if self.text else "epsilon to come"

    def _is_known(self) -> bool:
        """Whether all is spent that was planned, whose epsilon calibration has computed."""
        # The accountant's answers are cached, so that this one costs nothing.
        planned = [client.num_visits for client in self.plan.clients]
        return not any(self.before) and np.array_equal(self.visited, planned)

    def _epsilon(self) -> float:
        # Clients of equal plans and visits have one epsilon, which is computed once.
        kinds = set()
        clients = zip(self.plan.clients, self.before, self.visited.tolist(), strict=True)
        for client, before, visits in clients:
            mine = (client.mechanism.dp_event, visits * client.releases_per_visit)
            kinds.add((accounting.compose([*before, mine]), client.budget))
        return max(
            accounting.epsilon(composition, budget.delta, budget.relation)
            for composition, budget in kinds
        )


def _meter(plan: PrivacyPlan | None, spent: Ledger, num_clients: int) -> _Meter | None:
    if plan is None:
        return None
    # A Gaussian mechanism without sampling has a closed form.
    closed = all(isinstance(c.mechanism.dp_event, dpa.GaussianDpEvent) for c in plan.clients)
    return _Meter(
        plan,
        tuple(spent.composition(number) for number in range(num_clients)),
        np.zeros(num_clients, int),
        _CLOSED_FORM_SECONDS if closed else _OTHER_SECONDS,
    )
