"""The next release of a growing table (docs/explanation/design.md, Growing tables)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

from dpdask.engine.compute import Progress
from dpdask.engine.digests import DIGEST
from dpdask.engine.source import FileSource
from dpdask.engine.write import Staging
from dpdask.errors import SPENT_AGAIN, MissingError, OutputError, SpecError, say_count
from dpdask.io.changes import Followed, Lake, Place, ReleasedFile, discover_added
from dpdask.io.fragments import InputTable
from dpdask.io.shards import CARD_NAME, META, Manifest
from dpdask.io.storage import RELEASE_NAME, Folder
from dpdask.jobs.output import name_release, read_number
from dpdask.jobs.repeats import KEYS_PER_FILE, Keys, check_alike, compare_keys, list_keys
from dpdask.jobs.series import (
    Kept,
    KeptFolder,
    Size,
    choose_new,
    describe_release,
    describe_series,
    mark_released,
    name_with,
    select,
    sum_series,
    tell_log,
)
from dpdask.jobs.spec import (
    Job,
    JobTable,
    check_apart,
    discover_public,
    open_table,
    opens_stores,
    raises_in_keys,
)
from dpdask.jobs.state import RunRecord, RunState, finish, name_run, open_job_run
from dpdask.mechanisms.card import Card
from dpdask.privacy.events import Series
from dpdask.privacy.ledger_entries import derive_salt, name_series

SUMMARY_NAME = f"{META}/series.json"


class Next(NamedTuple):
    """The next release of a series, once it has begun."""

    # The job of this release, with its place in the series.
    job: Job
    # The record that it will leave, without its size.
    kept: Kept
    # What it costs a unit.
    epsilon: float | None
    # What the log of a Delta or Iceberg table did since the release before.
    followed: Followed | None
    # Whether it may hold rows that were released before.
    again: bool
    # What it holds.
    table: InputTable

    def make_size(self, n_rows: int, n_shards: int) -> Size:
        """Return what the record keeps of the release."""
        return Size(n_rows=n_rows, n_shards=n_shards, epsilon=self.epsilon, again=self.again)

    def describe(self, card: Card) -> Card:
        """Return the release's card with its place in the series."""
        budget, sizes = self.job.file.privacy, (*self.kept.sizes, self.make_size(0, 0))
        about = describe_release(
            *(sizes, budget, self.followed, self.job.growing), has_holdout=card.has_holdout
        )
        return card.model_copy(update={"series": about})


def find_series(job: Job) -> Job:
    """Return a job under the name of the series that it goes on with; as it is if there is none."""
    output = Folder(job.output_url)
    kept = KeptFolder(output, job.ledger_url)
    name = kept.find_name(job)
    if name is not None:
        return job.name_series(name)
    left = RunState(output, job.ledger_url).peek()
    # a first release that an earlier version has begun
    old = left is not None and left.job == job.text_digest
    return job.name_series(job.text_digest) if old else job


