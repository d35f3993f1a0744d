"""The state of a run, beside its output: what was fitted, what is staged, and on a file system the run key; gone when the run is committed."""

from __future__ import annotations

import base64
import json
import re
import uuid
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Literal, get_args

from dpdask.engine.cluster import forget_everywhere, share_key, withdraw_key
from dpdask.engine.fit import Fitted
from dpdask.engine.work import HOLDOUT_NAME, NOISY_NAME, RELEASE_NAME, has_counts
from dpdask.engine.write import Staging
from dpdask.errors import SPENT_AGAIN, InputError, OutputError, SpecError, TemporaryError
from dpdask.io.encrypted import EncryptedFolder, PrivateFolder, commit, decrypt, encrypt, hide
from dpdask.io.shards import META, Manifest
from dpdask.io.storage import Folder
from dpdask.jobs.output import Target
from dpdask.jobs.records import (
    STATE_FORMAT,
    LockedRecord,
    NumberedRecords,
    RunRecords,
    busy,
    unreadable,
)
from dpdask.jobs.run_keys import Name, check_run_id, find_keys, say_place
from dpdask.jobs.spec import Job
from dpdask.streams import STREAM_FORMAT, RunKey
from dpdask.version import __version__

Stage = Literal["opened", "fitted", "staged"]
_ABOUT = ("format", "version", "streams", "key", "target")
_PUBLIC = ("run_id", "job", "release", "stage")
_PRIVATE = "private"
_DIGITS = 20  # the most of a number of rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Progressed:
    """What a run has reached, as its state file tells it."""

    run_id: str  # names the run in a ledger; random, and reveals nothing about the key
    job: str
    release: str  # the name of the release in its output
    input: str
    # `opened`: the key exists. `fitted`: the release is written. `staged`: all shards are staged.
    stage: Stage
    release_sha256: str = ""  # SHA-256 of the fitted release, from the stage `fitted` on
    # SHA-256 of the units' bounds, from the stage `fitted` on, if the unit is not the row.
    bounds_sha256: str = ""
    # The released rows of each fragment or writing task, from `fitted` on. Private: never
    # published.
    n_released: tuple[int, ...] = field(default=(), repr=False)
    # The seals of the fragments, in hexadecimal digits, from `fitted` on, if they were counted.
    # Private.
    seals: tuple[str, ...] = field(default=(), repr=False)
    sample: str = ""  # the name of the draw of the hold-out
    # The ids of the fragments that are released and the version in which the table had them, if it
    # grows.
    fragments: tuple[str, ...] = field(default=(), repr=False)
    input_version: int | None = None
    began: str = ""  # when the run began, in UTC (ISO 8601)
    changed: Mapping[str, int] = field(default_factory=dict, repr=False)

    @property
    def fitted(self) -> Fitted:
        """What the barrier left, from `fitted` on."""
        return Fitted(
            release_sha256=self.release_sha256,
            bounds_sha256=self.bounds_sha256,
            n_released=self.n_released,
            seals=tuple(map(bytes.fromhex, self.seals)),
            changed=self.changed,
        )

    def with_fitted(self, fitted: Fitted) -> Progressed:
        """Return the record of a run whose barrier is behind it."""
        return replace(
            self,
            stage="fitted",
            release_sha256=fitted.release_sha256,
            bounds_sha256=fitted.bounds_sha256,
            n_released=fitted.n_released,
            seals=tuple(seal.hex() for seal in fitted.seals),
            changed=fitted.changed,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Unfinished:
    """What the record of an unfinished run tells without the run's key."""

    run_id: str
    job: str
    release: str
    stage: Stage
    target: Target


class RunState:
    """The hidden folder beside an output that holds its run until the commit: records, keys, and what is private.

    Parameters
    ----------
    ledger_url
        The ledger that the job is charged to, if any: it keeps the keys of runs whose output is in
        a store.
    target
        How the output is published; if it is None, as the unfinished run does it, or as plain
        files.

    Privacy
    -------
    On a file system, whoever can read this folder can undo the noise, so it is created for this
    user alone. In a store, its private files are encrypted with the run key, which is not in the
    store.
    """

    def __init__(
        self, output: Folder, ledger_url: str | None = None, target: Target | None = None
    ) -> None:
        self.output = output
        self.folder = hide(output, ".dpdask")
        self._commitment = ""  # of the run's key, once this process knows it
        self.keys = find_keys(self.folder, ledger_url)
        private = self.folder if isinstance(self.folder, PrivateFolder) else None
        self._records: RunRecords = (
            NumberedRecords(self.folder, output)
            if private is None
            else LockedRecord(private, output)
        )
        if target is None:
            found = self._read_unfinished()
            target = Target() if found is None else found.target
        self._target = target
        self.publication = target.open(output)

    def secrets(self, run_id: str) -> Folder:
        """Return the folder of a run's private files, as tasks are told of it."""
        if isinstance(self.folder, PrivateFolder):
            return replace(self.folder, commitment=self._commitment)
        return EncryptedFolder(f"{self.folder.url}/{run_id}", run_id, self._commitment)

    def staging(self, run_id: str) -> Staging:
        """Return where a run stages what it will publish, and where it records what is staged."""
        return self.publication.make_staging(
            run_id, self.secrets(run_id), self.secrets(run_id).child(f"actions-{run_id}")
        )

    def read(self) -> Progressed | None:
        """Return what the run has reached, or None if there is no run."""
        content = self._records.read()
        if content is None:
            return None
        place = self._check_versions(content)
        if place != self.keys.place:
            what = f"the key of this output's unfinished run is {say_place(place)}"
            raise InputError(what, self.output.url, "run the job there, or abort it there")
        try:
            key = self.keys.read(check_run_id(str(content["run_id"])))
            if key is None or content.get(_PRIVATE, "") is None:
                return None  # the rest of a run that was being removed, or one that had only a name
            self._commitment = commit(key)
            values = {name: value for name, value in content.items() if name not in _ABOUT}
            if not self.output.is_local:
                values |= json.loads(decrypt(key, _PRIVATE, base64.b64decode(values.pop(_PRIVATE))))
            return Progressed(
                **{
                    **values,
                    **{name: tuple(values[name]) for name in ("n_released", "seals", "fragments")},
                }
            )
        except (ValueError, KeyError, TypeError, AttributeError):
            raise unreadable(self.folder) from None

    def _check_versions(self, content: Mapping[str, Any]) -> str:
        """Return the place of the run's key, after checking that this version of the package can go on with the run."""
        if content.get("format") != STATE_FORMAT or not {*_ABOUT, *_PUBLIC} <= set(content):
            raise unreadable(self.folder)
        if (content["version"], content["streams"]) != (__version__, STREAM_FORMAT):
            what = f"the unfinished run of this output was begun by dpdask {content['version']}, and this is {__version__}"
            raise OutputError(
                what, self.folder.url, "go on with that version, or `dpdask abort` it and run again"
            )
        return str(content["key"])

    def find_unfinished(self, job: str) -> Progressed | None:
        """Return the state of the unfinished run of the job with this digest, or None."""
        reached = self.read()
        return reached if reached is not None and reached.job == job else None

    def read_unfinished(self) -> Unfinished | None:
        """Return what the record of the unfinished run tells, for which no key is needed; None if there is no run."""
        content = self._records.read()
        if content is None:
            return None
        try:
            check_run_id(str(content["run_id"]))
            if content["stage"] not in get_args(Stage):
                raise ValueError
            return Unfinished(
                **{name: content[name] for name in _PUBLIC},
                target=Target.model_validate(content["target"]),
            )
        except (KeyError, ValueError):
            raise unreadable(self.folder) from None

    def _read_unfinished(self) -> Unfinished | None:
        """Return the same; None also if the record cannot be read."""
        with suppress(OutputError):
            return self.read_unfinished()
        return None

    def write(self, reached: Progressed) -> None:
        """Record what the run has reached."""
        content = {
            name: value
            for name, value in asdict(replace(reached, changed={})).items()
            if name != "changed"
        }
        if not self.output.is_local:
            key = self.keys.read(reached.run_id)
            if key is None:
                raise busy(self.output)  # another driver took the run over, and ended it
            private = {name: content.pop(name) for name in list(content) if name not in _PUBLIC}
            data = json.dumps(private).encode()
            n_bytes = len(data) + sum(
                _DIGITS - len(str(n)) for n in reached.n_released
            )  # whatever the numbers are
            content[_PRIVATE] = base64.b64encode(encrypt(key, _PRIVATE, data, n_bytes)).decode()
        self._write(content)

    def _write(self, content: Mapping[str, Any]) -> None:
        about = {
            "format": STATE_FORMAT,
            "version": __version__,
            "streams": STREAM_FORMAT,
            "key": self.keys.place,
        }
        self._records.write({**about, "target": self._target.model_dump(mode="json"), **content})

    @property
    def number(self) -> int:
        """The number of the next release of a growing table; 0 for other jobs."""
        return 0

    def open(
        self,
        job: str,
        name: Name,
        fingerprint: str,
        seed: int | None,
        holdout: tuple[bytes, str] | None = None,
        *,
        fragments: tuple[str, ...] = (),
        input_version: int | None = None,
    ) -> Progressed:
        """Begin a run: its folder, its keys, its first record.

        Parameters
        ----------
        seed
            Makes the run key, for tests; None for a fresh one.
        holdout
            The key and the name of a hold-out that several runs share; if None, the run key chooses
            the run's own hold-out.
        """
        self._records.begin()  # first: it fails if another driver has the run, and its key, by now
        before = None if self.output.is_local else self._read_unfinished()
        if before is not None:
            self.keys.remove(before.run_id)
        key = (RunKey.fresh() if seed is None else RunKey.insecure(seed, self.number)).reveal()
        run_id, release = uuid.uuid4().hex, name(key)
        self._commitment = commit(key)
        if (
            not self.output.is_local
        ):  # the name before the key, so that no key is left that nothing names
            self._write(
                {
                    "run_id": run_id,
                    "job": job,
                    "release": release,
                    "stage": "opened",
                    _PRIVATE: None,
                }
            )
        self.keys.write(run_id, key)
        if holdout is not None:
            with self.share_key(run_id):
                self.secrets(run_id).write(HOLDOUT_NAME, holdout[0], private=True)
        if self.output.is_local:
            staging = self.staging(run_id)
            for folder in (staging.shards, staging.shards.child(META), staging.actions):
                folder.create()
        sample = f"run {run_id}" if holdout is None else holdout[1]
        began = datetime.now(UTC).isoformat(timespec="seconds")
        reached = Progressed(
            run_id=run_id, job=job, release=release, input=fingerprint, stage="opened"
        )
        reached = replace(
            reached, sample=sample, fragments=fragments, input_version=input_version, began=began
        )
        self.write(reached)
        return reached

    @contextmanager
    def share_key(self, run_id: str) -> Iterator[None]:
        """Let this process and the workers hold the key of a run whose private files are encrypted, until the block ends."""
        if self.output.is_local:
            yield
            return
        key = self.keys.read(run_id)
        if key is None:
            raise InputError(
                "the key of the run is gone",
                self.output.url,
                "`dpdask abort` the run and begin again",
            )
        with share_key(run_id, key):
            yield

    def publish(
        self, reached: Progressed, manifest: Manifest, documents: Mapping[str, bytes]
    ) -> None:
        """Stage the rest of a release, record that all is staged, and make it appear by one atomic act."""
        staging, staged = self.staging(reached.run_id), replace(reached, stage="staged")
        if not self.output.is_local:
            self.write(
                staged
            )  # first: a driver that lost the run while it slept writes nothing into the output
        self.publication.stage(staging, manifest, documents)
        if self.output.is_local:
            self.write(staged)
        self.publication.commit(reached.release, staging, manifest)

    def find_release(self, release: str) -> Manifest | None:
        """Return the manifest of a release that is committed in this output, or None if it can be made here."""
        for _ in range(2):  # another driver may commit or abort between the two questions
            manifest = self.publication.find(release)
            found = self._read_unfinished()
            if manifest is not None or self.publication.is_free(
                None if found is None else found.run_id
            ):
                return manifest
        if self.is_broken():
            raise unreadable(self.folder)
        raise OutputError(
            "this output already exists and was not written by this run",
            self.output.url,
            SPENT_AGAIN,
        )

    def is_left_by(self, release: str) -> bool:
        """Return whether a hidden folder is there that the run of this release has left, or one without a run beside an output of its own."""
        found = self._read_unfinished()
        if found is None:
            return not self.publication.is_shared and self.folder.exists()
        return found.release == release

    def is_committed(self) -> bool:
        """Return whether what the unfinished run was to release is released."""
        found = self._read_unfinished()
        return found is not None and self.publication.find(found.release) is not None

    def has_counts(self) -> bool:
        """Return whether the unfinished run keeps counts of a pass, from which a second driver goes on."""
        found = self._read_unfinished()
        return found is not None and has_counts(self.secrets(found.run_id))

    def count_staged(self, run_id: str) -> int:
        """Return how many shards a run has staged."""
        staging = self.staging(run_id)
        return sum(name.endswith(staging.place(".parquet")) for name in staging.shards.names())

    def remove_key(self, run_id: str | None) -> None:
        """Remove the keys of a run, None if no record names it: what is left can undo no noise. A `SpecError` if they are elsewhere."""
        if self.output.is_local:
            self.keys.remove("")
            self.folder.remove(HOLDOUT_NAME)
        elif run_id is not None:
            record = self._records.read() or {}  # none if another driver has just ended the run
            if record.get("run_id") == run_id and record["key"] != self.keys.place:
                hint = "abort it there, or name the job: `dpdask abort --job JOB`"
                raise SpecError(
                    f"the key of this run is {say_place(str(record['key']))}", self.output.url, hint
                )
            self.keys.remove(run_id)
            withdraw_key(run_id)  # a driver that was killed may have left it with the cluster

    def remove(self, run_id: str | None = None) -> None:
        """Remove the run: the key first, so that anything left behind is useless; then clear the memory of the driver and the workers.

        What the run has written into the output is removed too, unless it is released.

        Parameters
        ----------
        run_id
            The name of the run: if another one is there by now, in a store, it is left alone. None
            for any.
        """
        found = self._read_unfinished()  # a record that cannot be read names no key of a store
        if (
            not self.output.is_local
            and run_id is not None
            and (found is None or found.run_id != run_id)
        ):
            forget_everywhere()
            return
        self.remove_key(None if found is None else found.run_id)
        if found is not None:
            found.target.open(self.output).undo(found.release, found.run_id)
        self._records.clear()
        forget_everywhere()

    def is_broken(self) -> bool:
        """Return whether the records of a run in a store cannot be read: they are of another version, or somebody has changed them."""
        try:
            self.read_unfinished()
        except OutputError:
            return not self.output.is_local
        return False

    def remove_broken(self) -> None:
        """Remove a run in a store whose records cannot be read, with every key that they name and that is here."""
        for name in self.folder.names():
            if name.startswith("run"):
                for run_id in re.findall(rb'"run_id": "([0-9a-f]{32})"', self.folder.read(name)):
                    self.keys.remove(run_id.decode())
        self.folder.remove()

    def remove_rest(self) -> None:
        """Remove a hidden folder without a run; the caller holds the lock."""
        if self.folder.exists() and self.read_unfinished() is None:
            self.remove()

    def sweep(self) -> None:
        """Remove a hidden folder without a run, as a driver leaves it that is killed while it removes its run; not if one is at work."""
        with suppress(OutputError, TemporaryError):
            if self.folder.exists() and self.read_unfinished() is None:
                with self.lock():
                    self.remove_rest()

    def holds_run(self) -> bool:
        """Return whether the run is still this driver's; see `RunRecords.holds`."""
        return self._records.holds()

    def check(self) -> None:
        """Check that there can be a run; see `RunRecords.check`."""
        self._records.check()

    def lock(self) -> AbstractContextManager[None]:
        """Keep other drivers away from the run; see `RunRecords.lock`."""
        return self._records.lock()  # type: ignore[no-any-return]  # of either class


def is_undrawn(job: Job, state: RunState) -> bool:
    """Return whether this job's run holds no noise yet, so that nothing is lost with it, and nobody can have seen any."""
    reached = state.read()
    if reached is None:
        return True
    drawn = any(state.secrets(reached.run_id).exists(name) for name in (NOISY_NAME, RELEASE_NAME))
    return reached.stage == "opened" and reached.job == job.digest and not drawn


def charge(job: Job, state: RunState, reached: Progressed) -> None:
    """Charge the run."""
    try:
        entry = job.account.intend(reached.run_id, reached.sample)
    except SpecError as error:
        if is_undrawn(job, state):
            raise
        raise InputError(
            error.what, error.where, "restore the ledger and run again, or `dpdask abort` the run"
        ) from None
    if entry is None or entry.kind == "intend":
        return
    if reached.stage == "opened" or entry.release not in ("", reached.release_sha256):
        raise _copy_error(job)


def record_draw(job: Job, reached: Progressed) -> None:
    """Tell the ledger which noise was drawn, before anything of it is released."""
    try:
        job.account.record_draw(reached.run_id, reached.release_sha256)
    except SpecError:
        raise _copy_error(job) from None


def finish(job: Job, state: RunState) -> None:
    """Bring a run whose release is published to its end: its key is removed, the ledger is told, and the rest is removed."""
    left = state.read_unfinished()
    if left is not None and left.job == job.digest:
        state.remove_key(left.run_id)
        job.account.commit(left.run_id)
    state.remove(None if left is None else left.run_id)


def _copy_error(job: Job) -> OutputError:
    what = "this run has already drawn its noise; its hidden folder is an old copy, and resuming from it would draw new noise without a new charge"
    return OutputError(what, job.file.output.path, "`dpdask abort` it; a new run is charged again")
