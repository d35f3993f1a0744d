"""Opened releases of dates and of nulls: dates in and out, means without nulls, and only questions that are answered are offered."""

from __future__ import annotations

import datetime as dt
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from e2e.helpers import open_once

import dpdask
from dpdask.analysis.opened import Result, count_since_1970

N = 4_000
FIRST = pd.Timestamp("2026-01-01")
EDGES = [FIRST, "2026-02-01", pd.Timestamp("2026-03-01").date()]
YEAR = [dt.date(2026, 1, 1), dt.date(2026, 12, 31)]
SCHEMA: dict[str, Any] = {
    "when": {"role": "privatise", "kind": "continuous", "bounds": YEAR},
    "day": {"role": "privatise", "kind": "continuous", "bounds": YEAR},
    "riders": {"role": "privatise", "kind": "discrete", "levels": [1, 2, 3], "nulls": "level"},
    "paid": {"role": "privatise", "kind": "categorical", "levels": [1, 2]},
    "firm": {"role": "keep"},
    "seen": {"role": "keep"},
}
COUNTED: dict[str, Any] = {"epsilon": 8.0, "delta": 1e-6, "adjacency": "replace-one", "unit": "row"}
NOTHING_KEPT = SCHEMA | {name: {"role": "drop"} for name in ("firm", "seen")}
JOBS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "holdout": (
        SCHEMA,
        {
            "mechanism": {
                "kind": "dip",
                "reference": {"kind": "holdout", "fraction": 0.25},
                "channel": "laplace-calibrated",
            }
        },
    ),
    "tree": (
        SCHEMA,
        {
            "mechanism": {
                "kind": "dip",
                "reference": {"kind": "tree"},
                "channel": "laplace-calibrated",
            },
            "privacy": COUNTED,
        },
    ),
    "tables": (
        NOTHING_KEPT,
        {
            "mechanism": {
                "kind": "marginals",
                "cliques": [["when"], ["day"], ["riders"]],
                "bins": {"when": 365, "day": 365},
            }
        },
    ),
    "cells": (
        NOTHING_KEPT | {name: {"role": "drop"} for name in ("day", "paid", "firm", "seen")},
        {
            "mechanism": {"kind": "histogram", "output": "cells", "bins": {"when": 60}},
            "privacy": COUNTED,
        },
    ),
}


def make_table() -> pd.DataFrame:
    rng = np.random.default_rng(3)
    when = (FIRST + pd.to_timedelta(np.minimum(rng.exponential(30.0, N), 360.0), unit="D")).astype(
        "datetime64[ms]"
    )
    paid = rng.choice([1, 2], N)
    riders = pd.Series(rng.choice([1.0, 2.0, 3.0, np.nan], N, p=[0.3, 0.2, 0.2, 0.3])).astype(
        "Int64"
    )
    return pd.DataFrame(
        {
            "when": when,
            "day": when.floor("D").date,
            "riders": riders,
            "paid": paid,
            "firm": rng.choice([7, 8], N),
            "seen": when,
        }
    )


@pytest.fixture(scope="module")
def original() -> pd.DataFrame:
    return make_table()


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory, original: pd.DataFrame) -> Any:
    folder = tmp_path_factory.mktemp("dates")
    (folder / "in").mkdir()
    pq.write_table(
        pa.Table.from_pandas(original, preserve_index=False), folder / "in" / "table.parquet"
    )

    def open_(name: str) -> Any:
        schema, changes = JOBS[name]
        return open_once(
            folder, name, folder / "in", schema=schema, output__rows_per_shard=N, **changes
        )

    return open_


@pytest.mark.few(3)
@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize("column", ["when", "day"])
def test_dates_go_in_and_come_out(
    release: Any, original: pd.DataFrame, name: str, column: str
) -> None:
    opened = release(name)
    if column not in opened.card["columns"]:
        return
    dates = pd.to_datetime(original[column])
    slack = pd.Timedelta(days=4 if name == "cells" else 1)  # half a cell
    mean = opened.mean(column)
    assert isinstance(mean.estimate, pd.Timestamp)
    assert isinstance(mean.standard_error, pd.Timedelta)
    assert pd.Timedelta(0) < mean.standard_error < pd.Timedelta(days=2.5)
    assert abs(mean.estimate - dates.mean()) < 4 * mean.standard_error + slack
    assert any("heavy tail" in limit for limit in mean.limits) == (name == "tree")
    low, high = mean.interval(ignore_bias=mean.bias_bound is None)
    assert low < mean.estimate < high
    assert str(mean.estimate) in repr(mean)
    median = opened.quantile(column)
    assert abs(median.estimate - dates.median()) < 4 * median.standard_error + slack
    counts = opened.histogram(column, bins=EDGES)
    assert counts.estimate.index[0] == pd.Interval(FIRST, pd.Timestamp("2026-02-01"), closed="left")
    truth = [
        ((dates >= low) & (dates < high)).sum()
        for low, high in zip(
            map(pd.Timestamp, EDGES[:-1]), map(pd.Timestamp, EDGES[1:]), strict=True
        )
    ]
    scale = opened.n_rows / N if name == "holdout" else 1.0
    bias = 0 if counts.bias_bound is None else counts.bias_bound.to_numpy()
    assert (
        np.abs(counts.estimate - scale * np.array(truth))
        < 4 * counts.standard_error + bias + (200 if name == "cells" else 0)
    ).all()
    with pytest.raises(dpdask.SpecError, match="the edges of a column of dates are dates"):
        opened.histogram(column, bins=[1, 2])


