"""The run key of a job whose output is in a store: how workers get it, who must not see it, and when it is gone."""

import base64
import functools
import hashlib
import multiprocessing
import os
import subprocess
from contextlib import contextmanager

import dask
import fsspec
import pytest
from connect.key_tasks import digest_key, held
from connect.processes import ROOT, hide_dpdask, python_path, running, scheduler, worker_words
from distributed import Client, LocalCluster
from distributed.utils import get_ip
from e2e.helpers import lake, load, run_each, write_job

from dpdask.connect import check_cluster, open_cluster
from dpdask.connect.private import slurm_options
from dpdask.connect.spec import Address, Slurm, import_extra, is_exposed
from dpdask.engine import compute as cluster
from dpdask.engine.compute import INSECURE_KEY, share_key, withdraw_key
from dpdask.errors import SpecError, TemporaryError
from dpdask.io.encrypted import EncryptedFolder
from dpdask.io.storage import Folder
from dpdask.jobs.run import run_job
from dpdask.jobs.state import RunState

RUN = "ab" * 16
FOLDER = EncryptedFolder("memory://lake/.out.dpdask", RUN)
WITH_TESTS = python_path(ROOT / "tests")  # for the tasks of these tests
PREFIX = ("env", f"PYTHONPATH={WITH_TESTS['PYTHONPATH']}")


@pytest.fixture
def in_process():
    with in_process_cluster("127.0.0.1") as client:
        yield client


@contextmanager
def in_process_cluster(host):
    """One worker, which shares this process's memory, behind TCP without TLS."""
    options = {
        "host": host,
        "dashboard_address": "127.0.0.1:0",
        "processes": False,
        "protocol": "tcp",
    }
    with (
        LocalCluster(n_workers=1, threads_per_worker=1, **options) as cluster,
        Client(cluster) as client,
    ):
        yield client


@pytest.fixture
def memory_store():
    yield "memory://keys/out"
    for file in fsspec.filesystem("memory").find("/keys"):
        fsspec.filesystem("memory").rm_file(file)


BOUNDS = f"{RUN}/bounds.npz"


def forms(key):
    """A key as a log may show it."""
    return {
        key,
        key.hex().encode(),
        base64.b64encode(key),
        base64.urlsafe_b64encode(key),
        repr(key)[2:-1].encode(),
        key[:8],
        key[-8:],
    }


def digests_of(key, n_tasks):
    return [hashlib.sha256(key + bytes(number)).hexdigest() for number in range(n_tasks)]


def test_no_log_holds_the_key_and_a_late_worker_without_dpdask_ends_alone(tmp_path, monkeypatch):
    """Also at the level DEBUG. The late worker that has dpdask gets the key, and leaves none when the run ends."""
    key = b"SECRETKEY" + os.urandom(23)
    monkeypatch.setenv("DASK_LOGGING__DISTRIBUTED", "debug")
    debug = {"DASK_LOGGING__DISTRIBUTED": "debug"}
    with (
        scheduler(tmp_path, prefix=PREFIX) as (_, address),
        Client(address, set_as_default=False) as client,
        dask.config.set(scheduler=client),
    ):
        with (
            share_key(RUN, key),
            running(worker_words(address), tmp_path / "late.log", {**WITH_TESTS, **debug}),
        ):
            client.wait_for_workers(1)
            FOLDER.claim("bounds.npz", key[::-1])
            hidden = python_path(hide_dpdask(tmp_path / "hidden"), ROOT / "tests")
            with running(
                worker_words(address), tmp_path / "foreign.log", {**hidden, **debug}
            ) as foreign:
                client.wait_for_workers(2)
                found = run_each("keys", functools.partial(digest_key, FOLDER), range(20))
                foreign.wait(200)  # it cannot load its first task, and ends
            assert found == digests_of(key, 20)
            assert list(client.run(held).values()) == [[BOUNDS, RUN]]
            withdraw_key(RUN)
            assert list(client.run(held).values()) == [[]]
        assert [client.get_metadata([f"dpdask-key-{name}"], None) for name in (RUN, BOUNDS)] == [
            None,
            None,
        ]
    logs = {path.name: path.read_bytes() for path in tmp_path.glob("*.log")}
    assert set(logs) == {"scheduler.log", "late.log", "foreign.log"}
    assert b"No module named 'dpdask'" in logs["foreign.log"]
    assert b"set_metadata" in logs["scheduler.log"]
    assert [
        name
        for name, text in logs.items()
        for form in forms(key) | forms(key[::-1])
        if form in text
    ] == []


def share_and_die(address, key):
    with (
        Client(address, set_as_default=False) as client,
        dask.config.set(scheduler=client),
        share_key(RUN, key),
    ):
        FOLDER.claim("bounds.npz", key[::-1])
        run_each("keys", functools.partial(digest_key, FOLDER), [0])
        os._exit(9)


