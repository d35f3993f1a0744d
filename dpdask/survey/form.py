"""The form of a progressive survey: one HTML file that asks, draws and narrows in the respondent's own browser."""

from __future__ import annotations

import base64
import datetime as dt
import math
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from dpdask.documents import Document
from dpdask.errors import SpecError
from dpdask.html import read_file, render_page
from dpdask.kernels.ranges import LEVELS, Steps
from dpdask.mechanisms.interval.ranges import Narrowing, Partition

Floats = NDArray[np.float64]

_EPOCH = dt.date(1970, 1, 1).toordinal()


class Wording(Document):
    """How people are asked for a column."""

    of: str = Field(min_length=1)
    """What is asked for, as a noun phrase: "your yearly income before tax"."""
    unit: str = ""
    """What its numbers count: "euro". Empty for dates."""
    decimals: int | None = Field(default=None, ge=0, le=9)
    """To how many decimals anchors are rounded down, before anybody is asked; a range ends at the
    number that was shown, and the card states no coverage, which is that of anchors as drawn.
    None: as drawn, with all their digits. Columns of whole numbers and of dates have whole
    anchors anyway.
    """


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Asked:
    """A column of a survey."""

    name: str
    wording: Wording
    # How its range is found; a partition is asked at once, a narrowing round by round.
    step: Partition | Narrowing
    is_date: bool  # whether its numbers are days since 1970
    # The public closed range of its values, infinite where none is declared.
    bounds: tuple[float, float]
    levels: Floats  # float64 array, increasing: all values of a discrete column; empty for others

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
        return (
            math.isfinite(x)
            and self.bounds[0] <= x <= self.bounds[1]
            and (not self.step.lattice or x == math.floor(x))
        )

    def has_value(self, lower: Floats, upper: Floats) -> NDArray[np.bool_]:
        """Return which ranges (lower, upper] hold a value that the schema declares."""
        if len(self.levels):
            return np.searchsorted(self.levels, lower, side="right") < np.searchsorted(
                self.levels, upper, side="right"
            )
        held: NDArray[np.bool_] = (lower < self.bounds[1]) & (upper >= self.bounds[0])
        return held

    def tells_apart(self, low: float, high: float) -> bool:
        """Return whether an anchor, as it is shown, may fall inside (low, high), or exact values are told."""
        step = self.step
        if isinstance(step, Partition) and (
            len(step.acceptable.low) or step.acceptable.ranges.any()
        ):
            return True
        x = step.distribution.x
        ends = np.array(
            [x[0], max(x[0], np.nextafter(x[-1], -np.inf))]
        )  # the greatest is never drawn
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
        """Return a range in words; lower > upper is a ring's outer one."""
        above = (
            f"{'after' if self.is_date else 'more than'} {self.number(lower)}"
            if math.isfinite(lower)
            else ""
        )
        below = (
            f"{'on or before' if self.is_date else 'at most'} {self.number(upper)}"
            if math.isfinite(upper)
            else ""
        )
        if not (above and below):
            return above or below or "anything"
        return f"{below}, or {above}" if lower > upper else f"{above} and {below}"


ANSWER_FORMAT = 1
CONVENTION = "the value is more than lower and at most upper; -inf and inf: open"
MAX_NUMBERS = 250_000  # 2.7 MB of page


def form(
    columns: Sequence[Asked],
    survey: str,
    *,
    title: str,
    introduction: str,
    respondent: str | None,
    own_tau: bool,
) -> str:
    """Return the page with its tables, style and script; its policy lets it load and send nothing."""
    data = {
        "format": ANSWER_FORMAT,
        "survey": survey,
        "respondent": respondent,
        "convention": CONVENTION,
        "ownTau": own_tau,
        "columns": [_column(asked) for asked in columns],
    }
    style, script = (read_file(__package__, name) for name in ("form.css", "form.js"))
    texts = {"title": title, "introduction": introduction, "style": style, "script": script}
    return render_page(__package__, "form.html", {"hash": _hash}, texts | {"data": data})


def _column(asked: Asked) -> dict[str, Any]:
    """Return the page's data of a column; all of it is public."""
    step = asked.step
    assert isinstance(step, Narrowing)
    tables = (step.distribution.x, step.tau.x, step.cdf.x, step.cdf.low, step.cdf.high)
    if sum(len(table) for table in tables) > MAX_NUMBERS:
        raise SpecError(
            "its reference has too many values for a page",
            f"column {asked.name!r}",
            "choose a continuous reference",
        )
    return {
        "name": asked.name,
        "of": asked.wording.of,
        "unit": asked.wording.unit,
        "isDate": asked.is_date,
        "decimals": asked.decimals,
        "rounds": step.rounds,
        "law": _table(step.distribution.x),
        "tau": _table(step.tau.x),
        "leastTau": float(step.tau.x[0]),
        "cdf": {"x": _table(step.cdf.x)}
        | (
            {}
            if _is_levels(step.cdf)
            else {"low": _table(step.cdf.low), "high": _table(step.cdf.high)}
        ),
    }


def _is_levels(cdf: Steps) -> bool:
    """Return whether a cdf's bounds are those of the usual table, which the page knows."""
    return len(cdf.low) == len(LEVELS) + 1 and bool(
        (cdf.low[1:] == LEVELS).all() and (cdf.high[:-1] == LEVELS).all()
    )


def _table(numbers: NDArray[np.float64]) -> str:
    """Return numbers as base64 of little-endian float64: exact."""
    return base64.b64encode(numbers.astype("<f8").tobytes()).decode()


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(sha256(text.encode()).digest()).decode()}"
