"""Estimates of the distribution of private values, from released ranges that contain them.

Everything here needs the released ranges alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Literal, NamedTuple

import numpy as np
import pandas as pd
from scipy import special

from dpdask.arrays import Ends, Floats, freeze_class
from dpdask.errors import SpecError
from dpdask.kernels import turnbull
from dpdask.stats.ranges import RangeCounts, grid_of_ranges

Function = Callable[[Floats], Floats]
Place = Literal["right", "middle"]

_NEGLIGIBLE = 1e-9  # a mass that rounding alone may have left


@freeze_class
class RangeEstimate:
    """A number estimated from ranges, and its standard error."""

    value: float
    standard_error: float

    def interval(self, confidence: float = 0.95) -> Ends:
        """Return the normal confidence interval."""
        half = float(special.ndtri(0.5 + confidence / 2)) * self.standard_error
        return self.value - half, self.value + half


@freeze_class(eq=False, repr=False)
class NPMLE:
    """The nonparametric maximum likelihood estimate of a distribution: masses in disjoint intervals.

    Attributes
    ----------
    knots
        float64 array of shape (K,): the grid that the ranges were counted on.
    left, right
        float64 arrays of shape (m,): the ends of the intervals that hold mass; equal where it is a
        knot. Where in an interval its mass sits, no range tells.
    points
        float64 array of shape (m,): where this estimate puts it, as `place` says; inf if that is
        not known.
    masses
        float64 array of shape (m,): positive, of sum 1.
    place
        "right": at the intervals' right ends, so that the cdf jumps at anchors only. "middle": at
        their middles.
    duality_gap
        The certificate: no distribution's log-likelihood per row is higher by more.
    n_iterations
        Newton steps.
    log_likelihood
        In nats, of all rows.
    n_rows
        How many rows were counted.
    ambiguity
        Σ mass × width of its interval / width of the line's known part: by how much the mean may
        move, in this unit, for a distribution of equal likelihood. An open-ended interval counts as
        the whole.
    drift
        By how much at most a stretch of the cdf may be shifted as a whole at equal likelihood; 0
        unless rings occur. Rings alone never tell the two ends of the line apart, so it is then the
        mass outside all anchors.
    """

    knots: Floats
    left: Floats
    right: Floats
    points: Floats
    masses: Floats
    place: Place
    duality_gap: float
    n_iterations: int
    log_likelihood: float
    n_rows: int
    ambiguity: float
    drift: float

    def __repr__(self) -> str:
        return f"NPMLE({len(self.masses):,} intervals, {self.n_rows:,} rows, ambiguity {self.ambiguity:.2g})"

    def cdf(self, x: Floats | float) -> Floats:
        """Return Pr(Y <= x), float64 of x's shape; it is determined where no interval has x inside, for either `place`."""
        cumulative = np.concatenate([[0.0], np.minimum(np.cumsum(self.masses), 1.0)])
        cumulative[-1] = 1.0
        return cumulative[np.searchsorted(self.points, x, side="right")]

    def quantile(self, q: Floats | float) -> Floats:
        """Return the smallest point with a cdf of at least q, float64 of q's shape; inf if it lies where no range tells.

        Raises
        ------
        SpecError
            If q is not within 0 to 1.
        """
        wanted = np.asarray(q, float)
        if not ((wanted >= 0) & (wanted <= 1)).all():
            raise SpecError(
                "a quantile's probability lies within 0 to 1",
                "quantile",
                "give fractions, not percentages",
            )
        # a sum may miss q by its rounding
        position = np.searchsorted(np.cumsum(self.masses), wanted - 1e-12, side="left")
        return self.points[np.minimum(position, len(self.points) - 1)]

    def functional(self, phi: Function) -> float:
        """Return ∫ φ dF, for a vectorised φ.

        Raises
        ------
        SpecError
            If φ is not finite somewhere that mass sits: for one, mass beyond the last anchor, for
            φ(y) = y.
        """
        values = np.asarray(phi(self.points), float)
        counted = (self.masses > _NEGLIGIBLE) | np.isfinite(values)
        if values.shape != self.points.shape or not np.isfinite(values[counted]).all():
            raise SpecError(
                "the functional is not finite, or not one number, at each point with mass: some mass may lie beyond the outermost anchors",
                "functional",
                "give the public bounds of the values (support=...), or a bounded functional",
            )
        return float(self.masses[counted] @ values[counted])

    def moment(self, k: int) -> float:
        """Return E[Y^k]; SpecError if k is negative or as for `functional`."""
        if k < 0:
            raise SpecError(
                "the order of a moment must be at least 0",
                "moment",
                "use functional for negative powers",
            )
        return self.functional(lambda y: y**k)

    def plot_data(self) -> pd.DataFrame:
        """Return a row per interval with mass: left, right, point, mass, and the cdf before and after it.

        Between two rows the cdf is known to be flat; within a row's interval it rises from `before`
        to `after`, who knows where.
        """
        after = np.cumsum(self.masses)
        columns = (self.left, self.right, self.points, self.masses, after - self.masses, after)
        names = ("left", "right", "point", "mass", "before", "after")
        return pd.DataFrame(dict(zip(names, columns, strict=True)))


