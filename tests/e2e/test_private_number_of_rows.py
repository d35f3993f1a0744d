"""Under add-remove the number of rows is private: tables that differ by one row end alike, and an empty one is like any other."""

import json
import re
from collections import Counter

import dask
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.parquet as pq
import pytest
import yaml
from e2e.bad_input import command
from e2e.helpers import categorical, continuous, discrete

import dpdask
from dpdask.errors import DataError
from dpdask.jobs.plan import plan_job
from dpdask.jobs.run import run_job
from dpdask.jobs.spec import load_job

COLUMNS = {
    "who": {"role": "drop"},
    "a": discrete([0, 1, 2]),
    "b": categorical(["x", "y"], nulls="level"),
    "c": continuous([0.0, 1.0]),
}
MECHANISMS = {
    "copula": {"kind": "copula", "bins": 3},
    "marginals": {"kind": "marginals", "cliques": [["a"], ["a", "b"]]},
    "cells": {"kind": "histogram", "bins": 3},
    "cells above 0": {"kind": "histogram", "bins": 3, "threshold": "positive"},
    "rows": {"kind": "histogram", "bins": 3, "output": "rows"},
    "rows, every cell": {"kind": "histogram", "bins": 3, "output": "rows", "threshold": "none"},
    "so many rows": {"kind": "histogram", "bins": 3, "output": "rows", "n_rows": 20},
}
UNIT = {"column": "who", "max_rows": 2}


