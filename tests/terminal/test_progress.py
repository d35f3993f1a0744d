"""What a run shows while it works: something that moves on a terminal, and lines of a log that are not too many."""

import json
import logging
import os
import pty
import re
import select
import subprocess
import sys
import time
from types import ModuleType, SimpleNamespace

import numba
import numpy as np
import pandas as pd
from e2e.bad_input import job

import dpdask
from dpdask.cli import show_step
from dpdask.kernels.jit import jit
from dpdask.steps import LOG, step
from dpdask.terminal import progress as module
from dpdask.terminal.progress import Lines, Report, StageShown, describe_stage, show_progress

# a margin for a busy machine is added: Python and rich must start, and no process is scheduled exactly
FIRST_SECONDS = 2.0 + 4.0
STILL_SECONDS = 5.0 + 2.0

SLOW = """
import time
from dpdask import cli

def slowed(function, seconds):
    def slow(*args, **kwargs):
        time.sleep(seconds)
        return function(*args, **kwargs)
    return slow

def run(*args):  # imports what it slows only when lines are shown, as the command does
    from dpdask.engine import write
    from dpdask.mechanisms.dip.columns import ColumnsMechanism

    write.filter_rows = slowed(write.filter_rows, 0.5)
    ColumnsMechanism.fit = slowed(ColumnsMechanism.fit, 3.0)
    return plain(*args)

plain, cli._run = cli._run, run
cli.main()
"""


def watch(words):
    """Run a command on a terminal of its own; return its exit status, and what it wrote with the times of the writing."""
    child, terminal = pty.fork()
    if child == 0:
        os.environ.update(COLUMNS="100", LINES="40", TERM="xterm")
        os.execv(sys.executable, words)
    seen = []
    while True:
        select.select([terminal], [], [], 60.0)
        try:
            data = os.read(terminal, 65536)
        except OSError:  # the other end is closed
            data = b""
        if not data:
            break
        seen.append((time.monotonic(), data))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), seen


def test_a_line_moves_on_a_terminal_and_never_stands_still(tmp_path):
    words = job(tmp_path, verb="run", cluster={"kind": "synchronous"})
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "import dpdask.jobs.run"], check=True)
    slowness = max(1.0, time.monotonic() - began)  # a second where nothing else runs
    began = time.monotonic()
    status, seen = watch([sys.executable, "-c", SLOW, *words])
    text = b"".join(data for _, data in seen).decode()
    assert status == 0, text
    times = [began, *(at for at, _ in seen)]
    assert times[1] - began < FIRST_SECONDS * slowness
    assert max(np.diff(times)) < STILL_SECONDS * slowness
    assert times[-1] - began > 3.0  # the run was slow, so there was something to show
    frames = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)
    for shown in (
        "reading the job",
        "survey",
        "fitting",
        "write",
        "publishing",
        "bad-input: released",
    ):
        assert shown in frames
    assert re.search(
        r"write +\S+ +0:00:0\d +0/1", frames
    )  # at once, not when the first part is done
    last = frames[frames.rindex("reading the job") :]  # lines that stay: all of them, each done
    assert last.count("✓") >= 6
    assert (
        last.index("survey")
        < last.index("fitting")
        < last.index("write")
        < last.index("publishing")
    )


def lines(capsys):
    return capsys.readouterr().err.splitlines()


