"""How many rows lie in each public cell of a column."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dpdask.cells import Cells

Counts = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False, repr=False)  # Dask logs the arguments of a task that failed
class CellCounts:
    """How many rows lie in each public cell: int64 array of shape (n_cells,), exact."""

    counts: Counts

    @classmethod
    def identity(cls, cells: Cells) -> Self:
        """Return the counts of no rows."""
        return cls(np.zeros(cells.n_cells, dtype=np.int64))

    @classmethod
    def of_batch(cls, cells: Cells, array: pa.Array, chosen: NDArray[np.bool_] | None = None) -> Self:
        """Return the counts of the chosen rows of a batch; every row is checked against the schema.

        Parameters
        ----------
        cells
            The column's cells.
        array
            The batch's values of the column.
        chosen
            Which rows to count; all if None.

        Raises
        ------
        DataError
            If any row, chosen or not, violates the schema.
        """
        index = cells.index(array)
        return cls(np.bincount(index if chosen is None else index[chosen], minlength=cells.n_cells).astype(np.int64))

    def merge(self, *others: Self) -> Self:
        """Return the counts of all of them."""
        return type(self)(np.stack([part.counts for part in (self, *others)]).sum(axis=0))

    @property
    def n_rows(self) -> int:
        """How many rows were counted."""
        return int(self.counts.sum())
