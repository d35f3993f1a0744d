"""Another user may write beside an output, and gives the names of its hidden folders to other folders: nothing of theirs is used or removed."""

import hashlib
import os
import shutil

import numpy as np
import pandas as pd
import pytest
from distributed import Client
from e2e.growing import add_day
from e2e.growing import job as growing_job
from e2e.helpers import (
    call_cli,
    continuous,
    digests,
    error_line,
    hidden,
    lake,
    load,
    run_here,
    write_job,
)

import dpdask
from dpdask.engine import fit, write
from dpdask.errors import DpdaskError, OutputError
from dpdask.io.storage import PrivateFolder
from dpdask.jobs.run import run_job
from dpdask.jobs.run_keys import FolderKeys, HostKeys
from dpdask.jobs.state import RunState

STRANGER = 65534
KEY = hashlib.sha256(b"the attacker's").digest()

REFUSED = r"another key was put in place|is a link or belongs to another user"

as_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root can make what belongs to another user"
)
UNITS = {"row": "row", "user": {"column": "userId", "max_rows": 2}}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return lake(tmp_path_factory.mktemp("lake") / "in", [400, 900, 300])


@pytest.fixture
def job(source, out):
    out.parent.mkdir()
    out.parent.chmod(0o777)  # not sticky
    return write_job(out.with_name("job"), source, out)


@pytest.fixture(scope="module")
def quiet(source, tmp_path_factory):
    """The digests of runs that nobody disturbed, by unit."""
    folder = tmp_path_factory.mktemp("quiet")
    for unit, value in UNITS.items():
        run_here(write_job(folder / f"job-{unit}", source, folder / unit, privacy__unit=value))
    return {unit: digests(folder / unit) for unit in UNITS}


@pytest.fixture
def out(tmp_path):
    return tmp_path / "group/out"


def plant(place, owner, like=None):
    """Make what the attacker has ready, with a copy of a hidden folder if one is given, and return what lies there."""
    if like is not None:
        shutil.copytree(like, place)
    (place / "seals").mkdir(parents=True, exist_ok=True)
    for name in ("run.key", "lock", "holdout.key"):
        (place / name).write_bytes(KEY)
    if owner == "link":
        place.rename(place.with_name("target"))
        place.symlink_to(place.with_name("target"))
    if owner == "stranger":
        place.chmod(0o777)
        for path in (place, *place.rglob("*")):
            os.chown(path, STRANGER, STRANGER)
    return digests(place)


def exchange(one, two):
    """Exchange two names, as another user can who may write into their folder."""
    aside = one.with_name("aside")
    one.rename(aside)
    two.rename(one)
    aside.rename(two)


OWNERS = ["stranger", "link", "own"]
MOMENTS = {
    "made": (PrivateFolder, "open_made"),
    "key": (FolderKeys, "write"),
    "opened": (RunState, "open"),
    "kept": (fit, "keep"),
    "staged": (write, "stage"),
    "recorded": (RunState, "write"),
    "published": (RunState, "publish"),
    "forgotten": (RunState, "remove_key"),
}


def strike_after(moment, strike, patch):
    """Strike once, after the first call of a function."""
    owner, name = MOMENTS[moment]
    function, struck = getattr(owner, name), []

    def patched(*arguments, **options):
        result = function(*arguments, **options)
        if not struck:
            struck.append(name)
            strike()
        return result

    patch.setattr(owner, name, patched)


# every two of a moment, an owner and a unit
PAIRS = [
    (moment, owner, ("row", "user")[(place + number) % 2])
    for place, moment in enumerate(MOMENTS)
    for number, owner in enumerate(OWNERS)
]


@pytest.mark.parametrize(
    ("moment", "owner", "unit"),
    [pytest.param(*case, marks=as_root if case[1] == "stranger" else ()) for case in PAIRS],
)
def test_a_driver_goes_on_in_its_own_folder(source, out, quiet, moment, owner, unit, monkeypatch):
    out.parent.mkdir()
    job, mine, kept = (
        write_job(out.with_name("job"), source, out, privacy__unit=UNITS[unit]),
        out.with_name("mine"),
        {},
    )

    def strike():
        kept.update(plant(mine, owner, hidden(out) if owner == "own" else None))
        exchange(hidden(out), mine)

    strike_after(moment, strike, monkeypatch)
    assert run_here(job).status == "released"
    assert digests(out) == quiet[unit]
    assert digests(hidden(out)) == kept  # nothing was written into it or removed from it
    assert not list(mine.iterdir())  # the run's own folder, wherever it is: its key is gone
    assert run_here(job).status == "already released"


