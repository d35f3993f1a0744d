"""The codes of numbers among few levels."""

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
