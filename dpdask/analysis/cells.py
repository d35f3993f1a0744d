"""Opened releases of the cells of a perturbed histogram: weighted points, and M-estimators of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, ClassVar

import numpy as np
import pandas as pd

from dpdask.analysis.opened import Refusals
from dpdask.analysis.opened_points import OpenedPoints
from dpdask.analysis.points import MODEL, NO_VARIANCE, NOT_TOLD, OTHERS, Points
from dpdask.analysis.results import Query, Result
from dpdask.analysis.values import DateScale, NoisyCells, find_scales
from dpdask.arrays import Floats
from dpdask.cells import FEW_ROWS
from dpdask.errors import InputError, SpecError, list_names
from dpdask.inference.m_estimators import (
    WeightedSample,
    find_influence,
    huber,
    least_squares,
    logistic,
    noise_error,
    poisson,
    quantile_regression,
)
from dpdask.inference.placed import APART, APART_OF_NUMBERS, PlacedTable
from dpdask.inference.redraw import ThresholdedCells, keep_tails
from dpdask.inference.tallies import Codes
from dpdask.references.counts import IN_CELLS, label_table
from dpdask.streams import RunKey, stream

_WEIGHT = "weight"
_NO_RANGES = "the release holds weighted cells, not ranges of single rows"
_NO_ROWS = "the release holds tables, not ranges of single rows"
_NO_PERSONS = "no error of it is known where each person weighs 1, however many rows it has"
_ALIKE = "each person with rows weighs the same, however many it has"
_REPEATS = 50
_STILL = 1e-9
_MOST_CELLS = 100_000


def _correlate(sample: WeightedSample) -> Floats:
    """Return the correlation of the response and the only feature."""
    return np.array([(_scores(sample).prod(axis=1) @ sample.weights) / sample.weights.sum()])


def _correlation_influence(sample: WeightedSample, values: Floats) -> Floats:
    u = _scores(sample)
    moved = u.prod(axis=1) - values[0] / 2.0 * (u**2).sum(axis=1)
    return moved[:, None] / sample.weights.sum()


def _scores(sample: WeightedSample) -> Floats:
    """Return the response and the feature, each with the mean 0 and the variance 1."""
    x = np.column_stack([sample.response, sample.features])
    if x.shape[1] != 2:
        what, use = "R² is of one column of numbers", "use slope(), or columns of numbers"
        raise SpecError(what, "r_squared", use)
    share = sample.weights / sample.weights.sum()
    z = x - share @ x
    return z / np.sqrt(np.maximum(share @ z**2, 1e-300))


_SIGNED = (_correlate, least_squares, logistic, poisson)  # which take negative weights
_INFLUENCES: Mapping[Any, Callable[[WeightedSample, Floats], Floats]] = {
    least_squares: partial(find_influence, kind="linear"),
    logistic: partial(find_influence, kind="logistic"),
    poisson: partial(find_influence, kind="poisson"),
    huber: partial(find_influence, kind="huber"),
    _correlate: _correlation_influence,
    quantile_regression: partial(find_influence, kind="median"),
}
_SURE = 6.0  # standard deviations of its noise that the variance of the features has at least
_EVEN = "numbers were cut into declared cells: where many of these hold few rows, no bound on the bias is known to hold; with `bins: adaptive` there is one"
_WIDTHS = "the bound on the bias is of the widths of the cells"
_BOUNDS_HOLD = "bounds of shares, counts and quantiles hold them, those of means do not"
_CORRECTED = "cells whose noisy count was below {cut} are left out; the number of rows expected in them is added, and the bound on the bias includes the rest"
_NO_ERROR = "it does not move when the noise is drawn again, as a quantile of few points, so no standard error is known"


@dataclass(frozen=True, kw_only=True, eq=False)
class _Tabulated:
    """The cells of some columns: points in them, and the matrices that give these their weights, with dependence inside cells and without."""

    table: PlacedTable
    drawn: ThresholdedCells
    cell: Codes  # of each cell of the columns that the card lists and the estimator uses, its place in the table
    used: Codes  # which of all of them that are
    lines: Sequence[int]  # axes whose cells are ranges
    deviation: float  # of the noise of a count
    is_told: bool
    # by the place of a column whose cells were found, the standard error of the mean of each cell,
    # and its place among the features; None of the response
    doubts: Mapping[int, tuple[Floats, int | None]]
    sample: WeightedSample
    leaning: Any
    even: Any
    tilted: Sequence[Any]  # of each axis of ranges, what a dependence of another kind adds

    @cached_property
    def again(self) -> Floats:
        """How far the weights of the points are from those of the expected rows, of shape (repeats, n): rows and noise drawn again."""
        # any stream: this is post-processing
        rng = stream(RunKey.insecure(0), "analysis/redraw", "").seed_generator()
        moved = np.zeros((_REPEATS, self.table.counts.size))
        for row in moved:
            row[self.cell] = (self.drawn.draw(rng) - self.drawn.expected)[self.used]
        return (self.leaning @ moved.T).T

    def doubt_variance(self, sample: WeightedSample) -> float:
        """Return the standard deviation of the noise in the variance of the features, as a part of it, in the direction in which that is least."""
        share = sample.weights / sample.weights.sum()
        z = sample.features - share @ sample.features
        spread = np.sqrt(np.maximum(share @ z**2, 1e-300))
        values, vectors = np.linalg.eigh((z / spread).T @ (share[:, None] * z / spread))
        least = (z / spread @ vectors[:, 0]) ** 2 / sample.weights.sum()
        return float(np.std(self.again @ least) / values[0]) if values[0] > 0.0 else math.inf

    def doubt(self, estimator: Any, sample: WeightedSample, values: Floats) -> Floats:
        """Return the standard error that the means of cells which were found give an estimate."""
        squares: list[Floats] = [np.zeros(values.shape)]
        for place, (doubts, column) in self.doubts.items():
            axis = self.table.axes[place]
            x = sample.response if column is None else sample.features[:, column]
            cell = axis.cell[np.minimum(np.searchsorted(axis.values, x), len(axis.cell) - 1)]
            for each in np.flatnonzero(doubts):
                shifted = x + np.where(cell == each, doubts[each], 0.0)
                if column is None:
                    moved = replace(sample, response=shifted)
                else:
                    features = sample.features.copy()
                    features[:, column] = shifted
                    moved = replace(sample, features=features)
                squares.append((np.asarray(estimator(moved), float) - values) ** 2)
        return np.sqrt(np.sum(squares, axis=0))

    def lean_otherwise(self) -> Floats:
        """Return how far another dependence inside cells, of any sign in each, may move the weights of the points, of shape (repeats, n)."""
        # any stream: this is post-processing
        rng = stream(RunKey.insecure(0), "analysis/redraw", "").seed_generator()
        counts = np.maximum(self.table.counts.ravel(), 0.0)
        size = APART_OF_NUMBERS if len(self.tilted) > 1 else APART
        found = np.zeros((_REPEATS, len(self.sample.weights)))
        for matrix in self.tilted:
            found += (
                matrix @ (size * counts * rng.choice((-1.0, 1.0), (_REPEATS, counts.size))).T
            ).T
        return found

    def weigh(self, counts: Floats, parts: Any = None, *, signed: bool) -> WeightedSample:
        """Return the points with the weights of some counts of the columns' cells; `signed` are as they are, others without negative ones."""
        found: Floats = np.zeros(self.table.counts.size)
        found[self.cell] = counts[self.used]
        if not signed:
            table = found.reshape(self.table.counts.shape)
            for axis in self.lines:
                table = keep_tails(table, axis, self.deviation)
            found = np.maximum(table, 0.0).ravel()
        matrix = self.leaning if parts is None else parts
        return replace(self.sample, weights=matrix @ found)


