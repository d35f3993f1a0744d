"""The Python API on Dask and pandas frames."""

import datetime as dt
import stat
import subprocess
import sys

import cloudpickle
import dask
import dask.dataframe as dd
import fsspec
import numpy as np
import pandas as pd
import pytest
from e2e.helpers import categorical, continuous, discrete

import dpdask

LEVELS = [0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0]


class CountingScheduler:
    """Counts how often a graph is computed."""

    def __init__(self):
        self.computes = 0

    def __call__(self, graph, keys, **options):
        self.computes += 1
        return dask.get(graph, keys, **options)


@pytest.fixture
def schema():
    return dpdask.Schema.from_dict(
        {
            "columns": {
                "user": {"role": "keep"},
                "rating": discrete(LEVELS),
                "price": continuous(),
                "count": continuous(),
                "colour": categorical(["red", "green", "blue"], nulls="level"),
                "note": {"role": "drop"},
            }
        }
    )


@pytest.fixture
def table():
    rng = np.random.default_rng(5)
    n = 4000
    return pd.DataFrame(
        {
            "user": np.arange(n, dtype=np.int32),
            "rating": rng.choice(LEVELS, n).astype(np.float32),
            "price": rng.lognormal(3, 1, n),
            "count": rng.poisson(20, n).astype(np.int16),
            "colour": pd.Categorical(
                rng.choice(["red", "green", "blue", None], n),
                categories=["red", "green", "blue", "unused"],
            ),
            "note": ["secret"] * n,
        },
        index=pd.RangeIndex(1, 2 * n + 1, 2),
    )


@pytest.fixture
def frame(table):
    return dd.from_pandas(table, npartitions=5)


@pytest.fixture
def holdout(schema):
    return dpdask.DIP(schema, epsilon=4.0, reference=dpdask.Holdout(fraction=0.25))


def test_fit_computes_once_and_transform_not_at_all(holdout, frame):
    counting = CountingScheduler()
    with dask.config.set(scheduler=counting):
        release = holdout.fit(frame)
        assert counting.computes == 1
        released = release.transform(frame)
        assert counting.computes == 1
        released.compute()
        assert counting.computes == 2


def test_rows_keep_index_order_dtypes_and_kept_columns(holdout, frame, table):
    lazy = holdout.fit(frame).transform(frame)
    released = lazy.compute()
    assert list(released.columns) == ["user", "rating", "price", "count", "colour"]
    assert released.dtypes.astype(str).to_dict() == lazy.dtypes.astype(str).to_dict()
    assert released.index.is_monotonic_increasing
    assert (released["user"] == table.loc[released.index, "user"]).all()
    assert released["rating"].dtype == np.float32
    assert released["count"].dtype == np.int16
    assert set(released["rating"]) <= set(LEVELS)
    assert list(released["colour"].cat.categories) == ["red", "green", "blue"]
    assert released["colour"].isna().any()
    assert lazy.divisions == frame.divisions


def test_recomputing_selecting_and_slicing_repeat_the_same_noise(holdout, frame):
    lazy = holdout.fit(frame).transform(frame)
    whole = lazy.compute()
    pd.testing.assert_frame_equal(lazy.compute(), whole)
    pd.testing.assert_series_equal(lazy["rating"].compute(), whole["rating"])
    middle = lazy.partitions[2:4].compute()
    pd.testing.assert_frame_equal(middle, whole.loc[middle.index])
    pd.testing.assert_frame_equal(lazy.persist().compute(), whole)


def test_a_partition_keeps_its_noise_when_dask_would_join_files(schema, table, tmp_path):
    for number in range(20):
        table.iloc[number * 200 : (number + 1) * 200].to_parquet(
            tmp_path / f"part.{number}.parquet"
        )
    frame = dd.read_parquet(tmp_path).astype({"colour": "string"})
    release = dpdask.DIP(schema, epsilon=2.0, reference=dpdask.Holdout(fraction=0.5)).fit(frame)
    lazy = release.transform(frame)
    whole = lazy.compute()
    pd.testing.assert_series_equal(
        lazy["rating"].compute().reset_index(drop=True), whole["rating"].reset_index(drop=True)
    )
    assert len(whole) == len(set(whole["user"]))


def test_an_index_is_published_only_if_it_is_row_numbers_or_declared(schema, table):
    public = dpdask.DIP(schema, epsilon=1.0, reference=dpdask.Public())
    for index in (
        table["rating"].rename("secret"),
        pd.MultiIndex.from_frame(table[["user", "count"]]),
    ):
        with pytest.raises(dpdask.DataError):
            public.fit(table.set_index(pd.Index(index)))
    declared = table.set_index("user")
    declared.attrs["secret"] = 1
    released = public.fit(declared.iloc[::-1]).transform(declared)
    assert list(released.index) == list(range(4000))
    assert "user" not in released.columns
    assert released.attrs == {}


def test_a_private_category_never_brings_its_values_along(table):
    columns = {"price": continuous()}
    prices = table[["price"]].astype("category")
    assert of_public(prices, columns)["price"].dtype == np.float64