@pytest.mark.parametrize(
    ("moment", "owner"),
    [pytest.param("opened", "stranger", marks=as_root), ("kept", "link"), ("opened", "own")],
)
def test_workers_refuse_another_folder(job, out, quiet, moment, owner, two_workers, monkeypatch):
    mine = out.with_name("mine")

    def strike():
        plant(mine, owner, hidden(out))
        exchange(hidden(out), mine)

    with Client(two_workers):
        with monkeypatch.context() as patch:
            strike_after(moment, strike, patch)
            with pytest.raises(OutputError, match=REFUSED) as refused:
                run_job(load(job))
        assert KEY.hex() not in str(refused.value)
        assert not out.exists()
        exchange(hidden(out), mine)
        assert run_job(load(job)).status == "released"
    assert digests(out) == quiet["row"]


@pytest.mark.parametrize("owner", [pytest.param("stranger", marks=as_root), "link", "thesis"])
@pytest.mark.parametrize("finished", [False, True])
def test_what_is_found_is_refused_and_stays(job, out, owner, *, finished):
    if finished:
        run_here(job)
    if owner == "thesis":  # another folder of the victim
        hidden(out).mkdir(mode=0o700)
        (hidden(out) / "chapter").write_text("1")
    else:
        plant(hidden(out), owner)
    before = digests(hidden(out))
    ran, aborted = call_cli("run", job), call_cli("abort", f"file://{out}")
    assert (ran.returncode, aborted.returncode) == ((0, 73) if finished else (73, 73))
    error_line(aborted)
    assert digests(hidden(out)) == before
    assert out.exists() == finished


@as_root
def test_a_folder_that_others_could_write_into_is_not_resumed(job, out, monkeypatch):
    """An open folder of the victim, in which the attacker has put a run."""
    plant(hidden(out), "own")
    hidden(out).chmod(0o777)
    with pytest.raises(OutputError, match="was open to other users"):
        run_here(job)
    assert hidden(out).stat().st_mode & 0o777 == 0o777


@as_root
@pytest.mark.parametrize("which", [".out.dpdask-series", "names"])
def test_what_stays_between_runs_is_not_taken_from_others(which, source, tmp_path):
    if which == "names":
        made = write_job(
            tmp_path / "job",
            source,
            tmp_path / "job/out",
            output__format="delta",
            output__mode="append",
        )
    else:
        add_day(tmp_path / "in", 0)
        made = growing_job(tmp_path / "job", tmp_path / "in")
    run_here(made)
    [beside] = (tmp_path / "job").glob(".out.dpdask-*")
    plant(tmp_path / "job/mine", "stranger", beside)
    exchange(beside, tmp_path / "job/mine")
    before = digests(tmp_path / "job")
    if which != "names":
        add_day(tmp_path / "in", 1)
    with pytest.raises(OutputError, match="belongs to another user"):
        run_here(made)
    assert digests(tmp_path / "job") == before
    exchange(beside, tmp_path / "job/mine")
    assert run_here(made).status == ("already released" if which == "names" else "released")


@as_root
def test_keys_of_runs_in_stores_are_not_taken_from_others(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    (tmp_path / "dpdask").mkdir()
    plant(tmp_path / "dpdask/keys", "stranger")
    (tmp_path / "dpdask/keys" / ("a" * 32)).write_bytes(KEY)
    with pytest.raises(OutputError, match="belongs to another user"):
        HostKeys().read("a" * 32)


@pytest.fixture
def frame():
    return pd.DataFrame({"x": np.random.default_rng(1).uniform(0, 100, 200)})


@pytest.fixture
def release(frame, tmp_path):
    schema = dpdask.Schema.from_dict({"columns": {"x": continuous([0, 100])}})
    mechanism = dpdask.DIP(schema, epsilon=1.0, reference=dpdask.Holdout(fraction=0.25))
    with mechanism.fit(frame, secrets=str(tmp_path)) as made:
        yield made


@pytest.mark.parametrize("owner", [pytest.param("stranger", marks=as_root), "link", "own"])
def test_a_frame_s_key_is_its_own(release, frame, owner, tmp_path):
    [place] = tmp_path.glob("release-*")
    before = plant(tmp_path / "mine", owner, place)
    exchange(place, tmp_path / "mine")
    with pytest.raises(DpdaskError, match=REFUSED):
        release.transform(frame)
    assert digests(place) == before
    exchange(place, tmp_path / "mine")
    assert len(release.transform(frame)) == len(release.transform(frame)) > 100
