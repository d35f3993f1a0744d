"""What tasks carry: descriptions of the work and the places of the secrets. Secrets never travel: a work that holds keys cannot be pickled."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import field, replace
from hashlib import blake2b
from typing import TypeVar

import pyarrow as pa

from dpdask.archive import Archived
from dpdask.arrays import freeze_class
from dpdask.codec import Codecs
from dpdask.computed import View
from dpdask.engine.compute import remember
from dpdask.errors import DataError, InputError, MissingError, SpecError
from dpdask.io.encrypted import EncryptedFile, EncryptedFolder
from dpdask.io.filesystems import Options, list_options
from dpdask.io.storage import HOLDOUT_NAME, KEY_NAME, RELEASE_NAME, Folder, PrivateFolder
from dpdask.mechanisms.mechanism import Columns, Mechanism
from dpdask.privacy import UnitColumn
from dpdask.schema import Schema
from dpdask.startup import Stamp
from dpdask.streams import RunKey

Loaded = TypeVar("Loaded", bound=Archived)

_COUNTS = "counts-"


def has_counts(secrets: Folder) -> bool:
    """Return whether the folder of a run's key keeps the counts of a pass."""
    return any(name.startswith(_COUNTS) for name in _as_stored(secrets).names())


def _as_stored(secrets: Folder) -> Folder:
    """Return the folder of a run's key for files that are encrypted on any storage."""
    return Folder(secrets.url) if isinstance(secrets, EncryptedFolder) else secrets


@freeze_class
class UnitWork:
    """The privacy unit, when it is more than a row."""

    column: str
    max_rows: int  # how many rows of a unit are released at most
    public: tuple[str, ...]  # the kept columns, by which the rows of a unit are told apart
    weight: str | None = None  # the column of published numbers of rows, if there is one
    bounds_sha256: str = ""  # SHA-256 of the bounds' file, once it is written


