"""Places inside cells: against scipy's normal distribution, and with power in both directions."""

import hashlib

import numpy as np
import pytest
from numpy.random import default_rng
from scipy import special, stats

from dpdask.kernels import places as kernel

R, N = 0.8, 60_000
CUTS = np.array([-8.0, -1.2, -0.4, 0.3, 1.0, 8.0])
SIZE = len(CUTS) - 1


def scores_of(n=N, others=0):
    """Rows of two normal scores with correlation R, and independent ones."""
    rng = default_rng(5)
    first, rest = rng.normal(size=n), rng.normal(size=(1 + others, n))
    return np.stack([first, R * first + np.sqrt(1 - R * R) * rest[0], *rest[1:]])


def codes_of(scores):
    return np.searchsorted(CUTS[1:-1], scores).astype(np.uint8)


def drawn(codes, matrix, lows=None, highs=None):
    """The scores that the kernel draws in the cells, by the regressions of a correlation matrix."""
    n_columns, n = codes.shape
    lows = np.tile(CUTS[:-1], n_columns) if lows is None else lows
    highs = np.tile(CUTS[1:], n_columns) if highs is None else highs
    precision = np.linalg.inv(matrix)
    partners = np.array([[j for j in range(n_columns) if j != i] for i in range(n_columns)])
    weights = -np.take_along_axis(precision / np.diag(precision)[:, None], partners, axis=1)
    out = np.zeros((n_columns, n), dtype=np.uint32)
    kernel.draw_places(
        codes,
        np.arange(n_columns) * (len(lows) // n_columns),
        lows,
        highs,
        partners,
        weights,
        np.diag(precision) ** -0.5,
        default_rng(7).integers(0, 2**64, (n, n_columns), dtype=np.uint64),
        out,
    )
    cells = np.arange(n_columns)[:, None] * (len(lows) // n_columns) + codes
    low, high = special.ndtr(lows)[cells], special.ndtr(highs)[cells]
    return out, special.ndtri(low + (high - low) * (out + 0.5) / 2.0**32)


def joined(n_columns, r=R):
    """Correlations of which only the first two are not 0."""
    matrix = np.eye(n_columns)
    matrix[0, 1] = matrix[1, 0] = r
    return matrix


def test_the_table_is_the_normal_distribution_and_has_the_same_bits_everywhere():
    x = default_rng(1).uniform(-8.5, 8.5, 5000)
    found = np.array([kernel.normal_cdf(each) for each in x])
    np.testing.assert_allclose(found, special.ndtr(x), atol=3e-6)
    inside = np.abs(x) < 5
    back = np.array([kernel.normal_score(each) for each in found[inside]])
    np.testing.assert_allclose(back, x[inside], atol=1e-6)
    assert kernel.normal_cdf(-8.0) == 0.0
    assert kernel.normal_cdf(8.0) == 1.0
    assert hashlib.sha256(kernel._TABLE.tobytes()).hexdigest()[:16] == "821c388740f6fdd7"


def test_scores_in_cells_are_correlated_as_the_rows_are():
    scores = scores_of()
    _, found = drawn(codes_of(scores), joined(2))
    assert (codes_of(found) == codes_of(scores)).mean() > 0.9999
    assert np.corrcoef(found)[0, 1] == pytest.approx(np.corrcoef(scores)[0, 1], abs=0.01)
    for own, true in zip(found, scores, strict=True):
        assert stats.ks_2samp(own, true).pvalue > 1e-6
    _, alone = drawn(codes_of(scores), joined(2, 0.0))
    assert np.corrcoef(alone)[0, 1] < np.corrcoef(scores)[0, 1] - 0.03


def test_scores_that_may_be_anywhere_do_not_blur_the_others():
    """A null's range is the whole line: it follows the others, and they do not follow its first draw."""
    scores = scores_of(others=1)
    matrix = np.full((3, 3), 0.7) + 0.3 * np.eye(3)
    codes = codes_of(scores)
    codes[2] = 0
    lows, highs = np.tile(CUTS[:-1], 3), np.tile(CUTS[1:], 3)
    lows[2 * SIZE], highs[2 * SIZE] = -8.0, 8.0
    _, found = drawn(codes, matrix, lows, highs)
    own = np.corrcoef(found)
    _, two = drawn(codes[:2], joined(2, 0.7))
    assert own[0, 1] == pytest.approx(np.corrcoef(two)[0, 1], abs=0.005)
    # the regression of a free score on both, and its own deviation
    weight = 0.7 / 1.7
    wanted = weight * (1 + own[0, 1]) / np.sqrt(2 * weight**2 * (1 + own[0, 1]) + 1 - 0.98 / 1.7)
    assert own[0, 2] == pytest.approx(wanted, abs=0.02)


def test_cells_that_contradict_the_correlation_give_different_places_near_the_mean():
    codes = np.stack([np.zeros(5000), np.full(5000, SIZE - 1)]).astype(np.uint8)
    out, found = drawn(codes, joined(2, 0.995))
    assert len(np.unique(out[1])) > 4000
    assert (found[0] <= CUTS[1] + 1e-6).all()
    assert (found[1] >= CUTS[-2] - 1e-6).all()
    assert np.median(found[1]) < CUTS[-2] + 0.1


def test_a_cell_without_probability_has_places_too():
    lows, highs = np.zeros(2), np.zeros(2)
    out, _ = drawn(np.zeros((2, 10), dtype=np.uint8), joined(2), lows, highs)
    assert (out == 2**31).all()


def test_places_are_spread_evenly_in_their_order():
    rng = default_rng(3)
    codes = rng.integers(0, 3, 50_000).astype(np.uint16)
    codes[:1] = 4
    before = (rng.beta(4, 2, len(codes)) * 2.0**32).astype(np.uint32)
    places = before.copy()
    kernel.spread_evenly(codes, 5, places, len(codes))
    for cell in range(3):
        own, old = places[codes == cell], before[codes == cell]
        assert stats.kstest(own / 2.0**32, "uniform").pvalue > 1e-6
        assert stats.kstest(old / 2.0**32, "uniform").pvalue < 1e-100
        assert (np.diff(own[np.argsort(old)].astype(np.int64)) >= 0).all()
    assert places[0] == np.uint32((int(before[0]) % 2**27) * 2**5)  # alone in its cell
