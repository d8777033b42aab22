"""A study as a file that everybody has read: model, method, budgets, hospitals, public seed.

The server and every hospital load the same file, and know it by the digest of its bytes. Nothing
of it is ever sent, so that no message can change what a hospital computes or how much noise it
adds.
"""

import functools
import hashlib
import os
import sys
import tempfile
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_dppvi import _disk, _validate
from numpyro_dppvi._typing import Array, Model, Natural, PRNGKey
from numpyro_dppvi.methods import values
from numpyro_dppvi.methods.noisy_gradients import DPOptimization
from numpyro_dppvi.methods.values import AnyMethod
from numpyro_dppvi.posterior import Prior, load
from numpyro_dppvi.privacy import PrivacyBudget, PrivacyPlan, SecretKeys
from numpyro_dppvi.privacy.budget import budget_of_each
from numpyro_dppvi.protocol import algorithm, client, planning, rounds, schedules, server
from numpyro_dppvi.protocol.algorithm import Assembly
from numpyro_dppvi.protocol.planning import RunSpec
from numpyro_dppvi.protocol.problem import Problem, RoundParams
from numpyro_dppvi.protocol.rounds import RoundState
from numpyro_dppvi.protocol.server import TrustedAggregator
from numpyro_dppvi.silo.messages import Form

_MOST_BYTES = 2**22
_MOST_NAME = 64


@dataclass(frozen=True, kw_only=True, eq=False)
class Study:
    """What a study file assigns to ``study``: the arguments of ``fit``, with no data.

    Args:
        model: A NumPyro model.
        hospitals: Each hospital's name and its number of records, which is public.
        records: Shape and dtype of one record of each argument of the model, such as
            ``{"X": ((8,), "float32"), "y": ((), "int32")}``.
        budget: A ``PrivacyBudget``, or one per hospital by name.
        seed: Public: of draws of latents and of the start, as ``fit``'s ``rng_key``. Noise has
            secret keys of each hospital's own.
        guide: As of ``fit``.
        method: What a hospital does when visited. Write down what ``recommend`` recommends, so that
            what is reviewed does not depend on a version.
        schedule: ``sequential``, ``synchronous``, ``random_subset(...)`` or ``Asynchronous``, whose
            latencies say how often each hospital is visited; it answers at its own pace. ``None``
            as in ``fit``.
        num_rounds: Rounds.
        damping: The share of a change that is merged.
        model_kwargs: Public arguments of the model.
        init_scale: A public start for neural networks.
        prior: An earlier study's posterior in the place of the model's priors: ``load_prior(...)``.
        trusted_aggregator: Whether releases carry shares of the noise that is in their sum, for a
            server that everybody trusts to show nobody anything but what it makes of sums; as of
            ``fit``. Each hospital must allow it in its ``silo.toml``.

    Raises:
        ValueError: If a hospital's name or number of records, or a record's shape, is not valid.
        TypeError: If an argument is of another kind.
    """

    model: Model
    hospitals: Mapping[str, int]
    records: Mapping[str, Any]
    budget: PrivacyBudget | Mapping[str, PrivacyBudget] | None
    seed: int = 0
    guide: Any = None
    method: AnyMethod = field(default_factory=DPOptimization)
    schedule: schedules.Schedule | None = None
    num_rounds: int = 10
    damping: float = 0.4
    model_kwargs: Mapping[str, Any] = field(default_factory=dict)
    init_scale: float | None = None
    prior: Prior | None = None
    trusted_aggregator: bool | TrustedAggregator = False

    def __post_init__(self) -> None:
        example = "{'north': 1200, 'south': 900}"
        hospitals = _validate.mapping("hospitals", self.hospitals, example)
        if not hospitals:
            raise ValueError(f"hospitals must name one, got none: write hospitals={example}.")
        for name in hospitals:
            check_name("hospitals", name)
        _validate.client_sizes(list(hospitals.values()), "hospitals")
        rows = _validate.mapping("records", self.records, '{"X": ((8,), "float32")}')
        if not rows:
            raise ValueError(
                "records must have shape and dtype of one record of each argument of the model, "
                "got none: write records={'X': ((8,), 'float32'), 'y': ((), 'int32')}, say."
            )
        for name, row in rows.items():
            _row(name, row)
        values.check(self.method)
        _validate.not_negative_int("seed", self.seed)
        _validate.positive_int("num_rounds", self.num_rounds, schedules.MOST_ROUNDS)
        _validate.mapping("model_kwargs", self.model_kwargs, "{'num_groups': 3}")
        if self.prior is not None:
            example = "load_prior('earlier.npz', sha256, model)"
            _validate.instance("prior", self.prior, Prior, example)
        if self.budget is not None:
            budget_of_each(self.budget, len(hospitals), self.names)

    @property
    def names(self) -> tuple[str, ...]:
        """The hospitals' names; client m of the algorithm is the m-th."""
        return tuple(self.hospitals)


