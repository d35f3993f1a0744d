"""Opened releases of the cells of a perturbed histogram: weighted points, and M-estimators of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pandas as pd
from numpy.random import Generator
from numpy.typing import NDArray

from dpdask.analysis.opened import Result
from dpdask.analysis.points import OpenedPoints, Points
from dpdask.analysis.values import DateScale, NoisyCells, find_scales
from dpdask.errors import InputError, SpecError
from dpdask.inference.m_estimators import WeightedSample, least_squares, noise_error
from dpdask.streams import RunKey, stream

Floats = NDArray[np.float64]
Codes = NDArray[np.int64]
_WEIGHT = "weight"
_NO_RANGES = "the release holds weighted cells, not ranges of single rows"
_NO_ROWS = "the release holds tables, not ranges of single rows"
_REPEATS = 100
_STILL = 1e-9
_MOST_OTHERS = 100_000
_WIDTHS = "the bound on the bias is of the widths of the cells"
_BOUNDS_HOLD = "bounds of shares, counts and quantiles hold them, those of means do not"
_NO_BOUND = "values count as the points of their cells, which moves coefficients by an amount that no bound is known of"
_NO_ERROR = "it does not move when the noise is drawn again, as a quantile of few points, so no standard error is known"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class OpenedCells(OpenedPoints):
    """The cells of a perturbed histogram, each with a point and a noisy weight."""

    refusals: ClassVar[Mapping[str, tuple[str, str]]] = {
        "npmle": (_NO_RANGES, "use histogram() or quantile()"),
        "regress": (_NO_RANGES, "use slope() or fit()"),
    }

    def _plan(self, question: str, names: Sequence[str], **options: Any) -> Callable[[], Any]:
        if question not in ("slope", "fit"):
            return super(OpenedCells, self)._plan(question, names, **options)
        self._check_no_texts(names[:1])
        self._check_no_dates(names)
        if question == "fit":
            return lambda: self._fit(options["estimator"], names)

        def slope() -> Result:
            found = self._fit(least_squares, names)  # corrected for the widths of the cells
            error = None if found.standard_error is None else found.standard_error.iloc[1:]
            return replace(found, estimate=found.estimate.iloc[1:], standard_error=error)

        return slope

    def _fit(self, estimator: Any, names: Sequence[str]) -> Result:
        if not callable(estimator):
            use = "give one of dpdask.inference, such as `logistic`, and then the columns"
            raise SpecError("the estimator must be a function", "fit", use)
        cells, _ = self._read_cells()
        cells = cells[cells[list(names)].notna().all(axis=1)].reset_index(drop=True)
        sample = WeightedSample.of_frame(cells, names[0], names[1:], card=self.content)
        values = np.asarray(estimator(sample), dtype=np.float64)
        # any stream: this is post-processing
        rng = stream(RunKey.insecure(0), "analysis/redraw", "").seed_generator()
        redraw = self._make_redraw(sample, cells, names)
        errors = noise_error(estimator, redraw, repeats=_REPEATS, rng=rng).standard_error
        labels: Sequence[Any] = ["intercept", *sample.names][1 + len(sample.names) - len(values) :]
        index = pd.Index(labels if len(labels) == len(values) else range(len(values)))
        limits, error = [_NO_BOUND], None
        if self._cut is not None:
            limits.append(f"{self._left_out}, which no error holds")
        if (errors > _STILL * np.abs(values)).all():
            error = pd.Series(errors, index)
        else:
            limits.append(_NO_ERROR)
        estimate = pd.Series(values, index)
        return Result(
            estimate=estimate, standard_error=error, bias_bound=None, limits=tuple(limits)
        )

    @property
    def _cut(self) -> int | None:
        """The least noisy count that was kept; None if all were."""
        cut: int | None = self.content["mechanism"]["cut"]
        return cut

    @property
    def _left_out(self) -> str:
        return f"cells whose noisy count was below {self._cut} are left out"

    @property
    def _noise(self) -> Mapping[str, float]:
        """The noise of a cell's count: its standard deviation, and its scale."""
        noise: Mapping[str, float] = self.content["accounting"]["noise"]["cells"]
        return noise

    def _points(self, *names: str) -> Points:
        cells, dates = self._read_cells()
        weights = cells[_WEIGHT].to_numpy(dtype=np.float64)
        cell, n_rows = self._number_cells(cells), self._count_rows(weights)
        lost, limits = 0.0, [_WIDTHS]
        if self._cut is not None:
            lost = self._count_lost(
                np.bincount(cell, weights=weights).astype(np.float64), self._cut
            )
            limits.append(f"{self._left_out}: {_BOUNDS_HOLD}")
        deviation = self._noise["standard_deviation"]

        def noise(chosen: Sequence[str]) -> NoisyCells:
            frame, listed, others = self._count_cells(cells, cell, chosen)
            if self._cut is not None:
                listed = listed + others * self._moment_above(self._cut, 2) / deviation**2
            return NoisyCells(frame=frame, variance=(deviation / n_rows) ** 2, sizes=listed)

        return self._make_points(
            cells[list(names)],
            weights,
            n_rows,
            noise=noise,
            lost=lost / n_rows,
            limits=tuple(limits),
            dates=dates,
        )

    def _read_cells(self) -> tuple[pd.DataFrame, dict[str, DateScale]]:
        """Return the released points, dates on a line as numbers, and how these count them."""
        cells, columns = self.to_pandas(), self.content["columns"]
        scales = find_scales(cells[[name for name in columns if "edges" in columns[name]]])
        numbers = {name: scale.to_numbers(cells[name]) for name, scale in scales.items()}
        return cells.assign(**numbers), scales

    def _count_lost(self, counts: Floats, cut: int) -> float:
        """Return how many rows may be in cells that were left out, or were counted by noise alone.

        What is missing from the number of rows, and what the cut made of the noise: the mean of the
        part of it that reaches the cut from an empty cell, for every cell, and from the cut itself,
        for those listed below twice the cut; and two standard deviations.
        """
        n_cells, n_rows = self.content["mechanism"]["cells"], self.content["n_rows"]["value"]
        if n_rows is None:
            return float(cut * (n_cells - len(counts)))
        near = int((counts < 2 * cut).sum())
        selected = n_cells * self._moment_above(cut, 1) + near * self._moment_above(0, 1)
        of_rows = self.content["accounting"]["noise"].get("n_rows", {}).get("standard_deviation", 0)
        doubt = math.hypot(self._noise["standard_deviation"] * math.sqrt(len(counts)), of_rows)
        return max(0.0, float(n_rows - counts.sum() + selected + 2.0 * doubt))

    def _count_cells(
        self, cells: pd.DataFrame, cell: Codes, names: Sequence[str]
    ) -> tuple[pd.DataFrame, Floats, Floats]:
        """Return a point of each cell of some columns' table, and how many cells of all columns lie in it: those that are listed, and others."""
        every = self._list_cells(names)
        first = cells.groupby(cell, sort=True)[list(names)].nth(0)
        code = self._number_cells(pd.concat([first, every], ignore_index=True))
        listed = np.bincount(code[: len(first)], minlength=int(code.max()) + 1)[code[len(first) :]]
        others = np.maximum(self.content["mechanism"]["cells"] / len(every) - listed, 0.0)
        return every, listed.astype(np.float64), others

    def _number_cells(self, cells: pd.DataFrame) -> Codes:
        """Return the number of each point's cell: several points may stand for one."""
        codes = {}
        for name, column in self.content["columns"].items():
            if name in cells and "edges" in column:
                x = cells[name].to_numpy(dtype=np.float64, na_value=np.nan)
                place = np.searchsorted(np.array(column["edges"], dtype=np.float64), x)
                place = np.where(np.isnan(x), len(column["edges"]) + 1, place)
                atoms = np.array(column["atoms"], dtype=np.float64)
                codes[name] = np.where(np.isin(x, atoms), -1 - place, place)
            elif name in cells:
                codes[name] = pd.factorize(cells[name], use_na_sentinel=False)[0]
        numbers = pd.DataFrame(codes).groupby(list(codes), sort=False).ngroup()
        return np.asarray(numbers, dtype=np.int64)

    def _make_redraw(
        self, sample: WeightedSample, cells: pd.DataFrame, names: Sequence[str]
    ) -> Callable[[Generator], WeightedSample]:
        """Return what draws the rows and the noise of every cell once more; its points share the new weight as they shared the old.

        Of the cells that are not listed, those reach the cut that the noise of an empty cell takes
        there.
        """
        cut, cell = self._cut, self._number_cells(cells)
        counts = np.bincount(cell, weights=sample.weights)
        rows = np.maximum(counts, 0.0)
        share = -np.expm1(-1.0 / self._noise["scale"])
        whole, others = sample, np.zeros(0)
        n_cells = math.prod(self._column(name)["cells"] for name in names)
        if cut is not None and n_cells <= _MOST_OTHERS:
            # a point, of no weight, for each cell of the columns' table
            every, _, others = self._count_cells(cells, cell, names)
            known = every.notna().all(axis=1)
            for name in self._level_map(names):
                known &= every[name].isin(cells[name].unique())
            added = pd.concat([cells[list(names)], every[known]], ignore_index=True)
            whole = WeightedSample.of_frame(added.assign(**{_WEIGHT: 1.0}), names[0], names[1:])
            others = others[known.to_numpy()]
            if sample.widths is not None:
                none = np.zeros((len(others), sample.widths.shape[1]))
                whole = replace(whole, widths=np.vstack([sample.widths, none]))
        least, probability = self._list_tail(cut or 0)

        def redraw(rng: Generator) -> WeightedSample:
            drawn = rng.geometric(share, len(counts)) - rng.geometric(share, len(counts))
            again = counts + rng.poisson(rows) - rows + drawn
            again = again if cut is None else np.where(again >= cut, again, 0.0)
            weights = sample.weights * (again / np.where(counts == 0.0, 1.0, counts))[cell]
            if not others.any():
                return replace(sample, weights=weights)
            n_new = rng.binomial(int(others.sum()), probability.sum())
            place = rng.choice(len(others), n_new, p=others / others.sum())
            value = rng.choice(least, n_new, p=probability / probability.sum())
            new = np.bincount(place, weights=value, minlength=len(others))
            return replace(whole, weights=np.append(weights, new))

        return redraw

    def _list_tail(self, least: int) -> tuple[Floats, Floats]:
        """Return the values of a cell's noise from one on, as far as they matter, and their probabilities."""
        scale = self._noise["scale"]
        far = math.ceil(40 * scale)
        x = np.arange(-far, least + far + 1, dtype=np.float64)
        density = np.exp(-np.abs(x) / scale)
        return x[x >= least], (density / density.sum())[x >= least]

    def _moment_above(self, least: int, k: int) -> float:
        """Return the k-th moment of a cell's noise where it is at least so much, and 0 elsewhere."""
        x, probability = self._list_tail(least)
        return float(probability @ x**k)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class OpenedTables(OpenedPoints):
    """Noisy tables of counts: each answers questions about its own columns."""

    refusals: ClassVar[Mapping[str, tuple[str, str]]] = {
        "npmle": (_NO_ROWS, "use share() or histogram()"),
        "regress": (_NO_ROWS, "use slope()"),
        "fit": (
            "the release holds tables, not weighted points",
            "use slope(), or a release of the mechanism `histogram`",
        ),
    }

    def _plan(self, question: str, names: Sequence[str], **options: Any) -> Callable[[], Any]:
        self._find_table(names)
        return super(OpenedTables, self)._plan(question, names, **options)

    def _points(self, *names: str) -> Points:
        clique = self._find_table(names)
        label = " x ".join(clique)
        rows, cells = self.to_pandas(["table", "count"]), self._list_cells(clique)
        weights = rows["count"][rows["table"] == label].to_numpy(dtype=np.float64)
        if len(weights) != len(cells):
            what = "does not have the cells that its card says"
            raise InputError(what, f"table {label!r}", "copy the whole folder again")
        frame, n_rows = cells[list(names)], self._count_rows(weights)
        deviation = self.content["accounting"]["noise"][label]["standard_deviation"]
        noisy = NoisyCells(frame=frame, variance=(deviation / n_rows) ** 2)
        scales = {name: DateScale.of_card(self._column(name)) for name in names}
        found = self._make_points(
            frame,
            weights,
            n_rows,
            noise=lambda _: noisy,
            dates={name: scale for name, scale in scales.items() if scale is not None},
            fine=self._find_fine(names),
        )
        means = any("means" in self._column(name) for name in names)
        middle = "the mean of the fine counts in it" if means else "its middle"
        limits = (f"values of a range count as {middle}",) if found.ends else ()
        return replace(found, limits=limits)

    def _find_table(self, names: Sequence[str]) -> list[str]:
        """Return the table with the fewest cells that has all columns."""
        cliques: list[list[str]] = self.content["mechanism"]["cliques"]
        found = [clique for clique in cliques if set(names) <= set(clique)]
        if not found:
            tables = ", ".join(" x ".join(clique) for clique in cliques[:6])
            raise SpecError(
                "no released table has these columns",
                ", ".join(names),
                f"use one of the tables {tables}, or release another one",
            )
        return min(
            found, key=lambda clique: math.prod(self._column(name)["cells"] for name in clique)
        )
