"""Folders on the local file system and on one without renames; writes that appear whole or not at all; faults in one line."""

import errno
import json
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import fsspec
import pytest

from dpdask.errors import DataError, InputError, OutputError, SpecError, TemporaryError
from dpdask.io import filesystems
from dpdask.io.encrypted import PrivateFolder
from dpdask.io.faults import storage_faults
from dpdask.io.shards import MANIFEST_FORMAT, MANIFEST_NAME, Manifest, Shard
from dpdask.io.storage import Folder


@pytest.fixture(params=["file", "memory"])
def folder(request, tmp_path):
    if request.param == "file":
        yield Folder(f"file://{tmp_path}/out")
        return
    yield Folder("memory://storage/out")
    fs = fsspec.filesystem("memory")
    if fs.exists("/storage"):
        fs.rm("/storage", recursive=True)


def test_what_is_written_is_read(folder):
    assert not folder.exists()
    assert folder.names() == []
    folder.create()
    folder.write("a", b"one")
    folder.write("a", b"two")
    folder.child("deep").create()
    folder.child("deep").write("b", b"three")
    assert folder.names() == ["a", "deep"]
    assert folder.read("a") == b"two"
    assert folder.exists("deep/b")
    with folder.child("deep").open("b") as file:
        assert file.read() == b"three"
    folder.remove("a")
    folder.remove("a")
    assert folder.names() == ["deep"]
    folder.remove()
    folder.remove()
    assert not folder.exists()


def test_a_write_that_fails_leaves_nothing_or_what_was_there(folder):
    folder.create()
    folder.write("old", b"old")
    for name in ("old", "new"):
        with pytest.raises(TypeError), folder.open_replacement(name) as file:
            file.writelines([b"half", None])
    assert folder.names() == ["old"]
    assert folder.read("old") == b"old"


def test_nothing_appears_before_it_is_whole(folder):
    folder.create()
    with folder.open_replacement("a") as file:
        file.write(b"half")
        assert not folder.exists("a")
    assert folder.read("a") == b"half"


def test_threads_write_at_the_same_time_without_losing_files(folder):
    folder.create()
    barrier = Barrier(4)

    def write(number: int) -> None:
        with folder.open_replacement(f"{number}") as file:
            barrier.wait(10)
            file.write(str(number).encode())
            barrier.wait(10)
            assert not folder.exists(f"{number}")
            barrier.wait(10)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    assert {name: folder.read(name) for name in folder.names()} == {
        str(number): str(number).encode() for number in range(4)
    }


def test_two_files_open_at_once_are_both_written(folder):
    """An fsspec transaction is its file system's: the second file's would forget the first, and end with it."""
    folder.create()
    with folder.open_replacement("a") as one:
        with folder.open_replacement("b") as two:
            one.write(b"1")
            two.write(b"2")
        assert not folder.exists("a")
    assert {name: folder.read(name) for name in folder.names()} == {"a": b"1", "b": b"2"}


def test_a_missing_file_is_an_input_error(folder):
    with pytest.raises(InputError, match="this file is missing"):
        folder.read("nothing")


def test_private_files_and_folders_are_for_one_user(tmp_path):
    folder = PrivateFolder(f"file://{tmp_path}/out")
    folder.create()
    folder.write("key", b"k", private=True)
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "out" / "key").stat().st_mode) == 0o600


def test_siblings_and_children():
    assert Folder("file:///a/b").sibling(".", ".dpdask") == Folder("file:///a/.b.dpdask")
    assert Folder("memory://b").sibling(".", ".dpdask") == Folder("memory://.b.dpdask")
    assert Folder("s3://bucket/a/b").sibling(".", ".dpdask") == Folder("s3://bucket/a/.b.dpdask")
    assert Folder("file:///a").child("b/c") == Folder("file:///a/b/c")
    assert Folder("file:///a b").local_path.name == "a b"


def test_a_file_is_no_folder(folder):
    folder.create()
    folder.write("a", b"")
    assert folder.child("a").is_file()
    assert not folder.is_file()
    assert not folder.child("b").is_file()


def test_moving_at_once(tmp_path):
    source, target = Folder(f"file://{tmp_path}/source"), Folder(f"file://{tmp_path}/deep/target")
    source.create()
    source.write("a", b"1")
    source.move_to(target)
    assert not source.exists()
    assert target.read("a") == b"1"


