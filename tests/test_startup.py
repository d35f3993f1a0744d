"""What a process of dpdask sets when it starts."""

from __future__ import annotations

import subprocess
import sys

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


def test_a_command_seldom_looks_for_garbage() -> None:
    n_rare, n_usual = (
        int(subprocess.run([sys.executable, "-c", COUNTED.format(first)], capture_output=True, text=True, check=True).stdout)
        for first in ("from dpdask.startup import collect_rarely; collect_rarely()", "")
    )
    assert n_rare < 20 < 200 < n_usual


def test_the_command_line_sets_it() -> None:
    tell = (
        "import atexit, gc; n = gc.get_freeze_count(); from dpdask.cli import main; atexit.register(lambda: print(gc.get_threshold()[0], {})); main()"
    )
    command = tell.format("gc.get_freeze_count() > n + 10_000")  # what was imported is frozen, so that the end does not look for garbage in it
    found = subprocess.run([sys.executable, "-c", command, "--version"], capture_output=True, text=True, check=True).stdout
    assert found.splitlines()[-1] == "100000 True"
