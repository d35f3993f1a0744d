"""What a fitted release is: one that randomises rows, or one from which records are drawn."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Protocol

import pyarrow as pa

from dpdask.archive import Archived
from dpdask.codec import Codec, LevelCodec
from dpdask.privacy.rounding import round_up_sum
from dpdask.schema import Schema
from dpdask.streams import Rng, RunKey, Stream, stream


class RowRelease(Protocol):
    """A fitted release that randomises every row on its own."""

    def to_bytes(self) -> bytes:
        """Return the release as bytes: the same release, the same bytes."""

    def types(self, released: pa.Schema) -> pa.Schema:
        """Return the columns that are written, given the released columns of the table."""

    def few_valued(self, codecs: Mapping[str, Codec]) -> list[str]:
        """Return which of the written columns have few distinct values."""

    def streams(self, key: RunKey, fragment_id: str) -> dict[str, Stream]:
        """Return the random stream of each private column on one part of the table, at its start.

        Parameters
        ----------
        key
            The run key.
        fragment_id
            The id of the part.
        """

    def randomise(self, batch: pa.RecordBatch, codecs: Mapping[str, Codec], rngs: Mapping[str, Rng]) -> pa.RecordBatch:
        """Return the released rows of a batch, in its order.

        Parameters
        ----------
        batch
            The private columns of some rows, and the columns that are also read.
        codecs
            The codec of each private column.
        rngs
            What `streams` returned; each stream is advanced by the rows of the batch.
        """


class RecordRelease(Protocol):
    """A fitted release from which records are drawn; a function of noisy counts alone, so it may be published."""

    def to_bytes(self) -> bytes:
        """Return the release as bytes: the same release, the same bytes."""

    @property
    def schema(self) -> Schema:
        """The declared columns."""

    @property
    def types(self) -> pa.Schema:
        """The columns that are written."""

    @property
    def few_valued(self) -> list[str]:
        """Which of them have few distinct values."""

    def n_drawn(self, wanted: int | None) -> int:
        """Return how many records to draw: as many as wanted, or as many as the release says."""

    def batches(self, start: int, n_rows: int, n_total: int, key: RunKey, part: str) -> Iterator[pa.RecordBatch]:
        """Yield records: a function of the arguments.

        Parameters
        ----------
        start, n_rows, n_total
            The number of the first record, how many records, and how many all parts have together.
        key, part
            Name the random streams.
        """


FittedRelease = RowRelease | RecordRelease


class RandomisedRows(Archived):
    """The base of DIP's fitted releases: which columns are written, and what each one's randomness comes from.

    Attributes
    ----------
    columns
        What randomises each privatised column.
    """

    __slots__ = ()
    mechanism_id: ClassVar[str]
    columns: Mapping[str, Any]

    @property
    def epsilon(self) -> float:
        """An upper bound on the ε that a released row has cost."""
        return round_up_sum(mechanism.epsilon for mechanism in self.columns.values())

    def types(self, released: pa.Schema) -> pa.Schema:
        """Return the columns that are written: the released columns of the table."""
        return released

    def few_valued(self, codecs: Mapping[str, Codec]) -> list[str]:
        """Return which of them have few distinct values."""
        return [name for name, codec in codecs.items() if isinstance(codec, LevelCodec)]

    def streams(self, key: RunKey, fragment_id: str) -> dict[str, Stream]:
        """Return the random stream of each column on one fragment, at its start; see `RowRelease.streams`."""
        return {name: stream(key, f"{self.mechanism_id}/{name}", fragment_id) for name in self.columns}
