"""Where the key of an unfinished run is kept: beside a local output, else in the ledger's database or in the user's own folder.

The key never lies in an object store. A store that keeps old versions would keep it after its
removal, and whoever reads the store could then undo the noise.
"""

from __future__ import annotations

import json
import os
import re
import uuid
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from dpdask.errors import DpdaskError, InputError, OutputError, SpecError
from dpdask.io.shards import META, list_manifests
from dpdask.io.storage import (
    KEY_NAME,
    Folder,
    PrivateFolder,
    check_key,
    commit,
    hide,
    storage_faults,
)
from dpdask.jobs.output import Publication
from dpdask.jobs.records import busy
from dpdask.streams import RunKey

if TYPE_CHECKING:
    from dpdask.privacy.ledger import KeyTable

LEDGER = "ledger"

# what a service sets in containers that end with their task, and how it calls such a container
_SHORT_LIVED = {
    "KUBERNETES_SERVICE_HOST": "pod",
    "ECS_CONTAINER_METADATA_URI_V4": "ECS task",
    "AWS_BATCH_JOB_ID": "Batch job",
    "CLOUD_RUN_JOB": "Cloud Run job",
    "CONTAINER_APP_JOB_NAME": "Container Apps job",
}
_EMPTY_DIR = "kubernetes.io~empty-dir"  # in the path by which a kubelet mounts such a volume
_OWN_TYPES = {"overlay", "aufs", "tmpfs", "ramfs"}  # of a container's own files, and of memory


class FolderKeys:
    """The key in the run's own hidden folder, on a file system: mode 0600, and gone when it is removed."""

    place = "folder"  # in the record of a run, which goes on only where its key is

    def check(self) -> None:
        """Do nothing: the key lasts as long as what it is for."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder

    def write(self, run_id: str, secret: bytes) -> None:
        """Keep a run's key."""
        del run_id
        check_key(self._folder.claim(KEY_NAME, secret), commit(secret), self._folder.url)

    def read(self, run_id: str) -> bytes | None:
        """Return a run's key, or None if it is not here."""
        del run_id
        return self._folder.read(KEY_NAME) if self._folder.exists(KEY_NAME) else None

    def remove(self, run_id: str) -> None:
        """Remove a run's key, if it is here."""
        del run_id
        self._folder.remove(KEY_NAME)


class HostKeys:
    """The keys in a folder of this user on this machine (mode 0700): `dpdask/keys` in `$XDG_STATE_HOME`, or in `~/.local/state`."""

    def __init__(self) -> None:
        base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
        self._folder = PrivateFolder(f"file://{Path(base).absolute().as_posix()}/dpdask/keys")

    def check(self) -> None:
        """Check, before a run begins, that its key is not kept where it ends with this container, as far as the system tells."""
        path = self._folder.local_path
        container = find_container(path)
        if container is not None:
            what = f"the key of the run would lie in {path.parent.parent}, which ends with this {container}, and then nobody could resume the run that is charged"
            hint = "give the job a `ledger`, which keeps its keys, or set XDG_STATE_HOME to a folder on a volume that lasts"
            raise SpecError(what, "output.path", hint)

    @property
    def place(self) -> str:
        """A random name of the folder, made once."""
        self._make()
        return f"host {self._folder.claim('name', uuid.uuid4().hex.encode()).decode()}"

    def write(self, run_id: str, secret: bytes) -> None:
        """Keep a run's key."""
        self._make()
        self._folder.write(check_run_id(run_id), secret, private=True)

    def read(self, run_id: str) -> bytes | None:
        """Return a run's key, or None if it is not here."""
        return self._folder.read(run_id) if self._folder.exists(check_run_id(run_id)) else None

    def remove(self, run_id: str) -> None:
        """Remove a run's key, if it is here."""
        self._folder.remove(check_run_id(run_id))

    def find_secret(self) -> bytes:
        """Return a secret of this user on this machine, made once."""
        self._make()
        secret = self._folder.claim("secret", fresh := RunKey.fresh().reveal())
        if len(secret) != len(fresh):  # a shorter one could be guessed
            raise OutputError(
                "this secret is damaged", str(self._folder.local_path / "secret"), "remove it"
            )
        return secret

    def _make(self) -> None:
        path = self._folder.local_path
        with storage_faults(str(path)):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = path.lstat()
        if path.is_symlink() or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            what = "the folder for the keys of unfinished runs must belong to this user alone (mode 0700)"
            raise OutputError(
                what, str(path), "correct it, or set XDG_STATE_HOME to another folder"
            )


