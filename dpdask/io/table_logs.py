"""The logs of tables, which engines read: what a log holds, and one more entry in it.

The entry makes files appear in the table all at once.
"""

from __future__ import annotations

import json
import re
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from dpdask.arrays import freeze_class
from dpdask.errors import MissingError, OutputError, SpecError, TemporaryError
from dpdask.io.folders import check_partition_types
from dpdask.io.fragment import UTC, find_layout
from dpdask.io.lakes import catalog_faults, load_catalog, require
from dpdask.io.shards import Mode, Shard, count_committed
from dpdask.io.storage import Folder, absolute_url, storage_faults

if TYPE_CHECKING:
    from deltalake import DeltaTable
    from pyiceberg.catalog import Catalog
    from pyiceberg.table import Table
    from pyiceberg.table import Transaction as TableTransaction

LOG, METADATA = "_delta_log", "metadata"  # where Delta and Iceberg tables keep them
_TRIES = 20
_RETRY = "run again to resume"
_SHORT = (pa.bool_(), pa.int64(), pa.float32(), pa.float64(), pa.date32(), pa.timestamp("us"))


@freeze_class(kw_only=False)
class Commit:
    """What one commit does to a table, and says of the release."""

    release: str
    run: int  # the log keeps both, so that no release is committed twice
    shards: Sequence[Shard]
    types: pa.Schema
    about: Mapping[str, str]
    mode: Mode  # whether the table must not exist, its content stays, or is replaced


class TableLog(ABC):
    """The log of a table in one format."""

    folder_name: str  # where the format keeps its own files in the table's folder
    _format: str

    def __init__(
        self, folder: Folder, name: str, key: str, partition_by: tuple[str, ...] = ()
    ) -> None:
        self._folder, self._name, self._elsewhere = folder, name, f"choose another {key}"
        self.partition_by = partition_by

    @abstractmethod
    def exists(self) -> bool:
        """Return whether there is a table."""

    @abstractmethod
    def check(self, types: pa.Schema, mode: Mode) -> None:
        """Check that these columns can be committed."""

    @abstractmethod
    def _open(self) -> AbstractContextManager[Any]:
        """Open the table; None if there is none."""

    @abstractmethod
    def _find_run(self, table: Any, release: str) -> int | None: ...

    @abstractmethod
    def _check_table(self, table: Any, types: pa.Schema, mode: Mode) -> None:
        """Check that a table that is there takes these columns."""

    @abstractmethod
    def _add(self, table: Any, entry: Commit) -> bool:
        """Make the entry the next one; return false if another writer was faster."""

    def find(self, release: str) -> int | None:
        """Return the number of the run that has committed a release, or None."""
        with self._open() as table:
            return None if table is None else self._find_run(table, release)

    def count(self, name: Callable[[int], str]) -> int:
        """Return how many releases of a series are committed."""
        with self._open() as table:
            if table is None:
                return 0
            return count_committed(lambda number: self._find_run(table, name(number)) is not None)

    def commit(self, entry: Commit) -> None:
        """Make shards the content of the table, or add them; nothing happens if the release is there."""
        for _ in range(_TRIES):
            with self._open() as table:
                if table is not None:
                    if self._find_run(table, entry.release) is not None:
                        return
                    if entry.mode == "error":
                        raise self._refuse("another writer has made this table")
                    self._check_table(table, entry.types, entry.mode)
                if self._add(table, entry):
                    return
        raise TemporaryError(
            "other writers changed this table at the same time", self._name, _RETRY
        )

    def undo(self, release: str, run: int) -> bool:
        """Remove a table that a run has made, and return true; leave one that holds anything else."""
        with self._open() as table:
            if table is not None:
                if self._find_run(table, release) != run or self._count_commits(table) > 1:
                    return False
                self._drop()
        self._folder.child(self.folder_name).remove()
        return True

    @abstractmethod
    def _count_commits(self, table: Any) -> int: ...

    @abstractmethod
    def _drop(self) -> None:
        """Forget the table where anything but its folder knows it."""

    def _refuse(self, what: str) -> OutputError:
        return OutputError(what, self._name, self._elsewhere)

    def _check_partitions(self, found: Sequence[str]) -> None:
        """Check that a table that is there has the declared partition columns, in their order."""
        if tuple(found) != self.partition_by:
            there = f"the partition columns {', '.join(found)}" if found else "no partition columns"
            hint = f"set output.partition_by: [{', '.join(found)}]" if found else "remove the key"
            raise OutputError(f"this table has {there}", self._name, hint)

    def _check_types(
        self, types: pa.Schema, convert: Callable[[pa.DataType], pa.DataType | None]
    ) -> None:
        for column in types:
            if convert(column.type) is None:
                what = f"{self._format} has no type for {column.type}"
                hint = "cast it in the input (for instance to int64, float64 or timestamp[us]), or drop it"
                raise SpecError(what, f"column {column.name!r}", hint)

    def _check_columns(
        self, found: Sequence[tuple[str, Any]], wanted: Sequence[tuple[str, Any]], *, nullable: bool
    ) -> None:
        if found != wanted or not nullable:
            what = "this table has other columns than the release: their names, types and order must agree, and nulls be allowed"
            raise self._refuse(what)


