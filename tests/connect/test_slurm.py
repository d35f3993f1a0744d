"""Jobs on a real SLURM of two virtual nodes: the same bytes as on threads, also if SLURM cancels workers in the middle."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
import yaml
from connect.processes import ROOT, python_path
from e2e.helpers import command, digests, error_line, lake, run_here, write_job
from services import slurm

from dpdask.connect.private import sweep_certificates

needs_slurm = pytest.mark.skipif(bool(slurm.why_not()), reason=slurm.why_not())

[TEXT] = re.findall(
    r"```yaml\n(cluster:\n.*?)```", (ROOT / "cluster/slurm/README.md").read_text(), re.DOTALL
)
WRITTEN = yaml.safe_load(TEXT)["cluster"]
BLOCK = {**WRITTEN, "workers": 2, "memory": "1GB"}  # these nodes are small


@pytest.fixture(scope="module")
def environment():
    folder = Path(
        tempfile.mkdtemp(prefix="dpdask-slurm-")
    )  # munge takes only short paths that everybody may enter
    folder.chmod(0o755)
    with slurm.running(folder) as found:
        yield {**python_path(), **found, "PYTHONPATH": python_path()["PYTHONPATH"]}
    shutil.rmtree(folder)


def run(job, environment, strike=None):
    """Run a job; call `strike` once, while shards are written."""
    said = []
    with subprocess.Popen(
        command("run", job),
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=job.parent,
    ) as driver:
        assert driver.stderr is not None
        assert driver.stdout is not None
        for line in driver.stderr:
            said.append(line)
            if (
                strike is not None and '"stage": "write", "done": 0,' in line
            ):  # a log has few lines: this one, and later ones after seconds
                time.sleep(0.3)
                strike()
        return subprocess.CompletedProcess(
            [], driver.wait(timeout=200), driver.stdout.read(), "".join(said)
        )


def jobs(environment):
    """The SLURM jobs that run or wait."""
    return slurm.ask("squeue", "-h", "-o", "%i", environment=environment).split()


ADAPTIVE = {"kind": "slurm", "adaptive": {"maximum": 2}, "memory": "1GB"}
CASES = [
    pytest.param(BLOCK, 0, id="in peace", marks=pytest.mark.slow),
    pytest.param(BLOCK, 1, id="one cancelled"),
    pytest.param(BLOCK, 2, id="all cancelled", marks=pytest.mark.slow),
    pytest.param(ADAPTIVE, 0, id="adaptive", marks=pytest.mark.slow),
]


@needs_slurm
@pytest.mark.parametrize(("block", "cancelled"), CASES)
def test_the_same_bytes(block, cancelled, environment, tmp_path):
    source = lake(tmp_path / "in", [3000] * 10, row_group=1000)
    job = write_job(
        tmp_path / "job", source, tmp_path / "out", cluster=block, output__rows_per_shard=1000
    )
    found = []

    def strike():
        check_private(job.parent)
        found.extend(jobs(environment))
        for number in found[:cancelled]:
            slurm.ask("scancel", number, environment=environment)

    scratch = tmp_path / "scratch"  # where SLURM's nodes keep temporary files
    scratch.mkdir()
    ended = run(job, {**environment, "TMPDIR": str(scratch)}, strike)
    assert ended.returncode == 0, ended.stderr
    assert [line for line in ended.stderr.splitlines() if not line.startswith("{")] == []
    assert len(found) >= 1
    # the driver's, which runs share; a cancelled worker removes its own once it has ended
    deadline = time.monotonic() + 60.0
    while len(list(scratch.iterdir())) > 1 and time.monotonic() < deadline:
        time.sleep(0.2)
    assert [path.name for path in scratch.iterdir()] == [f"dpdask-{os.getuid()}"]
    run_here(job, output__path=tmp_path / "quiet", cluster="{kind: synchronous}")
    assert digests(tmp_path / "out") == digests(tmp_path / "quiet")
    assert {path.name for path in job.parent.iterdir()} == {
        "job.yaml",
        "schema.yaml",
    }  # no certificate, log or script is left


def check_private(folder):
    """Check that the run's certificates are for this user alone, and that no key stands in a script's or a worker's command line."""
    [shared] = folder.glob(".dpdask-slurm-*")
    assert shared.stat().st_mode & 0o777 == 0o700
    keys = list(shared.glob("*.pem"))
    assert {path.name for path in keys} == {"ca.pem", "cert.pem", "key.pem"}
    assert {path.stat().st_mode & 0o777 for path in keys} == {0o600}
    commands = [
        (path / "cmdline").read_bytes()
        for path in Path("/proc").glob("[0-9]*")
        if (path / "cmdline").exists()
    ]
    workers = [words.split(b"\0") for words in commands if b"distributed.cli.dask_worker" in words]
    assert any(
        b"--lifetime" in words and any(word.startswith(b"tls://") for word in words)
        for words in workers
    )
    assert not any(b"PRIVATE KEY" in words for words in commands)


