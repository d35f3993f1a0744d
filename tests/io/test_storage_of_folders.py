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

from dpdask.errors import DataError, InputError, OutputError, TemporaryError
from dpdask.io import storage
from dpdask.io.shards import MANIFEST_FORMAT, MANIFEST_NAME, Manifest, Shard
from dpdask.io.storage import Folder, PrivateFolder, storage_faults


@pytest.fixture(params=["file", "memory"])
def folder(request, tmp_path):
    if request.param == "file":
        yield Folder(f"file://{tmp_path}/out")
        return
    yield Folder("memory://storage/out")
    fs = fsspec.filesystem("memory")
    if fs.exists("/storage"):
        fs.rm("/storage", recursive=True)


def test_a_write_that_fails_leaves_nothing_or_what_was_there(folder):
    folder.create()
    folder.write("old", b"old")
    for name in ("old", "new"):
        with pytest.raises(TypeError), folder.open_replacement(name) as file:
            file.writelines([b"half", None])
    assert folder.names() == ["old"]
    assert folder.read("old") == b"old"


def test_two_files_open_at_once_are_both_written(folder):
    """An fsspec transaction is its file system's: the second file's would forget the first, and end with it."""
    folder.create()
    with folder.open_replacement("a") as one:
        with folder.open_replacement("b") as two:
            one.write(b"1")
            two.write(b"2")
        assert not folder.exists("a")
    assert {name: folder.read(name) for name in folder.names()} == {"a": b"1", "b": b"2"}


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
    def refuse(*_, **__):
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


def test_a_folder_that_is_removed_while_it_is_made_is_made_again(tmp_path, monkeypatch):
    """As by a driver that ends: its hidden folder goes while another one makes sure that it is there."""
    mkdir, made = Path.mkdir, []

    def make(path, *arguments, **options):
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

        def put(number, race=race, barrier=barrier):
            barrier.wait(100)
            return folder.put_new(f"{race}", f"writer {number}".encode())

        with ThreadPoolExecutor(4) as pool:
            won = list(pool.map(put, range(4)))
        assert won.count(True) == 1
        assert folder.read(f"{race}") == f"writer {won.index(True)}".encode()
    assert len(folder.names()) == 20


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


def test_what_one_request_cannot_write_is_refused(monkeypatch):
    monkeypatch.setattr(storage, "MAX_PUT_BYTES", 2**20)
    with pytest.raises(
        OutputError,
        match=r"larger than one request can write \(1 MiB\); lower output\.rows_per_shard",
    ):
        Folder("memory://storage/out").put_new("a", bytes(2**20 + 1))


def test_a_file_system_without_such_a_request_is_refused(tmp_path):
    with pytest.raises(OutputError, match="this file system has no create-if-absent operation"):
        Folder(f"dir::file://{tmp_path}").put_new("a", b"")
    with pytest.raises(OutputError, match="this file system has no create-if-absent operation"):
        Folder(f"dir::file://{tmp_path}").check_creatable()  # as a plan does


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
