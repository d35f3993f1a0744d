"""Kept columns of frames: what their values may be, so that a released frame carries no value of a row that is not released."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from dpdask.errors import DataError

_COPIED = (pa.types.is_struct, pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list, pa.types.is_map)
_NOT_COPIED = (pa.types.is_dictionary, pa.types.is_string_view, pa.types.is_binary_view)
_CONTAINERS = (pd.api.extensions.ExtensionArray, pd.Index, pd.Series, pd.DataFrame, pa.Array, pa.ChunkedArray, pa.Scalar, pa.RecordBatch, pa.Table)


def check_kept_dtype(name: str, dtype: Any) -> None:
    """Check that the values of released rows can be told from those of other rows: a dictionary or a view inside a value cannot be cut.

    Parameters
    ----------
    name
        The column, or the index.
    dtype
        Its dtype.

    Raises
    ------
    DataError
        If its lists, structs or the like hold dictionaries or views.
    """
    if isinstance(dtype, pd.CategoricalDtype):
        dtype = dtype.categories.dtype
    if not isinstance(dtype, pd.ArrowDtype):
        return
    arrow = dtype.pyarrow_dtype
    if not _is_own(arrow.value_type if pa.types.is_dictionary(arrow) else arrow):
        what = "its values hold dictionaries or views, which may hold values of rows that are not released"
        raise DataError(what, f"column {name!r}", "cast it to an Arrow type without them, or drop it")


def _is_own(arrow: pa.DataType) -> bool:
    """Return whether some rows of a column can be copied without anything of the others."""
    if isinstance(arrow, pa.BaseExtensionType):
        return _is_own(arrow.storage_type)
    if any(is_one(arrow) for is_one in _COPIED):
        return all(_is_own(arrow.field(number).type) for number in range(arrow.num_fields))
    return not (pa.types.is_nested(arrow) or any(is_one(arrow) for is_one in _NOT_COPIED))


def check_cells(name: str, column: pd.Series | pd.Index) -> None:
    """Check that the cells of a kept column of objects are no containers of pandas or Arrow, which may hold a whole column's categories.

    Parameters
    ----------
    name
        The column, or the index.
    column
        Its values.

    Raises
    ------
    DataError
        If one is.
    """
    if column.dtype == object and any(issubclass(each, _CONTAINERS) for each in set(map(type, column.to_numpy()))):
        what = "its cells are containers of pandas or Arrow, which may hold values of rows that are not released"
        raise DataError(what, f"column {name!r}", "make them lists, or drop it")


def is_in_arrow(column: pd.Series | pd.Index) -> bool:
    """Return whether the values lie in Arrow arrays, of which a part is a view of the whole."""
    return isinstance(column.array, pd.arrays.ArrowExtensionArray)


def copy_values(column: pd.Series | pd.Index) -> Any:
    """Return the values of a column that lies in Arrow arrays in memory of their own, without the values beside them.

    Parameters
    ----------
    column
        The values.
    """
    return column.array.take(np.arange(len(column)))
