"""One pass over a source: which rows are released or held out, and a statistic of them, merged in a tree.

Its result is exact and private: it is for the driver alone. If the unit is not the row, a pass before it bounds the rows of each unit.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import field
from itertools import chain, count, cycle
from typing import Any, Generic, NamedTuple

import numpy as np
import pyarrow as pa
from dask._task_spec import DataNode, List, Task, TaskRef
from numpy.typing import NDArray

from dpdask.archive import Archive
from dpdask.arrays import Flags, Floats, Uint32s, Words, freeze_class
from dpdask.engine.compute import (
    Batch,
    Progress,
    Stage,
    add_tree,
    guard,
    make_stage,
    make_whole_stage,
    remember,
    run_stage,
    task_prefix,
)
from dpdask.engine.source import LinkedSource, Part, Source
from dpdask.engine.work import TableWork, keep, read_kept
from dpdask.errors import DataError, InputError, TemporaryError
from dpdask.io.encrypted import EncryptedFile
from dpdask.io.storage import BOUNDS_NAME, Folder
from dpdask.kernels.hashing import siphash
from dpdask.stats.people import PersonCounts, PersonRows, PersonStatistic
from dpdask.stats.records import UnitBounds, UnitRows
from dpdask.stats.statistic import (
    FAN_IN,
    Statistic,
    TreeFold,
    Value,
    as_words,
    list_leaves,
    replace_leaves,
)
from dpdask.streams import Rng, Streams, stream, words

HOLDOUT_ID = "holdout"
_WORDS = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}  # by bits


def holdout_mask(rng: Rng, n_rows: int, fraction: float) -> Flags:
    """Return which of the next `n_rows` rows are held out, each with probability `fraction`, independently.

    Parameters
    ----------
    rng
        The fragment's stream of mechanism `holdout`; row r of the fragment owns its r-th word, so
        the split depends on the run key, the fragment and the position in it, and on nothing else.
    """
    return words(rng, n_rows) < np.uint64(int(fraction * 2**64))


class Hashes(NamedTuple):
    """The keyed hashes of some rows: uint64 arrays of one length."""

    units: Words
    held_units: Words  # of the units, by the key of the hold-out
    rows: Words
    positions: Words


class Hasher:
    """Hashes the units and rows of one part, batch by batch."""

    def __init__(self, work: TableWork, number: int) -> None:
        assert work.unit is not None
        self._unit = work.unit
        key, holdout_key = work.key(), work.holdout_key()  # the latter may be that of several runs
        self._unit_key, self._row_key, self._held_unit_key, self._holdout_key = (
            words(stream(*named, ""), 2)
            for named in (
                *((key, "bounding/unit"), (key, "bounding/row")),
                *((holdout_key, "bounding/unit"), (holdout_key, f"{HOLDOUT_ID}/unit")),
            )
        )
        self._next = number << 32

    def hash(self, batch: pa.RecordBatch) -> Hashes:
        """Return the hashes of the next rows."""
        names = [self._unit.column, *self._unit.public]
        if batch.column(self._unit.column).null_count:
            what = "holds a null, and the unit of every row must be known"
            raise DataError(what, f"column {self._unit.column!r}", "fill it, or drop these rows")
        read = [as_words(batch.column(name)) for name in names]
        positions = np.arange(self._next, self._next + batch.num_rows, dtype=np.uint64)
        self._next += batch.num_rows
        if self._unit.weight is not None:
            # weights are right for rows that are drawn one by one, also among those that are alike
            read.append(positions)
        columns = np.stack(read, axis=1)
        unit = np.ascontiguousarray(columns[:, :1])
        held = units = siphash(unit, *self._unit_key)
        if not np.array_equal(self._held_unit_key, self._unit_key):
            held = siphash(unit, *self._held_unit_key)
        rows = siphash(columns, *self._row_key)
        return Hashes(units=units, held_units=held, rows=rows, positions=positions)

    def hash_units(self, batch: pa.RecordBatch) -> Words:
        """Return the hashes of the units of some rows."""
        found: Words = siphash(as_words(batch.column(self._unit.column))[:, None], *self._unit_key)
        return found

    def choose_held_out(self, hashes: Hashes, fraction: float) -> Flags:
        """Return which rows belong to a held-out unit."""
        drawn = siphash(hashes.held_units.reshape(-1, 1), *self._holdout_key)
        result: Flags = drawn < np.uint64(int(fraction * 2**64))
        return result


class Chooser:
    """Splits one part's rows, batch by batch and in order: a pure function of the run key and the part."""

    def __init__(self, work: TableWork, part_id: str, number: int) -> None:
        self._work, self._part_id = work, part_id
        self._hasher = None if work.unit is None else Hasher(work, number)
        self._rng: Rng | None = None
        if work.unit is None and work.fraction is not None:
            self._rng = stream(work.holdout_key(), HOLDOUT_ID, part_id)
        self._split: list[Flags] = []

    def split(self, batch: Any) -> tuple[Flags, Flags | None]:
        """Return which of the next rows are released, and which shape the reference (None: all that are in the bound)."""
        fraction = self._work.fraction
        if self._hasher is not None:
            hashes = self._hasher.hash(batch)
            bounds = load_bounds(self._work.secrets, self._work.bounds_sha256)
            shaping = within = bounds.is_released(hashes.units, hashes.rows, hashes.positions)
            released = within
            if fraction is not None:
                held_out = self._hasher.choose_held_out(hashes, fraction)
                released, shaping = within & ~held_out, within & held_out
            self._split.append(released)
            return released, shaping
        if self._rng is None or fraction is None:
            return np.ones(batch.num_rows, dtype=bool), None
        mask = holdout_mask(self._rng, batch.num_rows, fraction)
        return ~mask, mask

    def weigh(self, batch: pa.RecordBatch) -> Floats | None:
        """Return how many rows of the table each row of a batch stands for if it is released; None if that is not published."""
        unit = self._work.unit
        if self._hasher is None or unit is None or unit.weight is None:
            return None
        bounds = load_bounds(self._work.secrets, self._work.bounds_sha256)
        return bounds.weigh(self._hasher.hash_units(batch), unit.max_rows)

    @property
    def _name(self) -> str:
        """The name of the private file that keeps which rows are released."""
        return f"chosen/{self._work.hide(self._part_id)}"

    def keep(self) -> None:
        """Keep which rows are released beside the run key, so that the writing stage need not hash them again."""
        if self._hasher is not None:
            released = np.concatenate([*self._split, np.zeros(0, dtype=bool)])
            self._work.secrets.claim(self._name, np.packbits(released).tobytes())

    def find_released(self) -> Callable[[Any], Flags]:
        """Return a function that tells, batch by batch, which rows are released: as kept, or computed anew."""
        if self._hasher is None or not self._work.secrets.exists(self._name):
            return lambda batch: self.split(batch)[0]
        data = np.frombuffer(self._work.secrets.read(self._name), dtype=np.uint8)
        bits, start = np.unpackbits(data).view(bool), 0

        def read(batch: Any) -> Flags:
            nonlocal start
            chosen: Flags = bits[start : start + batch.num_rows]
            start += batch.num_rows
            if len(chosen) != batch.num_rows:
                what = "the rows of a fragment changed since the run began"
                raise InputError(what, None, "restore it and run again, or `dpdask abort` the run")
            return chosen

        return read


