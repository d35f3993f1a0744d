"""Standard errors and bounds of opened releases are neither too small nor too large, over fresh tables and fresh noise."""

import warnings
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from e2e.helpers import categorical, continuous, discrete, load, refused, run_here, says, write_job
from numpy.random import default_rng
from scipy import stats
from strategies import zeros_and_a_tail

import dpdask
from dpdask.analysis.cells import OpenedCells
from dpdask.analysis.points import NoisyCells, Points
from dpdask.analysis.ranges import OpenedRanges
from dpdask.analysis.results import Result
from dpdask.analysis.rows import OpenedRows
from dpdask.analysis.values import HeldOut, read_edges
from dpdask.channels import calibrate, compute_zero_one, laplace, optimal
from dpdask.inference import Estimate, least_squares
from dpdask.jobs.plan import plan_job

ALPHA = 1e-6
REPEATS = 40
TOWNS = ["A", "B", "C"]
SIZES = list(range(0, 79, 4))
EDGES = [0.0, 100.0, 200.0, 300.0, 600.0]
COLUMNS = {
    "town": categorical(TOWNS),
    "size": continuous(type="int64", bounds=[0, 79]),
    "price": continuous([0.0, 1000.0]),
}


OF_TWO_LEVELS = {  # questions that give a number for each
    "share": lambda points: points.share("kind"),
    "count": lambda points: points.count("kind"),
    "histogram": lambda points: points.histogram("x", np.arange(3.0)),
    "crosstab": lambda points: points.crosstab("kind", "one").change(lambda part: part["c"]),
}


class AtHand:
    """Opened with its table at hand: no folder is read."""

    table: pd.DataFrame

    def to_pandas(self, columns=None):
        return self.table if columns is None else self.table[list(columns)]

    _read_rows = to_pandas

    @property
    def _types(self):
        return pa.Schema.from_pandas(self.table)


def at_hand(kind, table, content):
    found = type(kind.__name__, (AtHand, kind), {})(
        folder=None, shards=(), n_rows=len(table), content=content
    )
    object.__setattr__(found, "table", table)
    return found


def fit_dip(table, columns, **given):
    """Return the opened release of a table in memory."""
    schema = dpdask.Schema.from_dict({"columns": columns})
    fitted = dpdask.DIP(schema, reference=dpdask.Histogram(), **given).fit(table)
    return at_hand(OpenedRows, fitted.transform(table), fitted.card)


def points_of(frame, weights, n_rows, **given):
    return Points(
        **{
            "frame": frame,
            "weights": weights,
            "n_rows": n_rows,
            "sampling": 1.0 / n_rows,
            "levels": {},
            **given,
        }
    )


def sales(seed, n=3000):
    rng = default_rng(seed)
    size = rng.binomial(79, 0.4, n)
    price = (3.0 * size + 60.0 + rng.gamma(2.0, 40.0, n)).clip(0.0, 1000.0)
    return pd.DataFrame(
        {"town": rng.choice(TOWNS, n, p=[0.8, 0.16, 0.04]), "size": size, "price": price}
    )


def opened(seed):
    schema = dpdask.Schema.from_dict({"columns": COLUMNS})
    bins = {"price": EDGES, "size": SIZES}
    release = dpdask.PerturbedHistogram(schema, epsilon=1.0, bins=bins, insecure_seed=seed).fit(
        sales(seed)
    )
    return at_hand(OpenedCells, release.cells, release.card)


@pytest.fixture(scope="module")
def draws():
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", UserWarning
        )  # few cells stand out: these tests are about the others
        return [opened(seed) for seed in range(REPEATS)]


def test_errors_hold_the_noise_of_cells_that_were_left_out(draws):
    """Over tables and noise, the mean of a small group varies as its standard error says: empty cells that noise lists are a part of it."""
    found = [each.mean("price", by="town") for each in draws]
    estimates = np.array([each.estimate.to_numpy() for each in found])
    errors = np.array([each.standard_error.to_numpy() for each in found])
    low, high = stats.chi2.ppf([ALPHA, 1.0 - ALPHA], REPEATS - 1)
    for k in (0, 2):
        squares = (((estimates[:, k] - estimates[:, k].mean()) / errors[:, k]) ** 2).sum()
        assert 0.6 * low < squares < high, TOWNS[k]


def test_bounds_hold_the_rows_of_cells_that_were_left_out(draws):
    truth = pd.Series([0.8, 0.16, 0.04], TOWNS)
    found = [each.share("town") for each in draws]
    for each in found:
        assert (np.abs(each.estimate - truth) <= 4.9 * each.standard_error + each.bias_bound).all()
    off = np.abs(np.mean([each.estimate - truth for each in found], axis=0))
    assert (
        off > 4.9 * np.mean([each.standard_error for each in found], axis=0) / np.sqrt(REPEATS)
    ).any()  # bias that an error does not hold
    assert (off < np.mean([each.bias_bound for each in found], axis=0)).all()
    assert np.mean([each.bias_bound.max() for each in found]) < 0.5


def test_edges_of_cells_split_none_of_them(draws):
    whole, inside = (
        draws[0].histogram("price", [*EDGES, 1000.0]),
        draws[0].histogram("price", [0.0, 150.0, 1000.0]),
    )
    n, lost = draws[0].content["n_rows"]["value"], draws[0].share("town").bias_bound.min() * 2
    assert whole.bias_bound.max() <= n * lost
    assert inside.bias_bound.iloc[0] > whole.estimate.iloc[1] / 2.0
    by_size = draws[0].histogram("size", [*SIZES, 79])
    assert by_size.bias_bound.max() <= n * lost
    assert [says(found, "inside a cell") for found in (whole, inside)] == [False, True]
    assert says(draws[0].quantile("price", 0.5), "the point of a cell")


def test_features_that_noise_hides_are_refused(draws):
    with refused("variance of the feature cannot be told"):
        draws[0].slope("price", "size")
    with refused("variance of the feature cannot be told"):
        draws[0].fit(lambda sample: least_squares(sample), "price", "size")  # as of any estimator
    found = draws[0].fit(least_squares, "price", "town")
    assert (found.standard_error > 0.0).all()


