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
import numpy as np
import numpy.typing as npt

from numpyro_dppvi import _validate, guides, latents
from numpyro_dppvi._device import on_cpu
from numpyro_dppvi._typing import Array, Model, Natural, PRNGKey
from numpyro_dppvi.families import precision
from numpyro_dppvi.families.compiled import compiled
from numpyro_dppvi.latents.space import shapes
from numpyro_dppvi.methods import noisy_gradients, values
from numpyro_dppvi.methods.values import Method
from numpyro_dppvi.methods.visits import ROWS_TOGETHER, ClientParams, Layout
from numpyro_dppvi.posterior.posterior import Posterior
from numpyro_dppvi.posterior.prior import Prior, check_proper, check_width, first_factor
from numpyro_dppvi.privacy import Entry, Ledger, LedgerFile, PrivacyPlan, SecretKeys, draw_noise
from numpyro_dppvi.protocol import checks, devices, initial, rounds, schedules, server
from numpyro_dppvi.protocol.client import Client, ClientState
from numpyro_dppvi.protocol.problem import Problem, RoundParams
from numpyro_dppvi.protocol.rounds import RoundInfo, RoundState
from numpyro_dppvi.protocol.server import ServerState, TrustedAggregator
from numpyro_dppvi.records import Shards, SpreadShards
from numpyro_dppvi.records.shards import record_shapes

# Clients whose sizes differ compute their sums in chunks, so many for the average client.
_PER_CLIENT = 16
_ROWS_ON_ACCELERATOR = 2**12  # which take hardly longer there than one row


# Not as JAX compiles it, which takes longer.
_fold_in = compiled(quick=True)(jax.random.fold_in)


class PVIState(NamedTuple):
    """Everything the next round needs: what each party has, and no secret key.

    Attributes:
        round: How many rounds have been run.
        server: What the server knows; all of it was released.
        clients: What clients keep to themselves, on a leading axis.
        ledger: What was released.
    """

    round: int
    server: ServerState
    clients: ClientState
    ledger: Ledger

    @property
    def prior(self) -> Natural:
        """The prior's factor t_0."""
        return self.server.prior

    @property
    def factors(self) -> Natural:
        """The clients' factors t_m, on a leading axis; as of :class:`ServerState`."""
        return self.server.factors

    @property
    def natural(self) -> Natural:
        """Natural parameters of q, which is always the product of the factors."""
        return self.server.natural


class Algorithm(NamedTuple):
    """Partitioned variational inference as three functions.

    Attributes:
        init: ``rng_key -> state``.
        step: ``(rng_key, state, shards) -> (state, info)``: one round, charged to the state's
            ledger before anything is computed. Step from a state once: a second step from the
            same one releases a second time, and its ledger knows of one release only. It is
            compiled as it is, and refuses to be called inside a JAX transformation. ``share=0.5``
            merges half of what the damping lets through in this round.
        posterior: ``state -> Posterior``.
    """

    init: Callable[[PRNGKey], Any]
    step: Callable[..., tuple[Any, RoundInfo]]
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
    setup = Setup(
        model,
        guide,
        record_shapes(records, "records"),
        _validate.mapping("model_kwargs", model_kwargs, "{'num_groups': 3}"),
        method=method,
        client_sizes=_validate.client_sizes(client_sizes),
        plan=plan,
        schedule=schedule,
        damping=damping,
        secret_keys=secret_keys,
        trusted=server.aggregator(trusted_aggregator),
        ledger_file=ledger_file,
        earlier=prior,
        init_scale=init_scale,
    )
    return assemble(setup)


