"""The reference `histogram`: a noisy histogram of all rows, so that every row is released and every row is covered by ε."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
import pyarrow as pa
from pydantic import BeforeValidator, Field

from dpdask.archive import Archive, Archived, Contents
from dpdask.arrays import Floats, freeze_class
from dpdask.arrays import Ints as Counts
from dpdask.cells import DEFAULT_BINS, Cells, FoundBins, cells, cut_columns, ends, not_cut
from dpdask.codec import Codecs
from dpdask.errors import DataError, InputError
from dpdask.kernels.channel import project
from dpdask.privacy import UnitColumn
from dpdask.privacy.events import (
    Adjacency,
    CentralEvent,
    DiscreteLaplace,
    central_from_dict,
    round_down,
    to_dict,
)
from dpdask.privacy.noise import laplace_scale, perturb
from dpdask.references.counts import label_table, list_cell_counts
from dpdask.references.hierarchy import (
    N_LEVELS,
    Hierarchy,
    find_simplest,
    make_grid,
    make_hierarchy,
)
from dpdask.references.reference import (
    FIT,
    ColumnCounts,
    Distribution,
    LevelDistribution,
    RankDistribution,
    ReferenceBase,
    Structure,
)
from dpdask.scales import float_type
from dpdask.schema import Column, Schema
from dpdask.stats.statistic import CellCounts
from dpdask.streams import Noise

MAX_BINS = 2**15

_FREQUENT = 0.01  # of the rows
_FAR = 10  # times all other cells together: a declared cell at an end that is wider is doubtful
_EXPECTED = "a number of cells, or a list of the first value of each cell, is expected"


def _as_bins(value: object) -> object:
    if value != "adaptive" and (type(value) is not int or not 2 <= value <= MAX_BINS):
        expected = f"a whole number of cells from 2 to {MAX_BINS:,}"
        raise ValueError(f"`adaptive`, or {expected}, is expected")
    return value


class Histogram(ReferenceBase):
    """The distribution of all rows, measured with discrete Laplace noise.

    Privacy
    -------
    Protects the values of all rows, and all rows are released: ε = ε_reference + ε_row. Unit: a
    row. Adjacency: replace-one. Sensitivity 2. Event: one `DiscreteLaplace` for each column, of
    three vectors where it is counted in a hierarchy.

    Examples
    --------
    >>> import dpdask
    >>> dpdask.Histogram(share=0.25).split(1.0)  # ε of the reference, and of a row
    (0.25, 0.75)
    """

    kind: Literal["histogram"] = "histogram"
    share: float = Field(default=0.1, gt=0, lt=1)
    """The reference's share of a row's ε, in (0, 1); the rest randomises the row."""
    bins: Annotated[Literal["adaptive"] | int, BeforeValidator(_as_bins)] = "adaptive"
    """How continuous and mixed columns are counted. `adaptive`: in a hierarchy of fine cells
    (`hierarchy.make_grid`), so that bounds may be much too wide. A number: in that many cells of
    equal width between the bounds.
    """

    protected: ClassVar[str] = "the values of all rows"
    unprotected: ClassVar[str] = (
        "none; the reference is a noisy histogram of all rows, and its ε is part of the total"
    )
    not_local: ClassVar[str | None] = (
        "raw rows were counted for a histogram, so somebody holds them: their release is not local"
    )
    is_measured_by_column: ClassVar[bool] = True

    def cells(self, codecs: Codecs) -> dict[str, Cells]:
        """Return the public cells in which columns are counted."""
        return {
            name: make_grid(codec) if self.bins == "adaptive" else cells(codec, self.bins)
            for name, codec in codecs.items()
        }

    def events(
        self,
        epsilons: Mapping[str, float],
        columns: Mapping[str, Column],
        adjacency: Adjacency,
        rows: int,
    ) -> dict[str, DiscreteLaplace]:
        """Return the noise of each column's counts: one histogram, or one for each level of a hierarchy; see `ReferenceBase.events`."""
        n_vectors = {
            name: 1 if self.bins != "adaptive" or columns[name].has_levels else N_LEVELS
            for name in epsilons
        }
        return {
            name: histogram_event(epsilon, adjacency, rows, n_vectors[name])
            for name, epsilon in epsilons.items()
        }

    def sizes(self, codecs: Codecs) -> dict[str, int]:
        """Return how many noisy counts each column has; see `ReferenceBase.sizes`."""
        sizes = {}
        for name, own in self.cells(codecs).items():
            hierarchy = self._find_hierarchy(own)
            sizes[name] = own.size if hierarchy is None else hierarchy.size
        return sizes

    def _find_hierarchy(self, own: Cells) -> Hierarchy | None:
        """Return the levels in which cells are counted; None: they are counted alone."""
        adaptive = self.bins == "adaptive" and not own.codec.has_levels
        return make_hierarchy(own.codec) if adaptive else None

    def stages(self, columns: str) -> tuple[str, ...]:
        """Return what a run does before it writes, in words; see `ReferenceBase.stages`."""
        return (f"survey: read {columns}; count all rows in public cells", FIT)

    def check_counts(self, counts: ColumnCounts) -> None:
        """Check that there are at least two rows, since their number is public; see `ReferenceBase.check_counts`."""
        for name, counted in counts.columns.items():
            if counted.n_rows < 2:
                where = f"column {name!r}"
                raise DataError(
                    "the table has fewer than 2 rows", where, "a distribution needs more"
                )

    def draw(
        self,
        counts: ColumnCounts,
        codecs: Codecs,
        events: Mapping[str, DiscreteLaplace],
        noise: Noise,
    ) -> NoisyHistograms:
        """Draw the noise of each column's histogram; see `ReferenceBase.draw`."""
        noisy, n_rows = {}, 0
        for name, own in self.cells(codecs).items():
            counted = counts.columns[name]
            assert isinstance(counted, CellCounts)
            hierarchy, n_rows = self._find_hierarchy(own), counted.n_rows
            exact = counted.counts[own.possible] if hierarchy is None else hierarchy.count(counted)
            noisy[name] = perturb(exact, events[name], rng=noise(f"reference/{name}"))
        return NoisyHistograms(counts=noisy, events=events, n_rows=n_rows)

    def distributions(self, counts: Any, codecs: Codecs) -> Mapping[str, Distribution]:
        """Return the distribution that each noisy histogram describes; see `ReferenceBase.distributions`."""
        found: dict[str, Distribution] = {}
        n_rows = counts.n_rows
        for name, own in self.cells(codecs).items():
            noisy, hierarchy = counts.counts[name], self._find_hierarchy(own)
            if hierarchy is None:
                found[name] = distribution_of(own, noisy, n_rows)
                continue
            event = counts.events[name]
            shares = hierarchy.estimate(noisy, event, n_rows) / n_rows
            marked = _mark_frequent(own, shares, _continuous(own, shares))
            found[name] = replace(marked, support=hierarchy.describe_support(noisy, event))
        return found

    def list_counts(self, drawn: NoisyHistograms, codecs: Codecs) -> Iterable[pa.Table]:
        """Return the noisy counts of each column as they are published."""
        found = []
        for name, own in self.cells(codecs).items():
            hierarchy, counts = self._find_hierarchy(own), drawn.counts[name]
            arguments = label_table(name), counts, drawn.events[name]
            found.append(
                list_cell_counts(own, *arguments)
                if hierarchy is None
                else hierarchy.list_counts(*arguments)
            )
        return found

    def split(self, epsilon: float) -> tuple[float, float]:
        """Return the ε of the reference and of the row's own release; see `ReferenceBase.split`."""
        return split_share(epsilon, self.share)