def test_regressions_of_too_many_cells_are_refused(draws, monkeypatch):
    monkeypatch.setattr("dpdask.analysis.cells._MOST_CELLS", 5)
    with refused("cells together; the limit is 5"):
        draws[1]._tabulate(["price", "town"])


# ---- ranges


def asked(seed, n=4000):
    rng = default_rng(seed)
    value, anchor = rng.exponential(1000.0, n).clip(0.0, 5000.0), rng.uniform(0.0, 2500.0, n)
    above = value > anchor
    table = pd.DataFrame(
        {
            "low": np.where(above, anchor, -np.inf),
            "high": np.where(above, np.inf, anchor),
            "town": rng.choice(["A", "B"], n),
        }
    )
    table["day"] = pd.Timestamp("2026-01-01")
    column = {
        "role": "privatised",
        "released_as": ["low", "high"],
        "bounds": [0.0, 5000.0],
        "numbers": "the column's own",
    }
    kept = {"role": "kept"}
    content = {
        "columns": {"value": column, "town": kept, "day": kept},
        "guarantee": {"unit": "row"},
    }
    return at_hand(OpenedRanges, table, content)


def test_the_bound_on_the_mean_holds_values_beyond_the_last_anchor():
    """About 8 % of the values lie where no anchor reaches: neither their mean nor their place is known."""
    true = 1000.0 * (1.0 - np.exp(-5.0))
    for seed in range(3):
        found = asked(seed).mean("value")
        assert abs(found.estimate - true) <= 4.9 * found.standard_error + found.bias_bound
        assert 100.0 < found.bias_bound < 500.0  # half of 2,500 for 8 %, and the doubt about these
        assert asked(seed).npmle("value").cdf(2510.0) == pytest.approx(1.0 - np.exp(-2.5), abs=0.1)


def test_few_ranges_that_end_among_the_values_are_said_to_be_few():
    value = default_rng(1).uniform(0.0, 95.0, 4_000)
    for farthest, few in ((5_000.0, True), (190.0, False)):
        release = asked_of(value, farthest, OWN)
        found = (
            release.quantile("value"),
            release.quantile("value", by="town"),
            release.histogram("value", [0.0, 50.0, 100.0]),
        )
        assert [says(each, "few of the ranges end among the values") for each in found] == [few] * 3


def test_rows_without_a_range_are_not_counted():
    release = asked(9)
    release.table.loc[:999, ["low", "high"]] = np.nan
    found = release.histogram("value", [-1.0, 1000.0, 5000.0])
    assert found.estimate.sum() == pytest.approx(3000.0)
    assert "rows without a value are left out" in found.limits
    assert (
        "rows without a value are left out" not in asked(9).histogram("value", [0.0, 5000.0]).limits
    )


def with_years(farthest):
    """Return ranges of 250 values up to 5, beside a kept column that tells nothing of them."""
    rng = default_rng(3)
    release = asked_of(rng.uniform(0.0, 5.0, 250), farthest, OWN)
    release.table["years"] = rng.uniform(0.0, 1.0, 250)
    release.content["columns"]["years"] = {"role": "kept"}
    return release


def test_slopes_of_ranges_that_tell_too_little_say_so():
    told, untold = "the fit did not converge: the ranges tell too little for slopes", []
    for farthest in (5.0, 500.0):  # pytest makes an error of a warning
        found = with_years(farthest).slope("value", "years")
        untold.append((told in found.limits, found.standard_error is None))
    assert untold == [(False, False), (True, True)]
    for ask in (with_years(1e9).slope, with_years(1e9).regress):
        with refused("the ranges tell too little for a regression"):
            ask("value", "years")


def test_ranges_have_groups_of_kept_columns():
    release = asked(9)
    means, medians = release.mean("value", by="town"), release.quantile("value", 0.5, by="town")
    assert means.estimate.index.tolist() == medians.estimate.index.tolist() == ["A", "B"]
    assert (np.abs(means.estimate - 993.0) <= 4.9 * means.standard_error + means.bias_bound).all()
    assert medians.estimate.to_numpy() == pytest.approx(693.0, abs=200.0)
    assert medians.standard_error is None
    with refused("kept column"):
        release.quantile("value", [0.1, 0.2], by="town")


def asked_of(value, farthest, column, seed=0, step=0.0):
    """Return opened ranges of values, with two anchors a row that are spread evenly from 0; they are rounded up to a step, if one is given."""
    rng = default_rng(seed)
    u, v = np.sort(rng.uniform(0.0, farthest, (len(value), 2)), axis=1).T
    u, v = (step * np.ceil(each / step) if step else each for each in (u, v))
    low, high = (
        np.where(value > v, v, np.where(value > u, u, -np.inf)),
        np.where(value <= u, u, np.where(value <= v, v, np.inf)),
    )
    table = pd.DataFrame({"low": low, "high": high, "town": rng.choice(["A", "B"], len(value))})
    content = {
        "columns": {
            "value": {"role": "privatised", "released_as": ["low", "high"]} | column,
            "town": {"role": "kept"},
        },
        "guarantee": {"unit": "row"},
    }
    return at_hand(OpenedRanges, table, content)


OWN = {"bounds": [0.0, 5e7], "numbers": "the column's own"}


def test_anchors_over_far_more_than_the_values_leave_what_the_ranges_tell():
    """Of 200,000 anchors 12 lie below 3,000: quantiles of the anchors begin at 160,000."""
    for seed in range(3):
        value = np.exp(default_rng(seed).normal(7.6, 1.1, 100_000))
        release = asked_of(value, 5e7, OWN, seed)
        assert 500.0 < release.quantile("value").estimate < 8_000.0  # 2,000
        mean = release.mean("value")
        assert abs(mean.estimate - value.mean()) < 4.9 * mean.standard_error + mean.bias_bound
        assert mean.bias_bound < 15_000.0
        assert release.histogram("value", [0.0, 20_000.0, 5e7]).estimate.iloc[0] > 0.9 * len(value)
        assert (
            500.0
            < release.npmle("value", knots=np.geomspace(100.0, 4e7, 300)).quantile(0.5)
            < 8_000.0
        )
    with refused("knots=\\["):
        release.npmle("value", knots=["far"])


