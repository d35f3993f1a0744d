"""Opened releases of the cells of a perturbed histogram: weighted points, and M-estimators of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pandas as pd
from numpy.random import Generator
from numpy.typing import NDArray

from dpdask.analysis.dates import DateScale, check_no_dates, find_scales
from dpdask.analysis.points import NoisyCells, Points
from dpdask.analysis.result import Result
from dpdask.analysis.weighted import OpenedPoints, check_features
from dpdask.inference import WeightedSample, least_squares, noise_error
from dpdask.streams import RunKey, stream

Floats = NDArray[np.float64]
_WEIGHT = "weight"
_REPEATS = 100


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class OpenedCells(OpenedPoints):
    """The cells of a perturbed histogram, each with a point and a noisy weight."""

    refusals: ClassVar[Mapping[str, tuple[str, str]]] = {
        "npmle": ("the release holds weighted cells, not ranges of single rows", "use histogram() or quantile()"),
        "regress": ("the release holds weighted cells, not ranges of single rows", "use slope() or fit()"),
    }

    def fit(self, estimator: Callable[[WeightedSample], Floats], response: str, *features: str) -> Result:
        """Return the coefficients of an M-estimator of the cells; see `OpenedRelease.fit`.

        Notes
        -----
        The standard errors are those of 100 redraws, the same at every call: of the rows, as Poisson counts, and of the noise, which the
        card states. Cells with a null in one of the columns are left out.
        """
        for name in (response, *features):
            self._column(name)
        check_features("fit", response, features)
        cells, dates = self._read_cells()
        check_no_dates([response, *features], dates)
        cells = cells[cells[[response, *features]].notna().all(axis=1)].reset_index(drop=True)
        sample = WeightedSample.of_frame(cells, response, features, card=self.content)
        rng = stream(RunKey.insecure(0), "analysis/redraw", "")  # any stream: this is post-processing
        coefficients = np.asarray(estimator(sample), dtype=np.float64)
        errors = noise_error(estimator, self._make_redraw(sample, self._cell_of(cells)), repeats=_REPEATS, rng=rng).standard_error
        names = ["intercept", *sample.names]
        index = pd.Index(names[len(names) - len(coefficients) :]) if len(coefficients) <= len(names) else pd.RangeIndex(len(coefficients))
        parts = (pd.Series(part, index) for part in (coefficients, errors))
        return Result(estimate=next(parts), standard_error=next(parts), bias_bound=None, limits=self._limits())

    def slope(self, response: str, *features: str) -> Result:
        """Return the slopes of least squares of the cells, corrected for their widths; see `OpenedRelease.slope` and `fit`."""
        found = self.fit(least_squares, response, *features)
        return replace(found, estimate=found.estimate.iloc[1:], standard_error=found.standard_error.iloc[1:])

    def _answers(self, name: str) -> set[str]:
        found = super(OpenedCells, self)._answers(name)
        return found | ({"fit"} if "slope" in found else set())

    def _points(self, *names: str) -> Points:
        for name in names:
            self._column(name)
        cells, dates = self._read_cells()
        cell, n_rows = self._cell_of(cells), self.content["n_rows"]["value"] or float(cells[_WEIGHT].sum())
        deviation = self.content["accounting"]["noise"]["cells"]["standard_deviation"]

        def noise(chosen: Sequence[str]) -> NoisyCells:
            numeric = {name: pd.api.types.is_numeric_dtype(cells[name]) and name not in self._level_map(names) for name in chosen}
            groups = cells.groupby(cell, sort=True)
            frame = pd.DataFrame({name: groups[name].mean() if numeric[name] else cells[name].groupby(cell).nth(0).to_numpy() for name in chosen})
            return NoisyCells(frame=frame, variance=(deviation / n_rows) ** 2)

        return Points(
            frame=cells[list(names)],
            weights=cells[_WEIGHT].to_numpy(dtype=np.float64),
            n_rows=n_rows,
            sampling=1.0 / n_rows,
            levels=self._level_map(names),
            shifts={name: self._shift(name, cells[name]) for name in names if "edges" in self._column(name)},
            bounds=self._bounds(names),
            noise=noise,
            limits=self._limits(),
            dates=dates,
        )

    def _read_cells(self) -> tuple[pd.DataFrame, dict[str, DateScale]]:
        """Return the released points, dates on a line as numbers, and how these count them."""
        cells = self.to_pandas()
        scales = find_scales(cells[[name for name, column in self.content["columns"].items() if "edges" in column]])
        return cells.assign(**{name: scale.to_numbers(cells[name]) for name, scale in scales.items()}), scales

    def _limits(self) -> tuple[str, ...]:
        cut = self.content["mechanism"]["cut"]
        told = "the bound on the bias is of the widths of the cells"
        return (told,) if cut is None else (told, f"cells whose noisy count was below {cut} are left out, which no bound covers")

    def _cell_of(self, cells: pd.DataFrame) -> NDArray[np.int64]:
        """Return the number of each point's cell: several points may stand for one."""
        code = np.zeros(len(cells), dtype=np.int64)
        for name, column in self.content["columns"].items():
            if "edges" not in column:
                own = pd.factorize(cells[name], use_na_sentinel=False)[0]
            else:
                x, edges = cells[name].to_numpy(dtype=np.float64, na_value=np.nan), np.array(column["edges"], dtype=np.float64)
                atom = np.isin(x, np.array(column["atoms"], dtype=np.float64))
                own = np.where(atom, -1 - np.searchsorted(edges, x), np.where(np.isnan(x), len(edges) + 1, np.searchsorted(edges, x)))
            code = pd.factorize(pd.Series(code).astype(str) + "," + pd.Series(own).astype(str))[0].astype(np.int64)
        return code

    def _shift(self, name: str, values: pd.Series) -> Floats:
        """Return how far a row may be from the point of its cell; 0 at nulls and atoms."""
        column = self._column(name)
        x, edges = values.to_numpy(dtype=np.float64, na_value=np.nan), np.array(column["edges"], dtype=np.float64)
        cell = np.clip(np.searchsorted(edges, x, side="left") - 1, 0, len(edges) - 2)
        single = np.isnan(x) | np.isin(x, np.array(column["atoms"], dtype=np.float64))
        shift: Floats = np.where(single, 0.0, np.maximum(x - edges[cell], edges[cell + 1] - x))
        return shift

    def _make_redraw(self, sample: WeightedSample, cell: NDArray[np.int64]) -> Callable[[Generator], WeightedSample]:
        """Return what draws the rows and the noise of every listed cell once more; its points share the new weight as they shared the old."""
        noise, cut = self.content["accounting"]["noise"]["cells"], self.content["mechanism"]["cut"]
        counts = np.bincount(cell, weights=sample.weights)
        rows = np.maximum(counts, 0.0)
        share = -np.expm1(-1.0 / noise["scale"]) if "scale" in noise else 0.0

        def redraw(rng: Generator) -> WeightedSample:
            drawn = rng.geometric(share, len(counts)) - rng.geometric(share, len(counts)) if share else rng.normal(0.0, noise["sigma"], len(counts))
            again = counts + rng.poisson(rows) - rows + drawn
            again = again if cut is None else np.where(again >= cut, again, 0.0)
            return replace(sample, weights=sample.weights * (again / np.where(counts == 0.0, 1.0, counts))[cell])

        return redraw
