"""The jobs whose releases are recorded: every mechanism, every reference and the main options, on tables of integer arithmetic alone."""

from datetime import date

import pyarrow as pa
import pyarrow.parquet as pq
from e2e.helpers import (
    GENRES,
    KNOWN,
    LEVELS,
    MIXED_SCHEMA,
    categorical,
    continuous,
    refusing,
    run_here,
    write_job,
)

SIZES = [150, 90, 1700, 40, 300]
PUBLIC_SIZES = [500, 400]
ROW_GROUP = 600

SCHEMA = MIXED_SCHEMA | {
    "flag": categorical([False, True], type="bool"),
    "day": continuous([18262, 19000], nulls="level", type="date32"),
    "name": {"role": "keep", "type": "string"},
}
TYPES = {name: pa.type_for_alias(column["type"]) for name, column in SCHEMA.items()}


# ---- the input


def mixed(row, salt):
    """Return 32 bits of a row by integer arithmetic alone: the same with any version of any library."""
    found = (row * 2654435761 + salt * 40503) % 2**32
    found = (found ^ found >> 15) * 2246822519 % 2**32
    found = (found ^ found >> 13) * 3266489917 % 2**32
    return found ^ found >> 16


def row_of(row):
    """Return one row; genre, price and amount depend on the rating, and a few prices lie outside the declared bounds."""
    bits = [mixed(row, salt) for salt in range(10)]
    level = min(bits[0] % 10, bits[1] % 10)
    genre = level // 3 if bits[2] % 4 else bits[2] // 4 % 4
    amount = (
        0.0 if bits[3] % 10 < level else 50.0 if bits[3] % 10 == 9 else (bits[4] % 9973 + 1) / 100
    )
    return {
        "userId": bits[5] % 400,
        "rating": LEVELS[level],
        "genre": [*GENRES, None][genre],
        "price": (bits[6] % 1009 + 100 * level) / 1900,
        "age": 18 + min(bits[7] % 72, bits[8] % 72),
        "amount": amount,
        "timestamp": bits[9],
        "flag": (bits[9] >> 8) % 3 == 0,
        "day": date.fromordinal(date(2020, 1, 1).toordinal() + bits[8] % 700)
        if bits[8] % 11
        else None,
        "name": f"n{row % 7}" if row % 5 else None,
    }


def write_lake(folder, sizes, *, first=0, csv=False):
    """Write one file per size, from the row `first` on."""
    folder.mkdir(parents=True)
    for number, size in enumerate(sizes):
        rows = [row_of(row) for row in range(first, first + size)]
        if csv:
            cells = [
                ["" if value is None else str(value) for value in row.values()] for row in rows
            ]
            text = "".join(",".join(line) + "\n" for line in [list(SCHEMA), *cells])
            (folder / f"part.{number}.csv").write_text(text, encoding="utf-8", newline="\n")
        else:
            table = pa.table(
                {
                    name: pa.array([row[name] for row in rows], type_)
                    for name, type_ in TYPES.items()
                }
            )
            pq.write_table(
                table,
                folder / f"part.{number}.parquet",
                row_group_size=ROW_GROUP,
                compression="none",
            )
        first += size
    return folder


def write_lakes(base):
    """Write the private table as Parquet and as CSV, and the public one."""
    return {
        "parquet": write_lake(base / "parquet", SIZES),
        "csv": write_lake(base / "csv", SIZES, csv=True),
        "public": write_lake(base / "public", PUBLIC_SIZES, first=100_000),
    }


# ---- the jobs

PUBLIC = "<public>"  # stands for the public table's path
UNIT = {"column": "userId", "max_rows": 4}
DECLARED = {
    "kind": "known",
    "columns": KNOWN["columns"]
    | {
        "flag": {"probabilities": [0.6, 0.4]},
        "day": {"name": "randint", "low": 18300, "high": 18900, "null": 0.1},
    },
}
WEIGHTS = {
    "rating": 3.0,
    "genre": 1.0,
    "price": 2.0,
    "age": 2.0,
    "amount": 1.0,
    "flag": 0.5,
    "day": 1.5,
}


def dip(reference, channel="laplace", **more):
    return {"kind": "dip", "reference": reference, "channel": channel, **more}


