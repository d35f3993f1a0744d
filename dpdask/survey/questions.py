"""Questions in words and numbers that a person can answer, and the answers.

Answers are written by strangers, so nothing in them is trusted, and no message repeats any of it.
"""

from __future__ import annotations

import base64
import csv
import datetime as dt
import io
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from pydantic import Field

from dpdask.arrays import Flags, Floats
from dpdask.documents import Document
from dpdask.errors import DataError, InputError, SpecError
from dpdask.html import read_file, render_page
from dpdask.kernels import ranges as kernel
from dpdask.kernels.ranges import at_least
from dpdask.mechanisms.interval.ranges import Narrowing, Partition
from dpdask.mechanisms.interval.release import ends_of
from dpdask.streams import RunKey, stream, words

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

    def is_shown(self, ends: Floats) -> Flags:
        """Return which finite ends have no more decimals than anchors are shown with."""
        if self.decimals is None:
            return np.ones(len(ends), bool)
        scale = 10.0**self.decimals
        with np.errstate(over="ignore"):  # to infinity, which no finite end is
            shown: Flags = np.rint(ends * scale) / scale == ends
        return shown

    def is_value(self, x: float) -> bool:
        """Return whether a number is a value that the schema declares."""
        if len(self.levels):
            return x in self.levels
        low, high = self.bounds
        return math.isfinite(x) and low <= x <= high and (not self.step.lattice or x.is_integer())

    def has_value(self, lower: Floats, upper: Floats) -> Flags:
        """Return which ranges (lower, upper] hold a value that the schema declares."""
        if len(self.levels):
            first, last = (np.searchsorted(self.levels, end, "right") for end in (lower, upper))
            return first < last
        held: Flags = (lower < self.bounds[1]) & (upper >= self.bounds[0])
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


Answer = Mapping[str, Any]
Answers = str | Path | bytes | Answer | Sequence[str | Path | bytes | Answer]

MAX_ID = 200  # characters
_TEXTS = ("survey", "respondent", "convention")
_NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")


def read_answers(answers: Answers | pd.DataFrame) -> list[Answer]:
    """Return answers one by one: of files (JSON or CSV), their bytes, mappings or a frame."""
    if isinstance(answers, pd.DataFrame):
        return [
            {str(key): value for key, value in row.items() if not _is_missing(value)}
            for row in answers.to_dict("records")
        ]
    if isinstance(answers, Mapping):
        return [answers]
    if isinstance(answers, bytes):
        return _read_json(answers)
    if isinstance(answers, str | Path):
        path = Path(answers)
        try:
            content = path.read_bytes()
        except OSError:
            what = "this file of answers cannot be read"
            raise InputError(what, str(path), "check its path") from None
        return _read_csv(content) if path.suffix.lower() == ".csv" else _read_json(content)
    read: list[Answer] = []
    for position, part in enumerate(answers, start=1):
        try:
            read += read_answers(part)
        except DataError as error:
            raise error.at(f"file {position}") from None
    return read


def _read_csv(content: bytes) -> list[Answer]:
    try:
        text = io.StringIO(content.decode("utf-8-sig"), newline="")
        rows = list(csv.DictReader(text, strict=True))
    except (UnicodeDecodeError, csv.Error):  # the parser's message would repeat the file
        raise DataError("this is not a CSV table of answers", None, "export it again") from None

    def read(key: str, cell: Any) -> Any:
        number = math.nan if key in _TEXTS or not isinstance(cell, str) else _parse(cell)
        return cell if math.isnan(number) else number

    return [{key: read(key, cell) for key, cell in row.items() if cell} for row in rows]


def _read_json(content: bytes) -> list[Answer]:
    try:
        read = json.loads(content)
    except (ValueError, RecursionError):
        read = None
    read = read if isinstance(read, list) else [read]
    if not all(isinstance(answer, dict) for answer in read):
        what = "this is not a file of survey answers: it is not JSON, or not made of objects"
        raise DataError(what, None, "take the file that the form saved")
    return read


def check_headers(
    answers: Sequence[Answer], survey: str, known: Sequence[str], required: Sequence[str]
) -> list[str | None]:
    """Check that all answers belong to this survey, and return their respondents, None without an id.

    Apart from the header's keys, an answer may have the known ones, and must have the required ones.
    """
    keys = {*_TEXTS, "format", *known}
    saved = "take the file that the form saved"
    for position, answer in enumerate(answers, start=1):
        missing = next((key for key in required if key not in answer), None)
        id_, format_ = answer.get("respondent"), answer.get("format", ANSWER_FORMAT)
        convention = answer.get("convention", CONVENTION)
        for is_wrong, what, hint in (
            (
                not _is_text(answer.get("survey"), survey),
                "it answers another survey, or this one in another version or with another key",
                "ingest it with the survey, and the key, that asked it",
            ),
            (
                _to_number(format_) != ANSWER_FORMAT or not _is_text(convention, CONVENTION),
                "it was written by another version",
                "ingest it with that version",
            ),
            (
                not set(answer) <= keys,
                "it holds something that was not asked",
                f"{saved}, or remove that column",
            ),
            (missing is not None, f"it lacks {missing!r}", saved),
            (
                id_ is not None and id_of(id_) is None,
                f"its respondent's id is not a UTF-8 text of 1 to {MAX_ID} characters",
                "use ids that are short texts or whole numbers",
            ),
        ):
            if is_wrong:
                raise DataError(what, f"answer {position}", hint)
    respondents = [id_of(answer.get("respondent")) for answer in answers]
    named = [respondent for respondent in respondents if respondent is not None]
    if len(set(named)) < len(named):
        hint = "keep the first of each: two ranges of one value narrow each other"
        raise DataError("one respondent has two answers", "respondent", hint)
    return respondents


