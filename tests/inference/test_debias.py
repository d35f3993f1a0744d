"""Debiased estimates against the original column: unbiased, honest about their errors, exact without noise, and refused when lost."""

import datetime as dt
import math

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from e2e.helpers import refused
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import default_rng
from numpy.testing import assert_allclose
from scipy import stats
from strategies import randomise

from dpdask.channels import laplace
from dpdask.errors import DataError, InputError
from dpdask.inference import MAX_CONDITION, ReleasedColumn
from dpdask.mechanisms.card import CoveredRows, Section, make_card
from dpdask.privacy import Budget

ALPHA = 1e-9
LEVELS = (1.0, 2.0, 3.0, 5.0)
P = np.array([0.1, 0.2, 0.4, 0.3])
T = 0.5 * np.eye(4) + 0.5 * P[None, :]  # invertible, invariant: P·T = P
MERGED = np.array(
    [[0.6, 0.2, 0.1, 0.1], [0.6, 0.2, 0.1, 0.1], [0.1, 0.1, 0.5, 0.3], [0.1, 0.1, 0.3, 0.5]]
)


def card(matrix, levels=LEVELS, name="rating"):
    everybody = CoveredRows(who="every row", fraction=1.0, of="rows")
    section = Section(
        budget=Budget(epsilon=1.0),
        text="for a test",
        protected=everybody,
        unprotected=everybody,
        mechanism={"kind": "test"},
        columns={
            name: {"role": "privatised", "levels": levels, "channel": np.asarray(matrix).tolist()},
            "kept": {"role": "kept"},
        },
        accounting={"composition": "one", "epsilon_exact": 1.0},
        order="none",
    )
    return make_card(section, name="test", insecure=True).to_dict()


def column(matrix=T, levels=LEVELS, **options):
    return ReleasedColumn.from_card(card(matrix, levels), "rating", **options)


def consistent(estimates, truth):
    """Return whether the mean of independent estimates passes a t-test of being the truth."""
    return bool(stats.ttest_1samp(estimates, truth).pvalue > ALPHA)


def table(n, rng):
    """Return original codes that depend on a group and a number, as a released table holds them."""
    group = rng.choice(["a", "b", "c"], n, p=[0.5, 0.3, 0.2])
    x = rng.gamma(2.0, 3.0, n) + 100.0
    shift = np.select([group == "a", group == "b"], [0.4, -0.3], 0.0) + 0.25 * (x - 106) / 4
    codes = np.digitize(rng.normal(size=n) + shift, [-1.3, -0.5, 0.5])
    y = 2.0 * np.array(LEVELS)[codes] + 0.5 * x + rng.normal(size=n) * (1 + 0.3 * codes)
    return pd.DataFrame({"group": group, "x": x, "y": y, "code": codes})


def release(frame, matrix, rng):
    return frame.drop(columns="code").assign(
        rating=np.array(LEVELS)[randomise(frame["code"].to_numpy(), matrix, rng)]
    )


def ols(frame, response, covariates):
    return np.linalg.lstsq(
        np.column_stack([np.ones(len(frame)), *covariates]), response, rcond=None
    )[0][1:]


# --- distributions ---


@st.composite
def channels(draw):
    """Random invertible channels of 2 to 12 levels, with a diagonal share that bounds the condition number."""
    s = draw(st.integers(2, 12))
    rng = default_rng(draw(st.integers(0, 2**32)))
    share = draw(st.floats(0.15, 1.0))
    return share * np.eye(s) + (1 - share) * rng.dirichlet(
        np.full(s, draw(st.sampled_from([0.3, 1.0, 10.0]))), size=s
    )


@settings(deadline=None, max_examples=60)
@given(matrix=channels(), seed=st.integers(0, 2**32))
def test_transform_solves_t_g_equals_f_or_refuses(matrix, seed):
    f = default_rng(seed).normal(size=len(matrix))
    subject = column(matrix, tuple(range(len(matrix))))
    if (matrix.max(axis=0) == 0).any() or subject.condition_number > MAX_CONDITION / 2:
        return
    assert_allclose(matrix @ subject.transform_for(f), f, atol=1e-8)
    assert_allclose(subject.reference @ matrix, subject.reference, atol=1e-9)
    assert subject.correlations[0] == pytest.approx(1.0, abs=1e-6)


