"""The run key: in no graph, readable by its owner alone, gone when the run is; and failures before noise leave nothing."""

import base64

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


@pytest.mark.few(2)
@pytest.mark.parametrize("reference", [HOLDOUT, KNOWN], ids=["holdout", "known"])
@pytest.mark.parametrize("scheduler", ["synchronous", "threads"])
def test_the_key_is_in_no_graph(reference, scheduler, tmp_path, monkeypatch):
    out = tmp_path / "lake" / "out"
    job = write_job(
        tmp_path,
        lake(tmp_path / "in", [400, 900, 300]),
        out,
        insecure_seed=None,
        mechanism__reference=reference,
    )
    secrets, graphs = set(), []

    def see(_, nodes):
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


def spoil(what, file):
    table, data = pq.read_table(file), file.read_bytes()
    if what == "value":
        pq.write_table(table.set_column(1, "rating", pa.array([3.25] * table.num_rows)), file)
    elif what == "bytes":
        file.write_bytes(data[:4] + bytes(len(data) // 2 - 4) + data[len(data) // 2 :])
    elif what == "footer":
        file.write_bytes(data[:-20])
    elif what == "column":
        pq.write_table(table.drop_columns(["genre"]), file)


NARROW = {**MIXED_SCHEMA, "age": {**MIXED_SCHEMA["age"], "bounds": [0.0, 40.0]}}


@pytest.mark.parametrize(
    ("what", "changes"),
    [
        *((what, {}) for what in ("value", "bytes", "footer", "column", "defect")),
        (
            "value",
            {"mechanism__reference": KNOWN},
        ),  # which needs no survey, so the writing stage is the first to look
        ("reference", {"mechanism__reference": KNOWN, "schema": NARROW}),
    ],
)
def test_a_failure_before_noise_leaves_nothing(what, changes, tmp_path, monkeypatch):
    source = lake(tmp_path / "in", [400, 900, 300])
    spoil(what, sorted(source.iterdir())[-1])
    if what == "defect":
        monkeypatch.setattr(select, "holdout_mask", lambda *_: 1 / 0)
    (tmp_path / "lake").mkdir()
    with pytest.raises(
        InternalError
        if what == "defect"
        else DpdaskError
        if what == "reference"
        else (DataError, InputError)
    ) as caught:
        run_here(write_job(tmp_path, source, tmp_path / "lake" / "out", **changes))
    assert ("part.2" in str(caught.value)) == (
        what in ("bytes", "footer", "column")
    )  # a refused value tells of no place
    assert ("ZeroDivisionError" in str(caught.value)) == (what == "defect")
    assert "3.25" not in str(caught.value)
    assert list((tmp_path / "lake").iterdir()) == []
