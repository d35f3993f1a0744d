"""Where simulated tables go: a new local folder, whose files appear only when they are complete."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from dpdask.errors import OutputError, UsageError

SEEDS: Final = (0, (1 << 64) - 1)


def check_ranges(ranges: Mapping[str, tuple[int, int, int]]) -> None:
    """Check that each named value lies in its closed range.

    Parameters
    ----------
    ranges
        The value, the least and the largest possible one, of each argument by its name.

    Raises
    ------
    UsageError
        If one does not.
    """
    for name, (value, low, high) in ranges.items():
        if not low <= value <= high:
            raise UsageError(f"{value} is not in {low}..{high}", name, "give one that is")


def check_local(out: str) -> None:
    """Check that a place is a path, not a URL.

    Raises
    ------
    UsageError
        If it is a URL.
    """
    if "://" in out:
        raise UsageError("simulated tables are written to local folders only", out, "give a path")


def claim(out: str) -> Path:
    """Return the output folder, made with its parents.

    Raises
    ------
    OutputError
        If it cannot be made, or holds something already.
    """
    folder = Path(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        occupied = next(folder.iterdir(), None) is not None
    except OSError as error:
        raise OutputError(f"is not a folder that can be made or read ({type(error).__name__})", out, "choose another") from error
    if occupied:
        raise OutputError("exists and is not empty", out, "choose another folder, or delete it")
    return folder


@contextmanager
def stage(path: Path) -> Iterator[Path]:
    """Yield a temporary name beside `path`; the file written there is renamed to `path` at the end, and removed on failure.

    Raises
    ------
    OutputError
        If it cannot be written.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        yield temporary
        temporary.replace(path)
    except OSError as error:
        raise OutputError(f"cannot be written ({type(error).__name__})", str(path), "delete the folder, make room, run again") from error
    finally:
        temporary.unlink(missing_ok=True)
