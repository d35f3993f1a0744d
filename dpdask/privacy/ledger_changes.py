"""What a steward does to a ledger beside charging it: change a limit, record releases that a restored copy has lost, copy all of it."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from dpdask.arrays import freeze_class
from dpdask.errors import DataError, SpecError
from dpdask.privacy.events import KEY
from dpdask.privacy.ledger import (
    DATASETS,
    ENTRIES,
    HOLDOUTS,
    READABLE_FORMATS,
    RUN_KEYS,
    TABLE_NAME,
    Ledger,
    LedgerStore,
    Link,
    check_chain,
    check_limits,
)
from dpdask.privacy.ledger_entries import Book, Charge, Claim, Entry

_MAX_REASON = 500  # characters


def change_limit(
    ledger: Ledger, dataset: str, epsilon: float, delta: float | None, reason: str
) -> bool:
    """Give a dataset another limit, up or down, and return whether it had another one.

    Parameters
    ----------
    delta
        The new limit of δ; None leaves it as it is.
    reason
        Why, for those who read the chain.

    Privacy
    -------
    What was spent stays spent. A limit below it allows nothing more. The promise of the dataset is
    the highest limit that it ever had; cards tell the one that was in force when they were charged.
    """
    if not reason.strip() or len(reason) > _MAX_REASON or not reason.isprintable():
        hint = f"say why in one line of at most {_MAX_REASON} characters"
        raise SpecError("a limit is changed for a reason", "reason", hint)
    before = ledger.show(dataset)
    after = check_limits(epsilon, before.delta if delta is None else delta)
    limits = Charge(epsilon=after.epsilon, delta=after.delta, event={"reason": reason.strip()})

    def is_changed(book: Book) -> bool:
        return (book.epsilon, book.delta) != (limits.epsilon, limits.delta)

    def decide(book: Book, _: Entry | None) -> Entry | Link:
        return ("limit", limits, "") if is_changed(book) else book.entries[-1]

    if is_changed(before):
        ledger.append(dataset, "limit", decide)
    return is_changed(before)


def import_claim(ledger: Ledger, claim: Claim) -> bool:
    """Record a release that a ledger lacks, and return whether it lacked it. It may be repeated.

    It is recorded also where it does not fit: it was released.

    Privacy
    -------
    A card proves nothing but what its releaser says of one release. It can only add a charge: what
    the ledger holds stays as it is, also under the same name. A claim that cannot be added up with
    the dataset's charges (another unit, another adjacency) is refused, since it would end all
    composition.
    """
    found: list[bool] = []

    def decide(book: Book, latest: Entry | None) -> Entry | Link:
        found.append(latest is None)
        if latest is not None:
            return latest
        book.compose(book.count([claim.charge]), book.delta)  # raises if they do not add up
        return "import", claim.charge, claim.entry

    while True:
        book = ledger.show(claim.dataset)
        if claim.find(book) is not None:
            return False
        # another process may record this one, or another one of its name, at the same time
        ledger.append(claim.dataset, claim.choose_name(book), decide)
        if found[-1]:
            return True


def list_datasets(url: str) -> list[str]:
    """Return the names of a ledger's datasets, sorted."""

    def read(connection: Connection) -> list[str]:
        return sorted(connection.execute(sa.select(DATASETS.c.name)).scalars())

    return LedgerStore(url).read(read)


def copy_ledger(source: str, target: str) -> dict[str, int]:
    """Copy all datasets of a ledger into an empty one, and return how many entries each has.

    The chains are checked on both sides, and the copy appears at once or not at all.

    Privacy
    -------
    The copy holds the keys of hold-outs, of growing tables in stores and of the names of their
    releases, without which these could not go on. The keys of unfinished runs are left out, so that a
    copy can undo no noise. Two ledgers that are both charged after a copy know nothing of each other.
    """

    def read(connection: Connection) -> _Content:
        names = set(sa.inspect(connection).get_table_names())
        holdouts = _rows(connection, sa.select(HOLDOUTS)) if HOLDOUTS.name in names else []
        keys = _rows(connection, sa.select(RUN_KEYS)) if RUN_KEYS.name in names else []
        entries = _rows(connection, sa.select(ENTRIES))
        return _Content(
            datasets=_rows(connection, sa.select(DATASETS)),
            entries=entries,
            holdouts=holdouts,
            keys=[key for key in keys if is_lasting(key["run_id"], find_series(entries))],
        )

    origin, place = LedgerStore(source), LedgerStore(target)
    content = origin.read(read)
    counts = _check_content(content, origin.place)

    def write(connection: Connection) -> None:
        if connection.execute(sa.select(DATASETS.c.name).limit(1)).first() is not None:
            hint = "give the URL of a new database"
            raise SpecError("there is a ledger here already", place.place, hint)
        for table, rows in (
            (DATASETS, content.datasets),
            (ENTRIES, content.entries),
            (HOLDOUTS, content.holdouts),
            (RUN_KEYS, content.keys),
        ):
            if rows:
                connection.execute(sa.insert(table), [*rows])
        if read(connection).sorted() != content.sorted():
            what = "this database gives back other values than were written"
            raise SpecError(what, place.place, "choose another one")

    place.create(write)
    return counts


@freeze_class
class _Content:
    """The rows of a ledger's tables, without the keys of unfinished runs."""

    datasets: Sequence[Mapping[str, Any]]
    entries: Sequence[Mapping[str, Any]]
    holdouts: Sequence[Mapping[str, Any]]
    keys: Sequence[Mapping[str, Any]]

    def sorted(self) -> list[list[dict[str, Any]]]:
        """Return the rows in one order, whatever the database's."""
        return [
            sorted(map(dict, rows), key=repr)
            for rows in (self.datasets, self.entries, self.holdouts, self.keys)
        ]


def find_series(entries: Sequence[Mapping[str, Any]]) -> set[str]:
    """Return the ids of the series that a ledger was charged for; none is the name of a run, whatever an imported card says."""
    named = (json.loads(row["event"]).get(KEY) for row in entries)
    return {str(series["id"]) for series in named if series} - {row["run_id"] for row in entries}


def is_lasting(name: str, series: Collection[str]) -> bool:
    """Return whether a key is the table's own name, or is needed as long as an output is released into; that of an unfinished run is not."""
    return name == TABLE_NAME or name.startswith("names-") or name in series


def _rows(connection: Connection, query: sa.Select[Any]) -> list[Mapping[str, Any]]:
    return [dict(row) for row in connection.execute(query).mappings()]


def _check_content(content: _Content, place: str) -> dict[str, int]:
    """Return how many entries each dataset has, after checking its chain."""
    counts: dict[str, int] = {}
    for record in sorted(content.datasets, key=lambda record: str(record["name"])):
        name = record["name"]
        if record["format"] not in READABLE_FORMATS:
            what = f"the dataset {name!r} is of another version of the ledger"
            raise SpecError(what, place, "use the dpdask that wrote it")
        rows = [row for row in content.entries if row["dataset"] == name]
        try:
            check_chain(record, sorted(rows, key=lambda row: int(row["sequence"])))
        except DataError as error:
            raise error.at(f"{place}, dataset {name!r}") from None
        counts[name] = len(rows)
    return counts
