"""A run that is interrupted while rows are counted begins with the parts that it has: the same bytes, and less to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from e2e.helpers import HOLDOUT, MIXED_SCHEMA, digests, hidden, lake, run_here, spy_on_stages, write_job

from dpdask.errors import TemporaryError

NUMBERS = {name: column for name, column in MIXED_SCHEMA.items() if name in ("rating", "genre")}
CASES = [
    pytest.param({"kind": "dip", "reference": HOLDOUT}, MIXED_SCHEMA, "survey", {}, id="ranks and levels"),
    pytest.param({"kind": "dip", "reference": {"kind": "tree"}}, NUMBERS, "survey", {"privacy__delta": 1e-6}, id="tables"),
    pytest.param({"kind": "copula", "bins": 4}, NUMBERS, "tabulate", {"privacy__delta": 1e-6}, id="records"),
    pytest.param({"kind": "dip", "reference": HOLDOUT}, MIXED_SCHEMA, "survey", {"privacy__unit": {"column": "userId", "max_rows": 2}}, id="units"),
]


@pytest.mark.parametrize(("mechanism", "schema", "stage", "changes"), CASES)
def test_counts_are_resumed(
    mechanism: dict[str, Any], schema: dict[str, Any], stage: str, changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = lake(tmp_path / "in", [300] * 20, row_group=300, schema=schema)
    job = write_job(tmp_path, source, tmp_path / "out", schema=schema, mechanism=mechanism, **changes)
    parts = hidden(tmp_path / "out") / "parts"

    def interrupt(name: str, done: int, total: int) -> None:
        if (name, done) == (stage, total - 1):
            raise TemporaryError("crash")

    with pytest.raises(TemporaryError):
        run_here(job, interrupt, cluster="{kind: synchronous}")
    kept = sorted(path.name for path in parts.iterdir())
    assert len(kept) == 2, kept  # of three batches of at most eight
    assert {path.stat().st_mode & 0o077 for path in parts.iterdir()} == {0}
    counted: list[int] = []
    spy_on_stages(lambda name, nodes: counted.append(sum(f"dpdask-{stage}-" in str(key) for key in nodes) if name == stage else 0), monkeypatch)
    steps: list[tuple[str, int, int]] = []

    def watch(name: str, done: int, total: int) -> None:
        steps.append((name, done, total))
        assert name != "write" or not parts.exists()

    run_here(job, watch, cluster="{kind: synchronous}")
    assert sum(counted) == 4
    assert [(done, total) for name, done, total in steps if name == stage][:6] == [(done, 6) for done in range(1, 7)]
    run_here(job, output__path=tmp_path / "quiet")
    assert digests(tmp_path / "out") == digests(tmp_path / "quiet")


def test_a_part_that_was_harmed_is_refused(tmp_path: Path) -> None:
    job = write_job(tmp_path, lake(tmp_path / "in", [100] * 10, row_group=100), tmp_path / "out")

    def interrupt(_: str, done: int, total: int) -> None:
        if done == total - 1:
            raise TemporaryError("crash")

    with pytest.raises(TemporaryError):
        run_here(job, interrupt, cluster="{kind: synchronous}")
    [part] = (hidden(tmp_path / "out") / "parts").iterdir()
    part.write_bytes(part.read_bytes()[:-20])
    with pytest.raises(Exception, match="this is not a part of a count of format 1"):
        run_here(job, cluster="{kind: synchronous}")
