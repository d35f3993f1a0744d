"""The writing stage of any release: each task draws its rows or records and stages their shards. It is idempotent."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, field, replace
from itertools import chain, count, pairwise
from operator import itemgetter
from typing import Any, Self, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dpdask.arrays import Ints, freeze_class
from dpdask.engine.compute import Progress, guard, make_stage, run_stage
from dpdask.engine.partitions import write_partitions
from dpdask.engine.scan import Chooser, filter_rows, take_values
from dpdask.engine.source import FilePart
from dpdask.engine.work import TableWork, load
from dpdask.errors import InputError
from dpdask.io.filesystems import report_change
from dpdask.io.fragment import Fragment, estimate_width, group_rows
from dpdask.io.shards import TABLE_FOLDER, Shard, ShardWriter, number_key
from dpdask.io.storage import Folder
from dpdask.kernels.hashing import permutation
from dpdask.mechanisms.mechanism import Columns, LinkedRelease, RecordRelease, RowRelease
from dpdask.privacy.events import RowOrder
from dpdask.stats.statistic import ColumnOrder
from dpdask.streams import Rng, RunKey, stream, words

ROWS_ID, SHARDS_ID = "order/rows", "order/shards"
WINDOW_ROWS = 2**20
WINDOW_BYTES = 2**27
HELD_BYTES = WINDOW_BYTES
_MOST_READ = 4
_HEAD = 2**10
_REPORT_BYTES = 2**9  # the longest report of a column
_TOGETHER = 2**17  # records that a release draws together, or a multiple of them


# private, so without a repr: Dask logs the arguments of a failed task
@freeze_class(repr=False)
class Told:
    """A report to the steward on the rows before they were randomised; reports are merged in the order of the rows.

    Privacy
    -------
    Exact, and covered by no ε: shown to the steward, and stored only in the run's private folder,
    which the commit removes.
    """

    # For each private column, how many values were outside its domain and were changed as the
    # schema says. A column that is not listed had none.
    changed: Mapping[str, int] = field(default_factory=dict)
    # The order of the values in each private or kept column. A column that is not listed was not
    # checked.
    order: Mapping[str, ColumnOrder] = field(default_factory=dict)

    def merge(self, *others: Self) -> Self:
        """Return the result for this one's rows followed by the others' rows."""
        changed, order = Counter(self.changed), dict(self.order)
        for other in others:
            changed += Counter(other.changed)
            for name, following in other.order.items():
                order[name] = order.get(name, ColumnOrder.identity()).merge(following)
        return type(self)(changed=dict(changed), order=order)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for the run's private records."""
        order = {name: asdict(order) for name, order in self.order.items()}
        return {"changed": dict(self.changed), "order": order}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Self:
        """Return the object from the result of `to_dict`, after it was stored as JSON."""
        order = {}
        for name, given in content["order"].items():
            ends = {key: given[key] and tuple(given[key]) for key in ("first", "last")}
            order[name] = ColumnOrder(**{**given, **ends})
        changed = {name: int(count) for name, count in content["changed"].items()}
        return cls(changed=changed, order=order)


class Teller:
    """Collects the report to the steward on one task's rows, batch by batch and in order."""

    def __init__(self, columns: Columns) -> None:
        self._codecs = columns.codecs
        self._ranks: dict[str, Ints] = {}
        for name, codec in columns.codecs.items():
            if codec.has_levels:
                # of each code, in the natural order of the levels, by which files are sorted
                levels = codec.levels.to_pylist()
                known = sorted(level for level in levels if level is not None)
                places = {level: rank for rank, level in enumerate(known)} | {None: -1}
                self._ranks[name] = np.array([places[level] for level in levels])
        self._order = {
            field.name: ColumnOrder.identity()
            for field in columns.types
            if field.name in columns.codecs or _is_number(field.type)
        }
        self._changed = Counter[str]()

    def add(self, rows: pa.RecordBatch) -> None:
        """Look at the next released rows before they are randomised."""
        for name, codec in self._codecs.items():
            self._changed[name] += codec.n_outside(rows.column(name))
        for name in self._order:
            array = rows.column(name)
            for part in (array.slice(0, _HEAD), array.slice(_HEAD)):
                order = self._order[name]
                # most columns are mixed after a few rows, and later rows cannot change that
                if not order.is_mixed and len(part):
                    self._order[name] = order.merge(ColumnOrder.of_batch(self._numbers(name, part)))

    def _numbers(self, name: str, array: pa.Array) -> NDArray[Any]:
        """Return a column's non-null values as numbers in the same order: texts as their rank among the levels."""
        codec = self._codecs.get(name)
        if codec is not None and codec.has_levels:
            ranks = self._ranks[name][codec.encode(array)]
            return ranks[ranks >= 0]
        if codec is not None:
            values, is_null = codec.encode(array)
            return values[~is_null]
        array = array.dictionary_decode() if pa.types.is_dictionary(array.type) else array
        if pa.types.is_temporal(array.type):
            array = array.cast(pa.int32() if array.type.bit_width == 32 else pa.int64())
        return np.asarray(array.drop_null().to_numpy(zero_copy_only=False))

    @property
    def told(self) -> Told:
        """The report on all rows so far."""
        return Told(changed=dict(+self._changed), order=dict(self._order))


