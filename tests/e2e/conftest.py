"""The places of a job on a growing table."""

import pytest


@pytest.fixture
def source(tmp_path):
    return tmp_path / "in"


@pytest.fixture
def out(tmp_path):
    return tmp_path / "job" / "out"
