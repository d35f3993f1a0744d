"""Tables with partition columns: each file holds one combination of values, other engines read and prune them, and kills change no byte."""

import datetime as dt
import json

import dask
import deltalake
import duckdb
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from e2e.growing import rows_of
from e2e.helpers import (
    call_cli,
    charging_entries,
    discrete,
    error_line,
    load,
    make_ledger,
    processes,
    run_here,
    write_job,
)
from hypothesis import given
from hypothesis import strategies as st

import dpdask
from dpdask.engine import partitions
from dpdask.engine.partitions import split_batch
from dpdask.errors import DataError, OutputError, SpecError
from dpdask.io.shards import list_manifests
from dpdask.io.storage import Folder
from dpdask.jobs.plan import plan_job
from dpdask.jobs.run import abort

CITIES = ["Bern", "Łódź", "a b/c=d%", None]
SCHEMA = {
    "day": {"role": "keep"},
    "city": {"role": "keep"},
    "n": {"role": "keep"},
    "r": discrete([1, 2, 3, 4, 5]),
}
KNOWN = {"kind": "known", "columns": {"r": {"probabilities": [0.2] * 5}}}
DAYS = [dt.date(2026, 1, day) for day in (1, 2, 3)]


def table(n_rows, seed=1, cities=CITIES):
    rng = np.random.default_rng(seed)
    return pa.table(
        {
            "day": pa.array([DAYS[place] for place in rng.integers(0, 3, n_rows)], pa.date32()),
            "city": pa.array([cities[place] for place in rng.integers(0, len(cities), n_rows)]),
            "n": np.arange(n_rows) + 10_000 * seed,
            "r": rng.integers(1, 6, n_rows),
        }
    )


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    for number in range(3):
        pq.write_table(table(300, number), folder / f"part-{number}.parquet", row_group_size=100)
    return folder


def written(folder, source, by=("day", "city"), **changes):
    given = {
        "schema": SCHEMA,
        "mechanism__reference": KNOWN,
        "output__format": "delta",
        "output__partition_by": [*by],
        **changes,
    }
    output = given.pop("output", folder / "out")
    return write_job(folder, source, output, **given)


def shards_of(out):
    [manifest] = list_manifests(Folder(f"file://{out}"))
    return manifest.shards


def check_shards(out, by, n_rows):
    """Check that each shard holds one combination of values, as the manifest says, and return the rows."""
    found = []
    for shard in shards_of(out):
        rows = pq.read_table(out / shard.name)
        assert rows.num_rows == shard.n_rows <= 500
        for name in by:
            [value] = pc.unique(rows[name]).to_pylist()
            assert shard.partition[name] == (value.isoformat() if name == "day" else value)
        found.append(rows)
    rows = pa.concat_tables(found).sort_by("n")
    assert rows.num_rows == n_rows
    return rows


def original(source):
    return pq.read_table(source).sort_by("n").select(["day", "city", "n"])


def test_a_delta_table_has_partitions(tmp_path, source):
    job, out = written(tmp_path, source), tmp_path / "out"
    assert run_here(job).status == "released"
    rows = check_shards(out, ("day", "city"), 900)
    assert rows.select(["day", "city", "n"]) == original(source)
    table = deltalake.DeltaTable(out)
    assert table.metadata().partition_columns == ["day", "city"]
    assert len(table.partitions()) == 12
    read = table.to_pyarrow_table().sort_by("n")
    assert read.select(["day", "city", "n", "r"]).to_pylist() == rows.to_pylist()
    # pruned by the log alone: of a day that is not there, no file is opened
    adds = pa.table(table.get_add_actions(flatten=True)).to_pylist()
    some = {
        each["path"]
        for each in adds
        if (each["partition.day"], each["partition.city"]) == (DAYS[1], CITIES[2])
    }
    assert 0 < len(some) < 6
    for path in out.glob("*.parquet"):
        if path.name not in some:
            path.rename(path.with_suffix(".away"))
    where = (pc.field("day") == pa.scalar(DAYS[1])) & (pc.field("city") == CITIES[2])
    chosen = table.to_pyarrow_dataset().to_table(filter=where).sort_by("n")
    assert chosen["r"].to_pylist() == rows.filter(where)["r"].to_pylist()
    for path in out.glob("*.away"):
        path.rename(path.with_suffix(".parquet"))
    assert pl.read_delta(str(out)).sort("n")["r"].to_list() == rows["r"].to_pylist()
    # a folder of Parquet to whoever knows no Delta, and what an analyst opens
    files = [str(out / shard.name) for shard in shards_of(out)]
    assert duckdb.sql(f"select count(*) from read_parquet({files})").fetchall() == [(900,)]
    assert len(dpdask.open(str(out)).share("r").estimate) == 5


