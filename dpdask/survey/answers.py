"""Answers from files or tables: read strictly, checked against the questions, and turned into ranges.

They are written by strangers, so nothing in them is trusted, and no message repeats any of it.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dpdask.errors import DataError, InputError
from dpdask.kernels import ranges as kernel
from dpdask.kernels.ranges import at_least
from dpdask.mechanisms.interval.ranges import Narrowing, Partition
from dpdask.mechanisms.interval.release import ends_of
from dpdask.streams import RunKey, stream, words
from dpdask.survey.form import ANSWER_FORMAT, CONVENTION, Asked

Floats = NDArray[np.float64]


class Choice(NamedTuple):
    """One statement that may be true of a value."""

    lower: float  # it lies in (lower, upper]; lower > upper is a ring's outer range
    upper: float
    exact: bool  # whether its number is asked for, too


def draw_anchors(asked: Asked, survey: str, respondents: Sequence[str], key: RunKey) -> Floats:
    """Return each respondent's anchors of a column; they depend on key, survey, column and respondent, and on no value."""
    assert isinstance(asked.step, Partition)
    step, n = asked.step, asked.step.words_per_row
    drawn = [
        words(stream(key, f"survey/{survey}/{asked.name}", respondent), n)
        for respondent in respondents
    ]
    table = np.array(drawn, dtype=np.uint64).reshape(-1, n)
    return asked.round_anchors(
        kernel.anchors(
            table,
            step.distribution,
            step.centres,
            spacing=step.spacing,
            ring=step.ring,
            lattice=step.lattice,
        )
    )


def choices(asked: Asked, anchors: Floats) -> list[Choice]:
    """Return the choices of a respondent, given anchors; the answer is the first that is true."""
    assert isinstance(asked.step, Partition)
    accepted = asked.step.acceptable
    if asked.step.ring:
        low, high = anchors.tolist()
        return (
            [Choice(low, high, False), Choice(high, low, False)]
            if low < high
            else [Choice(-math.inf, math.inf, False)]
        )
    ends = [-math.inf, *np.unique(anchors).tolist(), math.inf]
    below = np.searchsorted(anchors, ends[:-1], side="right")
    special = [
        Choice(low, high, True)
        for low, high in zip(accepted.low.tolist(), accepted.high.tolist(), strict=True)
    ]
    return special + [
        Choice(low, high, bool(accepted.ranges[k]))
        for low, high, k in zip(ends[:-1], ends[1:], below, strict=True)
    ]


def question(asked: Asked, anchors: Floats) -> tuple[str, list[str]]:
    """Return a respondent's question and its choices, in words.

    For the parameters see `choices`.
    """
    options = choices(asked, anchors)
    texts = [
        asked.phrase(option.lower, option.upper) + (": please give it" if option.exact else "")
        for option in options
    ]
    if len(options) == 2 and not any(option.exact for option in options):
        return f"Is {asked.wording.of} {texts[0]}?", texts
    overlap = isinstance(asked.step, Partition) and len(asked.step.acceptable.low) > 0
    return (
        f"Which of these is true of {asked.wording.of}?{' Choose the first that is.' if overlap else ''}",
        texts,
    )


def question_table(
    columns: Sequence[Asked], survey: str, respondents: Sequence[str], key: RunKey
) -> pd.DataFrame:
    """Return a row per respondent and column: survey, respondent, column, question, choices (texts), anchors (numbers)."""
    drawn = {asked.name: draw_anchors(asked, survey, respondents, key) for asked in columns}
    rows = [
        (
            survey,
            respondent,
            asked.name,
            *question(asked, anchors := drawn[asked.name][row]),
            anchors.tolist(),
        )
        for row, respondent in enumerate(respondents)
        for asked in columns
    ]
    return pd.DataFrame(
        rows, columns=["survey", "respondent", "column", "question", "choices", "anchors"]
    )


Answer = Mapping[str, Any]
Answers = str | Path | bytes | Answer | Sequence[str | Path | bytes | Answer]

MAX_ID = 200  # characters
_TEXTS = ("survey", "respondent", "convention")
_HEADER = (*_TEXTS, "format")
_NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")


