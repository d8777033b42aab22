import math

import numpy as np
import pytest

from benchmarks.paper import draw, jobs, results, table, trade_off
from benchmarks.paper.results import Line
from benchmarks.paper.studies import STUDIES, Settings


def line(method="virtual", split="balanced", seed=0, number=1, accuracy=0.8, log_likelihood=-0.4):
    scores = (accuracy, log_likelihood)
    return Line("adult-10", method, split, seed, number, *scores, 1.0, 3.0, 2.5, "Settings()")


class TestResults:
    def test_lines_come_back(self, tmp_path):
        lines = [line(number=1), line(number=2, accuracy=0.81234)]
        results.append(tmp_path / "results.csv", lines[:1])
        results.append(tmp_path / "results.csv", lines[1:])
        assert results.read(tmp_path / "results.csv") == lines

    def test_without_a_file_there_is_nothing(self, tmp_path):
        assert results.read(tmp_path / "results.csv") == []

    def test_means_and_errors_are_over_seeds(self):
        values = [0.80, 0.82, 0.87]
        lines = [line(seed=s, number=2, accuracy=v) for s, v in enumerate(values)]
        lines += [line(seed=s, number=1) for s in range(3)]
        lines += [line(split="unbalanced 1", accuracy=0.1), line(method="local avg", accuracy=0.1)]
        curve = results.curve(lines, "adult-10", "virtual", "balanced")
        np.testing.assert_array_equal(curve.rounds, [1, 2])
        assert curve.seeds == 3
        assert curve.mean[1, 0] == pytest.approx(0.83)
        assert curve.error[1, 0] == pytest.approx(np.std(values, ddof=1) / math.sqrt(3))
        assert results.curve(lines, "adult-200", "virtual", "balanced") is None

    @pytest.mark.parametrize("figure", STUDIES)
    def test_every_method_has_the_papers_values(self, figure):
        for split in STUDIES[figure].splits:
            for settings in STUDIES[figure].settings:
                theirs = results.published(figure, settings.name, split)
                assert np.all(np.diff(theirs.rounds) > 0)
                assert np.isnan(theirs.mean[-1, 0]) or 0.6 < theirs.mean[-1, 0] < 0.9

    def test_published_values_are_the_papers(self):
        theirs = results.published("adult-10", "DP optimisation", "balanced")
        np.testing.assert_array_equal(theirs.rounds, range(1, 21))
        np.testing.assert_allclose(theirs.mean[-1], (0.8382, -0.3494))
        np.testing.assert_allclose(theirs.error[-1], (0.0019, 0.0026))


class TestJobs:
    @pytest.fixture
    def started(self, monkeypatch):
        """Jobs that would have been run."""
        todo = []
        monkeypatch.setattr(jobs, "_side_by_side", lambda left, *_: todo.extend(left))
        return todo

    def job(self, clip_norm=1.0):
        settings = Settings("virtual", "virtual", clip_norm=clip_norm)
        return jobs.Job("adult-10", "adult-10", 1.0, settings, "balanced", (0, 1, 2))

    def line(self, job, seed):
        return line(seed=seed)._replace(settings=str(job.settings))

    def test_runs_that_are_there_are_not_run_again(self, tmp_path, started):
        place = tmp_path / "results.csv"
        results.append(place, [self.line(self.job(), 1)])
        jobs.run([self.job()], place, 1)
        assert started == [self.job()._replace(seeds=(0, 2))]
        started.clear()
        results.append(place, [self.line(self.job(), seed) for seed in (0, 2)])
        jobs.run([self.job()], place, 1)
        assert not started

    def test_lines_of_other_settings_are_dropped(self, tmp_path, started):
        place = tmp_path / "results.csv"
        other = line()._replace(figure="bnn")
        results.append(place, [self.line(self.job(2.0), 0), other])
        jobs.run([self.job()], place, 1)
        assert results.read(place) == [other]
        assert started == [self.job()]

    def test_every_panel_of_every_figure_is_run(self):
        for figure, study in STUDIES.items():
            made = {(job.settings.name, job.split) for job in jobs.of_study(figure, 2)}
            assert len(made) == len(study.settings) * len(study.splits)
        assert len(list(trade_off.jobs(2))) == len(trade_off.SHARDS) * len(trade_off.VARIANTS)


