"""Counts of a column on a fine public grid, level by level: its cells and its distribution are found from them under privacy."""

from __future__ import annotations

import math
import warnings
from functools import lru_cache
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dpdask.arrays import Flags, Floats, Ints
from dpdask.cells import Cells, FoundBins, cells, cells_of_edges, step
from dpdask.codec import Codec, ValueCodec
from dpdask.kernels.channel import project, project_each
from dpdask.privacy.events import CentralEvent
from dpdask.privacy.noise import deviation
from dpdask.references.counts import complete_rows, list_ends, make_rows
from dpdask.scales import float_type, is_dated
from dpdask.stats.statistic import CellCounts

N_LEVELS = 3
MANY = 5.0  # standard deviations

_N_LEAVES = 16**N_LEVELS
_DECADES = 1e6  # the largest magnitude over the one below which leaves have equal width
_LEAST_WHOLE = 60.0  # whole numbers up to about this one are leaves, whatever the bounds
_REACH = (2.5, 3.0, 3.5, 4.0, 4.5)  # how many 1, 2, 3, … blocks further out must have together
_ALONE = 6.0  # how many a block must have alone, wherever it lies
_EDGE = 0.5  # how many are taken from the block beyond
_DOUBT = 1.0  # of a sum of children
_FREQUENT = 4.0  # times as many rows as the neighbours have: most have one number

Counts = Ints
Number = TypeVar("Number", np.int64, np.float64)


def make_grid(codec: Codec) -> Cells:
    """Return the fine public cells of a column: at most about 4,096, by its type and bounds alone.

    For numbers, cells whose width grows with their distance from 0, so that bounds may be far too
    wide: whole numbers up to about 60 have a cell of their own, and beyond, or for floating numbers
    beyond a millionth of the largest bound, a cell is about half a percent of its value wide, or
    one percent if the bounds have both signs or are huge. Dates and times have cells of equal
    width. The bounds and 0 have cells of their own, since many values may lie there.

    Raises
    ------
    SpecError
        If a continuous or mixed column has no bounds.
    """
    if codec.has_levels:
        return cells(codec, 1)
    return make_hierarchy(codec).cells


@lru_cache(maxsize=256)  # a plan, a run and its card ask for it again and again
def make_hierarchy(codec: ValueCodec) -> Hierarchy:
    """Return the hierarchy of a column's fine cells."""
    if codec.bounds is None:
        return Hierarchy(cells(codec, 1))  # which refuses it
    low, high = codec.bounds
    if (
        is_dated(codec.type)
        or pa.types.is_time(codec.type)
        or (codec.lattice and high - low < _N_LEAVES)
    ):
        return Hierarchy(cells(codec, _N_LEAVES))
    unit = _LEAST_WHOLE if codec.lattice else max(abs(low), abs(high)) / _DECADES
    # even on the scale of asinh: linear up to about the unit, logarithmic beyond
    even = np.linspace(math.asinh(low / unit), math.asinh(high / unit), _N_LEAVES - 3)
    cuts = np.sinh(even) * unit
    cuts[0], cuts[-1] = low, high
    cuts = np.clip(cuts, low, high)
    if codec.lattice:
        cuts = np.unique(np.clip(np.round(cuts), low, high))
        special = np.array([low, min(low + 1.0, high), max(high - 1.0, low), high])
        cuts = np.concatenate([[low - 1.0], cuts, special])
    else:
        special = np.array([low, high, *([0.0] if low < 0.0 < high else [])])
        cuts = np.concatenate([cuts, special, step(codec, special, -np.inf)])
    return Hierarchy(cells_of_edges(codec, np.unique(cuts)))


