"""The parts of a pandas frame that are published beside its private columns: a declared index or row numbers, and kept values.

A frame contains more than its rows: it may have an index that the schema does not declare, and categoricals list values of
rows that are held out or beyond a unit's bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
import pyarrow as pa

from dpdask.codec import Codec, LevelCodec
from dpdask.engine.work import TableWork
from dpdask.errors import DataError
from dpdask.schema import Schema


def declared_schema(meta: pd.DataFrame, schema: Schema, *, lazy: bool) -> Schema:
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
        If a column is not declared; if the index is neither row numbers nor declared, or its role is not keep.
    """
    index: list[Any] = list(meta.index.names)
    if len(index) > 1 or not (lazy and index == [None] and pd.api.types.is_integer_dtype(meta.index.dtype)):
        check_index(meta.index, index)
    named = [] if index[0] is None or index[0] in meta.columns else [index[0]]
    schema.check_names([*named, *meta.columns])
    if index[0] is not None and schema.columns[index[0]].role != "keep":
        raise DataError("the index is published with the rows, and its role is not keep", f"index {index[0]!r}", "reset_index(drop=True)")
    return Schema(columns={name: column for name, column in schema.columns.items() if name not in named}) if named else schema


def check_index(index: pd.Index, names: Sequence[Any]) -> None:
    """Check that an index may be published: it is a `RangeIndex`, or the index that the schema declares.

    Parameters
    ----------
    index
        The index of a frame, or of a computed partition.
    names
        Its names when it was compared with the schema.

    Raises
    ------
    DataError
        If it must not be published.
    """
    if len(names) > 1 or list(index.names) != list(names) or (names[0] is None and not isinstance(index, pd.RangeIndex)):
        what = "its index is neither row numbers (a RangeIndex) nor one column that the schema declares, and it would be published"
        raise DataError(what, "frame", "reset_index(drop=True), or name it and declare it with role keep")


def published_meta(meta: pd.DataFrame, work: TableWork) -> pd.DataFrame:
    """Return the empty released frame. The categories of a private categorical become its public levels; kept ones become plain values."""
    released = meta[work.released.names].copy()
    for name in released.columns:
        codec, dtype = work.codecs.get(name), released[name].dtype
        if isinstance(codec, LevelCodec) and isinstance(dtype, pd.CategoricalDtype):
            levels = codec.levels.drop_null().to_pandas()
            released[name] = released[name].astype(pd.CategoricalDtype(levels, ordered=codec.ordered))
        else:
            plain = plain_dtype(dtype)
            released[name] = released[name].astype(plain if name not in work.codecs or not _has_null(work.codecs[name]) else _nullable(plain))
    result: pd.DataFrame = released.set_axis(_plain_index(released.index))  # whether pandas has type hints depends on what is installed
    return result


def _has_null(codec: Codec) -> bool:
    return bool(codec.levels.null_count) if isinstance(codec, LevelCodec) else codec.nulls


def plain_kept(kept: pd.DataFrame, meta: pd.DataFrame) -> pd.DataFrame:
    """Return the kept columns of released rows in the dtypes of the empty released frame.

    Raises
    ------
    DataError
        If a partition's categories are of another type than the frame's.
    """
    for name in kept.columns:
        plain, wanted = plain_dtype(kept[name].dtype), meta[name].dtype
        if plain != kept[name].dtype:
            if plain != wanted and not (pd.api.types.is_string_dtype(plain) and pd.api.types.is_string_dtype(wanted)):
                raise DataError(
                    "a partition's values do not fit the frame's dtypes", f"column {name!r}", "give every partition the dtypes of its meta"
                )
            kept[name] = kept[name].astype(wanted)
    result: pd.DataFrame = kept.set_axis(_plain_index(kept.index))
    return result


def plain_dtype(dtype: Any) -> Any:
    """Return the dtype of a column's values without categories; it allows nulls for whole numbers and booleans."""
    if isinstance(dtype, pd.ArrowDtype):
        arrow = dtype.pyarrow_dtype
        return pd.ArrowDtype(arrow.value_type) if pa.types.is_dictionary(arrow) else dtype
    if not isinstance(dtype, pd.CategoricalDtype):
        return dtype
    plain = dtype.categories.dtype
    if isinstance(plain, pd.IntervalDtype) and plain.subtype.kind in "iu":
        return pd.IntervalDtype("float64", plain.closed)  # the dtype that pandas uses beside a null
    return _nullable(plain)


def _nullable(plain: Any) -> Any:
    """Return a dtype that holds the same values and null."""
    if pd.api.types.is_extension_array_dtype(plain) or plain.kind not in "iub":
        return plain
    return pd.BooleanDtype() if plain.kind == "b" else pd.api.types.pandas_dtype(f"{'U' if plain.kind == 'u' else ''}Int{8 * plain.itemsize}")


def _plain_index(index: pd.Index) -> pd.Index:
    plain = plain_dtype(index.dtype)
    return index if plain == index.dtype else index.astype(plain)
