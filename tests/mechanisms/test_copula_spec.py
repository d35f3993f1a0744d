"""What a copula may be asked for, and what it releases of a frame."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from mechanisms.fitting import fit_frame, records_of

from dpdask.documents import validate
from dpdask.errors import DataError, InputError, SpecError
from dpdask.mechanisms.card import make_card
from dpdask.mechanisms.copula.release import FittedCopula
from dpdask.mechanisms.copula.spec import CopulaMechanism, CopulaSpec
from dpdask.mechanisms.mechanism import Columns
from dpdask.privacy import Budget
from dpdask.schema import Schema

COLUMNS: dict[str, Any] = {
    "sex": {"role": "privatise", "kind": "categorical", "levels": ["f", "m"]},
    "age": {"role": "privatise", "kind": "discrete", "levels": [20, 30, 40], "nulls": "level"},
    "income": {"role": "privatise", "kind": "continuous", "bounds": [0, 100]},
    "name": {"role": "drop"},
}
NOBODY = Columns(types=None, codecs={})


def schema(**changes: Any) -> Schema:
    return Schema.from_dict(
        {
            "columns": {
                name: column for name, column in (COLUMNS | changes).items() if column is not None
            }
        }
    )


def mechanism(
    *,
    columns: Schema | None = None,
    epsilon: float = 2.0,
    delta: float = 0,
    adjacency: Any = "replace-one",
    **spec: Any,
) -> CopulaMechanism:
    budget = Budget(epsilon=epsilon, delta=delta, adjacency=adjacency)
    return CopulaMechanism(
        spec=validate(CopulaSpec, spec, "job"), schema=columns or schema(), budget=budget
    )


def table(n: int = 400) -> pd.DataFrame:
    rng = np.random.default_rng(1)
    sex = rng.choice(["f", "m"], n)
    age = pd.array(rng.choice([20, 30, 40], n), dtype="Int64")
    age[:20] = pd.NA
    return pd.DataFrame({"sex": sex, "age": age, "income": rng.uniform(0, 100, n), "name": "x"})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"bins": "x"}, "a number of cells"),
        ({"bins": 0}, "a number of cells is a whole number from 1 to"),
        ({"bins": {"income": [1.0, "2"]}}, "first value of each cell"),
        ({"bins": {"income": [2.0, 1.0]}}, "first values of the cells must increase"),
        ({"n_rows": 0}, "at least 1, or `input`, is expected, not 0"),
        ({"n_rows": "all"}, "at least 1, or `input`, is expected, not 'all'"),
        ({"n_rows": True}, "at least 1"),
        ({"weights": {"one_way": -1.0}}, "at least 0"),
        ({"weights": {"two_way": 0.0}}, "above 0"),
        ({"weights": {"two_way": float("inf")}}, "finite"),
        ({"weights": {"three_way": 1.0}}, r"unknown key 'weights\.three_way'"),
        ({"options": {"refinements": -1}}, "at least 0"),
        ({"options": {"refinements": 1.5}}, "a whole number"),
        ({"options": {"shrink": False}}, r"unknown key 'options\.shrink'"),
    ],
)
def test_a_wrong_parameter_is_refused_when_it_is_given(given, message):
    with pytest.raises(SpecError, match=message):
        mechanism(**given)


def test_what_does_not_fit_the_schema_or_the_budget_is_refused_at_construction():
    keep = schema(name={"role": "keep"})
    with pytest.raises(
        SpecError,
        match="column 'name': synthetic records do not correspond to input rows, so no column can have the role keep",
    ):
        mechanism(columns=keep)
    with pytest.raises(SpecError, match="the schema privatises no column"):
        mechanism(columns=Schema.from_dict({"columns": {"name": {"role": "drop"}}}))
    alone = schema(age=None, income=None)
    with pytest.raises(SpecError, match="`weights`: there is no table to measure"):
        mechanism(columns=alone, weights={"one_way": 0.0})
    assert mechanism(columns=alone).noise.pairs is None


def test_what_does_not_fit_the_columns_is_refused_before_any_row_is_read(tmp_path: Path):
    frame = table(10)
    for bins in ({"sex": 3}, {"name": 3}, {"nothing": 3}):
        with pytest.raises(
            SpecError,
            match=rf"^`bins\.{next(iter(bins))}`: is not a continuous or mixed column that is privatised; remove it$",
        ):
            fit_frame(mechanism(bins=bins), frame, tmp_path)
    with pytest.raises(SpecError, match="must increase within the column's bounds"):
        fit_frame(mechanism(bins={"income": [50.0, 4e9]}), frame, tmp_path)
    with pytest.raises(
        SpecError, match=r"column 'income': .* latent variables; the limit is 6,000; lower `bins`"
    ):
        fit_frame(mechanism(bins=20_000), frame, tmp_path)
    other = {"role": "privatise", "kind": "continuous", "bounds": [0, 100]}
    wide = mechanism(columns=schema(other=other), bins=30_000)
    with pytest.raises(
        SpecError,
        match=r"the table 'other' x 'income': it has 900,000,000 cells, and the limit is 16,777,216; lower `bins`",
    ):
        fit_frame(wide, frame.assign(other=1.0), tmp_path)


def test_a_frame_is_fitted_and_records_are_drawn(tmp_path: Path):
    charged: list[int] = []
    fitted, release = fit_frame(mechanism(bins=5), table(), tmp_path, lambda: charged.append(1))
    assert charged == [1]
    assert isinstance(release, FittedCopula)
    assert fitted.n_released == (400,)
    records = records_of(release, 300, 100)
    assert records.schema == release.types
    assert records.num_rows == 400
    assert set(records.column("sex").to_pylist()) == {"f", "m"}
    assert set(records.column("age").to_pylist()) <= {None, 20, 30, 40}
    assert release.few_valued == ["sex", "age"]
    assert records.equals(records_of(release, 300, 100))
    found = release.correlations()
    assert found.shape == (10, 10)  # one for the two sexes, four ages, five incomes
    assert np.allclose(np.diag(found), 1.0, atol=1e-5)


def test_the_job_and_the_class_say_the_same_options(tmp_path: Path):
    plain = mechanism(bins=5, options={"tree": False, "refinements": 0}, n_rows=7)
    fitted, release = fit_frame(plain, table(), tmp_path)
    assert fitted.n_released == (7,)
    assert {node.parent for node in release.model.nodes} == {-1}
    assert CopulaSpec().options.refinements == 3


def test_the_card_tells_how_many_records_are_written(tmp_path: Path):
    asked = mechanism(bins=5, delta=1e-6)
    _, release = fit_frame(asked, table(), tmp_path)
    for n_released in (400, None):
        section = asked.section(release, NOBODY, n_rows=400, n_released=n_released, order="keep")
        card = make_card(section, name="frame", insecure=True).to_dict()
        assert card["mechanism"]["records"] == n_released
        assert card["n_rows"] == {"value": 400.0, "exact": True}


def test_kept_noise_is_loaded_and_never_drawn_again(tmp_path: Path):
    asked = mechanism(bins=5)
    first, release = fit_frame(asked, table(), tmp_path)
    again, _ = fit_frame(asked, table(50), tmp_path)  # the rows are not looked at
    assert again.release_sha256 == first.release_sha256
    with pytest.raises(
        InputError,
        match=r"^the run.s noisy tables: these were written by another version of dpdask; resume with that version",
    ):
        fit_frame(replace(asked, budget=Budget(epsilon=3.0)), table(), tmp_path)
    with pytest.raises(InputError, match="the run's noisy tables"):
        asked.read_drawn(release.to_bytes(), NOBODY)


def test_an_empty_table_is_refused_where_its_number_of_rows_is_public(tmp_path: Path):
    with pytest.raises(DataError, match="frame: the table has no rows"):
        fit_frame(mechanism(bins=2), table(30).iloc[:0], tmp_path)
    fitted, _ = fit_frame(mechanism(bins=2, adjacency="add-remove"), table(30).iloc[:0], tmp_path)
    assert fitted.n_released[0] >= 1


def test_what_a_run_says_beforehand():
    asked = mechanism(delta=1e-3)
    assert asked.stages(NOBODY, uncounted=False)[0].startswith(
        "search: read all privatised columns once; count income in fine cells"
    )
    assert (
        asked.stages(NOBODY, uncounted=False)[1]
        == "tabulate: read 3 columns once; count 3 one-way and 3 two-way tables, merged in a tree"
    )
    assert asked.cautions(NOBODY, None) == asked.cautions(NOBODY, 999) == ()
    [caution] = asked.cautions(NOBODY, 1000)
    assert caution.startswith("δ = 0.001 is not below 1 / the number of rows")
    assert caution.endswith("lower `delta`")
    assert (asked.n_expected(5), asked.n_expected(None), mechanism(n_rows=7).n_expected(None)) == (
        5,
        None,
        7,
    )
    assert asked.how == "synthetic records of 3 columns, from a Gaussian copula"
    assert not asked.n_rows_private
    assert mechanism(adjacency="add-remove").n_rows_private
