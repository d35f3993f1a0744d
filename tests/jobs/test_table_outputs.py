"""Releases as Delta and Iceberg tables: other engines read them, rows are added and replaced, and misfits are refused before any charge."""

import hashlib
import json
import shutil
import stat
import sys

import deltalake
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from e2e.helpers import (
    LEVELS,
    call_cli,
    charged_kinds,
    charging_entries,
    digests,
    discrete,
    error_line,
    hidden,
    lake,
    load,
    make_ledger,
    run_here,
    write_job,
)
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import CommitFailedException

from dpdask.errors import InputError, MissingError, OutputError, SpecError, TemporaryError
from dpdask.io import storage, table_logs
from dpdask.io.shards import Shard, list_manifests
from dpdask.io.storage import Folder
from dpdask.io.table_logs import Commit, DeltaLog, IcebergLog
from dpdask.jobs import run_keys as naming
from dpdask.jobs.plan import audit_job, plan_job
from dpdask.jobs.run import abort, status
from dpdask.jobs.run_keys import ReleaseNames

TYPES = pa.schema([("n", pa.int64())])
NAME = "db.ratings"


@pytest.fixture
def source(tmp_path):
    return lake(tmp_path / "in", [150, 90, 400])


@pytest.fixture
def out(tmp_path):
    return tmp_path / "lake" / "out"


def write_delta(folder, source, out, mode="error", **changes):
    return write_job(folder, source, out, output__format="delta", output__mode=mode, **changes)


def read_log(out):
    return [
        [json.loads(line) for line in entry.read_text().splitlines()]
        for entry in sorted((out / "_delta_log").glob("*.json"))
    ]


def commit_shards(folder, release="r", n_shards=1, mode="append", rows=10):
    """Commit files that may not exist: the log does not care."""
    shards = [
        Shard(name=f"part-{place:05d}-{release}.parquet", n_rows=rows, n_bytes=100, sha256="")
        for place in range(n_shards)
    ]
    DeltaLog(folder).commit(Commit(release, 7, shards, TYPES, {}, mode))


def write_iceberg(folder, source, out, place, mode="error", **changes):
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


class Delta:
    """A Delta table, as its own library sees it."""

    kind, noun, unknown = (
        "delta",
        "a Delta table",
        [
            pa.uint8(),
            pa.uint64(),
            pa.float16(),
            pa.timestamp("ns"),
            pa.time64("us"),
            pa.list_(pa.uint8()),
        ],
    )

    def __init__(self, out):
        self.out = out

    def write(self, folder, source, mode="error", **changes):
        return write_delta(folder, source, self.out, mode, **changes)

    def make(self, rows):
        deltalake.write_deltalake(str(self.out), rows)

    def read(self):
        return deltalake.DeltaTable(self.out).to_pyarrow_table()

    def read_with_polars(self):
        return pl.read_delta(str(self.out))

    def files(self):
        return {uri.rpartition("/")[2] for uri in deltalake.DeltaTable(self.out).file_uris()}

    def about(self):
        """What each commit says of itself, the newest first."""
        return deltalake.DeltaTable(self.out).history()

    def forget(self):
        """Let another program tidy up."""
        deltalake.DeltaTable(self.out).optimize.compact()
        deltalake.DeltaTable(self.out).create_checkpoint()
        (self.out / "_delta_log" / f"{0:020}.json").unlink()


