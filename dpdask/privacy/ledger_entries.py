"""The contents of a ledger: charges, what they cover and which of them count, the entries of a dataset's chain, and the balance."""

from __future__ import annotations

import json
import math
import sys
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, field, replace
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal, localcontext
from fractions import Fraction
from hashlib import blake2b, sha256
from typing import Any, Literal, get_args

from dpdask.arrays import freeze_class
from dpdask.errors import DataError, SpecError
from dpdask.privacy.events import (
    KEY,
    Fate,
    Series,
    add_cost,
    round_down,
    round_up,
    round_up_sum,
)

Kind = Literal[
    "intend", "draw", "commit", "void", "refuse", "import", "strict", "hold-out", "limit"
]
NO_RUN = ("strict", "hold-out", "limit")
_RELEASE = "release"  # the key under which an event holds the digest of what was drawn
_NAMES = "names"  # and that under which it holds how its run is called
_HOLD_RELEASE = ("draw", "commit", "hold-out", "import")
MOST_FURTHER = 100  # of which it is told how many there is room for
_UNKNOWN = "unknown"  # the fitted release of a run that is known by its card alone


def chain_error(what: str) -> DataError:
    """Return the error of a broken chain."""
    return DataError(
        f"the chain is broken: {what}",
        None,
        "release nothing until the ledger is restored from a backup",
    )


def event_text(
    event: Mapping[str, Any], release: str = "", names: Mapping[str, str] | None = None
) -> str:
    """Return an event as JSON, with the digest of the release and the names of its run, if there are any.

    Parameters
    ----------
    release
        SHA-256 of the fitted release; empty if there is none yet.
    """
    rest = {_RELEASE: release, _NAMES: dict(names or {})}
    try:
        return json.dumps(
            dict(event) | {key: value for key, value in rest.items() if value},
            sort_keys=True,
            separators=(",", ":"),
            allow_nan=False,
        )
    except (TypeError, ValueError, RecursionError):
        raise SpecError(
            "an event must be a mapping that JSON can hold",
            "event",
            "use texts, finite numbers, lists and mappings of them",
        ) from None


def say_further(n: int) -> str:
    """Return how many further releases there is room for, in words."""
    return "no" if n == 0 else f"at least {n}" if n == MOST_FURTHER else str(n)


def check_number(value: float, where: str, below: float) -> float:
    """Return a number as a float."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < below:
        raise SpecError(
            "a number is out of its range",
            where,
            "use 0 ≤ δ < 1" if below == 1 else "use a finite ε, not below 0",
        )
    return float(value) + 0.0  # -0 becomes 0, as databases return it


@freeze_class
class Charge:
    """What one run costs.

    Parameters
    ----------
    event
        What the composer needs to know of the mechanism, as JSON with its own version; public
        parameters only, never data.
    names
        The `job`, the `mechanism` and the `output` of the run, for those who read the ledger. They
        are no part of the price: a charge under other names is the same charge.
    """

    epsilon: float
    delta: float = 0.0
    event: Mapping[str, Any] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "epsilon", check_number(self.epsilon, "epsilon", sys.float_info.max)
        )
        object.__setattr__(self, "delta", check_number(self.delta, "delta", 1.0))
        # a copy, equal to what the ledger returns
        object.__setattr__(self, "event", json.loads(event_text(self.event)))

    @property
    def alone(self) -> Charge:
        """The same charge outside any series: it always counts in full."""
        event = {name: value for name, value in self.event.items() if name != KEY}
        return replace(self, event=event)


FREE = Charge(epsilon=0.0)

Compose = Callable[[Sequence[Charge], float], float]


def sum_charges(charges: Sequence[Charge], delta_limit: float) -> float:
    """Return the total ε of charges by basic composition, rounded up; infinite if their total δ is above the limit."""
    if sum(Fraction(charge.delta) for charge in charges) > Fraction(delta_limit):
        return math.inf
    return round_up_sum(charge.epsilon for charge in charges)


@freeze_class
class Entry:
    """One link of a dataset's chain."""

    sequence: int  # 1, 2, 3, … within the dataset
    # `intend`: noise may be drawn from now on. `draw`: it was drawn, and the fitted release is
    # kept. `commit`: the run was released. `void`: no noise was drawn or seen. `refuse`: the run
    # read rows and then refused them; the charge is what the refusal costs. `import`: a ledger
    # that was restored had lost the run, and its card told of it. `strict`: from now on refusals are
    # charged. `hold-out`: the dataset's hold-out was drawn. `limit`: the charge is the new limit.
    kind: Kind
    run_id: str
    charge: Charge  # what the run costs; the same in all its entries, until a void or a refusal
    recorded: str
    # SHA-256 of the entry before (for the first: of the dataset's limits), and of this one with it;
    # hexadecimal.
    previous: str
    digest: str
    # For a draw and a commit, the digest of the fitted release, so that a run does not draw its
    # noise again; for a hold-out, the digest of its key; for an import, the digest of the entry that
    # the card names.
    release: str = ""

    @property
    def counts(self) -> bool:
        """Whether the entry's charge counts as spent while it is the newest entry of its run."""
        return self.kind in ("intend", "draw", "commit", "import") or (
            self.kind == "refuse" and self.charge != FREE
        )

    @property
    def fitted(self) -> str:
        """The digest of the fitted release that the run recorded; `unknown` of an import, which no card tells."""
        return _UNKNOWN if self.kind == "import" else self.release