class JointCells(OpenedPoints):
    """What is released of the cells of a perturbed histogram."""

    def _plan(self, asked: Query) -> Callable[[], Any]:
        names = asked.names
        lines = ("slope", "intercept", "r_squared")
        if asked.kind not in (*lines, "fit") or asked.kind in self.refusals:
            answer = super()._plan(asked)
            is_even = self._has_even_cells and self._table is None
            return partial(self._leave_unbounded, answer) if is_even else answer
        self._check_no_texts(names[:1])
        self._check_no_dates(names)
        if asked.kind == "fit":
            return lambda: self._fit(asked.estimator, names)
        estimator = _correlate if asked.kind == "r_squared" else least_squares
        part = slice(1, None) if asked.kind == "slope" else 0
        return lambda: self._fit(estimator, names).change(lambda series: series.iloc[part])

    @cached_property
    def _private(self) -> list[str]:
        columns = self.content["columns"].items()
        return [name for name, column in columns if column["role"] != "kept"]

    @cached_property
    def _table(self) -> Floats | None:
        """The noisy counts of all cells, those below the threshold too, with an axis for each column; None where they are not published."""
        names = self._private
        rows = self._measured.get(label_table(*names) + IN_CELLS)
        if rows is None:
            return None
        with self._check_counts():
            sizes = [int(self._column(name)["cells"]) for name in names]
            return rows["count"].to_numpy().astype(float).reshape(sizes)

    def _points(self, *names: str) -> Points:
        if self._table is None:
            return self._points_of_listed(*names)
        deviation = self._noise["standard_deviation"]
        return _sum_table(self, names, self._private, self._table, deviation)

    def _points_of_listed(self, *names: str) -> Points:
        """Return the points of some columns by the cells that are listed alone."""
        raise NotImplementedError

    @property
    def _has_even_cells(self) -> bool:
        """Whether numbers were cut into many declared cells for the number of rows: most hold few rows and are left out, and no bound was seen to hold what that moves."""
        private = [self._column(name) for name in self._private]
        n_cells = math.prod(int(column["cells"]) for column in private)
        n_rows = float(self.content["n_rows"]["value"] or 0.0)
        is_even = any("levels" not in each and "means" not in each for each in private)
        return is_even and n_rows < FEW_ROWS * n_cells

    @staticmethod
    def _leave_unbounded(answer: Callable[[], Result]) -> Result:
        found = answer()
        return replace(found, bias_bound=None, limits=(*found.limits, _EVEN))

    def _fit(self, estimator: Any, names: Sequence[str]) -> Result:
        if not callable(estimator):
            use = "give one of dpdask.inference, such as `logistic`, and then the columns"
            raise SpecError("the estimator must be a function", "fit", use)
        if tuple(names) not in self._tabulated:
            self._tabulated[tuple(names)] = self._tabulate(names)
        found = self._tabulated[tuple(names)]
        counts, signed = found.drawn.corrected, estimator in _SIGNED
        sample = found.weigh(counts, signed=signed)
        values, even = (
            np.asarray(estimator(each), float)
            for each in (sample, found.weigh(counts, found.even, signed=signed))
        )
        whole = sample if signed else found.weigh(counts, signed=True)
        part = found.doubt_variance(whole)
        if not _SURE * part < 1.0:
            raise SpecError(NO_VARIANCE, f"regression on {', '.join(names[1:])}", OTHERS)
        if estimator in _INFLUENCES:
            influence = _INFLUENCES[estimator](sample, values)
            moved = found.again @ influence
            errors, off = moved.std(axis=0, ddof=1), np.abs(moved.mean(axis=0))
            off += np.abs((whole.weights - sample.weights) @ influence)
            # as of the slope of a table: the variance may be large enough by its noise alone
            slopes = np.abs(values[-whole.features.shape[1] :]) * part / (1.0 - part)
            off[-len(slopes) :] += slopes
            off += np.sqrt(((found.lean_otherwise() @ influence) ** 2).mean(axis=0))
            if len(values) > len(slopes):
                centre = whole.weights @ whole.features / whole.weights.sum()
                off[0] += slopes @ np.abs(centre)
        else:
            # any stream: this is post-processing
            rng = stream(RunKey.insecure(0), "analysis/redraw", "").seed_generator()
            again = noise_error(
                estimator,
                lambda rng: found.weigh(found.drawn.draw(rng), signed=signed),
                repeats=_REPEATS,
                rng=rng,
            )
            expected = estimator(found.weigh(found.drawn.expected, signed=signed))
            errors, off = again.standard_error, np.abs(again.mean - expected)
            others = [
                estimator(replace(sample, weights=np.maximum(sample.weights + moved, 0.0)))
                for moved in found.lean_otherwise()
            ]
            off += np.sqrt(((np.array(others) - values) ** 2).mean(axis=0))
        errors = np.hypot(errors, found.doubt(estimator, sample, values))
        bias = off + np.abs(values - even) / 2.0
        labels = ["intercept", *found.sample.names][1 + len(found.sample.names) - len(values) :]
        index = pd.Index(labels if len(labels) == len(values) else range(len(values)))
        moves = bool((errors > _STILL * np.abs(values)).all())
        limits = [MODEL if found.is_told else NOT_TOLD]
        limits += [] if self._cut is None else [_CORRECTED.format(cut=self._cut)]
        limits += [] if moves else [_NO_ERROR]
        return Result(
            estimate=pd.Series(values, index),
            standard_error=pd.Series(errors, index) if moves else None,
            bias_bound=pd.Series(bias, index) if found.is_told else None,
            limits=tuple(limits),
        )

    @cached_property
    def _tabulated(self) -> dict[tuple[str, ...], _Tabulated]:
        return {}

    def _list_joint(self) -> tuple[pd.DataFrame, Floats]:
        """Return a point of each cell that is listed, and its count."""
        raise NotImplementedError

    def _count_joint(
        self, names: Sequence[str]
    ) -> tuple[ThresholdedCells, pd.DataFrame, pd.DataFrame]:
        """Return the counts of some columns' cells, a point of each cell of all columns that is listed, and one of each of the columns' own."""
        first, counts = self._list_joint()
        every, place, others = self._count_cells(first, names)
        drawn = ThresholdedCells(
            counts=counts,
            place=place,
            others=others if self._cut is not None else np.zeros(len(every)),
            scale=self._noise["scale"],
            cut=self._cut,
            n_rows=self.content["n_rows"]["value"],
            n_records=self.content["mechanism"]["records"],
        )
        return drawn, first, every

    def _tabulate(self, names: Sequence[str]) -> _Tabulated:
        """Return the cells of some columns, those with a null in one of them left out."""
        n_cells = math.prod(self._column(name)["cells"] for name in names)
        if n_cells > _MOST_CELLS:
            what = f"these columns have {n_cells:,} cells together; the limit is {_MOST_CELLS:,}"
            raise SpecError(what, ", ".join(names), "use fewer columns")
        drawn, first, every = self._count_joint(names)
        weights = drawn.corrected
        known = every.notna().all(axis=1)
        for name in self._level_map(names):
            known &= every[name].isin(first[name].unique())
        used = np.flatnonzero(known)
        grid = every.iloc[used].reset_index(drop=True)
        noise = (self._noise["standard_deviation"] / self._count_rows(weights)) ** 2
        points = self._make_points(
            grid,
            weights[used],
            float(weights[used].sum()),
            noise=lambda chosen: NoisyCells(
                frame=grid[list(chosen)],
                variance=noise,
                sizes=np.full(len(grid), len(first) / len(every)),
            ),
            fine=self._find_fine(names),
        )
        table, codes = points.lay_out(names)
        is_told = all(map(partial(points.is_resolved, table), range(len(names)), names))
        texts = [any(isinstance(each, str) for each in grid[name]) for name in names]
        labels = [
            axis.cell.astype(float) if text else axis.values
            for axis, text in zip(table.axes, texts, strict=True)
        ]
        found, leaning = table.gather(table.leaning, labels)
        frame = pd.DataFrame(found, columns=list(names)).assign(**{_WEIGHT: 1.0})
        for name, text in zip(names, texts, strict=True):
            if text:
                levels = [each for each in self._levels(name) or () if each in set(grid[name])]
                frame[name] = np.array(levels, dtype=object)[frame[name].astype(int)]
        lines = [k for k, name in enumerate(names) if "edges" in self._column(name)]
        sample = WeightedSample.of_frame(frame, names[0], names[1:])
        doubts: dict[int, tuple[Floats, int | None]] = {}
        for k in lines:
            of_cells = np.zeros(table.axes[k].n_cells)
            of_cells[codes[k]] = points.place(names[k], (-math.inf, math.inf))[1]
            if of_cells.any():
                doubts[k] = (of_cells, sample.names.index(names[k]) if k else None)
        return _Tabulated(
            table=table,
            drawn=drawn,
            cell=np.ravel_multi_index(codes, table.counts.shape).astype(np.int64),
            used=used,
            lines=lines,
            deviation=self._noise["standard_deviation"]
            * math.sqrt(self.content["mechanism"]["cells"] / len(every)),
            is_told=is_told,
            doubts=doubts,
            sample=sample,
            leaning=leaning,
            even=table.gather(table.even, labels)[1],
            tilted=[table.gather(table.leaning * table.tilt(k), labels)[1] for k in lines],
        )

    @property
    def _cut(self) -> int | None:
        """The least noisy count that was kept; None if all were."""
        return self.content["mechanism"]["cut"]

    @property
    def _noise(self) -> Mapping[str, float]:
        """The noise of a cell's count: its standard deviation, and its scale."""
        return self.content["accounting"]["noise"]["cells"]

    def _count_lost(self, counts: Floats) -> tuple[float, list[str]]:
        """Return how many rows may be in cells that were left out, or were counted by noise alone; and what to say of them.

        What is missing from the number of rows, and what the cut made of the noise: the mean of the
        part of it that reaches the cut from an empty cell, for every cell, and from the cut itself,
        for those listed below twice the cut; and two standard deviations.
        """
        cut = self._cut
        if cut is None:
            return 0.0, []
        said = [f"cells whose noisy count was below {cut} are left out: {_BOUNDS_HOLD}"]
        n_cells, n_rows = self.content["mechanism"]["cells"], self.content["n_rows"]["value"]
        if n_rows is None:
            return float(cut * (n_cells - len(counts))), said
        near = int((counts < 2 * cut).sum())
        selected = n_cells * self._moment_above(cut, 1) + near * self._moment_above(0, 1)
        of_rows = self.content["accounting"]["noise"].get("n_rows", {}).get("standard_deviation", 0)
        doubt = math.hypot(self._noise["standard_deviation"] * math.sqrt(len(counts)), of_rows)
        return max(0.0, float(n_rows - counts.sum() + selected + 2.0 * doubt)), said

    def _count_cells(
        self, first: pd.DataFrame, names: Sequence[str]
    ) -> tuple[pd.DataFrame, Codes, Floats]:
        """Return a point of each cell of some columns' table; in which of them each cell that is listed lies; and how many others lie in it."""
        every = self._list_cells(names)
        code = self._number_cells(pd.concat([first[list(names)], every], ignore_index=True))
        place = np.zeros(int(code.max()) + 1, dtype=np.int64)
        place[code[len(first) :]] = np.arange(len(every))
        found = place[code[: len(first)]]
        listed = np.bincount(found, minlength=len(every))
        others = np.maximum(self.content["mechanism"]["cells"] / len(every) - listed, 0.0)
        return every, found, others

    def _number_cells(self, cells: pd.DataFrame) -> Codes:
        """Return the number of each point's cell: several points may stand for one."""
        codes = {}
        for name, column in self.content["columns"].items():
            if name in cells and "edges" in column:
                x = cells[name].to_numpy(float, na_value=np.nan)
                place = np.searchsorted(np.array(column["edges"], float), x)
                place = np.where(np.isnan(x), len(column["edges"]) + 1, place)
                atoms = np.array(column["atoms"], float)
                codes[name] = np.where(np.isin(x, atoms), -1 - place, place)
            elif name in cells:
                codes[name] = pd.factorize(cells[name], use_na_sentinel=False)[0]
        numbers = pd.DataFrame(codes).groupby(list(codes), sort=False).ngroup()
        return numbers.to_numpy(dtype=np.int64)

    def _moment_above(self, least: int, k: int) -> float:
        """Return the k-th moment of a cell's noise where it is at least so much, and 0 elsewhere."""
        scale = self._noise["scale"]
        far = math.ceil(40 * scale)  # further values do not matter
        x = np.arange(-far, least + far + 1, dtype=float)
        density = np.exp(-np.abs(x) / scale)
        return float((density * x**k)[x >= least].sum() / density.sum())