def test_without_noise_every_estimate_is_the_plain_one():
    rng = default_rng(1)
    original = table(3000, rng)
    frame = release(original, np.eye(4), rng)
    subject = column(np.eye(4))
    assert subject.condition_number == 1.0
    shares = subject.distribution(frame, approximate=False)
    plain = frame["rating"].value_counts(normalize=True).sort_index()
    assert_allclose(shares.value, plain)
    assert_allclose(shares.standard_error, np.sqrt(plain * (1 - plain) / 2999))
    assert subject.mean(frame, approximate=False).value == pytest.approx(frame["rating"].mean())
    assert subject.mean(frame, approximate=False).standard_error == pytest.approx(
        frame["rating"].sem()
    )
    means = subject.group_means(frame, "group", approximate=False)
    assert_allclose(means.value, frame.groupby("group")["rating"].mean())
    assert_allclose(means.standard_error, frame.groupby("group")["rating"].sem())
    assert_allclose(
        subject.crosstab(frame, "group", approximate=False).value,
        pd.crosstab(frame["group"], frame["rating"]),
        atol=1e-9,
    )
    rating, x, y = (frame[name].to_numpy() for name in ("rating", "x", "y"))
    assert_allclose(
        subject.slope(frame, covariates=["x", "y"], approximate=False).value,
        ols(frame, rating, [x, y]),
    )
    assert_allclose(
        subject.slope(frame, response="y", covariates=["x"], approximate=False).value,
        ols(frame, y, [rating, x]),
    )
    design = np.column_stack([np.ones(3000), rating, x])
    errors = y - design @ np.linalg.lstsq(design, y, rcond=None)[0]
    bread = np.linalg.inv(design.T @ design)
    sandwich = np.sqrt(np.diag(bread @ (design.T * errors**2) @ design @ bread) * 3000 / 2997)[1:]
    assert_allclose(
        subject.slope(frame, response="y", covariates=["x"], approximate=False).standard_error,
        sandwich,
    )


# --- unbiased by simulation; the naive estimate fails the same test ---


@pytest.mark.parametrize("n_runs", [40, pytest.param(120, marks=pytest.mark.slow)])
def test_groups_crosstabs_and_slopes_are_unbiased_with_honest_errors_and_the_naive_ones_are_not(
    n_runs,
):
    rng = default_rng(3)
    original = table(1500, rng)
    rating, x, y = (
        np.array(LEVELS)[original["code"]],
        original["x"].to_numpy(),
        original["y"].to_numpy(),
    )
    asked = {
        "mean a": lambda of, frame: [
            part["a"] for part in parts(of.group_means(frame, "group", approximate=False))
        ],
        "b has 5": lambda of, frame: [
            part.loc["b", 5.0] for part in parts(of.crosstab(frame, "group", approximate=False))
        ],
        "on x": lambda of, frame: [
            part["x"] for part in parts(of.slope(frame, covariates=["x"], approximate=False))
        ],
        "of y": lambda of, frame: [
            part["rating"]
            for part in parts(of.slope(frame, response="y", covariates=["x"], approximate=False))
        ],
    }
    truth = {
        "mean a": rating[original["group"] == "a"].mean(),
        "b has 5": float((rating[original["group"] == "b"] == 5.0).sum()),
        "on x": ols(original, rating, [x])[0],
        "of y": ols(original, y, [rating, x])[0],
    }
    frames = [release(original, T, rng) for _ in range(n_runs)]
    for name, ask in asked.items():
        ours, errors = np.array([ask(column(), frame) for frame in frames]).T
        naive = np.array([ask(column(np.eye(4)), frame)[0] for frame in frames])
        # the rows are the same in all releases, so that the estimates vary by less than their errors, which hold the rows' draw too
        assert 0.3 < ours.std(ddof=1) / errors.mean() < 1.2, name
        if name == "of y":  # a ratio of estimates: consistent, with a bias of second order
            assert abs(ours.mean() - truth[name]) < 0.05 * truth[name]
            assert abs(naive.mean() - truth[name]) > 0.3 * truth[name]
        else:
            assert consistent(ours, truth[name]), name
            assert not consistent(naive, truth[name]), name


