"""Synthetic records, and cells, written partition by partition: each shard is a function of the fitted release, the run key and its number."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pyarrow as pa
from dask import delayed
from numpy.random import Generator
from numpy.typing import NDArray

from dpdask.engine.compute import Progress, guarded, run_tasks, task_prefix
from dpdask.engine.randomise import recorded, stage
from dpdask.engine.work import KEY_NAME, RELEASE_NAME, keep, kept
from dpdask.io.shards import Shard
from dpdask.io.storage import Folder
from dpdask.mechanisms.copula.model import CHUNK_ROWS
from dpdask.mechanisms.copula.release import FittedCopula, copula_from_bytes, copula_to_bytes
from dpdask.mechanisms.histogram.release import FittedHistogram, histogram_from_bytes, histogram_to_bytes
from dpdask.streams import RunKey, stream, words

_DRAWS = "histogram/records"

Codes = NDArray[np.integer]


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticShard:
    """One task: a shard of synthetic records.

    Attributes
    ----------
    number
        Its place; it names the stream.
    n_rows
        Its records.
    """

    number: int
    n_rows: int

    @property
    def name(self) -> str:
        """The shard's file."""
        return f"part-{self.number:05d}.parquet"


def lay_out_records(n_rows: int, rows_per_shard: int) -> list[SyntheticShard]:
    """Return the shards of n_rows synthetic records, each but the last of `rows_per_shard`; an empty one if there are none."""
    starts = range(0, max(1, n_rows), rows_per_shard)
    return [SyntheticShard(number=number, n_rows=min(rows_per_shard, n_rows - start)) for number, start in enumerate(starts)]


def write_copula(fitted: FittedCopula, secrets: Folder) -> str:
    """Write a fitted copula beside the run key and return its sha256."""
    return keep(secrets, RELEASE_NAME, copula_to_bytes(fitted))


@functools.lru_cache(maxsize=2)
def load_copula(secrets: Folder, sha256: str) -> FittedCopula:
    """Return a fitted copula, read once by each process and checked against its digest.

    Raises
    ------
    InputError
        If the file is missing or another.
    """
    return copula_from_bytes(kept(secrets, RELEASE_NAME, sha256, "the run's fitted release is not the one that was written"), RELEASE_NAME)


def record_batches(fitted: FittedCopula, n_rows: int, stream: Callable[[str], Generator]) -> Iterator[pa.RecordBatch]:
    """Yield synthetic records in the released columns and types.

    Parameters
    ----------
    fitted
        The copula.
    n_rows
        How many records.
    stream
        Gives the random stream of a purpose: one for the records, one for each column's values inside its cells.
    """
    rng = stream("records")
    return _valued(fitted, n_rows, lambda n: fitted.model.sample(n, rng), lambda name: stream(f"values/{name}"))


def _valued(
    fitted: FittedCopula | FittedHistogram, n_rows: int, draw: Callable[[int], Iterable[Codes]], inside: Callable[[str], Generator]
) -> Iterator[pa.RecordBatch]:
    """Yield rows whose cells `draw` gives, column by column in the domain's order, with a value inside each cell."""
    columns = fitted.cells()
    rngs = {name: inside(name) for name in columns}
    for start in range(0, n_rows, CHUNK_ROWS):
        n = min(CHUNK_ROWS, n_rows - start)
        arrays = {
            name: column.draw(codes, words(rngs[name], n if len(column.edges) else 0))  # levels are decided by their code alone
            for (name, column), codes in zip(columns.items(), draw(n), strict=True)
        }
        yield pa.RecordBatch.from_arrays([arrays[name] for name in fitted.types.names], schema=fitted.types)


@guarded
def write_records(task: SyntheticShard, sha256: str, secrets: Folder, staging: Folder, actions: Folder) -> tuple[Shard, ...]:
    """Stage one shard and record it; one that is staged already is only checked."""
    staged = recorded(task.name, staging, actions)
    if staged is not None:
        return staged.shards
    fitted = load_copula(secrets, sha256)
    key = RunKey(secrets.read(KEY_NAME))
    batches = record_batches(fitted, task.n_rows, lambda purpose: fitted.model.stream(key, f"{task.name}/{purpose}"))
    few_valued = [name for name, column in fitted.schema.columns.items() if column.has_levels]
    return stage(batches, fitted.types, few_valued, (task.name,), task.n_rows, staging, actions).shards


