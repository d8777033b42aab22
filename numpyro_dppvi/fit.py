"""``fit``: one call from a model, data and a budget to a posterior and what it cost."""

import dataclasses
import importlib.metadata
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
from tqdm.auto import tqdm

from numpyro_dppvi import _validate, methods, planning, schedules
from numpyro_dppvi._result import Status
from numpyro_dppvi._typing import Array, Model, Natural, PRNGKey, Records
from numpyro_dppvi.algorithm import Algorithm, PVIState, assemble
from numpyro_dppvi.baselines import GlobalState, global_vi
from numpyro_dppvi.methods import AnyMethod, DPOptimization, GlobalVI, NonPrivate
from numpyro_dppvi.partition import (
    Partition,
    Shards,
    record_arrays,
    split_evenly,
    stack,
    stack_clients,
)
from numpyro_dppvi.partition.clients import check_counts
from numpyro_dppvi.posterior import Posterior
from numpyro_dppvi.privacy import (
    Ledger,
    LedgerFile,
    PrivacyBudget,
    PrivacyPlan,
    PrivacyStatement,
    SecretKeys,
)
from numpyro_dppvi.rounds import RoundInfo
from numpyro_dppvi.server import TrustedAggregator

Data: TypeAlias = Records | Sequence[Records]


class History(NamedTuple):
    """What happened round by round; functions of released values only.

    Attributes:
        natural: Natural parameters of q after each round, on a leading axis.
        movement: Jeffreys divergence between q before and after each round, in nats, shape
            ``(num_rounds,)``.
        projected: Entries of the product of the clients' factors that were raised to zero, by
            round.
        rejected: Merges that were refused, by round.
    """

    natural: Natural
    movement: np.ndarray
    projected: np.ndarray
    rejected: np.ndarray


@dataclass(frozen=True, eq=False)
class FitResult:
    """What ``fit`` returns. Holds no record and nothing computed from records but releases.

    Attributes:
        posterior: The approximate posterior.
        plan: The privacy plan; ``None`` without privacy.
        history: What happened round by round.
        status: How the run ended, a sentence.
        state: The algorithm's last state.
        method: The method that ran.
        insecure_noise_seed: The seed of the noise, if one was given.
    """

    posterior: Posterior
    plan: PrivacyPlan | None
    history: History
    status: Status
    state: PVIState | GlobalState
    method: AnyMethod
    insecure_noise_seed: int | None

    @property
    def ledger(self) -> Ledger:
        """What was released: ``ledger.spent(delta=1e-5)`` gives epsilon per client."""
        return self.state.ledger

    def posterior_at(self, round_number: int) -> Posterior:
        """The posterior after a round, 1 for the first; all of them were released."""
        rounds = len(self.history.movement)
        if not 1 <= round_number <= rounds:
            raise IndexError(f"there are rounds 1 to {rounds}, got {round_number}.")
        natural = jax.tree.map(lambda leaf: leaf[round_number - 1], self.history.natural)
        return dataclasses.replace(self.posterior, natural=natural)

    def privacy_statement(self) -> PrivacyStatement:
        """What the run cost, as text (``print``) and JSON (``.to_json()``)."""
        return PrivacyStatement(
            type(self.method).__name__,
            self.plan,
            self.ledger,
            self.insecure_noise_seed is not None,
        )

    @property
    def guide(self) -> Any:
        """A plain NumPyro guide for ``numpyro.infer.Predictive``; goes with :attr:`params`."""
        return self.posterior.guide

    @property
    def params(self) -> dict[str, Array]:
        """The guide's parameters."""
        return self.posterior.params


