"""Releases as Delta tables: what other engines read, what is added and replaced, and what is refused before anything is charged."""

from __future__ import annotations

import hashlib
import json
import shutil
import stat
import sys
import time
from pathlib import Path
from typing import Any

import deltalake
import polars as pl
import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.parquet as pq
import pytest
from e2e.helpers import (
    LEVELS,
    call_cli,
    charging_entries,
    digests,
    error_line,
    hidden,
    lake,
    load,
    run_here,
    write_job,
)
from services.stores import OpenStore

from dpdask.engine.account import open_ledger
from dpdask.errors import InputError, MissingError, OutputError, SpecError, TemporaryError
from dpdask.io import delta_log, filesystems
from dpdask.io.delta_log import DeltaLog
from dpdask.io.shards import Shard, Transaction
from dpdask.io.storage import Folder
from dpdask.jobs import run_keys as naming
from dpdask.jobs.plan import audit_job, plan_job
from dpdask.jobs.run import abort, status
from dpdask.jobs.run_keys import ReleaseNames

TYPES = pa.schema([("n", pa.int64())])


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return lake(tmp_path / "in", [150, 90, 400])


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "lake" / "out"


def write_delta(folder: Path, source: Path, out: Path, mode: str = "error", **changes: Any) -> Path:
    return write_job(folder, source, out, output__format="delta", output__mode=mode, **changes)


def read_log(out: Path) -> list[list[dict[str, Any]]]:
    return [
        [json.loads(line) for line in entry.read_text().splitlines()]
        for entry in sorted((out / "_delta_log").glob("*.json"))
    ]


def commit_shards(
    folder: Folder, release: str = "r", n_shards: int = 1, mode: Any = "append", rows: int = 10
) -> None:
    """Commit files that may not exist: the log does not care."""
    shards = [
        Shard(name=f"part-{place:05d}-{release}.parquet", n_rows=rows, n_bytes=100, sha256="")
        for place in range(n_shards)
    ]
    DeltaLog(folder).commit(Transaction(release, 7), shards, TYPES, {}, mode)


def test_other_engines_read_the_bytes_of_a_folder(source: Path, out: Path, tmp_path: Path) -> None:
    plain = run_here(write_job(tmp_path / "plain", source, tmp_path / "folder"))
    outcome = run_here(write_delta(tmp_path / "job", source, out))
    assert outcome.status == "released"
    assert [shard.sha256 for shard in outcome.manifest.shards] == [
        shard.sha256 for shard in plain.manifest.shards
    ]
    expected = pq.read_table(tmp_path / "folder").to_pylist()
    table = deltalake.DeltaTable(out)
    assert table.to_pyarrow_table().to_pylist() == expected
    assert pl.read_delta(str(out)).to_dicts() == expected
    files = pads.dataset(
        [out / uri.rpartition("/")[2] for uri in table.file_uris()], format="parquet"
    )
    assert files.to_table().to_pylist() == expected
    assert not hidden(out).exists()


def test_the_log_says_what_is_released_and_no_more(source: Path, out: Path, tmp_path: Path) -> None:
    outcome = run_here(write_delta(tmp_path / "job", source, out))
    [entry] = read_log(out)
    adds = [action["add"] for action in entry if "add" in action]
    assert [add["path"] for add in adds] == [shard.name for shard in outcome.manifest.shards]
    assert [json.loads(add["stats"]) for add in adds] == [
        {"numRecords": shard.n_rows} for shard in outcome.manifest.shards
    ]
    assert len({add["modificationTime"] for add in adds}) == 1
    assert len({(out / add["path"]).stat().st_mtime_ns for add in adds}) == 1
    assert str(tmp_path) not in (out / "_delta_log" / f"{0:020}.json").read_text()
    [about] = deltalake.DeltaTable(out).history()
    card = (out / about["dpdask.card"]).read_bytes()
    assert (
        about["dpdask.card_sha256"]
        == outcome.manifest.card_sha256
        == hashlib.sha256(card).hexdigest()
    )


