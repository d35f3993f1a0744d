"""The estimate of least squared bias and variance: better than the unbiased one and than a constant, honest about its bias; cards of trees."""

import dataclasses
import math

import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from e2e.helpers import categorical, continuous, discrete, refused
from numpy.random import default_rng
from numpy.testing import assert_allclose
from scipy import optimize, stats
from strategies import randomise

import dpdask
from dpdask.errors import DataError
from dpdask.inference import ReleasedColumn
from dpdask.inference.pseudo_values import Directions, balance, find_half_width
from pipelines.benchmarks import means

T = np.array([[0.6, 0.3, 0.1], [0.2, 0.6, 0.2], [0.1, 0.3, 0.6]])
STRATA = np.stack([T, np.array([[0.5, 0.25, 0.25], [0.25, 0.5, 0.25], [0.1, 0.1, 0.8]])])


def test_movie_means_are_closer_than_by_randomised_response_and_by_a_constant():
    found = means.measure(means.simulate(40_000, 2_000, default_rng(1)), repeats=1)
    for row, least in zip(found["rows"], (0.19, 0.40, 0.61, 0.76), strict=True):
        assert row["factor"] >= least
        for name in ("optimal", "optimal-unbiased"):
            assert row[name] <= 0.9 * row["randomised response, unbiased"]
            assert row[name] < found["constant"]
        assert row["optimal-unbiased"] < row["optimal-unbiased, unbiased"]
        assert row["randomised response"] < row["randomised response, unbiased"]
    assert (
        found["rows"][0]["optimal-unbiased, unbiased"] > found["constant"]
    )  # what the balance is for


def risk(g, f, n, directions):
    """Return squared bias and variance of an average of g over n rows, for coordinates of mean square 1 + 1/n."""
    off = directions.coordinates(T @ g - f)
    weights = directions.released.T @ (directions.prior @ T * g)
    return float((1 + 1 / n) * off @ off + weights**2 @ (1 - directions.singular**2) / n)


@pytest.mark.parametrize("n", [3.0, 30.0])
def test_the_balance_has_the_least_squared_bias_and_variance(n):
    prior = np.linalg.matrix_power(T, 200)[0]
    directions, f = Directions.of(T, prior), np.array([0.0, 1.0, 5.0])
    centred = f - prior @ f
    counts = n * prior[None, :]
    found = balance([directions], centred, counts).g[0, 0]
    least = risk(found, centred, n, directions)
    for factor in (0.9, 1.1):  # too much and too little of the noise's inverse
        assert risk(factor * found, centred, n, directions) > least
    assert least < risk(np.linalg.solve(T, centred), centred, n, directions)


def test_no_bias_is_taken_where_it_costs_at_most_a_tenth_of_the_variance():
    prior = np.linalg.matrix_power(T, 200)[0]
    directions, f = Directions.of(T, prior), np.array([0.0, 1.0, 5.0])
    f = f - prior @ f

    def excess(n):
        """The variance of the exact inverse over that of the best balance, whose averages are both 0."""
        soft = (n + 1) * directions.singular / (1 + n * directions.singular**2)
        g = directions.released[:, 1:] @ (directions.coordinates(f)[1:] * soft[1:])
        return float(prior @ np.linalg.solve(T, f) ** 2 / (prior @ g**2))

    low, high = 0.1, 1e4
    while high > low * (1 + 1e-9):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if excess(middle) > 1.1 else (low, middle)
    for n, unbiased in ((low / 1.01, False), (high * 1.01, True)):
        assert (balance([directions], f, n * prior[None, :]).bias[0] == 0.0) == unbiased


def test_groups_without_differences_are_pulled_together_and_others_are_not():
    rng = default_rng(2)
    subject = ReleasedColumn(name="x", levels=(0, 1, 5), matrix=T)
    group = np.repeat(np.arange(200), 50)
    for shift, kept in ((0.0, (0.0, 0.5)), (0.4, (0.6, 1.1))):
        high = rng.random(10_000) < 0.3 + shift * (group % 2)
        codes = np.where(high, 2, 0)
        drawn = randomise(codes, T, rng)
        frame = pd.DataFrame({"g": group, "x": np.array([0, 1, 5])[drawn]})
        found = subject.group_means(frame, "g")
        truth = pd.Series(np.array([0, 1, 5])[codes]).groupby(group).mean()
        if shift:
            between = np.polyfit(truth, found.value, 1)[0]
            assert kept[0] < between < kept[1]
        else:
            assert (
                kept[0]
                <= found.value.std()
                / subject.group_means(frame, "g", approximate=False).value.std()
                < kept[1]
            )
        assert (np.abs(found.value - truth) <= 6 * found.standard_error + found.worst_bias).all()
        shares = subject.crosstab(frame, "g", normalise=True)
        assert_allclose(shares.value.sum(axis=1), 1.0)