class OpenedCells(JointCells):
    """The cells of a perturbed histogram, each with a point and a noisy weight."""

    holds_rows: ClassVar[bool] = False
    refusals: ClassVar[Refusals] = {
        "npmle": (_NO_RANGES, "use histogram() or quantile()"),
        "regress": (_NO_RANGES, "use slope() or fit()"),
    }

    def _list_joint(self) -> tuple[pd.DataFrame, Floats]:
        cells, _ = self._read_cells()
        cell = self._number_cells(cells)
        counts = np.bincount(cell, weights=cells[_WEIGHT]).astype(float)
        return cells.groupby(cell, sort=True).nth(0), np.rint(counts)

    def _points_of_listed(self, *names: str) -> Points:
        cells, dates = self._read_cells()
        weights = cells[_WEIGHT].to_numpy(float)
        cell, n_rows = self._number_cells(cells), self._count_rows(weights)
        lost, said = self._count_lost(np.bincount(cell, weights=weights).astype(float))
        deviation = self._noise["standard_deviation"]

        def noise(chosen: Sequence[str]) -> NoisyCells:
            first = cells.groupby(cell, sort=True).nth(0)
            frame, place, others = self._count_cells(first, chosen)
            listed = np.bincount(place, minlength=len(frame)).astype(float)
            if self._cut is not None:
                listed = listed + others * self._moment_above(self._cut, 2) / deviation**2
            return NoisyCells(frame=frame, variance=(deviation / n_rows) ** 2, sizes=listed)

        return self._make_points(
            cells[list(names)],
            weights,
            n_rows,
            noise=noise,
            lost=lost / n_rows,
            limits=(_WIDTHS, *said),
            dates=dates,
        )

    def _read_cells(self) -> tuple[pd.DataFrame, dict[str, DateScale]]:
        """Return the released points, dates on a line as numbers, and how these count them."""
        cells, columns = self._read_rows(self._types.names), self.content["columns"]
        scales = find_scales(cells[[name for name in columns if "edges" in columns[name]]])
        numbers = {name: scale.to_numbers(cells[name]) for name, scale in scales.items()}
        return cells.assign(**numbers), scales


