"""Copula, marginals and joint histogram: what may be asked for, and what is released of a frame."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from e2e.helpers import categorical, continuous, discrete, schema_of
from mechanisms.fitting import KEY, fit_frame, records_of

from dpdask.codec import codec_for
from dpdask.documents import validate
from dpdask.errors import DataError, InputError, SpecError
from dpdask.mechanisms.card import make_card
from dpdask.mechanisms.copula.spec import CopulaSpec
from dpdask.mechanisms.histogram.spec import HistogramSpec
from dpdask.mechanisms.marginals.spec import MarginalsSpec
from dpdask.mechanisms.mechanism import Columns
from dpdask.mechanisms.registry import bind
from dpdask.privacy import Budget
from dpdask.privacy.events import leaves

COLUMNS = {
    "sex": categorical(["f", "m"]),
    "age": discrete([20, 30, 40], nulls="level"),
    "income": continuous([0, 100]),
    "name": {"role": "drop"},
}
TYPES = {"sex": pa.string(), "age": pa.int64()}
CLIQUES = [["sex"], ["income", "age"], ["age", "sex", "income"]]
NOBODY = Columns(types=None, codecs={})
SPECS = {"copula": CopulaSpec, "marginals": MarginalsSpec, "histogram": HistogramSpec}
each_kind = pytest.mark.parametrize("kind", SPECS)


def schema(**changes):
    columns = COLUMNS | changes
    return schema_of({name: each for name, each in columns.items() if each})


def columns_of(declared):
    types = pa.schema([(name, TYPES.get(name, pa.float64())) for name in declared.privatised])
    codecs = {
        name: codec_for(name, declared.columns[name], types.field(name).type)
        for name in types.names
    }
    return Columns(types=types, codecs=codecs)


def mechanism(kind, *, columns=None, **given):
    """Return a mechanism; `epsilon`, `delta` and `adjacency` are the budget's, the rest the spec's."""
    terms = {key: given.pop(key) for key in ("delta", "adjacency") if key in given}
    budget = Budget(epsilon=given.pop("epsilon", 2.0), **terms)
    if kind == "marginals":
        given.setdefault("cliques", CLIQUES)
    return bind(validate(SPECS[kind], given, "job"), columns or schema(), budget)


def table(n=400):
    rng = np.random.default_rng(1)
    age = pd.array(rng.choice([20, 30, 40], n), dtype="Int64")
    age[: n // 4] = pd.NA
    sex, income = rng.choice(["f", "m"], n, p=[0.75, 0.25]), rng.uniform(0, 100, n)
    return pd.DataFrame({"sex": sex, "age": age, "income": income, "name": "x"})


CELLS = "a number of cells is a whole number from 1 to"
WRONG = [
    ("copula", {"bins": "x"}, "a number of cells"),
    ("copula", {"bins": 0}, CELLS),
    ("copula", {"bins": {"income": [1.0, "2"]}}, "first value of each cell"),
    ("copula", {"bins": {"income": [2.0, 1.0]}}, "first values of the cells must increase"),
    ("copula", {"bins": {"income": []}}, "column 'income': a number of cells, or a list"),
    ("copula", {"bins": [0, 1]}, "bins"),
    ("copula", {"bins": 2.5}, "bins"),
    ("copula", {"n_rows": 0}, "at least 1, or `input`, is expected, not 0"),
    ("copula", {"n_rows": "all"}, "at least 1, or `input`, is expected, not 'all'"),
    ("copula", {"n_rows": True}, "at least 1"),
    ("copula", {"weights": {"one_way": -1.0}}, "at least 0"),
    ("copula", {"weights": {"two_way": 0.0}}, "above 0"),
    ("copula", {"weights": {"two_way": float("inf")}}, "finite"),
    ("copula", {"weights": {"three_way": 1.0}}, r"unknown key 'weights\.three_way'"),
    ("copula", {"options": {"refinements": -1}}, "at least 0"),
    ("copula", {"options": {"refinements": 1.5}}, "a whole number"),
    ("copula", {"options": {"shrink": False}}, r"unknown key 'options\.shrink'"),
    ("marginals", {"cliques": []}, "a list of tables is expected"),
    ("marginals", {"cliques": ["sex"]}, "a list of tables is expected"),
    ("marginals", {"cliques": [[]]}, "a list of tables is expected"),
    ("marginals", {"cliques": [[1]]}, "a table is a list of columns' names"),
    ("marginals", {"cliques": [["nothing"]]}, "'nothing': is not a privatised column"),
    ("marginals", {"cliques": [["name"]]}, "'name': is not a privatised column"),
    ("marginals", {"cliques": [["sex", "sex"]]}, "sex x sex: a column or a table is repeated"),
    ("marginals", {"cliques": [["sex", "age"], ["age", "sex"]]}, "age x sex: a column or a table"),
    ("marginals", {"weights": [1.0]}, "one weight for each table, not 1 for 3; give 3"),
    ("marginals", {"weights": [1.0, 0.0, 1.0]}, r"a weight is a positive number, not 0\.0"),
    ("marginals", {"weights": [1.0, "2", 1.0]}, "a weight is a positive number, not '2'"),
    ("marginals", {"weights": 1.0}, "a list of positive weights is expected"),
    ("marginals", {"bins": -1}, CELLS),
    ("histogram", {"bins": 0}, CELLS),
    ("histogram", {"bins": "rules"}, CELLS),
    ("histogram", {"bins": 1_000_000}, CELLS),
    ("histogram", {"threshold": "high"}, "'none', 'positive' or 'enhanced'"),
    ("histogram", {"factor": 0.0}, "above 0"),
    ("histogram", {"factor": float("inf")}, "finite"),
    ("histogram", {"output": "both"}, "'cells' or 'rows'"),
    ("histogram", {"points": "edge"}, "'centre' or 'spread'"),
    ("histogram", {"n_rows": 0, "output": "rows"}, "at least 1, or `input`, is expected, not 0"),
    ("histogram", {"n_rows": 10}, "but `output` is cells; remove it, or set `output` to rows"),
    ("histogram", {"points": "spread", "output": "rows"}, "rows lie anywhere in their cells"),
    ("histogram", {"bins": "rule", "adjacency": "add-remove"}, "which add-remove hides"),
]


@pytest.mark.parametrize(("kind", "given", "message"), WRONG)
def test_a_wrong_parameter_is_refused_when_it_is_given(kind, given, message):
    with pytest.raises(SpecError, match=message):
        mechanism(kind, **given)


INCOME = COLUMNS["income"]
UNBOUNDED = continuous()
SEX_ALONE = {"age": None, "income": None}


@pytest.mark.parametrize(
    ("kind", "changes", "given", "message"),
    [
        ("copula", {"name": {"role": "keep"}}, {}, "column 'name': synthetic records do not"),
        ("marginals", {"name": {"role": "keep"}}, {}, "column 'name': the cells of a table do not"),
        ("histogram", {"name": {"role": "keep"}}, {}, "column 'name': the cells of a histogram"),
        ("copula", SEX_ALONE, {"weights": {"one_way": 0.0}}, "there is no table to measure"),
        (
            "marginals",
            {"count": INCOME},
            {"cliques": [["count"]]},
            "'count': this name is reserved",
        ),
        (
            "marginals",
            {"table": INCOME},
            {"cliques": [["table"]]},
            "'table': this name is reserved",
        ),
        ("histogram", {"weight": INCOME}, {}, "'weight': this name is reserved for a column of"),
    ],
)
def test_what_does_not_fit_the_schema_is_refused_at_construction(kind, changes, given, message):
    with pytest.raises(SpecError, match=message):
        mechanism(kind, columns=schema(**changes), **given)


def test_reserved_names_are_those_of_what_is_released():
    assert mechanism("marginals", columns=schema(count=INCOME), cliques=[["sex"]]).noise.cliques
    assert mechanism("histogram", columns=schema(weight=INCOME), output="rows").event
    assert mechanism("copula", columns=schema(**SEX_ALONE)).noise.pairs is None


MANY = {f"x{place}": INCOME for place in range(6)}


@pytest.mark.parametrize(
    ("kind", "changes", "given", "message"),
    [
        *(
            (kind, {}, {"bins": {"sex": 3}}, r"^`bins\.sex`: is not a continuous or mixed column")
            for kind in SPECS
        ),
        *((kind, {"income": UNBOUNDED}, {}, "without bounds") for kind in SPECS),
        ("copula", {}, {"bins": {"nothing": 3}}, r"^`bins\.nothing`: is not a continuous or mixed"),
        ("copula", {}, {"bins": {"income": [50.0, 4e9]}}, "must increase within the column's"),
        ("copula", {}, {"bins": 20_000}, r"'income': .* latent variables; the limit is 6,000"),
        (
            "copula",
            {"x": INCOME},
            {"bins": 30_000},
            r"'income' x 'x': it has 900,000,000 cells|'x' x 'income': it has 900,000,000 cells",
        ),
        (
            "marginals",
            {"x": INCOME},
            {"cliques": [["income", "x"]], "bins": 5000},
            "'income' x 'x': it has 25,000,000 cells, and the limit is",
        ),
        ("histogram", MANY, {"bins": 2, "points": "spread"}, "7 columns are cut"),
        ("histogram", MANY, {"bins": 20, "threshold": "none"}, "noise can be drawn for at most"),
    ],
)
def test_what_does_not_fit_the_columns_is_refused_before_any_row_is_read(
    kind, changes, given, message, tmp_path
):
    frame = table(10).assign(**dict.fromkeys(changes, 1.0))
    with pytest.raises(SpecError, match=message):
        fit_frame(mechanism(kind, columns=schema(**changes), **given), frame, tmp_path)


def told(section):
    """Return the mechanism's part of a card."""
    return make_card(section, name="frame", insecure=True).to_dict()["mechanism"]


