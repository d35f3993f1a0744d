"""Copula and marginals jobs, one seed: the same bytes on every scheduler, and however the lake is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dask
import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.parquet as pq
import pytest
from distributed import Client, LocalCluster
from e2e.helpers import MIXED_SCHEMA, digests, hidden, lake, load, processes, run_here, write_job

from dpdask.jobs.run import run_job

SCHEMA: dict[str, Any] = {**MIXED_SCHEMA, "userId": {"role": "drop", "type": "int64"}}
ROWS = [150, 90, 1700, 40, 300]
MECHANISMS: dict[str, dict[str, Any]] = {
    "copula": {"kind": "copula", "bins": 8, "n_rows": 2600},
    "marginals": {
        "kind": "marginals",
        "cliques": [["rating"], ["genre", "price"], ["amount", "age", "rating"]],
        "bins": 6,
    },
}
UNIT = {"column": "userId", "max_rows": 2}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lake(tmp_path_factory.mktemp("source") / "in", ROWS, schema=SCHEMA)


def job(folder: Path, source: Path, kind: str, **changed: Any) -> Path:
    given = {"schema": SCHEMA, "mechanism": MECHANISMS[kind], "privacy__delta": 1e-6, **changed}
    return write_job(folder / f"job-{kind}", source, folder / kind, **given)


@pytest.fixture(scope="module")
def expected(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """Return what the synchronous scheduler publishes."""
    base = tmp_path_factory.mktemp("expected")
    for kind in MECHANISMS:
        run_here(job(base, source, kind))
        assert not hidden(base / kind).exists()
    return {kind: digests(base / kind) for kind in MECHANISMS}


@pytest.mark.parametrize("kind", MECHANISMS)
def test_threads(kind: str, source: Path, expected: Any, tmp_path: Path) -> None:
    with dask.config.set(scheduler="threads", num_workers=4):
        run_job(load(job(tmp_path, source, kind)))
    assert digests(tmp_path / kind) == expected[kind]


@pytest.mark.parametrize("kind", MECHANISMS)
def test_two_processes(
    kind: str, two_workers: LocalCluster, source: Path, expected: Any, tmp_path: Path
) -> None:
    with Client(two_workers):
        run_job(load(job(tmp_path, source, kind)))
    assert digests(tmp_path / kind) == expected[kind]


@pytest.mark.slow
def test_one_process(source: Path, expected: Any, tmp_path: Path) -> None:
    with processes(1) as cluster, Client(cluster):
        for kind in MECHANISMS:
            run_job(load(job(tmp_path, source, kind)))
            assert digests(tmp_path / kind) == expected[kind]


def rewritten(folder: Path, source: Path, sizes: list[int], row_group: int) -> Path:
    """Write the same rows in other files and row groups."""
    folder.mkdir(parents=True)
    files = sorted(source.iterdir(), key=lambda path: int(path.name.split(".")[1]))
    table = pa.concat_tables([pads.dataset(file).to_table() for file in files])
    start = 0
    for number, size in enumerate(sizes):
        pq.write_table(
            table.slice(start, size), folder / f"part-{number}.parquet", row_group_size=row_group
        )
        start += size
    assert start == table.num_rows
    return folder


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", MECHANISMS)
@pytest.mark.parametrize("unit", ["row", UNIT], ids=["row", "user"])
def test_files_and_row_groups_do_not_matter(
    unit: Any, kind: str, source: Path, tmp_path: Path
) -> None:
    found = []
    for name, (sizes, row_group) in {
        "one": ([2280], 5000),
        "groups": ([2280], 70),
        "files": ([1, 2000, 200, 79], 400),
    }.items():
        folder = tmp_path / name
        run_here(
            job(
                folder, rewritten(folder / "in", source, sizes, row_group), kind, privacy__unit=unit
            )
        )
        found.append(
            {
                name: digest
                for name, digest in digests(folder / kind).items()
                if "manifest" not in name
            }
        )
    assert found[0] == found[1] == found[2]
    assert sum(name.endswith(".parquet") for name in found[0]) >= 2
    assert "_dpdask/release.json" in found[0]


@pytest.mark.parametrize("records", ["raked", "copula"])
def test_rows_per_shard_do_not_matter(
    records: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither for shards inside a block of records nor for those of several blocks."""
    monkeypatch.setattr("dpdask.mechanisms.copula.model.BLOCK_ROWS", 1000)
    found = []
    for rows in (300, 1000, 1700, 1_000_000):
        folder = tmp_path / str(rows)
        run_here(
            job(
                folder,
                source,
                "copula",
                output__rows_per_shard=rows,
                mechanism={**MECHANISMS["copula"], "records": records},
            )
        )
        shards = sorted((folder / "copula").glob("*.parquet"))
        assert len(shards) == -(-2600 // rows)
        found.append(pa.concat_tables([pq.read_table(shard) for shard in shards]))
    assert all(table.equals(found[0]) for table in found[1:])
    blocks = [found[0].slice(start, 600) for start in (0, 1000, 2000)]
    assert not blocks[0].equals(blocks[1])
    assert not blocks[1].equals(blocks[2])


@pytest.mark.parametrize("kind", MECHANISMS)
def test_another_seed_gives_other_noise(
    kind: str, source: Path, expected: Any, tmp_path: Path
) -> None:
    run_here(job(tmp_path, source, kind, insecure_seed=8))
    here, there = digests(tmp_path / kind), expected[kind]
    assert here.keys() == there.keys()
    assert all(here[name] != digest for name, digest in there.items() if name.endswith(".parquet"))
