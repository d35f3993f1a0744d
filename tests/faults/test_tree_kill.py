"""Drivers of a DIP job along a tree that die: the same bytes, one charge, and noise that is drawn once."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from e2e.helpers import SEED, charging_entries, digests, hidden, run_here
from e2e.test_tree_jobs import DELTA, SCHEMA, TREE, card_of, job, people, written
from faults.drivers import Drivers

from dpdask.engine.account import open_ledger
from dpdask.engine.work import NOISY_NAME
from dpdask.jobs.run import status
from dpdask.mechanisms.dip import tree as tree_fit
from dpdask.mechanisms.dip.tree import TreeRelease

pytestmark = pytest.mark.usefixtures("seeded_ledgers")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("small") / "in", people(2400), 6)


UNIT = {"column": "user", "max_rows": 3}
# ε so large that a small table has edges
KILLED: dict[str, dict[str, Any]] = {
    "row": {"privacy__epsilon": 30.0},
    "unit": {"privacy__epsilon": 90.0, "privacy__unit": UNIT},
}


@pytest.fixture(scope="module")
def quiet(small: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    found = {}
    for kind, changed in KILLED.items():
        base = tmp_path_factory.mktemp("quiet")
        run_here(job(base, small, output__rows_per_shard=300, **changed))
        found[kind] = digests(base / "out")
        assert sum(name.endswith(".parquet") for name in found[kind]) >= 4
        assert len(card_of(base)["mechanism"]["edges"]) >= 3
    return found


@pytest.fixture
def url(tmp_path: Path) -> str:
    made = f"sqlite:///{tmp_path / 'ledger.db'}"
    assert open_ledger(made).init("people", 90.0)
    return made


def kinds(url: str) -> list[str]:
    return [entry.kind for entry in charging_entries(url, "people")]


BEFORE_CHARGE = ["opened", "surveying", "counted"]
UNSEEN = ["intended", "drawn", "noise-kept", "release-fitted", "release-written"]
AFTER = ["fitted", "shard-half-written", "some-shards", "staged", "before-move"]
POINTS = [("row", point) for point in (*BEFORE_CHARGE, *UNSEEN, *AFTER)]
POINTS += [
    ("unit", point)
    for point in ("bounded", "counted", "noise-kept", "release-written", "some-shards")
]
# the contract of mechanisms kills a tree at six stages, in its process; test_driver_kill.py kills the driver at every stage
FEW = [
    ("row", point)
    for point in (
        "counted",
        "drawn",
        "noise-kept",
        "release-written",
        "shard-half-written",
        "before-move",
    )
]
FEW += [("unit", "bounded"), ("unit", "some-shards")]


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("kind", "point"),
    [
        pytest.param(*each, id="-".join(each), marks=() if each in FEW else pytest.mark.slow)
        for each in POINTS
    ],
)
def test_a_killed_run_goes_on_to_the_same_bytes_for_one_charge(
    kind: str, point: str, small: Path, quiet: Any, drivers: Drivers, url: str, tmp_path: Path
) -> None:
    made = job(
        tmp_path,
        small,
        output__rows_per_shard=300,
        ledger={"url": url, "dataset": "people"},
        insecure_seed=SEED,
        **KILLED[kind],
    )
    assert drivers.run("run", made, point=point)[0] == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    assert kinds(url) == ([] if point in (*BEFORE_CHARGE, "bounded") else ["intend"])
    assert status((tmp_path / "out").as_uri()).stage == (
        "opened" if point in (*BEFORE_CHARGE, *UNSEEN, "bounded") else status_after(point)
    )
    run_here(made)
    assert digests(tmp_path / "out") == quiet[kind]
    assert kinds(url) == ["intend", "commit"]
    assert not hidden(tmp_path / "out").exists()
    [entry, _] = charging_entries(url, "people")
    assert (entry.charge.epsilon, entry.charge.delta) == (KILLED[kind]["privacy__epsilon"], 0)


def status_after(point: str) -> str:
    return "staged" if point in ("staged", "before-move") else "fitted"


@pytest.mark.slow  # the contract kills every mechanism; here it is the driver's process, again and again
@pytest.mark.parametrize("kind", KILLED)
def test_killed_again_and_again(
    kind: str, small: Path, quiet: Any, drivers: Drivers, url: str, tmp_path: Path
) -> None:
    made = job(
        tmp_path,
        small,
        output__rows_per_shard=300,
        ledger={"url": url, "dataset": "people"},
        insecure_seed=SEED,
        **KILLED[kind],
    )
    for point in (
        "counted",
        "intended",
        "noise-kept",
        "release-fitted",
        "fitted",
        "shard-half-written",
        "before-move",
    ):
        assert drivers.run("run", made, point=point)[0] == -signal.SIGKILL, point
        assert not (tmp_path / "out").exists(), point
    assert drivers.run("run", made)[0] == 0
    assert digests(tmp_path / "out") == quiet[kind]
    assert kinds(url) == ["intend", "commit"]


@pytest.mark.more
@pytest.mark.parametrize("kind", ["row", pytest.param("unit", marks=pytest.mark.slow)])
def test_secure_noise_that_was_kept_is_never_drawn_again(
    kind: str, small: Path, drivers: Drivers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = job(tmp_path, small, insecure_seed=None, privacy__delta=DELTA, **KILLED[kind])
    assert drivers.run("run", made, point="noise-kept")[0] == -signal.SIGKILL
    noisy = hidden(tmp_path / "out") / NOISY_NAME
    kept = noisy.read_bytes()
    assert noisy.stat().st_mode & 0o777 == 0o600
    assert drivers.run("run", made, point="release-written")[0] == -signal.SIGKILL
    assert noisy.read_bytes() == kept
    fitted = (hidden(tmp_path / "out") / "release.npz").read_bytes()
    TreeRelease.from_bytes(fitted, "release.npz")  # which would refuse another kind

    def drawn(*_: Any, **__: Any) -> Any:
        raise AssertionError("noise was drawn again")

    monkeypatch.setattr(tree_fit, "measure_tree", drawn)
    assert drivers.run("run", made, point="fitted")[0] == -signal.SIGKILL
    assert (
        hidden(tmp_path / "out") / "release.npz"
    ).read_bytes() == fitted  # the same tables, the same channels
    assert run_here(made).status == "released"


def test_kept_noise_of_another_run_is_refused(
    small: Path, drivers: Drivers, tmp_path: Path
) -> None:
    """Its noise, or its columns, are not what this job says."""
    few = {
        name: column if name in ("user", "a", "b", "c") else {"role": "drop"}
        for name, column in SCHEMA.items()
    }
    bins = {"kind": "tree", "bins": {"c": 8}}
    others: dict[str, dict[str, Any]] = {
        "epsilon": {"privacy__epsilon": 2.0},
        "delta": {"privacy__delta": 1e-9},
        "columns": {"schema": few, "mechanism__reference": bins},
        "bins": {"mechanism__reference": TREE | {"bins": TREE["bins"] | {"c": 5}}},
    }
    for name, changed in others.items():
        there, here = tmp_path / name, tmp_path / f"{name}-here"
        for folder, given in ((there, changed), (here, {})):
            assert (
                drivers.run("run", job(folder, small, **given), point="noise-kept")[0]
                == -signal.SIGKILL
            )
        (hidden(here / "out") / NOISY_NAME).write_bytes(
            (hidden(there / "out") / NOISY_NAME).read_bytes()
        )
        code, line = drivers.run("run", here / "job.yaml")
        assert (code, "by another version of dpdask" in line) == (66, True), (name, line)
        assert not (here / "out").exists()


def test_a_file_that_changed_between_counting_and_writing_is_refused(
    small: Path, drivers: Drivers, tmp_path: Path
) -> None:
    source = tmp_path / "in"
    source.mkdir()
    for file in small.iterdir():
        (source / file.name).write_bytes(file.read_bytes())
    made = job(tmp_path, source)
    assert drivers.run("run", made, point="fitted")[0] == -signal.SIGKILL
    record = hidden(tmp_path / "out") / "run.json"
    content = json.loads(record.read_text())
    assert len(content["seals"]) >= 6  # every fragment was sealed when it was counted
    record.write_text(json.dumps({**content, "seals": ["00" * 16, *content["seals"][1:]]}))
    code, line = drivers.run("run", made)
    assert (code, "this file changed since the run began" in line) == (66, True), line
