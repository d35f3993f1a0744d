"""The cells of the matrix of faults: a few by default, all with `-m slow`, or with a table by `python -m faults.matrix`."""

from __future__ import annotations

from pathlib import Path

import pytest
from e2e.helpers import SEED, lake, run_here, write_job
from faults.drivers import Drivers
from faults.matrix import CELLS, FAULTS, TABLE, Cell
from pyiceberg.catalog import load_catalog
from services.stores import OpenStore

from dpdask.engine.account import open_ledger
from dpdask.io import filesystems

MECHANISM = {
    "kind": "dip",
    "reference": {"kind": "histogram"},
    "channel": "laplace",
}  # a hold-out would be the ledger's own
SMALL = {
    ("worker killed", "radosgw", "parquet"),
    ("commit unanswered", "versioned radosgw", "parquet"),
    ("store busy", "azurite", "parquet"),
    ("credentials expire", "radosgw", "parquet"),
    ("store full", "azurite", "parquet"),
    ("cluster lost", "local", "parquet"),
    ("commit refused", "versioned radosgw", "delta"),
    ("second driver", "local", "delta"),
    ("driver killed", "local", "delta"),
    ("stale listing", "radosgw", "delta"),
    ("commit refused", "azurite", "iceberg"),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lake(tmp_path_factory.mktemp("source") / "in", [150, 90, 700, 500])


@pytest.fixture(scope="module")
def quiet(source: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    base = tmp_path_factory.mktemp("quiet")
    return [
        shard.sha256
        for shard in run_here(
            write_job(base, source, base / "out", mechanism=MECHANISM)
        ).manifest.shards
    ]


@pytest.mark.few(3)
@pytest.mark.usefixtures("seeded_ledgers")
@pytest.mark.parametrize(
    ("fault", "name", "format_"),
    [
        pytest.param(*cell, id="-".join(cell), marks=() if cell in SMALL else pytest.mark.slow)
        for cell in CELLS
    ],
)
def test_a_fault_changes_no_byte(
    fault: str,
    name: str,
    format_: str,
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
    catalog = {"name": "lake", "type": "sql", "uri": f"sqlite:///{tmp_path / 'catalog.db'}"}
    *versioned, name = name.split()
    with open_store(name, versioned=bool(versioned)) as store:
        output = {"output__path": store.folder.url, "output__format": format_}
        if format_ == "iceberg":
            load_catalog(**catalog).create_namespace("db")
            output |= {"output__table": TABLE, "output__catalog": catalog}
        job = write_job(
            tmp_path / "job",
            source,
            tmp_path,
            ledger=ledger,
            insecure_seed=SEED,
            mechanism=MECHANISM,
            **output,
        )
        around = {
            "XDG_STATE_HOME": str(tmp_path / "state"),
            **(store.server.environment() if store.server else {}),
        }
        cell = Cell(store, job, ledger, drivers, around, quiet, tmp_path, format_, catalog)
        FAULTS[fault](cell)
        cell.check()
