"""One pass over a table: how many rows of each fragment are released, and the hold-out's statistics of every column."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from dask import delayed

from dpdask.codec import LevelCodec
from dpdask.engine.choose import Chooser, Hasher
from dpdask.engine.compute import Progress, guarded, run_tasks, task_prefix
from dpdask.engine.reduce import FAN_IN, TreeFold, tree_reduce
from dpdask.engine.seal import Seal
from dpdask.engine.work import TableWork
from dpdask.io.fragments import Fragment, read_batches
from dpdask.mechanisms.dip.chain import group_hashes
from dpdask.references import CellCounts
from dpdask.stats import LevelCounts, RankSummary
from dpdask.stats.bounding import UnitBounds, UnitRows
from dpdask.stats.records import Records, numbers
from dpdask.streams import RunKey, stream, words

Statistic = LevelCounts | RankSummary | CellCounts | Records

RECORDS = "records"
SAMPLE_ID, GROUP_ID = "chain/sample", "chain/by"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)  # Dask logs the arguments of a task that failed
class Survey:
    """What one pass finds; private, and kept by the driver.

    Attributes
    ----------
    n_released
        For each fragment, in order, the rows that will be released.
    statistics
        For each privatised column its statistic over the reference rows; or that of whole records alone, as `RECORDS`.
    """

    n_released: tuple[int, ...]
    statistics: Mapping[str, Statistic]


def group_key(key: RunKey) -> np.ndarray:
    """Return the key of the groups' hashes, uint64 of shape (2,)."""
    return words(stream(key, GROUP_ID, ""), 2)


class Counter:
    """Counts the reference rows of one fragment, batch by batch and in order.

    Parameters
    ----------
    work
        The work on the table.
    fragment_id
        Names the fragment.
    """

    def __init__(self, work: TableWork, fragment_id: str) -> None:
        self._work = work
        if work.records is not None:
            self._rng, self._group_key = stream(work.key(), SAMPLE_ID, fragment_id), group_key(work.key())

    def nothing(self) -> Mapping[str, Statistic]:
        """Return the statistics of no rows."""
        work = self._work
        if work.records is not None:
            return {RECORDS: Records.identity(len(work.codecs) + len(work.group_columns), work.records.max_records)}
        return {name: identity(name, work) for name in work.codecs}

    def count(self, batch: pa.RecordBatch, chosen: np.ndarray | None) -> Mapping[str, Statistic]:
        """Return the statistics of the chosen ones of the next rows.

        Raises
        ------
        DataError
            If any row, chosen or not, violates the schema, or has no group.
        """
        work = self._work
        if work.records is None:
            return {name: of_batch(name, batch.column(name), chosen, work) for name in work.codecs}
        columns = [group_hashes(name, batch.column(name), self._group_key) for name in work.group_columns]
        columns += [numbers(codec, batch.column(name)).view(np.uint64) for name, codec in work.codecs.items()]
        own = words(self._rng, batch.num_rows)
        if chosen is not None:
            columns, own = [column[chosen] for column in columns], own[chosen]
        return {RECORDS: Records.of_rows(columns, own, work.records.max_records)}


def identity(name: str, work: TableWork) -> Statistic:
    """Return a column's statistic of no rows."""
    if name in work.cells:
        return CellCounts.identity(work.cells[name])
    codec = work.codecs[name]
    return LevelCounts.identity(codec) if isinstance(codec, LevelCodec) else RankSummary.identity(codec)


def of_batch(name: str, array: pa.Array, chosen: np.ndarray | None, work: TableWork) -> Statistic:
    """Return the statistic of the chosen rows of one column's batch."""
    if name in work.cells:
        return CellCounts.of_batch(work.cells[name], array, chosen)
    codec = work.codecs[name]
    return LevelCounts.of_batch(codec, array, chosen) if isinstance(codec, LevelCodec) else RankSummary.of_batch(codec, array, chosen)


def survey_batches(batches: Iterable[pa.RecordBatch], chooser: Chooser, work: TableWork) -> Survey:
    """Return the survey of one fragment: with a hold-out, the reference rows are the held-out ones; else all released.

    Raises
    ------
    DataError
        If a value violates the schema.
    """
    counter = Counter(work, chooser.fragment_id)
    fold = TreeFold(_merge_statistics)
    fold.add(counter.nothing())
    n_released = 0
    for batch in batches:
        released, chosen = chooser.split(batch)
        n_released += int(released.sum())
        fold.add(counter.count(batch, chosen))
    return Survey(n_released=(n_released,), statistics=fold.result())


def _merge_statistics(parts: list[Mapping[str, Statistic]]) -> Mapping[str, Statistic]:
    first, *others = parts
    return {name: statistic.merge(*(other[name] for other in others)) for name, statistic in first.items()}  # type: ignore[arg-type]  # one kind a column


