"""Worker processes of this machine, for this user alone."""

from __future__ import annotations

import logging
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import dask
from distributed import Nanny, Worker
from distributed.spill import AnyKeyFile, SpillBuffer

from dpdask.connect.spec import Local
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

    All runs of a user share it. Each run removes its own workers' folders at its end. If a driver
    was killed, Dask removes its workers' folders at the next start.
    """
    base = Path(dask.config.get("temporary-directory") or tempfile.gettempdir()).absolute()
    folder, hint = (
        base / f"dpdask-{os.getuid()}",
        "set Dask's temporary-directory to a folder of your own",
    )
    try:
        base.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        found = folder.lstat()
    except OSError:
        raise OutputError(
            "no folder for the workers' files can be made here", str(folder), hint
        ) from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise OutputError(
            "the workers' files need a folder that only this user can read (mode 0700), and this is not one",
            str(folder),
            hint,
        )
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


@contextmanager
def open_workers(cluster: Local) -> Iterator[str]:
    """Run the block on worker processes of this machine; yield a description of them."""
    from distributed import Client, LocalCluster
    from distributed.security import Security

    workers = cluster.workers or dask.system.CPU_COUNT
    # TLS, because every user of this machine can reach the loopback; no dashboard (None would mean port 8787, and a warning if it is in use)
    options: dict[str, Any] = {
        "host": "127.0.0.1",
        "protocol": "tls",
        "security": Security.temporary(),
        "dashboard_address": "127.0.0.1:0",
        "scheduler_kwargs": {"dashboard": False},
        "worker_class": PrivateNanny,
        "silence_logs": logging.CRITICAL,
    }
    settings = {
        **worker_settings(),
        # Dask gives a worker that dies up for good unless it is back after 15 s; on a busy machine that ends with no workers
        "distributed.deploy.lost-worker-timeout": "1h",
        # even without a dashboard, Dask's HTTP servers show everybody what runs
        "distributed.scheduler.http.routes": [],
        # scheduler and nannies put their folder first in sys.path
        "temporary-directory": str(scratch_folder()),
    }
    with (
        dask.config.set(settings),
        LocalCluster(
            n_workers=workers, threads_per_worker=cluster.threads_per_worker, **options
        ) as local,
        Client(local, direct_to_workers=True),
    ):
        yield f"{workers} local processes"
