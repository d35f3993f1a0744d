"""What an orchestrator makes of an exit code: real `dpdask` processes, and no orchestrator."""

import ast
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from e2e.helpers import lake, write_job

from dpdask.engine.account import open_ledger
from pipelines.orchestrators.dpdask_job import GiveUpError, TryAgainError, run_job

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "pipelines" / "orchestrators"
MANY_SHARDS = ["--set", "output.rows_per_shard=10"]  # so that a driver writes for a while


@pytest.fixture
def command(tmp_path, monkeypatch):
    """This checkout's command line, as `DPDASK` names it."""
    script = tmp_path / "dpdask"
    plain = "from dpdask.page import pictures; pictures.is_installed = bool; from dpdask.cli import main; main()"  # pictures take most of the time
    script.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -c "{plain}" "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("DPDASK", str(script))
    return script


@pytest.fixture
def job(command, tmp_path, monkeypatch):
    """A job of ε 4 on a dataset with ε 6."""
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    open_ledger(url).init("people", 6.0)
    path = write_job(
        tmp_path,
        lake(tmp_path / "in", [400, 400]),
        tmp_path / "out",
        ledger={"url": url, "dataset": "people"},
    )
    monkeypatch.setenv("DPDASK_JOB", str(path))
    return path


def test_a_release_says_what_may_be_shown(job, tmp_path):
    log = []
    found = run_job(log.append)
    manifest = json.loads((tmp_path / "out" / "_dpdask" / "manifest.json").read_text())
    assert found == {
        "status": "released",
        "output": f"file://{tmp_path}/out",
        "rows": manifest["rows"],
        "epsilon": 4.0,
        "delta": 0,
        "epsilon_spent": 4.0,
        "epsilon_left": 2.0,
    }
    assert log[-1] == "dpdask ended with exit code 0"
    with pytest.raises(GiveUpError, match="exit code 77: dpdask: "):  # 4 + 4 is more than 6
        run_job(log.append, "", "--set", f"output.path={tmp_path / 'second'}")
    assert not (tmp_path / "second").exists()


@pytest.mark.parametrize(
    ("setting", "code"), [("privacy.epsilon=-1", 64), ("input.path=nowhere", 66)]
)
def test_a_wrong_job_is_given_up(setting, code, job):
    with pytest.raises(GiveUpError, match=f"exit code {code}: dpdask: "):
        run_job(print, "", "--set", setting)


@pytest.fixture
def stopped_driver(job, command):
    """A driver that holds the output's lock, and is stopped in the middle of its work."""
    with subprocess.Popen(
        [command, "run", job, *MANY_SHARDS],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as driver:
        assert driver.stderr is not None
        assert any('"stage": "survey"' in line for line in driver.stderr)
        driver.send_signal(signal.SIGSTOP)
        yield driver
        driver.kill()


@pytest.mark.more
def test_a_second_driver_tries_again_and_finds_the_release(stopped_driver, job):
    with pytest.raises(TryAgainError, match=r"exit code 75: .*another run is writing this output"):
        run_job(print, "", *MANY_SHARDS)
    stopped_driver.send_signal(signal.SIGCONT)
    assert stopped_driver.wait(200) == 0
    found = run_job(print, "", *MANY_SHARDS)
    assert (found["status"], found["epsilon_spent"]) == ("already released", 4.0)


def test_a_driver_that_is_killed_is_tried_again(job, command, tmp_path, monkeypatch):
    """Killed by -9 in the middle of its work, directly and as a shell tells it; the next try resumes its run, which is charged once."""
    pids = tmp_path / "pids"
    body = command.read_text().replace("PYTHONPATH", f"echo $$ >> {pids}; PYTHONPATH", 1)
    command.write_text(body)

    def kill(line):
        if '"stage": "write"' in line:
            os.kill(int(pids.read_text().split()[-1]), signal.SIGKILL)

    with pytest.raises(TryAgainError, match="exit code -9"):
        run_job(kill, "", *MANY_SHARDS)
    monkeypatch.setenv("DPDASK", f"sh -c '{command} \"$@\"; exit $?' sh")
    with pytest.raises(TryAgainError, match="exit code 137"):
        run_job(kill, "", *MANY_SHARDS)
    found = run_job(print, "", *MANY_SHARDS)
    assert (found["status"], found["epsilon_spent"]) == ("released", 4.0)
    assert len(pids.read_text().split()) == 3


@pytest.mark.parametrize(
    ("code", "error"), [(143, TryAgainError), (130, TryAgainError), (70, GiveUpError)]
)
def test_who_is_ended_from_outside_is_tried_again(code, error, job, monkeypatch):
    monkeypatch.setenv("DPDASK", f"sh -c 'exit {code}'")
    with pytest.raises(error, match=f"exit code {code}"):
        run_job(print)


def test_a_command_that_crashes_is_given_up(job, monkeypatch):
    monkeypatch.setenv("DPDASK", "sh -c 'kill -SEGV $$'")
    with pytest.raises(GiveUpError, match="exit code -11"):
        run_job(print)


def test_a_driver_that_is_terminated_is_tried_again(job, monkeypatch):
    stopped = []

    def stop(line):
        if '"stage": "survey"' in line and not stopped:
            [driver] = [each for each in psutil.Process().children() if str(job) in each.cmdline()]
            driver.terminate()
            stopped.append(line)

    with pytest.raises(TryAgainError, match="exit code 143: dpdask: terminated; run again"):
        run_job(stop, "", *MANY_SHARDS)
    assert run_job(print, "", *MANY_SHARDS)["epsilon_spent"] == 4.0


def test_a_command_that_is_missing_is_given_up(job, tmp_path, monkeypatch):
    monkeypatch.setenv("DPDASK", str(tmp_path / "nowhere"))
    with pytest.raises(GiveUpError, match="cannot be started"):
        run_job(print)


@pytest.mark.more
def test_a_task_that_is_stopped_stops_its_driver(job, tmp_path):
    def stop(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_job(stop)
    assert not (tmp_path / "out" / "_SUCCESS").exists()
    assert run_job(print)["status"] == "released"  # nobody holds the lock


def test_the_commands_own_environment_is_not_the_orchestrators(command, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/of/the/orchestrator")
    monkeypatch.setenv("DPDASK", "sh -c 'echo PYTHONPATH=${PYTHONPATH-none} >&2; exit 64'")
    with pytest.raises(GiveUpError, match="PYTHONPATH=none"):
        run_job(print, "job.yaml")
    assert os.environ["PYTHONPATH"] == "/of/the/orchestrator"


def test_the_shared_module_needs_the_standard_library_alone():
    names = set()
    for node in ast.walk(ast.parse((FOLDER / "dpdask_job.py").read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(str(node.module).split(".")[0])
    assert names <= sys.stdlib_module_names


@pytest.mark.parametrize(
    "name", ["airflow/release_dag.py", "dagster/release_asset.py", "prefect/release_flow.py"]
)
def test_an_example_compiles_and_calls_the_shared_module(name):
    text = (FOLDER / name).read_text()
    compile(text, name, "exec")
    assert "from dpdask_job import" in text
    assert (FOLDER / name).with_name("requirements.txt").exists()
