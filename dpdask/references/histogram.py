"""The reference `histogram`: a noisy histogram of all rows, so that every row is released and every row is covered by ε."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field

from dpdask.archive import Archive, Archived, Contents
from dpdask.cells import Cells, cells, ends
from dpdask.codec import Codec, LevelCodec, ValueCodec
from dpdask.errors import DataError, InputError
from dpdask.kernels import simplex
from dpdask.privacy.events import Adjacency, CentralEvent, DiscreteLaplace, central_from_dict, to_dict
from dpdask.privacy.noise import laplace_scale, perturb
from dpdask.privacy.rounding import round_down
from dpdask.references.distribution import Distribution, LevelDistribution, RankDistribution
from dpdask.references.hierarchy import N_LEVELS, Hierarchy, make_grid
from dpdask.references.reference import FIT, ReferenceBase
from dpdask.references.statistics import ColumnCounts
from dpdask.schema import Column
from dpdask.stats.cell_counts import CellCounts, Counts
from dpdask.streams import Noise

MAX_BINS = 2**15

_FREQUENT = 0.01  # of the rows

Floats = NDArray[np.float64]


def _as_bins(value: object) -> object:
    if value != "adaptive" and (type(value) is not int or not 2 <= value <= MAX_BINS):
        raise ValueError(f"`adaptive`, or a whole number of cells from 2 to {MAX_BINS:,}, is expected")
    return value


class Histogram(ReferenceBase):
    """The distribution of all rows, measured with discrete Laplace noise.

    Attributes
    ----------
    share
        The reference's share of a row's ε, in (0, 1); the rest randomises the row.
    bins
        How continuous and mixed columns are counted. `adaptive`: in a hierarchy of fine cells (`hierarchy.make_grid`), so that bounds
        may be much too wide. A number: in that many cells of equal width between the bounds.

    Privacy
    -------
    Protects the values of all rows, and all rows are released: ε = ε_reference + ε_row. Unit: a row. Adjacency:
    replace-one. Sensitivity 2. Event: one `DiscreteLaplace` for each column, of three vectors where it is counted in a hierarchy.

    Examples
    --------
    >>> import dpdask
    >>> dpdask.Histogram(share=0.25).split(1.0)  # ε of the reference, and of a row
    (0.25, 0.75)
    """

    kind: Literal["histogram"] = "histogram"
    share: float = Field(default=0.1, gt=0, lt=1)
    bins: Annotated[Literal["adaptive"] | int, BeforeValidator(_as_bins)] = "adaptive"

    protected: ClassVar[str] = "the values of all rows"
    unprotected: ClassVar[str] = "none; the reference is a noisy histogram of all rows, and its ε is part of the total"
    not_local: ClassVar[str | None] = "raw rows were counted for a histogram, so somebody holds them: their release is not local"
    is_measured_by_column: ClassVar[bool] = True

    def cells(self, codecs: Mapping[str, Codec]) -> dict[str, Cells]:
        """Return the public cells in which columns are counted."""
        return {name: make_grid(codec) if self.bins == "adaptive" else cells(codec, self.bins) for name, codec in codecs.items()}

    def events(self, epsilons: Mapping[str, float], columns: Mapping[str, Column], adjacency: Adjacency, rows: int) -> dict[str, DiscreteLaplace]:
        """Return the noise of each column's counts: one histogram, or one for each level of a hierarchy; see `ReferenceBase.events`."""
        n_vectors = {name: 1 if self.bins != "adaptive" or columns[name].has_levels else N_LEVELS for name in epsilons}
        return {name: histogram_event(epsilon, adjacency, rows, n_vectors[name]) for name, epsilon in epsilons.items()}

    def sizes(self, codecs: Mapping[str, Codec]) -> dict[str, int]:
        """Return how many noisy counts each column has; see `ReferenceBase.sizes`."""
        return {name: Hierarchy(own).size if self._is_hierarchy(own) else own.size for name, own in self.cells(codecs).items()}

    def _is_hierarchy(self, own: Cells) -> bool:
        return self.bins == "adaptive" and not isinstance(own.codec, LevelCodec)

    def stages(self, columns: str, *, uncounted: bool) -> tuple[str, ...]:
        """Return what a run does before it writes, in words; see `ReferenceBase.stages`."""
        del uncounted
        return (f"survey: read {columns}; count all rows in public cells", FIT)

    def check_counts(self, counts: ColumnCounts) -> None:
        """Check that there are at least two rows, since their number is public; see `ReferenceBase.check_counts`."""
        for name, counted in counts.columns.items():
            if counted.n_rows < 2:
                raise DataError("the table has fewer than 2 rows", f"column {name!r}", "a distribution needs more")

    def draw(self, counts: ColumnCounts, codecs: Mapping[str, Codec], events: Mapping[str, DiscreteLaplace], noise: Noise) -> NoisyHistograms:
        """Draw the noise of each column's histogram; see `ReferenceBase.draw`."""
        noisy, n_rows = {}, 0
        for name, own in self.cells(codecs).items():
            counted = counts.columns[name]
            assert isinstance(counted, CellCounts)
            exact = Hierarchy(own).count(counted) if self._is_hierarchy(own) else counted.counts[own.possible]
            n_rows, noisy[name] = counted.n_rows, perturb(exact, events[name], rng=noise(f"reference/{name}"))
        return NoisyHistograms(counts=noisy, events=events, n_rows=n_rows)

    def distributions(self, counts: Any, codecs: Mapping[str, Codec]) -> Mapping[str, Distribution]:
        """Return the distribution that each noisy histogram describes; see `ReferenceBase.distributions`."""
        return {name: self._distribution(own, counts.counts[name], counts.events[name], counts.n_rows) for name, own in self.cells(codecs).items()}

    def _distribution(self, own: Cells, noisy: Counts, event: CentralEvent, n_rows: int) -> Distribution:
        if not self._is_hierarchy(own):
            return distribution_of(own, noisy, n_rows)
        assert isinstance(own.codec, ValueCodec)
        hierarchy = Hierarchy(own)
        probabilities = hierarchy.estimate(noisy, event, n_rows) / n_rows
        found = _mark_frequent(own, probabilities, _continuous(own, probabilities))
        return replace(found, kept=hierarchy.tell_kept(noisy, event))

    def split(self, epsilon: float) -> tuple[float, float]:
        """Return the ε of the reference and of the row's own release; see `ReferenceBase.split`."""
        reference = round_down(Fraction(epsilon) * Fraction(self.share))
        return reference, round_down(Fraction(epsilon) - Fraction(reference))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NoisyHistograms(Archived):
    """The noisy histograms of a run's columns, kept so that their noise is drawn only once.

    Attributes
    ----------
    counts
        By column, one for each possible cell; may be negative.
    events
        The event of the drawn noise, by column.
    n_rows
        The number of rows if it is public, else None.
    """

    archive: ClassVar[Archive] = Archive(kind="noisy-histograms", format=3, noun="file of noisy histograms")

    counts: Mapping[str, Counts]
    events: Mapping[str, CentralEvent]
    n_rows: int | None

    def check(self, events: Mapping[str, CentralEvent], sizes: Mapping[str, int]) -> None:
        """Check that these are the histograms that a run would draw.

        Parameters
        ----------
        events
            The noise that each column should have.
        sizes
            How many counts each column should have.

        Raises
        ------
        InputError
            If they are not, and so belong to another version of dpdask.
        """
        if (
            self.events != events
            or self.counts.keys() != sizes.keys()
            or any(counts.dtype != np.int64 or counts.shape != (sizes[name],) for name, counts in self.counts.items())
        ):
            what = "these are not the noisy histograms of this run"
            raise InputError(what, "the run's noisy histograms", "resume with the version of dpdask that began it, or `dpdask abort` it")

    def _contents(self) -> Contents:
        events = {name: to_dict(self.events[name]) for name in self.counts}
        return {"events": events, "n_rows": self.n_rows}, {str(place): counts for place, counts in enumerate(self.counts.values())}

    @classmethod
    def _of_contents(cls, header: Mapping[str, Any], arrays: Mapping[str, Any]) -> Self:
        events = {name: central_from_dict(each) for name, each in header["events"].items()}
        return cls(counts={name: arrays[str(place)] for place, name in enumerate(header["events"])}, events=events, n_rows=header["n_rows"])


