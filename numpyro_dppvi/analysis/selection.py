"""``select``: chooses between settings on the private data and accounts for it.

Only the best of a random, secret number of runs is shown; the total cost covers that. The caller of
``select`` sees every run and must be trusted not to reveal the others.
"""

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_dppvi import _validate
from numpyro_dppvi._typing import Array, PRNGKey
from numpyro_dppvi.analysis.scoring import release
from numpyro_dppvi.posterior.posterior import Posterior
from numpyro_dppvi.privacy import GaussianSum, PrivacyBudget, SecretKeys, accounting, units, words
from numpyro_dppvi.privacy.selection import SelectionPlan, check_run
from numpyro_dppvi.run.fitting import FitResult

FitOne: TypeAlias = Callable[[Any, tuple[PrivacyBudget, ...], PRNGKey], FitResult]
Score: TypeAlias = Callable[[FitResult], Sequence[Array]]

NOT_COVERED = (
    "whoever ran the selection, who saw every run and not only the best",
    "the number of runs and their settings, if revealed, and how long the selection took",
    "choices made before the selection by looking at the data, such as which settings to try",
    "floating-point effects and side channels",
)


@dataclass(frozen=True, eq=False)
class Selection:
    """The best run of a selection and the cost of the selection.

    Attributes:
        setting: The setting of the best run.
        run: The best run. Its own privacy statement does not include the selection: publish
            :meth:`privacy_statement` instead.
        score: Its noisy mean score per record.
        plan: The plan and its cost.
        settings: All settings that could have been tried.
    """

    setting: Any
    run: FitResult
    score: float
    plan: SelectionPlan
    settings: tuple[Any, ...]

    @property
    def posterior(self) -> Posterior:
        """The best run's posterior, with the cost of the whole selection in its attributes."""
        # The run's own attributes say what one fit cost, which is less than what was spent.
        posterior, statement = self.run.posterior, self.privacy_statement()
        total: dict[str, str | float] = {
            "method": statement.which,
            "privacy_statement": str(statement),
            "max_epsilon": max(self.plan.epsilons),
            "max_delta": max(budget.delta for budget in self.plan.budgets),
            "selected_among": len(self.settings),
        }
        return dataclasses.replace(posterior, attrs={**posterior.attrs, **total})

    def privacy_statement(self) -> "SelectionStatement":
        """The cost of the whole selection; prints as text and has ``.to_json()``."""
        return SelectionStatement(type(self.run.method).__name__, len(self.settings), self.plan)


@dataclass(frozen=True)
class SelectionStatement:
    """The cost of a selection. Print it, or use ``to_json``."""

    method: str
    num_settings: int
    plan: SelectionPlan

    @property
    def which(self) -> str:
        """The best run's method, and among how many settings it was chosen."""
        return f"{self.method}, the best of {self.num_settings} settings"

    def as_dict(self) -> dict[str, Any]:
        """The statement as plain values."""
        # Budgets, distributions and bounds, all of them public before: nothing of any run but the
        # best.
        rows = zip(
            self.plan.budgets,
            self.plan.run_budgets,
            self.plan.mechanisms,
            self.plan.epsilons,
            strict=True,
        )
        return {
            "schema": "numpyro_dppvi/selection-statement/1",
            "method": self.method,
            "given": words.GIVEN,
            "settings": self.num_settings,
            "runs": self.plan.runs.name,
            "accountant": "Renyi divergence of repeated selection (Papernot and Steinke 2022)",
            "clients": [
                {
                    "client": number,
                    "unit": f"one {units.in_words(budget)}",
                    "relation": budget.relation,
                    "epsilon_spent": epsilon,
                    "epsilon_budget": budget.epsilon,
                    "delta": budget.delta,
                    "epsilon_of_one_fit": one.epsilon,
                    "scored_records": mechanism.num_records,
                    "score_bound": mechanism.clip_norm,
                    "score_noise_std": mechanism.noise_std,
                }
                for number, (budget, one, mechanism, epsilon) in enumerate(rows)
            ],
            "not_covered": list(NOT_COVERED),
        }

    def to_json(self) -> str:
        """The statement as JSON; an infinite epsilon is the string ``"infinity"``."""
        return json.dumps(words.finite(self.as_dict()), indent=2, allow_nan=False)

    def __str__(self) -> str:
        """The statement as text."""
        facts = self.as_dict()
        worst = max(facts["clients"], key=lambda c: c["epsilon_spent"])
        delta = max(c["delta"] for c in facts["clients"])
        lines = [
            "Privacy statement of a selection",
            f"  method       {self.which}",
            f"  runs         {facts['runs']}",
            f"  accountant   {facts['accountant']}",
        ]
        lines += words.paragraph(
            f"Over all runs and clients, "
            f"{', '.join(sorted({c['unit'] for c in facts['clients']}))} is "
            f"protected by epsilon = {words.rounded_up(worst['epsilon_spent'])} at delta = "
            f"{delta:.10g} (one fit alone: {words.rounded_up(worst['epsilon_of_one_fit'])}); "
            f"{words.neighbours(c['relation'] for c in facts['clients'])}."
        )
        lines += ["  Not covered:", *(f"    - {item}" for item in NOT_COVERED)]
        return "\n".join(lines)


