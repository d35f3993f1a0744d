"""The key of a frame's noise: gone with the release or with Python, and with the next fit if the process was killed."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import pandas as pd
import pytest

import dpdask
from dpdask.estimators import frames as temporary
from dpdask.estimators.frames import close_secrets, open_secrets

SCHEMA = {"columns": {"x": {"role": "privatise", "kind": "discrete", "levels": [0, 1]}}}
FIT = f"""
import pandas as pd, dpdask
known = dpdask.Known(columns={{"x": {{"probabilities": [0.5, 0.5]}}}})
table = pd.DataFrame({{"x": [0, 1] * 50}})
release = dpdask.DIP(dpdask.Schema.from_dict({SCHEMA!r}), epsilon=1.0, reference=known).fit(table)
release.transform(table)
print("ready", flush=True)
input()
"""
FORK = """
import os, sys
from dpdask.estimators.frames import open_secrets
open_secrets(None).write("run.key", b"secret", private=True)
child = os.fork()
if child:
    print(child, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def start(script, place):
    environment = {
        **os.environ,
        "TMPDIR": str(place),
        "PYTHONPATH": str(Path(dpdask.__file__).parents[1]),
    }
    return subprocess.Popen(
        [sys.executable, "-c", script],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def said(process):
    assert process.stdout is not None
    return process.stdout.readline().strip()


def keys(place):
    return set(place.rglob("run.key"))


def n_open(place):
    """How many files under a folder this process has open, removed ones too; other tests' threads may open and close files elsewhere."""
    opened = 0
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            opened += str(link.readlink()).startswith(f"{place}/")
    return opened


def fit():
    known = dpdask.Known(columns={"x": {"probabilities": [0.5, 0.5]}})
    return dpdask.DIP(dpdask.Schema.from_dict(SCHEMA), epsilon=1.0, reference=known).fit(
        pd.DataFrame({"x": [0, 1] * 50})
    )


@pytest.mark.more
def test_a_key_that_a_killed_process_left_goes_with_the_next_fit(place):
    living = start(FIT, place)
    assert said(living) == "ready"
    [kept] = keys(place)
    for number in (signal.SIGTERM, signal.SIGKILL):
        with start(FIT, place) as killed:
            assert said(killed) == "ready"
            killed.send_signal(number)
        assert len(keys(place)) == 2
        with fit():
            assert len(keys(place)) == 2  # the new one, and that of the process that lives
            assert kept in keys(place)
        assert keys(place) == {kept}
    living.communicate("\n")
    assert living.returncode == 0
    assert list(place.iterdir()) == []


def test_a_forked_child_holds_the_folder_of_its_parent(place):
    with start(FORK, place) as parent:
        child = int(said(parent))
        parent.kill()
        parent.wait()
        close_secrets(open_secrets(None))
        assert len(keys(place)) == 1
        os.kill(child, signal.SIGKILL)
    end = time.monotonic() + 30
    while keys(place) and time.monotonic() < end:
        close_secrets(open_secrets(None))
    assert list(place.iterdir()) == []


def test_only_this_user_s_own_folders_of_this_machine_are_removed(place):
    others = [
        place / "dpdask-fit-another.host-abc",
        place / f"{temporary._PREFIX}open",
        place / "dpdask-abc",
    ]
    for folder in others:
        folder.mkdir(mode=0o700)
        (folder / "release-a").mkdir()
    others[1].chmod(0o755)
    others.append(
        place / f"{temporary._PREFIX}renamed"
    )  # another folder of this user: somebody else gave it this name
    others[3].mkdir(mode=0o700)
    (others[3] / "thesis").touch()
    link = place / f"{temporary._PREFIX}link"
    link.symlink_to(others[0])
    close_secrets(open_secrets(None))
    assert set(place.iterdir()) == {*others, link}
    others[1].chmod(0o700)
    close_secrets(open_secrets(None))
    assert set(place.iterdir()) == {others[0], *others[2:], link}


def test_a_folder_whose_group_is_inherited_is_removed_too(place):
    left = place / f"{temporary._PREFIX}left"
    left.mkdir()
    left.chmod(0o2700)
    close_secrets(open_secrets(None))
    assert list(place.iterdir()) == []


def test_the_lock_of_a_folder_that_somebody_removed_is_let_go(place):
    first = open_secrets(None)
    [home] = place.iterdir()
    shutil.rmtree(home)
    second = open_secrets(None)
    assert n_open(place) == 1
    close_secrets(second)
    close_secrets(first)
    assert n_open(place) == 0
    assert list(place.iterdir()) == []


def test_many_releases_need_one_lock_and_the_last_one_frees_it(place):
    folders = [open_secrets(None) for _ in range(20)]
    assert n_open(place) == 1
    [home] = place.iterdir()
    assert home.stat().st_mode & 0o777 == 0o700
    for folder in folders[1:]:
        close_secrets(folder)
    assert len(list(home.iterdir())) == 1
    close_secrets(folders[0])
    close_secrets(folders[0])  # twice does no harm
    assert list(place.iterdir()) == []
    assert n_open(place) == 0
    assert not set(folders) & set(temporary._opened)
    close_secrets(open_secrets(None))  # after its folder went
    assert list(place.iterdir()) == []
