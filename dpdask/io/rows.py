"""The rows of a fragment as its table has them: without deleted rows, under the table's names and types, with the columns beside the file."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from dpdask.errors import DataError
from dpdask.io.deletions import unpack
from dpdask.io.fragment import Fragment
from dpdask.io.types import fits

TEXT_BYTES = 64


def estimate_width(type_: pa.DataType) -> float:
    """Estimate the bytes of a value from its type alone; texts, lists and the like count 64."""
    return float(type_.bit_width) / 8 if has_width(type_) else TEXT_BYTES


def has_width(type_: pa.DataType) -> bool:
    """Return whether all values of a type take the same bytes."""
    try:
        return bool(type_.bit_width)
    except ValueError:
        return False


def find_stored(fragment: Fragment, columns: list[str]) -> list[str]:
    """Return the names in a fragment's file of the columns that it holds.

    Parameters
    ----------
    fragment
        What is read.
    columns
        The table's columns.
    """
    constants, renamed = dict(fragment.constants), dict(fragment.renamed)
    return [renamed.get(name, name) for name in columns if name not in constants]


def complete(batches: Iterator[pa.RecordBatch], fragment: Fragment, columns: list[str], types: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield a fragment's rows as its table has them.

    Parameters
    ----------
    batches
        All rows of the fragment's file or row group, in order, with the columns that `find_stored` names.
    fragment
        What is read.
    columns
        The table's columns that are wanted, in order.
    types
        The table's Arrow schema.

    Raises
    ------
    DataError
        If a column's type in the file is not the table's, or does not hold a value.
    """
    constants, renamed = dict(fragment.constants), dict(fragment.renamed)
    wanted = pa.schema([(name, types.field(name).type) for name in columns])
    typed = {name: pa.scalar(value, types.field(name).type) for name, value in constants.items() if name in columns}
    start = 0
    for batch in batches:
        n_rows, kept = batch.num_rows, batch
        if fragment.deleted:
            keep = ~unpack(fragment.deleted, start, n_rows)
            start, n_rows = start + n_rows, int(keep.sum())
            kept = batch.filter(pa.array(keep)) if batch.num_columns else batch
        if (plain := kept.replace_schema_metadata()).schema.equals(wanted, check_metadata=True):
            yield plain  # of many columns, to make a batch anew takes longer than to read it
            continue
        arrays = [
            pa.repeat(typed[name], n_rows) if name in typed else _convert(kept.column(renamed.get(name, name)), name, type_)
            for name, type_ in zip(columns, wanted.types, strict=True)
        ]
        yield pa.RecordBatch.from_arrays(arrays, schema=wanted)


def _convert(array: pa.Array, name: str, type_: pa.DataType) -> pa.Array:
    if array.type == type_:
        return array
    where, hint = f"column {name!r}", "write all files with one type"
    if not fits(array.type, type_):  # a dropped column that names the unit
        raise DataError("its type in one file is not the table's", where, hint)
    try:
        array = array.dictionary_decode() if pa.types.is_dictionary(array.type) else array
        return (array.storage if isinstance(array, pa.ExtensionArray) else array).cast(type_)
    except pa.ArrowInvalid:
        raise DataError(f"a value whose type in its file is {array.type} does not fit the table's type {type_}", where, hint) from None
