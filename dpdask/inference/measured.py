"""Linear estimates of a column from the noisy counts that were drawn of it: unbiased, with the exact variance of the noise.

Records and references follow a model of the counts, which empties what cannot be told from noise.
These estimates do not: they are weighted sums of the counts that fit all levels best.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dpdask.arrays import Ends, Flags, Floats, Pair, Triple, freeze_class
from dpdask.references.counts import LEVEL, NULL, SINGLE, WHOLE

NORMAL_95 = 1.959963984540054
FEW_ROWS = 20  # fewer can have one value by chance, and tell nothing of how much they vary
_SURE = 4.0  # standard deviations that a number of rows has at least to divide by it


@freeze_class(kw_only=False)
class Linear:
    """An estimate, its standard error (the draw of the rows and the noise), and the bound of its bias."""

    estimate: float
    standard_error: float
    bias_bound: float = 0.0


@dataclass(frozen=True, kw_only=True, eq=False)  # no slots: cached properties need a `__dict__`
class MeasuredColumn:
    """The noisy counts of one column: null and atoms, counted in each level, and the levels of the line.

    Cells are in the order: null and atoms (the single cells), then the last level of the line.

    Notes
    -----
    Least squares on a tree takes two passes. Upwards, a count is averaged with the sum of its
    children, by inverse variance; downwards, what a parent has more than its children is divided
    among them by their variances. With C the covariance of the found counts in units of the noise's
    variance, C w is what the same passes make of w as the counts of the last level alone, so the
    variance of w'x is σ² w'C w, exactly.

    References
    ----------
    Hay, Rastogi, Miklau and Suciu, Boosting the accuracy of differentially private histograms
    through consistency (2010).
    """

    # The first and the last value of each cell, of shape (n_cells,); NaN of null, and where no
    # value can be.
    low: Floats
    high: Floats
    is_null: Flags
    singles: Floats  # the mean count of each single cell over all levels
    # The counts of each level of the line; level d has side**(d + 1) of them.
    levels: Sequence[Floats]
    deviation: float  # the standard deviation of one count's noise
    n_rows: float | None  # None if it is not known: then the counts alone tell it
    is_whole: bool  # whether the values are whole numbers

    @classmethod
    def read(cls, rows: pa.Table, n_rows: float | None, n_levels: int | None = None) -> Self:
        """Return the counts of a column.

        Its rows are those of `references.counts.COUNTS`; `n_rows` is None if it is not
        public, `n_levels` if the column has none.

        Raises
        ------
        ValueError
            If the rows are not those of such a column.
        """
        if n_levels is not None and rows.num_rows != n_levels:
            raise ValueError("the counts are not those of the column's levels")
        level, kind = rows["level"].to_numpy(), np.array(rows["kind"].to_pylist())
        count = rows["count"].to_numpy().astype(float)
        depth = int(level.max())
        is_single = np.isin(kind, SINGLE)
        last = level == depth
        cells = np.concatenate([np.flatnonzero(last & part) for part in (is_single, ~is_single)])
        low, high = (rows[name].to_numpy().astype(float)[cells] for name in ("low", "high"))
        if LEVEL in kind:  # its place in the card's list
            low = high = np.arange(len(cells), dtype=float)
        [deviation] = set(rows["standard_deviation"].to_pylist())
        return cls(
            low=low,
            high=high,
            is_null=kind[cells] == NULL,
            singles=count[is_single].reshape(depth, -1).mean(axis=0),
            levels=[count[(level == each) & ~is_single] for each in range(1, depth + 1)],
            deviation=deviation,
            n_rows=n_rows,
            is_whole=bool((kind == WHOLE).any()),
        )

    # ---- least squares

    @property
    def _depth(self) -> int:
        return len(self.levels)

    @cached_property
    def is_possible(self) -> Flags:
        """Whether a cell may have rows."""
        return self.is_null | ~np.isnan(self.low)

    @property
    def is_single(self) -> Flags:
        """Whether a cell is null or an atom."""
        return np.arange(len(self.low)) < len(self.singles)

    @cached_property
    def _factors(self) -> tuple[Floats, ...]:
        """The variance of each level's averaged counts, as parts of the noise's variance."""
        shape = (len(self.levels[0]),) * self._depth
        found = [self.is_possible[len(self.singles) :].astype(float).reshape(shape)]
        for _ in self.levels[1:]:
            below = found[0].sum(axis=-1)
            found.insert(0, below / (1.0 + below))
        return tuple(found)

    @cached_property
    def _of_singles(self) -> Floats:
        return np.full(len(self.singles), 1.0 / self._depth)

    def _solve(self, singles: Floats, levels: Sequence[Floats], total: float | None) -> Floats:
        """Return the counts of the cells that fit counts of all levels best, and sum to the total if there is one."""
        parts = self._factors
        found = [level.reshape(part.shape) for level, part in zip(levels, parts, strict=True)]
        found[-1] = found[-1] * parts[-1]
        for place in range(self._depth - 2, -1, -1):
            below, summed = parts[place + 1].sum(axis=-1), found[place + 1].sum(axis=-1)
            own = np.where(below > 0.0, found[place], 0.0)
            found[place] = (own * below + summed) / (1.0 + below)
        line = found[0]
        if total is not None:
            rest = total - singles.sum() - line.sum()
            rest /= self._of_singles.sum() + parts[0].sum()
            singles, line = singles + self._of_singles * rest, line + parts[0] * rest
        for part, children in zip(parts[1:], found[1:], strict=True):
            below = part.sum(axis=-1)
            more = (line - children.sum(axis=-1)) / np.where(below > 0.0, below, 1.0)
            line = children + part * more[..., None]
        return np.concatenate([singles, line.ravel()])

    @cached_property
    def counts(self) -> Floats:
        """The count of each cell by least squares, float64 of shape (n_cells,); may be negative."""
        return self._solve(self.singles, self.levels, self.n_rows)

    @property
    def total(self) -> float:
        """The number of rows, or its estimate."""
        return float(self.counts.sum()) if self.n_rows is None else self.n_rows

    def variance(self, weights: Floats) -> float:
        """Return the variance that the noise gives a weighted sum of `counts`."""
        n = len(self.singles)
        levels = [np.zeros_like(level) for level in self.levels[:-1]]
        total = None if self.n_rows is None else 0.0
        pushed = self._solve(weights[:n] * self._of_singles, [*levels, weights[n:]], total)
        return self.deviation**2 * float(weights @ pushed)

    # ---- answers

    def count(self, weights: Floats) -> Ends:
        """Return the number of rows in some cells, and its standard error; weights are between 0 and 1."""
        number = float(weights @ self.counts)
        n = max(self.total, 1.0)
        share = min(max(number / n, 1.0 / n), 1.0 - 1.0 / n) if n > 2.0 else 0.5
        return number, math.sqrt(self.variance(weights) + self.draw_count(weights, n, share))

    def draw_sum(self, weights: Floats) -> float:
        """Return the variance that the draw of the rows gives a weighted sum of the counts, about 0."""
        return max(0.0, float(self.counts @ weights**2))

    def draw_count(self, weights: Floats, n: float, share: float) -> float:
        """Return the variance that the draw of n rows gives the number of those in some cells, which have a share of them."""
        del weights
        # a count of a table whose number of rows is not known is that of Poisson
        return n * share * (1.0 - share if self.n_rows is not None else 1.0)

    @property
    def draw_cells(self) -> Floats:
        """The variance that the draw of the rows gives the count of each cell, of at least one row."""
        share = np.clip(self.counts / max(self.total, 1.0), 0.0, 1.0)
        return np.maximum(self.total * share * (1.0 - share), 1.0)

    def draw_ranks(self, p: float, rows: float) -> Floats | float:
        """Return the variance that the draw of the rows gives the number of rows up to each of the cells in order, less p of all with a value."""
        return rows * p * (1.0 - p)

    def ratio(self, top: Floats, bottom: Floats) -> Ends:
        """Return the ratio of two weighted sums of the counts, and its standard error.

        By the delta method A / B has the variance of A - (A / B) B, over B²: of the noise, with the
        covariance of both sums, and of the draw of the rows. NaN where the sum below is less than
        four standard deviations of its noise.
        """
        below = float(bottom @ self.counts)
        if not below > _SURE * math.sqrt(self.variance(bottom)):
            return math.nan, math.nan  # mostly noise is below: the delta method does not hold
        value = float(top @ self.counts) / below
        weights = top - value * bottom
        return value, math.sqrt(self.variance(weights) + self.draw_sum(weights)) / below

    @cached_property
    def _has_value(self) -> Floats:
        return (self.is_possible & ~self.is_null).astype(float)

    def share(self, weights: Floats) -> Linear:
        """Return the share of the rows that are in some cells."""
        return Linear(*self.ratio(weights, self.is_possible.astype(float)))

    def mean_of(self, values: Floats) -> Linear:
        """Return the mean of a number that each cell has; NaN leaves its rows out."""
        known = self.is_possible & ~np.isnan(values)
        return Linear(*self.ratio(np.where(known, values, 0.0), known.astype(float)))

    def mean(self, within: Ends | None = None) -> Linear:
        """Return the mean of the rows with a value, each clipped to two numbers if they are given.

        A cell's rows count as its middle; the bound on the bias is the mean of half the widths.
        """
        ends = within or (-math.inf, math.inf)
        low, high = (np.clip(np.nan_to_num(each), *ends) for each in (self.low, self.high))
        middle, half = (low + high) / 2.0 * self._has_value, (high - low) / 2.0 * self._has_value
        found = self.ratio(middle, self._has_value)
        below = float(self._has_value @ self.counts)
        return Linear(*found, max(0.0, float(half @ self.counts)) / below)

    def mean_noise(self, centre: float) -> float:
        """Return the standard deviation that the noise gives the mean of rows that lie around a number: no estimate is in it, but for how many rows have a value."""
        middle = np.nan_to_num(self.low + self.high) / 2.0
        below = float(self._has_value @ self.counts)
        return math.sqrt(self.variance((middle - centre) * self._has_value)) / below

    def range_of(self, values: Floats | None = None) -> Ends:
        """Return the least and the greatest value of a row, or of the numbers of the cells."""
        ends = (self.low, self.high) if values is None else (values, values)
        here = (self._has_value > 0.0) if values is None else self.is_possible & ~np.isnan(values)
        return float(ends[0][here].min()), float(ends[1][here].max())

    def histogram(self, edges: Floats) -> tuple[list[Linear], Floats, Floats]:
        """Return how many rows lie in each range [edge, next edge), the last with its upper edge.

        The rows of a cell that an edge cuts lie evenly in it; the bound on the bias is for the
        worst place of them. Beside, the standard errors of the least and of the largest sum that
        their places allow: the noise of the whole cell is in the latter.
        """
        last = np.nextafter(edges[-1], np.inf)
        cuts = [self._below(edge) for edge in (*edges[:-1].tolist(), float(last))]
        found, errors = [], []
        for (one, least, most), (two, lower, upper) in pairwise(cuts):
            weights, largest, smallest = two - one, upper - least, np.maximum(lower - most, 0.0)
            bias = max(
                float(each @ self.counts) for each in (largest - weights, weights - smallest)
            )
            found.append(Linear(*self.count(weights), max(0.0, bias)))
            errors.append([self.count(each)[1] for each in (smallest, largest)])
        at_least, at_most = np.maximum(np.array(errors).T, [each.standard_error for each in found])
        return found, at_least, at_most

    def _below(self, edge: float) -> Triple:
        """Return which part of each cell's rows is below an edge, and the least and the most that may be."""
        low, high = self.low, self.high
        with np.errstate(invalid="ignore"):
            if self.is_whole:
                part = (math.ceil(edge) - low) / (high - low + 1.0)
            else:
                part = (edge - low) / np.where(high > low, high - low, 1.0)
            inside, before = (low < edge) & (edge <= high), (high < edge).astype(float)
        part = np.where(inside, np.clip(np.nan_to_num(part), 0.0, 1.0), before)
        return part, before, np.where(inside, 1.0, before)

    def quantile(self, p: float, deviations: float = NORMAL_95) -> tuple[float, float, float]:
        """Return a quantile of the rows with a value, and an interval: all x whose rank p may be.

        F(x) - p may be so many of its standard deviations, which are those of the noise of both
        counts and of the draw of the rows. F is made to rise: each rank is the middle of the
        largest before it and the least after it. Ends of the interval are those of cells. NaN where
        the rows with a value are fewer than four standard deviations of their noise.
        """
        first, last, variances = self._steps
        rows = float(self._has_value @ self.counts)
        if not rows > _SURE * math.sqrt(self._rows_vary):
            return (math.nan,) * 3
        ranks, own, shared = variances
        noise = np.maximum(own - 2.0 * p * shared + p * p * self._rows_vary, 0.0)
        spread = np.sqrt(noise + self.draw_ranks(p, rows))
        up_to = make_rising(ranks - p * rows)
        before = np.append(min(-p * rows, up_to[0]), up_to[:-1])
        place = min(int(np.searchsorted(up_to, 0.0)), len(last) - 1)
        rise = up_to[place] - before[place]
        part = min(1.0, max(0.0, -before[place] / rise)) if rise > 0.0 else 1.0
        value = float(first[place] + part * (last[place] - first[place]))
        if self.is_whole:
            value = min(float(math.ceil(value)), float(last[place]))
        # before the first cell, nothing is known better than in it
        reached = before <= deviations * np.append(spread[0], spread[:-1])
        lowest = int(np.argmax(up_to >= -deviations * spread))
        highest = len(last) - 1 - int(np.argmax(reached[::-1]))
        ends = float(first[min(lowest, place)]), float(last[max(highest, place)])
        return value, *ends

    @cached_property
    def _rows_vary(self) -> float:
        """The variance that the noise gives the number of rows with a value."""
        return self.variance(self._has_value)

    @cached_property
    def ordered(self) -> NDArray[np.intp]:
        """The cells of values in order."""
        n = len(self.singles)
        atoms = np.flatnonzero(~self.is_null[:n])
        line = np.flatnonzero(self.is_possible[n:])
        cells = np.concatenate([atoms, n + line])
        order = np.lexsort([np.append(np.zeros(len(atoms)), np.ones(len(line))), self.low[cells]])
        return cells[order]

    @cached_property
    def _steps(self) -> tuple[Floats, Floats, Triple]:
        """The first and the last values of the cells in order; of the rows up to each of them: the number, its variance, and its covariance with all rows with a value."""
        n, cells = len(self.singles), self.ordered
        # how many atoms, and which last place of the line, are at or before each
        n_atoms = np.cumsum(cells < n, dtype=np.intp)
        place = np.maximum.accumulate(np.where(cells < n, -1, cells - n))
        found = np.cumsum(self.counts[cells]), *self._vary(n_atoms, place)
        return self.low[cells], self.high[cells], found

    def _vary(self, n_atoms: NDArray[np.intp], place: NDArray[np.intp]) -> Pair:
        """Return the variance that the noise gives the sum of the first atoms and of the line up to a place, and its covariance with all rows with a value.

        Given the count of a block, its part up to a place is a · count, and varies by b around it;
        from each level to the one above, a and b follow from the variances of the children.
        """
        side = len(self.levels[0])
        a, b = np.ones(side**self._depth), np.zeros(side**self._depth)
        at = np.arange(side**self._depth)
        for part in reversed(self._factors[1:]):
            own, family = part.ravel()[at], part.reshape(-1, side)
            left = (np.cumsum(family, axis=1) - family).ravel()[at]
            every = family.sum(axis=1)[at // side]
            sums = left + a * own
            b = b + left + a * a * own - sums**2 / np.where(every > 0.0, every, 1.0)
            a, at = sums / np.where(every > 0.0, every, 1.0), at // side
        top = self._factors[0]
        sums, squares = (np.cumsum(top)[at] - (1.0 - each) * top[at] for each in (a, a * a))
        # nothing of the line is before an atom that is its lowest value
        sums, squares = (np.append(each, 0.0)[place] for each in (sums, squares + b))
        of_atoms = n_atoms / self._depth
        sums, squares = sums + of_atoms, squares + of_atoms
        nulls = self._of_singles[self.is_null[: len(self.singles)]].sum()
        every = self._of_singles.sum() + top.sum()
        if self.n_rows is None:
            return self.deviation**2 * squares, self.deviation**2 * sums
        return (
            self.deviation**2 * np.maximum(squares - sums**2 / every, 0.0),
            self.deviation**2 * sums * nulls / every,
        )


def make_rising(values: Floats) -> Floats:
    """Return the middle between the largest value so far and the smallest to come, which rises."""
    return (np.maximum.accumulate(values) + np.minimum.accumulate(values[::-1])[::-1]) / 2.0