class Setup(NamedTuple):
    """What is known of a run before its model is read: public, but for ``secret_keys``.

    The attributes that are not described here are the arguments of :func:`pvi`.
    """

    model: Model
    guide: Any
    # Shapes and dtypes of all clients' records, by argument.
    records: Mapping[str, jax.ShapeDtypeStruct]
    model_kwargs: Mapping[str, Any]
    method: Method
    client_sizes: Sequence[int]
    schedule: schedules.Schedule
    damping: float
    secret_keys: SecretKeys
    trusted: TrustedAggregator | None
    plan: PrivacyPlan | None = None
    ledger_file: LedgerFile | None = None
    # The posterior that stands in the place of the model's priors, or ``None``.
    earlier: Prior | None = None
    init_scale: float | None = None
    prior_left_out: float = 0.0  # the power of the prior that cavities lack
    # Whether clients fit alone. They begin their solves at the start, which their factors do not
    # hold.
    alone: bool = False
    # What was read of the model, if it has been read before.
    space: latents.LatentSpace | None = None


class Assembly(NamedTuple):
    """What :func:`pvi` finds out before any round."""

    problem: Problem
    params: RoundParams
    setup: Setup

    def first_state(self, rng_key: PRNGKey) -> RoundState:
        """What server and clients begin with."""
        problem, params, init_scale = self.problem, self.params, self.setup.init_scale
        key = _validate.rng_key(rng_key)
        # The second one is for the start, if there is one.
        prior_key, start_key = (key, key) if init_scale is None else jax.random.split(key)
        first = rounds.first_prior(problem, params, prior_key)
        check_proper(problem.family, precision.rounded(first))
        begin = initial.narrow(problem.family, first, start_key, init_scale)
        asynchronous = schedules.starts_from_pulled(self.setup.schedule)
        return rounds.first_state(problem, params, first, begin, asynchronous=asynchronous)

    def groups(self, round_number: int) -> np.ndarray:
        """The clients of a round, group after group."""
        num_clients, trusted = len(self.setup.client_sizes), self.setup.trusted
        groups = schedules.check(self.setup.schedule(round_number, num_clients), num_clients)
        if trusted:
            trusted.check(groups, num_clients)
        return groups

    def posterior(self, natural: Natural) -> Posterior:
        """The posterior of these natural parameters."""
        family, space, setup = self.problem.family, self.problem.space, self.setup
        constants, records = dict(setup.model_kwargs), shapes(setup.records)
        return Posterior(natural, family, space, setup.model, constants, {}, records, setup.earlier)

    def client(
        self, number: int, records: Mapping[str, Array], num_records: Array, state: ClientState
    ) -> Client:
        """One of the clients by itself, with secret keys of its own."""
        plan = None if self.setup.plan is None else self.setup.plan.clients[number]
        return Client(
            number=number,
            problem=self.problem,
            params=jax.tree.map(lambda leaf: leaf[number], self.params.clients),
            records=records,
            num_records=num_records,
            secret_keys=self.setup.secret_keys,
            plan=plan,
            # It answers for its own budget alone: what others release is no charge to it.
            ledger=Ledger() if plan is None else PrivacyPlan((plan,)).ledger(),
            state=state,
        )


def prepare(setup: Setup) -> Assembly:
    """Reads the model and checks that all that is asked for goes together."""
    # All that can be refused is refused here, from shapes, the traced program and made-up rows: no
    # record has been seen and nothing charged, so that a message can give nothing away.
    model, guide, records, model_kwargs, method, client_sizes, *_ = setup
    plan, trusted, damping = setup.plan, setup.trusted, _validate.damping(setup.damping)
    setup = setup._replace(init_scale=initial.check(setup.init_scale))
    checks.check_aggregator(method, trusted)
    checks.check_plan(method, plan, client_sizes, trusted)
    checks.check_source(method, setup.secret_keys)
    space = setup.space or latents.from_model(model, records, model_kwargs)
    latents.check_callbacks(space)
    missing = latents.may_be_missing(space).allowed
    latents.check_additive(space, model_kwargs, sum(client_sizes), missing)
    latents.check_priors(space)
    latents.warn_of_scales(space)
    asked = method.guide(guide, model)
    space, family = guides.approximation(asked, model, space, records, model_kwargs)
    if guide is None:
        space = method.coordinates(space)
    method.check(space, family)  # refused before anything is released
    prior = first_factor(setup.earlier, family, space)
    problem = Problem(
        space,
        family,
        # Without what the plan hands over: runs that differ in that alone share a program.
        values.program_of(method),
        _layout(setup),
        prior.rest,
        prior.refined,
        aggregated=trusted is not None,
        starts_ahead=setup.alone and setup.init_scale is not None,
    )
    params = round_params(
        method,
        plan,
        client_sizes,
        precision.widened(prior.exact) if method.wide else precision.rounded(prior.exact),
        # A factor that is computed anew from all releases so far is put in whole.
        damping=damping if method.damped else 1.0,
        prior_left_out=setup.prior_left_out,
    )
    # Adam's steps are as long on pure noise as on gradients; where each of them is noisy, they
    # could walk out of a prior that is much narrower than a step.
    if method.releases == "gradients":
        rate = float(params.learning_rate)
        check_width(family, prior, noisy_gradients.noisy_step(method, rate, family))
    return Assembly(problem, params, setup)


