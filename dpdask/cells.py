"""The public cells of a column: levels, atoms, and the pieces into which the range of a continuous column is cut."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dpdask.arrays import Flags, Floats, Indices, Uint32s, Words
from dpdask.codec import Codec, Codecs, ValueCodec
from dpdask.documents import suggest
from dpdask.errors import SpecError
from dpdask.scales import float_type

DEFAULT_BINS = 20
FEW_ROWS = 5.0  # for each possible cell of a joint histogram: with fewer, answers of its cells have no bound on the bias


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FoundBins:
    """Cells of a continuous or mixed column that were found from noisy counts, with the finer distribution inside them."""

    cuts: Floats  # float64 array, increasing, among `edges`: the edges of the cells
    edges: Floats  # float64 array of shape (n + 1,), increasing: the edges of the fine cells
    # Float64 array of shape (n,), none below 0: what the noisy counts say about each fine cell.
    masses: Floats
    # Float64 array, increasing: for some fine cells, the number that the rows have which the cell
    # has beyond its neighbours.
    numbers: Floats = field(default_factory=lambda: np.zeros(0))

    def split(self, codec: ValueCodec) -> FoundBins:
        """Return the same with each number in a fine cell of its own."""
        edges, masses = list(self.edges), list(self.masses)
        last = len(self.masses) - 1
        for number in self.numbers[::-1].tolist():
            cell = int(np.searchsorted(self.edges, number)) - 1
            low, high = float(self.edges[cell]), float(self.edges[cell + 1])
            beside = [self.masses[other] for other in (cell - 1, cell + 1) if 0 <= other <= last]
            usual = min(sum(beside) / max(len(beside), 1), float(self.masses[cell]))
            before = number - 1.0
            if not codec.lattice:
                before = float(step(codec, np.array([number]), -np.inf)[0])
            before = max(before, low)
            parts = [(before, before - low), (number, 0.0), (high, high - number)]
            new = [(end, usual * width / (high - low)) for end, width in parts]
            new[1] = (number, float(self.masses[cell]) - new[0][1] - new[2][1])
            kept = [
                (end, mass)
                for (end, mass), (begin, _) in zip(new, [(low, 0.0), *new], strict=False)
                if end > begin
            ]
            edges[cell + 1 : cell + 2] = [end for end, _ in kept]
            masses[cell : cell + 1] = [mass for _, mass in kept]
        return FoundBins(cuts=self.cuts, edges=np.array(edges), masses=np.array(masses))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cells:
    """The public cells of one column: null (where it is a level), then the atoms, then the cells of the line; or the levels."""

    codec: Codec
    # Float64 array, increasing: line cell k holds the values in (edges[k], edges[k+1]] that are no
    # atoms; the first cell holds its lower edge too. Every atom is an edge. On a lattice the edges
    # are whole and begin one step below the bound. Empty for a level column.
    edges: Floats
    # Bool array of shape (n_cells,): False where no value can be, as between an atom and the whole
    # number below it.
    possible: Flags
    # The fine cells that values inside a cell follow; None: values inside a cell are uniform.
    found: FoundBins | None = None

    @property
    def n_cells(self) -> int:
        """How many cells there are, the impossible ones included."""
        return len(self.possible)

    def index(self, array: pa.Array) -> Indices:
        """Return the cell of each value."""
        if self.codec.has_levels:
            return self.codec.encode(array).astype(np.intp)
        values, is_null = self.codec.encode(array)
        atoms = np.array(self.codec.atoms)
        offset = int(self.codec.nulls)
        found: Indices = (
            offset + len(atoms) + np.searchsorted(self.edges[1:-1], values, side="left")
        )
        is_atom = np.isin(values, atoms)
        found[is_atom] = offset + np.searchsorted(atoms, values[is_atom])
        found[is_null] = 0
        return found

    @property
    def firsts(self) -> Floats:
        """The first value of each cell of the line, float64: what `cells` takes to make the same cells again."""
        return self.edges[:-1] + 1.0 if self.codec.lattice else ends(self.codec, self.edges)[0]

    @property
    def spans(self) -> tuple[pa.Array, pa.Array]:
        """The first and the last value of each possible cell, as the column's own; they differ in cells of the line alone."""
        if self.codec.has_levels:
            levels = self.codec.decode(np.flatnonzero(self.possible))
            return levels, levels
        single = np.array([*([0.0] * self.codec.nulls), *self.codec.atoms])
        is_null = np.arange(len(self.possible)) < int(self.codec.nulls)
        lasts = self.edges[1:] if self.codec.lattice else ends(self.codec, self.edges)[1]
        first, last = (
            self.codec.decode(np.concatenate([single, line])[self.possible], is_null[self.possible])
            for line in (self.firsts, lasts)
        )
        return first, last

    @property
    def means(self) -> Floats:
        """The mean of the values that `draw` gives each cell of the line."""
        first = self.edges[:-1] + float(self.codec.lattice)
        middles = first / 2.0 + self.edges[1:] / 2.0
        if self.found is None:
            return middles
        fine = self.found.edges
        inside = (fine[:-1] + float(self.codec.lattice)) / 2.0 + fine[1:] / 2.0
        place = np.searchsorted(self.edges, fine[1:], side="left") - 1
        n = len(middles)
        masses = np.bincount(place, weights=self.found.masses, minlength=n)[:n]
        sums = np.bincount(place, weights=self.found.masses * inside, minlength=n)[:n]
        return np.where(masses > 0.0, sums / np.where(masses > 0.0, masses, 1.0), middles)

    @property
    def size(self) -> int:
        """How many possible cells there are: the levels of the column as an attribute."""
        return int(self.possible.sum())

    def codes(self, array: pa.Array) -> Indices:
        """Return the number of each value's cell among the possible ones, 0..size-1."""
        index = self.index(array)
        return index if self.possible.all() else (np.cumsum(self.possible) - 1)[index]

    def draw(
        self,
        codes: NDArray[np.integer],
        words: Words,
        places: Uint32s | None = None,
    ) -> pa.Array:
        """Return a value of each cell, in the column's Arrow type: uniform inside a cell of the line.

        Parameters
        ----------
        words
            uint64 array of the same shape, uniform; not looked at where a cell is a single value.
        places
            uint32 array of the same shape: how far up in its cell each value lies, as a share of
            2**32; the words decide the rest. None: the words decide all.
        """
        if self.codec.has_levels:
            return self.codec.decode(
                codes if self.possible.all() else np.flatnonzero(self.possible)[codes]
            )
        index = np.flatnonzero(self.possible)[codes]
        singles = int(self.codec.nulls) + len(self.codec.atoms)
        line = np.maximum(index - singles, 0)
        low, high = self.edges[line], self.edges[line + 1]
        share = (words >> np.uint64(11)).astype(np.float64) * 2.0**-53
        if places is not None:
            share = (places + share) * 2.0**-32
        if self.found is not None:
            low, high, share = _narrow(self.found, low, high, share)
        if places is not None:
            share = 1.0 - share  # below, a share is counted from the upper end
        if self.codec.lattice:  # a whole number in (low, high]; cells are narrower than 2**53, so a remainder is even to 2**-11
            width = np.maximum(high - low, 1.0)
            above = (
                np.floor(share * width)
                if self.found is not None or places is not None
                else (words % width.astype(np.uint64)).astype(np.float64)
            )
            values = high - np.minimum(above, width - 1.0)
        else:
            first, last = ends(self.codec, self.edges)
            values = np.clip(
                _check_type(self.codec, high * (1.0 - share) + low * share), first[line], last[line]
            )
            # a fine cell (low, high] may be one number, such as 0, whose neighbour below is no
            # value of it
            if self.found is not None:
                nearest = _check_type(self.codec, low)
                least = np.where(nearest <= low, step(self.codec, nearest, np.inf), nearest)
                # and -0.0 is 0
                values = np.where(least <= high, np.maximum(values, least), values) + 0.0
        values = np.where(
            index < singles,
            np.array([*([0.0] * self.codec.nulls), *self.codec.atoms, 0.0])[
                np.minimum(index, singles)
            ],
            values,
        )
        is_null = (index == 0) if self.codec.nulls else np.zeros(len(index), dtype=np.bool_)
        if self.codec.bounds is not None:
            values = np.clip(values, *self.codec.bounds)
        return self.codec.decode(values, is_null)

    def labels(self) -> list[str]:
        """Return the possible cells in words: a level, an atom, `10..19` of whole numbers and dates, `[10.0, 20.0)` of others.

        Null is `null`, or where that is a level itself, `(null)`.
        """
        if self.codec.has_levels:
            levels = [
                None if level is None else str(level) for level in self.codec.levels.to_pylist()
            ]
            null = "(null)" if "null" in levels else "null"
            return [null if level is None else level for level in levels]
        singles = [
            *(["null"] * self.codec.nulls),
            *map(str, self._values(np.array(self.codec.atoms))),
        ]
        if self.codec.lattice:
            pairs = zip(
                self._values(self.edges[:-1] + 1.0), self._values(self.edges[1:]), strict=True
            )
            line = [str(low) if low == high else f"{low}..{high}" for low, high in pairs]
        else:
            ends_ = self.edges.tolist()
            line = [_range(low, high) for low, high in pairwise(ends_)]
            if len(set(line)) < len(line):  # cells that six digits do not tell apart
                line = [_range(low, high, 17) for low, high in pairwise(ends_)]
            if self._holds_bound:
                line[0] = line[0].replace("(", "[")
        return [
            label
            for label, possible in zip([*singles, *line], self.possible, strict=True)
            if possible
        ]

    @property
    def _holds_bound(self) -> bool:
        """Whether the first cell holds the lower bound, although its edge is that bound."""
        assert not self.codec.has_levels
        bounds, first = self.codec.bounds, self.edges[0]
        return bounds is not None and first == bounds[0] and first not in self.codec.atoms

    def _values(self, numbers: Floats) -> list[object]:
        """Return numbers as the column's own values."""
        assert not self.codec.has_levels
        values: list[object] = self.codec.decode(
            numbers, np.zeros(len(numbers), dtype=np.bool_)
        ).to_pylist()
        return values


