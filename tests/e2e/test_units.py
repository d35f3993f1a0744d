"""The privacy unit: of each user at most `max_rows` rows are released, the same ones however the lake is written."""

import shutil
import signal

import dask
import dask.dataframe as dd
import fsspec
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from e2e.helpers import (
    HOLDOUT,
    LEVELS,
    digests,
    discrete,
    hidden,
    load,
    read_card,
    read_rows,
    run_here,
    write_job,
)

import dpdask
from dpdask.engine import scan
from dpdask.engine.scan import Chooser
from dpdask.errors import TemporaryError
from dpdask.jobs.plan import plan_job
from dpdask.jobs.run import run_job

N_ROWS, MAX_ROWS = 1500, 7
SCHEMA = {
    "userId": {"role": "keep", "type": "int64"},
    "time": {"role": "keep", "type": "int64"},
    "rating": discrete(LEVELS, type="float64"),
}
UNIT = {"column": "userId", "max_rows": MAX_ROWS}
HISTOGRAM = {"kind": "histogram"}


def users(n_rows=N_ROWS):
    """Return ratings of users from one row to hundreds, scattered over the table; `time` names the row."""
    rng = np.random.default_rng(11)
    user = np.minimum(rng.zipf(1.4, n_rows), 200)
    return pd.DataFrame(
        {"userId": user, "time": rng.permutation(n_rows), "rating": rng.choice(LEVELS, n_rows)}
    )


def written(folder, table, sizes, row_group=10_000):
    folder.mkdir(parents=True)
    start = 0
    for number, size in enumerate(sizes):
        part = pa.Table.from_pandas(table.iloc[start : start + size], preserve_index=False)
        part = part.replace_schema_metadata(
            {"part": str(number)}
        )  # files of equal rows are no copies
        pq.write_table(part, folder / f"part-{number:03}.parquet", row_group_size=row_group)
        start += size
    assert start == len(table)
    return folder


def job(folder, source, **changed):
    return write_job(
        folder / "job",
        source,
        folder / "out",
        **{"schema": SCHEMA, "privacy__unit": UNIT, **changed},
    )


def released(folder, source, **changed):
    run_here(job(folder, source, **changed))
    return read_rows(folder).to_pandas()


@pytest.mark.parametrize("reference", [HISTOGRAM, HOLDOUT], ids=["histogram", "holdout"])
def test_the_same_rows_however_the_lake_is_written(reference, tmp_path):
    table, same = (
        users(),
        pd.DataFrame({"userId": [1] * 50 + [2] * 3, "time": [0] * 53, "rating": [1.0] * 53}),
    )
    chosen = []
    shuffled = table.sample(frac=1, random_state=3)
    for number, (rows, sizes, row_group) in enumerate(
        [
            (table, [N_ROWS], 100),
            (table, [3, 700, 1, 290, 6, 500], 10_000),
            (shuffled, [800, 700], 10_000),
        ]
    ):
        found = released(
            tmp_path / str(number),
            written(tmp_path / str(number) / "in", rows, sizes, row_group),
            mechanism__reference=reference,
        )
        chosen.append(sorted(zip(found["userId"], found["time"], strict=True)))
    assert chosen[0] == chosen[1] == chosen[2]
    assert set(chosen[0]) <= set(zip(table["userId"], table["time"], strict=True))
    if reference is HISTOGRAM:  # equal rows are bounded all the same
        found = released(
            tmp_path / "same",
            written(tmp_path / "same" / "in", same, [10] * 5 + [3]),
            mechanism__reference=reference,
        )
        assert found.groupby("userId").size().to_dict() == {1: MAX_ROWS, 2: 3}


def test_a_user_has_all_rows_or_max_rows_or_none(tmp_path):
    table = users()
    source = written(tmp_path / "in", table, [400, 1100])
    given = table.groupby("userId").size()
    whole = released(tmp_path / "all", source, mechanism__reference=HISTOGRAM)
    assert whole.groupby("userId").size().equals(np.minimum(given, MAX_ROWS))
    assert (given > MAX_ROWS).sum() > 10
    kept = (
        released(tmp_path / "most", source, mechanism__reference=HOLDOUT).groupby("userId").size()
    )
    assert kept.equals(np.minimum(given, MAX_ROWS)[kept.index])
    assert (
        0.55 < len(kept) / len(given) < 0.92
    )  # of 200 users three quarters, 5 standard deviations
    other = released(tmp_path / "other", source, mechanism__reference=HISTOGRAM, insecure_seed=8)
    assert set(other["time"]) != set(whole["time"])  # the hash is keyed


