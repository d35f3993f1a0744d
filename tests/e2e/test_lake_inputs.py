"""Jobs on hive folders, Delta and Iceberg tables: every role of a partition column, no deleted row, and one version for a whole run."""

import contextlib
import json
import re
import shutil
from pathlib import Path
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as pads
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, WriterProperties, write_deltalake
from e2e.helpers import HOLDOUT, call_cli, digests, discrete, error_line, load, run_here, write_job
from lakes.tables import commit, delete_positions, delete_rows, live_files, sql_catalog

from dpdask.errors import InputError, SpecError, TemporaryError
from dpdask.io import parquet
from dpdask.jobs.plan import plan_job
from dpdask.jobs.run import run_job
from dpdask.mechanisms.card import Card

N_ROWS = 1200
SECRETS = ("Zebulon", "Quux%20Zy", "Quux Zy")
SCHEMA = {
    "id": {"role": "keep", "type": "int64"},
    "user": {"role": "keep", "type": "int64"},
    "rating": discrete([1, 2, 3, 4, 5], type="int64"),
    "name": {"role": "drop", "type": "string"},
}
KNOWN = {"kind": "known", "columns": {"rating": {"probabilities": [0.2] * 5}}}
COPULA = {"kind": "copula", "n_rows": "input"}
WITH_VECTORS = {"delta.enableDeletionVectors": "true"}


def rows(n_rows=N_ROWS, start=0):
    """Return rows that `id` numbers."""
    rng = np.random.default_rng(start)
    return pa.table(
        {
            "id": pa.array(range(start, start + n_rows), pa.int64()),
            "user": pa.array(rng.integers(0, 8, n_rows)),
            "rating": pa.array(rng.integers(1, 6, n_rows)),
            "name": pa.array(rng.choice([SECRETS[0], SECRETS[2]], n_rows)),
        }
    )


def hive(folder, table, *keys):
    pads.write_dataset(
        table, folder, format="parquet", partitioning=list(keys), partitioning_flavor="hive"
    )
    return folder


def job(folder, source, out="out", **changed):
    return write_job(
        folder / "job",
        Path(source),
        folder / out,
        **{"schema": SCHEMA, "mechanism__reference": KNOWN, **changed},
    )


def released(folder):
    return pa.concat_tables([pq.read_table(path) for path in sorted(folder.glob("part-*.parquet"))])


def card(folder):
    data = (folder / "_dpdask" / "release.json").read_bytes()
    return Card.read(data, "card").to_dict()


@contextlib.contextmanager
def crashing():
    """Let a run stop after its rows were read and its shards staged."""
    with (
        mock.patch("dpdask.jobs.run.make_job_card", side_effect=TemporaryError("crash")),
        pytest.raises(TemporaryError),
    ):
        yield


# ---- hive folders


def test_a_kept_partition_column_is_released_with_its_rows(tmp_path):
    table = rows()
    run_here(job(tmp_path, hive(tmp_path / "in", table, "user", "name")))
    found = released(tmp_path / "out")
    assert set(found.column_names) == {"id", "user", "rating"}  # `name` is dropped
    assert dict(zip(found["id"].to_pylist(), found["user"].to_pylist(), strict=True)) == dict(
        zip(table["id"].to_pylist(), table["user"].to_pylist(), strict=True)
    )
    assert found.schema.field("user").type == pa.int64()


@pytest.mark.parametrize(
    "mechanism", [{"kind": "dip", "reference": HOLDOUT, "channel": "optimal"}, COPULA]
)
def test_a_private_partition_column_is_privatised(mechanism, tmp_path):
    schema = {
        "rating": SCHEMA["rating"],
        "user": {"role": "drop"},
        "name": {"role": "drop"},
        "id": {"role": "drop"},
    }
    source = hive(tmp_path / "in", rows(), "rating")
    outcome = run_here(
        job(tmp_path, source, schema=schema, mechanism=mechanism, privacy__epsilon=1.0)
    )
    found = released(tmp_path / "out")
    assert set(found["rating"].unique().to_pylist()) == {1, 2, 3, 4, 5}
    warned = [
        line
        for line in outcome.warnings
        if "the files of the input hold one value of column 'rating' each" in line
    ]
    assert len(warned) == (
        mechanism["kind"] == "dip"
    )  # other mechanisms release no row of the input
    planned = plan_job(load(job(tmp_path, source, "plan", schema=schema, mechanism=mechanism)))
    assert [line for line in planned.warnings if "hold one value" in line] == warned


