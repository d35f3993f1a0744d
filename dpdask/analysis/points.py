"""Estimates from released records, cells or tables: weighted averages, and how far sampling and noise move them.

A weighted average moves by the average of its influence function. Drawing rows gives that a
variance in proportion to its spread over the points; noise in the counts gives it the sum of its
squares over the noisy cells, times the noise of one cell.
"""

from __future__ import annotations

import itertools
import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import combinations_with_replacement
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import pyarrow as pa
from numpy.typing import NDArray

from dpdask.analysis.opened import (
    DateScale,
    OpenedRelease,
    Result,
    check_no_dates,
    check_no_groups,
    check_one,
    check_probabilities,
    find_scales,
)
from dpdask.errors import SpecError
from dpdask.inference import WeightedSample, least_squares, quantile
from dpdask.inference.tallies import level_codes

Floats = NDArray[np.float64]
WIDE = "the mean of a heavy tail cannot be estimated under wide bounds; use quantile()"
LOOSE = "the bound on the bias is larger than half of the mean itself, as under bounds that are far too wide; use quantile()"
WITHOUT_NULLS = "rows without a value are left out"
_INSIDE = "an edge lies inside a cell, whose rows all count on one side of it, so only the bias bound tells how far off this is; use edges of cells"
_SLOPE = "no bound on the bias of a slope is known: if most values of a column lie in a few ranges, it can be many times too small or too large"
_EQUAL = "groups whose released values are all equal have no standard error: a few rows do not tell how far values spread"
_SHARED = "all ranks within a standard error have this value, which many rows share: it has no standard error, but an interval by ranks"
_STILL = 1e-12  # of the numbers: values that differ by less differ by rounding alone
_POINT = "this is the point of a cell: only the bias bound tells how far off it is"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NoisyCells:
    """The cells that noise was added to, as far as they matter for some columns.

    Attributes
    ----------
    frame
        A point of each cell.
    variance
        Of the noise of one, as a share of the rows.
    sizes
        How many cells of this variance each point stands for, float64 array; None: one each.
    """

    frame: pd.DataFrame
    variance: float
    sizes: Floats | None = None

    def add(self, chosen: NDArray[np.int64], n: int, values: Floats | float = 1.0) -> Floats:
        """Return the sum of values over the cells of each of n groups; those of another number are in none.

        Parameters
        ----------
        chosen
            The group of each point.
        n
            How many groups there are.
        values
            Of each point.
        """
        weights = np.ones(len(self.frame)) if self.sizes is None else self.sizes
        inside = chosen < n
        return np.bincount(chosen[inside], weights=(weights * values)[inside], minlength=n).astype(
            np.float64
        )

    @property
    def n_cells(self) -> float:
        """How many there are."""
        return float(len(self.frame) if self.sizes is None else self.sizes.sum())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Points:
    """Released points with weights, and what their error is made of.

    Attributes
    ----------
    frame
        The points, by column; a null is missing.
    weights
        float64 array of shape (n,): counts of rows, which may be negative.
    n_rows
        How many rows the table has, or has about.
    sampling
        What the variance of one value is multiplied by: 1 / rows for a table of rows, more where
        records were drawn once more.
    levels
        The levels of each column that has levels; of others nothing.
    ends
        By column, the least and the greatest value that a point's rows may have, float64 arrays of
        shape (n,), NaN of a null; no column if points are the rows' values.
    rank_errors
        By column, how far the rank of a released value may be off.
    bounds
        By column, the declared bounds.
    noise
        The noisy cells of some columns; None if no noise was added to counts.
    rank_noise
        By column of numbers, at most what standard deviation the noise of the counts gives the
        share of a range, where its cells are not told.
    lost
        What share of the rows may be in cells that were left out, or counted where there are none.
    biased
        Whether there is a bias that no bound is known of.
    spread
        Whether values that many rows share are spread over gaps, whose width is not known.
    limits
        What an estimate leaves out, in words.
    dates
        By column of dates, how its numbers count them.
    """

    frame: pd.DataFrame
    weights: Floats
    n_rows: float
    sampling: float
    levels: Mapping[str, Sequence[object]]
    ends: Mapping[str, tuple[Floats, Floats]] = field(default_factory=dict)
    rank_errors: Mapping[str, float] = field(default_factory=dict)
    bounds: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    noise: Callable[[Sequence[str]], NoisyCells] | None = None
    rank_noise: Mapping[str, float] = field(default_factory=dict)
    lost: float = 0.0
    biased: bool = False
    spread: bool = False
    limits: tuple[str, ...] = ()
    dates: Mapping[str, DateScale] = field(default_factory=dict)

    def mean(self, name: str, by: str | None = None, values: Floats | None = None) -> Result:
        """Return the mean of a column, or its means in the groups of another one; rows without a value are left out.

        Parameters
        ----------
        name
            A column of numbers.
        by
            A column of levels.
        values
            A number for each level, NaN to leave its rows out; None: the column's own numbers.
        """

        def number(frame: pd.DataFrame) -> Floats:
            return (
                _to_numbers(frame[name], name)
                if values is None
                else values[_find_levels(frame[name], self._levels_of(name), name)]
            )

        groups = self._levels_of(by) if by is not None else [None]
        code = (
            np.zeros(len(self.frame), dtype=np.int64)
            if by is None
            else _find_levels(self.frame[by], groups, by)
        )
        x, n_groups = number(self.frame), len(groups)
        here = np.isfinite(x)
        x, code, weights = x[here], code[here], self.weights[here] / self.weights.sum()

        def add(values: Floats, code: NDArray[np.int64]) -> Floats:
            return np.bincount(code, weights=values, minlength=n_groups).astype(np.float64)

        with np.errstate(invalid="ignore", divide="ignore"):
            share = add(weights, code)
            share = np.where(share > 0.0, share, np.nan)  # noise alone may weigh less than nothing
            mean = add(weights * x, code) / share
            variance = (
                self.sampling
                * np.maximum(add(weights * (x - mean[code]) ** 2, code), 0.0)
                / share**2
            )
            if self.noise is not None:
                cells = self.noise([name] if by is None else [name, by])
                numbers = number(cells.frame)
                inside = np.isfinite(numbers)
                place = (
                    np.zeros(len(numbers), dtype=np.int64)
                    if by is None
                    else _find_levels(cells.frame[by], groups, by)
                )
                apart = np.where(inside, numbers - mean[place], 0.0)
                variance = (
                    variance + cells.variance * cells.add(place, n_groups, apart**2) / share**2
                )
            if name in self.rank_noise and len(
                x
            ):  # a mean is the integral of ranks over the released range
                variance = variance + (self.rank_noise[name] * np.ptp(x) / share) ** 2
            bias = (
                add(np.abs(weights) * self._shift(name)[here], code) + self._mean_shift(name)
            ) / share
        if by is None and np.isnan(share).all():
            raise SpecError(
                "no weight above 0 is left for rows with a value",
                f"column {name!r}",
                "release with a larger epsilon",
            )
        error = np.sqrt(variance)
        still = error <= _STILL * np.abs(x).max(initial=0.0)
        parts = (mean, np.where(still, np.nan, error), bias)
        limits = self.limits if here.all() else (*self.limits, WITHOUT_NULLS)
        limits = (*limits, _EQUAL) if still.any() else limits
        if (
            self.biased and values is None and name not in self.levels
        ):  # noise puts rows anywhere between the bounds
            limits = (*limits, WIDE)
        if (bias > np.abs(mean) / 2.0).any() and values is None and name not in self.levels:
            limits = (*limits, LOOSE)
        if by is None:
            found = self._result(*self._tell(name, *(float(part[0]) for part in parts)))
            found = replace(found, standard_error=None) if still.any() else found
        else:
            index = pd.Index(list(groups), name=by)
            found = self._result(*(pd.Series(part, index) for part in self._tell(name, *parts)))
        return replace(found, limits=limits)

    def share(self, name: str) -> Result:
        """Return the share of each level of a column."""
        levels = self._levels_of(name)
        p = self._add(_find_levels(self.frame[name], levels, name), len(levels))
        cells = None if self.noise is None else self.noise([name])
        n_in = (
            None
            if cells is None
            else cells.add(_find_levels(cells.frame[name], levels, name), len(levels))
        )
        index = pd.Index(list(levels), name=name)
        return self._result(
            *(
                pd.Series(part, index)
                for part in (p, self._share_error(p, n_in, cells), self._lost_of(p))
            )
        )

    def histogram(self, name: str, edges: Floats) -> Result:
        """Return how many rows lie in each range [edge, next edge); the last holds its upper edge too.

        Parameters
        ----------
        name
            A column of numbers.
        edges
            float64 array, increasing.
        """

        def cut(values: Floats) -> NDArray[np.int64]:
            place = np.searchsorted(edges, values, side="right") - 1
            place[values == edges[-1]] = len(edges) - 2
            return np.where(
                (values < edges[0]) | (values > edges[-1]) | np.isnan(values), len(edges) - 1, place
            )

        x, n = self._numbers(name), len(edges) - 1
        p = self._add(cut(x), n + 1)[:n]
        cells = None if self.noise is None else self.noise([name])
        n_in = None if cells is None else cells.add(cut(_to_numbers(cells.frame[name], name)), n)
        near, around = np.array(
            [self._cut(name, edge, edge == edges[-1], cells) for edge in edges]
        ).T
        bias = near[:-1] + near[1:] + 2.0 * self.rank_errors.get(name, 0.0) + self._lost_of(p)
        breaks = self.dates[name].to_dates(edges) if name in self.dates else edges
        index = pd.IntervalIndex.from_breaks(breaks, closed="left", name=name)
        error = np.hypot(self._share_error(p, n_in, cells), self.rank_noise.get(name, 0.0))
        parts = (p, np.sqrt(error**2 + around[:-1] + around[1:]), bias)
        found = self._result(*(pd.Series(self.n_rows * part, index) for part in parts))
        return replace(found, limits=(*found.limits, _INSIDE)) if near.any() else found

    def quantile(self, name: str, q: float) -> Result:
        """Return a quantile of a column of numbers.

        Parameters
        ----------
        name
            The column.
        q
            Its probability, in (0, 1).
        """
        x = self._numbers(name)
        here = np.isfinite(x)
        x, weights = x[here], self.weights[here]
        value = quantile(x, weights, q)
        known = float(
            weights.sum() / self.weights.sum()
        )  # its rank is one among the rows with a value
        p = np.array([float(weights[x <= value].sum() / weights.sum())])
        cells = None if self.noise is None else self.noise([name])
        numbers = np.zeros(0) if cells is None else _to_numbers(cells.frame[name], name)
        n_in = None if cells is None else cells.add((~(numbers <= value)).astype(np.int64), 1)
        n_known = None if cells is None else cells.add(np.isnan(numbers).astype(np.int64), 1)[0]
        of_share = float(self._share_error(p, n_in, cells, known, n_known)[0])
        of_rank = math.hypot(of_share, self.rank_noise.get(name, 0.0) / known)

        def move(by: float, at: Callable[[float], float]) -> tuple[float, float]:
            low, high = (float(np.clip(q + side * by, 1e-12, 1.0 - 1e-12)) for side in (-1, 1))
            return at(low), at(high)

        def point_at(rank: float) -> float:
            return quantile(x, weights, rank)

        at = self._spread_quantile(name) if name in self.ends else point_at
        low, high = move(of_rank, at)
        rank_error = (self.rank_errors.get(name, 0.0) + self.lost) / known
        bias = max(abs(end - value) for end in move(rank_error, point_at)) if rank_error else 0.0
        shift = float(self._shift(name)[here][x == value].max(initial=0.0))
        error = (high - low) / 2.0

        def find_ends(deviations: float) -> tuple[Any, Any]:
            ends = move(deviations * of_rank, at)
            return tuple(
                self._tell(name, end, 0.0, 0.0)[0]
                for end in (min(ends[0], value), max(ends[1], value))
            )

        found = replace(
            self._result(*self._tell(name, value, error, bias + shift)), find_ends=find_ends
        )
        limits = found.limits if here.all() else (*found.limits, WITHOUT_NULLS)
        if error <= _STILL * np.abs(x).max(initial=0.0):
            return replace(found, standard_error=None, limits=(*limits, _SHARED))
        return replace(found, limits=(*limits, _POINT) if shift > 0.0 else limits)

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
        """Return how many rows have each pair of levels, a DataFrame.

        Parameters
        ----------
        first, second
            The columns of its rows and of its columns.
        """
        levels = [self._levels_of(name) for name in (first, second)]
        sizes = [len(own) for own in levels]

        def code(frame: pd.DataFrame) -> NDArray[np.int64]:
            one, two = (
                _find_levels(frame[name], own, name)
                for name, own in zip((first, second), levels, strict=True)
            )
            return one * sizes[1] + two

        p = self._add(code(self.frame), math.prod(sizes))
        cells = None if self.noise is None else self.noise([first, second])
        n_in = None if cells is None else cells.add(code(cells.frame), len(p))
        index, columns = (
            pd.Index(list(own), name=name)
            for name, own in zip((first, second), levels, strict=True)
        )
        parts = (p, self._share_error(p, n_in, cells), self._lost_of(p))
        return self._result(
            *(pd.DataFrame(self.n_rows * part.reshape(sizes), index, columns) for part in parts)
        )

    def slope(self, response: str, features: Sequence[str]) -> Result:
        """Return the slopes of least squares of a column of numbers on others, a Series; rows that lack one of them are left out.

        Parameters
        ----------
        response
            What is explained.
        features
            What explains it.
        """
        names = [response, *features]
        check_no_dates(names, self.dates)
        table = np.column_stack([self._numbers(name) for name in names])
        here = np.isfinite(table).all(axis=1)
        table, weights = table[here], self.weights[here]
        known = float(
            weights.sum() / self.weights.sum()
        )  # averages are of the rows that have all columns
        beta = least_squares(
            WeightedSample(features=table[:, 1:], response=table[:, 0], weights=weights)
        )[1:]
        share = weights / weights.sum()
        centre = share @ table
        z = table - centre
        inverse = np.linalg.inv((z[:, 1:] * share[:, None]).T @ z[:, 1:])
        influence = (z[:, 1:] @ inverse) * (z[:, 0] - z[:, 1:] @ beta)[:, None]
        variance = self.sampling / known * np.maximum(share @ influence**2, 0.0)
        if self.noise is not None:
            variance = variance + self._noise_of_slope(names, centre, beta, inverse) / known**2
        index = pd.Index(list(features))
        bias = None if self.ends or self.rank_errors else np.zeros(len(beta))
        found = self._result(
            pd.Series(beta, index),
            pd.Series(np.sqrt(variance), index),
            None if bias is None else pd.Series(bias, index),
        )
        return replace(found, limits=(*found.limits, _SLOPE)) if self.ends else found

    def _noise_of_slope(
        self, names: Sequence[str], centre: Floats, beta: Floats, inverse: Floats
    ) -> Floats:
        """Return the noise's part of the slopes' variances: a slope is a sum of products of two columns, and each pair has its own table.

        The parts of the pairs are added as standard deviations, which is never too small.
        """
        assert self.noise is not None
        ahead = np.append(1.0, -beta)  # the residual is Σ ahead_j z_j
        total = np.zeros(len(beta))
        for one, two in combinations_with_replacement(range(len(names)), 2):
            cells = self.noise([names[one]] if one == two else [names[one], names[two]])
            a, b = (_to_numbers(cells.frame[names[k]], names[k]) - centre[k] for k in (one, two))
            weight = np.zeros(len(beta))  # of z_one z_two in the influence of each slope
            for left, right in {(one, two), (two, one)}:
                if left:
                    weight += inverse[left - 1] * ahead[right]
            total += np.abs(weight) * math.sqrt(
                cells.variance
                * cells.add(np.zeros(len(a), dtype=np.int64), 1, np.nan_to_num(a * b) ** 2)[0]
            )
        return total**2

    def _tell(self, name: str, estimate: Any, error: Any, bias: Any) -> tuple[Any, Any, Any]:
        """Return an estimate of a column, its error and its bias; of dates a date and two spans of time."""
        scale = self.dates.get(name)
        if scale is None:
            return estimate, error, bias
        found = (
            scale.to_dates(np.atleast_1d(estimate)),
            *(scale.to_spans(np.atleast_1d(part)) for part in (error, bias)),
        )
        return found if np.ndim(estimate) else (found[0][0], found[1][0], found[2][0])

    def _levels_of(self, name: str) -> Sequence[object]:
        if name not in self.levels:
            raise SpecError(
                "is a column of numbers, without levels",
                f"column {name!r}",
                "use histogram(), mean() or quantile()",
            )
        return self.levels[name]

    def _numbers(self, name: str) -> Floats:
        return _to_numbers(self.frame[name], name)

    def _shift(self, name: str) -> Floats:
        """Return how far a row may be from its point."""
        if name not in self.ends:
            return np.zeros(len(self.frame))
        x, (low, high) = self._numbers(name), self.ends[name]
        return np.where(np.isnan(x), 0.0, np.maximum(x - low, high - x))

    def _mean_shift(self, name: str) -> float:
        """Return how far an error of ranks, and rows beyond the kept ones, may move a mean: that part of the bounds' distance."""
        low, high = self.bounds.get(name, (0.0, math.inf))
        rank_error = self.rank_errors.get(name, 0.0)
        return (rank_error + self.lost) * (high - low) if rank_error else 0.0

    def _lost_of(self, p: Floats) -> Floats:
        """Return how far rows that are lost may move shares."""
        bias: Floats = self.lost * np.maximum(p, 1.0 - p)
        return bias

    def _cut(
        self, name: str, edge: float, is_last: bool, cells: NoisyCells | None
    ) -> tuple[float, float]:
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
        if cells is not None and cut.any():
            x = _to_numbers(cells.frame[name], name)
            inside = (low[cut].min() <= x) & (x <= high[cut].max())
            variance += cells.variance * float(cells.add(np.where(inside, 0, 1), 1)[0])
        return share, variance

    def _add(self, code: NDArray[np.int64], n: int) -> Floats:
        shares: Floats = np.bincount(code, weights=self.weights, minlength=n) / self.weights.sum()
        return shares

    def _share_error(
        self,
        p: Floats,
        n_in: Floats | None,
        cells: NoisyCells | None,
        known: float = 1.0,
        n_known: float | None = None,
    ) -> Floats:
        """Return the standard errors of shares among the `known` part of the rows, which `n_known` cells hold.

        Such a share is a ratio A / B of two noisy sums. By the delta method its variance is that of
        A - p B, over B²: each cell of the share counts with (1 - p)², each other one of B with p².
        """
        least = min(
            0.5, 1.0 / (self.n_rows * known)
        )  # of a level without released rows, the share is not known to be 0
        spread = np.clip(p, least, 1.0 - least)
        variance = self.sampling * spread * (1.0 - spread) / known
        if cells is not None and n_in is not None:
            others = (cells.n_cells if n_known is None else n_known) - n_in
            variance = (
                variance + cells.variance * (n_in * (1.0 - p) ** 2 + others * p**2) / known**2
            )
        error: Floats = np.sqrt(variance)
        return error

    def _result(self, estimate: object, error: object, bias: object) -> Result:
        parts = np.asarray(bias)
        known = bias is not None and bool(
            np.isfinite(parts).all() if parts.dtype.kind == "f" else not pd.isna(parts).any()
        )  # or spans of time
        unknown = self.biased or self.spread or not known
        return Result(
            estimate=estimate,
            standard_error=error,
            bias_bound=None if unknown else bias,
            limits=self.limits,
        )


