"""Distribution-invariant privatisation along a tree: each column is randomised given what its parent was released as."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.random import Generator
from numpy.typing import NDArray

from dpdask.cells import Cells
from dpdask.codec import Codec, LevelCodec
from dpdask.kernels import tree as tree_kernel
from dpdask.privacy.rounding import rounded_up_sum
from dpdask.streams import RunKey, stream, words

MECHANISM_ID = "dip/tree"

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
    thresholds, aliases
        The exact tables that are drawn from, of shape (n_parent_levels · n, 2**bits).
    edges, possible
        The column's public cells, as in `Cells`.
    epsilon
        ε*, the largest exact privacy loss of any of its channels, rounded up.
    solved
        The share of rows, by the fitted tables, whose channel is the one asked for; others are rare parents' (see `fit_tree`).
    """

    parent: str | None
    weights: NDArray[np.uint64]
    thresholds: NDArray[np.uint64]
    aliases: NDArray[np.uint16]
    edges: Floats
    possible: NDArray[np.bool_]
    epsilon: float
    solved: float

    @property
    def n_levels(self) -> int:
        """How many cells a value may fall in."""
        return int(self.possible.sum())

    def randomise(self, codec: Codec, array: pa.Array, parents: NDArray[np.uint16], rng: Generator) -> tuple[pa.Array, NDArray[np.uint16]]:
        """Return a released value for each value of `array`, and its level; one word a row, two where cells have an inside."""
        if isinstance(codec, LevelCodec):
            own = codec.encode(array)
            released = self._sample(parents, own, words(rng, len(own)))
            return codec.decode(released), released
        cells = Cells(codec=codec, edges=self.edges, possible=self.possible)
        own = cells.codes(array).astype(np.int32)
        drawn = words(rng, len(own), 2)
        released = self._sample(parents, own, np.ascontiguousarray(drawn[:, 0]))
        return cells.draw(released, drawn[:, 1]), released

    def _sample(self, parents: NDArray[np.uint16], own: NDArray[np.int32], drawn: NDArray[np.uint64]) -> NDArray[np.uint16]:
        return tree_kernel.sample_given(parents, own, drawn, self.n_levels, self.thresholds, self.aliases)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TreeRelease:
    """A fitted release along a tree of columns.

    Attributes
    ----------
    columns
        The channels of each privatised column, every column after its parent.

    Privacy
    -------
    Unit: a row. Adjacency: replace-one. Protected: the values of all rows, given tables that carry their own noise and
    price. Row-level noise, so there is no sensitivity. Event: one local release of every row.

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

    columns: Mapping[str, TreeColumn]

    @property
    def epsilon(self) -> float:
        """ε* of a whole row, rounded up: never more than the sum over its columns."""
        worst = worst_row({name: (column.parent, column.weights) for name, column in self.columns.items()})
        return min(worst, rounded_up_sum(column.epsilon for column in self.columns.values()))

    @property
    def edges(self) -> tuple[tuple[str, str], ...]:
        """(parent, column) for each column that is given another."""
        return tuple((column.parent, name) for name, column in self.columns.items() if column.parent is not None)

    def randomise(self, batch: pa.RecordBatch, codecs: Mapping[str, Codec], rngs: Mapping[str, Generator]) -> pa.RecordBatch:
        """Return the batch with every privatised column randomised and the others untouched.

        Parameters
        ----------
        batch
            The rows to release.
        codecs
            The codec of each privatised column.
        rngs
            From `streams`, one per privatised column; advanced by the rows of the batch.

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

    def streams(self, key: RunKey, fragment_id: str) -> dict[str, Generator]:
        """Return the random stream of each column on one fragment, at its start."""
        return {name: stream(key, f"{MECHANISM_ID}/{name}", fragment_id) for name in self.columns}


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