def test_limits_of_ranges_do_not_advise_what_is_as_uncertain():
    release = asked_of(default_rng(1).uniform(0.0, 1e-3, 2_000), 5e7, OWN)
    mean, median = release.mean("value"), release.quantile("value")
    assert mean.bias_bound > mean.estimate
    assert says(mean, "larger than the mean itself")
    assert says(median, "nothing tells where between them")
    assert not any(
        "use quantile()" in limit or "use mean()" in limit
        for limit in (*mean.limits, *median.limits)
    )
    told = asked_of(default_rng(1).uniform(0.0, 5e7, 2_000), 5e7, OWN)
    assert not any(
        "nothing tells" in limit or "larger than" in limit
        for limit in (*told.mean("value").limits, *told.quantile("value").limits)
    )
    unbounded = asked_of(
        default_rng(1).uniform(1e7, 4e7, 2_000), 5e7, {"numbers": "the column's own"}
    ).mean("value")
    assert unbounded.bias_bound is None
    assert says(unbounded, "gives no bounds")


def test_resamples_that_do_not_vary_give_no_standard_error():
    """No anchor lies among the values, and many rows have the least one, so that all resamples are alike."""
    value, step = default_rng(2).uniform(0.0, 1e-3, 2_000), 5e6
    release = asked_of(value, 5e7, OWN, step=step)
    found = release.mean("value")
    assert found.standard_error is None
    assert says(found, "lie too far apart")
    assert release.mean("value", by="town").standard_error is None
    in_a = (release.table["town"] == "A").to_numpy()
    value[in_a] = default_rng(3).uniform(0.0, 4e7, in_a.sum())
    groups = asked_of(value, 5e7, OWN, step=step).mean(
        "value", by="town"
    )  # the same anchors and towns
    assert groups.standard_error["A"] > 0.0
    assert np.isnan(groups.standard_error["B"])
    assert says(groups, "lie too far apart")


def test_clipped_means_of_ranges_are_known_with_anchors_and_without():
    """Without a design in the card the mean of the likeliest distribution is clipped; with one, the anchors tell it."""
    value = default_rng(5).exponential(1000.0, 6_000).clip(0.0, 5_000.0)
    design = {"design": "case2", "anchors": {"name": "uniform", "loc": 0.0, "scale": 5_000.0}}
    truth = value.clip(300.0, 1_500.0).mean()
    found = []
    for column in (
        OWN,
        OWN | {"design": design, "bounds": [0.0, 5_000.0]},
        {"numbers": OWN["numbers"]},
    ):
        release = asked_of(value, 5_000.0, column)
        clipped = release.mean("value", within=(300.0, 1_500.0))
        low, high = clipped.interval()
        assert low < truth < high
        assert high - low < 0.2 * truth
        assert abs(clipped.estimate - value.mean()) > high - low
        found.append(clipped)
    assert [each.bias_bound for each in found] == [found[0].bias_bound, 0.0, found[2].bias_bound]
    assert found[0].bias_bound > 0.0
    groups = asked_of(value, 5_000.0, OWN | {"design": design}).mean(
        "value", by="town", within=(300.0, 1_500.0)
    )
    low, high = groups.interval()
    assert (low < truth).all()
    assert (truth < high).all()
    with refused("two values that increase"):
        release.mean("value", within=(5.0, 1.0))
    with refused("have no levels"):
        release.mean("value", values=[1.0, 2.0])


def test_means_of_rings_are_open_where_most_values_lie_at_one_end_and_known_inside():
    """Rings do not tell the least value from the greatest."""
    rng, n = default_rng(7), 1_500
    u, v = np.sort(rng.uniform(0.0, 100.0, (n, 2)), axis=1).T
    for value, is_open in ((rng.normal(50.0, 10.0, n), False), (np.zeros(n), True)):
        inside = (u < value) & (value <= v)
        table = pd.DataFrame({"low": np.where(inside, u, v), "high": np.where(inside, v, u)})
        column = {"role": "privatised", "released_as": ["low", "high"], "bounds": [0.0, 100.0]}
        content = {"columns": {"value": column | {"numbers": OWN["numbers"]}}}
        release = at_hand(OpenedRanges, table, content | {"guarantee": {"unit": "row"}})
        for within in (None, (20.0, 80.0)):
            low, high = release.mean("value", within=within).interval()
            assert low <= value.clip(*(within or (0.0, 100.0))).mean() <= high
            assert (high - low > 55.0) == is_open
            assert is_open or high - low < 15.0


def test_groups_of_few_ranges_have_no_mean():
    design = {"design": "case1", "anchors": {"name": "uniform", "loc": 0.0, "scale": 5_000.0}}
    release = asked_of(np.full(500, 900.0), 5_000.0, OWN | {"design": design, "bounds": [0.0, 5e3]})
    release.table.loc[:9, "town"] = "C"
    found = release.mean("value", by="town")
    assert np.isnan(found.estimate["C"])
    assert found.estimate[["A", "B"]].notna().all()
    assert says(found, "too few rows")


