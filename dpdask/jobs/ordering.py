"""Warnings for the steward about tables that are sorted by a private column: the position of a row then reveals its value."""

from __future__ import annotations

from dpdask.engine.told import Told
from dpdask.io.footer import Ranges
from dpdask.io.fragments import InputTable
from dpdask.io.ranges import row_group_ranges
from dpdask.jobs.spec import Job
from dpdask.stats.order import ColumnOrder


def list_sorted_warnings(job: Job, told: Told, n_shards: int) -> tuple[str, ...]:
    """Return the warnings after a run: about private columns that were sorted in the input, as the rows showed.

    Parameters
    ----------
    job
        The job.
    told
        What its writing tasks found.
    n_shards
        How many shards were released; if there is only one, all rows are shuffled together.
    """
    found = [name for name, order in told.order.items() if order.is_sorted]
    private = [name for name in found if name in job.schema.privatised]
    places = [f"column {name!r} is sorted in the input: {_place(job)}" for name in private if job.order == "keep" or n_shards > 1]
    numbers = [
        f"the kept column {kept!r} is sorted in the input, and so is {name!r}: {kept!r} reveals the position of each row, and so roughly its "
        f"{name!r}, in whatever order rows are released; drop the column, or shuffle the table and renumber its rows"
        for name in private
        for kept in found
        if kept in job.schema.kept
    ]
    return (*places, *numbers)


def list_footer_warnings(job: Job, table: InputTable) -> tuple[str, ...]:
    """Return the warnings before a run: about private columns by which the row groups of the input are sorted.

    Only footers are read. If a footer has no statistics for a column, there is no warning about it.

    Parameters
    ----------
    job
        The job.
    table
        Its input.

    Raises
    ------
    InputError
        If a file is missing or unreadable.
    """
    if job.order is None or len(table.fragments) < 2:
        return ()
    found = row_group_ranges(table, job.schema.privatised, lambda ranges: not _order(ranges).is_mixed)
    in_order = [name for name, ranges in found.items() if _order(ranges).is_sorted]
    return tuple(f"the row groups of the input are sorted by column {name!r}: {_place(job)}" for name in in_order)


def _order(ranges: Ranges) -> ColumnOrder:
    return ColumnOrder.identity().merge(*(ColumnOrder.of_range(low, high) for low, high in ranges))


def list_partition_warnings(job: Job, table: InputTable) -> tuple[str, ...]:
    """Return the warnings about private columns by which the input is partitioned: all rows of a file have the same value.

    Parameters
    ----------
    job
        The job.
    table
        Its input.
    """
    if job.order is None or len(table.fragments) < 2:
        return ()
    constant = {name for fragment in table.fragments for name, _ in fragment.constants}
    return tuple(
        f"the files of the input hold one value of column {name!r} each: {_place(job)}" for name in job.schema.privatised if name in constant
    )


def _place(job: Job) -> str:
    """Return what the order of the rows reveals about a sorted column, and the hint."""
    if job.order == "keep":
        return "a row's position reveals roughly what its value was, whatever the noise; set output.order: shuffled, or shuffle the table first"
    return "the rows of one shard had similar values, and their released values together reveal roughly which; shuffle the table before the run"
