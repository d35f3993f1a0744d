"""Estimates from released records, cells or tables: weighted averages, and how far sampling and noise move them.

A weighted average moves by the average of its influence function. Drawing rows gives that a
variance in proportion to its spread over the points; noise in the counts gives it the sum of its
squares over the noisy cells, times the noise of one cell.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations_with_replacement
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import pyarrow as pa

from dpdask.analysis.inside import MODEL, find_slope_of_table, lean
from dpdask.analysis.measured import (
    WITHOUT_NULLS,
    MeasuredAnswers,
    place_in_cells,
)
from dpdask.analysis.opened import OpenedRelease, Question, Result
from dpdask.analysis.values import (
    DateScale,
    NoisyCells,
    cell_ends,
    find_levels,
    find_ranges,
    find_scales,
    in_units,
    index_ranges,
    list_cells,
    list_values,
    read_edges,
    read_within,
    to_numbers,
)
from dpdask.errors import SpecError
from dpdask.inference.m_estimators import WeightedSample, least_squares, quantile
from dpdask.inference.measured import MeasuredColumn
from dpdask.inference.tallies import Codes, Floats, add_up
from dpdask.references.counts import label_table

_SHOWN = 12
AVERAGES = ("mean", "share", "histogram", "quantile", "crosstab", "slope")
WIDE = "the mean of a heavy tail cannot be estimated under wide bounds; use within=(low, high)"
LOOSE = "the bound on the bias is larger than half of the mean, and than half of the range that nine tenths of the rows lie in; use within=(low, high)"
_NO_GROUP = "groups whose rows cannot be told from the noise have no estimate"
_INSIDE = "an edge lies inside a cell, whose rows all count on one side of it, so only the bias bound tells how far off this is; use edges of cells"
_RANKS = "the ranks of released values may be off, so no bound on the bias of a slope is known"
_SLOPE = "no bound on the bias of a slope is known: if most values of a column lie in a few ranges, it can be many times too small or too large"
_EQUAL = "groups whose released values are all equal have no standard error: a few rows do not tell how far values spread"
_SHARED = "all ranks within a standard error have this value, which many rows share: it has no standard error, but an interval by ranks"
_SURE = 2.0  # standard deviations that a group's share has at least to divide by it
_DELTA = 4.0  # and that it has at least for the delta method
_STILL = 1e-12  # of the numbers: values that differ by less differ by rounding alone
_POINT = "this is the point of a cell: only the bias bound tells how far off it is"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Points:
    """Released points with weights, and what their error is made of."""

    frame: pd.DataFrame  # the points, by column; a null is missing
    weights: Floats  # counts of rows, which may be negative
    n_rows: float  # of the table, or about
    # what the variance of one value is multiplied by: 1 / rows for a table of rows, more where
    # records were drawn once more
    sampling: float
    levels: Mapping[str, Sequence[object]]  # of each column that has levels
    # by column, the least and the greatest value that a point's rows may have, NaN of a null; no
    # column if points are the rows' values
    ends: Mapping[str, tuple[Floats, Floats]] = field(default_factory=dict)
    # by column of cells, the fine counts of all rows, which tell where in a cell they lie
    fine: Mapping[str, MeasuredColumn] = field(default_factory=dict)
    # by column, how far the rank of a released value may be off
    rank_errors: Mapping[str, float] = field(default_factory=dict)
    bounds: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    # the noisy cells of some columns; None if no noise was added to counts
    noise: Callable[[Sequence[str]], NoisyCells] | None = None
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
        within: tuple[float, float] | None = None,
    ) -> Result:
        """Return the mean of a column, or its means in the groups of another one; rows without a value are left out.

        `values` has a number for each level, NaN to leave its rows out; others are clipped.
        """
        ends = within or (-math.inf, math.inf)
        placed, doubt, beyond = self.place(name, ends) if values is None else (None, 0.0, 0.0)

        def number(frame: pd.DataFrame) -> Floats:
            if placed is not None and frame is self.frame:
                return placed
            if values is None:
                return np.clip(to_numbers(frame[name], name), *ends)
            return values[find_levels(frame[name], self._levels_of(name), name)]

        def group(frame: pd.DataFrame) -> Codes:
            none = np.zeros(len(frame), dtype=np.int64)
            return none if by is None else find_levels(frame[by], groups, by)

        groups = self._levels_of(by) if by is not None else [None]
        n = len(groups)
        code, x = group(self.frame), number(self.frame)
        moved, shift = self._lean(name, None if values is not None else by, x, ends, beyond)
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
            noise += add_up((weights * np.broadcast_to(doubt, here.shape)[here]) ** 2, code, n)
            variance = (self.sampling * spread + noise) / share**2
            if name in self.rank_noise and len(x):
                # a mean is the integral of ranks over the released range
                variance = variance + (self.rank_noise[name] * np.ptp(x) / share) ** 2
            bias = add_up(np.abs(weights) * shift[here], code, n) + self._move(name, ends)
            bias = (bias + np.abs(add_up(weights * moved[here], code, n)) / 2.0) / share
        if by is None and not told.any():
            what = "the rows with a value cannot be told from the noise"
            raise SpecError(what, f"column {name!r}", "release with a larger epsilon")
        error = np.sqrt(variance)
        still = error <= _STILL * np.abs(x).max(initial=0.0)
        is_number = values is None and name not in self.levels
        is_loose = is_number and not self.biased and self._is_loose(x, weights, mean, bias)
        is_wide = is_number and self.biased and within is None
        true = (not here.all(), still.any(), is_wide, is_loose, not told.all(), moved.any())
        said = itertools.compress((WITHOUT_NULLS, _EQUAL, WIDE, LOOSE, _NO_GROUP, MODEL), true)
        parts = (mean, np.where(still, np.nan, error), bias)
        index = pd.Index(list(groups), name=by) if by else None
        found = self._tell(name, parts, index, self._possible(name, values, within))
        return replace(found, limits=(*self.limits, *said))

    def _lean(
        self,
        name: str,
        by: str | None,
        x: Floats,
        ends: tuple[float, float],
        beyond: Floats | float,
    ) -> tuple[Floats, Floats]:
        """Return how far rows are in the mean from their point, which has the number x, and how much further they may be."""
        if by is not None and name in self.ends and not self.biased:
            found = lean(self, name, by, ends, beyond)
            if found is not None:
                return found
        return np.zeros(len(x)), self._shift(name, x, ends)

    def _move(self, name: str, ends: tuple[float, float]) -> float:
        """Return how far an error of ranks, and rows beyond the kept ones, may move a mean: that part of the bounds' distance."""
        low, high = np.clip(self.bounds.get(name, (0.0, math.inf)), *ends)
        rank_error = self.rank_errors.get(name, 0.0)
        return float((rank_error + self.lost) * (high - low)) if rank_error else 0.0

    def _possible(
        self, name: str, values: Floats | None, within: tuple[float, float] | None
    ) -> tuple[float, float] | None:
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
        self, name: str, within: tuple[float, float]
    ) -> tuple[Floats | None, Floats | float, Floats | float]:
        """Return the number of each point by the fine counts of its cell, its standard error, and how much further off it may be; None where there are none."""
        if name not in self.fine:
            return None, 0.0, 0.0
        return place_in_cells(self.fine[name], *self.ends[name], self._numbers(name), within)

    def _tell(
        self,
        name: str,
        parts: tuple[Floats, Floats, Floats],
        index: pd.Index | None,
        possible: tuple[float, float] | None,
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
        index = pd.Index(list(levels), name=name)
        return self._result(*(pd.Series(part, index) for part in parts))

    def histogram(self, name: str, edges: Floats) -> Result:
        """Return how many rows lie in each range [edge, next edge); the last holds its upper edge too."""
        n, last = len(edges) - 1, edges[-1]

        def place(frame: pd.DataFrame) -> Codes:
            return find_ranges(to_numbers(frame[name], name), edges)

        p, error, lost = self._count([name], place, n)
        near, around = np.array([self._cut(name, edge, is_last=edge == last) for edge in edges]).T
        bias = near[:-1] + near[1:] + 2.0 * self.rank_errors.get(name, 0.0) + lost
        index = index_ranges(edges, self.dates.get(name), name)
        variance = error**2 + self.rank_noise.get(name, 0.0) ** 2 + around[:-1] + around[1:]
        parts = (p, np.sqrt(variance), bias)
        found = self._result(*(pd.Series(self.n_rows * part, index) for part in parts))
        return replace(found, limits=(*found.limits, _INSIDE)) if near.any() else found

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
        of_share = float(self._share_error(p, cells.variance, n_in, n_known, known)[0])
        of_rank = math.hypot(of_share, self.rank_noise.get(name, 0.0) / known)

        def move(by: float, at: Callable[[float], float]) -> tuple[float, float]:
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
        index, columns = (
            pd.Index(list(self._levels_of(name)), name=name) for name in (first, second)
        )
        sizes = len(index), len(columns)

        def pair(frame: pd.DataFrame) -> Codes:
            one, two = (
                find_levels(frame[name], self.levels[name], name) for name in (first, second)
            )
            return one * sizes[1] + two

        parts = self._count([first, second], pair, math.prod(sizes))
        tables = (self.n_rows * part.reshape(sizes) for part in parts)
        return self._result(*(pd.DataFrame(table, index, columns) for table in tables))

    def slope(self, response: str, features: Sequence[str]) -> Result:
        """Return the slopes of least squares of a column of numbers on others, a Series; rows that lack one of them are left out."""
        names = [response, *features]
        if self.ends and len(names) == 2 and not self.biased:
            return self._slope_of_table(response, features[0])
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
        index = pd.Index(list(features))
        error = pd.Series(np.sqrt(variance + noise**2 / known**2), index)
        bias = None if self.ends or self.rank_errors else pd.Series(np.zeros(len(beta)), index)
        found = self._result(pd.Series(beta, index), error, bias)
        why = _SLOPE if self.ends else _RANKS
        return found if bias is not None else replace(found, limits=(*found.limits, why))

    def _slope_of_table(self, response: str, feature: str) -> Result:
        slope, error, bias, limit = find_slope_of_table(self, response, feature)
        index = pd.Index([feature])
        bounds = None if bias is None else pd.Series([bias], index)
        found = self._result(pd.Series([slope], index), pd.Series([error], index), bounds)
        return replace(found, limits=(*found.limits, limit))

    def _cells(self, names: Sequence[str]) -> NoisyCells:
        """Return the noisy cells of some columns; none where no noise was added."""
        if self.noise is not None:
            return self.noise(names)
        return NoisyCells(frame=self.frame[list(names)].iloc[:0], variance=0.0)

    def _count(
        self, names: Sequence[str], code: Callable[[pd.DataFrame], Codes], n: int
    ) -> tuple[Floats, Floats, Floats]:
        """Return the share of each of n groups, its standard error, and how far lost rows may move it."""
        p = add_up(self.weights, code(self.frame), n)[:n] / self.weights.sum()
        cells = self._cells(names)
        n_in = cells.add(code(cells.frame), n)
        error = self._share_error(p, cells.variance, n_in, cells.n_cells)
        return p, error, self.lost * np.maximum(p, 1.0 - p)

    def _share_error(
        self, p: Floats, variance: float, n_in: Floats, n_cells: Floats | float, known: float = 1.0
    ) -> Floats:
        """Return the standard errors of shares among the `known` part of the rows, which `n_cells` cells hold.

        Such a share is a ratio A / B of two noisy sums. By the delta method its variance is that of
        A - p B, over B²: each cell of the share counts with (1 - p)², each other one of B with p².
        """
        # of a level without released rows, the share is not known to be 0
        least = min(0.5, 1.0 / (self.n_rows * known))
        spread = np.clip(p, least, 1.0 - least)
        noise = variance * (n_in * (1.0 - p) ** 2 + (n_cells - n_in) * p**2)
        return np.sqrt(self.sampling * spread * (1.0 - spread) / known + noise / known**2)

    def _cut(self, name: str, edge: float, *, is_last: bool) -> tuple[float, float]:
        """Return the share of the rows that may lie on the other side of an edge than their point, and its variance.

        Rows at the last edge lie before it.
        """
        bounds = self.bounds.get(name, (-math.inf, math.inf))
        if name not in self.ends or not bounds[0] < edge < bounds[1]:
            return 0.0, 0.0
        low, high = self.ends[name]
        cut = (low <= edge) & (edge < high) if is_last else (low < edge) & (edge <= high)
        share = float(np.abs(self.weights[cut]).sum() / self.weights.sum())
        variance = self.sampling * share * max(0.0, 1.0 - share)
        if cut.any():
            cells = self._cells([name])
            x = to_numbers(cells.frame[name], name)
            inside = (low[cut].min() <= x) & (x <= high[cut].max())
            variance += cells.variance * float(cells.add(np.where(inside, 0, 1), 1)[0])
        return share, variance

    def _in_units(self, name: str, estimate: Any, error: Any, bias: Any) -> tuple[Any, Any, Any]:
        return in_units(self.dates.get(name), estimate, error, bias)

    def _levels_of(self, name: str) -> Sequence[object]:
        if name not in self.levels:
            raise _without_levels(name)
        return self.levels[name]

    def _numbers(self, name: str) -> Floats:
        return to_numbers(self.frame[name], name)

    def _shift(
        self, name: str, x: Floats, within: tuple[float, float] = (-math.inf, math.inf)
    ) -> Floats:
        """Return how far a row may be from its point, which has the number x."""
        if name not in self.ends:
            return np.zeros(len(self.frame))
        low, high = (np.clip(each, *within) for each in self.ends[name])
        return np.where(np.isnan(x), 0.0, np.maximum(x - low, high - x))

    def _result(self, estimate: object, error: object, bias: object) -> Result:
        # of dates, a bias is a span of time, which is missing where it is not known
        if isinstance(bias, pd.Series | pd.DataFrame):
            bias = bias.mask(bias == math.inf)
        known = bias is not None and not np.all(pd.isna(bias)) and not np.all(bias == math.inf)
        unknown = self.biased or self.spread or not known
        return Result(
            estimate=estimate,
            standard_error=error,
            bias_bound=None if unknown else bias,
            limits=self.limits,
        )


def _without_levels(name: str) -> SpecError:
    return SpecError(
        "it holds numbers, without levels",
        f"column {name!r}",
        "use histogram(), mean() or quantile()",
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class OpenedPoints(OpenedRelease):
    """A release whose estimates are weighted averages of points, or sums of noisy counts."""

    # whether shares of levels come from a column's own noisy counts, which no other table tells
    measures_levels: ClassVar[bool] = False

    def _points(self, *names: str) -> Points:
        """Return the points of some columns."""
        raise NotImplementedError

    def _plan(self, asked: Question) -> Callable[[], Any]:
        kind, names = asked.kind, asked.names
        first, *others = names
        if kind == "quantile" and others:
            raise self._no_groups(kind, first, others[0])
        for name in {"share": names, "crosstab": names, "mean": others}.get(kind, ()):
            if self._levels(name) is None and not self._is_kept(name):
                raise _without_levels(name)
        if kind in ("histogram", "quantile", "slope"):
            self._check_no_texts(names)
        if kind not in AVERAGES:
            raise self._refusal(kind, *names)
        if kind == "slope":
            self._check_no_dates(names)
        values = self._level_values(first, asked.values, asked.within) if kind == "mean" else None
        return partial(self._put, asked, values)

    def _put(self, asked: Question, values: Floats | None) -> Result:
        """Answer by the noisy counts of a column, where they are released and it is alone, else by points."""
        first, *others = asked.names
        measured = None if asked.kind in ("crosstab", "slope") else self._find_measured(first)
        if others and measured is not None and values is None and asked.within is None:
            measured.check_mean(first)
        answers = self._points(*asked.names) if others or measured is None else measured
        scale = answers.dates.get(first)
        ends = self._check_within(first, asked.within, scale)
        edges = self._edges(first, asked.bins, scale) if asked.kind == "histogram" else None
        return asked.put(answers, values=values, ends=ends, edges=edges)

    def _offer(self, question: str, name: str) -> str:
        found = super(OpenedPoints, self)._offer(question, name)
        if found != "mean" or self._levels(name) is not None:
            return found
        measured = self._find_measured(name)
        return found if measured is None or measured.knows_mean(name) else "mean(within=)"

    def _find_measured(self, name: str) -> MeasuredAnswers | None:
        if self._is_kept(name):
            return None
        exact = self.content["guarantee"]["adjacency"] == "replace-one"
        counts = self._read_counts(name, self._n_counted if exact else None)
        if counts is None:
            return None
        type_ = self._types.field(name).type if name in self._types.names else pa.null()
        zone = type_.tz if pa.types.is_timestamp(type_) else None
        scale = DateScale.of_card(self._column(name), zone)
        return MeasuredAnswers(
            column=counts,
            levels=self._levels(name),
            dates={} if scale is None else {name: scale},
            limits=self._limits_of_units(),
        )

    def _read_counts(self, name: str, n_rows: float | None) -> MeasuredColumn | None:
        """Return the noisy counts of a column that answer questions about it alone."""
        rows, levels = self._measured.get(label_table(name)), self._levels(name)
        if rows is None or not (levels is None or self.measures_levels):
            return None
        with self._check_counts():
            return MeasuredColumn.read(rows, n_rows, None if levels is None else len(levels))

    def _find_fine(self, names: Sequence[str]) -> dict[str, MeasuredColumn]:
        """Return the fine counts of those columns whose cells were found by them."""
        found = {name: self._find_measured(name) for name in names if "means" in self._column(name)}
        return {name: each.column for name, each in found.items() if each is not None}

    @property
    def _n_counted(self) -> float | None:
        """How many rows were counted, where that is public."""
        return self.content.get("n_rows", {}).get("value")  # ranges have none

    def _limits_of_units(self) -> tuple[str, ...]:
        unit = self.content["guarantee"]["unit"]
        if not isinstance(unit, dict):
            return ()
        return (f"rows that share a {unit['column']!r} are taken to be independent",)

    def _check_no_dates(self, names: Sequence[str]) -> None:
        for name in names:
            if self._is_of_dates(name):
                raise SpecError(
                    "holds dates, and slopes of dates are not supported",
                    f"column {name!r}",
                    "use mean(), quantile() or histogram()",
                )

    def _check_no_texts(self, names: Sequence[str]) -> None:
        for name in names:
            if any(isinstance(level, str) for level in self._levels(name) or ()):
                raise SpecError(
                    "does not hold numbers", f"column {name!r}", "use share() or crosstab()"
                )

    def _check_within(
        self, name: str, within: Sequence[Any] | None, scale: DateScale | None = None
    ) -> tuple[float, float] | None:
        """Return the two numbers that values are clipped to."""
        if within is None:
            return None
        return read_within(within, f"mean({name}), `within`", scale)

    def _level_values(
        self,
        name: str,
        values: Sequence[float] | None,
        within: Sequence[Any] | None = None,
    ) -> Floats | None:
        """Return the number of each level, NaN for null, clipped to `within`; None for a column without levels."""
        levels = self._levels(name)
        if levels is None:
            if values is not None:
                raise SpecError(
                    "`values` are for a column with levels", f"mean({name})", "leave them out"
                )
            return None
        shown = ", ".join("null" if level is None else str(level) for level in levels[:_SHOWN]) + (
            ", …" if len(levels) > _SHOWN else ""
        )
        if values is None:
            if not all(isinstance(level, int | float | None) for level in levels):
                raise SpecError(
                    "does not hold numbers",
                    f"column {name!r}",
                    f"use share(), or give `values`, a number for each of {shown}",
                )
            values = [math.nan if level is None else float(level) for level in levels]
        try:
            found = np.asarray(values, dtype=np.float64)
        except (TypeError, ValueError):
            found = np.zeros(0)
        if found.shape != (len(levels),) or np.isinf(found).any():
            raise SpecError(
                f"needs {len(levels)} values, in the order of the levels",
                f"mean({name})",
                f"give a number, or NaN, for each of {shown}",
            )
        ends = self._check_within(name, within)
        return found if ends is None else np.clip(found, *ends)

    def _bounds_of(self, name: str) -> tuple[float, float] | None:
        """Return the declared bounds of a column in the numbers of its estimates; None if there are none."""
        bounds = self._column(name).get("bounds")
        return None if bounds is None else (float(bounds[0]), float(bounds[1]))

    def _edges(
        self, name: str, bins: int | Sequence[Any], scale: DateScale | None = None
    ) -> Floats:
        """Return the edges of a histogram's ranges; a number of them lies between the declared bounds."""
        return read_edges(bins, self._bounds_of(name), f"column {name!r}", scale)

    def _level_map(self, names: Sequence[str]) -> Mapping[str, tuple[Any, ...]]:
        return {name: levels for name in names if (levels := self._levels(name)) is not None}

    def _bounds(self, names: Sequence[str]) -> dict[str, tuple[float, float]]:
        return {name: bounds for name in names if (bounds := self._bounds_of(name)) is not None}

    def _find_scales(self, names: Sequence[str]) -> dict[str, DateScale]:
        """Return how the card counts the dates of each column of dates."""
        scales = {name: DateScale.of_card(self._column(name)) for name in names}
        return {name: scale for name, scale in scales.items() if scale is not None}

    def _make_points(
        self, frame: pd.DataFrame, weights: Floats, n_rows: float, **more: Any
    ) -> Points:
        """Return points of which the card says the levels, the bounds and the cells."""
        columns = {name: self._column(name) for name in frame.columns}
        ends = {
            name: cell_ends(column, frame[name])
            for name, column in columns.items()
            if "edges" in column
        }
        return Points(
            frame=frame,
            weights=weights,
            n_rows=n_rows,
            levels=self._level_map(list(columns)),
            ends=ends,
            bounds=self._bounds(list(columns)),
            **{"sampling": 1.0 / n_rows, **more},
        )

    def _count_rows(self, weights: Floats) -> float:
        """Return the number of rows that the card gives, or the weights do."""
        return self.content["n_rows"]["value"] or float(weights.sum())

    def _list_cells(self, names: Sequence[str]) -> pd.DataFrame:
        """Return a point of each cell of some columns' table, in the order of the card."""
        lines = [list_cells(self._column(name)) for name in names]
        return pd.DataFrame(list(itertools.product(*lines)), columns=list(names))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class KeptColumns(OpenedPoints):
    """A release of rows: its kept columns are exact, and their errors are those of drawing the rows."""

    def _points(self, *names: str) -> Points:
        frame = self._read(names)
        with read_as_python(*names):
            levels = {
                name: values for name in names if (values := list_values(frame[name])) is not None
            }
            dates = find_scales(frame)
        return Points(
            frame=frame,
            weights=np.ones(len(frame)),
            n_rows=float(self.n_rows),
            sampling=1.0 / self.n_rows,
            levels=levels,
            limits=self._limits_of_units(),
            dates=dates,
        )


@contextmanager
def read_as_python(*names: str) -> Iterator[None]:
    """Refuse kept columns whose values, such as dates after the year 9999, Python cannot hold."""
    try:
        yield
    except (pa.ArrowException, NotImplementedError, OverflowError):
        what = "holds values that Python cannot hold, so no question about it is answered"
        raise SpecError(
            what, f"column {' or '.join(map(repr, names))}", "use to_pandas(), and convert it"
        ) from None