class Hierarchy:
    """The levels in which the cells of a grid are counted: blocks, their blocks, and the cells.

    Null and atoms are counted in each level.

    Privacy
    -------
    A row is in exactly one count of each of the three levels, so each level is a histogram.
    """

    def __init__(self, cells: Cells) -> None:
        self.cells = cells
        self._n_singles = cells.n_cells - max(len(cells.edges) - 1, 0)
        line = cells.possible[self._n_singles :]
        # as few children a block as reach all cells
        self._side = max(1, math.ceil(round(math.cbrt(len(line)), 9)))
        # how many cells each place of the last level has: 0 where no value can be
        self._n_leaves = self._pad(line.astype(np.float64))
        self._there = np.flatnonzero(self._n_leaves.any(axis=(1, 2)))

    @property
    def size(self) -> int:
        """How many counts there are."""
        return sum(self._n_singles + self._side**level for level in range(1, N_LEVELS + 1))

    def count(self, exact: CellCounts) -> Counts:
        """Return the counts of all levels, int64 of shape (size,), of the counts of the cells."""
        singles = exact.counts[: self._n_singles]
        line = self._pad(exact.counts[self._n_singles :])
        levels = [line.sum(axis=(1, 2)), line.sum(axis=2).ravel(), line.ravel()]
        return np.concatenate([part for level in levels for part in (singles, level)])

    def _pad(self, line: NDArray[Number]) -> NDArray[Number]:
        padded = np.zeros(self._side**N_LEVELS, dtype=line.dtype)
        padded[: len(line)] = line
        return padded.reshape((self._side,) * N_LEVELS)

    def list_counts(self, label: str, noisy: Counts, event: CentralEvent) -> pa.Table:
        """Return the noisy counts with what each is of, as `COUNTS` has them."""
        single, *found = list_ends(self.cells)
        missing = np.full(self._side**N_LEVELS - len(found[0]), np.nan)
        low, high = (np.append(each, missing) for each in found)
        parts = []
        for level in range(1, N_LEVELS + 1):
            shape = self._side**level, -1
            with warnings.catch_warnings():  # of blocks without a value
                warnings.simplefilter("ignore", RuntimeWarning)
                first = np.nanmin(low.reshape(shape), axis=1)
                last = np.nanmax(high.reshape(shape), axis=1)
            parts.append(make_rows(self.cells, level, single, first, last))
        return complete_rows(pa.concat_tables(parts), label, noisy, event)

    def estimate(self, noisy: Counts, event: CentralEvent, n_rows: float | None) -> Floats:
        """Return what noisy counts say about each cell, float64 of shape (n_cells,), none below 0.

        Without a number of rows they sum to what the noisy counts say, at least 1.

        Notes
        -----
        Upwards, each count is averaged with the sum of its children, by inverse variance. Of the
        first level's blocks those are kept that lie next to each other from the one with most rows
        outwards, as far as blocks have more than noise together, and one block beyond on each side,
        less half a standard deviation, and not more than if the tail fell no faster than before:
        noise far out would ruin means. They are projected to
        non-negative counts with the sum `n_rows`. Downwards, children are projected to non-negative
        counts with the sum that their parent has; where that is less than the standard deviation of
        their own sum, they rise or fall with the parent's neighbours instead.

        References
        ----------
        Hay, Rastogi, Miklau and Suciu, Boosting the accuracy of differentially private histograms
        through consistency (2010), for the averages.
        """
        noise = deviation(event)
        own, (upper, middle, leaves), (spreads, deviations) = self._average(noisy, noise)
        counts, spread = upper[self._there], spreads[self._there]
        support, borders = find_support(counts, spread) or (slice(len(counts)), [])
        counts[borders] -= _EDGE * spread[borders]
        for place in borders:
            step_in = 1 if place == support.start else -1
            inner, before = place + step_in, place + 2 * step_in
            if 0 <= before < len(counts) and counts[before] > 0.0:
                most = max(counts[inner] + spread[inner], 0.0) ** 2 / counts[before]
                counts[place] = min(counts[place], most)
        top = np.concatenate([own, counts[support]])
        total = max(1.0, float(top.sum())) if n_rows is None else float(n_rows)
        first = project(top, total)
        masses = np.zeros(self._side)
        masses[self._there[support]] = first[self._n_singles :]
        masses = _share(masses, middle, deviations, self._n_leaves.sum(axis=2))
        masses = _share(masses, leaves, np.full(leaves.shape, noise), self._n_leaves)
        n_line = self.cells.n_cells - self._n_singles
        return np.concatenate([first[: self._n_singles], masses.ravel()[:n_line]])

    def describe_support(self, noisy: Counts, event: CentralEvent) -> dict[str, Any]:
        """Return where `estimate` may put rows, and what the counts say of those beyond, for a card.

        Nothing, if no block stands out from noise: then rows may be anywhere.
        """
        _, (upper, *_), (spreads, _) = self._average(noisy, deviation(event))
        there, counts, spread = self._there, upper[self._there], spreads[self._there]
        found = find_support(counts, spread)
        if found is None:
            return {}
        support, _ = found
        edges, size = self.cells.edges, self._side**2
        first = max(float(edges[there[support.start] * size]), float(self.cells.firsts[0])) + 0.0
        last = float(edges[min((int(there[support][-1]) + 1) * size, len(edges) - 1)])
        beyond = {}
        sides = {"below": slice(0, support.start), "above": slice(support.stop, len(counts))}
        for name, side in sides.items():
            if len(counts[side]):
                beyond[name] = {
                    "blocks": len(counts[side]),
                    "count": round(float(counts[side].sum()), 1),
                    "standard_deviation": float(np.hypot.reduce(spread[side])),
                }
        return {"kept": [first, last], "beyond": beyond}

    def _average(
        self, noisy: Counts, noise: float
    ) -> tuple[Floats, tuple[Floats, Floats, Floats], tuple[Floats, Floats]]:
        """Return the counts of null and atoms, of each level's blocks, and standard deviations.

        Each count is averaged with the sum of its children; the standard deviations are those of
        the first two levels.
        """
        singles, side = self._n_singles, self._side
        own, levels = np.zeros(singles), []
        for level in range(1, N_LEVELS + 1):
            own += noisy[:singles] / N_LEVELS
            end = singles + side**level
            levels.append(noisy[singles:end].reshape((side,) * level).astype(np.float64))
            noisy = noisy[end:]
        upper, middle, leaves = levels
        leaves = np.where(self._n_leaves > 0, leaves, 0.0)
        n_leaves = self._n_leaves
        middle, factors = _combine(middle, leaves, np.ones_like(leaves), n_leaves > 0)
        upper, spreads = _combine(upper, middle, factors, n_leaves.sum(axis=2) > 0)
        deviations = noise * np.sqrt(spreads), noise * np.sqrt(factors)
        return own, (upper, middle, leaves), deviations


