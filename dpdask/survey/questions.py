"""Questions in words and numbers that a person can answer: drawn beforehand, or by a form."""

from __future__ import annotations

import base64
import datetime as dt
import math
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from dpdask.documents import Document
from dpdask.errors import SpecError
from dpdask.html import read_file, render_page
from dpdask.kernels import ranges as kernel
from dpdask.mechanisms.interval.ranges import Narrowing, Partition
from dpdask.streams import RunKey, stream, words

Floats = NDArray[np.float64]

ANSWER_FORMAT = 1
CONVENTION = "the value is more than lower and at most upper; -inf and inf: open"
_EPOCH = dt.date(1970, 1, 1).toordinal()
_MAX_NUMBERS = 250_000  # 2.7 MB of page


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


class Choice(NamedTuple):
    """One statement that may be true of a value: it lies in (lower, upper]."""

    lower: float  # lower > upper is a ring's outer range
    upper: float
    is_exact: bool = False  # whether its number is asked for, too


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Question:
    """A column as people are asked for it."""

    name: str
    wording: Wording
    step: Partition | Narrowing  # a partition is asked at once, a narrowing round by round
    is_date: bool  # its numbers are days since 1970
    bounds: tuple[float, float]  # closed and public, infinite where none is declared
    levels: Floats  # all values of a discrete column, increasing; empty for others

    @property
    def decimals(self) -> int | None:
        """How many decimals an anchor has; None for all of float64."""
        return 0 if self.step.lattice else self.wording.decimals

    @property
    def is_coarser(self) -> bool:
        """Whether anchors are shown with fewer digits than the mechanism draws."""
        return self.wording.decimals is not None and not self.step.lattice

    def round_anchors(self, anchors: Floats) -> Floats:
        """Return anchors rounded down as they are shown."""
        if self.decimals is None:
            return anchors
        scale = 10.0**self.decimals
        return np.floor(anchors * scale) / scale + 0.0  # -0 becomes 0

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
        low, high = self.bounds
        return math.isfinite(x) and low <= x <= high and (not self.step.lattice or x.is_integer())

    def has_value(self, lower: Floats, upper: Floats) -> NDArray[np.bool_]:
        """Return which ranges (lower, upper] hold a value that the schema declares."""
        if len(self.levels):
            first, last = (np.searchsorted(self.levels, end, "right") for end in (lower, upper))
            return first < last
        held: NDArray[np.bool_] = (lower < self.bounds[1]) & (upper >= self.bounds[0])
        return held

    def tells_apart(self, low: float, high: float) -> bool:
        """Return whether a shown anchor may fall inside (low, high), or exact values are told."""
        step = self.step
        x = step.distribution.x
        # the greatest of the table is never drawn
        ends = np.array([x[0], max(x[0], np.nextafter(x[-1], -np.inf))])
        first, last = self.round_anchors(ends).tolist()
        if isinstance(step, Partition):
            if len(step.acceptable.low) or step.acceptable.ranges.any():
                return True
            if step.ring and first == last:
                return False
        scale = 10.0 ** (self.decimals or 0)
        least = max(first, (math.floor(low * scale) + 1) / scale if math.isfinite(low) else low)
        return bool(least <= last and least < high)

    # ---- questions that are drawn beforehand

    def draw_anchors(self, survey: str, respondents: Sequence[str], key: RunKey) -> Floats:
        """Return each respondent's anchors: they depend on no value, and on no other respondent."""
        step = self.step
        assert isinstance(step, Partition)
        purpose, n = f"survey/{survey}/{self.name}", step.words_per_row
        drawn = [words(stream(key, purpose, respondent), n) for respondent in respondents]
        anchors = kernel.anchors(
            np.array(drawn, dtype=np.uint64).reshape(-1, n),
            step.distribution,
            step.centres,
            spacing=step.spacing,
            ring=step.ring,
            lattice=step.lattice,
        )
        return self.round_anchors(anchors)

    def choices(self, anchors: Floats) -> list[Choice]:
        """Return the choices between a respondent's anchors; the answer is the first that is true."""
        assert isinstance(self.step, Partition)
        accepted = self.step.acceptable
        if self.step.ring:
            low, high = anchors.tolist()
            return (
                [Choice(low, high), Choice(high, low)]
                if low < high
                else [Choice(-math.inf, math.inf)]
            )
        ends = [-math.inf, *np.unique(anchors).tolist(), math.inf]
        is_exact = accepted.ranges[np.searchsorted(anchors, ends[:-1], side="right")].tolist()
        intervals = zip(accepted.low.tolist(), accepted.high.tolist(), strict=True)
        return [
            *(Choice(low, high, True) for low, high in intervals),
            *map(Choice, ends[:-1], ends[1:], is_exact),
        ]

    def ask(self, anchors: Floats) -> tuple[str, list[str]]:
        """Return a respondent's question and its choices, in words."""
        choices = self.choices(anchors)
        texts = [
            self._phrase(lower, upper) + (": please give it" if is_exact else "")
            for lower, upper, is_exact in choices
        ]
        if len(choices) == 2 and not any(choice.is_exact for choice in choices):
            return f"Is {self.wording.of} {texts[0]}?", texts
        assert isinstance(self.step, Partition)
        first = " Choose the first that is." if len(self.step.acceptable.low) else ""
        return f"Which of these is true of {self.wording.of}?{first}", texts

    def _phrase(self, lower: float, upper: float) -> str:
        """Return a range in words; lower > upper is a ring's outer one."""
        more, at_most = ("after", "on or before") if self.is_date else ("more than", "at most")
        above = f"{more} {self._write(lower)}" if math.isfinite(lower) else ""
        below = f"{at_most} {self._write(upper)}" if math.isfinite(upper) else ""
        if not (above and below):
            return above or below or "anything"
        return f"{below}, or {above}" if lower > upper else f"{above} and {below}"

    def _write(self, x: float) -> str:
        if self.is_date:
            return dt.date.fromordinal(_EPOCH + int(x)).isoformat()
        text = f"{int(x):,}" if x.is_integer() and abs(x) < 2**53 else f"{x:,}"
        return f"{text} {self.wording.unit}".rstrip()

    # ---- questions that a form draws

    def to_page(self) -> dict[str, Any]:
        """Return what the page needs to ask for the column; all of it is public."""
        step = self.step
        assert isinstance(step, Narrowing)
        cdf = step.cdf
        tables = {"law": step.distribution.x, "tau": step.tau.x}
        tables_of_cdf = {"x": cdf.x, "low": cdf.low, "high": cdf.high}
        if sum(map(len, [*tables.values(), *tables_of_cdf.values()])) > _MAX_NUMBERS:
            what, hint = (
                "its reference has too many values for a page",
                "choose a continuous reference",
            )
            raise SpecError(what, f"column {self.name!r}", hint)
        if np.array_equal(cdf.low[1:], kernel.LEVELS) and np.array_equal(
            cdf.high[:-1], kernel.LEVELS
        ):
            del tables_of_cdf["low"], tables_of_cdf["high"]  # the page knows the usual ones
        return {
            "name": self.name,
            "of": self.wording.of,
            "unit": self.wording.unit,
            "isDate": self.is_date,
            "decimals": self.decimals,
            "rounds": step.rounds,
            **{name: _encode(table) for name, table in tables.items()},
            "leastTau": float(step.tau.x[0]),
            "cdf": {name: _encode(table) for name, table in tables_of_cdf.items()},
        }


def _encode(numbers: Floats) -> str:
    """Return numbers as base64 of little-endian float64: exact."""
    return base64.b64encode(numbers.astype("<f8").tobytes()).decode()


def render_form(data: dict[str, Any], title: str, introduction: str) -> str:
    """Return the page with its tables, style and script; its policy lets it load and send nothing.

    Parameters
    ----------
    data
        What the page needs, and writes into the answer.
    title, introduction
        Plain texts.
    """

    def hash_(text: str) -> str:
        return f"sha256-{base64.b64encode(sha256(text.encode()).digest()).decode()}"

    values = {"title": title, "introduction": introduction, "data": data}
    values |= {
        name: read_file(__package__, f"form.{end}")
        for name, end in (("style", "css"), ("script", "js"))
    }
    return render_page(__package__, "form.html", {"hash": hash_}, values)
