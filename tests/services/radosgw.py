"""A real S3 server, Ceph's gateway over one store in memory, on the loopback: packages ceph-mon, ceph-osd, radosgw and ceph-common of Debian."""

import os
import shutil
import subprocess
import tempfile
import time
import uuid
from contextlib import ExitStack, contextmanager
from pathlib import Path

from services.supervisor import CannotServeError, free_port, wait_for_port

PROGRAMS = ("ceph", "ceph-mon", "ceph-osd", "monmaptool", "radosgw", "radosgw-admin")
KEYS = {
    "lake": ("lake-key-5d1c", "lake-secret-93af"),
    "stranger": ("other-key-77b0", "other-secret-1ee4"),
}  # the second user has no rights on the first one's buckets

_CONFIGURATION = """
[global]
fsid = {fsid}
mon host = [v2:127.0.0.1:{monitor}]
public addr = 127.0.0.1
auth cluster required = none
auth service required = none
auth client required = none
auth allow insecure global id reclaim = false
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 1
osd pool default pgp num = 1
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
mon allow pool size one = true
run dir = {folder}
log file = {folder}/$name.log
admin socket = {folder}/$name.asok
mon cluster log file = {folder}/cluster.log
mon data = {folder}/mon
osd data = {folder}/osd
osd class dir = /usr/lib/x86_64-linux-gnu/rados-classes
osd objectstore = memstore
memstore device bytes = 4294967296
osd max object name len = 256
osd max object namespace len = 64
ms bind ipv6 = false
# else every new pool waits some seconds for one monitor to agree with itself
paxos propose interval = 0.02
paxos min wait = 0.01
keyring = /dev/null
[client.rgw]
ms mon client mode = crc secure
# without tcp_nodelay most answers wait 40 ms for the client's acknowledgement
rgw frontends = beast endpoint=127.0.0.1:{port} tcp_nodelay=1
rgw override bucket index max shards = 1
rgw enable apis = s3, admin
rgw enable usage log = false
"""


def missing():
    """Return why the server cannot be had here, or None."""
    if os.geteuid() != 0:
        return "radosgw needs root"
    absent = [program for program in PROGRAMS if shutil.which(program) is None]
    return f"{', '.join(absent)}: not installed" if absent else None


@contextmanager
def serving():
    """Run the server, and yield its endpoint."""
    with ExitStack() as stack:
        folder = Path(
            stack.enter_context(
                tempfile.TemporaryDirectory(prefix="rgw-", ignore_cleanup_errors=True)
            )
        )
        port, fsid = free_port("radosgw"), str(uuid.uuid4())
        for name in ("mon", "osd"):
            (folder / name).mkdir()
        monitor = free_port("ceph-mon")
        (folder / "ceph.conf").write_text(
            _CONFIGURATION.format(fsid=fsid, folder=folder, port=port, monitor=monitor)
        )
        conf = ["-c", str(folder / "ceph.conf")]

        def run(*words):
            done = subprocess.run([*words], capture_output=True, text=True, timeout=60, check=False)
            if done.returncode:
                raise CannotServeError(f"{' '.join(words[:1])}: {done.stderr.strip()[-200:]}")
            return done.stdout

        def start(*words):
            process = subprocess.Popen(
                [*words, "-f", "--setuser", "root", "--setgroup", "root"],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            return process

        run(
            "monmaptool",
            "--create",
            "--clobber",
            "--fsid",
            fsid,
            "--addv",
            "a",
            f"[v2:127.0.0.1:{monitor}]",
            str(folder / "monmap"),
        )
        run("ceph-mon", *conf, "--mkfs", "-i", "a", "--monmap", str(folder / "monmap"))
        start("ceph-mon", *conf, "-i", "a")
        osd = str(uuid.uuid4())
        run("ceph", *conf, "osd", "new", osd)
        run("ceph-osd", *conf, "-i", "0", "--mkfs", "--osd-uuid", osd)
        start("ceph-osd", *conf, "-i", "0")
        end = time.monotonic() + 30
        while "1 up" not in run("ceph", *conf, "osd", "stat"):
            if time.monotonic() > end:
                raise CannotServeError("ceph-osd is not up")
            time.sleep(0.2)
        gateway = start("radosgw", *conf, "-n", "client.rgw")
        wait_for_port(port, 60, gateway)
        for user, (key, secret) in KEYS.items():
            words = [
                f"--uid={user}",
                f"--display-name={user}",
                f"--access-key={key}",
                f"--secret-key={secret}",
            ]
            run("radosgw-admin", *conf, "-n", "client.rgw", "user", "create", *words)
        yield {"endpoint": f"http://127.0.0.1:{port}"}
