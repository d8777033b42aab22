"""Tables in the place of arrays, and clients that have names."""

import json
import re

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import numpyro_dppvi as dppvi
from numpyro_dppvi import _validate
from numpyro_dppvi.analysis import plots
from numpyro_dppvi.run import Outcome, Status
from numpyro_dppvi.run.data import lay_out
from tests.dry import dry_rounds
from tests.grids import grid

pandas = pytest.importorskip("pandas")
KEY = jax.random.key(0)
BUDGET = dppvi.PrivacyBudget(epsilon=1.0, delta=1e-5)


def model(age, sex, y=None):
    effect = numpyro.sample("effect", dist.Normal(0, 1))
    with numpyro.plate("clients", 2):
        level = numpyro.sample("level", dist.Normal(0, 1))
    with numpyro.plate("patients", age.shape[0]):
        numpyro.sample("y", dist.Normal(effect * age + level[sex], 1), obs=y)


def matrix_model(X, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("patients", y.shape[0]):
        numpyro.sample("y", dist.Normal(X @ w, 1), obs=y)


def takes_anything(**data):
    del data


def table(num_rows, seed=0):
    generator = np.random.default_rng(seed)
    return pandas.DataFrame(
        {
            "patient": [f"patient {row}" for row in range(num_rows)],  # no argument of the model
            "y": generator.normal(size=num_rows),
            "age": generator.normal(size=num_rows),
            "sex": generator.integers(0, 2, num_rows),
        },
        index=generator.permutation(num_rows),
    )


def arrays(frame):
    return {name: frame[name].to_numpy() for name in ("age", "sex", "y")}


HELSINKI, TURKU = table(9, 1), table(6, 2)


def laid_out(data, clients=None, of=model, **constants):
    return lay_out(data, clients, KEY, of, constants)


def assert_same(found, expected):
    assert found.sizes == expected.sizes
    assert set(found.shards.records) == set(expected.shards.records)
    for name, leaf in expected.shards.records.items():
        np.testing.assert_array_equal(found.shards.records[name], leaf)


@pytest.mark.parametrize("clients", [None, 3, dppvi.Partition([[0, 3], [1]])])
def test_a_table_is_its_columns_by_name(clients):
    found, expected = laid_out(HELSINKI, clients), laid_out(arrays(HELSINKI), clients)
    assert_same(found, expected)
    assert found.names == ()


@pytest.mark.parametrize(
    "data",
    [
        [HELSINKI, TURKU],
        [HELSINKI, arrays(TURKU)],
        {"Helsinki": HELSINKI, "Turku": TURKU},
        {"Helsinki": arrays(HELSINKI), "Turku": TURKU},
        {2023: HELSINKI, 2024: TURKU},
    ],
)
def test_lists_and_mappings_of_tables_are_clients(data):
    found = laid_out(data)
    assert_same(found, laid_out([arrays(HELSINKI), arrays(TURKU)]))
    assert found.names == (tuple(map(str, data)) if isinstance(data, dict) else ())


def test_groups_of_a_table_are_clients_by_name():
    both = pandas.concat([TURKU.assign(city="Turku"), HELSINKI.assign(city="Helsinki")])
    found = laid_out(dict(iter(both.groupby("city"))))
    assert_same(found, laid_out([HELSINKI, TURKU]))
    assert found.names == ("Helsinki", "Turku")


def test_labels_that_are_texts_are_names():
    both = pandas.concat([HELSINKI, TURKU])
    cities = ["Helsinki"] * len(HELSINKI) + ["Turku"] * len(TURKU)
    found = laid_out(both, dppvi.Partition.from_labels(cities))
    assert_same(found, laid_out([HELSINKI, TURKU]))
    assert found.names == ("Helsinki", "Turku")
    assert dppvi.Partition.from_labels([1, 0, 1]).names == ()


def test_a_table_under_an_arguments_name_is_a_matrix():
    frame = HELSINKI[["age", "sex"]]
    rows = {"X": frame, "y": HELSINKI["y"]}
    expected = {"X": frame.to_numpy(), "y": HELSINKI["y"].to_numpy()}
    assert_same(laid_out(rows, of=matrix_model), laid_out(expected, of=matrix_model))
    as_client = laid_out({"Turku": rows, "Helsinki": rows}, of=matrix_model)
    assert as_client.sizes == (9, 9)
    # All values are tables, and all keys are arguments: one party's records.
    found = laid_out({"X": frame, "y": HELSINKI[["y"]]}, of=matrix_model)
    assert found.sizes == (9,)
    assert found.shards.records["y"].shape == (1, 9, 1)


@pytest.mark.parametrize("dtype", [bool, "boolean", "Int64"])
def test_a_matrix_may_have_columns_of_numbers_and_of_booleans(dtype):
    """Of which pandas makes an array of objects; ``get_dummies`` makes booleans."""
    mixed = HELSINKI[["age", "sex"]].assign(sex=HELSINKI["sex"].astype(dtype))
    found, expected = (
        laid_out({"X": X, "y": HELSINKI["y"]}, of=matrix_model)
        for X in (mixed, HELSINKI[["age", "sex"]])
    )
    assert_same(found, expected)
    told = _validate.host_array("X", mixed)  # as for predictions
    np.testing.assert_array_equal(told, HELSINKI[["age", "sex"]])


@pytest.mark.parametrize("entry", ["old", None])
def test_a_matrix_with_a_column_of_something_else_is_refused(entry):
    mixed = HELSINKI[["age"]].assign(flag=True, other=[entry] * 9)
    with pytest.raises(ValueError, match=r"data..X.. must hold numbers"):
        laid_out({"X": mixed, "y": HELSINKI["y"]}, of=matrix_model)


def test_a_model_that_takes_anything_gets_all_columns():
    found = laid_out(HELSINKI[["age", "y"]], of=takes_anything)
    assert set(found.shards.records) == {"age", "y"}
    named = laid_out({"age": HELSINKI[["age", "y"]]}, of=takes_anything)
    assert named.names == ("age",)


class Columns:
    """A table of another library: names in ``columns``, arrays by name."""

    columns = ("age", "sex", "y")

    def __len__(self):
        return len(HELSINKI)

    def __getitem__(self, name):
        return HELSINKI[name].tolist()


def test_tables_of_other_libraries_have_columns_too():
    assert_same(laid_out(Columns()), laid_out(HELSINKI))


class Query:
    """A query that has not run: it has columns and no rows yet, such as polars' LazyFrame."""

    columns = ("age", "sex", "y")

    def __getitem__(self, name):
        raise TypeError("not subscriptable")


@pytest.mark.parametrize("data", [HELSINKI.groupby("sex"), list(HELSINKI.groupby("sex")), Query()])
def test_what_has_columns_and_is_no_table_is_refused(data):
    with pytest.raises(TypeError, match=r"data must be a mapping .*, or dict\(iter\(groups\)\)"):
        laid_out(data)


@pytest.mark.parametrize("clients", ["sex", HELSINKI["sex"], 2.0])
def test_labels_that_are_no_partition_are_refused(clients):
    with pytest.raises(ValueError, match=r"clients must be .* or a Partition.*from_labels"):
        laid_out(HELSINKI, clients)


@pytest.mark.parametrize(
    ("data", "of", "words"),
    [
        (HELSINKI, matrix_model, "without 'X'.*write.*\"X\": table"),
        ({"Oulu": HELSINKI[["age", "y"]]}, model, "Oulu's data.*columns age, y, without 'sex'"),
        ([HELSINKI, HELSINKI[["sex"]]], model, "client 1's data.*without 'age'"),
        (pandas.concat([HELSINKI, HELSINKI[["age"]]], axis=1), model, "distinct.*'age'"),
        (HELSINKI.assign(age="old"), model, "data.'age'. must hold numbers"),
        (HELSINKI.assign(age=np.inf), model, "data.'age'. must hold finite numbers"),
        ({"Oulu": HELSINKI.assign(age=None)}, model, "Oulu's data.'age'. must hold numbers"),
        (HELSINKI[:0], model, "at least one record"),
        (HELSINKI.rename(columns=str.upper), model, "without 'age'"),
        (pandas.DataFrame([[1, 2]]), model, "columns without plain names, without 'age'"),
        ({"a": HELSINKI, "b": TURKU.assign(y=[[1, 2]] * 6)}, model, "b's data|numbers"),
        ({"\n": HELSINKI}, model, "name must be 1 to 60 printable"),
        ({"": HELSINKI}, model, "name must be 1 to 60 printable"),
        ({True: HELSINKI}, model, "name must be 1 to 60 printable"),
        ({"x" * 61: HELSINKI}, model, "name must be 1 to 60 printable"),
        (
            {"Oulu": HELSINKI, "y": HELSINKI["y"]},
            model,
            "got both: 'Oulu' is a .*'y' is neither",
        ),
        ({"y": {"a": HELSINKI["y"]}, "Oulu": HELSINKI["y"]}, model, "a model that nests them"),
        ({1: HELSINKI, "1": TURKU}, model, "distinct names, got '1' twice"),
    ],
)
def test_what_cannot_be_laid_out_is_refused_by_name(data, of, words):
    with pytest.raises(ValueError, match=words):
        laid_out(data, of=of)


def test_named_clients_are_not_split_again():
    with pytest.raises(ValueError, match="clients must not be given"):
        laid_out({"Helsinki": HELSINKI}, 2)


def test_names_need_not_be_of_one_type():
    """JAX sorts keys, and cannot sort these."""
    with pytest.raises(TypeError, match="rng_key"):
        dppvi.fit(model, None, {1: HELSINKI, "Turku": TURKU})


def test_a_public_argument_need_not_be_a_column():
    assert laid_out(HELSINKI[["age", "y"]], sex=np.zeros(9, int)).sizes == (9,)


def test_a_partition_has_a_name_for_each_client_or_none():
    with pytest.raises(ValueError, match="one name per client, got 1 names for 2"):
        dppvi.Partition([[0], [1]], names=["Oulu"])


@pytest.fixture(scope="module")
def result():
    data = {"Helsinki": HELSINKI, "Turku": TURKU}
    method = dppvi.DPOptimization(num_local_steps=1)
    with dry_rounds():
        return dppvi.fit(
            model, None, data, rng_key=KEY, method=method, budget=BUDGET, num_rounds=2,
            insecure_noise_seed=1, progress_bar=False,
        )  # fmt: skip


@pytest.mark.slow
def test_plan_and_statement_call_clients_by_name(result):
    assert result.client_names == ("Helsinki", "Turku")
    for text in (str(result.plan), str(result.privacy_statement())):
        lines = text.splitlines()
        for row in (r"  Helsinki +9 ", r"  Turku +6 "):
            assert sum(re.match(row, line) is not None for line in lines) == 1
        assert "all other records of Helsinki" in " ".join(text.split())
    assert "| Helsinki | 9 |" in result.privacy_statement().to_markdown()
    clients = json.loads(result.privacy_statement().to_json())["clients"]
    assert [client["name"] for client in clients] == ["Helsinki", "Turku"]


@pytest.mark.slow
def test_a_plan_made_beforehand_is_the_fits(result):
    method = dppvi.DPOptimization(num_local_steps=1)
    sizes = {"Helsinki": 9, "Turku": 6}
    plan = dppvi.plan_privacy(method, BUDGET, num_rounds=2, client_sizes=sizes, num_latents=3)
    assert str(plan) == str(result.plan)
    unnamed = dppvi.plan_privacy(method, BUDGET, num_rounds=2, client_sizes=[9, 6])
    assert plan == unnamed == result.plan


ONE, TWO = dppvi.PrivacyBudget(1.0), dppvi.PrivacyBudget(2.0)


@pytest.mark.slow
def test_budgets_by_name_need_not_be_in_the_clients_order(result):
    method = dppvi.DPOptimization(num_local_steps=1)
    sizes = {"Helsinki": 9, "Turku": 6}
    of = {"num_rounds": 2, "client_sizes": sizes}
    plan = dppvi.plan_privacy(method, {"Turku": TWO, "Helsinki": ONE}, **of)
    assert [client.budget for client in plan.clients] == [ONE, TWO]
    found = dppvi.recommend(model, HELSINKI, sizes, {"Turku": TWO, "Helsinki": ONE})
    same = dppvi.recommend(model, HELSINKI, [9, 6], [ONE, TWO])
    assert found.worth.together == same.worth.together
    data = {"Helsinki": HELSINKI, "Turku": TURKU}
    scored = dppvi.score(
        result.posterior, data, budget={"Turku": TWO, "Helsinki": ONE}, rng_key=KEY,
        score_range=(-6.0, 0.0), num_samples=2,
    )  # fmt: skip
    assert [client.budget for client in scored.plan.clients] == [ONE, TWO]


@grid("method", [None, dppvi.DPOptimization(num_local_steps=1)], quick=[1])
def test_a_fit_takes_budgets_by_name(method):
    data = {2024: HELSINKI, 2025: TURKU}
    budgets = {2025: TWO, 2024: ONE}
    with dry_rounds():
        run = dppvi.fit(
            model, None, data, rng_key=KEY, method=method, budget=budgets, num_rounds=2
        )  # fmt: skip
    assert [client.budget for client in run.plan.clients] == [ONE, TWO]
    np.testing.assert_allclose(run.ledger.spent(), [1.0, 2.0], rtol=1e-3)


@pytest.mark.parametrize(
    ("budget", "sizes", "words"),
    [
        ({"Helsinki": ONE}, {"Helsinki": 9, "Turku": 6}, "got none for 'Turku': the clients are"),
        (
            {"Helsinki": ONE, "Turku": ONE, "Oulu": ONE},
            {"Helsinki": 9, "Turku": 6},
            "got one for 'Oulu', which is not a client: the clients are Helsinki, Turku",
        ),
        ({"Helsinki": ONE}, [9], "a list where clients have no names.*'Helsinki'"),
        ({}, {"Helsinki": 9}, "got none for 'Helsinki'"),
    ],
)
def test_budgets_of_others_are_refused(budget, sizes, words):
    with pytest.raises(ValueError, match=words):
        dppvi.plan_privacy(dppvi.DPOptimization(), budget, num_rounds=1, client_sizes=sizes)


def test_a_recommendation_calls_clients_by_name():
    found = dppvi.recommend(model, TURKU, {"Oulu": 100, "Turku": 10**6}, ONE)
    assert "joining cannot pay for Turku: alone" in str(found)


@pytest.mark.parametrize("several", [{"Oulu": HELSINKI, "Turku": TURKU}, [HELSINKI, TURKU]])
def test_a_recommendation_may_be_asked_for_with_what_is_fitted(several):
    found = (dppvi.recommend(model, each, [10**4, 10**4], ONE) for each in (several, HELSINKI))
    assert len(set(map(str, found))) == 1


def test_equal_clients_share_a_line_with_their_names():
    sizes = {f"city {number}": 100 for number in range(5)}
    plan = dppvi.plan_privacy(dppvi.DPOptimization(), BUDGET, num_rounds=2, client_sizes=sizes)
    assert "\n  city 0, city 1, city 2 and 2 more  100 " in str(plan)
    statement = dppvi.privacy.PrivacyStatement(
        "DPOptimization", plan, plan.ledger(), insecure_seed=False
    )
    line = next(line for line in str(statement).splitlines() if "city 0, city" in line)
    header = next(line for line in str(statement).splitlines() if "epsilon spent" in line)
    assert line.index(" 100 ") + 4 == header.index(" records") + len(" records")


def test_the_ledger_calls_clients_by_name(result):
    entry = result.ledger.entries[-1]
    with pytest.raises(dppvi.BudgetExceededError, match="Turku's budget is used up"):
        result.ledger.charge([entry] * 100)


def test_a_ledger_file_calls_clients_by_name(tmp_path):
    file = tmp_path / "ledger.jsonl"
    method = dppvi.methods.ParameterPerturbation(num_local_steps=1)
    data = {"Helsinki": HELSINKI, "Turku": TURKU}
    options = {"rng_key": KEY, "method": method, "budget": BUDGET, "ledger_file": file}
    with dry_rounds():
        dppvi.fit(model, None, data, num_rounds=1, **options)
    with pytest.raises(dppvi.BudgetExceededError, match="Helsinki's budget is used up: other"):
        dppvi.fit(model, None, data, num_rounds=1, **options)
    with pytest.raises(ValueError, match="client 0 under the name 'Helsinki', got 'Turku'"):
        dppvi.fit(model, None, dict(reversed(data.items())), num_rounds=1, **options)


@pytest.mark.slow
def test_plan_and_statement_of_a_ledger_file_call_clients_by_name(tmp_path):
    """Although the second run knows no names."""
    file = tmp_path / "ledger.jsonl"
    method = dppvi.methods.ParameterPerturbation(num_local_steps=1)
    options = {"rng_key": KEY, "method": method, "ledger_file": file, "num_rounds": 1}
    with dry_rounds():
        dppvi.fit(model, None, {"Helsinki": HELSINKI, "Turku": TURKU}, budget=BUDGET, **options)
        more = dppvi.PrivacyBudget(2 * BUDGET.epsilon, BUDGET.delta)
        result = dppvi.fit(model, None, [HELSINKI, TURKU], budget=more, **options)
    for said in (result.plan, result.privacy_statement()):
        assert "Helsinki" in str(said)
    plan = dppvi.plan_privacy(
        method,
        dppvi.PrivacyBudget(4 * BUDGET.epsilon, BUDGET.delta),
        num_rounds=1,
        client_sizes=[len(HELSINKI), len(TURKU)],
        ledger_file=dppvi.privacy.LedgerFile(file),
    )
    assert plan.names == ("Helsinki", "Turku")
    statement = dppvi.privacy.PrivacyStatement("x", plan, result.ledger, insecure_seed=False)
    assert [row["name"] for row in statement.as_dict()["clients"]] == ["Helsinki", "Turku"]


@pytest.mark.slow
def test_a_checkpoint_is_of_these_clients_in_this_order(tmp_path):
    options = {"rng_key": KEY, "method": dppvi.NonPrivate(num_local_steps=1), "num_rounds": 1}
    options["checkpoint"] = tmp_path / "run.npz"
    data = {"Helsinki": HELSINKI[:6], "Turku": TURKU}
    with dry_rounds():
        first, again = (dppvi.fit(model, None, data, **options) for _ in range(2))
    assert again.client_names == first.client_names == ("Helsinki", "Turku")
    with pytest.raises(ValueError, match="another list of clients: it has Helsinki, Turku"):
        dppvi.fit(model, None, dict(reversed(data.items())), **options)


@pytest.mark.slow
def test_diagnostics_and_plots_call_clients_by_name(result):
    found = dppvi.diagnose(result, num_replays=2)
    assert found.contributors == ("prior", "Helsinki", "Turku")
    assert "Helsinki" in str(found)
    bars = plots.clients(result, found).axes[0]
    assert [text.get_text() for text in bars.get_yticklabels()] == ["prior", "Helsinki", "Turku"]
    labels = [line.get_label() for line in plots.privacy(result, found).axes[0].lines]
    assert "Helsinki, Turku" in labels


def test_a_client_may_be_called_prior():
    found = dppvi.analysis.Diagnostics(
        status=Status(Outcome.COMPLETED, 1, 1, 0, 0, 0, True),
        movement=np.ones(1), residual=np.ones(1), noise_residual=None, sharpness=None,
        contributors=("prior", "prior", "Turku"),
        share={"w": np.array([[0.5], [0.2], [0.3]])}, noise={},
    )  # fmt: skip
    assert "prior 50%, Turku 30%, prior 20%" in str(found)


@pytest.mark.slow
def test_exports_label_a_plate_of_clients(result, tmp_path):
    path = tmp_path / "posterior.zip"
    result.posterior.save(path)
    for posterior in (result.posterior, dppvi.load(path, model)):
        group = posterior.to_arviz(num_samples=3)["posterior"]
        assert group["level"].dims == ("chain", "draw", "clients")
        assert group["clients"].values.tolist() == ["Helsinki", "Turku"]
    other = result.posterior.to_arviz(num_samples=3, coords={"clients": ["a", "b"]})
    assert other["posterior"]["clients"].values.tolist() == ["a", "b"]
    renamed = result.posterior.to_arviz(num_samples=3, dims={"level": ["sex"]})
    assert renamed["posterior"]["sex"].values.tolist() == [0, 1]


def test_new_records_may_be_a_table(result):
    """With more columns than the model asks for; predictions take columns by name."""
    given = [TURKU, {name: TURKU[name] for name in ("age", "sex", "y")}]
    first, second = (result.posterior.to_arviz(num_samples=3, public_data=each) for each in given)
    np.testing.assert_array_equal(
        first["posterior_predictive"]["y"], second["posterior_predictive"]["y"]
    )
    np.testing.assert_allclose(first["constant_data"]["age"], TURKU["age"], rtol=1e-6)
    with pytest.raises(
        TypeError, match=r"num_samples .*got a DataFrame: write predictive\(key, \*\*table"
    ):
        result.posterior.predictive(KEY, TURKU)
    found = result.posterior.predictive(KEY, 3, **TURKU[["age", "sex"]])
    assert found["y"].shape == (3, 6)


@pytest.mark.slow
def test_files_from_elsewhere_may_hold_any_attributes(result):
    posterior = result.posterior
    for text in ("[", "7", '{"a": 1}', "[1, 2]", '["one"]'):
        posterior.attrs["clients"], kept = text, posterior.attrs["clients"]
        try:
            group = posterior.to_arviz(num_samples=3)["posterior"]
        finally:
            posterior.attrs["clients"] = kept
        assert group["clients"].values.tolist() == [0, 1]


@pytest.mark.slow
def test_compare_calls_clients_by_name(result):
    data = {"Helsinki": HELSINKI, "Turku": TURKU}
    found = dppvi.compare(result, data, rng_key=KEY, num_warmup=1, num_samples=2)
    assert "nonprivate_Turku" in found.mean


@pytest.mark.slow
def test_scores_call_clients_by_name(result, tmp_path):
    held_back = {"Helsinki": table(40, 3), "Turku": table(30, 4)}
    options = {"budget": BUDGET, "rng_key": KEY, "score_range": (-6.0, 0.0), "num_samples": 2}
    file = tmp_path / "ledger.jsonl"
    found = dppvi.score(result.posterior, held_back, ledger_file=file, **options)
    assert found.plan.names == ("Helsinki", "Turku")
    assert "for one record of Helsinki, the most of all" in str(found)
    with pytest.raises(dppvi.BudgetExceededError, match="Helsinki's budget is used up"):
        dppvi.score(result.posterior, held_back, ledger_file=file, **options)


def by_matrix(X, y=None):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Normal(X @ w, 1.0), obs=y)


