"""A series is its released columns, channels and privacy: a column that is not released, another name and another place of the job do not end it."""

import json
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest
import yaml
from e2e.growing import (
    BY_USER,
    SCHEMA,
    N,
    add_day,
    at,
    job,
    kept,
    kinds,
    list_digests,
    manifests,
    rows_of,
    spent,
)
from e2e.helpers import call_cli, error_line, load, run_here
from e2e.test_growing_jobs import dying
from e2e.test_growing_logs import Delta, Iceberg, output, rows_in

from dpdask.errors import DataError, InputError, OutputError
from dpdask.jobs.plan import audit_job, plan_job
from dpdask.schema import Schema

pytestmark = pytest.mark.usefixtures("here")


def declare(made, columns=SCHEMA, **keys):
    (made.parent / "schema.yaml").write_text(yaml.safe_dump({"columns": columns, **keys}))


def with_note(day):
    return rows_of(day).append_column("note", pa.array(["x"] * N))


@pytest.mark.parametrize("kind", [Delta, Iceberg])
@pytest.mark.parametrize("how", ["undeclared", "declared"])
def test_a_new_column_of_the_source_changes_nothing(kind, how, tmp_path, url):
    lake = kind(tmp_path / "lake")
    made = lake.job(tmp_path / "job", ledger=at(url))
    lake.add(0)
    run_here(made)
    lake.add_column("note")
    lake.append(with_note(1))
    result = call_cli("run", made)
    assert result.returncode == DataError.exit_code
    assert "declare it: role keep, privatise or drop" in error_line(result)
    if how == "undeclared":
        declare(made, undeclared="drop")
    else:
        declare(made, {**SCHEMA, "note": {"role": "drop"}})
    assert plan_job(load(made)).dropped == ("note",)
    run_here(made)
    assert rows_in(made) == [N, N]
    assert (spent(url), kinds(url)) == (1.0, ["intend", "commit"] * 2)


@pytest.mark.parametrize("suffix", ["parquet", "csv"])
def test_files_with_more_columns_than_the_others_are_read(suffix, tmp_path):
    source = tmp_path / "in"
    made = job(tmp_path / "job", source)
    typed = {**SCHEMA, "day": {"role": "keep", "type": "int64"}}
    typed["user"] = {"role": "keep", "type": "int64"}
    declare(made, typed, undeclared="drop")
    write = pq.write_table if suffix == "parquet" else pa_csv.write_csv
    source.mkdir()
    for day, rows in enumerate((rows_of(0), with_note(1), rows_of(2))):
        write(rows, source / f"day-{day}.{suffix}")
        run_here(made)
    assert rows_in(made) == [N, N, N]
    declare(made, typed)
    assert call_cli("run", made).returncode == DataError.exit_code


@pytest.mark.parametrize("suffix", ["parquet", "csv"])
def test_a_file_without_the_dropped_column_of_the_unit_is_refused(suffix, tmp_path):
    source = tmp_path / "in"
    columns = {**SCHEMA, "user": {"role": "drop"}}
    made = job(tmp_path / "job", source, schema=columns, privacy__unit=BY_USER)
    write = pq.write_table if suffix == "parquet" else pa_csv.write_csv
    source.mkdir()
    write(rows_of(0), source / f"day-00.{suffix}")
    run_here(made)
    write(rows_of(1).drop_columns(["user"]), source / f"day-01.{suffix}")
    result = call_cli("run", made)
    assert result.returncode == DataError.exit_code
    assert "column 'user'" in error_line(result)


def test_another_name_text_and_place_change_nothing(tmp_path, url):
    source = tmp_path / "project" / "in"
    source.parent.mkdir()
    made = job(tmp_path / "project", source, ledger=at(url))
    add_day(source, 0)
    run_here(made)
    (tmp_path / "project").rename(tmp_path / "moved")
    source = tmp_path / "moved" / "in"
    made = job(
        tmp_path / "moved", source, ledger=at(url), name="another", about={"issuer": "an office"}
    )
    assert run_here(made).status == "nothing new"
    add_day(source, 1)
    run_here(made)
    assert rows_in(made) == [N, N]
    assert (spent(url), kinds(url)) == (1.0, ["intend", "commit"] * 2)
    audit_job(load(made), n_runs=1000)


