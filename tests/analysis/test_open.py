"""`dpdask.open`, the contract of opened releases by name: answers are right within their errors, where plain answers are not.

A question that is offered is answered, and what cannot be answered is refused in one line.
"""

import datetime as dt
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import dask
import fsspec
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from e2e.helpers import continuous, discrete, refused, release_of, says
from numpy.random import default_rng
from scipy import stats
from shelf import FIRST, LEVEL_NAMES, LEVEL_SHARES, LEVEL_STAYS, TOWNS, homes, rides

import dpdask
from dpdask.analysis.points import Points
from dpdask.analysis.results import Result
from dpdask.analysis.values import count_since_1970, find_scales
from dpdask.inference import NPMLE, WeightedSample, logistic

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "analyse-a-release.md"
Z = 4.5  # standard errors
OPENED = [
    f"homes, {end}"
    for end in ("dip", "dip of pairs", "dip known", "interval", "copula", "cells", "tables")
]
DATED = [f"rides, {end}" for end in ("holdout", "tree", "tables", "cells")]
EDGES = [0.0, 40.0, 60.0, 80.0, 200.0]
DATES = [FIRST, "2026-02-01", pd.Timestamp("2026-03-01").date()]

Truth = Callable[[pd.DataFrame], Any]


def mean(column, by=None):
    return lambda rows: rows[column].mean() if by is None else rows.groupby(by)[column].mean()


def shares(column):
    return lambda rows: rows[column].value_counts(normalize=True).sort_index()


def counts(first, second):
    return lambda rows: pd.crosstab(rows[first], rows[second])


def quantile(column, q=0.5):
    return lambda rows: rows[column].quantile(q)


def slope(response, feature):
    return lambda rows: [np.polyfit(rows[feature], rows[response], 1)[0]]


def least_over_60(sample):
    """Return a logistic regression of having more than 4 years on the price."""
    return logistic(replace(sample, response=(sample.response > 4).astype(float)))


def least_over_60_of(rows):
    return least_over_60(
        WeightedSample(
            features=rows[["price"]].to_numpy(),
            response=rows["years"].to_numpy(float),
            weights=np.ones(len(rows)),
        )
    )


# the release, the question, the truth, the largest standard error
ASKED = [
    ("dip", ("mean", "rating"), mean("rating"), 0.05),
    ("dip", ("mean", "price"), mean("price"), 0.6),
    ("dip", ("quantile", "price", 0.9), quantile("price", 0.9), 1.5),
    ("dip", ("histogram", "price", EDGES), lambda rows: np.histogram(rows["price"], EDGES)[0], 200),
    ("dip of pairs", ("share", "kind"), shares("kind"), 0.05),
    ("dip of pairs", ("crosstab", "town", "kind"), counts("town", "kind"), 900),
    ("dip known", ("mean", "years", "town"), mean("years", "town"), 0.05),
    ("dip known", ("mean", "price"), mean("price"), 3.0),
    ("interval", ("mean", "price"), mean("price"), 1.0),
    ("copula", ("mean", "rating"), mean("rating"), 0.06),
    ("copula", ("share", "kind"), shares("kind"), 0.02),
    ("copula", ("crosstab", "kind", "rating"), counts("kind", "rating"), 200),
    ("copula", ("slope", "rating", "years"), slope("rating", "years"), 0.02),
    ("copula", ("mean", "rating", "town"), mean("rating", "town"), 0.1),
    ("copula", ("quantile", "price"), quantile("price"), 2.0),
    ("cells", ("mean", "price"), mean("price"), 0.3),
    ("cells", ("quantile", "price"), quantile("price"), 1.0),
    ("cells", ("slope", "price", "years"), slope("price", "years"), 0.15),
    ("cells", ("fit", least_over_60, "years", "price"), least_over_60_of, 0.2),
    ("tables", ("mean", "rating"), mean("rating"), 0.03),
    ("tables", ("crosstab", "town", "rating"), counts("town", "rating"), 100),
    ("tables", ("mean", "price"), mean("price"), 0.5),
]
# where the same of the released rows is wrong by more than the error of the answer
CORRECTED = [
    ("dip", ("mean", "rating", "town"), mean("rating", "town"), 0.1),
    ("dip", ("slope", "rating", "years"), slope("rating", "years"), 0.1),
    ("dip", ("slope", "years", "rating"), slope("years", "rating"), 0.4),
    (
        "dip of pairs",
        ("crosstab", "kind", "rating"),
        counts("kind", "rating"),
        900,
    ),  # two columns with noise of their own
    ("interval", ("slope", "price", "years"), slope("price", "years"), 0.4),
]


def named(table):
    """Return cases that are called by their release and question."""
    return [
        pytest.param(*case, id=f"{case[0]}: {case[1][0]} {number}")
        for number, case in enumerate(table)
    ]


