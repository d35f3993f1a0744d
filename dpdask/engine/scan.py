"""One pass over a source: counts a statistic on workers and merges it in a tree; exact and private, for the driver alone."""

from __future__ import annotations

import dataclasses
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, count, cycle
from typing import Any, Generic

import numpy as np
import pyarrow as pa
from dask._task_spec import DataNode, List, Task, TaskRef
from numpy.typing import NDArray

from dpdask.archive import Archive
from dpdask.engine.cluster import remember
from dpdask.engine.compute import (
    Progress,
    Stage,
    add_tree,
    guard,
    make_stage,
    make_whole_stage,
    run_stage,
    task_prefix,
)
from dpdask.engine.source import Part, Source
from dpdask.engine.work import TableWork, UnitWork, keep, read_kept
from dpdask.errors import DataError, InputError, TemporaryError
from dpdask.io.encrypted import BOUNDS_NAME, EncryptedFile
from dpdask.io.storage import Folder
from dpdask.kernels.hashing import siphash
from dpdask.kernels.rows import keep_chosen, take_at
from dpdask.stats.bounding import UnitBounds, UnitRows
from dpdask.stats.statistic import (
    FAN_IN,
    Statistic,
    TreeFold,
    Value,
    as_words,
    list_leaves,
    replace_leaves,
)
from dpdask.streams import Rng, RunKey, Streams, stream, words
from dpdask.versions import Stamp

Words = NDArray[np.uint64]
HOLDOUT_ID = "holdout"
_CHOSEN = "chosen"
_WORDS = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}  # by bits


def holdout_mask(rng: Rng, n_rows: int, fraction: float) -> NDArray[np.bool_]:
    """Return which of the next `n_rows` rows are held out, each with probability `fraction`, independently.

    Parameters
    ----------
    rng
        The fragment's stream of mechanism `holdout`; row r of the fragment owns its r-th word, so
        the split depends on the run key, the fragment and the position in it, and on nothing else.
    """
    return words(rng, n_rows) < np.uint64(int(fraction * 2**64))


@dataclass(frozen=True, slots=True, kw_only=True)
class Hashes:
    """The keyed hashes of some rows: uint64 arrays of one length."""

    units: Words
    held_units: Words
    rows: Words
    positions: Words


class Hasher:
    """Hashes the units and rows of one fragment, batch by batch.

    Parameters
    ----------
    holdout_key
        The key of the hold-out: the run's key, or one that several runs share.
    unit
        The unit's column, and the public columns that tell rows apart.
    """

    def __init__(self, key: RunKey, holdout_key: RunKey, unit: UnitWork, number: int) -> None:
        self._unit = unit
        self._unit_key = words(stream(key, "bounding/unit", ""), 2)
        self._row_key = words(stream(key, "bounding/row", ""), 2)
        self._held_unit_key = words(stream(holdout_key, "bounding/unit", ""), 2)
        self._holdout_key = words(stream(holdout_key, f"{HOLDOUT_ID}/unit", ""), 2)
        self._next = number << 32

    def hash(self, batch: pa.RecordBatch) -> Hashes:
        """Return the hashes of the next rows."""
        names = [self._unit.column, *self._unit.public]
        if batch.column(self._unit.column).null_count:
            raise DataError(
                "holds a null, and the unit of every row must be known",
                f"column {self._unit.column!r}",
                "fill it, or drop these rows",
            )
        columns = np.empty((batch.num_rows, len(names)), dtype=np.uint64)
        for place, name in enumerate(names):
            columns[:, place] = as_words(batch.column(name))
        positions = np.arange(self._next, self._next + batch.num_rows, dtype=np.uint64)
        self._next += batch.num_rows
        units = siphash(np.ascontiguousarray(columns[:, :1]), *self._unit_key)
        held = (
            units
            if np.array_equal(self._held_unit_key, self._unit_key)
            else siphash(np.ascontiguousarray(columns[:, :1]), *self._held_unit_key)
        )
        return Hashes(
            units=units, held_units=held, rows=siphash(columns, *self._row_key), positions=positions
        )

    def choose_held_out(self, hashes: Hashes, fraction: float) -> NDArray[np.bool_]:
        """Return which rows belong to a held-out unit."""
        drawn = siphash(hashes.held_units.reshape(-1, 1), *self._holdout_key)
        result: NDArray[np.bool_] = drawn < np.uint64(int(fraction * 2**64))
        return result


