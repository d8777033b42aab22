"""MIMIC-III: does a patient die in hospital, from the first 48 hours in intensive care?

MIMIC-III (Johnson et al. 2016) is given to credentialed researchers only, so there is no data
here. This module reads what `mimic3-benchmarks` (Harutyunyan et al. 2019) makes of it for its
in-hospital mortality task, the task of Heikkilä et al. 2023::

    in-hospital-mortality/
      train/listfile.csv        stay,y_true
      train/<stay>              Hours,Capillary refill rate,...,pH: a line for each time
      test/listfile.csv
      test/<stay>

Each of the 17 measurements becomes five features over the 48 hours: mean, lowest, highest and last
value, and whether it was measured at all. (Which features the paper used, it does not say.)
"""

import csv
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np

from numpyro_dppvi.datasets.tabular import TabularData, balanced

__all__ = ["load"]

_HOURS = 48.0
# No value is worth more than this many widths, however wild.
_LIMIT = 4.0

# Centre and width: clinical constants, not statistics of these patients, so that no privacy is
# spent on them. A value that was never measured stands at its centre.
_CHANNELS = {
    "Capillary refill rate": (0.0, 1.0),
    "Diastolic blood pressure": (60.0, 15.0),
    "Fraction inspired oxygen": (0.3, 0.2),
    "Glascow coma scale eye opening": (4.0, 1.0),
    "Glascow coma scale motor response": (6.0, 1.5),
    "Glascow coma scale total": (15.0, 4.0),
    "Glascow coma scale verbal response": (5.0, 2.0),
    "Glucose": (130.0, 50.0),
    "Heart Rate": (85.0, 18.0),
    "Height": (170.0, 10.0),
    "Mean blood pressure": (78.0, 15.0),
    "Oxygen saturation": (97.0, 3.0),
    "Respiratory rate": (19.0, 5.0),
    "Systolic blood pressure": (118.0, 20.0),
    "Temperature": (37.0, 0.8),
    "Weight": (80.0, 22.0),
    "pH": (7.4, 0.08),
}

# Charted words without their number on the Glasgow coma scale.
_WORDS = {
    "Glascow coma scale eye opening": {
        "none": 1.0,
        "to pain": 2.0,
        "to speech": 3.0,
        "spontaneously": 4.0,
    },
    "Glascow coma scale motor response": {
        "no response": 1.0,
        "abnormal extension": 2.0,
        "abnormal flexion": 3.0,
        "flex-withdraws": 4.0,
        "localizes pain": 5.0,
        "obeys commands": 6.0,
    },
    "Glascow coma scale verbal response": {
        "no response": 1.0,
        "no response-ett": 1.0,
        "incomprehensible sounds": 2.0,
        "inappropriate words": 3.0,
        "confused": 4.0,
        "oriented": 5.0,
    },
}

_SUMMARIES: Mapping[str, Callable[[np.ndarray], float]] = {
    "mean": lambda x: float(np.mean(x)),
    "lowest": lambda x: float(np.min(x)),
    "highest": lambda x: float(np.max(x)),
    "last": lambda x: float(x[-1]),
}


def load(folder: str | Path) -> TabularData:
    """Load the in-hospital mortality task, as many survivors as deaths, four fifths to train on.

    Args:
        folder: The task's folder, which holds `train/` and `test/`; both are joined and split anew,
            as in the paper.

    Returns:
        4475 training rows and 1119 held-out rows of MIMIC-III 1.4, of 86 features: a column of ones
        for the bias, and five a measurement. The label is 1 for a death in hospital.

    Raises:
        FileNotFoundError: If a list or an episode is missing.
        ValueError: If a file is not of this format.
    """
    names = ("bias", *(f"{c}: {s}" for c in _CHANNELS for s in (*_SUMMARIES, "measured")))
    episodes = [e for part in ("train", "test") for e in _listed(Path(folder) / part)]
    rows = np.stack([_features(path) for path, _ in episodes]).astype(np.float32)
    labels = np.array([label for _, label in episodes], np.int32)
    return balanced(rows, labels, names)


def _listed(folder: Path) -> Iterator[tuple[Path, int]]:
    """Episodes and labels of one part, in the order of its list."""
    place = folder / "listfile.csv"
    lines = _lines(place)
    if not lines or not {"stay", "y_true"} <= set(lines[0]):
        raise ValueError(
            f"{place} must have the columns stay and y_true and a line for each episode: pass the "
            "folder that mimic3-benchmarks wrote for in-hospital mortality."
        )
    for line in lines:
        if line["y_true"] not in ("0", "1"):
            raise ValueError(
                f"{place} must say 0 or 1 for y_true, got {line['y_true']!r} for {line['stay']}: "
                "pass the folder of the task in-hospital-mortality."
            )
        yield folder / line["stay"], int(line["y_true"])


def _lines(place: Path) -> list[dict[str, str]]:
    if not place.is_file():
        raise FileNotFoundError(
            f"there is no {place}: pass the folder that mimic3-benchmarks wrote for in-hospital "
            "mortality, with train/ and test/ in it."
        )
    with place.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _features(place: Path) -> np.ndarray:
    """One episode's row."""
    lines = _lines(place)
    missing = [name for name in ("Hours", *_CHANNELS) if lines and name not in lines[0]]
    if missing:
        raise ValueError(
            f"{place} must have the column {missing[0]!r}: pass time series as mimic3-benchmarks "
            "writes them."
        )
    early = [line for line in lines if float(line["Hours"]) <= _HOURS]
    early.sort(key=lambda line: float(line["Hours"]))
    features = [1.0]
    for channel, (centre, width) in _CHANNELS.items():
        values = _values(early, channel, place)
        scaled = np.clip((values - centre) / width, -_LIMIT, _LIMIT)
        features += [of(scaled) if len(scaled) else 0.0 for of in _SUMMARIES.values()]
        features.append(float(len(scaled) > 0))
    return np.array(features)


def _values(lines: list[dict[str, str]], channel: str, place: Path) -> np.ndarray:
    entries = [line[channel].strip() for line in lines if line[channel].strip()]
    return np.array([_number(entry, _WORDS.get(channel, {}), channel, place) for entry in entries])


def _number(entry: str, words: Mapping[str, float], channel: str, place: Path) -> float:
    """A number, a word of a scale, or both, as in `4 Spontaneously` and `1.0 ET/Trach`."""
    if entry.lower() in words:
        return words[entry.lower()]
    try:
        return float(entry.split()[0])
    except ValueError:
        raise ValueError(
            f"{place} has {entry!r} under {channel!r}, which is neither a number nor a word of "
            "its scale: pass time series as mimic3-benchmarks writes them."
        ) from None