def test_ranges_explain_where_their_anchors_reach_from_bound_to_bound():
    rng = default_rng(6)
    value = rng.exponential(1000.0, 8_000).clip(0.0, 5_000.0)
    anchors = {"name": "uniform", "loc": 0.0, "scale": 5_000.0}
    design = {"bounds": [0.0, 5e3], "design": {"design": "case2", "anchors": anchors}}
    release = asked_of(value, 5_000.0, OWN | design)
    release.table["size"] = 3.0 + 0.01 * value + rng.normal(size=8_000)
    release.content["columns"]["size"] = {"role": "kept"}
    found = release.slope("size", "value", "town")
    assert found.estimate.index.tolist() == ["value", "town_B"]
    low, high = found.interval()
    assert low["value"] < 0.01 < high["value"]
    assert high["value"] - low["value"] < 0.005
    assert low["town_B"] < 0.0 < high["town_B"]
    back = release.slope("value", "size")
    assert back.estimate["size"] == pytest.approx(
        np.polyfit(release.table["size"], value, 1)[0], rel=0.1
    )
    for column in (OWN, OWN | {"design": design["design"]}):
        other = asked_of(value, 5_000.0, column)
        other.table["size"], other.content["columns"]["size"] = 1.0, {"role": "kept"}
        with refused("a range explains only if"):
            other.slope("size", "value")
    object.__setattr__(release, "table", release.table.iloc[:15])
    with refused("at least 20 rows"):
        release.slope("size", "value")


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("numbers", "unit", "bounds"),
    [
        ("days since 1970-01-01", 1.0, ["1970-01-01", "2051-01-01"]),
        ("microseconds since 1970-01-01", 86_400e6, ["1970-01-01", "2050-12-31"]),
        (
            "seconds since 1970-01-01 UTC",
            86_400.0,
            ["1970-01-01 01:00:00+01:00", "2051-01-01 00:00:00+00:00"],
        ),
    ],
)
def test_the_mean_of_ranges_of_dates_has_a_bound(numbers, unit, bounds):
    """Their anchors reach half of the bounds, which cards have as texts."""
    value = default_rng(4).uniform(0.0, 25_000.0, 1_000)
    found, same = (
        asked_of(value * each, 20_000.0 * each, {"bounds": ends, "numbers": which}).mean("value")
        for each, ends, which in (
            (unit, bounds, numbers),
            (1.0, [0.0, 29_585.0], "the column's own"),
        )
    )
    assert found.bias_bound / unit == pytest.approx(same.bias_bound, rel=1e-6)
    assert found.estimate / unit == pytest.approx(same.estimate, rel=1e-6)
    assert abs(found.estimate - unit * value.mean()) < 4.9 * found.standard_error + found.bias_bound
    counts = asked_of(
        value * unit, 20_000.0 * unit, {"bounds": bounds, "numbers": numbers}
    ).histogram("value", 3)
    assert counts.estimate.index[-1].right == pytest.approx(29_585.0 * unit)


def test_texts_explain_ranges_and_dates_and_unknown_groups_are_refused():
    release = asked(10)
    assert release.slope("value", "town").estimate.index.tolist() == ["town_B"]
    with refused("holds dates"):
        release.slope("value", "day")
    for column in ("value", "town"):
        with refused("'citty'"):
            release.mean(column, by="citty")


@pytest.mark.parametrize("far", [1e3, 1e5])
def test_the_error_of_a_mean_of_noisy_ranks_is_that_of_the_released_range(far):
    """It is at most the noise of the counts times the range: more than the estimates vary, and no multiple of bounds that are far too wide."""
    columns, found, off = {"price": continuous([0.0, far])}, [], []
    for seed in range(12):
        table = pd.DataFrame({"price": default_rng(seed).gamma(2.0, 70.0, 4000).clip(0.0, far)})
        rows = fit_dip(table, columns, epsilon=1.0, channel="laplace", insecure_seed=seed)
        found.append(rows.mean("price"))
        off.append(found[-1].estimate - table["price"].mean())
    spread, error = (
        np.sqrt(np.mean(np.square(off))),
        np.median([each.standard_error for each in found]),
    )
    assert spread <= error <= 12.0 * spread


@pytest.mark.parametrize(
    ("type_", "factor", "repeats"),
    [
        ("int64", 1, 8),
        *(
            pytest.param(type_, factor, 60, marks=pytest.mark.slow)
            for type_ in ("int64", "float64")
            for factor in (1, 100)
        ),
    ],
)
def test_a_tail_is_kept_and_what_may_lie_beyond_is_in_the_intervals(type_, factor, repeats):
    """At exact bounds 1,800 of 2,000 rows were in the wrong range, and a mean of 387 was told as 9 ± 2."""
    many = np.concatenate([zeros_and_a_tail(seed) for seed in range(1000, 1020)])
    edges = [0.0, 1.0, 1e3, 5e3, 2e4, 1e5 * factor]
    truth = [many.mean(), *np.quantile(many, [0.98, 0.99]), *(np.histogram(many, edges)[0] / 20.0)]
    columns = {"gain": continuous([0, 100_000 * factor], type=type_)}
    covered, alone, misplaced, widths = [], [], [], []
    for seed in range(repeats):
        table = pd.DataFrame({"gain": zeros_and_a_tail(seed).astype(type_)})
        rows = fit_dip(table, columns, epsilon=1.0, insecure_seed=seed)
        counts = rows.histogram("gain", edges)
        asked = [rows.mean("gain"), *(rows.quantile("gain", q) for q in (0.98, 0.99))]
        low, high = (
            np.array([*(each.interval()[k] for each in asked), *counts.interval()[k]])
            for k in (0, 1)
        )
        covered.append((low <= truth) & (truth <= high))
        alone.append(abs(asked[0].estimate - truth[0]) <= 1.96 * asked[0].standard_error)
        misplaced.append(
            np.abs(counts.estimate.to_numpy() - np.histogram(table["gain"], edges)[0]).sum() / 2
        )
        widths.append((high - low)[3:])
    assert (np.mean(covered, axis=0) >= 0.93).all()
    assert np.mean(alone) < 0.9 or (type_, factor) != (
        "int64",
        1,
    )  # there a bound that is left out would be seen
    assert np.median(misplaced) <= 500.0
    assert np.median(widths) < 2500.0


