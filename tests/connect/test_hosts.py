"""Three hosts with TLS: the same bytes as on threads, also if one is cut off in the middle; clients without a right certificate stay out."""

import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import dask
import pytest
from connect.processes import QUIET, make_certificates, python_path, running, worker_words
from distributed import LocalCluster, Security
from e2e.helpers import call_cli, command, digests, lake, run_cli, run_here, write_job
from services import hosts
from services.proxy import proxying

from dpdask.connect import open_cluster
from dpdask.connect.spec import Address, Tls
from dpdask.errors import SpecError, TemporaryError
from dpdask.io.shards import Manifest
from dpdask.io.storage import open_filesystem

MOST = 60.0  # seconds


def environment(folder):
    """The environment of a scheduler or a worker with the certificates in a folder."""
    # workers are given up after five minutes of silence, as by default: less kills those that a busy machine is slow with
    return {
        **python_path(),
        "DASK_CONFIG": str(folder / "dask.yaml"),
        "DASK_DISTRIBUTED__SCHEDULER__WORKER_TTL": "5 minutes",
    }


@pytest.fixture(scope="module")
def tls(tmp_path_factory):
    return make_certificates(
        tmp_path_factory.mktemp("tls") / "tls",
        "--host",
        "127.0.0.1",
        "--host",
        "10.77.0.1",
        "--days",
        "1",
    )


@pytest.fixture(scope="module")
def address(tls):
    """A scheduler with TLS on the loopback, and a worker, both in this process."""
    files = {"tls_ca_file": tls["ca"]}
    for role in ("client", "scheduler", "worker"):
        folder = Path(tls["ca"]).parent
        files |= {
            f"tls_{role}_cert": str(folder / f"{role}.pem"),
            f"tls_{role}_key": str(folder / f"{role}-key.pem"),
        }
    options = {
        "processes": False,
        "host": "127.0.0.1",
        "protocol": "tls",
        "dashboard_address": None,
    }
    security = Security(**files, require_encryption=True)
    # the client of a worker in this process sets Dask's scheduler, and resets it after the job's
    before = dict(dask.config.config)
    with LocalCluster(n_workers=1, threads_per_worker=1, security=security, **options) as cluster:
        yield cluster.scheduler_address
    dask.config.config.clear()
    dask.config.config.update(before)


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """The certificates of another authority."""
    return make_certificates(tmp_path_factory.mktemp("tls") / "other")


def test_the_certificates_are_private_and_expire_soon(tls):
    folder = Path(tls["ca"]).parent
    assert folder.stat().st_mode & 0o777 == 0o700
    files = {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()}
    roles = ("client", "scheduler", "worker")
    assert set(files) == {
        "ca.pem",
        "dask.yaml",
        *(f"{role}{part}.pem" for role in roles for part in ("", "-key")),
    }
    assert set(files.values()) == {0o600}
    for role in roles:
        words = [
            "openssl",
            "x509",
            "-in",
            str(folder / f"{role}.pem"),
            "-noout",
            "-text",
            "-checkend",
        ]
        assert (
            subprocess.run([*words, str(23 * 3600)], capture_output=True, check=False).returncode
            == 0
        )
        expired = subprocess.run(
            [*words, str(25 * 3600)], capture_output=True, text=True, check=False
        )
        assert expired.returncode == 1
        assert "IP Address:10.77.0.1" in expired.stdout
    subprocess.run(
        ["openssl", "verify", "-CAfile", tls["ca"], tls["cert"]], capture_output=True, check=True
    )
    with pytest.raises(subprocess.CalledProcessError):
        make_certificates(folder)


def test_a_job_with_its_certificate(tls, address, tmp_path):
    job = write_job(
        tmp_path / "job",
        lake(tmp_path / "in", [400] * 4),
        tmp_path / "out",
        cluster={"kind": "address", "address": address, "tls": tls},
    )
    ended = call_cli("run", job)
    assert ended.returncode == 0, ended.stderr
    run_here(job, output__path=tmp_path / "quiet", cluster="{kind: synchronous}")
    assert digests(tmp_path / "out") == digests(tmp_path / "quiet")


def upload(source, beside):
    """Copy a folder into the bucket of a URL, and return where it is."""
    fs, path = open_filesystem(beside)
    bucket = path.partition("/")[0]
    fs.put(str(source), f"{bucket}/in", recursive=True)
    return f"s3://{bucket}/in"


