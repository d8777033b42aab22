"""Differentially private partitioned variational inference (paper, Algorithm 1), as functions.

    algorithm = pvi(model, guide, records, method=..., client_sizes=..., plan=...)
    state = algorithm.init(key)
    for round_number in range(num_rounds):
        state, info = algorithm.step(key, state, shards)
    posterior = algorithm.posterior(state)

The loop is the user's; the ledger still counts, because it is a field of the state.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_dppvi import _validate, guides, latents
from numpyro_dppvi._typing import Model, Natural, PRNGKey
from numpyro_dppvi.methods import objective, values
from numpyro_dppvi.methods.values import (
    Method,
)
from numpyro_dppvi.methods.visits import Layout
from numpyro_dppvi.posterior.posterior import Posterior, shapes
from numpyro_dppvi.posterior.prior import Prior, check_proper, check_width, first_factor
from numpyro_dppvi.privacy import (
    Entry,
    Ledger,
    LedgerFile,
    PrivacyPlan,
    SecretKeys,
    draw_noise,
)
from numpyro_dppvi.protocol import checks, initial, rounds, schedules, server
from numpyro_dppvi.protocol.rounds import Factors, Numbers, Problem, RoundInfo
from numpyro_dppvi.protocol.server import TrustedAggregator
from numpyro_dppvi.records import Shards, record_shapes


class PVIState(NamedTuple):
    """Everything the next round needs. All but ``private`` was released.

    Attributes:
        round: How many rounds have been run.
        prior: The prior's factor t_0.
        factors: The clients' factors t_m, on a leading axis; with a trusted aggregator the one
            factor of all clients together, because only the sum of changes is known.
        ledger: What was released.
        private: The shards' factors that never leave their clients (of virtual clients, or of any
            method under a trusted aggregator), clients and shards on the leading axes; ``None``
            where there are none.
        pulled: With asynchronous clients, the q that each started from; else ``None``.
        begin: The public start, or ``None`` for a run that begins at the prior.
    """

    round: int
    prior: Natural
    factors: Natural
    ledger: Ledger
    private: Natural | None = None
    pulled: Natural | None = None
    begin: Natural | None = None

    @property
    def natural(self) -> Natural:
        """Natural parameters of q, which is always the product of the factors."""
        return server.approximation(self.prior, self.factors)


class Algorithm(NamedTuple):
    """Partitioned variational inference as three functions.

    Attributes:
        init: ``rng_key -> state``.
        step: ``(rng_key, state, shards) -> (state, info)``: one round, charged to the state's
            ledger before anything is computed. Step from a state once: a second step from the
            same one releases a second time, and its ledger knows of one release only. It is
            compiled as it is, and refuses to be called inside a JAX transformation.
        posterior: ``state -> Posterior``.
    """

    init: Callable[[PRNGKey], Any]
    step: Callable[[PRNGKey, Any, Shards], tuple[Any, RoundInfo]]
    posterior: Callable[[Any], Posterior]


def pvi(
    model: Model,
    guide: Any,
    records: Mapping[str, Any],
    *,
    method: Method,
    client_sizes: Sequence[int],
    plan: PrivacyPlan | None = None,
    schedule: schedules.Schedule = schedules.sequential,
    damping: float = 0.4,
    model_kwargs: Mapping[str, Any] | None = None,
    secret_keys: SecretKeys = SecretKeys(),
    trusted_aggregator: bool | TrustedAggregator = False,
    prior: Prior | None = None,
    ledger_file: LedgerFile | None = None,
    init_scale: float | None = None,
) -> Algorithm:
    """Builds the algorithm. Nothing is computed from records until ``step`` gets shards.

    Args:
        model: A NumPyro model.
        guide: ``None`` or ``AutoNormal(model)``, ``AutoMultivariateNormal(model)``, or a function
            that draws every latent from a distribution of its own.
        records: Arrays or ``jax.ShapeDtypeStruct`` by argument name; only shapes and dtypes count.
        method: What a client does when visited.
        client_sizes: Number of records of each client.
        plan: The privacy plan of a private method; ``None`` for ``NonPrivate``.
        schedule: Which clients each round visits.
        damping: In [1e-6, 1]; the share of a change that is merged.
        model_kwargs: The model's public arguments.
        secret_keys: Where noise and batches come from.
        trusted_aggregator: Whether the server sees only the sum of a round's changes, so that the
            clients' noise protects it jointly; how many clients may drop out of it, if any.
        prior: An earlier study's ``posterior.as_prior()``, in the place of the model's priors.
        ledger_file: Where every round is charged, on disk, before it releases anything. What the
            file has spent already counts; ``plan_privacy`` takes it, too, to plan for the rest.
        init_scale: A public start for neural networks, as of ``fit``; ``None`` for the prior.

    Returns:
        The algorithm. Its ``step`` compiles once, whatever the number of rounds.

    Raises:
        UnsupportedModelError: If the model or guide cannot be fitted.
        ValueError: If a number is outside (0, 1], or the plan is not the plan of this method,
            these clients and this aggregator.

    Example:
        >>> import jax, numpy as np, numpyro, numpyro.distributions as dist
        >>> import numpyro_dppvi as dppvi
        >>> def model(y):
        ...     mean = numpyro.sample("mean", dist.Normal(0, 10))
        ...     with numpyro.plate("records", y.shape[0]):
        ...         numpyro.sample("y", dist.Normal(mean, 1), obs=y)
        >>> data, sizes = [{"y": np.zeros(200)}, {"y": np.ones(300)}], [200, 300]
        >>> method, budget = dppvi.DPOptimization(), dppvi.PrivacyBudget(epsilon=1.0)
        >>> plan = dppvi.plan_privacy(method, budget, num_rounds=10, client_sizes=sizes)
        >>> one = dppvi.pvi(model, None, data[0], method=method, client_sizes=sizes, plan=plan)
        >>> state, shards = one.init(jax.random.key(0)), dppvi.records.stack_clients(data)
        >>> state, info = one.step(jax.random.key(1), state, shards)  # one round of ten
        >>> state.round, bool((state.ledger.spent() < 0.4).all()), list(one.posterior(state).mean)
        (1, True, ['mean'])
    """
    values.check_assembled(method)
    _validate.instance("secret_keys", secret_keys, SecretKeys, "SecretKeys()")
    schedules.check_kind(schedule)
    if plan is not None:
        _validate.instance("plan", plan, PrivacyPlan, "plan_privacy(...)")
    return assemble(
        model,
        guide,
        record_shapes(records, "records"),
        method,
        _validate.client_sizes(client_sizes),
        plan,
        schedule,
        damping,
        _validate.mapping("model_kwargs", model_kwargs, "{'num_groups': 3}"),
        secret_keys,
        server.aggregator(trusted_aggregator),
        prior_left_out=0.0,
        earlier=prior,
        ledger_file=ledger_file,
        init_scale=init_scale,
    )


def assemble(
    model: Model,
    guide: Any,
    records: Mapping[str, Any],
    method: Method,
    client_sizes: Sequence[int],
    plan: PrivacyPlan | None,
    schedule: schedules.Schedule,
    damping: float,
    model_kwargs: Mapping[str, Any],
    secret_keys: SecretKeys,
    trusted: TrustedAggregator | None,
    prior_left_out: float,
    earlier: Prior | None = None,
    ledger_file: LedgerFile | None = None,
    init_scale: float | None = None,
    alone: bool = False,
) -> Algorithm:
    """What :func:`pvi` does.

    ``prior_left_out`` is the power of the prior that cavities lack. Clients who fit alone begin
    their solves at the start, which their factors do not hold.
    """
    damping, init_scale = _validate.damping(damping), initial.check(init_scale)
    num_clients = len(client_sizes)
    checks.check_noise(method, trusted)
    checks.check_plan(method, plan, client_sizes, trusted)
    checks.check_source(method, secret_keys)
    space = latents.from_model(model, records, model_kwargs)
    latents.check_additive(space, model_kwargs, sum(client_sizes))
    latents.check_priors(space)
    latents.warn_of_scales(space)
    space, family = guides.approximation(guide, model, space, records, model_kwargs)
    objective.rule_for(method.expectation, space, family)  # refused before anything is released
    prior = first_factor(earlier, family, space)
    num_shards = shards_of(plan, client_sizes)
    private = trusted is not None or method.keeps_factors
    layout = _layout(plan, num_shards, client_sizes, private)
    program = values.program_of(method)
    aggregated = trusted is not None
    problem = Problem(space, family, program, layout, prior.rest, prior.refined, aggregated)
    numbers = numbers_of(method, plan, client_sizes, prior.exact, damping, prior_left_out)
    if method.releases == "gradients":
        rate = float(numbers.learning_rate)
        check_width(family, prior, values.noisy_step(method, rate, family.standard()))

    def init(rng_key: PRNGKey) -> PVIState:
        prior_key, start_key = initial.keys(_validate.rng_key(rng_key), init_scale)
        first = rounds.first_prior(problem, numbers, prior_key)
        check_proper(family, first)
        begin = initial.narrow(family, first, start_key, init_scale)
        asynchronous = schedules.starts_from_pulled(schedule)
        held = None if alone else begin
        begun = rounds.first_factors(problem, numbers, first, held, asynchronous)
        ledger = first_ledger(plan, ledger_file)
        return PVIState(0, begun.prior, begun.clients, ledger, begun.private, begun.pulled, begin)

    def step(rng_key: PRNGKey, state: PVIState, shards: Shards) -> tuple[PVIState, RoundInfo]:
        _validate.outside_transformations("step", rng_key, state, shards)
        checks.check_state(state, PVIState)
        checks.check_shards(shards, client_sizes, space.row)
        groups = schedules.check(schedule(state.round, num_clients), num_clients)
        if trusted:
            trusted.check(groups, num_clients)
        ledger = charged(state.ledger, plan, state.round, groups, ledger_file)
        key = jax.random.fold_in(_validate.rng_key(rng_key), state.round)
        keys = (key, secret_keys.round_key(state.round))
        before = Factors(state.prior, state.factors, state.private, state.pulled)
        drawn = _drawn(method, plan, groups, state.prior)
        handed = numbers._replace(drawn=drawn, begin=state.begin if alone else None)
        end, info = rounds.run(problem, handed, before, shards, jnp.asarray(groups), keys)
        after = (end.prior, end.clients, ledger, end.private, end.pulled, state.begin)
        return PVIState(state.round + 1, *after), info

    def posterior(state: PVIState) -> Posterior:
        checks.check_state(state, PVIState)
        facts = shapes(records)
        return Posterior(
            state.natural, family, space, model, dict(model_kwargs), {}, facts, earlier
        )

    return Algorithm(init, step, posterior)


def _layout(
    plan: PrivacyPlan | None,
    num_shards: np.ndarray,
    client_sizes: Sequence[int],
    private: bool,
) -> Layout:
    capacity = max(
        -(-size // shards) for size, shards in zip(client_sizes, num_shards.tolist(), strict=True)
    )
    return Layout(plan.physical_size if plan else 0, int(max(num_shards)), capacity, private)


def shards_of(plan: PrivacyPlan | None, client_sizes: Sequence[int]) -> np.ndarray:
    """How many shards each client cuts its records into, shape ``(num_clients,)``."""
    if plan is None:
        return np.ones(len(client_sizes), int)
    return np.array([client.mechanism.num_shards for client in plan.clients])


def numbers_of(
    method: Method,
    plan: PrivacyPlan | None,
    client_sizes: Sequence[int],
    exact_prior: Natural,
    damping: float,
    prior_left_out: float,
) -> Numbers:
    """What a run's rounds are handed; arguments as of :func:`assemble`."""
    mechanisms = [client.mechanism for client in plan.clients] if plan else []
    num_releases = sum(client.num_releases for client in plan.clients) if plan else 0
    ones = np.ones(len(client_sizes))
    num_shards = shards_of(plan, client_sizes)
    # What is clipped, sampled and noised is what the plan accounts for, whatever the method says.
    arrays = {
        "noise_std": plan.noise_std if plan else 0 * ones,
        "num_shards": num_shards,
        "weight": method.weights(num_shards),
        "clip_norm": np.array([m.clip_norm for m in mechanisms]) if plan else math.inf * ones,
        "inclusion_prob": np.array([m.inclusion_prob for m in mechanisms]) if plan else ones,
        "damping": damping,
        "learning_rate": method.learning_rate(num_releases, damping),
        "prior_left_out": prior_left_out,
    }
    return Numbers(exact_prior, **{name: jnp.asarray(value) for name, value in arrays.items()})


