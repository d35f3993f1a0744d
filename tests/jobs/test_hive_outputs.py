"""Plain outputs with partition columns: folders as Hive names them, read by other engines and by `dpdask.open`, on disks and in stores."""

import datetime as dt
import json
import signal
from contextlib import ExitStack

import dask
import dask.dataframe as dd
import duckdb
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from e2e.growing import rows_of
from e2e.helpers import (
    call_cli,
    charged_kinds,
    charging_entries,
    error_line,
    hidden,
    load,
    processes,
    run_here,
    write_job,
)
from hypothesis import given
from hypothesis import strategies as st
from jobs.test_partitioned_outputs import CITIES, KNOWN, SCHEMA, original, shards_of, table

import dpdask
from dpdask.engine import partitions
from dpdask.errors import DataError, InputError, OutputError, SpecError
from dpdask.io import storage
from dpdask.io.folders import check_values, list_files, name_folders, split_folders
from dpdask.io.shards import Manifest, ShardWriter
from dpdask.io.storage import Folder
from dpdask.jobs.overview import sweep
from dpdask.jobs.run import abort, run_job, status

NAMED = {"a b/c=d%": "a b%2Fc%3Dd%25", None: "__HIVE_DEFAULT_PARTITION__"}


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    for number in range(3):
        pq.write_table(table(300, number), folder / f"part-{number}.parquet", row_group_size=100)
    return folder


def written(folder, source, by=("day", "city"), **changes):
    given = {"schema": SCHEMA, "mechanism__reference": KNOWN, "output__partition_by": [*by]}
    given |= changes
    return write_job(folder, source, given.pop("output", folder / "out"), **given)


def digests(folder):
    manifest = Manifest.read(folder)
    return [(shard.name.rpartition("/")[0], shard.sha256) for shard in manifest.shards]


@pytest.mark.filterwarnings("ignore:The inplace keyword")  # in Dask
def test_folders_are_named_as_hive_names_them_and_every_engine_reads_them(tmp_path, source):
    assert run_here(written(tmp_path, source)).status == "released"
    out = tmp_path / "out"
    shards = shards_of(out)
    assert {shard.name.rpartition("/")[0] for shard in shards} == {
        f"day={day}/city={NAMED.get(city, city)}"
        for day in ("2026-01-01", "2026-01-02", "2026-01-03")
        for city in CITIES
    }
    for shard in shards:
        assert pq.ParquetFile(out / shard.name).schema_arrow.names == ["n", "r"]
        assert split_folders(shard.name) == shard.partition
    rows = dpdask.open(str(out)).to_pandas()
    assert list(rows.columns) == ["n", "r", "day", "city"]
    rows = pa.Table.from_pandas(rows, preserve_index=False).sort_by("n")
    assert rows.select(["day", "city", "n"]).to_pylist() == original(source).to_pylist()
    # the same rows as in a table, whose files hold the columns
    run_here(written(tmp_path / "table", source, output__format="delta"))
    there = [
        pq.read_table(tmp_path / "table" / "out" / each.name)
        for each in shards_of(tmp_path / "table" / "out")
    ]
    assert pa.concat_tables(there).sort_by("n")["r"].to_pylist() == rows["r"].to_pylist()
    expected = [(str(each["day"]), each["city"], each["n"], each["r"]) for each in rows.to_pylist()]

    def plain(found):
        """Return the rows in order, with dates as texts, and missing texts as None."""
        picked = (
            (
                str(each["day"])[:10],
                each["city"] if isinstance(each["city"], str) else None,
                *(int(each["n"]), int(each["r"])),
            )
            for each in found
        )
        return sorted(picked, key=lambda row: row[2])

    assert plain(pq.read_table(out).to_pylist()) == expected
    # Dask guesses no type of a null, so it is told
    types = pa.schema([("day", pa.date32()), ("city", pa.string())])
    told = {"partitioning": {"flavor": "hive", "schema": types}}
    assert plain(dd.read_parquet(out, dataset=told).compute().to_dict("records")) == expected
    without = dd.read_parquet(out, filters=[("city", "in", ["Bern", "Łódź"])]).compute()
    assert plain(without.to_dict("records")) == [
        row for row in expected if row[1] in ("Bern", "Łódź")
    ]
    assert (
        plain(pl.read_parquet(f"{out}/**/*.parquet", hive_partitioning=True).to_dicts()) == expected
    )
    found = duckdb.sql(f"select * from read_parquet('{out}/**/*.parquet', hive_partitioning=true)")
    assert plain(found.to_arrow_table().to_pylist()) == expected
    # of other folders, no file is opened
    for shard in shards:
        if shard.partition != {"day": "2026-01-02", "city": CITIES[2]}:
            (out / shard.name).write_bytes(b"")
    pruned = ds.dataset(
        out,
        schema=rows.schema.remove_metadata(),
        partitioning=ds.partitioning(types, flavor="hive"),
        exclude_invalid_files=False,
    )
    where = (pc.field("day") == dt.date(2026, 1, 2)) & (pc.field("city") == CITIES[2])
    chosen = pruned.to_table(filter=where).sort_by("n")
    assert chosen["r"].to_pylist() == rows.filter(where)["r"].to_pylist()


