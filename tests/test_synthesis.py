"""The Gaussian copula and exact marginals on Dask and pandas frames."""

import dataclasses

import cloudpickle
import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from distributed import Client
from e2e.helpers import categorical, continuous, discrete

import dpdask
from dpdask.codec import codec_for

LEVELS = [0.5, 1.0, 1.5, 2.0]
N_ROWS = 3000
COLUMNS = {
    "user": {"role": "drop"},
    "rating": discrete(LEVELS),
    "price": continuous([0.0, 100.0]),
    "visits": continuous([0, 40], nulls="level"),
    "colour": categorical(["red", "green", "blue"], nulls="level"),
    "word": categorical(["yes", "no"]),
    "when": continuous([1.5e15, 1.7e15]),
    "flag": categorical([True, False], nulls="level"),
}
RELEASED = [name for name in COLUMNS if name != "user"]


@pytest.fixture(autouse=True)
def _no_scheduler():
    with dask.config.set(scheduler=None):
        yield


@pytest.fixture(scope="module")
def schema():
    return dpdask.Schema.from_dict({"columns": COLUMNS})


@pytest.fixture(scope="module")
def table():
    rng = np.random.default_rng(5)
    n = N_ROWS
    rating = rng.choice(LEVELS, n).astype(np.float32)
    missing = rng.random(n) < 0.2
    return pd.DataFrame(
        {
            "user": np.arange(n, dtype=np.int32),
            "rating": rating,
            "price": np.minimum(100.0, rating * 30 + rng.uniform(0, 20, n)),
            "visits": pd.array(np.where(missing, None, rng.integers(0, 41, n)), dtype="Int16"),
            "colour": pd.Categorical(
                rng.choice(["red", "green", "blue", None], n),
                categories=["red", "green", "blue", "unused"],
            ),
            "word": pd.array(rng.choice(["yes", "no"], n), dtype="string[pyarrow]"),
            "when": pd.Series(rng.integers(15 * 10**14, 17 * 10**14, n)).astype("datetime64[us]"),
            "flag": pd.array(np.where(missing, None, rng.random(n) < 0.7), dtype="boolean"),
        }
    )


@pytest.fixture(scope="module")
def frame(table):
    return dd.from_pandas(table, npartitions=5)


@pytest.fixture(scope="module")
def copula(schema):
    return dpdask.GaussianCopula(schema, epsilon=8.0, delta=1e-6, bins=6)


@pytest.fixture(scope="module")
def release(copula, table):
    return dataclasses.replace(copula, insecure_seed=7).fit(table)


def check_valid(records, release):
    """Check that every value lies in its declared domain."""
    types = release.fitted.types
    assert list(records.columns) == types.names
    for name in types.names:
        array = pa.Array.from_pandas(records[name], type=types.field(name).type)
        codec_for(name, release.fitted.schema.columns[name], types.field(name).type).encode(array)


# ---- fit and sample


def test_records_are_valid(release, table):
    lazy = release.sample(2500, rows_per_partition=1000, seed=11)
    records = lazy.compute()
    check_valid(records, release)
    assert lazy.npartitions == 3
    assert lazy.divisions == (0, 1000, 2000, 2499)
    assert list(records.index) == list(range(2500))
    assert len(records) == len(records["price"].unique())
    for name in ("rating", "word"):
        assert (
            np.abs(
                records[name].value_counts(normalize=True)
                - table[name].value_counts(normalize=True)
            ).sum()
            / 2
            < 0.05
        )
    assert (
        np.corrcoef(records["rating"], records["price"])[0, 1] > 0.8
    )  # 0.96 in the table, which tells them apart
    nulls = records.isna().mean()
    assert (
        (nulls[["visits", "colour", "flag"]] > 0.1) & (nulls[["visits", "colour", "flag"]] < 0.35)
    ).all()
    assert not nulls[["rating", "price", "word", "when"]].any()


def test_the_number_of_records(release, copula):
    assert len(release.sample()) == N_ROWS
    last_alone = release.sample(101, rows_per_partition=100)
    assert (
        last_alone.divisions,
        [len(part) for part in dask.compute(*last_alone.to_delayed())],
    ) == ((0, 100, 100), [100, 1])
    for name, given in (
        ("n_rows", 0),
        ("n_rows", -1),
        ("n_rows", 1.5),
        ("n_rows", True),
        ("rows_per_partition", 0),
        ("seed", -1),
        ("seed", 2**64),
    ):
        with pytest.raises(dpdask.SpecError, match=name):
            release.sample(**{"n_rows": 10, name: given})


