"""The keys of unfinished runs in a ledger's database: kept from a run's beginning to its end, and overwritten when they go."""

from __future__ import annotations

import uuid

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from dpdask.privacy.ledger_tables import RUN_KEYS, LedgerStore

_NAME = "name"


class KeyTable:
    """The table of run keys in a ledger's database.

    Parameters
    ----------
    url
        The ledger's URL.

    Privacy
    -------
    Whoever can read this table, or a backup of it, can undo the noise of the runs that are unfinished. A backup that is older than
    a run's end holds its key for as long as the backup is kept: it is as private as the table that the run reads.
    """

    def __init__(self, url: str) -> None:
        self._store = LedgerStore(url)

    def write(self, run_id: str, secret: bytes) -> None:
        """Keep a run's key.

        Parameters
        ----------
        run_id
            The name of the run.
        secret
            Its key.
        """

        def insert(connection: Connection) -> None:
            connection.execute(sa.delete(RUN_KEYS).where(RUN_KEYS.c.run_id == run_id))
            connection.execute(sa.insert(RUN_KEYS), {"run_id": run_id, "key": secret.hex()})

        self._store.create(insert)

    def find_name(self) -> str:
        """Return the random name of this table, which tells it from that of another ledger; it is made once.

        Raises
        ------
        SpecError
            If there is no ledger.
        """

        def make(connection: Connection) -> str:
            found = _find(connection, _NAME)
            if found is None:
                found = uuid.uuid4().hex
                connection.execute(sa.insert(RUN_KEYS), {"run_id": _NAME, "key": found})
            return found

        return self._store.read(lambda connection: _find(connection, _NAME)) or self._store.create(make)

    def read(self, run_id: str) -> bytes | None:
        """Return a run's key, or None."""
        found = self._store.read(lambda connection: _find(connection, run_id))
        return None if found is None else bytes.fromhex(found)

    def remove(self, run_id: str) -> None:
        """Overwrite a run's key and remove it, if it is there."""

        def delete(connection: Connection) -> None:
            if sa.inspect(connection).has_table(RUN_KEYS.name):
                connection.execute(sa.update(RUN_KEYS).where(RUN_KEYS.c.run_id == run_id).values(key="0" * 64))
                connection.execute(sa.delete(RUN_KEYS).where(RUN_KEYS.c.run_id == run_id))

        self._store.write(delete)


def _find(connection: Connection, name: str) -> str | None:
    if not sa.inspect(connection).has_table(RUN_KEYS.name):
        return None
    found: str | None = connection.execute(sa.select(RUN_KEYS.c.key).where(RUN_KEYS.c.run_id == name)).scalar()
    return found
