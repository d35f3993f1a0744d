"""The script of pipelines/adult that releases the survey along a tree: on a small table, and on the real one where it is."""

import os
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from dpdask.jobs.spec import load_job
from pipelines.adult import tree

FOLDER = Path(tree.__file__).parent
DATA = Path(os.environ.get("DPDASK_DATA", FOLDER.parents[1] / "data"))


def figures(printed):
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in printed.splitlines()
        if line.startswith(("| laplace", "| optimal"))
    ]


def test_a_small_table_is_released_and_a_seed_repeats_it(tmp_path, capsys):
    rng = np.random.default_rng(1)
    trait = rng.random(3_000)
    columns = {}
    for name, column in load_job(FOLDER / "job.yaml").schema.columns.items():
        if column.levels is not None:
            columns[name] = np.array(column.levels)[(trait * len(column.levels)).astype(int)]
        elif column.bounds is not None:
            low, high = (int(bound) for bound in column.bounds)
            columns[name] = low + (trait * (high - low + 1)).astype(np.int32)
    path = tmp_path / "adult.parquet"
    pd.DataFrame(columns).to_parquet(path)

    def rows(more):
        given = f"--input {path} --runs 1 --channels laplace --deltas 0 --epsilon 10 --seed 1 "
        tree.main((given + more).split())
        return figures(capsys.readouterr().out)

    first, second = rows("--shares 0.1 0.9")
    assert float(first[3]) > float(second[3]) > 0  # more on the tables brings them nearer
    assert float(first[5]) > float(second[5])  # and less of a row's own values is left
    assert float(first[7]) <= 9.0
    assert float(first[8]) <= 10.0
    again = rows("--shares 0.1")[0]
    assert again[:-1] == first[:-1]  # but the seconds


def test_the_real_table_is_released_as_near_as_is_asked(capsys):
    table = DATA / "adult.parquet"
    if not table.exists():
        pytest.skip(f"{table} is not there: fetch it, or name its folder in DPDASK_DATA")
    given = f"--input {table} --runs 2 --channels laplace --deltas {2.0**-30} --shares 0.5 --seed 1"
    tree.main(given.split())
    [row] = figures(capsys.readouterr().out)
    assert float(row[3]) <= 0.05
    assert float(row[8]) <= 2.0
    assert abs(float(row[6]) - 1.0) < 0.1  # whole rows are recognised at chance level
