"""Workers as SLURM jobs, started from a machine that has `sbatch`; the scheduler runs in this process."""

from __future__ import annotations

import os
import shlex
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dask

from dpdask.connect.address import import_extra, silence_dask
from dpdask.connect.local import scratch_folder, worker_settings
from dpdask.connect.spec import Slurm
from dpdask.errors import OutputError, SpecError

if TYPE_CHECKING:
    from distributed.security import Security

_LONGEST_MARGIN = 300  # seconds
_REPLACE_EVERY = 10_000  # milliseconds


@contextmanager
def open_workers(cluster: Slurm) -> Iterator[str]:
    """Run the block on workers that are SLURM jobs; yield a description of them."""
    from distributed import Client

    jobqueue = import_extra("dask_jobqueue", "slurm")
    if shutil.which("sbatch") is None:
        raise SpecError(
            "there is no sbatch here",
            "cluster.kind slurm",
            "run on a machine that submits SLURM jobs",
        )
    # the scheduler puts its folder first in sys.path
    settings = {
        "distributed.scheduler.http.routes": [],
        "temporary-directory": str(scratch_folder()),
    }
    with (
        _shared_folder(cluster.shared_folder) as folder,
        silence_dask(),
        dask.config.set(settings),
        jobqueue.SLURMCluster(**_options(cluster, folder)) as started,
        Client(started, set_as_default=False) as client,
        dask.config.set(scheduler=client),
    ):
        _scale(cluster, started)
        yield "SLURM jobs"


def find_lifetime(walltime: int) -> tuple[int, int]:
    """Return after how many seconds a worker ends by itself, and by how many seconds more or less.

    It ends before its walltime by at least half a margin of a fifth of it, at most five minutes. In
    that time it hands its results over. Workers that started together do not end together.
    """
    margin = min(walltime // 5, _LONGEST_MARGIN)
    return walltime - margin, margin // 2


@contextmanager
def _shared_folder(parent: str) -> Iterator[Path]:
    """Yield a new folder that only this user can read (mode 0700), which is removed at the end."""
    try:
        folder = Path(tempfile.mkdtemp(prefix=".dpdask-slurm-", dir=parent))
    except OSError:
        what = "no folder for the workers' certificates can be made here"
        raise OutputError(
            what, parent, "set cluster.shared_folder to a folder that all machines see"
        ) from None
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _make_security(folder: Path) -> Security:
    """Return certificates made for this run, as files of mode 0600: the jobs' scripts name them."""
    from distributed.security import Security

    made = Security.temporary()
    files = {
        "ca.pem": made.tls_ca_file,
        "cert.pem": made.tls_worker_cert,
        "key.pem": made.tls_worker_key,
    }
    for name, text in files.items():
        (folder / name).touch(mode=0o600)
        (folder / name).write_text(text)
    ca, cert, key = (str(folder / name) for name in files)
    roles = {
        f"tls_{role}_{part}": path
        for role in ("client", "scheduler", "worker")
        for part, path in (("cert", cert), ("key", key))
    }
    return Security(require_encryption=True, tls_ca_file=ca, **roles)


def _options(cluster: Slurm, folder: Path) -> dict[str, Any]:
    lifetime, stagger = find_lifetime(cluster.walltime_seconds)
    scratch = dask.config.get("jobqueue.slurm.local-directory") or "${TMPDIR:-/tmp}"
    settings = {**worker_settings(), "distributed.comm.require-encryption": True}
    environment = [
        f"export DASK_{key.replace('-', '_').replace('.', '__').upper()}={shlex.quote(repr(value))}"
        for key, value in settings.items()
    ]
    if os.environ.get("PYTHONSAFEPATH"):  # of a command: sbatch may not hand it on
        environment.append("export PYTHONSAFEPATH=1")
    # `mktemp -d` gives mode 0700
    private = [
        f'DPDASK_SCRATCH=$(mktemp -d "{scratch}/dpdask-XXXXXX") || exit 1',
        "trap 'rm -rf \"$DPDASK_SCRATCH\"' EXIT",
    ]
    worker = [
        "--worker-class",
        "dpdask.connect.local.PrivateWorker",
        "--no-dashboard",
        "--dashboard-address",
        "127.0.0.1:0",
    ]
    return {
        "cores": cluster.threads_per_worker,
        "processes": 1,
        "memory": cluster.memory,
        "walltime": cluster.walltime,
        "queue": cluster.partition,
        "account": cluster.account,
        "job_name": "dpdask",
        "protocol": "tls://",
        "security": _make_security(folder),
        "local_directory": '"$DPDASK_SCRATCH"',
        "log_directory": dask.config.get("jobqueue.slurm.log-directory") or str(folder),
        "job_script_prologue": [
            *dask.config.get("jobqueue.slurm.job-script-prologue"),
            *environment,
            *private,
        ],
        "worker_extra_args": [
            *dask.config.get("jobqueue.slurm.worker-extra-args"),
            *worker,
            *("--lifetime", f"{lifetime}s", "--lifetime-stagger", f"{stagger}s"),
        ],
        "scheduler_options": {
            **dask.config.get("jobqueue.slurm.scheduler-options", {}),
            "dashboard": False,
            "dashboard_address": "127.0.0.1:0",
        },
    }


def _scale(cluster: Slurm, started: Any) -> None:
    """Ask SLURM for the workers, and go on asking for those that ended: dask-jobqueue replaces none by itself."""
    from tornado.ioloop import PeriodicCallback

    if cluster.adaptive is not None:
        started.adapt(minimum=cluster.adaptive.minimum, maximum=cluster.adaptive.maximum)
    else:
        started.scale(cluster.workers)
        with suppress(RuntimeError):  # sbatch's own words may hold paths
            started.sync(started._correct_state)
        if _forget_refused(started):
            raise SpecError(
                "SLURM refuses the workers' jobs",
                "cluster",
                "check partition, account, memory and walltime",
            )

    async def replace() -> None:
        if started.status.name == "running":
            _forget_refused(started)
            await started._correct_state()

    async def start() -> None:
        PeriodicCallback(replace, _REPLACE_EVERY).start()

    started.sync(start)


def _forget_refused(started: Any) -> bool:
    """Remove the workers that SLURM gave no job, so that they are asked for again; return whether there was one."""
    from distributed.core import Status

    refused = [name for name, job in started.workers.items() if job.job_id is None]
    for name in refused:
        started.workers.pop(name).status = Status.failed  # or the cluster could not be closed
    return bool(refused)