def parts(found):
    return found.value, found.standard_error


# --- standard errors ---


def covers(estimate, truth):
    low, high = estimate.interval(0.95)
    return np.atleast_1d(
        (np.asarray(low) <= np.asarray(truth)) & (np.asarray(truth) <= np.asarray(high))
    )


@pytest.mark.parametrize(
    ("n", "low", "high"),
    [(250, 0.90, 0.995), pytest.param(1500, 0.92, 0.98, marks=pytest.mark.slow)],
)
def test_distributions_and_means_are_unbiased_and_their_intervals_cover(n, low, high):
    original = np.array([0.4, 0.2, 0.15, 0.25])
    draws = default_rng(4).multinomial(1000, original @ T, size=n)
    found = [
        (column().distribution(counts, approximate=False), column().mean(counts, approximate=False))
        for counts in draws
    ]
    for level in range(4):
        assert consistent(
            np.array([shares.value.iloc[level] for shares, _ in found]), original[level]
        )
    assert not consistent(draws[:, 0] / 1000, original[0])
    of_shares = np.mean([covers(shares, original) for shares, _ in found], axis=0)
    assert ((of_shares > low) & (of_shares < high)).all()
    assert low < np.mean([covers(mean, original @ LEVELS) for _, mean in found]) < high


# --- what the channel cannot tell ---


def test_merged_levels_are_refused_unless_the_question_does_not_need_them():
    subject = column(MERGED)
    assert subject.condition_number > MAX_CONDITION
    with refused(r"determines only 3 of 4 directions \(condition number above 1e\+06\)"):
        subject.distribution([1, 2, 3, 4], approximate=False)
    with refused("approximate=True"):
        subject.transform_for([1, 0, 0, 0])
    coarse = subject.transform_for([1, 1, 0, 0])  # the two merged levels together
    assert_allclose(MERGED @ coarse, [1, 1, 0, 0], atol=1e-9)
    assert subject.mean([1, 2, 3, 4], [1, 1, 0, 0], approximate=False).worst_bias == 0.0


def test_approximate_reports_its_worst_bias_and_is_exact_in_the_reference_s_proportions():
    subject = column(MERGED, max_condition=MAX_CONDITION)
    reference = subject.reference
    original = reference * (
        MERGED @ np.array([3.0, 1.0, 0.2, 0.1])
    )  # merged levels as in the reference, the others not
    original /= original.sum()
    found = subject.distribution(1e6 * original @ MERGED)
    assert_allclose(found.value, original, atol=1e-9)
    assert (found.worst_bias[[1.0, 2.0]] > 0.1).all()
    assert (found.worst_bias[[3.0, 5.0]] == 0.0).all()
    other = np.array([0.7, 0.0, 0.1, 0.2])
    found = subject.distribution(1e6 * other @ MERGED)
    wrong = np.abs(found.value - other)
    assert wrong.max() > 0.05
    assert (wrong <= found.worst_bias + 1e-9).all()
    assert covers(found, other).all()
    assert found.condition_number < MAX_CONDITION
    exact, coarse = (
        column(laplace(P, 4.0, ordered=True).matrix, max_condition=limit).mean([100, 200, 300, 400])
        for limit in (1e6, 10)
    )
    assert exact.worst_bias < 1e-6 < coarse.worst_bias  # a lower limit trades variance for a bias
    assert coarse.standard_error < exact.standard_error
    assert exact.condition_number > 10 >= coarse.condition_number


def test_approximate_slopes_stay_within_their_worst_bias():
    rng = default_rng(7)
    original = table(60_000, rng)
    frame = release(original, MERGED, rng)
    estimate = column(MERGED).slope(frame, covariates=["x"])
    assert estimate.worst_bias["x"] > 0
    assert covers(
        estimate, ols(original, np.array(LEVELS)[original["code"]], [original["x"].to_numpy()])
    ).all()
    assert math.isinf(column(MERGED).slope(frame, response="y").worst_bias["rating"])


