"""Counts of released ranges on a public grid: a sufficient statistic for a distribution's likelihood, of bounded size."""

from __future__ import annotations

from typing import Self

import numpy as np

from dpdask.arrays import Flags, Floats, Ints, freeze_class
from dpdask.errors import DataError, SpecError

Counts = Ints

MAX_KNOTS = 2**30
"""Above this the pair of cells of a range has no int64 key."""


def check_grid(knots: Floats) -> Floats:
    """Return the knots as a float64 array."""
    grid = np.asarray(knots, dtype=np.float64)
    if (
        grid.ndim != 1
        or not 1 <= len(grid) <= MAX_KNOTS
        or not np.isfinite(grid).all()
        or (np.diff(grid) <= 0).any()
    ):
        raise SpecError(
            "a grid is made of finite knots, at least one, each above the one before",
            "grid",
            "sort the knots and drop repeated ones",
        )
    return grid


def grid_of_ranges(lower: Floats, upper: Floats, n_knots: int = 1000) -> Floats:
    """Return knots at the finite ends of released ranges, or at quantiles of them where there are more than n_knots.

    Released ranges are public, so the knots are. A sample of them will do for a grid, but then the
    largest and smallest end may be missed; ends beyond the outermost knots are rounded to infinity.
    """
    if n_knots < 2:
        raise SpecError("a grid of ranges has at least 2 knots", "n_knots", "leave it out for 1000")
    lower, upper = _check_ranges(lower, upper)
    exact = lower == upper
    ends = np.concatenate([lower[~exact], upper])
    ends = np.sort(ends[np.isfinite(ends)])
    knots = np.unique(ends)
    if len(knots) > n_knots:
        places = np.linspace(0, len(ends) - 1, n_knots)
        knots = np.unique(ends[np.rint(places).astype(np.int64)])
    if not len(knots):
        raise SpecError(
            "no range has a finite end, so the ranges carry no information",
            "grid",
            "release ranges of a mechanism that asks something",
        )
    return check_grid(knots)


