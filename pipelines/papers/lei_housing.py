"""Table 1 of Lei, Differentially private M-estimators: least squares of house prices on the cells of a noisy histogram.

    python pipelines/papers/lei_housing.py --input bay_area_house_sales_sample.parquet [--repeats 100]

The paper's 250,070 rows are no longer to be had; a sample of 29,867 sales of the same source is (not part of this
repository). Prepared as the paper says (prices of 10⁵ to 9·10⁵, at most 3000 sqft, year of sale, counties combined to
six), 26,435 rows remain, whose OLS coefficients are the paper's within 5 % (County4: 11 %). The paper does not say which
counties it combined, nor from where years count: Marin, San Francisco and San Mateo; Napa and Sonoma; 2003 give its
coefficients.

Errors are |θ of the noisy cells / θ of OLS on the rows - 1|, as the paper defines them, root mean square over the
repeats. They hold the noise, the threshold, and what cells do to values, which no n and no ε removes: with a cell's centre
for the values in it (`centre`, the paper's Algorithm 1), 4.1 % of the slope of the size and 8 % of the intercept. With
`spread` (`dpdask.mechanisms.histogram.release`), whose points keep the moments of a smooth density, 1.0 to 1.9 % and 0.5 to
3.3 %. The noise's part falls as 1/n: at ε = 1 the sample's is that of the full table at ε = 0.106.

Compared are the sample; the sample with ε times 250,070 / 26,435, which has the full table's noise; the sample's rows drawn
250,070 times; a simulated table of 250,070 rows, which needs no data. The paper does not say where its ten cells of the
size begin: `--smallest 0`, or 250 sqft, the published minimum. Found with 100 repeats at ε = 1, in how many of the 8 rows
the error is at most the paper's:

    cells of the size from            0 sqft                          250 sqft
                              PH          THLD                PH          THLD
                        centre spread  centre spread    centre spread  centre spread
    sample, ε scaled      4      7       2      6         6      6       1      6
    sample, redrawn       4      7       2      6         5      6       1      5
    simulated             5      7       4      7         8      8       4      6

What is still above the paper's, on the sample by the cells alone: with cells from 250 sqft County4, 5.2 to 6.7 %, and
County6, 1.4 to 1.5 %; with cells from 0 County3, 1.0 to 1.2 %, and with the threshold Year, 0.7 to 0.8 %. On the simulated
table it is County4, 2.5 to 3.1 %, and hundredths of others; that is noise. Algorithm 1' (in the paper, but not in its
table) is beside PH: on 250,070 rows it is above it in 4 to 5 of 8 rows, as it adds weight to all empty cells.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from dpdask.cells import cells
from dpdask.codec import LevelCodec, ValueCodec
from dpdask.inference import WeightedSample, least_squares
from dpdask.mechanisms.histogram import noise as histogram
from dpdask.mechanisms.histogram.noise import Threshold
from dpdask.mechanisms.histogram.release import Points, centres, spread
from dpdask.privacy import Budget
from dpdask.stats import Domain
from dpdask.stats.marginals import JointCounts
from dpdask.streams import RunKey, stream

NAMES = ["Intercept", "Size", "Year", "County2", "County3", "County4", "County5", "County6"]
OLS = np.array([135141, 209, 56375, -53765, 146593, -27546, 45828, -140738.0])
PAPER = {
    (0.1, "none"): [10.6, 4.7, 4.6, 8.0, 4.2, 29.8, 9.8, 7.1],
    (0.1, "enhanced"): [7.7, 3.5, 2.8, 7.8, 2.5, 37.1, 7.9, 3.3],
    (1.0, "none"): [7.2, 3.6, 1.0, 1.5, 0.8, 2.8, 1.4, 1.0],
    (1.0, "enhanced"): [4.4, 2.3, 0.4, 0.7, 0.3, 2.1, 1.3, 0.4],
}
"""Root mean square relative errors over 100 perturbations, in %."""
THRESHOLDS: dict[Threshold, str] = {"none": "PH", "positive": "1'", "enhanced": "THLD"}
POINTS: tuple[Points, ...] = ("centre", "spread")
N_ROWS = 250_070
TYPES = {"price": pa.float64(), "size": pa.float64(), "year": pa.int64(), "county": pa.string()}
COUNTIES = ["Alameda", "Contra Costa", "Marin-SF-San Mateo", "Napa-Sonoma", "Santa Clara", "Solano"]
COMBINED = {
    **dict.fromkeys(("Marin", "San Francisco", "San Mateo"), COUNTIES[2]),
    **dict.fromkeys(("Napa", "Sonoma"), COUNTIES[3]),
}


def sample(path: Path) -> pd.DataFrame:
    """Return the sample, prepared as the paper says."""
    table = pd.read_parquet(path, columns=["county", "price", "bsqft", "date"])
    table = table[table["price"].between(1e5, 9e5) & (table["bsqft"] <= 3000)]
    county = table["county"].str.removesuffix(" County").replace(COMBINED)
    return pd.DataFrame(
        {
            "price": table["price"],
            "size": table["bsqft"].astype(float),
            "year": table["date"].dt.year - 2003,
            "county": county,
        }
    )


def simulated(rng: np.random.Generator) -> pd.DataFrame:
    """Return sales with the paper's coefficients, but for what the bounds of the prices cut off; sizes are lognormal."""
    n = int(1.1 * N_ROWS)
    county = rng.choice(6, n, p=[0.22, 0.21, 0.12, 0.1, 0.25, 0.1])
    year = rng.choice(4, n, p=[0.22, 0.37, 0.31, 0.1])
    size = rng.lognormal(np.log(1360), 0.32, n)
    effect = np.concatenate([[0.0], OLS[3:]])
    price = (
        OLS[0]
        + OLS[1] * size
        + OLS[2] * year
        + effect[county]
        + rng.normal(0, 75_000 + 15.0 * size)
    )
    table = pd.DataFrame(
        {"price": price, "size": size, "year": year, "county": np.array(COUNTIES)[county]}
    )
    return table[table["price"].between(1e5, 9e5) & table["size"].between(250, 3000)].head(N_ROWS)