class Growth:
    """The series of a growing table's output: what was released, what is new, what stays."""

    def __init__(self, job: Job) -> None:
        self.job = job = find_series(job)
        self.state = open_job_run(job)
        self.output, self.publication = self.state.output, self.state.publication
        self._newest: tuple[int, Kept] | None = None
        # what the log of a Delta or Iceberg table did since the newest release
        self.followed: Followed | None = None
        # the keys of the next release's rows, and whether some of them were released before
        self._keys: Keys | None = None
        self._repeats = False
        # the output must be this job's
        manifest, left = self.publication.find(name_release(job.digest, 0)), self.state.peek()
        if manifest is None and not self.publication.is_free(name_run(left)):
            what = "this output already exists and was not written by this run"
            raise OutputError(what, self.output.url, SPENT_AGAIN)
        begun = self.state.kept.read_job()
        another = begun is not None and begun[0] != job.digest
        if begun is not None and another:  # it may go on, beside the table
            another = begun[1].open(self.output, begun[0]).count() > 0
        if (manifest is not None and manifest.job != job.digest) or another:
            kept = "a growing table keeps its released columns, privacy and mechanism"
            what = f"this output holds another job's release; {kept}"
            hint = "start a new output: choose another output.path"
            raise OutputError(what, job.file.output.path, hint)

    @property
    def number(self) -> int:
        """The number of the next release."""
        return self.publication.count()

    def read_kept(self) -> Kept | None:
        """Return the record of the newest release; None before the first.

        An `InputError` if it is missing, or its key is elsewhere.
        """
        number = self.number
        if number == 0:
            return None
        if self._newest is None or self._newest[0] != number:
            manifest = self.read_manifest(number - 1)
            self._newest = number, self.state.kept.read(manifest, number - 1)
        return self._newest[1]

    def read_manifest(self, number: int) -> bytes:
        """Return the manifest of a release that is committed."""
        manifest = self.publication.find(name_release(self.job.digest, number))
        assert manifest is not None
        return manifest.to_bytes()

    def is_changed(self) -> bool:
        """Return whether the record of the newest release is another one than that which was read, as after a rebase."""
        known, self._newest = self._newest, None
        return known is not None and (known[0], known[1]) != (self.number, self.read_kept())

    def find_fitted(self) -> bytes | None:
        """Return the fitted release of the series; None before the first release."""
        kept = self.read_kept()
        return None if kept is None else self.state.kept.load_release(kept)

    def open_next(self, unfinished: RunRecord | None) -> JobTable:
        """Return what the next release holds; a table without fragments if nothing is new.

        An unfinished release goes on with the files that it began with. An `InputError` if what was
        released was changed, or a file of the unfinished release.
        """
        job, kept = self.job, self.read_kept()
        continued = job if kept is None else job.extend(None)
        return open_table(continued, self.state.folder, lambda: self._find(kept, unfinished))

    def _find(self, kept: Kept | None, unfinished: RunRecord | None) -> InputTable:
        """Return what the next release holds."""
        job, lake = self.job, self.job.file.input.lake
        until = None if unfinished is None else unfinished.input_version
        if lake is not None and kept is not None:
            table = self._follow(kept, lake, until)
        else:
            table = job.discover(None if lake is None else lake.at(until))
            if kept is not None and unfinished is None:
                return choose_new(table, kept)
            table = table if kept is None else mark_released(table, kept)
        return table if unfinished is None else select(table, unfinished.fragments, until)

    def _follow(self, kept: Kept, lake: Lake, until: int | None) -> InputTable:
        """Return the rows that a table's log has added since the newest release."""
        job, place = self.job, kept.place or self.read_place()
        released = {file.url: ReleasedFile(file.version, file.n_rows) for file in kept.files}
        n_deleting, n_ignored = kept.n_deleting, kept.n_ignored
        while True:
            table, followed = discover_added(
                job.input_url, job.schema, lake, place, job.growing.changed, released, until
            )
            n_deleting, n_ignored = n_deleting + followed.n_deleting, n_ignored + followed.n_ignored
            if table.fragments or not followed.more:
                break
            place = Place(table.table, followed.until)
        self.followed = replace(
            followed, n_deleting=n_deleting, n_ignored=n_ignored, declared=kept.declared
        )
        if not n_ignored:
            return table
        commits = say_count(n_ignored, "commit")
        what = f"the rows of {commits} that changed rows of the table are not released (`growing.changed: ignore`)"
        return replace(table, left_out=(*table.left_out, what))

    def read_place(self) -> Place:
        """Return up to where a series was released whose record does not tell: as the newest card does."""
        release = name_release(self.job.digest, self.number - 1)
        card = Card.read(self.publication.read_card(release), CARD_NAME)
        return Place("", None if card.input is None else card.input.version)

    @property
    def again(self) -> bool:
        """Whether the next release may hold rows that were released before; it is charged in full then."""
        changed = self.followed is not None and self.followed.again
        later = self.read_kept() is not None
        return later and (changed or self._repeats or self.job.growing.charge_repeats)

    def compare(self, opened: JobTable, progress: Progress | None) -> JobTable:
        """Return what the next release holds, by the rules for rows that come again."""
        kept, rules, table = self.read_kept(), self.job.growing, opened.table
        if kept is None or rules.row_key is None:
            return opened
        changed = self.followed is not None and self.followed.again
        compared = compare_keys(
            *(table, rules, bytes.fromhex(kept.salt), self.state.kept.read_keys(kept)),
            is_changed=changed,
            progress=progress,
        )
        self._keys, self._repeats = compared.keys, compared.again
        rows = None if opened.public_rows is None else compared.table.n_rows
        source = FileSource(compared.table.fragments, opened.source.where)
        return replace(opened, table=compared.table, source=source, public_rows=rows)

    def is_behind(self) -> bool:
        """Return whether the table's log was followed further than the record of the series tells."""
        kept, followed = self.read_kept(), self.followed
        if kept is None or followed is None:
            return False
        return kept.place is None or kept.place.version != followed.until

    def advance(self, table: InputTable) -> None:
        """Keep up to where the table's log was followed if nothing is new; it may be cleaned up to there afterwards.

        The caller holds the lock.
        """
        kept, followed = self.read_kept(), self.followed
        if kept is not None and followed is not None and self.is_behind():
            manifest = self.read_manifest(self.number - 1)
            self.state.kept.write(kept.advance(table, followed), manifest)

    def check_alike(self, opened: JobTable, progress: Progress | None) -> None:
        """Check that no new file is one of the public table, or holds the rows of a released one, unless a key tells that, or they are paid for."""
        public, versions = (
            self.job.mechanism.public_table,
            {e.version for e in opened.table.fragments},
        )
        if public is not None:
            with suppress(MissingError):  # the first release read it, and it may be gone
                check_apart(discover_public(public, self.job.schema), versions)
        if self.job.growing.row_key is None and not self.again:
            check_alike(opened.table, opened.work.released.names, progress)

    def extend(self, table: InputTable) -> Job:
        """Return the job of the release of a table; before the first release, the job itself."""
        kept = self.read_kept()
        if kept is None:
            return self.job
        # without a digest of what was released before, the ledger charges it in full
        previous, head = "" if self.again else kept.head, kept.add(table).head
        series = Series(id=kept.id, release=kept.release, previous=previous, head=head)
        return self.job.extend(series)

    def prepare(self, reached: RunRecord, table: InputTable) -> Next:
        """Return the release of a run that has begun."""
        kept = self.read_kept()
        if kept is not None:
            job, kept = self.extend(table), kept.add(table)
        else:
            key = self.state.keys.read(reached.run_id)
            assert key is not None
            name, salt = name_series(self.job.digest, reached.run_id), derive_salt(key).hex()
            kept = Kept(id=name, salt=salt, release="", files=(), sizes=()).add(table)
            job = self.job.extend(Series(id=name, head=kept.head), continued=False)
        return Next(
            job=job,
            kept=kept,
            epsilon=job.epsilon,
            followed=self.followed,
            again=self.again,
            table=table,
        )

    def publish(
        self,
        following: Next,
        reached: RunRecord,
        staging: Staging,
        manifest: Manifest,
        documents: Mapping[str, bytes],
    ) -> None:
        """Keep the record that a release leaves, and make it appear; see `RunState.publish`."""
        state, size = self.state, following.make_size(manifest.n_rows, len(manifest.shards))
        if read_number(reached.release) == 0:
            key = state.keys.read(reached.run_id)
            assert key is not None
            fitted = state.secrets(reached.run_id).read(RELEASE_NAME)
            state.kept.begin(key, following.kept.id, fitted, self.job)
            self.output.remove(SUMMARY_NAME)  # of a series that somebody gave up, in a table
        if self.job.growing.row_key is not None:
            number = len(following.kept.sizes)
            size = replace(size, keys=name_with(number, manifest.to_bytes()))
            # of units, rows are left out, and how many tells something about them
            budget = self.job.mechanism.budget
            bounded = budget is not None and budget.unit_column is not None
            n_bytes = KEYS_PER_FILE * DIGEST.itemsize if bounded else 0
            for keys in self._list_keys(following):
                state.kept.write_keys(size, size.n_key_files, keys, n_bytes)
                size = replace(size, n_key_files=size.n_key_files + 1)
        kept = replace(
            following.kept,
            release=reached.fitted.release_sha256,
            sizes=(*following.kept.sizes, size),
        )
        state.kept.write(kept, manifest.to_bytes())
        state.publish(reached, staging, manifest, documents)

    def _list_keys(self, following: Next) -> Iterator[Keys]:
        """Yield the keys of the released rows, for a file each."""
        if self._keys is None:
            salt = bytes.fromhex(following.kept.salt)
            yield from list_keys(following.table, self.job.growing, salt)
            return
        for start in range(0, len(self._keys), KEYS_PER_FILE):
            yield self._keys[start : start + KEYS_PER_FILE]

    def finish(self) -> None:
        """Write what an interrupted publication left out: the last file, and the summary's card."""
        number, told = self.number, None
        if self.output.exists(SUMMARY_NAME):
            with suppress(ValueError, KeyError, TypeError):
                summary = json.loads(self.output.read(SUMMARY_NAME, replaced=True))
                told = int(summary["series"]["releases"])
        if not number or told == number:
            return
        manifest = self.read_manifest(number - 1)
        kept = self.state.kept.read(manifest, number - 1)
        release = name_release(self.job.digest, 0)
        first = Card.read(self.publication.read_card(release), CARD_NAME)
        self.publication.finish()
        self.state.kept.tell_promise(self.job.promise)
        about = {"series": describe_series(kept.sizes, first)}
        self.output.write(SUMMARY_NAME, first.model_copy(update=about).to_bytes())
        self.state.kept.sweep(manifest, number - 1)

    def tidy(self) -> None:
        """Finish a release that was published, and remove the rest of a run that was removed.

        The caller holds the lock.
        """
        reached, left = self.state.read(), self.state.read_unfinished()
        committed = self.state.is_committed()
        if left is not None and committed and left.job == self.job.digest:
            self.finish()
            finish(self.job, self.state)
        elif reached is None and (left is None or not committed):
            self.state.remove()

    def describe_plan(self, opened: JobTable) -> dict[str, Any]:
        """Return what a plan says of the series, and of the release of a table."""
        kept, epsilon, followed = self.read_kept(), self.extend(opened.table).epsilon, self.followed
        sizes = () if kept is None else kept.sizes
        unit = "row" if self.job.file.privacy is None else self.job.file.privacy.unit
        following = Size(n_rows=0, n_shards=0, epsilon=epsilon, again=self.again)
        return {
            "releases": len(sizes),
            "released_rows": sum(size.n_rows for size in sizes),
            "released_files": 0 if kept is None else len(kept.files),
            "new_files": len({fragment.url for fragment in opened.table.fragments}),
            "new_rows": opened.table.n_rows,
            "epsilon": epsilon,
            "series_epsilon": sum_series((*sizes, following), unit),
            "again": self.again,
            **({} if followed is None else tell_log(followed)),
        }