class TestTable:
    def test_differences_are_in_standard_errors_of_the_difference(self):
        # The paper: .8402 (.0009), -.3526 (.0018).
        seeds = [(0.8412, -0.35), (0.8432, -0.34), (0.8422, -0.36)]
        lines = [
            line(seed=s, accuracy=a, log_likelihood=x, number=8) for s, (a, x) in enumerate(seeds)
        ]
        text = table.markdown("adult-10", lines)
        (row,) = [row for row in text.splitlines() if row.startswith("| virtual |")]
        error = 0.001 / math.sqrt(3)
        apart = (0.8422 - 0.8402) / math.hypot(error, 0.0009)
        assert row.startswith("| virtual | 8 (15) | .8422 (.0006) | .8402 (.0009) | ")
        assert f"| {apart:+.1f} | -.3500 (.0058) |" in row

    @pytest.mark.slow
    def test_orders_count_pairs_that_are_told_apart(self):
        """Local averaging below virtual clients, as in the paper; one pair within its errors."""
        seeds = {"virtual": (-0.35, -0.34), "local avg": (-0.40, -0.41)}
        seeds["BCM same"] = (-0.30, -0.50)
        lines = [
            line(method=method, seed=seed, log_likelihood=score)
            for method, scores in seeds.items()
            for seed, score in enumerate(scores)
        ]
        (row,) = table.orders("adult-10", lines).splitlines()[2:]
        assert row.startswith("| balanced | virtual > BCM same > local avg | global VI")
        assert row.endswith("| 0 | 0 |")
        lines = [
            line(method=method, seed=seed, log_likelihood=score)
            for method, score in (("virtual", -0.35), ("local avg", -0.40), ("BCM split", -0.36))
            for seed in range(2)
        ]
        (row,) = table.orders("adult-10", lines).splitlines()[2:]
        assert row.endswith("| 1 | 1 |")

    def test_a_page_gets_its_table(self):
        page = "a\n<!-- x: begins -->\nold\n<!-- x: ends -->\nb\n"
        wanted = "a\n<!-- x: begins -->\nnew\n<!-- x: ends -->\nb\n"
        assert table.between_marks(page, "x", "new") == wanted
        with pytest.raises(ValueError, match="has no place for 'y'"):
            table.between_marks(page, "y", "new")


# Of the benchmarks alone; no part of the library draws it.
@pytest.mark.slow
@pytest.mark.parametrize("figure", STUDIES)
def test_a_figure_is_drawn_from_any_results(tmp_path, figure):
    place = draw.draw(figure, [], tmp_path)
    assert place.stat().st_size > 10_000


class TestSettings:
    def test_shards_follow_the_clients_sizes_or_are_a_number(self):
        by_size = Settings("virtual", "virtual", shard_size=6).method([60, 3, 13])
        assert by_size.num_shards == (10, 1, 2)
        by_number = Settings("local avg", "averaging", num_shards=40).method([60, 3, 13])
        assert by_number.num_shards == (40, 3, 13)

    @pytest.mark.parametrize("figure", STUDIES)
    def test_no_method_takes_more_rounds_than_the_paper(self, figure):
        for settings in STUDIES[figure].settings:
            theirs = results.published(figure, settings.name, "balanced")
            if settings.kind not in ("same", "split"):  # one round, whatever is asked for
                assert settings.num_rounds <= theirs.rounds[-1]

    @pytest.mark.parametrize("figure", STUDIES)
    def test_settings_make_methods(self, figure):
        study = STUDIES[figure]
        for settings in study.settings:
            settings.method([100] * study.num_clients)
            assert settings.arguments()["num_rounds"] == settings.num_rounds
