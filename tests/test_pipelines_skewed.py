"""The script that measures skewed numbers under wide bounds runs, and its errors are those of its releases."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd

from pipelines.benchmarks import skewed


def test_the_script_measures_each_column_and_mechanism(tmp_path: Path) -> None:
    skewed.simulate(40_000).to_parquet(tmp_path / "in.parquet")
    skewed.main(["--input", str(tmp_path / "in.parquet"), "--runs", "1", "--seed", "3", "--json", str(tmp_path / "out.json")])
    found = json.loads((tmp_path / "out.json").read_text())
    assert [(row["column"], row["mechanism"]) for row in found["rows"]] == [
        (column, mechanism) for mechanism in ("histogram", "copula") for column in ("amount", "visits")
    ]
    assert found["bounds"]["amount"][1] > 5000
    assert all(row["quantiles"] < 0.1 and row["zeros"] < 0.02 for row in found["rows"])


def test_a_wrong_release_is_measured_as_wrong() -> None:
    own = pd.Series(range(1000))
    assert skewed.measure(own, own) == {"quantiles": 0.0, "mean": 0.0, "zeros": 0.0}
    wrong = skewed.measure(own, own * 0 + 500)
    assert wrong["quantiles"] > 0.4
    assert skewed.measure(own, own * 0)["zeros"] > 0.9
