"""The budget of a dataset: the spending of every release in an append-only chain, and the refusal of charges that do not fit."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import sqlite3
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

import sqlalchemy as sa
from sqlalchemy import exc
from sqlalchemy.engine import URL, Connection, Engine, make_url
from sqlalchemy.pool import NullPool

from dpdask.errors import BudgetError, DataError, DpdaskError, SpecError, TemporaryError
from dpdask.privacy.ledger_entries import (
    FREE,
    Balance,
    Book,
    Charge,
    Compose,
    Entry,
    Kind,
    chain_error,
    entry_of,
    event_text,
    find_limits,
    sum_charges,
)

Result = TypeVar("Result")

_PATIENCE = 60  # seconds that a driver waits for the others
_DRIVERS = {
    name: driver
    for driver in ("sqlite+pysqlite", "postgresql+psycopg")
    for name in (driver, driver.split("+")[0])
}
_CONNECT: dict[str, dict[str, Any]] = {
    "sqlite": {"timeout": _PATIENCE},
    # poolers lose prepared statements
    "postgresql": {
        "connect_timeout": 10,
        "prepare_threshold": None,
        "application_name": "dpdask",
    },
}
_SPOKEN = (
    "an SQLite or a PostgreSQL URL is expected",
    "ledger.url",
    "write sqlite:///ledger.db or postgresql://user@host/database",
)
_INIT_LOCK = 0x6470_6461_736B  # "dpdask": PostgreSQL's CREATE TABLE IF NOT EXISTS races with itself
_RETRIED_STATES = ("40001", "40P01")  # serialisation failure, deadlock

# A driver that hangs must not keep the others out for ever, and a charge that was answered must survive a crash of the server.
_POSTGRES_WRITE = f"""
SELECT set_config('lock_timeout', '{_PATIENCE}s', true),
       set_config('idle_in_transaction_session_timeout', '{10 * _PATIENCE}s', true),
       set_config('synchronous_commit', replace(current_setting('synchronous_commit'), 'off', 'on'), true)
