"""Contingency tables of coded columns: of every attribute, of every pair, and of chosen cliques."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import combinations, pairwise
from typing import Any, Self

import numpy as np
import pyarrow as pa

from dpdask.arrays import Codes, Ints, freeze_class
from dpdask.cells import CutColumns
from dpdask.errors import SpecError
from dpdask.kernels import marginals as kernel
from dpdask.kernels.jit import jit
from dpdask.kernels.marginals import MAX_LEVELS
from dpdask.stats.statistic import Chosen, FoldCounter
from dpdask.streams import Streams

Clique = tuple[str, ...]


@freeze_class
class Domain:
    """The attributes of a coded table and how many levels each has."""

    names: tuple[str, ...]
    """The attributes, distinct, in the order of the rows of a code matrix."""
    sizes: tuple[int, ...]
    """How many levels each has; codes are 0 ... size - 1."""

    def __post_init__(self) -> None:
        if not self.names or len(set(self.names)) != len(self.names):
            raise ValueError(
                f"a domain has at least one attribute and their names are distinct, not {self.names}"
            )
        if len(self.sizes) != len(self.names):
            raise ValueError(
                f"{len(self.names)} attributes have {len(self.names)} sizes, not {len(self.sizes)}"
            )
        for name, size in zip(self.names, self.sizes, strict=True):
            if not 1 <= size <= kernel.MAX_LEVELS:
                raise ValueError(
                    f"{name!r} has {size} levels; 1 to {kernel.MAX_LEVELS} are supported"
                )

    @classmethod
    def from_header(cls, header: Mapping[str, Any]) -> Self:
        """Return the domain whose `names` and `sizes` an archive's header holds."""
        names, sizes = tuple(header["names"]), tuple(header["sizes"])
        if not all(isinstance(name, str) for name in names) or not all(
            type(size) is int for size in sizes
        ):
            raise ValueError("a domain's names are texts and its sizes are whole numbers")
        return cls(names=names, sizes=sizes)

    @property
    def n_attributes(self) -> int:
        """How many attributes there are."""
        return len(self.names)

    @property
    def code_dtype(self) -> np.dtype[np.uint8] | np.dtype[np.uint16]:
        """The dtype of a code matrix: uint8 where every code fits, uint16 otherwise."""
        return np.dtype(np.uint8) if max(self.sizes) <= 256 else np.dtype(np.uint16)

    def position(self, name: str) -> int:
        """Return which attribute this is; ValueError if none of them has the name."""
        if name not in self.names:
            raise ValueError(f"{name!r} is not an attribute of this domain")
        return self.names.index(name)

    def positions(self, clique: Clique) -> tuple[int, ...]:
        """Return which attributes a clique has, in its order; ValueError if it is empty, repeats one or has an unknown one."""
        if not clique or len(set(clique)) != len(clique):
            raise ValueError(f"a clique is one or more distinct attributes, not {clique}")
        return tuple(map(self.position, clique))

    def shape_of(self, clique: Clique) -> tuple[int, ...]:
        """Return the shape of a clique's table, axes in the clique's order."""
        return tuple(self.sizes[position] for position in self.positions(clique))

    def size_of(self, clique: Clique) -> int:
        """Return how many cells a clique's table has."""
        return math.prod(self.shape_of(clique))

    def pairs(self) -> tuple[Clique, ...]:
        """Return all two-way cliques, lexicographic by position."""
        return tuple(combinations(self.names, 2))