def test_rows_that_may_lie_beyond_move_the_mean_of_few_values_by_more():
    """They are counted among all rows, and the mean is of those with a value."""
    some = points_of(
        pd.DataFrame({"x": [1.0, 2.0, 3.0]}),
        np.ones(3),
        3.0,
        sampling=0.0,
        rank_errors={"x": 0.01},
        bounds={"x": (0.0, 10.0)},
        rank_noise={"x": 0.05},
        lost=0.02,
    )
    few = replace(
        some, frame=pd.DataFrame({"x": [1.0, 2.0, 3.0, *[np.nan] * 27]}), weights=np.ones(30)
    )
    one, other = some.mean("x"), few.mean("x")
    assert (one.bias_bound, one.standard_error) == (pytest.approx(0.3), pytest.approx(0.1))
    assert (other.bias_bound, other.standard_error) == (pytest.approx(3.0), pytest.approx(1.0))


@pytest.mark.filterwarnings("ignore:A released row keeps", "ignore:The noise of a count")
@pytest.mark.parametrize(("epsilon", "is_hidden"), [(0.1, True), (10.0, False)])
def test_what_numbers_with_nulls_do_not_tell_of_groups_is_said(epsilon, is_hidden):
    """Of a mean, that its interval is all that is possible; of a sum, that it needs a number of rows."""
    columns = {"x": continuous([0.0, 100.0], nulls="level"), "town": {"role": "keep"}}
    rng = default_rng(2)
    table = pd.DataFrame({"x": rng.uniform(20.0, 40.0, 600), "town": rng.choice([*"ab"], 600)})
    table.loc[:99, "x"] = np.nan
    rows = fit_dip(table, columns, epsilon=epsilon, channel="laplace", insecure_seed=1)
    groups = rows.groupby("town")
    found = groups.mean("x", within=(0.0, 100.0))
    low, high = found.interval()
    assert ((low < 30.0) & (high > 30.0)).all()
    assert ((low == 0.0) & (high == 100.0)).any() == is_hidden
    assert says(found, "all that is possible") == is_hidden
    with refused("number of rows with a value, which is not told"):
        groups.sum("x", within=(0.0, 100.0))


def test_levels_that_the_reference_does_not_hold_are_spoken_of():
    """Nothing prints `0 ± 0`: their standard error is not known."""
    rows = at_hand(OpenedRows, pd.DataFrame({"x": range(10)}), {"guarantee": {"unit": "row"}})
    for last in (0.0, 0.2):
        value, error, bias = (pd.Series(part) for part in ([0.5, last], [0.1, 0.0], [0.1, 0.0]))
        result = rows._result(
            Estimate(value=value, standard_error=error, condition_number=2.0, worst_bias=bias)
        )
        assert len([limit for limit in result.limits if "probability 0" in limit]) == (last == 0.0)
        assert result.standard_error.isna().tolist() == [False, True]
        assert np.isnan(result.interval()[0].iloc[1])


@pytest.mark.parametrize(("share", "noise"), [(1.0, 0.0), (0.3, 15.0), (0.03, 0.0)])
def test_estimates_among_the_rows_with_a_value_have_the_error_of_a_ratio(share, noise):
    """Quantiles and slopes: without the share of these rows in it, their error would be up to six times too small."""
    n, edges, rng = 20_000, np.arange(41.0), default_rng(5)
    frame = pd.DataFrame({"x": [np.nan, *(edges[:-1] + 0.5)], "z": [np.nan, *np.sin(edges[:-1])]})
    found = []
    for _ in range(100):
        counts = rng.multinomial(n, [1.0 - share, *(share / 40 * np.ones(40))]) + rng.normal(
            0.0, noise, 41
        )
        cells = NoisyCells(frame=frame, variance=(noise / n) ** 2)
        points = points_of(frame, counts, n, noise=lambda _, cells=cells: cells)
        spread = replace(
            points, ends={"x": (frame["x"].to_numpy() - 0.5, frame["x"].to_numpy() + 0.5)}
        )
        middle, slope = spread.quantile("x", 0.5), points.slope("z", ["x"])
        rank = np.interp(20.0, edges, np.append(0.0, np.cumsum(counts[1:]))) / counts[1:].sum()
        found.append(
            [
                (rank - 0.5) * 40.0,
                middle.standard_error,
                slope.estimate["x"],
                slope.standard_error["x"],
            ]
        )
    off, error, slopes, slope_error = np.array(found).T
    if noise == 0.0:
        assert np.median(slope_error) / slopes.std() == pytest.approx(1.0, abs=0.3)
    assert np.median(error) / off.std() == pytest.approx(1.0, abs=0.3)


@pytest.mark.parametrize("expected", [1.0, 2.0, 8.0, 20.0])
@pytest.mark.parametrize("question", ["share", "count", "histogram", "crosstab"])
def test_few_rows_that_were_drawn_twice_have_the_error_of_both_draws(question, expected):
    """Rows of a hold-out, and released rows from these: where none was drawn, the least share is that of a row of both draws."""
    n_held, n, repeats = 1_500, 4_500, 600
    frame = pd.DataFrame({"kind": ["a", "b"], "one": ["c", "c"], "x": [0.5, 1.5]})
    points = points_of(
        frame,
        np.ones(2),
        n,
        sampling=1.0 / n_held + 1.0 / n,
        levels={"kind": ["a", "b"], "one": ["c"]},
    )
    ask = OF_TWO_LEVELS[question]
    true = expected / n_held * (1 if question == "share" else n)
    rng = default_rng(int(expected))
    drawn = rng.binomial(n, rng.binomial(n_held, expected / n_held, repeats) / n_held)
    hit = 0
    for count in drawn:
        found = ask(replace(points, weights=np.array([count, n - count], float)))
        low, high = (np.asarray(end, float) for end in found.interval())
        hit += low[0] <= true <= high[0]
    assert hit >= stats.binom.ppf(ALPHA, repeats, 0.92)