def _combine(
    own: Floats, children: Floats, factors: Floats, present: Flags
) -> tuple[Floats, Floats]:
    """Return counts averaged with the sums of their children, and the variances' factors."""
    below = np.where(present, factors, 0.0).sum(axis=-1)
    summed = np.where(present, children, 0.0).sum(axis=-1)
    weight = 1.0 / np.where(below > 0.0, below, 1.0)
    averaged = np.where(below > 0, (own + weight * summed) / (1.0 + weight), 0.0)
    return averaged, np.where(below > 0, 1.0 / (1.0 + weight), 1.0)


def find_support(counts: Floats, deviations: Floats) -> tuple[slice, list[int]] | None:
    """Return which blocks may have rows, and the outermost of them; None if none has more than noise.

    From the block with most rows outwards, blocks are kept as far as some have more than noise,
    together with those before them or alone, and one beyond on each side.
    """
    mode = int(counts.argmax()) if len(counts) else 0  # atoms may leave no number between
    if not len(counts) or not counts[mode] > _REACH[-1] * deviations[mode]:
        return None

    def reach(own: Floats, spread: Floats) -> int:
        n_kept = 0
        while n_kept < len(own):
            left, noise = own[n_kept:], spread[n_kept:]
            most = np.take(_REACH, np.arange(len(left)), mode="clip")
            together = np.cumsum(left) > most * np.sqrt(np.cumsum(noise**2))
            enough = together | (left > _ALONE * noise)
            if not enough.any():
                break
            n_kept += int(enough.argmax()) + 1
        return n_kept

    first = mode - reach(counts[:mode][::-1], deviations[:mode][::-1]) - 1
    last = mode + reach(counts[mode + 1 :], deviations[mode + 1 :]) + 1
    outermost = [place for place in (first, last) if 0 <= place < len(counts)]
    return slice(max(first, 0), last + 1), outermost


def _share(masses: Floats, children: Floats, deviations: Floats, n_leaves: Floats) -> Floats:
    """Return the counts of children that sum to their parents' masses; one more axis than these."""
    present = n_leaves > 0
    n = children.shape[-1]
    # on a line whose slope is that of the parent's neighbours, as far as it stays above 0
    around = np.pad(masses.ravel(), 1, mode="edge")
    slope = (around[2:] - around[:-2]) / (2.0 * np.maximum(masses.ravel(), 1.0))
    rising = 1.0 + np.clip(slope, -2.0, 2.0)[:, None] * ((np.arange(n) + 0.5) / n - 0.5)
    falling = n_leaves * rising.reshape(children.shape)
    falling *= (masses / np.maximum(falling.sum(axis=-1), 1e-300))[..., None]
    empty = np.asarray(~present.any(axis=-1))
    spread = np.sqrt(np.where(present, deviations**2, 0.0).sum(axis=-1))
    doubtful = empty | (masses <= _DOUBT * spread)
    possible = np.where(present | empty[..., None], children, -np.inf)
    projected = project_each(possible, np.where(doubtful, 1.0, masses))
    return np.where(doubtful[..., None], falling, projected)


