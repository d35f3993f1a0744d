"""Release MovieLens-1M as synthetic users with their ratings, and measure how near they are to the bounded tables.

    python pipelines/movielens/persons.py RATINGS.parquet USERS.parquet OUT [--epsilon 1 4] [--max-rows 20] [--seeds 1 2 3]
        [--users-only 1000] [--peer hma PYTHON] [--peer dpsynth-mst PYTHON]
    python pipelines/movielens/persons.py OUT --simulate 1000000 --max-rows 30 --epsilon 1 --seeds 1

RATINGS has the columns UserID, MovieID, Rating and Timestamp, USERS has UserID, Gender, Age and Occupation. Of each user `max-rows` ratings are
chosen at random before: these bounded tables are the truth. Each `--peer` names a method of
`pipelines/benchmarks/peer_runner.py` and an interpreter that can run it. Every method runs in its own process, whose CPU seconds and memory are printed. `--simulate` makes so many users with 10 to 30
ratings each; their release is measured on the first 200,000 of either side. Noise comes from the seeds, so the outputs protect nobody. Confidential: it reads private rows.
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

import dpdask
from dpdask.evaluation.people import (
    Frames,
    Measured,
    People,
    bound_rows,
    compare_people,
    pair_people,
)

KEY = "UserID"
DELTA = 1e-9
MEASURED = 200_000  # users
RUNNER = Path(__file__).parents[1] / "benchmarks" / "peer_runner.py"
LEVELS = {
    "persons": {
        "Gender": ["F", "M"],
        "Age": [1, 18, 25, 35, 45, 50, 56],
        "Occupation": list(range(21)),
    },
    "rows": {
        "Rating": [1, 2, 3, 4, 5],
        "popularity": list(
            range(8)
        ),  # eighths of all ratings, by the number of ratings of the movie
        "hours": list(range(8)),  # three hours each
        "weekday": list(range(7)),
    },
}


def prepare(ratings: pd.DataFrame, users: pd.DataFrame) -> Frames:
    """Return users and their ratings; a missing time is the one before it of the same user."""
    numbers = ratings.groupby("MovieID")["MovieID"].transform("size")
    seconds = ratings.groupby(KEY)["Timestamp"].transform(lambda own: own.ffill().bfill())
    times = pd.to_datetime(seconds.fillna(seconds.median()), unit="s")
    rows = ratings[[KEY]].assign(
        Rating=ratings["Rating"].astype(int),
        popularity=pd.qcut(numbers.rank(method="first"), 8, labels=False),
        hours=times.dt.hour // 3,
        weekday=times.dt.day_of_week,
    )
    return users[[KEY, *LEVELS["persons"]]], rows


def simulate(n: int) -> Frames:
    """Return n users, and 10 to 30 ratings of each that follow a taste, habits, and who the user is."""
    rng = np.random.default_rng(1)
    numbers = rng.integers(10, 31, n)
    owners = np.repeat(np.arange(n, dtype=np.int32), numbers)
    age, taste = rng.integers(0, 7, n), rng.normal(size=n)
    users = {
        KEY: np.arange(n, dtype=np.int32),
        "Gender": np.where(rng.random(n) < 0.28, "F", "M"),
        "Age": np.array(LEVELS["persons"]["Age"], dtype=np.int8)[age],
        "Occupation": (3 * age + rng.geometric(0.2, n)) % 21,
    }

    def cut(mean: np.ndarray, spread: float, n_levels: int) -> np.ndarray:
        drawn = mean.astype(np.float32)[owners]
        drawn += spread * rng.standard_normal(len(owners), dtype=np.float32)
        return np.clip(np.rint(drawn), 0, n_levels - 1).astype(np.int8)

    stars = cut(2.4 + 0.45 * taste + 0.05 * age, 1.0, 5)
    habit = rng.integers(0, 8, n)
    rows = {
        KEY: owners,
        "Rating": stars + np.int8(1),
        "popularity": cut(3.5 + 0.7 * taste + rng.normal(size=n), 2.0, 8),
        "hours": cut(habit, 0.8, 8),
        "weekday": (cut(rng.integers(0, 7, n), 1.5, 7) + stars // 3) % 7,
    }
    return pd.DataFrame(users), pd.DataFrame(rows)


def write_job(
    tables: Frames,
    folder: Path,
    *,
    epsilon: float,
    max_rows: int,
    seed: int,
) -> None:
    """Write the tables with a job, and for peers what they are told."""
    folder.mkdir(parents=True)
    for name, frame in zip(LEVELS, tables, strict=True):
        frame.to_parquet(folder / f"{name}.parquet", index=False)
        columns: dict[str, Any] = {KEY: {"role": "drop"}}
        for column, levels in LEVELS[name].items():
            kind = "categorical" if column in ("Gender", "Occupation") else "discrete"
            columns[column] = {"role": "privatise", "kind": kind, "levels": levels}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({"columns": columns}, sort_keys=False))
    job = {
        "name": "movielens-1m-persons",
        "input": {"path": str(folder / "rows.parquet")},
        "schema": "rows.yaml",
        "parents": {"input": {"path": str(folder / "persons.parquet")}, "schema": "persons.yaml"},
        "output": {"path": str(folder / "out")},
        "privacy": {
            "epsilon": epsilon,
            "delta": DELTA,
            "adjacency": "add-remove",
            "unit": {"column": KEY, "max_rows": max_rows},
        },
        "mechanism": {"kind": "copula", "persons": True, "n_rows": "input"},
        "insecure_seed": seed,
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(job, sort_keys=False))
    told = {"levels": LEVELS, "key": KEY, "most": max_rows, "delta": DELTA}
    (folder / "persons.json").write_text(json.dumps(told))


def draw(method: str, python: str, folder: Path, epsilon: float, seed: int) -> dict[str, float]:
    """Run a method in its own process; return its CPU seconds, those of each stage if it tells them, and the peak of its memory in MiB."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    options = ["--persons", "--epsilon", f"{epsilon:g}", "--seed", str(seed)]
    command = [python, str(RUNNER), method, str(folder), *options]
    said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout  # noqa: S603 - the interpreters that the caller named
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    told = json.loads(said.splitlines()[-1])
    return {"CPU seconds": seconds, **told["told"], "MiB": told["peak_bytes"] / 2**20}


