"""Interval privacy: each value becomes a random range that contains it, and nothing else about it is released."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

import numpy as np

from dpdask.arrays import Flags, Floats, Words, freeze_class
from dpdask.errors import DataError, SpecError
from dpdask.kernels import ranges as kernel
from dpdask.kernels.ranges import LEVELS, Acceptable, Quantiles, Steps
from dpdask.mechanisms.interval.design import ScipyDistribution
from dpdask.streams import Rng, words

Interval = tuple[float, float]

_CHUNK = 2**13  # rows at a time: their words and anchors stay in the cache


@freeze_class(eq=False)
class Ranges:
    """What is released of a column."""

    # Float64 arrays of shape (n,). lower < upper: the range (lower, upper], open-ended at -inf and
    # inf. lower == upper: the exact value. lower > upper: a ring's outer range, (-inf, upper] and
    # (lower, inf) together. NaN where null.
    lower: Floats
    upper: Floats
    is_null: Flags


class Perturbation(Protocol):
    """A local randomiser of one column, for instance DIP's, in the column's numbers."""

    @property
    def words_per_row(self) -> int:
        """How many words a row consumes."""
        ...

    @property
    def epsilon(self) -> float:
        """An upper bound on its local ε."""
        ...

    def perturb(self, values: Floats, words: Words) -> Floats:
        """Return the perturbed values."""
        ...


@freeze_class(eq=False)
class Partition:
    """Random anchors cut the line into ranges, and the range of the value is released.

    References
    ----------
    Ding and Ding, Interval privacy, Definitions 2 and 4, Theorem 3, Example 3.
    """

    # The distribution of an anchor less its centre, as the table that is drawn from.
    distribution: Quantiles
    centres: Floats
    acceptable: Acceptable
    # 0, or how far apart the anchors are at least, in probability of the distribution.
    spacing: float = 0.0
    ring: bool = False  # whether the two outer ranges are one
    lattice: bool = False

    @property
    def parts(self) -> Sequence[Cut]:
        """Itself."""
        return (self,)

    @property
    def accepted(self) -> list[Interval]:
        """The intervals whose values are told exactly."""
        return list(zip(self.acceptable.low.tolist(), self.acceptable.high.tolist(), strict=True))

    def reaches(self, low: float, high: float) -> bool:
        """Return whether an anchor may fall between two values, or one of them be told exactly."""
        first = self.distribution.x[0] + self.centres
        last = self.distribution.x[-1] + self.centres
        told = len(self.acceptable.low) > 0 or bool(self.acceptable.ranges.any())
        return told or bool(((first < high) & (last > low)).any())

    @property
    def words_per_row(self) -> int:
        """One word an anchor."""
        return len(self.centres)

    def ranges(self, values: Floats, words: Words) -> tuple[Floats, Floats]:
        """Return the range between the row's anchors in which each value lies; see `Step`."""
        return kernel.partition(
            values,
            words,
            self.distribution,
            self.centres,
            self.acceptable,
            spacing=self.spacing,
            ring=self.ring,
            lattice=self.lattice,
        )


@freeze_class(eq=False)
class Narrowing:
    """Rounds of halving by random anchors, until the coverage would fall below a row's tau.

    References
    ----------
    Ding and Ding, Interval privacy, Example 4 and Remark 1.
    """

    distribution: Quantiles
    tau: Quantiles
    cdf: Steps
    rounds: int
    either: bool  # whether either of the next ranges stops a row, or only its own
    lattice: bool = False

    accepted: ClassVar[Sequence[Interval]] = ()

    @property
    def parts(self) -> Sequence[Cut]:
        """Itself."""
        return (self,)

    def reaches(self, low: float, high: float) -> bool:
        """Return whether an anchor may fall between two values."""
        return bool(self.distribution.x[0] < high and self.distribution.x[-1] > low)

    @property
    def words_per_row(self) -> int:
        """One word for tau and one a round."""
        return 1 + self.rounds

    def ranges(self, values: Floats, words: Words) -> tuple[Floats, Floats]:
        """Return the range to which each value is narrowed down; see `Step`."""
        return kernel.narrow(
            values,
            words,
            self.distribution,
            self.tau,
            self.cdf,
            either=self.either,
            lattice=self.lattice,
        )


