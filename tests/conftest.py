"""What every test shares: its files lie in memory where that has room, and Dask spills below pytest's own folder, never into the tree."""

import atexit
import fcntl
import functools
import gc
import os
import shutil
import sys
import tempfile
from collections import Counter
from contextlib import suppress
from multiprocessing.util import Finalize
from pathlib import Path

import dask
import psutil
import pytest
from botocore.loaders import JSONFileLoader
from distributed.utils import get_mp_context
from e2e.helpers import processes, spare_the_disk
from faults.drivers import serving
from few import choose_few
from hypothesis import settings
from numba.core.compiler_lock import global_compiler_lock
from numba.core.dispatcher import Dispatcher
from services.browser import browser  # noqa: F401  # a fixture
from services.stores import (  # noqa: F401  # fixtures
    azurite_server,
    open_store,
    radosgw_server,
    remote_store,
    shared_folder,
    store,
)
from shelf import Shelf

from dpdask.engine.account import open_ledger
from dpdask.jobs import spec

PRELOADED = [
    "distributed",
    "distributed.nanny",
    "dask.dataframe",
    "dpdask.jobs.run",
    "dpdask.engine.work",
    "dpdask.mechanisms.dip.columns",
]

# the same examples everywhere, and no deadline on machines that are shared
settings.register_profile("dpdask", deadline=None, derandomize=True, database=None, max_examples=30)
settings.register_profile(
    "thorough", deadline=None, derandomize=True, database=None, max_examples=100
)
settings.load_profile("dpdask")


# the processes of the tests share the package's bytecode, also where the environment of an image has Python write none: else each compiles
# the package, which is a fifth of what its start costs
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def compile_once(dispatcher, signature, compile_=Dispatcher.compile):
    """Compile a kernel, unless another process is about to: then wait for it, and take the kernel from the cache."""
    cache = dispatcher._cache.cache_path
    if cache is None:
        return compile_(dispatcher, signature)
    with (
        global_compiler_lock,
        (Path(cache) / f"{dispatcher.py_func.__name__}.lock").open("w") as one,
    ):
        fcntl.flock(one, fcntl.LOCK_EX)
        return compile_(dispatcher, signature)


Dispatcher.compile = compile_once


def has_room(folder, n_bytes):
    """Return whether a file system in memory can be written, may hold programs, and has room."""
    if (
        not (folder.is_dir() and os.access(folder, os.W_OK))
        or psutil.virtual_memory().available < 2 * n_bytes
    ):
        return False
    system = os.statvfs(folder)
    return system.f_bavail * system.f_frsize >= n_bytes and not system.f_flag & os.ST_NOEXEC


def free_memory(folder, process):
    """Remove what the tests left in memory, but the folders of failed ones."""
    if os.getpid() != process:
        return
    for path in folder.iterdir():
        if not path.name.startswith("pytest-of-"):
            shutil.rmtree(path, ignore_errors=True)
    with suppress(OSError):  # not empty: a test has failed
        for path in (*folder.iterdir(), folder):
            path.rmdir()


# the tests make and remove some hundred thousand small files, which on a disk is a seventh of what they cost
if "TMPDIR" not in os.environ and has_room(Path("/dev/shm"), 4 * 2**30):
    IN_MEMORY = Path(tempfile.mkdtemp(prefix="dpdask-tests-", dir="/dev/shm"))
    IN_MEMORY.chmod(0o711)  # some tests start a process of another user
    os.environ["TMPDIR"] = tempfile.tempdir = str(IN_MEMORY)
    Finalize(
        None, free_memory, (IN_MEMORY, os.getpid()), exitpriority=-1000
    )  # after what multiprocessing has there
