"""Drivers and workers of copula and marginals jobs that die: the same bytes, one charge, nothing half-visible."""

from __future__ import annotations

import hashlib
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dask
import pytest
from distributed import Client, LocalCluster
from e2e.helpers import (
    MIXED_SCHEMA,
    SEED,
    charging_entries,
    digests,
    hidden,
    lake,
    load,
    processes,
    run_here,
    write_job,
)
from faults.drivers import Drivers
from faults.test_chaos import kill_one

from dpdask.engine.account import open_ledger
from dpdask.errors import TemporaryError
from dpdask.jobs import run
from dpdask.jobs.run import abort, run_job, status
from dpdask.mechanisms.copula.spec import CopulaMechanism
from dpdask.mechanisms.marginals.spec import MarginalsMechanism

SCHEMA: dict[str, Any] = {**MIXED_SCHEMA, "userId": {"role": "drop", "type": "int64"}}
MECHANISMS: dict[str, dict[str, Any]] = {
    "copula": {"kind": "copula", "bins": 5, "n_rows": 2600},
    "marginals": {
        "kind": "marginals",
        "cliques": [["rating"], ["genre", "price"], ["amount", "age", "rating"]],
        "bins": 6,
    },
}
BEFORE_CHARGE = ["locked", "opened", "surveying", "counted"]
UNSEEN = ["intended", "drawn", "noise-kept", "release-fitted", "release-written"]
FITTED = [
    "fitted",
    "first-shard-begun",
    "shard-half-written",
    "shard-unrecorded",
    "task-staged",
    "some-shards",
    "all-shards",
]
STAGED = ["card-written", "manifest-staged", "staged", "before-move"]
BEFORE_COMMIT = [*BEFORE_CHARGE, *UNSEEN, *FITTED, *STAGED]
AFTER_COMMIT = ["after-move", "uncommitted", "committed", "key-removed"]
EITHER = [*UNSEEN, *FITTED]  # what comes before and after is the same code for every kind
# the contract of mechanisms kills both at six stages, in their process; test_driver_kill.py kills the driver at every stage
FEW = {
    "copula": (
        "counted",
        "drawn",
        "noise-kept",
        "release-fitted",
        "shard-unrecorded",
        "staged",
        "after-move",
        "committed",
    ),
    "marginals": ("noise-kept", "some-shards"),
}


def cases(points: list[str]) -> list[Any]:
    due = [(kind, point) for kind in MECHANISMS for point in points if _is_due(kind, point)]
    return [
        pytest.param(
            kind, point, id=f"{kind}-{point}", marks=() if point in FEW[kind] else pytest.mark.slow
        )
        for kind, point in due
    ]


def _is_due(kind: str, point: str) -> bool:
    return kind == "copula" or point in EITHER


pytestmark = pytest.mark.usefixtures("seeded_ledgers")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lake(tmp_path_factory.mktemp("source") / "in", [150, 90, 1700, 40, 300], schema=SCHEMA)


def written(folder: Path, source: Path, kind: str, **changed: Any) -> Path:
    given = {
        "schema": SCHEMA,
        "mechanism": MECHANISMS[kind],
        "output__rows_per_shard": 150,
        **changed,
    }  # δ = 0: a driver prices it at once
    return write_job(folder / "job", source, folder / "lake" / "out", **given)


