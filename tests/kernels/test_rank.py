"""The rank mechanism: its exact distribution, its invariance, and its reading of cdfs, against exact arithmetic and numpy."""

import math
from decimal import Decimal, localcontext
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from kernels.rank_cells import cell_interval
from numpy.random import default_rng
from numpy.testing import assert_allclose
from scipy import stats
from strategies import random_words

from dpdask.kernels import rank
from dpdask.kernels import rank as cdf_kernel
from dpdask.kernels import rank as ecdf
from dpdask.kernels.channel import alias_tables
from dpdask.kernels.rank import first_knot
from dpdask.kernels.rank import guide as guide_of

ALPHA = 1e-9
NOTHING = np.empty(0)
SMALL = [(2, 1.0), (3, 0.5), (5, 2.0), (8, 1.0), (12, 0.3), (12, 4.0)]


def magnitudes(noise):
    """Return the exact distribution of the noise's magnitude, as the digit tables draw it, in units of 2**-63 per digit."""
    thresholds, aliases = alias_tables(noise.weights)
    distribution = [1]
    for row, other in zip(thresholds.tolist(), aliases.tolist(), strict=True):
        digit = [0] * 256
        for cell, (threshold, alias) in enumerate(zip(row, other, strict=True)):
            digit[cell] += threshold
            digit[alias] += 2**55 - threshold
        distribution = [low * high for high in digit for low in distribution]
    return distribution


def realised(noise):
    """Return the exact whole-number weight of each clamped w (columns) under each rank (rows)."""
    distribution = magnitudes(noise)
    top = len(distribution)
    line = [(2**63 - noise.sign) * weight for weight in reversed(distribution)] + [
        noise.sign * weight for weight in distribution
    ]  # e = -top..top-1
    below = np.concatenate([np.zeros(1, dtype=object), np.cumsum(np.array(line, dtype=object))])
    edges = np.arange(-noise.margin, noise.n_cells - 1 + noise.margin)  # w <= edge
    rows = []
    for i in range(noise.n_cells):
        cumulative = below[np.clip(edges - i + top + 1, 0, 2 * top)]
        rows.append(np.diff(np.concatenate([[0], cumulative, [below[-1]]])))
    return np.stack(rows)


def exact_loss(weights):
    with localcontext(prec=60):
        return max(
            Decimal(int(max(column))).ln() - Decimal(int(min(column))).ln() for column in weights.T
        )


def clamped_intervals(noise):
    intervals = np.array(
        [
            cell_interval(w, noise.rate, noise.n_cells)
            for w in range(-noise.margin, noise.n_cells + noise.margin)
        ]
    )
    intervals[0, 0], intervals[-1, 1] = 0.0, 1.0
    return intervals


@pytest.mark.parametrize(("n_cells", "epsilon"), SMALL)
def test_the_distribution_that_is_drawn_loses_no_more_than_the_stated_epsilon_and_spends_nearly_all_of_it(
    n_cells, epsilon
):
    noise = rank.rank_noise(epsilon, n_cells)
    loss = exact_loss(realised(noise))
    assert loss <= Decimal(noise.epsilon) <= Decimal(epsilon)
    assert noise.epsilon > epsilon * (1 - 1e-4)
    assert loss > Decimal(epsilon * (1 - 1e-4))


@pytest.mark.parametrize("epsilon", [1e-6, 1e-3, 0.1, 1.0, 7.3, 16.0])
def test_the_stated_epsilon_is_just_below_the_asked_one(epsilon):
    noise = rank.rank_noise(epsilon)
    assert epsilon - max(1e-7, 1e-6 * epsilon) < noise.epsilon <= epsilon
    with localcontext(prec=3):
        assert rank.rank_noise(epsilon).epsilon == noise.epsilon


@pytest.mark.parametrize(("n_cells", "epsilon"), SMALL)
def test_uniform_ranks_are_released_uniform(n_cells, epsilon):
    noise = rank.rank_noise(epsilon, n_cells)
    weights = realised(noise).sum(axis=0)
    total = 2 ** (63 * (len(noise.weights) + 1)) * n_cells
    drawn = np.array([float(Fraction(int(weight), total)) for weight in weights])
    intervals = clamped_intervals(noise)
    truncated = math.exp(-noise.rate * 256 ** len(noise.weights))
    assert_allclose(intervals[:, 1] - intervals[:, 0], drawn, rtol=0, atol=1e-12 + truncated)
    assert_allclose(intervals[1:, 0], intervals[:-1, 1], rtol=0, atol=1e-14)


