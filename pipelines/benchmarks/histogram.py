"""A sparse histogram of 10⁸ cells: its counting against DuckDB's, the whole job, and the peak memory of every process.

    python -m pipelines.benchmarks.histogram --rows 5000000 --bins 1000 --levels 100 --pairs 3 --json histogram.json

Two continuous columns of 1000 cells each and one of 100 levels. Counting the occupied cells of a lake of Parquet files is
timed in pairs, ours and one DuckDB query over the same files, interleaved, so that a noisy machine disturbs both alike; the
figures are medians. Both use two cores. The whole job (counts, noise, threshold, cells written) runs once on a cluster of
two fresh processes, driven by a third, whose memory is sampled. Needs the `test` extra.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from dpdask.jobs.run import run_job
from dpdask.jobs.spec import Job, load_job
from pipelines.benchmarks.common import (
    WORKERS,
    add_pairs,
    cluster,
    keep,
    parser,
    processes_of,
    watch,
)
from pipelines.benchmarks.copula import compare

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


def count_duckdb(job: Job, bins: int) -> None:
    """Count every occupied cell in one query, with the same two threads."""
    cells = ", ".join(f"greatest(ceil({name} * {bins}), 1)::int as {name}" for name in ("x", "y"))
    files = f"read_parquet('{job.input_url.removeprefix('file://')}/*.parquet')"
    with duckdb.connect(config={"threads": WORKERS}) as connection:
        connection.execute(
            f'select {cells}, "group", count(*) from {files} group by all'
        ).fetchnumpy()


def whole_job(job: Job, output: Path) -> dict[str, Any]:
    with cluster() as client:
        processes = [psutil.Process(), *processes_of(client)]  # the first draws the noise
        spent, peaks = watch(processes, lambda: run_job(job))
    card = json.loads((output / "_dpdask" / "release.json").read_text())["mechanism"]
    return {
        "seconds": round(spent, 2),
        "cells": card["cells"],
        "cut": card["cut"],
        "cells_released": card["cells_listed"],
        "driver_peak_mib": peaks[0],
        "worker_peak_mib": peaks[1:],
        "sum_of_peaks_gib": round(sum(peaks) / 2**10, 2),
    }


def measure(job: Job, bins: int, pairs: int, folder: Path) -> dict[str, Any]:
    # the job first: the driver's memory holds nothing of what follows
    result = {"job": whole_job(job, folder / "out")}
    if pairs:
        result["counting"] = compare(job, folder, pairs, lambda: count_duckdb(job, bins))
    return result


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rows", type=int, default=5_000_000)
    options.add_argument(
        "--bins", type=int, default=1000, help="Cells of each of the two continuous columns."
    )
    options.add_argument("--levels", type=int, default=100, help="Levels of the third column.")
    options.add_argument("--factor", type=float, default=0.5, help="A of the threshold A·log n/ε.")
    add_pairs(options, "the job")
    arguments = options.parse_args()
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
    print(keep(result, arguments.json))


if __name__ == "__main__":
    main()