class OpenedRecordsOfCells(JointCells):
    """Rows drawn from the cells of a perturbed histogram, in proportion to their noisy counts."""

    refusals: ClassVar[Refusals] = {
        "npmle": ("the release holds values, not ranges", "use share(), histogram() or quantile()"),
        "regress": ("the release holds values, not ranges", "use slope()"),
        "fit": (
            "the records carry no weights",
            "use slope(), or a release whose `output` is cells",
        ),
    }

    def _list_joint(self) -> tuple[pd.DataFrame, Floats]:
        rows = self._read_rows(
            [name for name in self._types.names if name in self.content["columns"]]
        )
        scales = find_scales(rows)
        rows = rows.assign(**{name: scale.to_numbers(rows[name]) for name, scale in scales.items()})
        cell = self._number_cells(rows)
        counts = np.bincount(cell) * (self.content["mechanism"]["total_weight"] / len(rows))
        return rows.groupby(cell, sort=True).nth(0), counts

    def _points_of_listed(self, *names: str) -> Points:
        frame, weights = self._read(names), np.ones(self.n_rows)
        n_rows, (lost, said) = self._count_rows(weights), self._count_lost(self._joint[1])

        def noise(chosen: Sequence[str]) -> NoisyCells:
            table = self._list_cells(chosen)
            # a cell of these columns is a sum over the cells of the others that are listed
            n_added = max(1.0, self.content["mechanism"]["cells_listed"] / len(table))
            variance = n_added * (self._noise["standard_deviation"] / n_rows) ** 2
            return NoisyCells(frame=table, variance=variance)

        return self._make_points(
            frame,
            weights,
            n_rows,
            sampling=1.0 / n_rows + 1.0 / self.n_rows,
            noise=noise,
            lost=lost / n_rows,
            fine=self._find_fine(names),
            limits=tuple(said),
            dates=find_scales(frame),
        )

    @cached_property
    def _joint(self) -> tuple[pd.DataFrame, Floats]:
        return self._list_joint()