def write_all_records(
    tasks: list[SyntheticShard], sha256: str, secrets: Folder, staging: Folder, actions: Folder, progress: Progress | None = None
) -> list[Shard]:
    """Stage every shard and return them in order.

    Raises
    ------
    InputError, TemporaryError
        The first failure; what is staged stays, and a second run goes on from it.
    """
    prefix = task_prefix("write")
    call = delayed(write_records, pure=False)
    calls = [call(task, sha256, secrets, staging, actions, dask_key_name=f"{prefix}-{task.number}") for task in tasks]
    return [shard for shards in run_tasks("write", calls, progress) for shard in shards]


def write_histogram(fitted: FittedHistogram, secrets: Folder) -> str:
    """Write a perturbed histogram beside the run key and return its sha256."""
    return keep(secrets, RELEASE_NAME, histogram_to_bytes(fitted))


@functools.lru_cache(maxsize=2)
def load_histogram(secrets: Folder, sha256: str) -> FittedHistogram:
    """Return a perturbed histogram, read once by each process and checked against its digest.

    Raises
    ------
    InputError
        If the file is missing or another.
    """
    data = kept(secrets, RELEASE_NAME, sha256, "the run's perturbed histogram is not the one that was written")
    return histogram_from_bytes(data, RELEASE_NAME)


def drawn_batches(fitted: FittedHistogram, n_rows: int, key: RunKey, partition: str) -> Iterator[pa.RecordBatch]:
    """Yield synthetic rows in the released columns and types, each cell with probability proportional to its positive weight.

    Parameters
    ----------
    fitted
        The histogram; some weight is positive.
    n_rows
        How many rows.
    key, partition
        Name the random streams: one for the cells, one for each column's values inside them.
    """
    rng = stream(key, _DRAWS, partition)
    return _valued(fitted, n_rows, lambda n: fitted.histogram.sample_codes(n, rng=rng), lambda name: stream(key, f"{_DRAWS}/{name}", partition))


@guarded
def write_drawn(
    task: SyntheticShard, first: int, output: Literal["cells", "rows"], sha256: str, secrets: Folder, staging: Folder, actions: Folder
) -> tuple[Shard, ...]:
    """Stage one shard of a perturbed histogram and record it; one that is staged already is only checked.

    Parameters
    ----------
    task
        The shard.
    first
        The number of its first row in the release.
    output
        Whether it holds the cells listed, or synthetic rows.
    sha256, secrets
        The histogram, and where it is.
    staging, actions
        As for `randomise.stage`.
    """
    staged = recorded(task.name, staging, actions)
    if staged is not None:
        return staged.shards
    fitted = load_histogram(secrets, sha256)
    few_valued = [name for name, column in fitted.schema.columns.items() if column.role == "privatise" and (column.has_levels or output == "cells")]
    if output == "rows":
        batches = drawn_batches(fitted, task.n_rows, RunKey(secrets.read(KEY_NAME)), task.name)
        return stage(batches, fitted.types, few_valued, (task.name,), task.n_rows, staging, actions).shards
    rows = fitted.cell_rows(first, first + task.n_rows)
    return stage(rows.to_batches(), rows.schema, few_valued, (task.name,), max(1, task.n_rows), staging, actions).shards


def write_all_drawn(
    n_rows: int,
    rows_per_shard: int,
    output: Literal["cells", "rows"],
    sha256: str,
    secrets: Folder,
    staging: Folder,
    actions: Folder,
    progress: Progress | None = None,
) -> list[Shard]:
    """Stage every shard of a perturbed histogram's cells or synthetic rows and return them in order.

    Raises
    ------
    InputError, TemporaryError
        The first failure; what is staged stays, and a second run goes on from it.
    """
    prefix = task_prefix("write")
    call = delayed(write_drawn, pure=False)
    calls = [
        call(task, task.number * rows_per_shard, output, sha256, secrets, staging, actions, dask_key_name=f"{prefix}-{task.number}")
        for task in lay_out_records(n_rows, rows_per_shard)
    ]
    return [shard for shards in run_tasks("write", calls, progress) for shard in shards]