@pytest.mark.parametrize("name", ["day", "city", "n", "flag", "small"])
def test_each_type_of_value_comes_back(name, tmp_path):
    (tmp_path / "in").mkdir()
    schema = {"flag": {"role": "keep"}, "small": {"role": "keep"}, **SCHEMA}
    rows = table(40).append_column("flag", pa.array([True, False, None, True] * 10))
    rows = rows.append_column("small", pa.array([-1, 7, None, 0] * 10, pa.int8()))
    rows = rows.set_column(1, "city", pa.array(["007", "7", "true", "Bern"] * 10))
    pq.write_table(rows, tmp_path / "in" / "a.parquet")
    run_here(written(tmp_path, tmp_path / "in", [name], schema=schema))
    opened = dpdask.open(str(tmp_path / "out"))
    frame = opened.to_pandas().sort_values("n")
    kept = rows.sort_by("n").to_pandas()
    assert frame[name].astype(str).tolist() == kept[name].astype(str).tolist()
    lazy = opened.to_dask().compute().sort_values("n")
    assert lazy[name].astype(str).tolist() == kept[name].astype(str).tolist()
    # as an input of another job, whose schema says the types
    types = {"day": "date32", "city": "string", "n": "int64", "flag": "bool", "small": "int8"}
    declared = {**schema, name: {"role": "keep", "type": types[name]}}
    again = write_job(
        tmp_path / "again",
        tmp_path / "out",
        tmp_path / "second",
        schema=declared,
        mechanism__reference=KNOWN,
    )
    assert run_here(again).manifest.n_rows == 40
    frame = dpdask.open(str(tmp_path / "second")).to_pandas().sort_values("n")
    assert frame[name].astype(str).tolist() == kept[name].astype(str).tolist()


@pytest.mark.matrix("driver killed", "folders of values, {name}")
@pytest.mark.parametrize("name", ["local", "radosgw", "azurite"])
@pytest.mark.parametrize("point", ["shard-half-written", "some-shards", "uncommitted"])
@pytest.mark.few
def test_a_killed_run_gives_the_same_bytes_and_an_aborted_one_leaves_nothing(
    name, point, tmp_path, source, drivers, open_store, url, seeded_ledgers, monkeypatch
):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    run_here(written(tmp_path / "quiet", source, output__rows_per_shard=60))
    ledger = {"url": url, "dataset": "people"}
    with open_store(name) as store:
        around = {"XDG_STATE_HOME": str(tmp_path / "state")}
        around |= store.server.environment() if store.server else {}
        given = {"output__path": store.folder.url, "output__rows_per_shard": 60}
        job = written(tmp_path / "job", source, ledger=ledger, insecure_seed=7, **given)
        if point != "uncommitted":
            assert drivers.run("run", job, point=point, environment=around)[0] == -signal.SIGKILL
            assert abort(store.folder.url, url)
            assert list_files(store.folder) == []
        assert drivers.run("run", job, point=point, environment=around)[0] == -signal.SIGKILL
        assert (status(store.folder.url).stage == "released") == (point == "uncommitted")
        code, text = drivers.run("run", job, environment=around)
        assert code == 0, text
        run_here(written(tmp_path / "seeded", source, insecure_seed=7, output__rows_per_shard=60))
        found = digests(store.folder)
        assert found == digests(Folder(f"file://{tmp_path}/seeded/out"))
        manifest = Manifest.read(store.folder)
        names = {shard.name for shard in manifest.shards}
        assert names <= {*list_files(store.folder)}
        assert {each for each in list_files(store.folder) if each.endswith(".parquet")} == names
        assert status(store.folder.url)[:4] == ("released", len(names), 1, 0)
        assert len(dpdask.open(store.folder.url).to_pandas(["city", "r"])) == 900
        store.folder.remove(manifest.shards[0].name)
        assert status(store.folder.url).n_missing == 1
        assert run_job(load(job)).warnings == (
            f"missing shards: 1 of {len(names)}; restore them from a copy: a new run would spend ε again",
        )
    assert charged_kinds(**ledger)[-2:] == ["intend", "commit"]


def test_every_scheduler_gives_the_same_bytes(tmp_path, source):
    one, two = (written(tmp_path / name, source) for name in ("one", "two"))
    run_here(one)
    with processes(2) as cluster, cluster.get_client() as client, dask.config.set(scheduler=client):
        run_job(load(two))
    found = [Manifest.read(Folder(f"file://{tmp_path}/{name}/out")) for name in ("one", "two")]
    assert found[0].shards == found[1].shards


