"""Running tasks: failures that show no value, names that tell nothing, progress, and a cluster that goes away."""

import functools
import json
import logging
import os
import platform
import re
import subprocess
import sys
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import dask
import numpy as np
import pyarrow as pa
import pytest
from distributed import Client, KilledWorker, LocalCluster
from e2e.helpers import (
    apply,
    digests,
    hidden,
    join,
    lake,
    load,
    processes,
    run_each,
    run_here,
    spy_on_stages,
    write_job,
)
from threadpoolctl import threadpool_info, threadpool_limits

from dpdask.engine import fit as engine_fit
from dpdask.engine.compute import guard, make_stage, run_stage
from dpdask.engine.source import FilePart
from dpdask.errors import DataError, InputError, InternalError, TemporaryError
from dpdask.io.fragment import Fragment
from dpdask.jobs.run import run_job

SECRET = "4711.25"


@guard
def unforeseen(value):
    pa.array([value]).cast(pa.int64())  # Arrow's message quotes the value


@guard
def foreseen(value):
    try:
        float(value + "x")
    except ValueError:
        raise DataError("a value is no level", "column 'a'", "hint it") from None


@guard
def no_memory_for(parts):
    raise MemoryError(SECRET, parts)


@guard
def double(number):
    return 2 * number


def read_then(function, path):
    return function(Path(path).read_text())


def sleep_long(_):
    time.sleep(30)


@pytest.fixture(scope="module")
def cluster():
    with dask.config.set({"distributed.scheduler.allowed-failures": 0}), processes(2) as started:
        yield started


@contextmanager
def scheduler(name, cluster):
    with (
        Client(cluster) if name == "cluster" else nullcontext(),
        dask.config.set({} if name == "cluster" else {"scheduler": name}),
    ):
        yield


SCHEDULERS = ["threads", "cluster"]


def everything(error):
    """Return all that an error and what hangs on it can show."""
    whole = "".join(traceback.format_exception(error, chain=True)) + repr(error.args)
    for other in (error.__context__, error.__cause__):
        assert (
            other is None
            or other is error
            or isinstance(other, InternalError | DataError | TemporaryError)
        )
    return whole


@pytest.mark.parametrize("name", SCHEDULERS)
def test_an_unforeseen_failure_is_told_by_type_and_place(name, cluster, tmp_path, capfd, caplog):
    with pytest.raises(
        pa.ArrowInvalid, match=SECRET
    ):  # Arrow quotes the value, or this would prove nothing
        unforeseen.__wrapped__(SECRET)  # type: ignore[attr-defined]
    caplog.set_level(logging.DEBUG)
    (tmp_path / "value").write_text(SECRET)
    place = r"^ArrowInvalid in [\w.]+, line \d+; please report it, without data$"
    with scheduler(name, cluster), pytest.raises(InternalError, match=place) as caught:
        run_each("test", functools.partial(read_then, unforeseen), [str(tmp_path / "value")])
    logs = ""
    if name == "cluster":
        with Client(cluster) as client:
            logs = str(client.get_worker_logs()) + str(client.get_scheduler_logs())
        assert "Compute Failed" in logs
    out, err = capfd.readouterr()
    for text in (everything(caught.value), logs, out, err, caplog.text):
        assert SECRET not in text


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_foreseen_failure_arrives_as_it_is(name, cluster, tmp_path, capfd):
    (tmp_path / "value").write_text(SECRET)
    with scheduler(name, cluster), pytest.raises(DataError) as caught:
        run_each("test", functools.partial(read_then, foreseen), [str(tmp_path / "value")])
    assert str(caught.value) == "column 'a': a value is no level; hint it"
    assert SECRET not in everything(caught.value) + "".join(capfd.readouterr())


def large_part():
    sizes = {"n_rows": 10, "n_bytes": 1000, "n_bytes_decoded": 3 * 2**30}
    return FilePart(
        Fragment(
            id="0" * 32,
            url="file:///part.parquet",
            name="part.parquet",
            format="parquet",
            row_group=2,
            version="1",
            **sizes,
        )
    )


def test_an_error_of_memory_names_the_fragment_its_size_and_the_hint():
    with pytest.raises(TemporaryError) as caught:
        no_memory_for([large_part()])
    line = "part.parquet, row group 2: a worker ran out of memory: this fragment has 3.00 GiB; give workers more memory or fewer threads, "
    assert str(caught.value) == line + "or write smaller row groups, and run again to resume"
    assert SECRET not in everything(caught.value)


