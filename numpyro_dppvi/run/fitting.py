"""``fit``: one call from a model, data and a budget to a posterior and what it cost."""

import contextlib
import dataclasses
import functools
import importlib.metadata
import json
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from numpyro.infer.autoguide import AutoMultivariateNormal, AutoNormal

from numpyro_dppvi import _html, _validate, latents
from numpyro_dppvi._typing import Array, Model, Natural, PRNGKey
from numpyro_dppvi.families import precision
from numpyro_dppvi.families.compiled import compiled
from numpyro_dppvi.methods import hierarchies, values
from numpyro_dppvi.methods.values import AnyMethod
from numpyro_dppvi.posterior import marginals
from numpyro_dppvi.posterior.posterior import Posterior, called_here
from numpyro_dppvi.posterior.prior import Prior, caution_of_width
from numpyro_dppvi.privacy import (
    Ledger,
    LedgerFile,
    PrivacyBudget,
    PrivacyPlan,
    PrivacyStatement,
    SecretKeys,
    words,
)
from numpyro_dppvi.privacy.budget import Budgets, budget_of_each
from numpyro_dppvi.privacy.plan import with_worth
from numpyro_dppvi.protocol import checks, planning, recommendation, schedules, server
from numpyro_dppvi.protocol.algorithm import PVIState, Setup, assemble
from numpyro_dppvi.protocol.server import TrustedAggregator
from numpyro_dppvi.records import Partition, Shards, SpreadShards, spread
from numpyro_dppvi.run import checkpoint as checkpoints
from numpyro_dppvi.run import counted_twice, description, loop, parts, settling
from numpyro_dppvi.run.checkpoint import Continued, Journal, locked
from numpyro_dppvi.run.data import Data, LaidOut, lay_out, pooled_shapes
from numpyro_dppvi.run.history import History, Status, status_of
from numpyro_dppvi.run.order import in_order
from numpyro_dppvi.run.progress import progress

# Handing requests to eight devices takes about 5 ms a round, as long as so many numbers do.
_WORTH_SPREADING = 1_000_000
# Records say next to nothing of latents that they leave more than so many times as wide. In studies
# of hierarchies (benchmarks/groups.py) it was at most .5 where the spread came out as it should.
_UNTOLD = 0.7
_FAINT = 0.5  # of its width under the prior: more has an entry of which little was learnt
# What others call it, and what it is called here. There is no loss: it would cost privacy.
_CALLED = {
    **dict.fromkeys(("loss", "losses", "elbo"), "history.movement"),
    **dict.fromkeys(("epsilon", "epsilons", "spent"), "ledger.spent()"),
    **dict.fromkeys(("converged", "outcome"), "status"),
    "statement": "privacy_statement()",
}
# What an export says of the study whose posterior was the prior.
_PRIOR_FACTS = ("max_epsilon", "max_delta", "relation")