def of_public(table, columns):
    """The release of a table whose public table is the same, in another order."""
    dip = dpdask.DIP(
        dpdask.Schema.from_dict({"columns": columns}), epsilon=1.0, reference=dpdask.Public()
    )
    return dip.fit(table.iloc[::-1]).transform(table)


def test_whole_numbers_beyond_2_to_the_53_come_out_exactly():
    levels = [2**60 + 1, 2**60 + 3, 2**60 + 5]
    columns = {"n": discrete(levels, nulls="level")}
    released = of_public(
        pd.DataFrame({"n": pd.array([*levels, None] * 50, dtype="Int64")}), columns
    )
    assert set(released["n"].dropna()) == set(levels)


def test_a_seed_repeats_the_noise_and_says_that_it_protects_nobody(schema, table):
    seeded, other = (
        dpdask.DIP(schema, epsilon=1.0, reference=dpdask.Public(), insecure_seed=3),
        table.iloc[::-1],
    )
    pd.testing.assert_frame_equal(
        seeded.fit(other).transform(table), seeded.fit(other).transform(table)
    )
    assert seeded.fit(table).card["insecure"] is True
    assert seeded.fit(table).card["guarantee"]["text"].startswith("INSECURE")


def test_two_columns_with_the_same_values_get_different_noise():
    columns = {name: discrete(list(range(10))) for name in ("a", "b")}
    values = np.arange(5000) % 10
    released = of_public(pd.DataFrame({"a": values, "b": values}), columns)
    assert 0.05 < (released["a"] == released["b"]).mean() < 0.2


def test_the_run_key_is_private_never_in_the_graph_and_destroyed_by_close(holdout, frame, tmp_path):
    release = holdout.fit(frame, secrets=str(tmp_path))
    [folder] = tmp_path.iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "run.key").stat().st_mode) == 0o600
    secret = (folder / "run.key").read_bytes()
    lazy = release.transform(frame)
    assert secret not in cloudpickle.dumps(lazy)
    assert secret not in cloudpickle.dumps(dict(lazy.__dask_graph__()))
    assert secret not in cloudpickle.dumps(release)
    release.close()
    with pytest.raises(dpdask.InputError, match="missing"):
        lazy.compute()


def test_a_forked_process_that_ends_leaves_its_parent_the_key(tmp_path):
    """Servers fork their workers after they have prepared everything, and the workers come and go."""
    script = f"""
import os, sys
from dpdask.estimators.frames import open_secrets
folder = open_secrets({str(tmp_path)!r})
folder.write("run.key", b"secret", private=True)
child = os.fork()
if child == 0:
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
print(folder.names())
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout == "['run.key']\n"
    assert list(tmp_path.iterdir()) == []


def test_the_run_key_may_not_lie_in_a_store(holdout, frame):
    for place in ("memory://lake/private", "s3://lake/private"):
        with pytest.raises(dpdask.SpecError, match="may not lie in one"):
            holdout.fit(frame, secrets=place)
    assert not fsspec.filesystem("memory").exists("/lake")


def test_values_that_do_not_fit_are_refused_without_being_shown(schema, table):
    public = dpdask.DIP(schema, epsilon=1.0, reference=dpdask.Public())
    wrong = table.astype({"rating": object})
    wrong.iloc[7, 1] = "planted-secret"
    for each in (wrong, table.assign(rating=np.float32(0.75))):
        with pytest.raises(dpdask.DataError) as caught:
            public.fit(each)
        assert "planted-secret" not in str(caught.value)
        assert "0.75" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epsilon": float("inf")}, "epsilon"),
        ({"reference": "holdout"}, "reference must be named"),
        ({"schema": "schema.yaml"}, "a Schema is expected; give Schema.from_yaml"),
        (
            {"channel": "optimum"},
            "channel: 'laplace', 'laplace-calibrated', 'optimal' or 'optimal-unbiased' is expected",
        ),
        (
            {"schema": dpdask.Schema.from_dict({"columns": {"user": {"role": "keep"}}})},
            "privatises no column",
        ),
    ],
)
def test_wrong_parameters_are_refused(schema, changes, message):
    right = {"schema": schema, "epsilon": 1.0, "reference": dpdask.Holdout(fraction=0.25)}
    with pytest.raises(dpdask.SpecError, match=message):
        dpdask.DIP(**{**right, **changes})  # type: ignore[arg-type]  # wrong on purpose


def test_a_declared_distribution_of_dates_counts_days():
    schema = dpdask.Schema.from_dict({"columns": {"x": continuous()}})
    known = dpdask.Known(
        columns={"x": {"name": "uniform", "loc": dt.date(1900, 1, 1), "scale": 9.0}}
    )
    table = pd.DataFrame({"x": pd.to_datetime(["2000-01-01"])})
    says = (
        "the parameters of a distribution are finite numbers; for dates write days since 1970-01-01"
    )
    with pytest.raises(dpdask.SpecError, match=f"^reference of column 'x': {says}"):
        dpdask.DIP(schema, epsilon=1.0, reference=known).fit(table)


@pytest.fixture(autouse=True)
def _synchronous():
    with dask.config.set(scheduler=None):
        yield
