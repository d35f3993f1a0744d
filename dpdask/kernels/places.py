"""Where inside their cells the numbers of a record lie: normal scores, each in the range of its cell, that depend on each other.

The arithmetic is additions, multiplications and divisions in a fixed order, so that a task that
runs twice draws the same values on every machine.
"""

from __future__ import annotations

import numpy as np

from dpdask.arrays import Codes, Floats, Ints, Uint32s, Words
from dpdask.kernels.jit import jit

REACH = 8.0  # scores are between -8 and 8
_STEPS = 128  # of the table of Φ, for each unit
_FAR = 1e-10  # a range of less probability is far from the mean of its score
_PART = 6.0  # so far out, a normal falls off by e within a sixth of its deviation
_GUIDES = 2**12
_LOW_BITS = np.uint64(2**53 - 1)  # of a word; the highest four decide something else
_BITS = 5  # of a place that tell its bin
_SCALE = 2.0**32


def _tabulate() -> Floats:
    """Return Φ at the points of the table, by Simpson's rule."""
    points = np.arange(-2 * int(REACH) * _STEPS, 2 * int(REACH) * _STEPS + 1) / (2.0 * _STEPS)
    exponent = points * points * (-0.5 / 64.0)
    density = np.ones_like(points)
    for k in range(16, 0, -1):
        density = 1.0 + exponent * density / k
    for _ in range(6):
        density = density * density
    density *= 0.3989422804014327  # 1 / √(2π)
    pieces = (density[:-2:2] + 4.0 * density[1::2] + density[2::2]) / (6.0 * _STEPS)
    sums = np.concatenate([[0.0], np.cumsum(pieces)])
    return np.asarray(sums / sums[-1], dtype=np.float64)


_TABLE = _tabulate()
# behind which point of the table each multiple of 1 / _GUIDES of Φ lies, and the last point
_GUIDE = np.minimum(
    np.searchsorted(_TABLE, np.arange(_GUIDES + 1) / _GUIDES, side="right") - 1, len(_TABLE) - 2
)


@jit
def normal_cdf(x: float) -> float:
    """Return Φ(x), on a line between the points of a table; 0 or 1 beyond it."""
    if x <= -REACH:
        return 0.0
    if x >= REACH:
        return 1.0
    place = (x + REACH) * _STEPS
    before = int(place)
    return float(_TABLE[before] + (place - before) * (_TABLE[before + 1] - _TABLE[before]))


@jit
def normal_score(p: float) -> float:
    """Return the x at which `normal_cdf` is p, for p in [0, 1]."""
    bucket = min(int(p * _GUIDES), _GUIDES - 1)
    first, last = _GUIDE[bucket], _GUIDE[bucket + 1] + 1
    while last - first > 1:
        middle = (first + last) >> 1
        if _TABLE[middle] <= p:
            first = middle
        else:
            last = middle
    rise = _TABLE[last] - _TABLE[first]
    share = np.divide(p - _TABLE[first], rise) if rise > 0.0 else 0.5
    return float((first + share) * (1.0 / _STEPS) - REACH)


@jit
def _draw_truncated(
    mean: float, precision: float, low: float, high: float, uniform: float
) -> float:
    """Return a normal number between two ends; `precision` is 1 / its deviation."""
    a, b = (low - mean) * precision, (high - mean) * precision
    below, above = normal_cdf(a), normal_cdf(b)
    if above - below > _FAR:
        x = mean + np.divide(normal_score(below + uniform * (above - below)), precision)
    else:  # the end that is nearer to the mean
        near = min(high - low, np.divide(1.0 / _PART, precision))
        x = low + uniform * near if a > 0.0 else high - uniform * near
    return float(min(max(x, low), high))