@dataclass(frozen=True, eq=False)
class FitResult:
    """What ``fit`` returns. Holds no record and nothing computed from records but releases.

    Attributes:
        posterior: The approximate posterior.
        plan: The privacy plan; ``None`` without privacy.
        history: What happened round by round.
        status: How the run ended, a sentence.
        state: The algorithm's last state.
        run: How the method was run.
        client_sizes: Records of each client, which are public.
        insecure_noise_seed: The seed of the noise, if one was given.
        client_names: The clients' names, which are public; empty if they have none.
        columns: By argument that was given as a table of several columns, their names.

    Example:
        >>> import jax, numpy as np, numpyro, numpyro.distributions as dist
        >>> import numpyro_dppvi as dppvi
        >>> def model(y):
        ...     mean = numpyro.sample("mean", dist.Normal(0, 10))
        ...     with numpyro.plate("records", y.shape[0]):
        ...         numpyro.sample("y", dist.Normal(mean, 1), obs=y)
        >>> data = [{"y": np.zeros(200)}, {"y": np.ones(300)}]
        >>> budget = dppvi.PrivacyBudget(epsilon=1.0, delta=1e-5)
        >>> result = dppvi.fit(model, None, data, rng_key=jax.random.key(0), budget=budget)
        >>> result.status.rounds, result.ledger.spent().round(2).tolist()
        (10, [1.0, 1.0])
    """

    posterior: Posterior
    plan: PrivacyPlan | None
    history: History
    status: Status
    state: PVIState
    run: planning.RunSpec
    client_sizes: tuple[int, ...]
    insecure_noise_seed: int | None
    client_names: tuple[str, ...] = ()
    columns: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def method(self) -> AnyMethod:
        """The method as it was asked for; what its clients ran is ``run.local``."""
        return self.run.method

    @property
    def ledger(self) -> Ledger:
        """Every release so far; ``ledger.spent(delta=1e-5)`` gives epsilon per client."""
        return self.state.ledger

    def posterior_at(self, round_number: int) -> Posterior:
        """The posterior after a round; all of them were released.

        Args:
            round_number: 1 for the first.

        Raises:
            IndexError: If no such round ran.
        """
        rounds = len(self.history.movement)
        _validate.whole("round_number", round_number)
        if not 1 <= round_number <= rounds:
            raise IndexError(
                f"round_number must be one of the rounds 1 to {rounds}, got "
                f"{_validate.shown(round_number)}."
            )
        natural = jax.tree.map(lambda leaf: leaf[round_number - 1], self.history.natural)
        return dataclasses.replace(self.posterior, natural=precision.arrays(natural))

    def privacy_statement(self) -> PrivacyStatement:
        """What the run cost: as text (``print``), ``.to_markdown()`` and ``.to_json()``."""
        return PrivacyStatement(
            type(self.method).__name__, self.plan, self.ledger, self.insecure_noise_seed is not None
        )

    def __repr__(self) -> str:
        """What was run, and how it ended."""
        clients = f"{len(self.client_sizes)} client{'s' * (len(self.client_sizes) > 1)}"
        return f"<FitResult of {type(self.method).__name__}, {clients}: {self.status}>"

    def _repr_html_(self) -> str:
        """The same with posterior and cost, for notebooks."""
        statement = self.privacy_statement()
        return "".join(
            [
                _html.heading(f"{type(self.method).__name__}, {self._cost()}"),
                _html.paragraph(str(self.status)),
                self.posterior._repr_html_(),
                _html.folded("What the run cost", statement._repr_html_()),
            ]
        )

    def _cost(self) -> str:
        if self.plan is None:
            return "no differential privacy"
        # Rounded up: a guarantee of 1.04 is none of 1.0.
        facts = self.privacy_statement().as_dict()
        return (
            f"epsilon = {words.rounded_up(facts['max_epsilon'])} at delta = "
            f"{facts['max_delta']:.10g}"
        )

    if not TYPE_CHECKING:  # a type checker would take any name at all for one of ours

        def __getattr__(self, name: str) -> Any:
            raise _elsewhere(self, name)

    @property
    def guide(self) -> Any:
        """A plain NumPyro guide for ``numpyro.infer.Predictive``; goes with :attr:`params`."""
        return self.posterior.guide

    @property
    def params(self) -> dict[str, Array]:
        """The guide's parameters."""
        return self.posterior.params


def _elsewhere(result: FitResult, name: str) -> AttributeError:
    """Says what to write instead of an attribute that a result does not have."""
    said = f"FitResult has no attribute {name!r}"
    instead = _CALLED.get(name)
    of_posterior = called_here(name)
    if instead is None and of_posterior is not None:
        instead = f"posterior.{of_posterior}"
    if instead is not None:
        return AttributeError(f"{said}: write result.{instead}.")
    return AttributeError(f"{said}.", name=name, obj=result)  # Python finds what is spelt like it


