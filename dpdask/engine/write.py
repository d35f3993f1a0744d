"""The writing stage of any release: each task draws its rows or records and stages their shards. It is idempotent."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain, pairwise
from operator import itemgetter
from typing import Any, Protocol

import pyarrow as pa

from dpdask.engine.compute import Progress, guard, make_stage, run_stage
from dpdask.engine.told import Teller, Told
from dpdask.engine.work import TableWork, load
from dpdask.errors import InputError
from dpdask.io.shards import Shard, ShardWriter, number_key
from dpdask.io.storage import Folder
from dpdask.mechanisms.releases import RecordRelease
from dpdask.versions import Stamp

_TOLD_BYTES = 2**9  # the most that is told of a column
_TOGETHER = 2**17  # records that a release draws together, or a multiple of them


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)  # Dask logs the arguments of a failed task
class Staged:
    """The shards that one writing task, or all of them, staged.

    Attributes
    ----------
    shards
        The shards in the staging folder, sorted by name.
    told
        What to print on the steward's terminal, if rows were read. Private.
    """

    shards: tuple[Shard, ...]
    told: Told = field(default_factory=Told)


@dataclass(frozen=True, slots=True, kw_only=True)
class Staging:
    """Where the writing tasks of a run put shards, and their records.

    Attributes
    ----------
    shards
        The folder of the shards: hidden until a rename publishes it, or the output itself, in a store.
    actions
        The folder of the tasks' records. Private.
    run
        Put into the names of files that are written where they will stay; empty if they are hidden.
    """

    shards: Folder
    actions: Folder
    run: str = ""

    def place(self, name: str) -> str:
        """Return the name under which a file is written: of a shard, given the name by which its random streams are known."""
        return add_run(name, self.run) if self.run else name


def add_run(name: str, run: str) -> str:
    """Return a file's name with that of a run in it.

    Parameters
    ----------
    name
        The file's name.
    run
        Put before the last dot.
    """
    stem, _, suffix = name.rpartition(".")
    return f"{stem}-{run}.{suffix}"


class Task(Protocol):
    """What one task of the writing stage writes."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the shards, in order."""

    @property
    def rows_per_shard(self) -> int:
        """The most rows of a shard."""

    @property
    def number(self) -> int:
        """The task's place among those of the table."""

    def open(self, release: Any, work: TableWork, teller: Teller) -> tuple[Iterable[pa.RecordBatch], pa.Schema, Collection[str]]:
        """Return the batches that are written, their types, and which columns have few distinct values.

        Parameters
        ----------
        release
            The fitted release.
        work
            The work on the table.
        teller
            Collects what the steward is told about the released rows.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordTask:
    """One shard of records.

    Attributes
    ----------
    number
        Its place; it names the streams.
    start
        The number of its first record in the release.
    n_rows
        How many records it has.
    n_total
        How many records the release has.
    """

    number: int
    start: int
    n_rows: int
    n_total: int

    @property
    def names(self) -> tuple[str, ...]:
        """The name of the shard."""
        return (f"part-{self.number:05d}.parquet",)

    @property
    def rows_per_shard(self) -> int:
        """How many records it has, at least 1."""
        return max(1, self.n_rows)

    def open(self, release: RecordRelease, work: TableWork, teller: Teller) -> tuple[Iterable[pa.RecordBatch], pa.Schema, Collection[str]]:
        """Return the records; see `Task.open`."""
        del teller
        return release.batches(self.start, self.n_rows, self.n_total, work.key(), self.names[0]), release.types, release.few_valued


def list_record_tasks(n_rows: int, rows_per_shard: int) -> list[RecordTask]:
    """Return the tasks of n_rows records: as few as possible, as equal as possible; an empty one if there are no records.

    Where shards have room for it, they begin at a multiple of 2**17 records: those are drawn together.

    Parameters
    ----------
    n_rows
        The number of records.
    rows_per_shard
        The most records of a shard.
    """
    n_tasks = max(1, -(-n_rows // rows_per_shard))
    for step in (_TOGETHER, 1):
        n_steps = -(-n_rows // step)
        starts = [*(number * n_steps // n_tasks * step for number in range(n_tasks)), n_rows]
        sizes = [end - start for start, end in pairwise(starts)]
        if max(sizes) <= rows_per_shard and (min(sizes) > 0 or n_rows == 0):
            break
    return [RecordTask(number=number, start=starts[number], n_rows=size, n_total=n_rows) for number, size in enumerate(sizes)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Writing:
    """What every writing task needs.

    Attributes
    ----------
    work
        The work on the table.
    sha256, release_type
        The fitted release and its class.
    staging
        Where shards and their records go.
    """

    work: TableWork
    sha256: str
    release_type: type[Any]
    staging: Staging

    @property
    def stamp(self) -> Stamp:
        """A worker with other versions refuses the work."""
        return self.work.stamp


@guard
def write_shards(task: Task, writing: Writing) -> list[tuple[int, Staged]]:
    """Stage a task's shards and record them; if they are staged already, only check them. Return them with the task's number.

    Parameters
    ----------
    task
        What is written.
    writing
        What all tasks share.
    """
    work, staging = writing.work, writing.staging
    staged = read_recorded(task.names[0], staging)
    if staged is None:
        teller = Teller(work.columns)
        batches, types, few_valued = task.open(load(work.secrets, writing.sha256, writing.release_type), work, teller)
        staged = stage(batches, types, few_valued, task.names, task.rows_per_shard, staging, lambda: teller.told)
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
    types, few_valued
        As for `ShardWriter`.
    names
        The shards, as many as the rows need, at least one.
    rows_per_shard
        The most rows of a shard.
    staging
        Where shards and their record go.
    told
        Called when all batches are written; returns what to tell the steward about their rows.
    """
    shards: list[Shard] = []
    rest = iter(names)

    def open_shard() -> ShardWriter:
        return ShardWriter(staging.shards, staging.place(next(rest)), types, few_valued, new=bool(staging.run))

    writer: ShardWriter | None = None
    room = 0
    try:
        for batch in batches:
            start = 0
            while start < batch.num_rows:
                if writer is None or room == 0:
                    shards += [writer.close()] if writer is not None else []
                    writer, room = open_shard(), rows_per_shard
                taken = min(room, batch.num_rows - start)
                writer.write(batch.slice(start, taken))
                start, room = start + taken, room - taken
        shards.append((writer or open_shard()).close())
    except BaseException as error:
        if writer is not None:
            writer.discard(error)
        raise
    staged = Staged(shards=tuple(shards), told=told())
    shown = [asdict(shard) for shard in shards]
    room = len(json.dumps(shown)) + sum(_TOLD_BYTES + 2 * len(json.dumps(name)) for name in staged.told.order)  # whatever is told
    staging.actions.write(_record(names[0]), json.dumps({"shards": shown, "told": staged.told.to_dict()}).encode().ljust(room), private=True)
    return staged


