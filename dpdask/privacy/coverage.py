"""The rows of a dataset that no ε covers: a sample for one release, and the share for several releases together."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal, get_args

from dpdask.errors import SpecError
from dpdask.privacy.rounding import round_up

Fate = Literal["held out", "republished"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Uncovered:
    """A random sample of the rows that have no ε in one release.

    Attributes
    ----------
    fraction
        The probability, in (0, 1), with which each row (or each whole unit) is in the sample.
    fate
        `held out`: the sample shapes the release and is not in it. `republished`: its records are also in the release.
    sample
        The name of the draw: of two samples with the same name, the larger contains the smaller.

    Raises
    ------
    SpecError
        If an attribute is out of its range.
    """

    fraction: float
    fate: Fate
    sample: str = ""

    def __post_init__(self) -> None:
        number = isinstance(self.fraction, float | int) and not isinstance(self.fraction, bool)
        if not (number and 0 < self.fraction < 1 and self.fate in get_args(Fate) and isinstance(self.sample, str)):
            raise SpecError("the rows that an event leaves out are described wrongly", "event", "give a fraction in (0, 1), their fate and a name")

    def to_dict(self) -> dict[str, Any]:
        """Return the attributes as a mapping that JSON can hold."""
        return {"fraction": self.fraction, "fate": self.fate, "sample": self.sample}


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """The rows without ε of all releases of one dataset together.

    Attributes
    ----------
    uncovered
        The expected share of the rows, in [0, 1], that had no ε in some release; if there are several draws, a bound on it.
    republished
        The share of the rows whose records some release republished, in the same sense.
    n_unknown
        How many releases do not record which rows they leave out: those of an earlier version of dpdask.
    columns
        The private columns that some release published without ε, such as true ranges.
    """

    uncovered: float = 0.0
    republished: float = 0.0
    n_unknown: int = 0
    columns: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The shares in words; empty if every row is covered by every release."""
        found = []
        if self.uncovered:
            many = "up to every row" if self.uncovered == 1 else f"up to about {_percent(self.uncovered)} of the rows"
            again = f", and the records of up to about {_percent(self.republished)} were republished" if self.republished else ""
            found.append(f"{many} had no ε in some run (hold-outs){again}")
        if self.n_unknown:
            runs, leave = ("1 run does", "it leaves") if self.n_unknown == 1 else (f"{self.n_unknown} runs do", "they leave")
            found.append(f"{runs} not record which rows {leave} out")
        if self.columns:
            found.append(f"the private columns {', '.join(self.columns)} were released without ε in some run")
        return "; ".join(found)


def coverage_of(events: Iterable[Mapping[str, Any]]) -> Coverage:
    """Return the rows without ε of several releases together, from their events in a ledger.

    Notes
    -----
    Samples with the same name are nested, so only the largest counts. Samples with different names were drawn separately; their
    fractions are added, which is a bound even if the samples overlap.
    """
    largest: dict[tuple[str, str], float] = {}
    columns: dict[str, None] = {}
    n_unknown = 0
    for number, event in enumerate(events):
        columns |= dict.fromkeys(event.get("without_epsilon", ()))
        if "uncovered" not in event:
            n_unknown += _releases_rows(event)
            continue
        for each in event["uncovered"]:
            name = each["sample"] or f"({number})"
            for kind in ("held out", each["fate"]):
                largest[kind, name] = max(largest.get((kind, name), 0.0), each["fraction"])
    return Coverage(uncovered=_total(largest, "held out"), republished=_total(largest, "republished"), n_unknown=n_unknown, columns=tuple(columns))


def _total(largest: Mapping[tuple[str, str], float], kind: str) -> float:
    return min(1.0, round_up(sum((Fraction(fraction) for (each, _), fraction in largest.items() if each == kind), Fraction(0))))


def _releases_rows(event: Mapping[str, Any]) -> bool:
    """Return whether an event releases rows one by one; only such a release can leave rows out."""
    return event.get("kind") == "local-release" or any(_releases_rows(inner) for inner in event.get("events", ()))


def _percent(share: float) -> str:
    return f"{math.ceil(1000 * share) / 10:g} %"
