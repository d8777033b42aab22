"""Schedules: which clients a round visits, and which of them start from the same approximation.

A schedule is a function of the round's number and the number of clients. It returns whole numbers
of shape ``(num_groups, group_size)``: groups are visited one after the other; the clients of a
group start from the same approximation, and their changes are merged together.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from numpyro_dppvi import _validate

Schedule: TypeAlias = Callable[[int, int], np.ndarray]

# A slip of the hand, and not a run, asks for more; each of them is planned before the first.
MOST_ROUNDS = 1_000_000
_MOST_SEED = 2**128


def sequential(round_number: int, num_clients: int) -> np.ndarray:
    """Every client in turn, each starting from what the one before it left.

    Args:
        round_number: The round, from 0; every one is the same.
        num_clients: How many clients there are, M.

    Returns:
        Groups of one client, shape ``(M, 1)``.

    Example:
        >>> sequential(0, 3).tolist()
        [[0], [1], [2]]
    """
    _check_round(round_number, num_clients)
    return np.arange(num_clients)[:, None]


def synchronous(round_number: int, num_clients: int) -> np.ndarray:
    """All clients at once, from the same approximation.

    Args:
        round_number: The round, from 0; every one is the same.
        num_clients: How many clients there are, M.

    Returns:
        One group, shape ``(1, M)``.

    Example:
        >>> synchronous(0, 3).tolist()
        [[0, 1, 2]]
    """
    _check_round(round_number, num_clients)
    return np.arange(num_clients)[None, :]


def random_subset(group_size: int, seed: int = 0) -> Schedule:
    """Every round one group of ``group_size`` clients, drawn at random by a public seed.

    Whose turn it is is public, so nothing is saved on privacy by it.

    Args:
        group_size: Clients a round, at most as many as there are.
        seed: Public; the same seed draws the same groups.

    Raises:
        ValueError: If the size is not a whole number of at least 1, or, when a round is asked
            for, larger than the number of clients.

    Example:
        >>> random_subset(2)(0, 5).shape
        (1, 2)
    """
    group_size = _validate.positive_int("group_size", group_size)
    seed = _validate.not_negative_int("seed", seed, _MOST_SEED)

    def schedule(round_number: int, num_clients: int) -> np.ndarray:
        if group_size > num_clients:
            raise ValueError(
                f"group_size must be at most the number of clients, got {group_size} for "
                f"{num_clients} clients."
            )
        # A function of the round's number alone, so that a run that goes on from a checkpoint
        # visits the clients that it would have visited.
        rng = np.random.default_rng((seed, round_number))
        return rng.choice(num_clients, (1, group_size), replace=False)

    return schedule


@dataclass(frozen=True)
class Asynchronous:
    """Clients work at their own pace; changes are merged as they come, on whatever q is by then.

    A simulation with given latencies: client m's k-th message arrives at k times its latency.
    Each visit starts from the q that the client pulled when it sent its message before. A round
    is as many messages as there are clients.

    Args:
        latencies: Time that each client takes for a visit, in any unit; above 0.

    Raises:
        ValueError: If a latency is not above 0.
        TypeError: If there is no sequence of them.

    Example:
        >>> Asynchronous(latencies=(1.0, 3.0))(0, 2).tolist()  # the fast client twice
        [[0], [0]]
    """

    latencies: tuple[float, ...]

    def __post_init__(self) -> None:
        each = _validate.entries("latencies", self.latencies, "(1.0, 2.0)")
        checked = tuple(_validate.positive("latencies", latency) for latency in each)
        object.__setattr__(self, "latencies", checked)

    def __call__(self, round_number: int, num_clients: int) -> np.ndarray:
        """The clients whose messages arrive in this round, in their order; shape (M, 1)."""
        _check_round(round_number, num_clients)
        if len(self.latencies) != num_clients:
            raise ValueError(
                f"latencies must be one per client, got {len(self.latencies)} for {num_clients} "
                "clients."
            )
        first, last = round_number * num_clients, (round_number + 1) * num_clients
        # A round is M arrivals, whoever they come from. Client m's k-th message arrives at k times
        # its latency. Even the fastest client alone sends no more than `last` by the round's end.
        # Row k holds the clients' k-th messages, so that the remainder by M is the client. Messages
        # that arrive together keep this order, so that rounds are pieces of one sequence.
        arrivals = np.outer(np.arange(1, last + 1), self.latencies).ravel()
        order = np.argsort(arrivals, kind="stable")[first:last]
        return (order % num_clients)[:, None]


def _check_round(round_number: int, num_clients: int) -> None:
    _validate.not_negative_int("round_number", round_number)
    _validate.positive_int("num_clients", num_clients)


# Not compared: arrays that are equal have no one truth value.
@dataclass(frozen=True, eq=False)
class Planned:
    """A schedule that was asked once a round, so that what was planned is what runs.

    A schedule may draw from a generator of its own and answer otherwise the next time.
    """

    schedule: Schedule
    groups: tuple[np.ndarray, ...]

    def __call__(self, round_number: int, num_clients: int) -> np.ndarray:
        """The groups of a round."""
        return self.groups[round_number]


def starts_from_pulled(schedule: Schedule) -> bool:
    """Whether clients start from the q that they pulled last."""
    # ``fit`` wraps the schedule that was asked for in ``Planned``.
    return isinstance(getattr(schedule, "schedule", schedule), Asynchronous)


def num_visits(groups: Sequence[np.ndarray], num_clients: int) -> np.ndarray:
    """How often each client is visited in all rounds, shape ``(num_clients,)``."""
    visits = np.zeros(num_clients, int)
    for of_round in groups:
        visits += np.bincount(of_round.ravel(), minlength=num_clients)
    return visits


def all_groups(schedule: Schedule, num_rounds: int, num_clients: int) -> tuple[np.ndarray, ...]:
    """The groups of every round, checked; asks the schedule once a round."""
    check_kind(schedule)
    return tuple(check(schedule(r, num_clients), num_clients) for r in range(num_rounds))


def check_kind(schedule: Schedule) -> None:
    """Refuses what is no function of a round's number and the number of clients."""
    _validate.function("schedule", schedule, ("round", "num_clients"), "numpyro_dppvi.sequential")


