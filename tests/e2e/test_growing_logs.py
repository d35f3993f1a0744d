"""Growing tables on Delta and Iceberg tables that somebody maintains: the log says which rows are new."""

from __future__ import annotations

import json
import shutil
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake
from deltalake.transaction import AddAction
from e2e.growing import (
    BY_USER,
    HISTOGRAM,
    N,
    at,
    job,
    kept,
    kinds,
    list_digests,
    manifests,
    rows_of,
    spent,
)
from e2e.helpers import call_cli, digests, error_line, hidden, load, run_here
from e2e.test_growing_jobs import POINTS, dying
from lakes.tables import delete_rows, log_of, rewrite_files, sql_catalog
from pyiceberg.expressions import And, EqualTo, LessThan

from dpdask.errors import InputError, OutputError, SpecError, TemporaryError
from dpdask.jobs.growing import Growth, rebase_job
from dpdask.jobs.plan import plan_job
from dpdask.mechanisms.card import Card

Lake = Any  # one of the two below


pytestmark = pytest.mark.usefixtures("here")


@dataclass
class Delta:
    """A Delta table whose files have names that follow from the day."""

    folder: Path

    def add(self, day, rows=None, name=None):
        rows = rows_of(day) if rows is None else rows
        if not self.folder.exists():
            write_deltalake(self.folder, rows.schema.empty_table())
        name = name or f"day-{day:02d}.parquet"
        pq.write_table(rows, self.folder / name)
        size = (self.folder / name).stat().st_size
        table = DeltaTable(self.folder)
        table.create_write_transaction(
            [AddAction(name, size, {}, 0, True, json.dumps({"numRecords": rows.num_rows}))],
            "append",
            table.schema(),
        )

    def append(self, rows):
        write_deltalake(self.folder, rows, mode="append", schema_mode="merge")

    def compact(self):
        DeltaTable(self.folder).optimize.compact()

    def vacuum(self):
        DeltaTable(self.folder).vacuum(0, dry_run=False, enforce_retention_duration=False)

    def delete(self, day):
        DeltaTable(self.folder).delete(f"day = {day} and user < 10")

    def merge(self, rows):
        merge = DeltaTable(self.folder).merge(
            rows, "s.day = t.day and s.user = t.user", source_alias="s", target_alias="t"
        )
        merge.when_matched_update_all().when_not_matched_insert_all().execute()

    def reload(self, day, rows):
        write_deltalake(self.folder, rows, mode="overwrite", predicate=f"day = {day}")

    def add_column(self, name):
        rows = rows_of(99).slice(0, 0).append_column(name, pa.array([], pa.string()))
        self.append(rows)

    @property
    def version(self):
        return DeltaTable(self.folder).version()

    def job(self, folder, **changed):
        return job(
            folder, self.folder, input={"path": str(self.folder), "format": "delta"}, **changed
        )


@dataclass
class Iceberg:
    """An Iceberg table whose files have names that follow from the day."""

    folder: Path

    def __post_init__(self):
        self.table = sql_catalog(self.folder).create_table("db.t", schema=rows_of(0).schema)

    def add(self, day, rows=None, name=None):
        rows = rows_of(day) if rows is None else rows
        path = Path(self.table.location().removeprefix("file://")) / "data"
        path.mkdir(parents=True, exist_ok=True)
        pq.write_table(rows, path / (name or f"day-{day:02d}.parquet"))
        self.table.refresh()
        self.table.add_files([(path / (name or f"day-{day:02d}.parquet")).as_uri()])

    def append(self, rows):
        self.table.refresh()
        self.table.append(rows)

    def compact(self):
        rewrite_files(self.table)

    def vacuum(self):
        """Keep the three newest snapshots, and their files; pyiceberg itself removes no file."""
        table = self.table.refresh()
        numbers = [each.snapshot_id for each in table.snapshots()]
        table.maintenance.expire_snapshots().by_ids(numbers[:-3]).commit()
        kept = {
            task.file.file_path
            for number in numbers[-3:]
            for task in table.scan(snapshot_id=number).plan_files()
        }
        for path in (Path(table.location().removeprefix("file://")) / "data").iterdir():
            if path.as_uri() not in kept:
                path.unlink()

    def delete(self, day):
        self.table.refresh()
        self.table.delete(And(EqualTo("day", day), LessThan("user", 10)))

    def merge(self, rows):
        self.table.refresh()
        self.table.upsert(rows, join_cols=["day", "user"])

    def reload(self, day, rows):
        self.table.refresh()
        self.table.overwrite(rows, overwrite_filter=EqualTo("day", day))

    def add_column(self, name):
        from pyiceberg.types import StringType

        with self.table.update_schema() as update:
            update.add_column(name, StringType())

    @property
    def version(self):
        return self.table.refresh().metadata.current_snapshot_id

    def job(self, folder, **changed):
        catalog = {
            "name": "lake",
            "type": "sql",
            "uri": f"sqlite:///{self.folder}/catalog.db",
            "warehouse": self.folder.as_uri(),
        }
        given = {"path": "db.t", "format": "iceberg", "catalog": catalog}
        return job(folder, self.folder, input=given, **changed)


