"""Distinct records: rows of 64-bit words counted in linear passes, without sorting."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dpdask.kernels.jit import jit

Words = NDArray[np.uint64]
Grades = NDArray[np.uint8]
Ints = NDArray[np.int64]


@jit
def find_distinct(keys: Words, grades: Grades, counts: Ints) -> tuple[Ints, Ints]:
    """Return the first row of each distinct (key, grade), in the order of their first appearance, and their summed counts.

    Parameters
    ----------
    keys
        uint64 array of shape (n, m): row r's key is its m words.
    grades, counts
        uint8 and int64 arrays of shape (n,).

    Notes
    -----
    An open-addressed table of row numbers, at most half full: n · 16 to 32 bytes of memory.
    """
    size = 16
    while size < 2 * len(keys):
        size *= 2
    slots = np.full(size, -1, dtype=np.int64)
    firsts = np.empty(len(keys), dtype=np.int64)
    sums = np.empty(len(keys), dtype=np.int64)
    n_found = 0
    for row in range(len(keys)):
        slot = np.int64(_mix(keys[row], grades[row]) & np.uint64(size - 1))
        while slots[slot] >= 0 and not _same(keys, grades, firsts[slots[slot]], row):
            slot = (slot + 1) & (size - 1)
        if slots[slot] < 0:
            slots[slot] = n_found
            firsts[n_found] = row
            sums[n_found] = 0
            n_found += 1
        sums[slots[slot]] += counts[row]
    return firsts[:n_found].copy(), sums[:n_found].copy()


@jit
def _mix(key: Words, grade: np.uint8) -> np.uint64:
    mixed = np.uint64(grade)
    for word in key:
        mixed = (mixed ^ word) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(32)
    return mixed


@jit
def _same(keys: Words, grades: Grades, one: int, other: int) -> bool:
    if grades[one] != grades[other]:
        return False
    for position in range(keys.shape[1]):  # noqa: SIM110 - numba compiles no generator
        if keys[one, position] != keys[other, position]:
            return False
    return True


@jit
def leading_zeros(words: Words) -> Grades:
    """Return how many zero bits each word begins with, 0 to 64: at least k with probability 2**-k."""
    out = np.empty(len(words), dtype=np.uint8)
    for row in range(len(words)):
        word, count = words[row], 0
        while count < 64 and (word >> np.uint64(63 - count)) == np.uint64(0):
            count += 1
        out[row] = count
    return out