def select(
    settings: Sequence[Any],
    fit_one: FitOne,
    score: Score,
    *,
    plan: SelectionPlan,
    insecure_seed: int | None = None,
) -> Selection:
    """Fits a random number of randomly drawn settings and returns the best run.

    Runs are compared by their records' mean score, to which each client adds noise. The number of
    runs, their settings and their keys are drawn secretly here; the plan's cost covers everything.

    Args:
        settings: The settings to choose from, in any form that ``fit_one`` accepts.
        fit_one: ``(setting, budgets, rng_key) -> FitResult``: one call of ``fit`` with
            ``budget=budgets`` and ``rng_key=rng_key``, on full batches or with shards.
        score: ``result -> scores``: one array per client with one number per record, higher is
            better. Each number may depend only on its own record and the result. Scores are
            clipped to the plan's bound; values that are not finite count as the lowest.
        plan: From ``privacy.plan_selection``: budget, number of runs, bound of the scores.
        insecure_seed: For tests only: makes the selection reproducible and its noise removable.

    Returns:
        The best run. Results of the other runs must not be revealed.

    Raises:
        ValueError: If a run releases more than the plan allows, or scores do not fit the plan.

    Example:
        >>> import jax, numpy as np, numpyro, numpyro.distributions as dist
        >>> import numpyro_dppvi as dppvi
        >>> def model(y):
        ...     mean = numpyro.sample("mean", dist.Normal(0, 10))
        ...     with numpyro.plate("records", y.shape[0]):
        ...         numpyro.sample("y", dist.Normal(mean, 1), obs=y)
        >>> data = [{"y": np.ones(400)}]
        >>> def fit_one(clip_norm, budgets, rng_key):
        ...     method = dppvi.DPOptimization(clip_norm)
        ...     return dppvi.fit(model, None, data, rng_key=rng_key, method=method, budget=budgets)
        >>> def score(run):
        ...     mean, sd = run.posterior.mean["mean"], run.posterior.stddev["mean"]
        ...     return [-np.hypot(part["y"] - mean, sd) for part in data]
        >>> plan = dppvi.privacy.plan_selection(
        ...     dppvi.PrivacyBudget(epsilon=2.0),
        ...     dppvi.privacy.NegativeBinomialRuns(2.0),
        ...     client_sizes=[400],
        ...     score_bound=3.0,
        ... )
        >>> chosen = dppvi.select([0.5, 2.5], fit_one, score, plan=plan)
        >>> chosen.setting in (0.5, 2.5), plan.run_budgets[0].epsilon < 2.0
        (True, True)
    """
    settings = tuple(_validate.entries("settings", settings, "[0.5, 2.5]"))
    _validate.function("fit_one", fit_one, ("setting", "budgets", "rng_key"), "fit_one")
    _validate.function("score", score, ("result",), "score")
    _validate.instance("plan", plan, SelectionPlan, "privacy.plan_selection(...)")
    if not settings:
        raise ValueError("settings must not be empty, got no entries: write [0.5, 2.5], say.")
    # A random number of runs, each with a setting drawn independently with replacement, and only
    # the one with the highest noisy score is kept (report noisy max over runs). Each run releases
    # its fit and its score as one Gaussian mechanism; the theorem about the best of K such runs
    # gives the total cost, whatever the number of settings.
    keys = SecretKeys(insecure_seed)
    best: Selection | None = None
    for number in range(plan.runs.count(_uniform(keys.round_key(0)))):
        choice_key, fit_key, noise_key = jax.random.split(keys.round_key(number + 1), 3)
        # With replacement, whatever ran before: the theorem is about independent runs.
        setting = settings[int(jax.random.randint(choice_key, (), 0, len(settings)))]
        run = fit_one(setting, plan.run_budgets, fit_key)
        _check(run, plan)
        value = _noisy_score(score(run), plan.mechanisms, noise_key)
        if best is None or value > best.score:
            best = Selection(setting, run, value, plan, settings)
    assert best is not None, "there is at least one run"
    return best


