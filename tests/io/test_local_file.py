"""A local file goes to the disk while it is written; what it holds does not depend on it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from dpdask.io import storage as local_file
from dpdask.io.storage import Folder

MIB = 2**20


@pytest.fixture(params=["real", "recorded", "failing", "missing"])
def told(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Which ranges the system was told to write: offsets and lengths."""
    ranges: list[tuple[int, int]] = []

    def record(descriptor: int, offset: int, n_bytes: int, flags: int) -> int:
        assert os.fstat(descriptor).st_size == offset + n_bytes
        assert flags == 2  # begin to write, and wait for nothing
        ranges.append((offset, n_bytes))
        return -1 if request.param == "failing" else 0

    if request.param != "real":
        monkeypatch.setattr(local_file, "_hint", None if request.param == "missing" else record)
    return ranges


@pytest.mark.parametrize("sizes", [[], [10], [3 * MIB], [MIB // 2] * 7 + [5], [1000] * 3000])
def test_a_file_holds_what_was_written(
    told: list[tuple[int, int]], sizes: list[int], tmp_path: Path
) -> None:
    pieces = [os.urandom(size) for size in sizes]
    folder = Folder(f"file://{tmp_path}")
    with folder.open_replacement("a") as file:
        for piece in pieces:
            assert file.write(piece) == len(piece)
    assert folder.read("a") == b"".join(pieces)


@pytest.mark.skipif(sys.platform != "linux", reason="a call of Linux")
def test_linux_takes_the_hint(tmp_path: Path) -> None:
    assert local_file._hint is not None
    with (tmp_path / "a").open("wb") as file:
        file.write(bytes(MIB))
        file.flush()
        assert local_file._hint(file.fileno(), 0, MIB, 2) == 0
    assert local_file._hint(-1, 0, MIB, 2) == -1


@pytest.mark.parametrize("told", ["recorded"], indirect=True)
def test_each_byte_is_told_once_and_in_order(told: list[tuple[int, int]], tmp_path: Path) -> None:
    with Folder(f"file://{tmp_path}").open_replacement("a") as file:
        for _ in range(5000):
            file.write(bytes(1000))
    ends = [offset + n_bytes for offset, n_bytes in told]
    assert [offset for offset, _ in told] == [0, *ends[:-1]]
    assert all(n_bytes >= MIB for _, n_bytes in told)
    assert 5_000_000 - ends[-1] < 2 * MIB
