"""One pass over a table for the joint histogram of its private columns: exact counts, merged in a tree, for the driver alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import pandas as pd
import pyarrow as pa
from dask import delayed

from dpdask.engine.batches import FITTED
from dpdask.engine.choose import Chooser
from dpdask.engine.compute import Progress, guarded, run_tasks, task_prefix
from dpdask.engine.frames import Frame, batch_of, parts_of
from dpdask.engine.reduce import TreeFold, tree_reduce
from dpdask.engine.seal import check_part
from dpdask.engine.tabulate import changed_values, domain_of, encoded, sealed_batches
from dpdask.engine.work import TableWork
from dpdask.io.fragments import Fragment
from dpdask.stats.joint import JointCounts


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)  # Dask logs the arguments of a failed task
class JointlyCounted:
    """The counts of one pass; private, and kept by the driver.

    Attributes
    ----------
    counts
        The joint histogram.
    changed
        As in `Tabulated`.
    """

    counts: JointCounts
    changed: Mapping[str, int]


def count_batches(batches: Iterable[pa.RecordBatch], chooser: Chooser, work: TableWork) -> JointlyCounted:
    """Return the joint counts of the chosen rows of one fragment, and how many values in all its rows were changed.

    Raises
    ------
    DataError
        If a value violates the schema, or a row's unit is null.
    """
    domain = domain_of(work.cells)
    fold = TreeFold(_together)
    fold.add(nothing(work))
    for batch in batches:
        chosen, _ = chooser.split(batch)
        counts = JointCounts.of_codes(domain, encoded(batch, work.cells, domain, chosen))
        fold.add(JointlyCounted(counts=counts, changed=changed_values(batch, work)))
    return fold.result()


def nothing(work: TableWork) -> JointlyCounted:
    """Return the joint counts of no rows."""
    return JointlyCounted(counts=JointCounts.identity(domain_of(work.cells)), changed={})


@guarded
def count_fragment(fragment: Fragment, work: TableWork) -> JointlyCounted:
    """Return the joint counts of one fragment of files; with units, it is sealed."""
    return count_batches(sealed_batches(fragment, work), Chooser(work, fragment.id, fragment.number), work)


def _together(parts: list[JointlyCounted]) -> JointlyCounted:
    first, *others = (part.counts for part in parts)
    return JointlyCounted(counts=first.merge(*others), changed=sum((Counter(part.changed) for part in parts), Counter[str]()))


@guarded
def merge_counts(parts: list[JointlyCounted]) -> JointlyCounted:
    """Return the joint counts of neighbouring fragments together."""
    return _together(parts)


def joint_counts(fragments: tuple[Fragment, ...], work: TableWork, progress: Progress | None = None) -> JointlyCounted:
    """Return the joint counts of a whole table of files: one read of the privatised columns.

    Raises
    ------
    DataError
        If a value violates the schema.
    InputError
        If a file is missing, unreadable, or changed.
    """
    if not fragments:  # files without a single row group
        return nothing(work)
    prefix = task_prefix("tabulate")
    shared = delayed(work, pure=False, traverse=False, name=task_prefix("work"))
    call = delayed(count_fragment, pure=False)
    return _merged([call(fragment, shared, dask_key_name=f"{prefix}-{number}") for number, fragment in enumerate(fragments)], progress)


def joint_counts_of_frame(frame: Frame, work: TableWork) -> JointlyCounted:
    """Return the joint counts of a frame: the barrier.

    Raises
    ------
    DataError
        If a value violates the schema.
    """
    prefix, call = task_prefix("tabulate"), delayed(_count_part, pure=False)
    shared, parts = delayed(work, pure=False, traverse=False, name=task_prefix("work")), enumerate(parts_of(frame, FITTED))
    return _merged([call(part, fragment_id, number, shared, dask_key_name=f"{prefix}-{number}") for number, (fragment_id, part) in parts])


@guarded
def _count_part(part: pd.DataFrame, fragment_id: str, number: int, work: TableWork) -> JointlyCounted:
    if work.unit is not None:
        check_part(part, work.secrets, fragment_id)
    return count_batches([batch_of(part, [*work.codecs, *work.unit_columns], work.types)], Chooser(work, fragment_id, number), work)


def _merged(leaves: Sequence[object], progress: Progress | None = None) -> JointlyCounted:
    [result] = run_tasks("tabulate", [tree_reduce(leaves, merge_counts, task_prefix("merge"))], progress)
    assert isinstance(result, JointlyCounted)
    return result
