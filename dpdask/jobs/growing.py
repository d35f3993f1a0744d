"""The state of a growing table's output, and the run of its next release (docs/explanation/design.md, Growing tables)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

from dpdask.engine.work import RELEASE_NAME
from dpdask.errors import SPENT_AGAIN, MissingError, OutputError
from dpdask.io.fragments import InputTable
from dpdask.io.shards import CARD_NAME, CROISSANT_NAME, META, PAGE_NAME, Manifest
from dpdask.io.storage import Folder
from dpdask.jobs.growing_table import GrowingPublication, name_release, open_growing, read_number
from dpdask.jobs.output import Target
from dpdask.jobs.records import busy
from dpdask.jobs.run_keys import Name
from dpdask.jobs.series import (
    Kept,
    KeptFolder,
    Size,
    choose_new,
    describe_release,
    describe_series,
    select,
    sum_series,
)
from dpdask.jobs.spec import Job
from dpdask.jobs.state import Progressed, RunState, finish
from dpdask.jobs.tables import JobTable, check_apart, discover_public, open_table
from dpdask.mechanisms.card import Card, EarlierRelease, LedgerPosition, ReleaseName, make_card
from dpdask.page import make_croissant, make_page
from dpdask.privacy.events import Series, derive_salt, name_series
from dpdask.privacy.ledger_entries import Position

SUMMARY_NAME = f"{META}/series.json"

Ended = TypeVar("Ended")


class GrowingState(RunState):
    """The hidden folder of a growing output's unfinished run, and what the series keeps."""

    def __init__(self, output: Folder, ledger_url: str | None, target: Target, job: str) -> None:
        super().__init__(output, ledger_url, target)
        self.publication: GrowingPublication = open_growing(target, output, job)
        self.kept = KeptFolder(output, ledger_url)
        self._job = job
        self._newest: tuple[int, Kept] | None = None
        self._next: Kept | None = None
        self._epsilon: float | None = None

    @property
    def number(self) -> int:
        """The number of the next release: how many there are."""
        return self.publication.count()

    def check_output(self, job: Job) -> None:
        """Check that the output is this job's."""
        manifest, found = (
            self.publication.find(name_release(job.digest, 0)),
            self._read_unfinished(),
        )
        if manifest is None and not self.publication.is_free(
            None if found is None else found.run_id
        ):
            raise OutputError(
                "this output already exists and was not written by this run",
                self.output.url,
                SPENT_AGAIN,
            )
        if (
            manifest is not None and manifest.job != job.digest
        ) or self._holds_series_of_another_job():
            what = "this output holds another job's release; a growing table keeps its input, schema, privacy and mechanism"
            raise OutputError(
                what, job.file.output.path, "start a new output: choose another output.path"
            )

    def _holds_series_of_another_job(self) -> bool:
        """Return whether what is kept beside a table belongs to a series of another job, which may go on."""
        begun = self.kept.read_job()
        return (
            begun is not None
            and begun[0] != self._job
            and open_growing(begun[1], self.output, begun[0]).count() > 0
        )

    def _read_manifest(self, number: int) -> Manifest:
        """Return the manifest of a release that is committed."""
        manifest = self.publication.find(name_release(self._job, number))
        assert manifest is not None
        return manifest

    def read_kept(self) -> Kept | None:
        """Return the record of the newest release; None before the first."""
        number = self.number
        if number == 0:
            return None
        if self._newest is None or self._newest[0] != number:
            self._newest = (
                number,
                self.kept.read(self._read_manifest(number - 1).to_bytes(), number - 1),
            )
        return self._newest[1]

    def find_fitted(self) -> bytes | None:
        """Return the fitted release of the series; None before the first release."""
        kept = self.read_kept()
        return None if kept is None else self.kept.load_release(kept)

    def choose(self, table: InputTable, unfinished: Progressed | None) -> InputTable:
        """Return the part of the table that the next release holds.

        Parameters
        ----------
        unfinished
            The unfinished release, if any: it goes on with the files that it began with.
        """
        kept, chosen = self.read_kept(), table
        if unfinished is not None:
            chosen = select(table, unfinished.fragments, unfinished.input_version)
        elif kept is not None:
            chosen = choose_new(table, kept)
        urls = {file.url for file in kept.files} if kept is not None else set()
        return replace(
            chosen, released=tuple(fragment for fragment in table.fragments if fragment.url in urls)
        )

    def extend(self, job: Job, table: InputTable) -> Job:
        """Return the job of the next release; before the first release, the job itself."""
        kept = self.read_kept()
        if kept is None:
            return job
        return job.extend(
            Series(
                id=kept.id,
                release=kept.release,
                previous=kept.head,
                head=kept.add(table.fragments).head,
            )
        )

    def place(self, job: Job, reached: Progressed, table: InputTable) -> Job:
        """Return the job of a release that has begun, with its place in the series; prepare the record that it will leave."""
        kept = self.read_kept()
        if kept is None:
            key = self.keys.read(reached.run_id)
            assert key is not None
            kept = Kept(
                id=name_series(job.digest, reached.run_id),
                salt=derive_salt(key).hex(),
                release="",
                files=(),
                sizes=(),
            )
            job = job.extend(
                Series(id=kept.id, head=kept.add(table.fragments).head), continued=False
            )
        else:
            job = self.extend(job, table)
        self._epsilon, self._next = job.epsilon, kept.add(table.fragments)
        return job

    def describe(self, job: Job, card: Card) -> Card:
        """Return the card of a release with its place in the series."""
        assert self._next is not None
        costs = [*(size.epsilon for size in self._next.sizes), self._epsilon]
        return card.model_copy(
            update={
                "series": describe_release(
                    len(costs) - 1, costs, job.file.privacy, has_holdout=card.has_holdout
                )
            }
        )

    def publish(
        self, reached: Progressed, manifest: Manifest, documents: Mapping[str, bytes]
    ) -> None:
        """Keep the record that the release leaves, and make the release appear; see `RunState.publish`."""
        assert self._next is not None
        size = Size(n_rows=manifest.n_rows, n_shards=len(manifest.shards), epsilon=self._epsilon)
        kept = replace(self._next, release=reached.release_sha256, sizes=(*self._next.sizes, size))
        if read_number(reached.release) == 0:
            key = self.keys.read(reached.run_id)
            assert key is not None
            self.kept.begin(
                key,
                kept.id,
                self.secrets(reached.run_id).read(RELEASE_NAME),
                self._job,
                self._target,
            )
            self.output.remove(SUMMARY_NAME)  # of a series that somebody gave up, in a table
        self.kept.write(kept, manifest.to_bytes())
        super().publish(reached, manifest, documents)
        self.finish()

    def finish(self) -> None:
        """Write what an interrupted publication left out after its commit: what the output wants, and the card that sums up the series."""
        number = self.number
        if not number or self._read_summary() == number:
            return
        manifest = self._read_manifest(number - 1).to_bytes()
        kept = self.kept.read(manifest, number - 1)
        first = Card.read(self.publication.read_card(name_release(self._job, 0)), CARD_NAME)
        self.publication.finish()
        self.output.write(
            SUMMARY_NAME,
            first.model_copy(update={"series": describe_series(kept.sizes, first)}).to_bytes(),
        )
        self.kept.sweep(manifest, number - 1)

    def _read_summary(self) -> int | None:
        """Return how many releases the summary knows; None if there is none."""
        if not self.output.exists(SUMMARY_NAME):
            return None
        with suppress(ValueError, KeyError, TypeError):
            return int(
                json.loads(self.output.read(SUMMARY_NAME, replaced=True))["series"]["releases"]
            )
        return None

    def remove(self, run_id: str | None = None) -> None:
        """Remove the run, and what it has put into the output unless that is released; see `RunState.remove`."""
        if not self.holds_run():
            return  # it is another driver's now
        found = self._read_unfinished()
        if found is not None and run_id in (None, found.run_id):
            self.publication.undo(found.release, found.run_id)
        super().remove(run_id)
        if not self.number:
            self.kept.remove()

    def remove_rest(self) -> None:
        """Remove a hidden folder without a run, and what the removal of a first release left."""
        super().remove_rest()
        if not self.number and self.read_unfinished() is None:
            self.kept.remove()

    def tidy(self, job: Job) -> None:
        """Finish a release that was published, and remove what the removal of a run left; the caller holds the lock."""
        reached = self.read()
        left = self.read_unfinished()
        if left is not None and self.is_committed() and left.job == job.digest:
            self.finish()
            finish(job, self)
        elif reached is None and (left is None or not self.is_committed()):
            self.remove()


