"""What every test shares: Dask spills below pytest's own folder, never into the tree or a user's."""

from __future__ import annotations

from collections.abc import Iterator

import dask
import pytest


@pytest.fixture(scope="session", autouse=True)
def _dask_in_tmp(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with dask.config.set({"temporary-directory": str(tmp_path_factory.mktemp("dask"))}):
        yield
