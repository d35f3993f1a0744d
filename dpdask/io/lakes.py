"""Delta and Iceberg tables: the files of one version, with what the metadata hold of them.

That are the values of partition columns, the columns' names or numbers in files, and deleted rows.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import field, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dpdask.arrays import Ints, freeze_class
from dpdask.errors import (
    DataError,
    DpdaskError,
    InputError,
    MissingError,
    SpecError,
    TemporaryError,
)
from dpdask.io.changes import Kind, TableCommit, tell_gap
from dpdask.io.files import DataFile, FoundColumn, Listing, TableField, natural
from dpdask.io.filesystems import KINDS, classify, resolve_options
from dpdask.io.fragment import find_layout, pack
from dpdask.io.fragments import map_files
from dpdask.io.parquet import open_parquet
from dpdask.io.storage import Folder, absolute_url, open_filesystem, storage_faults
from dpdask.schema import Schema

if TYPE_CHECKING:
    from deltalake import DeltaTable
    from pyiceberg.catalog import Catalog
    from pyiceberg.manifest import DataFile as IcebergFile
    from pyiceberg.table import DataScan, FileScanTask, Table
    from pyiceberg.table.snapshots import Snapshot


def require(package: str, use: str, where: str, extra: str) -> None:
    """Check that the package of a table's format is installed."""
    try:
        import_module(package)
    except ImportError:
        what = f"{use} the package {package.partition('.')[0]}, which is not installed"
        raise SpecError(what, where, f"install dpdask[{extra}]") from None


def _sorted_files(files: list[DataFile]) -> tuple[DataFile, ...]:
    return tuple(sorted(files, key=lambda file: natural(file.name)))


# ---- Delta

_S3 = {
    "key": "aws_access_key_id",
    "secret": "aws_secret_access_key",
    "token": "aws_session_token",
    "endpoint_url": "aws_endpoint_url",
    "region_name": "aws_region",
}
_AZURE = {
    "account_name": "azure_storage_account_name",
    "account_key": "azure_storage_account_key",
    "sas_token": "azure_storage_sas_token",
    "tenant_id": "azure_storage_tenant_id",
    "client_id": "azure_storage_client_id",
    "client_secret": "azure_storage_client_secret",
    "AccountName": "azure_storage_account_name",
    "AccountKey": "azure_storage_account_key",
    "BlobEndpoint": "azure_storage_endpoint",
}
# `typeWidening` is not here: no reader at hand was tested with it. A `variantType` column is refused
# by its type, unless it is dropped.
_FEATURES = {
    "columnMapping",
    "deletionVectors",
    "timestampNtz",
    "v2Checkpoint",
    "vacuumProtocolCheck",
    "variantType",
    "variantType-preview",
}
_READER = 3
_RESTORE = "repair the table, or name another version"
_WRITE_WITHOUT = "write the table without it, or a copy as plain Parquet"
_OUTSIDE = re.compile(r"[A-Za-z][\w+.-]*:/|/")
_DELTA_ID = b"delta.columnMapping.id"
_DELTA_NAME = b"delta.columnMapping.physicalName"


def find_options(url: str) -> dict[str, str]:
    """Return deltalake's options for a URL; what is not there, deltalake takes from the environment.

    Privacy
    -------
    The result holds secrets: never put it in a message, log, file or graph.
    """
    kind = KINDS.get(url.partition("://")[0])
    given, names, endpoint = resolve_options(url), _S3, ""
    if kind == "s3":
        given |= given.get("client_kwargs", {})
        endpoint = given.get("endpoint_url") or os.environ.get("AWS_ENDPOINT_URL", "")
    elif kind == "azure":
        text = given.get("connection_string", os.environ.get("AZURE_STORAGE_CONNECTION_STRING", ""))
        given = dict(part.split("=", 1) for part in text.split(";") if "=" in part) | given
        names, endpoint = _AZURE, given.get("BlobEndpoint", "")
    else:
        return {}
    held = {name: value for name, value in given.items() if value is not None}
    found = {names[name]: str(value) for name, value in held.items() if name in names}
    return found | {"allow_http": "true"} if endpoint.startswith("http://") else found