OF_LATER_RELEASES = ("half-moved", "card-written", "manifest-written")
LAKES = pytest.mark.parametrize("kind", [Delta, Iceberg])


def output(made):
    return made.parent / "out"


def rows_in(made):
    return [manifest.n_rows for manifest in manifests(output(made))]


def told(made, number):
    name = "release.json" if number == 0 else f"release-{number:05d}.json"
    card = Card.read((output(made) / "_dpdask" / name).read_bytes(), name)
    return dict(card.series or {})


@LAKES
def test_rows_are_released_that_were_compacted_before_the_run(kind, tmp_path, url, seeded_ledgers):
    """The released bytes are those of a table that nobody maintains."""
    quiet, busy = kind(tmp_path / "quiet-lake"), kind(tmp_path / "lake")
    still, made = (
        quiet.job(tmp_path / "quiet"),
        busy.job(tmp_path / "job", ledger=at(url), insecure_seed=7),
    )
    for day in range(3):
        for lake in (quiet, busy):
            lake.add(day)
        run_here(still)
        if day:
            busy.compact()
        run_here(made)
        if day:
            busy.vacuum()
    assert run_here(made).status == "nothing new"
    shards = [
        [digests[1:] for digests in list_digests(manifests(output(each)))] for each in (still, made)
    ]
    assert shards[0] == shards[1]
    assert (spent(url), kinds(url)) == (1.0, ["intend", "commit"] * 3)


@LAKES
@pytest.mark.parametrize("policy", ["refuse", "ignore", "release"])
def test_rows_that_are_changed_follow_the_policy(kind, policy, tmp_path, url):
    lake = kind(tmp_path / "lake")
    made = lake.job(tmp_path / "job", ledger=at(url), growing={"changed": policy})
    lake.add(0)
    run_here(made)
    lake.add(1)
    lake.merge(rows_of(0).slice(0, 5).set_column(2, "r", pa.array([1] * 5, pa.int64())))
    lake.add(2)
    if policy == "refuse":
        before = digests(tmp_path / "job")
        for verb in ("plan", "run"):
            result = call_cli(verb, made)
            assert result.returncode == InputError.exit_code
            assert "of the table changed rows that were released" in error_line(result)
            assert "growing: {changed: ignore}" in error_line(result)
        assert digests(tmp_path / "job") == before
        assert kinds(url) == ["intend", "commit"]
        job_file = made.read_text().replace("changed: refuse", "changed: ignore")
        made.write_text(job_file)  # the policy is no part of what the series promises
    if policy != "release":
        warned = "the rows of 1 commit that changed rows of the table are not released"
        assert any(warned in each for each in plan_job(load(made)).warnings)
        assert any(warned in each for each in run_here(made).warnings)
    run_here(made)
    assert run_here(made).status == "nothing new"
    if policy == "release":
        assert rows_in(made) == [N, N, 2 * N]  # a whole file is written again; and a day is new
        assert spent(url) == 2.0
        assert [told(made, number)["again"] for number in range(1, 3)] == [False, True]
        assert told(made, 2)["epsilon"] == 2.0
        assert "once more in each of 1 release" in told(made, 2)["text"]
    else:
        assert rows_in(made) == [N, 2 * N]
        assert spent(url) == 1.0
        assert told(made, 1)["ignored_commits"] == 1
        assert "changed rows are not released" in told(made, 1)["text"]
    lake.add(3)
    run_here(made)
    assert spent(url) == (2.0 if policy == "release" else 1.0)


def test_a_person_pays_for_changed_rows_as_for_any_release(tmp_path, url):
    lake = Delta(tmp_path / "lake")
    made = lake.job(
        tmp_path / "job", ledger=at(url), growing={"changed": "release"}, privacy__unit=BY_USER
    )
    lake.add(0)
    run_here(made)
    lake.merge(rows_of(0).slice(0, 5))
    run_here(made)
    assert (spent(url), told(made, 1)["epsilon"]) == (2.0, 2.0)


