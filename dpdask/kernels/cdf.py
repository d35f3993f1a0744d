"""A continualised cdf read both ways: the ranks that a value stands for, and the value at a rank."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from dpdask.kernels.guide import Guide, first_knot
from dpdask.kernels.jit import jit

Floats = NDArray[np.float64]


@jit
def rank_interval(value: float, x: Floats, c: Floats, guide: Guide, lattice: bool) -> tuple[float, float]:
    """Return the interval of ranks that a value stands for under the continualised cdf (x, c).

    An atom stands for its jump; a whole number v of a lattice for (C(v-1), C(v)]; another number that is a knot for the
    linear piece that ends there; and any other for the single rank C(value).

    Parameters
    ----------
    value
        The value to find.
    x, c
        The knots of the cdf and its values there.
    guide
        The guide of x.
    lattice
        Whether values are whole numbers.
    """
    left = first_knot(value, x, guide)
    right = left
    while right < len(x) and x[right] == value:
        right += 1
    if right - left > 1:
        return c[left], c[right - 1]
    high = c[left] if right > left else _between(value, left, x, c)
    if lattice:
        return _below_lattice(value, left, x, c), high
    if right > left and left > 0:
        return c[left - 1], high
    return high, high


@jit
def _below_lattice(value: float, left: int, x: Floats, c: Floats) -> float:
    """Return C(value - 1) on a lattice; `left` is the first knot not below `value`, and no knot lies strictly in between."""
    known = left > 0 and x[left - 1] == value - 1.0
    return float(c[left - 1]) if known else _between(value - 1.0, left, x, c)


@jit
def _between(value: float, right: int, x: Floats, c: Floats) -> float:
    """Return C(value) for a value that is no knot; `right` is the first knot above it."""
    if right == 0:
        return float(c[0])
    if right == len(x):
        return float(c[-1])
    share = (value / 2 - x[right - 1] / 2) / (x[right] / 2 - x[right - 1] / 2)  # halved: knots may be the largest floats
    return float(c[right - 1] + (c[right] - c[right - 1]) * share)


@jit
def value_at(rank: float, x: Floats, c: Floats, guide: Guide, lattice: bool) -> float:
    """Return the inverse of the continualised cdf at a rank in (c[0], 1], as a whole number for a lattice.

    For the parameters see `rank_interval`; `guide` is that of c.
    """
    k = min(max(first_knot(rank, c, guide), 1), len(c) - 1)
    width = c[k] - c[k - 1]
    share = min(max((rank - c[k - 1]) / width, 0.0), 1.0) if width > 0 else 1.0
    if lattice:  # whole steps are added to a whole number: no rounding, however large the numbers
        gap = x[k] - x[k - 1]
        return float(x[k - 1] + min(max(math.ceil(gap * share), 1.0), gap))
    half = (x[k] / 2 - x[k - 1] / 2) * share  # halved: the gap between the largest floats is no float
    return float(min((x[k - 1] + half) + half, x[k]))  # rounding must not pass the knot, which may be the column's bound


@jit
def values_at(ranks: Floats, x: Floats, c: Floats, guide: Guide, lattice: bool) -> tuple[Floats, NDArray[np.bool_]]:
    """Return the value at each rank, null below c[0]; for the parameters see `value_at`."""
    out = np.zeros(len(ranks), dtype=np.float64)
    is_null = ranks < c[0]
    for row in range(len(ranks)):
        if not is_null[row]:
            out[row] = value_at(ranks[row], x, c, guide, lattice)
    return out, is_null