def test_the_same_frame_is_the_same_records_and_slices_of_it_are(release):
    lazy = release.sample(1000, rows_per_partition=300)
    whole = lazy.compute()
    pd.testing.assert_frame_equal(lazy.compute(scheduler="threads"), whole)
    pd.testing.assert_series_equal(lazy["rating"].compute(), whole["rating"])
    pd.testing.assert_frame_equal(lazy.partitions[1:3].compute(), whole.iloc[300:900])
    pd.testing.assert_frame_equal(lazy.persist().compute(), whole)
    assert (
        not release.sample(1000).compute()["price"].equals(whole["price"])
    )  # another frame, a fresh seed


def test_partitions_do_not_decide_the_records(schema, table, monkeypatch):
    monkeypatch.setattr("dpdask.mechanisms.copula.model.BLOCK_ROWS", 500)
    release = dpdask.GaussianCopula(schema, epsilon=8.0, delta=1e-9, insecure_seed=4).fit(table)
    assert release.card["mechanism"]["raked_tables"] == 21
    with dask.config.set(scheduler="synchronous"):
        whole = release.sample(1300, seed=3).compute()
        for rows in (130, 500, 700):
            pd.testing.assert_frame_equal(
                release.sample(1300, seed=3, rows_per_partition=rows).compute(), whole
            )


# ---- what a release tells


def test_correlations_are_labelled_and_have_a_unit_diagonal(release):
    found = release.correlation
    assert list(found.index.names) == ["column", "level"]
    assert found.index.equals(found.columns)
    assert found.shape == (release.card["mechanism"]["latent_variables"],) * 2
    np.testing.assert_allclose(np.diag(found), 1.0, atol=1e-5)
    np.testing.assert_allclose(found, found.T)
    assert np.linalg.eigvalsh(found).min() > -1e-5
    assert set(found.index.get_level_values("column")) == set(RELEASED)
    assert {"null", "red", "green", "blue"} >= set(found.loc["colour"].index)
    assert len(found.loc["word"]) == 1  # two levels are one question
    strong = found.loc[("rating", "0.5"), "price"]
    assert strong.max() > 0.5


def test_no_key_and_no_row_is_in_what_is_saved_or_sent(schema, table, tmp_path):
    secret = table.assign(price=12.34567891)
    release = dpdask.GaussianCopula(schema, epsilon=1.0, bins=4).fit(
        secret, secrets=str(tmp_path / "work")
    )
    [folder] = (tmp_path / "work").iterdir()
    assert [path.name for path in folder.iterdir()] == [
        "release.npz"
    ]  # the key and all else that is secret went with the fit
    release.save(str(tmp_path / "saved"))
    sent = cloudpickle.dumps(dict(release.sample(100).__dask_graph__())) + cloudpickle.dumps(
        release
    )
    saved = b"".join(path.read_bytes() for path in (tmp_path / "saved").iterdir())
    for data in (sent, saved):
        assert np.float64(12.34567891).tobytes() not in data
    assert (folder.stat().st_mode & 0o777, (folder / "release.npz").stat().st_mode & 0o777) == (
        0o700,
        0o600,
    )


# ---- frames of all sorts


def test_pandas_and_dask_of_any_dtype_are_counted_alike(schema, table):
    expected = dpdask.exact_marginals(table, schema, bins=6)
    other = table.astype(
        {
            "colour": object,
            "word": "category",
            "rating": "float64",
            "visits": "Int64",
            "when": "datetime64[ns]",
        }
    )
    for given in (
        dd.from_pandas(table, npartitions=7),
        other,
        dd.from_pandas(other, npartitions=2),
        table.sample(frac=1, random_state=2),
    ):
        found = dpdask.exact_marginals(given, schema, bins=6)
        np.testing.assert_array_equal(found.one_way, expected.one_way)
        np.testing.assert_array_equal(found.pairs, expected.pairs)


