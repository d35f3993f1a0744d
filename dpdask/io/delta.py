"""Delta tables: the files of one version, with the partition values, column names and deletion vectors that the log holds."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import numpy as np
import pyarrow as pa

from dpdask.errors import DataError, InputError, SpecError
from dpdask.io.faults import metadata_faults, storage_faults
from dpdask.io.files import DataFile, FoundColumn, Listing, TableField, natural
from dpdask.io.filesystems import KINDS, open_filesystem, resolve_options
from dpdask.io.fragment import pack
from dpdask.schema import Schema

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


def find_options(url: str) -> dict[str, str]:
    """Return deltalake's options for a URL; what is not there, deltalake takes from the environment.

    Privacy
    -------
    The result holds secrets: never put it in a message, log, file or graph.
    """
    kind = KINDS.get(url.partition("://")[0])
    given = resolve_options(url)
    if kind == "s3":
        found = _rename({**given, **given.get("client_kwargs", {})}, _S3)
        endpoint = found.get("aws_endpoint_url", os.environ.get("AWS_ENDPOINT_URL", ""))
    elif kind == "azure":
        text = given.get("connection_string", os.environ.get("AZURE_STORAGE_CONNECTION_STRING", ""))
        found = _rename(
            {**dict(part.split("=", 1) for part in text.split(";") if "=" in part), **given}, _AZURE
        )
        endpoint = found.get("azure_storage_endpoint", "")
    else:
        return {}
    return found | {"allow_http": "true"} if endpoint.startswith("http://") else found


def _rename(given: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, str]:
    return {
        names[name]: str(value)
        for name, value in given.items()
        if name in names and value is not None
    }


if TYPE_CHECKING:
    from deltalake import DeltaTable

# `typeWidening` is not here: no reader at hand was tested with it. A `variantType` column is refused by its type, unless it is dropped.
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
_ID = b"delta.columnMapping.id"
_NAME = b"delta.columnMapping.physicalName"


@dataclass(frozen=True, slots=True)
class Delta:
    """The format of a Delta table."""

    version: int | None = None  # the version to read; None for the latest

    def list_files(self, url: str, schema: Schema) -> Listing:
        """Return the files of one version of the table at a URL; see `TableFormat.list_files`.

        Parameters
        ----------
        schema
            The declared columns; they do not matter, because the log has types.
        """
        del schema
        with metadata_faults(url, _RESTORE):
            return self._list_files(url)

    def _list_files(self, url: str) -> Listing:
        table = _open(url, self.version)
        version = int(table.version())
        where = f"{url}, version {version}"
        _check_features(table, where)
        fs, root = open_filesystem(url)
        actions, deleted = _read_actions(table, where), _read_deleted(table, where)
        columns = list(table.metadata().partition_columns)
        files = []
        for action in actions:
            path = unquote(action["path"])
            if not {"", "."}.isdisjoint(path.split("/")) and not _OUTSIDE.match(
                path
            ):  # `x` and `./x` would be one file, released twice
                raise DataError(
                    "its log writes the path of a file in an unusual way", where, "repair the table"
                )
            if _OUTSIDE.match(path) or ".." in path.split("/"):
                raise DataError(
                    "this version has files outside the table's folder (a shallow clone)",
                    where,
                    "name the table that they belong to",
                )
            files.append(
                DataFile(
                    url=str(fs.unstrip_protocol(f"{root.rstrip('/')}/{path}")),
                    name=path,
                    format="parquet",
                    constants={column: action[f"partition.{column}"] for column in columns},
                    deleted=deleted.pop(path, b""),
                )
            )
        if deleted:
            raise InputError(
                "its log deletes rows of a file that it does not list", where, "repair the table"
            )
        return Listing(
            files=tuple(sorted(files, key=lambda file: natural(file.name))),
            format="delta",
            version=version,
            location=url,
            fields=_fields(table),
        )

    def read_columns(self, url: str) -> tuple[FoundColumn, ...]:
        """Return the columns that the log names; see `TableFormat.read_columns`."""
        with metadata_faults(url, _RESTORE):
            fields = pa.schema(_open(url, self.version).schema().to_arrow())
            return tuple(
                FoundColumn(name=column.name, type=column.type, nullable=column.nullable)
                for column in fields
            )


def _open(url: str, version: int | None) -> DeltaTable:
    """Open a table at a version."""
    try:
        from deltalake import DeltaTable
        from deltalake.exceptions import DeltaError, TableNotFoundError
    except ImportError:
        raise SpecError(
            "a Delta table is read by the package deltalake, which is not installed",
            url,
            "install dpdask[delta]",
        ) from None
    place, options = url.removeprefix("file://"), find_options(url)
    with storage_faults(url):
        try:
            return DeltaTable(place, version=version, storage_options=options or None)
        except TableNotFoundError:
            which = "" if version is None else f" with version {version}"
            raise InputError(
                f"there is no Delta table{which} here", url, "check this path"
            ) from None
        except (DeltaError, ValueError) as error:
            if "unsupported" in str(error).lower():
                raise DataError(
                    "this table needs a reader feature that is not supported", url, _WRITE_WITHOUT
                ) from None
            if "duplicate field name" in str(error).lower():
                what = "two columns have names that differ in upper and lower case only, which readers of Delta tables refuse"
                raise DataError(
                    what, url, "rename one of them, or name a copy as plain Parquet"
                ) from None
            which = (
                "its log cannot be read" if version is None else f"version {version} cannot be read"
            )
            raise InputError(which, url, "name a version that the table still has") from None
        except OSError as error:
            raise _name_failure(error) from None


def _name_failure(error: OSError) -> OSError:
    """Return the kind of a store's failure; deltalake tells it by the HTTP status in its message alone."""
    status = re.search(r"(401 Unauthorized|403 Forbidden|404 Not Found)", str(error))
    return (
        error
        if status is None
        else FileNotFoundError()
        if status[1].startswith("404")
        else PermissionError()
    )


