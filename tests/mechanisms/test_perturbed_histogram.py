"""The perturbed histogram: its plan, the distribution of both paths, thresholds, what is said before, and what analysts get."""

import math
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from mechanisms.noisy import keyed, lettered
from numpy.testing import assert_array_equal
from scipy import stats
from strategies import level_codec, value_codec

from dpdask.cells import cells
from dpdask.errors import InputError, SpecError
from dpdask.mechanisms.histogram import noise as histogram
from dpdask.mechanisms.histogram import noise as sparse
from dpdask.mechanisms.histogram.noise import NoisyHistogram, plan
from dpdask.mechanisms.histogram.release import (
    affordable_bins,
    bins_by_rule,
    centres,
    largest_noise,
)
from dpdask.mechanisms.histogram.spec import list_warnings
from dpdask.privacy import Budget
from dpdask.privacy.events import epsilon
from dpdask.stats.marginals import JointCounts, codes_of

ALPHA = 1e-9  # how often a right sampler may fail, per test


def budget(epsilon=1.0, delta=0, **changes):
    return Budget(epsilon=epsilon, delta=delta, **changes)


def counts_of(domain, counts):
    keys = np.array(sorted(counts), dtype=np.int64)
    return JointCounts(domain, keys, np.array([counts[int(key)] for key in keys], dtype=np.int64))


def table(release):
    dense = np.zeros(math.prod(release.domain.sizes), dtype=np.int64)
    dense[release.keys] = release.weights
    return dense


# The plan


@pytest.mark.few(6)
@pytest.mark.parametrize("delta", [0, 1e-6])
@pytest.mark.parametrize("adjacency", ["replace-one", "add-remove"])
@pytest.mark.parametrize("threshold", ["none", "positive", "enhanced"])
def test_the_plan_spends_its_budget_and_never_more(threshold, adjacency, delta):
    terms = budget(0.8, delta, adjacency=adjacency)
    planned = plan(terms, threshold=threshold)
    assert 0.8 * (1 - 1e-5) <= epsilon(planned.event, terms.delta) <= 0.8
    assert (planned.total is not None) == (threshold == "enhanced" and adjacency == "add-remove")
    assert planned.cells.scale <= (2 if adjacency == "replace-one" else 1 / 0.98) / 0.8 * 1.001


def test_the_enhanced_threshold_is_the_papers():
    planned = plan(budget(0.1), threshold="enhanced")
    assert planned.cut(250_070) == math.ceil(0.5 * math.log(250_070) / 0.1) == 63
    assert plan(budget(0.1, unit={"column": "user", "max_rows": 3})).cut(250_070) == math.ceil(
        1.5 * math.log(250_070) / 0.1
    )
    assert plan(budget(50.0)).cut(10) == 1
    assert plan(budget(), threshold="none").cut(100) is None
    assert plan(budget(), threshold="positive").cut(100) == 1


# The distribution


COUNTS = {0: 1, 5: 2, 6: 3, 77: 8, 140: 1, 299: 30}


