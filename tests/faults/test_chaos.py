"""Workers that die while a job runs change no byte of it."""

import os
import signal
import threading
import time
from contextlib import suppress

import dask
import pytest
from distributed import Client
from distributed.chaos import KillWorker
from e2e.helpers import RATINGS_SCHEMA, digests, hidden, lake, load, processes, run_here, write_job

from dpdask.jobs.run import run_job


@pytest.fixture
def cluster():
    # a LocalCluster closes for good the nanny of a worker that is away 15 s after any of its deaths, even if it came back in between
    patient = {
        "distributed.scheduler.allowed-failures": 100,
        "distributed.deploy.lost-worker-timeout": "1 hour",
    }
    patient["distributed.worker.multiprocessing-method"] = (
        "spawn"  # as users' workers start: forked ones are back while others still die
    )
    with dask.config.set(patient), processes(2) as started:
        yield started


def kill_one(cluster, nth):
    """Kill a worker process that the scheduler knows and return whether there was one; its nanny starts another.

    One that is still starting is spared: it holds nothing, and the run would only take longer.
    """
    until = time.monotonic() + 60
    while time.monotonic() < until:
        alive = [
            nanny.pid
            for nanny in cluster.workers.values()
            if nanny.pid and nanny.worker_address in cluster.scheduler.workers
        ]
        if alive:
            with suppress(ProcessLookupError):
                os.kill(alive[nth % len(alive)], signal.SIGKILL)
                return True
        time.sleep(0.05)
    return False


def test_results_that_are_lost_before_the_driver_takes_them_are_computed_again(tmp_path):
    source = lake(tmp_path / "in", [400] * 10)
    job = write_job(tmp_path / "job", source, tmp_path / "out", output__rows_per_shard=350)
    run_here(job, output__path=tmp_path / "quiet")
    lost = []

    def count(client, status):
        """Wait until tasks of writing have a status; until none is pending, if it is `finished`."""
        until, found = time.monotonic() + 60, list[str]()
        while time.monotonic() < until:
            found = [
                state.status
                for key, state in dict(client.futures).items()
                if str(key).startswith("dpdask-write")
            ]
            if status in found and (status == "lost" or "pending" not in found):
                return found.count(status)
            time.sleep(0.001)
        raise TimeoutError(f"{status}: {found}")

    with processes(1) as alone, Client(alone) as client:

        def progress(stage, done, total):
            if stage == "write" and 0 < done < total and not lost:
                lost.append(0)
                count(
                    client, "finished"
                )  # they wait for the driver, which has taken the first ones
                kill_one(alone, 0)
                lost[0] = count(client, "lost")

        run_job(load(job), progress)
    assert lost[0] > 0
    assert digests(tmp_path / "out") == digests(tmp_path / "quiet")


@pytest.mark.matrix("worker killed", "in each stage")
@pytest.mark.slow
def test_killed_in_every_stage(cluster, tmp_path):
    source = lake(tmp_path / "in", [100_000] * 10, row_group=10_000, schema=RATINGS_SCHEMA)
    job = write_job(
        tmp_path / "job",
        source,
        tmp_path / "out",
        schema=RATINGS_SCHEMA,
        output__rows_per_shard=7_000,
    )
    run_here(job, output__path=tmp_path / "quiet")
    kills = []
    sevenths = set()

    def progress(stage, done, total):
        if (
            stage == "write" and 7 * done // total not in sevenths
        ):  # the driver takes several results at once, so it skips numbers
            sevenths.add(7 * done // total)
            kills.append(kill_one(cluster, len(kills)))

    in_the_survey = threading.Timer(0.3, lambda: kills.append(kill_one(cluster, 0)))
    with Client(cluster):
        in_the_survey.start()
        run_job(load(job), progress)
        in_the_survey.join()
    assert len(kills) >= 7
    assert all(kills)
    assert digests(tmp_path / "out") == digests(tmp_path / "quiet")
    assert not hidden(tmp_path / "out").exists()


@pytest.mark.matrix("worker killed", "by a segfault")
@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnhandledThreadExceptionWarning"
)  # of streams that a segfault cut
def test_workers_that_segfault(cluster, tmp_path):
    source = lake(tmp_path / "in", [100_000] * 8, row_group=10_000, schema=RATINGS_SCHEMA)
    job = write_job(
        tmp_path / "job",
        source,
        tmp_path / "out",
        schema=RATINGS_SCHEMA,
        output__rows_per_shard=10_000,
    )
    run_here(job, output__path=tmp_path / "quiet")
    seen = set()

    def progress(stage, done, total):
        seen.update(nanny.pid for nanny in cluster.workers.values() if nanny.pid)
        time.sleep(0.3)  # the workers are done long before: it is their results that die with them

    with Client(cluster) as client:
        client.register_plugin(KillWorker(delay="4 s", mode="segfault"))
        run_job(load(job), progress)
    print(f"{len(seen) - 2} workers restarted")  # noqa: T201 - a figure to report
    assert len(seen) - 2 >= 1
    assert digests(tmp_path / "out") == digests(tmp_path / "quiet")
