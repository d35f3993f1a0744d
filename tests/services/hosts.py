"""Three "hosts" on this machine: network namespaces on a bridge in a fourth one, so that nothing reaches the machine's own network."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass

N_HOSTS = 3
_LISTEN = """
import socket, sys
with socket.create_server((sys.argv[2], int(sys.argv[3]))) as listening, socket.socket(fileno=int(sys.argv[1])) as out:
    socket.send_fds(out, [b"."], [listening.fileno()])
"""


@dataclass(frozen=True)
class Hosts:
    """The hosts h1, h2 and h3, which have the addresses 10.77.0.1 to 10.77.0.3."""

    prefix: str

    def address(self, number):
        return f"10.77.0.{number}"

    def inside(self, number):
        """The words before a command that runs on a host; each has its own /dev/shm, so no memory is shared but for the tests' files."""
        folder = tempfile.gettempdir()  # it may be in /dev/shm: see conftest.py
        mount = f'mount --bind {folder} /mnt; mount -t tmpfs tmpfs /dev/shm; mkdir -p {folder}; mount --move /mnt {folder}; exec "$@"'
        return [
            "ip",
            "netns",
            "exec",
            f"{self.prefix}h{number}",
            "unshare",
            "-m",
            "--propagation",
            "private",
            "sh",
            "-c",
            mount,
            "sh",
        ]

    def listen(self, number, port):
        """Return a socket that listens on a host, while whoever accepts its connections stays outside."""
        here, there = socket.socketpair()
        words = [
            *self.inside(number),
            sys.executable,
            "-c",
            _LISTEN,
            str(there.fileno()),
            self.address(number),
            str(port),
        ]
        with here, there:
            subprocess.run(words, pass_fds=[there.fileno()], check=True)
            _, [found], _, _ = socket.recv_fds(here, 1, 1)
        return socket.socket(fileno=found)

    def cut(self, number):
        """Pull the cable: no connection is closed, and peers see silence."""
        _ip("-n", f"{self.prefix}sw", "link", "set", f"v{number}", "down")

    def heal(self, number):
        _ip("-n", f"{self.prefix}sw", "link", "set", f"v{number}", "up")


def why_not():
    """Return why no hosts can be had here; empty if they can."""
    if os.name != "posix" or os.getuid() != 0:
        return "only root can make network namespaces"
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        return "ip or unshare is not installed (Debian: iproute2, util-linux)"
    name = f"dpdask{os.getpid()}t"
    made = (
        subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode
        == 0
    )
    bridge = (
        made
        and subprocess.run(
            ["ip", "-n", name, "link", "add", "br0", "type", "bridge"],
            capture_output=True,
            check=False,
        ).returncode
        == 0
    )
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return "" if bridge else "network namespaces with bridges cannot be made here"


@contextlib.contextmanager
def running():
    """Make the hosts, and remove them at the end."""
    hosts = Hosts(prefix=f"dpdask{os.getpid()}")
    switch = f"{hosts.prefix}sw"
    try:
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", switch, "link", "set", "br0", "up")
        for number in range(1, N_HOSTS + 1):
            host = f"{hosts.prefix}h{number}"
            _ip("netns", "add", host)
            _ip(
                "-n",
                switch,
                "link",
                "add",
                f"v{number}",
                "type",
                "veth",
                "peer",
                "name",
                "eth0",
                "netns",
                host,
            )
            _ip("-n", switch, "link", "set", f"v{number}", "master", "br0", "up")
            _ip("-n", host, "addr", "add", f"{hosts.address(number)}/24", "dev", "eth0")
            _ip("-n", host, "link", "set", "eth0", "up")
            _ip("-n", host, "link", "set", "lo", "up")
        yield hosts
    finally:
        for number in range(1, N_HOSTS + 1):
            subprocess.run(
                ["ip", "netns", "del", f"{hosts.prefix}h{number}"], capture_output=True, check=False
            )
        subprocess.run(["ip", "netns", "del", switch], capture_output=True, check=False)


def _ip(*words):
    subprocess.run(["ip", *words], capture_output=True, check=True)
