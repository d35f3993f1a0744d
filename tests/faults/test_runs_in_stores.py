"""Runs whose output is in a store: killed at any stage, raced for, taken over, resumed elsewhere; the key is never in the store."""

import base64
import json
import os
import signal
import time

import psutil
import pytest
from e2e.helpers import (
    charged_kinds,
    charging_entries,
    lake,
    load,
    make_ledger,
    run_here,
    write_job,
)
from services.stores import everything_ever_written

from dpdask.engine.account import open_ledger
from dpdask.errors import InputError, OutputError, SpecError, TemporaryError
from dpdask.io.shards import Manifest
from dpdask.io.storage import Folder
from dpdask.jobs import records, state
from dpdask.jobs.output import StoreFolder
from dpdask.jobs.run import abort, abort_job, status
from dpdask.privacy.ledger import KeyTable


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return lake(tmp_path_factory.mktemp("source") / "in", [150, 90, 1200])


@pytest.fixture(scope="module")
def quiet(source, tmp_path_factory):
    base = tmp_path_factory.mktemp("quiet")
    return [
        shard.sha256 for shard in run_here(write_job(base, source, base / "out")).manifest.shards
    ]


@pytest.fixture(params=["versioned radosgw"])
def store(request, open_store):
    *versioned, name = request.param.split()
    with open_store(name, versioned=bool(versioned)) as opened:
        yield opened


