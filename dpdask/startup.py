"""What a process that dpdask starts sets first: how often Python collects garbage."""

from __future__ import annotations

import atexit
import gc


def collect_rarely() -> None:
    """Let Python collect garbage rarely in this process, and not at its end.

    Imports create a million objects that stay, and scanning them again and again takes a third of a small job's time. Objects in reference
    cycles live longer: a full collection comes after some ten million new objects at the earliest.
    """
    gc.set_threshold(100_000, 20, 10)
    atexit.register(gc.freeze)
