"""The plan of a job: what a run would do and promise, from file names and footers alone."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from dpdask.io.fragments import InputTable, discover
from dpdask.io.storage import Folder
from dpdask.jobs import charging
from dpdask.jobs.ordering import footer_warnings
from dpdask.jobs.spec import Job

_COMMIT = "commit: all shards appear at once, with manifest and release card; the run key is destroyed"


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
        What each privatised column of one released row may cost; empty where no row is.
    reference_epsilons
        What each noisy histogram costs, where there are any.
    ledger
        The dataset's ε spent before and after the run, its limit, whether the run fits, and the share of the rows that have no
        ε in some run, before and after this one; None without a ledger.
    outside
        For each privatised column, how values outside its domain are treated, unless they are refused.
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
    warnings
        What to think of before the run.
    """

    name: str
    n_fragments: int
    n_rows: int | None
    n_bytes: int
    stages: tuple[str, ...]
    epsilons: dict[str, float]
    reference_epsilons: dict[str, float]
    ledger: dict[str, Any] | None
    outside: dict[str, str]
    kept: tuple[str, ...]
    dropped: tuple[str, ...]
    guarantee: str
    released_rows: int | None
    n_shards: int | None
    output: str
    insecure: bool
    warnings: tuple[str, ...]

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
    job.kind.check(table.schema, Folder(job.output_url))
    expected = job.kind.expect(table, job.file.output.rows_per_shard)
    return Plan(
        name=job.file.name,
        n_fragments=len(table.fragments),
        n_rows=table.n_rows,
        n_bytes=table.n_bytes,
        stages=(*expected.stages, _COMMIT),
        epsilons=dict(job.kind.spending.row),
        reference_epsilons=dict(job.kind.spending.reference),
        ledger=_ledger(job, table),
        outside={
            name: column.outside_in_words for name, column in job.schema.columns.items() if column.role == "privatise" and column.outside != "refuse"
        },
        kept=job.schema.kept,
        dropped=tuple(name for name, column in job.schema.columns.items() if column.role == "drop"),
        guarantee=job.kind.guarantee,
        released_rows=expected.n_rows,
        n_shards=expected.n_shards,
        output=job.output_url,
        insecure=job.file.insecure_seed is not None,
        warnings=(*expected.warnings, *(() if charging.is_strict(job) else footer_warnings(job, table))),
    )


def _ledger(job: Job, table: InputTable) -> dict[str, Any] | None:
    found = charging.balances(job, table)
    if found is None:
        return None
    before, after = found
    fits = after.epsilon_spent <= after.epsilon_limit  # at the limit's δ, as the ledger judges: the runs' own δ do not add up where events compose
    return {
        "limit": before.epsilon_limit,
        "before": before.epsilon_spent,
        "after": after.epsilon_spent,
        "runs": before.n_runs,
        "fits": fits,
        "uncovered_before": before.coverage.uncovered,
        "uncovered_after": after.coverage.uncovered,
        "coverage": after.coverage.text,
    }