def test_kept_dates_are_dates(release: Any, original: pd.DataFrame) -> None:
    opened = release("tree")
    assert abs(opened.mean("seen").estimate - original["seen"].mean()) < pd.Timedelta(
        milliseconds=1
    )
    groups = opened.mean("seen", by="firm")
    assert groups.estimate.loc[7] == pytest.approx(
        original[original["firm"] == 7]["seen"].mean(), abs=pd.Timedelta(milliseconds=1)
    )
    assert (groups.standard_error > pd.Timedelta(0)).all()
    assert len(groups.to_frame()) == 2
    assert len(repr(groups)) < 400


@pytest.mark.parametrize("name", JOBS)
def test_means_leave_nulls_out(release: Any, original: pd.DataFrame, name: str) -> None:
    opened = release(name)
    found, truth = opened.mean("riders"), original["riders"].mean()
    assert abs(found.estimate - truth) < 4 * found.standard_error
    assert "rows without a value are left out" in found.limits
    with_zero = opened.mean("riders", values=[0, 1, 2, 3])
    assert (
        abs(with_zero.estimate - original["riders"].fillna(0).mean()) < 4 * with_zero.standard_error
    )
    with pytest.raises(dpdask.SpecError, match="for each of null, 1, 2, 3"):
        opened.mean("riders", values=[1, 2, 3])


def test_means_of_groups_leave_nulls_out_too(release: Any, original: pd.DataFrame) -> None:
    found = release("holdout").mean("riders", by="firm")
    truth = original.groupby("firm")["riders"].mean().astype(float)
    bias = 0.0 if found.bias_bound is None else found.bias_bound
    assert (np.abs(found.estimate - truth) < 4 * found.standard_error + bias).all()
    assert (found.standard_error < 0.5).all()
    assert "rows without a value are left out" in found.limits


@pytest.mark.few(2)
@pytest.mark.parametrize("name", JOBS)
def test_every_question_that_is_offered_is_answered(release: Any, name: str) -> None:
    opened = release(name)
    assert "slope" not in opened.columns.loc["when", "answers"]
    for column, answers in opened.columns["answers"].items():
        for question in answers.split(", ") if answers else ():
            others = [other for other in opened.columns.index if other != column]
            tries: dict[str, list[tuple[Any, ...]]] = {
                "histogram": [(column, EDGES if column in ("when", "day", "seen") else [0, 1, 4])],
                "crosstab": [(column, other) for other in others],
                "slope": [(column, other) for other in others]
                + [(other, column) for other in others],
                "fit": [],
            }
            asked = tries.get(question, [(column,)])
            assert not asked or any(is_answered(opened, question, each) for each in asked), (
                column,
                question,
            )


def is_answered(opened: Any, question: str, asked: tuple[Any, ...]) -> bool:
    try:
        return isinstance(getattr(opened, question)(*asked), Result)
    except dpdask.SpecError:
        return False


def test_several_quantiles_and_what_is_not_offered(release: Any) -> None:
    opened = release("holdout")
    found = opened.quantile("when", [0.25, 0.5])
    assert found.estimate.index.tolist() == [0.25, 0.5]
    assert found.estimate[0.25] < found.estimate[0.5] == opened.quantile("when", 0.5).estimate
    for question, words in (
        (lambda: opened.quantile("when", 0.5, by="firm"), "takes no groups"),
        (lambda: opened.share("riders", by="firm"), r"use crosstab\('firm', 'riders'\)"),
        (lambda: opened.crosstab("firm", "firm"), "named twice"),
        (lambda: opened.mean("riders", by="riders"), "named twice"),
        (lambda: opened.quantile("when", "half"), "lies between 0 and 1"),
        (lambda: opened.histogram("firm", bins=["a", "b"]), "finite numbers that increase"),
        (lambda: release("cells").slope("riders", "when"), "holds dates"),
    ):
        with pytest.raises(dpdask.SpecError, match=words):
            question()


def test_bounds_of_ranges_are_dates_of_all_years() -> None:
    assert count_since_1970("9999-12-31", 86_400_000_000, last=True) == 2_932_896
    assert count_since_1970("9999-12-31", 1_000, last=True) == 253_402_300_799_999
    assert count_since_1970("0001-01-01 01:00:00+01:00", 1_000_000, last=False) == -62_135_596_800
