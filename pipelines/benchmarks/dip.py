"""The main job against a plain Dask copy of the same table: seconds, their ratio, and each worker's peak memory.

    python pipelines/benchmarks/dip.py --rows 25000095 --pairs 3 --json dip.json

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
from distributed import Client, LocalCluster

from dpdask.jobs.run import run_job
from dpdask.jobs.spec import load_job
from dpdask.simulate import simulate_movielens

JOB = Path(__file__).parent.parent / "movielens" / "job.yaml"
WORKERS = 2


@contextmanager
def cluster() -> Iterator[Client]:
    with (
        LocalCluster(n_workers=WORKERS, threads_per_worker=1, host="127.0.0.1", dashboard_address=None) as local,
        Client(local) as client,
    ):
        yield client


def copy(source: Path, target: Path) -> None:
    dd.read_parquet(source).to_parquet(target)


def dip(source: Path, target: Path) -> None:
    # the main job drops the timestamp; here it is kept, so that both sides write all four columns
    schema = source.parent / "schema.yaml"
    schema.write_text((JOB.parent / "schema.yaml").read_text().replace("timestamp: {role: drop}", "timestamp: {role: keep}"))
    run_job(load_job(JOB, {"input.path": str(source), "output.path": str(target), "schema": str(schema)}))


def seconds(step: Callable[[Path, Path], None], source: Path, target: Path) -> float:
    shutil.rmtree(target, ignore_errors=True)
    begin = time.perf_counter()
    step(source, target)
    return time.perf_counter() - begin


def peak_bytes(client: Client, step: Callable[[], None]) -> list[int]:
    """Return each worker process's largest resident memory while `step` runs, sampled every 20 ms."""
    processes = [psutil.Process(pid) for pid in client.run(lambda: __import__("os").getpid()).values()]
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


def measure(rows: int, pairs: int, folder: Path) -> dict[str, object]:
    source, target = folder / "ratings", folder / "out"
    simulate_movielens(str(source), n_rows=rows)
    copies, dips = [], []
    if pairs:
        with cluster():
            seconds(dip, source, target)  # compiles the kernels, warms the page cache
            seconds(copy, source, target)
            for _ in range(pairs):
                copies.append(seconds(copy, source, target))
                dips.append(seconds(dip, source, target))
    with cluster() as client:
        begin = time.perf_counter()
        peaks = peak_bytes(client, lambda: dip(source, folder / "out-memory"))
        alone = time.perf_counter() - begin
    result: dict[str, object] = {"rows": rows, "workers": WORKERS, "pairs": pairs, "peak_mib": [round(peak / 2**20) for peak in peaks]}
    result["dip_on_fresh_cluster_seconds"] = round(alone, 2)
    if pairs:
        ratios = [ours / theirs for ours, theirs in zip(dips, copies, strict=True)]
        result |= {
            "copy_seconds": [round(value, 2) for value in copies],
            "dip_seconds": [round(value, 2) for value in dips],
            "copy_median_seconds": round(statistics.median(copies), 2),
            "dip_median_seconds": round(statistics.median(dips), 2),
            "ratio_of_medians": round(statistics.median(dips) / statistics.median(copies), 3),
            "ratios": [round(ratio, 3) for ratio in ratios],
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=25_000_095)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="Where the tables go; a temporary folder by default.")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        result = measure(arguments.rows, arguments.pairs, Path(folder))
    text = json.dumps(result, indent=1)
    if arguments.json:
        arguments.json.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