def _convert(
    type_: pa.DataType, convert: Callable[[pa.DataType], pa.DataType | None]
) -> pa.DataType | None:
    """Return a type as a table has it, by the types of the values inside; None if one has none."""
    if pa.types.is_list(type_) or pa.types.is_large_list(type_):
        inner = _convert(type_.value_type, convert)
        return None if inner is None else pa.list_(pa.field("element", inner))
    if pa.types.is_struct(type_):
        fields = [(field.name, _convert(field.type, convert)) for field in type_]
        return None if any(inner is None for _, inner in fields) else pa.struct(fields)
    if pa.types.is_map(type_):
        key, item = (_convert(each, convert) for each in (type_.key_type, type_.item_type))
        return None if key is None or item is None else pa.map_(key, item)
    return convert(type_)


# ---- Delta

_CHECKPOINT = re.compile(
    r"(\d{20})\.checkpoint(?:\.(\d{10})\.(\d{10})|\.[0-9a-f-]{36})?\.(?:parquet|json)"
)
_ENTRY = re.compile(r"(\d{20})\.json")
_LAST = "_last_checkpoint"
_SIDECARS = "_sidecars"
_CHECKPOINT_INTERVAL = 100
_REFUSED = set(" ,;{}()\n\t=")
_RULES = ("delta.invariants", "delta.generationExpression", "delta.identity")