def test_the_errors_of_groups_are_what_repeated_releases_show():
    rng = default_rng(3)
    subject = ReleasedColumn(name="x", levels=(0, 1, 5), matrix=T)
    group = np.repeat(np.arange(40), 60)
    codes = np.where(rng.random(2400) < 0.2 + 0.5 * (group % 2), 2, rng.integers(0, 2, 2400))
    found = []
    for _ in range(60):
        own = codes.reshape(40, 60)[
            np.arange(40)[:, None], rng.integers(0, 60, (40, 60))
        ].ravel()  # a group's rows, drawn again
        drawn = randomise(own, T, rng)
        found.append(
            subject.group_means(pd.DataFrame({"g": group, "x": np.array([0, 1, 5])[drawn]}), "g")
        )
    spread = np.std([each.value for each in found], axis=0, ddof=1).mean()
    assert np.mean([each.standard_error.mean() for each in found]) == pytest.approx(
        spread, rel=0.15
    )


def along_a_tree(n, rng):
    """Return a release whose channel depends on the released parent, which depends on the original value; and the original codes."""
    codes = rng.integers(0, 3, n)
    parent = (rng.random(n) < 0.2 + 0.3 * codes).astype(int)
    drawn = (rng.random(n)[:, None] > STRATA.cumsum(axis=2)[parent, codes, :-1]).sum(axis=1)
    y = 2.0 * codes + rng.normal(size=n)
    return pd.DataFrame(
        {
            "g": codes + rng.integers(0, 2, n),
            "y": y,
            "p": np.array(["a", "b"])[parent],
            "x": np.array([0, 1, 5])[drawn],
        }
    ), codes


@pytest.mark.parametrize("approximate", [False, True])
def test_along_a_tree_each_released_parent_has_its_own_channel(approximate):
    frame, codes = along_a_tree(60_000, default_rng(4))
    original = pd.Series(np.array([0.0, 1.0, 5.0])[codes])
    subject = ReleasedColumn(name="x", levels=(0, 1, 5), matrix=STRATA, parent=("p", ("a", "b")))
    wrong = ReleasedColumn(name="x", levels=(0, 1, 5), matrix=STRATA[0])
    mean = subject.mean(frame, approximate=approximate)
    assert abs(mean.value - original.mean()) < 5 * mean.standard_error + mean.worst_bias
    assert (
        abs(wrong.mean(frame, approximate=False).value - original.mean()) > 8 * mean.standard_error
    )
    means_ = subject.group_means(frame, "g", approximate=approximate)
    assert (
        np.abs(means_.value - original.groupby(frame["g"]).mean())
        < 5 * means_.standard_error + means_.worst_bias
    ).all()
    assert means_.worst_bias.max() < 0.2
    shares = subject.distribution(frame, approximate=approximate, simplex=approximate)
    assert_allclose(shares.value, np.bincount(codes) / 60_000, atol=0.03)
    slope = subject.slope(frame, covariates=["y"], approximate=approximate)
    true = np.polyfit(frame["y"], original, 1)[0]
    assert abs(slope.value["y"] - true) < 5 * slope.standard_error["y"] + slope.worst_bias["y"]
    other = subject.slope(frame, response="y", approximate=approximate)
    assert other.value["x"] == pytest.approx(np.polyfit(original, frame["y"], 1)[0], rel=0.05)
    assert subject.transform_for().shape == (2, 3)