# Dask logs the arguments of a task that failed
@freeze_class(kw_only=False, eq=False, repr=False)
class MarginalCounts:
    """Exact contingency tables of some rows: one-way, two-way unless left out, and of chosen cliques.

    Privacy: tables of private rows. One row, added or removed, changes one cell of every table by
    one.
    """

    domain: Domain
    n_rows: int
    one_way: Ints
    """int64 of shape (sum of sizes,): the counts of each attribute's levels, one attribute after the other."""
    pairs: Ints
    """int64, flat: the tables of `domain.pairs()`, one after the other, each C-ordered; of length 0 if they were not counted."""
    cliques: Mapping[Clique, Ints]
    """The chosen cliques' tables, int64 of shape (size_of(clique),), C-ordered."""

    @classmethod
    def identity(
        cls, domain: Domain, cliques: Iterable[Clique] = (), *, two_way: bool = True
    ) -> MarginalCounts:
        """Return the tables of no rows."""
        return MarginalCounter(domain, cliques, two_way=two_way).result()

    @classmethod
    def of_codes(
        cls,
        domain: Domain,
        codes: Codes,
        cliques: Iterable[Clique] = (),
        *,
        two_way: bool = True,
    ) -> MarginalCounts:
        """Return the tables of a code matrix; see `MarginalCounter.add`."""
        counter = MarginalCounter(domain, cliques, two_way=two_way)
        counter.add(codes)
        return counter.result()

    def merge(self, *others: Self) -> Self:
        """Return the tables of all rows together."""
        one_way, pairs = self.one_way.copy(), self.pairs.copy()
        cliques = {clique: counts.copy() for clique, counts in self.cliques.items()}
        for part in others:  # one accumulator: the tables of thousands of attributes are large
            if (
                part.domain != self.domain
                or part.cliques.keys() != cliques.keys()
                or part.pairs.shape != pairs.shape
            ):
                raise ValueError("marginals of different domains or cliques cannot be merged")
            one_way += part.one_way
            pairs += part.pairs
            for clique, counts in cliques.items():
                counts += part.cliques[clique]
        return type(self)(
            self.domain, self.n_rows + sum(part.n_rows for part in others), one_way, pairs, cliques
        )

    def table(self, clique: Clique) -> Ints:
        """Return a one-way, two-way or chosen clique's table; int64 of shape domain.shape_of(clique), a view.

        The clique's attributes may come in any order; the table's axes come in the same.
        """
        shape = self.domain.shape_of(clique)
        for chosen, counts in self.cliques.items():
            if set(chosen) == set(clique):
                return counts.reshape(self.domain.shape_of(chosen)).transpose(
                    [chosen.index(name) for name in clique]
                )
        positions = self.domain.positions(clique)
        layout = kernel.pair_layout(self.domain.sizes)
        if len(clique) == 1:
            start = int(layout.cumulative[positions[0]])
            return self.one_way[start : start + shape[0]]
        if len(clique) != 2 or not len(self.pairs):
            raise ValueError(f"{clique} was not counted")
        first, second = sorted(positions)
        start = kernel.table_start(layout, first, second)
        table = self.pairs[start : start + shape[0] * shape[1]].reshape(
            self.domain.sizes[first], self.domain.sizes[second]
        )
        return table if positions[0] == first else table.T


class MarginalCounter:
    """The marginals of a stream of batches, all counted into the same arrays.

    Parameters
    ----------
    two_way
        Whether to count all pairs; if not, only single attributes and the chosen cliques.
    """

    __slots__ = ("_cliques", "_domain", "_n_rows", "_one_way", "_pairs", "_sizes", "_two_way")

    def __init__(
        self, domain: Domain, cliques: Iterable[Clique] = (), *, two_way: bool = True
    ) -> None:
        self._domain = domain
        self._sizes = np.array(domain.sizes, dtype=np.int64)
        self._two_way = two_way
        self._start(cliques)

    def _start(self, cliques: Iterable[Clique]) -> None:
        self._n_rows = 0
        self._one_way = np.zeros(self._sizes.sum(), dtype=np.int64)
        self._pairs = np.zeros(
            kernel.pair_layout(self._sizes).groups[-1] if self._two_way else 0, dtype=np.int64
        )
        self._cliques = {
            clique: np.zeros(self._domain.size_of(clique), dtype=np.int64) for clique in cliques
        }

    def add(self, codes: Codes) -> None:
        """Count the rows of a batch.

        Parameters
        ----------
        codes
            C-contiguous uint8 or uint16 array of shape (n_attributes, n_rows), row a below the
            domain's sizes[a].
        """
        if self._two_way:
            kernel.count_pairs(codes, self._sizes, self._pairs)
        if not self._derives_one_way:
            for position, counts in enumerate(self._split(self._one_way)):
                kernel.count_clique(codes, self._sizes, (position,), counts)
        for clique, counts in self._cliques.items():
            kernel.count_clique(codes, self._sizes, self._domain.positions(clique), counts)
        self._n_rows += codes.shape[1]

    def result(self) -> MarginalCounts:
        """Return the marginals of all batches, arrays and all; the counter starts again from no rows."""
        if self._derives_one_way:
            sizes, groups = self._domain.sizes, kernel.pair_layout(self._sizes).groups
            parts = self._split(self._one_way)
            for position, (size, after) in enumerate(pairwise(sizes)):
                start = groups[position]
                table = self._pairs[start : start + size * after].reshape(size, after)
                parts[position][:] = table.sum(axis=1)
            parts[-1][:] = table.sum(axis=0)
        result = MarginalCounts(
            self._domain, self._n_rows, self._one_way, self._pairs, self._cliques
        )
        self._start(self._cliques)
        return result

    @property
    def _derives_one_way(self) -> bool:
        """Whether the pairs' tables hold the one-way counts as their sums: counting them again would take a pass."""
        return self._two_way and self._domain.n_attributes > 1

    def _split(self, one_way: Ints) -> list[Ints]:
        """Return views of each attribute's counts."""
        return np.split(one_way, np.cumsum(self._sizes)[:-1])


