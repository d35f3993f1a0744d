"""What the fitted releases of DIP have in common: rows stay rows, and each privatised column has a random stream of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pyarrow as pa
from numpy.random import Generator

from dpdask.archive import Archived
from dpdask.codec import Codec, LevelCodec
from dpdask.streams import RunKey, stream


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

    def types(self, released: pa.Schema) -> pa.Schema:
        """Return the columns that are written: the released columns of the table."""
        return released

    def few_valued(self, codecs: Mapping[str, Codec]) -> list[str]:
        """Return which of them have few distinct values."""
        return [name for name, codec in codecs.items() if isinstance(codec, LevelCodec)]

    def streams(self, key: RunKey, fragment_id: str) -> dict[str, Generator]:
        """Return the random stream of each column on one fragment, at its start; see `RowRelease.streams`."""
        return {name: stream(key, f"{self.mechanism_id}/{name}", fragment_id) for name in self.columns}
