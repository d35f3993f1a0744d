"""A driver killed at any stage leaves nothing visible, and a second run ends with the bytes of an undisturbed one."""

import os
import shutil
import signal
import subprocess
import time

import psutil
import pytest
from e2e.helpers import command, digests, hidden, lake, run_here, write_job

from dpdask.errors import InputError, TemporaryError
from dpdask.io import shards
from dpdask.io.shards import DOCUMENTS, MANIFEST_NAME, MEASURED_NAME, MODEL_NAME
from dpdask.jobs.run import abort
from dpdask.streams import RunKey


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return lake(tmp_path_factory.mktemp("source") / "in", [150, 90, 1700, 40, 300, 700])


@pytest.fixture(scope="module")
def quiet(source, tmp_path_factory):
    base = tmp_path_factory.mktemp("quiet")
    run_here(write_job(base, source, base / "out"))
    return digests(base / "out")


@pytest.fixture
def job(source, tmp_path):
    return write_job(tmp_path / "job", source, tmp_path / "lake" / "out")


@pytest.fixture
def out(tmp_path):
    return tmp_path / "lake" / "out"


def alone(out):
    return [path.name for path in out.parent.iterdir()] == [out.name]


def test_a_resumed_run_keeps_its_key_and_its_noise(source, drivers, tmp_path, out, monkeypatch):
    job = write_job(tmp_path / "job", source, out, insecure_seed=None)
    drivers.run("run", job, point="some-shards")
    secret = (hidden(out) / "run.key").read_bytes()
    run_here(job)
    monkeypatch.setattr(RunKey, "fresh", lambda: RunKey(secret))
    run_here(job, output__path=tmp_path / "undisturbed")
    named = {*DOCUMENTS, MANIFEST_NAME} - {MEASURED_NAME, MODEL_NAME}  # they name the run
    resumed, undisturbed = digests(out), digests(tmp_path / "undisturbed")
    assert {name for name in resumed if resumed[name] != undisturbed.get(name)} == named


def test_what_is_staged_is_not_written_again(drivers, job, out, quiet, monkeypatch):
    drivers.run("run", job, point="some-shards")
    staged = {path.name for path in next(hidden(out).glob("publish-*")).glob("*.parquet")}
    assert 3 <= len(staged) < sum(name.endswith(".parquet") for name in quiet)
    written = []
    close = shards.ShardWriter.close
    monkeypatch.setattr(
        shards.ShardWriter, "close", lambda *given: written.append(close(*given)) or written[-1]
    )
    run_here(job)
    assert {shard.name for shard in written}.isdisjoint(staged)
    assert digests(out) == quiet