MAX_JOINT_CELLS = 2**62
"""Cell numbers are int64, and one more step of the mixed radix must not overflow."""


def n_cells(domain: Domain) -> int:
    """Return how many cells the joint histogram has, occupied or not."""
    total = math.prod(domain.sizes)
    if total > MAX_JOINT_CELLS:
        hint = "declare fewer bins or levels for its columns, or drop one"
        raise SpecError(f"has {total:.2e} cells; the limit is 2**62", "the joint histogram", hint)
    return total


def keys_of(domain: Domain, codes: Codes) -> Ints:
    """Return the cell of each row: the codes as the digits of one number, the first attribute's the highest.

    Parameters
    ----------
    codes
        uint8 or uint16 array of shape (n_attributes, n_rows), row a below the domain's sizes[a].
    """
    n_cells(domain)
    sizes = np.array(domain.sizes, dtype=np.int64)
    kernel.check_codes(codes, sizes, range(domain.n_attributes))
    keys = np.zeros(codes.shape[1], dtype=np.int64)
    for column, size in zip(codes, domain.sizes, strict=True):
        keys *= size
        keys += column
    return keys


def codes_of(domain: Domain, keys: Ints) -> Codes:
    """Return the codes of each cell: the inverse of `keys_of`, of shape (n_attributes, len(keys)), in the domain's code dtype."""
    codes: Codes = np.empty((domain.n_attributes, len(keys)), dtype=domain.code_dtype)
    left = keys
    for place in reversed(range(domain.n_attributes)):
        left, codes[place] = np.divmod(left, domain.sizes[place])
    return codes


# Dask logs the arguments of a task that failed
@freeze_class(kw_only=False, eq=False, repr=False)
class JointCounts:
    """Exact counts of the occupied cells of the joint histogram of some rows.

    Privacy
    -------
    A table of private rows, and so is the set of its keys: which cells are occupied is private too.
    One row, added or removed, changes one cell by one; replaced, at most two cells by one each.
    """

    domain: Domain
    # Int64 array of shape (n_occupied,), increasing: the occupied cells, as `keys_of` numbers them.
    keys: Ints
    counts: Ints  # int64 array of that shape, each at least 1

    @classmethod
    def identity(cls, domain: Domain) -> Self:
        """Return the counts of no rows."""
        n_cells(domain)
        return cls(domain, np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))

    @classmethod
    def of_codes(cls, domain: Domain, codes: Codes) -> Self:
        """Return the counts of a code matrix; arguments and errors as for `keys_of`."""
        keys = keys_of(domain, codes)
        keys.sort()
        first = np.flatnonzero(np.diff(keys, prepend=-1))
        return cls(domain, keys[first], np.diff(first, append=len(keys)).astype(np.int64))

    def merge(self, *others: Self) -> Self:
        """Return the counts of all rows together."""
        if any(part.domain != self.domain for part in others):
            raise ValueError("joint counts of different domains cannot be merged")
        parts = [(part.keys, part.counts) for part in (self, *others)]
        # neighbours in rounds: every cell is moved log2(n) times, not n times
        while len(parts) > 1:
            merged = [
                merge_cells(*first, *second)
                for first, second in zip(parts[::2], parts[1::2], strict=False)
            ]
            parts = merged + parts[2 * len(merged) :]
        return type(self)(self.domain, *parts[0])

    @property
    def n_rows(self) -> int:
        """How many rows were counted."""
        return int(self.counts.sum())