class Iceberg:
    """An Iceberg table, as its own library sees it."""

    kind, noun, unknown = (
        "iceberg",
        "an Iceberg table",
        [pa.uint32(), pa.float16(), pa.timestamp("ns"), pa.timestamp("us", "Europe/Berlin")],
    )

    def __init__(self, out, place, catalog):
        self.out, self.place, self.catalog = out, place, catalog

    def write(self, folder, source, mode="error", **changes):
        return write_iceberg(folder, source, self.out, self.place, mode, **changes)

    def make(self, rows):
        self.catalog.create_table(NAME, rows.schema, location=self.out.as_uri()).append(rows)

    @property
    def table(self):
        return self.catalog.load_table(NAME)

    def read(self):
        return self.table.scan().to_arrow()

    def read_with_polars(self):
        return pl.scan_iceberg(self.table, reader_override="pyiceberg").collect()

    def files(self):
        return {task.file.file_path.rpartition("/")[2] for task in self.table.scan().plan_files()}

    def about(self):
        return [snapshot.summary for snapshot in reversed(self.table.snapshots())]

    def forget(self):
        self.table.append(self.read().slice(0, 1))
        self.table.maintenance.expire_snapshots().by_id(
            self.table.snapshots()[0].snapshot_id
        ).commit()


@pytest.fixture(params=["delta", "iceberg"])
def table(request, out):
    return (
        Delta(out)
        if request.param == "delta"
        else Iceberg(out, request.getfixturevalue("place"), request.getfixturevalue("catalog"))
    )


# ---- both


def test_other_engines_read_the_bytes_of_a_folder(table, source, out, tmp_path):
    plain = run_here(write_job(tmp_path / "plain", source, tmp_path / "folder"))
    job = table.write(tmp_path / "job", source)
    assert f"{out}, as {table.noun}" in str(plan_job(load(job)))
    outcome = run_here(job)
    assert [shard.sha256 for shard in outcome.manifest.shards] == [
        shard.sha256 for shard in plain.manifest.shards
    ]
    expected = pq.read_table(tmp_path / "folder").to_pylist()
    assert table.read().to_pylist() == expected
    assert table.read_with_polars().to_dicts() == expected
    [about] = table.about()
    assert (
        about["dpdask.card_sha256"]
        == outcome.manifest.card_sha256
        == hashlib.sha256((out / about["dpdask.card"]).read_bytes()).hexdigest()
    )
    assert not hidden(out).exists()
    assert status(out.as_uri()).stage == "released"
    with pytest.raises(OutputError, match="released already"):
        abort(out.as_uri())


def test_a_table_is_appended_to_and_overwritten(table, source, out, tmp_path):
    ledger = make_ledger(tmp_path)
    jobs = [
        table.write(tmp_path / name, source, "append", name=name, ledger=ledger)
        for name in ("one", "two")
    ]
    outcomes = [run_here(job) for job in jobs]
    again = [run_here(job) for job in jobs]
    assert [(each.status, each.manifest) for each in again] == [
        ("already released", each.manifest) for each in outcomes
    ]
    assert table.read().num_rows == sum(outcome.manifest.n_rows for outcome in outcomes)
    assert len(table.about()) == len(list((out / "_dpdask").glob("release-*.json"))) == 2
    assert status(out.as_uri()).n_shards == sum(
        len(outcome.manifest.shards) for outcome in outcomes
    )
    assert charged_kinds(**ledger) == ["intend", "commit"] * 2
    assert all(audit_job(load(job), n_runs=1000)["sound"] for job in jobs)
    third = table.write(tmp_path / "three", source, "overwrite", name="three")
    assert {shard.name for shard in run_here(third).manifest.shards} == table.files()
    assert [run_here(job).status for job in (*jobs, third)] == ["already released"] * 3
    with pytest.raises(OutputError, match="was not written by this run"):
        run_here(table.write(tmp_path / "four", source, name="four"))


def test_a_release_is_known_when_its_commit_is_gone(table, source, tmp_path):
    job = table.write(tmp_path / "job", source)
    run_here(job)
    table.forget()
    assert run_here(job).status == "already released"


def test_drivers_race_for_one_table(table, drivers, source, out, tmp_path):
    ledger = make_ledger(tmp_path)
    for number, mode in enumerate(("error", "append"), start=1):
        codes = drivers.race(3, "run", table.write(tmp_path / mode, source, mode, ledger=ledger))
        assert set(codes) <= {0, TemporaryError.exit_code}
        assert 0 in codes
        assert charged_kinds(**ledger) == ["intend", "commit"] * number
        assert len(table.about()) == number
        assert {
            shard.name for each in list_manifests(Folder(out.as_uri())) for shard in each.shards
        } == {path.name for path in out.glob("*.parquet")}


