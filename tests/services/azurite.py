"""A server of Azure's blob storage: azurite, from npm, on PATH or named by DPDASK_TEST_AZURITE."""

import os
import shutil
import subprocess
import tempfile
from contextlib import contextmanager

from services.supervisor import free_port, wait_for_port

ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="  # of every azurite; no secret


def _program():
    return os.environ.get("DPDASK_TEST_AZURITE") or shutil.which("azurite-blob")


def missing():
    """Return why the server cannot be had here, or None."""
    return None if _program() else "azurite-blob is not on PATH, and DPDASK_TEST_AZURITE is not set"


@contextmanager
def serving():
    """Run the server, and yield its endpoint."""
    port = free_port("azurite")
    with tempfile.TemporaryDirectory(prefix="azurite-") as folder:
        words = [
            str(_program()),
            "--skipApiVersionCheck",
            "--inMemoryPersistence",
            "--disableTelemetry",
            "--silent",
            "--blobPort",
            str(port),
        ]
        process = subprocess.Popen(
            words, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            wait_for_port(port, 60, process)
            yield {"endpoint": f"http://127.0.0.1:{port}"}
        finally:
            process.kill()
            process.wait()
