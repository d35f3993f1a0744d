"""Answers from ranges whose anchors are draws of a known distribution: no law of the values is needed.

The anchors of a row are drawn independently of its value, so they are a randomised design: of an
anchor u the released range tells whether Y > u. Averages over anchors are then without bias, as in
a survey with known probabilities, and Pr(Y > u), which falls in u, is a monotone regression.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from scipy import optimize, special

from dpdask.arrays import Ends, Flags, Floats, Pair, Triple, freeze_class
from dpdask.inference.measured import NORMAL_95
from dpdask.inference.tallies import Codes
from dpdask.references.sources import freeze

_NONE = np.zeros(0)
_N_ANCHORS = {"case1": 1, "case2": 2}
_FEW_EVENTS = 2.5  # below so many, a variance is not known
_UNEVEN = 20.0  # times the median
_FEWEST_CELLS, _MOST_CELLS = 50, 2**14
_CELLS_OF_SCORES = 2**11  # any regression will do there
_CHERNOFF = 0.65  # the likelihood ratio's quantiles over those of a χ² of one degree
_NEAR = 0.05  # of the anchors, on either side of a place
_END = 0.5  # of the anchors to the power of 2/3
_STEPS = 25  # of bisection
_UNTOLD = 0.2  # of the rows
_FOLDS = 5
_CLEAR = 5.0  # standard errors, that the variance of a feature is from 0
_HEAVY = 0.15  # of a sum of squares: if one row has more, it has no normal law


class Moment(NamedTuple):
    """The function φ(y) = (y - centre)^power of values that are clipped to ends."""

    low: float
    high: float
    power: int = 1
    centre: float = 0.0

    def at(self, y: Floats) -> Floats:
        """Return φ(y)."""
        return (np.clip(y, self.low, self.high) - self.centre) ** self.power

    def rise(self, y: Floats, step: float) -> Floats:
        """Return how much φ rises in a step, over its length; its slope without one."""
        if step:
            return (self.at(y + step) - self.at(y)) / step
        slope = self.power * (y - self.centre) ** (self.power - 1)
        return np.where((self.low <= y) & (y < self.high), slope, 0.0)


@freeze_class(eq=False)
class Anchors:
    """The anchors of each row: independent draws of a public distribution, of which those next to the value are released.

    An anchor that is not released lies outside the range, where it has the anchors' own
    distribution.
    """

    distribution: Any  # of scipy.stats
    n: int  # of a row
    step: float  # 1 for whole numbers, whose anchors are rounded down; else 0

    @classmethod
    def of_design(cls, design: Mapping[str, Any], *, whole: bool) -> Anchors | None:
        """Return the anchors of a design as a card has it; None if they are not independent draws of one distribution."""
        anchors = design.get("anchors") or {}
        n = _N_ANCHORS.get(design["design"], design.get("n_anchors"))
        exact = design.get("acceptable") or design.get("exact_ranges")
        if n is None or exact or "name" not in anchors:
            return None
        parameters = {name: value for name, value in anchors.items() if name != "name"}
        distribution = freeze(anchors["name"], parameters, "anchors", discrete=False)
        return cls(distribution=distribution, n=n, step=float(whole))

    @property
    def support(self) -> Ends:
        """Where they lie."""
        low, high = self.distribution.support()
        return float(low), float(high)

    def weigh(self, ends: Floats, moment: Moment | None = None) -> Floats:
        """Return φ'(u) over the density at the ends, φ' = 1 without a moment; 0 at ends that are no anchors."""
        here = np.isfinite(ends)
        at = np.where(here, ends, 0.0)
        cdf = self.distribution.cdf
        density = cdf(at + 1.0) - cdf(at) if self.step else self.distribution.pdf(at)
        rise = np.ones(len(at)) if moment is None else moment.rise(at, self.step)
        return np.where(here, rise / np.maximum(np.where(here, density, 1.0), 1e-300), 0.0)

    def reach(self, low: float, high: float) -> bool:
        """Return whether they may lie everywhere between two values."""
        first, last = self.support
        # those of whole numbers are rounded down
        return first <= low and high <= last + self.step

    def is_even(self, lower: Floats, upper: Floats, low: float, high: float) -> bool:
        """Return whether the released anchors between two values weigh about the same, so that averages of scores have a normal law."""
        ends = np.concatenate([lower, upper])
        weights = self.weigh(ends[(low <= ends) & (ends <= high)])
        weights = weights[weights > 0.0]
        return len(weights) > 0 and bool(weights.max() <= _UNEVEN * np.median(weights))

    def hide(self, lower: Floats, upper: Floats) -> Floats:
        """Return how many anchors of each row are not released, over the probability to lie outside its range."""
        n = self.n - np.isfinite(lower).astype(float) - np.isfinite(upper)
        cdf = self.distribution.cdf
        outside = cdf(lower + self.step) + 1.0 - cdf(upper)
        here = (n > 0.0) & (outside > 0.0)
        return np.where(here, n / np.where(here, outside, 1.0), 0.0)

    def pseudo_values(self, lower: Floats, upper: Floats, centre: Floats) -> Floats:
        """Return numbers whose average, given the rows' values, is that of the values, cut at the anchors' support.

        `centre` guesses each value: any leaves the average as it is, a near one makes it
        vary less.

        Notes
        -----
        For an anchor u of density g, (1{Y > u} - 1{c > u}) / g(u) has the mean ∫ (1{Y > u} - 1{c >
        u}) du = Y - c. A released anchor counts so; the others count with their mean outside the
        range. This is inverse probability weighting with a regression (Robins, Rotnitzky and Zhao,
        1994), and needs no law of the values.
        """
        c = np.clip(centre, *self.support)
        c = np.round(c) if self.step else c
        moved = np.where(c <= lower, self.weigh(lower), 0.0)
        moved = moved - np.where(c > upper, self.weigh(upper), 0.0)
        above = np.where(np.isfinite(lower), np.maximum(lower + self.step - c, 0.0), 0.0)
        below = np.where(np.isfinite(upper), np.maximum(c - upper, 0.0), 0.0)
        return c + (moved + self.hide(lower, upper) * (above - below)) / self.n


class _Pooled(NamedTuple):
    """A falling regression by its blocks."""

    value: Floats
    above: Floats
    weight: Floats

    def likelihood(self, value: Floats) -> float:
        """Return Σ above·log s + below·log(1 - s), of values s of the blocks."""
        below = np.maximum(self.weight - self.above, 0.0)
        return float((special.xlogy(self.above, value) + special.xlog1py(below, -value)).sum())


@dataclass(frozen=True, kw_only=True, eq=False)
class Survival:
    """Pr(Y > u) as a falling function of u: by how many of the anchors in each cell lie below the value of their row.

    Anchors that are not released count with their probability to lie in a cell, given the range.

    References
    ----------
    Ayer, Brunk, Ewing, Reid and Silverman (1955), for one anchor a row; Banerjee and Wellner,
    Likelihood ratio tests for monotone functions (2001), for `limit`.
    """

    anchors: Anchors
    bounds: Ends  # that no value lies outside of
    edges: Floats  # of the cells [e_k, e_{k+1})
    above: Floats  # of the anchors in each cell, how many lie below their row's value
    weight: Floats  # how many there are
    lower: Floats  # the released ranges
    upper: Floats
    share: Floats  # the regression, of each cell

    @classmethod
    def of_ranges(
        cls,
        anchors: Anchors,
        lower: Floats,
        upper: Floats,
        bounds: Ends | None = None,
        places: Sequence[float] | Floats = (),
    ) -> Survival:
        """Return the regression.

        Cells end at `places`, too.
        """
        edges = _cut(anchors, min(len(lower), _MOST_CELLS), bounds, places)
        counts = _count(anchors, lower, upper, edges)
        return cls.of_counts(anchors, bounds, edges, counts, (lower, upper))

    @classmethod
    def of_counts(
        cls,
        anchors: Anchors,
        bounds: Ends | None,
        edges: Floats,
        counts: Floats,
        rows: Pair = (_NONE, _NONE),
    ) -> Survival:
        """Return the regression of the anchors in cells.

        Limits need the released ranges, `rows`.
        """
        above, weight = counts
        return cls(
            anchors=anchors,
            bounds=bounds or (-math.inf, math.inf),
            edges=edges,
            above=above,
            weight=weight,
            lower=rows[0],
            upper=rows[1],
            share=np.interp(np.arange(len(weight)), *_fall_where_seen(above, weight)),
        )

    def scores(self, lower: Floats, upper: Floats, moment: Moment) -> Floats:
        """Return numbers whose average, given the rows' values, is that of φ of the values, where anchors reach its ends.

        Notes
        -----
        φ(y) = φ(l) + ∫ 1{y > u} dφ(u). An anchor u of density g tells (1{Y > u} - S(u)) φ'(u) / g(u),
        whose mean is that of φ(Y) - φ(l) - ∫ S dφ, whatever S: inverse probability weighting with a
        regression (Robins, Rotnitzky and Zhao, 1994). With S = Pr(Y > u) it varies least.
        """
        edges, share = self.edges, self.share
        phi = moment.at(edges)
        below = np.concatenate([[0.0], np.cumsum(share * np.diff(phi))])  # ∫ S dφ up to the edges

        def find_cell(x: Floats) -> Codes:
            found = np.searchsorted(edges, x, side="right") - 1
            return np.clip(found, 0, len(share) - 1).astype(np.int64)

        def integrate(x: Floats) -> Pair:
            x = np.clip(x, edges[0], edges[-1])
            cell, at = find_cell(x), moment.at(x)
            return at - phi[0], below[cell] + share[cell] * (at - phi[cell])

        told = self.anchors.weigh(lower, moment) * (1.0 - share[find_cell(lower)])
        told -= self.anchors.weigh(upper, moment) * share[find_cell(upper)]
        # those that are not released, at their mean
        all_under, under = integrate(lower + self.anchors.step)
        hidden = all_under - under - (below[-1] - integrate(upper)[1])
        told += self.anchors.hide(lower, upper) * hidden
        return phi[0] + below[-1] + told / self.anchors.n

    @cached_property
    def _ranks(self) -> tuple[Floats, float]:
        """How many anchors lie before the middle of each cell, and how many there are."""
        total = np.cumsum(self.weight)
        return total - self.weight / 2.0, float(total[-1])

    @cached_property
    def _most_likely(self) -> float:
        pooled = _pool(self.above, self.weight)
        return pooled.likelihood(pooled.value)

    def _find(self, place: float) -> int:
        """Return the cell behind an edge."""
        return int(np.searchsorted(self.edges, place))

    def at(self, place: float) -> float:
        """Return the regression at an edge: that of the cell behind it."""
        known = self._known(place)
        behind = self._find(place)
        return float(self.share[min(behind, len(self.share) - 1)]) if known is None else known[0]

    def _known(self, place: float) -> tuple[float] | None:
        """Return the share where the bounds tell it."""
        if place < self.bounds[0] or place >= self.bounds[1]:
            return (float(place < self.bounds[0]),)
        return None

    def limit(self, place: float, deviations: float, *, surely: bool = True) -> Ends:
        """Return the shares that the ranges do not rule out at an edge: by the likelihood ratio.

        With `surely` limits are wider where the limit law is far, by few events.

        Notes
        -----
        The regression under S(t) = s is that of the cells before t, at least s, and that behind it,
        at most s. Twice the logarithm of the ratio has a limit law without parameters, whose
        quantiles are 0.6 times those of a χ² with one degree of freedom, within 4 %.
        """
        if (known := self._known(place)) is not None:
            return known[0], known[0]
        found = []
        # as the share falls, its limit at one place is one for all behind, or before
        for at, end in zip(self._move_inwards(place), (0.0, 1.0), strict=True):
            ratio, most = self._ratio(at), self._threshold(at, deviations, surely=surely)
            # beyond all anchors what is possible
            start = float(np.append(self.share, [0.0, 0.0, 1.0])[self._find(at) - int(end)])
            start = min(max(start, 0.0), 1.0)
            for _ in range(_STEPS if ratio(end) > most else 0):
                middle = (start + end) / 2.0
                start, end = (middle, end) if ratio(middle) <= most else (start, middle)
            found.append(end)
        return found[0], found[1]

    def _beside_of(self, place: float) -> tuple[Flags, float]:
        """Return which cells are in the blocks at the sides of an edge, and the anchors on the rarer side of their values."""
        cell = self._find(place)
        beside = np.isin(self.share, self.share[max(cell - 1, 0) : cell + 1])
        above, n = float(self.above[beside].sum()), float(self.weight[beside].sum())
        return beside, max(min(above, n - above), 0.0)

    def _move_inwards(self, place: float) -> Ends:
        """Return the first place behind with enough anchors before it, for the lower limit, and the last one before with enough behind it, for the upper.

        At its ends a monotone regression is not consistent, so there the ratio has another law.
        """
        total = np.cumsum(self.weight)
        enough = _END * total[-1] ** (2.0 / 3.0)
        first, last = np.searchsorted(total, [enough, total[-1] - enough]) + 1
        size = len(self.edges) - 1
        low, high = float(self.edges[min(first, size)]), float(self.edges[min(last - 1, size)])
        return max(place, low), min(place, high)

    def _threshold(self, place: float, deviations: float, *, surely: bool = True) -> float:
        """Return how large a ratio may be: that of independent anchors by how much these vary; more by few events, to be sure."""
        beside, n_events = self._beside_of(place)
        middle, total = self._ranks
        cell = self._find(place)
        here = middle[min(cell, len(middle) - 1)]
        near = np.flatnonzero(beside | (np.abs(middle - here) <= _NEAR * total))
        scale = _CHERNOFF * self._vary(float(self.edges[near[0]]), float(self.edges[near[-1] + 1]))
        return (scale + (1.0 / (1.0 + n_events) if surely else 0.0)) * deviations**2

    def _vary(self, start: float, stop: float) -> float:
        """Return the variance of how many anchors in a stretch lie below their values, over that of as many independent ones.

        Those of a row depend on each other, and those that are not released on nothing but its range.
        """
        inside = slice(*np.searchsorted(self.edges, [start, stop]))
        weight, above = self.weight[inside].sum(), self.above[inside].sum()
        if not 0.0 < above < weight:
            return 1.0
        share = above / weight
        hidden, rank_low, rank_high = self._hidden
        first, last = self.anchors.distribution.cdf(np.array([start, stop]))
        under = hidden * np.clip(rank_low - first, 0.0, last - first)
        beyond = hidden * np.clip(last - rank_high, 0.0, last - first)
        under += (start <= self.lower) & (self.lower < stop)
        beyond += (start <= self.upper) & (self.upper < stop)
        moves = under * (1.0 - share) - beyond * share
        return float((moves**2).sum() / (weight * share * (1.0 - share)))

    @cached_property
    def _hidden(self) -> Triple:
        """How many anchors of each row are not released, over their probability, and the ranks below and above which they lie."""
        cdf = self.anchors.distribution.cdf
        hidden = self.anchors.hide(self.lower, self.upper)
        return hidden, cdf(self.lower + self.anchors.step), cdf(self.upper)

    def _spread(self, place: float) -> float:
        """Return the standard error at an edge; NaN where hardly any anchor tells the share."""
        low, high = self.limit(place, NORMAL_95, surely=False)
        untold = high - low > _UNTOLD and self._beside_of(place)[1] < _FEW_EVENTS
        return math.nan if untold else (high - low) / (2.0 * NORMAL_95)

    def _ratio(self, place: float) -> Callable[[float], float]:
        """Return twice the logarithm of the likelihood ratio against a share at an edge."""
        cell = self._find(place)
        before = _pool(self.above[:cell], self.weight[:cell])
        behind = _pool(self.above[cell:], self.weight[cell:])

        def find(share: float) -> float:
            likelihood = before.likelihood(np.maximum(before.value, share))
            likelihood += behind.likelihood(np.minimum(behind.value, share))
            return 2.0 * (self._most_likely - likelihood)

        return find

    def quantile(self, q: float) -> float:
        """Return the least edge with a cdf of at least q; without one, the upper bound or the last anchor."""
        falls = np.flatnonzero(self.share <= 1.0 - q + 1e-12)
        return float(self.edges[falls[0]]) if len(falls) else float(self.edges[-1])

    def find_quantile_ends(self, q: float, deviations: float, *, surely: bool = True) -> Ends:
        """Return the edges beyond which the ranges rule out a quantile."""
        centre = self._find(self.quantile(q))

        def is_possible(place: int) -> bool:
            edge = float(self.edges[place])
            most = self._threshold(edge, deviations, surely=surely)
            return self._ratio(edge)(1.0 - q) <= most

        # the further out, the less likely
        low, beyond = centre, -1
        while low - beyond > 1:
            middle = (low + beyond) // 2
            low, beyond = (middle, beyond) if is_possible(middle) else (low, middle)
        high, above = centre, len(self.edges)
        while above - high > 1:
            middle = (high + above) // 2
            high, above = (middle, above) if is_possible(middle) else (high, middle)
        return float(self.edges[max(beyond, 0)]), float(self.edges[min(above, len(self.edges) - 1)])

    def quantile_error(self, q: float) -> float:
        """Return the standard error of a quantile."""
        low, high = self.find_quantile_ends(q, NORMAL_95, surely=False)
        return (high - low) / (2.0 * NORMAL_95)

    def between(self, ends: Ends) -> tuple[float, float, Callable[[float], Ends]]:
        """Return Pr(a < Y ≤ b), its standard error, and its limits at a number of standard errors.

        Notes
        -----
        The regression at two places is independent if no block holds both, and then the distances
        of the limits add up in squares (Zou and Donner, Construction of confidence limits about
        effect measures, 2008). In one block its errors are alike, and the limits too wide. Where
        few anchors tell a share, it has no law, and the distances are added.
        """
        first, last = self.at(ends[0]), self.at(ends[1])
        found = max(first - last, 0.0)

        open_ends = [end for end in ends if self._known(end) is None]
        is_few = any(self._beside_of(end)[1] < _FEW_EVENTS for end in open_ends)
        add: Callable[[float, float], float] = operator.add if is_few else math.hypot

        def find_ends(deviations: float) -> Ends:
            (low_a, high_a), (low_b, high_b) = (self.limit(end, deviations) for end in ends)
            low = found - add(first - low_a, high_b - last)
            return max(low, 0.0), min(found + add(high_a - first, last - low_b), 1.0)

        return found, math.hypot(*map(self._spread, ends)), find_ends


def score(
    anchors: Anchors, lower: Floats, upper: Floats, bounds: Ends | None, moment: Moment
) -> Floats:
    """Return the scores of a moment, those of each fifth of the rows by the regression of the others.

    Notes
    -----
    So the regression knows nothing of the rows that it scores, and adds no bias (Chernozhukov et
    al., Double/debiased machine learning, 2018).
    """
    edges = _cut(anchors, min(len(lower), _CELLS_OF_SCORES), bounds, (moment.low, moment.high))
    found, fold = np.empty(len(lower)), np.arange(len(lower)) % _FOLDS
    counts = [_count(anchors, lower[fold == k], upper[fold == k], edges) for k in range(_FOLDS)]
    for k in range(_FOLDS):
        rest = np.sum(counts[:k] + counts[k + 1 :], axis=0)
        survival = Survival.of_counts(anchors, bounds, edges, rest)
        found[fold == k] = survival.scores(lower[fold == k], upper[fold == k], moment)
    return found


def average(
    anchors: Anchors, lower: Floats, upper: Floats, bounds: Ends | None, moment: Moment
) -> tuple[float, float, Callable[[float], Ends]]:
    """Return the mean of φ, its standard error, and its limits at a number of standard errors."""
    scores = score(anchors, lower, upper, bounds, moment)
    weights = anchors.weigh(np.concatenate([lower, upper]), moment)
    most = float(np.abs(weights).max(initial=0.0)) / anchors.n

    def find_ends(deviations: float) -> Ends:
        return _limit(scores, most, -deviations), _limit(scores, most, deviations)

    return float(scores.mean()), float(scores.std(ddof=1)) / math.sqrt(len(scores)), find_ends


def _cut(
    anchors: Anchors, size: int, bounds: Ends | None, places: Sequence[float] | Floats
) -> Floats:
    """Return the edges of cells: quantiles of the anchors, and what lies between the bounds of some places and the bounds themselves."""
    low, high = bounds or (-math.inf, math.inf)
    quantiles = anchors.distribution.ppf(np.linspace(0.0, 1.0, max(size, _FEWEST_CELLS) + 1))
    edges = np.concatenate([quantiles, places, [low, high]])
    edges = edges[np.isfinite(edges)]
    edges = np.unique(np.floor(edges) if anchors.step else edges)
    return edges[(edges >= low) & (edges <= high)]


def _count(anchors: Anchors, lower: Floats, upper: Floats, edges: Floats) -> Floats:
    """Return, for each cell, how many of its anchors lie below their row's value, and how many there are."""
    size = len(edges) - 1
    rank = anchors.distribution.cdf(edges)
    hidden = anchors.hide(lower, upper)

    def place(ends: Floats) -> Codes:
        return (np.searchsorted(edges, ends, side="right") - 1).astype(np.int64)

    def add(cells: Codes, weights: Floats | None = None) -> Floats:
        inside = (cells >= 0) & (cells < size)
        chosen = None if weights is None else weights[inside]
        return np.bincount(cells[inside], chosen, minlength=size).astype(float)

    def spread(ends: Floats) -> Floats:
        """Return the expected number below the ends of the anchors that are not released."""
        ends = np.clip(ends, edges[0], edges[-1])
        cells = np.clip(place(ends), 0, size - 1)
        whole = np.cumsum(np.bincount(cells, hidden, minlength=size)[::-1])[::-1]
        part = hidden * (anchors.distribution.cdf(ends) - rank[cells])
        part = np.bincount(cells, part, minlength=size)
        return np.append(whole[1:], 0.0) * np.diff(rank) + part

    above = spread(lower + anchors.step)
    below = hidden.sum() * np.diff(rank) - spread(upper)
    known = [add(place(end)) for end in (lower, upper)]
    above = known[0] + np.where(above > 0.0, above, 0.0)
    below = known[1] + np.where(below > 1e-12, below, 0.0)
    return np.array([above, above + below])