@pytest.mark.parametrize("role", ["keep", "drop"])
def test_a_partition_column_is_the_unit(role, tmp_path):
    schema = SCHEMA | {"user": {"role": role, "type": "int64"}}
    source = hive(tmp_path / "in", rows(), "user")
    unit = {"column": "user", "max_rows": 20}
    run_here(job(tmp_path, source, schema=schema, privacy__unit=unit))
    found = released(tmp_path / "out")
    assert found.num_rows == 8 * 20
    users = pc.take(rows()["user"], found["id"])
    assert set(pc.value_counts(users).field("counts").to_pylist()) == {20}


def test_values_of_folders_are_never_told(tmp_path):
    source = hive(tmp_path / "in", rows(), "name", "user")
    path = job(tmp_path, source)
    said = [call_cli(verb, str(path)) for verb in ("validate", "plan", "run", "status")]
    broken = next((source / f"name={SECRETS[0]}").rglob("*.parquet"))
    whole = broken.read_bytes()
    for data in (
        whole[:-30],
        whole[:4] + bytes(200) + whole[204:],
    ):  # the footer is read by the driver, a page by a task
        broken.write_bytes(data)
        ended = call_cli("run", str(job(tmp_path, source, "again")))
        assert ended.returncode == 66
        assert "name=…/user=…/part-0.parquet" in error_line(ended)
        said.append(ended)
    text = "".join(ended.stdout + ended.stderr for ended in said)
    published = b"".join(
        file.read_bytes() for file in (tmp_path / "out").rglob("*") if file.is_file()
    )
    for secret in SECRETS:
        assert secret not in text
        assert secret.encode() not in published


def test_a_cluster_never_logs_the_values_of_folders(tmp_path, two_workers):
    source = hive(tmp_path / "in", rows(), "name")
    broken = next((source / f"name={SECRETS[0]}").rglob("*.parquet"))
    whole = broken.read_bytes()
    broken.write_bytes(whole[:4] + bytes(200) + whole[204:])
    with two_workers.get_client() as client:
        with pytest.raises(
            InputError, match=r"name=…/part-0\.parquet, row group 0: this row group cannot be read"
        ):
            run_job(load(job(tmp_path, source)))
        logs = f"{client.get_worker_logs()} {client.get_scheduler_logs()} {client.get_events()}"
    assert "row group" in logs  # the failure is logged
    for secret in SECRETS:
        assert secret not in logs


# ---- Delta


def delta(folder):
    """Write a table with deleted rows of every kind, and return it with the ids of those that are left.

    The deleted rows have ratings that the schema refuses, so whoever reads one of them fails.
    """
    bad = rows(50, 5000).set_column(2, "rating", pa.array([99] * 50))
    write_deltalake(folder, bad, configuration=WITH_VECTORS)  # files of an old version
    mixed = pa.concat_tables([rows(600), bad.slice(0, 20), rows(400, 600)])
    write_deltalake(
        folder,
        mixed,
        mode="overwrite",
        writer_properties=WriterProperties(max_row_group_size=250),
        partition_by=None,
    )
    write_deltalake(folder, pa.concat_tables([bad.slice(20, 10), rows(200, 1000)]), mode="append")
    gone = {path: pq.read_table(folder / path) for path in live_files(folder)}
    positions = {
        path: pc.indices_nonzero(
            pc.or_(pc.equal(file["rating"], 99), pc.less(file["id"], 5))
        ).to_pylist()
        for path, file in gone.items()
    }
    delete_rows(folder, positions)
    return folder, set(range(5, 1200))


@pytest.mark.parametrize("reference", [KNOWN, HOLDOUT])
def test_no_deleted_row_is_released(reference, tmp_path):
    source, left = delta(tmp_path / "in")
    run_here(job(tmp_path, source, mechanism__reference=reference, input__format="delta"))
    found = released(tmp_path / "out")["id"].to_pylist()
    assert len(set(found)) == len(found)
    assert set(found) == left if reference is KNOWN else set(found) < left
    assert card(tmp_path / "out")["input"] == {"format": "delta", "version": 3}


