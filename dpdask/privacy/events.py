"""Events, what a mechanism draws, with their composition; and how ε and δ are rounded against the releaser."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from fractions import Fraction
from hashlib import blake2b
from typing import Any, Literal, Protocol, TypeVar, get_args

from dpdask.errors import SpecError


def round_down(exact: Fraction) -> float:
    """Return the greatest float that is not above `exact`, for budgets to spend."""
    rounded = float(exact)
    return math.nextafter(rounded, -math.inf) if Fraction(rounded) > exact else rounded


def round_up(exact: Fraction) -> float:
    """Return the least float that is not below `exact`, for spent budgets; infinity beyond the largest float."""
    try:
        rounded = float(exact)
    except OverflowError:
        return math.inf
    return math.nextafter(rounded, math.inf) if Fraction(rounded) < exact else rounded


def shorten(value: float, *, up: bool) -> str:
    """Return a float in at most nine digits, for people.

    Parameters
    ----------
    up
        Whether it is rounded up, as a spent budget is, or down, as what is left.
    """
    return repr(
        float(
            Context(prec=9, rounding=ROUND_CEILING if up else ROUND_FLOOR).plus(
                Decimal(repr(value))
            )
        )
    )


def write_digits(value: float, digits: int = 2) -> str:
    """Return a number to so many digits, for people: with thousands apart, and never with an exponent."""
    return f"{Context(prec=digits).create_decimal_from_float(float(value)):,f}"


def round_up_sum(parts: Iterable[float]) -> float:
    """Return the least float that is not below the exact sum of finite floats."""
    return round_up(sum(map(Fraction, parts), Fraction(0)))


RowOrder = Literal["shuffled", "keep"]

_KEPT = (
    "rows keep the order of the input, which is published: if the input is sorted by a private column, the position of a row reveals "
    "roughly what its value was, whatever the noise, and no ε covers that"
)
_SHUFFLED = (
    "rows are shuffled: the rows of one shard come from neighbouring fragments of the input (files or row groups), in random order "
    "(in parts of 128 MiB, if they are larger), and the shards are numbered at random; a shard's size can reveal that it holds the end of "
    "the input, and the release reveals which rows were in the same part of the input: if the input is sorted by a private column, such "
    "rows had similar values, their released values together reveal roughly which, whatever the noise of each, and no ε covers that"
)


def order_text(order: RowOrder) -> str:
    """Return what a release card says about the order of its rows."""
    return _KEPT if order == "keep" else _SHUFFLED


def describe_published(order: RowOrder) -> str:
    """Return what is published besides the private columns, as a sentence without its full stop."""
    if order == "keep":
        return "The kept columns, the number and the order of the rows, and the presence of each row are published as they are"
    shuffled = "rows are shuffled, but the rows of one shard were close together in the input"
    return f"The kept columns, the number of rows and the presence of each row are published as they are; {shuffled}"


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
        _check_positive("fraction", self.fraction)
        if not (self.fraction < 1 and self.fate in get_args(Fate) and isinstance(self.sample, str)):
            raise SpecError(
                "the rows that an event leaves out are described wrongly",
                "event",
                "give a fraction in (0, 1), their fate and a name",
            )


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
            shares = [
                f"{math.ceil(1000 * share) / 10:g} %"
                for share in (self.uncovered, self.republished)
            ]
            many = (
                f"up to about {shares[0]} of the rows" if self.uncovered < 1 else "up to every row"
            )
            found.append(f"{many} had no ε in some run (hold-outs)")
            if self.republished:
                found[0] += f", and the records of up to about {shares[1]} were republished"
        if self.n_unknown == 1:
            found.append("1 run does not record which rows it leaves out")
        elif self.n_unknown:
            found.append(f"{self.n_unknown} runs do not record which rows they leave out")
        if self.columns:
            names = ", ".join(self.columns)
            found.append(f"the private columns {names} were released without ε in some run")
        return "; ".join(found)


def coverage_of(events: Iterable[Mapping[str, Any]]) -> Coverage:
    """Return the rows without ε of several releases together, from their events in a ledger.

    Notes
    -----
    Samples with the same name are nested, so only the largest counts. Samples with different names
    were drawn separately; their fractions are added, which is a bound even if the samples overlap.
    """
    largest: dict[Fate, dict[str, Fraction]] = {"held out": {}, "republished": {}}
    columns: dict[str, None] = {}
    n_unknown = 0
    for number, event in enumerate(events):
        columns |= dict.fromkeys(event.get("without_epsilon", ()))
        if "uncovered" not in event:
            # only a release of rows one by one can leave rows out
            n_unknown += any(leaf.get("kind") == "local-release" for leaf in _leaves(event))
            continue
        for each in event["uncovered"]:
            name = each["sample"] or f"({number})"
            for fate in {"held out", each["fate"]}:
                fraction = Fraction(each["fraction"])
                largest[fate][name] = max(largest[fate].get(name, fraction), fraction)
    held, again = (min(1.0, round_up(sum(each.values(), Fraction(0)))) for each in largest.values())
    return Coverage(uncovered=held, republished=again, n_unknown=n_unknown, columns=tuple(columns))


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
    # of each series, the charge that counts in full, the fitted release, and the newest digest
    newest: dict[str, tuple[Charged, str, str]] = {}
    for charge, recorded in charges:
        series = Series.from_dict(charge.event.get(KEY))
        if series is None:
            counted.append(charge)
            continue
        full, release, head = newest.get(series.id, (charge, "", ""))
        same = series.previous == head != "" and series.release == release != ""
        if same and _covers(full, charge):
            newest[series.id] = full, release, series.head
        else:
            counted.append(charge)
            newest[series.id] = charge, series.release or recorded, series.head
    return counted


def _covers(full: Charged, charge: Charged) -> bool:
    """Return whether a charge costs a row that is in one of two releases no more than another charge."""
    events, paid = (list(_leaves(each.event)) for each in (charge, full))
    named = (charge.event, full.event, *(leaf for leaf in events if "unit" in leaf))
    counts, of_paid = (
        Counter(json.dumps(leaf, sort_keys=True) for leaf in each) for each in (events, paid)
    )
    return (
        charge.epsilon <= full.epsilon
        and charge.delta <= full.delta
        and all(event.get("unit") == "row" for event in named)
        and bool(events)
        and counts <= of_paid
    )


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

    epsilon: float  # ε* of one row's release; positive and finite
    n: int = 1  # how many such releases the unit pays for: of the same row, or of its several rows
    unit: str = "row"  # whose: `row`, or `column NAME` for all rows that share a column's value

    def __post_init__(self) -> None:
        _check_positive("epsilon", self.epsilon)
        _check_whole("n", self.n)
        _check_unit(self.unit)


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
        if self.unit is not None:
            _check_unit(self.unit)
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
_KEYS = {
    kind: {field.name for field in fields(_KINDS.get(kind, Composed))}
    for kind in (*_KINDS, _COMPOSED)
}


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
            rest["uncovered"] = [asdict(each) for each in event.uncovered]
        if event.without_epsilon:
            rest["without_epsilon"] = list(event.without_epsilon)
        if event.series is not None:
            rest[KEY] = asdict(event.series)
        inner = [to_dict(each) for each in event.events]
        return {"format": FORMAT, "kind": _COMPOSED, "events": inner, **rest}
    return {"format": FORMAT, "kind": _NAMES[type(event)], **asdict(event)}


def from_dict(data: Mapping[str, Any]) -> Event:
    """Return the event that a mapping from `to_dict` holds.

    What is not understood cannot be priced: it is refused, and never priced at nothing.
    """
    if not isinstance(data, Mapping):
        raise _wrong("event", "a mapping")
    later = "read it with the version of dpdask that wrote it, or a later one"
    if type(data.get("format")) is not int or data["format"] != FORMAT:
        raise SpecError(f"the event's format is not {FORMAT}", "event", later)
    values = {key: value for key, value in data.items() if key not in ("format", "kind")}
    kind = data.get("kind")
    if not isinstance(kind, str) or kind not in _KEYS:
        raise SpecError("the event's kind is unknown", "event", later)
    names = set(values)
    if names != _KEYS[kind] and not (kind == _COMPOSED and {"events"} <= names <= _KEYS[kind]):
        what = f"an event of kind {kind!r} has other keys"
        raise SpecError(what, "event", "correct the file it comes from")
    if kind != _COMPOSED:
        return _KINDS[kind](**values)
    uncovered: tuple[Uncovered, ...] | None = None
    if values.get("uncovered") is not None:
        try:
            listed = _read_list("uncovered", values["uncovered"])
            uncovered = tuple(Uncovered(**each) for each in listed)
        except TypeError:
            expected = "a list of samples, each with a fraction, a fate and a name"
            raise _wrong("uncovered", expected) from None
    return Composed(
        events=tuple(map(from_dict, _read_list("events", values["events"]))),
        unit=values.get("unit"),
        uncovered=uncovered,
        without_epsilon=_read_list("without_epsilon", values.get("without_epsilon", ())),
        series=Series.from_dict(values.get(KEY)),
    )


def _read_list(name: str, listed: object) -> tuple[Any, ...]:
    if not isinstance(listed, list | tuple):
        raise _wrong(name, "a list")
    return tuple(listed)


def central_from_dict(data: Mapping[str, Any]) -> CentralEvent:
    """Return the event of central noise that a mapping from `to_dict` holds."""
    event = from_dict(data)
    if not isinstance(event, DiscreteGaussian | DiscreteLaplace):
        raise _wrong("event", "of central noise")
    return event


def _wrong(name: str, expected: str) -> SpecError:
    whose = "an event" if name == "event" else f"the event's {name}"
    return SpecError(f"{whose} must be {expected}", "event")


def _check_positive(name: str, value: object) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    number = float(value) if is_number else math.nan  # type: ignore[arg-type]  # it is a number
    if not 0.0 < number < math.inf:
        raise _wrong(name, "a positive, finite number")


def _check_whole(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise _wrong(name, "a whole number of at least 1")


def _check_unit(unit: object) -> None:
    if not isinstance(unit, str) or not (unit == "row" or unit.startswith("column ")):
        raise _wrong("unit", "'row' or 'column NAME'")


def _check_adjacency(value: object) -> None:
    if value not in get_args(Adjacency):
        raise _wrong("adjacency", " or ".join(get_args(Adjacency)))
