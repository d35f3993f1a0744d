"""What a process of dpdask sets when it starts."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from e2e.helpers import lake, write_job

import dpdask
from dpdask.connect.private import slurm_options
from dpdask.connect.spec import Slurm

ROOT = str(Path(dpdask.__file__).parents[1])
COUNTED = """
import atexit, gc
n = 0
def count(phase, info):
    global n
    n += phase == "start"
gc.callbacks.append(count)
atexit.register(lambda: print(n))
{}
import dask.dataframe
"""


@pytest.mark.more
def test_a_command_seldom_looks_for_garbage():
    n_rare, n_usual = (
        int(
            subprocess.run(
                [sys.executable, "-c", COUNTED.format(first)],
                capture_output=True,
                text=True,
                check=True,
            ).stdout
        )
        for first in ("from dpdask.startup import collect_rarely; collect_rarely()", "")
    )
    assert n_rare < 20 < 200 < n_usual


def test_the_command_line_sets_it():
    tell = "import atexit, gc; n = gc.get_freeze_count(); from dpdask.cli import main; atexit.register(lambda: print(gc.get_threshold()[0], {})); main()"
    command = tell.format(
        "gc.get_freeze_count() > n + 10_000"
    )  # what was imported is frozen, so that the end does not look for garbage in it
    found = subprocess.run(
        [sys.executable, "-c", command, "--version"], capture_output=True, text=True, check=True
    ).stdout
    assert found.splitlines()[-1] == "100000 True"


PLANTED = """
import os, sys
open({told!r}, "a").write(" ".join(sys.argv))
sys.path = [path for path in sys.path if path not in ("", {folder!r})]
del sys.modules["multiprocessing"]
import multiprocessing
"""


@pytest.mark.more
@pytest.mark.parametrize("by", ["dpdask", "dask"])
def test_a_command_s_workers_import_nothing_from_the_working_folder(by, tmp_path):
    """Somebody else may write in the folder where the command stands, whose own path does not begin there."""
    shared, told = tmp_path / "shared", tmp_path / "told"
    (shared / "multiprocessing").mkdir(parents=True)
    (shared / "multiprocessing" / "__init__.py").write_text(
        PLANTED.format(told=str(told), folder=str(shared))
    )
    job = write_job(
        tmp_path / "job",
        lake(tmp_path / "in", [40]),
        tmp_path / "out",
        cluster={"kind": "local", "workers": 1},
    )
    script = tmp_path / "bin" / "dpdask"  # as pip makes it
    script.parent.mkdir()
    script.write_text(
        f"if __name__ == '__main__':\n    from {'dpdask.cli' if by == 'dpdask' else 'dask.__main__'} import main\n    main()\n"
    )
    command = [sys.executable, str(script), *(["dpdask"] if by == "dask" else []), "run", str(job)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    ended = subprocess.run(
        command,
        cwd=shared,
        env={**environment, "PYTHONPATH": ROOT},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "out" / "_SUCCESS").exists()
    assert not told.exists(), told.read_text()


@pytest.mark.parametrize(
    ("flags", "set_to"), [([], "None"), (["-P"], "1")], ids=["its folder first", "without"]
)
def test_python_s_own_users_keep_their_folder(flags, set_to, tmp_path):
    """As `python -m dpdask`, which looks in the working folder itself."""
    tell = "import os; from click.testing import CliRunner; from dpdask.cli import cli; CliRunner().invoke(cli, ['init', '--help']); "
    environment = {
        name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"
    } | {"PYTHONPATH": ROOT}
    command = [sys.executable, *flags, "-c", tell + "print(os.environ.get('PYTHONSAFEPATH'))"]
    assert subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    ).stdout.split() == [set_to]


@pytest.mark.parametrize("safe", [False, True])
def test_slurm_s_workers_are_told(safe, tmp_path, monkeypatch):
    pytest.importorskip("dask_jobqueue")
    if safe:
        monkeypatch.setenv("PYTHONSAFEPATH", "1")
    else:
        monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    cluster = Slurm(workers=1, memory="1GB", walltime="01:00:00", shared_folder=str(tmp_path))
    assert (
        "export PYTHONSAFEPATH=1" in slurm_options(cluster, tmp_path)["job_script_prologue"]
    ) == safe
