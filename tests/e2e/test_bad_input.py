"""Every case of `bad_input` through the command line: its exit code, its one line, no data in it, nothing left behind."""

import os
import re
import subprocess
import sys
from unittest import mock

import pyarrow.dataset as pads
import pytest
from e2e.bad_input import CASES, SECRETS, Ended, bit_flipped, command, crashed, execute, files

from dpdask.codec import codec_for
from dpdask.jobs.spec import load_job

BY_NAME = {case.name: case for case in CASES}


def ids(case):
    return case.name.replace(" ", "-")


def check_line(case, ended):
    [line] = ended.lines
    assert line.startswith("dpdask: ")
    assert re.search(case.says, line), line
    assert "Traceback" not in ended.err
    assert not ended.out


def check_case(case, folder):
    """Assert that what is wrong is said in one line and leaves nothing, and that what is odd works and leaves no state."""
    ended, before, after = execute(case, folder)
    assert ended.code == case.code, ended.err
    for secret in SECRETS:
        assert secret not in ended.out + ended.err
    if case.kept:
        assert before.items() <= after.items()
        assert all(name.startswith(".out.dpdask") for name in set(after) - set(before))
        assert (folder / ".out.dpdask" / "run.key").exists()
    elif case.code:
        assert after == before
    if case.code:
        check_line(case, ended)
        return
    assert ended.lines == []
    assert ended.out
    assert any(name.endswith("_SUCCESS") for name in after)
    assert not [name for name in after if ".dpdask" in name or name.endswith(".tmp")]
    data = {name: digest for name, digest in before.items() if name.startswith("data")}
    assert data.items() <= after.items()


@pytest.mark.few(56)
@pytest.mark.parametrize("case", CASES, ids=ids)
def test_wrong_input_leaves_nothing_and_odd_input_works(case, tmp_path):
    check_case(case, tmp_path)
    if case.code or not case.name.startswith(("copula", "histogram")):
        return
    made = load_job(tmp_path / "job.yaml")
    released = pads.dataset(tmp_path / "out", exclude_invalid_files=False).to_table()
    for name in made.schema.privatised:  # synthetic values are values of the schema
        codec = codec_for(name, made.schema.columns[name], released.schema.field(name).type)
        for chunk in released.column(name).chunks:
            codec.encode(chunk)


def test_a_process_ends_with_the_same_code_and_line(tmp_path):
    case = BY_NAME["a page overwritten"]
    words = case.prepare(tmp_path)
    before = files(tmp_path)
    called = [sys.executable, "-c", "from dpdask.cli import main; main()", *words]
    ended = subprocess.run(
        called, capture_output=True, text=True, env=dict(os.environ), check=False
    )
    assert ended.returncode == case.code
    lines = [
        line for line in ended.stderr.splitlines() if not line.startswith(('{"time"', '{"warning"'))
    ]
    check_line(case, Ended(code=ended.returncode, out=ended.stdout, err="\n".join(lines)))
    assert files(tmp_path) == before


@pytest.mark.parametrize("name", ["a δ of 1 / rows and more", "ε = 1e-6"])
def test_a_plan_and_a_run_warn_of_a_large_delta(name, tmp_path):
    words = BY_NAME[f"copula: {name}"].prepare(tmp_path)
    for verb in ("plan", "run"):
        ended = command(verb, *words[1:])
        assert (ended.code, ended.lines, "WARNING" in ended.out) == (
            0,
            [],
            True,
        )  # at ε = 1e-6 all tables drown
        warned = "δ = 0.01 is not below 1 / the number of rows" in ended.out
        assert warned is name.startswith("a δ")


def test_a_restored_input_lets_a_kept_run_go_on(tmp_path):
    words = crashed(tmp_path)
    key = (tmp_path / ".out.dpdask" / "run.key").read_bytes()
    part = tmp_path / "data" / "part-1.parquet"
    whole = part.read_bytes()
    part.write_bytes(whole[:-4] + b"PAR2")
    assert command(*words).code == 66
    part.write_bytes(whole)
    assert (tmp_path / ".out.dpdask" / "run.key").read_bytes() == key
    assert command(*words).code == 0
    assert not (tmp_path / ".out.dpdask").exists()


def test_a_mended_page_lets_a_kept_run_go_on(tmp_path):
    words = BY_NAME["one bit of a page flipped, with checksums"].prepare(tmp_path)
    assert command(*words).code == 66
    part = tmp_path / "data" / "part-1.parquet"
    part.write_bytes(
        bit_flipped(part.read_bytes())
    )  # the footer, and so the fingerprint, is the same
    with mock.patch("dpdask.jobs.state.RunState.open", side_effect=AssertionError("a second key")):
        assert command(*words).code == 0
    assert not (tmp_path / ".out.dpdask").exists()
