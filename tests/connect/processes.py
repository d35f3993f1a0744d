"""A scheduler and workers as processes of their own, each with its own environment, user and certificates."""

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
QUIET = ["--no-dashboard", "--dashboard-address", "127.0.0.1:0"]
AS_NOBODY = """
import sys, os, dpdask.connect.spec, dpdask.engine.write, numba, pandas, encodings.idna, distributed.cli.dask_worker as worker
os.setgroups([]); os.setgid(65534); os.setuid(65534); os.chdir("/")
worker.main(sys.argv[1:])
"""


def python_path(*first):
    """An environment in which modules are found in some folders first."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (*first, ROOT)))}


@contextlib.contextmanager
def running(words, log, environment=None):
    """Start a process and end it."""
    with (
        log.open("wb") as out,
        subprocess.Popen(
            [*map(str, words)],
            stdout=out,
            stderr=out,
            env=environment or python_path(),
            cwd=log.parent,
        ) as process,
    ):
        try:
            yield process
        finally:
            process.kill()


@contextlib.contextmanager
def scheduler(folder, *options, prefix=()):
    """Start a scheduler on the loopback, or where `options` say; yield its process and its address."""
    file = folder / "scheduler.json"
    words = [
        *prefix,
        sys.executable,
        "-m",
        "distributed.cli.dask_scheduler",
        "--port",
        "0",
        *QUIET,
        "--scheduler-file",
        file,
    ]
    with running(
        [*words, *(options or ("--host", "127.0.0.1"))], folder / "scheduler.log"
    ) as process:
        yield process, wait_for_address(file, folder / "scheduler.log")


def wait_for_address(file, log):
    for _ in range(600):
        with contextlib.suppress(FileNotFoundError, ValueError):
            return str(json.loads(file.read_text())["address"])
        time.sleep(0.1)
    raise AssertionError(log.read_text())


def worker_words(address, *options):
    """The command line of a worker without a nanny: one process, which ends when it is killed."""
    return [sys.executable, "-m", "distributed.cli.dask_worker", *worker_options(address, *options)]


def worker_options(address, *options):
    # dead workers are given up after five minutes: less kills those that a busy machine is slow with
    return [address, "--nthreads", "1", "--no-nanny", *QUIET, *options]


def make_certificates(folder, *options):
    """Make certificates as the documents say; return a client's block."""
    subprocess.run(
        [sys.executable, str(ROOT / "cluster/tls/make_certificates.py"), str(folder), *options],
        check=True,
    )
    return {
        "ca": str(folder / "ca.pem"),
        "cert": str(folder / "client.pem"),
        "key": str(folder / "client-key.pem"),
    }


def hide_dpdask(folder):
    """Make a folder for PYTHONPATH with which Python finds no dpdask: an environment that has Dask alone."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text("""
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "dpdask":
            raise ModuleNotFoundError("No module named 'dpdask'", name="dpdask")
sys.meta_path.insert(0, Hidden())
""")
    return folder
