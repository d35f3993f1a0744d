"""Contingency tables of coded columns: of every attribute, of every pair, and of chosen cliques."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from dpdask.kernels import marginals as kernel

Clique = tuple[str, ...]
Counts = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Domain:
    """The attributes of a coded table and how many levels each has.

    Raises
    ------
    ValueError
        If there is no attribute, names repeat, there is not one size per name, or a size is not within 1 to 65,536.
    """

    names: tuple[str, ...]
    """The attributes, distinct, in the order of the rows of a code matrix."""
    sizes: tuple[int, ...]
    """How many levels each has; codes are 0 ... size - 1."""

    def __post_init__(self) -> None:
        if not self.names or len(set(self.names)) != len(self.names):
            raise ValueError(f"a domain has at least one attribute and their names are distinct, not {self.names}")
        if len(self.sizes) != len(self.names):
            raise ValueError(f"{len(self.names)} attributes have {len(self.names)} sizes, not {len(self.sizes)}")
        for name, size in zip(self.names, self.sizes, strict=True):
            if not 1 <= size <= kernel.MAX_LEVELS:
                raise ValueError(f"{name!r} has {size} levels; 1 to {kernel.MAX_LEVELS} are supported")

    @classmethod
    def from_header(cls, header: Mapping[str, Any]) -> Self:
        """Return the domain whose `names` and `sizes` an archive's header holds.

        Raises
        ------
        ValueError, KeyError, TypeError
            If it holds none.
        """
        names, sizes = tuple(header["names"]), tuple(header["sizes"])
        if not all(isinstance(name, str) for name in names) or not all(type(size) is int for size in sizes):
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


@dataclass(frozen=True, slots=True, eq=False, repr=False)  # Dask logs the arguments of a task that failed
class MarginalCounts:
    """Exact contingency tables of some rows: one-way, two-way unless left out, and of chosen cliques.

    Privacy: tables of private rows. One row, added or removed, changes one cell of every table by one.
    """

    domain: Domain
    n_rows: int
    one_way: Counts
    """int64 of shape (sum of sizes,): the counts of each attribute's levels, one attribute after the other."""
    pairs: Counts
    """int64, flat: the tables of `domain.pairs()`, one after the other, each C-ordered; of length 0 if they were not counted."""
    cliques: Mapping[Clique, Counts]
    """The chosen cliques' tables, int64 of shape (size_of(clique),), C-ordered."""

    @classmethod
    def identity(cls, domain: Domain, cliques: Iterable[Clique] = (), *, two_way: bool = True) -> MarginalCounts:
        """Return the tables of no rows.

        Parameters
        ----------
        domain
            The attributes and their sizes.
        cliques
            The cliques whose tables are counted too.
        two_way
            Whether the tables of all pairs are counted.
        """
        return MarginalCounter(domain, cliques, two_way=two_way).result()

    @classmethod
    def of_codes(cls, domain: Domain, codes: kernel.Codes, cliques: Iterable[Clique] = (), *, two_way: bool = True) -> MarginalCounts:
        """Return the tables of a code matrix; see `MarginalCounter.add`."""
        counter = MarginalCounter(domain, cliques, two_way=two_way)
        counter.add(codes)
        return counter.result()

    def merge(self, *others: Self) -> Self:
        """Return the tables of all rows together.

        Raises
        ------
        ValueError
            If they are not of the same domain and cliques.
        """
        one_way, pairs = self.one_way.copy(), self.pairs.copy()
        cliques = {clique: counts.copy() for clique, counts in self.cliques.items()}
        for part in others:  # one accumulator: the tables of thousands of attributes are large
            if part.domain != self.domain or part.cliques.keys() != cliques.keys() or part.pairs.shape != pairs.shape:
                raise ValueError("marginals of different domains or cliques cannot be merged")
            one_way += part.one_way
            pairs += part.pairs
            for clique, counts in cliques.items():
                counts += part.cliques[clique]
        return type(self)(self.domain, self.n_rows + sum(part.n_rows for part in others), one_way, pairs, cliques)

    def table(self, clique: Clique) -> Counts:
        """Return a one-way, two-way or chosen clique's table; int64 of shape domain.shape_of(clique), a view.

        The clique's attributes may come in any order; the table's axes come in the same.

        Raises
        ------
        ValueError
            If an attribute is unknown or repeated, or the clique was not counted.
        """
        shape = self.domain.shape_of(clique)
        for chosen, counts in self.cliques.items():
            if set(chosen) == set(clique):
                return counts.reshape(self.domain.shape_of(chosen)).transpose([chosen.index(name) for name in clique])
        positions = self.domain.positions(clique)
        layout = kernel.pair_layout(self.domain.sizes)
        if len(clique) == 1:
            start = int(layout.cumulative[positions[0]])
            return self.one_way[start : start + shape[0]]
        if len(clique) != 2 or not len(self.pairs):
            raise ValueError(f"{clique} was not counted")
        first, second = sorted(positions)
        start = kernel.table_start(layout, first, second)
        table = self.pairs[start : start + shape[0] * shape[1]].reshape(self.domain.sizes[first], self.domain.sizes[second])
        return table if positions[0] == first else table.T


