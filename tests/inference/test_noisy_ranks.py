"""Averages of numbers by the channel of their ranks: the channel is the one that is drawn, and bounds hold for every distribution."""

import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from numpy.random import default_rng
from scipy import stats

from dpdask.analysis.points import Points
from dpdask.analysis.values import HeldOut
from dpdask.channels import compute_rank, optimal
from dpdask.inference.noisy_ranks import BinLaw, Bounds, LaplaceLaw, NoisyRanks, Quantile
from dpdask.kernels import rank as kernel
from dpdask.mechanisms.dip.columns import BinMechanism, RankMechanism, _list_points
from dpdask.references.reference import RankDistribution

EPSILON = 3.0


def fit(points, ranks, *, is_binned, is_whole=False):
    """Return the randomiser of a column with a reference, and what a card tells of it."""
    x, c = np.array(points, float), np.array(ranks, float)
    distribution = RankDistribution(x, c, 0.0)
    if is_binned:
        edges = kernel.bin_edges(x, c, 48)
        masses = np.diff(edges)
        channel = optimal(masses, EPSILON, compute_rank(masses))
        mechanism = BinMechanism(channel=channel, edges=edges, distribution=distribution)
        law = BinLaw(edges=edges, matrix=channel.matrix)
    else:
        noise = kernel.rank_noise(EPSILON)
        mechanism = RankMechanism(noise=noise, distribution=distribution)
        law = LaplaceLaw(n_cells=noise.n_cells, rate=noise.rate)
    told = _list_points(distribution, is_whole)
    column = NoisyRanks(
        values=np.array(told["values"]),
        ranks=np.array(told["ranks"]),
        law=law,
        is_whole=is_whole,
        bounds=(0.0, 100.0),
    )
    return mechanism, column


def release(mechanism, values, rng, *, is_whole=False):
    n_words = kernel.words_per_row(mechanism.noise) if hasattr(mechanism, "noise") else 3
    words = rng.integers(0, 2**64, (len(values), n_words), dtype=np.uint64)
    is_null = np.isnan(values)
    drawn, is_null = mechanism.draw(np.nan_to_num(values), is_null, words, lattice=is_whole)
    return np.where(is_null, np.nan, drawn)


def curved(n=400):
    """Return a reference with null, an atom at 20, and a tail."""
    c = np.linspace(0.0, 1.0, n)
    x = 100.0 * c**3
    cut = np.searchsorted(x, 20.0)
    x = np.concatenate([x[:cut], [20.0, 20.0], x[cut:]])
    c = np.concatenate([0.7 * c[:cut], [0.7 * c[cut], 0.7 * c[cut] + 0.15], 0.15 + 0.7 * c[cut:]])
    return x, 0.15 + c


def with_gaps(n):
    """Return a reference without mass at its ends and in its middle."""
    x = np.linspace(0.0, 100.0, n)
    mass = np.linspace(1.0, 2.0, n - 1) * ~(
        (x[1:] <= 20) | ((x[1:] > 40) & (x[1:] <= 60)) | (x[1:] > 90)
    )
    return x, np.append(0.0, np.cumsum(mass) / mass.sum())


REFERENCES = {
    "curved": (curved(), False),
    "one piece": (([0.0, 100.0], [0.0, 1.0]), False),
    "wide pieces": (([0.0, 10.0, 50.0, 100.0], [0.0, 0.5, 0.6, 1.0]), False),
    "gaps": (with_gaps(401), False),
    "gaps of whole numbers": (with_gaps(101), True),
    "whole numbers": ((np.arange(0.0, 101.0), np.sqrt(np.linspace(0.04, 1.0, 101))), True),
}


@pytest.mark.parametrize("is_binned", [False, True], ids=["laplace", "optimal"])
@pytest.mark.parametrize("name", REFERENCES)
def test_the_channel_is_the_one_that_is_drawn(name, is_binned):
    (points, ranks), is_whole = REFERENCES[name]
    mechanism, column = fit(points, ranks, is_binned=is_binned, is_whole=is_whole)
    rng, inputs, n = default_rng(5), column.inputs, 40_000
    chosen = rng.permutation(np.flatnonzero(inputs.is_point))[:3].tolist()
    chosen += rng.permutation(np.flatnonzero(~inputs.is_point))[:4].tolist()
    probabilities = []
    for row in chosen:
        # a rank of its own, or the value whose ranks they are
        value = inputs.high[row]
        if not inputs.is_point[row]:
            value = np.interp(inputs.first[row], ranks, points)
            value = math.ceil(value) if is_whole else value
        drawn = release(mechanism, np.full(n, value), rng, is_whole=is_whole)
        found = np.bincount(column.code(drawn), minlength=column.n_outcomes)
        expected = column.matrix[row]
        # a point between two of the card has a row between theirs
        probabilities.append(stats.chisquare(found + 1.0, (n + len(found)) * expected).pvalue)
    assert min(probabilities) > 1e-6
    other = LaplaceLaw(n_cells=2**16, rate=1.2 * EPSILON / 2**16)
    wrong = NoisyRanks(
        values=column.values, ranks=column.ranks, law=other, is_whole=is_whole, bounds=(0.0, 100.0)
    )
    if not is_binned:
        found = np.bincount(wrong.code(drawn), minlength=wrong.n_outcomes)
        expected = wrong.matrix[chosen[-1]]
        assert stats.chisquare(found + 1.0, (n + len(found)) * expected).pvalue < 1e-6