Cut = Partition | Narrowing


@freeze_class(eq=False)
class Selection:
    """Another step's range, released only if it is wide enough and a coin says so; (-inf, inf) otherwise.

    References
    ----------
    Ding and Ding, Interval privacy, Definition 5 and Proposition 2.
    """

    step: Partition
    # The public reference, with its doubt: a range that may be too narrow is not released.
    cdf: Steps
    tau: float  # the least coverage, and the coin's probability
    rho: float

    @property
    def parts(self) -> Sequence[Cut]:
        """The other."""
        return (self.step,)

    @property
    def words_per_row(self) -> int:
        """The other's, and one for the coin."""
        return self.step.words_per_row + 1

    def is_wide(self, lower: Floats, upper: Floats) -> Flags:
        """Return where a range certainly has a coverage of at least tau."""
        return kernel.at_least(lower, upper, self.cdf) - self._accept(lower, upper) >= self.tau

    def ranges(self, values: Floats, words: Words) -> tuple[Floats, Floats]:
        """Return the range of each value that is released, and the whole line for the others; see `Step`."""
        lower, upper = self.step.ranges(values, np.ascontiguousarray(words[:, :-1]))
        heads = (words[:, -1] >> np.uint64(11)).astype(np.float64) * 2.0**-53 < self.rho
        shown = heads & self.is_wide(lower, upper)
        return np.where(shown, lower, -np.inf), np.where(shown, upper, np.inf)

    def _accept(self, lower: Floats, upper: Floats) -> Floats:
        """Return an upper bound on the probability of the acceptable intervals inside each range: its reader takes them out."""
        total = np.zeros(len(lower))
        for low, high in self.step.accepted:
            first, last = np.maximum(lower, low), np.minimum(upper, high)
            top = self.cdf.high[np.searchsorted(self.cdf.x, last)]
            bottom = np.where(
                np.isneginf(first), 0.0, self.cdf.low[np.searchsorted(self.cdf.x, first)]
            )
            total += np.where(first < last, top - bottom, 0.0)
        return total


@freeze_class(eq=False)
class Union:
    """Several independent partitions of one column, released together.

    References
    ----------
    Ding and Ding, Interval privacy, Definition 3 and Theorem 4: leakages add at most.
    """

    steps: Sequence[Partition]

    @property
    def parts(self) -> Sequence[Cut]:
        """Its steps."""
        return self.steps

    @property
    def words_per_row(self) -> int:
        """The sum of the steps'."""
        return sum(step.words_per_row for step in self.steps)

    def ranges(self, values: Floats, words: Words) -> tuple[Floats, Floats]:
        """Return the intersection of the steps' ranges; exact where one of them is. See `Step`."""
        ends = np.cumsum([step.words_per_row for step in self.steps])
        parts = [
            step.ranges(values, np.ascontiguousarray(part))
            for step, part in zip(self.steps, np.split(words, ends[:-1], axis=1), strict=True)
        ]
        found = parts[0]
        for part in parts[1:]:
            found = kernel.intersect(found, part)
        return found


@freeze_class(eq=False)
class Perturbed:
    """A local randomiser, then the range of its output: the range need not contain the value.

    Privacy
    -------
    The range is post-processing of the randomiser's output, so p(z | y₁) <= exp(α) p(z | y₂) for
    all y₁, y₂, with α the randomiser's ε: by Bayes' rule (32) holds on the whole line, and the
    mechanism is (1, α)-interval-differential; the coverage of the released range only describes
    what is known of the perturbed value. Unit: a value. Adjacency: replace-one. Anchors look at no
    value, and a range, or an exact value of the acceptable set, is a function of them and of the
    perturbed value, so neither costs more. Event: one local release of every row, of the sum of its
    columns' α.

    References
    ----------
    Ding and Ding, Interval privacy, Definition 7. The text below it exchanges two cases: τ = 1 is
    local differential privacy, α = 0 is interval privacy.
    """

    perturbation: Perturbation
    step: Partition

    @property
    def parts(self) -> Sequence[Cut]:
        """What cuts the line of perturbed values."""
        return (self.step,)

    @property
    def words_per_row(self) -> int:
        """The randomiser's, then the range's."""
        return self.perturbation.words_per_row + self.step.words_per_row

    def ranges(self, values: Floats, words: Words) -> tuple[Floats, Floats]:
        """Return the range of each perturbed value; see `Step`."""
        cut = self.perturbation.words_per_row
        perturbed = self.perturbation.perturb(values, np.ascontiguousarray(words[:, :cut]))
        return self.step.ranges(perturbed, np.ascontiguousarray(words[:, cut:]))


