"""What a process that dpdask starts sets at its begin: how often Python looks for garbage."""

from __future__ import annotations

import atexit
import gc


def collect_rarely() -> None:
    """Let Python look for garbage rarely in this process, and not at its end.

    Imports make a million objects that stay, and to look through them again and again is a third of the time of a small job.
    """
    gc.set_threshold(100_000, 50, 100)
    atexit.register(gc.freeze)
