"""What a process begins with: how often Python collects garbage, from where the processes that it starts import, and the versions that it computes with.

A worker with other versions than the driver's refuses its tasks by a stamp in them.
"""

from __future__ import annotations

import atexit
import functools
import gc
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any


def collect_rarely() -> None:
    """Let Python collect garbage rarely in this process, and not at its end.

    Imports create a million objects that stay, and scanning them again and again takes a third of a
    small job's time. Objects in reference cycles live longer: a full collection comes after some
    ten million new objects at the earliest.
    """
    gc.set_threshold(100_000, 20, 10)
    atexit.register(gc.freeze)


def keep_folder_out() -> None:
    """Let the Python processes that this command starts import nothing from the working folder, as it does not itself.

    Somebody else may write there. Local workers and Python's own helpers start as `python -c`,
    which puts the folder first in sys.path.
    """
    with suppress(OSError):  # a folder that is gone holds no module
        if not {"", str(Path.cwd())} & set(sys.path):  # as of `python -m dpdask`, which looks there
            os.environ.setdefault("PYTHONSAFEPATH", "1")


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
