"""What the ledger is told of a run: before its noise is drawn, when it was drawn, and when its release is published."""

from __future__ import annotations

from dpdask.engine.work import NOISY_NAME, RELEASE_NAME
from dpdask.errors import InputError, OutputError, SpecError
from dpdask.jobs.spec import Job
from dpdask.jobs.state import Progressed, RunState


def is_undrawn(job: Job, state: RunState) -> bool:
    """Return whether this job's run holds no noise yet, so that nothing is lost with it, and nobody can have seen any.

    Parameters
    ----------
    job, state
        The job, and the state of its output.
    """
    reached = state.read()
    if reached is None:
        return True
    drawn = any(state.secrets(reached.run_id).exists(name) for name in (NOISY_NAME, RELEASE_NAME))
    return reached.stage == "opened" and reached.job == job.digest and not drawn


def charge(job: Job, state: RunState, reached: Progressed) -> None:
    """Charge the run.

    Parameters
    ----------
    job, state
        The job, and the state of its output.
    reached
        What the run has reached.

    Raises
    ------
    InputError
        If noise was already drawn and the ledger is not the same as before; the noise is kept until the ledger is restored.
    OutputError
        If the run has already drawn its noise: its folder is an old copy, and resuming from it would draw it a second time.
    """
    try:
        entry = job.account.intend(reached.run_id, reached.sample)
    except SpecError as error:
        if is_undrawn(job, state):
            raise
        raise InputError(error.what, error.where, "restore the ledger and run again, or `dpdask abort` the run") from None
    if entry is None or entry.kind == "intend":
        return
    if reached.stage == "opened" or entry.release not in ("", reached.release_sha256):
        raise _copy_error(job)


def record_draw(job: Job, reached: Progressed) -> None:
    """Tell the ledger which noise was drawn, before anything of it is released.

    Parameters
    ----------
    job
        The job.
    reached
        What the run has reached.

    Raises
    ------
    OutputError
        If the run drew other noise before, in another copy of its folder.
    """
    try:
        job.account.record_draw(reached.run_id, reached.release_sha256)
    except SpecError:
        raise _copy_error(job) from None


def finish(job: Job, state: RunState) -> None:
    """Bring a run whose release is published to its end: its key is removed, the ledger is told, and the rest is removed.

    Parameters
    ----------
    job, state
        The job, and the state of its output.
    """
    left = state.read_unfinished()
    if left is not None and left.job == job.digest:
        state.remove_key(left.run_id)
        job.account.commit(left.run_id)
    state.remove(None if left is None else left.run_id)


def _copy_error(job: Job) -> OutputError:
    what = "this run has already drawn its noise; its hidden folder is an old copy, and resuming from it would draw new noise without a new charge"
    return OutputError(what, job.file.output.path, "`dpdask abort` it; a new run is charged again")
