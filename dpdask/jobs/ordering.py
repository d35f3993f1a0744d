"""The steward's warnings of tables that lie sorted by a private column: a row's place then tells its value."""

from __future__ import annotations

from dpdask.engine.told import Told
from dpdask.io.fragments import InputTable
from dpdask.io.ranges import row_group_ranges
from dpdask.jobs.spec import Job
from dpdask.stats.order import ColumnOrder


def sorted_warnings(job: Job, told: Told, n_shards: int) -> tuple[str, ...]:
    """Return what to warn of after a run: the private columns that lay sorted in the input, as the rows themselves told.

    Parameters
    ----------
    job
        The job.
    told
        What its writing tasks saw.
    n_shards
        How many shards were released; rows of a single one are shuffled all together.
    """
    found = [name for name, order in told.order.items() if order.is_sorted]
    private = [name for name in found if name in job.schema.privatised]
    places = [f"column {name!r} lies sorted in the input: {_place(job)}" for name in private if job.kind.order == "keep" or n_shards > 1]
    numbers = [
        f"the kept column {kept!r} lies sorted in the input, as does {name!r}: it tells each row's place, and so about what its {name!r} was, "
        "however rows are ordered; drop it, or shuffle the table and number its rows anew"
        for name in private
        for kept in found
        if kept in job.schema.kept
    ]
    return (*places, *numbers)


def footer_warnings(job: Job, table: InputTable) -> tuple[str, ...]:
    """Return what to warn of before a run: the private columns whose ranges follow one another from row group to row group.

    Footers alone are read. Where one has no statistics of a column, nothing is said of it.

    Raises
    ------
    InputError
        If a file is missing or unreadable.
    """
    if job.kind.order is None or len(table.fragments) < 2:
        return ()
    found = row_group_ranges(table, job.schema.privatised)
    parts = {name: [ColumnOrder.of_range(low, high) for low, high in ranges] for name, ranges in found.items()}
    in_order = [name for name, ranges in parts.items() if ColumnOrder.identity().merge(*ranges).is_sorted]
    return tuple(f"the ranges of column {name!r} follow one another from row group to row group of the input: {_place(job)}" for name in in_order)


def _place(job: Job) -> str:
    """Return what a row's place tells of a sorted column, and the hint."""
    if job.kind.order == "keep":
        return "its place tells about what a row's value was, whatever the noise; set output.order: shuffled, or shuffle the table before the run"
    return "rows of one shard had similar values, and its released values together tell about which; shuffle the table before the run"