class LostFuture:
    """A future as distributed leaves it when the scheduler is gone: it has no exception, and `result` raises None."""

    def __init__(self, key, status):
        self.key, self.status = key, status

    def add_done_callback(self, call):
        call(self)

    def exception(self, timeout):
        assert timeout

    def result(self, timeout):
        assert timeout
        raise TypeError("exceptions must derive from BaseException")


@pytest.mark.parametrize("status", ["error", "cancelled", "lost", "pending"])
def test_a_future_without_an_exception_is_a_lost_scheduler(status, monkeypatch):
    client = SimpleNamespace(
        get=lambda _, keys, **__: [LostFuture(key, status) for key in keys], cancel=lambda _: None
    )
    monkeypatch.setattr("dpdask.engine.compute.find_client", lambda: client)
    with pytest.raises(
        TemporaryError,
        match=r"^test: the cluster lost its scheduler or its workers \(.*CancelledError\); run again to resume$",
    ):
        run_each("test", double, [1])


@pytest.mark.parametrize("stopped", [True, False], ids=["by its nanny", "by the system"])
def test_a_worker_that_dies_of_memory_is_told_so(stopped, monkeypatch):
    stage = make_stage("write", apply, [(large_part(),)], double, join)

    class KilledFuture(LostFuture):
        def exception(self, timeout):  # type: ignore[override]
            assert timeout
            return KilledWorker(
                self.key, SimpleNamespace(memory_limit=2**30, address="tcp://10.0.0.1:1"), 3
            )

    events = [(time.time() + 60, {"worker": "tcp://10.0.0.1:1"})] if stopped else [(0.0, {})]
    made = lambda _, keys, **__: [KilledFuture(key, "error") for key in keys]  # noqa: E731
    client = SimpleNamespace(get=made, cancel=lambda _: None, get_events=lambda _: events)
    monkeypatch.setattr("dpdask.engine.compute.find_client", lambda: client)
    with pytest.raises(TemporaryError) as caught:
        list(run_stage(stage))
    text = str(caught.value)
    assert text.startswith("write, part.parquet, row group 2: ")
    assert "this fragment has 3.00 GiB, and a worker may use 1.00 GiB" in text
    assert ("a worker ran out of memory" in text) == stopped
    assert "give workers more memory or fewer threads, or write smaller row groups" in text
    assert "10.0.0.1" not in text


def eat(_):
    time.sleep(1.0)  # the nanny looks from time to time
    held = []
    for _ in range(100):
        held.append(np.ones(2**22))  # 32 MiB
        time.sleep(0.05)


@pytest.mark.slow
def test_a_worker_that_its_nanny_stops_for_memory():
    options = {"host": "127.0.0.1", "dashboard_address": "127.0.0.1:0", "memory_limit": "900MiB"}
    with (
        dask.config.set({"distributed.scheduler.allowed-failures": 0}),
        LocalCluster(n_workers=1, threads_per_worker=1, **options) as cluster,
        Client(cluster),
        pytest.raises(TemporaryError, match="a worker ran out of memory"),
    ):
        run_each("test", eat, [1])


