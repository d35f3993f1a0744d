"""The cluster that runs tasks, and the one way to compute: stages, in order, with progress; what goes wrong becomes one line."""

from __future__ import annotations

import asyncio
import builtins
import ctypes
import functools
import math
import os
import queue
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar

import dask
from dask import threaded
from dask._task_spec import DataNode, List, Task, TaskRef
from dask.base import get_scheduler
from dask.callbacks import Callback
from dask.highlevelgraph import HighLevelGraph, MaterializedLayer
from dask.utils import format_bytes
from threadpoolctl import threadpool_limits

from dpdask.channels import find_scale, solve_unbiased, solve_weights
from dpdask.errors import DpdaskError, InternalError, TemporaryError, list_names, say_count
from dpdask.io.encrypted import drop_key, exchange_keys, hold_key
from dpdask.io.encrypted import list_names as list_key_names
from dpdask.io.filesystems import set_options
from dpdask.io.parquet import FOOTERS
from dpdask.kernels import one_thread
from dpdask.startup import Stamp, finish_first
from dpdask.stats.statistic import FAN_IN
from dpdask.steps import LOG

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
_ANSWER_SECONDS = 8.0  # for what needs no work: a process that takes longer is stopped, or lost
_QUIET_SECONDS = 12.0  # without a sign of life
_SIGNS_A_SECOND = 50  # of many workers each gives a sign less often
_AGAIN_SECONDS = 5.0  # for one that is asked a second time, alone
_CLEANING_SECONDS = 3.0  # what is told to workers at the end reaches them, waited for or not
_PING = {"op": "versions", "packages": []}  # which Dask answers itself, without a thread of tasks
_MOST_NAMED = 3
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


def list_workers(client: Client) -> dict[str, Any]:
    """Return what the scheduler knows of each worker, by address; a `TimeoutError` if it does not answer in time."""
    ask: Any = client.scheduler.identity
    known: dict[str, Any] = client.sync(ask, n_workers=-1, callback_timeout=_ANSWER_SECONDS)
    return dict(known["workers"])


def call_workers(client: Client) -> dict[str, Any]:
    """Return what each worker answers to a call that Dask answers by itself: its versions.

    A `TemporaryError` names those that the scheduler believes in and that say nothing for some
    seconds: they are stopped, lost or cut off, and a run would wait for them without end.
    """
    call: Any = client.scheduler.broadcast
    answers: dict[str, Any] = {}
    try:
        with suppress(TimeoutError):
            answers = client.sync(
                call, msg=_PING, on_error="ignore", callback_timeout=_ANSWER_SECONDS
            )
        missing = list_workers(client).keys() - answers.keys()
        if missing:
            answers |= client.sync(_call_each, client, sorted(missing))
        known = list_workers(client)
    except OSError:
        hint = "check that it runs, and run again"
        raise TemporaryError("the scheduler does not answer", "cluster", hint) from None
    silent = sorted(known.keys() & missing - answers.keys())
    if silent:
        names = [_name_worker(address, known[address]) for address in silent]
        what = f"{len(silent)} of {say_count(len(known), 'worker')} do not answer: {list_names(names, _MOST_NAMED)}"
        raise TemporaryError(what, "cluster", "restart or remove them, and run again")
    return answers


async def _call_each(client: Client, addresses: Sequence[str]) -> dict[str, Any]:
    """Call workers one by one, all at once: one that is silent would hide the answers of the others."""
    call: Any = client.scheduler.broadcast

    async def call_one(address: str) -> dict[str, Any]:
        asked = call(msg=_PING, workers=[address], on_error="ignore")
        with suppress(TimeoutError):
            return dict(await asyncio.wait_for(asked, _AGAIN_SECONDS))
        return {}

    found = await asyncio.gather(*map(call_one, addresses))
    return {address: answer for each in found for address, answer in each.items()}


def _name_worker(address: str, known: Mapping[str, Any]) -> str:
    """Return a worker's name and address, as those who start workers know it."""
    name = str(known.get("name", address))
    return address if name == address else f"{name} at {address}"


