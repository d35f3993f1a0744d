"""Jobs whose output is a Delta table: killed at any stage, raced for and aborted, on the local disk and in a store."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import deltalake
import pytest
from e2e.helpers import charging_entries, lake, run_here, write_job
from faults.driver import AFTER_COMMIT, BEFORE_COMMIT
from faults.drivers import Drivers
from services.stores import OpenStore, Store

from dpdask.engine.account import open_ledger
from dpdask.errors import TemporaryError
from dpdask.io.delta_log import DeltaLog
from dpdask.io.shards import list_manifests
from dpdask.io.storage import Folder
from dpdask.jobs.run import abort, status

FOLDER_ALONE = {"success-staged", "before-move", "after-move"}
BEFORE = [point for point in (*BEFORE_COMMIT, "entry-unwritten") if point not in FOLDER_ALONE]
AFTER = ["entry-written", *(point for point in AFTER_COMMIT if point not in FOLDER_ALONE)]
LOCAL_ALONE = {"locked", "key-written", "key-removed", "half-removed"}
FEW = {
    ("fitted", "local"),
    ("some-shards", "local"),
    ("entry-unwritten", "local"),
    ("entry-written", "local"),
    ("key-removed", "local"),
}
FEW |= {("entry-written", "versioned radosgw")}
STORES = ("local", "radosgw", "versioned radosgw")
CASES = [
    (point, store)
    for store in STORES
    for point in (*BEFORE, *AFTER)
    if store == "local" or point not in LOCAL_ALONE
]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lake(tmp_path_factory.mktemp("source") / "in", [150, 90, 1200])


@pytest.fixture(scope="module")
def quiet(source: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    base = tmp_path_factory.mktemp("quiet")
    return [
        shard.sha256 for shard in run_here(write_job(base, source, base / "out")).manifest.shards
    ]


@pytest.fixture
def store(
    request: pytest.FixtureRequest,
    open_store: OpenStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Store]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    *versioned, name = request.param.split()
    with open_store(name, versioned=bool(versioned)) as opened:
        yield opened


def environment(store: Store, tmp_path: Path) -> dict[str, str]:
    return {
        **(store.server.environment() if store.server else {}),
        "XDG_STATE_HOME": str(tmp_path / "state"),
    }


def check_released(folder: Folder, quiet: list[str]) -> None:
    [manifest] = list_manifests(folder)
    assert [shard.sha256 for shard in manifest.shards] == quiet
    assert set(folder.names()) == {shard.name for shard in manifest.shards} | {
        "_dpdask",
        "_delta_log",
    }
    assert len(folder.child("_dpdask").names()) == 4
    assert len(folder.child("_delta_log").names()) == 1
    assert not folder.sibling(".", ".dpdask").exists()


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("point", "store"),
    [
        pytest.param(*case, id="-".join(case), marks=() if case in FEW else pytest.mark.slow)
        for case in CASES
    ],
    indirect=["store"],
)
def test_killed_at_any_stage(
    point: str, store: Store, drivers: Drivers, source: Path, quiet: list[str], tmp_path: Path
) -> None:
    job = write_job(
        tmp_path / "job", source, tmp_path, output__path=store.folder.url, output__format="delta"
    )
    around = environment(store, tmp_path)
    assert drivers.run("run", job, point=point, environment=around)[0] == -signal.SIGKILL
    assert DeltaLog(store.folder).exists() == (point in AFTER)
    assert (status(store.folder.url).stage == "released") == (point in AFTER)
    code, text = drivers.run("run", job, environment=around)
    assert code == 0
    assert ("already released" in text) == (point in AFTER)
    check_released(store.folder, quiet)


@pytest.mark.parametrize("store", ["local"], indirect=True)
def test_another_engine_reads_what_a_killed_driver_has_committed(
    store: Store, drivers: Drivers, source: Path, tmp_path: Path
) -> None:
    job = write_job(
        tmp_path / "job", source, tmp_path, output__path=store.folder.url, output__format="delta"
    )
    drivers.run("run", job, point="entry-written", environment=environment(store, tmp_path))
    [manifest] = list_manifests(store.folder)
    assert (
        deltalake.DeltaTable(store.folder.local_path).to_pyarrow_table().num_rows == manifest.n_rows
    )


@pytest.mark.parametrize(
    "store", ["local", pytest.param("radosgw", marks=pytest.mark.slow)], indirect=True
)
def test_an_aborted_run_leaves_the_table_as_it_was(
    store: Store, drivers: Drivers, source: Path, quiet: list[str], tmp_path: Path
) -> None:
    first = write_job(
        tmp_path / "first", source, tmp_path, output__path=store.folder.url, output__format="delta"
    )
    run_here(first)
    second = write_job(
        tmp_path / "second",
        source,
        tmp_path,
        name="x",
        output__path=store.folder.url,
        output__format="delta",
        output__mode="append",
    )
    drivers.run("run", second, point="entry-unwritten", environment=environment(store, tmp_path))
    assert status(store.folder.url).stage == "staged"
    assert abort(store.folder.url)
    check_released(store.folder, quiet)


@pytest.mark.few(1)
@pytest.mark.parametrize("n_drivers", [3, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("store", ["local", "versioned radosgw"], indirect=True)
def test_drivers_race_for_one_table(
    n_drivers: int, store: Store, drivers: Drivers, source: Path, tmp_path: Path
) -> None:
    place = {"url": f"sqlite:///{tmp_path / 'ledger.db'}", "dataset": "ratings"}
    open_ledger(place["url"]).init("ratings", 8.0)
    for number, mode in enumerate(("error", "append"), start=1):
        job = write_job(
            tmp_path / mode,
            source,
            tmp_path,
            ledger=place,
            output__path=store.folder.url,
            output__format="delta",
            output__mode=mode,
        )
        codes = drivers.race(n_drivers, "run", job, environment=environment(store, tmp_path))
        assert set(codes) <= {0, TemporaryError.exit_code}
        assert 0 in codes
        assert [entry.kind for entry in charging_entries(**place)] == ["intend", "commit"] * number
        assert len(store.folder.child("_delta_log").names()) == number
        manifests = list_manifests(store.folder)
        assert len(manifests) == number
        assert set(store.folder.names()) == {
            shard.name for each in manifests for shard in each.shards
        } | {"_dpdask", "_delta_log"}
