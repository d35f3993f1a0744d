"""The units of cluster/systemd: as systemd reads them, and with the exit codes that the command line has."""

import configparser
import re
import shutil
import subprocess

import pytest
from connect.processes import ROOT

FOLDER = ROOT / "cluster" / "systemd"
UNITS = ("dpdask@.service", "dpdask@.timer")


def read(name):
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(FOLDER / name)
    return parser


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not here")
def test_systemd_takes_the_units(tmp_path):
    program = tmp_path / "dpdask"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)

    def verify(change):
        for name in UNITS:
            text = (FOLDER / name).read_text()
            text = text.replace("/srv/dpdask/venv/bin/dpdask", str(program))
            (tmp_path / name).write_text(change(text))
        done = subprocess.run(
            ["systemd-analyze", "verify", *(tmp_path / name for name in UNITS)],
            capture_output=True,
            text=True,
            check=False,
        )
        return [line for line in done.stderr.splitlines() if "dpdask@" in line]

    assert verify(str) == []
    assert verify(lambda text: text.replace("Type=exec", "Type=oneshot")) != []


def test_what_is_tried_again_is_what_may_pass():
    """The codes of docs/reference/exit-codes.md that say yes, and a driver that was killed."""
    text = (ROOT / "docs/reference/exit-codes.md").read_text()
    yes = re.findall(r"^\| (\d+) \|[^|]*\| yes", text, re.MULTILINE)
    service = read("dpdask@.service")["Service"]
    assert service["RestartForceExitStatus"].split() == [*yes, "SIGKILL"]
    assert "Restart" not in service  # any other code would come again
    assert service["KillMode"] == "mixed"  # SIGTERM to the driver alone


def test_the_keys_of_unfinished_runs_lie_in_the_state_of_the_service():
    service = read("dpdask@.service")["Service"]
    assert service["Environment"] == "XDG_STATE_HOME=/var/lib"
    assert (service["StateDirectory"], service["StateDirectoryMode"]) == ("dpdask", "0700")


def test_a_day_that_was_missed_is_made_up_for():
    assert read("dpdask@.timer")["Timer"]["Persistent"] == "true"