def drop(*names):
    """Return the schema with these columns dropped."""
    return {
        name: {"role": "drop", "type": column["type"]} if name in names else column
        for name, column in SCHEMA.items()
    }


def uniform(scale):
    return {"name": "uniform", "loc": 0, "scale": scale}


def perturbed(name, epsilon, of, channel):
    reference = {"kind": "known", **KNOWN["columns"][name]}
    return {
        "design": "interval-differential",
        "perturb": {"epsilon": epsilon, "reference": reference, "channel": channel},
        "of": of,
    }


KEEP = {"output__order": "keep"}
CENTRAL = {"schema": drop("userId", "name")}
FEW = {"schema": drop("userId", "name", "age", "amount", "day")}
RANGES = {"schema": refusing(drop("genre", "flag", "day")), "privacy": None}
TWO_RANGES = {"schema": refusing(drop("genre", "flag", "day", "age", "amount"))}
RATING = {"design": "case2", "anchors": uniform(5.5)}
DESIGNS = {
    "rating": RATING,
    "price": {
        "design": "case1",
        "anchors": {"coverage": 0.7, "family": {"name": "norm"}},
        "reference": uniform(1),
    },
    "age": {"design": "ring", "anchors": uniform(120)},
    "amount": {
        "design": "canonical",
        "n_anchors": 2,
        "anchors": uniform(100),
        "acceptable": [[float("-inf"), 0.0]],
    },
}
ROUNDS = {
    "rating": {"design": "selective", "of": RATING, "tau": 0.2, "reference": uniform(5.5)},
    "price": {
        "design": "progressive",
        "anchors": uniform(1),
        "rounds": 3,
        "tau": 0.1,
        "reference": uniform(1),
    },
}
PERTURBED = {
    "rating": perturbed("rating", 2.5, RATING, "laplace-calibrated"),
    "price": perturbed(
        "price", 1.5, {"design": "case1", "anchors": uniform(1), "reference": uniform(1)}, "laplace"
    ),
    "age": DESIGNS["age"],
    "amount": DESIGNS["amount"],
}

CHAIN = {"kind": "chain", "fraction": 0.25}
TREE = {"kind": "tree", "bins": {"price": 6, "age": 5, "amount": [0.0, 20.0, 60.0], "day": 4}}
CLIQUES = [["rating"], ["genre", "rating"], ["amount", "age", "flag"]]

