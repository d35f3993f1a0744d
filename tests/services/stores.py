"""Fixtures of real stores: a folder on the local disk, radosgw (S3) and azurite (Azure), each behind a proxy that counts and fails."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import dask
import fsspec
import pytest
from fsspec.asyn import sync

from dpdask.io.storage import Folder, open_filesystem
from services import azurite, radosgw
from services.proxy import Proxy, proxying
from services.supervisor import CannotServeError, ask

SERVERS = {"radosgw": radosgw, "azurite": azurite}
_CLASSES = {"radosgw": "s3", "azurite": "abfs"}


@dataclass(frozen=True)
class Server:
    """A store that runs: where it is, and where its proxy is."""

    name: str
    endpoint: str
    proxy: Proxy

    def environment(self, endpoint=None, user="lake"):
        """Return the variables that lead to the server, through its proxy unless an endpoint is given."""
        endpoint = endpoint or self.proxy.endpoint
        if self.name == "radosgw":
            key, secret = radosgw.KEYS[user]
            # without the last, a process without keys asks the machine's cloud for some
            names = {
                "AWS_ACCESS_KEY_ID": key,
                "AWS_SECRET_ACCESS_KEY": secret,
                "AWS_ENDPOINT_URL": endpoint,
            }
            return names | {"AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true"}
        account = f"AccountName={azurite.ACCOUNT};AccountKey={azurite.KEY};BlobEndpoint={endpoint}/{azurite.ACCOUNT};"
        return {"AZURE_STORAGE_CONNECTION_STRING": f"DefaultEndpointsProtocol=http;{account}"}

    def make_bucket(self, *, versioned=False):
        """Return the URL of a new bucket or container; the environment leads to the server."""
        bucket = f"lake-{uuid.uuid4().hex[:12]}"
        url = f"s3://{bucket}" if self.name == "radosgw" else f"az://{bucket}"
        fs, _ = open_filesystem(url)
        fs.mkdir(bucket)
        if versioned:
            fs.call_s3(
                "put_bucket_versioning",
                Bucket=bucket,
                VersioningConfiguration={"Status": "Enabled"},
            )
        return url


@dataclass(frozen=True)
class Store:
    """A folder that does not exist yet, on a store that this test has for itself.

    Attributes
    ----------
    folder
        The folder.
    server
        The server behind it; None for the local disk.
    """

    folder: Folder
    server: Server | None

    @property
    def proxy(self):
        """The proxy of the server; the local disk has none."""
        assert self.server is not None
        return self.server.proxy


def everything_ever_written(store):
    """Return the path and the content of all versions of all files of the bucket."""
    fs, path = open_filesystem(store.folder.url)
    bucket = path.partition("/")[0]
    if store.server is not None and store.server.name != "radosgw":
        return [(name, fs.cat(name)) for name in fs.find(bucket)]
    page = fs.call_s3("list_object_versions", Bucket=bucket)
    assert not page["IsTruncated"]
    found = page.get("Versions", [])
    answers = [
        fs.call_s3("get_object", Bucket=bucket, Key=each["Key"], VersionId=each["VersionId"])[
            "Body"
        ]
        for each in found
    ]
    return [
        (each["Key"], sync(fs.loop, body.read)) for each, body in zip(found, answers, strict=True)
    ]


@contextmanager
def run_server(name, shared):
    """Yield a server that all test processes share; skip the test where it cannot be had."""
    reason = SERVERS[name].missing()
    if reason is not None:
        pytest.skip(reason)
    try:
        details, connection = ask(name, shared)
    except CannotServeError as error:
        pytest.skip(str(error))
    with connection, proxying(details["endpoint"]) as proxy:
        yield Server(name, details["endpoint"], proxy)


@contextmanager
def in_environment(variables):
    """Set variables, without those of the store that are set elsewhere, also for workers; file systems opened before are not used again."""
    spawned = dask.config.set(
        {"distributed.worker.multiprocessing-method": "spawn"}
    )  # with the environment of now
    with pytest.MonkeyPatch.context() as patch, spawned:
        for name in [
            name for name in os.environ if name.startswith(("AWS_", "AZURE_STORAGE_", "FSSPEC_"))
        ]:
            patch.delenv(name)
        for name, value in variables.items():
            patch.setenv(name, value)
        forget_file_systems()
        yield
    forget_file_systems()


def forget_file_systems():
    """Have all remote file systems opened anew, with the environment of that moment."""
    for classes in (fsspec.filesystem("memory").__class__, *_opened()):
        classes.clear_instance_cache()


def _opened():
    found = [fsspec.AbstractFileSystem]
    for class_ in found:
        found += class_.__subclasses__()
    return [
        class_
        for class_ in found
        if class_.__module__.partition(".")[0] in ("s3fs", "adlfs", "gcsfs")
        or class_.__name__ == "AzureFileSystem"
    ]


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory):
    """Return a folder that all processes of this test session share."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture(scope="session")
def radosgw_server(shared_folder):
    """Yield Ceph's S3 gateway."""
    with run_server("radosgw", shared_folder) as server:
        yield server


@pytest.fixture(scope="session")
def azurite_server(shared_folder):
    """Yield a server of Azure's blobs."""
    with run_server("azurite", shared_folder) as server:
        yield server


OpenStore = Callable[..., AbstractContextManager[Store]]


@pytest.fixture
def open_store(request, tmp_path):
    """Return a function that opens a store by name (`local`, `radosgw`, `azurite`) with the environment that leads there."""

    @contextmanager
    def open_(name, *, versioned=False):
        if name == "local":
            yield Store(Folder(f"file://{tmp_path}/lake/out"), None)
            return
        server = request.getfixturevalue(f"{name}_server")
        server.proxy.forget()
        with in_environment(server.environment()):
            folder = Folder(f"{server.make_bucket(versioned=versioned)}/deep/out")
            server.proxy.forget()
            yield Store(folder, server)

    return open_


@pytest.fixture(params=["local", "radosgw", "azurite"])
def store(request, open_store):
    """Yield each store in turn."""
    with open_store(request.param) as opened:
        yield opened


@pytest.fixture(params=["radosgw", "azurite"])
def remote_store(request, open_store):
    """Yield each store behind a proxy in turn."""
    with open_store(request.param) as opened:
        yield opened