def _find_levels(values: pd.Series, levels: Sequence[object], name: str) -> NDArray[np.int64]:
    """Return the place of each value among the levels; each different value is looked up once."""
    codes, found = pd.factorize(values, use_na_sentinel=False)
    places: NDArray[np.int64] = level_codes(found, levels, name)[codes]
    return places


def _to_numbers(values: pd.Series, name: str) -> Floats:
    """Return a column as float64, nulls as NaN; refuse one that is not numeric."""
    scale = DateScale.of(values)
    if scale is not None:
        return scale.to_numbers(values)
    try:
        numbers: Floats = pd.to_numeric(values).to_numpy(dtype=np.float64, na_value=np.nan)
    except (TypeError, ValueError):
        raise SpecError(
            "does not hold numbers", f"column {name!r}", "use share() or crosstab()"
        ) from None
    return numbers


def check_features(question: str, response: str, features: Sequence[str]) -> None:
    """Check the columns of a regression.

    Parameters
    ----------
    question
        Where the check is made, for messages.
    response, features
        The columns.

    Raises
    ------
    SpecError
        If there is no feature, or a column is named twice.
    """
    if not features:
        raise SpecError(
            "a regression needs a column that explains",
            question,
            "name one or more after the response",
        )
    check_distinct(question, [response, *features])


