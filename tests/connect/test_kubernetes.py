"""The manifests of cluster/kubernetes: valid for Kubernetes, for the operator's own resource types, and for what the operator makes of them."""

import importlib.resources
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import jsonschema
import pytest
import yaml
from connect.processes import ROOT, make_certificates, running, scheduler, worker_words
from distributed import Client
from e2e.helpers import command, lake, write_job
from kubernetes_validate import ValidationError, latest_version, validate
from services import kubernetes

from dpdask.connect.private import make_resource
from dpdask.connect.spec import Kubernetes, Tls
from dpdask.errors import SpecError

FOLDER = ROOT / "cluster" / "kubernetes"
TLS = Tls(ca="/tls/ca.pem", cert="/tls/client.pem", key="/tls/client-key.pem")
BLOCK = Kubernetes(manifest=str(FOLDER / "cluster.yaml"), namespace="dpdask", workers=7, tls=TLS)
POD = {"DPDASK_POD_NAME": "dpdask-run-x7", "DPDASK_POD_UID": "6f1c", "DPDASK_POD_JOB": "dpdask-run"}
MANIFESTS = sorted(path for path in FOLDER.glob("*.yaml") if path.name != "cluster.yaml")


@pytest.fixture(autouse=True)
def _in_no_pod(monkeypatch):
    for name in POD:
        monkeypatch.delenv(name, raising=False)


def check_keys(resource):
    """Raise unless Kubernetes knows every key of a resource."""
    validate(resource, latest_version(), strict=True)


def read_all(name):
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def test_kubernetes_knows_every_key():
    [job] = read_all("job.yaml")
    metadata = {**job["metadata"], "name": "made"}  # which the API server does, of `generateName`
    assert metadata.pop("generateName") == "dpdask-run-"
    others = [each for path in MANIFESTS if path.name != "job.yaml" for each in read_all(path.name)]
    for each in ({**job, "metadata": metadata}, *others):
        check_keys(each)
        with pytest.raises(ValidationError):
            check_keys({**each, "wrong": 1})


def resource_type():
    """The schema of a DaskCluster, as the operator installs it."""
    chart = (
        importlib.resources.files("dask_kubernetes")
        / "operator/deployment/helm/dask-kubernetes-operator/crds/daskcluster.yaml"
    )
    definition = yaml.safe_load(chart.read_text())
    return definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]


ROUTES = "DASK_DISTRIBUTED__SCHEDULER__HTTP__ROUTES"


def find_port():
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return opened.getsockname()[1]