def by_value(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that is pickled with its code: one of an installed module is pickled as its name, and imported where it arrives."""
    assert isinstance(function, FunctionType)
    names = {"__builtins__": builtins}
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__)
    copy.__module__ = "__main__"
    return copy


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
        with finish_first():
            withdraw_key(run_id)


def withdraw_key(run_id: str) -> None:
    """Drop a run's key in this process, and in the scheduler and each worker of the active cluster, whoever shared it."""
    drop_key(run_id)
    if (client := _find_blocking_client()) is not None:
        with suppress(Exception):  # a cluster that has gone away holds nothing
            for name in list_key_names(run_id):
                _set_key(client, name, None)
            names = [f"dpdask-key-{name}" for name in list_key_names(run_id)]
            run: Any = client._run_on_scheduler
            client.sync(run, by_value(_forget_names), names, callback_timeout=_CLEANING_SECONDS)
        _run_on_workers(client, drop_key, run_id)


def _forget_names(names: list[str], dask_scheduler: Any = None) -> None:
    """Remove on the scheduler what is empty by now; the function needs nothing of this module."""
    for name in names:
        if dask_scheduler.task_metadata.get(name) is None:
            dask_scheduler.task_metadata.pop(name, None)


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
        client.run(function, *arguments, on_error="ignore", callback_timeout=_CLEANING_SECONDS)


class Batch(NamedTuple):
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
    """Run a step and return its result; repeat it while it times out, but stop if the cluster has had no worker, or no word of the scheduler came, for long."""
    heard, seen = time.monotonic(), dict[str, tuple[float, float]]()
    while time.monotonic() - heard < dask.config.get(PATIENCE_KEY, LONELY_SECONDS):
        try:
            return step()
        except (queue.Empty, TimeoutError):
            with suppress(TimeoutError):
                if workers := list_workers(client):
                    heard = time.monotonic()
                    _tell_quiet(workers, seen)
    raise TimeoutError


def _tell_quiet(workers: Mapping[str, Any], seen: dict[str, tuple[float, float]]) -> None:
    """Tell the log of workers whose sign of life has not come for some seconds, once: the scheduler gives them up after minutes.

    Parameters
    ----------
    seen
        Of each worker its last sign, by the scheduler's clock, and when this process first heard of
        it, or infinity if it was told of.
    """
    now = time.monotonic()
    for address, worker in workers.items():
        if address not in seen or seen[address][0] != worker["last_seen"]:
            seen[address] = worker["last_seen"], now
    patience = _QUIET_SECONDS + len(workers) / _SIGNS_A_SECOND
    quiet = [address for address in sorted(workers) if now - seen[address][1] > patience]
    if quiet:
        names = list_names([_name_worker(each, workers[each]) for each in quiet], _MOST_NAMED)
        asked = f"{len(quiet)} of {say_count(len(workers), 'worker')}"
        LOG.info("waiting for %s that give no sign of life: %s", asked, names)
        seen |= {address: (seen[address][0], math.inf) for address in quiet}


Progress = Callable[[str, int, int], None]

_MORE_MEMORY = "give workers more memory or fewer threads, or write smaller row groups"
_TRIM_NAME, _TRIM_OF_DASK, _MMAP_NAME = "MALLOC_TRIM_THRESHOLD_", "65536", "MALLOC_MMAP_THRESHOLD_"
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_KEPT_BYTES, _LARGEST_KEPT = 2**27, 2**25  # old versions take no larger one
_MOST_RESULTS = 64  # for the driver to take, while batches are small
_LARGEST_BATCH = FAN_IN**3


def guard(function: Callable[Args, Result]) -> Callable[Args, Result]:
    """Return a task function whose unforeseen failures name only their type and place: library messages quote data.

    A work with a stamp among its arguments is refused by a worker whose versions are not the
    driver's. Its stores are opened with its options from now on.
    """

    @functools.wraps(function)
    def task(*args: Args.args, **kwargs: Args.kwargs) -> Result:
        try:
            prepare_process()
            for argument in (*args, *kwargs.values()):
                work = getattr(argument, "work", argument)
                set_options(getattr(work, "stores", {}))
                stamp = getattr(work, "stamp", None)
                if isinstance(stamp, Stamp) and stamp.differs:
                    what = f"a worker joined with another version: {stamp.differs}"
                    hint = "install the same versions on every worker, and run again to resume"
                    raise TemporaryError(what, "cluster", hint)
            return function(*args, **kwargs)
        except DpdaskError as error:
            failure = error
        except MemoryError:
            failure = make_memory_error(args)
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            failure = InternalError(
                f"{type(error).__name__} in {frame.name}, line {frame.lineno}",
                None,
                "please report it, without data",
            )
        failure.__cause__ = failure.__context__ = (
            None  # distributed pickles these too, and a library's message would go with them
        )
        try:
            raise failure
        finally:
            del failure  # or the traceback's frames, and the rows in them, would live until the garbage collector came

    return task


def task_prefix(stage: str) -> str:
    """Return a prefix for task names that no other run on the same scheduler has; it says nothing of the data.

    Dask groups tasks by the words of their names, and spreads a group evenly over the workers only
    if it does not depend on itself: what a stage's tasks share, and what merges them, need a stage
    of their own.
    """
    return f"dpdask-{stage}-{uuid.uuid4().hex[:12]}"


def make_memory_error(arguments: Sequence[Any], limit: int | None = None) -> TemporaryError:
    """Return the error of a task that ran out of memory.

    Parameters
    ----------
    arguments
        The task's; parts of a table among them tell what was read.
    limit
        The most bytes that the worker may use, if that is known.
    """
    where, about = _describe_largest(arguments, limit)
    return TemporaryError(
        f"a worker ran out of memory{about}", where, f"{_MORE_MEMORY}, and run again to resume"
    )


def _describe_largest(arguments: Sequence[Any], limit: int | None) -> tuple[str | None, str]:
    """Return the place of the largest fragment that a task reads, and its size beside the worker's limit in words."""
    parts = [
        part for given in arguments for part in (given if isinstance(given, list) else [given])
    ]
    fragments = [fragment for part in parts for fragment in getattr(part, "fragments", ())]
    if not fragments:
        return None, ""
    largest = max(fragments, key=lambda fragment: fragment.n_bytes_decoded or fragment.n_bytes)
    size = f": this fragment has {format_bytes(largest.n_bytes_decoded or largest.n_bytes)}"
    return (
        largest.where,
        size if limit is None else f"{size}, and a worker may use {format_bytes(limit)}",
    )


@functools.cache
def prepare_process() -> None:
    """Set, for good, what tasks need of this process: kept memory and, if it is a worker, one thread for BLAS.

    A worker already runs one task for each thread that it may use.
    """
    keep_memory()
    if "distributed" in sys.modules:
        from distributed import get_worker

        with suppress(ValueError):  # this is no task on a worker
            get_worker()
            threadpool_limits(1)


@functools.cache
def keep_memory() -> None:
    """Let this process keep freed memory for the next arrays, instead of handing large ones back to the system at once.

    About 128 MiB are kept, and up to 64 MiB for each thread that runs tasks. Tasks and the driver
    need the next array a moment later, and would otherwise spend up to a third of their time on
    page faults. Only glibc has this setting. It stays as it is if the environment sets it to
    anything but what Dask sets for workers.
    """
    environment = os.environ
    if (
        environment.get(_TRIM_NAME, _TRIM_OF_DASK) != _TRIM_OF_DASK
        or _MMAP_NAME in environment
        or "malloc" in environment.get("GLIBC_TUNABLES", "")
    ):
        return
    with suppress(OSError, AttributeError, TypeError):  # another C library
        set_option = ctypes.CDLL(None).mallopt
        # the other one alone would be worse than nothing: it fixes this one at 128 KiB
        if set_option(_M_MMAP_THRESHOLD, _LARGEST_KEPT):
            set_option(_M_TRIM_THRESHOLD, _KEPT_BYTES)


class Stage(NamedTuple):
    """The tasks of one pass, made batch by batch while they are submitted."""

    name: str
    batches: Iterable[Batch]
    n_steps: int  # how many of them count in the progress
    shared: Mapping[str, Any]  # what all tasks share, by the name of the node that holds it
    n_done: int = 0  # how many of the steps were done before, by another driver


def make_stage(
    name: str,
    function: Callable[..., Result],
    arguments: Sequence[tuple[Any, ...]],
    shared: Any,
    merge: Callable[[list[Result]], Result],
    *,
    least: int = 1,
    nodes: Mapping[Any, Any] | None = None,
    n_batches_done: int = 0,
) -> Stage:
    """Return the stage that calls a function with each of many arguments, and merges the results of neighbours on the workers.

    Parameters
    ----------
    function
        Called with the arguments of a task, and with what all tasks share.
    shared
        What all tasks share: one node of the graph, however many tasks there are.
    least
        How many results are merged into one at least, a power of 8.
    nodes
        Tasks whose results the arguments name. Then there is one batch, so that none of them runs
        twice.

    Notes
    -----
    A batch is a whole branch of the tree with fan-in 8 over all tasks, so results of batches that
    `TreeFold` merges are merged as in that tree. Its shape depends on the number of tasks alone, so
    a merge that rounds gives the same bytes everywhere.
    """
    prefix, merging, work = task_prefix(name), task_prefix("merge"), task_prefix("work")
    size = least
    while len(arguments) > size * _MOST_RESULTS and size < _LARGEST_BATCH:
        size *= FAN_IN
    size = size if nodes is None else max(1, len(arguments))
    n_done = min(n_batches_done * size, len(arguments))

    def make_batches() -> Iterator[Batch]:
        for start in range(n_done, len(arguments), size):
            own = arguments[start : start + size]
            keys = [f"{prefix}-{number}" for number in range(start, start + len(own))]
            made: dict[Any, Any] = {
                key: Task(key, function, *given, TaskRef(work))
                for key, given in zip(keys, own, strict=True)
            }
            made |= nodes or {}
            root = add_tree(made, keys, merge, f"{merging}-{start}") if size > 1 else keys[0]
            yield Batch(nodes=made, keys=[root], steps=keys)

    return Stage(
        name=name,
        batches=make_batches(),
        n_steps=len(arguments),
        shared={work: DataNode(work, shared)},
        n_done=n_done,
    )


def make_whole_stage(
    name: str, nodes: Mapping[Any, Any], keys: Sequence[str], shared: DataNode
) -> Stage:
    """Return a stage of tasks that are submitted together.

    Parameters
    ----------
    keys
        The names of those whose results the driver takes; they count in the progress.
    """
    batches = [Batch(nodes=nodes, keys=keys, steps=keys)] if keys else []
    return Stage(name=name, batches=batches, n_steps=len(keys), shared={shared.key: shared})


def add_tree(
    nodes: dict[Any, Any], leaves: Sequence[str], merge: Callable[[list[Result]], Result], name: str
) -> str:
    """Add tasks that merge the results of others in a tree with fan-in 8, in their order; return the name of the last one.

    Parameters
    ----------
    leaves
        The names of the tasks whose results are merged, at least one.
    """
    keys = list(leaves)
    while len(keys) > 1 or keys[0] == leaves[0]:
        groups = [keys[start : start + FAN_IN] for start in range(0, len(keys), FAN_IN)]
        keys = [f"{name}-{len(nodes) + place}" for place in range(len(groups))]
        nodes |= {
            key: Task(key, merge, List(*map(TaskRef, group)))
            for key, group in zip(keys, groups, strict=True)
        }
    return keys[0]


def run_stage(stage: Stage, progress: Progress | None = None) -> Iterator[list[Any]]:
    """Yield the results of a stage's batches, in their order, in lists of those that arrive together, computed by the active scheduler.

    Parameters
    ----------
    stage
        The tasks. A pure function, so that a retry or a lost worker changes nothing.
    """
    keep_memory()
    if progress is not None and stage.n_steps:
        progress(stage.name, stage.n_done, stage.n_steps)
    client = find_client()
    return (
        _run_here(stage, progress)
        if client is None
        else _run_there(Window(client, stage.shared, iter(stage.batches)), stage, progress)
    )


def _run_here(stage: Stage, progress: Progress | None) -> Iterator[list[Any]]:
    """Run a stage in this process, some hundred tasks at a time."""
    get, done = get_scheduler() or threaded.get, stage.n_done
    batches = iter(stage.batches)
    while batch := next(batches, None):
        nodes, keys, steps = {**stage.shared, **batch.nodes}, list(batch.keys), set(batch.steps)
        while len(steps) < _LARGEST_BATCH and (batch := next(batches, None)) is not None:
            nodes |= batch.nodes
            keys += batch.keys
            steps.update(batch.steps)

        def count(key: Any, *_: object, steps: set[str] = steps) -> None:
            nonlocal done
            if key in steps:
                done += 1
                if progress is not None:
                    progress(stage.name, done, stage.n_steps)

        with Callback(posttask=count), one_thread():
            results = get(nodes, keys)
        yield list(results)


def _run_there(window: Window, stage: Stage, progress: Progress | None) -> Iterator[list[Any]]:
    """Run a stage on the cluster."""
    from distributed import CancelledError, KilledWorker
    from distributed.client import ClosedClientError
    from distributed.comm import CommClosedError

    done = stage.n_done
    try:
        for n_steps in window.run():
            done += n_steps
            if progress is not None:
                progress(stage.name, done, stage.n_steps)
            yield list(window.take())
    except KilledWorker as error:
        raise _explain_death(window, stage.name, error) from None
    except (
        CancelledError,
        CommClosedError,
        ClosedClientError,
        OSError,
    ) as error:  # a TimeoutError is an OSError
        what = f"the cluster lost its scheduler or its workers ({type(error).__name__})"
        raise TemporaryError(what, stage.name, "run again to resume") from None
    finally:
        window.close()


def _explain_death(window: Window, stage: str, error: Any) -> TemporaryError:
    """Return the error of a task whose workers died again and again."""
    node, limit = window.find(error.task), getattr(error.last_worker, "memory_limit", None) or None
    arguments = () if node is None else node.args
    if window.has_run_out():
        return make_memory_error(arguments, limit).at(stage)
    where, about = _describe_largest(arguments, limit)
    what = f"the cluster lost its scheduler or its workers (KilledWorker){about}"
    hint = (
        f"if memory ran out, {_MORE_MEMORY}; run again to resume"
        if where
        else "run again to resume"
    )
    return TemporaryError(what, stage if where is None else f"{stage}, {where}", hint)
