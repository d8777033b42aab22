"""Private by construction: what a run gives away is a function of what it released.

Two runs on neighbouring data sets, with the same keys, release the same here, because the noisy
sums are replaced by noise alone. Then everything that comes out of `fit` must be the same, too:
whatever differs was computed from records and went past the mechanism.
"""

import collections.abc
import contextlib
import dataclasses
import functools
import importlib
import io
import itertools
import logging
import re
import secrets
import stat
import types
import warnings

import dp_accounting as dpa
import jax
import matplotlib as mpl
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import xarray
from tqdm.std import tqdm

import numpyro_dppvi as dppvi
from numpyro_dppvi import latents
from numpyro_dppvi.analysis import diagnostics, plots
from numpyro_dppvi.methods import visits
from numpyro_dppvi.privacy import Entry, Ledger, LedgerFile
from numpyro_dppvi.protocol import rounds
from numpyro_dppvi.run import checkpoint
from tests.programs import forget_programs

mpl.use("Agg")
logging.getLogger("matplotlib.font_manager").setLevel(logging.WARNING)  # it looks once a process

# ---------------------------------------------------------------------------------------------
# Everything that an object holds, as pairs of a path and a value.

ADDRESS = re.compile(r" at 0x[0-9a-f]+|0x[0-9a-f]{6,}")
ATOMS = (type(None), bool, int, float, complex, str, bytes, np.generic, np.dtype, type(Ellipsis))


def facts(thing, path="", seen=None):
    """Walks through containers, fields, attributes, closures, defaults and bound arguments."""
    seen = {} if seen is None else seen
    if isinstance(thing, ATOMS):
        yield path, repr(thing)
    elif isinstance(thing, jax.Array | np.ndarray):
        yield path, array_fact(thing)
    elif isinstance(thing, tuple) and all(isinstance(part, ATOMS) for part in thing):
        # One such as a shape may be that of several arrays, in one of two runs.
        yield path, repr(thing)
    elif isinstance(thing, type | types.ModuleType) or id(thing) in seen:
        return
    else:
        seen[id(thing)] = thing  # kept alive, so that no other object gets its number
        for name, part in parts(thing):
            yield from facts(part, f"{path}{name}", seen)
        if not has_parts(thing):
            yield path, ADDRESS.sub("", repr(thing))


def array_fact(array):
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    array = np.asarray(array)
    return (
        str(array.dtype),
        array.shape,
        array.tolist() if array.dtype == object else array.tobytes(),
    )


def has_parts(thing):
    return next(iter(parts(thing)), None) is not None


def parts(thing):
    if isinstance(thing, xarray.Dataset | xarray.DataArray):
        yield ".attrs", dict(thing.attrs)
        names = thing.variables if isinstance(thing, xarray.Dataset) else thing.coords
        for name in names:
            yield f".{name}", np.asarray(thing[name].values)
            yield f".{name}.attrs", dict(thing[name].attrs)
        return
    if isinstance(thing, collections.abc.Mapping):
        for key in sorted(thing, key=repr):
            yield f"[{key!r}]", thing[key]
    elif hasattr(thing, "_fields"):
        for name in thing._fields:
            yield f".{name}", getattr(thing, name)
    elif isinstance(thing, tuple | list | collections.deque):
        for number, part in enumerate(thing):
            yield f"[{number}]", part
    elif isinstance(thing, set | frozenset):
        for number, part in enumerate(sorted(thing, key=repr)):
            yield f"{{{number}}}", part
    if isinstance(thing, functools.partial):
        yield from ((".func", thing.func), (".args", thing.args), (".keywords", thing.keywords))
    if isinstance(thing, types.MethodType):
        yield from ((".self", thing.__self__), (".func", thing.__func__))
    for name in ("__closure__", "__defaults__", "__kwdefaults__", "__wrapped__", "cell_contents"):
        try:
            part = getattr(thing, name, None)
        except ValueError:  # an empty cell
            continue
        if part is not None:
            yield f".{name}", part
    for kind in type(thing).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in [slots] if isinstance(slots, str) else slots:
            if not name.startswith("__") and hasattr(thing, name):
                yield f".{name}", getattr(thing, name)
    # What is cached when it is first asked for is compared whether or not it was.
    if isinstance(thing, latents.LatentSpace):
        for name in properties(thing):
            getattr(thing, name)
    for name, part in sorted(getattr(thing, "__dict__", {}).items()):
        if name != "__wrapped__":
            yield f".{name}", part


# ---------------------------------------------------------------------------------------------
# Everything that comes out of a run.


def model(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
    noise = numpyro.sample("noise", dist.LogNormal(0, 1))
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ w, noise), obs=y)


