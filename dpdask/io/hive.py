"""Folders named `key=value`: columns whose values stand in the folders' names, as Hive, Spark and Dask write them.

The values are data. They are columns of the table like those in the files; messages show `key=…`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

import pyarrow as pa

from dpdask.errors import DataError
from dpdask.io.csv import csv_type
from dpdask.io.footer import Footer, Ranges, find_ranges
from dpdask.schema import Schema

NULL = "__HIVE_DEFAULT_PARTITION__"


def split_folders(name: str) -> dict[str, str | None]:
    """Return the columns in a file's folders, each with its value as text; None is null.

    Parameters
    ----------
    name
        The file's path inside the table.

    Raises
    ------
    DataError
        If a column appears twice in the path.
    """
    found: dict[str, str | None] = {}
    for folder in name.split("/")[:-1]:
        key, sign, value = folder.partition("=")
        if not sign:
            continue
        column = unquote(key)
        if column in found:
            raise DataError("two folders of one path hold this column", f"column {column!r}", "rename one of the two")
        found[column] = None if value == NULL else unquote(value)
    return found


def partition_types(names: list[str], schema: Schema) -> dict[str, pa.DataType]:
    """Return the types of the columns in the folders of a table: those that the schema declares, or that its domains imply; else text.

    Parameters
    ----------
    names
        The paths of its files inside the table, at least one.
    schema
        The declared columns.

    Raises
    ------
    DataError
        If not all files have the same columns in their folders.
    """
    first = list(split_folders(names[0]))
    for name in names:
        differing = set(first) ^ set(split_folders(name))
        if differing:
            what = "some files have a folder for this column, and others do not"
            raise DataError(what, f"column {min(differing)!r}", "give all files the same folders, or name those to read with a glob")
    return {column: csv_type(schema.columns[column]) if column in schema.columns else pa.string() for column in first}


def read_value(text: str | None, column: str, type_: pa.DataType) -> Any:
    """Return the value of a partition column.

    Parameters
    ----------
    text
        The value as text, or None.
    column
        The column's name, for messages.
    type_
        Its type.

    Raises
    ------
    DataError
        If the text is not of that type; it is not shown.
    """
    try:
        return pa.array([text], pa.string()).cast(type_)[0].as_py()
    except (pa.ArrowException, ValueError, OverflowError):
        what = "the name of a folder cannot be read as this column's declared type"
        raise DataError(what, f"column {column!r}", "correct the schema's `type` or levels, or rename the folder") from None


def check_agreement(types: pa.Schema, folders: Mapping[str, str | None], footer: Footer | None, where: str) -> None:
    """Check that a file that holds a column which its folder's name holds too cannot have other values than the folder.

    Raises
    ------
    DataError
        If no footer shows that all rows have the folder's value.
    """
    both = sorted(set(types.names) & set(folders))
    ranges = find_ranges(footer, both) if both and footer is not None else {}
    for column in both:
        text, found = folders[column], ranges.get(column)
        if footer is None or text is None or found is None or _has_nulls(footer, column) or not _is_constant(found, text, column, types):
            what = "both the file and its folder's name hold this column, and they could disagree"
            raise DataError(what, f"{where}, column {column!r}", "write the files without it, or rename the folders")


def _has_nulls(footer: Footer, column: str) -> bool:
    return any(chunk.n_nulls != 0 for group in footer.groups for chunk in group.chunks if chunk.column == column)


def _is_constant(ranges: Ranges, text: str, column: str, types: pa.Schema) -> bool:
    value = read_value(text, column, types.field(column).type)
    return all(low == high == value for low, high in ranges)
