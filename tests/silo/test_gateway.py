"""The gateway alone: what it answers, what it refuses, and what it remembers when it was killed."""

import concurrent.futures
import dataclasses
import logging
import signal
import stat
import subprocess
import sys
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_dppvi import _files, silo
from numpyro_dppvi.protocol import client
from numpyro_dppvi.silo import loading, messages, settings, wire
from numpyro_dppvi.silo.messages import Code, Join, Ready, Refused, Released, Visit
from numpyro_dppvi.silo.store import Store
from numpyro_dppvi.silo.study import prepare
from tests.grids import grid
from tests.silo import hospitals, mutations


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """A study file, what follows from it, and a first visit; hospitals are written beside it."""
    folder = tmp_path_factory.mktemp("study")
    pinned = hospitals.write_study(folder, hospitals.VIRTUAL)
    prepared = prepare(pinned)
    q = jax.device_get(prepared.first_state().server.natural)
    first = Visit(pinned.digest, "north", 1, 0, np.float32(0), q, None, None)
    return folder, prepared, first


@pytest.fixture
def place(study, tmp_path):
    """A hospital in a folder of its own, beside a copy of the study."""
    (tmp_path / "study.py").write_bytes((study[0] / "study.py").read_bytes())
    return tmp_path


def opened(place, seed=7, **caps):
    path = place / "north" / "silo.toml"
    if not path.exists():
        path = hospitals.write_hospital(place, "north", **caps)
    return silo.open_gateway(path, insecure_noise_seed=seed)


def asked(gateway, prepared, visit):
    data = visit if isinstance(visit, bytes) else messages.encode(visit)
    return messages.read_reply(gateway.handle(data), prepared.form)


def code(reply):
    assert isinstance(reply, Refused), reply
    return reply.code


def charges(gateway):
    return len(gateway.store.ledger().entries)


def following(first, step, taken=0, share=0.0, by=0.0):
    q = jax.tree.map(lambda leaf: leaf - np.float32(by), first.q)
    return first._replace(step=step, taken=taken, share=np.float32(share), q=q)


def test_it_says_who_it_is(study, place):
    _, prepared, first = study
    with opened(place) as gateway:
        digest = prepared.digest
        assert asked(gateway, prepared, Join(digest)) == Ready(digest, "north", 0)
        asked(gateway, prepared, first)
        assert asked(gateway, prepared, Join(digest)) == Ready(digest, "north", 1)
        assert code(asked(gateway, prepared, Join("0" * 64))) is Code.UNKNOWN_STUDY


def test_a_step_is_released_once(study, place):
    """The same bytes get the same reply, now and after a restart; other bytes get none."""
    _, prepared, first = study
    with opened(place, seed=None) as gateway:
        reply = gateway.handle(messages.encode(first))
        assert isinstance(messages.read_reply(reply, prepared.form), Released)
        assert gateway.handle(messages.encode(first)) == reply
        other = following(first, 1, by=0.1)
        assert code(asked(gateway, prepared, other)) is Code.OTHER_INPUT
    with opened(place, seed=None) as gateway:
        assert gateway.handle(messages.encode(first)) == reply
        assert code(asked(gateway, prepared, other)) is Code.OTHER_INPUT
        assert charges(gateway) == 1


def test_what_no_honest_server_asks_is_refused_and_costs_nothing(study, place):
    _, prepared, first = study
    improper = jax.tree.map(lambda leaf: -leaf, first.q)
    with opened(place) as gateway:
        for visit, reason in (
            (first._replace(hospital="south"), Code.OTHER_HOSPITAL),
            (first._replace(study="0" * 64), Code.UNKNOWN_STUDY),
            (first._replace(step=0), Code.NOT_PLANNED),
            (first._replace(step=4), Code.NOT_PLANNED),
            (first._replace(taken=1), Code.MALFORMED),
            (first._replace(q=improper), Code.MALFORMED),
            (first._replace(factor=first.q), Code.MALFORMED),
            (b"", Code.MALFORMED),
            (b"dppvi\0\0\1" * 10, Code.MALFORMED),
        ):
            assert code(asked(gateway, prepared, visit)) is reason
        assert charges(gateway) == 0
        assert isinstance(asked(gateway, prepared, first), Released)