@pytest.mark.parametrize("question", ["count", "histogram", "crosstab"])
def test_counts_of_nearly_all_rows_have_the_error_of_a_noisy_number_of_rows(question):
    """Where that number is private, a count is a sum, and no share of it: as a share of all rows its error would be near 0."""
    n, sigma, true, repeats = 20_000, 60.0, 19_990.0, 200
    frame = pd.DataFrame({"kind": ["a", "b"], "one": ["c", "c"], "x": [0.5, 1.5]})
    rng, found = default_rng(3), []
    for _ in range(repeats):
        weights = np.array([rng.poisson(true), rng.poisson(n - true)]) + rng.normal(0.0, sigma, 2)
        rows = weights.sum() + rng.normal(0.0, sigma)  # the card's, of a table of its own
        cells = NoisyCells(frame=frame, variance=(sigma / rows) ** 2)
        points = points_of(
            frame,
            weights,
            rows,
            is_counted=False,
            levels={"kind": ["a", "b"], "one": ["c"]},
            noise=lambda _, cells=cells: cells,
        )
        told = OF_TWO_LEVELS[question](points)
        low, high = told.interval()
        estimate = told.estimate.iloc[0]
        assert low.iloc[0] < estimate < high.iloc[0]
        found.append((estimate, told.standard_error.iloc[0], low.iloc[0] <= true <= high.iloc[0]))
    estimates, errors, hits = np.array(found).T
    assert hits.sum() >= stats.binom.ppf(ALPHA, repeats, 0.94)
    assert np.mean(errors) / np.std(estimates) == pytest.approx(1.0, abs=0.25)


def test_a_range_inside_a_cell_is_unsure_by_that_cell_once():
    """Its rows lie evenly, and may all be in the range or none; the noise is that of the sum which the range may be."""
    frame = pd.DataFrame({"x": [50.0, 150.0, 250.0]})
    cells = NoisyCells(frame=frame, variance=1e-4)
    points = points_of(
        frame,
        np.array([900.0, 60.0, 40.0]),
        1_000.0,
        ends={"x": (frame["x"].to_numpy() - 50.0, frame["x"].to_numpy() + 50.0)},
        bounds={"x": (0.0, 300.0)},
        noise=lambda _: cells,
    )
    inside = points.histogram("x", np.array([20.0, 45.0]))
    assert inside.estimate.tolist() == pytest.approx([225.0])
    assert inside.bias_bound.tolist() == pytest.approx([675.0])
    most = points.histogram("x", np.array([0.0, 20.0, 300.0]))
    assert most.estimate.tolist() == pytest.approx([180.0, 820.0])
    assert most.bias_bound.tolist() == pytest.approx([720.0, 720.0])
    sure = points.histogram("x", np.array([100.001, 300.0]))
    assert (most.standard_error.iloc[1] > 0.9 * sure.standard_error).all()


@pytest.mark.parametrize(("rare", "is_whole_draw"), [(0.01, True), (0.2, False)])
def test_the_whole_draw_of_held_out_rows_counts_where_a_level_may_have_none(
    rare, is_whole_draw, tmp_path
):
    """Its rows are all released as others: intervals that the released shares alone decide covered 40 % of such runs."""
    values = default_rng(4).choice([1, 2, 3], 2_000, p=[0.7 - rare, 0.3, rare])
    (tmp_path / "in").mkdir()
    pq.write_table(pa.table({"r": values}), tmp_path / "in" / "table.parquet")
    reference = {"kind": "holdout", "fraction": 0.05}
    job = write_job(
        tmp_path,
        tmp_path / "in",
        tmp_path / "out",
        schema={"r": discrete([1, 2, 3], type="int64")},
        mechanism={"kind": "dip", "reference": reference, "channel": "optimal"},
        privacy__epsilon=8.0,
    )
    run_here(job)
    opened = dpdask.open(str(tmp_path / "out"))
    share = opened.share("r")
    spread = share.estimate * (1.0 - share.estimate)
    whole = np.sqrt(spread * (1.0 / opened.n_rows + 1.0 / opened._n_reference))
    rest = share.standard_error[share.estimate > 0.1] / whole[share.estimate > 0.1]
    assert (rest.min() > 0.99) == is_whole_draw
    assert rest.max() < (1.01 if is_whole_draw else 0.6)


def price_table(tmp_path, prices, **column):
    """Return the opened noisy table of a column of prices in ten cells, with hardly any noise."""
    (tmp_path / "in").mkdir()
    pq.write_table(pa.table({"x": prices}), tmp_path / "in" / "table.parquet")
    job = write_job(
        tmp_path,
        tmp_path / "in",
        tmp_path / "out",
        schema={"x": continuous(**{"bounds": [0.0, 10.0], **column})},
        mechanism={"kind": "marginals", "bins": {"x": 10}, "cliques": [["x"]]},
        privacy__epsilon=60.0,
    )
    run_here(job)
    return dpdask.open(str(tmp_path / "out"))


@pytest.mark.parametrize(
    "edges", [[0, 5, 10, 12], [0, 10, 12], [-1, 0, 5, 10], [-2, -1, 5], [2, 5, 10], [0.5, 2, 10]]
)
def test_ranges_hold_what_their_labels_say(edges, tmp_path):
    """Edges at the bounds and beyond, with rows at both bounds; and the outer edge, by the limit that says so."""
    prices = np.concatenate([default_rng(1).uniform(0.0, 10.0, 6_000), np.repeat([0.0, 10.0], 999)])
    found = price_table(tmp_path, prices).histogram("x", edges)
    low, high = found.interval()
    for k, each in enumerate(found.estimate.index):
        inside = (prices > each.left) & (prices < each.right)
        inside |= (prices == each.left) & (
            each.closed_left or (says(found, "first range") and k == 0)
        )
        is_last = k == len(found.estimate) - 1
        inside |= (prices == each.right) & (each.closed_right or is_last)
        slack = 30.0
        assert low.iloc[k] - slack <= inside.sum() <= high.iloc[k] + slack, each


