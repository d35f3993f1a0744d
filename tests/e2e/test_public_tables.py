"""A public table is never the private one, however its path is written: its rows would be republished as a reference."""

import shutil

import pytest
from e2e.helpers import hidden, lake, load, make_ledger, run_here, write_job

from dpdask.engine.account import open_ledger
from dpdask.errors import SpecError
from dpdask.jobs.plan import plan_job


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        ("public", "i?/part.0.parquet"),
        ("chain", "in*/*.parquet"),
        ("public", "simplecache::file://{base}/in/part.0.parquet"),
    ],
)
def test_a_private_file_is_found_behind_any_path(kind, path, tmp_path):
    source = lake(tmp_path / "in", [600])
    written = path.format(base=tmp_path) if "::" in path else str(tmp_path / path)
    job = write_job(
        tmp_path / "job",
        source,
        tmp_path / "out",
        mechanism__reference={"kind": kind, "path": written},
    )
    with pytest.raises(SpecError, match=r"own reference|cannot be read|not supported"):
        run_here(job)
    assert not (tmp_path / "out").exists()
    assert not hidden(tmp_path / "out").exists()


@pytest.mark.parametrize("strict", [False, True])
def test_a_copy_of_a_private_csv_file_is_found_and_the_refusal_is_counted(strict, tmp_path):
    """It is an exact answer about rows, so `plan` does not give it, and a strict ledger charges it."""
    source = lake(tmp_path / "in", [600, 300], csv=True)
    lake(tmp_path / "public", [500], csv=True, seed=2)
    shutil.copyfile(source / "part.1.csv", tmp_path / "public" / "more.csv")
    place = make_ledger(tmp_path, "d", 9.0, strict=strict)
    reference = {"kind": "public", "path": str(tmp_path / "public")}
    job = write_job(
        tmp_path / "job", source, tmp_path / "out", mechanism__reference=reference, ledger=place
    )
    plan_job(load(job))
    with pytest.raises(SpecError, match="shares a file with the private one"):
        run_here(job)
    balance = open_ledger(place["url"]).read_balance("d")
    assert (balance.n_refused, balance.n_refusals_charged) == (1, int(strict))
    assert not (tmp_path / "out").exists()


def test_a_csv_file_with_a_header_only_is_no_copy(tmp_path):
    source = lake(tmp_path / "in", [600], csv=True)
    other = lake(tmp_path / "public", [600], csv=True, seed=2)
    header = (source / "part.0.csv").read_text().splitlines()[0]
    for folder in (source, other):
        (folder / "part.9.csv").write_text(f"{header}\n")
    job = write_job(
        tmp_path / "job",
        source,
        tmp_path / "out",
        mechanism__reference={"kind": "public", "path": str(other)},
    )
    assert run_here(job).status == "released"
