"""Processes that are forked from one that has imported dpdask, for the fixture `drivers` of conftest."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from subprocess import CompletedProcess

Words = str | Path
Environment = Mapping[str, str | None] | None


class Drivers:
    """Runs the command line, which may strike itself, and programs, each in a process of its own that imports nothing.

    `environment` is added to that of the server; a name without a value is removed. Processes begin in the folder of the test, and end
    without what Python does at its end.
    """

    def __init__(self, server, folder):
        self._server, self._out, self._err = server, folder / "out", folder / "err"
        self._children = []

    def start(
        self,
        *arguments,
        point=None,
        strike="kill",
        sign=None,
        environment=None,
        times=1,
        program=None,
        cwd=None,
    ):
        """Start the command line, and return the number of its process."""
        self._out.unlink(missing_ok=True)
        self._err.unlink(missing_ok=True)
        place = {"out": str(self._out), "err": str(self._err), "cwd": str(cwd or Path.cwd())}
        struck = {"point": point, "strike": strike, "sign": str(sign or "")}
        given = {
            "arguments": [*map(str, arguments)],
            "environment": dict(environment or {}),
            "times": times,
            "program": program,
        }
        self._children = self._ask({**given, **struck, **place})["children"]
        return self._children[0]

    def wait(self):
        """Return the exit code and what was printed but for lines of progress."""
        ended = self._end()
        return ended.returncode, "\n".join(
            line for line in (ended.stdout + ended.stderr).splitlines() if not line.startswith("{")
        )

    def run(self, *arguments, point=None, strike="kill", environment=None):
        self.start(*arguments, point=point, strike=strike, environment=environment)
        return self.wait()

    def call(self, *arguments, environment=None, cwd=None):
        """Run the command line."""
        self.start(*arguments, environment=environment, cwd=cwd)
        return self._end()

    def python(self, program, *arguments, environment=None, cwd=None):
        """Run a program, as `python -c` would where everything is imported already."""
        self.start(*arguments, program=program, environment=environment, cwd=cwd)
        return self._end()

    def race(self, times, *arguments, environment=None):
        """Run the same command in several processes at once, and return their exit codes."""
        self.start(*arguments, times=times, environment=environment)
        return self._ask({"wait": self._children})["codes"]

    def _end(self):
        [code] = self._ask({"wait": self._children})["codes"]
        return CompletedProcess(
            [], code, *(path.read_text(errors="replace") for path in (self._out, self._err))
        )

    def _ask(self, request):
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        return self.answer()

    def answer(self):
        """Return what the server says next."""
        assert self._server.stdout is not None
        return json.loads(self._server.stdout.readline())


def serving(folder):
    """Yield drivers of one server, which ends with them."""
    words = [sys.executable, "-m", "faults.driver"]
    tests = Path(__file__).parents[1]
    environment = {
        name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"
    }  # as a command may have set it in this process
    with subprocess.Popen(
        words, cwd=tests, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        drivers = Drivers(server, folder)
        assert drivers.answer() == {
            "warm": True
        }  # or this process compiles the kernels that the server is compiling
        yield drivers
        assert server.stdin is not None
        server.stdin.close()
