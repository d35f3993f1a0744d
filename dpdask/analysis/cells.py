"""Opened releases of the cells of a perturbed histogram: weighted points, and M-estimators of them."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pandas as pd
from numpy.random import Generator
from numpy.typing import NDArray

from dpdask.analysis.opened import DateScale, Result, check_no_dates, find_scales
from dpdask.analysis.points import (
    NoisyCells,
    OpenedPoints,
    Points,
    cell_ends,
    check_features,
    list_cells,
)
from dpdask.errors import InputError, SpecError
from dpdask.inference import WeightedSample, least_squares, noise_error
from dpdask.streams import RunKey, stream

Floats = NDArray[np.float64]
_WEIGHT = "weight"
_REPEATS = 100
_STILL = 1e-9
_MOST_OTHERS = 100_000
_WIDTHS = "the bound on the bias is of the widths of the cells"
_LEFT_OUT = "bounds of shares, counts and quantiles hold them, those of means do not"
_NO_BOUND = "values count as the points of their cells, which moves coefficients by an amount that no bound is known of"
_NO_ERROR = "it does not move when the noise is drawn again, as a quantile of few points, so no standard error is known"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class OpenedCells(OpenedPoints):
    """The cells of a perturbed histogram, each with a point and a noisy weight."""

    refusals: ClassVar[Mapping[str, tuple[str, str]]] = {
        "npmle": (
            "the release holds weighted cells, not ranges of single rows",
            "use histogram() or quantile()",
        ),
        "regress": (
            "the release holds weighted cells, not ranges of single rows",
            "use slope() or fit()",
        ),
    }

    def fit(
        self, estimator: Callable[[WeightedSample], Floats], response: str, *features: str
    ) -> Result:
        """Return the coefficients of an M-estimator of the cells; see `OpenedRelease.fit`.

        Notes
        -----
        The standard errors are those of 100 redraws, the same at every call: of the rows, as
        Poisson counts, and of the noise, which the card states. Cells with a null in one of the
        columns are left out.
        """
        for name in (response, *features):
            self._column(name)
        check_features("fit", response, features)
        if not callable(estimator):
            raise SpecError(
                "the estimator must be a function",
                "fit",
                "give one of dpdask.inference, such as `logistic`, and then the columns",
            )
        cells, dates = self._read_cells()
        check_no_dates([response, *features], dates)
        cells = cells[cells[[response, *features]].notna().all(axis=1)].reset_index(drop=True)
        sample = WeightedSample.of_frame(cells, response, features, card=self.content)
        rng = stream(
            RunKey.insecure(0), "analysis/redraw", ""
        ).seed_generator()  # any stream: this is post-processing
        coefficients = np.asarray(estimator(sample), dtype=np.float64)
        errors = noise_error(
            estimator,
            self._make_redraw(sample, cells, [response, *features]),
            repeats=_REPEATS,
            rng=rng,
        ).standard_error
        names = ["intercept", *sample.names]
        index = (
            pd.Index(names[len(names) - len(coefficients) :])
            if len(coefficients) <= len(names)
            else pd.RangeIndex(len(coefficients))
        )
        estimate, error = (pd.Series(part, index) for part in (coefficients, errors))
        cut = self.content["mechanism"]["cut"]
        limits = (
            (_NO_BOUND,)
            if cut is None
            else (
                _NO_BOUND,
                f"cells whose noisy count was below {cut} are left out, which no error holds",
            )
        )
        if (errors <= _STILL * np.abs(coefficients)).any():
            return Result(
                estimate=estimate, standard_error=None, bias_bound=None, limits=(*limits, _NO_ERROR)
            )
        return Result(estimate=estimate, standard_error=error, bias_bound=None, limits=limits)

    def slope(self, response: str, *features: str) -> Result:
        """Return the slopes of least squares of the cells, corrected for their widths; see `OpenedRelease.slope` and `fit`."""
        check_features("slope", response, features)
        found = self.fit(least_squares, response, *features)
        error = None if found.standard_error is None else found.standard_error.iloc[1:]
        return replace(found, estimate=found.estimate.iloc[1:], standard_error=error)

    def _answers(self, name: str) -> set[str]:
        found = super(OpenedCells, self)._answers(name)
        return found | ({"fit"} if "slope" in found else set())

    def _points(self, *names: str) -> Points:
        for name in names:
            self._column(name)
        cells, dates = self._read_cells()
        cell, n_rows = (
            self._cell_of(cells),
            self.content["n_rows"]["value"] or float(cells[_WEIGHT].sum()),
        )
        deviation = self.content["accounting"]["noise"]["cells"]["standard_deviation"]

        def noise(chosen: Sequence[str]) -> NoisyCells:
            frame, listed, others = self._count_cells(cells, cell, chosen)
            cut, law = (
                self.content["mechanism"]["cut"],
                self.content["accounting"]["noise"]["cells"],
            )
            sizes = (
                listed
                if cut is None
                else listed + others * _moment_above(law, cut, 2) / deviation**2
            )
            return NoisyCells(frame=frame, variance=(deviation / n_rows) ** 2, sizes=sizes)

        return Points(
            frame=cells[list(names)],
            weights=cells[_WEIGHT].to_numpy(dtype=np.float64),
            n_rows=n_rows,
            sampling=1.0 / n_rows,
            levels=self._level_map(names),
            ends={
                name: cell_ends(self._column(name), cells[name])
                for name in names
                if "edges" in self._column(name)
            },
            bounds=self._bounds(names),
            noise=noise,
            lost=self._lost(cells[_WEIGHT].to_numpy(dtype=np.float64), cell) / n_rows,
            limits=self._limits(),
            dates=dates,
        )

    def _read_cells(self) -> tuple[pd.DataFrame, dict[str, DateScale]]:
        """Return the released points, dates on a line as numbers, and how these count them."""
        cells = self.to_pandas()
        scales = find_scales(
            cells[[name for name, column in self.content["columns"].items() if "edges" in column]]
        )
        return cells.assign(
            **{name: scale.to_numbers(cells[name]) for name, scale in scales.items()}
        ), scales

    def _limits(self) -> tuple[str, ...]:
        cut = self.content["mechanism"]["cut"]
        return (
            (_WIDTHS,)
            if cut is None
            else (_WIDTHS, f"cells whose noisy count was below {cut} are left out: {_LEFT_OUT}")
        )

    def _lost(self, weights: Floats, cell: NDArray[np.int64]) -> float:
        """Return how many rows may be in cells that were left out, or were counted by noise alone.

        What is missing from the number of rows, and what the cut made of the noise: the mean of the
        part of it that reaches the cut from an empty cell, for every cell, and from the cut itself,
        for those listed below twice the cut; and two standard deviations.
        """
        mechanism, accounting = self.content["mechanism"], self.content["accounting"]["noise"]
        cut, noise, n_rows = mechanism["cut"], accounting["cells"], self.content["n_rows"]["value"]
        if cut is None:
            return 0.0
        counts, deviation = np.bincount(cell, weights=weights), noise["standard_deviation"]
        if n_rows is None:
            return float(cut * (mechanism["cells"] - len(counts)))
        near = int((counts < 2 * cut).sum())
        selected = mechanism["cells"] * _moment_above(noise, cut, 1) + near * _moment_above(
            noise, 0, 1
        )
        doubt = math.hypot(
            deviation * math.sqrt(len(counts)),
            accounting.get("n_rows", {}).get("standard_deviation", 0.0),
        )
        return max(0.0, float(n_rows - weights.sum() + selected + 2.0 * doubt))

    def _count_cells(
        self, cells: pd.DataFrame, cell: NDArray[np.int64], names: Sequence[str]
    ) -> tuple[pd.DataFrame, Floats, Floats]:
        """Return a point of each cell of some columns' table, and how many cells of all columns lie in it: those that are listed, and others."""
        lines = [list_cells(self._column(name)) for name in names]
        every = pd.DataFrame(list(itertools.product(*lines)), columns=list(names))
        first = cells.groupby(cell, sort=True)[list(names)].nth(0)
        code = self._cell_of(pd.concat([first, every], ignore_index=True))
        listed = np.bincount(code[: len(first)], minlength=int(code.max()) + 1)[
            code[len(first) :]
        ].astype(np.float64)
        return (
            every,
            listed,
            np.maximum(self.content["mechanism"]["cells"] / len(every) - listed, 0.0),
        )

    def _cell_of(self, cells: pd.DataFrame) -> NDArray[np.int64]:
        """Return the number of each point's cell: several points may stand for one."""
        code = np.zeros(len(cells), dtype=np.int64)
        for name, column in self.content["columns"].items():
            if name not in cells:
                continue
            if "edges" not in column:
                own = pd.factorize(cells[name], use_na_sentinel=False)[0]
            else:
                x, edges = (
                    cells[name].to_numpy(dtype=np.float64, na_value=np.nan),
                    np.array(column["edges"], dtype=np.float64),
                )
                atom = np.isin(x, np.array(column["atoms"], dtype=np.float64))
                own = np.where(
                    atom,
                    -1 - np.searchsorted(edges, x),
                    np.where(np.isnan(x), len(edges) + 1, np.searchsorted(edges, x)),
                )
            code = pd.factorize(pd.Series(code).astype(str) + "," + pd.Series(own).astype(str))[
                0
            ].astype(np.int64)
        return code

    def _make_redraw(
        self, sample: WeightedSample, cells: pd.DataFrame, names: Sequence[str]
    ) -> Callable[[Generator], WeightedSample]:
        """Return what draws the rows and the noise of every cell once more; its points share the new weight as they shared the old.

        Of the cells that are not listed, those reach the cut that the noise of an empty cell takes
        there.
        """
        noise, cut = self.content["accounting"]["noise"]["cells"], self.content["mechanism"]["cut"]
        cell = self._cell_of(cells)
        counts = np.bincount(cell, weights=sample.weights)
        rows = np.maximum(counts, 0.0)
        share = -np.expm1(-1.0 / noise["scale"])
        whole, others = self._add_others(sample, cells, names)
        least, probability = _tail(noise, cut or 0)

        def redraw(rng: Generator) -> WeightedSample:
            drawn = rng.geometric(share, len(counts)) - rng.geometric(share, len(counts))
            again = counts + rng.poisson(rows) - rows + drawn
            again = again if cut is None else np.where(again >= cut, again, 0.0)
            weights = sample.weights * (again / np.where(counts == 0.0, 1.0, counts))[cell]
            if not others.any():
                return replace(sample, weights=weights)
            n_new = rng.binomial(int(others.sum()), probability.sum())
            place, value = (
                rng.choice(len(others), n_new, p=others / others.sum()),
                rng.choice(least, n_new, p=probability / probability.sum()),
            )
            return replace(
                whole,
                weights=np.append(
                    weights, np.bincount(place, weights=value, minlength=len(others))
                ),
            )

        return redraw

    def _add_others(
        self, sample: WeightedSample, cells: pd.DataFrame, names: Sequence[str]
    ) -> tuple[WeightedSample, Floats]:
        """Return a sample with a point, of no weight, for each cell of some columns' table, and how many cells that are not listed lie there."""
        if (
            self.content["mechanism"]["cut"] is None
            or math.prod(self._column(name)["cells"] for name in names) > _MOST_OTHERS
        ):
            return sample, np.zeros(0)
        every, _, others = self._count_cells(cells, self._cell_of(cells), names)
        known = every.notna().all(axis=1)
        for name in self._level_map(names):
            known &= every[name].isin(cells[name].unique())
        added = pd.concat([cells[list(names)], every[known]], ignore_index=True).assign(
            **{_WEIGHT: 1.0}
        )
        found = WeightedSample.of_frame(added, names[0], names[1:])
        widths = (
            None
            if sample.widths is None
            else np.vstack([sample.widths, np.zeros((int(known.sum()), sample.widths.shape[1]))])
        )
        return replace(found, widths=widths), others[known.to_numpy()]


