"""Workers that are started for a run: their settings, and files that only this user can read."""

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
from dpdask.startup import collect_rarely

_ENVIRONMENT = {"OMP_NUM_THREADS": 1, "MKL_NUM_THREADS": 1, "OPENBLAS_NUM_THREADS": 1}


def worker_settings() -> dict[str, Any]:
    """Return Dask's settings for workers that are started for a run: one thread for each library, no HTTP pages and nothing for them."""
    return {
        "distributed.nanny.pre-spawn-environ": _ENVIRONMENT,
        "distributed.worker.http.routes": [],
        "distributed.worker.profile.enabled": False,
        "distributed.admin.tick.interval": "500ms",  # how often each process checks whether its event loop is late; Dask's default is 20 ms
    }


def scratch_folder() -> Path:
    """Return the folder for the files of local workers, which only this user can read (mode 0700); make it if needed.

    All runs of a user share it. Each run removes its own workers' folders at its end. If a driver was killed, Dask removes
    its workers' folders at the next start.

    Raises
    ------
    OutputError
        If it cannot be made, or if others can read or write what is there.
    """
    base = Path(dask.config.get("temporary-directory") or tempfile.gettempdir()).absolute()
    folder, hint = base / f"dpdask-{os.getuid()}", "set Dask's temporary-directory to a folder of your own"
    try:
        base.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        found = folder.lstat()
    except OSError:
        raise OutputError("no folder for the workers' files can be made here", str(folder), hint) from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise OutputError("the workers' files need a folder that only this user can read (mode 0700), and this is not one", str(folder), hint)
    return folder


class PrivateFiles(AnyKeyFile):  # type: ignore[misc]  # distributed is untyped
    """Store spilled values in files that have mode 0600 from the start, whatever the process's umask is.

    The umask is not changed, because others may read shards.
    """

    def _safe_key(self, key: Any) -> str:
        """Create the file for a value with mode 0600 and return its name; the caller opens it next."""
        name: str = super()._safe_key(key)
        Path(self.directory, name).touch(mode=0o600, exist_ok=False)
        return name


class PrivateWorker(Worker):  # type: ignore[misc]  # distributed is untyped
    """A worker that spills to `PrivateFiles` and collects garbage rarely; also for `dask worker --worker-class`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        collect_rarely()
        super().__init__(*args, **options)
        if isinstance(self.data, SpillBuffer):  # without a memory limit, nothing is spilled
            files = self.data.slow.data
            files.d = PrivateFiles(files.d.directory)


class PrivateNanny(Nanny):  # type: ignore[misc]  # distributed is untyped
    """A nanny of `PrivateWorker`s."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, worker_class=PrivateWorker, **options)
