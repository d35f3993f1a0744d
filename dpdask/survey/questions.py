"""Questions that can be asked beforehand: each respondent's anchors, the choices between them, and the range of an answer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dpdask.kernels import ranges as kernel
from dpdask.mechanisms.interval.ranges import Partition
from dpdask.streams import RunKey, stream, words
from dpdask.survey.wording import Asked

Floats = NDArray[np.float64]


class Choice(NamedTuple):
    """One statement that may be true of a value.

    Attributes
    ----------
    lower, upper
        It lies in (lower, upper]; lower > upper is a ring's outer range.
    exact
        Whether its number is asked for, too.
    """

    lower: float
    upper: float
    exact: bool


def draw_anchors(asked: Asked, survey: str, respondents: Sequence[str], key: RunKey) -> Floats:
    """Return each respondent's anchors of a column; they depend on key, survey, column and respondent, and on no value.

    Parameters
    ----------
    asked
        The column; its step is a partition.
    survey
        The survey's id.
    respondents
        Their ids.
    key
        The survey's key.

    Returns
    -------
    float64 array of shape (n_respondents, n_anchors), non-decreasing along each row, rounded as they are shown.
    """
    assert isinstance(asked.step, Partition)
    step, n = asked.step, asked.step.words_per_row
    drawn = [words(stream(key, f"survey/{survey}/{asked.name}", respondent), n) for respondent in respondents]
    table = np.array(drawn, dtype=np.uint64).reshape(-1, n)
    return asked.round_anchors(kernel.anchors(table, step.distribution, step.centres, spacing=step.spacing, ring=step.ring, lattice=step.lattice))


def choices(asked: Asked, anchors: Floats) -> list[Choice]:
    """Return the choices of a respondent, given anchors; the answer is the first that is true.

    Parameters
    ----------
    asked
        The column.
    anchors
        The respondent's anchors, float64 array of shape (n_anchors,), sorted.
    """
    assert isinstance(asked.step, Partition)
    accepted = asked.step.acceptable
    if asked.step.ring:
        low, high = anchors.tolist()
        return [Choice(low, high, False), Choice(high, low, False)] if low < high else [Choice(-math.inf, math.inf, False)]
    ends = [-math.inf, *np.unique(anchors).tolist(), math.inf]
    below = np.searchsorted(anchors, ends[:-1], side="right")
    special = [Choice(low, high, True) for low, high in zip(accepted.low.tolist(), accepted.high.tolist(), strict=True)]
    return special + [Choice(low, high, bool(accepted.ranges[k])) for low, high, k in zip(ends[:-1], ends[1:], below, strict=True)]


def question(asked: Asked, anchors: Floats) -> tuple[str, list[str]]:
    """Return a respondent's question and its choices, in words.

    For the parameters see `choices`.
    """
    options = choices(asked, anchors)
    texts = [asked.phrase(option.lower, option.upper) + (": please give it" if option.exact else "") for option in options]
    if len(options) == 2 and not any(option.exact for option in options):
        return f"Is {asked.wording.of} {texts[0]}?", texts
    overlap = isinstance(asked.step, Partition) and len(asked.step.acceptable.low) > 0
    return f"Which of these is true of {asked.wording.of}?{' Choose the first that is.' if overlap else ''}", texts


def question_table(columns: Sequence[Asked], survey: str, respondents: Sequence[str], key: RunKey) -> pd.DataFrame:
    """Return a row per respondent and column: survey, respondent, column, question, choices (texts), anchors (numbers).

    Parameters
    ----------
    columns
        The columns that are asked.
    survey
        The survey's id.
    respondents
        The respondents' ids.
    key
        The key that draws the anchors.
    """
    drawn = {asked.name: draw_anchors(asked, survey, respondents, key) for asked in columns}
    rows = [
        (survey, respondent, asked.name, *question(asked, anchors := drawn[asked.name][row]), anchors.tolist())
        for row, respondent in enumerate(respondents)
        for asked in columns
    ]
    return pd.DataFrame(rows, columns=["survey", "respondent", "column", "question", "choices", "anchors"])
