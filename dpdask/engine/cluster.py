"""The active cluster: what its processes are told and hold, and the window of tasks that its scheduler has at a time."""

from __future__ import annotations

import functools
import queue
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import dask
from dask.base import get_scheduler
from dask.highlevelgraph import HighLevelGraph, MaterializedLayer

from dpdask.channels.laplace import find_scale
from dpdask.channels.optimal import solve_weights
from dpdask.channels.unbiased import solve_unbiased
from dpdask.errors import TemporaryError
from dpdask.io.encrypted import drop_key, exchange_keys, hold_key, list_names
from dpdask.io.filesystems import Options, set_options, use_options
from dpdask.io.parquet import FOOTERS

if TYPE_CHECKING:
    from distributed import Client

Args = ParamSpec("Args")
Result = TypeVar("Result")

WINDOW = 10_000  # tasks; a scheduler that takes tasks in answers nobody
RETRIES = 3
LONELY_SECONDS = 120.0  # an adaptive cluster needs a while for its first worker
PATIENCE_KEY = "dpdask.patience-seconds"  # in Dask's configuration: replaces `LONELY_SECONDS`
INSECURE_KEY = "dpdask.insecure"  # in Dask's configuration: whether a run's key may be sent over connections without TLS
_POLL_SECONDS = 5.0
_PATIENCE_SECONDS = 10.0
_LONG_SECONDS = 300.0  # the bounds of 100 million units are 2.4 GB
_BYTES_A_SECOND = 2**23
_CACHES: list[Any] = [solve_weights, solve_unbiased, find_scale, FOOTERS]


def find_client() -> Client | None:
    """Return the client of the cluster that computes, or None if this process computes."""
    client = getattr(get_scheduler(), "__self__", None)
    if client is None:  # threads, or this one: no need to import distributed
        return None
    from distributed import Client

    return client if isinstance(client, Client) else None


def is_worker() -> bool:
    """Return whether this is a task on a worker of a cluster."""
    if "distributed" not in sys.modules:
        return False
    from distributed import get_worker

    with suppress(ValueError):
        return get_worker() is not None
    return False


@contextmanager
def share_options(options: Mapping[str, Options]) -> Iterator[None]:
    """Open buckets with these options until the block ends, in this process; workers keep them, also those that join later.

    Two jobs that use one bucket on one cluster at the same time must give it the same options.

    Parameters
    ----------
    options
        Options by bucket. Secrets stand in them by the names of environment variables; each worker
        looks its own up.
    """
    with use_options(options):
        client = _find_blocking_client() if options else None  # to look for one imports distributed
        if client is not None:
            _tell_workers(client, options)
        yield


def _tell_workers(client: Client, options: Mapping[str, Options]) -> None:
    from distributed import WorkerPlugin

    class StoreOptions(WorkerPlugin):  # type: ignore[misc]  # distributed ships no types
        """Sets the options of a bucket on each worker, also on those that join later."""

        def __init__(self, options: Mapping[str, Options]) -> None:
            self.options = options

        def setup(self, worker: Any) -> None:  # noqa: ARG002 - dask calls it by this name
            set_options(self.options)

    for place, found in options.items():
        try:
            client.register_plugin(StoreOptions({place: found}), name=f"dpdask-store-{place}")
        except Exception:
            what = "the workers could not be told how to open the store"
            hint = "check that each has this version of dpdask"
            raise TemporaryError(what, place, hint) from None


def remember(maxsize: int) -> Callable[[Callable[Args, Result]], Callable[Args, Result]]:
    """Return a decorator for what reads a private file: each process reads it once, until `forget_everywhere`."""

    def remember(function: Callable[Args, Result]) -> Callable[Args, Result]:
        cached = functools.lru_cache(maxsize)(function)
        _CACHES.append(cached)
        return functools.wraps(function)(cached)  # type: ignore[return-value]  # the cache forgets the types

    return remember