def strict(schema):
    """A schema that refuses keys that it does not name: the API server would drop them in silence."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: strict(value) for key, value in schema.items()}
    if (
        isinstance(made.get("properties"), dict)
        and "additionalProperties" not in made
        and not made.get("x-kubernetes-preserve-unknown-fields")
    ):
        made["additionalProperties"] = False
    return made


def test_the_cluster_is_what_the_operator_expects():
    schema = strict(resource_type()["properties"]["spec"])
    resource = make_resource(BLOCK)
    jsonschema.validate(resource["spec"], schema)
    assert resource["spec"]["idleTimeout"] == 3600
    resource["spec"]["worker"]["spec"]["containers"][0]["imge"] = "a"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(resource["spec"], schema)


def test_what_the_operator_makes_of_it_is_valid():
    """Its own functions, on our resource: the scheduler's and a worker's deployment, and the service."""
    from dask_kubernetes.operator.controller import controller

    resource = make_resource(BLOCK)
    name, scheduler, worker = (
        resource["metadata"]["name"],
        resource["spec"]["scheduler"],
        resource["spec"]["worker"],
    )
    made = [
        controller.build_scheduler_deployment_spec(name, scheduler["spec"], {}, {}),
        controller.build_scheduler_service_spec(name, scheduler["service"], {}, {}),
        controller.build_worker_deployment_spec(
            f"{name}-default", "dpdask", name, "abc", worker["spec"], {}, {}
        ),
    ]
    for each in made:
        check_keys(each)
    labels = made[0]["spec"]["template"]["metadata"]["labels"]
    assert made[1]["spec"]["selector"].items() <= labels.items()
    [container] = made[2]["spec"]["template"]["spec"]["containers"]
    addresses = [
        each["value"] for each in container["env"] if each["name"] == "DASK_SCHEDULER_ADDRESS"
    ]
    assert addresses == [
        f"tls://{made[1]['metadata']['name']}.dpdask:8786"
    ]  # not the operator's own, which is tcp://


def test_two_runs_have_two_clusters():
    first = make_resource(BLOCK)
    assert len({make_resource(BLOCK)["metadata"]["name"] for _ in range(3)}) > 1
    assert re.fullmatch(r"dpdask-[0-9a-f]{5}", first["metadata"]["name"])
    assert first["spec"]["worker"]["replicas"] == 7


def test_the_pod_of_the_driver_owns_the_cluster(monkeypatch):
    """So that it goes with the pod; and the next pod of the same Job finds what a killed one left."""
    assert {"ownerReferences", "labels"}.isdisjoint(make_resource(BLOCK)["metadata"])
    for name, value in POD.items():
        monkeypatch.setenv(name, value)
    metadata = make_resource(BLOCK)["metadata"]
    assert metadata["labels"] == {"dpdask.org/job": "dpdask-run"}
    owner = {"apiVersion": "v1", "kind": "Pod", "name": "dpdask-run-x7", "uid": "6f1c"}
    assert metadata["ownerReferences"] == [owner]
    [job] = read_all("job.yaml")
    [container] = job["spec"]["template"]["spec"]["containers"]
    named = {each["name"]: each.get("valueFrom", {}).get("fieldRef") for each in container["env"]}
    assert {name for name, field in named.items() if field} == set(POD)


def test_the_job_of_every_day_is_the_job():
    [job], [daily] = read_all("job.yaml"), read_all("cronjob.yaml")
    assert daily["spec"]["jobTemplate"]["spec"] == job["spec"]
    assert daily["spec"]["concurrencyPolicy"] == "Forbid"


def test_the_keys_of_unfinished_runs_outlast_a_pod():
    [job], [claim] = read_all("job.yaml"), read_all("state.yaml")
    pod = job["spec"]["template"]["spec"]
    [container] = pod["containers"]
    home = {each["name"]: each.get("value") for each in container["env"]}["XDG_STATE_HOME"]
    [volume] = [each["name"] for each in container["volumeMounts"] if each["mountPath"] == home]
    [kept] = [each for each in pod["volumes"] if each["name"] == volume]
    assert kept["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    codes = job["spec"]["podFailurePolicy"]["rules"][1]["onExitCodes"]
    assert (codes["operator"], codes["values"]) == ("NotIn", [75, 130, 137, 143])


def test_the_commands_of_the_readme_work_a_second_time():
    """Nothing is created under a name that is there, and no finished Job is changed."""
    blocks = re.findall(r"```bash\n(.*?)```", (FOLDER / "README.md").read_text(), re.DOTALL)
    [each_run] = [block for block in blocks if "kubectl create -f -" in block]
    for line in each_run.splitlines():
        if "kubectl" in line and "create configmap" in line:
            assert "--dry-run=client -o yaml | kubectl apply -f -" in line
        elif "kubectl create" in line:
            assert "job.yaml" in line
        assert "apply -f cluster/kubernetes/job.yaml" not in line
    applied = {name for block in blocks for name in re.findall(r"kubernetes/(\w+\.yaml)", block)}
    assert applied == {path.name for path in FOLDER.glob("*.yaml")}


def test_a_scheduler_serves_since_when_it_is_idle_and_nothing_else(tmp_path):
    [scheduler_] = make_resource(BLOCK)["spec"]["scheduler"]["spec"]["containers"]
    routes = {each["name"]: each.get("value") for each in scheduler_["env"]}[ROUTES]
    port = find_port()
    words = ["--host", "127.0.0.1", "--dashboard-address", f"127.0.0.1:{port}"]
    with scheduler(tmp_path, *words, prefix=("env", f"{ROUTES}={routes}")) as (_, address):

        def ask(page):
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}{page}") as answer:
                    return json.loads(answer.read())
            except urllib.error.HTTPError:
                return None

        began = time.time()
        ask("/api/v1/check_idle")  # the first answer may be that it has just begun
        found = ask("/api/v1/check_idle")
        assert set(found) == {"idle_since"}
        assert found["idle_since"] <= began + 60
        for page in ("/", "/status", "/json/identity.json", "/info/main/workers.html", "/metrics"):
            assert ask(page) is None
        for page in ("/api/v1", "/api/v1/get_workers", "/api/v1/retire_workers", "/health"):
            assert ask(page) is None
        with (
            Client(address, set_as_default=False) as client,
            running(worker_words(address), tmp_path / "worker.log"),
        ):
            busy = client.submit(time.sleep, 600)
            client.wait_for_workers(1, timeout=120)
            for _ in range(100):
                if ask("/api/v1/check_idle")["idle_since"] is None:
                    break
                time.sleep(0.1)
            assert ask("/api/v1/check_idle") == {"idle_since": None}
            busy.cancel()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "the manifest cannot be read; check cluster.manifest"),
        (
            "kind: Job",
            "this is not a DaskCluster with a name and workers; begin with cluster/kubernetes/cluster.yaml",
        ),
        ("{kind: DaskCluster, metadata: {name: a}, spec: 1}", "this is not a DaskCluster"),
        ("[", "the manifest cannot be read"),
    ],
)
def test_what_is_no_cluster(text, says, tmp_path):
    if text is not None:
        (tmp_path / "cluster.yaml").write_text(text)
    with pytest.raises(SpecError, match=says):
        make_resource(BLOCK.model_copy(update={"manifest": str(tmp_path / "cluster.yaml")}))


def test_secrets_stand_nowhere_but_by_name():
    for path in FOLDER.glob("*.yaml"):
        assert not re.search(r"PRIVATE KEY|password:|kind: Secret", path.read_text()), path.name


def test_every_pod_is_covered_by_the_network_policies():
    policies = list(yaml.safe_load_all((FOLDER / "network.yaml").read_text()))
    assert policies[0]["spec"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    [job] = read_all("job.yaml")
    driver = job["spec"]["template"]["metadata"]["labels"]
    allowed = [
        peer["podSelector"]["matchLabels"] for peer in policies[1]["spec"]["ingress"][0]["from"]
    ]
    assert driver in allowed


@pytest.fixture(scope="module")
def tls(tmp_path_factory):
    return make_certificates(tmp_path_factory.mktemp("tls") / "tls")


@pytest.fixture
def job(tls, tmp_path):
    """A job on pods whose scheduler never comes: no operator acts here."""
    block = {"kind": "kubernetes", "manifest": str(FOLDER / "cluster.yaml"), "namespace": "dpdask"}
    block |= {"workers": 2, "tls": tls, "patience_minutes": 0.02}
    return write_job(tmp_path / "job", lake(tmp_path / "in", [40]), tmp_path / "out", cluster=block)


def leave(server, name, job):
    """Have a cluster that the pod of a Job has left."""
    metadata = {"name": name, "namespace": "dpdask", "labels": {"dpdask.org/job": job}}
    kind = {"apiVersion": "kubernetes.dask.org/v1", "kind": "DaskCluster"}
    server.clusters[name] = {**kind, "metadata": metadata, "spec": {}}


# as the API server: what is created must be new, and a Job never changes
KUBECTL = f"""#!{sys.executable}
import json, sys, yaml
from pathlib import Path
words, kept = [each for each in sys.argv[1:] if each not in ("-n", "dpdask")], Path(__file__).parent / "kept"
if words[0] == "logs":
    assert (kept / words[-1].replace("/", " ")).exists()
    raise SystemExit