def _record(first_name: str) -> str:
    return f"{first_name}.json"


def read_recorded(first_name: str, staging: Staging) -> Staged | None:
    """Return the record of the task whose first shard is named, if each of its shards is staged with the recorded digest.

    Parameters
    ----------
    first_name
        The name of the task's first shard.
    staging
        Where shards and their record are.
    """
    record = _record(first_name)
    try:
        content = json.loads(staging.actions.read(record, replaced=True))
        staged = Staged(shards=tuple(Shard(**shard) for shard in content["shards"]), told=Told.from_dict(content["told"]))
    except (InputError, ValueError, TypeError, KeyError, AttributeError):  # missing, or harmed
        return None
    for shard in staged.shards:
        if not staging.shards.exists(shard.name):
            return None
        with staging.shards.open(shard.name) as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != shard.sha256:  # type: ignore[arg-type]  # fsspec's files have readinto
                return None
    return staged


def write_all(
    tasks: Sequence[Task], work: TableWork, sha256: str, release_type: type[Any], staging: Staging, progress: Progress | None = None
) -> Staged:
    """Stage every shard of a release and return them by name, with what to tell the steward about all rows.

    Parameters
    ----------
    tasks
        In the order of their shards.
    work, sha256, release_type, staging
        As for `Writing`.
    progress
        Called with (stage, done, total).

    Raises
    ------
    DataError, InputError, TemporaryError
        The first failure; what is staged stays, and a second run goes on from it.
    """
    writing = Writing(work=work, sha256=sha256, release_type=release_type, staging=staging)
    found = chain.from_iterable(run_stage(make_stage("write", write_shards, [(task,) for task in tasks], writing, join_staged), progress))
    in_place = sorted((each for part in found for each in part), key=itemgetter(0))  # orders must be merged in the order of the table
    shards = sorted((shard for _, staged in in_place for shard in staged.shards), key=lambda shard: number_key(shard.name))
    return Staged(shards=tuple(shards), told=Told().merge(*(staged.told for _, staged in in_place)))