def data_set(canary):
    rng = np.random.default_rng(0)
    clients = [
        {
            "x": rng.normal(size=(n, 2)).astype(np.float32),
            "y": rng.normal(size=n).astype(np.float32),
        }
        for n in (8, 12)
    ]
    clients[0]["y"][3] = canary
    clients[0]["x"][3] = [canary, -canary]
    return clients


ONE, OTHER = data_set(1.5), data_set(250.0)
CREATED = {"created_at", "creation_library_version"}
TIMES = re.compile(r"\d+:\d\d|[\d.?]+ ?(it|s|rounds?)/(it|s|rounds?)|[\d.]+ ?(sec|ms|s)\b")


class Lines(logging.Handler):
    """Keeps every line that anybody logs."""

    def __init__(self):
        super().__init__(logging.DEBUG)
        self.lines = []

    def emit(self, record):
        self.lines.append(f"{record.name} {record.getMessage()}")


def fit(data, folder, method, trusted=False):
    with pytest.MonkeyPatch.context() as patch:
        names = itertools.count()  # random ones are of no record, and differ from run to run
        patch.setattr(secrets, "token_hex", lambda size: f"{next(names):0{2 * size}x}")
        return _fit(data, folder, method, trusted)


def _fit(data, folder, method, trusted):
    return dppvi.fit(
        model,
        None,
        data,
        rng_key=jax.random.key(0),
        method=method,
        budget=dppvi.PrivacyBudget(2.0),
        schedule=dppvi.synchronous if trusted else dppvi.sequential,
        num_rounds=3,  # in the third, private factors have moved twice
        trusted_aggregator=trusted,
        ledger_file=folder / "ledger",
        checkpoint=folder / "run.npz",
        progress_bar=True,
        insecure_noise_seed=3,
    )


def surfaces(data, folder, capsys, method, trusted=False, spoil=lambda result, data: result):
    """What a run shows, by where it shows it."""
    handler, root, compiler = Lines(), logging.getLogger(), logging.getLogger("jax")
    levels = root.level, compiler.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    compiler.setLevel(logging.WARNING)  # it tells times
    capsys.readouterr()
    folder.mkdir()
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            with kept_files(folder) as snapshots:
                result = fit(data, folder, method, trusted)
            result = spoil(result, data)
            posterior = result.posterior
            exported = posterior.to_arviz()
            if hasattr(posterior, "save"):
                posterior.save(folder / "saved.npz")
            shown = {
                "result": list(facts(result)),
                "properties": [
                    fact
                    for thing in (result, posterior)
                    for name in properties(thing)
                    for fact in facts(getattr(thing, name), name)
                ],
                "statement": (
                    str(result.privacy_statement()),
                    result.privacy_statement().to_json(),
                ),
                "words": (str(result.status), str(result.plan), str(result.ledger)),
                "ledger": str(result.ledger.entries),
                "export": list(export_facts(exported)),
                "figures": list(picture_facts(result)),
                "kept": snapshots,
            }
    finally:
        root.removeHandler(handler)
        root.setLevel(levels[0])
        compiler.setLevel(levels[1])
    out, err = capsys.readouterr()
    shown["files"] = [(p.name, file_facts(p)) for p in sorted(folder.iterdir())]
    shown["log"] = [TIMES.sub("", line) for line in handler.lines]
    shown["printed"] = re.sub(r"\s+", " ", TIMES.sub("", out + err))
    shown["warnings"] = [str(w.message) for w in warned]
    return shown


@contextlib.contextmanager
def kept_files(folder):
    """What lies in the folder each time that a checkpoint was written, with its permissions."""
    snapshots, keep = [], checkpoint.Journal.keep

    def watched(journal, *arguments):
        state = keep(journal, *arguments)
        for path in sorted(folder.iterdir()):
            mode = stat.filemode(path.stat().st_mode)
            # A client's own state carries no noise: it is told that it is there, and how guarded.
            private = ".private-" in path.name
            snapshots.append((path.name, mode, "private" if private else file_facts(path)))
        return state

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint.Journal, "keep", watched)
        yield snapshots


def picture_facts(result):
    """The numbers and words that the pictures of a result are made of."""
    # The replays of `diagnose` take long and start from the released factors alone.
    contributors, share = diagnostics._shares(result)
    ones = np.ones(len(result.history.movement))
    told = dppvi.analysis.Diagnostics(
        ones, ones, 1.0, 1.0, 1.0, contributors, share, noise={"w": np.ones(2)}
    )
    figures = [plots.convergence(result), plots.privacy(result, told)]
    figures += [plots.clients(result, told)] if share else []
    for number, figure in enumerate(figures):
        for line in figure.findobj(mpl.lines.Line2D):
            yield f"{number}.line", np.asarray(line.get_xydata()).tolist()
        for patch in figure.findobj(mpl.patches.Patch):
            yield f"{number}.patch", patch.get_path().vertices.tolist()
        for text in figure.findobj(mpl.text.Text):
            yield f"{number}.text", text.get_text()