def test_vacuum_leaves_the_cards(source: Path, out: Path, tmp_path: Path) -> None:
    run_here(write_delta(tmp_path / "job", source, out))
    (out / "part-stray.parquet").write_bytes(b"")
    before = sorted(path.name for path in (out / "_dpdask").iterdir())
    removed = deltalake.DeltaTable(out).vacuum(
        retention_hours=0, enforce_retention_duration=False, dry_run=False, full=True
    )
    assert removed == ["part-stray.parquet"]
    assert sorted(path.name for path in (out / "_dpdask").iterdir()) == before


def test_a_second_run_finds_the_release(source: Path, out: Path, tmp_path: Path) -> None:
    for mode in ("error", "append", "overwrite"):
        table = out / mode
        job = write_delta(tmp_path / mode, source, table, mode)
        first = run_here(job)
        again = run_here(job)
        assert (again.status, again.manifest) == ("already released", first.manifest)
        assert len(read_log(table)) == 1
        assert status(table.as_uri()).stage == "released"
        with pytest.raises(OutputError, match="released already"):
            abort(table.as_uri())


def test_a_compacted_table_still_knows_its_release(source: Path, out: Path, tmp_path: Path) -> None:
    job = write_delta(tmp_path / "job", source, out)
    run_here(job)
    deltalake.DeltaTable(out).optimize.compact()
    deltalake.DeltaTable(out).create_checkpoint()
    (out / "_delta_log" / f"{0:020}.json").unlink()
    assert run_here(job).status == "already released"


