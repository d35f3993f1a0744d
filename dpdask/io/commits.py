"""What a commit to a table with a log is called by, in any format."""

from __future__ import annotations

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
