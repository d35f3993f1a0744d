"""Opened releases whose answers come from points with weights, or noisy counts; and their kept columns."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import pyarrow as pa

from dpdask.analysis.measured import MeasuredAnswers
from dpdask.analysis.opened import OpenedRelease
from dpdask.analysis.points import Points
from dpdask.analysis.results import Query, Result
from dpdask.analysis.values import (
    DateScale,
    NoisyCells,
    cell_ends,
    find_scales,
    follow_cells,
    index_ranges,
    list_cells,
    list_values,
    read_edges,
    read_within,
    without_levels,
)
from dpdask.arrays import Ends, Floats, Pair
from dpdask.errors import SpecError, list_names
from dpdask.inference.measured import MeasuredColumn
from dpdask.references.counts import label_table

_SHOWN = 12
_FIRST_RANGE = "the first range holds the lower bound, too"
AVERAGES = ("mean", "share", "histogram", "quantile", "crosstab", "slope")
_LINES = ("intercept", "r_squared")


class OpenedPoints(OpenedRelease):
    """A release whose estimates are weighted averages of points, or sums of noisy counts."""

    # whether shares of levels come from a column's own noisy counts, which no other table tells
    measures_levels: ClassVar[bool] = False
    # how many columns noisy tables have at most
    most_joined: ClassVar[int | None] = None

    def _points(self, *names: str) -> Points:
        """Return the points of some columns."""
        raise NotImplementedError

    def _plan(self, asked: Query) -> Callable[[], Any]:
        kind, names = asked.kind, asked.names
        first, *others = names
        if kind == "quantile" and others:
            raise self._no_groups(kind, first, others[0])
        for name in {"share": names, "crosstab": names, "mean": others}.get(kind, ()):
            if self._levels(name) is None and not self._is_kept(name):
                raise without_levels(name)
        if kind in ("histogram", "quantile", "slope", *_LINES):
            self._check_no_texts(names)
        if kind not in (*AVERAGES, *_LINES, "count"):
            raise self._refusal(kind, *names)
        if kind in ("slope", *_LINES):
            self._check_no_dates(names)
        values = self._level_values(first, asked.values, asked.within) if kind == "mean" else None
        return partial(self._put, asked, values)

    def _put(self, asked: Query, values: Floats | None) -> Result:
        """Answer by the noisy counts of a column, where they are released and it is alone, else by points."""
        first, *others = asked.names
        is_joint = asked.kind in ("crosstab", "slope", "count", *_LINES)
        measured = None if is_joint else self._find_measured(first)
        if others and measured is not None and values is None and asked.within is None:
            measured.check_mean(first)
        answers = self._find_points(asked.names) if others or measured is None else measured
        scale = answers.dates.get(first)
        ends = self._check_within(first, asked.within, scale)
        if asked.kind != "histogram":
            return asked.put(answers, values=values, ends=ends)
        edges = self._edges(first, asked.bins, scale)
        followed = follow_cells(edges, self._column(first)) if asked.closed is None else None
        if followed is None:
            return asked.put(answers, edges=edges)
        edges, behind = followed
        index = index_ranges(edges, scale, first, closed="right")
        found = asked.put(answers, edges=behind).change(lambda part: part.set_axis(index))
        if edges[0] > self._column(first)["bounds"][0]:
            return found
        return replace(found, limits=(*found.limits, _FIRST_RANGE))

    def _find_points(self, names: Sequence[str]) -> Points:
        """Return the points of some columns, with the groups that are made of them."""
        made = {name: self.derived[name] for name in names if name in self.derived}
        if not made or not self.joins_private:
            return self._points(*names)
        read = self._sources(names)
        if len(read) > (self.most_joined or len(read)):
            what = f"its noisy tables have {self.most_joined} columns each, and the error of the model for {len(read)} columns together is not known"
            use = "ask about fewer columns, or with approximate=True"
            raise SpecError(what, ", ".join(read), use)
        points = self._points(*read)

        def add(frame: pd.DataFrame, *, ends: Mapping[str, Pair]) -> pd.DataFrame:
            codes = {name: each.of_cells(frame, ends) for name, each in made.items()}
            return frame.assign(**codes)

        def noise(chosen: Sequence[str]) -> NoisyCells:
            assert points.noise is not None
            cells = points.noise(self._sources(chosen))
            return replace(cells, frame=add(cells.frame, ends={}))

        return replace(
            points,
            frame=add(points.frame, ends=points.ends),
            levels={**points.levels, **{name: each.labels for name, each in made.items()}},
            noise=points.noise and noise,
        )

    def _offer(self, question: str, name: str) -> str:
        found = super()._offer(question, name)
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
        scale = self._scale(name)
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
                what = "holds dates, and slopes of dates are not supported"
                raise SpecError(what, f"column {name!r}", "use mean(), quantile() or histogram()")

    def _check_no_texts(self, names: Sequence[str]) -> None:
        for name in names:
            if any(isinstance(level, str) for level in self._levels(name) or ()):
                raise SpecError(
                    "does not hold numbers", f"column {name!r}", "use share() or crosstab()"
                )

    def _check_within(
        self, name: str, within: Sequence[Any] | None, scale: DateScale | None = None
    ) -> Ends | None:
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
        shown = list_names(["null" if each is None else str(each) for each in levels], _SHOWN)
        if values is None:
            if not all(isinstance(level, int | float | None) for level in levels):
                raise SpecError(
                    "does not hold numbers",
                    f"column {name!r}",
                    f"use share(), or give `values`, a number for each of {shown}",
                )
            values = [math.nan if level is None else float(level) for level in levels]
        try:
            found = np.asarray(values, float)
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

    def _bounds_of(self, name: str) -> Ends | None:
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

    def _bounds(self, names: Sequence[str]) -> dict[str, Ends]:
        return {name: bounds for name in names if (bounds := self._bounds_of(name)) is not None}

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
            is_counted=self._is_counted,
            levels=self._level_map(list(columns)),
            ends=ends,
            bounds=self._bounds(list(columns)),
            **{"sampling": 1.0 / n_rows, **more},
        )

    def _points_of_table(
        self, names: Sequence[str], counts: Floats, deviation: float, **more: Any
    ) -> Points:
        """Return the cells of the table of some columns, whose counts have independent noise."""
        frame, n_rows = self._list_cells(names), self._count_rows(counts)
        noisy = NoisyCells(frame=frame, variance=(deviation / n_rows) ** 2)
        scales = {name: self._scale(name) for name in names}
        return self._make_points(
            frame,
            counts,
            n_rows,
            noise=lambda _: noisy,
            dates={name: scale for name, scale in scales.items() if scale is not None},
            fine=self._find_fine(names),
            **more,
        )

    def _count_rows(self, weights: Floats) -> float:
        """Return the number of rows that the card gives, or the weights do."""
        return self.content["n_rows"]["value"] or float(weights.sum())

    def _list_cells(self, names: Sequence[str]) -> pd.DataFrame:
        """Return a point of each cell of some columns' table, in the order of the card."""
        lines = [list_cells(self._column(name)) for name in names]
        return pd.DataFrame(list(itertools.product(*lines)), columns=list(names))


class KeptColumns(OpenedPoints):
    """A release of rows: its kept columns are exact, and their errors are those of drawing the rows."""

    joins_private: ClassVar[bool] = False

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