if words[:2] == ["create", "configmap"]:
    assert "--dry-run=client" in words
    data = {{Path(each[12:]).name: Path(each[12:]).read_text() for each in words if each.startswith("--from-file=")}}
    print(json.dumps({{"apiVersion": "v1", "kind": "ConfigMap", "metadata": {{"name": words[2]}}, "data": data}}))
    raise SystemExit
for given in yaml.safe_load_all(sys.stdin):
    metadata = given["metadata"]
    metadata.setdefault("name", metadata.pop("generateName", "") + f"{{len([*kept.iterdir()]):05d}}")
    place = kept / f"{{given['kind'].lower()}} {{metadata['name']}}"
    assert not place.exists() or (words[0] == "apply" and given["kind"] != "Job"), "AlreadyExists"
    place.write_text(json.dumps(given))
    print(place.name.replace(" ", "/"))
"""


def test_two_jobs_one_after_another_by_the_readme(job, tmp_path):
    """Both drivers make a cluster that the operator takes, with a name and an owner of its own, and remove it."""
    (tmp_path / "bin" / "kept").mkdir(parents=True)
    (tmp_path / "bin" / "kubectl").write_text(KUBECTL)
    (tmp_path / "bin" / "kubectl").chmod(0o755)
    (tmp_path / "cluster").symlink_to(ROOT / "cluster")
    for name in ("job.yaml", "schema.yaml"):
        (tmp_path / name).write_text((job.parent / name).read_text())
    blocks = re.findall(r"```bash\n(.*?)```", (FOLDER / "README.md").read_text(), re.DOTALL)
    [each_run] = [block for block in blocks if "kubectl create -f -" in block]
    schema = strict(resource_type()["properties"]["spec"])
    with kubernetes.serving(tmp_path) as (server, around):
        for number in (1, 2):
            around |= {
                "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
                "image": f"r/dpdask:{number}",
            }
            script = ["bash", "-euo", "pipefail", "-c", each_run]
            subprocess.run(script, cwd=tmp_path, env={**os.environ, **around}, check=True)
            made = sorted((tmp_path / "bin" / "kept").glob("job *"))
            assert len(made) == number
            given = json.loads(made[-1].read_text())
            check_keys(given)
            [container] = given["spec"]["template"]["spec"]["containers"]
            assert container["image"] == f"r/dpdask:{number}"
            [content] = (tmp_path / "bin" / "kept").glob("configmap *")
            files = json.loads(content.read_text())["data"]
            place = tmp_path / f"pod-{number}"  # with the files of the config map
            place.mkdir()
            for name, text in files.items():
                (place / name).write_text(text)
            name = given["metadata"]["name"]
            pod = {
                "DPDASK_POD_NAME": f"{name}-x",
                "DPDASK_POD_UID": f"uid-{number}",
                "DPDASK_POD_JOB": name,
            }
            words = command(
                "run", place / "job.yaml", "--set", f"cluster.manifest={place / 'cluster.yaml'}"
            )
            ended = subprocess.run(
                words,
                env={**os.environ, **around, **pod},
                capture_output=True,
                text=True,
                check=False,
            )
            assert (ended.returncode, len(server.made), server.clusters) == (75, number, {}), (
                ended.stderr
            )
    for number, cluster in enumerate(server.made, 1):
        jsonschema.validate(cluster["spec"], schema)
        assert f"r/dpdask:{number}" in json.dumps(cluster["spec"])
        assert cluster["metadata"]["ownerReferences"][0]["uid"] == f"uid-{number}"
    assert len({each["metadata"]["name"] for each in server.made}) == 2


@pytest.mark.matrix("machine lost", "the pod of a driver")
def test_a_run_removes_its_cluster_and_what_a_killed_pod_of_its_job_has_left(job, tmp_path):
    with kubernetes.serving(tmp_path) as (server, environment):
        leave(server, "dpdask-killed", "dpdask-run")
        leave(server, "dpdask-other", "another-run")
        words = {"capture_output": True, "text": True, "check": False}
        ended = subprocess.run(
            command("run", job), env={**os.environ, **environment, **POD}, **words
        )
        assert (ended.returncode, "the scheduler cannot be reached" in ended.stderr) == (75, True)
        [made] = server.made
        assert made["metadata"]["labels"] == {"dpdask.org/job": "dpdask-run"}
        assert made["metadata"]["ownerReferences"][0]["uid"] == "6f1c"
        assert set(server.clusters) == {"dpdask-other"}


@pytest.mark.matrix("SIGTERM", "Kubernetes")
def test_a_driver_that_is_terminated_removes_its_cluster(job, tmp_path):
    with kubernetes.serving(tmp_path) as (server, environment):
        words = command("run", job, "--set", "cluster.patience_minutes=10")
        around = {**os.environ, **environment}
        with subprocess.Popen(words, env=around, stderr=subprocess.PIPE, text=True) as driver:
            while not server.clusters:
                assert driver.poll() is None
                time.sleep(0.05)
            driver.terminate()
            assert driver.stderr is not None
            last = driver.stderr.read().splitlines()[-1]
            assert (driver.wait(60), last) == (143, "dpdask: terminated; run again to resume")
        assert (len(server.made), server.clusters) == (1, {})
