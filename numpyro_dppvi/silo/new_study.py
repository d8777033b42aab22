"""The folder that ``dppvi new-study`` makes; what is in it are the templates beside this file."""

import importlib.resources
import json
import os
from collections.abc import Mapping
from pathlib import Path

from numpyro_dppvi import _validate
from numpyro_dppvi.silo.study import check_name, digest_of

_AT_THE_CONSORTIUM = {
    "server.py": "server.py",
    "flower/pyproject.toml": "flower_pyproject.toml",
    "flower/study_app.py": "flower_study_app.py",
}
_AT_A_HOSPITAL = ("hospital.py", "silo.toml")


def write(folder: str | os.PathLike[str], hospitals: Mapping[str, int]) -> Path:
    """Writes a study into a new folder; it runs once each hospital has completed its loader."""
    place = _validate.path("folder", folder)
    for name in hospitals:
        check_name("hospitals", name)
    # The folder of that name is the consortium's.
    if "flower" in {name.lower() for name in hospitals}:
        raise ValueError(
            "hospitals must not be called flower, which is the name of the "
            "consortium's folder: write another name."
        )
    if place.exists():
        raise ValueError(f"folder must be a new one, and {place} is there: write another name.")
    place.mkdir(parents=True)
    # The study first: its digest goes into every silo.toml.
    _fill(place / "study.py", "study.py", HOSPITALS=json.dumps(dict(hospitals)))
    for name, template in _AT_THE_CONSORTIUM.items():
        (place / name).parent.mkdir(exist_ok=True)
        _fill(place / name, template, WHERE=repr(str(place.absolute())))
    # Not imported: it needs Flower, and those who write a study need not have it.
    node = importlib.resources.files("numpyro_dppvi").joinpath("flower", "node.py")
    (place / "flower" / "node.py").write_text(node.read_text("utf-8"), "utf-8")
    digest = digest_of(place / "study.py")
    for name, number in hospitals.items():
        (place / name).mkdir()
        for file in _AT_A_HOSPITAL:
            _fill(place / name / file, file, NAME=name, DIGEST=digest, RECORDS=str(number))
    return place


def _fill(path: Path, template: str, **words: str) -> None:
    source = importlib.resources.files(__package__).joinpath("template", f"{template}.txt")
    text = source.read_text("utf-8")
    for word, meaning in words.items():
        text = text.replace(word, meaning)
    path.write_text(text, "utf-8")