def open_next(job: Job, state: GrowingState, unfinished: Progressed | None) -> JobTable:
    """Return what the next release holds, with the mechanism that releases it; a table without fragments if nothing is new."""
    continued = state.number > 0
    versions: set[str] = set()

    def choose(table: InputTable) -> InputTable:
        chosen = state.choose(table, unfinished)
        versions.update(fragment.version for fragment in chosen.fragments)
        return chosen

    opened = open_table(job.extend(None) if continued else job, state.folder, choose)
    if continued and job.mechanism.public_table is not None and versions:
        with suppress(
            MissingError
        ):  # the public table was read by the first release, and may be gone
            check_apart(discover_public(job.mechanism.public_table, job.schema), versions)
    return opened


def run_growing(
    job: Job,
    run_locked: Callable[[Job, GrowingState, JobTable, Name], Ended],
    end: Callable[[InputTable], Ended],
) -> Ended:
    """Finish the unfinished release of a growing table, if there is one, and release the rows that are new.

    Parameters
    ----------
    run_locked
        Runs a release, given its job, the state, the rows, and a function that names it by the run
        key; this driver then has the output for itself.
    """
    state = open_growing_state(job)
    if state.folder.exists():
        with state.lock():
            state.tidy(job)
    number, unfinished = state.number, state.find_unfinished(job.digest)
    opened = open_next(job, state, unfinished)
    if number and not opened.table.fragments:
        return end(opened.table)
    following = state.extend(job, opened.table)
    following.account.check_room(None if unfinished is None else unfinished.run_id)
    opened.check(job, state.publication)
    with state.lock():
        if (number, unfinished) != (state.number, state.find_unfinished(job.digest)):
            raise busy(state.output)
        ended = run_locked(following, state, opened, lambda _: name_release(job.digest, number))
    if unfinished is None:
        return ended
    return run_growing(
        job, run_locked, lambda _: ended
    )  # what came since the unfinished release began


