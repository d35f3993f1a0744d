"""A server that several test processes share: it starts with the first that asks for it and ends when the last has gone.

`python -m services.supervisor NAME SOCKET` runs one of the servers below and tells each process that connects where it is. A connection that ends,
also because its process was killed, counts as gone, so nothing is left behind.
"""

import fcntl
import importlib
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

START_SECONDS = 90
_LINGER_SECONDS = 1.0


class CannotServeError(Exception):
    """Why a server cannot be had here."""


def ask(name, shared):
    """Return where a server is, and the connection that keeps it running; start it if no other process has.

    Raises
    ------
    CannotServeError
        If it does not start.
    """
    place = shared / f"{name}.sock"
    with (shared / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        answer = _connect(place)
        if answer is not None:
            return answer
        place.unlink(missing_ok=True)
        words = [sys.executable, "-m", "services.supervisor", name, str(place)]
        log = (shared / f"{name}.log").open("w")
        with log:
            server = subprocess.Popen(
                words,
                # a command line that ran in this process may have set PYTHONSAFEPATH
                env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end and server.poll() is None:
            answer = _connect(place)
            if answer is not None:
                server.returncode = 0  # it ends by itself, and is nobody's to wait for
                return answer
            time.sleep(0.1)
        server.kill()
        server.wait()
    raise CannotServeError(
        f"{name} does not start: {(shared / f'{name}.log').read_text().strip()[-300:]}"
    )


def _connect(place):
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(str(place))
        line = connection.makefile().readline()
    except OSError:
        line = ""
    if line:
        return json.loads(line), connection
    connection.close()
    return None


SERVERS = ("radosgw", "ceph-mon", "azurite", "gateway")


def free_port(server):
    """Return a port that was free a moment ago, outside the range that the system gives to clients; no other server gets it."""
    for _ in range(100):
        port = 20000 + 2500 * SERVERS.index(server) + int.from_bytes(os.urandom(2), "big") % 2500
        with socket.socket() as tried:
            try:
                tried.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise CannotServeError("no port is free")


def wait_for_port(port, seconds, process):
    """Wait until a process listens on a port of the loopback."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and process.poll() is None:
        with socket.socket() as tried:
            if tried.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise CannotServeError(f"nothing listens on port {port}")


def main(name, place):
    """Run a server until nobody is connected."""
    serving = importlib.import_module(f"services.{name}").serving
    with serving() as details, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(place + ".new")
        listener.listen(64)
        Path(place + ".new").rename(place)
        listener.settimeout(_LINGER_SECONDS)
        connected = []
        while True:
            try:
                connection, _ = listener.accept()
                connection.sendall((json.dumps(details) + "\n").encode())
                connected.append(connection)
            except (TimeoutError, OSError):
                connected = [connection for connection in connected if not _has_ended(connection)]
                if not connected:
                    return


def _has_ended(connection):
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


if __name__ == "__main__":
    main(*sys.argv[1:])