class DeltaLog(TableLog):
    """The log of the Delta table in a folder.

    The package deltalake works on a copy of the log: it reads the newest part, and writes the next
    entry there. That entry is then created in the table by one conditional request. So reading and
    committing need no other requests, options and credentials than all else in a store, nor a lock
    table, an entry is never put over another one, and none names the place of the table.
    """

    folder_name = LOG
    _format = "a Delta table"

    def __init__(self, folder: Folder, partition_by: tuple[str, ...] = ()) -> None:
        super().__init__(folder, folder.url, "output.path", partition_by)
        self._log = folder.child(LOG)
        # the files of the log that were read last: they never change
        self._newest: dict[str, bytes] = {}
        self._root = Path()  # of the copy

    def exists(self) -> bool:
        """Return whether there is a table."""
        return any(_ENTRY.fullmatch(name) for name in self._list())

    def check(self, types: pa.Schema, mode: Mode) -> None:
        """Check that these columns can be committed."""
        _require_delta()
        _check_names(types)
        self._check_types(types, _to_delta)
        check_partition_types(self.partition_by, types)
        with self._open() as table:
            if table is not None:
                self._check_table(table, types, mode)
            # in the copy alone
            self._write(table, Commit("rehearsal", 0, (), types, {}, mode))

    def _find_run(self, table: DeltaTable, release: str) -> int | None:
        return table.transaction_version(release)

    def _count_commits(self, table: DeltaTable) -> int:
        return table.version() + 1

    def _drop(self) -> None:
        """Do nothing: the folder is the table."""

    def _check_table(self, table: DeltaTable, types: pa.Schema, mode: Mode) -> None:
        metadata, fields = table.metadata(), table.schema().fields
        settings = metadata.configuration
        self._check_partitions(metadata.partition_columns)
        if settings.get("delta.columnMapping.mode", "none") != "none":
            what = "this table uses column mapping (other column names in its files), which is not supported"
            raise self._refuse(what)
        ruled = [key for key in settings if key.startswith("delta.constraints.")]
        ruled += [key for field in fields for key in field.metadata if key.startswith(_RULES)]
        if ruled:
            what = f"this table has a rule for its rows ({ruled[0]}), which is not checked here"
            raise self._refuse(what)
        if mode == "overwrite" and settings.get("delta.appendOnly") == "true":
            raise OutputError("this table takes new rows only", self._name, "use `mode: append`")
        found = [(each.name, each.type) for each in pa.schema(table.schema().to_arrow())]
        wanted = [(each.name, _to_delta(each.type)) for each in types]
        self._check_columns(found, wanted, nullable=all(field.nullable for field in fields))

    def _list(self) -> list[str]:
        """Return the names of the log's files, with entries that an earlier listing lacks."""
        names = self._log.names()
        whole = [name for name in names if _ENTRY.fullmatch(name) or _CHECKPOINT.fullmatch(name)]
        number = max((int(name[:20]) for name in whole), default=-1) + 1
        with suppress(MissingError):
            while True:
                name = f"{number:020}.json"
                self._newest[name] = self._log.read(name)
                names.append(name)
                number += 1
        return names

    @contextmanager
    def _open(self) -> Iterator[DeltaTable | None]:
        """Open a local copy of the newest part of the log."""
        with tempfile.TemporaryDirectory(prefix="dpdask-") as name:
            self._root, copied = Path(name), Path(name) / LOG
            copied.mkdir()
            for _ in range(_TRIES):
                names = self._list()
                try:
                    self._newest = {
                        file: self._newest.get(file) or self._log.read(file)
                        for file in _list_newest(names)
                    }
                    sidecars = self._log.child(_SIDECARS)
                    beside = sidecars.names() if _SIDECARS in names else ()
                    more = {f"{_SIDECARS}/{file}": sidecars.read(file) for file in beside}
                    break
                except MissingError:
                    continue  # an old file was removed, because there is a newer checkpoint
            else:
                what = "the log of this Delta table changes too fast to be read"
                raise TemporaryError(what, self._name, _RETRY)
            for file, content in {**self._newest, **more}.items():
                (copied / file).parent.mkdir(exist_ok=True)
                (copied / file).write_bytes(content)
            _require_delta()
            from deltalake import DeltaTable
            from deltalake.exceptions import DeltaError

            try:
                table = DeltaTable(name) if self._newest else None
            except (DeltaError, ValueError, OSError):
                hint = f"repair the table, or {self._elsewhere}"
                what = "the log of this Delta table cannot be read"
                raise OutputError(what, self._name, hint) from None
            yield table

    def _write(self, table: DeltaTable | None, entry: Commit) -> Path:
        """Write the next entry of the copied log and return its file."""
        import deltalake
        from deltalake.exceptions import DeltaError
        from deltalake.transaction import AddAction, create_table_with_add_actions

        now = int(time.time() * 1000)
        adds = [
            AddAction(
                each.name,
                each.n_bytes,
                {name: _write_value(value) for name, value in (each.partition or {}).items()},
                now,
                True,
                json.dumps({"numRecords": each.n_rows}),
            )
            for each in entry.shards
        ]
        columns = [(each.name, _to_delta(each.type)) for each in entry.types]
        schema = deltalake.Schema.from_arrow(pa.schema(columns))
        properties: Any = {
            "commit_properties": deltalake.CommitProperties(
                custom_metadata=dict(entry.about),
                max_commit_retries=0,
                app_transactions=[deltalake.Transaction(entry.release, entry.run)],
            ),
            "post_commithook_properties": deltalake.PostCommitHookProperties(
                create_checkpoint=False, cleanup_expired_logs=False
            ),
        }
        copied = self._root / LOG
        before, by = set(copied.iterdir()), [*self.partition_by]
        try:
            if table is None:
                create_table_with_add_actions(
                    str(self._root), schema, adds, mode="error", partition_by=by, **properties
                )
            else:
                table.create_write_transaction(
                    [*adds], entry.mode, schema, partition_by=by, **properties
                )
        except DeltaError:
            what = "this table needs features of a writer that are not supported"
            raise OutputError(what, "output.path", self._elsewhere) from None
        [made] = [path for path in set(copied.iterdir()) - before if _ENTRY.fullmatch(path.name)]
        return made

    def _add(self, table: DeltaTable | None, entry: Commit) -> bool:
        """Create the entry in the table, and a checkpoint after many."""
        made = self._write(table, entry)
        line, rest = made.read_text().split("\n", 1)
        info = json.loads(line)
        info["commitInfo"]["operationParameters"].pop("location", None)  # that of the copy
        if not self._log.put_new(made.name, f"{json.dumps(info)}\n{rest}".encode()):
            return False
        version = int(made.stem)
        if version and version % _CHECKPOINT_INTERVAL == 0:
            with suppress(Exception):  # it only makes reading faster
                from deltalake import DeltaTable

                DeltaTable(str(self._root)).create_checkpoint()
                [checkpoint] = made.parent.glob(f"{version:020}.checkpoint*")
                self._log.put_new(checkpoint.name, checkpoint.read_bytes())
                self._log.write(_LAST, (made.parent / _LAST).read_bytes())
        return True


