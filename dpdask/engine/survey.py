"""One pass over a table: how many rows of each fragment are released, and the hold-out's statistics of every column."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from dask import delayed

from dpdask.codec import Codec, LevelCodec
from dpdask.engine.compute import Progress, guarded, run_tasks, task_prefix
from dpdask.engine.reduce import TreeFold, tree_reduce
from dpdask.engine.work import TableWork
from dpdask.errors import DataError
from dpdask.io.fragments import Fragment, read_batches
from dpdask.stats import LevelCounts, RankSummary, holdout_mask
from dpdask.stats.holdout import HOLDOUT_ID
from dpdask.streams import stream

Statistic = LevelCounts | RankSummary


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """What one pass finds; private, and kept by the driver.

    Attributes
    ----------
    n_released
        For each fragment, in order, the rows that will be released.
    statistics
        For each privatised column its statistic over the reference rows.
    """

    n_released: tuple[int, ...]
    statistics: Mapping[str, Statistic]


def identity(codec: Codec) -> Statistic:
    """Return the statistic of no rows."""
    return LevelCounts.identity(codec) if isinstance(codec, LevelCodec) else RankSummary.identity(codec)


def of_batch(codec: Codec, array: object, chosen: np.ndarray | None) -> Statistic:
    """Return the statistic of the chosen rows of one column's batch."""
    return LevelCounts.of_batch(codec, array, chosen) if isinstance(codec, LevelCodec) else RankSummary.of_batch(codec, array, chosen)


def survey_batches(batches: Iterable[pa.RecordBatch], fragment_id: str, work: TableWork) -> Survey:
    """Return the survey of one fragment: with a hold-out, the reference rows are the held-out ones; else all rows.

    Raises
    ------
    DataError
        If a value violates the schema.
    """
    rng = stream(work.key(), HOLDOUT_ID, fragment_id) if work.fraction is not None else None
    fold = TreeFold(_merge_statistics)
    fold.add({name: identity(codec) for name, codec in work.codecs.items()})
    n_released = 0
    for batch in batches:
        chosen = None if rng is None or work.fraction is None else holdout_mask(rng, batch.num_rows, work.fraction)
        n_released += batch.num_rows - (0 if chosen is None else int(chosen.sum()))
        fold.add({name: of_batch(codec, batch.column(name), chosen) for name, codec in work.codecs.items()})
    return Survey(n_released=(n_released,), statistics=fold.result())


def _merge_statistics(parts: list[Mapping[str, Statistic]]) -> Mapping[str, Statistic]:
    first, *others = parts
    return {name: statistic.merge(*(other[name] for other in others)) for name, statistic in first.items()}  # type: ignore[arg-type]  # one kind a column


@guarded
def survey_fragment(fragment: Fragment, work: TableWork) -> Survey:
    """Return the survey of one fragment of files."""
    try:
        return survey_batches(read_batches(fragment, list(work.codecs), work.types), fragment.id, work)
    except DataError as error:
        raise error.at(fragment.where) from None


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
    shared = delayed(work, pure=False, traverse=False, name=f"{prefix}-work")
    call = delayed(survey_fragment, pure=False)
    leaves = [call(fragment, shared, dask_key_name=f"{prefix}-{number}") for number, fragment in enumerate(fragments)]
    [result] = run_tasks(stage, [tree_reduce(leaves, merge_surveys, f"{prefix}-merge")], progress)
    assert isinstance(result, Survey)
    return result
