"""Opened releases of the cells of a perturbed histogram: weighted points, and M-estimators of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pandas as pd
from numpy.random import Generator
from numpy.typing import NDArray

from dpdask.analysis.opened import Result
from dpdask.analysis.points import (
    DateScale,
    NoisyCells,
    OpenedPoints,
    Points,
    find_scales,
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

    def _plan(self, question: str, names: Sequence[str], **options: Any) -> Callable[[], Any]:
        if question not in ("slope", "fit"):
            return super(OpenedCells, self)._plan(question, names, **options)
        self._check_no_texts(names[:1])
        self._check_no_dates(names)
        if question == "fit":
            return lambda: self._fit(options["estimator"], names)

        def slope() -> Result:
            """Least squares is corrected for the widths of the cells."""
            found = self._fit(least_squares, names)
            error = None if found.standard_error is None else found.standard_error.iloc[1:]
            return replace(found, estimate=found.estimate.iloc[1:], standard_error=error)

        return slope

    def _fit(self, estimator: Callable[[WeightedSample], Floats], names: Sequence[str]) -> Result:
        if not callable(estimator):
            raise SpecError(
                "the estimator must be a function",
                "fit",
                "give one of dpdask.inference, such as `logistic`, and then the columns",
            )
        cells, _ = self._read_cells()
        cells = cells[cells[list(names)].notna().all(axis=1)].reset_index(drop=True)
        sample = WeightedSample.of_frame(cells, names[0], names[1:], card=self.content)
        rng = stream(
            RunKey.insecure(0), "analysis/redraw", ""
        ).seed_generator()  # any stream: this is post-processing
        coefficients = np.asarray(estimator(sample), dtype=np.float64)
        errors = noise_error(
            estimator, self._make_redraw(sample, cells, names), repeats=_REPEATS, rng=rng
        ).standard_error
        labels = ["intercept", *sample.names]
        index = (
            pd.Index(labels[len(labels) - len(coefficients) :])
            if len(coefficients) <= len(labels)
            else pd.RangeIndex(len(coefficients))
        )
        cut = self._cut
        limits = (
            [_NO_BOUND]
            if cut is None
            else [
                _NO_BOUND,
                f"cells whose noisy count was below {cut} are left out, which no error holds",
            ]
        )
        if still := bool((errors <= _STILL * np.abs(coefficients)).any()):
            limits.append(_NO_ERROR)
        error = None if still else pd.Series(errors, index)
        return Result(
            estimate=pd.Series(coefficients, index),
            standard_error=error,
            bias_bound=None,
            limits=tuple(limits),
        )

    @property
    def _cut(self) -> int | None:
        cut: int | None = self.content["mechanism"]["cut"]
        return cut

    @property
    def _law(self) -> Mapping[str, float]:
        """The noise of a cell, as the card states it."""
        law: Mapping[str, float] = self.content["accounting"]["noise"]["cells"]
        return law

    def _points(self, *names: str) -> Points:
        cells, dates = self._read_cells()
        weights = cells[_WEIGHT].to_numpy(dtype=np.float64)
        cell, n_rows = self._cell_of(cells), self.content["n_rows"]["value"] or float(weights.sum())
        cut, law = self._cut, self._law
        deviation = law["standard_deviation"]

        def noise(chosen: Sequence[str]) -> NoisyCells:
            frame, listed, others = self._count_cells(cells, cell, chosen)
            sizes = (
                listed
                if cut is None
                else listed + others * _moment_above(law, cut, 2) / deviation**2
            )
            return NoisyCells(frame=frame, variance=(deviation / n_rows) ** 2, sizes=sizes)

        frame = cells[list(names)]
        return Points(
            frame=frame,
            weights=weights,
            n_rows=n_rows,
            sampling=1.0 / n_rows,
            levels=self._level_map(names),
            ends=self._cell_ends(frame),
            bounds=self._bounds(names),
            noise=noise,
            lost=self._lost(weights, cell) / n_rows,
            limits=(_WIDTHS,)
            if cut is None
            else (_WIDTHS, f"cells whose noisy count was below {cut} are left out: {_LEFT_OUT}"),
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

    def _plan(self, question: str, names: Sequence[str], **options: Any) -> Callable[[], Any]:
        self._find_table(names)
        return super(OpenedTables, self)._plan(question, names, **options)

    def _points(self, *names: str) -> Points:
        clique = self._find_table(names)
        label = " x ".join(clique)
        rows, cells = self.to_pandas(["table", "count"]), self._list_cells(clique)
        weights = rows["count"][rows["table"] == label].to_numpy(dtype=np.float64)
        if len(weights) != len(cells):
            raise InputError(
                "does not have the cells that its card says",
                f"table {label!r}",
                "copy the whole folder again",
            )
        frame = cells[list(names)]
        n_rows = self.content["n_rows"]["value"] or float(weights.sum())
        noisy = NoisyCells(
            frame=frame,
            variance=(self.content["accounting"]["noise"][label]["standard_deviation"] / n_rows)
            ** 2,
        )
        ends = self._cell_ends(frame)
        return Points(
            frame=frame,
            weights=weights,
            n_rows=n_rows,
            sampling=1.0 / n_rows,
            levels=self._level_map(names),
            ends=ends,
            bounds=self._bounds(names),
            noise=lambda _: noisy,
            limits=("values of a range count as its middle",) if ends else (),
            dates={
                name: scale
                for name in names
                if (scale := DateScale.of_card(self._column(name))) is not None
            },
        )

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
