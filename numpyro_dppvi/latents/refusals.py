"""Refuses, by name, what a model must not have: latents of records, and integers without end."""

from numpyro.distributions.constraints import Constraint

from numpyro_dppvi._validate import UnsupportedModelError
from numpyro_dppvi.latents.integers import integers
from numpyro_dppvi.latents.trace import Structure


def refuse_sites(found: Structure, absent: tuple[str, ...]) -> None:
    """Refuses latents of records, parts of latents, and a model without latents or outcomes.

    Args:
        found: What the model is made of.
        absent: The model's arguments that were left out, an outcome perhaps.

    Raises:
        UnsupportedModelError: Names the latent.
    """
    latents = [site for site in found.sites if not site.observed]
    for site in latents:
        inside = [plate.name for plate in site.plates if plate.name in found.plates]
        if site.name.endswith("_unobserved"):
            raise UnsupportedModelError(
                f"obs_mask makes {site.name!r} a latent with one value a record, which clients "
                "cannot share: write with numpyro.handlers.mask(mask=seen) around the statement "
                "instead, which leaves missing outcomes out."
            )
        if inside or site.name in found.local:
            where = "has one value a record"
            if inside:
                where = f"is inside the data plate {inside[0]!r}: each record would have its own"
            raise UnsupportedModelError(
                f"latent {site.name!r} {where}, which clients cannot share. "
                f"{_if_outcome(site.name, absent)}; else sum or integrate it out."
            )
        part = [plate for plate in site.plates if plate.drawn != plate.size]
        if part:
            raise UnsupportedModelError(
                f"the plate {part[0].name!r} draws a part of latent {site.name!r} at each step, "
                "and a factor needs all of it: leave out subsample_size there."
            )
    if not latents:
        raise UnsupportedModelError(
            "the model has no latent: draw what is to be learnt with numpyro.sample and a prior."
        )
    if not any(site.observed for site in found.sites):
        raise UnsupportedModelError(
            "the model observes nothing: pass the outcome, numpyro.sample('y', ..., obs=y), and "
            "put it into data={'y': ...}."
        )


def _if_outcome(latent: str, absent: tuple[str, ...]) -> str:
    """What to write if what looks like a latent is meant to be observed."""
    if absent:
        return f"If it is the outcome, add the model's argument: data={{{absent[0]!r}: ...}}"
    return f"If it is the outcome, observe it: numpyro.sample({latent!r}, ..., obs=y)"


def refuse_infinite(name: str, support: Constraint) -> None:
    """Refuses a discrete latent whose values cannot be gone through.

    Raises:
        UnsupportedModelError: Names the latent.
    """
    if support.is_discrete and integers(support) is None:
        raise UnsupportedModelError(
            f"latent {name!r} is discrete and not on one finite range of integers, so that no sum "
            "goes through its values: give it a prior that is, such as dist.Categorical, or sum it "
            "out in the model (a logsumexp in a numpyro.factor)."
        )


def refuse_moving_support(outcome: str, causes: frozenset[str]) -> None:
    """Refuses an outcome that some values of the latents make impossible.

    A record's density is zero beyond the bound and jumps there, so that no gradient tells where
    the bound is.

    Raises:
        UnsupportedModelError: Names the outcome and the latent.
    """
    if causes:
        raise UnsupportedModelError(
            f"the support of the outcome {outcome!r} depends on latent {min(causes)!r}, so that "
            "records have no density beyond a bound that is learnt, and no gradient finds it: "
            "bound the outcome by a public constant (model_kwargs) or a column of data."
        )
