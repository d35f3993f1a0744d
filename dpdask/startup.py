"""What a command sets first: how often Python collects garbage, and from where the processes that it starts import."""

from __future__ import annotations

import atexit
import gc
import os
import sys
from contextlib import suppress
from pathlib import Path


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