def check(groups: np.ndarray, num_clients: int) -> np.ndarray:
    """Returns a copy of a round's groups, or refuses them in a sentence."""
    # A copy, because a schedule may write all its answers into one array.
    try:
        groups = np.array(groups)
    except ValueError:
        raise ValueError(
            "a schedule must return groups of one size, got groups of unequal length: visit the "
            "larger ones in several rounds, or see numpyro_dppvi.sequential."
        ) from None
    except TypeError:  # keys, or arrays inside a JAX transformation
        raise TypeError(
            "a schedule must return whole numbers of shape (num_groups, group_size), got "
            f"{_validate.shown(groups)}: see numpyro_dppvi.sequential."
        ) from None
    whole = np.issubdtype(groups.dtype, np.integer)
    if groups.ndim != 2 or groups.size == 0 or not whole:
        raise ValueError(
            "a schedule must return whole numbers of shape (num_groups, group_size), got an "
            f"array of {groups.dtype} of shape {groups.shape}: see numpyro_dppvi.sequential."
        )
    if groups.min() < 0 or groups.max() >= num_clients:
        wrong = groups.max() if groups.max() >= num_clients else groups.min()
        raise ValueError(
            f"the schedule names client {wrong}, but there are {num_clients} clients: number "
            f"them 0 to {num_clients - 1}."
        )
    # Visits of one group share all that their secret keys are made of but the client. Twice in a
    # group a client would release twice with the same noise, and the difference of the releases
    # would have none.
    for group in groups.tolist():
        if len(set(group)) < len(group):
            twice = [client for client in group if group.count(client) > 1]
            raise ValueError(
                f"the schedule names client {twice[0]} twice in one group: put the visits in two "
                "groups."
            )
    return groups
