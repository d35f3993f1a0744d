"""Pure arrays in, arrays out: numpy, scipy and numba; no dask, no I/O, no randomness of their own."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from threadpoolctl import ThreadpoolController


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