# what each job changes in the job of `write_job`; `input` is parquet if it is not given
JOBS = {
    "dip known": {"mechanism": dip(DECLARED)},
    "dip known, calibrated, weights": {
        "mechanism": dip(DECLARED, "laplace-calibrated", weights=WEIGHTS),
        **KEEP,
    },
    "dip known, optimal, costs": {
        "mechanism": dip(DECLARED, "optimal", cost={"rating": "rank", "genre": "zero-one"})
    },
    "dip holdout": {"mechanism": dip({"kind": "holdout", "fraction": 0.25})},
    "dip holdout, csv": {"mechanism": dip({"kind": "holdout", "fraction": 0.25}), "input": "csv"},
    "dip holdout, unit, optimal, keep": {
        "mechanism": dip({"kind": "holdout", "fraction": 0.3}, "optimal"),
        "privacy__unit": UNIT,
        **KEEP,
    },
    "dip histogram": {"mechanism": dip({"kind": "histogram"})},
    "dip histogram, unit, calibrated": {
        "mechanism": dip({"kind": "histogram", "share": 0.25, "bins": 64}, "laplace-calibrated"),
        "privacy__unit": UNIT,
        "privacy__epsilon": 16.0,
    },
    "dip public": {"mechanism": dip({"kind": "public", "path": PUBLIC})},
    "dip public, optimal": {
        "mechanism": dip({"kind": "public", "path": PUBLIC}, "optimal"),
        **KEEP,
    },
    "dip chain of a fraction": {"mechanism": dip(CHAIN)},
    "dip chain of a fraction, optimal, unit": {
        "mechanism": dip(CHAIN, "optimal"),
        "privacy__unit": UNIT,
        **FEW,
    },
    "dip chain of a path": {
        "mechanism": dip({"kind": "chain", "path": PUBLIC}, "laplace-calibrated")
    },
    "dip chain by user": {
        "mechanism": dip(
            CHAIN | {"by": "userId", "min_rows": 2, "order": "random", "max_records": 400}
        ),
        **KEEP,
    },
    "dip tree": {"mechanism": dip(TREE), "privacy__epsilon": 8.0},
    "dip tree, delta, calibrated": {
        "mechanism": dip(TREE, "laplace-calibrated"),
        "privacy__delta": 1e-6,
    },
    "dip tree, delta, unit, keep": {
        "mechanism": dip(TREE),
        "privacy__delta": 1e-6,
        "privacy__unit": UNIT,
        "privacy__epsilon": 32.0,
        **KEEP,
    },
    "copula": {"mechanism": {"kind": "copula", "bins": 8}, **CENTRAL},
    "copula, delta, unit": {
        "mechanism": {"kind": "copula", "bins": 8, "n_rows": 1300},
        "privacy__delta": 1e-6,
        "privacy__unit": UNIT,
        **CENTRAL,
    },
    "copula, add-remove": {
        "mechanism": {
            "kind": "copula",
            "bins": {"price": 6, "age": 5},
            "weights": {"one_way": 2.0},
        },
        "privacy__adjacency": "add-remove",
        "privacy__delta": 1e-6,
        **CENTRAL,
    },
    "copula, target": {
        "mechanism": {"kind": "copula", "bins": 4, "target": "genre"},
        "privacy__delta": 1e-6,
        **CENTRAL,
    },
    "copula, own records": {
        "mechanism": {"kind": "copula", "bins": 8, "records": "copula"},
        **CENTRAL,
    },
    "marginals": {"mechanism": {"kind": "marginals", "cliques": CLIQUES, "bins": 4}, **CENTRAL},
    "marginals, delta, unit, weights": {
        "mechanism": {"kind": "marginals", "cliques": CLIQUES, "bins": 6, "weights": [1, 2, 4]},
        "privacy__delta": 1e-6,
        "privacy__unit": UNIT,
        **CENTRAL,
    },
    "histogram cells": {
        "mechanism": {"kind": "histogram", "bins": {"price": 5}, "threshold": "none"},
        **FEW,
    },
    "histogram cells, add-remove, spread": {
        "mechanism": {"kind": "histogram", "bins": 6, "points": "spread"},
        "privacy__adjacency": "add-remove",
        **FEW,
    },
    "histogram cells, sparse": {
        "mechanism": {"kind": "histogram", "bins": {"price": 15_000}, "factor": 1.0},
        "privacy__epsilon": 16.0,
        **FEW,
    },
    "histogram rows": {"mechanism": {"kind": "histogram", "bins": 5, "output": "rows"}, **FEW},
    "histogram rows, delta, unit": {
        "mechanism": {
            "kind": "histogram",
            "bins": "rule",
            "output": "rows",
            "threshold": "positive",
            "n_rows": 900,
        },
        "privacy__delta": 1e-6,
        "privacy__unit": UNIT,
        "privacy__epsilon": 16.0,
        **FEW,
    },
    "interval": {"mechanism": {"kind": "interval", "columns": DESIGNS}, **RANGES},
    "interval, coverage, keep": {
        "mechanism": {"kind": "interval", "columns": ROUNDS, "coverage": True},
        "privacy": None,
        **TWO_RANGES,
        **KEEP,
    },
    "interval, perturbed": {
        "mechanism": {"kind": "interval", "columns": PERTURBED},
        "schema": RANGES["schema"],
        "privacy": {"epsilon": 4.0},
    },
}


def with_path(job, path):
    """Return a job with the public table's path in its place."""
    if isinstance(job, dict):
        return {key: with_path(value, path) for key, value in job.items()}
    return path if job == PUBLIC else job


def write_recorded(name, lakes, folder, **changes):
    """Write a job by its name into a folder, its output `out` there, and return its path."""
    job = {"schema": SCHEMA, **JOBS[name]}
    source = lakes[job.pop("input", "parquet")]
    return write_job(
        folder, source, folder / "out", **{**with_path(job, str(lakes["public"])), **changes}
    )


def run_recorded(name, lakes, folder):
    """Run a job by its name and return its output."""
    run_here(write_recorded(name, lakes, folder))
    return folder / "out"
