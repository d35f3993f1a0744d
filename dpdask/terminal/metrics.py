"""The state of a run as metrics in a file or at a port, in the text format that Prometheus reads."""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import TCPServer
from typing import Any

from dpdask.terminal.progress import StageShown
from dpdask.version import __version__

_PAUSE_SECONDS = 5.0
_PAGE = "/metrics"
_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PORT = re.compile(r"(?:(?P<host>[\w.-]+|\[[\da-fA-F:]+\]):)?(?P<port>\d{1,5})")
_LINE_ENDS = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
_TOLD = {
    "run_info": "The job, and the version of dpdask that runs it.",
    "run_started_timestamp_seconds": "When the run started.",
    "run_updated_timestamp_seconds": "When the driver last wrote this: at least every 5 seconds, or when it is asked.",
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


class _File:
    """A file that is written every few seconds, and when it is told; each time it is replaced as a whole."""

    def __init__(self, path: str, tell: Callable[[], str]) -> None:
        self._path, self._tell = Path(path), tell
        self._lock, self._ended = threading.Lock(), threading.Event()
        self.fault = ""
        self.update()
        self._thread = threading.Thread(target=self._repeat, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        self._thread.join()
        self.update()

    def _repeat(self) -> None:
        while not self._ended.wait(_PAUSE_SECONDS):
            self.update()

    def update(self) -> None:
        beside = self._path.parent / f".{self._path.name}.{os.getpid()}.tmp"
        with self._lock:
            try:
                # in a folder of all users, nothing that another one has made is opened
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
                with os.fdopen(os.open(beside, flags, 0o644), "w", encoding="utf-8") as file:
                    file.write(self._tell())
                beside.replace(self._path)
                self.fault = ""
            except OSError as error:  # no reason for a run to fail
                self.fault = error.strerror or type(error).__name__
                with suppress(OSError):  # the place is no folder, or the file another user's
                    beside.unlink(missing_ok=True)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, host: str, port: int, tell: Callable[[], str]) -> None:
        class Page(BaseHTTPRequestHandler):
            timeout = _PAUSE_SECONDS

            def do_GET(self) -> None:
                if self.path.partition("?")[0] != _PAGE:
                    self.send_error(HTTPStatus.NOT_FOUND)
                    return
                content = tell().encode()
                self.send_response(HTTPStatus.OK)
                self.send_header("Content-Type", _CONTENT_TYPE)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: Any) -> None:
                pass

        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), Page)

    def server_bind(self) -> None:
        TCPServer.server_bind(self)  # without looking for a name of this machine

    def handle_error(self, *_: Any) -> None:
        pass  # a reader that went away


class _Port:
    """A page at a port, by default of this machine alone, as long as the run lasts."""

    fault = ""

    def __init__(self, host: str, port: int, tell: Callable[[], str]) -> None:
        self._server: _Server | None = None
        try:
            self._server = _Server(host, port, tell)
        except (OSError, OverflowError) as error:  # no reason for a run to fail
            self.fault = getattr(error, "strerror", None) or "no such address"
            return
        threading.Thread(target=self._server.serve_forever, args=(0.1,), daemon=True).start()

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    def update(self) -> None:
        """Do nothing: the page is made when it is asked for."""


class Metrics:
    """Keeps metrics of a run in a file (a path), or at a port (`PORT` or `HOST:PORT`).

    Privacy
    -------
    Numbers of rows are given only where they are public. The exit code may depend on private rows, so
    readers are stewards.
    """

    def __init__(self, place: str) -> None:
        self._began = time.time()
        self._stages: dict[str, StageShown] = {}
        self._about: dict[str, str] = {"version": __version__}
        self._known: dict[str, dict[tuple[str, str] | None, float]] = {}
        self._code: int | None = None

        def tell() -> str:
            return "".join(self._list_lines())

        found = _PORT.fullmatch(place)
        self._place: _File | _Port = (
            _File(place, tell)
            if found is None
            else _Port((found["host"] or "127.0.0.1").strip("[]"), int(found["port"]), tell)
        )

    @property
    def fault(self) -> str:
        """What kept the metrics from being told last; empty if nothing did."""
        return self._place.fault

    def show(self, stage: StageShown) -> None:
        """Take a stage that begins or goes on."""
        self._stages[stage.name] = stage

    def end(self, stage: StageShown) -> None:
        """Take a stage that has ended."""
        self._stages[stage.name] = stage
        self._place.update()

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
        """Tell the exit code in the file, or close the port."""
        self._code = code
        self._place.close()

    def _list_lines(self) -> Iterable[str]:
        """Return the lines: of each metric what it means, and its values."""
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
        about = ",".join(
            f"{key}={_quote(value)}" for key, value in sorted(dict(self._about).items())
        )
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
    place: str | None, find_code: Callable[[BaseException], int], warn: Callable[[str], None]
) -> Iterator[Metrics | None]:
    """Keep metrics in a file or at a port until the block ends; nothing of that fails a run."""
    if place is None:
        yield None
        return
    metrics, code = Metrics(place), 0
    try:
        yield metrics
    except BaseException as error:
        code = find_code(error)
        raise
    finally:
        metrics.close(code)
        if metrics.fault:
            warn(f"the metrics could not be kept ({metrics.fault})")