def test_of_couriers_that_ask_at_once_one_input_is_answered(study, place):
    """The same bytes get one release, other bytes for the same step none; charged is once."""
    _, prepared, first = study
    sent = [messages.encode(following(first, 1, by=0.1 * (number % 2))) for number in range(6)]
    with opened(place, seed=None) as gateway:
        with concurrent.futures.ThreadPoolExecutor(len(sent)) as couriers:
            replies = list(couriers.map(gateway.handle, sent))
        assert charges(gateway) == 1
    found = [messages.read_reply(reply, prepared.form) for reply in replies]
    answered = {isinstance(reply, Released): set() for reply in found}
    for reply, data in zip(replies, found, strict=True):
        answered[isinstance(data, Released)].add(reply)
    assert len(answered[True]) == 1
    assert len(answered[False]) == 1
    assert {isinstance(reply, Released) for reply in found[::2]} == {isinstance(found[0], Released)}
    assert code(messages.read_reply(*answered[False], prepared.form)) is Code.OTHER_INPUT


def test_steps_go_forward_only(study, place):
    _, prepared, first = study
    with opened(place) as gateway:
        assert isinstance(asked(gateway, prepared, following(first, 2)), Released)
        assert code(asked(gateway, prepared, first)) is Code.OUT_OF_ORDER
        assert charges(gateway) == 1


@pytest.mark.parametrize(
    ("caps", "steps"), [({"releases": 2}, 2), ({"epsilon": 3.0}, 1), ({"epsilon": 2.0}, 0)]
)
def test_the_hospital_stops_where_its_caps_say(caps, steps, study, place):
    """Epsilon is 2.145, 3.172 and 4 after the study's steps."""
    _, prepared, first = study
    with opened(place, **caps) as gateway:
        for step in range(1, 4):
            reply = asked(gateway, prepared, following(first, step))
            assert isinstance(reply, Released) if step <= steps else code(reply) is Code.USED_UP
        assert charges(gateway) == steps
        assert gateway.store.ledger().spent()[0] <= caps.get("epsilon", 4)


def test_caps_count_over_studies(place):
    """A second study finds what the first has spent."""
    texts = [hospitals.QUICK, hospitals.QUICK + ", damping=0.3"]
    path = hospitals.write_hospital(place, "north", releases=4, digest="0" * 64)
    entries, all_prepared = [], []
    for number, arguments in enumerate(texts):
        folder = place / str(number)
        folder.mkdir()
        pinned = hospitals.write_study(folder, arguments)
        entries.append(f'[[studies]]\nfile = "../{number}/study.py"\nsha256 = "{pinned.digest}"\n')
        all_prepared.append(prepare(pinned))
    text = path.read_text()
    start, end = text.index("[[studies]]"), text.index("[checks]")
    path.write_text(text[:start] + "".join(entries) + text[end:])
    replies = []
    with opened(place) as gateway:
        for prepared in all_prepared:
            state = prepared.first_state().server
            q, one = jax.device_get((state.natural, jax.tree.map(lambda x: x[0], state.factors)))
            for step in (1, 2, 3):
                visit = Visit(prepared.digest, "north", step, 0, np.float32(0), q, one, None)
                replies.append(asked(gateway, prepared, visit))
        assert [type(reply) for reply in replies[:4]] == [Released, Released, Released, Refused]
        assert code(replies[3]) is Code.USED_UP
        assert charges(gateway) == 3


