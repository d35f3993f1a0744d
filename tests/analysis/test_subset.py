"""Parts of a release, in groups: counts, means and sums with conditions, lines, plots; answers hold within their intervals, or are refused."""

import re
import subprocess
import sys
import warnings
from contextlib import suppress
from dataclasses import replace
from functools import reduce

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from e2e.helpers import categorical, continuous, refused, run_here, write_job
from scipy import stats
from shelf import homes, rides

import dpdask
from dpdask.analysis.results import Result
from pipelines.benchmarks import coverage
from pipelines.benchmarks.coverage import Question, answer, judge, measure

OLD = "years >= 3"


def old(rows):
    return rows[rows["years"] >= 3]


# by name: the question, and what is true of rows
ASKED = {
    "mean": (
        lambda opened: opened.where(OLD).mean("rating"),
        lambda rows: old(rows)["rating"].mean(),
    ),
    "means": (
        lambda opened: opened.where(OLD).groupby("town").mean("rating"),
        lambda rows: old(rows).groupby("town")["rating"].mean(),
    ),
    "counts": (
        lambda opened: opened.groupby(["town", "rating"]).count(),
        lambda rows: rows.groupby(["town", "rating"]).size() / len(rows),
    ),
    "counts where": (
        lambda opened: opened.where("rating >= 4").groupby("town").count(),
        lambda rows: rows[rows["rating"] >= 4].groupby("town").size() / len(rows),
    ),
    "count of levels": (
        lambda opened: opened.where("rating in (2.0, 4.0)").count(),
        lambda rows: rows["rating"].isin([2, 4]).mean(),
    ),
    "count of a range": (
        lambda opened: opened.where("x > 50 and x <= 80").count(),
        lambda rows: ((rows["x"] > 50) & (rows["x"] <= 80)).mean(),
    ),
    "sums": (
        lambda opened: opened.groupby("town").sum("rating"),
        lambda rows: rows.groupby("town")["rating"].sum() / len(rows),
    ),
    "sum where": (
        lambda opened: opened.where(OLD).sum("rating"),
        lambda rows: old(rows)["rating"].sum() / len(rows),
    ),
    "intercept": (
        lambda opened: opened.intercept("rating", "years"),
        lambda rows: np.polyfit(rows["years"], rows["rating"], 1)[1],
    ),
    "r squared": (
        lambda opened: opened.r_squared("rating", "years"),
        lambda rows: rows[["rating", "years"]].corr().iloc[0, 1] ** 2,
    ),
}
WIDER = ("sum", "intercept")  # whose errors add up at worst
RUNS = 30


@pytest.fixture(scope="module", params=["dip holdout optimal-unbiased", "marginals 20"])
def runs(request, tmp_path_factory):
    """Thirty releases of a table, opened."""
    source, folder = coverage.table("plain"), tmp_path_factory.mktemp("runs")
    return request.param, [
        coverage.run(request.param, source, seed, folder, n_rows=4_000)
        for seed in range(1, RUNS + 1)
    ]


def find_cell(runs, name, plant=None):
    ask, truth = ASKED[name]
    question = Question((), ask, lambda rows, *_: truth(rows), counts=name.startswith(("c", "sum")))
    kind, opened = runs
    answers = [
        answer(question, each, coverage.table("plain"), coverage.count_rows_of(each), plant)
        for each in opened
    ]
    return measure(answers, release=kind, table="plain", question=name)


def shorten(found):
    find = found.reach
    return replace(
        found,
        standard_error=None if found.standard_error is None else found.standard_error / 3.0,
        find_ends=lambda deviations: find(deviations / 3.0),
    )


REFUSED = {
    "dip holdout optimal-unbiased": {
        "r squared": "joint error is not known",
        "count of a range": "no column 'x'",
    },
    "marginals 20": {"means": "no released table"},
}


@pytest.mark.more
@pytest.mark.parametrize("name", ASKED)
def test_intervals_hold_the_truth_or_are_refused(runs, name):
    cell = find_cell(runs, name)
    wanted = REFUSED[runs[0]].get(name, "")
    assert re.search(wanted, cell.refusal) if wanted else not cell.refusal, cell
    wrong = judge(cell)
    assert not wrong or (name.startswith(WIDER) and "times as wide" in wrong), (cell, wrong)


