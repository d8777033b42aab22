"""What notebooks show: the same numbers as the texts, escaped, and without a colour of its own."""

import html.parser

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import numpyro_dppvi as dppvi
from numpyro_dppvi.run import Outcome, Status
from tests.dry import dry_rounds
from tests.grids import grid

EVIL = '<script>alert("1")</script> & co'


class Reader(html.parser.HTMLParser):
    """Collects texts, and complains of tags that do not close."""

    def __init__(self, text):
        super().__init__()
        self.open, self.texts, self.tags = [], [], set()
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        # Where things are, and no colour or font: the notebook has its own, in dark mode too.
        for name, value in attrs:
            assert name == "style"
            for each in value.split(";"):
                assert each.split(":")[0] in {"text-align", "padding", "white-space", "overflow-x"}
        self.open.append(tag)
        self.tags.add(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def named(latent):
    """A model with a latent of this name."""

    def model(y):
        mean = numpyro.sample(latent, dist.Normal(0, 1).expand([50]).to_event(1))
        with numpyro.plate("records", y.shape[0]):
            numpyro.sample("y", dist.Normal(mean[0], 1), obs=y)

    return model


@pytest.fixture(scope="module")
def result():
    data = {EVIL: {"y": np.zeros(20)}, "Turku": {"y": np.ones(30)}}
    with dry_rounds():
        return dppvi.fit(
            named("<b>"), None, data, rng_key=jax.random.key(0), num_rounds=1, progress_bar=False,
            method=dppvi.DPOptimization(num_local_steps=1), budget=dppvi.PrivacyBudget(1.0),
            insecure_noise_seed=1,
        )  # fmt: skip


KINDS = {
    "result": lambda result: result,
    "posterior": lambda result: result.posterior,
    "plan": lambda result: result.plan,
    "statement": lambda result: result.privacy_statement(),
    "diagnostics": lambda result: dppvi.diagnose(result, num_replays=2),
}


@grid("kind", KINDS, quick=[2, 3])
def test_is_plain_and_well_formed_and_escapes_what_it_shows(result, kind):
    found = Reader(KINDS[kind](result)._repr_html_())
    assert found.tags <= {"p", "strong", "div", "table", "thead", "tbody", "tr", "th", "td"} | {
        "ul", "li", "details", "summary",
    }  # fmt: skip
    joined = " ".join(found.texts)
    assert (EVIL in joined) == (kind != "posterior")
    assert ("<b>[0]" in joined) == (kind in ("result", "posterior"))


@grid("kind", ["plan", "statement", "diagnostics"], quick=[0, 1])
def test_says_what_the_text_says(result, kind):
    """In the same order, but for how it is laid out."""

    def squeezed(text):
        return "".join(text.replace(" - ", "").replace("Not covered:", "Not covered").split())

    shown = KINDS[kind](result)
    found = squeezed("".join(Reader(shown._repr_html_()).texts))
    assert found == squeezed(str(shown)).replace("\n", "")


def test_a_posterior_shows_its_summary(result):
    cells = Reader(result.posterior._repr_html_()).texts
    for line in result.posterior.summary().splitlines()[1:40]:
        assert set(line.split()) <= set(cells)
    assert "... and 10 more entries" in cells


def test_a_result_shows_how_it_ended_and_what_it_cost(result):
    texts = Reader(result._repr_html_()).texts
    assert str(result.status) in texts
    assert any(
        text.startswith("DPOptimization, epsilon = 1.0000 at delta = 1e-05") for text in texts
    )
    assert "Not covered" in texts


def test_without_privacy_it_says_so():
    data = {"y": np.zeros(20)}
    method = dppvi.NonPrivate(num_local_steps=1)
    key = jax.random.key(0)
    with dry_rounds():
        result = dppvi.fit(named("mean"), None, data, rng_key=key, method=method, num_rounds=1)
    texts = Reader(result._repr_html_()).texts
    assert "NonPrivate, no differential privacy" in texts
    assert any("this run gives no differential privacy" in text for text in texts)


def test_a_posterior_prints_its_summary(result):
    assert str(result.posterior) == result.posterior.summary()


def recommended():
    sizes, records = {EVIL: 900, "Turku": 600}, {"y": np.zeros(9)}
    return dppvi.recommend(named("x"), records, sizes, dppvi.PrivacyBudget(1.0))


def compared():
    each = {name: {"x": np.ones(2)} for name in (EVIL, "nonprivate_pooled_nuts")}
    return dppvi.analysis.Comparison(each, each)


def ended():
    return Status(Outcome.COMPLETED, 1, 1, 0, 0, 0, True)


@pytest.mark.parametrize("shown", [recommended, compared, ended])
def test_a_cell_shows_what_print_shows(shown):
    found = Reader(shown()._repr_html_())
    assert found.tags <= {"p", "strong", "div", "table", "thead", "tbody", "tr", "th", "td"} | {
        "ul", "li",
    }  # fmt: skip
    printed = str(shown()).replace("   (pooled NUTS: 0 sd, 1)", "")
    assert "".join("".join(found.texts).split()) == "".join(printed.split())


def test_in_a_terminal_they_take_a_line(result):
    assert repr(result.posterior) == "<Posterior of <b> (50,)>"
    assert repr(result) == f"<FitResult of DPOptimization, 2 clients: {result.status}>"
