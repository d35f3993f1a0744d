"""Run tasks on whatever scheduler is there: progress, retries, merging in a tree, and failures that never show a data value."""

from __future__ import annotations

import functools
import queue
import sys
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import dask
from dask import delayed
from dask.base import get_scheduler
from dask.callbacks import Callback

from dpdask.channels.optimal import solve_weights
from dpdask.channels.unbiased import solve_unbiased
from dpdask.errors import DpdaskError, InternalError, TemporaryError
from dpdask.io.encrypted import ask_for_keys, drop_key, hold_key
from dpdask.io.options import Options, set_options, use_options
from dpdask.stats.statistic import FAN_IN
from dpdask.versions import Stamp

if TYPE_CHECKING:
    from distributed import Client

Args = ParamSpec("Args")
Result = TypeVar("Result")
Progress = Callable[[str, int, int], None]

RETRIES = 3
LONELY_SECONDS = 120.0  # an adaptive cluster needs a while for its first worker
PATIENCE_KEY = "dpdask.patience-seconds"  # in Dask's configuration: replaces `LONELY_SECONDS`
INSECURE_KEY = "dpdask.insecure"  # in Dask's configuration: whether a run's key may be sent over connections without TLS
_POLL_SECONDS = 5.0
_PATIENCE_SECONDS = 10.0
_CACHES: list[Any] = [solve_weights, solve_unbiased]


def guard(function: Callable[Args, Result]) -> Callable[Args, Result]:
    """Return a task function whose unforeseen failures name only their type and place: library messages quote data.

    A work with a stamp among its arguments is refused by a worker whose versions are not the driver's.
    """

    @functools.wraps(function)
    def task(*args: Args.args, **kwargs: Args.kwargs) -> Result:
        try:
            for argument in (*args, *kwargs.values()):
                if isinstance(stamp := getattr(argument, "stamp", None), Stamp):
                    stamp.check()
            return function(*args, **kwargs)
        except DpdaskError as error:
            failure = error
        except MemoryError:
            failure = TemporaryError("a worker ran out of memory", None, "use fewer threads per worker and run again to resume")
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            failure = InternalError(f"{type(error).__name__} in {frame.name}, line {frame.lineno}", None, "please report it, without data")
        failure.__cause__ = failure.__context__ = None  # distributed pickles these too, and a library's message would go with them
        try:
            raise failure
        finally:
            del failure  # or the traceback's frames, and the rows in them, would live until the garbage collector came

    return task


def task_prefix(stage: str) -> str:
    """Return a prefix for task names that no other run on the same scheduler has; it says nothing of the data.

    Dask groups tasks by the words of their names, and spreads a group evenly over the workers only if it does not depend
    on itself: what a stage's tasks share, and what merges them, need a stage of their own.
    """
    return f"dpdask-{stage}-{uuid.uuid4().hex[:12]}"


def find_client() -> Client | None:
    """Return the client of the cluster that computes, or None if this process computes."""
    client = getattr(get_scheduler(), "__self__", None)
    if client is None:  # threads, or this one: no need to import distributed
        return None
    from distributed import Client

    return client if isinstance(client, Client) else None


@contextmanager
def share_options(options: Mapping[str, Options]) -> Iterator[None]:
    """Open buckets with these options until the block ends, in this process; workers keep them, also those that join later.

    Two jobs that use one bucket on one cluster at the same time must give it the same options.

    Parameters
    ----------
    options
        Options by bucket. Secrets stand in them by the names of environment variables; each worker looks its own up.

    Raises
    ------
    TemporaryError
        If the workers cannot be told.
    """
    with use_options(options):
        client = find_client() if options else None  # to look for one imports distributed
        if client is not None and not client.asynchronous:
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
            raise TemporaryError("the workers could not be told how to open the store", place, "check that each has this version of dpdask") from None


def run_tasks(stage: str, tasks: Sequence[Any], progress: Progress | None = None) -> list[Any]:
    """Return the results of delayed tasks, computed by the active scheduler.

    Parameters
    ----------
    stage
        A name for the progress.
    tasks
        Delayed objects; pure, so that a retry or a lost worker changes nothing.
    progress
        Called with (stage, done, total).

    Raises
    ------
    DpdaskError
        The first task's failure.
    TemporaryError
        If workers were lost too often, or the cluster went away.
    """
    if not tasks:
        return []
    if progress is not None:
        progress(stage, 0, len(tasks))
    client = find_client()
    if client is not None:
        return _on_cluster(client, stage, tasks, progress)
    done = 0
    names = {task.key for task in tasks}

    def count(key: object, *_: object) -> None:
        nonlocal done
        if key in names:
            done += 1
            if progress is not None:
                progress(stage, done, len(tasks))

    with Callback(posttask=count):
        return list(dask.compute(*tasks, optimize_graph=False))


