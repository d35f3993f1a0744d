"""A run as a resumable state machine (docs/explanation/design.md, The life of a run): run it again after a crash and it writes the same bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from dpdask.connect.probe import check_workers
from dpdask.engine.account import settle
from dpdask.engine.compute import Progress
from dpdask.engine.fit import Fitted, carry_on, fit
from dpdask.engine.work import load
from dpdask.engine.write import (
    Staged,
    Staging,
    Task,
    Told,
    lay_out_rows,
    list_record_tasks,
    write_all,
)
from dpdask.errors import BudgetError, DpdaskError, InputError, OutputError, TemporaryError
from dpdask.io.files import LOG_FOLDERS
from dpdask.io.fragment import Fragment
from dpdask.io.shards import CARD_NAME, MANIFEST_NAME, Manifest, count_missing, list_manifests
from dpdask.io.storage import Folder
from dpdask.jobs.growing import (
    GrowingState,
    make_job_card,
    open_state,
    run_growing,
    write_documents,
)
from dpdask.jobs.plan import expect, find_resumed, list_sorted_warnings
from dpdask.jobs.run_keys import Name, ReleaseNames, forget_unused
from dpdask.jobs.spec import Job, raises_in_keys
from dpdask.jobs.state import Progressed, RunState, charge, finish, is_undrawn, record_draw
from dpdask.jobs.tables import JobTable, open_table, opens_stores
from dpdask.mechanisms.mechanism import Mechanism
from dpdask.steps import step


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a run ended with."""

    # `released`, or `already released` when a finished job is run again; `nothing new` if a growing
    # table has no new rows.
    status: Literal["released", "already released", "nothing new"]
    output: str  # the output's URL, and the committed shards
    manifest: Manifest
    # The warnings of the plan, and those that follow from the rows: see `Mechanism.warn_of_release`
    # and `list_sorted_warnings`.
    warnings: tuple[str, ...] = ()
    # What is printed on the steward's terminal only: exact, and covered by no ε. Empty if the job
    # was already finished.
    told: Told = field(default_factory=Told)
    # One line on how good the release is, from the release alone; empty if the job was already
    # finished.
    quality: str = ""
    # The mechanism as it was run, which differs among the releases of a growing table; None if the
    # job was already finished.
    mechanism: Mechanism | None = None
    # The run's name in the ledger, empty if the job was already finished; the name by which the
    # output knows the release.
    run_id: str = ""
    release: str = ""


CountRows = Callable[[int | None, int | None], None]


@raises_in_keys
@opens_stores
def run_job(
    job: Job, progress: Progress | None = None, *, count_rows: CountRows | None = None
) -> Outcome:
    """Run a job, or go on with it, or find it finished.

    Parameters
    ----------
    progress, count_rows
        Called with (stage, done, total); before, with the numbers of rows that are read and
        written, where they are known and public.

    Privacy
    -------
    Row noise is a function of the run key; central noise is saved beside it as soon as it is drawn.
    So a second run repeats the first one's draws and releases nothing new. The key is removed at
    the commit. A refusal after rows were read reveals something exact about them that no ε covers:
    the ledger records it, and charges it if the dataset is strict. Errors and warnings are for the
    steward only.
    """
    if job.file.growing:
        nothing = Outcome(
            status="nothing new",
            output=job.output_url,
            manifest=Manifest(job=job.digest, shards=(), card_sha256=""),
        )
        return run_growing(
            job,
            lambda *release: _run_locked(*release, progress=progress, count_rows=count_rows),
            lambda table: replace(nothing, warnings=table.left_out),
        )
    state = RunState(
        Folder(job.output_url),
        None if job.ledger is None else job.ledger.url,
        job.file.output.target,
    )
    opened = open_table(job, state.folder) if job.may_repeat else None
    names = job.name_releases("" if opened is None else opened.table.fingerprint)
    finished = _find_finished(job, state, names.find(state.publication))
    if finished is not None:
        state.sweep()
        return finished
    finished = _check_room(job, state, names)
    if finished is not None:
        return finished
    opened = opened or open_table(job, state.folder)
    opened.check(job, state.publication)
    with state.lock():
        finished = _find_finished(job, state, names.find(state.publication))
        if finished is not None:
            state.remove_rest()
            return finished
        return _run_locked(job, state, opened, names.make, progress=progress, count_rows=count_rows)