def _tail(noise: Mapping[str, Any], least: int) -> tuple[Floats, Floats]:
    """Return the values of a cell's noise from one on, as far as they matter, and their probabilities."""
    spread = noise["scale"]
    x = np.arange(-math.ceil(40 * spread), least + math.ceil(40 * spread) + 1, dtype=np.float64)
    density = np.exp(-np.abs(x) / spread)
    return x[x >= least], (density / density.sum())[x >= least]


def _moment_above(noise: Mapping[str, Any], least: int, k: int) -> float:
    """Return the k-th moment of a cell's noise where it is at least so much, and 0 elsewhere."""
    x, probability = _tail(noise, least)
    return float(probability @ x**k)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class OpenedTables(OpenedPoints):
    """Noisy tables of counts: each answers questions about its own columns."""

    refusals: ClassVar[Mapping[str, tuple[str, str]]] = {
        "npmle": (
            "the release holds tables, not ranges of single rows",
            "use share() or histogram()",
        ),
        "regress": ("the release holds tables, not ranges of single rows", "use slope()"),
        "fit": (
            "the release holds tables, not weighted points",
            "use slope(), or a release of the mechanism `histogram`",
        ),
    }

    def histogram(self, column: str, bins: int | Sequence[Any] = 20) -> Result:
        """Return how many rows lie in each range of a column of numbers or dates; see `OpenedRelease.histogram`."""
        if isinstance(bins, int) and self._points(column).dates:
            raise SpecError(
                "a number of ranges is not supported for a table of dates",
                f"column {column!r}",
                "give the edges, as dates",
            )
        return super(OpenedTables, self).histogram(column, bins)

    def _points(self, *names: str) -> Points:
        clique = self._find_table(names)
        rows = self.to_pandas()
        label = " x ".join(clique)
        rows = rows[rows["table"] == label].reset_index(drop=True)
        sizes = [self._column(name)["cells"] for name in clique]
        if len(rows) != math.prod(sizes):
            raise InputError(
                "does not have the cells that its card says",
                f"table {label!r}",
                "copy the whole folder again",
            )
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
        cells = NoisyCells(
            frame=frame,
            variance=(self.content["accounting"]["noise"][label]["standard_deviation"] / n_rows)
            ** 2,
        )
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
        return (
            super(OpenedTables, self)._answers(name)
            if any(name in clique for clique in self._cliques)
            else set()
        )

    def _partners(self, name: str) -> list[str]:
        return list(
            dict.fromkeys(
                other
                for clique in self._cliques
                if name in clique
                for other in clique
                if other != name
            )
        )

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
            raise SpecError(
                "no released table has these columns",
                ", ".join(names),
                f"use one of the tables {tables}, or release another one",
            )
        return min(
            found, key=lambda clique: math.prod(self._column(name)["cells"] for name in clique)
        )


def _is_date(label: str) -> bool:
    return re.match(r"\d{4}-\d{2}-\d{2}", label) is not None


def _read_cell(label: str, scale: DateScale | None) -> tuple[float, float]:
    """Return the least and the greatest value of a cell, from its label: `null`, `7`, `10..19`, `[10.0, 20.0)`; NaN where it is no number."""
    try:
        parts = re.split(r"\.\.|, ", label.strip("[]()"))
        ends = (
            [float(part) for part in parts] if scale is None else scale.to_numbers(parts).tolist()
        )
    except ValueError:
        return math.nan, math.nan
    return ends[0], math.nextafter(ends[-1], -math.inf) if label.endswith(")") else ends[-1]
