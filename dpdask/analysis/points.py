"""Estimates from released records, cells or tables: weighted averages, and how far sampling and noise move them.

A weighted average moves by the average of its influence function. Drawing rows gives that a
variance in proportion to its spread over the points; noise in the counts gives it the sum of its
squares over the noisy cells, times the noise of one cell.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from itertools import combinations_with_replacement
from typing import Any

import numpy as np
import pandas as pd

from dpdask.analysis.measured import WITHOUT_NULLS, place_in_cells
from dpdask.analysis.results import MANY, NO_LINE, TABLES, Result
from dpdask.analysis.values import (
    DateScale,
    HeldOut,
    NoisyCells,
    find_levels,
    find_ranges,
    in_units,
    index_ranges,
    to_numbers,
    without_levels,
)
from dpdask.arrays import Ends, Flags, Floats, Pair, Triple, freeze_class
from dpdask.errors import SpecError
from dpdask.inference.m_estimators import WeightedSample, least_squares, quantile
from dpdask.inference.measured import MeasuredColumn
from dpdask.inference.placed import APART, UNRESOLVED, Axis, PlacedTable, count_points, find_line
from dpdask.inference.tallies import Codes, add_up

MODEL = "inside a cell, columns are assumed to depend on each other as in a normal copula; the bound on the bias allows for a weak dependence of another kind there, but is not proven"
NOT_TOLD = "a large part of the spread of a column lies inside one cell, or many of its rows at one place of it: the cells do not show how it depends on others, so no bound on the bias of a slope is known"
NO_VARIANCE = "the variance of the feature cannot be told from the noise"
OTHERS = "use other columns, or release with a larger epsilon"
_SPIKES = 0.25  # the share of the rows that stand out of the cells beside theirs
_VARIES = 4.0  # standard deviations of its noise that the variance of a feature has at least
WIDE = "the mean of a heavy tail cannot be estimated under wide bounds; use within=(low, high)"
_NOT_BY_GROUP = (
    "the cells do not tell how its numbers differ by group: the bound on the bias is larger than half of the means, and than half of the range that nine "
    "tenths of the rows lie in"
)
_USE_ALL = "use mean() of all rows, or mean(within=(low, high), by=…) with a narrow range"
LOOSE = "the bound on the bias is larger than half of the mean, and than half of the range that nine tenths of the rows lie in; use within=(low, high)"
_NO_GROUP = "groups whose rows cannot be told from the noise have no estimate"
_INSIDE = "an edge lies inside a cell, whose rows are taken to lie evenly in it; the bound on the bias is for any place of them; use edges of cells"
_RANKS = "the ranks of released values may be off, so no bound on the bias of a slope is known"
_SLOPE = "no bound on the bias of a slope is known: if most values of a column lie in a few ranges, it can be many times too small or too large"
_EQUAL = "groups whose released values are all equal have no standard error: a few rows do not tell how far values spread"
_SHARED = "all ranks within a standard error have this value, which many rows share: it has no standard error, but an interval by ranks"
_SURE = 2.0  # standard deviations that a group's share has at least to divide by it
_DELTA = 4.0  # and that it has at least for the delta method
_STILL = 1e-12  # of the numbers: values that differ by less differ by rounding alone
_POINT = "this is the point of a cell: only the bias bound tells how far off it is"


@freeze_class(eq=False)
class Points:
    """Released points with weights, and what their error is made of."""

    frame: pd.DataFrame  # the points, by column; a null is missing
    weights: Floats  # counts of rows, which may be negative
    n_rows: float  # of the table, or about
    is_counted: bool = field(default=True, kw_only=True)  # whether this number is exact
    # what the variance of one value is multiplied by: 1 / rows for a table of rows, more where
    # records were drawn once more
    sampling: float
    levels: Mapping[str, Sequence[object]]  # of each column that has levels
    # by column, the least and the greatest value that a point's rows may have, NaN of a null; no
    # column if points are the rows' values
    ends: Mapping[str, Pair] = field(default_factory=dict)
    # by column of cells, the fine counts of all rows, which tell where in a cell they lie
    fine: Mapping[str, MeasuredColumn] = field(default_factory=dict)
    # by column, how far the rank of a released value may be off
    rank_errors: Mapping[str, float] = field(default_factory=dict)
    bounds: Mapping[str, Ends] = field(default_factory=dict)
    # the noisy cells of some columns; None if no noise was added to counts
    noise: Callable[[Sequence[str]], NoisyCells] | None = None
    # how the draw of held-out rows moves averages of the column; None if all of it counts, as in
    # `sampling`
    held_out: HeldOut | None = None
    # by column of numbers, at most what standard deviation the noise of the counts gives the share
    # of a range, where its cells are not told
    rank_noise: Mapping[str, float] = field(default_factory=dict)
    # what share of the rows may be in cells that were left out, or counted where there are none
    lost: float = 0.0
    biased: bool = False  # by an amount that no bound is known of
    spread: bool = False  # values that many rows share lie over gaps, whose width is not known
    limits: tuple[str, ...] = ()
    dates: Mapping[str, DateScale] = field(default_factory=dict)  # of each column of dates

    def mean(
        self,
        name: str,
        by: str | None = None,
        values: Floats | None = None,
        within: Ends | None = None,
    ) -> Result:
        """Return the mean of a column, or its means in the groups of another one; rows without a value are left out.

        `values` has a number for each level, NaN to leave its rows out; others are clipped.
        """
        ends = within or (-math.inf, math.inf)
        placed, doubt, beyond = self.place(name, ends) if values is None else (None, 0.0, 0.0)

        def number(frame: pd.DataFrame) -> Floats:
            if values is None:
                return np.clip(to_numbers(frame[name], name), *ends)
            return values[find_levels(frame[name], self._levels_of(name), name)]

        def group(frame: pd.DataFrame) -> Codes:
            none = np.zeros(len(frame), dtype=np.int64)
            return none if by is None else find_levels(frame[by], groups, by)

        groups = self._levels_of(by) if by is not None else [None]
        n = len(groups)
        code, x = group(self.frame), number(self.frame) if placed is None else placed
        lean = self._lean(name, None if values is not None else by, x, ends, beyond)
        moved = lean[0]
        here = np.isfinite(x)
        x, code, weights = (x + moved)[here], code[here], self.weights[here] / self.weights.sum()
        cells = self._cells([name] if by is None else [name, by])
        with np.errstate(invalid="ignore", divide="ignore"):
            numbers, place = number(cells.frame), group(cells.frame)
            share = add_up(weights, code, n)
            # a group is told from the noise by the cells that its rows with a value may be in
            doubts = np.sqrt(cells.variance * cells.add(np.where(np.isnan(numbers), n, place), n))
            told = share > _SURE * doubts
            share = np.where(told, share, np.nan)
            mean = add_up(weights * x, code, n) / share
            spread = np.maximum(add_up(weights * (x - mean[code]) ** 2, code, n), 0.0)
            is_few = told & (share < _DELTA * doubts)
            noise = cells.variance * cells.add_squares(numbers, place, mean, is_few)
            noise += self._vary_places(name, weights, code, here, doubt, n)
            variance = (self._sample_known(here, x - mean[code]) * spread + noise) / share**2
            if name in self.rank_noise and len(x):
                # a mean is the integral of ranks over the released range
                variance = variance + (self.rank_noise[name] * np.ptp(x) / share) ** 2
            bias = self._bound(name, ends, weights, code, here, lean, n) / share
        if by is None and not told.any():
            what = "the rows with a value cannot be told from the noise"
            raise SpecError(what, f"column {name!r}", "release with a larger epsilon")
        error = np.sqrt(variance)
        still = error <= _STILL * np.abs(x).max(initial=0.0)
        is_number = values is None and name not in self.levels
        is_loose = is_number and not self.biased and self._is_loose(x, weights, mean, bias)
        if is_loose and by is not None:
            raise SpecError(_NOT_BY_GROUP, f"mean({name}, by={by})", _USE_ALL)
        is_wide = is_number and self.biased and within is None
        true = (not here.all(), still.any(), is_wide, is_loose, not told.all(), moved.any())
        said = itertools.compress((WITHOUT_NULLS, _EQUAL, WIDE, LOOSE, _NO_GROUP, MODEL), true)
        parts = (mean, np.where(still, np.nan, error), bias)
        index = pd.Index(groups, name=by) if by else None
        found = self._tell(name, parts, index, self._possible(name, values, within))
        return replace(found, limits=(*self.limits, *said))

    def _bound(
        self,
        name: str,
        ends: Ends,
        weights: Floats,
        code: Codes,
        here: Flags,
        lean: tuple[Floats, Floats, Floats | float],
        n: int,
    ) -> Floats:
        """Return how far the sums of n groups may be off: half of what the model moves, what is beyond it, and what another dependence inside cells would move."""
        moved, shift, apart = lean
        half = np.abs(add_up(weights * moved[here], code, n)) / 2.0
        beyond = add_up(np.abs(weights) * shift[here], code, n)
        # an error of ranks, and rows beyond the kept ones, move that part of the bounds' distance
        if rank_error := self.rank_errors.get(name, 0.0):
            low, high = np.clip(self.bounds.get(name, (0.0, math.inf)), *ends)
            beyond += (rank_error + self.lost) * (high - low)
        other: Floats = np.sqrt(self._vary_places(name, weights, code, here, apart, n))
        return beyond + half + other

    def _vary_places(
        self,
        name: str,
        weights: Floats,
        code: Codes,
        here: Flags,
        doubt: Floats | float,
        n: int,
    ) -> Floats | float:
        """Return the variance of the sums of n groups by the errors of places: the points of a cell have one."""
        if isinstance(doubt, float):
            return doubt
        _, cell = np.unique(self.ends[name][0][here], return_inverse=True)
        n_cells = int(cell.max(initial=0)) + 1
        sums = add_up(weights * doubt[here], code * n_cells + cell, n * n_cells)
        return (sums.reshape(n, n_cells) ** 2).sum(axis=1)

    def _lean(
        self,
        name: str,
        by: str | None,
        x: Floats,
        ends: Ends,
        beyond: Floats | float,
    ) -> tuple[Floats, Floats, Floats | float]:
        """Return how far rows are in the mean from their point, which has the number x, how much further they may be, and how much in one direction or the other by chance."""
        if by is not None and name in self.ends and not self.biased:
            found = self._lean_inside(name, by, ends, beyond)
            if found is not None:
                return found
        return np.zeros(len(x)), self._shift(name, x, ends), 0.0

    def _possible(self, name: str, values: Floats | None, within: Ends | None) -> Ends | None:
        """Return the least and the greatest mean that there can be, by what is public; None if it is not known."""
        if within is not None or values is None:
            return within or self.bounds.get(name)
        # the levels of kept columns are those that rows have, of others those that were declared
        known = values[np.isfinite(values)]
        return (float(known.min()), float(known.max())) if len(known) else None

    def _is_loose(self, x: Floats, weights: Floats, mean: Floats, bias: Floats) -> bool:
        """Return whether a bound on a bias is large for a mean, and for where most rows lie."""
        if not len(x) or not weights.sum() > 0.0:
            return False
        width = quantile(x, weights, 0.95) - quantile(x, weights, 0.05)
        # noise puts rows anywhere between the bounds
        return bool((bias > np.maximum(np.abs(mean), width) / 2.0).any())

    def place(
        self, name: str, within: Ends
    ) -> tuple[Floats | None, Floats | float, Floats | float]:
        """Return the number of each point by the fine counts of its cell, its standard error, and how much further off it may be; None where there are none."""
        if name not in self.fine:
            return None, 0.0, 0.0
        return place_in_cells(self.fine[name], *self.ends[name], self._numbers(name), within)

    def _tell(
        self,
        name: str,
        parts: Triple,
        index: pd.Index | None,
        possible: Ends | None,
    ) -> Result:
        """Return means, their errors and biases as a result, within what is possible: of groups as Series."""
        mean, error, bias = parts
        mean = mean if possible is None else np.clip(mean, *possible)
        parts = self._in_units(name, mean, error, bias)
        if index is not None:
            found = self._result(*(pd.Series(each, index) for each in parts))
        else:
            found = self._result(*self._in_units(name, *map(float, (mean[0], error[0], bias[0]))))
            found = replace(found, standard_error=None) if np.isnan(error).any() else found
        if possible is None:
            return found
        ends = self._in_units(name, np.array(possible), np.zeros(2), np.zeros(2))[0]
        return replace(found, possible=(ends[0], ends[1]))

    def share(self, name: str) -> Result:
        """Return the share of each level of a column."""
        levels = self._levels_of(name)
        parts = self._count(
            [name], lambda frame: find_levels(frame[name], levels, name), len(levels)
        )
        index = pd.Index(levels, name=name)
        found = self._result(*(pd.Series(part, index) for part in parts))
        return replace(found, drawn=(1.0 / self.sampling, 1.0))

    def histogram(self, name: str, edges: Floats) -> Result:
        """Return how many rows lie in each range [edge, next edge); the last holds its upper edge too."""
        n, last = len(edges) - 1, edges[-1]

        def place(frame: pd.DataFrame) -> Codes:
            return find_ranges(to_numbers(frame[name], name), edges)

        chosen, cells = place(self.frame), self._cells([name])
        p, cut = add_up(self.weights, chosen, n)[:n] / self.weights.sum(), np.zeros(n)
        if name in self.ends:
            p, cut = self._spread_over(name, edges)
        sampling = self._sample(chosen, n, np.ones(len(chosen)))
        n_in = cells.add(place(cells.frame), n)
        # the rows of a cell that an edge cuts may all be in the range, or none of them
        error = np.max(
            [
                self._count_error(each, cells, n_in, sampling)
                for each in (p, np.clip(p - cut, 0.0, 1.0), np.clip(p + cut, 0.0, 1.0))
            ],
            axis=0,
        )
        around = np.array([self._cut(name, edge, is_last=edge == last) for edge in edges])
        bias = cut + 2.0 * self.rank_errors.get(name, 0.0) + self._lose(p)
        index = index_ranges(edges, self.dates.get(name), name)
        variance = error**2 + self.rank_noise.get(name, 0.0) ** 2 + around[:-1] + around[1:]
        parts = self._of_rows(p, np.sqrt(variance), bias)
        found = self._result(*(pd.Series(part, index) for part in parts))
        limits = (*found.limits, *([_INSIDE] if cut.any() else []))
        return replace(found, limits=limits, drawn=self._drawn_rows)

    def quantile(self, name: str, q: float) -> Result:
        """Return a quantile of a column of numbers."""
        x = self._numbers(name)
        here = np.isfinite(x)
        x, weights = x[here], self.weights[here]
        value = quantile(x, weights, q)
        known = float(weights.sum() / self.weights.sum())
        cells = self._cells([name])
        numbers = to_numbers(cells.frame[name], name)
        # the rank of the value is one among the rows with a value
        n_in, n_known = (cells.add(1 - side, 1) for side in (numbers <= value, ~np.isnan(numbers)))
        p = np.array([weights[x <= value].sum() / weights.sum()])
        sampling = self._sample_known(here, (x <= value) - p[0])
        of_share = float(self._share_error(p, cells.variance, n_in, n_known, sampling, known)[0])
        of_rank = math.hypot(of_share, self.rank_noise.get(name, 0.0) / known)

        def move(by: float, at: Callable[[float], float]) -> Ends:
            low, high = (float(np.clip(q + side * by, 1e-12, 1.0 - 1e-12)) for side in (-1, 1))
            return at(low), at(high)

        def point_at(rank: float) -> float:
            return quantile(x, weights, rank)

        at = self._spread_quantile(name) if name in self.ends else point_at
        low, high = move(of_rank, at)
        error = (high - low) / 2.0
        rank_error = (self.rank_errors.get(name, 0.0) + self.lost) / known
        bias = max(abs(end - value) for end in move(rank_error, point_at)) if rank_error else 0.0
        shift = float(self._shift(name, self._numbers(name))[here][x == value].max(initial=0.0))

        def find_ends(deviations: float) -> tuple[Any, Any]:
            low, high = move(deviations * of_rank, at)
            ends = (
                self._in_units(name, end, 0.0, 0.0)[0]
                for end in (min(low, value), max(high, value))
            )
            return tuple(ends)

        found = self._result(*self._in_units(name, value, error, bias + shift))
        limits = found.limits if here.all() else (*found.limits, WITHOUT_NULLS)
        if error <= _STILL * np.abs(x).max(initial=0.0):
            found, limits = replace(found, standard_error=None), (*limits, _SHARED)
        elif shift > 0.0:
            limits = (*limits, _POINT)
        return replace(found, limits=limits, find_ends=find_ends)

    def _spread_quantile(self, name: str) -> Callable[[float], float]:
        """Return the quantiles of a column whose points stand for ranges, along which their rows lie evenly."""
        ends = np.column_stack(self.ends[name])
        here = np.isfinite(ends).all(axis=1)
        cells, place = np.unique(ends[here], axis=0, return_inverse=True)
        weights = np.bincount(place.ravel(), weights=self.weights[here])
        above = np.maximum.accumulate(np.cumsum(weights).clip(0.0))
        ranks = np.column_stack([np.append(0.0, above[:-1]), above]).ravel() / above[-1]
        return lambda rank: float(np.interp(rank, ranks, cells.ravel()))

    def crosstab(self, first: str, second: str) -> Result:
        """Return how many rows have each pair of levels, a DataFrame."""
        index, columns = (pd.Index(self._levels_of(name), name=name) for name in (first, second))
        sizes = len(index), len(columns)

        def pair(frame: pd.DataFrame) -> Codes:
            one, two = (
                find_levels(frame[name], self.levels[name], name) for name in (first, second)
            )
            return one * sizes[1] + two

        parts = self._count([first, second], pair, math.prod(sizes), of_rows=True)
        tables = (part.reshape(sizes) for part in self._of_rows(*parts))
        found = self._result(*(pd.DataFrame(table, index, columns) for table in tables))
        return replace(found, drawn=self._drawn_rows)

    def count(self, name: str) -> Result:
        """Return how many rows have each level of a column."""
        levels = self._levels_of(name)
        parts = self._count(
            [name], lambda frame: find_levels(frame[name], levels, name), len(levels), of_rows=True
        )
        index = pd.Index(levels, name=name)
        found = self._result(*(pd.Series(part, index) for part in self._of_rows(*parts)))
        return replace(found, drawn=self._drawn_rows)

    def line(self, kind: str, response: str, features: Sequence[str]) -> Result:
        """Return the intercept of least squares, or the correlation of two columns, a number."""
        names = [response, *features]
        # of a noisy table, every cell is there
        is_table = self.noise is not None and len(self.noise(names).frame) == len(self.frame)
        if (self.ends or is_table) and len(names) == 2 and not self.biased:
            return self._slope_of_table(response, features[0], kind)
        if self.ends or self.biased or self.rank_errors or self.noise is not None:
            raise SpecError(NO_LINE, f"{kind}({', '.join(names)})", "use slope() and mean()")
        share, centre, z, beta, inverse, known = self._fit_line(names)
        e = z[:, 0] - z[:, 1:] @ beta
        if kind == "intercept":
            value = float(centre[0] - beta @ centre[1:])
            influence = e - ((z[:, 1:] @ inverse) * e[:, None]) @ centre[1:]
        else:
            u = z / np.sqrt(share @ z**2)
            value = float(share @ (u[:, 0] * u[:, 1]))
            influence = u[:, 0] * u[:, 1] - value / 2.0 * (u**2).sum(axis=1)
        error = math.sqrt(self.sampling / known * max(0.0, float(share @ influence**2)))
        return self._result(value, error, 0.0)

    def slope(self, response: str, features: Sequence[str]) -> Result:
        """Return the slopes of least squares of a column of numbers on others, a Series; rows that lack one of them are left out."""
        names = [response, *features]
        if self.ends and len(names) == 2 and not self.biased:
            found = self._slope_of_table(response, features[0], "slope")
            return Result.gather([found], pd.Index(features))
        share, centre, z, beta, inverse, known = self._fit_line(names)
        influence = (z[:, 1:] @ inverse) * (z[:, 0] - z[:, 1:] @ beta)[:, None]
        variance = self.sampling / known * np.maximum(share @ influence**2, 0.0)
        # A slope is a sum of products of two columns, and each pair has its own noisy table. The
        # parts of the pairs are added as standard deviations, which is never too small.
        ahead = np.append(1.0, -beta)  # the residual is Σ ahead_j z_j
        noise = np.zeros(len(beta))
        for one, two in combinations_with_replacement(range(len(names)), 2):
            cells = self._cells([names[one]] if one == two else [names[one], names[two]])
            a, b = (to_numbers(cells.frame[names[k]], names[k]) - centre[k] for k in (one, two))
            weight = np.zeros(len(beta))  # of z_one z_two in the influence of each slope
            for left, right in {(one, two), (two, one)}:
                if left:
                    weight += inverse[left - 1] * ahead[right]
            squares = cells.add(np.zeros(len(a), dtype=np.int64), 1, np.nan_to_num(a * b) ** 2)[0]
            noise += np.abs(weight) * math.sqrt(cells.variance * squares)
        index = pd.Index(features)
        error = pd.Series(np.sqrt(variance + noise**2 / known**2), index)
        bias = None if self.ends or self.rank_errors else pd.Series(np.zeros(len(beta)), index)
        found = self._result(pd.Series(beta, index), error, bias)
        why = _SLOPE if self.ends else _RANKS
        return found if bias is not None else replace(found, limits=(*found.limits, why))

    def _fit_line(
        self, names: Sequence[str]
    ) -> tuple[Floats, Floats, Floats, Floats, Floats, float]:
        """Return the shares of the rows that have all columns, the columns' means, what is left without these, the slopes of the first on the others, the inverse of their covariances, and the part of all rows."""
        table = np.column_stack([self._numbers(name) for name in names])
        here = np.isfinite(table).all(axis=1)
        table, weights = table[here], self.weights[here]
        # averages are of the rows that have all columns
        known = float(weights.sum() / self.weights.sum())
        sample = WeightedSample(features=table[:, 1:], response=table[:, 0], weights=weights)
        beta = least_squares(sample)[1:]
        share = weights / weights.sum()
        centre = share @ table
        z = table - centre
        inverse = np.linalg.inv((z[:, 1:] * share[:, None]).T @ z[:, 1:])
        return share, centre, z, beta, inverse, known

    # ---- what cells say of values inside them, by a normal copula of their columns

    def lay_out(self, names: Sequence[str]) -> tuple[PlacedTable, list[Codes]]:
        """Return the table of the cells of some columns, and the cell of each point in each of them; -1 of those without a number.

        Texts are in the order of the mean score of the first column, which holds numbers.
        """
        codes, cells = list[Codes](), list[Floats]()
        for name in names:
            x = self._read(name)
            ends = np.column_stack(self.ends.get(name, (x, x)))
            known = np.isfinite(ends).all(axis=1)
            found, inverse = np.unique(ends[known], axis=0, return_inverse=True)
            code = np.full(len(ends), -1, dtype=np.int64)
            code[known] = inverse.ravel()
            total = add_up(x[known], code[known], len(found))
            codes.append(code)
            cells.append(np.column_stack([total / np.bincount(code[known]), found]))
        here = (np.column_stack(codes) >= 0).all(axis=1)
        shape = tuple(len(each) for each in cells)
        flat = np.ravel_multi_index([code[here] for code in codes], shape)
        counts = add_up(self.weights[here], flat, math.prod(shape)).reshape(shape)
        axes = list[Axis]()
        for place, (name, n_each) in enumerate(zip(names, count_points(shape), strict=True)):
            others = tuple(k for k in range(len(names)) if k != place)
            values = cells[place]
            if axes and self._is_of_texts(name):
                score = axes[0].means(axes[0].scores)
                table = np.maximum(counts.sum(axis=tuple(k for k in others if k != 0)), 0.0)
                key = (score @ table) / np.maximum(table.sum(axis=0), 1.0)
                values = np.repeat(key[:, None], 3, axis=1)
            rows, fine = counts.sum(axis=others), self.fine.get(name)
            mean, low, high = values.T
            axes.append(Axis.of(mean, low, high, rows, n_each=n_each, fine=fine))
        return PlacedTable(axes=axes, counts=counts), codes

    def _is_of_texts(self, name: str) -> bool:
        return any(isinstance(level, str) for level in self.levels.get(name, ()))

    def _read(self, name: str) -> Floats:
        """Return the number of each point, of a column of texts the place of its level."""
        if self._is_of_texts(name):
            return find_levels(self.frame[name], self.levels[name], name).astype(float)
        return to_numbers(self.frame[name], name)

    def _lean_inside(
        self, name: str, by: str, within: Ends, beyond: Floats | float
    ) -> tuple[Floats, Floats, Floats | float] | None:
        """Return how far the mean of each point's rows is from that of its cell, in its group; how far more it may be, and how far by chance. None if no model says so."""
        table, (code, group) = self.lay_out([name, by])
        here = (code >= 0) & (group >= 0)
        values = table.at_points(0, np.clip(table.axes[0].values, *within))
        even = table.average(values, table.even)
        moved, more, apart = np.zeros((3, len(code)))
        low, high = (np.clip(each, *within) for each in self.ends[name])
        off = np.broadcast_to(beyond, here.shape)
        spikes = self._find_spikes(name, table.counts.sum(axis=1))
        if table.axes[0].unresolved <= UNRESOLVED and spikes.sum() <= _SPIKES:
            moved[here] = (table.average(values, table.leaning) - even)[code[here], group[here]]
            most = APART * table.average(values * table.tilt(0), table.even)
            rows = np.maximum(table.counts.sum(axis=1) / table.counts.sum(), 1e-9)
            part = np.minimum(spikes / rows, 1.0)
            half = (high - low)[here] / 2.0
            more[here] = half * part[code[here]]
            of_cells = np.zeros(table.axes[0].n_cells)
            of_cells[code[here]] = off[here]
            more = more + (off if _is_far(of_cells, table.axes[0]) else 0.0)
            rest = np.maximum(half - more[here], 0.0)  # rows do not leave their cell
            apart[here] = np.minimum(most[code[here], group[here]], rest)
            return moved, more, apart
        if name not in self.fine:
            return None
        # the mean of a part q of rows with the standard deviation s is at most s √((1 - q) / q) off
        spread = np.sqrt(np.maximum(table.average(values**2, table.even) - even**2, 0.0))
        every = np.maximum(table.counts.sum(axis=1, keepdims=True), 1.0)
        q = np.clip(table.counts / every, 1e-6, 1.0)
        most = (spread * np.sqrt((1.0 - q) / q))[code[here], group[here]]
        more[here] = np.minimum(most + off[here], (high - low)[here])
        return moved, more, apart

    def _find_spikes(self, name: str, rows: Floats) -> Floats:
        """Return the share of the rows of each cell that stands out of the line through the cells beside it, beyond the noise.

        Of a column whose cells were found, fine counts say where rows are; of others, a peak in one
        cell says that many may have one value, anywhere in it.
        """
        found = np.zeros(len(rows))
        if name in self.fine or name not in self.ends or len(rows) < 3:
            return found
        ends = np.column_stack(self.ends[name])
        cells = np.unique(ends[np.isfinite(ends).all(axis=1)], axis=0)
        line = np.flatnonzero(cells[:, 0] < cells[:, 1])
        share, around = rows[line] / rows.sum(), np.zeros(len(line))
        if len(line) < 3:
            found[line] = np.maximum(share, 0.0)  # the noise of a count may be below 0
            return found
        around[1:-1] = (share[:-2] + share[2:]) / 2.0
        around[[0, -1]] = 2.0 * share[[1, -2]]
        noise = self.noise([name]) if self.noise is not None else None
        n_each = 1.0 if noise is None else noise.n_cells / len(rows)
        doubt = 2.0 * math.sqrt((noise.variance if noise else 0.0) * n_each * 1.5)
        found[line] = np.maximum(np.abs(share - around) - doubt, 0.0) * (share > 0.0)
        return found

    def is_resolved(self, table: PlacedTable, place: int, name: str) -> bool:
        """Return whether cells tell what a column depends on."""
        axis = table.axes[place]
        others = tuple(k for k in range(len(table.axes)) if k != place)
        spikes = self._find_spikes(name, table.counts.sum(axis=others))
        return axis.unresolved <= UNRESOLVED and float(spikes.sum()) <= _SPIKES

    def _slope_of_table(self, response: str, feature: str, kind: str) -> Result:
        """Return the slope, the intercept or the correlation of a table of two columns, by what its cells show of how they depend on each other."""
        names = [response, feature]
        table, codes = self.lay_out(names)
        found = find_line(table, kind)
        here = (codes[0] >= 0) & (codes[1] >= 0)
        rows = table.counts / table.counts.sum()
        known = float(table.counts.sum() / self.weights.sum())
        cells = self.noise(names) if self.noise is not None else None
        each = 0.0 if cells is None else cells.variance / known**2

        def at_rows(influence: Floats) -> Floats:
            return np.where(here, influence[codes[0], codes[1]], 0.0)

        doubt = math.sqrt(each * float((at_rows(found.of_variance) ** 2).sum()))
        if not found.variance > _VARIES * doubt:
            raise SpecError(NO_VARIANCE, f"{kind}({response}, {feature})", OTHERS)
        drawn = self.sampling / known * max(0.0, float((rows * found.influence**2).sum()))
        noise, is_told = each * float((at_rows(found.influence) ** 2).sum()), True
        # a variance that only the noise made large enough to be told makes the slope too flat; it may
        # be a standard error less, besides the errors (Fieller, 1954, has the whole set)
        bias = found.bias_bound + abs(found.by_slope) * doubt / (found.variance - doubt)
        for place, (name, axis) in enumerate(zip(names, table.axes, strict=True)):
            _, doubts, beyond = self.place(name, (-math.inf, math.inf))
            of_cells = np.zeros((2, axis.n_cells))
            of_cells[:, codes[place][here]] = [
                np.broadcast_to(part, here.shape)[here] for part in (doubts, beyond)
            ]
            # the mean of a cell at an end is off to one side, the outer one: noise far out draws it
            moved = math.sqrt(float(((of_cells[0] * found.of_means[place]) ** 2).sum()))
            noise, bias = noise + moved**2, bias + moved
            is_told &= self.is_resolved(table, place, name) and not _is_far(of_cells[1], axis)
        error = math.sqrt(drawn + noise)
        told = self._result(found.estimate, error, bias if is_told else None)
        return replace(
            told, limits=(*told.limits, *([MODEL if is_told else NOT_TOLD] if self.ends else []))
        )

    # ---- shares, and their errors

    def _cells(self, names: Sequence[str]) -> NoisyCells:
        """Return the noisy cells of some columns; none where no noise was added."""
        if self.noise is not None:
            return self.noise(names)
        return NoisyCells(frame=self.frame[list(names)].iloc[:0], variance=0.0)

    def _count(
        self,
        names: Sequence[str],
        code: Callable[[pd.DataFrame], Codes],
        n: int,
        *,
        of_rows: bool = False,
    ) -> Triple:
        """Return the share of each of n groups, its standard error, or that of its number of rows, and how far lost rows may move it."""
        chosen, cells = code(self.frame), self._cells(names)
        p = add_up(self.weights, chosen, n)[:n] / self.weights.sum()
        n_in = cells.add(code(cells.frame), n)
        sampling = self._sample(chosen, n, np.ones(len(chosen)))
        if of_rows:
            return p, self._count_error(p, cells, n_in, sampling), self._lose(p)
        error = self._share_error(p, cells.variance, n_in, cells.n_cells, sampling)
        return p, error, self._lose(p)

    def _lose(self, p: Floats) -> Floats:
        return self.lost * np.maximum(p, 1.0 - p)

    def _of_rows(self, p: Floats, error: Floats, bias: Floats) -> Triple:
        """Return numbers of rows for shares: sums of the counts, where the number of all rows is noisy, too."""
        rows = self.n_rows if self.is_counted else float(self.weights.sum())
        return rows * p, self.n_rows * error, self.n_rows * bias

    @property
    def _drawn_rows(self) -> Ends:
        """What `Result.drawn` is of numbers of rows: where that of all rows is noisy, too, those of a Poisson law."""
        whole = self.n_rows if self.is_counted else MANY * max(self.n_rows, 1.0)
        return whole / (self.sampling * max(self.n_rows, 1.0)), whole

    def _count_error(
        self, p: Floats, cells: NoisyCells, n_in: Floats, sampling: Floats | float
    ) -> Floats:
        """Return the standard errors of numbers of rows, as parts of all rows: where their number is noisy, too, a count is a sum, and no share of it."""
        if self.is_counted:
            return self._share_error(p, cells.variance, n_in, cells.n_cells, sampling)
        return np.sqrt(sampling * np.maximum(p, self.sampling) + cells.variance * n_in)

    def _spread_over(self, name: str, edges: Floats) -> Pair:
        """Return the share of the rows in each range, those of a cell lying evenly in it, and how far off it may be by cells that an edge cuts."""
        low, high = self.ends[name]
        weights, last = self.weights / self.weights.sum(), np.nextafter(edges[-1], np.inf)
        width = np.where(high > low, high - low, 1.0)
        shares, cut = [], []
        for first, end in itertools.pairwise([*edges[:-1], last]):
            inside = (low >= first) & (high < end)
            some = (high >= first) & (low < end)
            part = (np.minimum(high, end) - np.maximum(low, first)) / width
            part = np.where(
                inside, 1.0, np.where(some, np.clip(np.nan_to_num(part), 0.0, 1.0), 0.0)
            )
            shares.append(weights @ part)
            cut.append(np.abs(weights) @ np.maximum(part - inside, some - part))
        return np.array(shares), np.array(cut)

    def _sample_known(self, here: Flags, x: Floats) -> Floats | float:
        """Return how much of `sampling` counts for the average of x over the rows that are here."""
        every = np.zeros(len(here))
        every[here] = x
        return self._sample(np.zeros(len(here), dtype=np.int64), 1, every)

    def _sample(self, codes: Codes, n: int, x: Floats) -> Floats | float:
        """Return how much of `sampling` counts for each of n averages: average k is of x where the code is k, and of 0 elsewhere."""
        if self.held_out is None:
            return self.sampling
        still = 1.0 - self.held_out.move(self.weights, codes, n, x)
        return self.sampling - still / self.held_out.n_rows

    def _share_error(
        self,
        p: Floats,
        variance: float,
        n_in: Floats,
        n_cells: Floats | float,
        sampling: Floats | float,
        known: float = 1.0,
    ) -> Floats:
        """Return the standard errors of shares among the `known` part of the rows, which `n_cells` cells hold.

        Such a share is a ratio A / B of two noisy sums. By the delta method its variance is that of
        A - p B, over B²: each cell of the share counts with (1 - p)², each other one of B with p².
        """
        # of a level without released rows, the share is not known to be 0: it may be that of one row
        # that was not drawn
        least = min(0.5, self.sampling / known)
        spread = np.clip(p, least, 1.0 - least)
        noise = variance * (n_in * (1.0 - p) ** 2 + (n_cells - n_in) * p**2)
        return np.sqrt(sampling * spread * (1.0 - spread) / known + noise / known**2)

    def _cut(self, name: str, edge: float, *, is_last: bool) -> float:
        """Return the variance of the share of the rows in the cell that an edge cuts.

        Rows at the last edge lie before it.
        """
        bounds = self.bounds.get(name, (-math.inf, math.inf))
        if name not in self.ends or not bounds[0] < edge < bounds[1]:
            return 0.0
        low, high = self.ends[name]
        cut = (low <= edge) & (edge < high) if is_last else (low < edge) & (edge <= high)
        share = float(np.abs(self.weights[cut]).sum() / self.weights.sum())
        variance = self.sampling * share * max(0.0, 1.0 - share)
        if cut.any():
            cells = self._cells([name])
            x = to_numbers(cells.frame[name], name)
            inside = (low[cut].min() <= x) & (x <= high[cut].max())
            variance += cells.variance * float(cells.add(np.where(inside, 0, 1), 1)[0])
        return variance

    def _in_units(self, name: str, estimate: Any, error: Any, bias: Any) -> tuple[Any, Any, Any]:
        return in_units(self.dates.get(name), estimate, error, bias)

    def _levels_of(self, name: str) -> Sequence[object]:
        if name not in self.levels:
            raise without_levels(name)
        return self.levels[name]

    def _numbers(self, name: str) -> Floats:
        return to_numbers(self.frame[name], name)

    def _shift(self, name: str, x: Floats, within: Ends = (-math.inf, math.inf)) -> Floats:
        """Return how far a row may be from its point, which has the number x."""
        if name not in self.ends:
            return np.zeros(len(self.frame))
        low, high = (np.clip(each, *within) for each in self.ends[name])
        return np.where(np.isnan(x), 0.0, np.maximum(x - low, high - x))

    def _result(self, estimate: object, error: object, bias: object) -> Result:
        # of dates, a bias is a span of time, which is missing where it is not known
        if isinstance(bias, TABLES):
            bias = bias.mask(bias == math.inf)
        known = bias is not None and not np.all(pd.isna(bias)) and not np.all(bias == math.inf)
        unknown = self.biased or self.spread or not known
        return Result(
            estimate=estimate,
            standard_error=error,
            bias_bound=None if unknown else bias,
            limits=self.limits,
        )


def _is_far(beyond: Floats, axis: Axis) -> bool:
    """Return whether the places of cells, each as much further off as it may be, would have a large part of the variance of a column."""
    rows = np.bincount(axis.cell, weights=axis.masses)
    centre = float(axis.masses @ axis.values)
    every = float(axis.masses @ (axis.values - centre) ** 2)
    return bool((rows * beyond**2).max() > UNRESOLVED * every)