def properties(thing):
    return [
        name
        for name in dir(type(thing))
        if not name.startswith("_")
        and isinstance(getattr(type(thing), name), property | functools.cached_property)
    ]


def export_facts(exported):
    """InferenceData or DataTree."""
    groups = getattr(exported, "children", None) or {
        name: getattr(exported, name) for name in exported.groups()
    }
    yield from facts({k: v for k, v in exported.attrs.items() if k not in CREATED}, "attrs")
    for name, group in groups.items():
        dataset = group.to_dataset() if hasattr(group, "to_dataset") else group
        kept = {k: v for k, v in dataset.attrs.items() if k not in CREATED}
        yield from facts(dataset.assign_attrs(kept).drop_attrs(deep=False), name)
        yield from facts(kept, f"{name}.attrs")


def file_facts(path):
    if path.suffix != ".npz":
        return path.read_bytes()
    with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as arrays:
        # Members that are no arrays, such as a header, come as bytes.
        return {n: list(facts(arrays[n])) for n in arrays.files}


def differing(one, other):
    """Where two runs differ."""
    found = []
    for place in one:
        if one[place] == other[place]:
            continue
        if place in ("result", "properties", "export"):
            mine, theirs = dict(one[place]), dict(other[place])
            names = {n for n in mine.keys() | theirs.keys() if mine.get(n) != theirs.get(n)}
            found += [f"{place}: {name}" for name in sorted(names)]
        else:
            found.append(place)
    return found


def forget():
    """Programs are traced anew."""
    forget_programs()


REAL_NOISE = visits.add_noise


def noise_alone(rng_key, total, noise_std, like=None, asked=None):
    """The mechanism at infinite noise, up to scale."""
    with jax.enable_x64(True):
        nothing = jax.tree.map(lambda leaf: 0 * leaf, total)
    return REAL_NOISE(rng_key, nothing, noise_std, total if like is None else like, asked)


@pytest.fixture(scope="module", autouse=True)
def _same_release():
    """Replaces noisy sums by noise in all of this file."""
    importlib.import_module("arviz")  # which logs something when it is imported
    init = tqdm.__init__

    def every_round(self, *arguments, **options):
        # However fast it is: what the bar shows must not depend on time.
        init(self, *arguments, **{**options, "mininterval": 0, "miniters": 1})

    forget()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tqdm, "__init__", every_round)
        patch.setattr(visits, "add_noise", noise_alone)
        yield
    forget()


def both(tmp_path, capsys, *arguments, **options):
    return [
        surfaces(data, tmp_path / name, capsys, *arguments, **options)
        for name, data in (("one", ONE), ("other", OTHER))
    ]


LOCAL = {"num_local_steps": 2, "expectation": dppvi.MonteCarlo(2)}
METHODS = {
    "gradients": (dppvi.DPOptimization(sampler=dppvi.PoissonSampling(0.5), **LOCAL),),
    "virtual clients": (dppvi.VirtualClients(2, **LOCAL),),
    "joint local averaging": (dppvi.methods.LocalAveraging(2, **LOCAL), True),
    "joint natural gradients": (
        dppvi.VirtualClients(2, 0.1, **LOCAL, optimizer=dppvi.NaturalGradient()),
        True,
    ),
    "global steps": (dppvi.GlobalVI(expectation=dppvi.MonteCarlo(2)), True),
    "scores": (dppvi.FisherScoring(2),),
    "sums of scores": (dppvi.FisherScoring(2), True),
}


# Of virtual clients see the last but one test, which runs them with one leak planted.
QUICK = "joint local averaging"


@pytest.mark.parametrize(
    "name",
    [
        name if name == QUICK else pytest.param(name, marks=pytest.mark.slow)
        for name in METHODS
        if name != "virtual clients"
    ],
)
def test_nothing_but_releases_comes_out(name, tmp_path, capsys):
    one, other = both(tmp_path, capsys, *METHODS[name])
    assert differing(one, other) == []
    # And there was something to be looked at.
    assert len(one["result"]) > 100
    assert "moved" in one["printed"] or "rounds" in one["printed"]
    assert {"ledger", "run.npz", "saved.npz"} <= set(dict(one["files"]))
    assert len(one["figures"]) > 20
    kept = [(name, mode) for name, mode, _ in one["kept"]]
    assert kept.count(("run.npz", "-rw-------")) >= 2
    # Where a client keeps something to itself it lies in a file of its own while the run goes on.
    private = [(name, mode) for name, mode in kept if ".private-" in name]
    assert bool(private) == ("joint" in name)
    assert {mode for _, mode in private} <= {"-rw-------"}
    assert not [name for name in dict(one["files"]) if ".private-" in name]


