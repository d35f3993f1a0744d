"""Small lakes, job files, the command line in a subprocess, and digests of what was published."""

import contextlib
import hashlib
import io
import json
import os
import re
import subprocess
import sys
from copy import deepcopy
from unittest import mock

import dask
import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.dataset as pads
import pyarrow.parquet as pq
import pytest
import yaml
from distributed import LocalCluster

import dpdask
from dpdask.cli import main
from dpdask.engine import scan, write
from dpdask.engine import scan as units
from dpdask.engine.account import open_ledger
from dpdask.engine.compute import make_stage, run_stage
from dpdask.errors import SpecError
from dpdask.jobs.run import run_job
from dpdask.jobs.spec import load_job
from dpdask.privacy import ledger as ledger_tables
from dpdask.schema import Schema


def schema_of(columns):
    """Return the schema of columns."""
    return Schema.from_dict({"columns": columns})


def release_of(folder, rows, **changes):
    """Run a job on a frame in a new folder, and return its release, opened."""
    (folder / "in").mkdir(parents=True)
    rows.to_parquet(folder / "in" / "rows.parquet", index=False)
    run_here(write_job(folder, folder / "in", folder / "out", **changes))
    return dpdask.open(str(folder / "out"))


def says(found, words):
    """Return whether a result's limits say something."""
    return any(words in limit for limit in found.limits)


def refused(what, kind=SpecError):
    """Expect an error whose line says what is wrong."""
    return pytest.raises(kind, match=what)


def private(kind, domain):
    """Return what makes private columns of a kind: of their levels or bounds, if they have any, and whatever else."""
    return lambda *given, **more: {
        "role": "privatise",
        "kind": kind,
        **({domain: given[0]} if given else {}),
        **more,
    }


discrete, categorical = private("discrete", "levels"), private("categorical", "levels")
continuous, mixed = private("continuous", "bounds"), private("mixed", "bounds")
SEED = 7
LEVELS = [0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0]
GENRES = ["comedy", "drama", "horror"]
MIXED_SCHEMA = {
    "userId": {"role": "keep", "type": "int64"},
    "rating": discrete(LEVELS, type="float64"),
    "genre": categorical(GENRES, nulls="level", type="string"),
    "price": continuous([0.0, 1.0], type="float64"),
    "age": continuous([0.0, 120.0], type="int32"),
    "amount": mixed(atoms=[0.0, 50.0], bounds=[0.0, 100.0], type="float64"),
    "timestamp": {"role": "drop", "type": "int64"},
}
RATINGS_SCHEMA = {name: MIXED_SCHEMA[name] for name in ("userId", "rating", "timestamp")}
HOLDOUT = {"kind": "holdout", "fraction": 0.25}
KNOWN = {
    "kind": "known",
    "columns": {
        "rating": {"probabilities": [0.1] * 10},
        "genre": {"probabilities": [0.25, 0.25, 0.25, 0.25]},
        "price": {"name": "uniform", "loc": 0.0, "scale": 1.0},
        "age": {"name": "randint", "low": 18, "high": 90},
        "amount": {"name": "uniform", "loc": 0.0, "scale": 100.0, "probabilities": [0.3, 0.1]},
    },
}


def refusing(schema):
    """Return a schema that refuses values outside bounds, as interval jobs need: a range holds the value itself."""
    return {
        name: column | ({"outside": "refuse"} if "bounds" in column else {})
        for name, column in schema.items()
    }