def check_name(argument: str, name: Any) -> str:
    """Returns a hospital's name, or refuses what could not be sent, or be a file's name."""
    # Names become folders, keys of TOML and words of messages.
    plain = isinstance(name, str) and name.isascii() and 0 < len(name) <= _MOST_NAME
    if not plain or not name.replace("-", "").replace("_", "").isalnum():
        raise ValueError(
            f"{argument} must have names of letters, digits, - and _, at most {_MOST_NAME}, got "
            f"{_validate.shown(name)}: write 'north', say."
        )
    return str(name)


def _row(name: str, row: Any) -> jax.ShapeDtypeStruct:
    try:
        shape, dtype = row
        # As JAX holds it: without x64 "float64" means float32, at the server and at every hospital.
        found = jax.dtypes.canonicalize_dtype(np.dtype(dtype))
        shape = tuple(_validate.positive_int(name, int(size)) for size in shape)
    except (TypeError, ValueError):
        must = f"have shape and dtype of one record of {name!r}"
        raise _validate.wrong("records", must, row, "{'X': ((8,), 'float32')}") from None
    if found.kind not in "biuf":
        raise ValueError(
            f"records must have a dtype of numbers for {name!r}, got {found}: write 'float32', say."
        )
    return jax.ShapeDtypeStruct(shape, found)


class PinnedStudy(NamedTuple):
    """A study and the digest that everybody knows it by.

    Attributes:
        study: What the file assigns to ``study``.
        digest: SHA-256 of its bytes, 64 hexadecimal digits.
    """

    study: Study
    digest: str


def digest_of(path: str | os.PathLike[str]) -> str:
    """The digest that pins a study file.

    Args:
        path: The file.

    Raises:
        FileNotFoundError: If there is none.
    """
    return hashlib.sha256(_bytes(path)).hexdigest()


def load_study(path: str | os.PathLike[str], sha256: str | None = None) -> PinnedStudy:
    """Runs a study file and returns the ``Study`` that it assigns to ``study``.

    Args:
        path: A Python file. It is read once: what is run is what was digested.
        sha256: The digest that it must have; ``None`` for any, where nobody has to be protected
            from it.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it has another digest (it is not run then), or assigns no ``Study``.
    """
    source = _bytes(path) if sha256 is None else _reviewed(path, sha256, "study")
    digest = hashlib.sha256(source).hexdigest()
    # Known to Python by its digest, because dataclasses and pickles look modules up by name.
    module = types.ModuleType(f"dppvi_study_{digest[:16]}")
    module.__file__ = os.fspath(path)
    sys.modules[module.__name__] = module
    # Code, run as it is: that is why it is read by people and pinned by its digest.
    exec(compile(source, module.__file__, "exec"), vars(module))
    study = getattr(module, "study", None)
    if not isinstance(study, Study):
        raise ValueError(
            f"{path} must assign a Study to study, got {_validate.shown(study)}: write "
            "study = numpyro_dppvi.silo.Study(model=..., ...)."
        )
    return PinnedStudy(study, digest)


def load_prior(
    path: str | os.PathLike[str],
    sha256: str,
    model: Model,
    guide: Any = None,
    model_kwargs: Mapping[str, Any] | None = None,
) -> Prior:
    """An earlier study's posterior, for a study file to begin with.

    Args:
        path: The file that ``posterior.save`` wrote; beside the study file it is
            ``Path(__file__).with_name("earlier.npz")``.
        sha256: Its digest, as :func:`digest_of` returns it. Written in the study file, it makes
            the posterior part of what is reviewed.
        model: The model that it was fitted with.
        guide: The guide that it was fitted with, if there was one.
        model_kwargs: Public arguments of the model, as of ``load``.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it has another digest, or is not a posterior of this model.
    """
    held = _reviewed(path, sha256, "posterior")
    # What is loaded is what was digested, whatever becomes of the file.
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "posterior.npz"
        copy.write_bytes(held)
        return load(copy, model, guide, model_kwargs).as_prior()


def _reviewed(path: str | os.PathLike[str], sha256: str, what: str) -> bytes:
    """What is in a file, if it has the digest that is pinned."""
    _validate.instance("sha256", sha256, str, "'4f5c...', what digest_of(path) returns")
    # One read: a file that changes between digest and use would make the digest a lie.
    held = _bytes(path)
    digest = hashlib.sha256(held).hexdigest()
    if digest != sha256:
        raise ValueError(
            f"{path} is not the {what} that was reviewed: its sha256 is {digest}, and {sha256} is "
            "pinned; restore the file, or read it and pin its new digest."
        )
    return held


