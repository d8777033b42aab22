"""The privacy plan: what a run will release and what it will cost, before any data is read."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from numpyro_dppvi import _html, _validate
from numpyro_dppvi.privacy import accounting, calibrate, units, words
from numpyro_dppvi.privacy.accounting import Composition
from numpyro_dppvi.privacy.budget import PrivacyBudget
from numpyro_dppvi.privacy.ledger import BudgetExceededError, Ledger
from numpyro_dppvi.privacy.meaning import Attack, best_attack
from numpyro_dppvi.privacy.mechanisms import GaussianShardSum, GaussianSum, Mechanism
from numpyro_dppvi.privacy.noise_laws import DiscreteGaussian, Gaussian, Noise
from numpyro_dppvi.privacy.sampling import Sampler
from numpyro_dppvi.privacy.worth import Worth, of_client, of_joining, of_widths, worth

# Above this, what is promised in the worst case is next to nothing.
_LARGE_EPSILON = 10.0
_TITLE = "Privacy plan (no data has been read)"


@dataclass(frozen=True)
class ClientPlan:
    """What one client is going to release.

    Attributes:
        budget: The client's budget.
        mechanism: The mechanism, with calibrated noise.
        num_visits: How often the schedule visits the client.
        releases_per_visit: Noisy sums per visit.
        before: What other runs on the same ledger file had released when this one was planned; the
            budget covers it, too.
        earlier: What this run released in the rounds before these, where it is continued under a
            larger budget, which covers it, too.

    Raises:
        ValueError: If the mechanism does not protect the budget's unit.
    """

    budget: PrivacyBudget
    mechanism: Mechanism
    num_visits: int
    releases_per_visit: int
    before: Composition = field(default=frozenset(), repr=False)
    earlier: Composition = field(default=frozenset(), repr=False)

    def __post_init__(self) -> None:
        self.mechanism.check(self.budget)

    @property
    def num_releases(self) -> int:
        """Noisy sums of these rounds."""
        return self.num_visits * self.releases_per_visit

    @property
    def released(self) -> Composition:
        """Everything this run will have released of the client, rounds before these included."""
        return accounting.compose([*self.earlier, (self.mechanism.dp_event, self.num_releases)])

    @property
    def composition(self) -> Composition:
        """Everything the client will have released, other runs included."""
        return accounting.compose([*self.before, *self.released])

    @property
    def epsilon_before(self) -> float:
        """The epsilon of earlier runs at the budget's delta."""
        return accounting.epsilon(self.before, self.budget.delta, self.budget.relation)

    @property
    def epsilon(self) -> float:
        """The epsilon of everything at the budget's delta; at most the budget's."""
        return accounting.epsilon(self.composition, self.budget.delta, self.budget.relation)

    @property
    def epsilon_to_participant(self) -> float:
        """The same against another client that contributes a share of the noise."""
        return accounting.epsilon_to_participant(
            self.composition, self.budget.delta, self.budget.relation, self.mechanism.num_shares
        )

    @property
    def attack(self) -> Attack:
        """The best attack on everything the client will have released."""
        return best_attack(self.composition, self.budget.relation)


