"""The writing tasks of rows, what they write, and their order: shuffled (within each task, and the order of the shards), or kept."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace

import pyarrow as pa

from dpdask.engine.select import Chooser, filter_rows, take_values
from dpdask.engine.source import FilePart
from dpdask.engine.told import Teller
from dpdask.engine.work import TableWork
from dpdask.io.faults import report_change
from dpdask.io.fragment import Fragment
from dpdask.io.rows import estimate_width
from dpdask.io.shards import number_key
from dpdask.kernels.permutation import permutation
from dpdask.mechanisms.releases import RowRelease
from dpdask.privacy.order import RowOrder
from dpdask.streams import Rng, RunKey, stream, words

ROWS_ID, SHARDS_ID = "order/rows", "order/shards"

WINDOW_ROWS = 2**20
WINDOW_BYTES = 2**27
HELD_BYTES = WINDOW_BYTES
_MOST_READ = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTask:
    """One task of the writing stage: neighbouring fragments, and the shards that they become.

    Attributes
    ----------
    fragments
        In order.
    n_released
        How many rows of each are released.
    names
        The shards, in order; all but the last hold `rows_per_shard` rows.
    rows_per_shard
        The most rows of a shard.
    window
        How many rows are shuffled at a time, a multiple of whole shards; None if rows keep their order.
    """

    fragments: tuple[Fragment, ...]
    n_released: tuple[int, ...] = field(repr=False)  # Dask logs the arguments of a task that failed
    names: tuple[str, ...]
    rows_per_shard: int
    window: int | None = None

    @property
    def number(self) -> int:
        """The place of the first fragment in the table."""
        return self.fragments[0].number

    def open(self, release: RowRelease, work: TableWork, teller: Teller) -> tuple[Iterable[pa.RecordBatch], pa.Schema, Collection[str]]:
        """Return the randomised rows; see `write.Task`."""
        rows = shuffle_rows(self._rows(release, work, teller), self, work.key())
        return rows, release.types(work.released), release.few_valued(work.codecs)

    def _rows(self, release: RowRelease, work: TableWork, teller: Teller) -> Iterator[pa.RecordBatch]:
        """Yield the released rows of the fragments, checking that each has as many as were counted."""
        for fragment, expected in zip(self.fragments, self.n_released, strict=True):
            n_rows = 0
            for batch in randomise_batches(fragment, release, work, teller):
                n_rows += batch.num_rows
                yield batch
            if n_rows != expected:
                raise report_change(fragment.where)


def lay_out(fragments: tuple[Fragment, ...], n_released: tuple[int, ...], rows_per_shard: int) -> list[RowTask]:
    """Return the writing tasks: neighbours share a shard while they fit, and a large fragment is cut into several.

    Where most rows are not released (a bound on units), a task reads at most four times `rows_per_shard` rows all the
    same, so that the work stays spread.

    Parameters
    ----------
    fragments, n_released
        The fragments in the order of the rows, and how many rows of each are released.
    rows_per_shard
        The most rows of a shard.
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
    works: list[RowTask] = []
    first = 0
    for group in groups:
        rows = sum(n_released[index] for index in group)
        if rows == 0 and len(groups) > 1:
            continue
        count = max(1, -(-rows // rows_per_shard))
        names = tuple(f"part-{number:05d}.parquet" for number in range(first, first + count))
        first += count
        works.append(
            RowTask(
                fragments=tuple(fragments[index] for index in group),
                n_released=tuple(n_released[index] for index in group),
                names=names,
                rows_per_shard=rows_per_shard,
            )
        )
    return works


def lay_out_rows(
    fragments: tuple[Fragment, ...], n_released: tuple[int, ...], rows_per_shard: int, released: pa.Schema, order: RowOrder, key: RunKey
) -> list[RowTask]:
    """Return the writing tasks of a release row by row, in the order of their shards.

    Parameters
    ----------
    fragments, n_released
        As for `lay_out`.
    rows_per_shard
        The most rows of a shard, as the job says.
    released
        The released columns and types.
    order
        Whether the rows keep the order of the fragments.
    key
        The run's key.

    Privacy
    -------
    If rows are shuffled, a keyed permutation assigns the shards' numbers and orders the tasks: a shard's name does not reveal
    where in the table its rows were. Its size can: the last rows of a table fill a shard only in part.
    """
    if order == "keep":
        return lay_out(fragments, n_released, rows_per_shard)
    per_shard = limit_shard_rows(released, rows_per_shard, order)
    tasks = lay_out(fragments, n_released, per_shard)
    names = [name for task in tasks for name in task.names]
    places = iter(permutation(words(stream(key, SHARDS_ID, ""), len(names))).tolist())
    window = per_shard * max(1, min(WINDOW_ROWS, WINDOW_BYTES // estimate_row_bytes(released)) // per_shard)
    shuffled = [replace(task, names=tuple(names[next(places)] for _ in task.names), window=window) for task in tasks]
    return sorted(shuffled, key=lambda task: number_key(task.names[0]))


def limit_shard_rows(released: pa.Schema, rows_per_shard: int, order: RowOrder) -> int:
    """Return the most rows of a shard: as the job says, but if rows are shuffled, at most the rows that are shuffled at once.

    Parameters
    ----------
    released
        The types of the written rows.
    rows_per_shard
        The most rows of a shard that the job allows.
    order
        The order of the rows.
    """
    return rows_per_shard if order == "keep" else max(1, min(rows_per_shard, WINDOW_BYTES // estimate_row_bytes(released)))


def estimate_row_bytes(released: pa.Schema) -> int:
    """Estimate the bytes that a row takes in memory from its types alone; texts, lists and the like count 64 bytes."""
    return sum(max(1, int(estimate_width(type_))) for type_ in released.types) or 1


def randomise_batches(fragment: Fragment, release: RowRelease, work: TableWork, teller: Teller) -> Iterator[pa.RecordBatch]:
    """Yield a fragment's released rows, in order: a pure function of the run key, the release and the fragment.

    Parameters
    ----------
    fragment, release, work
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
    work = work.hold_keys()
    types = release.types(work.released)
    rngs = release.streams(work.key(), fragment.id)
    released = Chooser(work, fragment.id, fragment.number).find_released()
    for batch in FilePart(fragment).read_all(work):
        rows = filter_rows(batch.select(work.released.names), released(batch))
        teller.add(rows)
        yield release.randomise(rows, work.codecs, rngs).cast(types)


def shuffle_rows(batches: Iterable[pa.RecordBatch], task: RowTask, key: RunKey) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a writing task in the order of its shards: in the order of the input, or shuffled window by window.

    Parameters
    ----------
    batches
        The rows in the order of the input.
    task
        The writing task.
    key
        The run key.

    Notes
    -----
    A window has `task.window` rows, which are whole shards, so the rows of a shard are in random order. A window ends earlier
    only if it reaches 128 MiB because of long texts. The permutation is a function of the run key, the task's first fragment
    and the number of rows before.
    """
    if task.window is None:
        yield from batches
        return
    rng = stream(key, ROWS_ID, task.fragments[0].id)
    held: list[pa.RecordBatch] = []
    n_held = bytes_held = 0
    for batch in batches:
        start = 0
        while start < batch.num_rows:
            part = batch.slice(start, task.window - n_held)
            held.append(part)
            start, n_held, bytes_held = start + part.num_rows, n_held + part.num_rows, bytes_held + part.nbytes
            if n_held == task.window or bytes_held >= HELD_BYTES:
                yield from _permute(held, rng)
                n_held = bytes_held = 0
    if held:
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