@freeze_class
class Balance:
    """How much of a dataset's budget is spent, by all runs that were intended and not voided, or refused at a charge."""

    epsilon_limit: float
    delta_limit: float
    # ε of all the runs together at δ = `delta_limit`, from the composer; infinite if no ε is
    # enough.
    epsilon_spent: float
    delta_spent: float  # the sum of their δ, rounded up
    epsilon_left: float  # the limits less the spent amounts, rounded down, at least 0
    delta_left: float
    n_runs: int
    n_refused: int  # how many runs read rows and refused them
    n_refusals_charged: int
    coverage: Coverage  # the rows that the runs together leave without ε

    def tell_shortage(self, charge: Charge, total: float, *, mixed: bool) -> tuple[str, str]:
        """Return why a charge does not fit, and a hint.

        Parameters
        ----------
        mixed
            Whether some of these charges have a δ and some have none.
        """
        asked = f"the run asks for ε {charge.epsilon!r} and δ {charge.delta!r}"
        limits = f"ε {self.epsilon_limit!r} and δ {self.delta_limit!r}"
        left = f"ε {_write(self.epsilon_left, ROUND_FLOOR)} and δ {_write(self.delta_left, ROUND_FLOOR)} are left of {limits}"
        if (
            charge.epsilon > self.epsilon_left
            or charge.delta > self.delta_left
            or not total < math.inf
        ):
            return f"{asked}; {left}", f"ask for less {'ε' if total < math.inf else 'δ'}"
        since = f"plain sums hold for at most half of the dataset's δ, and {'charges with and without δ' if mixed else 'these charges'} add up badly"
        hint = (
            "use `delta: 0`, or a dataset of its own"
            if mixed and charge.delta
            else "use a dataset of its own"
        )
        return (
            f"{asked}; {left}, but the total would be ε {_write(total, ROUND_CEILING)}, since {since}",
            hint,
        )


@freeze_class
class Position:
    """Where a run stands in its dataset's ledger, as the chain was when the run was charged."""

    entry: Entry
    # What it and the earlier runs cost together; refused runs are left out, since a refusal depends
    # on the rows.
    epsilon: float
    delta: float
    epsilon_limit: float
    delta_limit: float
    earlier: tuple[Entry, ...]  # the newest entries of the earlier runs, oldest run first


