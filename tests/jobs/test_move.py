"""Outputs that are moved: their jobs go on in the new place, nothing is charged or released twice, and a move that was cut off goes on."""

import json
from pathlib import Path

import pytest
from e2e.growing import add_day, at, kinds, manifests, spent
from e2e.growing import job as growing_job
from e2e.helpers import call_cli, digests, error_line, load, run_here

from dpdask.engine.account import open_ledger
from dpdask.errors import InputError, OutputError, SpecError
from dpdask.io.folders import list_tree
from dpdask.io.storage import Folder
from dpdask.jobs.move import move_output
from dpdask.jobs.overview import list_outputs, sweep
from dpdask.jobs.plan import plan_job
from dpdask.jobs.records import LockedRecord, NumberedRecords
from dpdask.jobs.run import abort
from dpdask.jobs.state import RunState

pytestmark = pytest.mark.usefixtures("here")

KINDS = {
    "once": {"growing": False},
    "growing": {},
    "growing by day": {"output__partition_by": ["day"]},
    "growing delta": {"output__format": "delta"},
    "appended": {"growing": False, "output__format": "delta", "output__mode": "append"},
}


def everything(folder):
    """Return the content of all files of a folder, or of a part of a bucket."""
    if folder.is_local:
        return digests(folder.local_path) if folder.local_path.exists() else {}
    return {name: folder.read(name, replaced=True) for name in list_tree(folder)}


def published(url):
    """Return the content of an output but for what each release writes anew."""
    anew = ("_SUCCESS", "_dpdask/series.json")
    return {str(k): v for k, v in everything(Folder(url)).items() if not str(k).endswith(anew)}


def beside(url):
    """Return the names of what lies beside an output and belongs to it."""
    parent, _, name = url.rpartition("/")
    return [each for each in Folder(parent).names() if each.startswith((f".{name}.dpdask", name))]


def check_gone(made, old, url):
    """Check that a job that names the old place is refused, and nothing is charged."""
    before = kinds(url)
    for verb in ("plan", "run"):
        done = call_cli(verb, made, "--set", f"output.path={old}")
        assert done.returncode == SpecError.exit_code
        assert "this output was moved to" in error_line(done) or "is being" in error_line(done)
    assert kinds(url) == before


def release(tmp_path, url, kind, place):
    source = tmp_path / "in"
    made = growing_job(
        tmp_path / "job", source, **{"output__path": place, "ledger": at(url), **KINDS[kind]}
    )
    for day in range(2):
        add_day(source, day)
        if day == 0 or kind not in ("once", "appended"):
            run_here(made)
    if kind in ("once", "appended"):  # of the first day alone
        (source / "day-01.parquet").unlink()
    return made


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["local", "radosgw", "azurite"])
def test_a_job_goes_on_where_its_output_was_moved_to(name, kind, open_store, tmp_path, url):
    with open_store(name) as store:
        old, new = store.folder.url, f"{store.folder.url.rpartition('/')[0]}/far/away"
        made = release(tmp_path, url, kind, old)
        before, charged = everything(store.folder), spent(url)
        done = call_cli("move", old, "--to", new, "--json")
        told = {"status": "moved", "source": old, "output": new}
        assert (done.returncode, json.loads(done.stdout)) == (0, told)
        assert everything(Folder(new)) == before
        assert beside(old) == [".out.dpdask"]
        check_gone(made, old, url)
        again = {"output__path": new}
        same = "already released" if kind in ("once", "appended") else "nothing new"
        assert run_here(made, **again).status == same
        assert json.loads(call_cli("move", old, "--to", new, "--json").stdout) == {
            **told,
            "status": "already moved",
        }
        if kind != "once":
            add_day(tmp_path / "in", 2)
            assert run_here(made, **again).status == "released"
            assert (
                published(new).items()
                >= {
                    k: v
                    for k, v in before.items()
                    if not str(k).endswith(("_SUCCESS", "series.json"))
                }.items()
            )
        assert spent(url) == (2.0 if kind == "appended" else charged)
        open_ledger(url).verify("people")
        # and back, over the note that lies there
        assert move_output(new, old)
        check_gone(made, new, url)
        assert run_here(made).status == same
        assert beside(new) == [".away.dpdask"]


def dying(patch, nth):
    """Interrupt before the n-th change of a file."""
    count = [0]

    def wrap(owner, name):
        function = getattr(owner, name)

        def struck(*args, **kwargs):
            if "beat-" in str(args[1:2]):  # of another thread
                return function(*args, **kwargs)
            count[0] += 1
            if count[0] == nth:
                raise KeyboardInterrupt
            return function(*args, **kwargs)

        patch.setattr(owner, name, struck)

    for owner, name in (
        *((Folder, each) for each in ("write", "move_to", "remove")),
        *((RunState, "write_move"), (LockedRecord, "clear"), (NumberedRecords, "clear")),
    ):
        wrap(owner, name)


@pytest.mark.slow_with("radosgw-growing")
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, kind) for name in ("local", "radosgw") for kind in ("growing", "growing delta")),
        ("local", "once"),
    ],
)
def test_a_move_that_was_cut_off_anywhere_goes_on(
    name, kind, open_store, tmp_path, url, monkeypatch
):
    with open_store(name) as store:
        places = [store.folder.url, f"{store.folder.url}-1"]
        made = release(tmp_path, url, kind, places[0])
        before, charged, nth, cut = everything(store.folder), kinds(url), 0, True
        while cut:  # of a store, the probe comes first; its many files are like each other
            nth, cut = nth + (1 if name == "local" else 4), False
            old, new = places
            with monkeypatch.context() as patch:
                dying(patch, nth)
                try:
                    move_output(old, new)
                except KeyboardInterrupt:
                    cut = True
            if RunState(Folder(old)).find_move() is not None:
                check_gone(made, old, url)
                # no part of it counts in the new place
                if cut and everything(Folder(new)) not in ({}, before):
                    with pytest.raises((InputError, OutputError, SpecError)):
                        run_here(made, output__path=new)
                if cut and not RunState(Folder(old)).find_move().whole:
                    with pytest.raises(SpecError, match="is being moved"):
                        abort(old)
                    with pytest.raises(SpecError, match="is being moved"):
                        move_output(old, f"{old}-third")
            move_output(old, new)
            assert everything(Folder(new)) == before
            assert not everything(Folder(old))
            assert run_here(made, output__path=new).status in ("already released", "nothing new")
            assert kinds(url) == charged
            places.reverse()
        assert nth > 5


