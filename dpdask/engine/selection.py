"""Some rows of a batch, in any order: Arrow selects no rows of its view types, so these take the way over plain ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

Rows = TypeVar("Rows", pa.RecordBatch, pa.Table)


def filter_rows(rows: Rows, chosen: NDArray[np.bool_]) -> Rows:
    """Return the chosen rows, in their order."""
    return rows if chosen.all() else _by_plain_types(rows, lambda plain: plain.filter(pa.array(chosen)))


def take_rows(rows: Rows, places: pa.Array) -> Rows:
    """Return the rows at some places, in the order of the places."""
    return _by_plain_types(rows, lambda plain: plain.take(places))


def _by_plain_types(rows: Rows, select: Callable[[Rows], Rows]) -> Rows:
    plain = pa.schema([field.with_type(_plain(field.type)) for field in rows.schema])
    return select(rows) if plain.equals(rows.schema) else select(rows.cast(plain)).cast(rows.schema)


def _plain(type_: pa.DataType) -> pa.DataType:
    if pa.types.is_string_view(type_):
        return pa.large_string()
    if pa.types.is_binary_view(type_):
        return pa.large_binary()
    if pa.types.is_list(type_) or pa.types.is_large_list(type_):
        inner = type_.value_field.with_type(_plain(type_.value_type))
        return pa.list_(inner) if pa.types.is_list(type_) else pa.large_list(inner)
    return type_