@freeze_class(kw_only=False)
class Delta:
    """The format of a Delta table."""

    version: int | None = None  # the version to read; None for the latest

    def list_files(self, url: str, schema: Schema) -> Listing:
        """Return the files of one version of the table at a URL; see `TableFormat.list_files`."""
        del schema  # the log has types
        with metadata_faults(url, _RESTORE):
            table = _open_delta(url, self.version)
            version = int(table.version())
            where = f"{url}, version {version}"
            _check_features(table, where)
            fs, root = open_filesystem(url)
            actions, deleted = _read_actions(table, where), _read_vectors(table, where)
            columns = list(table.metadata().partition_columns)
            files = []
            for action in actions:
                path = unquote(action["path"])
                outside = _OUTSIDE.match(path) is not None
                # `x` and `./x` would be one file, released twice
                if not {"", "."}.isdisjoint(path.split("/")) and not outside:
                    what = "its log writes the path of a file in an unusual way"
                    raise DataError(what, where, "repair the table")
                if outside or ".." in path.split("/"):
                    what = "this version has files outside the table's folder (a shallow clone)"
                    raise DataError(what, where, "name the table that they belong to")
                file = DataFile(
                    url=str(fs.unstrip_protocol(f"{root.rstrip('/')}/{path}")),
                    name=path,
                    format="parquet",
                    constants={column: action[f"partition.{column}"] for column in columns},
                    deleted=deleted.pop(path, b""),
                )
                files.append(file)
            if deleted:
                what = "its log deletes rows of a file that it does not list"
                raise InputError(what, where, "repair the table")
            return Listing(
                files=_sorted_files(files),
                format="delta",
                version=version,
                location=url,
                table=str(table.metadata().id),
                fields=_list_delta_fields(table),
            )

    def at(self, version: int | None) -> Self:
        """Return the format of another version."""
        return replace(self, version=version)

    def read_commits(self, url: str, since: int | None, until: int | None) -> list[TableCommit]:
        """Return what each commit after one version did to the rows, up to another version."""
        log, newest = Folder(url).child("_delta_log"), until or 0
        if since is not None and newest < since:  # rolled back, or restored from a backup
            raise tell_gap(newest + 1, since, newest, url)

        def read(version: int) -> list[TableCommit] | None:
            with metadata_faults(url, _RESTORE):
                try:
                    text = log.read(f"{version:020}.json")
                except MissingError:
                    return None
                return classify_entry(version, list(map(json.loads, text.splitlines())))

        versions = range(0 if since is None else since + 1, newest + 1)
        found = map_files(read, versions)
        gone = [
            version for version, commits in zip(versions, found, strict=True) if commits is None
        ]
        if gone:
            raise tell_gap(gone[0], gone[-1], newest, url)
        return [commit for commits in found for commit in commits or ()]

    def precedes(self, url: str, one: int | None, other: int | None) -> bool:
        """Return whether one version came before another one."""
        del url
        return one is None or (other is not None and one < other)

    def read_columns(self, url: str) -> tuple[FoundColumn, ...]:
        """Return the columns that the log names; see `TableFormat.read_columns`."""
        with metadata_faults(url, _RESTORE):
            return tuple(
                FoundColumn(name=column.name, type=column.type, nullable=column.nullable)
                for column in pa.schema(_open_delta(url, self.version).schema().to_arrow())
            )


# what fills files with rows of those that they remove, and with new ones
_CLOSED = {"DELETE", "UPDATE", "MERGE", "WRITE"}