def _uniform(key: PRNGKey) -> float:
    """A 53-bit number in [0, 1) from a key."""
    # 53 bits of the key itself, where jax.random.uniform has 23: the number of runs is its
    # quantile, and few bits would leave out the long tail.
    words_of_key = np.asarray(jax.random.key_data(key)).astype(np.uint32)
    return (int.from_bytes(words_of_key.tobytes()[:8], "little") >> 11) / 2**53


def _check(run: Any, plan: SelectionPlan) -> None:
    if not isinstance(run, FitResult):
        raise TypeError(
            f"fit_one must return the result of fit, got {_validate.shown(run)}: write "
            "return fit(..., budget=budgets, rng_key=rng_key)."
        )
    if run.plan is None:
        raise ValueError(
            "fit_one must fit with privacy, got a run without: write budget=budgets in its call of "
            "fit."
        )
    mus = []
    # The run's mechanisms must protect the selection's unit; their distances are checked below.
    # Another number of clients is refused by check_run, in words of its own.
    for m, (mine, budget) in enumerate(zip(run.plan.clients, plan.budgets, strict=False)):
        mine.mechanism.check(budget)
        if mine.budget.relation != budget.relation:
            raise ValueError(
                "fit_one must keep to the budgets it is given, got a run with relation "
                f"{mine.budget.relation!r}: write budget=budgets in its call of fit."
            )
        mus.append(accounting.renyi_distance(run.ledger.composition(m), budget.relation))
    check_run(plan, mus)


def _noisy_score(
    scores: Sequence[Array], mechanisms: Sequence[GaussianSum], secret_key: PRNGKey
) -> float:
    """The mean score of all records, from each client's noisy sum of clipped scores."""
    if not isinstance(scores, Sequence):
        raise TypeError(
            f"score must return one array per client, got {_validate.shown(scores)}: write "
            "return [scores of client 0, ...]."
        )
    if len(scores) != len(mechanisms):
        raise ValueError(
            f"score must return one array per client, got {len(scores)} for the {len(mechanisms)} "
            "clients of the plan: write return [scores of client 0, ...]."
        )
    total = 0.0
    for client, (mine, mechanism) in enumerate(zip(scores, mechanisms, strict=True)):
        values = jnp.asarray(mine, float)
        if values.shape != (mechanism.num_records,):
            raise ValueError(
                f"score must return one number per record, got shape {values.shape} for client "
                f"{client}'s {mechanism.num_records} records: write an array of that length."
            )
        # A run that diverged has NaN as its score: it must lose, and not poison the comparison.
        values = jnp.where(jnp.isfinite(values), values, -mechanism.clip_norm)
        present = jnp.ones(values.shape, bool)
        key = jax.random.fold_in(secret_key, client)
        # A score is a vector of one entry, and its bound the clip.
        total += float(release(key, values[:, None], present, mechanism)[0])
    return total / sum(mechanism.num_records for mechanism in mechanisms)
