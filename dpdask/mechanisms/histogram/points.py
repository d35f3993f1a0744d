"""The points that stand for the cells of a perturbed histogram: the centre of each, or two of each cut column that keep its moments."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dpdask.cells import Cells
from dpdask.codec import ValueCodec
from dpdask.errors import SpecError
from dpdask.mechanisms.histogram.cells import centres, line_moments
from dpdask.mechanisms.histogram.noise import NoisyHistogram

Floats = NDArray[np.float64]
Points = Literal["centre", "spread"]

MAX_CUT = 6
"""Cut columns of which the points may be spread: they double the rows each."""


def points_per_cell(cells: Mapping[str, Cells], points: Points) -> int:
    """Return how many points stand for each cell: 1, or 2 for each column that is cut, multiplied.

    Parameters
    ----------
    cells
        The cells of each column.
    points
        What stands for a cell.

    Raises
    ------
    SpecError
        If they are to be spread, and more than 6 columns are cut.
    """
    if points == "centre":
        return 1
    n_cut = len(_cut(cells))
    if n_cut > MAX_CUT:
        what = f"{n_cut} columns are cut, so that 2**{n_cut} points would stand for each cell; the limit is {MAX_CUT} cut columns"
        raise SpecError(what, "points", "take the centres, or declare levels")
    return 1 << n_cut


def spread(histogram: NoisyHistogram, cells: Mapping[str, Cells], start: int, stop: int) -> tuple[dict[str, pa.Array], Floats]:
    """Return points, with weights, that have the moments of a smooth density where the histogram has steps.

    Parameters
    ----------
    histogram
        The noisy counts.
    cells
        The cells of each attribute, in the domain's order; none on the whole line.
    start, stop
        Which of the cells listed, in the order of their keys.

    Returns
    -------
    values
        For each attribute, an Arrow array of length n·points, n = stop - start; the points of a cell follow each other.
    weights
        float64 array of that length: of the sign of the cell's weight, which is their sum.

    Raises
    ------
    SpecError
        As `points_per_cell`, or if a column is on the whole line, whose outermost cells have no end.

    Privacy
    -------
    Post-processing of the noisy counts and of public cells: free.

    Notes
    -----
    In a column of cells of width h, the points are c ± h/√12, which have mean c and variance h²/12 as a uniform distribution has, and
    the weights n·(1/2 ± h²·f'(c) / (√48·n)), within 0 to n, for a mean that follows the slope f' of the density: that of
    the parabola through the counts per width of the cell and its two neighbours along the column, all other columns being
    the same; at an end of the line, of the nearest three cells. A cell not listed counts as empty. Cut columns multiply.
    In a cell that was found, the points and their weights have the first three moments of its fine cells, and f is the density relative to
    the column's own: counts per mass.
    So moments of second order are those of the density, whichever column is explained by which. With centres a density that
    falls off to both ends has a variance too large by h²/12 (Sheppard), and slopes of least squares are attenuated by
    1 + h²/(12·variance). One point at each cell's mean would hint that for the columns that explain, and attenuate what is
    explained.

    It is no better than the centres, and may be somewhat worse, where a cell is as wide as what it is to resolve (a peak, a
    jump, a column that another ties down to less than a cell) or values sit at few places; for slopes on a uniform column,
    whose centres are its means; and where noise dominates, which it neither adds to nor removes. A quantile may be closer
    or farther: centres happen to be right where they are.

    References
    ----------
    Sheppard, On the calculation of the most probable values of frequency-constants for data arranged according to
    equidistant divisions of a scale (1898); Lei, Differentially private M-estimators (2011), section 4.1, for the centres.
    """
    per_cell = points_per_cell(cells, "spread")
    codes = histogram.codes_at(start, stop)
    weights = histogram.weights[start:stop].astype(np.float64)[:, None]
    values: dict[str, pa.Array] = {}
    cut, place = _cut(cells), 0
    for axis, (name, column) in enumerate(cells.items()):
        code = np.repeat(codes[axis].astype(np.int64), per_cell)
        if name not in cut:
            values[name] = centres(column).take(pa.array(code))
            continue
        place += 1
        upper = (np.arange(len(code)) >> (len(cut) - place)) & 1
        values[name] = _pairs(column).take(pa.array(2 * code + upper))
        share = _upper_shares(histogram, axis, column, codes[axis].astype(np.int64), start, stop)
        sides = np.column_stack([1.0 - share, share])
        weights = (weights[:, :, None] * sides[:, None, :]).reshape(len(weights), 2 * weights.shape[1])
    return values, weights.ravel()


def _cut(cells: Mapping[str, Cells]) -> list[str]:
    return [name for name, column in cells.items() if len(column.edges)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """The two points of each possible cell of the line, where they are in the middle of it, and how they share its weight."""

    means: Floats
    masses: Floats
    lower: Floats
    upper: Floats
    share: Floats
    deviations: Floats


def _line(column: Cells) -> _Line:
    codec = column.codec
    assert isinstance(codec, ValueCodec)
    if codec.bounds is None:
        raise SpecError("the points of cells on the whole line cannot be spread", f"column {codec.name!r}", "take the centres")
    means, masses, deviations, skewness = (each[column.possible[-len(each) :]] for each in line_moments(column))
    root = np.sqrt(skewness**2 + 4.0)
    lower, upper = (
        np.clip(means + deviations * (skewness + side * root) / 2.0, *codec.bounds) for side in (-1.0, 1.0)
    )  # Gauss's points: outside by rounding alone
    return _Line(means=means, masses=masses, lower=lower, upper=upper, share=0.5 - skewness / (2.0 * root), deviations=deviations / root)


def _pairs(column: Cells) -> pa.Array:
    """Return the two points of each possible cell, one after the other; of a single value, twice that."""
    codec = column.codec
    assert isinstance(codec, ValueCodec)
    line = _line(column)
    singles = np.repeat(np.concatenate([np.zeros(int(codec.nulls)), codec.atoms]), 2)
    values = np.concatenate([singles, np.column_stack([line.lower, line.upper]).ravel()])
    is_null = np.zeros(len(values), dtype=np.bool_)
    is_null[: 2 * int(codec.nulls)] = True
    if pa.types.is_integer(codec.type) or pa.types.is_floating(codec.type):
        return pa.array(values, type=pa.float64(), mask=is_null)
    return codec.decode(np.rint(values), is_null)


def _upper_shares(histogram: NoisyHistogram, axis: int, column: Cells, codes: NDArray[np.int64], start: int, stop: int) -> Floats:
    """Return the share of each cell's weight that its upper point along an axis has, within 0 to 1; half of it for single values."""
    line = _line(column)
    n_line, singles = len(line.means), column.size - len(line.means)
    inside = np.flatnonzero(codes >= singles)
    shares = np.full(stop - start, 0.5)
    here = codes[inside] - singles
    shares[inside] = line.share[here]
    if n_line < 2:
        return shares
    stride = math.prod(histogram.domain.sizes[axis + 1 :])
    first = np.clip(here - 1, 0, max(0, n_line - 3))
    neighbours = [first + k for k in range(min(3, n_line))]
    own = histogram.keys[start:stop][inside]
    x = [line.means[cell] for cell in neighbours]
    with np.errstate(all="ignore"):
        density = [_weights_at(histogram, own + (cell - here) * stride) / line.masses[cell] for cell in neighbours]
        slope = (density[1] - density[0]) / (x[1] - x[0])
        if n_line > 2:
            bend = ((density[2] - density[1]) / (x[2] - x[1]) - slope) / (x[2] - x[0])
            slope += bend * (2.0 * line.means[here] - x[0] - x[1])
        tilt = slope * line.masses[here] * line.deviations[here] / histogram.weights[start:stop][inside]
    tilt[~np.isfinite(tilt)] = 0.0  # of cells that float64 hardly tells apart, a slope is not known
    shares[inside] = np.clip(shares[inside] + tilt, 0.0, 1.0)
    return shares


def _weights_at(histogram: NoisyHistogram, keys: NDArray[np.int64]) -> Floats:
    """Return the weights of some cells, 0 of those not listed."""
    place = np.minimum(np.searchsorted(histogram.keys, keys), len(histogram.keys) - 1)
    return np.where(histogram.keys[place] == keys, histogram.weights[place], 0).astype(np.float64)