@in_order
def fit(
    model: Model,
    guide: Any,
    data: Data,
    *,
    rng_key: PRNGKey | None = None,
    clients: int | Partition | None = None,
    method: AnyMethod | None = None,
    budget: Budgets | None = None,
    schedule: schedules.Schedule | None = None,
    num_rounds: int | None = None,
    damping: float | None = None,
    model_kwargs: Mapping[str, Any] | None = None,
    trusted_aggregator: bool | TrustedAggregator = False,
    prior: Prior | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    progress_bar: bool | None = None,
    ledger_file: str | os.PathLike[str] | None = None,
    insecure_noise_seed: int | None = None,
    init_scale: float | None = None,
) -> FitResult:
    """Fits a model to data held by several clients, under a privacy budget.

    Main arguments:

    Args:
        model: Any NumPyro model whose records share its latents, called as
            ``model(**data, **model_kwargs)``.
        guide: ``None`` or ``AutoNormal(model)``, ``AutoMultivariateNormal(model)``, or a function
            that draws every latent from a distribution of its own.
        data: Records: a mapping from argument names to arrays with one leading axis, or a table
            (such as a pandas DataFrame) of whose columns the model takes those that it has
            arguments for. Of several clients: a list of these, or a mapping of these by the
            clients' names, ``{"Helsinki": table, "Turku": other}``, which plan, statement, plots
            and exports then use. Names, columns and everything else are public.
        rng_key: A JAX key. It seeds the split of rows and draws of latents, never the noise.
        clients: With one mapping or table: a number of clients to split its rows over at random,
            or a ``Partition``. Not given when data is already per client.
        method: A method or a baseline; ``None`` for what :func:`recommend` recommends.
        budget: A ``PrivacyBudget``, or one per client: a list in the order of the clients, or a
            mapping by their names. With ``ledger_file=`` it covers all runs that the file has, too.

    Most people can stop here. Other arguments:

    Args:
        schedule: ``sequential``, ``synchronous`` or any function of the round's number and the
            number of clients. Not given, it is ``sequential``, and ``synchronous`` under a trusted
            aggregator.
        num_rounds: Rounds, exactly so many; in each, the schedule's clients send one change. Not
            given, a private run has 10, and one without privacy ends when its posterior has
            settled: when more rounds would move no mean by more than about .05 of its standard
            deviations, and draws of the latents are averaged out. It has at most 160, and
            ``status`` says so if these are not enough.
        damping: In [1e-6, 1]; the share of a change that is merged. Not given, it is .4, but 1
            where ``NonPrivate()`` takes Newton's steps and clients are visited in turn.
        model_kwargs: Public arguments of the model.
        trusted_aggregator: Whether only the sum of a round's changes is seen, so that the clients'
            noise protects it jointly; ``TrustedAggregator(max_dropouts=...)`` if some drop out.
        prior: An earlier study's ``posterior.as_prior()``, in the place of the model's priors. It
            must be of other records: where a ledger file says that it is not, it is refused, and
            clients of the same name are warned of.
        checkpoint: A file to keep the run in, round by round. If it is there, the run goes on
            where it was; the same records must be passed again. If it has ended, a larger
            ``num_rounds`` and ``budget`` continue it, and noise is calibrated so that all rounds
            keep to the budget together. With a ledger file an older copy is refused; without one
            nobody can tell, so do not go on from copies. See ``docs/posterior.md``.
        progress_bar: Whether to show one; ``None`` for: on a terminal or in a notebook.
        ledger_file: Where every round is charged, on disk, before it releases anything. Runs on the
            same records share the file and one budget: noise is calibrated for what is left of it.
        insecure_noise_seed: For tests only: makes the noise reproducible, and removable.
        init_scale: For neural networks, which are symmetric under their prior: normal latents begin
            at public random locations, so many prior standard deviations from the prior's, and as
            narrow (.1, say). Costs no privacy, because no record enters. ``None`` is the prior.

    Returns:
        A :class:`FitResult`. Ctrl-C ends the run after the round under way, and returns what there
        is; a second one gives up that round, too. Before the first round it raises
        ``KeyboardInterrupt``: nothing was released then. Where other runs use up the budget
        meanwhile, the rounds that were released are returned, and ``status`` says so.

    Raises:
        UnsupportedModelError: If the model, guide or data cannot be fitted; says why.
        BudgetExceededError: If other runs on the ledger file have used up a budget.
        ValueError: If an argument is out of its range, or the checkpoint is of another run.
        TypeError: If an argument is of another kind, a missing ``rng_key`` among them.
    """
    _validate.outside_transformations("fit", rng_key, data)
    with _stopped_before_a_round():
        # A key for the split of rows, one for the start, and one for all rounds.
        split_key, *keys = _three_keys(_validate.rng_key(rng_key))
        if num_rounds is not None:
            num_rounds = _validate.positive_int("num_rounds", num_rounds, schedules.MOST_ROUNDS)
        path = None if checkpoint is None else _validate.path("checkpoint", checkpoint)
        charges = None if ledger_file is None else _validate.path("ledger_file", ledger_file)
        if method is not None:
            values.check(method)
        constants = _validate.mapping("model_kwargs", model_kwargs, "{'num_groups': 3}")
        # The method is chosen and the run planned from its shapes, sizes and names alone.
        laid = lay_out(data, clients, split_key, model, constants)
        sizes = laid.sizes
        shapes = pooled_shapes(laid.shards, sum(sizes))
        if isinstance(budget, Mapping):
            budget = budget_of_each(budget, len(sizes), laid.names)
        space = None
        if method is None:
            trusted = server.aggregator(trusted_aggregator)
            method = recommendation.by_gradients(sizes, trusted is not None)
            # One visit is not enough for what is recommended, nor are networks its kind of model.
            if budget is not None and num_rounds != 1 and init_scale is None:
                first = _first_budget(path, budget, len(sizes))
                budgets = budget_of_each(first, len(sizes), laid.names)
                space = latents.from_model(model, shapes, constants)
                method = recommendation.of_space(
                    space,
                    model,
                    shapes,
                    constants,
                    client_sizes=sizes,
                    client_names=laid.names,
                    budgets=budgets,
                    guide=guide,
                    prior=prior,
                    trusted=trusted,
                ).method
        # Newton's steps, whose changes may be merged whole, are for these guides' families.
        if damping is None and not (
            guide is None or isinstance(guide, AutoNormal | AutoMultivariateNormal)
        ):
            damping = planning.DEFAULT_DAMPING
        run = planning.resolve(
            method,
            num_clients=len(sizes),
            schedule=schedule,
            num_rounds=num_rounds,
            trusted_aggregator=trusted_aggregator,
            damping=damping,
            init_scale=init_scale,
        )
        setup = Setup(
            model,
            guide,
            shapes,
            constants,
            client_sizes=sizes,
            secret_keys=SecretKeys(insecure_noise_seed),
            ledger_file=None if charges is None else LedgerFile(charges),
            earlier=prior,
            space=space,
            **run.asked,
        )
    return _fitted(setup, laid, run, budget, keys, path, progress_bar)