@remember(maxsize=2)
def load_bounds(secrets: Folder, sha256: str) -> UnitBounds:
    """Return the units' bounds, read once by each process and checked against their digest."""
    what = "the run's unit bounds are not those that were written"
    return UnitBounds.from_bytes(read_kept(secrets, BOUNDS_NAME, sha256, what), BOUNDS_NAME)


def filter_rows(rows: pa.RecordBatch, chosen: Flags) -> pa.RecordBatch:
    """Return the chosen rows of a batch, in their order."""
    if chosen.all():
        return rows
    mask = pa.array(chosen)
    arrays = []
    for array in rows.columns:
        values = _view_words(array)
        if values is None:
            arrays.append(_by_plain_type(array, lambda plain: plain.filter(mask)))
        else:
            arrays.append(_as_array(values.compress(chosen), array.type))
    return pa.RecordBatch.from_arrays(arrays, schema=rows.schema)


def take_values(array: pa.Array, places: Uint32s) -> pa.Array:
    """Return the values at some places, in the order of the places."""
    values = _view_words(array)
    if values is None:
        return _by_plain_type(array, lambda plain: plain.take(pa.array(places)))
    return _as_array(values.take(places), array.type)


def _view_words(array: pa.Array) -> NDArray[np.unsignedinteger] | None:
    """Return the values of a column as unsigned integers of their width; None if it has nulls, or no fixed width of 8 to 64 bits."""
    if array.null_count or not pa.types.is_primitive(array.type):
        return None
    dtype = _WORDS.get(array.type.bit_width)
    if dtype is None:
        return None
    return np.frombuffer(array.buffers()[1], dtype=dtype)[array.offset : array.offset + len(array)]


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