@pytest.mark.matrix("SIGTERM", "SLURM")
@needs_slurm
def test_a_driver_that_is_terminated_leaves_no_job_and_no_certificate(environment, tmp_path):
    source = lake(tmp_path / "in", [3000] * 10, row_group=1000)
    job = write_job(
        tmp_path / "job", source, tmp_path / "out", cluster=BLOCK, output__rows_per_shard=1000
    )
    found = []

    def strike():
        found.extend(jobs(environment))
        for process in psutil.Process().children():
            if str(job) in process.cmdline():
                process.terminate()

    ended = run(job, environment, strike)
    last = "dpdask: terminated; run again to resume"
    assert (ended.returncode, ended.stderr.splitlines()[-1]) == (143, last)
    assert len(found) == 2
    for _ in range(100):  # those that are cancelled are completing for a moment
        if not jobs(environment):
            break
        time.sleep(0.2)
    assert jobs(environment) == []
    assert {path.name for path in job.parent.iterdir()} == {"job.yaml", "schema.yaml"}
    run_here(job, cluster="{kind: synchronous}")
    run_here(job, output__path=tmp_path / "quiet", cluster="{kind: synchronous}")
    assert digests(tmp_path / "out") == digests(tmp_path / "quiet")


@needs_slurm
def test_what_slurm_refuses_is_one_line(environment, tmp_path):
    job = write_job(
        tmp_path / "job",
        lake(tmp_path / "in", [40]),
        tmp_path / "out",
        cluster={**BLOCK, "partition": "nowhere"},
    )
    ended = run(job, environment)
    assert (ended.returncode, error_line(ended)) == (
        64,
        "dpdask: cluster: SLURM refuses the workers' jobs: invalid partition specified: nowhere; Batch job submission failed: Invalid partition name specified; check partition, account, memory and walltime",
    )
    assert {path.name for path in job.parent.iterdir()} == {"job.yaml", "schema.yaml"}


@needs_slurm
def test_the_memory_of_the_example_fits_a_node_with_4_gb_for_each_processor(environment, tmp_path):
    """SLURM counts 1024 MiB as a GB, and a node offers somewhat less than what its modules hold."""
    assert "4000" in slurm.CONFIGURATION
    for memory, fits in ((WRITTEN["memory"], True), ("4GB", False)):
        words = ["sbatch", "--test-only", f"--mem={memory.removesuffix('B')}", "--wrap", "true"]
        done = subprocess.run(
            words, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert (done.returncode == 0) == fits, done.stderr


@needs_slurm
def test_without_sbatch_slurm_is_one_line(environment, tmp_path):
    job = write_job(tmp_path / "job", lake(tmp_path / "in", [40]), tmp_path / "out", cluster=BLOCK)
    ended = run(job, {**environment, "PATH": ""})
    assert (ended.returncode, error_line(ended)) == (
        64,
        "dpdask: cluster.kind slurm: there is no sbatch here; run on a machine that submits SLURM jobs",
    )


def test_certificates_that_a_killed_driver_has_left_are_removed_and_no_others(tmp_path):
    """What is there: those of a driver that was killed, of one that is at work, of one of another host, and a folder of somebody."""
    program = """
import sys, time
from pathlib import Path
from dpdask.connect.private import _hold
with _hold(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""
    made = {}
    for name in ("killed", "working", "elsewhere", "nobodys"):
        made[name] = tmp_path / f".dpdask-slurm-{name}"
        made[name].mkdir()
        (made[name] / "key.pem").write_text("key")
    (made["elsewhere"] / "driver-other.example").touch()
    drivers = {}
    for name in ("killed", "working"):
        words = [sys.executable, "-c", program, str(made[name])]
        drivers[name] = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        assert drivers[name].stdout.readline() == "held\n"
    try:
        drivers["killed"].kill()
        drivers["killed"].wait()
        sweep_certificates(tmp_path)
        assert {name for name, folder in made.items() if folder.exists()} == set(made) - {"killed"}
    finally:
        for driver in drivers.values():
            driver.kill()
            driver.communicate()
