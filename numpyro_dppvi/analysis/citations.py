"""``citation``: BibTeX entries for what a run used, each with its reason."""

import importlib.metadata
from collections.abc import Iterator
from dataclasses import dataclass

import dp_accounting as dpa

from numpyro_dppvi import _validate
from numpyro_dppvi.analysis.selection import Selection
from numpyro_dppvi.run.fitting import FitResult

_PAPER = r"""@article{heikkila2023dppvi,
  title   = {Differentially private partitioned variational inference},
  author  = {Heikkil{\"a}, Mikko A. and Ashman, Matthew and Swaroop, Siddharth and Turner, Richard E. and Honkela, Antti},
  journal = {Transactions on Machine Learning Research},
  year    = {2023},
  url     = {https://openreview.net/forum?id=55BcghgicI}
}"""  # noqa: E501  # one line a field
_PVI = """@misc{ashman2022pvi,
  title  = {Partitioned Variational Inference: A Framework for Probabilistic Federated Learning},
  author = {Ashman, Matthew and Bui, Thang D. and Nguyen, Cuong V. and Markou, Stratis and Weller, Adrian and Swaroop, Siddharth and Turner, Richard E.},
  year   = {2022},
  eprint = {2202.12275},
  archiveprefix = {arXiv}
}"""  # noqa: E501
_NUMPYRO = """@misc{phan2019numpyro,
  title  = {Composable Effects for Flexible and Accelerated Probabilistic Programming in {NumPyro}},
  author = {Phan, Du and Pradhan, Neeraj and Jankowiak, Martin},
  year   = {2019},
  eprint = {1912.11554},
  archiveprefix = {arXiv}
}"""
_CLIPPED_GRADIENTS = """@inproceedings{abadi2016dpsgd,
  title     = {Deep Learning with Differential Privacy},
  author    = {Abadi, Martin and Chu, Andy and Goodfellow, Ian and McMahan, H. Brendan and Mironov, Ilya and Talwar, Kunal and Zhang, Li},
  booktitle = {Proceedings of the 2016 ACM SIGSAC Conference on Computer and Communications Security},
  pages     = {308--318},
  year      = {2016},
  doi       = {10.1145/2976749.2978318}
}"""  # noqa: E501
_COMMITTEE = """@article{tresp2000bcm,
  title   = {A {Bayesian} Committee Machine},
  author  = {Tresp, Volker},
  journal = {Neural Computation},
  volume  = {12},
  number  = {11},
  pages   = {2719--2741},
  year    = {2000}
}"""
_CENTRAL = r"""@inproceedings{jalko2017dpvi,
  title     = {Differentially Private Variational Inference for Non-conjugate Models},
  author    = {J{\"a}lk{\"o}, Joonas and Dikmen, Onur and Honkela, Antti},
  booktitle = {Proceedings of the 33rd Conference on Uncertainty in Artificial Intelligence (UAI)},
  year      = {2017}
}"""
_CLOSED_FORM = """@inproceedings{balle2018gaussian,
  title     = {Improving the {Gaussian} Mechanism for Differential Privacy: Analytical Calibration and Optimal Denoising},
  author    = {Balle, Borja and Wang, Yu-Xiang},
  booktitle = {Proceedings of the 35th International Conference on Machine Learning (ICML)},
  year      = {2018}
}"""  # noqa: E501
_GRIDS = """@article{doroshenko2022dots,
  title   = {Connect the Dots: Tighter Discrete Approximations of Privacy Loss Distributions},
  author  = {Doroshenko, Vadym and Ghazi, Badih and Kamath, Pritish and Kumar, Ravi and Manurangsi, Pasin},
  journal = {Proceedings on Privacy Enhancing Technologies},
  volume  = {2022},
  number  = {4},
  pages   = {552--570},
  year    = {2022}
}"""  # noqa: E501
_FIXED_SIZE = """@inproceedings{zhu2022characteristic,
  title     = {Optimal Accounting of Differential Privacy via Characteristic Function},
  author    = {Zhu, Yuqing and Dong, Jinshuo and Wang, Yu-Xiang},
  booktitle = {Proceedings of the 25th International Conference on Artificial Intelligence and Statistics (AISTATS)},
  pages     = {4782--4817},
  year      = {2022}
}"""  # noqa: E501
_DISCRETE = r"""@inproceedings{canonne2020discrete,
  title     = {The Discrete {Gaussian} for Differential Privacy},
  author    = {Canonne, Cl{\'e}ment and Kamath, Gautam and Steinke, Thomas},
  booktitle = {Advances in Neural Information Processing Systems 33 (NeurIPS)},
  year      = {2020}
}"""
_SELECTION = r"""@inproceedings{papernot2022tuning,
  title     = {Hyperparameter Tuning with {R}{\'e}nyi Differential Privacy},
  author    = {Papernot, Nicolas and Steinke, Thomas},
  booktitle = {International Conference on Learning Representations (ICLR)},
  year      = {2022}
}"""


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
    if isinstance(result, Selection):
        chosen = citation(result.run).references
        return Citation((*chosen, Reference("The privacy cost of selection", _SELECTION)))
    if not isinstance(result, FitResult):
        raise TypeError(
            "result must be the result of fit or select, got "
            f"{_validate.shown(result)}: write citation(fit(...))."
        )
    return Citation(tuple(_references(result)))


def _references(result: FitResult) -> Iterator[Reference]:
    """The references of a fit."""
    yield Reference("This software", _software())
    yield Reference("The method and its mathematics", _PAPER)
    yield from _of_method(result)
    yield from _of_accountant(result)
    yield Reference("The modelling language", _NUMPYRO)


def _of_method(result: FitResult) -> Iterator[Reference]:
    if result.run.central:
        yield Reference("Central variational inference", _CENTRAL)
    elif result.run.alone:
        yield Reference("The committee machine", _COMMITTEE)
    else:
        yield Reference("Partitioned variational inference", _PVI)
    if result.run.local.releases == "gradients":
        yield Reference("Clipped and noised gradients", _CLIPPED_GRADIENTS)


def _of_accountant(result: FitResult) -> Iterator[Reference]:
    if result.plan is None:
        return
    events = {
        type(event)
        for client in range(len(result.client_sizes))
        for event, _ in result.ledger.composition(client)
    }
    if dpa.ZCDpEvent in events:  # then everything is accounted as zCDP
        yield Reference("Discrete Gaussian noise and its accounting", _DISCRETE)
        return
    if dpa.GaussianDpEvent in events:
        yield Reference("The epsilon of Gaussian noise in closed form", _CLOSED_FORM)
    if dpa.SampledWithoutReplacementDpEvent in events:
        yield Reference("The privacy profile of batches of fixed size", _FIXED_SIZE)
    if events - {dpa.GaussianDpEvent}:
        yield Reference("Privacy loss distributions", _GRIDS)


def _software() -> str:
    version = importlib.metadata.version("numpyro-dppvi")
    return f"""@software{{numpyro_dppvi,
  title   = {{numpyro_dppvi: differentially private partitioned variational inference for NumPyro}},
  author  = {{{{The numpyro_dppvi developers}}}},
  version = {{{version}}},
  url     = {{https://github.com/numpyro-dppvi/numpyro_dppvi}}
}}"""