@pytest.mark.parametrize("name", ["local", "radosgw"])
def test_a_growing_table_adds_folders(name, tmp_path, drivers, open_store, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "in").mkdir()
    schema = {"day": {"role": "keep"}, "user": {"role": "keep"}, "r": SCHEMA["r"]}
    point = "later-half-moved" if name == "local" else "task-staged"
    with open_store(name) as store:
        around = {"XDG_STATE_HOME": str(tmp_path / "state")}
        around |= store.server.environment() if store.server else {}
        changes = {"output__path": store.folder.url, "growing": True, "output__rows_per_shard": 40}
        job = written(tmp_path / "job", tmp_path / "in", ["day"], schema=schema, **changes)
        for day in range(3):
            pq.write_table(rows_of(day), tmp_path / "in" / f"{day}.parquet")
            if day == 1:
                assert drivers.run("run", job, point=point, environment=around)[0] == -9
                assert abort(store.folder.url)
                assert not any(each.startswith("day=1") for each in list_files(store.folder))
            if day == 2:
                assert drivers.run("run", job, point=point, environment=around)[0] == -9
            assert run_here(job).status == "released"
        assert run_here(job).status == "nothing new"
        assert status(store.folder.url)[:4] == ("released", 9, 3, 0)
        opened = dpdask.open(store.folder.url, card="release-00002.json")
        assert set(opened.to_pandas()["day"]) == {2}
        # a day that comes in another type
        rows = rows_of(3).set_column(0, "day", pa.array(["3"] * 120))
        pq.write_table(rows, tmp_path / "in" / "3.parquet")
        with pytest.raises(DataError):
            run_here(job)


def test_what_no_folder_can_be_named_by_is_refused_before_the_charge(tmp_path, source, url):
    ledger = {"url": url, "dataset": "people"}
    hive = "__HIVE_DEFAULT_PARTITION__"
    for text, says in (
        ("", "read back as null"),
        (hive, "read back as null"),
        ("x" * 251, "too long for the name of a folder"),
        ("bern", "upper and lower case alone"),
        ("Łódź", "upper and lower case alone"),
    ):
        if text == "Łódź":  # the same letters, composed in another way
            text = "Ło\u0301dz\u0301"
        pq.write_table(table(50, 7, [*CITIES, text]), source / "more.parquet")
        job = written(tmp_path, source, ["city"], ledger=ledger)
        with pytest.raises(DataError, match=says) as refused:
            run_here(job)
        assert text not in str(refused.value) or not text
    pq.write_table(table(50, 7, [*CITIES, "x" * 250]), source / "more.parquet")
    assert charging_entries(**ledger) == []
    assert not hidden(tmp_path / "out").exists()
    assert run_here(written(tmp_path, source, ["city"])).status == "released"


def test_jobs_that_no_reader_could_follow_are_refused(tmp_path, source):
    for path in source.iterdir():
        rows = pq.read_table(path)
        pq.write_table(rows.append_column("_n", rows["n"]), path)
    kept = {"_n": {"role": "keep"}, **SCHEMA}
    done = call_cli("validate", written(tmp_path, source, ["_n"], schema=kept))
    assert (done.returncode, "readers pass over folders" in error_line(done)) == (64, True)
    done = call_cli("validate", written(tmp_path, source, ["r"]))
    assert (done.returncode, "'r' is not a kept column" in error_line(done)) == (64, True)
    floats = pq.read_table(source / "part-0.parquet").append_column("f", pa.array([0.5] * 300))
    pq.write_table(floats, tmp_path / "floats.parquet")
    job = written(
        tmp_path,
        tmp_path / "floats.parquet",
        ["f"],
        schema={"f": {"role": "keep"}, "_n": {"role": "drop"}, **SCHEMA},
    )
    with pytest.raises(SpecError, match="a column of double cannot be a partition column"):
        run_here(job)
    inside = written(tmp_path, tmp_path / "*" / "*" / "*" / "*.parquet", ["day", "city"])
    with pytest.raises(SpecError, match="the output lies inside the input"):
        load(inside)
    with pytest.raises(SpecError, match="`mode: append` belongs to tables"):
        load(written(tmp_path, source, output__mode="append"))


def test_a_sweep_finds_what_no_manifest_names(tmp_path, source):
    run_here(written(tmp_path, source, ["day"]))
    folder = tmp_path / "out" / "day=2027-01-01"
    folder.mkdir()
    (folder / "part-00000-p00000-0123456789ab.parquet").write_bytes(b"late")
    [left] = sweep(str(tmp_path), remove=True)
    assert left.place.endswith("day=2027-01-01/part-00000-p00000-0123456789ab.parquet")
    assert not folder.exists()
    assert sweep(str(tmp_path), remove=False) == []


