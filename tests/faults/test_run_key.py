"""The run key: in no graph, readable by its owner alone, gone when the run is; and failures before noise leave nothing."""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import dask
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from e2e.helpers import (
    HOLDOUT,
    KNOWN,
    MIXED_SCHEMA,
    hidden,
    lake,
    load,
    run_here,
    spy_on_stages,
    write_job,
)

from dpdask.engine import scan as select
from dpdask.errors import DataError, DpdaskError, InputError, InternalError
from dpdask.jobs.run import run_job


@pytest.mark.parametrize("reference", [HOLDOUT, KNOWN], ids=["holdout", "known"])
@pytest.mark.parametrize("scheduler", ["synchronous", "threads"])
def test_the_key_is_in_no_graph(
    reference: dict[str, Any], scheduler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "lake" / "out"
    job = write_job(
        tmp_path,
        lake(tmp_path / "in", [400, 900, 300]),
        out,
        insecure_seed=None,
        mechanism__reference=reference,
    )
    secrets, graphs = set(), []

    def see(_: str, nodes: dict[Any, Any]) -> None:
        key = hidden(out) / "run.key"
        assert (key.stat().st_mode & 0o777, hidden(out).stat().st_mode & 0o777) == (0o600, 0o700)
        secrets.add(key.read_bytes())
        graphs.append(cloudpickle.dumps(nodes))

    spy_on_stages(see, monkeypatch)
    with dask.config.set(scheduler=scheduler):
        run_job(load(job))
    [secret] = secrets
    assert len(secret) == 32
    assert graphs
    assert b".out.dpdask" in b"".join(
        graphs
    )  # the place of the secrets is there, so the search sees what tasks carry
    published = [path.read_bytes() for path in out.rglob("*") if path.is_file()]
    for form in (secret, secret.hex().encode(), base64.b64encode(secret), secret[:16], secret[16:]):
        assert not any(form in data for data in [*graphs, *published])
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def spoil_value(source: Path) -> None:
    last = sorted(source.iterdir())[-1]
    table = pq.read_table(last)
    pq.write_table(table.set_column(1, "rating", pa.array([3.25] * table.num_rows)), last)


def spoil_bytes(source: Path) -> None:
    last = sorted(source.iterdir())[-1]
    data = bytearray(last.read_bytes())
    data[4 : len(data) // 2] = bytes(len(data) // 2 - 4)
    last.write_bytes(bytes(data))


def spoil_footer(source: Path) -> None:
    last = sorted(source.iterdir())[-1]
    last.write_bytes(last.read_bytes()[:-20])


def spoil_column(source: Path) -> None:
    last = sorted(source.iterdir())[-1]
    pq.write_table(pq.read_table(last).drop_columns(["genre"]), last)


@pytest.mark.parametrize("spoil", [spoil_value, spoil_bytes, spoil_footer, spoil_column])
def test_a_failure_in_the_survey_leaves_nothing(
    spoil: Callable[[Path], None], tmp_path: Path
) -> None:
    source = lake(tmp_path / "in", [400, 900, 300])
    spoil(source)
    (tmp_path / "lake").mkdir()
    with pytest.raises((DataError, InputError)) as caught:
        run_here(write_job(tmp_path, source, tmp_path / "lake" / "out"))
    assert ("part.2" in str(caught.value)) == (
        spoil is not spoil_value
    )  # a refused value tells of no place
    assert "3.25" not in str(caught.value)
    assert list((tmp_path / "lake").iterdir()) == []


def test_a_defect_in_the_survey_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(select, "holdout_mask", broken)
    (tmp_path / "lake").mkdir()
    with pytest.raises(InternalError, match="ZeroDivisionError"):
        run_here(write_job(tmp_path, lake(tmp_path / "in", [400]), tmp_path / "lake" / "out"))
    assert list((tmp_path / "lake").iterdir()) == []


def test_data_that_violates_the_schema_while_writing_leaves_nothing(tmp_path: Path) -> None:
    source = lake(tmp_path / "in", [400, 900, 300])
    spoil_value(source)
    (tmp_path / "lake").mkdir()
    with pytest.raises(
        DataError
    ):  # a known reference needs no survey, so the writing stage is the first to look
        run_here(write_job(tmp_path, source, tmp_path / "lake" / "out", mechanism__reference=KNOWN))
    assert list((tmp_path / "lake").iterdir()) == []


def test_a_reference_that_does_not_fit_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "lake").mkdir()
    bounded = {**MIXED_SCHEMA, "age": {**MIXED_SCHEMA["age"], "bounds": [0.0, 40.0]}}
    with pytest.raises(DpdaskError):
        run_here(
            write_job(
                tmp_path,
                lake(tmp_path / "in", [400]),
                tmp_path / "lake" / "out",
                schema=bounded,
                mechanism__reference=KNOWN,
            )
        )
    assert list((tmp_path / "lake").iterdir()) == []