def npmle(
    counts: RangeCounts,
    *,
    support: Ends | None = None,
    place: Place = "right",
    tolerance: float = 1e-8,
    max_ambiguity: float = 0.1,
) -> NPMLE:
    """Return the distribution under which the released ranges are most likely.

    Parameters
    ----------
    counts
        The released ranges, counted on a grid.
    support
        Public bounds that no value lies outside of: where mass in an open-ended interval ends.
        None: unknown.
    place
        Where in its interval mass is put; see `NPMLE`. "middle" halves what a coarse grid moves a
        mean by, and needs bounds at both sides.
    tolerance
        The duality gap to reach, at most 1e-6. The default leaves the likelihood of 10 million rows
        0.1 nats short, at most.
    max_ambiguity
        The most that the ranges may leave open; see `NPMLE.ambiguity` and `NPMLE.drift`. 1 accepts
        everything.

    Raises
    ------
    SpecError
        If there are no rows; if no range says anything; if more is ambiguous, or may drift, than
        allowed; if the grid is too fine; if a parameter is out of range.

    Notes
    -----
    Consistent as the mechanism's anchors reach everywhere that values do (the paper's resolvability
    and monotonicity). The cdf at a point converges at rate n^{-1/3}, smooth functionals at
    n^{-1/2}. What a grid's rounding does is said at `RangeCounts`.

    References
    ----------
    Ding and Ding, Interval privacy (2022), equation 7, example 1 and theorem 7; Turnbull 1976.
    """
    if not counts.n_rows:
        raise SpecError("there are no rows", "npmle", "count at least one released range")
    if not 0 < tolerance <= 1e-6 or not 0 <= max_ambiguity <= 1 or place not in ("right", "middle"):
        raise SpecError(
            "the tolerance must lie in (0, 1e-6], the ambiguity in [0, 1], and the place must be right or middle",
            "npmle",
            "leave out what you need not change",
        )
    bounds = (-math.inf, math.inf) if support is None else support
    if not bounds[0] <= counts.knots[0] or not bounds[1] >= counts.knots[-1]:
        hint = "widen them to the outermost anchors, or leave them out"
        raise SpecError("the bounds do not enclose the grid", "support", hint)
    solution = _solve(counts, tolerance)
    kept = solution.masses > 0
    left, right = counts.bounds(solution.first[kept], solution.last[kept])
    left, right = np.maximum(left, bounds[0]), np.minimum(right, bounds[1])
    masses = solution.masses[kept]
    ambiguity = _ambiguity(left, right, masses, bounds, counts)
    if solution.drift > max_ambiguity:
        raise SpecError(
            f"distributions whose cdfs differ by {solution.drift:.2g} make the ranges equally likely; up to {max_ambiguity:.2g} was allowed",
            "npmle",
            "use rings whose gaps reach every place, or ranges with one open end, or allow more (max_ambiguity=...)",
        )
    if ambiguity > max_ambiguity + tolerance:  # a sum of masses, which is 1 up to rounding
        raise SpecError(
            f"the ranges do not determine where the mass lies, by {ambiguity:.2g} of the line's width; up to {max_ambiguity:.2g} was allowed",
            "npmle",
            "use a mechanism whose anchors reach everywhere that values do, a finer grid, bounds (support=...), or allow more (max_ambiguity=...)",
        )
    points = right
    if place == "middle":  # infinite where an interval is open-ended
        ends_known = np.isfinite(left) & np.isfinite(right)
        unbounded = np.where(np.isfinite(left), right, left)
        points = np.where(ends_known, left / 2 + right / 2, unbounded)
    return NPMLE(
        knots=counts.knots,
        left=left,
        right=right,
        points=points,
        masses=masses,
        place=place,
        duality_gap=solution.duality_gap,
        n_iterations=solution.n_iterations,
        log_likelihood=solution.log_likelihood,
        n_rows=counts.n_rows,
        ambiguity=ambiguity,
        drift=solution.drift,
    )


