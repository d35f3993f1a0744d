"""The `cluster:` block of a job: each kind has its own fields, what is wrong is one line, and the job's digest does not count it."""

import re

import pytest
import yaml
from connect.processes import ROOT
from e2e.helpers import call_cli, error_line, lake, load, write_job

from dpdask.connect import check_cluster, open_cluster
from dpdask.connect.private import find_lifetime
from dpdask.connect.spec import (
    Address,
    Gateway,
    Kubernetes,
    Local,
    Slurm,
    Synchronous,
    Threads,
    Tls,
)
from dpdask.errors import SpecError

TLS = {"ca": "tls/ca.pem", "cert": "tls/client.pem", "key": "/secret/client-key.pem"}
GATEWAY = {"kind": "gateway", "address": "https://gateway:8000", "workers": 2}
SLURM = {"kind": "slurm", "workers": 2, "memory": "4GB"}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return lake(tmp_path_factory.mktemp("lake") / "in", [40])


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        ({}, Threads()),
        ({"workers": 2}, Threads(workers=2)),
        ({"kind": "threads", "workers": 2}, Threads(workers=2)),
        ({"kind": "synchronous"}, Synchronous()),
        ({"kind": "local", "workers": 2, "threads_per_worker": 1}, Local(workers=2)),
        (
            {"kind": "address", "address": "tcp://h:1", "insecure": True},
            Address(address="tcp://h:1", insecure=True),
        ),
        (
            {"kind": "slurm", "workers": 2, "memory": "4GB", "walltime": 43200},
            Slurm(workers=2, memory="4GB", walltime="12:00:00"),
        ),
        (
            {**GATEWAY, "options": {"image": "i", "cores": 2}},
            Gateway(address="https://gateway:8000", workers=2, options={"image": "i", "cores": 2}),
        ),
    ],
)
def test_what_is_a_cluster(block, expected, source, tmp_path):
    job = load(write_job(tmp_path, source, tmp_path / "out", cluster=block))
    assert job.file.cluster == expected
    assert job.digest == load(write_job(tmp_path, source, tmp_path / "out")).digest


@pytest.mark.parametrize(
    ("block", "says"),
    [
        ({"kind": "slrum"}, "cluster.kind: there is no kind 'slrum' here; did you mean 'slurm'?"),
        ({"kind": "threads", "insecure": True}, "unknown key 'cluster.insecure'"),
        ({"insecure": True}, "unknown key 'cluster.insecure'"),
        ({"kind": "synchronous", "workers": 2}, "unknown key 'cluster.workers'"),
        ({"kind": "local", "workers": 0}, ", cluster.workers: at least 1 is expected, not 0"),
        ({"kind": "local", "threads_per_worker": 0}, "cluster.threads_per_worker: "),
        ({"kind": "local", "worker": 2}, "unknown key 'cluster.worker'; did you mean 'workers'?"),
        (
            {"kind": "address", "insecure": "yes"},
            ", cluster.insecure: true or false is expected, not 'yes'",
        ),
        (
            {"kind": "address", "address": "tls://h:1", "tls": {"ca": "a", "cert": "b"}},
            "the key 'cluster.tls.key' is missing",
        ),
        ({"kind": "slurm", "workers": 2}, "the key 'cluster.memory' is missing"),
        (
            {"kind": "slurm", "memory": "4GB"},
            ", cluster: give either workers, a fixed number, or adaptive: {minimum, maximum}",
        ),
        (
            {**SLURM, "adaptive": {"maximum": 2}},
            ", cluster: give either workers, a fixed number, or adaptive: {minimum, maximum}",
        ),
        (
            {"kind": "slurm", "memory": "4GB", "adaptive": {"minimum": 3, "maximum": 2}},
            ", cluster.adaptive: minimum is above maximum",
        ),
        (
            {**SLURM, "memory": "much"},
            ", cluster.memory: a size such as 4GB is expected, not 'much'",
        ),
        (
            {**SLURM, "walltime": "1h"},
            ", cluster.walltime: a time such as 01:00:00 or 1-00:00:00 is expected, not '1h'",
        ),
        ({**SLURM, "walltime": "00:01:30"}, ", cluster: walltime is below two minutes"),
        ({**SLURM, "partition": "a; rm"}, ", cluster.partition: "),
        ({"kind": "gateway", "address": "gateway:8000", "workers": 2}, ", cluster.address: "),
        (
            {"kind": "kubernetes", "manifest": "cluster.yaml", "namespace": "dpdask", "workers": 2},
            "the key 'cluster.tls' is missing",
        ),
    ],
)
def test_what_is_no_cluster_is_refused_in_one_line(block, says, source, tmp_path):
    refused = call_cli("validate", write_job(tmp_path, source, tmp_path / "out", cluster=block))
    assert refused.returncode == 64
    assert says in error_line(refused)


