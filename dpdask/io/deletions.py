"""Deleted rows that a table's files still hold: one compressed bit for each row, small enough for a task to carry."""

from __future__ import annotations

import zlib

import numpy as np
from numpy.typing import NDArray


def pack(deleted: NDArray[np.bool_]) -> bytes:
    """Return a mask of deleted rows in a compact form; empty if no row is deleted."""
    return zlib.compress(np.packbits(deleted).tobytes(), 1) if deleted.any() else b""


def unpack(packed: bytes, start: int, n_rows: int) -> NDArray[np.bool_]:
    """Return a part of the mask of deleted rows; rows beyond the end of what was packed are not deleted.

    Parameters
    ----------
    packed
        What `pack` returned.
    start, n_rows
        The first row of the part, and how many rows it has.
    """
    mask = np.zeros(n_rows, dtype=np.bool_)
    if packed:
        found = np.unpackbits(np.frombuffer(zlib.decompress(packed), dtype=np.uint8))[start : start + n_rows]
        mask[: len(found)] = found
    return mask


def count_deleted(packed: bytes) -> int:
    """Return how many rows are deleted."""
    return int(np.unpackbits(np.frombuffer(zlib.decompress(packed), dtype=np.uint8)).sum()) if packed else 0