def classify_entry(version: int, actions: Sequence[Mapping[str, Any]]) -> list[TableCommit]:
    """Return what one entry of a log did; nothing if it names no file."""
    found: dict[str, Any] = {}
    adds, removes = ({}, {})  # type: dict[str, Any], dict[str, Any]
    for action in actions:
        found |= action.get("commitInfo", {})
        for key, files in (("add", adds), ("remove", removes)):
            if key in action:
                files[unquote(action[key]["path"])] = action[key]
    if not adds and not removes:
        return []
    both, operation = adds.keys() & removes.keys(), str(found.get("operation", "")).upper()
    added = {name for name, add in adds.items() if add.get("dataChange", True)} - both
    removed, kind = removes.keys() - both, _name_kind(added, removes, operation == "DELETE")
    if not any(each.get("dataChange", True) for each in (*adds.values(), *removes.values())):
        kind = "rewrite"
    elif operation == "RESTORE" or any(
        _count_masked(adds[name]) <= _count_masked(removes[name]) for name in both
    ):
        kind, operation = "change", ""  # rows come back, or may have been replaced
    return [
        TableCommit(
            version=version,
            before=version - 1 if version else None,
            kind=kind,
            added=frozenset(added),
            removed=frozenset(removed),
            masked=frozenset(both),
            is_closed=operation in _CLOSED,
        )
    ]


def _name_kind(added: Collection[str], removed: Collection[str], only_deletes: bool) -> Kind:
    if not removed:
        return "append"
    return "delete" if only_deletes or not added else "change"


def _count_masked(action: Mapping[str, Any]) -> int:
    """Return how many rows of a file a deletion vector deletes."""
    return int((action.get("deletionVector") or {}).get("cardinality", 0))


def _open_delta(url: str, version: int | None) -> DeltaTable:
    """Open a table at a version."""
    require("deltalake", "a Delta table is read by", url, "delta")
    from deltalake import DeltaTable
    from deltalake.exceptions import DeltaError, TableNotFoundError

    scheme = url.partition("://")[0] if "://" in url else "file"
    if scheme not in {*KINDS, "file"}:
        hint = "name a local folder, or s3://, az:// or gs://; or read a copy as plain Parquet"
        raise SpecError(f"Delta tables are not read from {scheme}://", url, hint)
    place, options = url.removeprefix("file://"), find_options(url)
    with storage_faults(url):
        try:
            return DeltaTable(place, version=version, storage_options=options or None)
        except TableNotFoundError:
            which = "" if version is None else f" with version {version}"
            what = f"there is no Delta table{which} here"
            raise InputError(what, url, "check this path") from None
        except (DeltaError, ValueError) as error:
            # deltalake tells what is wrong in the message alone
            said = str(error).lower()
            if "unsupported" in said:
                what = "this table needs a reader feature that is not supported"
                raise DataError(what, url, _WRITE_WITHOUT) from None
            if "duplicate field name" in said:
                what = "two columns have names that differ in upper and lower case only, which readers of Delta tables refuse"
                hint = "rename one of them, or name a copy as plain Parquet"
                raise DataError(what, url, hint) from None
            which = "its log" if version is None else f"version {version}"
            hint = "name a version that the table still has"
            raise InputError(f"{which} cannot be read", url, hint) from None
        except OSError as error:
            status = re.search(r"(401 Unauthorized|403 Forbidden|404 Not Found)", str(error))
            if status is None:
                raise
            raise (FileNotFoundError if status[1][0:3] == "404" else PermissionError) from None


def _check_features(table: DeltaTable, where: str) -> None:
    protocol = table.protocol()
    unknown = sorted(set(protocol.reader_features or ()) - _FEATURES)
    if protocol.min_reader_version > _READER:
        what = f"this table needs version {protocol.min_reader_version} of the reader protocol"
        raise DataError(what, where, _WRITE_WITHOUT)
    if unknown:
        what = f"this table needs the reader feature {unknown[0]!r}, which is not supported"
        raise DataError(what, where, _WRITE_WITHOUT)