"""

_TABLES = sa.MetaData()


def _make_table(name: str, keys: list[sa.Column[Any]], **types: Any) -> sa.Table:
    others = [sa.Column(column, type_, nullable=False) for column, type_ in types.items()]
    return sa.Table(name, _TABLES, *keys, *others)


_AMOUNTS = {"epsilon": sa.Double, "delta": sa.Double}
DATASETS = _make_table(
    "dpdask_datasets",
    [sa.Column("name", sa.Text, primary_key=True)],
    **{"format": sa.Integer, **_AMOUNTS, "created": sa.Text, "n_entries": sa.Integer},
    head=sa.Text,
)
# times and events are texts: a database gives them back as they were hashed
ENTRIES = _make_table(
    "dpdask_entries",
    [
        sa.Column("dataset", sa.Text, sa.ForeignKey(DATASETS.c.name), primary_key=True),
        sa.Column("sequence", sa.Integer, primary_key=True, autoincrement=False),
    ],
    **{**dict.fromkeys(("kind", "run_id", "event"), sa.Text), **_AMOUNTS},
    **dict.fromkeys(("recorded", "previous", "digest"), sa.Text),
)
HOLDOUTS = _make_table(
    "dpdask_holdouts",
    [sa.Column("dataset", sa.Text, sa.ForeignKey(DATASETS.c.name), primary_key=True)],
    key=sa.Text,
    created=sa.Text,
)
RUN_KEYS = _make_table(
    "dpdask_run_keys", [sa.Column("run_id", sa.Text, primary_key=True)], key=sa.Text
)


class LedgerStore:
    """The database of a ledger; a connection lives as long as a transaction.

    Attributes
    ----------
    place
        The URL without its password and options, for messages.

    Notes
    -----
    SQLite: `BEGIN IMMEDIATE` lets one writer in at a time; `synchronous=EXTRA` makes an answered
    transaction survive a power cut. The file must not lie on a network file system without locks.
    PostgreSQL: a writer locks the dataset's row; a reader sees one snapshot.
    """

    def __init__(self, url: str) -> None:
        parsed = _parse(url)
        # libpq takes passwords as options too
        self.place = parsed.set(query={}).render_as_string(hide_password=True)
        self._file = None
        if parsed.get_backend_name() == "sqlite":
            # the one path that checks and SQLite use, however the process changes its folder, and
            # whatever links are in the URL
            try:
                self._file = Path(parsed.database or "").resolve()
            except OSError:  # the working folder was removed
                raise self._no_folder() from None
        is_server = self._file is None
        engine = _engine(parsed if is_server else parsed.set(database=str(self._file)))
        writes = {"isolation_level": "READ COMMITTED"} if is_server else {}
        reads = (
            {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True} if is_server else {}
        )
        # options of options fail in SQLAlchemy 2.0
        self._writer = engine.execution_options(**writes)
        self._reader = engine.execution_options(dpdask_reads=True, **reads)

    def create(self, work: Callable[[Connection], Result]) -> Result:
        """Return the result of `work` in a transaction of its own; missing tables are created."""
        if self._file is not None and not self._file.parent.is_dir():
            raise self._no_folder()
        if self._file is not None:
            with suppress(FileExistsError):  # for this user alone: it holds the key of the hold-out
                os.close(os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))

        def made(connection: Connection) -> Result:
            if self._file is None:
                connection.exec_driver_sql(_POSTGRES_WRITE)
                connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_INIT_LOCK)))
            _TABLES.create_all(connection)
            return work(connection)

        return self._transact(self._writer, made)

    def write(self, work: Callable[[Connection], Result]) -> Result:
        """Return the result of `work` in a transaction that, once it has a dataset's lock, sees all earlier writes.

        `work` may be called again, after a transaction that failed: it changes nothing but the
        database.
        """

        def prepared(connection: Connection) -> Result:
            if self._file is None:
                connection.exec_driver_sql(_POSTGRES_WRITE)
            return self._known(connection, work)

        self._require_file()
        return self._transact(self._writer, prepared)

    def read(self, work: Callable[[Connection], Result]) -> Result:
        """Return the result of `work` in a transaction that sees one state of the ledger."""
        self._require_file()
        return self._transact(self._reader, lambda connection: self._known(connection, work))

    def _known(self, connection: Connection, work: Callable[[Connection], Result]) -> Result:
        if not sa.inspect(connection).has_table(DATASETS.name):
            raise self._absent()
        return work(connection)

    def _no_folder(self) -> SpecError:
        return SpecError("the folder of the ledger does not exist", self.place, "make it")

    def _require_file(self) -> None:
        if self._file is not None and not self._file.is_file():
            raise self._absent()  # SQLite would make an empty file

    def _absent(self) -> SpecError:
        hint = "correct the URL, or make the ledger with `dpdask ledger init --url URL --dataset NAME --epsilon E --delta D`"
        return SpecError("there is no ledger here", self.place, hint)

    def _transact(self, engine: Engine, work: Callable[[Connection], Result]) -> Result:
        deadline = time.monotonic() + _PATIENCE
        while True:
            try:
                with engine.begin() as connection:
                    return work(connection)
            except exc.DBAPIError as error:
                if not _is_contended(error) or time.monotonic() >= deadline:
                    raise self._failure(error) from None
                time.sleep(0.01)

    def _failure(self, error: exc.DBAPIError) -> DpdaskError:
        """Return the error in our words; a driver's own message may quote data."""
        origin = error.orig
        code = getattr(origin, "sqlite_errorname", None) or getattr(origin, "sqlstate", None)
        code = code or type(origin).__name__
        passing = exc.OperationalError, exc.InterfaceError, exc.InternalError, exc.IntegrityError
        if isinstance(error, passing):
            what = f"the ledger cannot be reached or is busy ({code})"
            hint = "check the server, the password and the access rights, and run again"
            return TemporaryError(what, self.place, hint)
        what = f"the database refused a statement of the ledger ({code})"
        hint = "check that it is a ledger and that its user may read and write it"
        return SpecError(what, self.place, hint)


