"""A study over gateways is the study in one process, whatever happens on the way."""

import contextlib
import grp
import os
import signal
import socket
import threading
import time

import jax
import numpy as np
import pytest

import numpyro_dppvi as dppvi
from numpyro_dppvi import silo
from numpyro_dppvi.protocol import client
from numpyro_dppvi.silo import consortium, messages, progress, wire
from numpyro_dppvi.silo.messages import Code, Refused
from numpyro_dppvi.silo.settings import read
from numpyro_dppvi.silo.sockets import listening
from tests.alone import client_of
from tests.grids import grid
from tests.silo import hospitals, mutations
from tests.silo.hospitals import NAMES, QUICK, VIRTUAL, gateways, in_process

PACES = "schedule=dppvi.Asynchronous((1.0, 1.5, 2.5))"
STUDIES = {
    "in turn": {"arguments": QUICK},
    "all at once": {"arguments": f"{QUICK}, schedule=dppvi.synchronous"},
    "two at random": {"arguments": f"{QUICK}, schedule=dppvi.random_subset(2)"},
    "at their own pace": {"arguments": f"{QUICK}, {PACES}"},
    "virtual": {"arguments": f"{VIRTUAL}, schedule=dppvi.synchronous"},
    "virtual, at their own pace": {"arguments": f"{VIRTUAL}, {PACES}"},
    "from a public start": {"arguments": f"{VIRTUAL}, init_scale=0.1"},
    "a hierarchy": {"arguments": QUICK, "model": "shrinkage"},
    "a hierarchy, at their own pace": {"arguments": f"{QUICK}, {PACES}", "model": "shrinkage"},
    "scores": {
        "arguments": "budget=dppvi.PrivacyBudget(4.0), method=dppvi.FisherScoring(2)",
    },
    "a committee": {
        "arguments": "budget=dppvi.PrivacyBudget(4.0), method=dppvi.BayesianCommitteeMachine("
        "local=dppvi.DPOptimization(num_local_steps=2))",
    },
    "by natural gradients": {
        "arguments": "budget=dppvi.PrivacyBudget(4.0), damping=0.9, "
        "method=dppvi.methods.LocalAveraging("
        "(12, 9, 15), 1.0, num_local_steps=1, optimizer=dppvi.NaturalGradient())",
    },
}
TRUSTED = {name: {"allowed": "trusted_aggregator = true"} for name in NAMES}
STUDIES["an aggregator"] = {
    "arguments": f"{VIRTUAL}, schedule=dppvi.synchronous, trusted_aggregator=True",
    "caps": TRUSTED,
}
STUDIES["an aggregator of averages"] = {
    "arguments": "budget=dppvi.PrivacyBudget(4.0), schedule=dppvi.synchronous, "
    "method=dppvi.methods.LocalAveraging(3, 0.1, num_local_steps=2), "
    "trusted_aggregator=dppvi.TrustedAggregator(max_dropouts=1)",
    "caps": TRUSTED,
}
STUDIES["global VI"] = {
    "arguments": "budget=dppvi.PrivacyBudget(4.0), schedule=dppvi.synchronous, "
    "method=dppvi.GlobalVI(), trusted_aggregator=True",
    "caps": TRUSTED,
}
# One of each kind answers at once; `make slow` runs them all.
QUICKLY = {"an aggregator"}
EACH = [n if n in QUICKLY else pytest.param(n, marks=pytest.mark.slow) for n in STUDIES]


def fitted(study, seed=7, **more):
    """The same study, in one process."""
    return dppvi.fit(
        study.model,
        study.guide,
        hospitals.records(),
        rng_key=jax.random.key(study.seed),
        method=study.method,
        budget=study.budget,
        schedule=study.schedule,
        num_rounds=study.num_rounds,
        damping=study.damping,
        init_scale=study.init_scale,
        trusted_aggregator=study.trusted_aggregator,
        insecure_noise_seed=seed,
        progress_bar=False,
        **more,
    )


def assert_same(found, wanted, slack=2e-6):
    """What the servers know, and what has happened, to the last bits of 24."""
    assert str(found.status) == str(wanted.status)
    found, wanted = ((each.state.server, each.history) for each in (found, wanted))
    for a, b in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=slack * np.max(np.abs(b), initial=1e-3))


