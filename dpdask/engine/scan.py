"""One pass over a source: counts a statistic on workers and merges it in a tree; exact and private, for the driver alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic

import pyarrow as pa
from dask._task_spec import List

from dpdask.engine.compute import Progress, guard, make_stage, run_stage
from dpdask.engine.select import Chooser
from dpdask.engine.source import Part, Source
from dpdask.engine.work import TableWork
from dpdask.stats.statistic import FAN_IN, Statistic, TreeFold, Value
from dpdask.streams import Streams
from dpdask.versions import Stamp


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """What every task of a scan needs: one node of the graph, however many tasks there are.

    Attributes
    ----------
    work
        The work on the table.
    statistic
        What is counted.
    released
        Whether the rows are released later: then they are sealed now, and which of them are released is kept.
    """

    work: TableWork
    statistic: Statistic[Any]
    released: bool

    @property
    def stamp(self) -> Stamp:
        """A worker with other versions refuses the work."""
        return self.work.stamp


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)  # Dask logs the arguments of a task that failed
class Scanned(Generic[Value]):
    """What one pass finds; private, and kept by the driver.

    Attributes
    ----------
    value
        The statistic.
    n_released
        For each part, in order, how many of its rows are released: those within their units' bounds that are not held out.
    seals
        The seal of each part, if the parts are files whose rows are released, and the unit is the row.
    changed
        For each column, how many values were outside its domain and were changed. It lists only columns with such values, and
        is empty if the rows are released later: the writing stage counts them.
    """

    value: Value
    n_released: tuple[int, ...]
    seals: tuple[bytes, ...] = ()
    changed: Mapping[str, int] = field(default_factory=dict)


def scan(
    source: Source, work: TableWork, statistic: Statistic[Value], stage: str, progress: Progress | None = None, *, released: bool = False
) -> Scanned[Value]:
    """Return a statistic of a source's rows: the reference rows, or all within their units' bounds if none are held out.

    Parameters
    ----------
    source
        The table.
    work
        The work on it.
    statistic
        What is counted.
    stage
        A name for the progress and the tasks.
    progress
        Called with (stage, done, total).
    released
        As for `Scan`.

    Raises
    ------
    DataError
        If a value violates the schema, or a row's unit is null.
    InputError
        If a file is missing, unreadable, or changed.
    """
    groups = _groups(source.parts, statistic.rows_per_task)
    if not groups:
        return Scanned(value=statistic.counter().result(), n_released=())
    nodes = source.nodes
    pack: Callable[..., Any] = list if nodes is None else lambda rows: List(*rows)  # a list of tasks' names is a node of its own
    arguments = [([part for part, _ in group], pack([rows for _, rows in group])) for group in groups]
    shared = Scan(work=work, statistic=statistic, released=released)
    found = run_stage(make_stage(stage, scan_parts, arguments, shared, merge_scanned, least=FAN_IN, nodes=nodes), progress)
    return _join(found)


def _join(found: Iterable[Scanned[Value]]) -> Scanned[Value]:
    """Return the results of all batches together; what parts have of their own is collected, not merged again and again."""
    fold = TreeFold[Value]()
    n_released, seals, changed = list[int](), list[bytes](), Counter[str]()
    for part in found:
        fold.add(part.value)
        n_released += part.n_released
        seals += part.seals
        changed += Counter(part.changed)
    return Scanned(value=fold.tree(), n_released=tuple(n_released), seals=tuple(seals), changed=dict(changed))


@guard
def scan_parts(parts: list[Part], rows: list[Any], shared: Scan) -> Scanned[Any]:
    """Return the statistic of neighbouring parts.

    Parameters
    ----------
    parts
        The parts.
    rows
        The rows of each; None for a file, which the task reads itself.
    shared
        What all tasks of the scan share.
    """
    work, counter = shared.work, shared.statistic.counter()
    n_released, seals, changed = [], list[bytes](), Counter[str]()
    for part, own in zip(parts, rows, strict=True):
        chooser, streams = Chooser(work, part.id, part.number), Streams(work.key, part.id)
        n_rows = 0
        for batch in part.read(own, work, released=shared.released, seals=seals):
            released, chosen = chooser.split(batch)
            n_rows += int(released.sum())
            counter.add(batch, chosen, streams)
            changed += Counter() if shared.released else _count_changed(batch, work)
        n_released.append(n_rows)
        if shared.released:
            chooser.keep()
    return Scanned(value=counter.result(), n_released=tuple(n_released), seals=tuple(seals), changed=dict(changed))


@guard
def merge_scanned(parts: list[Scanned[Any]]) -> Scanned[Any]:
    """Return the statistic of neighbouring tasks together."""
    first, *others = (part.value for part in parts)
    changed = sum((Counter(part.changed) for part in parts), Counter[str]())
    n_released = tuple(n for part in parts for n in part.n_released)
    seals = tuple(seal for part in parts for seal in part.seals)
    return Scanned(value=first.merge(*others), n_released=n_released, seals=seals, changed=dict(changed))


def _count_changed(batch: pa.RecordBatch, work: TableWork) -> Counter[str]:
    """Return how many values of each privatised column are outside its domain and are changed: private."""
    found = {name: codec.n_outside(batch.column(name)) for name, codec in work.codecs.items()}
    return Counter({name: n for name, n in found.items() if n})


def _groups(parts: Sequence[tuple[Part, Any]], rows_per_task: int | None) -> list[list[tuple[Part, Any]]]:
    """Return the parts of each task: one, or for statistics that are large to merge, enough rows."""
    groups: list[list[tuple[Part, Any]]] = []
    taken = 0
    for part, own in parts:
        size = rows_per_task if part.n_rows is None else part.n_rows
        if not groups or rows_per_task is None or size is None or taken + size > rows_per_task:
            groups.append([])
            taken = 0
        groups[-1].append((part, own))
        taken += size or 0
    return groups
