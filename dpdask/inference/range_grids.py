"""Grids for released ranges: as fine as their ends are, and finer where their distribution has its mass."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dpdask.inference.range_estimates import npmle
from dpdask.stats.ranges import RangeCounts, grid_of_ranges

Floats = NDArray[np.float64]

_ROUNDS = 4
_CROWDED = 0.05  # of the mass, in one interval between two knots
_WIDE = 0.05  # of the width of the intervals between which nearly all mass lies
_OUTSIDE = 0.05  # of the mass, at each side
_KNOTS = 100  # for all mass, in a round
_GROWTH = 0.1  # of the number of ends in a cell, from one to the next


class _Stretch(NamedTuple):
    """Where cells are to be fine: the ends with the ranks first ... last, of which each cell holds `size`."""

    first: int
    last: int
    size: float


def count_ranges(lower: Floats, upper: Floats, n_knots: int = 300, *, bounds: tuple[float, float] | None = None) -> RangeCounts:
    """Return the counts of released ranges on a grid of their ends: quantiles of them, and more where the likeliest distribution has its mass.

    Parameters
    ----------
    lower, upper
        As for `RangeCounts.of_batch`.
    n_knots
        How many quantiles, at least 2.
    bounds
        Public bounds that no value lies outside of. With them, the outermost ends are left out if ranges are rounded: rounding gives them
        ranges of one side alone, by which all mass would lie before the last anchor, where it begins to be unknown.

    Raises
    ------
    DataError, SpecError
        As for `grid_of_ranges` and `npmle`.

    Notes
    -----
    Quantiles alone put all knots where the anchors are. If the anchors are spread over far more than the values, nearly all mass then lies
    before the first knot. So a distribution is fitted, and cells are made smaller inside each interval that holds more than a twentieth of the mass
    and is wider than a twentieth of what nearly all of it lies in; again, until there are no ends in such intervals. A knot has the ranges below it
    from the cell before, and those above it from the cell behind. So from one cell to the next the number of ends grows by a tenth at most, by
    which a cdf F moves by F (1 - F) / 10 at most.
    """
    grid = grid_of_ranges(lower, upper, n_knots)
    counts = RangeCounts.of_batch(grid, lower, upper)
    if not counts.n_rounded:
        return counts
    if bounds is not None:
        counts = RangeCounts.of_batch(grid[1:-1], lower, upper)
    ends = np.concatenate([lower[lower != upper], upper])
    ends = np.sort(ends[np.isfinite(ends)])
    fine: list[_Stretch] = []
    for _ in range(_ROUNDS):
        found = _find_crowded(counts, ends, bounds)
        if not found:
            break
        fine += found
        counts = RangeCounts.of_batch(_place_knots(ends, (len(ends) - 1) / (n_knots - 1), fine, trim=bounds is not None), lower, upper)
    return counts


def _find_crowded(counts: RangeCounts, ends: Floats, bounds: tuple[float, float] | None) -> list[_Stretch]:
    """Return the ends inside the intervals that hold much mass and are wide, and how many of them a cell should hold.

    Where an interval has no knot at one side, its ends must reach over half of it. Elsewhere its mass may lie beyond all anchors, and finer knots,
    with few ranges beyond the last of them, would draw it before them.
    """
    estimate = npmle(counts, tolerance=1e-6, max_ambiguity=1.0)
    low, high = (counts.knots[0], counts.knots[-1]) if bounds is None else bounds
    left, right = np.maximum(estimate.left, min(low, ends[0])), np.minimum(estimate.right, max(high, ends[-1]))
    outer = np.searchsorted(np.cumsum(estimate.masses), [_OUTSIDE, 1.0 - _OUTSIDE])
    crowded = (estimate.masses > _CROWDED) & (right - left > _WIDE * (right[outer[1]] - left[outer[0]]))
    found = []
    for place in np.flatnonzero(crowded):
        first, last = np.searchsorted(ends, left[place], side="right"), np.searchsorted(ends, right[place], side="left") - 1
        half = (right[place] - left[place]) / 2.0
        if first > last or (np.isinf(estimate.left[place]) and ends[first] - left[place] > half):
            continue
        if np.isinf(estimate.right[place]) and right[place] - ends[last] > half:
            continue
        found.append(_Stretch(int(first), int(last), max(1.0, (last + 1 - first) / np.ceil(_KNOTS * estimate.masses[place]))))
    return found


def _place_knots(ends: Floats, size: float, fine: list[_Stretch], *, trim: bool) -> Floats:
    """Return knots with `size` ends between them, and fewer in and around the stretches that are to be fine."""

    def find_size(rank: float) -> float:
        return min(size, *(each.size + _GROWTH * max(each.first - rank, rank - each.last, 0.0) for each in fine))

    last = len(ends) - 1
    rank, ranks = find_size(0.0) if trim else 0.0, []
    while rank < last:
        ranks.append(rank)
        rank += find_size(rank)
    kept = [each for each in ranks if each <= last - find_size(last)] if trim else [*ranks, last]
    return np.unique(ends[np.rint(kept or ranks[:1]).astype(np.int64)])