@freeze_class
class TableWork:
    """What every task on a table needs."""

    types: pa.Schema
    released: pa.Schema  # the released columns and their plain types
    view: View  # what the mechanism sees of the private columns
    fraction: float | None
    secrets: Folder  # the folder that holds the run key and the fitted release
    unit: UnitWork | None = None  # the privacy unit, or None when it is the row
    # Whether a key that several runs share, stored beside the run key, chooses the hold-out.
    kept_holdout: bool = False
    # The kept columns that the mechanism reads beside the private ones.
    also_read: tuple[str, ...] = ()
    # The private columns of texts whose values are counted as they are.
    encoded: tuple[str, ...] = ()
    n_rows_private: bool = False  # whether neighbouring tables differ by the presence of a row
    # The run key and the key that chooses the hold-out, while a task works on one part: see
    # `hold_keys`.
    held_keys: tuple[RunKey, RunKey] | None = None
    stamp: Stamp = field(default_factory=Stamp)  # A worker with other versions refuses the work
    # The options of the stores, by bucket: a worker opens these with them. Secrets stand in them by
    # the names of environment variables; each worker looks its own up.
    stores: Mapping[str, Options] = field(default_factory=list_options, compare=False)

    @property
    def codecs(self) -> Codecs:
        """The codecs of the private columns that the mechanism sees."""
        return self.view.codecs

    @property
    def unit_columns(self) -> list[str]:
        """The columns that the unit's hashes need."""
        return [] if self.unit is None else [self.unit.column, *self.unit.public]

    @property
    def sealed(self) -> list[str]:
        """The columns that a fragment's seal covers: the private ones, those that the units' hashes need, and those that the mechanism reads."""
        return list(dict.fromkeys([*self.view.own, *self.unit_columns, *self.also_read]))

    @property
    def public(self) -> list[str]:
        """The columns that are released as they are."""
        private = self.view.schema.privatised
        return [name for name in self.released.names if name not in private]

    @property
    def read(self) -> pa.Schema:
        """The columns that are released and read: all but sums, which are computed."""
        sums = self.view.computed.sums
        return pa.schema([field for field in self.released if field.name not in sums])

    @property
    def unit_stages(self) -> tuple[str, ...]:
        """The stage of a run that bounds the units, in words; none when the unit is the row."""
        if self.unit is None:
            return ()
        read, most = (
            ", ".join(self.unit_columns),
            f"{self.unit.max_rows} rows of each {self.unit.column}",
        )
        counts = "" if self.unit.weight is None else f"; count the rows of each {self.unit.column}"
        hashed = self.unit.public or self.unit.weight is not None
        how = (
            "by a keyed hash"
            if hashed
            else "the first ones: no column is kept, so shuffle a sorted table"
        )
        return (f"units: read {read}; choose at most {most}, {how}{counts}",)

    def add_weight(self, types: pa.Schema) -> pa.Schema:
        """Return the released columns with that of the weights, if numbers of rows are published."""
        if self.unit is None or self.unit.weight is None:
            return types
        return types.append(pa.field(self.unit.weight, pa.float64(), nullable=False))

    @property
    def unit_place(self) -> str | None:
        """The unit's column and its type, on which the choice of held-out units depends beside its key."""
        if self.unit is None:
            return None
        type_ = self.types.field(self.unit.column).type  # units are hashed as values of their type
        plain = type_.value_type if pa.types.is_dictionary(type_) else type_
        return f"unit {self.unit.column} {plain}"

    @property
    def bounds_sha256(self) -> str:
        """SHA-256 of the units' bounds, once they are kept; empty if the unit is the row."""
        return "" if self.unit is None else self.unit.bounds_sha256

    @property
    def columns(self) -> Columns:
        """The columns as a mechanism sees them."""
        return Columns(types=self.released, codecs=self.codecs)

    def with_levels(self, found: Schema) -> TableWork:
        """Return the work with the levels that a round has found, which that schema lists now."""
        view = View.of(self.view.schema.take_levels(found), self.released)
        encoded = tuple(name for name in self.encoded if found.columns[name].discovers)
        return replace(self, view=view, encoded=encoded)

    def narrow(self, schema: Schema, types: pa.Schema) -> TableWork:
        """Return the work on one of several tables whose columns this is on."""
        released = schema.select_released(types)
        view = View.of(schema, released)
        return replace(self, types=types, released=released, view=view)

    def with_keys(self) -> TableWork:
        """Return the work once the run's keys are written: the hold-out is the dataset's if its key is there."""
        kept = self.fraction is not None and self.secrets.exists(HOLDOUT_NAME)
        return replace(self, kept_holdout=kept)

    def key(self) -> RunKey:
        """Return the run key: from its file, or from the memory of this process if the run's files are encrypted."""
        if self.held_keys is not None:
            return self.held_keys[0]
        secrets = self.secrets
        if isinstance(secrets, EncryptedFolder | PrivateFolder):
            return RunKey(secrets.key)
        return RunKey(secrets.read(KEY_NAME))

    def hold_keys(self) -> TableWork:
        """Return this work with its keys in memory, for one part of a table, so that their files are read once. It cannot be pickled.

        A task asks again for each part: if an abort takes the key away, it stops there. Where no
        file holds a key, the work stays as it is: exact counts of a frame need none, and whoever
        needs one finds it missing.
        """
        if isinstance(self.secrets, EncryptedFolder):
            return self  # keys are in memory, until they are withdrawn
        try:
            key = self.key()
        except MissingError:
            return self
        return replace(self, held_keys=(key, self.holdout_key() if self.kept_holdout else key))

    def hide(self, part_id: str) -> str:
        """Return a part's name for private files: its id is a digest of the rows, so whoever lists the files could test guesses of a value."""
        key = self.key().reveal()
        return blake2b(part_id.encode(), key=key, digest_size=16, person=b"dpdask part").hexdigest()

    def claim_seal(self, part_id: str, digest: bytes) -> bytes:
        """Keep the seal of a part beside the run key, and return it, or the one that was kept before."""
        return self.secrets.claim(f"seals/{self.hide(part_id)}", digest)

    def open_counts(self, number: int) -> EncryptedFile:
        """Return the file that keeps the counts of the unfinished pass of a round."""
        return EncryptedFile(_as_stored(self.secrets), f"{_COUNTS}{number}", self.key().reveal())

    def remove_counts(self, number: int) -> None:
        """Remove the counts of all passes up to that of a round."""
        for each in range(number + 1):
            _as_stored(self.secrets).remove(f"{_COUNTS}{each}")

    def holdout_key(self) -> RunKey:
        """Read the key that chooses the hold-out: the run key, or the dataset's."""
        if self.held_keys is not None:
            return self.held_keys[1]
        if not self.kept_holdout:
            return self.key()
        if isinstance(self.secrets, EncryptedFolder):
            return RunKey(self.secrets.read_once(HOLDOUT_NAME))
        return RunKey(self.secrets.read(HOLDOUT_NAME))


