"""Random ranges around values: anchors drawn by tabulated quantiles, and the range between anchors that a value lies in.

Comparisons are made on the very doubles that are released, so a range contains its value whatever a
table's error. Only sums, products and comparisons are used, so every machine draws the same anchors
from the same words and table.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dpdask.arrays import Flags, Floats, Words
from dpdask.kernels.jit import jit
from dpdask.kernels.rank import UNIT, first_knot, guide, uniforms

N_CELLS = 2**14
TABLE_ERROR = 1.0 / N_CELLS
_N_TAIL = 40  # knots 2**-54 .. 2**-15: down to the smallest probability that a word can stand for


class Quantiles(NamedTuple):
    """A distribution on the line by its quantiles; it is uniform between two knots."""

    x: Floats  # float64 array, non-decreasing and finite: the quantiles
    p: Floats  # float64 array of the same shape: `LEVELS`, or [0, 1] for a uniform distribution


class Steps(NamedTuple):
    """Bounds on a cdf: for x[i-1] < u <= x[i], `low[i] <= F(u) <= high[i]`."""

    x: Floats
    low: Floats  # float64 arrays of shape (n + 1,), non-decreasing, in [0, 1]
    high: Floats


class Acceptable(NamedTuple):
    """Where the exact value is released."""

    low: Floats  # float64 arrays of shape (k,): the intervals (low, high]
    high: Floats
    # Bool array of shape (n_anchors + 1,): the ranges, counted from the left, whose values are
    # released.
    ranges: Flags


_TAIL = 2.0 ** -np.arange(_N_TAIL + 14, 14, -1)
LEVELS: Floats = np.concatenate([_TAIL, np.arange(1, N_CELLS) / N_CELLS, 1.0 - _TAIL[1:][::-1]])


def partition(
    values: Floats,
    words: Words,
    distribution: Quantiles,
    centres: Floats,
    acceptable: Acceptable,
    *,
    spacing: float,
    ring: bool,
    lattice: bool,
) -> tuple[Floats, Floats]:
    """Return the range (lower, upper] between random anchors in which each value lies.

    Parameters
    ----------
    spacing
        0 for independent anchors; otherwise neighbouring anchors, and the ends of the line, are at
        least so far apart in the distribution's own probability: at most 1 / n_ranges.
    ring
        Whether the two outer ranges are one: released as lower > upper, the union of (-inf, upper]
        and (lower, inf).
    lattice
        Whether values are whole numbers; then anchors are rounded down, which moves no whole number
        to another range.

    Returns
    -------
    lower, upper
        float64 arrays of shape (n,); -inf and inf at open ends.

    Notes
    -----
    Spaced anchors have the ranks i s + (1 - m s) V₍ᵢ₎ of sorted uniform V; on a ring of two, V₁ and
    V₁ + s + (1 - 2 s) V₂ modulo 1.
    """
    drawn = _draw(words, distribution, centres, spacing, ring, lattice)
    return _locate(values, drawn, acceptable, ring)


def anchors(
    words: Words,
    distribution: Quantiles,
    centres: Floats,
    *,
    spacing: float,
    ring: bool,
    lattice: bool,
) -> Floats:
    """Return each row's anchors, sorted: those between which `partition` finds a value's range from the same words."""
    return np.sort(_draw(words, distribution, centres, spacing, ring, lattice), axis=1)


def _draw(
    words: Words,
    distribution: Quantiles,
    centres: Floats,
    spacing: float,
    ring: bool,
    lattice: bool,
) -> Floats:
    """Return each row's anchors, in any order."""
    drawn = uniforms(words)
    _place(drawn, distribution, centres, spacing, ring, lattice)
    return drawn


def intersect(first: tuple[Floats, Floats], second: tuple[Floats, Floats]) -> tuple[Floats, Floats]:
    """Return the intersection of two ranges of each value; neither may be a ring's outer range.

    An exact value stays exact: it is its own lower and upper end, and the other range holds it.
    """
    return np.maximum(first[0], second[0]), np.minimum(first[1], second[1])


@jit
def at_least(lower: Floats, upper: Floats, cdf: Steps) -> Floats:
    """Return a lower bound on the probability of each range (lower, upper], a ring's outer one (lower > upper) included."""
    x, cdf_low, cdf_high = cdf
    inside, at = np.zeros(len(lower)), guide(x)
    for row in range(len(lower)):
        low, high = lower[row], upper[row]
        if low != high:
            bottom = 0.0 if low == -np.inf else cdf_high[first_knot(low, x, at)]
            top = 1.0 if high == np.inf else cdf_low[first_knot(high, x, at)]
            inside[row] = top - bottom + (1.0 if low > high else 0.0)
    return inside


@jit
def _share(word: np.uint64) -> float:
    """Return a number in (0, 1]."""
    return (float(word >> np.uint64(11)) + 0.5) * UNIT


