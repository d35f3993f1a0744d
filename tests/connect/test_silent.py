"""Workers that say nothing, or have no dpdask, beside a healthy one: a line that names them, and a scheduler that is as it was before."""

import json
import os
import re
import signal
import subprocess
import time
from contextlib import ExitStack, contextmanager

import dask
import pytest
from connect.processes import ROOT, hide_dpdask, python_path, running, worker_words
from distributed import Client
from e2e.helpers import (
    call_cli,
    charging_entries,
    command,
    error_line,
    hidden,
    lake,
    processes,
    run_here,
    write_job,
)

from dpdask.engine import compute
from dpdask.engine.account import open_ledger
from dpdask.io.shards import Manifest
from dpdask.io.storage import Folder

SOON = 500.0  # seconds, on a busy machine: on a quiet one it takes 20; without deadlines it would not end

pytestmark = pytest.mark.timeout(1200)


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


@contextmanager
def open_scheduler(workers):
    """Yield a client of a scheduler in this process, with some healthy workers named 0, 1, ..."""
    with processes(workers) as started, Client(started, set_as_default=False) as client:
        yield client


def charged_job(folder, source, client, **changes):
    folder.mkdir(exist_ok=True)
    url = f"sqlite:///{folder}/ledger.db"
    open_ledger(url).init("d", 9.0)
    block = {"kind": "address", "address": client.scheduler_info()["address"]}
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
def test_a_frozen_worker_is_named_and_the_job_runs_once_it_answers(source, tmp_path):
    with open_scheduler(2) as client:
        [frozen] = [
            client.run(os.getpid, workers=[address])[address]
            for address, worker in client.scheduler_info(n_workers=-1)["workers"].items()
            if worker["name"] == 1
        ]
        before = describe(client)
        job, place = charged_job(tmp_path, source, client)
        os.kill(frozen, signal.SIGSTOP)
        began = time.monotonic()
        ended = call_cli("run", job)
        seconds = time.monotonic() - began
        assert ended.returncode == 75
        assert re.fullmatch(
            r"dpdask: cluster: 1 of 2 workers do not answer: 1 at tcp://127\.0\.0\.1:\d+; restart or remove them, and run again",
            error_line(ended),
        )
        assert seconds < SOON
        assert charging_entries(**place) == []
        assert not hidden(tmp_path / "out").exists()
        assert describe(client) == before
        os.kill(frozen, signal.SIGCONT)
        assert len(client.run(lambda: None)) == 2
        ended = call_cli("run", job)
        assert ended.returncode == 0, ended.stderr
        assert describe(client) == before


@pytest.mark.matrix("worker frozen", "while shards are written")
@pytest.mark.more
def test_a_worker_that_freezes_at_work_is_named_and_its_work_is_done_by_others(source, tmp_path):
    """As soon as the driver waits for it alone; Dask gives it up later, here after 25 seconds, and starts another in its place."""
    with dask.config.set({"distributed.scheduler.worker-ttl": "25s"}), open_scheduler(2) as client:
        frozen = client.run(os.getpid)
        job, place = charged_job(tmp_path, source, client)
        lines, seconds = [], {}
        with subprocess.Popen(
            command("run", job), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        ) as driver:
            assert driver.stderr is not None
            for line in driver.stderr:
                lines.append(line)
                if '"stage": "write", "done": 0,' in line:
                    address, pid = next(iter(frozen.items()))
                    os.kill(pid, signal.SIGSTOP)
                    seconds["frozen"] = time.monotonic()
                if "give no sign of life" in line:
                    seconds["told"] = time.monotonic()
            ended = driver.wait(300)
        assert ended == 0, lines
        told = [json.loads(line)["step"] for line in lines if "sign of life" in line]
        # on a busy machine another worker may be quiet, too
        said = r"waiting for [12] of [12] workers? that give no sign of life: .*"
        assert all(re.fullmatch(said, each) for each in told), told
        assert any(re.search(rf"\b[01] at {re.escape(address)}", each) for each in told), told
        assert seconds["told"] - seconds["frozen"] < SOON
        assert [entry.kind for entry in charging_entries(**place)] == ["intend", "commit"]
    quiet = run_here(
        write_job(
            tmp_path / "quiet", source, tmp_path / "quiet" / "out", output__rows_per_shard=1000
        )
    )
    assert len(quiet.manifest.shards) == len(Manifest.read(Folder(f"file://{tmp_path}/out")).shards)


