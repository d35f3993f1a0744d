"""Events: the randomised calls of a job, without their costs, as versioned JSON.

An event says which noise was drawn, on how many independent quantities, and by how much one unit
can move each. What it costs is `accountant`'s to say, so that a better accountant re-prices an old
ledger without touching it.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from fractions import Fraction
from hashlib import blake2b
from typing import Any, Literal, Protocol, TypeVar, get_args

from dpdask.errors import SpecError
from dpdask.privacy.rounding import round_up

Fate = Literal["held out", "republished"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Uncovered:
    """A random sample of the rows that have no ε in one release."""

    # The probability, in (0, 1), with which each row (or each whole unit) is in the sample.
    fraction: float
    # `held out`: the sample shapes the release and is not in it. `republished`: its records are
    # also in the release.
    fate: Fate
    # The name of the draw: of two samples with the same name, the larger contains the smaller.
    sample: str = ""

    def __post_init__(self) -> None:
        number = isinstance(self.fraction, float | int) and not isinstance(self.fraction, bool)
        if not (
            number
            and 0 < self.fraction < 1
            and self.fate in get_args(Fate)
            and isinstance(self.sample, str)
        ):
            raise SpecError(
                "the rows that an event leaves out are described wrongly",
                "event",
                "give a fraction in (0, 1), their fate and a name",
            )

    def to_dict(self) -> dict[str, Any]:
        """Return the attributes as a mapping that JSON can hold."""
        return {"fraction": self.fraction, "fate": self.fate, "sample": self.sample}


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """The rows without ε of all releases of one dataset together."""

    # The expected share of the rows, in [0, 1], that had no ε in some release; if there are several
    # draws, a bound on it.
    uncovered: float = 0.0
    # The share of the rows whose records some release republished, in the same sense.
    republished: float = 0.0
    # How many releases do not record which rows they leave out: those of an earlier version of
    # dpdask.
    n_unknown: int = 0
    # The private columns that some release published without ε, such as true ranges.
    columns: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The shares in words; empty if every row is covered by every release."""
        found = []
        if self.uncovered:
            many = (
                "up to every row"
                if self.uncovered == 1
                else f"up to about {_percent(self.uncovered)} of the rows"
            )
            again = (
                f", and the records of up to about {_percent(self.republished)} were republished"
                if self.republished
                else ""
            )
            found.append(f"{many} had no ε in some run (hold-outs){again}")
        if self.n_unknown:
            runs, leave = (
                ("1 run does", "it leaves")
                if self.n_unknown == 1
                else (f"{self.n_unknown} runs do", "they leave")
            )
            found.append(f"{runs} not record which rows {leave} out")
        if self.columns:
            found.append(
                f"the private columns {', '.join(self.columns)} were released without ε in some run"
            )
        return "; ".join(found)


def coverage_of(events: Iterable[Mapping[str, Any]]) -> Coverage:
    """Return the rows without ε of several releases together, from their events in a ledger.

    Notes
    -----
    Samples with the same name are nested, so only the largest counts. Samples with different names
    were drawn separately; their fractions are added, which is a bound even if the samples overlap.
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
    return Coverage(
        uncovered=_total(largest, "held out"),
        republished=_total(largest, "republished"),
        n_unknown=n_unknown,
        columns=tuple(columns),
    )


def _total(largest: Mapping[tuple[str, str], float], kind: str) -> float:
    return min(
        1.0,
        round_up(
            sum(
                (Fraction(fraction) for (each, _), fraction in largest.items() if each == kind),
                Fraction(0),
            )
        ),
    )


def _releases_rows(event: Mapping[str, Any]) -> bool:
    """Return whether an event releases rows one by one; only such a release can leave rows out."""
    return event.get("kind") == "local-release" or any(
        _releases_rows(inner) for inner in event.get("events", ())
    )


def _percent(share: float) -> str:
    return f"{math.ceil(1000 * share) / 10:g} %"


_PERSON = b"dpdask series"
KEY = "series"


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Where one release stands in a series."""

    id: str  # names the series: a digest of its job and its first run
    # SHA-256 of the fitted release that all releases share; empty in the first, which has none yet.
    release: str = ""
    # A keyed digest of the fragments that were released before; empty in the first.
    previous: str = ""
    head: str  # the same digest with this release's fragments

    def __post_init__(self) -> None:
        if not all(isinstance(value, str) for value in asdict(self).values()):
            raise SpecError("an event's series must be a mapping of texts", "event")

    @classmethod
    def from_dict(cls, data: object) -> Series | None:
        """Return what stands under `series` in an event; None if nothing does."""
        if data is None:
            return None
        if not isinstance(data, Mapping) or set(data) != {field.name for field in fields(cls)}:
            raise SpecError(
                "an event's series must have an id, a release, a previous digest and a head",
                "event",
            )
        return cls(**data)

    def to_dict(self) -> dict[str, str]:
        """Return the attributes as a mapping that JSON can hold."""
        return asdict(self)


