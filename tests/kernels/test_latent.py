"""The latent normals against scipy's quantile, and their correlation against a product in double precision."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats
from scipy.special import ndtri

from dpdask.kernels.latent import BLOCK_ROWS, latents, normals, words_per_block

ALPHA = 1e-10
SIZES = [*range(1, 11), 33]


def words(seed: int, n: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**64, n, dtype=np.uint64)


def halves(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    return low.astype(np.uint64) | (high.astype(np.uint64) << np.uint64(32))


def quantiles(half: np.ndarray) -> np.ndarray:
    """The normal quantile of 32 bits: a sign, and a place in the lower half."""
    place, lower = (half & 0x7FFFFFFF).astype(np.float64), (half >> 31).astype(bool)
    value = ndtri((place + 0.5) * 2.0**-32)
    return np.where(lower, value, -value)


def factor_of(size: int, seed: int = 3) -> np.ndarray:
    square = np.random.default_rng(seed).normal(size=(size, 2 * size))
    return np.linalg.cholesky(np.corrcoef(square).reshape(size, size)).astype(np.float32)


# The quantile


@pytest.mark.parametrize("octave", range(31))
def test_the_quantile_is_scipys_in_every_octave_and_on_the_edges_of_its_pieces(octave):
    rng = np.random.default_rng(octave)
    start, n = 2**octave, min(2**octave, 4000)
    drawn = start + rng.integers(0, start, n)
    edges = (start + np.arange(129) * start // 128)[:, None] + np.array([-1, 0, 1])
    places = np.concatenate([drawn, edges.ravel(), [start, 2 * start - 1]]).clip(0, 2**31 - 1)
    places = np.concatenate([places, places + 2**31])
    found = normals(halves(places, places[::-1]))
    np.testing.assert_allclose(found[0::2], quantiles(places), rtol=0, atol=1e-6)
    np.testing.assert_allclose(found[1::2], quantiles(places[::-1]), rtol=0, atol=1e-6)


def test_the_extremes_are_finite_and_of_both_signs():
    extremes = np.array([0, 2**31, 2**31 - 1, 2**32 - 1])  # the farthest above and below, and next to 0 on both sides
    high, low, above, below = normals(halves(extremes, extremes))[::2].tolist()
    assert high == -low == pytest.approx(-ndtri(2.0**-33), abs=1e-6) == pytest.approx(6.338, abs=1e-3)
    assert abs(above) == abs(below) < 1e-6


def test_the_sign_bit_alone_decides_the_sign():
    raw = words(1, 5000)
    flipped = raw ^ np.uint64(0x8000000080000000)
    assert (normals(raw) == -normals(flipped)).all()


def test_farther_places_give_larger_values_up_to_rounding():
    places = np.sort(np.random.default_rng(5).integers(0, 2**31, 50_000))
    found = normals(halves(places + 2**31, places)).reshape(-1, 2).astype(np.float64)
    assert (np.diff(found[:, 0]) >= -1e-6).all()
    assert (np.diff(found[:, 1]) <= 1e-6).all()


# The distribution


def test_the_moments_and_the_shape_are_those_of_the_standard_normal():
    n = 400_000
    z = normals(words(7, n // 2)).astype(np.float64)
    assert abs(z.mean()) * np.sqrt(n) < 6.5
    for power, moment, variance in ((2, 1.0, 2.0), (3, 0.0, 15.0), (4, 3.0, 96.0)):
        assert abs((z**power).mean() - moment) / np.sqrt(variance / n) < 6.5
    assert stats.kstest(z, "norm").pvalue > ALPHA
    for wrong in (0.98 * z, 1.02 * z, z + 0.02):  # and the test would see two per cent
        assert stats.kstest(wrong, "norm").pvalue < ALPHA


def test_the_two_numbers_of_a_word_and_neighbouring_words_are_uncorrelated():
    z = normals(words(8, 200_000)).astype(np.float64)
    for first, second in ((z[0::2], z[1::2]), (z[1:-1:2], z[2::2]), (z[0::2] ** 2, z[1::2] ** 2)):
        assert abs(np.corrcoef(first, second)[0, 1]) < 6.5 / np.sqrt(len(first))


def test_words_of_any_shape_give_two_numbers_each():
    raw = words(9, 24)
    assert normals(raw.reshape(2, 3, 4)).tolist() == normals(raw).tolist()
    assert normals(raw).dtype == np.float32
    assert normals(raw[:0]).shape == (0,)


# The product


@pytest.mark.parametrize("size", SIZES)
def test_a_block_is_the_factor_times_the_normals(size):
    factor, raw = factor_of(size), words(size, words_per_block(size))
    out = np.full((size, BLOCK_ROWS), np.nan, dtype=np.float32)
    latents(factor, raw, out)
    z = normals(raw).reshape(size, BLOCK_ROWS).astype(np.float64)
    wide = factor.astype(np.float64)
    assert (np.abs(out - wide @ z) <= (size + 1) * 2.0**-24 * (np.abs(wide) @ np.abs(z))).all()


@pytest.mark.parametrize("size", SIZES)
def test_the_same_words_give_the_same_bits_whatever_was_there_before(size):
    factor, raw = factor_of(size), words(size, words_per_block(size))
    first, second = np.full((size, BLOCK_ROWS), 7, dtype=np.float32), np.full((size, BLOCK_ROWS), -np.inf, dtype=np.float32)
    latents(factor, raw, first)
    latents(factor.copy(), raw.copy(), second)
    assert first.tobytes() == second.tobytes()
    latents(factor, words(size + 1000, words_per_block(size)), second)
    assert first.tobytes() != second.tobytes()


def test_a_latent_variable_does_not_depend_on_those_after_it():
    """Row j is a sum over 0..j in a fixed order: four at a time or one by one, a smaller factor gives the same numbers nearly."""
    factor = factor_of(9)
    raw = words(2, words_per_block(9))
    whole, part = np.empty((9, BLOCK_ROWS), dtype=np.float32), np.empty((6, BLOCK_ROWS), dtype=np.float32)
    latents(factor, raw, whole)
    latents(np.ascontiguousarray(factor[:6, :6]), raw[: words_per_block(6)], part)
    assert whole[:4].tobytes() == part[:4].tobytes()
    np.testing.assert_allclose(part, whole[:6], rtol=0, atol=1e-5)


def test_the_bits_are_pinned():
    """Records written by one version are written again by the next, on any machine."""
    out = np.empty((5, BLOCK_ROWS), dtype=np.float32)
    factor = np.tril(np.arange(1, 26, dtype=np.float32).reshape(5, 5)) / np.float32(32.0)
    latents(factor, np.arange(words_per_block(5), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15), out)
    assert [value.hex() for value in out[:, 1].astype(float).tolist()] == PINNED


PINNED = ["0x1.95a11a0000000p-3", "0x1.7566c60000000p+0", "0x1.7ae71a0000000p+1", "0x1.22417a0000000p+2", "0x1.82beac0000000p+2"]