def test_no_user_is_both_held_out_and_released(tmp_path, monkeypatch):
    seen = []

    class Spy(Chooser):
        def split(self, batch):
            kept, shaping = super().split(batch)
            assert shaping is not None
            seen.append((batch.column("userId").to_numpy(), kept, shaping))
            return kept, shaping

    monkeypatch.setattr(scan, "Chooser", Spy)
    released(tmp_path, written(tmp_path / "in", users(), [500, 1000], 200))
    user, kept, shaping = (np.concatenate(part) for part in zip(*seen, strict=True))
    assert not set(user[kept]) & set(user[shaping])
    assert 10 < len(set(user[shaping])) < 100
    assert (
        np.unique(user[shaping], return_counts=True)[1].max() == MAX_ROWS
    )  # the reference is bounded too


def test_the_units_column_may_be_dropped(tmp_path):
    source = written(tmp_path / "in", users(), [700, 800], 300)
    kept = released(tmp_path / "kept", source)
    found = released(tmp_path / "drop", source, schema=SCHEMA | {"userId": {"role": "drop"}})
    assert list(found.columns) == ["time", "rating"]
    assert found["time"].tolist() == kept["time"].tolist()


@pytest.mark.parametrize(
    "ids",
    [
        lambda user: pa.array([f"user {number}" for number in user]).dictionary_encode(),
        lambda user: pa.array(user.astype(np.float64)),
        lambda user: pa.array(user.astype(np.uint64) + np.uint64(2**63)),
        lambda user: pa.array(user, pa.timestamp("us")),
    ],
    ids=["dictionary", "float", "uint64", "timestamp"],
)
def test_units_of_any_type(ids, tmp_path):
    table = users(600)
    columns = pa.Table.from_pandas(table, preserve_index=False).set_column(
        0, "userId", ids(table["userId"].to_numpy())
    )
    (tmp_path / "in").mkdir()
    for number in range(3):
        pq.write_table(columns.slice(200 * number, 200), tmp_path / "in" / f"{number}.parquet")
    schema = SCHEMA | {"userId": {"role": "keep"}}
    found = (
        released(tmp_path, tmp_path / "in", schema=schema, mechanism__reference=HISTOGRAM)
        .groupby("userId")
        .size()
    )
    assert sorted(found) == sorted(np.minimum(table.groupby("userId").size(), MAX_ROWS))


@pytest.mark.parametrize("role", ["keep", "drop"])
def test_a_row_without_a_unit_is_refused(role, tmp_path):
    table = users().astype({"userId": "Int64"})
    table.loc[900, "userId"] = pd.NA
    source = written(tmp_path / "in", table, [700, 800])
    made = job(tmp_path, source, schema=SCHEMA | {"userId": {"role": role}})
    with (
        pytest.raises(dpdask.DataError, match=r"^column 'userId': holds a null") as caught,
        dask.config.set(scheduler="synchronous"),
    ):
        run_job(load(made))
    assert caught.value.exit_code == 65
    assert not hidden(tmp_path / "out").exists()


def test_the_card_says_who_the_unit_is_and_what_a_row_gets(tmp_path):
    source = written(tmp_path / "in", users(), [1500])
    planned = plan_job(load(job(tmp_path, source)))
    assert planned.epsilons["rating"] * MAX_ROWS <= 4.0
    assert planned.stages[0].startswith("units: ")
    assert f"of which at most {MAX_ROWS} are released" in planned.guarantee
    outcome = run_here(job(tmp_path, source))
    card = read_card(tmp_path)
    assert card["guarantee"]["released_percent_of_rows"] == round(
        100 * outcome.manifest.n_rows / len(users())
    )


# ---- resuming


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return written(tmp_path_factory.mktemp("units") / "in", users(), [500, 300, 700], 200)


@pytest.fixture(scope="module")
def quiet(source, tmp_path_factory):
    base = tmp_path_factory.mktemp("quiet")
    run_here(job(base, source, mechanism__reference=HISTOGRAM, output__rows_per_shard=60))
    return digests(base / "out")