def _run_locked(
    job: Job,
    state: RunState,
    opened: JobTable,
    name: Name,
    *,
    progress: Progress | None,
    count_rows: CountRows | None,
) -> Outcome:
    """Run a job whose output this driver has for itself."""
    expected = expect(job, opened)
    if count_rows is not None:
        count_rows(opened.public_rows, expected.n_rows)
    _check_cluster(state, opened)
    try:
        outcome = _advance(job, state, opened, name, progress)
        return replace(
            outcome, warnings=tuple(dict.fromkeys((*expected.warnings, *outcome.warnings)))
        )
    except DpdaskError as error:
        _fail(job, state, error)
        raise


@step("checking the workers")
def _check_cluster(state: RunState, opened: JobTable) -> None:
    """Check the workers; if they cannot do the work, leave no trace of a run that has not begun."""
    try:
        place = Folder(
            state.folder.url
        )  # no secret lies there yet, and nothing is asked of who owns it
        check_workers(
            opened.table.fragments, output=place, secrets=place if state.output.is_local else None
        )
    except DpdaskError:
        if state.read() is None:
            state.remove()
        raise


def _find_finished(job: Job, state: RunState, release: str) -> Outcome | None:
    """Return the outcome of a committed run of this job, cleaning up what its driver could not."""
    manifest = state.find_release(release)
    if manifest is None:
        return None
    state.publication.finish()
    if state.is_left_by(release):
        with suppress(
            InputError, OutputError
        ):  # of another version, or its key is elsewhere: the release stands all the same
            state.read()  # raises one of these
            finish(job, state)
    n_missing = _count_missing(state.output, [manifest])
    what = f"missing shards: {n_missing} of {len(manifest.shards)}; restore them from a copy: a new run would spend ε again"
    return Outcome(
        status="already released",
        output=job.output_url,
        manifest=manifest,
        warnings=(what,) if n_missing else (),
        release=release,
    )


def _check_room(job: Job, state: RunState, names: ReleaseNames) -> Outcome | None:
    """Check that the budget allows the job, or that its unfinished run is charged; return its outcome if another driver has just released it."""
    before = state.find_unfinished(job.digest)
    try:
        job.account.check_room(None if before is None else before.run_id)
    except BudgetError:
        finished, now = (
            _find_finished(job, state, names.find(state.publication)),
            state.find_unfinished(job.digest),
        )
        if finished is not None:
            return finished
        if now is None or (before is not None and now.run_id == before.run_id):
            raise
        job.account.check_room(now.run_id)  # another driver has charged the job since
    return None


def _fail(job: Job, state: RunState, error: DpdaskError) -> None:
    """After a failure, keep what a second run can resume from, remove the rest, and update the ledger."""
    if isinstance(error, OutputError) or state.is_committed():
        return  # the state belongs to another run; or the release is published, and only the ledger's commit is missing
    if not state.holds_run():
        return  # another driver has taken the run over
    drawn = not is_undrawn(job, state)
    settlement = settle(error, drawn=drawn, strict=job.account.is_strict)
    if settlement == "keep" or (
        settlement == "void" and isinstance(error, TemporaryError) and state.has_counts()
    ):
        return
    reached = state.find_unfinished(job.digest)
    if reached is not None and settlement == "refuse":
        job.account.refuse(reached.run_id, reached.sample, drawn=drawn)
    elif reached is not None and settlement == "void":
        job.account.void(reached.run_id)
    state.remove(None if reached is None else reached.run_id)