def mixed_table(n_rows, rng, schema=MIXED_SCHEMA):
    """Return rows with one column of every kind, or those of them that a schema names."""
    amount = rng.uniform(0.0, 100.0, n_rows)
    amount[rng.random(n_rows) < 0.3] = 0.0
    amount[rng.random(n_rows) < 0.1] = 50.0
    genre = rng.integers(0, 4, n_rows)
    columns = {
        "userId": pa.array(rng.integers(0, 1000, n_rows)),
        "rating": pa.array(rng.choice(LEVELS, n_rows)),
        "genre": pa.array([GENRES[code] if code < 3 else None for code in genre]),
        "price": pa.array(rng.beta(2, 5, n_rows)),
        "age": pa.array(rng.integers(18, 90, n_rows), pa.int32()),
        "amount": pa.array(amount),
        "timestamp": pa.array(rng.integers(0, 2**31, n_rows)),
    }
    return pa.table({name: columns[name] for name in schema})


def lake(folder, rows, *, row_group=400, schema=MIXED_SCHEMA, seed=1, csv=False):
    """Write one file per entry of `rows`, its row groups of `row_group` rows."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    for index, n_rows in enumerate(rows):
        table = mixed_table(n_rows, rng, schema)
        if csv:
            pa_csv.write_csv(table, folder / f"part.{index}.csv")
        else:
            pq.write_table(table, folder / f"part.{index}.parquet", row_group_size=row_group)
    return folder


def write_job(folder, input_, output, *, schema=MIXED_SCHEMA, rules=(), **changes):
    """Write a job and its schema into `folder` and return the job's path; `changes` are dotted keys with `__` for the dot."""
    folder.mkdir(parents=True, exist_ok=True)
    job = {
        "name": "test",
        "input": {"path": str(input_)},
        "output": {"path": str(output), "rows_per_shard": 500},
        "schema": "schema.yaml",
        "privacy": {"epsilon": 4.0, "delta": 0, "adjacency": "replace-one", "unit": "row"},
        "mechanism": {"kind": "dip", "reference": dict(HOLDOUT), "channel": "laplace"},
        "cluster": {"kind": "synchronous"},
        "insecure_seed": None
        if changes.get("ledger")
        else SEED,  # noise from a seed is charged to no ledger
    }
    for dotted, value in changes.items():
        *parents, last = dotted.split("__")
        inner = job
        for parent in parents:
            inner = inner[parent]
        inner[last] = deepcopy(value)  # which a later key may change inside
    declared = {"columns": dict(schema)} | ({"rules": list(rules)} if rules else {})
    for name, content in (("schema", declared), ("job", job)):
        text = yaml.dump(content, Dumper=yaml.CSafeDumper, sort_keys=False)
        (folder / f"{name}.yaml").write_text(text)
    return folder / "job.yaml"


waits_for_the_disk = (
    ledger_tables._on_connect
)  # what an SQLite ledger does where tests do not spare the disk


def spare_the_disk(put):
    """Let no write wait for the disk: tests kill processes, not machines. `put` is `setattr`, or that of a monkeypatch."""

    def on_connect(connection, _):
        connection.isolation_level = None
        connection.execute("PRAGMA synchronous=OFF")

    put(os, "fsync", lambda _: None)
    put(ledger_tables, "_on_connect", on_connect)


def load(job, **settings):
    """Return the job of a file, with keys changed (`output__path=…`)."""
    return load_job(job, {key.replace("__", "."): str(value) for key, value in settings.items()})


def run_here(job, progress=None, **settings):
    """Run a job in this process, without threads."""
    with dask.config.set(scheduler="synchronous"):
        return run_job(load(job, **settings), progress)


def processes(workers):
    """Return a cluster of worker processes, on free ports of this machine alone (a second cluster on 8787 would warn)."""
    quiet = {"dashboard": False, "dashboard_address": "127.0.0.1:0"}
    # Dask gives a killed worker up for good unless it is back after 15 s, which a busy machine may not manage
    with dask.config.set({"distributed.deploy.lost-worker-timeout": "1h"}):
        return LocalCluster(
            n_workers=workers,
            threads_per_worker=1,
            host="127.0.0.1",
            dashboard_address="127.0.0.1:0",
            scheduler_kwargs=quiet,
        )


