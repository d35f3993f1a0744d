"""Quick search among sorted numbers: an index of equal steps that tells in which few of them to look."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dpdask.kernels.jit import jit

Floats = NDArray[np.float64]
Indices = NDArray[np.int32]


class Guide(NamedTuple):
    """An index of sorted knots, for quick search.

    Attributes
    ----------
    starts
        int32 array of shape (n_buckets + 1,): how many knots lie in the buckets before each one.
    middle, scale
        The centre of the knots and one over their spread, by which a number finds its bucket.
    """

    starts: Indices
    middle: float
    scale: float


def guide(knots: Floats) -> Guide:
    """Return the guide of sorted knots, with as many buckets as there are knots.

    Notes
    -----
    Buckets are equal steps of t / (1 + |t|), where t is the distance from the median in halves of the interquartile
    range: about equally full for bell-shaped and for heavy-tailed knots. A knot and a number find their buckets by the
    same monotone function, so a bucket never misleads, however its arithmetic rounds.
    """
    n = len(knots)
    spread = float(knots[3 * n // 4] / 2 - knots[n // 4] / 2)
    middle, scale = float(knots[n // 2]), 1.0 / min(max(spread, 1e-300), 1e300)
    return Guide(_starts(knots, middle, scale), middle, scale)


@jit
def _bucket(value: float, n_buckets: int, middle: float, scale: float) -> int:
    """Return the bucket of a number; every step rounds monotonically."""
    t = (value - middle) * scale
    share = 2.0 - 1.0 / (1.0 + t) if t >= 0.0 else 1.0 / (1.0 - t)
    return min(int(share * (n_buckets / 2.0)), n_buckets - 1)


@jit
def _starts(knots: Floats, middle: float, scale: float) -> Indices:
    n_buckets = len(knots)
    starts = np.zeros(n_buckets + 1, dtype=np.int32)
    for knot in knots:
        starts[_bucket(knot, n_buckets, middle, scale) + 1] += 1
    for bucket in range(n_buckets):
        starts[bucket + 1] += starts[bucket]
    return starts


@jit
def first_knot(value: float, knots: Floats, guide: Guide) -> int:
    """Return the index of the first knot that is not below `value`.

    Parameters
    ----------
    value
        The value to find.
    knots
        float64 array, non-decreasing.
    guide
        The guide of the knots, as `guide` returns it.
    """
    bucket = _bucket(value, len(knots), guide.middle, guide.scale)
    low, high = guide.starts[bucket], guide.starts[bucket + 1]
    while low < high:
        middle = (low + high) >> 1
        if knots[middle] < value:
            low = middle + 1
        else:
            high = middle
    return int(low)