def test_simplex_gives_probabilities_where_the_unbiased_estimate_leaves_them():
    counts = [90, 10, 20, 5]
    assert column().distribution(counts, approximate=False).value.min() < 0
    inside = column().distribution(counts, simplex=True, approximate=False).value
    assert inside.min() >= 0
    assert inside.sum() == pytest.approx(1.0)
    frame = pd.DataFrame({"g": "a", "rating": np.repeat(LEVELS, counts)})
    assert (
        column().crosstab(frame, "g", simplex=True, approximate=False).value.to_numpy().min() >= 0
    )


def test_what_has_no_error_says_none():
    unseen = laplace(
        np.array([0.3, 0.0, 0.3, 0.4]), 4.0, ordered=True
    ).matrix  # the reference never saw a level: it is taken not to occur
    found = column(unseen).distribution([30, 0, 30, 40], approximate=False)
    assert (found.value[2.0], found.standard_error[2.0], found.value.sum()) == (
        0.0,
        0.0,
        pytest.approx(1.0),
    )
    means = column().group_means(
        pd.DataFrame({"g": ["a", "b", "b"], "rating": [1.0, 2.0, 3.0]}), "g", approximate=False
    )
    assert math.isnan(means.standard_error["a"])  # a group of one row
    assert means.standard_error["b"] > 0


@pytest.mark.parametrize("lazy", [False, True], ids=["pandas", "dask"])
def test_a_slope_on_large_numbers_that_vary_little(lazy):
    """Seconds since 1970 within some minutes: their squares agree in nearly all digits."""
    rng = default_rng(9)
    frame = release(table(3000, rng), np.eye(4), rng)
    seconds = rng.integers(0, 300, len(frame))
    column_ = column(np.eye(4))
    small, large, same = (
        frame.assign(x=1.0 * seconds),
        frame.assign(x=1.7e9 + seconds),
        frame.assign(x=1.7e9 + 0.1),
    )
    given = [dd.from_pandas(each, npartitions=3) if lazy else each for each in (small, large, same)]
    expected, found = (
        column_.slope(each, covariates=["x"], approximate=False).value["x"] for each in given[:2]
    )
    assert found == pytest.approx(expected, rel=1e-6)
    with refused("does not vary"):
        column_.slope(given[2], covariates=["x"], approximate=False)


def test_a_slope_on_a_column_that_is_all_noise_is_refused():
    rng = default_rng(8)
    weak = 0.02 * np.eye(4) + 0.98 * P[None, :]
    frame = release(table(300, rng), weak, rng)
    with refused("cannot be distinguished from zero"):
        column(weak).slope(frame, response="y", approximate=False)


# --- frames and inputs ---


def test_dask_and_pandas_frames_give_the_same_estimates():
    rng = default_rng(9)
    frame = release(table(2000, rng), T, rng)
    frame.loc[frame.index[:5], "x"] = np.nan
    lazy = dd.from_pandas(frame, npartitions=3)
    subject = column()
    with dask.config.set(scheduler="synchronous"):
        for ask in (
            lambda f: subject.distribution(f).value,
            lambda f: subject.distribution(f["rating"].value_counts()).standard_error,
            lambda f: subject.mean(f).value,
            lambda f: subject.group_means(f, ["group"]).standard_error,
            lambda f: subject.crosstab(f, "group").value,
            lambda f: subject.slope(f, covariates=["x"]).value,
            lambda f: subject.slope(f, response="y", covariates=["x"]).standard_error,
        ):
            assert_allclose(np.asarray(ask(lazy), float), np.asarray(ask(frame), float), rtol=1e-9)
        expected = subject.slope(
            frame.dropna(), covariates=["x"]
        ).value  # rows without a kept value are left out
        assert_allclose(subject.slope(frame, covariates=["x"]).value, expected)
        assert subject.group_means(lazy, ["group"]).value.index.equals(
            subject.group_means(frame, "group").value.index
        )


