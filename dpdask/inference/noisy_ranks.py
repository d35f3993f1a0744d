"""Averages of a released column of numbers whose noise is a public channel on its ranks under a reference that is told.

No distribution is assumed. For a function f of the original value there are functions h of the released
one with T h >= f, or T h <= f, for every value that there can be: their averages lie above and below that
of f, up to chance. Those are taken whose averages are nearest, chance included.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from typing import Any, Protocol

import numpy as np
from scipy import optimize

from dpdask.arrays import Ends, Flags, Floats, Pair, Triple, freeze_class
from dpdask.inference.measured import FEW_ROWS, NORMAL_95
from dpdask.inference.pseudo_values import PseudoValues, estimate_prior
from dpdask.inference.slopes import regress_on_kept
from dpdask.inference.tallies import Codes, Moments

_FINE = 1.0 / 128  # of the ranks: a wider piece of the reference is cut
_MIDDLES = 512  # ranks that an average over an interval is taken at
_MOST_OUTCOMES = 96
_PER_SCALE = 10.0  # outcomes to a scale of the noise
_LEAST_OUTCOMES = 32
_ROUNDS = 3
_STEPS = 6  # towards what was released, for what the functions are made for
_HALVINGS = 40
_ROUNDING = 1e-9
_POINTS = 256  # of a distribution that released values tell
_TERMS = 12  # of a Brownian bridge: 95 % of its variance
_SURE = 2.0  # standard errors of a divisor


class Law(Protocol):
    """What rank is released, given the original one: both under the reference."""

    def cumulate(self, own: Floats, at: Floats) -> Floats:
        """Return Pr(released rank <= at | own rank), of shape (own, at)."""

    @property
    def cuts(self) -> Floats:
        """Released ranks between which the likelihood of the own one changes."""


@freeze_class
class LaplaceLaw:
    """Discrete Laplace noise on whole ranks, and the rank of the sum: `kernels.rank`."""

    n_cells: int
    rate: float  # -log(α)

    def cumulate(self, own: Floats, at: Floats) -> Floats:
        """Return what `Law` says; see `Law.cumulate`."""
        table, n, a = _cumulate_sums(self.n_cells, self.rate), self.n_cells, math.exp(-self.rate)
        rank = np.minimum((own * n).astype(np.int64), n - 1)[:, None]
        # sums below 0 are alike for all ranks, and so are those above: a part of them is that part
        w = np.searchsorted(table, at, side="right") - 2  # table[w + 1] = Pr(sum <= w)
        below = np.where(w >= -1, table[np.maximum(w + 1, 0)], 0.0)
        above = np.where(w + 2 < len(table), table[np.minimum(w + 2, len(table) - 1)], 1.0)
        part = np.clip((at - below) / np.maximum(above - below, 1e-300), 0.0, 1.0)

        def reach(sums: Codes) -> Floats:
            off = sums[None, :] - rank
            power = np.exp(-self.rate * np.abs(np.where(off >= 0, off + 1.0, -off * 1.0)))
            return np.where(off >= 0, 1.0 - power / (1.0 + a), power / (1.0 + a))

        first = np.where(w >= -1, reach(w), 0.0)
        second = np.where(w >= n - 1, 1.0, reach(w + 1))
        return first + part * (second - first)

    @property
    def cuts(self) -> Floats:
        """Released ranks at even sums."""
        n = int(np.clip(_PER_SCALE * self.rate * self.n_cells, _LEAST_OUTCOMES, _MOST_OUTCOMES))
        table = _cumulate_sums(self.n_cells, self.rate)
        return table[np.linspace(0, len(table) - 1, n + 1).astype(np.int64)]


@lru_cache(maxsize=4)
def _cumulate_sums(n_cells: int, rate: float) -> Floats:
    """Return Pr(sum <= w) for w = -1..n_cells - 1 under uniform ranks (docs/explanation/math.md, Ranks)."""
    a, w = math.exp(-rate), np.arange(-1, n_cells)
    k = a / (-math.expm1(-rate) * (1.0 + a))
    found: Floats = w + 1 + k * (np.exp(-rate * (w + 1.0)) - np.exp(-rate * (n_cells - 1.0 - w)))
    return found / n_cells


@freeze_class(eq=False)
class BinLaw:
    """A channel on bins of ranks; inside its bin a released rank is uniform."""

    edges: Floats
    matrix: Floats

    def cumulate(self, own: Floats, at: Floats) -> Floats:
        """Return what `Law` says; see `Law.cumulate`."""
        n = len(self.matrix)
        place = np.clip(np.searchsorted(self.edges, own, side="right") - 1, 0, n - 1)
        sums = np.hstack([np.zeros((n, 1)), np.cumsum(self.matrix, axis=1)])
        return np.array([np.interp(at, self.edges, row) for row in sums])[place]

    @property
    def cuts(self) -> Floats:
        """The edges."""
        return self.edges


def _read_law(column: Mapping[str, Any]) -> Law:
    """Return the law that a card gives of a column."""
    if "rank_edges" in column:
        edges, matrix = (np.array(column[each]) for each in ("rank_edges", "channel"))
        return BinLaw(edges=edges, matrix=matrix)
    return LaplaceLaw(n_cells=int(column["ranks"]), rate=-float(column["alpha_log"]))


def _read_bounds(column: Mapping[str, Any]) -> Ends:
    low, high = column.get("bounds") or (-math.inf, math.inf)
    return float(low), float(high)


@freeze_class(eq=False)
class Inputs:
    """The original values that there can be: a row each for a rank, or an interval of ranks that it is uniform in."""

    # the values lie in (low, high], or are `high` where `is_point`; NaN of null
    low: Floats
    high: Floats
    is_point: Flags  # whether there is one value
    # the ranks
    first: Floats
    last: Floats

    @property
    def is_null(self) -> Flags:
        """Whether it is null."""
        return np.isnan(self.high)

    def clip(self, within: Ends) -> Pair:
        """Return the least and the greatest clipped value; 0 of null."""
        low, high = (np.clip(np.nan_to_num(part), *within) for part in (self.low, self.high))
        return low * ~self.is_null, high * ~self.is_null

    def lie_in(self, first: float, end: float) -> Pair:
        """Return whether all values, and whether some of them, lie in a range."""
        every = (self.low >= first) & (self.high < end)
        some = (self.high >= first) & (self.low < end)
        return every.astype(float), some.astype(float)


@dataclass(frozen=True, kw_only=True, eq=False)
class NoisyRanks:
    """A released column of numbers and the channel of its ranks."""

    # Points of the reference's distribution function, which it is known at: it jumps where a value
    # repeats. The first rank is that of null
    values: Floats
    ranks: Floats
    law: Law  # the channel
    is_whole: bool  # whether values are whole numbers
    bounds: Ends  # what no value lies outside of; infinite if it is not known
    doubt: float = 0.0  # how far off ranks are: times a Brownian bridge. 0 where they are told
    # the largest share of the reference's rows at one value that is spread over the gap below
    spread: float = 0.0

    @classmethod
    def from_card(cls, column: Mapping[str, Any]) -> NoisyRanks | None:
        """Return the channel of a column of a card; None if it does not tell the reference."""
        reference = column.get("reference", {})
        if "ranks" not in reference:
            return None
        values, ranks = (np.array(reference[each], float) for each in ("values", "ranks"))
        return cls(
            values=values,
            ranks=ranks,
            law=_read_law(column),
            is_whole=bool(reference["whole"]),
            bounds=_read_bounds(column),
        )

    @classmethod
    def from_released(
        cls, column: Mapping[str, Any], released: Floats, n_reference: float, *, is_whole: bool
    ) -> NoisyRanks:
        """Return the channel of a column whose released values have the distribution of a reference that is not told.

        NaN is null; the reference is made of `n_reference` rows.
        """
        n, x = len(released), np.sort(released[~np.isnan(released)])
        null = 1.0 - len(x) / n
        values, first, sizes = np.unique(x, return_index=True, return_counts=True)
        above = null + (first + sizes) / n
        chosen = np.searchsorted(above, np.linspace(null, 1.0, _POINTS + 1)[1:-1])
        jumps = np.flatnonzero((sizes > max(FEW_ROWS, n / _POINTS)) & (not is_whole))
        chosen = np.unique(np.concatenate([chosen, jumps, [len(values) - 1]]))
        points = [(values[0] - is_whole, null)]
        for place in chosen.tolist():
            at_jump = place in jumps
            points += [(values[place], above[place] - sizes[place] / n)] if at_jump else []
            points += [(values[place], above[place])]
        table = np.array(points)
        keep = np.append(True, np.diff(table[:, 1]) > 0.0)
        return cls(
            values=table[keep, 0],
            ranks=table[keep, 1],
            law=_read_law(column),
            is_whole=is_whole,
            bounds=_read_bounds(column),
            doubt=math.sqrt(1.0 / n + 1.0 / n_reference),
            spread=float(column["reference"]["spread_rank_at_most"]),
        )

    @property
    def has_null(self) -> bool:
        """Whether a value may be null."""
        return bool(self.ranks[0] > 0.0)

    # ---- cells of released values

    @cached_property
    def _points(self) -> Pair:
        """Return values and ranks that cells end at: those of the card, and even ones inside wide linear pieces."""
        values, ranks = self.values, self.ranks
        steps = np.ones(len(values) - 1, dtype=np.int64)
        if not self.is_whole:
            wide = np.ceil(np.diff(ranks) / _FINE).astype(np.int64)
            steps = np.where(np.diff(values) > 0.0, np.maximum(wide, 1), 1)
        place = np.concatenate(
            [[0.0], *(k + np.arange(1, n + 1) / n for k, n in enumerate(steps.tolist()))]
        )
        k = np.minimum(place.astype(np.int64), len(values) - 2)
        part = place - k
        x = values[k] + part * (values[k + 1] - values[k])
        c = ranks[k] + part * (ranks[k + 1] - ranks[k])
        return x, c

    @cached_property
    def _groups(self) -> tuple[Codes, Floats]:
        """Return the outcome of each cell between points, and the ranks that outcomes end at, null's first."""
        x, c = self._points
        keep = np.zeros(len(c), bool)
        keep[np.abs(c[None, :] - self.law.cuts[:, None]).argmin(axis=1)] = True
        jumps = np.flatnonzero((np.diff(x) == 0.0) & (np.diff(c) > 0.0))
        keep[jumps] = keep[jumps + 1] = keep[0] = keep[-1] = True
        # of points with one rank, the last stands for all; no value is released before the first of them
        is_last = np.append(np.diff(c) > 0.0, True)
        place = np.cumsum(is_last) - is_last
        keep = is_last & (np.bincount(place, weights=keep)[place] > 0.0)
        has_null = int(c[0] > 0.0)
        ends = np.append(0.0, c[keep]) if has_null else c[keep]
        return np.maximum(np.cumsum(keep)[:-1] - 1, 0) + has_null, ends

    @property
    def n_outcomes(self) -> int:
        """How many outcomes are told apart."""
        return len(self._groups[1]) - 1

    def code(self, released: Floats) -> Codes:
        """Return the outcome of each released value, NaN of null."""
        x, _ = self._points
        place = np.searchsorted(x, released, side="left")
        last = len(x) - 1
        here = np.minimum(place, last - 1)
        is_jump = (x[here] == released) & (x[here + 1] == released)
        cell = np.clip(np.where(is_jump, here, place - 1), 0, last - 1)
        return np.where(np.isnan(released), 0, self._groups[0][cell])

    # ---- original values

    @cached_property
    def inputs(self) -> Inputs:
        """What there can be."""
        x, c = self._points
        low, high, start, end = x[:-1], x[1:], c[:-1], c[1:]
        # one value, or one whole number, is uniform in its ranks
        is_point = (low == high) | (self.is_whole & (high - low == 1.0))
        # the reference may have no mass between two points, and values be there
        between, least = ~is_point, low + self.is_whole
        parts = [(is_point, high, high, start, end, True)]
        parts += [(between, least, high, at, at, False) for at in (start, end)]
        if self.is_whole:
            is_wide, places = between & (end - start > _FINE), np.arange(1, 8) / 8
            inner = (start + part * (end - start) for part in places)
            parts += [(is_wide, least, high, at, at, False) for at in inner]
        else:  # the value at a piece's end is released like any rank of it
            value, ranks = self.values[1:], self.ranks
            heavy = (np.diff(ranks) > _FINE) & (np.diff(self.values) > 0.0)
            parts.append((heavy, value, value, ranks[:-1], ranks[1:], True))
        rows = [
            np.column_stack([*each, np.full(len(where), one)])[where] for where, *each, one in parts
        ]
        # all values beyond the reference have its first rank, or its last one
        if self.bounds[0] < x[0] or x[1] > x[0]:
            least_of_all = min(self.bounds[0], x[0])
            rows.append(np.array([[least_of_all, x[0], c[0], c[0], least_of_all == x[0]]]))
        if self.bounds[1] > x[-1]:
            rows.append(np.array([[x[-1], self.bounds[1], c[-1], c[-1], False]]))
        if self.has_null:
            rows.append(np.array([[np.nan, np.nan, 0.0, c[0], True]]))
        low, high, first, last, points = np.concatenate(rows).T
        is_point = points > 0.0
        if self.spread:  # a value that many rows share may have a rank this far below its own
            beyond = np.interp(first + self.spread, c, x)
            high = np.where(is_point | np.isnan(high), high, np.maximum(high, beyond))
        return Inputs(low=low, high=high, is_point=is_point, first=first, last=last)

    @cached_property
    def matrix(self) -> Floats:
        """The probability of each outcome for each of the inputs."""
        return self._find_matrix(self.inputs.first, self.inputs.last, self._groups[1])

    @property
    def of_outcomes(self) -> Floats:
        """The probability of each outcome for ranks that are even in one of them."""
        ends = self._groups[1]
        return self._find_matrix(ends[:-1], ends[1:], ends)

    def _find_matrix(self, firsts: Floats, lasts: Floats, ends: Floats) -> Floats:
        found = self.law.cumulate(firsts, ends)
        for row in np.flatnonzero(lasts > firsts):
            own = (np.arange(_MIDDLES) + 0.5) / _MIDDLES
            own = firsts[row] + own * (lasts[row] - firsts[row])
            found[row] = self.law.cumulate(own, ends).mean(axis=0)
        found[:, 0], found[:, -1] = 0.0, 1.0
        return np.diff(found, axis=1)

    @cached_property
    def _moved(self) -> list[Floats]:
        """Return by how much the matrix differs where ranks are off by each term of a Brownian bridge: √2 sin(kπu)/(kπ) (Karhunen and Loève)."""
        _, c = self._points
        found = []
        for k in np.arange(1, _TERMS + 1) * math.pi:
            moved = c + self.doubt * math.sqrt(2.0) * np.sin(k * c) / k
            moved = np.maximum.accumulate(np.clip(moved, 0.0, 1.0))
            parts = (self.inputs.first, self.inputs.last, self._groups[1])
            first, last, ends = (
                np.where(part > 0.0, np.interp(part, c, moved), 0.0) for part in parts
            )
            found.append(self._find_matrix(first, last, ends) - self.matrix)
        return found

    def _echo(self, h: Floats, n: float) -> Floats:
        """Return functions of the outcome whose averages over any rows are what each term of the error of ranks that are not told adds to that of h.

        They are least squares, without directions of the channel that n rows do not tell.
        """
        root = np.sqrt(self._weights)[:, None]
        offs = np.array([moved @ h for moved in self._moved]).reshape(-1, len(root)).T
        return np.linalg.lstsq(root * self.matrix, root * offs, rcond=n**-0.5)[0]

    @property
    def _weights(self) -> Floats:
        """How much of the reference each of the inputs stands for."""
        _, c = self._points
        inputs = self.inputs
        width = inputs.last - inputs.first
        near = np.searchsorted(c, inputs.first)
        reach = np.append(np.diff(c), 0.0)[np.minimum(near, len(c) - 1)]
        found = np.where(width > 0.0, width, reach)
        return found / found.sum()

    # ---- functions of the outcome whose averages lie below and above that of f

    def cover(self, f: Pair, counts: Floats, n: float) -> Pair:
        """Return the functions of the outcome whose averages lie below and above that of f.

        f lies between two numbers for each of the inputs, and an average is of n rows.
        """
        q, weight = self._expect(counts), 1.0 / math.sqrt(n)
        matrix, place = self._different

        def cover(least: Floats) -> Floats:
            most = np.full(len(matrix), -math.inf)
            np.maximum.at(most, place, least)
            return _cover(matrix, most, q, weight)

        return -cover(-f[0]), cover(f[1])

    def _expect(self, counts: Floats) -> Floats:
        """Return about the probability of each outcome: that of a distribution of original values, unlike the counts themselves."""
        width = self.inputs.last - self.inputs.first
        start = np.where(width > 0.0, width, 1.0 / len(width))
        prior = estimate_prior(self.matrix, start / start.sum(), counts, _STEPS)
        return np.maximum(prior @ self.matrix, 1e-12)

    @cached_property
    def _different(self) -> tuple[Floats, Codes]:
        """Return the different rows of the matrix, and which each of the inputs has."""
        ranks = np.column_stack([self.inputs.first, self.inputs.last])
        _, first, place = np.unique(ranks, axis=0, return_index=True, return_inverse=True)
        return self.matrix[first], place.ravel()

    def _about(self, f: Pair, centre: float) -> Pair:
        """Return f - centre, and 0 of null."""
        low, high = (np.where(self.inputs.is_null, 0.0, each - centre) for each in f)
        return low, high

    # ---- estimates

    def ratio(
        self,
        table: Floats,
        part: Pair,
        possible: Ends,
    ) -> Bounds:
        """Return the average of f over the rows that are not null, in each group.

        The table has the shape (groups, outcomes); f lies between the two of `part` for
        each of the inputs, and the average between `possible`.
        """
        sizes, counts, is_null = table.sum(axis=1), table.sum(axis=0), self.inputs.is_null
        n = float(np.median(sizes))
        known = np.where(is_null, 0.0, 1.0)
        inside = self.cover((known, known), counts, n)
        centre = sum(possible) / 2.0
        for _ in range(2):  # about the centre that the average turns out to have
            off = self._about(part, centre)
            h = self.cover(off, counts, n)
            found = Bounds.of(table, h, inside, centre, possible)
            if self.doubt:
                found = self._tell_held_out(found, table, h, off)
            of_all = Bounds.of(counts[None, :], h, inside, centre, possible)
            centre = float(of_all.value[0])
        return found

    def _tell_held_out(self, found: Bounds, table: Floats, h: Pair, f: Pair) -> Bounds:
        """Return bounds of groups whose errors hold that of ranks which the released values tell.

        By these ranks the average of h over all rows is that of f over what was released, so a group
        has the error of the latter, and of its own difference from all rows.
        """
        sizes, counts = table.sum(axis=1), table.sum(axis=0)
        n = float(counts.sum())
        echo = self._echo((h[0] + h[1]) / 2.0, n)
        differences = table / np.maximum(sizes, 1.0)[:, None] - counts / n
        off_by = ((differences @ echo) ** 2).sum(axis=1)
        numbers = (f[0] + f[1]) / 2.0
        mean = float(self._weights @ numbers)
        off_by += self.doubt**2 * float(self._weights @ (numbers - mean) ** 2)
        covariances = found.covariances.copy()
        covariances[:, :2, :2] *= (1.0 - sizes / n)[:, None, None]
        covariances[:, :2, :2] += off_by[:, None, None]
        return replace(found, covariances=covariances)

    def mean(self, table: Floats, within: Ends) -> Bounds:
        """Return the mean of the clipped values in each group of a table; see `ratio`."""
        return self.ratio(table, self.inputs.clip(within), within)

    def slope(self, found: Moments, possible: Ends) -> Triple:
        """Return the slopes of the values on kept columns, their standard errors and their worst biases."""
        counts, is_null = found.products[0, 0], self.inputs.is_null
        mean = self.mean(counts[None, :], possible)
        centre = float(mean.value[0])
        known = np.where(is_null, 0.0, 1.0)
        wanted = [self._about(self.inputs.clip(possible), centre)]
        wanted += [(known, known)] if self.has_null else []
        parts = [self.cover(each, counts, found.n_rows) for each in wanted]
        pseudo = [
            PseudoValues(
                g=(low + high)[None, None] / 2.0,
                bias=np.zeros(1),
                shared=np.zeros(1),
                f=np.zeros((1, len(low))),
            )
            for low, high in parts
        ]
        gaps = [(high - low) / 2.0 for low, high in parts]
        beta, error, bias = regress_on_kept(
            found, *pseudo, doubts=(gaps[0], (*gaps, 0.0 * counts)[1])
        )
        if self.doubt:
            echo = self._echo(pseudo[0].g[0, 0], found.n_rows)
            inverse = np.linalg.inv(found.products.sum(axis=2))
            off_by = (inverse @ (found.products[:, 0] @ echo))[1:] / found.scale[:, None]
            error = np.sqrt(error**2 + (off_by**2).sum(axis=1))
        return beta, error, bias

    def share(self, counts: Floats, first: float, end: float) -> Bounds:
        """Return the share of all rows that lie in a range."""
        h = self.cover(self.inputs.lie_in(first, end), counts, float(counts.sum()))
        one = np.ones(len(counts))
        return Bounds.of(counts[None, :], h, (one, one), 0.0, (0.0, 1.0))

    def quantile(self, counts: Floats, p: float) -> Quantile:
        """Return a quantile of the values that are not null; for the counts see `share`."""
        x = np.unique(self._points[0])

        @cache
        def find(place: int) -> Pair:
            sides = self.inputs.lie_in(-math.inf, float(np.nextafter(x[place], math.inf)))
            h = self.cover(self._about(sides, p), counts, float(counts.sum()))
            q = counts / counts.sum()
            means = np.array([q @ each for each in h])
            squares = np.array([q @ each**2 for each in h])
            errors = np.sqrt(np.maximum(squares - means**2, 0.0) / counts.sum())
            return means, errors

        return Quantile(x=x, find=find, bounds=self.bounds)


