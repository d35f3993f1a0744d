"""Processes that charge a ledger at once, some of which are killed; and the private PostgreSQL server of the tests.

As a program: `ledger_worker.py URL DATASET FOLDER PLAN`. The plan is a JSON list of workers: {"runs": [names], "kill": {name: moment},
"kill_after": seconds}. Moments: `composing` holds the dataset's lock, `committing` has written and not yet committed, `intended` has charged.
Every worker appends what it did, a line a run, to FOLDER/<number>; the program prints the exit status of each.
"""

from __future__ import annotations

import json
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from dpdask.errors import BudgetError
from dpdask.privacy.ledger import Charge, Ledger, sum_charges

CHARGE = Charge(epsilon=0.25, delta=2.0**-20, event={"version": 1, "kind": "race"})


def main(url: str, dataset: str, folder: Path, plan: list[dict[str, Any]]) -> None:
    gate, opener = os.pipe()
    pids = [_fork(url, dataset, folder / str(number), worker, (gate, opener)) for number, worker in enumerate(plan)]
    os.close(opener)
    started = time.monotonic()
    for seconds, pid in sorted((worker["kill_after"], pid) for worker, pid in zip(plan, pids, strict=True) if "kill_after" in worker):
        time.sleep(max(0.0, started + seconds - time.monotonic()))
        os.kill(pid, signal.SIGKILL)
    statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    sys.stdout.write(json.dumps({"statuses": statuses, "seconds": time.monotonic() - started}))


def _fork(url: str, dataset: str, log: Path, worker: dict[str, Any], pipe: tuple[int, int]) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        os.close(pipe[1])
        os.read(pipe[0], 1)  # ends when the parent has started all
        with log.open("a", buffering=1) as lines:
            for run_id in worker["runs"]:
                lines.write(f"{_charge(url, dataset, run_id, worker.get('kill', {}).get(run_id))} {run_id}\n")
        os._exit(0)
    finally:
        os._exit(1)


def _charge(url: str, dataset: str, run_id: str, moment: str | None) -> str:
    ledger = _doomed(url, moment)
    try:
        ledger.intend(dataset, run_id, CHARGE)
    except BudgetError:
        return "refused"
    if moment == "intended":
        _die()
    ledger.commit(dataset, run_id)
    return "accepted"


def _doomed(url: str, moment: str | None) -> Ledger:
    def compose(charges: Sequence[Charge], delta: float) -> float:
        if moment == "composing":
            _die()
        return sum_charges(charges, delta)

    ledger = Ledger(url, compose=compose)
    if moment == "committing":
        sa.event.listen(ledger._store._writer, "commit", lambda _: _die())
    return ledger


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """The URL of a PostgreSQL server: DPDASK_TEST_POSTGRES, or a private one on a socket, from what is installed."""
    if given := os.environ.get("DPDASK_TEST_POSTGRES"):
        yield given
        return
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3])) or [Path(shutil.which("initdb") or "")]
    if not found[-1].is_file():
        pytest.skip("no PostgreSQL: install it (apt-get install postgresql) or give its URL in DPDASK_TEST_POSTGRES")
    with _private_server(found[-1].parent) as url:
        yield url


@contextmanager
def _private_server(binaries: Path) -> Iterator[str]:
    folder = Path(tempfile.mkdtemp(prefix="dpdask-pg-", dir="/tmp"))  # short: a socket's path has at most 107 characters
    identity: dict[str, Any] = {}
    if os.geteuid() == 0:  # PostgreSQL refuses to run as root
        user = next(entry for name in ("postgres", "nobody") for entry in pwd.getpwall() if entry.pw_name == name)
        identity = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
        os.chown(folder, user.pw_uid, user.pw_gid)

    def run(*command: str) -> None:
        with (folder / "out").open("ab") as out:
            subprocess.run(
                [str(binaries / command[0]), *command[1:]], check=True, cwd=folder, stdin=subprocess.DEVNULL, stdout=out, stderr=out, **identity
            )

    data = str(folder / "data")
    try:
        run("initdb", "-D", data, "-U", "dpdask", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync")
        run("pg_ctl", "-D", data, "-w", "-l", str(folder / "log"), "-o", f"-c listen_addresses='' -k {folder}", "start")
        try:
            yield f"postgresql://dpdask@/postgres?host={folder}"
        finally:
            run("pg_ctl", "-D", data, "-w", "-m", "immediate", "stop")
    finally:
        shutil.rmtree(folder)


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of a place where there is no ledger yet."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'ledger.db'}"
        return
    server = request.getfixturevalue("postgres")
    schema = f"dpdask_{os.getpid()}_{time.monotonic_ns()}"
    engine = sa.create_engine(sa.make_url(server).set(drivername="postgresql+psycopg"), poolclass=sa.NullPool)
    with engine.begin() as connection:
        connection.exec_driver_sql(f"CREATE SCHEMA {schema}")
    yield sa.make_url(server).update_query_dict({"options": f"-csearch_path={schema}"}).render_as_string(hide_password=False)
    with engine.begin() as connection:
        connection.exec_driver_sql(f"DROP SCHEMA {schema} CASCADE")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), json.loads(sys.argv[4]))
