"""Files from elsewhere, damaged or made to do harm: read as they were, or refused in a sentence.

Every kind of file that the library reads is taken as it really is, and changed thousands of times.
It must be read as exactly what it was, or end in an error of ours that names the file; it must
never be read as something else, nor take more memory than it has any right to.
"""

import io
import itertools
import json
import os
import re
import struct
import tracemalloc
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import dp_accounting as dpa
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import numpyro_dppvi as dppvi
from numpyro_dppvi import _disk, _files
from numpyro_dppvi.families import NormalNatural
from numpyro_dppvi.guides import family_of
from numpyro_dppvi.latents import from_model
from numpyro_dppvi.latents.space import shapes
from numpyro_dppvi.posterior import file
from numpyro_dppvi.posterior.posterior import Posterior
from numpyro_dppvi.privacy import Entry, Ledger, LedgerFile, PrivacyBudget
from numpyro_dppvi.protocol.algorithm import PVIState
from numpyro_dppvi.protocol.client import ClientState
from numpyro_dppvi.protocol.server import ServerState
from numpyro_dppvi.run.checkpoint import Journal, locked
from numpyro_dppvi.run.history import History
from tests.grids import grid

MIB = 2**20
NUM_CLIENTS, NUM_ROUNDS, ROUND = 3, 4, 2
BUDGETS = (PrivacyBudget(1.0), PrivacyBudget(3.0, 1e-6, "add_or_remove_one"))
ENTRIES = tuple(
    Entry(number, client, event, 1 + client)
    for number in range(3)
    for client, event in enumerate(
        (dpa.GaussianDpEvent(30.0), dpa.PoissonSampledDpEvent(0.1, dpa.GaussianDpEvent(40.1)))
    )
)


def natural(*lead, seed=0):
    rng = np.random.default_rng(seed)
    return {
        name: NormalNatural(*(rng.normal(size=(*lead, size)).astype(np.float32) for _ in range(2)))
        for name, size in (("w", 3), ("b", 1))
    }


def journal(path):
    client = SimpleNamespace(
        budget=BUDGETS[0],
        before=frozenset(),
        mechanism=SimpleNamespace(dp_event=dpa.GaussianDpEvent(30.0)),
        releases_per_visit=1,
    )
    plan = SimpleNamespace(clients=(client,) * NUM_CLIENTS, first_round=0)
    plan.parts, plan.at = (plan,), lambda round_number: plan
    groups = (np.arange(NUM_CLIENTS)[:, None],) * NUM_ROUNDS
    return Journal(path, {"model": "m 12", "method": "DPOptimization()"}, plan, groups)


def state(number, seed):
    ledger = Ledger((PrivacyBudget(np.inf),) * NUM_CLIENTS)
    private = natural(NUM_CLIENTS, 2, seed=seed + 2)
    known = ServerState(natural(seed=seed), natural(NUM_CLIENTS, seed=seed + 1))
    return PVIState(number, known, ClientState(private), ledger)


def history(rounds):
    numbers = np.arange(rounds, dtype=np.int32)
    return History(natural(rounds, seed=9), numbers.astype(np.float32), *(numbers,) * 3)


def write_checkpoint(folder):
    journal(folder / "run.npz").keep(state(ROUND, 5), history(ROUND))


def resume(folder):
    found, past = journal(folder / "run.npz").resume(state(0, 0), history(0))
    return found._replace(ledger=found.ledger.entries), past


def model(X, y=None, *, prior_scale=1.0, df=3.0):
    w = numpyro.sample("w", dist.Normal(0, prior_scale).expand([3]).to_event(1))
    noise = numpyro.sample("noise", dist.HalfNormal(1))
    with numpyro.plate("records", X.shape[0]):
        numpyro.sample("y", dist.StudentT(df, X @ w, noise), obs=y)


def write_posterior(folder):
    data, kwargs = {"X": np.ones((5, 3)), "y": np.zeros(5)}, {"prior_scale": np.ones(3), "df": 4.0}
    space = from_model(model, data, kwargs)
    family = family_of(None, model, space)
    numbers = {
        name: NormalNatural(jnp.ones(member.shape), -jnp.ones(member.shape))
        for name, member in family.members
    }
    attrs = {"privacy": "none", "max_epsilon": 1.5}
    posterior = Posterior(numbers, family, space, model, kwargs, attrs, shapes(data), None)
    posterior.save(folder / "posterior.npz")


def read_posterior(folder):
    return _files.read(folder / "posterior.npz", "posterior", kinds=file._FACTS)


def load(folder):
    return dppvi.load(folder / "posterior.npz", model)


def write_ledger(folder):
    file = LedgerFile(folder / "ledger.jsonl")
    file.charge(file.open(Ledger(BUDGETS)), ENTRIES)


def read_ledger(folder):
    return LedgerFile(folder / "ledger.jsonl").open(Ledger(BUDGETS)).entries


