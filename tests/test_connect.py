"""From a `cluster:` block to a scheduler: each kind, what it opens to the network, and what it says when it cannot."""

import socket

import dask
import psutil
import pytest
from dask.base import get_scheduler
from distributed import Client, LocalCluster, get_client, get_worker

from dpdask.connect import connected
from dpdask.errors import SpecError, TemporaryError
from dpdask.jobs.spec import Cluster


def test_synchronous_and_threads_set_the_scheduler_for_the_block_alone():
    before = dask.config.get("scheduler", None)
    with connected(Cluster(kind="synchronous")) as description:
        assert description == "this process"
        assert get_scheduler() is dask.get
    with connected(Cluster(kind="threads", workers=3)) as description:
        assert description == "threads of this process"
        assert get_scheduler() is dask.threaded.get
        assert dask.config.get("num_workers") == 3
    assert dask.config.get("scheduler", None) == before
    assert dask.config.get("num_workers", None) is None


def test_threads_are_as_many_as_there_are_without_a_number():
    with connected(Cluster(kind="threads")):
        assert dask.delayed(sum)([1, 2]).compute() == 3


def test_local_processes_listen_on_this_machine_alone_and_leave(recwarn):
    me = psutil.Process()
    children, listening = set(me.children(recursive=True)), {connection.laddr for connection in me.net_connections()}
    with connected(Cluster(kind="local", workers=1)) as description:
        assert description == "1 local processes"
        client = get_client()
        assert client.submit(lambda: 1 + 1).result() == 2
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
    left = [process for process in me.children(recursive=True) if process in started and process.status() != psutil.STATUS_ZOMBIE]
    assert not [process for process in left if "resource_tracker" not in " ".join(process.cmdline())]  # Python's own, until the end
    assert not [str(warning.message) for warning in recwarn if "already in use" in str(warning.message)]
    with pytest.raises(ValueError, match=r"No clients found|No global client"):
        get_client()


def test_an_address_is_taken_from_the_job_or_the_command_line():
    with LocalCluster(n_workers=1, processes=False, dashboard_address="127.0.0.1:0", host="127.0.0.1", protocol="tcp") as cluster:
        address = cluster.scheduler_address
        for block, scheduler in (
            (Cluster(kind="address", address=address), None),
            (Cluster(kind="synchronous"), address),
            (Cluster(kind="address", address="tcp://127.0.0.1:1"), address),
        ):
            with connected(block, scheduler) as description:
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
        pytest.raises(SpecError, match=r"cluster: the key 'cluster.address' is missing; give the scheduler's address"),
        connected(Cluster(kind="address")),
    ):
        pass


def unused() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{free.getsockname()[1]}"


@pytest.mark.parametrize(
    "address", [pytest.param(unused(), id="an unused port"), "127.0.0.1:99999", "foo://127.0.0.1:1", "tcp://nowhere.invalid:8786"]
)
def test_a_scheduler_that_cannot_be_reached_is_temporary(address):
    with (
        dask.config.set({"distributed.comm.timeouts.connect": "300ms"}),
        pytest.raises(TemporaryError, match="the scheduler cannot be reached"),
        connected(Cluster(kind="threads"), address),
    ):
        pass


@pytest.mark.parametrize(
    "block", [{"kind": "slurm"}, {"kind": "local", "workers": 0}, {"kind": "local", "threads_per_worker": 0}, {"kind": "local", "worker": 2}]
)
def test_what_is_no_cluster_is_refused(block):
    with pytest.raises(ValueError, match="validation error"):
        Cluster.model_validate(block)
