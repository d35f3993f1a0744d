"""What a run does, as it does it: a line for each stage and step on a terminal, or in a log."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from time import monotonic
from typing import Any, Literal, Protocol

from dpdask.html import make_html_table
from dpdask.steps import LOG
from dpdask.terminal.echo import echo, echo_json, make_lasting

LogFormat = Literal["auto", "bars", "text", "json"]

_PAUSE_SECONDS = 5.0  # between two lines of one stage in a log
_LEAST_SECONDS = 0.5  # before that, a rate says nothing
_DRAW_SECONDS = 0.5  # between two drawings of a table that only differ in how far a stage is


@dataclass(slots=True)
class StageShown:
    """A stage of a run, or a step without parts."""

    name: str
    total: int | None = None  # how many parts it has; None of a step
    rows: int | None = None  # how many rows all parts have together, if that is known and public
    done: int = 0
    first: int = 0  # how many parts were done when it was first heard of: another run did them
    began: float | None = field(default_factory=lambda: monotonic())  # looked up when called
    spent: float = 0.0  # how many seconds it lasted before: a step may begin again

    @property
    def seconds(self) -> float:
        """How long it has lasted."""
        return self.spent + (0.0 if self.began is None else monotonic() - self.began)

    @property
    def rows_per_second(self) -> float | None:
        """About how many rows are read or written in a second, if that is known."""
        if self.rows is None or self.seconds_left is None or not self.total:
            return None
        return self.rows * (self.done - self.first) / self.total / self.seconds

    @property
    def seconds_left(self) -> float | None:
        """About how long it still lasts, if that is known."""
        if not self.total or self.done == self.first or self.seconds < _LEAST_SECONDS:
            return None
        return (self.total - self.done) * self.seconds / (self.done - self.first)


class Display(Protocol):
    """Where stages and steps are shown."""

    def show(self, stage: StageShown) -> None:
        """Show a stage that begins or goes on."""

    def end(self, stage: StageShown) -> None:
        """Show a stage that has ended; its line stays."""


class Report:
    """Takes what a run reports: called with (stage, done, total).

    Attributes
    ----------
    rows
        How many rows the stages read, if that is known and public; of a stage of another number, by
        its name.
    """

    def __init__(self, *displays: Display) -> None:
        self.rows: Mapping[str | None, int | None] = {}
        self._displays, self._lock = displays, threading.RLock()
        self._stages: dict[str, StageShown] = {}

    def __call__(self, name: str, done: int, total: int) -> None:
        """Take how many parts of a stage are done, of how many."""
        with self._lock:
            stage = self._stages.get(name)
            # a later round of the same stage has a line of its own
            if stage is None or stage.began is None:
                stage = self._stages[name] = StageShown(
                    name, total, self.rows.get(name, self.rows.get(None)), first=max(0, done - 1)
                )
            stage.done, stage.total = done, total
            if done < total:
                for display in self._displays:
                    display.show(stage)
            else:
                self.end(name)

    def count_rows(self, read: int | None, written: int | None) -> None:
        """Take the numbers of rows, where they are known and public."""
        self.rows = {None: read, "write": written, "reference": None}

    def begin(self, name: str) -> None:
        """Begin a step, or begin it again."""
        with self._lock:
            stage = self._stages.setdefault(name, StageShown(name))
            stage.began = monotonic() if stage.began is None else stage.began
            for display in self._displays:
                display.show(stage)

    def end(self, name: str) -> None:
        """End a stage or a step."""
        with self._lock:
            stage = self._stages.get(name)
            if stage is not None and stage.began is not None:
                stage.spent, stage.began = stage.seconds, None
                for display in self._displays:
                    display.end(stage)


class _Steps(logging.Handler):
    """Passes steps from the log `dpdask.steps` on to a report."""

    def __init__(self, report: Report, level: int) -> None:
        super().__init__(level)
        self._report = report

    def emit(self, record: logging.LogRecord) -> None:
        ended = getattr(record, "ended", None)
        if ended is None:
            self._report.begin(record.getMessage())
        else:
            self._report.end(ended)


@contextmanager
def show_progress(
    log_format: LogFormat = "auto", beside: Display | None = None
) -> Iterator[Report]:
    """Yield a report of progress, which is shown on stderr until the block ends.

    Parameters
    ----------
    log_format
        `bars` for a terminal, `text` or `json` for a log; `auto` takes bars on a terminal, and
        otherwise JSON.
    beside
        Where else it is shown.
    """
    if log_format == "auto":
        log_format = "bars" if sys.stderr.isatty() else "json"
    lines = nullcontext(Lines(as_json=log_format == "json"))
    with _open_bars() if log_format == "bars" else lines as shown:
        displays = filter(None, (shown, beside))
        level = logging.DEBUG if log_format == "bars" else logging.INFO
        with _listen(level, *displays) as report:
            yield report


@contextmanager
def show_fit(shown: bool | None) -> Iterator[Report | None]:
    """Yield a report of a fit in Python: lines that move on a terminal, a table in a notebook, and lines of a log elsewhere.

    Parameters
    ----------
    shown
        Whether it is shown; if not, None is yielded. By default it is on a terminal and in a
        notebook.
    """
    # a program without a console has no stderr
    moves = _in_notebook() or (sys.stderr is not None and sys.stderr.isatty())
    if not (moves if shown is None else shown):
        yield None
    elif moves:
        with (
            nullcontext(Table()) if _in_notebook() else _open_bars() as display,
            _listen(logging.DEBUG, display) as report,
        ):
            yield report
    else:
        with show_progress("text") as report:
            yield report


@contextmanager
def _listen(level: int, *displays: Display) -> Iterator[Report]:
    """Yield a report that also takes the steps in the log `dpdask.steps`, from a level on, until the block ends."""
    report = Report(*displays)
    handler, level_before, propagate = _Steps(report, level), LOG.level, LOG.propagate
    LOG.addHandler(handler)
    LOG.setLevel(level)
    LOG.propagate = False
    try:
        yield report
    finally:
        LOG.removeHandler(handler)
        LOG.setLevel(level_before)
        LOG.propagate = propagate


def _in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook; IPython is not imported for that."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None


class Lines:
    """Shows a line when a stage begins and ends, and one every few seconds between; of a step, the first."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._told: dict[str, float] = {}

    def show(self, stage: StageShown) -> None:
        """Write a line, unless one was written just before."""
        now = monotonic()
        if now - self._told.get(stage.name, -_PAUSE_SECONDS) >= _PAUSE_SECONDS:
            self._told[stage.name] = now
            self._write(stage)

    def end(self, stage: StageShown) -> None:
        """Write the last line of a stage."""
        if stage.total is not None:
            self._told.pop(stage.name, None)
            self._write(stage)

    def _write(self, stage: StageShown) -> None:
        now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        if not self._as_json:
            line = stage.name if stage.total is None else f"{stage.name}: {describe_stage(stage)}"
            echo(f"{now} {line}", err=True)
            return
        known: dict[str, Any] = {"time": now, "step": stage.name}
        if stage.total is not None:
            known = {
                "time": now,
                "stage": stage.name,
                "done": stage.done,
                "total": stage.total,
                "seconds": round(stage.seconds, 1),
            }
            rates = {
                "rows_per_second": stage.rows_per_second,
                "seconds_left": stage.seconds_left if stage.done < stage.total else None,
            }
            known |= {key: round(value) for key, value in rates.items() if value is not None}
        echo_json(known, err=True)


