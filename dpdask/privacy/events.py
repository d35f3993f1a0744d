"""Events: the randomised calls of a job, without their costs, as versioned JSON.

An event says which noise was drawn, on how many independent quantities, and by how much one unit can move each. What it
costs is `accountant`'s to say, so that a better accountant re-prices an old ledger without touching it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from dpdask.errors import SpecError
from dpdask.privacy.coverage import Uncovered
from dpdask.privacy.series import KEY, Series

FORMAT = 1

Adjacency = Literal["replace-one", "add-remove"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalRelease:
    """Every row was randomised on its own, before anything was computed.

    Attributes
    ----------
    epsilon
        ε* of one row's release; positive and finite.
    n
        How many such releases the unit pays for: of the same row, or of its several rows.
    unit
        Whose: `row`, or `column NAME` for all rows that share a column's value.

    Privacy
    -------
    Unit: `unit`. Adjacency: replace-one (that a row is there at all is published). Any ε-private local randomiser counts.
    """

    epsilon: float
    n: int = 1
    unit: str = "row"

    def __post_init__(self) -> None:
        _check_positive("epsilon", self.epsilon)
        _check_whole("n", self.n)
        if not isinstance(self.unit, str) or not (self.unit == "row" or self.unit.startswith("column ")):
            raise _wrong("unit", "'row' or 'column NAME'")


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscreteLaplace:
    """Discrete Laplace noise was added to vectors of whole numbers, Pr(e) ∝ exp(-|e| / scale), independently per entry.

    Attributes
    ----------
    scale
        The scale of the drawn noise, in counts; positive and finite.
    sensitivity
        The L1 sensitivity of one vector under `adjacency`, a whole number.
    adjacency
        For which `sensitivity` holds.
    count
        How many such vectors.

    Notes
    -----
    A histogram under replace-one has sensitivity 2. Since one cell loses a row and another one gains it, each with noise
    of its own, it is also two vectors of sensitivity 1; said so (`sensitivity=1`, twice the count) it costs the same at
    δ = 0 and less at δ > 0.
    """

    scale: float
    sensitivity: int
    adjacency: Adjacency
    count: int = 1

    def __post_init__(self) -> None:
        _check_positive("scale", self.scale)
        _check_whole("sensitivity", self.sensitivity)
        _check_adjacency(self.adjacency)
        _check_whole("count", self.count)


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscreteGaussian:
    """Discrete Gaussian noise was added to vectors of whole numbers, Pr(e) ∝ exp(-e² / 2σ²), independently per entry.

    Attributes
    ----------
    sigma
        The scale of the drawn noise, in counts; positive and finite.
    sensitivity
        The L2 sensitivity of one vector under `adjacency`, at least 1: √2 for a histogram under replace-one.
    adjacency
        For which `sensitivity` holds.
    count
        How many such vectors.
    """

    sigma: float
    sensitivity: float
    adjacency: Adjacency
    count: int = 1

    def __post_init__(self) -> None:
        _check_positive("sigma", self.sigma)
        _check_positive("sensitivity", self.sensitivity)
        if self.sensitivity < 1:
            raise _wrong("sensitivity", "at least 1, for whole numbers that move at all")
        _check_adjacency(self.adjacency)
        _check_whole("count", self.count)


@dataclass(frozen=True, slots=True, kw_only=True)
class Composed:
    """Several events, in any order; each may depend on the results of earlier ones.

    Attributes
    ----------
    events
        What happened; none is allowed.
    unit
        Whose sensitivities these are: `row`, or `column NAME`; None where nothing says so, as inside another composition.
    uncovered
        The samples of rows that are not covered: empty if every row is covered; None if this is not recorded.
    without_epsilon
        The private columns that were released beside these events with no ε of their own, such as true ranges.
    series
        Where the release stands in a series of releases of disjoint rows, if it is in one.
    """

    events: tuple[Event, ...]
    unit: str | None = None
    uncovered: tuple[Uncovered, ...] | None = None
    without_epsilon: tuple[str, ...] = ()
    series: Series | None = None

    def __post_init__(self) -> None:
        if not all(isinstance(name, str) for name in self.without_epsilon):
            raise _wrong("without_epsilon", "a list of columns")
        if self.uncovered is not None and not all(isinstance(each, Uncovered) for each in self.uncovered):
            raise _wrong("uncovered", "a list of samples")
        if self.unit is not None and not (isinstance(self.unit, str) and (self.unit == "row" or self.unit.startswith("column "))):
            raise _wrong("unit", "'row' or 'column NAME'")
        if not isinstance(self.events, tuple) or not all(isinstance(event, get_args(Event)) for event in self.events):
            raise _wrong("events", "a list of events")


CentralEvent = DiscreteLaplace | DiscreteGaussian
Event = LocalRelease | DiscreteLaplace | DiscreteGaussian | Composed

_KINDS: dict[str, type[LocalRelease | DiscreteLaplace | DiscreteGaussian]] = {
    "local-release": LocalRelease,
    "discrete-laplace": DiscreteLaplace,
    "discrete-gaussian": DiscreteGaussian,
}
_NAMES = {kind: name for name, kind in _KINDS.items()}
_COMPOSED = "composed"


def leaves(event: Event) -> Iterator[LocalRelease | DiscreteLaplace | DiscreteGaussian]:
    """Return the events inside an event that are not compositions, in order."""
    if isinstance(event, Composed):
        for inner in event.events:
            yield from leaves(inner)
    else:
        yield event


def units(event: Event) -> set[str]:
    """Return the units that an event and the events inside it name."""
    if isinstance(event, LocalRelease):
        return {event.unit}
    if not isinstance(event, Composed):
        return set()
    own: set[str] = set() if event.unit is None else {event.unit}
    return own.union(*(units(inner) for inner in event.events))


def hides_presence(event: Event) -> bool:
    """Return whether an event's ε is of add-remove, so that it bounds what is told of a unit's presence, and half of what of its values."""
    return any(not isinstance(leaf, LocalRelease) and leaf.adjacency == "add-remove" for leaf in leaves(event))


def add_cost(event: Mapping[str, Any], epsilon: float) -> dict[str, Any]:
    """Return a composition's mapping with a further event of its adjacency, so that the composition costs that much more.

    Parameters
    ----------
    event
        What `to_dict` gave; of a mapping that is no composition, nothing is kept, and its cost is what is declared beside it.
    epsilon
        What is added.
    """
    if event.get("kind") != _COMPOSED:
        return {}
    more: Event = LocalRelease(epsilon=epsilon, unit=event.get("unit") or "row")
    if hides_presence(from_dict(event)):
        more = DiscreteLaplace(scale=math.nextafter(1.0 / epsilon, 0.0), sensitivity=1, adjacency="add-remove")
    return {**event, "events": [*event["events"], to_dict(more)]}


def to_dict(event: Event) -> dict[str, Any]:
    """Return an event as a mapping that JSON can hold: `format`, `kind`, and its attributes."""
    if isinstance(event, Composed):
        rest: dict[str, Any] = {} if event.unit is None else {"unit": event.unit}
        if event.uncovered is not None:
            rest["uncovered"] = [each.to_dict() for each in event.uncovered]
        if event.without_epsilon:
            rest["without_epsilon"] = list(event.without_epsilon)
        if event.series is not None:
            rest[KEY] = event.series.to_dict()
        return {"format": FORMAT, "kind": _COMPOSED, "events": [to_dict(inner) for inner in event.events], **rest}
    return {"format": FORMAT, "kind": _NAMES[type(event)], **{field.name: getattr(event, field.name) for field in fields(event)}}


def from_dict(data: Mapping[str, Any]) -> Event:
    """Return the event that a mapping from `to_dict` holds.

    Raises
    ------
    SpecError
        If its format or kind is unknown, a key is missing or unknown, or a value cannot be: what is not understood
        cannot be priced, and is never priced at nothing.
    """
    if not isinstance(data, Mapping):
        raise _wrong("event", "a mapping")
    if type(data.get("format")) is not int or data["format"] != FORMAT:
        raise SpecError(f"the event's format is not {FORMAT}", "event", "read it with the version of dpdask that wrote it, or a later one")
    values = {key: value for key, value in data.items() if key not in ("format", "kind")}
    kind = data.get("kind")
    if (
        kind == _COMPOSED
        and "events" in values
        and set(values) <= {"events", "unit", "uncovered", "without_epsilon", KEY}
        and isinstance(values["events"], list | tuple)
    ):
        events = tuple(from_dict(inner) for inner in values["events"])
        columns = values.get("without_epsilon", ())
        if not isinstance(columns, list | tuple):
            raise _wrong("without_epsilon", "a list of columns")
        return Composed(
            events=events,
            unit=values.get("unit"),
            uncovered=_read_uncovered(values.get("uncovered")),
            without_epsilon=tuple(columns),
            series=Series.from_dict(values.get(KEY)),
        )
    known = _KINDS.get(kind) if isinstance(kind, str) else None
    if known is None and kind != _COMPOSED:
        raise SpecError("the event's kind is unknown", "event", "read it with the version of dpdask that wrote it, or a later one")
    if known is None or set(values) != {field.name for field in fields(known)}:
        raise SpecError(f"an event of kind {kind!r} has other keys", "event", "correct the file it comes from")
    return known(**values)


def central_from_dict(data: Mapping[str, Any]) -> CentralEvent:
    """Return the event of central noise that a mapping from `to_dict` holds.

    Raises
    ------
    SpecError
        As for `from_dict`, or if it holds another event.
    """
    event = from_dict(data)
    if not isinstance(event, DiscreteGaussian | DiscreteLaplace):
        raise _wrong("event", "of central noise")
    return event


def _read_uncovered(listed: object) -> tuple[Uncovered, ...] | None:
    if listed is None:
        return None
    if not isinstance(listed, list | tuple) or not all(isinstance(each, Mapping) for each in listed):
        raise _wrong("uncovered", "a list of samples")
    try:
        return tuple(Uncovered(**each) for each in listed)
    except TypeError:
        raise _wrong("uncovered", "a list of samples, each with a fraction, a fate and a name") from None


def _wrong(name: str, expected: str) -> SpecError:
    return SpecError(f"the event's {name} must be {expected}" if name != "event" else f"an event must be {expected}", "event")


def _check_positive(name: str, value: object) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not (math.isfinite(value) and value > 0):
        raise _wrong(name, "a positive, finite number")


def _check_whole(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise _wrong(name, "a whole number of at least 1")


def _check_adjacency(value: object) -> None:
    if value not in get_args(Adjacency):
        raise _wrong("adjacency", " or ".join(get_args(Adjacency)))
