"""The contingency tables and the joint histogram of columns that are cut into public cells, as statistics of one pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dpdask.cells import Cells
from dpdask.codec import LevelCodec
from dpdask.errors import SpecError
from dpdask.kernels.marginals import MAX_LEVELS
from dpdask.stats.joint import JointCounts
from dpdask.stats.marginals import Clique, Domain, MarginalCounter, MarginalCounts
from dpdask.stats.statistic import Chosen, FoldCounter
from dpdask.streams import Streams

MAX_CELLS = 2**27  # a gigabyte of counts; each worker holds a few such
_MAX_TABLE = 2**24
LARGE_CELLS = 2**20
LARGE_ROWS = 2**19

Codes = NDArray[np.uint8] | NDArray[np.uint16]


def domain_of(cells: Mapping[str, Cells]) -> Domain:
    """Return the attributes and their numbers of levels.

    Raises
    ------
    SpecError
        If one has more cells than a code can tell apart.
    """
    for name, column in cells.items():
        if column.size > MAX_LEVELS:
            raise SpecError(f"has {column.size:,} cells, and the limit is {MAX_LEVELS:,}", f"column {name!r}", "declare fewer bins for it")
    return Domain(names=tuple(cells), sizes=tuple(column.size for column in cells.values()))


def encode(batch: pa.RecordBatch, cells: Mapping[str, Cells], domain: Domain, chosen: Chosen | None) -> Codes:
    """Return the codes of the chosen rows of a batch, shape (n_attributes, n_chosen), after checking every row.

    Parameters
    ----------
    batch
        The rows.
    cells
        The public cells of each attribute.
    domain
        The attributes.
    chosen
        Which rows; None: all of them.

    Raises
    ------
    DataError
        If a value violates the schema.
    """
    every = chosen is None or bool(chosen.all())
    codes = np.empty((domain.n_attributes, batch.num_rows if chosen is None or every else int(chosen.sum())), dtype=domain.code_dtype)
    for place, (name, column) in enumerate(cells.items()):
        array = batch.column(name)
        found = column.codec.encode(array) if isinstance(column.codec, LevelCodec) else column.codes(array)
        codes[place] = found if every else found[chosen]
    return codes


@dataclass(frozen=True, slots=True, kw_only=True)
class TableStatistic:
    """Contingency tables: chosen ones, and all pairs.

    Attributes
    ----------
    cells
        The public cells of each counted column.
    cliques
        Chosen tables, of any number of columns.
    two_way
        Whether all pairs are counted.
    """

    cells: Mapping[str, Cells]
    cliques: tuple[Clique, ...] = ()
    two_way: bool = True

    @property
    def domain(self) -> Domain:
        """The attributes and their numbers of levels."""
        return domain_of(self.cells)

    @property
    def rows_per_task(self) -> int | None:
        """Enough rows for large tables to make merging worthwhile."""
        return LARGE_ROWS if (sum(self.domain.sizes) ** 2) // 2 > LARGE_CELLS else None

    def counter(self) -> TableCounter:
        """Return a counter of no rows."""
        return TableCounter(self)

    def check_size(self, bins: str = "bins") -> None:
        """Check that the tables can be held.

        Parameters
        ----------
        bins
            The name of the bins among the mechanism's parameters, for messages.

        Raises
        ------
        SpecError
            If one table, or all together, are too large; the line names the largest and says how to bin it.
        """
        domain = self.domain
        sizes = sorted(zip(domain.sizes, domain.names, strict=True), reverse=True)
        chosen = [(domain.size_of(clique), clique) for clique in self.cliques]
        if self.two_way and len(sizes) > 1:
            chosen.append((sizes[0][0] * sizes[1][0], (sizes[0][1], sizes[1][1])))
        largest, clique = max(chosen, default=(sizes[0][0], (sizes[0][1],)))
        total = sum(size for size, _ in chosen[: len(self.cliques)])
        if self.two_way:
            total += (sum(domain.sizes) ** 2 - sum(size * size for size in domain.sizes)) // 2
        if largest <= _MAX_TABLE and total <= MAX_CELLS:
            return
        where = "the table " + " x ".join(repr(name) for name in clique)
        what = f"it has {largest:,} cells, and the limit is {_MAX_TABLE:,}"
        if largest <= _MAX_TABLE:
            where, what = f"{where} and the others", f"all tables together have {total:,} cells; the limit is {MAX_CELLS:,}"
        raise SpecError(what, where, f"lower `{bins}` for its columns, declare fewer levels, or drop a column")


class TableCounter:
    """Counts the tables of one task into the same arrays.

    Parameters
    ----------
    statistic
        What is counted.
    """

    def __init__(self, statistic: TableStatistic) -> None:
        self._cells, self._domain = statistic.cells, statistic.domain
        self._counter = MarginalCounter(self._domain, statistic.cliques, two_way=statistic.two_way)

    def add(self, batch: pa.RecordBatch, chosen: Chosen | None, streams: Streams) -> None:  # noqa: ARG002 - no randomness
        """Count the next rows; see `Counter.add`."""
        self._counter.add(encode(batch, self._cells, self._domain, chosen))

    def result(self) -> MarginalCounts:
        """Return the tables of all rows so far."""
        return self._counter.result()


@dataclass(frozen=True, slots=True, kw_only=True)
class JointStatistic:
    """The joint histogram of all counted columns, by its occupied cells.

    Attributes
    ----------
    cells
        The public cells of each counted column.
    """

    cells: Mapping[str, Cells]

    @property
    def rows_per_task(self) -> None:
        """None: as for other statistics."""

    def counter(self) -> FoldCounter[JointCounts]:
        """Return a counter of no rows."""
        domain = domain_of(self.cells)

        def count(batch: pa.RecordBatch, chosen: Chosen | None, _: Streams) -> JointCounts:
            return JointCounts.of_codes(domain, encode(batch, self.cells, domain, chosen))

        return FoldCounter(JointCounts.identity(domain), count)
