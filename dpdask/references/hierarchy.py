"""Counts of a column on a fine public grid, level by level: its cells and its distribution are found from them under privacy."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dpdask.cells import Cells, FoundBins, cells, cells_of_edges, step
from dpdask.codec import Codec, LevelCodec
from dpdask.kernels import projections as simplex
from dpdask.privacy.events import CentralEvent
from dpdask.privacy.noise import deviation
from dpdask.stats.levels import CellCounts

N_LEVELS = 3
BRANCHING = 16

_N_LEAVES = BRANCHING**N_LEVELS
_DECADES = 1e6  # the largest magnitude over the one below which leaves have equal width
MANY = 5.0  # standard deviations
_REACH = (2.5, 3.0, 3.5, 4.0, 4.5)  # how many 1, 2, 3, … blocks further out must have together
_ALONE = 6.0  # how many a block must have alone, wherever it lies
_EDGE = 0.5  # how many are taken from the block beyond
_DOUBT = 1.0  # of a sum of children
_LEAST_WHOLE = (
    60.0  # whole numbers up to about this one are leaves of their own, whatever the bounds
)

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]
Number = TypeVar("Number", np.int64, np.float64)


def make_grid(codec: Codec) -> Cells:
    """Return the fine public cells of a column: at most about 4,096, a function of its type and bounds alone."""
    if isinstance(codec, LevelCodec) or codec.bounds is None:
        return cells(codec, 1)  # which refuses a column without bounds
    low, high = codec.bounds
    if pa.types.is_temporal(codec.type) or (codec.lattice and high - low < _N_LEAVES):
        return cells(codec, _N_LEAVES)
    if codec.lattice:
        cuts = np.unique(np.clip(np.round(_spread(low, high, _LEAST_WHOLE)), low, high))
        inner = np.array([low, min(low + 1.0, high), max(high - 1.0, low), high])
        return cells_of_edges(codec, np.unique(np.concatenate([[low - 1.0], cuts, inner])))
    special = np.array([low, high, *([0.0] if low < 0.0 < high else [])])
    cuts = _spread(low, high, max(abs(low), abs(high)) / _DECADES)
    return cells_of_edges(
        codec, np.unique(np.concatenate([cuts, special, step(codec, special, -np.inf)]))
    )


def _spread(low: float, high: float, unit: float) -> Floats:
    """Return the numbers that divide a range evenly on the scale of asinh: linear up to about the unit, logarithmic beyond."""
    found: Floats = (
        np.sinh(np.linspace(math.asinh(low / unit), math.asinh(high / unit), _N_LEAVES - 3)) * unit
    )
    found[0], found[-1] = low, high
    return np.clip(found, low, high)


@dataclass(frozen=True)
class Hierarchy:
    """The levels in which the cells of a grid are counted: blocks, their blocks, and the cells; null and atoms in each level.

    Privacy
    -------
    A row is in exactly one count of each of the three levels, so each level is a histogram.
    """

    cells: Cells

    @cached_property
    def _n_singles(self) -> int:
        return self.cells.n_cells - max(len(self.cells.edges) - 1, 0)

    @cached_property
    def _line(self) -> NDArray[np.bool_]:
        return self.cells.possible[self._n_singles :]

    @cached_property
    def _branching(self) -> int:
        """How many children a block has at most: as few as reach all cells."""
        return max(1, math.ceil(round(math.cbrt(len(self._line)), 9)))

    @property
    def size(self) -> int:
        """How many counts there are."""
        return self._n_singles * N_LEVELS + int(
            sum(self._branching ** (level + 1) for level in range(N_LEVELS))
        )

    def count(self, exact: CellCounts) -> Counts:
        """Return the counts of all levels, int64 of shape (size,), of the counts of the cells."""
        singles, line = (
            exact.counts[: self._n_singles],
            self._padded(exact.counts[self._n_singles :]),
        )
        levels = [line.sum(axis=(1, 2)), line.sum(axis=2).ravel(), line.ravel()]
        return np.concatenate([part for level in levels for part in (singles, level)])

    def _padded(self, line: NDArray[Number]) -> NDArray[Number]:
        side = self._branching
        padded = np.zeros(side**N_LEVELS, dtype=line.dtype)
        padded[: len(line)] = line
        return padded.reshape(side, side, side)

    def estimate(self, noisy: Counts, event: CentralEvent, n_rows: float | None) -> Floats:
        """Return what noisy counts say about each cell, float64 of shape (n_cells,), none below 0.

        Parameters
        ----------
        n_rows
            What the counts sum to; None: what the noisy ones say, at least 1.

        Notes
        -----
        Upwards, each count is averaged with the sum of its children, by inverse variance. Of the
        first level's blocks those are kept that lie next to each other from the one with most rows
        outwards, as far as blocks have more than noise together, and one block beyond on each side,
        less half a standard deviation: noise far out would ruin means. They are projected to
        non-negative counts with the sum `n_rows`. Downwards, children are projected to non-negative
        counts with the sum that their parent has; where that is less than the standard deviation of
        their own sum, they rise or fall with the parent's neighbours instead.

        References
        ----------
        Hay, Rastogi, Miklau and Suciu, Boosting the accuracy of differentially private histograms
        through consistency (2010), for the averages.
        """
        noise = deviation(event)
        own, (upper, middle, leaves), (spreads, factors) = self._average(noisy)
        n_leaves = self._n_leaves
        there, counts, spread = self._find_first(upper, noise * np.sqrt(spreads))
        kept, around = _keep(counts, spread)
        counts[around] -= _EDGE * spread[around]
        top = np.concatenate([own, counts[kept]])
        total = max(1.0, float(top.sum())) if n_rows is None else float(n_rows)
        first = simplex.project(top, total)
        masses = np.zeros(self._branching)
        masses[there[kept]] = first[self._n_singles :]
        masses = _share(masses, middle, noise * np.sqrt(factors), n_leaves.sum(axis=2))
        masses = _share(masses, leaves, np.full(leaves.shape, noise), n_leaves)
        return np.concatenate([first[: self._n_singles], masses.ravel()[: len(self._line)]])

    def tell_kept(self, noisy: Counts, event: CentralEvent) -> dict[str, Any]:
        """Return where `estimate` may put rows, and what the noisy counts say about how many lie beyond, as a card has it.

        Nothing, if no block stands out from noise: then rows may be anywhere.
        """
        _, (upper, *_), (spreads, _) = self._average(noisy)
        there, counts, spread = self._find_first(upper, deviation(event) * np.sqrt(spreads))
        if not _stands_out(counts, spread):
            return {}
        kept, _ = _keep(counts, spread)
        edges, size = self.cells.edges, self._branching**2
        first, last = (
            edges[there[kept.start] * size],
            edges[min((int(there[kept][-1]) + 1) * size, len(edges) - 1)],
        )
        beyond = {}
        for name, side in {
            "below": slice(0, kept.start),
            "above": slice(kept.stop, len(counts)),
        }.items():
            if len(counts[side]):
                told = float(counts[side].sum()), float(np.hypot.reduce(spread[side]))
                beyond[name] = {
                    "blocks": len(counts[side]),
                    "count": round(told[0], 1),
                    "standard_deviation": told[1],
                }
        return {
            "kept": [max(float(first), float(self.cells.firsts[0])) + 0.0, float(last)],
            "beyond": beyond,
        }

    @cached_property
    def _n_leaves(self) -> Floats:
        """How many cells each place of the last level has: 0 where no value can be."""
        return self._padded(self._line.astype(np.float64))

    def _find_first(
        self, upper: Floats, deviations: Floats
    ) -> tuple[NDArray[np.intp], Floats, Floats]:
        """Return the blocks of the first level that have cells, their counts, and the standard deviations of these."""
        there = np.flatnonzero(self._n_leaves.any(axis=(1, 2)))
        return there, upper[there], deviations[there]

    def _average(self, noisy: Counts) -> tuple[Floats, tuple[Floats, ...], tuple[Floats, ...]]:
        """Return counts averaged with the sums of their children: of null and atoms, of each level, and the variances' factors."""
        own, line = self._split(noisy)
        leaves = np.where(self._n_leaves > 0, line[2], 0.0)
        middle, factors = _average(line[1], leaves, np.ones_like(leaves), self._n_leaves > 0)
        upper, spreads = _average(line[0], middle, factors, self._n_leaves.sum(axis=2) > 0)
        return own, (upper, middle, leaves), (spreads, factors)

    def _split(self, noisy: Counts) -> tuple[Floats, list[Floats]]:
        """Return the counts of null and atoms, averaged over the levels, and those of each level's blocks."""
        side, singles = self._branching, self._n_singles
        own, line, start = np.zeros(singles), [], 0
        for level in range(1, N_LEVELS + 1):
            middle, end = start + singles, start + singles + side**level
            own += noisy[start:middle] / N_LEVELS
            line.append(noisy[middle:end].reshape((side,) * level).astype(np.float64))
            start = end
        return own, line


