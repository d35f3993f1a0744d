"""Opened releases of synthetic records: those of a copula, and rows drawn from a perturbed histogram."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dpdask.analysis.dates import DateScale, find_scales
from dpdask.analysis.points import NoisyCells, Points
from dpdask.analysis.weighted import OpenedPoints

Floats = NDArray[np.float64]
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
            ends={name: cell_ends(column, frame[name]) for name, column in columns.items() if "edges" in column},
            bounds=self._bounds(names),
            noise=lambda chosen: self._noise(chosen, n_rows),
            biased=len(names) > 1 or self.content["mechanism"]["kind"] != "copula",  # a model, or cells that were left out
            limits=_RECORDS,
            dates=find_scales(frame),
        )

    def _noise(self, names: Sequence[str], n_rows: float) -> NoisyCells:
        """Return the cells of the noisy table of one or two columns."""
        lines = {name: list_cells(self._column(name)) for name in names}
        frame = pd.DataFrame(list(itertools.product(*lines.values())), columns=list(lines))
        mechanism, noise = self.content["mechanism"], self.content["accounting"]["noise"]
        if mechanism["kind"] == "copula":
            deviation, n_added = noise["one_way" if len(names) == 1 else "two_way"]["standard_deviation"], 1.0
        else:  # a cell of these columns is a sum over the cells of the others that are listed
            deviation, n_added = noise["cells"]["standard_deviation"], max(1.0, mechanism["cells_listed"] / len(frame))
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
    x = values.to_numpy(dtype=np.float64, na_value=np.nan) if scale is None else scale.to_numbers(values)
    cell = np.clip(np.searchsorted(edges, x, side="left") - 1, 0, len(edges) - 2)
    single = np.isnan(x) | np.isin(x, np.array(column["atoms"], dtype=np.float64))
    # of whole numbers the first edge lies one below the bound: a cell does not hold its lower edge
    step = 0.0 if column["bounds"] is None else float(column["bounds"][0]) - edges[0]
    above = np.where(np.isfinite(edges[:-1]), np.nextafter(edges[:-1], np.inf), edges[:-1])
    least = edges[:-1] + step if step > 0.0 else above
    low, high = np.minimum(least[cell], x), np.maximum(edges[cell + 1], x)
    return np.where(single, x, low), np.where(single, x, high)
