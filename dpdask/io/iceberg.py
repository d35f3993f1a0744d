"""Iceberg tables: the files of one snapshot, with their columns found by field id and their positional deletes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from dpdask.errors import DataError, DpdaskError, InputError, SpecError, TemporaryError
from dpdask.io.faults import classify, metadata_faults
from dpdask.io.files import DataFile, FoundColumn, Listing, TableField, natural
from dpdask.io.filesystems import open_filesystem
from dpdask.io.fragment import pack
from dpdask.io.parquet import open_parquet
from dpdask.io.storage import Folder, absolute_url
from dpdask.schema import Schema

if TYPE_CHECKING:
    from pyiceberg.manifest import DataFile as IcebergFile
    from pyiceberg.table import DataScan, FileScanTask, Table

_METADATA = ".metadata.json"
_ACCESS = {"py-io-impl": "dpdask.io.iceberg_files.StoreFiles"}
_POSITIONS = ["file_path", "pos"]
_RESTORE = "restore it, or name another snapshot"
_COPY = "compact the table (rewrite its data files), or write a copy as plain Parquet"


@dataclass(frozen=True, slots=True)
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
        schema
            The declared columns; they do not matter, because the table has types.
        """
        del schema
        with metadata_faults(url, _RESTORE):
            table = self._open(url)
            location = absolute_url(table.location())
            current = table.metadata.current_snapshot_id if self.snapshot is None else self.snapshot
            if current is not None and table.snapshot_by_id(current) is None:
                raise InputError(
                    f"the table has no snapshot {current}",
                    url,
                    "name a snapshot that the table still has",
                )
            scan = table.scan(snapshot_id=current)
            tasks = [] if current is None else _plan(scan, url)
            deleted = _read_deleted(tasks, url)
            files = [
                _data_file(
                    table, scan, task.file, deleted.get(task.file.file_path, b""), location, url
                )
                for task in tasks
            ]
            return Listing(
                files=tuple(sorted(files, key=lambda file: natural(file.name))),
                format="iceberg",
                version=current,
                location=location,
                fields=_fields(table, scan),
            )

    def read_columns(self, url: str) -> tuple[FoundColumn, ...]:
        """Return the columns of the snapshot's schema; see `TableFormat.read_columns`."""
        with metadata_faults(url, _RESTORE):
            table = self._open(url)
            if self.snapshot is not None and table.snapshot_by_id(self.snapshot) is None:
                raise InputError(
                    f"the table has no snapshot {self.snapshot}",
                    url,
                    "name a snapshot that the table still has",
                )
            fields = _fields(table, table.scan(snapshot_id=self.snapshot))
            return tuple(
                FoundColumn(name=column.name, type=column.type, nullable=column.optional)
                for column in fields
            )

    def _open(self, url: str) -> Table:
        try:
            import pyiceberg.catalog  # noqa: F401 - the functions below need it
        except ImportError:
            raise SpecError(
                "an Iceberg table is read by the package pyiceberg, which is not installed",
                url,
                "install dpdask[iceberg]",
            ) from None
        return _open_file(url) if self.catalog is None else _open_in_catalog(url, self.catalog)


def _open_file(url: str) -> Table:
    from pyiceberg.table import StaticTable

    if not url.endswith(_METADATA):
        raise SpecError(
            "this is not a metadata file of an Iceberg table",
            url,
            f"name one (…{_METADATA}), or set `input.catalog`",
        )
    return StaticTable.from_metadata(url, _ACCESS)


def _open_in_catalog(name: str, catalog: Mapping[str, str]) -> Table:
    """Open a table by its catalog; pyiceberg takes from the environment what is not given here."""
    from pyiceberg.catalog import load_catalog
    from pyiceberg.exceptions import (
        ForbiddenError,
        NoSuchNamespaceError,
        NoSuchTableError,
        NotInstalledError,
        OAuthError,
        UnauthorizedError,
    )

    try:
        return load_catalog(**{**_ACCESS, **catalog}).load_table(name)
    except (NoSuchTableError, NoSuchNamespaceError):
        raise InputError("the catalog has no such table", name, "check input.path") from None
    except (UnauthorizedError, ForbiddenError, OAuthError):
        raise InputError(
            "the catalog denies access",
            name,
            "give its credentials as variables of the environment",
        ) from None
    except DpdaskError:
        raise
    except (ValueError, NotInstalledError):
        what = "the catalog cannot be opened as it is given"
        raise SpecError(
            what,
            name,
            "check input.catalog, and the variables PYICEBERG_CATALOG__… of the environment",
        ) from None
    except Exception as error:  # each kind of catalog has its own
        if classify(error) is not None:
            raise
        raise TemporaryError(
            f"the catalog failed ({type(error).__name__})", name, "check its address, and run again"
        ) from None