def check_distinct(question: str, names: Sequence[str]) -> None:
    """Check that no column is named twice, and each by itself.

    Parameters
    ----------
    question
        Where the check is made, for messages.
    names
        The columns.

    Raises
    ------
    SpecError
        If one is, or a list stands for one.
    """
    for name in names:
        check_one(name, question)
    if len(set(names)) < len(names):
        raise SpecError("a column is named twice", question, "name each column once")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class OpenedPoints(OpenedRelease):
    """A release whose estimates are weighted averages."""

    @abstractmethod
    def _points(self, *names: str) -> Points:
        """Return the points of some columns."""

    def mean(
        self, column: str, *, by: str | None = None, values: Sequence[float] | None = None
    ) -> Result:
        """Return the mean of a column; see `OpenedRelease.mean`."""
        names = [column] if by is None else [column, by]
        check_distinct("mean", names)
        return self._points(*names).mean(column, by, self._level_values(column, values))

    def share(self, column: str, *, by: str | None = None) -> Result:
        """Return the share of each level of a column; see `OpenedRelease.share`."""
        check_no_groups("share", column, by)
        return self._points(column).share(column)

    def histogram(self, column: str, bins: int | Sequence[float] = 20) -> Result:
        """Return how many rows lie in each range of a column of numbers; see `OpenedRelease.histogram`."""
        points = self._points(column)
        return points.histogram(column, self._edges(column, bins, points.dates.get(column)))

    def quantile(
        self, column: str, q: float | Sequence[float] = 0.5, *, by: str | None = None
    ) -> Result:
        """Return a quantile of a column of numbers, or several; see `OpenedRelease.quantile`."""
        check_no_groups("quantile", column, by)
        probabilities, points = check_probabilities(q), self._points(column)
        found = [points.quantile(column, each) for each in probabilities]
        return (
            found[0] if np.ndim(q) == 0 else Result.gather(found, pd.Index(probabilities, name="q"))
        )

    def crosstab(self, first: str, second: str) -> Result:
        """Return how many rows have each pair of levels; see `OpenedRelease.crosstab`."""
        check_distinct("crosstab", [first, second])
        return self._points(first, second).crosstab(first, second)

    def slope(self, response: str, *features: str) -> Result:
        """Return the slopes of a linear regression; see `OpenedRelease.slope`."""
        check_features("slope", response, features)
        return self._points(response, *features).slope(response, features)

    def _answers(self, name: str) -> set[str]:
        partners, levels = self._partners(name), self._levels(name)
        found = (
            set()
            if levels is None
            else {
                "share",
                *(
                    ["crosstab"]
                    if any(self._levels(other) is not None for other in partners)
                    else []
                ),
            }
        )
        if levels is not None and not self._has_numbers(name):
            return found
        explained = self._may_explain(name) and any(self._may_explain(other) for other in partners)
        return found | {"mean", "histogram", "quantile"} | ({"slope"} if explained else set())

    def _may_explain(self, name: str) -> bool:
        """Return whether a column has numbers that a slope can be made of."""
        return (
            not self._is_of_dates(name) if self._levels(name) is None else self._has_numbers(name)
        )

    def _has_numbers(self, name: str) -> bool:
        """Return whether a column's levels are numbers, and no mere codes."""
        levels = self._levels(name) or ()
        return self._column(name).get("kind") != "categorical" and all(
            isinstance(level, int | float) for level in levels if level is not None
        )

    def _is_of_dates(self, name: str) -> bool:
        """Return whether a column without levels holds dates, as its first shard says."""
        return name in self._types.names and pa.types.is_temporal(self._types.field(name).type)

    def _level_map(self, names: Sequence[str]) -> Mapping[str, tuple[Any, ...]]:
        return {name: levels for name in names if (levels := self._levels(name)) is not None}

    def _bounds(self, names: Sequence[str]) -> dict[str, tuple[float, float]]:
        return {
            name: (float(bounds[0]), float(bounds[1]))
            for name in names
            if (bounds := self._column(name).get("bounds"))
        }