def test_an_iceberg_table_has_partitions(tmp_path, source, place, catalog):
    options = {"output__format": "iceberg", "output__table": "db.ratings", "output__catalog": place}
    out = tmp_path / "lake" / "out"
    job = written(tmp_path, source, output=out, **options)
    assert run_here(job).status == "released"
    rows = check_shards(out, ("day", "city"), 900)
    found = catalog.load_table("db.ratings")
    assert [str(field.transform) for field in found.spec().fields] == ["identity", "identity"]
    scanned = found.scan().to_arrow().sort_by("n").select(["day", "city", "n", "r"])
    assert scanned.to_pylist() == rows.to_pylist()
    planned = [*found.scan(row_filter="day = '2026-01-02'").plan_files()]
    assert 0 < len(planned) < len(shards_of(out))
    assert (
        sum(task.file.record_count for task in planned)
        == pc.sum(pc.equal(rows["day"], pa.scalar(DAYS[1]))).as_py()
    )
    # a second release joins it, and one that declares other partitions does not
    more = written(
        tmp_path / "more",
        source,
        output=out,
        privacy__epsilon=2.0,
        output__mode="append",
        **options,
    )
    assert run_here(more).status == "released"
    assert found.refresh().scan().count() == 1800
    for by, says in ((["day"], "partition columns day, city"), (["city", "day"], "day, city")):
        other = written(
            tmp_path / "other", source, by, output=out, output__mode="append", **options
        )
        with pytest.raises(OutputError, match=says) as refused:
            run_here(other, privacy__epsilon=3.0)
        assert "set output.partition_by: [day, city]" in str(refused.value)


