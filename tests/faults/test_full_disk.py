"""A full disk ends in one line and exit code 75; with more space the run goes on to the same bytes."""

import subprocess
from contextlib import suppress

import pytest
from e2e.helpers import call_cli, digests, error_line, hidden, lake, run_cli, run_here, write_job

ROWS = [4000] * 8


@pytest.fixture
def disk(tmp_path):
    place = tmp_path / "disk"
    place.mkdir()
    try:
        mounted = (
            subprocess.run(
                ["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", str(place)],
                capture_output=True,
                check=False,
            ).returncode
            == 0
        )
    except FileNotFoundError:
        mounted = False
    if not mounted:
        pytest.skip("mounting a small tmpfs needs root and the mount command")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.mark.more
@pytest.mark.slow_with("processes")
@pytest.mark.parametrize(
    "cluster",
    [{"kind": "threads", "workers": 2}, {"kind": "local", "workers": 1}],
    ids=["threads", "processes"],
)
def test_full_disk(cluster, disk, tmp_path):
    source = lake(tmp_path / "in", ROWS, row_group=2000)
    out = disk / "out"
    job = write_job(tmp_path / "job", source, out, cluster=cluster, output__rows_per_shard=1500)
    result = run_cli("run", job)  # a process waits for its threads, and these for their files
    assert result.returncode == 75, result.stderr
    assert "no space left" in error_line(result)
    assert result.stdout == ""
    assert not out.exists()
    staged = digests(next(hidden(out).glob("publish-*")))
    assert staged
    assert not [name for name in staged if ".tmp" in name]
    subprocess.run(["mount", "-o", "remount,size=20m", str(disk)], check=True)
    run_here(job)
    run_here(job, output__path=tmp_path / "quiet")
    assert digests(out) == digests(tmp_path / "quiet")
    assert not hidden(out).exists()


def test_no_space_for_the_first_byte(disk, tmp_path):
    with (disk / "filler").open("wb", buffering=0) as file, suppress(OSError):
        for _ in range(1000):
            file.write(b"0" * 4096)
    job = write_job(tmp_path / "job", lake(tmp_path / "in", [100]), disk / "out")
    result = call_cli("run", job)
    assert result.returncode == 75, result.stderr
    assert "no space left" in error_line(result)
    (disk / "filler").unlink()
    assert run_here(job).status == "released"