@pytest.mark.parametrize("is_binned", [False, True], ids=["laplace", "optimal"])
@pytest.mark.parametrize("name", REFERENCES)
def test_functions_lie_on_either_side_of_f_for_every_value(name, is_binned):
    (points, ranks), is_whole = REFERENCES[name]
    _, column = fit(points, ranks, is_binned=is_binned, is_whole=is_whole)
    values = np.arange(1.0, 101.0) if is_whole else np.linspace(0.01, 99.99, 997)
    own = np.interp(values, points, ranks)
    ends = column._groups[1]
    rows = column.law.cumulate(own, ends)
    rows[:, 0], rows[:, -1] = 0.0, 1.0
    rows = np.diff(rows, axis=1)
    counts = 10_000 * column.matrix.mean(axis=0)
    for f, of_inputs in (
        (np.clip(values, 10, 60), column.inputs.clip((10, 60))),
        (1.0 * ((values >= 30) & (values < 70)), column.inputs.lie_in(30, 70)),
    ):
        low, high = column.cover(of_inputs, counts, 10_000.0)
        if is_whole:  # a whole number has any rank of its own
            inputs = column.inputs
            of_values = {
                float(value): row for row, value in enumerate(inputs.high) if inputs.is_point[row]
            }
            here = np.array([value in of_values for value in values])
            rows = column.matrix[[of_values[value] for value in values[here]]]
            f = f[here]
        slack = 0.01 * np.ptp(high)
        assert np.all(rows @ low <= f + slack)
        assert np.all(rows @ high >= f - slack)
        assert np.mean(rows @ (high - low)) < 0.8 * max(1.0, np.ptp(f))