def _cover(matrix: Floats, f: Floats, q: Floats, weight: float) -> Floats:
    """Return the h with T h >= f of about the least mean + weight · standard deviation under q."""
    spread = float(np.ptp(f))
    if spread == 0.0:
        return np.full(len(q), f[0])
    centre, deviation, h = float(f.mean()), spread, np.zeros(len(q))
    for _ in range(_ROUNDS):
        # the least of mean + weight/2 · variance / deviation is nearest to a constant
        h = _cover_near(matrix, f, q, centre - deviation / weight)
        centre = float(q @ h)
        deviation = max(math.sqrt(float(q @ (h - centre) ** 2)), 1e-6 * spread)
    return h


def _cover_near(matrix: Floats, f: Floats, q: Floats, target: float) -> Floats:
    """Return the h with T h >= f nearest to a constant in the norm of q (Lawson and Hanson 1974, chapter 23: least distance)."""
    root, need = np.sqrt(q), f - target
    scale = float(np.abs(need).max()) or 1.0
    system = np.vstack([(matrix / root).T, need[None, :] / scale])
    right = np.append(np.zeros(len(q)), 1.0)
    try:
        solution, _ = optimize.nnls(system, right, maxiter=20 * system.shape[1])
    except RuntimeError:  # SciPy before 1.15 may go in circles
        solution = optimize.lsq_linear(system, right, bounds=(0.0, np.inf)).x
    rest = system @ solution - right
    h = target - scale * rest[:-1] / rest[-1] / root
    # what rounding left
    return h + max(0.0, float((f - matrix @ h).max()))


