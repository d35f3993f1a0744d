"""The cells of a perturbed histogram: their number by the paper's rules, its limit, and centres."""

from __future__ import annotations

import math

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dpdask.cells import Cells, FoundBins
from dpdask.codec import ValueCodec
from dpdask.kernels.marginals import MAX_LEVELS

Floats = NDArray[np.float64]

WELL_ABOVE = 3.0
"""How many times the largest noise the average count should be. Lei's own example, K = 10 at α = 1, has 6."""

MOST_FOUND = 64
"""Into how many cells of equal counts a column is cut at most, if its cells are found."""

RARE = 0.01
"""A column with a smaller share of the rows outside its largest cell does not limit how many cells there are."""


def bins_by_rule(n_rows: float, n_continuous: int, *, thresholded: bool) -> int:
    """Return how many cells the paper's rate gives each cut column, within 1 to 65,536.

    Notes
    -----
    1/h rounded, of the width h as a share of the column's range, with constant 1: for d columns
    that are cut (√log n / n)^(2/(d+2)), or after a threshold, where cut noise no longer cancels,
    (log n / n)^(1/(1+d)). The rule balances rates and knows neither ε nor the levels of the other
    columns: for the paper's own table it gives 266 where the paper takes 10. See `affordable_bins`.

    References
    ----------
    Lei, Differentially private M-estimators (2011), Theorems 3 and 4 (plain) and 5 (thresholded).
    """
    d, log_n = n_continuous, math.log(n_rows)
    width: float
    if thresholded:
        width = (log_n / n_rows) ** (1.0 / (1.0 + d))
    else:
        width = (math.sqrt(log_n) / n_rows) ** (2.0 / (d + 2.0))
    return min(MAX_LEVELS, max(1, round(1.0 / width)))


def largest_noise(n_cells: float, scale: float) -> float:
    """Return about the largest of the noises of all cells, in counts: scale · log(cells), which is log(cells)·2/ε under replace-one."""
    return scale * math.log(max(2.0, n_cells))


def affordable_bins(n_rows: float, n_continuous: int, n_levels: int, scale: float) -> int:
    """Return the most cells for each continuous column at which the average count is `WELL_ABOVE` times the largest noise; 1 if none is.

    References
    ----------
    Lei (2011), section 4.3: "n/c(K) is much larger than the maximum additive noise".
    """

    def enough(bins: int) -> bool:
        n_cells: int = n_levels * bins**n_continuous
        return n_rows / n_cells >= WELL_ABOVE * largest_noise(n_cells, scale)

    low, high = 1, MAX_LEVELS + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if enough(middle) else (low, middle)
    return low


def count_rest(found: FoundBins, n_rows: float) -> float:
    """Return how many rows lie outside a column's largest cell; those at null and at declared atoms count as one cell."""
    inside = np.add.reduceat(found.masses, np.searchsorted(found.edges, found.cuts[:-1]))
    return n_rows - max(float(inside.max()), n_rows - float(inside.sum()))


def line_moments(column: Cells) -> tuple[Floats, Floats, Floats, Floats]:
    """Return the mean, the mass, the standard deviation and the skewness of what is expected in each cell of the line.

    Parameters
    ----------
    column
        The column's cells, with bounds. Values inside a cell that was found follow its fine cells;
        inside others they are uniform.
    """
    codec = column.codec
    most = float(np.abs(column.edges).max())
    is_usual = codec.lattice or 1e-100 < most < 1e100
    unit = 1.0 if is_usual else math.ldexp(1.0, math.frexp(most)[1])  # squares of others overflow
    means, widths, variances = _uniform(column.edges, float(codec.lattice), unit)
    if column.found is None:
        return means, widths, np.sqrt(variances) * unit, np.zeros(len(means))
    edges, masses = column.found.edges, column.found.masses
    starts = np.searchsorted(edges, column.edges[:-1])
    own = np.repeat(np.arange(len(starts)), np.diff(np.append(starts, len(masses))))
    total = np.add.reduceat(masses, starts)
    known = total > 0.0
    share = masses / np.where(known, total, 1.0)[own]
    fine, _, inside = _uniform(edges, float(codec.lattice), unit)
    means = np.where(known, np.add.reduceat(share * fine, starts), means)
    apart = (fine - means[own]) / unit
    variances = np.where(known, np.add.reduceat(share * (apart**2 + inside), starts), variances)
    third = np.where(known, np.add.reduceat(share * (apart**3 + 3.0 * apart * inside), starts), 0.0)
    return (
        means,
        np.maximum(total, 1.0),
        np.sqrt(variances) * unit,
        third / np.where(variances > 0.0, variances, np.inf) ** 1.5,
    )


def _uniform(edges: Floats, step: float, unit: float) -> tuple[Floats, Floats, Floats]:
    """Return the mean and the width of values that are uniform in each cell, and their variance in squares of a unit."""
    widths = np.diff(edges)
    return (
        (edges[:-1] + step) / 2.0 + edges[1:] / 2.0,
        widths,
        np.maximum((widths / unit) ** 2 - step, 0.0) / 12.0,
    )


def centres(column: Cells) -> pa.Array:
    """Return the value that stands for each possible cell of a column: Arrow array of length `column.size`.

    Levels and atoms stand for themselves, in the column's own type where it is not numeric. A cell
    of the line is its middle as float64; of whole numbers the middle one, or halfway between the
    middle two; of dates and times the earlier of those. A cell that was found is the mean of its
    fine cells. Null is null.
    """
    codec = column.codec
    if codec.has_levels:
        return codec.decode(np.arange(codec.n_levels))
    singles = np.concatenate([np.zeros(int(codec.nulls)), codec.atoms])
    values = np.concatenate([singles, line_moments(column)[0]])[column.possible]
    is_float = pa.types.is_integer(codec.type) or pa.types.is_floating(codec.type)
    return decode_points(codec, values if is_float else np.floor(values), int(codec.nulls))


def decode_points(codec: ValueCodec, values: Floats, n_null: int) -> pa.Array:
    """Return values, of which the first stand for null, as float64, or in a type that is no number."""
    is_null = np.arange(len(values)) < n_null
    if pa.types.is_integer(codec.type) or pa.types.is_floating(codec.type):
        return pa.array(values, type=pa.float64(), mask=is_null)
    return codec.decode(np.rint(values), is_null)
