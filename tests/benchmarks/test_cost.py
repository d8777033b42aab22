"""The tables of costs measure what they say."""

import jax.numpy as jnp
import numpy as np
import pytest

import numpyro_dppvi as dppvi
from benchmarks import cost, growth, peers
from benchmarks.cost import Built
from models.logistic_regression import logistic_regression


def test_a_line_is_what_was_run(monkeypatch):
    monkeypatch.setattr(cost, "rates", lambda: (1e9, 1e6))
    calls = []

    def start():
        calls.append("start")
        return lambda: calls.append("run")

    def other():
        calls.append("other")
        return lambda: jnp.sum(jnp.ones(1000))

    built = Built(start, units=2, flops=1e9, bytes=1e5, peers={"SVI": other})
    found = cost.measure(built, before=0, repeats=4)
    assert calls[:6] == ["start", *["run"] * 5]  # cold, four warm ones, and only then the peer
    assert calls.count("start") == calls.count("other") == 1
    assert len(found.warm) == len(found.ratios["SVI"]) == 4
    assert found.floor == 0.5  # a billion operations, at a billion a second, in two units
    assert found.memory > 0


def test_peers_that_are_not_installed_are_left_out(monkeypatch):
    monkeypatch.setattr(cost, "rates", lambda: (1e9, 1e6))
    monkeypatch.setattr(peers, "has_torch", lambda: False)
    absent = {name: lambda: pytest.fail("it was made") for name in ("torch.func", "Opacus")}
    assert not cost.measure(Built(lambda: lambda: None, peers=absent), 0, 2).ratios
    monkeypatch.setattr(cost, "WORKS", {})
    assert "left out: pip install numpyro-dppvi[peers]" in next(cost.lines())


def test_a_median_stands_before_its_quartiles():
    assert cost.spread([1.0, 2.0, 3.0, 4.0, 5.0]) == "3.00 (1.50 to 4.50)"


@pytest.mark.slow
def test_rounds_go_on_from_one_another():
    run = cost.rounds(logistic_regression, cost.made_up([8, 9], 2), dppvi.DPOptimization())
    first, second = run()[0], run()[0]
    assert not np.array_equal(first["w"].linear, second["w"].linear)


def test_by_hand_every_client_is_visited():
    X, y = np.ones((30, 2), np.float32), np.ones(30, np.float32)
    peers.by_hand(X, y, [10, 20], steps=2, prob=0.5)()


@pytest.mark.parametrize("kind", ["logistic", "network"])
def test_the_same_gradients_are_clipped_by_torch(kind):
    pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(12, 3)).astype(np.float32), np.ones(12, np.float32)
    assert np.all(np.isfinite(peers.torch_func(kind, X, y, 2)().numpy()))


@pytest.mark.parametrize("name", growth.SERIES)
def test_series_grow(name):
    sizes, _ = growth.SERIES[name]
    assert list(sizes) == sorted(set(sizes))
    assert len(sizes) >= 3