def test_an_aborted_run_leaves_the_table_as_it_was(table, drivers, source, out, tmp_path):
    first = table.write(tmp_path / "first", source)
    drivers.run("run", first, point="uncommitted")
    with pytest.raises(OutputError, match="released already"):
        abort(out.as_uri())
    assert run_here(first).status == "already released"
    second, third = (
        table.write(tmp_path / name, source, "append", name=name) for name in ("second", "third")
    )
    drivers.run("run", second, point="staged")
    assert status(out.as_uri()).stage == "staged"
    assert len(list(out.glob("part-*"))) > len(table.files())
    with pytest.raises(OutputError, match="a run of another job is staged"):
        run_here(third)
    assert run_here(first).status == "already released"
    assert hidden(out).exists()
    assert abort(out.as_uri())
    assert {path.name for path in out.glob("*.parquet")} == table.files()
    assert len(list((out / "_dpdask").iterdir())) == 4
    assert not hidden(out).exists()


def rows_with(folder, *types):
    """Write rows with null columns of some types; return what a job says of them."""
    kept = {f"kept{number}": pa.nulls(40, type_) for number, type_ in enumerate(types)}
    pq.write_table(pa.table({**kept, "rating": LEVELS * 4}), folder / "rows.parquet")
    return {
        **{name: {"role": "keep"} for name in kept},
        "rating": discrete(LEVELS),
    }


@pytest.mark.few(2)
@pytest.mark.parametrize("number", range(6))
def test_types_that_a_table_does_not_know_are_refused_before_anything_is_charged(
    table, number, out, tmp_path
):
    schema, ledger = (
        rows_with(tmp_path, table.unknown[number % len(table.unknown)]),
        make_ledger(tmp_path),
    )
    job = table.write(tmp_path / "job", tmp_path / "rows.parquet", ledger=ledger, schema=schema)
    for verb in (run_here, lambda job: plan_job(load(job))):
        with pytest.raises(SpecError, match=f"column 'kept0': {table.noun} has no type"):
            verb(job)
    assert charging_entries(**ledger) == []
    assert not hidden(out).exists()
    assert not out.exists()


def test_types_that_a_table_knows_come_back(table, tmp_path):
    types = [
        pa.int8(),
        pa.int16(),
        pa.float32(),
        pa.bool_(),
        pa.date32(),
        pa.date64(),
        pa.large_string(),
        pa.binary(),
        pa.decimal128(12, 3),
    ]
    types += [
        pa.timestamp("us"),
        pa.timestamp("us", "UTC"),
        pa.list_(pa.int32()),
        pa.struct([("a", pa.int64())]),
    ]
    schema = rows_with(tmp_path, *types)
    outcomes = [
        run_here(
            table.write(
                tmp_path / name, tmp_path / "rows.parquet", "append", name=name, schema=schema
            )
        )
        for name in ("one", "two")
    ]
    assert table.read().num_rows == sum(outcome.manifest.n_rows for outcome in outcomes)
    assert table.read_with_polars().width == len(types) + 1


ROWS = pa.table({"userId": [1], "rating": [0.5]})
MISFITS = {
    "columns": pa.table({"x": [1]}),
    "order": ROWS.select(["rating", "userId"]),
    "types": ROWS.set_column(0, "userId", pa.array([1], pa.int32())),
    "nulls": ROWS.cast(
        pa.schema([pa.field("userId", pa.int64(), nullable=False), ("rating", pa.float64())])
    ),
}