class Table:
    """Shows stages and steps as a table below the cell of a notebook; needs IPython alone."""

    def __init__(self) -> None:
        self._stages: dict[int, StageShown] = {}
        self._handle: Any = None
        self._drawn = 0.0

    def show(self, stage: StageShown) -> None:
        """Draw the table again, unless it was drawn just before."""
        is_new = id(stage) not in self._stages
        self._stages[id(stage)] = stage
        if is_new or monotonic() - self._drawn >= _DRAW_SECONDS:
            self._draw()

    def end(self, stage: StageShown) -> None:
        """Draw the table again."""
        self._stages[id(stage)] = stage
        self._draw()

    def _draw(self) -> None:
        self._drawn = monotonic()
        if self._handle is None:
            from IPython.display import display

            self._handle = display(self, display_id=True)
        else:
            self._handle.update(self)

    def __repr__(self) -> str:
        return "\n".join(" ".join(row) for row in self._rows())

    def _repr_html_(self) -> str:
        return make_html_table("Progress", ("", "step", "time", "done"), self._rows())

    def _rows(self) -> list[tuple[str, ...]]:
        return [
            (
                "…" if each.began is not None else "✓",
                each.name,
                _describe_seconds(each.seconds),
                "" if each.total is None else describe_stage(each),
            )
            for each in self._stages.values()
        ]


def describe_stage(stage: StageShown) -> str:
    """Return what is done of a stage, how fast, and how long it takes."""
    parts = [f"{stage.done:,}/{stage.total:,}"]
    if stage.rows_per_second is not None:
        parts.append(f"{float(f'{stage.rows_per_second:.2g}'):,.0f} rows/s")
    if stage.seconds_left is not None and stage.total is not None and stage.done < stage.total:
        parts.append(f"about {_describe_seconds(stage.seconds_left)} left")
    elif stage.done == stage.total:
        parts.append(f"in {_describe_seconds(stage.seconds)}")
    return ", ".join(parts)


def _describe_seconds(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


class _Bars:
    """Shows stages and steps as lines of a progress display of rich."""

    def __init__(self, progress: Any) -> None:
        self._progress = progress
        self._lines: dict[int, Any] = {}

    def show(self, stage: StageShown) -> None:
        if id(stage) not in self._lines:  # a stage is held by its line
            self._lines[id(stage)] = self._progress.add_task(
                stage.name, total=stage.total, stage=stage
            )
        self._progress.update(self._lines[id(stage)], completed=stage.done, total=stage.total)

    def end(self, stage: StageShown) -> None:
        self.show(stage)
        self._progress.update(
            self._lines[id(stage)], completed=stage.done or 1, total=stage.total or 1
        )


@contextmanager
def _open_bars() -> Iterator[Display]:
    """Yield lines that move: a spinner and a clock for each stage and step at work, redrawn ten times a second."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        ProgressColumn,
        SpinnerColumn,
        Task,
        TextColumn,
    )
    from rich.table import Column
    from rich.text import Text

    class Bar(BarColumn):
        """A bar of a stage, and nothing of a step."""

        def render(self, task: Task) -> Any:
            return super().render(task) if task.fields["stage"].total is not None else Text("")

    class Clock(ProgressColumn):
        """How long a stage or a step has lasted."""

        def render(self, task: Task) -> Text:
            return Text(_describe_seconds(task.fields["stage"].seconds), style="progress.elapsed")

    class Detail(ProgressColumn):
        """What is done of a stage, how fast, and how long it still takes."""

        max_refresh = 0.5

        def render(self, task: Task) -> Text:
            stage: StageShown = task.fields["stage"]
            return Text("" if stage.total is None else describe_stage(stage))

    name = TextColumn(
        "{task.description}", markup=False, table_column=Column(min_width=10, no_wrap=True)
    )
    columns = (SpinnerColumn(finished_text="✓"), name, Bar(bar_width=20), Clock(), Detail())

    with Progress(*columns, console=Console(file=make_lasting(sys.stderr))) as progress:
        yield _Bars(progress)
