"""Events, what a mechanism draws, and their cost: the least ε that can be proved for a δ, rounded against the releaser.

Three bounds hold for every composition, and the smallest is given: the sum of the pure ε;
zero-concentrated privacy; and the privacy loss distribution (PLD) of dp_accounting, pessimistic
throughout (docs/explanation/math.md, Composition).
"""

from __future__ import annotations

import functools
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, fields, replace
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from fractions import Fraction
from typing import Any, Literal, Protocol, TypeGuard, get_args

from dpdask.arrays import freeze_class
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

Fate = Literal["held out", "republished"]


@freeze_class
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
            what = "an event describes the rows that it leaves out incorrectly"
            raise SpecError(what, "event", "give a fraction in (0, 1), their fate and a name")


KEY = "series"


@freeze_class
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
            what = "an event's series must have an id, a release, a previous digest and a head"
            raise SpecError(what, "event")
        return cls(**data)


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


FORMAT = 1

Adjacency = Literal["replace-one", "add-remove"]


@freeze_class
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


@freeze_class
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


@freeze_class
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


@freeze_class
class KeySelection:
    """Of the keys that occur in a column, those were listed whose noisy sum of the weights of its units reached `noise.find_threshold`, with these sums.

    Notes
    -----
    A key of one unit alone is a key of no unit in the neighbouring table, where it is not listed:
    that happens with probability at most δ₀ for all keys of a unit together, under replace-one
    too, where each of the two tables has such keys. Whatever else happens differs by the noise of
    sums that are positive in both tables. So a selection is dominated by its noise beside a
    mechanism that fails with probability δ₀: where the noise costs (ε, δ), both cost at most
    (ε, 1 - (1 - δ)(1 - δ₀)) (Wilson et al., Differentially private SQL with bounded user
    contribution, 2020; Desfontaines, Voss, Gipson and Mandayam, Differentially private partition
    selection, 2022).
    """

    noise: DiscreteLaplace | DiscreteGaussian  # of the sums of all keys
    keys: int  # how many keys of the column a unit has at most
    delta: float  # δ₀, in (0, 1)
    # What a unit with so many keys weighs in each; one with fewer weighs more (`noise.weigh_keys`).
    # None: every unit weighs 1.
    weight: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.noise, DiscreteLaplace | DiscreteGaussian):
            raise _wrong("noise", "an event of central noise")
        _check_whole("keys", self.keys)
        _check_whole("weight", 1 if self.weight is None else self.weight)
        _check_positive("delta", self.delta)
        if self.delta >= 1:
            raise _wrong("delta", "below 1")

    @property
    def adjacency(self) -> Adjacency:
        """How the tables differ that its noise compares."""
        return self.noise.adjacency


@freeze_class
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
Atom = LocalRelease | DiscreteLaplace | DiscreteGaussian
Leaf = Atom | KeySelection
Event = LocalRelease | DiscreteLaplace | DiscreteGaussian | KeySelection | Composed

_KINDS: dict[str, type[Leaf]] = {
    "local-release": LocalRelease,
    "discrete-laplace": DiscreteLaplace,
    "discrete-gaussian": DiscreteGaussian,
    "key-selection": KeySelection,
}
_NAMES = {kind: name for name, kind in _KINDS.items()}
_COMPOSED = "composed"
_KEYS = {
    kind: {field.name for field in fields(_KINDS.get(kind, Composed))}
    for kind in (*_KINDS, _COMPOSED)
}


def leaves(event: Event) -> Iterator[Leaf]:
    """Return the events inside an event that are not compositions, in order."""
    if isinstance(event, Composed):
        for inner in event.events:
            yield from leaves(inner)
    else:
        yield event


def noises(event: Event) -> Iterator[CentralEvent]:
    """Yield the central noise of an event, in order."""
    for leaf in leaves(event):
        if not isinstance(leaf, LocalRelease):
            yield leaf.noise if isinstance(leaf, KeySelection) else leaf


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
    rest = {"noise": to_dict(event.noise)} if isinstance(event, KeySelection) else {}
    written = {key: value for key, value in asdict(event).items() if value is not None}
    return {"format": FORMAT, "kind": _NAMES[type(event)], **written, **rest}


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
    names = set(values) | ({"weight"} if kind == _NAMES[KeySelection] else set())
    if names != _KEYS[kind] and not (kind == _COMPOSED and {"events"} <= names <= _KEYS[kind]):
        what = f"an event of kind {kind!r} has other keys"
        raise SpecError(what, "event", "correct the file it comes from")
    if kind == _NAMES[KeySelection]:
        values["noise"] = central_from_dict(values["noise"])
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