@LAKES
def test_a_gap_is_named_and_rebase_goes_on(kind, tmp_path, url):
    lake = kind(tmp_path / "lake")
    made = lake.job(tmp_path / "job", ledger=at(url))
    lake.add(0)
    run_here(made)
    first = lake.version
    lake.add(1)
    lake.compact()
    if kind is Delta:
        lake.vacuum()
    else:
        lake.table.refresh().maintenance.expire_snapshots().by_ids(
            [lake.table.snapshots()[1].snapshot_id]
        ).commit()
    lake.add(2)
    newest = lake.version
    before, entries = digests(tmp_path / "job"), kinds(url)
    for verb in ("plan", "run"):
        result = call_cli(verb, made)
        assert result.returncode == InputError.exit_code
        assert "cannot be read any more" in error_line(result)
        assert f"dpdask rebase JOB --at {newest}" in error_line(result)
    assert (digests(tmp_path / "job"), kinds(url)) == (before, entries)
    for _ in range(2):
        result = call_cli("rebase", made, "--at", str(newest))
        assert result.returncode == 0, result.stderr
    assert not hidden(output(made)).exists()
    assert kinds(url) == entries
    assert run_here(made).status == "nothing new"
    result = call_cli("rebase", made, "--at", str(first))
    assert result.returncode == SpecError.exit_code
    assert "which is a later one" in error_line(result)
    lake.add(3)
    run_here(made)
    assert rows_in(made) == [N, N]
    assert told(made, 1)["declared_version"] == newest
    assert f"up to version {newest} as released" in told(made, 1)["text"]
    lake.add(4)
    run_here(made)
    assert told(made, 2)["declared_version"] is None
    assert (spent(url), kinds(url)) == (1.0, ["intend", "commit"] * 3)


@pytest.mark.matrix("rebase killed", "{point}")
@pytest.mark.parametrize("point", ["rebasing", "rebased", "rebase-ended"])
@pytest.mark.parametrize("repeated", [True, False])
def test_a_rebase_that_is_killed_is_done_or_not(point, repeated, drivers, tmp_path, url):
    lake = Delta(tmp_path / "lake")
    made = lake.job(tmp_path / "job", ledger=at(url))
    lake.add(0)
    run_here(made)
    lake.add(1)
    words = ("rebase", made, "--at", lake.version)
    assert drivers.run(*words, point=point)[0] == -signal.SIGKILL
    if repeated:
        assert drivers.run(*words)[0] == 0
    done = repeated or point != "rebasing"
    assert run_here(made).status == ("nothing new" if done else "released")
    assert not hidden(output(made)).exists()
    lake.add(2)
    run_here(made)
    assert rows_in(made) == [N] * (2 if done else 3)
    assert told(made, 1)["declared_version"] == (words[3] if done else None)
    assert (spent(url), kinds(url)) == (1.0, ["intend", "commit"] * (2 if done else 3))


def test_rebase_says_what_it_is_for(tmp_path):
    lake = Delta(tmp_path / "lake")
    lake.add(0)
    made = lake.job(tmp_path / "job")
    result = call_cli("rebase", made, "--at", "0")
    assert result.returncode == SpecError.exit_code
    assert "nothing was released here" in error_line(result)
    assert list(tmp_path.glob("job/.*")) == []
    with dying("fitted"):
        run_here(made)
    run_here(made)
    lake.add(1)
    with dying("fitted"):
        run_here(made)
    result = call_cli("rebase", made, "--at", "1")
    assert result.returncode == OutputError.exit_code
    assert "a release is unfinished here" in error_line(result)
    assert run_here(made).status == "released"
    assert call_cli("rebase", made, "--at", "9").returncode == InputError.exit_code
    plain = job(tmp_path / "plain", tmp_path / "lake")
    assert call_cli("rebase", plain, "--at", "1").returncode == SpecError.exit_code


def test_a_log_that_was_cleaned_is_a_gap(tmp_path):
    lake = Delta(tmp_path / "lake")
    made = lake.job(tmp_path / "job")
    lake.add(0)
    run_here(made)
    for day in range(1, 4):
        lake.add(day)
    DeltaTable(lake.folder).create_checkpoint()
    for version in range(4):
        log_of(lake.folder, version).unlink()
    with pytest.raises(InputError, match="from version 2 to 3 cannot be read"):
        run_here(made)


def test_another_table_is_not_taken_for_the_one_that_was_released(tmp_path):
    lake = Delta(tmp_path / "lake")
    made = lake.job(tmp_path / "job")
    lake.add(0)
    run_here(made)
    lake.folder.rename(tmp_path / "old")
    lake.add(1)
    lake.add(2)
    with pytest.raises(InputError, match="this is another table"):
        run_here(made)


