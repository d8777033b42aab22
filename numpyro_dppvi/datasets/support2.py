"""SUPPORT2: does a seriously ill patient die in hospital, from what is known in the first days?

Source of the data: F. Harrell, SUPPORT2 (UCI Machine Learning Repository, 2023), CC BY 4.0,
https://doi.org/10.3886/ICPSR02957.v2; see `data/README.md`. It stands in for the paper's MIMIC-III,
which may not be passed on.

Only what a physician had by the third day of the study enters:

- age, sex, race, disease group, number of comorbidities, diabetes, dementia, cancer;
- coma score and the physiological and laboratory values of day 3.

Left out, because it is known later, follows from the outcome, or is somebody's prognosis: death,
survival time, length of stay, charges and costs, model's and physicians' survival estimates
(`surv2m`, `surv6m`, `prg2m`, `prg6m`), do-not-resuscitate orders and their day, the scores `sps`
and `aps` that were fitted to this very cohort, `avtisst` (treatment intensity, averaged over days),
`hday`, the two-month functional outcome `sfdm2`. Also left out: what came from interviews
(education, income, activities of daily living), because the patients who died early were not
interviewed, so that a missing answer tells the outcome.
"""

from pathlib import Path

import numpy as np

from numpyro_dppvi.datasets.tabular import Features, TabularData, balanced, columns_of

_FILE = Path(__file__).parent / "data" / "support2.csv.gz"

# Centre and width of each number, and what stands for a missing one: clinical constants, not
# statistics of these patients, so that no privacy is spent on them. Normal values for missing
# laboratory results are those that the study's authors recommend.
_NUMBERS = {
    "age": (60.0, 15.0, 60.0),
    "num.co": (2.0, 1.5, 2.0),
    "scoma": (10.0, 25.0, 0.0),
    "meanbp": (85.0, 27.0, 85.0),
    "hrt": (95.0, 30.0, 95.0),
    "resp": (22.0, 9.0, 22.0),
    "temp": (37.0, 1.2, 37.0),
    "pafi": (250.0, 110.0, 333.3),
    "alb": (3.2, 0.8, 3.5),
    "sod": (138.0, 6.0, 138.0),
    "ph": (7.4, 0.08, 7.4),
}
_SKEWED = {  # the same, on a logarithmic scale
    "wblc": (10.0, 2.0, 9.0),
    "bili": (1.0, 3.0, 1.01),
    "crea": (1.2, 2.0, 1.01),
    "glucose": (130.0, 1.6, 100.0),
    "bun": (20.0, 2.2, 6.51),
    "urine": (2000.0, 2.5, 2502.0),
}
# Missing for many: whether it was measured is an indicator of its own.
_OFTEN_MISSING = ("pafi", "alb", "bili", "ph", "glucose", "bun", "urine")
_CATEGORIES = {
    "sex": ("female", "male"),
    "race": ("asian", "black", "hispanic", "other", "white"),
    "dzgroup": (
        *("ARF/MOSF w/Sepsis", "CHF", "COPD", "Cirrhosis", "Colon Cancer", "Coma"),
        *("Lung Cancer", "MOSF w/Malig"),
    ),
    "diabetes": ("1",),
    "dementia": ("1",),
    "ca": ("metastatic", "no", "yes"),
}
# No laboratory value is worth more than this many widths, however wild.
_LIMIT = 4.0


def load_support2() -> TabularData:
    """Loads SUPPORT2, as many survivors as deaths, four fifths to train on.

    Columns are centred and scaled by clinical constants and not by statistics of these patients, so
    that no privacy is spent on them; whether a value was measured is a column of its own.

    Source: F. Harrell, *SUPPORT2* (UCI Machine Learning Repository, 2023), CC BY 4.0.

    Returns:
        3776 training rows and 944 held-out rows. The label is 1 for a death in hospital.
    """
    columns = columns_of(_FILE)
    y = (np.asarray(columns["hospdead"]) == "1").astype(np.int32)
    X, names = _encode(columns, len(y))
    return balanced(X, y, names)


def _encode(columns: dict[str, list[str]], num_rows: int) -> tuple[Features, tuple[str, ...]]:
    """Text columns to features: bias, numbers, whether measured, categories."""
    features = {"bias": np.ones(num_rows)}
    for name, (centre, width, missing) in _NUMBERS.items():
        features[name] = (_numbers(columns[name], missing) - centre) / width
    for name, (centre, width, missing) in _SKEWED.items():
        values = np.maximum(_numbers(columns[name], missing), 0.01)
        features[name] = np.log(values / centre) / np.log(width)
    features = {name: np.clip(value, -_LIMIT, _LIMIT) for name, value in features.items()}
    for name in _OFTEN_MISSING:
        features[f"{name} measured"] = np.array([entry != "" for entry in columns[name]], float)
    for name, categories in _CATEGORIES.items():
        for category in categories:
            features[f"{name}={category}"] = np.array(columns[name]) == category
    stacked = np.stack(list(features.values()), axis=1).astype(np.float32)
    return stacked, tuple(features)


def _numbers(entries: list[str], missing: float) -> np.ndarray:
    return np.array([float(entry) if entry else missing for entry in entries])
