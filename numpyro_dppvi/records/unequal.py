"""The paper's scheme for simulating clients of unequal sizes and class balance."""

import math
import numbers
from fractions import Fraction
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from numpyro_dppvi import _validate
from numpyro_dppvi.records.clients import (
    Partition,
    Rows,
    check_counts,
    distinct,
    host_generator,
    label_column,
)


def partition(
    rng_key: jax.Array,
    labels_or_num_rows: npt.ArrayLike,
    num_clients: int,
    size_factor: float = 0.0,
    class_balance_factor: float = 0.0,
) -> Partition:
    """Distribute rows over small and large clients with different classes, as in the paper.

    Half of the `num_clients` clients (M) are small and come first; the others are large
    (Heikkilä et al. 2023, appendix "experimental details"). For n rows, size factor rho and
    class-balance factor kappa,

        n_small = floor(n / M * (1 - rho)),    n_large = floor(n / M * (1 + rho)),
        lambda_small = lambda + (1 - lambda) * kappa,

    where lambda is the fraction of the most frequent label (the first in sorted order, if several
    are equally frequent). Every small client gets `floor(n_small * lambda_small)` rows of that
    majority class and otherwise rows of other classes; large clients get a random mix of what
    remains. Each client's rows are in random order.

    Rows left over by rounding down are dropped, as in the paper: of 24 421 rows, ten clients hold
    2442 each and one row is not used. `split_evenly` drops none.

    Labels are for simulations only: partitioning by class reads the labels of all clients at once,
    which no privacy statement covers.

    Args:
        rng_key: A JAX key. The same key, and NumPy version, give the same partition.
        labels_or_num_rows: The class of every row, shape `(num_rows,)`; or the number of rows,
            to ignore classes.
        num_clients: The number of clients, M; even, unless both factors are zero.
        size_factor: rho in [0, 1). At 0, clients have equal sizes; towards 1, small ones vanish.
        class_balance_factor: kappa in [-lambda / (1 - lambda), 1]. At 0, small clients have the
            overall fraction of the majority class, at 1 only that class, at the lower end none.

    Returns:
        The partition, small clients first.

    Raises:
        ValueError: If there are more clients than rows, a factor is out of range, the number of
            unequal clients is odd, or a class has too few rows.
        TypeError: If `rng_key` is not a JAX key.

    Example:
        >>> partition(jax.random.key(0), 1000, 4, size_factor=0.5).sizes
        (125, 125, 375, 375)
    """
    is_number = isinstance(labels_or_num_rows, (numbers.Number, np.generic))
    labels = None if is_number else label_column(labels_or_num_rows)
    num_rows: Any = labels_or_num_rows if labels is None else len(labels)
    check_counts(num_rows, num_clients)
    size_factor = _validate.finite("size_factor", size_factor, "0.75")
    class_balance_factor = _validate.finite("class_balance_factor", class_balance_factor, "0.95")
    _check_factors(num_clients, size_factor, class_balance_factor, labels is not None)

    num_small = num_clients // 2
    # In fractions, because floor(...) of a float that should be whole may be one row short.
    per_client, rho = Fraction(num_rows, num_clients), _as_written(size_factor)
    small_size = math.floor(per_client * (1 - rho))
    large_size = math.floor(per_client * (1 + rho))
    # n / M (1 - rho) >= 1 as long as rho <= 1 - M / n, which the message rounds down.
    if small_size == 0:
        raise ValueError(
            f"size_factor must leave small clients a row, got {size_factor} with {num_rows} rows "
            f"for {num_clients} clients: write size_factor="
            f"{math.floor((1 - 1 / per_client) * 1000) / 1000:g}, say, or fewer clients."
        )

    generator = host_generator(rng_key)
    if labels is None:
        # Small clients take the first rows of one shuffle, large ones what is left.
        shuffled = generator.permutation(num_rows)
        small = shuffled[: num_small * small_size].reshape(num_small, small_size)
        rest = shuffled[num_small * small_size :]
    else:
        small, rest = _deal_by_class(generator, labels, num_small, small_size, class_balance_factor)
    num_large = num_clients - num_small
    large = rest[: num_large * large_size].reshape(num_large, large_size)
    return Partition((*small, *large))