SHAPES = {
    "all at one value": lambda rng, n: np.full(n, 37.0),
    "two far ends": lambda rng, n: np.where(rng.random(n) < 0.4, 0.0, 100.0),
    "at an edge": lambda rng, n: 50.0 + 0.5 * rng.choice([-1.0, 1.0], n, p=[0.7, 0.3]),
    "with nulls": lambda rng, n: np.where(rng.random(n) < 0.3, np.nan, 80.0 * rng.random(n)),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_intervals_hold_whatever_the_distribution_is(shape):
    """They hold in about all runs; half of a standard error without the bias does not."""
    mechanism, column = fit(*curved(), is_binned=False)
    rng, held, planted, runs = default_rng(9), [], [], 30
    for _ in range(runs):
        own = SHAPES[shape](rng, 3_000)
        counts = np.bincount(
            column.code(release(mechanism, own, rng)), minlength=column.n_outcomes
        ).astype(float)
        known = own[~np.isnan(own)]
        mean = column.mean(counts[None, :], (0.0, 100.0))
        share = column.share(counts, 50.0, 100.5)
        for found, truth in ((mean, known.mean()), (share, (own >= 50).mean())):
            low, high = found.find_ends(1.96)
            held.append(low[0] <= truth <= high[0])
        error = 2.0 if np.isnan(mean.standard_error[0]) else mean.standard_error[0]
        planted.append(abs(mean.value[0] - known.mean()) < error / 4.0)
        median = np.quantile(known, 0.5, method="inverted_cdf")
        low, high = column.quantile(counts, 0.5).find_ends(1.96)
        held.append(low <= median <= high)
    assert np.mean(held) > 0.95
    assert np.mean(planted) < 0.8


def test_ends_are_those_of_fieller():
    """Of a group whose B may be 0, the interval is all that is possible."""
    mechanism, column = fit(*curved(), is_binned=False)
    rng = default_rng(2)
    own = np.where(np.arange(4_000) < 3_990, np.nan, 50.0)
    counts = np.bincount(
        column.code(release(mechanism, own, rng)), minlength=column.n_outcomes
    ).astype(float)
    found = column.mean(counts[None, :], (0.0, 100.0))
    low, high = (end[0] for end in found.find_ends(3.0))
    assert (low, high) == (pytest.approx(0.0), pytest.approx(100.0))
    assert np.isnan(found.standard_error[0])
    assert 0.0 <= found.value[0] <= 100.0


def test_of_a_group_of_which_nothing_is_told_the_middle_is_the_estimate():
    """Whatever its rows are: what moves with them is no estimate, and its spread no standard error."""
    mechanism, column = fit(*curved(), is_binned=False)
    rng, own = default_rng(5), np.where(np.arange(1_500) < 1_350, np.nan, 90.0)
    codes = [column.code(release(mechanism, own, rng)) for _ in range(30)]
    table = [np.bincount(each, minlength=column.n_outcomes) for each in codes]
    found = column.mean(np.array(table, float), (0.0, 100.0))
    low, high = found.find_ends(1.96)
    hidden = (low == 0.0) & (high == 100.0)
    assert hidden.sum() > 20
    assert (found.value[hidden] == 50.0).all()
    assert np.isnan(found.standard_error[hidden]).all()


def test_more_rows_and_less_noise_make_narrower_intervals():
    mechanism, column = fit(*curved(), is_binned=False)
    rng, widths = default_rng(4), []
    for n in (1_000, 200_000):
        drawn = release(mechanism, 100.0 * rng.random(n), rng)
        counts = np.bincount(column.code(drawn), minlength=column.n_outcomes).astype(float)
        low, high = column.mean(counts[None, :], (0.0, 100.0)).find_ends(1.96)
        widths.append(high[0] - low[0])
    assert widths[1] < widths[0] / 3.0


def test_a_card_without_points_tells_no_channel():
    assert NoisyRanks.from_card({"reference": {"rank_error_at_most": 0.1}}) is None
    assert NoisyRanks.from_card({"levels": [1, 2]}) is None


def test_averages_that_contradict_each_other_tell_nothing():
    """As where ranks that released values tell are too far off: the interval was upside down."""
    means = np.array([[60.0, -80.0, 0.9, 1.0], [-10.0, 10.0, 0.9, 1.0]])
    covariances = np.broadcast_to(np.eye(4) * 1e-4, (2, 4, 4))
    found = Bounds(means=means, covariances=covariances, centre=50.0, possible=(0.0, 100.0))
    low, high = found.find_ends(1.96)
    assert (low[0], high[0]) == (0.0, 100.0)
    assert 35.0 < low[1] < high[1] < 65.0
    assert found.is_hidden.tolist() == [True, False]
    x = np.arange(10.0)
    for least, most, ends in [(6.0, 3.0, (-1.0, 11.0)), (3.0, 6.0, (2.0, 6.0))]:
        told = Quantile(
            x=x,
            find=lambda place, a=least, b=most: (np.array([place - b, place - a]), np.zeros(2)),
            bounds=(-1.0, 11.0),
        )
        assert told.find_ends(1.96) == ends


@pytest.mark.parametrize("is_binned", [False, True])
@pytest.mark.parametrize("size", [2, 3, 8])
def test_groups_of_few_rows_that_are_alike_by_chance_are_not_surer(size, is_binned):
    rng, n_groups = default_rng(size), 600
    mechanism, column = fit(*REFERENCES["one piece"][0], is_binned=is_binned)
    values = rng.uniform(0.0, 100.0, n_groups * size)
    codes = column.code(release(mechanism, values, rng)).reshape(n_groups, size)
    table = np.stack([np.bincount(row, minlength=column.n_outcomes) for row in codes]).astype(float)
    low, high = column.mean(table, (0.0, 100.0)).find_ends(1.96)
    covered = ((low <= 50.0) & (high >= 50.0)).sum()
    assert covered >= stats.binom.ppf(1e-6, n_groups, 0.95)


@pytest.mark.parametrize("is_binned", [False, True], ids=["laplace", "optimal"])
def test_the_draw_of_held_out_rows_counts_as_far_as_numbers_are_moved(is_binned):
    """By about a quarter less than all of it, for a mean; and of ranks that are even in an outcome the channel leaves the distribution."""
    n, n_held, repeats, rng = 3_000, 500, 60, default_rng(8)
    found, plain = [], []
    for _ in range(repeats):
        points = np.append(0.0, np.sort(100.0 * rng.random(n_held) ** 2))
        mechanism, _ = fit(points, np.arange(n_held + 1) / n_held, is_binned=is_binned)
        released = release(mechanism, 100.0 * rng.random(n) ** 2, rng)
        card = {"bounds": [0.0, 100.0], "reference": {"spread_rank_at_most": 0.0}}
        if is_binned:
            card |= {"rank_edges": mechanism.edges, "channel": mechanism.channel.matrix}
        else:
            card |= {"ranks": mechanism.noise.n_cells, "alpha_log": -mechanism.noise.rate}
        column = NoisyRanks.from_released(card, released, n_held, is_whole=False)
        width = np.diff(column._groups[1])
        assert width @ column.of_outcomes == pytest.approx(width, abs=1e-3)
        points = Points(
            frame=pd.DataFrame({"x": released}),
            weights=np.ones(n),
            n_rows=n,
            sampling=1.0 / n + 1.0 / n_held,
            levels={},
        )
        held = HeldOut(n_rows=n_held, code=column.code(released), channel=column.of_outcomes)
        told = replace(points, held_out=held)
        asked = (
            told.mean("x"),
            told.quantile("x", 0.5),
            told.histogram("x", np.array([0.0, 4.0, 50.0, 100.0])),
        )
        parts = [
            np.hstack([getattr(each, name) for each in asked])
            for name in ("estimate", "standard_error")
        ]
        found.append(parts)
        plain.append(points.mean("x").standard_error / asked[0].standard_error)
    estimates, errors = np.array(found).transpose(1, 0, 2)
    ratio = np.sqrt((errors**2).mean(axis=0)) / estimates.std(axis=0)
    assert (np.abs(np.log(ratio)) < 5.0 / np.sqrt(2.0 * repeats)).all()
    assert min(plain) > 1.2