def test_no_deleted_row_is_counted(tmp_path):
    source, left = delta(tmp_path / "in")
    schema = {
        name: column if name == "rating" else {"role": "drop"} for name, column in SCHEMA.items()
    }
    run_here(job(tmp_path, source, schema=schema, mechanism=COPULA, input__format="delta"))
    assert card(tmp_path / "out")["n_rows"] == {"value": float(len(left)), "exact": True}


def test_the_plan_tells_version_and_files_and_reads_no_rows(tmp_path, monkeypatch):
    source, left = delta(tmp_path / "in")
    monkeypatch.setattr(parquet, "read_batches", lambda *_: pytest.fail("rows were read"))
    path = job(tmp_path, source, input__format="delta")
    planned = plan_job(load(path))
    assert (planned.n_rows, planned.n_files, planned.input_format, planned.input_version) == (
        len(left),
        2,
        "delta",
        3,
    )
    assert "2 files of Delta version 3\n" in repr(planned)
    assert json.loads(call_cli("plan", str(path), "--json").stdout)["input_version"] == 3
    assert "1 file of Delta version 0\n" in repr(plan_job(load(path, input__version=0)))


def test_a_pinned_version_is_released_whatever_comes_later(tmp_path):
    write_deltalake(tmp_path / "in", rows(300))
    write_deltalake(tmp_path / "in", rows(300, 300), mode="overwrite")
    run_here(job(tmp_path, tmp_path / "in", input__format="delta"), input__version=0)
    assert sorted(released(tmp_path / "out")["id"].to_pylist()) == list(range(300))
    assert card(tmp_path / "out")["input"] == {"format": "delta", "version": 0}


def test_a_table_that_changed_between_two_runs_is_told(tmp_path):
    write_deltalake(tmp_path / "in", rows(300))
    latest, pinned = job(tmp_path, tmp_path / "in", input__format="delta"), {"input__version": 0}
    run_here(latest, output__path=tmp_path / "whole", **pinned)
    for changed in ({}, {**pinned, "output__path": tmp_path / "pinned"}):
        with crashing():
            run_here(latest, **changed)
    commit(
        tmp_path / "in", {"commitInfo": {"operation": "nothing"}}
    )  # no file changes, but the version does
    with pytest.raises(InputError, match="the input changed since the run began") as caught:
        run_here(latest)
    assert caught.value.exit_code == 66
    run_here(latest, **pinned, output__path=tmp_path / "pinned")
    assert digests(tmp_path / "pinned") == digests(tmp_path / "whole")


def test_a_vacuumed_file_is_missed_in_one_line(tmp_path):
    write_deltalake(tmp_path / "in", rows(300))
    write_deltalake(tmp_path / "in", rows(300, 300), mode="overwrite")
    path = job(tmp_path, tmp_path / "in", input__format="delta", input__version=0)
    DeltaTable(tmp_path / "in").vacuum(
        retention_hours=0, enforce_retention_duration=False, dry_run=False
    )
    ended = call_cli("run", str(path))
    assert ended.returncode == 66
    assert "this file is missing" in error_line(ended)
    assert not (tmp_path / "out").exists()


def test_a_moved_table_gives_the_same_bytes(tmp_path):
    source, _ = delta(tmp_path / "in")
    shutil.copytree(source, tmp_path / "elsewhere" / "copy")
    for place, out in ((source, "out"), (tmp_path / "elsewhere" / "copy", "again")):
        run_here(job(tmp_path, place, out, input__format="delta"))
    shards = [
        {
            name: digest
            for name, digest in digests(tmp_path / out).items()
            if name.startswith("part-")
        }
        for out in ("out", "again")
    ]
    assert shards[0] == shards[1]
    assert card(tmp_path / "out") == card(tmp_path / "again")


