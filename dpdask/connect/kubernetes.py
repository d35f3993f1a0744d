"""Workers as pods: a DaskCluster resource is created for the run, and the operator of dask-kubernetes acts on it.

`dask_kubernetes.operator.KubeCluster` is not used: it speaks to its scheduler without TLS.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

from dpdask.connect.address import import_extra, make_security, open_client, silence_dask
from dpdask.connect.spec import Kubernetes
from dpdask.errors import SpecError, TemporaryError

_PORT = 8786
_POLL_SECONDS = 1.0


@contextmanager
def open_workers(cluster: Kubernetes) -> Iterator[str]:
    """Run the block on workers that are pods; yield a description of them."""
    resource = make_resource(cluster)
    objects = import_extra("dask_kubernetes.operator._objects", "kubernetes")
    kr8s = import_extra("kr8s", "kubernetes")
    security = make_security(cluster.tls)
    address = _address(resource["metadata"]["name"], cluster.namespace)
    with silence_dask():
        try:
            asyncio.run(_create(objects, resource, cluster.namespace))
        except (kr8s.ServerError, ValueError):
            raise SpecError(
                "the API server refuses the DaskCluster",
                cluster.manifest,
                "check it, and the rights of this account",
            ) from None
        except (kr8s.APITimeoutError, kr8s.ConnectionClosedError, OSError):
            raise TemporaryError(
                "the API server does not answer", f"namespace {cluster.namespace}", "run again"
            ) from None
        try:
            with open_scheduler(address, security, 60 * cluster.patience_minutes):
                yield f"pods in the namespace {cluster.namespace}"
        finally:
            with suppress(
                Exception
            ):  # the operator removes an idle cluster too, if the manifest says so
                asyncio.run(_delete(objects, resource, cluster.namespace))


def make_resource(cluster: Kubernetes) -> dict[str, Any]:
    """Return the DaskCluster of a manifest, with the block's number of workers and a name of its own."""
    try:
        resource: dict[str, Any] = yaml.safe_load(
            Path(cluster.manifest).read_text(encoding="utf-8")
        )  # as the operator reads it: 0440 is a mode
        if resource["kind"] != "DaskCluster" or not isinstance(resource["metadata"]["name"], str):
            raise KeyError
        name = f"{resource['metadata']['name']}-{uuid.uuid4().hex[:5]}"  # several runs may be at work in one namespace
        resource["metadata"]["name"] = name
        resource["spec"]["worker"]["replicas"] = cluster.workers
        resource["spec"]["scheduler"]["service"]["selector"] = {
            "dask.org/cluster-name": name,
            "dask.org/component": "scheduler",
        }
        for container in resource["spec"]["worker"]["spec"]["containers"]:
            # the operator would name a tcp:// address
            container["env"] = [
                *container.get("env", []),
                {"name": "DASK_SCHEDULER_ADDRESS", "value": _address(name, cluster.namespace)},
            ]
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        raise SpecError(
            "the manifest cannot be read", cluster.manifest, "check cluster.manifest"
        ) from None
    except (KeyError, TypeError):
        raise SpecError(
            "this is not a DaskCluster with a name and workers",
            cluster.manifest,
            "begin with cluster/kubernetes/cluster.yaml",
        ) from None
    return resource


@contextmanager
def open_scheduler(address: str, security: Any, seconds: float) -> Iterator[None]:
    """Run the block on a scheduler that may still be starting."""
    end = time.monotonic() + seconds
    with ExitStack() as stack:
        while True:
            try:
                stack.enter_context(open_client(address, security))
                break
            except TemporaryError:
                if time.monotonic() > end:
                    raise
            time.sleep(_POLL_SECONDS)
        yield


def _address(name: str, namespace: str) -> str:
    return f"tls://{name}-scheduler.{namespace}:{_PORT}"


async def _create(objects: Any, resource: dict[str, Any], namespace: str) -> None:
    await (await objects.DaskCluster(resource, namespace=namespace)).create()


async def _delete(objects: Any, resource: dict[str, Any], namespace: str) -> None:
    await (await objects.DaskCluster(resource, namespace=namespace)).delete()
