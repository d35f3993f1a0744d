"""Fixtures of jobs that write to a lake."""

import pytest
from pyiceberg.catalog import load_catalog


@pytest.fixture
def place(tmp_path):
    """Return a new catalog of Iceberg tables, as a job names it."""
    (tmp_path / "lake").mkdir()
    return {
        "name": "lake",
        "type": "sql",
        "uri": f"sqlite:///{tmp_path}/catalog.db",
        "warehouse": (tmp_path / "lake").as_uri(),
    }


@pytest.fixture
def catalog(place):
    """Return that catalog, with the namespace `db`."""
    found = load_catalog(**place)
    found.create_namespace("db")
    return found