CutColumns = Mapping[str, Cells]  # of each column


def _range(low: float, high: float, digits: int = 6) -> str:
    """Return the range (low, high]; where it was declared by its first values, as [first, next first); a single value as itself."""

    def write(number: float) -> str:
        return min(repr(number), repr(float(f"{number:.{digits}g}") + 0.0), key=len)

    if math.nextafter(low, math.inf) >= high:
        return repr(high)
    first, following = math.nextafter(low, math.inf), math.nextafter(high, math.inf)
    begin = f"[{write(first)}" if len(repr(first)) < len(repr(low)) else f"({write(low)}"
    by_first = len(repr(following)) < len(repr(high))
    return f"{begin}, {write(following)})" if by_first else f"{begin}, {write(high)}]"


def _narrow(
    found: FoundBins, low: Floats, high: Floats, share: Floats
) -> tuple[Floats, Floats, Floats]:
    """Return, for values at a share of the way through (low, high], the fine cell of each, and the share of the way through that.

    Nothing changes where nothing is known. The share of a fine cell that has a part p of its cell
    keeps 53 + log2(p) random bits.
    """
    rises = np.concatenate([[0.0], np.cumsum(found.masses)])
    below, above = np.interp(low, found.edges, rises), np.interp(high, found.edges, rises)
    known = above > below
    place = below + (above - below) * share
    fine = np.clip(np.searchsorted(rises, place, side="right") - 1, 0, len(found.masses) - 1)
    inside = np.clip(
        (place - rises[fine]) / np.maximum(found.masses[fine], 1e-300), 0.0, np.nextafter(1.0, 0.0)
    )
    first, last = np.maximum(found.edges[fine], low), np.minimum(found.edges[fine + 1], high)
    return np.where(known, first, low), np.where(known, last, high), np.where(known, inside, share)


