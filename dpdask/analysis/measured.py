"""Answers about one column from the noisy counts that were drawn of it: linear estimates, which no model bends."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from dpdask.analysis.results import MANY, Result, clip_to
from dpdask.analysis.values import DateScale, in_units, index_ranges
from dpdask.arrays import Ends, Floats, Triple, freeze_class
from dpdask.errors import SpecError
from dpdask.inference.measured import NORMAL_95, Linear, MeasuredColumn
from dpdask.references.counts import AGAIN, label_table

WITHOUT_NULLS = "rows without a value are left out"
_SURELY = 3.0  # standard deviations on each side of ends that nearly always hold a quantile
_CUT = "an edge lies inside a cell, whose rows are taken to lie evenly in it; the bound on the bias is for any place of them"


@freeze_class(eq=False)
class MeasuredAnswers:
    """The questions that `Points` answers, for one column."""

    column: MeasuredColumn
    levels: Sequence[object] | None  # of a column with levels
    dates: Mapping[str, DateScale]  # of a column of dates
    limits: tuple[str, ...] = ()

    def mean(
        self,
        name: str,
        *,
        values: Floats | None = None,
        within: Ends | None = None,
    ) -> Result:
        """Return the mean of a column; see `Points.mean`."""
        column = self.column
        found = column.mean(within) if values is None else column.mean_of(values)
        if math.isnan(found.estimate):
            raise _too_few(name)
        if values is None and within is None:
            self.check_mean(name)
        some_left_out = column.is_null.any() if values is None else np.isnan(values).any()
        limits = (*self.limits, *([WITHOUT_NULLS] if some_left_out else []))
        possible = within or column.range_of(values)
        found = replace(found, estimate=clip_to(found.estimate, possible))
        scale, none = self.dates.get(name), np.zeros(2)
        ends = in_units(scale, np.array(possible), none, none)[0].tolist()
        return replace(_gather([found], limits, scale=scale), possible=tuple(ends))

    def check_mean(self, name: str) -> None:
        """Refuse the mean of a column, not clipped, where it is not known."""
        if not self.knows_mean(name):
            what = "the bounds are so wide for the noise that the mean is not known: its interval would be as wide as most rows lie apart"
            use = f"use mean({name!r}, within=(low, high)), the mean of values clipped to where rows are, or quantile()"
            raise SpecError(what, f"mean({name})", use)

    def knows_mean(self, name: str) -> bool:
        """Return whether the noise moves the mean of a column, not clipped, less than half of what most rows are from each other, or the median is from 0.

        Neither depends on counts far out, so whether it is answered tells nothing of how far off it
        is: the noise of the mean is that of its weights, and of the quantiles those ends count that
        noise hardly ever moves outwards.
        """
        if name in self.dates:
            return True
        column = self.column
        if math.isnan(column.quantile(0.5)[0]):
            return True  # too few rows, which the question itself says
        ends = {p: column.quantile(p, _SURELY)[1:] for p in (0.01, 0.05, 0.5, 0.95, 0.99)}
        nine_tenths, nearly_all = (ends[1.0 - p][0] - ends[p][1] for p in (0.05, 0.01))
        low, high = ends[0.5]
        away = max(0.0, low, -high)
        centre = low if low > 0.0 else min(high, 0.0)
        # most rows may be equal, as many zeros: then the others count, as half as sure
        reach = max(nine_tenths, nearly_all / 2.0, away)
        return NORMAL_95 * column.mean_noise(centre) <= reach / 2.0

    def share(self, name: str) -> Result:
        """Return the share of each level; see `Points.share`."""
        assert self.levels is not None
        parts = [self.column.share(each) for each in np.eye(len(self.levels))]
        found = _gather(parts, self.limits, pd.Index(self.levels, name=name))
        return replace(found, drawn=(max(self.column.total, 1.0), 1.0))

    def histogram(self, name: str, edges: Floats) -> Result:
        """Return how many rows lie in each range; see `Points.histogram`."""
        parts, at_least, at_most = self.column.histogram(edges)
        index, n = index_ranges(edges, self.dates.get(name), name), max(self.column.total, 1.0)
        is_cut = any(part.bias_bound > 0.0 for part in parts)
        found = _gather(parts, (*self.limits, *([_CUT] if is_cut else [])), index)
        # where the number of all rows is noisy, too, a count is a sum, and no share of it
        whole = n if self.column.n_rows is not None else MANY * n
        found = replace(found, drawn=(whole, whole))

        def find_ends(deviations: float) -> tuple[Any, Any]:
            # the rows of a cut cell may all be in the range, or none of them: with the error of that sum
            least, most = (
                replace(found, standard_error=pd.Series(error, index)).reach(deviations)
                for error in (at_least, at_most)
            )
            return least[0], most[1]

        return replace(found, find_ends=find_ends)

    def quantile(self, name: str, q: float) -> Result:
        """Return a quantile; see `Points.quantile`."""
        scale = self.dates.get(name)
        value = self.column.quantile(q)[0]
        if math.isnan(value):
            raise _too_few(name)

        def find_ends(deviations: float) -> tuple[Any, Any]:
            ends = self.column.quantile(q, deviations)[1:]
            low, high = (in_units(scale, end, 0.0, 0.0)[0] for end in ends)
            return low, high

        limits = (*self.limits, *([WITHOUT_NULLS] if self.column.is_null.any() else []))
        return Result(
            estimate=in_units(scale, value, 0.0, 0.0)[0],
            standard_error=None,  # half of the interval by ranks would be up to twice the spread
            limits=limits,
            find_ends=find_ends,
        )


def place_in_cells(
    fine: MeasuredColumn,
    low: Floats,
    high: Floats,
    usual: Floats,
    within: Ends,
) -> Triple:
    """Return the mean of the clipped values in the cell of each point, its standard error, and how much further off it may be, by the fine counts of all rows.

    Where these tell less, it is the usual one, which a model of them gives, in doubt by its distance
    from the nearer end (half of it, as a standard error): in a tail under wide bounds, the mean of the counts is mostly noise.
    It may then be as far off as two standard errors of that mean let it, within the cell.
    """
    values, doubts, beyond = np.clip(usual, *within), np.zeros(len(usual)), np.zeros(len(usual))
    middle = (fine.low + fine.high) / 2.0
    clipped = np.clip(np.nan_to_num(middle), *within)
    for first, last in {(a, b) for a, b in zip(low.tolist(), high.tolist(), strict=True) if a < b}:
        here = (low == first) & (high == last)
        inside = (middle >= first) & (middle <= last) & ~fine.is_single
        mean, error = fine.ratio(clipped * inside, inside.astype(float))
        least, most = np.clip((first, last), *within)
        own = float(usual[here][0])
        own = own if least < own < most else (least + most) / 2.0
        reach = min(own - least, most - own)
        known = error < reach / 2.0 and least <= mean <= most
        values[here], doubts[here] = (mean, error) if known else (own, reach / 2.0)
        if not known:
            most_off = max(own - least, most - own)
            off = abs(own - min(max(mean, least), most)) + 2.0 * error
            beyond[here] = most_off if math.isnan(mean) else min(off, most_off)
    return values, doubts, beyond


def average_margin(
    measured: Mapping[str, pa.Table], name: str, sizes: Mapping[str, int], n_rows: float | None
) -> MeasuredColumn | None:
    """Return the counts of the levels of a column by its own table and the sums of all its tables of two columns; None if there are none.

    `sizes` has the number of cells of each column.

    Each is weighted by its inverse variance, which is that of a count times those that are summed.
    """
    own, tables = measured.get(label_table(name)), []
    if own is not None:
        tables.append((own["count"].to_numpy(), own["standard_deviation"][0].as_py(), 1))
    for other in (each for each in sizes if each != name):  # in one order: sums are rounded
        pair = average_pair(measured, (name, other), [sizes[name], sizes[other]])
        if pair is not None:
            summed = pair[0].reshape(sizes[name], -1).sum(axis=1)
            tables.append((summed, math.sqrt(pair[1]), sizes[other]))
    if not tables:
        return None
    found, deviation = average_tables(tables)
    places = np.arange(len(found), dtype=float)
    return MeasuredColumn(
        low=places,
        high=places,
        is_null=np.zeros(len(found), bool),
        singles=np.zeros(0),
        levels=[found],
        deviation=deviation,
        n_rows=n_rows,
        is_whole=False,
    )


def average_tables(tables: Sequence[tuple[Floats, float, int]]) -> tuple[Floats, float]:
    """Return the averages of counts by inverse variance, and their standard deviation: of each table its counts, that of one count, and how many of them each is the sum of."""
    weights = np.array([1.0 / (deviation**2 * n) for _, deviation, n in tables])
    counts = weights @ np.array([each for each, *_ in tables])
    return counts / weights.sum(), float(weights.sum() ** -0.5)


def average_pair(
    measured: Mapping[str, pa.Table], pair: tuple[str, str], sizes: Sequence[int]
) -> tuple[Floats, float] | None:
    """Return the counts of the table of two columns, and the variance of their noise; None if it was not drawn.

    Measurements of one table are averaged by inverse variance.
    """
    found, weights = np.zeros(sizes[0] * sizes[1]), 0.0
    for names, shape in ((pair, sizes), (pair[::-1], sizes[::-1])):
        for end in ("", AGAIN):
            rows = measured.get(label_table(*names) + end)
            if rows is not None:
                table = rows["count"].to_numpy().astype(float).reshape(shape)
                weight = rows["standard_deviation"][0].as_py() ** -2
                found += weight * (table if names == pair else table.T).ravel()
                weights += weight
    return (found / weights, 1.0 / weights) if weights else None


def _gather(
    parts: Sequence[Linear],
    limits: tuple[str, ...],
    index: pd.Index | None = None,
    scale: DateScale | None = None,
) -> Result:
    """Return estimates as one result: of an index as Series."""
    table = [(each.estimate, each.standard_error, each.bias_bound) for each in parts]
    columns = np.array(table, float).T
    if index is None:
        estimate, error, bias = in_units(scale, *map(float, columns[:, 0]))
    else:
        estimate, error, bias = (pd.Series(each, index) for each in columns)
    return Result(estimate=estimate, standard_error=error, bias_bound=bias, limits=limits)


def _too_few(name: str) -> SpecError:
    what = "the rows with a value are too few to be told from the noise"
    return SpecError(what, f"column {name!r}", "release with a larger epsilon")