def in_planned_order(deliver, prepared, monkeypatch):
    """A courier whose replies come in the order that an asynchronous schedule has planned."""
    order = [m for groups in prepared.run.groups for m in groups.ravel()]
    turn = threading.Condition()
    slot = [0]
    write = progress.write

    def write_and_go_on(path, prepared, now):
        write(path, prepared, now)
        with turn:
            slot[0] = now.slot
            turn.notify_all()

    def courier(name, message):
        reply = deliver(name, message)
        with turn:
            assert turn.wait_for(lambda: NAMES[order[slot[0]]] == name, timeout=60)
        return reply

    monkeypatch.setattr(progress, "write", write_and_go_on)
    return courier


@pytest.fixture
def in_double():
    """Everywhere, because couriers call gateways from threads of their own."""
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", before)


@pytest.mark.slow
@pytest.mark.usefixtures("in_double")
@pytest.mark.parametrize("name", EACH)
def test_a_study_is_the_same_in_one_process_and_over_gateways(name, tmp_path, monkeypatch):
    """To the last bits of 53: the optimiser of a refined prior makes more of those of 24."""
    pinned, paths = hospitals.write_consortium(tmp_path, **STUDIES[name])
    with gateways(paths) as opened:
        deliver = in_process(opened)
        if "pace" in name:
            deliver = in_planned_order(deliver, silo.study.prepare(pinned), monkeypatch)
        found = silo.run_study(pinned, deliver, checkpoint=tmp_path / "server.npz")
        spent = [gateway.store.ledger().spent()[0] for gateway in opened.values()]
    wanted = fitted(pinned.study)
    assert_same(found, wanted, slack=1e-13)
    np.testing.assert_allclose(found.ledger.spent(), wanted.ledger.spent(), rtol=1e-12)
    np.testing.assert_allclose(spent, wanted.ledger.spent(), rtol=1e-12)
    statements = silo.statements(pinned, found)
    assert tuple(statements) == NAMES
    assert statements["west"].as_dict()["max_epsilon"] == pytest.approx(spent[2])
    assert statements["west"].as_dict()["clients"][0]["name"] == "west"
    assert found.client_names == NAMES
    assert all(f"  {name} " in str(found.privacy_statement()) for name in NAMES)
    assert "numpyro_version" in found.posterior.attrs


PRIOR = (
    "budget=dppvi.PrivacyBudget(4.0), method=dppvi.DPOptimization(num_local_steps=2), "
    "prior=silo.load_prior('PATH', 'SHA', logistic)"
)


@pytest.mark.usefixtures("in_double")
def test_an_earlier_posterior_is_the_prior(tmp_path):
    """Everybody loads it, and the study file holds its digest."""
    for name in ("before", "after"):
        (tmp_path / name).mkdir()
    before = hospitals.write_study(tmp_path / "before", QUICK, dtype="float64").study
    earlier, path = fitted(before).posterior, tmp_path / "earlier.npz"
    earlier.save(path)
    arguments = PRIOR.replace("PATH", str(path)).replace("SHA", silo.digest_of(path))
    pinned, paths = hospitals.write_consortium(tmp_path / "after", arguments)
    with gateways(paths) as opened:
        found = silo.run_study(pinned, in_process(opened))
    assert_same(found, fitted(pinned.study, prior=earlier.as_prior()), slack=1e-13)
    assert "the posterior of an earlier study" in found.posterior.attrs["prior"]
    for wrong in ("0" * 64, "earlier"):
        with pytest.raises(ValueError, match="is not the posterior that was reviewed: its sha256"):
            silo.load_prior(path, wrong, pinned.study.model)
    with pytest.raises(ValueError, match=r"."):
        silo.load_prior(paths["north"], silo.digest_of(paths["north"]), pinned.study.model)


@contextlib.contextmanager
def sockets(paths, opened):
    """A courier over each gateway's Unix socket."""
    with contextlib.ExitStack() as stack:
        for name, gateway in opened.items():
            path = read(paths[name]).socket
            server = stack.enter_context(listening(path, gateway.handle, gateway.most_bytes))
            thread = threading.Thread(target=server.serve_forever, args=(0.01,))
            thread.start()
            stack.callback(thread.join)
            stack.callback(server.shutdown)
        yield lambda name, message: silo.send(read(paths[name]).socket, message, 60.0)


