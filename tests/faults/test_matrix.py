"""What may go wrong with a run, on every store and in every format: a fault, what the command line answers, and how the run ends after all.

Each fault is a function of a `Cell`: it disturbs the run, checks the exit codes on the way, and leaves the release to `Cell.check`, which
compares its bytes with those of a run that nobody disturbed, counts charges and commits, and looks for what is left. An Iceberg table
lies in the store, and its catalog, which makes the commit, is a database of this machine.
Kills of the driver itself are in test_kills.py.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import pytest
from distributed import Client
from e2e.helpers import (
    SEED,
    charged_kinds,
    lake,
    load,
    processes,
    run_here,
    write_job,
)
from faults.drivers import Drivers
from pyiceberg.catalog import load_catalog
from services.stores import Store

from dpdask.engine.account import open_ledger
from dpdask.errors import InputError, OutputError, TemporaryError
from dpdask.io import storage
from dpdask.io.shards import MANIFEST_NAME, list_manifests
from dpdask.jobs.run import abort, run_job

FOREVER = 10**6
TABLE = "db.ratings"
COMMITS = {"parquet": MANIFEST_NAME, "delta": "_delta_log/", "iceberg": ".metadata.json"}
LAST = {"parquet": "_SUCCESS", "delta": "_delta_log", "iceberg": "metadata"}


@dataclass(frozen=True)
class Cell:
    """A job whose output is in one store, and the drivers that run it."""

    store: Store
    job: Path
    ledger: dict[str, str]
    drivers: Drivers
    environment: dict[str, str]
    quiet: list[str]
    scratch: Path
    format: str
    catalog: dict[str, str]

    @property
    def commit(self):
        """A part of the path of the request that commits a release; of an Iceberg table it is the last one before."""
        return COMMITS[self.format]

    def run(self, point=None, strike="kill"):
        """Run the job in a process of its own, struck at a point, and return its exit code."""
        return self.drivers.run(
            "run", self.job, point=point, strike=strike, environment=self.environment
        )[0]

    def end(self):
        """Run the job undisturbed, to its end."""
        assert self.run() == 0

    def check(self):
        """Check that there is one release, of the right bytes, for one charge, and nothing else."""
        [manifest] = list_manifests(self.store.folder)
        assert [shard.sha256 for shard in manifest.shards] == self.quiet
        names = {shard.name for shard in manifest.shards}
        assert set(self.store.folder.names()) == names | {"_dpdask", LAST[self.format]}
        if self.format == "delta":
            assert len(self.store.folder.child("_delta_log").names()) == 1
        if self.format == "iceberg":
            table = load_catalog(
                **self.catalog, **{"py-io-impl": "dpdask.io.iceberg_files.StoreFiles"}
            ).load_table(TABLE)
            assert len(table.snapshots()) == 1
            assert {
                task.file.file_path.rpartition("/")[2] for task in table.scan().plan_files()
            } == names
        assert not self.store.folder.sibling(".", ".dpdask").exists()
        assert charged_kinds(**self.ledger) == ["intend", "commit"]
        assert open_ledger(self.ledger["url"]).verify(self.ledger["dataset"])


def kill_a_worker(cell):
    killed = []

    def progress(stage, done, _):
        if stage == "write" and done == 1 and not killed:
            killed.append(_kill_one(cluster))

    with processes(2) as cluster, Client(cluster):
        run_job(load(cell.job), progress)
    assert killed


def _kill_one(cluster):
    pid = next(nanny.pid for nanny in cluster.workers.values() if nanny.pid)
    os.kill(pid, signal.SIGKILL)
    return int(pid)


def lose_all_workers(cell):
    """As SLURM does when it cancels a job: the driver ends with 75, or goes on with new workers."""
    closed = []

    def progress(stage, done, _):
        if stage == "write" and done == 1 and not closed:
            closed.append(True)
            cluster.close()

    cluster = processes(2)
    client = Client(cluster)
    try:
        with pytest.raises(TemporaryError):
            run_job(load(cell.job), progress)
    finally:
        client.close()
        cluster.close()
    cell.end()


def start_a_second_driver(cell):
    sign = cell.scratch / "sign"
    pid = cell.drivers.start(
        "run",
        cell.job,
        point="some-shards",
        strike="pause",
        sign=sign,
        environment=cell.environment,
    )
    while not sign.exists():
        time.sleep(0.02)
    for call in (
        lambda: run_here(cell.job),
        lambda: abort(cell.store.folder.url, cell.ledger["url"]),
    ):
        with pytest.raises(TemporaryError, match="another run is writing this output"):
            call()
    os.kill(pid, signal.SIGKILL)
    cell.drivers.wait()
    cell.end()


def refuse_the_commit(cell):
    if cell.store.server is not None:
        cell.store.proxy.refuse_next(times=FOREVER, method="PUT", path=cell.commit)
        assert cell.run() == TemporaryError.exit_code
        cell.store.proxy.forget()
    if cell.format == "iceberg":
        assert cell.run("catalog-unasked", "disconnect") == TemporaryError.exit_code
    cell.end()


def lose_the_answer_of_the_commit(cell):
    if cell.store.server is not None:
        cell.store.proxy.cut_response(times=2, method="PUT", path=cell.commit)
    assert cell.run("catalog-asked" if cell.format == "iceberg" else None, "disconnect") == 0


def answer_that_the_store_is_busy(cell):
    cell.store.proxy.answer_next(503, times=2, method="PUT", path="part-0000")
    cell.store.proxy.answer_next(503, times=2, method="GET", path="part.")
    cell.end()


def let_the_credentials_expire(cell):
    cell.store.proxy.answer_next(403, times=FOREVER, method="PUT", path="part-00001")
    assert cell.run() in (InputError.exit_code, OutputError.exit_code)
    cell.store.proxy.forget()
    cell.end()


def fill_the_store(cell):
    cell.store.proxy.answer_next(507, times=FOREVER, method="PUT", path="part-00001")
    assert cell.run() == TemporaryError.exit_code
    cell.store.proxy.forget()
    cell.end()


def delay_every_answer(cell):
    cell.store.proxy.delay_seconds = 0.1
    cell.end()


def list_as_before(cell):
    """All listings up to the commit are stale, and one after the release: the driver may stop, but not take the run for another one."""
    assert cell.run("all-shards") == -signal.SIGKILL
    cell.store.proxy.list_as_before(times=FOREVER)
    assert cell.run("uncommitted") in (-signal.SIGKILL, TemporaryError.exit_code)
    cell.store.proxy.forget()
    cell.end()
    cell.store.proxy.list_as_before()
    cell.end()


ANYWHERE = {
    "worker killed": kill_a_worker,
    "cluster lost": lose_all_workers,
    "second driver": start_a_second_driver,
}
IN_STORES = {
    "commit refused": refuse_the_commit,
    "commit unanswered": lose_the_answer_of_the_commit,
    "store busy": answer_that_the_store_is_busy,
    "credentials expire": let_the_credentials_expire,
    "store full": fill_the_store,
    "store slow": delay_every_answer,
    "stale listing": list_as_before,
}
STORES = ("local", "radosgw", "versioned radosgw", "azurite")
FAULTS = {**ANYWHERE, **IN_STORES}
AT_CATALOGS = ("commit refused", "commit unanswered")


def can_happen(fault, store, format_):
    """Return whether a fault is one of this store, or of the catalog of this format."""
    return fault in ANYWHERE or store != "local" or (format_ == "iceberg" and fault in AT_CATALOGS)


CELLS = [cell for cell in product(FAULTS, STORES, COMMITS) if can_happen(*cell)]


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
    ("stale listing", "radosgw", "delta"),
    ("commit refused", "azurite", "iceberg"),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return lake(tmp_path_factory.mktemp("source") / "in", [150, 90, 700, 500])


@pytest.fixture(scope="module")
def quiet(source, tmp_path_factory):
    base = tmp_path_factory.mktemp("quiet")
    return [
        shard.sha256
        for shard in run_here(
            write_job(base, source, base / "out", mechanism=MECHANISM)
        ).manifest.shards
    ]


@pytest.mark.matrix("{fault}", "{name}, {format_}")
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
    fault, name, format_, open_store, drivers, source, quiet, tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(storage, "_FIRST_WAIT_SECONDS", 0.05)
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