@contextmanager
def share_key(run_id: str, secret: bytes) -> Iterator[None]:
    """Let this process, and every worker of the active cluster, get a run's key until the block ends.

    Parameters
    ----------
    secret
        Its key. It is in no graph and in no pickle, which a worker that cannot load it would log.
        The scheduler holds it as plain bytes in memory; a worker asks for it when a task first
        needs it, and holds it in memory.
    """
    try:
        hold_key(run_id, secret)
        _tell_scheduler(run_id, secret)
        yield
    finally:
        withdraw_key(run_id)


def withdraw_key(run_id: str) -> None:
    """Drop a run's key in this process, and in the scheduler and each worker of the active cluster, whoever shared it."""
    drop_key(run_id)
    if (client := _find_blocking_client()) is not None:
        with suppress(Exception):  # a cluster that has gone away holds nothing
            for name in list_names(run_id):
                _set_key(client, name, None)
        _run_on_workers(client, drop_key, run_id)


def _tell_scheduler(name: str, secret: bytes) -> None:
    """Let the workers of the active cluster, if there is one, get a secret of a run."""
    if (client := _find_blocking_client()) is not None:
        try:
            _set_key(client, name, secret)
        except Exception:
            what = "the scheduler could not be given the key of the run"
            raise TemporaryError(what, "cluster", "run again to resume") from None


def _find_blocking_client() -> Client | None:
    client = find_client()
    return None if client is None or client.asynchronous else client


def _set_key(client: Client, name: str, secret: bytes | None) -> None:
    from distributed.protocol import to_serialize

    # as a message that the scheduler does not open: it would log others at the level DEBUG
    value = None if secret is None else to_serialize(secret)
    patience = _PATIENCE_SECONDS + len(secret or b"") / _BYTES_A_SECOND
    names = [f"dpdask-key-{name}"]
    client.sync(client.scheduler.set_metadata, keys=names, value=value, callback_timeout=patience)


def _ask_scheduler(name: str) -> bytes | None:
    """Return a secret of a run as the scheduler holds it, or None if it holds none, or if this is no task on a worker."""
    if "distributed" not in sys.modules:
        return None
    from distributed import get_worker
    from distributed.utils import sync

    with suppress(Exception):
        worker = get_worker()
        ask = worker.scheduler.get_metadata
        asked: dict[str, Any] = {"keys": [f"dpdask-key-{name}"], "default": None}
        secret: bytes | None = sync(worker.loop, ask, callback_timeout=_LONG_SECONDS, **asked)
        return secret
    return None


exchange_keys(_ask_scheduler, _tell_scheduler)


def forget_here() -> None:
    """Empty this process's caches of private files and of what was computed from them; a task that still needs them reads them again."""
    for cache in _CACHES:
        cache.cache_clear()


def forget_everywhere() -> None:
    """Empty the caches of this process and of every worker of the active cluster; ignore workers that are gone."""
    forget_here()
    if (client := _find_blocking_client()) is not None:
        _run_on_workers(client, forget_here)


