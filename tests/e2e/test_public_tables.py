"""A public table is never the private one, however its path is written: its rows would be republished as a reference."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from e2e.helpers import hidden, lake, run_here, write_job

from dpdask.errors import SpecError


@pytest.mark.parametrize("kind", ["public", "chain"])
@pytest.mark.parametrize("path", ["i?/part.0.parquet", "in*/*.parquet", "simplecache::file://{base}/in/part.0.parquet"])
def test_a_private_file_is_found_behind_any_path(kind: str, path: str, tmp_path: Path) -> None:
    source = lake(tmp_path / "in", [600])
    written = path.format(base=tmp_path) if "::" in path else str(tmp_path / path)
    job = write_job(tmp_path / "job", source, tmp_path / "out", mechanism__reference={"kind": kind, "path": written})
    with pytest.raises(SpecError, match=r"own reference|cannot be read|not supported"):
        run_here(job)
    assert not (tmp_path / "out").exists()
    assert not hidden(tmp_path / "out").exists()


def test_a_copy_of_a_private_file_is_found(tmp_path: Path) -> None:
    source = lake(tmp_path / "in", [600, 300])
    lake(tmp_path / "public", [500], seed=2)
    shutil.copy(source / "part.1.parquet", tmp_path / "public" / "more.parquet")
    job = write_job(tmp_path / "job", source, tmp_path / "out", mechanism__reference={"kind": "public", "path": str(tmp_path / "public")})
    with pytest.raises(SpecError, match="shares a file with the private one"):
        run_here(job)


def test_a_copy_of_a_private_csv_file_is_found(tmp_path: Path) -> None:
    source = lake(tmp_path / "in", [600, 300], csv=True)
    lake(tmp_path / "public", [500], csv=True, seed=2)
    shutil.copyfile(source / "part.1.csv", tmp_path / "public" / "more.csv")
    job = write_job(tmp_path / "job", source, tmp_path / "out", mechanism__reference={"kind": "public", "path": str(tmp_path / "public")})
    with pytest.raises(SpecError, match="shares a file with the private one"):
        run_here(job)


def test_a_csv_file_with_a_header_only_is_no_copy(tmp_path: Path) -> None:
    source = lake(tmp_path / "in", [600], csv=True)
    other = lake(tmp_path / "public", [600], csv=True, seed=2)
    header = (source / "part.0.csv").read_text().splitlines()[0]
    for folder in (source, other):
        (folder / "part.9.csv").write_text(f"{header}\n")
    job = write_job(tmp_path / "job", source, tmp_path / "out", mechanism__reference={"kind": "public", "path": str(other)})
    assert run_here(job).status == "released"


def test_another_table_is_taken(tmp_path: Path) -> None:
    source, other = lake(tmp_path / "in", [600]), lake(tmp_path / "public", [600], seed=2)
    job = write_job(tmp_path / "job", source, tmp_path / "out", mechanism__reference={"kind": "public", "path": str(other)})
    assert run_here(job).status == "released"
