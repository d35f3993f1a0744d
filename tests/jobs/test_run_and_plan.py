"""Runs on a file system without renames, the state of a run, status and abort, and the plan's numbers."""

import json
import stat
from dataclasses import replace
from pathlib import Path
from unittest import mock

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from dpdask.engine.fit import Fitted
from dpdask.errors import DataError, OutputError, SpecError, TemporaryError
from dpdask.io.shards import MANIFEST_NAME, SUCCESS_NAME, Manifest
from dpdask.io.storage import Folder
from dpdask.jobs.plan import plan_job
from dpdask.jobs.run import abort, run_job
from dpdask.jobs.spec import load_job
from dpdask.jobs.state import RunState

SCHEMA = """
columns:
  id: {role: keep}
  x: {role: privatise, kind: discrete, levels: [1, 2, 3]}
  y: {role: privatise, kind: continuous, bounds: [0.0, 1.0]}
  note: {role: drop}
"""
HOLDOUT = {"kind": "holdout", "fraction": 0.25}
KNOWN = {
    "kind": "known",
    "columns": {"x": {"probabilities": [0.2, 0.3, 0.5]}, "y": {"name": "uniform"}},
}


pytestmark = pytest.mark.usefixtures("here")


@pytest.fixture
def memory():
    fs = fsspec.filesystem("memory")
    yield fs
    for name in fs.ls("/", detail=False):
        fs.rm(name, recursive=True)


def table(n_rows, seed=1):
    rng = np.random.default_rng(seed)
    return pa.table(
        {
            "id": range(n_rows),
            "x": rng.integers(1, 4, n_rows),
            "y": rng.random(n_rows),
            "note": ["n"] * n_rows,
        }
    )


def job(folder, **changed):
    data = {
        "name": "test",
        "input": {"path": "data"},
        "output": {"path": "out", "rows_per_shard": 70},
        "schema": "schema.yaml",
        "privacy": {"epsilon": 1.0},
        "mechanism": {"kind": "dip", "reference": HOLDOUT},
        "insecure_seed": 3,
    }
    if not (folder / "data").exists():
        (folder / "data").mkdir()
        for part in range(3):
            pq.write_table(
                table(100, part), folder / "data" / f"part-{part}.parquet", row_group_size=40
            )
    (folder / "schema.yaml").write_text(SCHEMA)
    (folder / "job.yaml").write_text(yaml.safe_dump({**data, **changed}))
    return load_job(folder / "job.yaml")


def crashing(place):
    return mock.patch(place, side_effect=TemporaryError("crash"))


# ---- a file system without renames


def test_a_release_from_and_to_memory_is_the_local_one(tmp_path, memory):
    local = job(tmp_path)
    run_job(local)
    memory.put(str(tmp_path / "data"), "/lake/data", recursive=True)
    remote = job(
        tmp_path,
        input={"path": "memory://lake/data"},
        output={"path": "memory://lake/released/out/", "rows_per_shard": 70},
    )
    assert remote.output_url == "memory://lake/released/out"
    written = []
    original = type(memory).pipe_file
    with mock.patch.object(
        type(memory),
        "pipe_file",
        lambda self, path, *a, **k: (
            written.append(Path(path).name),
            original(self, path, *a, **k),
        )[1],
    ):
        outcome = run_job(remote)
    assert [name for name in written if not name.startswith(("run-", "beat-"))][-5:] == [
        "release.html",
        "croissant.json",
        "release.json",
        "manifest.json",
        "_SUCCESS",
    ]
    shards = [shard.sha256 for shard in outcome.manifest.shards]
    manifest = Manifest.read(Folder(local.output_url))
    assert manifest is not None
    assert shards == [shard.sha256 for shard in manifest.shards]
    assert (
        memory.cat("/lake/released/out/_dpdask/release.json")
        == (tmp_path / "out" / "_dpdask" / "release.json").read_bytes()
    )
    assert sorted(memory.ls("/lake/released", detail=False)) == ["/lake/released/out"]
    assert run_job(remote).status == "already released"


def test_a_release_whose_success_file_was_removed_is_not_made_anew(tmp_path, memory):
    """A second run would draw other noise for the same rows."""
    for place in ("memory://out", "out"):
        made = job(tmp_path, output={"path": place, "rows_per_shard": 70}, insecure_seed=None)
        run_job(made)
        output = Folder(made.output_url)
        before = output.read(MANIFEST_NAME)
        output.remove(SUCCESS_NAME)
        assert run_job(made).status == "already released"
        assert output.read(MANIFEST_NAME) == before


# ---- what is kept and what is not


def test_the_digest_is_of_the_public_table_where_it_lies(tmp_path):
    """The same job file in two folders names two public tables."""
    mechanism = {"kind": "dip", "reference": {"kind": "public", "path": "public"}}
    digests = set()
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        digests.add(
            job(tmp_path / name, input={"path": str(tmp_path / "in")}, mechanism=mechanism).digest
        )
    assert len(digests) == 2


def test_the_digest_is_of_what_decides_the_bytes(tmp_path):
    base = job(tmp_path)
    same = [
        {"cluster": {"kind": "local", "workers": 3}},
        {"output": {"path": "elsewhere", "rows_per_shard": 70}},
    ]
    other = [
        {"privacy": {"epsilon": 2.0}},
        {"insecure_seed": 4},
        {"insecure_seed": None},
        {"name": "b"},
        {"output": {"path": "out", "rows_per_shard": 71}},
        {"mechanism": {"kind": "dip", "reference": KNOWN}},
        {"input": {"path": "data/part-0.parquet"}},
    ]
    assert all(job(tmp_path, **changed).digest == base.digest for changed in same)
    digests = [job(tmp_path, **changed).digest for changed in other]
    assert len({base.digest, *digests}) == len(digests) + 1


