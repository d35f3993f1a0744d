"""A run as a resumable state machine: run it again after a crash and it writes the same bytes.

See docs/explanation/design.md, The life of a run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import field, replace
from functools import partial
from typing import Any, Literal, NamedTuple

from dpdask.arrays import freeze_class
from dpdask.connect.spec import check_workers
from dpdask.engine.account import settle
from dpdask.engine.compute import Progress
from dpdask.engine.fit import Fitted, carry_on, fit, read_measured
from dpdask.engine.work import load
from dpdask.engine.write import (
    Staged,
    Staging,
    Task,
    Told,
    lay_out_rows,
    list_person_tasks,
    list_record_tasks,
    write_all,
)
from dpdask.errors import (
    BudgetError,
    DataError,
    DpdaskError,
    InputError,
    OutputError,
    SpecError,
    TemporaryError,
)
from dpdask.io.files import LOG_FOLDERS
from dpdask.io.folders import list_files
from dpdask.io.shards import (
    CARD_NAME,
    CROISSANT_NAME,
    MANIFEST_NAME,
    MEASURED,
    META,
    MODEL,
    PAGE_NAME,
    SUCCESS_NAME,
    TABLE_FOLDER,
    Manifest,
    count_missing,
    list_manifests,
)
from dpdask.io.storage import Folder
from dpdask.jobs.claims import check_known, tell_released
from dpdask.jobs.growing import Growth, Next
from dpdask.jobs.output import name_release
from dpdask.jobs.plan import expect, list_sorted_warnings
from dpdask.jobs.records import busy, is_left_over
from dpdask.jobs.run_keys import Name, ReleaseNames, forget_unused
from dpdask.jobs.spec import Job, JobTable, open_table, opens_stores, raises_in_keys
from dpdask.jobs.state import (
    RunRecord,
    RunState,
    charge,
    finish,
    is_undrawn,
    name_run,
    open_job_run,
    open_output_run,
    record_draw,
    refuse_moved,
)
from dpdask.mechanisms.card import (
    Card,
    EarlierRelease,
    InputVersion,
    LedgerPosition,
    ReleaseName,
    make_card,
)
from dpdask.mechanisms.mechanism import Mechanism
from dpdask.page import make_croissant, make_page
from dpdask.privacy.events import KEY
from dpdask.steps import step

CountRows = Callable[[int | None, int | None], None]
_MOST_EARLIER = 20
_IN_CARD = ("id", "previous", "head")  # of a release's place in a series


@freeze_class
class Outcome:
    """What a run ended with."""

    # `already released` when a finished job is run again; `nothing new` of a growing table.
    status: Literal["released", "already released", "nothing new"]
    output: str
    # The committed shards.
    manifest: Manifest
    # Those of the plan, and those that follow from the rows.
    warnings: tuple[str, ...] = ()
    # For the steward's terminal only: exact, and covered by no ε.
    told: Told = field(default_factory=Told)
    # One line on how good the release is, from the release alone.
    quality: str = ""
    # The mechanism as it was run, which differs among the releases of a growing table.
    mechanism: Mechanism | None = None
    # The run's name in the ledger. This and the three before are empty if nothing was done.
    run_id: str = ""
    # The name by which the output knows the release.
    release: str = ""


@freeze_class
class _Attempt:
    """A job that this driver runs, and whom it tells how far it is."""

    job: Job
    state: RunState
    opened: JobTable
    name: Name
    growth: Growth | None
    progress: Progress | None


@raises_in_keys
@opens_stores
def run_job(
    job: Job, progress: Progress | None = None, *, count_rows: CountRows | None = None
) -> Outcome:
    """Run a job, or go on with it, or find it finished.

    Parameters
    ----------
    job
        The job.
    progress, count_rows
        Called with (stage, done, total); before, with the numbers of rows that are read and written,
        where they are known and public.

    Raises
    ------
    BudgetError
        If the dataset's budget does not allow the job; checked before a row is read, and again before
        noise is drawn.
    SpecError, DataError
        If the job or its data are wrong; nothing is kept, so a corrected job starts afresh. Nothing is
        kept either of a run that failed before its first noise, unless what failed may pass and its
        driver has kept counts of a long pass.
    InputError
        If the input is missing, or changed since the run began; what is staged is kept.
    OutputError
        If the output already exists and was not written by this run.
    TemporaryError
        If something failed that may pass; what is staged is kept.

    Before a row is read or anything is charged, each worker of a cluster is asked what it has and can
    do: see `check_workers`.

    Privacy
    -------
    Row noise is a function of the run key; central noise is saved beside it as soon as it is drawn. So
    a second run repeats the first one's draws and releases nothing new. The key is removed at the
    commit. A refusal after rows were read reveals something exact about them that no ε covers: the
    ledger records it, and charges it if the dataset is strict. Errors and warnings are for the steward
    only.
    """
    if job.file.growing:
        return _run_growing(job, progress, count_rows)
    state = open_job_run(job)
    opened = open_table(job, state.folder) if job.may_repeat else None
    names = job.name_releases("" if opened is None else opened.table.fingerprint)
    finished = _find_finished(job, state, names)
    if finished is not None:
        state.sweep()
        return finished
    if job.may_repeat:  # the table may hold other releases
        check_known(job, state)
    before = state.find_unfinished(job.digest)
    try:
        job.account.check_room(name_run(before))
    except BudgetError:
        finished, now = _find_finished(job, state, names), state.find_unfinished(job.digest)
        if finished is not None:
            return finished  # another driver has just released the job
        if now is None or (before is not None and now.run_id == before.run_id):
            raise
        job.account.check_room(now.run_id)  # another driver has charged the job since
    opened = opened or open_table(job, state.folder)
    opened.check(job, state.publication)
    if before is None:
        state.folder.check_removable()
    with state.records.lock():
        finished = _find_finished(job, state, names)
        if finished is not None:
            state.remove_rest()
            return finished
        attempt = _Attempt(
            job=job, state=state, opened=opened, name=names.make, growth=None, progress=progress
        )
        return _run_locked(attempt, count_rows)


def _run_growing(job: Job, progress: Progress | None, count_rows: CountRows | None) -> Outcome:
    """Finish an unfinished release of a growing table, and release the rows that are new."""
    outcome = None
    while True:
        growth = Growth(job)
        job, state = growth.job, growth.state
        check_known(job, state)
        if state.folder.exists():
            state.folder.check_removable()
            with state.records.lock():
                growth.tidy()
        if growth.number:
            tell_released(job, state, name_release(job.digest, growth.number - 1))
        number, unfinished = growth.number, state.find_unfinished(job.digest)
        opened = growth.open_next(unfinished)
        if number and not opened.table.fragments:
            # a failure is left to the next run
            if unfinished is None and growth.is_behind():
                with suppress(DpdaskError), state.records.lock():
                    if not growth.is_changed() and state.peek() is None:
                        growth.advance(opened.table)
                        state.remove_rest()
            return outcome or _find_nothing(job, opened.table.left_out)
        following = growth.extend(opened.table)
        following.account.check_room(name_run(unfinished))
        opened.check(job, state.publication)
        if unfinished is None:
            state.folder.check_removable()
        release = name_release(job.digest, number)
        attempt = _Attempt(
            job=following,
            state=state,
            opened=opened,
            name=partial(_name_now, release),
            growth=growth,
            progress=progress,
        )
        with state.records.lock():
            now = growth.number, state.find_unfinished(job.digest)
            if (number, unfinished) != now or growth.is_changed():
                raise busy(state.output)
            outcome = _run_locked(attempt, count_rows)
        if unfinished is None and (growth.followed is None or not growth.followed.more):
            return outcome


def _name_now(release: str, _: bytes) -> str:
    return release


def _find_nothing(job: Job, left_out: tuple[str, ...] = ()) -> Outcome:
    """Return the outcome of a growing table without new rows."""
    nothing = Manifest(job=job.digest, shards=(), card_sha256="")
    return Outcome(status="nothing new", output=job.output_url, manifest=nothing, warnings=left_out)


def _find_finished(job: Job, state: RunState, names: ReleaseNames) -> Outcome | None:
    """Return the outcome of a committed run of this job, cleaning up what its driver could not.

    An `OutputError` if the output is something else.
    """
    release = names.find(state.publication)
    manifest = state.find_release(release)
    if manifest is None:
        return None
    check_known(job, state)
    tell_released(job, state, release)
    state.publication.finish()
    left, is_shared = state.peek(), state.publication.is_shared
    # the run of this release left its hidden folder, or there is one without a run
    if left.release == release if left else not is_shared and state.folder.exists():
        # a run of another version, or one whose key is elsewhere: the release stands all the same
        with suppress(InputError, OutputError):
            state.read()
            finish(job, state)
    n_missing = _count_missing(state.output, [manifest])
    missing = f"missing shards: {n_missing} of {len(manifest.shards)}"
    warning = f"{missing}; restore them from a copy: a new run would spend ε again"
    return Outcome(
        status="already released",
        output=job.output_url,
        manifest=manifest,
        warnings=(warning,) if n_missing else (),
        release=release,
    )


def _run_locked(attempt: _Attempt, count_rows: CountRows | None) -> Outcome:
    """Run a job whose output this driver has for itself."""
    job, state, opened = attempt.job, attempt.state, attempt.opened
    expected = expect(job, opened)
    if count_rows is not None:
        of_persons = opened.mechanism.counts_persons  # and then not of rows
        count_rows(None if of_persons else opened.public_rows, expected.n_rows)
    with step("checking the workers"):
        try:
            # no secret lies there yet, and nothing is asked of who owns it
            place = Folder(state.folder.url)
            secrets = place if state.output.is_local else None
            check_workers(opened.table.fragments, output=place, secrets=secrets)
            attempt = _compare(attempt)
            if job.file.output.partition_by is not None and state.read() is None:
                attempt.opened.check_partitions(attempt.job)
        except DpdaskError as error:
            if state.read() is None:
                state.remove()  # no trace of a run that has not begun
                if isinstance(error, DataError) and opened.table.format == "csv":
                    job.account.refuse_unopened(opened.sample_place, opened.hide_sample)
            raise
    job, opened = attempt.job, attempt.opened
    if attempt.growth and job.growing.row_key is not None and not opened.table.fragments:
        attempt.growth.advance(opened.table)
        state.remove_rest()
        return _find_nothing(job)
    try:
        outcome = _advance(attempt)
    except DpdaskError as error:
        if state.records.is_overtaken():  # then files are missing that the other one has removed
            raise busy(state.output) from None
        _fail(job, state, error)
        raise
    return replace(outcome, warnings=tuple(dict.fromkeys((*expected.warnings, *outcome.warnings))))


def _compare(attempt: _Attempt) -> _Attempt:
    """Return an attempt at what is new by the keys of its rows, if the job has such, and check the room for it."""
    growth = attempt.growth
    if growth is None or attempt.job.growing.row_key is None:
        return attempt
    opened = growth.compare(attempt.opened, attempt.progress)
    job = growth.extend(opened.table)
    if opened.table.fragments:
        job.account.check_room(name_run(attempt.state.find_unfinished(job.digest)))
    return replace(attempt, opened=opened, job=job)


def _fail(job: Job, state: RunState, error: DpdaskError) -> None:
    """Keep what a second run can resume from, remove the rest, and update the ledger."""
    if isinstance(error, OutputError) or state.is_committed():
        return  # another run's state; or the release is published, and the ledger's commit is missing
    if not state.records.holds():
        return  # another driver has taken the run over
    drawn = not is_undrawn(job, state)
    settlement = settle(error, drawn=drawn, strict=job.account.is_strict)
    may_pass = isinstance(error, TemporaryError) and settlement == "void"
    if settlement == "keep" or (may_pass and state.has_counts()):
        return
    reached = state.find_unfinished(job.digest)
    if reached is not None and settlement == "refuse":
        job.account.refuse(reached.run_id, reached.sample, drawn=drawn)
    elif reached is not None and settlement == "void":
        job.account.void(reached.run_id)
    state.remove(name_run(reached))


def _advance(attempt: _Attempt) -> Outcome:
    """Begin a run, or go on with the one that is there, and bring it to its end."""
    job, state, opened = attempt.job, attempt.state, attempt.opened
    table, growth = opened.table, attempt.growth
    reached = state.find_resumed(job, table)
    if reached is None:
        is_left = state.peek() is not None
        if is_left and state.is_committed():
            finish(job, state)  # a release that the ledger does not know, of an earlier input
        elif is_left and state.read() is not None:
            state.remove()  # as the driver that refused its rows was about to do
        reached = state.open(
            job.digest,
            attempt.name,
            table.fingerprint,
            job.file.insecure_seed,
            job.account.find_holdout(opened.sample_place, opened.hide_sample),
            fragments=tuple(fragment.id for fragment in table.fragments) if growth else (),
            input_version=table.version if growth else None,
        )
    following = None if growth is None else growth.prepare(reached, table)
    with state.share_key(reached.run_id):
        work = replace(opened.work, secrets=state.secrets(reached.run_id))
        begun = replace(
            attempt,
            job=job if following is None else following.job,
            opened=replace(opened, work=work),
        )
        return _release(begun, reached, following)


def _release(attempt: _Attempt, reached: RunRecord, following: Next | None) -> Outcome:
    """Bring a run from where it is to its end."""
    job, state, opened = attempt.job, attempt.state, attempt.opened
    strict = job.account.is_strict
    if reached.stage == "opened":
        if strict:
            # rows are read from here on, and a refusal costs as much as a release
            charge(job, state, reached)
        # no file may hold the rows of another one, as far as bytes and hashes tell
        opened.check_copies()
        if attempt.growth is not None:
            attempt.growth.check_alike(opened, attempt.progress)
        reached = _fit(attempt, reached)
    else:
        # already charged, unless the job got its ledger, or another one, since then
        charge(job, state, reached)
    record_draw(job, reached)
    fitted, staging = reached.fitted, state.staging(reached.run_id)
    staged = _write(job, opened, fitted, staging, attempt.progress)
    with step("publishing"):
        release = load(opened.work.secrets, fitted.release_sha256, opened.mechanism.release_type)
        beside = _list_beside(job, opened, release)
        card = make_job_card(job, opened, reached, release, beside)
        card = card if following is None else following.describe(card)
        content = card.to_bytes()
        sha256 = hashlib.sha256(content).hexdigest()
        model = (card.sha256 or {}).get(MODEL)
        manifest = Manifest(
            job=job.digest, shards=staged.shards, card_sha256=sha256, model_sha256=model
        )
        described, columns = opened.mechanism.description, opened.work.columns
        quality, doubts = described.quality(release), described.warnings(release, columns)
        if opened.work.unit is not None and opened.mechanism.releases_rows:
            # those of the plan, by the rows that the bound of units has left
            n_rows = sum(fitted.n_released)
            doubts = (*described.cautions(columns, n_rows), *doubts)
        documents, faults = _make_documents(card, manifest, staging.shards, beside)
        job.name_releases(reached.input).keep(reached.release, state.keys.read(reached.run_id))
        if attempt.growth is not None and following is not None:
            attempt.growth.publish(following, reached, staging, manifest, documents)
        else:
            state.publish(reached, staging, manifest, documents)
        left = _end(attempt, reached)
    told = Told()
    if not strict:  # with a strict ledger, nobody is told
        counted = {name: count for name, count in fitted.changed.items() if count}
        told = Told(changed=counted).merge(staged.told)
    sorted_ = list_sorted_warnings(job, told, len(manifest.shards))
    return Outcome(
        status="released",
        output=job.output_url,
        manifest=manifest,
        warnings=(*(() if strict else doubts), *sorted_, *faults, *left),
        told=told,
        quality=quality,
        mechanism=opened.mechanism,
        run_id=reached.run_id,
        release=reached.release,
    )


def _end(attempt: _Attempt, reached: RunRecord) -> list[str]:
    """End a run whose release has appeared, and return warnings of what could not be tidied up.

    Whatever tidying raises, the release stands, so it is no failure. A ledger that does not answer is
    one that may pass: the next run completes its entry.
    """
    job, state, growth = attempt.job, attempt.state, attempt.growth
    left: list[str] = []

    def tidy(act: Callable[[], None], lacking: str) -> None:
        try:
            act()
        except Exception as error:
            why = error.what if isinstance(error, DpdaskError) else type(error).__name__
            left.append(f"the release is published, but {lacking} ({why}); run the job again")

    # the key first, for a ledger that cannot be reached would keep it beside the output
    danger = "its run key is still there, and whoever reads it can undo the noise"
    tidy(partial(state.remove_key, reached.run_id), danger)
    try:
        job.account.commit(reached.run_id, reached.fitted.release_sha256)
    except SpecError:
        check_known(job, state)  # the ledger was restored meanwhile: its error says what to do
        raise
    tidy(partial(state.publication.mark, reached.release), f"{SUCCESS_NAME} is missing")
    if growth is not None:
        tidy(growth.finish, "the summary of the series is missing")
    if not left:  # else the next run finds the record, and does the rest
        tidy(partial(state.remove, reached.run_id), "what it kept in its hidden folder is left")
    return left


def _fit(attempt: _Attempt, reached: RunRecord) -> RunRecord:
    """Bring a run over its barrier: charged before any noise, recorded once its fit is written."""
    job, state, opened, progress = attempt.job, attempt.state, attempt.opened, attempt.progress
    work = opened.work.with_keys()

    def charge_run() -> None:  # from here on the run stays charged, unless nobody saw any of it
        charge(job, state, reached)

    kept = None if attempt.growth is None else attempt.growth.find_fitted()
    if kept is not None:
        fitted = carry_on(opened.source, work, kept, charge_run, progress)
    else:
        fitted, _ = fit(
            opened.mechanism,
            opened.source,
            work,
            charge_run,
            public=opened.public_table(),
            insecure=job.file.insecure_seed is not None,
            progress=progress,
        )
    reached = replace(reached, stage="fitted", fitted=fitted)
    state.write(reached)
    return reached


def _write(
    job: Job, opened: JobTable, fitted: Fitted, staging: Staging, progress: Progress | None
) -> Staged:
    """Stage every shard and return them by name; doing it twice changes nothing."""
    mechanism, output = opened.mechanism, job.file.output
    work, unit = opened.work.with_keys(), opened.work.unit
    if unit is not None:
        work = replace(work, unit=replace(unit, bounds_sha256=fitted.bounds_sha256))
    tasks: Sequence[Task]
    kind: Any = mechanism.release_type
    if mechanism.releases_rows:
        fragments = opened.table.fragments
        written = work.add_weight(mechanism.find_written(work.released))
        if fitted.seals:  # which the pass before left
            pairs = zip(fragments, fitted.seals, strict=True)
            fragments = tuple(replace(fragment, seal=seal) for fragment, seal in pairs)
        most = output.rows_per_shard
        tasks = lay_out_rows(fragments, fitted.n_released, most, written, output.order, work.key())
    elif mechanism.links_tables and mechanism.budget is not None:
        asked = output.rows_per_shard, mechanism.budget.rows_per_unit, kind.block
        tasks = list_person_tasks(fitted.n_released[0], *asked)
    else:
        tasks = list_record_tasks(fitted.n_released[0], output.rows_per_shard)
    return write_all(tasks, work, fitted.release_sha256, kind, staging, progress)


def _list_beside(job: Job, opened: JobTable, release: Any) -> dict[str, bytes]:
    """Return the files of noisy counts and of the model, as far as they are published."""
    measured = read_measured(opened.mechanism, opened.work)
    beside = {MEASURED: measured} if measured else {}
    if job.file.output.model:  # without the secret that salts the run's own file
        beside[MODEL] = release.to_bytes()
    return beside


def _make_documents(
    card: Card, manifest: Manifest, shards: Folder, beside: Mapping[str, bytes]
) -> tuple[dict[str, bytes], tuple[str, ...]]:
    """Return what is published beside the shards, and warnings about what it lacks.

    Page and metadata are functions of what is published. The budget is spent by now, so no failure
    to make them may fail the release.
    """
    page, faults = make_page(card, manifest, shards)
    croissant, further = make_croissant(card, manifest, shards)
    found = {f"{META}/{name}": data for name, data in beside.items()}
    documents = {PAGE_NAME: page, CROISSANT_NAME: croissant, **found, CARD_NAME: card.to_bytes()}
    return documents, (*faults, *further)


def make_job_card(
    job: Job, opened: JobTable, reached: RunRecord, release: Any, beside: Mapping[str, bytes]
) -> Card:
    """Return the release card of a run: the same run, the same card.

    `beside` are the files of noisy counts and of the model, as far as they are published.

    Privacy
    -------
    A card of noise from a seed has no name, time or place in a ledger: the same job gives the same
    bytes.
    """
    insecure = job.file.insecure_seed is not None
    section = opened.mechanism.description.section(
        release,
        opened.work.columns,
        n_rows=opened.public_rows,
        n_released=sum(reached.fitted.n_released),
        order=job.file.output.order,
    )
    card = make_card(section, name=job.file.name, insecure=insecure)
    columns = opened.mechanism.declared.columns.items()
    changes: dict[str, Any] = {"dropped": [name for name, each in columns if each.role == "drop"]}
    if opened.table.version is not None:
        version = {"format": opened.table.format, "version": opened.table.version}
        changes["input"] = InputVersion.model_validate(version)
    if beside:
        changes["sha256"] = {
            name: hashlib.sha256(data).hexdigest() for name, data in beside.items()
        }
    if job.file.about is not None:
        changes["about"] = job.file.about
    book = job.account.read()
    position = None if insecure else book.find_position(reached.run_id)
    if not insecure:
        changes["release"] = ReleaseName(id=reached.run_id, time=reached.began)
    if position is not None and job.ledger is not None:
        earlier = [
            EarlierRelease(
                id=entry.run_id.partition(" ")[0],
                epsilon=entry.charge.epsilon,
                delta=entry.charge.delta,
            )
            for entry in position.earlier
        ]
        series = position.entry.charge.event.get(KEY)
        changes["ledger"] = LedgerPosition(
            dataset=job.ledger.dataset,
            entry=position.entry.digest,
            epsilon=position.epsilon if position.epsilon < float("inf") else None,
            delta=position.delta,
            epsilon_limit=position.epsilon_limit,
            delta_limit=position.delta_limit,
            n_earlier=len(earlier),
            earlier=earlier[-_MOST_EARLIER:],
            # keyed digests; not that of the fitted release, by which guesses of held-out rows could
            # be tested
            **({"series": {key: series[key] for key in _IN_CARD}} if series else {}),
        )
    return card.model_copy(update=changes).with_dataset(book.coverage_until(reached.run_id))


class Status(NamedTuple):
    """The state of an output."""

    stage: Literal["absent", "opened", "fitted", "staged", "released"]
    # Shards released, or staged so far.
    n_shards: int
    n_releases: int = 0
    # How many released shards are gone; 0 for a table, and during a run.
    n_missing: int = 0
    # Entries of the hidden folder that belong to no run: a process that was cut off wrote them when
    # the run had ended.
    n_hidden: int = 0


def status(output_url: str) -> Status:
    """Return the state of an output: of its unfinished run, or of what was released into it."""
    state = open_output_run(Folder(output_url))
    left = state.read_unfinished()
    if left is not None and not state.is_committed():
        staging = state.staging(left.run_id)
        names = list_files(staging.shards) if staging.in_folders else staging.shards.names()
        ending = staging.place(".parquet")
        return Status(
            stage=left.stage,
            n_shards=sum(name.endswith(ending) for name in names),
            n_releases=len(list_manifests(state.output, staging.place(MANIFEST_NAME))),
        )
    released = list_manifests(state.output)
    return Status(
        stage="released" if released else "absent",
        n_shards=sum(len(manifest.shards) for manifest in released),
        n_releases=len(released),
        n_missing=_count_missing(state.output, released),
        n_hidden=0 if left is not None else sum(map(is_left_over, state.folder.names())),
    )


def _count_missing(output: Folder, released: Sequence[Manifest]) -> int:
    """Return how many released shards a folder lacks; 0 for tables with logs, which others may rewrite."""
    tables = {f"{TABLE_FOLDER}={table}" for manifest in released for table in manifest.tables}
    folders = (output, *map(output.child, sorted(tables)))
    is_table = any(set(LOG_FOLDERS) & set(folder.names()) for folder in folders)
    return 0 if is_table else count_missing(output, released)


# What `abort` has removed: an unfinished run, what a run has left whose release is published, or the
# note of where the output was moved to.
Removed = Literal["run", "rest", "note"]


def abort(output_url: str, ledger_url: str | None = None, *, force: bool = False) -> Removed | None:
    """Remove an unfinished run: its key, its fitted release, its shards. Return what was removed.

    What a growing table has released, and what it keeps for its next release, stays. The ledger is
    needed if it keeps the run's key: that of a run whose output is in a store. A `SpecError` if the
    key is elsewhere; an `OutputError` if the output is released; a `TemporaryError` if a driver is at
    work on it. With `force`, a run whose key is lost with the machine that kept it is ended, too: what
    is removed is encrypted with it, the noise is lost, and the charge stays. Of an output that was
    moved away, the note of that is removed.
    """
    state = open_output_run(Folder(output_url), ledger_url)
    released = "this output is released already"
    if not state.folder.exists():
        if state.publication.series is not None:
            state.remove_rest()
        elif list_manifests(state.output):
            hint = "to release again, remove the folder yourself; a new run spends ε again"
            raise OutputError(released, output_url, hint)
        return None
    moved = state.find_move()
    if moved is not None:
        if not moved.whole or state.output.names():
            raise refuse_moved(state.output, moved._replace(whole=False))
        with state.records.lock():
            state.records.clear()
        return "note"
    if state.remove_broken():
        return "run"
    with state.records.lock():
        is_published = state.is_committed()
        if is_published and not force:  # else its rest goes, and the release stays
            raise OutputError(released, output_url, "run the job again to finish it")
        state.remove(force=force)
        try:
            forget_unused(state.output, ledger_url)
        except DpdaskError:  # of a ledger that is lost
            if not force:
                raise
            forget_unused(state.output, None)
    return "rest" if is_published else "run"


@opens_stores
def abort_job(job: Job, *, force: bool = False) -> Removed | None:
    """Remove a job's unfinished run, with the key that its ledger keeps; see `abort`.

    If its release is published, which `force` leaves, the ledger is told if it can be: cards of later
    releases count those that the ledger knows as released.
    """
    if force:
        with suppress(DpdaskError):
            state = open_output_run(Folder(job.output_url), job.ledger_url)
            left = state.peek()
            if left is not None and state.is_committed():
                job.account.commit(left.run_id)
    return abort(job.output_url, job.ledger_url, force=force)