_GRID = 1e-4  # the PLD's step relative to ε: connected dots err by its square
_MIN_STEP = 1e-7
_TAIL = 1e-7  # mass that the PLD may cut off its tails (and count as infinite loss), relative to δ
_DOUBLE_ERROR = (
    1e-15  # of δ, for each composition: rounding of the fast Fourier transforms, several times over
)
_SAFETY = 1e-9  # relative, on results that went through floating-point logarithms
# r², the part of σ² that turns a continuous Gaussian into a discrete one, and what it adds to ε for
# each count that changes, above 4·2·exp(-2π²r²); the latter of noise on a fine lattice
_SMOOTHING, _FINE_SMOOTHING, FINE = (2.0, 1e-16), (8.0, 1e-60), 2.0**10
_EXACT_SIGMA = 64.0  # below it a discrete Gaussian's own PLD is made; above it, one has 23 σ points and the bound is as good
_MAX_ROUGH = 1e3  # too little noise for a distribution
_TOLERANCE = 1e-7
_BITS = 25  # of a scale that is searched


def epsilon(events: Event | Iterable[Event], delta: float) -> float:
    """Return an upper bound on the ε, for a δ, of all events together.

    Parameters
    ----------
    events
        What happened, or will happen. All must hold for one adjacency; a `LocalRelease` is of
        replace-one.

    Returns
    -------
    float
        Non-negative; infinity if nothing finite can be proved, as for Gaussian noise at δ = 0.

    Privacy
    -------
    Sensitivities are the events' own, for the adjacency that they name; nothing is scaled here.
    (dp_accounting's PLDAccountant takes no Laplace event under replace-one, so its distributions
    are composed directly.)

    Notes
    -----
    *Discrete Laplace*, L1 sensitivity s: noise independent per count, shifts summing to s, is
    dominated by one count shifted by s (the convention of dp_accounting's DiscreteLaplaceDpEvent;
    the tests check it). *Local release*: any ε-private randomiser is post-processing of randomised
    response (Kairouz, Oh and Viswanath), whose PLD is that of discrete Laplace noise of scale 1/ε
    and sensitivity 1. *Discrete Gaussian*, L2 sensitivity s: dp_accounting has no event for it,
    only the PLD of whole shifts of one count. With s² < 4, counts move by at most 1 each, so at
    most ⌊s²⌋ unit shifts happen, and their composition is exact. Otherwise a continuous Gaussian of
    variance σ² - r² stands in, r² = 2 (8 where s ≥ 2¹⁰): drawn, and then rounded to the whole number z with
    probability ∝ exp(-(z-x)²/2r²), it has at every z the discrete Gaussian's probability up to a
    factor of (1+η)/(1-η), η = 2·exp(-2π²r²) (Poisson summation; Peikert, An efficient and parallel
    Gaussian sampler for lattices, 2010, Theorem 3.1). Rounding is post-processing; the factors,
    once for each changed count and hypothesis, add less than 1e-16 to ε for each changed count. For
    every σ the discrete Gaussian is s²/2σ²-concentrated (Canonne, Kamath and Steinke 2020, Theorem
    14), which bounds what the stand-in cannot. *Not a filter*: a PLD composes mechanisms that may
    see earlier outputs, but whose events are fixed beforehand. If ε and noise of later jobs are
    chosen after looking at earlier releases, only δ = 0 (sums) or a concentrated bound holds.

    References
    ----------
    Doroshenko et al., Connect the dots: tighter discrete approximations of privacy loss
    distributions (2022); Bun and Steinke, Concentrated differential privacy (2016), Proposition 1.3
    and Lemma 2.3.
    """
    listed = [events] if isinstance(events, Event) else list(events)
    atoms, left = _pay_selections((leaf for event in listed for leaf in leaves(event)), delta)
    return math.inf if left < 0 <= delta else _epsilon(tuple(atoms), left)