def _read_actions(table: DeltaTable, where: str) -> list[dict[str, Any]]:
    """Return each file's path, and its partition values in the columns' types."""
    from deltalake.exceptions import DeltaError

    with storage_faults(where):
        try:
            actions = pa.table(table.get_add_actions(flatten=True))
        except (DeltaError, pa.ArrowException, ValueError):
            raise InputError("its log cannot be read", where, _RESTORE) from None
    wanted = [each for each in actions.column_names if each.startswith(("path", "partition."))]
    return list(actions.select(wanted).to_pylist())


def _read_vectors(table: DeltaTable, where: str) -> dict[str, bytes]:
    """Return the deleted rows of each file that has some, by the file's path in the table."""
    from deltalake.exceptions import DeltaError

    found: dict[str, bytes] = {}
    with storage_faults(where):
        try:
            for batch in pa.RecordBatchReader.from_stream(table.deletion_vectors()):
                paths = batch.column("filepath").to_pylist()
                for uri, keep in zip(paths, batch.column("selection_vector"), strict=True):
                    kept = np.asarray(keep.values.to_numpy(zero_copy_only=False), dtype=bool)
                    found[unquote(uri.removeprefix(table.table_uri))] = pack(~kept)
        except (DeltaError, pa.ArrowException, ValueError):
            what = "a deletion vector cannot be read: it is missing or corrupt"
            raise InputError(what, where, "restore it, or name another version") from None
    return found


def _list_delta_fields(table: DeltaTable) -> tuple[TableField, ...]:
    """Return the table's columns, with the names or numbers that they have in files.

    Partition columns are in the log alone.
    """
    metadata = table.metadata()
    mode = metadata.configuration.get("delta.columnMapping.mode", "none")
    fields = []
    for column in pa.schema(table.schema().to_arrow()):
        names: tuple[str, ...] = ()
        number = None
        if column.name not in metadata.partition_columns:
            names = (column.name if mode == "none" else column.metadata[_DELTA_NAME].decode(),)
            number = int(column.metadata[_DELTA_ID]) if mode == "id" else None
        fields.append(TableField(name=column.name, type=column.type, names=names, field_id=number))
    return tuple(fields)


# ---- Iceberg

_METADATA = ".metadata.json"
_ACCESS = {"py-io-impl": "dpdask.io.iceberg_files.StoreFiles"}
_POSITIONS = ["file_path", "pos"]
_RESTORE_SNAPSHOT = "restore it, or name another snapshot"
_COPY = "compact the table (rewrite its data files), or write a copy as plain Parquet"


def load_catalog(properties: Mapping[str, str], where: str, it: str) -> Catalog:
    """Return a catalog; pyiceberg takes from the environment what the properties do not say."""
    from pyiceberg.catalog import load_catalog
    from pyiceberg.exceptions import NotInstalledError

    try:
        return load_catalog(**{**_ACCESS, **properties})
    except (ValueError, NotInstalledError):
        what = "the catalog cannot be opened as it is given"
        hint = f"check {it}, and the variables PYICEBERG_CATALOG__… of the environment"
        raise SpecError(what, where, hint) from None


@contextmanager
def catalog_faults(name: str, denied: type[DpdaskError], retry: str) -> Iterator[None]:
    """Turn what a catalog raises into one line; pass on what a table or a storage raises."""
    from pyiceberg import exceptions

    refusals = (
        exceptions.UnauthorizedError,
        exceptions.ForbiddenError,
        exceptions.OAuthError,
    )
    answers = (
        exceptions.CommitFailedException,
        exceptions.TableAlreadyExistsError,
        exceptions.NoSuchTableError,
        exceptions.NoSuchNamespaceError,
    )
    try:
        yield
    except (DpdaskError, *answers):
        raise
    except refusals:
        hint = "give its credentials as variables of the environment"
        raise denied("the catalog denies access", name, hint) from None
    except Exception as error:  # each kind of catalog has its own
        if classify(error) is not None:
            raise
        what = f"the catalog failed ({type(error).__name__})"
        raise TemporaryError(what, name, f"check its address, and {retry}") from None


