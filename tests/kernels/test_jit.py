"""What numba keeps of the kernels: nothing that was compiled with another version of any of them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numba
import pytest

from dpdask.kernels import chain, jit

SOURCE = Path(jit.__file__)
CALLER = "from kernels.jit import jit\nfrom kernels.called import draw\n\n@jit\ndef release():\n    return draw()\n"
CALLED = "from kernels.jit import jit\n\n@jit\ndef draw():\n    return {}\n"


@pytest.mark.more
def test_a_change_of_a_function_that_is_called_takes_effect(tmp_path):
    """Numba itself looks only at the file of the caller."""
    package = tmp_path / "kernels"
    package.mkdir()
    shutil.copy(SOURCE, package / "jit.py")
    (package / "__init__.py").touch()
    (package / "caller.py").write_text(CALLER)
    # Python would take bytecode for the source if both versions of a file are written in the same second
    environment = os.environ | {
        "PYTHONPATH": str(tmp_path),
        "NUMBA_CACHE_DIR": str(tmp_path / "cache"),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    found = []
    for value in (1, 2, 2):
        (package / "called.py").write_text(CALLED.format(value))
        command = [
            sys.executable,
            "-c",
            "from kernels.caller import release; print(release(), sum(release.stats.cache_hits.values()))",
        ]
        found.append(
            subprocess.run(
                command, env=environment, capture_output=True, text=True, check=True
            ).stdout.split()
        )
    assert found == [["1", "0"], ["2", "0"], ["2", "1"]]


def test_every_kernel_has_the_stamp_of_all():
    assert chain.release_rows._cache._cache_file._source_stamp == jit._SOURCES  # type: ignore[attr-defined]


def test_a_function_without_a_module_can_be_compiled():
    """Numba tells all listeners of each function that is compiled in the process, also of functions that are no module's."""
    made = {}
    exec("def double(number):\n    return 2 * number", {"__name__": None}, made)
    assert made["double"].__module__ is None
    assert numba.njit(made["double"])(21) == 42