def read_answers(answers: Answers | pd.DataFrame) -> list[Answer]:
    """Return answers one by one: of files (JSON: one answer or a list of them; CSV: a row each), their bytes, mappings or a frame."""
    if isinstance(answers, pd.DataFrame):
        return [
            {str(key): value for key, value in row.items() if not _is_missing(value)}
            for row in answers.to_dict("records")
        ]
    if isinstance(answers, Mapping):
        return [answers]
    if isinstance(answers, bytes):
        return _of_json(answers)
    if isinstance(answers, str | Path):
        return _of_file(Path(answers))
    found: list[Answer] = []
    for position, part in enumerate(answers, start=1):
        try:
            found += read_answers(part)
        except DataError as error:
            raise error.at(f"file {position}") from None
    return found


def _of_file(path: Path) -> list[Answer]:
    try:
        content = path.read_bytes()
    except OSError:
        raise InputError(
            "this file of answers cannot be read", str(path), "check its path"
        ) from None
    if path.suffix.lower() != ".csv":
        return _of_json(content)
    try:
        rows = list(
            csv.DictReader(io.StringIO(content.decode("utf-8-sig"), newline=""), strict=True)
        )
    except (UnicodeDecodeError, csv.Error):  # the parser's message would repeat the file
        raise DataError("this is not a CSV table of answers", None, "export it again") from None
    return [
        {key: cell if key in _TEXTS else _cell(cell) for key, cell in row.items() if cell}
        for row in rows
    ]


def _of_json(content: bytes) -> list[Answer]:
    wrong = DataError(
        "this is not a file of survey answers: it is not JSON, or not made of objects",
        None,
        "take the file that the form saved",
    )
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        raise wrong from None
    found = found if isinstance(found, list) else [found]
    if not all(isinstance(answer, dict) for answer in found):
        raise wrong
    return found


def check_headers(
    found: Sequence[Answer], survey: str, known: Sequence[str], required: Sequence[str]
) -> list[str | None]:
    """Check that all answers belong to this survey, and return their respondents; None where an answer has no id.

    Parameters
    ----------
    known, required
        Which keys they may have apart from the header's, and which keys they must have.
    """
    for position, answer in enumerate(found, start=1):
        where = f"answer {position}"
        if not _is_text(answer.get("survey"), survey):
            what = "it answers another survey, or this one in another version or with another key"
            raise DataError(what, where, "ingest it with the survey, and the key, that asked it")
        if _number(answer.get("format", ANSWER_FORMAT)) != ANSWER_FORMAT or not _is_text(
            answer.get("convention", CONVENTION), CONVENTION
        ):
            raise DataError(
                "it was written by another version", where, "ingest it with that version"
            )
        if not set(answer) <= {*_HEADER, *known}:
            raise DataError(
                "it holds something that was not asked",
                where,
                "take the file that the form saved, or remove that column",
            )
        missing = [key for key in required if key not in answer]
        if missing:
            raise DataError(f"it lacks {missing[0]!r}", where, "take the file that the form saved")
        if answer.get("respondent") is not None and id_of(answer["respondent"]) is None:
            what = f"its respondent's id is not a UTF-8 text of 1 to {MAX_ID} characters"
            raise DataError(what, where, "use ids that are short texts or whole numbers")
    respondents = [id_of(answer.get("respondent")) for answer in found]
    named = [respondent for respondent in respondents if respondent is not None]
    if len(set(named)) < len(named):
        raise DataError(
            "one respondent has two answers",
            "respondent",
            "keep the first of each: two ranges of one value narrow each other",
        )
    return respondents


def form_ranges(found: Sequence[Answer], asked: Asked) -> tuple[Floats, Floats]:
    """Return the ranges (float64, shape (n,) each) that respondents' forms saved of one column."""
    names = ends_of(asked.name)
    ends = np.empty((2, len(found)))
    for position, answer in enumerate(found):
        for row, name in enumerate(names):
            end = _end(answer[name])
            if math.isnan(end):
                raise DataError(
                    f"{name!r} is not a number",
                    f"answer {position + 1}",
                    'write open ends as "-inf" and "inf"',
                )
            ends[row, position] = end
    lower, upper = ends
    for wrong, what in _violations(lower, upper, asked):
        if wrong.any():
            where = f"answer {int(np.argmax(wrong)) + 1}, column {asked.name!r}"
            raise DataError(what, where, "its form cannot have saved this: leave the answer out")
    return lower, upper