def _average(
    own: Floats, children: Floats, factors: Floats, present: NDArray[np.bool_]
) -> tuple[Floats, Floats]:
    """Return counts averaged with the sums of their children, and what their variances are of one count's."""
    below = np.where(present, factors, 0.0).sum(axis=-1)
    summed = np.where(present, children, 0.0).sum(axis=-1)
    weight = 1.0 / np.where(below > 0.0, below, 1.0)
    return np.where(below > 0, (own + weight * summed) / (1.0 + weight), 0.0), np.where(
        below > 0, 1.0 / (1.0 + weight), 1.0
    )


def _keep(counts: Floats, deviations: Floats) -> tuple[slice, list[int]]:
    """Return which blocks may have rows: those with more than noise and one beyond on each side, which are told too; all if none has more."""
    n = len(counts)
    if not _stands_out(counts, deviations):
        return slice(0, n), []
    mode = int(counts.argmax())
    first = mode - _reach(counts[:mode][::-1], deviations[:mode][::-1]) - 1
    last = mode + _reach(counts[mode + 1 :], deviations[mode + 1 :]) + 1
    return slice(max(first, 0), last + 1), [place for place in (first, last) if 0 <= place < n]


def _stands_out(counts: Floats, deviations: Floats) -> bool:
    if not len(counts):  # atoms may leave no number between the bounds
        return False
    mode = counts.argmax()
    return bool(counts[mode] > _REACH[-1] * deviations[mode])


