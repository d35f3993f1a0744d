"""What readers make of a release, and that its rows are the input's with nothing changed but the privatised columns."""

import json
import math
from pathlib import Path

import dask.dataframe as dd
import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from e2e.bad_input import command
from e2e.helpers import categorical, continuous, mixed
from scipy import stats

from dpdask.simulate import simulate_movielens

ALPHA = 1e-9
LEVELS = np.arange(1, 11) / 2
JOB = Path(__file__).parents[2] / "pipelines" / "movielens" / "job.yaml"
N_ROWS = 40_000

pytestmark = pytest.mark.filterwarnings(
    "ignore:The inplace keyword in DataFrame.reset_index"
)  # Dask's own reader, on pandas 3.1


def release(folder, **settings):
    out = folder / "out"
    changed = {
        "input.path": folder / "ratings",
        "output.path": out,
        "output.order": "keep",
        "cluster": "{kind: threads}",
        "insecure_seed": 11,
    }
    changed |= settings
    ended = command(
        "run",
        str(JOB),
        *(word for key, value in changed.items() for word in ("--set", f"{key}={value}")),
    )
    assert ended.code == 0, ended.err
    return out


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("readers")
    simulate_movielens(
        str(folder / "ratings"), n_rows=N_ROWS, rows_per_file=3_000
    )  # 14 files: natural and textual order differ in none
    return folder


@pytest.fixture(scope="module")
def holdout(folder):
    return release(folder, **{"output.rows_per_shard": 7_000})


@pytest.fixture(scope="module")
def public(folder):
    """A release of all rows in the order of the input, under a public table of the same rows, so that the distribution is known exactly."""
    (folder / "public").mkdir()
    same = folder / "public" / "table.parquet"
    pq.write_table(pq.read_table(folder / "ratings"), same)
    reference = f"{{kind: public, path: {same}}}"
    out = release(
        folder, **{"output.path": folder / "public" / "out", "mechanism.reference": reference}
    )
    del out
    path = folder / "public" / "out"
    return (
        pq.read_table(folder / "ratings"),
        pq.read_table(path),
        json.loads((path / "_dpdask" / "release.json").read_text()),
    )


def by_pandas(out):
    return pd.read_parquet(out)


def by_dask(out):
    return dd.read_parquet(out).compute().reset_index(drop=True)


def by_duckdb(out):
    with duckdb.connect() as connection:
        return connection.sql(f"SELECT * FROM read_parquet('{out}/*.parquet')").df()


def by_polars(out):
    frame = pl.read_parquet(f"{out}/*.parquet")
    return pd.DataFrame({name: frame[name].to_numpy() for name in frame.columns})


@pytest.mark.parametrize(
    "read", [by_pandas, by_dask, by_duckdb, by_polars], ids=lambda read: read.__name__
)
def test_every_reader_finds_the_same_rows(read, holdout):
    expected = pa.concat_tables([pq.read_table(path) for path in sorted(holdout.glob("*.parquet"))])
    found = read(holdout)
    assert list(found.columns) == ["userId", "movieId", "rating"]
    assert [str(dtype) for dtype in found.dtypes] == ["int32", "int32", "float32"]
    for name in expected.column_names:
        np.testing.assert_array_equal(found[name].to_numpy(), expected.column(name).to_numpy())