# ---- the state


def test_a_state_comes_back_private(tmp_path):
    state = RunState(Folder(f"file://{tmp_path}/out"))
    with state.records.lock():
        assert state.read() is None
        opened = state.open("job", lambda _: "job", "input", None)
        assert (opened.stage, state.read()) == ("opened", opened)
        barrier = Fitted(release_sha256="ab", bounds_sha256="cd", n_released=(3, 0, 2))
        fitted = replace(opened, stage="fitted", fitted=barrier)
        state.write(fitted)
        assert state.read() == fitted
        assert fitted.run_id
        key = tmp_path / ".out.dpdask" / "run.key"
        assert len(key.read_bytes()) == 32
        assert stat.S_IMODE(key.stat().st_mode) == 0o600
        assert stat.S_IMODE(key.parent.stat().st_mode) == 0o700
        state.remove()
        assert state.read() is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "data", [b"{", b"[]", b"\xff", b'{"format": 99}', b'{"format": 1, "job": "a"}']
)
def test_a_state_that_is_none_is_refused_and_can_be_aborted(data, tmp_path):
    made = job(tmp_path)
    state = RunState(Folder(made.output_url))
    with state.records.lock():
        state.open(made.digest, lambda _: made.digest, "input", None)
        state.folder.write("run.json", data)
    with pytest.raises(OutputError, match=r"the state of an unfinished run cannot be read.*abort"):
        run_job(made)
    assert abort(made.output_url)
    assert run_job(made).status == "released"


def test_a_wrong_fit_after_the_first_noise_leaves_nothing(tmp_path):
    made = job(tmp_path, mechanism={"kind": "dip", "reference": KNOWN})
    bad = table(100).set_column(1, "x", pa.array([1] * 99 + [9]))
    pq.write_table(bad, tmp_path / "data" / "part-2.parquet")
    with pytest.raises(DataError, match="outside its levels"):
        run_job(made)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "job.yaml", "schema.yaml"]


# ---- the plan


def test_a_plan_says_what_a_run_does(tmp_path):
    made = job(tmp_path)
    planned = plan_job(made)
    assert (planned.n_fragments, planned.n_rows, planned.released_rows) == (9, 300, 225)
    assert 0 < planned.n_bytes < sum(path.stat().st_size for path in (tmp_path / "data").iterdir())
    assert planned.epsilons == {"x": 0.5, "y": 0.5}
    assert (planned.kept, planned.dropped) == (("id",), ("note",))
    assert planned.insecure
    assert planned.output == made.output_url
    assert "held-out rows" in planned.guarantee
    assert planned.stages[0].startswith("survey: read x, y; choose the hold-out")
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / ".out.dpdask").exists()
    outcome = run_job(made)
    assert planned.n_shards is not None
    assert len(outcome.manifest.shards) <= planned.n_shards
    assert json.loads(json.dumps(planned.to_dict()))["n_rows"] == 300


def test_a_csv_table_has_no_planned_rows(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.csv").write_text("id,x,y,note\n" + "1,2,0.5,n\n" * 50)
    for reference in (HOLDOUT, KNOWN):
        planned = plan_job(job(tmp_path, mechanism={"kind": "dip", "reference": reference}))
        assert (planned.n_rows, planned.released_rows, planned.n_shards) == (None, None, None)
        assert planned.stages[0].startswith("survey")
    assert (
        run_job(job(tmp_path, mechanism={"kind": "dip", "reference": KNOWN})).manifest.n_rows == 50
    )


def test_a_plan_of_a_public_reference_names_its_stage(tmp_path):
    pq.write_table(
        table(50).select(["x", "y"]), tmp_path / "public.parquet"
    )  # the columns that are privatised are enough
    made = job(
        tmp_path,
        mechanism={"kind": "dip", "reference": {"kind": "public", "path": "public.parquet"}},
    )
    assert any(
        stage.startswith("reference: read x, y of the public table")
        for stage in plan_job(made).stages
    )
    assert run_job(made).manifest.n_rows == 300


def test_an_output_inside_the_public_reference_is_refused(tmp_path):
    with pytest.raises(SpecError, match="the output lies inside the input"):
        job(tmp_path, mechanism={"kind": "dip", "reference": {"kind": "public", "path": "."}})


@pytest.mark.parametrize("place", ["out", "memory://lake/out"])
def test_a_plan_tells_of_the_unfinished_run_of_another_job(place, tmp_path, memory):
    output = {"path": place, "rows_per_shard": 70}
    begun, other = (
        job(tmp_path, output=output, insecure_seed=None),
        job(tmp_path, output=output, privacy={"epsilon": 2.0}),
    )
    with crashing("dpdask.jobs.run.make_job_card"), pytest.raises(TemporaryError):
        run_job(begun)
    assert plan_job(begun).refusal is None  # it goes on
    planned = plan_job(other)
    with pytest.raises(
        OutputError, match="a run of another job is staged for this output"
    ) as refused:
        run_job(other)
    assert str(planned.refusal) == str(refused.value)
    run_job(begun)
    assert (plan_job(begun).refusal, plan_job(begun).is_finished) == (None, True)
    assert "holds another job's release" in str(plan_job(other).refusal)
