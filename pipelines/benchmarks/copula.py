"""The copula job at census scale: its counting against DuckDB's, its stages, its peak memory; and how they grow.

    python pipelines/benchmarks/copula.py --rows 5240260 --attributes 27 --levels 674 --pairs 3 --json copula.json
    python pipelines/benchmarks/copula.py --rows 5240260 --attributes 1000 --levels 2000 --pairs 0
    python pipelines/benchmarks/copula.py --job pipelines/adult/job.yaml --input adult.parquet

Counting all two-way tables of a lake of Parquet files is timed in pairs, ours and one DuckDB query over the same files,
interleaved, so that a noisy machine disturbs both alike; the figures are medians. Both use two cores. The whole job runs
once on a cluster of two fresh processes, whose memory is sampled. Needs the `test` extra.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import duckdb
import psutil
from distributed import Client, default_client

from dpdask.connect import open_cluster
from dpdask.connect.spec import Local
from dpdask.engine.scan import scan
from dpdask.io.storage import Folder
from dpdask.jobs.run import run_job
from dpdask.jobs.spec import Job, load_job, open_table
from dpdask.simulate import simulate_census

WORKERS = 2
SPEC = """
name: census-copula
input: {{path: {input}}}
output: {{path: {output}}}
schema: {schema}
privacy: {{epsilon: 1.0, delta: 9.313225746154785e-10, adjacency: add-remove}}
mechanism: {{kind: copula}}
"""


@contextmanager
def cluster() -> Iterator[Client]:
    with open_cluster(Local(workers=WORKERS)):
        yield default_client()


def count_ours(job: Job, folder: Path) -> None:
    opened = open_table(job, Folder(f"file://{folder}"))
    scan(opened.source, opened.work, opened.mechanism.statistic(opened.work.columns), "tabulate")


def count_duckdb(job: Job) -> None:
    """Count every pair of columns in one query: grouping sets, the same two threads, the same files."""
    names = job.schema.privatised
    sets = ", ".join(f'("{a}", "{b}")' for a, b in itertools.combinations(names, 2))
    place = job.input_url.removeprefix("file://")
    files = f"{place}/*.parquet" if Path(place).is_dir() else place
    columns = ", ".join(f'"{name}"' for name in names)
    with duckdb.connect(config={"threads": WORKERS}) as connection:
        connection.execute(
            f"select {columns}, count(*) from read_parquet('{files}') group by grouping sets ({sets})"
        ).fetchnumpy()


def seconds(step: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin


class Watch:
    """Samples the resident memory of a cluster's workers every 20 ms, and times the stages of a job."""

    def __init__(self, client: Client) -> None:
        self._processes = [
            psutil.Process(pid) for pid in client.run(lambda: __import__("os").getpid()).values()
        ]
        self.peaks = [0] * len(self._processes)
        self.stages: dict[str, list[float]] = {}
        self._done = threading.Event()

    def report(self, stage: str, *_: int) -> None:
        self.stages.setdefault(stage, []).append(time.perf_counter())

    def _sample(self) -> None:
        while not self._done.wait(0.02):
            for index, process in enumerate(self._processes):
                self.peaks[index] = max(self.peaks[index], process.memory_info().rss)

    def run(self, step: Callable[[], None]) -> tuple[float, float]:
        watcher = threading.Thread(target=self._sample)
        watcher.start()
        begin = time.perf_counter()
        try:
            step()
        finally:
            self._done.set()
            watcher.join()
        return begin, time.perf_counter()


def whole_job(job: Job) -> dict[str, Any]:
    with cluster() as client:
        watch = Watch(client)
        begin, end = watch.run(lambda: run_job(job, watch.report))
    counted, written = watch.stages["tabulate"][-1], watch.stages["write"]
    return {
        "seconds": round(end - begin, 2),
        "seconds_counting": round(counted - begin, 2),
        "seconds_noise_fit_and_first_shard": round(written[0] - counted, 2),
        "seconds_other_shards": round(end - written[0], 2),
        "worker_peak_mib": [round(peak / 2**20) for peak in watch.peaks],
    }


def measure(job: Job, folder: Path, pairs: int) -> dict[str, Any]:
    ours: list[float] = []
    theirs: list[float] = []
    if pairs:
        with cluster():
            count_ours(job, folder)  # compiles the kernels, warms the page cache
            count_duckdb(job)
            for _ in range(pairs):
                theirs.append(seconds(lambda: count_duckdb(job)))
                ours.append(seconds(lambda: count_ours(job, folder)))
    result: dict[str, Any] = {
        "attributes": len(job.schema.privatised),
        "workers": WORKERS,
        "pairs": pairs,
    }
    if pairs:
        result["counting"] = {
            "seconds": [round(value, 2) for value in ours],
            "seconds_duckdb": [round(value, 2) for value in theirs],
            "ratio_of_medians": round(statistics.median(ours) / statistics.median(theirs), 3),
        }
    result["job"] = whole_job(job)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=5_240_260)
    parser.add_argument("--attributes", type=int, default=27)
    parser.add_argument("--levels", type=int, default=674)
    parser.add_argument(
        "--pairs", type=int, default=3, help="Comparisons with DuckDB; 0 for the job alone."
    )
    parser.add_argument("--job", type=Path, help="A copula job to run instead of the census.")
    parser.add_argument("--input", type=Path, help="Its table.")
    parser.add_argument(
        "--folder", type=Path, help="Where the tables go; a temporary folder by default."
    )
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        if arguments.job is None:
            source = folder / "census"
            written = simulate_census(
                str(source),
                n_rows=arguments.rows,
                n_attributes=arguments.attributes,
                n_levels=arguments.levels,
                rows_per_file=262_144,
            )
            spec = folder / "job.yaml"
            spec.write_text(
                SPEC.format(input=source, output=folder / "out", schema=written["schema"])
            )
            job = load_job(spec)
        else:
            job = load_job(
                arguments.job,
                {"input.path": str(arguments.input.absolute()), "output.path": str(folder / "out")},
            )
        result = {
            "rows": arguments.rows if arguments.job is None else None,
            **measure(job, folder, arguments.pairs),
        }
    text = json.dumps(result, indent=1)
    if arguments.json:
        arguments.json.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
