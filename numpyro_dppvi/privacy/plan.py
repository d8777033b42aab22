"""The privacy plan: what will be released and what it will cost, before any data is read."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from numpyro_dppvi import _validate
from numpyro_dppvi.privacy import accounting, calibrate, units, words
from numpyro_dppvi.privacy.accounting import Composition
from numpyro_dppvi.privacy.budget import PrivacyBudget
from numpyro_dppvi.privacy.ledger import BudgetExceededError, Ledger
from numpyro_dppvi.privacy.meaning import Attack, best_attack
from numpyro_dppvi.privacy.mechanisms import GaussianShardSum, GaussianSum, Mechanism
from numpyro_dppvi.privacy.noise_laws import DiscreteGaussian, Gaussian, Noise
from numpyro_dppvi.privacy.sampling import FullBatch, Sampler


@dataclass(frozen=True)
class ClientPlan:
    """What one client is going to release.

    Attributes:
        budget: The promise.
        mechanism: The mechanism, with calibrated noise.
        num_visits: How often the schedule calls on the client.
        releases_per_visit: Noisy sums a visit.
        before: What other runs on the same ledger file had released when this one was planned. The
            budget covers it, too.

    Raises:
        ValueError: If the mechanism does not protect the budget's unit.
    """

    budget: PrivacyBudget
    mechanism: Mechanism
    num_visits: int
    releases_per_visit: int
    before: Composition = field(default=frozenset(), repr=False)

    def __post_init__(self) -> None:
        self.mechanism.check(self.budget)

    @property
    def num_releases(self) -> int:
        """Noisy sums in all."""
        return self.num_visits * self.releases_per_visit

    @property
    def composition(self) -> Composition:
        """Everything the client will have released, what it had before this run among it."""
        return accounting.compose([*self.before, (self.mechanism.dp_event, self.num_releases)])

    @property
    def epsilon_before(self) -> float:
        """What other runs had cost before this one, at the budget's delta."""
        return accounting.epsilon(self.before, self.budget.delta, self.budget.relation)

    @property
    def epsilon(self) -> float:
        """What it costs at the budget's delta; at most the budget's epsilon."""
        return accounting.epsilon(self.composition, self.budget.delta, self.budget.relation)

    @property
    def epsilon_to_participant(self) -> float:
        """The same against another client whose noise is a share of the sums' noise."""
        return accounting.epsilon_to_participant(
            self.composition,
            self.budget.delta,
            self.budget.relation,
            self.mechanism.num_shares,
        )

    @property
    def attack(self) -> Attack:
        """The best attack on everything that the client will have released."""
        return best_attack(self.composition, self.budget.relation)


@dataclass(frozen=True)
class PrivacyPlan:
    """One :class:`ClientPlan` a client; prints as a table. Holds nothing computed from records."""

    clients: tuple[ClientPlan, ...]

    @property
    def epsilons(self) -> np.ndarray:
        """Epsilon of each client at its own delta, shape ``(num_clients,)``."""
        return np.array([client.epsilon for client in self.clients])

    @property
    def unit(self) -> str:
        """What is protected, in words."""
        return ", ".join(sorted({f"one {units.in_words(c.budget)}" for c in self.clients}))

    @property
    def noise_std(self) -> np.ndarray:
        """Noise that each client adds to every entry it releases, shape ``(num_clients,)``."""
        return np.array([client.mechanism.share_std for client in self.clients])

    @property
    def physical_size(self) -> int:
        """Rows of a padded batch; 0 where no batches are drawn."""
        mechanism = self.clients[0].mechanism
        return mechanism.physical_size if isinstance(mechanism, GaussianSum) else 0

    def ledger(self) -> Ledger:
        """An empty ledger that holds the plan's budgets."""
        return Ledger(
            budgets=tuple(client.budget for client in self.clients),
            affordable=tuple(client.composition for client in self.clients),
        )

    def __str__(self) -> str:
        """A table with one line for each run of equal clients, and what it means."""
        attacks = [client.attack for client in self.clients]
        worst = max(range(len(attacks)), key=lambda m: attacks[m].true_positive_rate)
        meaning = words.in_other_words(worst, self.clients[worst].budget, attacks[worst])
        title = "Privacy plan (nothing has been read yet)"
        lines = [line for said in [*self._known(), meaning] for line in words.paragraph(said)]
        return "\n".join([title, *table(self.clients), *lines])

    def _known(self) -> list[str]:
        """What somebody knows before any release, where the table alone would not suggest it."""
        said = []
        relations = [client.budget.relation for client in self.clients]
        if "add_or_remove_one" in relations:
            said.append(f"The unit is {self.unit}; {words.neighbours(relations)}.")
        shares = self.clients[0].mechanism.num_shares
        if shares > 1:
            most = max(client.epsilon_to_participant for client in self.clients)
            delta = max(client.budget.delta for client in self.clients)
            said.append(words.to_participants(self.unit, shares, most, delta))
        return [*said, self.before_in_words]

    @property
    def before_in_words(self) -> str:
        """A sentence on what other runs on the same ledger file had spent; empty if nothing."""
        most = max(client.epsilon_before for client in self.clients)
        if not most:
            return ""
        return (
            f"Other runs on the same ledger file had spent up to epsilon = "
            f"{words.rounded_up(most)} of a client's budget before this one; it is counted above."
        )


