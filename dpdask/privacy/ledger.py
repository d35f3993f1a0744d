"""The budget of a dataset: what every release of it spent, in an append-only chain, and the refusal of what does not fit."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import ROUND_FLOOR, Decimal, localcontext
from fractions import Fraction
from typing import Any, Literal, cast, get_args

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from dpdask.errors import BudgetError, DataError, SpecError
from dpdask.privacy.ledger_tables import DATASETS, ENTRIES, LedgerStore, broken, check_chain, digest_of
from dpdask.privacy.rounding import rounded_down, rounded_up_sum

LEDGER_FORMAT = 1
MAX_NAME_CHARACTERS = 200

Kind = Literal["intend", "commit", "void"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Charge:
    """What one run costs.

    Parameters
    ----------
    epsilon
        ε, finite and not negative.
    delta
        δ, in [0, 1).
    event
        What the composer needs to know of the mechanism, as JSON with its own version; public parameters only, never data.

    Raises
    ------
    SpecError
        If a number is out of its range, or the event is not JSON.
    """

    epsilon: float
    delta: float = 0.0
    event: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "epsilon", _number(self.epsilon, "epsilon", sys.float_info.max))
        object.__setattr__(self, "delta", _number(self.delta, "delta", 1.0))
        object.__setattr__(self, "event", json.loads(_event_text(self.event)))  # a copy, equal to what the ledger gives back


Compose = Callable[[Sequence[Charge], float], float]


def sum_charges(charges: Sequence[Charge], delta_limit: float) -> float:
    """Return the total ε of charges by basic composition, rounded up; infinite if their total δ is above the limit.

    Parameters
    ----------
    charges
        The charges.
    delta_limit
        The δ that they may have together.
    """
    if sum(Fraction(charge.delta) for charge in charges) > Fraction(delta_limit):
        return math.inf
    return rounded_up_sum(charge.epsilon for charge in charges)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One link of a dataset's chain.

    Attributes
    ----------
    sequence
        1, 2, 3, … within the dataset.
    kind
        `intend`: noise may be drawn from now on. `commit`: it was released. `void`: it was never drawn.
    run_id
        The run's name.
    charge
        What the run costs; the same in all its entries, until a void.
    recorded
        When, in UTC (ISO 8601).
    previous, digest
        SHA-256 of the entry before (for the first: of the dataset's limits), and of this one with it; hexadecimal.
    """

    sequence: int
    kind: Kind
    run_id: str
    charge: Charge
    recorded: str
    previous: str
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """What is spent of a dataset's budget: by every run that was intended and not voided.

    Attributes
    ----------
    epsilon_limit, delta_limit
        The limits.
    epsilon_spent
        ε of all the runs together at δ = `delta_limit`, as the composer has it; infinite if no ε is enough.
    delta_spent
        The sum of their δ, rounded up.
    epsilon_left, delta_left
        The limits less what is spent, rounded down, at least 0.
    n_runs
        How many runs there are: M in the attacker's power γ·exp(M·ε).
    """

    epsilon_limit: float
    delta_limit: float
    epsilon_spent: float
    delta_spent: float
    epsilon_left: float
    delta_left: float
    n_runs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A dataset's ledger.

    Attributes
    ----------
    dataset
        The name.
    created
        When, in UTC (ISO 8601).
    balance
        What is spent and left.
    entries
        The chain, oldest first.
    head
        The digest that the chain ends with. Keep it elsewhere: who can write the database can write a whole new chain.
    """

    dataset: str
    created: str
    balance: Balance
    entries: tuple[Entry, ...]
    head: str


class Ledger:
    """The privacy budgets of datasets, in a database that drivers share.

    Parameters
    ----------
    url
        `sqlite:///ledger.db`, or `postgresql://user@host/database` for a team.
    compose
        (charges, δ) → the ε of all the charges together at that δ, never too small. All users of a ledger must use the same.

    Raises
    ------
    SpecError
        If the URL is neither.

    Privacy
    -------
    A run is charged when it is intended, before any noise is drawn, and stays charged unless its caller promises, by
    `void`, that no noise of it was drawn or seen. It holds no data values: names, budgets and public parameters only.
    The chain shows a change, removal, exchange or addition of entries, and of the limits, by who does not rewrite all
    of it. Every operation checks the chain first, so nothing is charged to a ledger that was tampered with.

    Notes
    -----
    Every operation may be repeated: the one that was cut off in the middle happened either wholly or not at all. Besides
    what is listed below, each raises TemporaryError if the database cannot be reached or stays busy, SpecError if it or the
    dataset is not there, and DataError if the chain is broken.
    """

    def __init__(self, url: str, *, compose: Compose = sum_charges) -> None:
        self._store = LedgerStore(url)
        self._compose = compose

    def __repr__(self) -> str:
        return f"Ledger({self._store.place!r})"

    def init(self, dataset: str, epsilon: float, delta: float = 0.0) -> bool:
        """Give a dataset its budget, and return whether it had none before.

        Raises
        ------
        SpecError
            If the dataset has another budget, or a number is out of its range.
        """
        name = _name(dataset, "dataset")
        limits = {"epsilon": _number(epsilon, "epsilon", sys.float_info.max), "delta": _number(delta, "delta", 1.0)}
        if not limits["epsilon"]:
            raise SpecError("a limit of ε = 0 allows no release", "epsilon", "give the dataset a budget above 0")

        def work(connection: Connection) -> bool:
            found = connection.execute(sa.select(DATASETS).where(DATASETS.c.name == name)).mappings().one_or_none()
            if found is None:
                row = {"format": LEDGER_FORMAT, "name": name, "created": _now(), **limits}
                connection.execute(sa.insert(DATASETS), {**row, "n_entries": 0, "head": digest_of(row)})
            elif any(found[key] != limit for key, limit in limits.items()):
                limit = f"ε {found['epsilon']!r} and δ {found['delta']!r}"
                raise SpecError(f"the dataset {name!r} has a limit already: {limit}", self._store.place, "a limit stays; give the same one")
            return found is None

        return self._store.create(work)

    def intend(self, dataset: str, run_id: str, charge: Charge) -> Entry:
        """Charge a run before its noise is drawn, and return the run's newest entry.

        A run that was intended with the same charge is charged no second time: its entry is returned, of kind `commit`
        if it is committed. A voided run is charged anew.

        Raises
        ------
        BudgetError
            If the charge does not fit; nothing is written.
        SpecError
            If the run was intended with another charge.
        """
        run_id = _name(run_id, "run_id")

        def work(connection: Connection) -> Entry:
            book = self._open(connection, dataset, lock=True)
            latest = book.standing.get(run_id)
            if latest is None:
                self._require_room(book, charge)
                return _append(connection, book, "intend", run_id, charge)
            if latest.charge != charge:
                raise SpecError(
                    f"the run {run_id!r} was intended with another charge", self._store.place, "a changed job is a new run: give it another name"
                )
            return latest

        return self._store.write(work)

    def commit(self, dataset: str, run_id: str) -> Entry:
        """Record that a run was released, and return the entry; once is enough.

        Raises
        ------
        SpecError
            If the run is not intended, or is voided.
        """
        return self._close(dataset, run_id, "commit")

    def void(self, dataset: str, run_id: str) -> Entry:
        """Give back the charge of a run, and return the entry; once is enough.

        Raises
        ------
        SpecError
            If the run is not intended, or is committed.

        Privacy
        -------
        The caller promises that no noise of this run was drawn, or that nobody saw anything made with it and its key is
        destroyed. The ledger cannot know; where there is doubt, leave it charged.
        """
        return self._close(dataset, run_id, "void")

    def spent(self, dataset: str, plus: Charge | None = None) -> Balance:
        """Return what is spent and left, or what would be with one more charge."""
        book = self._store.read(lambda connection: self._open(connection, dataset))
        return self._balance(book, [*book.charges, *([plus] if plus else [])])

    def show(self, dataset: str) -> Summary:
        """Return the dataset's whole ledger."""
        book = self._store.read(lambda connection: self._open(connection, dataset))
        return Summary(dataset=book.name, created=book.created, balance=self._balance(book, book.charges), entries=book.entries, head=book.head)

    def verify(self, dataset: str) -> int:
        """Return the number of entries of a chain that is whole.

        Raises
        ------
        DataError
            Naming the first entry that was changed, removed, exchanged or added behind the ledger's back.
        """
        return len(self._store.read(lambda connection: self._open(connection, dataset)).entries)

    def _open(self, connection: Connection, dataset: str, *, lock: bool = False) -> _Book:
        name = _name(dataset, "dataset")
        query = sa.select(DATASETS).where(DATASETS.c.name == name)
        record = connection.execute(query.with_for_update() if lock else query).mappings().one_or_none()
        if record is None:
            raise SpecError(
                f"the ledger does not know the dataset {name!r}", self._store.place, f"`dpdask ledger init --dataset {name}` gives it a budget"
            )
        if record["format"] != LEDGER_FORMAT:
            raise SpecError(f"the dataset {name!r} is of another version of the ledger", self._store.place, "use the dpdask that wrote it")
        rows = connection.execute(sa.select(ENTRIES).where(ENTRIES.c.dataset == name).order_by(ENTRIES.c.sequence)).mappings().all()
        try:
            check_chain(cast("Mapping[str, Any]", record), cast("Sequence[Mapping[str, Any]]", rows))
            entries = tuple(_entry(cast("Mapping[str, Any]", row)) for row in rows)
        except DataError as error:
            raise error.at(f"{self._store.place}, dataset {name!r}") from None
        return _Book(name=name, epsilon=record["epsilon"], delta=record["delta"], created=record["created"], head=record["head"], entries=entries)

    def _close(self, dataset: str, run_id: str, kind: Literal["commit", "void"]) -> Entry:
        run_id = _name(run_id, "run_id")

        def work(connection: Connection) -> Entry:
            book = self._open(connection, dataset, lock=True)
            latest = book.latest.get(run_id)
            if latest is None:
                raise SpecError(f"the run {run_id!r} is not intended", self._store.place, "intend it before its noise is drawn")
            if latest.kind == "intend":
                return _append(connection, book, kind, run_id, latest.charge)
            if latest.kind != kind:
                done = {"commit": "committed: what was released stays charged", "void": "voided: intend it anew"}[latest.kind]
                raise SpecError(f"the run {run_id!r} is {done}", self._store.place)
            return latest

        return self._store.write(work)

    def _require_room(self, book: _Book, charge: Charge) -> None:
        """Refuse a charge that does not fit; a composer's NaN does not fit."""
        if self._compose([*book.charges, charge], book.delta) <= book.epsilon:
            return
        balance = self._balance(book, book.charges)
        asked = f"the run asks for ε {charge.epsilon!r} and δ {charge.delta!r}"
        left = f"ε {_down(balance.epsilon_left)} and δ {_down(balance.delta_left)} are left of ε {book.epsilon!r} and δ {book.delta!r}"
        raise BudgetError(f"the budget of the dataset {book.name!r} is too small: {asked}; {left}", self._store.place, "ask for less")

    def _balance(self, book: _Book, charges: Sequence[Charge]) -> Balance:
        composed = self._compose(charges, book.delta) if charges else 0.0
        epsilon = math.inf if math.isnan(composed) else composed
        delta = rounded_up_sum(charge.delta for charge in charges)
        return Balance(
            epsilon_limit=book.epsilon,
            delta_limit=book.delta,
            epsilon_spent=epsilon,
            delta_spent=delta,
            epsilon_left=_left(book.epsilon, epsilon),
            delta_left=_left(book.delta, delta),
            n_runs=len(charges),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Book:
    """A dataset's ledger as one transaction reads it, its chain checked."""

    name: str
    epsilon: float
    delta: float
    created: str
    head: str
    entries: tuple[Entry, ...]

    @property
    def latest(self) -> dict[str, Entry]:
        """Each run's newest entry."""
        return {entry.run_id: entry for entry in self.entries}

    @property
    def standing(self) -> dict[str, Entry]:
        """The newest entry of each run that counts as spent: all but the voided ones."""
        return {run_id: entry for run_id, entry in self.latest.items() if entry.kind != "void"}

    @property
    def charges(self) -> list[Charge]:
        return [entry.charge for entry in self.standing.values()]


def _append(connection: Connection, book: _Book, kind: Kind, run_id: str, charge: Charge) -> Entry:
    row: dict[str, Any] = {
        "dataset": book.name,
        "sequence": len(book.entries) + 1,
        "kind": kind,
        "run_id": run_id,
        "event": _event_text(charge.event),
        "epsilon": charge.epsilon,
        "delta": charge.delta,
        "recorded": _now(),
        "previous": book.head,
    }
    row["digest"] = digest_of(row)
    connection.execute(sa.insert(ENTRIES), row)
    connection.execute(sa.update(DATASETS).where(DATASETS.c.name == book.name), {"n_entries": row["sequence"], "head": row["digest"]})
    return _entry(row)


def _entry(row: Mapping[str, Any]) -> Entry:
    try:
        charge = Charge(epsilon=row["epsilon"], delta=row["delta"], event=json.loads(row["event"]))
    except (SpecError, ValueError, TypeError):
        raise broken(f"the entry {row['sequence']} holds no charge") from None
    if row["kind"] not in get_args(Kind):
        raise broken(f"the entry {row['sequence']} is of no known kind")
    rest = {key: row[key] for key in ("sequence", "kind", "run_id", "recorded", "previous", "digest")}
    return Entry(charge=charge, **rest)


def _event_text(event: Mapping[str, Any]) -> str:
    try:
        return json.dumps(dict(event), sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        raise SpecError("an event must be a mapping that JSON can hold", "event", "use texts, finite numbers, lists and mappings of them") from None


def _name(name: str, where: str) -> str:
    if not isinstance(name, str) or not name.isprintable() or name != name.strip() or not 0 < len(name) <= MAX_NAME_CHARACTERS:
        raise SpecError("a name is a printable text on one line", where, f"use 1 to {MAX_NAME_CHARACTERS} characters, without spaces around them")
    return name


def _number(value: float, where: str, below: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < below:
        raise SpecError("a number is out of its range", where, "use 0 ≤ δ < 1" if below == 1 else "use a finite ε, not below 0")
    return float(value) + 0.0  # -0 becomes 0, which is what databases give back


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds")


def _left(limit: float, spent: float) -> float:
    """Return what is left of a limit, rounded down; nothing, if what is spent is no number."""
    if not spent < limit:
        return 0.0
    return rounded_down(Fraction(limit) - Fraction(spent))


def _down(value: float) -> str:
    """Return a number in six digits, rounded down."""
    with localcontext(prec=6, rounding=ROUND_FLOOR):
        return str(+Decimal(value))
