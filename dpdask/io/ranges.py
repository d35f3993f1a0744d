"""The smallest and largest values of row groups, from the statistics in Parquet footers: private values that stay on the driver."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal
from functools import partial
from typing import Any, Literal

import pyarrow as pa

from dpdask.io import parquet
from dpdask.io.faults import storage_faults
from dpdask.io.filesystems import open_filesystem
from dpdask.io.footer import Chunk, Footer
from dpdask.io.fragment import Fragment
from dpdask.io.fragments import InputTable
from dpdask.io.threads import map_files

_FIRST_FILES = 64

_NUMBERS = {1: pa.int32(), 2: pa.int64(), 4: pa.float32(), 5: pa.float64()}  # by Parquet's physical types

Ranges = list[tuple[Any, Any]]


def row_group_ranges(table: InputTable, columns: Iterable[str], is_needed: Callable[[Ranges], bool] | None = None) -> Mapping[str, Ranges]:
    """Return the range of values in each row group, in the order of the table, for the columns whose range every footer holds.

    Row groups that hold only nulls have no range. Only footers are read; CSV files have none. Partition columns have
    none either, and no column has one if rows are deleted, because footers count these too.

    Parameters
    ----------
    table
        The table that was found.
    columns
        The columns to look at.
    is_needed
        Called with the first ranges of a column, and again with more; if it returns False, the column is left out. When none is
        left, no further footer is read. None keeps all columns.

    Raises
    ------
    InputError
        If a file is missing or unreadable.

    Privacy
    -------
    The ranges are exact values of the private table. Compare them and discard them: never put them in a message, file or graph.
    """
    if any(fragment.format != "parquet" or fragment.deleted for fragment in table.fragments):
        return {}
    files = list({fragment.url: fragment for fragment in table.fragments}.values())
    joined: dict[str, Ranges] = {name: [] for name in columns}
    start = 0
    while joined and start < len(files):
        end = max(_FIRST_FILES, 2 * start)
        found = map_files(partial(_of_file, columns=list(joined)), files[start:end])
        whole = [name for name in joined if all(ranges[name] is not None for ranges in found)]
        more = {name: joined[name] + [pair for ranges in found for pair in ranges[name] or ()] for name in whole}
        joined = {name: ranges for name, ranges in more.items() if _is_of_one_kind(ranges) and (is_needed is None or is_needed(ranges))}
        start = end
    return joined


def _is_of_one_kind(ranges: Ranges) -> bool:
    return len({_kind(low) for low, _ in ranges}) <= 1


def _kind(value: Any) -> Any:
    """Return what two values must share to be compared: files of one Delta table may hold one column in several types."""
    return float if isinstance(value, int | float) else (type(value), getattr(value, "tzinfo", None) is None)


def _of_file(file: Fragment, columns: list[str]) -> dict[str, Ranges | None]:
    fs, path = open_filesystem(file.url)
    with storage_faults(file.name):
        footer = parquet.footer(fs, path, file.name, None if file.layout is None else file.layout.n_file_bytes)
        types = footer.parsed.schema.to_arrow_schema()
    places = {chunk.column: place for group in footer.groups[:1] for place, chunk in enumerate(group.chunks)}
    found: dict[str, Ranges | None] = {}
    for column in columns:
        name = dict(file.renamed).get(column, column)
        is_there = name in places and column not in dict(file.constants)
        found[column] = _of_column([group.chunks[places[name]] for group in footer.groups], footer, types.field(name).type) if is_there else None
    return found


def _of_column(chunks: Sequence[Chunk], footer: Footer, type_: pa.DataType) -> Ranges | None:
    known = [chunk for chunk, group in zip(chunks, footer.groups, strict=True) if group.n_rows and chunk.n_nulls != group.n_rows]
    limits = [end for chunk in known for end in chunk.limits or ()]
    if len(limits) < 2 * len(known):
        return None
    values = _decode(limits, known[0].physical, type_) if known else []
    return None if values is None else list(zip(values[::2], values[1::2], strict=True))


def _decode(stored: list[bytes], physical: int, type_: pa.DataType) -> list[Any] | None:
    """Return values that a footer holds; None if this type's are not ordered as Python orders them, or Python has no such date."""
    try:
        if pa.types.is_decimal(type_):
            order: Literal["little", "big"] = "little" if physical in _NUMBERS else "big"
            return [Decimal(f"{int.from_bytes(each, order, signed=True)}E{-type_.scale}") for each in stored]
        if pa.types.is_string(type_) or pa.types.is_large_string(type_):
            return [each.decode() for each in stored]
        if pa.types.is_boolean(type_):
            return [each != b"\0" for each in stored]
        if physical not in _NUMBERS:
            return None
        numbers = pa.Array.from_buffers(_NUMBERS[physical], len(stored), [None, pa.py_buffer(b"".join(stored))])
        return (numbers.view(type_) if type_.bit_width == numbers.type.bit_width else numbers.cast(type_)).to_pylist()  # type: ignore[no-any-return]
    except (pa.ArrowException, OverflowError, ValueError):
        return None