def find_bins(
    grid: Cells, counts: Floats, n_bins: int, noise: float, *, tails: bool = False
) -> FoundBins:
    """Return cells of about equal counts, from the estimated counts of the fine ones.

    Parameters
    ----------
    n_bins
        How many cells there would be without fine cells with more than their part; with them there
        are at most twice as many, and one, and up to four in the tails. A fine cell with more than
        its part shares a cell with empty ones at most, and the rest is cut into as many as are
        left, as far as each has more rows than five times the noise.
    noise
        The standard deviation of a fine count.
    tails
        Whether the outer quarter of the first and of the last cell is cut off, and a quarter of
        that, unless it has fewer rows than the noise. Then the counts of the cells tell how many
        rows are far out.
    """
    line = np.where(grid.possible, counts, 0.0)[grid.n_cells - len(grid.edges) + 1 :]
    masses = line.astype(np.float32).astype(np.float64)  # as files hold them
    part = float(masses.sum()) / n_bins
    while True:  # less than all / n_bins if large fine cells leave fewer rows for the others
        large = masses >= part
        rest = float(masses[~large].sum()) / max(1, n_bins - int(large.sum()))
        if not large.any() or max(rest, MANY * noise) >= part:
            break
        part = max(rest, MANY * noise)
    places, taken = [0], 0.0
    for place, (before, after) in enumerate(pairwise(masses.tolist()), 1):
        taken += before
        # a cell with more than its part is cut off on both sides
        if taken > 0.0 and (before >= part or after >= part or taken + after > part):
            places.append(place)
            taken = 0.0
    if tails and n_bins > 1:
        outside = [rows for rows in (part / 4.0, part / 16.0) if rows > noise]
        below, above = (np.searchsorted(np.cumsum(m), outside) for m in (masses, masses[::-1]))
        ends = (*below, *(len(masses) - above))
        places += [int(place) for place in ends if 0 < place < len(masses)]
    cuts = np.append(grid.edges[np.unique(places)], grid.edges[-1])
    numbers = _find_numbers(grid, masses, noise)
    return FoundBins(cuts=cuts, edges=grid.edges, masses=masses, numbers=numbers)


def _find_numbers(grid: Cells, masses: Floats, noise: float) -> Floats:
    """Return the simplest decimal number in each fine cell with many more rows than its neighbours.

    A cell that has four times as many, and more by five standard deviations of noise and chance,
    has them mostly because of one number, such as a price of 2.75. Nothing tells which number of the cell it
    is: the one with the fewest digits is a public choice. A cell that reaches from one number to
    more than its double has many rows because it is wide.
    """
    codec, edges = grid.codec, grid.edges
    found: list[float] = []
    if pa.types.is_temporal(codec.type):
        return np.array(found)
    # the mode `same` would be longer than a line of two cells
    usual = np.convolve(masses, [0.5, 0.0, 0.5])[1:-1]
    beyond = masses - usual
    chance = np.sqrt(noise**2 + masses)  # of the noise, and of rows that come by chance
    many = (masses >= _FREQUENT * usual) & (beyond > MANY * chance)
    for cell in np.flatnonzero(many):
        low, high = float(edges[cell]), float(edges[cell + 1])
        if max(abs(low), abs(high)) > 2.0 * min(abs(low), abs(high)) or low < 0.0 < high:
            continue
        number = float(float_type(codec.type)(find_simplest(low, high)))
        is_one = number in codec.atoms or (codec.lattice and high - low <= 1.0)
        if low < number <= high and not is_one:
            found.append(number)
    return np.array(found)


def find_simplest(low: float, high: float) -> float:
    """Return the number in (low, high] with the fewest decimals; `high` if 15 are too few."""
    for decimals in range(-15, 16):
        number = round(math.floor(high * 10.0**decimals) / 10.0**decimals, max(decimals, 0))
        if low < number <= high:
            return number
    return high
