"""The cells of the matrix of faults: a few by default, all with `-m slow`, or with a table by `python -m faults.matrix`."""

from __future__ import annotations

from pathlib import Path

import pytest
from e2e.helpers import SEED, lake, run_here, write_job
from faults.drivers import Drivers
from faults.matrix import ANYWHERE, CELLS, IN_STORES, Cell
from services.stores import OpenStore

from dpdask.engine.account import open_ledger
from dpdask.io import filesystems

MECHANISM = {"kind": "dip", "reference": {"kind": "histogram"}, "channel": "laplace"}  # a hold-out would be the ledger's own
SMALL = {("worker killed", "radosgw"), ("commit refused", "radosgw"), ("commit unanswered", "versioned radosgw"), ("store busy", "azurite")}
SMALL |= {("commit refused", "versioned radosgw delta"), ("commit unanswered", "radosgw delta"), ("second driver", "local delta")}
SMALL |= {("driver killed", "local delta"), ("credentials expire", "radosgw"), ("store full", "azurite"), ("cluster lost", "local")}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lake(tmp_path_factory.mktemp("source") / "in", [150, 90, 700, 500])


@pytest.fixture(scope="module")
def quiet(source: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    base = tmp_path_factory.mktemp("quiet")
    return [shard.sha256 for shard in run_here(write_job(base, source, base / "out", mechanism=MECHANISM)).manifest.shards]


@pytest.mark.usefixtures("seeded_ledgers")
@pytest.mark.parametrize(
    ("fault", "name"), [pytest.param(*cell, id="-".join(cell), marks=() if cell in SMALL else pytest.mark.slow) for cell in CELLS]
)
def test_a_fault_changes_no_byte(
    fault: str,
    name: str,
    open_store: OpenStore,
    drivers: Drivers,
    source: Path,
    quiet: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(filesystems, "_FIRST_WAIT_SECONDS", 0.05)
    ledger = {"url": f"sqlite:///{tmp_path / 'ledger.db'}", "dataset": "ratings"}
    open_ledger(ledger["url"]).init("ratings", 4.0)
    format_ = "delta" if name.endswith(" delta") else "parquet"
    *versioned, name = name.removesuffix(" delta").split()
    with open_store(name, versioned=bool(versioned)) as store:
        output = {"output__path": store.folder.url, "output__format": format_}
        job = write_job(tmp_path / "job", source, tmp_path, ledger=ledger, insecure_seed=SEED, mechanism=MECHANISM, **output)
        around = {"XDG_STATE_HOME": str(tmp_path / "state"), **(store.server.environment() if store.server else {})}
        cell = Cell(store=store, job=job, ledger=ledger, drivers=drivers, environment=around, quiet=quiet, scratch=tmp_path, format=format_)
        {**ANYWHERE, **IN_STORES}[fault](cell)
        cell.check()