def _pay_selections(listed: Iterable[Leaf], delta: float) -> tuple[list[Atom], float]:
    """Return the noise that is composed, and the δ that selections of keys leave for it, rounded down; below 0 if none is."""
    atoms, lost = list[Atom](), Fraction(0)
    for leaf in listed:
        if isinstance(leaf, KeySelection):
            atoms.append(leaf.noise)
            lost += Fraction(leaf.delta)
        else:
            atoms.append(leaf)
    # a δ that cannot be is refused with the noise
    return atoms, round_down(Fraction(delta) - lost) if lost and delta >= 0 else delta


def compose(charges: Iterable[Charged], delta_limit: float) -> float:
    """Return an upper bound on the ε, at δ = `delta_limit`, of everything charged to a dataset: the ledger's composer.

    Parameters
    ----------
    charges
        The charges of one dataset. A charge with an event costs as much as the event; one without
        is taken as any (epsilon, delta)-private mechanism.

    Notes
    -----
    Later jobs may be chosen after seeing earlier releases, so only bounds hold that are a filter: a
    plain sum of the declared ε, if the sum of δ stays within half of the limit and no event costs
    more than its charge declares, and a concentrated bound of the events at the other half. A run
    may end under either bound, depending on what was released, and what the two leave uncovered
    adds up. A single charge needs no half for another one. A concentrated bound knows no δ of
    charges without events, so with such charges only the plain sum is left.

    Sums of ε and δ hold for jobs that are chosen one after the other, as long as their sums stay
    below fixed limits (Rogers, Roth, Ullman and Vadhan, Privacy odometers and filters, 2016).
    """
    found: list[Leaf] = []
    listed = list(charges)
    named = sorted(
        set().union(*(units(from_dict(charge.event)) for charge in listed if charge.event))
    )
    if len(named) > 1:
        raise _units_differ()
    unit = named[0] if named else "row"
    part = Fraction(delta_limit) / min(2, max(1, len(listed)))
    unknown = False
    for charge in listed:
        priced = list(leaves(from_dict(charge.event))) if charge.event else []
        if priced:
            found += priced
        else:  # without an event, only the declared numbers are known
            found += [LocalRelease(epsilon=charge.epsilon, unit=unit)] if charge.epsilon else []
            unknown |= charge.delta > 0
    atoms, delta = _pay_selections(found, round_down(part))
    unknown |= delta < 0
    counted = _count(atoms, max(delta, 0.0))
    pure = _pure(counted)
    bound = (
        math.inf
        if unknown
        else pure
        if delta == 0 or pure == 0
        else min(pure, _bound_concentrated(counted, delta))
    )
    plain = round_up_sum(charge.epsilon for charge in listed)
    if (
        plain < bound
        and sum(Fraction(charge.delta) for charge in listed) <= part
        and all(map(_is_believed, listed))
    ):
        return plain
    return bound


def _is_believed(charge: Charged) -> bool:
    """Return whether a charge's declared ε and δ cover the cost of its event."""
    if not charge.event or not list(leaves(from_dict(charge.event))):
        return True
    return _price(json.dumps(charge.event, sort_keys=True), charge.delta) <= charge.epsilon


@functools.lru_cache(maxsize=256)
def _price(event: str, delta: float) -> float:
    return epsilon(from_dict(json.loads(event)), delta)


def _units_differ() -> SpecError:
    return SpecError(
        "charges for different units cannot be added up",
        "accountant",
        "charge a dataset of its own for each privacy.unit",
    )


def scale_events(
    events: Iterable[CentralEvent], epsilon: float, delta: float
) -> tuple[CentralEvent, ...]:
    """Return events with all their noise multiplied by nearly the least common factor at which they cost at most `epsilon` at `delta`.

    Parameters
    ----------
    events
        At least one; their scales say how large the noises are relative to each other.
    """
    listed = list(events)
    if not 0 < epsilon < math.inf:
        raise SpecError("epsilon must be positive and finite", "noise scale")
    if delta <= 0 and any(isinstance(event, DiscreteGaussian) for event in listed):
        hint = "give one, or take Laplace noise"
        raise SpecError("Gaussian noise needs a delta above 0", "noise scale", hint)

    def times(factor: float) -> tuple[CentralEvent, ...]:
        return tuple(
            replace(event, sigma=event.sigma * factor)
            if isinstance(event, DiscreteGaussian)
            else replace(event, scale=event.scale * factor)
            for event in listed
        )

    def cost(factor: float) -> float:
        return _epsilon(times(factor), delta)

    rates = [(float(_rate(event)), event.count) for event in listed]
    start = sum(rate * count for rate, count in rates) / epsilon
    if delta > 0:
        tail = -math.log(delta)
        rho = (epsilon / (math.sqrt(tail + epsilon) + math.sqrt(tail))) ** 2
        concentrated = math.sqrt(
            sum(rate * rate * count for rate, count in rates) / (2.0 * rho)
        ) * (1.0 + 1e-6)
        gaussian = any(isinstance(event, DiscreteGaussian) for event in listed)
        start = concentrated if gaussian else min(start, concentrated)
    return times(_least_scale(cost, epsilon, start, exact=delta == 0))