def ask(opened, question, *words):
    if question == "mean" and len(words) == 2:
        return opened.mean(words[0], by=words[1])
    return getattr(opened, question)(*words)


def agrees(found, truth, at_most):
    """Check that the truth lies within some standard errors and the bias, and that the standard error is as small as it should be."""
    if found.standard_error is None:  # a quantile's interval is found by ranks
        low, high = found.interval(stats.norm.cdf(Z) - stats.norm.cdf(-Z))
        assert low <= truth <= high, (found, truth)
        assert 0.0 < high - low <= 2.0 * Z * at_most
        return
    estimate, error, true = (
        np.asarray(part, float) for part in (found.estimate, found.standard_error, truth)
    )
    bias = 0.0 if found.bias_bound is None else np.asarray(found.bias_bound, float)
    assert (np.abs(estimate - true) <= Z * error + bias).all(), (found, truth)
    assert (error > 0).all()
    assert error.max() <= at_most


@pytest.mark.parametrize(("name", "question", "truth", "at_most"), named(ASKED + CORRECTED))
def test_answers_are_right_within_their_errors(shelf, name, question, truth, at_most):
    opened = shelf.opened(f"homes, {name}")
    rows = homes(5_000) if name == "interval" else homes()
    scale = (
        opened.n_rows / len(rows)
        if question[0] in ("crosstab", "histogram") and name.startswith("dip")
        else 1.0
    )
    true, found = np.asarray(truth(rows), float) * scale, ask(opened, *question)
    agrees(found, true, at_most)
    if question[0] == "crosstab":
        pd.testing.assert_frame_equal(opened.crosstab(*question[:0:-1]).estimate, found.estimate.T)
    if (name, question) in [each[:2] for each in CORRECTED]:
        released = opened.to_pandas()
        if name == "interval":
            released["price"] = (
                released["price_lower"].clip(lower=0.0) + released["price_upper"].clip(upper=200.0)
            ) / 2
        plain = np.asarray(truth(released), float)
        assert np.abs(plain - true).sum() > 1.5 * np.abs(np.asarray(found.estimate) - true).sum()
        assert (np.abs(plain - true) > 4.0 * np.asarray(found.standard_error)).any()


def test_ranges_have_a_distribution_and_an_estimator(shelf):
    opened = shelf.opened("homes, interval")
    assert isinstance(opened.npmle("price"), NPMLE)
    median = opened.quantile("price")
    assert median.estimate == pytest.approx(homes(5_000)["price"].median(), abs=6.0)
    assert 0.5 < median.standard_error < 6.0
    low, high = median.interval()
    assert low <= median.estimate <= high
    assert opened.regress("price", "years").estimator_.coef_[0] == pytest.approx(
        opened.slope("price", "years").estimate.iloc[0]
    )


def test_records_know_the_noise_of_their_tables(shelf):
    opened = shelf.opened("homes, copula")
    plain = float(opened.to_pandas()["rating"].std() / np.sqrt(opened.n_rows))
    assert opened.mean("rating").standard_error > plain  # an error that knows of no noise
    assert opened.mean("rating", by="town").standard_error.min() > 1.2 * plain
    unknown = opened.slope("rating", "years", "price")
    with refused(
        r"no bound on the bias is known.*; see `limits`; interval\(approximate=True\)",
    ):
        unknown.interval()
    assert np.all(np.diff(unknown.interval(approximate=True), axis=0) > 0)
    # two columns: from their noisy table, which no model bends
    for known in (opened.mean("rating", by="town"), opened.crosstab("kind", "rating")):
        assert np.all(np.diff(known.interval(), axis=0) > 0)


# ---- averages over all rows: the distribution is kept, so they are the released ones, or those of
# the noisy counts that the reference is


@pytest.mark.parametrize("name", ["holdout", "histogram", "tree"])
def test_shares_and_means_of_all_rows_are_the_released_ones_or_those_of_the_counts(shelf, name):
    """With errors that are neither too small nor too large."""
    opened = shelf.opened(f"levels, {name}")
    rows, z, plain = opened.to_pandas(), [], []
    for column in LEVEL_NAMES:
        share, average = opened.share(column), opened.mean(column)
        slack = 1e-9 if name == "holdout" else 4.0  # standard errors, which are those of the counts
        assert abs(average.estimate - rows[column].mean()) < slack * average.standard_error
        released = rows[column].value_counts(normalize=True).reindex(range(1, 6), fill_value=0.0)
        assert (np.abs(share.estimate - released) <= slack * share.standard_error + 1e-12).all()
        of_rows = np.sqrt(LEVEL_SHARES * (1 - LEVEL_SHARES) / opened.n_rows)
        assert (
            share.standard_error > 1.02 * of_rows
        ).all()  # the draw of the reference, and its noise
        assert (share.standard_error < 4.0 * of_rows).all()
        z += [
            *((share.estimate - LEVEL_SHARES) / share.standard_error),
            (average.estimate - LEVEL_SHARES @ np.arange(1, 6)) / average.standard_error,
        ]
        of_draws = of_rows * (np.sqrt(2) if name == "holdout" else 1.0)
        plain += [*((share.estimate - LEVEL_SHARES) / of_draws)]
    assert np.abs(z).max() <= 4.0
    assert 0.6 <= np.sqrt(np.mean(np.square(z))) <= 1.4
    assert (
        name != "histogram" or np.sqrt(np.mean(np.square(plain))) > 1.5
    )  # without the noise of the counts they would be too small


