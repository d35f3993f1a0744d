"""A plan in words, a line for each of its parts: what Python and the command line print."""

from __future__ import annotations

import datetime as dt
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Protocol

from dpdask.codec import Codec, ValueCodec
from dpdask.errors import DpdaskError
from dpdask.mechanisms.card import say_date, tell_numbers
from dpdask.plurals import say_count
from dpdask.privacy.events import DiscreteGaussian, Event, LocalRelease, leaves
from dpdask.privacy.noise import deviation
from dpdask.privacy.rounding import shorten
from dpdask.schema import Schema


class Planned(Protocol):
    """What the plans of a job and of a fit have in common; see `jobs.plan.Plan`."""

    @property
    def stages(self) -> tuple[str, ...]:
        """In order, in words."""

    @property
    def epsilons(self) -> Mapping[str, float]:
        """What each column of a released row may cost."""

    @property
    def reference_epsilons(self) -> Mapping[str, float]:
        """What each noisy histogram costs."""

    @property
    def noise(self) -> tuple[Mapping[str, Any], ...]:
        """The central noise, as `list_noise` returns it."""

    @property
    def seconds(self) -> tuple[float, ...]:
        """About how long each stage takes; empty if that is not known."""

    @property
    def ledger(self) -> Mapping[str, Any] | None:
        """The dataset's ε before and after, and its limit."""

    @property
    def guarantee(self) -> str:
        """Who is protected by what, and who is not."""

    @property
    def expectations(self) -> tuple[str, ...]:
        """How much a released row keeps, or how large noise is."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """What to consider before the run."""

    @property
    def refusal(self) -> DpdaskError | None:
        """The error that it would end with, if that is known."""


def describe_steps(planned: Planned) -> list[str]:
    """Return lines on what is done, about how long it takes, and what it costs."""
    stages = [stage.partition(": ") for stage in planned.stages]
    durations = ["", *map(describe_seconds, planned.seconds)] if planned.seconds else [""] * (len(stages) + 1)
    head = ("stage", "about" if planned.seconds else "", "what is done")
    columns = dict.fromkeys((*planned.epsilons, *planned.reference_epsilons))
    costs = [(name, _show(planned.epsilons.get(name)), _show(planned.reference_epsilons.get(name))) for name in columns]
    noise = [(each["on"], f"{each['sigma']:.3g}", each["kind"]) for each in planned.noise]
    return [
        *_tabulate([head, *((name, seconds, words) for (name, _, words), seconds in zip(stages, durations[1:], strict=True))]),
        *_tabulate([("column", "ε of a row", "ε of its counts"), *costs] if costs else []),
        *_tabulate([("noise on", "σ", "drawn as"), *noise] if noise else []),
        *(_describe_ledger(planned.ledger) if costs or noise else []),
    ]


def list_noise(event: Event) -> tuple[dict[str, Any], ...]:
    """Return the central noise of an event: on how many vectors of counts it is added, its σ in counts, and its kind."""
    found: Counter[tuple[float, str]] = Counter()
    for each in leaves(event):
        if not isinstance(each, LocalRelease):
            kind = "discrete Gaussian" if isinstance(each, DiscreteGaussian) else "discrete Laplace"
            found[deviation(each), kind] += each.count
    return tuple({"on": f"{n:,} vector{'' if n == 1 else 's'} of counts", "sigma": sigma, "kind": kind} for (sigma, kind), n in found.items())


def tell_date_bounds(codecs: Mapping[str, Codec]) -> dict[str, tuple[str, str]]:
    """Return the bounds of each column of dates or times, as dates.

    Parameters
    ----------
    codecs
        The codec of each privatised column.
    """
    return {name: (say(codec.bounds[0]), say(codec.bounds[1])) for name, codec, say in _list_dated(codecs) if codec.bounds is not None}


def _list_dated(codecs: Mapping[str, Codec]) -> Iterator[tuple[str, ValueCodec, Callable[[float], str]]]:
    """Yield each column of dates or times, its codec, and what writes a number of it as a date."""
    for name, codec in codecs.items():
        if isinstance(codec, ValueCodec) and (numbers := tell_numbers(codec).get("numbers")):
            yield name, codec, partial(_say_date, numbers)


def _say_date(numbers: str, number: float) -> str:
    return say_date(number, numbers) or f"{number:g}"


def warn_of_number_bounds(schema: Schema, codecs: Mapping[str, Codec]) -> tuple[str, ...]:
    """Return a warning for each column of dates or times whose bounds are declared by numbers: it says which dates they are.

    Parameters
    ----------
    schema
        The declared columns.
    codecs
        The codec of each privatised column.
    """
    warnings = []
    for name, codec, say in _list_dated(codecs):
        declared = schema.columns[name].bounds
        if declared is not None and codec.bounds is not None and not isinstance(declared[0], dt.date):
            low, high = map(say, codec.bounds)
            counts = tell_numbers(codec)["numbers"]
            what = f"its bounds {declared[0]:g} and {declared[1]:g} count {counts}, so they are {low} and {high}"
            warnings.append(f"column {name!r}: {what}; write dates, such as 2000-01-31, if others are meant")
    return tuple(warnings)


def describe_seconds(seconds: float) -> str:
    """Return a rough duration in words: `3 s`, `5 min` or `2 h`."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{round(seconds / 60)} min" if seconds < 5400 else f"{round(seconds / 3600)} h"


def _show(epsilon: float | None) -> str:
    return "" if epsilon is None else f"{epsilon:.6g}"


def _tabulate(rows: list[tuple[str, str, str]]) -> list[str]:
    """Return rows as lines with columns of equal width; the first is as wide as the labels of other lines."""
    widths = [max([9 * (place == 0), *(len(row[place]) for row in rows)]) for place in range(2)]
    return ["  " + "  ".join(filter(None, (row[0].ljust(widths[0]), row[1].ljust(widths[1]), row[2]))).rstrip() for row in rows]


def _describe_ledger(ledger: Mapping[str, Any] | None) -> list[str]:
    if ledger is None:
        return ["  ledger    none, so nothing keeps count of what this release and others of the table cost together"]
    before, after = (shorten(ledger[key], up=True) if ledger[key] < math.inf else "no ε is enough for its δ" for key in ("before", "after"))
    spent = f"  ledger    ε {before} of {ledger['limit']!r} spent by {say_count(ledger['runs'], 'run')}; {after} after this run"
    return [spent, *([f"  coverage  after this run, {ledger['coverage']}"] if ledger["coverage"] else [])]


def describe_promise(planned: Planned) -> list[str]:
    """Return lines on what is promised, what to expect, what to consider, and why it will be refused."""
    return [
        f"  promise   {planned.guarantee}",
        *(f"  expect    {sentence}" for sentence in planned.expectations),
        *(f"  WARNING   {warning}" for warning in planned.warnings),
        *([f"  REFUSED   {planned.refusal.what}"] if planned.refusal else []),
    ]
