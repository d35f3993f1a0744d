"""One protocol on every store that can be had here: files that are written once, listings that are fresh, faults that pass."""

import io
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from threading import Barrier

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from services.stores import in_environment

from dpdask.errors import InputError, OutputError, SpecError, TemporaryError
from dpdask.io import filesystems, parquet, storage
from dpdask.io.folders import remove_files
from dpdask.io.footer import TAIL_BYTES
from dpdask.io.fragments import discover, read_batches
from dpdask.io.storage import Folder, open_filesystem
from dpdask.jobs import records
from dpdask.schema import Schema

RACES = 20

# several processes wait for one moment, put, and say who won
RACER = """
import json, sys, time
from dpdask.io.storage import Folder
url, number, races = sys.argv[1], sys.argv[2], int(sys.argv[3])
folder = Folder(url)
folder.exists("warm")
print("ready", flush=True)
start = float(sys.stdin.readline())
won = []
for race in range(races):
    time.sleep(max(0, start + 0.05 * race - time.time()))
    won.append(folder.put_new(f"race-{race}", f"process {number}".encode()))
print(json.dumps(won), flush=True)
"""


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(storage, "_FIRST_WAIT_SECONDS", 0.01)


def _race(folder):
    """Let four threads create each of some files at one moment, and check that one of them does."""
    for race in range(RACES):
        barrier = Barrier(4)

        def put(number, race=race, barrier=barrier):
            barrier.wait(100)
            return folder.put_new(f"race-{race}", f"thread {number}".encode())

        with ThreadPoolExecutor(4) as pool:
            won = list(pool.map(put, range(4)))
        assert won.count(True) == 1
        assert folder.read(f"race-{race}") == f"thread {won.index(True)}".encode()