def _advance(
    job: Job, state: RunState, opened: JobTable, name: Name, progress: Progress | None
) -> Outcome:
    table = opened.table
    reached = find_resumed(job, state, table)
    if (
        reached is None and state.is_committed()
    ):  # a release that the ledger does not know, of an earlier input
        finish(job, state)
    elif reached is None and state.read() is not None:
        state.remove()  # as the driver that refused its rows was about to do
    if reached is None:
        ids = tuple(fragment.id for fragment in table.fragments) if job.file.growing else ()
        holdout = job.account.find_holdout(opened.sample_place, opened.hide_sample)
        seed, version = job.file.insecure_seed, table.version if job.file.growing else None
        reached = state.open(
            job.digest, name, table.fingerprint, seed, holdout, fragments=ids, input_version=version
        )
    if isinstance(state, GrowingState):
        job = state.place(job, reached, table)
    with state.share_key(reached.run_id):
        return _release(
            job,
            state,
            replace(opened, work=replace(opened.work, secrets=state.secrets(reached.run_id))),
            reached,
            progress,
        )


def _release(
    job: Job, state: RunState, opened: JobTable, reached: Progressed, progress: Progress | None
) -> Outcome:
    """Bring a run from where it is to its end."""
    strict = job.account.is_strict
    if reached.stage == "opened":
        if strict:
            charge(
                job, state, reached
            )  # rows are read from here on, and a refusal costs as much as a release
        opened.check_copies()
        reached = _fit(job, state, opened, reached, progress)
    else:
        charge(
            job, state, reached
        )  # already charged, unless the job got its ledger, or another one, since then
    record_draw(job, reached)
    staged = _write(job, opened, reached.fitted, state.staging(reached.run_id), progress)
    with step("publishing"):
        release = load(opened.work.secrets, reached.release_sha256, opened.mechanism.release_type)
        card = make_job_card(job, state, opened, reached, release)
        content = card.to_bytes()
        manifest = Manifest(
            job=job.digest, shards=staged.shards, card_sha256=hashlib.sha256(content).hexdigest()
        )
        quality = opened.mechanism.description.quality(release)
        doubts = _warn_of_release(opened, reached.fitted, release)
        documents, faults = write_documents(card, manifest, state.staging(reached.run_id).shards)
        job.name_releases(reached.input).keep(reached.release, state.keys.read(reached.run_id))
        state.publish(reached, manifest, {**documents, CARD_NAME: content})
        state.remove_key(
            reached.run_id
        )  # now, for a ledger that cannot be reached would keep it beside the output
        job.account.commit(reached.run_id, reached.release_sha256)
        state.remove(reached.run_id)
    counted = Told(changed={name: count for name, count in reached.fitted.changed.items() if count})
    told = Told() if strict else counted.merge(staged.told)  # with a strict ledger, nobody is told
    warnings = (
        *(() if strict else doubts),
        *list_sorted_warnings(job, told, len(manifest.shards)),
        *faults,
    )
    return Outcome(
        status="released",
        output=job.output_url,
        manifest=manifest,
        warnings=warnings,
        told=told,
        quality=quality,
        mechanism=opened.mechanism,
        run_id=reached.run_id,
        release=reached.release,
    )


def _warn_of_release(opened: JobTable, fitted: Fitted, release: Any) -> tuple[str, ...]:
    """Return the warnings of a fitted release; with a unit also those of the plan, by the rows that its bound has left."""
    mechanism, columns = opened.mechanism, opened.work.columns
    counted = opened.work.unit is not None and mechanism.releases_rows
    late = mechanism.description.cautions(columns, sum(fitted.n_released)) if counted else ()
    return (*late, *mechanism.description.warnings(release, columns))


def _fit(
    job: Job, state: RunState, opened: JobTable, reached: Progressed, progress: Progress | None
) -> Progressed:
    """Bring a run over its barrier: charged before any noise, and recorded once the fitted release is written."""
    mechanism, work = opened.mechanism, opened.work.with_keys()

    def charge_run() -> (
        None
    ):  # from here on the run stays charged, unless nobody saw anything of it
        charge(job, state, reached)

    kept = state.find_fitted() if isinstance(state, GrowingState) else None
    if kept is not None:
        fitted = carry_on(opened.source, work, kept, charge_run, progress)
    else:
        insecure = job.file.insecure_seed is not None
        fitted, _ = fit(
            mechanism,
            opened.source,
            work,
            charge_run,
            public=opened.public_table(),
            insecure=insecure,
            progress=progress,
        )
    reached = reached.with_fitted(fitted)
    state.write(reached)
    return reached


