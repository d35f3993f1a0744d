"""Workers that are started for a run and end with it, and whose files only this user can read."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import shlex
import shutil
import socket
import stat
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import dask
import yaml
from distributed import Nanny, Worker
from distributed.spill import AnyKeyFile, SpillBuffer

from dpdask.connect.spec import (
    Gateway,
    Kubernetes,
    Local,
    Slurm,
    hide_user,
    import_extra,
    make_security,
    open_client,
    silence_dask,
)
from dpdask.errors import OutputError, SpecError, TemporaryError
from dpdask.startup import collect_rarely, finish_first, import_locks

fcntl = import_locks()
_LONGEST_MARGIN = 300  # seconds
_REPLACE_EVERY = 10_000  # milliseconds
_POLL_SECONDS = 1.0
_PORT = 8786
_NO_PAGES = {"dashboard": False, "dashboard_address": "127.0.0.1:0"}


def worker_settings() -> dict[str, Any]:
    """Return Dask's settings for workers: one thread for each library, and no HTTP pages."""
    threads = {f"{name}_NUM_THREADS": 1 for name in ("OMP", "MKL", "OPENBLAS")}
    return {
        "distributed.nanny.pre-spawn-environ": threads,
        "distributed.worker.http.routes": [],
        "distributed.worker.profile.enabled": False,
        # how often each process checks whether its event loop is late; Dask's default is 20 ms
        "distributed.admin.tick.interval": "500ms",
    }


def scratch_folder() -> Path:
    """Return the folder for the files of local workers (mode 0700), which all runs of a user share.

    Each run removes its own workers' folders at its end. If a driver was killed, Dask removes its
    workers' folders at the next start.
    """
    base = Path(dask.config.get("temporary-directory") or tempfile.gettempdir()).absolute()
    folder = base / f"dpdask-{os.getuid()}"
    hint = "set Dask's temporary-directory to a folder of your own"
    try:
        base.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        found = folder.lstat()
    except OSError:
        what = "no folder for the workers' files can be made here"
        raise OutputError(what, str(folder), hint) from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        what = "the workers' files need a folder that only this user can read (mode 0700)"
        raise OutputError(f"{what}, and this is not one", str(folder), hint)
    return folder


class PrivateFiles(AnyKeyFile):  # type: ignore[misc]  # distributed is untyped
    """Store spilled values in files that have mode 0600 from the start.

    The umask is not changed, because others may read shards.
    """

    def _safe_key(self, key: Any) -> str:
        name: str = super()._safe_key(key)
        Path(self.directory, name).touch(mode=0o600, exist_ok=False)  # the caller opens it next
        return name


class PrivateWorker(Worker):  # type: ignore[misc]  # distributed is untyped
    """A worker that spills to `PrivateFiles`; also for `dask worker --worker-class`."""

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
def open_local(cluster: Local) -> Iterator[str]:
    """Run the block on worker processes of this machine; yield a description of them."""
    from distributed import Client, LocalCluster
    from distributed.security import Security

    workers = cluster.workers or dask.system.CPU_COUNT
    settings = {
        **worker_settings(),
        # Dask gives a worker that dies up for good unless it is back after 15 s; on a busy machine
        # that ends with no workers
        "distributed.deploy.lost-worker-timeout": "1h",
        # even without a dashboard, Dask's HTTP servers show everybody what runs
        "distributed.scheduler.http.routes": [],
        # scheduler and nannies put their folder first in sys.path
        "temporary-directory": str(scratch_folder()),
    }
    with (
        dask.config.set(settings),
        LocalCluster(
            n_workers=workers,
            threads_per_worker=cluster.threads_per_worker,
            host="127.0.0.1",
            protocol="tls",  # every user of this machine can reach the loopback
            security=Security.temporary(),
            dashboard_address="127.0.0.1:0",  # None would mean port 8787
            scheduler_kwargs={"dashboard": False},
            worker_class=PrivateNanny,
            silence_logs=logging.CRITICAL,
        ) as local,
        Client(local, direct_to_workers=True),
    ):
        yield f"{workers} local processes"


@contextmanager
def close_whole() -> Iterator[ExitStack]:
    """Yield a stack whose callbacks all run at the end of the block, also if SIGTERM comes meanwhile: what they remove runs elsewhere."""
    with ExitStack() as stack:
        try:
            yield stack
        finally:
            with finish_first():
                stack.close()


# ---- SLURM


