"""A line that moves on a terminal while a verb works that has no progress to tell; imported with the command line, so nothing slow is here."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from dpdask.steps import step


@contextmanager
def show_step(name: str) -> Iterator[None]:
    """Show a step, and the steps inside it, on a terminal until the block ends; in a log nothing.

    Print results after the block: while lines move, what is printed goes to stderr with them.
    """
    moves = (
        sys.stderr is not None and sys.stderr.isatty()
    )  # a program without a console has no stderr
    if moves:
        from dpdask.terminal.progress import show_progress
    with show_progress("bars") if moves else nullcontext(), step(name, logging.DEBUG):
        yield