def _first_budget(
    path: Path | None, budget: PrivacyBudget | Sequence[PrivacyBudget], num_clients: int
) -> PrivacyBudget | Sequence[PrivacyBudget]:
    """The budget that a run began with: one that is continued under a larger keeps its method."""
    kept = None if path is None else checkpoints.past(path)
    # A checkpoint of other clients has other budgets; it is refused by name later.
    fits = kept is not None and len(kept.parts[0].budgets) in (1, num_clients)
    return kept.parts[0].budget if kept is not None and fits else budget


@contextlib.contextmanager
def _stopped_before_a_round() -> Iterator[None]:
    """Says of a Ctrl-C what it has cost."""
    try:
        yield
    except KeyboardInterrupt as stop:
        stop.add_note("Before a round began in this call: nothing was released or charged by it.")
        raise


def _fitted(
    setup: Setup,
    laid: LaidOut,
    run: planning.RunSpec,
    budget: PrivacyBudget | Sequence[PrivacyBudget] | None,
    keys: Sequence[PRNGKey],
    path: Path | None,
    progress_bar: bool | None,
) -> FitResult:
    """What :func:`fit` does once its arguments are settled, but for the plan."""
    file = setup.ledger_file
    with contextlib.ExitStack() as stack:
        with _stopped_before_a_round():
            kept = None
            checks.check_alone("checkpoint", path)
            if path is not None:
                # Locked before it is read: between the two, another process could run a round.
                stack.enter_context(locked(path))
                kept = checkpoints.read(path, file)
            plan = None
            if run.local.releases != "nothing" or budget is not None:
                plan = parts.plan_of(run, budget, laid.sizes, laid.names, kept, file)
            planning.warn_of_unsafe(run, plan)
            # Nothing is charged before the loop, so that what is refused until then costs nothing.
            algorithm = assemble(setup._replace(plan=plan))
            visited = {int(client) for groups in run.groups for client in np.unique(groups)}
            counted_twice.check(setup.earlier, laid.names, visited, file)
            state = algorithm.init(keys[0])
            # Of where the run begins; what follows asks it for model, family and prior.
            begun = algorithm.posterior(state)
            # Both look at records. They pass or fail, and their messages show none.
            shards = laid.shards
            latents.check_missing(begun.space.plain, shards.records, shards.owners, laid.called)
            latents.check_records(begun.space.plain, shards.records, shards.mask)
            if plan is not None:
                plan = _with_caution(plan, run, begun)
            past, journal = loop.no_history(state.natural), None
            if path is not None:
                journal = _journal(path, kept, setup, laid, run, plan, begun, keys[1])
                state, past = journal.resume(state, past)
            bar = progress(run, state.round, plan, _before(state), progress_bar)
            show = stack.enter_context(bar)
            # Last, because what comes before works on whole arrays.
            spread = over_devices(run, shards)
        # Under noise nobody can tell a path from it, unless it is long.
        course = (
            None
            if plan or run.alone
            else settling.Course(begun.family, run.damping, run.until_settled)
        )
        done = loop.run_rounds(
            algorithm, state, past, keys[1], spread, run.num_rounds, journal, show, course
        )
    posterior = algorithm.posterior(done.state)
    # Once it has arrived, rounds are smaller, and say nothing of a way.
    way = done.arrival.way if done.arrival else None
    if not plan and way is None:
        way = settling.way(done.history, posterior.family, run.damping)
    return result_of(
        run,
        posterior,
        None if plan is None else with_worth(plan, posterior.space.size),
        done,
        left=None if way is None else way.left,
        client_sizes=laid.sizes,
        insecure_noise_seed=setup.secret_keys.insecure_seed,
        client_names=laid.names,
        columns=laid.columns,
    )