Step = Partition | Narrowing | Selection | Union | Perturbed
"""How numbers become ranges, a pure function of them and of uniform words: `words_per_row` of them for each row, whatever its value.

`ranges` takes values (float64, shape (n,)) and words (uint64, shape (n, words_per_row)), and returns
the lower and upper ends (float64, shape (n,)). `parts` cut the line.
"""


@freeze_class(eq=False)
class RangeRandomiser:
    """What turns the values of a column into random ranges.

    Privacy
    -------
    Unit: a value. Interval privacy (Definition 1): given the released range, a value is distributed
    as it was before, restricted to the range. There is no ε, and neither notion implies the other
    (Proposition 3). A value that is released again is narrowed further: the leakages add up
    (Theorem 4). For a `Perturbed` step this holds for the perturbed value; the value itself has the
    randomiser's ε, which adds up over releases.

    References
    ----------
    Ding and Ding, Interval privacy: a framework for privacy-preserving data collection.
    """

    column: str
    step: Step
    nulls: bool = False  # whether it may hold nulls; which values are missing is then public

    @property
    def accepted(self) -> list[Interval]:
        """The intervals whose values are told exactly, which may overlap."""
        return [each for part in self.step.parts for each in part.accepted]

    def freeze(self, reference: ScipyDistribution) -> PublicReference:
        """Return a public distribution of the column's values."""
        lattice = any(part.lattice for part in self.step.parts)
        return _freeze(reference, lattice, f"reference of column {self.column!r}")

    def randomise(self, values: Floats, is_null: Flags, rng: Rng) -> Ranges:
        """Return a range for each value; consumes `step.words_per_row` words a row, nulls included.

        Parameters
        ----------
        values
            float64 array of shape (n,), finite; not looked at where null.

        Returns
        -------
        Ranges
            The ranges of n rows. They depend on the arguments alone, not on how the rows are
            divided into calls.
        """
        where = f"column {self.column!r}"
        has_nulls = bool(is_null.any())
        if has_nulls and not self.nulls:
            mend = "declare `nulls: public` in the design if it is public which values are missing"
            raise DataError("holds a null", where, f"{mend}, or fill it")
        known = np.where(is_null, 0.0, values) if has_nulls else values
        if not np.isfinite(known).all():
            raise DataError("holds NaN or an infinity", where, "store a missing value as null")
        lower, upper = np.empty(len(values)), np.empty(len(values))
        for start in range(0, len(values), _CHUNK):
            part = slice(start, min(start + _CHUNK, len(values)))
            drawn = words(rng, part.stop - start, self.step.words_per_row)
            lower[part], upper[part] = self.step.ranges(known[part], drawn)
        if has_nulls:
            lower[is_null] = upper[is_null] = np.nan
        return Ranges(lower=lower, upper=upper, is_null=is_null.copy())


_LARGEST = 2.0**1000
_MAX_POINTS = 2**20
_N_DRAWS = 2**16
_N_PAIRS = 2**18


