"""Distribution-invariant privatisation of several columns at once: each rank is randomised, the joint distribution stays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.random import Generator
from numpy.typing import NDArray

from dpdask.channels import LevelChannel
from dpdask.codec import Codec, ValueCodec
from dpdask.errors import DataError
from dpdask.kernels import chain as kernel
from dpdask.kernels import channel as channel_kernel
from dpdask.kernels import rank as rank_kernel
from dpdask.kernels.siphash import siphash
from dpdask.privacy.rounding import rounded_up_sum
from dpdask.stats.hashing import as_words
from dpdask.stats.records import from_numbers, numbers
from dpdask.streams import RunKey, stream, words

MECHANISM_ID = "dip/chain"

Floats = NDArray[np.float64]
Words = NDArray[np.uint64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LaplaceRanks:
    """Discrete Laplace noise on ranks; uniform ranks stay uniform.

    Attributes
    ----------
    noise
        Its law.
    thresholds, aliases
        The tables that are drawn from.
    """

    noise: rank_kernel.RankNoise
    thresholds: Words
    aliases: NDArray[np.uint16]

    @property
    def epsilon(self) -> float:
        """An upper bound on ε*."""
        return self.noise.epsilon

    @property
    def n_words(self) -> int:
        """How many words a row consumes; the first one places it among its ties."""
        return rank_kernel.words_per_row(self.noise)

    def disturb(self, ranks: Floats, drawn: Words) -> Floats:
        """Return ranks in (0, 1) for ranks in [0, 1]."""
        return rank_kernel.disturb(ranks, drawn, self.noise, (self.thresholds, self.aliases))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BinnedRanks:
    """A channel on even bins of ranks; inside its bin a released rank is uniform.

    Attributes
    ----------
    channel
        On the bins.
    thresholds, aliases
        The tables that are drawn from.
    """

    channel: LevelChannel
    thresholds: Words
    aliases: NDArray[np.uint16]

    @property
    def epsilon(self) -> float:
        """ε*, exact."""
        return self.channel.epsilon

    @property
    def n_words(self) -> int:
        """How many words a row consumes; the first one places it among its ties."""
        return 3

    def disturb(self, ranks: Floats, drawn: Words) -> Floats:
        """Return ranks in (0, 1) for ranks in [0, 1]."""
        n_bins = len(self.channel.weights)
        bins = np.minimum((ranks * n_bins).astype(np.int32), n_bins - 1)
        released = channel_kernel.sample(bins, np.ascontiguousarray(drawn[:, 1]), self.thresholds, self.aliases)
        place = ((drawn[:, 2] >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
        result: Floats = (released + place) / n_bins
        return result


RankRandomiser = LaplaceRanks | BinnedRanks


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)  # the key and the trie are secret
class Groups:
    """Which groups have a reference of their own.

    Attributes
    ----------
    column
        The kept column whose value names a row's group.
    key
        uint64 array of shape (2,), of the groups' hashes.
    hashes
        uint64 array, increasing: the groups with a reference of their own, in the order of the trie's roots after the
        first, which is the pooled one.
    pooled_groups, pooled_rows
        Which shares of the groups that the reference saw, and of its rows, have none.
    """

    column: str
    key: Words
    hashes: Words
    pooled_groups: float
    pooled_rows: float

    def roots(self, array: pa.Array) -> NDArray[np.int64]:
        """Return the root that each row is released by.

        Raises
        ------
        DataError
            If a row's group is null.
        """
        found = group_hashes(self.column, array, self.key)
        places = np.searchsorted(self.hashes, found)
        known = np.append(self.hashes, np.uint64(0))[places] == found
        known &= places < len(self.hashes)
        return np.where(known, places + 1, 0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class ChainRelease:
    """A fitted release of several columns by the chain of their conditional distributions.

    Attributes
    ----------
    columns
        How the ranks of each column are randomised, in the order of their release.
    trie
        The reference records.
    groups
        Which groups have a reference of their own, or None.
    least_grade
        The reference is a keyed sample of 2**-least_grade of its rows.

    Privacy
    -------
    Unit: a row. Adjacency: replace-one. Protected: the values of the rows that are randomised, given a reference that does
    not depend on them. Row-level noise, so there is no sensitivity: each column's noisy rank is an ε-private function of
    the row whatever the rank was computed from, and all that follows is post-processing, so ε of a row is the sum of its
    columns' ε*. Event: one local release of every row. Not protected: the reference records. Every released row follows one
    of them: levels and atoms exactly, other values up to the gap to their neighbours.

    Notes
    -----
    Column l's rank is taken given the row's own values of columns 0..l-1, and the noisy rank, which is uniform again, is
    read given the released ones (Rosenblatt's transformation both ways). The released row then follows the reference,
    whatever the order of the columns. To read both given the released prefix, as (2) can be taken, would not.

    References
    ----------
    Bi and Shen, Distribution-invariant differential privacy, (2) and (10).
    """

    columns: Mapping[str, RankRandomiser]
    trie: kernel.Trie
    groups: Groups | None
    least_grade: int

    @property
    def epsilon(self) -> float:
        """An upper bound on the ε that a released row has cost."""
        return rounded_up_sum(mechanism.epsilon for mechanism in self.columns.values())

    def randomise(self, batch: pa.RecordBatch, codecs: Mapping[str, Codec], rngs: Mapping[str, Generator]) -> pa.RecordBatch:
        """Return the batch with every privatised column randomised and the others untouched.

        Parameters
        ----------
        batch
            The rows to release, with the groups' column if there is one.
        codecs
            The codec of each privatised column.
        rngs
            From `streams`, one per privatised column; advanced by the rows of the batch.

        Raises
        ------
        DataError
            If a value violates the schema, or a row's group is null.
        """
        arrays = list(batch.columns)
        own = np.zeros(batch.num_rows, dtype=np.int64) if self.groups is None else self.groups.roots(batch.column(self.groups.column))
        released = own
        for name, mechanism in self.columns.items():
            position = batch.schema.get_field_index(name)
            codec = codecs[name]
            drawn = words(rngs[name], batch.num_rows, mechanism.n_words)
            ranks, own = kernel.ranks_of(numbers(codec, batch.column(position)), own, np.ascontiguousarray(drawn[:, 0]), self.trie)
            lattice = isinstance(codec, ValueCodec) and codec.lattice
            values, released = kernel.values_at(mechanism.disturb(ranks, drawn), released, self.trie, lattice)
            arrays[position] = from_numbers(codec, values)
        return pa.RecordBatch.from_arrays(arrays, names=batch.schema.names)

    def streams(self, key: RunKey, fragment_id: str) -> dict[str, Generator]:
        """Return the random stream of each column on one fragment, at its start."""
        return {name: stream(key, f"{MECHANISM_ID}/{name}", fragment_id) for name in self.columns}


def group_hashes(column: str, array: pa.Array, key: Words) -> Words:
    """Return the keyed hash of each row's group, uint64.

    Raises
    ------
    DataError
        If a row's group is null.
    """
    if array.null_count:
        raise DataError("holds a null, and the group of every row must be known", f"column {column!r}", "fill it, or drop these rows")
    return siphash(as_words(array).reshape(-1, 1), *key)