def _on_cluster(client: Client, stage: str, tasks: Sequence[Any], progress: Progress | None) -> list[Any]:
    from distributed import CancelledError, KilledWorker
    from distributed.client import ClosedClientError
    from distributed.comm import CommClosedError

    ended: queue.SimpleQueue[Any] = queue.SimpleQueue()
    results: dict[Any, Any] = {}
    futures: list[Any] = []
    try:
        futures = client.compute(list(tasks), retries=RETRIES, optimize_graph=False)
        for future in futures:
            future.add_done_callback(ended.put)
        for done in range(1, len(futures) + 1):
            future = _patiently(client, lambda: ended.get(timeout=_POLL_SECONDS))
            if future.status in ("error", "cancelled"):  # not `pending`: its worker may have died since it was done
                raise future.exception() or CancelledError
            # one by one: `gather` would wait for ever for a result that was lost with the last worker
            results[future.key] = _patiently(client, functools.partial(future.result, timeout=_POLL_SECONDS))
            if progress is not None:
                progress(stage, done, len(tasks))
        return [results[future.key] for future in futures]
    except (KilledWorker, CancelledError, CommClosedError, ClosedClientError, TimeoutError) as error:
        raise TemporaryError(f"the cluster lost its scheduler or its workers ({type(error).__name__})", stage, "run again to resume") from None
    finally:
        with suppress(Exception):  # a cluster that has gone away has nothing left to cancel
            client.cancel(futures)


def _patiently(client: Client, step: Callable[[], Any]) -> Any:
    """Run a step and return its result; repeat it while it times out, but stop if the cluster has had no worker for long.

    Raises
    ------
    TimeoutError
        If there was no worker for two minutes, or for what Dask's configuration says.
    """
    alone = 0.0
    while alone < dask.config.get(PATIENCE_KEY, LONELY_SECONDS):
        try:
            return step()
        except (queue.Empty, TimeoutError):
            alone = 0.0 if client.scheduler_info(n_workers=-1)["workers"] else alone + _POLL_SECONDS
    raise TimeoutError


def tree_reduce(leaves: Sequence[Any], merge: Callable[[list[Any]], Any], name: str) -> Any:
    """Return one delayed value: the leaves merged in a tree with fan-in 8, in their order.

    Parameters
    ----------
    leaves
        Delayed values, at least one.
    merge
        Merges a list of neighbours.
    name
        Prefix of the task names.

    Notes
    -----
    The tree's shape depends on the number of leaves alone, so a merge that rounds gives the same bytes everywhere.
    """
    level = 0
    nodes = list(leaves)
    while len(nodes) > 1 or level == 0:
        level += 1
        groups = [nodes[start : start + FAN_IN] for start in range(0, len(nodes), FAN_IN)]
        nodes = [delayed(merge, pure=False)(group, dask_key_name=f"{name}-{level}-{index}") for index, group in enumerate(groups)]
    return nodes[0]


def remember(maxsize: int) -> Callable[[Callable[Args, Result]], Callable[Args, Result]]:
    """Return a decorator for what reads a private file: each process reads it once, until `forget_everywhere`.

    Parameters
    ----------
    maxsize
        How many results a process holds at most.
    """

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
    run_id
        The name of the run.
    secret
        Its key. It is in no graph and in no pickle, which a worker that cannot load it would log. The scheduler holds it as plain
        bytes in memory; a worker asks for it when a task first needs it, and holds it in memory.

    Raises
    ------
    TemporaryError
        If the scheduler cannot be given the key.
    """
    hold_key(run_id, secret)
    client = find_client()
    try:
        if client is not None and not client.asynchronous:
            try:
                _set_key(client, run_id, secret)
            except Exception:
                raise TemporaryError("the scheduler could not be given the key of the run", "cluster", "run again to resume") from None
        yield
    finally:
        withdraw_key(run_id)


def withdraw_key(run_id: str) -> None:
    """Drop a run's key in this process, and in the scheduler and each worker of the active cluster, whoever shared it."""
    drop_key(run_id)
    client = find_client()
    if client is not None and not client.asynchronous:
        with suppress(Exception):  # a cluster that has gone away holds nothing
            _set_key(client, run_id, None)
        _run_on_workers(client, drop_key, run_id)


def _set_key(client: Client, run_id: str, secret: bytes | None) -> None:
    from distributed.protocol import to_serialize

    # as a message that the scheduler does not open: it would log others, if it logs at the level DEBUG
    value = None if secret is None else to_serialize(secret)
    client.sync(client.scheduler.set_metadata, keys=[_name_key(run_id)], value=value, callback_timeout=_PATIENCE_SECONDS)


def _name_key(run_id: str) -> str:
    return f"dpdask-key-{run_id}"


@ask_for_keys
def _ask_scheduler(run_id: str) -> bytes | None:
    """Return a run's key as the scheduler holds it, or None if it holds none, or if this is no task on a worker."""
    if "distributed" not in sys.modules:
        return None
    from distributed import get_worker
    from distributed.utils import sync

    with suppress(Exception):
        worker = get_worker()
        secret: bytes | None = sync(
            worker.loop, worker.scheduler.get_metadata, keys=[_name_key(run_id)], default=None, callback_timeout=_PATIENCE_SECONDS
        )
        return secret
    return None


def forget_here() -> None:
    """Empty this process's caches of private files and of what was computed from them; a task that still needs them reads them again."""
    for cache in _CACHES:
        cache.cache_clear()


def forget_everywhere() -> None:
    """Empty the caches of this process and of every worker of the active cluster; ignore workers that are gone."""
    forget_here()
    client = find_client()
    if client is None or client.asynchronous:
        return
    _run_on_workers(client, forget_here)


def _run_on_workers(client: Client, function: Callable[..., None], *arguments: str) -> None:
    with suppress(Exception):  # a failure does not matter: if a worker is lost, so is its memory
        client.run(function, *arguments, on_error="ignore", callback_timeout=_PATIENCE_SECONDS)
