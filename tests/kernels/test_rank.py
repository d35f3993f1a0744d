"""The rank mechanism: its exact distribution, its invariance, and its reading of cdfs, against exact arithmetic and numpy."""

from __future__ import annotations

import math
from dataclasses import replace
from decimal import Decimal, localcontext
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from kernels.rank_cells import cell_interval
from scipy import stats

from dpdask.kernels import cdf as cdf_kernel
from dpdask.kernels import cdf as ecdf
from dpdask.kernels import rank
from dpdask.kernels.cdf import first_knot
from dpdask.kernels.cdf import guide as guide_of
from dpdask.kernels.channel import laplace_channel

ALPHA = 1e-9
NOTHING = np.empty(0)
SMALL = [(2, 1.0), (3, 0.5), (5, 2.0), (8, 1.0), (12, 0.3), (12, 4.0)]


def magnitudes(noise: rank.RankNoise) -> list[int]:
    """Return the exact distribution of the noise's magnitude, as the digit tables draw it, in units of 2**-63 per digit."""
    thresholds, aliases = rank.digit_tables(noise)
    distribution = [1]
    for row, other in zip(thresholds.tolist(), aliases.tolist(), strict=True):
        digit = [0] * 256
        for cell, (threshold, alias) in enumerate(zip(row, other, strict=True)):
            digit[cell] += threshold
            digit[alias] += 2**55 - threshold
        distribution = [low * high for high in digit for low in distribution]
    return distribution


def realised(noise: rank.RankNoise) -> np.ndarray:
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


def exact_loss(weights: np.ndarray) -> Decimal:
    with localcontext(prec=60):
        return max(
            Decimal(int(max(column))).ln() - Decimal(int(min(column))).ln() for column in weights.T
        )


def clamped_intervals(noise: rank.RankNoise) -> np.ndarray:
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
    n_cells: int, epsilon: float
) -> None:
    noise = rank.rank_noise(epsilon, n_cells)
    loss = exact_loss(realised(noise))
    assert loss <= Decimal(noise.epsilon) <= Decimal(epsilon)
    assert noise.epsilon > epsilon * (1 - 1e-4)
    assert loss > Decimal(epsilon * (1 - 1e-4))


@pytest.mark.parametrize("epsilon", [1e-6, 1e-3, 0.1, 1.0, 7.3, 16.0])
def test_the_stated_epsilon_is_just_below_the_asked_one(epsilon: float) -> None:
    noise = rank.rank_noise(epsilon)
    assert epsilon - max(1e-7, 1e-6 * epsilon) < noise.epsilon <= epsilon
    with localcontext(prec=3):
        assert rank.rank_noise(epsilon).epsilon == noise.epsilon


@pytest.mark.parametrize(("n_cells", "epsilon"), SMALL)
def test_uniform_ranks_are_released_uniform(n_cells: int, epsilon: float) -> None:
    noise = rank.rank_noise(epsilon, n_cells)
    weights = realised(noise).sum(axis=0)
    total = 2 ** (63 * (len(noise.weights) + 1)) * n_cells
    drawn = np.array([float(Fraction(int(weight), total)) for weight in weights])
    intervals = clamped_intervals(noise)
    truncated = math.exp(-noise.rate * 256 ** len(noise.weights))
    np.testing.assert_allclose(
        intervals[:, 1] - intervals[:, 0], drawn, rtol=0, atol=1e-12 + truncated
    )
    np.testing.assert_allclose(intervals[1:, 0], intervals[:-1, 1], rtol=0, atol=1e-14)


