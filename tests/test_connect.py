"""From a `cluster:` block to a scheduler: each kind, what it opens to the network, and what it says when it cannot."""

import gc
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from urllib.error import HTTPError

import dask
import numpy as np
import psutil
import pytest
from dask.base import get_scheduler
from distributed import Client, LocalCluster, get_client, get_worker
from e2e.helpers import call_cli, lake, run_cli, write_job

from dpdask.connect import check_cluster, open_cluster
from dpdask.connect.private import scratch_folder
from dpdask.connect.spec import Address, Local, Synchronous, Threads
from dpdask.errors import OutputError, SpecError, TemporaryError
from dpdask.io.storage import Folder, absolute_url


def test_synchronous_and_threads_set_the_scheduler_for_the_block_alone():
    before = dask.config.get("scheduler", None)
    with open_cluster(Synchronous()) as description:
        assert description == "this process"
        assert get_scheduler() is dask.get
    with open_cluster(Threads(workers=3)) as description:
        assert description == "threads of this process"
        assert get_scheduler() is dask.threaded.get
        assert dask.config.get("num_workers") == 3
    assert dask.config.get("scheduler", None) == before
    assert dask.config.get("num_workers", None) is None


def test_local_processes_listen_on_this_machine_alone_and_leave(recwarn):
    me = psutil.Process()
    children, listening = (
        set(me.children(recursive=True)),
        {connection.laddr for connection in me.net_connections()},
    )
    as_for_users = dask.config.set(
        {"distributed.worker.multiprocessing-method": "spawn"}
    )  # what forks the tests' workers stays
    with as_for_users, open_cluster(Local(workers=1)) as description:
        assert description == "1 local processes"
        client = get_client()
        assert client.submit(lambda: 1 + 1).result() == 2
        assert (
            client.submit(gc.get_threshold).result()[0] == 100_000
        )  # workers collect garbage rarely
        client.submit(time.sleep, 1.5).result()
        assert client.profile()["count"] == 0  # nor do they sample what they do: no page shows it
        started = [process for process in me.children(recursive=True) if process not in children]
        assert started
        open_ = [
            connection.laddr
            for process in (me, *started)
            for connection in process.net_connections()
            if connection.status == "LISTEN" and connection.laddr not in listening
        ]
        assert {address.ip for address in open_} == {"127.0.0.1"}
        assert 8787 not in {address.port for address in open_}
        info = client.scheduler_info()
        assert {
            address.partition("://")[0] for address in (client.scheduler.address, *info["workers"])
        } == {"tls"}
        for server in (info, *info["workers"].values()):
            for page in (
                "status",
                "health",
                "metrics",
                "info/main/workers.html",
                "json/counts.json",
                "statics/css/base.css",
            ):
                with pytest.raises(HTTPError, match="404"):
                    urllib.request.urlopen(
                        f"http://127.0.0.1:{server['services']['dashboard']}/{page}"
                    )
    left = [
        process
        for process in me.children(recursive=True)
        if process in started and process.status() != psutil.STATUS_ZOMBIE
    ]
    assert not [
        process for process in left if "resource_tracker" not in " ".join(process.cmdline())
    ]  # Python's own, until the end
    assert not [
        str(warning.message) for warning in recwarn if "already in use" in str(warning.message)
    ]
    with pytest.raises(ValueError, match=r"No clients found|No global client"):
        get_client()


def test_an_address_is_taken_from_the_job_or_the_command_line():
    with LocalCluster(
        n_workers=1,
        processes=False,
        dashboard_address="127.0.0.1:0",
        host="127.0.0.1",
        protocol="tcp",
    ) as cluster:
        address = cluster.scheduler_address
        for block, scheduler in (
            (Address(address=address), None),
            (Synchronous(), address),
            (Address(address="tcp://127.0.0.1:1"), address),
        ):
            with open_cluster(block, scheduler) as description:
                assert description == f"the scheduler at {address}"
                client = dask.config.get("scheduler")
                assert isinstance(client, Client)
                assert client.scheduler.address == address
                [worker] = cluster.workers.values()
                assert dask.delayed(lambda: get_worker().address)().compute() == worker.address
                with pytest.raises(ValueError, match=r"No clients found|No global client"):
                    get_client()  # it is nobody's default: one that is lost would stay it
            assert dask.config.get("scheduler", None) is not client