@freeze_class(eq=False)
class NoisyHistograms(Archived):
    """The noisy histograms of a run's columns, kept so that their noise is drawn only once."""

    archive: ClassVar[Archive] = Archive(
        kind="noisy-histograms", format=3, noun="file of noisy histograms"
    )

    counts: Mapping[str, Counts]  # by column, one for each possible cell; may be negative
    events: Mapping[str, CentralEvent]  # the event of the drawn noise, by column
    n_rows: int | None  # the number of rows if it is public, else None

    def check(self, events: Mapping[str, CentralEvent], sizes: Mapping[str, int]) -> None:
        """Check that these are the histograms that a run would draw."""
        shapes = {name: (counts.dtype, counts.shape) for name, counts in self.counts.items()}
        expected = {name: (np.dtype(np.int64), (size,)) for name, size in sizes.items()}
        if self.events != events or shapes != expected:
            what = "these are not the noisy histograms of this run"
            mend = "resume with the version of dpdask that began it, or `dpdask abort` it"
            raise InputError(what, "the run's noisy histograms", mend)

    def _contents(self) -> Contents:
        events = {name: to_dict(self.events[name]) for name in self.counts}
        arrays = {str(place): counts for place, counts in enumerate(self.counts.values())}
        return {"events": events, "n_rows": self.n_rows}, arrays

    @classmethod
    def _of_contents(cls, header: Mapping[str, Any], arrays: Mapping[str, Any]) -> Self:
        events = {name: central_from_dict(each) for name, each in header["events"].items()}
        return cls(
            counts={name: arrays[str(place)] for place, name in enumerate(header["events"])},
            events=events,
            n_rows=header["n_rows"],
        )


