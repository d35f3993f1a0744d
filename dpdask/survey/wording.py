"""Questions about a column, in words and numbers that a person can answer."""

from __future__ import annotations

import datetime as dt
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from dpdask.documents import Document
from dpdask.mechanisms.interval.ranges import Narrowing, Partition

Floats = NDArray[np.float64]

_EPOCH = dt.date(1970, 1, 1).toordinal()


class Wording(Document):
    """How people are asked for a column.

    Attributes
    ----------
    of
        What is asked for, as a noun phrase: "your yearly income before tax".
    unit
        What its numbers count: "euro". Empty for dates.
    decimals
        To how many decimals anchors are rounded down, before anybody is asked; a range ends at the number that was
        shown, and the card states no coverage, which is that of anchors as drawn. None: as drawn, with all their digits.
        Columns of whole numbers and of dates have whole anchors anyway.
    """

    of: str = Field(min_length=1)
    unit: str = ""
    decimals: int | None = Field(default=None, ge=0, le=9)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Asked:
    """A column of a survey.

    Attributes
    ----------
    name
        The column's.
    wording
        In words.
    step
        How its range is found; a partition is asked at once, a narrowing round by round.
    is_date
        Whether its numbers are days since 1970.
    bounds
        The public closed range of its values, infinite where none is declared.
    levels
        float64 array, increasing: all values of a discrete column; empty for others.
    """

    name: str
    wording: Wording
    step: Partition | Narrowing
    is_date: bool
    bounds: tuple[float, float]
    levels: Floats

    @property
    def decimals(self) -> int | None:
        """How many decimals an anchor has; None for all of float64."""
        return 0 if self.step.lattice else self.wording.decimals

    @property
    def is_coarser(self) -> bool:
        """Whether anchors are shown with fewer digits than the mechanism draws."""
        return self.wording.decimals is not None and not self.step.lattice

    def round_anchors(self, anchors: Floats) -> Floats:
        """Return anchors rounded down as they are shown; -0 becomes 0."""
        if self.decimals is None:
            return anchors
        scale = 10.0**self.decimals
        return np.floor(anchors * scale) / scale + 0.0

    def is_shown(self, ends: Floats) -> NDArray[np.bool_]:
        """Return which finite ends have no more decimals than anchors are shown with."""
        if self.decimals is None:
            return np.ones(len(ends), dtype=np.bool_)
        scale = 10.0**self.decimals
        with np.errstate(over="ignore"):  # to infinity, which no finite end is
            shown: NDArray[np.bool_] = np.rint(ends * scale) / scale == ends
        return shown

    def is_value(self, x: float) -> bool:
        """Return whether a number is a value that the schema declares."""
        if len(self.levels):
            return x in self.levels
        return math.isfinite(x) and self.bounds[0] <= x <= self.bounds[1] and (not self.step.lattice or x == math.floor(x))

    def has_value(self, lower: Floats, upper: Floats) -> NDArray[np.bool_]:
        """Return which ranges (lower, upper] hold a value that the schema declares.

        Parameters
        ----------
        lower, upper
            float64 arrays of equal shape: the ends of the ranges.
        """
        if len(self.levels):
            return np.searchsorted(self.levels, lower, side="right") < np.searchsorted(self.levels, upper, side="right")
        held: NDArray[np.bool_] = (lower < self.bounds[1]) & (upper >= self.bounds[0])
        return held

    def tells_apart(self, low: float, high: float) -> bool:
        """Return whether an anchor, as it is shown, may fall inside (low, high), or exact values are told.

        Parameters
        ----------
        low, high
            The ends of the interval.
        """
        step = self.step
        if isinstance(step, Partition) and (len(step.acceptable.low) or step.acceptable.ranges.any()):
            return True
        x = step.distribution.x
        ends = np.array([x[0], max(x[0], np.nextafter(x[-1], -np.inf))])  # the greatest is never drawn
        first, last = self.round_anchors(ends).tolist()
        if isinstance(step, Partition) and step.ring and first == last:
            return False
        scale = 10.0 ** (self.decimals or 0)
        least = max(first, (math.floor(low * scale) + 1) / scale if math.isfinite(low) else low)
        return bool(least <= last and least < high)

    def number(self, x: float) -> str:
        """Return a finite number in words."""
        if self.is_date:
            return dt.date.fromordinal(_EPOCH + int(x)).isoformat()
        text = f"{int(x):,}" if x == math.floor(x) and abs(x) < 2**53 else f"{x:,}"
        return f"{text} {self.wording.unit}".rstrip()

    def phrase(self, lower: float, upper: float) -> str:
        """Return a range in words; lower > upper is a ring's outer one.

        Parameters
        ----------
        lower, upper
            The ends of the range.
        """
        above = f"{'after' if self.is_date else 'more than'} {self.number(lower)}" if math.isfinite(lower) else ""
        below = f"{'on or before' if self.is_date else 'at most'} {self.number(upper)}" if math.isfinite(upper) else ""
        if not (above and below):
            return above or below or "anything"
        return f"{below}, or {above}" if lower > upper else f"{above} and {below}"
