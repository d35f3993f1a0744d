"""The main job against a plain Dask copy of the same table: seconds, their ratio, and each worker's peak memory.

    python pipelines/benchmarks/dip.py --rows 25000095 --pairs 3 --json dip.json
    python pipelines/benchmarks/dip.py --job units --against dip
    python pipelines/benchmarks/dip.py --job chain

The table is MovieLens' ratings; that of `chain` and `tree` has five discrete columns, all of them private.

Runs are interleaved (copy, DIP, copy, DIP, …) on one local cluster of two processes, so that a noisy machine disturbs
both alike; the figures are medians. Memory is read on a cluster of its own that never made a copy. Needs the `test` extra.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import dask.dataframe as dd
import psutil
from distributed import Client, default_client

from dpdask.connect import open_cluster
from dpdask.connect.spec import Local
from dpdask.jobs.run import run_job
from dpdask.jobs.spec import load_job
from dpdask.simulate import simulate_census, simulate_movielens

JOB = Path(__file__).parent.parent / "movielens" / "job.yaml"
WORKERS = 2


@contextmanager
def cluster() -> Iterator[Client]:
    """Start the cluster that a job's `cluster: {kind: local, workers: 2}` starts; both sides run on it."""
    with open_cluster(Local(workers=WORKERS)):
        yield default_client()


def copy(source: Path, target: Path) -> None:
    dd.read_parquet(source).to_parquet(target)


def job(settings: dict[str, str]) -> Callable[[Path, Path], None]:
    """Return a step that runs the main job with some settings."""

    def step(source: Path, target: Path) -> None:
        # the main job drops the timestamp; here it is kept, so that both sides write all four columns
        schema = source.parent / "schema.yaml"
        schema.write_text(
            (JOB.parent / "schema.yaml")
            .read_text()
            .replace("timestamp: {role: drop}", "timestamp: {role: keep}")
        )
        run_job(
            load_job(
                JOB,
                {
                    "input.path": str(source),
                    "output.path": str(target),
                    "schema": str(schema),
                    **settings,
                },
            )
        )

    return step


def five_columns(reference: str) -> Callable[[Path, Path], None]:
    """Return a step that privatises the five columns of a census jointly."""

    def step(source: Path, target: Path) -> None:
        paths = {
            "input.path": str(source),
            "output.path": str(target),
            "schema": f"{source}-schema.yaml",
        }
        run_job(load_job(JOB, {**paths, "mechanism.reference": reference}))

    return step


STEPS: dict[str, Callable[[Path, Path], None]] = {
    "copy": copy,
    "dip": job({}),
    "keep": job({"output.order": "keep"}),
    "histogram": job({"mechanism.reference": "{kind: histogram}", "mechanism.channel": "optimal"}),
    "interval": job(
        {
            "privacy": "null",
            "mechanism": "{kind: interval, columns: {rating: {design: case2, anchors: {name: uniform, loc: 0, scale: 5.5}}}}",
        }
    ),
    "units": job({"privacy.unit": "{column: userId, max_rows: 20}"}),
    "by": job({"mechanism.reference": "{kind: chain, fraction: 0.25, by: userId}"}),
    "chain": five_columns("{kind: chain, fraction: 0.25}"),
    "tree": five_columns("{kind: tree}"),
}
OF_FIVE_COLUMNS = {"chain", "tree"}


def seconds(step: Callable[[Path, Path], None], source: Path, target: Path) -> float:
    shutil.rmtree(target, ignore_errors=True)
    begin = time.perf_counter()
    step(source, target)
    return time.perf_counter() - begin


def peak_bytes(client: Client, step: Callable[[], None]) -> list[int]:
    """Return each worker process's largest resident memory while `step` runs, sampled every 20 ms."""
    processes = [
        psutil.Process(pid) for pid in client.run(lambda: __import__("os").getpid()).values()
    ]
    peaks = [0] * len(processes)
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.02):
            for index, process in enumerate(processes):
                peaks[index] = max(peaks[index], process.memory_info().rss)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        step()
    finally:
        done.set()
        watcher.join()
    return peaks


def measure(rows: int, pairs: int, folder: Path, name: str, against: str) -> dict[str, object]:
    source, target = folder / "table", folder / "out"
    if name in OF_FIVE_COLUMNS:
        simulate_census(str(source), n_rows=rows, n_attributes=5)
    else:
        simulate_movielens(str(source), n_rows=rows)
    ours: list[float] = []
    theirs: list[float] = []
    if pairs:
        with cluster():
            for step in (name, against):  # compiles the kernels, warms the page cache
                seconds(STEPS[step], source, target)
            for _ in range(pairs):
                theirs.append(seconds(STEPS[against], source, target))
                ours.append(seconds(STEPS[name], source, target))
    with cluster() as client:
        begin = time.perf_counter()
        peaks = peak_bytes(client, lambda: STEPS[name](source, folder / "out-memory"))
        alone = time.perf_counter() - begin
    result: dict[str, object] = {
        "job": name,
        "against": against,
        "rows": rows,
        "workers": WORKERS,
        "pairs": pairs,
    }
    result |= {
        "worker_peak_mib": [round(peak / 2**20) for peak in peaks],
        "seconds_on_a_fresh_cluster": round(alone, 2),
    }
    if pairs:
        result |= {
            "seconds": [round(value, 2) for value in ours],
            "seconds_against": [round(value, 2) for value in theirs],
            "median_seconds": round(statistics.median(ours), 2),
            "median_seconds_against": round(statistics.median(theirs), 2),
            "ratio_of_medians": round(statistics.median(ours) / statistics.median(theirs), 3),
            "ratios": [round(one / other, 3) for one, other in zip(ours, theirs, strict=True)],
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=25_000_095)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--job", choices=sorted(STEPS), default="dip")
    parser.add_argument("--against", choices=sorted(STEPS), default="copy")
    parser.add_argument(
        "--folder", type=Path, help="Where the tables go; a temporary folder by default."
    )
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        result = measure(
            arguments.rows, arguments.pairs, Path(folder), arguments.job, arguments.against
        )
    text = json.dumps(result, indent=1)
    if arguments.json:
        arguments.json.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