def _deal_by_class(
    generator: np.random.Generator,
    labels: npt.NDArray[Any],
    num_small: int,
    small_size: int,
    class_balance_factor: float,
) -> tuple[Rows, Rows]:
    """Distribute the small clients' rows class by class.

    Returns these, shape `(num_small, small_size)`, and all other rows in random order.
    """
    values, class_of_row = distinct(labels)
    # argmax takes the first of several maxima, which breaks ties (as in the MIMIC-III data).
    is_majority = class_of_row == np.argmax(np.bincount(class_of_row))
    majority = generator.permutation(np.flatnonzero(is_majority))
    others = generator.permutation(np.flatnonzero(~is_majority))

    fraction = _small_majority_fraction(len(majority), len(labels), class_balance_factor)
    small_majority = math.floor(small_size * fraction)
    small_others = small_size - small_majority
    small, rest = [], []
    for rows, per_client, name in (
        (majority, small_majority, f"the majority class, {values[class_of_row[majority[0]]]!s},"),
        (others, small_others, "the other classes"),
    ):
        dealt = num_small * per_client
        if dealt > len(rows):
            raise ValueError(
                f"small clients must not need more rows of {name} than there are, got {len(rows)} "
                f"rows for {num_small} clients × {per_client} = {dealt}: write a "
                f"class_balance_factor nearer to 0 than {class_balance_factor}, a larger "
                "size_factor, or the number of rows instead of labels."
            )
        # Of each class a block a client; every row is dealt once.
        small.append(rows[:dealt].reshape(num_small, per_client))
        rest.append(rows[dealt:])
    # Shuffled within clients, too, so that shards of consecutive rows do not hold one class each.
    mixed = generator.permuted(np.concatenate(small, axis=1), axis=1)
    return mixed, generator.permutation(np.concatenate(rest))


def _small_majority_fraction(
    num_majority: int, num_rows: int, class_balance_factor: float
) -> Fraction:
    """Return lambda + (1 - lambda) * kappa, the small clients' fraction of the majority class."""
    if num_majority == num_rows and class_balance_factor != 0:
        raise ValueError(
            f"class_balance_factor must be 0 where all labels are equal, got "
            f"{class_balance_factor}: write class_balance_factor=0."
        )
    overall = Fraction(num_majority, num_rows)
    fraction = overall + (1 - overall) * _as_written(class_balance_factor)
    # The lower end is rarely a round decimal, so rounding errors there are tolerated and removed.
    if not -Fraction(1, 10**9) <= fraction <= 1:
        lowest = float(-overall / (1 - overall))
        raise ValueError(
            f"class_balance_factor must lie between {lowest:.4g} and 1 where the majority class "
            f"has {num_majority} of {num_rows} rows, got {class_balance_factor}: "
            "write class_balance_factor=0.95, say."
        )
    return max(fraction, Fraction(0))


def _as_written(number: float) -> Fraction:
    """Convert a float to the decimal fraction that the user wrote."""
    # In binary, 10 * (1 - 0.9) is slightly less than 1, and rounding down would give no row at all.
    return Fraction(repr(float(number)))


def _check_factors(
    num_clients: int, size_factor: float, class_balance_factor: float, has_labels: bool
) -> None:
    if not 0 <= size_factor < 1:
        raise ValueError(
            f"size_factor must lie in [0, 1), got {size_factor}: write size_factor=0.75, say, or 0 "
            "for clients of equal size."
        )
    if class_balance_factor != 0 and not has_labels:
        raise ValueError(
            f"class_balance_factor must be 0 without labels, got {class_balance_factor} with a "
            "number of rows: write partition(rng_key, labels, ...), with one label per row."
        )
    # Without unequal clients an odd number will do: all of them are alike.
    if num_clients % 2 == 1 and (size_factor != 0 or class_balance_factor != 0):
        raise ValueError(
            f"num_clients must be even to have a small and a large half, got {num_clients} with "
            f"size_factor={size_factor} and class_balance_factor={class_balance_factor}: write "
            f"num_clients={num_clients + 1}, or 0 for both factors."
        )
