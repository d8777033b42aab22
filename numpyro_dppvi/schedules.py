"""Schedules: which clients a round visits, and which of them start from the same approximation.

A schedule is a function of the round's number and the number of clients. It returns whole numbers
of shape ``(num_groups, group_size)``: groups are visited one after the other; the clients of a
group start from the same approximation, and their changes are merged together.
"""

from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from numpyro_dppvi import _validate

Schedule: TypeAlias = Callable[[int, int], np.ndarray]


def sequential(round_number: int, num_clients: int) -> np.ndarray:
    """Every client in turn, each starting from what the one before it left; shape (M, 1)."""
    del round_number
    return np.arange(num_clients)[:, None]


def synchronous(round_number: int, num_clients: int) -> np.ndarray:
    """All clients at once, from the same approximation; shape (1, M)."""
    del round_number
    return np.arange(num_clients)[None, :]


def num_visits(schedule: Schedule, num_rounds: int, num_clients: int) -> np.ndarray:
    """How often each client is visited in all, shape ``(num_clients,)``.

    Raises:
        ValueError: If the schedule names a client that does not exist, or one twice in a group.
        TypeError: If the schedule is no function.
    """
    if not callable(schedule):
        raise TypeError(
            f"schedule must be a function of the round and the number of clients, got "
            f"{_validate.shown(schedule)}: write schedule=numpyro_dppvi.sequential."
        )
    visits = np.zeros(num_clients, int)
    for round_number in range(num_rounds):
        groups = check(schedule(round_number, num_clients), num_clients)
        np.add.at(visits, groups.ravel(), 1)
    return visits


def check(groups: np.ndarray, num_clients: int) -> np.ndarray:
    """Returns a round's groups, or refuses them in a sentence."""
    try:
        groups = np.asarray(groups)
    except ValueError:
        raise ValueError(
            "a schedule must return groups of one size, got groups of unequal length: visit the "
            "larger ones in several rounds, or see numpyro_dppvi.sequential."
        ) from None
    if groups.ndim != 2 or groups.size == 0 or not np.issubdtype(groups.dtype, np.integer):
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
    for group in groups.tolist():
        twice = [client for client in group if group.count(client) > 1]
        if twice:
            raise ValueError(
                f"the schedule names client {twice[0]} twice in one group: put the visits in two "
                "groups."
            )
    return groups