def read_form_ranges(answers: Sequence[Answer], question: Question) -> tuple[Floats, Floats]:
    """Return the ranges (float64, shape (n,) each) that respondents' forms saved of one column."""
    names = ends_of(question.name)
    ends = np.array([[_to_end(answer[name]) for name in names] for answer in answers]).reshape(
        -1, 2
    )
    for position, end in np.argwhere(np.isnan(ends))[:1]:
        hint = 'write open ends as "-inf" and "inf"'
        raise DataError(f"{names[end]!r} is not a number", f"answer {position + 1}", hint)
    lower, upper = ends.T.copy()
    for is_wrong, what in _find_impossible(lower, upper, question):
        if is_wrong.any():
            where = f"answer {int(np.argmax(is_wrong)) + 1}, column {question.name!r}"
            raise DataError(what, where, "its form cannot have saved this: leave the answer out")
    return lower, upper


def _find_impossible(
    lower: Floats, upper: Floats, question: Question
) -> Iterator[tuple[Flags, str]]:
    """Yield which ranges a form cannot end with, and why; each reason takes all before to be absent."""
    step = question.step
    assert isinstance(step, Narrowing)
    yield ~(lower < upper), "its lower end is not below its upper end"
    first, last = question.round_anchors(step.distribution.x[[0, -1]])
    for ends in (lower, upper):
        is_drawn = ~np.isfinite(ends)
        finite = ends[~is_drawn]
        is_drawn[~is_drawn] = (finite >= first) & (finite <= last) & question.is_shown(finite)
        yield ~is_drawn, "an end is no anchor that could have been drawn"
    no_value = ~question.has_value(lower, upper)
    yield no_value, "its range holds no value within the bounds, or no level"
    is_narrow = at_least(lower, upper, step.cdf) < step.tau.x[0]
    yield is_narrow, "its range is narrower than the design lets anyone's be"


def read_choices(
    answers: Sequence[Answer],
    respondents: Sequence[str],
    question: Question,
    survey: str,
    key: RunKey,
) -> tuple[Floats, Floats]:
    """Return the ranges (float64, shape (n,) each) of respondents' choices; (-inf, inf) of none."""
    drawn = question.draw_anchors(survey, respondents, key)
    ranges = [
        _choose(answer, question, anchors, f"answer {position}, column {question.name!r}")
        for position, (answer, anchors) in enumerate(zip(answers, drawn, strict=True), start=1)
    ]
    lower, upper = np.array(ranges, float).reshape(-1, 2).T.copy()
    return lower, upper


def _choose(answer: Answer, question: Question, anchors: Floats, where: str) -> tuple[float, float]:
    chosen, given = (answer.get(f"{question.name}_{part}") for part in ("choice", "value"))
    if _is_missing(chosen) and _is_missing(given):
        return -math.inf, math.inf
    choices, number = question.choices(anchors), _to_number(chosen)
    if not (1 <= number <= len(choices) and number.is_integer()):
        what = "its choice is not one that this respondent had"
        raise DataError(what, where, "count choices from 1")
    lower, upper, is_exact = choices[int(number) - 1]
    if not is_exact:
        if not _is_missing(given):
            what = "it gives a number where only its range was asked for"
            raise DataError(what, where, "remove the number: it must not be collected")
        return lower, upper
    value = _to_end(given)
    if not (lower < value <= upper and question.is_value(value)):
        what = "its number is missing, or does not fit its choice"
        raise DataError(what, where, "leave the choice out, or ask again")
    return value, value


# ---- values that anybody may have written


def _to_end(value: Any) -> float:
    """Return an end as a number; NaN if it is not a number."""
    if isinstance(value, str):
        return {"-inf": -math.inf, "inf": math.inf}.get(value) or _parse(value)
    return _to_number(value)


def _to_number(value: Any) -> float:
    """Return a number as a float; NaN if it is not a number, or too large."""
    is_number = isinstance(value, int | float | np.integer | np.floating)
    if isinstance(value, bool) or not is_number:
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.nan


def _parse(text: str) -> float:
    """Return the finite number in a text of ASCII digits; NaN if there is none."""
    number = float(text) if _NUMBER.fullmatch(text) else math.nan
    return number if math.isfinite(number) else math.nan


def id_of(value: Any) -> str | None:
    """Return a respondent's id, a text of 1 to `MAX_ID` UTF-8 characters or such a whole number; else None."""
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        if abs(int(value)) >= 10 ** (MAX_ID - 1):  # Python refuses to write longer ones
            return None
    elif not isinstance(value, str):
        return None
    text = str(value)
    try:
        text.encode()
    except UnicodeEncodeError:  # it would hold the id
        return None
    return text if 1 <= len(text) <= MAX_ID else None


def _is_text(value: Any, text: str) -> bool:
    return isinstance(value, str) and value == text


def _is_missing(value: Any) -> bool:
    is_float = isinstance(value, float | np.floating)
    return value is None or value is pd.NA or (is_float and math.isnan(value))