gc.disable()  # what is imported and collected stays: to look for garbage in it is a quarter of the time


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Keep what thousands of tests hold out of every later collection of garbage."""
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_unconfigure():
    """Let the interpreter collect all of it at its end: some libraries report what is left."""
    atexit.register(gc.unfreeze)


@pytest.fixture
def here():
    """Compute in this process, one task after the other."""
    with dask.config.set(scheduler="synchronous"):
        yield


@pytest.fixture
def url(tmp_path):
    """Return the URL of a new ledger, with the dataset `people` and much ε."""
    made = f"sqlite:///{tmp_path / 'ledger.db'}"
    open_ledger(made).init("people", 100.0)
    return made


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Leave out, by default, what is the same with other parameters."""
    with_few = {}
    for item in items:
        for mark in item.iter_markers("matrix"):
            given = item.callspec.params if hasattr(item, "callspec") else {}
            names = {name: getattr(value, "__name__", value) for name, value in given.items()}
            item.user_properties.append(("matrix", [text.format(**names) for text in mark.args]))
        for mark in item.iter_markers("slow_with"):
            if any(words in item.callspec.id for words in mark.args):
                item.add_marker(pytest.mark.slow)
        if item.get_closest_marker("few") and item.get_closest_marker("slow") is None:
            with_few.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in with_few.values():
        values = [
            {name: repr(value) for name, value in item.callspec.params.items()} for item in cases
        ]  # `indices` number cases in pytest 9
        mark = cases[0].get_closest_marker("few")
        few = choose_few(values, *mark.args)
        for number, item in enumerate(cases):
            if number not in few:
                item.add_marker(mark.kwargs.get("rest", "more"))


def pytest_terminal_summary(terminalreporter, config):
    """Print the matrix of faults, if it was asked for: of each cell, how many of its tests passed."""
    if "matrix" not in config.option.markexpr:
        return
    rows = {}
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in terminalreporter.getreports(outcome):
            for name, words in getattr(report, "user_properties", ()):
                if name == "matrix":
                    row = rows.setdefault(words[0], {})
                    row.setdefault(words[1] if words[1:] else "", Counter())[outcome] += 1
    if rows:
        terminalreporter.section("the matrix of faults")
    for fault, cells in sorted(rows.items()):
        terminalreporter.write_line(fault, bold=True)
        for cell, counts in sorted(cells.items()):
            told = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
            terminalreporter.write_line(f"    {cell:40} {told}".rstrip())


@pytest.fixture(scope="session", autouse=True)
def _services_are_described_once():
    """Let all clients of a process share the descriptions of Amazon's services: to read them is most of opening a file system."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JSONFileLoader, "load_file", functools.cache(JSONFileLoader.load_file))
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_waiting_for_the_disk():
    with pytest.MonkeyPatch.context() as patch:
        spare_the_disk(patch.setattr)
        yield


@pytest.fixture(scope="session", autouse=True)
def _keys_in_tmp(tmp_path_factory):
    """The keys of unfinished runs whose output is in a store lie in the user's own folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="session", autouse=True)
def _dask_in_tmp(tmp_path_factory):
    with dask.config.set({"temporary-directory": str(tmp_path_factory.mktemp("dask"))}):
        yield


@pytest.fixture(scope="session", autouse=True)
def _workers_are_forked():
    """Fork the workers of this process's clusters from one that has imported dpdask, which is most of what a worker costs.

    Its environment is that of the first cluster: whoever changes it for workers lets them spawn, as users do.
    """
    with dask.config.set({"distributed.worker.multiprocessing-method": "forkserver"}):
        get_mp_context().set_forkserver_preload(PRELOADED)
        yield


@pytest.fixture
def seeded_ledgers(monkeypatch):
    """Let a ledger be charged for noise from a seed, which no user may: so that the bytes of two runs can be compared."""
    monkeypatch.setattr(spec, "check_seed", lambda _: None)


@pytest.fixture(scope="session")
def two_workers():
    """Two worker processes for all who only compute on them; whoever kills, scales or configures workers starts their own."""
    with processes(2) as started:
        yield started


@pytest.fixture(scope="session")
def drivers(tmp_path_factory):
    """Drivers that can be killed; importing once is most of a small run."""
    yield from serving(tmp_path_factory.mktemp("drivers"))


@pytest.fixture(scope="session")
def shelf(tmp_path_factory):
    """Small tables and finished releases that all tests share; see `tests/shelf.py`."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shelf"
    folder.mkdir(exist_ok=True)
    return Shelf(folder)