def bound_units(source: Source, work: TableWork, progress: Progress | None = None) -> TableWork:
    """Return the work with its units' bounds computed and kept beside the run key; unchanged if the unit is a row."""
    if work.unit is None:
        return work
    counted = work.unit.weight is not None
    bounds = UnitRows.identity(1, counted=counted).bounds()  # of no row group at all
    if found := list(chain.from_iterable(run_stage(_plan_bounds(source, work), progress))):
        bounds = UnitBounds.concatenate(found)
    sha256 = keep(work.secrets, BOUNDS_NAME, bounds.to_bytes())
    return dataclasses.replace(work, unit=dataclasses.replace(work.unit, bounds_sha256=sha256))


@guard
def collect_unit_rows(part: Part, rows: Any, work: TableWork) -> UnitRows:
    """Return the unit statistic of one part, and seal it: bounds hold only for the rows from which they were made."""
    work = work.hold_keys()
    assert work.unit is not None
    hasher, most, fold = Hasher(work, part.number), work.unit.max_rows, TreeFold[UnitRows]()
    counted = work.unit.weight is not None
    fold.add(UnitRows.identity(most, counted=counted))
    for batch in part.read(rows, work, released=False):
        hashes = hasher.hash(batch)
        counts = np.ones(batch.num_rows, dtype=np.uint64) if counted else None
        fold.add(UnitRows.of_batch(most, hashes.units, hashes.rows, hashes.positions, counts))
    return fold.result()


def _plan_bounds(source: Source, work: TableWork) -> Stage:
    """Return the tasks that compute the units' bounds.

    Each range of the units' hashes is merged in a tree of its own, so that no worker holds all
    units, and the driver gets only bounds.
    """
    # Dask groups tasks by the words of their names: see `task_prefix`
    prefixes = map(task_prefix, ("units", "work", "part", "merge", "bounds"))
    prefix, shared, name, merging, end = prefixes
    parts, nodes = source.parts, dict(source.nodes or {})
    leaves = [f"{prefix}-{number}" for number in range(len(parts))]
    for key, arguments in zip(leaves, parts, strict=True):
        nodes[key] = Task(key, collect_unit_rows, *arguments, TaskRef(shared))
    n_ranges = 4
    while n_ranges < min(64, len(leaves) // 16):
        n_ranges *= 2
    starts = range(0, len(leaves), FAN_IN)
    groups = [List(*map(TaskRef, leaves[start : start + FAN_IN])) for start in starts]
    ends = [f"{end}-{place}" for place in range(n_ranges)] if leaves else []
    for place, key in enumerate(ends):
        merged = [f"{name}-{place}-{number}" for number in range(len(groups))]
        for each, group in zip(merged, groups, strict=True):
            nodes[each] = Task(each, merge_range, group, place, n_ranges)
        root = add_tree(nodes, merged, merge_parts, f"{merging}-{place}")
        nodes[key] = Task(key, find_bounds, TaskRef(root))
    return make_whole_stage("units", nodes, ends, DataNode(shared, work))


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
def merge_parts(parts: list[Any]) -> Any:
    """Return the unit statistic of neighbours, or the tables of several ranges of persons, together."""
    return parts[0].merge(*parts[1:])


# a task costs some milliseconds of the scheduler and its worker, as long as counting 100,000 rows
_TASK_ROWS = 2**20
_LEAST_TASKS = 32  # of a table, so that workers end together
KEEP_SECONDS = 30.0
_KEEP_SHARE = 0.05  # of the driver's time
_MOST_KEPT = 2**28  # bytes
_ARCHIVE = Archive(kind="counts of a pass", format=2, noun="count")


@freeze_class
class Scan:
    """What every task of a scan needs: one node of the graph, however many tasks there are."""

    work: TableWork
    statistic: Statistic[Any]
    # Whether the rows are released later: then they are sealed now, and which of them are released
    # is kept.
    released: bool = False


# without a repr, since Dask logs the arguments of a task that failed
@freeze_class(repr=False)
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
    number: int | None = None,
) -> Scanned[Value]:
    """Return a statistic of a source's rows: the reference rows, or all within their units' bounds if none are held out.

    Parameters
    ----------
    number
        The round of the pass, if it is one of a run that can be resumed: the name of the file that
        keeps the counts so far.
    """
    asked: Any = statistic
    if isinstance(asked, PersonStatistic):
        return _scan_persons(source, work, asked, stage, progress)
    groups, nodes = _groups(source.parts, statistic.rows_per_task), source.nodes
    if not groups:
        return Scanned(value=statistic.counter().result(), n_released=())
    # of a frame, the rows are names of tasks, and a list of these is a node of its own
    arguments: list[tuple[list[Part], Any]] = []
    for group in groups:
        parts, rows = (list(each) for each in zip(*group, strict=True))
        arguments.append((parts, rows if nodes is None else List(*rows)))
    kept = number is not None and source.is_lasting
    file = work.open_counts(number or 0) if kept else None
    joined = _Joined(statistic, len(groups), file, _count_public(source, work), list(work.view.own))
    stage_ = make_stage(
        *(stage, scan_parts, arguments),
        Scan(work=work, statistic=statistic, released=released),
        merge_scanned,
        least=FAN_IN,
        nodes=nodes,
        n_batches_done=joined.n_batches,
    )
    for found in run_stage(stage_, progress):
        joined.add(found)
    return joined.result()


