"""Growing tables whose releases are versions of a Delta or Iceberg table."""

import json
import shutil
from dataclasses import replace

import deltalake
import pytest
from e2e.growing import (
    BY_USER,
    HOLDOUT,
    N,
    add_day,
    at,
    grow,
    job,
    kept,
    kinds,
    list_digests,
    manifests,
    read_log,
    spent,
)
from e2e.helpers import call_cli, digests, error_line, hidden, load, run_here
from e2e.test_growing_jobs import dying
from pyiceberg.catalog import load_catalog

from dpdask.errors import InputError, OutputError, SpecError
from dpdask.io.shards import count_committed
from dpdask.io.table_logs import DeltaLog
from dpdask.jobs.plan import audit_job, plan_job
from dpdask.jobs.run import abort, status

DELTA = {"output__format": "delta"}


pytestmark = pytest.mark.usefixtures("here")


@pytest.fixture
def catalog(tmp_path):
    found = load_catalog(**at_warehouse(tmp_path))
    found.create_namespace("db")
    return found


def at_warehouse(folder):
    return {
        "name": "lake",
        "type": "sql",
        "uri": f"sqlite:///{folder}/catalog.db",
        "warehouse": folder.as_uri(),
    }


def iceberg(folder, name):
    return {
        "output__format": "iceberg",
        "output__table": f"db.{name}",
        "output__catalog": at_warehouse(folder),
    }


def test_each_release_is_a_version_of_the_table(tmp_path, url, source, out):
    made = job(tmp_path / "job", source, HOLDOUT, ledger=at(url), **DELTA)
    assert f"{out}, appended to a Delta table" in str(
        plan_job(load(made, input__path=str(add_day(source, 0).parent)))
    )
    before = {}
    for day in range(4):
        add_day(source, day)
        assert run_here(made).status == "released"
        now = digests(out)
        assert {name: now[name] for name in before} == before
        before = {name: digest for name, digest in now.items() if name != "_dpdask/series.json"}
        assert status(f"file://{out}").n_releases == day + 1
    found = manifests(out)
    assert read_log(out) == [{shard.name for shard in each.shards} for each in found]
    assert (
        deltalake.DeltaTable(out).to_pyarrow_table().num_rows
        == sum(each.n_rows for each in found)
        < 4 * N
    )
    assert (spent(url), kinds(url)) == (1.0, ["intend", "commit"] * 4)
    summary = json.loads((out / "_dpdask" / "series.json").read_text())["series"]
    assert (summary["releases"], summary["epsilon"]) == (4, 1.0)
    assert not hidden(out).exists()
    planned = plan_job(load(made))
    assert (planned.series or {})["releases"] == 4
    assert "nothing new" in str(planned)
    before = digests(tmp_path / "job")
    assert call_cli("run", made).stdout.splitlines()[0] == "test: nothing new"
    assert digests(tmp_path / "job") == before
    assert audit_job(load(made), n_runs=100)["columns"]["r"]["reference"] == "the released channel"


def test_a_table_may_hold_other_rows_and_takes_the_series_of_one_job(tmp_path, url, source, out):
    made = job(tmp_path / "job", source, ledger=at(url), **DELTA)
    other = {"output__path": str(out), "privacy__epsilon": 2.0, "ledger": at(url)}
    add_day(source, 0)
    run_here(job(tmp_path / "before", source, growing=False, **DELTA, **other))
    grow(made, source, range(2))
    run_here(
        job(tmp_path / "after", source, growing=False, output__mode="append", **DELTA, **other)
    )
    grow(made, source, range(2, 3))
    assert [each.n_rows for each in manifests(out)] == [N, N, N]
    assert deltalake.DeltaTable(out).to_pyarrow_table().num_rows == N + 3 * N + 2 * N
    assert spent(url) == 5.0
    with pytest.raises(
        OutputError, match="this output holds another job's release; a growing table keeps"
    ):
        run_here(job(tmp_path / "another", source, **DELTA, **other))
    shutil.rmtree(kept(out))
    add_day(source, 3)
    with pytest.raises(InputError, match="missing or was changed"):
        run_here(made)


