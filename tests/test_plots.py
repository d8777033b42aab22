"""Pictures show the numbers they are made of, in words that are there, and can be drawn."""

import dataclasses
import io

import jax
import matplotlib as mpl
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from matplotlib.figure import Figure

import numpyro_dppvi as dppvi
from numpyro_dppvi.analysis import plots
from numpyro_dppvi.run import Outcome, Status
from tests.dry import dry_rounds

mpl.use("Agg")

SIZES = (10, 20, 30)
NUM_ROUNDS = 4


def means(y):
    mu = numpyro.sample("mu", dist.Normal(0, 2).expand([2]).to_event(1))
    with numpyro.plate("records", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu, 1.5).to_event(1), obs=y)


def run(**changes):
    generator = np.random.default_rng(0)
    arguments = {
        "method": dppvi.DPOptimization(num_local_steps=1),
        "budget": [dppvi.PrivacyBudget(epsilon) for epsilon in (1.0, 2.0, 2.0)],
        "num_rounds": NUM_ROUNDS,
        "insecure_noise_seed": 1,
        **changes,
    }
    data = [{"y": generator.normal(size=(size, 2))} for size in SIZES]
    return dppvi.fit(means, None, data, rng_key=jax.random.key(0), progress_bar=False, **arguments)


@pytest.fixture(scope="module")
def result():
    with dry_rounds():
        return run()


def diagnostics(num_clients=3, noise=(0.5, 2.5)):
    share = np.linspace(-0.1, 1, 2 * (num_clients + 1)).reshape(num_clients + 1, 2)
    return dppvi.analysis.Diagnostics(
        status=Status(Outcome.COMPLETED, NUM_ROUNDS, NUM_ROUNDS, 0, 0, 0, True),
        movement=np.ones(NUM_ROUNDS),
        residual=np.ones(NUM_ROUNDS),
        noise_residual=1.0,
        sharpness=1.0,
        contributors=("prior", *(f"client {m}" for m in range(num_clients))),
        share={"mu": share},
        noise={"mu": np.array(noise)},
    )


def drawn(figure):
    """The figure's size on paper, after it was drawn: warnings are errors here."""
    file = io.BytesIO()
    figure.savefig(file, dpi=50)
    assert file.tell() > 1000
    return figure


def words(figure):
    return " | ".join(text.get_text() for text in figure.findobj(mpl.text.Text))


@pytest.mark.slow
def test_convergence_follows_movement_and_the_largest_parameters(result):
    figure = drawn(plots.convergence(result))
    assert [axis.get_title() for axis in figure.axes] == [
        "largest parameters",
        "movement of the posterior",
    ]
    movement = figure.axes[1].lines[0]
    np.testing.assert_array_equal(movement.get_ydata(), result.history.movement)
    np.testing.assert_array_equal(movement.get_xdata(), [1, 2, 3, 4])
    ends = sorted(line.get_ydata()[-1] for line in figure.axes[0].lines[:2])
    np.testing.assert_allclose(ends, sorted(result.posterior.mean["mu"]), rtol=1e-5)
    assert "mu[0]" in words(figure)
    assert "merge rejected" not in words(figure)


@pytest.mark.slow
def test_convergence_draws_scores_and_what_to_hold_them_against(result):
    figure = drawn(
        plots.convergence(result, {"accuracy": [0.1, 0.2, 0.3, 0.4]}, {"accuracy": {"best": 0.5}})
    )
    assert [axis.get_title() for axis in figure.axes] == ["accuracy", "movement of the posterior"]
    assert figure.axes[0].lines[0].get_ydata().tolist() == [0.1, 0.2, 0.3, 0.4]
    assert figure.axes[0].lines[1].get_ydata()[0] == 0.5
    assert "best" in words(figure)


def test_rounds_in_which_something_was_refused_are_marked(result):
    history = result.history._replace(rejected=np.array([0, 2, 0, 0]))
    figure = drawn(plots.convergence(dataclasses.replace(result, history=history)))
    assert "merge rejected or failed" in words(figure)
    assert figure.axes[1].lines[1].get_xdata().tolist() == [2]


def test_movement_over_orders_of_magnitude_is_on_a_logarithmic_scale(result):
    history = result.history._replace(movement=np.array([100.0, 10.0, 1.0, 0.1]))
    figure = drawn(plots.convergence(dataclasses.replace(result, history=history)))
    assert figure.axes[1].get_yscale() == "log"


@pytest.mark.slow
def test_privacy_draws_epsilon_after_every_round_and_the_budgets(result):
    figure = drawn(plots.privacy(result, diagnostics()))
    lines = {line.get_label(): line for line in figure.axes[0].lines}
    assert lines["client 0"].get_ydata()[[0, -1]] == pytest.approx([0, 1], rel=5e-3)
    assert lines["clients 1–2"].get_ydata()[-1] == pytest.approx(2, rel=5e-3)
    assert lines["clients 1–2"].get_xdata().tolist() == [0, 1, 2, 3, 4]
    assert np.all(np.diff(lines["client 0"].get_ydata()) > 0)
    assert "budget 1" in words(figure)
    assert "budget 2" in words(figure)
    assert "1 mostly noise" in words(figure)
    assert "mu[1]" in words(figure)


@pytest.mark.slow
def test_what_other_runs_have_spent_is_there_from_the_start(result):
    """Runs on the same records may share a ledger."""
    theirs = dppvi.privacy.Entry(99, 0, result.plan.clients[0].mechanism.dp_event, 2)
    ledger = dataclasses.replace(result.ledger, entries=(theirs, *result.ledger.entries))
    shared = dataclasses.replace(result, state=result.state._replace(ledger=ledger))
    figure = drawn(plots.privacy(shared, diagnostics()))
    lines = {line.get_label(): line.get_ydata() for line in figure.axes[0].lines}
    spent = ledger.spent()
    assert lines["client 0"][-1] == pytest.approx(spent[0])
    assert lines["client 0"][0] > 0 == lines["clients 1–2"][0]
    assert lines["clients 1–2"][-1] == pytest.approx(spent[1])