def test_a_restored_table_brings_no_row_twice(tmp_path, url):
    lake = Delta(tmp_path / "lake")
    made = lake.job(tmp_path / "job", ledger=at(url))
    lake.add(0)
    run_here(made)
    lake.compact()
    compacted = lake.version
    DeltaTable(lake.folder).delete()
    DeltaTable(lake.folder).restore(compacted)
    with pytest.raises(InputError, match="changed rows that were released"):
        run_here(made)


@LAKES
def test_a_series_of_an_earlier_version_goes_on(kind, tmp_path, url):
    """Its record does not tell up to where the table was released."""
    lake = kind(tmp_path / "lake")
    made = lake.job(tmp_path / "job", ledger=at(url))
    for day in range(2):
        lake.add(day)
        run_here(made)
    [path] = kept(output(made)).glob("released-*")
    record = json.loads(path.read_bytes())
    for size in record["sizes"]:
        del size["again"]
    for name in ("place", "declared", "n_deleting", "n_ignored"):
        del record[name]
    path.write_text(json.dumps(record | {"format": 1}))
    lake.compact()
    lake.add(2)
    run_here(made)
    assert rows_in(made) == [N, N, N]
    assert (spent(url), kinds(url)) == (1.0, ["intend", "commit"] * 3)


@pytest.mark.matrix("driver killed", "growing, {kind}, then compaction")
@LAKES
@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("day", "point"),
    [(1, point) for point in POINTS]
    + [(0, point) for point in POINTS if point not in OF_LATER_RELEASES],
)
def test_a_killed_day_goes_on_although_its_files_were_compacted(
    kind, day, point, tmp_path, url, seeded_ledgers
):
    lake = kind(tmp_path / "lake")
    quiet = lake.job(tmp_path / "quiet", output__rows_per_shard=25)
    made = lake.job(tmp_path / "job", output__rows_per_shard=25, ledger=at(url), insecure_seed=7)
    for before in range(day):
        lake.add(before)
        run_here(quiet)
        run_here(made)
    lake.add(day)
    run_here(quiet)
    with dying(point):
        run_here(made)
    lake.compact()
    lake.add(day + 1)
    lake.compact()
    run_here(quiet)
    run_here(made)
    assert run_here(made).status == "nothing new"
    assert list_digests(manifests(output(made))) == list_digests(manifests(output(quiet)))
    assert (spent(url), kinds(url)) == (1.0, ["intend", "commit"] * (day + 2))


def test_a_plan_says_what_the_log_did(tmp_path, url):
    lake = Delta(tmp_path / "lake")
    made = lake.job(
        tmp_path / "job",
        ledger=at(url),
        growing={"changed": "release"},
        mechanism__reference=HISTOGRAM,
    )
    lake.add(0)
    run_here(made)
    lake.delete(0)
    lake.merge(rows_of(0).slice(20, 5))
    planned = plan_job(load(made))
    series = planned.series or {}
    assert (series["again"], series["deleting_commits"], series["new_rows"]) == (True, 1, N - 10)
    assert series["series_epsilon"] > 1.0
    assert "it may hold rows that were released before" in planned.warnings[0]


@pytest.mark.parametrize("known", [True, False], ids=["the log tells", "it was cut"])
def test_a_deletion_and_an_append_of_iceberg_are_no_change_unless_they_may_be_one_commit(
    known, tmp_path
):
    lake = Iceberg(tmp_path / "lake")
    made = lake.job(tmp_path / "job")
    for day in range(2):
        lake.add(day)
    run_here(made)
    if not known:
        with lake.table.transaction() as transaction:
            transaction.set_properties({"write.metadata.previous-versions-max": "1"})
    lake.table.refresh()
    lake.table.delete(EqualTo("day", 0))
    lake.append(rows_of(2))
    with lake.table.transaction() as transaction:
        transaction.set_properties({"a": "b"})
    if known:
        run_here(made)
        assert rows_in(made) == [2 * N, N]
        assert told(made, 1)["deleting_commits"] == 1
    else:
        with pytest.raises(InputError, match="changed rows that were released"):
            run_here(made)


def test_a_table_that_was_rolled_back_is_a_gap(tmp_path):
    lake = Delta(tmp_path / "lake")
    made = lake.job(tmp_path / "job")
    for day in range(2):
        lake.add(day)
    run_here(made)
    log_of(lake.folder, lake.version).unlink()
    with pytest.raises(InputError, match="from version 2 to 2 cannot be read any more"):
        run_here(made)
    assert call_cli("rebase", made, "--at", "1").returncode == SpecError.exit_code