@pytest.mark.parametrize("npartitions", [0, 2])
def test_null_levels_dates_texts_and_categories_are_recognised(npartitions):
    third = np.full((3, 3), 0.1) + 0.7 * np.eye(3)
    for levels, values in (
        ((None, "a", "b"), pd.Series([None, "a", "b", "a"])),
        ((None, 1, 2), pd.Series([np.nan, 1.0, 2.0, 1.0])),
        (
            ("2020-01-01", "2020-01-02", "2020-01-03"),
            pd.to_datetime(pd.Series(["2020-01-01", "2020-01-02", "2020-01-03", "2020-01-02"])),
        ),
        (
            ("2020-01-01", "2020-01-02", "2020-01-03"),
            pd.Series([dt.date(2020, 1, day) for day in (1, 2, 3, 2)]),
        ),
        (
            ("a", "b", "c"),
            pd.Series(pd.Categorical(["a", "b", "c", "b"], categories=["c", "b", "a", "z"])),
        ),
    ):
        frame = pd.DataFrame({"rating": values, "group": ["u", "u", "v", None]})
        asked = dd.from_pandas(frame, npartitions=npartitions) if npartitions else frame
        with dask.config.set(scheduler="synchronous"):
            counts = column(third, levels).crosstab(asked, "group").value.to_numpy()
            shares = column(third, levels).distribution(asked).value
        assert counts.shape == (3, 3)
        assert_allclose(shares, np.linalg.solve(third.T, [0.25, 0.5, 0.25]))


def test_means_leave_out_nulls_and_levels_without_a_number():
    third, levels = np.full((3, 3), 0.1) + 0.7 * np.eye(3), (None, 1, 3)
    frame = pd.DataFrame(
        {
            "rating": np.repeat([np.nan, 1.0, 3.0], [300, 400, 300]),
            "group": np.tile(["u", "v"], 500),
        }
    )
    shares = np.linalg.solve(third.T, [0.3, 0.4, 0.3])
    truth = (shares[1] + 3.0 * shares[2]) / (shares[1] + shares[2])
    found = column(third, levels).mean(frame, approximate=False)
    assert found.value == pytest.approx(truth)
    assert found.standard_error > 0.0
    groups = column(third, levels).group_means(frame, "group", approximate=False)
    assert_allclose(groups.value, [truth, truth])
    of_null = column(third, levels).mean(frame, [0.0, 1.0, 3.0], approximate=False)
    assert of_null.value == pytest.approx(shares[1] + 3.0 * shares[2])
    assert column(third, levels).mean(
        frame, [5.0, math.nan, math.nan], approximate=False
    ).value == pytest.approx(5.0)
    with refused("one per level"):
        column(third, levels).mean(frame, [0.0, math.inf, 1.0])
    with refused("null included"):
        column(third, levels).transform_for()


def test_slopes_leave_out_nulls():
    """Of expected numbers of released rows, slopes are those of the rows with a value, and so with null in the middle of the levels' values."""
    levels, third = (None, 1, 3), np.full((3, 3), 0.1) + 0.7 * np.eye(3)
    x, own = np.repeat([0.0, 1.0, 2.0], 3), np.tile([0, 1, 2], 3)
    rows = np.array([600, 300, 100, 300, 300, 300, 100, 200, 900])
    expected = np.rint(10 * rows[:, None] * third[own]).astype(int)
    numbers = np.array([np.nan, 1.0, 3.0])
    released = pd.DataFrame(
        {
            "x": np.repeat(np.repeat(x, 3), expected.ravel()),
            "rating": np.repeat(np.tile(numbers, 9), expected.ravel()),
        }
    )
    here = own > 0
    slope = np.polyfit(x[here], numbers[own][here], 1, w=np.sqrt(rows[here]))[0]
    back = np.polyfit(numbers[own][here], x[here], 1, w=np.sqrt(rows[here]))[0]
    rating = column(third, levels)
    of_x = rating.slope(released, covariates=["x"], approximate=False)
    assert of_x.value["x"] == pytest.approx(slope, rel=1e-3)
    assert of_x.worst_bias["x"] == 0.0
    on_rating = rating.slope(released, response="x", approximate=False)
    assert on_rating.value["rating"] == pytest.approx(back, rel=1e-3)
    naive = np.polyfit(*released.dropna().to_numpy().T, 1)[0]
    assert abs(naive - slope) > 8 * of_x.standard_error["x"]
    nothing = released.assign(rating=np.where(released.index % 10 == 0, 1.0, np.nan))
    with refused("rows with a value cannot be told"):
        rating.slope(nothing, covariates=["x"], approximate=False)