@contextmanager
def open_slurm(cluster: Slurm) -> Iterator[str]:
    """Run the block on workers that are SLURM jobs; the scheduler runs in this process."""
    from distributed import Client

    jobqueue = import_extra("dask_jobqueue", "slurm")
    if shutil.which("sbatch") is None:
        hint = "run on a machine that submits SLURM jobs"
        raise SpecError("there is no sbatch here", "cluster.kind slurm", hint)
    # the scheduler puts its folder first in sys.path
    settings = {
        "distributed.scheduler.http.routes": [],
        "temporary-directory": str(scratch_folder()),
    }
    sweep_certificates(Path(cluster.shared_folder))
    try:
        folder = Path(tempfile.mkdtemp(prefix=_FOLDER, dir=cluster.shared_folder))  # 0700
    except OSError:
        what = "no folder for the workers' certificates can be made here"
        hint = "set cluster.shared_folder to a folder that all machines see"
        raise OutputError(what, cluster.shared_folder, hint) from None
    with close_whole() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        stack.enter_context(_hold(folder))
        stack.enter_context(silence_dask())
        stack.enter_context(dask.config.set(settings))
        refusals: list[str] = []
        listening = _listen(jobqueue.SLURMCluster, refusals)
        started = stack.enter_context(listening(**slurm_options(cluster, folder)))
        client = stack.enter_context(Client(started, set_as_default=False))
        stack.enter_context(dask.config.set(scheduler=client))
        _ask_slurm(cluster, started, refusals)
        yield "SLURM jobs"


_FOLDER = ".dpdask-slurm-"


@contextmanager
def _hold(folder: Path) -> Iterator[None]:
    """Hold a lock in a folder of certificates: whoever gets it later knows that this driver has ended."""
    path = folder / "driver"
    with path.open("w") as opened:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.rename(_name_lock(folder))  # seen with its lock; locks may count on one host alone
        yield


def _name_lock(folder: Path) -> Path:
    return folder / f"driver-{socket.gethostname()}"


def sweep_certificates(shared: Path) -> None:
    """Remove the certificates that this user's drivers on this host have left which were killed."""
    for folder in shared.glob(f"{_FOLDER}*"):
        with suppress(OSError), _name_lock(folder).open() as opened:
            if folder.lstat().st_uid == os.getuid() and not folder.is_symlink():
                fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)


