"""`dpdask.Marginals` on Dask and pandas frames: a job's noisy tables, as arrays and frames."""

import dataclasses

import dask.dataframe as dd
import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from e2e.helpers import SEED, categorical, continuous, discrete, run_here, write_job

import dpdask

LEVELS = [1, 2, 3]
COLUMNS = {
    "user": {"role": "drop"},
    "rating": discrete(LEVELS),
    "colour": categorical(["red", "blue"], nulls="level"),
    "price": continuous([0.0, 10.0]),
}
CLIQUES = [["rating"], ["colour", "price"]]
N_ROWS = 2000


pytestmark = pytest.mark.usefixtures("here")


@pytest.fixture(scope="module")
def schema():
    return dpdask.Schema.from_dict({"columns": COLUMNS})


@pytest.fixture(scope="module")
def table():
    rng = np.random.default_rng(2)
    rating = rng.choice(LEVELS, N_ROWS)
    colour = rng.choice(["red", "blue", None], N_ROWS, p=[0.5, 0.3, 0.2])
    return pd.DataFrame(
        {
            "user": np.arange(N_ROWS) // 4,
            "rating": rating,
            "colour": colour,
            "price": rng.uniform(0, 10, N_ROWS),
        }
    )


def marginals(schema, **changed):
    return dpdask.Marginals(schema, **{"epsilon": 2.0, "cliques": CLIQUES, "bins": 4, **changed})


def test_the_tables_are_those_of_the_job_of_the_same_seed(schema, table, tmp_path):
    (tmp_path / "in").mkdir()
    table.to_parquet(tmp_path / "in" / "part.parquet")
    mechanism = {"kind": "marginals", "cliques": CLIQUES, "bins": 4}
    run_here(
        write_job(
            tmp_path,
            tmp_path / "in",
            tmp_path / "out",
            schema=COLUMNS,
            mechanism=mechanism,
            privacy__epsilon=2.0,
        )
    )
    expected = pq.read_table(tmp_path / "out").to_pandas()
    for frame in (table, dd.from_pandas(table, npartitions=3)):
        release = marginals(schema, insecure_seed=SEED).fit(frame)
        assert isinstance(release, dpdask.MarginalsRelease)
        found = pd.concat(
            [release.to_frame(clique).assign(table=" x ".join(clique)) for clique in CLIQUES],
            ignore_index=True,
        )
        pd.testing.assert_frame_equal(found[expected.columns], expected, check_dtype=False)
        assert release.sample().compute().to_csv() == expected.to_csv()
        with pytest.raises(
            dpdask.SpecError,
            match=r"^n_rows: tables are no sample, .*; leave it out to get every cell$",
        ):
            release.sample(3)


def test_units_have_larger_noise_and_weights_divide_the_budget(schema, table):
    unit = dpdask.UnitColumn(column="user", max_rows=3)
    bounded = marginals(schema, unit=unit).fit(dd.from_pandas(table, npartitions=3))
    plain = marginals(schema).fit(table)
    assert marginals(schema, weights=[4.0, 1.0]).fit(table).margin(["rating"]) < plain.margin(
        ["rating"]
    )
    assert bounded.margin(["rating"]) > 2.5 * plain.margin(["rating"])
    assert bounded.card["n_rows"] == {"value": 3 * N_ROWS // 4, "exact": True}


def test_a_single_name_is_the_table_of_that_column(schema, table):
    release = marginals(schema).fit(table)
    np.testing.assert_array_equal(release.table("rating"), release.table(["rating"]))
    assert release.margin("rating") == release.margin(["rating"])
    pd.testing.assert_frame_equal(release.to_frame("rating"), release.to_frame(["rating"]))
    for ask in (release.table, release.margin, release.to_frame):
        with pytest.raises(
            dpdask.SpecError,
            match=r"there is no table of the columns \['price'\]; ask for one of rating, colour x price",
        ):
            ask(["price"])


def test_an_estimator_is_immutable_and_compared_by_its_parameters(schema):
    made = marginals(schema)
    assert made == marginals(schema)
    assert dataclasses.replace(made, epsilon=1.0).mechanism.budget.epsilon == 1.0
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.epsilon = 3.0  # type: ignore[misc]  # what is tested
