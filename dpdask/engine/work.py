"""What tasks carry: descriptions of the work and the places of the secrets, never the secrets."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import pyarrow as pa

from dpdask.cells import DEFAULT_BINS, Cells, cells
from dpdask.codec import Codec, LevelCodec, codec_for
from dpdask.errors import InputError, SpecError
from dpdask.io.fragments import Fragment
from dpdask.io.storage import Folder
from dpdask.privacy import UnitColumn
from dpdask.references import Chain, Histogram, Reference, Tree, held_out
from dpdask.schema import Schema
from dpdask.streams import RunKey

KEY_NAME = "run.key"
HOLDOUT_NAME = "holdout.key"
RELEASE_NAME = "release.npz"
NOISY_NAME = "noisy.npz"
BOUNDS_NAME = "bounds.npz"
_MOST_READ = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitWork:
    """The privacy unit, when it is more than a row.

    Attributes
    ----------
    column
        Whose value names the unit.
    max_rows
        How many rows of a unit are released at most.
    public
        The kept columns, by which the rows of a unit are told apart.
    bounds_sha256
        Of the bounds' file, once it is written.
    """

    column: str
    max_rows: int
    public: tuple[str, ...]
    bounds_sha256: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordsWork:
    """What a reference of whole records needs.

    Attributes
    ----------
    by
        The kept column whose values name the rows' groups, or None.
    max_records
        How many distinct records are held at most.
    """

    by: str | None
    max_records: int


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
    unit
        The privacy unit, or None when it is the row.
    cells
        Where rows are counted, the public cells of each privatised column.
    records
        Where the reference is made of whole records, what that needs.
    kept_holdout
        Whether a key that several runs share, stored beside the run key, chooses the hold-out.
    """

    types: pa.Schema
    released: pa.Schema
    codecs: Mapping[str, Codec]
    fraction: float | None
    secrets: Folder
    unit: UnitWork | None = None
    cells: Mapping[str, Cells] = field(default_factory=dict)
    records: RecordsWork | None = None
    kept_holdout: bool = False

    @property
    def unit_columns(self) -> list[str]:
        """The columns that the unit's hashes need."""
        return [] if self.unit is None else [self.unit.column, *self.unit.public]

    @property
    def group_columns(self) -> list[str]:
        """The column that names the rows' groups, if there is one."""
        return [] if self.records is None or self.records.by is None else [self.records.by]

    @property
    def sealed(self) -> list[str]:
        """The columns that a fragment's seal covers: the private ones, and those that the units' and groups' hashes need."""
        return list(dict.fromkeys([*self.codecs, *self.unit_columns, *self.group_columns]))

    def key(self) -> RunKey:
        """Read the run key."""
        return RunKey(self.secrets.read(KEY_NAME))

    def holdout_key(self) -> RunKey:
        """Read the key that chooses the hold-out: the run key, or the dataset's."""
        return RunKey(self.secrets.read(HOLDOUT_NAME)) if self.kept_holdout else self.key()


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
    window
        How many rows are shuffled at a time, a multiple of whole shards; None if rows keep their order.
    """

    fragments: tuple[Fragment, ...]
    n_released: tuple[int, ...] = field(repr=False)  # Dask logs the arguments of a task that failed
    names: tuple[str, ...]
    rows_per_shard: int
    window: int | None = None


def keep(folder: Folder, name: str, data: bytes) -> str:
    """Write a private file and return its sha256."""
    folder.write(name, data, private=True)
    return hashlib.sha256(data).hexdigest()


def kept(folder: Folder, name: str, sha256: str, what: str) -> bytes:
    """Return a file's bytes, compared with their sha256.

    Raises
    ------
    InputError
        If the file is missing or another; `what` says so.
    """
    data = folder.read(name)
    if hashlib.sha256(data).hexdigest() != sha256:
        raise InputError(what, name, "abort the run and begin again")
    return data


def table_work(types: pa.Schema, schema: Schema, reference: Reference | None, secrets: Folder, unit: UnitColumn | None = None) -> TableWork:
    """Return the work on a table of some Arrow types, checked against the schema.

    Raises
    ------
    DataError
        If a column's type does not fit its declared domain.
    SpecError
        If the unit's column, or the reference, does not fit the columns.
    """
    if isinstance(reference, Chain):
        _check_groups(reference, schema, types)
    released = schema.released(types)
    codecs = {name: codec_for(name, schema.columns[name], released.field(name).type) for name in schema.privatised}
    return TableWork(
        types=types,
        released=released,
        codecs=codecs,
        fraction=held_out(reference),
        secrets=secrets,
        unit=_unit_work(unit, schema, types),
        cells=_cells(reference, codecs),
        records=RecordsWork(by=reference.by, max_records=reference.max_records) if isinstance(reference, Chain) else None,
        kept_holdout=held_out(reference) is not None and secrets.exists(HOLDOUT_NAME),
    )


def _cells(reference: Reference | None, codecs: Mapping[str, Codec]) -> dict[str, Cells]:
    if isinstance(reference, Tree):
        return _cut(codecs, reference.bins, "mechanism.reference.bins")
    return {name: cells(codec, reference.bins) for name, codec in codecs.items()} if isinstance(reference, Histogram) else {}


def _cut(codecs: Mapping[str, Codec], bins: Mapping[str, int | Sequence[float]] | int, where: str) -> dict[str, Cells]:
    given = {} if isinstance(bins, int) else bins
    for name in given:
        if name not in codecs or isinstance(codecs[name], LevelCodec):
            raise SpecError("is not a continuous or mixed column that is privatised", f"{where}.{name}", "remove it")
    usual = bins if isinstance(bins, int) else DEFAULT_BINS
    return {name: cells(codec, given.get(name, usual)) for name, codec in codecs.items()}


def _check_groups(reference: Chain, schema: Schema, types: pa.Schema) -> None:
    if reference.by is not None and (reference.by not in schema.kept or pa.types.is_nested(types.field(reference.by).type)):
        where = f"mechanism.reference.by {reference.by!r}"
        raise SpecError("the groups' column must be a kept column of plain values", where, "name another, or remove it")


def tabulated_work(
    types: pa.Schema, schema: Schema, bins: Mapping[str, int | Sequence[float]] | int, secrets: Folder, unit: UnitColumn | None = None
) -> TableWork:
    """Return the work on a table whose privatised columns are counted in public cells, checked against the schema.

    Parameters
    ----------
    types, schema, secrets, unit
        As for `table_work`.
    bins
        How continuous and mixed columns are cut: a number of cells for all, or for each column that number or the first
        value of each cell (`cells.cells`).

    Raises
    ------
    DataError, SpecError
        As `table_work`; also if bins name a column that is not cut.
    """
    work = table_work(types, schema, None, secrets, unit)
    return replace(work, cells=_cut(work.codecs, bins, "mechanism.bins"))


def _unit_work(unit: UnitColumn | None, schema: Schema, types: pa.Schema) -> UnitWork | None:
    if unit is None:
        return None
    if unit.column not in schema.columns or schema.columns[unit.column].role == "privatise":
        raise SpecError(
            "the unit's column must be declared, and kept or dropped", f"privacy.unit.column {unit.column!r}", "correct the job or the schema"
        )
    if pa.types.is_nested(types.field(unit.column).type):
        raise SpecError("the unit's column holds lists or the like", f"privacy.unit.column {unit.column!r}", "name a column of plain values")
    public = [name for name in schema.kept if name != unit.column and not pa.types.is_nested(types.field(name).type)]
    return UnitWork(column=unit.column, max_rows=unit.max_rows, public=tuple(public))


def lay_out(fragments: tuple[Fragment, ...], n_released: tuple[int, ...], rows_per_shard: int) -> list[ShardWork]:
    """Return the writing tasks: neighbours share a shard while they fit, and a large fragment is cut into several.

    Where most rows are not released (a bound on units), a task reads at most four times `rows_per_shard` rows all the
    same, so that the work stays spread.

    Parameters
    ----------
    fragments, n_released
        Of equal length, in the order of the rows.
    rows_per_shard
        The most rows of a shard.
    """
    groups: list[list[int]] = []
    room = taken = 0
    for index, rows in enumerate(n_released):
        read = max(rows, fragments[index].n_rows or 0)
        if not groups or rows > room or taken + read > _MOST_READ * rows_per_shard:
            groups.append([])
            room, taken = rows_per_shard, 0
        groups[-1].append(index)
        room, taken = room - rows, taken + read
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