@pytest.mark.slow
def test_it_is_the_same_over_sockets(consortium_in_turn, tmp_path):
    pinned, wanted = consortium_in_turn
    paths = hospitals.beside(pinned, tmp_path)
    with gateways(paths) as opened, sockets(paths, opened) as deliver:
        assert (tmp_path / "north" / "store" / "silo.sock").stat().st_mode & 0o777 == 0o600
        assert_same(silo.run_study(pinned, deliver), wanted)
        reply = messages.read_reply(deliver("north", b"no message"), opened_form(opened))
        assert isinstance(reply, Refused)
        with pytest.raises(OSError, match=r".*"):
            deliver("north", b"\0" * (opened["north"].most_bytes + 1))
    with pytest.raises(OSError, match=r".*"):  # nobody listens any more
        deliver("north", b"no message")


def test_a_courier_that_stalls_keeps_no_other_waiting(tmp_path):
    """It has begun a message, or reads no reply; both hold nothing but their connection."""
    path = tmp_path / "silo.sock"
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(listening(path, lambda message: bytes(2**24), 10))
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        stack.callback(server.shutdown)
        for number in range(20):
            stalled = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            stalled.connect(str(path))
            stalled.sendall((3).to_bytes(8, "big") + b"abc"[: 1 + 2 * (number % 2)])
        assert len(silo.send(path, b"abc", 30.0)) == 2**24


def test_a_group_of_users_may_open_a_socket(tmp_path):
    group, path = grp.getgrgid(os.getgid()).gr_name, tmp_path / "silo.sock"
    with listening(path, bytes, 10, group):
        assert path.stat().st_mode & 0o777 == 0o660
        assert path.stat().st_gid == os.getgid()


def test_a_socket_does_not_replace_another_file(tmp_path):
    path = tmp_path / "silo.sock"
    path.touch()
    with pytest.raises(ValueError, match="must be a new path"), listening(path, bytes, 10):
        pass
    long = tmp_path / ("x" * 200)
    with pytest.raises(ValueError, match="at most 100 bytes"), listening(long, bytes, 10):
        pass
    with listening(tmp_path / "one", bytes, 10):
        again = listening(tmp_path / "one", bytes, 10)
        with pytest.raises(RuntimeError, match="somebody listens"), again:
            pass


def opened_form(opened):
    (study,) = opened["north"].studies.values()
    return study.prepared.form


@pytest.fixture(scope="module")
def consortium_in_turn(tmp_path_factory):
    """A study, and what comes of it where nothing happens on the way."""
    folder = tmp_path_factory.mktemp("in turn")
    pinned = hospitals.write_study(folder, QUICK)
    return pinned, fitted(pinned.study)


@pytest.fixture(scope="module")
def consortium_at_once(tmp_path_factory):
    folder = tmp_path_factory.mktemp("at once")
    pinned = hospitals.write_study(folder, STUDIES["virtual"]["arguments"])
    return pinned, fitted(pinned.study)


class KilledError(BaseException):
    pass


def dying(deliver, last, when):
    """A courier whose server dies at its ``last`` delivery, before or after it was made."""
    count = [0]
    one = threading.Lock()

    def courier(name, message):
        with one:
            count[0] += 1
            if count[0] == last and when == "before":
                raise KilledError
            reply = deliver(name, message)
            if count[0] >= last:
                raise KilledError
            return reply

    return courier


