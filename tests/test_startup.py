"""What a process of dpdask sets when it starts."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from e2e.helpers import lake, write_job

import dpdask
from dpdask.connect.private import slurm_options
from dpdask.connect.spec import Slurm
from dpdask.errors import SpecError
from dpdask.startup import end_on_sigterm

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


LOST = """
import gc, os, signal, sys, time, weakref
from dpdask.cli import cli
from dpdask.startup import Terminated

def strike(*_):
    gc.callbacks.clear()  # one signal, as an orchestrator sends it
    os.kill(os.getpid(), {number})
    for _ in range(1000):  # here the handler raises
        pass

class Held:
    pass

class Striking:
    def __del__(self):
        strike()

@cli.command()
def wait():
    held = {{"of __del__": Striking, "of a weak reference": Held, "of the collector": Held}}[{where!r}]()
    known = weakref.ref(held, strike) if {where!r} == "of a weak reference" else None
    if {where!r} == "of the collector":
        gc.callbacks.append(strike)
        gc.collect()
    del held
    time.sleep(100)

cli(["wait"])
"""


@pytest.mark.parametrize("where", ["of __del__", "of a weak reference", "of the collector"])
@pytest.mark.parametrize(
    ("number", "code", "word"), [(15, 143, "terminated"), (2, 130, "interrupted")]
)
def test_a_signal_whose_exception_python_drops_ends_the_command(number, code, word, where):
    call = [sys.executable, "-c", LOST.format(number=number, where=where)]
    ended = subprocess.run(call, capture_output=True, text=True, check=False, timeout=90)
    assert (ended.stderr, ended.returncode) == (f"dpdask: {word}; run again to resume\n", code)


REPLACED = """
import os
from dpdask.cli import main, cli

@cli.command()
def wait():
    try:
        os.kill(os.getpid(), {number})
        for _ in range(1000):
            pass
    finally:
        raise ValueError("of a library, which was interrupted")

import sys
sys.argv = ["dpdask", "wait"]
main()
"""


@pytest.mark.parametrize(
    ("number", "code", "word"), [(15, 143, "terminated"), (2, 130, "interrupted")]
)
def test_a_signal_whose_exception_a_library_replaces_ends_the_command_as_such(number, code, word):
    call = [sys.executable, "-c", REPLACED.format(number=number)]
    ended = subprocess.run(call, capture_output=True, text=True, check=False, timeout=90)
    assert (ended.stderr, ended.returncode) == (f"dpdask: {word}; run again to resume\n", code)


def test_an_alarm_of_the_caller_still_rings():
    rang, before = [], signal.getsignal(signal.SIGALRM)
    signal.signal(signal.SIGALRM, lambda *_: rang.append(1))
    try:
        with end_on_sigterm():
            signal.raise_signal(signal.SIGALRM)
            signal.setitimer(signal.ITIMER_REAL, 60.0)
        assert rang == [1]
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 1.0
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


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


WITHOUT_LOCKS = """
import importlib.abc, os, signal, sys

MISSING = {"fcntl", "grp", "pwd", "readline", "resource", "termios"}
class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name in MISSING:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
for name in MISSING:
    sys.modules.pop(name, None)
for name in ("O_CLOEXEC", "O_DIRECTORY", "O_NOFOLLOW", "O_NONBLOCK", "fork", "geteuid", "getuid", "register_at_fork"):
    delattr(os, name)
for name in ("SIGALRM", "setitimer"):
    delattr(signal, name)
"""
OPENED = """
import dpdask
opened = dpdask.open(sys.argv[1])
print(len(opened.to_pandas()), opened.columns.loc["rating", "role"])
print(opened.share("rating").estimate.sum().round(6))
print("model.npz" in opened.card["sha256"] and len(opened.sample(7, seed=1)))
"""
RUN = "from dpdask.cli import main\nmain()"


def call_without_locks(code, *arguments):
    """Run code in a Python that has neither what Unix alone has: modules that lock files and know users, and descriptors of folders."""
    words = [sys.executable, "-c", WITHOUT_LOCKS + code, *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, check=False)


def test_a_release_is_opened_where_files_have_no_locks(shelf):
    found = call_without_locks(OPENED, shelf.release("homes, model"))
    assert found.stderr == ""
    assert found.stdout == "20000 privatised\n1.0\n7\n"


@pytest.mark.parametrize("verb", ["run", "plan"])
def test_a_run_says_where_files_have_no_locks(verb, shelf, tmp_path):
    found = call_without_locks(RUN, verb, shelf.job("homes, copula", tmp_path))
    [line] = found.stderr.splitlines()
    assert "lock files, which Python cannot on Windows" in line
    assert "dpdask.open reads releases here" in line
    assert found.returncode == SpecError.exit_code
    assert found.stdout == ""
    assert not (tmp_path / "out").exists()
