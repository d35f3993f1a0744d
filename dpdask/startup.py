"""What a process begins with: how often Python collects garbage, what SIGTERM does, from where the processes that it starts import, and the versions that it computes with.

A worker with other versions than the driver's refuses its tasks by a stamp in them.
"""

from __future__ import annotations

import atexit
import functools
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpdask.errors import SpecError


def collect_rarely() -> None:
    """Let Python collect garbage rarely in this process, and not at its end.

    Imports create a million objects that stay, and scanning them again and again takes a third of a
    small job's time. Objects in reference cycles live longer: a full collection comes after some
    ten million new objects at the earliest.
    """
    gc.set_threshold(100_000, 20, 10)
    atexit.register(gc.freeze)


def import_locks() -> Any:
    """Return the module `fcntl`; refuse where Python has none, which is on Windows."""
    try:
        import fcntl
    except ImportError:
        what = "runs and fits lock files, which Python cannot on Windows"
        hint = "run them on Linux or macOS, or in WSL; dpdask.open reads releases here, too"
        raise SpecError(what, "dpdask", hint) from None
    return fcntl


def keep_folder_out() -> None:
    """Let the Python processes that this command starts import nothing from the working folder, as it does not itself.

    Somebody else may write there. Local workers and Python's own helpers start as `python -c`,
    which puts the folder first in sys.path.
    """
    with suppress(OSError):  # a folder that is gone holds no module
        if not {"", str(Path.cwd())} & set(sys.path):  # as of `python -m dpdask`, which looks there
            os.environ.setdefault("PYTHONSAFEPATH", "1")


class Terminated(KeyboardInterrupt):
    """SIGTERM came: an interruption that no keyboard asked for, as of an orchestrator, `kubectl delete` or systemd."""


_CLEANING_SECONDS = 20.0  # so long a second signal does not disturb the cleaning after the first
_AGAIN_SECONDS = 0.05  # after a lost exception: by then the code that lost it has ended


class _Sigterm:
    """What became of SIGTERM in this process."""

    def __init__(self) -> None:
        self.n_cleaning = 0  # how many blocks are open that are finished first
        self.waits = False  # whether a signal came in one of them
        self.raised: float | None = None  # when the block was last told to end
        self.lost: type[BaseException] | None = None  # what Python has dropped

    def come(self, *_: object) -> None:
        if self.raised is not None and time.monotonic() - self.raised < _CLEANING_SECONDS:
            return
        if self.n_cleaning:
            self.waits = True
            return
        self.waits, self.raised = False, time.monotonic()
        raise Terminated

    def come_again(self) -> None:
        lost, self.lost = self.lost, None
        if lost is not None and not issubclass(lost, Terminated):
            raise lost
        self.raised = None
        self.come()

    @contextmanager
    def raise_what_is_lost(self) -> Iterator[None]:
        """Raise an interruption again that Python has dropped, as it does in `__del__` and in callbacks of weak references and of the collector."""
        print_it = sys.unraisablehook

        if not hasattr(signal, "setitimer"):  # on Windows, where nothing runs that must end cleanly
            yield
            return

        def hook(lost: Any) -> None:
            if issubclass(lost.exc_type, KeyboardInterrupt):
                self.lost = lost.exc_type
                # no thread for this: its start needs locks, which may be held here
                signal.setitimer(signal.ITIMER_REAL, _AGAIN_SECONDS)
            else:
                print_it(lost)

        def ring(*given: Any) -> None:
            if self.lost is not None:
                self.come_again()
            elif callable(before):  # an alarm of whoever calls the command line in its process
                before(*given)

        before = signal.signal(signal.SIGALRM, ring)
        sys.unraisablehook = hook
        try:
            yield
        finally:
            if self.lost is not None:
                signal.setitimer(signal.ITIMER_REAL, 0.0)
                self.lost = None
            sys.unraisablehook = print_it
            signal.signal(signal.SIGALRM, before or signal.SIG_DFL)


_SIGTERM = _Sigterm()


@contextmanager
def end_on_sigterm() -> Iterator[None]:
    """Let SIGTERM end the block as Ctrl-C does, by the exception `Terminated`; afterwards the process is at its end, and ignores it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    if before == signal.SIG_IGN:  # whoever started this process wants it so
        yield
        return
    signal.signal(signal.SIGTERM, _SIGTERM.come)
    try:
        with _SIGTERM.raise_what_is_lost():
            yield
    finally:
        after = signal.SIG_IGN if _SIGTERM.raised else before or signal.SIG_DFL
        signal.signal(signal.SIGTERM, after)


@contextmanager
def finish_first() -> Iterator[None]:
    """Let SIGTERM wait for the end of the block, which cleans up, or makes something that must be known to be cleaned up."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _SIGTERM.n_cleaning += 1
    try:
        yield
    finally:
        _SIGTERM.n_cleaning -= 1
        if _SIGTERM.waits and not _SIGTERM.n_cleaning:
            _SIGTERM.come()


LIBRARIES = ("dask", "distributed", "numba", "numpy", "pandas", "pyarrow")
Versions = Mapping[str, str | None]


def find_versions(libraries: tuple[str, ...] = LIBRARIES) -> dict[str, str | None]:
    """Return the versions of Python, dpdask, its streams' format and some libraries in this process; None for what is missing.

    The function needs nothing of this module, so it can be sent by value to a process without
    dpdask.
    """
    import importlib
    import sys
    from importlib.metadata import PackageNotFoundError, version

    found: dict[str, str | None] = {"Python": f"{sys.version_info[0]}.{sys.version_info[1]}"}
    for name, module, attribute in (
        ("dpdask", "dpdask.version", "__version__"),
        ("stream format", "dpdask.streams", "STREAM_FORMAT"),
    ):
        try:
            found[name] = str(getattr(importlib.import_module(module), attribute, None))
        except ImportError:
            found[name] = None
    for library in libraries:
        try:
            found[library] = version(library)
        except PackageNotFoundError:
            found[library] = None
    return found


own_versions = functools.cache(find_versions)


def compare_versions(found: Versions, wanted: Versions) -> str:
    """Return the first version that differs, as `numba 0.60.0, and the driver has 0.61.2`; empty if all agree."""
    for name, version in wanted.items():
        there = found.get(name)
        if there != version:
            return f"{f'{name} {there}' if there else f'no {name}'}, and the driver has {version or 'none'}"
    return ""


@dataclass(frozen=True, slots=True)
class Stamp:
    """The driver's versions in a task: where it is unpickled, they are compared with those there."""

    differs: str = ""  # how they differ, as `compare_versions` tells; empty if they agree

    def __reduce__(self) -> tuple[Any, ...]:
        # no exception there: a worker that cannot unpickle a task closes its connection, and says nothing to the driver
        return _compare_here, (own_versions(),)


def _compare_here(wanted: Versions) -> Stamp:
    return Stamp(compare_versions(own_versions(), wanted))