@freeze_class(kw_only=False)
class Iceberg:
    """The format of an Iceberg table."""

    snapshot: int | None = None  # the snapshot to read; None for the current one
    # The name of the catalog that knows the table, and its properties; None if the URL is that of a
    # metadata file.
    catalog: Mapping[str, str] | None = field(default=None, repr=False)

    def list_files(self, url: str, schema: Schema) -> Listing:
        """Return the files of one snapshot of a table; see `TableFormat.list_files`.

        Parameters
        ----------
        url
            The table's name in its catalog, or the URL of one of its metadata files.
        """
        del schema  # the table has types
        with metadata_faults(url, _RESTORE_SNAPSHOT):
            table, scan, current = self._open(url)
            location = absolute_url(table.location())
            tasks = [] if current is None else _plan(scan, url)
            deleted = _read_deletes(tasks, url)
            files = [
                _make_file(table, scan, task.file, deleted, f"{location.rstrip('/')}/", url)
                for task in tasks
            ]
            return Listing(
                files=_sorted_files(files),
                format="iceberg",
                version=current,
                location=location,
                table=str(table.metadata.table_uuid),
                fields=_list_iceberg_fields(table, scan),
            )

    def at(self, version: int | None) -> Self:
        """Return the format of another snapshot."""
        return replace(self, snapshot=version)

    def read_commits(self, url: str, since: int | None, until: int | None) -> list[TableCommit]:
        """Return what each commit after one snapshot did to the rows, up to another snapshot."""
        with metadata_faults(url, _RESTORE_SNAPSHOT):
            table, _, _ = self._open(url)
            chain: list[Snapshot] = []
            number = until
            while number != since:
                found = None if number is None else table.snapshot_by_id(number)
                if found is None:  # expired; or what was released is no ancestor any more
                    last = chain[-1].snapshot_id if chain else until
                    raise tell_gap(since, last, until, url)
                chain.append(found)
                number = found.parent_snapshot_id
            folder = f"{absolute_url(table.location()).rstrip('/')}/"
            commits: list[TableCommit] = []
            before: Snapshot | None = None
            for snapshot in reversed(chain):
                commit = _classify_iceberg(table, snapshot, folder)
                # an overwrite may be a snapshot that deletes and one that appends, in one commit
                if (
                    before is not None
                    and commits[-1].kind in ("delete", "change")
                    and not _was_published(table, before, snapshot)
                ):
                    commit = _join(commits.pop(), commit)
                commits += [commit]
                before = snapshot
            return commits

    def precedes(self, url: str, one: int | None, other: int | None) -> bool:
        """Return whether one snapshot came before another one, or may have: the other may have expired."""
        with metadata_faults(url, _RESTORE_SNAPSHOT):
            table, _, current = self.at(None)._open(url)
            pair = [None if each is None else table.snapshot_by_id(each) for each in (one, other)]
            if pair[0] is None or pair[1] is None:
                return one is None or one != current
            first, last = ((each.sequence_number or 0, each.timestamp_ms) for each in pair if each)
            return first < last

    def read_columns(self, url: str) -> tuple[FoundColumn, ...]:
        """Return the columns of the snapshot's schema; see `TableFormat.read_columns`."""
        with metadata_faults(url, _RESTORE_SNAPSHOT):
            table, scan, _ = self._open(url)
            return tuple(
                FoundColumn(name=column.name, type=column.type, nullable=column.optional)
                for column in _list_iceberg_fields(table, scan)
            )

    def _open(self, url: str) -> tuple[Table, DataScan, int | None]:
        """Return the table, a scan of the snapshot, and the snapshot's number."""
        require("pyiceberg.catalog", "an Iceberg table is read by", url, "iceberg")
        from pyiceberg.exceptions import NoSuchNamespaceError, NoSuchTableError
        from pyiceberg.table import StaticTable

        table: Table
        if self.catalog is None:
            if not url.endswith(_METADATA):
                what = "this is not a metadata file of an Iceberg table"
                raise SpecError(what, url, f"name one (…{_METADATA}), or set `input.catalog`")
            table = StaticTable.from_metadata(url, _ACCESS)
        else:
            with catalog_faults(url, InputError, "run again"):
                try:
                    table = load_catalog(self.catalog, url, "input.catalog").load_table(url)
                except (NoSuchTableError, NoSuchNamespaceError):
                    what = "the catalog has no such table"
                    raise InputError(what, url, "check input.path") from None
                except ValueError:  # such as a name that the catalog cannot split
                    what = "the catalog takes no such name"
                    raise SpecError(what, url, "check input.path") from None
        current = table.metadata.current_snapshot_id if self.snapshot is None else self.snapshot
        if current is not None and table.snapshot_by_id(current) is None:
            hint = "name a snapshot that the table still has"
            raise InputError(f"the table has no snapshot {current}", url, hint)
        return table, table.scan(snapshot_id=current), current