@pytest.mark.parametrize(("n_cells", "rate"), [(2, 1.0), (7, 0.3), (500, 1e-3), (500, 0.5)])
def test_cell_interval_equals_a_sum_over_ranks(n_cells: int, rate: float) -> None:
    a = math.exp(-rate)
    ranks = np.arange(n_cells)
    for w in range(-n_cells, 2 * n_cells, max(1, n_cells // 20)):
        e = w - ranks
        cdf = [
            np.where(d >= 0, 1 - a ** (np.abs(d) + 1.0) / (1 + a), a ** np.abs(d) / (1 + a)).mean()
            for d in (e - 1, e)
        ]
        assert cell_interval(w, rate, n_cells) == pytest.approx(cdf, rel=1e-12)


def test_the_full_size_cells_tile_the_unit_interval() -> None:
    for epsilon in (1e-3, 1.0, 16.0):
        noise = rank.rank_noise(epsilon)
        starts = (
            np.random.default_rng(2)
            .integers(-noise.margin, noise.n_cells + noise.margin - 1, size=2000)
            .tolist()
        )
        for w in [*starts, -2, -1, 0, noise.n_cells - 2, noise.n_cells - 1, noise.n_cells]:
            (low, high), (after, _) = (
                cell_interval(w, noise.rate, noise.n_cells),
                cell_interval(w + 1, noise.rate, noise.n_cells),
            )
            assert low < high
            assert high == pytest.approx(after, abs=2e-13)


@pytest.mark.parametrize("epsilon", [0.0, -1.0, 1e-7, 16.001, math.inf, math.nan])
def test_an_epsilon_that_the_tables_cannot_resolve_is_refused(epsilon: float) -> None:
    with pytest.raises(ValueError, match="takes an epsilon in"):
        rank.rank_noise(epsilon)


def test_too_few_cells_for_a_large_epsilon_are_refused() -> None:
    with pytest.raises(ValueError, match="no rank noise on 2 cells"):
        rank.rank_noise(16.0, 2)


FINITE = st.floats(allow_nan=False, allow_infinity=False)


@settings(deadline=None, max_examples=200)
@given(
    knots=hnp.arrays(
        np.float64,
        st.integers(2, 60),
        elements=st.one_of(FINITE, st.integers(-5, 5).map(float), st.floats(0, 1)),
    ),
    others=st.lists(FINITE, max_size=10),
)
def test_first_knot_equals_searchsorted(knots: np.ndarray, others: list[float]) -> None:
    knots = np.sort(knots)
    guide = guide_of(knots)
    near = [math.nextafter(knot, side) for knot in knots for side in (-math.inf, math.inf)]
    for value in [*others, *knots, *filter(math.isfinite, near)]:
        assert first_knot(value, knots, guide) == np.searchsorted(knots, value, side="left")


@st.composite
def references(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, bool]:
    """Random knots of a continualised cdf: real or lattice, with or without atoms and null mass."""
    lattice = draw(st.booleans())
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
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


def cdf(value: float, x: np.ndarray, c: np.ndarray, side: str) -> float:
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


def standing_for(value: float, x: np.ndarray, c: np.ndarray, lattice: bool) -> tuple[float, float]:
    same = np.flatnonzero(x == value)
    if len(same) > 1:
        return c[same[0]], c[same[-1]]
    if lattice:
        return cdf(value - 1, x, c, "right"), cdf(value, x, c, "right")
    return (c[same[0] - 1] if len(same) and same[0] else cdf(value, x, c, "right")), cdf(
        value, x, c, "right"
    )


@settings(deadline=None, max_examples=200)
@given(reference=references(), more=st.lists(st.integers(-40, 80), max_size=10))
def test_rank_interval_is_the_jump_the_step_or_the_piece_that_a_value_stands_for(
    reference: tuple[np.ndarray, np.ndarray, bool], more: list[int]
) -> None:
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


@settings(deadline=None, max_examples=200)
@given(reference=references(), seed=st.integers(0, 2**32))
def test_value_at_is_the_quantile_of_the_continualised_cdf(
    reference: tuple[np.ndarray, np.ndarray, bool], seed: int
) -> None:
    x, c, lattice = reference
    guide = guide_of(c)
    ranks = np.random.default_rng(seed).uniform(c[0], 1.0, size=20)
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


def released(
    values: np.ndarray,
    x: np.ndarray,
    c: np.ndarray,
    epsilon: float,
    *,
    lattice: bool = False,
    is_null: np.ndarray | None = None,
    seed: int = 3,
):
    noise = rank.rank_noise(epsilon)
    is_null = np.zeros(len(values), dtype=bool) if is_null is None else is_null
    words = np.random.default_rng(seed).integers(
        0, 2**64, size=(len(values), rank.words_per_row(noise)), dtype=np.uint64
    )
    return rank.privatise(
        values, is_null, words, x, c, noise, rank.digit_tables(noise), lattice=lattice
    )


def binomial_fits(count: int, n: int, probability: float) -> bool:
    return bool(stats.binomtest(int(count), n, probability).pvalue > ALPHA)


@pytest.mark.parametrize("epsilon", [0.05, 1.0, 8.0])
def test_rows_of_the_reference_are_released_with_its_distribution(epsilon: float) -> None:
    rng = np.random.default_rng(8)
    found, counts = ecdf.find_distinct(np.round(np.exp(rng.normal(size=20_000)), 3))
    x, c = ecdf.continualise(found, counts.astype(float), NOTHING, NOTHING, 0.0, None)
    out, is_null = released(rng.choice(found, size=200_000, p=counts / counts.sum()), x, c, epsilon)
    assert not is_null.any()
    assert stats.kstest(out, lambda v: np.interp(v, x, c)).pvalue > ALPHA
    assert stats.kstest(out, lambda v: np.interp(v * 1.03, x, c)).pvalue < ALPHA


@pytest.mark.parametrize("epsilon", [0.5, 4.0])
def test_released_ranks_follow_the_laplace_channel_with_no_more_and_no_less_noise(
    epsilon: float,
) -> None:
    line = np.array([0.0, 1.0])
    values = np.random.default_rng(4).random(400_000)
    out, _ = released(values, line, line, epsilon)
    observed = np.bincount(
        (values * 10).astype(int) * 10 + (out * 10).astype(int), minlength=100
    ).reshape(10, 10)

    def fits(b: float) -> bool:
        expected = observed.sum(axis=1, keepdims=True) * laplace_channel(np.full(10, 0.1), b)
        return bool(stats.chi2.sf(((observed - expected) ** 2 / expected).sum(), 90) > ALPHA)

    assert fits(1 / epsilon)
    assert not fits(0.5 / epsilon)
    assert not fits(2 / epsilon)


def test_what_is_drawn_for_one_rank_is_the_realised_distribution() -> None:
    line, noise = np.array([0.0, 1.0]), rank.rank_noise(1.0, 8)
    n = 400_000
    words = np.random.default_rng(6).integers(
        0, 2**64, size=(n, rank.words_per_row(noise)), dtype=np.uint64
    )
    weights, edges = realised(noise), clamped_intervals(noise)[:, 1]
    observed = []
    for i in (0, 5):
        out, _ = rank.privatise(
            np.full(n, (i + 0.5) / 8),
            np.zeros(n, bool),
            words,
            line,
            line,
            noise,
            rank.digit_tables(noise),
            lattice=False,
        )
        observed.append(np.bincount(np.searchsorted(edges, out), minlength=len(edges)))
    for row, counts in zip((0, 5), observed, strict=True):
        distribution = (weights[row] / (2 ** (63 * (len(noise.weights) + 1)))).astype(float)
        assert (
            stats.chi2.sf(
                ((counts - n * distribution) ** 2 / (n * distribution))[
                    n * distribution > 20
                ].sum(),
                (n * distribution > 20).sum() - 1,
            )
            > ALPHA
        )
        other = np.roll(distribution, 1)
        assert (
            stats.chi2.sf(
                ((counts - n * other) ** 2 / (n * other))[n * other > 20].sum(),
                (n * other > 20).sum() - 1,
            )
            < ALPHA
        )


def test_atoms_and_nulls_are_released_at_their_own_frequency() -> None:
    rng = np.random.default_rng(9)
    values = np.unique(rng.normal(size=300))
    atoms, n = np.array([-0.5, 0.0, 2.0]), 200_000
    x, c = ecdf.continualise(
        values,
        np.full(len(values), 0.4 / len(values)),
        atoms,
        np.array([0.1, 0.3, 0.2]),
        None,
        None,
    )
    c = np.append(0.15 + 0.85 * c[:-1], 1.0)
    line = np.concatenate([values, atoms])
    is_null = rng.random(n) < 0.15
    rows = np.where(
        is_null,
        0.0,
        rng.choice(
            line,
            size=n,
            p=np.concatenate([np.full(len(values), 0.4 / len(values)), [0.1, 0.3, 0.2]]),
        ),
    )
    out, out_null = released(rows, x, c, 1.0, is_null=is_null)
    assert binomial_fits(out_null.sum(), n, 0.15)
    for atom, probability in zip(atoms, [0.1, 0.3, 0.2], strict=True):
        assert binomial_fits(((out == atom) & ~out_null).sum(), n, 0.85 * probability)
        assert not binomial_fits(((out == atom) & ~out_null).sum(), n, 0.85 * probability + 0.01)
    assert not out[out_null].any()


def test_whole_numbers_are_released_whole_inside_the_observed_range_at_their_frequency() -> None:
    rng = np.random.default_rng(10)
    found, counts = ecdf.find_distinct(rng.poisson(3.0, size=5000).astype(float))
    x, c = ecdf.continualise(found, counts.astype(float), NOTHING, NOTHING, None, 1.0)
    out, _ = released(
        rng.choice(found, size=200_000, p=counts / counts.sum()), x, c, 2.0, lattice=True
    )
    seen, frequency = ecdf.find_distinct(out)
    assert set(seen) <= set(np.arange(found[0], found[-1] + 1))
    expected = np.diff(np.interp(seen, x, c), prepend=0.0)
    assert stats.chisquare(frequency, 200_000 * expected / expected.sum()).pvalue > ALPHA


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_whole_numbers_as_large_as_2_to_the_53_are_released_exactly(sign: float) -> None:
    found = np.sort(sign * (2.0**53 - np.arange(10.0)))
    x, c = ecdf.continualise(found, np.ones(10), NOTHING, NOTHING, None, 1.0)
    out, _ = released(np.random.default_rng(1).choice(found, size=50_000), x, c, 1.0, lattice=True)
    seen, frequency = ecdf.find_distinct(out)
    assert seen.tolist() == found.tolist()
    assert stats.chisquare(frequency).pvalue > ALPHA


def test_values_outside_the_reference_are_released_inside_it() -> None:
    x, c = ecdf.continualise(np.array([1.0, 2.0, 4.0]), np.ones(3), NOTHING, NOTHING, None, None)
    out, _ = released(np.array([-1e300, 1e300] * 1000), x, c, 16.0)
    assert ((out >= 0.0) & (out <= 4.0)).all()
    assert out[::2].mean() < 1.0 < 3.0 < out[1::2].mean()


def test_no_rows_give_no_rows() -> None:
    line = np.array([0.0, 1.0])
    out, is_null = released(NOTHING, line, line, 1.0)
    assert (out.shape, is_null.shape, out.dtype, is_null.dtype) == (
        (0,),
        (0,),
        np.float64,
        np.bool_,
    )


def by_hand(
    value: float, words: list[int], noise: rank.RankNoise, tables: tuple[list, list]
) -> float:
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
def test_every_word_is_read_once_and_as_documented(epsilon: float) -> None:
    line, noise, n = np.array([0.0, 1.0]), rank.rank_noise(epsilon), 20_000
    tables = rank.digit_tables(noise)
    rng = np.random.default_rng(12)
    values = rng.random(n)
    words = rng.integers(0, 2**64, size=(n, rank.words_per_row(noise)), dtype=np.uint64)
    out, _ = rank.privatise(
        values, np.zeros(n, bool), words, line, line, noise, tables, lattice=False
    )
    lists = (tables[0].tolist(), tables[1].tolist())
    expected = [
        by_hand(value, row, noise, lists)
        for value, row in zip(values.tolist(), words.tolist(), strict=True)
    ]
    np.testing.assert_allclose(out, expected, rtol=1e-13, atol=0)


def test_the_first_word_places_a_value_inside_its_own_interval() -> None:
    noise = rank.rank_noise(16.0)
    x, c = np.array([0.0, 0.0, 0.0]), np.array([0.0, 0.0, 1.0])
    words = np.zeros((2, rank.words_per_row(noise)), dtype=np.uint64)
    words[:, -1] = 2**63
    words[1, 0] = 2**64 - 1
    values, _ = rank.privatise(
        np.zeros(2), np.zeros(2, bool), words, x, c, noise, rank.digit_tables(noise), lattice=False
    )
    assert (values == 0.0).all()
    ranks = rank.disturb(
        rank._own_ranks(np.zeros(2), np.zeros(2, bool), words, x, c, guide_of(x), False),
        words,
        noise,
        rank.digit_tables(noise),
    )
    assert ranks[0] < 0.1 < 0.9 < ranks[1]


@pytest.mark.parametrize(("digit", "cell"), [(0, 0), (0, 3), (0, 255), (1, 1), (1, 255)])
@pytest.mark.parametrize("factor", [0.5, 1.5])
def test_the_stated_epsilon_covers_whatever_the_tables_hold(
    digit: int, cell: int, factor: float
) -> None:
    noise = rank.rank_noise(0.3, 12)
    resolved = noise.margin + 12 + math.ceil(24 * math.log(2) / noise.rate)
    weights = noise.weights.astype(object)
    weights[digit, cell] = (
        int(weights[digit, cell] * factor) if cell != 255 or digit == 0 else 2**40
    )
    other = max((k for k in range(256) if k != cell), key=lambda k: weights[digit, k])
    weights[digit, other] += 2**63 - sum(weights[digit])
    tampered = replace(noise, weights=weights.astype(np.uint64))
    with localcontext(prec=50):
        bound = rank._bound(noise.rate, 12, noise.margin, resolved, noise.sign, tampered.weights)
    assert exact_loss(realised(tampered)) <= Decimal(bound)


def test_a_released_number_never_passes_the_largest_knot_by_rounding() -> None:
    x, c = np.array([-9.0, -9.0, -9.0, 15.17]), np.array([0.0, 0.0, 0.7142857142857143, 1.0])
    assert cdf_kernel.value_at(1.0, x, c, guide_of(c), False) == 15.17
