"""The state of a run, in a hidden folder beside its output until the commit: records, keys, secrets.

The functions at the end tell the ledger of it: before noise is drawn, when it was, at the commit.
"""

from __future__ import annotations

import base64
import json
import re
import uuid
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, field, replace
from datetime import UTC, datetime
from functools import cached_property
from typing import Any, Literal, NamedTuple, Self, get_args

from dpdask.arrays import freeze_class
from dpdask.engine.compute import forget_everywhere, share_key, withdraw_key
from dpdask.engine.fit import Fitted
from dpdask.engine.work import has_counts
from dpdask.engine.write import Staging
from dpdask.errors import (
    SPENT_AGAIN,
    DpdaskError,
    InputError,
    OutputError,
    SpecError,
    TemporaryError,
)
from dpdask.io.encrypted import EncryptedFolder, count_missing_digits, decrypt, encrypt
from dpdask.io.fragments import InputTable
from dpdask.io.shards import META, Manifest
from dpdask.io.storage import (
    HOLDOUT_NAME,
    NOISY_NAME,
    RELEASE_NAME,
    Folder,
    PrivateFolder,
    commit,
    hide,
)
from dpdask.jobs.output import Target, read_target
from dpdask.jobs.records import (
    STATE_FORMAT,
    Content,
    LockedRecord,
    NumberedRecords,
    RunRecords,
    busy,
    unreadable,
)
from dpdask.jobs.run_keys import LEDGER, Name, check_run_id, find_keys, say_place
from dpdask.jobs.series import KeptFolder
from dpdask.jobs.spec import Job
from dpdask.streams import STREAM_FORMAT, RunKey
from dpdask.version import __version__

Stage = Literal["opened", "fitted", "staged"]
_ABOUT = ("format", "version", "streams", "key", "target")
_PUBLIC = ("run_id", "job", "release", "stage")
_PRIVATE = "private"
_UNFITTED = Fitted(release_sha256="", n_released=())


class Unfinished(NamedTuple):
    """What the record of an unfinished run tells without the run's key."""

    run_id: str
    job: str
    release: str
    stage: Stage
    # How the run publishes.
    target: Target


class Moved(NamedTuple):
    """Where an output was moved to, as the record tells that stays in its old place."""

    moved_to: str
    # Whether all of it is there.
    whole: bool


@freeze_class
class RunRecord:
    """What a run has reached, as its newest record tells it."""

    # Names the run in a ledger; random, and reveals nothing about the key.
    run_id: str
    # The job's digest.
    job: str
    # The name of the release in its output.
    release: str
    # The input's fingerprint.
    input: str
    # `opened`: the key exists. `fitted`: the release is written. `staged`: all shards are staged.
    stage: Stage
    # What the barrier left, from the stage `fitted` on; `changed` is in no file.
    fitted: Fitted = _UNFITTED
    # The name of the draw of the hold-out.
    sample: str = ""
    # The ids of the fragments that are released, if the table grows.
    fragments: tuple[str, ...] = field(default=(), repr=False)
    # The version in which a growing table had them.
    input_version: int | None = None
    # When the run began, in UTC (ISO 8601).
    began: str = ""

    def to_content(self) -> dict[str, Any]:
        """Return the record as JSON holds it."""
        content: dict[str, Any] = asdict(replace(self, fitted=replace(self.fitted, changed={})))
        content |= content.pop("fitted")
        del content["changed"]
        return content | {"seals": [seal.hex() for seal in self.fitted.seals]}

    @classmethod
    def of_content(cls, content: Mapping[str, Any]) -> RunRecord:
        """Return the record that `to_content` gave."""
        values = dict(content)
        fitted = Fitted(
            release_sha256=values.pop("release_sha256"),
            bounds_sha256=values.pop("bounds_sha256"),
            n_released=tuple(values.pop("n_released")),
            seals=tuple(map(bytes.fromhex, values.pop("seals"))),
        )
        return cls(**values | {"fitted": fitted, "fragments": tuple(values["fragments"])})


def name_run(record: RunRecord | Unfinished | None) -> str | None:
    """Return the name of the run of a record, if there is one."""
    return None if record is None else record.run_id