@dataclass(frozen=True)
class PrivacyPlan:
    """One :class:`ClientPlan` per client; prints as a table. No part of it depends on records.

    Attributes:
        clients: The clients' plans.
        names: The clients' names, which are public; empty if they have none. Plans that differ in
            these alone are equal.
        continues: Where a run is continued under a larger budget, the plan of the rounds before.
        first_round: The first round that this plan is of, from 0.
        worth: What the budgets buy at best, if the number of latents is known.
        of_model: A caution about the model, if it is known and there is one.
    """

    clients: tuple[ClientPlan, ...]
    names: tuple[str, ...] = field(default=(), compare=False)
    continues: "PrivacyPlan | None" = field(default=None, repr=False)
    first_round: int = 0
    worth: Worth | None = field(default=None, repr=False, compare=False)
    of_model: str = field(default="", repr=False, compare=False)

    @property
    def parts(self) -> "tuple[PrivacyPlan, ...]":
        """The plans of all rounds in order; this one alone, unless it continues a run."""
        return (*(self.continues.parts if self.continues else ()), self)

    def at(self, round_number: int) -> "PrivacyPlan":
        """The plan that a round is of.

        Args:
            round_number: 0 for the first.

        Raises:
            ValueError: If it is not a whole number of at least 0.
        """
        _validate.not_negative_int("round_number", round_number)
        if self.continues is None or round_number >= self.first_round:
            return self
        return self.continues.at(round_number)

    @property
    def epsilons(self) -> np.ndarray:
        """Each client's epsilon at its own delta, shape ``(num_clients,)``."""
        return np.array([client.epsilon for client in self.clients])

    @property
    def unit(self) -> str:
        """What is protected, in words."""
        return ", ".join(sorted({f"one {units.in_words(c.budget)}" for c in self.clients}))

    @property
    def noise_std(self) -> np.ndarray:
        """The noise that each client adds to every entry it releases, shape ``(num_clients,)``."""
        return np.array([client.mechanism.share_std for client in self.clients])

    @property
    def physical_size(self) -> int:
        """Rows of a padded batch; 0 for methods without batches."""
        mechanism = self.clients[0].mechanism
        return mechanism.physical_size if isinstance(mechanism, GaussianSum) else 0

    def ledger(self) -> Ledger:
        """An empty ledger with the plan's budgets."""
        return Ledger(
            budgets=tuple(client.budget for client in self.clients),
            affordable=tuple(client.composition for client in self.clients),
            client_names=self.names,
        )

    def __str__(self) -> str:
        """A table with one line for each group of equal clients, and what the epsilon means."""
        rows = self._table()
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        padded = [[cell.ljust(w) for cell, w in zip(row, widths, strict=True)] for row in rows]
        lines = ["  " + "  ".join(row).rstrip() for row in padded]
        lines += [line for said in self._sentences() for line in words.paragraph(said)]
        return "\n".join([_TITLE, *lines])

    def _repr_html_(self) -> str:
        header, *rows = self._table()
        said = [_html.paragraph(sentence) for sentence in self._sentences() if sentence]
        return "".join([_html.heading(_TITLE), _html.table(header, rows), *said])

    def _table(self) -> list[list[str]]:
        """Rows with mechanism, releases, noise and epsilon of groups of equal clients.

        If clients share the noise of a sum, there is a column for the epsilon against one of them;
        if it is known what their budgets buy, one for the width of their intervals alone.
        """
        shared = any(client.mechanism.num_shares > 1 for client in self.clients)
        bought = self.worth is not None
        header = ["client", "records", "batch", "clip", "noise std", "releases", "epsilon", "delta"]
        rows = [header + ["to participants"] * shared + ["alone"] * bought]
        for first, last in words.alike(self.clients):
            client, mechanism = self.clients[first], self.clients[first].mechanism
            rows.append(
                [
                    words.clients(first, last, self.names),
                    str(mechanism.num_records),
                    mechanism.batch,
                    f"{mechanism.clip_norm:g}",
                    f"{mechanism.share_std:.4g}",
                    f"{client.num_visits} x {client.releases_per_visit}",
                    f"{words.rounded_up(client.epsilon)} of {client.budget.epsilon:.10g}",
                    f"{client.budget.delta:.10g}",
                    *[words.rounded_up(client.epsilon_to_participant)] * shared,
                    *([] if self.worth is None else [of_client(self.worth, first)]),
                ]
            )
        return rows

    def _sentences(self) -> list[str]:
        """Sentences on what the table does not show, and on what its numbers mean."""
        attacks = [client.attack for client in self.clients]
        worst = max(range(len(attacks)), key=lambda m: attacks[m].true_positive_rate)
        who = words.client(worst, self.names)
        meaning = words.in_other_words(who, self.clients[worst].budget, attacks[worst])
        return [*self._known(), *self._bought(), *cautions(self, self.epsilons), meaning]

    def _bought(self) -> list[str]:
        """What the budgets buy at best."""
        if self.worth is None:
            return []
        column = "'alone' is the same of each client by itself, without privacy / under its budget."
        said = [of_widths(self.worth), column, of_joining(self.worth, self.names)]
        return [" ".join(words.sentence(each) for each in said if each)]

    def _known(self) -> list[str]:
        said = []
        relations = [client.budget.relation for client in self.clients]
        if "add_or_remove_one" in relations:
            said.append(f"The unit is {self.unit}; {words.neighbours(relations)}.")
        shares = self.clients[0].mechanism.num_shares
        if shares > 1:
            most = max(client.epsilon_to_participant for client in self.clients)
            delta = max(client.budget.delta for client in self.clients)
            said.append(words.to_participants(self.unit, shares, most, delta))
        return [*said, self.continued_in_words, self.before_in_words]

    @property
    def continued_in_words(self) -> str:
        """A sentence on the rounds before these, where a run is continued; empty otherwise."""
        if self.continues is None:
            return ""
        ends = [part.first_round for part in self.parts[1:]]
        earlier = zip(self.continues.parts, ends, strict=True)
        return (
            f"The run goes on after {' and '.join(_told(part, end) for part, end in earlier)}; the "
            f"noise above is that of round {self.first_round + 1} and later, and epsilon counts "
            "all rounds."
        )

    @property
    def before_in_words(self) -> str:
        """A sentence on what earlier runs on the same ledger file spent; empty if nothing."""
        most = max(client.epsilon_before for client in self.clients)
        if not most:
            return ""
        return (
            f"Earlier runs on the same ledger file spent up to epsilon = {words.rounded_up(most)} "
            "of a client's budget, which is included above."
        )


