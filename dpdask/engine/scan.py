"""One pass over a source: counts a statistic on workers and merges it in a tree; exact and private, for the driver alone."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count, cycle
from typing import Any, Generic

import numpy as np
import pyarrow as pa
from dask._task_spec import List

from dpdask.archive import Archive
from dpdask.engine.compute import Progress, guard, make_stage, run_stage
from dpdask.engine.select import Chooser
from dpdask.engine.source import Part, Source
from dpdask.engine.work import TableWork
from dpdask.errors import InputError, TemporaryError
from dpdask.io.encrypted import EncryptedFile
from dpdask.stats.leaves import list_leaves, replace_leaves
from dpdask.stats.statistic import FAN_IN, Statistic, TreeFold, Value
from dpdask.streams import Streams
from dpdask.versions import Stamp

_TASK_ROWS = 2**20  # a task costs some milliseconds of the scheduler and its worker, as long as it takes to count 100,000 rows
_LEAST_TASKS = 32  # of a table, so that workers end together
KEEP_SECONDS = 30.0
_KEEP_SHARE = 0.05  # of the driver's time
_MOST_KEPT = 2**28  # bytes
_ARCHIVE = Archive(kind="counts of a pass", format=2, noun="count")


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
    source: Source,
    work: TableWork,
    statistic: Statistic[Value],
    stage: str,
    progress: Progress | None = None,
    *,
    released: bool = False,
    kept_as: str | None = None,
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
    kept_as
        The name of the file that keeps what was counted so far, if the pass is one of a run that can be resumed.

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
    file = None if kept_as is None or not source.is_lasting else work.open_counts(kept_as)
    joined = _Joined(statistic, len(groups), file, _count_public(source, work), list(work.codecs))
    made = make_stage(stage, scan_parts, arguments, shared, merge_scanned, least=FAN_IN, nodes=nodes, n_batches_done=joined.n_batches)
    for found in run_stage(made, progress):
        joined.add(found)
    return joined.result()


def _count_public(source: Source, work: TableWork) -> int | None:
    """Return how many rows a table has, if files in a store may be so long as if each were another; 0 if the number is unknown or private."""
    sizes = [part.n_rows for part, _ in source.parts]
    if work.secrets.is_local:
        return None  # nobody else can list the folder
    return 0 if work.n_rows_private or None in sizes else sum(size or 0 for size in sizes)


class _Joined(Generic[Value]):
    """The results of the first batches of a pass together; what parts have of their own is collected, not merged again and again.

    Parameters
    ----------
    statistic
        What is counted.
    n_tasks
        How many tasks the pass has.
    file
        Keeps the results of a pass that takes long. What an earlier driver of the run kept there is the beginning.
    n_rows
        As `_count_public` returns it.
    columns
        The private columns.
    """

    def __init__(self, statistic: Statistic[Value], n_tasks: int, file: EncryptedFile | None, n_rows: int | None, columns: list[str]) -> None:
        self._template, self._n_tasks, self._file, self._n_rows, self._columns = statistic.counter().result(), n_tasks, file, n_rows, columns
        self._due = time.monotonic() + KEEP_SECONDS
        self.n_batches, self._fold = 0, TreeFold[Value]()
        self._n_released, self._seals, self._changed = list[int](), list[bytes](), Counter[str]()
        if file is not None and (kept := file.read()) is not None:
            with suppress(InputError):  # of another form: the rows are counted again
                _ARCHIVE.unpack(kept, file.name, self._begin)

    def add(self, found: Sequence[Scanned[Value]]) -> None:
        """Take the results of the next batches."""
        for part in found:
            self._fold.add(part.value)
            self._n_released += part.n_released
            self._seals += part.seals
            self._changed += Counter(part.changed)
        self.n_batches += len(found)
        if self._file is not None and time.monotonic() >= self._due:
            self._keep(self._file)

    def result(self) -> Scanned[Value]:
        """Return the results of all batches."""
        value = self._fold.tree()
        return Scanned(value=value, n_released=tuple(self._n_released), seals=tuple(self._seals), changed=dict(self._changed))

    def _keep(self, file: EncryptedFile) -> None:
        """Keep the results, unless they are very large, of arrays that no file can hold, or the storage fails: the pass goes on without them."""
        begin = time.monotonic()
        with suppress(TypeError, ValueError, TemporaryError):
            leaves = [leaf for level in self._fold.levels for value in level for leaf in list_leaves(value, self._template)]
            room = self._find_room(leaves)
            if sum(leaf.nbytes for leaf in leaves) + room <= _MOST_KEPT:
                header = {"n_tasks": self._n_tasks, "n_batches": self.n_batches, "levels": [len(level) for level in self._fold.levels]}
                numbers = {"n_released": self._n_released, "changed": [self._changed[name] for name in self._columns]}
                arrays = {name: np.array(each, dtype=np.int64) for name, each in numbers.items()}  # of one length, whatever the numbers are
                arrays |= {f"leaf-{number}": leaf for number, leaf in enumerate(leaves)}
                data = _ARCHIVE.pack({**header, "seals": [seal.hex() for seal in self._seals]}, arrays)
                file.write(data, len(data) + room)
        end = time.monotonic()
        self._due = end + max(KEEP_SECONDS, (end - begin) / _KEEP_SHARE)

    def _find_room(self, leaves: list[Any]) -> int:
        """Return by how many bytes the leaves that grow with what is found, as distinct values do, could be longer if each row were another."""
        nothing = list(list_leaves(self._template, self._template))
        if self._n_rows is None or all(leaf.size for leaf in nothing):
            return 0
        found = sum(leaf.nbytes for leaf, empty in zip(leaves, cycle(nothing), strict=False) if not empty.size)
        width = sum(leaf.itemsize * math.prod(leaf.shape[1:]) for leaf in nothing if not leaf.size)
        return width * self._n_rows - found if self._n_rows else _MOST_KEPT + 1

    def _begin(self, header: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
        """Begin with what was kept."""
        if header["n_tasks"] != self._n_tasks:
            raise ValueError
        leaves = (arrays[f"leaf-{number}"] for number in count())
        levels = [[replace_leaves(self._template, leaves) for _ in range(n)] for n in header["levels"]]
        seals, changed = [bytes.fromhex(seal) for seal in header["seals"]], Counter(dict(zip(self._columns, arrays["changed"].tolist(), strict=True)))
        self.n_batches, self._n_released, self._fold = header["n_batches"], arrays["n_released"].tolist(), TreeFold(levels)
        self._seals, self._changed = seals, changed


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
    counter = shared.statistic.counter()
    n_released, seals, changed = [], list[bytes](), Counter[str]()
    for part, own in zip(parts, rows, strict=True):
        work = shared.work.hold_keys()
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
    """Return the parts of each task: as many neighbours as have enough rows to be worth a task. They depend on the table alone."""
    most = rows_per_task or max(1, min(_TASK_ROWS, sum(part.n_rows or 0 for part, _ in parts) // _LEAST_TASKS))
    groups: list[list[tuple[Part, Any]]] = []
    taken = 0
    for part, own in parts:
        size = most if part.n_rows is None else part.n_rows
        if not groups or taken + size > most:
            groups.append([])
            taken = 0
        groups[-1].append((part, own))
        taken += size
    return groups