def _violations(lower: Floats, upper: Floats, asked: Asked) -> list[tuple[NDArray[np.bool_], str]]:
    step = asked.step
    assert isinstance(step, Narrowing)
    first, last = asked.round_anchors(step.distribution.x[[0, -1]])
    ends = np.concatenate([lower, upper])
    finite = np.isfinite(ends)
    outside = finite & ((ends < first) | (ends > last))
    rough = np.zeros(len(ends), dtype=np.bool_)
    rough[finite] = ~asked.is_shown(ends[finite])
    found = [
        (~(lower < upper), "its lower end is not below its upper end"),
        (
            (outside | rough).reshape(2, -1).any(axis=0),
            "an end is no anchor that could have been drawn",
        ),
        (~asked.has_value(lower, upper), "its range holds no value within the bounds, or no level"),
    ]
    if found[0][0].any():  # an invalid range has no coverage
        return found
    return [
        *found,
        (
            at_least(lower, upper, step.cdf) < step.tau.x[0],
            "its range is narrower than the design lets anyone's be",
        ),
    ]


def choice_ranges(
    found: Sequence[Answer], respondents: Sequence[str], asked: Asked, survey: str, key: RunKey
) -> tuple[Floats, Floats]:
    """Return the ranges (float64, shape (n,) each) that respondents' choices stand for; (-inf, inf) where one was not made."""
    drawn = draw_anchors(asked, survey, respondents, key)
    ranges = [
        _choose(answer, asked, drawn[row], f"answer {row + 1}, column {asked.name!r}")
        for row, answer in enumerate(found)
    ]
    ends = np.array(ranges, dtype=np.float64).reshape(-1, 2)
    return ends[:, 0].copy(), ends[:, 1].copy()


def _choose(answer: Answer, asked: Asked, anchors: Floats, where: str) -> tuple[float, float]:
    chosen, given = answer.get(f"{asked.name}_choice"), answer.get(f"{asked.name}_value")
    if _is_missing(chosen) and _is_missing(given):
        return -math.inf, math.inf
    options = choices(asked, anchors)
    number = _number(chosen)
    if not (1 <= number <= len(options) and number.is_integer()):
        raise DataError(
            "its choice is not one that this respondent had", where, "count choices from 1"
        )
    option = options[int(number) - 1]
    if not option.exact:
        if not _is_missing(given):
            raise DataError(
                "it gives a number where only its range was asked for",
                where,
                "remove the number: it must not be collected",
            )
        return option.lower, option.upper
    value = _end(given)
    if not (option.lower < value <= option.upper and asked.is_value(value)):
        raise DataError(
            "its number is missing, or does not fit its choice",
            where,
            "leave the choice out, or ask again",
        )
    return value, value


def _end(value: Any) -> float:
    """Return an end as a number; NaN if it is not a number."""
    if isinstance(value, str):
        return {"-inf": -math.inf, "inf": math.inf}.get(value) or _parse(value)
    return _number(value)


def _number(value: Any) -> float:
    """Return a number as a float; NaN if it is not a number, or too large."""
    if isinstance(value, bool | np.bool_) or not isinstance(
        value, int | float | np.integer | np.floating
    ):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.nan


def _parse(text: str) -> float:
    """Return the finite number in a text of ASCII digits; NaN if there is none."""
    number = float(text) if _NUMBER.fullmatch(text) else math.nan
    return number if math.isfinite(number) else math.nan


def _cell(text: Any) -> Any:
    """Return a table's cell as a number, if it is one."""
    number = _parse(text) if isinstance(text, str) else math.nan
    return text if math.isnan(number) else number


def id_of(value: Any) -> str | None:
    """Return a respondent's id as a text; None unless it is a text of 1 to `MAX_ID` UTF-8 characters or such a whole number."""
    is_number = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not (isinstance(value, str) or (is_number and abs(int(value)) < 10 ** (MAX_ID - 1))):
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
    return (
        value is None
        or value is pd.NA
        or (isinstance(value, float | np.floating) and math.isnan(value))
    )
