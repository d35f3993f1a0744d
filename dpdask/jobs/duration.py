"""About how long a job takes, from the bytes in footers and rates that were measured: good to a factor of a few, no more."""

from __future__ import annotations

import os
from dataclasses import dataclass

from dpdask.codec import LevelCodec
from dpdask.connect.spec import Local, Synchronous, Threads
from dpdask.jobs.spec import Job
from dpdask.jobs.tables import JobTable

# of one core of 2.5 GHz; docs/reference/cost.md has the runs that they were taken from
_READ_BYTES = 5e8  # decoded Parquet bytes that are read and counted in a second
_READ_TEXT = 1e8  # bytes of CSV
_WRITE_BYTES = 1.5e8  # decoded bytes that are randomised, shuffled and written in a second
_RECORD_LEVELS = 3e7  # records times levels of all columns that are drawn in a second
_FIT_SECONDS = 2.0
_CHANNEL_SECONDS = 0.7  # of a fit, for each column of a released row
_FIT_LEVELS = 2e-5  # seconds, times the square of the number of levels, of a fit to pairs of columns
_STAGED_SECONDS = 0.02  # of the driver, for each task
_PAGE_SECONDS = 3.0  # of the commit
COMPILING_SECONDS = 20  # the first time on a machine, beside all that
_ADAPTIVE_LEVELS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Duration:
    """About how long a run takes.

    Attributes
    ----------
    stages
        The whole seconds of each stage, at least 1: what is shown adds up.
    n_workers
        On how many threads of workers.
    """

    stages: tuple[float, ...]
    n_workers: int

    @property
    def seconds(self) -> float:
        """The seconds of all stages."""
        return sum(self.stages)


def expect_duration(job: Job, opened: JobTable, stages: tuple[str, ...], n_records: int | None) -> Duration | None:
    """Return about how long a run takes once its workers are there; None if their number is not known.

    Parameters
    ----------
    job
        The job.
    opened
        Its input.
    stages
        In words, each with its name before a colon.
    n_records
        How many records are written, if no row is and that is known.
    """
    n_workers = _count_workers(job)
    if n_workers is None:
        return None
    table, work = opened.table, opened.work
    n_fragments = max(1, len(table.fragments))
    at_once = min(n_workers, n_fragments)
    n_bytes = sum(fragment.n_bytes_decoded or fragment.n_bytes for fragment in table.fragments)
    n_levels = sum(codec.n_levels if isinstance(codec, LevelCodec) else _ADAPTIVE_LEVELS for codec in work.columns.codecs.values())
    read = n_bytes / (_READ_TEXT if table.format == "csv" else _READ_BYTES) / at_once + _STAGED_SECONDS * n_fragments
    if opened.mechanism.releases_rows:
        fit = _FIT_SECONDS + _CHANNEL_SECONDS * len(opened.mechanism.spending.row)
        write = n_bytes / _WRITE_BYTES / at_once + _STAGED_SECONDS * n_fragments
    else:
        fit = _FIT_SECONDS + _FIT_LEVELS * n_levels**2
        n_written = n_records or table.n_rows or 0
        n_shards = max(1, -(-n_written // job.file.output.rows_per_shard))
        write = n_written * n_levels / _RECORD_LEVELS / min(n_workers, n_shards)
    named = {"fit": fit, "write": write, "commit": _PAGE_SECONDS + _STAGED_SECONDS * n_fragments}
    seconds = (named.get(stage.partition(":")[0], read) for stage in stages)
    return Duration(stages=tuple(float(max(1, round(each))) for each in seconds), n_workers=n_workers)


def _count_workers(job: Job) -> int | None:
    cluster = job.cluster
    if isinstance(cluster, Synchronous):
        return 1
    if isinstance(cluster, Threads):
        return cluster.workers or os.cpu_count() or 1
    if isinstance(cluster, Local):
        return (cluster.workers or os.cpu_count() or 1) * cluster.threads_per_worker
    n_workers: int | None = getattr(cluster, "workers", None)
    return n_workers
