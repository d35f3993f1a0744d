"""The smallest and largest values of row groups, from the statistics in Parquet footers: private values that stay on the driver."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from dpdask.io import parquet
from dpdask.io.faults import storage_faults
from dpdask.io.filesystems import open_filesystem
from dpdask.io.fragment import Fragment
from dpdask.io.fragments import InputTable
from dpdask.io.threads import map_files

_FIRST_FILES = 64

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
        _, metadata = parquet.footer(fs, path, file.name, None if file.layout is None else file.layout.n_file_bytes)
    places = {metadata.schema.column(place).path: place for place in range(metadata.num_columns)}
    constants, renamed = dict(file.constants), dict(file.renamed)
    return {column: None if column in constants else _of_column(metadata, places.get(renamed.get(column, column))) for column in columns}


def _of_column(metadata: Any, place: int | None) -> Ranges | None:
    found: Ranges = []
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        statistics = group.column(place).statistics if place is not None else None
        if statistics is not None and statistics.has_min_max:
            try:
                low, high = statistics.min, statistics.max
            except (OverflowError, ValueError):  # dates and times beyond those of Python
                return None
            if isinstance(low, bytes):  # half floats are returned as bytes, which sort differently
                return None
            found.append((low, high))
        elif group.num_rows and (statistics is None or statistics.null_count != group.num_rows):
            return None
    return found