class Chooser:
    """Splits one fragment's rows, batch by batch and in order: a pure function of the run key and the fragment."""

    def __init__(self, work: TableWork, fragment_id: str, number: int) -> None:
        self._work, self.fragment_id = work, fragment_id
        self._rng = (
            stream(work.holdout_key(), HOLDOUT_ID, fragment_id)
            if work.fraction is not None and work.unit is None
            else None
        )
        self._hasher = (
            Hasher(work.key(), work.holdout_key(), work.unit, number)
            if work.unit is not None
            else None
        )
        self._split: list[NDArray[np.bool_]] = []

    def split(self, batch: Any) -> tuple[NDArray[np.bool_], NDArray[np.bool_] | None]:
        """Return which of the next rows are released, and which shape the reference (None: all that are in the bound)."""
        fraction = self._work.fraction
        if self._hasher is not None and self._work.unit is not None:
            hashes = self._hasher.hash(batch)
            within = load_bounds(self._work.secrets, self._work.unit.bounds_sha256).is_released(
                hashes.units, hashes.rows, hashes.positions
            )
            held_out = (
                self._hasher.choose_held_out(hashes, fraction)
                if fraction is not None
                else np.zeros(batch.num_rows, dtype=bool)
            )
            self._split.append(within & ~held_out)
            return self._split[-1], within if fraction is None else within & held_out
        if self._rng is None or fraction is None:
            return np.ones(batch.num_rows, dtype=bool), None
        mask = holdout_mask(self._rng, batch.num_rows, fraction)
        return ~mask, mask

    def keep(self) -> None:
        """Keep which rows are released beside the run key, so that the writing stage need not hash them again."""
        if self._hasher is not None:
            released = np.concatenate([*self._split, np.zeros(0, dtype=bool)])
            self._work.secrets.claim(
                f"{_CHOSEN}/{self._work.hide(self.fragment_id)}", np.packbits(released).tobytes()
            )

    def find_released(self) -> Callable[[Any], NDArray[np.bool_]]:
        """Return a function that tells, batch by batch, which rows are released: as kept, or computed anew."""
        name = f"{_CHOSEN}/{self._work.hide(self.fragment_id)}"
        if self._hasher is None or not self._work.secrets.exists(name):
            return lambda batch: self.split(batch)[0]
        bits = np.unpackbits(np.frombuffer(self._work.secrets.read(name), dtype=np.uint8)).view(
            bool
        )
        start = 0

        def read(batch: Any) -> NDArray[np.bool_]:
            nonlocal start
            start += batch.num_rows
            chosen: NDArray[np.bool_] = bits[start - batch.num_rows : start]
            if len(chosen) != batch.num_rows:
                raise InputError(
                    "the rows of a fragment changed since the run began",
                    None,
                    "restore it and run again, or `dpdask abort` the run",
                )
            return chosen

        return read


@remember(maxsize=2)
def load_bounds(secrets: Folder, sha256: str) -> UnitBounds:
    """Return the units' bounds, read once by each process and checked against their digest."""
    return UnitBounds.from_bytes(
        read_kept(
            secrets, BOUNDS_NAME, sha256, "the run's unit bounds are not those that were written"
        ),
        BOUNDS_NAME,
    )


def filter_rows(rows: pa.RecordBatch, chosen: NDArray[np.bool_]) -> pa.RecordBatch:
    """Return the chosen rows of a batch, in their order."""
    if chosen.all():
        return rows
    n_chosen, mask = int(chosen.sum()), pa.array(chosen)
    arrays = []
    for array in rows.columns:
        values = _view_words(array)
        if values is None:
            arrays.append(_by_plain_type(array, lambda plain: plain.filter(mask)))
        else:
            arrays.append(_as_array(keep_chosen(values, chosen, n_chosen), array.type))
    return pa.RecordBatch.from_arrays(arrays, schema=rows.schema)