def _fall(above: Floats, weight: Floats) -> Floats:
    """Return the falling regression of above / weight."""
    return optimize.isotonic_regression(
        np.minimum(above / weight, 1.0), weights=weight, increasing=False
    ).x


def _fall_where_seen(above: Floats, weight: Floats) -> tuple[Codes, Floats]:
    """Return the cells that have anchors, and the regression there; 1/2 if there are none."""
    seen = np.flatnonzero(weight > 0.0)
    if not len(seen):
        return np.zeros(1, dtype=np.int64), np.full(1, 0.5)
    return seen, _fall(above[seen], weight[seen])


def _pool(above: Floats, weight: Floats) -> _Pooled:
    seen = weight > 0.0
    if not seen.any():
        return _Pooled(*(np.zeros(0),) * 3)
    above, weight = above[seen], weight[seen]
    value = _fall(above, weight)
    start = np.flatnonzero(np.diff(value, prepend=2.0))
    return _Pooled(value[start], np.add.reduceat(above, start), np.add.reduceat(weight, start))


def _limit(values: Floats, most: float, deviations: float) -> float:
    """Return the limit of a mean, moved by their skewness; `most` is the largest value that one may have.

    References
    ----------
    Johnson, Modified t tests and confidence intervals for asymmetrical populations (1978).
    """
    n, mean = len(values), float(values.mean())
    centred = values - mean
    variance = float(np.mean(centred**2))
    moved = 0.0
    if variance > 0.0:
        moved = float(np.mean(centred**3)) / variance * (1.0 + 2.0 * deviations**2) / (6.0 * n)
    variance = max(variance, _FEW_EVENTS * most**2 / n)
    return mean + moved + deviations * math.sqrt(variance / n)