@pytest.fixture
def interruptible():
    """What a shell starts in the background ignores interrupts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.slow
@pytest.mark.usefixtures("interruptible")
@grid("kind", ["in_turn", "at_once"], quick=[0])
def test_a_signal_that_comes_to_another_thread_does_not_wait_for_replies(kind, request):
    """Flower tells its applications so that they are to end."""
    pinned, _ = request.getfixturevalue(f"consortium_{kind}")
    ended = threading.Event()
    timer = threading.Timer(0.5, signal.raise_signal, [signal.SIGINT])

    def silent(name, message):
        if name == NAMES[0]:
            timer.start()
        ended.wait(60)
        raise ConnectionError

    before = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        silo.run_study(pinned, silent)
    ended.set()
    assert time.monotonic() - before < 30


@pytest.mark.slow
@grid(("kind", "last", "times"), [("in_turn", 3, 4), ("at_once", 4, 2)], quick=[0])
def test_a_server_that_dies_at_any_delivery_goes_on(
    kind, last, times, request, tmp_path, monkeypatch
):
    """No hospital computes or charges a step twice, and the result is the same."""
    pinned, wanted = request.getfixturevalue(f"consortium_{kind}")
    paths = hospitals.beside(pinned, tmp_path)
    computed = []
    respond = client._respond
    monkeypatch.setattr(client, "_respond", lambda *a: computed.append(1) or respond(*a))
    path = tmp_path / "server.npz"
    with gateways(paths, seed=7) as opened:
        for when in ("before", "after", "before", "after")[:times]:
            with contextlib.suppress(KilledError):
                silo.run_study(pinned, dying(in_process(opened), last, when), checkpoint=path)
        asked = []
        deliver = in_process(opened)
        found = silo.run_study(
            pinned, lambda n, m: asked.append(n) or deliver(n, m), checkpoint=path
        )
        assert all(len(each.store.ledger().entries) == 3 for each in opened.values())
    assert 0 < len(asked) < 9  # it went on where it was, and did not begin again
    assert len(computed) == 9
    assert_same(found, wanted)
    np.testing.assert_allclose(found.ledger.spent(), wanted.ledger.spent(), rtol=1e-12)


@pytest.mark.slow
def test_a_study_that_has_ended_asks_nobody(consortium_in_turn, tmp_path):
    pinned, wanted = consortium_in_turn
    paths, path = hospitals.beside(pinned, tmp_path), tmp_path / "server.npz"
    with gateways(paths) as opened:
        silo.run_study(pinned, in_process(opened), checkpoint=path)

    def nobody(name, message):
        raise AssertionError

    assert_same(silo.run_study(pinned, nobody, checkpoint=path), wanted)


@pytest.mark.slow
def test_a_checkpoint_of_another_study_is_refused(consortium_in_turn, consortium_at_once, tmp_path):
    pinned, _ = consortium_in_turn
    path = tmp_path / "server.npz"
    with gateways(hospitals.beside(pinned, tmp_path)) as opened:
        silo.run_study(pinned, in_process(opened), checkpoint=path)
    with pytest.raises(ValueError, match="belongs to another study file"):
        silo.run_study(consortium_at_once[0], in_process({}), checkpoint=path)


def missing(deliver, absent):
    """A courier that cannot reach some hospitals at some of their steps."""

    def courier(name, message):
        step = wire.read_head(message).facts["step"]
        if (name, step) in absent:
            raise ConnectionError
        return deliver(name, message)

    return courier


@pytest.mark.slow
@pytest.mark.parametrize(
    "absent",
    [
        {("west", 1), ("west", 2), ("north", 3)},  # one joins late, and one drops out
        {("south", 2)},  # one is away once
    ],
)
def test_who_is_away_misses_steps_and_is_charged_for_the_others(
    absent, consortium_in_turn, tmp_path
):
    pinned, wanted = consortium_in_turn
    with gateways(hospitals.beside(pinned, tmp_path)) as opened:
        found = silo.run_study(pinned, missing(in_process(opened), absent))
        steps = {n: len(each.store.ledger().entries) for n, each in opened.items()}
        spent = [each.store.ledger().spent()[0] for each in opened.values()]
    for name in NAMES:
        assert steps[name] == 3 - sum(each == name for each, _ in absent)
    np.testing.assert_allclose(found.ledger.spent(), spent, rtol=1e-12)
    assert len(found.history.movement) == 3
    # The others' releases are in the posterior: it is not the prior, nor what all would have made.
    assert np.all(np.isfinite(found.posterior.mean["w"]))
    assert np.any(found.posterior.mean["w"] != wanted.posterior.mean["w"])


@pytest.mark.slow
def test_with_a_hospital_away_the_others_make_the_posterior_of_a_study_without_it(tmp_path):
    """Its factor stays 1, and its turn changes nothing."""
    pinned, paths = hospitals.write_consortium(tmp_path, QUICK)
    away = {("west", step) for step in (1, 2, 3)}
    with gateways(paths) as opened:
        found = silo.run_study(pinned, missing(in_process(opened), away))
    known = found.state.server
    for leaf in jax.tree.leaves(known.factors):
        np.testing.assert_array_equal(leaf[2], 0)
        assert np.any(leaf[:2])


def test_shares_of_noise_leave_no_hospital_that_does_not_allow_it(tmp_path):
    _, paths = hospitals.write_consortium(tmp_path, STUDIES["an aggregator"]["arguments"])
    with (
        pytest.raises(ValueError, match=r"does not allow that: write trusted_aggregator = true"),
        silo.open_gateway(paths["north"]),
    ):
        pass


def test_a_sum_with_too_little_noise_is_never_made(tmp_path):
    """Who has released sends the kept reply when all are there again; nobody is charged twice."""
    pinned, paths = hospitals.write_consortium(tmp_path, **STUDIES["an aggregator"])
    path = tmp_path / "server.npz"
    with gateways(paths) as opened:
        deliver = missing(in_process(opened), {("south", 2)})
        for _ in range(2):
            found = silo.run_study(pinned, deliver, checkpoint=path)
            assert "interrupted: 1 of 3 rounds ran" in str(found.status)
            steps = [len(each.store.ledger().entries) for each in opened.values()]
            assert steps == [2, 1, 2]
        found = silo.run_study(pinned, in_process(opened), checkpoint=path)
        spent = [each.store.ledger().spent()[0] for each in opened.values()]
    assert_same(found, fitted(pinned.study))
    np.testing.assert_allclose(found.ledger.spent(), spent, rtol=1e-12)


@pytest.mark.slow
def test_so_many_may_drop_out_as_the_noise_allows(tmp_path, monkeypatch):
    arguments = STUDIES["an aggregator"]["arguments"]
    aggregator = "dppvi.TrustedAggregator(max_dropouts=1)"
    pinned, paths = hospitals.write_consortium(
        tmp_path, arguments.replace("aggregator=True", f"aggregator={aggregator}"), TRUSTED
    )
    merged = []
    merge = consortium._Server._merged
    monkeypatch.setattr(
        consortium._Server, "_merged", lambda *a: merged.append(len(a[3])) or merge(*a)
    )
    with gateways(paths) as opened:
        deliver = missing(in_process(opened), {("south", 2)})
        found = silo.run_study(pinned, deliver)
        assert merged == [3, 2, 3]
        assert "3 rounds ran" in str(found.status)
        deliver = missing(in_process(opened), {("south", 1), ("west", 1)})
        found = silo.run_study(pinned, deliver)
    assert "0 of 3 rounds ran" in str(found.status)


@pytest.mark.slow
def test_an_aggregator_that_is_left_for_good_asks_nobody_in_vain(tmp_path):
    """South may release once: the others are charged for the round that it refuses, and no more."""
    caps = {name: {**TRUSTED[name]} for name in NAMES}
    caps["south"]["releases"] = 1
    pinned, paths = hospitals.write_consortium(
        tmp_path, STUDIES["an aggregator"]["arguments"], caps
    )
    with gateways(paths) as opened:
        found = silo.run_study(pinned, in_process(opened))
        steps = [len(each.store.ledger().entries) for each in opened.values()]
    assert steps == [2, 1, 2]
    assert "used up a budget" in str(found.status)
    assert "1 of 3 rounds ran" in str(found.status)


@pytest.mark.slow
def test_where_nobody_can_be_reached_the_run_waits_to_be_taken_up(consortium_in_turn, tmp_path):
    pinned, wanted = consortium_in_turn
    paths, path = hospitals.beside(pinned, tmp_path), tmp_path / "server.npz"
    away = {(name, step) for name in NAMES for step in (2, 3)}
    with gateways(paths) as opened:
        found = silo.run_study(pinned, missing(in_process(opened), away), checkpoint=path)
        assert "interrupted: 1 of 3 rounds ran" in str(found.status)
        assert_same(silo.run_study(pinned, in_process(opened), checkpoint=path), wanted)


@pytest.mark.slow
def test_a_hospital_with_a_smaller_budget_stops_earlier(tmp_path, caplog):
    caps = {"south": {"epsilon": 3.5}}
    pinned, paths = hospitals.write_consortium(tmp_path, QUICK, caps)
    with gateways(paths) as opened:
        found = silo.run_study(pinned, in_process(opened))
        assert [len(each.store.ledger().entries) for each in opened.values()] == [3, 2, 3]
    assert found.ledger.spent()[1] == pytest.approx(3.172, abs=1e-3)
    assert len(found.history.movement) == 3


def test_where_all_budgets_are_used_up_the_status_says_so(tmp_path):
    caps = {name: {"releases": 1} for name in NAMES}
    pinned, paths = hospitals.write_consortium(tmp_path, QUICK, caps)
    with gateways(paths) as opened:
        found = silo.run_study(pinned, in_process(opened))
    assert "1 of 3 rounds ran" in str(found.status)
    assert "used up a budget" in str(found.status)
    np.testing.assert_allclose(found.ledger.spent(), 2.145, atol=1e-3)


@pytest.mark.slow
def test_where_all_send_rubbish_the_run_ends_and_counts_what_it_cost(
    consortium_in_turn, tmp_path, caplog
):
    """Begun again it counts no step twice.

    North's first reply was kept, and is taken. South and west have released theirs from another
    approximation than that which follows it, and so have lost that step.
    """
    pinned, _ = consortium_in_turn
    paths, path = hospitals.beside(pinned, tmp_path), tmp_path / "server.npz"
    with gateways(paths) as opened:
        deliver = in_process(opened)
        for _ in range(2):
            found = silo.run_study(pinned, lambda n, m: deliver(n, m)[:-1], checkpoint=path)
            assert "0 of 3 rounds ran" in str(found.status)
            np.testing.assert_allclose(found.ledger.spent(), 2.145, atol=1e-3)
        caplog.clear()
        found = silo.run_study(pinned, deliver, checkpoint=path)
        spent = [each.store.ledger().spent()[0] for each in opened.values()]
    assert caplog.text.count(Code.OTHER_INPUT.sentence) == 2
    assert len(found.history.movement) == 3
    np.testing.assert_allclose(spent, 4.0, rtol=0.01)
    np.testing.assert_allclose(found.ledger.spent(), spent, rtol=1e-12)


def larger(by):
    def change(reply, form):
        if isinstance(reply, Refused):
            return messages.encode(reply)
        value = jax.tree.map(lambda leaf: np.asarray(leaf) * np.float32(by), reply.value)
        return messages.encode(reply._replace(value=value))

    return change


def with_fact(**facts):
    return lambda reply, form: messages.encode(reply._replace(**facts))


ROGUES = {
    "nothing": lambda reply, form: b"",
    "no message": lambda reply, form: b"hello" * 100,
    "another message": lambda reply, form: messages.encode(messages.Ready("0" * 64, "south", 1)),
    "a refusal of another message": lambda reply, form: messages.encode(
        Refused(Code.FAILED, "0" * 64)
    ),
    "a foreign study": with_fact(study="0" * 64),
    "another hospital's": with_fact(hospital="north"),
    "another step's": with_fact(step=2),
    "from another approximation": with_fact(answers="0" * 64),
    "not finite": larger(np.nan),
    "infinite": larger(np.inf),
    "too large": larger(1e4),
    "far too large": larger(1e30),
}


@pytest.fixture(scope="module")
def first_replies(consortium_in_turn, consortium_at_once, tmp_path_factory):
    """The server's side of two studies, a visit to south, and what it has replied."""
    found = {}
    for kind, (pinned, _) in {"turn": consortium_in_turn, "once": consortium_at_once}.items():
        prepared = silo.study.prepare(pinned)
        asker = consortium._Server(prepared, in_process({}), None)
        visit = asker._visit(progress.first(prepared), 1, 1)
        with gateways(hospitals.beside(pinned, tmp_path_factory.mktemp(kind))) as opened:
            found[kind] = asker, visit, opened["south"].handle(visit)
    return found