@jit
def _quantile(share: float, distribution: Quantiles) -> float:
    x, p = distribution
    if len(x) == 2:  # uniform: one multiplication
        return float(x[0] + min(share, 1.0) * (x[1] - x[0]))
    place = share * N_CELLS
    cell = int(place)
    if 0 < cell < N_CELLS - 1:  # a power of two: exact, and no division
        i, place = _N_TAIL - 1 + cell, place - cell
    else:
        i = min(max(int(np.searchsorted(p, share, side="right")) - 1, 0), len(p) - 2)
        place = min((share - p[i]) / (p[i + 1] - p[i]), 1.0)
    return float(min(x[i] + place * (x[i + 1] - x[i]), x[i + 1]))


@jit
def _place(
    shares: Floats,
    distribution: Quantiles,
    centres: Floats,
    spacing: float,
    ring: bool,
    lattice: bool,
) -> None:
    """Turn each row's independent shares into anchors whose shares are at least `spacing` apart.

    Passes over all rows, not a function called for each: it would cost more than what it does.
    """
    n_rows, n = shares.shape
    for row in range(n_rows if spacing > 0.0 else 0):
        if ring:
            shares[row, 1] = (
                shares[row, 0] + spacing + (1.0 - 2.0 * spacing) * shares[row, 1]
            ) % 1.0
            continue
        for i in range(1, n):  # few anchors: insertion
            j, moved = i, shares[row, i]
            while j > 0 and shares[row, j - 1] > moved:
                shares[row, j] = shares[row, j - 1]
                j -= 1
            shares[row, j] = moved
        for i in range(n):
            shares[row, i] = (i + 1) * spacing + (1.0 - (n + 1) * spacing) * shares[row, i]
    x = distribution.x
    if len(x) == 2:  # uniform: one multiplication
        start, width = x[0], x[1] - x[0]
        for row in range(n_rows):
            for i in range(n):
                shares[row, i] = centres[i] + (start + min(shares[row, i], 1.0) * width)
    else:
        for row in range(n_rows):
            for i in range(n):
                shares[row, i] = centres[i] + _quantile(shares[row, i], distribution)
    if lattice:
        for row in range(n_rows):
            for i in range(n):
                shares[row, i] = np.floor(shares[row, i])


@jit
def _locate(
    values: Floats, anchors: Floats, acceptable: Acceptable, ring: bool
) -> tuple[Floats, Floats]:
    """Return the range between each row's anchors in which its value lies."""
    lower, upper = np.empty(len(values)), np.empty(len(values))
    for row in range(len(values)):
        value = values[row]
        low, high, position = -np.inf, np.inf, 0
        for i in range(anchors.shape[1]):
            anchor = anchors[row, i]
            is_below = anchor < value
            # selects, not branches: which one is a coin toss
            low = max(low, anchor if is_below else -np.inf)
            high = min(high, np.inf if is_below else anchor)
            position += is_below
        if ring and position != 1:
            low, high = max(anchors[row, 0], anchors[row, 1]), min(anchors[row, 0], anchors[row, 1])
            # nothing lies between: the outer range is the whole line, and must not look like a value
            if low == high:
                low, high = -np.inf, np.inf
        exact = acceptable.ranges[position]
        for i in range(len(acceptable.low)):
            exact = exact or (acceptable.low[i] < value and value <= acceptable.high[i])
        lower[row] = value if exact else low
        upper[row] = value if exact else high
    return lower, upper


@jit
def narrow(
    values: Floats,
    words: Words,
    distribution: Quantiles,
    tau: Quantiles,
    cdf: Steps,
    either: bool,
    lattice: bool,
) -> tuple[Floats, Floats]:
    """Return the range (lower, upper] to which rounds of halving by random anchors narrow each value down.

    Parameters
    ----------
    words
        uint64 array of shape (n, 1 + n_rounds), uniform and independent.
    distribution
        The distribution of the anchors: in each round, restricted to the range so far.
    tau
        The distribution of the coverage below which a row's range may not fall.
    cdf
        The reference by which coverage is measured; doubt counts as a lack of coverage.
    either
        Whether a row stops when either of the two next ranges would fall below its tau; otherwise,
        when its own would.
    """
    x, cdf_low, cdf_high = cdf
    lower, upper, at = np.empty(len(values)), np.empty(len(values)), guide(x)
    for row in range(len(values)):
        value, least_coverage = values[row], _quantile(_share(words[row, 0]), tau)
        low, high, first, last = -np.inf, np.inf, 0.0, 1.0  # the range, and its ends' ranks
        # of the reference's cdf: at most `least` at low, at least `most` at high
        least, most = (
            0.0,
            1.0,
        )
        for turn in range(1, words.shape[1]):
            rank = first + _share(words[row, turn]) * (last - first)
            anchor = _quantile(rank, distribution)
            anchor = np.floor(anchor) if lattice else anchor
            if not low < anchor < high:
                break
            cell = first_knot(anchor, x, at)
            left, right = cdf_low[cell] - least, most - cdf_high[cell]
            goes_left = value <= anchor
            own = left if goes_left else right
            if (min(left, right) if either else own) < least_coverage:
                break
            if goes_left:
                high, last, most = anchor, rank, cdf_low[cell]
            else:
                low, first, least = anchor, rank, cdf_high[cell]
        lower[row], upper[row] = low, high
    return lower, upper