def slopes(
    response: Floats, features: Floats, squares: Mapping[int, Floats]
) -> tuple[Floats, Floats | None]:
    """Return the slopes of least squares and their standard errors, the sandwich's; None of the latter if a few rows decide.

    Features, of shape (rows, features), may be scores; `squares` has, for each of those, the
    scores of its squared distance from their mean.

    Notes
    -----
    Scores of two columns are independent given the values, so their product has the values'
    average; that of a score with itself has not, and the score of the square takes its place: the
    attenuation by an error in a feature is gone (Fuller, Measurement error models, 1987).

    References
    ----------
    White, A heteroskedasticity-consistent covariance matrix estimator (1980).
    """
    n, p = features.shape
    centred = features - features.mean(axis=0)
    y = response - response.mean()
    own = np.array([squares.get(j, centred[:, j] ** 2) for j in range(p)]).T
    moments = centred.T @ centred / n
    np.fill_diagonal(moments, own.mean(axis=0))
    inverse = np.linalg.pinv(moments)
    beta = inverse @ (centred.T @ y) / n
    # a row's own normal equations
    left = centred * (y - centred @ beta)[:, None] + (centred**2 - own) * beta
    influence = left @ inverse
    total = (influence**2).sum(axis=0)
    error = np.sqrt(total / (n * (n - p - 1.0)))
    heavy = ((influence**2).max(axis=0) > _HEAVY * total).any()
    known = [own[:, j].mean() > _CLEAR * own[:, j].std() / math.sqrt(n) for j in squares]
    return beta, error if all(known) and not heavy else None