REFUSED = "do not accept each other's certificates; let one authority sign both"


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "how",
    [
        "none",
        "of another authority",
        "signed by another authority",
        "missing",
        "of another key",
        "in plain text",
    ],
)
def test_a_client_without_a_right_certificate_is_one_line(how, tls, other, address, tmp_path):
    block, code, says = {
        "none": ({}, 64, "a tls:// address needs certificates; give cluster.tls: {ca, cert, key}"),
        "of another authority": ({"tls": other}, 64, REFUSED),
        "signed by another authority": ({"tls": {**other, "ca": tls["ca"]}}, 64, REFUSED),
        "missing": (
            {"tls": {**tls, "cert": str(tmp_path / "no.pem")}},
            64,
            "cluster.tls: the certificate's files cannot be used; ",
        ),
        "of another key": (
            {"tls": {**tls, "key": other["key"]}},
            64,
            "cluster.tls: the certificate's files cannot be used; ",
        ),
        "in plain text": (
            {"address": address.replace("tls", "tcp")},
            75,
            "the scheduler closed the connection; it may ask for a certificate",
        ),
    }[how]
    job = write_job(
        tmp_path / "job",
        lake(tmp_path / "in", [40]),
        tmp_path / "out",
        cluster={"kind": "address", "address": address, **block},
    )
    began = time.monotonic()
    ended = (run_cli if how == "none" else call_cli)(
        "run", job
    )  # it is at the end of the process that a lost client would complain
    assert time.monotonic() - began < MOST
    lines = [line for line in ended.stderr.splitlines() if not line.startswith("{")]
    assert (ended.returncode, len(lines)) == (code, 1), ended.stderr
    assert says in lines[0]
    assert not (tmp_path / "out").exists()


@pytest.mark.more
def test_a_scheduler_that_is_silent_is_given_up_in_time(tls, tmp_path):
    """It takes the connection and says nothing."""
    with socket.socket() as silent, dask.config.set({"distributed.comm.timeouts.connect": "1s"}):
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        port = silent.getsockname()[1]
        for cluster in (
            Address(address=f"tls://127.0.0.1:{port}", tls=Tls(**tls)),
            Address(address=f"tcp://127.0.0.1:{port}"),
        ):
            began = time.monotonic()
            with pytest.raises(TemporaryError, match="cannot be reached"), open_cluster(cluster):
                pass
            assert time.monotonic() - began < 30
        with (
            pytest.raises(SpecError, match="certificates need a tls:// address"),
            open_cluster(cluster.model_copy(update={"tls": Tls(**tls)})),
        ):
            pass


@pytest.mark.matrix("host cut off", "{where}, {seconds} s")
@pytest.mark.skipif(bool(hosts.why_not()), reason=hosts.why_not())
@pytest.mark.slow
@pytest.mark.parametrize(("seconds", "where"), [(2, "local"), (60, "local"), (60, "radosgw")])
def test_a_host_that_is_cut_off_and_healed(seconds, where, tls, open_store, tmp_path):
    """The scheduler and the driver are on h1, workers on all three; h3 is cut off while shards are written."""
    source = lake(tmp_path / "in", [3000] * 10, row_group=1000)
    with open_store(where) as store, hosts.running() as network, ExitStack() as stack:
        env, input_ = (
            environment(Path(tls["ca"]).parent) | {"XDG_STATE_HOME": str(tmp_path / "state")},
            str(source),
        )
        if store.server is not None:
            input_ = upload(source, store.folder.url)
            there = stack.enter_context(proxying(store.server.endpoint, network.listen(1, 7480)))
            env |= store.server.environment(there.endpoint)
        words = [
            sys.executable,
            "-m",
            "distributed.cli.dask_scheduler",
            "--protocol",
            "tls",
            "--host",
            network.address(1),
            "--port",
            "8786",
            *QUIET,
        ]
        stack.enter_context(running([*network.inside(1), *words], tmp_path / "scheduler.log", env))
        for number in (1, 2, 3):
            listens = ("--protocol", "tls", "--host", network.address(number))
            worker = worker_words("tls://10.77.0.1:8786", *listens)
            stack.enter_context(
                running([*network.inside(number), *worker], tmp_path / f"worker-{number}.log", env)
            )
        block = {"kind": "address", "address": "tls://10.77.0.1:8786", "tls": tls}
        changed = {
            "input__path": input_,
            "output__path": store.folder.url,
            "output__rows_per_shard": 1000,
            "cluster": block,
        }
        job = write_job(tmp_path / "job", source, tmp_path, **changed)
        wait = "from distributed import Client\nwith Client('tls://10.77.0.1:8786') as client: client.wait_for_workers(3, timeout=100)"
        subprocess.run([*network.inside(1), sys.executable, "-c", wait], env=env, check=True)
        said = ""
        with subprocess.Popen(
            [*network.inside(1), *command("run", job)],
            env=env,
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        ) as driver:
            assert driver.stderr is not None
            for line in driver.stderr:
                said += line
                if (
                    '"stage": "write", "done": 0,' in line
                ):  # a log has few lines: this one, and later ones after seconds
                    time.sleep(0.3)
                    network.cut(3)
                    time.sleep(seconds)
                    network.heal(3)
            assert driver.wait(timeout=280) == 0, said
        assert [line for line in said.splitlines() if not line.startswith("{")] == []
        quiet = run_here(
            job, output__path=tmp_path / "quiet", cluster="{kind: synchronous}"
        ).manifest
        manifest = Manifest.read(store.folder)
        assert manifest is not None
        assert [shard.sha256 for shard in manifest.shards] == [
            shard.sha256 for shard in quiet.shards
        ]