@pytest.mark.more
def test_what_a_killed_driver_left_is_gone_when_another_ends_the_run(tmp_path):
    key = os.urandom(32)
    with (
        scheduler(tmp_path, prefix=PREFIX) as (_, address),
        running(worker_words(address), tmp_path / "worker.log", WITH_TESTS),
    ):
        killed = multiprocessing.get_context("spawn").Process(
            target=share_and_die, args=(address, key)
        )
        killed.start()
        killed.join(60)
        assert killed.exitcode == 9
        with Client(address, set_as_default=False) as client, dask.config.set(scheduler=client):
            assert client.get_metadata([f"dpdask-key-{RUN}"]) == key
            assert list(client.run(held).values()) == [[BOUNDS, RUN]]
            withdraw_key(RUN)
            assert [
                client.get_metadata([f"dpdask-key-{name}"], None) for name in (RUN, BOUNDS)
            ] == [None, None]
            assert list(client.run(held).values()) == [[]]
            with pytest.raises(
                TemporaryError, match="a process cannot get the key of the run; run again to resume"
            ):
                run_each("keys", functools.partial(digest_key, FOLDER), [0])


def test_the_end_of_a_run_withdraws_its_key(in_process, memory_store):
    state = RunState(Folder(memory_store))
    with state.records.lock():
        reached = state.open("job", lambda _: "release", "fingerprint", None)
        key = state.keys.read(reached.run_id)
        assert key is not None
        name = [f"dpdask-key-{reached.run_id}"]
        cluster._set_key(in_process, reached.run_id, key)  # as a driver that was killed left it
        assert in_process.get_metadata(name) == key
        state.remove()
    assert in_process.get_metadata(name, None) is None


def broken(*_, **__):
    raise OSError("tcp://secret")


def test_a_scheduler_that_cannot_be_told_is_temporary(in_process, monkeypatch):
    monkeypatch.setattr(in_process, "sync", broken)
    says = r"^cluster: the scheduler could not be given the key of the run; run again to resume$"
    with pytest.raises(TemporaryError, match=says), share_key(RUN, bytes(32)):
        pass
    assert RUN not in held()


def test_a_key_goes_over_no_network_without_tls(memory_store, tmp_path):
    if get_ip().startswith("127."):
        pytest.skip("this machine has no address but the loopback")
    job = load(
        write_job(
            tmp_path / "job", lake(tmp_path / "in", [40]), tmp_path, output__path=memory_store
        )
    )
    says = r"^tcp://[^;]*: the output is in a store, so workers need the run's key, and without TLS anyone on the network path can read it; use tls://"
    with in_process_cluster(get_ip()):
        with pytest.raises(SpecError, match=says):
            run_job(job)
        assert not fsspec.filesystem("memory").find("/keys")
        run_job(
            load(write_job(tmp_path / "local", tmp_path / "in", tmp_path / "out"))
        )  # no key is sent
        with dask.config.set({INSECURE_KEY: True}):
            assert run_job(job).status == "released"


def test_over_the_loopback_a_key_may_go(in_process, memory_store, tmp_path):
    job = load(
        write_job(
            tmp_path / "job", lake(tmp_path / "in", [40]), tmp_path, output__path=memory_store
        )
    )
    assert run_job(job).status == "released"
    kept = in_process.run_on_scheduler(lambda dask_scheduler: dask_scheduler.task_metadata)
    assert [name for name in kept if name.startswith("dpdask")] == []


@pytest.mark.parametrize("insecure", [True, False])
def test_the_block_says_whether_it_may(in_process, insecure):
    with open_cluster(Address(insecure=insecure), in_process.scheduler.address):
        assert dask.config.get(INSECURE_KEY) is insecure
    [warning] = check_cluster(Address(address="tcp://10.0.0.1:8786", insecure=True))
    assert (
        "anyone on the network path can read what is sent: exact counts, and the key of a run whose output is in a store; use tls://"
        in warning
    )


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        *(
            (address, True)
            for address in (
                "tcp://10.0.0.1:8786",
                "10.0.0.1:8786",
                "ws://h:1/path",
                "ucx://h:1",
                "tcp://localhost.example:1",
            )
        ),
        *(
            (address, False)
            for address in (
                "tls://h:1",
                "wss://h:1",
                "TLS://h:1",
                "gateway://h:1/c",
                "inproc://10.0.0.1/1/1",
            )
        ),
        *(
            (address, False)
            for address in ("tcp://127.0.0.1:1", "ws://localhost:1/path", "tcp://[::1]:1")
        ),
    ],
)
def test_what_is_exposed(address, expected):
    assert is_exposed(address) is expected


def test_a_slurm_worker_without_a_folder_of_its_own_does_not_start(tmp_path):
    import_extra("dask_jobqueue", "slurm")  # it has defaults in Dask's configuration
    script = "\n".join(
        [
            *slurm_options(Slurm(workers=1, memory="1GB"), tmp_path)["job_script_prologue"],
            'echo "in $DPDASK_SCRATCH"',
        ]
    )
    for folder, code in ((tmp_path, 0), (tmp_path / "nowhere", 1)):
        ended = subprocess.run(
            ["bash", "-c", script],
            env={**os.environ, "TMPDIR": str(folder)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert (ended.returncode, ended.stdout.startswith(f"in {folder}/dpdask-")) == (
            code,
            code == 0,
        )
