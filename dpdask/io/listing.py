"""The files of a table, whatever its format: where they are, what they hold, and which of their rows are deleted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import pyarrow as pa

from dpdask.errors import DataError
from dpdask.schema import Schema

_ID = b"PARQUET:field_id"
LOG_FOLDERS = ("_delta_log", "metadata")  # of Delta and Iceberg tables


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFile:
    """One file of a table.

    Attributes
    ----------
    url
        Where it is.
    name
        Its path inside the table, which names its fragments; folders may hold values.
    format
        `parquet` or `csv`.
    constants
        The partition columns with their values in this file.
    deleted
        Its deleted rows, as `deletions.pack` writes them.
    n_bytes
        Its length, if a listing told it.
    """

    url: str = field(repr=False)
    name: str = field(repr=False)
    format: Literal["parquet", "csv"]
    constants: Mapping[str, Any] = field(default_factory=dict, repr=False)
    deleted: bytes = field(default=b"", repr=False)
    n_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TableField:
    """One column of a table that keeps its own schema: Delta or Iceberg.

    Attributes
    ----------
    name, type
        Its name and Arrow type in the table.
    names
        The names that it may have in a file that has no field ids.
    field_id
        Its number in files that have field ids; None if columns are found by name alone.
    default
        Its value in files that were written before the table got it.
    optional
        Whether a file may lack it.
    """

    name: str
    type: pa.DataType
    names: tuple[str, ...]
    field_id: int | None = None
    default: Any = None
    optional: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """The files of a table.

    Attributes
    ----------
    files
        In the order of the rows.
    format
        `files`, `delta` or `iceberg`.
    version
        The Delta version or the Iceberg snapshot; None for plain files, and for an Iceberg table without a snapshot.
    location
        The URL of the table's folder.
    fields
        The table's own columns; None if the files decide.
    partitions
        The types of the partition columns of plain files.
    left_out
        What lies beside plain files and is not read, in words.
    """

    files: tuple[DataFile, ...]
    format: Literal["files", "delta", "iceberg"] = "files"
    version: int | None = None
    location: str = ""
    fields: tuple[TableField, ...] | None = None
    partitions: Mapping[str, pa.DataType] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundColumn:
    """A column of a table as its metadata name it, before anybody has declared it.

    Attributes
    ----------
    name
        Its name.
    type
        Its Arrow type; None if the files do not tell: in CSV, and for columns in the names of folders.
    nullable
        Whether it may hold nulls, as far as the files tell.
    in_folders
        Whether its values stand in the names of folders.
    """

    name: str
    type: pa.DataType | None
    nullable: bool = True
    in_folders: bool = False


class TableFormat(Protocol):
    """How the files of a table are found."""

    def read_columns(self, url: str) -> tuple[FoundColumn, ...]:
        """Return the columns of the table at a URL, from the names and types in its metadata: no value or statistic is looked at.

        Raises
        ------
        InputError, DataError, SpecError
            As `list_files`.
        """

    def list_files(self, url: str, schema: Schema) -> Listing:
        """Return the files of the table at a URL.

        Parameters
        ----------
        url
            The table.
        schema
            The declared columns.

        Raises
        ------
        InputError
            If there is no such table or version.
        DataError
            If it uses something that is not supported.
        """


def find_columns(fields: tuple[TableField, ...], found: pa.Schema, given: Mapping[str, Any], where: str) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the name in a file of each of a table's columns, and the values of those that the file does not hold.

    Parameters
    ----------
    fields
        The table's columns.
    found
        The file's columns, with their metadata.
    given
        The values of partition columns, which count if the file does not hold them.
    where
        The file's name, for messages.

    Raises
    ------
    DataError
        If a column cannot be found in the file.
    """
    by_id = {int(column.metadata[_ID]): column.name for column in found if column.metadata and _ID in column.metadata}
    names: dict[str, str] = {}
    constants: dict[str, Any] = {}
    for wanted in fields:
        if wanted.field_id is not None and by_id:
            name = by_id.get(wanted.field_id)
        elif wanted.field_id is not None and not wanted.names:
            raise DataError("the file has no field ids, and the table no names for its columns", where, "write the file again with field ids")
        else:
            name = next((each for each in wanted.names if each in found.names), None)
        if name is not None:
            names[wanted.name] = name
        elif wanted.name in given:
            constants[wanted.name] = given[wanted.name]
        elif wanted.optional or wanted.default is not None:
            constants[wanted.name] = wanted.default
        else:
            raise DataError("the file lacks this column, which has no default", f"{where}, column {wanted.name!r}", "write the file again")
    return names, constants
