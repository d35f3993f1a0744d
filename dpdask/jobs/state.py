"""The state of a run, beside its output: the run key, what was fitted, what is staged; gone when the run is committed."""

from __future__ import annotations

import fcntl
import json
import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal

from dpdask.engine.compute import forget_everywhere
from dpdask.engine.fit import Fitted
from dpdask.engine.work import HOLDOUT_NAME, KEY_NAME
from dpdask.errors import InputError, OutputError, TemporaryError
from dpdask.io.faults import storage_faults
from dpdask.io.manifest import META
from dpdask.io.storage import Folder
from dpdask.streams import RunKey

STATE_FORMAT = 1
_STATE = "run.json"
_LOCK = "lock"

Stage = Literal["opened", "fitted", "staged"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Progressed:
    """What a run has reached, as its state file tells it.

    Attributes
    ----------
    run_id
        Names the run in a ledger; random, and reveals nothing about the key.
    job
        The job's digest.
    input
        The input's fingerprint.
    stage
        `opened`: the key exists. `fitted`: the release is written. `staged`: all shards are staged.
    release_sha256
        SHA-256 of the fitted release, from the stage `fitted` on.
    bounds_sha256
        SHA-256 of the units' bounds, from the stage `fitted` on, if the unit is not the row.
    n_released
        The released rows of each fragment or writing task, from `fitted` on. Private: never published.
    sample
        The name of the draw of the hold-out.
    changed
        As in `Fitted`, but only in the process that passed the barrier: the state file does not contain it.
    """

    run_id: str
    job: str
    input: str
    stage: Stage
    release_sha256: str = ""
    bounds_sha256: str = ""
    n_released: tuple[int, ...] = field(default=(), repr=False)
    sample: str = ""
    changed: Mapping[str, int] = field(default_factory=dict, repr=False)

    @property
    def fitted(self) -> Fitted:
        """What the barrier left, from `fitted` on."""
        return Fitted(release_sha256=self.release_sha256, bounds_sha256=self.bounds_sha256, n_released=self.n_released, changed=self.changed)

    def with_fitted(self, fitted: Fitted) -> Progressed:
        """Return the record of a run whose barrier is behind it."""
        return replace(
            self,
            stage="fitted",
            release_sha256=fitted.release_sha256,
            bounds_sha256=fitted.bounds_sha256,
            n_released=fitted.n_released,
            changed=fitted.changed,
        )


class RunState:
    """The hidden folder beside an output that holds its run until the commit.

    Parameters
    ----------
    output
        The output folder.

    Privacy
    -------
    Whoever can read this folder can undo the noise. It is created for this user alone; on an object store, give it the
    access rules of the private input.
    """

    def __init__(self, output: Folder) -> None:
        self.output = output
        self.folder = output.sibling(".", ".dpdask")

    def publish(self, run_id: str) -> Folder:
        """Return where a run stages what it will publish.

        The folder is the run's own: a task of an aborted run that is still at work somewhere finds its folder gone, and
        can never write into another run's release.
        """
        return self.folder.child(f"publish-{run_id}")

    def actions(self, run_id: str) -> Folder:
        """Return where a run records its staged shards."""
        return self.folder.child(f"actions-{run_id}")

    def read(self) -> Progressed | None:
        """Return what the run has reached, or None if there is no run.

        Raises
        ------
        OutputError
            If the state is of another format.
        """
        if not (self.folder.exists(_STATE) and self.folder.exists(KEY_NAME)):
            return None  # without its key, it is the rest of a run that was being removed
        try:
            content = json.loads(self.folder.read(_STATE))
            if content.pop("format") != STATE_FORMAT:
                raise KeyError
            return Progressed(**{**content, "n_released": tuple(content["n_released"])})
        except InputError:
            return None  # a run that was just now committed or aborted elsewhere
        except (ValueError, KeyError, TypeError, AttributeError):
            raise OutputError("the state of an unfinished run cannot be read", self.folder.url, "`dpdask abort` it and run again") from None

    def write(self, reached: Progressed) -> None:
        """Record what the run has reached."""
        content = asdict(replace(reached, changed={}))
        del content["changed"]
        self.folder.write(_STATE, json.dumps({"format": STATE_FORMAT, **content}).encode(), private=True)

    def open(self, job: str, fingerprint: str, seed: int | None, holdout: tuple[bytes, str] | None = None) -> Progressed:
        """Begin a run: its folder, its keys, its first record.

        Parameters
        ----------
        job, fingerprint
            The job's digest, and the input's.
        seed
            Makes the run key, for tests; None for a fresh one.
        holdout
            The key and the name of a hold-out that several runs share; if None, the run key chooses the run's own hold-out.

        A key that an earlier attempt left without a record was never used, and is replaced. What a removal that was
        interrupted left is removed: it holds the noise of another key.
        """
        self.folder.create(private=True)
        for name in sorted(self.folder.names(), key=lambda name: name != _STATE):
            if name != _LOCK:
                self.folder.child(name).remove()
        key = RunKey.fresh() if seed is None else RunKey.insecure(seed)
        self.folder.write(KEY_NAME, key.reveal(), private=True)
        if holdout is not None:
            self.folder.write(HOLDOUT_NAME, holdout[0], private=True)
        run_id = uuid.uuid4().hex
        for folder in (self.publish(run_id), self.publish(run_id).child(META), self.actions(run_id)):
            folder.create()
        sample = f"run {run_id}" if holdout is None else holdout[1]
        reached = Progressed(run_id=run_id, job=job, input=fingerprint, stage="opened", sample=sample)
        self.write(reached)
        return reached

    def remove(self) -> None:
        """Remove the run: the key first, so that anything left behind is useless; then clear the memory of the driver and the workers."""
        self.folder.remove(KEY_NAME)
        self.folder.remove(HOLDOUT_NAME)
        self.folder.remove()
        forget_everywhere()

    def _check_place(self) -> None:
        path = self.folder.local_path
        foreign = path.exists() and path.stat().st_uid != os.geteuid()
        if path.is_symlink() or foreign:
            what = "the hidden folder of this output is a link or belongs to another user, so the run key would not be safe in it"
            raise OutputError(what, self.folder.url, "remove it, or choose another output.path")

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keep other drivers of this machine's file system away from the run.

        Raises
        ------
        TemporaryError
            If another driver holds it.
        OutputError
            If the hidden folder is a link, or another user's: its secrets would lie where that user can read or keep them.
        """
        if not self.folder.is_local:
            yield  # object stores have no locks: one driver at a time is the user's care
            return
        self._check_place()
        self.folder.create(private=True)
        busy = TemporaryError("another run is writing this output", self.output.url, "wait for it to end")
        path = self.folder.local_path / _LOCK
        try:
            with storage_faults(self.folder.url):
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        except InputError:
            raise busy from None  # it ended, and removed the folder, just now
        try:
            if not _lock_file(descriptor, path):
                raise busy
            yield
        finally:
            os.close(descriptor)


def _lock_file(descriptor: int, path: Path) -> bool:
    """Lock a file and return whether that worked, and the file is still the one at its path: a run that ends removes it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except (BlockingIOError, FileNotFoundError):
        return False
