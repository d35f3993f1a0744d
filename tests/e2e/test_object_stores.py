"""Jobs whose tables lie in object stores: the same bytes as on the local disk, with credentials by reference and few requests."""

import dask
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import write_deltalake
from distributed import Client
from e2e.helpers import RATINGS_SCHEMA, lake, load, processes, run_here, write_job
from pyiceberg.catalog.sql import SqlCatalog
from services.stores import in_environment

from dpdask.errors import InputError, SpecError
from dpdask.io import storage
from dpdask.io.fragments import discover, read_batches
from dpdask.io.lakes import find_options
from dpdask.io.shards import MANIFEST_NAME, list_manifests
from dpdask.io.storage import Folder, open_filesystem
from dpdask.jobs.plan import plan_job
from dpdask.jobs.run import run_job
from dpdask.page.pictures import MAX_PARTS

N_FRAGMENTS = 6


@pytest.fixture
def job(tmp_path):
    """A job on the local disk, and the folder of its input."""
    folder = lake(tmp_path / "lake", [300] * N_FRAGMENTS, row_group=300, schema=RATINGS_SCHEMA)
    return write_job(tmp_path, folder, tmp_path / "local", schema=RATINGS_SCHEMA)


def upload(job, store):
    """Put the job's input on a store, and return the settings that make the job read and write there."""
    url = store.folder.url
    fs, path = open_filesystem(url)
    for file in sorted((job.parent / "lake").iterdir()):
        fs.pipe_file(f"{path}/in/{file.name}", file.read_bytes())
    store.proxy.forget()
    return {"input__path": f"{url}/in", "output__path": f"{url}/out"}


def everything(url):
    """Return all files below a URL, by their place in it."""
    fs, path = open_filesystem(url)
    return {file.removeprefix(path): fs.cat_file(file) for file in fs.find(path)}


@pytest.mark.few(1)
def test_a_job_on_a_store_releases_the_bytes_of_the_local_disk(job, remote_store):
    run_here(job)
    settings = upload(job, remote_store)
    assert run_here(job, **settings).status == "released"
    local, remote = everything(f"file://{job.parent}/local"), everything(settings["output__path"])
    shards = [
        [found[name] for name in sorted(found) if name.endswith(".parquet")]
        for found in (local, remote)
    ]
    assert shards[0]
    assert shards[0] == shards[1]
    assert [
        name
        for name in everything(remote_store.folder.url)
        if not name.startswith(("/in/", "/out/"))
    ] == []  # nothing private is left
    assert run_here(job, **settings).status == "already released"


def by_reference(server):
    """A `storage:` block for a server, and the variables that it names."""
    found = server.environment()
    if server.name == "azurite":
        return {"az": {"connection_string": {"env": "LAKE_STRING"}}}, {
            "LAKE_STRING": found["AZURE_STORAGE_CONNECTION_STRING"]
        }
    block = {
        "endpoint_url": found["AWS_ENDPOINT_URL"],
        "key": {"env": "LAKE_KEY"},
        "secret": {"env": "LAKE_SECRET"},
    }
    return {"s3": block}, {
        "LAKE_KEY": found["AWS_ACCESS_KEY_ID"],
        "LAKE_SECRET": found["AWS_SECRET_ACCESS_KEY"],
        "AWS_EC2_METADATA_DISABLED": "true",
    }


@pytest.mark.more
@pytest.mark.slow_with("azurite")
def test_every_process_looks_its_own_secrets_up(job, remote_store, caplog):
    settings = upload(job, remote_store)
    storage, variables = by_reference(remote_store.server)
    settings["storage"] = storage
    loaded = load(job, **settings)
    with in_environment(variables), processes(1) as cluster, Client(cluster) as client:
        with dask.config.set(scheduler=client):
            assert run_job(loaded).status == "released"
        told = client.run(lambda: __import__("dpdask.io.filesystems").io.filesystems._ACTIVE)
        assert list(told.values()) == [loaded.stores]  # which its tasks brought
    released = everything(settings["output__path"])
    for secret in variables.values():
        if secret != "true":
            assert not any(secret.encode() in content for content in released.values())
            assert secret not in f"{loaded.file!r}{loaded.stores!r}{caplog.text}"
    assert load(job, **settings).digest == load(job, **{**settings, "storage": "{}"}).digest