class MarginalCounter:
    """The marginals of a stream of batches, all counted into the same arrays.

    Parameters
    ----------
    domain
        The attributes.
    cliques
        Further cliques to count, of any number of attributes.
    two_way
        Whether to count all pairs; if not, only single attributes and the chosen cliques.

    Raises
    ------
    ValueError
        If a clique is empty, repeats an attribute or has an unknown one.
    """

    __slots__ = ("_cliques", "_domain", "_n_rows", "_one_way", "_pairs", "_sizes", "_two_way")

    def __init__(self, domain: Domain, cliques: Iterable[Clique] = (), *, two_way: bool = True) -> None:
        self._domain = domain
        self._sizes = np.array(domain.sizes, dtype=np.int64)
        self._two_way = two_way
        self._start(cliques)

    def _start(self, cliques: Iterable[Clique]) -> None:
        self._n_rows = 0
        self._one_way = np.zeros(self._sizes.sum(), dtype=np.int64)
        self._pairs = np.zeros(kernel.pair_layout(self._sizes).groups[-1] if self._two_way else 0, dtype=np.int64)
        self._cliques = {clique: np.zeros(self._domain.size_of(clique), dtype=np.int64) for clique in cliques}

    def add(self, codes: kernel.Codes) -> None:
        """Count the rows of a batch.

        Parameters
        ----------
        codes
            C-contiguous uint8 or uint16 array of shape (n_attributes, n_rows), row a below the domain's sizes[a].

        Raises
        ------
        ValueError
            If the array has another shape, dtype or order, or a code is not below its attribute's levels. What was counted
            before may then hold some of the batch's tables and not others: the counter is of no more use.
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
            self._sum_one_way()
        result = MarginalCounts(self._domain, self._n_rows, self._one_way, self._pairs, self._cliques)
        self._start(self._cliques)
        return result

    @property
    def _derives_one_way(self) -> bool:
        """Whether the pairs' tables hold the one-way counts as their sums: counting them again would take a pass."""
        return self._two_way and self._domain.n_attributes > 1

    def _sum_one_way(self) -> None:
        sizes, groups = self._domain.sizes, kernel.pair_layout(self._sizes).groups
        parts = self._split(self._one_way)
        for position, (size, after) in enumerate(pairwise(sizes)):
            start = groups[position]
            table = self._pairs[start : start + size * after].reshape(size, after)
            parts[position][:] = table.sum(axis=1)
        parts[-1][:] = table.sum(axis=0)

    def _split(self, one_way: Counts) -> list[Counts]:
        """Return views of each attribute's counts."""
        return np.split(one_way, np.cumsum(self._sizes)[:-1])