def _classify_iceberg(table: Table, snapshot: Snapshot, folder: str) -> TableCommit:
    """Return what one snapshot did to the rows of a table in a folder."""
    from pyiceberg.manifest import ManifestContent, ManifestEntryStatus
    from pyiceberg.table.snapshots import Operation

    number, masks = snapshot.snapshot_id, False
    names: dict[ManifestEntryStatus, set[str]] = {status: set() for status in ManifestEntryStatus}
    for manifest in snapshot.manifests(table.io):
        if manifest.added_snapshot_id != number:
            continue
        for entry in manifest.fetch_manifest_entry(table.io, discard_deleted=False):
            if manifest.content == ManifestContent.DELETES:
                masks = masks or entry.status == ManifestEntryStatus.ADDED
            elif entry.snapshot_id == number:
                names[entry.status].add(_locate(entry.data_file.file_path, folder)[1])
    operation = snapshot.summary.operation if snapshot.summary else None
    added, removed = names[ManifestEntryStatus.ADDED], names[ManifestEntryStatus.DELETED]
    touched = {*removed, *(["a file with rows that were deleted"] if masks else [])}
    kind = _name_kind(added, touched, operation == Operation.DELETE)
    return TableCommit(
        version=number,
        before=snapshot.parent_snapshot_id,
        kind="rewrite" if operation == Operation.REPLACE else kind,
        added=frozenset(added),
        removed=frozenset(removed),
        is_closed=not masks,
    )


def _was_published(table: Table, snapshot: Snapshot, following: Snapshot) -> bool:
    """Return whether a table was ever at a snapshot, as its old metadata tell: without them, what follows may be of the same commit.

    Their times alone do not tell: another writer may have set a property while a commit was written.
    """
    from pyiceberg.serializers import FromInputFile

    for entry in table.metadata.metadata_log:
        if snapshot.timestamp_ms <= entry.timestamp_ms < following.timestamp_ms:
            file = table.io.new_input(entry.metadata_file)
            if file.exists():
                found = FromInputFile.table_metadata(file)
                if found.current_snapshot_id == snapshot.snapshot_id:
                    return True
    return False


def _join(first: TableCommit, second: TableCommit) -> TableCommit:
    """Return what two snapshots of one commit did; a file that the second removes is in no version."""
    return replace(
        second,
        kind="change",
        before=first.before,
        added=(first.added - second.removed) | second.added,
        removed=first.removed | (second.removed - first.added),
        is_closed=first.is_closed and second.is_closed,
    )


def _plan(scan: DataScan, where: str) -> list[FileScanTask]:
    try:
        return list(scan.plan_files())
    except (ValueError, NotImplementedError) as error:
        if "equality deletes" not in str(error):
            raise
        what = "this snapshot has equality deletes, which are not supported"
        raise DataError(what, where, _COPY) from None