def _reach(counts: Floats, deviations: Floats) -> int:
    """Return how many blocks further out have more than noise, together with those before them or alone."""
    reach = 0
    while reach < len(counts):
        own, spread = counts[reach:], deviations[reach:]
        least = np.take(_REACH, np.arange(len(own)), mode="clip") * np.sqrt(np.cumsum(spread**2))
        enough = (np.cumsum(own) > least) | (own > _ALONE * spread)
        if not enough.any():
            break
        reach += int(enough.argmax()) + 1
    return reach


def _share(masses: Floats, children: Floats, deviations: Floats, n_leaves: Floats) -> Floats:
    """Return the counts of children that sum to their parents' masses; one more axis than these."""
    present = n_leaves > 0
    falling = n_leaves * _slope(masses, children.shape[-1])
    falling *= (masses / np.maximum(falling.sum(axis=-1), 1e-300))[..., None]
    empty = np.asarray(~present.any(axis=-1))
    doubtful = empty | (
        masses <= _DOUBT * np.sqrt(np.where(present, deviations**2, 0.0).sum(axis=-1))
    )
    projected = simplex.project_each(
        np.where(present | empty[..., None], children, -np.inf), np.where(doubtful, 1.0, masses)
    )
    found: Floats = np.where(doubtful[..., None], falling, projected)
    return found


def _slope(masses: Floats, n: int) -> Floats:
    """Return weights of n children of each block, on a line whose slope is that of the block's neighbours, as far as it stays above 0."""
    around = np.pad(masses.ravel(), 1, mode="edge")
    slope = np.clip((around[2:] - around[:-2]) / (2.0 * np.maximum(masses.ravel(), 1.0)), -2.0, 2.0)
    weights: Floats = 1.0 + slope[:, None] * ((np.arange(n) + 0.5) / n - 0.5)
    return weights.reshape((*masses.shape, n))


def find_bins(
    grid: Cells, counts: Floats, n_bins: int, noise: float, *, tails: bool = False
) -> FoundBins:
    """Return cells of about equal counts; a fine cell with more than its part shares a cell with empty ones at most.

    Parameters
    ----------
    n_bins
        How many cells there would be without fine cells with more than their part; with them there
        are at most twice as many, and one, and up to four in the tails. A fine cell with more than
        its part has one cell of these, and the rest is cut into as many as are left, as far as each
        has more rows than five times the noise.
    tails
        Whether the outer quarter of the first and of the last cell is cut off, and a quarter of
        that, unless it has fewer rows than the noise. Then the counts of the cells tell how many
        rows are far out.
    """
    masses = (
        np.where(grid.possible, counts, 0.0)[grid.n_cells - len(grid.edges) + 1 :]
        .astype(np.float32)
        .astype(np.float64)
    )  # as files hold them
    part = _find_part(masses, n_bins, MANY * noise)
    places, taken = [0], 0.0
    for place, (before, after) in enumerate(pairwise(masses.tolist()), 1):
        taken += before
        if taken > 0.0 and (
            before >= part or after >= part or taken + after > part
        ):  # a cell with more than its part is cut off on both sides
            places.append(place)
            taken = 0.0
    if tails and n_bins > 1:
        places += _cut_tails(
            masses, [outside for outside in (part / 4.0, part / 16.0) if outside > noise]
        )
    return FoundBins(
        cuts=np.append(grid.edges[np.unique(places)], grid.edges[-1]),
        edges=grid.edges,
        masses=masses,
    )


def _find_part(masses: Floats, n_bins: int, least: float) -> float:
    """Return the part of a cell: of all, or less if fine cells with more than their part leave fewer rows for the other cells."""
    part = float(masses.sum()) / n_bins
    while True:
        large = masses >= part
        rest = max(float(masses[~large].sum()) / max(1, n_bins - int(large.sum())), least)
        if not large.any() or rest >= part:
            return part
        part = rest


def _cut_tails(masses: Floats, outside: list[float]) -> list[int]:
    """Return where fine cells are cut so that about so many rows lie below, and as many above."""
    below, above = (np.searchsorted(np.cumsum(each), outside) for each in (masses, masses[::-1]))
    return [int(place) for place in (*below, *(len(masses) - above)) if 0 < place < len(masses)]
