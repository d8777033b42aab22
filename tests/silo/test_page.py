"""The page on real clients: its study, its silo.toml and its server run as they are printed."""

import contextlib
import re
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from numpyro_dppvi import silo
from numpyro_dppvi.silo import settings
from numpyro_dppvi.silo.command import main
from numpyro_dppvi.silo.sockets import listening

PAGE = Path(__file__).parents[2] / "docs" / "real-clients.md"


@pytest.fixture
def files():
    """The page's files by name."""
    blocks = re.findall(
        r"```(?:python|toml)\n# (\S+)\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL
    )
    return dict(blocks)


@pytest.fixture
def folder(files, tmp_path, monkeypatch):
    """Two hospitals, and the study beside their folders too."""
    monkeypatch.chdir(tmp_path)
    Path("study.py").write_text(files["study.py"])
    digest = silo.digest_of("study.py")
    for name, size in {"north": 600, "south": 400}.items():
        place = tmp_path / name
        place.mkdir()
        (place / "study.py").write_text(files["study.py"])
        loader = files["hospital.py"].replace("600", str(size))
        (place / f"hospital_{name}.py").write_text(loader)
        text = files["silo.toml"].replace("hospital:load", f"hospital_{name}:load")
        text = re.sub('sha256 = ".*"', f'sha256 = "{digest}"', text)
        (place / "silo.toml").write_text(text.replace('"north"', f'"{name}"'))
    yield tmp_path
    for name in ("north", "south"):
        sys.modules.pop(f"hospital_{name}", None)


def test_the_page_runs(files, folder, capsys):
    assert main(["silo", "check", "north/silo.toml"]) == 0
    assert "the caps cover 5 of them" in capsys.readouterr().out
    found = {}
    with contextlib.ExitStack() as stack:
        for name in ("north", "south"):
            path = folder / name / "silo.toml"
            gateway = stack.enter_context(silo.open_gateway(path))
            place = settings.read(path).socket
            server = stack.enter_context(listening(place, gateway.handle, gateway.most_bytes))
            thread = threading.Thread(target=server.serve_forever, args=(0.01,))
            thread.start()
            stack.callback(thread.join)
            stack.callback(server.shutdown)
        exec(compile(files["server.py"], "server.py", "exec"), found)
    assert found["result"].status.rounds == 5
    assert np.all(np.isfinite(found["result"].posterior.mean["w"]))
    assert found["statements"]["south"].as_dict()["max_epsilon"] <= 1


def test_what_the_page_says_of_defaults_is_so(folder):
    found = settings.read(folder / "north" / "silo.toml")
    budget = found.caps.budget
    assert (budget.relation, budget.unit, budget.max_records_per_person) == (
        "replace_one",
        "record",
        1,
    )
    assert found.caps.trusted_aggregator is False
    assert found.store == folder / "north" / "store"
    assert found.socket == found.store / "silo.sock"
    assert found.socket_group is None


def test_the_page_counts_the_refusals():
    assert len(silo.messages.Code) == 8
    assert "one of eight fixed sentences" in PAGE.read_text("utf-8")