def test_an_index_is_neither_counted_nor_released(schema, table):
    indexed = table.set_index("user")
    release = dpdask.GaussianCopula(schema, epsilon=1.0, bins=4).fit(indexed)
    assert list(release.sample(50).compute().columns) == RELEASED
    assert (
        dpdask.exact_marginals(table.set_index(table["word"].rename(None)), schema).n_rows == N_ROWS
    )
    with pytest.raises(
        dpdask.DataError, match="an index is not counted, and its role is privatise"
    ):
        dpdask.exact_marginals(table.set_index("price"), schema)
    with pytest.raises(dpdask.DataError, match="not declared"):
        dpdask.exact_marginals(table.rename_axis("nobody"), schema)


# ---- refusals


def test_values_that_do_not_fit_are_refused_without_being_shown(copula, table):
    wrong = table.astype({"word": object})
    wrong.loc[7, "word"] = "planted-secret"
    fits = [
        lambda: copula.fit(wrong),
        lambda: copula.fit(dd.from_pandas(wrong, npartitions=3)),
        lambda: copula.fit(table.assign(rating=np.float32(0.75))),
        lambda: copula.fit(table.assign(other=1)),
        lambda: copula.fit(table.drop(columns="word")),
        lambda: copula.fit(table.head(0)),
    ]
    for fit in fits:
        with pytest.raises(dpdask.DataError) as caught:
            fit()
        assert "planted-secret" not in str(caught.value)
        assert "0.75" not in str(caught.value)


# ---- exact tables


def test_marginals_are_pandas_crosstabs(schema, table, frame):
    labels = table["colour"].astype(object).fillna("null")
    cut = pd.cut(table["price"], [0, 25, 50, 75, 100], labels=False, include_lowest=True)
    cliques = [("rating",), ("colour", "rating"), ("word", "colour", "price")]
    for given in (table, frame):
        found = dpdask.exact_marginals(given, schema, cliques, bins=4)
        assert found.n_rows == N_ROWS
        assert (
            found.table(("rating",)).tolist()
            == table["rating"].value_counts().sort_index().tolist()
        )
        crossed = pd.crosstab(labels, table["rating"]).loc[["null", "red", "green", "blue"]]
        np.testing.assert_array_equal(found.table(("colour", "rating")), crossed)
        np.testing.assert_array_equal(found.table(("rating", "colour")), crossed.T)
        three = pd.crosstab([table["word"], labels], cut).reindex(columns=range(4), fill_value=0)
        rows = [
            (word, colour) for word in ("yes", "no") for colour in ("null", "red", "green", "blue")
        ]
        np.testing.assert_array_equal(
            found.table(("word", "colour", "price")).reshape(8, 4),
            three.reindex(rows, fill_value=0),
        )
    pairs = dpdask.exact_marginals(frame, schema)
    np.testing.assert_array_equal(
        pairs.table(("word", "rating")),
        pd.crosstab(table["word"], table["rating"]).loc[["yes", "no"]],
    )


@pytest.mark.parametrize(
    ("cliques", "message"),
    [
        ([("rate",)], "'rate': is not a privatised column"),
        ([("user",)], "'user': is not a privatised column"),
        ([()], "one or more different columns"),
        ([("rating", "rating")], "one or more different columns"),
        (["rating"], "one or more different columns"),
    ],
)
def test_tables_that_cannot_be_are_refused(cliques, message, schema, table):
    with pytest.raises(dpdask.SpecError, match=message):
        dpdask.exact_marginals(table, schema, cliques)


# ---- a cluster


def test_on_a_cluster(schema, frame, table, two_workers):
    seeded = dpdask.GaussianCopula(schema, epsilon=2.0, delta=1e-6, bins=4, insecure_seed=2)
    with dask.config.set(scheduler="synchronous"):
        here = seeded.fit(frame)
        expected = here.sample(900, rows_per_partition=200, seed=1).compute()
    with Client(two_workers) as client:
        there = seeded.fit(frame)
        assert there.sha256 == here.sha256
        pd.testing.assert_frame_equal(
            there.sample(900, rows_per_partition=200, seed=1).compute(), expected
        )
        remote = client.persist(dd.from_pandas(table, npartitions=3))
        found = dpdask.exact_marginals(remote, schema, [("rating", "word")])
        np.testing.assert_array_equal(
            found.table(("word", "rating")),
            pd.crosstab(table["word"], table["rating"]).loc[["yes", "no"]],
        )
        with pytest.raises(dpdask.DataError, match="rating"):
            seeded.fit(frame.assign(rating=frame["rating"] + np.float32(0.25)))
