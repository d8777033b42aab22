"""What budgets buy at best: how wide intervals must be, and for whom joining cannot pay.

The limit is that of one release with a whole budget, at the posterior's mode, of scores that are
clipped at the average score's length in coordinates in which the average record's information is
the identity. There a score has squared length d, the number of latents. So a client's sum gets
noise of variance v = d (c z)^2 on every entry, z being the noise multiplier and c how many records
one unit of protection can change, beside an information of n, the number of its records:

    width over the width without privacy = sqrt(1 + v / n),

for all clients together with the sum of their v over the sum of their n. Without privacy a client
alone is sqrt(N / n) as wide as all N records are. Joining can pay where it is wider than together:

    1 + V / N < N / n,  that is for R others' records  R (n + R) > n V.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from numpyro_dppvi.privacy import accounting, calibrate, units, words
from numpyro_dppvi.privacy.accounting import Composition
from numpyro_dppvi.privacy.budget import PrivacyBudget
from numpyro_dppvi.privacy.sampling import FullBatch


@dataclass(frozen=True)
class Worth:
    """What the clients' budgets buy at best. Widths are over those of all records without privacy.

    Attributes:
        num_latents: Numbers that the posterior is of.
        client_sizes: Records of each client.
        together: Intervals of all clients together are at least so wide.
        alone: So wide are those of each client by itself, without privacy.
        alone_private: At least so wide are those of each client by itself, under its budget.
        others_needed: How many records others would have to hold for joining to pay for a client.
        epsilon_needed: The epsilon that all clients would have to grant for joining to pay for a
            client; ``None`` if their budgets differ.
    """

    num_latents: int
    client_sizes: tuple[int, ...]
    together: float
    alone: tuple[float, ...]
    alone_private: tuple[float, ...]
    others_needed: tuple[int, ...]
    epsilon_needed: tuple[float, ...] | None

    @property
    def gainless(self) -> list[int]:
        """Numbers of the clients for whom joining cannot pay; all are alike if there is one."""
        several = len(self.alone) > 1
        return [m for m, width in enumerate(self.alone) if several and width <= self.together]


def worth(
    num_latents: int,
    budgets: Sequence[PrivacyBudget],
    client_sizes: Sequence[int],
    *,
    num_shares: int | None = None,
    before: Sequence[Composition] = (),
) -> Worth:
    """What budgets buy at best; reads no record, and refuses budgets of whole clients.

    With a trusted aggregator, ``num_shares`` clients' noise adds up to that of a sum. What was
    released ``before`` must have left something of each budget.
    """
    sizes = tuple(client_sizes)
    before = before or [frozenset()] * len(sizes)
    granted = list(zip(budgets, before, strict=True))
    changed = [units.records_changed(budget) for budget in budgets]
    # Noise on one release with all that is left of a budget, of records clipped at norm 1.
    multipliers = [calibrate.noise_multiplier(b, num_releases=1, before=s) for b, s in granted]
    # Variances over num_latents: of each client's sum, and of the sum of all of them.
    own = [(c * z) ** 2 for c, z in zip(changed, multipliers, strict=True)]
    all_own, times = sum(own), float(sum(c**2 for c in changed))
    if num_shares is not None:  # a share of the noise comes from everyone, whoever may drop out
        all_own = max(own) * len(own) / num_shares
        times = max(c**2 for c in changed) * len(own) / num_shares
    needed, total = None, sum(sizes)
    if len({*granted}) == 1:
        # From 1 + V / N < N / n with V = d times z^2, solved for the noise z.
        most = [math.sqrt(total * (total / n - 1) / (num_latents * times)) for n in sizes]
        needed = tuple(_epsilon(*granted[0], noise) for noise in most)
    variance = num_latents * all_own
    return Worth(
        num_latents=num_latents,
        client_sizes=sizes,
        together=math.sqrt(1 + variance / total),
        alone=tuple(math.sqrt(total / n) for n in sizes),
        alone_private=tuple(
            math.sqrt(total / n * (1 + num_latents * mine / n))
            for n, mine in zip(sizes, own, strict=True)
        ),
        # The least whole number above the positive root of R (n + R) = n V.
        others_needed=tuple(
            math.floor((math.sqrt(n**2 + 4 * n * variance) - n) / 2) + 1 for n in sizes
        ),
        epsilon_needed=needed,
    )


def of_client(bought: Worth, number: int) -> str:
    """The widths of a client's intervals by itself, without privacy and under its budget."""
    return f"{bought.alone[number]:.3g} / {_down(bought.alone_private[number])}"


def of_widths(bought: Worth) -> str:
    """A sentence on the least width of all clients' intervals."""
    return (
        f"intervals will be at least {_down(bought.together)} times as wide as those of all "
        f"{sum(bought.client_sizes)} records without privacy."
    )


def of_joining(bought: Worth, names: Sequence[str] = ()) -> str:
    """A sentence on whom joining cannot pay for, and when it could; empty for one client."""
    if len(bought.alone) == 1:
        return ""
    who = bought.gainless
    if not who:
        needs = bought.epsilon_needed or (0.0,)
        most = max(needs)
        if most == 0:  # as where delta alone promises no more
            return "joining can pay for every client."
        # The client that drops out first as epsilon falls; usually the largest.
        last = [m for m, epsilon in enumerate(needs) if epsilon == most]
        return (
            f"joining can pay for every client; below epsilon = {_down(most)} it could not for "
            f"{words.listed(last, names)}."
        )
    several = len(who) > 1
    # Whoever needs most decides: what makes joining pay there makes it pay for all others.
    lacking = max(who, key=bought.others_needed.__getitem__)
    held = sum(bought.client_sizes) - bought.client_sizes[lacking]
    needed = f"others with {bought.others_needed[lacking]} records and not {held}"
    if bought.epsilon_needed is not None:
        epsilon = _down(max(bought.epsilon_needed[m] for m in who))
        needed = f"epsilon = {epsilon}, or {needed}"
    return (
        f"joining cannot pay for {words.listed(who, names)}: alone and without privacy "
        f"{'their' if several else 'its'} intervals would be no wider. At least {needed}, "
        f"{'would be needed for all of them' if several else 'would be needed'}."
    )


def _epsilon(budget: PrivacyBudget, before: Composition, noise: float) -> float:
    """What one release costs, with what was released before."""
    if noise == 0:
        return math.inf
    event = FullBatch().dp_event(noise, 1, 1)
    return accounting.epsilon(
        accounting.compose([*before, (event, 1)]), budget.delta, budget.relation
    )


def _down(value: float) -> str:
    """Three digits, rounded down, because it is a lower limit."""
    if not 0 < value < math.inf:
        return f"{value:g}"
    unit = 10.0 ** (math.floor(math.log10(value)) - 2)
    return f"{math.floor(value / unit * (1 + 1e-12)) * unit:.3g}"
