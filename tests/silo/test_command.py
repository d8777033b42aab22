"""``dppvi silo``: what a data officer sees."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from numpyro_dppvi import silo
from numpyro_dppvi.silo import messages
from numpyro_dppvi.silo.command import main
from tests.silo import hospitals

ROOT = Path(__file__).parents[2]


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
        assert messages.read_reply(reply, None) == messages.Ready(digest, "north", 0)
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        process.stdout.close()
    assert not socket.exists()
