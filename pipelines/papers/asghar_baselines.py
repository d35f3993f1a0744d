"""Baseline errors: those of a table whose attributes are independent. CONFIDENTIAL: computed from private rows, never to be published.

These answers to the queries of `pipelines.papers.asghar_utility` have the exact one-way frequencies and no noise: they are not a release.

References
----------
Asghar, Ding, Rakotoarivelo, Mrabet and Kaafar, Differentially private release of high-dimensional datasets using the
Gaussian copula (2019), table 1: "no-cor".
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np

from pipelines.papers.asghar_utility import Codes, Counts, Floats, check_queries, one_way_counts


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


def _frequencies(codes: Codes, sizes: Sequence[int]) -> Floats:
    frequencies: Floats = one_way_counts(codes, sizes) / codes.shape[1]
    return frequencies
