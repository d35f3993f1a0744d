"""A mechanism that another package brings: it keeps the whole contract, and jobs find it by the package's entry point."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import pandas as pd
import pytest
from e2e.helpers import schema_of
from mechanisms import toy
from mechanisms.contract import PRIVACY, MechanismContract

from dpdask.mechanisms import card, registry

FEW = {"level": {"role": "privatise", "kind": "discrete", "levels": [1, 2]}}
JOB = {
    "name": "count",
    "input": {"path": "in.parquet"},
    "output": {"path": "out"},
    "schema": "schema.yaml",
    "mechanism": {"kind": "toy"},
    "privacy": {"epsilon": 4.0, "delta": 0, "adjacency": "add-remove"},
    "insecure_seed": 1,
}


@pytest.fixture(autouse=True, scope="module")
def _registered():
    toy.register()
    yield
    del registry._REGISTERED[toy.ToySpec], card._registered["toy"]


class TestToy(MechanismContract):
    kind = "toy"
    python = toy.Toy
    given: ClassVar[dict[str, Any]] = {"factor": 2}
    privacy: ClassVar[dict[str, Any] | None] = {**PRIVACY, "adjacency": "add-remove"}
    releases_rows = False

    def estimator(self, **changes):
        columns = changes.pop("columns", self.columns())
        return toy.Toy(schema_of(columns), factor=2)


def install(folder, name, module, text=None):
    """Put a package into a folder as an installer does: its module and its metadata."""
    if text is None:
        shutil.copy(Path(toy.__file__), folder / f"{module}.py")
    else:
        (folder / f"{module}.py").write_text(text)
    about = folder / f"{name}-1.5.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.5\n")
    (about / "entry_points.txt").write_text(f"[dpdask.mechanisms]\ntoy = {module}:register\n")


def call(tmp_path, *words):
    """Run Python where the packages of a folder are installed."""
    (tmp_path / "packages").mkdir(exist_ok=True)
    return subprocess.run(
        [sys.executable, *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "packages")},
        capture_output=True,
        text=True,
        check=False,
    )


def write_job(tmp_path):
    pd.DataFrame({"level": [1, 2] * 500}).to_parquet(tmp_path / "in.parquet")
    (tmp_path / "schema.yaml").write_text(json.dumps({"columns": FEW}))
    (tmp_path / "job.yaml").write_text(json.dumps(JOB))
    (tmp_path / "packages").mkdir()
    return tmp_path / "packages"


def test_a_job_names_the_mechanism_of_an_installed_package(tmp_path):
    install(write_job(tmp_path), "toy-counts", "toy_counts")
    ran = call(tmp_path, "-m", "dpdask", "run", "job.yaml")
    assert ran.returncode == 0, ran.stderr
    # with a page, and a card that names the package
    assert "The noisy number of rows" in (tmp_path / "out/_dpdask/release.html").read_text()
    told = json.loads((tmp_path / "out/_dpdask/release.json").read_text())
    assert told["versions"]["toy-counts"] == "1.5"
    opened = call(
        tmp_path, "-c", "import dpdask; print(dpdask.open('out').to_pandas()['n'].tolist())"
    )
    assert abs(json.loads(opened.stdout)[0] - 1000) < 20


def test_without_the_package_its_kind_is_no_mechanism(tmp_path):
    write_job(tmp_path)
    refused = call(tmp_path, "-m", "dpdask", "validate", "job.yaml")
    assert refused.returncode == 64
    assert "toy" in refused.stderr


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (["import nothing_of_this_name"], "cannot be used: ModuleNotFoundError"),
        (["def register(): ..."], "registers no mechanism of this kind"),
        ([None, None], "several packages offer it: one:register, two:register"),
    ],
)
def test_a_package_that_cannot_be_used_is_refused_in_a_line(texts, said, tmp_path):
    packages = write_job(tmp_path)
    for name, text in zip(("one", "two"), texts, strict=False):
        install(packages, name, name, text)
    refused = call(tmp_path, "-m", "dpdask", "validate", "job.yaml")
    assert refused.returncode == 64
    [line] = refused.stderr.strip().splitlines()
    assert said in line
    assert "mechanism 'toy'" in line
    assert not (tmp_path / "out").exists()


def test_nobody_replaces_a_mechanism_of_dpdask(tmp_path):
    packages = write_job(tmp_path)
    install(packages, "one", "one", "def register(): raise SystemExit(1)")
    points = packages / "one-1.5.dist-info/entry_points.txt"
    points.write_text("[dpdask.mechanisms]\ndip = one:register\n")
    found = call(
        tmp_path,
        "-c",
        "from dpdask.mechanisms import card; card.load_installed('dip'); print(sorted(card.versions('dip')))",
    )
    assert found.returncode == 0, found.stderr
    assert "one" not in found.stdout