def matrix(part, *columns):
    return {"X": part[list(columns)], "y": part["y"]}


def test_columns_of_a_matrix_label_what_the_user_says_is_one_a_column(tmp_path):
    data = {"Helsinki": matrix(HELSINKI, "age", "sex"), "Turku": matrix(TURKU, "age", "sex")}
    method = dppvi.NonPrivate(num_local_steps=1)
    with dry_rounds():
        run = dppvi.fit(by_matrix, None, data, rng_key=KEY, method=method, num_rounds=1)
    assert run.columns == {"X": ("age", "sex")}
    path = tmp_path / "posterior.zip"
    run.posterior.save(path)
    for posterior in (run.posterior, dppvi.load(path, by_matrix)):
        group = posterior.to_arviz(num_samples=3, dims={"w": ["X"]})["posterior"]
        assert group["w"].dims == ("chain", "draw", "X")
        assert group["X"].values.tolist() == ["age", "sex"]
        unnamed = posterior.to_arviz(num_samples=3)["posterior"]
        assert unnamed["w_dim_0"].values.tolist() == [0, 1]
    own = run.posterior.to_arviz(num_samples=3, dims={"w": ["X"]}, coords={"X": ["a", "b"]})
    assert own["posterior"]["X"].values.tolist() == ["a", "b"]


def test_columns_in_another_order_are_refused():
    data = {"Helsinki": matrix(HELSINKI, "age", "sex"), "Turku": matrix(TURKU, "sex", "age")}
    words = "columns of 'X' must be the same.*got sex, age from Turku and age, sex from Helsinki"
    with pytest.raises(ValueError, match=words):
        laid_out(data, of=by_matrix)


def test_columns_whose_rows_have_other_labels_are_refused():
    """Arrays have no labels: x of one person would stand beside y of another."""
    frame = table(9)
    good = {"age": frame["age"], "sex": frame["sex"], "y": frame["y"]}
    for wrong in (frame["y"].iloc[::-1], frame["y"].reset_index(drop=True)):
        for data in ({**good, "y": wrong}, [good, {**good, "y": wrong}]):
            with pytest.raises(ValueError, match=r"one order, got other ones for 'y'") as caught:
                laid_out(data)
            assert "write y.loc[age.index] to align them, or .to_numpy()" in str(caught.value)
        laid_out({**good, "y": wrong.loc[frame.index]})
        laid_out({**good, "y": wrong.to_numpy()})
    laid_out({"Helsinki": good, "Turku": arrays(TURKU)})
