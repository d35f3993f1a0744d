"""A scheduler or all workers that go away in the middle of a run: one line and 75, and the same bytes when it is resumed."""

import signal
import subprocess
import time
from contextlib import ExitStack

import pytest
from connect.processes import python_path, running, scheduler, worker_words
from distributed import Client
from e2e.helpers import command, digests, lake, run_here, write_job

CASES = [
    pytest.param("scheduler", signal.SIGKILL, "write", id="a scheduler that is killed"),
    pytest.param(
        "workers", signal.SIGKILL, "write", id="workers that are killed", marks=pytest.mark.slow
    ),
]


@pytest.mark.matrix("cluster lost", "{what}")
@pytest.mark.more
@pytest.mark.parametrize(("what", "strike", "stage"), CASES)
def test_what_is_lost_is_temporary(what, strike, stage, tmp_path):
    source = lake(tmp_path / "in", [3000] * 10, row_group=1000)
    with scheduler(tmp_path) as (process, address), ExitStack() as stack:
        workers = [
            stack.enter_context(running(worker_words(address), tmp_path / f"worker-{number}.log"))
            for number in range(2)
        ]
        with Client(address, set_as_default=False) as client:
            client.wait_for_workers(2, timeout=120)
        block = {"kind": "address", "address": address}
        job = write_job(
            tmp_path / "job", source, tmp_path / "out", cluster=block, output__rows_per_shard=1000
        )
        environment = {**python_path(), "DASK_DPDASK__PATIENCE_SECONDS": "10"}
        said = []
        with subprocess.Popen(
            command("run", job),
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        ) as driver:
            assert driver.stderr is not None
            for line in driver.stderr:
                said.append(line)
                if (
                    f'"stage": "{stage}", "done": 0,' in line
                ):  # a log has few lines: this one, and later ones after seconds
                    time.sleep(0.2)
                    for each in [process] if what == "scheduler" else workers:
                        each.send_signal(strike)
            assert driver.wait(timeout=100) == 75, said
    [line] = [line for line in said if not line.startswith("{")]
    assert line.startswith("dpdask: ")
    assert "the cluster lost its scheduler or its workers" in line
    assert line.endswith("run again to resume\n")
    run_here(job, cluster="{kind: synchronous}")
    run_here(job, output__path=tmp_path / "quiet", cluster="{kind: synchronous}")
    assert digests(tmp_path / "out") == digests(tmp_path / "quiet")
