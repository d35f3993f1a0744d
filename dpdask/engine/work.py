"""What tasks carry: descriptions of the work and the places of the secrets, never the secrets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pyarrow as pa

from dpdask.codec import Codec, codec_for
from dpdask.io.fragments import Fragment, InputTable
from dpdask.io.storage import Folder
from dpdask.schema import Schema
from dpdask.streams import RunKey

KEY_NAME = "run.key"
RELEASE_NAME = "release.npz"


@dataclass(frozen=True, slots=True, kw_only=True)
class TableWork:
    """What every task on a table needs.

    Attributes
    ----------
    types
        The table's Arrow schema.
    released
        The released columns and their plain types.
    codecs
        The codec of each privatised column.
    fraction
        The hold-out's fraction, or None.
    secrets
        The folder that holds the run key and the fitted release.
    """

    types: pa.Schema
    released: pa.Schema
    codecs: Mapping[str, Codec]
    fraction: float | None
    secrets: Folder

    def key(self) -> RunKey:
        """Read the run key."""
        return RunKey(self.secrets.read(KEY_NAME))


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardWork:
    """One task of the writing stage: neighbouring fragments, and the shards that they become.

    Attributes
    ----------
    fragments
        In order.
    n_released
        How many rows of each are released.
    names
        The shards, in order; all but the last hold `rows_per_shard` rows.
    rows_per_shard
        The most rows of a shard.
    """

    fragments: tuple[Fragment, ...]
    n_released: tuple[int, ...]
    names: tuple[str, ...]
    rows_per_shard: int


def table_work(table: InputTable, schema: Schema, fraction: float | None, secrets: Folder) -> TableWork:
    """Return the work on a table whose columns were checked against the schema.

    Raises
    ------
    DataError
        If a column's type does not fit its declared domain.
    """
    released = schema.released(table.schema)
    codecs = {name: codec_for(name, schema.columns[name], released.field(name).type) for name in schema.privatised}
    return TableWork(types=table.schema, released=released, codecs=codecs, fraction=fraction, secrets=secrets)


def lay_out(fragments: tuple[Fragment, ...], n_released: tuple[int, ...], rows_per_shard: int) -> list[ShardWork]:
    """Return the writing tasks: neighbours share a shard while they fit, and a large fragment is cut into several.

    Parameters
    ----------
    fragments, n_released
        Of equal length, in the order of the rows.
    rows_per_shard
        The most rows of a shard.
    """
    groups: list[list[int]] = []
    room = 0
    for index, rows in enumerate(n_released):
        if not groups or rows > room:
            groups.append([])
            room = rows_per_shard
        groups[-1].append(index)
        room -= rows
    works: list[ShardWork] = []
    first = 0
    for group in groups:
        rows = sum(n_released[index] for index in group)
        if rows == 0 and len(groups) > 1:
            continue
        count = max(1, -(-rows // rows_per_shard))
        names = tuple(f"part-{number:05d}.parquet" for number in range(first, first + count))
        first += count
        works.append(
            ShardWork(
                fragments=tuple(fragments[index] for index in group),
                n_released=tuple(n_released[index] for index in group),
                names=names,
                rows_per_shard=rows_per_shard,
            )
        )
    return works