def test_counts_of_a_tree_s_column_are_by_its_parent_too():
    frame, _ = along_a_tree(5000, default_rng(5))
    subject = ReleasedColumn(name="x", levels=(0, 1, 5), matrix=STRATA, parent=("p", ("a", "b")))
    by_both = subject.mean(frame.groupby(["p", "x"]).size())
    assert by_both.value == subject.mean(frame).value
    lazy = dd.from_pandas(frame, npartitions=3)
    for approximate in (True, False):
        ours, theirs = (
            subject.group_means(each, "g", approximate=approximate).value for each in (lazy, frame)
        )
        assert_allclose(ours, theirs)
        ours, theirs = (
            subject.slope(each, covariates=["y"], approximate=approximate).value
            for each in (lazy, frame)
        )
        assert_allclose(ours, theirs)
    with refused("released given 'p'", DataError):
        subject.mean(frame["x"].value_counts())


COLUMNS = {
    "stars": discrete([1, 2, 3]),
    "liked": categorical(["no", "yes"]),
    "group": {"role": "keep"},
}


def test_the_card_of_a_tree_gives_unbiased_group_means():
    rng = default_rng(6)
    group = np.arange(40_000) % 2
    stars = np.where(rng.random(40_000) < 0.3 + 0.4 * group, 3, rng.integers(1, 4, 40_000))
    table = pd.DataFrame(
        {
            "stars": stars,
            "liked": np.where(rng.random(40_000) < 0.25 * stars, "yes", "no"),
            "group": group,
        }
    )
    schema = dpdask.Schema.from_dict({"columns": COLUMNS})
    release = dpdask.DIP(
        schema, epsilon=8.0, reference=dpdask.Tree(), channel="optimal", insecure_seed=1
    ).fit(table)
    private = release.transform(table)
    parents = set()
    for name, values in (("stars", [1, 2, 3]), ("liked", [0, 1])):
        column = ReleasedColumn.from_card(release.card, name)
        parents.add(column.parent and column.parent[0])
        truth = table[name].map(dict(zip(column.levels, values, strict=True))).groupby(group).mean()
        for approximate in (True, False):
            found = column.group_means(private, "group", values, approximate=approximate)
            assert (np.abs(found.value - truth) < 5 * found.standard_error + found.worst_bias).all()
            assert found.standard_error.max() < 0.1
    assert None in parents
    assert len(parents) == 2


def test_a_parent_that_is_cut_into_cells_is_refused_in_one_line():
    rng = default_rng(7)
    columns = {
        "x": continuous([0, 1]),
        "liked": COLUMNS["liked"],
    }
    x = rng.random(2000)
    table = pd.DataFrame({"x": x, "liked": np.where(x > 0.5, "yes", "no")})
    reference = dpdask.Tree(bins=4)
    release = dpdask.DIP(
        dpdask.Schema.from_dict({"columns": columns}),
        epsilon=8.0,
        reference=reference,
        insecure_seed=1,
    ).fit(table)
    card = release.card
    child = next(name for name, column in card["columns"].items() if column.get("parent"))
    with refused(
        r"no channel on levels|depends on the released cell of 'x', which is not a level",
    ) as caught:
        ReleasedColumn.from_card(card, child)
    assert "\n" not in str(caught.value)


def test_a_half_width_holds_with_its_probability_averaged_over_the_spreads_of_a_bias():
    error, biases = np.array([1.0, 0.5]), np.array([[0.2, 3.0], [2.0, 0.1]])
    probability = np.array([0.7, 0.3])
    for alpha in (0.05, 0.01):
        half = find_half_width(error, biases, probability, alpha)
        outside = 2 * stats.norm.sf(half / np.sqrt(error**2 + biases**2))
        assert_allclose(probability @ outside, alpha, rtol=1e-6)
    free = find_half_width(error, np.zeros((1, 2)), np.ones(1), 0.05)
    assert_allclose(free, stats.norm.ppf(0.975) * error)


def test_the_bound_on_a_bias_is_that_of_linear_programming():
    rng = default_rng(4)
    directions = Directions.of(T, np.linalg.matrix_power(T, 200)[0])
    g, f = rng.normal(size=(5, 3)), rng.normal(size=(5, 3))
    most = np.array(
        [[1.0, 1.0, 1.0], [0.5, 0.5, 0.5], [0.4, 0.9, 0.1], [0.9, 0.2, 0.1], [0.35] * 3]
    )
    found = directions.bias(g, f, most)
    for own, target, caps, bound in zip(g, f, most, found, strict=True):
        off = T @ own - target
        ends = [
            optimize.linprog(
                sign * off, A_eq=np.ones((1, 3)), b_eq=[1.0], bounds=[(0.0, cap) for cap in caps]
            ).fun
            for sign in (1, -1)
        ]
        assert bound == pytest.approx(max(map(abs, ends)))
    free = directions.bias(g, f)
    assert_allclose(directions.bias(g, f, np.ones((1, 3))), free)
    assert (found <= free + 1e-12).all()


