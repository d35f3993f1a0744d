"""Growing tables: a series of releases, killed and resumed, repeated, copied and tampered with; what the ledger counts."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dask
import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from e2e.helpers import call_cli, charging_entries, digests, error_line, hidden, load, run_here, write_job

from dpdask.engine.account import open_ledger
from dpdask.errors import BudgetError, DataError, InputError, OutputError, SpecError, TemporaryError
from dpdask.io.manifest import Manifest
from dpdask.io.storage import Folder
from dpdask.jobs.plan import plan_job
from dpdask.jobs.run import Outcome, abort, status
from dpdask.jobs.series import name_manifest
from dpdask.mechanisms.card import Card

SCHEMA: dict[str, Any] = {
    "day": {"role": "keep"},
    "user": {"role": "keep"},
    "r": {"role": "privatise", "kind": "discrete", "levels": [1, 2, 3, 4, 5]},
}
KNOWN = {"kind": "known", "columns": {"r": {"probabilities": [0.2] * 5}}}
HISTOGRAM = {"kind": "histogram"}
HOLDOUT = {"kind": "holdout", "fraction": 0.25}
BY_USER = {"column": "user", "max_rows": 2}
N = 60


@pytest.fixture(autouse=True)
def _here() -> Iterator[None]:
    with dask.config.set(scheduler="synchronous"):
        yield


@pytest.fixture
def url(tmp_path: Path) -> str:
    made = f"sqlite:///{tmp_path / 'ledger.db'}"
    open_ledger(made).init("people", 100.0)
    return made


def add_day(source: Path, day: int, *, n_rows: int = N, name: str | None = None) -> Path:
    """Add the file of a day: every day has the same private values."""
    source.mkdir(exist_ok=True)
    rng = np.random.default_rng(1)
    table = pa.table({"day": np.full(n_rows, day), "user": np.arange(n_rows), "r": rng.integers(1, 6, n_rows)})
    path = source / (name or f"day-{day:02d}.parquet")
    pq.write_table(table, path)
    return path


def job(folder: Path, source: Path, reference: dict[str, Any] = KNOWN, **changed: Any) -> Path:
    given = {"privacy__epsilon": 1.0, "mechanism__reference": reference, "schema": SCHEMA, "growing": True, **changed}
    return write_job(folder, source, folder / "out", **given)


def at(url: str) -> dict[str, str]:
    return {"url": url, "dataset": "people"}


def spent(url: str) -> float:
    return open_ledger(url).read_balance("people").epsilon_spent


def kinds(url: str) -> list[str]:
    return [entry.kind for entry in charging_entries(url, "people")]


def kept(output: Path) -> Path:
    return output.parent / f".{output.name}.dpdask-series"


def manifests(output: Path) -> list[Manifest]:
    number, found = 0, []
    while (manifest := Manifest.read(Folder(f"file://{output}"), name_manifest(number))) is not None:
        found.append(manifest)
        number += 1
    return found


def released(output: Path) -> pa.Table:
    """Return the table as any reader of Parquet folders sees it."""
    return ds.dataset(output, format="parquet", exclude_invalid_files=False).to_table().sort_by([("day", "ascending"), ("user", "ascending")])


def grow(made: Path, source: Path, days: range) -> list[Outcome]:
    outcomes = []
    for day in days:
        add_day(source, day)
        outcomes.append(run_here(made))
    return outcomes


@pytest.mark.parametrize("reference", [KNOWN, HISTOGRAM, HOLDOUT], ids=lambda reference: reference["kind"])
def test_each_run_releases_the_new_rows_and_leaves_what_was_released(reference: dict[str, Any], tmp_path: Path) -> None:
    source, out = tmp_path / "in", tmp_path / "job" / "out"
    made = job(tmp_path / "job", source, reference)
    before: dict[str, str] = {}
    for day in range(4):
        add_day(source, day)
        assert run_here(made).status == "released"
        now = digests(out)
        assert {name: now[name] for name in before} == before
        before = {name: digest for name, digest in now.items() if name != "_dpdask/series.json"}
        assert not hidden(out).exists()
        assert status(f"file://{out}").n_releases == day + 1
    held_out = N - manifests(out)[0].n_rows
    assert (held_out > 0) == (reference is HOLDOUT)
    assert [manifest.n_rows for manifest in manifests(out)] == [N - held_out, N, N, N]
    table = released(out)
    assert table.num_rows == 4 * N - held_out
    assert table.column_names == ["day", "user", "r"]


def test_without_new_rows_nothing_changes(tmp_path: Path, url: str) -> None:
    source, out = tmp_path / "in", tmp_path / "job" / "out"
    made = job(tmp_path / "job", source, ledger=at(url))
    grow(made, source, range(2))
    before, entries = digests(tmp_path / "job"), len(open_ledger(url).show("people").entries)
    result = call_cli("run", made)
    assert (result.returncode, result.stdout.splitlines()[0]) == (0, "test: nothing new")
    assert digests(tmp_path / "job") == before
    assert len(open_ledger(url).show("people").entries) == entries


def test_each_release_has_noise_of_its_own(tmp_path: Path) -> None:
    """The private values of all days are the same, and so is the seed."""
    source, out = tmp_path / "in", tmp_path / "job" / "out"
    made = job(tmp_path / "job", source, output__order="keep")
    grow(made, source, range(4))
    values = released(out).column("r").to_numpy().reshape(4, N)
    for first in range(4):
        for second in range(first):
            assert 0.05 < np.mean(values[first] == values[second]) < 0.6


def test_the_same_seed_gives_the_same_series(tmp_path: Path) -> None:
    for name in ("a", "b"):
        grow(job(tmp_path / name, tmp_path / "in"), tmp_path / "in", range(3))
        if name == "a":
            shutil.rmtree(tmp_path / "in")
    assert digests(tmp_path / "a" / "out") == digests(tmp_path / "b" / "out")


@pytest.mark.parametrize(("unit", "expected"), [("row", 1.0), (BY_USER, 6.0)])
@pytest.mark.parametrize("reference", [KNOWN, HOLDOUT], ids=lambda reference: reference["kind"])
def test_a_series_spends_once_for_a_row_and_each_time_for_a_person(
    unit: Any, expected: float, reference: dict[str, Any], tmp_path: Path, url: str
) -> None:
    source, out = tmp_path / "in", tmp_path / "job" / "out"
    made = job(tmp_path / "job", source, reference, ledger=at(url), privacy__unit=unit)
    grow(made, source, range(6))
    assert spent(url) == expected
    assert kinds(url) == ["intend", "commit"] * 6
    assert open_ledger(url).verify("people")
    summary = json.loads((out / "_dpdask" / "series.json").read_text())["series"]
    assert (summary["releases"], summary["epsilon"]) == (6, expected)
    other = job(tmp_path / "other", source, reference, ledger=at(url), privacy__unit=unit, growing=False)
    run_here(other)
    assert spent(url) == expected + 1.0


def test_a_reference_that_counts_is_charged_once(tmp_path: Path, url: str) -> None:
    """A person pays for the histogram on the first day, and for the rows alone on the others."""
    source = tmp_path / "in"
    made = job(tmp_path / "job", source, HISTOGRAM, ledger=at(url), privacy__unit=BY_USER)
    grow(made, source, range(1))
    assert spent(url) == 1.0
    [row] = [event for event in charging_entries(url, "people")[0].charge.event["events"] if event["kind"] == "local-release"]
    grow(made, source, range(1, 3))
    assert spent(url) == pytest.approx(1.0 + 2 * row["n"] * row["epsilon"])
    assert spent(url) < 2.9
