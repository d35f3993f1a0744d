"""Least squares of house prices from wide cells: the slope's error with and without Sheppard's correction.

    python -m pipelines.benchmarks.sheppard --input bay_area_house_sales_sample.parquet --json sheppard.json

Prices are regressed on the size, and on the size and the county, from perturbed histograms with 5, 10 and 20 cells of each number, and with
cells that are found (ε = 1): from centres without and with the correction, and from points that are spread in their cells. The
size is read as a floating-point number: columns of whole numbers are never corrected. The figures are the relative errors of the size's
slope against least squares on the rows, averaged over repeats.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

import dpdask
from dpdask.inference import WeightedSample, least_squares
from pipelines.benchmarks.common import keep, parser

BOUNDS = (
    {"price": (0.0, 4_000_000.0), "bsqft": (0.0, 5_000.0)},
    {"price": (100_000.0, 900_000.0), "bsqft": (0.0, 3_000.0)},
)


def measure(table: pd.DataFrame, repeats: int) -> list[dict[str, Any]]:
    """Return one row of figures for each choice of bounds, features, cells and threshold."""
    rows = []
    for bounds in BOUNDS:
        kept = table[
            np.logical_and.reduce([table[name].between(*ends) for name, ends in bounds.items()])
        ]
        for features in (["bsqft"], ["bsqft", "county"]):
            columns: dict[str, Any] = {
                name: {"role": "privatise", "kind": "continuous", "bounds": ends}
                for name, ends in bounds.items()
            }
            levels = sorted(table["county"].unique())
            columns["county"] = (
                {"role": "privatise", "kind": "categorical", "levels": levels}
                if "county" in features
                else {"role": "drop"}
            )
            schema = dpdask.Schema.from_dict({"columns": columns})
            true = least_squares(
                WeightedSample.of_frame(kept.assign(weight=1.0), "price", features)
            )[1]
            for bins in (5, 10, 20, "adaptive"):
                for threshold in ("enhanced", "none"):
                    errors = []
                    for seed in range(repeats):
                        release = dpdask.PerturbedHistogram(
                            schema, epsilon=1.0, bins=bins, threshold=threshold, insecure_seed=seed
                        ).fit(kept)
                        assert isinstance(release, dpdask.HistogramRelease)
                        spread = release.with_points("spread")
                        release = release.with_points("centre")
                        samples = [
                            WeightedSample.of_frame(release.cells, "price", features, card=card)
                            for card in (None, release.card)
                        ]
                        samples.append(WeightedSample.of_frame(spread.cells, "price", features))
                        errors.append(
                            [abs(least_squares(sample)[1] / true - 1) for sample in samples]
                        )
                    without, corrected, spread_ = np.mean(errors, axis=0).tolist()
                    where = {
                        "bsqft_up_to": bounds["bsqft"][1],
                        "features": " + ".join(features),
                        "bins": bins,
                        "threshold": threshold,
                    }
                    rows.append({**where, "without": without, "with": corrected, "spread": spread_})
    return rows


def main(arguments: list[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument(
        "--input", type=Path, required=True, help="the sample of Bay Area house sales, in Parquet"
    )
    options.add_argument("--repeats", type=int, default=5)
    given = options.parse_args(arguments)
    warnings.simplefilter(
        "ignore", UserWarning
    )  # cells that are too fine are part of what is shown
    table = pd.read_parquet(given.input, columns=["county", "price", "bsqft"]).astype(
        {"price": float, "bsqft": float}
    )
    rows = measure(table, given.repeats)
    print(pd.DataFrame(rows).round(4).to_string(index=False))
    keep({"rows": rows}, given.json)


if __name__ == "__main__":
    main()