MERGES = np.array([[0.6, 0.2, 0.2], [0.15, 0.55, 0.3], [0.15, 0.3, 0.55]])


def test_intervals_of_groups_hold_on_average_and_are_narrower_than_by_the_worst_bias():
    rng = default_rng(5)
    weak = 0.6 * MERGES + 0.4 * np.linalg.matrix_power(MERGES, 200)[0]
    own = rng.dirichlet([8.0, 6.0, 6.0], 40)
    known = ReleasedColumn(name="x", levels=(0, 1, 5), matrix=weak, at_most=np.full(3, 0.5))
    held, widths = [], []
    for _ in range(20):
        codes = np.array([rng.choice(3, 300, p=each) for each in own]).ravel()
        drawn = randomise(codes, weak, rng)
        frame = pd.DataFrame({"g": np.repeat(np.arange(40), 300), "x": np.array([0, 1, 5])[drawn]})
        found, worst = (
            each.group_means(frame, "g")
            for each in (known, dataclasses.replace(known, at_most=None))
        )
        low, high = found.interval()
        held.append(((low <= own @ [0, 1, 5]) & (own @ [0, 1, 5] <= high)).mean())
        widths.append(float((found.worst_bias / worst.worst_bias).mean()))
        assert_allclose(found.value, worst.value)
    assert np.mean(held) > 0.93
    assert np.mean(widths) < 0.5


def test_groups_lean_along_the_numbers_of_the_levels_where_these_are_what_differs():
    """The channel merges neighbours; groups differ in their mean, which says how the merged levels differ."""
    rng, numbers = default_rng(8), np.arange(6.0)
    merged = np.kron(0.7 * np.eye(3) + 0.1, np.full((2, 2), 0.5))
    own = np.exp(np.outer(rng.normal(0.0, 0.5, 30), numbers - 2.5))
    own /= own.sum(axis=1, keepdims=True)
    codes = np.concatenate([rng.choice(6, 2_000, p=each) for each in own])
    drawn = randomise(codes, merged, rng)
    frame = pd.DataFrame({"g": np.repeat(np.arange(30), 2_000), "x": numbers[drawn]})
    most = np.bincount(codes) / len(codes) + 0.01
    known = ReleasedColumn(name="x", levels=tuple(numbers), matrix=merged, at_most=most)
    names = dataclasses.replace(known, levels=tuple("abcdef"))
    found = known.crosstab(frame, "g", normalise=True)
    plain = names.crosstab(frame.assign(x=np.array(list("abcdef"))[drawn]), "g", normalise=True)
    off, of_plain = (np.abs(each.value.to_numpy() - own).mean() for each in (found, plain))
    assert off < 0.8 * of_plain
    for each in (found, plain):
        low, high = (end.to_numpy() for end in each.interval())
        assert ((low <= own) & (own <= high)).mean() > 0.93


def test_rows_that_do_not_follow_the_reference_have_intervals_that_hold_on_average():
    """The channel of a declared reference merges levels: the shares within them are those of the reference, about."""
    rng, held, alone, widths = default_rng(9), [], [], []
    for _ in range(40):
        own = np.exp(0.3 * rng.normal(size=6))
        own /= own.sum()
        merged = np.kron(0.7 * np.eye(3) + 0.1, np.full((2, 2), 0.5))
        drawn = rng.choice(6, 4_000, p=own @ merged)
        free = ReleasedColumn(name="x", levels=tuple("abcdef"), matrix=merged)
        known = dataclasses.replace(free, at_most=np.ones(6), follows=False)
        counts = np.bincount(drawn, minlength=6)
        found, worst = (each.distribution(counts) for each in (known, free))
        off = np.abs(found.value.to_numpy() - own)
        held.append(off <= 1.96 * found.standard_error + found.worst_bias)
        alone.append(off <= 1.96 * found.standard_error)
        widths.append(float((found.worst_bias / worst.worst_bias).mean()))
    assert np.mean(held) > 0.93
    assert np.mean(alone) < 0.8
    assert np.mean(widths) < 0.8


