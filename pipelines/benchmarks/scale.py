"""What many fragments cost: CPU seconds and memory of the driver and the scheduler for each of them, and how they grow.

    python -m pipelines.benchmarks.scale --fragments 1000 10000 100000 --json scale.json
    python -m pipelines.benchmarks.scale --simulate scale.json

The table has many small Parquet files, so reading and writing cost next to nothing, and what is left is the cost of a fragment: it is found,
counted, randomised and committed. The driver, the scheduler and the workers are processes of their own, and their CPU seconds are counted, so a
busy machine changes little. What a scheduler uses while it waits is measured first and taken off, since it follows wall time. A small table is
released twice before: the first run loads code, and the costs of the second, which do not depend on the number of fragments, are taken off. The
growth exponent is the slope of driver and scheduler seconds between the smallest and the largest table, both on logarithmic scales.

From the costs of the largest table, a simulation computes 1,000,000 fragments on 1,000 workers: one driver that submits windows of tasks, one
scheduler that takes in and hands out one task after the other, and workers. It tells which of them the others wait for, and what breaks first.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
from distributed import Client

from dpdask.engine.compute import WINDOW
from dpdask.jobs.run import run_job
from dpdask.jobs.spec import load_job
from pipelines.benchmarks.common import add_folder, keep, parser

JOB = Path(__file__).parents[1] / "movielens" / "job.yaml"
ROWS = 16
WARM = 50
IDLE_SECONDS = 10.0
PASSES = 2
BARS = {"milliseconds_each": 3.0, "driver_mib": 1024.0, "exponent": 1.05}
QUIET = ["--no-dashboard", "--dashboard-address", "127.0.0.1:0"]


def write_lake(folder: Path, n_fragments: int) -> None:
    """Write a table of so many files, each with a few ratings."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(1)
    # each file has rows of its own: a job refuses copies
    for number in range(n_fragments):
        rows = {
            "userId": rng.integers(1, 1000, ROWS, dtype=np.int32),
            "movieId": rng.integers(1, 1000, ROWS, dtype=np.int32),
            "rating": rng.choice(np.arange(0.5, 5.5, 0.5), ROWS),
            "timestamp": rng.integers(0, 2**30, ROWS),
        }
        pq.write_table(pa.table(rows), folder / f"part-{number:06}.parquet")


def drive(source: str, target: str, address: str) -> dict[str, Any]:
    """Run the job in this process; return its CPU seconds by stage, and its memory."""
    marks: list[tuple[str, float]] = []

    def watch(stage: str, done: int, total: int) -> None:
        del done, total
        if not marks or marks[-1][0] != stage:
            marks.append((stage, time.process_time()))

    settings = {"input.path": source, "output.path": target, "output.rows_per_shard": str(ROWS)}
    job = load_job(JOB, settings)
    begin = time.process_time()
    with Client(address):
        marks.append(("discover", begin))
        outcome = run_job(job, watch)
    end = time.process_time()
    ends = [mark for _, mark in marks[1:]] + [end]
    stages = {
        stage: round(after - before, 3) for (stage, before), after in zip(marks, ends, strict=True)
    }
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {
        "seconds": end - begin,
        "stages": stages,
        "mib": round(peak, 1),
        "shards": len(outcome.manifest.shards),
    }


