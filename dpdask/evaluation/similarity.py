"""Scores of how alike two tables are, as SDMetrics defines them, with standard errors. CONFIDENTIAL where one table is private.

Each score lies within 0 to 1, and 1 is alike. Standard errors are those of drawing both tables' rows, by the delta method at the
estimated shares.

References
----------
SDMetrics (DataCebo), documentation of KSComplement, TVComplement, CorrelationSimilarity and ContingencySimilarity; of its quality report
for pairs of a number and a category, where the number is cut into 10 ranges of equal width over the real column.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]
Codes: TypeAlias = NDArray[np.int64]

N_RANGES = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """A score within 0 to 1 and its standard error; confidential where it was measured on private rows."""

    value: float
    standard_error: float


def ks_complement(real: Floats, other: Floats) -> Score | None:
    """Return 1 minus the Kolmogorov-Smirnov distance of two columns of numbers, nulls left out; None if one has no value.

    Parameters
    ----------
    real, other
        float64 arrays of shapes (n,) and (m,); NaN is null.
    """
    real, other = np.sort(real[~np.isnan(real)]), np.sort(other[~np.isnan(other)])
    if not len(real) or not len(other):
        return None
    points = np.concatenate([real, other])
    f, g = (np.searchsorted(column, points, side="right") / len(column) for column in (real, other))
    at = int(np.argmax(np.abs(f - g)))
    error = math.sqrt(f[at] * (1.0 - f[at]) / len(real) + g[at] * (1.0 - g[at]) / len(other))
    return Score(value=1.0 - float(abs(f[at] - g[at])), standard_error=error)


def tv_complement(real: Codes, other: Codes, size: int) -> Score:
    """Return 1 minus the total variation distance of two columns of categories, null being one of them.

    Parameters
    ----------
    real, other
        int64 arrays of codes 0 .. size - 1.
    size
        How many categories there are.
    """
    return _compare_counts(np.bincount(real, minlength=size), np.bincount(other, minlength=size))


def contingency_similarity(real: tuple[Codes, Codes], other: tuple[Codes, Codes], sizes: tuple[int, int]) -> Score:
    """Return 1 minus the total variation distance of two tables of a pair of categories.

    Parameters
    ----------
    real, other
        The codes of both columns.
    sizes
        How many categories each has.
    """
    tables = (np.bincount(one * sizes[1] + two, minlength=sizes[0] * sizes[1]) for one, two in (real, other))
    return _compare_counts(*tables)


def correlation_similarity(real: tuple[Floats, Floats], other: tuple[Floats, Floats]) -> Score | None:
    """Return 1 minus half the difference of Pearson's correlations; None if a column does not vary.

    Parameters
    ----------
    real, other
        Both columns; rows with a null are left out.
    """
    found = [_correlate(one, two) for one, two in (real, other)]
    if found[0] is None or found[1] is None:
        return None
    (r, error), (s, error_s) = found[0], found[1]
    return Score(value=1.0 - abs(r - s) / 2.0, standard_error=math.hypot(error, error_s) / 2.0)


def cut_ranges(real: Floats, other: Floats) -> tuple[Codes, Codes]:
    """Return the codes of two columns of numbers cut into 10 ranges of equal width over the first; 0 below it, 11 at its end, 12 null.

    A first column without 10 different ranges, such as one of a single value, has as many as it has: 0 is below it, 12 null.

    Parameters
    ----------
    real, other
        float64 arrays; NaN is null.
    """
    known = real[np.isfinite(real)]
    low, high = (float(known.min()), float(known.max())) if len(known) else (0.0, 0.0)
    edges = np.unique(np.linspace(low, high, N_RANGES + 1)) if low < high else np.array([low, np.nextafter(low, np.inf)])
    first, second = (np.where(np.isnan(column), N_RANGES + 2, np.digitize(column, edges)).astype(np.int64) for column in (real, other))
    return first, second


def _compare_counts(real: Codes, other: Codes) -> Score:
    p, q = real / max(real.sum(), 1), other / max(other.sum(), 1)
    sign = np.sign(p - q)
    variance = sum((share @ sign**2 - (share @ sign) ** 2) / max(counts.sum(), 1) for share, counts in ((p, real), (q, other)))
    return Score(value=1.0 - float(np.abs(p - q).sum()) / 2.0, standard_error=math.sqrt(max(float(variance), 0.0)) / 2.0)


def _correlate(one: Floats, two: Floats) -> tuple[float, float] | None:
    """Return Pearson's correlation and its standard error for normal columns; None if a column does not vary."""
    here = ~(np.isnan(one) | np.isnan(two))
    one, two = one[here], two[here]
    if len(one) < 3 or one.min() == one.max() or two.min() == two.max():
        return None
    r = float(np.corrcoef(one, two)[0, 1])
    return r, (1.0 - r * r) / math.sqrt(len(one) - 1)
