"""Every case of `bad_input` through the command line: its exit code, its one line, no data in it, nothing left behind."""

import os
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pyarrow.dataset as pads
import pytest
from e2e.bad_input import (
    CASES,
    NOISY_TABLES,
    SECRETS,
    Case,
    bit_flipped,
    command,
    crashed,
    execute,
    files,
)

from dpdask.codec import codec_for
from dpdask.jobs.spec import load_job

FAILING = [case for case in CASES if case.code]
WORKING = [case for case in CASES if not case.code]
FROM_OUTSIDE = (
    "an unknown key in the job",
    "a value outside its levels",
    "a page overwritten",
    "an unknown option",
    "a scheduler that cannot be reached",
)


def ids(case: Case) -> str:
    return case.name.replace(" ", "-")


def check_line(case: Case, err_lines: list[str], out: str, err: str) -> None:
    assert len(err_lines) == 1, err_lines
    [line] = err_lines
    assert line.startswith("dpdask: ")
    assert re.search(case.says, line), line
    assert "Traceback" not in err
    assert not out
    for secret in SECRETS:
        assert secret not in err


def check_case(case: Case, folder: Path) -> None:
    """Assert that what is wrong is said in one line and leaves nothing, and that what is odd works and leaves no state."""
    ended, before, after = execute(case, folder)
    assert ended.code == case.code, ended.err
    if case.code:
        check_line(case, ended.lines, ended.out, ended.err)
        assert after == before
        return
    assert ended.lines == []
    assert any(name.endswith("_SUCCESS") for name in after)
    assert not [name for name in after if ".dpdask" in name or name.endswith(".tmp")]
    for secret in SECRETS:
        assert secret not in ended.out + ended.err


@pytest.mark.few(12)
@pytest.mark.parametrize("case", WORKING, ids=ids)
def test_what_is_right_works_and_leaves_no_state(case: Case, tmp_path):
    ended, before, after = execute(case, tmp_path)
    assert (ended.code, ended.lines) == (0, []), ended.err
    assert ended.out
    assert any(name.endswith("_SUCCESS") for name in after)
    assert not [name for name in after if ".dpdask" in name or name.endswith(".tmp")]
    data = {name: digest for name, digest in before.items() if name.startswith("data")}
    assert data.items() <= after.items()
    for secret in SECRETS:
        assert secret not in ended.out + ended.err


@pytest.mark.few(73)
@pytest.mark.parametrize("case", FAILING, ids=ids)
def test_what_is_wrong_is_said_in_one_line_and_leaves_nothing(case: Case, tmp_path):
    ended, before, after = execute(case, tmp_path)
    assert ended.code == case.code, ended.err
    check_line(case, ended.lines, ended.out, ended.err)
    if case.kept:
        assert before.items() <= after.items()
        assert all(name.startswith(".out.dpdask") for name in set(after) - set(before))
        assert (tmp_path / ".out.dpdask" / "run.key").exists()
    else:
        assert after == before


@pytest.mark.few(2)
@pytest.mark.parametrize("case", [case for case in CASES if case.name in FROM_OUTSIDE], ids=ids)
def test_a_process_ends_with_the_same_code_and_line(case: Case, tmp_path):
    words = case.prepare(tmp_path)
    before = files(tmp_path)
    environment = {**os.environ, "DASK_DISTRIBUTED__COMM__TIMEOUTS__CONNECT": "500ms"}
    ended = subprocess.run(
        [sys.executable, "-c", "from dpdask.cli import main; main()", *words],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert ended.returncode == case.code
    check_line(
        case,
        [
            line
            for line in ended.stderr.splitlines()
            if not line.startswith(('{"time"', '{"warning"'))
        ],
        ended.stdout,
        ended.stderr,
    )
    assert files(tmp_path) == before


def test_from_outside_names_cases():
    assert set(FROM_OUTSIDE) <= {case.name for case in CASES}
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize("name", ["a δ of 1 / rows and more", "ε = 1e-6"])
def test_a_plan_and_a_run_warn_of_a_large_delta(name: str, tmp_path):
    [case] = [case for case in CASES if case.name == f"copula: {name}"]
    words = case.prepare(tmp_path)
    warned = name.startswith("a δ")
    for verb in ("plan", "run"):
        ended = command(verb, *words[1:])
        assert (ended.code, ended.lines, "WARNING" in ended.out) == (
            0,
            [],
            True,
        )  # at ε = 1e-6 all tables drown
        assert ("δ = 0.01 is not below 1 / the number of rows" in ended.out) is warned


@pytest.mark.parametrize("case", [case for case in NOISY_TABLES if not case.code], ids=ids)
def test_what_works_is_valid(case: Case, tmp_path):
    words = case.prepare(tmp_path)
    assert command(*words).code == 0
    made = load_job(words[1])
    released = pads.dataset(tmp_path / "out", exclude_invalid_files=False).to_table()
    assert released.num_rows >= 1
    if case.name.startswith("marginals"):
        return
    for name in made.schema.privatised:
        codec = codec_for(name, made.schema.columns[name], released.schema.field(name).type)
        for chunk in released.column(name).chunks:
            codec.encode(chunk)


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
    [case] = [case for case in CASES if case.name == "one bit of a page flipped, with checksums"]
    words = case.prepare(tmp_path)
    assert command(*words).code == 66
    key = (tmp_path / ".out.dpdask" / "run.key").read_bytes()
    part = tmp_path / "data" / "part-1.parquet"
    part.write_bytes(
        bit_flipped(part.read_bytes())
    )  # the footer, and so the fingerprint, is the same
    with mock.patch("dpdask.jobs.state.RunState.open", side_effect=AssertionError("a second key")):
        assert command(*words).code == 0
    assert key
    assert not (tmp_path / ".out.dpdask").exists()