# ---------------------------------------------------------------------------------------------
# Planted leaks.


def leaking(step):
    """A round that tells of records in every way but the mechanism's."""

    def run(problem, numbers, start, shards, *rest):
        y = shards.records["y"]
        logging.getLogger("numpyro_dppvi").debug("norm %s", y.sum())
        if y.max() > 100:
            warnings.warn("an outlier", stacklevel=2)
        print(f"mean {y.mean()}")  # noqa: T201
        end, info = step(problem, numbers, start, shards, *rest)
        factors = jax.tree.map(lambda leaf: leaf + 1e-6 * (y > 100).sum(), end.server.factors)
        server = end.server._replace(factors=factors)
        return end._replace(server=server), info._replace(movement=info.movement + y.mean())

    return run


def spoilt(result, data):
    """A posterior that closes over records, and an export that counts them."""
    posterior = result.posterior
    return dataclasses.replace(
        result,
        posterior=dataclasses.replace(
            posterior,
            model=functools.partial(posterior.model, y=data[0]["y"]),
            attrs={**posterior.attrs, "outliers": int((data[0]["y"] > 100).sum())},
        ),
    )


@pytest.mark.slow
def test_planted_leaks_are_found(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(rounds, "run_round", leaking(rounds.run_round))
    found = differing(*both(tmp_path, capsys, *METHODS["gradients"], spoil=spoilt))
    assert {"log", "warnings", "printed", "result: .history.movement"} <= set(found)
    assert {"kept", "figures", "files"} <= set(found)
    assert "result: .posterior.model.keywords['y']" in found
    assert "result: .posterior.attrs['outliers']" in found
    assert "export: attrs['outliers']" in found or any("export: posterior" in f for f in found)
    assert any(place.startswith("result: .state.server.factors") for place in found)


def test_what_clients_keep_to_themselves_would_be_found(tmp_path, capsys, monkeypatch):
    """The private factors of virtual clients follow records without noise, and stay behind."""
    replace = dppvi.protocol.PVIState._replace

    def keep(state, **changes):
        return replace(state, **{k: v for k, v in changes.items() if k != "clients"})

    monkeypatch.setattr(dppvi.protocol.PVIState, "_replace", keep)
    found = differing(*both(tmp_path, capsys, *METHODS["virtual clients"]))
    assert found
    assert all(".state.clients.private" in place for place in found)


def told(error):
    """All that an exception says, with its causes."""
    while error is not None:
        yield repr(error), getattr(error, "__notes__", []), list(facts(vars(error)))
        error = error.__cause__ or error.__context__


def test_a_refused_round_shows_no_value(tmp_path):
    said = []
    for number, data in enumerate((ONE, OTHER)):
        folder = tmp_path / str(number)
        folder.mkdir()
        ledger = Ledger((dppvi.PrivacyBudget(9.0),) * 2)  # others could spend more
        LedgerFile(folder / "ledger").charge(ledger, [Entry(0, 0, dpa.GaussianDpEvent(5.0), 3)])
        with pytest.raises(dppvi.BudgetExceededError) as refused:
            fit(data, folder, *METHODS["gradients"])
        said.append(list(told(refused.value)))
    assert said[0] == said[1]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_refusal_of_data_shows_no_value(bad, tmp_path):
    """Wherever the bad number lies, and whatever lies beside it."""
    said = []
    for canary in (1.25, 250.0):
        data = data_set(canary)
        data[1]["y"][5] = bad
        with pytest.raises(ValueError, match="y") as refused:
            fit(data, tmp_path, *METHODS["gradients"])
        said.append(list(told(refused.value)))
    assert said[0] == said[1]


@pytest.mark.slow
def test_real_releases_differ(tmp_path, capsys, monkeypatch):
    """With the releases left as they are the same comparison finds them, and what they touch."""
    monkeypatch.setattr(visits, "add_noise", REAL_NOISE)
    forget()
    one, other = both(tmp_path, capsys, *METHODS["gradients"])
    found = differing(one, other)
    assert any(place.startswith("result: .state.server.factors") for place in found)
    assert any(place.startswith("export: posterior") for place in found)
    assert not {"statement", "words", "log", "warnings"} & set(found)
