"""Where the key of an unfinished run is kept: beside a local output, else in the ledger's database or in the user's own folder.

The key never lies in an object store. A store that keeps old versions would keep it after its removal, and whoever reads the
store could then undo the noise.
"""

from __future__ import annotations

import os
import re
import uuid
from hashlib import blake2b
from pathlib import Path
from typing import Protocol

from dpdask.errors import DpdaskError, OutputError
from dpdask.io.faults import storage_faults
from dpdask.io.private import KEY_NAME, PrivateFolder, check_key, commit
from dpdask.io.storage import Folder
from dpdask.streams import RunKey

LEDGER = "ledger"


class RunKeys(Protocol):
    """A place for the keys of unfinished runs."""

    @property
    def place(self) -> str:
        """The place's name in the record of a run: a run goes on only where its key is."""

    def write(self, run_id: str, secret: bytes) -> None:
        """Keep a run's key.

        Parameters
        ----------
        run_id
            The name of the run.
        secret
            Its key, 32 bytes.
        """

    def read(self, run_id: str) -> bytes | None:
        """Return a run's key, or None if it is not here."""

    def remove(self, run_id: str) -> None:
        """Remove a run's key; nothing happens if it is not here."""


class FolderKeys:
    """The key in the run's own hidden folder, on a file system: mode 0600, and gone when it is removed.

    Parameters
    ----------
    folder
        The hidden folder of the output.
    """

    place = "folder"

    def __init__(self, folder: Folder) -> None:
        self._folder = folder

    def write(self, run_id: str, secret: bytes) -> None:
        """Write the key; see `RunKeys.write`."""
        del run_id
        check_key(self._folder.claim(KEY_NAME, secret), commit(secret), self._folder.url)

    def read(self, run_id: str) -> bytes | None:
        """Return the key; see `RunKeys.read`."""
        del run_id
        return self._folder.read(KEY_NAME) if self._folder.exists(KEY_NAME) else None

    def remove(self, run_id: str) -> None:
        """Remove the key; see `RunKeys.remove`."""
        del run_id
        self._folder.remove(KEY_NAME)


class HostKeys:
    """The keys in a folder of this user on this machine (mode 0700): `dpdask/keys` in `$XDG_STATE_HOME`, or in `~/.local/state`."""

    def __init__(self) -> None:
        base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
        self._folder = PrivateFolder(f"file://{Path(base).absolute().as_posix()}/dpdask/keys")

    @property
    def place(self) -> str:
        """A random name of the folder, made once."""
        self._make()
        return f"host {self._folder.claim('name', uuid.uuid4().hex.encode()).decode()}"

    def write(self, run_id: str, secret: bytes) -> None:
        """Write the key; see `RunKeys.write`."""
        self._make()
        self._folder.write(check_run_id(run_id), secret, private=True)

    def read(self, run_id: str) -> bytes | None:
        """Return the key; see `RunKeys.read`."""
        return self._folder.read(run_id) if self._folder.exists(check_run_id(run_id)) else None

    def remove(self, run_id: str) -> None:
        """Remove the key; see `RunKeys.remove`."""
        self._folder.remove(check_run_id(run_id))

    def find_secret(self) -> bytes:
        """Return a secret of this user on this machine, made once."""
        self._make()
        secret = self._folder.claim("secret", fresh := RunKey.fresh().reveal())
        if len(secret) != len(fresh):  # a shorter one could be guessed
            raise OutputError("this secret is damaged", str(self._folder.local_path / "secret"), "remove it")
        return secret

    def _make(self) -> None:
        path = self._folder.local_path
        with storage_faults(str(path)):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = path.lstat()
        if path.is_symlink() or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            what = "the folder for the keys of unfinished runs must belong to this user alone (mode 0700)"
            raise OutputError(what, str(path), "correct it, or set XDG_STATE_HOME to another folder")


def hide_name(name: str) -> str:
    """Return another name that this user alone can compute, and on this machine; a random one where no secret can be kept."""
    try:
        return blake2b(name.encode(), key=HostKeys().find_secret(), digest_size=16).hexdigest()
    except (DpdaskError, RuntimeError):  # the home is not writable, or there is none
        return uuid.uuid4().hex


class LedgerKeys:
    """The keys in the database of the ledger that the job is charged to, so that any machine can go on with its runs.

    Parameters
    ----------
    url
        The ledger's URL.
    """

    def __init__(self, url: str) -> None:
        from dpdask.privacy.ledger_keys import KeyTable  # SQLAlchemy is for those who have a ledger

        self._table = KeyTable(url)

    @property
    def place(self) -> str:
        """A random name of the table, made once."""
        return f"{LEDGER} {self._table.find_name()}"

    def write(self, run_id: str, secret: bytes) -> None:
        """Write the key; see `RunKeys.write`."""
        self._table.write(run_id, secret)

    def read(self, run_id: str) -> bytes | None:
        """Return the key; see `RunKeys.read`."""
        return self._table.read(run_id)

    def remove(self, run_id: str) -> None:
        """Remove the key; see `RunKeys.remove`."""
        self._table.remove(run_id)


def check_run_id(run_id: str) -> str:
    """Return what a key is kept under, after checking that it is the name of a run, a series or a job: it comes from a file of the store.

    Raises
    ------
    OutputError
        If it is not.
    """
    if re.fullmatch("(series-|names-)?[0-9a-f]{32,64}", run_id) is None:
        raise OutputError("the record of an unfinished run names no run: somebody has changed it", None, "remove the hidden folder beside the output")
    return run_id


def find_keys(folder: Folder, ledger_url: str | None) -> RunKeys:
    """Return where the keys of an output's runs are kept.

    Parameters
    ----------
    folder
        The hidden folder of the output.
    ledger_url
        The ledger that the job is charged to, if any.
    """
    if folder.is_local:
        return FolderKeys(folder)
    return HostKeys() if ledger_url is None else LedgerKeys(ledger_url)


def say_place(place: str) -> str:
    """Return where a key is that is not here, for messages."""
    return "in a ledger that is not given here" if place.startswith(LEDGER) else "on another machine, or belongs to another user"
