"""A fitted perturbed histogram: the noisy counts and the description of their cells, released as cells or as rows; safe to publish."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, get_args

import numpy as np
import pyarrow as pa

from dpdask.archive import Archive, Archived, Contents
from dpdask.cells import Cells
from dpdask.codec import LevelCodec
from dpdask.errors import SpecError
from dpdask.mechanisms.columns import CHUNK_ROWS, Bins, columns_from_header, columns_to_header, cut_released, draw_records
from dpdask.mechanisms.histogram.cells import centres
from dpdask.mechanisms.histogram.noise import NoisyHistogram
from dpdask.mechanisms.histogram.points import Points, points_per_cell, spread
from dpdask.privacy.events import Composed
from dpdask.schema import Schema
from dpdask.streams import Rng, RunKey, stream

if TYPE_CHECKING:
    import pandas as pd

Output = Literal["cells", "rows"]

WEIGHT = "weight"
_RECORDS = "histogram/records"


def type_points(released: pa.Schema, schema: Schema) -> pa.Schema:
    """Return the columns in which points with weights are written; numbers of cells of the line are middles, as float64.

    Parameters
    ----------
    released
        The released columns of the table.
    schema
        The declared columns.
    """
    numbers = {each.name for each in released if pa.types.is_integer(each.type) or pa.types.is_floating(each.type)}
    cut = {name for name in numbers if not schema.columns[name].has_levels}
    return pa.schema([*((each.name, pa.float64() if each.name in cut else each.type) for each in released), (WEIGHT, pa.float64())])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FittedHistogram(Archived):
    """A noisy histogram with the columns that its cells stand for: what a job writes, and what Python lists and samples.

    Attributes
    ----------
    schema
        The declared columns.
    columns
        The Arrow types of the privatised columns, in the order of the table.
    bins
        How each continuous or mixed column is cut.
    histogram
        The noisy counts.
    output
        What `batches` yields: `cells`, points and weights; or `rows`, each from a cell with probability proportional to its
        positive weight.
    points
        What stands for each cell: its `centre`, or points that are `spread` in it.
    """

    archive: ClassVar[Archive] = Archive(kind="histogram", format=2, noun="perturbed histogram", is_compressed=True)

    schema: Schema
    columns: pa.Schema
    bins: Bins
    histogram: NoisyHistogram
    output: Output = "cells"
    points: Points = "centre"

    def cells(self) -> dict[str, Cells]:
        """Return the public cells of each released column, in the order of the domain."""
        return cut_released(self.histogram.domain.names, self.schema, self.columns, self.bins)

    @property
    def event(self) -> Composed:
        """What was drawn."""
        return self.histogram.plan.event

    @property
    def types(self) -> pa.Schema:
        """The columns that are written: those of the table, or with a `weight` those of `cell_rows`."""
        return self.columns if self.output == "rows" else self.cell_rows(0, 0).schema

    @property
    def few_valued(self) -> list[str]:
        """Which of them have few distinct values: of cells, all but the weight."""
        return [name for name in self.schema.privatised if self.output == "cells" or self.schema.columns[name].has_levels]

    def batches(self, start: int, n_rows: int, n_total: int, key: RunKey, part: str) -> Iterator[pa.RecordBatch]:
        """Yield cells, or rows.

        Parameters
        ----------
        start
            The number of the first one in the release.
        n_rows
            How many. For rows, some weight must be positive unless it is 0.
        n_total
            Not used: rows are a function of the part.
        key, part
            Name the random streams of rows: one for the cells, one for each column's values inside them.
        """
        del n_total
        if self.output == "cells":
            yield from self.cell_rows(start, start + n_rows).to_batches()
            return
        rng = stream(key, _RECORDS, part)
        chunks = (self.histogram.sample_codes(min(CHUNK_ROWS, n_rows - first), rng=rng) for first in range(0, n_rows, CHUNK_ROWS))
        yield from draw_records(self.columns, self.cells(), chunks, lambda name: stream(key, f"{_RECORDS}/{name}", part))

    @property
    def n_points(self) -> int:
        """How many points the cells listed have together.

        Raises
        ------
        SpecError
            If too many columns are cut for points to be spread.
        """
        return len(self.histogram.keys) * points_per_cell(self.cells(), self.points)

    def cell_rows(self, start: int, stop: int) -> pa.Table:
        """Return some of the cells' points: for each column, in the table's order, its value, and `weight`, float64.

        Parameters
        ----------
        start, stop
            Which of the points, in the order of the cells' keys.
        """
        cells = self.cells()
        each = points_per_cell(cells, self.points)
        first, last = start // each, -(-stop // each)
        if self.points == "centre":
            codes = self.histogram.codes_at(first, last)
            columns = {name: centres(column).take(pa.array(code)) for (name, column), code in zip(cells.items(), codes, strict=True)}
            weights = self.histogram.weights[first:last].astype(np.float64)
        else:
            columns, weights = spread(self.histogram, cells, first, last)
        table = pa.table({**{name: columns[name] for name in self.columns.names}, WEIGHT: weights})
        return table.slice(start - first * each, stop - start)

    def to_frame(self) -> pd.DataFrame:
        """Return all cells listed as `cell_rows` does; levels that are no numbers are categories.

        A category without a listed cell is kept too, so that redrawn cells have the same indicators.
        """
        import pandas as pd  # slow to import: workers and jobs do not need it

        frame: pd.DataFrame = self.cell_rows(0, self.n_points).to_pandas()
        for name, column in self.cells().items():
            if isinstance(column.codec, LevelCodec):
                levels = column.codec.levels.drop_null().to_pandas()
                if not pd.api.types.is_numeric_dtype(levels.dtype) or pd.api.types.is_bool_dtype(levels.dtype):
                    frame[name] = pd.Categorical(frame[name], levels, ordered=column.codec.ordered)
        return frame

    def with_points(self, points: Points) -> Self:
        """Return this histogram with other points for its cells; free.

        Parameters
        ----------
        points
            `centre`, as in the paper, or `spread`: two points for each column that is cut, multiplied, with weights that keep
            the means, variances and covariances of a smooth density, which centres do not; see `points.spread`.

        Raises
        ------
        SpecError
            If the points are neither, or more than 6 columns are cut.
        """
        if points not in get_args(Points):
            raise SpecError(f"must be centre or spread, not {points!r}", "`points`")
        points_per_cell(self.cells(), points)
        return replace(self, points=points)

    def redraw(self, rng: Rng) -> Self:
        """Return this histogram with the same noise once more, cut at the same threshold: for `inference.noise_error`, free.

        Parameters
        ----------
        rng
            Any stream: this is post-processing, and needs no secret.
        """
        return replace(self, histogram=self.histogram.redraw(rng))

    @property
    def n_records(self) -> int:
        """How many rows stand for the table: as many as it has where that is public, or as the noisy counts say; at least 1."""
        n_rows = self.histogram.n_rows
        return max(1, self.histogram.total if n_rows is None else round(n_rows))

    def n_drawn(self, wanted: int | None) -> int:
        """Return how many rows to draw: the number asked for, or by default `n_records`; of cells, how many points they have.

        No row is drawn if the number of rows is private and no weight is positive: as far as the noisy counts show, the table
        is empty, and an empty table is released like any other.

        Parameters
        ----------
        wanted
            How many rows are asked for.

        Raises
        ------
        SpecError
            If rows are to be drawn, their number is public, and no weight is positive.
        """
        if self.output == "cells":
            return self.n_points
        if self.histogram.plan.n_rows_private and not self.histogram.is_positive:
            return 0
        self.histogram.check_positive()
        return self.n_records if wanted is None else wanted

    def _contents(self) -> Contents:
        header = {"output": self.output, "points": self.points, **columns_to_header(self.schema, self.columns, self.bins)}
        return header, {"noisy": np.frombuffer(self.histogram.to_bytes(), dtype=np.uint8)}

    @classmethod
    def _of_contents(cls, header: Mapping[str, Any], arrays: Mapping[str, Any]) -> Self:
        if header["output"] not in get_args(Output) or header["points"] not in get_args(Points):
            raise ValueError("another output")
        noisy = NoisyHistogram.from_bytes(arrays["noisy"].tobytes(), "the histogram's counts")
        schema, columns, bins = columns_from_header(header, noisy.domain)
        return cls(schema=schema, columns=columns, bins=bins, histogram=noisy, output=header["output"], points=header["points"])