def test_how_many_rows_a_group_has_is_in_the_error_of_a_table():
    rng, found = default_rng(6), []
    subject = ReleasedColumn(name="x", levels=(0, 1, 5), matrix=np.eye(3))
    for _ in range(300):
        group = rng.choice(["a", "b"], 200, p=[0.3, 0.7])
        frame = pd.DataFrame({"g": group, "x": np.where(rng.random(200) < 0.9, 0, 5)})
        found.append(subject.crosstab(frame, "g", approximate=False))
    spread = np.std([each.value[0] for each in found], axis=0)
    error = np.mean([each.standard_error[0] for each in found], axis=0)
    assert_allclose(error, spread, rtol=0.15)


def test_a_group_of_which_no_row_surely_has_a_value_has_no_mean():
    rng = default_rng(7)
    subject = ReleasedColumn(name="x", levels=(None, 1, 5), matrix=T)
    codes = np.concatenate([np.zeros(300, int), rng.integers(0, 3, 3_000)])
    drawn = randomise(codes, T, rng)
    levels = np.array([None, 1, 5], object)[drawn]
    frame = pd.DataFrame({"g": np.repeat(["a", "b"], [300, 3_000]), "x": levels})
    for approximate in (False, True):
        found = subject.group_means(frame, "g", approximate=approximate)
        assert abs(found.value["b"] - 3.0) < 5 * found.standard_error["b"] + found.worst_bias["b"]
        if not approximate:
            assert found.value.isna().tolist() == [True, False]


def test_the_bias_of_a_slope_is_narrower_where_levels_are_rare():
    rng = default_rng(9)
    codes = rng.choice(3, 4_000, p=[0.9, 0.05, 0.05])
    merged = np.array([[0.6, 0.2, 0.2], [0.2, 0.4, 0.4], [0.2, 0.4, 0.4]])
    drawn = randomise(codes, merged, rng)
    frame = pd.DataFrame({"z": rng.normal(size=4_000), "x": np.array([0, 1, 5])[drawn]})
    free = ReleasedColumn(name="x", levels=(0, 1, 5), matrix=merged)
    known = dataclasses.replace(free, at_most=np.array([0.93, 0.07, 0.07]))
    wide, narrow = (each.slope(frame, covariates=["z"]).worst_bias["z"] for each in (free, known))
    assert 0.0 < narrow < 0.5 * wide


def test_the_bias_of_a_slope_is_as_likely_as_what_the_noise_shows_of_the_dependence():
    rng, numbers = default_rng(11), np.arange(4.0)
    merged = np.kron(0.7 * np.eye(2) + 0.15, np.full((2, 2), 0.5))
    held, alone, widths = [], [], []
    for _ in range(60):
        z = rng.normal(size=4_000)
        tilt = 0.4 * rng.normal() * numbers + 0.15 * rng.normal(size=4)
        weights = np.exp(np.outer(z, tilt))
        shares = weights / weights.sum(axis=1, keepdims=True)
        codes = (rng.random(4_000)[:, None] > shares.cumsum(axis=1)[:, :-1]).sum(axis=1)
        truth = np.cov(z, shares @ numbers)[0, 1] / z.var()
        drawn = randomise(codes, merged, rng)
        frame = pd.DataFrame({"z": z, "x": numbers[drawn]})
        free = ReleasedColumn(name="x", levels=tuple(numbers), matrix=merged)
        known = dataclasses.replace(free, at_most=np.bincount(codes) / 4_000 + 0.02)
        found, worst = (each.slope(frame, covariates=["z"]) for each in (known, free))
        off = abs(found.value["z"] - truth)
        held.append(off <= 1.96 * found.standard_error["z"] + found.worst_bias["z"])
        alone.append(off <= 1.96 * found.standard_error["z"])
        widths.append(found.worst_bias["z"] / worst.worst_bias["z"])
    assert np.mean(held) > 0.88
    assert np.mean(alone) < 0.9
    assert np.mean(widths) < 0.7
