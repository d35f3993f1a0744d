"""Running tasks: failures that show no value, names that tell nothing, progress, and a cluster that goes away."""

from __future__ import annotations

import functools
import json
import logging
import os
import re
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import dask
import pyarrow as pa
import pytest
from distributed import Client, LocalCluster
from e2e.helpers import digests, hidden, lake, load, processes, run_each, run_here, spy_on_stages, write_job

from dpdask.engine.compute import guard
from dpdask.errors import DataError, InputError, InternalError, TemporaryError
from dpdask.jobs.run import run_job

SECRET = "4711.25"


@guard
def unforeseen(value: str) -> None:
    pa.array([value]).cast(pa.int64())  # Arrow's message quotes the value


@guard
def foreseen(value: str) -> None:
    try:
        float(value + "x")
    except ValueError:
        raise DataError("a value is no level", "column 'a'", "hint it") from None


@guard
def no_memory() -> None:
    raise MemoryError(SECRET)


@guard
def double(number: int) -> int:
    return 2 * number


def read_then(function: Callable[[str], Any], path: str) -> Any:
    return function(Path(path).read_text())


def sleep_long(_: int) -> None:
    time.sleep(30)


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with dask.config.set({"distributed.scheduler.allowed-failures": 0}), processes(2) as started:
        yield started


@contextmanager
def scheduler(name: str, cluster: LocalCluster | None) -> Iterator[None]:
    with Client(cluster) if name == "cluster" else nullcontext(), dask.config.set({} if name == "cluster" else {"scheduler": name}):
        yield


SCHEDULERS = ["synchronous", "threads", "cluster"]


def everything(error: BaseException) -> str:
    """Return all that an error and what hangs on it can show."""
    whole = "".join(traceback.format_exception(error, chain=True)) + repr(error.args)
    for other in (error.__context__, error.__cause__):
        assert other is None or other is error or isinstance(other, InternalError | DataError | TemporaryError)
    return whole


