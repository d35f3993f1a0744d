"""Opened releases of the synthetic records of a copula."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pyarrow as pa

from dpdask.analysis.measured import average_margin, average_pair
from dpdask.analysis.opened import Refusals
from dpdask.analysis.opened_points import OpenedPoints
from dpdask.analysis.points import Points
from dpdask.analysis.results import Query
from dpdask.analysis.values import NoisyCells, find_scales
from dpdask.engine.lazy import check_count, check_seed, read_like
from dpdask.inference.measured import MeasuredColumn
from dpdask.io.shards import MODEL
from dpdask.streams import RunKey

if TYPE_CHECKING:
    from dpdask.mechanisms.copula.release import FittedCopula

_RECORDS = (
    "standard errors add up the draw of the rows, the noise of the tables before they were smoothed, and the draw of the records",
    "they do not include the error of the model, which has no known bound: dependence of three columns, and the places of values inside a cell",
)


class OpenedRecords(OpenedPoints):
    """Synthetic records: ordinary estimates are right, but their ordinary standard errors are too small, since counts had noise."""

    most_joined: ClassVar[int | None] = 2
    refusals: ClassVar[Refusals] = {
        "npmle": ("the release holds values, not ranges", "use share(), histogram() or quantile()"),
        "regress": ("the release holds values, not ranges", "use slope()"),
        "fit": (
            "the records carry no weights, and their noise cannot be redrawn from the folder",
            "use slope(), or to_pandas(), whose errors leave the noise out",
        ),
    }

    @cached_property
    def _model(self) -> FittedCopula:
        """The model, checked; refused if none is published."""
        from dpdask.mechanisms.copula.release import FittedCopula  # its kernels take a second

        with self._check_counts(MODEL):
            data = self._read_beside(MODEL)
        if data is None:
            raise self._no_model()
        return FittedCopula.from_bytes(data, f"{self.folder.url}/{self._place(MODEL)}")

    def _draw(
        self, n_rows: int | None, where: str | None, seed: int | None, like: Any = None
    ) -> tuple[FittedCopula, Iterator[tuple[list[pa.RecordBatch], float]]]:
        model, key = self._model, RunKey.insecure(check_seed(seed))
        if like is not None:
            given = read_like(model, like, n_rows, where)
            return model, model.draw_blocks(given.n_rows, key, given)
        n = model.n_drawn(None if n_rows is None else check_count("n_rows", n_rows))
        wanted = None if where is None else model.condition(where)
        return model, model.draw_blocks(n, key, wanted)

    def _plan(self, asked: Query) -> Callable[[], Any]:
        is_alone = len(asked.names) == 1 and "computes" in self._column(asked.names[0])
        if not is_alone or self._find_measured(asked.names[0]) is None:
            self._check_released(asked.names)
        return super()._plan(asked)

    def _points(self, *names: str) -> Points:
        if len(names) == 2 and (found := self._find_pair(*names)) is not None:
            return found
        frame, weights = self._read(names), np.ones(self.n_rows)
        n_rows, noise = self._count_rows(weights), self.content["accounting"]["noise"]

        def find_noise(chosen: Sequence[str]) -> NoisyCells:
            """Return the cells of the noisy table of one or two columns."""
            kind = "one_way" if len(chosen) == 1 else "two_way"
            variance = (noise[kind]["standard_deviation"] / n_rows) ** 2
            return NoisyCells(frame=self._list_cells(chosen), variance=variance)

        return self._make_points(
            frame,
            weights,
            n_rows,
            sampling=1.0 / n_rows + 1.0 / self.n_rows,
            noise=find_noise,
            biased=len(names) > 1,  # by a model
            limits=_RECORDS,
            dates=find_scales(frame),
        )

    def _read_counts(self, name: str, n_rows: float | None) -> MeasuredColumn | None:
        if self._levels(name) is None:
            return super()._read_counts(name, n_rows)
        columns = self.content["columns"].items()
        sizes = {each: int(column["cells"]) for each, column in columns if "cells" in column}
        with self._check_counts():
            return average_margin(self._measured, name, sizes, n_rows)

    def _find_pair(self, first: str, second: str) -> Points | None:
        """Return the cells of the noisy table of two columns, which no model bends."""
        sizes = [int(self._column(name)["cells"]) for name in (first, second)]
        with self._check_counts():
            found = average_pair(self._measured, (first, second), sizes)
        if found is None:
            return None
        return self._points_of_table([first, second], found[0], math.sqrt(found[1]))