def _solve(counts: RangeCounts, tolerance: float) -> turnbull.Solution:
    try:
        solution = turnbull.npmle(
            counts.left, counts.right, counts.counts, counts.n_cells, tolerance=tolerance
        )
    except ValueError as error:
        hint = (
            "release ranges that do not contain every value, and count at most a few thousand knots"
        )
        raise SpecError(str(error), "npmle", hint) from None
    if solution.duality_gap > 1e-6:
        raise SpecError(
            f"the likelihood could not be maximised: its duality gap stayed at {solution.duality_gap:.1e}",
            "npmle",
            "use a coarser grid",
        )
    return solution


def _ambiguity(
    left: Floats, right: Floats, masses: Floats, bounds: Ends, counts: RangeCounts
) -> float:
    """Return Σ mass × relative width of its interval; the unit is the bounds' distance, or else that of the outermost knots."""
    low, high = (
        bound if math.isfinite(bound) else float(knot)
        for bound, knot in zip(bounds, counts.knots[[0, -1]], strict=True)
    )
    width = right - left
    relative = np.where(
        np.isfinite(width), np.divide(width, high - low) if high > low else 0.0, 1.0
    )
    return float(masses @ relative)


def bootstrap(
    counts: RangeCounts,
    functional: Callable[[NPMLE], float],
    n_boot: int = 200,
    *,
    rng: np.random.Generator,
    support: Ends | None = None,
    place: Place = "right",
    max_ambiguity: float = 0.1,
) -> RangeEstimate:
    """Return a functional of the estimate with its standard error over drawing rows from a population and asking them.

    Parameters
    ----------
    counts, support, place, max_ambiguity
        As for `npmle`.
    functional
        From an estimate to a number: `lambda f: f.moment(1)`.
    n_boot
        How many times to resample, at least 2. Each solves a likelihood as large as the first.
    rng
        The randomness of the resampling.

    Raises
    ------
    SpecError
        If n_boot is below 2; as for `npmle` and the functional, of any resample.

    Notes
    -----
    The counts of n rows are a multinomial draw; they are drawn again with the observed shares.
    Right for smooth functionals (moments, means of smooth φ), which have rate n^{-1/2}. For the cdf
    at a point or a quantile, of rate n^{-1/3}, this bootstrap is not consistent (Kosorok 2008; Sen,
    Banerjee and Woodroofe 2010).
    """
    if n_boot < 2:
        raise SpecError(
            "a standard error needs at least 2 resamples", "n_boot", "leave it out for 200"
        )
    whole = npmle(counts, support=support, place=place, max_ambiguity=max_ambiguity)
    value = functional(whole)
    shares = counts.counts / counts.n_rows
    values = []
    for _ in range(n_boot):
        drawn = rng.multinomial(counts.n_rows, shares)
        seen = drawn > 0
        sample = replace(counts, keys=counts.keys[seen], counts=drawn[seen].astype(np.int64))
        again = npmle(sample, support=support, place=place, tolerance=1e-7, max_ambiguity=1.0)
        values.append(functional(again))
    return RangeEstimate(value=value, standard_error=float(np.std(values, ddof=1)))


