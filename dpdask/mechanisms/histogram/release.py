"""A perturbed histogram as bytes, with all that its cells stand for: no row, no exact count, no key; safe to publish."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from dpdask.cells import Cells
from dpdask.errors import InputError
from dpdask.mechanisms.columns import Bins, header_from_arrays, header_to_arrays, released_cells
from dpdask.mechanisms.histogram.cells import centres
from dpdask.mechanisms.histogram.noise import HistogramPlan, PerturbedHistogram
from dpdask.mechanisms.histogram.points import Points, points_per_cell, spread
from dpdask.mechanisms.marginals.archive import UNREADABLE, central_event
from dpdask.privacy.events import to_dict
from dpdask.schema import Schema
from dpdask.stats import Domain

HISTOGRAM_FORMAT = 1
WEIGHT = "weight"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FittedHistogram:
    """A perturbed histogram with the columns that its cells stand for.

    Attributes
    ----------
    schema
        The declared columns.
    types
        The Arrow types of the released columns.
    bins
        How each continuous or mixed column is cut.
    histogram
        The noisy counts.
    points
        What stands for each cell: its `centre`, or points that are `spread` in it.
    """

    schema: Schema
    types: pa.Schema
    bins: Bins
    histogram: PerturbedHistogram
    points: Points = "centre"

    def cells(self) -> dict[str, Cells]:
        """Return the public cells of each released column, in the order of the domain."""
        return released_cells(self.histogram.domain.names, self.schema, self.types, self.bins)

    @property
    def n_points(self) -> int:
        """How many points the cells listed have together.

        Raises
        ------
        SpecError
            If too many columns are cut for points to be spread.
        """
        return len(self.histogram.keys) * points_per_cell(self.cells(), self.points)

    def cell_rows(self, start: int, stop: int) -> pa.Table:
        """Return some of the cells' points: for each column, in the table's order, its value, and `weight`, float64.

        Parameters
        ----------
        start, stop
            Of the points, in the order of the cells' keys.
        """
        cells = self.cells()
        each = points_per_cell(cells, self.points)
        first, last = start // each, -(-stop // each)
        if self.points == "centre":
            codes = self.histogram.codes_at(first, last)
            columns = {name: centres(column).take(pa.array(code)) for (name, column), code in zip(cells.items(), codes, strict=True)}
            weights = self.histogram.weights[first:last].astype(np.float64)
        else:
            columns, weights = spread(self.histogram, cells, first, last)
        table = pa.table({**{name: columns[name] for name in self.types.names}, WEIGHT: weights})
        return table.slice(start - first * each, stop - start)

    @property
    def n_records(self) -> int:
        """How many rows stand for the table: as many as it has where that is public, or as the noisy counts say; at least 1."""
        n_rows = self.histogram.n_rows
        return max(1, self.histogram.total if n_rows is None else round(n_rows))

    def n_drawn(self, wanted: int | None) -> int:
        """Return how many rows to draw: the number asked for, or by default `n_records`.

        It is 0 if the number of rows is private and no weight is positive: as far as the noisy counts show, the table is empty,
        and an empty table is released like any other.
        """
        if self.histogram.plan.n_rows_private and not self.histogram.is_positive:
            return 0
        return self.n_records if wanted is None else wanted


def histogram_to_bytes(fitted: FittedHistogram) -> bytes:
    """Return a perturbed histogram as bytes: the same histogram, the same bytes."""
    histogram = fitted.histogram
    planned = histogram.plan
    header = {
        "format": HISTOGRAM_FORMAT,
        "names": histogram.domain.names,
        "sizes": histogram.domain.sizes,
        "n_rows": histogram.n_rows,
        "cut": histogram.cut,
        "cells": to_dict(planned.cells),
        "total": None if planned.total is None else to_dict(planned.total),
        "plan": {"threshold": planned.threshold, "factor": planned.factor, "epsilon": planned.epsilon, "rows": planned.rows},
        "points": fitted.points,
    }
    buffer = io.BytesIO()
    np.savez_compressed(
        buffer,
        allow_pickle=False,
        **header_to_arrays(header, fitted.schema, fitted.types, fitted.bins),
        keys=histogram.keys,
        weights=histogram.weights,
    )
    return buffer.getvalue()


def histogram_from_bytes(data: bytes, where: str | None = None) -> FittedHistogram:
    """Return the perturbed histogram that bytes hold.

    Parameters
    ----------
    data
        From `histogram_to_bytes`.
    where
        Where they come from, for the message.

    Raises
    ------
    InputError
        If they are something else, or of another format.
    """
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            return _read({name: arrays[name] for name in arrays.files})
    except (*UNREADABLE, pa.ArrowException):
        raise InputError("this is no perturbed histogram of this version", where, "save it again with `.save`") from None


def _read(arrays: Mapping[str, Any]) -> FittedHistogram:
    header, schema, types = header_from_arrays(arrays)
    if header["format"] != HISTOGRAM_FORMAT or arrays["keys"].shape != arrays["weights"].shape or header["points"] not in ("centre", "spread"):
        raise ValueError("another format")
    total = None if header["total"] is None else central_event(header["total"])
    planned = HistogramPlan(cells=central_event(header["cells"]), total=total, **header["plan"])
    histogram = PerturbedHistogram(
        domain=Domain(names=tuple(header["names"]), sizes=tuple(header["sizes"])),
        plan=planned,
        n_rows=header["n_rows"],
        cut=header["cut"],
        keys=arrays["keys"],
        weights=arrays["weights"],
    )
    return FittedHistogram(schema=schema, types=types, bins=header["bins"], histogram=histogram, points=header["points"])
