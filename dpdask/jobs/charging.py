"""A job's charge on its dataset's ledger: intended before any noise is drawn, committed with the release."""

from __future__ import annotations

from dataclasses import replace

from dpdask.errors import SpecError
from dpdask.jobs.spec import Job
from dpdask.privacy.accountant import compose
from dpdask.privacy.events import Composed, Event, to_dict
from dpdask.privacy.ledger import Balance, Charge, Ledger


def charge_of(job: Job) -> Charge:
    """Return what a job costs its dataset: its ε and δ, and the events by which an accountant prices it.

    Raises
    ------
    SpecError
        If it promises no ε.
    """
    promised = job.file.privacy
    if promised is None:
        raise SpecError("a job without an ε cannot be charged", job.file.name, "remove its ledger")
    unit = "row" if promised.unit_column is None else f"column {promised.unit_column.column}"
    return Charge(epsilon=promised.epsilon, delta=promised.delta, event=to_dict(_of_unit(job.kind.event, unit)))


def _of_unit(event: Event, unit: str) -> Composed:
    return replace(event, unit=unit) if isinstance(event, Composed) else Composed(events=(event,), unit=unit)


def open_ledger(url: str) -> Ledger:
    """Return a ledger whose charges are composed by the accountant.

    Raises
    ------
    SpecError
        If the URL is no database's.
    """
    return Ledger(url, compose=compose)


def intend(job: Job, run_id: str) -> None:
    """Charge a run, if the job has a ledger; a run that is charged already is not charged again.

    Raises
    ------
    BudgetError
        If the dataset's budget does not allow it; nothing is written.
    SpecError, TemporaryError
        If there is no such dataset, or the ledger cannot be reached.
    """
    if job.ledger is not None:
        open_ledger(job.ledger.url).intend(job.ledger.dataset, run_id, charge_of(job))


def commit(job: Job, run_id: str) -> None:
    """Record that a charged run was released; doing it again changes nothing."""
    if job.ledger is not None:
        open_ledger(job.ledger.url).commit(job.ledger.dataset, run_id)


def void(job: Job, run_id: str) -> None:
    """Take back the charge of a run whose noise nobody can have seen, if it was charged."""
    if job.ledger is not None:
        ledger = open_ledger(job.ledger.url)
        if any(entry.run_id == run_id for entry in ledger.show(job.ledger.dataset).entries):
            ledger.void(job.ledger.dataset, run_id)


def balances(job: Job) -> tuple[Balance, Balance] | None:
    """Return a dataset's balance before and after the job, or None without a ledger.

    Raises
    ------
    SpecError, TemporaryError
        As `intend`.
    """
    if job.ledger is None:
        return None
    ledger = open_ledger(job.ledger.url)
    return ledger.spent(job.ledger.dataset), ledger.spent(job.ledger.dataset, plus=charge_of(job))
