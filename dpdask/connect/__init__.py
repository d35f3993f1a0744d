"""Connect to the Dask scheduler that a job's `cluster:` block names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import dask
import dask.local
import dask.threaded

from dpdask.connect.spec import (
    Address,
    Cluster,
    Local,
    Synchronous,
    Threads,
    check_address,
    open_address,
    replace_scheduler,
)
from dpdask.engine.compute import INSECURE_KEY, PATIENCE_KEY


def check_cluster(cluster: Cluster, scheduler: str | None = None) -> tuple[str, ...]:
    """Return warnings for the steward about who else can reach the scheduler that a job names; do not connect to it."""
    return check_address(replace_scheduler(cluster, scheduler))


@contextmanager
def open_cluster(cluster: Cluster, scheduler: str | None = None) -> Iterator[str]:
    """Run the block on the scheduler that a job asks for, and yield a short description of it.

    Privacy
    -------
    Whoever can connect to a scheduler or a worker can run code as the user who started it. Local
    processes and SLURM jobs use TLS with certificates made for this run, and serve no HTTP pages.
    For local processes the certificates are kept in memory; Dask writes them for a moment to a
    folder of mode 0700 each time it builds a TLS context. For SLURM jobs they lie in a folder of
    mode 0700 until the run ends.
    """
    cluster = replace_scheduler(cluster, scheduler)
    check_address(cluster)
    if isinstance(cluster, Synchronous):
        # by its name, Dask would import distributed first
        with dask.config.set(scheduler=dask.local.get_sync):
            yield "this process"
    elif isinstance(cluster, Threads):
        with dask.config.set(scheduler=dask.threaded.get, num_workers=cluster.workers):
            yield "threads of this process"
    elif isinstance(cluster, Address):
        with dask.config.set({INSECURE_KEY: cluster.insecure}), open_address(cluster) as name:
            yield name
    else:
        from dpdask.connect.private import OPENERS

        settings = {INSECURE_KEY: getattr(cluster, "insecure", False)}
        if not isinstance(cluster, Local):
            settings[PATIENCE_KEY] = 60.0 * cluster.patience_minutes
        opener: Any = OPENERS[cluster.kind]
        with dask.config.set(settings), opener(cluster) as name:
            yield name