@pytest.mark.few
@pytest.mark.parametrize("misfit", MISFITS)
def test_a_table_that_does_not_fit_is_refused_before_anything_is_charged(
    table, misfit, source, out, tmp_path
):
    table.make(MISFITS[misfit])
    ledger = make_ledger(tmp_path)
    schema = {
        "userId": {"role": "keep", "type": "int64"},
        "rating": discrete(LEVELS, type="float64"),
    }
    pq.write_table(pq.read_table(source).select(list(schema)), tmp_path / "rows.parquet")
    job = table.write(
        tmp_path / "job", tmp_path / "rows.parquet", "append", ledger=ledger, schema=schema
    )
    for verb in ("plan", "run"):
        result = call_cli(verb, job)
        assert result.returncode == OutputError.exit_code
        assert "other columns" in error_line(result)
    assert charging_entries(**ledger) == []
    assert not hidden(out).exists()


def test_without_its_library_no_table_is_written(table, source, tmp_path, monkeypatch):
    monkeypatch.setitem(
        sys.modules, {"delta": "deltalake", "iceberg": "pyiceberg.catalog"}[table.kind], None
    )
    with pytest.raises(SpecError, match=rf"install dpdask\[{table.kind}\]"):
        run_here(table.write(tmp_path / "job", source))


# ---- Delta


def test_the_log_says_what_is_released_and_no_more(source, out, tmp_path):
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


def test_vacuum_leaves_the_cards(source, out, tmp_path):
    run_here(write_delta(tmp_path / "job", source, out))
    (out / "part-stray.parquet").write_bytes(b"")
    before = sorted(path.name for path in (out / "_dpdask").iterdir())
    removed = deltalake.DeltaTable(out).vacuum(
        retention_hours=0, enforce_retention_duration=False, dry_run=False, full=True
    )
    assert removed == ["part-stray.parquet"]
    assert sorted(path.name for path in (out / "_dpdask").iterdir()) == before


def test_the_same_job_on_another_input_is_another_release(source, out, tmp_path):
    job = write_delta(tmp_path / "job", source, out, "append")
    once = write_delta(tmp_path / "once", source, tmp_path / "once" / "out")
    first = run_here(job)
    run_here(once)
    (source / "part.2.parquet").unlink()
    second = run_here(job)
    assert second.status == "released"
    assert pl.read_delta(str(out)).height == first.manifest.n_rows + second.manifest.n_rows
    assert run_here(once).status == "already released"


def test_a_table_of_others_is_kept_or_taken_in(source, out, tmp_path):
    rows = pq.read_table(source).drop_columns(["timestamp"]).slice(0, 5)
    deltalake.write_deltalake(str(out), rows)
    with pytest.raises(OutputError, match="was not written by this run"):
        run_here(write_delta(tmp_path / "error", source, out))
    assert run_here(write_delta(tmp_path / "append", source, out, "append")).status == "released"
    assert pl.read_delta(str(out)).height > 5


def test_a_folder_of_plain_files_is_no_table(source, out, tmp_path):
    run_here(write_job(tmp_path / "plain", source, out))
    for mode in ("error", "append", "overwrite"):
        with pytest.raises(OutputError, match="was not written by this run"):
            run_here(write_delta(tmp_path / mode, source, out, mode))


def test_another_writer_that_is_faster_loses_nothing(source, out, tmp_path, monkeypatch):
    run_here(write_delta(tmp_path / "first", source, out))
    rows = pl.read_delta(str(out)).to_arrow().slice(0, 5)
    put_new, others = Folder.put_new, []

    def slow(self, name, data):
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
    source, out, tmp_path, monkeypatch
):
    put_new = Folder.put_new

    def slow(self, name, data):
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


def test_a_table_that_takes_new_rows_only_is_not_overwritten(source, out, tmp_path):
    run_here(write_delta(tmp_path / "first", source, out))
    deltalake.DeltaTable(out).alter.set_table_properties({"delta.appendOnly": "true"})
    with pytest.raises(OutputError, match="takes new rows only"):
        run_here(write_delta(tmp_path / "second", source, out, "overwrite", name="second"))
    assert (
        run_here(write_delta(tmp_path / "third", source, out, "append", name="third")).status
        == "released"
    )