def with_worth(plan: PrivacyPlan, num_latents: int) -> PrivacyPlan:
    """The plan, which also says what the budgets buy at best."""
    # Where a budget protects whole clients, or nothing is left of it, nothing is known.
    budgets = [client.budget for client in plan.clients]
    before = [client.before for client in plan.clients]
    if any(
        budget.unit == "client" or calibrate.is_used_up(budget, spent)
        for budget, spent in zip(budgets, before, strict=True)
    ):
        return plan
    sizes = [client.mechanism.num_records for client in plan.clients]
    shares = plan.clients[0].mechanism.num_shares
    num_shares = shares if shares > 1 else None
    found = worth(num_latents, budgets, sizes, num_shares=num_shares, before=before)
    return replace(plan, worth=found)


def _told(plan: PrivacyPlan, end: int) -> str:
    """What the rounds of an ended part of a run were."""
    start = plan.first_round + 1
    rounds = f"round {end}" if start == end else f"rounds {start} to {end}"
    std = sorted(client.mechanism.share_std for client in plan.clients)
    noise = f"{std[0]:.4g}" if std[0] == std[-1] else f"{std[0]:.4g} to {std[-1]:.4g}"
    most = words.rounded_up(max(client.budget.epsilon for client in plan.clients))
    return f"{rounds} (noise std {noise}, under a budget of at most epsilon = {most})"


def cautions(plan: PrivacyPlan, epsilons: Sequence[float] | np.ndarray) -> list[str]:
    """Sentences on budgets that promise little, and models that get little; mostly none."""
    loose = [m for m, client in enumerate(plan.clients) if _published(client) >= 1]
    large = [m for m, epsilon in enumerate(epsilons) if epsilon > _LARGE_EPSILON]
    said = []
    if loose:
        worst = plan.clients[max(loose, key=lambda m: _published(plan.clients[m]))]
        who = _called(plan, loose)
        said.append(words.of_delta(who, worst.budget.delta, worst.mechanism.num_records))
    if large:
        said.append(words.of_epsilon(_called(plan, large), max(epsilons[m] for m in large)))
    return [*said, plan.of_model] if plan.of_model else said


def _called(plan: PrivacyPlan, numbers: Sequence[int]) -> str:
    """Some clients in a sentence."""
    everyone = len(numbers) == len(plan.clients) > 1
    return "all clients" if everyone else words.listed(numbers, plan.names)


def _published(client: ClientPlan) -> float:
    """How many units would be published if each were with probability delta."""
    # A mechanism that publishes each unit with probability delta is (0, delta) private. Of n units
    # it would publish n delta on average, which should be far below 1.
    units_held = 1 if client.budget.unit == "client" else client.mechanism.num_records
    return client.budget.delta * units_held


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
    names: tuple[str, ...] = (),
) -> PrivacyPlan:
    """Plans noisy sums of per-record gradients.

    Every client's noise is calibrated to its own budget, size and number of visits, on top of what
    it has released ``before``. With a trusted aggregator, where ``num_shares`` clients add noise to
    one sum, all use the largest, and must agree in clipping norm and sampling.
    """
    for budget in budgets:
        sampler.check(client_sizes, budget.relation)
        units.check_sampler(budget, sampler)
    clip_norms = _validate.by_client("clip_norm", clip_norm, len(budgets))
    contributions = [units.records_changed(budget) for budget in budgets]
    before = before or [frozenset()] * len(budgets)
    check_before(budgets, num_visits, before, names)
    # The same for all clients, whose batches are one array in a compiled round.
    physical_size = sampler.physical_size(client_sizes)
    samplers = [sampler.of_client(number) for number in range(len(budgets))]
    # A client that is never visited gets the noise of one release: its mechanism has to exist.
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
    # Shares of one sum's noise have one standard deviation, which the strictest budget decides.
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
    return PrivacyPlan(tuple(clients), names)