def codecs(smallest: float) -> dict[str, Any]:
    """Return the paper's cells: ten of price and of size, four years, six counties."""
    bounds = {"price": (1e5, 9e5), "size": (smallest, 3000.0)}
    year = LevelCodec(name="year", levels=pa.array([0, 1, 2, 3]), ordered=True)
    county = LevelCodec(name="county", levels=pa.array(COUNTIES), ordered=False)
    numbers = {
        name: cells(
            ValueCodec(name=name, type=pa.float64(), bounds=ends, atoms=(), nulls=False), 10
        )
        for name, ends in bounds.items()
    }
    return {**numbers, "year": cells(year, 1), "county": cells(county, 1)}


def fit(frame: pd.DataFrame) -> Any:
    """Return the coefficients of a frame of rows or cells with weights."""
    frame = frame.assign(county=pd.Categorical(frame["county"], COUNTIES))
    return least_squares(WeightedSample.of_frame(frame, "price", ["size", "year", "county"]))


def frame_of(
    release: histogram.NoisyHistogram, columns: dict[str, Any], points: Points
) -> pd.DataFrame:
    """Return a histogram's cells as a frame with weights."""
    if points == "spread":
        values, weights = spread(release, columns, 0, len(release.keys))
    else:
        coded = zip(columns.items(), release.codes_at(0, len(release.keys)), strict=True)
        values = {name: centres(column).take(pa.array(code)) for (name, column), code in coded}
        weights = release.weights
    frame: pd.DataFrame = pa.table({**values, "weight": weights}).to_pandas()
    return frame