_MOST_RANGES = 256


def _scan_persons(
    source: Source,
    work: TableWork,
    statistic: PersonStatistic,
    stage: str,
    progress: Progress | None,
) -> Scanned[Any]:
    """Return the tables of persons: their rows meet in ranges of the persons' hashes, each of which one task counts.

    Notes
    -----
    Workers hold the codes of all rows together, 8 bytes a row and 1 or 2 for each column. A range is
    held by one worker while it is counted.
    """
    # Dask groups tasks by the words of their names: see `task_prefix`
    cut, end, merging, telling, shared = map(
        task_prefix, ("cut", "persons", "merge", "told", "work")
    )
    whole: Any = statistic
    nodes: dict[Any, Any] = {}
    carried = {shared: DataNode(shared, Scan(work=work, statistic=whole))}
    tables: list[tuple[Source, TableWork, Any]] = [(source, work, statistic.rows)]
    if isinstance(source, LinkedSource):
        of_rows, of_persons = source.open_tables(work)
        tables = [
            (source.rows, of_rows, statistic.rows),
            (source.persons, of_persons, statistic.persons),
        ]
    read = [_add_readers(nodes, carried, *table, stage) for table in tables]
    leaves = list(chain.from_iterable(read))
    told = [f"{telling}-{number}" for number in range(len(leaves))]
    for key, leaf in zip(told, leaves, strict=True):
        nodes[key] = Task(key, tell_changed, TaskRef(leaf))
    n_ranges = 1
    while n_ranges < min(_MOST_RANGES, len(leaves)):
        n_ranges *= 2
    ends = [f"{end}-{place}" for place in range(n_ranges)]
    for place, key in enumerate(ends):
        pieces: list[Any] = []
        for leaf in leaves:
            piece = f"{cut}-{place}-{len(nodes)}"
            nodes[piece] = Task(piece, cut_rows, TaskRef(leaf), place, n_ranges)
            pieces.append(TaskRef(piece))
        of_table = pieces[: len(read[0])], pieces[len(read[0]) :]
        nodes[key] = Task(key, count_range, *(List(*each) for each in of_table), TaskRef(shared))
    keys = [add_tree(nodes, ends, merge_parts, merging)]
    keys += [add_tree(nodes, told, merge_changed, f"{merging}-told")] if told else []
    made = Stage(
        name=stage,
        batches=[Batch(nodes=nodes, keys=keys, steps=[*leaves, *ends])],
        n_steps=len(leaves) + len(ends),
        shared=carried,
    )
    counts, *changed = chain.from_iterable(run_stage(made, progress))
    return Scanned(value=counts, n_released=(), changed=dict(*changed))


def _add_readers(
    nodes: dict[Any, Any],
    carried: dict[str, DataNode],
    source: Source,
    work: TableWork,
    statistic: Any,
    stage: str,
) -> list[str]:
    """Add tasks that read the rows of a table, and return their names."""
    prefix, shared = task_prefix(stage), task_prefix("work")
    carried[shared] = DataNode(shared, Scan(work=work, statistic=statistic))
    leaves = list[str]()
    for group in _groups(source.parts, None):
        parts, rows = (list(each) for each in zip(*group, strict=True))
        leaves.append(f"{prefix}-{len(leaves)}")
        nodes[leaves[-1]] = Task(leaves[-1], scan_parts, parts, rows, TaskRef(shared))
    return leaves


