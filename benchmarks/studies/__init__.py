"""Models of many kinds of study, each as its author would write it, with made-up records."""

from benchmarks.studies.classes import STUDIES as CLASSES
from benchmarks.studies.groups import STUDIES as GROUPS
from benchmarks.studies.raw import STUDIES as RAW
from benchmarks.studies.refused import STUDIES as REFUSED
from benchmarks.studies.regression import STUDIES as REGRESSIONS
from benchmarks.studies.series import STUDIES as SERIES
from benchmarks.studies.study import Study

STUDIES: dict[str, Study] = {**REGRESSIONS, **GROUPS, **CLASSES, **SERIES, **RAW, **REFUSED}
