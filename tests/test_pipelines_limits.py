"""The script that compares the main job with the fastest copies runs, and every side writes all columns."""

import json

import pytest

from pipelines.benchmarks import limits


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # in Dask's own copy
def test_the_script_measures_each_side(tmp_path, monkeypatch):
    pytest.importorskip("polars")
    pytest.importorskip("duckdb")
    monkeypatch.setattr("pyarrow.set_cpu_count", lambda _: None)
    limits.main(f"--rows 2000 --rounds 1 --folder {tmp_path} --json {tmp_path}/out.json".split())
    found = json.loads((tmp_path / "out.json").read_text())
    assert list(found["of_pyarrow"]) == list(limits.SIDES)
    assert found["of_pyarrow"]["pyarrow"] == 1.0
    assert all(len(seconds) == 1 for seconds in found["cpu_seconds"].values())