def find_lifetime(walltime: int) -> tuple[int, int]:
    """Return after how many seconds a worker ends by itself, and by how many more or less.

    It ends before its walltime by at least half a margin of a fifth of it, at most five minutes. In
    that time it hands its results over. Workers that started together do not end together.
    """
    margin = min(walltime // 5, _LONGEST_MARGIN)
    return walltime - margin, margin // 2


def slurm_options(cluster: Slurm, folder: Path) -> dict[str, Any]:
    """Return dask-jobqueue's options: the site's own, and workers with a private folder each."""
    lifetime, stagger = find_lifetime(cluster.walltime_seconds)
    scratch = dask.config.get("jobqueue.slurm.local-directory") or "${TMPDIR:-/tmp}"
    settings = {**worker_settings(), "distributed.comm.require-encryption": True}
    prologue = [
        f"export DASK_{key.replace('-', '_').replace('.', '__').upper()}={shlex.quote(repr(value))}"
        for key, value in settings.items()
    ]
    if os.environ.get("PYTHONSAFEPATH"):  # of a command: sbatch may not hand it on
        prologue.append("export PYTHONSAFEPATH=1")
    prologue += [  # `mktemp -d` gives mode 0700
        f'DPDASK_SCRATCH=$(mktemp -d "{scratch}/dpdask-XXXXXX") || exit 1',
        "trap 'rm -rf \"$DPDASK_SCRATCH\"' EXIT",
    ]
    worker = (
        "--worker-class dpdask.connect.private.PrivateWorker --no-dashboard --dashboard-address "
        f"127.0.0.1:0 --lifetime {lifetime}s --lifetime-stagger {stagger}s"
    )
    site = {name: dask.config.get(f"jobqueue.slurm.{name}") for name in _SITE}
    # certificates made for this run, as files of mode 0600: the jobs' scripts name them
    from distributed.security import Security

    made = Security.temporary()
    texts = {"ca": made.tls_ca_file, "cert": made.tls_worker_cert, "key": made.tls_worker_key}
    paths = {part: folder / f"{part}.pem" for part in texts}
    for part, path in paths.items():
        path.touch(mode=0o600)
        path.write_text(texts[part])
    options = {
        f"tls_{role}_{part}": str(paths[part])
        for role in ("client", "scheduler", "worker")
        for part in ("cert", "key")
    }
    return {
        "cores": cluster.threads_per_worker,
        "processes": 1,
        "memory": cluster.memory,
        "walltime": cluster.walltime,
        "queue": cluster.partition,
        "account": cluster.account,
        "job_name": "dpdask",
        "protocol": "tls://",
        "security": Security(require_encryption=True, tls_ca_file=str(paths["ca"]), **options),
        "local_directory": '"$DPDASK_SCRATCH"',
        "log_directory": site["log-directory"] or str(folder),
        "job_script_prologue": [*site["job-script-prologue"], *prologue],
        "worker_extra_args": [*site["worker-extra-args"], *worker.split()],
        "scheduler_options": {
            **dask.config.get("jobqueue.slurm.scheduler-options", {}),
            **_NO_PAGES,
        },
    }


_SITE = ("log-directory", "job-script-prologue", "worker-extra-args")


def _ask_slurm(cluster: Slurm, started: Any, refusals: list[str]) -> None:
    """Ask for the workers, and again for those that ended: dask-jobqueue replaces none by itself."""
    from distributed.core import Status
    from tornado.ioloop import PeriodicCallback

    def forget_refused() -> bool:
        """Remove the workers that SLURM gave no job, so that they are asked for again."""
        refused = [name for name, job in started.workers.items() if job.job_id is None]
        for name in refused:
            started.workers.pop(name).status = Status.failed  # or the cluster could not be closed
        return bool(refused)

    async def replace() -> None:
        if started.status.name == "running":
            forget_refused()
            await started._correct_state()

    async def start() -> None:
        PeriodicCallback(replace, _REPLACE_EVERY).start()

    _scale(cluster, started)
    if cluster.adaptive is None:
        with suppress(RuntimeError):
            started.sync(started._correct_state)
        if forget_refused():
            words = find_own_words("".join(refusals))
            hint = "check partition, account, memory and walltime"
            raise SpecError(f"SLURM refuses the workers' jobs{words}", "cluster", hint)
    started.sync(start)


def _listen(cluster: Any, refusals: list[str]) -> Any:
    """Return a class of clusters like this one that also notes what is said of refused jobs: dask-jobqueue's goes to a log alone."""

    class Job(cluster.job_cls):  # type: ignore[misc]  # dask-jobqueue is untyped
        async def start(self) -> None:
            try:
                await super().start()
            except RuntimeError as error:
                refusals.append(str(error))
                raise

    return type(cluster.__name__, (cluster,), {"job_cls": Job})


def find_own_words(report: str) -> str:
    """Return what sbatch itself says in dask-jobqueue's report of a refusal, on one line, after a colon; empty if it says nothing."""
    said = re.findall(r"^sbatch: (?:error: )?(.+)$", report, re.MULTILINE)
    return f": {'; '.join(dict.fromkeys(said))}" if said else ""


def _scale(cluster: Slurm | Gateway, started: Any) -> None:
    if cluster.adaptive is None:
        started.scale(cluster.workers)
    else:
        started.adapt(minimum=cluster.adaptive.minimum, maximum=cluster.adaptive.maximum)


# ---- a gateway


@contextmanager
def open_gateway(cluster: Gateway) -> Iterator[str]:
    """Run the block on a cluster of a Dask Gateway server; it brings TLS between its processes."""
    gateway = import_extra("dask_gateway", "gateway")
    client_module = import_extra("dask_gateway.client", "gateway")
    where = hide_user(cluster.address)
    with silence_dask():
        try:
            started = gateway.GatewayCluster(
                address=cluster.address,
                proxy_address=cluster.proxy_address,
                cluster_options=None,
                shutdown_on_close=True,
                **cluster.options,
            )
        except (ValueError, TypeError):
            hint = "check cluster.options and the rights of this user"
            raise SpecError("the gateway refuses the cluster", where, hint) from None
        except client_module.GatewayClusterError:
            what = "the gateway could not start the cluster"
            raise TemporaryError(what, where, "run again") from None
        except client_module.aiohttp.ClientResponseError:
            hint = "set Dask's gateway.auth configuration"
            raise SpecError("the gateway refuses this user", where, hint) from None
        except (client_module.GatewayServerError, client_module.aiohttp.ClientError, OSError):
            hint = "check cluster.address and that it runs"
            raise TemporaryError("the gateway does not answer", where, hint) from None
        with close_whole() as stack:
            stack.enter_context(started)
            client = stack.enter_context(started.get_client(set_as_default=False))
            stack.enter_context(dask.config.set(scheduler=client))
            _scale(cluster, started)
            yield f"a cluster of the gateway at {where}"


# ---- Kubernetes


@contextmanager
def open_kubernetes(cluster: Kubernetes) -> Iterator[str]:
    """Run the block on pods: the operator of dask-kubernetes acts on a resource made for the run.

    `dask_kubernetes.operator.KubeCluster` is not used: it speaks to its scheduler without TLS.
    """
    resource = make_resource(cluster)
    objects = import_extra("dask_kubernetes.operator._objects", "kubernetes")
    kr8s = import_extra("kr8s", "kubernetes")
    security = make_security(cluster.tls)
    address = _scheduler_address(resource["metadata"]["name"], cluster)

    async def act(verb: str) -> None:
        made = await objects.DaskCluster(resource, namespace=cluster.namespace)
        await getattr(made, verb)()

    async def sweep(label: str) -> None:
        """Remove what earlier pods of the same Job have left, which were killed."""
        left = objects.DaskCluster.list(namespace=cluster.namespace, label_selector=label)
        for each in [each async for each in left]:
            await each.delete()

    def remove() -> None:
        # the operator removes an idle cluster too, if the manifest says so
        with suppress(Exception):
            asyncio.run(act("delete"))

    with silence_dask(), close_whole() as stack:
        try:
            if job := resource["metadata"].get("labels", {}).get(_JOB_LABEL):
                asyncio.run(sweep(f"{_JOB_LABEL}={job}"))
            with finish_first():  # or nobody would remove it
                asyncio.run(act("create"))
                stack.callback(remove)
        except (kr8s.ServerError, ValueError):
            what, hint = "the API server refuses the DaskCluster", "the rights of this account"
            raise SpecError(what, cluster.manifest, f"check it, and {hint}") from None
        except (kr8s.APITimeoutError, kr8s.ConnectionClosedError, OSError):
            where = f"namespace {cluster.namespace}"
            raise TemporaryError("the API server does not answer", where, "run again") from None
        end = time.monotonic() + 60 * cluster.patience_minutes
        while True:  # the scheduler may still be starting
            try:
                stack.enter_context(open_client(address, security))
                break
            except TemporaryError:
                if time.monotonic() > end:
                    raise
            time.sleep(_POLL_SECONDS)
        yield f"pods in the namespace {cluster.namespace}"


def make_resource(cluster: Kubernetes) -> dict[str, Any]:
    """Return the DaskCluster of a manifest, with the block's workers and a name of its own.

    In a pod that names itself in its environment, as cluster/kubernetes/job.yaml does, the pod owns
    it: if the pod is removed, so is the cluster.
    """
    try:
        # as the operator reads it: 0440 is a mode
        resource: dict[str, Any] = yaml.safe_load(Path(cluster.manifest).read_text("utf-8"))
        metadata, worker = resource["metadata"], resource["spec"]["worker"]
        if resource["kind"] != "DaskCluster" or not isinstance(metadata["name"], str):
            raise KeyError
        # several runs may be at work in one namespace
        name = metadata["name"] = f"{metadata['name']}-{uuid.uuid4().hex[:5]}"
        # the part of a resource's metadata that names the pod of this driver, and its Job; empty if
        # nobody names them
        pod, uid, job = (
            os.environ.get(f"DPDASK_{name}") for name in ("POD_NAME", "POD_UID", "POD_JOB")
        )
        described: dict[str, Any] = {}
        if job:
            described["labels"] = {**metadata.get("labels", {}), _JOB_LABEL: job}
        if pod and uid:
            owner = {"apiVersion": "v1", "kind": "Pod", "name": pod, "uid": uid}
            described["ownerReferences"] = [owner]
        metadata |= described
        worker["replicas"] = cluster.workers
        resource["spec"]["scheduler"]["service"]["selector"] = {
            "dask.org/cluster-name": name,
            "dask.org/component": "scheduler",
        }
        # the operator would name a tcp:// address
        own = {"name": "DASK_SCHEDULER_ADDRESS", "value": _scheduler_address(name, cluster)}
        for container in worker["spec"]["containers"]:
            container["env"] = [*container.get("env", []), own]
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        what, hint = "the manifest cannot be read", "check cluster.manifest"
        raise SpecError(what, cluster.manifest, hint) from None
    except (KeyError, TypeError):
        what = "this is not a DaskCluster with a name and workers"
        hint = "begin with cluster/kubernetes/cluster.yaml"
        raise SpecError(what, cluster.manifest, hint) from None
    return resource


_JOB_LABEL = "dpdask.org/job"


def _scheduler_address(name: str, cluster: Kubernetes) -> str:
    return f"tls://{name}-scheduler.{cluster.namespace}:{_PORT}"


OPENERS = {
    "local": open_local,
    "slurm": open_slurm,
    "gateway": open_gateway,
    "kubernetes": open_kubernetes,
}
