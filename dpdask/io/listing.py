"""The files of a table, whatever its format: where they are, what they hold, and which of their rows are deleted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import pyarrow as pa

from dpdask.errors import DataError
from dpdask.schema import Schema

_ID = b"PARQUET:field_id"
_LISTS = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
_LAYOUTS = (
    ((pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view), pa.string(), pa.large_string()),
    ((pa.types.is_binary, pa.types.is_large_binary, pa.types.is_binary_view, pa.types.is_fixed_size_binary), pa.binary(), pa.large_binary()),
)
UTC = {"UTC", "+00:00", "Etc/UTC", "Z"}
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


def widen(one: pa.DataType, other: pa.DataType, *, lake: bool = False) -> pa.DataType | None:
    """Return the type of a column that has these two types in two files: it holds the values of both. None if there is no such type.

    Times get the finer unit, which may not hold a far time: conversions check it. A `lake` says of times without a zone whether they are in UTC.
    """
    if one == other or pa.types.is_null(other):
        return one
    if pa.types.is_null(one):
        return other
    if (one, other) != (plain := (_find_storage(one), _find_storage(other))):
        return widen(*plain, lake=lake)
    for is_number in (pa.types.is_integer, pa.types.is_floating):
        if is_number(one) and is_number(other):
            wide = pa.from_numpy_dtype(np.promote_types(one.to_pandas_dtype(), other.to_pandas_dtype()))
            return wide if is_number(wide) else None  # of int64 and uint64 numpy makes float64
    if pa.types.is_decimal(one) and pa.types.is_decimal(other):
        scale = max(one.scale, other.scale)
        digits = scale + max(one.precision - one.scale, other.precision - other.scale)
        return None if digits > 76 else pa.decimal256(digits, scale) if digits > 38 else pa.decimal128(digits, scale)
    for are_layouts, plain, large in _LAYOUTS:
        if all(any(is_layout(type_) for is_layout in are_layouts) for type_ in (one, other)):
            return large if large in (one, other) else plain
    return _widen_nested(one, other, lake) if pa.types.is_nested(one) else _widen_times(one, other, lake)


def _widen_times(one: pa.DataType, other: pa.DataType, lake: bool) -> pa.DataType | None:
    is_time = next((each for each in (pa.types.is_timestamp, pa.types.is_duration, pa.types.is_time) if each(one) and each(other)), None)
    if is_time is None:
        return None
    unit = max(one.unit, other.unit, key=("s", "ms", "us", "ns").index)
    if is_time is pa.types.is_duration:
        return pa.duration(unit)
    if is_time is pa.types.is_time:
        return pa.time32(unit) if unit == "ms" else pa.time64(unit)
    zones = {"UTC" if type_.tz in UTC or (lake and type_.tz is None) else type_.tz for type_ in (one, other)}
    return pa.timestamp(unit, *zones) if len(zones) == 1 else None


def _widen_nested(one: pa.DataType, other: pa.DataType, lake: bool) -> pa.DataType | None:
    types = one, other
    inner = [widen(mine.type, its.type, lake=lake) for mine, its in zip(*map(_list_fields, types), strict=False)]
    if any(type_ is None for type_ in inner):
        return None
    if all(any(is_list(type_) for is_list in _LISTS) for type_ in types):
        return (pa.large_list if any(map(pa.types.is_large_list, types)) else pa.list_)(inner[0])
    if all(map(pa.types.is_map, types)):
        return pa.map_(*inner)
    names = [[field.name for field in _list_fields(type_)] for type_ in types]
    return pa.struct(zip(names[0], inner, strict=True)) if all(map(pa.types.is_struct, types)) and names[0] == names[1] else None


def fits(found: pa.DataType, wanted: pa.DataType) -> bool:
    """Return whether a Delta or Iceberg table's type holds the values of a file's type; conversions check times."""
    joined = widen(found, wanted, lake=True)
    return joined is not None and _shape(joined) == _shape(wanted)


def _find_storage(type_: pa.DataType) -> pa.DataType:
    """Return the type of the values in a dictionary, or in an extension type."""
    if isinstance(type_, pa.BaseExtensionType):
        return type_.storage_type
    return type_.value_type if pa.types.is_dictionary(type_) else type_


def _list_fields(type_: pa.DataType) -> list[pa.Field]:
    if pa.types.is_map(type_):
        return [type_.key_field, type_.item_field]
    return [type_.field(number) for number in range(type_.num_fields)]


def _shape(type_: pa.DataType) -> object:
    """Return a type without what conversions change or check: the layout of values, the names of list items, units and zones of times."""
    type_ = _find_storage(type_)
    if pa.types.is_nested(type_):
        kind = next((name for name in ("struct", "map") if str(type_).startswith(name)), "list")
        return kind, [(field.name if kind == "struct" else "", _shape(field.type)) for field in _list_fields(type_)]
    if pa.types.is_timestamp(type_):
        return "timestamp"
    return str(type_).removeprefix("large_").removesuffix("_view")
