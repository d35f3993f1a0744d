"""The codes of numbers among few levels, and how often each level occurs."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dpdask.kernels.jit import jit


@jit
def find_codes(values: NDArray[np.floating], levels: NDArray[np.float64], codes: NDArray[np.int32]) -> tuple[NDArray[np.int32], bool]:
    """Return the code of each value, and whether all values are levels; the code of a value that is none is 0.

    Parameters
    ----------
    values
        float array of shape (n,).
    levels
        float64 array of shape (m,), increasing.
    codes
        int32 array of shape (m,): the code of each level.

    Notes
    -----
    Where the levels are evenly spaced, as stars are, the place of a level is computed; otherwise it is searched for.
    """
    n_levels, low = len(levels), levels[0]
    span = levels[-1] - low
    scale = (n_levels - 1) / span if span > 0.0 else 0.0
    out = np.zeros(len(values), dtype=np.int32)
    complete = True
    for row in range(len(values)):
        value = np.float64(values[row])
        if not low <= value <= levels[-1]:  # NaN too
            complete = False
            continue
        place = np.uint64((value - low) * scale + 0.5)  # unsigned: numba would look for places counted from the end
        if levels[place] != value:
            place = np.uint64(np.searchsorted(levels, value))
        if levels[place] == value:
            out[row] = codes[place]
        else:
            complete = False
    return out, complete


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
