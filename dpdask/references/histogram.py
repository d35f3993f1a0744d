"""The reference `histogram`: a noisy histogram of all rows, so that every row is released and every row is covered by ε."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar, Literal, Self

import numpy as np
import pyarrow as pa
from numpy.random import Generator
from numpy.typing import NDArray
from pydantic import Field

from dpdask.cells import Cells
from dpdask.codec import LevelCodec, ValueCodec
from dpdask.documents import Document
from dpdask.errors import DataError
from dpdask.kernels import simplex
from dpdask.privacy import noise
from dpdask.privacy.events import Adjacency, DiscreteLaplace
from dpdask.privacy.rounding import rounded_down
from dpdask.references.distribution import MARGINS, Distribution, LevelDistribution, RankDistribution

MAX_BINS = 2**15

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]


class Histogram(Document):
    """The distribution of all rows, measured with discrete Laplace noise.

    Attributes
    ----------
    share
        Of a row's ε, what the reference takes; the rest randomises the row. In (0, 1).
    bins
        Into how many equal-width cells the bounds of a continuous or mixed column are cut.

    Privacy
    -------
    Protects the values of all rows, and all rows are released: ε = ε_reference + ε_row. Unit: a row. Adjacency:
    replace-one. Sensitivity 2. Event: one `DiscreteLaplace` for each column.
    """

    kind: Literal["histogram"] = "histogram"
    share: float = Field(default=0.1, gt=0, lt=1)
    bins: int = Field(default=1024, ge=2, le=MAX_BINS)

    protected: ClassVar[str] = "the values of all rows"
    unprotected: ClassVar[str] = "nobody: the reference is a noisy histogram of all rows, and its ε is part of the total"
    joint: ClassVar[str] = MARGINS

    def split(self, epsilon: float) -> tuple[float, float]:
        """Return what the reference and what the row's own release may cost; both rounded down, so their sum never passes `epsilon`."""
        reference = rounded_down(Fraction(epsilon) * Fraction(self.share))
        return reference, rounded_down(Fraction(epsilon) - Fraction(reference))


@dataclass(frozen=True, slots=True, eq=False, repr=False)  # Dask logs the arguments of a task that failed
class CellCounts:
    """How many rows lie in each public cell: int64 array of shape (n_cells,), exact."""

    counts: Counts

    @classmethod
    def identity(cls, cells: Cells) -> Self:
        """Return the counts of no rows."""
        return cls(np.zeros(cells.n_cells, dtype=np.int64))

    @classmethod
    def of_batch(cls, cells: Cells, array: pa.Array, chosen: NDArray[np.bool_] | None = None) -> Self:
        """Return the counts of the chosen rows of a batch; every row is checked against the schema.

        Raises
        ------
        DataError
            If any row, chosen or not, violates the schema.
        """
        index = cells.index(array)
        return cls(np.bincount(index if chosen is None else index[chosen], minlength=cells.n_cells).astype(np.int64))

    def merge(self, *others: Self) -> Self:
        """Return the counts of all of them."""
        return type(self)(np.stack([part.counts for part in (self, *others)]).sum(axis=0))

    @property
    def n_rows(self) -> int:
        """How many rows were counted."""
        return int(self.counts.sum())


def histogram_event(epsilon: float, adjacency: Adjacency, rows_per_unit: int = 1) -> DiscreteLaplace:
    """Return the event of one column's noisy histogram that costs at most `epsilon` at δ = 0.

    Notes
    -----
    Replacing one row takes 1 from a cell and adds 1 to another: L1 sensitivity 2. Adding or removing it: 1. A unit of k
    rows: k times that.
    """
    sensitivity = (2 if adjacency == "replace-one" else 1) * rows_per_unit
    return DiscreteLaplace(scale=noise.laplace_scale(sensitivity, epsilon), sensitivity=sensitivity, adjacency=adjacency)


