"""Opened releases of noisy tables of counts."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pandas as pd

from dpdask.analysis.dates import DateScale
from dpdask.analysis.points import NoisyCells, Points
from dpdask.analysis.result import Result
from dpdask.analysis.weighted import OpenedPoints
from dpdask.errors import InputError, SpecError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class OpenedTables(OpenedPoints):
    """Noisy tables of counts: each answers questions about its own columns."""

    refusals: ClassVar[Mapping[str, tuple[str, str]]] = {
        "npmle": ("the release holds tables, not ranges of single rows", "use share() or histogram()"),
        "regress": ("the release holds tables, not ranges of single rows", "use slope()"),
        "fit": ("the release holds tables, not weighted points", "use slope(), or a release of the mechanism `histogram`"),
    }

    def histogram(self, column: str, bins: int | Sequence[Any] = 20) -> Result:
        """Return how many rows lie in each range of a column of numbers or dates; see `OpenedRelease.histogram`."""
        if isinstance(bins, int) and self._points(column).dates:
            raise SpecError("a number of ranges is not supported for a table of dates", f"column {column!r}", "give the edges, as dates")
        return super(OpenedTables, self).histogram(column, bins)

    def _points(self, *names: str) -> Points:
        clique = self._find_table(names)
        rows = self.to_pandas()
        label = " x ".join(clique)
        rows = rows[rows["table"] == label].reset_index(drop=True)
        sizes = [self._column(name)["cells"] for name in clique]
        if len(rows) != math.prod(sizes):
            raise InputError("does not have the cells that its card says", f"table {label!r}", "copy the whole folder again")
        codes = dict(zip(clique, np.unravel_index(np.arange(len(rows)), sizes), strict=True))
        levels = self._level_map(names)
        frame, ends, dates = pd.DataFrame(index=rows.index), {}, {}
        for name in names:
            if name in levels:
                frame[name] = pd.Series([levels[name][code] for code in codes[name]], dtype=object)
            else:
                if any(_is_date(text) for text in rows[name].unique()):
                    dates[name] = DateScale(unit="us")
                read = {text: _read_cell(text, dates.get(name)) for text in rows[name].unique()}
                low, high = np.array([read[text] for text in rows[name]]).T
                frame[name], ends[name] = (low + high) / 2.0, (low, high)
        weights = rows["count"].to_numpy(dtype=np.float64)
        n_rows = self.content["n_rows"]["value"] or float(weights.sum())
        cells = NoisyCells(frame=frame, variance=(self.content["accounting"]["noise"][label]["standard_deviation"] / n_rows) ** 2)
        return Points(
            frame=frame,
            weights=weights,
            n_rows=n_rows,
            sampling=1.0 / n_rows,
            levels=levels,
            ends=ends,
            bounds=self._bounds([name for name in names if name not in dates]),
            noise=lambda _: cells,
            limits=("values of a range count as its middle",) if ends else (),
            dates=dates,
        )

    def _answers(self, name: str) -> set[str]:
        return super(OpenedTables, self)._answers(name) if any(name in clique for clique in self._cliques) else set()

    def _partners(self, name: str) -> list[str]:
        return list(dict.fromkeys(other for clique in self._cliques if name in clique for other in clique if other != name))

    def _is_of_dates(self, name: str) -> bool:
        return any(_is_date(label) for label in self.to_pandas([name])[name].dropna().unique())

    @property
    def _cliques(self) -> list[list[str]]:
        found: list[list[str]] = self.content["mechanism"]["cliques"]
        return found

    def _find_table(self, names: Sequence[str]) -> list[str]:
        """Return the table with the fewest cells that has all columns."""
        for name in names:
            self._column(name)
        found = [clique for clique in self._cliques if set(names) <= set(clique)]
        if not found:
            tables = ", ".join(" x ".join(clique) for clique in self._cliques[:6])
            raise SpecError("no released table has these columns", ", ".join(names), f"use one of the tables {tables}, or release another one")
        return min(found, key=lambda clique: math.prod(self._column(name)["cells"] for name in clique))


def _is_date(label: str) -> bool:
    return re.match(r"\d{4}-\d{2}-\d{2}", label) is not None


def _read_cell(label: str, scale: DateScale | None) -> tuple[float, float]:
    """Return the least and the greatest value of a cell, from its label: `null`, `7`, `10..19`, `[10.0, 20.0)`; NaN where it is no number."""
    try:
        parts = re.split(r"\.\.|, ", label.strip("[]()"))
        ends = [float(part) for part in parts] if scale is None else scale.to_numbers(parts).tolist()
    except ValueError:
        return math.nan, math.nan
    return ends[0], math.nextafter(ends[-1], -math.inf) if label.endswith(")") else ends[-1]