@jit
def merge_cells(keys_a: Ints, counts_a: Ints, keys_b: Ints, counts_b: Ints) -> tuple[Ints, Ints]:
    """Return the union of two increasing lists of cells, counts of common cells added."""
    keys = np.empty(len(keys_a) + len(keys_b), dtype=np.int64)
    counts = np.empty(len(keys), dtype=np.int64)
    a = b = n = 0
    while a < len(keys_a) or b < len(keys_b):
        take_a = b == len(keys_b) or (a < len(keys_a) and keys_a[a] <= keys_b[b])
        take_b = a == len(keys_a) or (b < len(keys_b) and keys_b[b] <= keys_a[a])
        keys[n] = keys_a[a] if take_a else keys_b[b]
        counts[n] = 0
        if take_a:
            counts[n] += counts_a[a]
            a += 1
        if take_b:
            counts[n] += counts_b[b]
            b += 1
        n += 1
    # a view would keep the longer arrays alive, and travel with them
    return keys[:n].copy(), counts[:n].copy()


MAX_CELLS = 2**27  # a gigabyte of counts; each worker holds a few such
_MAX_TABLE = 2**24
LARGE_CELLS = 2**20
LARGE_ROWS = 2**19


def domain_of(cells: CutColumns) -> Domain:
    """Return the attributes and their numbers of levels."""
    for name, column in cells.items():
        if column.size > MAX_LEVELS:
            raise SpecError(
                f"has {column.size:,} cells, and the limit is {MAX_LEVELS:,}",
                f"column {name!r}",
                "declare fewer bins for it",
            )
    return Domain(names=tuple(cells), sizes=tuple(column.size for column in cells.values()))


def encode(
    batch: pa.RecordBatch, cells: CutColumns, domain: Domain, chosen: Chosen | None
) -> Codes:
    """Return the codes of the chosen rows of a batch, shape (n_attributes, n_chosen), after checking every row."""
    every = chosen is None or bool(chosen.all())
    codes = np.empty(
        (domain.n_attributes, batch.num_rows if chosen is None or every else int(chosen.sum())),
        dtype=domain.code_dtype,
    )
    for place, (name, column) in enumerate(cells.items()):
        array = batch.column(name)
        found = column.codec.encode(array) if column.codec.has_levels else column.codes(array)
        codes[place] = found if every else found[chosen]
    return codes


@freeze_class
class TableStatistic:
    """Contingency tables: chosen ones, and all pairs."""

    cells: CutColumns  # the public cells of each counted column
    cliques: tuple[Clique, ...] = ()  # chosen tables, of any number of columns
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
            where, what = (
                f"{where} and the others",
                f"all tables together have {total:,} cells; the limit is {MAX_CELLS:,}",
            )
        raise SpecError(
            what, where, f"lower `{bins}` for its columns, declare fewer levels, or drop a column"
        )


class TableCounter:
    """Counts the tables of one task into the same arrays."""

    def __init__(self, statistic: TableStatistic) -> None:
        self._cells, self._domain = statistic.cells, statistic.domain
        self._counter = MarginalCounter(self._domain, statistic.cliques, two_way=statistic.two_way)

    def add(self, batch: pa.RecordBatch, chosen: Chosen | None, streams: Streams) -> None:  # noqa: ARG002 - no randomness
        """Count the next rows; see `Counter.add`."""
        self._counter.add(encode(batch, self._cells, self._domain, chosen))

    def result(self) -> MarginalCounts:
        """Return the tables of all rows so far."""
        return self._counter.result()


@freeze_class
class JointStatistic:
    """The joint histogram of all counted columns, by its occupied cells."""

    cells: CutColumns  # the public cells of each counted column

    @property
    def rows_per_task(self) -> None:
        """None: as for other statistics."""

    def counter(self) -> FoldCounter[JointCounts]:
        """Return a counter of no rows."""
        domain = domain_of(self.cells)

        def count(batch: pa.RecordBatch, chosen: Chosen | None, _: Streams) -> JointCounts:
            return JointCounts.of_codes(domain, encode(batch, self.cells, domain, chosen))

        return FoldCounter(JointCounts.identity(domain), count)
