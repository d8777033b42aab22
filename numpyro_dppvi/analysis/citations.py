"""``citation``: BibTeX entries for what a run used, each with its reason."""

import functools
import importlib.metadata
import importlib.resources
from collections.abc import Iterator
from dataclasses import dataclass

import dp_accounting as dpa

from numpyro_dppvi import _validate
from numpyro_dppvi.analysis.selection import Selection
from numpyro_dppvi.run.fitting import FitResult


@dataclass(frozen=True)
class Reference:
    """A reference.

    Attributes:
        reason: What the run used it for.
        bibtex: The BibTeX entry.
    """

    reason: str
    bibtex: str

    @property
    def key(self) -> str:
        """The entry's key."""
        return self.bibtex.split("{", maxsplit=1)[1].split(",", maxsplit=1)[0]


@dataclass(frozen=True, repr=False)
class Citation:
    """References for a run. Prints as BibTeX, with the reasons as comments.

    Attributes:
        references: The references, the software first.
    """

    references: tuple[Reference, ...]

    @property
    def keys(self) -> tuple[str, ...]:
        """The entries' keys."""
        return tuple(reference.key for reference in self.references)

    def __str__(self) -> str:
        """The BibTeX entries."""
        return "\n\n".join(f"% {r.reason}\n{r.bibtex}" for r in self.references)

    __repr__ = __str__  # so that a notebook shows it


def citation(result: FitResult | Selection) -> Citation:
    """References for a run: this software, the paper, and the methods that the run used.

    Args:
        result: The result of ``fit`` or ``select``.

    Returns:
        A :class:`Citation`, which prints as BibTeX. The version is the installed one.

    Raises:
        TypeError: If ``result`` is neither.

    Example:
        >>> import jax, numpy as np, numpyro, numpyro.distributions as dist
        >>> import numpyro_dppvi as dppvi
        >>> def model(y):
        ...     mean = numpyro.sample("mean", dist.Normal(0, 1))
        ...     with numpyro.plate("records", y.shape[0]):
        ...         numpyro.sample("y", dist.Normal(mean, 1), obs=y)
        >>> result = dppvi.fit(
        ...     model,
        ...     None,
        ...     [{"y": np.zeros(50)}, {"y": np.ones(80)}],
        ...     rng_key=jax.random.key(0),
        ...     budget=dppvi.PrivacyBudget(epsilon=1.0),
        ...     num_rounds=1,
        ... )
        >>> dppvi.citation(result).keys
        ('numpyro_dppvi', 'heikkila2023dppvi', 'ashman2022pvi', 'abadi2016dpsgd', \
'balle2018gaussian', 'phan2019numpyro')
    """
    _validate.instance("result", result, (FitResult, Selection), "fit(...)")
    if isinstance(result, FitResult):
        return Citation(tuple(_references(result)))
    cost = _reference("The privacy cost of selection", "papernot2022tuning")
    return Citation((*_references(result.run), cost))


def _references(result: FitResult) -> Iterator[Reference]:
    yield _reference("This software", "numpyro_dppvi")
    yield _reference("The method and its mathematics", "heikkila2023dppvi")
    yield from _of_method(result)
    yield from _of_accountant(result)
    yield _reference("The modelling language", "phan2019numpyro")


def _of_method(result: FitResult) -> Iterator[Reference]:
    if result.run.local.central:
        yield _reference("Central variational inference", "jalko2017dpvi")
    elif result.run.alone:
        yield _reference("The committee machine", "tresp2000bcm")
    else:
        yield _reference("Partitioned variational inference", "ashman2022pvi")
    if result.run.local.releases == "gradients":
        yield _reference("Clipped and noised gradients", "abadi2016dpsgd")


def _of_accountant(result: FitResult) -> Iterator[Reference]:
    if result.plan is None:
        return
    events = {
        type(event)
        for client in range(len(result.client_sizes))
        for event, _ in result.ledger.composition(client)
    }
    if dpa.ZCDpEvent in events:  # then everything is accounted as zCDP
        yield _reference("Discrete Gaussian noise and its accounting", "canonne2020discrete")
        return
    if dpa.GaussianDpEvent in events:
        yield _reference("The epsilon of Gaussian noise in closed form", "balle2018gaussian")
    if dpa.SampledWithoutReplacementDpEvent in events:
        yield _reference("The privacy profile of batches of fixed size", "zhu2022characteristic")
    if events - {dpa.GaussianDpEvent}:
        yield _reference("Privacy loss distributions", "doroshenko2022dots")


def _reference(reason: str, key: str) -> Reference:
    return Reference(reason, _entries()[key])


@functools.cache
def _entries() -> dict[str, str]:
    """The entries of ``references.bib`` by key; that of this software with its version."""
    text = importlib.resources.files(__package__).joinpath("references.bib").read_text("utf-8")
    text = text.replace("INSTALLED", importlib.metadata.version("numpyro-dppvi"))
    return {Reference("", entry).key: entry for entry in text.strip().split("\n\n")}