@pytest.mark.more
def test_intervals_of_a_third_of_the_width_are_found_out(runs):
    for name in ("counts", "counts where"):
        assert judge(find_cell(runs, name, shorten)), name


# ---- one release of each kind

Z = 4.5  # standard errors
KINDS = [
    f"homes, {end}" for end in ("dip", "dip of pairs", "interval", "copula", "cells", "tables")
]
TRUE = [
    (
        lambda o: o.where("years > 4").groupby("town").mean("rating"),
        lambda r: r[r["years"] > 4].groupby("town")["rating"].mean(),
    ),
    (
        lambda o: o.where('town = "A" or years > 4').count(),
        lambda r: ((r["town"] == "A") | (r["years"] > 4)).mean(),
    ),
    (
        lambda o: o.where('kind in ("flat", "other")').groupby("years").count(),
        lambda r: r[r["kind"] != "house"].groupby("years").size() / len(r),
    ),
    (lambda o: o.where("price > 60").count(), lambda r: (r["price"] > 60).mean()),
    (
        lambda o: o.groupby("years").sum("price"),
        lambda r: r.groupby("years")["price"].sum() / len(r),
    ),
    (
        lambda o: o.where("rating != 3").mean("rating"),
        lambda r: r[r["rating"] != 3]["rating"].mean(),
    ),
    (lambda o: o.intercept("price", "years"), lambda r: np.polyfit(r["years"], r["price"], 1)[1]),
    (
        lambda o: o.r_squared("price", "years"),
        lambda r: r[["price", "years"]].corr().iloc[0, 1] ** 2,
    ),
]


@pytest.mark.parametrize("name", KINDS)
def test_each_kind_of_release_answers_right_or_says_why_not(name, shelf):
    opened, rows, answered = shelf.opened(name), homes(), 0
    if name == "homes, interval":
        rows = homes(5_000)
    for ask, truth in TRUE:
        try:
            found = ask(opened)
            low, high = found.interval(2 * 0.9999966 - 1)
        except dpdask.SpecError:
            continue
        answered += 1
        true = np.asarray(truth(rows), float)
        if np.max(np.asarray(found.estimate)) > 100.0 and true.max() < 60.0:  # of all rows
            true = true * coverage.count_rows_of(opened)
        assert (np.asarray(low) <= true).all(), (found, true)
        assert (true <= np.asarray(high)).all(), (found, true)
    assert answered >= 2