def cells(codec: Codec, bins: int | Sequence[float] | FoundBins) -> Cells:
    """Return the public cells of a column; they depend on the schema and the job, never on the data.

    Parameters
    ----------
    bins
        How many cells of equal width between the bounds of a continuous or mixed column; fewer
        where there are fewer whole numbers, a few more where atoms cut some. Or the first value of
        each cell, increasing and within the bounds; what lies before the first of them is a cell
        too. Or cells that were found. Not looked at for levels.
    """
    if codec.has_levels:
        return Cells(
            codec=codec, edges=np.empty(0), possible=np.ones(codec.n_levels, dtype=np.bool_)
        )
    if codec.bounds is None:
        hint = "give it bounds in the schema, or drop it; in a DIP job, another reference works too"
        raise SpecError(
            "a column without bounds has no public cells to count in",
            f"column {codec.name!r}",
            hint,
        )
    if isinstance(bins, FoundBins):
        return replace(cells_of_edges(codec, bins.cuts), found=bins.split(codec))
    cuts = (
        _even(codec, codec.bounds, bins)
        if isinstance(bins, int)
        else _cut_declared(codec, codec.bounds, bins)
    )
    return cells_of_edges(codec, cuts)


def cells_of_edges(codec: ValueCodec, cuts: Floats) -> Cells:
    """Return the cells of a continuous or mixed column between given edges."""
    atoms = np.array(codec.atoms)
    if codec.lattice:
        edges = np.unique(np.concatenate([cuts, atoms - 1.0, atoms]))
        possible = np.diff(edges) > np.diff(np.searchsorted(atoms, edges, side="right"))
    else:
        edges = np.unique(np.concatenate([cuts, atoms]))
        possible = np.less_equal(*ends(codec, edges))
    single = np.ones(int(codec.nulls) + len(atoms), dtype=np.bool_)
    return Cells(codec=codec, edges=edges, possible=np.concatenate([single, possible]))


