"""Small growing tables: a file a day, jobs that release them, and what they left."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from deltalake import write_deltalake
from e2e.helpers import charged_kinds, discrete, run_here, write_job

from dpdask.engine.account import open_ledger
from dpdask.io.storage import Folder
from dpdask.jobs.output import Target, name_release
from dpdask.jobs.series import KeptFolder

SCHEMA = {
    "day": {"role": "keep"},
    "user": {"role": "keep"},
    "r": discrete([1, 2, 3, 4, 5]),
}
KNOWN = {"kind": "known", "columns": {"r": {"probabilities": [0.2] * 5}}}
HISTOGRAM = {"kind": "histogram"}
HOLDOUT = {"kind": "holdout", "fraction": 0.25}
BY_USER = {"column": "user", "max_rows": 2}
N = 120


def add_day(source, day, *, n_rows=N, name=None):
    """Add the file of a day."""
    source.mkdir(exist_ok=True)
    path = source / (name or f"day-{day:02d}.parquet")
    pq.write_table(rows_of(day, n_rows), path)
    return path


def add_version(source, day):
    """Append the rows of a day to a Delta table, as one file and one version."""
    properties = {"delta.enableDeletionVectors": "true"}
    write_deltalake(
        source,
        rows_of(day),
        mode="append",
        configuration=properties if not source.exists() else None,
    )


def rows_of(day, n_rows=N):
    """Return the rows of a day: every day has the same private values."""
    return pa.table(
        {
            "day": np.full(n_rows, day),
            "user": np.arange(n_rows),
            "r": np.random.default_rng(1).integers(1, 6, n_rows),
        }
    )


def job(folder, source, reference=KNOWN, **changed):
    given = {
        "privacy__epsilon": 1.0,
        "mechanism__reference": reference,
        "schema": SCHEMA,
        "growing": True,
        **changed,
    }
    return write_job(folder, source, folder / "out", **given)


def at(url):
    return {"url": url, "dataset": "people"}


def spent(url):
    return open_ledger(url).read_balance("people").epsilon_spent


def kinds(url):
    return charged_kinds(url, "people")


def kept(output):
    return output.parent / f".{output.name}.dpdask-series"


def manifests(output):
    """Return the manifests of a series, in order."""
    folder = output if isinstance(output, Folder) else Folder(f"file://{output}")
    job, target = KeptFolder(folder, None).read_job() or ("", Target())
    publication = target.open(folder, job)
    found = [publication.find(name_release(job, number)) for number in range(publication.count())]
    return [manifest for manifest in found if manifest is not None]


def read_log(out):
    """Return the files that each entry of a Delta log adds."""
    entries = [
        path.read_text().splitlines() for path in sorted((out / "_delta_log").glob("*.json"))
    ]
    return [
        {action["add"]["path"] for action in map(json.loads, lines) if "add" in action}
        for lines in entries
    ]


def list_digests(found):
    """Return the digests of each release: of its card and of its shards."""
    return [[each.card_sha256, *(shard.sha256 for shard in each.shards)] for each in found]


def released(output):
    """Return the table as any reader of Parquet folders sees it."""
    return (
        ds.dataset(output, format="parquet", exclude_invalid_files=False)
        .to_table()
        .sort_by([("day", "ascending"), ("user", "ascending")])
    )


def grow(made, source, days):
    outcomes = []
    for day in days:
        add_day(source, day)
        outcomes.append(run_here(made))
    return outcomes
