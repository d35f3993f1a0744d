"""Slopes of a copula's records: places inside cells follow the tables, and everything else stays as it was."""

import datetime as dt
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from e2e.helpers import categorical, continuous, discrete, mixed, schema_of
from mechanisms.noisy import named
from scipy import stats

import dpdask
from dpdask.mechanisms.copula.places import Places
from dpdask.streams import RunKey

N = 100_000
DAY = dt.date(2020, 1, 1)
COLUMNS = {
    "wage": continuous([0.0, 100.0]),
    "before": mixed(bounds=[0.0, 100.0], atoms=[0.0], nulls="level"),
    "hours": continuous([1, 100]),
    "since": continuous([18262, 19000]),
    "grade": discrete([1, 2, 3, 4, 5]),
    "noise": continuous([0.0, 1.0]),
    "colour": categorical(["red", "green"]),
}


def table():
    """Two wages, of which the earlier one may be 0 or null; hours, days and grades that depend on them; and two columns that do not."""
    rng = np.random.default_rng(11)
    z = rng.normal(size=N)

    def like(r):
        return r * z + np.sqrt(1 - r * r) * rng.normal(size=N)

    before = np.minimum(np.exp(3.0 + 0.3 * like(0.95)), 100.0)
    kind = rng.random(N)
    before = np.where(kind < 0.1, 0.0, np.where(kind < 0.2, np.nan, before))
    return pd.DataFrame(
        {
            "wage": np.minimum(np.exp(3.1 + 0.3 * z), 100.0),
            "before": before,
            "hours": np.clip(np.round(40 + 12 * like(0.8)), 1, 100).astype(np.int32),
            "since": pd.array(
                np.clip(18600 + 100 * like(-0.7), 18262, 19000).astype(np.int32),
                dtype=pd.ArrowDtype(pa.int32()),
            ).astype(pd.ArrowDtype(pa.date32())),
            "grade": np.clip(np.round(3 + like(0.6)), 1, 5).astype(np.int64),
            "noise": rng.random(N),
            "colour": np.where(rng.random(N) < 0.5, "red", "green"),
        }
    )


@lru_cache
def fitted():
    rows = table()
    schema = schema_of(COLUMNS)
    copula = dpdask.GaussianCopula(
        schema, epsilon=1.0, delta=2.0**-30, adjacency="add-remove", insecure_seed=4
    )
    return rows, copula.fit(rows).fitted


def records(fitted, start=0, n=N, total=N):
    batches = fitted.batches(start, n, total, RunKey.insecure(9), "part")
    return pa.Table.from_batches(list(batches))


def number(column):
    return (
        column.to_pandas().map(lambda day: (day - DAY).days).astype(float)
        if pa.types.is_date(column.type)
        else column.to_pandas().astype(float)
    )


def slope(of, on, without=None):
    known = of.notna() & on.notna() & (on != without)
    return stats.linregress(on[known], of[known]).slope


def test_slopes_are_those_of_the_table_and_without_places_they_are_flat():
    rows, own = fitted()
    released = records(own)
    flat = records(replace(own, model=replace(own.model, places=None)))
    true = {name: number(pa.array(rows[name])) for name in ("wage", "before", "hours", "since")}
    cases = [
        ("wage", "before", 0.0, 0.06),
        ("wage", "hours", None, 0.02),
        ("hours", "since", None, 0.02),
    ]
    for of, on, without, most in cases:
        wanted = slope(true[of], true[on], without)
        found, before = (slope(number(t[of]), number(t[on]), without) for t in (released, flat))
        assert found == pytest.approx(wanted, rel=most)
        assert abs(before) < abs(found)
    assert slope(number(flat["wage"]), number(flat["before"]), 0.0) < 0.92 * slope(
        true["wage"], true["before"], 0.0
    )


