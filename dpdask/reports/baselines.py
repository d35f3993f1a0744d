"""What simple answers to the same queries would miss: independence and Laplace noise. CONFIDENTIAL: read from private rows, never to be published.

These are measuring sticks for `dpdask.reports.utility`, not releases: no-cor has no noise at all, and the noise of Lap is a
floating-point one from an ordinary generator, which protects nobody.

References
----------
Asghar, Ding, Rakotoarivelo, Mrabet and Kaafar, Differentially private release of high-dimensional datasets using the
Gaussian copula (2019), table 1: "no-cor" and "Lap".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations

import numpy as np
from numpy.random import Generator

from dpdask.reports.utility import Codes, Counts, Floats, check_queries, one_way_counts


def independent_two_way(codes: Codes, sizes: Sequence[int]) -> Floats:
    """Return the two-way counts if attributes were independent (no-cor), in the order of `two_way_counts`; confidential: reads private rows.

    Parameters
    ----------
    codes
        Integer array of shape (m, n): row a holds the codes 0 .. s_a - 1 of attribute a.
    sizes
        How many levels each attribute has, s_1 .. s_m.

    Returns
    -------
    float64 array of shape (Σ_{a<b} s_a s_b,): n times the product of the two frequencies.

    Raises
    ------
    ValueError
        If the table is not such a matrix, or a code is outside its attribute's levels.
    """
    frequencies = np.split(_frequencies(codes, sizes), np.cumsum(sizes)[:-1])
    tables = [np.outer(first, second).ravel() for first, second in combinations(frequencies, 2)]
    answers: Floats = np.concatenate([np.zeros(0), *tables]) * codes.shape[1]
    return answers


def independent_three_way(codes: Codes, sizes: Sequence[int], queries: Counts) -> Floats:
    """Return the counts of three-way conjunctions if attributes were independent (no-cor); confidential: reads private rows.

    Parameters
    ----------
    codes, sizes
        As of `independent_two_way`.
    queries
        int64 array of shape (q, 3): dummies, as `three_way_queries` draws them.

    Returns
    -------
    float64 array of shape (q,): n times the product of the three frequencies.

    Raises
    ------
    ValueError
        As of `independent_two_way` and of `check_queries`.
    """
    check_queries(queries, sizes)
    answers: Floats = _frequencies(codes, sizes)[queries].prod(axis=1) * codes.shape[1]
    return answers


def laplace_answers(true_counts: Counts, *, scale: float, clip: bool = True, rng: Generator) -> Floats:
    """Return counts with independent Laplace noise (Lap), for a comparison only: they stay confidential.

    Parameters
    ----------
    true_counts
        Integer array of any shape.
    scale
        The noise's scale, its mean absolute value, in rows; positive and finite. The caller knows the privacy it stands
        for: a table at ε needs 1/ε if neighbours differ by one row more, 2/ε if one row is replaced.
    clip
        Whether negative answers become 0, as in the paper (its algorithms 1 and 2).
    rng
        Draws the noise.

    Returns
    -------
    float64 array of the counts' shape.

    Raises
    ------
    ValueError
        If the scale is not positive and finite.
    """
    if not 0 < scale < math.inf:
        raise ValueError("Laplace noise needs a positive, finite scale")
    noisy: Floats = true_counts + rng.laplace(scale=scale, size=true_counts.shape)
    return np.maximum(noisy, 0.0) if clip else noisy


def _frequencies(codes: Codes, sizes: Sequence[int]) -> Floats:
    frequencies: Floats = one_way_counts(codes, sizes) / codes.shape[1]
    return frequencies