def test_an_address_must_be_given():
    with (
        pytest.raises(
            SpecError,
            match=r"cluster: the key 'cluster.address' is missing; give the scheduler's address",
        ),
        open_cluster(Address()),
    ):
        pass


def unused():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{free.getsockname()[1]}"


@pytest.mark.parametrize(
    "address",
    [
        pytest.param(unused(), id="an unused port"),
        "127.0.0.1:99999",
        "foo://127.0.0.1:1",
        "tcp://nowhere.invalid:8786",
    ],
)
def test_a_scheduler_that_cannot_be_reached_is_temporary(address):
    with (
        dask.config.set({"distributed.comm.timeouts.connect": "300ms"}),
        pytest.raises(TemporaryError, match="the scheduler cannot be reached"),
        open_cluster(Address(insecure=True), address),
    ):
        pass


OPEN = [
    "tcp://10.0.0.1:8786",
    "10.0.0.1:8786",
    "ws://10.0.0.1:8786",
    "tcp://[2001:db8::1]:8786",
    "tcp://127.0.0.1.example:8786",
    "tcp://127.0.0.1@10.0.0.1:8786",
    "tcp://0.0.0.0:8786",
    "foo://scheduler:1",
]


@pytest.mark.parametrize("address", OPEN)
def test_a_scheduler_open_to_the_network_is_refused_unless_the_job_says_so(address):
    says = r"anyone who can reach this scheduler can run code .*; use tls:// with certificates, or a cluster of kind address with insecure: true$"
    block, shown = Address(address=address), address.replace("127.0.0.1@", "***@")
    for cluster, scheduler in ((block, None), (Threads(), address), (Local(), address)):
        with pytest.raises(SpecError, match=says) as caught, open_cluster(cluster, scheduler):
            pass
        assert caught.value.where == shown
        with pytest.raises(SpecError, match=says):
            check_cluster(cluster, scheduler)
    [warning] = check_cluster(block.model_copy(update={"insecure": True}))
    assert warning.startswith(
        f"the scheduler at {shown} asks for no certificate: anyone who can reach it over the network can run code"
    )
    assert check_cluster(Address(insecure=True), address) == (warning,)


@pytest.mark.parametrize(
    "address",
    [
        "tcp://127.0.0.1:8786",
        "127.3.2.1:8786",
        "localhost:8786",
        "tcp://LOCALHOST",
        "ws://[::1]:8786",
        "tcp://127.0.0.1",
    ],
)
def test_a_scheduler_open_to_this_machine_alone_is_warned_of(address):
    [warning] = check_cluster(Address(address=address))
    assert warning.startswith(
        f"the scheduler at {address} asks for no certificate: every user of this machine can run code"
    )


def test_the_command_line_warns_before_it_runs_and_in_its_result(tmp_path):
    with LocalCluster(
        n_workers=1,
        processes=False,
        dashboard_address="127.0.0.1:0",
        host="127.0.0.1",
        protocol="tcp",
    ) as cluster:
        address = cluster.scheduler_address
        job = write_job(
            tmp_path / "job",
            lake(tmp_path / "in", [400]),
            tmp_path / "out",
            cluster={"kind": "address", "address": address},
        )
        [warning] = check_cluster(Threads(), address)
        assert f"WARNING   {warning}" in call_cli("plan", job).stdout
        ended = run_cli("run", job, "--json")
    assert ended.returncode == 0
    assert json.loads(ended.stderr.splitlines()[0]) == {"warning": warning}
    assert json.loads(ended.stdout)["warnings"][0] == warning
    for verb in ("validate", "plan"):
        refused = call_cli(verb, job, "--set", "cluster.address=tcp://192.0.2.1:8786")
        assert (refused.returncode, "with insecure: true" in refused.stderr) == (64, True)
    assert (
        call_cli(
            "validate",
            job,
            "--set",
            "cluster.address=tcp://192.0.2.1:8786",
            "--set",
            "cluster.insecure=true",
        ).returncode
        == 0
    )


@pytest.mark.parametrize(
    "address",
    ["tls://10.0.0.1:8786", "TLS://scheduler:8786", "wss://10.0.0.1:8786", "inproc://10.0.0.1/1/1"],
)
def test_a_scheduler_that_asks_for_certificates_needs_no_word(address):
    assert check_cluster(Address(address=address)) == ()