def test_a_partitioned_table_on_workers(tmp_path, two_workers):
    write_deltalake(
        tmp_path / "in", rows(), partition_by=["name", "user"], configuration=WITH_VECTORS
    )
    [some, other] = sorted(live_files(tmp_path / "in"))[:2]
    delete_rows(tmp_path / "in", {some: [0], other: [1]})
    run_here(job(tmp_path, tmp_path / "in", input__format="delta"))
    with two_workers.get_client():
        run_job(load(job(tmp_path, tmp_path / "in", "again", input__format="delta")))
    assert digests(tmp_path / "out") == digests(tmp_path / "again")
    assert released(tmp_path / "out").num_rows == N_ROWS - 2


def test_a_public_table_in_delta(tmp_path):
    kind = "public"
    source = hive(tmp_path / "in", rows(), "user")
    public, _ = delta(tmp_path / "public")
    reference = {"kind": kind, "path": str(public), "format": "delta", "version": 3}
    run_here(job(tmp_path, source, mechanism__reference=reference))
    shown = card(tmp_path / "out")["mechanism"]["reference"]
    assert (shown["format"], shown["version"]) == ("delta", 3)
    assert "path" not in shown
    plain = job(tmp_path, source, "again", mechanism__reference={"kind": kind, "path": str(public)})
    with pytest.raises(SpecError, match="this is a Delta table"):
        run_here(plain)


def test_another_version_of_the_private_table_is_no_public_one(tmp_path):
    source, _ = delta(tmp_path / "in")
    shutil.copytree(source, tmp_path / "copy")
    reference = {"kind": "public", "path": str(tmp_path / "copy"), "format": "delta", "version": 2}
    with pytest.raises(SpecError, match="shares a file with the private one"):
        run_here(job(tmp_path, source, mechanism__reference=reference, input__format="delta"))


# ---- Iceberg


def test_an_iceberg_table_by_its_catalog_and_by_its_metadata_file(tmp_path):
    table = sql_catalog(tmp_path / "warehouse").create_table("db.t", schema=rows().schema)
    table.append(rows(600))
    [path] = [task.file.file_path for task in table.scan().plan_files()]
    delete_positions(table, {path: list(range(100))})
    first = table.current_snapshot().snapshot_id
    table.append(rows(600, 600))
    catalog = {"name": "lake", "type": "sql", "uri": f"sqlite:///{tmp_path}/warehouse/catalog.db"}
    by_catalog = job(
        tmp_path,
        "in",
        input={"path": "db.t", "format": "iceberg", "catalog": catalog, "snapshot": first},
    )
    assert f"1 file of Iceberg snapshot {first}\n" in repr(plan_job(load(by_catalog)))
    run_here(by_catalog)
    assert sorted(released(tmp_path / "out")["id"].to_pylist()) == list(range(100, 600))
    assert card(tmp_path / "out")["input"] == {"format": "iceberg", "version": first}
    by_file = job(
        tmp_path,
        "in",
        "again",
        input={"path": table.metadata_location, "format": "iceberg", "snapshot": first},
    )
    run_here(by_file)
    shards = [
        {
            name: digest
            for name, digest in digests(tmp_path / out).items()
            if name.startswith("part-")
        }
        for out in ("out", "again")
    ]
    assert shards[0] == shards[1]
    inside = job(
        tmp_path,
        "in",
        "warehouse/db/t/out",
        input={"path": "db.t", "format": "iceberg", "catalog": catalog},
    )
    with pytest.raises(SpecError, match=r"output.path: the output lies inside the input"):
        run_here(inside)


def test_the_page_of_the_manual_runs(tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "tables-of-a-lake.md").read_text(
        encoding="utf-8"
    )
    monkeypatch.chdir(tmp_path)
    for language in ("python", "yaml"):
        for block in re.findall(
            rf"^```{language}\n# (\S+)\n(.*?)^```", page, re.DOTALL | re.MULTILINE
        ):
            (tmp_path / block[0]).write_text(block[1], encoding="utf-8")
    exec((tmp_path / "lake.py").read_text(), {})
    shown = re.search(r"# (input .*)", page)
    assert shown is not None
    assert shown[1] in call_cli("plan", "job.yaml").stdout
    assert call_cli("run", "job.yaml").returncode == 0
    assert released(tmp_path / "out" / "ratings").num_rows == 900
