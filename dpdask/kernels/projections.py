"""Projections: onto the simplex, and onto monotone sequences."""

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


Counts = NDArray[np.int64]


def isotonic(values: Floats, weights: Floats) -> Floats:
    """Return the non-decreasing vector that is nearest to `values` in weighted squares.

    References
    ----------
    Barlow, Bartholomew, Bremner and Brunk, Statistical inference under order restrictions (1972),
    section 1.2 (pool adjacent violators).
    """
    if values.shape != weights.shape or values.ndim != 1:
        raise ValueError("an isotonic regression needs one weight per value")
    if not np.isfinite(values).all() or not (np.isfinite(weights) & (weights > 0)).all():
        raise ValueError("an isotonic regression needs finite values and positive, finite weights")
    if not len(values):
        return np.zeros(0)
    from scipy import optimize  # slow to import

    fitted: Floats = np.asarray(
        optimize.isotonic_regression(values, weights=weights).x, dtype=np.float64
    )
    return fitted


def case_one(anchors: Floats, below_counts: Counts, counts: Counts) -> Floats:
    """Return the maximum likelihood cdf at the anchors of Case I data.

    Parameters
    ----------
    below_counts
        int64 array of shape (k,): how many of the rows asked at each anchor lie at it or below.
    counts
        int64 array of shape (k,): how many rows were asked there.

    Notes
    -----
    Maximises Σ_j b_j log F(u_j) + (n_j - b_j) log(1 - F(u_j)) over all F: the isotonic regression
    of b_j / n_j with weights n_j does, exactly.

    References
    ----------
    Ayer, Brunk, Ewing, Reid and Silverman (1955), theorem 2.1; Groeneboom and Wellner, Information
    bounds and nonparametric maximum likelihood estimation (1992), proposition 1.2.
    """
    if not anchors.shape == below_counts.shape == counts.shape or anchors.ndim != 1:
        raise ValueError("there is one pair of counts per anchor")
    if np.isnan(anchors).any() or (np.diff(anchors) <= 0).any():
        raise ValueError("anchors increase, and no two are equal")
    if (below_counts < 0).any() or (below_counts > counts).any() or not counts.any():
        raise ValueError(
            "of the rows asked at an anchor, at least one in all, none or more and at most all lie below"
        )
    asked = counts > 0
    fitted = isotonic(below_counts[asked] / counts[asked], counts[asked].astype(np.float64))
    return np.concatenate([[0.0], fitted])[np.cumsum(asked)]