def _is_number(type_: pa.DataType) -> bool:
    temporal = pa.types.is_temporal(type_) and not pa.types.is_interval(type_)
    return bool(pa.types.is_integer(type_) or pa.types.is_floating(type_) or temporal)


@freeze_class
class RowTask:
    """One task of the writing stage: neighbouring fragments, and the shards that they become."""

    fragments: tuple[Fragment, ...]
    n_released: tuple[int, ...] = field(repr=False)  # Dask logs the arguments of a task that failed
    names: tuple[str, ...]  # the shards, in order; all but the last hold `rows_per_shard` rows
    rows_per_shard: int
    # How many rows are shuffled at a time, a multiple of whole shards; None if rows keep their
    # order.
    window: int | None = None

    @property
    def number(self) -> int:
        """The place of the first fragment in the table."""
        return self.fragments[0].number

    def open(
        self, release: RowRelease, work: TableWork, teller: Teller
    ) -> tuple[Iterable[pa.RecordBatch], pa.Schema, Collection[str]]:
        """Return the batches that are written, their types, and which columns have few distinct values."""
        rows = shuffle_rows(self._randomise(release, work, teller), self, work.key())
        types = work.add_weight(release.types(work.released))
        return rows, types, release.few_valued(work.view.own)

    def _randomise(
        self, release: RowRelease, work: TableWork, teller: Teller
    ) -> Iterator[pa.RecordBatch]:
        """Yield the fragments' released rows, in order: a pure function of the run key, the release and the fragments.

        At the end of each fragment it is refused if it changed since it was first read; then none
        of the rows may be kept.
        """
        types = work.add_weight(release.types(work.released))
        for fragment, expected in zip(self.fragments, self.n_released, strict=True):
            held, n_rows = work.hold_keys(), 0
            rngs = release.streams(held.key(), fragment.id)
            chooser = Chooser(held, fragment.id, fragment.number)
            find_released = chooser.find_released()
            for batch in FilePart(fragment).read_all(held):
                chosen = find_released(batch)
                rows = filter_rows(batch.select(work.read.names), chosen)
                teller.add(rows)
                n_rows += rows.num_rows
                seen = release.randomise(work.view.read(rows), work.codecs, rngs)
                random = work.view.write(seen)
                if (weights := chooser.weigh(batch)) is not None:
                    columns = [*random.columns, pa.array(weights[chosen])]
                    names = [*random.schema.names, types.names[-1]]
                    random = pa.RecordBatch.from_arrays(columns, names=names)
                yield random.cast(types)
            if n_rows != expected:
                raise report_change(fragment.where)


