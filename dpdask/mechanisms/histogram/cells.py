"""The cells of a perturbed histogram: their number by the paper's rules, the limit on it, their centres, and the whole line."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import scipy  # its modules are imported when they are first used, and `special` is slow to import
from numpy.typing import NDArray

from dpdask.cells import Cells, FoundBins
from dpdask.codec import ValueCodec
from dpdask.errors import SpecError
from dpdask.kernels.marginals import MAX_LEVELS

Floats = NDArray[np.float64]

WELL_ABOVE = 3.0
"""How many times the largest noise the average count should be. Lei's own example, K = 10 at α = 1, has 6."""

MOST_FOUND = 64
"""Into how many cells of equal counts a column is cut at most, if its cells are found."""

RARE = 0.01
"""A column with a smaller share of the rows outside its largest cell does not limit how many cells there are."""


def bandwidth(n_rows: float, n_continuous: int, *, thresholded: bool) -> float:
    """Return the cells' width h as a share of each continuous column's range, by the paper's rates with constant 1.

    Parameters
    ----------
    n_rows
        How many rows there are, where that is public, or a public guess; at least 2.
    n_continuous
        d, how many columns are cut; levels do not count, for they are not approximated.
    thresholded
        False: (√log n / n)^(2/(d+2)). True: (log n / n)^(1/(1+d)), since cut noise no longer
        cancels.

    References
    ----------
    Lei, Differentially private M-estimators (2011), Theorems 3 and 4 (plain) and 5 (thresholded).
    """
    if not 2 <= n_rows < math.inf or n_continuous < 1:
        raise SpecError(
            "`rule` needs at least 2 rows and a continuous column",
            "bins",
            "give the numbers of bins instead",
        )
    if thresholded:
        return float((math.log(n_rows) / n_rows) ** (1.0 / (1.0 + n_continuous)))
    return float((math.sqrt(math.log(n_rows)) / n_rows) ** (2.0 / (n_continuous + 2.0)))


def bins_by_rule(n_rows: float, n_continuous: int, *, thresholded: bool) -> int:
    """Return how many cells the rule gives each continuous column: 1/h rounded, within 1 to 65,536; see `bandwidth`.

    Notes
    -----
    The rule balances rates and knows neither ε nor the levels of the other columns: for the paper's
    own table it gives 266 where the paper takes 10. Read `spec.list_warnings`, and see
    `affordable_bins`.
    """
    return min(
        MAX_LEVELS, max(1, round(1.0 / bandwidth(n_rows, n_continuous, thresholded=thresholded)))
    )


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
    unit = (
        1.0 if codec.lattice or 1e-100 < most < 1e100 else math.ldexp(1.0, math.frexp(most)[1])
    )  # squares and cubes of others overflow
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


def centres(column: Cells, line: WholeLine | None = None) -> pa.Array:
    """Return the value that stands for each possible cell of a column: Arrow array of length `column.size`.

    Levels and atoms stand for themselves, in the column's own type where it is not numeric. A cell
    of the line is its middle as float64; of whole numbers the middle one, or halfway between the
    middle two; of dates and times the earlier of those. A cell that was found is the mean of its
    fine cells. Null is null.

    Parameters
    ----------
    line
        What made them, if the column has no bounds: then the middle is that of the transformed
        cell.
    """
    codec = column.codec
    if codec.has_levels:
        return codec.decode(np.arange(codec.n_levels))
    middle = line.middles(column.edges) if line is not None else line_moments(column)[0]
    values = np.concatenate([np.zeros(int(codec.nulls)), codec.atoms, middle])[column.possible]
    is_null = np.zeros(len(values), dtype=np.bool_)
    is_null[: int(codec.nulls)] = True
    if pa.types.is_integer(codec.type) or pa.types.is_floating(codec.type):
        return pa.array(values, type=pa.float64(), mask=is_null)
    return codec.decode(np.floor(values), is_null)


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeLine:
    """Public cells of a continuous column without bounds: equal cells of x = 1 / (1 + exp(-(z - location)/scale)) in (0, 1).

    Notes
    -----
    Quantiles are preserved by the monotone transform, so those of the cells' centres, taken back,
    are consistent. Means and slopes are not: the outermost cells have no end, and whatever lies in
    one counts as its centre.

    References
    ----------
    Lei (2011), section 3.2, the extension to distributions on the whole line, there with location 0
    and scale 1.
    """

    bins: int
    # Public guesses of the middle and the spread of the column; never computed from it. The cells
    # are narrowest, of width 4·scale/bins, at the location, and half of them lie within ±1.1·scale
    # of it.
    location: float = 0.0
    scale: float = 1.0

    def __post_init__(self) -> None:
        if (
            not 2 <= self.bins <= MAX_LEVELS
            or not math.isfinite(self.location)
            or not 0 < self.scale < math.inf
        ):
            raise SpecError(
                "the whole line is cut into 2 to 65,536 cells of a positive scale",
                "bins",
                "correct its bins, location or scale",
            )

    def to_unit(self, z: Floats) -> Floats:
        """Return x = 1 / (1 + exp(-(z - location)/scale)) of each number."""
        x: Floats = scipy.special.expit((z - self.location) / self.scale)
        return x

    def from_unit(self, x: Floats) -> Floats:
        """Return z = location + scale·log(x / (1 - x)) of each number in (0, 1): the inverse of `to_unit`."""
        z: Floats = self.location + self.scale * scipy.special.logit(x)
        return z

    def cells(self, codec: ValueCodec) -> Cells:
        """Return the cells of a column without bounds or atoms.

        The first and the last have no end, and hold every value beyond; for drawing values they end
        where a quarter of their probability under the logistic distribution would lie beyond.
        """
        if codec.bounds is not None or codec.atoms:
            raise SpecError(
                "only a column without bounds and atoms can be cut on the whole line",
                f"column {codec.name!r}",
                "give a number of bins",
            )
        unit = np.arange(self.bins + 1) / self.bins
        unit[[0, -1]] = 0.25 / self.bins, 1.0 - 0.25 / self.bins
        edges = self.from_unit(unit)
        edges = np.unique(np.floor(edges)) if codec.lattice else np.unique(edges)
        return Cells(
            codec=codec,
            edges=edges,
            possible=np.ones(len(edges) - 1 + int(codec.nulls), dtype=np.bool_),
        )

    def middles(self, edges: Floats) -> Floats:
        """Return the middle of each cell in x, taken back to z."""
        unit = self.to_unit(edges)
        unit[[0, -1]] = 0.0, 1.0
        return self.from_unit((unit[:-1] + unit[1:]) / 2.0)
