"""Another user of the machine, without a credential, while a job runs: no code of theirs runs, no page answers, no file opens.

The same attempts succeed on a cluster without TLS, so they could have succeeded.
"""

import json
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path

import dask
import psutil
import pytest
from distributed import Client, LocalCluster
from e2e.helpers import command, lake, write_job

from dpdask.engine.account import open_ledger

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
SECRET = "4711.25 of Melpomene"

pytestmark = pytest.mark.skipif(
    os.name != "posix" or os.getuid() != 0, reason="only root can start a process of another user"
)


@pytest.fixture
def place():
    """A folder that everybody can enter, unlike pytest's, with a file that only this user may read."""
    folder = Path(tempfile.mkdtemp(prefix="dpdask-test-"))
    folder.chmod(0o755)
    (folder / "mine").mkdir(mode=0o700)
    (folder / "mine" / "secret").write_text(SECRET)
    yield folder
    shutil.rmtree(folder)


def listening(process):
    """Return the ports that a process and its children listen on, without the stores that other tests have started."""
    family = [
        process,
        *(
            child
            for child in process.children(recursive=True)
            if "services" not in " ".join(child.cmdline())
        ),
    ]
    family = [
        one for one in family if one is process or "python" in one.cmdline()[0]
    ]  # the name of a script's process is the script's
    found = {
        connection.laddr
        for one in family
        for connection in one.net_connections("inet")
        if connection.status == "LISTEN"
    }
    assert {address.ip for address in found} <= {"127.0.0.1"}
    return sorted(address.port for address in found)


@pytest.fixture
def stranger():
    """Another user, who has imported what they need and waits for where to strike."""
    words = [sys.executable, str(HERE / "other_user.py")]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.kill()


def attack(stranger, ports, place, seconds=1.5):
    """Return what the other user could do, told where the victim listens and where the victim's files are."""
    wanted = {
        "ports": ports,
        "secret": str(place / "mine" / "secret"),
        "folder": str(place),
        "seconds": seconds,
    }
    out, err = stranger.communicate(json.dumps(wanted), timeout=200)
    assert stranger.returncode == 0, err
    return json.loads(out)


SCRIPT = ["bash", str(ROOT / "cluster/local/run")]


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(command("run"), id="local"),
        pytest.param(SCRIPT, id="script", marks=pytest.mark.slow),
    ],
)
def test_nobody_else_gets_in_while_a_job_runs(words, place, stranger):
    ledger, out = place / "mine" / "ledger.db", place / "mine" / "out"
    open_ledger(f"sqlite:///{ledger}").init("d", 9.0)
    counts = {
        "kind": "histogram"
    }  # no key of a hold-out is asked of the ledger before rows are read
    options = {
        "mechanism__reference": counts,
        "cluster": {"kind": "local", "workers": 2},
        "insecure_seed": None,
        "ledger": {"url": f"sqlite:///{ledger}", "dataset": "d"},
    }
    job = write_job(place / "mine" / "job", lake(place / "mine" / "in", [400] * 4), out, **options)
    bin_ = str(Path(sys.executable).parent)
    environment = {
        **os.environ,
        "DASK_TEMPORARY_DIRECTORY": str(place),
        "TMPDIR": str(place),
        "PATH": f"{bin_}:{os.environ['PATH']}",
    }
    with sqlite3.connect(ledger, isolation_level=None) as held:
        held.execute(
            "BEGIN IMMEDIATE"
        )  # the run waits for its charge: its workers are up and have read the table
        with subprocess.Popen(
            [*words, str(job)],
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        ) as driver:
            said = ""
            for line in driver.stderr:
                said += line
                if (
                    '"stage": "survey"' in line
                    and json.loads(line)["done"] == json.loads(line)["total"]
                ):
                    break
            ports = (
                listening(psutil.Process(driver.pid))
                if driver.poll() is None
                else pytest.fail(said)
            )
            assert len(ports) >= 6  # a scheduler, nannies and workers
            found = attack(stranger, ports, place)
            assert driver.poll() is None
            held.execute("ROLLBACK")
            assert driver.wait(timeout=120) == 0, driver.stderr.read()
    assert found == []
    assert (
        out / "_SUCCESS"
    ).stat().st_mode & 0o777 == 0o666 & ~umask()  # what is published keeps its usual mode
    assert {path.stat().st_mode & 0o777 for path in out.glob("*.parquet")} == {0o666 & ~umask()}
    assert not [
        path for path in place.rglob("*") if "worker-" in path.name or "scheduler-" in path.name
    ]


def umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


@pytest.mark.more
def test_everybody_gets_into_a_cluster_without_tls(place, stranger):
    settings = {"temporary-directory": str(place), "distributed.deploy.lost-worker-timeout": "1h"}
    options = {
        "host": "127.0.0.1",
        "dashboard_address": "127.0.0.1:0",
        "scheduler_kwargs": {"dashboard": False},
    }
    me = psutil.Process()
    before = set(listening(me))  # of a cluster that other tests share
    with (
        dask.config.set(settings),
        LocalCluster(n_workers=1, threads_per_worker=1, **options) as cluster,
        Client(cluster),
    ):
        found = attack(stranger, sorted(set(listening(me)) - before), place, 12.0)
    stolen = f"({os.getuid()}, '{SECRET}') in plain text"
    for role in ("Scheduler", "Worker", "Nanny"):
        assert f"identity: {role} in plain text" in found
    assert found.count(f"run: {stolen}") == 2  # the worker and its nanny
    assert f"run_function: {stolen}" in found
    assert {"page /info/main/workers.html", "page /json/counts.json", "page /health"} <= set(found)
    assert "the victim's file" not in found  # they had to ask the workers for it
