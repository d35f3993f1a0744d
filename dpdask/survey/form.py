"""The form of a progressive survey: one HTML file that asks, draws and narrows in the respondent's own browser."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from hashlib import sha256
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpdask.errors import SpecError
from dpdask.html.pages import read_file, render_page
from dpdask.kernels.ranges import LEVELS, Steps
from dpdask.mechanisms.interval.ranges import Narrowing
from dpdask.survey.wording import Asked

ANSWER_FORMAT = 1
CONVENTION = "the value is more than lower and at most upper; -inf and inf: open"
MAX_NUMBERS = 250_000  # 2.7 MB of page


def form(columns: Sequence[Asked], survey: str, *, title: str, introduction: str, respondent: str | None, own_tau: bool) -> str:
    """Return the page with its tables, style and script; its policy lets it load and send nothing.

    Parameters
    ----------
    columns
        What is asked, in this order; their steps are narrowings.
    survey
        The survey's id.
    title, introduction
        Plain texts.
    respondent
        An id that the answer will carry, or None.
    own_tau
        Whether respondents choose their tau.

    Raises
    ------
    SpecError
        If a reference has too many values for a page.
    """
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
        raise SpecError("its reference has too many values for a page", f"column {asked.name!r}", "choose a continuous reference")
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
        "cdf": {"x": _table(step.cdf.x)} | ({} if _is_levels(step.cdf) else {"low": _table(step.cdf.low), "high": _table(step.cdf.high)}),
    }


def _is_levels(cdf: Steps) -> bool:
    """Return whether a cdf's bounds are those of the usual table, which the page knows."""
    return len(cdf.low) == len(LEVELS) + 1 and bool((cdf.low[1:] == LEVELS).all() and (cdf.high[:-1] == LEVELS).all())


def _table(numbers: NDArray[np.float64]) -> str:
    """Return numbers as base64 of little-endian float64: exact."""
    return base64.b64encode(numbers.astype("<f8").tobytes()).decode()


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(sha256(text.encode()).digest()).decode()}"