def take_values(array: pa.Array, places: NDArray[np.uint32]) -> pa.Array:
    """Return the values at some places, in the order of the places."""
    values = _view_words(array)
    if values is None:
        return _by_plain_type(array, lambda plain: plain.take(pa.array(places)))
    return _as_array(take_at(values, places), array.type)


def _view_words(array: pa.Array) -> NDArray[np.unsignedinteger] | None:
    """Return the values of a column as unsigned integers of their width; None if it has nulls, or no fixed width of 8 to 64 bits."""
    dtype = (
        _WORDS.get(array.type.bit_width)
        if pa.types.is_primitive(array.type) and not array.null_count
        else None
    )
    return (
        None
        if dtype is None
        else np.frombuffer(array.buffers()[1], dtype=dtype)[
            array.offset : array.offset + len(array)
        ]
    )


def _as_array(values: NDArray[np.unsignedinteger], type_: pa.DataType) -> pa.Array:
    """Return the column that `_view_words` saw."""
    return pa.Array.from_buffers(type_, len(values), [None, pa.py_buffer(values)])


def _by_plain_type(array: pa.Array, select: Callable[[pa.Array], pa.Array]) -> pa.Array:
    """Return some values; Arrow selects none of its view types, so these take the way over plain ones."""
    plain = _plain(array.type)
    return select(array) if plain == array.type else select(array.cast(plain)).cast(array.type)


def _plain(type_: pa.DataType) -> pa.DataType:
    if pa.types.is_string_view(type_):
        return pa.large_string()
    if pa.types.is_binary_view(type_):
        return pa.large_binary()
    if pa.types.is_list(type_) or pa.types.is_large_list(type_):
        inner = type_.value_field.with_type(_plain(type_.value_type))
        return pa.list_(inner) if pa.types.is_list(type_) else pa.large_list(inner)
    return type_


_STAGE = "units"


def bound_units(source: Source, work: TableWork, progress: Progress | None = None) -> TableWork:
    """Return the work with its units' bounds computed and kept beside the run key; unchanged if the unit is a row."""
    if work.unit is None:
        return work
    stage = _plan(source, work)
    found = list(chain.from_iterable(run_stage(stage, progress)))
    bounds = (
        UnitBounds.concatenate(found) if found else UnitRows.identity(1).bounds()
    )  # no row group at all
    sha256 = keep(work.secrets, BOUNDS_NAME, bounds.to_bytes())
    return dataclasses.replace(work, unit=dataclasses.replace(work.unit, bounds_sha256=sha256))