REFUSALS = [
    ("homes, dip", lambda o: o.where("rating > 3").mean("years"), "decide which rows"),
    ("homes, dip", lambda o: o.groupby(["rating", "years"]).mean("price"), "decide which rows"),
    ("homes, dip", lambda o: o.where("price > 3").mean("price"), "needs levels"),
    ("homes, dip", lambda o: o.where("price > 3").groupby("town").count(), "randomised columns"),
    ("homes, dip", lambda o: o.where("years > 90").count(), "no released row"),
    ("homes, dip", lambda o: o.where("price > 900").count(), "no row can meet"),
    ("homes, dip", lambda o: o.where("rating > 5").count(), "no row can meet"),
    ("homes, copula", lambda o: o.where("rating > 5").count(), "no row can meet"),
    ("homes, dip", lambda o: o.where("price = 9").count(), "one range"),
    ("homes, dip", lambda o: o.where("years >").count(), "cannot be read"),
    ("homes, dip", lambda o: o.where("sex = 3").count(), "no column"),
    ("homes, dip", lambda o: o.groupby([]), "one column or more"),
    (
        "homes, dip",
        lambda o: reduce(
            lambda rows, _: rows.where("years = 1 or years > 3"), range(10), o
        ).count(),
        "1,024 alternatives together; the limit is 1,000",
    ),
    ("homes, dip", lambda o: o.groupby("town").mean("town"), "named twice"),
    ("homes, interval", lambda o: o.groupby("price").count(), "one range"),
    ("homes, interval", lambda o: o.r_squared("price", "years"), "joint error"),
    ("homes, copula", lambda o: o.where("years > 3").groupby("town").mean("rating"), "2 columns"),
    ("homes, copula", lambda o: o.where("price > 60").mean("rating"), "cuts a cell"),
    ("homes, copula", lambda o: o.groupby("price").mean("rating"), "without levels"),
    ("homes, copula", lambda o: o.intercept("rating", "years", "price"), "joint error"),
    ("homes, cells", lambda o: o.where("price >= 60").groupby("kind").count(), "cuts a cell"),
    ("homes, cells", lambda o: o.r_squared("years", "kind"), "one column of numbers"),
    ("homes, tables", lambda o: o.where('kind = "flat"').mean("rating"), "no released table"),
    ("rides, holdout", lambda o: o.where("day >= 3").count(), "of the type date32"),
    ("rides, holdout", lambda o: o.where("day >= 2026-12-31").count(), "at the upper bound"),
    ("rides, holdout", lambda o: o.where("day < 2026-12-31").count(), "at the upper bound"),
    ("rides, holdout", lambda o: o.where("day = 2026-12-30").count(), "at the upper bound"),
    ("homes, dip", lambda o: o.where("price < 200").count(), "at the upper bound"),
    ("homes, copula", lambda o: o.where("price < 200").count(), "at the upper bound"),
    ("homes, cells", lambda o: o.where("price < 200").count(), "at the upper bound"),
    ("homes, dip", lambda o: o.where("price > 9 and price < 3").count(), "exclude each other"),
    ("rides, tables", lambda o: o.where("day = 2026-02-29").count(), "write it as 2026-01-31"),
    ("rides, tables", lambda o: o.groupby("riders").sum("when"), "dates have no sum"),
    ("rides, holdout", lambda o: o.where("day > 2026-12-31").count(), "no row can meet"),
    ("rides, holdout", lambda o: o.where("day in (2026-01-02, 2026-01-04)").count(), "one range"),
    (
        "rides, cells",
        lambda o: o.where("when > 2026-02-01T12:00").groupby("riders").count(),
        "an edge of its cells, as `> 2026-01-3",
    ),
]


@pytest.mark.parametrize(("name", "ask", "why"), REFUSALS)
def test_what_would_not_be_honest_is_refused_with_a_reason(name, ask, why, shelf):
    with refused(why) as refusal:
        ask(shelf.opened(name))
    assert "\n" not in str(refusal.value)


def test_a_plain_answer_is_given_only_if_it_is_asked_for(shelf):
    chosen = shelf.opened("homes, copula").where("years > 3").groupby("town")
    with pytest.raises(dpdask.SpecError):
        chosen.mean("rating")
    found = chosen.mean("rating", approximate=True)
    assert "with an unknown error" in found.limits[0]
    rows = shelf.opened("homes, copula").to_pandas()
    plain = rows[rows["years"] > 3].groupby("town")["rating"].mean()
    assert found.estimate.tolist() == pytest.approx(plain.tolist())
    with refused("no standard error"):
        found.interval(approximate=True)
    cells = shelf.opened("homes, cells").where("price >= 60").groupby("kind")
    with refused("cuts a cell"):
        cells.mean("years", approximate=True)


def test_groups_without_a_condition_are_the_question_itself(shelf):
    opened = shelf.opened("homes, dip")
    pd.testing.assert_frame_equal(
        opened.groupby("town").mean("rating").to_frame(),
        opened.mean("rating", by="town").to_frame(),
    )
    for name in ("homes, dip", "homes, copula"):
        opened, n = shelf.opened(name), coverage.count_rows_of(shelf.opened(name))
        counts, shares = opened.groupby("rating").count(), opened.share("rating")
        for part, other in zip(counts.interval(), shares.interval(), strict=True):
            assert part.tolist() == pytest.approx((n * other).tolist())
        some, share = (
            opened.where("rating >= 4").count(),
            opened.mean("rating", values=[0, 0, 0, 1, 1]),
        )
        (low, high), (first, last) = some.interval(), share.interval()
        assert high - low < 1.1 * n * (last - first)
        every = opened.where("rating >= 1").count()
        assert every.interval() == (n, n)
        assert "every level" in str(every)
        total, mean = opened.where("rating >= 1").sum("rating"), opened.mean("rating")
        assert total.estimate == pytest.approx(n * mean.estimate)
        assert total.interval() == pytest.approx([n * end for end in mean.interval()], rel=0.02)
        assert type(low) is type(high) is float  # which are printed as numbers