@pytest.mark.parametrize("planted", [False, True], ids=["nulls left out", "nulls ignored"])
def test_errors_of_slopes_without_nulls_are_those_of_repeated_draws(planted):
    rng, third = default_rng(3), np.full((3, 3), 0.1) + 0.7 * np.eye(3)
    rating, offs = column(third, (None, 1, 3)), []
    for _ in range(60 if planted else 200):
        x = rng.integers(0, 3, 3_000).astype(float)
        value = 1 + (rng.random(3_000) < 0.2 + 0.3 * x).astype(int)
        own = np.where(rng.random(3_000) < 0.5 - 0.2 * x, 0, value)
        released = (rng.random(3_000)[:, None] > np.cumsum(third, axis=1)[own]).sum(axis=1)
        frame = pd.DataFrame({"x": x, "rating": np.array([np.nan, 1.0, 3.0])[released]})
        frame = frame.dropna() if planted else frame
        found = rating.slope(frame, covariates=["x"], approximate=False)
        offs.append((found.value["x"] - 0.6) / found.standard_error["x"])
    held = np.mean(np.abs(offs) < 1.96)
    assert (held < 0.8) if planted else (0.9 < held < 0.99)


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: ReleasedColumn.from_card(card(T), "other"), "no such column"),
        (lambda: ReleasedColumn.from_card(card(T), "kept"), "no channel on levels"),
        (lambda: ReleasedColumn.from_card(card(T[:, :3]), "rating"), "not square"),
        (
            lambda: ReleasedColumn.from_card(card([["x"]], (1,)), "rating"),
            "not a matrix of numbers",
        ),
        (lambda: column(2 * T), "not probabilities"),
        (
            lambda: column(np.tile(P, (4, 1))).mean([1, 2, 3, 4], approximate=False),
            "determines only 1 of 4",
        ),
        (lambda: column(T, max_condition=1e9), "max_condition"),
        (lambda: column(T, ("a", "b", "c", "d")).transform_for(), "not all numbers"),
        (lambda: column(T).transform_for([1, 2]), "one per level"),
        (lambda: column(T).transform_for([1, 2, 3, math.nan]), "one per level"),
        (lambda: column(T).slope(pd.DataFrame({"rating": [1.0], "x": [1.0]})), "kept column"),
        (
            lambda: column(T).slope(
                pd.DataFrame({"rating": [1.0] * 9, "x": [1.0] * 9}), covariates=["x"]
            ),
            "does not vary",
        ),
        (
            lambda: column(T).slope(
                pd.DataFrame({"rating": [1.0] * 9, "x": ["a"] * 9}), covariates=["x"]
            ),
            "numeric",
        ),
        (
            lambda: column(T).slope(
                pd.DataFrame({"rating": [1.0] * 9, "x": range(9), "y": range(9)}),
                covariates=["x", "y"],
            ),
            "collinear",
        ),
    ],
)
def test_what_cannot_be_is_refused(act, message):
    with refused(message):
        act()


@pytest.mark.parametrize(
    "changed", [{"format": 999}, {"format": 1}, {"columns": []}, {"further": 1}]
)
def test_a_card_of_another_format_is_refused(changed):
    with refused(r"^card: this", InputError):
        ReleasedColumn.from_card(card(T) | changed, "rating")


@pytest.mark.parametrize(
    "counts",
    [
        [1, 2, 3],
        [0, 0, 0, 0],
        [1, -1, 2, 3],
        [1, math.nan, 2, 3],
        {9.75: 3},
        pd.Series({1.0: 1, 9.75: 2}),
    ],
)
def test_counts_that_are_none_are_refused_without_a_value(counts):
    with pytest.raises(DataError) as caught:
        column().distribution(counts, approximate=False)
    assert "9.75" not in str(caught.value)
