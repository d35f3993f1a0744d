"""Workers that die while a job runs change no byte of it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import dask
import pytest
from distributed import Client, LocalCluster
from distributed.chaos import KillWorker
from e2e.helpers import RATINGS_SCHEMA, digests, hidden, lake, load, processes, run_here, write_job

from dpdask.jobs.run import run_job


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    with dask.config.set({"distributed.scheduler.allowed-failures": 100}), processes(2) as started:
        yield started


def kill_one(cluster: LocalCluster, nth: int) -> bool:
    """Kill a living worker process and return whether there was one; its nanny starts another."""
    alive = [nanny.pid for nanny in cluster.workers.values() if nanny.pid]
    if not alive:
        return False
    try:
        os.kill(alive[nth % len(alive)], signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("points", [(1, 4)], ids=["two kills"])
def test_killed_at_fixed_points(points: tuple[int, ...], cluster: LocalCluster, tmp_path: Path) -> None:
    source = lake(tmp_path / "in", [400] * 10)
    job = write_job(tmp_path / "job", source, tmp_path / "out", output__rows_per_shard=350)
    run_here(job, output__path=tmp_path / "quiet")
    kills = []

    def progress(stage: str, done: int, total: int) -> None:
        if stage == "write" and done in points and total > max(points):
            kills.append(kill_one(cluster, done))

    with Client(cluster):
        run_job(load(job), progress)
    assert kills == [True] * len(points)
    assert digests(tmp_path / "out") == digests(tmp_path / "quiet")
    assert not hidden(tmp_path / "out").exists()


@pytest.mark.slow
def test_killed_all_the_time(cluster: LocalCluster, tmp_path: Path) -> None:
    source = lake(tmp_path / "in", [100_000] * 30, row_group=25_000, schema=RATINGS_SCHEMA)
    job = write_job(tmp_path / "job", source, tmp_path / "out", schema=RATINGS_SCHEMA, output__rows_per_shard=15_000)
    run_here(job, output__path=tmp_path / "quiet")
    ended, kills = threading.Event(), []

    def killer() -> None:
        while not ended.wait(1.0):
            kills.append(kill_one(cluster, len(kills)))

    thread = threading.Thread(target=killer)

    def progress(stage: str, done: int, total: int) -> None:
        time.sleep(0.02)  # so that the run outlasts several restarts on any machine

    with Client(cluster):
        thread.start()
        try:
            run_job(load(job), progress)
        finally:
            ended.set()
            thread.join()
    print(f"{sum(kills)} workers killed")  # noqa: T201 - a figure to report
    assert sum(kills) >= 5
    assert digests(tmp_path / "out") == digests(tmp_path / "quiet")
    assert not hidden(tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of streams that a segfault cut
def test_workers_that_segfault(cluster: LocalCluster, tmp_path: Path) -> None:
    source = lake(tmp_path / "in", [100_000] * 20, row_group=25_000, schema=RATINGS_SCHEMA)
    job = write_job(tmp_path / "job", source, tmp_path / "out", schema=RATINGS_SCHEMA, output__rows_per_shard=15_000)
    run_here(job, output__path=tmp_path / "quiet")
    seen: set[int] = set()

    def progress(stage: str, done: int, total: int) -> None:
        seen.update(nanny.pid for nanny in cluster.workers.values() if nanny.pid)
        time.sleep(0.05)

    with Client(cluster) as client:
        client.register_plugin(KillWorker(delay="2 s", mode="segfault"))
        run_job(load(job), progress)
    print(f"{len(seen) - 2} workers restarted")  # noqa: T201 - a figure to report
    assert len(seen) - 2 >= 3
    assert digests(tmp_path / "out") == digests(tmp_path / "quiet")