def _write_value(value: Any) -> str | None:
    """Return the value of a partition column as a Delta log has it."""
    if value is None or isinstance(value, str):
        return value
    return str(value).lower()  # of a truth value, and of a number


def _require_delta() -> None:
    require("deltalake", "a Delta table is written by", "output.format", "delta")


def _list_newest(names: Sequence[str]) -> list[str]:
    """Return the names of the newest whole checkpoint, if any, and of the entries from there on."""
    parts: dict[int, list[str]] = {}
    for name in names:
        found = _CHECKPOINT.fullmatch(name)
        if found is None:
            continue
        n_parts = sum(other.startswith(f"{found[1]}.checkpoint.") for other in names)
        if found[3] is None or n_parts >= int(found[3]):
            parts.setdefault(int(found[1]), []).append(name)
    newest = max(parts, default=0)
    entries = [name for name in names if _ENTRY.fullmatch(name) and int(name[:20]) >= newest]
    return [*parts.get(newest, ()), *entries]


def _check_names(fields: Sequence[pa.Field], inside: str = "") -> None:
    """Check the names of columns and of fields inside them: case counts not, and Spark refuses signs."""
    names: dict[str, str] = {}
    for field in fields:
        where = f"column {inside + field.name!r}"
        other = names.setdefault(field.name.lower(), field.name)
        if other != field.name:
            what = f"in a Delta table its name is that of {inside + other!r}: upper and lower case count as one"
            raise SpecError(what, where, "rename one of them in the input, or drop it")
        if not _REFUSED.isdisjoint(field.name):
            what = "Spark refuses this name in a Delta table: it has a space, a tab, a line break or one of ,;{}()="
            raise SpecError(what, where, "rename it in the input, or drop it")
        inner = [field.type.field(place) for place in range(field.type.num_fields)]
        _check_names(inner, f"{inside}{field.name}.")


def _to_delta(type_: pa.DataType) -> pa.DataType | None:
    """Return the type of a column whose readers read a file with this type, or None.

    Texts and lists have short offsets, times with a zone are those of UTC.
    """

    def convert(type_: pa.DataType) -> pa.DataType | None:
        if pa.types.is_timestamp(type_) and type_.unit == "us":
            return type_ if type_.tz is None else pa.timestamp("us", "UTC")
        if type_ in (*_SHORT, pa.int8(), pa.int16(), pa.int32()) or pa.types.is_decimal128(type_):
            return type_
        return find_layout(type_, views=False)

    return _convert(type_, convert)


# ---- Iceberg

_RETRIES = "commit.retry.num-retries"
_RELEASE = "dpdask.release."
_NEWEST_FORMAT = 2