def check_before(
    budgets: Sequence[PrivacyBudget],
    num_visits: Sequence[int],
    before: Sequence[Composition],
    names: Sequence[str] = (),
    spender: str = "other runs on the ledger file have",
) -> None:
    """Refuses, by name, clients that are to be visited and have nothing left for it."""
    for m, (budget, visits, spent) in enumerate(zip(budgets, num_visits, before, strict=True)):
        if visits and calibrate.is_used_up(budget, spent):
            epsilon = accounting.epsilon(spent, budget.delta, budget.relation)
            raise BudgetExceededError(
                f"{words.client(m, names)}'s budget is used up: {spender} spent epsilon = "
                f"{epsilon:.6g} of {budget.epsilon:g} at delta = {budget.delta:g}; nothing was "
                "computed. All of them share one budget: write a larger one, "
                f"budget=PrivacyBudget(epsilon={2 * max(epsilon, budget.epsilon):.3g}, ...) say, "
                "if these records may cost that much in total."
            )


def _check_equal_shares(samplers: Sequence[Sampler], client_sizes: Sequence[int]) -> None:
    """Refuses a sum over clients whose batches are different fractions of their records."""
    each = zip(samplers, client_sizes, strict=True)
    probs = {float(sampler.inclusion_prob(size)) for sampler, size in each}
    if len(probs) > 1:
        raise ValueError(
            f"sampler must draw the same fraction of every client's records with a trusted "
            f"aggregator, got {min(probs):g} to {max(probs):g}: write "
            "sampler=PoissonSampling(0.1), say."
        )


def _check_equal_clips(clip_norms: Sequence[float]) -> None:
    """Refuses a sum over clients whose noise would have different standard deviations."""
    if len(set(clip_norms)) > 1:
        raise ValueError(
            "clip_norm must be one number for all clients with a trusted aggregator, got "
            f"{min(clip_norms):g} to {max(clip_norms):g}: write clip_norm={max(clip_norms):g}, "
            "because the clients' noise adds up to that of one sum."
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
    """Plans noisy sums (or means) of shards' changes, with one release per visit.

    With a trusted aggregator the sum over clients is released. Its noise is that of the client
    with the largest clipping norm times weight (paper, Theorems 6 and 8), and for the largest
    number of shards that a unit can change.
    """
    clip_norms = _validate.by_client("clip_norm", clip_norm, len(budgets))
    before = before or [frozenset()] * len(budgets)
    check_before(budgets, num_visits, before)
    noise = [
        _noise_of_changes(noise_law, budget, max(1, visits), spent if visits else frozenset())
        for budget, visits, spent in zip(budgets, num_visits, before, strict=True)
    ]
    weights = shard_weights(
        clip_norms, num_shards, averaged=averaged, aggregated=num_shares is not None
    )
    contributions = [units.shards_changed(b, n) for b, n in zip(budgets, num_shards, strict=True)]
    # Under an aggregator, one noisy sum is released for all clients: it must satisfy the strictest
    # budget and the largest unit.
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
        clients.append(ClientPlan(budget, mechanism, num_visits[m], 1, before[m]))
    return PrivacyPlan(tuple(clients))


def shard_weights(
    clip_norms: Sequence[float], num_shards: Sequence[int], *, averaged: bool, aggregated: bool
) -> list[float]:
    """The factor of each client's noise on a sum of clipped changes."""
    # Under a trusted aggregator, the client whose shards can move the sum furthest determines the
    # noise of all, so that all shares have one standard deviation.
    weights = [1 / shards if averaged else 1.0 for shards in num_shards]
    if not aggregated:
        return weights
    # The standard deviation is proportional to clip * weight, so a client with another clip gets
    # the largest clip * weight over its own clip. Its own ratio is exactly 1, so rounding never
    # makes a weight smaller than the factor of the client's sum.
    each = list(zip(clip_norms, weights, strict=True))
    return [max(weight * (clip / mine) for clip, weight in each) for mine in clip_norms]


def _noise_of_changes(
    noise_law: Noise, budget: PrivacyBudget, num_releases: int, before: Composition
) -> float:
    if isinstance(noise_law, DiscreteGaussian):
        return calibrate.discrete_noise_multiplier(budget, num_releases, before)
    return calibrate.noise_multiplier(budget, num_releases=num_releases, before=before)
