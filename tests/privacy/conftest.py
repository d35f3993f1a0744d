"""Fixtures of ledgers."""

# nearer than the `url` of all tests: here a ledger is in SQLite and in PostgreSQL
from privacy.ledger_worker import postgres, url  # noqa: F401  # fixtures
