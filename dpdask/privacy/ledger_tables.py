"""The storage of a ledger: four tables in an SQLite file or a PostgreSQL database, their transactions, and the chain of their rows."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy import exc
from sqlalchemy.engine import URL, Connection, Engine, make_url
from sqlalchemy.pool import NullPool

from dpdask.errors import DpdaskError, SpecError, TemporaryError
from dpdask.privacy.ledger_entries import chain_error

Result = TypeVar("Result")

_PATIENCE = 60  # seconds that a driver waits for the others
_DRIVERS = {name: driver for driver in ("sqlite+pysqlite", "postgresql+psycopg") for name in (driver, driver.split("+")[0])}
_CONNECT: dict[str, dict[str, Any]] = {
    "sqlite": {"timeout": _PATIENCE},
    "postgresql": {"connect_timeout": 10, "prepare_threshold": None, "application_name": "dpdask"},  # poolers lose prepared statements
}
_SPOKEN = "an SQLite or a PostgreSQL URL is expected", "ledger.url", "write sqlite:///ledger.db or postgresql://user@host/database"
_INIT_LOCK = 0x6470_6461_736B  # "dpdask": PostgreSQL's CREATE TABLE IF NOT EXISTS races with itself
_RETRIED_STATES = ("40001", "40P01")  # serialisation failure, deadlock

# A driver that hangs must not keep the others out for ever, and a charge that was answered must survive a crash of the server.
_POSTGRES_WRITE = f"""
SELECT set_config('lock_timeout', '{_PATIENCE}s', true),
       set_config('idle_in_transaction_session_timeout', '{10 * _PATIENCE}s', true),
       set_config('synchronous_commit', replace(current_setting('synchronous_commit'), 'off', 'on'), true)
"""

_TABLES = sa.MetaData()
DATASETS = sa.Table(
    "dpdask_datasets",
    _TABLES,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("format", sa.Integer, nullable=False),
    sa.Column("epsilon", sa.Double, nullable=False),
    sa.Column("delta", sa.Double, nullable=False),
    sa.Column("created", sa.Text, nullable=False),
    sa.Column("n_entries", sa.Integer, nullable=False),
    sa.Column("head", sa.Text, nullable=False),
)
ENTRIES = sa.Table(  # times and events are texts: a database gives them back as they were hashed
    "dpdask_entries",
    _TABLES,
    sa.Column("dataset", sa.Text, sa.ForeignKey(DATASETS.c.name), primary_key=True),
    sa.Column("sequence", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("kind", sa.Text, nullable=False),
    sa.Column("run_id", sa.Text, nullable=False),
    sa.Column("event", sa.Text, nullable=False),
    sa.Column("epsilon", sa.Double, nullable=False),
    sa.Column("delta", sa.Double, nullable=False),
    sa.Column("recorded", sa.Text, nullable=False),
    sa.Column("previous", sa.Text, nullable=False),
    sa.Column("digest", sa.Text, nullable=False),
)
HOLDOUTS = sa.Table(
    "dpdask_holdouts",
    _TABLES,
    sa.Column("dataset", sa.Text, sa.ForeignKey(DATASETS.c.name), primary_key=True),
    sa.Column("key", sa.Text, nullable=False),
    sa.Column("created", sa.Text, nullable=False),
)
RUN_KEYS = sa.Table(
    "dpdask_run_keys",
    _TABLES,
    sa.Column("run_id", sa.Text, primary_key=True),
    sa.Column("key", sa.Text, nullable=False),
)


class LedgerStore:
    """The database of a ledger; a connection lives as long as a transaction.

    Parameters
    ----------
    url
        `sqlite:///ledger.db` or `postgresql://user:password@host/database`.

    Attributes
    ----------
    place
        The URL without its password and options, for messages.

    Raises
    ------
    SpecError
        If the URL is invalid, or PostgreSQL's driver is not installed.

    Notes
    -----
    SQLite: `BEGIN IMMEDIATE` lets one writer in at a time; `synchronous=EXTRA` makes an answered transaction survive a
    power cut. The file must not lie on a network file system without locks. PostgreSQL: a writer locks the dataset's
    row; a reader sees one snapshot.
    """

    def __init__(self, url: str) -> None:
        parsed = _parse(url)
        self.place = parsed.set(query={}).render_as_string(hide_password=True)  # libpq takes passwords as options too
        self._file = _find_file(parsed) if parsed.get_backend_name() == "sqlite" else None
        is_server = self._file is None
        engine = _engine(parsed if is_server else parsed.set(database=str(self._file)))
        writes = {"isolation_level": "READ COMMITTED"} if is_server else {}
        reads = {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True} if is_server else {}
        self._writer = engine.execution_options(**writes)  # options of options fail in SQLAlchemy 2.0
        self._reader = engine.execution_options(dpdask_reads=True, **reads)

    def create(self, work: Callable[[Connection], Result]) -> Result:
        """Return the result of `work` in a transaction of its own; missing tables are created."""
        if self._file is not None and not self._file.parent.is_dir():
            raise SpecError("the folder of the ledger does not exist", self.place, "make it")
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

        `work` may be called again, after a transaction that failed: it changes nothing but the database.
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

    def _require_file(self) -> None:
        if self._file is not None and not self._file.is_file():
            raise self._absent()  # SQLite would make an empty file

    def _absent(self) -> SpecError:
        hint = "correct the URL, or make the ledger with `dpdask ledger init --url URL --dataset NAME --epsilon E`"
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
        code = getattr(error.orig, "sqlite_errorname", None) or getattr(error.orig, "sqlstate", None) or type(error.orig).__name__
        if isinstance(error, exc.OperationalError | exc.InterfaceError | exc.InternalError | exc.IntegrityError):
            return TemporaryError(
                f"the ledger cannot be reached or is busy ({code})", self.place, "check the server, the password and the access rights, and run again"
            )
        return SpecError(
            f"the database refused a statement of the ledger ({code})",
            self.place,
            "check that it is a ledger and that its user may read and write it",
        )


def digest_of(content: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a row; a float is written as its shortest exact text."""
    return hashlib.sha256(json.dumps(dict(content), sort_keys=True, default=repr).encode()).hexdigest()


