"""DIP as a mechanism of a job: what it refuses and promises, and the digests of jobs, which stay."""

import re
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from e2e.helpers import HOLDOUT, RATINGS_SCHEMA, discrete, load, write_job

from dpdask.errors import DataError, SpecError
from dpdask.jobs.plan import plan_job
from dpdask.jobs.run import run_job
from dpdask.jobs.spec import load_job
from dpdask.mechanisms.dip.columns import ColumnsMechanism
from dpdask.mechanisms.dip.spec import DipSpec
from dpdask.mechanisms.registry import bind
from dpdask.privacy import Budget
from dpdask.schema import Schema

SCHEMA = Schema.from_dict({"columns": {"x": discrete([0, 1])}})


def bound(budget=None, **changed):
    spec = DipSpec(**{"kind": "dip", "reference": HOLDOUT, **changed})
    return bind(spec, SCHEMA, Budget(**{"epsilon": 1.0, **(budget or {})}))


@pytest.mark.parametrize(
    ("budget", "where"), [({"delta": 1e-9}, "delta"), ({"adjacency": "add-remove"}, "adjacency")]
)
def test_dip_takes_no_delta_and_hides_no_presence(budget, where, tmp_path):
    with pytest.raises(SpecError) as caught:
        bound(budget)
    assert (caught.value.exit_code, caught.value.where) == (64, f"`{where}`")
    assert (caught.value.hint or "").startswith("set it to ")
    with pytest.raises(SpecError) as caught:
        load(
            write_job(
                tmp_path,
                tmp_path / "in",
                tmp_path / "out",
                **{f"privacy__{key}": value for key, value in budget.items()},
            )
        )
    assert caught.value.exit_code == 64
    assert re.fullmatch(rf"job\.yaml, line \d+, privacy\.{where}", caught.value.where or "")
    assert (caught.value.hint or "").startswith("set it to ")


@pytest.mark.parametrize("order", ["keep", "shuffled"])
def test_dips_parts(order):
    mechanism = bound(reference={"kind": "histogram"}, channel="optimal")
    assert isinstance(mechanism, ColumnsMechanism)
    assert mechanism.description.how == "x randomised by the optimal channel"
    assert set(mechanism.spending.row) == set(mechanism.spending.reference) == {"x"}
    assert len(mechanism.event.events) == 2
    promise = mechanism.description.guarantee(order)
    assert mechanism.description.protected in promise
    assert mechanism.description.unprotected in promise
    assert "noisy statistics" not in promise
    assert bound().spending.reference == {}


def test_the_table_is_checked_before_anything_is_written(tmp_path):
    (tmp_path / "in").mkdir()
    pq.write_table(
        pa.table({"userId": [1, 2], "rating": ["a", "b"], "timestamp": [1, 2]}),
        tmp_path / "in" / "part.parquet",
    )
    columns = {
        name: {key: value for key, value in RATINGS_SCHEMA[name].items() if key != "type"}
        for name in RATINGS_SCHEMA
    }
    job = load(write_job(tmp_path, tmp_path / "in", tmp_path / "out", schema=columns))
    with (
        mock.patch(
            "dpdask.jobs.records.LockedRecord.lock", side_effect=AssertionError("a folder was made")
        ),
        pytest.raises(DataError, match="'rating'"),
    ):
        run_job(job)
    with pytest.raises(DataError, match="'rating'"):
        plan_job(job)


DIGESTS = [
    (
        "{kind: dip, reference: {kind: holdout, fraction: 0.25}}",
        "{epsilon: 1.0}",
        "1bfe1a534723bc8025a0d8fc7faa005f",
    ),
    (
        "{kind: dip, reference: {kind: holdout, fraction: 0.25}}",
        "{epsilon: 1.0, delta: 0, adjacency: replace-one, unit: row}",
        "1bfe1a534723bc8025a0d8fc7faa005f",
    ),
    (
        "{kind: dip, reference: {kind: histogram, bins: 1024}, channel: optimal, cost: {x: rank}, weights: {x: 1.0, y: 3.0}}",
        "{epsilon: 1.0, delta: 0.0, unit: {column: id, max_rows: 3}}",
        "ecb9f1132c438b421943ef4c2a32d3e8",
    ),
]


@pytest.mark.parametrize(
    ("mechanism", "privacy", "digest"), DIGESTS, ids=["short", "spelt-out", "all-keys"]
)
def test_the_digest_of_a_job_stays(mechanism, privacy, digest, tmp_path):
    """Another digest would make a finished job another job, and its release a stranger's."""
    (tmp_path / "schema.yaml").write_text(
        "columns:\n  id: {role: keep}\n  x: {role: privatise, kind: discrete, levels: [1, 2, 3]}\n"
        "  y: {role: privatise, kind: continuous, bounds: [0.0, 1.0]}\n"
    )
    (tmp_path / "job.yaml").write_text(
        "name: pinned\ninput: {path: 'memory://lake/data'}\noutput: {path: out}\nschema: schema.yaml\n"
        f"privacy: {privacy}\nmechanism: {mechanism}\n"
    )
    assert load_job(tmp_path / "job.yaml", {"output.order": "keep"}).digest == digest
    assert (
        load_job(tmp_path / "job.yaml").digest
        == load_job(tmp_path / "job.yaml", {"output.order": "shuffled"}).digest
        != digest
    )


@pytest.mark.parametrize(
    "mechanism",
    [
        "{kind: copula}",
        "{kind: marginals, cliques: [[x]]}",
        "{kind: histogram, bins: {y: 4}, output: rows}",
    ],
)
def test_the_order_is_no_part_of_a_job_whose_rows_have_none(mechanism, tmp_path):
    (tmp_path / "schema.yaml").write_text(
        "columns:\n  x: {role: privatise, kind: discrete, levels: [1, 2, 3]}\n  y: {role: privatise, kind: continuous, bounds: [0.0, 1.0]}\n"
    )
    (tmp_path / "job.yaml").write_text(
        f"name: pinned\ninput: {{path: in}}\noutput: {{path: out}}\nschema: schema.yaml\nprivacy: {{epsilon: 1.0}}\nmechanism: {mechanism}\n"
    )
    assert (
        load_job(tmp_path / "job.yaml", {"output.order": "keep"}).digest
        == load_job(tmp_path / "job.yaml").digest
    )
