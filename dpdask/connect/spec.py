"""The `cluster:` block of a job, the way to its scheduler, and what its workers are asked before a run."""

from __future__ import annotations

import asyncio
import importlib
import ipaddress
import logging
import re
import uuid
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeAlias

import dask
from pydantic import BeforeValidator, Field, field_validator, model_validator

from dpdask.documents import Document
from dpdask.engine.compute import (
    INSECURE_KEY,
    LONELY_SECONDS,
    PATIENCE_KEY,
    by_value,
    call_workers,
    find_client,
    list_workers,
)
from dpdask.errors import DpdaskError, InputError, OutputError, SpecError, TemporaryError
from dpdask.io.filesystems import Options, list_options, set_options
from dpdask.io.fragment import Fragment
from dpdask.io.storage import Folder
from dpdask.startup import LIBRARIES, compare_versions, find_versions, own_versions

if TYPE_CHECKING:
    from distributed import Client
    from distributed.security import Security

Option: TypeAlias = str | int | float | bool


class Tls(Document):
    """The files of a client's certificate, as PEM; relative paths are relative to the job's folder."""

    ca: str = Field(min_length=1)
    """The certificate of the authority that signed the scheduler's and the workers'."""
    cert: str = Field(min_length=1)
    """The client's certificate."""
    key: str = Field(min_length=1)
    """The client's private key."""

    def resolve(self, base: Path) -> Self:
        """Return the same files with absolute paths."""
        return self.model_copy(
            update={name: str(base / Path(path).expanduser()) for name, path in self}
        )


class Adaptive(Document):
    """How many workers there are at least and at most; the scheduler asks for as many as its tasks can use."""

    minimum: int = Field(default=0, ge=0)
    """The fewest workers."""
    maximum: int = Field(ge=1)
    """The most workers."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.minimum > self.maximum:
            raise ValueError("minimum is above maximum")
        return self


class Threads(Document):
    """Threads of this process."""

    kind: Literal["threads"] = "threads"
    workers: int | None = Field(default=None, ge=1)
    """How many; as many as there are cores if it is not given."""


class Synchronous(Document):
    """No worker but this process, for finding faults."""

    kind: Literal["synchronous"] = "synchronous"


class Local(Document):
    """Processes of this machine, for this user alone."""

    kind: Literal["local"] = "local"
    workers: int | None = Field(default=None, ge=1)
    """How many; as many as there are cores if it is not given."""
    threads_per_worker: int = Field(default=1, ge=1)
    """The threads of each."""


class Address(Document):
    """A scheduler that is already running."""

    kind: Literal["address"] = "address"
    address: str | None = None
    """Its address; `--scheduler` on the command line replaces it."""
    tls: Tls | None = None
    """This client's certificate; if not given, Dask's own configuration names one."""
    insecure: bool = False
    """Whether a scheduler on another machine may be used that asks for no certificate (`tcp://`)."""


class _Started(Document):
    """Workers that are started for the job, and end with it."""

    workers: int | None = Field(default=None, ge=1)
    """How many workers; either this or `adaptive`."""
    adaptive: Adaptive | None = None
    """The least and the most workers, if the scheduler decides."""
    patience_minutes: float = Field(default=10.0, gt=0)
    """How long to wait for the first worker."""

    @model_validator(mode="after")
    def _one_number(self) -> Self:
        if (self.workers is None) == (self.adaptive is None):
            raise ValueError("give either workers, a fixed number, or adaptive: {minimum, maximum}")
        return self


class Slurm(_Started):
    """Workers as SLURM jobs; what a site needs beside stands in Dask's configuration, below `jobqueue.slurm`."""

    kind: Literal["slurm"] = "slurm"
    threads_per_worker: int = Field(default=1, ge=1)
    """The threads of each worker, and the processors that it asks SLURM for."""
    memory: str
    """What each asks SLURM for, such as `4GB`."""
    walltime: str = "01:00:00"
    """How long SLURM lets one run, `HH:MM:SS` or `D-HH:MM:SS`. A worker hands its work over before
    that, and is replaced.
    """
    partition: str | None = Field(default=None, pattern=r"^[\w.,-]+$")
    """The partition of the workers' jobs, if given."""
    account: str | None = Field(default=None, pattern=r"^[\w.-]+$")
    """The account that the workers' jobs are charged to, if given."""
    shared_folder: str = "."
    """A folder that the workers' machines see under the same path, for the run's certificates;
    relative to the job's folder.
    """

    @property
    def walltime_seconds(self) -> int:
        """The walltime in seconds."""
        days, _, clock = self.walltime.rpartition("-")
        hours, minutes, seconds = map(int, clock.split(":"))
        return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds

    @field_validator("memory")
    @classmethod
    def _check_memory(cls, memory: str) -> str:
        if not re.fullmatch(r"\d+(\.\d+)? ?[KMGT]i?B", memory):
            raise ValueError("a size such as 4GB is expected")
        return memory

    @field_validator("walltime", mode="before")
    @classmethod
    def _check_walltime(cls, walltime: Any) -> Any:
        if isinstance(walltime, int):  # YAML reads 12:00:00 as a number of seconds
            walltime = f"{walltime // 3600:02}:{walltime // 60 % 60:02}:{walltime % 60:02}"
        if not isinstance(walltime, str) or not re.fullmatch(
            r"(\d+-)?\d{1,2}:\d{2}:\d{2}", walltime
        ):
            raise ValueError("a time such as 01:00:00 or 1-00:00:00 is expected")
        return walltime

    @model_validator(mode="after")
    def _long_enough(self) -> Self:
        if self.walltime_seconds < 120:
            raise ValueError("walltime is below two minutes: no worker would do anything")
        return self