# ---- what every kind promises


@pytest.mark.parametrize(
    ("kind", "others"),
    [
        ("copula", [{"epsilon": 3.0}, {"bins": 6}]),
        ("marginals", [{"epsilon": 3.0}, {"bins": 6}, {"weights": [1, 1, 2]}]),
        ("histogram", [{"epsilon": 3.0}, {"bins": 6}, {"threshold": "none"}, {"factor": 3.0}]),
    ],
)
def test_kept_noise_is_loaded_and_never_drawn_again(kind, others, tmp_path):
    first, release = fit_frame(mechanism(kind, bins=5), table(), tmp_path)
    again, _ = fit_frame(mechanism(kind, bins=5), table(50), tmp_path)  # no row is looked at
    assert again.release_sha256 == first.release_sha256
    for other in others:
        words = r"^the run's noisy .*written by another version of dpdask; resume with that version"
        with pytest.raises(InputError, match=words):
            fit_frame(mechanism(kind, **{"bins": 5, **other}), table(), tmp_path)
    with pytest.raises(InputError, match="the run's noisy"):
        mechanism(kind).read_drawn(release.to_bytes() + b"x", NOBODY)


@each_kind
def test_an_empty_table_is_refused_where_its_number_of_rows_is_public(kind, tmp_path):
    empty = table(30).iloc[:0]
    with pytest.raises(DataError, match="frame: the table has no rows"):
        fit_frame(mechanism(kind, bins=2), empty, tmp_path)
    fitted, _ = fit_frame(mechanism(kind, bins=2, adjacency="add-remove"), empty, tmp_path)
    assert fitted.n_released[0] >= (0 if kind == "histogram" else 1)


