"""The probe: a worker that cannot do a run's work is one line in the first seconds, and nothing is charged."""

import os
import pickle
import re
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import dask
import pytest
from connect.processes import (
    AS_NOBODY,
    ROOT,
    hide_dpdask,
    python_path,
    running,
    scheduler,
    worker_options,
    worker_words,
)
from distributed import Client, LocalCluster
from e2e.helpers import (
    call_cli,
    charging_entries,
    digests,
    error_line,
    hidden,
    lake,
    load,
    run_cli,
    run_here,
    write_job,
)

from dpdask.connect import spec as probe
from dpdask.connect.spec import check_workers
from dpdask.errors import SpecError, TemporaryError
from dpdask.io.fragments import discover
from dpdask.io.storage import Folder, absolute_url
from dpdask.jobs.run import run_job
from dpdask.startup import Stamp, compare_versions, find_versions
from dpdask.version import __version__

LEAST = 60.0  # seconds


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return lake(tmp_path_factory.mktemp("lake") / "in", [400] * 4)


@pytest.fixture
def open_folder(tmp_path):
    """A folder that everybody can enter, unlike pytest's."""
    folder = Path("/tmp") / f"dpdask-test-{os.getpid()}-{tmp_path.name}"
    folder.mkdir(mode=0o755)
    yield folder
    shutil.rmtree(folder)


def wait_for(address, workers):
    with Client(address, set_as_default=False) as client:
        client.wait_for_workers(workers, timeout=120)


def refused(job, folder, address, source, run=call_cli):
    """Run a job with a ledger on a scheduler; return its exit code and its line, after checking that nothing was charged or left."""
    url = f"sqlite:///{folder}/ledger.db"
    assert (
        call_cli(
            "ledger", "init", "--url", url, "--dataset", "d", "--epsilon", "9", "--delta", "0"
        ).returncode
        == 0
    )
    job = write_job(
        job,
        source,
        folder / "out",
        ledger={"url": url, "dataset": "d"},
        cluster={"kind": "address", "address": address},
    )
    began = time.monotonic()
    ended = run("run", job)
    assert time.monotonic() - began < LEAST
    assert charging_entries(url, "d") == []
    assert not hidden(folder / "out").exists()
    assert not (folder / "out").exists()
    return ended.returncode, error_line(ended)


def other_version(folder):
    """Copy the package with another version."""
    shutil.copytree(ROOT / "dpdask", folder / "dpdask")
    (folder / "dpdask" / "version.py").write_text('"""Another."""\n\n__version__ = "0.0.9"\n')
    return folder


@pytest.mark.more
def test_a_worker_without_dpdask_and_one_with_another_version(source, tmp_path):
    with scheduler(tmp_path) as (_, address), ExitStack() as stack:
        stack.enter_context(running(worker_words(address), tmp_path / "worker-0.log"))
        without = ExitStack()
        without.enter_context(
            running(
                worker_words(address),
                tmp_path / "worker-1.log",
                python_path(hide_dpdask(tmp_path / "hidden")),
            )
        )
        with without:
            wait_for(address, 2)
            code, line = refused(tmp_path / "job", tmp_path, address, source, run_cli)
            assert code == 64
            assert f"cluster: 1 of 2 workers: no dpdask, and the driver has {__version__}" in line
        with running(
            worker_words(address),
            tmp_path / "worker-2.log",
            python_path(other_version(tmp_path / "other")),
        ):
            wait_for(address, 2)
            code, line = refused(tmp_path / "job", tmp_path, address, source)
            assert code == 64
            assert re.search(
                rf"cluster: 1 of 2 workers: dpdask 0\.0\.9, and the driver has {re.escape(__version__)}; install the same versions",
                line,
            )


def test_a_scheduler_with_another_version(source, tmp_path):
    prefix = ("env", f"PYTHONPATH={python_path(other_version(tmp_path / 'other'))['PYTHONPATH']}")
    with (
        scheduler(tmp_path, prefix=prefix) as (_, address),
        running(worker_words(address), tmp_path / "worker.log"),
    ):
        code, line = refused(tmp_path / "job", tmp_path, address, source)
    assert (
        code,
        f"cluster: the scheduler: dpdask 0.0.9, and the driver has {__version__}" in line,
    ) == (64, True), line