def measure(
    tables: Frames, folder: Path, method: str, max_rows: int, seed: int
) -> dict[str, list[Measured]]:
    """Return how near what a method has drawn is to the tables."""
    card: Any = dpdask.open(str(folder / "out")).card
    persons, rows = (pd.read_parquet(folder / f"{method}-{name}.parquet") for name in LEVELS)
    if method == "dpdask":
        numbers = rows[KEY].value_counts()
        if not persons[KEY].is_unique or not numbers.index.isin(persons[KEY]).all():
            raise ValueError("a key does not join")
        if numbers.max() > max_rows:
            raise ValueError("a person has too many rows")
    sides = [
        (people.head(MEASURED), own[own[KEY].isin(people[KEY].head(MEASURED))])
        for people, own in (tables, (persons, rows))
    ]
    original, released = pair_people(*sides, card["columns"], max_rows)
    rng = np.random.default_rng(seed)
    found = compare_people(original, released, rng)
    people = released, original.permute(rng), original.resample(rng)
    people = released, original.permute(rng), original.resample(rng)

    def show_several(place: int, name: str) -> Measured:
        truth, *others = (share_several(each, place) for each in (original, *people))
        sides = zip(("released", "independent", "resample"), others, strict=True)
        return Measured(label=name, original=truth, **dict(sides))

    found["persons with several levels"] = list(
        itertools.starmap(show_several, enumerate(LEVELS["rows"]))
    )
    return found


def share_several(people: People, column: int) -> float:
    """Return the share of the persons with rows whose rows have several levels."""
    found = people.count_distinct(column)
    return float(found[2:].sum() / found[1:].sum())


def main(arguments: list[str] | None = None) -> None:
    """Print the means over the seeds of each method, the medians, and the least and the greatest."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("paths", type=Path, nargs="+", metavar="PATH")
    parser.add_argument("--simulate", type=int, metavar="USERS")
    parser.add_argument("--epsilon", type=float, nargs="+", default=[1.0, 4.0])
    parser.add_argument("--max-rows", type=int, default=20)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--users-only", type=int, help="so many users, chosen at random")
    parser.add_argument(
        "--peer", nargs=2, action="append", default=[], metavar=("METHOD", "PYTHON")
    )
    asked = parser.parse_args(arguments)
    *inputs, out = asked.paths
    if asked.simulate:
        users, rows = simulate(asked.simulate)
    else:
        ratings, listed = (pd.read_parquet(path) for path in inputs)
        users, rows = prepare(ratings, listed)
    if asked.users_only:
        users = users.sample(asked.users_only, random_state=1)
        rows = rows[rows[KEY].isin(users[KEY])]
    methods = {"dpdask": sys.executable, **dict(asked.peer)}
    for epsilon in asked.epsilon:
        runs: dict[str, list[dict[str, list[Measured]]]] = {method: [] for method in methods}
        costs: dict[str, list[dict[str, float]]] = {method: [] for method in methods}
        for seed in asked.seeds:
            bounded = rows
            if not asked.simulate:
                bounded = bound_rows(rows, asked.max_rows, np.random.default_rng(seed))
            folder = out / f"{epsilon:g}-{asked.max_rows}-{seed}"
            settings = {"epsilon": epsilon, "max_rows": asked.max_rows, "seed": seed}
            write_job((users, bounded), folder, **settings)
            for method, python in methods.items():
                costs[method].append(draw(method, python, folder, epsilon, seed))
                runs[method].append(measure((users, bounded), folder, method, asked.max_rows, seed))
        for method, found in runs.items():
            print(f"{method}, ε = {epsilon:g}, at most {asked.max_rows} rows of a user")
            spent = pd.DataFrame(costs[method]).mean()
            print("  " + ", ".join(f"{name} {each:.0f}" for name, each in spent.items()))
            show(found)


def show(runs: list[dict[str, list[Measured]]]) -> None:
    """Print the means and medians over the runs of a method."""
    for part, measured in runs[0].items():
        for place, first in enumerate(measured):
            every = pd.DataFrame([asdict(run[part][place]) for run in runs])
            found, mean = every["released"], every.mean(numeric_only=True)
            truth = "" if first.original is None else f", original {mean['original']:.4g}"
            print(
                f"  {part}, {first.label}: release {found.mean():.4f} (median {found.median():.4f}, {found.min():.4f} to {found.max():.4f}), "
                f"independent {mean['independent']:.4f}, resample {mean['resample']:.4f}{truth}"
            )


if __name__ == "__main__":
    main()
