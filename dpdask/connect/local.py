"""Worker processes of this machine, for this user alone."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import dask

from dpdask.connect.private import PrivateNanny, scratch_folder, worker_settings
from dpdask.connect.spec import Local


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
        LocalCluster(n_workers=workers, threads_per_worker=cluster.threads_per_worker, **options) as local,
        Client(local, direct_to_workers=True),
    ):
        yield f"{workers} local processes"