class RunState:
    """The hidden folder beside an output that holds its run until the commit.

    On a file system it has a record that is replaced under a lock, and the key; see `StoreRun`.

    The target says how the output is published: without it, as the unfinished run does, or as plain
    files. The ledger keeps the keys of runs whose output is in a store. `series` is the digest of a
    job whose table grows.

    Privacy
    -------
    On a file system, whoever can read this folder can undo the noise, so it is created for this user
    alone. In a store, its private files are encrypted with the run key, which is not in the store.
    """

    _records_first = False  # whether a run records that all is staged before it touches the output

    def __new__(cls, output: Folder, *_: Any) -> Self:
        """Return a run on a file system, or in a store."""
        return super().__new__(cls if output.is_local else StoreRun)  # type: ignore[return-value]  # of one of the two

    def __init__(
        self,
        output: Folder,
        ledger_url: str | None = None,
        target: Target | None = None,
        series: str | None = None,
    ) -> None:
        self.output, self.folder = output, hide(output, ".dpdask")
        self._ledger_url = ledger_url
        self._commitment = ""  # of the run's key, once this process knows it
        self.keys = find_keys(self.folder, ledger_url)
        self.records = self._open_records()
        if target is None:
            left = None
            with suppress(SpecError):  # the output was moved away
                left = self.peek()
            target = Target() if left is None else left.target
        self.publication = target.open(output, series)
        self._about = {
            "format": STATE_FORMAT,
            "version": __version__,
            "streams": STREAM_FORMAT,
            "target": target.model_dump(mode="json"),
        }

    @cached_property
    def kept(self) -> KeptFolder:
        """What a series keeps beside the output between its releases."""
        return KeptFolder(self.output, self._ledger_url)

    def secrets(self, run_id: str) -> Folder:
        """Return the folder of a run's private files, as tasks are told of it."""
        del run_id
        assert isinstance(self.folder, PrivateFolder)
        return replace(self.folder, commitment=self._commitment)

    def share_key(self, run_id: str) -> AbstractContextManager[None]:
        """Let this process and the workers hold the key of a run whose files it encrypts."""
        del run_id
        return nullcontext()

    def remove_key(self, run_id: str | None, *, force: bool = False) -> None:
        """Remove the keys of a run, so that what is left can undo no noise; None if none is named.

        With `force` also of a run whose key is elsewhere, and stays there.
        """
        del run_id, force
        self.keys.remove("")
        self.folder.remove(HOLDOUT_NAME)

    def _open_records(self) -> RunRecords:
        assert isinstance(self.folder, PrivateFolder)
        return LockedRecord(self.folder, self.output)

    def _reserve(self, run_id: str, job: str, release: str) -> None:
        """Record the name of a run before its key exists."""

    def _conceal(self, reached: RunRecord) -> dict[str, Any]:
        """Return a record's content as it is kept."""
        return reached.to_content()

    def _reveal(self, content: dict[str, Any], key: bytes) -> dict[str, Any]:
        del key
        return content

    def staging(self, run_id: str) -> Staging:
        """Return where a run stages what it will publish, and where it records what is staged."""
        secrets = self.secrets(run_id)
        return self.publication.make_staging(run_id, secrets, secrets.child(f"actions-{run_id}"))

    def read(self) -> RunRecord | None:
        """Return what the run has reached, or None if there is no run.

        An `OutputError` if the record is of another version; an `InputError` if the run's key is
        elsewhere, so that the run cannot go on here; a `SpecError` if the output was moved away.
        """
        return self._open_record(self._read_content())

    def _open_record(self, content: Content | None) -> RunRecord | None:
        if content is None:
            return None
        if content.get("format") != STATE_FORMAT or not {*_ABOUT, *_PUBLIC} <= set(content):
            raise unreadable(self.folder)
        if (content["version"], content["streams"]) != (__version__, STREAM_FORMAT):
            begun = f"was begun by dpdask {content['version']}, and this is {__version__}"
            hint = "go on with that version, or `dpdask abort` it and run again"
            raise OutputError(f"the unfinished run of this output {begun}", self.folder.url, hint)
        if content["key"] != self.keys.place:
            what, hint = _describe_lost_key(str(content["key"]), "run")
            raise InputError(what, self.output.url, hint)
        try:
            key = self.keys.read(check_run_id(str(content["run_id"])))
            if key is None or content.get(_PRIVATE, "") is None:
                return None  # the rest of a run that was being removed, or one that had only a name
            self._commitment = commit(key)
            values = {name: value for name, value in content.items() if name not in _ABOUT}
            return RunRecord.of_content(self._reveal(values, key))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise unreadable(self.folder) from None

    def find_unfinished(self, job: str) -> RunRecord | None:
        """Return the record of the unfinished run of the job with this digest, or None."""
        reached = self.read()
        return reached if reached is not None and reached.job == job else None

    def find_resumed(self, job: Job, table: InputTable) -> RunRecord | None:
        """Return the unfinished run that a run goes on with, or None if it begins anew.

        Nothing is changed. An `OutputError` if a run of another job is in the way, an `InputError` if
        the input changed since the run began.
        """
        content, where = self._read_content(), job.file.output.path
        reached, left = self._open_record(content), self._describe(content)
        if left is not None and self.publication.find(left.release) is not None:
            if left.job != job.digest:
                what = "a run of another job has published here and is not finished"
                raise OutputError(what, where, "run that job again first")
            return None
        if reached is None:
            return None
        if reached.job != job.digest:
            hint = "`dpdask abort` it, or choose another output.path"
            raise OutputError("a run of another job is staged for this output", where, hint)
        if job.account.read().find_kind(reached.run_id) == "refuse":
            return None
        if reached.input != table.fingerprint:
            hint = "restore it and run again, or `dpdask abort` the run"
            raise InputError("the input changed since the run began", job.file.input.path, hint)
        return reached

    def read_unfinished(self) -> Unfinished | None:
        """Return what the record of the unfinished run tells, for which no key is needed.

        None if there is no run; an `OutputError` if the record is of another version, a `SpecError` if
        the output was moved away.
        """
        return self._describe(self._read_content())

    def _describe(self, content: Content | None) -> Unfinished | None:
        if content is None:
            return None
        try:
            check_run_id(str(content["run_id"]))
            if content["stage"] not in get_args(Stage):
                raise ValueError
            target = read_target(content["target"])
            return Unfinished(**{name: content[name] for name in _PUBLIC}, target=target)
        except (KeyError, ValueError):
            raise unreadable(self.folder) from None

    def _read_content(self) -> Content | None:
        content = self.records.read()
        if content is not None and "moved_to" in content:
            raise refuse_moved(self.output, Moved(content["moved_to"], content["whole"]))
        return content

    def find_move(self) -> Moved | None:
        """Return where the output was moved to, or is being moved; None if it was not."""
        with suppress(OutputError):
            content = self.records.read() or {}
            if "moved_to" in content:
                return Moved(content["moved_to"], content["whole"])
        return None

    def write_move(self, moved: Moved) -> None:
        """Record where the output is moved to, so that no run begins in its old place; the caller holds the lock."""
        self.records.write({"format": STATE_FORMAT, **moved._asdict()})

    def peek(self) -> Unfinished | None:
        """Return the same; None also if the record cannot be read."""
        with suppress(OutputError):
            return self.read_unfinished()
        return None

    def write(self, reached: RunRecord) -> None:
        """Record what the run has reached; `TemporaryError` if another driver has taken it over."""
        self._write(self._conceal(reached))

    def _write(self, content: Mapping[str, Any]) -> None:
        self.records.write({**self._about, "key": self.keys.place, **content})

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
    ) -> RunRecord:
        """Begin a run: its folder, its keys, its first record.

        The seed makes the run key, for tests. `holdout` is the key and the name of a hold-out that
        several runs share; without it, the run key chooses the run's own.
        """
        self.keys.check()
        # next, what an interrupted removal left, which holds the noise of another key; it fails if
        # another driver has the run, and its key, by now
        self.records.begin()
        number = self.publication.count()
        key = (RunKey.fresh() if seed is None else RunKey.insecure(seed, number)).reveal()
        run_id, release = uuid.uuid4().hex, name(key)
        self._commitment = commit(key)
        self._reserve(run_id, job, release)
        self.keys.write(run_id, key)
        if holdout is not None:
            with self.share_key(run_id):
                self.secrets(run_id).write(HOLDOUT_NAME, holdout[0], private=True)
        if self.output.is_local:
            staging = self.staging(run_id)
            for folder in (staging.shards, staging.shards.child(META), staging.actions):
                folder.create()
        reached = RunRecord(
            run_id=run_id,
            job=job,
            release=release,
            input=fingerprint,
            stage="opened",
            sample=f"run {run_id}" if holdout is None else holdout[1],
            fragments=fragments,
            input_version=input_version,
            began=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        self.write(reached)
        return reached

    def publish(
        self,
        reached: RunRecord,
        staging: Staging,
        manifest: Manifest,
        documents: Mapping[str, bytes],
    ) -> None:
        """Stage the rest of a release, record that, and make it appear by one atomic act.

        An `OutputError` if another run has published here, a `TemporaryError` if another driver has
        taken the run over.
        """
        staged = replace(reached, stage="staged")
        if self._records_first:
            self.write(staged)
        self.publication.stage(staging, manifest, documents)
        if not self._records_first:
            self.write(staged)
        self.publication.commit(reached.release, staging, manifest)

    def find_release(self, release: str) -> Manifest | None:
        """Return the manifest of a release that is committed here, or None if it can be made here.

        An `OutputError` if the output holds something else.
        """
        for _ in range(2):  # another driver may commit or abort between the two questions
            manifest, left = self.publication.find(release), self.peek()
            if manifest is not None or self.publication.is_free(name_run(left)):
                return manifest
        self.read_unfinished()  # an error of its own, if the record of a run cannot be read
        what = "this output already exists and was not written by this run"
        raise OutputError(what, self.output.url, SPENT_AGAIN)

    def is_committed(self) -> bool:
        """Return whether what the unfinished run was to release is released."""
        left = self.peek()
        return left is not None and self.publication.find(left.release) is not None

    def has_counts(self) -> bool:
        """Return whether the unfinished run keeps counts, from which a second driver goes on."""
        left = self.peek()
        return left is not None and has_counts(self.secrets(left.run_id))

    def remove(self, run_id: str | None = None, *, force: bool = False) -> None:
        """Remove the run, and what it has written into the output, unless that is released.

        The key goes first, so that anything left behind is useless; last, the memory of the driver
        and the workers is cleared. Another run than that of the given name is left alone. `force`
        also removes a run whose key is elsewhere: what is removed is encrypted with it.
        """
        left = self.peek()  # a record that cannot be read names no key of a store
        if self.publication.series is not None and not self.records.holds():
            return  # it is another driver's now
        if run_id is None or run_id == name_run(left):
            self.remove_key(name_run(left), force=force)
            if left is not None:
                series = left.job if " " in left.release else None
                left.target.open(self.output, series).undo(left.release, left.run_id)
            self.records.clear()
            self._remove_kept()
        forget_everywhere()

    def _remove_kept(self) -> None:
        """Remove what a series keeps, if its first release was not made."""
        if self.publication.series is not None and not self.publication.count():
            self.kept.remove()

    def remove_broken(self) -> bool:
        """Remove a run in a store whose records cannot be read, and return whether that is one."""
        return False

    def remove_rest(self) -> None:
        """Remove a hidden folder without a run; the caller holds the lock."""
        if self.read_unfinished() is None:
            if self.folder.exists():
                self.remove()
            self._remove_kept()

    def sweep(self) -> None:
        """Remove such a folder, which a driver leaves that is killed while it removes its run."""
        with suppress(OutputError, TemporaryError):  # or one is at work
            if self.folder.exists() and self.read_unfinished() is None:
                with self.records.lock():
                    self.remove_rest()


class StoreRun(RunState):
    """A run in a store: numbered records with an encrypted part, and a key that is kept elsewhere."""

    _records_first = (
        True  # a driver that lost the run while it slept writes nothing into the output
    )

    def secrets(self, run_id: str) -> Folder:
        """Return the folder of private files; see `RunState.secrets`."""
        return EncryptedFolder(f"{self.folder.url}/{run_id}", run_id, self._commitment)

    @contextmanager
    def share_key(self, run_id: str) -> Iterator[None]:
        """Share the key; see `RunState.share_key`."""
        key = self.keys.read(run_id)
        if key is None:
            hint = "`dpdask abort` the run and begin again"
            raise InputError("the key of the run is gone", self.output.url, hint)
        with share_key(run_id, key):
            yield

    def remove_key(self, run_id: str | None, *, force: bool = False) -> None:
        """Remove the keys; see `RunState.remove_key`."""
        if run_id is None:
            return
        record = self.records.read() or {}  # none if another driver has just ended the run
        place = ""
        try:
            place = self.keys.place
        except DpdaskError:  # of a ledger that is lost
            if not force:
                raise
        if record.get("run_id") == run_id and record["key"] != place:
            if force:
                return
            what, hint = _describe_lost_key(str(record["key"]), "abort")
            raise SpecError(what, self.output.url, hint)
        self.keys.remove(run_id)
        withdraw_key(run_id)  # a driver that was killed may have left it with the cluster

    def remove_broken(self) -> bool:
        """Remove a run whose records cannot be read, with every key that they name and that is here."""
        try:
            self.read_unfinished()
        except OutputError:
            for name in self.folder.names():
                if name.startswith("run"):
                    data = self.folder.read(name)
                    for run_id in re.findall(rb'"run_id": "([0-9a-f]{32})"', data):
                        self.keys.remove(run_id.decode())
            self.folder.remove()
            return True
        return False

    def _open_records(self) -> RunRecords:
        return NumberedRecords(self.folder, self.output)

    def _reserve(self, run_id: str, job: str, release: str) -> None:
        before = self.peek()
        if before is not None:
            self.keys.remove(before.run_id)  # which an earlier attempt left, and never used
        # the name before the key, so that no key is left that nothing names
        about = {"run_id": run_id, "job": job, "release": release, "stage": "opened"}
        self._write({**about, _PRIVATE: None})

    def _conceal(self, reached: RunRecord) -> dict[str, Any]:
        key = self.keys.read(reached.run_id)
        if key is None:
            raise busy(self.output)  # another driver took the run over, and ended it
        content = reached.to_content()
        public = {name: content.pop(name) for name in _PUBLIC}
        data = json.dumps(content).encode()
        # a length that does not tell how large the numbers are
        n_bytes = len(data) + count_missing_digits(reached.fitted.n_released)
        sealed = encrypt(key, _PRIVATE, data, n_bytes)
        return {**public, _PRIVATE: base64.b64encode(sealed).decode()}

    def _reveal(self, content: dict[str, Any], key: bytes) -> dict[str, Any]:
        sealed = base64.b64decode(content.pop(_PRIVATE))
        revealed: dict[str, Any] = json.loads(decrypt(key, _PRIVATE, sealed))
        return content | revealed


def _describe_lost_key(place: str, verb: str) -> tuple[str, str]:
    """Return what to say of a run whose key is not here, and the ways on."""
    lost = "`dpdask abort --force` ends the run without it: its noise is lost, and its charge stays"
    if place.startswith(LEDGER):
        way = f"{verb} a job that names this ledger; if the ledger is lost"
    else:
        way = f"{verb} the job there; if that place is lost"
    return f"the key of this output's unfinished run is {say_place(place)}", f"{way}, {lost}"


def refuse_moved(output: Folder, moved: Moved) -> SpecError:
    """Return the error of who names the place that an output was moved away from."""
    if not moved.whole:
        what, hint = f"this output is being moved to {moved.moved_to}", "`dpdask move` goes on"
        return SpecError(what, output.url, hint)
    hint = "set output.path to that place, or `dpdask abort` this one to release into it anew"
    return SpecError(f"this output was moved to {moved.moved_to}", output.url, hint)


def open_job_run(job: Job) -> RunState:
    """Return the state of a job's output."""
    series = job.digest if job.file.growing else None
    return RunState(Folder(job.output_url), job.ledger_url, job.target, series)


def open_output_run(output: Folder, ledger_url: str | None = None) -> RunState:
    """Return the state of an output whose job is not known."""
    series, target = KeptFolder(output, ledger_url).read_job() or (None, None)
    return RunState(output, ledger_url, target, series)


# ---- what the ledger is told


def is_undrawn(job: Job, state: RunState) -> bool:
    """Return whether this job's run holds no noise yet, so that nobody can have seen any."""
    reached = state.read()
    if reached is None:
        return True
    secrets = state.secrets(reached.run_id)
    drawn = any(secrets.exists(name) for name in (NOISY_NAME, RELEASE_NAME))
    return reached.stage == "opened" and reached.job == job.digest and not drawn


def charge(job: Job, state: RunState, reached: RunRecord) -> None:
    """Charge the run.

    An `InputError` if noise was drawn and the ledger is not the same as before: the noise is kept
    until the ledger is restored. An `OutputError` if the run has drawn its noise in another copy of
    its folder: to resume from this one would draw it a second time.
    """
    try:
        entry = job.account.intend(reached.run_id, reached.sample)
    except SpecError as error:
        if is_undrawn(job, state):
            raise
        hint = "restore the ledger and run again, or `dpdask abort` the run"
        raise InputError(error.what, error.where, hint) from None
    if entry is None or entry.kind == "intend":
        return
    if reached.stage == "opened" or entry.release not in ("", reached.fitted.release_sha256):
        raise _copy_error(job)


def record_draw(job: Job, reached: RunRecord) -> None:
    """Tell the ledger which noise was drawn, before anything of it is released."""
    try:
        job.account.record_draw(reached.run_id, reached.fitted.release_sha256)
    except SpecError:
        raise _copy_error(job) from None


def finish(job: Job, state: RunState) -> None:
    """End a run whose release is published: its key goes, the ledger is told, the rest goes."""
    left = state.read_unfinished()
    if left is not None and left.job == job.digest:
        state.remove_key(left.run_id)
        job.account.commit(left.run_id)
    state.remove(name_run(left))


def _copy_error(job: Job) -> OutputError:
    drawn = "this run has already drawn its noise; its hidden folder is an old copy"
    what = f"{drawn}, and resuming from it would draw new noise without a new charge"
    hint = "`dpdask abort` it; a new run is charged again"
    return OutputError(what, job.file.output.path, hint)
