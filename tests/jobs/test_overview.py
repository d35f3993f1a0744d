"""Many runs at once: what is shown of the outputs in a folder and of a ledger, and what is swept."""

import json

import pytest
from e2e.growing import add_day
from e2e.growing import job as growing_job
from e2e.helpers import (
    RATINGS_SCHEMA,
    call_cli,
    digests,
    error_line,
    hidden,
    lake,
    run_here,
    write_job,
)

from dpdask.engine.account import open_ledger
from dpdask.errors import InputError
from dpdask.io.storage import Folder
from dpdask.jobs import overview
from dpdask.jobs.run import abort
from dpdask.terminal.texts import make_table

pytestmark = pytest.mark.usefixtures("here")


@pytest.fixture
def source(tmp_path):
    return lake(tmp_path / "in", [150, 90], schema=RATINGS_SCHEMA)


@pytest.fixture
def url(tmp_path):
    made = f"sqlite:///{tmp_path / 'ledger.db'}"
    open_ledger(made).init("ratings", 100.0)
    open_ledger(made).init("empty", 1.0)
    return made


def written(tmp_path, source, url, name, **changed):
    given = {"schema": RATINGS_SCHEMA, "ledger": {"url": url, "dataset": "ratings"}, **changed}
    return write_job(tmp_path / "jobs" / name, source, tmp_path / "lake" / name, **given)


def test_the_outputs_of_a_folder_in_one_table(tmp_path, source, url, drivers):
    place = tmp_path / "lake"
    run_here(written(tmp_path, source, url, "done"))
    run_here(written(tmp_path, source, url, "table", output__format="delta"))
    drivers.run("run", written(tmp_path, source, url, "half"), point="fitted")
    add_day(tmp_path / "days", 0)
    grown = growing_job(
        tmp_path / "jobs" / "grown", tmp_path / "days", output__path=str(place / "grown")
    )
    run_here(grown)
    add_day(tmp_path / "days", 1)
    run_here(grown)
    (place / "other").mkdir()
    (place / ".broken.dpdask").mkdir()
    (place / ".broken.dpdask" / "run.json").write_text("{")
    (place / ".broken.dpdask" / "lock").write_text("")
    found = json.loads(call_cli("runs", place, "--json").stdout)["runs"]
    told = {each["output"]: (each["stage"], each["n_releases"]) for each in found}
    assert told == {
        "broken": ("unknown", 0),
        "done": ("released", 1),
        "grown": ("released", 2),
        "half": ("fitted", 0),
        "table": ("released", 1),
    }
    [fault] = [each["fault"] for each in found if each["fault"]]
    assert fault == "the state of an unfinished run cannot be read"
    lines = call_cli("runs", place).stdout.splitlines()
    assert lines[0].split() == ["output", "stage", "shards", "releases", "missing", "fault"]
    assert len(lines) == 6
    [one] = json.loads(call_cli("runs", place / "done", "--json").stdout)["runs"]
    assert (one["output"], one["stage"]) == ("done", "released")
    # the ledger's side of them
    open_ledger(url).intend("ratings", "void", open_ledger(url).show("ratings").entries[-1].charge)
    open_ledger(url).void("ratings", "void")
    found = json.loads(call_cli("runs", url, "--json").stdout)["runs"]
    assert [each["state"] for each in found] == ["commit", "commit", "intend", "void"]
    assert [each["epsilon"] for each in found] == [4.0, 4.0, 4.0, 0.0]
    assert all(each["began"] <= each["last"] for each in found)
    assert "there are no runs" in call_cli("runs", tmp_path / "in").stdout
    (tmp_path / "file").touch()
    for verb in ("runs", "sweep"):
        for name in ("nowhere", "file"):
            done = call_cli(verb, tmp_path / name)
            assert done.returncode == InputError.exit_code
            assert "there is no such folder" in error_line(done)
    assert "there is no ledger here" in error_line(call_cli("runs", "sqlite:///nowhere/l.db"))


def test_an_empty_table_and_empty_columns():
    assert make_table([]) == "there are no runs"
    assert make_table([{"a": 1, "n_b": None}, {"a": 20, "n_b": None}]) == "a\n1\n20"