def test_many_kinds_of_clients_are_drawn_as_shares_of_their_budgets(monkeypatch):
    monkeypatch.setattr(plots, "_KINDS", 2)
    budget = [dppvi.PrivacyBudget(epsilon) for epsilon in (1.0, 2.0, 3.0)]
    with dry_rounds():
        result = run(budget=budget, schedule=dppvi.Asynchronous((1.0, 1.5, 2.5)), num_rounds=3)
    axis = drawn(plots.privacy(result, diagnostics())).axes[0]
    assert axis.get_title() == "spent so far, client by client"
    assert [line.get_ydata()[-1] for line in axis.lines[:3]] == pytest.approx([1] * 3, rel=5e-3)


def test_without_noise_in_parameters_there_is_one_panel(result):
    figure = drawn(plots.privacy(result, dataclasses.replace(diagnostics(), noise={})))
    assert len(figure.axes) == 1


def test_without_privacy_there_is_nothing_to_draw():
    with dry_rounds():
        result = run(method=dppvi.NonPrivate(num_local_steps=1), budget=None)
    with pytest.raises(
        ValueError, match=r"must be a private fit.*write plots\.convergence\(result\)"
    ):
        plots.privacy(result)


def test_clients_are_bars_beside_their_share_of_the_records(result):
    found = diagnostics()
    axis = drawn(plots.clients(result, found)).axes[0]
    bars = [bar.get_width() for bar in axis.patches]
    np.testing.assert_allclose(bars, found.share["mu"].mean(axis=1))
    np.testing.assert_allclose(axis.lines[0].get_xdata(), np.array(SIZES) / sum(SIZES))
    assert [text.get_text() for text in axis.get_yticklabels()] == list(found.contributors)


@pytest.mark.parametrize("equal", [True, False])
def test_many_clients_are_points(result, equal):
    sizes = (10,) * 40 if equal else tuple(range(1, 41))
    found = diagnostics(num_clients=40)
    axis = drawn(plots.clients(dataclasses.replace(result, client_sizes=sizes), found)).axes[0]
    points = axis.lines[0]
    assert len(points.get_xdata()) == 40
    np.testing.assert_allclose(np.sort(points.get_ydata()), found.share["mu"].mean(axis=1)[1:])


def test_one_factor_for_all_clients_is_one_bar(result):
    found = dataclasses.replace(diagnostics(num_clients=1), contributors=("prior", "all clients"))
    axis = drawn(plots.clients(result, found)).axes[0]
    assert axis.lines[0].get_xdata().tolist() == [1]


def test_without_factors_there_are_no_clients_to_draw(result):
    with pytest.raises(ValueError, match="must have clients' factors"):
        plots.clients(result, dataclasses.replace(diagnostics(), share={}))


def test_diagnostics_are_computed_where_they_are_not_given(result, monkeypatch):
    monkeypatch.setattr(plots, "diagnose", lambda _: diagnostics())
    assert len(plots.privacy(result).axes) == 2
    assert len(plots.clients(result).axes) == 1


PLOTS = {
    "convergence": (2, lambda result, ax: plots.convergence(result, ax=ax)),
    "scores": (3, lambda result, ax: plots.convergence(result, {"a": [1.0], "b": [2.0]}, ax=ax)),
    "privacy": (2, lambda result, ax: plots.privacy(result, diagnostics(), ax=ax)),
    "clients": (1, lambda result, ax: plots.clients(result, diagnostics(), ax=ax)),
}


def told(axis):
    """What an axis shows, in words and numbers."""
    lines = [line.get_xydata().tolist() for line in axis.lines]
    return axis.get_title(), axis.get_xlabel(), axis.get_ylabel(), lines


@pytest.mark.parametrize("name", PLOTS)
def test_axes_of_ones_own_get_the_same_picture(result, name):
    number, plot = PLOTS[name]
    figure = Figure()
    axes = figure.subplots(1, number)
    assert plot(result, axes) is axes
    drawn(figure)
    expected = plot(result, None).axes
    assert [told(axis) for axis in np.ravel(axes)] == [told(axis) for axis in expected]
    assert ("of the records" in words(figure)) == (name == "clients")


def test_many_clients_are_drawn_on_axes_of_ones_own(result):
    figure = Figure()
    many = dataclasses.replace(result, client_sizes=(10,) * 40)
    plots.clients(many, diagnostics(num_clients=40), ax=figure.subplots())
    assert len(figure.axes[0].lines[0].get_xdata()) == 40


@pytest.mark.parametrize("name", PLOTS)
@pytest.mark.parametrize("ax", ["ax", 3, [], [1, 2], np.ones(2), Figure(), None])
def test_what_is_no_axes_is_refused(result, name, ax):
    number, plot = PLOTS[name]
    if ax is None:
        ax = Figure().subplots(1, number + 1)
    with pytest.raises(TypeError, match=rf"ax must be the axes of {number} panel.*subplots"):
        plot(result, ax)


def test_completion_offers_plots_alone():
    assert dir(plots) == ["clients", "convergence", "privacy"]


def test_notebooks_show_figures(result):
    """Also where pyplot was never imported, which is what registers matplotlib's own."""
    picture = plots.convergence(result)._repr_png_()
    assert picture.startswith(b"\x89PNG")
    assert isinstance(plots.convergence(result), Figure)