def test_a_table_with_a_rule_for_its_rows_is_refused(source, out, tmp_path):
    run_here(write_delta(tmp_path / "first", source, out))
    deltalake.DeltaTable(out).alter.add_constraint({"positive": "rating > 0"})
    with pytest.raises(OutputError, match=r"a rule for its rows \(delta.constraints.positive\)"):
        run_here(write_delta(tmp_path / "second", source, out, "append", name="second"))


@pytest.mark.parametrize("feature", ["rowTracking", "somethingNew"])
def test_a_writer_feature_that_is_not_known_is_refused(feature, source, out, tmp_path):
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
    place = make_ledger(tmp_path)
    with pytest.raises(OutputError, match="features"):
        run_here(
            write_delta(tmp_path / "second", source, out, "append", name="second", ledger=place)
        )
    assert charging_entries(**place) == []
    assert len(read_log(out)) == 2


NAMES = [("id", "ID"), ("é", "É"), *(("id", f"a{sign}b") for sign in " ,;{}()\n\t=")]


@pytest.mark.parametrize("names", NAMES, ids=ascii)
def test_names_that_delta_or_spark_refuse_are_refused_at_each_depth(names, out):
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


def test_a_checkpoint_follows_many_entries_and_is_read(out, monkeypatch):
    monkeypatch.setattr(table_logs, "_CHECKPOINT_INTERVAL", 3)
    for number in range(5):
        commit_shards(Folder(out.as_uri()), f"r{number}", mode="append")
    log = out / "_delta_log"
    assert (log / f"{3:020}.checkpoint.parquet").exists()
    for version in range(3):
        (log / f"{version:020}.json").unlink()
    assert DeltaLog(Folder(out.as_uri())).find("r0") == 7
    commit_shards(Folder(out.as_uri()), "r5", mode="overwrite")
    assert len(deltalake.DeltaTable(out).file_uris()) == 1


def test_a_plan_warns_of_rows_that_are_released_again(source, out, tmp_path):
    def warnings(folder, **changes):
        job = load(write_delta(tmp_path / folder, source, out, **changes))
        return [warning for warning in plan_job(job).warnings if "without a ledger" in warning]

    [warning] = warnings("append", mode="append")
    assert warning.startswith("output.mode append: ")
    assert "ε = 4.0 again" in warning
    assert warnings("once") == []
    assert warnings("ledger", mode="append", ledger=make_ledger(tmp_path)) == []


def test_a_log_that_may_not_be_read_is_not_an_empty_one(open_store, monkeypatch):
    monkeypatch.setattr(storage, "_FIRST_WAIT_SECONDS", 0.01)
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


def test_a_log_whose_files_always_vanish_is_tried_later(open_store, monkeypatch):
    with open_store("local") as store:
        commit_shards(store.folder, "first", mode="append")
        read = Folder.read

        def vanished(self, name, **given):
            if name.endswith("0.json"):
                raise MissingError("this file does not exist", name)
            return read(self, name, **given)

        monkeypatch.setattr(Folder, "read", vanished)
        with pytest.raises(TemporaryError, match="changes too fast"):
            DeltaLog(store.folder).find("first")


def test_a_partitioned_table_is_refused_without_its_partitions(source, out, tmp_path):
    deltalake.write_deltalake(
        str(out), pq.read_table(source).drop_columns(["timestamp"]), partition_by=["userId"]
    )
    with pytest.raises(OutputError, match=r"columns userId; set output.partition_by: \[userId\]"):
        run_here(write_delta(tmp_path / "job", source, out, "append"))
    with pytest.raises(SpecError, match="belongs to tables"):
        load(write_job(tmp_path / "plain", source, out, output__mode="append"))


# ---- the names of releases


def released_names(out):
    return [
        action["txn"]["appId"] for entry in read_log(out) for action in entry if "txn" in action
    ]


def add_file(source):
    pq.write_table(pq.read_table(source / "part.0.parquet").slice(50), source / "part.9.parquet")


def test_the_name_of_a_release_is_no_function_of_the_rows(source, tmp_path):
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


def test_a_job_whose_names_have_lost_their_key_is_refused(source, out, tmp_path):
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