def _check_format(name: str, files: str, where: str) -> None:
    if name != "PARQUET":
        what = f"this snapshot has {files} in the format {name}, not Parquet"
        raise DataError(what, where, _COPY)


def _make_file(
    table: Table,
    scan: DataScan,
    found: IcebergFile,
    deleted: Mapping[str, bytes],
    folder: str,
    where: str,
) -> DataFile:
    _check_format(found.file_format.name, "files", where)
    url, name = _locate(found.file_path, folder)
    # a file that was added need not hold the columns that partition it as they are
    columns = {column.field_id: column.name for column in scan.projection().fields}
    parts = enumerate(table.specs()[found.spec_id].fields)
    return DataFile(
        url=url,
        name=name,
        format="parquet",
        constants={
            columns[part.source_id]: found.partition[place]
            for place, part in parts
            if str(part.transform) == "identity" and part.source_id in columns
        },
        deleted=deleted.get(found.file_path, b""),
    )


def _locate(path: str, folder: str) -> tuple[str, str]:
    """Return a file's URL and its name in the table; all of it for a file that was added from elsewhere."""
    fs, place = open_filesystem(absolute_url(path))
    url = str(fs.unstrip_protocol(place))
    return url, url.removeprefix(folder)


def _list_iceberg_fields(table: Table, scan: DataScan) -> tuple[TableField, ...]:
    """Return the columns of the snapshot's schema; texts and bytes have their plain types."""
    mapping = table.name_mapping()
    names = {} if mapping is None else {each.field_id: tuple(each.names) for each in mapping.root}
    schema = scan.projection()
    return tuple(
        TableField(
            name=column.name,
            type=find_layout(type_.type, views=False) or type_.type,
            names=names.get(column.field_id, ()),
            field_id=column.field_id,
            default=column.initial_default,
            optional=not column.required,
        )
        for column, type_ in zip(schema.fields, schema.as_arrow(), strict=True)
    )


def _read_deletes(tasks: Sequence[FileScanTask], where: str) -> dict[str, bytes]:
    """Return the deleted rows of each data file that has some, by its path."""
    by_delete: dict[str, set[str]] = {}
    for task in tasks:
        for each in task.delete_files:
            _check_format(each.file_format.name, "delete files", where)
            by_delete.setdefault(each.file_path, set()).add(task.file.file_path)
    positions: dict[str, list[Ints]] = {}
    for path, concerned in by_delete.items():
        folder, _, name = absolute_url(path).rpartition("/")
        what = f"{where}, delete file {name}"
        with open_parquet(Folder(folder), name, _POSITIONS, what, _RESTORE_SNAPSHOT) as file:
            deletes = file.read(columns=_POSITIONS, use_threads=False)
            deletes.validate(full=True)
        for data_file in sorted(concerned):
            found = deletes.filter(pc.equal(deletes.column("file_path"), data_file))
            positions.setdefault(data_file, []).append(found.column("pos").to_numpy())
    n_rows = {task.file.file_path: task.file.record_count for task in tasks}
    packed = {}
    for path, parts in positions.items():
        joined = np.concatenate(parts)
        least, most = joined.min(initial=0), joined.max(initial=-1)
        if joined.dtype != np.int64 or least < 0 or most >= n_rows[path]:
            what = "a delete file deletes rows that its data file does not have"
            raise InputError(what, where, _RESTORE_SNAPSHOT)
        deleted = np.zeros(int(most) + 1, dtype=np.bool_)
        deleted[joined] = True
        packed[path] = pack(deleted)
    return packed


@contextmanager
def metadata_faults(where: str, hint: str) -> Iterator[None]:
    """Turn what a library raises while it reads a table's metadata into one line: of corrupt files that can be any exception."""
    with storage_faults(where):
        try:
            yield
        except DpdaskError:
            raise
        except Exception as error:
            if classify(error) is not None:
                raise
            raise InputError("its metadata cannot be read: they are corrupt", where, hint) from None
