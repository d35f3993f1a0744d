"""The smallest and largest values of row groups, from the statistics in Parquet footers: private values that stay on the driver."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any

from dpdask.io import parquet
from dpdask.io.faults import storage_faults
from dpdask.io.filesystems import open_filesystem
from dpdask.io.footer import Ranges, find_ranges
from dpdask.io.fragment import Fragment
from dpdask.io.fragments import InputTable
from dpdask.io.threads import map_files

_FIRST_FILES = 64


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


def _of_file(file: Fragment, columns: Collection[str]) -> dict[str, Ranges | None]:
    fs, path = open_filesystem(file.url)
    with storage_faults(file.name):
        footer = parquet.footer(fs, path, file.name, None if file.layout is None else file.layout.n_file_bytes)
    renamed, absent = dict(file.renamed), dict(file.constants)
    held = {name: renamed.get(name, name) for name in columns if name not in absent}
    ranges = find_ranges(footer, set(held.values()))
    return {name: ranges[held[name]] if name in held else None for name in columns}