def test_a_sweep_removes_what_ended_runs_left_and_nothing_else(
    tmp_path, source, url, drivers, monkeypatch
):
    place = tmp_path / "lake"
    run_here(written(tmp_path, source, url, "done"))
    table = written(tmp_path, source, url, "table", output__format="delta")
    run_here(table)
    drivers.run("run", written(tmp_path, source, url, "half"), point="fitted")
    drivers.run("run", written(tmp_path, source, url, "told"), point="uncommitted")
    before = digests(place)
    # a driver that was killed while it removed its run; a worker that writes after an abort
    (place / ".done.dpdask").mkdir(mode=0o700)
    (place / ".done.dpdask" / "lock").write_text("")
    late = place / "table" / "part-00003-0123456789ab.parquet"
    late.write_bytes(b"late")
    foreign = place / "table" / "part-00000-aaaa-c000.snappy.parquet"
    foreign.write_bytes(b"foreign")
    # a link of somebody else to other files
    (tmp_path / "elsewhere").mkdir()
    precious = tmp_path / "elsewhere" / "part-00001-0123456789ab.parquet"
    precious.write_bytes(b"precious")
    (place / "table" / "x=1").symlink_to(precious.parent)
    # a folder of somebody else
    (place / ".mine.dpdask").mkdir(mode=0o700)
    (place / ".mine.dpdask" / "notes.txt").write_text("mine")
    dry = json.loads(call_cli("sweep", place, "--json").stdout)["left"]
    assert late.exists()
    assert (place / ".done.dpdask").exists()
    told = {each["place"].rpartition("/")[2]: each["outcome"] for each in dry}
    assert set(told) == {".done.dpdask", ".half.dpdask", ".told.dpdask", ".mine.dpdask", late.name}
    assert told[".done.dpdask"] == told[late.name] == "would be removed"
    assert "an unfinished run; run its job again" in told[".half.dpdask"]
    assert "its release is published; run its job again" in told[".told.dpdask"]
    done = call_cli("sweep", place, "--remove")
    assert done.returncode == 0
    assert f"{late}: removed" in done.stdout
    assert ".mine.dpdask: stays: this folder has the name of" in done.stdout
    assert precious.exists()
    (place / "table" / "x=1").unlink()
    foreign.unlink()
    left = digests(place)
    assert left.pop(".mine.dpdask/notes.txt")
    assert left == before
    assert not (place / ".done.dpdask").exists()
    # what stays can go on
    assert run_here(tmp_path / "jobs" / "half" / "job.yaml").status == "released"
    assert run_here(tmp_path / "jobs" / "told" / "job.yaml").status == "already released"
    assert call_cli("sweep", place / "half").stdout == f"{place / 'half'}: nothing is left\n"


def test_nothing_is_swept_from_a_driver_at_work(tmp_path, source, url, monkeypatch):
    """The dry run sees no run, and one begins before the sweep has the lock."""
    run_here(written(tmp_path, source, url, "done"))
    out = tmp_path / "lake" / "done"
    hidden(out).mkdir(mode=0o700)
    (hidden(out) / "lock").write_text("")
    state = overview.open_output_run(Folder(out.as_uri()))
    with state.records.lock():
        [left] = overview.sweep(str(out), remove=True)
    assert left.outcome == "stays: another run is writing this output"


def test_a_store_is_swept(open_store, tmp_path, source, url):
    with open_store("radosgw") as store:
        job = write_job(
            tmp_path,
            source,
            store.folder.url,
            schema=RATINGS_SCHEMA,
            ledger={"url": url, "dataset": "ratings"},
        )
        run_here(job)
        before = store.folder.names()
        store.folder.write("part-00000-0123456789ab.parquet", b"late")
        beside = store.folder.sibling(".", ".dpdask")
        beside.write("beat-0123", b"")
        assert {each.outcome for each in overview.sweep(store.folder.url, remove=False)} == {
            "would be removed"
        }
        assert len(overview.sweep(store.folder.url, remove=True)) == 2
        assert store.folder.names() == before
        assert beside.names() == []
        assert not abort(f"{store.folder.url}-never")
        assert run_here(job).status == "already released"
