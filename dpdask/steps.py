"""The steps of a run by name, told to the log `dpdask.steps` at their begin and end. They hold no value and no count."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

LOG = logging.getLogger("dpdask.steps")  # `kernels.jit` writes to it too


@contextmanager
def step(name: str, level: int = logging.INFO) -> Iterator[None]:
    """Tell that a step lasts as long as the block: a record at its begin, and one with the attribute `ended` at its end.

    Parameters
    ----------
    level
        The records' level; steps below INFO are shown on terminals, and are left out of logs.
    """
    LOG.log(level, name)
    try:
        yield
    finally:
        LOG.log(level, "%s: done", name, extra={"ended": name})