def over_devices(run: planning.RunSpec, shards: Shards) -> Shards | SpreadShards:
    """Records over all devices, where there are several and it saves time."""
    # That is where clients are visited side by side and have enough to do. A run of several
    # processes always spreads them, because each visits its own.
    # In turn, one device works and the others wait.
    side_by_side = any(groups.shape[1] > 1 for groups in run.groups)
    numbers = sum(leaf.size for leaf in shards.records.values())
    long = numbers * run.local.num_local_steps >= _WORTH_SPREADING
    return spread(shards) if (side_by_side and long) or jax.process_count() > 1 else shards


def _journal(
    path: Path,
    kept: parts.Past | None,
    setup: Setup,
    laid: LaidOut,
    run: planning.RunSpec,
    plan: PrivacyPlan | None,
    begun: Posterior,
    rng_key: PRNGKey,
) -> Journal:
    """Where the run is kept."""
    described = functools.partial(description.description, setup, begun, laid.names, rng_key)
    continued = None
    if kept is not None and kept.is_continued_by(run):
        # What the file must say is this run without the new rounds, under the plan before.
        ended = described(run.until(kept.num_rounds), None if plan is None else plan.continues)
        continued = Continued(ended, kept.num_rounds)
    return Journal(path, described(run, plan), plan, run.groups, setup.ledger_file, continued)


def _with_caution(plan: PrivacyPlan, run: planning.RunSpec, begun: Posterior) -> PrivacyPlan:
    """The plan, which also says, as does a warning, where steps of one length begin too far out."""
    # Where no optimiser is named, Adam's steps are of one length, whatever the gradient is.
    one_length = run.local.releases in ("gradients", "changes") and (
        getattr(run.local, "optimizer", None) is None
    )
    if not one_length or run.init_scale is not None or begun.prior is not None:
        return plan
    said = caution_of_width(begun.family, begun.natural, type(run.method).__name__)
    if said:
        # Level 5 is the line that called `fit`.
        warnings.warn(said.removeprefix("Caution: "), UserWarning, stacklevel=5)
    return dataclasses.replace(plan, of_model=said)


@compiled(quick=True)
def _three_keys(rng_key: PRNGKey) -> tuple[PRNGKey, ...]:
    return tuple(jax.random.split(rng_key, 3))


def _before(state: PVIState) -> Ledger:
    """The ledger without a charge of the run whose release is still to come."""
    # With a checkpoint the round to come is charged already, and the bar must not show it as spent.
    ledger = state.ledger
    happened = (e for e in ledger.entries if e.run != ledger.run or e.round < state.round)
    return dataclasses.replace(ledger, entries=tuple(happened))


def result_of(
    run: planning.RunSpec,
    posterior: Posterior,
    plan: PrivacyPlan | None,
    done: loop.LoopEnd,
    left: float | None = None,
    **fields: Any,
) -> FitResult:
    """What a run gives to its user; the posterior carries the facts about it into every export.

    ``left`` is how far more rounds would still move q, as of ``Status``.
    """
    # What clients keep to themselves stays behind. Whoever goes on from here by hand is charged for
    # every round: no checkpoint knows of it.
    state = done.state._replace(
        clients=done.state.clients._replace(private=None),
        ledger=dataclasses.replace(done.state.ledger, run="", kept=""),
    )
    # A start that is narrower than the prior says nothing of what was learnt.
    learnt = plan is not None and run.init_scale is None
    relative = _relative(posterior, state.prior) if learnt else {}
    integrated = run.local.matches and hierarchies.applies(posterior.space, posterior.family)
    parents = posterior.space.parents
    status = status_of(
        done.history,
        run.num_rounds,
        plan is not None,
        done.interrupted,
        refused=done.refused,
        num_latents=posterior.space.size,
        left=left,
        noise=done.arrival.noise(len(done.history.movement)) if done.arrival else None,
        arrived_since=done.arrival.looks_back_to() if done.arrival else None,
        until_settled=run.until_settled,
        alone=run.alone,
        least=None if plan is None or plan.worth is None or run.alone else plan.worth.together,
        narrowed=_narrowed(relative),
        above=_narrowed({n: r for n, r in relative.items() if not parents.get(n)})
        if integrated
        else None,
        faint=_faint(relative, parents),
        # Where effects are integrated out, what is above them is as wide as it should be.
        untold=() if integrated else _untold(relative, parents),
        caution="" if plan is None else plan.of_model.removeprefix("Caution: "),
        noiseless=plan is not None and not plan.noise_std.any(),
        in_turn=run.num_clients > 1 and all(groups.shape[1] == 1 for groups in run.groups),
        **run.local.said(posterior.space, posterior.family, posterior.natural, state.server.memory),
    )
    result = FitResult(posterior, plan, done.history, status, state, run, **fields)
    attrs = _attrs(result, done.state.ledger.run)
    return dataclasses.replace(result, posterior=dataclasses.replace(posterior, attrs=attrs))