@pytest.mark.parametrize("epsilon", [0.0, -1.0, 1e-7, 16.001, math.inf, math.nan])
def test_an_epsilon_that_the_tables_cannot_resolve_is_refused(epsilon):
    with pytest.raises(ValueError, match="takes an epsilon in"):
        rank.rank_noise(epsilon)
    with pytest.raises(ValueError, match="no rank noise on 2 cells"):
        rank.rank_noise(16.0, 2)


FINITE = st.floats(allow_nan=False, allow_infinity=False)


@settings(max_examples=80)
@given(
    knots=hnp.arrays(
        np.float64,
        st.integers(2, 60),
        elements=st.one_of(FINITE, st.integers(-5, 5).map(float), st.floats(0, 1)),
    ),
    others=st.lists(FINITE, max_size=10),
)
def test_first_knot_equals_searchsorted(knots, others):
    knots = np.sort(knots)
    guide = guide_of(knots)
    near = [math.nextafter(knot, side) for knot in knots for side in (-math.inf, math.inf)]
    for value in [*others, *knots, *filter(math.isfinite, near)]:
        assert first_knot(value, knots, guide) == np.searchsorted(knots, value, side="left")


@st.composite
def references(draw):
    """Random knots of a continualised cdf: real or lattice, with or without atoms and null mass."""
    lattice = draw(st.booleans())
    rng = default_rng(draw(st.integers(0, 2**32)))
    values = rng.integers(-20, 60, size=draw(st.integers(0, 25))).astype(float) * (
        1.0 if lattice else 0.37
    )
    atoms = np.unique(
        rng.integers(-15, 40, size=draw(st.integers(0 if len(values) else 1, 4)))
    ).astype(float)
    values = np.setdiff1d(values, atoms)
    weights, atom_weights = (
        rng.integers(1, 9, size=len(values)),
        rng.integers(1, 9, size=len(atoms)),
    )
    start = draw(st.sampled_from([None, -20.0]))
    x, c = ecdf.continualise(
        values,
        weights.astype(float),
        atoms,
        atom_weights.astype(float),
        start,
        1.0 if lattice else None,
    )
    null = draw(st.sampled_from([0.0, 0.25]))
    return x, np.append(null + (1 - null) * c[:-1], 1.0), lattice


def cdf(value, x, c, side):
    """Return C(value), or with side "left" its limit from below."""
    k = int(np.searchsorted(x, value, side=side))  # type: ignore[call-overload]
    at = k - 1 if side == "right" else min(k, len(x) - 1)
    return float(
        c[at]
        if k and x[at] == value
        else np.interp(value, x[[k - 1, k]], c[[k - 1, k]])
        if 0 < k < len(x)
        else c[0 if k == 0 else -1]
    )


def standing_for(value, x, c, lattice):
    same = np.flatnonzero(x == value)
    if len(same) > 1:
        return c[same[0]], c[same[-1]]
    if lattice:
        return cdf(value - 1, x, c, "right"), cdf(value, x, c, "right")
    return (c[same[0] - 1] if len(same) and same[0] else cdf(value, x, c, "right")), cdf(
        value, x, c, "right"
    )


@given(reference=references(), more=st.lists(st.integers(-40, 80), max_size=10))
def test_rank_interval_is_the_jump_the_step_or_the_piece_that_a_value_stands_for(reference, more):
    x, c, lattice = reference
    guide = guide_of(x)
    values = [
        *x,
        *(m * 1.0 for m in more),
        *([] if lattice else (m * 0.123 for m in more)),
        x[0] - 5,
        x[-1] + 5,
    ]
    for value in values:
        low, high = cdf_kernel.rank_interval(value, x, c, guide, lattice)
        assert (low, high) == pytest.approx(standing_for(value, x, c, lattice), abs=1e-14)
        assert c[0] <= low <= high <= 1.0


@given(reference=references(), seed=st.integers(0, 2**32))
def test_value_at_is_the_quantile_of_the_continualised_cdf(reference, seed):
    x, c, lattice = reference
    guide = guide_of(c)
    ranks = default_rng(seed).uniform(c[0], 1.0, size=20)
    for u in [*ranks, *c[c > c[0]]]:
        value = cdf_kernel.value_at(u, x, c, guide, lattice)
        assert cdf(value, x, c, "right") >= u - 1e-12
        assert (
            cdf(
                value - 1.0 if lattice else np.nextafter(value, -np.inf),
                x,
                c,
                "right" if lattice else "left",
            )
            <= u + 1e-12
        )
        assert x[0] <= value <= x[-1]
        assert not lattice or value == round(value) > x[0] or x[0] == x[1]