def test_a_commit_of_two_snapshots_is_one_change_though_another_writer_sets_a_property(
    tmp_path, url
):
    lake = Iceberg(tmp_path / "lake")
    made = lake.job(tmp_path / "job", ledger=at(url))
    lake.add(0)
    run_here(made)
    lake.table.refresh()
    other = sql_catalog(tmp_path / "lake").load_table("db.t")
    with lake.table.transaction() as transaction:
        transaction.delete(EqualTo("day", 0))
        time.sleep(0.01)
        with other.transaction() as property_alone:
            property_alone.set_properties({"owner": "somebody"})
        time.sleep(0.01)
        transaction.append(rows_of(0).slice(0, N - 1))  # else the files are seen to be alike
    with pytest.raises(InputError, match="changed rows that were released"):
        run_here(made)
    assert (rows_in(made), spent(url)) == ([N], 1.0)


def test_a_deletion_and_an_append_of_two_commits_are_two(tmp_path, url):
    lake = Iceberg(tmp_path / "lake")
    made = lake.job(tmp_path / "job", ledger=at(url))
    lake.add(0)
    lake.add(1)
    run_here(made)
    lake.table.refresh()
    lake.table.delete(EqualTo("day", 0))
    lake.add(2)
    run_here(made)
    assert rows_in(made) == [2 * N, N]


@pytest.mark.parametrize("policy", ["refuse", "ignore", "release"])
def test_a_file_that_its_own_commit_removes_is_in_no_version(policy, tmp_path, url):
    lake = Iceberg(tmp_path / "lake")
    made = lake.job(tmp_path / "job", ledger=at(url), growing={"changed": policy})
    lake.add(0)
    run_here(made)
    lake.table.refresh()
    with lake.table.transaction() as transaction:
        transaction.delete(LessThan("user", 5))
        transaction.delete(LessThan("user", 10))
    if policy == "refuse":
        with pytest.raises(InputError, match="changed rows that were released"):
            run_here(made)
    else:
        run_here(made)
        assert rows_in(made) == ([N, N - 10] if policy == "release" else [N])
        assert spent(url) == (2.0 if policy == "release" else 1.0)


def test_a_driver_that_looked_before_a_rebase_releases_nothing(tmp_path, url, monkeypatch):
    lake = Delta(tmp_path / "lake")
    made = lake.job(tmp_path / "job", ledger=at(url))
    lake.add(0)
    run_here(made)
    lake.add(1)
    find, struck = Growth.open_next, []

    def look(self, unfinished):
        found = find(self, unfinished)
        if not struck:
            struck.append(True)
            rebase_job(load(made), lake.version)
        return found

    monkeypatch.setattr(Growth, "open_next", look)
    with pytest.raises(TemporaryError, match="another run is writing this output"):
        run_here(made)
    assert run_here(made).status == "nothing new"
    assert (rows_in(made), kinds(url)) == ([N], ["intend", "commit"])


def test_a_series_that_left_a_table_does_not_come_back_to_released_rows(tmp_path):
    place, first = tmp_path / "lake", tmp_path / "first"
    lake = Delta(place)
    made = lake.job(tmp_path / "job")
    for day in range(2):
        lake.add(day)
        run_here(made)
    place.rename(first)
    Delta(place).add(7)
    rebase_job(load(made), 1)
    assert run_here(made).status == "nothing new"
    shutil.rmtree(place)
    first.rename(place)
    for _ in range(2):
        with pytest.raises(SpecError, match="the table was released up to version 2"):
            rebase_job(load(made), 0)
        rebase_job(load(made), 2)
    lake.add(3)
    run_here(made)
    assert rows_in(made) == [N, N, N]


def test_deletions_that_are_undone_charge_no_later_rows(tmp_path, url):
    place = tmp_path / "lake"
    vectors = {"delta.enableDeletionVectors": "true"}
    write_deltalake(place, rows_of(0).schema.empty_table(), configuration=vectors)
    lake = Delta(place)
    made = lake.job(tmp_path / "job", ledger=at(url), growing={"changed": "release"})
    lake.add(0)
    delete_rows(place, {"day-00": [0, 1, 2]})
    run_here(made)
    delete_rows(place, {"day-00": [0]})  # fewer rows are deleted now
    assert run_here(made).status == "nothing new"
    lake.add(1)
    run_here(made)
    assert (rows_in(made), spent(url)) == ([N - 3, N], 1.0)