class Subject(NamedTuple):
    """A file, and how it is written and read."""

    name: str
    write: Any
    read: Any


SUBJECTS = {
    "checkpoint": Subject("run.npz", write_checkpoint, resume),
    "private": Subject(f"run.npz.private-{ROUND}", write_checkpoint, resume),
    "posterior": Subject("posterior.npz", write_posterior, read_posterior),
    "ledger": Subject("ledger.jsonl", write_ledger, read_ledger),
}
ZIPS = {name: subject for name, subject in SUBJECTS.items() if name != "ledger"}


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch):
    """Nothing here dies between two writes."""
    monkeypatch.setattr(os, "fsync", lambda number: None)


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """Bytes and meaning of every file, by its kind."""
    found = {}
    for kind, subject in SUBJECTS.items():
        folder = tmp_path_factory.mktemp(kind)
        subject.write(folder)
        found[kind] = ((folder / subject.name).read_bytes(), said(subject.read(folder)), folder)
    return found


def said(value):
    """All that was read, so that it can be compared bit by bit."""
    if isinstance(value, dict):
        return {key: said(part) for key, part in value.items()}
    if isinstance(value, (tuple, list)):
        return [type(value).__name__, *map(said, value)]
    if hasattr(value, "dtype"):
        array = np.asarray(value)
        return (array.dtype.str, array.shape, array.tobytes())
    return repr(value)


def outcome(read, folder, name):
    """What was read, or ``None`` where a sentence of ours refused it. All else is raised."""
    try:
        return said(read(folder))
    except (ValueError, FileNotFoundError) as error:
        is_ours = type(error) in (ValueError, FileNotFoundError)
        is_ours &= name.split(".private")[0] in str(error)
        if not is_ours or "\n" in str(error) or len(str(error)) > 1000:
            raise
        return None


class Tally:
    """Counts what came of many changes, and what should not have."""

    def __init__(self, kind, originals):
        self.subject = SUBJECTS[kind]
        self.content, self.meaning, self.folder = originals[kind]
        self.refused = self.same = 0
        self.faults = []

    def put(self, content):
        (self.folder / self.subject.name).write_bytes(content)

    def count(self, what, content, allowed=()):
        self.put(content)
        try:
            found = outcome(self.subject.read, self.folder, self.subject.name)
        except Exception as error:  # noqa: BLE001  (any but ours is what is looked for)
            self.faults.append((what, f"{type(error).__name__}: {str(error)[:200]}"))
            return
        finally:
            self.put(self.content)
        if found is None:
            self.refused += 1
        elif found == self.meaning or found in allowed:
            self.same += 1
        else:
            self.faults.append((what, "was read as something else"))


# ---------------------------------------------------------------------------------------------
# Damage: bytes that are changed, lost, doubled or moved.


def damages(content, rng, number):
    """Many ways in which a file is no longer what it was."""
    size = len(content)
    for _ in range(number):
        place, other = sorted(int(n) for n in rng.integers(0, size, 2))
        width = int(rng.integers(1, 64))
        piece = content[other : other + width]
        kind = int(rng.integers(0, 8))
        if kind <= 2:  # a bit, two bits, a byte
            changed = bytearray(content)
            for at in {place, other} if kind == 1 else {place}:
                changed[at] ^= int(rng.integers(1, 256)) if kind == 2 else 1 << int(rng.integers(8))
            yield f"bits at {place}, {other}", bytes(changed)
        elif kind == 3:
            yield f"cut at {place}", content[:place]
        elif kind == 4:
            yield f"without {place} to {place + width}", content[:place] + content[place + width :]
        elif kind == 5:
            yield f"zeros at {place}", content[:place] + bytes(width) + content[place + width :]
        elif kind == 6:
            yield f"{other} doubled at {place}", content[:place] + piece + content[place:]
        else:
            noise = rng.bytes(width)
            yield f"noise at {place}", content[:place] + noise + content[place + width :]


def prefixes():
    """What a ledger file may be read as when its end was cut off: it cannot know."""
    return [said(ENTRIES[:count]) for count in range(len(ENTRIES) + 1)]


def assert_damages_are_noticed(kind, originals, number, seed):
    tally = Tally(kind, originals)
    rng = np.random.default_rng(seed)
    for what, content in damages(tally.content, rng, number):
        if content == tally.content:
            continue
        is_cut = kind == "ledger" and tally.content.startswith(content)
        tally.count(what, content, prefixes() if is_cut else ())
    assert tally.faults == []
    assert tally.refused > 0.7 * number  # most of it is noticed, and not passed over


