"""Every study of the gallery: what ``fit`` makes of it with its defaults, beside NumPyro's SVI.

    python -m benchmarks gallery
    python -m benchmarks gallery --studies rats "smooth curve"
    python -m benchmarks noisy

Records are made up and nothing is fetched. ``fit`` runs without privacy, over two clients and with
its defaults; SVI fits the same model and guide (``AutoNormal``) to all records. Latent by latent in
unconstrained space: the largest shift of a mean, in SVI's standard deviations, and the largest
change of a standard deviation. Where records have discrete latents of their own, SVI fits the same
density with these summed out by hand. What is refused is shown with its sentence.

``noisy`` is the same under privacy: each study's records twenty times over, over five clients, at
epsilon 3 with all defaults, beside a fit without privacy by a guide of the same kind.
"""

import functools
import multiprocessing
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro.distributions import biject_to
from numpyro.infer.autoguide import AutoMultivariateNormal

import numpyro_dppvi as dppvi
from benchmarks.examples import Example, difference, marginals, svi
from benchmarks.paper import table as paper
from benchmarks.studies import STUDIES
from benchmarks.studies.study import Study

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks-gallery.md"

CLOSE = 0.1
"""A posterior whose means are within so many standard deviations of SVI's counts as close."""

# Of each record, how many there are under privacy, and the budget.
_COPIES, _EPSILON = 20, 3.0
# Studies that one process fits; compiled programs stay in its memory until it ends.
_BATCH = 10
_STUMBLES = (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError)


class Found(NamedTuple):
    """What came out of one study.

    Attributes:
        outcome: ``"runs"``, ``"refused"``, or ``"fails"``.
        sentence: The run's status, or why it was refused or has failed.
        shift: The largest shift of a mean from SVI's, in its standard deviations; NaN without.
        percent: The largest change of a standard deviation.
        seconds: Wall time of the fit, with compilation.
        rounds: Rounds that it took.
    """

    outcome: str
    sentence: str
    shift: float = float("nan")
    percent: float = float("nan")
    seconds: float = float("nan")
    rounds: int = 0


class Noisy(NamedTuple):
    """What came out of one study under privacy.

    Attributes:
        outcome: ``"COMPLETED"`` and the like, or ``"fails"``.
        sentence: The run's status, or why it has failed.
        method: The method that ``fit`` took.
        error: Of means of all latents, beside those without privacy and in the posterior's own
            standard deviations: root mean square.
        largest: The largest of them.
        width: The median standard deviation over that without privacy.
    """

    outcome: str
    sentence: str
    method: str = "-"
    error: float = float("nan")
    largest: float = float("nan")
    width: float = float("nan")


def fitted(study: Study) -> dppvi.run.FitResult:
    """The fit with its defaults, without privacy."""
    return dppvi.fit(
        study.model,
        study.guide,
        dict(study.records),
        rng_key=jax.random.key(0),
        clients=2,
        method=dppvi.NonPrivate(),
        model_kwargs=study.model_kwargs,
        progress_bar=False,
    )


def tried(study: Study, beside: bool = True) -> Found:
    """Fits a study; with ``beside`` to SVI, too."""
    begun = time.perf_counter()
    try:
        result = fitted(study)
    except dppvi.UnsupportedModelError as refusal:
        is_true = bool(study.refused) and study.refused in str(refusal)
        return Found("refused" if is_true else "fails", str(refusal))
    except _STUMBLES as error:
        return Found("fails", f"{type(error).__name__}: {error}".splitlines()[0])
    seconds, sentence = time.perf_counter() - begun, str(result.status)
    rounds = result.status.rounds
    if study.refused:
        return Found("fails", f"must be refused ({study.refused}), but: {sentence}")
    if not beside or study.guide is not None:
        return Found("runs", sentence, seconds=seconds, rounds=rounds)
    records = {name: jnp.asarray(column) for name, column in study.records.items()}
    whole = Example(study.twin or study.model, records, study.model_kwargs)
    shift, percent = difference(marginals(result.posterior), svi(whole, 4000, 1000))
    return Found("runs", sentence, shift, percent, seconds, rounds)


def noisy(study: Study) -> Noisy:
    """Fits a study under privacy with all defaults, and without privacy."""
    number = len(next(iter(study.records.values())))
    order = np.random.RandomState(0).permutation(np.tile(np.arange(number), _COPIES))
    records = {name: np.asarray(column)[order] for name, column in study.records.items()}
    fit = functools.partial(
        dppvi.fit,
        study.model,
        data=records,
        rng_key=jax.random.key(0),
        clients=5,
        model_kwargs=study.model_kwargs,
        progress_bar=False,
    )
    try:
        found = fit(study.guide, budget=dppvi.PrivacyBudget(_EPSILON, 1e-5))
        joint = study.guide is None and isinstance(found.method, dppvi.FisherScoring)
        guide = AutoMultivariateNormal(study.model) if joint else study.guide
        exact = fit(guide, method=dppvi.NonPrivate())
    except _STUMBLES as error:
        return Noisy("fails", f"{type(error).__name__}: {error}".splitlines()[0])
    (mean, sd), (true_mean, true_sd) = (_moments(each.posterior) for each in (found, exact))
    away = (mean - true_mean) / sd
    return Noisy(
        found.status.outcome.name,
        str(found.status),
        type(found.method).__name__,
        float(np.sqrt(np.mean(away**2))),
        float(np.max(np.abs(away))),
        float(np.median(sd / true_sd)),
    )