def digest_of(content: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a row; a float is written as its shortest exact text."""
    return hashlib.sha256(
        json.dumps(dict(content), sort_keys=True, default=repr).encode()
    ).hexdigest()


def check_chain(record: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
    """Check that a chain is, link by link, the one that was appended to the dataset's record."""
    digest = digest_of(
        {key: record[key] for key in ("format", "name", "created", "epsilon", "delta")}
    )
    for sequence, row in enumerate(rows, start=1):
        if row["sequence"] != sequence:
            raise chain_error(
                f"the entry {sequence - 1} appears twice"
                if row["sequence"] == sequence - 1
                else f"the entry {sequence} is missing"
            )
        if row["digest"] != digest_of(
            {key: value for key, value in row.items() if key != "digest"}
        ):
            raise chain_error(f"the entry {sequence} was changed")
        if row["previous"] != digest:  # this one is whole, so the one before it was rewritten
            raise chain_error(
                f"the entry {sequence - 1} was replaced"
                if sequence > 1
                else "the limit of the dataset was changed"
            )
        digest = row["digest"]
    if len(rows) > record["n_entries"]:
        raise chain_error(f"the entry {record['n_entries'] + 1} was not added by dpdask")
    if len(rows) < record["n_entries"]:
        raise chain_error(f"the entry {len(rows) + 1} is missing, the chain was cut")
    if digest != record["head"]:
        raise chain_error(
            f"the entry {len(rows)} was replaced"
            if rows
            else "the limit of the dataset was changed"
        )


def _parse(url: str) -> URL:
    try:
        parsed = make_url(url)
        known = parsed.drivername in _DRIVERS
    except (
        exc.ArgumentError,
        ValueError,
        TypeError,
        AttributeError,
    ):  # their messages quote the URL
        raise SpecError(*_SPOKEN) from None
    if not known:
        raise SpecError(*_SPOKEN)
    if parsed.get_backend_name() == "sqlite" and (
        not parsed.database or parsed.database.startswith((":memory:", "file:"))
    ):
        raise SpecError(
            "an SQLite ledger needs a named file", "ledger.url", "for example sqlite:///ledger.db"
        )
    return parsed


# an engine keeps compiled statements and the place of its file, and no connection
@functools.lru_cache(maxsize=16)
def _engine(url: URL) -> Engine:
    backend = url.get_backend_name()
    defaults = {name: value for name, value in _CONNECT[backend].items() if name not in url.query}
    try:
        engine = sa.create_engine(
            url.set(drivername=_DRIVERS[url.drivername]),
            poolclass=NullPool,
            hide_parameters=True,
            connect_args=defaults,
        )
    except ImportError:
        raise SpecError(
            "the driver of PostgreSQL is not installed",
            "ledger.url",
            "pip install 'dpdask[postgresql]'",
        ) from None
    except (exc.ArgumentError, ValueError, TypeError):
        raise SpecError(
            "an option of the ledger's URL cannot be read",
            "ledger.url",
            "correct what follows the question mark",
        ) from None
    if backend == "sqlite":
        sa.event.listen(engine, "connect", _on_connect)
        sa.event.listen(engine, "begin", _on_begin)
    return engine


def _on_connect(connection: sqlite3.Connection, _: object) -> None:
    connection.isolation_level = None  # transactions are ours to begin, not the driver's
    connection.execute("PRAGMA synchronous=EXTRA")
    connection.execute("PRAGMA secure_delete=ON")  # a run's key is gone when it is removed


def _on_begin(connection: Connection) -> None:
    connection.exec_driver_sql(
        "BEGIN" if connection.get_execution_options().get("dpdask_reads") else "BEGIN IMMEDIATE"
    )


def _is_contended(error: exc.DBAPIError) -> bool:
    """Return whether the transaction conflicted with another one; SQLite does not always wait before it fails."""
    busy = getattr(error.orig, "sqlite_errorcode", 0) & 0xFF in (
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
    )
    return busy or getattr(error.orig, "sqlstate", None) in _RETRIED_STATES


TABLE_NAME = "name"  # of the table itself, among the names of runs


class KeyTable:
    """The table of run keys in a ledger's database.

    Privacy
    -------
    Whoever can read this table, or a backup of it, can undo the noise of the runs that are
    unfinished. A backup that is older than a run's end holds its key for as long as the backup is
    kept: it is as private as the table that the run reads.
    """

    def __init__(self, url: str) -> None:
        self._store = LedgerStore(url)

    def write(self, run_id: str, secret: bytes) -> None:
        """Keep a run's key."""

        def insert(connection: Connection) -> None:
            connection.execute(sa.delete(RUN_KEYS).where(RUN_KEYS.c.run_id == run_id))
            connection.execute(sa.insert(RUN_KEYS), {"run_id": run_id, "key": secret.hex()})

        self._store.create(insert)

    def check(self) -> None:
        """Do nothing: a ledger is kept by whoever limits what is spent."""

    @property
    def place(self) -> str:
        """What tells this table from that of another ledger: a random name, made once."""

        def make(connection: Connection) -> str:
            found = _find(connection, TABLE_NAME)
            if found is None:
                found = uuid.uuid4().hex
                connection.execute(sa.insert(RUN_KEYS), {"run_id": TABLE_NAME, "key": found})
            return found

        found = self._store.read(lambda connection: _find(connection, TABLE_NAME))
        return f"ledger {found or self._store.create(make)}"

    def read(self, run_id: str) -> bytes | None:
        """Return a run's key, or None."""
        found = self._store.read(lambda connection: _find(connection, run_id))
        return None if found is None else bytes.fromhex(found)

    def remove(self, run_id: str) -> None:
        """Overwrite a run's key and remove it, if it is there."""

        def delete(connection: Connection) -> None:
            if sa.inspect(connection).has_table(RUN_KEYS.name):
                connection.execute(
                    sa.update(RUN_KEYS).where(RUN_KEYS.c.run_id == run_id).values(key="0" * 64)
                )
                connection.execute(sa.delete(RUN_KEYS).where(RUN_KEYS.c.run_id == run_id))

        self._store.write(delete)


def _find(connection: Connection, name: str) -> str | None:
    if not sa.inspect(connection).has_table(RUN_KEYS.name):
        return None
    found: str | None = connection.execute(
        sa.select(RUN_KEYS.c.key).where(RUN_KEYS.c.run_id == name)
    ).scalar()
    return found


LEDGER_FORMAT = 2
READABLE_FORMATS = (1, 2)  # 1: before refusals and strict datasets were recorded
MAX_NAME_CHARACTERS = 200
_ENDED = {
    "draw": "drawn: its noise may have been seen, so it stays charged",
    "commit": "committed: a released run stays charged",
    "void": "voided: intend it again",
    "refuse": "refused: its charge stays",
    "import": "imported: its card says that it was released, so it stays charged",
}


# what is appended: its kind, the charge, and the digest of a release
Link: TypeAlias = tuple[Kind, Charge, str]


class Ledger:
    """The privacy budgets of datasets, in a database that drivers share.

    Parameters
    ----------
    compose
        (charges, δ) → the ε of all the charges together at that δ, never too small. All users of a
        ledger must use the same.

    Privacy
    -------
    A run is charged when it is intended, before any noise is drawn, and stays charged unless its
    caller promises, by `void`, that no noise of it was drawn or seen. The ledger holds no data
    values. It holds names, budgets, public parameters, and the key that chooses a dataset's
    hold-out; whoever has this key and the rows can tell which rows have no ε, so only the stewards
    should be able to read it. The chain reveals any change of the limits, and any changed, removed,
    reordered or added entry, unless the whole chain is rewritten. Every operation checks the chain
    first, so nothing is charged to a ledger that was tampered with.

    Notes
    -----
    Every operation may be repeated: one that was interrupted took place either completely or not at
    all. Besides what is listed below, each raises TemporaryError if the database cannot be reached
    or stays busy, SpecError if it or the dataset is not there, and DataError if the chain is
    broken.
    """

    def __init__(self, url: str, *, compose: Compose = sum_charges) -> None:
        self._store = LedgerStore(url)
        self._compose = compose

    def __repr__(self) -> str:
        return f"Ledger({self._store.place!r})"

    def init(
        self, dataset: str, epsilon: float, delta: float = 0.0, *, strict: bool = False
    ) -> bool:
        """Give a dataset its budget, and return whether it had none before.

        Parameters
        ----------
        epsilon, delta
            What all releases may spend together: ε above 0 and finite, δ in [0, 1). `change_limit`
            changes them, for a reason.
        strict
            Whether a run that reads rows and then refuses them costs as much as a release, and at
            least a hundredth of ε. A dataset can be made strict later, and then stays strict.
        """
        name = _name(dataset, "dataset")
        limits = check_limits(epsilon, delta)
        row: dict[str, Any] = {"epsilon": limits.epsilon, "delta": limits.delta}

        def work(connection: Connection) -> bool:
            query = sa.select(DATASETS).where(DATASETS.c.name == name)
            found = connection.execute(query).mappings().one_or_none()
            if found is None:
                made = {"format": LEDGER_FORMAT, "name": name, "created": _now(), **row}
                made |= {"n_entries": 0, "head": digest_of(made)}
                connection.execute(sa.insert(DATASETS), made)
            book = self._open(connection, name, lock=True)
            if limits not in (book.declared, Charge(epsilon=book.epsilon, delta=book.delta)):
                limit = f"ε {book.epsilon!r} and δ {book.delta!r}"
                what = f"the dataset {name!r} has a limit already: {limit}"
                raise self._error(what, "give the same one, or change it by `dpdask ledger limit`")
            if strict and not book.strict:
                _append(connection, book, "strict", "strict", FREE)
            return found is None

        return self._store.create(work)

    def intend(self, dataset: str, run_id: str, charge: Charge, *, unread: bool = False) -> Entry:
        """Charge a run before its noise is drawn, and return the run's newest entry.

        A run that was intended with the same charge is not charged a second time: its entry is
        returned, of kind `commit` if the run is committed. A run that was voided, or refused
        without a charge, is charged again.

        Parameters
        ----------
        unread
            Whether rows are read after the run is committed, when a refusal is no longer recorded.
            Then a strict dataset charges at least what a refusal costs.
        """

        def decide(book: Book, latest: Entry | None) -> Entry | Link:
            price = book.price_refusal(charge) if unread and book.strict else charge
            if latest is None or not latest.counts:
                self._require_room(book, price)
                return "intend", price, ""
            if latest.kind in ("refuse", "import"):
                raise self._error(
                    f"the run {run_id!r} is {_ENDED[latest.kind]}", "a new run is charged again"
                )
            # another price, if the dataset was made strict since, or its limit was changed
            if not book.was_price(charge, latest.charge):
                what = f"the run {run_id!r} was intended with another charge"
                raise self._error(what, "a changed job is a new run: give it another name")
            return latest

        return self.append(dataset, run_id, decide)

    def check_room(self, dataset: str, charge: Charge, run_id: str | None = None) -> None:
        """Check that a charge fits, or that its run is already charged; nothing is written. For the parameters see `Ledger.intend`."""
        book = self.show(dataset)
        if run_id is None or run_id not in book.standing:
            self._require_room(book, charge)

    def draw(self, dataset: str, run_id: str, release: str) -> Entry:
        """Record that a run drew its noise, and return the run's newest entry. It is idempotent."""

        def decide(_: Book, latest: Entry | None) -> Entry | Link:
            if latest is None or latest.kind in ("void", "refuse"):
                raise self._error(*_not_intended(run_id))
            if latest.kind == "intend":
                return "draw", latest.charge, release
            return self._check_drawn(latest, release)

        return self.append(dataset, run_id, decide)

    def commit(self, dataset: str, run_id: str, release: str = "") -> Entry:
        """Record that a run was released, and return the entry. It is idempotent."""
        return self._end(dataset, run_id, "commit", release)

    def refuse(self, dataset: str, run_id: str, charge: Charge) -> Entry:
        """Record that a run read rows and refused them, and return the entry. It is idempotent.

        Parameters
        ----------
        dataset, run_id
            The names of the dataset and the run; the run need not have been intended.
        charge
            What the refusal costs: the run's charge if noise may have been drawn or the dataset is
            strict, else `FREE`. A run that drew its noise stays charged in any case. A refusal of a
            strict dataset that is charged costs at least a hundredth of its ε.

        Privacy
        -------
        A refusal is an exact function of the rows, and no ε covers it. The entries show how often
        rows were refused.
        """

        def decide(book: Book, latest: Entry | None) -> Entry | Link:
            if latest is not None and latest.kind in ("refuse", "commit", "import"):
                return latest
            least = latest.charge if latest is not None and latest.kind == "draw" else charge
            if least != FREE and (latest is None or not latest.counts):
                self._require_room(book, least)
            price = book.price_refusal(least.alone) if book.strict and least != FREE else least
            # it fits, unless the dataset was made strict since
            fits = self._compose([*book.count(without=run_id), price], book.delta) <= book.epsilon
            return "refuse", price if fits else least, ""

        return self.append(dataset, run_id, decide)

    def holdout_key(self, dataset: str, *, draw: bool = True) -> bytes | None:
        """Return the 32 secret bytes that choose a dataset's hold-out; they are drawn once and kept.

        Parameters
        ----------
        draw
            Whether to draw a key if there is none; if not, None is returned.

        Privacy
        -------
        With one hold-out for all releases of a dataset, the same rows have no ε in each of them, as
        long as they keep their places (or their units). The chain holds the key's digest, so a
        replaced or lost key is noticed.
        """

        def found(connection: Connection) -> str | None:
            return self._kept_key(connection, self._open(connection, dataset))

        def drawn(connection: Connection) -> str:
            book = self._open(connection, dataset, lock=True)
            kept = self._kept_key(connection, book)
            if kept is None:
                from dpdask.streams import RunKey  # and numpy, which no other operation needs

                kept = RunKey.fresh().reveal().hex()
                row = {"dataset": dataset, "key": kept, "created": _now()}
                connection.execute(sa.insert(HOLDOUTS), row)
                _append(connection, book, "hold-out", "hold-out", FREE, _key_digest(kept))
            return kept

        key = self._store.read(found)
        if key is None and draw:
            key = self._store.create(drawn)
        return None if key is None else bytes.fromhex(key)

    def holds_sample(self, dataset: str, sample: str) -> bool:
        """Return whether an event of a dataset names a hold-out; the chain is not checked for that."""
        named = ENTRIES.c.event.contains(f'"sample":"{sample}"', autoescape=True)
        query = sa.select(ENTRIES.c.sequence).where(ENTRIES.c.dataset == dataset, named).limit(1)
        return self._store.read(lambda connection: connection.execute(query).first() is not None)

    def void(self, dataset: str, run_id: str) -> Entry:
        """Give back the charge of a run, and return the entry. It is idempotent. For the parameters see `Ledger.intend`.

        Privacy
        -------
        The caller promises that no noise of this run was drawn, or that nobody saw a result of it
        and its key is destroyed. The ledger cannot check this. In doubt, leave the run charged.
        """
        return self._end(dataset, run_id, "void")

    def read_balance(self, dataset: str, plus: Charge | None = None) -> Balance:
        """Return the spent and the remaining budget, optionally with one more charge."""
        return self.show(dataset).compute_balance([plus] if plus else [])

    def is_strict(self, dataset: str) -> bool:
        """Return whether a refusal after rows were read is charged."""
        return self.show(dataset).strict

    def verify(self, dataset: str) -> int:
        """Check the chain, and return the number of its entries."""
        return len(self.show(dataset).entries)

    def show(self, dataset: str) -> Book:
        """Return a dataset's ledger, after checking its chain."""
        return self._store.read(lambda connection: self._open(connection, dataset))

    def append(
        self, dataset: str, run_id: str, decide: Callable[[Book, Entry | None], Entry | Link]
    ) -> Entry:
        """Append the link that follows from a run's newest entry, under the dataset's lock; or return an entry that stands already."""
        _name(run_id, "run_id")

        def work(connection: Connection) -> Entry:
            book = self._open(connection, dataset, lock=True)
            found = decide(book, book.latest.get(run_id))
            if isinstance(found, Entry):
                return found
            kind, charge, release = found
            return _append(connection, book, kind, run_id, charge, release)

        return self._store.write(work)

    def _open(self, connection: Connection, dataset: str, *, lock: bool = False) -> Book:
        name = _name(dataset, "dataset")
        query = sa.select(DATASETS).where(DATASETS.c.name == name)
        query = query.with_for_update() if lock else query
        record: Any = connection.execute(query).mappings().one_or_none()
        if record is None:
            hint = f"`dpdask ledger init --dataset {name} --epsilon E --delta D` gives it a budget"
            raise self._error(f"the ledger does not know the dataset {name!r}", hint)
        if record["format"] not in READABLE_FORMATS:
            what = f"the dataset {name!r} is of another version of the ledger"
            raise self._error(what, "use the dpdask that wrote it")
        chain = sa.select(ENTRIES).where(ENTRIES.c.dataset == name).order_by(ENTRIES.c.sequence)
        rows: Any = connection.execute(chain).mappings().all()
        try:
            check_chain(record, rows)
            entries = tuple(map(entry_of, rows))
            declared = Charge(epsilon=record["epsilon"], delta=record["delta"])
            limits = find_limits(declared, entries)
        except DataError as error:
            raise error.at(f"{self._store.place}, dataset {name!r}") from None
        return Book(
            dataset=name,
            compose=self._compose,
            epsilon=limits.epsilon,
            delta=limits.delta,
            declared=declared,
            created=record["created"],
            head=record["head"],
            entries=entries,
        )

    def _kept_key(self, connection: Connection, book: Book) -> str | None:
        known = next((entry.release for entry in book.entries if entry.kind == "hold-out"), None)
        kept: str | None = None
        if sa.inspect(connection).has_table(HOLDOUTS.name):
            query = sa.select(HOLDOUTS.c.key).where(HOLDOUTS.c.dataset == book.dataset)
            kept = connection.execute(query).scalar_one_or_none()
        if (None if kept is None else _key_digest(kept)) != known:
            where = f"{self._store.place}, dataset {book.dataset!r}"
            raise chain_error("the key of the hold-out was changed").at(where)
        return kept

    def _end(
        self, dataset: str, run_id: str, kind: Literal["commit", "void"], release: str = ""
    ) -> Entry:
        def decide(_: Book, latest: Entry | None) -> Entry | Link:
            if latest is None:
                raise self._error(*_not_intended(run_id))
            if latest.kind == "intend" or (latest.kind == "draw" and kind == "commit"):
                self._check_drawn(latest, release or latest.release)
                return kind, latest.charge, release or latest.release
            if latest.kind != kind and (latest.kind, kind) != ("import", "commit"):
                raise self._error(f"the run {run_id!r} is {_ENDED[latest.kind]}")
            return latest

        return self.append(dataset, run_id, decide)

    def _check_drawn(self, latest: Entry, release: str) -> Entry:
        """Return a run's newest entry, after checking that it holds no other noise than a release."""
        if latest.release not in ("", release):
            what = f"the run {latest.run_id!r} drew other noise before"
            raise self._error(what, "a new run is charged again")
        return latest

    def _error(self, what: str, hint: str | None = None) -> SpecError:
        return SpecError(what, self._store.place, hint)

    def _require_room(self, book: Book, charge: Charge) -> None:
        """Refuse a charge that does not fit; a composer's NaN does not fit. A strict dataset keeps room for refusals of all unfinished runs."""
        charges = book.count([charge])
        total, refused = self._compose(charges, book.delta), list[Charge]()
        if not total <= book.epsilon:
            mixed = len({each.delta > 0 for each in charges}) > 1
            balance = book.balance
            why, hint = balance.tell_shortage(charge, total, mixed=mixed)
        else:
            if book.strict:
                refused, n = book.count_if_refused(charge)
            if not refused or self._compose(refused, book.delta) <= book.epsilon:
                return
            why = f"it is strict, and refusals of this run and of {n} unfinished ones would cost more than is left"
            hint = "finish unfinished runs first, or set a smaller ε; a refusal costs at least a hundredth of the limit"
        what = f"the budget of the dataset {book.dataset!r} is too small: {why}"
        raise BudgetError(what, self._store.place, hint)


def check_limits(epsilon: float, delta: float) -> Charge:
    """Return the limits of a dataset."""
    limits = Charge(epsilon=epsilon, delta=delta)
    if not limits.epsilon:
        what, hint = "a limit of ε = 0 allows no release", "give the dataset a budget above 0"
        raise SpecError(what, "epsilon", hint)
    return limits


def _not_intended(run_id: str) -> tuple[str, str]:
    return f"the run {run_id!r} is not intended", "intend it before its noise is drawn"


def _key_digest(key: str) -> str:
    return sha256(f"dpdask hold-out {key}".encode()).hexdigest()


def _append(
    connection: Connection, book: Book, kind: Kind, run_id: str, charge: Charge, release: str = ""
) -> Entry:
    row: dict[str, Any] = {
        "dataset": book.dataset,
        "sequence": len(book.entries) + 1,
        "kind": kind,
        "run_id": run_id,
        "event": event_text(charge.event, release, charge.names),
        "epsilon": charge.epsilon,
        "delta": charge.delta,
        "recorded": _now(),
        "previous": book.head,
    }
    row["digest"] = digest_of(row)
    connection.execute(sa.insert(ENTRIES), row)
    end = {"n_entries": row["sequence"], "head": row["digest"]}
    connection.execute(sa.update(DATASETS).where(DATASETS.c.name == book.dataset), end)
    return entry_of(row)


def _name(name: str, where: str) -> str:
    plain = isinstance(name, str) and name.isprintable() and name == name.strip()
    if not plain or not 0 < len(name) <= MAX_NAME_CHARACTERS:
        hint = f"use 1 to {MAX_NAME_CHARACTERS} characters, without spaces around them"
        raise SpecError("a name is a printable text on one line", where, hint)
    return name


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds")