def split_share(epsilon: float, share: float) -> tuple[float, float]:
    """Return that share of ε and the rest, which sum to ε at most."""
    part = round_down(Fraction(epsilon) * Fraction(share))
    return part, round_down(Fraction(epsilon) - Fraction(part))


def histogram_event(
    epsilon: float, adjacency: Adjacency, rows_per_unit: int = 1, n_vectors: int = 1
) -> DiscreteLaplace:
    """Return the event of one column's noisy histogram that costs at most `epsilon` at δ = 0.

    Parameters
    ----------
    n_vectors
        How many histograms of the column there are; each of them costs the same part of `epsilon`.

    Notes
    -----
    Replacing one row takes 1 from a cell and adds 1 to another: L1 sensitivity 2. Adding or
    removing it: 1. A unit of k rows: k times that.
    """
    sensitivity = (2 if adjacency == "replace-one" else 1) * rows_per_unit
    scale = laplace_scale(sensitivity * n_vectors, epsilon)
    return DiscreteLaplace(
        scale=scale, sensitivity=sensitivity, adjacency=adjacency, count=n_vectors
    )


def distribution_of(cells: Cells, noisy: Counts, n_rows: int | None) -> Distribution:
    """Return the distribution that noisy counts describe; this is post-processing.

    Parameters
    ----------
    noisy
        int64 array, one count for each possible cell; may be negative.
    n_rows
        The number of rows if it is public; None uses the sum of the noisy counts.

    References
    ----------
    Bi and Shen, Distribution-invariant differential privacy, with the hold-out's edf replaced by a
    private one.
    """
    total = max(1, int(noisy.sum())) if n_rows is None else n_rows
    probabilities = np.zeros(cells.n_cells)
    probabilities[cells.possible] = project(noisy.astype(np.float64), float(total)) / total
    probabilities /= probabilities.sum()
    if cells.codec.has_levels:
        return LevelDistribution(probabilities)
    return _continuous(cells, probabilities)


def _mark_frequent(
    cells: Cells, probabilities: Floats, found: RankDistribution
) -> RankDistribution:
    """Return the cdf with a jump at the simplest decimal number inside each frequent cell of floating numbers.

    A cell that has a hundredth of the rows, and four times as many as its neighbours, has them
    mostly because of one number, such as a price of 2.75. The jump has what the cell has beyond the
    mean of its neighbours. Without it, all these rows would have one rank, and the released
    distribution would not be the reference's. A cell that reaches from one number to more than its
    double has many rows because it is wide, as the cells about 0 are if the bounds are far too
    wide, and gets no jump.
    """
    codec, edges = cells.codec, cells.edges
    if codec.lattice:
        return found
    line = probabilities[cells.n_cells - len(edges) + 1 :]
    # the mode `same` would be longer than a line of two cells
    usual = np.convolve(line, [0.5, 0.0, 0.5])[1:-1]
    x, c = found.x, found.c
    for cell in np.flatnonzero((line >= _FREQUENT) & (line >= 4.0 * usual)):
        low, high = edges[cell], edges[cell + 1]
        if max(abs(low), abs(high)) > 2.0 * min(abs(low), abs(high)) or low < 0.0 < high:
            continue
        number = float(float_type(codec.type)(find_simplest(low, high)))
        if low < number < high:
            place = int(np.searchsorted(x, number))
            before = c[place - 1] + usual[cell] * (number - low) / (high - low)
            x = np.insert(x, place, [number, number])
            c = np.insert(c, place, [before, before + line[cell] - usual[cell]])
    return replace(found, x=x, c=c)


