"""A fitted perturbed histogram: its cells, and the noisy counts that are released as cells or as rows; safe to publish."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Literal, Self, get_args

import numpy as np
import pyarrow as pa

from dpdask.archive import Archive, Contents, Named
from dpdask.arrays import Floats, Ints, freeze_class
from dpdask.cells import Cells, CutColumns, FoundBins
from dpdask.codec import ValueCodec
from dpdask.errors import SpecError
from dpdask.kernels.marginals import MAX_LEVELS
from dpdask.mechanisms.columns import (
    CHUNK_ROWS,
    ReleasedCounts,
    draw_records,
)
from dpdask.mechanisms.histogram.noise import NoisyHistogram
from dpdask.scales import Unit, is_real
from dpdask.schema import Schema
from dpdask.streams import Rng, RunKey, stream

if TYPE_CHECKING:
    import pandas as pd


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
    values = values if _has_middles(codec.type, codec.unit) else np.floor(values)
    return decode_points(codec, values, int(codec.nulls))


def decode_points(codec: ValueCodec, values: Floats, n_null: int) -> pa.Array:
    """Return values, of which the first stand for null, as float64, or in the column's type."""
    is_null = np.arange(len(values)) < n_null
    if _has_middles(codec.type, codec.unit):
        return pa.array(values, type=pa.float64(), mask=is_null)
    return codec.decode(np.rint(values), is_null)


def _has_middles(type_: pa.DataType, unit: Unit | None) -> bool:
    """Return whether cells of a line have their middles as values, which the type may not hold: of numbers without a unit."""
    return unit is None and (pa.types.is_integer(type_) or is_real(type_))


Points = Literal["centre", "spread"]
Output = Literal["cells", "rows"]

WEIGHT = "weight"
_RECORDS = "histogram/records"

MAX_CUT = 6
"""Cut columns of which the points may be spread: they double the rows each."""


def points_per_cell(cells: CutColumns, points: Points) -> int:
    """Return how many points stand for each cell: 1, or 2 for each column that is cut, multiplied."""
    if points == "centre":
        return 1
    n_cut = sum(len(column.edges) > 0 for column in cells.values())
    if n_cut > MAX_CUT:
        what = f"{n_cut} columns are cut, so that 2**{n_cut} points would stand for each cell; the limit is {MAX_CUT} cut columns"
        raise SpecError(what, "points", "take the centres, or declare levels")
    return 1 << n_cut


def spread(
    histogram: NoisyHistogram, cells: CutColumns, start: int, stop: int
) -> tuple[dict[str, pa.Array], Floats]:
    """Return points, with weights, that have the moments of a smooth density where the histogram has steps.

    Parameters
    ----------
    cells
        The cells of each attribute, in the domain's order.
    start, stop
        Which of the cells listed, in the order of their keys.

    Returns
    -------
    values
        For each attribute, an Arrow array of length n·points, n = stop - start; the points of a
        cell follow each other.
    weights
        float64 array of that length: of the sign of the cell's weight, which is their sum.

    Privacy
    -------
    Post-processing of the noisy counts and of public cells: free.

    Notes
    -----
    In a column of cells of width h, the points are c ± h/√12, which have mean c and variance h²/12
    as a uniform distribution has, and the weights n·(1/2 ± h²·f'(c) / (√48·n)), within 0 to n, for
    a mean that follows the slope f' of the density: that of the parabola through the counts per
    width of the cell and its two neighbours along the column, all other columns being the same; at
    an end of the line, of the nearest three cells. A cell not listed counts as empty. Cut columns
    multiply. In a cell that was found, the points and their weights have the first three moments of
    its fine cells, and f is the density relative to the column's own: counts per mass. So moments
    of second order are those of the density, whichever column is explained by which. With centres a
    density that falls off to both ends has a variance too large by h²/12 (Sheppard), and slopes of
    least squares are attenuated by 1 + h²/(12·variance). One point at each cell's mean would hint
    that for the columns that explain, and attenuate what is explained.

    It is no better than the centres, and may be somewhat worse, where a cell is as wide as what it
    is to resolve (a peak, a jump, a column that another ties down to less than a cell) or values
    sit at few places; for slopes on a uniform column, whose centres are its means; and where noise
    dominates, which it neither adds to nor removes. A quantile may be closer or farther: centres
    happen to be right where they are.

    References
    ----------
    Sheppard, On the calculation of the most probable values of frequency-constants for data
    arranged according to equidistant divisions of a scale (1898); Lei, Differentially private
    M-estimators (2011), section 4.1, for the centres.
    """
    per_cell = points_per_cell(cells, "spread")
    codes = histogram.codes_at(start, stop).astype(np.int64)
    weights = histogram.weights[start:stop].astype(np.float64)[:, None]
    values: dict[str, pa.Array] = {}
    n_points = per_cell
    for axis, (name, column) in enumerate(cells.items()):
        code = np.repeat(codes[axis], per_cell)
        if not len(column.edges):
            values[name] = centres(column).take(pa.array(code))
            continue
        n_points //= 2  # of the columns that follow
        line = _Line.of(column)
        is_upper = np.arange(len(code)) // n_points % 2
        values[name] = line.values.take(pa.array(2 * code + is_upper))
        share = _share_weights(histogram, axis, line, codes[axis], slice(start, stop))
        sides = np.column_stack([1.0 - share, share])[:, None, :]
        weights = (weights[:, :, None] * sides).reshape(len(weights), 2 * weights.shape[1])
    return values, weights.ravel()