def find_container(path: Path) -> str | None:
    """Return the kind of container that this process is in, if a folder ends with it; None where it lasts, or nobody says.

    On Linux, the mount of the folder tells: a container's own file system, memory, and an emptyDir of
    Kubernetes end with it; other volumes do not.
    """
    found = next((kind for name, kind in _SHORT_LIVED.items() if name in os.environ), None)
    try:
        mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    if found is None:
        return None
    real, place, last = path.resolve(), Path("/"), ("", "", "")
    for line in mounts:
        words = line.split()  # id, parent, device, root, place, options, …, -, type, …
        root, there = (re.sub(r"\\([0-7]{3})", _octal, word) for word in words[3:5])
        # a later mount hides an earlier one
        if real.is_relative_to(there) and Path(there).is_relative_to(place):
            place, last = Path(there), (there, root, words[words.index("-") + 1])
    there, root, kind = last
    ends = there == "/" or kind in _OWN_TYPES or _EMPTY_DIR in root
    return found if ends else None


def _octal(found: re.Match[str]) -> str:
    return chr(int(found[1], 8))


def hide_name(name: str) -> str:
    """Return another name that this user alone can compute, and on this machine; a random one where no secret can be kept."""
    try:
        return blake2b(name.encode(), key=HostKeys().find_secret(), digest_size=16).hexdigest()
    except (DpdaskError, RuntimeError):  # the home is not writable, or there is none
        return uuid.uuid4().hex


RunKeys: TypeAlias = "FolderKeys | HostKeys | KeyTable"


def check_run_id(run_id: str) -> str:
    """Return what a key is kept under, after checking that it is the name of a run, a series or a job: it comes from a file of the store."""
    if re.fullmatch("(series-|names-)?[0-9a-f]{32,64}", run_id) is None:
        raise OutputError(
            "the record of an unfinished run names no run: somebody has changed it",
            None,
            "remove the hidden folder beside the output",
        )
    return run_id


def find_keys(folder: Folder, ledger_url: str | None) -> RunKeys:
    """Return where the keys of an output's runs are kept."""
    if folder.is_local:
        return FolderKeys(folder)
    return find_remote_keys(ledger_url)


def find_remote_keys(ledger_url: str | None) -> RunKeys:
    """Return where keys are kept that may not lie in a store: with a ledger, any machine can go on with its runs."""
    if ledger_url is None:
        return HostKeys()
    from dpdask.privacy.ledger import KeyTable  # SQLAlchemy is for those who have a ledger

    return KeyTable(ledger_url)


def say_place(place: str) -> str:
    """Return where a key is that is not here, for messages."""
    return (
        "in a ledger that is not given here"
        if place.startswith(LEDGER)
        else "on another machine, or belongs to another user"
    )


Name = Callable[[bytes], str]  # of a release, from the key of its run

_FORMAT = 1
_DIGITS = 16  # of a job's digest
_PERSON = b"dpdask names"
_HINT = "restore it from a backup, or choose another output"