@freeze_class
class Book:
    """A dataset's ledger as one transaction reads it, after checking its chain."""

    dataset: str
    created: str  # in UTC (ISO 8601)
    epsilon: float  # the limits
    delta: float
    entries: tuple[Entry, ...]  # oldest first
    # The digest at the end of the chain. Keep a copy elsewhere: a user who can write the database
    # can write a whole new chain.
    head: str
    compose: Compose  # of the ledger
    # What `init` gave as the limits; `limit` entries have changed them since.
    declared: Charge = FREE

    def until(self, sequence: int) -> Book:
        """Return the book as it was after so many entries."""
        entries = self.entries[:sequence]
        limits = find_limits(self.declared, entries)
        return replace(self, entries=entries, epsilon=limits.epsilon, delta=limits.delta)

    def was_price(self, charge: Charge, paid: Charge) -> bool:
        """Return whether a run that paid something paid for this charge, or for its refusal under any limit that was in force."""
        changes = (entry.sequence for entry in self.entries if entry.kind == "limit")
        books = (self, *(self.until(sequence - 1) for sequence in changes))
        return paid == charge or any(paid == book.price_refusal(charge) for book in books)

    def holds(self, run_id: str, digest: str) -> bool:
        """Return whether a run's charge is in the chain as the entry with this digest, which seals all entries before it."""
        charged = any(
            entry.digest == digest and entry.run_id == run_id and entry.kind == "intend"
            for entry in self.entries
        )
        return charged and run_id in self.standing

    @property
    def strict(self) -> bool:
        """Whether a refusal after rows were read is charged."""
        return any(entry.kind == "strict" for entry in self.entries)

    @property
    def latest(self) -> dict[str, Entry]:
        """Each run's newest entry."""
        return {entry.run_id: entry for entry in self.entries if entry.kind not in NO_RUN}

    @property
    def standing(self) -> dict[str, Entry]:
        """The newest entry of each run that counts as spent: all except those voided, or refused without a charge."""
        return {run_id: entry for run_id, entry in self.latest.items() if entry.counts}

    def find_kind(self, run_id: str) -> Kind | None:
        """Return the kind of a run's newest entry, or None if it has none."""
        return self.latest[run_id].kind if run_id in self.latest else None

    def count(self, plus: Sequence[Charge] = (), *, without: str = "") -> list[Charge]:
        """Return the charges that are composed: those that count as spent, except of releases that go on with a series."""
        spent = [
            (entry.charge, entry.fitted)
            for run_id, entry in self.standing.items()
            if run_id != without
        ]
        return count_series([*spent, *((charge, "") for charge in plus)])

    def count_if_refused(self, plus: Charge) -> tuple[list[Charge], int]:
        """Return the charges if a further run, which costs `plus`, and all unfinished ones were refused in a strict dataset; and their number."""
        unfinished = [entry for entry in self.standing.values() if entry.kind in ("intend", "draw")]
        ended = [
            (entry.charge, entry.fitted)
            for entry in self.standing.values()
            if entry.kind not in ("intend", "draw")
        ]
        refused = [
            (self.price_refusal(charge.alone), "")
            for charge in (*(entry.charge for entry in unfinished), plus)
        ]
        return count_series([*ended, *refused]), len(unfinished)

    def count_further(self, like: Charge, plus: Sequence[Charge] = ()) -> int:
        """Return how many further charges like one fit one after the other, behind `plus`, as the ledger composes them; at most 100."""
        own = like.alone

        def exceeds(n: int) -> bool:
            before = [*plus, *[own] * (n - 1)]
            tried = [self.count([*before, own])]
            if self.strict:
                tried.append([*before, *self.count_if_refused(own)[0]])
            return not all(self.compose(each, self.delta) <= self.epsilon for each in tried)

        return bisect_left(range(1, MOST_FURTHER + 1), True, key=exceeds)

    @property
    def further(self) -> int | None:
        """How many further releases like the last one fit, at most 100; None before the first, and of a series, whose new rows may cost nothing more."""
        released = (each.charge for each in self.standing.values() if each.kind != "refuse")
        *_, last = (None, *released)
        return None if last is None or KEY in last.event else self.count_further(last)

    @property
    def n_refusals_charged(self) -> int:
        """How many of the refused runs stay charged."""
        return sum(entry.kind == "refuse" for entry in self.standing.values())

    @property
    def n_refused(self) -> int:
        """How many runs read rows and refused them."""
        return sum(entry.kind == "refuse" for entry in self.latest.values())

    def coverage(self, plus: Iterable[Charge] = ()) -> Coverage:
        """Return the rows without ε: those of the runs that count and of further charges, together."""
        return coverage_of(
            charge.event for charge in [*(entry.charge for entry in self.standing.values()), *plus]
        )

    def coverage_until(self, run_id: str) -> Coverage:
        """Return the rows without ε: those of a run and the runs intended before it, together; later runs do not change it."""
        intended = [entry for entry in self.entries if entry.kind in ("intend", "import")]
        last = max((entry.sequence for entry in intended if entry.run_id == run_id), default=0)
        return coverage_of(entry.charge.event for entry in intended if entry.sequence <= last)

    def find_position(self, run_id: str) -> Position | None:
        """Return where a run stands among the releases that were committed before it was charged; None if it is not charged.

        The chain counts as it was when the run was charged, so later entries do not change the answer.
        """
        own = next(
            (
                entry
                for entry in reversed(self.entries)
                if entry.kind == "intend" and entry.run_id == run_id
            ),
            None,
        )
        if own is None:
            return None
        then = self.until(own.sequence)
        # a run that is charged, and not committed, may be refused yet: cards of different times would tell that it was
        released = [
            entry
            for entry in then.standing.values()
            if entry.kind in ("commit", "import") or entry.run_id == run_id
        ]
        charges = count_series([(entry.charge, entry.fitted) for entry in released])
        return Position(
            entry=own,
            epsilon=self.compose(charges, then.delta),
            delta=round_up_sum(charge.delta for charge in charges),
            epsilon_limit=then.epsilon,
            delta_limit=then.delta,
            earlier=tuple(entry for entry in released if entry.run_id != run_id),
        )

    def price_refusal(self, charge: Charge) -> Charge:
        """Return what a refusal costs in a strict dataset: at least a hundredth of its ε, else a small ε would buy many exact answers."""
        floor = self.epsilon / 100
        if charge.epsilon >= floor:
            return charge
        # the event costs no more than is declared
        rest = round_down(
            Fraction(floor) - Fraction(charge.epsilon) - 4 * Fraction(math.ulp(floor))
        )
        return Charge(
            epsilon=floor,
            delta=charge.delta,
            event=add_cost(charge.event, rest) if rest > 0.0 else charge.event,
            names=charge.names,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, as the command line prints them."""
        found = {name: getattr(self, name) for name in ("dataset", "created", "strict")}
        entries = [asdict(entry) for entry in self.entries]
        told = {"balance": asdict(self.balance), "further": self.further}
        return {**found, **told, "entries": entries, "head": self.head}

    @property
    def balance(self) -> Balance:
        """The spent and the remaining budget."""
        return self.compute_balance()

    def compute_balance(self, plus: Sequence[Charge] = ()) -> Balance:
        """Return the spent and the remaining budget, with further charges counted in."""
        charges = self.count(plus)
        composed = self.compose(charges, self.delta) if charges else 0.0
        epsilon = math.inf if math.isnan(composed) else composed
        delta = round_up_sum(charge.delta for charge in charges)
        return Balance(
            epsilon_limit=self.epsilon,
            delta_limit=self.delta,
            epsilon_spent=epsilon,
            delta_spent=delta,
            epsilon_left=_left(self.epsilon, epsilon),
            delta_left=_left(self.delta, delta),
            n_runs=len(self.standing) + len(plus),
            n_refused=self.n_refused,
            n_refusals_charged=self.n_refusals_charged,
            coverage=self.coverage(plus),
        )


def find_limits(declared: Charge, entries: Iterable[Entry]) -> Charge:
    """Return the limits of a dataset after some entries: the newest that were set."""
    return next((entry.charge for entry in reversed([*entries]) if entry.kind == "limit"), declared)


def _write(value: float, rounding: str) -> str:
    """Return a number in six digits."""
    with localcontext(prec=6, rounding=rounding):
        return str(+Decimal(value))


def _left(limit: float, spent: float) -> float:
    """Return the rest of a limit, rounded down; 0 if the spent amount is NaN."""
    if not spent < limit:
        return 0.0
    return round_down(Fraction(limit) - Fraction(spent))


def entry_of(row: Mapping[str, Any]) -> Entry:
    """Return the entry in a row of the database."""
    try:
        event = json.loads(row["event"])
        release = event.pop(_RELEASE, "") if row["kind"] in _HOLD_RELEASE else ""
        names = {key: str(name) for key, name in event.pop(_NAMES, {}).items()}
        charge = Charge(epsilon=row["epsilon"], delta=row["delta"], event=event, names=names)
    except (SpecError, ValueError, TypeError, AttributeError):
        raise chain_error(f"the entry {row['sequence']} holds no charge") from None
    if row["kind"] not in get_args(Kind):
        raise chain_error(f"the entry {row['sequence']} is of no known kind")
    rest = {
        key: row[key] for key in ("sequence", "kind", "run_id", "recorded", "previous", "digest")
    }
    return Entry(charge=charge, release=release, **rest)


@freeze_class
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
    one, the fitted release is the same (or one of the two is known by its card alone, which does not
    tell), the unit is the row, and its events are among those of the last charge of the series that
    counts in full.
    """
    counted: list[Charge] = []
    # of each series, the charge that counts in full, the fitted release, and the newest digest
    newest: dict[str, tuple[Charge, str, str]] = {}
    for charge, recorded in charges:
        series = Series.from_dict(charge.event.get(KEY))
        if series is None:
            counted.append(charge)
            continue
        full, release, head = newest.get(series.id, (charge, "", ""))
        fitted = series.release or recorded
        matches = fitted == release != "" or _UNKNOWN in (fitted, release)
        if series.previous == head != "" and matches and _covers(full, charge):
            newest[series.id] = full, release if fitted == _UNKNOWN else fitted, series.head
        else:
            counted.append(charge)
            newest[series.id] = charge, fitted, series.head
    return counted


def _covers(full: Charge, charge: Charge) -> bool:
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


@freeze_class
class Claim:
    """A release that a card tells of, as a ledger would have charged it."""

    dataset: str
    # The name of the release, which is that of its run.
    run_id: str
    # The digest of the entry that charged it; empty where another release's card names it.
    entry: str
    charge: Charge

    def find(self, book: Book) -> str | None:
        """Return the name of the run under which a ledger holds the release; None if it lacks it."""
        if book.holds(self.run_id, self.entry):
            return self.run_id
        named = (run for run in book.standing if run.partition(" ")[0] == self.run_id)
        if not self.entry:
            return next(
                (run for run in named if not self._exceeds(book.standing[run].charge)), None
            )
        for entry in (book.standing[run] for run in named):
            same = (entry.release, entry.charge) == (self.entry, self.charge)
            if entry.kind == "import" and same:
                return entry.run_id
        return None

    def costs_more(self, other: Claim | None) -> bool:
        """Return whether it claims a larger ε or δ than another claim; True without one."""
        return other is None or self._exceeds(other.charge)

    def _exceeds(self, charge: Charge) -> bool:
        return self.charge.epsilon > charge.epsilon or self.charge.delta > charge.delta

    def choose_name(self, book: Book) -> str:
        """Return the name under which it is recorded: its own, unless the ledger has another charge of that name."""
        if self.run_id not in book.latest:
            return self.run_id
        content = f"{self.entry} {self.charge.epsilon!r} {self.charge.delta!r}"
        content += event_text(self.charge.event)
        return f"{self.run_id} {sha256(content.encode()).hexdigest()[:12]}"