@contextmanager
def running(part: str, options: Sequence[str]) -> Iterator[psutil.Process]:
    """Run a part of Dask's cluster, `scheduler` or `worker`."""
    words = [sys.executable, "-m", f"distributed.cli.dask_{part}", *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    quiet: dict[str, Any] = dict.fromkeys(("stdout", "stderr"), subprocess.DEVNULL)
    with subprocess.Popen(words, env=environment, **quiet) as process:  # noqa: S603 - this Python
        try:
            yield psutil.Process(process.pid)
        finally:
            process.kill()


@contextmanager
def cluster(
    folder: Path, n_workers: int
) -> Iterator[tuple[str, psutil.Process, list[psutil.Process]]]:
    """Start a scheduler and workers on the loopback; yield the address and the processes."""
    file = folder / "scheduler.json"
    with ExitStack() as stack:
        options = ["--host", "127.0.0.1", "--port", "0", *QUIET, "--scheduler-file", str(file)]
        scheduler = stack.enter_context(running("scheduler", options))
        while not file.exists() or not file.read_text().endswith("}"):
            time.sleep(0.1)
        address = str(json.loads(file.read_text())["address"])
        options = [address, "--nthreads", "1", "--no-nanny", *QUIET]
        options += ["--local-directory", str(folder)]
        workers = [stack.enter_context(running("worker", options)) for _ in range(n_workers)]
        with Client(address, set_as_default=False) as client:
            client.wait_for_workers(n_workers, timeout=300)
        yield address, scheduler, workers


def count_seconds(processes: Sequence[psutil.Process]) -> float:
    """Return the CPU seconds that processes have used, user and system."""
    return float(
        sum(used.user + used.system for used in (process.cpu_times() for process in processes))
    )


def measure_idle(scheduler: psutil.Process) -> float:
    """Return the CPU seconds that a scheduler uses in a second without tasks."""
    before = count_seconds([scheduler])
    time.sleep(IDLE_SECONDS)
    return (count_seconds([scheduler]) - before) / IDLE_SECONDS


def measure(
    folder: Path, n_fragments: int, n_workers: int, profile: Path | None = None
) -> dict[str, Any]:
    """Run the job on a table of so many fragments, after a small one; return what each process used."""
    found: dict[str, Any] = {}
    with cluster(folder, n_workers) as (address, scheduler, workers):
        idle = measure_idle(scheduler)
        for name, n in (("cold", WARM), ("warm", WARM), ("table", n_fragments)):
            source, target = folder / name, folder / f"{name}-out"
            write_lake(source, n)
            profiled = ["-m", "cProfile", "-o", str(profile)] if profile and name == "table" else []
            driven = ["--drive", str(source), str(target), address]
            words = [sys.executable, *profiled, "-m", "pipelines.benchmarks.scale", *driven]
            before = [count_seconds([scheduler]), count_seconds(workers), time.perf_counter()]
            ended = subprocess.run(words, capture_output=True, text=True, check=True)  # noqa: S603 - this Python
            after = [count_seconds([scheduler]), count_seconds(workers), time.perf_counter()]
            of_scheduler, of_workers, wall = np.subtract(after, before).tolist()
            found[name] = {
                "driver": json.loads(ended.stdout.splitlines()[-1]),
                "scheduler": of_scheduler - idle * wall,
                "workers": of_workers,
                "wall": wall,
                "scheduler_mib": scheduler.memory_info().rss / 2**20,
            }
            shutil.rmtree(source)
            shutil.rmtree(target)
    return {
        **summarise(n_fragments, found["warm"], found["table"]),
        "scheduler_idle_ms_per_second": round(1000 * idle, 2),
    }


def summarise(
    n_fragments: int, warm: Mapping[str, Any], table: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the costs of a fragment: those of a table without those of a small one."""
    n, driver, before = n_fragments - WARM, table["driver"], warm["driver"]

    def each(seconds: float, start: float) -> float:
        return round(1000 * max(0.0, seconds - start) / n, 4)

    driver_ms = each(driver["seconds"], before["seconds"])
    scheduler_ms = each(table["scheduler"], warm["scheduler"])
    scheduler_mib = table["scheduler_mib"]
    return {
        "fragments": n_fragments,
        "driver_ms_each": driver_ms,
        "scheduler_ms_each": scheduler_ms,
        "milliseconds_each": round(driver_ms + scheduler_ms, 4),
        "worker_ms_each": each(table["workers"], warm["workers"]),
        "driver_seconds": round(driver["seconds"], 2),
        "driver_stages": driver["stages"],
        "scheduler_seconds": round(table["scheduler"], 2),
        "driver_mib": driver["mib"],
        "driver_kib_each": round(1024 * (driver["mib"] - before["mib"]) / n, 3),
        "scheduler_mib": round(scheduler_mib, 1),
        "scheduler_kib_each": round(1024 * (scheduler_mib - warm["scheduler_mib"]) / n, 3),
        "wall_seconds": round(table["wall"], 1),
        "shards": driver["shards"],
    }


def find_exponent(runs: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the slope of driver and scheduler seconds over fragments, both as logarithms; None if there is one size, or no measurable time."""
    first, last = runs[0], runs[-1]
    totals = [(run["fragments"] - WARM) * run["milliseconds_each"] for run in (first, last)]
    if first["fragments"] == last["fragments"] or min(totals) <= 0:
        return None
    return round(
        math.log(totals[1] / totals[0])
        / math.log((last["fragments"] - WARM) / (first["fragments"] - WARM)),
        4,
    )


def simulate(
    run: Mapping[str, Any], *, n_fragments: int, n_workers: int, seconds_each: float
) -> dict[str, Any]:
    """Return how long a job takes on many workers, and who waits for whom.

    A stage is a queue: the driver hands over tasks while fewer than a window are with the scheduler; the scheduler takes in, hands out and takes
    back one task after the other; a worker computes one task at a time.
    """
    driver, scheduler = (run[f"{name}_ms_each"] / 1000 / PASSES for name in ("driver", "scheduler"))
    clock_driver = clock_scheduler = busy = end = 0.0
    free = [0.0] * n_workers  # when each worker has nothing to do
    out: list[float] = []  # when each task that the scheduler has is done
    for _ in range(n_fragments):
        if len(out) >= WINDOW:
            clock_driver = max(clock_driver, heapq.heappop(out))
        clock_driver += driver
        clock_scheduler = max(clock_scheduler, clock_driver) + scheduler
        start = max(heapq.heappop(free), clock_scheduler)
        done = start + seconds_each
        busy += seconds_each
        end = max(end, done)
        heapq.heappush(free, done)
        heapq.heappush(out, done)
    served = n_fragments / n_workers * seconds_each
    limits = {
        "driver": n_fragments * driver,
        "scheduler": n_fragments * scheduler,
        "workers": served,
    }
    mib = {
        name: round(
            run[f"{name}_mib"] + (n_fragments - run["fragments"]) * run[f"{name}_kib_each"] / 1024
        )
        for name in ("driver", "scheduler")
    }
    return {
        "fragments": n_fragments,
        "workers": n_workers,
        "seconds_of_a_task": seconds_each,
        "hours": round(PASSES * end / 3600, 3),
        "driver_hours": round(PASSES * limits["driver"] / 3600, 3),
        "scheduler_hours": round(PASSES * limits["scheduler"] / 3600, 3),
        "share_of_time_that_workers_work": round(busy / (n_workers * end), 3),
        "others_wait_for": max(limits, key=lambda name: limits[name]),
        "workers_that_the_scheduler_keeps_busy": int(seconds_each / max(driver, scheduler)),
        "mib": mib,
    }


def extrapolate(run: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the simulation for tasks of several lengths, and what breaks first as tables grow; None if the table is too small to tell."""
    if min(run["driver_ms_each"], run["scheduler_ms_each"]) <= 0:
        return None
    found = [
        simulate(run, n_fragments=10**6, n_workers=1000, seconds_each=seconds)
        for seconds in (0.1, 1.0, 5.0)
    ]
    breaks: dict[str, int] = {}
    for name in ("driver", "scheduler"):
        breaks[f"{name}: more than an hour of CPU"] = int(3600e3 / run[f"{name}_ms_each"])
        if run[f"{name}_kib_each"] > 0:
            breaks[f"{name}: more than 1 GiB"] = run["fragments"] + int(
                1024 * (1024 - run[f"{name}_mib"]) / run[f"{name}_kib_each"]
            )
    return {
        "runs": found,
        "breaks_at_fragments": dict(sorted(breaks.items(), key=lambda item: item[1])),
    }


def main(words: Sequence[str] | None = None) -> None:
    options = parser(__doc__)
    add_folder(options)
    options.add_argument("--fragments", type=int, nargs="+", default=[1000, 10_000])
    options.add_argument("--workers", type=int, default=2)
    options.add_argument(
        "--profile",
        type=Path,
        help="Where the driver's profile of the last table goes; profiling slows it down.",
    )
    options.add_argument(
        "--simulate",
        type=Path,
        help="Measure nothing: simulate from the figures of an earlier run.",
    )
    options.add_argument("--drive", nargs=3, help=argparse.SUPPRESS)
    arguments = options.parse_args(words)
    if arguments.drive:
        print(json.dumps(drive(*arguments.drive)))
        return
    if arguments.simulate:
        runs = json.loads(arguments.simulate.read_text())["runs"]
    else:
        runs, largest = [], max(arguments.fragments)
        for n in sorted(arguments.fragments):
            profile = arguments.profile if n == largest else None
            with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
                runs.append(measure(Path(folder), n, arguments.workers, profile))
    worst = {
        **{name: runs[-1][name] for name in BARS if name in runs[-1]},
        "exponent": find_exponent(runs),
    }
    met = {name: worst[name] is None or worst[name] <= bar for name, bar in BARS.items()}
    found = {"runs": runs, **worst, "bars": BARS, "met": met}
    print(keep({**found, "extrapolated": extrapolate(runs[-1])}, arguments.json))


if __name__ == "__main__":
    main()
