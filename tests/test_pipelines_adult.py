"""The script of pipelines/adult: its table on a small table that fits the job's schema, and on the real ones where they are."""

import json
import os
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from dpdask.jobs.spec import load_job
from pipelines.adult import compare

pytestmark = pytest.mark.more

PIPELINES = Path(compare.__file__).parents[1]
DATA = Path(os.environ.get("DPDASK_DATA", PIPELINES.parent / "data"))  # where the jobs look, too
REAL = {"adult": "adult.parquet", "acs": "nist_acs_national_2019.parquet"}


def small(path, n=600, seed=1):
    """Write a table that fits Adult's schema; a level or a number depends on a trait that all columns share."""
    rng = np.random.default_rng(seed)
    job = load_job(PIPELINES / "adult/job.yaml")
    trait = rng.random(n)
    columns = {}
    for name, column in job.schema.columns.items():
        place = np.where(rng.random(n) < 0.7, trait, rng.random(n))
        if column.levels is not None:
            columns[name] = np.array(column.levels)[(place * len(column.levels)).astype(int)]
        elif column.bounds is not None:
            low, high = (int(bound) for bound in column.bounds)
            columns[name] = low + (place * (high - low + 1)).astype(np.int32)
    pd.DataFrame(columns).to_parquet(path)
    return str(path)


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    return small(tmp_path_factory.mktemp("adult") / "adult.parquet")


@pytest.fixture(scope="module")
def rows(table, tmp_path_factory):
    path = tmp_path_factory.mktemp("json") / "rows.json"
    compare.main(f"--input {table} --seeds 1 --seed 3 --queries 200 --json {path}".split())
    document = json.loads(path.read_text(encoding="utf-8"))
    found = [document[name] for name in ("n_rows", "n_levels", "insecure_seed")]
    assert [*found, document["n_queries"][2]] == [600, 194, 3, 200]
    return {row["name"]: row for row in document["rows"]}


def test_every_row_is_there_and_is_sane(rows):
    assert len(rows) == 23
    for name, row in rows.items():
        assert set(row["one_way"]) == {"average", "maximum"}, name
        assert all(
            a <= b
            for a, b in zip(row["two_way"]["average"], row["two_way"]["maximum"], strict=True)
        ), name
        assert (row["three_way"] is None) == ("tables" in name), name
    for name in ("ours", "bootstrap"):
        assert all(
            row["valid_share"] == 1 for key, row in rows.items() if key.strip("*").startswith(name)
        )
    assert rows["*not private:* independent columns (no-cor)"]["one_way"]["maximum"][-1] == 0
    assert rows["*not private:* the paper's copula (cop)"]["valid_share"] < 0.5


def test_rows_stand_as_their_noise_says(rows):
    variation = {name: row["mean_total_variation"] for name, row in rows.items()}
    floor = variation["*not private:* bootstrap resample, the floor"]
    assert all(
        value > floor for name, value in variation.items() if "ours" in name or "dpc" in name
    )
    for what in ("our noisy tables alone", "the paper's Laplace answers (Lap)"):
        assert variation[f"{what}, replace-one"] > variation[f"{what}, add-remove"]
    assert (
        variation["our tables without their noise, as the fit believes them, add-remove"]
        < variation["our noisy tables alone, add-remove"]
    )


def test_a_seed_gives_the_same_errors_and_none_gives_others(table, capsys):
    def errors(seed=""):
        given = f"--input {table} --seeds 1 --queries 50 {seed} --rows".split()
        compare.main([*given, "our noisy tables"])
        printed = capsys.readouterr().out
        assert ("INSECURE" in printed) == bool(seed)
        return [line for line in printed.splitlines() if line.startswith("| our noisy")]

    seeded = errors("--seed 5")
    assert len(seeded) == 2
    assert seeded == errors("--seed 5") != errors()


@pytest.mark.parametrize("pipeline", REAL)
def test_the_real_tables_are_released_well(pipeline, tmp_path):
    table = DATA / REAL[pipeline]
    if not table.exists():
        pytest.skip(f"{table} is not there: fetch it, or name its folder in DPDASK_DATA")
    job, path = PIPELINES / pipeline / "job.yaml", tmp_path / "rows.json"
    names = ["**ours**, add-remove", "no-cor", "bootstrap"]
    given = f"--job {job} --input {table} --seeds 1 --seed 1 --json {path} --rows"
    compare.main([*given.split(), *names])
    ours, independent, floor = (
        row["mean_total_variation"] for row in json.loads(path.read_text(encoding="utf-8"))["rows"]
    )
    assert floor < ours < 0.6 * independent
