"""What a run is, in words and digests, so that a checkpoint of another run is refused by name."""

import dataclasses
import hashlib
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import optax

from numpyro_dppvi._typing import Coordinates, PRNGKey
from numpyro_dppvi.latents.fingerprint import fingerprint
from numpyro_dppvi.posterior.posterior import Posterior
from numpyro_dppvi.privacy import PrivacyPlan
from numpyro_dppvi.protocol.algorithm import Setup
from numpyro_dppvi.protocol.planning import RunSpec

# Functions are printed with where they happen to lie in memory.
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def description(
    setup: Setup,
    posterior: Posterior,
    client_names: Sequence[str],
    rng_key: PRNGKey,
    run: RunSpec,
    plan: PrivacyPlan | None,
) -> dict[str, str]:
    """A run by the aspects that must not change while it is under way."""
    # Nothing of it depends on a record. The same records must be passed again, and this is not
    # checked: a digest of them on the disk would tell something about them.
    model, space, prior = posterior.model, posterior.space, posterior.prior
    start = posterior.family.standard()
    sizes, noise_seed = list(setup.client_sizes), setup.secret_keys.insecure_seed
    shapes = {name: (s.shape[1:], str(s.dtype)) for name, s in posterior.records.items()}
    seed = "none" if noise_seed is None else f"given, {_digest(noise_seed)}"
    return {
        "model": f"{getattr(model, '__name__', type(model).__name__)} {_digest(space.program)}",
        # Before the guide: a method brings its own where none is given.
        "method": _in_words(run.method, start),
        "guide": _guide(posterior),
        "prior": "the model's" if prior is None else f"an earlier posterior, {_digest_of(prior)}",
        "data shape": f"{shapes}, {len(sizes)} clients of {_listed(sizes)} records",
        "list of clients": ", ".join(client_names) or "no names",
        "number of rounds": str(run.num_rounds),
        "schedule": _schedule(run.groups),
        "trusted aggregator": _in_words(run.trusted, start),
        "budget": "none" if plan is None else _budgets(plan),
        "damping": repr(run.damping),
        "init_scale": repr(run.init_scale),
        # Public, and needed in full: with another key draws of the latents would be others.
        "rng_key": str(np.asarray(jax.random.key_data(rng_key)).tolist()),
        "insecure_noise_seed": seed,
        "ledger file": "none" if setup.ledger_file is None else "one",
        # In another precision the rounds to come would be rounded otherwise.
        "precision": str(jax.dtypes.canonicalize_dtype(float)),
    }


def _digest(value: Any) -> str:
    # 48 bits tell runs apart by accident, and need not withstand anybody: charges are compared one
    # by one (`Journal.resume`).
    return hashlib.sha256(str(value).encode()).hexdigest()[:12]


def _digest_of(prior: Any) -> str:
    return _digest([np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(prior.natural)])


def _guide(posterior: Posterior) -> str:
    kinds = dict.fromkeys(type(member).__name__ for _, member in posterior.family.members)
    of = f"{' and '.join(kinds)} of {', '.join(posterior.names[:5])}"
    more = ", ..." if len(posterior.names) > 5 else ""
    return f"{of}{more} ({_digest(posterior.family)})"


def _listed(sizes: list[int]) -> str:
    few = ", ".join(map(str, sizes[:5]))
    return few if len(sizes) <= 5 else f"{few}, ... ({_digest(sizes)})"


def _schedule(groups: Sequence[np.ndarray]) -> str:
    first = groups[0]
    shape = f"{first.shape[0]} groups of {first.shape[1]} clients in the first round"
    return f"{shape}, {_digest([of_round.tolist() for of_round in groups])}"


def _budgets(plan: PrivacyPlan) -> str:
    budgets = list(dict.fromkeys(client.budget for client in plan.clients))
    words = ", ".join(f"({b.epsilon:g}, {b.delta:g}) {b.relation}" for b in budgets[:3])
    more = ", ..." if len(budgets) > 3 else ""
    # What was released before takes part in the calibration: the same budget after more of it means
    # more noise.
    before = [sorted(map(repr, [*mine.before, *mine.earlier])) for mine in plan.clients]
    after = f" after {_digest(before)}" if any(before) else ""
    return f"{words}{more}, plan {_digest(plan.clients)}{after}"


def _in_words(value: Any, start: Coordinates) -> str:
    """A method, sampler or the like: its name and fields; optimisers by what they compute."""
    if isinstance(value, optax.GradientTransformation):
        # An optimiser is two functions, which say nothing when they are printed; their traced
        # programs tell one learning rate from another.
        state = jax.eval_shape(value.init, start)
        program = fingerprint(
            jax.make_jaxpr(value.init)(start), jax.make_jaxpr(value.update)(start, state, start)
        )
        return f"optimizer {program[:12]}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        # But for what changes no result and is not shown.
        names = [field.name for field in dataclasses.fields(value) if field.repr]
        inner = ", ".join(f"{name}={_in_words(getattr(value, name), start)}" for name in names)
        return f"{type(value).__name__}({inner})"
    return _ADDRESS.sub("", repr(value))
