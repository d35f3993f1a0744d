"""The manifests of cluster/kubernetes: valid for Kubernetes, for the operator's own resource types, and for what the operator makes of them."""

from __future__ import annotations

import importlib.resources
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from connect.processes import ROOT

from dpdask.connect.private import make_resource
from dpdask.connect.spec import Kubernetes, Tls
from dpdask.errors import SpecError

FOLDER = ROOT / "cluster" / "kubernetes"
TLS = Tls(ca="/tls/ca.pem", cert="/tls/client.pem", key="/tls/client-key.pem")
BLOCK = Kubernetes(manifest=str(FOLDER / "cluster.yaml"), namespace="dpdask", workers=7, tls=TLS)
MANIFESTS = sorted(path for path in FOLDER.glob("*.yaml") if path.name != "cluster.yaml")


def is_valid(*paths):
    """Whether Kubernetes knows every key of the resources in files."""
    words = [
        str(Path(sys.executable).parent / "kubernetes-validate"),
        "--strict",
        "--quiet",
        *map(str, paths),
    ]
    return subprocess.run(words, check=False, capture_output=True).returncode == 0


def test_kubernetes_knows_every_key(tmp_path):
    assert is_valid(*MANIFESTS)
    (tmp_path / "wrong.yaml").write_text(MANIFESTS[0].read_text() + "\nwrong: 1\n")
    assert not is_valid(tmp_path / "wrong.yaml")


def resource_type():
    """The schema of a DaskCluster, as the operator installs it."""
    chart = (
        importlib.resources.files("dask_kubernetes")
        / "operator/deployment/helm/dask-kubernetes-operator/crds/daskcluster.yaml"
    )
    definition = yaml.safe_load(chart.read_text())
    schema: dict[str, Any] = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return schema


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
    resource["spec"]["worker"]["spec"]["containers"][0]["imge"] = "a"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(resource["spec"], schema)


def test_what_the_operator_makes_of_it_is_valid(tmp_path):
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
    (tmp_path / "made.yaml").write_text(yaml.safe_dump_all(made))
    assert is_valid(tmp_path / "made.yaml")
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
    driver = yaml.safe_load((FOLDER / "job.yaml").read_text())["spec"]["template"]["metadata"][
        "labels"
    ]
    allowed = [
        peer["podSelector"]["matchLabels"] for peer in policies[1]["spec"]["ingress"][0]["from"]
    ]
    assert driver in allowed