@raises_in_keys
@opens_stores
def rebase_job(job: Job, version: int) -> None:
    """Declare that all rows up to a version of a growing table are released; nothing is charged.

    A `SpecError` if the job has no series of a Delta or Iceberg table, or the version came before
    what was released; an `OutputError` if a release is unfinished.
    """
    lake = job.file.input.lake
    if not job.file.growing or lake is None:
        what = "only a growing job on a Delta or Iceberg table follows versions"
        raise SpecError(what, job.file.name, "name such a job")
    growth = Growth(job)
    state = growth.state
    with state.records.lock():
        growth.tidy()
        if state.read_unfinished() is not None:
            hint = "run the job again, or `dpdask abort` it, and rebase then"
            raise OutputError("a release is unfinished here", job.file.output.path, hint)
        kept = growth.read_kept()
        try:
            if kept is None:
                what = "nothing was released here, so there is no series to go on with"
                raise SpecError(what, job.file.output.path, "run the job")
            found = lake.at(version).list_files(job.input_url, job.schema)
            place, before = Place(found.table, version), kept.place or growth.read_place()
            # also of a table that the series had left for another one
            reached = next((each for each in kept.left if each.table == place.table), before)
            if place.table == reached.table and lake.precedes(
                job.input_url, version, reached.version
            ):
                what = f"the table was released up to version {reached.version}, which is a later one: its rows would be released twice"
                raise SpecError(what, "--at", "name a later version")
            if place != before:
                manifest = growth.read_manifest(growth.number - 1)
                state.kept.write(kept.declare(place, before), manifest)
        finally:
            state.remove_rest()
