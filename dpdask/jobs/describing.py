"""What a job publishes beside the shards: the release card, a page for people, and metadata for catalogues of data sets."""

from __future__ import annotations

from typing import Any

from dpdask.io.manifest import CROISSANT_NAME, PAGE_NAME, Manifest
from dpdask.io.storage import Folder
from dpdask.jobs.growing import GrowingState
from dpdask.jobs.spec import Job
from dpdask.jobs.state import Progressed, RunState
from dpdask.jobs.tables import JobTable
from dpdask.mechanisms.card import Card, make_card
from dpdask.mechanisms.card_parts import EarlierRelease, LedgerPosition, ReleaseName
from dpdask.page import make_croissant, make_page
from dpdask.privacy.ledger_entries import Position

_MOST_EARLIER = 20


def make_job_card(job: Job, state: RunState, opened: JobTable, reached: Progressed, release: Any) -> Card:
    """Return the release card of a run: the same run, the same card.

    Parameters
    ----------
    job, state, opened
        The job, its state and its input.
    reached
        What the run has reached.
    release
        What was fitted.

    Privacy
    -------
    A card of noise from a seed has no name, time or place in a ledger: the same job gives the same bytes.
    """
    fitted, order = reached.fitted, job.file.output.order
    insecure = job.file.insecure_seed is not None
    section = opened.mechanism.section(release, opened.work.columns, n_rows=opened.public_rows, n_released=sum(fitted.n_released), order=order)
    card = opened.tell_version(make_card(section, name=job.file.name, insecure=insecure))
    if isinstance(state, GrowingState):
        card = state.describe(job, card)
    changes: dict[str, Any] = {"dropped": [name for name, column in job.schema.columns.items() if column.role == "drop"]}
    if job.file.about is not None:
        changes["about"] = job.file.about
    if not insecure:
        changes["release"] = ReleaseName(id=reached.run_id, time=reached.began)
        position = job.account.find_position(reached.run_id)
        if position is not None and job.ledger is not None:
            changes["ledger"] = _tell_position(job.ledger.dataset, position)
    return card.model_copy(update=changes).with_dataset(job.account.coverage_until(reached.run_id))


def _tell_position(dataset: str, position: Position) -> LedgerPosition:
    earlier = [
        EarlierRelease(id=entry.run_id.partition(" ")[0], epsilon=entry.charge.epsilon, delta=entry.charge.delta) for entry in position.earlier
    ]
    return LedgerPosition(
        dataset=dataset,
        entry=position.entry.digest,
        epsilon=position.epsilon if position.epsilon < float("inf") else None,
        delta=position.delta,
        epsilon_limit=position.epsilon_limit,
        delta_limit=position.delta_limit,
        n_earlier=len(earlier),
        earlier=earlier[-_MOST_EARLIER:],
    )


def write_documents(card: Card, manifest: Manifest, shards: Folder) -> tuple[dict[str, bytes], tuple[str, ...]]:
    """Return the documents of a release beside its card by their names in the output, and warnings about what could not be made.

    Parameters
    ----------
    card
        The release card.
    manifest
        The list of the shards.
    shards
        The folder where the shards are staged.

    Privacy
    -------
    The documents are functions of what is published: the card and the released rows. They cost no ε. The budget is spent by now, so
    no failure to make them may fail the release.
    """
    page, faults = make_page(card, manifest, shards)
    croissant, further = make_croissant(card, manifest, shards)
    return {PAGE_NAME: page, CROISSANT_NAME: croissant}, (*faults, *further)
