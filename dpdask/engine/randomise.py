"""The writing stage: each task randomises its fragments, orders their rows and stages their shards. It is idempotent."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field

import pyarrow as pa
from dask import delayed

from dpdask.engine.choose import Chooser
from dpdask.engine.compute import Progress, guarded, run_tasks, task_prefix
from dpdask.engine.rows import DIP_ROWS, Rows
from dpdask.engine.seal import Seal
from dpdask.engine.selection import filter_rows
from dpdask.engine.shuffle import by_number, shuffled
from dpdask.engine.told import Teller, Told
from dpdask.engine.work import ShardWork, TableWork
from dpdask.errors import InputError
from dpdask.io.fragments import Fragment, read_batches
from dpdask.io.shards import Shard, ShardWriter
from dpdask.io.storage import Folder


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


def released_batches(
    fragment: Fragment, work: TableWork, release_sha256: str, kind: Rows = DIP_ROWS, teller: Teller | None = None
) -> Iterator[pa.RecordBatch]:
    """Yield a fragment's released rows, in order: a pure function of the run key, the release and the fragment.

    Parameters
    ----------
    fragment, work, release_sha256, kind
        What is released, and how.
    teller
        Looks at each batch before it is randomised.

    Raises
    ------
    DataError
        If a value violates the schema.
    InputError
        At the end, if the fragment changed since it was first read; then none of its rows may be kept.
    """
    release, schema = kind.load(work.secrets, release_sha256), kind.released(work)
    rngs = release.streams(work.key(), fragment.id)
    released = Chooser(work, fragment.id, fragment.number).released()
    seal = Seal(work.sealed)
    columns = list(dict.fromkeys([*work.released.names, *work.unit_columns]))
    for batch in read_batches(fragment, columns, work.types):
        seal.add(batch)
        chosen = released(batch)
        rows = filter_rows(batch.select(work.released.names), chosen)
        if teller is not None:
            teller.add(rows)
        yield release.randomise(rows, work.codecs, rngs).cast(schema)
    seal.check(work.secrets, fragment.id, fragment.where)


@guarded
def write_shards(task: ShardWork, work: TableWork, release_sha256: str, staging: Folder, actions: Folder, kind: Rows = DIP_ROWS) -> Staged:
    """Stage a task's shards and record them; if they are staged already, only check them.

    Returns
    -------
    The shards in the staging folder, and what to tell the steward about their rows.
    """
    staged = recorded(task.names[0], staging, actions)
    if staged is not None:
        return staged
    teller = Teller(work)
    rows = shuffled(_checked(task, work, release_sha256, kind, teller), task, work.key())
    return stage(rows, kind.released(work), kind.few_valued(work), task.names, task.rows_per_shard, staging, actions, lambda: teller.told)


def stage(
    batches: Iterable[pa.RecordBatch],
    schema: pa.Schema,
    few_valued: Collection[str],
    names: Sequence[str],
    rows_per_shard: int,
    staging: Folder,
    actions: Folder,
    told: Callable[[], Told] = Told,
) -> Staged:
    """Write batches as shards of at most `rows_per_shard` rows, and record them when all are whole.

    Parameters
    ----------
    batches
        The rows; if they fail, the shard that was being written is discarded.
    schema, few_valued
        As for `ShardWriter`.
    names
        The shards, as many as the rows need, at least one.
    rows_per_shard
        The most rows of a shard.
    staging, actions
        Where shards and their record go.
    told
        Called when all batches are written; returns what to tell the steward about their rows.
    """
    shards: list[Shard] = []
    rest = iter(names)
    writer: ShardWriter | None = None
    room = 0
    try:
        for batch in batches:
            start = 0
            while start < batch.num_rows:
                if writer is None or room == 0:
                    shards += [writer.close()] if writer is not None else []
                    writer, room = ShardWriter(staging, next(rest), schema, few_valued), rows_per_shard
                taken = min(room, batch.num_rows - start)
                writer.write(batch.slice(start, taken))
                start, room = start + taken, room - taken
        shards.append((writer or ShardWriter(staging, next(rest), schema, few_valued)).close())
    except BaseException as error:
        if writer is not None:
            writer.discard(error)
        raise
    staged = Staged(shards=tuple(shards), told=told())
    record = {"shards": [asdict(shard) for shard in shards], "told": staged.told.to_dict()}
    actions.write(_record(names[0]), json.dumps(record).encode(), private=True)
    return staged


def _record(first_name: str) -> str:
    return f"{first_name}.json"


def _checked(task: ShardWork, work: TableWork, release_sha256: str, kind: Rows, teller: Teller) -> Iterator[pa.RecordBatch]:
    """Yield the released rows of a task's fragments, checking that each has as many as it was surveyed to have."""
    for fragment, expected in zip(task.fragments, task.n_released, strict=True):
        n_rows = 0
        for batch in released_batches(fragment, work, release_sha256, kind, teller):
            n_rows += batch.num_rows
            yield batch
        if n_rows != expected:
            raise InputError("this file changed since the run began", fragment.where, "restore it and run again, or `dpdask abort` the run")


def recorded(first_name: str, staging: Folder, actions: Folder) -> Staged | None:
    """Return the record of the task whose first shard is named, if each of its shards is staged with the recorded digest."""
    record = _record(first_name)
    if not actions.exists(record):
        return None
    try:
        content = json.loads(actions.read(record))
        staged = Staged(shards=tuple(Shard(**shard) for shard in content["shards"]), told=Told.from_dict(content["told"]))
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    for shard in staged.shards:
        if not staging.exists(shard.name):
            return None
        with staging.open(shard.name) as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != shard.sha256:  # type: ignore[arg-type]  # fsspec's files have readinto
                return None
    return staged


def write_all(
    tasks: list[ShardWork],
    work: TableWork,
    release_sha256: str,
    staging: Folder,
    actions: Folder,
    progress: Progress | None = None,
    kind: Rows = DIP_ROWS,
) -> Staged:
    """Stage every shard of a release and return them by name, with what to tell the steward about all rows.

    Parameters
    ----------
    tasks
        In the order of their shards.
    work, release_sha256, staging, actions, kind
        As for `write_shards`.
    progress
        Called with (stage, done, total).

    Raises
    ------
    DataError, InputError, TemporaryError
        The first failure; what is staged stays, and a second run goes on from it.
    """
    prefix = task_prefix("write")
    shared = delayed(work, pure=False, traverse=False, name=task_prefix("work"))
    call = delayed(write_shards, pure=False)
    calls = [call(task, shared, release_sha256, staging, actions, kind, dask_key_name=f"{prefix}-{number}") for number, task in enumerate(tasks)]
    found = run_tasks("write", calls, progress)
    in_place = sorted(zip(tasks, found, strict=True), key=lambda pair: pair[0].fragments[0].number)  # orders must be merged in the order of the table
    shards = sorted((shard for staged in found for shard in staged.shards), key=lambda shard: by_number(shard.name))
    return Staged(shards=tuple(shards), told=Told().merge(*(staged.told for _, staged in in_place)))