@each_kind
def test_a_plan_knows_how_much_is_released_and_warns_of_a_large_delta(kind):
    columns = columns_of(schema())
    assert mechanism(kind).description.n_expected(5) == (5 if kind == "copula" else None)
    if kind != "marginals":
        drawn = {"output": "rows"} if kind == "histogram" else {}
        assert mechanism(kind, **drawn).description.n_expected(5) == 5
        assert mechanism(kind, n_rows=7, **drawn).description.n_expected(None) == 7
    asked = mechanism(kind, delta=1e-3, bins=2)
    assert (
        asked.description.cautions(columns, None) == asked.description.cautions(columns, 999) == ()
    )
    [caution] = asked.description.cautions(columns, 1000)
    assert caution.startswith("δ = 0.001 is not below 1 / the number of rows")
    assert asked.description.stages(columns)[0].startswith("tabulate: read 3 columns once")
    search = "search: read all privatised columns once; count income in fine cells"
    assert mechanism(kind).description.stages(columns)[0].startswith(search)


def test_tables_and_cells_that_drown_are_warned_of():
    columns = columns_of(schema())
    asked = mechanism("marginals")
    assert asked.description.cautions(columns, 10**5) == ()
    words = "The cells of 2 of 3 tables are too fine, with fewer rows on average than the noise"
    assert words in asked.description.cautions(columns, 300)[0]
    assert (
        "rows on average" in mechanism("histogram", bins=50).description.cautions(columns, 1000)[0]
    )
    wide = schema(age=None, **{f"x{place}": INCOME for place in range(3)})
    private = mechanism("histogram", columns=wide, bins=300, adjacency="add-remove")
    [caution] = private.description.cautions(columns_of(wide), None)
    assert "the threshold is raised to" in caution
    public = replace(private, budget=Budget(epsilon=2.0))
    words = "has 16,200,000,000 cells, of which noise alone would raise"
    with pytest.raises(SpecError, match=words):
        public.description.cautions(columns_of(wide), 2)


# ---- a copula


