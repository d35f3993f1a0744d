"""The main job against a plain Dask copy of the same table: seconds, their ratio, and each worker's peak memory.

    python -m pipelines.benchmarks.dip --rows 25000095 --pairs 3 --json dip.json
    python -m pipelines.benchmarks.dip --job units --against dip
    python -m pipelines.benchmarks.dip --job chain

The table is MovieLens' ratings; that of `chain` and `tree` has five discrete columns, all of them private.

Runs are interleaved (copy, DIP, copy, DIP, …) on one local cluster of two processes, so that a noisy machine disturbs
both alike; the figures are medians. Memory is read on a cluster of its own that never made a copy. Needs the `test` extra.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

import dask.dataframe as dd

from dpdask.jobs.run import run_job
from dpdask.jobs.spec import load_job
from dpdask.simulate import simulate_census, simulate_movielens
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

JOB = Path(__file__).parent.parent / "movielens" / "job.yaml"


def copy(source: Path, target: Path) -> None:
    dd.read_parquet(source).to_parquet(target)


def job(settings: dict[str, str]) -> Callable[[Path, Path], None]:
    """Return a step that runs the main job with some settings."""

    def step(source: Path, target: Path) -> None:
        # the main job drops the timestamp; here it is kept, so that both sides write all four columns
        schema = source.parent / "schema.yaml"
        text = (JOB.parent / "schema.yaml").read_text()
        schema.write_text(text.replace("timestamp: {role: drop}", "timestamp: {role: keep}"))
        run(source, target, schema, settings)

    return step


def five_columns(reference: str) -> Callable[[Path, Path], None]:
    """Return a step that privatises the five columns of a census jointly."""
    settings = {"mechanism.reference": reference}
    return lambda source, target: run(source, target, f"{source}-schema.yaml", settings)


def run(source: Path, target: Path, schema: Path | str, settings: dict[str, str]) -> None:
    paths = {"input.path": str(source), "output.path": str(target), "schema": str(schema)}
    run_job(load_job(JOB, {**paths, **settings}))


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


def measure(rows: int, pairs: int, folder: Path, name: str, against: str) -> dict[str, object]:
    source, target = folder / "table", folder / "out"
    if name in OF_FIVE_COLUMNS:
        simulate_census(str(source), n_rows=rows, n_attributes=5)
    else:
        simulate_movielens(str(source), n_rows=rows)
    result: dict[str, object] = {
        "job": name,
        "against": against,
        "rows": rows,
        "workers": WORKERS,
        "pairs": pairs,
    }
    times: dict[str, object] = {}
    if pairs:
        steps = {
            "against": lambda: STEPS[against](source, target),
            "ours": lambda: STEPS[name](source, target),
        }
        with cluster():
            found = interleave(pairs, steps, lambda: shutil.rmtree(target, ignore_errors=True))
        ours, theirs = found["ours"], found["against"]
        medians = statistics.median(ours), statistics.median(theirs)
        times = {
            "seconds": rounded(ours),
            "seconds_against": rounded(theirs),
            "median_seconds": round(medians[0], 2),
            "median_seconds_against": round(medians[1], 2),
            "ratio_of_medians": round(medians[0] / medians[1], 3),
            "ratios": [round(one / other, 3) for one, other in zip(ours, theirs, strict=True)],
        }
    with cluster() as client:
        alone, peaks = watch(
            processes_of(client), lambda: STEPS[name](source, folder / "out-memory")
        )
    result |= {"worker_peak_mib": peaks, "seconds_on_a_fresh_cluster": round(alone, 2)}
    return result | times


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rows", type=int, default=25_000_095)
    options.add_argument("--job", choices=sorted(STEPS), default="dip")
    options.add_argument("--against", choices=sorted(STEPS), default="copy")
    add_pairs(options, "the fresh cluster")
    arguments = options.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        result = measure(
            arguments.rows, arguments.pairs, Path(folder), arguments.job, arguments.against
        )
    print(keep(result, arguments.json))


if __name__ == "__main__":
    main()