@pytest.mark.parametrize("kind", ["turn", "once"])
@pytest.mark.parametrize("how", ROGUES)
def test_what_a_rogue_hospital_sends_is_refused(how, kind, first_replies):
    asker, visit, reply = first_replies[kind]
    honest = asker._read("south", visit, reply)
    assert isinstance(honest, messages.Released)
    with pytest.raises(wire.MalformedError):
        asker._read("south", visit, ROGUES[how](honest, asker.prepared.form))


@pytest.mark.slow
def test_what_a_rogue_hospital_sends_changes_nothing(consortium_in_turn, tmp_path, caplog):
    """As if it were away; but it may have been charged."""
    pinned, _ = consortium_in_turn
    caplog.set_level("INFO", "numpyro_dppvi.silo")
    with gateways(hospitals.beside(pinned, tmp_path)) as opened:
        deliver, form = in_process(opened), opened_form(opened)

        def courier(name, message):
            reply = deliver(name, message)
            if name != "south":
                return reply
            how = ("too large", "nothing", "another hospital's")
            step = wire.read_head(message).facts["step"]
            return ROGUES[how[step - 1]](messages.read_reply(reply, form), form)

        found = silo.run_study(pinned, courier)
    assert caplog.text.count("south: sent what is refused") == 3
    for leaf in jax.tree.leaves(found.state.server.factors):
        np.testing.assert_array_equal(leaf[1], 0)
    np.testing.assert_allclose(found.ledger.spent(), 4.0, rtol=0.01)