@guard
def cut_rows(rows: Scanned[PersonRows], place: int, n_ranges: int) -> PersonRows:
    """Return the rows of one range of persons."""
    return rows.value.select_part(place, n_ranges)


@guard
def count_range(rows: list[PersonRows], persons: list[PersonRows], shared: Scan) -> PersonCounts:
    """Return the tables of one range of persons, all of whose rows are here."""
    statistic: Any = shared.statistic
    found: PersonCounts = statistic.count(rows, persons, shared.work.key())
    return found


@guard
def tell_changed(rows: Scanned[PersonRows]) -> Counter[str]:
    """Return how many values were outside their domains."""
    return Counter(rows.changed)


@guard
def merge_changed(parts: list[Counter[str]]) -> Counter[str]:
    """Return the numbers of several tasks together."""
    return sum(parts, Counter[str]())


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
        self._template, self._n_tasks = statistic.counter().result(), n_tasks
        self._file, self._n_rows, self._columns = file, n_rows, columns
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
        return Scanned(
            value=self._fold.tree(),
            n_released=tuple(self._n_released),
            seals=tuple(self._seals),
            changed=dict(self._changed),
        )

    def _keep(self, file: EncryptedFile) -> None:
        """Keep the results, unless they are very large, of arrays that no file can hold, or the storage fails: the pass goes on without them."""
        begin = time.monotonic()
        with suppress(TypeError, ValueError, TemporaryError):
            levels = self._fold.levels
            leaves = [
                leaf
                for value in chain.from_iterable(levels)
                for leaf in list_leaves(value, self._template)
            ]
            room = self._find_room(leaves)
            if sum(leaf.nbytes for leaf in leaves) + room <= _MOST_KEPT:
                header = {
                    "n_tasks": self._n_tasks,
                    "n_batches": self.n_batches,
                    "levels": [len(level) for level in levels],
                    "seals": [seal.hex() for seal in self._seals],
                }
                changed = [self._changed[name] for name in self._columns]
                numbers = {"n_released": self._n_released, "changed": changed}
                # as arrays they are of one length, whatever the numbers are
                arrays = {name: np.array(each, dtype=np.int64) for name, each in numbers.items()}
                arrays |= {f"leaf-{number}": leaf for number, leaf in enumerate(leaves)}
                data = _ARCHIVE.pack(header, arrays)
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
        """Begin with the counts that were kept."""
        if header["n_tasks"] != self._n_tasks:
            raise ValueError
        leaves = (arrays[f"leaf-{number}"] for number in count())
        levels = [
            [replace_leaves(self._template, leaves) for _ in range(n)] for n in header["levels"]
        ]
        seals = [bytes.fromhex(seal) for seal in header["seals"]]
        changed = dict(zip(self._columns, arrays["changed"].tolist(), strict=True))
        n_released = arrays["n_released"].tolist()
        self.n_batches, self._n_released, self._seals = header["n_batches"], n_released, seals
        self._fold, self._changed = TreeFold(levels), Counter(changed)


@guard
def scan_parts(parts: list[Part], rows: list[Any], shared: Scan) -> Scanned[Any]:
    """Return the statistic of neighbouring parts. The rows of a file are None: the task reads them itself."""
    counter = shared.statistic.counter()
    n_released, seals, changed = [], list[bytes](), Counter[str]()
    for part, own in zip(parts, rows, strict=True):
        work = shared.work.hold_keys()
        chooser, streams = Chooser(work, part.id, part.number), Streams(work.key, part.id)
        n_rows = 0
        for batch in part.read(own, work, released=shared.released, seals=seals):
            released, chosen = chooser.split(batch)
            n_rows += int(released.sum())
            counter.add(work.view.read(batch), chosen, streams)
            for name, codec in () if shared.released else work.view.own.items():
                changed[name] += codec.n_outside(batch.column(name))
        n_released.append(n_rows)
        if shared.released:
            chooser.keep()
    return Scanned(
        value=counter.result(),
        n_released=tuple(n_released),
        seals=tuple(seals),
        changed=dict(+changed),
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


def _groups(
    parts: Sequence[tuple[Part, Any]], rows_per_task: int | None
) -> list[list[tuple[Part, Any]]]:
    """Return the parts of each task: as many neighbours as have enough rows to be worth a task. They depend on the table alone."""
    n_rows = sum(part.n_rows or 0 for part, _ in parts)
    most = rows_per_task or max(1, min(_TASK_ROWS, n_rows // _LEAST_TASKS))
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