@freeze_class(eq=False)
class PublicReference:
    """A public distribution of the values, in whole numbers where the column's are."""

    distribution: Any
    # Whether values are whole numbers; a continuous distribution then stands for its rounded
    # values.
    lattice: bool
    where: str

    @property
    def is_discrete(self) -> bool:
        """Whether scipy calls the distribution discrete."""
        return hasattr(self.distribution, "pmf")

    def cdf(self, u: Floats) -> Floats:
        """Return Pr(Y <= u)."""
        at = np.floor(u) + 0.5 if self.lattice and not self.is_discrete else u
        return np.asarray(self.distribution.cdf(at), dtype=np.float64)

    def quantile(self, p: Floats) -> Floats:
        """Return the smallest y with Pr(Y <= y) >= p."""
        found = np.asarray(self.distribution.ppf(p), dtype=np.float64)
        return np.ceil(found - 0.5) if self.lattice and not self.is_discrete else found

    def steps(self) -> Steps:
        """Return bounds on the cdf: exact for a discrete distribution, within `TABLE_ERROR` for a continuous one."""
        if not self.is_discrete:
            x = table(self.distribution, self.where, short=False).x - (0.5 if self.lattice else 0.0)
            return Steps(x, np.concatenate([[0.0], LEVELS]), np.concatenate([LEVELS, [1.0]]))
        first, last = (
            float(self.distribution.ppf(LEVELS[0])),
            float(self.distribution.isf(1.0 - LEVELS[-1])),
        )
        if not last - first < _MAX_POINTS:
            raise SpecError(
                "a discrete reference has too many values", self.where, "use a continuous one"
            )
        points = np.arange(first, last + 1.0)
        cumulative = np.concatenate(
            [[0.0], np.asarray(self.distribution.cdf(points), dtype=np.float64)]
        )
        # F jumps at a point: the point itself lies above
        return Steps(np.nextafter(points, -np.inf), cumulative, cumulative)


def table(distribution: Any, where: str, *, short: bool = True) -> Quantiles:
    """Return the quantiles of a continuous scipy distribution: the tabulated cdf is within `TABLE_ERROR` of it, and equal at the knots.

    Parameters
    ----------
    short
        Whether a uniform distribution may be two knots, which is quick and exact.
    """
    if short and distribution.dist.name == "uniform":
        x = np.array(distribution.support(), dtype=np.float64)
        levels = np.array([0.0, 1.0])
    else:
        low = LEVELS < 0.5
        with np.errstate(over="ignore", divide="ignore"):  # what is not finite is refused below
            x = np.concatenate(
                [distribution.ppf(LEVELS[low]), distribution.isf(1.0 - LEVELS[~low])]
            )
        levels = LEVELS
    if not (np.abs(x) <= _LARGEST).all():
        raise SpecError(
            "the distribution's tails are too wide to be tabulated",
            where,
            "choose another distribution, or a smaller scale",
        )
    return Quantiles(np.maximum.accumulate(x), levels)


def coverages(
    ranges: Ranges,
    reference: ScipyDistribution,
    *,
    acceptable: Sequence[Interval] = (),
    lattice: bool = False,
) -> Floats:
    """Return the individual coverage L(S) of each released range: its probability under a public reference.

    Parameters
    ----------
    acceptable
        The intervals of the design's acceptable set, which may overlap: what is told as a range is
        known to lie outside them.

    References
    ----------
    Ding and Ding, Interval privacy, Implication 3 of Definition 1.
    """
    return _measure(ranges, _freeze(reference, lattice, "reference"), acceptable)


def _freeze(reference: ScipyDistribution, lattice: bool, where: str) -> PublicReference:
    distribution = reference.freeze(where, discrete=True)
    return PublicReference(distribution=distribution, lattice=lattice, where=where)


def compute_released_coverages(
    mechanism: RangeRandomiser, ranges: Ranges, reference: ScipyDistribution
) -> Floats:
    """Return the individual coverage of each range that a mechanism released, as `coverages` does: a function of ranges and designs alone.

    Parameters
    ----------
    mechanism
        Its acceptable set, and whether its values are whole numbers, are public.
    ranges
        The released ranges. The coverage of a perturbed column is that of the perturbed value.
    """
    return _measure(ranges, mechanism.freeze(reference), mechanism.accepted)


def coverage(mechanism: RangeRandomiser, reference: ScipyDistribution) -> float:
    """Return the expected coverage τ(M) of a mechanism under a public reference; its leakage is 1 - τ(M).

    Parameters
    ----------
    reference
        The distribution of the values; a discrete one is best for whole numbers.

    Notes
    -----
    Σᵢ F(Rᵢ)² is the probability that two independent values share a range, so τ(M) = E q(Y, Y'),
    where q(y, y') is the probability that no anchor falls in [y, y') and none of the two is told
    exactly: a product of the anchors' own probabilities, and for an ensemble the product over its
    members. What cannot be written so (spaced anchors, progressive, selective) is run on 2**16
    points of a low-discrepancy sequence instead of values and words.

    References
    ----------
    Ding and Ding, Interval privacy, Definition 1. Roberts, The unreasonable effectiveness of
    quasirandom sequences (2018).
    """
    return step_coverage(mechanism.step, mechanism.freeze(reference))