def test_a_log_has_a_line_at_the_begin_and_the_end_and_few_between(capsys, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(module, "monotonic", lambda: clock[0])
    report = Report(Lines(as_json=True))
    report.count_rows(1_000_000, None)
    for done in range(101):
        clock[0] = done * 0.2
        report("survey", done, 100)
    found = [json.loads(line) for line in lines(capsys)]
    assert [line["done"] for line in found] == [0, 25, 50, 75, 100]
    assert found[1] | {"time": ""} == {
        "time": "",
        "stage": "survey",
        "done": 25,
        "total": 100,
        "seconds": 5.0,
        "rows_per_second": 50_000,
        "seconds_left": 15,
    }
    assert "seconds_left" not in found[-1]


def test_rows_are_not_told_unless_they_are_public(capsys, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(module, "monotonic", lambda: clock[0])
    report = Report(Lines(as_json=True))
    report.count_rows(None, None)
    report("survey", 0, 2)
    clock[0] = 10.0
    report("survey", 1, 2)
    assert "rows_per_second" not in json.loads(lines(capsys)[-1])


def test_a_stage_that_is_resumed_counts_only_what_this_run_did(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(module, "monotonic", lambda: clock[0])
    stage = StageShown("write", 100, 1000, 90, first=80, began=0.0)
    clock[0] = 10.0
    assert stage.rows_per_second == 10.0
    assert stage.seconds_left == 10.0
    assert describe_stage(stage) == "90/100, 10 rows/s, about 0:00:10 left"


def test_steps_reach_the_report_and_the_log_is_left_as_it_was(capsys):
    before = (LOG.level, LOG.propagate, list(LOG.handlers))
    with show_progress("text"), step("thinking"), step("hidden", logging.DEBUG):
        pass
    assert [line.partition(" ")[2] for line in lines(capsys)] == ["thinking"]
    assert (LOG.level, LOG.propagate, list(LOG.handlers)) == before
    with step("thinking"):
        pass
    assert lines(capsys) == []


def test_bars_do_not_break_without_a_terminal(capsys):
    with show_progress("bars") as report:
        report("survey", 0, 2)
        with step("fitting"):
            report("survey", 2, 2)
    assert "survey" in capsys.readouterr().err


def test_compiling_is_told_once_and_only_when_it_happens(capsys):
    assert callable(jit)  # its module listens to numba

    def double(x):
        return x + x

    double.__module__ = "dpdask.kernels.nothing"
    double = numba.njit(double)  # without a cache on disk
    with show_progress("text"):
        double(1)
        double(1)
        double(1.0)
    assert [line.partition(" ")[2] for line in lines(capsys)] == ["compiling (first use)"]


def fit(progress=None):
    schema = dpdask.Schema.from_dict(
        {"columns": {"x": {"role": "privatise", "kind": "discrete", "levels": [0, 1]}}}
    )
    dpdask.DIP(schema, epsilon=1.0, reference=dpdask.Histogram()).fit(
        pd.DataFrame({"x": [0, 1] * 50}), progress=progress
    )


def test_a_verb_without_progress_shows_its_step_on_a_terminal_alone(capsys, monkeypatch):
    with show_step("planning"):
        pass
    assert lines(capsys) == []
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with show_step("planning"), step("reading", logging.DEBUG):
        pass
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "planning" in shown.err
    assert "reading" in shown.err


def test_a_fit_in_python_is_quiet_unless_it_is_asked_or_watched(capsys, monkeypatch):
    fit()
    assert lines(capsys) == []
    fit(progress=True)
    assert [line.partition(" ")[2].partition(":")[0] for line in lines(capsys)] == [
        "survey",
        "survey",
        "drawing noise",
        "fitting",
    ]
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    fit(progress=False)
    assert lines(capsys) == []
    fit()
    assert "fitting" in capsys.readouterr().err
    monkeypatch.setattr(sys, "stderr", None)  # as in a program without a console
    fit()


def test_a_fit_in_a_notebook_is_a_table_below_the_cell(capsys, monkeypatch):
    shown = []

    def draw(table):
        shown.append(table._repr_html_())  # type: ignore[attr-defined]

    def display(table, *, display_id):
        assert display_id
        draw(table)
        return SimpleNamespace(update=draw)

    notebook, drawn = ModuleType("IPython"), ModuleType("IPython.display")
    monkeypatch.setattr(
        notebook, "get_ipython", lambda: SimpleNamespace(kernel="a kernel"), raising=False
    )
    monkeypatch.setattr(drawn, "display", display, raising=False)
    monkeypatch.setitem(sys.modules, "IPython", notebook)
    monkeypatch.setitem(sys.modules, "IPython.display", drawn)
    fit()
    assert "…" in shown[0]
    assert shown[-1].count("✓") == shown[-1].count("<tr>") - 1 >= 3
    assert "1/1" in shown[-1]
    fit(progress=False)
    assert lines(capsys) == []
