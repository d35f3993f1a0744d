"""The one numba decorator: compiled once per machine where a cache can be written, releasing the GIL.

A function is compiled together with those that it calls. Numba keeps it until its own file changes,
so that a change in another file, as after an upgrade, would have no effect. Here it is kept until
any of the kernels changes.

Compiling is most of what a first job costs, so kernels are loops: an assignment to a slice, a sum
along an axis or a sort is compiled too, for 0.1 to 4 seconds of CPU time each. A sort between two
loops is better done by numpy, outside.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import numba
from numba.core import event

Args = ParamSpec("Args")
Result = TypeVar("Result")

_SOURCES = hashlib.sha256(
    b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
).hexdigest()


def jit(function: Callable[Args, Result]) -> Callable[Args, Result]:
    """Return `function` compiled on first use; without a writable cache folder it is compiled once per process."""
    try:
        compiled: Callable[Args, Result] = numba.njit(nogil=True, cache=True)(function)
        if not numba.config.DISABLE_JIT:  # then it is the function itself
            compiled._cache._cache_file._source_stamp = _SOURCES  # type: ignore[attr-defined]  # numba has no public way
    except (
        RuntimeError
    ):  # numba found no place for its cache (a read-only install without a home folder)
        compiled = numba.njit(nogil=True)(function)
    return compiled


class _Compiling(event.Listener):  # type: ignore[misc]  # numba ships no types
    """Tells the log `dpdask.steps` that a function of this package is compiled: it is silent if a cache holds the function."""

    step = "compiling (first use)"

    def on_start(self, event: Any) -> None:
        if _is_ours(event):
            logging.getLogger("dpdask.steps").info(self.step)

    def on_end(self, event: Any) -> None:
        if _is_ours(event):
            logging.getLogger("dpdask.steps").info(
                "%s: done", self.step, extra={"ended": self.step}
            )


def _is_ours(event: Any) -> bool:
    """Return whether a function of this package is compiled; a function that its caller made may have no module."""
    return str(event.data["dispatcher"].py_func.__module__).startswith("dpdask.")


event.register("numba:compile", _Compiling())