def test_cells_are_the_same_and_values_in_a_cell_follow_the_fine_counts():
    _, own = fitted()
    released = records(own)
    flat = records(replace(own, model=replace(own.model, places=None)))
    for name, cells in own.cells().items():
        codes = [cells.codes(t[name].combine_chunks()) for t in (released, flat)]
        assert (codes[0] == codes[1]).all()
        assert released[name].type == own.columns.field(name).type
        if name in ("wage", "hours"):
            for cell in range(cells.size):
                one, two = (number(t[name])[codes[0] == cell] for t in (released, flat))
                assert stats.ks_2samp(one, two, method="asymp").pvalue > 1e-7
    before, again = (t["before"].to_pandas() for t in (released, flat))
    assert (before.isna() == again.isna()).all()
    assert ((before == 0.0) == (again == 0.0)).all()


def test_records_are_the_same_however_a_block_is_cut():
    _, own = fitted()
    whole = records(own, n=50_000)
    parts = [records(own, start, n) for start, n in ((0, 1), (1, 32_768), (32_769, 17_231))]
    assert pa.concat_tables(parts).equals(whole)
    assert not records(own, total=N - 1, n=50_000).equals(whole)


def test_only_numbers_that_depend_on_each_other_have_places():
    _, own = fitted()
    names = [own.model.domain.names[column] for column in own.model.places.columns]
    assert names == ["wage", "before", "hours", "since", "grade"]
    places = own.model.places
    first = dict(zip(places.partners[0].tolist(), places.weights[0].tolist(), strict=True))
    assert first[1] > 0.6
    assert places.deviations[0] < 0.4
    assert (places.ranges[:, 0] == [-8.0, 8.0]).sum() == 1  # the first cell of wage begins at -8
    assert own.from_bytes(own.to_bytes(), "copula.npz").to_bytes() == own.to_bytes()


def test_independent_numbers_and_levels_have_no_places():
    rng = np.random.default_rng(2)
    rows = pd.DataFrame({"noise": rng.random(3000), "colour": ["red", "green", "red"] * 1000})
    rows["grade"] = rng.integers(1, 6, 3000)
    for names in (["noise", "colour", "grade"], ["colour", "grade"], ["noise"]):
        schema = schema_of({name: COLUMNS[name] for name in names})
        copula = dpdask.GaussianCopula(schema, epsilon=1.0, delta=2.0**-30, insecure_seed=1)
        assert copula.fit(rows[names]).fitted.model.places is None


GIVEN = {
    "columns": np.array([0, 2]),
    "ranges": np.array([[-8.0, 0.0, -8.0, -1.0, 1.0], [0.0, 8.0, -1.0, 1.0, 8.0]]),
    "partners": np.array([[1], [0]]),
    "weights": np.array([[0.5], [0.5]]),
    "deviations": np.array([0.8, 0.8]),
}


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("columns", np.array([0.0, 2.0])),
        ("columns", np.array([0])),
        ("columns", np.array([2, 0])),
        ("columns", np.array([-1, 2])),
        ("columns", np.array([0, 3])),
        ("partners", np.array([1, 0])),
        ("partners", np.array([[1]])),
        ("partners", np.array([[1.0], [0.0]])),
        ("partners", np.array([[2], [0]])),
        ("partners", np.array([[-1], [0]])),
        ("ranges", GIVEN["ranges"][:, 1:]),
        ("ranges", GIVEN["ranges"][::-1].copy()),
        ("ranges", GIVEN["ranges"] * 2.0),
        ("ranges", GIVEN["ranges"] * np.nan),
        ("ranges", GIVEN["ranges"].astype(np.float32)),
        ("weights", np.array([[0.5]])),
        ("weights", np.array([[0.5], [np.inf]])),
        ("weights", np.array([[0.5], [np.nan]])),
        ("weights", np.array([[1], [0]])),
        ("deviations", np.array([0.8])),
        ("deviations", np.array([0.8, 0.0])),
        ("deviations", np.array([0.8, np.nan])),
        ("deviations", np.array([1, 1])),
    ],
)
def test_places_from_outside_are_checked(name, wrong):
    domain = named(2, 4, 3)
    Places(**GIVEN).check(domain)
    with pytest.raises(ValueError, match=r".+"):
        Places(**{**GIVEN, name: wrong}).check(domain)