@pytest.mark.parametrize("harm", ["flip", "truncate", "remove", "record"])
def test_a_staged_shard_that_was_harmed_is_written_again(harm, drivers, job, out, quiet):
    drivers.run("run", job, point="some-shards")
    victim = next(next(hidden(out).glob("publish-*")).glob("*.parquet"))
    data = victim.read_bytes()
    if harm == "record":
        next(next(hidden(out).glob("actions-*")).iterdir()).write_text("[{")
    elif harm == "remove":
        victim.unlink()
    else:
        victim.write_bytes(
            data[: len(data) // 2]
            if harm == "truncate"
            else bytes([*data[:100], data[100] ^ 1, *data[101:]])
        )
    run_here(job)
    assert digests(out) == quiet


@pytest.mark.parametrize("point", ["surveying", "some-shards"])
def test_interrupted(point, drivers, job, out, quiet):
    code, line = drivers.run("run", job, point=point, strike="interrupt")
    assert (code, line) == (130, "dpdask: interrupted; run again to resume")
    assert not out.exists()
    assert (hidden(out) / "run.key").exists()
    assert drivers.run("run", job)[0] == 0
    assert digests(out) == quiet
    assert alone(out)


@pytest.mark.more
@pytest.mark.slow_with("threads")
@pytest.mark.parametrize(
    "cluster",
    [{"kind": "threads", "workers": 2}, {"kind": "local", "workers": 1}],
    ids=["threads", "processes"],
)
def test_interrupted_from_the_keyboard(cluster, tmp_path, out):
    source = lake(tmp_path / "in", [6000] * 6, row_group=500)
    job = write_job(tmp_path / "job", source, out, cluster=cluster, output__rows_per_shard=400)
    with subprocess.Popen(
        command("run", job),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if '"write"' in line:
                break
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the workers too
        rest = [
            line for line in process.stderr.read().splitlines() if line.startswith("dpdask")
        ]  # worker processes say more: an open point
        assert (process.wait(200), rest) == (130, ["dpdask: interrupted; run again to resume"])
    assert not out.exists()
    run_here(job)
    run_here(job, output__path=tmp_path / "quiet")
    assert digests(out) == digests(tmp_path / "quiet")


@pytest.mark.parametrize("again", [False, True], ids=["once", "and again at once"])
def test_a_driver_that_is_terminated_ends_its_workers(again, tmp_path, out):
    source = lake(tmp_path / "in", [12_000] * 6, row_group=500)  # it writes for some seconds
    block = {"kind": "local", "workers": 1}
    job = write_job(tmp_path / "job", source, out, cluster=block, output__rows_per_shard=200)
    words = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command("run", job), **words) as process:
        assert process.stderr is not None
        assert any('"write"' in line for line in process.stderr)
        workers = psutil.Process(process.pid).children(recursive=True)
        process.terminate()
        while again and process.poll() is None:
            process.terminate()
            time.sleep(0.01)
        rest = [line for line in process.stderr.read().splitlines() if line.startswith("dpdask")]
        assert (process.wait(200), rest) == (143, ["dpdask: terminated; run again to resume"])
    assert workers
    assert psutil.wait_procs(workers, timeout=30)[1] == []
    assert not out.exists()
    run_here(job)
    run_here(job, output__path=tmp_path / "quiet")
    assert digests(out) == digests(tmp_path / "quiet")


def test_a_second_driver_is_refused(drivers, job, out, quiet, tmp_path):
    pid = drivers.start("run", job, point="some-shards", strike="pause", sign=tmp_path / "sign")
    while not (tmp_path / "sign").exists():
        time.sleep(0.02)
    for call in (lambda: run_here(job), lambda: abort(out.as_uri())):
        with pytest.raises(TemporaryError, match="another run is writing this output"):
            call()
    os.kill(pid, signal.SIGKILL)
    assert drivers.wait()[0] == -signal.SIGKILL
    assert (hidden(out) / "run.key").exists()
    run_here(job)
    assert digests(out) == quiet


@pytest.mark.parametrize("csv", [False, True], ids=["parquet", "csv"])
def test_the_input_changed_between_crash_and_resume(csv, drivers, tmp_path, out):
    source = lake(tmp_path / "in", [400, 900, 300], csv=csv)
    job = write_job(tmp_path / "job", source, out)
    drivers.run("run", job, point="some-shards")
    staged = digests(hidden(out))
    saved = shutil.copytree(source, tmp_path / "saved")
    other = lake(tmp_path / "other", [300], seed=9, csv=csv)
    shutil.copy2(next(other.iterdir()), sorted(source.iterdir())[-1])
    code, line = drivers.run("run", job)
    assert code == InputError.exit_code
    assert "changed" in line
    assert digests(hidden(out)) == staged
    shutil.copytree(saved, source, dirs_exist_ok=True)
    run_here(job)
    run_here(job, output__path=tmp_path / "quiet")
    assert digests(out) == digests(tmp_path / "quiet")


@pytest.mark.few(2)
@pytest.mark.parametrize("point", ["key-removed", "half-removed"])
@pytest.mark.parametrize("changes", [{}, {"privacy.epsilon": "2"}], ids=["same job", "other job"])
def test_nothing_of_a_half_removed_run_is_used(point, changes, drivers, job, out, tmp_path):
    drivers.run("run", job, "--set", "insecure_seed=99", point="all-shards")
    assert drivers.run("abort", out, point=point)[0] == -signal.SIGKILL
    assert not (hidden(out) / "run.key").exists()
    assert next(hidden(out).glob("publish-*")).exists()
    words = [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]
    assert drivers.run("run", job, *words)[0] == 0
    assert drivers.run("run", job, *words, "--set", f"output.path={tmp_path / 'quiet'}")[0] == 0
    assert digests(out) == digests(tmp_path / "quiet")
    assert alone(out)