@jit
def draw_places(
    codes: Codes,
    starts: Ints,
    lows: Floats,
    highs: Floats,
    partners: Ints,
    weights: Floats,
    deviations: Floats,
    words: Words,
    out: Uint32s,
) -> None:
    """Write the place of each record's score in its range, as a share of 2**32 of the range's probability.

    Parameters
    ----------
    codes
        Array of shape (n_columns, n): the cell of each record in each column.
    starts
        int64 array of shape (n_columns,): where the ranges of a column begin in `lows` and `highs`.
    lows, highs
        float64 arrays: the range of each cell's score.
    partners, weights
        Arrays of shape (n_columns, n_partners): on which columns a column's score depends, and its
        regression on their scores.
    deviations
        float64 array of shape (n_columns,): what the regression leaves over.
    words
        uint64 array of shape (n, n_columns): uniform.
    out
        uint32 array of shape (n_columns, n).

    Notes
    -----
    Every score is drawn in its range alone, from 16 values of equal probability. Then one after the
    other is drawn again, given the others (a sweep of Gibbs sampling); first those that may be
    anywhere, as those of nulls, because they told the others nothing but noise.
    """
    n_columns, n = codes.shape
    n_cells, n_partners = len(lows), partners.shape[1]
    belows, widths = np.zeros(n_cells), np.zeros(n_cells)
    alone = np.zeros((n_cells, 16))
    for cell in range(n_cells):
        belows[cell] = normal_cdf(lows[cell])
        widths[cell] = normal_cdf(highs[cell]) - belows[cell]
        for part in range(16):
            alone[cell, part] = normal_score(belows[cell] + (part + 0.5) / 16.0 * widths[cell])
    scores, cells = np.zeros(n_columns), np.zeros(n_columns, np.int64)
    for row in range(n):
        n_free = 0
        for column in range(n_columns):
            cell = starts[column] + np.int64(codes[column, row])
            cells[column] = cell
            scores[column] = alone[cell, words[row, column] >> np.uint64(60)]
            n_free += lows[cell] <= -REACH and highs[cell] >= REACH
        for turn in range(0 if n_free > 0 else 1, 2):
            for column in range(n_columns):
                cell = cells[column]
                low, high = lows[cell], highs[cell]
                if n_free > 0 and (low <= -REACH and high >= REACH) != (turn == 0):
                    continue
                mean = 0.0
                for k in range(n_partners):
                    mean += weights[column, k] * scores[partners[column, k]]
                uniform = float(words[row, column] & _LOW_BITS) * 2.0**-53
                precision = np.divide(1.0, deviations[column])
                scores[column] = _draw_truncated(mean, precision, low, high, uniform)
        for column in range(n_columns):
            cell = cells[column]
            share = np.divide(normal_cdf(scores[column]) - belows[cell], widths[cell])
            share = 0.5 if not widths[cell] > 0.0 else min(max(share, 0.0), 1.0)
            out[column, row] = np.uint32(min(share * _SCALE, _SCALE - 1.0))


@jit
def spread_evenly(codes: Codes, n_cells: int, places: Uint32s, n_counted: int) -> None:
    """Stretch the places in each cell of a column, in their order, until 32 bins of them have equally many.

    Parameters
    ----------
    codes, places
        Arrays of shape (n,): the cell of each record, and its place, which is changed.
    n_counted
        How many records are counted in the bins; further ones are stretched as these are.
    """
    counts = np.zeros((n_cells, 2**_BITS), np.int64)
    shift = np.uint32(32 - _BITS)
    for row in range(n_counted):
        counts[codes[row], places[row] >> shift] += 1
    before = np.zeros((n_cells, 2**_BITS + 1))
    for cell in range(n_cells):
        for part in range(2**_BITS):
            before[cell, part + 1] = before[cell, part] + counts[cell, part]
    for row in range(len(codes)):
        own, bin_ = np.int64(codes[row]), np.int64(places[row] >> shift)
        if before[own, 2**_BITS] == 0.0:
            continue
        inside = (float(places[row]) - bin_ * 2.0 ** (32 - _BITS)) / 2.0 ** (32 - _BITS)
        share = (before[own, bin_] + inside * counts[own, bin_]) / before[own, 2**_BITS]
        places[row] = np.uint32(min(share * _SCALE, _SCALE - 1.0))