class Kubernetes(Document):
    """Workers as pods: a DaskCluster resource, which the operator of dask-kubernetes acts on, is created for the job."""

    kind: Literal["kubernetes"] = "kubernetes"
    manifest: str = Field(min_length=1)
    """The DaskCluster as a YAML file; relative to the job's folder."""
    namespace: str = Field(pattern=r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$")
    """Where it is created."""
    workers: int = Field(ge=1)
    """How many; replaces what the manifest says."""
    patience_minutes: float = Field(default=10.0, gt=0)
    """How long to wait for the scheduler, and for the first worker."""
    tls: Tls
    """This client's certificate, as files of a mounted secret."""


class Gateway(_Started):
    """A cluster of a Dask Gateway server; how to authenticate stands in Dask's configuration, below `gateway.auth`."""

    kind: Literal["gateway"] = "gateway"
    address: str = Field(pattern=r"^https?://")
    """The server's URL."""
    proxy_address: str | None = None
    """The address of its scheduler proxy, if that is another."""
    options: Mapping[str, Option] = Field(default_factory=dict)
    """Options that the server offers, such as an image or the memory of workers."""
    insecure: bool = False
    """Whether a server on another machine may be used without `https`."""


Cluster: TypeAlias = Threads | Synchronous | Local | Address | Slurm | Kubernetes | Gateway
ClusterBlock: TypeAlias = Annotated[
    Cluster,
    Field(discriminator="kind"),
    BeforeValidator(
        lambda block: {"kind": "threads", **block} if isinstance(block, Mapping) else block
    ),
]
"""What stands under `cluster:` in a job; without a kind it is `threads`."""


def place_files(cluster: Cluster, base: Path) -> Cluster:
    """Return a `cluster:` block with its paths made absolute."""
    placed: dict[str, Any] = {
        name: str(base / Path(getattr(cluster, name)).expanduser())
        for name in ("shared_folder", "manifest")
        if hasattr(cluster, name)
    }
    tls: Tls | None = getattr(cluster, "tls", None)
    return cluster.model_copy(update={**placed, **({"tls": tls.resolve(base)} if tls else {})})


# Dask's TLS asks both sides for a certificate, a gateway asks for a password or a token, and
# inproc:// leaves no process
_SAFE = {"tls", "wss", "https", "inproc"}
_GATEWAY = "gateway"  # a gateway's proxy of a scheduler: TLS with certificates of that cluster
_CONNECT_SECONDS = 15.0
_LOGGERS = ("distributed", "distributed.client", "tornado", "tornado.application")


def replace_scheduler(cluster: Cluster, scheduler: str | None) -> Cluster:
    """Return a `cluster:` block with the command line's address for its scheduler, if any."""
    if scheduler is None:
        return cluster
    if isinstance(cluster, Address):
        return cluster.model_copy(update={"address": scheduler})
    return Address(address=scheduler)


def check_cluster(cluster: Cluster, scheduler: str | None = None) -> tuple[str, ...]:
    """Return a warning for the steward about a scheduler without certificates, or a gateway without https; do not connect to it."""
    cluster = replace_scheduler(cluster, scheduler)
    if not isinstance(cluster, Address | Gateway):
        return ()
    if not cluster.address:
        hint = "give the scheduler's address, such as tls://host:8786"
        raise SpecError("the key 'cluster.address' is missing", "cluster", hint)
    scheme, place = _split(cluster.address)
    if scheme in _SAFE:
        return ()
    local, where = is_loopback(place), hide_user(cluster.address)
    if isinstance(cluster, Gateway):
        safe = "https://"
        risk = "without https, anyone on the network path can read the password or token for this gateway"
        warning = "" if local else f"{where}: {risk}"
    else:
        safe = "tls:// with certificates"
        risk = "without TLS, anyone who can reach this scheduler can run code on its workers and read what they read"
        who = "every user of this machine" if local else "anyone who can reach it over the network"
        warning = f"the scheduler at {where} asks for no certificate: {who} can run code on its workers and read what they read"
        if not local:
            warning += ", and anyone on the network path can read what is sent: exact counts, and the key of a run whose output is in a store"
    if not local and not cluster.insecure:
        hint = f"use {safe}, or a cluster of kind {cluster.kind} with insecure: true"
        raise SpecError(risk, where, hint)
    return (f"{warning}; use {safe}",) if warning else ()


def is_exposed(address: str) -> bool:
    """Return whether anyone on the network path can read what is sent to a scheduler or a worker."""
    scheme, place = _split(address)
    return scheme not in {*_SAFE, _GATEWAY} and not is_loopback(place)


def _split(address: str) -> tuple[str, str]:
    """Return an address's scheme, or Dask's default one, and its `host:port`."""
    scheme, _, place = address.rpartition("://")
    default: str = dask.config.get("distributed.comm.default-scheme", "tcp")
    return scheme.lower() or default, place.partition("/")[0]


def is_loopback(place: str) -> bool:
    """Return whether only this machine can reach `host:port`; names but `localhost` are not looked up."""
    host = place.rpartition(":")[0] or place
    if place.startswith("["):
        host = place[1:].partition("]")[0]
    try:
        return host.lower() == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def hide_user(address: str) -> str:
    """Return an address without the user and the password that it may hold."""
    return re.sub(r"//.*@", "//***@", address)


def make_security(tls: Tls | None) -> Security:
    """Return the certificates of a block, or those of Dask's own configuration."""
    from distributed.security import Security

    files = (
        {"tls_ca_file": tls.ca, "tls_client_cert": tls.cert, "tls_client_key": tls.key}
        if tls
        else {}
    )
    try:
        security = Security(require_encryption=True, **files) if tls else Security()
        security.get_connection_args("client")
    except OSError:  # also ssl.SSLError
        hint = "give a readable authority, and a certificate with its key, as PEM files"
        raise SpecError("the certificate's files cannot be used", "cluster.tls", hint) from None
    return security


@contextmanager
def open_client(address: str, security: Security) -> Iterator[None]:
    """Run the block on a scheduler."""
    from distributed import Client
    from distributed.versions import VersionMismatchWarning

    with silence_dask():
        # a Client that cannot connect lingers for a minute, and prints a traceback when it is
        # collected: connect without one first
        with ThreadPoolExecutor(1) as thread:  # the caller may have an event loop of its own
            thread.submit(lambda: asyncio.run(_reach(address, security))).result()
        try:
            with warnings.catch_warnings():
                # `check_workers` tells of it
                warnings.simplefilter("ignore", VersionMismatchWarning)
                # not the default client of this process: one that was lost would stay it
                options = {"timeout": _timeout(), "security": security, "set_as_default": False}
                client = Client(address, **options)
        except OSError:
            raise _unreachable(address) from None
        with client, dask.config.set(scheduler=client):
            yield


@contextmanager
def silence_dask() -> Iterator[None]:
    """Keep the logs of Dask and what is below it from standard error: a lost connection is told in one line."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


async def _reach(address: str, security: Security) -> None:
    from distributed.comm import CommClosedError, connect
    from distributed.comm.core import FatalCommClosedError

    where = hide_user(address)
    what = "scheduler and client do not accept each other's certificates"
    refused = SpecError(what, where, "let one authority sign both")
    options = security.get_connection_args("client")
    try:
        reached = connect(address, timeout=_timeout(), **options)
        comm = await asyncio.wait_for(reached, _timeout() + 1)
        await comm.close()
    except TypeError:  # of distributed, for a tls:// address without certificates
        hint = "give cluster.tls: {ca, cert, key}"
        raise SpecError("a tls:// address needs certificates", where, hint) from None
    except FatalCommClosedError:
        raise refused from None
    except CommClosedError:
        # TLS 1.3 tells a client last that its certificate was refused
        if address.lower().startswith("tls"):
            raise refused from None
        hint = "it may ask for a certificate: use its tls:// address"
        raise TemporaryError("the scheduler closed the connection", where, hint) from None
    except RuntimeError:  # of distributed, for another address where encryption is asked for
        what = "certificates need a tls:// address, and this is not one"
        raise SpecError(what, where, "write tls://") from None
    except (OSError, ValueError, OverflowError):
        raise _unreachable(address) from None


def _timeout() -> float:
    configured = dask.config.get("distributed.comm.timeouts.connect")
    return min(float(dask.utils.parse_timedelta(configured)), _CONNECT_SECONDS)


def _unreachable(address: str) -> DpdaskError:
    hint = "check the address, and that it runs"
    return TemporaryError("the scheduler cannot be reached", hide_user(address), hint)


def import_extra(module: str, kind: str) -> Any:
    """Return a module that is installed only for one kind of cluster."""
    try:
        return importlib.import_module(module)
    except ImportError:
        what = f"the package {module.partition('.')[0]} is not installed"
        raise SpecError(what, f"cluster.kind {kind}", f"install dpdask[{kind}]") from None


# ---- what each worker is asked: its versions, its memory, and what it can read and write

MEMORY_FACTOR = 2
_BASE_BYTES = 400 * 2**20  # a worker's Python and its libraries
_SECONDS = 60.0  # a worker imports the package first, perhaps from a shared file system, or on a busy machine
_HELD_SECONDS = 2.0
_INSTALL = "install the same versions on every worker, and run again"


def check_workers(
    fragments: Sequence[Fragment], *, output: Folder, secrets: Folder | None = None
) -> None:
    """Check that each worker of the active cluster can do a run's work; threads and this process need no check.

    Parameters
    ----------
    fragments
        The input. The first file is opened; the largest row group must fit into a worker's memory.
    output
        A folder into which workers write; it exists. A file `_dpdask-probe-…` is written and
        removed.
    secrets
        The folder of the run's secrets, if workers read one; it exists. The driver writes such a
        file, and each worker reads it. If it is None, the run's key is sent to them.
    """
    client = find_client()
    if client is None or client.asynchronous:
        return
    with _first_worker(client):
        # before one is held: a task that a frozen worker got would hold it once it wakes
        call_workers(client)
        with _held(client):
            if secrets is None:
                _check_encryption(client)
            _check_versions(client)
            largest = max((fragment.n_bytes_decoded for fragment in fragments), default=0)
            _check_memory(client, largest)
            _check_places(client, fragments, output, secrets)


@contextmanager
def _held(client: Client) -> Iterator[None]:
    """Give a worker a task that lasts while workers are asked: to ask is no task, and an adaptive cluster retires workers that have none."""
    from distributed import Event

    name = f"dpdask-probe-{uuid.uuid4().hex[:12]}"
    asked = Event(name, client=client)
    task = client.submit(asked.wait, 3 * _SECONDS, key=name, pure=False)
    patience = _HELD_SECONDS  # if something is wrong, it may be the worker that is held
    try:
        yield
        patience = _SECONDS
    finally:
        # a scheduler that is lost forgets both, and the answers stand
        with suppress(Exception):
            asked.set()
            with suppress(TimeoutError):
                task.result(timeout=patience)
            asked.clear()  # or the scheduler would keep it for good
        task.release()


@contextmanager
def _first_worker(client: Client) -> Iterator[None]:
    """Wait until there is a worker; an adaptive cluster starts one for a task, and retires none that holds the only copy of a result."""
    from distributed import CancelledError

    if _list_workers(client):
        yield
        return
    seconds = dask.config.get(PATIENCE_KEY, LONELY_SECONDS)
    task = client.submit(abs, -1, key=f"dpdask-probe-{uuid.uuid4().hex[:12]}", pure=False)
    try:
        try:
            task.result(timeout=seconds)
        except (TimeoutError, CancelledError, OSError):
            what = f"no worker connected within {seconds:.0f} seconds"
            hint = "check that workers start, and run again"
            raise TemporaryError(what, "cluster", hint) from None
        yield
    finally:
        task.release()


def _check_encryption(client: Client) -> None:
    """Check that nobody on the network path can read a key that is sent to the workers, unless the steward allows it."""
    addresses = [client.scheduler.address, *_list_workers(client)]
    exposed = next(filter(is_exposed, addresses), None)
    if exposed is not None and not dask.config.get(INSECURE_KEY, False):
        what = "the output is in a store, so workers need the run's key, and without TLS anyone on the network path can read it"
        hint = "use tls:// with certificates, or a cluster of kind address with insecure: true"
        raise SpecError(what, hide_user(exposed), hint)


def _check_versions(client: Client) -> None:
    """Check the versions of the workers, and of the scheduler: it unpickles each task, and pickles it again for its worker."""
    wanted = own_versions()
    # asked without sending code: Python cannot run that of another version
    pythons = {address: _find_python(found) for address, found in call_workers(client).items()}
    ask, run = client.scheduler.versions, client._run_on_scheduler
    try:
        asked = client.sync(ask, packages=[], callback_timeout=_SECONDS)
        scheduler = {**wanted, "Python": _find_python(asked)}
        if scheduler == wanted:
            find = by_value(find_versions)
            scheduler = client.sync(run, find, LIBRARIES, callback_timeout=_SECONDS)
    except OSError:
        raise _no_answer() from None
    if differs := compare_versions(scheduler, wanted):
        hint = "install the same versions there as here, and run again"
        raise SpecError(f"the scheduler: {differs}", "cluster", hint)
    found = {address: {**wanted, "Python": python} for address, python in pythons.items()}
    if all(python == wanted["Python"] for python in pythons.values()):
        found = _ask(client, by_value(find_versions), LIBRARIES)
    _refuse(
        [compare_versions(versions, wanted) for versions in found.values()], SpecError, _INSTALL
    )


def _find_python(found: Mapping[str, Any]) -> str:
    return ".".join(found["packages"]["python"].split(".")[:2])


def _check_memory(client: Client, largest: int) -> None:
    """Check that a worker can hold as many of the largest row group as it has threads."""
    short = []
    for worker in _list_workers(client).values():
        n_threads, limit = worker["nthreads"], worker["memory_limit"]
        needed = _BASE_BYTES + MEMORY_FACTOR * largest * n_threads
        has, about = map(dask.utils.format_bytes, (limit, needed))
        what = f"a memory limit of {has}, and the largest row group in {n_threads} threads needs about {about}"
        short.append(what if limit and limit < needed else "")
    hint = "give workers more memory or fewer threads, or write smaller row groups"
    _refuse(short, SpecError, hint)


def _check_places(
    client: Client, fragments: Sequence[Fragment], output: Folder, secrets: Folder | None
) -> None:
    name = f"_dpdask-probe-{uuid.uuid4().hex}"
    try:
        if secrets is not None:
            secrets.write(name, b"", private=True)
        first = fragments[0] if fragments else None
        answers = _ask(client, try_places, list_options(), first, output, secrets, name)
    finally:
        if secrets is not None:
            secrets.remove(name)
    hint = "give workers the same paths or URLs, and the rights of the user who runs this"
    for error in (InputError, OutputError, TemporaryError):
        wrong = [what if code == error.exit_code else "" for code, what in answers.values()]
        _refuse(wrong, error, hint)


async def try_places(*places: Any) -> tuple[int, str]:
    """Return the exit code and the words of what this worker cannot do; 0 if it can do all."""
    # not in the event loop: a storage may hang
    return await asyncio.to_thread(_try_places, *places)


def _try_places(
    stores: Mapping[str, Options],
    first: Fragment | None,
    output: Folder,
    secrets: Folder | None,
    name: str,
) -> tuple[int, str]:
    set_options(stores)
    step, code = "cannot read the first file of the input", InputError.exit_code
    try:
        if first is not None:
            folder, _, file = first.url.rpartition("/")
            with Folder(folder).open(file) as opened:
                opened.read(4)
        step, code = "cannot write into the output's folder", OutputError.exit_code
        mine = f"{name}-{uuid.uuid4().hex}"
        output.write(mine, b"", private=True)
        output.remove(mine)
        step = "cannot read the folder of the run's secrets"
        if secrets is not None:
            secrets.read(name)
    except TemporaryError as error:
        return error.exit_code, f"{step}: {error.what}"
    except Exception:  # a library's message may hold a credential
        return code, step
    return 0, ""


def _ask(client: Client, function: Callable[..., Any], *arguments: Any) -> dict[str, Any]:
    """Return what each worker answers; those that go away meanwhile are left out."""
    try:
        answers = client.run(function, *arguments, on_error="return", callback_timeout=_SECONDS)
    except OSError:  # also TimeoutError
        call_workers(client)
        raise _no_answer() from None
    if any(isinstance(answer, OSError) for answer in answers.values()):
        call_workers(client)  # it names those that are there and say nothing
    there = {name: answer for name, answer in answers.items() if not isinstance(answer, OSError)}
    failed = [
        f"a failure when asked ({type(answer).__name__})" if isinstance(answer, Exception) else ""
        for answer in there.values()
    ]
    _refuse(failed, SpecError, _INSTALL)
    if not there:
        raise _no_answer()
    return there


def _list_workers(client: Client) -> dict[str, Any]:
    try:
        return list_workers(client)
    except OSError:
        raise _no_answer() from None


def _no_answer() -> TemporaryError:
    hint = "check that workers and scheduler run, and run again"
    return TemporaryError("no worker answers", "cluster", hint)


def _refuse(wrong: Sequence[str | None], error: type[DpdaskError], hint: str) -> None:
    """Raise what is wrong with most of the workers: one entry for each, empty if nothing is."""
    counts = Counter(filter(None, wrong)).most_common(1)
    for what, number in counts:
        raise error(f"{number} of {len(wrong)} workers: {what}", "cluster", hint)
