"""The columns that a fitted release's codes stand for, and how they are written into its file."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dpdask.cells import DEFAULT_BINS, Cells, cells
from dpdask.codec import codec_for
from dpdask.schema import Schema

Bins = Mapping[str, int | Sequence[float]]

_DATE = "date of a level"


def bins_by_column(bins: int | Bins, columns: Mapping[str, Cells]) -> dict[str, int | Sequence[float]]:
    """Return how each continuous or mixed column is cut, where `bins` may be one number for all."""
    usual = bins if isinstance(bins, int) else DEFAULT_BINS
    given = {} if isinstance(bins, int) else bins
    return {name: given.get(name, usual) for name, column in columns.items() if len(column.edges)}


def plain_bins(bins: Bins) -> dict[str, int | list[float]]:
    """Return bins as plain values that JSON can hold."""
    return {name: each if isinstance(each, int) else list(each) for name, each in bins.items()}


def released_cells(names: Iterable[str], schema: Schema, types: pa.Schema, bins: Bins) -> dict[str, Cells]:
    """Return the public cells of each named column, in their order."""
    codecs = {name: codec_for(name, schema.columns[name], types.field(name).type) for name in names}
    return {name: cells(codec, bins.get(name, 1)) for name, codec in codecs.items()}


def header_to_arrays(header: Mapping[str, Any], schema: Schema, types: pa.Schema, bins: Bins) -> dict[str, NDArray[np.uint8]]:
    """Return a file's header with the privatised columns and no other, as arrays that `numpy.savez` takes."""
    private = Schema(columns={name: schema.columns[name] for name in schema.privatised})
    content = {**header, "bins": plain_bins(bins), "schema": private.model_dump(exclude_none=True)}
    text = json.dumps(content, default=_tagged).encode()
    return {"header": np.frombuffer(text, dtype=np.uint8), "types": np.frombuffer(types.serialize().to_pybytes(), dtype=np.uint8)}


def header_from_arrays(arrays: Mapping[str, Any]) -> tuple[dict[str, Any], Schema, pa.Schema]:
    """Return the header, with its `bins`, the schema and the Arrow types that `header_to_arrays` wrote.

    Raises
    ------
    ValueError, KeyError, SpecError, ArrowException
        If they are something else.
    """
    header = json.loads(arrays["header"].tobytes(), object_hook=_untagged)
    return header, Schema.from_dict(header["schema"]), pa.ipc.read_schema(pa.py_buffer(arrays["types"].tobytes()))


def _tagged(value: object) -> dict[str, str]:
    """Return a date, which JSON does not have, as a mapping that `_untagged` knows."""
    if not isinstance(value, dt.date):
        raise TypeError(type(value).__name__)
    return {_DATE: value.isoformat()}


def _untagged(value: dict[str, Any]) -> object:
    return dt.date.fromisoformat(value[_DATE]) if set(value) == {_DATE} else value