@freeze_class
class _Line:
    """The possible cells of a cut column's line, and the two points of each of the column's cells."""

    values: pa.Array  # the lower and the upper point of each cell; of a single value, twice that
    n_singles: int  # cells before the line: null and atoms
    means: Floats
    masses: Floats
    share: Floats  # of a cell's weight, the upper point's where the density is even
    deviations: Floats

    @classmethod
    def of(cls, column: Cells) -> _Line:
        """Return Gauss's points, which have the first three moments of each cell."""
        codec = column.codec
        assert codec.bounds is not None
        means, masses, deviations, skewness = (
            each[column.possible[-len(each) :]] for each in line_moments(column)
        )
        root = np.sqrt(skewness**2 + 4.0)
        lower, upper = (means + deviations * (skewness + side * root) / 2.0 for side in (-1.0, 1.0))
        # outside the bounds by rounding alone
        pairs = np.clip(np.column_stack([lower, upper]).ravel(), *codec.bounds)
        singles = np.repeat(np.concatenate([np.zeros(int(codec.nulls)), codec.atoms]), 2)
        return cls(
            values=decode_points(codec, np.concatenate([singles, pairs]), 2 * int(codec.nulls)),
            n_singles=len(singles) // 2,
            means=means,
            masses=masses,
            share=0.5 - skewness / (2.0 * root),
            deviations=deviations / root,
        )


def _share_weights(
    histogram: NoisyHistogram, axis: int, line: _Line, codes: Ints, part: slice
) -> Floats:
    """Return the share of each cell's weight that its upper point along an axis has, within 0 to 1; half of it for single values."""
    inside, n_line = np.flatnonzero(codes >= line.n_singles), len(line.means)
    here = codes[inside] - line.n_singles
    shares = np.full(len(codes), 0.5)
    shares[inside] = line.share[here]
    if n_line < 2:
        return shares
    stride = math.prod(histogram.domain.sizes[axis + 1 :])
    first = np.clip(here - 1, 0, max(0, n_line - 3))
    neighbours = [first + k for k in range(min(3, n_line))]
    keys, weights = histogram.keys[part][inside], histogram.weights[part][inside]
    x = [line.means[cell] for cell in neighbours]
    with np.errstate(all="ignore"):
        density = [
            _weights_at(histogram, keys + (cell - here) * stride) / line.masses[cell]
            for cell in neighbours
        ]
        slope = (density[1] - density[0]) / (x[1] - x[0])
        if n_line > 2:
            bend = ((density[2] - density[1]) / (x[2] - x[1]) - slope) / (x[2] - x[0])
            slope += bend * (2.0 * line.means[here] - x[0] - x[1])
        tilt = slope * line.masses[here] * line.deviations[here] / weights
    tilt[~np.isfinite(tilt)] = 0.0  # of cells that float64 hardly tells apart, a slope is not known
    shares[inside] = np.clip(shares[inside] + tilt, 0.0, 1.0)
    return shares


def _weights_at(histogram: NoisyHistogram, keys: Ints) -> Floats:
    """Return the weights of some cells, 0 of those not listed."""
    place = np.minimum(np.searchsorted(histogram.keys, keys), len(histogram.keys) - 1)
    return np.where(histogram.keys[place] == keys, histogram.weights[place], 0).astype(np.float64)


def type_points(released: pa.Schema, schema: Schema) -> pa.Schema:
    """Return the columns in which points with weights are written; numbers of cells of the line are middles, as float64."""
    types = {each.name: each.type for each in released}
    for name, type_ in types.items():
        column = schema.columns[name]
        if _has_middles(type_, column.unit) and not column.has_levels:
            types[name] = pa.float64()
    return pa.schema({**types, WEIGHT: pa.float64()})


