"""What noisy tables may be asked for, and what is released of a frame."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from mechanisms.fitting import fit_frame, records_of

from dpdask.codec import codec_for
from dpdask.documents import validate
from dpdask.errors import DataError, InputError, SpecError
from dpdask.mechanisms.card import make_card
from dpdask.mechanisms.marginals.release import MarginalTables
from dpdask.mechanisms.marginals.spec import MarginalsMechanism, MarginalsSpec
from dpdask.mechanisms.mechanism import Columns
from dpdask.privacy import Budget
from dpdask.schema import Schema

COLUMNS: dict[str, Any] = {
    "sex": {"role": "privatise", "kind": "categorical", "levels": ["f", "m"]},
    "age": {"role": "privatise", "kind": "discrete", "levels": [20, 30, 40], "nulls": "level"},
    "income": {"role": "privatise", "kind": "continuous", "bounds": [0, 100]},
    "name": {"role": "drop"},
}
CLIQUES = [["sex"], ["income", "age"], ["age", "sex", "income"]]
NOBODY = Columns(types=None, codecs={})


def schema(**changes: Any) -> Schema:
    return Schema.from_dict({"columns": COLUMNS | changes})


def mechanism(
    *, columns: Schema | None = None, adjacency: Any = "replace-one", **spec: Any
) -> MarginalsMechanism:
    budget = Budget(epsilon=2.0, delta=1e-9, adjacency=adjacency)
    return MarginalsMechanism(
        spec=validate(MarginalsSpec, {"cliques": CLIQUES} | spec, "job"),
        schema=columns or schema(),
        budget=budget,
    )


def table(n: int = 4000) -> pd.DataFrame:
    rng = np.random.default_rng(1)
    age = pd.array(rng.choice([20, 30, 40], n), dtype="Int64")
    age[: n // 4] = pd.NA
    return pd.DataFrame(
        {
            "sex": rng.choice(["f", "m"], n, p=[0.75, 0.25]),
            "age": age,
            "income": rng.uniform(0, 100, n),
            "name": "x",
        }
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"cliques": []}, "a list of tables is expected"),
        ({"cliques": ["sex"]}, "a list of tables is expected"),
        ({"cliques": [[]]}, "a list of tables is expected"),
        ({"cliques": [[1]]}, "a table is a list of columns' names"),
        ({"cliques": [["sex", "nothing"]]}, "`cliques`, 'nothing': is not a privatised column"),
        ({"cliques": [["name"]]}, "`cliques`, 'name': is not a privatised column"),
        ({"cliques": [["sex", "sex"]]}, "`cliques`, sex x sex: a column or a table is repeated"),
        (
            {"cliques": [["sex", "age"], ["age", "sex"]]},
            "`cliques`, age x sex: a column or a table is repeated",
        ),
        (
            {"weights": [1.0]},
            "`weights`: there must be one weight for each table, not 1 for 3; give 3",
        ),
        ({"weights": [1.0, 0.0, 1.0]}, r"a weight is a positive number, not 0\.0"),
        ({"weights": [1.0, "2", 1.0]}, "a weight is a positive number, not '2'"),
        ({"weights": 1.0}, "a list of positive weights is expected"),
        ({"bins": -1}, "a number of cells is a whole number from 1 to"),
    ],
)
def test_a_wrong_parameter_is_refused_when_it_is_given(given, message):
    with pytest.raises(SpecError, match=message):
        mechanism(**given)


def test_what_does_not_fit_the_schema_is_refused_at_construction():
    with pytest.raises(
        SpecError,
        match="column 'name': the cells of a table do not correspond to input rows, so no column can have the role keep",
    ):
        mechanism(columns=schema(name={"role": "keep"}))
    for name in ("table", "count", "margin_95"):
        taken = schema(**{name: COLUMNS["sex"]})
        with pytest.raises(
            SpecError,
            match=f"column '{name}': this name is reserved for a column of the released tables",
        ):
            mechanism(columns=taken, cliques=[[name]])
        assert mechanism(columns=taken, cliques=[["sex"]]).noise.cliques


def test_what_does_not_fit_the_columns_is_refused_before_any_row_is_read(tmp_path: Path):
    with pytest.raises(
        SpecError,
        match=r"^`bins\.sex`: is not a continuous or mixed column that is privatised; remove it$",
    ):
        fit_frame(mechanism(bins={"sex": 3}), table(10), tmp_path)
    other = {"role": "privatise", "kind": "continuous", "bounds": [0, 100]}
    wide = mechanism(columns=schema(other=other), cliques=[["income", "other"]], bins=5000)
    with pytest.raises(
        SpecError,
        match=r"the table 'income' x 'other': it has 25,000,000 cells, and the limit is 16,777,216",
    ):
        fit_frame(wide, table(10).assign(other=1.0), tmp_path)


def test_tables_of_a_frame_are_read_in_python_and_written_as_rows(tmp_path: Path):
    asked = mechanism(bins=5, weights=[1, 1, 2])
    fitted, release = fit_frame(asked, table(), tmp_path)
    assert isinstance(release, MarginalTables)
    assert fitted.n_released == (2 + 5 * 4 + 4 * 2 * 5,) == (release.n_drawn(None),)
    rows = records_of(release, 62)
    assert rows.column_names == ["table", "sex", "income", "age", "count", "margin_95"]
    assert release.few_valued == ["table", "sex", "income", "age", "margin_95"]
    assert records_of(release, 1, 20, 0, 30, 11).equals(rows)  # whichever shards they are in
    found = rows.to_pandas()
    assert found["table"].value_counts().to_dict() == {
        "sex": 2,
        "income x age": 20,
        "age x sex x income": 40,
    }
    sex, pair, three = (
        found[found["table"] == name] for name in ("sex", "income x age", "age x sex x income")
    )
    assert sex["sex"].tolist() == ["f", "m"]
    assert sex[["income", "age"]].isna().all(axis=None)
    assert pair["sex"].isna().all()
    assert set(pair["age"]) == {"null", "20", "30", "40"}
    assert sex["count"].tolist() == release.table(("sex",)).tolist()
    assert sex["count"].tolist() == pytest.approx([3000, 1000], abs=150)
    assert pair["count"].tolist() == release.table(("income", "age")).ravel().tolist()
    assert (release.table(("age", "income")) == release.table(("income", "age")).T).all()
    assert set(pair["margin_95"]) == {release.margin(("age", "income"))}
    assert release.margin(("age", "sex", "income")) < release.margin(("sex",))
    frame = release.to_frame(("income", "sex", "age"))
    assert frame.columns.tolist() == ["income", "sex", "age", "count", "margin_95"]
    columns = ["age", "sex", "income"]
    assert (
        frame.set_index(columns)["count"].sort_index().tolist()
        == three.set_index(columns)["count"].sort_index().tolist()
    )


@pytest.mark.parametrize("clique", [("age",), ("sex", "age"), ("nothing",), ("sex", "sex")])
def test_a_table_that_was_not_asked_for_is_refused(tmp_path: Path, clique):
    _, release = fit_frame(mechanism(bins=2), table(100), tmp_path)
    for read in (release.table, release.margin, release.to_frame):
        with pytest.raises(
            SpecError,
            match=r"there is no table of the columns .*; ask for one of sex, income x age, age x sex x income",
        ):
            read(clique)


def test_the_card_lists_the_tables(tmp_path: Path):
    asked = mechanism(bins=5)
    _, release = fit_frame(asked, table(), tmp_path)
    card = make_card(
        asked.section(release, NOBODY, n_rows=4000, n_released=62, order="keep"),
        name="frame",
        insecure=True,
    ).to_dict()
    assert card["mechanism"] == {"kind": "marginals", "cliques": CLIQUES}
    assert list(card["columns"]) == ["sex", "age", "income"]
    assert card["n_rows"] == {"value": 4000.0, "exact": True}


def test_kept_noise_is_loaded_and_never_drawn_again(tmp_path: Path):
    asked = mechanism(bins=5)
    first, _ = fit_frame(asked, table(), tmp_path)
    again, _ = fit_frame(asked, table(50), tmp_path)  # the rows are not looked at
    assert again.release_sha256 == first.release_sha256
    for other in (
        replace(asked, budget=Budget(epsilon=3.0)),
        mechanism(bins=6),
        mechanism(bins=5, weights=[1, 1, 2]),
    ):
        with pytest.raises(
            InputError,
            match=r"^the run's noisy tables: these were written by another version of dpdask",
        ):
            fit_frame(other, table(), tmp_path)


def test_an_empty_table_is_refused_where_its_number_of_rows_is_public(tmp_path: Path):
    with pytest.raises(DataError, match="frame: the table has no rows"):
        fit_frame(mechanism(bins=2), table(30).iloc[:0], tmp_path)
    fitted, _ = fit_frame(mechanism(bins=2, adjacency="add-remove"), table(30).iloc[:0], tmp_path)
    assert fitted.n_released == (2 + 8 + 16,)


def test_what_a_run_says_beforehand():
    asked = mechanism()
    assert asked.stages(NOBODY, uncounted=False)[0].startswith(
        "search: read all privatised columns once; count income in fine cells"
    )
    assert (
        asked.stages(NOBODY, uncounted=False)[1]
        == "tabulate: read 3 columns once; count 3 tables, merged in a tree"
    )
    assert asked.how == "3 tables with noise on every cell"
    assert asked.n_expected(100) is None
    codecs = {
        name: codec_for(name, schema().columns[name], pa.string() if name == "sex" else pa.int64())
        for name in ("sex", "age", "income")
    }
    columns = Columns(types=None, codecs=codecs)
    assert asked.cautions(columns, 10**5) == ()
    assert (
        "The cells of 2 of 3 tables are too fine, with fewer rows on average than the noise of a count: income x age, age x sex x income"
        in asked.cautions(columns, 300)[0]
    )
    assert "δ" in asked.cautions(columns, 10**9)[0]
