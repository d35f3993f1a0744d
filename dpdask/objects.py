"""Cells of Python objects: of which types they are, also inside Python's own collections."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

import numpy as np

_COLLECTIONS = (list, tuple, dict, set, frozenset, np.ndarray)
_MAX_DEPTH = 8


class TooDeep:
    """Stands for the types of what is nested too deeply to be looked at."""


def find_cell_types(cells: Iterable[Any], depth: int = _MAX_DEPTH) -> set[type]:
    """Return the types of the cells, and of what their collections hold.

    Parameters
    ----------
    cells
        The cells.
    depth
        How many collections within one another are opened. For those below it, there is `TooDeep`.
    """
    cells = list(cells)
    types = set(map(type, cells))
    nested = tuple(each for each in types if issubclass(each, _COLLECTIONS))
    if not nested:
        return types
    if depth == 0:
        return types | {TooDeep}
    return types | find_cell_types(chain.from_iterable(_open(cell) for cell in cells if isinstance(cell, nested)), depth - 1)


def _open(cell: Any) -> Iterable[Any]:
    if isinstance(cell, np.ndarray):
        return cell.ravel().tolist() if cell.dtype.hasobject else ()
    return chain(cell.keys(), cell.values()) if isinstance(cell, dict) else cell
