"""The latent normals against scipy's quantile, and their correlation against a product in double precision."""

import numpy as np
import pytest
from numpy.random import default_rng

from dpdask.kernels.correlation import (
    BLOCK_ROWS,
    latents,
    normals,
    pack,
    room_for,
    thin,
    words_per_block,
)

SIZES = [*range(1, 11), 33]


def words(seed, n):
    return default_rng(seed).integers(0, 2**64, n, dtype=np.uint64)


def polar(half):
    """Two normals of 32 bits: 20 of the radius, 12 of the angle, in double precision."""
    radius = np.sqrt(-2.0 * np.log(((half >> 12) + 0.5) * 2.0**-20))
    angle = ((half & 1023) - 511.5) * np.pi / 2048 + ((half >> 10) & 3) * np.pi / 2
    return radius * np.cos(angle), radius * np.sin(angle)


def drawn(factor, raw, before=np.nan):
    """One block of latent variables, in room that held something else before."""
    out = room_for(len(factor), BLOCK_ROWS)
    out[:] = before
    latents(pack(factor), raw, out, 0)
    return out[: len(factor), :BLOCK_ROWS]


def factor_of(size, seed=3):
    square = default_rng(seed).normal(size=(size, 2 * size))
    return np.linalg.cholesky(np.corrcoef(square).reshape(size, size)).astype(np.float32)


# The polar form


def test_every_radius_and_every_angle_is_right():
    for half in (
        np.arange(2**20, dtype=np.uint32) << 12,
        np.arange(2**12, dtype=np.uint32),
        np.arange(2**12, dtype=np.uint32) | np.uint32(0xFFFFF000),
    ):
        first, second = polar(half.astype(np.int64))
        found = normals(half.view(np.uint64)).astype(np.float64)
        assert np.isfinite(found).all()
        np.testing.assert_allclose(
            found, np.concatenate([first, second]), rtol=0, atol=2e-5
        )  # next to radius 0 a square root is steep
    assert (
        np.hypot(*found.reshape(2, -1)).max()
        < np.hypot(*polar(np.array([0])))
        == pytest.approx(5.395, abs=1e-3)
    )


# The product


def terms(size, raw):
    """The normals of a block, as the product reads them: sixteen rows after the other."""
    return (
        normals(raw)
        .reshape(BLOCK_ROWS // 16, size, 16)
        .transpose(1, 0, 2)
        .reshape(size, BLOCK_ROWS)
    )


@pytest.mark.parametrize("size", SIZES)
def test_a_block_is_the_factor_times_the_normals(size):
    factor, raw = factor_of(size), words(size, words_per_block(size))
    z, wide = terms(size, raw).astype(np.float64), factor.astype(np.float64)
    assert (
        np.abs(drawn(factor, raw) - wide @ z) <= (size + 1) * 2.0**-24 * (np.abs(wide) @ np.abs(z))
    ).all()


@pytest.mark.parametrize("size", [1, 5, 13])
def test_every_sum_is_one_chain_of_fused_multiply_adds(size):
    """Rounded once a term, in the order of the columns: what any tile and any vector gives. Products of float32 are exact in float64, and so
    nearly always is a term added to them: then rounding to float32 is the only one."""
    factor, raw = factor_of(size), words(size, words_per_block(size))
    total = np.zeros((size, BLOCK_ROWS), dtype=np.float32)
    for k, row in enumerate(terms(size, raw)):
        total = (
            factor[:, k, None].astype(np.longdouble) * row.astype(np.longdouble) + total
        ).astype(np.float32)
    assert (drawn(factor, raw) == total).mean() > 0.9999


def test_blocks_are_written_side_by_side_and_touch_nothing_else():
    factor, raw = factor_of(9), words(1, words_per_block(9))
    out = room_for(9, 300)
    out[:] = 5.0
    latents(pack(factor), raw, out, BLOCK_ROWS)
    assert out[:9, BLOCK_ROWS : 2 * BLOCK_ROWS].tobytes() == drawn(factor, raw).tobytes()
    assert (out[:, :BLOCK_ROWS] == 5.0).all()
    assert (out[:, 2 * BLOCK_ROWS :] == 5.0).all()


# The thinned factor


def test_a_thinned_factor_changes_correlations_by_little_and_is_thin():
    rng = default_rng(2)
    loadings = np.kron(np.eye(12), np.ones((10, 1))) * 0.7 + 0.02 * rng.normal(size=(120, 12))
    wanted = loadings @ loadings.T
    np.fill_diagonal(wanted, 1.0)
    factor = np.linalg.cholesky(wanted)
    thinned = thin(factor)
    change = np.sqrt(((thinned @ thinned.T - wanted) ** 2).mean())
    assert 0.0002 < change <= 0.003
    np.testing.assert_allclose((thinned**2).sum(axis=1), 1.0)
    small = np.abs(factor) < 1e-3
    assert ((thinned == 0.0) & (factor != 0.0)).any()
    assert (thinned[~small & (factor > 0.1)] != 0.0).all()


def test_the_bits_are_pinned():
    """Records written by one version are written again by the next, on any machine."""
    factor = np.tril(np.arange(1, 26, dtype=np.float32).reshape(5, 5)) / np.float32(32.0)
    out = drawn(
        factor, np.arange(words_per_block(5), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    )
    assert [value.hex() for value in out[:, 1].astype(float).tolist()] == PINNED


PINNED = [
    "0x1.e8b9c40000000p-4",
    "0x1.6b7e360000000p-1",
    "0x1.2462620000000p+0",
    "0x1.52f2580000000p+0",
    "0x1.838be60000000p+0",
]
