"""``dppvi silo``: what a data officer sees."""

import ast
import contextlib
import importlib
import re
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from numpyro_dppvi import silo
from numpyro_dppvi.silo import messages, wire
from numpyro_dppvi.silo.command import main
from numpyro_dppvi.silo.messages import Ready
from tests.silo import hospitals

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "three-silos.md"


@pytest.fixture
def path(tmp_path):
    hospitals.write_study(tmp_path, hospitals.QUICK)
    return hospitals.write_hospital(tmp_path, "north", epsilon=3.5)


def test_check_says_what_would_leave_and_what_it_costs(path, capsys):
    assert main(["silo", "check", str(path)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    for words in (
        "north gives away at most epsilon = 3.5 at delta = 1e-05",
        "has released nothing yet",
        "value/w/linear: float32 of shape (2,)",
        "failed: bool",
        "4.0000 of 4",
        "3 of these steps have not been released yet; the caps cover 2 of them.",
        "One step was computed on the records",
        "Intervals will be at least ",
        "it could not for west.",
    ):
        assert words in said
    assert not (path.parent / "store").exists()  # nothing was charged or kept


def test_check_says_whom_shares_of_noise_do_not_protect_against(tmp_path, capsys):
    arguments = f"{hospitals.VIRTUAL}, schedule=dppvi.synchronous, trusted_aggregator=True"
    hospitals.write_study(tmp_path, arguments)
    path = hospitals.write_hospital(tmp_path, "west", allowed="trusted_aggregator = true")
    assert main(["silo", "check", str(path)]) == 0
    assert "whoever runs the server can learn more, and must be trusted" in capsys.readouterr().out


def test_check_counts_what_was_released(path, capsys):
    pinned = silo.load_study(path.parents[1] / "study.py")
    with silo.open_gateway(path) as gateway:
        form = silo.study.prepare(pinned).form
        visit = messages.Visit(pinned.digest, "north", 1, 0, form.share, form.q, form.factor, None)
        q = form.q["w"]._replace(quadratic=form.q["w"].quadratic - 0.5)
        gateway.handle(messages.encode(visit._replace(q={"w": q})))
    assert main(["silo", "check", str(path)]) == 0
    said = capsys.readouterr().out
    assert "has spent 2.145 in 1 releases" in said
    assert "2 of these steps have not been released yet; the caps cover 1 of them." in said


def test_what_is_wrong_is_one_sentence(path, capsys):
    path.write_text(path.read_text().replace("epsilon = 3.5", "epsilon = -1.0"))
    assert main(["silo", "check", str(path)]) == 1
    said = capsys.readouterr()
    assert not said.out
    assert re.fullmatch(r"dppvi: in .*silo\.toml: epsilon must be a number above 0.*\n", said.err)


def test_digest_is_what_pins_a_study(path, capsys):
    study = path.parents[1] / "study.py"
    assert main(["silo", "digest", str(study)]) == 0
    assert capsys.readouterr().out.strip() == silo.digest_of(study)
    assert silo.digest_of(study) in path.read_text()


def new_study(folder, *hospitals):
    return main(["new-study", str(folder), *(hospitals or ("north=600", "south=400"))])


def test_from_an_empty_folder_to_a_posterior(tmp_path, capsys, monkeypatch):
    """As the page has it: a study, a loader for each hospital, their gateways, and the server."""
    page = PAGE.read_text("utf-8")
    printed = dict(re.findall(r"```python\n# (\S+)\n(.*?)```", page, re.DOTALL))
    (line,) = re.findall(r"^    dppvi (new-study .*)$", page, re.MULTILINE)
    sizes = {"north": 600, "south": 400, "west": 500}
    monkeypatch.chdir(tmp_path)
    assert main(line.split()) == 0
    assert "dppvi silo check heart/north/silo.toml" in capsys.readouterr().out
    assert main(["silo", "check", "heart/north/silo.toml"]) == 1
    assert capsys.readouterr().err == (
        "dppvi: complete load() in hospital.py: it reads this hospital's records.\n"
    )
    opened = {}
    with contextlib.ExitStack() as stack:
        for name, size in sizes.items():
            monkeypatch.delitem(sys.modules, "hospital", raising=False)  # one a process
            loader = printed["hospital.py"].replace("RECORDS", str(size))
            (tmp_path / "heart" / name / "hospital.py").write_text(loader)
            importlib.invalidate_caches()
            gateway = silo.open_gateway(f"heart/{name}/silo.toml")
            opened[name] = stack.enter_context(gateway)
        monkeypatch.setattr(silo, "send", lambda path, data: opened[path.parts[-3]].handle(data))
        run("heart/server.py")
    said = capsys.readouterr().out
    assert "All 5 rounds ran" in said
    for name in sizes:
        assert f"\n{name}\nPrivacy statement" in said
    exec(compile(printed["afterwards.py"], "afterwards.py", "exec"), {})
    assert float(capsys.readouterr().out.split()[-1]) > 0.9


def run(path):
    source = (Path.cwd() / path).read_text()
    exec(compile(source, path, "exec"), {"__file__": str(Path.cwd() / path)})


def test_a_new_study_has_an_application_for_flower(tmp_path):
    folder = tmp_path / "it's a study"
    assert new_study(folder, "north=10") == 0
    found = tomllib.loads((folder / "flower" / "pyproject.toml").read_text())
    parts = found["tool"]["flwr"]["app"]["components"]
    assert parts == {"serverapp": "study_app:server", "clientapp": "node:client"}
    assert "numpyro_dppvi" not in (folder / "flower" / "node.py").read_text()
    tree = ast.parse((folder / "flower" / "study_app.py").read_text())
    (where,) = (
        node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        if node.targets[0].id == "FOLDER"
    )
    assert where == str(folder)


@pytest.mark.parametrize(
    ("hospitals_", "words"),
    [
        (("no rth=5",), "must have names of letters, digits"),
        (("flower=5",), "must not be called flower"),
    ],
)
def test_what_is_no_new_study_is_refused(hospitals_, words, tmp_path, capsys):
    assert new_study(tmp_path / "study", *hospitals_) == 1
    assert words in capsys.readouterr().err
    assert not (tmp_path / "study").exists()


def test_a_new_study_replaces_no_folder_and_wants_numbers(tmp_path, capsys):
    assert new_study(tmp_path) == 1
    assert "folder must be a new one" in capsys.readouterr().err
    for wrong in ("north", "north=", "north=0", "north=-1", "north=many"):
        with pytest.raises(SystemExit):
            new_study(tmp_path / "study", wrong)
        assert "write north=600" in capsys.readouterr().err


@pytest.mark.slow
def test_run_answers_until_it_is_stopped(path):
    """A process of its own, over its socket; SIGTERM ends it, and it leaves no socket."""
    command = [sys.executable, "-c", "from numpyro_dppvi.silo.command import main; main()"]
    process = subprocess.Popen(
        [*command, "silo", "run", str(path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline() == f"north listens on {path.parent}/store/silo.sock\n"
        digest = silo.digest_of(path.parents[1] / "study.py")
        socket = path.parent / "store" / "silo.sock"
        reply = silo.send(socket, messages.encode(messages.Join(digest)))
        assert messages.read(Ready, reply, wire.read_head(reply)) == Ready(digest, "north", 0)
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        process.stdout.close()
    assert not socket.exists()