@pytest.mark.slow
@pytest.mark.parametrize("kind", SUBJECTS)
def test_a_damaged_file_is_read_as_it_was_or_refused(kind, originals):
    assert_damages_are_noticed(kind, originals, 150, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", SUBJECTS)
@pytest.mark.parametrize("seed", [2, 3])
def test_much_more_damage(kind, originals, seed):
    assert_damages_are_noticed(kind, originals, 2500, seed)


# ---------------------------------------------------------------------------------------------
# Zips that are whole, and not what was written.


def unzipped(content):
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def zipped(members, compression=zipfile.ZIP_STORED):
    """A whole zip of members, given as pairs of names and bytes."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        for name, data in members:
            if name in archive.namelist():
                with pytest.warns(UserWarning, match="Duplicate name"):
                    archive.writestr(zipfile.ZipInfo(name), data, compression)
            else:
                archive.writestr(zipfile.ZipInfo(name), data, compression)
    return buffer.getvalue()


def other_zips(content):
    """Zips of the same members that were taken apart and put together differently."""
    members = unzipped(content)
    names = list(members)
    for one, other in itertools.combinations(names, 2):
        swapped = {**members, one: members[other], other: members[one]}
        yield f"{one} for {other}", zipped(swapped.items())
    for name in names:
        rest = [(key, data) for key, data in members.items() if key != name]
        yield f"without {name}", zipped(rest)
        yield f"{name} twice", zipped([*members.items(), (name, members[name])])
        yield f"{name} empty", zipped([*rest, (name, b"")])
        yield f"{name} renamed", zipped([*rest, (f"x/{name}", members[name])])
        yield f"{name} cut", zipped([*rest, (name, members[name][:-1])])
        yield f"{name} longer", zipped([*rest, (name, members[name] + b"\0")])
    yield "one more", zipped([*members.items(), ("x.npy", members[names[0]])])
    yield "a member that is no array", zipped([*members.items(), ("x.txt", b"")])
    yield "in another order", zipped(reversed(members.items()))
    for compression in (zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA):
        yield f"compressed, {compression}", zipped(members.items(), compression)
        said = struct.pack("<H", compression)
        yield f"said to be compressed, {compression}", changed_directory(content, 10, said)
    for flags in (1, 0x20, 0x40, 0x41, 0x2000):  # encrypted, patched, strongly encrypted, masked
        yield f"flags {flags}", changed_directory(content, 8, struct.pack("<H", flags))
    for size in (0, 1, 2**30, 2**32 - 1):
        for offset in (20, 24, 42):  # compressed size, size, place of the member
            yield f"{size} at {offset}", changed_directory(content, offset, struct.pack("<L", size))
    yield "needs another program", changed_directory(content, 6, struct.pack("<H", 255))


def changed_directory(content, offset, data):
    """The same zip, where the directory says something else of all members."""
    changed = bytearray(content)
    for found in re.finditer(re.escape(b"PK\1\2"), content):
        place = found.start() + offset
        changed[place : place + len(data)] = data
    return bytes(changed)


OTHER_VALUES = [None, True, -1, 0, 10**30, 1e300, float("nan"), "x", "", [], [1], {}, {"x": 1}]


def other_headers(facts):
    """Facts of which one, at any depth, is gone or of another kind."""
    for name, value in facts.items():
        yield f"no {name}", {key: part for key, part in facts.items() if key != name}
        for other in OTHER_VALUES:
            yield f"{name}: {other!r}", {**facts, name: other}
        if isinstance(value, dict):
            for what, inner in other_headers(value):
                yield f"{name}/{what}", {**facts, name: inner}
        if isinstance(value, list):
            yield f"{name} shorter", {**facts, name: value[1:]}
            yield f"{name} longer", {**facts, name: [*value, *value]}
            for at, other in itertools.product(range(len(value)), OTHER_VALUES):
                yield (
                    f"{name}[{at}]: {other!r}",
                    {
                        **facts,
                        name: [*value[:at], other, *value[at + 1 :]],
                    },
                )


@grid("kind", ZIPS, quick=[2])
def test_a_zip_that_was_put_together_differently(kind, originals):
    tally = Tally(kind, originals)
    for what, content in other_zips(tally.content):
        tally.count(what, content)
    assert tally.faults == []
    assert tally.refused > 50
    assert tally.same >= 1  # another order is the same


@grid("kind", ZIPS, quick=[2])
def test_a_header_that_was_edited(kind, originals):
    tally = Tally(kind, originals)
    members = unzipped(tally.content)
    facts = json.loads(members["header.json"])
    for what, other in other_headers(facts):
        if json.dumps(other) != json.dumps(facts):
            tally.count(what, zipped({**members, "header.json": json.dumps(other)}.items()))
    assert tally.faults == []
    assert tally.same == 0


@pytest.mark.parametrize("kind", ["checkpoint", "private"])
def test_a_checkpoint_that_was_forged_ends_in_no_raw_error(kind, originals):
    tally = Tally(kind, originals)
    path = tally.folder / tally.subject.name
    word = "checkpoint" if kind == "checkpoint" else "private state of clients"
    facts, arrays = _files.read(path, word)
    facts = {name: facts[name] for name in facts if name not in ("library", "kind")}
    for what, other in other_headers(facts):
        _files.write(path, word, other, arrays)
        # It may say what it likes of things that a run does not need.
        needless = what.removeprefix("no ").startswith(("warning", "version"))
        tally.count(what, path.read_bytes(), () if not needless else [tally.meaning])
    for name, array in arrays.items():
        for other in other_arrays(array):
            _files.write(path, word, facts, {**arrays, name: other})
            tally.count(f"{name} as {other.dtype}{other.shape}", path.read_bytes())
    tally.put(tally.content)
    assert tally.faults == []
    assert tally.refused > 40


def other_arrays(array):
    yield array[..., None]
    yield np.concatenate([array, array])
    yield array[:0]
    yield np.float32(0.0)
    yield array.astype(np.complex64)
    yield array.astype(bool)
    if array.dtype.kind == "f":
        yield array.astype(np.int32)
    else:
        yield array.astype(np.float32)


EDITS = {
    "model": [1],
    "family": ["x"],
    "latents": [{}, {"w": None}, {"w": [[3]]}, {"w": [[3], [3]]}, {"w": 3, "noise": [[], []]}],
    "records": [
        {},
        {"X": None},
        {"X": [[5, 3]]},
        {"X": [[5], "float32"], "y": [[5], "float32"]},
        {"X": [[], "float32"], "y": [[5], "float32"]},
        {"X": [[5, 2**40], "float32"], "y": [[5], "float32"]},
        {"X": [[5, 2**20, 2**20], "float32"], "y": [[5], "float32"]},
        {"X": [[5, -3], "float32"], "y": [[5], "float32"]},
        {"X": [[5, 3.0], "float32"], "y": [[5], "float32"]},
        {"X": [[5, True], "float32"], "y": [[5], "float32"]},
        {"X": [[5, 3], "object"], "y": [[5], "float32"]},
        {"X": [[5, 3], "V100"], "y": [[5], "float32"]},
        {"X": [[5, 3], "no such dtype"], "y": [[5], "float32"]},
        {"X": [[5, 3], 7], "y": [[5], "float32"]},
        {"X": [[1] * 70, "float32"], "y": [[5], "float32"]},
    ],
    "model_kwargs": [{"link": 1}, {"df": "x"}, 7],
    "model_kwargs_left_out": [{}, ["x"], [[]]],
    "prior_attrs": [{}, 3],
    "attrs": [[]],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in EDITS.items() for value in values]
)
def test_a_posterior_that_was_forged_is_refused(name, value, originals, tmp_path):
    path = tmp_path / "posterior.npz"
    path.write_bytes(originals["posterior"][0])
    facts, arrays = _files.read(path, "posterior")
    _files.write(path, "posterior", {**facts, name: value}, arrays)
    assert outcome(load, tmp_path, "posterior.npz") is None


def test_a_posterior_with_another_probe_is_refused(originals, tmp_path):
    path = tmp_path / "posterior.npz"
    for name in ("probe/w", "natural/w/linear"):
        path.write_bytes(originals["posterior"][0])
        facts, arrays = _files.read(path, "posterior")
        for other in other_arrays(arrays[name]):
            _files.write(path, "posterior", facts, {**arrays, name: other})
            assert outcome(load, tmp_path, "posterior.npz") is None


# ---------------------------------------------------------------------------------------------
# Arrays and headers that claim what they are not, and files that grow when they are read.


def npy(text, data=b"", version=b"\1\0"):
    """An array whose header is any text."""
    text = text.encode("latin1")
    length = struct.pack("<H", len(text)) if version == b"\1\0" else struct.pack("<L", len(text))
    return b"\x93NUMPY" + version + length + text + data


def described(shape, descr="<f4", order=False):
    return f"{{'descr': {descr!r}, 'fortran_order': {order}, 'shape': {shape}, }}\n"


CLAIMS = {
    "TiB": npy(described((2**40,))),
    "too many for a machine": npy(described((10**17, 10**17))),
    "digits without end": npy(described("9" * 60000)),
    "nothing, of many": npy(described((0, 10**17))),
    "dimensions": npy(described((1,) * 100, descr="<f4"), bytes(4)),
    "negative": npy(described((-1,))),
    "bool": npy(described("(True,)"), bytes(4)),
    "object": npy(described((1,), descr="|O"), bytes(8)),
    "text": npy(described((1,), descr="<U9"), bytes(36)),
    "void": npy(described((1,), descr="|V9"), bytes(9)),
    "date": npy(described((1,), descr="<M8[D]"), bytes(8)),
    "fields": npy(described((1,), descr=[("x", "<f4")]), bytes(4)),
    "itemsize": npy(described((1,), descr="<f99"), bytes(99)),
    "python 2": npy("{'descr': '<f4', 'fortran_order': False, 'shape': (1L,), }\n", bytes(4)),
    "another version": npy(described((1,)), bytes(4), version=b"\2\0"),
    "unknown version": npy(described((1,)), bytes(4), version=b"\7\0"),
    "unfinished": npy("{'descr': '<f4', "),
    "deep": npy("(" * 60000),
    "tokens": npy("{'shape': '''"),
    "code": npy("__import__('os').getcwd()"),
    "no header": b"\x93NUMPY\1\0\xff\xff",
    "nothing": b"",
}


@pytest.mark.parametrize("what", CLAIMS)
@pytest.mark.parametrize("kind", ["checkpoint", "private"])
def test_an_array_that_claims_what_it_is_not(what, kind, originals):
    tally = Tally(kind, originals)
    members = unzipped(tally.content)
    name = next(name for name in members if name.endswith(".npy"))
    members[name] = CLAIMS[what]
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:  # with a check that fits
        for key, data in members.items():
            if key != "header.json":
                archive.writestr(zipfile.ZipInfo(key), data)
        facts = json.loads(members["header.json"])
        facts["check"] = _files._check(facts, archive.infolist())
        archive.writestr(zipfile.ZipInfo("header.json"), json.dumps(facts))
    assert peak(lambda: tally.count(what, buffer.getvalue())) < 8 * MIB
    assert (tally.faults, tally.refused) == ([], 1)


def peak(do):
    """The most memory that was held at once meanwhile, beyond what was held before."""
    tracemalloc.start()
    try:
        do()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def header_of(text):
    return zipped([("header.json", text)])


def bomb(compression):
    return zipped([("header.json", b"{}"), ("x.npy", bytes(64 * MIB))], compression)


def overlapping():
    """Very many members that are all the same bytes of the file."""
    content = zipped([("header.json", b"{}"), ("x.npy", bytes(1000))])
    start, end = content.index(b"PK\1\2"), content.index(b"PK\5\6")
    directory = content[content.rindex(b"PK\1\2") : end]
    entries = [directory.replace(b"x.npy", b"%05x" % n) for n in range(100_000)]
    whole = content[start : content.rindex(b"PK\1\2")] + b"".join(entries)
    ending = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, len(whole), start, 0)
    return content[:start] + whole + ending


BOMBS = {
    "deflate": lambda: bomb(zipfile.ZIP_DEFLATED),
    "bzip2": lambda: bomb(zipfile.ZIP_BZIP2),
    "lzma": lambda: bomb(zipfile.ZIP_LZMA),
    "header that expands": lambda: zipped([("header.json", b" " * 64 * MIB)], zipfile.ZIP_DEFLATED),
    "header that is large": lambda: header_of(b" " * 20 * MIB),
    "members without end": overlapping,
    "directory of the whole file": lambda: (
        b"PK\1\2" * (5 * MIB) + struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 9, 9, 20 * MIB, 0, 0)
    ),
    "deep": lambda: header_of("[" * 100_000),
    "deep objects": lambda: header_of('{"x":' * 100_000 + "1" + "}" * 100_000),
    "long number": lambda: header_of('{"version": ' + "9" * 100_000 + "}"),
    "not UTF-8": lambda: header_of(b"\xff\xfe\xfd"),
    "a comment": lambda: header_of("{}")[:-2] + b"\xff\xff" + bytes(65535),
}


@grid("what", BOMBS, quick=[0, *range(3, len(BOMBS))])
@pytest.mark.parametrize("kind", ZIPS)
def test_a_file_that_grows_when_it_is_read(what, kind, originals):
    tally = Tally(kind, originals)
    content = BOMBS[what]()
    assert peak(lambda: tally.count(what, content)) < 16 * MIB
    assert (tally.faults, tally.refused) == ([], 1)


@pytest.mark.parametrize("kind", SUBJECTS)
def test_a_terabyte_of_holes(kind, originals):
    tally = Tally(kind, originals)
    path = tally.folder / tally.subject.name
    try:
        for head in (b"", tally.content[:500], tally.content):
            path.write_bytes(head)
            os.truncate(path, 2**40)
            used = peak(lambda: outcome(tally.subject.read, tally.folder, tally.subject.name))
            assert used < 16 * MIB
            assert outcome(tally.subject.read, tally.folder, tally.subject.name) is None
    finally:
        tally.put(tally.content)


@pytest.mark.slow
def test_a_checkpoint_holds_no_more_than_its_run_needs(originals, tmp_path):
    """Whole in itself, and of any size: it is refused before its arrays are read."""
    path = tmp_path / "run.npz"
    path.write_bytes(originals["checkpoint"][0])
    facts, arrays = _files.read(path, "checkpoint")
    arrays["state/factors/w/linear"] = np.zeros((NUM_CLIENTS, 8 * MIB), np.float32)
    _files.write(path, "checkpoint", facts, arrays)
    del arrays
    assert peak(lambda: outcome(resume, tmp_path, "run.npz")) < 8 * MIB
    with pytest.raises(ValueError, match=r"holds 1\d{8} bytes of arrays, where at most \d{3} are"):
        resume(tmp_path)


def test_a_posterior_that_no_file_may_hold_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setattr(_files, "MOST", _files.Most(facts=2**24, arrays=16))
    with pytest.raises(ValueError, match=r"at most 16 bytes of arrays .* got 72 and"):
        write_posterior(tmp_path)
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------------------------------------
# Ledger files whose checks fit, because whoever changed them made them anew.


OTHER_EVENTS = [
    None,
    [],
    {},
    "x",
    {"GaussianDpEvent": None},
    {"GaussianDpEvent": {}},
    {"GaussianDpEvent": {"noise_multiplier": "x"}},
    {"GaussianDpEvent": {"noise_multiplier": None}},
    {"GaussianDpEvent": {"noise_multiplier": -1.0}},
    {"GaussianDpEvent": {"noise_multiplier": float("nan")}},
    {"GaussianDpEvent": {"noise_multiplier": [1]}},
    {"GaussianDpEvent": {"noise_multiplier": True}},
    {"GaussianDpEvent": {"noise_multiplier": {"GaussianDpEvent": {"noise_multiplier": 1.0}}}},
    {"GaussianDpEvent": {"noise_multiplier": 30.0, "x": 1}},
    {"NoDpEvent": {}},
    {"PoissonSampledDpEvent": {"sampling_probability": 2, "event": {}}},
    {"PoissonSampledDpEvent": {"sampling_probability": 0.1, "event": 3}},
    {"PoissonSampledDpEvent": {"sampling_probability": 0.1, "event": {}}},
]


@pytest.mark.parametrize(
    ("name", "value"),
    [("event", event) for event in OTHER_EVENTS]
    + [
        (name, value)
        for name in ("round", "client", "num_releases")
        for value in (None, "0", 1.5, True, -1, 10**30, [], {}, float("inf"))
    ]
    + [("more", 1)],
)
def test_a_ledger_line_that_was_forged_is_refused(name, value, originals, tmp_path):
    path = tmp_path / "ledger.jsonl"
    header, first, *_ = originals["ledger"][0].splitlines()
    fields = {**json.loads(first), name: value}
    fields.pop("check")
    module = dppvi.privacy.ledger_file
    before = module._check("", header)
    line = module._dumps({**fields, "check": module._check(before, module._dumps(fields))})
    path.write_bytes(header + b"\n" + line + b"\n")
    assert outcome(read_ledger, tmp_path, "ledger.jsonl") is None


@pytest.mark.parametrize(
    "line",
    [
        b"[" * 10_000,
        b'{"x":' * 3_000,
        b"x" * 64 * MIB,
        b"\xff" * 1000,
        b'{"round": ' + b"9" * 10_000 + b"}",
    ],
    ids=["deep", "deep objects", "long", "no text", "long number"],
)
@pytest.mark.parametrize("end", [b"\n", b""])
@pytest.mark.parametrize("headed", [True, False])
def test_a_line_of_no_ledger(line, end, headed, originals, tmp_path):
    path = tmp_path / "ledger.jsonl"
    whole = originals["ledger"][0] if headed else b""
    path.write_bytes(whole + line + end)
    found = [None]
    assert peak(lambda: found.append(outcome(read_ledger, tmp_path, "ledger.jsonl"))) < 16 * MIB
    # What looks like the beginning of a line is one that was cut off.
    assert found[-1] in ([None, said(ENTRIES)] if headed and not end else [None])


# ---------------------------------------------------------------------------------------------
# Who may read what is written, and what was there before.


@pytest.fixture(params=[0o000, 0o022, 0o077])
def mask(request):
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def mode(path):
    return path.lstat().st_mode & 0o777


def test_what_is_made_is_its_owners_alone(tmp_path, mask):
    run = journal(tmp_path / "run.npz")
    seen = []
    write_zip = _files._write_zip

    def spy(file, *arguments):
        seen.append(os.fstat(file.fileno()).st_mode & 0o777)
        write_zip(file, *arguments)

    with pytest.MonkeyPatch.context() as patch, locked(run.path):
        patch.setattr(_files, "_write_zip", spy)
        run.keep(state(1, 0), history(1))
        _files.write(tmp_path / "saved.npz", "thing", {}, {})
    write_ledger(tmp_path)
    assert seen == [0o600] * 3  # while it is written, too
    modes = {path.name: mode(path) for path in tmp_path.iterdir()}
    assert modes == {
        ".run.npz.lock": 0o600,
        "run.npz": 0o600,
        "run.npz.private-1": 0o600,
        "saved.npz": 0o666 & ~mask,
        "ledger.jsonl": 0o600,
    }


class TestWhatWasThereBefore:
    @pytest.fixture
    def elsewhere(self, tmp_path):
        """A file that nothing here may touch."""
        path = tmp_path / "elsewhere"
        path.write_text("mine")
        path.chmod(0o666)
        yield path
        assert path.read_text() == "mine"
        assert mode(path) == 0o666

    @pytest.mark.parametrize("name", [".run.npz.partial", ".run.npz.private-1.partial"])
    def test_a_partial_that_all_may_read(self, tmp_path, name):
        partial = tmp_path / name
        partial.write_text("put here beforehand")
        partial.chmod(0o666)
        with partial.open() as watching:
            journal(tmp_path / "run.npz").keep(state(1, 0), history(1))
            assert watching.read() == "put here beforehand"  # and nothing of the run
        assert {mode(path) for path in tmp_path.iterdir()} == {0o600}

    @pytest.mark.parametrize(
        "name", [".run.npz.partial", ".run.npz.private-1.partial", "run.npz.private-1"]
    )
    def test_a_link_where_a_file_is_written(self, tmp_path, elsewhere, name):
        (tmp_path / name).symlink_to(elsewhere)
        journal(tmp_path / "run.npz").keep(state(1, 0), history(1))
        written = [path for path in tmp_path.iterdir() if path != elsewhere]
        assert not any(path.is_symlink() for path in written)
        assert {mode(path) for path in written} == {0o600}

    @pytest.mark.parametrize("target", ["elsewhere", "nowhere"])
    @pytest.mark.parametrize("name", [".run.npz.lock", "run.npz"])
    def test_a_link_as_lock_or_checkpoint(self, tmp_path, elsewhere, name, target):
        (tmp_path / name).symlink_to(tmp_path / target)
        with (
            pytest.raises(
                ValueError, match=r"run\.npz\S* is a symbolic link, which is not followed here"
            ),
            locked(tmp_path / "run.npz"),
        ):
            pass
        assert not (tmp_path / "nowhere").exists()

    @pytest.mark.parametrize("kind", ["checkpoint", "private"])
    def test_a_link_that_is_read(self, tmp_path, originals, kind):
        _, _, folder = originals[kind]
        for path in folder.iterdir():
            (tmp_path / path.name).write_bytes(path.read_bytes())
        path = tmp_path / SUBJECTS[kind].name
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
        with pytest.raises(ValueError, match="is a symbolic link, which is not followed here"):
            resume(tmp_path)

    def test_a_link_to_a_posterior_is_followed(self, tmp_path, originals):
        """It holds what was released, and stores of files are made of links."""
        (tmp_path / "elsewhere").write_bytes(originals["posterior"][0])
        (tmp_path / "posterior.npz").symlink_to(tmp_path / "elsewhere")
        assert said(read_posterior(tmp_path)) == originals["posterior"][1]
        write_posterior(tmp_path)  # in the place of the link
        assert not (tmp_path / "posterior.npz").is_symlink()
        assert (tmp_path / "elsewhere").read_bytes() == originals["posterior"][0]

    @pytest.mark.parametrize("target", ["elsewhere", "nowhere"])
    def test_a_link_as_ledger(self, tmp_path, elsewhere, target):
        (tmp_path / "ledger.jsonl").symlink_to(tmp_path / target)
        with pytest.raises(
            ValueError, match=r"ledger\.jsonl is a symbolic link, which is not followed"
        ):
            read_ledger(tmp_path)
        assert not (tmp_path / "nowhere").exists()

    @pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes")
    @pytest.mark.parametrize("kind", SUBJECTS)
    def test_a_pipe_keeps_nobody_waiting(self, tmp_path, originals, kind):
        for path in originals[kind][2].iterdir():
            (tmp_path / path.name).write_bytes(path.read_bytes())
        path = tmp_path / SUBJECTS[kind].name
        path.unlink()
        os.mkfifo(path)
        assert outcome(SUBJECTS[kind].read, tmp_path, SUBJECTS[kind].name) is None

    @pytest.mark.skipif(not hasattr(os, "geteuid"), reason="needs owners of files")
    def test_a_ledger_or_lock_of_another_user(self, tmp_path, monkeypatch):
        for name in ("ledger.jsonl", ".run.npz.lock"):
            (tmp_path / name).write_text("")
        fstat = os.fstat

        def theirs(number):
            found = list(fstat(number))
            found[4] += 1  # the owner
            return os.stat_result(found)

        with monkeypatch.context() as patch:
            patch.setattr(os, "fstat", theirs)
            for path in (tmp_path / "ledger.jsonl", tmp_path / ".run.npz.lock"):
                with pytest.raises(ValueError, match="belongs to another user, who could change"):
                    _disk.open_or_create(path)
        assert (tmp_path / "ledger.jsonl").read_bytes() == b""
        read = Ledger(BUDGETS)
        assert LedgerFile(tmp_path / "ledger.jsonl").open(read).entries == ()

    def test_another_process_that_writes_the_same_file(self, tmp_path, monkeypatch):
        path = tmp_path / "some.npz"
        write_zip, inner = _files._write_zip, []

        def meanwhile(*arguments):
            if not inner:
                inner.append(True)
                _files.write(path, "thing", {"by": "another"}, {})
            write_zip(*arguments)

        monkeypatch.setattr(_files, "_write_zip", meanwhile)
        with pytest.raises(RuntimeError, match=r"another process is writing .* at the same time"):
            _files.write(path, "thing", {"by": "this"}, {})
        assert _files.read(path, "thing")[0]["by"] == "another"


# ---------------------------------------------------------------------------------------------
# Paths that are none.


NO_PATHS = [3, 2.5, True, b"run.npz", ["run.npz"], {"a": 1}, object(), np.zeros(2), Path]
NO_NAMES = ["", "a\0b", "\ud800"]


def normal_mean(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("records", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu, 1), obs=y)


def fit(**arguments):
    return dppvi.fit(
        normal_mean,
        None,
        {"y": np.zeros(4)},
        rng_key=jax.random.key(0),
        budget=PrivacyBudget(1.0),
        num_rounds=1,
        progress_bar=False,
        **arguments,
    )


CALLS = {
    "checkpoint": lambda path: fit(checkpoint=path),
    "ledger_file": lambda path: fit(ledger_file=path),
    "path": LedgerFile,
    "load": lambda path: dppvi.load(path, model),
    "save": lambda path: Posterior({}, None, None, model, {}, {}, {}).save(path),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("value", [*NO_PATHS, *NO_NAMES], ids=lambda value: type(value).__name__)
def test_what_is_no_path_is_refused_in_a_sentence(call, value):
    name = "path" if call in ("load", "save") else call
    kind = ValueError if isinstance(value, str) else TypeError
    with pytest.raises(
        kind, match=rf"^{name} must be the path of a file, got .*: write {name}='run"
    ):
        CALLS[call](value)


@pytest.mark.parametrize("call", ["path", "load", "save"])
def test_nothing_is_no_path_where_one_is_needed(call):
    with pytest.raises(
        TypeError, match=r"^path must be the path of a file, got None: write path='run"
    ):
        CALLS[call](None)


def test_a_path_where_a_ledger_file_is_needed():
    data, method = {"y": np.zeros(4)}, dppvi.DPOptimization()
    plan = dppvi.plan_privacy(method, PrivacyBudget(1.0), num_rounds=1, client_sizes=[4])
    arguments = {"method": method, "client_sizes": [4], "plan": plan}
    algorithm = dppvi.pvi(normal_mean, None, data, ledger_file="run.ledger", **arguments)
    with pytest.raises(TypeError, match=r"must be a LedgerFile, got 'run\.ledger': write ledger_f"):
        algorithm.init(jax.random.key(0))


PLACES = {
    "a folder": ("", IsADirectoryError, "is a folder: write the path of a file"),
    "no folder": ("no/file", FileNotFoundError, "there is no folder .*: create it first"),
    "a file as folder": ("file/file", FileNotFoundError, "there is no folder .*: create it first"),
    "too long": ("x" * 300, OSError, r"cannot be opened \(File name too long\): write the path"),
    "much too long": ("x" * 9000, OSError, r"\.\.\. \(\d+ characters\) cannot be opened"),
}
WRITERS = {
    "checkpoint": lambda path: locked(path).__enter__(),
    "ledger": lambda path: LedgerFile(path).charge(Ledger(BUDGETS), ENTRIES),
    "save": lambda path: _files.write(path, "thing", {}, {}),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("writer", WRITERS)
def test_a_place_that_cannot_be_written_is_told(place, writer, tmp_path):
    (tmp_path / "file").write_text("")
    name, kind, words = PLACES[place]
    with pytest.raises(kind, match=words) as refusal:
        WRITERS[writer](tmp_path / name)
    assert type(refusal.value) is kind
    assert len(str(refusal.value)) < 700


@pytest.mark.parametrize("writer", ["checkpoint", "save"])
def test_a_folder_in_the_place_of_a_partial(writer, tmp_path):
    (tmp_path / ".file.partial").mkdir()
    with pytest.raises(OSError, match=r"\.file\.partial cannot be opened \(.*\): write the path"):
        WRITERS[writer](tmp_path / "file")


@pytest.mark.parametrize("writer", WRITERS)
def test_a_folder_where_nothing_may_be_written(writer, tmp_path, monkeypatch):
    original = os.open

    def refused(path, flags, *arguments, **options):
        if flags & os.O_CREAT:
            raise PermissionError(13, "Permission denied")
        return original(path, flags, *arguments, **options)

    monkeypatch.setattr(os, "open", refused)
    with pytest.raises(PermissionError, match=r"cannot be opened \(Permission denied\): write the"):
        WRITERS[writer](tmp_path / "file")


@pytest.mark.parametrize("name", ["", "no/file", "file/file", "x" * 300])
def test_a_place_that_cannot_be_read_is_told(name, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        (ValueError, OSError), match=r"is not a regular|there is no file|cannot be ope"
    ):
        dppvi.load(tmp_path / name, model)