def keep(folder: Folder, name: str, data: bytes) -> str:
    """Write a private file unless it exists, and return the sha256 of its content: the first driver of a run decides.

    A driver that lost the run while it slept may come here late, and what it computed may differ in
    a last bit.
    """
    return hashlib.sha256(folder.claim(name, data)).hexdigest()


def read_kept(folder: Folder, name: str, sha256: str, what: str) -> bytes:
    """Return a file's bytes, compared with their sha256."""
    data = folder.read(name, replaced=True)
    if hashlib.sha256(data).hexdigest() != sha256:
        raise InputError(what, name, "abort the run and begin again")
    return data


@remember(maxsize=4)
def load(secrets: Folder, sha256: str, release_type: type[Loaded]) -> Loaded:
    """Return a fitted release, read once by each process and checked against its digest."""
    what = "the run's fitted release is not the one that was written"
    return release_type.from_bytes(read_kept(secrets, RELEASE_NAME, sha256, what), RELEASE_NAME)


def make_table_work(
    mechanism: Mechanism, types: pa.Schema, secrets: Folder, schema: Schema | None = None
) -> TableWork:
    """Return the work on a table of some Arrow types, checked against the schema and the mechanism.

    Parameters
    ----------
    schema
        The columns that the table has, if they are not all that are declared: a frame may have one
        as its index.
    """
    schema = mechanism.declared if schema is None else schema
    released = schema.select_released(types)
    unit = mechanism.budget.unit_column if mechanism.budget else None
    bounding = None if unit is None else _make_unit_work(unit, schema, types)
    work = TableWork(
        types=types,
        released=released,
        view=View.of(schema, released, joins=mechanism.releases_rows),
        fraction=mechanism.fraction,
        secrets=secrets,
        unit=bounding if mechanism.bounds_rows else None,
        also_read=mechanism.also_read,
        encoded=tuple(name for name in schema.discovered if types.field(name).type == pa.string()),
        n_rows_private=mechanism.n_rows_private,
    )
    mechanism.check(work.columns)
    return work.with_keys()


def make_public_work(work: TableWork, types: pa.Schema) -> TableWork:
    """Return the work on a public table; it needs the privatised columns and those that the mechanism reads, and may have others."""
    for name in [*work.view.own, *work.also_read]:
        if types.names.count(name) != 1 or types.field(name).type != work.released.field(name).type:
            what = "the public reference needs this column, once, with the input's type"
            raise DataError(what, f"column {name!r}", "name another table")
    return replace(work, types=types, fraction=None, unit=None)


def _make_unit_work(unit: UnitColumn, schema: Schema, types: pa.Schema) -> UnitWork:
    where = f"`unit.column` {unit.column!r}"
    if unit.column not in schema.columns:  # a frame may have it as its index
        what = "the unit's column must be declared, and kept or dropped"
        raise SpecError(what, where, "correct it, or the schema")
    plain = [name for name in schema.kept if not pa.types.is_nested(types.field(name).type)]
    if pa.types.is_nested(types.field(unit.column).type):
        what = "the unit's column holds lists or the like"
        raise SpecError(what, where, "name a column of plain values")
    public = tuple(name for name in plain if name != unit.column)
    return UnitWork(column=unit.column, max_rows=unit.max_rows, public=public, weight=unit.weight)
