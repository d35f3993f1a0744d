"""Interval privacy: each value becomes a random range that contains it, and nothing else about it is released."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dpdask.errors import DataError
from dpdask.kernels import ranges as kernel
from dpdask.kernels.ranges import Acceptable, Quantiles, Steps
from dpdask.streams import Rng, words

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Words = NDArray[np.uint64]

MECHANISM_ID = "interval"
_CHUNK = 2**13  # rows at a time: their words and anchors stay in the cache


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ranges:
    """What is released of a column.

    Attributes
    ----------
    lower, upper
        float64 arrays of shape (n,). lower < upper: the range (lower, upper], open-ended at -inf and inf. lower == upper:
        the exact value. lower > upper: a ring's outer range, (-inf, upper] and (lower, inf) together. NaN where null.
    is_null
        bool array of shape (n,).
    """

    lower: Floats
    upper: Floats
    is_null: Bools


class Step(Protocol):
    """How numbers become ranges: a pure function of the numbers and as many uniform words as it says."""

    @property
    def words_per_row(self) -> int:
        """How many words a row consumes, whatever its value."""
        ...

    def ranges(self, values: Floats, words: Words) -> tuple[Floats, Floats]:
        """Return the lower and upper ends (float64, shape (n,)) for values (float64, (n,)) and words (uint64, (n, words_per_row)).

        Parameters
        ----------
        values
            float64 of shape (n,).
        words
            Random words, uint64 of shape (n, words_per_row).
        """
        ...


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
        """Return the perturbed values.

        Parameters
        ----------
        values
            float64 of shape (n,).
        words
            Random words, uint64 of shape (n, words_per_row).
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Partition:
    """Random anchors cut the line into ranges, and the range of the value is released.

    Attributes
    ----------
    distribution
        The distribution of an anchor less its centre, as the table that is drawn from.
    centres
        float64 array of shape (n_anchors,).
    acceptable
        Where the exact value is released.
    spacing
        0, or how far apart the anchors are at least, in probability of the distribution.
    ring
        Whether the two outer ranges are one.
    lattice
        Whether values are whole numbers.

    References
    ----------
    Ding and Ding, Interval privacy, Definitions 2 and 4, Theorem 3, Example 3.
    """

    distribution: Quantiles
    centres: Floats
    acceptable: Acceptable
    spacing: float = 0.0
    ring: bool = False
    lattice: bool = False

    @property
    def words_per_row(self) -> int:
        """One word an anchor."""
        return len(self.centres)

    def ranges(self, values: Floats, words: Words) -> tuple[Floats, Floats]:
        """Return the range between the row's anchors in which each value lies; see `Step.ranges`."""
        return kernel.partition(
            values, words, self.distribution, self.centres, self.acceptable, spacing=self.spacing, ring=self.ring, lattice=self.lattice
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Narrowing:
    """Rounds of halving by random anchors, until the coverage would fall below a row's tau.

    Attributes
    ----------
    distribution
        The distribution of the anchors.
    tau
        The distribution of a row's tau.
    cdf
        The public reference, with its doubt.
    rounds
        At most how many.
    either
        Whether either of the next ranges stops a row, or only its own.
    lattice
        Whether values are whole numbers.

    References
    ----------
    Ding and Ding, Interval privacy, Example 4 and Remark 1.
    """

    distribution: Quantiles
    tau: Quantiles
    cdf: Steps
    rounds: int
    either: bool
    lattice: bool = False

    @property
    def words_per_row(self) -> int:
        """One word for tau and one a round."""
        return 1 + self.rounds

    def ranges(self, values: Floats, words: Words) -> tuple[Floats, Floats]:
        """Return the range to which each value is narrowed down; see `Step.ranges`."""
        return kernel.narrow(values, words, self.distribution, self.tau, self.cdf, either=self.either, lattice=self.lattice)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Selection:
    """Another step's range, released only if it is wide enough and a coin says so; (-inf, inf) otherwise.

    Attributes
    ----------
    step
        The other.
    cdf
        The public reference, with its doubt: a range that may be too narrow is not released.
    tau, rho
        The least coverage, and the coin's probability.

    References
    ----------
    Ding and Ding, Interval privacy, Definition 5 and Proposition 2.
    """

    step: Partition
    cdf: Steps
    tau: float
    rho: float

    @property
    def words_per_row(self) -> int:
        """The other's, and one for the coin."""
        return self.step.words_per_row + 1

    def is_wide(self, lower: Floats, upper: Floats) -> Bools:
        """Return where a range certainly has a coverage of at least tau.

        Parameters
        ----------
        lower, upper
            The ends of the ranges, float64 of shape (n,).
        """
        wide: Bools = kernel.at_least(lower, upper, self.cdf) - self._accept(lower, upper) >= self.tau
        return wide

    def ranges(self, values: Floats, words: Words) -> tuple[Floats, Floats]:
        """Return the range of each value that is released, and the whole line for the others; see `Step.ranges`."""
        lower, upper = self.step.ranges(values, np.ascontiguousarray(words[:, :-1]))
        heads = (words[:, -1] >> np.uint64(11)).astype(np.float64) * 2.0**-53 < self.rho
        shown = heads & self.is_wide(lower, upper)
        return np.where(shown, lower, -np.inf), np.where(shown, upper, np.inf)

    def _accept(self, lower: Floats, upper: Floats) -> Floats:
        """Return an upper bound on the probability of the acceptable intervals inside each range: its reader takes them out."""
        total = np.zeros(len(lower))
        for low, high in zip(self.step.acceptable.low.tolist(), self.step.acceptable.high.tolist(), strict=True):
            first, last = np.maximum(lower, low), np.minimum(upper, high)
            top = self.cdf.high[np.searchsorted(self.cdf.x, last)]
            bottom = np.where(np.isneginf(first), 0.0, self.cdf.low[np.searchsorted(self.cdf.x, first)])
            total += np.where(first < last, top - bottom, 0.0)
        return total


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Union:
    """Several independent partitions of one column, released together.

    Attributes
    ----------
    steps
        None of them a ring.

    References
    ----------
    Ding and Ding, Interval privacy, Definition 3 and Theorem 4: leakages add at most.
    """

    steps: Sequence[Partition]

    @property
    def words_per_row(self) -> int:
        """The sum of the steps'."""
        return sum(step.words_per_row for step in self.steps)

    def ranges(self, values: Floats, words: Words) -> tuple[Floats, Floats]:
        """Return the intersection of the steps' ranges; exact where one of them is. See `Step.ranges`."""
        ends = np.cumsum([step.words_per_row for step in self.steps])
        parts = [step.ranges(values, np.ascontiguousarray(part)) for step, part in zip(self.steps, np.split(words, ends[:-1], axis=1), strict=True)]
        found = parts[0]
        for part in parts[1:]:
            found = kernel.intersect(found, part)
        return found


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Perturbed:
    """A local randomiser, then the range of its output: the range need not contain the value.

    Attributes
    ----------
    perturbation
        The randomiser.
    step
        The range.

    Privacy
    -------
    The range is post-processing of the randomiser's output, so p(z | y₁) <= exp(α) p(z | y₂) for all y₁, y₂, with α the
    randomiser's ε: by Bayes' rule (32) holds on the whole line, and the mechanism is (1, α)-interval-differential; the
    coverage of the released range only describes what is known of the perturbed value. Unit: a value. Adjacency:
    replace-one. Anchors look at no value, and a range, or an exact value of the acceptable set, is a function of them and of
    the perturbed value, so neither costs more. Event: one local release of every row, of the sum of its columns' α.

    References
    ----------
    Ding and Ding, Interval privacy, Definition 7. The text below it exchanges two cases: τ = 1 is local differential
    privacy, α = 0 is interval privacy.
    """

    perturbation: Perturbation
    step: Partition

    @property
    def words_per_row(self) -> int:
        """The randomiser's, then the range's."""
        return self.perturbation.words_per_row + self.step.words_per_row

    def ranges(self, values: Floats, words: Words) -> tuple[Floats, Floats]:
        """Return the range of each perturbed value; see `Step.ranges`."""
        cut = self.perturbation.words_per_row
        perturbed = self.perturbation.perturb(values, np.ascontiguousarray(words[:, :cut]))
        return self.step.ranges(perturbed, np.ascontiguousarray(words[:, cut:]))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RangeRandomiser:
    """What turns the values of a column into random ranges.

    Attributes
    ----------
    column
        The column's name.
    step
        How its values become ranges.
    nulls
        Whether it may hold nulls; which values are missing is then public.

    Privacy
    -------
    Unit: a value. Interval privacy (Definition 1): given the released range, a value is distributed as it was before,
    restricted to the range. There is no ε, and neither notion implies the other (Proposition 3). A value that is released
    again is narrowed further: the leakages add up (Theorem 4). For a `Perturbed` step this holds for the perturbed value;
    the value itself has the randomiser's ε, which adds up over releases.

    References
    ----------
    Ding and Ding, Interval privacy: a framework for privacy-preserving data collection.
    """

    column: str
    step: Step
    nulls: bool = False

    def randomise(self, values: Floats, is_null: Bools, rng: Rng) -> Ranges:
        """Return a range for each value; consumes `step.words_per_row` words a row, nulls included.

        Parameters
        ----------
        values
            float64 array of shape (n,), finite; not looked at where null.
        is_null
            bool array of shape (n,).
        rng
            From `streams`; advanced by the rows.

        Returns
        -------
        Ranges
            The ranges of n rows. They depend on the arguments alone, not on how the rows are divided into calls.

        Raises
        ------
        DataError
            On NaN, an infinity, or a null where the design does not declare nulls public.
        """
        where = f"column {self.column!r}"
        has_nulls = bool(is_null.any())
        if has_nulls and not self.nulls:
            raise DataError("holds a null", where, "declare `nulls: public` in the design if it is public which values are missing, or fill it")
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
