"""A local file that goes to the disk while it is being written, so that the last step, to wait for the disk, is short."""

from __future__ import annotations

import ctypes
import io
from collections.abc import Callable
from typing import Any

_STEP_BYTES = 2**20
_START_WRITING = 2  # SYNC_FILE_RANGE_WRITE


def _find_hint() -> Callable[[int, int, int, int], int] | None:
    """Return Linux's `sync_file_range`, or None where there is none."""
    try:
        hint = ctypes.CDLL(None).sync_file_range
    except (OSError, AttributeError, TypeError):  # another system or C library
        return None
    hint.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return hint


_hint = _find_hint()


class LocalFile(io.FileIO):
    """A new file; each MiB is handed to the disk at once, where the system can be told to.

    Only `os.fsync` makes sure that the file is on the disk, and only it reports that the disk failed.
    """

    _written = _handed_over = 0

    def write(self, data: Any) -> int:
        """Write bytes, as `io.FileIO` does."""
        n_bytes = super().write(data)
        self._written += n_bytes or 0
        waiting = self._written - self._handed_over
        if waiting >= _STEP_BYTES and _hint is not None:
            _hint(self.fileno(), self._handed_over, waiting, _START_WRITING)  # an error is no harm: the file is written later
            self._handed_over = self._written
        return n_bytes
