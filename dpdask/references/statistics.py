"""The statistics of references: one of each column, over the reference rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

import pyarrow as pa

from dpdask.cells import Cells
from dpdask.codec import Codec, LevelCodec
from dpdask.stats import LevelCounts, RankSummary
from dpdask.stats.cell_counts import CellCounts
from dpdask.stats.statistic import Chosen, FoldCounter
from dpdask.stats.tables import LARGE_CELLS, LARGE_ROWS
from dpdask.streams import Streams

Counted = LevelCounts | RankSummary | CellCounts


@dataclass(frozen=True, slots=True, eq=False, repr=False)  # Dask logs the arguments of a task that failed
class ColumnCounts:
    """The distribution of each column by itself: counts of levels, of public cells, or a summary of ranks; exact and private."""

    columns: Mapping[str, Counted]

    def merge(self, *others: Self) -> Self:
        """Return the counts of all of them."""
        merged = {name: counts.merge(*(other.columns[name] for other in others)) for name, counts in self.columns.items()}  # type: ignore[arg-type]  # one type a column
        return type(self)(merged)


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnStatistic:
    """The distribution of each column by itself.

    Attributes
    ----------
    codecs
        The codec of each privatised column.
    cells
        The public cells of the columns that are counted in them.
    """

    codecs: Mapping[str, Codec]
    cells: Mapping[str, Cells] = field(default_factory=dict)

    @property
    def rows_per_task(self) -> int | None:
        """Enough rows for many cells to make merging worthwhile."""
        return LARGE_ROWS if sum(cells.n_cells for cells in self.cells.values()) > LARGE_CELLS else None

    def counter(self) -> FoldCounter[ColumnCounts]:
        """Return a counter of no rows."""
        return FoldCounter(ColumnCounts({name: self._count_nothing(name) for name in self.codecs}), self._count)

    def _count_nothing(self, name: str) -> Counted:
        if name in self.cells:
            return CellCounts.identity(self.cells[name])
        codec = self.codecs[name]
        return LevelCounts.identity(codec) if isinstance(codec, LevelCodec) else RankSummary.identity(codec)

    def _count(self, batch: pa.RecordBatch, chosen: Chosen | None, _: Streams) -> ColumnCounts:
        return ColumnCounts({name: self._column(name, batch.column(name), chosen) for name in self.codecs})

    def _column(self, name: str, array: pa.Array, chosen: Chosen | None) -> Counted:
        if name in self.cells:
            return CellCounts.of_batch(self.cells[name], array, chosen)
        codec = self.codecs[name]
        return LevelCounts.of_batch(codec, array, chosen) if isinstance(codec, LevelCodec) else RankSummary.of_batch(codec, array, chosen)