@pytest.mark.parametrize("point", ["move-noted", "half-copied", "moved"])
def test_a_driver_that_was_killed(point, open_store, tmp_path, url, drivers):
    with open_store("radosgw", versioned=True) as store:
        old, new = store.folder.url, f"{store.folder.url}-new"
        made = release(tmp_path, url, "growing", old)
        before, environment = everything(store.folder), store.server.environment()
        code, _ = drivers.run("move", old, "--to", new, point=point, environment=environment)
        assert code == -9
        check_gone(made, old, url)
        done = drivers.call("move", "--job", made, "--to", new, environment=environment)
        assert done.returncode == 0
        assert everything(Folder(new)) == before
        add_day(tmp_path / "in", 2)
        assert run_here(made, output__path=new).status == "released"
        assert kinds(url) == ["intend", "commit"] * 3
        assert spent(url) == 1.0


def test_two_moves_at_once_are_one(open_store, tmp_path, url, drivers):
    with open_store("radosgw") as store:
        old, new = store.folder.url, f"{store.folder.url}-new"
        made = release(tmp_path, url, "growing", old)
        before, environment = everything(store.folder), store.server.environment()
        codes = drivers.race(3, "move", old, "--to", new, environment=environment)
        assert set(codes) <= {0, 75}
        assert 0 in codes
        assert everything(Folder(new)) == before
        assert run_here(made, output__path=new).status == "nothing new"


def test_what_is_not_moved_stays_as_it_is(tmp_path, url, drivers, open_store):
    out = tmp_path / "job" / "out"
    made = release(tmp_path, url, "growing", str(out))
    add_day(tmp_path / "in", 2)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    (tmp_path / ".half.dpdask-series").mkdir()
    (tmp_path / "plain").touch()
    ice = tmp_path / "ice"
    (ice / "_dpdask").mkdir(parents=True)
    (ice / "_dpdask" / "manifest-0123456789ab.json").write_bytes(
        (out / "_dpdask" / "manifest.json").read_bytes()
    )
    cases = [
        (out, out, SpecError, "to where it is"),
        (out, out / "inside", SpecError, "into itself"),
        (out, "s3://bucket/out", SpecError, "encrypted in a store"),
        (tmp_path / "nowhere", tmp_path / "new", InputError, "there is no release here"),
        (tmp_path / "in", tmp_path / "new", InputError, "there is no release here"),
        (ice, tmp_path / "new", SpecError, "Iceberg"),
        (out, tmp_path / "taken", OutputError, "something is there already"),
        (out, tmp_path / "half", OutputError, "something is there already"),
        (out, tmp_path / "plain", OutputError, "no folder can be made here"),
        (out, tmp_path / "plain" / "x", OutputError, "no folder can be made here"),
        (out, "/dev/shm/new" if on_disk(tmp_path) else "/proc/new", OutputError, ""),
    ]
    before = digests(tmp_path)
    for old, new, error, says in cases:
        done = call_cli("move", old, "--to", new)
        assert (done.returncode, done.stdout) == (error.exit_code, "")
        assert says in error_line(done)
        assert digests(tmp_path) == before
    done = call_cli("move", "--to", tmp_path / "new")
    assert "either an output or a job is needed" in error_line(done)
    assert call_cli("move", out).returncode == 2  # `--to` is missing
    # an unfinished release, which may not go on elsewhere; then a driver that is at work
    assert drivers.run("run", made, point="fitted")[0] == -9
    done = call_cli("move", out, "--to", tmp_path / "new")
    assert (done.returncode, "a release is unfinished" in done.stderr) == (73, True)
    run_here(made)
    with RunState(Folder(f"file://{out}")).records.lock():
        done = call_cli("move", out, "--to", tmp_path / "new")
        assert (done.returncode, "another run is writing" in done.stderr) == (75, True)
    assert not (tmp_path / "new").exists()
    assert len(manifests(out)) == 3


def on_disk(path):
    return Path(path).stat().st_dev != Path("/dev/shm").stat().st_dev


def test_an_old_place_is_shown_and_may_be_used_again(tmp_path, url):
    lake = tmp_path / "lake"
    made = release(tmp_path, url, "growing", str(lake / "out"))
    assert call_cli("move", "--job", made, "--to", lake / "new").returncode == 0
    found = {each["output"]: each for each in list_outputs(str(lake))}
    assert found["new"]["n_releases"] == 2
    assert found["out"]["fault"] == f"this output was moved to file://{lake}/new"
    [left] = sweep(str(lake), remove=True)
    assert left.outcome.startswith("stays: this output was moved")
    with pytest.raises(SpecError, match="was moved"):
        plan_job(load(made))
    done = call_cli("abort", lake / "out")
    assert (done.returncode, "the note of where" in done.stdout) == (0, True)
    assert beside(f"file://{lake}/out") == []
    # a new series, which is charged as such
    assert run_here(made).status == "released"
    assert spent(url) == 2.0
