"""Projections onto the simplex."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def project(values: Floats, total: float) -> Floats:
    """Return the non-negative vector with sum `total` that is nearest to `values` in Euclidean distance.

    Notes
    -----
    Of the positions k of the sorted values, the support is the last at which the k-th largest still
    exceeds the t that the k largest alone would need. The values are first shifted by their
    largest, so t is found without cancellation.

    References
    ----------
    Held, Wolfe and Crowder, Validation of subgradient optimization (1974), section 2; Duchi,
    Shalev-Shwartz, Singer and Chandra, Efficient projections onto the l1-ball (2008), figure 1.
    """
    if len(values) == 0 or not np.isfinite(values).all() or not 0 < total < np.inf:
        raise ValueError("a projection needs finite values and a positive, finite total")
    shifted = values - values.max()
    descending = np.sort(shifted)[::-1]
    needed = (np.cumsum(descending) - total) / np.arange(1, len(values) + 1)
    last = np.flatnonzero(descending > needed)[-1]
    result: Floats = np.maximum(shifted - needed[last], 0.0)
    result *= total / result.sum()
    return result


def project_each(values: Floats, totals: Floats) -> Floats:
    """Return each vector of the last axis, projected as by `project`.

    Parameters
    ----------
    values
        float64 array of shape (…, n); minus infinity where an entry must be 0. At least one entry
        of each vector is finite.
    totals
        float64 array of shape (…), positive: the sum of each vector.
    """
    falling = -np.sort(-values, axis=-1)
    finite = np.isfinite(falling)
    excess = np.cumsum(np.where(finite, falling, 0.0), axis=-1) - totals[..., None]
    sizes = np.arange(1, values.shape[-1] + 1)
    support = (finite & (np.where(finite, falling, 0.0) > excess / sizes)).sum(
        axis=-1, keepdims=True
    )
    t = np.take_along_axis(excess, np.maximum(support - 1, 0), axis=-1) / np.maximum(support, 1)
    result: Floats = np.maximum(values - t, 0.0)
    return result
