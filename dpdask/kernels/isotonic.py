"""Isotonic regression, and with it the maximum likelihood cdf of data that say only which side of an anchor they lie on."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]


def isotonic(values: Floats, weights: Floats) -> Floats:
    """Return the non-decreasing vector that is nearest to `values` in weighted squares.

    Parameters
    ----------
    values
        float64 array of shape (n,), finite.
    weights
        float64 array of shape (n,), positive and finite.

    Returns
    -------
    float64 array of shape (n,): averages of blocks of `values`, exact up to rounding, in time linear in n.

    Raises
    ------
    ValueError
        If the shapes differ, a value is not finite or a weight is not positive and finite.

    References
    ----------
    Barlow, Bartholomew, Bremner and Brunk, Statistical inference under order restrictions (1972), section 1.2 (pool
    adjacent violators).
    """
    if values.shape != weights.shape or values.ndim != 1:
        raise ValueError("an isotonic regression needs one weight per value")
    if not np.isfinite(values).all() or not (np.isfinite(weights) & (weights > 0)).all():
        raise ValueError("an isotonic regression needs finite values and positive, finite weights")
    if not len(values):
        return np.zeros(0)
    from scipy import optimize  # slow to import

    fitted: Floats = np.asarray(optimize.isotonic_regression(values, weights=weights).x, dtype=np.float64)
    return fitted


def case_one(anchors: Floats, below_counts: Counts, counts: Counts) -> Floats:
    """Return the maximum likelihood cdf at the anchors of Case I data.

    Parameters
    ----------
    anchors
        float64 array of shape (k,), increasing, no two equal.
    below_counts
        int64 array of shape (k,): how many of the rows asked at each anchor lie at it or below.
    counts
        int64 array of shape (k,): how many rows were asked there.

    Returns
    -------
    float64 array of shape (k,), non-decreasing within [0, 1]. At an anchor that asked nobody it is the value at the anchor
    before (0 before the first): the likelihood does not say, and mass is as far right as it may be.

    Raises
    ------
    ValueError
        If the anchors do not increase, shapes differ, counts are not 0 <= below_counts <= counts, or there are no answers.

    Notes
    -----
    Maximises Σ_j b_j log F(u_j) + (n_j - b_j) log(1 - F(u_j)) over all F: the isotonic regression of b_j / n_j with
    weights n_j does, exactly.

    References
    ----------
    Ayer, Brunk, Ewing, Reid and Silverman (1955), theorem 2.1; Groeneboom and Wellner, Information bounds and
    nonparametric maximum likelihood estimation (1992), proposition 1.2.
    """
    if not anchors.shape == below_counts.shape == counts.shape or anchors.ndim != 1:
        raise ValueError("there is one pair of counts per anchor")
    if np.isnan(anchors).any() or (np.diff(anchors) <= 0).any():
        raise ValueError("anchors increase, and no two are equal")
    if (below_counts < 0).any() or (below_counts > counts).any() or not counts.any():
        raise ValueError("of the rows asked at an anchor, at least one in all, none or more and at most all lie below")
    asked = counts > 0
    fitted = isotonic(below_counts[asked] / counts[asked], counts[asked].astype(np.float64))
    cdf: Floats = np.concatenate([[0.0], fitted])[np.cumsum(asked)]
    return cdf