def test_a_release_that_was_sent_before_is_refused(consortium_in_turn, tmp_path, caplog):
    """A hospital, or somebody between, that answers every step with its first release."""
    pinned, _ = consortium_in_turn
    caplog.set_level("INFO", "numpyro_dppvi.silo")
    earlier = {}
    with gateways(hospitals.beside(pinned, tmp_path)) as opened:
        deliver = in_process(opened)

        def courier(name, message):
            reply = deliver(name, message)
            return earlier.setdefault(name, reply) if name == "south" else reply

        silo.run_study(pinned, courier)
    assert caplog.text.count("south: sent what is refused: a release of another step") == 2


@pytest.mark.slow
@pytest.mark.parametrize("number", [500, pytest.param(20_000, marks=pytest.mark.slow)])
def test_no_mutated_reply_is_taken_unless_only_its_numbers_differ(
    number, consortium_in_turn, tmp_path
):
    """Those are what the transport protects, and are no larger than an honest release."""
    pinned, _ = consortium_in_turn
    prepared, rng, taken = silo.study.prepare(pinned), np.random.default_rng(2), 0
    with gateways(hospitals.beside(pinned, tmp_path)) as opened:
        asker = consortium._Server(prepared, in_process(opened), None)
        visit = asker._visit(progress.first(prepared), 0, 1)
        reply = opened["north"].handle(visit)
    assert isinstance(asker._read("north", visit, reply), messages.Released)
    start = 12 + int.from_bytes(reply[8:12], "big")
    for _ in range(number):
        data = mutations.with_a_right_digest(rng, reply)
        with contextlib.suppress(wire.MalformedError):
            asker._read("north", visit, data)
            taken += data != reply
            assert data[:start] == reply[:start]
            assert len(data) == len(reply)
    assert taken < number / 20