def lay_out(
    fragments: tuple[Fragment, ...], n_released: tuple[int, ...], rows_per_shard: int
) -> list[RowTask]:
    """Return the writing tasks: neighbours share a shard while they fit, and a large fragment is cut into several.

    Where most rows are not released (a bound on units), a task reads at most four times
    `rows_per_shard` rows all the same, so that the work stays spread.

    Parameters
    ----------
    fragments, n_released
        The fragments in the order of the rows, and how many rows of each are released.
    """
    groups: list[list[int]] = []
    room = taken = 0
    for index, rows in enumerate(n_released):
        read = max(rows, fragments[index].n_rows or 0)
        if not groups or rows > room or taken + read > _MOST_READ * rows_per_shard:
            groups.append([])
            room, taken = rows_per_shard, 0
        groups[-1].append(index)
        room, taken = room - rows, taken + read
    tasks: list[RowTask] = []
    first = 0
    for group in groups:
        sizes = tuple(n_released[index] for index in group)
        if sum(sizes) == 0 and len(groups) > 1:
            continue
        end = first + max(1, -(-sum(sizes) // rows_per_shard))
        task = RowTask(
            fragments=tuple(fragments[index] for index in group),
            n_released=sizes,
            names=tuple(_name_shard(number) for number in range(first, end)),
            rows_per_shard=rows_per_shard,
        )
        tasks.append(task)
        first = end
    return tasks


def _name_shard(number: int) -> str:
    return f"part-{number:05d}.parquet"


def lay_out_rows(
    fragments: tuple[Fragment, ...],
    n_released: tuple[int, ...],
    rows_per_shard: int,
    released: pa.Schema,
    order: RowOrder,
    key: RunKey,
) -> list[RowTask]:
    """Return the writing tasks of a release row by row, in the order of their shards.

    Privacy
    -------
    If rows are shuffled, a keyed permutation assigns the shards' numbers and orders the tasks: a
    shard's name does not reveal where in the table its rows were. Its size can: the last rows of a
    table fill a shard only in part.
    """
    if order == "keep":
        return lay_out(fragments, n_released, rows_per_shard)
    per_shard = limit_shard_rows(released, rows_per_shard, order)
    tasks = lay_out(fragments, n_released, per_shard)
    names = [name for task in tasks for name in task.names]
    places = iter(permutation(words(stream(key, SHARDS_ID, ""), len(names))).tolist())
    n_window = min(WINDOW_ROWS, WINDOW_BYTES // estimate_row_bytes(released))
    window = per_shard * max(1, n_window // per_shard)
    shuffled = []
    for task in tasks:
        shuffled_names = tuple(names[next(places)] for _ in task.names)
        shuffled.append(replace(task, names=shuffled_names, window=window))
    return sorted(shuffled, key=lambda task: number_key(task.names[0]))


def limit_shard_rows(released: pa.Schema, rows_per_shard: int, order: RowOrder) -> int:
    """Return the most rows of a shard: as the job says, but if rows are shuffled, at most the rows that are shuffled at once."""
    if order == "keep":
        return rows_per_shard
    return max(1, min(rows_per_shard, WINDOW_BYTES // estimate_row_bytes(released)))


def estimate_row_bytes(released: pa.Schema) -> int:
    """Estimate the bytes that a row takes in memory from its types alone; texts, lists and the like count 64 bytes."""
    return sum(max(1, int(estimate_width(type_))) for type_ in released.types) or 1


def shuffle_rows(
    batches: Iterable[pa.RecordBatch], task: RowTask, key: RunKey
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a writing task in the order of its shards: in the order of the input, or shuffled window by window.

    Notes
    -----
    A window has `task.window` rows, which are whole shards, so the rows of a shard are in random
    order. A window ends earlier only if it reaches 128 MiB because of long texts. The permutation
    is a function of the run key, the task's first fragment and the number of rows before.
    """
    if task.window is None:
        yield from batches
        return
    rng = stream(key, ROWS_ID, task.fragments[0].id)
    for held in group_rows(batches, task.window, HELD_BYTES):
        yield from _permute(held, rng)


def _permute(held: list[pa.RecordBatch], rng: Rng) -> Iterator[pa.RecordBatch]:
    """Yield the rows of batches in random order; column by column, and the list of batches is emptied, to free memory."""
    types, n_rows = held[0].schema, sum(batch.num_rows for batch in held)
    columns = pa.Table.from_batches(held).columns
    held.clear()
    order = permutation(words(rng, n_rows))
    taken = []
    while columns:
        taken.append(take_values(pa.concat_arrays(columns.pop(0).chunks), order))
    yield pa.record_batch(taken, types)


# without a repr: Dask logs the arguments of a failed task
@freeze_class(repr=False)
class Staged:
    """The shards that one writing task, or all of them, staged."""

    shards: tuple[Shard, ...]  # the shards in the staging folder, sorted by name
    # What to print on the steward's terminal, if rows were read. Private.
    told: Told = field(default_factory=Told)


@freeze_class
class Staging:
    """Where the writing tasks of a run put shards, and their records."""

    # The folder of the shards: hidden until a rename publishes it, or the output itself, in a
    # store.
    shards: Folder
    actions: Folder  # the folder of the tasks' records. Private
    # Put into the names of files that are written where they will stay; empty if they are hidden.
    run: str = ""
    # The kept columns of which each shard has one combination of values, and whether the names of
    # folders hold these, or a table's log.
    partition_by: tuple[str, ...] = ()
    in_folders: bool = False

    def place(self, name: str) -> str:
        """Return the name under which a file is written: of a shard, given the name by which its random streams are known."""
        return add_run(name, self.run) if self.run else name


def add_run(name: str, run: str) -> str:
    """Return a file's name with that of a run in it."""
    stem, _, suffix = name.rpartition(".")
    return f"{stem}-{run}.{suffix}"


@freeze_class
class RecordTask:
    """One shard of records."""

    number: int
    start: int  # the number of its first record in the release
    n_rows: int
    n_total: int

    @property
    def names(self) -> tuple[str, ...]:
        """The name of the shard."""
        return (_name_shard(self.number),)

    @property
    def rows_per_shard(self) -> int:
        """How many records it has, at least 1."""
        return max(1, self.n_rows)

    def open(
        self, release: RecordRelease, work: TableWork, teller: Teller
    ) -> tuple[Iterable[pa.RecordBatch], pa.Schema, Collection[str]]:
        """Return the records; see `RowTask.open`."""
        del teller
        drawn = self.start, self.n_rows, self.n_total, work.key(), self.names[0]
        return release.batches(*drawn), release.types, release.few_valued


@freeze_class
class PersonTask:
    """Neighbouring blocks of persons, whose rows stand together in a shard of each table."""

    number: int
    blocks: tuple[int, int]  # the first, and the first of the next task
    n_total: int  # persons of all tasks

    @property
    def names(self) -> tuple[str, ...]:
        """The name of the shard in each table's folder."""
        return (_name_shard(self.number),)

    def stage(self, release: LinkedRelease, work: TableWork, staging: Staging) -> Staged:
        """Draw the persons with their rows and write them as one shard of each table."""
        writers: dict[str, ShardWriter] = {}
        try:
            for table, types in release.tables.items():
                place = staging.place(f"{TABLE_FOLDER}={table}/{self.names[0]}")
                few = release.few_valued
                writers[table] = ShardWriter(staging.shards, place, types, few, new=True)
            for block in range(*self.blocks):
                for table, rows in release.draw_block(block, self.n_total, work.key()).items():
                    writers[table].write(rows)
            shards = [writer.close() for writer in writers.values()]
        except BaseException as error:
            for writer in writers.values():
                writer.discard(error)
            raise
        return _record_staged(shards, self.names[0], staging, Told())


Task: TypeAlias = RowTask | RecordTask | PersonTask


def list_person_tasks(
    n_persons: int, rows_per_shard: int, per_person: int, block: int
) -> list[PersonTask]:
    """Return the tasks of persons: each of so many whole blocks that their rows fit into a shard, and of one at least."""
    n_blocks, size = max(1, -(-n_persons // block)), max(1, rows_per_shard // (block * per_person))
    return [
        PersonTask(number=number, blocks=(first, min(first + size, n_blocks)), n_total=n_persons)
        for number, first in enumerate(range(0, n_blocks, size))
    ]


def list_record_tasks(n_rows: int, rows_per_shard: int) -> list[RecordTask]:
    """Return the tasks of n_rows records: as few as possible, as equal as possible; an empty one if there are no records.

    Where shards have room for it, they begin at a multiple of 2**17 records: those are drawn
    together.
    """
    n_tasks = max(1, -(-n_rows // rows_per_shard))
    for step in (_TOGETHER, 1):
        n_steps = -(-n_rows // step)
        starts = [*(number * n_steps // n_tasks * step for number in range(n_tasks)), n_rows]
        sizes = [end - start for start, end in pairwise(starts)]
        if max(sizes) <= rows_per_shard and (min(sizes) > 0 or n_rows == 0):
            break
    return [
        RecordTask(number=number, start=starts[number], n_rows=size, n_total=n_rows)
        for number, size in enumerate(sizes)
    ]


@freeze_class
class Writing:
    """What every writing task needs."""

    work: TableWork
    sha256: str
    release_type: type[Any]
    staging: Staging


@guard
def write_shards(task: Task, writing: Writing) -> list[tuple[int, Staged]]:
    """Stage a task's shards and record them; if they are staged already, only check them. Return them with the task's number."""
    work, staging = writing.work, writing.staging
    staged = read_recorded(task.names[0], staging)
    if staged is None:
        teller, release = (
            Teller(Columns(types=work.read, codecs=work.view.own)),
            load(work.secrets, writing.sha256, writing.release_type),
        )
        if isinstance(task, PersonTask):
            return [(task.number, task.stage(release, work, staging))]
        batches, types, few_valued = task.open(release, work, teller)
        staged = stage(
            *(batches, types, few_valued, task.names, task.rows_per_shard, staging),
            lambda: teller.told,
        )
    return [(task.number, staged)]


@guard
def join_staged(parts: list[list[tuple[int, Staged]]]) -> list[tuple[int, Staged]]:
    """Return what several tasks staged."""
    return [each for part in parts for each in part]


def stage(
    batches: Iterable[pa.RecordBatch],
    types: pa.Schema,
    few_valued: Collection[str],
    names: Sequence[str],
    rows_per_shard: int,
    staging: Staging,
    told: Callable[[], Told] = Told,
) -> Staged:
    """Write batches as shards of at most `rows_per_shard` rows, and record them when all are whole.

    Parameters
    ----------
    batches
        The rows; if they fail, the shard that was being written is discarded.
    names
        The shards, as many as the rows need, at least one.
    told
        Called when all batches are written; returns what to tell the steward about their rows.
    """
    by, rest = staging.partition_by, iter(names)
    if by:
        stem = names[0].removesuffix(".parquet")
        rest = (f"{stem}-p{number:05d}.parquet" for number in count())
    shards = write_partitions(
        *(batches, types, few_valued, by, rows_per_shard),
        *(staging.shards, map(staging.place, rest)),
        in_folders=bool(by) and staging.in_folders,
        new=bool(by or staging.run),
    )
    return _record_staged(shards, names[0], staging, told())


def _record_staged(shards: Sequence[Shard], name: str, staging: Staging, told: Told) -> Staged:
    """Record that a task, named by its first shard, has staged all of them."""
    staged = Staged(shards=tuple(shards), told=told)
    shown = [shard.to_dict() for shard in shards]
    # the record is of one length, whatever the report says
    names_bytes = sum(_REPORT_BYTES + 2 * len(json.dumps(name)) for name in staged.told.order)
    record = json.dumps({"shards": shown, "told": staged.told.to_dict()}).encode()
    padded = record.ljust(len(json.dumps(shown)) + names_bytes)
    staging.actions.write(_record(name), padded, private=True)
    return staged


def _record(first_name: str) -> str:
    return f"{first_name}.json"


def read_recorded(first_name: str, staging: Staging) -> Staged | None:
    """Return the record of the task whose first shard is named, if each of its shards is staged with the recorded digest."""
    try:
        content = json.loads(staging.actions.read(_record(first_name), replaced=True))
        shards = tuple(Shard(**shard) for shard in content["shards"])
        staged = Staged(shards=shards, told=Told.from_dict(content["told"]))
    except (InputError, ValueError, TypeError, KeyError, AttributeError):  # missing, or harmed
        return None
    for shard in shards:
        if not staging.shards.exists(shard.name):
            return None
        with staging.shards.open(shard.name) as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != shard.sha256:  # type: ignore[arg-type]  # fsspec's files have readinto
                return None
    return staged


def write_all(
    tasks: Sequence[Task],
    work: TableWork,
    sha256: str,
    release_type: type[Any],
    staging: Staging,
    progress: Progress | None = None,
) -> Staged:
    """Stage every shard of a release and return them by name, with what to tell the steward about all rows."""
    writing = Writing(work=work, sha256=sha256, release_type=release_type, staging=staging)
    stage_ = make_stage("write", write_shards, [(task,) for task in tasks], writing, join_staged)
    found = chain.from_iterable(chain.from_iterable(run_stage(stage_, progress)))
    # reports must be merged in the order of the table
    in_place = [staged for _, staged in sorted(found, key=itemgetter(0))]
    shards = chain.from_iterable(staged.shards for staged in in_place)
    by_number = sorted(shards, key=lambda shard: number_key(shard.name))
    report = Told().merge(*(staged.told for staged in in_place))
    return Staged(shards=tuple(by_number), told=report)
