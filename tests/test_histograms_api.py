"""Perturbed histograms on Dask and pandas frames: cells, rows, the card, redrawn noise, refusals."""

import math

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from e2e.helpers import categorical, continuous, discrete

import dpdask
from dpdask.codec import codec_for
from pipelines.papers import lei_housing

N_ROWS = 4000
COLUMNS = {
    "user": {"role": "drop"},
    "size": continuous([0.0, 10.0]),
    "town": categorical(["a", "b", "nobody"], nulls="level"),
    "rooms": discrete([1, 2, 3]),
    "price": continuous([0.0, 100.0]),
}
NAMES = [name for name in COLUMNS if name != "user"]
BINS = {"size": 4, "price": 6}


@pytest.fixture(autouse=True)
def _no_scheduler():
    with dask.config.set(scheduler="synchronous"):
        yield


@pytest.fixture(scope="module")
def schema():
    return dpdask.Schema.from_dict({"columns": COLUMNS})


@pytest.fixture(scope="module")
def table():
    rng = np.random.default_rng(3)
    size, town = rng.uniform(0, 10, N_ROWS), rng.choice(["a", "b", None], N_ROWS, p=[0.5, 0.4, 0.1])
    rooms = rng.integers(1, 4, N_ROWS).astype(np.int32)
    price = np.clip(10 + 5 * size + 10 * (town == "b") + rooms + rng.normal(0, 8, N_ROWS), 0, 100)
    return pd.DataFrame(
        {"user": np.arange(N_ROWS) // 2, "size": size, "town": town, "rooms": rooms, "price": price}
    )


def fitted(schema, frame, **changed):
    given = {"epsilon": 4.0, "bins": BINS, "insecure_seed": 1, **changed}
    return dpdask.PerturbedHistogram(schema, **given).fit(frame)


@pytest.fixture(scope="module")
def release(schema, table):
    with dask.config.set(scheduler="synchronous"):
        return fitted(schema, table)


def exact(table):
    cells = table.assign(
        size=np.ceil(table["size"] / 2.5).clip(1, 4) * 2.5 - 1.25,
        price=(np.ceil(table["price"] * 0.06).clip(1, 6) - 0.5) / 0.06,
    )
    return (
        cells.assign(price=cells["price"].round(6), town=cells["town"].fillna("?"))
        .groupby(NAMES)
        .size()
    )


def test_dask_counts_what_pandas_counts(release, schema, table):
    found = fitted(schema, dd.from_pandas(table, npartitions=5))
    pd.testing.assert_frame_equal(found.cells, release.cells)
    assert found.card == release.card
    assert found.sha256 == release.sha256


def test_rows_are_valid_lazy_and_decided_by_their_seed(release, schema):
    lazy = release.sample(rows_per_partition=1500, seed=2)
    rows = lazy.compute()
    assert len(rows) == N_ROWS
    assert rows.dtypes.astype(str).to_dict() == lazy.dtypes.astype(str).to_dict()
    assert list(rows.columns) == NAMES
    for name in NAMES:
        array = pa.array(rows[name], from_pandas=True)
        array = array.cast(pa.string()) if name == "town" else array
        codec_for(name, schema.columns[name], array.type).encode(array)
    pd.testing.assert_frame_equal(
        release.sample(rows_per_partition=1500, seed=2).compute(scheduler="threads"), rows
    )
    assert not release.sample().compute()["price"].equals(release.sample().compute()["price"])
    assert len(set(rows["size"])) == N_ROWS  # no partition repeats another
    share = (
        release.cells.groupby("town", observed=True)["weight"].sum() / release.cells["weight"].sum()
    )
    assert abs((rows["town"] == "b").mean() - share["b"]) < 0.04


def test_units_and_add_remove(schema, table):
    found = fitted(
        schema,
        table,
        unit=dpdask.UnitColumn(column="user", max_rows=1),
        adjacency="add-remove",
        epsilon=10.0,
    )
    assert found.card["n_rows"]["exact"] is False
    assert (
        abs(found.card["n_rows"]["value"] - N_ROWS / 2) < 300
    )  # a hundredth of the budget: scale 10
    assert abs(found.cells["weight"].sum() - N_ROWS / 2) < 200
    plain = fitted(schema, table, threshold="none", adjacency="add-remove")
    assert plain.card["n_rows"]["value"] is None
    assert abs(len(plain.sample()) - N_ROWS) < 200


def test_the_rule(schema, table):
    with pytest.warns(UserWarning, match="few cells stand out"):
        found = fitted(schema, dd.from_pandas(table, npartitions=3), bins="rule")
    bins = round((math.log(N_ROWS) / N_ROWS) ** (-1 / 3))
    assert found.card["mechanism"]["bins"] == {"size": bins, "price": bins}


def test_the_rule_s_plan_counts_no_rows(schema, table):
    def never(part):
        raise AssertionError

    lazy = dd.from_pandas(table, npartitions=3).map_partitions(never, meta=table.head(0))
    estimator = dpdask.PerturbedHistogram(schema, epsilon=1.0, bins="rule")
    planned = estimator.plan(lazy)
    assert (
        planned.warnings[-1]
        == "The bins that the rule gives, and so the number of cells, are known only when the rows are counted."
    )
    assert " cells, merged" not in planned.stages[0]
    assert " cells, merged" in estimator.plan(table).stages[0]
    assert estimator.audit(lazy, n_runs=500)["sound"]


def test_spread_points_keep_the_cells_weights_and_the_variance(release, table):
    spread, truth = release.with_points("spread"), table["size"].var()
    points, keys = spread.cells, np.repeat(np.arange(len(release.cells)), 4)
    assert points.groupby(keys)["weight"].sum().to_numpy() == pytest.approx(
        release.cells["weight"].to_numpy()
    )
    assert np.abs(
        points["size"].to_numpy() - release.cells["size"].to_numpy()[keys]
    ) == pytest.approx(2.5 / math.sqrt(12))
    centred, apart = (
        float(np.cov(frame["size"], aweights=frame["weight"], ddof=0)) / truth
        for frame in (release.cells, points)
    )
    assert abs(apart - 1) < 0.02
    assert centred < 0.96  # centres of a uniform distribution lack h²/12
    for each in (release, spread):
        again = each.redraw(np.random.default_rng(0))
        assert again.dtypes.astype(str).to_dict() == each.cells.dtypes.astype(str).to_dict()
        assert not again["weight"].equals(each.cells["weight"])
    pd.testing.assert_frame_equal(spread.with_points("centre").cells, release.cells)
    assert [one.card["mechanism"]["points"] for one in (release, spread)] == ["centre", "spread"]
    with pytest.raises(dpdask.SpecError, match="must be centre or spread"):
        release.with_points("mean")  # type: ignore[arg-type]  # what is tested


def test_data_that_do_not_do(schema, table):
    with pytest.raises(
        dpdask.DataError, match=r"^frame: the table has no rows; give it some rows$"
    ):
        fitted(schema, table.head(0))
    with pytest.raises(dpdask.DataError, match="'price'"):
        fitted(schema, table.assign(price=float("nan")))
    clipped = fitted(schema, table.assign(price=101.0)).cells
    assert (
        clipped["weight"][clipped["price"].round(3) == 91.667].sum() > 0.9 * clipped["weight"].sum()
    )  # the last cell
    with pytest.warns(UserWarning, match="is not below"):
        fitted(schema, table, delta=0.01)
    with pytest.raises(dpdask.SpecError, match="no cell has a positive weight"):
        fitted(schema, table, factor=1e5).sample()


def test_the_papers_comparison_runs(capsys):
    table = lei_housing.simulated(np.random.default_rng(0)).head(40_000)
    assert table["price"].between(1e5, 9e5).all()
    assert np.abs(lei_housing.fit(table.assign(weight=1.0))[1] / lei_housing.OLS[1] - 1) < 0.1
    lei_housing.compare("simulated", table, 250.0, 2, [1.0])
    assert "of 8 rows" in capsys.readouterr().out