@pytest.mark.slow_with("azurite")
def test_of_processes_that_race_one_wins(store):
    store.folder.create()
    words = [sys.executable, "-c", RACER, store.folder.url]
    racers = [
        subprocess.Popen(
            [*words, str(number), str(RACES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    for racer in racers:
        assert racer.stdout.readline() == "ready\n"
    start = f"{time.time() + 0.2}\n"
    for racer in racers:
        racer.stdin.write(start)
        racer.stdin.flush()
    won = [json.loads(racer.communicate(timeout=60)[0]) for racer in racers]
    for race in range(RACES):
        winners = [number for number in range(2) if won[number][race]]
        assert len(winners) == 1
        assert store.folder.read(f"race-{race}") == f"process {winners[0]}".encode()


def test_files_come_and_go(store):
    folder = store.folder
    assert not folder.exists()
    assert folder.names() == []
    folder.create()
    assert folder.claim("a", b"one") == b"one"
    assert folder.claim("a", b"two") == b"one"
    folder.write("b", b"1")
    folder.write("b", b"")
    assert folder.read("b") == b""
    assert folder.put_new("c d", b"")
    assert not folder.put_new("c d", b"x")
    folder.child("inner").create()
    folder.child("inner").write("e", b"2")
    assert folder.names() == ["a", "b", "c d", "inner"]
    assert folder.exists("inner/e")
    assert folder.exists("inner")
    assert folder.child("a").is_file()
    assert not folder.child("inner").is_file()
    with folder.child("inner").open("e") as file:
        assert file.read() == b"2"
    folder.remove("a")
    folder.remove("a")
    assert folder.put_new("a", b"again")
    folder.remove()
    folder.remove()
    assert not folder.exists()
    assert folder.names() == []
    with pytest.raises(InputError, match="this file is missing"):
        folder.read("a")


def test_files_are_removed_together_and_by_several_drivers_at_once(remote_store):
    folder, names = remote_store.folder, [f"file-{number}" for number in range(5)]
    for name in (*names, "stays"):
        folder.write(name, b"1")
    remote_store.proxy.forget()
    remove_files(folder, names)
    asked = [each for each in remote_store.proxy.requests if "versioning" not in each.path]
    assert len(asked) <= (1 if remote_store.server.name == "radosgw" else 2 * len(names))
    folder.write(names[0], b"1")
    remove_files(folder, [*names, *names])
    remove_files(folder, [])
    assert folder.names() == ["stays"]
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(lambda _: folder.check_removable(), range(30))) == [None] * 30
    assert folder.names() == ["stays"]


@pytest.mark.more
@pytest.mark.slow_with("azurite")
def test_a_large_shard_is_written_once_and_by_one_request(store):
    """Above 100 MiB s3fs writes in parts, and an S3 gateway checks no condition when these are put together; Azure's parts of two writers mix."""
    size = 2**20 if store.server is None else 105 * 2**20  # a local disk knows no parts
    store.folder.create()
    with store.folder.open_new("part-0.parquet") as file:
        file.write(bytes(size))
    if store.server is not None:
        puts = [
            request
            for request in store.proxy.requests
            if request.method in ("PUT", "POST") and "part-0" in request.path
        ]
        assert len(puts) == 1
        assert "comp=" not in puts[0].path
    with store.folder.open_new("part-0.parquet") as file:  # a task that is done again
        file.write(bytes(size))
    with (
        pytest.raises(OutputError, match="a file with other content is there"),
        store.folder.open_new("part-0.parquet") as file,
    ):
        file.write(bytes(size - 1) + b"1")
    assert store.folder.names() == ["part-0.parquet"]
    store.folder.remove()


def test_other_processes_files_are_seen_at_once(store):
    store.folder.create()
    store.folder.write("a", b"1")
    assert store.folder.names() == ["a"]
    assert not store.folder.exists("b")
    write = f"from dpdask.io.storage import Folder; Folder({store.folder.url!r}).write('b', b'2')"
    subprocess.run([sys.executable, "-c", write], check=True)
    assert store.folder.exists("b")
    assert store.folder.names() == ["a", "b"]


def test_an_answer_that_is_lost_is_read_back(remote_store, impatient):
    remote_store.proxy.cut_response(method="PUT")
    assert remote_store.folder.put_new("a", b"mine")
    remote_store.proxy.cut_response(method="PUT")
    assert not remote_store.folder.put_new("a", b"other")
    remote_store.proxy.cut_response(method="PUT")
    assert remote_store.folder.claim("a", b"other") == b"mine"
    remote_store.proxy.cut_response(method="PUT")
    remote_store.proxy.refuse_next(2, method="GET")
    assert remote_store.folder.claim("b", b"mine") == b"mine"
    remote_store.proxy.cut_response(method="PUT")
    with remote_store.folder.open_new("c") as file:
        file.write(b"mine")
    assert remote_store.folder.names() == ["a", "b", "c"]


@pytest.mark.few(2)
@pytest.mark.parametrize("fault", ["refused", 429, 500, 503])
def test_what_a_busy_store_refuses_is_asked_again(remote_store, impatient, fault):
    def fail():
        if fault == "refused":
            remote_store.proxy.refuse_next(2)
        else:
            remote_store.proxy.answer_next(fault, 2)

    calls = [
        lambda: remote_store.folder.put_new("a", b"1"),
        lambda: remote_store.folder.write("b", b"2"),
        lambda: remote_store.folder.read("a") == b"1",
        lambda: remote_store.folder.names() == ["a", "b"],
        lambda: remote_store.folder.exists("a"),
        lambda: not remote_store.folder.exists("c"),
        lambda: remote_store.folder.child("a").is_file(),
        lambda: remote_store.folder.remove("a"),
    ]
    for call in calls:
        fail()
        assert call() in (True, None)
    assert remote_store.folder.names() == ["b"]


def test_a_store_that_stays_away_is_a_temporary_error(remote_store, impatient):
    folder = remote_store.folder
    remote_store.proxy.refuse_next(100)
    for call in (
        lambda: folder.exists("a"),
        folder.names,
        lambda: folder.read("a"),
        lambda: folder.put_new("a", b"1"),
    ):
        with pytest.raises(TemporaryError, match="the storage failed"):
            call()
    assert len(remote_store.proxy.requests) <= 4 * 5 * 4  # aiohttp repeats some; `exists` makes two


def _refusing(store):
    """The same store with credentials that have no rights."""
    if store.server.name == "radosgw":
        return store.server.environment(user="stranger")
    wrong = store.server.environment()["AZURE_STORAGE_CONNECTION_STRING"].replace(
        "AccountKey=Eby8", "AccountKey=AAAA"
    )
    return {"AZURE_STORAGE_CONNECTION_STRING": wrong}


def test_refused_credentials_are_one_line_without_secrets(remote_store):
    remote_store.folder.write("a", b"1")
    with in_environment(_refusing(remote_store)):
        for error, call in (
            (InputError, lambda: remote_store.folder.read("a")),
            (InputError, lambda: remote_store.folder.exists("a")),
            (InputError, remote_store.folder.names),
            (OutputError, lambda: remote_store.folder.put_new("b", b"1")),
            (OutputError, lambda: remote_store.folder.write("b", b"1")),
        ):
            remote_store.proxy.forget()
            with pytest.raises(error, match="permission denied; check the credentials") as caught:
                call()
            assert "\n" not in str(caught.value)
            assert not any(
                secret in str(caught.value)
                for secret in ("lake-key", "secret-", "other-key", "Key=", "devstore")
            )
            assert len(remote_store.proxy.requests) <= 3


def test_credentials_that_are_renewed_outside_are_taken(open_store, tmp_path):
    """File systems are kept by fsspec, and their sessions keep the credentials that they found first."""
    with open_store("radosgw") as store:
        store.folder.write("a", b"1")
        kept = tmp_path / "credentials"
        kept.write_text(
            "[default]\naws_access_key_id = lake-key-5d1c\naws_secret_access_key = old\n"
        )
        environment = {
            name: value
            for name, value in os.environ.items()
            if name.startswith("AWS_") and "KEY" not in name
        }
        with in_environment(environment | {"AWS_SHARED_CREDENTIALS_FILE": str(kept)}):
            with pytest.raises(InputError, match="permission denied"):
                store.folder.read("a")
            kept.write_text(
                "[default]\naws_access_key_id = lake-key-5d1c\naws_secret_access_key = lake-secret-93af\n"
            )
            assert store.folder.read("a") == b"1"


def test_missing_credentials_are_one_line(remote_store, tmp_path):
    nothing = {
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "none"),
    }
    with in_environment(nothing), pytest.raises((InputError, SpecError), match="credentials"):
        remote_store.folder.read("a")


def test_a_bucket_that_is_missing_is_said(remote_store, impatient):
    url = remote_store.folder.url.replace("lake-", "none-")
    Folder(url).create()  # makes no bucket: a slip of the pen would make one
    assert Folder(url).names() == []
    assert remote_store.folder.exists() is False
    with pytest.raises(OutputError, match="does not exist"):
        Folder(url).put_new("a", b"1")


def _versions(store):
    fs, path = open_filesystem(store.folder.url)
    bucket, _, prefix = path.partition("/")
    found = fs.call_s3("list_object_versions", Bucket=bucket, Prefix=prefix)
    return sorted(
        version["Key"].rpartition("/")[2]
        for version in [*found.get("Versions", ()), *found.get("DeleteMarkers", ())]
    )


def test_a_bucket_that_keeps_versions_has_one_of_each_file(open_store):
    with open_store("radosgw", versioned=True) as store:
        _race(store.folder)
        assert store.folder.claim("race-0", b"late") == store.folder.read("race-0")
        store.folder.write("replaced", b"1")
        store.folder.write("replaced", b"2")
        assert store.folder.read("replaced") == b"2"
        assert _versions(store) == sorted([*(f"race-{race}" for race in range(RACES)), "replaced"])


def test_nothing_that_was_removed_stays_as_a_version(open_store):
    with open_store("radosgw", versioned=True) as store:
        fs, path = open_filesystem(store.folder.url)
        store.folder.write("key", b"secret")
        fs.rm(f"{path}/key")  # by somebody who leaves the version
        assert not store.folder.exists("key")
        assert store.folder.claim("key", b"new") == b"new"
        assert store.folder.read("key") == b"new"
        store.folder.write("key2", b"secret")
        store.folder.child("inner").write("a", b"secret")
        store.folder.remove("key")
        assert _versions(store) == ["a", "key2"]
        store.folder.remove()
        assert _versions(store) == []
        assert not store.folder.exists()


def test_an_answer_that_is_lost_in_a_bucket_with_versions(open_store, impatient):
    with open_store("radosgw", versioned=True) as store:
        store.proxy.cut_response(method="PUT")
        assert store.folder.put_new("a", b"mine")
        store.proxy.cut_response(2, method="PUT")
        assert not store.folder.put_new("a", b"other")
        assert store.folder.read("a") == b"mine"
        assert _versions(store) == ["a"]


@pytest.fixture
def whole_seconds(monkeypatch):
    """Have an S3 file system tell times as most stores do."""

    def have(fs):
        call = fs.call_s3

        def call_s3(method, **words):
            answer = call(method, **words)
            for entry in (*answer.get("Versions", ()), *answer.get("DeleteMarkers", ())):
                entry["LastModified"] = entry["LastModified"].replace(microsecond=0)
            return answer

        monkeypatch.setattr(fs, "call_s3", call_s3)

    return have


def test_the_order_of_versions_decides_also_within_a_second(open_store, whole_seconds):
    with open_store("radosgw", versioned=True) as store:
        fs, path = open_filesystem(store.folder.url)
        whole_seconds(fs)
        for number in range(3):
            assert store.folder.put_new("a", f"{number}".encode())
            assert store.folder.read("a") == f"{number}".encode()
            fs.rm(f"{path}/a")  # by somebody who leaves the version
            with pytest.raises(InputError, match="missing"):
                store.folder.read("a")


def test_versions_on_many_pages(open_store, monkeypatch):
    monkeypatch.setattr(filesystems, "_PAGE", 2)
    with open_store("radosgw", versioned=True) as store:
        fs, path = open_filesystem(store.folder.url)
        for name in ("a", "a", "a", "a", "a", "ab", "b/c", "b/c", "b/c", "b/d", "bc"):
            fs.pipe_file(f"{path}/{name}", f"{len(_versions(store))}".encode())
        assert store.folder.read("a") == b"0"
        assert store.folder.read("a", replaced=True) == b"4"
        assert store.folder.claim("a", b"late") == b"0"
        assert _versions(store) == ["a", "ab", "bc", "c", "c", "c", "d"]
        store.folder.remove("b")
        assert _versions(store) == ["a", "ab", "bc", "c", "c", "c", "d"]
        store.folder.child("b").remove()
        assert _versions(store) == ["a", "ab", "bc"]
        store.folder.remove()
        assert _versions(store) == []


def test_what_another_driver_creates_while_a_file_is_removed_stays(open_store, monkeypatch):
    with open_store("radosgw", versioned=True) as store:
        store.folder.put_new("a", b"1")
        delete = storage.delete_versions

        def be_late(*words):
            delete(*words)
            monkeypatch.setattr(storage, "delete_versions", delete)
            assert store.folder.put_new("a", b"2")

        monkeypatch.setattr(storage, "delete_versions", be_late)
        store.folder.remove("a")
        assert store.folder.read("a") == b"2"


@pytest.mark.parametrize(
    ("code", "error"),
    [("NoSuchVersion", None), ("SlowDown", TemporaryError), ("AccessDenied", OutputError)],
)
def test_what_a_store_says_of_versions_that_it_did_not_remove(open_store, monkeypatch, code, error):
    """Another driver may remove the same ones at once."""
    with open_store("radosgw", versioned=True) as store:
        fs, path = open_filesystem(store.folder.url)
        fs.pipe_file(f"{path}/a", b"1")
        call, (versions, _) = fs.call_s3, filesystems.list_versions(fs, f"{path}/a")
        for _ in range(2):  # what is gone may be removed again
            filesystems.delete_versions(fs, path, versions)
        answer = {"Errors": [{"Key": "a", "Code": code}]}
        monkeypatch.setattr(fs, "call_s3", lambda *a, **k: {**call(*a, **k), **answer})
        with nullcontext() if error is None else pytest.raises(error):
            filesystems.delete_versions(fs, path, versions)


@contextmanager
def _without_the_right_to_remove_versions(store):
    fs, path = open_filesystem(store.folder.url)
    bucket = path.partition("/")[0]
    everybody = {
        "Principal": "*",
        "Resource": [f"arn:aws:s3:::{bucket}", f"arn:aws:s3:::{bucket}/*"],
    }
    rules = [
        {"Effect": "Allow", "Action": "s3:*", **everybody},
        {"Effect": "Deny", "Action": "s3:DeleteObjectVersion", **everybody},
    ]
    fs.call_s3(
        "put_bucket_policy",
        Bucket=bucket,
        Policy=json.dumps({"Version": "2012-10-17", "Statement": rules}),
    )
    with in_environment(store.server.environment(user="stranger")):
        yield


def test_who_may_not_remove_versions_reads_the_newest_of_what_is_replaced(open_store):
    with (
        open_store("radosgw", versioned=True) as store,
        _without_the_right_to_remove_versions(store),
    ):
        assert store.folder.put_new("a", b"1")
        assert not store.folder.exists("b")
        for content in (b"1", b"2"):
            store.folder.write("b", content)
            assert store.folder.read("b", replaced=True) == content
        store.folder.remove("b")
        with pytest.raises(InputError, match="missing"):
            store.folder.read("b", replaced=True)
        store.folder.write("a", b"2")
        with pytest.raises(
            OutputError,
            match=r"old versions of files cannot be removed; allow s3:DeleteObjectVersion",
        ):
            store.folder.claim("a", b"3")  # what its first writer decided is not decided by chance


def test_a_driver_that_may_not_remove_versions_is_seen_alive(open_store, monkeypatch):
    monkeypatch.setattr(records, "BEAT_SECONDS", 0.2)
    monkeypatch.setattr(records, "LEASE_SECONDS", 3.0)
    with (
        open_store("radosgw", versioned=True) as store,
        _without_the_right_to_remove_versions(store),
    ):
        hidden = store.folder.sibling(".", ".dpdask")
        mine, other = (records.NumberedRecords(hidden, store.folder) for _ in range(2))
        monkeypatch.setattr(records, "_has_ended", lambda _: False)
        with mine.lock():
            mine.write({"run_id": "r"})
            time.sleep(0.5)
            with pytest.raises(TemporaryError, match="another run is writing"), other.lock():
                pass
            assert mine.holds()


def test_a_long_footer_is_fetched_again_only_if_the_file_changed(remote_store):
    """A store's mark of a file says whether it is the same; a shorter footer comes with the columns, by one request."""
    rows = pa.table({"x": range(700), "y": range(700)})

    def write(rows):
        pq.write_table(rows, file := io.BytesIO(), row_group_size=1)
        remote_store.folder.write("a.parquet", file.getvalue())

    write(rows)
    table = discover(
        f"{remote_store.folder.url}/a.parquet",
        Schema.from_dict({"columns": {"x": {"role": "keep"}, "y": {"role": "drop"}}}),
    )
    n_footer = table.fragments[0].layout.n_file_bytes - table.fragments[0].layout.footer_start
    assert n_footer > TAIL_BYTES
    read, digest = [], parquet.digest_footer
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parquet, "digest_footer", lambda *given: (read.append(1), digest(*given))[1])
        values = [
            value
            for each in table.fragments[:5]
            for batch in read_batches(each, ["x"], table.schema)
            for value in batch["x"].to_pylist()
        ]
    assert values == [0, 1, 2, 3, 4]
    assert len(read) == 1
    write(rows.set_column(0, "x", pa.array(range(1, 701))))
    with pytest.raises(InputError, match="changed since the run began"):
        list(read_batches(table.fragments[5], ["x"], table.schema))
