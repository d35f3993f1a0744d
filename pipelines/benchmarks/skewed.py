"""How well numbers of skewed shape survive bounds that are far too wide: for the data's steward only, because it reads private rows.

    python -m pipelines.benchmarks.skewed --input rides.parquet --columns fare_amount tip_amount --factor 100 --json skewed.json
    DPDASK_DATA=folder python -m pipelines.benchmarks.skewed

There are four kinds of release, each with defaults: each column by itself with the reference `histogram` (`histogram`); all columns together as
records of a copula (`copula`); each column by itself as rows of a perturbed histogram (`rows`); and all columns together as rows of a joint histogram
(`joint rows`). The bounds are the magnitude of the 1 % and 99 % points, times the factor. For each column: the largest error of the quartiles, the
median and the 95 % point as a share of the range from the 1 % to the 99 % point, the relative error of the mean clipped to that range, the error of
the share of zeros, and one natural unit (1, for whole numbers) as a share of the range. Medians of several runs. `met` says whether quantiles are
within 2 % or one unit, the mean within 3 %, and the share of zeros within 0.01; for tables of fewer than 50,000 rows, the limit of quantiles and
mean is 5 %. Noise is secure unless a seed is given.

Without `--input`, it reads the tables that it finds in the folder DPDASK_DATA: taxi rides, flight delays, network connections, phone calls and
house sales. If DPDASK_DATA is not set, it simulates 200,000 amounts and counts.
"""

from __future__ import annotations

import argparse
import os
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

import dpdask
from pipelines.benchmarks.common import add_seeds, keep, parser, seeds_of

SHARES = (0.25, 0.5, 0.75, 0.95)
MEASURES = ("quantiles", "mean", "zeros")
MECHANISMS = ("histogram", "copula", "rows", "joint rows")
TABLES = {
    "nyc_green_taxi_2020_03_12": ("fare_amount", "trip_distance", "tip_amount"),
    "hflights_2011": ("ArrDelay", "DepDelay"),
    "kddcup99_10_percent": ("src_bytes", "dst_bytes", "duration"),
    "bank_additional_full": ("duration", "campaign"),
    "bay_area_house_sales_sample": ("price", "bsqft"),
}
FEW_ROWS = 50_000


def simulate(n: int = 200_000) -> pd.DataFrame:
    """Return amounts, a third of them 0, and counts with a long tail."""
    rng = np.random.default_rng(3)
    amount = np.where(rng.random(n) < 0.33, 0.0, np.round(rng.lognormal(2.5, 0.9, n), 2))
    return pd.DataFrame({"amount": amount, "visits": rng.negative_binomial(1, 0.15, n)})