class IcebergLog(TableLog):
    """The snapshots of an Iceberg table in a catalog.

    Parameters
    ----------
    catalog
        The name of the catalog and its properties; pyiceberg takes from the environment what is not
        given here.
    """

    folder_name = METADATA
    _format = "an Iceberg table"

    def __init__(
        self,
        folder: Folder,
        name: str,
        catalog: Mapping[str, str],
        partition_by: tuple[str, ...] = (),
    ) -> None:
        super().__init__(folder, name, "output.table", partition_by)
        self._properties = catalog

    def exists(self) -> bool:
        """Return whether there is a table."""
        with self._open() as table:
            return table is not None

    def check(self, types: pa.Schema, mode: Mode) -> None:
        """Check that these columns can be committed."""
        self._check_types(types, _to_iceberg)
        check_partition_types(self.partition_by, types)
        with self._open() as table:
            if table is not None:
                self._check_table(table, types, mode)
                return
        with self._faults():
            if not self._load_catalog().namespace_exists(self._name.rpartition(".")[0]):
                hint, where = "create it, or correct output.table", f"output.table {self._name!r}"
                raise OutputError("the catalog has no such namespace", where, hint)

    def _find_run(self, table: Table, release: str) -> int | None:
        run = table.properties.get(f"{_RELEASE}{release}")  # they name all that were committed
        return None if run is None else int(run, 16)

    def _count_commits(self, table: Table) -> int:
        return len(table.snapshots())

    def _drop(self) -> None:
        """Remove the table from its catalog; see `TableLog._drop`."""
        with self._faults():
            self._load_catalog().drop_table(self._name)

    def _check_table(self, table: Table, types: pa.Schema, mode: Mode) -> None:
        if absolute_url(table.location()) != self._folder.url:
            hint = f"set output.path to {table.location()}"
            raise OutputError(
                "the table lies in another folder", f"output.table {self._name!r}", hint
            )
        if mode == "error":
            return
        names = {field.field_id: field.name for field in table.schema().fields}
        spec = table.spec().fields
        if any(str(field.transform) != "identity" for field in spec):
            what = "this table is partitioned by a function of a column, which is not supported"
            raise self._refuse(what)
        self._check_partitions([names[field.source_id] for field in spec])
        version = table.metadata.format_version
        if version > _NEWEST_FORMAT:
            raise self._refuse(
                f"this table has format version {version}, which dpdask cannot write"
            )
        there = table.schema()
        found = [(field.name, _to_iceberg(field.type)) for field in there.as_arrow()]
        wanted = [(field.name, _to_iceberg(field.type)) for field in types]
        self._check_columns(found, wanted, nullable=not any(each.required for each in there.fields))

    def _add(self, table: Table | None, entry: Commit) -> bool:
        """Commit once: when pyiceberg tries again, it does not look whether its first attempt was made."""
        from pyiceberg.exceptions import CommitFailedException, TableAlreadyExistsError
        from pyiceberg.expressions import AlwaysTrue

        once = {_RETRIES: "0"}
        says = {"dpdask.release": entry.release, **entry.about}
        work: TableTransaction
        try:
            with self._faults():
                if table is None:
                    columns = pa.schema(
                        [(each.name, _to_iceberg(each.type)) for each in entry.types]
                    )
                    work = self._load_catalog().create_table_transaction(
                        self._name, columns, location=self._folder.url, properties=once
                    )
                    work.remove_properties(_RETRIES)
                    if self.partition_by:
                        with work.update_spec() as spec:
                            for name in self.partition_by:
                                spec.add_identity(name)
                else:
                    properties = {**table.properties, **once}  # of this copy alone
                    table.metadata = table.metadata.model_copy(update={"properties": properties})
                    work = table.transaction()
                work.set_properties({f"{_RELEASE}{entry.release}": f"{entry.run:x}"})
                if (
                    entry.mode == "overwrite"
                    and table is not None
                    and table.current_snapshot() is not None
                ):
                    work.delete(AlwaysTrue(), snapshot_properties=says)
                files = [f"{self._folder.url}/{shard.name}" for shard in entry.shards]
                work.add_files(files, snapshot_properties=says)
                work.commit_transaction()
        except TemporaryError:
            if self.find(entry.release) is None:  # else the catalog's answer was lost
                raise
        except (CommitFailedException, TableAlreadyExistsError):
            return False
        return True

    @contextmanager
    def _open(self) -> Iterator[Table | None]:
        catalog = self._load_catalog()
        from pyiceberg.exceptions import NoSuchNamespaceError, NoSuchTableError

        table = None
        with self._faults(), suppress(NoSuchTableError, NoSuchNamespaceError):
            table = catalog.load_table(self._name)
        yield table

    def _load_catalog(self) -> Catalog:
        require("pyiceberg.catalog", "an Iceberg table needs", "output.format", "iceberg")
        with self._faults():
            return load_catalog(self._properties, "output.catalog", "it")

    @contextmanager
    def _faults(self) -> Iterator[None]:
        """Turn what a catalog raises into one line; a refused commit is passed on."""
        storage = storage_faults(self._folder.url, writing=True)
        with storage, catalog_faults(self._name, OutputError, _RETRY):
            yield


def _to_iceberg(type_: pa.DataType) -> pa.DataType | None:
    """Return the Arrow type of a column whose readers read a file with this type, or None."""

    def convert(type_: pa.DataType) -> pa.DataType | None:
        if pa.types.is_timestamp(type_) and type_.unit == "us" and type_.tz in UTC:
            return pa.timestamp("us", "UTC")
        if type_ in (pa.int8(), pa.int16(), pa.int32()):
            return pa.int32()
        if type_ in (*_SHORT, pa.time64("us")) or pa.types.is_decimal128(type_):
            return type_
        return find_layout(type_, views=False)

    return _convert(type_, convert)
