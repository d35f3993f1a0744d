"""Exact tables of persons and their rows: each person weighs 1 in every table, however many rows it has.

A person is all rows that share the unit's column. Its rows may lie anywhere, so the rows of a task are
cut by a keyed hash of the person, and each range of hashes is counted where all its rows have come together.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np
import pyarrow as pa

from dpdask.arrays import Codes, Flags, Ints, Words, freeze_class
from dpdask.cells import CutColumns
from dpdask.errors import DataError
from dpdask.kernels import marginals as kernel
from dpdask.kernels.hashing import first_rows, groups, siphash
from dpdask.stats.keys import UNIT_ID
from dpdask.stats.marginals import Clique, Domain, MarginalCounts, domain_of, encode, keys_of
from dpdask.stats.statistic import CellCounts, Chosen, as_words
from dpdask.streams import RunKey, Streams, stream, words

ROWS_ID = "persons/rows"
MOST_ROWS = 256  # of a person: a pair of rows then weighs 1,024 parts of the lattice
LATTICE = 2**26  # the parts of a person's weight in tables of rows and of pairs of rows
GROUPS = ("PP", "CC", "PC", "WW", "F", "H")
Key = tuple[str | int, ...]


def make_edges(max_rows: int) -> tuple[int, ...]:
    """Return the least number of rows of each band: 0, 1, 2, 3, 5, 9, 17, and so on."""
    found = (0, 1, 2, *(2**power + 1 for power in range(1, max_rows.bit_length())))
    return tuple(edge for edge in found if edge <= max_rows)


def _pair(group: str, sizes: Sequence[int]) -> dict[Key, tuple[int, ...]]:
    """Return the shapes of the tables of each two columns, or of the only one."""
    if len(sizes) == 1:
        return {(group, 0): (sizes[0],)}
    pairs = itertools.combinations(range(len(sizes)), 2)
    return {(group, a, b): (sizes[a], sizes[b]) for a, b in pairs}


@freeze_class
class PersonDomain:
    """The columns of persons and of their rows, how many levels each has, and the tables of them."""

    domain: Domain  # first the columns of persons, then those of rows
    n_parents: int  # how many there are of the first
    max_rows: int

    @property
    def edges(self) -> tuple[int, ...]:
        """The least number of rows of each band."""
        return make_edges(self.max_rows)

    @property
    def parent_sizes(self) -> tuple[int, ...]:
        """The levels of each column of persons; the last column is the band of the number of rows."""
        return (*self.domain.sizes[: self.n_parents], len(self.edges))

    @property
    def child_sizes(self) -> tuple[int, ...]:
        """The levels of each column of rows."""
        return self.domain.sizes[self.n_parents :]

    @property
    def shapes(self) -> dict[str, dict[Key, tuple[int, ...]]]:
        """The shape of each table, by group, in the order in which they lie: see `mechanisms.copula.persons.PersonTables`."""
        p, c = self.parent_sizes, self.child_sizes
        n_bands, within = len(self.edges), itertools.combinations_with_replacement(range(len(c)), 2)
        both = itertools.product(range(len(p)), range(len(c)))
        return {
            "PP": _pair("PP", p),
            "CC": _pair("CC", c),
            "PC": {("PC", a, b): (p[a], c[b]) for a, b in both},
            "WW": {("WW", a, b): (c[a], c[b]) for a, b in within},
            "F": {("F", a): (n_bands,) for a in range(len(c))},
            "H": {("H",): (self.max_rows + 1,)},
        }

    def count_cells(self, group: str) -> int:
        """Return how many cells the tables of a group have together."""
        return sum(map(math.prod, self.shapes[group].values()))

    def split(self, group: str, flat: Ints) -> Iterator[tuple[Key, Ints]]:
        """Yield the tables of a group by their keys."""
        start = 0
        for key, shape in self.shapes[group].items():
            end = start + math.prod(shape)
            yield key, flat[start:end].reshape(shape)
            start = end

    @property
    def plan(self) -> kernel.PersonPlan:
        """What the kernel needs."""
        k = np.arange(self.max_rows + 1)
        bands = [bisect_right(self.edges, each) - 1 for each in k.tolist()]
        return kernel.PersonPlan(
            parents=np.array(self.parent_sizes, dtype=np.int64),
            children=np.array(self.child_sizes, dtype=np.int64),
            bands=np.array(bands, dtype=np.int64),
            rows=LATTICE // np.maximum(k, 1),
            pairs=LATTICE // np.maximum(k * (k - 1), 1),
        )


# Dask logs the arguments of a task that failed
@freeze_class(kw_only=False, eq=False, repr=False)
class PersonRows:
    """Rows by their persons, as codes."""

    units: Words  # of shape (n,): a keyed hash of each row's person
    codes: Codes  # of shape (n_columns, n)

    def merge(self, *others: Self) -> Self:
        """Return the rows of all of them."""
        parts = (self, *others)
        codes: Any = np.concatenate([part.codes for part in parts], axis=1)
        return type(self)(np.concatenate([part.units for part in parts]), codes)

    def select_part(self, part: int, n_parts: int) -> Self:
        """Return the rows of those persons whose hash lies in the part-th of `n_parts` equal ranges (a power of two)."""
        if n_parts == 1:
            return self
        chosen = self.units >> np.uint64(64 - (n_parts - 1).bit_length()) == part
        return self.filter(chosen)

    def filter(self, chosen: Flags) -> Self:
        """Return the chosen rows."""
        codes: Any = np.ascontiguousarray(self.codes[:, chosen])
        return type(self)(self.units[chosen], codes)


@freeze_class(kw_only=False, eq=False, repr=False)
class PersonCounts:
    """The tables of some whole persons: exact whole numbers, the same in whatever order persons are counted.

    Notes
    -----
    A person of k rows, of which at most `max_rows` are chosen, adds 1 to one cell of each table of
    PP and H, and of F where all its rows agree; ⌊2²⁶/k⌋ for each row to each table of CC and PC;
    and for k ≥ 2, ⌊2²⁶/(k(k-1))⌋ for each ordered pair of two different rows to each table of WW.
    So what a person adds to a table has no number below 0, and an L1 norm, and so an L2 norm, of at
    most 1, or of 2²⁶ where it weighs by rows. Rounding down loses less than a thousandth of its
    weight.
    """

    domain: PersonDomain
    tables: Mapping[str, Ints]  # of each group: int64, flat, the tables of `domain.shapes`

    @classmethod
    def identity(cls, domain: PersonDomain) -> Self:
        """Return the tables of nobody."""
        return cls(
            domain,
            {group: np.zeros(domain.count_cells(group), dtype=np.int64) for group in GROUPS},
        )

    @classmethod
    def of_persons(
        cls, domain: PersonDomain, parents: Codes, children: Codes, starts: Ints
    ) -> Self:
        """Return the tables of persons; arguments as for `kernels.marginals.count_persons`."""
        found = cls.identity(domain)
        sizes = np.array(domain.domain.sizes, dtype=np.int64)
        kernel.check_codes(parents, sizes[: domain.n_parents], range(domain.n_parents))
        kernel.check_codes(children, sizes[domain.n_parents :], range(len(domain.child_sizes)))
        tables = [found.tables[group] for group in GROUPS]
        kernel.count_persons(parents, children, starts, domain.plan, *tables)
        return found

    def merge(self, *others: Self) -> Self:
        """Return the tables of all persons together."""
        parts = (self, *others)
        return type(self)(
            self.domain,
            {group: np.sum([part.tables[group] for part in parts], axis=0) for group in GROUPS},
        )

    @property
    def n_persons(self) -> int:
        """How many persons were counted."""
        return int(self.tables["H"].sum())

    @property
    def n_rows(self) -> int:
        """How many of their rows were chosen."""
        return int(np.arange(self.domain.max_rows + 1) @ self.tables["H"])


@freeze_class
class CodeStatistic:
    """The rows of one table by their persons, as codes."""

    cells: CutColumns
    unit: str  # the column that names the person
    dtype: np.dtype[Any]  # of the codes

    @property
    def rows_per_task(self) -> None:
        """None: as for other statistics."""

    def counter(self) -> PersonCounter:
        """Return what collects the rows of one task."""
        return PersonCounter(self)


@freeze_class
class PersonStatistic:
    """The tables of persons and their rows."""

    cells: CutColumns  # the public cells of each column, first those of persons
    parents: tuple[str, ...]  # the columns of persons
    unit: str  # the column that names the person
    max_rows: int
    # The column that names the person in a table of persons; None: persons are known by their rows
    # alone, which agree in the columns of persons.
    key: str | None = None
    drops_orphans: bool = False  # rows whose person is not in the table of persons; else refused

    @property
    def domain(self) -> PersonDomain:
        """The columns and their tables."""
        domain = domain_of(self.cells)
        return PersonDomain(domain=domain, n_parents=len(self.parents), max_rows=self.max_rows)

    @property
    def rows(self) -> CodeStatistic:
        """What is read of the table of rows."""
        names = [name for name in self.cells if self.key is None or name not in self.parents]
        return self._read(names, self.unit)

    @property
    def persons(self) -> CodeStatistic | None:
        """What is read of the table of persons, if there is one."""
        return None if self.key is None else self._read(self.parents, self.key)

    def _read(self, names: Sequence[str], unit: str) -> CodeStatistic:
        cells = {name: self.cells[name] for name in names}
        return CodeStatistic(cells=cells, unit=unit, dtype=domain_of(self.cells).code_dtype)

    def count(
        self, rows: Sequence[PersonRows], persons: Sequence[PersonRows], key: RunKey
    ) -> PersonCounts:
        """Return the tables of persons who are all here, with all their rows."""
        own = self.rows.counter().result().merge(*rows)
        group, n_groups = groups(own.units)
        content = np.empty((len(group), len(own.codes) + 1), dtype=np.uint64)
        content[:, 0], content[:, 1:] = own.units, own.codes.T
        secret = words(stream(key, ROWS_ID, ""), 2)
        order, chosen = choose_rows(group, n_groups, content, self.max_rows, secret)
        firsts = np.flatnonzero(np.diff(group[order], prepend=-1))
        sizes = np.minimum(np.diff(firsts, append=len(order)), self.max_rows)
        if self.persons is None:
            n = len(self.parents)
            sorted_ = own.codes[:n, order]
            self._check_constant(sorted_, np.diff(group[order], prepend=-1) == 0)
            return self._count(sorted_[:, firsts], own.codes[n:, chosen], sizes)
        listed = self.persons.counter().result().merge(*persons)
        places, known = self._find_persons(own.units[order[firsts]], listed.units)
        kept = chosen[np.repeat(known, sizes)]
        others = np.setdiff1d(np.arange(len(listed.units)), places, assume_unique=True)
        parents = listed.codes[:, np.concatenate([places, others])]
        sizes = np.concatenate([sizes[known], np.zeros(len(others), dtype=np.int64)])
        return self._count(parents, own.codes[:, kept], sizes)

    def _count(self, parents: Any, children: Any, sizes: Ints) -> PersonCounts:
        starts = np.concatenate([[0], np.cumsum(sizes)])
        contiguous = np.ascontiguousarray(parents), np.ascontiguousarray(children)
        return PersonCounts.of_persons(self.domain, *contiguous, starts)

    def _find_persons(self, units: Words, listed: Words) -> tuple[Ints, Flags]:
        """Return the place in the table of persons of each unit that it has, and which units it has."""
        order = np.argsort(listed)
        sorted_ = listed[order]
        if (sorted_[1:] == sorted_[:-1]).any():
            what, hint = "a person has several rows in the table of persons", "leave one of each"
            raise DataError(what, f"column {self.key!r}", hint)
        places = np.searchsorted(sorted_, units)
        known = np.zeros(len(units), dtype=bool)
        inside = places < len(sorted_)
        known[inside] = sorted_[places[inside]] == units[inside]
        if not known.all() and not self.drops_orphans:
            what = "there are rows of persons that the table of persons lacks"
            hint = "add them, or set `parents.orphans: drop`"
            raise DataError(what, f"column {self.unit!r}", hint)
        return order[places[known]], known

    def _check_constant(self, codes: Codes, same: Flags) -> None:
        """Check that neighbouring rows of one person agree in the columns of persons."""
        for name, column in zip(self.parents, codes, strict=True):
            if (np.diff(column.astype(np.int64), prepend=0)[same] != 0).any():
                what = f"rows of one {self.unit} have several values, and it is declared constant"
                raise DataError(what, f"column {name!r}", "correct them, or remove `constant`")


@freeze_class(kw_only=False, eq=False, repr=False)
class PersonMargins:
    """How many persons are in each cell of each column by itself, with one of their rows: exact and private."""

    columns: Mapping[str, CellCounts]
    n_persons: int

    def merge(self, *others: Self) -> Self:
        """Return the counts of all persons together."""
        merged = {
            name: own.merge(*(each.columns[name] for each in others))
            for name, own in self.columns.items()
        }
        return type(self)(merged, self.n_persons + sum(each.n_persons for each in others))


@freeze_class
class MarginStatistic(PersonStatistic):
    """The columns by themselves: a person is in one cell of each at most, that of its first row in the order of the keyed hash."""

    max_rows: int = 1

    def _count(self, parents: Any, children: Any, sizes: Ints) -> Any:
        counted = {}
        for (name, cells), codes in zip(self.cells.items(), (*parents, *children), strict=True):
            counts = np.zeros(cells.n_cells, dtype=np.int64)
            counts[cells.possible] = np.bincount(codes, minlength=cells.size)
            counted[name] = CellCounts(counts)
        return PersonMargins(counted, len(sizes))


@freeze_class
class PersonTableStatistic(PersonStatistic):
    """Chosen tables of columns of persons, and of columns of persons and of rows.

    Notes
    -----
    A person adds 1 to one cell of a table of columns of persons, and to any other ⌊2²⁶/k⌋ for each
    of its k chosen rows: no number below 0, and together at most 1, or 2²⁶, as in `PersonCounts`.
    """

    cliques: tuple[Clique, ...]

    def _count(self, parents: Any, children: Any, sizes: Ints) -> Any:
        owners, weights = np.repeat(np.arange(len(sizes)), sizes), self._weigh_rows(sizes)
        whole, places = self.domain.domain, {name: n for n, name in enumerate(self.cells)}
        n, tables = len(self.parents), {}
        for clique in self.cliques:
            is_of_persons = {*clique} <= {*self.parents}
            codes = [
                children[place - n]
                if (place := places[name]) >= n
                else parents[place]
                if is_of_persons
                else parents[place][owners]
                for name in clique
            ]
            cells = keys_of(Domain(names=clique, sizes=whole.shape_of(clique)), np.stack(codes))
            tables[clique] = np.zeros(whole.size_of(clique), dtype=np.int64)
            np.add.at(tables[clique], cells, 1 if is_of_persons else weights[owners])
        nothing = np.zeros(0, dtype=np.int64)
        return MarginalCounts(whole, len(sizes), nothing, nothing, tables)

    @staticmethod
    def _weigh_rows(sizes: Ints) -> Ints:
        """Return the weight of each row of persons of so many rows."""
        return LATTICE // np.maximum(sizes, 1)


def choose_rows(
    group: Ints, n_groups: int, content: Words, most: int, secret: Words
) -> tuple[Ints, Ints]:
    """Return the order of all rows by their person, and the indices of the chosen rows, person by person.

    Parameters
    ----------
    group
        The person of each row, 0 to n_groups - 1.
    content
        uint64 of shape (n, m): what tells the rows of a person apart, the person among it.

    Notes
    -----
    The r-th of a person's rows of one content, r = 0, 1 and so on, is chosen by the keyed hash of
    the content and r: the least `most` hashes of the person. So its rows are chosen uniformly,
    equal ones too, by a function of the person's own rows alone: it depends neither on their order
    nor on how the table is cut.
    """
    whole = siphash(content, *secret)
    order = np.lexsort((whole, group))
    by_group, by_content = group[order], whole[order]
    new = np.ones(len(order), dtype=bool)
    new[1:] = (by_group[1:] != by_group[:-1]) | (by_content[1:] != by_content[:-1])
    firsts = np.flatnonzero(new)
    rank = np.arange(len(order)) - np.repeat(firsts, np.diff(firsts, append=len(order)))
    hashes = siphash(np.stack([by_content, rank.astype(np.uint64)], axis=1), *secret)
    return order, order[first_rows(by_group, n_groups, hashes, by_content, most)]


class PersonCounter:
    """Collects the rows of one task."""

    def __init__(self, statistic: CodeStatistic) -> None:
        self._statistic = statistic
        nothing: Any = np.empty((len(statistic.cells), 0), dtype=statistic.dtype)
        self._rows = [PersonRows(np.empty(0, dtype=np.uint64), nothing)]

    def add(self, batch: pa.RecordBatch, chosen: Chosen | None, streams: Streams) -> None:
        """Take the next rows; see `Counter.add`."""
        unit, cells = self._statistic.unit, self._statistic.cells
        column = batch.column(unit)
        if column.null_count:
            what = "holds a null, and the person of every row must be known"
            raise DataError(what, f"column {unit!r}", "fill it, or drop these rows")
        secret = words(streams.of_run(UNIT_ID), 2)
        units = siphash(as_words(column, secret.tobytes())[:, None], *secret)
        codes: Any = np.empty((len(cells), batch.num_rows), dtype=self._statistic.dtype)
        if cells:  # a table of persons may have no column but its key
            codes[:] = encode(batch, cells, domain_of(cells), None)
        found = PersonRows(units, codes)
        self._rows.append(found if chosen is None else found.filter(chosen))

    def result(self) -> PersonRows:
        """Return the rows so far."""
        first, *others = self._rows
        return first.merge(*others)