def _least_scale(
    cost: Callable[[float], float], epsilon: float, start: float, *, exact: bool
) -> float:
    """Return a scale of 25 significant bits that costs at most ε, while the next smaller one costs more; `exact` if the start is the least.

    Costs differ between processors in their last bits. Only scales of few bits are tried, so that
    all processors find the same one.
    """
    if exact:
        high = start
        while cost(high) > epsilon:
            high = math.nextafter(high * (1.0 + 1e-12), math.inf)
        return high
    high = _shorten(start)
    while cost(high) > epsilon:
        high = _shorten(high, 1)
    low = _shorten(high / 1.25)
    while cost(low) <= epsilon:
        low, high = _shorten(low / 1.25), low
    # cost is nearly a power of the scale
    points = [(math.log(scale), _compare(cost(scale), epsilon)) for scale in (low, high)]
    number = 0
    while _shorten(low, 1) < high:
        number += 1
        (x0, y0), (x1, y1) = points
        guess = x1 - y1 * (x1 - x0) / (y1 - y0) if y1 != y0 else math.inf
        # beyond the root, so that it is soon between two near scales
        guess += math.copysign(_TOLERANCE / 4.0, y1 or -1.0)
        if not math.log(low) < guess < math.log(high) or number % 4 == 0:
            guess = (math.log(low) + math.log(high)) / 2.0
        scale = min(max(_shorten(math.exp(guess)), _shorten(low, 1)), _shorten(high, -1))
        found = cost(scale)
        points = [points[1], (math.log(scale), _compare(found, epsilon))]
        low, high = (low, scale) if found <= epsilon else (scale, high)
    return high


def _shorten(scale: float, steps: int = 0) -> float:
    """Return the nearest number of 25 significant bits, or the one so many steps after it."""
    mantissa, exponent = math.frexp(scale)
    whole = round(math.ldexp(mantissa, _BITS)) + steps
    if whole < 2 ** (_BITS - 1):  # below a power of two, numbers are twice as dense
        whole, exponent = whole + 2 ** (_BITS - 1), exponent - 1
    return math.ldexp(whole, exponent - _BITS)


def _compare(cost: float, epsilon: float) -> float:
    """Return log(cost / ε), of a cost of 0 a number that a secant only leads away from."""
    return math.log(cost / epsilon) if cost > 0.0 else -1e3


def _count(atoms: Iterable[Atom], delta: float) -> Counter[Atom]:
    """Return how often each single event happens, after checking that they can be composed at a delta."""
    if not 0 <= delta < 1:
        raise SpecError("delta must be in [0, 1)", "accountant")
    local = "replace-one"
    if len({local if isinstance(each, LocalRelease) else each.adjacency for each in atoms}) > 1:
        raise SpecError(
            "releases of the adjacencies replace-one and add-remove cannot be added up",
            "privacy.adjacency",
            "give all jobs of a dataset in the ledger the same one, or give this job another dataset there",
        )
    if len({atom.unit for atom in atoms if isinstance(atom, LocalRelease)}) > 1:
        raise _units_differ()
    counted: Counter[Atom] = Counter()
    for atom in atoms:
        if isinstance(atom, LocalRelease):
            counted[LocalRelease(epsilon=atom.epsilon)] += atom.n
        else:
            counted[replace(atom, count=1)] += atom.count
    return counted


@functools.lru_cache(maxsize=1024)
def _epsilon(atoms: tuple[Atom, ...], delta: float) -> float:
    counted = _count(atoms, delta)
    pure = _pure(counted)
    if delta == 0 or pure == 0:
        return pure
    closed = min(pure, _bound_concentrated(counted, delta))
    return min(closed, _by_pld(counted, delta, closed))