@freeze_class(eq=False)
class Quantile:
    """A quantile by what is known of how many values lie at or below each point."""

    x: Floats  # the points
    # of a point, the averages that lie below and above the share of the values up to it, less p,
    # and their standard errors
    find: Callable[[int], Pair]
    bounds: Ends  # what no value lies outside of

    @property
    def value(self) -> float:
        """Where the middle between the two averages is 0."""
        place = self._first(lambda place: bool(self.find(place)[0].sum() >= 0.0))
        return float(self.x[min(place, len(self.x) - 1)])

    def find_ends(self, deviations: float) -> Ends:
        """Return the ends of an interval: beyond them, p is so many standard errors away; the bounds, if they contradict each other."""

        def find(side: int, by: float) -> int:
            def is_there(place: int) -> bool:
                means, errors = self.find(place)
                return bool(means[side] + by * errors[side] >= 0.0)

            return self._first(is_there)

        low, high = find(1, deviations), find(0, -deviations)
        if low > high + 1:
            low, high = 0, len(self.x)
        ends = np.concatenate([[self.bounds[0]], self.x, [self.bounds[1]]])
        return float(ends[low]), float(ends[high + 1])

    def _first(self, is_there: Callable[[int], bool]) -> int:
        """Return the first place with a property that all later ones have; their number if none has."""
        low, high = 0, len(self.x)
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if is_there(middle) else (middle + 1, high)
        return low


