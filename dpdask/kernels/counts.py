"""Counting levels in one pass over their codes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dpdask.kernels.jit import jit


@jit
def count_all(codes: NDArray[np.int32], n_levels: int) -> NDArray[np.int64]:
    """Return how often each of the levels 0..n_levels-1 occurs, int64 array of shape (n_levels,).

    Parameters
    ----------
    codes
        int32 array of shape (n,), in 0..n_levels-1.
    n_levels
        How many levels there are.
    """
    counts = np.zeros(n_levels, dtype=np.int64)
    for row in range(len(codes)):
        counts[codes[row]] += 1
    return counts


@jit
def count_chosen(codes: NDArray[np.int32], chosen: NDArray[np.bool_], n_levels: int) -> NDArray[np.int64]:
    """Return how often each of the levels 0..n_levels-1 occurs in the chosen rows, int64 array of shape (n_levels,).

    Parameters
    ----------
    codes
        int32 array of shape (n,), in 0..n_levels-1.
    chosen
        bool array of shape (n,): which rows count.
    n_levels
        How many levels there are.
    """
    counts = np.zeros(n_levels, dtype=np.int64)
    for row in range(len(codes)):
        counts[codes[row]] += chosen[row]
    return counts