@pytest.mark.slow
@grid("name", ["in turn", "virtual", "by natural gradients", "scores"], quick=[0, 1, 2])
def test_honest_releases_are_far_from_the_bound_and_have_one(name, tmp_path):
    """The largest of 50 is within it, and more than a twentieth of it."""
    pinned = hospitals.write_study(tmp_path, **STUDIES[name])
    prepared = silo.study.prepare(pinned)
    state = prepared.first_state()
    assembly = prepared.assembly
    shards = dppvi.records.stack_clients(hospitals.records())
    mine = client_of(assembly, 0, state, shards)
    asked = consortium._request(
        assembly.problem, assembly.params, state.server, state.server.natural, 0, jax.random.key(0)
    )
    found = []
    for _ in range(50):
        _, release = mine.released(asked)
        rate = assembly.params.learning_rate
        found.append(
            silo.bounds.excess(assembly.problem, mine.params, rate, asked.q, release.value)
        )
    assert 0.05 < max(found) <= 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["virtual", "by natural gradients"])
def test_whatever_the_server_asks_with_a_record_moves_a_release_by_its_sensitivity(name, tmp_path):
    """With approximations at the ends of 32 bits, and records there, too."""
    pinned = hospitals.write_study(tmp_path, **STUDIES[name])
    prepared = silo.study.prepare(pinned, dppvi.privacy.SecretKeys(7))
    state, assembly = prepared.first_state(), prepared.assembly
    clients = []
    for record in (None, 3e3, -1e18, 3e38):
        records = hospitals.records()
        if record is not None:
            records[0]["X"][0] = record
        clients.append(client_of(assembly, 0, state, dppvi.records.stack_clients(records)))
    solver = assembly.problem.method.solver(assembly.params.learning_rate)
    asked = consortium._request(
        assembly.problem, assembly.params, state.server, state.server.natural, 0, jax.random.key(0)
    )
    most = 2 * float(clients[0].params.clip_norm * clients[0].params.weight)
    moved = []
    for linear, precision in ((0, 1), (1e3, 1), (1e30, 1e30), (0, 1e38), (-1e38, 1e-3)):
        one = asked.q["w"]
        q = {"w": type(one)(np.full(2, linear, "f4"), np.full(2, -precision / 2, "f4"))}
        assert assembly.problem.family.in_domain(q)
        values = [each.released(asked._replace(q=q))[1].value for each in clients]
        assert len({np.isfinite(jax.tree.leaves(each)).all() for each in values}) == 1
        if np.isfinite(jax.tree.leaves(values[0])).all():
            first, *others = (
                np.concatenate(jax.tree.leaves(solver.measured(assembly.problem.family, q, each)))
                for each in values
            )
            moved += [np.linalg.norm(each - first) / most for each in others]
    assert 0.1 < max(moved) < 1.01