@pytest.mark.few(1)
@pytest.mark.slow_with("radosgw-delta", "azurite-iceberg")
@pytest.mark.parametrize("table", ["delta", "iceberg"])
def test_tables_are_written_with_the_options_of_the_job(table, job, remote_store, tmp_path):
    settings = upload(job, remote_store) | {"output__format": table}
    storage, variables = by_reference(remote_store.server)
    settings["storage"] = storage
    if table == "iceberg":
        catalog = SqlCatalog("lake", uri=f"sqlite:///{tmp_path}/catalog.db")
        catalog.create_namespace("db")
        settings |= {
            "output__table": "db.ratings",
            "output__catalog": {
                "name": "lake",
                "type": "sql",
                "uri": f"sqlite:///{tmp_path}/catalog.db",
            },
        }
    with in_environment(variables):
        outcome = run_here(job, **settings)
        assert run_here(job, **settings).status == "already released"
    [manifest] = list_manifests(Folder(settings["output__path"]))
    assert manifest == outcome.manifest


def test_a_variable_that_is_not_set_is_named(job, remote_store):
    settings = upload(job, remote_store)
    storage, variables = by_reference(remote_store.server)
    settings["storage"] = storage
    first = next(iter(variables))
    says = f"the environment variable {first} is not set in this process; set it for the driver and for every worker"
    others = {name: value for name, value in variables.items() if name != first}
    with in_environment(others), pytest.raises(SpecError, match=says):
        plan_job(load(job, **settings))


@pytest.mark.slow_with("azurite")
@pytest.mark.parametrize(
    ("n_fragments", "n_shards"), [(20, 2), pytest.param(1_000, 130, marks=pytest.mark.slow)]
)  # of which a quarter is held out
def test_a_job_makes_few_requests(n_fragments, n_shards, remote_store, tmp_path):
    """A fragment's footer when the table is found, and its columns with the footer in each of two passes; sizes come from listings."""
    folder = lake(tmp_path / "lake", [30] * n_fragments, row_group=30, schema=RATINGS_SCHEMA)
    settings = upload(
        write_job(tmp_path, folder, tmp_path / "local", schema=RATINGS_SCHEMA), remote_store
    )
    shards = run_here(
        tmp_path / "job.yaml", **settings, output__rows_per_shard=30 * n_fragments // n_shards
    ).manifest.shards
    asked = [
        (request.method, request.path.partition("?")[0]) for request in remote_store.proxy.requests
    ]
    of_fragments = [method for method, path in asked if "/in/part" in path]
    of_shards = [method for method, path in asked if "/out/part-" in path]
    assert set(of_fragments) == {"GET"}
    assert len(of_fragments) <= 3 * n_fragments
    assert n_shards / 2 <= len(shards) <= n_shards
    assert len(of_shards) <= 2 * len(shards) + 3 * min(
        len(shards), MAX_PARTS
    )  # some are read for the page
    assert (
        asked.count(("PUT", next(path for _, path in asked if path.endswith(MANIFEST_NAME)))) == 1
    )
    # all else: the state of the run, documents, listings; signs of life come with time
    rest = len(asked) - len(of_fragments) - len(of_shards)
    rest -= sum("/beat-" in path or "/actions-" in path for _, path in asked)
    assert rest <= (82 if remote_store.server.name == "radosgw" else 109)


@pytest.mark.parametrize(
    ("given", "most"),
    [
        ({}, 116),
        ({"output__format": "delta"}, 134),
        ({"growing": True}, 184),
        ({"growing": True, "output__format": "delta"}, 194),
    ],
    ids=["once", "delta", "growing", "growing-delta"],
)
def test_a_release_makes_no_more_requests_than_it_did(given, most, job, open_store):
    """Of six fragments and six shards; signs of life, which come with time, are left out."""
    with open_store("radosgw") as store:
        assert run_here(job, **upload(job, store), **given).status == "released"
        assert sum("/beat-" not in request.path for request in store.proxy.requests) <= most


