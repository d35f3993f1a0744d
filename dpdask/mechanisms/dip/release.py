"""Distribution-invariant privatisation, column by column: each value is randomised, its distribution stays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.random import Generator
from numpy.typing import NDArray

from dpdask.channels import LevelChannel
from dpdask.codec import Codec, LevelCodec, ValueCodec
from dpdask.kernels import bins as bins_kernel
from dpdask.kernels import channel as channel_kernel
from dpdask.kernels import rank as rank_kernel
from dpdask.privacy.rounding import rounded_up_sum
from dpdask.references import RankDistribution
from dpdask.streams import RunKey, stream, words

MECHANISM_ID = "dip"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LevelMechanism:
    """A level column's channel with the exact tables that it is drawn from."""

    channel: LevelChannel
    thresholds: NDArray[np.uint64]
    aliases: NDArray[np.uint16]

    @property
    def epsilon(self) -> float:
        """ε*, exact."""
        return self.channel.epsilon

    def randomise(self, codec: LevelCodec, array: pa.Array, rng: Generator) -> pa.Array:
        """Return a released value for each value of `array`; consumes one word a row."""
        codes = codec.encode(array)
        return codec.decode(channel_kernel.sample(codes, words(rng, len(codes)), self.thresholds, self.aliases))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankMechanism:
    """A continuous or mixed column's rank noise and reference cdf."""

    noise: rank_kernel.RankNoise
    distribution: RankDistribution
    thresholds: NDArray[np.uint64]
    aliases: NDArray[np.uint16]

    @property
    def epsilon(self) -> float:
        """An upper bound on ε*."""
        return self.noise.epsilon

    def randomise(self, codec: ValueCodec, array: pa.Array, rng: Generator) -> pa.Array:
        """Return a released value for each value of `array`; consumes a fixed number of words a row."""
        values, is_null = codec.encode(array)
        noise, reference = self.noise, self.distribution
        drawn = words(rng, len(values), rank_kernel.words_per_row(noise))
        tables = self.thresholds, self.aliases
        released = rank_kernel.privatise(values, is_null, drawn, reference.x, reference.c, noise, tables, lattice=codec.lattice)
        return codec.decode(*released)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BinMechanism:
    """A continuous or mixed column's channel on bins of ranks; inside its bin a released value follows the reference.

    Attributes
    ----------
    channel
        On the bins: null, each atom, and even slices of the ranks in between.
    edges
        float64 array, the bins' edges in ranks.
    distribution
        The reference.
    thresholds, aliases
        The channel's exact tables.
    """

    channel: LevelChannel
    edges: NDArray[np.float64]
    distribution: RankDistribution
    thresholds: NDArray[np.uint64]
    aliases: NDArray[np.uint16]

    @property
    def epsilon(self) -> float:
        """ε*, exact: what follows the channel does not look at the value any more."""
        return self.channel.epsilon

    def randomise(self, codec: ValueCodec, array: pa.Array, rng: Generator) -> pa.Array:
        """Return a released value for each value of `array`; consumes three words a row."""
        values, is_null = codec.encode(array)
        drawn = words(rng, len(values), 3)
        x, c = self.distribution.x, self.distribution.c
        cells = bins_kernel.cells_of(values, is_null, np.ascontiguousarray(drawn[:, 0]), x, c, self.edges, lattice=codec.lattice)
        released = channel_kernel.sample(cells, np.ascontiguousarray(drawn[:, 1]), self.thresholds, self.aliases)
        return codec.decode(*bins_kernel.draw_values(released, drawn[:, 2], x, c, self.edges, lattice=codec.lattice))


ColumnMechanism = LevelMechanism | RankMechanism | BinMechanism


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DipRelease:
    """A fitted release: for each privatised column its mechanism.

    Attributes
    ----------
    columns
        The mechanism of each column.

    Privacy
    -------
    Unit: a row. Adjacency: replace-one. Protected: the values of the rows that are randomised, given a reference that
    does not depend on them. Row-level noise, so there is no sensitivity: ε of a row is the sum of its columns' ε*, each
    computed from the tables that are drawn from. Event: one local release of every row. For several continuous columns
    the reference's knots are values of hold-out rows; a released value lies between two of them.

    References
    ----------
    Bi and Shen, Distribution-invariant differential privacy, Algorithm 1, each column by its own margin.
    """

    columns: Mapping[str, ColumnMechanism]

    @property
    def epsilon(self) -> float:
        """An upper bound on the ε that a released row has cost."""
        return rounded_up_sum(mechanism.epsilon for mechanism in self.columns.values())

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
        for name, mechanism in self.columns.items():
            position = batch.schema.get_field_index(name)
            codec, array = codecs[name], batch.column(position)
            if isinstance(mechanism, LevelMechanism):
                assert isinstance(codec, LevelCodec)
                arrays[position] = mechanism.randomise(codec, array, rngs[name])
            else:
                assert isinstance(codec, ValueCodec)
                arrays[position] = mechanism.randomise(codec, array, rngs[name])
        return pa.RecordBatch.from_arrays(arrays, names=batch.schema.names)

    def streams(self, key: RunKey, fragment_id: str) -> dict[str, Generator]:
        """Return the random stream of each column on one fragment, at its start."""
        return {name: stream(key, f"{MECHANISM_ID}/{name}", fragment_id) for name in self.columns}