@pytest.mark.matrix("worker without dpdask")
def test_a_worker_without_dpdask_is_told_of_and_may_join_afterwards(
    open_store, source, tmp_path, monkeypatch
):
    """Also on a scheduler that a job with a store has used: what that job told its workers is no burden to others."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    without = python_path(hide_dpdask(tmp_path / "without"), ROOT / "tests")
    with open_scheduler(0) as client, open_store("azurite") as store, ExitStack() as stack:
        before = describe(client)
        storage = {"az": {"connection_string": {"env": "LAKE"}}}
        job, place = charged_job(tmp_path, source, client, out=store.folder.url, storage=storage)
        monkeypatch.setenv("LAKE", os.environ["AZURE_STORAGE_CONNECTION_STRING"])
        monkeypatch.delenv("AZURE_STORAGE_CONNECTION_STRING")

        def add_worker(name, environment):
            words = worker_words(client.scheduler_info()["address"])
            stack.enter_context(running(words, tmp_path / f"{name}.log", environment))

        add_worker("lake", python_path())
        client.wait_for_workers(1, timeout=120)
        ended = call_cli("run", job)
        assert ended.returncode == 0, ended.stderr
        assert describe(client) == before
        add_worker("foreign", without)
        client.wait_for_workers(2, timeout=120)
        job, place = charged_job(tmp_path / "second", source, client)
        began = time.monotonic()
        ended = call_cli("run", job)
        assert time.monotonic() - began < SOON
        assert (ended.returncode, error_line(ended).partition(" the driver has")[0]) == (
            64,
            "dpdask: cluster: 1 of 2 workers: no dpdask, and",
        )
        assert charging_entries(**place) == []
        assert describe(client) == before


@pytest.mark.matrix("SIGTERM", "a scheduler of others")
def test_a_driver_that_is_terminated_leaves_the_scheduler_as_it_was(
    open_store, source, tmp_path, monkeypatch, drivers
):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with open_store("azurite") as store, open_scheduler(1) as client:
        before, sign = describe(client), tmp_path / "sign"
        job, place = charged_job(tmp_path, source, client, out=store.folder.url)
        pid = drivers.start(
            *("run", job), point="all-shards", strike="pause", sign=sign, environment=os.environ
        )
        while not sign.exists():
            time.sleep(0.05)
        assert describe(client)["metadata"] != before["metadata"]  # what it has told
        os.kill(pid, signal.SIGTERM)
        assert drivers.wait() == (143, "dpdask: terminated; run again to resume")
        assert describe(client) == before
        ended = call_cli("run", job)
        assert ended.returncode == 0, ended.stderr
        assert describe(client) == before
        assert [entry.kind for entry in charging_entries(**place)] == ["intend", "commit"]


def test_a_worker_is_told_of_once_each_time_that_it_falls_silent(monkeypatch, caplog):
    """Signs of life are compared by the scheduler's clock alone."""
    now = [1000.0]
    monkeypatch.setattr(compute.time, "monotonic", lambda: now[0])
    seen = {}

    def look(*signs):
        now[0] += 5.0
        caplog.clear()
        workers = {
            f"tcp://h:{number}": {"name": number, "last_seen": sign}
            for number, sign in enumerate(signs)
        }
        compute._tell_quiet(workers, seen)
        return [record.getMessage().rpartition(": ")[2] for record in caplog.records]

    with caplog.at_level("INFO", logger="dpdask.steps"):
        assert [look(1, 7), look(2, 7), look(3, 7)] == [[], [], []]
        assert look(4, 7) == ["1 at tcp://h:1"]
        assert [look(5, 7), look(6, 7), look(7, 8), look(8, 8), look(9, 8)] == [[]] * 5
        assert look(10, 8) == ["1 at tcp://h:1"]
        assert [look(10), look(10), look(10)] == [[], [], ["0 at tcp://h:0"]]