def released(values, x, c, epsilon, *, lattice=False, is_null=None, seed=3):
    noise = rank.rank_noise(epsilon)
    is_null = np.zeros(len(values), dtype=bool) if is_null is None else is_null
    words = random_words(default_rng(seed), len(values), rank.words_per_row(noise))
    return rank.privatise(
        values, is_null, words, x, c, noise, alias_tables(noise.weights), lattice=lattice
    )


@pytest.mark.parametrize("epsilon", [0.05, 8.0])
def test_rows_of_the_reference_are_released_with_its_distribution(epsilon):
    rng = default_rng(8)
    found, counts = np.unique(np.round(np.exp(rng.normal(size=20_000)), 3), return_counts=True)
    x, c = ecdf.continualise(found, counts.astype(float), NOTHING, NOTHING, 0.0, None)
    out, is_null = released(rng.choice(found, size=200_000, p=counts / counts.sum()), x, c, epsilon)
    assert not is_null.any()
    assert stats.kstest(out, lambda v: np.interp(v, x, c)).pvalue > ALPHA
    assert stats.kstest(out, lambda v: np.interp(v * 1.03, x, c)).pvalue < ALPHA


def by_hand(value, words, noise, tables):
    """Return where a rank on the identity reference is released to, word by word."""
    n_digits, unit = len(noise.weights), 2.0**-53
    i = min(int(noise.n_cells * value), noise.n_cells - 1)
    magnitude = 0
    for k in range(n_digits):
        cell, rest = words[k + 1] >> 1 & 255, words[k + 1] >> 9
        magnitude += 256**k * (cell if rest < tables[0][k][cell] else tables[1][k][cell])
    e = magnitude if words[n_digits + 1] >> 1 < noise.sign else -1 - magnitude
    w = min(max(i + e, -noise.margin), noise.n_cells - 1 + noise.margin)
    low, high = cell_interval(w, noise.rate, noise.n_cells)
    low, high = (
        0.0 if w == -noise.margin else low,
        1.0 if w == noise.n_cells - 1 + noise.margin else high,
    )
    return low + (high - low) * ((words[n_digits + 2] >> 11) + 0.5) * unit


@pytest.mark.parametrize("epsilon", [0.01, 1.0, 16.0])
def test_every_word_is_read_once_and_as_documented(epsilon):
    line, noise, n = np.array([0.0, 1.0]), rank.rank_noise(epsilon), 20_000
    tables = alias_tables(noise.weights)
    rng = default_rng(12)
    values = rng.random(n)
    words = random_words(rng, n, rank.words_per_row(noise))
    out, _ = rank.privatise(
        values, np.zeros(n, bool), words, line, line, noise, tables, lattice=False
    )
    lists = (tables[0].tolist(), tables[1].tolist())
    expected = [
        by_hand(value, row, noise, lists)
        for value, row in zip(values.tolist(), words.tolist(), strict=True)
    ]
    assert_allclose(out, expected, rtol=1e-13, atol=0)


def test_a_released_number_never_passes_the_largest_knot_by_rounding():
    x, c = np.array([-9.0, -9.0, -9.0, 15.17]), np.array([0.0, 0.0, 0.7142857142857143, 1.0])
    assert cdf_kernel.value_at(1.0, x, c, guide_of(c), False) == 15.17


@pytest.mark.parametrize("top", [9.0, 2.0**53, 9.0 - 2.0**53])
def test_whole_numbers_are_released_whole_and_exact_inside_the_observed_range_at_their_frequency(
    top,
):
    found, counts = top - np.arange(9.0, -1.0, -1.0), np.array([5, 20, 3, 10, 12, 20, 8, 15, 1, 6])
    x, c = ecdf.continualise(found, counts / 1.0, NOTHING, NOTHING, None, 1.0)
    out, _ = released(
        default_rng(1).choice(found, size=100_000, p=counts / 100),
        x,
        c,
        2.0,
        lattice=True,
    )
    seen, frequency = np.unique(out, return_counts=True)
    assert seen.tolist() == found.tolist()
    assert (
        stats.chisquare(frequency, 100_000 * np.diff(np.interp(seen, x, c), prepend=0.0)).pvalue
        > ALPHA
    )