def histogram_event(epsilon: float, adjacency: Adjacency, rows_per_unit: int = 1, n_vectors: int = 1) -> DiscreteLaplace:
    """Return the event of one column's noisy histogram that costs at most `epsilon` at δ = 0.

    Parameters
    ----------
    epsilon
        The budget of the histogram.
    adjacency
        Which tables are neighbours.
    rows_per_unit
        The largest number of rows of one unit.
    n_vectors
        How many histograms of the column there are; each of them costs the same part of `epsilon`.

    Notes
    -----
    Replacing one row takes 1 from a cell and adds 1 to another: L1 sensitivity 2. Adding or removing it: 1. A unit of k
    rows: k times that.
    """
    sensitivity = (2 if adjacency == "replace-one" else 1) * rows_per_unit
    scale = laplace_scale(sensitivity * n_vectors, epsilon)
    return DiscreteLaplace(scale=scale, sensitivity=sensitivity, adjacency=adjacency, count=n_vectors)


def distribution_of(cells: Cells, noisy: Counts, n_rows: int | None) -> Distribution:
    """Return the distribution that noisy counts describe; this is post-processing.

    Parameters
    ----------
    cells
        The column's cells.
    noisy
        int64 array, one count for each possible cell; may be negative.
    n_rows
        The number of rows if it is public; None uses the sum of the noisy counts.

    Returns
    -------
    Of levels; or a cdf that is linear inside a cell and jumps at the atoms, whose `rank_error` is the largest
    probability of a cell of several values (what linear interpolation can misplace; the noise comes on top).

    References
    ----------
    Bi and Shen, Distribution-invariant differential privacy, with the hold-out's edf replaced by a private one.
    """
    total = max(1, int(noisy.sum())) if n_rows is None else n_rows
    probabilities = np.zeros(cells.n_cells)
    probabilities[cells.possible] = simplex.project(noisy.astype(np.float64), float(total)) / total
    probabilities /= probabilities.sum()
    if isinstance(cells.codec, LevelCodec):
        return LevelDistribution(probabilities)
    return _continuous(cells, probabilities)


