"""Run tasks on whatever scheduler is there: progress, retries, merging in a tree, and failures that never show a data value."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import traceback
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from dask import threaded
from dask._task_spec import DataNode, List, Task, TaskRef
from dask.base import get_scheduler
from dask.callbacks import Callback
from dask.utils import format_bytes
from threadpoolctl import ThreadpoolController, threadpool_limits

from dpdask.engine.cluster import Batch, Window, find_client, is_worker
from dpdask.errors import DpdaskError, InternalError, TemporaryError
from dpdask.stats.statistic import FAN_IN
from dpdask.versions import Stamp

Args = ParamSpec("Args")
Result = TypeVar("Result")
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
    driver's.
    """

    @functools.wraps(function)
    def task(*args: Args.args, **kwargs: Args.kwargs) -> Result:
        try:
            prepare_process()
            for argument in (*args, *kwargs.values()):
                if isinstance(stamp := getattr(argument, "stamp", None), Stamp):
                    stamp.check()
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


@contextmanager
def one_thread() -> Iterator[None]:
    """Give BLAS one thread in this process until the block ends: more wait for each other beside other tasks, and could round differently."""
    with _find_pools(len(sys.modules)).limit(limits=1):
        yield


@functools.lru_cache(maxsize=1)
def _find_pools(n_modules: int) -> ThreadpoolController:
    """Return the thread pools of the libraries in this process; the number of imported modules tells whether there may be others by now."""
    del n_modules
    return ThreadpoolController()


@functools.cache
def prepare_process() -> None:
    """Set, for good, what tasks need of this process: kept memory and, if it is a worker, one thread for BLAS.

    A worker already runs one task for each thread that it may use.
    """
    keep_memory()
    if is_worker():
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
        if set_option(
            _M_MMAP_THRESHOLD, _LARGEST_KEPT
        ):  # the other one alone would be worse than nothing: it fixes this one at 128 KiB
            set_option(_M_TRIM_THRESHOLD, _KEPT_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
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