def errors(found: Any, truth: Any) -> Any:
    """Return the root mean square relative errors of rows of coefficients, in %."""
    return (100 * np.sqrt(np.mean((found / truth - 1) ** 2, axis=0))).round(1)


def compare(
    name: str,
    table: pd.DataFrame,
    smallest: float,
    repeats: int,
    epsilons: list[float],
    *,
    scaled: bool = False,
) -> None:
    """Print one table's errors beside the paper's; `scaled`: with ε times 250,070 / rows, so that its noise is the full table's."""
    columns = codecs(smallest)
    domain = Domain(names=tuple(columns), sizes=tuple(column.size for column in columns.values()))
    codes = np.stack(
        [column.codes(pa.array(table[key]).cast(TYPES[key])) for key, column in columns.items()]
    ).astype(domain.code_dtype)
    counts = JointCounts.of_codes(domain, codes)
    ols = fit(table.assign(weight=1.0))
    plan = histogram.plan(Budget(epsilon=1.0), threshold="none")
    given = {"domain": domain, "plan": plan, "n_rows": len(table), "cut": None}
    exact = histogram.NoisyHistogram(**given, keys=counts.keys, weights=counts.counts)
    print(
        f"\n{name}: {len(table):,} rows, cells of the size from {smallest:g} sqft, {repeats} repeats; % of OLS on the rows"
    )
    shown = pd.DataFrame({"paper OLS": OLS, "OLS": ols.round()}, index=NAMES)
    for points in POINTS:
        shown[f"cells, {points}"] = errors(fit(frame_of(exact, columns, points))[None, :], ols)
    print(shown.to_string())
    for epsilon in epsilons:
        shown = pd.DataFrame(index=NAMES)
        for threshold, label in THRESHOLDS.items():
            budget = Budget(epsilon=epsilon * (N_ROWS / len(table) if scaled else 1.0))
            plan = histogram.plan(budget, threshold=threshold)
            # the law matters here, not the secret
            rng = stream(RunKey.insecure(1), "lei", f"{name}{epsilon}{threshold}")
            drawn = [histogram.draw(counts, plan, rng=rng) for _ in range(repeats)]
            if (epsilon, threshold) in PAPER:
                shown[f"{label} paper"] = PAPER[epsilon, threshold]
            for points in POINTS:
                found = np.array([fit(frame_of(each, columns, points)) for each in drawn])
                shown[f"{label} {points}"] = errors(found, ols)
        print(f"  ε = {epsilon:g}\n{shown.to_string()}")
        for threshold, label in THRESHOLDS.items():
            against = "none" if threshold == "positive" else threshold
            better = [
                f"{points} {(shown[f'{label} {points}'] <= PAPER[epsilon, against]).sum()}"
                for points in POINTS
            ]
            print(
                f"  {label}: at most the paper's {THRESHOLDS[against]} in {', '.join(better)} of 8 rows"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--input", type=Path, help="the sample; without it, the simulated table alone"
    )
    parser.add_argument("--repeats", type=int, default=100)
    parser.add_argument(
        "--smallest",
        type=float,
        nargs="+",
        default=[0.0, 250.0],
        help="where the cells of the size begin",
    )
    parser.add_argument("--epsilon", type=float, nargs="+", default=[0.1, 1.0], choices=[0.1, 1.0])
    given = parser.parse_args()
    tables = {}
    if given.input is not None:
        tables["sample"] = sample(given.input)
        tables["sample, redrawn"] = tables["sample"].sample(
            N_ROWS, replace=True, random_state=0, ignore_index=True
        )
    tables["simulated"] = simulated(np.random.default_rng(0))
    for smallest in given.smallest:
        for name, table in tables.items():
            compare(name, table, smallest, given.repeats, given.epsilon)
            if name == "sample":
                compare(
                    "sample, ε scaled", table, smallest, given.repeats, given.epsilon, scaled=True
                )


if __name__ == "__main__":
    main()
