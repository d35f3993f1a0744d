"""Workers that say nothing, or have no dpdask, beside a healthy one: a line that names them, and a scheduler that is as it was before."""

from __future__ import annotations

import re
import signal
import subprocess
import time
from contextlib import ExitStack

import psutil
import pytest
from connect.processes import ROOT, hide_dpdask, python_path, running, scheduler, worker_words
from distributed import Client
from e2e.helpers import (
    charging_entries,
    command,
    error_line,
    hidden,
    lake,
    run_cli,
    write_job,
)

from dpdask.engine.account import open_ledger

SOON = 120.0  # seconds, on a busy machine: on a quiet one it takes 20; without deadlines it would not end


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return lake(tmp_path_factory.mktemp("source") / "in", [3000] * 6, row_group=1000)


def describe(client):
    """Return what a scheduler holds beside its workers."""
    return client.run_on_scheduler(
        lambda dask_scheduler: {
            "plugins": sorted(dask_scheduler.worker_plugins),
            "scheduler's": sorted(dask_scheduler.plugins),
            "metadata": sorted(map(str, dask_scheduler.task_metadata)),
            "tasks": sorted(map(str, dask_scheduler.tasks)),
            "events": dict(dask_scheduler.extensions["events"]._events),
        }
    )


@pytest.fixture
def cluster(tmp_path):
    """Yield the address of a scheduler with one healthy worker, a client of it, and a stack for more workers."""
    with scheduler(tmp_path) as (_, address), ExitStack() as stack:
        stack.enter_context(running(worker_words(address), tmp_path / "healthy.log"))
        client = stack.enter_context(Client(address, set_as_default=False))
        client.wait_for_workers(1, timeout=120)
        yield address, client, stack


def add_worker(cluster, log, *options, environment=None):
    address, client, stack = cluster
    there = len(client.scheduler_info(n_workers=-1)["workers"])
    process = stack.enter_context(running(worker_words(address, *options), log, environment))
    client.wait_for_workers(there + 1, timeout=120)
    return process


def charged_job(folder, source, address, **changes):
    folder.mkdir(exist_ok=True)
    url = f"sqlite:///{folder}/ledger.db"
    open_ledger(url).init("d", 9.0)
    block = {"kind": "address", "address": address}
    place = {"url": url, "dataset": "d"}
    return write_job(
        folder / "job",
        source,
        changes.pop("out", folder / "out"),
        ledger=place,
        cluster=block,
        output__rows_per_shard=1000,
        **changes,
    ), place


@pytest.mark.matrix("worker frozen")
def test_a_frozen_worker_is_named_and_the_job_runs_once_it_answers(cluster, source, tmp_path):
    address, client, _ = cluster
    frozen = add_worker(cluster, tmp_path / "frozen.log", "--name", "number-two")
    before = describe(client)
    job, place = charged_job(tmp_path, source, address)
    frozen.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    ended = run_cli("run", job)
    seconds = time.monotonic() - began
    assert ended.returncode == 75
    assert re.fullmatch(
        r"dpdask: cluster: 1 of 2 workers do not answer: number-two at tcp://127\.0\.0\.1:\d+; restart or remove them, and run again",
        error_line(ended),
    )
    assert seconds < SOON
    assert charging_entries(**place) == []
    assert not hidden(tmp_path / "out").exists()
    assert describe(client) == before
    frozen.send_signal(signal.SIGCONT)
    assert len(client.run(lambda: None)) == 2
    ended = run_cli("run", job)
    assert ended.returncode == 0, ended.stderr
    assert describe(client) == before


@pytest.mark.matrix("worker without dpdask")
def test_a_worker_without_dpdask_is_told_of_and_may_join_afterwards(
    cluster, open_store, source, tmp_path, monkeypatch
):
    """Also on a scheduler that a job with a store has used: what that job told its workers is no burden to others."""
    address, client, _ = cluster
    before = describe(client)
    without = python_path(hide_dpdask(tmp_path / "without"), ROOT / "tests")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with open_store("azurite") as store:
        storage = {"az": {"connection_string": {"env": "LAKE"}}}
        job, place = charged_job(tmp_path, source, address, out=store.folder.url, storage=storage)
        lake_ = store.server.environment()["AZURE_STORAGE_CONNECTION_STRING"]
        monkeypatch.setenv("LAKE", lake_)
        monkeypatch.delenv("AZURE_STORAGE_CONNECTION_STRING")
        with running(
            worker_words(address), tmp_path / "lake.log", {**python_path(), "LAKE": lake_}
        ) as right:
            client.wait_for_workers(2, timeout=120)
            client.retire_workers(  # the one that does not know where the store is
                [
                    each
                    for each, pid in client.run(lambda: __import__("os").getpid()).items()
                    if pid != right.pid
                ]
            )
            ended = run_cli("run", job)
            assert ended.returncode == 0, ended.stderr
            assert describe(client) == before
            add_worker(cluster, tmp_path / "foreign.log", environment=without)
            job, place = charged_job(tmp_path / "second", source, address)
            began = time.monotonic()
            ended = run_cli("run", job)
            assert time.monotonic() - began < SOON
            assert (ended.returncode, error_line(ended).partition(" the driver has")[0]) == (
                64,
                "dpdask: cluster: 1 of 2 workers: no dpdask, and",
            )
            assert charging_entries(**place) == []
            assert describe(client) == before


@pytest.mark.matrix("SIGTERM", "a scheduler of others")
def test_a_driver_that_is_terminated_leaves_the_scheduler_as_it_was(
    cluster, open_store, source, tmp_path, monkeypatch
):
    address, client, _ = cluster
    before = describe(client)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with open_store("azurite") as store:
        job, place = charged_job(tmp_path, source, address, out=store.folder.url)
        with running(worker_words(address), tmp_path / "lake.log", python_path()):
            client.wait_for_workers(2, timeout=120)
            said = []
            with subprocess.Popen(
                command("run", job), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
            ) as driver:
                assert driver.stderr is not None
                for line in driver.stderr:
                    said.append(line)
                    if '"stage": "write", "done": 0,' in line:
                        assert describe(client)["metadata"] != before["metadata"]
                        psutil.Process(driver.pid).terminate()
                assert driver.wait(200) == 143, said
            assert describe(client) == before
            ended = run_cli("run", job)
            assert ended.returncode == 0, ended.stderr
            assert describe(client) == before
        assert [entry.kind for entry in charging_entries(**place)] == ["intend", "commit"]
