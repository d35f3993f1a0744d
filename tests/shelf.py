"""The shelf: small tables, jobs on them, and their finished releases, each made once in a session of tests, when it is first asked for.

`shelf.release(name)` is the folder of a finished release, `shelf.opened(name)` the same opened by `dpdask.open`, `shelf.card(name)` its card,
`shelf.copy(name, folder)` a copy to alter, `shelf.job(name, folder, **changes)` its job, for a test that runs it anew with some keys changed, and
`shelf.lake(table)` the folder of a table. The processes of pytest-xdist share them, so nobody writes there.

A release has a name in `JOBS`: a table, the columns, and what differs from the job of `e2e.helpers.write_job`.
"""

from __future__ import annotations

import datetime as dt
import fcntl
import json
import shutil
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from e2e import recorded
from e2e.helpers import categorical, continuous, discrete, refusing, run_here, write_job
from page import pages

import dpdask

HOLDOUT = {"kind": "holdout", "fraction": 0.25}
COUNTED = {"epsilon": 4.0, "delta": 1e-9, "adjacency": "replace-one", "unit": "row"}
DROP = {"role": "drop"}
KEEP = {"role": "keep"}


def dip(reference, channel):
    return {"kind": "dip", "reference": reference, "channel": channel}


def but(columns, **roles):
    """Return columns, some of them changed."""
    return {**columns, **roles}


# ---- homes: levels, categories and numbers that depend on each other

TOWNS = ["A", "B", "C"]
KINDS = ["flat", "house", "other"]
HOMES = {
    "town": KEEP,
    "years": KEEP,
    "rating": discrete([1, 2, 3, 4, 5]),
    "kind": categorical(KINDS),
    "price": continuous([0.0, 200.0]),
}
HOMES_PRIVATE = but(
    HOMES,
    town=HOMES["kind"] | {"levels": TOWNS},
    years=HOMES["rating"] | {"levels": list(range(1, 9))},
)


@cache
def homes(n_rows=20_000):
    n, rng = 20_000, np.random.default_rng(5)
    town = rng.choice(TOWNS, n, p=[0.5, 0.3, 0.2])
    years = rng.integers(1, 9, n)
    score = (
        0.35 * (years - 4.5)
        + np.select([town == "A", town == "B"], [0.7, -0.5], 0.0)
        + rng.normal(size=n)
    )
    rating = 1 + np.digitize(score, [-1.2, -0.4, 0.4, 1.2])
    price = np.clip(60.0 + 6.0 * (years - 4.5) + 18.0 * rng.normal(size=n), 0.0, 200.0)
    kind = np.array(KINDS)[
        np.where(rng.random(n) < 0.6, (rating > 3).astype(int), rng.integers(0, 3, n))
    ]
    return pd.DataFrame(
        {"town": town, "years": years, "rating": rating, "kind": kind, "price": price}
    )[:n_rows]


# ---- levels: columns of five levels, each like the one before it

LEVEL_SHARES = np.array([0.4, 0.3, 0.15, 0.1, 0.05])
LEVEL_STAYS = 0.6  # how often a column has the level of the one before it
LEVEL_NAMES = [f"c{place}" for place in range(8)]
LEVELS = {name: discrete([1, 2, 3, 4, 5]) for name in LEVEL_NAMES} | {"side": KEEP}


@cache
def levels():
    n, rng = 6_000, np.random.default_rng(11)
    table = {"side": rng.choice(["l", "r"], n)}
    before = rng.choice(5, n, p=LEVEL_SHARES)
    for name in LEVEL_NAMES:
        table[name] = 1 + before
        before = np.where(rng.random(n) < LEVEL_STAYS, before, rng.choice(5, n, p=LEVEL_SHARES))
    return pd.DataFrame(table)


# ---- rides: dates, times and nulls

FIRST = pd.Timestamp("2026-01-01")
YEAR = continuous([dt.date(2026, 1, 1), dt.date(2026, 12, 31)])
RIDES = {
    "when": YEAR,
    "day": YEAR,
    "riders": discrete([1, 2, 3], nulls="level"),
    "paid": categorical([1, 2]),
    "firm": KEEP,
    "seen": KEEP,
}
RIDES_PRIVATE = but(RIDES, firm=DROP, seen=DROP)


@cache
def rides():
    n, rng = 4_000, np.random.default_rng(3)
    when = (FIRST + pd.to_timedelta(np.minimum(rng.exponential(30.0, n), 360.0), unit="D")).astype(
        "datetime64[ms]"
    )
    paid = rng.choice([1, 2], n)
    riders = pd.Series(rng.choice([1.0, 2.0, 3.0, np.nan], n, p=[0.3, 0.2, 0.2, 0.3])).astype(
        "Int64"
    )
    return pd.DataFrame(
        {
            "when": when,
            "day": when.floor("D").date,
            "riders": riders,
            "paid": paid,
            "firm": rng.choice([7, 8], n),
            "seen": when,
        }
    )


# ---- the shelf

TABLES = {"homes": homes, "few homes": lambda: homes(5_000), "levels": levels, "rides": rides}
UNIFORM = {"kind": "known", "columns": {"price": {"name": "uniform", "loc": 0.0, "scale": 200.0}}}
CASE1 = {"design": "case1", "anchors": {"name": "uniform", "loc": 0, "scale": 120}}