def assemble(setup: Setup) -> Algorithm:
    """What :func:`pvi` does."""
    assembly, plan, ledger_file = prepare(setup), setup.plan, setup.ledger_file
    problem = assembly.problem

    def init(rng_key: PRNGKey) -> PVIState:
        first = assembly.first_state(rng_key)
        return PVIState(0, first.server, first.clients, first_ledger(plan, ledger_file))

    def step(
        rng_key: PRNGKey, state: PVIState, shards: Shards | SpreadShards, share: float = 1.0
    ) -> tuple[PVIState, RoundInfo]:
        _validate.outside_transformations("step", rng_key, state, shards)
        _validate.instance("state", state, PVIState, "algorithm.init(rng_key)")
        checks.check_shards(shards, setup.client_sizes, problem.space.row)
        # Before the charge: a schedule or a share that is refused costs nothing.
        groups = assembly.groups(state.round)
        params = assembly.params
        part = _validate.half_open_unit("share", share, 1e-6)
        if part != 1 and setup.method.damped:
            params = params._replace(damping=_array(part * np.asarray(params.damping)))
        # Charged first: a process that dies from here on has paid for what it may have released.
        # Keys are by the round's number, and no chain of splits, so that a run that goes on from a
        # checkpoint has those that it would have had.
        ledger = charged(state.ledger, plan, state.round, groups, ledger_file)
        key = _fold_in(_validate.rng_key(rng_key), state.round)
        keys = (key, setup.secret_keys.round_key(state.round))
        before, drawn = RoundState(state.server, state.clients), _drawn(setup, groups, state)
        spread = isinstance(shards, SpreadShards)
        run_round: Any = devices.run_round if spread else rounds.run_round
        end, info = run_round(problem, params, before, shards, jax.device_put(groups), keys, drawn)
        return PVIState(state.round + 1, end.server, end.clients, ledger), info

    def posterior(state: PVIState) -> Posterior:
        _validate.instance("state", state, PVIState, "algorithm.init(rng_key)")
        return assembly.posterior(state.natural)

    return Algorithm(init, step, posterior)