def count_threads(_):
    return [pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"]


@pytest.mark.parametrize("name", SCHEDULERS)
def test_blas_has_one_thread_in_tasks(name, cluster):
    with scheduler(name, cluster), threadpool_limits(2):
        [found] = run_each("test", guard(count_threads), [1])
    assert found
    assert set(found) == {1}


def test_blas_has_one_thread_in_the_fit(tmp_path, monkeypatch):
    found = []
    inner = engine_fit.keep  # what was fitted is kept before the fit ends
    monkeypatch.setattr(
        engine_fit, "keep", lambda *given: (found.extend(count_threads(0)), inner(*given))[1]
    )
    with threadpool_limits(2):
        run_here(write_job(tmp_path, lake(tmp_path / "in", [100]), tmp_path / "out"))
    assert set(found) == {1}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_results_keep_their_order_and_progress_is_complete(name, cluster):
    seen = []
    with scheduler(name, cluster):
        assert run_each("test", double, range(40), lambda *step: seen.append(step)) == [
            2 * number for number in range(40)
        ]
    assert seen == [("test", done, 40) for done in range(41)]
    assert run_each("test", double, [], lambda *_: pytest.fail("no step was done")) == []


def test_workers_lost_too_often(cluster):
    with (
        Client(cluster),
        pytest.raises(TemporaryError, match="lost its scheduler or its workers") as caught,
    ):
        run_each("test", os._exit, [1])
    assert caught.value.where == "test"


def test_a_cluster_that_goes_away():
    with processes(1) as going, Client(going):
        closing = threading.Timer(1.0, going.close)
        closing.start()
        with pytest.raises(TemporaryError, match="lost its scheduler or its workers"):
            run_each("test", sleep_long, range(3))
        closing.join()


def test_task_names_tell_stages_and_numbers_only(tmp_path, monkeypatch):
    names = set()
    spy_on_stages(lambda _, nodes: names.update(nodes), monkeypatch)
    public = {"kind": "public", "path": str(lake(tmp_path / "public", [300] * 9, seed=2))}
    source = lake(tmp_path / "in", [300] * 9)
    run_here(write_job(tmp_path / "a", source, tmp_path / "out-a"))
    run_here(write_job(tmp_path / "b", source, tmp_path / "out-b", mechanism__reference=public))
    assert {name.split("-")[1] for name in names} == {
        "survey",
        "reference",
        "merge",
        "work",
        "write",
    }
    for name in names:
        assert re.fullmatch(
            r"dpdask-(survey|reference|write|merge|work)-[0-9a-f]{12}(-\d+){0,2}", name
        ), name


def test_two_jobs_on_one_scheduler_do_not_mix(cluster, tmp_path):
    source = lake(tmp_path / "in", [300] * 6)
    jobs = {
        f"out{epsilon}": write_job(
            tmp_path / f"job{epsilon}", source, tmp_path / f"out{epsilon}", privacy__epsilon=epsilon
        )
        for epsilon in (1.0, 2.0)
    }
    with Client(cluster), ThreadPoolExecutor() as threads:
        list(threads.map(lambda job: run_job(load(job)), jobs.values()))
    for name, job in jobs.items():
        run_here(job, output__path=tmp_path / f"quiet-{name}")
        assert digests(tmp_path / name) == digests(tmp_path / f"quiet-{name}")


def test_worker_logs_hold_no_private_count(cluster, tmp_path, capfd):
    source = lake(tmp_path / "in", [1234] * 3, row_group=1234)
    job = write_job(tmp_path, source, tmp_path / "out")
    counts = []

    def spoil(stage, done, total):
        if stage == "survey" and done == total:
            victim = sorted(source.iterdir())[-1]
            victim.write_bytes(next(lake(tmp_path / "other", [50]).iterdir()).read_bytes())

    with Client(cluster) as client:
        with pytest.raises(InputError, match="changed"):
            run_job(load(job), spoil)
        counts = json.loads((hidden(tmp_path / "out") / "run.json").read_text())["n_released"]
        logs = (
            str(client.get_worker_logs())
            + str(client.get_scheduler_logs())
            + "".join(capfd.readouterr())
        )
    assert len(counts) == 3
    assert "Compute Failed" in logs
    logs = re.sub(r"\d\d:\d\d:\d\d,\d{3}|\d+\.\d+", "", logs)  # a time may hold any number
    assert not [count for count in counts if re.search(rf"\b{count}\b", logs)]
    assert "n_released" not in logs


def test_a_cluster_without_workers_ends_in_75_instead_of_hanging(monkeypatch):
    monkeypatch.setattr("dpdask.engine.compute.LONELY_SECONDS", 0.5)
    monkeypatch.setattr("dpdask.engine.compute._POLL_SECONDS", 0.2)
    options = {
        "host": "127.0.0.1",
        "dashboard_address": "127.0.0.1:0",
        "processes": False,
        "protocol": "tcp",
    }
    with (
        LocalCluster(n_workers=0, **options) as cluster,
        Client(cluster),
        pytest.raises(TemporaryError, match="lost its scheduler or its workers"),
    ):
        run_each("stage", abs, [-1])


FAULTS = """
import resource
import numpy as np
from dpdask.engine.compute import guard

@guard
def use():
    held = [np.empty(2**24, dtype=np.uint8) for _ in range(4)]
    for array in held:
        array.fill(1)

use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    use()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.more
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has this setting")
def test_what_a_task_frees_the_next_one_uses(monkeypatch):
    for name in ("GLIBC_TUNABLES", "LD_PRELOAD", "MALLOC_MMAP_THRESHOLD_"):
        monkeypatch.delenv(name, raising=False)
    found = []
    for trim in ("65536", "65537"):  # as Dask sets it, and as somebody else did
        monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", trim)
        found.append(
            int(
                subprocess.run(
                    [sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True
                ).stdout
            )
        )
    few, many = 200, 20 * 4 * 8  # at least one page of 2 MiB for each 2 MiB of an array
    assert found[0] < few < many <= found[1]