def test_paths_are_relative_to_the_jobs_folder(source, tmp_path):
    def placed(block):
        return load(write_job(tmp_path, source, tmp_path / "out", cluster=block)).cluster

    tls = Tls(
        ca=str(tmp_path / "tls/ca.pem"),
        cert=str(tmp_path / "tls/client.pem"),
        key="/secret/client-key.pem",
    )
    assert placed({"kind": "address", "address": "tls://h:1", "tls": TLS}).tls == tls
    pods = placed(
        {
            "kind": "kubernetes",
            "manifest": "cluster.yaml",
            "namespace": "dpdask",
            "workers": 2,
            "tls": TLS,
        }
    )
    assert (pods.tls, pods.manifest) == (tls, str(tmp_path / "cluster.yaml"))
    assert placed({**SLURM, "shared_folder": "shared"}).shared_folder == str(tmp_path / "shared")


@pytest.mark.parametrize(
    ("kind", "package", "block"),
    [
        ("slurm", "dask_jobqueue", Slurm(workers=2, memory="4GB")),
        ("gateway", "dask_gateway", Gateway(address="https://gateway", workers=2)),
        ("kubernetes", "dask_kubernetes.operator._objects", None),
    ],
)
def test_a_package_that_is_not_installed_is_one_line(kind, package, block, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, package, None)  # as if it were not installed
    manifest = tmp_path / "cluster.yaml"
    manifest.write_text(
        "{kind: DaskCluster, metadata: {name: a}, spec: {worker: {spec: {containers: []}}, scheduler: {service: {}}}}"
    )
    block = block or Kubernetes(manifest=str(manifest), namespace="n", workers=1, tls=Tls(**TLS))
    with (
        pytest.raises(SpecError, match=rf"is not installed; install dpdask\[{kind}\]"),
        open_cluster(block),
    ):
        pass


def test_a_gateway_is_asked_by_https():
    open_ = Gateway(address="http://user:password@gateway:8000", workers=1)
    with pytest.raises(
        SpecError,
        match=r"http://\*\*\*@gateway:8000: without https, .*; use https://, or a cluster of kind gateway with",
    ):
        check_cluster(open_)
    [warning] = check_cluster(open_.model_copy(update={"insecure": True}))
    assert "password@" not in warning
    assert check_cluster(Gateway(address="http://127.0.0.1:8000", workers=1)) == ()
    assert check_cluster(Gateway(address="https://gateway", workers=1)) == ()


@pytest.mark.parametrize("walltime", ["00:02:00", "00:30:00", "01:00:00", "2-12:00:00"])
def test_a_worker_ends_before_its_walltime(walltime):
    seconds = Slurm(workers=1, memory="1GB", walltime=walltime).walltime_seconds
    lifetime, stagger = find_lifetime(seconds)
    assert 0.7 * seconds <= lifetime - stagger
    assert lifetime + stagger <= seconds - min(seconds / 10, 150)


@pytest.mark.parametrize("kind", ["gateway", "kubernetes", "slurm"])
def test_the_blocks_of_the_readmes(kind, source, tmp_path):
    [text] = re.findall(
        r"```yaml\n(cluster:\n.*?)```",
        (ROOT / "cluster" / kind / "README.md").read_text(),
        re.DOTALL,
    )
    job = load(write_job(tmp_path, source, tmp_path / "out", **yaml.safe_load(text)))
    assert job.file.cluster.kind == kind
