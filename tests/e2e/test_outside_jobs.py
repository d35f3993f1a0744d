"""Values outside their columns' domains, through whole jobs: what is released lies inside, and no exit code tells where they were."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.parquet as pq
import pytest
import yaml
from e2e.bad_input import command

import dpdask
from dpdask.engine.account import open_ledger
from dpdask.engine.fit import fit
from dpdask.io.storage import Folder
from dpdask.jobs.run import run_job
from dpdask.jobs.spec import load_job
from dpdask.jobs.state import RunState
from dpdask.jobs.tables import open_table
from dpdask.privacy.ledger import Charge

COLUMNS: dict[str, Any] = {
    "who": {"role": "drop"},
    "level": {"role": "privatise", "kind": "discrete", "levels": [1, 2, 3], "other": 3},
    "word": {"role": "privatise", "kind": "categorical", "levels": ["a", "b"], "nulls": "level", "outside": "null"},
    "number": {"role": "privatise", "kind": "continuous", "bounds": [5.0, 10.0]},
    "whole": {"role": "privatise", "kind": "continuous", "bounds": [-10, 10]},
    "often": {"role": "privatise", "kind": "mixed", "atoms": [0.0], "bounds": [0.0, 1.0], "nulls": "level"},
    "rare": {"role": "privatise", "kind": "continuous", "bounds": [5, 10], "nulls": "level", "outside": "null"},
}
CHANGED = {"level": 3, "word": 2, "number": 4, "whole": 3, "often": 2, "rare": 2}
N_ROWS = 300
PUBLIC = {"kind": "public", "path": "public.parquet"}
KNOWN = {
    "kind": "known",
    "columns": {
        "level": {"probabilities": [0.2, 0.3, 0.5]},
        "word": {"probabilities": [0.2, 0.3, 0.5]},
        "number": {"name": "uniform", "loc": 5, "scale": 5},
        "whole": {"name": "randint", "low": -10, "high": 11},
        "often": {"name": "uniform", "probabilities": [0.5], "null": 0.1},
        "rare": {"name": "randint", "low": 5, "high": 11, "null": 0.1},
    },
}
MECHANISMS: dict[str, dict[str, Any]] = {
    **{
        f"dip, {reference['kind']}, {channel}": {"kind": "dip", "reference": reference, "channel": channel}
        for reference in ({"kind": "holdout", "fraction": 0.3}, {"kind": "histogram"}, PUBLIC, KNOWN)
        for channel in ("laplace", "optimal")
    },
    "chain": {"kind": "dip", "reference": {"kind": "chain", "fraction": 0.3}},
    "tree": {"kind": "dip", "reference": {"kind": "tree"}},
    "copula": {"kind": "copula", "bins": 4},
    "histogram": {"kind": "histogram", "bins": 3, "output": "rows"},
}


@pytest.fixture(autouse=True)
def _here() -> Iterator[None]:
    with dask.config.set(scheduler="synchronous"):
        yield


def table(*, outside: bool = True) -> pa.Table:
    rng = np.random.default_rng(5)
    columns: dict[str, list[Any]] = {
        "who": list(range(N_ROWS)),
        "level": rng.integers(1, 4, N_ROWS).tolist(),
        "word": rng.choice(["a", "b"], N_ROWS).tolist(),
        "number": rng.uniform(5, 10, N_ROWS).tolist(),
        "whole": rng.integers(-10, 11, N_ROWS).tolist(),
        "often": (rng.uniform(0, 1, N_ROWS) * rng.integers(0, 2, N_ROWS)).tolist(),
        "rare": rng.integers(5, 11, N_ROWS).tolist(),
    }
    if outside:
        planted = {
            "level": [0, 4, 2**40],
            "word": ["Zebulon", ""],
            "number": [0.0, math.inf, -math.inf, 2.0**1023],
            "whole": [2**63 - 1, -(2**63), 11],
            "often": [math.nan, 1.5],
            "rare": [4, 2**60],
        }
        for name, values in planted.items():
            for place, value in enumerate(values):
                columns[name][37 * (place + 1)] = value
    return pa.table(columns)


def write(folder: Path, mechanism: dict[str, Any], **changed: Any) -> Path:
    (folder / "in").mkdir(parents=True)
    pq.write_table(table().slice(0, 120), folder / "in" / "a.parquet", row_group_size=50)
    pq.write_table(table().slice(120), folder / "in" / "b.parquet", row_group_size=50)
    pq.write_table(table(), folder / "public.parquet")
    (folder / "schema.yaml").write_text(yaml.safe_dump({"columns": COLUMNS}))
    job = {
        "name": "outside",
        "input": {"path": "in"},
        "output": {"path": "out"},
        "schema": "schema.yaml",
        "privacy": {"epsilon": 6.0},
        "mechanism": mechanism,
        "cluster": {"kind": "synchronous"},
    } | changed
    (folder / "job.yaml").write_text(yaml.safe_dump({key: value for key, value in job.items() if value is not None}))
    return folder / "job.yaml"


def check_inside(frame: pd.DataFrame) -> None:
    assert set(frame["level"]) <= {1, 2, 3}
    assert set(frame["word"].dropna()) <= {"a", "b"}
    assert frame["number"].between(5, 10).all()
    assert frame["whole"].between(-10, 10).all()
    assert frame["often"].dropna().between(0, 1).all()
    assert frame["rare"].dropna().between(5, 10).all()


@pytest.mark.few(3)
@pytest.mark.parametrize("name", MECHANISMS)
def test_what_is_released_lies_in_the_domain(name: str, tmp_path: Path) -> None:
    path = write(tmp_path, MECHANISMS[name])
    planned = command("plan", str(path))
    for line in ("outside   level: other: 3", "outside   word: null", "outside   number: clip"):
        assert line in planned.out
    ended = command("run", str(path))
    assert (ended.code, ended.lines) == (0, []), ended.err
    released = pads.dataset(tmp_path / "out", exclude_invalid_files=False).to_table().to_pandas()
    assert len(released) > 100
    check_inside(released)
    card = json.loads((tmp_path / "out" / "_dpdask" / "release.json").read_text())
    words = {"level": "other: 3", "word": "null", "number": "clip", "whole": "clip", "often": "clip", "rare": "null"}
    assert {column: card["columns"][column]["outside"] for column in words} == words


def test_ranges_are_of_values_inside(tmp_path: Path) -> None:
    anchors = {"design": "case2", "anchors": {"name": "uniform", "loc": 0, "scale": 12}}
    schema = {name: COLUMNS[name] if name in ("level", "number", "whole") else {"role": "drop"} for name in COLUMNS}
    path = write(tmp_path, {"kind": "interval", "columns": dict.fromkeys(("level", "number", "whole"), anchors)}, privacy=None)
    (tmp_path / "schema.yaml").write_text(yaml.safe_dump({"columns": schema}))
    assert command("run", str(path)).code == 0
    released = pads.dataset(tmp_path / "out", exclude_invalid_files=False).to_table().to_pandas()
    assert (released["number_lower"] < 10).all()
    assert (released["number_upper"] >= 5).all()
    assert (released["whole_lower"] < 10).all()


def test_the_passes_of_central_mechanisms_count_what_they_change(tmp_path: Path) -> None:
    for name, unit in (("copula", "row"), ("histogram", "row"), ("copula", {"column": "who", "max_rows": 1}), ("tree", "row")):
        folder = tmp_path / f"{name}-{unit == 'row'}"
        job = load_job(write(folder, MECHANISMS[name], privacy={"epsilon": 6.0, "unit": unit}))
        state = RunState(Folder(job.output_url))
        reached = state.open(job.digest, lambda _: "name", "input", 7)
        opened = open_table(job, state.folder)
        fitted, _ = fit(opened.mechanism, opened.source, opened.work, lambda: None, insecure=True)
        assert fitted.changed == ({} if name == "tree" else CHANGED)  # along a tree the rows are read again, and counted then
        assert "changed" not in repr(fitted)
        state.write(reached.with_fitted(fitted))
        assert not [path for path in (folder / ".out.dpdask").rglob("*") if path.is_file() and b"changed" in path.read_bytes()]
        kept = state.read()
        assert kept is not None
        assert kept.fitted.changed == {}
        state.remove()


def test_bounds_ask_nothing_of_a_dataset_whose_budget_is_spent(tmp_path: Path) -> None:
    """Twenty runs with other bounds were twenty exact answers about the largest value."""
    url = f"sqlite:///{tmp_path}/ledger.db"
    ledger = open_ledger(url)
    ledger.init("people", 1.0)
    ledger.intend("people", "spent", Charge(epsilon=1.0))
    ledger.commit("people", "spent")
    (tmp_path / "in").mkdir()
    for seed in range(4):
        income = np.random.default_rng(seed).integers(0, 1000, 500)
        income[77] = 300_000 if seed == 2 else income[77]
        pq.write_table(pa.table({"income": income}), tmp_path / "in" / f"clinic{seed}.parquet")
    seen = set()
    for bound in (10, 1000, 299_999, 300_000, 300_001, 1_000_000):
        column = {"role": "privatise", "kind": "continuous", "bounds": [0, bound]}
        (tmp_path / "schema.yaml").write_text(yaml.safe_dump({"columns": {"income": column}}))
        job = {
            "name": "j",
            "input": {"path": "in"},
            "output": {"path": "out"},
            "schema": "schema.yaml",
            "privacy": {"epsilon": 8.0},
            "mechanism": {"kind": "dip", "reference": {"kind": "histogram"}},
            "ledger": {"url": url, "dataset": "people"},
            "cluster": {"kind": "synchronous"},
        }
        (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
        ended = command("run", str(tmp_path / "job.yaml"))
        seen.add((ended.code, *ended.lines))
    [(code, _)] = seen
    assert code == 77


def test_frames_are_clipped_too(tmp_path: Path) -> None:
    schema = dpdask.Schema.from_dict({"columns": COLUMNS | {"who": {"role": "keep"}}})
    frame = table().to_pandas().astype({"rare": "Int64"})
    for given in (frame, dd.from_pandas(frame, npartitions=3)):
        release = dpdask.DIP(schema, epsilon=6.0, reference=dpdask.Histogram(), insecure_seed=3).fit(given)
        released = release.transform(given)
        released = released if isinstance(released, pd.DataFrame) else released.compute()
        assert len(released) == N_ROWS
        check_inside(released)


def test_a_resumed_run_clips_alike(tmp_path: Path) -> None:
    path = write(tmp_path, MECHANISMS["dip, histogram, laplace"], insecure_seed=5)
    first = run_job(load_job(path)).manifest
    again = run_job(load_job(path, {"output.path": "again"})).manifest
    assert [shard.sha256 for shard in first.shards] == [shard.sha256 for shard in again.shards]