def average(
    counts: RangeCounts, estimate: NPMLE, phi: Function, tolerance: float = 1e-8
) -> RangeEstimate:
    """Return the mean of a smooth φ under an estimate, and its standard error by the information of the ranges.

    Parameters
    ----------
    counts
        What was counted.
    estimate
        Its NPMLE.
    phi
        φ, finite at all points.
    tolerance
        As for `npmle`.

    Notes
    -----
    With the intervals that hold mass taken as given, a smooth functional has the influence of a
    multinomial likelihood; its error is that of the sandwich (Huang, Efficient estimation for the
    proportional hazards model with interval censoring, 1996).
    """
    values = np.asarray(phi(estimate.points), float)
    solution = _solve(counts, tolerance)
    kept = solution.masses > 0
    error = turnbull.deviation(
        counts.left,
        counts.right,
        counts.counts,
        (solution.first[kept], solution.last[kept], solution.masses[kept]),
        values,
    )
    return RangeEstimate(value=float(estimate.masses @ values), standard_error=error)


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


def count_ranges(
    lower: Floats, upper: Floats, n_knots: int = 300, *, bounds: Ends | None = None
) -> RangeCounts:
    """Return the counts of released ranges on a grid of their ends: quantiles of them, and more where the likeliest distribution has its mass.

    No value lies outside of `bounds`. With them, the outermost ends are left out if ranges are
    rounded: rounding gives them ranges of one side alone, by which all mass would lie before
    the last anchor, where it begins to be unknown.

    Raises
    ------
    DataError, SpecError
        As for `grid_of_ranges` and `npmle`.

    Notes
    -----
    Quantiles alone put all knots where the anchors are. If the anchors are spread over far more
    than the values, nearly all mass then lies before the first knot. So a distribution is fitted,
    and cells are made smaller inside each interval that holds more than a twentieth of the mass and
    is wider than a twentieth of what nearly all of it lies in; again, until there are no ends in
    such intervals. A knot has the ranges below it from the cell before, and those above it from the
    cell behind. So from one cell to the next the number of ends grows by a tenth at most, by which
    a cdf F moves by F (1 - F) / 10 at most.
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
        size = (len(ends) - 1) / (n_knots - 1)
        knots = _place_knots(ends, size, fine, trim=bounds is not None)
        counts = RangeCounts.of_batch(knots, lower, upper)
    return counts


def _find_crowded(counts: RangeCounts, ends: Floats, bounds: Ends | None) -> list[_Stretch]:
    """Return the ends inside the intervals that hold much mass and are wide, and how many of them a cell should hold.

    Where an interval has no knot at one side, its ends must reach over half of it. Elsewhere its
    mass may lie beyond all anchors, and finer knots, with few ranges beyond the last of them, would
    draw it before them.
    """
    estimate = npmle(counts, tolerance=1e-6, max_ambiguity=1.0)
    low, high = (counts.knots[0], counts.knots[-1]) if bounds is None else bounds
    left = np.maximum(estimate.left, min(low, ends[0]))
    right = np.minimum(estimate.right, max(high, ends[-1]))
    before, behind = np.searchsorted(np.cumsum(estimate.masses), [_OUTSIDE, 1.0 - _OUTSIDE])
    is_wide = right - left > _WIDE * (right[behind] - left[before])
    found = []
    for place in np.flatnonzero((estimate.masses > _CROWDED) & is_wide):
        first = int(np.searchsorted(ends, left[place], side="right"))
        last = int(np.searchsorted(ends, right[place])) - 1
        half = (right[place] - left[place]) / 2.0
        if first > last or (np.isinf(estimate.left[place]) and ends[first] - left[place] > half):
            continue
        if np.isinf(estimate.right[place]) and right[place] - ends[last] > half:
            continue
        size = max(1.0, (last + 1 - first) / np.ceil(_KNOTS * estimate.masses[place]))
        found.append(_Stretch(first, last, size))
    return found


def _place_knots(ends: Floats, size: float, fine: list[_Stretch], *, trim: bool) -> Floats:
    """Return knots with `size` ends between them, and fewer in and around the stretches that are to be fine."""

    def find_size(rank: float) -> float:
        return min(
            size,
            *(each.size + _GROWTH * max(each.first - rank, rank - each.last, 0.0) for each in fine),
        )

    last = len(ends) - 1
    rank, ranks = find_size(0.0) if trim else 0.0, []
    while rank < last:
        ranks.append(rank)
        rank += find_size(rank)
    kept = [each for each in ranks if each <= last - find_size(last)] if trim else [*ranks, last]
    return np.unique(ends[np.rint(kept or ranks[:1]).astype(np.int64)])