def _write(
    job: Job, opened: JobTable, fitted: Fitted, staging: Staging, progress: Progress | None
) -> Staged:
    """Stage every shard and return them by name; doing it twice changes nothing."""
    mechanism, output = opened.mechanism, job.file.output
    work = opened.with_bounds(fitted).with_keys()
    tasks: Sequence[Task]
    if mechanism.releases_rows:
        fragments, written = (
            _seal(opened.table.fragments, fitted.seals),
            mechanism.find_written(work.released),
        )
        tasks = lay_out_rows(
            fragments, fitted.n_released, output.rows_per_shard, written, output.order, work.key()
        )
    else:
        tasks = list_record_tasks(fitted.n_released[0], output.rows_per_shard)
    return write_all(tasks, work, fitted.release_sha256, mechanism.release_type, staging, progress)


def _seal(fragments: tuple[Fragment, ...], seals: tuple[bytes, ...]) -> tuple[Fragment, ...]:
    """Return the fragments with the seals that the pass before left, if it left any."""
    return (
        tuple(replace(fragment, seal=seal) for fragment, seal in zip(fragments, seals, strict=True))
        if seals
        else fragments
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """The state of an output."""

    stage: Literal["absent", "opened", "fitted", "staged", "released"]
    n_shards: int
    n_releases: int = 0
    # How many of the released shards are gone; 0 for a table, whose files may be rewritten by
    # others, and during a run.
    n_missing: int = 0


def status(output_url: str) -> Status:
    """Return the state of an output: of its unfinished run, or of what was released into it."""
    state = open_state(Folder(output_url))
    found = state.read_unfinished()
    if found is not None and not state.is_committed():
        released = list_manifests(state.output, state.staging(found.run_id).place(MANIFEST_NAME))
        return Status(
            stage=found.stage, n_shards=state.count_staged(found.run_id), n_releases=len(released)
        )
    released = list_manifests(state.output)
    n_shards = sum(len(manifest.shards) for manifest in released)
    n_missing = _count_missing(state.output, released)
    return Status(
        stage="released" if released else "absent",
        n_shards=n_shards,
        n_releases=len(released),
        n_missing=n_missing,
    )


def _count_missing(output: Folder, released: Sequence[Manifest]) -> int:
    """Return how many released shards a folder lacks; 0 for a table, whose files may be rewritten by others."""
    return 0 if set(LOG_FOLDERS) & set(output.names()) else count_missing(output, released)


def abort(output_url: str, ledger_url: str | None = None) -> bool:
    """Remove an unfinished run: its key, its fitted release, its staged shards. Return whether there was one.

    What a growing table has released, and what it keeps for its next release, stays.

    Parameters
    ----------
    ledger_url
        The ledger that the run is charged to; needed if it keeps the run's key: that of a run whose
        output is in a store.
    """
    state = open_state(Folder(output_url), ledger_url)
    if not state.folder.exists():
        if isinstance(state, GrowingState):
            state.remove_rest()
        elif list_manifests(state.output):
            raise OutputError(
                "this output is released already",
                output_url,
                "to release again, remove the folder yourself; a new run spends ε again",
            )
        return False
    if state.is_broken():
        state.remove_broken()
        return True
    with state.lock():
        if state.is_committed():
            raise OutputError(
                "this output is released already", output_url, "run the job again to finish it"
            )
        state.remove()
        forget_unused(state.output, ledger_url)
    return True


@opens_stores
def abort_job(job: Job) -> bool:
    """Remove a job's unfinished run, with the key that its ledger keeps; see `abort`."""
    return abort(job.output_url, None if job.ledger is None else job.ledger.url)
