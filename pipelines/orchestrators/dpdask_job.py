"""Run a dpdask job from an orchestrator, and say what its exit code means. Standard library alone: the orchestrator's environment
needs no dpdask, which runs in its own.

Environment variables:

- `DPDASK_JOB`: the job's file.
- `DPDASK`: the command, for instance `/srv/dpdask/bin/dpdask`. By default `dpdask` from the PATH.
- `DPDASK_RETRY_SECONDS`: the wait before the first retry, 60 by default; further waits are longer.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import tempfile
from collections.abc import Callable
from typing import Any

RETRIES = 5
RETRY_SECONDS = float(os.environ.get("DPDASK_RETRY_SECONDS", "60"))
# a failure that may pass; an interrupt and a termination; a process that was killed, by the kernel for its memory or with its machine,
# as Python tells it, and as a shell or a container does. Each time the same command resumes the run, and it is charged once
RESUMED = (75, 130, 143, 137, -2, -15, -9)


class TryAgainError(Exception):
    """The run failed for a reason that may pass, or was ended from outside: the same command resumes it."""


class GiveUpError(Exception):
    """The run failed, and another try would fail too: the budget is too small (77), or the job, the data or the input are wrong (64 to 66)."""


def run_job(log: Callable[[str], object], job: str = "", *options: str) -> dict[str, Any]:
    """Run a job, or resume it, and return what may be shown of its release.

    Parameters
    ----------
    log
        Called with each line of progress, and with the exit code.
    job
        The job's file; by default `DPDASK_JOB`.
    options
        Options of `dpdask run`, for instance `--set` and `output.path=s3://lake/2026-11-22`.

    Returns
    -------
    The status, the output, the released rows, ε and δ of the release, and, with a ledger, ε spent and left of the dataset's budget.
    """
    command = [
        *shlex.split(os.environ.get("DPDASK", "dpdask")),
        "run",
        job or os.environ["DPDASK_JOB"],
        "--json",
        *options,
    ]
    with tempfile.TemporaryFile("w+") as out:
        code, message = _run(command, out.fileno(), log)
        log(f"dpdask ended with exit code {code}")
        if code:
            raise (TryAgainError if code in RESUMED else GiveUpError)(
                f"exit code {code}: {message}"
            )
        out.seek(0)
        return _choose_facts(json.load(out))


def _run(command: list[str], out: int, log: Callable[[str], object]) -> tuple[int, str]:
    """Return the exit code and the last line of stderr; if this process is stopped, so is the command."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "PYTHONHOME")
    }  # the orchestrator's
    pipes: dict[str, Any] = {
        "stdin": subprocess.DEVNULL,
        "stdout": out,
        "stderr": subprocess.PIPE,
        "text": True,
        "errors": "replace",
    }
    try:
        process = subprocess.Popen(command, env=environment, **pipes)  # noqa: S603 - the command that the deployment names
    except OSError as error:
        raise GiveUpError(
            f"{command[0]} cannot be started ({type(error).__name__}); set DPDASK to the command"
        ) from None
    last = ""
    with process:
        try:
            assert process.stderr is not None
            for line in process.stderr:
                last = line.rstrip()
                log(last)
        except BaseException:
            process.terminate()
            process.wait()  # on KeyboardInterrupt, `with` waits for a quarter of a second only
            raise
    return process.returncode, last


def _choose_facts(found: dict[str, Any]) -> dict[str, Any]:
    """Return what is published with the release, and the balance. Warnings stay in the log: they may depend on private rows."""
    facts = {key: found[key] for key in ("status", "output", "rows", "epsilon", "delta")}
    balance = found["balance"] or {}
    facts |= {key: balance.get(key) for key in ("epsilon_spent", "epsilon_left")}
    return {key: value for key, value in facts.items() if value is not None}
