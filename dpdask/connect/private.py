"""Local workers whose files are for this user alone: their folder, and the values that they spill to it."""

from __future__ import annotations

import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import dask
from distributed import Nanny, Worker
from distributed.spill import AnyKeyFile, SpillBuffer

from dpdask.errors import OutputError


def scratch_folder() -> Path:
    """Return the folder for what local workers keep on disk, made for this user alone (mode 0700).

    It is one for all runs of a user: each removes its own workers' folders at its end, and Dask removes at the next
    start what the workers of a driver that was killed left there.

    Raises
    ------
    OutputError
        If it cannot be made, or if something that others can reach stands in its place.
    """
    base = Path(dask.config.get("temporary-directory") or tempfile.gettempdir()).absolute()
    folder, mend = base / f"dpdask-{os.getuid()}", "set Dask's temporary-directory to a folder of your own"
    try:
        base.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        found = folder.lstat()
    except OSError:
        raise OutputError("no folder can be made here for the workers' files", str(folder), mend) from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise OutputError("this is not a folder of this user alone (mode 0700), as the workers' files need", str(folder), mend)
    return folder


class PrivateFiles(AnyKeyFile):  # type: ignore[misc]  # distributed is untyped
    """Spilled values as files of mode 0600, from the moment they are made, whatever the process's umask is.

    The umask itself stays: shards are for others to read.
    """

    def _safe_key(self, key: Any) -> str:
        """Return the name of a value's new file, which is opened next, and make the file for this user alone."""
        name: str = super()._safe_key(key)
        Path(self.directory, name).touch(mode=0o600, exist_ok=False)
        return name


class PrivateWorker(Worker):  # type: ignore[misc]  # distributed is untyped
    """A worker that spills to `PrivateFiles`: for `dask worker --worker-class`, too."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if isinstance(self.data, SpillBuffer):  # without a memory limit, nothing is spilled
            files = self.data.slow.data
            files.d = PrivateFiles(files.d.directory)


class PrivateNanny(Nanny):  # type: ignore[misc]  # distributed is untyped
    """A nanny of `PrivateWorker`s."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, worker_class=PrivateWorker, **options)