@pytest.mark.parametrize("name", ["rides, holdout", "rides, tables"])
def test_null_has_one_word(name, shelf):
    opened = shelf.opened(name)
    by_riders = opened.groupby("riders").count()
    assert by_riders.to_frame().index[0] == "null"
    assert opened.share("riders").to_frame().index[0] == "null"
    assert "null" in repr(by_riders)
    assert "null" in by_riders._repr_html_()
    is_null = opened.where("riders is null").count()
    low, high = is_null.interval()
    n = coverage.count_rows_of(opened)
    assert low <= n * rides()["riders"].isna().mean() <= high


def test_a_count_among_all_rows_of_weighted_units_is_as_sure_as_their_share(tmp_path):
    kind, source = "dip histogram optimal-unbiased, weighted", coverage.table("units")
    for seed in (1, 3, 4):  # of which the last two have units that decide on almost all
        opened = coverage.run(kind, source, seed, tmp_path, n_rows=3_000)
        found = opened.where("rating in (2.0, 4.0)").count()
        share = opened.mean("rating", values=[0, 1, 0, 1, 0])
        rows = opened._read_rows(["user_weight"])["user_weight"].sum()
        for part, other in zip(found.interval(), share.interval(), strict=True):
            assert part == pytest.approx(rows * other)


def test_dates_have_means_by_group(shelf):
    found = shelf.opened("rides, holdout").where("firm = 7").mean("when")
    low, high = found.interval()
    assert low < found.estimate < high


@pytest.mark.parametrize("name", ["rides, holdout", "rides, tree", "rides, tables", "rides, cells"])
@pytest.mark.parametrize("column", ["when", "day"])
@pytest.mark.parametrize(
    ("condition", "meet"),
    [
        ("{} >= 2026-02-01", lambda x: x >= "2026-02-01"),
        ("{} > '2026-02-01'", lambda x: x > "2026-02-01"),
        ("{} < 2026-01-15", lambda x: x < "2026-01-15"),
        ("{} <= 2026-01-15", lambda x: x <= "2026-01-15"),
        (
            "{0} > 2026-01-10 and {0} < 2026-01-31",
            lambda x: (x > "2026-01-10") & (x < "2026-01-31"),
        ),
        ("{} = 2026-01-20", lambda x: x == "2026-01-20"),
    ],
)
def test_private_dates_are_counted(condition, meet, column, name, shelf):
    opened = shelf.opened(name)
    if column not in opened.content["columns"]:
        return
    found = opened.where(condition.format(column)).count()
    low, high = found.interval(2 * 0.9999966 - 1)
    n = coverage.count_rows_of(opened)
    true = n * meet(pd.to_datetime(rides()[column])).mean()
    assert low <= true <= high
    assert high - low < (0.6 if name == "rides, cells" else 0.35) * n