def test_the_file_that_tells_where_the_key_is_may_be_lost(source, out, tmp_path):
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


def test_a_driver_whose_run_was_taken_over_keeps_no_key(out):
    with pytest.raises(TemporaryError, match="another run is writing this output"):
        ReleaseNames("job", "input", Folder(out.as_uri()), None).keep("release", None)
    assert not out.parent.exists()


def test_a_release_of_an_older_version_is_found_under_its_own_name(
    source, out, tmp_path, monkeypatch
):
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
    has_ledger, source, tmp_path, open_store, monkeypatch
):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    url = f"sqlite:///{tmp_path}/ledger.db"
    assert (
        call_cli(
            "ledger", "init", "--url", url, "--dataset", "d", "--epsilon", "9", "--delta", "0"
        ).returncode
        == 0
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


# ---- Iceberg


def test_a_commit_whose_answer_is_lost_is_found(source, out, place, catalog, tmp_path, monkeypatch):
    commit_table, calls = SqlCatalog.commit_table, []

    def cut(self, *arguments):
        calls.append(commit_table(self, *arguments))
        raise ConnectionResetError

    monkeypatch.setattr(SqlCatalog, "commit_table", cut)
    outcome = run_here(write_iceberg(tmp_path / "job", source, out, place))
    assert outcome.status == "released"
    assert len(calls) == 1
    assert catalog.load_table(NAME).scan().count() == outcome.manifest.n_rows


@pytest.mark.parametrize("error", [CommitFailedException("someone else"), ConnectionRefusedError()])
def test_a_commit_that_is_refused_is_made_once(
    error, source, out, place, catalog, tmp_path, monkeypatch
):
    run_here(write_iceberg(tmp_path / "first", source, out, place))
    commit_table, refused = SqlCatalog.commit_table, []

    def refuse(self, *arguments):
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
def test_two_writers_with_one_release_commit_once(mode, out, place, catalog, tmp_path, monkeypatch):
    """Both have looked before either commits, as a driver that slept and the one that took its run over."""
    types = pa.schema([("n", pa.int64())])
    shard = Shard(name="part-0.parquet", n_rows=2, n_bytes=0, sha256="")
    out.mkdir()
    pq.write_table(pa.table({"n": [1, 2]}, schema=types), out / shard.name)
    if mode == "append":
        catalog.create_table(NAME, types, location=out.as_uri())
    commit_table, slept = SqlCatalog.commit_table, []

    def commit():
        entry = Commit("r", 7, [shard], types, {}, mode)
        IcebergLog(Folder(out.as_uri()), NAME, place).commit(entry)

    def sleep(self, *arguments):
        if not slept:
            slept.append(True)
            commit()
        return commit_table(self, *arguments)

    monkeypatch.setattr(SqlCatalog, "commit_table", sleep)
    commit()
    table = catalog.load_table(NAME)
    assert len(table.snapshots()) == 1
    assert table.scan().count() == 2


def test_what_an_iceberg_table_needs(source, out, place, catalog, tmp_path):
    with pytest.raises(SpecError, match="which needs both"):
        load(write_job(tmp_path / "job", source, out, output__format="iceberg"))
    with pytest.raises(SpecError, match="holds no password"):
        load(
            write_iceberg(
                tmp_path / "job", source, out, {**place, "uri": "postgresql://me:secret@host/db"}
            )
        )
    with pytest.raises(SpecError, match="the catalog cannot be opened"):
        run_here(write_iceberg(tmp_path / "job", source, out, {"name": "lake", "type": "nonsense"}))
    job = write_iceberg(tmp_path / "job", source, out, place, "append")
    with pytest.raises(OutputError, match="no such namespace"):
        run_here(job, output__table="nowhere.ratings")
    catalog.create_table(NAME, pa.schema([("x", pa.int64())]), location=out.as_uri())
    with pytest.raises(OutputError, match="lies in another folder"):
        run_here(job, output__path=str(tmp_path / "elsewhere"))