class ReleaseNames:
    """The names of a job's releases in one output.

    Parameters
    ----------
    fingerprint
        The input's fingerprint; None if the job releases once, and its digest is the name.
    ledger_url
        The ledger that the job is charged to, if any: it keeps the key of an output in a store.

    Privacy
    -------
    The key is derived from that of the job's first run, and kept when its release is published: on
    a file system in a hidden folder beside the output (mode 0700), otherwise where run keys are
    kept. A file in the output tells that there is one, and where, so that a job whose key is
    elsewhere is refused: it would release the same rows again. Whoever has the key and all rows but
    one can find out the last one from a name.
    """

    def __init__(
        self, job: str, fingerprint: str | None, output: Folder, ledger_url: str | None
    ) -> None:
        self._job, self._fingerprint = job, fingerprint
        self._output, self._ledger_url = output, ledger_url
        self._about = f"{META}/names-{job[:_DIGITS]}.json"
        self._folder = hide(output, f".dpdask-names-{job[:_DIGITS]}")

    def find(self, publication: Publication) -> str:
        """Return the name of the release of this input; empty if the job has released nothing here yet.

        Parameters
        ----------
        publication
            The output: versions before 1.0.0 named releases without a key, and such a release keeps
            its name.
        """
        if self._fingerprint is None:
            return self._job
        plain = self._name(b"")
        if publication.find(plain) is not None:
            return plain
        key = self._read()
        return "" if key is None else self._name(key)

    def make(self, run_key: bytes) -> str:
        """Return the name that the release of a new run gets.

        Parameters
        ----------
        run_key
            The key of the run; it decides if the job has released nothing here yet.
        """
        if self._fingerprint is None:
            return self._job
        return self._name(self._read() or _derive(run_key))

    def keep(self, release: str, run_key: bytes | None) -> None:
        """Keep the key of the names, before a release is published. Doing it twice changes nothing.

        Parameters
        ----------
        release, run_key
            The name of the release, and the key of its run; None if the key is gone.
        """
        if self._fingerprint is None:
            return
        if run_key is None:
            raise busy(self._output)
        key = self._read()
        if key is None or not self._output.exists(self._about):
            keys, name = self._find_keys(), f"names-{uuid.uuid4().hex}"
            if self._output.is_local:
                self._folder.create()
            keys.write(name, key or _derive(run_key))
            about = {"format": _FORMAT, "id": name, "key": keys.place}
            made = self._output.put_new(self._about, json.dumps(about).encode())
            # beside a local output there is one key, and one driver at a time
            if not made and not self._output.is_local:
                keys.remove(name)  # another driver was faster
        if self._name(self._read() or b"") != release:
            raise busy(self._output)

    def forget(self) -> None:
        """Remove the key and the file that names it."""
        name, place = self._read_about()
        self._find_keys(place).remove(name)  # where the key is elsewhere, it stays
        self._output.remove(self._about)
        self._folder.remove()

    def _name(self, key: bytes) -> str:
        return blake2b(
            f"{self._job} {self._fingerprint}".encode(), digest_size=16, key=key
        ).hexdigest()

    def _read(self) -> bytes | None:
        """Return the key, or None if the job has released nothing here."""
        if not self._output.exists(self._about):
            # the file beside the shards may be lost
            return self._find_keys().read("") if self._output.is_local else None
        name, place = self._read_about()
        keys = self._find_keys(place)
        if keys.place != place:
            raise InputError(
                f"the key for the names of this job's releases is {say_place(place)}",
                self._output.url,
                "run the job there",
            )
        key = keys.read(name)
        if key is None:
            raise InputError(
                "the key for the names of this job's releases is missing", self._output.url, _HINT
            )
        return key

    def _read_about(self) -> tuple[str, str]:
        """Return the name of the key, and its place."""
        try:
            about = json.loads(self._output.read(self._about))
            if about["format"] != _FORMAT:
                raise ValueError
            return check_run_id(str(about["id"])), str(about["key"])
        except (ValueError, KeyError, TypeError):
            what = "the file that records the place of the key for this job's release names cannot be read"
            raise OutputError(
                what,
                f"{self._output.url}/{self._about}",
                "restore it, or use the dpdask that wrote it",
            ) from None

    def _find_keys(self, place: str = LEDGER) -> RunKeys:
        """Return the keys of a place; of a new one, the ledger's if there is one."""
        if self._output.is_local:
            return FolderKeys(self._folder)
        return find_remote_keys(self._ledger_url if place.startswith(LEDGER) else None)


def forget_unused(output: Folder, ledger_url: str | None) -> None:
    """Remove the keys of jobs that have released nothing in an output."""
    jobs = {
        found[1]
        for name in output.child(META).names()
        if (found := re.fullmatch(r"names-([0-9a-f]{16})\.json", name))
    }
    released = {manifest.job[:_DIGITS] for manifest in list_manifests(output)} if jobs else set()
    for job in sorted(jobs - released):
        ReleaseNames(job, "", output, ledger_url).forget()


def _derive(run_key: bytes) -> bytes:
    return blake2b(run_key, digest_size=32, person=_PERSON).digest()
