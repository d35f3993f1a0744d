"""Growing tables whose input is a Delta or Iceberg table: which files are new, and which changes are refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake
from e2e.growing import (
    BY_USER,
    HOLDOUT,
    KNOWN,
    SCHEMA,
    N,
    add_version,
    at,
    job,
    kinds,
    list_digests,
    manifests,
    released,
    rows_of,
    spent,
)
from e2e.helpers import call_cli, digests, error_line, hidden, load, run_here
from e2e.test_growing_jobs import dying
from lakes.tables import commit, delete_positions, delete_rows, live_files, log_of, sql_catalog
from pyiceberg.types import LongType

from dpdask.errors import DataError, InputError, SpecError
from dpdask.jobs.plan import plan_job
from dpdask.mechanisms.card import Card

Changed = Callable[[Path], Any]
CHANGED = "of the table changed rows that were released"


pytestmark = pytest.mark.usefixtures("here")


def from_delta(folder, source, reference=KNOWN, **changed):
    return job(folder, source, reference, input={"path": str(source), "format": "delta"}, **changed)


def card_of(out, number):
    name = "release.json" if number == 0 else f"release-{number:05d}.json"
    return Card.read((out / "_dpdask" / name).read_bytes(), name).to_dict()


@pytest.mark.parametrize("unit", ["row", BY_USER], ids=["row", "person"])
def test_each_run_releases_the_new_files_of_the_newest_version(unit, tmp_path, url, source, out):
    made = from_delta(tmp_path / "job", source, HOLDOUT, ledger=at(url), privacy__unit=unit)
    for day in range(4):
        add_version(source, day)
        planned = plan_job(load(made))
        assert (planned.input_version, (planned.series or {})["new_files"]) == (day, 1)
        assert run_here(made).status == "released"
        assert card_of(out, day)["input"] == {"format": "delta", "version": day}
    DeltaTable(source).alter.set_table_properties(
        {"delta.logRetentionDuration": "interval 1 days"}
    )  # a version without new files
    before = digests(tmp_path / "job")
    assert call_cli("run", made).stdout.splitlines()[0] == "test: nothing new"
    assert digests(tmp_path / "job") == before
    assert [manifest.n_rows for manifest in manifests(out)][1:] == [N, N, N]
    assert spent(url) == (1.0 if unit == "row" else 4.0)
    assert released(out).num_rows == sum(manifest.n_rows for manifest in manifests(out))


def compact(source):
    assert DeltaTable(source).optimize.compact()["numFilesAdded"] == 1


def replace(source):
    write_deltalake(source, rows_of(7), mode="overwrite")


def delete_copying(source):
    DeltaTable(source).delete("day = 1 and user < 10")


def delete_first(source):
    delete_rows(source, {sorted(live_files(source))[0]: [0, 1]})


def list_again(source):
    """Say of a file that was released that it has no row, and then that it has all."""
    delete_rows(source, {sorted(live_files(source))[0]: list(range(N))})


def copy_a_file(source):
    path, added = next(iter(live_files(source).items()))
    (source / "copy.parquet").write_bytes((source / path).read_bytes())
    commit(source, {"add": {**added, "path": "copy.parquet"}})


def rename_a_column(source):
    metadata = next(
        json.loads(line)["metaData"]
        for line in log_of(source, 0).read_text().splitlines()
        if "metaData" in line
    )
    schema = json.loads(metadata["schemaString"])
    for number, field in enumerate(schema["fields"]):
        field["metadata"] = {
            "delta.columnMapping.id": number + 1,
            "delta.columnMapping.physicalName": field["name"],
        }
    schema["fields"][2]["name"] = "rating"
    configuration = {
        **metadata["configuration"],
        "delta.columnMapping.mode": "name",
        "delta.columnMapping.maxColumnId": "3",
    }
    protocol = {"minReaderVersion": 3, "minWriterVersion": 7}
    features = {
        "readerFeatures": ["columnMapping", "deletionVectors"],
        "writerFeatures": ["columnMapping", "deletionVectors"],
    }
    changed = {
        "metaData": {**metadata, "schemaString": json.dumps(schema), "configuration": configuration}
    }
    commit(source, {"protocol": {**protocol, **features}}, changed)


@pytest.mark.few(2)
@pytest.mark.parametrize("change", [compact, delete_copying, delete_first, list_again])
def test_what_became_of_released_rows_does_not_matter(change, tmp_path, url, source, out):
    made = from_delta(tmp_path / "job", source, ledger=at(url))
    for day in range(2):
        add_version(source, day)
        run_here(made)
    change(source)
    before = digests(tmp_path / "job")
    assert run_here(made).status == "nothing new"
    after = digests(tmp_path / "job")
    # how far the log was read, once
    [record] = [name for name in before if before[name] != after[name]]
    assert "/released-00001-" in record
    assert set(after) == set(before)
    assert run_here(made).status == "nothing new"
    assert digests(tmp_path / "job") == after
    add_file(source)
    assert run_here(made).status == "released"
    assert [manifest.n_rows for manifest in manifests(out)] == [N, N, N]
    assert (spent(url), kinds(url)) == (1.0, ["intend", "commit"] * 3)
    told = card_of(out, 2)["series"]
    assert told["deleting_commits"] == (0 if change is compact else 1)
    assert ("deleted rows" in told["text"]) == (change is not compact)
    assert not told["again"]


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (replace, InputError, CHANGED),
        (copy_a_file, InputError, "rows seen again: this file is a copy of"),
        (rename_a_column, DataError, "rating"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_changes_of_what_was_released_are_refused(change, error, says, tmp_path, url, source, out):
    made = from_delta(tmp_path / "job", source, ledger=at(url))
    for day in range(2):
        add_version(source, day)
        run_here(made)
    change(source)
    if change is not replace:
        add_file(source)
    before, entries = digests(out), kinds(url)
    for each in (run_here, lambda made: plan_job(load(made)).refusal):
        with pytest.raises(error, match=says) as raised:
            raise each(made)
        assert "\n" not in str(raised.value)
    assert digests(out) == before
    # that a file is a copy is an exact answer about rows
    assert kinds(url) == [*entries, *(["refuse"] if change is copy_a_file else [])]
    assert not hidden(out).exists()


def add_file(source):
    """Append a file by hand: deltalake does not write to all tables of these tests."""
    pq.write_table(rows_of(9), source / "new.parquet")
    commit(
        source,
        {
            "add": {
                **next(iter(live_files(source).values())),
                "path": "new.parquet",
                "dataChange": True,
                "size": (source / "new.parquet").stat().st_size,
            }
        },
    )


def test_rows_that_are_deleted_before_their_release_are_not_released(tmp_path, source, out):
    made = from_delta(tmp_path / "job", source)
    add_version(source, 0)
    run_here(made)
    first = set(live_files(source))
    add_version(source, 1)
    [new] = set(live_files(source)) - first
    delete_rows(source, {new: [0, 1, 2]})
    run_here(made)
    assert [manifest.n_rows for manifest in manifests(out)] == [N, N - 3]
    delete_rows(source, {new: []})  # they come back
    with pytest.raises(InputError, match=CHANGED):
        run_here(made)


@pytest.mark.parametrize(
    ("input_", "says"),
    [
        (
            {"format": "delta", "version": 3},
            "input.version: a growing table is always read in its newest version, so `version` cannot be set",
        ),
        (
            {"format": "iceberg", "snapshot": 3, "catalog": {"name": "lake"}},
            "input.snapshot: a growing table is always read in its newest version",
        ),
        ({"format": "iceberg"}, "input.path: a metadata file describes one snapshot"),
    ],
)
def test_a_fixed_version_does_not_grow(input_, says, tmp_path):
    result = call_cli("validate", job(tmp_path, tmp_path / "in", input={"path": "in", **input_}))
    assert result.returncode == SpecError.exit_code
    assert says in error_line(result)


def from_iceberg(folder, warehouse, **changed):
    catalog = {
        "name": "lake",
        "type": "sql",
        "uri": f"sqlite:///{warehouse}/catalog.db",
        "warehouse": warehouse.as_uri(),
    }
    return job(
        folder,
        warehouse,
        input={"path": "db.t", "format": "iceberg", "catalog": catalog},
        **changed,
    )


def test_iceberg_tables_grow_by_snapshots(tmp_path, url, seeded_ledgers):
    warehouse, out = tmp_path / "warehouse", tmp_path / "struck" / "out"
    table = sql_catalog(warehouse).create_table("db.t", schema=rows_of(0).schema)
    quiet = from_iceberg(tmp_path / "quiet", warehouse)
    made = from_iceberg(tmp_path / "struck", warehouse, ledger=at(url), insecure_seed=7)
    for day in range(3):
        table.append(rows_of(day))
        run_here(quiet)
        with dying("fitted"):
            run_here(made)
        if day < 2:
            run_here(made)
        assert (
            card_of(tmp_path / "quiet" / "out", day)["input"]["version"]
            == table.current_snapshot().snapshot_id
        )
    first, *others = files_of(table)
    table.append(rows_of(3))
    [new] = set(files_of(table)) - {first, *others}
    delete_positions(table, {new: [0, 1]})
    run_here(quiet)
    run_here(made)
    assert run_here(made).status == "nothing new"
    assert [manifest.n_rows for manifest in manifests(out)] == [N, N, N, N - 2]
    assert list_digests(manifests(out)) == list_digests(manifests(tmp_path / "quiet" / "out"))
    assert (spent(url), kinds(url)) == (1.0, ["intend", "commit"] * 4)
    delete_positions(table, {first: [0]})
    table.append(rows_of(4))
    run_here(made)
    assert manifests(out)[-1].n_rows == N
    assert card_of(tmp_path / "struck" / "out", 4)["series"]["deleting_commits"] == 1


def files_of(table):
    return [task.file.file_path for task in table.scan().plan_files()]


@pytest.mark.parametrize("column", ["user", "r"])
def test_a_column_that_was_widened_is_refused(column, tmp_path):
    warehouse = tmp_path / "warehouse"
    narrow = rows_of(0).cast(pa.schema([(name, pa.int32()) for name in SCHEMA]))
    table = sql_catalog(warehouse).create_table("db.t", schema=narrow.schema)
    table.append(narrow)
    made = from_iceberg(tmp_path / "job", warehouse)
    run_here(made)
    with table.update_schema() as update:
        update.update_column(column, LongType())
    table.append(
        narrow.set_column(
            narrow.column_names.index(column), column, narrow.column(column).cast(pa.int64())
        )
    )
    with pytest.raises(
        DataError,
        match=f"column '{column}': this column has another type than in the rows that were released",
    ):
        run_here(made)