@pytest.mark.parametrize("name", ["day", "city", "n", "flag"])
def test_each_type_of_value_comes_back(name, tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    flags = {"flag": {"role": "keep"}, **SCHEMA}
    rows = table(40).append_column("flag", pa.array([True, False, None, True] * 10))
    pq.write_table(
        rows.set_column(2, "n", pa.array([-1, 7, None, 0] * 10, pa.int64())), folder / "a.parquet"
    )
    job = written(tmp_path, folder, [name], schema=flags)
    run_here(job)
    out = tmp_path / "out"
    read = deltalake.DeltaTable(out).to_pyarrow_table()
    held = pa.concat_tables([pq.read_table(out / shard.name) for shard in shards_of(out)])
    assert sorted(map(str, read[name].to_pylist())) == sorted(map(str, held[name].to_pylist()))
    assert len(deltalake.DeltaTable(out).partitions()) == len(pc.unique(held[name]))
    # as an input of another job, the table has the values of its log
    again = write_job(
        tmp_path / "again",
        out,
        tmp_path / "second",
        schema=flags,
        input={"path": str(out), "format": "delta"},
        mechanism__reference=KNOWN,
    )
    assert run_here(again).manifest.n_rows == 40


@pytest.mark.parametrize("point", ["fitted", "some-shards", "uncommitted"])
def test_a_killed_run_gives_the_same_bytes(point, tmp_path, source, drivers):
    quiet = written(tmp_path / "quiet", source, output__rows_per_shard=60)
    struck = written(tmp_path / "struck", source, output__rows_per_shard=60)
    run_here(quiet)
    drivers.run("run", struck, point=point)
    run_here(struck)
    digests = [
        sorted(
            (shard.sha256, json.dumps(shard.partition))
            for shard in shards_of(tmp_path / name / "out")
        )
        for name in ("quiet", "struck")
    ]
    assert digests[0] == digests[1]
    out = tmp_path / "struck" / "out"
    assert {path.name for path in out.glob("*.parquet")} == {each.name for each in shards_of(out)}
    assert deltalake.DeltaTable(out).to_pyarrow_table().num_rows == 900


def test_every_scheduler_gives_the_same_bytes_and_an_abort_leaves_nothing(
    tmp_path, source, drivers
):
    one, two = (written(tmp_path / name, source) for name in ("one", "two"))
    run_here(one)
    with processes(2) as cluster, cluster.get_client() as client, dask.config.set(scheduler=client):
        from dpdask.jobs.run import run_job

        run_job(load(two))
    digests = [
        [each.sha256 for each in shards_of(tmp_path / name / "out")] for name in ("one", "two")
    ]
    assert digests[0] == digests[1]
    three = written(tmp_path / "three", source, output__rows_per_shard=60)
    drivers.run("run", three, point="some-shards")
    assert [*(tmp_path / "three" / "out").glob("*.parquet")]
    assert abort(f"file://{tmp_path / 'three' / 'out'}")
    assert not [*(tmp_path / "three" / "out").glob("*.parquet")]


def test_a_growing_table_adds_partitions(tmp_path):
    source = tmp_path / "in"
    source.mkdir()
    schema = {"day": {"role": "keep"}, "user": {"role": "keep"}, "r": SCHEMA["r"]}
    job = written(tmp_path, source, ["day"], schema=schema, growing=True)
    for day in range(3):
        pq.write_table(rows_of(day), source / f"{day}.parquet")
        assert run_here(job).status == "released"
    assert run_here(job).status == "nothing new"
    found = deltalake.DeltaTable(tmp_path / "out")
    assert sorted(each["day"] for each in found.partitions()) == ["0", "1", "2"]
    assert found.to_pyarrow_table().num_rows == 360


def test_what_is_not_kept_is_no_partition(tmp_path, source):
    ledger = make_ledger(tmp_path, "ratings", 4.0)
    for by, changes in (
        (["r"], {}),
        (["nowhere"], {}),
        (["n"], {"schema": {**SCHEMA, "n": {"role": "drop"}}}),
    ):
        with pytest.raises(SpecError, match="is not a kept column, and a partition's value"):
            load(written(tmp_path, source, by, **changes))
    counted = {**{name: {"role": "drop"} for name in SCHEMA}, "r": SCHEMA["r"]}
    tables = {"kind": "marginals", "cliques": [["r"]]}
    made = write_job(
        tmp_path,
        source,
        tmp_path / "out",
        schema=counted,
        mechanism=tables,
        output__format="delta",
        output__partition_by=["r"],
    )
    with pytest.raises(SpecError, match="is not a kept column"):
        load(made)
    done = call_cli("validate", written(tmp_path, source, output__partition_by=["day", "day"]))
    assert (done.returncode, "names a column twice" in error_line(done)) == (64, True)
    floats = pq.read_table(source / "part-0.parquet").append_column("f", pa.array([0.5] * 300))
    for path in source.iterdir():
        path.unlink()
    pq.write_table(floats, source / "a.parquet")
    made = written(tmp_path, source, ["f"], schema={**SCHEMA, "f": {"role": "keep"}}, ledger=ledger)
    with pytest.raises(SpecError, match="a column of double cannot be a partition column"):
        run_here(made)
    assert charging_entries(**ledger) == []


def test_too_many_partitions_and_empty_texts_are_refused_before_the_charge(
    tmp_path, source, place, catalog, monkeypatch
):
    ledger = make_ledger(tmp_path, "ratings", 8.0)
    monkeypatch.setattr(partitions, "MAX_PARTITIONS", 899)
    made = written(tmp_path, source, ["n"], ledger=ledger)
    with pytest.raises(DataError, match="'n': its values would make more than 899 partitions"):
        run_here(made)
    monkeypatch.setattr(partitions, "MAX_PARTITIONS", 900)
    pq.write_table(table(50, 7, [*CITIES, ""]), source / "empty.parquet")
    made = written(tmp_path, source, ["city"], ledger=ledger)
    with pytest.raises(DataError, match="reads an empty text back as null"):
        run_here(made)
    assert charging_entries(**ledger) == []
    assert not (tmp_path / ".out.dpdask").exists()
    options = {"output__format": "iceberg", "output__table": "db.t", "output__catalog": place}
    made = written(
        tmp_path, source, ["city"], output=tmp_path / "lake" / "t", ledger=ledger, **options
    )
    assert run_here(made).status == "released"
    values = catalog.load_table("db.t").scan().to_arrow()["city"].to_pylist()
    assert {*values} == {*CITIES, ""}


def test_few_shards_are_open_at_once(tmp_path, source, monkeypatch):
    """One that is closed for others is followed by another one; what is held is bounded, too."""
    for number, (name, most) in enumerate((("_MOST_OPEN", 2), ("_MOST_HELD", 1))):
        with monkeypatch.context() as patch:
            patch.setattr(partitions, name, most)
            run_here(written(tmp_path / str(number), source))
        out = tmp_path / str(number) / "out"
        assert len(shards_of(out)) > 12
        check_shards(out, ("day", "city"), 900)


def test_a_plan_names_no_number_of_shards(tmp_path, source):
    planned = plan_job(load(written(tmp_path, source)))
    assert planned.n_shards is None
    [output] = [line for line in repr(planned).splitlines() if line.startswith("  output")]
    assert "at most" not in output


KEYS = st.lists(
    st.tuples(st.sampled_from([None, "", "a", "b"]), st.sampled_from([None, True, False])),
    max_size=40,
)


@given(keys=KEYS, encoded=st.booleans())
def test_a_batch_is_split_as_one_loop_would(keys, encoded):
    texts = pa.array([text for text, _ in keys], pa.string())
    batch = pa.record_batch(
        {
            "t": texts.dictionary_encode() if encoded else texts,
            "b": pa.array([flag for _, flag in keys], pa.bool_()),
            "row": pa.array(range(len(keys)), pa.int64()),
        }
    )
    expected = {}
    for row, key in enumerate(keys):
        expected.setdefault(key, []).append(row)
    found = [(key, rows.column("row").to_pylist()) for key, rows in split_batch(batch, ["t", "b"])]
    assert found == [*expected.items()]