def of_gradients(
    budgets: Sequence[PrivacyBudget],
    sampler: Sampler,
    *,
    clip_norm: float | tuple[float, ...],
    releases_per_visit: int,
    num_visits: Sequence[int],
    client_sizes: Sequence[int],
    num_shares: int | None = None,
    before: Sequence[Composition] = (),
) -> PrivacyPlan:
    """Plans noisy sums of per-record gradients.

    Every client's noise is calibrated to its own budget, size and number of visits. With a
    trusted aggregator (``num_shares`` clients add noise to one sum) the largest serves all.

    Args:
        budgets: One a client.
        sampler: How batches are drawn.
        clip_norm: One number for all clients, or one a client.
        releases_per_visit: Noisy sums a visit.
        num_visits: Visits of each client.
        client_sizes: Records of each client.
        num_shares: With a trusted aggregator, how many clients' noise makes up that of a sum.
        before: What each client had released before, which its budget covers; empty for nothing.

    Raises:
        BudgetExceededError: If that uses up the budget of a client that is to be visited.
        ValueError: If the sampler cannot sample a client, or is not accounted for under the
            relation or the unit of a budget; if clients under a trusted aggregator differ in
            clipping norm or sampling; if there is another number of numbers than of clients.
    """
    for budget in budgets:
        sampler.check(client_sizes, budget.relation)
        units.check_sampler(budget, sampler)
    clip_norms = _validate.by_client("clip_norm", clip_norm, len(budgets))
    contributions = [units.records_changed(budget) for budget in budgets]
    before = _checked_before(budgets, num_visits, before)
    physical_size = sampler.physical_size(client_sizes)
    samplers = [sampler.of_client(number) for number in range(len(budgets))]
    noise = [
        calibrate.noise_multiplier(
            budget,
            num_releases=max(1, visits * releases_per_visit),
            sampler=own,
            num_records=size,
            physical_size=physical_size,
            before=spent if visits else frozenset(),
        )
        for budget, visits, own, size, spent in zip(
            budgets, num_visits, samplers, client_sizes, before, strict=True
        )
    ]
    if num_shares is not None:
        _check_equal_shares(samplers, client_sizes)
        _check_equal_clips(clip_norms)
        noise, contributions = [max(noise)] * len(noise), [max(contributions)] * len(noise)
    clients = []
    for m, budget in enumerate(budgets):
        mechanism = GaussianSum(
            clip_norm=clip_norms[m],
            noise_multiplier=noise[m],
            sampler=samplers[m],
            num_records=client_sizes[m],
            physical_size=physical_size,
            num_shares=num_shares or 1,
            contributions=contributions[m],
        )
        visits = num_visits[m]
        clients.append(ClientPlan(budget, mechanism, visits, releases_per_visit, before[m]))
    return PrivacyPlan(tuple(clients))


def _checked_before(
    budgets: Sequence[PrivacyBudget], num_visits: Sequence[int], before: Sequence[Composition]
) -> Sequence[Composition]:
    """What each client had released; refused where nothing is left for what is planned."""
    before = before or [frozenset()] * len(budgets)
    for m, (budget, visits, spent) in enumerate(zip(budgets, num_visits, before, strict=True)):
        if visits and calibrate.is_used_up(budget, spent):
            epsilon = accounting.epsilon(spent, budget.delta, budget.relation)
            raise BudgetExceededError(
                f"client {m}'s budget is used up: other runs on the ledger file have spent "
                f"epsilon = {epsilon:.6g} of {budget.epsilon:g} at delta = {budget.delta:g}; "
                "nothing was computed. All runs on a file share one budget: write a larger one, "
                f"budget=PrivacyBudget(epsilon={2 * max(epsilon, budget.epsilon):.3g}, ...) say, "
                "if these records may cost as much in all."
            )
    return before


def _check_equal_shares(samplers: Sequence[Sampler], client_sizes: Sequence[int]) -> None:
    """Refuses a sum over clients that each divide their noise by another number."""
    each = zip(samplers, client_sizes, strict=True)
    probs = {float(sampler.inclusion_prob(size)) for sampler, size in each}
    if len(probs) > 1:
        raise ValueError(
            f"sampler must draw the same share of every client's records for a sum over clients, "
            f"got shares of {min(probs):g} to {max(probs):g}: write sampler=PoissonSampling(0.1), "
            "say."
        )


def _check_equal_clips(clip_norms: Sequence[float]) -> None:
    """Refuses a sum over clients whose shares of the noise would have different sizes."""
    if len(set(clip_norms)) > 1:
        raise ValueError(
            "clip_norm must be one number for all clients with a trusted aggregator, where their "
            f"noise adds up to that of one sum, got {min(clip_norms):g} to {max(clip_norms):g}: "
            f"write clip_norm={max(clip_norms):g}."
        )


