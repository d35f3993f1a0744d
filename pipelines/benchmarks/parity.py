"""Records of a simulated table whose target no single column predicts: it is the parity of two or three other columns.

    python -m pipelines.benchmarks.parity --json parity.json

The table has twelve columns of 0 and 1. They are independent, except that the target is the parity of two or three others in 19 of 20 rows.
Measured for each way of fitting a copula: the share of records whose target equals the parity (0.95 in the true rows, 0.5 by
chance), the mean total variation of all two-way tables, the total variation of the table of the target and its columns, and CPU
seconds. Medians of several runs. Noise is secure unless a seed is given.
"""

from __future__ import annotations

import itertools
import time
import warnings
from typing import Any

import numpy as np
import pandas as pd

import dpdask
from pipelines.benchmarks.common import add_seeds, keep, parser, seeds_of

N_COLUMNS = 12
TARGET = "c0"
WAYS: dict[str, dict[str, Any]] = {
    "pairs alone": {},
    "20 triples": {"triples": 20},
    "target": {"target": TARGET},
}


def simulate(n_rows: int, order: int) -> pd.DataFrame:
    """Return the table; the target is the parity of the `order` - 1 columns after it."""
    rng = np.random.default_rng(order)
    codes = rng.integers(0, 2, (N_COLUMNS, n_rows))
    codes[0] = codes[1:order].sum(axis=0) % 2 ^ (rng.random(n_rows) < 0.05)
    return pd.DataFrame({f"c{place}": row for place, row in enumerate(codes)})


def measure(
    table: pd.DataFrame, order: int, epsilon: float, seed: int | None, **given: Any
) -> dict[str, float]:
    """Return the measures of one fit."""
    column = {"role": "privatise", "kind": "discrete", "levels": [0, 1]}
    schema = dpdask.Schema.from_dict({"columns": dict.fromkeys(table, column)})
    begin = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        copula = dpdask.GaussianCopula(
            schema,
            epsilon=epsilon,
            delta=2.0**-30,
            adjacency="add-remove",
            insecure_seed=seed,
            **given,
        )
        with copula.fit(table) as release:
            records = release.sample(len(table), seed=seed).compute(scheduler="synchronous")
    seconds = time.process_time() - begin
    right = records.iloc[:, 1:order].sum(axis=1) % 2 == records[TARGET]
    pairs = [
        total_variation(table, records, list(pair)) for pair in itertools.combinations(table, 2)
    ]
    own = total_variation(table, records, list(table)[:order])
    return {
        "right": float(right.mean()),
        "two_way": float(np.mean(pairs)),
        "own_table": own,
        "cpu_seconds": seconds,
    }


def total_variation(first: pd.DataFrame, second: pd.DataFrame, columns: list[str]) -> float:
    """Return half the sum of the differences of two tables' shares."""
    shares = [frame.value_counts(columns, normalize=True) for frame in (first, second)]
    return float(shares[0].sub(shares[1], fill_value=0.0).abs().sum() / 2)


def main(arguments: list[str] | None = None) -> None:
    options = parser(__doc__)
    add_seeds(options)
    options.add_argument("--rows", type=int, default=50_000)
    options.add_argument("--epsilon", type=float, default=1.0)
    given = options.parse_args(arguments)
    said = []
    print(
        "| parity of | fitted with | target right | two-way | its own table | CPU s |\n|---|---|---|---|---|---|"
    )
    for order, (name, way) in itertools.product((3, 4), WAYS.items()):
        table = simulate(given.rows, order)
        runs = [measure(table, order, given.epsilon, seed, **way) for seed in seeds_of(given)]
        median = {key: float(np.median([run[key] for run in runs])) for key in runs[0]}
        said.append({"columns": order, "way": name, "medians": median, "runs": runs})
        measures = f"{median['right']:.3f} | {median['two_way']:.4f} | {median['own_table']:.4f} | {median['cpu_seconds']:.1f}"
        print(f"| {order} columns | {name} | {measures} |", flush=True)
    head = {"rows": given.rows, "epsilon": given.epsilon, "insecure_seed": given.seed}
    keep({**head, "results": said}, given.json)


if __name__ == "__main__":
    main()
