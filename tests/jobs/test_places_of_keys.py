"""The keys of runs whose output is in a store must outlast the container that a driver runs in."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from e2e.helpers import call_cli, charging_entries, error_line, lake, write_job

from dpdask.engine.account import open_ledger
from dpdask.jobs.run_keys import find_container

POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
IN_MEMORY = Path("/dev/shm")
OWN_MOUNTS = pytest.mark.skipif(os.getuid() != 0, reason="only root can mount")
ASK = """
import ctypes, json, os, subprocess, sys
from pathlib import Path
from dpdask.jobs.run_keys import find_container
for path, script, environment in json.load(sys.stdin):
    if os.fork() == 0:  # with mounts of its own, which end with it
        assert ctypes.CDLL(None).unshare(0x20000) == 0
        subprocess.run(["sh", "-ec", "mount --make-rprivate /\\n" + script], check=True)
        os.environ.update(environment)
        print(find_container(Path(path)), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0
"""


def ask(cases):
    """Ask for folders, each after a script has mounted something, in some environment."""
    done = subprocess.run(
        [sys.executable, "-c", ASK],
        input=json.dumps([(str(path), script, around) for path, script, around, _ in cases]),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_outside_of_containers_every_folder_lasts(monkeypatch):
    for name in POD:
        monkeypatch.delenv(name, raising=False)
    assert find_container(Path.home()) is None
    assert find_container(IN_MEMORY / "keys") is None


@OWN_MOUNTS
def test_which_folders_of_a_pod_end_with_it(tmp_path):
    """Its own file system, memory and emptyDir do; another volume does not, nor what is mounted in place of one of these."""
    source = Path(f"/var/tmp/dpdask-{os.getpid()}")
    empty = source / "pods/1/volumes/kubernetes.io~empty-dir/home"
    claim = source / "pods/1/volumes/kubernetes.io~csi/pvc 7/mount"
    home = source / "home"
    try:
        for folder in (empty, claim, home):
            folder.mkdir(parents=True)
        lasting, ending = f"mount --bind '{claim}' '{home}'\n", f"mount --bind '{empty}' '{home}'\n"
        cases = [
            ("/somewhere/keys", "", POD, "pod"),
            ("/somewhere/keys", "", {}, "None"),
            ("/somewhere/keys", "", {"AWS_BATCH_JOB_ID": "7"}, "Batch job"),
            (IN_MEMORY / "keys", "", POD, "pod"),
            (home / "dpdask/keys", lasting, POD, "None"),
            (home / "dpdask/keys", ending, POD, "pod"),
            (home / "dpdask/keys", ending + lasting, POD, "None"),
            (home / "dpdask/keys", f"{lasting}mount -t tmpfs none '{home}'", POD, "pod"),
        ]
        assert ask(cases) == [expected for *_, expected in cases]
    finally:
        subprocess.run(["rm", "-rf", source], check=True)


@pytest.mark.parametrize("verb", ["run", "plan"])
def test_a_key_that_would_end_with_the_pod_is_refused_before_the_charge(
    verb, open_store, tmp_path, monkeypatch, request
):
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    open_ledger(url).init("d", 9.0)
    home = IN_MEMORY / f"dpdask-{os.getpid()}-{verb}"
    request.addfinalizer(lambda: shutil.rmtree(home, ignore_errors=True))
    monkeypatch.setenv("XDG_STATE_HOME", str(home))
    for name, value in POD.items():
        monkeypatch.setenv(name, value)
    source = lake(tmp_path / "in", [40])
    with open_store("azurite") as store:
        job = write_job(tmp_path / "job", source, tmp_path, output__path=store.folder.url)
        ended = call_cli(verb, job)
        assert ended.returncode == 64, ended.stderr
        line = error_line(ended)
        assert f"the key of the run would lie in {home}, which " in line
        assert "ends with this pod, and then nobody could resume the run" in line
        assert "give the job a `ledger`, which keeps its keys, or set XDG_STATE_HOME" in line
        assert not store.folder.sibling(".", ".dpdask").names()
        assert not home.exists()
        assert charging_entries(url, "d") == []
        charged = write_job(
            tmp_path / "job",
            source,
            tmp_path,
            output__path=store.folder.url,
            ledger={"url": url, "dataset": "d"},
        )
        ended = call_cli(verb, charged)
        assert ended.returncode == 0, ended.stderr