def rows(n):
    return pa.table(
        {
            "who": pa.array(np.arange(n) // 2, pa.int64()),
            "a": pa.array(np.arange(n) % 3, pa.int64()),
            "b": pa.array(["x", None, "y", "x"] * n, pa.string()).slice(0, n),
            "c": pa.array((np.arange(n) % 7) / 7, pa.float64()),
        }
    )


def write(folder, table, mechanism, *, delta=0.0, unit="row", epsilon=1.0):
    folder.mkdir(parents=True)
    pq.write_table(table, folder / "t.parquet")
    (folder / "schema.yaml").write_text(yaml.safe_dump({"columns": COLUMNS}))
    job = {
        "name": "presence",
        "input": {"path": "t.parquet"},
        "output": {"path": "out"},
        "schema": "schema.yaml",
        "privacy": {"epsilon": epsilon, "delta": delta, "adjacency": "add-remove", "unit": unit},
        "mechanism": dict(mechanism),
        "cluster": {"kind": "synchronous"},
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    return folder / "job.yaml"


def shown(folder, ended):
    """Return what must not depend on a row: the exit code, the messages, the names of the files."""
    names = tuple(sorted(str(path.relative_to(folder)) for path in folder.rglob("*")))
    out = re.sub(
        r"[\d,]+ rows? in", "so many rows in", ended.out.replace(str(folder), "")
    )  # noisy, and public
    out = re.sub(r"\n  quality .*", "", out)  # a function of what is released
    return ended.code, out, tuple(ended.lines), names


@pytest.mark.few(5)
@pytest.mark.parametrize(
    "seeds",
    [range(1), pytest.param(range(1, 3), marks=pytest.mark.slow)],
    ids=["a seed", "more seeds"],
)
@pytest.mark.parametrize("unit", ["row", UNIT], ids=["row", "unit"])
@pytest.mark.parametrize("name", MECHANISMS)
def test_neighbours_end_alike(name, unit, seeds, tmp_path):
    seen = {}
    for seed in seeds:
        for n in (0, 1, 40, 41):
            for delta in (0.0, 1e-6) if name == "copula" else (0.0,):
                folder = tmp_path / f"{seed}-{n}-{delta}"
                job = write(folder, rows(n), MECHANISMS[name], unit=unit, delta=delta)
                for _ in range(2):  # the second run finds it finished
                    ended = command("run", str(job), "--set", f"insecure_seed={seed}")
                    seen.setdefault((delta, "already" in ended.out), set()).add(
                        shown(folder, ended)
                    )
    assert all(len(found) == 1 for found in seen.values()), seen
    assert {found[0] for each in seen.values() for found in each} == {0}


@pytest.mark.parametrize("name", MECHANISMS)
def test_plans_of_neighbours_differ_by_the_number_of_rows_alone(name, tmp_path):
    plans = []
    for n in (0, 5001):
        plan = plan_job(
            load_job(write(tmp_path / str(n), rows(n), MECHANISMS[name], delta=1e-3))
        ).to_dict()
        assert plan["n_rows"] == n
        rest = (
            "n_rows",
            "n_bytes",
            "seconds",
            "output",
        )  # the time follows from the number of rows
        plans.append({key: value for key, value in plan.items() if key not in rest})
    assert plans[0] == plans[1]


def _n_released(folder, n, name, seed):
    # a noise of its own for each table, or the seeds would pair the runs
    job = load_job(
        write(folder, rows(n), MECHANISMS[name]), {"insecure_seed": str(1000 * n + seed)}
    )
    with dask.config.set(scheduler="synchronous"):
        return run_job(job).manifest.n_rows


def test_an_empty_table_may_be_released_as_no_rows_or_some(tmp_path):
    kinds = Counter()
    for seed in range(12):
        folder = tmp_path / str(seed)
        n_rows = _n_released(folder, 0, "rows", seed)
        released = pads.dataset(folder / "out", exclude_invalid_files=False).to_table()
        card = json.loads((folder / "out" / "_dpdask" / "release.json").read_text())
        assert released.num_rows == card["mechanism"]["records"] == n_rows
        assert released.schema.names == ["a", "b", "c"]
        kinds[n_rows > 0] += 1
    assert kinds[False] > 0


def test_under_replace_one_an_empty_table_is_refused(tmp_path):
    for name, mechanism in MECHANISMS.items():
        job = write(tmp_path / name, rows(0), mechanism)
        ended = command("run", str(job), "--set", "privacy.adjacency=replace-one")
        assert (ended.code, len(ended.lines)) == (65, 1)
        assert "the table has no rows" in ended.lines[0]


# ---- the size of a sparse histogram

SPARSE = {"kind": "histogram", "bins": 5000}
UNIFORM = continuous([0.0, 1.0])


@pytest.mark.more
def test_a_sparse_histogram_is_never_refused_by_its_number_of_rows(tmp_path):
    """5000**3 cells at ε = 8: by the formula's threshold noise raises 42 million at few rows, 14 thousand at many."""
    for n in (0, 3000, 4000):
        job = write(
            tmp_path / str(n),
            pa.table({name: np.zeros(n) for name in "abc"}),
            SPARSE | {"factor": 0.2},
            epsilon=7.0,
        )
        (job.parent / "schema.yaml").write_text(
            yaml.safe_dump({"columns": dict.fromkeys("abc", UNIFORM)})
        )
        ended = command("plan", str(job))
        assert ended.code == 0, ended.err
        assert "the threshold is raised to 2" in ended.out
        if n == 3000:
            continue
        ended = command("run", str(job))
        assert ended.code == 0, ended.err
        card = json.loads((job.parent / "out" / "_dpdask" / "release.json").read_text())
        assert card["mechanism"]["cut"] == 2


# ---- frames

SCHEMA = dpdask.Schema.from_dict({"columns": COLUMNS})


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "unit", ["row", dpdask.UnitColumn(column="who", max_rows=2)], ids=["row", "unit"]
)
@pytest.mark.parametrize("make", [dpdask.GaussianCopula, dpdask.PerturbedHistogram])
def test_frames_of_few_rows_and_of_none(make, unit):
    for n in (0, 1):
        for seed in range(2):
            release = make(
                SCHEMA, epsilon=1.0, adjacency="add-remove", bins=3, unit=unit, insecure_seed=seed
            ).fit(rows(n).to_pandas())
            sample = release.sample().compute()
            assert list(sample.columns) == ["a", "b", "c"]
            assert sample.dtypes["c"] == np.float64
            if make is dpdask.PerturbedHistogram:
                assert list(release.cells.columns) == ["a", "b", "c", "weight"]
                assert release.with_points("spread").cells.shape[1] == 4
            else:
                assert len(sample) >= 1
    with pytest.raises(DataError, match="no rows"):
        make(SCHEMA, epsilon=1.0, bins=3, unit=unit).fit(rows(0).to_pandas())


def test_a_histogram_of_no_positive_weight_has_no_rows():
    made = dpdask.PerturbedHistogram(
        SCHEMA, epsilon=1.0, adjacency="add-remove", bins=3, factor=1e6, insecure_seed=1
    )
    release = made.fit(rows(0).to_pandas())
    assert (
        len(release.cells)
        == len(release.sample().compute())
        == len(release.sample(100).compute())
        == 0
    )
    pd.testing.assert_index_equal(release.sample().compute().columns, pd.Index(["a", "b", "c"]))