_MOST_LEVELS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class KeptColumns(OpenedPoints):
    """A release of rows: its kept columns are exact, and their errors are those of drawing the rows."""

    def _is_kept(self, *names: str) -> bool:
        return all(self._column(name)["role"] == "kept" for name in names)

    def _points(self, *names: str) -> Points:
        frame = self.to_pandas(names)
        with read_as_python(*names):
            levels, dates = (
                {
                    name: levels
                    for name in names
                    if (levels := _list_values(frame[name])) is not None
                },
                find_scales(frame),
            )
        return Points(
            frame=frame,
            weights=np.ones(len(frame)),
            n_rows=float(self.n_rows),
            sampling=1.0 / self.n_rows,
            levels=levels,
            limits=self._limits_of_units(),
            dates=dates,
        )

    def _limits_of_units(self) -> tuple[str, ...]:
        unit = self.content["guarantee"]["unit"]
        return (
            (f"rows that share a {unit['column']!r} are taken to be independent",)
            if isinstance(unit, dict)
            else ()
        )

    def _answers(self, name: str) -> set[str]:
        type_ = self._types.field(name).type if name in self._types.names else pa.null()
        numbers = pa.types.is_integer(type_) or pa.types.is_floating(type_)
        own = (
            {"mean", "histogram", "quantile"}
            if numbers or pa.types.is_date(type_) or pa.types.is_timestamp(type_)
            else set()
        )
        return {"share", "crosstab"} | own | ({"slope"} if numbers else set())


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