def read_tables(
    source: str | None, columns: Sequence[str] | None
) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yield the name and the rows of each table, without nulls."""
    folder = os.environ.get("DPDASK_DATA")
    if source is not None:
        yield Path(source).stem, pd.read_parquet(source, columns=columns).dropna()
    elif folder is None:
        yield "simulated", simulate()
    else:
        for name, own in TABLES.items():
            path = Path(folder) / f"{name}.parquet"
            if path.exists():
                frame = pd.read_parquet(path, columns=list(own)).dropna()
                yield (
                    name,
                    frame.astype("int64") if name == "hflights_2011" else frame,
                )  # minutes, read as floats because of their nulls


def find_bounds(values: pd.Series, factor: float) -> list[float] | list[int]:
    """Return bounds that are too wide by a factor."""
    low, high = values.quantile([0.01, 0.99])
    widest = float(np.ceil(factor * max(abs(low), abs(high), 1.0)))
    found = [-widest if low < 0 else 0.0, widest]
    return [int(bound) for bound in found] if values.dtype.kind in "iu" else found


def release(
    frame: pd.DataFrame, bounds: dict[str, Any], mechanism: str, epsilon: float, seed: int | None
) -> pd.DataFrame:
    """Return a release of all columns with defaults: together, or each by itself."""
    columns = {
        name: {"role": "privatise", "kind": "continuous", "bounds": bounds[name]} for name in frame
    }
    together = mechanism in ("copula", "joint rows")
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for names in [list(frame)] if together else [[name] for name in frame]:
            own = frame[names]
            schema = dpdask.Schema.from_dict({"columns": {name: columns[name] for name in names}})
            given: dict[str, Any] = {"epsilon": epsilon, "insecure_seed": seed}
            if mechanism == "histogram":
                with dpdask.DIP(schema, reference=dpdask.Histogram(), **given).fit(own) as fitted:
                    found.append(fitted.transform(own))
                continue
            made: Any = dpdask.PerturbedHistogram(schema, **given)
            if mechanism == "copula":
                given |= {"delta": 2.0**-30, "adjacency": "add-remove"}
                made = dpdask.GaussianCopula(schema, **given)
            found.append(made.fit(own).sample(len(frame), seed=seed).compute())
    return pd.concat([each.reset_index(drop=True) for each in found], axis=1)


def measure(own: pd.Series, released: pd.Series) -> dict[str, float]:
    """Return the errors of one column."""
    low, high = own.quantile([0.01, 0.99])
    width = max(high - low, np.finfo(float).tiny)
    clipped = own.clip(low, high).mean()
    return {
        "quantiles": max(abs(released.quantile(share) - own.quantile(share)) for share in SHARES)
        / width,
        "mean": abs(released.clip(low, high).mean() / clipped - 1.0),
        "zeros": abs((released == 0).mean() - (own == 0).mean()),
    }


def is_met(found: dict[str, float], unit: float | None, n_rows: int) -> bool:
    """Return whether the errors of one column are within the limits of `met`."""
    quantiles, mean = (0.02, 0.03) if n_rows >= FEW_ROWS else (0.05, 0.05)
    return (
        found["quantiles"] <= max(quantiles, 1.0001 * (unit or 0.0))
        and found["mean"] <= mean
        and found["zeros"] <= 0.01
    )


def measure_table(
    table: str, frame: pd.DataFrame, given: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Yield the figures of each column and mechanism, and print them as rows of a table."""
    bounds = {name: find_bounds(frame[name], given.factor) for name in frame}
    inside = np.logical_and.reduce([frame[name].between(*bounds[name]) for name in frame])
    frame = (
        frame[inside].sample(frac=1.0, random_state=1).reset_index(drop=True)
    )  # in any order, as a table should be
    print(
        f"\n{table}: {len(frame):,} rows, ε = {given.epsilon:g}, bounds {given.factor:g} times too wide, medians of {given.runs}\n"
    )
    print(
        "| column | mechanism | quartiles and 95 % | clipped mean | zeros | one unit | met |\n|---|---|---|---|---|---|---|"
    )
    for mechanism in MECHANISMS:
        releases = [
            release(frame, bounds, mechanism, given.epsilon, seed) for seed in seeds_of(given)
        ]
        for name in frame:
            runs = [measure(frame[name], released[name]) for released in releases]
            found = {each: float(np.median([run[each] for run in runs])) for each in MEASURES}
            unit = (
                1.0 / max(float(np.diff(frame[name].quantile([0.01, 0.99]))[0]), 1e-300)
                if frame[name].dtype.kind in "iu"
                else None
            )
            met = is_met(found, unit, len(frame))
            shown = "–" if unit is None else f"{unit:.4f}"
            figures = " | ".join(f"{found[each]:.4f}" for each in MEASURES)
            print(
                f"| {name} | {mechanism} | {figures} | {shown} | {'yes' if met else 'NO'} |",
                flush=True,
            )
            where = {
                "table": table,
                "n_rows": len(frame),
                "bounds": bounds[name],
                "column": name,
                "mechanism": mechanism,
            }
            yield {**where, **found, "unit": unit, "met": met, "runs": runs}


def main(arguments: list[str] | None = None) -> None:
    options = parser(__doc__)
    add_seeds(options, "--runs")
    options.add_argument("--input", help="a Parquet file")
    options.add_argument("--columns", nargs="+", help="its columns of numbers")
    options.add_argument(
        "--factor", type=float, default=100.0, help="by how much the bounds are too wide"
    )
    options.add_argument("--epsilon", type=float, default=1.0)
    given = options.parse_args(arguments)
    rows = [
        row
        for table, frame in read_tables(given.input, given.columns)
        for row in measure_table(table, frame, given)
    ]
    head = {"epsilon": given.epsilon, "factor": given.factor, "insecure_seed": given.seed}
    keep({**head, "rows": rows}, given.json)


if __name__ == "__main__":
    main()