@pytest.mark.more
@pytest.mark.skipif(os.getuid() != 0, reason="only root can start a process of another user")
def test_a_worker_of_another_user(source, open_folder, tmp_path):
    """It may read the input, but neither write the output nor read the run's secrets; or not even the input."""
    shutil.copytree(source, open_folder / "in")
    (open_folder / "mine").mkdir(mode=0o700)
    shutil.copytree(source, open_folder / "mine" / "in")
    with scheduler(tmp_path) as (_, address):
        (open_folder / "scratch").mkdir()
        (open_folder / "scratch").chmod(0o777)  # /tmp may hold another user's folder for Dask
        words = [
            sys.executable,
            "-c",
            AS_NOBODY,
            *worker_options(address, "--local-directory", str(open_folder / "scratch")),
        ]
        with running(words, tmp_path / "worker.log"):
            wait_for(address, 1)
            code, line = refused(tmp_path / "job", open_folder, address, open_folder / "in")
            assert (
                code,
                "1 of 1 workers: cannot write into the output's folder; give workers the same paths"
                in line,
            ) == (73, True)
            (open_folder / "ledger.db").unlink()
            code, line = refused(
                tmp_path / "job", open_folder, address, open_folder / "mine" / "in"
            )
            assert (code, "1 of 1 workers: cannot read the first file of the input" in line) == (
                66,
                True,
            )


def test_no_worker_comes(source, tmp_path):
    with (
        scheduler(tmp_path) as (_, address),
        Client(address) as client,
        dask.config.set({"dpdask.patience-seconds": 0.5}),
    ):
        with pytest.raises(
            TemporaryError,
            match=r"^cluster: no worker connected within 0 seconds; check that workers start",
        ):
            run_job(load(write_job(tmp_path / "job", source, tmp_path / "out")))
        assert client.status == "running"
    assert not hidden(tmp_path / "out").exists()


def test_a_row_group_that_no_worker_can_hold(source, tmp_path):
    options = {
        "host": "127.0.0.1",
        "dashboard_address": "127.0.0.1:0",
        "processes": False,
        "protocol": "tcp",
    }
    job = load(write_job(tmp_path / "job", source, tmp_path / "out"))
    fragments = discover(job.input_url, job.schema).fragments
    assert all(
        fragment.n_bytes_decoded / 400 * 10 > 200 for fragment in fragments
    )  # some columns of 400 rows
    large = [replace(fragment, n_bytes_decoded=2**30) for fragment in fragments]
    folder = Folder(absolute_url(str(tmp_path)))
    with (
        LocalCluster(n_workers=1, threads_per_worker=2, memory_limit="3GB", **options) as cluster,
        Client(cluster),
    ):
        check_workers(fragments, output=folder, secrets=folder)
        with pytest.raises(
            SpecError,
            match=r"1 of 1 workers: a memory limit of 2.79 GiB, and the largest row group in 2 threads needs about 4.39",
        ):
            check_workers(large, output=folder, secrets=folder)
    with LocalCluster(n_workers=1, memory_limit=0, **options) as cluster, Client(cluster):
        check_workers(large, output=folder)
    assert [name for name in folder.names() if "probe" in name] == []


@pytest.mark.more
def test_a_worker_that_joins_later_with_another_version_refuses(source, tmp_path):
    """It gets tasks once the only right worker is gone; the run ends with 75, and is resumed on right ones."""
    job = load(write_job(tmp_path / "job", source, tmp_path / "out"))
    run_here(write_job(tmp_path / "quiet", source, tmp_path / "out-quiet"))
    with scheduler(tmp_path) as (_, address), ExitStack() as stack, Client(address) as client:
        right = stack.enter_context(running(worker_words(address), tmp_path / "worker-0.log"))
        client.wait_for_workers(1)

        def replace_the_worker(stage, done, total):
            if (stage, done) == ("survey", total) and right.poll() is None:
                stack.enter_context(
                    running(
                        worker_words(address),
                        tmp_path / "worker-1.log",
                        python_path(other_version(tmp_path / "other")),
                    )
                )
                client.wait_for_workers(2)
                right.kill()

        with pytest.raises(
            TemporaryError,
            match=rf"a worker joined with another version: dpdask 0\.0\.9, and the driver has {re.escape(__version__)}",
        ):
            run_job(job, replace_the_worker)
        assert hidden(tmp_path / "out").exists()
    run_here(tmp_path / "job" / "job.yaml")
    assert digests(tmp_path / "out") == digests(tmp_path / "out-quiet")


