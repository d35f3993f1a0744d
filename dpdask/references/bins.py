"""The bins of continuous and mixed columns: a number of cells, or the first value of each cell."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import BeforeValidator

from dpdask.references.histogram import MAX_BINS


def _as_firsts(value: object) -> object:
    if not isinstance(value, list | tuple) or not value or any(type(first) not in (int, float) for first in value):
        raise ValueError("a number of cells, or a list of the first value of each cell, is expected")
    return tuple(float(first) for first in value)


def _as_count(value: object) -> object:
    if type(value) is not int or not 1 <= value <= MAX_BINS:
        raise ValueError(f"a number of cells is a whole number from 1 to {MAX_BINS:,}")
    return value


def as_bins(value: object) -> object:
    """Return bins as a document says them, their lists as tuples of floats.

    Raises
    ------
    ValueError
        If they are none.
    """
    if isinstance(value, Mapping):
        return {name: _as_bins_of(name, bins) for name, bins in value.items()}
    return _as_count(value)


def _as_bins_of(name: object, value: object) -> object:
    try:
        return _as_firsts(value) if isinstance(value, list | tuple) else _as_count(value)
    except ValueError as error:
        raise ValueError(f"of the column {name!r}: {error}") from None


Bins = Annotated[int | dict[str, int | tuple[float, ...]], BeforeValidator(as_bins)]