def test_rows_at_the_lower_bound_are_not_told_from_their_cell(tmp_path):
    prices = np.where(default_rng(2).random(4_000) < 0.3, 0.0, 5.5)
    opened = price_table(tmp_path, prices)
    for sign, true in (("<=", (prices == 0.0).sum()), (">", (prices > 0.0).sum())):
        low, high = opened.where(f"x {sign} 0").count().interval()
        assert low <= true + 30.0
        assert true - 30.0 <= high


def test_an_edge_next_to_the_end_of_a_cell_of_whole_numbers_is_no_end(tmp_path):
    edges = [0, 10**12, 2 * 10**12, 4 * 10**12 - 1]
    whole = default_rng(3).choice(edges[:3], 4_000)
    bounds = {"type": "int64", "bounds": [0, 4 * 10**12 - 1]}
    found = price_table(tmp_path, whole, **bounds).histogram("x", edges)
    assert found.estimate.index.closed == "left"


@pytest.mark.parametrize("mechanism", ["marginals", "copula"])
def test_ranges_of_declared_cells_hold_their_lower_edge_as_these_do(mechanism, tmp_path):
    """A list names the first value of each cell, of any type."""
    values = default_rng(4).choice([0.0, 5.0, 10.0, 20.0], 4_000, p=[0.3, 0.1, 0.4, 0.2])
    pa_table = pa.table({"fee": values, "n": values.astype(np.int64)})
    (tmp_path / "in").mkdir()
    pq.write_table(pa_table, tmp_path / "in" / "table.parquet")
    starts, edges = [0, 5, 10, 20], [0, 5, 10, 20, 1000]
    job = write_job(
        tmp_path,
        tmp_path / "in",
        tmp_path / "out",
        schema={"fee": continuous([0.0, 1000.0]), "n": continuous(type="int64", bounds=[0, 1000])},
        mechanism={"kind": mechanism, "bins": {"fee": starts, "n": starts}}
        | ({"cliques": [["fee"], ["n"]]} if mechanism == "marginals" else {}),
        privacy__epsilon=60.0,
    )
    run_here(job)
    opened = dpdask.open(str(tmp_path / "out"))
    truth = np.histogram(values, edges)[0]
    for column in ("fee", "n"):
        found = opened.histogram(column, edges)
        assert found.estimate.index.closed == "left"
        assert np.abs(found.estimate.to_numpy() - truth) == pytest.approx(np.zeros(4), abs=20.0)
        assert not found.bias_bound.any()


@pytest.mark.parametrize("epsilon", [0.5, 6.0])
@pytest.mark.parametrize("channel", ["laplace", "calibrated", "optimal"])
def test_the_draw_of_held_out_rows_counts_as_far_as_levels_are_lost(channel, epsilon):
    """With little noise released rows keep their levels, and nearly none of it is left; with much noise, all of it."""
    n, n_held, repeats = 4_500, 1_500, 200
    true, levels, numbers = (
        np.array([0.001, 0.3, 0.699]),
        ["a", "b", "c"],
        np.array([4.0, 0.0, 1.0]),
    )
    make = {
        "laplace": lambda q: laplace(q, epsilon, ordered=False),
        "calibrated": lambda q: calibrate(q, epsilon, ordered=False),
        "optimal": lambda q: optimal(q, epsilon, compute_zero_one(3), ordered=False),
    }[channel]
    rng, estimates, errors, covered = default_rng(round(10 * epsilon)), [], [], 0
    for _ in range(repeats):
        matrix = make(rng.multinomial(n_held, true) / n_held).matrix
        drawn = rng.multinomial(rng.multinomial(n, true), matrix).sum(axis=0)
        points = points_of(
            pd.DataFrame({"kind": levels}),
            drawn.astype(float),
            n,
            sampling=1.0 / n + 1.0 / n_held,
            levels={"kind": levels},
        )
        kept = HeldOut(n_rows=n_held, code=np.arange(3), channel=matrix)
        told = replace(points, held_out=kept)
        found = told.share("kind"), *(each.mean("kind", values=numbers) for each in (told, points))
        low, high = found[0].interval()
        covered += low["a"] <= true[0] <= high["a"]
        estimates.append(np.hstack([each.estimate for each in found]))
        errors.append(np.hstack([each.standard_error for each in found]))
    assert covered >= stats.binom.ppf(ALPHA, repeats, 0.93)
    ratio = np.sqrt(np.square(errors).mean(axis=0)) / np.std(estimates, axis=0)
    chance = 5.0 / np.sqrt(2.0 * repeats)
    assert (np.abs(np.log(ratio[1:4])) < chance).all()
    if channel != "laplace":  # which leaves little of a level
        assert (ratio[4] > 1.4) == (epsilon == 6.0)


@pytest.mark.parametrize("kind", ["mean", "quantile"])
def test_nothing_prints_an_error_of_zero(kind):
    """Neither of equal values, nor of a quantile whose neighbours are all equal."""
    frame = pd.DataFrame(
        {
            "x": np.where(np.arange(1000) < 980, 7.0, 9.0)
            if kind == "quantile"
            else np.full(1000, 7.0)
        }
    )
    points = points_of(frame, np.ones(1000), 1000)
    result = points.mean("x") if kind == "mean" else points.quantile("x", 0.5)
    assert (round(result.estimate, 6), result.standard_error) == (7.0, None)
    assert repr(result).startswith("7 (95 %: 7 to 7)" if kind == "quantile" else "7\nno interval")
    if kind == "quantile":
        assert result.interval() == (7.0, 7.0)  # by ranks: no other value is near
        assert points.quantile("x", 0.975).interval() == (7.0, 9.0)
        several = Result.gather(
            [points.quantile("x", q) for q in (0.5, 0.975)], pd.Index([0.5, 0.975])
        )
        assert several.interval()[1].tolist() == [7.0, 9.0]
        assert several.standard_error is None
        assert says(several, "rank")
        return
    with refused("no standard error is known"):
        result.interval()


