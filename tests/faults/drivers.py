"""Drivers that strike themselves, for the fixture `drivers` of conftest: one server of forks for the whole session."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


class Drivers:
    """Runs the command line in processes that strike themselves."""

    def __init__(self, server: subprocess.Popen[str], log: Path) -> None:
        self._server, self._log = server, log

    def start(
        self,
        *arguments: str | Path,
        point: str | None = None,
        strike: str = "kill",
        sign: Path | None = None,
        environment: Mapping[str, str] | None = None,
        times: int = 1,
    ) -> int:
        request = {
            "arguments": [*map(str, arguments)],
            "point": point,
            "strike": strike,
            "log": str(self._log),
            "sign": str(sign or ""),
        }
        assert self._server.stdin is not None
        self._server.stdin.write(
            json.dumps({**request, "environment": dict(environment or {}), "times": times}) + "\n"
        )
        self._server.stdin.flush()
        return int(self._answer()["pid"])

    def wait(self) -> tuple[int, str]:
        [code] = self._answer()["codes"]
        lines = [line for line in self._log.read_text().splitlines() if not line.startswith("{")]
        return code, "\n".join(lines)

    def run(
        self,
        *arguments: str | Path,
        point: str | None = None,
        strike: str = "kill",
        environment: Mapping[str, str] | None = None,
    ) -> tuple[int, str]:
        self.start(*arguments, point=point, strike=strike, environment=environment)
        return self.wait()

    def race(
        self, times: int, *arguments: str | Path, environment: Mapping[str, str] | None = None
    ) -> list[int]:
        """Run the same command in several processes at once, and return their exit codes."""
        self.start(*arguments, times=times, environment=environment)
        codes: list[int] = self._answer()["codes"]
        return codes

    def wait_until_warm(self) -> None:
        """Wait for what the server says first."""
        assert self._answer() == {"warm": True}

    def _answer(self) -> dict[str, Any]:
        assert self._server.stdout is not None
        answer: dict[str, Any] = json.loads(self._server.stdout.readline())
        return answer


def serving(log: Path) -> Iterator[Drivers]:
    """Yield drivers of one server, which ends with them."""
    words = [sys.executable, "-m", "faults.driver"]
    tests = Path(__file__).parents[1]
    environment = {
        name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"
    }  # as a command may have set it in this process
    with subprocess.Popen(
        words, cwd=tests, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        drivers = Drivers(server, log)
        drivers.wait_until_warm()  # or this process compiles the kernels that the server is compiling
        yield drivers
        assert server.stdin is not None
        server.stdin.close()
