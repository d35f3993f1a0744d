"""The state of a run as metrics in a file, in the text format that Prometheus reads."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from dpdask.terminal.progress import StageShown
from dpdask.version import __version__

_PAUSE_SECONDS = 5.0
_LINE_ENDS = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
_TOLD = {
    "run_info": "The job, and the version of dpdask that runs it.",
    "run_started_timestamp_seconds": "When the run started.",
    "run_updated_timestamp_seconds": "When the driver last wrote this file: every 5 seconds.",
    "run_seconds": "How long the run has lasted.",
    "run_running": "Whether the run is at work.",
    "run_stage_seconds": "How long a stage has lasted.",
    "run_stage_done_ratio": "Which part of a stage's tasks is done.",
    "run_stage_rows": "About how many rows a stage has done, if the number of rows is public.",
    "run_exit_code": "The exit code of the run, once it has ended.",
    "run_released": "Whether the run ended with a release, or found it released.",
    "dataset_epsilon_spent": "The epsilon that all releases of the dataset have spent together.",
    "dataset_epsilon_limit": "The epsilon that they may spend together.",
}


class Metrics:
    """Writes a file of metrics every few seconds, and when a stage ends; each time it is replaced as a whole.

    Privacy
    -------
    Numbers of rows are given only where they are public. The exit code may depend on private rows, so
    readers of the file are stewards.
    """

    def __init__(self, path: str) -> None:
        self._path, self._began = Path(path), time.time()
        self._stages: dict[str, StageShown] = {}
        self._about: dict[str, str] = {"version": __version__}
        self._known: dict[str, dict[tuple[str, str] | None, float]] = {}
        self._code: int | None = None
        self._lock, self._ended = threading.Lock(), threading.Event()
        # what kept the file from being written last; empty if nothing did
        self.fault = ""
        self._write()
        self._thread = threading.Thread(target=self._repeat, daemon=True)
        self._thread.start()

    def show(self, stage: StageShown) -> None:
        """Take a stage that begins or goes on."""
        self._stages[stage.name] = stage

    def end(self, stage: StageShown) -> None:
        """Take a stage that has ended."""
        self._stages[stage.name] = stage
        self._write()

    def name(self, job: str) -> None:
        """Take the name of the job."""
        self._about["job"] = job

    def tell(self, *, released: bool, balance: Mapping[str, Any] | None, dataset: str) -> None:
        """Take what a run ended with, and what its dataset has spent."""
        self._known["run_released"] = {None: float(released)}
        if balance is not None:
            for name in ("spent", "limit"):
                amount = float(balance[f"epsilon_{name}"])
                self._known[f"dataset_epsilon_{name}"] = {("dataset", dataset): amount}

    def close(self, code: int) -> None:
        """Write the file for the last time."""
        self._code = code
        self._ended.set()
        self._thread.join()
        self._write()

    def _repeat(self) -> None:
        while not self._ended.wait(_PAUSE_SECONDS):
            self._write()

    def _write(self) -> None:
        beside = self._path.parent / f".{self._path.name}.{os.getpid()}.tmp"
        with self._lock:
            try:
                # no link that another user has made in a folder of all users is followed
                flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
                with os.fdopen(os.open(beside, flags, 0o644), "w", encoding="utf-8") as file:
                    file.write("".join(self._list_lines()))
                beside.replace(self._path)
                self.fault = ""
            except OSError as error:  # no reason for a run to fail
                self.fault = error.strerror or type(error).__name__
                with suppress(OSError):  # the place is no folder, or the file another user's
                    beside.unlink(missing_ok=True)

    def _list_lines(self) -> Iterable[str]:
        """Return the lines of the file: of each metric what it means, and its values."""
        now, stages = time.time(), [*self._stages.values()]
        parts = [(each, each.done / each.total) for each in stages if each.total]
        label = "stage"
        values: dict[str, Mapping[tuple[str, str] | None, float]] = {
            "run_started_timestamp_seconds": {None: self._began},
            "run_updated_timestamp_seconds": {None: now},
            "run_seconds": {None: now - self._began},
            "run_running": {None: float(self._code is None)},
            "run_stage_seconds": {(label, each.name): each.seconds for each in stages},
            "run_stage_done_ratio": {(label, each.name): part for each, part in parts},
            "run_stage_rows": {
                (label, each.name): round(each.rows * part)
                for each, part in parts
                if each.rows is not None
            },
            "run_exit_code": {} if self._code is None else {None: float(self._code)},
            **self._known,
        }
        about = ",".join(f"{key}={_quote(value)}" for key, value in sorted(self._about.items()))
        for name, meaning in _TOLD.items():
            found = values.get(name, {})
            lines = [
                f"dpdask_{name}{_write_labels(key)} {value!r}\n" for key, value in found.items()
            ]
            if name == "run_info":
                lines = [f"dpdask_{name}{{{about}}} 1\n"]
            if lines:
                yield f"# HELP dpdask_{name} {meaning}\n# TYPE dpdask_{name} gauge\n"
                yield from lines


def _write_labels(label: tuple[str, str] | None) -> str:
    return "" if label is None else f"{{{label[0]}={_quote(label[1])}}}"


def _quote(value: str) -> str:
    return f'"{value.translate(_LINE_ENDS)}"'


@contextmanager
def keep_metrics(
    path: str | None, find_code: Callable[[BaseException], int], warn: Callable[[str], None]
) -> Iterator[Metrics | None]:
    """Keep metrics in a file until the block ends, last with the exit code; nothing of that fails a run."""
    if path is None:
        yield None
        return
    metrics, code = Metrics(path), 0
    try:
        yield metrics
    except BaseException as error:
        code = find_code(error)
        raise
    finally:
        metrics.close(code)
        if metrics.fault:
            warn(f"the metrics could not be written ({metrics.fault})")
