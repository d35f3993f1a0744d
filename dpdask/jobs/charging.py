"""Charge a job to its dataset's ledger: check the budget before a row is read, and charge before any noise is drawn."""

from __future__ import annotations

from dataclasses import replace
from hashlib import blake2b
from typing import TYPE_CHECKING

from dpdask.errors import SpecError
from dpdask.privacy.accountant import compose
from dpdask.privacy.coverage import Coverage
from dpdask.privacy.events import Composed, Event, to_dict
from dpdask.privacy.ledger_entries import FREE, Balance, Charge, Entry

if TYPE_CHECKING:  # to open a ledger takes no mechanism
    from dpdask.io.fragments import InputTable
    from dpdask.jobs.spec import Job
    from dpdask.privacy.ledger import Ledger

_PERSON = b"dpdask hold-out"


def charge_of(job: Job, sample: str = "") -> Charge:
    """Return what a job costs its dataset: its ε and δ, the events that the accountant composes, and the rows that they do not cover.

    Parameters
    ----------
    job
        The job.
    sample
        The name of the draw of its hold-out.

    Raises
    ------
    SpecError
        If it promises no ε.
    """
    promised = job.file.privacy
    if promised is None:
        raise SpecError("a job without an ε cannot be charged", job.file.name, "remove its ledger")
    unit = "row" if promised.unit_column is None else f"column {promised.unit_column.column}"
    uncovered = tuple(replace(each, sample=sample) for each in job.kind.uncovered)
    event = replace(_composed(job.kind.event), unit=unit, uncovered=uncovered)
    return Charge(epsilon=promised.epsilon, delta=promised.delta, event=to_dict(event))


def _composed(event: Event) -> Composed:
    return event if isinstance(event, Composed) else Composed(events=(event,))


def open_ledger(url: str) -> Ledger:
    """Return a ledger whose charges are composed by the accountant.

    Raises
    ------
    SpecError
        If the URL is no database's.
    """
    from dpdask.privacy.ledger import Ledger  # SQLAlchemy, for those who have a ledger

    return Ledger(url, compose=compose)


def check_room(job: Job, run_id: str | None) -> None:
    """Check, before a row is read, that the budget allows the job, or that its unfinished run is already charged.

    Raises
    ------
    BudgetError
        If the dataset's budget does not allow it; nothing is written.
    SpecError, TemporaryError
        If there is no such dataset, or the ledger cannot be reached.
    """
    if job.ledger is not None:
        open_ledger(job.ledger.url).check_room(job.ledger.dataset, charge_of(job), run_id)


def holdout_of(job: Job, table: InputTable) -> tuple[bytes, str] | None:
    """Return the key and the name of the dataset's hold-out, if the job has a ledger and holds rows out."""
    if job.ledger is None or not job.kind.uncovered:
        return None
    key = open_ledger(job.ledger.url).holdout_key(job.ledger.dataset)
    assert key is not None
    return key, sample_of(job, table, key)


def sample_of(job: Job, table: InputTable, key: bytes) -> str:
    """Return the name of the hold-out that a key chooses. Runs that hold out the same rows, or nested subsets, get the same name.

    It is a function of the key, and of the unit and its type or the positions of the rows, as the choice itself is.
    """
    promised = job.file.privacy
    unit = promised.unit_column if promised is not None else None
    place = "\n".join(fragment.id for fragment in table.fragments)
    if unit is not None:
        import pyarrow as pa  # here, for those who only open a ledger

        type_ = table.schema.field(unit.column).type  # units are hashed as values of their type
        place = f"unit {unit.column} {type_.value_type if pa.types.is_dictionary(type_) else type_}"
    return blake2b(place.encode(), key=key, person=_PERSON, digest_size=16).hexdigest()


def intend(job: Job, run_id: str, sample: str) -> Entry | None:
    """Charge a run, if the job has a ledger, and return its entry; a run that is already charged is not charged again.

    Parameters
    ----------
    job
        The job.
    run_id, sample
        The names of the run and of its hold-out.

    Raises
    ------
    BudgetError
        If the dataset's budget does not allow it; nothing is written.
    SpecError, TemporaryError
        If there is no such dataset, or the ledger cannot be reached.
    """
    if job.ledger is None:
        return None
    return open_ledger(job.ledger.url).intend(job.ledger.dataset, run_id, charge_of(job, sample))


def draw(job: Job, run_id: str, release_sha256: str) -> None:
    """Record that a charged run drew its noise, with the digest of its fitted release, before anything of it is released.

    Raises
    ------
    SpecError
        If the run drew other noise before.
    """
    if job.ledger is not None:
        open_ledger(job.ledger.url).draw(job.ledger.dataset, run_id, release_sha256)


def was_refused(job: Job, run_id: str) -> bool:
    """Return whether a run's newest entry is its refusal: then what is left of it is of no use."""
    return _newest_kind(job, run_id) == "refuse"


def _newest_kind(job: Job, run_id: str) -> str | None:
    """Return the kind of a run's newest entry, or None if it has none."""
    if job.ledger is None:
        return None
    entries = open_ledger(job.ledger.url).show(job.ledger.dataset).entries
    return next((entry.kind for entry in reversed(entries) if entry.run_id == run_id), None)


def commit(job: Job, run_id: str, release_sha256: str) -> None:
    """Record that a charged run was released, with the digest of its fitted release. It is idempotent."""
    if job.ledger is not None:
        open_ledger(job.ledger.url).commit(job.ledger.dataset, run_id, release_sha256)


def void(job: Job, run_id: str) -> None:
    """Take back the charge of a run whose noise nobody can have seen, if it was charged."""
    if job.ledger is not None and _newest_kind(job, run_id) == "intend":
        open_ledger(job.ledger.url).void(job.ledger.dataset, run_id)


def refuse(job: Job, run_id: str, sample: str, *, drawn: bool) -> None:
    """Record that a run read rows and refused them; it is charged if noise was `drawn` or if the dataset is strict."""
    if job.ledger is not None:
        ledger = open_ledger(job.ledger.url)
        charged = drawn or ledger.is_strict(job.ledger.dataset)
        ledger.refuse(job.ledger.dataset, run_id, charge_of(job, sample) if charged else FREE)


def is_strict(job: Job) -> bool:
    """Return whether the job's dataset charges refusals that read rows."""
    return job.ledger is not None and open_ledger(job.ledger.url).is_strict(job.ledger.dataset)


def coverage_until(job: Job, run_id: str) -> Coverage:
    """Return the rows that a charged run and the dataset's earlier runs together leave without ε; none without a ledger."""
    return Coverage() if job.ledger is None else open_ledger(job.ledger.url).coverage_until(job.ledger.dataset, run_id)


def balances(job: Job, table: InputTable) -> tuple[Balance, Balance] | None:
    """Return a dataset's balance before and after the job, or None without a ledger.

    Raises
    ------
    SpecError, TemporaryError
        As `intend`.
    """
    if job.ledger is None:
        return None
    ledger = open_ledger(job.ledger.url)
    key = ledger.holdout_key(job.ledger.dataset, draw=False) if job.kind.uncovered else None
    sample = "to be drawn" if key is None else sample_of(job, table, key)
    return ledger.spent(job.ledger.dataset), ledger.spent(job.ledger.dataset, plus=charge_of(job, sample))