def _relative(posterior: Posterior, prior: Natural) -> dict[str, np.ndarray]:
    """Standard deviations of a posterior over those of its prior, by latent, where both are known.

    On the unconstrained scale. The factor of a prior outside the family may be none for a while.
    """
    each = [marginals.moments(posterior.family, one)[1] for one in (posterior.natural, prior)]
    found = {}
    for name, width in each[0].items():
        after, before = np.ravel(width), np.ravel(each[1][name])
        known = np.isfinite(before) & np.isfinite(after) & (before > 0)
        if known.any():
            found[name] = after[known] / before[known]
    return found


def _narrowed(relative: Mapping[str, np.ndarray]) -> float | None:
    """How many times as wide as the prior a posterior is: the lower quartile over latents."""
    ratios = list(relative.values())
    return float(np.quantile(np.concatenate(ratios), 0.25)) if ratios else None


def _faint(
    relative: Mapping[str, np.ndarray], parents: Mapping[str, frozenset[str]]
) -> tuple[tuple[str, int, int], ...]:
    """Latents that hang on no others and of some of whose entries little was learnt."""
    found = ((name, int(np.sum(r > _FAINT)), r.size) for name, r in relative.items())
    return tuple(one for one in found if one[1] and not parents.get(one[0]))


def _untold(
    relative: Mapping[str, np.ndarray], parents: Mapping[str, frozenset[str]]
) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Latents that records hardly narrow though others hang on them: those that their prior has."""
    # With nothing said of effects u ~ Normal(0, s), the bound is all but flat along s and u
    # together, and a normal approximation of s is far too narrow, wherever it is.
    return tuple(
        (name, tuple(sorted(parents[name])))
        for name, ratios in relative.items()
        if parents.get(name) and np.median(ratios) > _UNTOLD
    )


def _attrs(result: FitResult, ledger_run: str) -> dict[str, str | float]:
    """Facts about the run that travel with an export."""
    plan, posterior = result.plan, result.posterior
    facts: dict[str, str | float] = {
        "inference_library": "numpyro_dppvi",
        "inference_library_version": importlib.metadata.version("numpyro-dppvi"),
        "numpyro_version": importlib.metadata.version("numpyro"),
        "jax_version": importlib.metadata.version("jax"),
        "model": getattr(posterior.model, "__name__", type(posterior.model).__name__),
        "method": type(result.method).__name__,
        "status": str(result.status),
        "draws": "independent draws from an approximation: R-hat and ESS say nothing about them",
        "privacy": "none" if plan is None else f"differential privacy, unit {plan.unit}",
        "privacy_statement": str(result.privacy_statement()),
    }
    if plan is not None:
        # The worst client's, which bounds that of all others.
        facts["max_epsilon"] = float(result.ledger.spent().max())
        facts["max_delta"] = max(client.budget.delta for client in plan.clients)
        facts["relation"] = ", ".join(sorted({c.budget.relation for c in plan.clients}))
    for argument, names in result.columns.items():
        facts[f"columns_{argument}"] = json.dumps(names, ensure_ascii=False)
    facts |= counted_twice.facts(result.client_names, ledger_run, posterior.prior)
    if posterior.prior is not None:
        earlier = posterior.prior.attrs
        facts["prior"] = f"the posterior of an earlier study, privacy: {earlier.get('privacy')}"
        facts |= {f"prior_{name}": earlier[name] for name in _PRIOR_FACTS if name in earlier}
    return facts
