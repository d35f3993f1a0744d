"""The contract of `pipelines.benchmarks.coverage` on real tables, each released whole: for the data's steward only, because it reads private rows.

    DPDASK_DATA=folder python -m pipelines.benchmarks.coverage_tables --runs 3 --csv coverage-tables.csv

    DPDASK_DATA=folder python -m pipelines.benchmarks.coverage_tables --targets --runs 200

    DPDASK_DATA=folder python -m pipelines.benchmarks.coverage_tables --inside

The truth is the table itself, so an interval holds it in at least 95 % of the runs. Green taxi rides, flights, house sales, people of a census, and
film ratings, by row and by user; tables that are not in the folder are left out. `--rows` takes some rows of each, to try it. A file that `--csv` names is
continued. `--targets` measures how often the errors hold that `dpdask plan --target` promises, and whether 2 % less ε would do. `--inside` measures
how often the bound on the bias holds the error of the model of what lies inside cells, from exact counts.
"""

from __future__ import annotations

import argparse
import itertools
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

import dpdask
from dpdask.codec import codec_for
from dpdask.inference.placed import (
    APART,
    UNRESOLVED,
    Axis,
    PlacedTable,
    count_points,
    find_line,
)
from dpdask.mechanisms.expectations import (
    Exceed,
    exceed_counts,
    exceed_mean,
    find_least_epsilon,
)
from dpdask.mechanisms.mechanism import Columns
from dpdask.privacy.events import CentralEvent, DiscreteGaussian
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


@dataclass(frozen=True, kw_only=True)
class Target:
    """An error that was asked for, and how often it held."""

    delta: float
    name: str
    asked: float
    epsilon: float
    seconds: float  # of CPU, to find the ε
    is_least: (
        bool  # whether at 2 % less ε the target would not be met, by the exact law of the noise
    )
    held: float  # the share of the errors that are at most the one asked for
    held_half: float  # or half of it
    runs: int

    def __str__(self) -> str:
        least = "least" if self.is_least else "NOT THE LEAST"
        took = f"{self.seconds:.1f} CPU s"
        return f"δ {self.delta:g} {self.name:12} {self.asked:<8.3g} ε {self.epsilon:<7g} {least}, {took}, held {self.held:.3f}"


def measure_targets(table: Table, runs: int) -> Iterator[Target]:
    """Yield how often the margins hold that targets ask for: of the counts of two tables, and of the mean of levels that are numbers."""
    number = next((name for name in ("rating", "years", "kind") if name in table.levels), "town")
    other = next(name for name in reversed(list(table.levels)) if name != number)
    is_number = number in ("rating", "years")
    rows = table.rows[[number, other]].dropna()
    declared, types = {}, pa.schema({name: pa.array(rows[name]).type for name in rows})
    for name in rows:
        kind = "discrete" if name in ("rating", "years") else "categorical"
        levels = table.levels[name]
        declared[name] = {"role": "privatise", "kind": kind, "levels": levels}
    schema = dpdask.Schema.from_dict({"columns": declared})
    codecs = {name: codec_for(name, schema.columns[name], types.field(name).type) for name in rows}
    exact = pd.crosstab(rows[number], rows[other])
    exact = exact.reindex(index=table.levels[number], columns=table.levels[other], fill_value=0)
    numbers = np.array(table.levels[number] if is_number else [], dtype=np.float64)
    n_rows = len(rows)
    ask_mean = partial(
        exceed_mean,
        column=number,
        columns=Columns(types=types, codecs=codecs),
        numbers=numbers,
        n_rows=n_rows,
    )
    off_mean = max(0.004, 20.0 / n_rows) * float(np.ptp(numbers)) if is_number else 0.0
    for delta in (0.0, 1e-6):
        cliques = [[number, other], [number]]
        asked = partial(dpdask.Marginals, schema, cliques=cliques, delta=delta)
        mechanism = asked(epsilon=1.0).mechanism
        targets: list[tuple[str, float, Exceed]] = [
            *(("count_margin", most, partial(exceed_counts, most=most)) for most in (10.0, 60.0)),
            *([("mean", off_mean, partial(ask_mean, margin=off_mean))] if is_number else []),
        ]
        for name, most, exceed in targets:
            began = time.process_time()
            epsilon = find_least_epsilon(mechanism, exceed, name)
            seconds, off = time.process_time() - began, list[Any]()
            for seed in range(runs):
                release = asked(epsilon=epsilon, insecure_seed=seed).fit(rows)
                one, both = release.table([number]), release.table([number, other])
                if name == "mean":
                    off.append([numbers @ one / one.sum() - rows[number].mean()])
                else:
                    own = one - exact.sum(axis=1).to_numpy()
                    off.append(np.concatenate([own, (both - exact.to_numpy()).ravel()]))
            budget = mechanism.budget.model_copy(update={"epsilon": 0.98 * epsilon})
            less = replace(mechanism, budget=budget)
            is_least = exceed(less) > 1.0
            if name == "count_margin":
                is_least = max(tail(each, most) for each, _ in less.counted) > 0.05
            yield Target(
                delta=delta,
                name=name,
                asked=most,
                epsilon=epsilon,
                seconds=seconds,
                is_least=is_least,
                held=float((np.abs(off) <= most).mean()),
                held_half=float((np.abs(off) <= most / 2).mean()),
                runs=runs,
            )