def fit(
    model: Model,
    guide: Any,
    data: Data,
    *,
    rng_key: PRNGKey | None = None,
    clients: int | Partition | None = None,
    method: AnyMethod | None = None,
    budget: PrivacyBudget | Sequence[PrivacyBudget] | None = None,
    schedule: schedules.Schedule = schedules.sequential,
    num_rounds: int = 10,
    damping: float = 0.4,
    model_kwargs: Mapping[str, Any] | None = None,
    trusted_aggregator: bool | TrustedAggregator = False,
    progress_bar: bool = True,
    ledger_file: str | os.PathLike[str] | None = None,
    insecure_noise_seed: int | None = None,
) -> FitResult:
    """Fits a model to data held by several clients, under a privacy budget.

    Main arguments:

    Args:
        model: Any NumPyro model with global, continuous latents, called as
            ``model(**data, **model_kwargs)``.
        guide: ``None``, ``AutoNormal(model)`` or ``AutoDiagonalNormal(model)``.
        data: Records: a mapping from argument names to arrays with one leading axis, or a
            sequence of such mappings, one a client. Everything else is public.
        rng_key: A JAX key. It seeds the split of rows and draws of latents, never the noise.
        clients: With one mapping: a number of clients to split its rows over at random, or a
            ``Partition``. Not given when data is already per client.
        method: ``DPOptimization(...)`` (the default), ``VirtualClients(...)``,
            ``LocalAveraging(...)``, ``ParameterPerturbation(...)``, ``NonPrivate(...)`` or one of
            the baselines ``BayesianCommitteeMachine(...)`` and ``GlobalVI(...)``.
        budget: A ``PrivacyBudget``, or one a client.

    Most people can stop here. Other arguments:

    Args:
        schedule: ``sequential``, ``synchronous`` or any function of the round's number and the
            number of clients.
        num_rounds: Rounds; in each, the schedule's clients send one change.
        damping: In (0, 1]; the share of a change that is merged.
        model_kwargs: Public arguments of the model.
        trusted_aggregator: Whether only the sum of a round's changes is seen, so that the clients'
            noise protects it jointly; ``TrustedAggregator(max_dropouts=...)`` if some may drop
            out.
        progress_bar: Whether to show one.
        ledger_file: Where every round is charged, on disk, before it releases anything. What the
            file has spent already counts, so that runs on the same records share one budget.
        insecure_noise_seed: For tests only: makes the noise reproducible, and removable.

    Returns:
        A :class:`FitResult`.

    Raises:
        UnsupportedModelError: If the model, guide or data cannot be fitted; says why.
        ValueError: If an argument is out of its range.
        TypeError: If an argument is of another kind, a missing ``rng_key`` among them.
    """
    key = _validate.rng_key(rng_key)
    method = DPOptimization() if method is None else method
    methods.check(method)
    _validate.positive_int("num_rounds", num_rounds)
    split_key, init_key, round_key = jax.random.split(key, 3)
    shards, sizes = _shards(data, clients, split_key)
    run = planning.wiring(method, schedule, num_rounds, trusted_aggregator)
    # All rounds at once: a bad schedule must not come to light when rounds have been spent.
    schedules.num_visits(run.schedule, run.num_rounds, len(sizes))
    plan = None
    if not isinstance(method, NonPrivate) or budget is not None:
        plan = planning.plan_wired(run, budget, sizes)
    task = _Task(model, guide, _pooled_shapes(shards, sum(sizes)), sizes, model_kwargs or {})
    file = None if ledger_file is None else LedgerFile(ledger_file)
    algorithm = _algorithm(task, run, plan, damping, SecretKeys(insecure_noise_seed), file)
    state, history = _run(algorithm, init_key, round_key, shards, run.num_rounds, progress_bar)
    attrs = _attrs(method, plan, state.ledger)
    posterior = dataclasses.replace(algorithm.posterior(state), attrs=attrs)
    status = _status(history)
    if isinstance(state, PVIState):
        state = state._replace(private=None)  # what clients keep to themselves stays behind
    return FitResult(posterior, plan, history, status, state, method, insecure_noise_seed)


class _Task(NamedTuple):
    """What is to be fitted."""

    model: Model
    guide: Any
    shapes: Mapping[str, jax.ShapeDtypeStruct]
    client_sizes: tuple[int, ...]
    model_kwargs: Mapping[str, Any]