# the table, the columns, and the keys that differ; beside these, each job of `e2e.recorded` has a release by its name
JOBS = {
    "homes, dip": (
        "homes",
        but(HOMES, kind=DROP),
        {"mechanism": dip(HOLDOUT, "optimal"), "privacy__epsilon": 6.0},
    ),
    "homes, dip of pairs": (
        "homes",
        but(HOMES, price=DROP),
        {"mechanism": dip(HOLDOUT, "optimal"), "privacy__epsilon": 6.0},
    ),
    "homes, dip known": (
        "homes",
        but(HOMES, rating=DROP, kind=DROP),
        {"mechanism": dip(UNIFORM, "optimal")},
    ),
    "homes, interval": (
        "few homes",
        refusing(but(HOMES, rating=KEEP, kind=KEEP)),
        {"mechanism": {"kind": "interval", "columns": {"price": CASE1}}, "privacy": None},
    ),
    "homes, copula": (
        "homes",
        HOMES_PRIVATE,
        {"mechanism": {"kind": "copula"}, "privacy": COUNTED},
    ),
    "homes, model": (
        "homes",
        HOMES_PRIVATE,
        {"mechanism": {"kind": "copula"}, "privacy": COUNTED, "output__model": True},
    ),
    "homes, cells": (
        "homes",
        but(HOMES_PRIVATE, town=DROP, rating=DROP),
        {"mechanism": {"kind": "histogram", "output": "cells", "bins": {"price": 40}}},
    ),
    "homes, tables": (
        "homes",
        HOMES_PRIVATE,
        {
            "mechanism": {
                "kind": "marginals",
                "cliques": [["town", "rating"], ["price"]],
                "bins": {"price": 20},
            }
        },
    ),
    "levels, holdout": ("levels", LEVELS, {"mechanism": dip(HOLDOUT, "laplace-calibrated")}),
    "levels, histogram": (
        "levels",
        LEVELS,
        {"mechanism": dip({"kind": "histogram"}, "optimal"), "privacy__epsilon": 4.0},
    ),
    "levels, tree": (
        "levels",
        LEVELS,
        {
            "mechanism": dip({"kind": "tree"}, "laplace-calibrated"),
            "privacy": COUNTED | {"delta": 1e-6},
        },
    ),
    "rides, holdout": ("rides", RIDES, {"mechanism": dip(HOLDOUT, "laplace-calibrated")}),
    "rides, tree": (
        "rides",
        RIDES,
        {
            "mechanism": dip({"kind": "tree"}, "laplace-calibrated"),
            "privacy": COUNTED | {"epsilon": 8.0, "delta": 1e-6},
        },
    ),
    "rides, tables": (
        "rides",
        RIDES_PRIVATE,
        {
            "mechanism": {
                "kind": "marginals",
                "cliques": [["when"], ["day"], ["riders"]],
                "bins": {"when": 365, "day": 365},
            }
        },
    ),
    "rides, cells": (
        "rides",
        but(RIDES_PRIVATE, day=DROP, paid=DROP),
        {
            "mechanism": {"kind": "histogram", "output": "cells", "bins": {"when": 60}},
            "privacy": COUNTED | {"epsilon": 8.0, "delta": 1e-6},
        },
    ),
    "hostile, rows": (
        "hostile",
        pages.SCHEMA,
        {"mechanism": dip({"kind": "histogram"}, "optimal"), "about": pages.ABOUT},
    ),
    "hostile, records": (
        "hostile",
        but(pages.SCHEMA, group=DROP),
        {
            "mechanism": {"kind": "copula", "n_rows": "input"},
            "privacy__delta": 1e-6,
            "about": pages.ABOUT,
        },
    ),
}


@dataclass(frozen=True)
class Shelf:
    """What is finished in a folder that all processes of a session share."""

    folder: Path

    @contextmanager
    def _making(self, name):
        """Give the folder to make something in, or None if it is there: of several processes one makes it, and the others wait."""
        place, done = self.folder / name, self.folder / f"{name}.done"
        if done.exists():
            yield None
            return
        with (self.folder / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if done.exists():
                yield None
                return
            shutil.rmtree(place, ignore_errors=True)  # of one who was stopped
            place.mkdir()
            yield place
            done.touch()

    def lake(self, table):
        """Return the folder of a table in Parquet files."""
        with self._making(table) as folder:
            if folder and table == "hostile":
                pages.write_table(folder)
            elif folder:
                rows = pa.Table.from_pandas(TABLES[table](), preserve_index=False)
                pq.write_table(rows, folder / "table.parquet", row_group_size=5_000)
        return self.folder / table

    @property
    def recorded_lakes(self):
        """The tables of the recorded jobs: private ones as Parquet and CSV, and a public one."""
        with self._making("recorded") as folder:
            if folder:
                recorded.write_lakes(folder)
        return {name: self.folder / "recorded" / name for name in ("parquet", "csv", "public")}

    def job(self, name, folder, **changes):
        """Write the job of a release into a folder, its output `out` there, and return its path; `changes` are those of `write_job`."""
        if name in recorded.JOBS:
            return recorded.write_recorded(name, self.recorded_lakes, folder, **changes)
        table, schema, keys = JOBS[name]
        return write_job(
            folder,
            self.lake(table),
            folder / "out",
            **{"schema": schema, "output__rows_per_shard": 6_000, **keys, **changes},
        )

    def release(self, name):
        """Return the folder of a finished release, to be read only."""
        with self._making(name) as folder:
            if folder:
                run_here(self.job(name, folder))
        return self.folder / name / "out"

    def copy(self, name, folder):
        """Return a copy of a release, at a path that does not exist yet, to be altered."""
        return Path(shutil.copytree(self.release(name), folder))

    def opened(self, name):
        """Return a release as `dpdask.open` gives it."""
        return dpdask.open(str(self.release(name)))

    def card(self, name):
        """Return a release's card, which may be altered."""
        return json.loads(
            (self.release(name) / "_dpdask" / "release.json").read_text(encoding="utf-8")
        )