@pytest.mark.slow
def test_shards_follow_what_the_server_took(study, place):
    """Their factors after a step are those of ``Client``, for the share that was accepted."""
    _, prepared, first = study
    with opened(place) as gateway:
        (mine,) = gateway.studies.values()
        asked(gateway, prepared, first)
        second = following(first, 2, taken=1, share=0.4, by=0.1)
        asked(gateway, prepared, second)
        one, _ = mine.client.released(mine.request(first))
        answer = client.Answer(jnp.float32(0.4), first.q)
        wanted, release = one.settle(answer).released(mine.request(second))
        private = wanted.state.private
        assert any(np.any(leaf) for leaf in jax.tree.leaves(private))
        kept = gateway.store.private(prepared.digest, 2, (private, private))
        for a, b in zip(
            jax.tree.leaves(kept), jax.tree.leaves((private, wanted.unanswered)), strict=True
        ):
            np.testing.assert_array_equal(a, b)
        again = asked(gateway, prepared, second)
        np.testing.assert_array_equal(again.value["w"].linear, release.value["w"].linear)


@pytest.mark.parametrize("taken", [0, 1])
def test_a_release_that_was_not_taken_did_not_happen_in_the_shards(taken, study, place):
    """It was lost (0: the server has not seen it), or refused (a share of 0)."""
    _, prepared, first = study
    with opened(place) as gateway:
        (mine,) = gateway.studies.values()
        asked(gateway, prepared, first)
        share = 0.7 if taken == 0 else 0.0
        asked(gateway, prepared, following(first, 2, taken=taken, share=share))
        like = mine.client.state.private
        was, _ = gateway.store.private(prepared.digest, 2, (like, like))
        for leaf in jax.tree.leaves(was):
            np.testing.assert_array_equal(leaf, 0)


def test_what_is_kept_is_the_owners_alone(study, place):
    _, prepared, first = study
    with opened(place) as gateway:
        asked(gateway, prepared, first)
        asked(gateway, prepared, following(first, 2))
    folder = place / "north" / "store"
    found = [folder, *folder.rglob("*")]
    for path in found:
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path
    names = sorted(path.name for path in found if path.suffix == ".npz")
    assert names == ["private-2.npz", "step-1.npz", "step-2.npz"]


def test_private_factors_are_in_no_reply(study, place):
    _, prepared, first = study
    with opened(place) as gateway:
        (mine,) = gateway.studies.values()
        replies = [gateway.handle(messages.encode(first))]
        replies.append(gateway.handle(messages.encode(following(first, 2, taken=1, share=1.0))))
        like = mine.client.state.private
        kept = gateway.store.private(prepared.digest, 2, (like, like))
    numbers = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(kept)])
    numbers = numbers[numbers != 0]
    assert numbers.size > 8
    for reply in replies:
        assert not any(number.tobytes() in reply for number in numbers.astype("<f4"))


def test_an_error_shows_nothing(study, place, monkeypatch, caplog):
    """Neither to who asked, nor in the log."""
    _, prepared, first = study

    def respond(*arguments):
        raise ValueError("patient 17 is 93 years old")

    monkeypatch.setattr(client, "_respond", respond)
    with opened(place) as gateway:
        reply = gateway.handle(messages.encode(first))
        assert code(messages.read_reply(reply, prepared.form)) is Code.FAILED
        assert charges(gateway) == 1
        assert b"17" not in reply.replace(wire.digest(messages.encode(first)).encode(), b"")
        assert "patient" not in caplog.text
        assert "ValueError" in caplog.text
        monkeypatch.undo()
        # The step is paid for, and nothing has left: it is computed after all.
        assert isinstance(asked(gateway, prepared, first), Released)
        assert charges(gateway) == 1


class KilledError(BaseException):
    """What no handler of the gateway catches."""


# Where to die: in what, and whether before or after it has done its work.
POINTS = {
    "before it reserves": (client.Client, "charged", "before"),
    "when it has reserved": (client.Client, "released", "before"),
    "when it has computed": (Store, "keep", "before"),
    "when the private state is kept": (_files, "flush_folder", "before"),
    "when the reply is kept": (Store, "keep", "after"),
}