def measure_inside(source: Table, n_cells: int = 20) -> Iterator[tuple[bool, bool, bool]]:
    """Yield for each slope, and each mean of a number in a group, whether it is of two numbers, and whether the bound on its bias and half of what the model adds hold the error of the model.

    Counts are exact, a number has cells of as many rows each, and values inside them are exact, too.
    """
    numbers = [name for name in ("x", "y") if name in source.rows]
    groups = [name for name in source.levels if name in source.rows]
    for name, other in [*itertools.product(numbers, groups), *itertools.permutations(numbers, 2)]:
        rows = source.rows[[name, other]].dropna().reset_index(drop=True)
        codes = [_cut(rows[each], n_cells if each in numbers else 0) for each in (name, other)]
        shape = tuple(int(code.max()) + 1 for code in codes)
        counts = np.zeros(shape)
        np.add.at(counts, tuple(codes), 1.0)
        values = [
            rows[each] if each in numbers else pd.Series(code.astype(float))
            for each, code in zip((name, other), codes, strict=True)
        ]
        axes = [
            _lay_out(value.to_numpy(), code, n)
            for value, code, n in zip(values, codes, count_points(shape), strict=True)
        ]
        table = PlacedTable(axes=axes, counts=counts)
        if table.unresolved > UNRESOLVED:
            continue
        y = table.at_points(0)
        if other in numbers:
            found, truth = find_line(table, "slope"), float(np.polyfit(values[1], values[0], 1)[0])
            flat = replace(table)
            flat.__dict__["leaning"] = table.even
            half = abs(found.estimate - find_line(flat, "slope").estimate) / 2.0
            error = abs(found.estimate - truth)
            yield True, error <= found.bias_bound, error <= half
            continue
        share = counts / counts.sum(axis=0)
        even, leaning = (table.average(y, each) for each in (table.even, table.leaning))
        estimate, truths = (share * leaning).sum(axis=0), values[0].groupby(codes[1]).mean()
        halves = np.abs((share * (leaning - even)).sum(axis=0)) / 2.0
        apart = np.linalg.norm(share * table.average(y * table.tilt(0), table.even), axis=0)
        for each in zip(np.abs(estimate - truths), halves, APART * apart, strict=True):
            yield False, each[0] <= each[1] + each[2], each[0] <= each[1]


def _cut(values: pd.Series, n_cells: int) -> np.ndarray:
    if not n_cells:
        return pd.factorize(values, sort=True)[0]
    edges = np.unique(np.quantile(values, np.arange(1, n_cells) / n_cells))
    return pd.factorize(np.searchsorted(edges, values, side="right"), sort=True)[0]


def _lay_out(values: np.ndarray, code: np.ndarray, n_each: int) -> Axis:
    """Return the axis of a column, its points at the means of equal parts of each cell's rows."""
    order = np.lexsort((values, code))
    parts = np.split(values[order], np.cumsum(np.bincount(code))[:-1])
    points = [
        [each.mean() if len(each) else part.mean() for each in np.array_split(part, n_each)]
        for part in parts
    ]
    ends = np.array([[part.mean(), part[0], part[-1]] for part in parts])
    axis = Axis.of(*ends.T, np.bincount(code).astype(float), n_each=n_each)
    return replace(axis, values=np.ravel(points))


def tail(event: CentralEvent, most: float) -> float:
    """Return the probability that one entry of an event's noise exceeds a number, by its whole law."""
    wide = event.sigma if isinstance(event, DiscreteGaussian) else 3.0 * event.scale
    x = np.arange(-int(14 * wide) - 40, int(14 * wide) + 41)
    gaussian = isinstance(event, DiscreteGaussian)
    mass = np.exp(-(x**2) / (2 * wide**2) if gaussian else -np.abs(x) / (wide / 3.0))
    return float(mass[np.abs(x) > most].sum() / mass.sum())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--rows", type=int)
    parser.add_argument("--tables", nargs="*", default=list(SOURCES))
    parser.add_argument("--releases", nargs="*", default=list(RELEASES))
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--targets", action="store_true")
    parser.add_argument("--inside", action="store_true")
    chosen = parser.parse_args(arguments)
    folder = os.environ.get("DPDASK_DATA")
    if folder is None:
        parser.exit(2, "set DPDASK_DATA to the folder of the tables\n")
    if chosen.inside:
        for source in read_tables(Path(folder), chosen.rows):
            held = np.array([*measure_inside(source)], dtype=bool).reshape(-1, 3)
            for what, here in (("means by group", ~held[:, 0]), ("slopes", held[:, 0])):
                if here.any():
                    bound, half = held[here, 1:].mean(axis=0)
                    print(
                        f"{source.name:16} {here.sum():4} {what:16} {bound:.3f} {half:.3f}",
                        flush=True,
                    )
        return
    if chosen.targets:
        for source in read_tables(Path(folder), chosen.rows):
            for target in measure_targets(source, chosen.runs):
                print(f"{source.name:16} {target}", flush=True)
        return
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