@pytest.mark.parametrize("kind", ["copula", "marginals", "histogram"])
def test_narrow_ranges_and_edges_of_cells_hold_what_is_at_them(kind, tmp_path):
    """A range inside a cell may have all of its rows or none; a cell that begins at a number holds the rows there."""
    n = 100_000
    columns = {"v": np.arange(-50, 50).repeat(n // 100).astype(float), "g": ["a", "b"] * (n // 2)}
    bounds = {"v": continuous([-1440.0, 10_000.0]), "g": categorical(["a", "b"])}
    pq.write_table(pa.table(columns), tmp_path / "in.parquet")
    mechanism = {"kind": kind, **({"cliques": [["v", "g"]]} if kind == "marginals" else {})}
    privacy = {"privacy__epsilon": 2.0, "privacy__delta": 0.0 if kind == "histogram" else 1e-7}
    job = write_job(
        tmp_path,
        tmp_path / "in.parquet",
        tmp_path / "out",
        schema=bounds,
        mechanism=mechanism,
        insecure_seed=3,
        **privacy,
    )
    run_here(job)
    opened = dpdask.open(str(tmp_path / "out"))
    missed = 0
    for v in range(-50, 50):
        low, high = opened.where(f"v >= {v} and v <= {v}").count().interval()
        missed += not low <= n / 100 <= high
    assert missed <= stats.binom.ppf(1.0 - 1e-6, 100, 0.05)
    answered = 0
    for v in range(-20, 20):
        for sign, meet in (("<", np.less), ("<=", np.less_equal), (">", np.greater)):
            with suppress(dpdask.SpecError):  # it cuts a cell
                found = opened.where(f"v {sign} {v} and g = 'a'").count()
                low, high = found.interval(2 * 0.9999966 - 1)
                assert low <= meet(columns["v"], v).sum() / 2 <= high
                answered += 1
    assert answered > 0 or kind != "histogram"


def test_the_square_of_a_correlation_near_zero_reaches_zero():
    found = Result(estimate=0.01, standard_error=0.02, bias_bound=0.0).square()
    low, high = found.interval()
    assert (low, high) == (0.0, pytest.approx((0.01 + 1.96 * 0.02) ** 2, rel=1e-3))
    far = Result(estimate=-0.5, standard_error=0.02, bias_bound=0.01).square()
    low, high = far.interval()
    assert low < 0.46**2 < 0.54**2 < high


# ---- what is shown


def test_results_and_releases_are_drawn_with_their_intervals(shelf):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    opened = shelf.opened("homes, dip")
    found = opened.mean("rating", by="town")
    ax = found.plot()
    segments = ax.containers[0][2][0].get_segments()
    low, high = found.interval()
    assert [each[0][1] for each in segments] == pytest.approx(low.tolist())
    assert [each[1][1] for each in segments] == pytest.approx(high.tolist())
    assert [label.get_text() for label in ax.get_xticklabels()] == ["A", "B", "C"]
    assert len(opened.crosstab("town", "rating").plot().containers) == 5
    assert "95 %" in opened.mean("rating").plot().get_title()
    no_bound = Result(estimate=pd.Series([1.0, 2.0]), standard_error=None)
    assert "no interval" in no_bound.plot().get_title()
    names = [ax.get_title().split(",")[0] for ax in opened.plot()]
    assert names == ["rating", "price"]
    assert len(opened.plot(["rating", "town"])) == 2
    with pytest.raises(dpdask.SpecError):
        shelf.opened("homes, interval").plot(["nothing"])
    matplotlib.pyplot.close("all")


def test_a_release_is_shown_with_its_promise_and_columns(shelf):
    opened = shelf.opened("hostile, rows")
    text = opened._repr_html_()
    assert "<script" not in text
    shown = shelf.opened("homes, copula")._repr_html_()
    assert "epsilon=4" in shown
    assert "mean, histogram" in shown


def test_plots_need_matplotlib_and_say_so(shelf, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with refused(r"dpdask\[plot\]"):
        shelf.opened("homes, dip").mean("rating").plot()


def test_plain_use_that_is_biased_is_said_where_the_frame_is_made(shelf):
    for make in (lambda o: o.to_pandas(), lambda o: o.to_dask()):
        with pytest.warns(UserWarning, match="plain group means") as said:
            make(shelf.opened("homes, dip"))
        assert [each.filename for each in said] == [__file__]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            make(shelf.opened("homes, copula"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shelf.opened("homes, dip").mean("rating", by="town")


def test_the_package_lists_its_public_names_alone():
    code = "import dpdask; print(*dir(dpdask))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(shown.stdout.split()) == set(dpdask.__all__)


@pytest.mark.parametrize(
    ("name", "by", "column"),
    [
        ("homes, dip", "town", "rating"),
        ("homes, copula", "kind", "years"),
        ("homes, cells", "kind", "years"),
    ],
)
def test_sums_of_what_is_never_negative_are_not(name, by, column, shelf):
    found = shelf.opened(name).groupby(by).sum(column)
    wide = replace(found, find_ends=lambda _: (found.estimate - 1e9, found.estimate + 1e9))
    low, high = wide.interval()
    assert (low == 0).all()
    assert (high > found.estimate).all()
