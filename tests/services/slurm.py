"""A real SLURM on this machine: one controller and two virtual nodes, which a fixture starts and stops."""

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import time

import psutil

NEEDED = ("slurmctld", "slurmd", "munged", "sbatch", "sinfo")
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/munge.sock
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
ReturnToService=2
SlurmUser=root
SlurmdUser=root
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdSpoolDir={folder}/spool-%n
StateSaveLocation={folder}/state
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SchedulerType=sched/backfill
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
KillWait=5
MinJobAge=300
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={first} CPUs=2 RealMemory=4000 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={second} CPUs=2 RealMemory=4000 State=UNKNOWN
PartitionName=debug Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""


def why_not():
    """Return why no SLURM can be had here; empty if it can."""
    if os.name != "posix" or os.getuid() != 0:
        return "only root can start slurmd and munged"
    missing = [name for name in NEEDED if shutil.which(name) is None]
    return f"{', '.join(missing)} not installed (Debian: slurm-wlm, munge)" if missing else ""


@contextlib.contextmanager
def running(folder):
    """Start SLURM with its files in a short-lived folder; yield the environment in which its commands find it."""
    configuration = folder / "slurm.conf"
    environment = {**os.environ, "SLURM_CONF": str(configuration)}
    for name in ("state", "spool-n1", "spool-n2"):
        (folder / name).mkdir(parents=True)
    (folder / "munge").mkdir(mode=0o711)
    (folder / "munge" / "munge.key").write_bytes(secrets.token_bytes(1024))
    (folder / "munge" / "munge.key").chmod(0o400)
    controller, first, second = _free_ports(3)
    host = socket.gethostname().partition(".")[0]
    configuration.write_text(
        CONFIGURATION.format(
            folder=folder, host=host, controller=controller, first=first, second=second
        )
    )
    munge = {
        "key": "munge/munge.key",
        "pid": "munged.pid",
        "log": "munged.log",
        "seed": "munge/seed",
    }
    files = [f"--{name}-file={folder / file}" for name, file in munge.items()]
    try:
        _start(
            "munged",
            *files,
            f"--socket={folder}/munge/munge.sock",
            "--force",
            environment=environment,
        )
        _start("slurmctld", "-f", str(configuration), environment=environment)
        for node in ("n1", "n2"):
            _start("slurmd", "-f", str(configuration), "-N", node, environment=environment)
        for _ in range(200):
            if ask("sinfo", "-h", "-t", "idle", "-o", "%D", environment=environment) == "2":
                break
            time.sleep(0.2)
        else:
            raise AssertionError((folder / "slurmctld.log").read_text())
        yield environment
    finally:
        started = []
        for file in folder.glob("*.pid"):
            with contextlib.suppress(psutil.NoSuchProcess, ValueError):
                started.append(psutil.Process(int(file.read_text())))
                started[-1].terminate()
        _, alive = psutil.wait_procs(started, timeout=10)
        for process in alive:
            process.kill()


def ask(*words, environment):
    """Return what a command of SLURM prints."""
    return subprocess.run(
        words, env=environment, capture_output=True, text=True, check=False
    ).stdout.strip()


def _start(*words, environment):
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def _free_ports(number):
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
