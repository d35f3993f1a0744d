"""The distribution behind 10 million released ranges: one counting pass against DuckDB's, the solver, and flat memory.

    python -m pipelines.benchmarks.npmle --rows 10000000 --pairs 3 --json npmle.json

Ranges are those of two anchors per row (Case II) from a grid of 1000 knots; their two ends lie in Parquet files. Counting
them, by one process, and one DuckDB query with two threads that groups the same files by both ends, are timed in pairs,
interleaved, so that a noisy machine disturbs both alike; the figures are medians. Peak memory is that of fresh processes
that count and solve, at a quarter of the rows and at all of them. Needs the `test` extra.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import psutil
import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.parquet as pq

from dpdask.inference.range_estimates import npmle
from dpdask.stats.ranges import RangeCounts
from pipelines.benchmarks.common import add_pairs, interleave, keep, parser, rounded

SUPPORT = (0.0, 9.0)
ROWS_PER_FILE = 500_000
BATCH_ROWS = 2**17


def grid(n_knots: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.linspace(*SUPPORT, n_knots)


def write_ranges(folder: Path, rows: int, n_knots: int) -> None:
    """Write ranges of Gamma(3) values, cut off at 9, between two anchors that are drawn from the grid."""
    folder.mkdir()
    knots = grid(n_knots)
    for number, start in enumerate(range(0, rows, ROWS_PER_FILE)):
        rng = np.random.default_rng([7, number])
        n = min(ROWS_PER_FILE, rows - start)
        values = rng.gamma(3.0, 1.0, n).clip(*SUPPORT)
        anchors = np.sort(knots[rng.integers(0, n_knots, (n, 2))], axis=1)
        ends = np.column_stack([np.full(n, -np.inf), anchors, np.full(n, np.inf)])
        place = (values[:, None] > anchors).sum(axis=1)
        lower, upper = ends[np.arange(n), place], ends[np.arange(n), place + 1]
        pq.write_table(
            pa.table({"lower": lower, "upper": upper}), folder / f"part-{number:03d}.parquet"
        )


def batches(folder: Path) -> Iterator[pa.RecordBatch]:
    for file in sorted(folder.iterdir()):
        yield from pads.dataset(file).to_batches(
            batch_size=BATCH_ROWS, fragment_readahead=0, batch_readahead=2
        )


def count(folder: Path, n_knots: int) -> RangeCounts:
    """Return the counts of all ranges; neighbours are merged, so that no batch is sorted with all that came before."""
    knots = grid(n_knots)
    counts, waiting = RangeCounts.identity(knots), []
    for batch in batches(folder):
        waiting.append(
            RangeCounts.of_batch(knots, batch["lower"].to_numpy(), batch["upper"].to_numpy())
        )
        if len(waiting) == 16:
            counts, waiting = counts.merge(*waiting), []
    return counts.merge(*waiting)


def count_duckdb(folder: Path) -> None:
    with duckdb.connect(config={"threads": 2}) as connection:
        connection.execute(
            f"select lower, upper, count(*) from read_parquet('{folder}/*.parquet') group by lower, upper"
        ).fetchnumpy()


def alone(folder: Path, n_knots: int, results: Queue[dict[str, Any]]) -> None:
    """Count and solve, and put what it took."""
    begin = time.perf_counter()
    counts = count(folder, n_knots)
    counted = time.perf_counter()
    found = npmle(counts, support=SUPPORT)
    results.put(
        {
            "rows": counts.n_rows,
            "distinct_ranges": len(counts.keys),
            "intervals_with_mass": len(found.masses),
            "seconds_counting": round(counted - begin, 2),
            "seconds_solving": round(time.perf_counter() - counted, 2),
            "newton_steps": found.n_iterations,
            "duality_gap": found.duality_gap,
            "mean": found.moment(1),
        }
    )


def in_a_fresh_process(folder: Path, n_knots: int) -> dict[str, Any]:
    """Return what `alone` puts, and the process's largest resident memory, sampled every 5 ms."""
    context = multiprocessing.get_context("spawn")
    results: Queue[dict[str, Any]] = context.Queue()
    process = context.Process(target=alone, args=(folder, n_knots, results))
    process.start()
    watched, peak = psutil.Process(process.pid), 0
    while results.empty() and process.is_alive():
        peak = max(peak, watched.memory_info().rss)
        time.sleep(0.005)
    found = results.get(timeout=60)
    process.join()
    return {**found, "peak_mib": round(peak / 2**20)}


def measure(rows: int, n_knots: int, pairs: int, folder: Path) -> dict[str, Any]:
    whole, part = folder / "whole", folder / "part"
    write_ranges(whole, rows, n_knots)
    write_ranges(part, rows // 4, n_knots)
    npmle(count(part, n_knots), support=SUPPORT)  # compiles the kernels
    counted: dict[str, RangeCounts] = {}

    def count_whole() -> None:
        counted["whole"] = count(whole, n_knots)

    result: dict[str, Any] = {
        "rows": rows,
        "knots": n_knots,
        "pairs": pairs,
        "load_average": rounded(os.getloadavg()),
    }
    if pairs:
        steps = {
            "duckdb": lambda: count_duckdb(whole),
            "counting": count_whole,
            "solving": lambda: npmle(counted["whole"], support=SUPPORT),
        }
        found = interleave(pairs, steps)
        both = map(sum, zip(found["counting"], found["solving"], strict=True))
        medians = {name: statistics.median(each) for name, each in found.items()}
        result |= {
            "seconds_counting": rounded(found["counting"]),
            "seconds_duckdb": rounded(found["duckdb"]),
            "seconds_solving": rounded(found["solving"]),
            "median_seconds": round(statistics.median(both), 2),
            "ratio_of_counting_medians": round(medians["counting"] / medians["duckdb"], 3),
        }
        del counted["whole"]
    fresh = [in_a_fresh_process(place, n_knots) for place in (part, whole)]
    return {
        **result,
        "fresh_processes": fresh,
        "ratio_of_peaks": round(fresh[1]["peak_mib"] / fresh[0]["peak_mib"], 3),
    }


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rows", type=int, default=10_000_000)
    options.add_argument("--knots", type=int, default=1000)
    add_pairs(options, "the fresh processes")
    arguments = options.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        result = measure(arguments.rows, arguments.knots, arguments.pairs, Path(name))
    print(keep(result, arguments.json))


if __name__ == "__main__":
    main()