@pytest.mark.slow
@pytest.mark.parametrize("noise_std", [0.0, 2.0])
def test_the_noise_of_all_entries_may_not_be_in_one(noise_std):
    """A sum of 10 vectors of norm 1 at most, of 10^4 entries: 200 of them would fit the norm."""
    sum_of_ten = consortium.bounds.ClientParams(noise_std, 1, 1, 1.0, 1.0, 10)
    rng = np.random.default_rng(0)
    honest = [10 * np.eye(10_000, dtype="f4")[0] + noise_std * rng.normal(size=10_000)]
    honest += [{"a": each[:5000], "b": each[5000:]} for each in honest]
    largest = [float(consortium.bounds._of_sum(sum_of_ten, 10.0, each)) for each in honest]
    assert largest[0] == pytest.approx(largest[1])
    assert 0.2 < largest[0] < 1
    for each in (10 + 16 * noise_std, -10 - 16 * noise_std):
        dishonest = np.zeros(10_000, np.float32)
        dishonest[7] = each * 1.01
        assert consortium.bounds._of_sum(sum_of_ten, 10.0, dishonest) > 1


def test_at_their_own_pace_who_cannot_be_reached_is_asked_again(tmp_path, monkeypatch):
    """Every step comes in the end, once, also if the server dies on the way."""
    pinned, paths = hospitals.write_consortium(tmp_path, f"{QUICK}, {PACES}")
    tried, one = set(), threading.Lock()
    computed = []
    respond = client._respond
    monkeypatch.setattr(client, "_respond", lambda *a: computed.append(1) or respond(*a))
    path = tmp_path / "server.npz"

    def unsteady(deliver):
        def courier(name, message):
            with one:
                new = (name, message) not in tried
                tried.add((name, message))
            if new and name != "north":
                raise TimeoutError
            return deliver(name, message)

        return courier

    with gateways(paths, seed=None) as opened:
        deliver = unsteady(in_process(opened))
        with pytest.raises(KilledError):
            silo.run_study(pinned, dying(deliver, 4, "after"), checkpoint=path)
        for _ in range(20):
            found = silo.run_study(pinned, deliver, checkpoint=path)
            if "interrupted" not in str(found.status):
                break
        steps = [len(each.store.ledger().entries) for each in opened.values()]
    assert steps == [4, 3, 2]  # as the latencies have it
    assert len(computed) == 9
    assert len(found.history.movement) == 3
    np.testing.assert_array_equal(np.bincount([m for _, m, _ in progress_of(pinned, path)]), steps)


def progress_of(pinned, path):
    return progress.read(path, silo.study.prepare(pinned)).charged