# Dask logs the arguments of a task that failed
@freeze_class(eq=False, repr=False)
class RangeCounts:
    """How many rows have each range of grid cells: exact, sparse, and as large as the number of different ranges.

    Privacy: counts of released ranges are public; counts of other ranges would be private.

    Notes
    -----
    K knots t_0 < ... < t_{K-1} cut the line into 2K + 1 cells: cell 2j + 1 is the knot {t_j}, cell
    2j the open interval (t_{j-1}, t_j), with t_{-1} = -inf and t_K = inf. A range is the cells from
    `left` to `right`, both included; if left > right it is a ring: the cells from 0 to right and
    those from left to 2K.

    Rounding is outward: an end that is no knot moves to the next knot that makes the range larger,
    and an exact value that is no knot becomes the interval that it lies in. The range still
    contains its value, so the count stays true. Ranges at the two sides of one anchor then overlap,
    which biases a cdf by about |F - 1/2| times the share of values between two neighbouring knots:
    keep that well below n^{-1/2}, or draw the anchors from the grid. `n_rounded` tells how many
    rows it concerns.
    """

    knots: Floats
    """float64 of shape (K,): the grid."""
    keys: Counts
    """int64 of shape (c,), increasing: left * (2K + 1) + right of each range that occurs."""
    counts: Counts
    """int64 of shape (c,), positive: how many rows have it."""
    n_rounded: int
    """How many rows have a range that was enlarged."""

    @classmethod
    def identity(cls, grid: Floats) -> Self:
        """Return the counts of no rows; SpecError if the grid is invalid (see `check_grid`)."""
        return cls(
            knots=check_grid(grid),
            keys=np.zeros(0, dtype=np.int64),
            counts=np.zeros(0, dtype=np.int64),
            n_rounded=0,
        )

    @classmethod
    def of_batch(cls, grid: Floats, lower: Floats, upper: Floats) -> Self:
        """Return the counts of a batch of ranges.

        Parameters
        ----------
        lower, upper
            float64 arrays of shape (n,). lower < upper: the range (lower, upper], where lower may
            be -inf and upper inf. lower == upper: the exact value. lower > upper: the ring (-inf,
            upper] ∪ (lower, inf). (-inf, inf) says nothing, and is counted; a ring whose two ends
            meet is written so too, not as lower == upper.
        """
        knots = check_grid(grid)
        lower, upper = _check_ranges(lower, upper)
        left, right, rounded = _cells(knots, lower, upper)
        keys, counts = np.unique(left * (2 * len(knots) + 1) + right, return_counts=True)
        return cls(
            knots=knots, keys=keys, counts=counts.astype(np.int64), n_rounded=int(rounded.sum())
        )

    def merge(self, *others: Self) -> Self:
        """Return the counts of all rows together; ValueError if the grids differ."""
        parts = (self, *others)
        if not all(np.array_equal(part.knots, self.knots) for part in others):
            raise ValueError("ranges on different grids cannot be merged")
        keys, inverse = np.unique(
            np.concatenate([part.keys for part in parts]), return_inverse=True
        )
        counts = np.zeros(len(keys), dtype=np.int64)
        # whole numbers: no order matters
        np.add.at(counts, inverse, np.concatenate([part.counts for part in parts]))
        return type(self)(
            knots=self.knots,
            keys=keys,
            counts=counts,
            n_rounded=sum(part.n_rounded for part in parts),
        )

    @property
    def n_rows(self) -> int:
        """How many rows were counted."""
        return int(self.counts.sum())

    @property
    def n_cells(self) -> int:
        """How many cells the grid has: 2K + 1."""
        return 2 * len(self.knots) + 1

    @property
    def left(self) -> Counts:
        """The first cell of each range that occurs, int64 of shape (c,)."""
        return self.keys // self.n_cells

    @property
    def right(self) -> Counts:
        """The last cell of each range that occurs, int64 of shape (c,)."""
        return self.keys % self.n_cells

    def bounds(self, first: Counts, last: Counts) -> tuple[Floats, Floats]:
        """Return the ends of the sets of cells first ... last (first <= last): their infimum and supremum, float64.

        Parameters
        ----------
        first, last
            int64 arrays of equal shape: the ends of each set of cells.
        """
        padded = np.concatenate([[-np.inf], self.knots, [np.inf]])
        return padded[(first + 1) // 2], padded[last // 2 + 1]


def _check_ranges(lower: Floats, upper: Floats) -> tuple[Floats, Floats]:
    lower, upper = np.asarray(lower, dtype=np.float64), np.asarray(upper, dtype=np.float64)
    if lower.shape != upper.shape or lower.ndim != 1:
        raise DataError(
            "there is one lower and one upper end per row",
            "ranges",
            "pass two columns of one frame",
        )
    if np.isnan(lower).any() or np.isnan(upper).any():
        raise DataError(
            "an end of a range is missing", "ranges", "write -inf and inf where a range is open"
        )
    if (lower == np.inf).any() or (upper == -np.inf).any():
        raise DataError(
            "a range is empty: its lower end is inf, or its upper end -inf",
            "ranges",
            "write -inf below and inf above",
        )
    return lower, upper


def _cells(knots: Floats, lower: Floats, upper: Floats) -> tuple[Counts, Counts, Flags]:
    """Return the first and last cell of each range, rounded outward, and whether it was enlarged."""
    size = len(knots)
    # the knot before it is the largest that is not above
    below = np.searchsorted(knots, lower, side="right")
    above = np.searchsorted(knots, upper, side="left")
    padded = np.concatenate([[-np.inf], knots, [np.inf]])
    left, right = 2 * below, np.minimum(2 * above + 1, 2 * size)
    rounded = (padded[below] != lower) | (padded[above + 1] != upper)
    exact = lower == upper
    met = padded[above + 1] == upper
    left[exact] = right[exact] = 2 * above[exact] + met[exact]
    rounded[exact] = ~met[exact]
    # the two halves of a ring that was enlarged touch
    everything = (lower > upper) & (left <= right + 1)
    left[everything], right[everything] = 0, 2 * size
    return left.astype(np.int64), right.astype(np.int64), rounded