def _plan(scan: DataScan, where: str) -> list[FileScanTask]:
    try:
        return list(scan.plan_files())
    except (ValueError, NotImplementedError) as error:
        if "equality deletes" not in str(error):
            raise
        raise DataError(
            "this snapshot has equality deletes, which are not supported", where, _COPY
        ) from None


def _data_file(
    table: Table, scan: DataScan, found: IcebergFile, deleted: bytes, location: str, where: str
) -> DataFile:
    if found.file_format.name != "PARQUET":
        raise DataError(
            f"this snapshot has files in the format {found.file_format.name}, not Parquet",
            where,
            _COPY,
        )
    fs, path = open_filesystem(absolute_url(found.file_path))
    url = str(fs.unstrip_protocol(path))
    return DataFile(
        url=url,
        name=url.removeprefix(
            f"{location.rstrip('/')}/"
        ),  # a file that was added from elsewhere has its whole URL as its name
        format="parquet",
        constants=_partition_values(table, scan, found),
        deleted=deleted,
    )


def _partition_values(table: Table, scan: DataScan, found: IcebergFile) -> dict[str, Any]:
    """Return the values of the columns that partition a file as they are; a file that was added need not hold them."""
    columns = {column.field_id: column.name for column in scan.projection().fields}
    spec = table.specs()[found.spec_id]
    return {
        columns[part.source_id]: found.partition[place]
        for place, part in enumerate(spec.fields)
        if str(part.transform) == "identity" and part.source_id in columns
    }


def _fields(table: Table, scan: DataScan) -> tuple[TableField, ...]:
    """Return the columns of the snapshot's schema."""
    mapping = table.name_mapping()
    names = {} if mapping is None else {each.field_id: tuple(each.names) for each in mapping.root}
    schema = scan.projection()
    return tuple(
        TableField(
            name=column.name,
            type=_plain(type_.type),
            names=names.get(column.field_id, ()),
            field_id=column.field_id,
            default=column.initial_default,
            optional=not column.required,
        )
        for column, type_ in zip(schema.fields, schema.as_arrow(), strict=True)
    )


def _plain(type_: pa.DataType) -> pa.DataType:
    """Return the usual type of texts and bytes in place of that with wide offsets."""
    return (
        pa.string()
        if pa.types.is_large_string(type_)
        else pa.binary()
        if pa.types.is_large_binary(type_)
        else type_
    )


def _read_deleted(tasks: Sequence[FileScanTask], where: str) -> dict[str, bytes]:
    """Return the deleted rows of each data file that has some, by its path."""
    by_delete: dict[str, set[str]] = {}
    for task in tasks:
        for each in task.delete_files:
            if each.file_format.name != "PARQUET":
                raise DataError(
                    f"this snapshot has delete files in the format {each.file_format.name}, not Parquet",
                    where,
                    _COPY,
                )
            by_delete.setdefault(each.file_path, set()).add(task.file.file_path)
    positions: dict[str, list[NDArray[np.int64]]] = {}
    for path, concerned in by_delete.items():
        for file, found in _read_positions(path, concerned, where):
            positions.setdefault(file, []).append(found)
    n_rows = {task.file.file_path: task.file.record_count for task in tasks}
    return {
        file: _pack_positions(np.concatenate(found), n_rows[file], where)
        for file, found in positions.items()
    }


def _read_positions(
    path: str, concerned: set[str], where: str
) -> list[tuple[str, NDArray[np.int64]]]:
    folder, _, name = absolute_url(path).rpartition("/")
    with open_parquet(
        Folder(folder), name, _POSITIONS, f"{where}, delete file {name}", _RESTORE
    ) as file:
        deletes = file.read(columns=_POSITIONS, use_threads=False)
        deletes.validate(full=True)
    return [
        (file, deletes.filter(pc.equal(deletes.column("file_path"), file)).column("pos").to_numpy())
        for file in sorted(concerned)
    ]


def _pack_positions(positions: NDArray[np.int64], n_rows: int, where: str) -> bytes:
    if (
        positions.dtype != np.int64
        or positions.min(initial=0) < 0
        or positions.max(initial=-1) >= n_rows
    ):
        raise InputError(
            "a delete file deletes rows that its data file does not have", where, _RESTORE
        )
    deleted = np.zeros(int(positions.max(initial=-1)) + 1, dtype=np.bool_)
    deleted[positions] = True
    return pack(deleted)