def repeated(path, times, *, factor=0.5, epsilon=0.7, domain=None):
    planned = plan(budget(epsilon), factor=factor)
    exact, rng = counts_of(domain or lettered(30, 10), COUNTS), keyed(f"{path} {factor} {epsilon}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(histogram, "DENSE_CELLS", 0 if path == "sparse" else 2**20)
        return np.stack([table(histogram.draw(exact, planned, rng=rng)) for _ in range(times)])


def agree(one, other):
    """Two samples of tables: how many are listed, how often each cell is, and the values."""
    empty = np.ones(one.shape[1], dtype=bool)
    empty[list(COUNTS)] = False
    tests = [
        stats.ks_2samp(
            (one[:, empty] > 0).sum(axis=1), (other[:, empty] > 0).sum(axis=1), method="asymp"
        ).pvalue
    ]
    tests += [
        stats.ks_2samp(one[:, column], other[:, column], method="asymp").pvalue for column in COUNTS
    ]
    values = [each[:, empty][each[:, empty] > 0] for each in (one, other)]
    tests.append(stats.ks_2samp(*values, method="asymp").pvalue)
    listed = np.stack([(each[:, empty] > 0).sum(axis=0) for each in (one, other)])
    tests.append(stats.chi2_contingency(listed + 1).pvalue)
    return min(tests) > ALPHA


def test_sparse_and_dense_have_one_law_and_a_wrong_tail_is_found(monkeypatch):
    times = 500
    dense = repeated("dense", times)
    assert agree(dense, repeated("sparse", times))  # cells drawn one by one
    monkeypatch.setattr(sparse, "_GROUP", 1)  # so that small counts are raised together
    assert agree(dense, repeated("sparse", times))
    assert not agree(dense, repeated("sparse", times, epsilon=0.85))
    real = sparse.draw_binomial
    monkeypatch.setattr(
        sparse, "draw_binomial", lambda n, scale, cut, *, rng: real(n, scale, cut + 1, rng=rng)
    )  # one step of the tail
    assert not agree(dense, repeated("sparse", times))
    monkeypatch.setattr(sparse, "draw_binomial", real)
    monkeypatch.setattr(
        sparse,
        "_geometric",
        lambda n, scale, *, rng: np.abs(
            sparse.noise.discrete_laplace(np.zeros(n, dtype=np.int64), scale, rng=rng)
        ),
    )
    assert not agree(dense, repeated("sparse", times))


def test_which_empty_cells_are_raised_is_even_and_never_an_occupied_one():
    occupied = np.array([0, 1, 2, 50, 98, 99], dtype=np.int64)
    seen = np.zeros(100, dtype=np.int64)
    rng = keyed("places")
    for _ in range(1000):
        keys, weights = sparse.draw_kept(
            occupied, np.full(6, 10**6, dtype=np.int64), 100, 2.0, 2, rng=rng
        )
        assert (np.diff(keys) > 0).all()
        assert (weights >= 2).all()
        seen[keys] += 1
    assert (seen[occupied] == 1000).all()
    rest = np.delete(seen, occupied)
    p = sparse.compute_tail(2.0, 2)
    assert stats.chi2.sf(((rest - 1000 * p) ** 2).sum() / (1000 * p * (1 - p)), 94) > ALPHA


@pytest.mark.parametrize(
    ("n", "scale", "cut"),
    [(1, 2.0, 1), (5, 0.4, 1), (1000, 2.0, 3), (10**6, 20.0, 250), (2**61, 1.0, 41)],
)
def test_the_number_of_exceedances_is_binomial(n, scale, cut):
    rng = keyed(f"binomial {n}")
    draws = np.array([sparse.draw_binomial(n, scale, cut, rng=rng) for _ in range(300)])
    p = sparse.compute_tail(scale, cut)
    distribution = stats.binom(n, p) if n < 2**40 else stats.poisson(n * p)
    edges = np.unique(distribution.ppf(np.linspace(0, 1, 12)[1:-1]))
    part = np.searchsorted(edges, draws)
    mass = np.diff(np.concatenate([[0.0], distribution.cdf(edges), [1.0]]))
    assert ((draws >= 0) & (draws <= n)).all()
    used = mass * len(draws) > 1e-9
    observed = np.bincount(part, minlength=len(mass))
    assert observed[~used].sum() == 0
    assert (
        used.sum() == 1
        or stats.chisquare(observed[used], mass[used] / mass[used].sum() * len(draws)).pvalue
        > ALPHA
    )


def test_no_exceedance_where_none_can_be():
    for n, scale, cut in ((0, 2.0, 1), (2**62, 1.0, 2000), (10**6, 0.001, 1)):
        assert sparse.draw_binomial(n, scale, cut, rng=keyed("none")) == 0


def test_uniform_numbers_are_uniform():
    drawn = sparse.draw_uniform_below(keyed("uniform"), 50_000, 48)
    assert stats.chisquare(np.bincount(drawn, minlength=48)).pvalue > ALPHA
    assert (sparse.draw_uniform_below(keyed("one"), 9, 1) == 0).all()
    assert sparse.draw_uniform_below(keyed("large"), 1000, 2**62).max() > 2**61


def test_ten_to_the_eighteen_cells_take_no_time():
    domain = lettered(1000, 1000, 1000, 1000, 1000, 1000)
    planned = plan(budget(1.0), factor=9.0)
    released = histogram.draw(
        counts_of(domain, {123: 1000, 10**18 - 1: 1000}), planned, rng=keyed("large")
    )
    assert {123, 10**18 - 1} <= set(released.keys.tolist())
    assert (released.codes_at(0, len(released.keys))[:, -1] == 999).all()
    with pytest.raises(SpecError, match="noise alone would raise"):
        histogram.check_size(domain, plan(budget(1.0)), 2000)


# Thresholds


def test_thresholds_are_cut_from_the_same_noise():
    exact = counts_of(lettered(30, 10), COUNTS)
    plain, positive, enhanced = (
        histogram.draw(exact, plan(budget(0.7), threshold=t), rng=keyed("same noise"))
        for t in ("none", "positive", "enhanced")
    )
    whole = table(plain)
    assert (whole < 0).any()
    assert np.array_equal(table(positive), np.maximum(whole, 0))
    cut = math.ceil(0.5 * math.log(45) / 0.7)
    assert (enhanced.cut, plain.cut, positive.cut) == (cut, None, 1)
    assert np.array_equal(table(enhanced), np.where(whole >= cut, whole, 0))
    assert enhanced.total == int(enhanced.weights.sum())
    assert (plain.weights != 0).all()


def test_the_number_of_rows_is_noisy_where_it_is_private():
    exact = counts_of(lettered(4, 4), {3: 100_000})
    given = budget(1.0, adjacency="add-remove")
    found = [histogram.draw(exact, plan(given), rng=keyed(str(seed))).n_rows for seed in range(8)]
    assert len(set(found)) > 1
    assert all(each is not None and abs(each - 100_000) < 4000 for each in found)
    assert histogram.draw(exact, plan(given, threshold="positive"), rng=keyed("x")).n_rows is None
    empty = histogram.draw(JointCounts.identity(lettered(4, 4)), plan(given), rng=keyed("empty"))
    assert empty.cut is not None


# Sizes and cautions


def test_sizes_are_refused_before_any_noise():
    large = lettered(10_000, 1001)
    with pytest.raises(SpecError, match="10,010,000 cells"):
        histogram.draw(JointCounts.identity(large), plan(budget(), threshold="none"))
    with pytest.raises(SpecError, match="enhanced"):
        histogram.check_size(large, plan(budget(), threshold="none"), 10**6)
    with pytest.raises(SpecError, match="noise alone would raise"):
        histogram.check_size(lettered(50_000, 40_000), plan(budget(), threshold="positive"), 10**6)
    histogram.check_size(lettered(10_000, 1000), plan(budget(), threshold="none"), 10**6)
    histogram.check_size(lettered(50_000, 2000), plan(budget()), 10**6)


def test_bandwidths_are_the_papers():
    n = 250_070
    assert bins_by_rule(n, 2, thresholded=False) == 266
    assert bins_by_rule(n, 2, thresholded=True) == 27
    assert bins_by_rule(1e18, 1, thresholded=False) == 65536
    assert bins_by_rule(2, 5, thresholded=True) == 1


def test_the_paper_own_histogram_is_let_pass_at_one_and_warned_of_at_a_tenth():
    domain = lettered(10, 10, 4, 6)
    assert list_warnings(domain, plan(budget(1.0), threshold="none"), 250_070, ("a", "b")) == []
    said = list_warnings(domain, plan(budget(0.1), threshold="none"), 250_070, ("a", "b"))
    bins = affordable_bins(250_070, 2, 24, 20.0)
    assert 1 < bins < 10
    assert len(said) == 1
    assert f"{bins} bins for each of a, b" in said[0]
    assert "156" in said[0]
    assert largest_noise(2400, 2.0) == pytest.approx(2 * math.log(2400))
    assert affordable_bins(10, 2, 24, 20.0) == 1
    at, above = (250_070 / (24 * k * k) / largest_noise(24 * k * k, 20.0) for k in (bins, bins + 1))
    assert above < 3 <= at

    # and weight that noise alone makes is told
    domain = lettered(1000, 1000, 100)
    said = list_warnings(domain, plan(budget(1.0)), 5e6)
    assert len(said) == 2
    assert "Noise alone may raise 1,140,074 empty cells to the threshold of 8" in said[1]
    assert len(list_warnings(domain, plan(budget(1.0), factor=2.0), 5e6)) == 1


# What is published


@pytest.mark.parametrize("adjacency", ["replace-one", "add-remove"])
@pytest.mark.parametrize("threshold", ["none", "positive", "enhanced"])
def test_the_noisy_counts_of_all_cells_are_published_as_they_were_before_the_threshold(
    threshold, adjacency
):
    domain = lettered(30, 10)
    planned = plan(budget(0.7, adjacency=adjacency), threshold=threshold)
    release = histogram.draw(counts_of(domain, COUNTS), planned, rng=keyed(threshold + adjacency))
    [rows] = release.list_counts()
    assert rows["table"].unique().to_pylist() == ['["a", "b"] in cells']
    counts = rows["count"].to_numpy()
    assert len(counts) == 300
    kept = counts >= release.cut if release.cut else counts != 0
    assert_array_equal(np.flatnonzero(kept), release.keys)
    assert_array_equal(counts[kept], release.weights)
    exact = np.zeros(300)
    exact[list(COUNTS)] = list(COUNTS.values())
    z = (counts - exact) / rows["standard_deviation"][0].as_py()
    assert abs(np.mean(z**2) - 1.0) < stats.norm.isf(ALPHA) * np.sqrt(5.0 / 300)
    assert (counts < 0).any()
    again = NoisyHistogram.from_bytes(release.to_bytes(), "here")
    assert_array_equal(again.every, counts)


def test_of_many_cells_only_those_that_are_listed_are_there(monkeypatch):
    monkeypatch.setattr(histogram, "DENSE_CELLS", 299)
    for threshold in ("enhanced", "none"):
        planned = plan(budget(0.7), threshold=threshold)
        release = histogram.draw(counts_of(lettered(30, 10), COUNTS), planned, rng=keyed("many"))
        assert len(release.keys)
        assert release.list_counts() == ()


@pytest.mark.parametrize("wrong", ["shape", "type", "kept", "weight"])
def test_counts_of_all_cells_that_are_not_those_of_the_listed_ones_are_refused(wrong):
    planned = plan(budget(0.7))
    release = histogram.draw(counts_of(lettered(30, 10), COUNTS), planned, rng=keyed("wrong"))
    every = release.every.copy()
    if wrong == "shape":
        every = every[1:]
    if wrong == "type":
        every = every.astype(np.int32)
    if wrong == "kept":
        every[np.flatnonzero(every < release.cut)[0]] = release.cut
    if wrong == "weight":
        every[release.keys[0]] += 1
    data = replace(release, every=every).to_bytes()
    with pytest.raises(InputError, match="not a noisy histogram"):
        NoisyHistogram.from_bytes(data, "here")


# What analysts get


def released(weights, domain):
    keys = np.array(sorted(weights), dtype=np.int64)
    return NoisyHistogram(
        domain=domain,
        plan=plan(budget(), threshold="none"),
        n_rows=10.0,
        cut=None,
        keys=keys,
        weights=np.array([weights[int(key)] for key in keys]),
    )


def test_synthetic_rows_follow_the_positive_weights():
    given = released({0: 30, 3: -50, 4: 0, 5: 70}, lettered(2, 3))
    codes = given.sample_codes(20_000, rng=keyed("rows"))
    assert codes.shape == (2, 20_000)
    assert codes.dtype == np.uint8
    keys, counts = np.unique(codes[0] * 3 + codes[1], return_counts=True)
    assert keys.tolist() == [0, 5]
    assert stats.binomtest(int(counts[0]), 20_000, 0.3).pvalue > ALPHA
    assert given.sample_codes(0, rng=keyed("rows")).shape == (2, 0)
    for nothing in ({}, {1: -3}):
        with pytest.raises(SpecError, match="no cell has a positive weight"):
            released(nothing, lettered(2, 3)).sample_codes(5, rng=keyed("rows"))


def test_centres_of_every_kind_of_cell():
    assert centres(cells(value_codec(atoms=(0.0, 5.0), nulls=True), 2)).to_pylist() == [
        None,
        0.0,
        5.0,
        2.5,
        7.5,
    ]
    whole = value_codec("n", pa.int32(), bounds=(1.0, 10.0))
    assert centres(cells(whole, 2)).to_pylist() == [3.0, 8.0]  # 1..5 and 6..10
    assert centres(cells(whole, 5)).to_pylist() == [1.5, 3.5, 5.5, 7.5, 9.5]
    days = value_codec("day", pa.date32(), bounds=(0.0, 9.0))
    assert [str(day) for day in centres(cells(days, 5)).to_pylist()][:2] == [
        "1970-01-01",
        "1970-01-03",
    ]
    null_level = level_codec([None, 3, 4], "t")
    assert centres(cells(null_level, 1)).to_pylist() == [None, 3, 4]


def test_redrawn_histograms_add_the_same_noise_again():
    exact = counts_of(lettered(200, 100), {5: 10**6})
    once = histogram.draw(exact, plan(budget(0.5), threshold="none"), rng=keyed("once"))
    again = table(once.redraw(keyed("again"))) - table(once)
    alpha = math.exp(-0.25)
    assert float(again.var()) == pytest.approx(2 * alpha / (1 - alpha) ** 2, rel=0.12)
    cut = histogram.draw(exact, plan(budget(0.5)), rng=keyed("cut"))
    twice = cut.redraw(keyed("again"))
    assert (twice.cut, twice.n_rows, twice.plan) == (cut.cut, cut.n_rows, cut.plan)
    assert twice.weights.min() >= (cut.cut or 0)
    assert replace(cut, n_rows=None).redraw(keyed("again")).keys.tolist() == twice.keys.tolist()
    assert codes_of(cut.domain, cut.keys).shape == (2, len(cut.keys))