def of_changes(
    budgets: Sequence[PrivacyBudget],
    *,
    clip_norm: float | tuple[float, ...],
    num_shards: Sequence[int],
    averaged: bool,
    num_visits: Sequence[int],
    client_sizes: Sequence[int],
    num_shares: int | None = None,
    noise_law: Noise = Gaussian(),
    before: Sequence[Composition] = (),
) -> PrivacyPlan:
    """Plans noisy sums (or means) of changes, one a shard; one release a visit.

    With a trusted aggregator the sum over clients is released: its noise covers the client whose
    clip times weight is the largest (paper, Theorems 6 and 8), and the most shards that a unit may
    change.
    """
    clip_norms = _validate.by_client("clip_norm", clip_norm, len(budgets))
    before = _checked_before(budgets, num_visits, before)
    noise = [
        _noise_of_changes(noise_law, budget, max(1, visits), size, spent if visits else frozenset())
        for budget, visits, size, spent in zip(
            budgets, num_visits, client_sizes, before, strict=True
        )
    ]
    weights = shard_weights(
        clip_norms, num_shards, averaged=averaged, aggregated=num_shares is not None
    )
    contributions = [units.shards_changed(b, n) for b, n in zip(budgets, num_shards, strict=True)]
    if num_shares is not None:
        noise = [max(noise)] * len(noise)
        contributions = [max(contributions)] * len(noise)
    clients = []
    for m, budget in enumerate(budgets):
        mechanism = GaussianShardSum(
            clip_norm=clip_norms[m],
            noise_multiplier=noise[m],
            num_shards=num_shards[m],
            num_records=client_sizes[m],
            weight=weights[m],
            num_shares=num_shares or 1,
            contributions=contributions[m],
            noise=noise_law,
        )
        mechanism.sensitivity(budget.relation)  # refuses a relation that has none
        clients.append(ClientPlan(budget, mechanism, num_visits[m], 1, before[m]))
    return PrivacyPlan(tuple(clients))


def shard_weights(
    clip_norms: Sequence[float], num_shards: Sequence[int], *, averaged: bool, aggregated: bool
) -> list[float]:
    """What each client's noise on a sum of clipped changes is multiplied by.

    Under a trusted aggregator whoever's shards may move the sum furthest sets the noise of all, so
    that any share of it is like any other.
    """
    weights = [1 / shards if averaged else 1.0 for shards in num_shards]
    if not aggregated:
        return weights
    # A client's own ratio is exactly 1: no weight is rounded below what its sum is multiplied by.
    each = list(zip(clip_norms, weights, strict=True))
    return [max(weight * (clip / mine) for clip, weight in each) for mine in clip_norms]


def _noise_of_changes(
    noise_law: Noise,
    budget: PrivacyBudget,
    num_releases: int,
    num_records: int,
    before: Composition,
) -> float:
    """Noise that keeps a budget, in units of what one unit of protection contributes."""
    if isinstance(noise_law, DiscreteGaussian):
        return calibrate.discrete_noise_multiplier(budget, num_releases, before)
    everything = FullBatch()
    return calibrate.noise_multiplier(
        budget,
        num_releases=num_releases,
        sampler=everything,
        num_records=num_records,
        physical_size=num_records,
        before=before,
    )


def table(clients: Sequence[ClientPlan]) -> list[str]:
    """Lines of a table: mechanism, releases, noise and epsilon of each run of equal clients.

    Where clients share the noise of a sum, the epsilon against one of them has a column, too.
    """
    shared = any(client.mechanism.num_shares > 1 for client in clients)
    header = ["client", "records", "batch", "clip", "noise std", "releases", "epsilon", "delta"]
    header += ["to participants"] * shared
    rows = [header]
    for first, last in _runs(clients):
        client, mechanism = clients[first], clients[first].mechanism
        rows.append(
            [
                str(first) if first == last else f"{first}-{last}",
                str(mechanism.num_records),
                mechanism.batch,
                f"{mechanism.clip_norm:g}",
                f"{mechanism.share_std:.4g}",
                f"{client.num_visits} x {client.releases_per_visit}",
                f"{words.rounded_up(client.epsilon)} of {client.budget.epsilon:.10g}",
                f"{client.budget.delta:.10g}",
                *[words.rounded_up(client.epsilon_to_participant)] * shared,
            ]
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    padded = [[cell.ljust(w) for cell, w in zip(row, widths, strict=True)] for row in rows]
    return ["  " + "  ".join(row).rstrip() for row in padded]


def _runs(clients: Sequence[ClientPlan]) -> list[tuple[int, int]]:
    """First and last number of every run of equal plans."""
    runs: list[tuple[int, int]] = []
    for number, client in enumerate(clients):
        if runs and clients[runs[-1][0]] == client:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return runs