def test_options_and_weights_are_taken(tmp_path):
    plain = mechanism("copula", bins=5, options={"tree": False, "refinements": 0}, n_rows=7)
    fitted, release = fit_frame(plain, table(), tmp_path)
    assert fitted.n_released == (7,)
    assert {node.parent for node in release.model.nodes} == {-1}
    weights = {"one_way": 4.0, "two_way": 1.0}
    one_way, two_way, again = leaves(mechanism("copula", bins=5, delta=1e-6, weights=weights).event)
    assert two_way.sigma / one_way.sigma == pytest.approx(2.0)
    spent = [event.count / event.sigma**2 for event in (one_way, two_way, again)]
    assert spent[2] / sum(spent) == pytest.approx(0.4, rel=1e-6)
    pairs = mechanism("copula", bins=5, weights={"one_way": 0}, measured_again=0)
    assert [event.count for event in leaves(pairs.event)] == [3]


# ---- a joint histogram


TWO = {"age": None}


def test_the_rule_gives_the_bins_from_the_number_of_rows():
    asked = mechanism("histogram", columns=schema(**TWO), bins="rule")
    fixed = asked.with_rows(lambda: 1000)
    assert isinstance(fixed.spec.bins, int)
    assert 5 < fixed.spec.bins < 100
    assert fixed.with_rows(lambda: 5) is fixed
    with pytest.raises(SpecError, match="these files do not tell before they are read"):
        asked.with_rows(lambda: None)
    levels = mechanism("histogram", columns=schema(**SEX_ALONE), bins="rule")
    assert levels.with_rows(lambda: None).spec.bins == 20
    asked.check(columns_of(schema(**TWO)))


def test_cells_of_a_frame_are_written_with_their_weights(tmp_path):
    asked = mechanism("histogram", columns=schema(**TWO), bins=4)
    fitted, release = fit_frame(asked, table(4000).drop(columns="age"), tmp_path)
    assert fitted.n_released == (8,) == (release.n_drawn(None),)
    found = records_of(release, 8)
    assert records_of(release, 3, 0, 5).equals(found)
    assert found.column_names == ["sex", "income", "weight"]
    assert release.few_valued == ["sex", "income"]
    assert found.column("income").to_pylist() == [12.5, 37.5, 62.5, 87.5] * 2
    assert sum(found.column("weight").to_pylist()) == pytest.approx(4000, abs=100)
    frame = release.to_frame()
    assert frame["sex"].dtype == pd.CategoricalDtype(["f", "m"], ordered=False)
    assert frame["weight"].tolist() == found.column("weight").to_pylist()
    spread = release.with_points("spread")
    whole = pa.Table.from_batches(spread.batches(0, 16, 16, KEY, ""), spread.types)
    assert spread.n_drawn(None) == 16
    assert records_of(spread, 5, 11).equals(whole)
    sums = whole["weight"].to_numpy().reshape(-1, 2).sum(axis=1)
    assert sums == pytest.approx(found["weight"].to_numpy())
    with pytest.raises(SpecError, match="`points`: must be centre or spread, not 'edge'"):
        release.with_points("edge")
    again = release.redraw(np.random.default_rng(0)).to_frame()
    assert again["weight"].tolist() != frame["weight"].tolist()


@pytest.mark.parametrize("output", ["cells", "rows"])
def test_the_card_tells_what_is_written(tmp_path, output):
    asked = mechanism("histogram", bins=4, output=output)
    fitted, release = fit_frame(asked, table(), tmp_path)
    expected = (output, *((400, None) if output == "rows" else (None, "centre")))
    for n_released, said in ((fitted.n_released[0], expected), (None, (None, None, "centre"))):
        columns = columns_of(schema())
        section = asked.description.section(
            release, columns, n_rows=400, n_released=n_released, order="keep"
        )
        part = told(section)
        assert (part["output"], part["records"], part["points"]) == said


def test_nothing_to_sample_is_refused_only_where_the_number_of_rows_is_public(tmp_path):
    spec = {"bins": 4, "output": "rows", "factor": 1e6}
    with pytest.raises(SpecError, match=r"no cell has a positive weight.*; lower `bins`"):
        fit_frame(mechanism("histogram", **spec), table(), tmp_path / "public")
    private = mechanism("histogram", adjacency="add-remove", **spec)
    fitted, release = fit_frame(private, table(), tmp_path / "private")
    assert fitted.n_released == (0,)
    assert list(release.batches(0, 0, 0, KEY, "0")) == []
    cells = mechanism("histogram", **spec | {"output": "cells"})
    assert fit_frame(cells, table(), tmp_path / "cells")[0].n_released == (0,)
