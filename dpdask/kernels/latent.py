"""Correlated normals from raw random words: the latent variables of a Gaussian copula, a block of rows at a time.

Nothing here is left to a library's choice: the same words and the same factor give the same bits on every machine and
every number of threads, so that a task that runs twice writes the same rows. (A BLAS orders its sums by the processor
and the threads it finds.)
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from dpdask.kernels.jit import jit

BLOCK_ROWS = 256

Latents = NDArray[np.float32]

_FIRST = 126 << 7  # the sign, exponent and first seven bits of 0.5 as a float32: the table's first piece
_N_PIECES = 32 * 128 + 1


def _pieces() -> NDArray[np.float32]:
    """Return the normal quantile below one half in cubic pieces, 128 to an octave of probability: shape (n_pieces, 4)."""
    starts = ((np.arange(_N_PIECES, dtype=np.uint32) + np.uint32(_FIRST)) << np.uint32(16)).view(np.float32).astype(np.float64)
    ends = np.append(starts[1:], starts[-1] * (129.0 / 128.0))
    thirds = np.arange(4) / 3.0
    a, b, c, d = ndtri((starts[:, None] + (ends - starts)[:, None] * thirds) * 2.0**-32).T
    # the cubic through four values, written out: a library's solver would round as the processor likes
    terms = (a, -5.5 * a + 9.0 * b - 4.5 * c + d, 9.0 * a - 22.5 * b + 18.0 * c - 4.5 * d, 4.5 * (d - a) + 13.5 * (b - c))
    return np.stack(terms, axis=1).astype(np.float32)


_PIECES = _pieces()


@jit
def _normals(words: NDArray[np.uint64], pieces: NDArray[np.float32], out: NDArray[np.float32]) -> None:
    bits = out.view(np.uint32)
    for index in range(len(words)):
        for half in range(2):
            place = (words[index] >> np.uint64(32 * half)) & np.uint64(0x7FFFFFFF)
            out[2 * index + half] = np.float32(place) + np.float32(0.5)
    for index in range(len(words)):
        for half in range(2):
            at = bits[2 * index + half]
            a = pieces[np.int64(at >> np.uint32(16)) - _FIRST]
            x = np.float32(at & np.uint32(0xFFFF)) * np.float32(2.0**-16)
            value = a[0] + x * (a[1] + x * (a[2] + x * a[3]))
            out[2 * index + half] = value if (words[index] >> np.uint64(32 * half + 31)) & np.uint64(1) else -value


@jit
def _times(factor: NDArray[np.float32], z: NDArray[np.float32], out: NDArray[np.float32]) -> None:
    """Write the lower triangular factor times z, four rows and four terms at a time, each sum in its own fixed order."""
    n_latents, n = z.shape
    whole = n_latents - n_latents % 4
    for j in range(0, whole, 4):
        o0, o1, o2, o3 = out[j], out[j + 1], out[j + 2], out[j + 3]
        for i in range(n):
            o0[i] = o1[i] = o2[i] = o3[i] = np.float32(0.0)
        f0, f1, f2, f3 = factor[j], factor[j + 1], factor[j + 2], factor[j + 3]
        for k in range(0, j + 4, 4):
            z0, z1, z2, z3 = z[k], z[k + 1], z[k + 2], z[k + 3]
            a00, a01, a02, a03 = f0[k], f0[k + 1], f0[k + 2], f0[k + 3]
            a10, a11, a12, a13 = f1[k], f1[k + 1], f1[k + 2], f1[k + 3]
            a20, a21, a22, a23 = f2[k], f2[k + 1], f2[k + 2], f2[k + 3]
            a30, a31, a32, a33 = f3[k], f3[k + 1], f3[k + 2], f3[k + 3]
            for i in range(n):
                x0, x1, x2, x3 = z0[i], z1[i], z2[i], z3[i]
                o0[i] = (((o0[i] + a00 * x0) + a01 * x1) + a02 * x2) + a03 * x3
                o1[i] = (((o1[i] + a10 * x0) + a11 * x1) + a12 * x2) + a13 * x3
                o2[i] = (((o2[i] + a20 * x0) + a21 * x1) + a22 * x2) + a23 * x3
                o3[i] = (((o3[i] + a30 * x0) + a31 * x1) + a32 * x2) + a33 * x3
    for j in range(whole, n_latents):
        row = out[j]
        for i in range(n):
            row[i] = np.float32(0.0)
        for k in range(j + 1):
            a, term = factor[j, k], z[k]
            for i in range(n):
                row[i] = row[i] + a * term[i]


def normals(words: NDArray[np.uint64]) -> Latents:
    """Return two independent standard normal numbers for each word.

    Parameters
    ----------
    words
        uint64 array of any shape, uniform.

    Returns
    -------
    float32 array of shape (2 · words.size,).

    Notes
    -----
    32 bits each: a sign, and 31 bits of the place in the lower half, through cubic pieces of the normal quantile, 128 to an
    octave. The error is that of float32, and the largest value 6.3.
    """
    out = np.empty(2 * words.size, dtype=np.float32)
    _normals(words.reshape(-1), _PIECES, out)
    return out


def words_per_block(n_latents: int) -> int:
    """Return how many random words a block of rows takes."""
    return n_latents * BLOCK_ROWS // 2


def latents(factor: NDArray[np.float32], words: NDArray[np.uint64], out: Latents) -> None:
    """Write one block of rows of correlated normals.

    Parameters
    ----------
    factor
        float32 array of shape (n_latents, n_latents), lower triangular: the Cholesky factor of their correlations.
    words
        uint64 array of shape (words_per_block(n_latents),).
    out
        float32 array of shape (n_latents, BLOCK_ROWS), overwritten.
    """
    _times(factor, normals(words).reshape(len(factor), BLOCK_ROWS), out)
