"""A real Dask Gateway server on this machine, whose clusters are processes of this user."""

import contextlib
import importlib.util
import os
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from services.supervisor import free_port

CONFIGURATION = """
c.DaskGateway.backend_class = "dask_gateway_server.backends.local.UnsafeLocalBackend"
c.Proxy.address = "127.0.0.1:{port}"
c.UnsafeLocalBackend.clusters_directory = {folder!r}
c.ClusterConfig.scheduler_cmd = [{python!r}, "-m", "distributed.cli.dask_scheduler"]
c.ClusterConfig.worker_cmd = [{python!r}, "-m", "distributed.cli.dask_worker"]
"""


def why_not():
    """Return why no gateway can be had here; empty if it can."""
    return (
        ""
        if importlib.util.find_spec("dask_gateway_server")
        else "dask-gateway-server is not installed"
    )


@contextlib.contextmanager
def running(folder, environment):
    """Start a gateway with its files in a folder; yield its URL."""
    port = free_port("gateway")
    (folder / "clusters").mkdir()
    (folder / "gateway.py").write_text(
        CONFIGURATION.format(port=port, folder=str(folder / "clusters"), python=sys.executable)
    )
    path = os.pathsep.join([str(Path(sys.executable).parent), environment["PATH"]])
    words = [
        shutil.which("dask-gateway-server", path=path) or "dask-gateway-server",
        "--config",
        str(folder / "gateway.py"),
    ]
    with (
        (folder / "gateway.log").open("wb") as log,
        subprocess.Popen(
            words, stdout=log, stderr=log, env={**environment, "PATH": path}
        ) as server,
    ):
        try:
            url = f"http://127.0.0.1:{port}"
            for _ in range(300):
                with contextlib.suppress(urllib.error.URLError, ConnectionError):
                    urllib.request.urlopen(f"{url}/api/health")
                    break
                time.sleep(0.2)
            else:
                raise AssertionError((folder / "gateway.log").read_text())
            yield url
        finally:
            server.terminate()
            server.wait(timeout=30)
