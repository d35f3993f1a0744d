"""Series: releases of disjoint rows by one fitted release, which compose in parallel (docs/explanation/math.md, Disjoint rows)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from hashlib import blake2b
from typing import Any, Protocol, TypeVar

from dpdask.errors import SpecError

_PERSON = b"dpdask series"
KEY = "series"


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Where one release stands in a series.

    Attributes
    ----------
    id
        Names the series: a digest of its job and its first run.
    release
        SHA-256 of the fitted release that all releases share; empty in the first, which has none yet.
    previous
        A keyed digest of the fragments that were released before; empty in the first.
    head
        The same digest with this release's fragments.

    Raises
    ------
    SpecError
        If one of them is not a text.
    """

    id: str
    release: str = ""
    previous: str = ""
    head: str

    def __post_init__(self) -> None:
        if not all(isinstance(value, str) for value in asdict(self).values()):
            raise SpecError("an event's series must be a mapping of texts", "event")

    @classmethod
    def from_dict(cls, data: object) -> Series | None:
        """Return what stands under `series` in an event; None if nothing does.

        Raises
        ------
        SpecError
            If it is something else.
        """
        if data is None:
            return None
        if not isinstance(data, Mapping) or set(data) != {field.name for field in fields(cls)}:
            raise SpecError("an event's series must have an id, a release, a previous digest and a head", "event")
        return cls(**data)

    def to_dict(self) -> dict[str, str]:
        """Return the attributes as a mapping that JSON can hold."""
        return asdict(self)


def name_series(job: str, run_id: str) -> str:
    """Return the id of a series.

    Parameters
    ----------
    job
        The job's digest.
    run_id
        The name of its first run.
    """
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
    previous
        The digest before; empty if there is none.
    fragments
        The ids of the further fragments.
    """
    return blake2b("\n".join([previous, *sorted(fragments)]).encode(), key=salt, person=_PERSON, digest_size=32).hexdigest()


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
        Each charge of a dataset in the order of the charging, with the digest of the fitted release that its run recorded (or an
        empty text).

    Notes
    -----
    A release goes on with its series if its digest of the fragments released before is the newest one, the fitted release is the
    same, the unit is the row, and its events are among those of the last charge of the series that counts in full.
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
            segments[series.id] = _Segment(full=segment.full, release=segment.release, head=series.head)
            continue
        counted.append(charge)
        segments[series.id] = _Segment(full=charge, release=series.release or recorded, head=series.head)
    return counted


def _goes_on(charge: Charged, series: Series, segment: _Segment) -> bool:
    same = series.previous == segment.head != "" and series.release == segment.release != ""
    covered = charge.epsilon <= segment.full.epsilon and charge.delta <= segment.full.delta
    events, paid = list(_leaves(charge.event)), list(_leaves(segment.full.event))
    by_row = all(event.get("unit") == "row" for event in (charge.event, segment.full.event, *(leaf for leaf in events if "unit" in leaf)))
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
