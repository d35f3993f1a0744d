"""Answers of a table whose released rows are bounded by units, where the card publishes how many rows each stands for."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import pandas as pd

from dpdask.analysis.measured import WITHOUT_NULLS
from dpdask.analysis.results import Result, clip_to, find_half
from dpdask.analysis.values import (
    find_levels,
    find_ranges,
    index_ranges,
    list_values,
    to_numbers,
    without_levels,
)
from dpdask.arrays import Ends, Flags, Floats
from dpdask.errors import SpecError
from dpdask.inference.debias import ReleasedColumn
from dpdask.inference.m_estimators import quantile
from dpdask.inference.pseudo_values import MAX_CONDITION
from dpdask.inference.tallies import Codes
from dpdask.inference.units import WeightedRows

# numbers, their standard errors, those for intervals, and bounds on their biases
Parts: TypeAlias = Sequence[Floats]
_LIMITS = (100.0, 30.0, 10.0, 3.0)  # up to which directions of a channel are inverted
_SURELY = 3.0  # standard errors above 0 that the rows with a value have
_OF_TABLE = (
    "this is an estimate of the table: each row has the weight {weight!r}, which is published; "
    "standard errors assume that each {column!r} is independent of the others"
)
_UNKNOWN = (
    "no error is known of groups of one unit, of those in which it is not sure that any row has a value, and of levels that no row has or that "
    "the reference holds with probability 0"
)
_WORST = (
    "the noise hides a part of the answer: the bound on the bias is for the worst original values"
)


@dataclass(frozen=True, kw_only=True, eq=False)
class WeightedAnswers:
    """Estimates of the whole table: of kept columns, and of levels by their channels.

    That a channel leaves a distribution as it is holds for the bounded rows alone, so no released
    value is counted as it is.
    """

    # the columns that are asked about, those that choose channels, and the next two
    frame: pd.DataFrame
    unit: str
    weight: str
    released: Mapping[str, ReleasedColumn]  # by private column

    @cached_property
    def _rows(self) -> WeightedRows:
        codes, _ = pd.factorize(self.frame[self.unit])
        return WeightedRows(units=codes, weights=self.frame[self.weight].to_numpy(float))

    @property
    def _none(self) -> Codes:
        return np.zeros(len(self.frame), dtype=np.int64)

    def mean(
        self,
        name: str,
        by: str | None = None,
        *,
        values: Floats | None = None,
        within: Ends | None = None,
    ) -> Result:
        """Return the mean of a column, or those of the groups of a kept one; rows without a value are left out."""
        levels = self._levels(by) if by is not None else [None]
        groups = self._none if by is None else find_levels(self.frame[by], levels, by)
        if values is None:
            x = np.clip(to_numbers(self.frame[name], name), *(within or (None, None)))
            here, possible = np.isfinite(x), within
        else:
            here = np.isfinite(values)
            possible = (values[here].min(), values[here].max()) if here.any() else None

        def average(limit: float) -> Parts:
            if values is None:
                scores, known, off, absent = np.where(here, x, 0.0), here * 1.0, 0.0, 0.0
            else:
                scores, off = self._score(name, np.where(here, values, 0.0), limit)
                known, absent = self._score(name, here * 1.0, limit)
            value, error, wide = self._rows.average(scores, known, groups, len(levels))
            of_rows, _, doubt = self._rows.average(known, np.ones(len(known)), groups, len(levels))
            if not here.all():
                value = np.where(of_rows > _SURELY * np.nan_to_num(doubt), value, np.nan)
            with np.errstate(invalid="ignore", divide="ignore"):
                return value, error, wide, (off + np.abs(value) * absent) / of_rows

        index = None if by is None else pd.Index(levels, name=by)
        limits = [] if here.all() else [WITHOUT_NULLS]
        return self._tell(self._choose(average, name), index, limits, possible)

    def share(self, name: str) -> Result:
        """Return the share of each level of a column."""
        table = self._count_levels(name, self._none, 1)
        index = pd.Index(self._levels(name), name=name)
        return self._tell([part[0] for part in table], index)

    def count(self, name: str) -> Result:
        """Return how many rows of the table have each level of a kept column."""
        found = self.share(name)
        return replace(found.change(lambda part: self._rows.n_rows * part), drawn=None)

    def crosstab(self, first: str, second: str) -> Result:
        """Return how many rows of the table have each pair of levels."""
        index, columns = (pd.Index(self._levels(each), name=each) for each in (first, second))
        if first in self.released and second in self.released:
            table = self._count_pairs(first, second)
        else:
            own, kept = (first, second) if first in self.released else (second, first)
            levels = self._levels(kept)
            groups = find_levels(self.frame[kept], levels, kept)
            table = self._count_levels(own, groups, len(levels))
            table = [part.T for part in table] if own == first else table
        parts = [self._rows.n_rows * part for part in table]
        return self._tell(parts, index, columns=columns)

    def histogram(self, name: str, edges: Floats) -> Result:
        """Return how many rows of the table lie in each range [edge, next edge) of a kept column; the last holds its upper edge too."""
        x, n = to_numbers(self.frame[name], name), len(edges) - 1
        found = self._rows.share(np.ones(len(x)), find_ranges(x, edges), n + 1)
        parts = [self._rows.n_rows * part[:n] for part in found]
        return self._tell([*parts, np.zeros(n)], index_ranges(edges, None, name))

    def quantile(self, name: str, q: float) -> Result:
        """Return a quantile of a kept column, its interval by ranks (Woodruff 1952)."""
        x = to_numbers(self.frame[name], name)
        here = np.isfinite(x)
        own, weights = x[here], self._rows.weights[here]
        value = quantile(own, weights, q)
        below, known = (here & (x <= value)).astype(float), here.astype(float)
        of_rank = float(self._rows.average(below, known, self._none, 1)[2][0])

        def find_ends(deviations: float) -> Ends:
            ranks = (q - deviations * of_rank, q + deviations * of_rank)
            low, high = (
                quantile(own, weights, float(np.clip(rank, 1e-12, 1.0 - 1e-12))) for rank in ranks
            )
            return min(low, value), max(high, value)

        low, high = find_ends(1.0)
        limits = [] if here.all() else [WITHOUT_NULLS]
        error = np.array([(high - low) / 2.0])
        found = self._tell((np.array([value]), error, error, np.zeros(1)), None, limits)
        return replace(found, find_ends=find_ends)

    def slope(self, response: str, features: Sequence[str]) -> Result:
        """Return the slopes of least squares; rows that lack a kept column are left out.

        The square of a randomised column f is not that of its pseudo-value, but h with T h = f²:
        else its slope would be too flat (Carroll et al. 2006, chapter 7).
        """
        names = [response, *features]
        columns, squares = list[Floats](), dict[int, Floats]()
        for place, name in enumerate(names):
            if name not in self.released:
                columns.append(to_numbers(self.frame[name], name))
                continue
            values = np.array(self._levels(name), float)
            values = values - values.mean()
            columns.append(self._invert(name, values))
            squares[place] = self._invert(name, values**2)
        table = np.column_stack(columns)
        here: Flags = np.logical_and.reduce(np.isfinite(table), axis=1)
        centre = np.average(table[here], axis=0, weights=self._rows.weights[here])
        table = np.where(here[:, None], table - centre, 0.0)
        y, x = table[:, 0], np.column_stack([here.astype(float), table[:, 1:]])
        left, right = x[:, :, None] * x[:, None, :], x * y[:, None]
        for place, square in squares.items():
            if place:
                # E[(f - c)²] by pseudo-values: h - 2 c g + c², with g = column + c
                c = centre[place]
                left[:, place, place] = np.where(
                    here, square - 2.0 * c * (table[:, place] + c) + c**2, 0.0
                )
        try:
            parts = self._rows.solve(left, right)
        except np.linalg.LinAlgError:
            what = "the covariates are collinear, or are so without one unit"
            raise SpecError(what, "slope", "leave out one that the others determine") from None
        self._check_spread(left, squares, names)
        index = pd.Index(features)
        return self._tell([*(part[1:] for part in parts), np.zeros(len(features))], index)

    def _check_spread(
        self, left: Floats, squares: Mapping[int, Floats], names: Sequence[str]
    ) -> None:
        """Refuse a slope on a randomised column whose variance cannot be told from 0."""
        for place in squares:
            if place:
                value, _, error = self._rows.average(
                    left[:, place, place], left[:, 0, 0], self._none, 1
                )
                if not value[0] > _SURELY * error[0]:
                    what = "the variance of its original values cannot be distinguished from zero"
                    raise SpecError(what, f"column {names[place]!r}", "use more rows or a larger ε")

    def _levels(self, name: str) -> Sequence[object]:
        if name in self.released:
            return self.released[name].levels
        found = list_values(self.frame[name])
        if found is None:
            raise without_levels(name)
        return found

    def _codes(self, name: str) -> Codes:
        return find_levels(self.frame[name], self._levels(name), name)

    def _score(self, name: str, values: Floats, limit: float) -> tuple[Floats, float]:
        """Return for each row the value of its level, or its pseudo-value; and the largest bias that this may have.

        Directions of the channel beyond the limit are left out, and counted as bias.
        """
        if name not in self.released:
            return values[self._codes(name)], 0.0
        g, bias = replace(self.released[name], max_condition=limit).find_nearest(values)
        return self._at(name, g), bias

    def _choose(self, estimate: Callable[[float], Parts], *names: str) -> Parts:
        """Return the estimate with the narrowest intervals, the bounds on the bias in them: that of all directions, unless another is less than half as wide."""
        found = estimate(MAX_CONDITION)
        if not any(name in self.released for name in names):
            return found
        for limit in _LIMITS:
            other = estimate(limit)
            if 2.0 * find_half(*other[2:]) < find_half(*found[2:]):
                found = other
        return found

    def _invert(self, name: str, values: Floats) -> Floats:
        """Return the pseudo-value of each row; refuse those that the channel does not determine."""
        g = self.released[name].transform_for(values)
        return self._at(name, g if g.ndim == 2 else g[None])

    def _at(self, name: str, g: Floats) -> Floats:
        """Return the pseudo-value of each row, given those of each released level of the parent and of the own one."""
        parent = self.released[name].parent
        outer = (
            self._none
            if parent is None
            else find_levels(self.frame[parent[0]], parent[1], parent[0])
        )
        return g[outer, self._codes(name)]

    def _count_levels(self, name: str, groups: Codes, n: int) -> Parts:
        """Return the share of each level in each of n groups among all rows, of shape (n, levels), its error and its bias."""
        size = len(self._levels(name))
        seen = self.released[name].reference > 0 if name in self.released else np.ones(size, bool)
        of_group = self._rows.share(np.ones(len(groups)), groups, n)[0]

        def count(limit: float) -> Parts:
            value, error, wide, bias = np.zeros((4, n, size))
            for place in np.flatnonzero(seen):
                scores, off = self._score(name, np.eye(size)[place], limit)
                found = self._rows.share(scores, groups, n)
                value[:, place], error[:, place], wide[:, place] = found
                bias[:, place] = off * of_group
            return value, error, wide, bias

        return self._choose(count, name)

    def _count_pairs(self, first: str, second: str) -> Parts:
        """Return the share of each pair of levels of two columns, whose noise is independent given the original levels."""
        sizes = len(self._levels(first)), len(self._levels(second))
        of_first, of_second = (
            [
                self._invert(name, unit)
                for unit in np.diag((self.released[name].reference > 0) * 1.0)
            ]
            for name in (first, second)
        )
        value, error, wide = np.zeros((3, *sizes))
        for one, two in itertools.product(*map(range, sizes)):
            found = self._rows.share(of_first[one] * of_second[two], self._none, 1)
            value[one, two], error[one, two], wide[one, two] = (float(part[0]) for part in found)
        return value, error, wide, np.zeros(sizes)

    def _tell(
        self,
        parts: Parts,
        index: pd.Index | None,
        limits: Sequence[str] = (),
        possible: Ends | None = None,
        *,
        columns: pd.Index | None = None,
    ) -> Result:
        value, error, wide, bias = (np.asarray(part, float) for part in parts)
        # one of 0 is not known
        error, wide = (np.where(error > 0.0, each, np.nan) for each in (error, wide))
        limits = [_OF_TABLE.format(column=self.unit, weight=self.weight), *limits]
        if np.nan_to_num(bias).any():
            limits.append(_WORST)
        if np.isnan(error).any():
            limits.append(_UNKNOWN)
        shaped = [
            pd.DataFrame(part, index, columns)
            if columns is not None
            else pd.Series(part, index)
            if index is not None
            else float(part[0])
            for part in (value, error, wide, bias)
        ]
        estimate, doubt, margin, off = shaped
        if index is None and math.isnan(doubt):
            doubt = None
        if possible is not None:
            estimate = clip_to(estimate, possible)

        def find_ends(deviations: float) -> tuple[Any, Any]:
            return estimate - deviations * margin, estimate + deviations * margin

        return Result(
            estimate=estimate,
            find_ends=find_ends if doubt is not None else None,
            standard_error=doubt,
            bias_bound=off,
            limits=tuple(limits),
            of_table=True,
            possible=possible,
        )
