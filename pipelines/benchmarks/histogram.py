"""A sparse histogram of 10⁸ cells: its counting against DuckDB's, the whole job, and the peak memory of every process.

    python pipelines/benchmarks/histogram.py --rows 5000000 --bins 1000 --levels 100 --pairs 3 --json histogram.json

Two continuous columns of 1000 cells each and one of 100 levels. Counting the occupied cells of a lake of Parquet files is
timed in pairs, ours and one DuckDB query over the same files, interleaved, so that a noisy machine disturbs both alike; the
figures are medians. Both use two cores. The whole job (counts, noise, threshold, cells written) runs once on a cluster of
two fresh processes, driven by a third, whose memory is sampled. Needs the `test` extra.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
from distributed import Client, default_client

from dpdask.connect import open_cluster
from dpdask.connect.spec import Local
from dpdask.engine.scan import scan
from dpdask.io.storage import Folder
from dpdask.jobs.run import run_job
from dpdask.jobs.spec import Job, load_job, open_table

WORKERS = 2
ROWS_PER_FILE = 262_144
SCHEMA = """
columns:
  x: {{role: privatise, kind: continuous, bounds: [0.0, 1.0]}}
  y: {{role: privatise, kind: continuous, bounds: [0.0, 1.0]}}
  group: {{role: privatise, kind: discrete, levels: {levels}}}
"""
SPEC = """
name: sparse-histogram
input: {{path: {input}}}
output: {{path: {output}}}
schema: {schema}
privacy: {{epsilon: 1.0, adjacency: replace-one}}
mechanism: {{kind: histogram, bins: {bins}, threshold: enhanced, factor: {factor}}}
"""


@contextmanager
def cluster() -> Iterator[Client]:
    with open_cluster(Local(workers=WORKERS)):
        yield default_client()


def write_rows(folder: Path, rows: int, n_levels: int) -> None:
    """Write rows that crowd in a tenth of the cells: y follows x, and groups are few or many."""
    folder.mkdir()
    for number, start in enumerate(range(0, rows, ROWS_PER_FILE)):
        rng = np.random.default_rng([11, number])
        n = min(ROWS_PER_FILE, rows - start)
        x = rng.beta(2.0, 5.0, n)
        y = np.clip(x + rng.normal(0.0, 0.05, n), 0.0, 1.0)
        group = np.minimum(rng.geometric(0.05, n) - 1, n_levels - 1).astype(np.int16)
        pq.write_table(
            pa.table({"x": x, "y": y, "group": group}), folder / f"part-{number:03d}.parquet"
        )


def count_ours(job: Job, folder: Path) -> None:
    opened = open_table(job, Folder(f"file://{folder}"))
    scan(opened.source, opened.work, opened.mechanism.statistic(opened.work.columns), "tabulate")


def count_duckdb(job: Job, bins: int) -> None:
    """Count every occupied cell in one query, with the same two threads."""
    cells = ", ".join(f"greatest(ceil({name} * {bins}), 1)::int as {name}" for name in ("x", "y"))
    files = f"read_parquet('{job.input_url.removeprefix('file://')}/*.parquet')"
    with duckdb.connect(config={"threads": WORKERS}) as connection:
        connection.execute(
            f'select {cells}, "group", count(*) from {files} group by all'
        ).fetchnumpy()


def seconds(step: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin


class Watch:
    """Samples the resident memory of processes every 20 ms: this one, which draws the noise, and a cluster's workers."""

    def __init__(self, client: Client) -> None:
        workers = [
            psutil.Process(pid) for pid in client.run(lambda: __import__("os").getpid()).values()
        ]
        self._processes = [psutil.Process(), *workers]
        self.peaks = [process.memory_info().rss for process in self._processes]
        self._done = threading.Event()

    def _sample(self) -> None:
        while not self._done.wait(0.02):
            for index, process in enumerate(self._processes):
                self.peaks[index] = max(self.peaks[index], process.memory_info().rss)

    def run(self, step: Callable[[], Any]) -> float:
        watcher = threading.Thread(target=self._sample)
        watcher.start()
        try:
            return seconds(step)
        finally:
            self._done.set()
            watcher.join()


def whole_job(job: Job, output: Path) -> dict[str, Any]:
    with cluster() as client:
        watch = Watch(client)
        spent = watch.run(lambda: run_job(job))
    card = json.loads((output / "_dpdask" / "release.json").read_text())["mechanism"]
    return {
        "seconds": round(spent, 2),
        "cells": card["cells"],
        "cut": card["cut"],
        "cells_released": card["cells_listed"],
        "driver_peak_mib": round(watch.peaks[0] / 2**20),
        "worker_peak_mib": [round(peak / 2**20) for peak in watch.peaks[1:]],
        "sum_of_peaks_gib": round(sum(watch.peaks) / 2**30, 2),
    }


def measure(job: Job, bins: int, pairs: int, folder: Path) -> dict[str, Any]:
    result = {
        "job": whole_job(job, folder / "out")
    }  # first: the driver's memory holds nothing of what follows
    ours: list[float] = []
    theirs: list[float] = []
    if pairs:
        with cluster():
            count_ours(job, folder)
            count_duckdb(job, bins)
            for _ in range(pairs):
                theirs.append(seconds(lambda: count_duckdb(job, bins)))
                ours.append(seconds(lambda: count_ours(job, folder)))
        result["counting"] = {
            "seconds": [round(value, 2) for value in ours],
            "seconds_duckdb": [round(value, 2) for value in theirs],
            "ratio_of_medians": round(statistics.median(ours) / statistics.median(theirs), 3),
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=5_000_000)
    parser.add_argument(
        "--bins", type=int, default=1000, help="Cells of each of the two continuous columns."
    )
    parser.add_argument("--levels", type=int, default=100, help="Levels of the third column.")
    parser.add_argument("--factor", type=float, default=0.5, help="A of the threshold A·log n/ε.")
    parser.add_argument(
        "--pairs", type=int, default=3, help="Comparisons with DuckDB; 0 for the job alone."
    )
    parser.add_argument(
        "--folder", type=Path, help="Where the tables go; a temporary folder by default."
    )
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        write_rows(folder / "in", arguments.rows, arguments.levels)
        schema, spec = folder / "schema.yaml", folder / "job.yaml"
        schema.write_text(SCHEMA.format(levels=list(range(arguments.levels))))
        given = {
            "input": folder / "in",
            "output": folder / "out",
            "schema": schema,
            "bins": arguments.bins,
            "factor": arguments.factor,
        }
        spec.write_text(SPEC.format(**given))
        result = {
            "rows": arguments.rows,
            "workers": WORKERS,
            "pairs": arguments.pairs,
            "load_average": [round(load, 2) for load in os.getloadavg()],
        }
        result |= measure(load_job(spec), arguments.bins, arguments.pairs, folder)
    text = json.dumps(result, indent=1)
    if arguments.json:
        arguments.json.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