def check_chain(record: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
    """Check that a chain is, link by link, the one that was appended to the dataset's record.

    Parameters
    ----------
    record
        The dataset's row.
    rows
        Its entries, in the order of their sequence numbers.

    Raises
    ------
    DataError
        Naming the first entry that is wrong.
    """
    digest = digest_of({key: record[key] for key in ("format", "name", "created", "epsilon", "delta")})
    for sequence, row in enumerate(rows, start=1):
        if row["sequence"] != sequence:
            raise chain_error(f"the entry {sequence - 1} appears twice" if row["sequence"] == sequence - 1 else f"the entry {sequence} is missing")
        if row["digest"] != digest_of({key: value for key, value in row.items() if key != "digest"}):
            raise chain_error(f"the entry {sequence} was changed")
        if row["previous"] != digest:  # this one is whole, so the one before it was rewritten
            raise chain_error(f"the entry {sequence - 1} was replaced" if sequence > 1 else "the limit of the dataset was changed")
        digest = row["digest"]
    if len(rows) > record["n_entries"]:
        raise chain_error(f"the entry {record['n_entries'] + 1} was not added by dpdask")
    if len(rows) < record["n_entries"]:
        raise chain_error(f"the entry {len(rows) + 1} is missing, the chain was cut")
    if digest != record["head"]:
        raise chain_error(f"the entry {len(rows)} was replaced" if rows else "the limit of the dataset was changed")


def _parse(url: str) -> URL:
    try:
        parsed = make_url(url)
        known = parsed.drivername in _DRIVERS
    except (exc.ArgumentError, ValueError, TypeError, AttributeError):  # their messages quote the URL
        raise SpecError(*_SPOKEN) from None
    if not known:
        raise SpecError(*_SPOKEN)
    if parsed.get_backend_name() == "sqlite" and (not parsed.database or parsed.database.startswith((":memory:", "file:"))):
        raise SpecError("an SQLite ledger needs a named file", "ledger.url", "for example sqlite:///ledger.db")
    return parsed


def _find_file(url: URL) -> Path:
    """Return the one path that checks and SQLite use, however the process changes its folder, and whatever links are in the URL."""
    try:
        return Path(url.database or "").resolve()
    except OSError:  # the working folder was removed
        raise SpecError("the folder of the ledger does not exist", url.set(query={}).render_as_string(), "make it") from None


@functools.lru_cache(maxsize=16)  # an engine keeps compiled statements and the place of its file, and no connection
def _engine(url: URL) -> Engine:
    backend = url.get_backend_name()
    defaults = {name: value for name, value in _CONNECT[backend].items() if name not in url.query}
    try:
        engine = sa.create_engine(url.set(drivername=_DRIVERS[url.drivername]), poolclass=NullPool, hide_parameters=True, connect_args=defaults)
    except ImportError:
        raise SpecError("the driver of PostgreSQL is not installed", "ledger.url", "pip install 'dpdask[postgresql]'") from None
    except (exc.ArgumentError, ValueError, TypeError):
        raise SpecError("an option of the ledger's URL cannot be read", "ledger.url", "correct what follows the question mark") from None
    if backend == "sqlite":
        sa.event.listen(engine, "connect", _on_connect)
        sa.event.listen(engine, "begin", _on_begin)
    return engine


def _on_connect(connection: sqlite3.Connection, _: object) -> None:
    connection.isolation_level = None  # transactions are ours to begin, not the driver's
    connection.execute("PRAGMA synchronous=EXTRA")
    connection.execute("PRAGMA secure_delete=ON")  # a run's key is gone when it is removed


def _on_begin(connection: Connection) -> None:
    connection.exec_driver_sql("BEGIN" if connection.get_execution_options().get("dpdask_reads") else "BEGIN IMMEDIATE")


def _is_contended(error: exc.DBAPIError) -> bool:
    """Return whether the transaction conflicted with another one; SQLite does not always wait before it fails."""
    busy = getattr(error.orig, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
    return busy or getattr(error.orig, "sqlstate", None) in _RETRIED_STATES