def _even(codec: ValueCodec, bounds: tuple[float, float], bins: int) -> Floats:
    low, high = bounds
    if codec.lattice:
        start, n_values = int(low) - 1, int(high) - int(low) + 1
        n_bins = min(bins, n_values)
        # Python's whole numbers do not overflow
        return np.array([float(start + k * n_values // n_bins) for k in range(n_bins + 1)])
    t = np.arange(bins + 1) / bins
    cuts = np.clip(low * (1.0 - t) + high * t, low, high)  # high - low may overflow
    cuts[0], cuts[-1] = low, high
    return cuts


def _check_type(codec: Codec, values: Floats) -> Floats:
    """Return the numbers of a floating column's own type that are nearest; infinity where it has none."""
    with np.errstate(over="ignore"):
        nearest: Floats = values.astype(float_type(codec.type)).astype(np.float64)
    return nearest


def step(codec: Codec, values: Floats, towards: float) -> Floats:
    """Return the next numbers of a floating column's own type, float64; beyond its greatest the next ones of float64."""
    kind = float_type(codec.type)
    with np.errstate(over="ignore"):
        following = np.nextafter(values.astype(kind), kind(towards)).astype(np.float64)
    return np.where(np.isinf(following), np.nextafter(values, towards), following)


def ends(codec: Codec, edges: Floats) -> tuple[Floats, Floats]:
    """Return the first and the last value of each line cell of a floating column, atoms left out; crossed if there is none."""
    nearest, is_atom = _check_type(codec, edges), np.isin(edges, np.array(codec.atoms))
    first = np.where(nearest <= edges, step(codec, nearest, np.inf), nearest)[:-1]
    if not is_atom[0] and codec.bounds is not None and edges[0] >= codec.bounds[0]:
        first[0] = edges[0]  # the first cell holds its lower edge
    last = np.where((nearest > edges) | is_atom, step(codec, nearest, -np.inf), nearest)[1:]
    return first, last


def _cut_declared(
    codec: ValueCodec, bounds: tuple[float, float], firsts: Sequence[float]
) -> Floats:
    """Return the edges (a, b] of cells that begin with declared values: one step before each."""
    low, high = bounds
    first = np.array(firsts, dtype=np.float64)
    # 0.7 is no float32: the column holds its neighbour
    first = first if codec.lattice else _check_type(codec, first)
    where, hint = (
        f"bins of {codec.name!r}",
        "list the first value of each cell, within the column's bounds",
    )
    if (
        not len(first)
        or not np.isfinite(first).all()
        or (np.diff(first) <= 0).any()
        or first[0] < low
        or first[-1] > high
    ):
        raise SpecError(
            "the first values of the cells must increase within the column's bounds", where, hint
        )
    if codec.lattice and (first != np.round(first)).any():
        raise SpecError(
            "the cells of a column of whole numbers must begin with whole numbers",
            where,
            "round them",
        )
    before = first - 1.0 if codec.lattice else step(codec, first, -np.inf)
    start = low - 1.0 if codec.lattice else low
    if not codec.lattice and low in before:  # the lower bound is a cell of its own
        start = float(step(codec, np.array([low]), -np.inf)[0])
    return np.concatenate([[start], before[before > start], [high]])


def cut_columns(
    codecs: Codecs,
    bins: Mapping[str, int | Sequence[float] | FoundBins] | int,
    parameter: str = "bins",
) -> dict[str, Cells]:
    """Return the public cells of each column.

    Parameters
    ----------
    bins
        How continuous and mixed columns are cut: a number of cells for all, or for each column that
        number or the first value of each cell.
    parameter
        The name of the bins among the mechanism's parameters, for messages.
    """
    given = {} if isinstance(bins, int) else bins
    for name in given:
        if name not in codecs or codecs[name].has_levels:
            raise not_cut(
                name,
                [other for other, codec in codecs.items() if not codec.has_levels],
                parameter,
            )
    usual = bins if isinstance(bins, int) else DEFAULT_BINS
    return {name: cells(codec, given.get(name, usual)) for name, codec in codecs.items()}


def not_cut(name: str, known: Sequence[str], parameter: str) -> SpecError:
    """Return the error of bins for a column that is not cut."""
    return SpecError(
        "is not a continuous or mixed column that is privatised",
        f"`{parameter}.{name}`",
        suggest(name, known, "remove it"),
    )