def name_series(job: str, run_id: str) -> str:
    """Return the id of a series."""
    return blake2b(f"{job} {run_id}".encode(), person=_PERSON, digest_size=16).hexdigest()


def derive_salt(key: bytes) -> bytes:
    """Return the key of a series' digests, derived from the key of its first run."""
    return blake2b(b"salt", key=key, person=_PERSON, digest_size=32).digest()


def extend_head(salt: bytes, previous: str, fragments: Iterable[str]) -> str:
    """Return the digest of the released fragments with some more.

    Parameters
    ----------
    salt
        The key of the series' digests: without it, nobody can test which files were released.
    """
    return blake2b(
        "\n".join([previous, *sorted(fragments)]).encode(), key=salt, person=_PERSON, digest_size=32
    ).hexdigest()


class Charged(Protocol):
    """A release in the ledger; the event is empty where only epsilon and delta are known."""

    @property
    def epsilon(self) -> float:
        """The ε charged."""

    @property
    def delta(self) -> float:
        """The δ charged."""

    @property
    def event(self) -> Mapping[str, Any]:
        """The event, as `events.to_dict` gives it."""


Charge = TypeVar("Charge", bound=Charged)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Segment:
    """The part of a series that one full charge covers: that charge, the fitted release, and the newest digest."""

    full: Charged
    release: str
    head: str


def count_series(charges: Sequence[tuple[Charge, str]]) -> list[Charge]:
    """Return the charges that count: all but those of releases that go on with a series of rows.

    Parameters
    ----------
    charges
        Each charge of a dataset in the order of the charging, with the digest of the fitted release
        that its run recorded (or an empty text).

    Notes
    -----
    A release goes on with its series if its digest of the fragments released before is the newest
    one, the fitted release is the same, the unit is the row, and its events are among those of the
    last charge of the series that counts in full.
    """
    counted: list[Charge] = []
    segments: dict[str, _Segment] = {}
    for charge, recorded in charges:
        series = Series.from_dict(charge.event.get(KEY))
        if series is None:
            counted.append(charge)
            continue
        segment = segments.get(series.id)
        if segment is not None and _goes_on(charge, series, segment):
            segments[series.id] = _Segment(
                full=segment.full, release=segment.release, head=series.head
            )
            continue
        counted.append(charge)
        segments[series.id] = _Segment(
            full=charge, release=series.release or recorded, head=series.head
        )
    return counted


def _goes_on(charge: Charged, series: Series, segment: _Segment) -> bool:
    same = series.previous == segment.head != "" and series.release == segment.release != ""
    covered = charge.epsilon <= segment.full.epsilon and charge.delta <= segment.full.delta
    events, paid = list(_leaves(charge.event)), list(_leaves(segment.full.event))
    by_row = all(
        event.get("unit") == "row"
        for event in (
            charge.event,
            segment.full.event,
            *(leaf for leaf in events if "unit" in leaf),
        )
    )
    return same and covered and by_row and bool(events) and _count(events) <= _count(paid)


def _count(leaves: Iterable[Mapping[str, Any]]) -> Counter[str]:
    return Counter(json.dumps(leaf, sort_keys=True) for leaf in leaves)