def test_two_jobs_append_to_one_table(source: Path, out: Path, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    open_ledger(url).init("ratings", 8.0)
    ledger = {"url": url, "dataset": "ratings"}
    jobs = [
        write_delta(tmp_path / name, source, out, "append", name=name, ledger=ledger)
        for name in ("one", "two")
    ]
    outcomes = [run_here(job) for job in jobs]
    assert [run_here(job).status for job in jobs] == ["already released"] * 2
    assert len(read_log(out)) == 2
    assert len(list((out / "_dpdask").glob("release-*.json"))) == 2
    assert pl.read_delta(str(out)).height == sum(outcome.manifest.n_rows for outcome in outcomes)
    assert status(out.as_uri()).n_shards == sum(
        len(outcome.manifest.shards) for outcome in outcomes
    )
    assert [entry.kind for entry in charging_entries(**ledger)] == ["intend", "commit"] * 2
    assert all(audit_job(load(job), n_runs=1000)["sound"] for job in jobs)


def test_the_same_job_on_another_input_is_another_release(
    source: Path, out: Path, tmp_path: Path
) -> None:
    job = write_delta(tmp_path / "job", source, out, "append")
    once = write_delta(tmp_path / "once", source, tmp_path / "once" / "out")
    first = run_here(job)
    run_here(once)
    (source / "part.2.parquet").unlink()
    second = run_here(job)
    assert second.status == "released"
    assert pl.read_delta(str(out)).height == first.manifest.n_rows + second.manifest.n_rows
    assert run_here(once).status == "already released"


def test_overwrite_replaces_what_the_table_holds(source: Path, out: Path, tmp_path: Path) -> None:
    first = run_here(write_delta(tmp_path / "one", source, out))
    second = run_here(write_delta(tmp_path / "two", source, out, "overwrite", name="two"))
    table = deltalake.DeltaTable(out)
    assert {uri.rpartition("/")[2] for uri in table.file_uris()} == {
        shard.name for shard in second.manifest.shards
    }
    assert pl.read_delta(str(out), version=0).height == first.manifest.n_rows


def test_a_table_of_others_is_kept_or_taken_in(source: Path, out: Path, tmp_path: Path) -> None:
    rows = pq.read_table(source).drop_columns(["timestamp"]).slice(0, 5)
    deltalake.write_deltalake(str(out), rows)
    with pytest.raises(OutputError, match="was not written by this run"):
        run_here(write_delta(tmp_path / "error", source, out))
    assert run_here(write_delta(tmp_path / "append", source, out, "append")).status == "released"
    assert pl.read_delta(str(out)).height > 5


def test_a_folder_of_plain_files_is_no_table(source: Path, out: Path, tmp_path: Path) -> None:
    run_here(write_job(tmp_path / "plain", source, out))
    for mode in ("error", "append", "overwrite"):
        with pytest.raises(OutputError, match="was not written by this run"):
            run_here(write_delta(tmp_path / mode, source, out, mode))


def test_another_writer_that_is_faster_loses_nothing(
    source: Path, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_here(write_delta(tmp_path / "first", source, out))
    rows = pl.read_delta(str(out)).to_arrow().slice(0, 5)
    put_new, others = Folder.put_new, []

    def slow(self: Folder, name: str, data: bytes) -> bool:
        if self.url.endswith("_delta_log") and not others:
            others.append(True)
            deltalake.write_deltalake(str(out), rows, mode="append")
        return put_new(self, name, data)

    before = pl.read_delta(str(out)).height
    monkeypatch.setattr(Folder, "put_new", slow)
    outcome = run_here(write_delta(tmp_path / "second", source, out, "append", name="second"))
    assert others
    assert pl.read_delta(str(out)).height == before + 5 + outcome.manifest.n_rows
    assert len(read_log(out)) == 3


def test_a_new_table_that_another_writer_makes_first_is_left_alone(
    source: Path, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_new = Folder.put_new

    def slow(self: Folder, name: str, data: bytes) -> bool:
        if self.url.endswith("_delta_log"):
            monkeypatch.setattr(Folder, "put_new", put_new)
            deltalake.write_deltalake(str(out), pa.table({"x": [1]}))
        return put_new(self, name, data)

    monkeypatch.setattr(Folder, "put_new", slow)
    with pytest.raises(OutputError, match="another writer has made this table"):
        run_here(write_delta(tmp_path / "job", source, out))
    assert pl.read_delta(str(out)).height == 1
    assert abort(out.as_uri())
    assert {path.name for path in out.iterdir()} - {"_delta_log", "_dpdask"} == {
        uri.rpartition("/")[2] for uri in deltalake.DeltaTable(out).file_uris()
    }


def ledger_of(tmp_path: Path) -> dict[str, str]:
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    open_ledger(url).init("ratings", 4.0)
    return {"url": url, "dataset": "ratings"}


ROWS = pa.table({"userId": [1], "rating": [0.5]})
TABLES: dict[str, tuple[dict[str, Any], str]] = {
    "other columns": ({"data": pa.table({"x": [1]})}, "other columns"),
    "other order": ({"data": ROWS.select(["rating", "userId"])}, "other columns"),
    "other types": (
        {"data": ROWS.set_column(0, "userId", pa.array([1], pa.int32()))},
        "other columns",
    ),
    "no nulls": (
        {
            "data": ROWS.cast(
                pa.schema(
                    [pa.field("userId", pa.int64(), nullable=False), ("rating", pa.float64())]
                )
            )
        },
        "other columns",
    ),
    "partitioned": ({"data": ROWS, "partition_by": ["userId"]}, "partition columns"),
}


@pytest.mark.parametrize("kind", TABLES)
def test_a_table_that_does_not_fit_is_refused_before_anything_is_charged(
    kind: str, source: Path, out: Path, tmp_path: Path
) -> None:
    options, message = TABLES[kind]
    deltalake.write_deltalake(str(out), **options)
    place = ledger_of(tmp_path)
    schema = {
        "userId": {"role": "keep", "type": "int64"},
        "rating": {"role": "privatise", "kind": "discrete", "levels": LEVELS, "type": "float64"},
    }
    rows = pq.read_table(source).select(list(schema))
    pq.write_table(rows, tmp_path / "rows.parquet")
    job = write_delta(
        tmp_path / "job", tmp_path / "rows.parquet", out, "append", ledger=place, schema=schema
    )
    for verb in ("plan", "run"):
        result = call_cli(verb, job)
        assert result.returncode == OutputError.exit_code
        assert message in error_line(result)
    assert charging_entries(**place) == []
    assert not hidden(out).exists()


def test_a_table_that_takes_new_rows_only_is_not_overwritten(
    source: Path, out: Path, tmp_path: Path
) -> None:
    run_here(write_delta(tmp_path / "first", source, out))
    deltalake.DeltaTable(out).alter.set_table_properties({"delta.appendOnly": "true"})
    with pytest.raises(OutputError, match="takes new rows only"):
        run_here(write_delta(tmp_path / "second", source, out, "overwrite", name="second"))
    assert (
        run_here(write_delta(tmp_path / "third", source, out, "append", name="third")).status
        == "released"
    )


def test_a_table_with_a_rule_for_its_rows_is_refused(
    source: Path, out: Path, tmp_path: Path
) -> None:
    run_here(write_delta(tmp_path / "first", source, out))
    deltalake.DeltaTable(out).alter.add_constraint({"positive": "rating > 0"})
    with pytest.raises(OutputError, match=r"a rule for its rows \(delta.constraints.positive\)"):
        run_here(write_delta(tmp_path / "second", source, out, "append", name="second"))


@pytest.mark.parametrize("feature", ["rowTracking", "icebergCompatV2", "somethingNew"])
def test_a_writer_feature_that_is_not_known_is_refused(
    feature: str, source: Path, out: Path, tmp_path: Path
) -> None:
    run_here(write_delta(tmp_path / "first", source, out))
    protocol = {
        "protocol": {
            "minReaderVersion": 3,
            "minWriterVersion": 7,
            "readerFeatures": [],
            "writerFeatures": [feature],
        }
    }
    (out / "_delta_log" / f"{1:020}.json").write_text(json.dumps(protocol) + "\n")
    place = ledger_of(tmp_path)
    with pytest.raises(OutputError, match="features"):
        run_here(
            write_delta(tmp_path / "second", source, out, "append", name="second", ledger=place)
        )
    assert charging_entries(**place) == []
    assert len(read_log(out)) == 2


@pytest.mark.parametrize(
    "type_",
    [
        pa.uint8(),
        pa.uint64(),
        pa.float16(),
        pa.timestamp("ns"),
        pa.time64("us"),
        pa.list_(pa.uint8()),
    ],
    ids=str,
)
def test_types_that_delta_does_not_know_are_refused_before_anything_is_charged(
    type_: pa.DataType, out: Path, tmp_path: Path
) -> None:
    rows = pa.table({"kept": pa.nulls(40, type_), "rating": LEVELS * 4})
    pq.write_table(rows, tmp_path / "rows.parquet")
    schema = {
        "kept": {"role": "keep"},
        "rating": {"role": "privatise", "kind": "discrete", "levels": LEVELS},
    }
    place = ledger_of(tmp_path)
    job = write_delta(tmp_path / "job", tmp_path / "rows.parquet", out, ledger=place, schema=schema)
    with pytest.raises(SpecError, match="column 'kept': a Delta table has no type"):
        plan_job(load(job))
    with pytest.raises(SpecError, match="no type"):
        run_here(job)
    assert charging_entries(**place) == []
    assert not hidden(out).exists()
    assert not out.exists()


def add_file(source: Path) -> None:
    pq.write_table(pq.read_table(source / "part.0.parquet").slice(50), source / "part.9.parquet")


NAMES = [("id", "ID"), ("é", "É"), *(("id", f"a{sign}b") for sign in " ,;{}()\n\t=")]


@pytest.mark.parametrize("names", NAMES, ids=ascii)
def test_names_that_delta_or_spark_refuse_are_refused_at_each_depth(
    names: tuple[str, str], out: Path
) -> None:
    types = [(name, pa.int64()) for name in names]
    for columns in (
        types,
        [("a", pa.struct(types))],
        [("a", pa.list_(pa.struct(types)))],
        [("a", pa.map_(pa.string(), pa.struct(types)))],
    ):
        with pytest.raises(SpecError, match="rename ") as refused:
            DeltaLog(Folder(out.as_uri())).check(pa.schema(columns), "error")
        assert repr(names[1])[1:-1] in str(refused.value)


@pytest.mark.parametrize(("nested", "names"), [(False, ("id", "ID")), (True, ("id", "a,b"))])
def test_names_that_delta_or_spark_refuse_are_refused_before_anything_is_charged(
    nested: bool, names: tuple[str, str], out: Path, tmp_path: Path
) -> None:
    columns = {name: pa.nulls(50, pa.int64()) for name in names}
    if nested:
        columns = {
            "kept": pa.nulls(50, pa.list_(pa.struct([(name, pa.int64()) for name in names])))
        }
    pq.write_table(pa.table({**columns, "rating": LEVELS * 5}), tmp_path / "rows.parquet")
    schema = {
        **{name: {"role": "keep"} for name in columns},
        "rating": {"role": "privatise", "kind": "discrete", "levels": LEVELS},
    }
    place = ledger_of(tmp_path)
    job = write_delta(tmp_path / "job", tmp_path / "rows.parquet", out, ledger=place, schema=schema)
    for verb in ("plan", "run"):
        ended = call_cli(verb, job)
        assert ended.returncode == 64
        assert repr(names[1])[1:-1] in error_line(ended)
        assert "rename " in error_line(ended)
    assert charging_entries(**place) == []
    assert not hidden(out).exists()
    assert not out.exists()
    dropped = schema | {name: {"role": "drop"} for name in list(columns)[-1:]}
    assert (
        call_cli(
            "run",
            write_delta(
                tmp_path / "two", tmp_path / "rows.parquet", out, ledger=place, schema=dropped
            ),
        ).returncode
        == 0
    )


def test_types_that_delta_knows_come_back(out: Path, tmp_path: Path) -> None:
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
    types += [
        pa.timestamp("us", "UTC"),
        pa.timestamp("us", "Europe/Berlin"),
        pa.list_(pa.int32()),
        pa.struct([("a", pa.int64())]),
    ]
    rows = pa.table(
        {
            **{f"kept{place}": pa.nulls(40, type_) for place, type_ in enumerate(types)},
            "rating": LEVELS * 4,
        }
    )
    pq.write_table(rows, tmp_path / "rows.parquet")
    kept = {f"kept{place}": {"role": "keep"} for place in range(len(types))}
    schema = {**kept, "rating": {"role": "privatise", "kind": "discrete", "levels": LEVELS}}
    for name in ("one", "two"):
        run_here(
            write_delta(
                tmp_path / name, tmp_path / "rows.parquet", out, "append", name=name, schema=schema
            )
        )
    assert (
        deltalake.DeltaTable(out).to_pyarrow_table().num_rows
        == 2 * pq.read_metadata(next(out.glob("*.parquet"))).num_rows
    )
    assert pl.read_delta(str(out)).width == len(types) + 1


@pytest.mark.parametrize("name", ["local", pytest.param("radosgw", marks=pytest.mark.slow)])
def test_a_thousand_shards_are_one_entry(name: str, open_store: OpenStore) -> None:
    with open_store(name) as store:
        started = time.monotonic()
        commit_shards(store.folder, n_shards=1000)
        assert time.monotonic() - started < 10
        [entry] = store.folder.child("_delta_log").names()
        actions = [
            json.loads(line) for line in store.folder.child("_delta_log").read(entry).splitlines()
        ]
        assert sum("add" in action for action in actions) == 1000
        if store.server is not None:
            assert sum(request.method == "PUT" for request in store.proxy.requests) == 1


@pytest.mark.slow
def test_a_job_of_a_thousand_shards(out: Path, tmp_path: Path) -> None:
    source = lake(tmp_path / "in", [1500])
    outcome = run_here(write_delta(tmp_path / "job", source, out, output__rows_per_shard=1))
    assert len(outcome.manifest.shards) >= 1000
    assert len(read_log(out)) == 1
    assert deltalake.DeltaTable(out).to_pyarrow_table().num_rows == outcome.manifest.n_rows


def test_a_checkpoint_follows_many_entries_and_is_read(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta_log, "_CHECKPOINT_INTERVAL", 3)
    for number in range(5):
        commit_shards(Folder(out.as_uri()), f"r{number}", mode="append")
    log = out / "_delta_log"
    assert (log / f"{3:020}.checkpoint.parquet").exists()
    for version in range(3):
        (log / f"{version:020}.json").unlink()
    assert DeltaLog(Folder(out.as_uri())).find("r0") == 7
    commit_shards(Folder(out.as_uri()), "r5", mode="overwrite")
    assert len(deltalake.DeltaTable(out).file_uris()) == 1


def test_a_release_is_committed_once(out: Path) -> None:
    for _ in range(2):
        commit_shards(Folder(out.as_uri()), "r", mode="append")
    assert len(read_log(out)) == 1


def test_a_plan_shows_the_format_and_the_mode(source: Path, out: Path, tmp_path: Path) -> None:
    planned = plan_job(load(write_delta(tmp_path / "job", source, out, "append")))
    assert (planned.output_format, planned.output_mode) == ("delta", "append")
    assert f"{out}, appended to a Delta table" in str(planned)
    assert "one version of a Delta table" in str(planned)


def test_a_plan_warns_of_rows_that_are_released_again(
    source: Path, out: Path, tmp_path: Path
) -> None:
    def warnings(folder: str, **changes: Any) -> list[str]:
        job = load(write_delta(tmp_path / folder, source, out, **changes))
        return [warning for warning in plan_job(job).warnings if "without a ledger" in warning]

    [warning] = warnings("append", mode="append")
    assert warning.startswith("output.mode append: ")
    assert "ε = 4.0 again" in warning
    assert warnings("once") == []
    assert warnings("ledger", mode="append", ledger=ledger_of(tmp_path)) == []


def test_a_log_that_may_not_be_read_is_not_an_empty_one(
    open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filesystems, "_FIRST_WAIT_SECONDS", 0.01)
    with open_store("radosgw") as store:
        commit_shards(store.folder, "first", mode="append")
        store.proxy.answer_next(403, times=10**6, method="GET", path="_delta_log/0")
        for call in (
            lambda: DeltaLog(store.folder).find("first"),
            lambda: commit_shards(store.folder, "second"),
        ):
            with pytest.raises((InputError, OutputError), match=r"permission|denied|refused"):
                call()
        store.proxy.forget()
        assert DeltaLog(store.folder).find("first") == 7


def test_a_log_whose_files_always_vanish_is_tried_later(
    open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_store("local") as store:
        commit_shards(store.folder, "first", mode="append")
        read = Folder.read

        def vanished(self: Folder, name: str, **given: bool) -> bytes:
            if name.endswith("0.json"):
                raise MissingError("this file does not exist", name)
            return read(self, name, **given)

        monkeypatch.setattr(Folder, "read", vanished)
        with pytest.raises(TemporaryError, match="changes too fast"):
            DeltaLog(store.folder).find("first")


def test_an_aborted_run_takes_its_own_files_alone(
    source: Path, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run_here(write_delta(tmp_path / "first", source, out))
    with monkeypatch.context() as patch:
        patch.setattr(DeltaLog, "commit", lambda *_: (_ for _ in ()).throw(OutputError("no")))
        with pytest.raises(OutputError):
            run_here(write_delta(tmp_path / "second", source, out, "append", name="second"))
    assert status(out.as_uri()).stage == "staged"
    assert len(list(out.glob("part-*"))) > len(first.manifest.shards)
    with pytest.raises(OutputError, match="a run of another job is staged"):
        run_here(write_delta(tmp_path / "third", source, out, "append", name="third"))
    assert run_here(write_delta(tmp_path / "first", source, out)).status == "already released"
    assert hidden(out).exists()
    assert abort(out.as_uri())
    assert {path.name for path in out.glob("part-*")} == {
        shard.name for shard in first.manifest.shards
    }
    assert len(list((out / "_dpdask").iterdir())) == 4
    assert not hidden(out).exists()


def test_what_cannot_be_asked_for(
    source: Path, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SpecError, match="belongs to tables"):
        load(write_job(tmp_path / "plain", source, out, output__mode="append"))
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "deltalake", None)
        with pytest.raises(SpecError, match=r"install dpdask\[delta\]"):
            run_here(write_delta(tmp_path / "job", source, out))


def test_the_digest_of_a_job_that_writes_files_is_as_before(
    source: Path, out: Path, tmp_path: Path
) -> None:
    plain = load(write_job(tmp_path / "plain", source, out))
    same = load(
        write_job(tmp_path / "same", source, out, output__format="parquet", output__mode="error")
    )
    table = load(write_delta(tmp_path / "table", source, out))
    assert plain.digest == same.digest != table.digest


def released_names(out: Path) -> list[str]:
    return [
        action["txn"]["appId"] for entry in read_log(out) for action in entry if "txn" in action
    ]


def test_the_name_of_a_release_is_no_function_of_the_rows(source: Path, tmp_path: Path) -> None:
    """Whoever knows all rows but one cannot compute it for each possible value of the last one."""
    found = []
    for place in ("a", "b"):
        out = tmp_path / "lake" / "out"
        made_path = write_delta(tmp_path / "job", source, out, "append", insecure_seed=None)
        assert run_here(made_path).status == "released"
        assert run_here(made_path).status == "already released"
        found += released_names(out)
        for path in (out, *out.parent.glob(".out.dpdask-names-*")):
            path.rename(tmp_path / f"{place}-{path.name}")
    assert len(set(found)) == 2
    assert (
        ReleaseNames(load(made_path).digest, "", Folder(out.as_uri()), None).make(b"k") not in found
    )


def test_a_job_whose_names_have_lost_their_key_is_refused(
    source: Path, out: Path, tmp_path: Path
) -> None:
    made = write_delta(tmp_path / "job", source, out, "append")
    run_here(made)
    before, (kept,) = digests(out), out.parent.glob(".out.dpdask-names-*")
    assert stat.S_IMODE(kept.stat().st_mode) == 0o700
    kept.rename(tmp_path / "kept")
    with pytest.raises(
        InputError, match=r"the key for the names of this job's releases is missing.*restore it"
    ):
        run_here(made)
    assert digests(out) == before
    assert not hidden(out).exists()
    (tmp_path / "kept").rename(kept)
    assert run_here(made).status == "already released"
    add_file(source)
    assert run_here(made).status == "released"
    assert len(set(released_names(out))) == 2


def test_the_file_that_tells_where_the_key_is_may_be_lost(
    source: Path, out: Path, tmp_path: Path
) -> None:
    """Beside a local table the key itself is enough, and it is never replaced."""
    made = write_delta(tmp_path / "job", source, out, "append", insecure_seed=None)
    run_here(made)
    [about], [kept] = (
        (out / "_dpdask").glob("names-*"),
        out.parent.glob(".out.dpdask-names-*/run.key"),
    )
    key = kept.read_bytes()
    about.unlink()
    assert run_here(made).status == "already released"
    add_file(source)
    assert run_here(made).status == "released"
    assert about.exists()
    assert kept.read_bytes() == key


def test_a_driver_whose_run_was_taken_over_keeps_no_key(out: Path) -> None:
    with pytest.raises(TemporaryError, match="another run is writing this output"):
        ReleaseNames("job", "input", Folder(out.as_uri()), None).keep("release", None)
    assert not out.parent.exists()


def test_a_release_of_an_older_version_is_found_under_its_own_name(
    source: Path, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = write_delta(tmp_path / "job", source, out, "append")
    with monkeypatch.context() as patch:
        patch.setattr(naming, "_derive", lambda _: b"")
        run_here(made)
    for path in (*(out / "_dpdask").glob("names-*"), *out.parent.glob(".out.dpdask-names-*")):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert run_here(made).status == "already released"
    add_file(source)
    assert run_here(made).status == "released"
    assert list((out / "_dpdask").glob("names-*"))


@pytest.mark.few(1)
@pytest.mark.parametrize("has_ledger", [False, True])
def test_the_key_of_names_in_a_store_is_where_run_keys_are(
    has_ledger: bool,
    source: Path,
    tmp_path: Path,
    open_store: OpenStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    url = f"sqlite:///{tmp_path}/ledger.db"
    assert (
        call_cli("ledger", "init", "--url", url, "--dataset", "d", "--epsilon", "9").returncode == 0
    )
    ledger = {"ledger": {"url": url, "dataset": "d"}} if has_ledger else {}
    with open_store("radosgw") as store:
        made = write_delta(
            tmp_path / "job",
            source,
            tmp_path,
            "append",
            output__path=store.folder.url,
            insecure_seed=None,
            **ledger,
        )
        assert run_here(made).status == "released"
        assert run_here(made).status == "already released"
        assert [name for name in store.folder.child("_dpdask").names() if name.startswith("names-")]
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another machine"))
        if has_ledger:
            assert run_here(made).status == "already released"
            made = write_delta(
                tmp_path / "job",
                source,
                tmp_path,
                "append",
                output__path=store.folder.url,
                insecure_seed=None,
            )
        where = "in a ledger that is not given here" if has_ledger else "on another machine"
        before = store.folder.names()
        with pytest.raises(
            InputError, match=f"the key for the names of this job's releases is {where}"
        ):
            run_here(made)
        assert store.folder.names() == before
