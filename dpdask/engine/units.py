"""How many rows of each unit are released: one pass over the source, whose result every worker reads."""

from __future__ import annotations

import dataclasses
from typing import Any

from dask import delayed

from dpdask.engine.compute import Progress, guard, run_tasks, task_prefix, tree_reduce
from dpdask.engine.select import Hasher
from dpdask.engine.source import Part, Source
from dpdask.engine.work import BOUNDS_NAME, TableWork, keep
from dpdask.stats.bounding import UnitBounds, UnitRows
from dpdask.stats.statistic import FAN_IN, TreeFold

_STAGE = "units"


def bound_units(source: Source, work: TableWork, progress: Progress | None = None) -> TableWork:
    """Return the work with its units' bounds computed and written beside the run key; unchanged if the unit is a row.

    Parameters
    ----------
    source
        The table.
    work
        The work on it.
    progress
        Called with (stage, done, total).

    Raises
    ------
    DataError
        If a row's unit is null.
    InputError
        If a file is missing, unreadable, or changed.
    """
    if work.unit is None:
        return work
    prefix, call = task_prefix(_STAGE), delayed(collect_unit_rows, pure=False)
    shared = delayed(work, pure=False, traverse=False, name=task_prefix("work"))
    leaves = [call(part, rows, shared, dask_key_name=f"{prefix}-{number}") for number, (part, rows) in enumerate(source.parts)]
    sha256 = keep(work.secrets, BOUNDS_NAME, _bounds_of(leaves, progress).to_bytes())
    return dataclasses.replace(work, unit=dataclasses.replace(work.unit, bounds_sha256=sha256))


@guard
def collect_unit_rows(part: Part, rows: Any, work: TableWork) -> UnitRows:
    """Return the unit statistic of one part, and seal it: bounds hold only for the rows from which they were made.

    Parameters
    ----------
    part
        The part.
    rows
        Its rows; None for a file, which the task reads itself.
    work
        The work on the table.
    """
    assert work.unit is not None
    hasher = Hasher(work.key(), work.holdout_key(), work.unit, part.number)
    fold = TreeFold[UnitRows]()
    fold.add(UnitRows.identity(work.unit.max_rows))
    for batch in part.read(rows, work, released=False):
        hashes = hasher.hash(batch)
        fold.add(UnitRows.of_batch(work.unit.max_rows, hashes.units, hashes.rows, hashes.positions))
    return fold.result()


def _bounds_of(leaves: list[Any], progress: Progress | None) -> UnitBounds:
    """Return the units' bounds from the delayed unit statistics of all parts.

    Each range of the units' hashes is merged in a tree of its own, so that no worker holds all units, and the driver gets
    only bounds.
    """
    if not leaves:  # a table without a single row group
        return UnitRows.identity(1).bounds()
    n_ranges = 4
    while n_ranges < min(64, len(leaves) // 16):
        n_ranges *= 2
    first, last = delayed(merge_range, pure=False), delayed(find_bounds, pure=False)
    groups = [leaves[start : start + FAN_IN] for start in range(0, len(leaves), FAN_IN)]
    name, end = task_prefix("part"), task_prefix("bounds")
    ends = []
    for place in range(n_ranges):
        merged = [first(group, place, n_ranges, dask_key_name=f"{name}-{place}-{number}") for number, group in enumerate(groups)]
        while len(merged) > FAN_IN:
            merged = [tree_reduce(merged[start : start + FAN_IN], _merge, task_prefix("merge")) for start in range(0, len(merged), FAN_IN)]
        ends.append(last(merged, dask_key_name=f"{end}-{place}"))
    return UnitBounds.concatenate(run_tasks(_STAGE, ends, progress))


@guard
def merge_range(parts: list[UnitRows], place: int, n_ranges: int) -> UnitRows:
    """Return the unit statistic of neighbouring parts for one range of the units' hashes.

    Parameters
    ----------
    parts
        The statistic of each part.
    place
        The number of the range.
    n_ranges
        The number of ranges.
    """
    return _merge([rows.select_part(place, n_ranges) for rows in parts])


@guard
def find_bounds(parts: list[UnitRows]) -> UnitBounds:
    """Return the bounds of one range of a whole table's units."""
    return _merge(parts).bounds()


def _merge(parts: list[UnitRows]) -> UnitRows:
    return parts[0].merge(*parts[1:])