@pytest.mark.parametrize(
    ("raised", "error", "says"),
    [
        (FileNotFoundError(), InputError, "place: this file is missing; restore it and run again"),
        (PermissionError(), InputError, "place: permission denied"),
        (
            OSError(errno.ENOSPC, "x"),
            TemporaryError,
            "place: no space left on the device; free space",
        ),
        (OSError(errno.EDQUOT, "x"), TemporaryError, "no space left"),
        (
            OSError(errno.EIO, "Zebulon"),
            TemporaryError,
            r"place: the storage failed \(EIO\); run again to resume",
        ),
        (
            ConnectionResetError("Zebulon"),
            TemporaryError,
            r"the storage failed \(ConnectionResetError\)",
        ),
        (DataError("mine"), DataError, "^mine$"),
    ],
)
def test_faults_become_one_line(raised, error, says):
    with pytest.raises(error, match=says) as caught, storage_faults("place"):
        raise raised
    assert "Zebulon" not in str(caught.value)


def test_a_file_that_cannot_be_written_is_an_output_error(tmp_path, monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError

    gone = Folder(f"file://{tmp_path}/gone")
    for write in (gone.open_new, gone.open_replacement):
        with (
            pytest.raises(OutputError, match="its folder, bucket or container does not exist"),
            write("a") as file,
        ):
            file.write(b"one")
    here = Folder(f"file://{tmp_path}")
    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(os, "replace", refuse)
    for write in (here.open_new, here.open_replacement):
        with pytest.raises(OutputError, match="permission denied"), write("a") as file:
            file.write(b"one")
    assert here.names() == []


@pytest.mark.parametrize(
    "raised", [PermissionError(), FileNotFoundError(), FileExistsError(), NotADirectoryError()]
)
def test_a_folder_that_cannot_be_made_is_an_output_error(raised, tmp_path, monkeypatch):
    from fsspec.implementations.local import LocalFileSystem

    def refuse(*_: object, **__: object) -> None:
        raise raised

    monkeypatch.setattr(LocalFileSystem, "makedirs", refuse)
    with pytest.raises(OutputError, match=r"no folder can be made here; check output\.path"):
        Folder(f"file://{tmp_path}/out").create()


def test_an_unknown_protocol_is_refused():
    with pytest.raises(SpecError, match="nosuch://: no file system is installed"):
        Folder("nosuch://x").exists()


def test_a_folder_that_is_removed_while_it_is_made_is_made_again(tmp_path, monkeypatch):
    """As by a driver that ends: its hidden folder goes while another one makes sure that it is there."""
    mkdir, made = Path.mkdir, []

    def make(path: Path, *arguments: object, **options: object) -> None:
        mkdir(path, *arguments, **options)
        made.append(path)
        if len(made) == 1:
            path.rmdir()

    monkeypatch.setattr(Path, "mkdir", make)
    PrivateFolder(f"file://{tmp_path}/hidden").create()
    assert made == [tmp_path / "hidden"] * 2
    assert stat.S_IMODE((tmp_path / "hidden").stat().st_mode) == 0o700


# ---- files that are written once


def test_of_many_writers_one_creates_the_file(folder):
    folder.create()
    for race in range(20):
        barrier = Barrier(4)

        def put(number: int, race: int = race, barrier: Barrier = barrier) -> bool:
            barrier.wait(10)
            return folder.put_new(f"{race}", f"writer {number}".encode())

        with ThreadPoolExecutor(4) as pool:
            won = list(pool.map(put, range(4)))
        assert won.count(True) == 1
        assert folder.read(f"{race}") == f"writer {won.index(True)}".encode()
    assert len(folder.names()) == 20


def test_what_is_there_already_counts_as_written(folder):
    folder.create()
    assert folder.put_new("a", b"one")
    assert folder.put_new("a", b"one")
    assert not folder.put_new("a", b"two")
    assert not folder.put_new("a", b"")
    assert folder.read("a") == b"one"
    assert folder.claim("a", b"three") == b"one"
    assert folder.claim("b", b"three") == b"three"


def test_a_new_file_appears_whole_and_only_once(folder):
    folder.create()
    with folder.open_new("a") as file:
        file.write(b"half")
        assert not folder.exists("a")
    with folder.open_new("a") as file:
        file.write(b"half")
    with (
        pytest.raises(OutputError, match="a file with other content is there"),
        folder.open_new("a") as file,
    ):
        file.write(b"other")
    with pytest.raises(ZeroDivisionError), folder.open_new("b") as file:
        file.write(b"half" + str(1 / 0).encode())
    assert folder.names() == ["a"]
    assert folder.read("a") == b"half"


class _Lossy:
    """A file system that loses answers: it raises after (or before) the call was carried out."""

    def __init__(self, fs, failures):
        self._fs, self._failures = fs, failures

    def __getattr__(self, name):
        return getattr(self._fs, name)

    def pipe_file(self, path, data, **options):
        after, error = self._failures.pop(0) if self._failures else (True, None)
        if after:
            self._fs.pipe_file(path, data, **options)
        if error is not None:
            raise error


@pytest.fixture
def lossy(monkeypatch):
    failures = []
    original = filesystems.open_filesystem

    def open_filesystem(url):
        fs, path = original(url)
        return _Lossy(fs, failures), path

    monkeypatch.setattr(filesystems, "open_filesystem", open_filesystem)
    monkeypatch.setattr(filesystems, "_FIRST_WAIT_SECONDS", 0.0)
    yield failures
    fs = fsspec.filesystem("memory")
    if fs.exists("/storage"):
        fs.rm("/storage", recursive=True)


@pytest.mark.parametrize(
    "error", [TimeoutError(), ConnectionResetError(), ConnectionRefusedError()]
)
def test_a_put_whose_answer_is_lost_is_read_back(error, lossy):
    folder = Folder("memory://storage/out")
    lossy += [(True, error)]
    assert folder.put_new("a", b"mine")
    lossy += [(False, error), (False, error), (True, error)]
    assert folder.put_new("b", b"mine")
    lossy += [(False, error)]
    assert not folder.put_new("a", b"other")
    lossy += [(True, error)]
    assert folder.claim("c", b"mine") == b"mine"
    lossy += [(False, error)] * 5
    with pytest.raises(TemporaryError):
        folder.put_new("d", b"mine")
    assert folder.names() == ["a", "b", "c"]


def test_a_refusal_is_an_output_error_and_not_tried_again(lossy):
    lossy += [
        (False, OSError("Forbidden: key=Zebulon"))
    ] * 2  # the second file system of a store is asked too
    with pytest.raises(OutputError, match="permission denied; check the credentials") as caught:
        Folder("memory://storage/out").put_new("a", b"mine")
    assert "Zebulon" not in str(caught.value)
    assert not lossy


def test_what_one_request_cannot_write_is_refused(lossy, monkeypatch):
    monkeypatch.setattr(filesystems, "MAX_PUT_BYTES", 2**20)
    with pytest.raises(
        OutputError,
        match=r"larger than one request can write \(1 MiB\); lower output\.rows_per_shard",
    ):
        Folder("memory://storage/out").put_new("a", bytes(2**20 + 1))


def test_a_file_system_without_such_a_request_is_refused(tmp_path):
    with pytest.raises(OutputError, match="this file system has no create-if-absent operation"):
        Folder(f"dir::file://{tmp_path}").put_new("a", b"")


# ---- the manifest

MANIFEST = Manifest(
    job="ab",
    card_sha256="cd",
    shards=(
        Shard(name="part-00000.parquet", n_rows=3, n_bytes=9, sha256="ef"),
        Shard(name="part-00001.parquet", n_rows=2, n_bytes=8, sha256="01"),
    ),
)


def test_a_manifest_comes_back(folder):
    assert Manifest.read(folder) is None
    folder.child("_dpdask").create()
    folder.write(MANIFEST_NAME, MANIFEST.to_bytes())
    assert Manifest.read(folder) == MANIFEST
    assert MANIFEST.n_rows == 5
    assert MANIFEST.to_bytes() == MANIFEST.to_bytes()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"text"',
        b"\xff\xfe",
        b"{}",
        MANIFEST.to_bytes().replace(b'"job"', b'"jab"'),
        MANIFEST.to_bytes().replace(b'"sha256"', b'"sha255"'),
        MANIFEST.to_bytes().replace(f'"format": {MANIFEST_FORMAT}'.encode(), b'"format": 99'),
        MANIFEST.to_bytes()[:-30],
        *(
            MANIFEST.to_bytes().replace(b'"part-00001.parquet"', json.dumps(name).encode())
            for name in (
                "../secret.parquet",
                "a/b.parquet",
                "/a.parquet",
                "a\\b.parquet",
                ".",
                "..",
                "",
                1,
                None,
            )
        ),
    ],
)
def test_a_manifest_that_is_none_is_refused(data, folder):
    folder.child("_dpdask").create()
    folder.write(MANIFEST_NAME, data)
    with pytest.raises(OutputError, match="the manifest cannot be read"):
        Manifest.read(folder)
