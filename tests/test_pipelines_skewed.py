"""The script that measures skewed numbers under wide bounds runs, and its errors are those of its releases."""

import json

import pandas as pd

from pipelines.benchmarks import skewed


def test_the_script_measures_each_column_and_mechanism(tmp_path):
    skewed.simulate(40_000).to_parquet(tmp_path / "in.parquet")
    files = f"--input {tmp_path}/in.parquet --json {tmp_path}/out.json"
    skewed.main(f"{files} --runs 1 --seed 3".split())
    found = json.loads((tmp_path / "out.json").read_text())
    assert [(row["column"], row["mechanism"]) for row in found["rows"]] == [
        (column, mechanism) for mechanism in skewed.MECHANISMS for column in ("amount", "visits")
    ]
    assert found["rows"][0]["bounds"][1] > 5000
    assert all(row["quantiles"] < 0.1 and row["zeros"] < 0.02 for row in found["rows"])


def test_a_wrong_release_is_measured_as_wrong():
    own = pd.Series(range(1000))
    assert skewed.measure(own, own) == {"quantiles": 0.0, "mean": 0.0, "zeros": 0.0}
    wrong = skewed.measure(own, own * 0 + 500)
    assert wrong["quantiles"] > 0.4
    assert skewed.measure(own, own * 0)["zeros"] > 0.9


def test_tables_of_a_folder_are_read_as_far_as_they_are_there(tmp_path, monkeypatch):
    pd.DataFrame({"ArrDelay": [1.0, None], "DepDelay": [2.0, 3.0], "Date": "x"}).to_parquet(
        tmp_path / "hflights_2011.parquet"
    )
    monkeypatch.setenv("DPDASK_DATA", str(tmp_path))
    [(name, frame)] = skewed.read_tables(None, None)
    assert name == "hflights_2011"
    assert frame.to_dict("list") == {"ArrDelay": [1], "DepDelay": [2]}
    assert frame["ArrDelay"].dtype == "int64"
    monkeypatch.delenv("DPDASK_DATA")
    assert [name for name, _ in skewed.read_tables(None, None)] == ["simulated"]