def modes(folder):
    return {path.name: path.stat().st_mode & 0o777 for path in folder.rglob("*")}


def spill(number, folder):
    Folder(absolute_url(folder)).write(f"part-{number}", b"released")
    return np.full(100_000, float(number))


def test_what_workers_spill_is_for_this_user_alone_and_leaves(tmp_path):
    """Values above a target of some bytes go straight to disk: spilled for real, and read again."""
    (tmp_path / "out").mkdir()
    settings = {
        "distributed.worker.memory.target": 1e-9,
        "temporary-directory": str(tmp_path / "scratch"),
    }
    umask = os.umask(0o022)
    try:
        with dask.config.set(settings), open_cluster(Local(workers=1)):
            client = get_client()
            futures = client.map(spill, range(3), folder=str(tmp_path / "out"))
            assert [float(values.sum()) for values in client.gather(futures)] == [
                0.0,
                100_000.0,
                200_000.0,
            ]
            [storage] = (tmp_path / "scratch").rglob("storage")
            assert len(modes(storage)) == 3
            assert set(modes(storage).values()) == {0o600}
            assert [
                folder.stat().st_mode & 0o777 for folder in (tmp_path / "scratch").iterdir()
            ] == [0o700]
            assert "PRIVATE KEY" not in "".join(
                path.read_text(errors="ignore")
                for path in (tmp_path / "scratch").rglob("*")
                if path.is_file()
            )
            del futures
    finally:
        os.umask(umask)
    assert set(modes(tmp_path / "out").values()) == {
        0o644
    }  # what workers publish keeps its usual mode
    assert {name for name in modes(tmp_path / "scratch") if "." not in name} == {
        f"dpdask-{os.getuid()}",
        "dask-scratch-space",
    }


KILLED = """
import os, sys
from distributed import get_client
from dpdask.connect import open_cluster
from dpdask.connect.spec import Local
if __name__ == "__main__":
    with open_cluster(Local(workers=1)):
        future = get_client().submit(bytes, 100_000)
        future.result()
        print("spilled", flush=True)
        os.kill(os.getpid(), 9)
"""


@pytest.mark.slow
def test_what_a_killed_driver_leaves_is_removed_at_the_next_start(tmp_path):
    environment = {
        **os.environ,
        "DASK_TEMPORARY_DIRECTORY": str(tmp_path / "scratch"),
        "DASK_DISTRIBUTED__WORKER__MEMORY__TARGET": "1e-9",
    }
    (tmp_path / "driver.py").write_text(KILLED)
    killed = subprocess.run(
        [sys.executable, str(tmp_path / "driver.py")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (killed.returncode, killed.stdout) == (-signal.SIGKILL, "spilled\n")
    [left] = (tmp_path / "scratch").rglob("storage")
    assert set(modes(left).values()) == {0o600}
    with (
        dask.config.set({"temporary-directory": str(tmp_path / "scratch")}),
        open_cluster(Local(workers=1)),
    ):
        get_client().wait_for_workers(1)
        assert not left.exists()


def test_the_workers_folder_is_this_users_alone_or_none(tmp_path):
    with dask.config.set({"temporary-directory": str(tmp_path / "a" / "b")}):
        folder = scratch_folder()
        assert (folder.parent, folder.stat().st_mode & 0o777) == (tmp_path / "a" / "b", 0o700)
        assert scratch_folder() == folder
        folder.chmod(0o750)
        with pytest.raises(
            OutputError,
            match=r"need a folder that only this user can read .*; set Dask's temporary-directory",
        ):
            scratch_folder()
        folder.rmdir()
        folder.symlink_to(tmp_path, target_is_directory=True)
        with (
            pytest.raises(OutputError, match="need a folder that only this user can read"),
            open_cluster(Local()),
        ):
            pass
        folder.unlink()
        folder.mkdir(mode=0o700)
        if os.getuid() == 0:
            os.chown(folder, 65534, 65534)
            with pytest.raises(OutputError, match="need a folder that only this user can read"):
                scratch_folder()
    (tmp_path / "file").touch()
    with (
        dask.config.set({"temporary-directory": str(tmp_path / "file")}),
        pytest.raises(OutputError, match=r"no folder .* can be made here"),
    ):
        scratch_folder()
