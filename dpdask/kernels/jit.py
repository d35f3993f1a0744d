"""The one numba decorator: compiled once per machine where a cache can be written, releasing the GIL."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import numba

Args = ParamSpec("Args")
Result = TypeVar("Result")


def jit(function: Callable[Args, Result]) -> Callable[Args, Result]:
    """Return `function` compiled on first use; without a writable cache folder it is compiled once per process."""
    try:
        compiled: Callable[Args, Result] = numba.njit(nogil=True, cache=True)(function)
    except RuntimeError:  # numba found no place for its cache (a read-only install without a home folder)
        compiled = numba.njit(nogil=True)(function)
    return compiled