def command(*arguments):
    """Return the command line's words."""
    return [sys.executable, "-c", "from dpdask.cli import main; main()", *map(str, arguments)]


def run_cli(*arguments, timeout=600):
    """Run the command line in its own process; the time-out is for machines that are shared."""
    return subprocess.run(
        command(*arguments),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env=dict(os.environ),
    )


class Terminal(io.StringIO):
    """Says that it is one."""

    def isatty(self):
        return True


def call_cli(*arguments, terminal=False):
    """Run the command line in this process, its stderr a terminal or not: `run_cli` for all that does not depend on the process."""
    words, out, err = (
        ["dpdask", *map(str, arguments)],
        io.StringIO(),
        Terminal() if terminal else io.StringIO(),
    )
    code = None
    with (
        mock.patch.object(sys, "argv", words),
        mock.patch.dict(os.environ),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as exit_:
            code = exit_.code
    return subprocess.CompletedProcess(
        words,
        code if isinstance(code, int) else int(code is not None),
        out.getvalue(),
        err.getvalue(),
    )


def charging_entries(url, dataset):
    """Return the entries of a dataset's chain that charge a run or close it, without those that say what was drawn."""
    return [
        entry
        for entry in open_ledger(url).show(dataset).entries
        if entry.kind not in ("draw", "hold-out")
    ]


def charged_kinds(url, dataset):
    """Return the kinds of these entries, in the order of the chain."""
    return [entry.kind for entry in charging_entries(url, dataset)]


def make_ledger(folder, dataset="ratings", epsilon=9.0, delta=0.0, **given):
    """Make a ledger in a folder that knows one dataset, and return what a job says of it."""
    folder.mkdir(exist_ok=True)
    url = f"sqlite:///{folder / 'ledger.db'}"
    open_ledger(url).init(dataset, epsilon, delta, **given)
    return {"url": url, "dataset": dataset}


def digests(output):
    """Return the sha256 of every file below a folder, by its path."""
    files = (path for path in sorted(output.rglob("*")) if path.is_file())
    return {
        str(path.relative_to(output)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


def read_card(folder, out="out"):
    """Return the card of the output `out` in a job's folder."""
    return json.loads((folder / out / "_dpdask" / "release.json").read_text(encoding="utf-8"))


def read_rows(folder, out="out"):
    """Return the published table, which has no partitions."""
    return pads.dataset(folder / out, exclude_invalid_files=False).to_table()


def hidden(output):
    """Return the folder of an output's unfinished run."""
    return output.parent / f".{output.name}.dpdask"


def error_line(result):
    """Return the one line of error, after checking that there is no more than one and no traceback."""
    lines = [line for line in result.stderr.splitlines() if not line.startswith("{")]
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("dpdask: ")
    return lines[0]


def holds_number(text, number):
    """Tell whether a text holds a whole number as a word, with or without commas; digits of hashes, identifiers and fractions are not words."""
    return (
        re.search(rf"(?<![\w.])(?:{number}|(?<!\d,){number:,})(?!\w|\.\d*[1-9])", text) is not None
    )


def apply(argument, function):
    """Run a function as one task; it is what the tasks share."""
    return [function(argument)]


def join(parts):
    return [each for part in parts for each in part]


def run_each(stage, function, arguments, progress=None):
    """Return what a function returns for each argument, computed by tasks."""
    made = make_stage(stage, apply, [(argument,) for argument in arguments], function, join)
    return join([part for parts in run_stage(made, progress) for part in parts])


def spy_on_stages(see, monkeypatch):
    """Show the name and the tasks of each stage before it runs."""

    def run(stage, progress=None):
        batches = list(stage.batches)
        see(
            stage.name,
            {
                **stage.shared,
                **{key: node for batch in batches for key, node in batch.nodes.items()},
            },
        )
        return run_stage(stage._replace(batches=batches), progress)

    for module in (scan, units, write):
        monkeypatch.setattr(module, "run_stage", run)
