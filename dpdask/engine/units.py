"""How many rows of each unit are released: one pass over the source, whose result every worker reads."""

from __future__ import annotations

import dataclasses
from itertools import chain
from typing import Any

from dask._task_spec import DataNode, List, Task, TaskRef

from dpdask.engine.compute import Progress, Stage, add_tree, guard, make_whole_stage, run_stage, task_prefix
from dpdask.engine.select import Hasher
from dpdask.engine.source import Part, Source
from dpdask.engine.work import TableWork, keep
from dpdask.io.encrypted import BOUNDS_NAME
from dpdask.stats.bounding import UnitBounds, UnitRows
from dpdask.stats.statistic import FAN_IN, TreeFold

_STAGE = "units"


def bound_units(source: Source, work: TableWork, progress: Progress | None = None) -> TableWork:
    """Return the work with its units' bounds computed and kept beside the run key; unchanged if the unit is a row.

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
    stage = _plan(source, work)
    found = list(chain.from_iterable(run_stage(stage, progress)))
    bounds = UnitBounds.concatenate(found) if found else UnitRows.identity(1).bounds()  # no row group at all
    sha256 = keep(work.secrets, BOUNDS_NAME, bounds.to_bytes())
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
    work = work.hold_keys()
    assert work.unit is not None
    hasher = Hasher(work.key(), work.holdout_key(), work.unit, part.number)
    fold = TreeFold[UnitRows]()
    fold.add(UnitRows.identity(work.unit.max_rows))
    for batch in part.read(rows, work, released=False):
        hashes = hasher.hash(batch)
        fold.add(UnitRows.of_batch(work.unit.max_rows, hashes.units, hashes.rows, hashes.positions))
    return fold.result()


def _plan(source: Source, work: TableWork) -> Stage:
    """Return the tasks that compute the units' bounds.

    Each range of the units' hashes is merged in a tree of its own, so that no worker holds all units, and the driver gets
    only bounds.
    """
    prefix, shared, parts = task_prefix(_STAGE), task_prefix("work"), source.parts
    leaves = [f"{prefix}-{number}" for number in range(len(parts))]
    nodes = dict(source.nodes or {})
    nodes |= {key: Task(key, collect_unit_rows, *given, TaskRef(shared)) for key, given in zip(leaves, parts, strict=True)}
    n_ranges = 4
    while n_ranges < min(64, len(leaves) // 16):
        n_ranges *= 2
    groups = [List(*map(TaskRef, leaves[start : start + FAN_IN])) for start in range(0, len(leaves), FAN_IN)]
    name, merging, end = task_prefix("part"), task_prefix("merge"), task_prefix("bounds")
    ends = [f"{end}-{place}" for place in range(n_ranges)] if leaves else []
    for place, key in enumerate(ends):
        merged = [f"{name}-{place}-{number}" for number in range(len(groups))]
        nodes |= {each: Task(each, merge_range, group, place, n_ranges) for each, group in zip(merged, groups, strict=True)}
        nodes[key] = Task(key, find_bounds, TaskRef(add_tree(nodes, merged, merge_units, f"{merging}-{place}")))
    return make_whole_stage(_STAGE, nodes, ends, DataNode(shared, work))


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
    first, *others = (rows.select_part(place, n_ranges) for rows in parts)
    return first.merge(*others)


@guard
def find_bounds(rows: UnitRows) -> UnitBounds:
    """Return the bounds of one range of a whole table's units."""
    return rows.bounds()


@guard
def merge_units(parts: list[UnitRows]) -> UnitRows:
    """Return the unit statistic of neighbours together."""
    return parts[0].merge(*parts[1:])
