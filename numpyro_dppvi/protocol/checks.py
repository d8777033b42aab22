"""Refuses what does not go together: a method with a plan, an aggregator, a seed or shards."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from numpyro_dppvi import _validate
from numpyro_dppvi.methods import values
from numpyro_dppvi.privacy import ClientPlan, PrivacyPlan, SecretKeys, noise_laws
from numpyro_dppvi.protocol.server import TrustedAggregator
from numpyro_dppvi.records import Shards, SpreadShards


def check_aggregator(method: Any, trusted: TrustedAggregator | None) -> None:
    """Refuses an aggregator that is missing, gains nothing, or whose noise would not add up."""
    name = type(method).__name__
    if values.draws_exactly(method) and trusted is not None:
        raise ValueError(
            "trusted_aggregator must be left out with noise=DiscreteGaussian(), because the "
            "clients' shares do not add up to a discrete Gaussian: leave it out, or write "
            "noise=Gaussian()."
        )
    if method.aggregator == "needed" and trusted is None:
        raise ValueError(
            f"{name}() needs a trusted aggregator, because every step adds up all clients' "
            "gradients: write trusted_aggregator=True."
        )
    if method.aggregator == "useless" and trusted is not None:
        raise ValueError(
            f"{name}() gains nothing from a trusted aggregator, because each client's noise "
            "protects its own steps: leave trusted_aggregator out, or write "
            "method=VirtualClients(num_shards=50)."
        )


def check_source(method: Any, secret_keys: SecretKeys) -> None:
    """Refuses discrete noise that cannot be drawn: from a seed, or without OpenDP."""
    if not values.draws_exactly(method):
        return
    if secret_keys.insecure_seed is not None:
        raise ValueError(
            "insecure_noise_seed must be left out with noise=DiscreteGaussian(), because OpenDP "
            "draws from the operating system alone: leave it out, or write noise=Gaussian()."
        )
    noise_laws.require()


def check_plan(
    method: Any,
    plan: PrivacyPlan | None,
    client_sizes: Sequence[int],
    trusted: TrustedAggregator | None,
) -> None:
    """Refuses a plan that does not describe exactly what the method is going to release."""
    # Noise, accounting and budgets come from the plan, clipping and sampling from the method: a run
    # under another method's plan would cost more than its statement says.
    if (method.releases == "nothing") != (plan is None):
        raise ValueError(
            f"{type(method).__name__}() and {'no plan' if plan is None else 'a plan'} do not go "
            "together: private methods need plan=plan_privacy(...), NonPrivate() takes none."
        )
    if plan is None:
        return
    if len(plan.clients) != len(client_sizes):
        raise ValueError(
            f"the plan is for {len(plan.clients)} clients, but there are {len(client_sizes)}: make "
            "it with client_sizes of the same length."
        )
    # A plan with more shares than the aggregator has, for one, would add less noise in all than the
    # statement says.
    num_shares = trusted.num_shares(len(client_sizes)) if trusted else None
    # What the method itself would plan, without noise: budgets may be anything.
    study = values.Study(
        budgets=[dataclasses.replace(one.budget, epsilon=math.inf) for one in plan.clients],
        num_visits=[one.num_visits for one in plan.clients],
        client_sizes=[int(size) for size in client_sizes],
        num_shares=num_shares,
        before=[frozenset()] * len(client_sizes),
    )
    wanted = method.plan(study)
    for number, (mine, its) in enumerate(zip(plan.clients, wanted.clients, strict=True)):
        found, facts = _facts(mine), _facts(its)
        for name, value in facts.items():
            if found.get(name) != value:
                raise ValueError(
                    f"the plan does not describe this run: {name} is {found.get(name)} for client "
                    f"{number} in the plan and {value} in the run: make it with plan_privacy(...) "
                    "from the same method, client_sizes and trusted_aggregator."
                )


def _facts(client: ClientPlan) -> dict[str, Any]:
    """What a client releases, noise, budget and visits aside; what decides most comes first."""
    found, first = dict(vars(client.mechanism)), ("num_shares", "num_records", "clip_norm")
    # Contributions follow from the budget, and are checked with it.
    del found["noise_multiplier"], found["contributions"]
    return {
        "mechanism": type(client.mechanism).__name__,
        **{name: found[name] for name in first},
        "releases_per_visit": client.releases_per_visit,
        **found,
    }


def check_alone(name: str, file: Any) -> None:
    """Refuses a file of a run that several processes share: each would write it."""
    if file is not None and jax.process_count() > 1:
        raise ValueError(
            f"{name} is written by one process, got a run of {jax.process_count()} "
            "(jax.distributed): leave it out."
        )


def check_shards(
    shards: Shards | SpreadShards,
    client_sizes: Sequence[int],
    row: Mapping[str, jax.ShapeDtypeStruct],
) -> None:
    """Refuses records of other clients, or other arrays, than the algorithm was built for."""
    example = "stack_clients(data_per_client)"
    _validate.instance("shards", shards, (Shards, SpreadShards), example)
    if isinstance(shards, Shards) and jax.process_count() > 1:
        raise ValueError(
            f"in a run of {jax.process_count()} processes (jax.distributed) each visits clients of "
            "its own, got shards of which each holds all: write shards=spread(shards)."
        )
    # The first two axes are clients and rows.
    found = {name: (leaf.shape[2:], leaf.dtype) for name, leaf in shards.records.items()}
    wanted = {name: (struct.shape, struct.dtype) for name, struct in row.items()}
    if found != wanted:
        raise ValueError(
            f"shards must hold the arrays that the algorithm was built for, got {_rows(found)} "
            f"and records of {_rows(wanted)}: give pvi the same arrays that are stacked."
        )
    if isinstance(shards, SpreadShards):
        sizes = list(shards.sizes)
    else:
        sizes = np.asarray(shards.num_records).tolist()
    # Clients are known by their place: out of order, one would release under another's noise, at
    # the cost of another's budget. Sizes are all that can tell.
    if sizes != [int(size) for size in client_sizes]:
        raise ValueError(
            f"shards must hold the clients that the algorithm was built for, got {few(sizes)} "
            f"records and client_sizes of {few(client_sizes)}: stack the same clients."
        )


def _rows(arrays: Mapping[str, tuple[tuple[int, ...], Any]]) -> str:
    return ", ".join(f"{name} ({dtype}, {shape})" for name, (shape, dtype) in arrays.items())


def few(sizes: Sequence[int]) -> str:
    """Clients' numbers of records, for a message."""
    shown = ", ".join(map(str, sizes[:5]))
    return shown if len(sizes) <= 5 else f"{shown}, ... ({len(sizes)} clients)"
