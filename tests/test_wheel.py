"""The wheel: the same bytes from the same tree, complete, and able to release outside the clone on each Python that is here.

`DPDASK_TEST_PYTHONS` may name further interpreters, with colons between them.
"""

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
JOB = """
name: ratings
input: {path: ratings}
output: {path: released}
schema: schema.yaml
privacy: {epsilon: 1.0, delta: 0, adjacency: replace-one}
mechanism: {kind: dip, reference: {kind: histogram}, channel: optimal}
"""
SCHEMA = """
columns:
  userId: {role: keep}
  movieId: {role: drop}
  rating: {role: privatise, kind: discrete, levels: [0.5, 1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5]}
  timestamp: {role: drop}
"""
VERSION = "import sys; print(*sys.version_info[:2], sep='.')"


def test_the_lowest_versions_that_are_tested_are_those_that_are_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = (ROOT / "constraints-lowest.txt").read_text().splitlines()
    tested = {
        name: Version(version)
        for name, _, version in (line.partition("==") for line in lines if not line.startswith("#"))
    }
    declared = [
        Requirement(line)
        for line in (*project["dependencies"], *project["optional-dependencies"]["test"])
    ]
    assert len(declared) > 40
    for each in declared:
        [bound] = each.specifier
        assert (bound.operator, Version(bound.version)) == (
            ">=",
            tested[canonicalize_name(each.name)],
        ), each
    extras = [
        lines
        for name, lines in project["optional-dependencies"].items()
        if name not in ("docs", "lint", "gcs")
    ]
    assert {(each.name, each.specifier) for each in map(Requirement, chain(*extras))} <= {
        (each.name, each.specifier) for each in declared
    }


def find_python(version):
    """The program of a version of Python; the test is skipped if it is not here."""
    given = os.environ.get("DPDASK_TEST_PYTHONS", "").split(":")
    for program in filter(None, [sys.executable, *given, shutil.which(f"python{version}")]):
        asked = subprocess.run(
            [program, "-c", VERSION], capture_output=True, text=True, check=False
        )
        if asked.returncode == 0 and asked.stdout.strip() == version:
            return program
    pytest.skip(f"Python {version} is not here")


def run(*command, cwd=ROOT, **variables):
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    } | variables
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """Two wheels of one tree."""
    folders = [tmp_path_factory.mktemp("wheel") for _ in range(2)]
    for folder in folders:
        run(
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "-q",
            "--no-deps",
            "-w",
            folder,
            ROOT,
            SOURCE_DATE_EPOCH="1700000000",
        )
    return [path for folder in folders for path in folder.glob("dpdask-*.whl")]


@pytest.mark.slow
def test_the_same_tree_gives_the_same_wheel(wheels):
    first, second = wheels
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.slow
def test_the_wheel_holds_all_files_of_the_package(wheels):
    inside = {name for name in zipfile.ZipFile(wheels[0]).namelist() if name.startswith("dpdask/")}
    files = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "dpdask").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert inside == files


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13", "3.14"])
def test_the_wheel_releases_outside_the_clone(version, wheels, tmp_path):
    run(find_python(version), "-m", "venv", tmp_path / "env")
    run(tmp_path / "env/bin/pip", "install", "-q", "-c", ROOT / "constraints.txt", wheels[0])
    (tmp_path / "job.yaml").write_text(JOB, encoding="utf-8")
    (tmp_path / "schema.yaml").write_text(SCHEMA, encoding="utf-8")
    dpdask = tmp_path / "env/bin/dpdask"
    run(dpdask, "simulate", "movielens", "--rows", "2000", "--out", "ratings", cwd=tmp_path)
    assert "ratings: released" in run(dpdask, "run", "job.yaml", cwd=tmp_path)
    assert (tmp_path / "released/_SUCCESS").is_file()
    assert "complete -o nosort" in run(dpdask, cwd=tmp_path, _DPDASK_COMPLETE="bash_source")
