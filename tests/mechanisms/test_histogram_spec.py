"""What a perturbed histogram may be asked for, and what it releases of a frame."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from mechanisms.fitting import KEY, fit_frame, records_of

from dpdask.cells import cut_columns
from dpdask.codec import codec_for
from dpdask.documents import validate
from dpdask.errors import DataError, InputError, SpecError
from dpdask.mechanisms.card import make_card
from dpdask.mechanisms.histogram.release import FittedHistogram
from dpdask.mechanisms.histogram.spec import HistogramMechanism, HistogramSpec
from dpdask.mechanisms.mechanism import Columns
from dpdask.privacy import Budget
from dpdask.schema import Schema

COLUMNS: dict[str, Any] = {
    "sex": {"role": "privatise", "kind": "categorical", "levels": ["f", "m"]},
    "income": {"role": "privatise", "kind": "continuous", "bounds": [0, 100]},
    "name": {"role": "drop"},
}


def schema(**changes: Any) -> Schema:
    return Schema.from_dict({"columns": COLUMNS | changes})


def columns_of(schema_: Schema) -> Columns:
    types = pa.schema(
        [(name, pa.string() if name == "sex" else pa.float64()) for name in schema_.privatised]
    )
    return Columns(
        types=types,
        codecs={
            name: codec_for(name, schema_.columns[name], types.field(name).type)
            for name in types.names
        },
    )


def mechanism(
    *,
    columns: Schema | None = None,
    epsilon: float = 2.0,
    delta: float = 0,
    adjacency: Any = "replace-one",
    **spec: Any,
) -> HistogramMechanism:
    budget = Budget(epsilon=epsilon, delta=delta, adjacency=adjacency)
    return HistogramMechanism(
        spec=validate(HistogramSpec, spec, "job"), schema=columns or schema(), budget=budget
    )


def table(n: int = 4000) -> pd.DataFrame:
    rng = np.random.default_rng(1)
    return pd.DataFrame(
        {
            "sex": rng.choice(["f", "m"], n, p=[0.75, 0.25]),
            "income": rng.uniform(0, 100, n),
            "name": "x",
        }
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"bins": 0}, "a number of cells is a whole number from 1 to"),
        ({"bins": "rules"}, "a number of cells is a whole number from 1 to"),
        ({"threshold": "high"}, "'none', 'positive' or 'enhanced'"),
        ({"factor": 0.0}, "above 0"),
        ({"factor": float("inf")}, "finite"),
        ({"output": "both"}, "'cells' or 'rows'"),
        ({"points": "edge"}, "'centre' or 'spread'"),
        ({"n_rows": 0, "output": "rows"}, "at least 1, or `input`, is expected, not 0"),
        (
            {"n_rows": 10},
            "`n_rows`: the number of records can be chosen for synthetic rows only, but `output` is cells; remove it, or set `output` to rows",
        ),
        (
            {"points": "spread", "output": "rows"},
            "`points`: synthetic rows lie anywhere in their cells",
        ),
        (
            {"bins": "rule", "adjacency": "add-remove"},
            "`bins`: `rule` needs the number of rows, which add-remove hides",
        ),
    ],
)
def test_a_wrong_parameter_is_refused_when_it_is_given(given, message):
    with pytest.raises(SpecError, match=message):
        mechanism(**given)


def test_what_does_not_fit_the_schema_is_refused_at_construction():
    with pytest.raises(
        SpecError, match="column 'name': the cells of a histogram do not correspond to input rows"
    ):
        mechanism(columns=schema(name={"role": "keep"}))
    heavy = schema(weight=COLUMNS["income"])
    with pytest.raises(
        SpecError, match="column 'weight': this name is reserved for a column of the released cells"
    ):
        mechanism(columns=heavy)
    assert mechanism(columns=heavy, output="rows").event


def test_what_does_not_fit_the_columns_is_refused_before_any_row_is_read(tmp_path: Path):
    with pytest.raises(
        SpecError,
        match=r"^`bins\.sex`: is not a continuous or mixed column that is privatised; remove it$",
    ):
        fit_frame(mechanism(bins={"sex": 3}), table(10), tmp_path)
    many = schema(**{f"x{place}": COLUMNS["income"] for place in range(6)})
    frame = table(10).assign(**{f"x{place}": 1.0 for place in range(6)})
    with pytest.raises(SpecError, match="7 columns are cut"):
        fit_frame(mechanism(columns=many, bins=2, points="spread"), frame, tmp_path)
    with pytest.raises(
        SpecError,
        match=r"the joint histogram: has .* cells; noise can be drawn for at most 10,000,000 cells",
    ):
        fit_frame(mechanism(columns=many, bins=20, threshold="none"), frame, tmp_path)


def test_the_rule_gives_the_bins_from_the_number_of_rows():
    asked = mechanism(bins="rule")
    fixed = asked.with_rows(lambda: 1000)
    assert isinstance(fixed.spec.bins, int)
    assert 5 < fixed.spec.bins < 100
    assert fixed.with_rows(lambda: 5) is fixed
    with pytest.raises(
        SpecError,
        match="`bins`: `rule` needs the number of rows, which these files do not tell before they are read",
    ):
        asked.with_rows(lambda: None)
    levels = Schema.from_dict({"columns": {"sex": COLUMNS["sex"]}})
    assert mechanism(columns=levels, bins="rule").with_rows(lambda: None).spec.bins == 20
    asked.check(columns_of(schema()))


def test_cells_of_a_frame_are_written_with_their_weights(tmp_path: Path):
    fitted, release = fit_frame(mechanism(bins=4), table(), tmp_path)
    assert isinstance(release, FittedHistogram)
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
    assert spread.n_drawn(None) == 16
    assert records_of(spread, 5, 11).equals(
        pa.Table.from_batches(spread.batches(0, 16, 16, KEY, ""), spread.types)
    )
    with pytest.raises(SpecError, match="`points`: must be centre or spread, not 'edge'"):
        release.with_points("edge")
    again = release.redraw(np.random.default_rng(0)).to_frame()
    assert again["weight"].tolist() != frame["weight"].tolist()


def test_rows_are_drawn_from_the_positive_weights(tmp_path: Path):
    asked = mechanism(bins=4, output="rows", n_rows=1000)
    fitted, release = fit_frame(asked, table(), tmp_path)
    assert fitted.n_released == (1000,)
    assert (release.n_drawn(None), release.n_drawn(7)) == (4000, 7)
    found = records_of(release, 600, 400)
    assert found.schema.equals(release.columns)
    assert release.few_valued == ["sex"]
    assert found.equals(records_of(release, 600, 400))
    assert found.to_pandas()["sex"].value_counts()["f"] == pytest.approx(750, abs=80)


def test_a_histogram_with_nothing_to_sample_is_refused_only_where_the_number_of_rows_is_public(
    tmp_path: Path,
):
    spec = {"bins": 4, "output": "rows", "factor": 1e6}
    with pytest.raises(
        SpecError,
        match="no cell has a positive weight: noise and threshold left nothing to sample; lower `bins`",
    ):
        fit_frame(mechanism(**spec), table(), tmp_path / "public")
    fitted, release = fit_frame(
        mechanism(adjacency="add-remove", **spec), table(), tmp_path / "private"
    )
    assert fitted.n_released == (0,)
    assert list(release.batches(0, 0, 0, KEY, "0")) == []
    assert fit_frame(mechanism(**spec | {"output": "cells"}), table(), tmp_path / "cells")[
        0
    ].n_released == (0,)


@pytest.mark.parametrize("output", ["cells", "rows"])
def test_the_card_tells_what_is_written(tmp_path: Path, output):
    asked = mechanism(bins=4, output=output)
    fitted, release = fit_frame(asked, table(), tmp_path)
    written = asked.section(
        release, columns_of(schema()), n_rows=4000, n_released=fitted.n_released[0], order="keep"
    )
    part = make_card(written, name="frame", insecure=True).to_dict()["mechanism"]
    assert (part["output"], part["records"], part["points"]) == (
        output,
        4000 if output == "rows" else None,
        None if output == "rows" else "centre",
    )
    unknown = asked.section(
        release, columns_of(schema()), n_rows=4000, n_released=None, order="keep"
    )
    part = make_card(unknown, name="frame", insecure=True).to_dict()["mechanism"]
    assert (part["output"], part["records"], part["points"]) == (None, None, "centre")


def test_kept_noise_is_loaded_and_never_drawn_again(tmp_path: Path):
    asked = mechanism(bins=4)
    first, _ = fit_frame(asked, table(), tmp_path)
    again, _ = fit_frame(asked, table(50), tmp_path)  # the rows are not looked at
    assert again.release_sha256 == first.release_sha256
    for other in (
        replace(asked, budget=Budget(epsilon=3.0)),
        mechanism(bins=5),
        mechanism(bins=4, threshold="none"),
    ):
        with pytest.raises(
            InputError,
            match=r"^the run's noisy histogram: this was written by another version of dpdask; resume with that version",
        ):
            fit_frame(other, table(), tmp_path)


def test_an_empty_table_is_refused_where_its_number_of_rows_is_public(tmp_path: Path):
    with pytest.raises(DataError, match="frame: the table has no rows"):
        fit_frame(mechanism(bins=2), table(30).iloc[:0], tmp_path)
    fit_frame(mechanism(bins=2, adjacency="add-remove"), table(30).iloc[:0], tmp_path)


def test_what_a_run_says_beforehand():
    columns, asked = columns_of(schema()), mechanism(bins=50, delta=1e-3)
    assert (
        asked.stages(columns, uncounted=False)[0]
        == "tabulate: read 2 columns once; count their joint histogram of 100 cells, merged in a tree"
    )
    assert asked.cautions(columns, None) == ()
    found = asked.cautions(columns, 1000)
    assert found[0].startswith("δ = 0.001 is not below 1 / the number of rows")
    assert "rows on average" in found[1]
    assert (
        asked.n_expected(5),
        mechanism(output="rows").n_expected(5),
        mechanism(output="rows", n_rows=7).n_expected(None),
    ) == (None, 5, 7)
    assert asked.how == "weighted cells of a noisy histogram of 2 columns"
    large = mechanism(
        columns=schema(**{f"x{place}": COLUMNS["income"] for place in range(3)}),
        bins=300,
        adjacency="add-remove",
    )
    [caution] = large.cautions(columns_of(large.schema), None)
    assert "the threshold is raised to" in caution
    public = replace(large, budget=Budget(epsilon=2.0))
    cells = columns_of(large.schema)
    assert len(cut_columns(cells.codecs, 300)) == 5
    with pytest.raises(
        SpecError,
        match="the joint histogram: has 16,200,000,000 cells, of which noise alone would raise",
    ):
        public.cautions(cells, 2)