@pytest.fixture(autouse=True)
def keys(tmp_path, monkeypatch):
    """Return this test's own folder of keys."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "dpdask" / "keys"


def environment(store, tmp_path):
    assert store.server is not None
    return {
        **store.server.environment(store.server.endpoint),
        "XDG_STATE_HOME": str(tmp_path / "state"),
    }


@pytest.fixture
def job(store, source, tmp_path):
    return write_job(tmp_path / "job", source, tmp_path, output__path=store.folder.url)


@pytest.fixture
def stop(store, drivers, tmp_path):
    """Return what runs a job until its process is killed at a point."""
    around = environment(store, tmp_path)
    return lambda job, point="some-shards": drivers.run("run", job, point=point, environment=around)


def kept(keys):
    return (
        [path.read_bytes() for path in keys.iterdir() if path.name != "name"]
        if keys.exists()
        else []
    )


def check_released(folder, quiet, keys):
    manifest = Manifest.read(folder)
    assert manifest is not None
    assert [shard.sha256 for shard in manifest.shards] == quiet
    assert set(folder.names()) == {shard.name for shard in manifest.shards} | {
        "_dpdask",
        "_SUCCESS",
    }
    assert folder.sibling(".", ".dpdask").names() == []
    assert kept(keys) == []


def test_a_sign_of_life_written_last_is_removed(store, job):
    """A driver that is killed while it writes one leaves it in a folder without a run."""
    run_here(job)
    beside = store.folder.sibling(".", ".dpdask")
    assert beside.names() == []
    beside.write(f"beat-{'0' * 32}", b"7")
    assert run_here(job).status == "already released"
    assert beside.names() == []


@pytest.mark.matrix("second driver", "a race, {name}")
@pytest.mark.parametrize(
    "races", [1, pytest.param(100, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]
)
@pytest.mark.parametrize(
    "name", [pytest.param("versioned radosgw", marks=pytest.mark.slow), "azurite"]
)  # test_stores.py races in both buckets
def test_drivers_race_for_one_output(races, name, open_store, drivers, source, tmp_path):
    *versioned, name = name.split()
    with open_store(name, versioned=bool(versioned)) as store:
        for number in range(races):
            base = tmp_path / str(number)
            url = f"{store.folder.url}-{number}"
            place = make_ledger(base)
            job = write_job(base, source, tmp_path, output__path=url, ledger=place)
            codes = drivers.race(4, "run", job, environment=environment(store, tmp_path))
            assert set(codes) <= {0, TemporaryError.exit_code}
            assert 0 in codes
            assert charged_kinds(**place) == ["intend", "commit"]
            manifest = Manifest.read(Folder(url))
            assert manifest is not None
            assert set(Folder(url).names()) == {shard.name for shard in manifest.shards} | {
                "_dpdask",
                "_SUCCESS",
            }
            assert Folder(url).sibling(".", ".dpdask").names() == []


def test_a_driver_that_was_taken_over_stops_and_changes_nothing(
    store, quiet, keys, monkeypatch, job
):
    """It slept longer than others wait for a sign; when it wakes, the other one has the run."""
    monkeypatch.setattr(records, "BEAT_SECONDS", 3600.0)
    monkeypatch.setattr(records, "LEASE_SECONDS", 0.1)
    write, taken = state.RunState.write, []

    def sleeping(self, reached):
        if reached.stage == "fitted" and not taken:
            taken.append("by another driver")
            time.sleep(0.5)
            monkeypatch.setattr(records, "_has_ended", lambda _: True)
            assert run_here(job).status == "released"
        write(self, reached)

    monkeypatch.setattr(state.RunState, "write", sleeping)
    with pytest.raises(TemporaryError, match="another run is writing"):
        run_here(job)
    check_released(store.folder, quiet, keys)


@pytest.mark.matrix("machine lost", "the ledger has the key")
@pytest.mark.more
def test_with_a_ledger_any_machine_goes_on(store, source, tmp_path, monkeypatch, stop):
    place = make_ledger(tmp_path)
    job = write_job(tmp_path / "job", source, tmp_path, output__path=store.folder.url, ledger=place)
    stop(job)
    run_id = charging_entries(**place)[-1].run_id
    table = KeyTable(place["url"])
    secret = table.read(run_id)
    assert secret is not None
    assert [file.name for file in (tmp_path / "state").rglob("*") if file.is_file()] == [
        "secret"
    ]  # by which a hold-out is named
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another machine"))
    assert run_here(job).status == "released"
    assert table.read(run_id) is None
    assert secret.hex().encode() not in (tmp_path / "ledger.db").read_bytes()
    assert charged_kinds(**place) == ["intend", "commit"]
    assert open_ledger(place["url"]).verify("ratings")


@pytest.mark.more
def test_abort_needs_the_ledger_that_keeps_the_key(store, source, tmp_path, stop):
    place = make_ledger(tmp_path)
    job = write_job(tmp_path / "job", source, tmp_path, output__path=store.folder.url, ledger=place)
    stop(job)
    run_id = charging_entries(**place)[-1].run_id
    other = make_ledger(tmp_path / "other")
    way = "abort a job that names this ledger; if the ledger is lost, `dpdask abort --force` ends"
    for url in (None, other["url"]):
        with pytest.raises(SpecError, match=f"in a ledger that is not given here; {way}"):
            abort(store.folder.url, url)
    with pytest.raises(SpecError):
        abort_job(load(job, ledger__url=f"sqlite:///{tmp_path / 'wrong.db'}"))
    assert not (tmp_path / "wrong.db").exists()
    assert KeyTable(place["url"]).read(run_id) is not None
    assert abort_job(load(job)) == "run"
    assert KeyTable(place["url"]).read(run_id) is None
    assert store.folder.names() == []


@pytest.mark.more
def test_without_a_ledger_the_run_goes_on_where_its_key_is(
    store, quiet, keys, tmp_path, monkeypatch, job, stop
):
    stop(job)
    [secret] = kept(keys)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another machine"))
    way = r"on another machine, or belongs to another user; {} the job there; if that place is lost"
    with pytest.raises(InputError, match=way.format("run")):
        run_here(job)
    with pytest.raises(SpecError, match=way.format("abort")):
        abort(store.folder.url)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert run_here(job).status == "released"
    check_released(store.folder, quiet, keys)
    written = b"\n".join(data for _, data in everything_ever_written(store))
    assert not any(
        form in written for form in (secret, secret.hex().encode(), base64.b64encode(secret))
    )


@pytest.mark.parametrize(
    "point", [pytest.param("acquired", marks=pytest.mark.slow), "some-shards", "card-created"]
)
def test_abort(point, store, drivers, source, keys, tmp_path):
    changes = {"mechanism__reference": {"kind": "histogram"}, "output__path": store.folder.url}
    job = write_job(tmp_path / "job", source, tmp_path, **changes)  # which publishes its counts
    drivers.run("run", job, point=point, environment=environment(store, tmp_path))
    written = store.folder.child("_dpdask").names()
    assert ("measured.arrow" in written) == (point == "card-created")
    assert abort(store.folder.url) == "run"
    assert store.folder.names() == []
    assert store.folder.sibling(".", ".dpdask").names() == []
    assert kept(keys) == []
    assert abort(store.folder.url) is None


@pytest.mark.more
def test_a_run_of_another_version_is_left_alone(store, quiet, keys, monkeypatch, job, stop):
    stop(job)
    with monkeypatch.context() as patch:
        patch.setattr(state, "__version__", "99.0")
        with pytest.raises(OutputError, match=r"begun by dpdask .*, and this is 99\.0"):
            run_here(job)
    assert run_here(job).status == "released"
    check_released(store.folder, quiet, keys)


@pytest.fixture
def short_lease(monkeypatch):
    """Let every driver that was not just now at work be taken for one that sleeps."""
    monkeypatch.setattr(records, "BEAT_SECONDS", 3600.0)
    monkeypatch.setattr(records, "LEASE_SECONDS", 0.1)
    monkeypatch.setattr(records, "_has_ended", lambda _: True)


MOMENTS = {
    "before it publishes": (state.RunState, "publish"),
    "before the card": (StoreFolder, "stage"),
}
MOMENTS["before the manifest"] = (StoreFolder, "commit")


@pytest.mark.few(1)
@pytest.mark.parametrize("meanwhile", ["another release", "aborted"])
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.usefixtures("short_lease")
def test_a_driver_that_wakes_up_publishes_nothing(meanwhile, moment, store, monkeypatch, job):
    slept = []

    def sleep():
        if not slept:
            slept.append(b"")
            assert abort(store.folder.url)
            if meanwhile == "another release":
                run_here(job, privacy__epsilon=20.0)
                slept[0] = store.folder.read("_dpdask/release.json")

    owner, name = MOMENTS[moment]
    original = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda self, *given: (sleep(), original(self, *given))[1])
    with pytest.raises((TemporaryError, OutputError)):
        run_here(job)
    manifest = Manifest.read(store.folder)
    if meanwhile == "aborted":
        assert manifest is None
    else:
        assert manifest is not None
        assert store.folder.read("_dpdask/release.json") == slept[0]
        assert set(store.folder.names()) >= {shard.name for shard in manifest.shards}


@pytest.mark.more
@pytest.mark.usefixtures("short_lease")
def test_a_driver_that_comes_late_leaves_the_key_of_another(store, quiet, keys, monkeypatch, job):
    """It found no run, and slept; when it wakes, another driver has begun one."""
    open_run, write = state.RunState.open, state.RunState.write
    secrets = []

    def stopping(self, reached):
        write(self, reached)
        if reached.stage == "fitted":
            raise KeyboardInterrupt

    def late(self, *given, **named):
        if not secrets:
            secrets.append(b"")
            with monkeypatch.context() as patch:
                patch.setattr(state.RunState, "write", stopping)
                with pytest.raises(KeyboardInterrupt):
                    run_here(job)
            secrets[:] = kept(keys)
        return open_run(self, *given, **named)

    monkeypatch.setattr(state.RunState, "open", late)
    with pytest.raises(TemporaryError, match="another run is writing"):
        run_here(job)
    assert len(secrets) == 1
    assert kept(keys) == secrets
    assert run_here(job).status == "released"
    check_released(store.folder, quiet, keys)


@pytest.mark.more
def test_a_store_that_refuses_for_a_moment_is_not_one_without_a_run(
    store, quiet, keys, monkeypatch, job, stop
):
    stop(job, "all-shards")
    read, left = Folder.read, [0]

    def refusing(self, name, **given):
        if name == "run.json":
            left[0] -= 1
            if left[0] == 0:
                raise InputError("permission denied", name)
        return read(self, name, **given)

    monkeypatch.setattr(Folder, "read", refusing)
    for nth in (1, 2, 3, 5):
        left[0] = nth
        with pytest.raises(InputError, match="permission denied"):
            run_here(job)
    assert run_here(job).status == "released"
    check_released(store.folder, quiet, keys)


@pytest.mark.more
@pytest.mark.slow_with("fff")
@pytest.mark.parametrize("run_id", ["../../../victim", "", "f" * 31])
def test_a_record_that_names_no_run_harms_nothing(run_id, store, keys, tmp_path, job):
    (tmp_path / "victim").write_text("keep")
    keys.mkdir(parents=True, mode=0o700)
    (keys / ("a" * 32)).write_bytes(bytes(32))
    content = {
        "run_id": run_id,
        "job": "j",
        "release": "r",
        "stage": "opened",
        "key": "host x",
        "target": {},
        "version": "0",
        "streams": 1,
    }
    record = {
        "format": records.STATE_FORMAT,
        "chain": "c",
        "owner": None,
        "run": {"format": records.STATE_FORMAT, **content},
    }
    store.folder.sibling(".", ".dpdask").write("run.json", json.dumps(record).encode())
    with pytest.raises(OutputError):
        run_here(job)
    abort(store.folder.url)
    assert (tmp_path / "victim").read_text() == "keep"
    assert (keys / ("a" * 32)).exists()
    assert run_here(job).status == "released"


@pytest.mark.more
@pytest.mark.parametrize("harm", ["another format", "no JSON"])
def test_a_run_whose_records_cannot_be_read_is_aborted(harm, store, keys, job, stop):
    stop(job)
    hidden = store.folder.sibling(".", ".dpdask")
    hidden.write(
        "run.json",
        hidden.read("run.json").replace(b'"format": 2', b'"format": 3')
        if harm == "another format"
        else b"{",
    )
    with pytest.raises(OutputError, match="abort"):
        run_here(job)
    assert abort(store.folder.url) == "run"
    assert kept(keys) == []
    assert hidden.names() == []


@pytest.mark.more
def test_a_driver_removes_its_own_run_alone(store, quiet, keys, job, stop):
    stop(job, "all-shards")
    before = store.folder.sibling(".", ".dpdask").names()
    state.RunState(store.folder).remove(
        "0" * 32
    )  # as a driver does that removed another run before, and comes late
    assert store.folder.sibling(".", ".dpdask").names() == before
    assert len(kept(keys)) == 1
    assert run_here(job).status == "released"
    check_released(store.folder, quiet, keys)


@pytest.mark.more
def test_a_driver_whose_release_another_one_has_ended_ends_well(
    store, source, tmp_path, monkeypatch
):
    """The second driver finds the release before the first one has removed its key, and removes the records."""
    place = make_ledger(tmp_path)
    job = write_job(tmp_path / "job", source, tmp_path, output__path=store.folder.url, ledger=place)
    publish, ended = state.RunState.publish, []

    def publish_and_wait(self, *given):
        publish(self, *given)
        if not ended:
            ended.append("")
            ended[0] = run_here(job).status

    monkeypatch.setattr(state.RunState, "publish", publish_and_wait)
    assert (run_here(job).status, ended) == ("released", ["already released"])
    assert charged_kinds(**place) == ["intend", "commit"]
    assert store.folder.sibling(".", ".dpdask").names() == []


@pytest.mark.matrix("machine lost", "with the key, ledger: {with_ledger}")
@pytest.mark.parametrize("with_ledger", [False, True], ids=["a lost home", "a lost ledger"])
def test_a_run_whose_key_is_lost_is_ended_by_force(
    with_ledger, store, drivers, source, quiet, keys, tmp_path, monkeypatch, stop
):
    """The machine is gone, with its home or with the ledger that kept the key; the charge stays."""
    place = make_ledger(tmp_path / "book")
    block = {"ledger": place} if with_ledger else {}
    job = write_job(tmp_path / "job", source, tmp_path, output__path=store.folder.url, **block)
    stop(job)
    hidden = store.folder.sibling(".", ".dpdask")
    assert len(store.folder.names()) >= 1
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another machine"))
    words = ["abort", store.folder.url]
    elsewhere = {**environment(store, tmp_path), "XDG_STATE_HOME": str(tmp_path / "other")}
    code, line = drivers.run(*words, environment=elsewhere)
    assert (code, "`dpdask abort --force` ends the run without it" in line) == (64, True), line
    assert status(store.folder.url).stage == "fitted"
    written = b"\n".join(data for _, data in everything_ever_written(store))
    code, line = drivers.run(*words, "--force", environment=elsewhere)
    assert (code, line) == (0, f"{store.folder.url}: the unfinished run is removed")
    assert (store.folder.names(), hidden.names()) == ([], [])
    secrets = [key for key in kept(keys) if len(key) == 32]
    if with_ledger:
        [entry] = charging_entries(**place)
        assert entry.kind == "intend"  # which stays
        secrets = [KeyTable(place["url"]).read(entry.run_id)]
    assert len(secrets) >= 1
    assert not any(form in written for key in secrets for form in (key, key.hex().encode()))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert run_here(job).status == "released"
    if with_ledger:
        kinds = charged_kinds(**place)
        assert kinds == ["intend", "intend", "commit"]


@pytest.mark.more
def test_a_job_whose_ledger_is_gone_is_aborted_by_force(store, drivers, source, tmp_path, stop):
    place = make_ledger(tmp_path / "book")
    job = write_job(tmp_path / "job", source, tmp_path, output__path=store.folder.url, ledger=place)
    stop(job)
    (tmp_path / "book" / "ledger.db").unlink()
    words, around = ("abort", "--job", job), environment(store, tmp_path)
    code, line = drivers.run(*words, environment=around)
    assert (code, "there is no ledger here" in line) == (64, True), line
    code, line = drivers.run(*words, "--force", environment=around)
    assert (code, line) == (0, f"{job}: the unfinished run is removed")
    assert (store.folder.names(), store.folder.sibling(".", ".dpdask").names()) == ([], [])


@pytest.mark.more
def test_force_removes_the_rest_of_a_finished_run_and_leaves_the_release(
    store, quiet, keys, tmp_path, monkeypatch, job, stop
):
    stop(job, "uncommitted")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another machine"))
    with pytest.raises(OutputError, match="released already"):
        abort(store.folder.url)
    assert abort(store.folder.url, force=True) == "rest"
    assert run_here(job).status == "already released"
    check_released(store.folder, quiet, tmp_path / "nowhere")


@pytest.mark.matrix("driver frozen", "{point}")
@pytest.mark.parametrize(
    "point",
    [
        "fitted",
        *(pytest.param(name, marks=pytest.mark.more) for name in ("counted", "some-shards")),
    ],
)
@pytest.mark.usefixtures("short_lease")
def test_a_driver_that_was_frozen_and_overtaken_is_told_so(
    point, store, drivers, quiet, keys, tmp_path, job
):
    """What it needs is gone, since the other one has removed it: that is no fault of the input."""
    around = environment(store, tmp_path)
    pid = drivers.start("run", job, point=point, strike="freeze", environment=around)
    while (now := psutil.Process(pid).status()) != psutil.STATUS_STOPPED:
        assert now != psutil.STATUS_ZOMBIE
        time.sleep(0.05)
    assert run_here(job).status == "released"
    os.kill(pid, signal.SIGCONT)
    code, line = drivers.wait()
    assert (code, "another run is writing this output; wait for it to end" in line) == (75, True), (
        line
    )
    # what it wrote before it noticed is encrypted with a key that is gone, and goes with the next run
    assert run_here(job).status == "already released"
    check_released(store.folder, quiet, keys)


def test_what_a_late_host_writes_is_shown_and_removed(store, quiet, keys, job):
    run_here(job)
    beside = store.folder.sibling(".", ".dpdask")
    assert status(store.folder.url).n_hidden == 0
    beside.child("0" * 32).write("counts-1.npz", b"late")
    assert status(store.folder.url).n_hidden == 1
    assert run_here(job).status == "already released"
    assert status(store.folder.url).n_hidden == 0
    check_released(store.folder, quiet, keys)
