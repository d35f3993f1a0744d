"""The copula job at census scale: its counting against DuckDB's, its stages, its peak memory; and how they grow.

    python -m pipelines.benchmarks.copula --rows 5240260 --attributes 27 --levels 674 --pairs 3 --json copula.json
    python -m pipelines.benchmarks.copula --rows 5240260 --attributes 1000 --levels 2000 --pairs 0
    python -m pipelines.benchmarks.copula --job pipelines/adult/job.yaml --input adult.parquet

Counting all two-way tables of a lake of Parquet files is timed in pairs, ours and one DuckDB query over the same files,
interleaved, so that a noisy machine disturbs both alike; the figures are medians. Both use two cores. The whole job runs
once on a cluster of two fresh processes, whose memory is sampled. Needs the `test` extra.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb

from dpdask.engine.scan import scan
from dpdask.io.storage import Folder
from dpdask.jobs.run import run_job
from dpdask.jobs.spec import Job, load_job, open_table
from dpdask.simulate import simulate_census
from pipelines.benchmarks.common import (
    WORKERS,
    add_pairs,
    cluster,
    interleave,
    keep,
    parser,
    processes_of,
    rounded,
    watch,
)

SPEC = """
name: census-copula
input: {{path: {input}}}
output: {{path: {output}}}
schema: {schema}
privacy: {{epsilon: 1.0, delta: 9.313225746154785e-10, adjacency: add-remove}}
mechanism: {{kind: copula}}
"""


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


def compare(
    job: Job, folder: Path, pairs: int, duckdb_counts: Callable[[], None]
) -> dict[str, Any]:
    """Return the seconds of a job's counting, ours and DuckDB's, and the ratio of their medians."""
    steps = {"duckdb": duckdb_counts, "ours": lambda: count_ours(job, folder)}
    with cluster():
        found = interleave(pairs, steps)
    ours, theirs = found["ours"], found["duckdb"]
    return {
        "seconds": rounded(ours),
        "seconds_duckdb": rounded(theirs),
        "ratio_of_medians": round(statistics.median(ours) / statistics.median(theirs), 3),
    }


def whole_job(job: Job) -> dict[str, Any]:
    stages: dict[str, list[float]] = {}

    def report(stage: str, *_: int) -> None:
        stages.setdefault(stage, []).append(time.perf_counter())

    with cluster() as client:
        begin = time.perf_counter()
        spent, peaks = watch(processes_of(client), lambda: run_job(job, report))
    counted, first = stages["tabulate"][-1] - begin, stages["write"][0] - begin
    return {
        "seconds": round(spent, 2),
        "seconds_counting": round(counted, 2),
        "seconds_noise_fit_and_first_shard": round(first - counted, 2),
        "seconds_other_shards": round(spent - first, 2),
        "worker_peak_mib": peaks,
    }


def measure(job: Job, folder: Path, pairs: int) -> dict[str, Any]:
    names = job.schema.privatised
    result: dict[str, Any] = {"attributes": len(names), "workers": WORKERS, "pairs": pairs}
    if pairs:
        result["counting"] = compare(job, folder, pairs, lambda: count_duckdb(job))
    return {**result, "job": whole_job(job)}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rows", type=int, default=5_240_260)
    options.add_argument("--attributes", type=int, default=27)
    options.add_argument("--levels", type=int, default=674)
    options.add_argument("--job", type=Path, help="A copula job to run instead of the census.")
    options.add_argument("--input", type=Path, help="Its table.")
    add_pairs(options, "the job")
    arguments = options.parse_args()
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
    print(keep(result, arguments.json))


if __name__ == "__main__":
    main()
