"""Releases as Iceberg tables, in an SQL catalog: what other engines read, what is added and replaced, lost answers, and what is refused."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from e2e.helpers import LEVELS, charging_entries, hidden, lake, load, run_here, write_job
from faults.drivers import Drivers
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import CommitFailedException
from services.stores import OpenStore

from dpdask.engine.account import open_ledger
from dpdask.errors import OutputError, SpecError, TemporaryError
from dpdask.io.iceberg_log import IcebergLog
from dpdask.io.shards import Shard, Transaction, list_manifests
from dpdask.io.storage import Folder
from dpdask.jobs.plan import plan_job
from dpdask.jobs.run import abort, status

NAME = "db.ratings"
FSSPEC = "pyiceberg.io.fsspec.FsspecFileIO"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return lake(tmp_path / "in", [150, 90, 400])


@pytest.fixture
def place(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "warehouse").mkdir()
    return {
        "name": "lake",
        "type": "sql",
        "uri": f"sqlite:///{tmp_path}/warehouse/catalog.db",
        "warehouse": (tmp_path / "warehouse").as_uri(),
    }


@pytest.fixture
def catalog(place: dict[str, str]) -> Catalog:
    found = load_catalog(**place)
    found.create_namespace("db")
    return found


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "warehouse" / "ratings"


def write_iceberg(
    folder: Path,
    source: Path,
    out: Path,
    place: dict[str, str],
    mode: str = "error",
    **changes: Any,
) -> Path:
    return write_job(
        folder,
        source,
        out,
        output__format="iceberg",
        output__mode=mode,
        output__table=NAME,
        output__catalog=place,
        **changes,
    )


def test_other_engines_read_the_bytes_of_a_folder(
    source: Path, out: Path, place: dict[str, str], catalog: Catalog, tmp_path: Path
) -> None:
    plain = run_here(write_job(tmp_path / "plain", source, tmp_path / "folder"))
    job = write_iceberg(tmp_path / "job", source, out, place)
    assert f"{out}, as an Iceberg table" in str(plan_job(load(job)))
    outcome = run_here(job)
    assert [shard.sha256 for shard in outcome.manifest.shards] == [
        shard.sha256 for shard in plain.manifest.shards
    ]
    expected = pq.read_table(tmp_path / "folder").to_pylist()
    table = catalog.load_table(NAME)
    assert table.scan().to_arrow().to_pylist() == expected
    assert pl.scan_iceberg(table, reader_override="pyiceberg").collect().to_dicts() == expected
    [snapshot] = table.snapshots()
    assert snapshot.summary is not None
    assert snapshot.summary["dpdask.card_sha256"] == outcome.manifest.card_sha256
    assert (out / snapshot.summary["dpdask.card"]).exists()
    assert "commit.retry.num-retries" not in table.properties
    assert not hidden(out).exists()
    again = run_here(job)
    assert (again.status, again.manifest) == ("already released", outcome.manifest)
    assert status(out.as_uri()).stage == "released"


def test_a_table_is_appended_to_and_overwritten(
    source: Path, out: Path, place: dict[str, str], catalog: Catalog, tmp_path: Path
) -> None:
    jobs = [
        write_iceberg(tmp_path / name, source, out, place, "append", name=name)
        for name in ("one", "two")
    ]
    outcomes = [run_here(job) for job in jobs]
    assert [run_here(job).status for job in jobs] == ["already released"] * 2
    table = catalog.load_table(NAME)
    assert table.scan().count() == sum(outcome.manifest.n_rows for outcome in outcomes)
    assert len(table.snapshots()) == 2
    assert len(list((out / "_dpdask").glob("release-*.json"))) == 2
    third = run_here(
        write_iceberg(tmp_path / "three", source, out, place, "overwrite", name="three")
    )
    table = catalog.load_table(NAME)
    assert {Path(task.file.file_path).name for task in table.scan().plan_files()} == {
        shard.name for shard in third.manifest.shards
    }
    assert [run_here(job).status for job in jobs] == ["already released"] * 2
    with pytest.raises(OutputError, match="was not written by this run"):
        run_here(write_iceberg(tmp_path / "four", source, out, place, name="four"))


def test_a_release_is_known_when_its_snapshot_has_expired(
    source: Path, out: Path, place: dict[str, str], catalog: Catalog, tmp_path: Path
) -> None:
    one = write_iceberg(tmp_path / "one", source, out, place, "append", name="one")
    run_here(one)
    run_here(write_iceberg(tmp_path / "two", source, out, place, "append", name="two"))
    table = catalog.load_table(NAME)
    table.maintenance.expire_snapshots().by_id(table.snapshots()[0].snapshot_id).commit()
    assert len(catalog.load_table(NAME).snapshots()) == 1
    assert run_here(one).status == "already released"


def test_a_commit_whose_answer_is_lost_is_found(
    source: Path,
    out: Path,
    place: dict[str, str],
    catalog: Catalog,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    commit_table, calls = SqlCatalog.commit_table, []

    def cut(self: SqlCatalog, *arguments: Any) -> Any:
        calls.append(commit_table(self, *arguments))
        raise ConnectionResetError

    monkeypatch.setattr(SqlCatalog, "commit_table", cut)
    outcome = run_here(write_iceberg(tmp_path / "job", source, out, place))
    assert outcome.status == "released"
    assert len(calls) == 1
    assert catalog.load_table(NAME).scan().count() == outcome.manifest.n_rows


@pytest.mark.parametrize("error", [CommitFailedException("someone else"), ConnectionRefusedError()])
def test_a_commit_that_is_refused_is_made_once(
    error: Exception,
    source: Path,
    out: Path,
    place: dict[str, str],
    catalog: Catalog,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run_here(write_iceberg(tmp_path / "first", source, out, place))
    commit_table, refused = SqlCatalog.commit_table, []

    def refuse(self: SqlCatalog, *arguments: Any) -> Any:
        if not refused:
            refused.append(True)
            raise error
        return commit_table(self, *arguments)

    before = catalog.load_table(NAME).scan().count()
    monkeypatch.setattr(SqlCatalog, "commit_table", refuse)
    job = write_iceberg(tmp_path / "second", source, out, place, "append", name="second")
    if isinstance(error, CommitFailedException):
        outcome = run_here(job)
    else:
        with pytest.raises(TemporaryError):
            run_here(job)
        outcome = run_here(job)
    table = catalog.load_table(NAME)
    assert table.scan().count() == before + outcome.manifest.n_rows
    assert len(table.snapshots()) == 2


@pytest.mark.parametrize("mode", ["error", "append"])
def test_two_writers_with_one_release_commit_once(
    mode: Any,
    out: Path,
    place: dict[str, str],
    catalog: Catalog,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both have looked before either commits, as a driver that slept and the one that took its run over."""
    types = pa.schema([("n", pa.int64())])
    shard = Shard(name="part-0.parquet", n_rows=2, n_bytes=0, sha256="")
    out.mkdir()
    pq.write_table(pa.table({"n": [1, 2]}, schema=types), out / shard.name)
    if mode == "append":
        catalog.create_table(NAME, types, location=out.as_uri())
    commit_table, slept = SqlCatalog.commit_table, []

    def commit() -> None:
        IcebergLog(Folder(out.as_uri()), NAME, place).commit(
            Transaction("r", 7), [shard], types, {}, mode
        )

    def sleep(self: SqlCatalog, *arguments: Any) -> Any:
        if not slept:
            slept.append(True)
            commit()
        return commit_table(self, *arguments)

    monkeypatch.setattr(SqlCatalog, "commit_table", sleep)
    commit()
    table = catalog.load_table(NAME)
    assert len(table.snapshots()) == 1
    assert table.scan().count() == 2


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("point", "committed"),
    [
        ("some-shards", False),
        ("staged", False),
        ("uncommitted", True),
        pytest.param("committed", True, marks=pytest.mark.slow),
    ],
)
def test_a_driver_killed_at_any_stage(
    point: str,
    committed: bool,
    drivers: Drivers,
    out: Path,
    place: dict[str, str],
    catalog: Catalog,
    tmp_path: Path,
) -> None:
    source = lake(tmp_path / "more", [150, 90, 1200])
    quiet = run_here(write_job(tmp_path / "plain", source, tmp_path / "folder"))
    job = write_iceberg(tmp_path / "job", source, out, place)
    assert drivers.run("run", job, point=point)[0] == -signal.SIGKILL
    assert catalog.table_exists(NAME) == committed
    assert (status(out.as_uri()).stage == "released") == committed
    code, text = drivers.run("run", job)
    assert code == 0
    assert ("already released" in text) == committed
    [manifest] = list_manifests(Folder(out.as_uri()))
    assert [shard.sha256 for shard in manifest.shards] == [
        shard.sha256 for shard in quiet.manifest.shards
    ]
    assert len(catalog.load_table(NAME).snapshots()) == 1
    assert not hidden(out).exists()


