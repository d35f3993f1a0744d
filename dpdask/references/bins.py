"""The bins of continuous and mixed columns: a number of cells, or the first value of each cell."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated, Literal

import numpy as np
from pydantic import BeforeValidator

from dpdask.cells import DEFAULT_BINS, Cells, FoundBins, cells, cut_columns, not_cut
from dpdask.codec import Codec, LevelCodec
from dpdask.references.histogram import MAX_BINS
from dpdask.schema import Schema


def _as_firsts(value: object) -> object:
    if not isinstance(value, list | tuple) or not value or any(type(first) not in (int, float) for first in value):
        raise ValueError("a number of cells, or a list of the first value of each cell, is expected")
    firsts = tuple(float(first) for first in value)
    if not all(one < two for one, two in pairwise(firsts)):
        raise ValueError("the first values of the cells must increase")
    return firsts


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
    if value == "adaptive":
        return value
    if isinstance(value, Mapping):
        return {name: _as_bins_of(name, bins) for name, bins in value.items()}
    return _as_count(value)


def as_fixed_bins(value: object) -> object:
    """Return bins that are fixed beforehand, as `as_bins` does.

    Raises
    ------
    ValueError
        If they are none, or adaptive.
    """
    found = as_bins(value)
    if found == "adaptive" or (isinstance(found, dict) and "adaptive" in found.values()):
        raise ValueError("adaptive cells are for tables of noisy counts; a number of cells, or a list of the first value of each cell, is expected")
    return found


def _as_bins_of(name: object, value: object) -> object:
    try:
        if value == "adaptive":
            return value
        return _as_firsts(value) if isinstance(value, list | tuple) else _as_count(value)
    except ValueError as error:
        raise ValueError(f"column {name!r}: {error}") from None


Bins = Annotated[Literal["adaptive"] | int | dict[str, Literal["adaptive"] | int | tuple[float, ...]], BeforeValidator(as_bins)]
"""How continuous and mixed columns are cut: `adaptive` finds the cells of every column under privacy; a number of cells of equal width for all; or
one of these, or the first value of each cell, for each column, those that are not named being adaptive."""

_FAR = 10


def check_bins(bins: object, schema: Schema, parameter: str = "bins") -> None:
    """Check that bins name only columns that are cut, as far as the schema tells.

    Parameters
    ----------
    bins
        How columns are cut.
    schema
        The declared columns.
    parameter
        The name of the bins among the mechanism's parameters, for messages.

    Raises
    ------
    SpecError
        If they name another column.
    """
    cut = [name for name in schema.privatised if not schema.columns[name].has_levels]
    for name in bins if isinstance(bins, Mapping) else ():
        if name not in cut:
            raise not_cut(name, cut, parameter)


Found = Mapping[str, FoundBins]


def list_adaptive(schema: Schema, bins: Bins) -> tuple[str, ...]:
    """Return the continuous and mixed columns whose cells are found, in the order of the schema.

    Parameters
    ----------
    schema
        The declared columns.
    bins
        How they are cut.
    """
    return tuple(name for name in schema.privatised if not schema.columns[name].has_levels and _bins_of(name, bins) == "adaptive")


def _bins_of(name: str, bins: Bins) -> Literal["adaptive"] | int | tuple[float, ...]:
    return bins.get(name, "adaptive") if isinstance(bins, dict) else bins


def warn_of_far_cells(codecs: Mapping[str, Codec], bins: Mapping[str, str | int | tuple[float, ...]] | str | int) -> tuple[str, ...]:
    """Return a warning for each column whose first or last declared cell is more than ten times as wide as all its others together.

    Parameters
    ----------
    codecs
        The codec of each column.
    bins
        How they are cut.
    """
    said = []
    for name, codec in codecs.items():
        own = bins.get(name) if isinstance(bins, Mapping) else bins
        if isinstance(codec, LevelCodec) or not isinstance(own, tuple):
            continue
        widths = np.diff(cells(codec, own).edges)
        for place, width in {"first": widths[0], "last": widths[-1]}.items():
            if len(widths) > 1 and width > _FAR * (widths.sum() - width):
                what = f"The {place} declared cell of {name} is more than {_FAR} times as wide as all its others together"
                said.append(f"{what}. Values in it are spread over its whole width: declare narrower bounds, or more cells.")
    return tuple(said)


def cut_with_found(
    codecs: Mapping[str, Codec], bins: Bins, found: Found | None, parameter: str = "bins", *, n_bins: int = DEFAULT_BINS
) -> dict[str, Cells]:
    """Return the public cells of each column.

    Parameters
    ----------
    codecs
        The codec of each column.
    bins
        How continuous and mixed columns are cut.
    found
        The cells that were found; None: as many as may be found, of equal width, which is good for nothing but their number.
    parameter
        The name of the bins among the mechanism's parameters, for messages.
    n_bins
        Into how many cells of equal counts columns will be cut; with many rows at single values there may be twice as many, and one.

    Raises
    ------
    SpecError
        If bins name a column that is not cut, or do not fit a column.
    """
    given: dict[str, int | tuple[float, ...] | FoundBins] = dict.fromkeys(bins, 1) if isinstance(bins, dict) else {}  # strange names are refused
    for name, codec in codecs.items():
        if not isinstance(codec, LevelCodec):
            own = _bins_of(name, bins)
            most = 2 * n_bins + 1 + 2 * len(codec.atoms)  # an atom is a cell, and may cut one
            given[name] = own if own != "adaptive" else most if found is None else found[name]
    return cut_columns(codecs, given, parameter)