def noisy_counts(
    cells: Cells, statistic: CellCounts, epsilon: float, adjacency: Adjacency, *, rows_per_unit: int = 1, rng: Generator | None = None
) -> tuple[Counts, DiscreteLaplace]:
    """Return the counts of the possible cells with noise, and the event.

    Parameters
    ----------
    cells, statistic
        The column's cells, and the counts of all rows in them.
    epsilon
        What the histogram may cost.
    adjacency, rows_per_unit
        Who are neighbours, and how many rows one unit may have.
    rng
        None: secure noise. A stream: INSECURE, for runs marked so; see `noise.discrete_laplace`.

    Returns
    -------
    counts
        int64 array, one for each possible cell; may be negative.
    event
        What was drawn.

    Privacy
    -------
    Unit: `rows_per_unit` rows. Protected: the values of all rows counted. Sensitivity and event: `histogram_event`.
    """
    event = histogram_event(epsilon, adjacency, rows_per_unit)
    return noise.perturb(statistic.counts[cells.possible], event, rng=rng), event


def noisy_distribution(
    cells: Cells, statistic: CellCounts, epsilon: float, adjacency: Adjacency, *, rows_per_unit: int = 1, rng: Generator | None = None
) -> tuple[Distribution, DiscreteLaplace]:
    """Return the column's distribution as a noisy histogram of all rows gives it, and the event.

    Parameters
    ----------
    cells, statistic, epsilon, adjacency, rows_per_unit, rng
        As for `noisy_counts`.

    Returns
    -------
    distribution
        Of levels; or a cdf that is linear inside a cell and jumps at the atoms, whose `rank_error` is the probability of
        its largest cell (what linear interpolation can misplace; the noise comes on top).
    event
        What was drawn.

    Raises
    ------
    DataError
        If there are fewer than 2 rows, where their number is public (replace-one).

    Privacy
    -------
    As for `noisy_counts`. All that follows the noise is post-processing: under replace-one the number of rows is public
    and the counts are projected to sum to it; under add-remove it is private, and their own noisy sum takes its place.

    References
    ----------
    Bi and Shen, Distribution-invariant differential privacy, with the hold-out's edf replaced by a private one.
    """
    check_rows(cells, statistic, adjacency)
    noisy, event = noisy_counts(cells, statistic, epsilon, adjacency, rows_per_unit=rows_per_unit, rng=rng)
    return distribution_of(cells, noisy, statistic.n_rows if adjacency == "replace-one" else None), event


def check_rows(cells: Cells, statistic: CellCounts, adjacency: Adjacency) -> None:
    """Check that there are enough rows for a distribution, if their number is public.

    Raises
    ------
    DataError
        If there are fewer than 2 under replace-one.
    """
    if adjacency == "replace-one" and statistic.n_rows < 2:
        raise DataError("the table has fewer than 2 rows", f"column {cells.codec.name!r}", "a distribution needs more")


def distribution_of(cells: Cells, noisy: Counts, n_rows: int | None) -> Distribution:
    """Return the distribution that noisy counts describe; this is post-processing.

    Parameters
    ----------
    cells
        The column's cells.
    noisy
        int64 array, one count for each possible cell, as `noisy_counts` returns them.
    n_rows
        The number of rows if it is public; None uses the sum of the noisy counts.
    """
    total = max(1, int(noisy.sum())) if n_rows is None else n_rows
    probabilities = np.zeros(cells.n_cells)
    probabilities[cells.possible] = simplex.project(noisy.astype(np.float64), float(total)) / total
    probabilities /= probabilities.sum()
    if isinstance(cells.codec, LevelCodec):
        return LevelDistribution(probabilities)
    return _continuous(cells.codec, cells.edges, probabilities)


def _continuous(codec: ValueCodec, edges: Floats, probabilities: Floats) -> RankDistribution:
    """Return the cdf with a knot at every edge, and two more where the edge is an atom: before its jump, and after."""
    offset = int(codec.nulls)
    atoms = np.array(codec.atoms)
    line = probabilities[offset + len(atoms) :]
    is_atom = np.isin(edges, atoms)
    repeats = np.where(is_atom, 2, 1)
    rises = np.zeros(int(repeats.sum()))
    last = np.cumsum(repeats) - 1
    rises[last[is_atom]] = probabilities[offset : offset + len(atoms)]
    rises[(last - repeats + 1)[1:]] += line
    null = float(probabilities[0]) if codec.nulls else 0.0
    c = np.minimum(null + np.cumsum(rises), 1.0)
    c[-1] = 1.0
    return RankDistribution(np.repeat(edges, repeats), c, float(line.max()))