@guard
def collect_unit_rows(part: Part, rows: Any, work: TableWork) -> UnitRows:
    """Return the unit statistic of one part, and seal it: bounds hold only for the rows from which they were made.

    Parameters
    ----------
    rows
        Its rows; None for a file, which the task reads itself.
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

    Each range of the units' hashes is merged in a tree of its own, so that no worker holds all
    units, and the driver gets only bounds.
    """
    prefix, shared, parts = task_prefix(_STAGE), task_prefix("work"), source.parts
    leaves = [f"{prefix}-{number}" for number in range(len(parts))]
    nodes = dict(source.nodes or {})
    nodes |= {
        key: Task(key, collect_unit_rows, *given, TaskRef(shared))
        for key, given in zip(leaves, parts, strict=True)
    }
    n_ranges = 4
    while n_ranges < min(64, len(leaves) // 16):
        n_ranges *= 2
    groups = [
        List(*map(TaskRef, leaves[start : start + FAN_IN]))
        for start in range(0, len(leaves), FAN_IN)
    ]
    name, merging, end = task_prefix("part"), task_prefix("merge"), task_prefix("bounds")
    ends = [f"{end}-{place}" for place in range(n_ranges)] if leaves else []
    for place, key in enumerate(ends):
        merged = [f"{name}-{place}-{number}" for number in range(len(groups))]
        nodes |= {
            each: Task(each, merge_range, group, place, n_ranges)
            for each, group in zip(merged, groups, strict=True)
        }
        nodes[key] = Task(
            key, find_bounds, TaskRef(add_tree(nodes, merged, merge_units, f"{merging}-{place}"))
        )
    return make_whole_stage(_STAGE, nodes, ends, DataNode(shared, work))


@guard
def merge_range(parts: list[UnitRows], place: int, n_ranges: int) -> UnitRows:
    """Return the unit statistic of neighbouring parts for one range of the units' hashes."""
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


_TASK_ROWS = (
    2**20
)  # a task costs some milliseconds of the scheduler and its worker, as long as it takes to count 100,000 rows
_LEAST_TASKS = 32  # of a table, so that workers end together
KEEP_SECONDS = 30.0
_KEEP_SHARE = 0.05  # of the driver's time
_MOST_KEPT = 2**28  # bytes
_ARCHIVE = Archive(kind="counts of a pass", format=2, noun="count")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """What every task of a scan needs: one node of the graph, however many tasks there are."""

    work: TableWork
    statistic: Statistic[Any]
    # Whether the rows are released later: then they are sealed now, and which of them are released
    # is kept.
    released: bool

    @property
    def stamp(self) -> Stamp:
        """A worker with other versions refuses the work."""
        return self.work.stamp


@dataclass(
    frozen=True, slots=True, kw_only=True, repr=False
)  # Dask logs the arguments of a task that failed
class Scanned(Generic[Value]):
    """What one pass finds; private, and kept by the driver."""

    value: Value
    # For each part, in order, how many of its rows are released: those within their units' bounds
    # that are not held out.
    n_released: tuple[int, ...]
    # The seal of each part, if the parts are files whose rows are released, and the unit is the
    # row.
    seals: tuple[bytes, ...] = ()
    # For each column, how many values were outside its domain and were changed. It lists only
    # columns with such values, and is empty if the rows are released later: the writing stage
    # counts them.
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
    kept_as
        The name of the file that keeps what was counted so far, if the pass is one of a run that
        can be resumed.
    """
    groups = _groups(source.parts, statistic.rows_per_task)
    if not groups:
        return Scanned(value=statistic.counter().result(), n_released=())
    nodes = source.nodes
    pack: Callable[..., Any] = (
        list if nodes is None else lambda rows: List(*rows)
    )  # a list of tasks' names is a node of its own
    arguments = [
        ([part for part, _ in group], pack([rows for _, rows in group])) for group in groups
    ]
    shared = Scan(work=work, statistic=statistic, released=released)
    file = None if kept_as is None or not source.is_lasting else work.open_counts(kept_as)
    joined = _Joined(statistic, len(groups), file, _count_public(source, work), list(work.codecs))
    made = make_stage(
        stage,
        scan_parts,
        arguments,
        shared,
        merge_scanned,
        least=FAN_IN,
        nodes=nodes,
        n_batches_done=joined.n_batches,
    )
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
    file
        Keeps the results of a pass that takes long. What an earlier driver of the run kept there is
        the beginning.
    """

    def __init__(
        self,
        statistic: Statistic[Value],
        n_tasks: int,
        file: EncryptedFile | None,
        n_rows: int | None,
        columns: list[str],
    ) -> None:
        self._template, self._n_tasks, self._file, self._n_rows, self._columns = (
            statistic.counter().result(),
            n_tasks,
            file,
            n_rows,
            columns,
        )
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
        return Scanned(
            value=value,
            n_released=tuple(self._n_released),
            seals=tuple(self._seals),
            changed=dict(self._changed),
        )

    def _keep(self, file: EncryptedFile) -> None:
        """Keep the results, unless they are very large, of arrays that no file can hold, or the storage fails: the pass goes on without them."""
        begin = time.monotonic()
        with suppress(TypeError, ValueError, TemporaryError):
            leaves = [
                leaf
                for level in self._fold.levels
                for value in level
                for leaf in list_leaves(value, self._template)
            ]
            room = self._find_room(leaves)
            if sum(leaf.nbytes for leaf in leaves) + room <= _MOST_KEPT:
                header = {
                    "n_tasks": self._n_tasks,
                    "n_batches": self.n_batches,
                    "levels": [len(level) for level in self._fold.levels],
                }
                numbers = {
                    "n_released": self._n_released,
                    "changed": [self._changed[name] for name in self._columns],
                }
                arrays = {
                    name: np.array(each, dtype=np.int64) for name, each in numbers.items()
                }  # of one length, whatever the numbers are
                arrays |= {f"leaf-{number}": leaf for number, leaf in enumerate(leaves)}
                data = _ARCHIVE.pack(
                    {**header, "seals": [seal.hex() for seal in self._seals]}, arrays
                )
                file.write(data, len(data) + room)
        end = time.monotonic()
        self._due = end + max(KEEP_SECONDS, (end - begin) / _KEEP_SHARE)

    def _find_room(self, leaves: list[Any]) -> int:
        """Return by how many bytes the leaves that grow with what is found, as distinct values do, could be longer if each row were another."""
        nothing = list(list_leaves(self._template, self._template))
        if self._n_rows is None or all(leaf.size for leaf in nothing):
            return 0
        found = sum(
            leaf.nbytes
            for leaf, empty in zip(leaves, cycle(nothing), strict=False)
            if not empty.size
        )
        width = sum(leaf.itemsize * math.prod(leaf.shape[1:]) for leaf in nothing if not leaf.size)
        return width * self._n_rows - found if self._n_rows else _MOST_KEPT + 1

    def _begin(self, header: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
        """Begin with what was kept."""
        if header["n_tasks"] != self._n_tasks:
            raise ValueError
        leaves = (arrays[f"leaf-{number}"] for number in count())
        levels = [
            [replace_leaves(self._template, leaves) for _ in range(n)] for n in header["levels"]
        ]
        seals, changed = (
            [bytes.fromhex(seal) for seal in header["seals"]],
            Counter(dict(zip(self._columns, arrays["changed"].tolist(), strict=True))),
        )
        self.n_batches, self._n_released, self._fold = (
            header["n_batches"],
            arrays["n_released"].tolist(),
            TreeFold(levels),
        )
        self._seals, self._changed = seals, changed


@guard
def scan_parts(parts: list[Part], rows: list[Any], shared: Scan) -> Scanned[Any]:
    """Return the statistic of neighbouring parts.

    Parameters
    ----------
    rows
        The rows of each; None for a file, which the task reads itself.
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
    return Scanned(
        value=counter.result(),
        n_released=tuple(n_released),
        seals=tuple(seals),
        changed=dict(changed),
    )


@guard
def merge_scanned(parts: list[Scanned[Any]]) -> Scanned[Any]:
    """Return the statistic of neighbouring tasks together."""
    first, *others = (part.value for part in parts)
    changed = sum((Counter(part.changed) for part in parts), Counter[str]())
    n_released = tuple(n for part in parts for n in part.n_released)
    seals = tuple(seal for part in parts for seal in part.seals)
    return Scanned(
        value=first.merge(*others), n_released=n_released, seals=seals, changed=dict(changed)
    )


def _count_changed(batch: pa.RecordBatch, work: TableWork) -> Counter[str]:
    """Return how many values of each privatised column are outside its domain and are changed: private."""
    found = {name: codec.n_outside(batch.column(name)) for name, codec in work.codecs.items()}
    return Counter({name: n for name, n in found.items() if n})


def _groups(
    parts: Sequence[tuple[Part, Any]], rows_per_task: int | None
) -> list[list[tuple[Part, Any]]]:
    """Return the parts of each task: as many neighbours as have enough rows to be worth a task. They depend on the table alone."""
    most = rows_per_task or max(
        1, min(_TASK_ROWS, sum(part.n_rows or 0 for part, _ in parts) // _LEAST_TASKS)
    )
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