@pytest.mark.parametrize(
    "change",
    [
        {"privacy__epsilon": 2.0},
        {"output__rows_per_shard": 7},
        {"schema": {**SCHEMA, "user": {"role": "drop"}}},
        {"schema": {**SCHEMA, "r": {**SCHEMA["r"], "levels": [1, 2, 3, 4, 5, 6]}}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_a_series_promises_stays(change, tmp_path):
    source = tmp_path / "in"
    add_day(source, 0)
    run_here(job(tmp_path / "job", source))
    if "levels" in str(change):
        change["mechanism__reference"] = {
            "kind": "known",
            "columns": {"r": {"probabilities": [1 / 6] * 6}},
        }
    with pytest.raises(OutputError, match="keeps its released columns, privacy and mechanism"):
        run_here(job(tmp_path / "job", source, **change))


def test_another_table_with_the_same_columns_is_no_part_of_the_series(tmp_path):
    add_day(tmp_path / "in", 0)
    run_here(job(tmp_path / "job", tmp_path / "in"))
    add_day(tmp_path / "other", 1)
    with pytest.raises(InputError, match="this file was released and is gone"):
        run_here(job(tmp_path / "job", tmp_path / "other"))


@pytest.mark.parametrize("stage", ["released", "begun"])
def test_a_series_that_an_earlier_version_began_goes_on(
    stage, tmp_path, url, monkeypatch, source, out
):
    """Its name is a digest of the job's text; afterwards that may change."""
    made = job(tmp_path / "job", source, ledger=at(url))
    add_day(source, 0)
    with monkeypatch.context() as patch:
        from dpdask.jobs import growing
        from dpdask.jobs.spec import Job

        patch.setattr(Job, "digest", property(lambda job: job.text_digest))
        patch.setattr(growing, "find_series", lambda job: job)
        if stage == "begun":
            with dying("fitted"):
                run_here(made)
        else:
            run_here(made)
            about = json.loads((kept(out) / "series.json").read_bytes())
            del about["promise"]
            (kept(out) / "series.json").write_text(json.dumps(about))
    add_day(source, 1)
    run_here(made)
    made = job(tmp_path / "job", source, ledger=at(url), name="another")
    add_day(source, 2)
    run_here(made)
    assert rows_in(made) == [N, N, N]
    assert (spent(url), kinds(url)) == (1.0, ["intend", "commit"] * 3)
    assert len({each.job for each in manifests(out)}) == 1


def test_a_job_keeps_its_series_while_a_release_is_unfinished(tmp_path):
    source = tmp_path / "in"
    add_day(source, 0)
    made = job(tmp_path / "job", source)
    with dying("fitted"):
        run_here(made)
    shutil.copytree(tmp_path / "job", tmp_path / "quiet")
    renamed = job(tmp_path / "job", source, name="another")
    assert plan_job(load(renamed)).refusal is None
    run_here(renamed)
    quiet = job(tmp_path / "quiet", source)
    run_here(quiet)
    digests = [list_digests(manifests(output(each)))[0][1:] for each in (quiet, renamed)]
    assert digests[0] == digests[1]


def test_a_schema_says_what_becomes_of_other_columns():
    plain, lenient = (
        Schema.from_dict({"columns": {"a": {"role": "keep"}}, **more})
        for more in ({}, {"undeclared": "drop"})
    )
    assert plain.model_dump(mode="json").keys() == {"columns"}
    assert Schema.from_dict(lenient.model_dump(mode="json", exclude_unset=True)) == lenient
    types = pa.schema([("a", pa.int64()), ("b", pa.int64())])
    assert lenient.select_released(types).names == ["a"]
    with pytest.raises(DataError, match="not declared"):
        plain.select_released(types)
    with pytest.raises(DataError, match="appears twice"):
        lenient.check_names(["a", "b", "b"])
    assert np.all([lenient.is_dropped("b"), not lenient.is_dropped("a"), not plain.is_dropped("b")])
