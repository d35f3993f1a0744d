"""The contract of `pipelines.benchmarks.coverage` on real tables, each released whole: for the data's steward only, because it reads private rows.

    DPDASK_DATA=folder python -m pipelines.benchmarks.coverage_tables --runs 3 --csv coverage-tables.csv

The truth is the table itself, so an interval holds it in at least 95 % of the runs. Green taxi rides, flights, house sales, people of a census, and
film ratings, by row and by user; tables that are not in the folder are left out. `--rows` takes some rows of each, to try it. A file that `--csv` names is
continued.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from pipelines.benchmarks import coverage
from pipelines.benchmarks.coverage import Table

RELEASES = (
    "dip histogram optimal",
    "dip histogram optimal-unbiased",
    "dip histogram optimal-unbiased, weighted",
    "dip holdout laplace-calibrated",
    "dip tree laplace-calibrated",
    "copula raked",
    "marginals adaptive",
    "histogram cells adaptive",
    "interval case2",
)
# by table, its file, and its columns in the places of those of `coverage.table`; numbers are x and y
SOURCES: dict[str, tuple[str, dict[str, str]]] = {
    "taxi": (
        "nyc_green_taxi_2020_03_12",
        {
            "x": "fare_amount",
            "y": "trip_distance",
            "rating": "passenger_count",
            "kind": "payment_type",
            "town": "store_and_fwd_flag",
        },
    ),
    "flights": (
        "hflights_2011",
        {
            "x": "ArrDelay",
            "y": "DepDelay",
            "kind": "UniqueCarrier",
            "years": "Month",
            "town": "Origin",
        },
    ),
    "homes": (
        "bay_area_house_sales_sample",
        {"x": "price", "y": "bsqft", "rating": "br", "kind": "quality", "town": "county"},
    ),
    "people": (
        "adult",
        {
            "x": "capital-gain",
            "years": "education-num",
            "rating": "education-num",
            "kind": "marital-status",
            "town": "sex",
        },
    ),
    "ratings": ("ml_1m_ratings", {"rating": "Rating", "user": "UserID"}),
    "ratings by user": ("ml_1m_ratings", {"rating": "Rating", "user": "UserID"}),
}
_MOST_LEVELS = 12


def read_tables(folder: Path, n_rows: int | None) -> Iterator[Table]:
    """Yield the tables that are there."""
    for name, (file, columns) in SOURCES.items():
        path = folder / f"{file}.parquet"
        if path.exists():
            frame = pd.read_parquet(path)
            if name.startswith("ratings"):
                people = path.with_name("ml_1m_users.parquet")
                if not people.exists():
                    continue
                frame = frame.merge(pd.read_parquet(people), on="UserID")
                columns = {**columns, "town": "Gender", "years": "Age"}
            there = {place: column for place, column in columns.items() if column in frame}
            rows = pd.DataFrame({place: frame[column] for place, column in there.items()})
            yield make_table(name, rows if n_rows is None else rows.iloc[:n_rows])


def make_table(name: str, rows: pd.DataFrame) -> Table:
    """Return a table, its domains made public: it is a measurement, not a release."""
    rows, levels = rows.copy(), dict[str, list[Any]]()
    for column in ("town", "kind", "years", "rating"):
        if column not in rows:
            continue
        values = rows[column]
        if column in ("town", "kind"):
            values = values.map(lambda value: value if pd.isna(value) else str(value))
            if column == "town":
                values = values.fillna("none")
            common = values.value_counts().index[:_MOST_LEVELS]
            rows[column] = values.where(values.isin(common) | values.isna(), "rest")
        else:
            most = 6.0 if column == "rating" else float(values.max())
            rows[column] = values.astype("float64").clip(upper=most)
        levels[column] = sorted(rows[column].dropna().unique().tolist())
    bounds = {}
    for column in ("x", "y"):
        if column in rows:
            values = rows[column].astype("float64")
            low, high = float(np.floor(values.min())), float(np.ceil(values.max()))
            rows[column], bounds[column] = values, [low, high]
    edges, within, probabilities = [0.0, 1.0], (0.0, 1.0), [0.5, 0.9]
    if "x" in rows:
        inner = rows["x"].quantile([0.1, 0.25, 0.5, 0.75, 0.9, 0.98]).round(1)
        edges = sorted({bounds["x"][0], *inner, bounds["x"][1]})
        within = float(inner[0.1]), float(inner[0.98])
        probabilities = [0.25, 0.5, 0.9] if inner[0.9] > inner[0.1] else [0.98]
    return Table(
        name=name,
        rows=rows.reset_index(drop=True),
        levels=levels,
        bounds=bounds,
        edges=edges,
        probabilities=probabilities,
        within=within,
        unit=name.endswith("by user"),
        epsilon=8.0 if name.endswith("by user") else 2.0,
        whole=True,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--rows", type=int)
    parser.add_argument("--tables", nargs="*", default=list(SOURCES))
    parser.add_argument("--releases", nargs="*", default=list(RELEASES))
    parser.add_argument("--csv", type=Path)
    chosen = parser.parse_args(arguments)
    folder = os.environ.get("DPDASK_DATA")
    if folder is None:
        parser.exit(2, "set DPDASK_DATA to the folder of the tables\n")
    is_begun = chosen.csv is not None and chosen.csv.exists()
    cells = coverage.read_cells(chosen.csv) if is_begun else []
    done = {(cell.release, cell.table) for cell in cells if cell.asked >= chosen.runs}
    for source in read_tables(Path(folder), chosen.rows):
        for kind in chosen.releases if source.name in chosen.tables else ():
            if not coverage.is_possible(kind, source) or (kind, source.name) in done:
                continue
            with tempfile.TemporaryDirectory() as place:
                opened = coverage.releases(kind, source, chosen.runs, Path(place))
                found = coverage.simulate(kind, source, opened)
            for cell in found:
                said = cell.refusal[:70] or f"{cell.average:.2f}"
                print(f"{source.name:16} {kind:32} {cell.question:24} {said}", flush=True)
            cells = [c for c in cells if (c.release, c.table) != (kind, source.name)] + found
            if chosen.csv:
                coverage.write_cells(chosen.csv, cells)
    told = [cell for cell in cells if not cell.refusal]
    numbers = np.array([[cell.average, cell.runs] for cell in told])
    if told:
        held = float(np.average(numbers[:, 0], weights=numbers[:, 1]))
        print(
            f"{held:.3f} of the intervals of {len(told)} cells hold; {len(cells) - len(told)} are refused"
        )


if __name__ == "__main__":
    main()