def test_a_run_of_another_job_is_not_ended(tmp_path, source, out):
    made = job(tmp_path / "job", source, **DELTA)
    grow(made, source, range(1))
    add_day(tmp_path / "beside", 9)
    other = job(
        tmp_path / "other",
        tmp_path / "beside",
        growing=False,
        output__mode="append",
        output__path=str(out),
        **DELTA,
    )
    with dying("manifest-written"):
        run_here(other)
    add_day(source, 1)
    with pytest.raises(
        OutputError, match="a run of another job has published here and is not finished"
    ):
        run_here(made)
    run_here(other)
    assert run_here(made).manifest.n_rows == N


def test_a_table_whose_columns_were_changed_is_refused(tmp_path, url, source, out):
    made = job(tmp_path / "job", source, ledger=at(url), **DELTA)
    grow(made, source, range(1))
    deltalake.DeltaTable(out).alter.add_columns(
        deltalake.Field("more", deltalake.schema.PrimitiveType("long"))
    )
    add_day(source, 1)
    with pytest.raises(
        OutputError, match="this table has other columns than the release"
    ) as refused:
        run_here(made)
    assert str(plan_job(load(made)).refusal) == str(refused.value)
    assert kinds(url) == ["intend", "commit"]


def test_releases_are_not_replaced(tmp_path):
    result = call_cli("validate", job(tmp_path, tmp_path / "in", output__mode="overwrite", **DELTA))
    assert result.returncode == SpecError.exit_code
    assert "output.mode: a growing table adds to what was released" in error_line(result)


def test_rows_that_another_run_has_released_are_not_released_again(
    tmp_path, monkeypatch, source, out
):
    made = job(tmp_path / "job", source, **DELTA)
    grow(made, source, range(1))
    add_day(source, 1)
    commit = DeltaLog.commit

    def come_second(log, entry):
        commit(log, replace(entry, run=1))
        commit(log, entry)

    monkeypatch.setattr(DeltaLog, "commit", come_second)
    with pytest.raises(OutputError, match="another run has released these rows into this table"):
        run_here(made)
    assert len(read_log(out)) == 2


def test_what_another_version_keeps_is_refused(tmp_path, source, out):
    made = job(tmp_path / "job", source, **DELTA)
    grow(made, source, range(1))
    about = json.loads((kept(out) / "series.json").read_text())
    (kept(out) / "series.json").write_text(json.dumps({**about, "format": 0}))
    for refused in (
        lambda: run_here(made),
        lambda: status(f"file://{out}"),
        lambda: abort(f"file://{out}"),
    ):
        with pytest.raises(OutputError, match="this series was saved by another version of dpdask"):
            refused()


def test_releases_are_counted_without_gaps():
    assert [count_committed(lambda number, n=n: number < n) for n in range(40)] == list(range(40))


@pytest.mark.parametrize(
    "unit", ["row", pytest.param(BY_USER, marks=pytest.mark.slow)], ids=["row", "person"]
)
def test_releases_are_snapshots_of_an_iceberg_table(unit, tmp_path, url, catalog, seeded_ledgers):
    source, out = tmp_path / "in", tmp_path / "struck"
    changed = {"privacy__unit": unit, "output__rows_per_shard": 25}
    quiet = job(
        tmp_path / "job" / "quiet",
        source,
        output__path=str(tmp_path / "quiet"),
        **changed,
        **iceberg(tmp_path, "quiet"),
    )
    ledger = {"ledger": at(url), "insecure_seed": 7}
    made = job(
        tmp_path / "job" / "struck",
        source,
        output__path=str(out),
        **changed,
        **ledger,
        **iceberg(tmp_path, "struck"),
    )
    for day, point in enumerate(["some-shards", "kept", "uncommitted", "fitted"]):
        add_day(source, day)
        run_here(quiet)
        with dying(point):
            run_here(made)
        assert status(f"file://{out}").n_releases == day + (point == "uncommitted")
        run_here(made)
        assert run_here(made).status == "nothing new"
    assert list_digests(manifests(out)) == list_digests(manifests(tmp_path / "quiet"))
    assert kinds(url) == ["intend", "commit"] * 4
    assert spent(url) == (1.0 if unit == "row" else 4.0)
    table, by = catalog.load_table("db.struck"), [("day", "ascending"), ("user", "ascending")]
    assert len(table.snapshots()) == 4
    rows = table.scan().to_arrow().sort_by(by)
    assert rows == catalog.load_table("db.quiet").scan().to_arrow().sort_by(by)
    add_day(source, 4)
    before = digests(out)
    with dying("kept"):
        run_here(made)
    assert abort(f"file://{out}")
    assert digests(out) == before
    assert (plan_job(load(made)).series or {})["releases"] == 4
