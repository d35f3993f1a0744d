"""The script that compares syntheses of one coded table runs them apart, judges them alike, and says what was not run."""

import json
import sys

import numpy as np
import pandas as pd
import pytest

from pipelines.benchmarks import peers

pytestmark = pytest.mark.more

LEVELS = 4
JOB = """
name: small-copula
input: {path: table.parquet}
output: {path: out}
schema: schema.yaml
privacy: {epsilon: 1.0, delta: 1.0e-9, adjacency: add-remove}
mechanism: {kind: copula}
cluster: {kind: threads}
"""


@pytest.fixture
def job(tmp_path):
    """A job on four columns, each mostly a copy of the one before it, and a column that the job drops."""
    rng, n = np.random.default_rng(2), 8000
    columns = {"a": rng.integers(0, LEVELS, n)}
    for before, name in ("ab", "bc", "cd", "de"):
        columns[name] = np.where(rng.random(n) < 0.85, columns[before], rng.integers(0, LEVELS, n))
    columns["c"][columns["b"] == 0] = 1  # some pairs of levels are impossible
    frame = pd.DataFrame(columns).assign(e=np.where(columns["e"] > 1, "high", "low"))
    frame.to_parquet(tmp_path / "table.parquet", index=False)
    roles = [
        f"  {name}: {{role: privatise, kind: categorical, levels: {list(range(LEVELS))}}}"
        for name in "abcd"
    ]
    (tmp_path / "schema.yaml").write_text("\n".join(["columns:", *roles, "  e: {role: drop}"]))
    (tmp_path / "job.yaml").write_text(JOB)
    return tmp_path / "job.yaml"


def compare(job, options):
    folder = job.parent
    where = f"--job {job} --input {folder}/table.parquet --work {folder}/work"
    peers.main(f"{where} --json {folder}/peers.json --seeds 1 --seed 5 {options}".split())
    return json.loads((folder / "peers.json").read_text(encoding="utf-8"))


@pytest.mark.slow
def test_the_floor_beats_the_copula_and_the_copula_independent_columns(job, capsys):
    found = compare(job, "--target e=high")
    methods = found["rows"][0]["methods"]
    best, copula, worst = (methods[name]["medians"] for name in ("floor", "dpdask", "independent"))
    for measure in ("two_way", "worst_pair", "three_way"):
        assert best[measure] < copula[measure] < worst[measure]
    assert best["impossible"] == 0
    assert copula["impossible"] < 0.05
    assert worst["impossible"] > 0.1
    assert best["auc"] > 0.85
    assert best["auc"] > copula["auc"] - 0.02 > worst["auc"] + 0.2
    assert set(copula) == {*peers.MEASURES, *peers.COSTS}
    assert all(copula[cost] > 0 for cost in peers.COSTS)
    assert found["n_rows"] + found["n_held_out"] == 8000
    assert 0.15 < found["n_held_out"] / 8000 < 0.25

    peers_of_others = [name for name, source in peers.METHODS.items() if source is not None]
    assert all(
        methods[name]["status"] == "not run" and methods[name]["runs"] == []
        for name in peers_of_others
    )
    printed = capsys.readouterr().out
    assert printed.count("| not run |") == len(peers_of_others)

    made = job.parent / "work" / "dpdask-1-0.parquet"
    before = made.stat().st_mtime_ns
    assert compare(job, "--target e=high --methods dpdask")["rows"] == found["rows"]
    assert made.stat().st_mtime_ns == before  # reused
    with pytest.raises(SystemExit, match="holds another table"):
        compare(job, "--methods floor")


def test_a_target_that_no_row_has_is_refused(job):
    with pytest.raises(SystemExit, match="no row of column 'e' has the level 'medium'"):
        compare(job, "--target e=medium")


def test_a_peer_that_fails_or_takes_too_long_is_listed_so(job, tmp_path):
    copy = tmp_path / "private-pgm"
    (copy / "src" / "mbi").mkdir(parents=True)
    (copy / "src" / "mbi" / "__init__.py").write_text("import time\ntime.sleep(60)\n")
    options = f"--private-pgm {copy} --private-pgm-python {sys.executable} --methods mst"
    methods = compare(job, f"{options} --limit 2")["rows"][0]["methods"]
    assert methods["mst"]["status"] == "did not finish in 2 s"
    assert methods["mst"]["costs"]["wall_seconds"] < 30
    assert methods["dpdask"]["status"] == "not run"

    (copy / "src" / "mbi" / "__init__.py").write_text("raise ValueError('no such thing')\n")
    for limit, status in (
        ("--limit 1", "did not finish in 2 s"),
        ("", "failed: ValueError: no such thing"),
    ):
        methods = compare(job, f"{options} {limit}")["rows"][0]["methods"]
        assert methods["mst"]["status"] == status