def _moments(posterior: dppvi.posterior.Posterior) -> tuple[np.ndarray, np.ndarray]:
    """Means and standard deviations of all latents in unconstrained space, by draws."""
    drawn = posterior.sample(jax.random.key(1), (4000,))
    latents = posterior.space.latents
    # As the model has them: inference may put effects in the places of some.
    base = [
        drawn[lt.name] if lt.is_discrete else biject_to(lt.support).inv(drawn[lt.name])
        for lt in latents
    ]
    flat = np.concatenate([np.reshape(each, (4000, -1)) for each in base], axis=1)
    return flat.mean(axis=0), flat.std(axis=0)


def noisy_table(names: tuple[str, ...] = ()) -> None:
    """One line a study that is not refused, also in the docs if all are asked for."""
    print(f"\nfit with its defaults, five clients, epsilon {_EPSILON:g}, beside no privacy")
    found: dict[str, Noisy] = {}
    for name, one in _each(tuple(names or (n for n in STUDIES if not STUDIES[n].refused)), noisy):
        found[name] = one
        numbers = f"{one.method:<16}{one.error:>8.2f}{one.largest:>8.2f}{one.width:>8.2f}"
        print(f"{name:<34}{numbers}  {one.outcome:<10} {one.sentence}", flush=True)
        if not names:
            PAGE.write_text(paper.between_marks(PAGE.read_text(), "noisy", _noisy_markdown(found)))


def _noisy_markdown(found: Mapping[str, Noisy]) -> str:
    rows = [
        "| study | outcome | method | error (sd) | largest | width |",
        "| - | - | - | - | - | - |",
        *(
            f"| {name} | {one.outcome} | {one.method} | {_or_dash(one.error, 2)} "
            f"| {_or_dash(one.largest, 2)} | {_or_dash(one.width, 2)} |"
            for name, one in found.items()
        ),
    ]
    return "\n".join(rows)


def table(names: tuple[str, ...] = (), beside: bool = True) -> None:
    """One line a study, and how many run, are refused for their true reason, or fail.

    All of them together are written into the docs, too, as they come.
    """
    print("\nfit(method=NonPrivate()) with its defaults, two clients, beside SVI with AutoNormal")
    print(f"{'':<34}{'mean off (sd)':>14}{'sd off (%)':>12}{'rounds':>8}{'seconds':>9}  status")
    found = {}
    for name, one in _each(tuple(names or STUDIES), functools.partial(tried, beside=beside)):
        found[name] = one
        numbers = f"{_or_dash(one.shift, 3):>14}{_or_dash(one.percent, 1):>12}"
        numbers += f"{one.rounds:>8}{one.seconds:>9.1f}"
        shown = numbers if one.outcome == "runs" else f"{one.outcome:>43}"
        print(f"{name:<34}{shown}  {one.sentence}", flush=True)
        if not names and beside:
            PAGE.write_text(paper.between_marks(PAGE.read_text(), "gallery", markdown(found)))
    print(_counted(found))


def markdown(found: Mapping[str, Found]) -> str:
    """The table of the docs: one line a study, those that are refused at the end."""
    rows = [
        "| study | what the status says | rounds | a mean off by (sd) | a sd off by (%) |",
        "| - | - | - | - | - |",
    ]
    for name, one in sorted(found.items(), key=lambda each: each[1].outcome == "refused"):
        said = one.sentence
        if one.outcome == "runs":
            said = "settled" if said.endswith("every merge was accepted.") else said
        numbers = f"{one.rounds or '-'} | {_or_dash(one.shift, 3)} | {_or_dash(one.percent, 1)}"
        words = said if one.outcome == "runs" else f"{one.outcome}: {said}"
        rows.append(f"| {name} | {words.replace('|', ' ')} | {numbers} |")
    return "\n".join([_counted(found), "", *rows])


def _counted(found: Mapping[str, Found]) -> str:
    outcomes = [one.outcome for one in found.values()]
    counts = ", ".join(f"{outcomes.count(kind)} {kind}" for kind in ("runs", "refused", "fails"))
    compared = [one for one in found.values() if one.shift == one.shift]
    close = sum(one.shift < CLOSE for one in compared)
    return f"{len(found)} studies: {counts}; {close} of {len(compared)} within {CLOSE} sd of SVI."


def _each(names: Sequence[str], what: Callable[[Study], Any]) -> Iterator[tuple[str, Any]]:
    """What comes out of each study; of many, a process for every few."""
    if len(names) <= _BATCH:
        yield from _of_batch(names, what)
        return
    spawn = multiprocessing.get_context("spawn")  # what is compiled cannot be forked
    for start in range(0, len(names), _BATCH):
        batch = names[start : start + _BATCH]
        with ProcessPoolExecutor(1, spawn) as process:
            try:
                yield from process.submit(_of_batch, batch, what).result()
            except BrokenProcessPool:
                for name in batch:
                    yield name, Found("fails", "its process was killed, for want of memory perhaps")


def _of_batch(names: Sequence[str], what: Callable[[Study], Any]) -> list[tuple[str, Any]]:
    numpyro.enable_x64(False)
    return [(name, what(STUDIES[name])) for name in names]


def _or_dash(number: float, digits: int) -> str:
    """A number, or a dash for NaN: nothing was compared."""
    return f"{number:.{digits}f}" if number == number else "-"