@freeze_class(eq=False)
class FittedHistogram(ReleasedCounts):
    """A noisy histogram with the columns that its cells stand for: what a job writes, and what Python lists and samples."""

    archive: ClassVar = Archive(
        kind="histogram",
        format=3,
        noun="perturbed histogram",
        is_compressed=True,
        oldest=2,  # without `numbers` of found cells
    )

    counts_type: ClassVar = NoisyHistogram

    noisy: NoisyHistogram
    # What `batches` yields: `cells`, points and weights; or `rows`, each from a cell with
    # probability proportional to its positive weight.
    output: Output = "cells"
    # What stands for each cell: its `centre`, or points that are `spread` in it.
    points: Points = "centre"

    @property
    def types(self) -> pa.Schema:
        """The columns that are written: those of the table, or with a `weight` those of `cell_rows`."""
        return self.columns if self.output == "rows" else self.cell_rows(0, 0).schema

    @property
    def few_valued(self) -> list[str]:
        """Which of them have few distinct values: of cells, all but the weight."""
        if self.output == "cells":
            return list(self.schema.privatised)
        return ReleasedCounts.few_valued.fget(self)  # type: ignore[attr-defined]  # a property

    def batches(
        self, start: int, n_rows: int, n_total: int, key: RunKey, part: str
    ) -> Iterator[pa.RecordBatch]:
        """Yield cells, or rows.

        Parameters
        ----------
        n_rows
            How many. For rows, some weight must be positive unless it is 0.
        key, part
            Name the random streams of rows: one for the cells, one for each column's values inside
            them.
        """
        if self.output == "cells":
            yield from self.cell_rows(start, start + n_rows).to_batches()
            return
        rng = stream(key, _RECORDS, part)
        chunks = (
            self.noisy.sample_codes(min(CHUNK_ROWS, n_rows - first), rng=rng)
            for first in range(0, n_rows, CHUNK_ROWS)
        )
        yield from draw_records(
            self.columns, self.cells(), chunks, lambda name: stream(key, f"{_RECORDS}/{name}", part)
        )

    @property
    def n_points(self) -> int:
        """How many points the cells listed have together."""
        return len(self.noisy.keys) * points_per_cell(self.cells(), self.points)

    def cell_rows(self, start: int, stop: int) -> pa.Table:
        """Return some of the cells' points: for each column, in the table's order, its value, and `weight`, float64.

        Parameters
        ----------
        start, stop
            Which of the points, in the order of the cells' keys.
        """
        cells = self.cells()
        each = points_per_cell(cells, self.points)
        first, last = start // each, -(-stop // each)
        if self.points == "centre":
            codes = self.noisy.codes_at(first, last)
            columns = {
                name: centres(column).take(pa.array(code))
                for (name, column), code in zip(cells.items(), codes, strict=True)
            }
            weights = self.noisy.weights[first:last].astype(np.float64)
        else:
            columns, weights = spread(self.noisy, cells, first, last)
        table = pa.table({**{name: columns[name] for name in self.columns.names}, WEIGHT: weights})
        return table.slice(start - first * each, stop - start)

    def to_frame(self) -> pd.DataFrame:
        """Return all cells listed as `cell_rows` does; levels that are no numbers are categories.

        A category without a listed cell is kept too, so that redrawn cells have the same
        indicators.
        """
        import pandas as pd  # slow to import: workers and jobs do not need it

        frame: pd.DataFrame = self.cell_rows(0, self.n_points).to_pandas()
        for name, column in self.cells().items():
            if column.codec.has_levels:
                levels = column.codec.own.drop_null().to_pandas()
                if not pd.api.types.is_numeric_dtype(levels.dtype) or pd.api.types.is_bool_dtype(
                    levels.dtype
                ):
                    frame[name] = pd.Categorical(frame[name], levels, ordered=column.codec.ordered)
        return frame

    def with_points(self, points: Points) -> Self:
        """Return this histogram with other points for its cells; free.

        Parameters
        ----------
        points
            `centre`, as in the paper, or `spread`: two points for each column that is cut,
            multiplied, with weights that keep the means, variances and covariances of a smooth
            density, which centres do not; see `points.spread`.
        """
        if points not in get_args(Points):
            raise SpecError(f"must be centre or spread, not {points!r}", "`points`")
        points_per_cell(self.cells(), points)
        return replace(self, points=points)

    def redraw(self, rng: Rng) -> Self:
        """Return this histogram with the same noise once more, cut at the same threshold: for `inference.noise_error`, free."""
        return replace(self, noisy=self.noisy.redraw(rng))

    @property
    def n_records(self) -> int:
        """How many rows stand for the table: as many as it has where that is public, or as the noisy counts say; at least 1."""
        n_rows = self.noisy.n_rows
        return max(1, self.noisy.total if n_rows is None else round(n_rows))

    def n_drawn(self, wanted: int | None) -> int:
        """Return how many rows to draw: the number asked for, or by default `n_records`; of cells, how many points they have.

        No row is drawn if the number of rows is private and no weight is positive: as far as the
        noisy counts show, the table is empty, and an empty table is released like any other.
        """
        if self.output == "cells":
            return self.n_points
        if self.noisy.plan.n_rows_private and not self.noisy.is_positive:
            return 0
        self.noisy.check_positive()
        return self.n_records if wanted is None else wanted

    def _contents(self) -> Contents:
        header, arrays = ReleasedCounts._contents(self)
        return {"output": self.output, "points": self.points, **header}, arrays

    @classmethod
    def _of_contents(cls, header: Named, arrays: Named) -> Self:
        output, points = header["output"], header["points"]
        if output not in get_args(Output) or points not in get_args(Points):
            raise ValueError("another output")
        return cls(**cls._read_counts(header, arrays), output=output, points=points)