def _rate(atom: Atom) -> Fraction:
    """Return the pure ε of an event; of Gaussian noise its sensitivity over its σ."""
    if isinstance(atom, LocalRelease):
        return Fraction(atom.epsilon)
    scale = atom.sigma if isinstance(atom, DiscreteGaussian) else atom.scale
    return Fraction(atom.sensitivity) / Fraction(scale)


def _pure(counted: Mapping[Atom, int]) -> float:
    """Return the sum of the pure ε, rounded up; infinity if there is Gaussian noise."""
    if any(isinstance(atom, DiscreteGaussian) for atom in counted):
        return math.inf
    return round_up(sum((n * _rate(atom) for atom, n in counted.items()), Fraction(0)))


def _bound_concentrated(counted: Mapping[Atom, int], delta: float) -> float:
    """Return ρ + 2·√(ρ·log(1/δ)): ε-privacy is ε²/2-concentrated, the discrete Gaussian s²/2σ²."""
    rho = sum(n * min(float(_rate(atom)), 1e150) ** 2 / 2.0 for atom, n in counted.items())
    return (rho + 2.0 * math.sqrt(rho * -math.log(delta))) * (1.0 + _SAFETY)


def _by_pld(counted: Mapping[Atom, int], delta: float, rough: float) -> float:
    """Return ε at δ by composed privacy loss distributions; infinity where doubles cannot resolve δ or noise is too small."""
    smoothed = [atom for atom in counted if _is_smoothed(atom)]
    convolved = {
        atom: 1 if atom in smoothed else n * _unit_shifts(atom) for atom, n in counted.items()
    }
    resolved = delta - _DOUBLE_ERROR * (len(counted) + sum(convolved.values()))
    too_little = any(atom.sigma**2 <= _smoothing(atom)[0] for atom in smoothed)
    if resolved <= 0 or not rough < _MAX_ROUGH or too_little:
        return math.inf
    # it imports most of scipy, which only a composition needs
    from dp_accounting.pld import privacy_loss_distribution as pld  # type: ignore[import-untyped]  # no types

    step = max(_MIN_STEP, _GRID * rough)
    how: dict[str, Any] = {"value_discretization_interval": step, "use_connect_dots": True}
    tail = _TAIL * delta / (2 * len(counted))
    total, slack = pld.identity(value_discretization_interval=step), 0.0
    for atom, n in counted.items():
        if _is_smoothed(atom):
            sensitivity = atom.sensitivity * math.sqrt(n)
            smoothing, error = _smoothing(atom)
            deviation = math.sqrt(atom.sigma**2 - smoothing) / sensitivity * (1.0 - _SAFETY)
            part = pld.from_gaussian_mechanism(deviation, **how)
            slack += error * _unit_shifts(atom) * n
        elif isinstance(atom, DiscreteGaussian):
            part = pld.from_discrete_gaussian_mechanism(atom.sigma, 1, **how)
        elif isinstance(atom, LocalRelease):
            part = pld.from_discrete_laplace_mechanism(atom.epsilon, 1, **how)
        else:
            rate = math.nextafter(1.0 / atom.scale, math.inf)
            part = pld.from_discrete_laplace_mechanism(rate, atom.sensitivity, **how)
        if convolved[atom] > 1:
            part = part.self_compose(convolved[atom], tail_mass_truncation=tail)
        total = total.compose(part, tail_mass_truncation=tail)
    return float(total.get_epsilon_for_delta(resolved * (1.0 - slack))) * (1.0 + _SAFETY) + slack


def _unit_shifts(atom: Atom) -> int:
    """Return the largest squared L2 change of whole numbers that a Gaussian event allows; 1 for another event."""
    return (
        math.floor(atom.sensitivity**2 * (1.0 + 1e-9)) if isinstance(atom, DiscreteGaussian) else 1
    )


def _smoothing(atom: DiscreteGaussian) -> tuple[float, float]:
    """Return r² and what it adds to ε for each count that changes."""
    return _FINE_SMOOTHING if atom.sensitivity >= FINE else _SMOOTHING


def _is_smoothed(atom: Atom) -> TypeGuard[DiscreteGaussian]:
    return isinstance(atom, DiscreteGaussian) and (
        _unit_shifts(atom) >= 4 or atom.sigma > _EXACT_SIGMA
    )
