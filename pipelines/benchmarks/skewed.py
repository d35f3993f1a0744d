"""How well numbers of skewed shape survive bounds that are far too wide: for the data's steward only, because it reads private rows.

    python -m pipelines.benchmarks.skewed --input rides.parquet --columns fare_amount tip_amount --factor 100 --json skewed.json
    python -m pipelines.benchmarks.skewed

Each column is released by itself with the reference `histogram` (DIP), and all together as records of a copula, with defaults. The bounds
are the magnitude of the 1 % and 99 % points, times the factor. For each column: the largest error of the quartiles, the median and the
95 % point as a share of the range from the 1 % to the 99 % point, the relative error of the mean clipped to that range, the error of the share
of zeros, and one natural unit (1, for whole numbers) as a share of the range. Medians of several runs. Noise is secure unless a
seed is given. Without an input, 200,000 simulated amounts and counts.
"""

from __future__ import annotations

import argparse
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

import dpdask

SHARES = (0.25, 0.5, 0.75, 0.95)
MEASURES = ("quantiles", "mean", "zeros")


def simulate(n: int = 200_000) -> pd.DataFrame:
    """Return amounts, a third of them 0, and counts with a long tail."""
    rng = np.random.default_rng(3)
    amount = np.where(rng.random(n) < 0.33, 0.0, np.round(rng.lognormal(2.5, 0.9, n), 2))
    return pd.DataFrame({"amount": amount, "visits": rng.negative_binomial(1, 0.15, n)})


def find_bounds(values: pd.Series, factor: float) -> list[float] | list[int]:
    """Return bounds that are too wide by a factor."""
    low, high = values.quantile([0.01, 0.99])
    widest = float(np.ceil(factor * max(abs(low), abs(high), 1.0)))
    found = [-widest if low < 0 else 0.0, widest]
    return [int(bound) for bound in found] if values.dtype.kind in "iu" else found


def release(frame: pd.DataFrame, bounds: dict[str, Any], mechanism: str, epsilon: float, seed: int | None) -> pd.DataFrame:
    """Return a release of all columns, or for DIP of each by itself, with defaults."""
    columns = {name: {"role": "privatise", "kind": "continuous", "bounds": bounds[name]} for name in frame}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        if mechanism == "copula":
            schema = dpdask.Schema.from_dict({"columns": columns})
            fitted = dpdask.GaussianCopula(schema, epsilon=epsilon, delta=2.0**-30, adjacency="add-remove", insecure_seed=seed).fit(frame)
            return fitted.sample(len(frame), seed=seed).compute()
        found = {}
        for name, column in columns.items():
            estimator = dpdask.DIP(
                dpdask.Schema.from_dict({"columns": {name: column}}), epsilon=epsilon, reference=dpdask.Histogram(), insecure_seed=seed
            )
            own = frame[[name]]
            with estimator.fit(own) as fitted:
                found[name] = fitted.transform(own)[name].to_numpy()
        return pd.DataFrame(found)


def measure(own: pd.Series, released: pd.Series) -> dict[str, float]:
    """Return the errors of one column."""
    low, high = own.quantile([0.01, 0.99])
    width = max(high - low, np.finfo(float).tiny)
    clipped = own.clip(low, high).mean()
    return {
        "quantiles": max(abs(released.quantile(share) - own.quantile(share)) for share in SHARES) / width,
        "mean": abs(released.clip(low, high).mean() / clipped - 1.0),
        "zeros": abs((released == 0).mean() - (own == 0).mean()),
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", help="a Parquet file")
    parser.add_argument("--columns", nargs="+", help="its columns of numbers")
    parser.add_argument("--factor", type=float, default=100.0, help="by how much the bounds are too wide")
    parser.add_argument("--epsilon", type=float, default=1.0)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--seed", type=int, help="INSECURE: noise from this seed, which protects nobody")
    parser.add_argument("--json", type=Path, help="a file for the same figures, and those of each run")
    given = parser.parse_args(arguments)
    frame = simulate() if given.input is None else pd.read_parquet(given.input, columns=given.columns).dropna()
    bounds = {name: find_bounds(frame[name], given.factor) for name in frame}
    inside = np.logical_and.reduce([frame[name].between(*bounds[name]) for name in frame])
    frame = frame[inside].sample(frac=1.0, random_state=1).reset_index(drop=True)  # in any order, as a table should be
    rows: list[dict[str, Any]] = []
    print(f"{len(frame):,} rows, ε = {given.epsilon:g}, bounds {given.factor:g} times too wide, medians of {given.runs}")
    print("| column | mechanism | quartiles and 95 % | clipped mean | zeros | one unit |\n|---|---|---|---|---|---|")
    for mechanism in ("histogram", "copula"):
        seeds = [None if given.seed is None else given.seed + number for number in range(given.runs)]
        releases = [release(frame, bounds, mechanism, given.epsilon, seed) for seed in seeds]
        for name in frame:
            runs = [measure(frame[name], released[name]) for released in releases]
            found = {each: float(np.median([run[each] for run in runs])) for each in MEASURES}
            unit = 1.0 / max(float(np.diff(frame[name].quantile([0.01, 0.99]))[0]), 1e-300) if frame[name].dtype.kind in "iu" else None
            rows.append({"column": name, "mechanism": mechanism, **found, "unit": unit, "runs": runs})
            shown = "–" if unit is None else f"{unit:.4f}"
            print(f"| {name} | {mechanism} | {found['quantiles']:.4f} | {found['mean']:.4f} | {found['zeros']:.4f} | {shown} |", flush=True)
    if given.json is not None:
        head = {"n_rows": len(frame), "epsilon": given.epsilon, "factor": given.factor, "bounds": bounds, "insecure_seed": given.seed}
        given.json.write_text(json.dumps({**head, "rows": rows}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