@pytest.fixture(scope="module")
def quiet(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    found = {}
    for kind in MECHANISMS:
        base = tmp_path_factory.mktemp("quiet")
        run_here(written(base, source, kind))
        found[kind] = digests(base / "lake" / "out")
        assert sum(name.endswith(".parquet") for name in found[kind]) >= 4
    return found


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "lake" / "out"


@pytest.fixture
def url(tmp_path: Path) -> str:
    made = f"sqlite:///{tmp_path / 'ledger.db'}"
    assert open_ledger(made).init("people", 4.0)
    return made


def kinds(url: str) -> list[str]:
    return [entry.kind for entry in charging_entries(url, "people")]


def alone(out: Path) -> bool:
    return [path.name for path in out.parent.iterdir()] == [out.name]


@pytest.mark.few(2)
@pytest.mark.parametrize(("kind", "point"), cases(BEFORE_COMMIT))
def test_killed_before_the_commit(
    kind: str,
    point: str,
    drivers: Drivers,
    source: Path,
    quiet: Any,
    url: str,
    tmp_path: Path,
    out: Path,
) -> None:
    job = written(
        tmp_path, source, kind, ledger={"url": url, "dataset": "people"}, insecure_seed=SEED
    )
    assert drivers.run("run", job, point=point)[0] == -signal.SIGKILL
    assert not out.exists()
    stages = (
        {"locked": "absent"}
        | dict.fromkeys([*BEFORE_CHARGE[1:], *UNSEEN], "opened")
        | dict.fromkeys(FITTED, "fitted")
    )
    assert status(out.as_uri()).stage == stages.get(
        point, "fitted" if point in STAGED[:2] else "staged"
    )
    assert hidden(out).stat().st_mode & 0o777 == 0o700
    assert kinds(url) == ([] if point in BEFORE_CHARGE else ["intend"])
    assert run_here(job).status == "released"
    assert digests(out) == quiet[kind]
    assert kinds(url) == ["intend", "commit"]
    assert alone(out)


@pytest.mark.parametrize(("kind", "point"), cases(AFTER_COMMIT))
def test_killed_after_the_commit(
    kind: str,
    point: str,
    drivers: Drivers,
    source: Path,
    quiet: Any,
    url: str,
    tmp_path: Path,
    out: Path,
) -> None:
    job = written(
        tmp_path, source, kind, ledger={"url": url, "dataset": "people"}, insecure_seed=SEED
    )
    assert drivers.run("run", job, point=point)[0] == -signal.SIGKILL
    assert digests(out) == quiet[kind]
    assert run_here(job).status == "already released"
    assert digests(out) == quiet[kind]
    assert kinds(url) == ["intend", "commit"]
    assert alone(out)


@pytest.mark.slow  # the contract kills every mechanism; here it is the driver's process, again and again
@pytest.mark.parametrize("kind", MECHANISMS)
def test_killed_again_and_again(
    kind: str, drivers: Drivers, source: Path, quiet: Any, url: str, tmp_path: Path, out: Path
) -> None:
    job = written(
        tmp_path, source, kind, ledger={"url": url, "dataset": "people"}, insecure_seed=SEED
    )
    for point in (
        "counted",
        "intended",
        "drawn",
        "noise-kept",
        "fitted",
        "shard-half-written",
        "staged",
        "before-move",
    ):
        assert drivers.run("run", job, point=point)[0] == -signal.SIGKILL, point
        assert not out.exists(), point
    assert drivers.run("run", job)[0] == 0
    assert digests(out) == quiet[kind]
    assert kinds(url) == ["intend", "commit"]
    assert alone(out)


@pytest.mark.parametrize("kind", MECHANISMS)
def test_secure_noise_that_was_kept_is_never_drawn_again(
    kind: str,
    drivers: Drivers,
    source: Path,
    tmp_path: Path,
    out: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = written(tmp_path, source, kind, insecure_seed=None)
    release, noisy = hidden(out) / "release.npz", hidden(out) / "noisy.npz"
    assert drivers.run("run", job, point="noise-kept")[0] == -signal.SIGKILL
    tables = noisy.read_bytes()
    assert noisy.stat().st_mode & 0o777 == 0o600
    assert drivers.run("run", job, point="fitted")[0] == -signal.SIGKILL
    kept = release.read_bytes()
    assert release.stat().st_mode & 0o777 == 0o600
    assert (
        json.loads((hidden(out) / "run.json").read_text())["release_sha256"]
        == hashlib.sha256(kept).hexdigest()
    )
    for point in ("shard-unrecorded", "staged"):
        assert drivers.run("run", job, point=point)[0] == -signal.SIGKILL
        assert (release.read_bytes(), noisy.read_bytes()) == (kept, tables)

    def drawn(*_: Any, **__: Any) -> Any:
        raise AssertionError("noise was drawn again")

    for mechanism in (CopulaMechanism, MarginalsMechanism):
        monkeypatch.setattr(mechanism, "draw", drawn)
    assert run_here(job).status == "released"


def test_the_release_beside_the_key_must_be_the_one_that_was_written(
    drivers: Drivers, source: Path, tmp_path: Path, out: Path
) -> None:
    for kind in MECHANISMS:
        job = written(tmp_path, source, kind)
        drivers.run("run", job, point="fitted")
        release = hidden(out) / "release.npz"
        release.write_bytes(release.read_bytes()[:-1] + b"x")
        code, line = drivers.run("run", job)
        assert (code, "not " in line, line.count("\n")) == (66, True, 0), line
        assert "abort the run and begin again" in line
        assert not out.exists()
        assert abort(out.as_uri())


def test_a_failure_that_may_pass_keeps_noise_and_charge(
    source: Path, quiet: Any, url: str, tmp_path: Path, out: Path, monkeypatch: Any
) -> None:
    def crash(*_: Any, **__: Any) -> Any:
        raise TemporaryError("a worker died")

    job = written(
        tmp_path, source, "copula", ledger={"url": url, "dataset": "people"}, insecure_seed=SEED
    )
    with monkeypatch.context() as patched:
        patched.setattr(run, "write_all", crash)
        with pytest.raises(TemporaryError):
            run_here(job)
    assert kinds(url) == ["intend"]
    assert (hidden(out) / "release.npz").exists()
    run_here(job)
    assert digests(out) == quiet["copula"]
    assert kinds(url) == ["intend", "commit"]


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    with dask.config.set({"distributed.scheduler.allowed-failures": 100}), processes(2) as started:
        yield started


@pytest.mark.slow
def test_workers_killed_while_they_count_and_while_they_write(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    source = lake(tmp_path / "in", [400] * 10, schema=SCHEMA)
    job = written(tmp_path, source, "copula", output__rows_per_shard=200)
    run_here(job, output__path=tmp_path / "quiet")
    kills: list[bool] = []

    def progress(stage: str, done: int, total: int) -> None:
        if stage == "write" and done in (1, 5):
            kills.append(kill_one(cluster, done))

    with Client(cluster) as client:
        client.wait_for_workers(2)
        kills.append(kill_one(cluster, 0))
        run_job(load(job), progress)
    assert kills == [True] * 3
    assert digests(tmp_path / "lake" / "out") == digests(tmp_path / "quiet")
    assert not hidden(tmp_path / "lake" / "out").exists()
