"""The main job against the fastest copies of the same table: CPU seconds of one process with one thread.

    python -m pipelines.benchmarks.limits --rows 3000000 --rounds 5 --json limits.json

The table is MovieLens' ratings with all four columns. `pyarrow` reads it and writes it in the encoding of a release; the other copies
write what they write by default. Rounds are interleaved (each side once a round), so that a noisy machine disturbs all alike; the
figures are medians after a round that does not count. polars and DuckDB take part if they are installed (extra `test`).
"""

from __future__ import annotations

import os

os.environ.setdefault("POLARS_MAX_THREADS", "1")  # read when polars is imported

import importlib.util
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import dask
import pyarrow as pa
import pyarrow.parquet as pq

from dpdask.io.shards import ROW_GROUP_ROWS, choose_encoding
from dpdask.simulate import simulate_movielens
from pipelines.benchmarks.common import add_folder, interleave, keep, parser, rounded
from pipelines.benchmarks.dip import copy, job

KNOWN = "{kind: known, columns: {rating: {probabilities: [0.01, 0.03, 0.02, 0.07, 0.05, 0.2, 0.13, 0.27, 0.08, 0.14]}}}"


def copy_by_pyarrow(source: Path, target: Path) -> None:
    target.mkdir()
    for path in sorted(source.glob("*.parquet")):
        rows = pq.read_table(path, use_threads=False)
        pq.write_table(
            rows,
            target / path.name,
            row_group_size=ROW_GROUP_ROWS,
            **choose_encoding(rows.schema, ["rating"]),
        )


def copy_by_polars(source: Path, target: Path) -> None:
    import polars as pl

    target.mkdir()
    for path in sorted(source.glob("*.parquet")):
        pl.read_parquet(path).write_parquet(target / path.name, compression="snappy")


def copy_by_duckdb(source: Path, target: Path) -> None:
    import duckdb

    target.mkdir()
    with duckdb.connect(config={"threads": 1}) as connection:
        for path in sorted(source.glob("*.parquet")):
            connection.execute(
                f"COPY (FROM read_parquet('{path}')) TO '{target / path.name}' (FORMAT parquet, COMPRESSION snappy)"
            )


SIDES: dict[str, Callable[[Path, Path], None]] = {
    "pyarrow": copy_by_pyarrow,
    "polars": copy_by_polars,
    "duckdb": copy_by_duckdb,
    "dask": copy,
    "dip": job({}),
    "dip, known": job({"mechanism.reference": KNOWN}),
    "dip, keep": job({"output.order": "keep"}),
}


def measure(rows: int, rounds: int, folder: Path) -> dict[str, object]:
    """Return the CPU seconds of each side, and their medians as multiples of pyarrow's."""
    source, target = folder / "table", folder / "out"
    simulate_movielens(str(source), n_rows=rows)
    sides = {
        name: side
        for name, side in SIDES.items()
        if name not in ("polars", "duckdb") or importlib.util.find_spec(name)
    }
    for name in SIDES.keys() - sides.keys():
        print(f"{name} is not installed: skipped")
    steps = {name: partial(side, source, target) for name, side in sides.items()}
    clear = partial(shutil.rmtree, target, ignore_errors=True)
    found = interleave(rounds, steps, clear, time.process_time)
    medians = {name: statistics.median(seconds) for name, seconds in found.items()}
    return {
        "rows": rows,
        "rounds": rounds,
        "cpu_seconds": {name: rounded(seconds, 3) for name, seconds in found.items()},
        "median_cpu_seconds": {name: round(value, 3) for name, value in medians.items()},
        "of_pyarrow": {
            name: round(value / medians["pyarrow"], 3) for name, value in medians.items()
        },
    }


def main(arguments: list[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument(
        "--rows",
        type=int,
        default=3_000_000,
        help="3,000,000 by default; MovieLens-25M has 25,000,095.",
    )
    options.add_argument("--rounds", type=int, default=5)
    add_folder(options)
    given = options.parse_args(arguments)
    pa.set_cpu_count(1)
    with (
        tempfile.TemporaryDirectory(dir=given.folder) as folder,
        dask.config.set(scheduler="synchronous"),
    ):
        result = measure(given.rows, given.rounds, Path(folder))
    print(keep(result, given.json))


if __name__ == "__main__":
    main()