@pytest.mark.slow_with("azurite")
def test_reading_goes_on_when_requests_fail(job, remote_store, monkeypatch):
    monkeypatch.setattr(storage, "_FIRST_WAIT_SECONDS", 0.01)
    settings = upload(job, remote_store)
    remote_store.proxy.refuse_next(3)
    remote_store.proxy.answer_next(503, 3, path="/in/part.1")
    remote_store.proxy.cut_response(3, path="/in/part.2")
    remote_store.proxy.answer_next(429, 2, path="out")
    assert run_here(job, **settings).status == "released"


@pytest.mark.few(2)
@pytest.mark.parametrize("change", ["longer", "shorter", "footer", "removed"])
def test_a_file_that_changed_is_noticed(job, remote_store, change):
    settings = upload(job, remote_store)
    loaded = load(job, **settings)
    fragment = discover(loaded.input_url, loaded.schema).fragments[0]
    fs, path = open_filesystem(fragment.url)
    data = fs.cat_file(path)
    if change == "removed":
        fs.rm(path)
    else:
        fs.pipe_file(
            path,
            {"longer": data + b"x", "shorter": data[:-1], "footer": data[:-9] + b"x" + data[-8:]}[
                change
            ],
        )
    says = (
        "this file is missing" if change == "removed" else "this file changed since the run began"
    )
    with pytest.raises(InputError, match=says):
        list(read_batches(fragment, ["rating"], pa.schema([("rating", pa.float64())])))


@pytest.mark.few(1)
@pytest.mark.slow_with("radosgw-storage", "azurite-environment")
@pytest.mark.parametrize("by", ["environment", "storage"])
def test_a_delta_table_on_a_store(job, remote_store, by, monkeypatch):
    url = f"{remote_store.folder.url}/in"
    rows = pq.read_table(job.parent / "lake")
    write_deltalake(url, rows.slice(0, 900), storage_options=find_options(url))
    write_deltalake(url, rows, mode="overwrite", storage_options=find_options(url))
    settings = {
        "input__path": url,
        "output__path": f"{remote_store.folder.url}/out",
        "input__format": "delta",
        "input__version": 0,
    }
    storage, variables = by_reference(remote_store.server)
    with in_environment(remote_store.server.environment() if by == "environment" else variables):
        assert (
            run_here(job, **settings, **({"storage": storage} if by == "storage" else {})).status
            == "released"
        )
    with in_environment(remote_store.server.environment()):
        released = [
            name for name in everything(settings["output__path"]) if name.endswith(".parquet")
        ]
        assert released
        with pytest.raises(SpecError, match="this is a Delta table"):
            run_here(
                job,
                **{
                    **settings,
                    "input__format": "files",
                    "input__version": "null",
                    "output__path": f"{remote_store.folder.url}/other",
                },
            )
    wrong = {
        name: "AAAA" if name.endswith(("KEY", "SECRET", "KEY_ID")) else value
        for name, value in remote_store.server.environment().items()
    }
    if remote_store.server.name == "radosgw":
        with in_environment(wrong), pytest.raises(InputError, match="permission denied"):
            plan_job(load(job, **settings))


@pytest.mark.more
def test_an_iceberg_table_on_a_store(job, open_store, tmp_path):
    with open_store("radosgw") as store:
        catalog = {
            "name": "lake",
            "type": "sql",
            "uri": f"sqlite:///{tmp_path}/catalog.db",
            "warehouse": store.folder.url,
        }
        writing = {
            "s3.endpoint": store.server.environment()["AWS_ENDPOINT_URL"],
            "py-io-impl": "pyiceberg.io.fsspec.FsspecFileIO",
        }
        made = SqlCatalog(**catalog, **writing)
        made.create_namespace("db")
        rows = pq.read_table(job.parent / "lake")
        made.create_table("db.t", schema=rows.schema).append(rows)
        settings = {"output__path": tmp_path / "out", "input__format": "iceberg"}
        storage, variables = by_reference(store.server)
        place = made.load_table("db.t").metadata_location
        with in_environment(variables):
            assert (
                run_here(
                    job, **settings, storage=storage, input__path="db.t", input__catalog=catalog
                ).status
                == "released"
            )
            assert (
                plan_job(load(job, **settings, storage=storage, input__path=place)).n_rows
                == rows.num_rows
            )