def step_coverage(step: Step, public: PublicReference) -> float:
    """Return the expected coverage of a step under a public reference; of a perturbed one, that of its range."""
    if isinstance(step, Perturbed):
        return step_coverage(step.step, public)
    parts = [part for part in step.parts if isinstance(part, Partition)]
    joint = isinstance(step, Partition | Union) and not any(part.spacing > 0 for part in parts)
    if not joint:
        lower, upper = quasi_run(step, public)
        ranges = Ranges(lower=lower, upper=upper, is_null=np.zeros(len(lower), dtype=np.bool_))
        accepted = [each for part in parts for each in part.accepted]
        return float(_measure(ranges, public, accepted).mean())
    most = max(part.words_per_row for part in parts)
    n = int(np.sqrt(_N_PAIRS / max(1, most // 2)))
    points = public.quantile((np.arange(n) + 0.5) / n)
    shared = np.ones((n, n))
    for part in parts:
        shared *= _join_steps(part, points)
    return float(shared.mean())


def quasi_run(step: Step, public: PublicReference) -> tuple[Floats, Floats]:
    """Return the ranges of 2**16 values that fill the reference evenly, as words fill their cube."""
    n_dimensions = 1 + step.words_per_row
    root = 2.0
    for _ in range(64):  # x**(d + 1) = x + 1 has one positive root, at a contracting fixed point
        root = (1.0 + root) ** (1.0 / (n_dimensions + 1))
    offsets = (
        np.arange(1, _N_DRAWS + 1)[:, None] * root ** -np.arange(1.0, n_dimensions + 1)
    ) % 1.0
    values = public.quantile(np.clip(offsets[:, 0], 2.0**-40, 1.0 - 2.0**-40))
    drawn = (offsets[:, 1:] * 2.0**53).astype(np.uint64) << np.uint64(11)
    return step.ranges(values, np.ascontiguousarray(drawn))


def _join_steps(step: Partition, points: Floats) -> Floats:
    """Return for each two of increasing points the probability that they share a range and neither is told exactly.

    After the first i anchors, `shared[j]` is the probability that none of them lies between and j
    lie below both.
    """
    n = len(points)
    shared = [np.ones((n, n))]
    across = np.ones((n, n))  # that all of them lie between
    for centre in step.centres.tolist():
        below = np.interp(
            points - centre, step.distribution.x, step.distribution.p, left=0.0, right=1.0
        )
        low, high = np.minimum(below, below[:, None]), np.maximum(below, below[:, None])
        nothing = [np.zeros((n, n))]
        shared = [
            under * low + same * (1.0 - high)
            for under, same in zip(nothing + shared, shared + nothing, strict=True)
        ]
        across *= high - low
    exact = step.acceptable.ranges
    total = sum(
        (part for part, told in zip(shared, exact.tolist(), strict=True) if not told),
        np.zeros((n, n)),
    )
    if step.ring:
        total += across
    told = np.zeros(n, dtype=np.bool_)
    for low_end, high_end in step.accepted:
        told |= (low_end < points) & (points <= high_end)
    total[told] = 0.0
    total[:, told] = 0.0
    return np.asarray(total, dtype=np.float64)


def _measure(ranges: Ranges, public: PublicReference, accepted: Sequence[Interval]) -> Floats:
    """Return the probability of each range without the accepted intervals.

    Of an exact value 0, of a null NaN.
    """
    apart: list[Interval] = []  # the union of the intervals
    for low, high in sorted(accepted):
        if apart and low <= apart[-1][1]:
            apart[-1] = (apart[-1][0], max(high, apart[-1][1]))
        else:
            apart.append((low, high))
    lower, upper = ranges.lower, ranges.upper
    inside = public.cdf(upper) - public.cdf(lower) + (lower > upper)
    for low, high in apart:
        overlap = public.cdf(np.minimum(upper, high)) - public.cdf(np.maximum(lower, low))
        inside -= np.maximum(overlap, 0.0)
    measured = np.where(lower == upper, 0.0, np.clip(inside, 0.0, 1.0))
    measured[ranges.is_null] = np.nan
    return measured
