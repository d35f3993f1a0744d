"""Airflow, Dagster and Prefect, each headless in an environment of its own: a success, a 75 tried again, a 77 given up.

Slow: `pytest -m slow -n 0 tests/orchestrators`. The environments are made with `uv` (or `venv` and `pip`) from the requirements beside each
example, in a temporary folder, or in the folder that DPDASK_TEST_ORCHESTRATORS names, where they are kept.
"""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from e2e.helpers import lake, write_job

from dpdask.engine.account import open_ledger

pytest_plugins = ["privacy.ledger_worker"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "pipelines" / "orchestrators"
_DAGSTER_METADATA = """
import json
from dagster import AssetKey, DagsterInstance
event = DagsterInstance.get().get_latest_materialization_event(AssetKey("release"))
print(json.dumps({key: value.value for key, value in event.asset_materialization.metadata.items()}))
"""


@dataclass
class Ran:
    """What an orchestrator printed, and whether it ended well."""

    code: int
    lines: list[str]
    seconds: float

    def attempts(self, code):
        return sum(f"dpdask ended with exit code {code}" in line for line in self.lines)


@dataclass
class Orchestrator:
    """An orchestrator in its own environment, with a home for its own state."""

    name: str
    python: Path
    home: Path
    variables: dict[str, str]

    def run(self, job, on_line=str):
        began, lines = time.monotonic(), []
        words = {
            "airflow": [self.python.with_name("airflow"), "dags", "test", "dpdask_release"],
            "dagster": [
                self.python.with_name("dagster"),
                "asset",
                "materialize",
                "-f",
                FOLDER / "dagster" / "release_asset.py",
                "--select",
                "release",
            ],
            "prefect": [self.python, FOLDER / "prefect" / "release_flow.py"],
        }[self.name]
        with self.start(words, DPDASK_JOB=str(job)) as process:
            assert process.stdout is not None
            for line in process.stdout:
                lines.append(line.rstrip())
                on_line(line)
        ran = Ran(code=process.returncode, lines=lines, seconds=time.monotonic() - began)
        sys.stdout.write(
            f"{self.name}: {ran.seconds:.0f} s, exit code {ran.code}\n" + "\n".join(lines) + "\n"
        )
        return ran

    def start(self, words, **variables):
        given = {
            "env": {**self.variables, **variables},
            "cwd": self.home,
            "text": True,
            "errors": "replace",
        }
        return subprocess.Popen(
            [*map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **given
        )

    def read_metadata(self):
        """Return what the orchestrator keeps of the last release."""
        if self.name == "dagster":
            done = subprocess.run(
                [self.python, "-c", _DAGSTER_METADATA],
                env=self.variables,
                capture_output=True,
                text=True,
                check=True,
            )
            return json.loads(done.stdout)
        if self.name == "airflow":
            rows = query(
                self.home / "airflow.db",
                "SELECT value FROM xcom WHERE key = 'return_value' ORDER BY timestamp",
            )
            return (
                json.loads(json.loads(rows[-1][0]))
                if rows[-1][0].startswith('"')
                else json.loads(rows[-1][0])
            )
        rows = query(
            self.home / ".prefect" / "prefect.db",
            "SELECT data FROM artifact WHERE key = 'dpdask-release' ORDER BY created",
        )
        return json.loads(json.loads(rows[-1][0]))[0]


def query(file, sql):
    with closing(sqlite3.connect(file)) as connection:
        return connection.execute(sql).fetchall()


def make_environment(name, folder):
    """Return the Python of an orchestrator's own environment, which is made where it is missing."""
    python = folder / name / "bin" / "python"
    if python.exists():
        return python
    requirements = FOLDER / name / "requirements.txt"
    uv = shutil.which("uv") or shutil.which("uv", path=Path(sys.executable).parent)
    steps = (
        [
            [uv, "venv", "-q", folder / name, "--python", sys.executable],
            [uv, "pip", "install", "-q", "--python", python, "-r", requirements],
        ]
        if uv
        else [
            [sys.executable, "-m", "venv", folder / name],
            [python, "-m", "pip", "install", "-q", "-r", requirements],
        ]
    )
    for step in steps:
        if subprocess.run([*map(str, step)], stdin=subprocess.DEVNULL, check=False).returncode:
            shutil.rmtree(folder / name, ignore_errors=True)
            pytest.skip(f"{name} cannot be installed here")
    return python


@pytest.fixture(scope="module", params=["airflow", "dagster", "prefect"])
def orchestrator(request, tmp_path_factory):
    kept = os.environ.get("DPDASK_TEST_ORCHESTRATORS")
    python = make_environment(
        request.param, Path(kept) if kept else tmp_path_factory.mktemp("environments")
    )
    home = tmp_path_factory.mktemp(request.param)
    command = home / "dpdask"
    command.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m dpdask "$@"\n')
    command.chmod(0o755)
    variables = {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "PYTHONPATH": str(FOLDER),
        "PYTHONUNBUFFERED": "1",
        "DPDASK": str(command),
        "DPDASK_RETRY_SECONDS": "2",
        "AIRFLOW_HOME": str(home),
        "AIRFLOW__CORE__DAGS_FOLDER": str(FOLDER / "airflow"),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "false",
        "DAGSTER_HOME": str(home),
        "DAGSTER_DISABLE_TELEMETRY": "1",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "300",
    }
    made = Orchestrator(name=request.param, python=python, home=home, variables=variables)
    if request.param == "airflow":
        with made.start([python.with_name("airflow"), "db", "migrate"]) as migrated:
            said = migrated.communicate()[0]
        assert migrated.returncode == 0, said
    return made


def make_job(folder, url, dataset):
    """Return a job of ε 4, charged to a dataset."""
    return write_job(
        folder,
        lake(folder / "in", [400, 400]),
        folder / "out",
        ledger={"url": url, "dataset": dataset},
    )


def released_rows(folder):
    return int(json.loads((folder / "out" / "_dpdask" / "manifest.json").read_text())["rows"])


def test_a_release_shows_its_epsilon_the_budget_left_and_its_rows(orchestrator, tmp_path):
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    open_ledger(url).init("people", 6.0)
    ran = orchestrator.run(make_job(tmp_path, url, "people"))
    assert (ran.code, ran.attempts(0)) == (0, 1)
    assert orchestrator.read_metadata() == {
        "status": "released",
        "output": f"file://{tmp_path}/out",
        "rows": released_rows(tmp_path),
        "epsilon": 4.0,
        "delta": 0,
        "epsilon_spent": 4.0,
        "epsilon_left": 2.0,
    }


@pytest.fixture
def absent_database(postgres, tmp_path):
    """A database's URL at a folder of sockets that is not there yet, that folder, and where it really is."""
    [sockets] = parse_qs(urlsplit(postgres).query).get("host", [""])
    if not sockets.startswith("/"):
        pytest.skip("the PostgreSQL server given is not on a local socket")
    with tempfile.TemporaryDirectory(
        prefix="dpdask-", dir="/tmp"
    ) as folder:  # short: a socket's path has at most 107 characters
        link = Path(folder) / "sockets"
        yield postgres.replace(sockets, str(link)), link, Path(sockets)


def test_a_75_is_tried_again_until_it_succeeds(orchestrator, absent_database, postgres, tmp_path):
    url, link, sockets = absent_database
    ledger = open_ledger(postgres)
    ledger.init(orchestrator.name, 4.0)

    def heal(line):
        if "dpdask ended with exit code 75" in line and not link.is_symlink():
            link.symlink_to(sockets)

    ran = orchestrator.run(make_job(tmp_path, url, orchestrator.name), heal)
    assert (ran.code, ran.attempts(0)) == (0, 1)
    assert ran.attempts(75) >= 1
    assert orchestrator.read_metadata()["status"] == "released"
    assert orchestrator.read_metadata()["output"] == f"file://{tmp_path}/out"
    assert ledger.read_balance(orchestrator.name).n_runs == 1


def test_a_77_is_not_tried_again(orchestrator, tmp_path):
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    open_ledger(url).init("people", 1.0)
    ran = orchestrator.run(make_job(tmp_path, url, "people"))
    assert ran.code != 0
    assert ran.attempts(77) == 1
    assert sum(ran.attempts(code) for code in (0, 75)) == 0
    assert not (tmp_path / "out").exists()