def test_tables_along_a_tree_hold_the_noise_of_their_counts(shelf):
    opened, z = shelf.opened("levels, tree"), []
    for one, two in opened.card["mechanism"]["edges"]:
        stay = LEVEL_STAYS ** abs(int(one[1:]) - int(two[1:]))
        truth = 6_000 * (
            stay * np.diag(LEVEL_SHARES) + (1 - stay) * np.outer(LEVEL_SHARES, LEVEL_SHARES)
        )
        found = opened.crosstab(one, two)
        z.append(((found.estimate - truth) / found.standard_error).to_numpy())
        assert (
            found.standard_error.to_numpy() > 1.01 * np.sqrt(2 * truth * (1 - truth / 6_000))
        ).mean() > 0.8
    assert np.abs(z).max() <= 4.0
    assert 0.6 <= np.sqrt(np.mean(np.square(z))) <= 1.4


@pytest.mark.parametrize("name", ["levels, histogram", "levels, holdout"])
def test_later_releases_of_a_growing_table_are_corrected(shelf, name):
    """Their reference is made of earlier rows: their cards tell of no noise of counts, and of no held-out rows."""
    first, content = shelf.opened(name), shelf.card(name)
    content["accounting"]["events"]["events"] = content["accounting"]["events"]["events"][-1:]
    content["guarantee"]["unprotected"]["fraction"] = 0.0
    found = replace(first, content=content).share("c0")
    assert not np.allclose(found.estimate, first.share("c0").estimate)
    agrees(found, LEVEL_SHARES, 1.0)


def test_what_a_channel_leaves_too_little_of_has_a_wide_interval_or_no_error(shelf):
    found = shelf.opened("levels, histogram").crosstab("c0", "c1")
    assert says(found, "the noise leaves little of them")
    low, high = found.interval()
    shares = shelf.opened("levels, histogram").share("c0")
    most = np.minimum.outer(*[6_000 * shares.interval(0.99)[1].to_numpy()] * 2)
    assert (low.to_numpy() >= 0.0).all()
    assert (high.to_numpy() <= 1.1 * most).all()
    opened = shelf.opened("levels, holdout")
    points = opened._points("side")
    assert points.sampling == 1 / opened.n_rows
    assert (
        points._share_error(np.array([1.0, 0.0]), 0.0, np.zeros(2), 0.0, points.sampling) > 0
    ).all()  # a level without rows is not known to be absent


# ---- dates and nulls


@pytest.mark.parametrize("name", DATED)
@pytest.mark.parametrize("column", ["when", "day"])
def test_dates_go_in_and_come_out(shelf, name, column):
    opened = shelf.opened(name)
    if column not in opened.card["columns"]:
        return
    dates = pd.to_datetime(rides()[column])
    slack = pd.Timedelta(days=4 if name == "rides, cells" else 1)  # half a cell
    average = opened.mean(column)
    assert pd.Timedelta(0) < average.standard_error < pd.Timedelta(days=2.5)
    assert abs(average.estimate - dates.mean()) < 4 * average.standard_error + slack
    assert not says(average, "heavy tail")
    low, high = average.interval(approximate=average.bias_bound is None)
    assert low < average.estimate < high
    assert str(average.estimate) in repr(average)
    several = opened.quantile(column, [0.25, 0.5])
    assert several.estimate[0.25] < several.estimate[0.5] == opened.quantile(column).estimate
    low, high = opened.quantile(column).interval(0.9999)
    assert low - slack < dates.median() < high + slack
    assert high - low < pd.Timedelta(days=20)
    counted = opened.histogram(column, bins=DATES)
    assert counted.estimate.index[0] == pd.Interval(
        FIRST, pd.Timestamp("2026-02-01"), closed="left"
    )
    low, high = map(pd.to_datetime, (DATES[:-1], DATES[1:]))
    truth = [((dates >= a) & (dates < b)).sum() for a, b in zip(low, high, strict=True)]
    scale = opened.n_rows / len(dates) if name == "rides, holdout" else 1.0
    bias = 0 if counted.bias_bound is None else counted.bias_bound.to_numpy()
    split = 200 if name == "rides, cells" else 0
    assert (
        np.abs(counted.estimate - scale * np.array(truth))
        < 4 * counted.standard_error + bias + split
    ).all()
    with refused("the edges of a column of dates are dates"):
        opened.histogram(column, bins=[1, 2])