@pytest.mark.more
def test_an_adaptive_cluster_starts_with_no_worker(source, tmp_path):
    options = {
        "host": "127.0.0.1",
        "dashboard_address": "127.0.0.1:0",
        "protocol": "tcp",
        "threads_per_worker": 1,
    }
    with LocalCluster(n_workers=0, **options) as cluster:
        cluster.adapt(minimum=0, maximum=2)
        job = write_job(
            tmp_path / "job",
            source,
            tmp_path / "out",
            cluster={"kind": "address", "address": cluster.scheduler_address},
        )
        ended = run_cli("run", job)
    assert ended.returncode == 0, ended.stderr
    run_here(write_job(tmp_path / "quiet", source, tmp_path / "out-quiet"))
    assert digests(tmp_path / "out") == digests(tmp_path / "out-quiet")


def answer_late(libraries):
    import time

    from dpdask.startup import find_versions

    time.sleep(2)  # as an import of the package may take
    return find_versions(libraries)


@pytest.mark.more
def test_an_adaptive_cluster_keeps_a_worker_that_is_asked(tmp_path, monkeypatch):
    hold = probe._held

    def hold_late(client):
        time.sleep(1)  # on a busy machine, the first worker is idle for so long
        assert len(client.scheduler_info(n_workers=-1)["workers"]) == 1
        return hold(client)

    monkeypatch.setattr(probe, "_held", hold_late)
    monkeypatch.setattr(probe, "find_versions", answer_late)
    with (
        LocalCluster(n_workers=0, threads_per_worker=1, dashboard_address="127.0.0.1:0") as cluster,
        Client(cluster),
    ):
        cluster.adapt(minimum=0, maximum=1, interval="100ms", wait_count=1)
        check_workers([], output=Folder(str(tmp_path)))


def test_a_scheduler_that_is_lost_while_workers_are_asked_is_temporary(tmp_path, monkeypatch):
    output = Folder(f"file://{tmp_path}/out")
    output.create()
    options = {
        "n_workers": 1,
        "threads_per_worker": 1,
        "processes": False,
        "dashboard_address": None,
    }
    patience = {"distributed.comm.timeouts.connect": "500ms"}
    with dask.config.set(patience), LocalCluster(**options) as cluster, Client(cluster) as client:
        for _ in range(2):
            check_workers((), output=output, secrets=output)
        assert (
            client.run_on_scheduler(
                lambda dask_scheduler: dict(dask_scheduler.extensions["events"]._events)
            )
            == {}
        )

        def lose(_):
            cluster.sync(cluster.scheduler.close)
            raise TemporaryError("no worker answers")

        monkeypatch.setattr(probe, "_check_versions", lose)
        with pytest.raises(TemporaryError, match="no worker answers"):
            check_workers((), output=output, secrets=output)


def test_versions_are_found_without_this_package():
    found = find_versions()
    assert list(found) == [
        "Python",
        "dpdask",
        "stream format",
        "dask",
        "distributed",
        "numba",
        "numpy",
        "pandas",
        "pyarrow",
    ]
    assert found["Python"] == f"{sys.version_info[0]}.{sys.version_info[1]}"
    assert find_versions(("no-such-library",))["no-such-library"] is None
    assert compare_versions(found, found) == ""
    assert (
        compare_versions({**found, "numba": "0.1"}, {**found, "numba": "0.2"})
        == "numba 0.1, and the driver has 0.2"
    )
    assert compare_versions({"Python": "3.10"}, found).startswith("Python 3.10, and")
    assert Stamp() == Stamp()


def test_a_stamp_refuses_where_versions_differ(tmp_path):
    stamp = pickle.dumps(Stamp())
    assert not pickle.loads(stamp).differs
    words = [
        sys.executable,
        "-c",
        "import pickle, sys; print(pickle.load(sys.stdin.buffer).differs)",
    ]
    elsewhere = python_path(other_version(tmp_path / "other"))
    told = subprocess.run(
        words, env=elsewhere, input=stamp, capture_output=True, check=False, cwd=tmp_path
    )
    assert told.stdout.startswith(b"dpdask 0.0.9, and the driver has ")