@dataclass(frozen=True, kw_only=True, eq=False)  # no slots: a cached property
class Bounds:
    """Ratios A / B of averages of which each lies between two that are estimated."""

    # the averages of four functions below and above A, and below and above B, shape (groups, 4)
    means: Floats
    covariances: Floats  # Those of the averages, shape (groups, 4, 4)
    centre: float  # what is added to the ratios
    possible: Ends  # between what they lie

    @classmethod
    def of(
        cls,
        table: Floats,
        above: Pair,
        below: Pair,
        centre: float,
        possible: Ends,
    ) -> Bounds:
        """Return the ratios of the groups of a table; see `NoisyRanks.ratio`."""
        h, sizes = np.array([*above, *below]).T, np.maximum(table.sum(axis=1), 1.0)
        means = table @ h / sizes[:, None]
        products = np.einsum("gk,ki,kj->gij", table, h, h) / sizes[:, None, None]
        covariances = products - means[:, :, None] * means[:, None, :]
        # few rows can be alike by chance: they vary as all rows do
        every = table.sum(axis=0)
        mean = h.T @ every / max(every.sum(), 1.0)
        pooled = np.einsum("k,ki,kj->ij", every, h - mean, h - mean) / max(every.sum(), 1.0)
        covariances[sizes < FEW_ROWS] = pooled
        spare = np.where(sizes > 1.0, sizes - 1.0, np.nan)[:, None, None]
        return cls(means=means, covariances=covariances / spare, centre=centre, possible=possible)

    @property
    def ratios(self) -> Floats:
        """The ratios of the middles, NaN where it is not sure that B is above 0."""
        a, b = self.means[:, :2].mean(axis=1), self.means[:, 2:].mean(axis=1)
        doubt = np.sqrt(np.maximum(self.covariances[:, 2, 2], 0.0))
        with np.errstate(invalid="ignore", divide="ignore"):
            found: Floats = np.where(self.means[:, 2] > _SURE * doubt + _ROUNDING, a / b, np.nan)
        return found

    @property
    def value(self) -> Floats:
        """What is most likely: the ratios, within their intervals, or the middles of these."""
        found = np.clip(self.centre + self.ratios, *self._interval)
        return np.where(np.isnan(found) | self.is_hidden, sum(self._interval) / 2.0, found)

    @property
    def standard_error(self) -> Floats:
        """That of `value`, by the delta method; NaN where the ends of what is possible are nearer than chance, or nothing else is told."""
        ratio = self.ratios
        half = np.full(len(ratio), 0.5)
        weights = np.stack([half, half, -ratio / 2.0, -ratio / 2.0], axis=1)
        variance = np.einsum("gi,gij,gj->g", weights, self.covariances, weights)
        found = np.sqrt(np.maximum(variance, 0.0)) / self.means[:, 2:].mean(axis=1)
        away = np.minimum(*(abs(self.centre + ratio - end) for end in self.possible))
        is_in = np.clip(self.centre + ratio, *self.possible) == self.centre + ratio
        is_known = is_in & (away > NORMAL_95 * found) & ~self.is_hidden
        return np.where(is_known, found, np.nan)

    @cached_property
    def _interval(self) -> Pair:
        return self.find_ends(NORMAL_95)

    @property
    def is_hidden(self) -> Flags:
        """Whether nothing but what is possible is known."""
        low, high = self._interval
        return (low <= self.possible[0]) & (high >= self.possible[1])

    def find_ends(self, deviations: float) -> Pair:
        """Return the ends of an interval (Fieller 1954): beyond them, A - ratio · B is so many standard errors from 0.

        Ends that contradict each other tell nothing: ranks that released values tell are too
        far off then.
        """
        low, high = self._find_end(deviations, 1.0), self._find_end(deviations, -1.0)
        least, most = self.possible
        crossed = low > high
        return np.where(crossed, least, low), np.where(crossed, most, high)

    def _find_end(self, deviations: float, side: float) -> Floats:
        n = len(self.means)
        least, most = (np.full(n, end - self.centre) for end in self.possible)
        lower = side > 0.0

        def is_beyond(ratio: Floats) -> Flags:
            # B's own bound is the one that makes it hardest
            first = np.full(n, 0 if lower else 1)
            second = np.where((ratio > 0.0) == lower, 3, 2)
            rows = np.arange(n)
            mean = self.means[rows, first] - ratio * self.means[rows, second]
            variance = (
                self.covariances[rows, first, first]
                - 2.0 * ratio * self.covariances[rows, first, second]
                + ratio**2 * self.covariances[rows, second, second]
            )
            error = np.sqrt(np.maximum(variance, 0.0))
            return side * mean - deviations * error > 0.0

        inner, outer = (most, least) if lower else (least, most)
        inner, outer = inner.copy(), outer.copy()
        for _ in range(_HALVINGS):
            middle = (inner + outer) / 2.0
            beyond = is_beyond(middle)
            inner, outer = np.where(beyond, inner, middle), np.where(beyond, middle, outer)
        return self.centre + outer