def test_abort_asks_the_catalog(
    drivers: Drivers,
    source: Path,
    out: Path,
    place: dict[str, str],
    catalog: Catalog,
    tmp_path: Path,
) -> None:
    job = write_iceberg(tmp_path / "job", source, out, place)
    drivers.run("run", job, point="uncommitted")
    with pytest.raises(OutputError, match="released already"):
        abort(out.as_uri())
    assert run_here(job).status == "already released"
    other = write_iceberg(tmp_path / "other", source, out, place, "append", name="other")
    drivers.run("run", other, point="staged")
    assert abort(out.as_uri())
    table = catalog.load_table(NAME)
    assert {Path(task.file.file_path) for task in table.scan().plan_files()} == {
        Path(f"file:{path}") for path in out.glob("*.parquet")
    }


def test_drivers_race_for_one_table(
    drivers: Drivers,
    source: Path,
    out: Path,
    place: dict[str, str],
    catalog: Catalog,
    tmp_path: Path,
) -> None:
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    open_ledger(url).init("ratings", 4.0)
    ledger = {"url": url, "dataset": "ratings"}
    codes = drivers.race(
        4, "run", write_iceberg(tmp_path / "job", source, out, place, ledger=ledger)
    )
    assert set(codes) <= {0, TemporaryError.exit_code}
    assert 0 in codes
    assert [entry.kind for entry in charging_entries(**ledger)] == ["intend", "commit"]
    assert len(catalog.load_table(NAME).snapshots()) == 1


