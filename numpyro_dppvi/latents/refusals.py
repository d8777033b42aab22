"""Refuses models with unsupported sites, such as latents of single records."""

from numpyro.distributions.constraints import Constraint

from numpyro_dppvi._validate import UnsupportedModelError
from numpyro_dppvi.latents.domains import integers
from numpyro_dppvi.latents.trace import Site, Structure


def refuse_sites(found: Structure, absent: tuple[str, ...]) -> None:
    """Refuses latents per record, subsampled latents, and models without latents or outcomes.

    ``absent`` are optional arguments that were not given, perhaps an outcome.
    """
    own = {site.name for site in (*found.summed, *found.unseen)}
    latents = [site for site in found.sites if not site.observed and site.name not in own]
    for site in latents:
        inside = [plate.name for plate in site.plates if plate.name in found.plates]
        # With a plate or without: w of shape (N,) is a latent of each record, however it is
        # written.
        if inside or site.name in found.local:
            where = "has one value per record"
            if inside:
                where = f"is inside the data plate {inside[0]!r}: each record would have its own"
            otherwise = (
                "integrate it out (of missing entries of a column x, obs=x, obs_mask=~jnp.isnan(x) "
                "does that)"
            )
            if site.discrete:
                otherwise = "mark it, infer={'enumerate': 'parallel'}, and it is summed out"
            raise UnsupportedModelError(
                f"latent {site.name!r} {where}, which clients cannot share. "
                f"{_if_outcome(site.name, absent)}; otherwise {otherwise}."
            )
        # NumPyro would draw another part of the latent at each step, and its factor would be of
        # another one.
        part = [plate for plate in site.plates if plate.drawn != plate.size]
        if part:
            raise UnsupportedModelError(
                f"the plate {part[0].name!r} subsamples latent {site.name!r} at each step, but a "
                "factor needs all of it: leave out subsample_size there."
            )
    if not latents:
        raise UnsupportedModelError(
            "the model has no latent: draw the unknowns with numpyro.sample and a prior."
        )
    if not any(site.observed for site in found.sites):
        raise UnsupportedModelError(
            "the model observes nothing: pass the outcome, numpyro.sample('y', ..., obs=y), and "
            "put it into data={'y': ...}."
        )


def _if_outcome(latent: str, absent: tuple[str, ...]) -> str:
    """What to write if a latent is meant to be the outcome."""
    if absent:
        return f"If it is the outcome, add the model's argument: data={{{absent[0]!r}: ...}}"
    return f"If it is the outcome, observe it: numpyro.sample({latent!r}, ..., obs=y)"


def refuse_infinite(name: str, support: Constraint) -> None:
    """Refuses a discrete latent whose values cannot be enumerated."""
    if support.is_discrete and integers(support) is None:
        refuse_endless(name)


def refuse_endless(name: str) -> None:
    """Refuses a discrete latent without one fixed and finite range of integers."""
    raise UnsupportedModelError(
        f"latent {name!r} is discrete and not on one finite range of integers, so its values "
        "cannot be enumerated: give it a prior that is, such as dist.Categorical, or sum it "
        "out in the model (a logsumexp in a numpyro.factor)."
    )


def refuse_moving_support(outcome: str, causes: frozenset[str]) -> None:
    """Refuses an outcome whose support depends on a latent."""
    # A record's density jumps to zero at the learnt bound, so its gradient does not show the bound.
    if causes:
        raise UnsupportedModelError(
            f"the support of the outcome {outcome!r} depends on latent {min(causes)!r}, but no "
            "gradient shows where that bound is: bound the outcome by a public constant "
            "(model_kwargs) or a column of data."
        )


def refuse_weights(name: str, summed: str) -> None:
    """Refuses a density that ``handlers.scale`` changes, over whose classes is summed."""
    raise UnsupportedModelError(
        f"handlers.scale changes the density of {name!r}, but a sum over the discrete latent "
        f"{summed!r} needs probabilities: leave it out, or sum out {summed!r} in the model (a "
        "logsumexp in a numpyro.factor)."
    )


def refuse_imputed(unseen: Site, outcome: str) -> None:
    """Refuses missing entries on which an outcome depends."""
    instead = "Give them a normal distribution, or integrate them out in the model"
    if unseen.discrete:
        instead = "Mark the statement, infer={'enumerate': 'parallel'}, and they are summed out"
    raise UnsupportedModelError(
        f"the outcome {outcome!r} depends on {unseen.name!r}, the missing entries by obs_mask: "
        f"each record has its own, which clients cannot share. {instead}."
    )
