"""The plan of a job: what a run would do and promise, from file names and footers alone."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from dpdask.engine.work import table_work
from dpdask.io.fragments import discover
from dpdask.io.storage import Folder
from dpdask.jobs import charging
from dpdask.jobs.spec import Job
from dpdask.privacy import guarantee_text
from dpdask.references import Histogram, Holdout, Known, Public


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a run would do.

    Attributes
    ----------
    name
        The job's name.
    n_fragments, n_rows, n_bytes
        Of the input; the rows are None where files have no footers (CSV).
    stages
        In order, in words.
    epsilons
        What each privatised column of one row may cost.
    reference_epsilons
        What each column's noisy histogram costs, if the reference is one.
    ledger
        The dataset's ε spent before and after the run, its limit, and whether the run fits; None without a ledger.
    kept, dropped
        The other columns.
    guarantee
        Who is protected by what, and who is not.
    released_rows
        About how many rows come out; None where no footer tells, or units are bounded.
    n_shards
        At most how many shards, or None.
    output
        Where.
    insecure
        Whether the noise comes from a seed.
    """

    name: str
    n_fragments: int
    n_rows: int | None
    n_bytes: int
    stages: tuple[str, ...]
    epsilons: dict[str, float]
    reference_epsilons: dict[str, float]
    ledger: dict[str, Any] | None
    kept: tuple[str, ...]
    dropped: tuple[str, ...]
    guarantee: str
    released_rows: int | None
    n_shards: int | None
    output: str
    insecure: bool

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain values."""
        return asdict(self)


def plan_job(job: Job) -> Plan:
    """Return the plan of a job; it reads footers, never rows.

    Raises
    ------
    InputError, DataError
        If the input cannot be found, or its columns are not those declared.
    """
    table = discover(job.input_url, job.schema)
    fraction = job.fraction
    # checks the columns' types against their domains
    table_work(table.schema, job.schema, job.reference, Folder(job.output_url), job.file.privacy.unit_column)
    bounded = job.file.privacy.unit_column is not None  # then how many rows the units have decides, and no footer tells
    released = None if table.n_rows is None or bounded else round(table.n_rows * (1 - (fraction or 0.0)))
    return Plan(
        name=job.file.name,
        n_fragments=len(table.fragments),
        n_rows=table.n_rows,
        n_bytes=table.n_bytes,
        stages=_stages(job, table.n_rows is None),
        epsilons=dict(job.spending.row),
        reference_epsilons=dict(job.spending.reference),
        ledger=_ledger(job),
        kept=job.schema.kept,
        dropped=tuple(name for name, column in job.schema.columns.items() if column.role == "drop"),
        guarantee=guarantee_text(job.file.privacy, job.reference.protected, job.reference.unprotected),
        released_rows=released,
        n_shards=None
        if table.n_rows is None
        else _most_shards(table.n_rows, None if bounded else fraction, len(table.fragments), job.file.output.rows_per_shard),
        output=job.output_url,
        insecure=job.file.insecure_seed is not None,
    )


def _most_shards(n_rows: int, fraction: float | None, n_fragments: int, per_shard: int) -> int:
    """Return how many shards `lay_out` makes at most; with a hold-out, but for a chance of exp(-40) (Hoeffding).

    Two neighbouring tasks hold more than a shard together, or read more than four shards' rows, so there are fewer than
    twice as many tasks as that fills; cutting the large ones adds at most one shard for each full one.
    """
    most = n_rows if fraction is None else min(n_rows, math.ceil(n_rows * (1 - fraction) + math.sqrt(20 * n_rows)))
    return min(n_fragments, 2 * -(-most // per_shard) + 2 * -(-n_rows // (4 * per_shard))) + most // per_shard


def _ledger(job: Job) -> dict[str, Any] | None:
    found = charging.balances(job)
    if found is None:
        return None
    before, after = found
    fits = after.epsilon_spent <= after.epsilon_limit and after.delta_spent <= after.delta_limit
    return {"limit": before.epsilon_limit, "before": before.epsilon_spent, "after": after.epsilon_spent, "runs": before.n_runs, "fits": fits}


def _stages(job: Job, uncounted: bool) -> tuple[str, ...]:
    columns = ", ".join(job.schema.privatised)
    stages = []
    unit = job.file.privacy.unit_column
    if unit is not None:
        stages.append(f"units: read {unit.column} and the kept columns; choose at most {unit.max_rows} rows of each {unit.column}, by a keyed hash")
    if isinstance(job.reference, Holdout):
        stages.append(f"survey: read {columns}; choose the hold-out; its distribution, merged in a tree")
    elif isinstance(job.reference, Histogram):
        stages.append(f"survey: read {columns}; count all rows in public cells")
    elif uncounted:
        stages.append(f"survey: read {columns}; count the rows")
    if isinstance(job.reference, Public):
        stages.append(f"reference: read {columns} of the public table; its distribution, merged in a tree")
    source = "the declared reference" if isinstance(job.reference, Known) else "the reference"
    stages.append(f"fit: {source} and each column's channel, on the driver, written once")
    stages.append("write: randomise each fragment and stage its shards")
    stages.append("commit: all shards appear at once, with manifest and release card; the run key is destroyed")
    return tuple(stages)