def dying(point, death):
    """Something of the gateway, by owner and name, and what dies in its place."""
    owner, name, when = POINTS[point]
    function = getattr(owner, name)

    def deadly(*arguments, **keywords):
        if when == "after":
            function(*arguments, **keywords)
        death()

    return owner, name, deadly


@pytest.fixture(scope="module")
def never_killed(study, tmp_path_factory):
    """A second visit, as bytes, and what a gateway replies that lives."""
    place, (_, prepared, first) = tmp_path_factory.mktemp("alive"), study
    (place / "study.py").write_bytes((study[0] / "study.py").read_bytes())
    second = messages.encode(following(first, 2, taken=1, share=0.4))
    with opened(place) as gateway:
        asked(gateway, prepared, first)
        return second, gateway.handle(second)


@grid("point", POINTS, quick=[0, 3])
def test_killed_anywhere_a_step_is_charged_once_and_released_once(
    point, study, place, never_killed, monkeypatch
):
    _, prepared, first = study

    def death():
        raise KilledError

    with opened(place) as gateway:
        asked(gateway, prepared, first)
        monkeypatch.setattr(*dying(point, death))
        with pytest.raises(KilledError):
            gateway.handle(never_killed[0])
        monkeypatch.undo()
    after_death(place, study, never_killed, point)


def after_death(place, study, never_killed, point):
    _, prepared, first = study
    second, wanted = never_killed
    reserved = point != "before it reserves"
    with opened(place) as gateway:
        assert charges(gateway) == 1 + reserved
        if reserved:
            other = following(first, 2, taken=1, share=0.4, by=0.1)
            assert code(asked(gateway, prepared, other)) is Code.OTHER_INPUT
        assert gateway.handle(second) == wanted
        assert gateway.handle(second) == wanted
        assert charges(gateway) == 2


DYING = """
import os, signal, sys
from pathlib import Path
from tests.silo import test_gateway as t

place, point, second = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]).read_bytes()
with t.opened(place) as gateway:
    setattr(*t.dying(point, lambda: os.kill(os.getpid(), signal.SIGKILL)))
    gateway.handle(second)
"""