def _run_on_workers(client: Client, function: Callable[..., None], *arguments: str) -> None:
    with suppress(Exception):  # a failure does not matter: if a worker is lost, so is its memory
        client.run(function, *arguments, on_error="ignore", callback_timeout=_PATIENCE_SECONDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Tasks that are submitted together."""

    # The tasks by their names; pure, so that a retry or a lost worker changes nothing.
    nodes: Mapping[Any, Any]
    keys: Sequence[str]  # the names of those whose results the driver takes
    steps: Collection[str]  # the names of those that count in the progress


class Window:
    """The tasks of a stage that the scheduler has at a time, and their results until the driver takes them."""

    def __init__(self, client: Client, shared: Mapping[str, Any], batches: Iterator[Batch]) -> None:
        self._client, self._shared, self._batches = client, shared, enumerate(batches)
        self._held: list[Any] = []
        self._futures: dict[str, Any] = {}
        self._numbers: dict[str, int] = {}
        self._waiting: dict[int, Batch] = {}
        self._results: dict[str, Any] = {}
        self._ended: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._n_running = self._next = 0
        self._began = time.time()

    def run(self) -> Iterator[int]:
        """Compute all batches; yield the number of steps of each as soon as it is done."""
        from distributed import CancelledError

        self._held = self._send(self._shared, list(self._shared))
        self._submit()
        while self._numbers:
            future = _patiently(self._client, lambda: self._ended.get(timeout=_POLL_SECONDS))
            # not `lost` or `pending`: its worker has died since it was done, and it is computed again
            if future.status in ("error", "cancelled"):
                error = future.exception(timeout=_POLL_SECONDS)
                # of a lost scheduler there may be none
                raise error if isinstance(error, Exception) else CancelledError
            self._results[future.key] = self._fetch(future)
            del self._futures[future.key]  # then the workers forget the result
            batch = self._waiting[self._numbers.pop(future.key)]
            if all(key in self._results for key in batch.keys):
                self._n_running -= len(batch.steps)
                self._submit()
                yield len(batch.steps)

    def _fetch(self, future: Any) -> Any:
        """Return a result; one by one, since `gather` would wait for ever for a result that was lost with the last worker."""
        from distributed import CancelledError

        try:
            return _patiently(self._client, functools.partial(future.result, timeout=_POLL_SECONDS))
        except (AttributeError, TypeError):
            if future.status == "finished":
                raise
            # distributed raised the exception of a lost future, which has none
            raise CancelledError from None

    def has_run_out(self) -> bool:
        """Return whether a worker was stopped since the stage began because it came to its limit of memory, as its nanny told the scheduler."""
        with suppress(Exception):
            return any(
                moment >= self._began
                for moment, _ in self._client.get_events("worker-restart-memory")
            )
        return False

    def _submit(self) -> None:
        """Submit batches until the window is full."""
        while self._n_running < WINDOW and (numbered := next(self._batches, None)) is not None:
            number, batch = numbered
            futures = self._send(batch.nodes, list(batch.keys))
            self._waiting[number] = batch
            self._numbers |= dict.fromkeys(batch.keys, number)
            self._n_running += len(batch.steps)
            for future in futures:
                self._futures[future.key] = future
                future.add_done_callback(self._ended.put)

    def _send(self, nodes: Mapping[Any, Any], keys: list[str]) -> list[Any]:
        """Submit tasks and return the futures of some. Dask would make a token of a dict from all that it holds, and of this it makes none."""
        graph = HighLevelGraph({keys[0]: MaterializedLayer(nodes)}, {keys[0]: set()})
        futures: list[Any] = self._client.get(graph, keys, sync=False, retries=RETRIES)
        return futures

    def take(self) -> Iterator[Any]:
        """Yield the results of the next batches that are whole, in their order."""
        while self._next in self._waiting and all(
            key in self._results for key in self._waiting[self._next].keys
        ):
            for key in self._waiting.pop(self._next).keys:
                yield self._results.pop(key)
            self._next += 1

    def find(self, key: object) -> Any:
        """Return a task that was submitted, or None."""
        return next(
            (batch.nodes[key] for batch in self._waiting.values() if key in batch.nodes), None
        )

    def close(self) -> None:
        """Cancel what was submitted, and release what all tasks share: to cancel a task that others need ends the scheduler's connection."""
        with suppress(Exception):  # a cluster that has gone away has nothing left to cancel
            self._client.cancel([*self._futures.values()])
            for future in self._held:
                future.release()


def _patiently(client: Client, step: Callable[[], Any]) -> Any:
    """Run a step and return its result; repeat it while it times out, but stop if the cluster has had no worker for long."""
    alone = 0.0
    while alone < dask.config.get(PATIENCE_KEY, LONELY_SECONDS):
        try:
            return step()
        except (queue.Empty, TimeoutError):
            alone = 0.0 if client.scheduler_info(n_workers=-1)["workers"] else alone + _POLL_SECONDS
    raise TimeoutError