def _algorithm(
    task: _Task,
    run: planning.Wiring,
    plan: PrivacyPlan | None,
    damping: float,
    secret_keys: SecretKeys,
    ledger_file: LedgerFile | None,
) -> Algorithm:
    """The algorithm that a method asks for."""
    if isinstance(run.method, GlobalVI) and plan is not None and run.trusted is not None:
        return global_vi(
            task.model,
            task.guide,
            task.shapes,
            method=run.method,
            client_sizes=task.client_sizes,
            plan=plan,
            trusted=run.trusted,
            model_kwargs=task.model_kwargs,
            secret_keys=secret_keys,
            ledger_file=ledger_file,
        )
    return assemble(
        task.model,
        task.guide,
        task.shapes,
        run.method,
        task.client_sizes,
        plan,
        run.schedule,
        damping if run.damping is None else run.damping,
        task.model_kwargs,
        secret_keys,
        run.trusted,
        prior_left_out=1 - 1 / len(task.client_sizes) if run.splits_prior else 0.0,
        ledger_file=ledger_file,
    )


def _run(
    algorithm: Algorithm,
    init_key: PRNGKey,
    round_key: PRNGKey,
    shards: Shards,
    num_rounds: int,
    progress_bar: bool,
) -> tuple[Any, History]:
    """The rounds."""
    state = algorithm.init(init_key)
    naturals: list[Natural] = []
    infos: list[RoundInfo] = []
    rounds = tqdm(range(num_rounds), desc="rounds", disable=not progress_bar)
    for _ in rounds:
        state, info = algorithm.step(round_key, state, shards)
        naturals.append(state.natural)
        infos.append(info)
    stacked = jax.tree.map(lambda *leaves: np.stack([np.asarray(x) for x in leaves]), *naturals)
    counts = jax.tree.map(lambda *leaves: np.stack([np.asarray(x) for x in leaves]), *infos)
    return state, History(stacked, *counts)


def _shards(
    data: Data, clients: int | Partition | None, rng_key: PRNGKey
) -> tuple[Shards, tuple[int, ...]]:
    """Checks the data and lays it out; returns the clients' sizes too."""
    if not isinstance(data, Mapping):
        _check_per_client(data)
        if clients is not None:
            raise ValueError(
                "data is already one mapping a client, so clients must not be given, got "
                f"{_validate.shown(clients)}: leave it out."
            )
        shards = stack_clients(data)
        return shards, tuple(int(n) for n in np.asarray(shards.num_records))
    pooled = record_arrays(data, "data")
    if not isinstance(clients, Partition):
        num_rows = len(next(iter(pooled.values())))
        clients = 1 if clients is None else clients
        check_counts(num_rows, clients, "clients")
        clients = split_evenly(rng_key, num_rows, clients)
    return stack(pooled, clients), clients.sizes


def _check_per_client(data: Any) -> None:
    """Refuses data that is neither one mapping nor a sequence of them."""
    if not isinstance(data, Sequence) or not all(isinstance(part, Mapping) for part in data):
        received = _validate.shown(data)
    elif not data:
        received = "an empty list"
    else:
        return
    raise TypeError(
        "data must be a mapping from the model's arguments to arrays, or a list of such mappings, "
        f'one a client, got {received}: write data={{"X": X, "y": y}}.'
    )


def _pooled_shapes(shards: Shards, num_rows: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of all clients' records together, which is what a model is written for."""
    return {
        name: jax.ShapeDtypeStruct((num_rows, *leaf.shape[2:]), leaf.dtype)
        for name, leaf in shards.records.items()
    }


def _status(history: History) -> Status:
    if history.rejected.any():
        return Status.REJECTED
    return Status.PROJECTED if history.projected.any() else Status.COMPLETED


def _attrs(method: AnyMethod, plan: PrivacyPlan | None, ledger: Ledger) -> dict[str, str | float]:
    """Facts about the run that travel with an export."""
    facts: dict[str, str | float] = {
        "inference_library": "numpyro_dppvi",
        "inference_library_version": importlib.metadata.version("numpyro-dppvi"),
        "method": type(method).__name__,
        "privacy": "none" if plan is None else "differential privacy, unit one record",
    }
    if plan is not None:
        facts["max_epsilon"] = float(ledger.spent().max())
        facts["max_delta"] = max(client.budget.delta for client in plan.clients)
        facts["relation"] = ", ".join(sorted({c.budget.relation for c in plan.clients}))
    return facts