@pytest.mark.few(2)
@pytest.mark.parametrize("point", ["bounded", "surveying", "fitted", "some-shards", "staged"])
def test_a_killed_run_goes_on_with_the_same_bounds_to_the_same_bytes(
    point, source, quiet, drivers, tmp_path
):
    made = job(tmp_path, source, mechanism__reference=HISTOGRAM, output__rows_per_shard=60)
    assert drivers.run("run", made, point=point)[0] == -signal.SIGKILL
    bounds = hidden(tmp_path / "out") / "bounds.npz"
    before = bounds.read_bytes()
    assert bounds.stat().st_mode & 0o777 == 0o600
    assert drivers.run("run", made, point="all-shards")[0] in (-signal.SIGKILL, 0)
    assert not bounds.exists() or bounds.read_bytes() == before
    run_here(made)
    assert digests(tmp_path / "out") == quiet
    assert not hidden(tmp_path / "out").exists()


@pytest.mark.parametrize("stage", ["units", "write"])
def test_in_a_store_the_bounds_are_in_memory_and_an_interrupted_run_goes_on(
    stage, source, quiet, tmp_path
):
    made = job(
        tmp_path,
        source,
        mechanism__reference=HISTOGRAM,
        output__rows_per_shard=60,
        output__path=f"memory://{tmp_path.name}/out",
    )
    stages = []

    def interrupt(name, done, _):
        stages.append(name)
        if done and name == stage:
            raise TemporaryError("crash")

    with pytest.raises(TemporaryError, match="crash"):
        run_here(made, interrupt)
    assert not [
        path
        for path in fsspec.filesystem("memory").find(f"/{tmp_path.name}")
        if path.endswith("bounds.npz")
    ]
    shards = [
        digest for name, digest in quiet.items() if name.endswith(".parquet")
    ]  # in the order of their names
    assert [shard.sha256 for shard in run_here(made).manifest.shards] == shards
    assert stage in stages


def test_bounds_that_are_not_those_written_are_refused(source, drivers, tmp_path):
    made = job(tmp_path, source, mechanism__reference=HISTOGRAM)
    drivers.run("run", made, point="fitted")
    path = hidden(tmp_path / "out") / "bounds.npz"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    shutil.rmtree(path.parent / "chosen")  # else they are not needed any more
    code, line = drivers.run("run", made)
    assert (code, "not those that were written" in line) == (66, True), line


# ---- frames


@pytest.fixture
def _frames():
    with dask.config.set(scheduler="synchronous"):
        yield


def fitted(frame, reference, **changed):
    given = {
        "unit": dpdask.UnitColumn(column="userId", max_rows=MAX_ROWS),
        "insecure_seed": 7,
        **changed,
    }
    schema = dpdask.Schema.from_dict(
        {
            "columns": {
                name: {k: v for k, v in column.items() if k != "type"}
                for name, column in SCHEMA.items()
            }
        }
    )
    return dpdask.DIP(schema, epsilon=4.0, reference=reference, **given).fit(frame)


@pytest.mark.usefixtures("_frames")
@pytest.mark.parametrize(
    "reference", [dpdask.Histogram(), dpdask.Holdout(fraction=0.25)], ids=["histogram", "holdout"]
)
def test_frames_are_bounded_alike(reference, source, tmp_path):
    table = users()
    given = table.groupby("userId").size()
    chosen = []
    for frame in (
        table,
        dd.from_pandas(table, npartitions=1),
        dd.from_pandas(table, npartitions=6),
        table.sample(frac=1, random_state=5, ignore_index=True),
    ):
        found = fitted(frame, reference).transform(frame)
        found = found if isinstance(found, pd.DataFrame) else found.compute()
        sizes = found.groupby("userId").size()
        assert sizes.equals(np.minimum(given, MAX_ROWS)[sizes.index])
        chosen.append(set(found["time"]))
    assert all(rows == chosen[0] for rows in chosen)
    files = released(tmp_path, source, mechanism__reference=reference.model_dump())
    assert set(files["time"]) == chosen[0]  # a job and a frame choose alike


@pytest.mark.usefixtures("_frames")
def test_frames_with_wrong_units_are_refused():
    table = users()
    with pytest.raises(dpdask.DataError, match="holds a null"):
        fitted(table.astype({"userId": "Int64"}).mask(table["time"] == 5), dpdask.Histogram())
    with pytest.raises(dpdask.SpecError, match="kept or dropped"):
        fitted(table, dpdask.Histogram(), unit=dpdask.UnitColumn(column="rating", max_rows=2))
    with pytest.raises(dpdask.SpecError, match="no units to bound"):
        fitted(table, dpdask.Public())  # type: ignore[arg-type]  # wrong on purpose
    release = fitted(table, dpdask.Histogram())
    with pytest.raises(dpdask.SpecError, match="only the frame it was fitted on"):
        release.transform(table.head(100))
