"""Connect to the Dask scheduler that a job's `cluster:` block names; each kind imports what it needs only when it is used."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import dask

from dpdask.connect.address import check_address, replace_scheduler
from dpdask.errors import SpecError, TemporaryError
from dpdask.jobs.spec import Cluster

# Dask has workers hand every large array back to the system at once; kernels that need the next one a moment later then
# spend half their time on page faults. Here up to 128 MiB are kept.
_MALLOC = {
    "MALLOC_TRIM_THRESHOLD_": 2**27,
    "MALLOC_MMAP_THRESHOLD_": 2**26,
    "OMP_NUM_THREADS": 1,
    "MKL_NUM_THREADS": 1,
    "OPENBLAS_NUM_THREADS": 1,
}


def check_cluster(cluster: Cluster, scheduler: str | None = None) -> tuple[str, ...]:
    """Return warnings for the steward about who else can reach the scheduler that a job names; do not connect to it.

    Parameters
    ----------
    cluster, scheduler
        As for `open_cluster`.

    Raises
    ------
    SpecError
        If an address is needed but not given, or is open to the network without `insecure: true`.
    """
    return check_address(replace_scheduler(cluster, scheduler))


@contextmanager
def open_cluster(cluster: Cluster, scheduler: str | None = None) -> Iterator[str]:
    """Run the block on the scheduler that a job asks for, and yield a short description of it.

    Parameters
    ----------
    cluster
        The job's `cluster:` block.
    scheduler
        An address that replaces it, from the command line.

    Raises
    ------
    SpecError
        If an address is needed but not given, or is open to the network without `insecure: true`.
    OutputError
        If no folder that only this user can read can be made for local workers' files.
    TemporaryError
        If the scheduler cannot be reached.

    Privacy
    -------
    Whoever can connect to a scheduler or a worker can run code as the user who started it. Local processes use TLS with
    certificates made for this run, and serve no HTTP pages. The certificates are kept in memory; Dask writes them for a moment
    to a folder of mode 0700 each time it builds a TLS context.
    """
    cluster = replace_scheduler(cluster, scheduler)
    check_address(cluster)
    if cluster.kind == "synchronous":
        with dask.config.set(scheduler="synchronous"):
            yield "this process"
    elif cluster.kind == "threads":
        with dask.config.set(scheduler="threads", num_workers=cluster.workers):
            yield "threads of this process"
    elif cluster.kind == "local":
        with _local(cluster) as description:
            yield description
    else:
        with _address(cluster) as description:
            yield description


@contextmanager
def _local(cluster: Cluster) -> Iterator[str]:
    from distributed import Client, LocalCluster
    from distributed.security import Security

    from dpdask.connect.private import PrivateNanny, scratch_folder

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
        # Dask gives a worker that dies up for good unless it is back after 15 s; on a busy machine that ends with no workers
        "distributed.deploy.lost-worker-timeout": "1h",
        "distributed.nanny.pre-spawn-environ": _MALLOC,
        # even without a dashboard, Dask's HTTP servers show everybody what runs
        "distributed.scheduler.http.routes": [],
        "distributed.worker.http.routes": [],
        # scheduler and nannies put their folder first in sys.path
        "temporary-directory": str(scratch_folder()),
    }
    with (
        dask.config.set(settings),
        LocalCluster(n_workers=workers, threads_per_worker=cluster.threads_per_worker, **options) as local,
        Client(local),
    ):
        yield f"{workers} local processes"


@contextmanager
def _address(cluster: Cluster) -> Iterator[str]:
    from distributed import Client

    try:
        # not the default client of this process: one that could not be reached would stay it
        client = Client(cluster.address, timeout=dask.config.get("distributed.comm.timeouts.connect"), set_as_default=False)
    except TypeError:  # what distributed says of a tls:// address without certificates
        raise SpecError("a tls:// address needs certificates", cluster.address, "set Dask's distributed.comm.tls configuration") from None
    except (OSError, TimeoutError, ValueError):
        raise TemporaryError("the scheduler cannot be reached", cluster.address, "check the address, and that it runs") from None
    with client, dask.config.set(scheduler=client):
        yield f"the scheduler at {cluster.address}"