@guarded
def survey_fragment(fragment: Fragment, work: TableWork) -> Survey:
    """Return the survey of one fragment of files, and seal it."""
    seal = Seal(work.sealed)
    chooser = Chooser(work, fragment.id, fragment.number)
    found = survey_batches(_sealed(read_batches(fragment, work.sealed, work.types), seal), chooser, work)
    seal.check(work.secrets, fragment.id, fragment.where)
    chooser.keep()
    return found


def _sealed(batches: Iterable[pa.RecordBatch], seal: Seal) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        seal.add(batch)
        yield batch


@guarded
def merge_surveys(surveys: list[Survey]) -> Survey:
    """Return the survey of neighbouring fragments."""
    n_released = tuple(n for survey in surveys for n in survey.n_released)
    return Survey(n_released=n_released, statistics=_merge_statistics([survey.statistics for survey in surveys]))


def survey(stage: str, fragments: tuple[Fragment, ...], work: TableWork, progress: Progress | None = None) -> Survey:
    """Return the survey of a table: one read of the privatised columns, merged in a tree.

    Raises
    ------
    DataError
        If a value violates the schema.
    InputError
        If a file is missing, unreadable, or changed.
    """
    prefix = task_prefix(stage)
    shared = delayed(work, pure=False, traverse=False, name=task_prefix("work"))
    call = delayed(survey_fragment, pure=False)
    leaves = [call(fragment, shared, dask_key_name=f"{prefix}-{number}") for number, fragment in enumerate(fragments)]
    [result] = run_tasks(stage, [tree_reduce(leaves, merge_surveys, task_prefix("merge"))], progress)
    assert isinstance(result, Survey)
    return result


def unit_rows_of_batches(batches: Iterable[pa.RecordBatch], number: int, work: TableWork) -> UnitRows:
    """Return the unit statistic of one fragment.

    Raises
    ------
    DataError
        If a row's unit is null.
    """
    assert work.unit is not None
    hasher = Hasher(work.key(), work.holdout_key(), work.unit, number)
    fold = TreeFold(_merge_units)
    fold.add(UnitRows.identity(work.unit.max_rows))
    for batch in batches:
        hashes = hasher.hash(batch)
        fold.add(UnitRows.of_batch(work.unit.max_rows, hashes.units, hashes.rows, hashes.positions))
    return fold.result()


def _merge_units(parts: list[UnitRows]) -> UnitRows:
    return parts[0].merge(*parts[1:])


@guarded
def unit_rows_of_fragment(fragment: Fragment, work: TableWork) -> UnitRows:
    """Return the unit statistic of one fragment of files, and seal it: bounds hold for the rows they were made of alone."""
    seal = Seal(work.sealed)
    rows = unit_rows_of_batches(_sealed(read_batches(fragment, work.sealed, work.types), seal), fragment.number, work)
    seal.check(work.secrets, fragment.id, fragment.where)
    return rows


@guarded
def merge_part(parts: list[UnitRows], part: int, n_parts: int) -> UnitRows:
    """Return the unit statistic of neighbouring fragments for one part of the units: those whose hashes begin alike."""
    return _merge_units([rows.part(part, n_parts) for rows in parts])


@guarded
def bounds_of(parts: list[UnitRows]) -> UnitBounds:
    """Return the bounds of one part of a whole table's units."""
    return _merge_units(parts).bounds()


def reduce_units(leaves: Sequence[Any], progress: Progress | None = None) -> UnitBounds:
    """Return the units' bounds from the delayed unit statistics of all fragments.

    Each part of the units is merged in a tree of its own, so that no worker holds all units, and the driver gets bounds
    alone.
    """
    if not leaves:  # a table without a single row group
        return UnitRows.identity(1).bounds()
    n_parts = 4
    while n_parts < min(64, len(leaves) // 16):
        n_parts *= 2
    first, last = delayed(merge_part, pure=False), delayed(bounds_of, pure=False)
    groups = [list(leaves[start : start + FAN_IN]) for start in range(0, len(leaves), FAN_IN)]
    name, end = task_prefix("part"), task_prefix("bounds")
    ends = []
    for part in range(n_parts):
        merged = [first(group, part, n_parts, dask_key_name=f"{name}-{part}-{number}") for number, group in enumerate(groups)]
        while len(merged) > FAN_IN:
            merged = [tree_reduce(merged[start : start + FAN_IN], _merge_units, task_prefix("merge")) for start in range(0, len(merged), FAN_IN)]
        ends.append(last(merged, dask_key_name=f"{end}-{part}"))
    return UnitBounds.concatenated(run_tasks("units", ends, progress))


def survey_units(fragments: tuple[Fragment, ...], work: TableWork, progress: Progress | None = None) -> UnitBounds:
    """Return the units' bounds of a table: one read of the unit's and the kept columns.

    Raises
    ------
    DataError, InputError
        As `survey`.
    """
    prefix = task_prefix("units")
    shared = delayed(work, pure=False, traverse=False, name=task_prefix("work"))
    call = delayed(unit_rows_of_fragment, pure=False)
    return reduce_units([call(fragment, shared, dask_key_name=f"{prefix}-{number}") for number, fragment in enumerate(fragments)], progress)