class OpenedTables(OpenedPoints):
    """Noisy tables of counts: each answers questions about its own columns."""

    holds_rows: ClassVar[bool] = False
    refusals: ClassVar[Refusals] = {
        "npmle": (_NO_ROWS, "use share() or histogram()"),
        "regress": (_NO_ROWS, "use slope()"),
        "fit": (
            "the release holds tables, not weighted points",
            "use slope(), or a release of the mechanism `histogram`",
        ),
    }

    def _plan(self, asked: Query) -> Callable[[], Any]:
        self._find_table(self._sources(asked.names))
        return super()._plan(asked)

    def _points(self, *names: str) -> Points:
        clique = self._find_table(names)
        label = " x ".join(clique)
        rows = self._read_rows(["table", "count"])
        weights = rows["count"][rows["table"] == label].to_numpy(float)
        if len(weights) != math.prod(int(self._column(name)["cells"]) for name in clique):
            what = "does not have the cells that its card says"
            raise InputError(what, f"table {label!r}", "copy the whole folder again")
        deviation = self.content["accounting"]["noise"][label]["standard_deviation"]
        sizes = [int(self._column(name)["cells"]) for name in clique]
        return _sum_table(self, names, clique, weights.reshape(sizes), deviation)

    def _find_table(self, names: Sequence[str]) -> list[str]:
        """Return the table with the fewest cells that has all columns."""
        cliques: list[list[str]] = self.content["mechanism"]["cliques"]
        found = [clique for clique in cliques if set(names) <= set(clique)]
        if not found:
            tables = list_names([" x ".join(clique) for clique in cliques], 6)
            raise SpecError(
                "no released table has these columns",
                ", ".join(names),
                f"use one of the tables {tables}, or release another one",
            )
        return min(
            found, key=lambda clique: math.prod(self._column(name)["cells"] for name in clique)
        )