@pytest.mark.parametrize(("name", "n_cells"), [("homes, tables", 20), ("homes, cells", 40)])
def test_ranges_whose_edges_are_ends_of_cells_are_cells(name, n_cells, shelf):
    """They hold their upper edge, as cells do: a range that did not would be unsure by a whole cell."""
    opened = shelf.opened(name)
    ends = opened.card["columns"]["price"]["edges"]
    found = opened.histogram("price", n_cells // 5)
    index = found.estimate.index
    assert index.closed == "right"
    assert [*index.left, index.right[-1]] == pytest.approx(ends[::5])
    assert (found.bias_bound < 0.2 * found.estimate.max()).all()
    assert not says(found, "inside a cell")
    # up to an end, and not below it, cells tell how many rows there are
    up_to, below = (opened.where(f"price {sign} {ends[5]}").count() for sign in ("<=", "<"))
    assert up_to.estimate == pytest.approx(found.estimate.iloc[0])
    assert up_to.bias_bound < below.bias_bound
    assert says(below, "inside a cell")
    assert opened.histogram("price", [0.0, 1.3, 100.0, 200.0]).estimate.index.closed == "left"


@pytest.mark.parametrize(
    ("name", "column", "bins"),
    [("rides, tables", "day", DATES), ("rides, tables", "when", 73), ("rides, cells", "when", 12)],
)
def test_ranges_of_cells_that_begin_at_their_edges_hold_these(name, column, bins, shelf):
    """Those of whole numbers: days, and milliseconds of a time."""
    found = shelf.opened(name).histogram(column, bins)
    assert found.estimate.index.closed == "left"
    assert not says(found, "inside a cell")


def test_kept_dates_are_dates(shelf):
    opened, rows = shelf.opened("rides, tree"), rides()
    assert abs(opened.mean("seen").estimate - rows["seen"].mean()) < pd.Timedelta(milliseconds=1)
    groups = opened.mean("seen", by="firm")
    assert groups.estimate.loc[7] == pytest.approx(
        rows[rows["firm"] == 7]["seen"].mean(), abs=pd.Timedelta(milliseconds=1)
    )
    assert (groups.standard_error > pd.Timedelta(0)).all()
    assert len(groups.to_frame()) == 2
    assert len(repr(groups)) < 400


@pytest.mark.parametrize("name", DATED)
def test_means_leave_nulls_out(shelf, name):
    opened, riders = shelf.opened(name), rides()["riders"]
    found = opened.mean("riders")
    agrees(found, riders.mean(), 0.2)
    assert "rows without a value are left out" in found.limits
    agrees(opened.mean("riders", values=[0, 1, 2, 3]), riders.fillna(0).mean(), 0.2)
    with refused("for each of null, 1, 2, 3"):
        opened.mean("riders", values=[1, 2, 3])
    if "firm" in opened.card["columns"] and name == "rides, holdout":
        groups = opened.mean("riders", by="firm")
        agrees(groups, rides().groupby("firm")["riders"].mean().astype(float), 0.5)
        assert "rows without a value are left out" in groups.limits


@pytest.mark.parametrize(
    "values",
    [[1.0, 1.0, np.nan], [dt.date(2020, 1, 1), dt.date(2020, 1, 1), None]],
    ids=["numbers", "dates"],
)
@pytest.mark.parametrize("weight", [0.0, -1.0])
def test_rows_that_weigh_nothing_have_no_mean(values, weight):
    """Noise may weigh them less than nothing, and all other rows are null."""
    frame = pd.DataFrame({"x": pd.Series(values), "g": ["a", "a", "a"]})
    given = {
        "weights": np.array([weight, weight, 9.0]),
        "n_rows": 7.0,
        "sampling": 0.1,
        "levels": {"g": ["a"]},
        "dates": find_scales(frame),
    }
    points = Points(frame=frame, **given)
    with refused(
        "column 'x': the rows with a value cannot be told from the noise; release with",
    ):
        points.mean("x")
    groups = points.mean("x", by="g")
    assert groups.standard_error.isna().all()
    assert "have no estimate" in repr(groups)


def test_bounds_of_ranges_are_dates_of_all_years():
    assert count_since_1970("9999-12-31", 86_400_000_000, last=True) == 2_932_896
    assert count_since_1970("9999-12-31", 1_000, last=True) == 253_402_300_799_999
    assert count_since_1970("0001-01-01 01:00:00+01:00", 1_000_000, last=False) == -62_135_596_800


# ---- what is offered


@pytest.mark.parametrize("name", [*OPENED, *DATED, "levels, tree"])
def test_a_question_is_offered_where_it_is_answered(shelf, name):
    """A column of dates explains nothing."""
    opened = shelf.opened(name)

    @cache
    def is_answered(question, words):
        try:
            return isinstance(getattr(opened, question)(*words), Result | NPMLE)
        except dpdask.SpecError:
            return False

    assert (
        "when" not in opened.columns.index or "slope" not in opened.columns.loc["when", "answers"]
    )
    for column, answers in opened.columns["answers"].items():
        others = [other for other in opened.columns.index if other != column]
        asked = {
            "histogram": [
                (column, tuple(DATES) if column in ("when", "day", "seen") else (0, 1, 4))
            ],
            "crosstab": [(column, other) for other in others],
            "slope": [(column, other) for other in others] + [(other, column) for other in others],
        }
        for question in ("mean", "share", "histogram", "quantile", "crosstab", "slope", "npmle"):
            answered = any(
                is_answered(question, words) for words in asked.get(question, [(column,)])
            )
            assert answered or question not in answers.split(", "), (column, question)


REFUSED = [
    ("homes, dip", ("npmle", "price"), "holds values, not ranges; use"),
    ("homes, dip", ("share", "price"), "use histogram"),
    ("homes, dip", ("histogram", "rating"), "use share"),
    ("homes, dip", ("fit", None, "rating"), "not weighted cells"),
    ("homes, dip", ("mean", "raitng"), "did you mean 'rating'"),
    ("homes, dip", ("mean", "price", "rating"), "only its own distribution is kept"),
    (
        "homes, dip",
        ("slope", "years", "price"),
        "one private column, as the response if it has no levels",
    ),
    ("homes, dip", ("quantile", "price", 90), "lies between 0 and 1"),
    (
        "homes, dip",
        ("quantile", ["price"]),
        "a list: one column is expected; give a name such as 'price'",
    ),
    (
        "homes, dip",
        ("crosstab", "town", {"rating"}),
        "crosstab, a set: one column is expected; give its name, a text",
    ),
    (
        "homes, dip",
        ("slope", "rating", ["years", "town"]),
        "slope, a list: one column is expected; give a name such as 'years'",
    ),
    ("homes, dip", ("to_pandas", "rating"), "must be a list of names"),
    (
        "homes, dip",
        ("to_pandas", ["rating", "twon"]),
        "column 'twon': no released column has this name; did you mean 'town'?",
    ),
    ("homes, dip known", ("slope", "years", "price"), "if it has no levels, and otherwise kept"),
    (
        "homes, dip",
        ("mean", "years", "rating"),
        "noise of its own; use crosstab('years', 'rating')",
    ),
    ("homes, interval", ("share", "price"), "known as ranges"),
    ("homes, interval", ("npmle", "years"), "was kept"),
    ("homes, interval", ("slope", "years", "price"), "a range explains only if"),
    ("homes, copula", ("fit", None, "rating"), "carry no weights"),
    ("homes, copula", ("mean", "kind"), "does not hold numbers"),
    (
        "homes, copula",
        ("share", ("kind", "town")),
        "a tuple: one column is expected; give a name such as 'kind'",
    ),
    ("homes, copula", ("histogram", "kind"), "does not hold numbers; use share()"),
    ("homes, cells", ("regress", "price", "years"), "weighted cells"),
    ("homes, cells", ("fit", logistic, "price", ["years"]), "one column is expected"),
    ("homes, cells", ("fit", "price", "years", "price"), "must be a function"),
    ("homes, cells", ("slope", "price"), "slope: a regression needs"),
    ("homes, tables", ("slope", "rating", "rating"), "named twice"),
    (
        "homes, tables",
        ("crosstab", "rating", "price"),
        "no released table has these columns; use one of the tables town x rating, price",
    ),
    ("rides, holdout", ("quantile", "when", "half"), "lies between 0 and 1"),
    ("rides, holdout", ("crosstab", "firm", "firm"), "named twice"),
    ("rides, holdout", ("mean", "riders", "riders"), "named twice"),
    ("rides, holdout", ("histogram", "firm", ["a", "b"]), "finite numbers that increase"),
    ("rides, cells", ("slope", "riders", "when"), "holds dates"),
    *(
        (
            f"homes, {name}",
            ("mean", "price", ["years", "kind"]),
            "a list: one column is expected; give",
        )
        for name in ("dip", "copula", "cells", "interval")
    ),
    *(
        (f"homes, {name}", ("mean", ["price"]), "a list: one column is expected")
        for name in ("dip", "copula", "cells", "interval", "tables")
    ),
]


@pytest.mark.parametrize(("name", "question", "words"), named(REFUSED))
def test_what_is_not_supported_is_one_line(shelf, name, question, words):
    with pytest.raises(dpdask.SpecError) as caught:
        ask(shelf.opened(name), *question)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_groups_of_what_has_none_are_refused_with_what_to_ask(shelf):
    opened = shelf.opened("rides, holdout")
    with refused("takes no groups"):
        opened.quantile("when", 0.5, by="firm")
    with refused(r"use crosstab\('firm', 'riders'\)"):
        opened.share("riders", by="firm")


# ---- the folder


def test_the_table_the_card_and_the_columns(shelf, monkeypatch):
    opened = shelf.opened("homes, dip")
    assert repr(opened).startswith("OpenedRows(dip, ")
    assert len(repr(opened)) < 120
    opened.card["columns"].clear()
    assert list(opened.columns.index) == ["rating", "price", "town", "years"]
    assert opened.columns.loc["price", "answers"] == "mean, histogram, quantile, slope"
    assert opened.columns.loc["town", "answers"] == "share, crosstab"
    assert opened.mean("years").estimate == pytest.approx(
        opened.to_pandas()["years"].mean()
    )  # of a kept column
    rows = opened.to_pandas()
    pd.testing.assert_frame_equal(
        opened.to_pandas(name for name in ("town", "rating")), rows[["town", "rating"]]
    )  # type: ignore[arg-type]
    assert len(rows) == opened.n_rows == pytest.approx(0.75 * len(homes()), rel=0.05)
    groups = opened.mean("rating", by="town")
    assert groups.estimate.index.tolist() == TOWNS
    monkeypatch.setattr("dpdask.analysis.rows._IN_MEMORY", 10)  # a large table is counted lazily
    with dask.config.set(scheduler="synchronous"):
        lazy = opened.to_dask()
        assert lazy.npartitions == len(opened.shards) > 1
        pd.testing.assert_frame_equal(lazy.compute().reset_index(drop=True), rows)
        pd.testing.assert_series_equal(opened.mean("rating", by="town").estimate, groups.estimate)


def test_results_are_short_and_widen_by_their_bias():
    found = Result(estimate=3.0, standard_error=0.5, bias_bound=0.25, limits=("of rows",))
    assert repr(found) == "3 (95 %: 1.77002 to 4.22998)\nof rows"
    assert found.interval() == pytest.approx((3 - 0.98 - 0.25, 3 + 0.98 + 0.25), abs=1e-3)
    assert (
        repr(Result(estimate=3.0, standard_error=None, bias_bound=None))
        == "3\nno interval: no standard error is known"
    )
    unbounded = Result(estimate=3.0, standard_error=0.5, bias_bound=None)
    assert repr(unbounded) == "3 (standard error 0.5)\nno interval: no bound on the bias is known"
    assert unbounded.interval(approximate=True) == pytest.approx((2.02, 3.98), abs=1e-3)
    for error in (None, 0.0, pd.Timedelta(0)):
        with refused("no standard error is known"):
            Result(estimate=3.0, standard_error=error).interval()
    for confidence in (95, 0.0, 1.0, "0.9"):
        with refused("between 0 and 1"):
            found.interval(confidence)  # type: ignore[arg-type]
    table = Result(estimate=pd.Series(range(20)), standard_error=pd.Series([0.1] * 20))
    assert repr(table).endswith("… 8 more")


def test_what_one_group_does_not_know_is_missing_there_alone():
    parts = [
        Result(estimate=2.0, standard_error=0.5, bias_bound=0.25),
        Result(estimate=3.0, standard_error=0.5, bias_bound=None, limits=("of few rows",)),
        Result(estimate=np.nan, standard_error=np.nan, bias_bound=np.nan),
    ]
    index = pd.Index(["a", None, "c"], name="g")
    found = Result.gather(parts, index)
    low, high = found.interval()
    assert (low.iloc[0], high.iloc[0]) == pytest.approx(
        (2 - 0.98 - 0.25, 2 + 0.98 + 0.25), abs=1e-3
    )
    assert low.isna().tolist() == high.isna().tolist() == [False, True, True]
    assert found.limits == ("of few rows",)
    assert [line.split()[0] for line in repr(found).splitlines()[2:5]] == ["a", "null", "c"]
    ranks = Result(estimate=2.0, standard_error=None, find_ends=lambda by: (2.0 - by, 2.0 + by))
    low, high = Result.gather([ranks, parts[2]], index[:2]).interval()
    assert low.isna().tolist() == [False, True]
    with refused("no bound on the bias is known"):
        Result.gather([parts[1]], index[:1]).interval()


@pytest.mark.parametrize("index", [[np.nan, 1.0], [pd.NA, "x"], [None, "x"], [pd.NaT, 3]])
def test_a_null_has_one_name_in_all_tables(index):
    one = Result(estimate=pd.Series([1.0, 2.0], index), standard_error=pd.Series([0.1, 0.1], index))
    assert repr(one).splitlines()[1].split()[0] == "null"
    table = pd.DataFrame([[1.0, 2.0]] * 2, index, ["a", None])
    pairs = repr(Result(estimate=table, standard_error=table / 10.0))
    assert pairs.count("null") == 3
    assert not any(name in pairs for name in ("NaN", "NaT", "<NA>", "None"))


def test_intervals_end_where_the_true_value_cannot_lie():
    found = Result(estimate=3.0, standard_error=2.0, bias_bound=1.0, possible=(2.0, 4.5))
    assert found.interval() == (2.0, 4.5)
    many = replace(found, estimate=pd.Series([3.0, np.nan]), standard_error=pd.Series([0.1, 0.1]))
    low, high = many.interval()
    assert (low[0], high[0]) == pytest.approx((2.0, 4.196), abs=1e-3)
    assert low.isna().tolist() == high.isna().tolist() == [False, True]


def test_tables_show_ends_and_limits_and_an_error_of_zero_is_not_known():
    index = pd.Index(["a", "<b>"], name="town")
    found = Result(
        estimate=pd.Series([2.0, 0.0], index),
        standard_error=pd.Series([0.5, 0.0], index),
        limits=("of <rows>",),
    )
    lines = repr(found).splitlines()
    assert lines[0].split() == ["estimate", "95", "%", "low", "95", "%", "high"]
    assert lines[2].split() == ["a", "2", "1.02002", "2.97998"]
    assert lines[3].split() == ["<b>", "0", "unknown", "unknown"]
    assert lines[-1] == "of <rows>"
    frame = found.to_frame(0.5)
    assert frame["low"]["a"] == pytest.approx(2.0 - 0.5 * 0.67449, abs=1e-4)
    assert frame["bias_bound"].tolist() == [0.0, 0.0]
    html = found._repr_html_()
    assert "1.02002" in html
    assert "&lt;b&gt;" in html
    assert "of &lt;rows&gt;" in html
    days = pd.Timestamp("2026-03-01")
    dated = Result(estimate=days, standard_error=pd.Timedelta("1D"))
    assert repr(dated).startswith("2026-03-01 00:00:00 (95 %: 2026-02-27")
    assert "2026-03-02" in dated._repr_html_()


def test_the_documentation_runs(shelf, tmp_path, monkeypatch, capsys):
    """Every block of the page runs, one after the other, on releases of these names."""
    (tmp_path / "out").mkdir()
    for end, name in {
        "": "dip",
        "-interval": "interval",
        "-synthetic": "model",
        "-cells": "cells",
        "-tables": "tables",
    }.items():
        (tmp_path / "out" / f"homes{end}").symlink_to(shelf.release(f"homes, {name}"))
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(
        r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    names = {}
    for block in blocks:
        exec(compile(block, PAGE.name, "exec"), names)
    assert len(blocks) == 10
    assert "use crosstab(), or the mechanism `copula`" in capsys.readouterr().out
    assert 0.0 < names["share_below_50"] < 1.0


def test_folders_that_hold_no_release_or_another_one_are_refused(shelf, tmp_path):
    def alter(name, change):
        copy = shelf.copy("homes, tables", tmp_path / f"copy-{name}")
        path = copy / "_dpdask" / name
        path.write_text(json.dumps(change(json.loads(path.read_text()))))
        return copy

    with refused("no finished release", dpdask.InputError):
        dpdask.open(str(tmp_path))
    copy = alter("release.json", lambda card: card | {"name": "other"})
    with refused("not the one that the manifest names", dpdask.InputError):
        dpdask.open(str(copy))
    shutil.copy(copy / "_dpdask" / "manifest.json", copy / "_dpdask" / "manifest-00001.json")
    with refused("holds 2 releases"):
        dpdask.open(str(copy))
    pq.write_table(
        pa.table({"secret": [1]}), tmp_path / "secret.parquet"
    )  # no manifest names a file outside of its folder
    copy = alter(
        "manifest.json",
        lambda manifest: (
            manifest | {"shards": [manifest["shards"][0] | {"name": "../secret.parquet"}]}
        ),
    )
    with refused("the manifest cannot be read", dpdask.OutputError):
        dpdask.open(str(copy))


def test_a_release_in_a_store_is_opened_by_its_url(shelf):
    fsspec.filesystem("memory").put(
        str(shelf.release("homes, tables")), "/opened/tables", recursive=True
    )
    assert (
        dpdask.open("memory://opened/tables").mean("rating").estimate
        == shelf.opened("homes, tables").mean("rating").estimate
    )


@pytest.mark.parametrize("reference", ["holdout", "chain"])
def test_values_that_rows_of_a_hold_out_share_are_in_the_bound_on_the_bias(tmp_path, reference):
    rng = default_rng(8)
    rows = pd.DataFrame({"x": np.where(rng.random(6_000) < 0.3, 100.0, rng.uniform(0, 60, 6_000))})
    schema = {"x": continuous([0.0, 200.0])}
    mechanism = {"kind": "dip", "reference": {"kind": reference, "fraction": 0.25}}
    opened = release_of(tmp_path, rows, schema=schema, mechanism=mechanism)
    told = opened.card["columns"]["x"]["reference"]["spread_rank_at_most"]
    assert 0.25 < told < 0.4  # of the value that many share
    for found, truth in ((opened.mean("x"), rows["x"].mean()), (opened.quantile("x", 0.8), 100.0)):
        low, high = found.interval()
        assert low <= truth <= high
    counts = opened.histogram("x", [0, 80, 200])
    low, high = counts.interval()
    share = (rows["x"] < 80).mean() * opened.n_rows
    assert low.iloc[0] <= share <= high.iloc[0]
    assert low.iloc[0] > 0.2 * share


def test_a_column_without_a_channel_on_its_levels_has_the_bounds_of_the_distributions(tmp_path):
    rng = default_rng(9)
    town = rng.choice(["A", "B"], 6_000, p=[0.6, 0.4])
    stars = np.where(rng.random(6_000) < np.where(town == "A", 0.8, 0.2), 3, 1)
    rows = pd.DataFrame({"town": town, "stars": stars, "years": rng.integers(1, 4, 6_000)})
    schema = {"town": {"role": "keep"}, "stars": discrete([1, 3]), "years": discrete([1, 2, 3])}
    mechanism = {"kind": "dip", "reference": {"kind": "chain", "fraction": 0.25}}
    opened = release_of(tmp_path, rows, schema=schema, mechanism=mechanism)
    found = opened.crosstab("town", "stars")
    truth = opened.n_rows * pd.crosstab(rows["town"], rows["stars"], normalize="all")
    low, high = found.interval()
    assert ((low <= truth) & (truth <= high)).all(axis=None)
    assert (high.loc["B"] <= 1.02 * (town == "B").mean() * opened.n_rows).all()
    off = (found.estimate - truth).abs()
    assert (off > 2.0 * found.standard_error).any(axis=None)  # the released table alone is wrong
    assert says(found, "the dependence is weakened")
    pd.testing.assert_frame_equal(opened.crosstab("stars", "town").estimate, found.estimate.T)


@pytest.mark.parametrize("channel", ["laplace", "optimal"])
@pytest.mark.parametrize("kind", ["known", "public", "histogram", "holdout"])
def test_numbers_are_answered_by_the_channel_of_their_ranks(tmp_path, kind, channel):
    """Whatever the reference is: the rows have another distribution than a declared one and a public table have, values on its bound, and nulls."""
    rng = default_rng(12)
    n = 20_000
    rows = pd.DataFrame({"group": rng.integers(0, 2, n)})
    x = np.where(rng.random(n) < 0.3, 0.0, 20 + 50 * rows["group"] + 20 * rng.random(n))
    rows["x"] = np.where(rng.random(n) < 0.2, np.nan, x)
    public = np.where(rng.random(n) < 0.1, 0.0, 90 * rng.random(n))
    declared = {"x": {"name": "uniform", "loc": 0.0, "scale": 100.0, "null": 0.3}}
    references = {
        "known": {"columns": declared},
        "public": {"path": str(tmp_path / "public.parquet")},
        "histogram": {},
        "holdout": {"fraction": 0.25},
    }
    pd.DataFrame({"x": np.where(rng.random(n) < 0.3, np.nan, public)}).to_parquet(
        tmp_path / "public.parquet"
    )
    schema = {"group": {"role": "keep"}, "x": continuous([0.0, 100.0], nulls="level")}
    mechanism = {"kind": "dip", "channel": channel, "reference": {"kind": kind, **references[kind]}}
    privacy = {"epsilon": 2.0, "delta": 0, "adjacency": "replace-one"}
    given = {"schema": schema, "mechanism": mechanism, "privacy": privacy}
    opened = release_of(tmp_path, rows, insecure_seed=3, **given)
    told = rows.dropna()
    asked = [
        (opened.mean("x"), told["x"].mean()),
        (opened.mean("x", within=(10, 60)), told["x"].clip(10, 60).mean()),
        (opened.quantile("x", 0.75), told["x"].quantile(0.75)),
        (opened.mean("x", by="group"), told.groupby("group")["x"].mean()),
        (opened.slope("x", "group"), [np.polyfit(told["group"], told["x"], 1)[0]]),
    ]
    if kind != "holdout":  # whose counts are of the released rows
        counts = [(told["x"] < 50).sum(), (told["x"] >= 50).sum()]
        asked.append((opened.histogram("x", [0, 50, 100]), counts))
    for found, truth in asked:
        low, high = found.interval(0.999)
        assert np.all((low <= truth) & (truth <= high)), (found, truth)
    # of the released rows the groups are nearer to each other
    near = opened.to_pandas().groupby("group")["x"].mean().diff().iloc[1]
    slope, truth = asked[4][0].estimate.iloc[0], asked[4][1][0]
    assert abs(slope - truth) < 0.75 * abs(near - truth)