def _list_values(column: pd.Series) -> Sequence[object] | None:
    """Return the different values of a kept column; None if there are too many."""
    found = column.unique()
    if len(found) > _MOST_LEVELS:
        return None
    values = sorted(found[pd.notna(found)].tolist())
    return [*([None] if column.hasnans else []), *values]


_RECORDS = (
    "standard errors add up the draw of the rows, the noise of the tables before they were smoothed, and the draw of the records",
    "what the model leaves out is not in them, and no bound on it is known: dependence of three columns, and where values lie inside a cell",
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class OpenedRecords(OpenedPoints):
    """Synthetic records: ordinary estimates are right, but their ordinary standard errors are too small, since counts had noise."""

    refusals: ClassVar[Mapping[str, tuple[str, str]]] = {
        "npmle": ("the release holds values, not ranges", "use share(), histogram() or quantile()"),
        "regress": ("the release holds values, not ranges", "use slope()"),
        "fit": (
            "the records carry no weights, and their noise cannot be redrawn from the folder",
            "use slope(), or to_pandas(), whose errors leave the noise out",
        ),
    }

    def _points(self, *names: str) -> Points:
        levels = self._level_map(names)
        frame, columns = self.to_pandas(names), {name: self._column(name) for name in names}
        n_rows = self.content["n_rows"]["value"] or float(self.n_rows)
        return Points(
            frame=frame,
            weights=np.ones(self.n_rows),
            n_rows=n_rows,
            sampling=1.0 / n_rows + 1.0 / self.n_rows,
            levels=levels,
            ends={
                name: cell_ends(column, frame[name])
                for name, column in columns.items()
                if "edges" in column
            },
            bounds=self._bounds(names),
            noise=lambda chosen: self._noise(chosen, n_rows),
            biased=len(names) > 1
            or self.content["mechanism"]["kind"]
            != "copula",  # a model, or cells that were left out
            limits=_RECORDS,
            dates=find_scales(frame),
        )

    def _noise(self, names: Sequence[str], n_rows: float) -> NoisyCells:
        """Return the cells of the noisy table of one or two columns."""
        lines = {name: list_cells(self._column(name)) for name in names}
        frame = pd.DataFrame(list(itertools.product(*lines.values())), columns=list(lines))
        mechanism, noise = self.content["mechanism"], self.content["accounting"]["noise"]
        if mechanism["kind"] == "copula":
            deviation, n_added = (
                noise["one_way" if len(names) == 1 else "two_way"]["standard_deviation"],
                1.0,
            )
        else:  # a cell of these columns is a sum over the cells of the others that are listed
            deviation, n_added = (
                noise["cells"]["standard_deviation"],
                max(1.0, mechanism["cells_listed"] / len(frame)),
            )
        return NoisyCells(frame=frame, variance=n_added * (deviation / n_rows) ** 2)


def list_cells(column: Mapping[str, Any]) -> list[object]:
    """Return a value in each cell of a column of a card: its levels; or null, the atoms, and the middles of the ranges."""
    if "levels" in column:
        return list(column["levels"])
    edges = np.array(column["edges"], dtype=np.float64)
    single: list[object] = [math.nan] if column["nulls"] == "level" else []
    return [*single, *column["atoms"], *((edges[:-1] + edges[1:]) / 2.0).tolist()]


def cell_ends(column: Mapping[str, Any], values: pd.Series) -> tuple[Floats, Floats]:
    """Return the least and the greatest value of the cell of each value of a column with edges; of an atom both are itself."""
    scale, edges = DateScale.of(values), np.array(column["edges"], dtype=np.float64)
    x = (
        values.to_numpy(dtype=np.float64, na_value=np.nan)
        if scale is None
        else scale.to_numbers(values)
    )
    cell = np.clip(np.searchsorted(edges, x, side="left") - 1, 0, len(edges) - 2)
    single = np.isnan(x) | np.isin(x, np.array(column["atoms"], dtype=np.float64))
    # of whole numbers the first edge lies one below the bound: a cell does not hold its lower edge
    step = 0.0 if column["bounds"] is None else float(column["bounds"][0]) - edges[0]
    above = np.where(np.isfinite(edges[:-1]), np.nextafter(edges[:-1], np.inf), edges[:-1])
    least = edges[:-1] + step if step > 0.0 else above
    low, high = np.minimum(least[cell], x), np.maximum(edges[cell + 1], x)
    return np.where(single, x, low), np.where(single, x, high)
