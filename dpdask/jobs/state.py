"""The state of a run, beside its output: what was fitted, what is staged, and on a file system the run key; gone when the run is committed."""

from __future__ import annotations

import base64
import json
import uuid
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, cast

from dpdask.engine.compute import forget_everywhere, share_key
from dpdask.engine.fit import Fitted
from dpdask.engine.work import HOLDOUT_NAME
from dpdask.engine.write import Staging
from dpdask.errors import InputError, OutputError, SpecError
from dpdask.io.encrypted import EncryptedFolder, decrypt, encrypt
from dpdask.io.manifest import CARD_NAME, MANIFEST_NAME, META, SUCCESS_NAME, Manifest
from dpdask.io.storage import Folder
from dpdask.jobs.records import STATE_FORMAT, LockedRecord, NumberedRecords, RunRecords, busy, unreadable
from dpdask.jobs.run_keys import LEDGER, find_keys
from dpdask.streams import STREAM_FORMAT, RunKey
from dpdask.version import __version__

Stage = Literal["opened", "fitted", "staged"]
_ABOUT = ("format", "version", "streams", "key")
_PUBLIC = ("run_id", "job", "stage", "number")
_PRIVATE = "private"
_NAME_DIGITS = 12


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
    number
        Which release of a growing table this is; 0 for the first, and for other jobs.
    fragments
        The ids of the fragments that are released, if the table grows.
    changed
        As in `Fitted`, but only in the process that passed the barrier: the state file does not contain it.
    """

    run_id: str
    job: str
    input: str
    stage: Stage
    number: int = 0
    fragments: tuple[str, ...] = field(default=(), repr=False)
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

    On a file system, shards are staged in this folder, and a rename publishes them all at once. In an object store they are written
    once, under names of the run's own, where they will stay; the manifest, which is created only if it does not exist, commits them.

    Parameters
    ----------
    output
        The output folder.
    ledger_url
        The ledger that the job is charged to, if any: it keeps the keys of runs whose output is in a store.

    Privacy
    -------
    On a file system, whoever can read this folder can undo the noise, so it is created for this user alone. In a store, its private
    files are encrypted with the run key, which is not in the store.
    """

    def __init__(self, output: Folder, ledger_url: str | None = None) -> None:
        self.output = output
        self.folder = output.sibling(".", ".dpdask")
        self.keys = find_keys(self.folder, ledger_url)
        self._records: RunRecords = (LockedRecord if output.is_local else NumberedRecords)(self.folder, output)

    @property
    def number(self) -> int:
        """The number of the release of a growing table; 0 for other jobs."""
        return 0

    def is_released(self) -> bool:
        """Return whether the release of this run is published."""
        return Manifest.read(self.output) is not None

    def secrets(self, run_id: str) -> Folder:
        """Return the folder of a run's private files, as tasks are told of it."""
        return self.folder if self.output.is_local else EncryptedFolder(self.folder.url, run_id)

    def staging(self, run_id: str) -> Staging:
        """Return where a run stages what it will publish, and where it records what is staged.

        Names or folders are the run's own: a task of an aborted run that is still at work somewhere can never write into another
        run's release.
        """
        actions = self.secrets(run_id).child(f"actions-{run_id}")
        if self.output.is_local:
            return Staging(shards=self.folder.child(f"publish-{run_id}"), actions=actions)
        return Staging(shards=self.output, actions=actions, run=run_id[:_NAME_DIGITS])

    def read(self) -> Progressed | None:
        """Return what the run has reached, or None if there is no run.

        Raises
        ------
        OutputError
            If the state is of another version of this package.
        InputError
            If the run's key is elsewhere, so that the run cannot go on here.
        """
        content = self._records.read()
        if content is None:
            return None
        place = self._check_versions(content)
        if place != self.keys.place:
            where = "in a ledger" if place == LEDGER else "on another machine, or of another user"
            what = f"the key of this output's unfinished run is {where}, so the run cannot go on here"
            raise InputError(what, self.output.url, "run the job there, or `dpdask abort` this output")
        try:
            key = self.keys.read(str(content["run_id"]))
            if key is None:
                return None  # the rest of a run that was being removed
            values = {name: value for name, value in content.items() if name not in _ABOUT}
            if not self.output.is_local:
                values |= json.loads(decrypt(key, _PRIVATE, base64.b64decode(values.pop(_PRIVATE))))
            return Progressed(**values | {name: tuple(values[name]) for name in ("n_released", "fragments")})
        except (ValueError, KeyError, TypeError, AttributeError):
            raise unreadable(self.folder) from None

    def _check_versions(self, content: Mapping[str, Any]) -> str:
        """Return the place of the run's key, after checking that this version of the package can go on with the run."""
        if content.get("format") != STATE_FORMAT or not {*_ABOUT, *_PUBLIC} <= set(content):
            raise unreadable(self.folder)
        if (content["version"], content["streams"]) != (__version__, STREAM_FORMAT):
            what = f"the unfinished run of this output was begun by dpdask {content['version']}, and this is {__version__}"
            raise OutputError(what, self.folder.url, "go on with that version, or `dpdask abort` it and run again")
        return str(content["key"])

    def read_stage(self) -> tuple[str, Stage] | None:
        """Return the name of the unfinished run and its stage, for which no key is needed; None if there is no run.

        Raises
        ------
        OutputError
            If the state is of another version of this package.
        """
        content = self._records.read()
        if content is None:
            return None
        if not set(_PUBLIC) <= set(content):
            raise unreadable(self.folder)
        return str(content["run_id"]), cast("Stage", content["stage"])

    def write(self, reached: Progressed) -> None:
        """Record what the run has reached.

        Raises
        ------
        TemporaryError
            If another driver has taken the run over.
        """
        content = asdict(replace(reached, changed={}))
        del content["changed"]
        if not self.output.is_local:
            key = self.keys.read(reached.run_id)
            if key is None:
                raise busy(self.output)  # another driver took the run over, and ended it
            private = {name: content.pop(name) for name in list(content) if name not in _PUBLIC}
            content[_PRIVATE] = base64.b64encode(encrypt(key, _PRIVATE, json.dumps(private).encode())).decode()
        self._records.write({"format": STATE_FORMAT, "version": __version__, "streams": STREAM_FORMAT, "key": self.keys.place, **content})

    def open(
        self,
        job: str,
        fingerprint: str,
        seed: int | None,
        holdout: tuple[bytes, str] | None = None,
        *,
        fragments: tuple[str, ...] = (),
    ) -> Progressed:
        """Begin a run: its folder, its keys, its first record.

        Parameters
        ----------
        job, fingerprint
            The job's digest, and the input's.
        seed
            Makes the run key, for tests; None for a fresh one.
        holdout
            The key and the name of a hold-out that several runs share; if None, the run key chooses the run's own hold-out.
        fragments
            As in `Progressed`.

        A key that an earlier attempt left without a record was never used, and is replaced. What a removal that was
        interrupted left is removed: it holds the noise of another key.
        """
        self._records.begin()
        number = self.number
        key = (RunKey.fresh() if seed is None else RunKey.insecure(seed, number)).reveal()
        run_id = uuid.uuid4().hex
        self.keys.write(run_id, key)
        with self.share_key(run_id):
            if holdout is not None:
                self.secrets(run_id).write(HOLDOUT_NAME, holdout[0], private=True)
        if self.output.is_local:
            staging = self.staging(run_id)
            for folder in (staging.shards, staging.shards.child(META), staging.actions):
                folder.create()
        sample = f"run {run_id}" if holdout is None else holdout[1]
        reached = Progressed(run_id=run_id, job=job, input=fingerprint, stage="opened", sample=sample, number=number, fragments=fragments)
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
            raise InputError("the key of the run is gone", self.output.url, "`dpdask abort` the run and begin again")
        with share_key(run_id, key):
            yield

    def publish(self, reached: Progressed, manifest: Manifest, card: bytes) -> None:
        """Make a release appear: by one rename, or by the creation of its manifest.

        Parameters
        ----------
        reached
            The run, whose shards are staged.
        manifest
            The list of its shards.
        card
            The release card.

        Raises
        ------
        OutputError
            If another run has published here.
        """
        shards = self.staging(reached.run_id).shards
        if not self.output.is_local:
            shards.write(CARD_NAME, card)
            if not shards.put_new(MANIFEST_NAME, manifest.to_bytes()):
                raise OutputError("another run has released into this output", self.output.url, "choose another output.path")
            shards.write(SUCCESS_NAME, b"")
            return
        for name, data in ((CARD_NAME, card), (MANIFEST_NAME, manifest.to_bytes()), (SUCCESS_NAME, b"")):
            shards.write(name, data)
        self.write(replace(reached, stage="staged"))
        _sweep(shards, manifest)
        shards.level_times()
        shards.move_to(self.output)

    def finish(self) -> None:
        """Write what an interrupted publication left out after the manifest."""
        if not self.output.is_local and not self.output.exists(SUCCESS_NAME):
            self.output.write(SUCCESS_NAME, b"")

    def count_staged(self, run_id: str) -> int:
        """Return how many shards a run has staged."""
        staging = self.staging(run_id)
        return sum(name.endswith(staging.place(".parquet")) for name in staging.shards.names())

    def is_free(self) -> bool:
        """Return whether nothing lies in the output but what this output's unfinished run put there."""
        if self.output.is_file():
            return False
        names = self.output.names()
        if not names or self.output.is_local:
            return not names
        found = self.read_stage()
        return found is not None and all(name == META or name.endswith(self.staging(found[0]).place(".parquet")) for name in names)

    def remove(self) -> None:
        """Remove the run: the key first, so that anything left behind is useless; then clear the memory of the driver and the workers.

        What the run has written into the output is removed too, unless it is released.
        """
        if self.output.is_local:
            self.keys.remove("")
            self.folder.remove(HOLDOUT_NAME)
        else:
            self._remove_from_store()
        self._records.clear()
        forget_everywhere()

    def _remove_from_store(self) -> None:
        """Remove the key, and what the run has written into the output, unless it is released."""
        found = None
        with suppress(OutputError):  # a record that cannot be read names no key
            found = self.read_stage()
        if found is None:
            return
        if (self._records.read() or {}).get("key") == LEDGER != self.keys.place:
            raise SpecError("the key of this run is kept by a ledger", self.output.url, "name it: `dpdask abort OUT --ledger URL`")
        self.keys.remove(found[0])
        if not self.is_released():
            for name in self.output.names():
                if name.endswith(self.staging(found[0]).place(".parquet")):
                    self.output.remove(name)
            if not self.number:
                self.output.remove(CARD_NAME)

    def holds_run(self) -> bool:
        """Return whether the run is still this driver's; see `RunRecords.holds`."""
        return self._records.holds()

    def lock(self) -> AbstractContextManager[None]:
        """Keep other drivers away from the run; see `RunRecords.lock`."""
        return self._records.lock()  # type: ignore[no-any-return]  # of either class


def _sweep(publish: Folder, manifest: Manifest) -> None:
    """Remove what a worker or a driver that was killed left half written, so that only the release is published."""
    whole = {shard.name for shard in manifest.shards} | {META, SUCCESS_NAME}
    for name in publish.names():
        if name not in whole:
            publish.remove(name)
    for name in publish.child(META).names():
        if f"{META}/{name}" not in (CARD_NAME, MANIFEST_NAME):
            publish.child(META).remove(name)
