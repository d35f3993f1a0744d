"""What a commit to a table with a log is called by, in any format."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Mode = Literal["error", "append", "overwrite"]


@dataclass(frozen=True, slots=True)
class Transaction:
    """A release, and the run that commits it: the log keeps both, so that no release is committed twice.

    Attributes
    ----------
    release
        The name of the release.
    run
        The number of the run.
    """

    release: str
    run: int


def count_committed(is_there: Callable[[int], bool]) -> int:
    """Return how many of the releases that are numbered from 0 are committed; there is no gap between them.

    Parameters
    ----------
    is_there
        Whether the release with a number is committed.
    """
    end = 1
    while is_there(end - 1):
        end *= 2
    return bisect_left(range(end), True, key=lambda number: not is_there(number))
