"""Distribution-invariant privatisation along a tree: each column is randomised given the released value of its parent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dpdask.archive import Archive, Contents
from dpdask.cells import Cells, FoundBins
from dpdask.codec import Codec, LevelCodec
from dpdask.kernels import tree as tree_kernel
from dpdask.mechanisms.releases import RandomisedRows
from dpdask.privacy.rounding import round_up_sum
from dpdask.streams import Rng, words

_SCALARS, _ARRAYS = ("parent", "epsilon", "solved"), ("weights", "edges", "possible", "fine_edges", "masses")

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TreeColumn:
    """A column's channels, one for each released level of its parent.

    Attributes
    ----------
    parent
        The column that it is given, or None: then there is one channel.
    weights
        uint64 array of shape (n_parent_levels, n, n), n the possible cells of the column: Pr(output j | own level k,
        released parent b) = weights[b, k, j] / 2**63.
    tables
        The exact tables that are drawn from.
    edges, possible
        The column's public cells, as in `Cells`.
    fine_edges, masses
        What values inside a cell follow, as in `FoundBins`; all 0: they are uniform.
    epsilon
        ε*, the largest exact privacy loss of any of its channels, rounded up.
    solved
        The share of rows, by the fitted tables, that have the requested channel; the others have rare parent levels (see `fit_tree`).
    """

    parent: str | None
    weights: NDArray[np.uint64]
    tables: tree_kernel.GivenTables
    edges: Floats
    possible: NDArray[np.bool_]
    fine_edges: Floats
    masses: Floats
    epsilon: float
    solved: float

    @property
    def n_levels(self) -> int:
        """How many cells a value may fall in."""
        return int(self.possible.sum())

    def randomise(self, codec: Codec, array: pa.Array, parents: NDArray[np.uint16], rng: Rng) -> tuple[pa.Array, NDArray[np.uint16]]:
        """Return a released value for each value of `array`, and its level; one word a row, two where cells have an inside.

        Parameters
        ----------
        codec
            The codec of the column.
        array
            The values.
        parents
            The released levels of the parent column.
        rng
            The stream of the column.
        """
        if isinstance(codec, LevelCodec):
            own = codec.encode(array)
            released = self._sample(parents, own, words(rng, len(own)))
            return codec.decode(released), released
        found = FoundBins(cuts=self.edges, edges=self.fine_edges, masses=self.masses) if self.masses.any() else None
        cells = Cells(codec=codec, edges=self.edges, possible=self.possible, found=found)
        own = cells.codes(array).astype(np.int32)
        drawn = words(rng, len(own), 2)
        released = self._sample(parents, own, np.ascontiguousarray(drawn[:, 0]))
        return cells.draw(released, drawn[:, 1]), released

    def _sample(self, parents: NDArray[np.uint16], own: NDArray[np.int32], drawn: NDArray[np.uint64]) -> NDArray[np.uint16]:
        return tree_kernel.sample_given(parents, own, drawn, self.n_levels, self.tables)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TreeRelease(RandomisedRows):
    """A fitted release along a tree of columns.

    Attributes
    ----------
    columns
        The channels of each privatised column, every column after its parent.

    Privacy
    -------
    Unit: a row. Adjacency: replace-one. Protected: the values of all rows, given tables that carry their own noise and
    ε. Row-level noise, so there is no sensitivity. Event: one local release of every row.

    Notes
    -----
    A released row has probability Π_l T[l][b_l][k_l, j_l], its own levels k and the released ones j, b_l that of the
    parent. Which own row is worst can be chosen column by column, so ε* = max over released rows of Σ_l log(max_k / min_k),
    which is found from the leaves to the roots.

    References
    ----------
    Bi and Shen, Distribution-invariant differential privacy, equation (2): the chain rule, of which this keeps one
    condition for each column; Chow and Liu (1968), Approximating discrete probability distributions with dependence trees.
    """

    archive: ClassVar[Archive] = Archive(kind="dip-tree", format=3, noun="fitted release along a tree")
    mechanism_id: ClassVar[str] = "dip/tree"

    columns: Mapping[str, TreeColumn]

    @property
    def epsilon(self) -> float:
        """ε* of a whole row, rounded up: never more than the sum over its columns."""
        worst = worst_row({name: (column.parent, column.weights) for name, column in self.columns.items()})
        return min(worst, round_up_sum(column.epsilon for column in self.columns.values()))

    @property
    def edges(self) -> tuple[tuple[str, str], ...]:
        """(parent, column) for each column that is given another."""
        return tuple((column.parent, name) for name, column in self.columns.items() if column.parent is not None)

    def randomise(self, batch: pa.RecordBatch, codecs: Mapping[str, Codec], rngs: Mapping[str, Rng]) -> pa.RecordBatch:
        """Return the batch with every privatised column randomised and the others untouched; see `RowRelease.randomise`.

        Raises
        ------
        DataError
            If a value violates the schema.
        """
        arrays = list(batch.columns)
        released: dict[str, NDArray[np.uint16]] = {}
        root = np.zeros(batch.num_rows, dtype=np.uint16)
        for name, column in self.columns.items():
            position = batch.schema.get_field_index(name)
            parents = root if column.parent is None else released[column.parent]
            arrays[position], released[name] = column.randomise(codecs[name], batch.column(position), parents, rngs[name])
        return pa.RecordBatch.from_arrays(arrays, names=batch.schema.names)

    def _contents(self) -> Contents:
        """Return what the bytes hold.

        Privacy
        -------
        A function of noisy tables, which have their own ε: safe to publish, unlike the run key beside it.
        """
        columns = [{"name": name, **{part: getattr(column, part) for part in _SCALARS}} for name, column in self.columns.items()]
        arrays = {f"{index}_{part}": getattr(column, part) for index, column in enumerate(self.columns.values()) for part in _ARRAYS}
        return {"columns": columns}, arrays

    @classmethod
    def _of_contents(cls, header: Mapping[str, Any], arrays: Mapping[str, Any]) -> Self:
        return cls(columns={column["name"]: _column(column, arrays, index) for index, column in enumerate(header["columns"])})


def _column(column: Mapping[str, Any], arrays: Mapping[str, Any], index: int) -> TreeColumn:
    parts = {part: arrays[f"{index}_{part}"] for part in _ARRAYS}
    return TreeColumn(**{part: column[part] for part in _SCALARS}, **parts, tables=tree_kernel.make_given_tables(parts["weights"]))


def worst_row(channels: Mapping[str, tuple[str | None, NDArray[np.uint64]]]) -> float:
    """Return the greatest privacy loss of any released row, rounded up.

    Parameters
    ----------
    channels
        For each column its parent and the channels' weights, as in `TreeColumn`; every column after its parent.
    """
    below: dict[str | None, Floats | float] = {}
    for name, (parent, weights) in reversed(list(channels.items())):
        inside = tree_kernel.losses(weights) + below.get(name, 0.0)
        worst = inside.max(axis=1)
        below[parent] = np.nextafter(below.get(parent, 0.0) + worst, np.inf)
    found = np.asarray(below[None])
    return float(found[0])
