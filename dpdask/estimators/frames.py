"""Frames on the way to the engine: where their secrets may lie, and the columns that they have."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pandas as pd
import pyarrow as pa

from dpdask.engine.lazy import check_kept_dtype
from dpdask.engine.source import Frame, check_index, find_meta, find_types
from dpdask.engine.work import TableWork, make_table_work
from dpdask.errors import DataError, SpecError
from dpdask.io.storage import Folder, absolute_url
from dpdask.mechanisms.mechanism import Mechanism
from dpdask.schema import Schema


def check_frame(frame: Frame) -> None:
    """Check that something is a Dask or pandas frame, before anything is done with it.

    Raises
    ------
    SpecError
        If it is not.
    """
    find_meta(frame)


def check_secrets(secrets: str | None) -> None:
    """Check that a run key may lie in a folder.

    Raises
    ------
    SpecError
        If the folder is in an object store, which may keep what is removed.
    """
    if secrets is not None and not Folder(absolute_url(secrets)).is_local:
        what = "an object store may keep what is removed, so the run key may not lie in one"
        raise SpecError(what, "`secrets`", "name a folder of a file system that all workers share, or run a job")


def forget_secrets(folder: Folder) -> None:
    """Remove the key, the units' bounds and the seals from a folder, once nothing that follows needs a secret."""
    for name in folder.names():
        folder.child(name).remove()


def make_frame_work(frame: Frame, mechanism: Mechanism, secrets: Folder) -> TableWork:
    """Return the work on a frame whose columns were checked against the schema and the mechanism; nothing is computed.

    Parameters
    ----------
    frame
        A Dask or pandas frame.
    mechanism
        What is released.
    secrets
        The folder of the run key.

    Raises
    ------
    DataError, SpecError
        If they do not fit each other.
    """
    meta = find_meta(frame)
    if mechanism.releases_rows:
        schema = declare_dtypes(meta, mechanism.schema, lazy=not isinstance(frame, pd.DataFrame))
    else:
        schema = declare_counted(meta, mechanism.schema)
    types = find_types(frame, schema)
    check_objects(frame, types, schema)
    return make_table_work(mechanism, types, secrets, schema)


def declare_dtypes(meta: pd.DataFrame, schema: Schema, *, lazy: bool) -> Schema:
    """Return the schema without the frame's index, after checking that exactly the frame's columns are declared.

    Parameters
    ----------
    meta
        The empty frame.
    schema
        The declared columns, including the index if it has a name.
    lazy
        Whether `check_index` checks each partition's index when it is computed. The empty frame of a Dask frame may have
        another kind of index than its partitions.

    Raises
    ------
    DataError
        If a column is not declared; if the index is neither row numbers nor declared, or its role is not keep; if the values of a kept
        column cannot be told from those of other rows; if a private column is of a type that cannot be written again.
    """
    index: list[Any] = list(meta.index.names)
    if len(index) > 1 or not (lazy and index == [None] and pd.api.types.is_integer_dtype(meta.index.dtype)):
        check_index(meta.index, index)
    named = [] if index[0] is None or index[0] in meta.columns else [index[0]]
    schema.check_names([*named, *meta.columns])
    if index[0] is not None and schema.columns[index[0]].role != "keep":
        raise DataError("the index is published with the rows, and its role is not keep", f"index {index[0]!r}", "reset_index(drop=True)")
    for name in schema.kept:
        check_kept_dtype(name, (meta.index if name in named else meta[name]).dtype)
    for name in schema.privatised:
        _check_private_dtype(name, meta[name].dtype)
    return Schema(columns={name: column for name, column in schema.columns.items() if name not in named}) if named else schema


def _check_private_dtype(name: str, dtype: Any) -> None:
    """Check that a column's noisy values can have its dtype: Arrow takes no rows of its views."""
    if isinstance(dtype, pd.ArrowDtype):
        arrow = dtype.pyarrow_dtype
        values = arrow.value_type if pa.types.is_dictionary(arrow) else arrow
        if pa.types.is_string_view(values):
            mend = f"make plain texts of it before `fit`, by frame[{name!r}] = frame[{name!r}].to_list()"  # astype refuses views too
            raise DataError(f"no released rows can be made of the type {arrow}", f"column {name!r}", mend)


def check_objects(frame: Frame, types: pa.Schema, schema: Schema) -> None:
    """Check that no private column of numbers, dates or truth values holds Python objects whose type is not known, or texts made of dates.

    Parameters
    ----------
    frame
        A Dask or pandas frame.
    types
        The Arrow types of its columns.
    schema
        The declared columns, without the frame's index.

    Raises
    ------
    DataError
        If one does; it says how to convert it.
    """
    for name in schema.privatised:
        column, type_ = schema.columns[name], types.field(name).type
        declared = (*(column.levels or ()), *(column.bounds or ()), *(column.atoms or ()))
        if (pa.types.is_string(type_) or pa.types.is_large_string(type_)) and not (declared and isinstance(declared[0], str)):
            what, mend = _describe_objects(frame, name, dated=any(isinstance(value, dt.date) for value in declared))
            if what:
                raise DataError(what, f"column {name!r}", f"convert it before `fit`, by {mend}")


def _describe_objects(frame: Frame, name: str, *, dated: bool) -> tuple[str, str]:
    """Return what a column that passes for texts holds instead of what is declared, and how to convert it; empty texts if it holds texts."""
    lazy, dates = not isinstance(frame, pd.DataFrame), f"astype({{{name!r}: 'date32[pyarrow]'}})"
    if find_meta(frame)[name].dtype != object:
        also = ", as Dask makes of Python's dates" if lazy else ""
        return (f"dates are declared, and it holds texts{also}", dates) if dated else ("", "")
    if lazy:
        return "it holds Python objects, and Dask does not tell of which type", dates if dated else "astype"
    found = [type(value) for value in frame[name].dropna().head(1) if not isinstance(value, str)]
    if not found:
        return ("dates are declared, and it holds texts", dates) if dated else ("", "")
    mend = "pandas.to_datetime" if issubclass(found[0], dt.datetime) else "astype, such as to 'Int64' or 'decimal128(10, 2)[pyarrow]'"
    name = found[0].__name__
    return f"it holds Python objects, such as {'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}", mend


def declare_counted(meta: pd.DataFrame, schema: Schema) -> Schema:
    """Return the schema without the frame's index, which is neither counted nor released, so that any will do if it is declared.

    Parameters
    ----------
    meta
        The empty frame.
    schema
        The declared columns.

    Raises
    ------
    DataError
        If a column is not declared, or the index is to be privatised.
    """
    index = [name for name in meta.index.names if name is not None and name not in meta.columns]
    schema.check_names([*index, *meta.columns])
    for name in index:
        if name in schema.privatised:
            raise DataError("an index is not counted, and its role is privatise", f"index {name!r}", "make it a column: reset_index()")
    return Schema(columns={name: column for name, column in schema.columns.items() if name not in index}) if index else schema