def _continuous(cells: Cells, probabilities: Floats) -> RankDistribution:
    """Return the cdf with a knot at every edge, and two more where the edge is an atom: before its jump, and after."""
    codec, edges = cells.codec, cells.edges
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


def _as_cut(value: object, where: str = "") -> object:
    if value == "adaptive":
        return value
    if not (where and isinstance(value, list | tuple)):
        if type(value) is not int or not 1 <= value <= MAX_BINS:
            raise ValueError(f"{where}a number of cells is a whole number from 1 to {MAX_BINS:,}")
        return value
    if not value or any(type(first) not in (int, float) for first in value):
        raise ValueError(f"{where}{_EXPECTED}")
    firsts = tuple(float(first) for first in value)
    if not all(one < two for one, two in pairwise(firsts)):
        raise ValueError(f"{where}the first values of the cells must increase")
    return firsts


def as_bins(value: object) -> object:
    """Return bins as a document says them, their lists as tuples of floats."""
    if isinstance(value, Mapping):
        return {name: _as_cut(bins, f"column {name!r}: ") for name, bins in value.items()}
    return _as_cut(value)


def as_fixed_bins(value: object) -> object:
    """Return bins that are fixed beforehand, as `as_bins` does."""
    found = as_bins(value)
    if found == "adaptive" or (isinstance(found, dict) and "adaptive" in found.values()):
        raise ValueError(f"adaptive cells are for tables of noisy counts; {_EXPECTED}")
    return found


Bins = Annotated[
    Literal["adaptive"] | int | dict[str, Literal["adaptive"] | int | tuple[float, ...]],
    BeforeValidator(as_bins),
]
"""How continuous and mixed columns are cut: `adaptive` finds the cells of every column under privacy; a number of cells of equal width for all; or
one of these, or the first value of each cell, for each column, those that are not named being adaptive."""


def check_bins(bins: object, schema: Schema, parameter: str = "bins") -> None:
    """Check that bins name only columns that are cut, as far as the schema tells.

    Parameters
    ----------
    parameter
        The name of the bins among the mechanism's parameters, for messages.
    """
    cut = [name for name in schema.privatised if not schema.columns[name].has_levels]
    for name in bins if isinstance(bins, Mapping) else ():
        if name not in cut:
            raise not_cut(name, cut, parameter)


Found = Mapping[str, FoundBins]


def list_adaptive(schema: Schema, bins: Bins) -> tuple[str, ...]:
    """Return the continuous and mixed columns whose cells are found, in the order of the schema."""
    return tuple(
        name
        for name in schema.privatised
        if not schema.columns[name].has_levels and _bins_of(name, bins) == "adaptive"
    )


def _bins_of(name: str, bins: Bins) -> Literal["adaptive"] | int | tuple[float, ...]:
    return bins.get(name, "adaptive") if isinstance(bins, dict) else bins


def warn_of_far_cells(
    codecs: Codecs, bins: Mapping[str, str | int | tuple[float, ...]] | str | int
) -> tuple[str, ...]:
    """Return a warning for each column whose first or last declared cell is more than ten times as wide as all its others together."""
    said = []
    for name, codec in codecs.items():
        own = bins.get(name) if isinstance(bins, Mapping) else bins
        if codec.has_levels or not isinstance(own, tuple):
            continue
        widths = np.diff(cells(codec, own).edges)
        for place, width in {"first": widths[0], "last": widths[-1]}.items():
            if len(widths) > 1 and width > _FAR * (widths.sum() - width):
                wide = f"is more than {_FAR} times as wide as all its others together"
                mend = "declare narrower bounds, or more cells"
                spread = "Values in it are spread over its whole width"
                said.append(f"The {place} declared cell of {name} {wide}. {spread}: {mend}.")
    return tuple(said)