def _drawn(method: Method, plan: PrivacyPlan | None, groups: np.ndarray, like: Natural) -> Any:
    """The noise of a round that is drawn on the host; ``None`` where none is."""
    if plan is None or not values.draws_exactly(method):
        return None
    size = sum(leaf.size for leaf in jax.tree.leaves(like))
    return draw_noise([client.mechanism for client in plan.clients], groups, size)


def first_ledger(plan: PrivacyPlan | None, file: LedgerFile | None) -> Ledger:
    """The ledger to begin with: empty, or what a file has spent."""
    if not isinstance(file, LedgerFile | None):
        raise TypeError(
            f"ledger_file must be a LedgerFile, got {_validate.shown(file)}: write "
            "ledger_file=LedgerFile('ledger.jsonl')."
        )
    if plan is None and file is not None:
        raise ValueError(
            "ledger_file keeps what a private method releases, and NonPrivate() keeps no ledger: "
            "leave it out."
        )
    if plan is None:
        return Ledger()
    return plan.ledger() if file is None else file.open(plan.ledger())


def charged(
    ledger: Ledger,
    plan: PrivacyPlan | None,
    round_number: int,
    groups: np.ndarray,
    file: LedgerFile | None,
) -> Ledger:
    """The ledger after a round has been charged; on disk, too, if there is a file."""
    if plan is None:
        return ledger
    new = entries(plan, round_number, groups, ledger.run)
    return ledger.charge(new) if file is None else file.charge(ledger, new)


def entries(plan: PrivacyPlan, round_number: int, groups: np.ndarray, run: str = "") -> list[Entry]:
    """What a round of a run is charged, client by client."""
    visits = np.bincount(groups.ravel(), minlength=len(plan.clients)).tolist()
    return [
        Entry(round_number, m, mine.mechanism.dp_event, visits[m] * mine.releases_per_visit, run)
        for m, mine in enumerate(plan.clients)
        if visits[m]
    ]