class OpenedPersonTables(OpenedTables):
    """Noisy tables of persons with their rows, in which each person weighs 1.

    Notes
    -----
    Errors take each person as one of its rows, drawn at random: what the draw of persons adds to
    the mean of their own means is at most that, since a mean varies less than what it is of.
    """

    def _plan(self, asked: Query) -> Callable[[], Any]:
        if asked.kind not in ("share", "crosstab", "mean"):
            use = "use share(), crosstab() or mean()"
            raise SpecError(_NO_PERSONS, f"{asked.kind}({', '.join(asked.names)})", use)
        return super()._plan(asked)

    def _put(self, asked: Query, values: Floats | None) -> Result:
        found = super()._put(asked, values)
        clique = self._find_table(self._sources(asked.names))
        persons = self.content["mechanism"]["persons"]["parents"]
        if asked.kind == "crosstab":  # a count whose total has noise, too, is no share of it
            points = self._find_points(asked.names)
            assert points.noise is not None
            one = np.ones(len(points.weights))  # for each cell, to see how many are in a count
            cells = replace(points, weights=one, n_rows=one.sum()).crosstab(*asked.names).estimate
            noise = points.noise(asked.names).variance * points.n_rows**2 * cells
            error = np.sqrt(noise + found.estimate.clip(lower=1.0))
            found = replace(found, standard_error=error, drawn=None)
        if {*clique} <= {*persons}:
            return replace(found, of_table=True)
        return replace(found, limits=(_ALIKE, *found.limits))

    @property
    def _is_counted(self) -> bool:
        return False  # persons without rows are in some tables only

    def _count_rows(self, weights: Floats) -> float:
        return max(float(weights.sum()), 1.0)


def _sum_table(
    opened: OpenedPoints, names: Sequence[str], axes: Sequence[str], table: Floats, deviation: float
) -> Points:
    """Return the cells of some columns, by a table of more of them: noise adds up with the counts."""
    summed = table.sum(axis=tuple(k for k, name in enumerate(axes) if name not in names))
    kept = [name for name in axes if name in names]
    counts = np.transpose(summed, [kept.index(name) for name in names]).ravel()
    found = opened._points_of_table(names, counts, deviation * math.sqrt(table.size / counts.size))
    means = any("means" in opened._column(name) for name in names)
    middle = "the mean of the fine counts in it" if means else "its middle"
    limits = (f"values of a range count as {middle}",) if found.ends else ()
    return replace(found, limits=limits)