def _mark_frequent(cells: Cells, probabilities: Floats, found: RankDistribution) -> RankDistribution:
    """Return the cdf with a jump at the simplest decimal number inside each frequent cell of floating numbers.

    A cell that has a hundredth of the rows, and four times as many as its neighbours, has them mostly because of one number, such as a price of
    2.75. The jump has what the cell has beyond the mean of its neighbours. Without it, all these rows would have one rank, and the released
    distribution would not be the reference's. A cell that reaches from one number to more than its double has many rows because it is wide, as the
    cells about 0 are if the bounds are far too wide, and gets no jump.
    """
    codec, edges = cells.codec, cells.edges
    assert isinstance(codec, ValueCodec)
    line = probabilities[cells.n_cells - len(edges) + 1 :]
    usual = np.convolve(line, [0.5, 0.0, 0.5])[1:-1]  # `same` would be longer than a line of two cells
    x, c = found.x, found.c
    for cell in np.flatnonzero((line >= _FREQUENT) & (line >= 4.0 * usual)) if not codec.lattice else ():
        low, high = edges[cell], edges[cell + 1]
        if max(abs(low), abs(high)) > 2.0 * min(abs(low), abs(high)) or low < 0.0 < high:
            continue
        number = float(codec.type.to_pandas_dtype()(_simplest(low, high)))
        if low < number < high:
            place = int(np.searchsorted(x, number))
            before = c[place - 1] + usual[cell] * (number - low) / (high - low)
            x, c = np.insert(x, place, [number, number]), np.insert(c, place, [before, before + line[cell] - usual[cell]])
    return replace(found, x=x, c=c)


def _simplest(low: float, high: float) -> float:
    """Return the number in (low, high] with the fewest decimals; `high` if 15 are too few."""
    for decimals in range(-15, 16):
        number = round(math.floor(high * 10.0**decimals) / 10.0**decimals, max(decimals, 0))
        if low < number <= high:
            return number
    return high


def _continuous(cells: Cells, probabilities: Floats) -> RankDistribution:
    """Return the cdf with a knot at every edge, and two more where the edge is an atom: before its jump, and after."""
    codec, edges = cells.codec, cells.edges
    assert isinstance(codec, ValueCodec)
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
    x = np.repeat(edges, repeats)
    first, final = (edges[:-1] + 1.0, edges[1:]) if codec.lattice else ends(codec, edges)
    if not codec.lattice:  # a cell of one value is a jump, like an atom
        single = np.flatnonzero((first == final) & ~is_atom[:-1])
        x[last[single]] = final[single]
    return RankDistribution(x, c, float(line[first < final].max(initial=0.0)))
