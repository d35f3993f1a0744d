"""Tables that give themselves as Arrow streams are released as the pandas frame of the same rows is."""

import tracemalloc

import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.dataset as ds
import pytest
from e2e.helpers import categorical, continuous, discrete

import dpdask

SCHEMA = dpdask.Schema.from_dict(
    {
        "columns": {
            "town": {"role": "keep"},
            "stars": discrete([1, 2, 3]),
            "tag": categorical(["a", "b"]),
            "fare": continuous([0, 100], nulls="level"),
            "note": {"role": "drop"},
        }
    }
)
COUNTED = dpdask.Schema(columns={k: v for k, v in SCHEMA.columns.items() if k != "town"})


@pytest.fixture(scope="module")
def rows():
    """Return rows in Arrow's types, in several chunks."""
    rng, n = np.random.default_rng(1), 3_000
    fare = [None if value < 5 else value for value in rng.gamma(2, 20, n).clip(0, 100).tolist()]
    table = pa.table(
        {
            "town": rng.choice(["A", "B"], n),
            "stars": rng.integers(1, 4, n),
            "tag": rng.choice(["a", "b"], n),
            "fare": pa.array(fare, pa.float64()),
            "note": rng.choice(["x", "y"], n),
        }
    )
    return pa.concat_tables([table.slice(0, 1_000), table.slice(1_000)])


def as_each(table):
    """Return the rows as tables of other packages."""
    polars = pl.DataFrame({name: table[name].to_pylist() for name in table.column_names})
    return {
        "arrow": table,
        "batch": table.combine_chunks().to_batches()[0],
        "polars": polars,
        "polars, categories": polars.with_columns(pl.col("tag").cast(pl.Categorical)),
        "duckdb": duckdb.from_arrow(table),
    }


KINDS = ("arrow", "batch", "polars", "polars, categories", "duckdb")


def as_pandas(table):
    return pa.table(table).to_pandas(types_mapper=pd.ArrowDtype)


@pytest.mark.parametrize("name", KINDS)
def test_rows_are_those_of_the_pandas_frame(name, rows):
    given = as_each(rows)[name]
    dip = dpdask.DIP(SCHEMA, epsilon=4.0, reference=dpdask.Histogram(), insecure_seed=3)
    assert dip.plan(given).stages
    with dip.fit(given) as release, dip.fit(as_pandas(rows)) as other:
        found = release.transform(given)
        assert isinstance(found, pa.Table)
        assert release.card == other.card
        with pytest.raises(dpdask.SpecError, match="covers only the frame it was fitted on"):
            release.transform(as_each(rows.slice(1))[name])
    pandas = dpdask.DIP(SCHEMA, epsilon=4.0, reference=dpdask.Histogram(), insecure_seed=3)
    frame = as_pandas(rows)
    with pandas.fit(frame) as release:
        expected = release.transform(frame)
    for column in expected.columns:
        assert (
            found[column].to_pylist()
            == expected[column].astype(object).where(expected[column].notna(), None).tolist()
        )


@pytest.mark.parametrize("name", KINDS)
def test_counts_are_those_of_the_pandas_frame(name, rows):
    given = as_each(rows.drop(["town"]))[name]
    asked = dpdask.Marginals(
        COUNTED, cliques=[["tag", "stars"]], epsilon=1.0, delta=1e-6, insecure_seed=3
    )
    one, other = asked.fit(given), asked.fit(as_pandas(rows.drop(["town"])))
    assert one.table(("tag", "stars")).tolist() == other.table(("tag", "stars")).tolist()
    exact = dpdask.exact_marginals(given, COUNTED).table(("tag", "stars"))
    assert exact.sum() == rows.num_rows


@pytest.mark.parametrize(
    ("make", "hint"),
    [
        (lambda table: table.to_reader(), "make one of it: read_all()"),
        (lambda table: ds.dataset(table), "make one of it: to_table()"),
        (lambda table: pl.DataFrame(table).lazy(), "make one of it: collect()"),
        (lambda table: pl.DataFrame(table)["town"], "make one of it: to_frame()"),
        (lambda table: table["town"], "give a DataFrame"),
    ],
)
def test_what_is_no_table_is_refused_with_the_way_to_one(make, hint, rows):
    with pytest.raises(dpdask.SpecError, match="or an Arrow table, is expected") as refused:
        dpdask.DIP(SCHEMA, epsilon=1.0, reference=dpdask.Histogram()).fit(make(rows))
    assert refused.value.hint == hint


@pytest.mark.parametrize("reference", ["known", "histogram"])
def test_a_query_whose_rows_change_is_not_released_again(reference):
    """The same noise on other values would tell them."""
    database = duckdb.connect()
    database.execute("create table t as select (range % 3 + 1)::bigint as stars from range(1000)")
    given = database.table("t")
    known = dpdask.Known(columns={"stars": {"probabilities": [0.3, 0.3, 0.4]}})
    schema = dpdask.Schema(columns={"stars": SCHEMA.columns["stars"]})
    chosen = known if reference == "known" else dpdask.Histogram()
    with dpdask.DIP(schema, epsilon=1.0, reference=chosen).fit(given) as release:
        first = release.transform(given)
        assert release.transform(given).equals(first)
        database.execute("update t set stars = 4 - stars")
        with pytest.raises(dpdask.DataError, match="rows changed since they were first read"):
            release.transform(given)


@pytest.mark.parametrize("size", [1, 700, 3_000])
def test_how_many_rows_are_converted_at_a_time_changes_nothing(size, rows, monkeypatch):
    rows = rows.slice(0, 60) if size == 1 else rows

    def release_rows():
        dip = dpdask.DIP(SCHEMA, epsilon=4.0, reference=dpdask.Histogram(), insecure_seed=3)
        with dip.fit(rows) as release:
            return release.transform(rows)

    whole = release_rows()
    monkeypatch.setattr("dpdask.engine.source._BATCH_ROWS", size)
    assert release_rows().combine_chunks().equals(whole.combine_chunks())


@pytest.mark.parametrize("n_kept", [1, 8])
def test_a_release_needs_the_memory_of_its_result_and_of_few_rows(n_kept):
    n, rng = 300_000, np.random.default_rng(4)
    columns = {"stars": discrete([1, 2, 3]), "fare": continuous([0, 100])}
    rows = pd.DataFrame({"stars": rng.integers(1, 4, n), "fare": rng.random(n)})
    for number in range(n_kept):
        rows[f"kept {number}"] = rng.integers(0, 9, n)
        columns[f"kept {number}"] = {"role": "keep"}
    schema = dpdask.Schema.from_dict({"columns": columns})
    dip = dpdask.DIP(schema, epsilon=4.0, reference=dpdask.Histogram(), insecure_seed=3)
    few, size = 2**24, rows.memory_usage(index=False).sum()
    first = rows.head(1_000)
    with dip.fit(first) as release:  # modules that are imported now are no rows
        release.transform(first)
    tracemalloc.start()
    try:
        with dip.fit(rows) as release:
            assert tracemalloc.get_traced_memory()[1] < few
            tracemalloc.reset_peak()
            released = release.transform(rows)
            assert tracemalloc.get_traced_memory()[1] < size + few
    finally:
        tracemalloc.stop()
    assert len(released) == n