@pytest.mark.slow
@pytest.mark.parametrize("point", POINTS)
def test_killed_for_good_anywhere_a_step_is_charged_once_and_released_once(
    point, study, place, never_killed
):
    """The same with a process of its own, and ``kill -9``."""
    _, prepared, first = study
    with opened(place) as gateway:
        asked(gateway, prepared, first)
    (place / "second").write_bytes(never_killed[0])
    done = subprocess.run(
        [sys.executable, "-c", DYING, str(place), point, str(place / "second")],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    after_death(place, study, never_killed, point)


@pytest.mark.parametrize("number", [1000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_no_mutated_request_is_answered(number, study, place, caplog):
    """A gateway that has released all steps: whatever comes, nothing more leaves or is charged."""
    _, prepared, first = study
    rng = np.random.default_rng(1)
    with opened(place) as gateway:
        sources = [messages.encode(following(first, step)) for step in (1, 2, 3)]
        for source in sources:
            gateway.handle(source)
        before = (gateway.store.folder / "ledger.jsonl").read_bytes()
        caplog.clear()
        caplog.set_level(logging.ERROR, "numpyro_dppvi.silo")
        found = Counter()
        for count in range(number):
            data = mutations.with_a_right_digest(rng, sources[count % 3])
            if data not in sources:
                found[code(asked(gateway, prepared, data))] += 1
        assert (gateway.store.folder / "ledger.jsonl").read_bytes() == before
    assert not caplog.records
    # Most are refused as none of this study; those that are well-formed as another step or input.
    assert found.keys() <= set(Code) - {Code.FAILED}
    assert found[Code.OTHER_INPUT] > number / 50


def test_a_second_gateway_on_the_store_is_refused(place):
    with opened(place), pytest.raises(RuntimeError, match="another gateway runs"), opened(place):
        pass


def edited(place, old, new):
    path = place / "north" / "silo.toml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('name = "north"', 'name = "east"', "names no hospital 'east'"),
        ("noise_multiplier = 0.1", "noise_multiplier = 9.0", "noise_multiplier is"),
        ("delta = 1e-5", 'delta = 1e-5\nunit = "client"', "protects unit = 'record'"),
        (
            "delta = 1e-5",
            'delta = 1e-5\nrelation = "add_or_remove_one"',
            "protects relation = 'replace_one'",
        ),
        ("delta = 1e-5", "delta = 1e-5\nmax_records_per_person = 2", "max_records_per_person = 1"),
        ("rows = [5, 50]", "rows = [13, 50]", "must have 13 to 50 rows, got 12"),
        ("most = 1\n", "most = 0\n", "at most what .checks.columns.y. says"),
        ("least = -10", "least = [-10, 10]", "at least what .checks.columns.X. says"),
        ("least = -10", "least = [-10, 10, 3]", "got 3 for records of shape"),
        ("[checks.columns.y]", "[checks.columns.z]", r"must be the arrays \['X', 'z'\]"),
        ('sha256 = "', 'sha256 = "0', "hexadecimal digits"),
        ("[caps]", "[caps]\nespilon = 1.0", "got 'espilon': take it out"),
        ("releases = 100", "releases = true", "releases in .caps. has a wrong type"),
        ("releases = 100", "", "must have releases, got none"),
        ("epsilon = 4.0", "epsilon = inf", "epsilon must be"),
        (":load", ":unload", "must name a function"),
        (":load", "/load", "must be a module beside silo.toml and its function"),
        (
            "[caps]",
            'socket_group = "staff"\n[caps]',
            "socket must be in a folder that its group may enter",
        ),
        ("rows = [5, 50]", "rows = [50, 5]", "rows must be the least and the largest"),
        ("rows = [5, 50]", "rows = [5, 50", "must be a TOML file"),
    ],
)
def test_what_is_wrong_is_said_before_it_listens(old, new, message, place):
    hospitals.write_hospital(place, "north")
    edited(place, old, new)
    with pytest.raises(ValueError, match=message), opened(place):
        pass


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_no_number_is_in_no_range(value, place):
    """Whatever the bounds of its column; and the sentence shows no record."""
    path = hospitals.write_hospital(place, "north")
    records = hospitals.records()[0]
    records["X"][3, 1] = value
    np.savez(path.parent / "records.npz", **records)
    with pytest.raises(ValueError, match="X") as caught, opened(place):
        pass
    assert str(records["X"][3, 0]) not in str(caught.value)
    mine = settings.read(path)
    columns = {"X": {"least": -10, "most": 10}, "y": {"least": 0, "most": 1}}
    checks = dataclasses.replace(mine.checks, columns=columns)
    with pytest.raises(ValueError, match=r"all values of X must be at (least|most)"):
        loading.check(records, checks)


def test_a_study_that_was_changed_is_not_run(place):
    hospitals.write_hospital(place, "north")
    (place / "study.py").write_text("raise SystemExit('it ran')")
    with pytest.raises(ValueError, match="is not the study that was reviewed"), opened(place):
        pass


def test_a_study_without_noise_is_refused(place):
    hospitals.write_study(place, "budget=None, method=dppvi.NonPrivate()")
    with pytest.raises(ValueError, match="adds no noise"), opened(place):
        pass


def test_a_store_that_others_can_enter_is_refused(place):
    hospitals.write_hospital(place, "north")
    (place / "north" / "store").mkdir(mode=0o755)
    with pytest.raises(ValueError, match="chmod 700"), opened(place):
        pass


def test_a_damaged_ledger_is_refused(study, place):
    with opened(place) as gateway:
        asked(gateway, study[1], study[2])
    path = place / "north" / "store" / "ledger.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"num_releases": 1', b'"num_releases": 0'))
    with pytest.raises(ValueError, match="damaged"), opened(place):
        pass