def _check_features(table: DeltaTable, where: str) -> None:
    protocol = table.protocol()
    unknown = sorted(set(protocol.reader_features or ()) - _FEATURES)
    if protocol.min_reader_version > _READER:
        raise DataError(
            f"this table needs version {protocol.min_reader_version} of the reader protocol",
            where,
            _WRITE_WITHOUT,
        )
    if unknown:
        raise DataError(
            f"this table needs the reader feature {unknown[0]!r}, which is not supported",
            where,
            _WRITE_WITHOUT,
        )


def _read_actions(table: DeltaTable, where: str) -> list[dict[str, Any]]:
    """Return what the log tells of each file: its path, and its partition values in the columns' types."""
    from deltalake.exceptions import DeltaError

    with storage_faults(where):
        try:
            actions = pa.table(table.get_add_actions(flatten=True))
        except (DeltaError, pa.ArrowException, ValueError):
            raise InputError("its log cannot be read", where, _RESTORE) from None
    wanted = [
        name for name in actions.column_names if name == "path" or name.startswith("partition.")
    ]
    return list(actions.select(wanted).to_pylist())


def _read_deleted(table: DeltaTable, where: str) -> dict[str, bytes]:
    """Return the deleted rows of each file that has some, by the file's path in the table."""
    from deltalake.exceptions import DeltaError

    found: dict[str, bytes] = {}
    with storage_faults(where):
        try:
            for batch in pa.RecordBatchReader.from_stream(table.deletion_vectors()):
                for uri, keep in zip(
                    batch.column("filepath").to_pylist(),
                    batch.column("selection_vector"),
                    strict=True,
                ):
                    found[unquote(uri.removeprefix(table.table_uri))] = pack(
                        ~np.asarray(keep.values.to_numpy(zero_copy_only=False), dtype=bool)
                    )
        except (DeltaError, pa.ArrowException, ValueError):
            raise InputError(
                "a deletion vector cannot be read: it is missing or corrupt",
                where,
                "restore it, or name another version",
            ) from None
    return found


def _fields(table: DeltaTable) -> tuple[TableField, ...]:
    """Return the table's columns, with the names or numbers that they have in files; partition columns are in the log alone."""
    metadata = table.metadata()
    mode = metadata.configuration.get("delta.columnMapping.mode", "none")
    fields = []
    for column in pa.schema(table.schema().to_arrow()):
        if column.name in metadata.partition_columns:
            fields.append(TableField(name=column.name, type=column.type, names=()))
            continue
        names = (column.name if mode == "none" else column.metadata[_NAME].decode(),)
        fields.append(
            TableField(
                name=column.name,
                type=column.type,
                names=names,
                field_id=int(column.metadata[_ID]) if mode == "id" else None,
            )
        )
    return tuple(fields)