def _layout(setup: Setup) -> Layout:
    method, plan, client_sizes = setup.method, setup.plan, setup.client_sizes
    num_shards = shards_of(plan, client_sizes)
    # The rows of the largest shard: a client's records over its shards, rounded up.
    capacity = int(np.max(-(-np.array(client_sizes) // num_shards)))
    # Where a sum of changes is all that is known, no public factor is one client's. Each shard then
    # keeps a factor of its own: one that a client's shards shared would carry a record of one shard
    # into the changes of all, and the sum would move by more than its sensitivity.
    private = method.keeps_factors or (setup.trusted is not None and method.releases == "changes")
    batch = plan.physical_size if plan else 0
    at_once = _rows_at_once(client_sizes, getattr(method, "microbatch_size", None))
    return Layout(batch, int(max(num_shards)), capacity, private, at_once)


def _rows_at_once(client_sizes: Sequence[int], most: int | None = None) -> int | None:
    """Chunks of rows that let small clients leave out padding; ``None`` if they have little."""
    # Each client wastes less than a chunk. So less than a fifth of what is computed is padding
    # where clients have 124 records or more on average, and less than an eighteenth from 512 on.
    mean = sum(client_sizes) / len(client_sizes)
    # Skipping padding pays where clients have a lot of it.
    if max(client_sizes) < 1.2 * mean:
        return most
    pieces = max(1, int(mean / _PER_CLIENT / ROWS_TOGETHER))
    least = 0 if on_cpu() else _ROWS_ON_ACCELERATOR
    return min(max(pieces * ROWS_TOGETHER, least), most or max(client_sizes))


def shards_of(plan: PrivacyPlan | None, client_sizes: Sequence[int]) -> np.ndarray:
    """How many shards each client cuts its records into, shape ``(num_clients,)``."""
    if plan is None:
        return np.ones(len(client_sizes), int)
    return np.array([client.mechanism.num_shards for client in plan.clients])


def round_params(
    method: Method,
    plan: PrivacyPlan | None,
    client_sizes: Sequence[int],
    exact_prior: Natural,
    *,
    damping: float,
    prior_left_out: float,
) -> RoundParams:
    """What a run's rounds are handed; arguments as of :func:`prepare`."""
    mechanisms = [client.mechanism for client in plan.clients] if plan else []
    # Of all clients, because all their noisy steps add up to q's random walk, which the learning
    # rate keeps short.
    num_releases = sum(n for mine in plan.clients for _, n in mine.released) if plan else 0
    ones = np.ones(len(client_sizes))
    num_shards = shards_of(plan, client_sizes)
    # What is clipped, sampled and noised is what the plan accounts for, whatever the method says.
    probs = np.array([m.inclusion_prob for m in mechanisms]) if plan else ones
    # Without a plan nothing is clipped.
    clips = np.array([m.clip_norm for m in mechanisms]) if plan else math.inf * ones
    # Arrays, all of them, so that other budgets, clips and dampings run the same program.
    return RoundParams(
        exact_prior=exact_prior,
        clients=ClientParams(
            noise_std=_array(plan.noise_std if plan else 0 * ones),
            num_shards=_array(num_shards),
            weight=_array(method.weights(num_shards)),
            clip_norm=_array(clips),
            inclusion_prob=_array(probs),
            num_records=_array(np.asarray(client_sizes, float)),
        ),
        damping=_array(damping),
        learning_rate=_array(method.learning_rate(num_releases, damping)),
        prior_left_out=_array(prior_left_out),
    )


def _array(numbers: npt.ArrayLike) -> Array:
    """What ``jnp.asarray`` gives, which compiles a conversion."""
    return jax.device_put(np.asarray(numbers))


def _drawn(setup: Setup, groups: np.ndarray, state: PVIState) -> Any:
    """The noise of a round that is drawn on the host; ``None`` where none is."""
    plan = setup.plan
    if plan is None or not values.draws_exactly(setup.method):
        return None
    size = sum(leaf.size for leaf in jax.tree.leaves(state.prior))
    return draw_noise([client.mechanism for client in plan.clients], groups, size)


def first_ledger(plan: PrivacyPlan | None, file: LedgerFile | None) -> Ledger:
    """The ledger to begin with: empty, or what a file has spent."""
    if file is not None:
        example = "privacy.LedgerFile('ledger.jsonl')"
        _validate.instance("ledger_file", file, LedgerFile, example)
    if plan is None and file is not None:
        raise ValueError(
            "ledger_file keeps what a private method releases, and NonPrivate() keeps no ledger: "
            "leave it out."
        )
    checks.check_alone("ledger_file", file)
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
    # Who is visited twice in a round releases twice.
    visits = np.bincount(groups.ravel(), minlength=len(plan.clients)).tolist()
    return [
        Entry(round_number, m, mine.mechanism.dp_event, visits[m] * mine.releases_per_visit, run)
        for m, mine in enumerate(plan.clients)
        if visits[m]
    ]