def plan_growing(job: Job) -> tuple[Job, GrowingState, JobTable, dict[str, Any]]:
    """Return the next release of a growing table for its plan: its job, its state, what it holds, and what `Plan.series` says."""
    state = open_growing_state(job)
    opened = open_next(
        job, state, None if state.is_committed() else state.find_unfinished(job.digest)
    )
    kept, following = state.read_kept(), state.extend(job, opened.table)
    sizes = () if kept is None else kept.sizes
    unit = "row" if job.file.privacy is None else job.file.privacy.unit
    told: dict[str, Any] = {
        "releases": len(sizes),
        "released_rows": sum(size.n_rows for size in sizes),
        "released_files": 0 if kept is None else len(kept.files),
        "new_files": len({fragment.url for fragment in opened.table.fragments}),
        "new_rows": opened.table.n_rows,
        "epsilon": following.epsilon,
        "series_epsilon": sum_series([*(size.epsilon for size in sizes), following.epsilon], unit),
    }
    return following, state, opened, told


def open_growing_state(job: Job) -> GrowingState:
    """Return the state of a growing table's output."""
    ledger_url = None if job.ledger is None else job.ledger.url
    state = GrowingState(Folder(job.output_url), ledger_url, job.file.output.target, job.digest)
    state.check_output(job)
    return state


def open_state(output: Folder, ledger_url: str | None = None) -> RunState:
    """Return the state of an output whose job is not known.

    Parameters
    ----------
    ledger_url
        The ledger that its job is charged to, if that is known.
    """
    begun = KeptFolder(output, ledger_url).read_job()
    return (
        RunState(output, ledger_url)
        if begun is None
        else GrowingState(output, ledger_url, begun[1], begun[0])
    )


_MOST_EARLIER = 20


def make_job_card(
    job: Job, state: RunState, opened: JobTable, reached: Progressed, release: Any
) -> Card:
    """Return the release card of a run: the same run, the same card.

    Privacy
    -------
    A card of noise from a seed has no name, time or place in a ledger: the same job gives the same
    bytes.
    """
    fitted, order = reached.fitted, job.file.output.order
    insecure = job.file.insecure_seed is not None
    section = opened.mechanism.description.section(
        release,
        opened.work.columns,
        n_rows=opened.public_rows,
        n_released=sum(fitted.n_released),
        order=order,
    )
    card = opened.tell_version(make_card(section, name=job.file.name, insecure=insecure))
    if isinstance(state, GrowingState):
        card = state.describe(job, card)
    book = job.account.read()
    changes: dict[str, Any] = {
        "dropped": [name for name, column in job.schema.columns.items() if column.role == "drop"]
    }
    if job.file.about is not None:
        changes["about"] = job.file.about
    if not insecure:
        changes["release"] = ReleaseName(id=reached.run_id, time=reached.began)
        position = book.find_position(reached.run_id)
        if position is not None and job.ledger is not None:
            changes["ledger"] = _tell_position(job.ledger.dataset, position)
    return card.model_copy(update=changes).with_dataset(book.coverage_until(reached.run_id))


def _tell_position(dataset: str, position: Position) -> LedgerPosition:
    earlier = [
        EarlierRelease(
            id=entry.run_id.partition(" ")[0],
            epsilon=entry.charge.epsilon,
            delta=entry.charge.delta,
        )
        for entry in position.earlier
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


def write_documents(
    card: Card, manifest: Manifest, shards: Folder
) -> tuple[dict[str, bytes], tuple[str, ...]]:
    """Return the documents of a release beside its card by their names in the output, and warnings about what could not be made.

    Privacy
    -------
    The documents are functions of what is published: the card and the released rows. They cost no
    ε. The budget is spent by now, so no failure to make them may fail the release.
    """
    page, faults = make_page(card, manifest, shards)
    croissant, further = make_croissant(card, manifest, shards)
    return {PAGE_NAME: page, CROISSANT_NAME: croissant}, (*faults, *further)
