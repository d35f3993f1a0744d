"""How many rows lie in each public cell of a column."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dpdask.cells import Cells
from dpdask.stats.levels import Tally

Counts = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class CellCounts(Tally):
    """How many rows lie in each public cell: int64 array of shape (n_cells,), exact."""

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