def test_types_nulls_and_texts_reach_every_reader(tmp_path):
    n_rows = 300
    rng = np.random.default_rng(3)
    table = pa.table(
        {
            "id": pa.array(range(n_rows)),
            "when": pa.array(rng.integers(0, 20_000, n_rows).astype(np.int32)).cast(pa.date32()),
            "genre": pa.array(
                [[None, "comedy", "drama"][code] for code in rng.integers(0, 3, n_rows)]
            ).dictionary_encode(),
            "seen": pa.array([None if row % 7 == 0 else bool(row % 2) for row in range(n_rows)]),
            "amount": pa.array(
                np.where(rng.random(n_rows) < 0.3, 0.0, rng.uniform(0, 9, n_rows)),
                mask=rng.random(n_rows) < 0.2,
            ),
        }
    )
    pq.write_table(table, tmp_path / "table.parquet")
    columns = {
        "id": {"role": "keep"},
        "when": continuous(),
        "genre": categorical(["comedy", "drama"], nulls="level"),
        "seen": {"role": "keep"},
        "amount": mixed(atoms=[0.0], bounds=[0.0, 9.0], nulls="level"),
    }
    job = yaml.safe_load(JOB.read_text()) | {
        "input": {"path": "table.parquet"},
        "output": {"path": "out", "rows_per_shard": 100, "order": "keep"},
        "cluster": {"kind": "synchronous"},
    }
    (tmp_path / "schema.yaml").write_text(yaml.safe_dump({"columns": columns}))
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    assert command("run", str(tmp_path / "job.yaml")).code == 0
    out = tmp_path / "out"
    plain = pa.schema(
        [
            (field.name, pa.string() if field.name == "genre" else field.type)
            for field in table.schema
        ]
    )
    expected = pa.concat_tables([pq.read_table(path) for path in sorted(out.glob("*.parquet"))])
    assert expected.schema.equals(plain)
    rows = expected.to_pylist()
    assert {row["genre"] for row in rows} == {None, "comedy", "drama"}
    assert pl.read_parquet(f"{out}/*.parquet").to_dicts() == rows
    with duckdb.connect() as connection:
        found = connection.sql(f"SELECT * FROM read_parquet('{out}/*.parquet')")
        assert [dict(zip(found.columns, row, strict=True)) for row in found.fetchall()] == rows
    original = {row["id"]: row for row in table.to_pylist()}
    assert all(row["seen"] == original[row["id"]]["seen"] for row in rows)
    ids = [row["id"] for row in rows]
    assert ids == sorted(ids)
    for frame in (pd.read_parquet(out), dd.read_parquet(out).compute()):
        assert frame["id"].tolist() == ids
        assert frame["genre"].isna().tolist() == [row["genre"] is None for row in rows]
        assert frame["amount"].isna().tolist() == [row["amount"] is None for row in rows]


# ---- rows


def test_kept_columns_are_untouched_and_in_order_for_all_rows(public):
    original, released, _ = public
    assert released.num_rows == original.num_rows == N_ROWS
    for name in ("userId", "movieId"):
        assert released.column(name).combine_chunks().equals(original.column(name).combine_chunks())


def test_released_rows_are_a_subsequence_of_the_input(folder, holdout):
    """Kept columns as they were, in the order of the input, with the held-out rows left out."""
    original = pq.read_table(folder / "ratings")
    pairs = zip(
        original.column("userId").to_pylist(), original.column("movieId").to_pylist(), strict=True
    )
    released = pq.read_table(holdout)
    for pair in zip(
        released.column("userId").to_pylist(), released.column("movieId").to_pylist(), strict=True
    ):
        assert any(pair == other for other in pairs), (
            "a row out of order, or changed"
        )  # the iterator goes on from there
    assert abs(released.num_rows - 0.75 * N_ROWS) < stats.norm.isf(ALPHA) * math.sqrt(
        N_ROWS * 0.1875
    )


# ---- the distribution


def counts(table):
    return np.array(
        [np.count_nonzero(table.column("rating").to_numpy() == level) for level in LEVELS]
    )


def test_the_joint_law_of_original_and_release_is_the_cards_channel(public):
    original, released, card = public
    before, after = (
        np.searchsorted(LEVELS, table.column("rating").to_numpy()) for table in (original, released)
    )
    observed = np.zeros((10, 10))
    np.add.at(observed, (before, after), 1)
    expected = np.array(card["columns"]["rating"]["channel"]) * observed.sum(axis=1, keepdims=True)
    chi_square = ((observed - expected) ** 2 / expected).sum()
    assert ALPHA < stats.chi2.sf(chi_square, 90) < 1 - ALPHA
    np.testing.assert_allclose(
        expected.sum(axis=0) / N_ROWS, counts(original) / N_ROWS, atol=1e-6
    )  # P·T = P