@pytest.mark.parametrize(
    "type_",
    [
        pa.uint32(),
        pa.float16(),
        pa.timestamp("ns"),
        pa.timestamp("us", "Europe/Berlin"),
        pa.date64(),
    ],
    ids=str,
)
def test_types_that_iceberg_does_not_know_are_refused_before_anything_is_charged(
    type_: pa.DataType, out: Path, place: dict[str, str], catalog: Catalog, tmp_path: Path
) -> None:
    pq.write_table(
        pa.table({"kept": pa.nulls(40, type_), "rating": LEVELS * 4}),
        tmp_path / "rows.parquet",
        store_schema=True,
    )
    schema = {
        "kept": {"role": "keep"},
        "rating": {"role": "privatise", "kind": "discrete", "levels": LEVELS},
    }
    job = write_iceberg(tmp_path / "job", tmp_path / "rows.parquet", out, place, schema=schema)
    if type_ == pa.date64():  # which Parquet keeps as date32
        assert run_here(job).status == "released"
        return
    with pytest.raises(SpecError, match="an Iceberg table has no type"):
        run_here(job)
    assert not hidden(out).exists()


def test_types_that_iceberg_knows_come_back(
    out: Path, place: dict[str, str], catalog: Catalog, tmp_path: Path
) -> None:
    types = [
        pa.int8(),
        pa.int16(),
        pa.float32(),
        pa.bool_(),
        pa.date32(),
        pa.large_string(),
        pa.binary(),
        pa.decimal128(12, 3),
        pa.timestamp("us"),
    ]
    types += [pa.timestamp("us", "UTC"), pa.list_(pa.int32()), pa.struct([("a", pa.int64())])]
    rows = pa.table(
        {
            **{f"kept{number}": pa.nulls(40, type_) for number, type_ in enumerate(types)},
            "rating": LEVELS * 4,
        }
    )
    pq.write_table(rows, tmp_path / "rows.parquet")
    kept = {f"kept{number}": {"role": "keep"} for number in range(len(types))}
    schema = {**kept, "rating": {"role": "privatise", "kind": "discrete", "levels": LEVELS}}
    outcomes = [
        run_here(
            write_iceberg(
                tmp_path / name,
                tmp_path / "rows.parquet",
                out,
                place,
                "append",
                name=name,
                schema=schema,
            )
        )
        for name in ("one", "two")
    ]
    assert catalog.load_table(NAME).scan().to_arrow().num_rows == sum(
        outcome.manifest.n_rows for outcome in outcomes
    )


def test_what_cannot_be_written_to(
    source: Path, out: Path, place: dict[str, str], catalog: Catalog, tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    open_ledger(url).init("ratings", 4.0)
    job = write_iceberg(
        tmp_path / "job", source, out, place, "append", ledger={"url": url, "dataset": "ratings"}
    )
    with pytest.raises(OutputError, match="no such namespace"):
        run_here(job, output__table="nowhere.ratings")
    catalog.create_table(NAME, pa.schema([("x", pa.int64())]), location=out.as_uri())
    with pytest.raises(OutputError, match="other columns"):
        run_here(job)
    with pytest.raises(OutputError, match="lies in another folder"):
        run_here(job, output__path=str(tmp_path / "elsewhere"))
    assert charging_entries(url, "ratings") == []


def test_what_cannot_be_asked_for(
    source: Path, out: Path, place: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SpecError, match="which needs both"):
        load(write_job(tmp_path / "job", source, out, output__format="iceberg"))
    with pytest.raises(SpecError, match="holds no password"):
        load(
            write_iceberg(
                tmp_path / "job", source, out, {**place, "uri": "postgresql://me:secret@host/db"}
            )
        )
    job = write_iceberg(tmp_path / "job", source, out, {"name": "lake", "type": "nonsense"})
    with pytest.raises(SpecError, match="the catalog cannot be opened"):
        run_here(job)
    monkeypatch.setitem(sys.modules, "pyiceberg.catalog", None)
    with pytest.raises(SpecError, match=r"install dpdask\[iceberg\]"):
        run_here(job)


@pytest.mark.slow
def test_a_table_in_a_store(
    open_store: OpenStore,
    source: Path,
    place: dict[str, str],
    catalog: Catalog,
    tmp_path: Path,
    monkeypatch: Any,
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with open_store("radosgw") as store:
        job = write_job(
            tmp_path / "job",
            source,
            tmp_path,
            output__path=store.folder.url,
            output__format="iceberg",
            output__table=NAME,
            output__catalog=place,
        )
        outcome = run_here(job)
        assert run_here(job).status == "already released"
        assert (
            load_catalog(**place, **{"py-io-impl": FSSPEC})
            .load_table(NAME)
            .scan()
            .to_arrow()
            .num_rows
            == outcome.manifest.n_rows
        )
        assert not store.folder.sibling(".", ".dpdask").exists()
