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
    check_cluster,
    hide_user,
    make_security,
    open_client,
    replace_scheduler,
)
from dpdask.engine.compute import INSECURE_KEY, PATIENCE_KEY

__all__ = ["check_cluster", "open_cluster"]


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
    check_cluster(cluster)
    if isinstance(cluster, Synchronous):
        # by its name, Dask would import distributed first
        with dask.config.set(scheduler=dask.local.get_sync):
            yield "this process"
    elif isinstance(cluster, Threads):
        with dask.config.set(scheduler=dask.threaded.get, num_workers=cluster.workers):
            yield "threads of this process"
    elif isinstance(cluster, Address):
        assert cluster.address is not None
        allowed = dask.config.set({INSECURE_KEY: cluster.insecure})
        with allowed, open_client(cluster.address, make_security(cluster.tls)):
            yield f"the scheduler at {hide_user(cluster.address)}"
    else:
        from dpdask.connect.private import OPENERS

        settings = {INSECURE_KEY: getattr(cluster, "insecure", False)}
        if not isinstance(cluster, Local):
            settings[PATIENCE_KEY] = 60.0 * cluster.patience_minutes
        opener: Any = OPENERS[cluster.kind]
        with dask.config.set(settings), opener(cluster) as name:
            yield name
