"""Processes that charge a ledger at once, some of which are killed; and the private PostgreSQL server of the tests.

As a program: `ledger_worker.py URL DATASET FOLDER PHASES`. PHASES is a JSON list of phases, one after the other, each a list of workers, all
at once: {"init": limit, "runs": [names], "kill": {name: moment}, "kill_after": lines of its log}. Moments: `composing` holds the dataset's lock,
`committing` has written and not yet committed, `intended` has charged. A worker appends what it did, a line a run, to
FOLDER/<phase>-<worker>; the program prints for each phase its exit statuses, its seconds, and how many runs are charged after it.

For pytest, it is also the plugin of the two ledger tests (PYTEST_DONT_REWRITE: they import it before it is one, and it asserts nothing).
"""

import json
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import sqlalchemy as sa

from dpdask.errors import BudgetError
from dpdask.privacy.ledger import Charge, Ledger, sum_charges

CHARGE = Charge(epsilon=0.25, delta=2.0**-30, event={"version": 1, "kind": "race"})


def main(url, dataset, folder, phases):
    done = []
    for number, workers in enumerate(phases):
        logs = [folder / f"{number}-{worker}" for worker in range(len(workers))]
        done.append(
            {
                **_phase(url, dataset, logs, workers),
                "n_runs": Ledger(url).read_balance(dataset).n_runs,
            }
        )
    sys.stdout.write(json.dumps(done))


def run_phases(url, dataset, folder, phases):
    """Run this file as a program, and return what it prints."""
    command = [sys.executable, __file__, url, dataset, str(folder), json.dumps(phases)]
    done = subprocess.run(
        command,
        check=True,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    return json.loads(done.stdout)


def _phase(url, dataset, logs, workers):
    gate, opener = os.pipe()
    pids = [
        _fork(url, dataset, log, worker, (gate, opener))
        for log, worker in zip(logs, workers, strict=True)
    ]
    os.close(gate)
    os.close(opener)
    started = time.monotonic()
    for worker, pid, log in zip(workers, pids, logs, strict=True):
        if "kill_after" in worker:
            _kill_after(worker["kill_after"], pid, log)
    statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    return {"statuses": statuses, "seconds": round(time.monotonic() - started, 3)}


def _kill_after(n_lines, pid, log):
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (
        log.exists() and len(log.read_bytes().splitlines()) >= n_lines
    ):
        time.sleep(0.001)
    os.kill(pid, signal.SIGKILL)


def _fork(url, dataset, log, worker, pipe):
    pid = os.fork()
    if pid:
        return pid
    try:
        os.close(pipe[1])
        os.read(pipe[0], 1)  # ends when the parent has started all
        ledger = Ledger(url)
        if "init" in worker:
            ledger.init(dataset, worker["init"])
        with log.open("a", buffering=1) as lines:
            for run_id in worker["runs"]:
                moment = worker.get("kill", {}).get(run_id)
                lines.write(
                    f"{_charge(_doomed(url, moment) if moment else ledger, dataset, run_id, moment)} {run_id}\n"
                )
        os._exit(0)
    finally:
        os._exit(1)


def _charge(ledger, dataset, run_id, moment):
    try:
        ledger.intend(dataset, run_id, CHARGE)
    except BudgetError:
        return "refused"
    if moment == "intended":
        _die()
    ledger.commit(dataset, run_id)
    return "accepted"


def _doomed(url, moment):
    def compose(charges, delta):
        if moment == "composing":
            _die()
        return sum_charges(charges, delta)

    ledger = Ledger(url, compose=compose)
    if moment == "committing":
        sa.event.listen(ledger._store._writer, "commit", lambda _: _die())
    return ledger


def _die():
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(scope="session")
def postgres():
    """The URL of a PostgreSQL server: DPDASK_TEST_POSTGRES, or a private one on a socket, from what is installed."""
    if given := os.environ.get("DPDASK_TEST_POSTGRES"):
        yield given
        return
    found = sorted(
        Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3])
    ) or [Path(shutil.which("initdb") or "")]
    if not found[-1].is_file():
        pytest.skip(
            "no PostgreSQL: install it (apt-get install postgresql) or give its URL in DPDASK_TEST_POSTGRES"
        )
    with _private_server(found[-1].parent) as url:
        yield url


@contextmanager
def _private_server(binaries):
    folder = Path(
        tempfile.mkdtemp(prefix="dpdask-pg-", dir="/tmp")
    )  # short: a socket's path has at most 107 characters
    identity = {}
    if os.geteuid() == 0:  # PostgreSQL refuses to run as root
        user = next(
            entry
            for name in ("postgres", "nobody")
            for entry in pwd.getpwall()
            if entry.pw_name == name
        )
        identity = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
        os.chown(folder, user.pw_uid, user.pw_gid)

    data, url = folder / "data", f"postgresql://dpdask@/postgres?host={folder}"
    try:
        with (folder / "out").open("ab") as out:
            init = [
                str(binaries / "initdb"),
                "-D",
                str(data),
                "-U",
                "dpdask",
                "-A",
                "trust",
                "-E",
                "UTF8",
                "--locale=C",
                "--no-sync",
            ]
            subprocess.run(
                init,
                check=True,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                **identity,
            )
            start = ["sh", "-c", _GUARD, str(binaries / "postgres"), str(data), str(folder)]
            guard = subprocess.Popen(
                start, cwd=folder, stdin=subprocess.PIPE, stdout=out, stderr=out, **identity
            )
        with guard:  # its end closes the pipe that the guard reads
            _await(url)
            yield url
    finally:
        shutil.rmtree(folder)


# The server ends with pytest, even with one that is killed: then the pipe closes too.
_GUARD = """"$0" -D "$1" -c listen_addresses= -k "$2" </dev/null & read -r _; kill -QUIT $!; wait $!; rm -rf "$1" """


def _await(url):
    engine = sa.create_engine(
        sa.make_url(url).set(drivername="postgresql+psycopg"), poolclass=sa.NullPool
    )
    deadline = time.monotonic() + 60
    while True:
        try:
            engine.connect().close()
        except sa.exc.OperationalError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            return


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request, tmp_path):
    """The URL of a place where there is no ledger yet."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'ledger.db'}"
        return
    server = request.getfixturevalue("postgres")
    schema = f"dpdask_{os.getpid()}_{time.monotonic_ns()}"
    engine = sa.create_engine(
        sa.make_url(server).set(drivername="postgresql+psycopg"), poolclass=sa.NullPool
    )
    with engine.begin() as connection:
        connection.exec_driver_sql(f"CREATE SCHEMA {schema}")
    yield (
        sa.make_url(server)
        .update_query_dict({"options": f"-csearch_path={schema}"})
        .render_as_string(hide_password=False)
    )
    with engine.begin() as connection:
        connection.exec_driver_sql(f"DROP SCHEMA {schema} CASCADE")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), json.loads(sys.argv[4]))