def test_groups_that_noise_may_be_all_of_have_no_estimate_and_leave_the_others_theirs():
    """Of the groups, b has a weight that noise of its cells may be, and c less than nothing."""
    frame = pd.DataFrame({"x": [1.0, 9.0] * 3, "g": [*"aabbcc"]})
    cells = NoisyCells(frame=frame, variance=(20.0 / 1000.0) ** 2)
    points = points_of(
        frame,
        np.array([500.0, 500.0, 40.0, -10.0, -20.0, -10.0]),
        1000.0,
        levels={"g": [*"abc"]},
        ends={"x": (frame["x"].to_numpy() - 1.0, frame["x"].to_numpy() + 1.0)},
        bounds={"x": (0.0, 10.0)},
        noise=lambda _: cells,
    )
    found = points.mean("x", by="g")
    assert found.estimate.isna().tolist() == [False, True, True]
    low, high = found.interval()
    assert 0.0 <= low["a"] < 5.0 < high["a"] <= 10.0
    assert low.isna().tolist() == [False, True, True]
    assert says(found, "cannot be told from the noise")


def tabled(weights, sigma, edges):
    """Return the table of a level of four and a number in equal cells."""
    frame = pd.DataFrame(
        [(y, (low + high) / 2) for y in range(1, 5) for low, high in pairwise(edges)],
        columns=["y", "x"],
    )
    ends = [np.tile(each, 4).astype(float) for each in (edges[:-1], edges[1:])]
    cells = NoisyCells(frame=frame, variance=(sigma / weights.sum()) ** 2)
    return points_of(
        frame,
        weights.ravel().astype(float),
        float(weights.sum()),
        levels={"y": [1, 2, 3, 4]},
        ends={"x": (ends[0], ends[1])},
        noise=lambda _: cells,
    )


def test_slopes_of_tables_have_intervals_where_cells_tell_them():
    edges = np.linspace(0.0, 100.0, 11)
    shape = stats.norm.pdf(np.arange(10)[None, :], 3.0 + np.arange(4)[:, None], 1.5)
    weights = np.rint(5_000 * shape)
    found = tabled(weights, 3.0, edges).slope("x", ["y"])
    low, high = found.interval()
    assert low["x" if "x" in low else "y"] < 9.7 < 10.0 < high.iloc[0] + 0.5
    assert (high - low).iloc[0] < 1.5
    spiked = weights.copy()
    spiked[:, 0] += 20_000.0  # a value that many share may lie anywhere in its cell
    assert tabled(spiked, 3.0, edges).slope("y", ["x"]).bias_bound is None
    with refused("variance of the feature cannot be told"):
        tabled(weights, 30_000.0, edges).slope("y", ["x"])


def test_slopes_hold_the_truth_where_noise_alone_told_the_variance_of_the_feature():
    """Tables whose variance is told only if noise makes it larger: the slopes that are answered are too flat."""
    edges, rng = np.linspace(0.0, 100.0, 11), default_rng(3)
    weights = np.rint(200 * stats.norm.pdf(np.arange(10), 3.0 + np.arange(4)[:, None], 1.0))
    truth = tabled(weights, 0.1, edges).slope("y", ["x"]).estimate.iloc[0]
    inside, flat = [], []
    for _ in range(200):
        noisy = weights + rng.normal(scale=7.5, size=weights.shape)
        try:
            found = tabled(noisy, 7.5, edges).slope("y", ["x"])
        except dpdask.SpecError:
            continue
        off, error = abs(found.estimate.iloc[0] - truth), found.standard_error.iloc[0]
        inside.append(off <= 1.96 * error + found.bias_bound.iloc[0])
        flat.append(off <= 1.96 * error)
    assert 30 < len(inside) < 160
    assert np.mean(inside) > 0.93
    assert np.mean(flat) < 0.93  # power: by the errors alone they do not


def test_a_slope_without_an_interval_says_why():
    rng = default_rng(0)
    frame = pd.DataFrame({"x": rng.normal(size=100), "y": rng.normal(size=100)})
    points = points_of(frame, np.ones(100), 100.0, rank_errors={"x": 0.01})
    assert says(points.slope("y", ["x"]), "no bound on the bias")
    assert points_of(frame, np.ones(100), 100.0).slope("y", ["x"]).limits == ()


@pytest.mark.parametrize(
    ("bins", "bounds", "what"),
    [
        (0, (0.0, 1.0), "at least 1"),
        (True, (0.0, 1.0), "at least 1"),
        (5, None, "none were declared"),
        ([1, 1], None, "that increase"),
    ],
)
def test_numbers_of_ranges_are_refused_for_one_reason(bins, bounds, what):
    with refused(what):
        read_edges(bins, bounds, "column 'x'")


@pytest.mark.parametrize("few", [True, False])
def test_declared_cells_with_few_rows_have_no_interval_and_the_plan_says_so(few, tmp_path):
    rng = default_rng(3)
    n = 2_000
    levels = discrete([1, 2, 3, 4])
    # the noisy counts of so many cells are not published
    schema = dict.fromkeys("abcdefgh"[: 8 if few else 3], levels)
    frame = pd.DataFrame({name: rng.integers(1, 5, n) for name in schema})
    frame["x"] = rng.normal(50.0, 10.0, n).clip(0.0, 100.0)
    schema = {**schema, "x": continuous([0, 100])}
    (tmp_path / "in").mkdir()
    frame.to_parquet(tmp_path / "in" / "rows.parquet")
    mechanism = {"kind": "histogram", "bins": 20}
    job = write_job(tmp_path, tmp_path / "in", tmp_path / "out", schema=schema, mechanism=mechanism)
    assert any("will tell no interval" in each for each in plan_job(load(job)).warnings) == few
    run_here(job)
    opened = dpdask.open(str(tmp_path / "out"))
    for found in (opened.mean("x"), opened.share("a"), opened.histogram("x", [0, 50, 100])):
        assert says(found, "declared cells") == few
        if few:
            with refused("no bound on the bias is known"):
                found.interval()
        else:
            low, high = found.interval()
            assert np.all(low <= high)
