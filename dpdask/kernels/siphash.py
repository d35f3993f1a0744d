"""SipHash-2-4 of rows of 64-bit words: a keyed hash that is the same for any partitioning and on any machine.

Aumasson and Bernstein, SipHash: a fast short-input PRF (2012).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dpdask.kernels.jit import jit

Words = NDArray[np.uint64]


@jit
def _rotate(value: np.uint64, bits: int) -> np.uint64:
    return np.uint64((value << np.uint64(bits)) | (value >> np.uint64(64 - bits)))


@jit
def _round(v0: np.uint64, v1: np.uint64, v2: np.uint64, v3: np.uint64) -> tuple[np.uint64, np.uint64, np.uint64, np.uint64]:
    v0 = np.uint64(v0 + v1)
    v1 = _rotate(v1, 13) ^ v0
    v0 = _rotate(v0, 32)
    v2 = np.uint64(v2 + v3)
    v3 = _rotate(v3, 16) ^ v2
    v0 = np.uint64(v0 + v3)
    v3 = _rotate(v3, 21) ^ v0
    v2 = np.uint64(v2 + v1)
    v1 = _rotate(v1, 17) ^ v2
    v2 = _rotate(v2, 32)
    return v0, v1, v2, v3


@jit
def _same(one: Words, other: Words) -> bool:
    for position in range(len(one)):  # noqa: SIM110 - numba compiles no generator
        if one[position] != other[position]:
            return False
    return True


@jit
def siphash(rows: Words, key0: np.uint64, key1: np.uint64) -> Words:
    """Return the SipHash-2-4 of each row.

    Parameters
    ----------
    rows
        uint64 array of shape (n, m): each row is a message of m little-endian words.
    key0, key1
        The 128-bit key.

    Returns
    -------
    uint64 array of shape (n,).
    """
    out = np.empty(len(rows), dtype=np.uint64)
    length = np.uint64((rows.shape[1] * 8) & 255) << np.uint64(56)
    for row in range(len(rows)):
        if row > 0 and _same(rows[row], rows[row - 1]):  # tables are often sorted by their units
            out[row] = out[row - 1]
            continue
        v0 = key0 ^ np.uint64(0x736F6D6570736575)
        v1 = key1 ^ np.uint64(0x646F72616E646F6D)
        v2 = key0 ^ np.uint64(0x6C7967656E657261)
        v3 = key1 ^ np.uint64(0x7465646279746573)
        for position in range(rows.shape[1] + 1):
            word = rows[row, position] if position < rows.shape[1] else length
            v3 ^= word
            v0, v1, v2, v3 = _round(v0, v1, v2, v3)
            v0, v1, v2, v3 = _round(v0, v1, v2, v3)
            v0 ^= word
        v2 ^= np.uint64(255)
        for _ in range(4):
            v0, v1, v2, v3 = _round(v0, v1, v2, v3)
        out[row] = v0 ^ v1 ^ v2 ^ v3
    return out