def _bytes(path: str | os.PathLike[str]) -> bytes:
    target = _validate.path("path", path)
    with os.fdopen(_disk.open_to_read(target, through_links=True), "rb") as file:
        # One byte more than is allowed tells a file that is too large, without reading all of it.
        source = file.read(_MOST_BYTES + 1)
    if len(source) > _MOST_BYTES:
        raise ValueError(f"{target} is too large: it has more than {_MOST_BYTES} bytes.")
    return source


class Step(NamedTuple):
    """A visit that a study plans for a hospital: the round, from 0, and which of its groups."""

    round: int
    group: int


class Prepared(NamedTuple):
    """What follows from a study, at the server as at every hospital; all of it is public."""

    study: Study
    digest: str  # what everybody knows it by
    run: RunSpec  # how its method is run
    plan: PrivacyPlan | None  # the privacy plan; ``None`` without privacy
    assembly: Assembly  # what rounds are made of
    keys: tuple[PRNGKey, PRNGKey]  # public keys: of the start, and of the rounds
    form: Form  # what arrays its messages hold

    def first_state(self) -> RoundState:
        """What server and hospitals begin with."""
        return self.assembly.first_state(self.keys[0])

    def round_key(self, round_number: int) -> PRNGKey:
        """The public key of a round."""
        return jax.random.fold_in(self.keys[1], round_number)

    def steps(self, number: int) -> tuple[Step, ...]:
        """The visits that are planned for a hospital, in order; the first is step 1."""
        return tuple(
            Step(r, g)
            for r, groups in enumerate(self.run.groups)
            for g, group in enumerate(groups.tolist())
            if number in group
        )


def prepare(pinned: PinnedStudy, secret_keys: SecretKeys = SecretKeys()) -> Prepared:
    """Reads the model, plans the noise, and settles what messages hold; looks at no record."""
    # The secret keys are a hospital's own; the server's are never used.
    study, sizes = pinned.study, tuple(pinned.study.hospitals.values())
    run = planning.resolve(
        study.method,
        num_clients=len(sizes),
        schedule=study.schedule,
        num_rounds=study.num_rounds,
        trusted_aggregator=study.trusted_aggregator,
        damping=study.damping,
        init_scale=study.init_scale,
    )
    # A budget beside a method without noise is planned as well, because the plan refuses it.
    private = run.local.releases != "nothing" or study.budget is not None
    plan = planning.plan_run(run, study.budget, sizes, names=study.names) if private else None
    planning.warn_of_unsafe(run, plan)
    rows = {name: _row(name, row) for name, row in study.records.items()}
    pooled = {
        name: jax.ShapeDtypeStruct((sum(sizes), *row.shape), row.dtype)
        for name, row in rows.items()
    }
    setup = algorithm.Setup(
        study.model,
        study.guide,
        pooled,
        study.model_kwargs,
        client_sizes=sizes,
        plan=plan,
        secret_keys=secret_keys,
        earlier=study.prior,
        **run.asked,
    )
    assembly = algorithm.prepare(setup)
    # The keys of fit(..., rng_key=jax.random.key(seed)), which splits rows with the first.
    _, *keys = jax.random.split(jax.random.key(study.seed), 3)
    form = _form(assembly, rows, max(sizes))
    return Prepared(study, pinned.digest, run, plan, assembly, (keys[0], keys[1]), form)


def _form(assembly: Assembly, rows: Mapping[str, jax.ShapeDtypeStruct], capacity: int) -> Form:
    """What arrays messages hold; nothing is computed."""
    problem = assembly.problem
    any_q = problem.family.natural(problem.family.standard())
    begin = any_q if assembly.setup.init_scale is not None else None
    shapes = _sent_and_released.eval_shape(
        problem,
        {name: jax.ShapeDtypeStruct((capacity, *r.shape), r.dtype) for name, r in rows.items()},
        assembly.params,
        any_q,
        begin,
    )
    # Forms are compared with messages leaf by leaf; only shapes and dtypes are read of them.
    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
    q, factor, told, value = zeros
    return Form(q, factor, told, value, share=np.zeros((), jax.dtypes.canonicalize_dtype(float)))


# Never run; traced once for all servers and gateways of a process whose problems are equal.
@functools.partial(jax.jit, static_argnums=0)
def _sent_and_released(
    problem: Problem, records: dict[str, Array], params: RoundParams, any_q: Natural, begin: Any
) -> tuple[Any, ...]:
    """A client's request and release, of which only the shapes are asked for."""
    state = rounds.first_state(problem, params, any_q, begin, asynchronous=False)
    key, q = jax.random.key(0), state.server.natural
    asked = server.request(problem, params, state.server, q, 0, key)
    mine, kept = jax.tree.map(lambda leaf: leaf[0], (params.clients, state.clients))
    count = jnp.asarray(next(iter(records.values())).shape[0])
    outcome = client.respond(problem, mine, kept, asked, records, count, key)
    return asked.q, asked.factor, asked.told, outcome.release
