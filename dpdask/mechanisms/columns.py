"""The columns that a fitted release's codes stand for, and how they are written into its file."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.random import Generator
from numpy.typing import NDArray

from dpdask.cells import DEFAULT_BINS, Cells, cells
from dpdask.codec import codec_for
from dpdask.kernels.marginals import MAX_LEVELS
from dpdask.schema import Schema
from dpdask.stats import Domain
from dpdask.stats.tables import domain_of
from dpdask.streams import words

CHUNK_ROWS = 2**15  # records that are drawn together; what the memory of a worker depends on

Bins = Mapping[str, int | Sequence[float]]
Codes = NDArray[np.integer]


def bins_by_column(bins: int | Bins, columns: Mapping[str, Cells]) -> dict[str, int | Sequence[float]]:
    """Return how each continuous or mixed column is cut, where `bins` may be one number for all.

    Parameters
    ----------
    bins
        A number of cells for every column, or the bins of each.
    columns
        The cells of each column.
    """
    usual = bins if isinstance(bins, int) else DEFAULT_BINS
    given = {} if isinstance(bins, int) else bins
    return {name: given.get(name, usual) for name, column in columns.items() if len(column.edges)}


def plain_bins(bins: Bins) -> dict[str, int | list[float]]:
    """Return bins as plain values that JSON can hold."""
    return {name: each if isinstance(each, int) else list(each) for name, each in bins.items()}


def cut_released(names: Iterable[str], schema: Schema, types: pa.Schema, bins: Bins) -> dict[str, Cells]:
    """Return the public cells of each named column, in their order.

    Parameters
    ----------
    names
        The columns.
    schema
        The declared columns.
    types
        The types of the table.
    bins
        How each column is cut; one cell if it is not named.
    """
    codecs = {name: codec_for(name, schema.columns[name], types.field(name).type) for name in names}
    return {name: cells(codec, bins.get(name, 1)) for name, codec in codecs.items()}


def columns_to_header(schema: Schema, types: pa.Schema, bins: Bins) -> dict[str, Any]:
    """Return the privatised columns, and no other, as a part of an archive's header.

    Parameters
    ----------
    schema
        The declared columns.
    types
        The Arrow types of the released columns.
    bins
        How each continuous or mixed column is cut.
    """
    private = Schema(columns={name: schema.columns[name] for name in schema.privatised})
    types_ = base64.b64encode(types.serialize().to_pybytes()).decode()
    return {"schema": private.model_dump(exclude_none=True), "types": types_, "bins": plain_bins(bins)}


def columns_from_header(header: Mapping[str, Any], domain: Domain) -> tuple[Schema, pa.Schema, Bins]:
    """Return the schema, the Arrow types and the bins that `columns_to_header` wrote.

    Parameters
    ----------
    header
        The archive's header.
    domain
        The attributes of the counts in the same archive.

    Raises
    ------
    ValueError, KeyError, TypeError, SpecError, ArrowException
        If they are something else, or the cells that they declare are not those of the domain.
    """
    types, bins = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(header["types"]))), header["bins"]
    schema = Schema.from_dict(header["schema"])
    if any(not isinstance(each, list) and not (type(each) is int and 1 <= each <= MAX_LEVELS) for each in bins.values()):
        raise ValueError("the bins are neither a number of cells nor their first values")
    names = sorted(domain.names)
    if sorted(types.names) != names or sorted(schema.columns) != names or not set(bins) <= set(names):
        raise ValueError("the columns are not those of the counts")
    if domain_of(cut_released(domain.names, schema, types, bins)) != domain:
        raise ValueError("the cells are not those of the counts")
    return schema, types, bins


def draw_records(
    types: pa.Schema, columns: Mapping[str, Cells], chunks: Iterable[Iterable[Codes]], open_stream: Callable[[str], Generator]
) -> Iterator[pa.RecordBatch]:
    """Yield records: their cells, with a value drawn inside each.

    Parameters
    ----------
    types
        The columns that are written.
    columns
        The public cells of each, in the order of the domain.
    chunks
        The codes of each column, in the order of the domain, for some records after the other.
    open_stream
        Returns the random stream of a column's values inside its cells.
    """
    rngs = {name: open_stream(name) for name in columns}
    for chunk in chunks:
        arrays = {
            name: column.draw(codes, words(rngs[name], len(codes) if len(column.edges) else 0))  # levels are decided by their code alone
            for (name, column), codes in zip(columns.items(), chunk, strict=True)
        }
        yield pa.RecordBatch.from_arrays([arrays[name] for name in types.names], schema=types)