@pytest.mark.parametrize("name", SCHEDULERS)
def test_an_unforeseen_failure_is_told_by_type_and_place(
    name: str, cluster: LocalCluster, tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
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


def test_arrow_quotes_the_value() -> None:
    with pytest.raises(pa.ArrowInvalid, match=SECRET):  # or the tests here would prove nothing
        unforeseen.__wrapped__(SECRET)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_foreseen_failure_arrives_as_it_is(name: str, cluster: LocalCluster, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "value").write_text(SECRET)
    with scheduler(name, cluster), pytest.raises(DataError) as caught:
        run_each("test", functools.partial(read_then, foreseen), [str(tmp_path / "value")])
    assert str(caught.value) == "column 'a': a value is no level; hint it"
    assert SECRET not in everything(caught.value) + "".join(capfd.readouterr())


def test_no_memory_is_temporary() -> None:
    with pytest.raises(TemporaryError, match="out of memory") as caught:
        no_memory()
    assert SECRET not in everything(caught.value)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_results_keep_their_order_and_progress_is_complete(name: str, cluster: LocalCluster) -> None:
    seen: list[tuple[str, int, int]] = []
    with scheduler(name, cluster):
        assert run_each("test", double, range(40), lambda *step: seen.append(step)) == [2 * number for number in range(40)]
    assert seen == [("test", done, 40) for done in range(1, 41)]


def test_nothing_to_do() -> None:
    assert run_each("test", double, [], lambda *_: pytest.fail("no step was done")) == []


def test_workers_lost_too_often(cluster: LocalCluster) -> None:
    with Client(cluster), pytest.raises(TemporaryError, match="lost its scheduler or its workers") as caught:
        run_each("test", os._exit, [1])
    assert caught.value.where == "test"


def test_a_cluster_that_goes_away() -> None:
    with processes(1) as going, Client(going):
        closing = threading.Timer(1.0, going.close)
        closing.start()
        with pytest.raises(TemporaryError, match="lost its scheduler or its workers"):
            run_each("test", sleep_long, range(3))
        closing.join()


def test_task_names_tell_stages_and_numbers_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names: set[str] = set()
    spy_on_stages(lambda _, nodes: names.update(nodes), monkeypatch)
    public = {"kind": "public", "path": str(lake(tmp_path / "public", [300] * 9, seed=2))}
    source = lake(tmp_path / "in", [300] * 9)
    run_here(write_job(tmp_path / "a", source, tmp_path / "out-a"))
    run_here(write_job(tmp_path / "b", source, tmp_path / "out-b", mechanism__reference=public))
    assert {name.split("-")[1] for name in names} == {"survey", "reference", "merge", "work", "write"}
    for name in names:
        assert re.fullmatch(r"dpdask-(survey|reference|write|merge|work)-[0-9a-f]{12}(-\d+){0,2}", name), name


def test_progress_of_a_run_is_complete(tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    job = write_job(tmp_path, lake(tmp_path / "in", [300] * 9), tmp_path / "out")
    run_here(job, lambda *step: seen.append(step))
    for stage in ("survey", "write"):
        steps = [(done, total) for name, done, total in seen if name == stage]
        assert steps == [(done, steps[0][1]) for done in range(1, steps[0][1] + 1)]
    assert [name for name, *_ in seen] == sorted((name for name, *_ in seen), key=["survey", "write"].index)


def test_two_jobs_on_one_scheduler_do_not_mix(cluster: LocalCluster, tmp_path: Path) -> None:
    source = lake(tmp_path / "in", [300] * 6)
    names = {f"out{epsilon}": epsilon for epsilon in (1.0, 2.0, 3.0)}
    jobs = {name: write_job(tmp_path / f"job-{name}", source, tmp_path / name, privacy__epsilon=epsilon) for name, epsilon in names.items()}
    failures: list[BaseException] = []

    def one(job: Path) -> None:
        try:
            run_job(load(job))
        except BaseException as error:
            failures.append(error)

    with Client(cluster):
        threads = [threading.Thread(target=one, args=(job,)) for job in jobs.values()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failures == []
    for name, job in jobs.items():
        run_here(job, output__path=tmp_path / f"quiet-{name}")
        assert digests(tmp_path / name) == digests(tmp_path / f"quiet-{name}")


def test_worker_logs_hold_no_private_count(cluster: LocalCluster, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source = lake(tmp_path / "in", [1234] * 3, row_group=1234)
    job = write_job(tmp_path, source, tmp_path / "out")
    counts: list[int] = []

    def spoil(stage: str, done: int, total: int) -> None:
        if stage == "survey" and done == total:
            victim = sorted(source.iterdir())[-1]
            victim.write_bytes(next(lake(tmp_path / "other", [50]).iterdir()).read_bytes())

    with Client(cluster) as client:
        with pytest.raises(InputError, match="changed"):
            run_job(load(job), spoil)
        counts = json.loads((hidden(tmp_path / "out") / "run.json").read_text())["n_released"]
        logs = str(client.get_worker_logs()) + str(client.get_scheduler_logs()) + "".join(capfd.readouterr())
    assert len(counts) == 3
    assert "Compute Failed" in logs
    logs = re.sub(r"\d\d:\d\d:\d\d,\d{3}", "", logs)  # a time may hold any number
    assert not [count for count in counts if re.search(rf"\b{count}\b", logs)]
    assert "n_released" not in logs


def test_a_cluster_without_workers_ends_in_75_instead_of_hanging(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpdask.engine.cluster.LONELY_SECONDS", 0.5)
    monkeypatch.setattr("dpdask.engine.cluster._POLL_SECONDS", 0.2)
    options = {"host": "127.0.0.1", "dashboard_address": "127.0.0.1:0", "processes": False, "protocol": "tcp"}
    with LocalCluster(n_workers=0, **options) as cluster, Client(cluster), pytest.raises(TemporaryError, match="lost its scheduler or its workers"):
        run_each("stage", abs, [-1])
