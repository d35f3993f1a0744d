"""Random ranges around values: anchors drawn by tabulated quantiles, and the range between anchors that a value lies in.

Comparisons are made on the very doubles that are released, so a range contains its value whatever a
table's error. Only sums, products and comparisons are used, so every machine draws the same anchors
from the same words and table.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dpdask.kernels.cdf import Guide, first_knot, guide
from dpdask.kernels.jit import Flags, Floats, Words, jit

N_CELLS = 2**14
TABLE_ERROR = 1.0 / N_CELLS
_N_TAIL = 40  # knots 2**-54 .. 2**-15: down to the smallest probability that a word can stand for
_UNIT = 1.0 / 9007199254740992.0  # 2**-53


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
    lower, upper = np.empty(len(values)), np.empty(len(values))
    drawn = _draw(words, distribution, centres, spacing, ring, lattice)
    _locate(values, drawn, acceptable.low, acceptable.high, acceptable.ranges, ring, lower, upper)
    return lower, upper


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
    drawn = _shares(words)
    if spacing > 0.0:
        _space(drawn, spacing, ring)
    _to_quantiles(drawn, distribution.x, distribution.p, centres, lattice)
    return drawn


def narrow(
    values: Floats,
    words: Words,
    distribution: Quantiles,
    tau: Quantiles,
    cdf: Steps,
    *,
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

    Returns
    -------
    lower, upper
        float64 arrays of shape (n,); -inf and inf at open ends.
    """
    lower, upper = np.empty(len(values)), np.empty(len(values))
    _narrow(
        values,
        words,
        distribution.x,
        distribution.p,
        tau.x,
        tau.p,
        cdf.x,
        guide(cdf.x),
        cdf.low,
        cdf.high,
        either,
        lattice,
        lower,
        upper,
    )
    return lower, upper


def intersect(first: tuple[Floats, Floats], second: tuple[Floats, Floats]) -> tuple[Floats, Floats]:
    """Return the intersection of two ranges of each value; neither may be a ring's outer range.

    An exact value stays exact: it is its own lower and upper end, and the other range holds it.
    """
    return np.maximum(first[0], second[0]), np.minimum(first[1], second[1])


def at_least(lower: Floats, upper: Floats, cdf: Steps) -> Floats:
    """Return a lower bound on the probability of each range (lower, upper], a ring's outer one (lower > upper) included."""
    inside = np.empty(len(lower))
    _at_least(lower, upper, cdf.x, guide(cdf.x), cdf.low, cdf.high, inside)
    return inside


@jit
def _at_least(
    lower: Floats, upper: Floats, x: Floats, at: Guide, low: Floats, high: Floats, inside: Floats
) -> None:
    for row in range(len(lower)):
        if lower[row] == upper[row]:
            inside[row] = 0.0
            continue
        bottom = 0.0 if lower[row] == -np.inf else high[first_knot(lower[row], x, at)]
        top = 1.0 if upper[row] == np.inf else low[first_knot(upper[row], x, at)]
        inside[row] = top - bottom + (1.0 if lower[row] > upper[row] else 0.0)


@jit
def _share(word: np.uint64) -> float:
    """Return a number in (0, 1]."""
    return (float(word >> np.uint64(11)) + 0.5) * _UNIT


@jit
def _quantile(share: float, x: Floats, p: Floats) -> float:
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
def _shares(words: Words) -> Floats:
    out = np.empty(words.shape)
    for row in range(words.shape[0]):
        for i in range(words.shape[1]):
            out[row, i] = _share(words[row, i])
    return out


@jit
def _space(shares: Floats, spacing: float, ring: bool) -> None:
    """Turn each row's independent shares into shares that are at least `spacing` apart."""
    n = shares.shape[1]
    for row in range(len(shares)):
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


@jit
def _to_quantiles(shares: Floats, x: Floats, p: Floats, centres: Floats, lattice: bool) -> None:
    """Turn shares into anchors. Passes over all rows, not a function called for each: it would cost more than what it does."""
    n_rows, n = shares.shape
    if len(x) == 2:  # uniform: one multiplication
        start, width = x[0], x[1] - x[0]
        for row in range(n_rows):
            for i in range(n):
                shares[row, i] = centres[i] + (start + min(shares[row, i], 1.0) * width)
    else:
        for row in range(n_rows):
            for i in range(n):
                shares[row, i] = centres[i] + _quantile(shares[row, i], x, p)
    if lattice:
        for row in range(n_rows):
            for i in range(n):
                shares[row, i] = np.floor(shares[row, i])


@jit
def _locate(
    values: Floats,
    anchors: Floats,
    accepted_low: Floats,
    accepted_high: Floats,
    accepted: Flags,
    ring: bool,
    lower: Floats,
    upper: Floats,
) -> None:
    """Write the range between each row's anchors in which its value lies."""
    for row in range(len(values)):
        value = values[row]
        low, high, position = -np.inf, np.inf, 0
        for i in range(anchors.shape[1]):
            anchor = anchors[row, i]
            is_below = anchor < value
            low = max(
                low, anchor if is_below else -np.inf
            )  # selects, not branches: which one is a coin toss
            high = min(high, np.inf if is_below else anchor)
            position += is_below
        if ring and position != 1:
            low, high = max(anchors[row, 0], anchors[row, 1]), min(anchors[row, 0], anchors[row, 1])
            if (
                low == high
            ):  # nothing lies between: the outer range is the whole line, and must not look like a value
                low, high = -np.inf, np.inf
        exact = accepted[position]
        for i in range(len(accepted_low)):
            exact = exact or (accepted_low[i] < value and value <= accepted_high[i])
        lower[row] = value if exact else low
        upper[row] = value if exact else high


@jit
def _narrow(
    values: Floats,
    words: Words,
    x: Floats,
    p: Floats,
    tau_x: Floats,
    tau_p: Floats,
    cdf_x: Floats,
    cdf_guide: Guide,
    cdf_low: Floats,
    cdf_high: Floats,
    either: bool,
    lattice: bool,
    lower: Floats,
    upper: Floats,
) -> None:
    for row in range(len(values)):
        value = values[row]
        tau = _quantile(_share(words[row, 0]), tau_x, tau_p)
        low, high, first, last = (
            -np.inf,
            np.inf,
            0.0,
            1.0,
        )  # the range, and the anchors' ranks at its ends
        least, most = (
            0.0,
            1.0,
        )  # bounds on the reference's cdf: at most `least` at low, at least `most` at high
        for turn in range(1, words.shape[1]):
            rank = first + _share(words[row, turn]) * (last - first)
            anchor = _quantile(rank, x, p)
            anchor = np.floor(anchor) if lattice else anchor
            if not low < anchor < high:
                break
            cell = first_knot(anchor, cdf_x, cdf_guide)
            left, right = cdf_low[cell] - least, most - cdf_high[cell]
            goes_left = value <= anchor
            if (min(left, right) if either else (left if goes_left else right)) < tau:
                break
            if goes_left:
                high, last, most = anchor, rank, cdf_low[cell]
            else:
                low, first, least = anchor, rank, cdf_high[cell]
        lower[row], upper[row] = low, high