def cut_with_found(
    codecs: Codecs,
    bins: Bins,
    found: Found | None,
    parameter: str = "bins",
    *,
    n_bins: int = DEFAULT_BINS,
) -> dict[str, Cells]:
    """Return the public cells of each column.

    Parameters
    ----------
    found
        The cells that were found; None: as many as may be found, of equal width, which is good for
        nothing but their number.
    parameter
        The name of the bins among the mechanism's parameters, for messages.
    n_bins
        Into how many cells of equal counts columns will be cut; with many rows at single values
        there may be twice as many, and one.
    """
    given: dict[str, int | tuple[float, ...] | FoundBins] = {}
    if isinstance(bins, dict):
        given = dict.fromkeys(bins, 1)  # strange names are refused
    for name, codec in codecs.items():
        if not codec.has_levels:
            own = _bins_of(name, bins)
            most = 2 * n_bins + 1 + 2 * len(codec.atoms)  # an atom is a cell, and may cut one
            given[name] = own if own != "adaptive" else most if found is None else found[name]
    return cut_columns(codecs, given, parameter)


class Tree(ReferenceBase):
    """The tree of the strongest pairwise dependence, with the noisy tables of all rows along it.

    Privacy
    -------
    Protects the values of all rows, and all rows are released: ε = ε_tables + rows · Σ ε_column.
    Unit: the budget's. Adjacency: replace-one. Events: the tables' noise (discrete Gaussian with a
    δ, discrete Laplace without), and one `LocalRelease`.

    Notes
    -----
    Every pair of columns that the tree joins keeps its fitted table. Other pairs keep at most the
    dependence that follows along the tree.

    Examples
    --------
    >>> import dpdask
    >>> dpdask.Tree(share=0.5).split(1.0)  # ε of the tables, and of a row
    (0.5, 0.5)
    """

    kind: Literal["tree"] = "tree"
    share: float = Field(default=0.6, gt=0, lt=1)
    """The share of a unit's ε for the noisy one- and two-way tables, in (0, 1); they take all of δ
    too. The rest randomises the unit's rows. With a larger share, a release follows the tables
    more closely, and its own rows less.
    """
    bins: Bins = "adaptive"
    """How continuous and mixed columns are cut. `adaptive`: into about 20 cells of equal counts
    that are found under privacy, in a pass of their own; a released number follows the fine
    counts in its cell. A number: into that many cells of equal width. A mapping: for each column
    one of these, or a list of the first value of each cell. In a declared cell, a released
    number is drawn uniformly.
    """

    protected: ClassVar[str] = "the values of all rows"
    unprotected: ClassVar[str] = (
        "none; the reference is a tree of noisy tables of all rows, and their ε and δ are part of the total"
    )
    structure: ClassVar[Structure] = "tree"
    joint: ClassVar[str] = (
        "pairs on the tree, and only these: two columns that the tree joins keep their table, up to its noise; other pairs keep what follows "
        "along the tree, and what only three columns together show is not kept"
    )
    spends_delta: ClassVar[bool] = True

    def check(self, schema: Schema, unit: UnitColumn | None) -> None:
        """Check that the bins name only columns that are cut; see `ReferenceBase.check`."""
        check_bins(self.bins, schema, "reference.bins")

    def cells(self, codecs: Codecs, found: Found | None = None) -> dict[str, Cells]:
        """Return the public cells in which columns are counted.

        Parameters
        ----------
        found
            The cells that were found; None: as many as may be found.
        """
        return cut_with_found(codecs, self.bins, found, "reference.bins")

    def split(self, epsilon: float) -> tuple[float, float]:
        """Return the ε of the tables and of the rows; see `ReferenceBase.split`."""
        return split_share(epsilon, self.share)