def test_documents_and_reports_know_the_columns_of_folders(tmp_path, source):
    run_here(written(tmp_path, source))
    content = json.loads((tmp_path / "out" / "_dpdask" / "croissant.json").read_text())
    assert content["distribution"][-1]["includes"] == "../*/*/*.parquet"
    fields = {each["name"]: each["source"] for each in content["recordSet"][0]["field"]}
    assert fields["n"]["extract"] == {"column": "n"}
    assert fields["day"]["extract"] == {"fileProperty": "fullpath"}
    assert fields["city"]["transform"] == {"regex": "city=([^/]*)/"}
    page = tmp_path / "report.html"
    done = call_cli("report", "--job", tmp_path / "job.yaml", "--to", page)
    assert done.returncode == 0, done.stderr
    assert "city" in page.read_text()


def test_a_shard_that_lost_its_folder_is_no_part_of_a_release(tmp_path, source):
    run_here(written(tmp_path, source, ["day"]))
    out = tmp_path / "out"
    manifest = json.loads((out / "_dpdask" / "manifest.json").read_text())
    path = out / manifest["shards"][0]["name"]
    for name in ("../in/x.parquet", "day=1/../../x.parquet", "day=1/", "sub/x.parquet", "a=\\x", 7):
        manifest["shards"][0]["name"] = name
        (out / "_dpdask" / "manifest.json").write_text(json.dumps(manifest))
        with pytest.raises(OutputError, match="manifest cannot be read"):
            Manifest.read(Folder(f"file://{out}"))
    path.rename(path.parent.parent / "day=soon")  # a folder of that name holds no date
    manifest["shards"][0]["name"] = "day=soon"
    (out / "_dpdask" / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(InputError, match="lacks its folder"):
        dpdask.open(str(out)).to_pandas()


TEXTS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12)


@given(values=st.dictionaries(TEXTS, st.none() | TEXTS, min_size=1, max_size=3))
def test_every_text_comes_back_from_the_name_of_its_folder(values):
    path = name_folders(values)
    assert split_folders(f"{path}/part-0.parquet") == values
    assert path.count("/") == len(values) - 1
    assert not any(part in ("", ".", "..") or part.endswith(".") for part in path.split("/"))
    read = ds.HivePartitioning(pa.schema([(name, pa.string()) for name in values]))
    told = ds.get_partition_keys(read.parse(f"{path}/part-0.parquet"))
    assert {name: told.get(name) for name in values} == values


def test_values_that_folders_can_hold():
    check_values(["a", "b"], [("x", 1), ("y", 1), (None, None), (True, -7)])
    assert (
        name_folders({"a b": True, "n": -7, "d": dt.date(2026, 1, 31)})
        == "a b=true/n=-7/d=2026-01-31"
    )
    with pytest.raises(DataError, match="columns a, b: "):
        check_values(["a", "b"], [("x", "y"), ("X", "y")])
    with pytest.raises(DataError, match="too long"):
        check_values(["a", "b", "c"], [("x" * 200, "y" * 200, "z" * 200)])


def test_few_shards_are_open_at_once(tmp_path, source, monkeypatch):
    monkeypatch.setattr(partitions, "_MOST_OPEN", 2)
    run_here(written(tmp_path, source))
    assert len(shards_of(tmp_path / "out")) > 12
    rows = pq.read_table(tmp_path / "out")
    assert sorted(rows["n"].to_pylist()) == sorted(
        np.concatenate([np.arange(300) + 10_000 * each for each in range(3)])
    )


@pytest.mark.parametrize("store", [False, True])
def test_no_error_of_a_shard_tells_a_value_in_its_folders(store, tmp_path, monkeypatch):
    """Of a kept column, as no error does."""
    folder = Folder(f"memory://{tmp_path.name}/out" if store else f"file://{tmp_path}")
    name, types = f"{name_folders({'city': 'Chur'})}/part-0.parquet", pa.schema([("x", pa.int64())])

    def write(number):
        writer = ShardWriter(folder, name, types, new=True)
        writer.write(pa.RecordBatch.from_pydict({"x": [number]}, types))
        writer.close()

    def say(error, write, *arguments):
        with pytest.raises(error) as found:
            write(*arguments)
        assert "Chur" not in str(found.value)
        assert "city=…/part-0.parquet" in str(found.value)

    write(1)
    say(InputError, write, 2)
    with ExitStack() as stack:
        stack.enter_context(pytest.raises(OutputError, match=r"city=…/part-0\.parquet"))
        stack.enter_context(folder.open_new(name)).write(b"others")
    if store:
        monkeypatch.setattr(storage, "MAX_PUT_BYTES", 10)
        say(OutputError, write, 3)