def _leaves(event: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the events inside an event that are not compositions."""
    if "events" not in event:
        yield event
        return
    for inner in event["events"]:
        yield from _leaves(inner)


def leave_series(event: Mapping[str, Any]) -> dict[str, Any]:
    """Return an event without its place in a series, so that it is charged in full."""
    return {name: value for name, value in event.items() if name != KEY}


FORMAT = 1

Adjacency = Literal["replace-one", "add-remove"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalRelease:
    """Every row was randomised on its own, before anything was computed.

    Privacy
    -------
    Unit: `unit`. Adjacency: replace-one (that a row is there at all is published). Any ε-private
    local randomiser counts.
    """

    epsilon: float  # Ε* of one row's release; positive and finite
    n: int = 1  # how many such releases the unit pays for: of the same row, or of its several rows
    unit: str = "row"  # whose: `row`, or `column NAME` for all rows that share a column's value

    def __post_init__(self) -> None:
        _check_positive("epsilon", self.epsilon)
        _check_whole("n", self.n)
        if not isinstance(self.unit, str) or not (
            self.unit == "row" or self.unit.startswith("column ")
        ):
            raise _wrong("unit", "'row' or 'column NAME'")


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscreteLaplace:
    """Discrete Laplace noise was added to vectors of whole numbers, Pr(e) ∝ exp(-|e| / scale), independently per entry.

    Notes
    -----
    A histogram under replace-one has sensitivity 2. Since one cell loses a row and another one
    gains it, each with noise of its own, it is also two vectors of sensitivity 1; said so
    (`sensitivity=1`, twice the count) it costs the same at δ = 0 and less at δ > 0.
    """

    scale: float  # the scale of the drawn noise, in counts; positive and finite
    sensitivity: int  # the L1 sensitivity of one vector under `adjacency`, a whole number
    adjacency: Adjacency
    count: int = 1

    def __post_init__(self) -> None:
        _check_positive("scale", self.scale)
        _check_whole("sensitivity", self.sensitivity)
        _check_adjacency(self.adjacency)
        _check_whole("count", self.count)


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscreteGaussian:
    """Discrete Gaussian noise was added to vectors of whole numbers, Pr(e) ∝ exp(-e² / 2σ²), independently per entry."""

    sigma: float  # the scale of the drawn noise, in counts; positive and finite
    # The L2 sensitivity of one vector under `adjacency`, at least 1: √2 for a histogram under
    # replace-one.
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
    """Several events, in any order; each may depend on the results of earlier ones."""

    events: tuple[Event, ...]
    # Whose sensitivities these are: `row`, or `column NAME`; None where nothing says so, as inside
    # another composition.
    unit: str | None = None
    # The samples of rows that are not covered: empty if every row is covered; None if this is not
    # recorded.
    uncovered: tuple[Uncovered, ...] | None = None
    # The private columns that were released beside these events with no ε of their own, such as
    # true ranges.
    without_epsilon: tuple[str, ...] = ()
    # Where the release stands in a series of releases of disjoint rows, if it is in one.
    series: Series | None = None

    def __post_init__(self) -> None:
        if not all(isinstance(name, str) for name in self.without_epsilon):
            raise _wrong("without_epsilon", "a list of columns")
        if self.uncovered is not None and not all(
            isinstance(each, Uncovered) for each in self.uncovered
        ):
            raise _wrong("uncovered", "a list of samples")
        if self.unit is not None and not (
            isinstance(self.unit, str) and (self.unit == "row" or self.unit.startswith("column "))
        ):
            raise _wrong("unit", "'row' or 'column NAME'")
        if not isinstance(self.events, tuple) or not all(
            isinstance(event, get_args(Event)) for event in self.events
        ):
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
    return any(
        not isinstance(leaf, LocalRelease) and leaf.adjacency == "add-remove"
        for leaf in leaves(event)
    )


def add_cost(event: Mapping[str, Any], epsilon: float) -> dict[str, Any]:
    """Return a composition's mapping with a further event of its adjacency, so that the composition costs that much more.

    Parameters
    ----------
    event
        What `to_dict` gave; of a mapping that is no composition, nothing is kept, and its cost is
        what is declared beside it.
    """
    if event.get("kind") != _COMPOSED:
        return {}
    more: Event = LocalRelease(epsilon=epsilon, unit=event.get("unit") or "row")
    if hides_presence(from_dict(event)):
        more = DiscreteLaplace(
            scale=math.nextafter(1.0 / epsilon, 0.0), sensitivity=1, adjacency="add-remove"
        )
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
        return {
            "format": FORMAT,
            "kind": _COMPOSED,
            "events": [to_dict(inner) for inner in event.events],
            **rest,
        }
    return {
        "format": FORMAT,
        "kind": _NAMES[type(event)],
        **{field.name: getattr(event, field.name) for field in fields(event)},
    }


def from_dict(data: Mapping[str, Any]) -> Event:
    """Return the event that a mapping from `to_dict` holds."""
    if not isinstance(data, Mapping):
        raise _wrong("event", "a mapping")
    if type(data.get("format")) is not int or data["format"] != FORMAT:
        raise SpecError(
            f"the event's format is not {FORMAT}",
            "event",
            "read it with the version of dpdask that wrote it, or a later one",
        )
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
        raise SpecError(
            "the event's kind is unknown",
            "event",
            "read it with the version of dpdask that wrote it, or a later one",
        )
    if known is None or set(values) != {field.name for field in fields(known)}:
        raise SpecError(
            f"an event of kind {kind!r} has other keys", "event", "correct the file it comes from"
        )
    return known(**values)


def central_from_dict(data: Mapping[str, Any]) -> CentralEvent:
    """Return the event of central noise that a mapping from `to_dict` holds."""
    event = from_dict(data)
    if not isinstance(event, DiscreteGaussian | DiscreteLaplace):
        raise _wrong("event", "of central noise")
    return event


def _read_uncovered(listed: object) -> tuple[Uncovered, ...] | None:
    if listed is None:
        return None
    if not isinstance(listed, list | tuple) or not all(
        isinstance(each, Mapping) for each in listed
    ):
        raise _wrong("uncovered", "a list of samples")
    try:
        return tuple(Uncovered(**each) for each in listed)
    except TypeError:
        raise _wrong(
            "uncovered", "a list of samples, each with a fraction, a fate and a name"
        ) from None


def _wrong(name: str, expected: str) -> SpecError:
    return SpecError(
        f"the event's {name} must be {expected}"
        if name != "event"
        else f"an event must be {expected}",
        "event",
    )


def _check_positive(name: str, value: object) -> None:
    if (
        not isinstance(value, int | float)
        or isinstance(value, bool)
        or not (math.isfinite(value) and value > 0)
    ):
        raise _wrong(name, "a positive, finite number")


def _check_whole(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise _wrong(name, "a whole number of at least 1")


def _check_adjacency(value: object) -> None:
    if value not in get_args(Adjacency):
        raise _wrong("adjacency", " or ".join(get_args(Adjacency)))
