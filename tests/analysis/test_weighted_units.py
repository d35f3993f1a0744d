"""Published numbers of rows: what a release with them says and hides, and that weighted answers are of the table, not of its bounded rows."""

import json

import numpy as np
import pandas as pd
import pytest
import yaml
from e2e.helpers import categorical, continuous, discrete, refused
from numpy.random import default_rng

import dpdask
from dpdask.inference.units import WeightedRows
from dpdask.jobs.plan import plan_job
from dpdask.jobs.run import run_job
from dpdask.jobs.spec import load_job

MOST = 3
COLUMNS = {
    "user": {"role": "keep"},
    "town": {"role": "keep"},
    "place": {"role": "keep"},
    "rating": discrete([1, 2, 3, 4]),
    "kind": categorical(["a", "b"]),
    "x": continuous([0, 10]),
}


def make_table(n_units=4_000):
    """Return rows whose rating falls, and whose town changes, with the number of rows of their user; `place` counts the rows of a user."""
    rng = default_rng(7)
    sizes = rng.choice([1, 2, 12], n_units, p=[0.5, 0.3, 0.2])
    user = np.repeat(np.arange(n_units), sizes)
    busy = sizes[user] > MOST
    rating = np.clip(rng.binomial(3, np.where(busy, 0.2, 0.7)) + 1, 1, 4)
    found = pd.DataFrame(
        {
            "user": user,
            "town": np.where(rng.random(len(user)) < np.where(busy, 0.8, 0.3), "A", "B"),
            "place": np.concatenate([np.arange(size) for size in sizes]),
            "rating": rating,
            "kind": np.where(rng.random(len(user)) < 0.2 * rating, "a", "b"),
            "x": rng.uniform(0, 10, len(user)),
        }
    )
    return found.iloc[rng.permutation(len(found))].reset_index(drop=True)


def write_job(folder, table, *, unit=None, columns=COLUMNS, **changed):
    """Write the files of a job, and return the path of its file."""
    (folder / "in").mkdir(exist_ok=True)
    for number, start in enumerate(range(0, len(table), 5_000)):
        part = table.iloc[start : start + 5_000]
        part.to_parquet(folder / "in" / f"{number}.parquet", index=False)
    (folder / "schema.yaml").write_text(yaml.safe_dump({"columns": columns}))
    unit = {"column": "user", "max_rows": MOST, "publish_counts": True} if unit is None else unit
    job = {
        "name": "weighted",
        "input": {"path": "in"},
        "output": {"path": "out"},
        "schema": "schema.yaml",
        "privacy": {"epsilon": 30.0, "delta": 0, "adjacency": "replace-one", "unit": unit},
        "mechanism": {"kind": "dip", "reference": {"kind": "histogram"}, "channel": "optimal"},
        "insecure_seed": 3,
        **changed,
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    return folder / "job.yaml"


@pytest.fixture(scope="module")
def table():
    return make_table()


@pytest.fixture(scope="module")
def opened(table, tmp_path_factory):
    folder = tmp_path_factory.mktemp("weighted")
    run_job(load_job(write_job(folder, table)))
    return dpdask.open(str(folder / "out"))


def test_each_row_has_its_weight_and_nothing_else_is_told(table, opened):
    released = opened.to_pandas()
    assert list(released.columns) == [*COLUMNS, "user_weight"]
    sizes, kept = table.groupby("user").size(), released.groupby("user").size()
    assert (kept == sizes.clip(upper=MOST)).all()
    weights = released.groupby("user")["user_weight"].agg(["min", "max"])
    assert (weights["min"] == sizes / kept).all()
    assert (weights["max"] == sizes / kept).all()
    assert released["user_weight"].sum() == pytest.approx(len(table))
    assert not released["user"].is_monotonic_increasing  # rows are shuffled as ever
    said = "how many rows of the table each released user has, which is published exactly"
    assert said in opened.card["guarantee"]["text"]
    assert opened.card["guarantee"]["unit"]["publish_counts"] is True
    page = opened.folder.read("_dpdask/release.html").decode()
    assert said in page
    assert "How many rows a user has is published exactly" in page


def test_the_plan_says_who_is_not_protected(table, tmp_path):
    planned = plan_job(load_job(write_job(tmp_path, table)))
    assert "which is published exactly" in planned.guarantee
    assert any("count the rows of each user" in stage for stage in planned.stages)


def test_rows_of_a_unit_are_drawn_evenly(table, opened):
    """The first are no more likely than the last."""
    places = opened.to_pandas().query("user_weight > 1")["place"]
    expected = len(places) / 12
    found = ((places.value_counts() - expected) ** 2 / expected).sum()
    assert found < 45.0  # the 1e-5 quantile of 11 degrees of freedom is 42


def test_rows_that_are_alike_are_drawn_evenly(table, tmp_path):
    """Of users all of whose kept columns are alike, the first rows of the table are taken without the weights, and any with them."""
    columns = {
        "user": {"role": "keep"},
        "rating": discrete([1, 2]),
    }
    user = np.repeat(np.arange(400), 40)
    rows = pd.DataFrame({"user": user, "rating": 1 + (np.arange(len(user)) % 40 >= 20)})
    means = []
    for number, published in enumerate((True, False)):
        folder = tmp_path / str(number)
        folder.mkdir()
        unit = {"column": "user", "max_rows": MOST}
        if published:
            unit["publish_counts"] = True
        run_job(load_job(write_job(folder, rows, unit=unit, columns=columns)))
        means.append(dpdask.open(str(folder / "out")).mean("rating"))
    assert abs(means[0].estimate - 1.5) < 5.0 * means[0].standard_error
    assert means[1].estimate < 1.1


@pytest.mark.parametrize(
    ("ask", "truth"),
    [
        (lambda o: o.mean("rating"), lambda t: [t["rating"].mean()]),
        (
            lambda o: o.share("rating"),
            lambda t: t["rating"].value_counts(normalize=True).sort_index(),
        ),
        (lambda o: o.mean("rating", by="town"), lambda t: t.groupby("town")["rating"].mean()),
        (lambda o: o.crosstab("town", "rating"), lambda t: pd.crosstab(t["town"], t["rating"])),
        (lambda o: o.crosstab("rating", "town"), lambda t: pd.crosstab(t["rating"], t["town"])),
        (lambda o: o.crosstab("kind", "rating"), lambda t: pd.crosstab(t["kind"], t["rating"])),
        (lambda o: o.share("town"), lambda t: t["town"].value_counts(normalize=True).sort_index()),
        (lambda o: o.mean("place"), lambda t: [t["place"].mean()]),
        (lambda o: o.mean("place", within=(0, 4)), lambda t: [t["place"].clip(0, 4).mean()]),
        (
            lambda o: o.histogram("place", [0, 2, 6, 12]),
            lambda t: pd.cut(t["place"], [0, 2, 6, 12], right=False).value_counts(sort=False),
        ),
        (
            lambda o: o.slope("rating", "place"),
            lambda t: [np.polyfit(t["place"], t["rating"], 1)[0]],
        ),
        (
            lambda o: o.slope("place", "rating"),
            lambda t: [np.polyfit(t["rating"], t["place"], 1)[0]],
        ),
    ],
)
def test_weighted_answers_are_of_the_table(ask, truth, table, opened):
    found, true = ask(opened), np.asarray(truth(table), float).ravel()
    assert found.of_table
    assert "bounded" not in " ".join(found.limits)
    off = np.abs(np.asarray(found.estimate, float).ravel() - true)
    bias = np.asarray(found.bias_bound, float).ravel()
    error = np.asarray(found.standard_error, float).ravel()
    assert (off <= 4.5 * error + bias).all()
    low, high = (np.asarray(end, float).ravel() for end in found.interval(0.99999))
    assert ((low <= true) & (true <= high)).all()
    assert "0 ± 0" not in repr(found)


def test_the_bounded_rows_are_others_than_the_table(table, tmp_path, opened):
    """Power: without the weights the same mean is many standard errors off."""
    run_job(load_job(write_job(tmp_path, table, unit={"column": "user", "max_rows": MOST})))
    bounded = dpdask.open(str(tmp_path / "out")).mean("rating")
    true = table["rating"].mean()
    assert not bounded.of_table
    assert "bounded" in bounded.limits[0]
    assert abs(bounded.estimate - true) > 10.0 * bounded.standard_error
    assert opened.mean("rating").standard_error < abs(bounded.estimate - true)


def test_quantiles_have_intervals_by_ranks(table, opened):
    found = opened.quantile("place", [0.5, 0.9])
    low, high = found.interval()
    true = table["place"].quantile([0.5, 0.9])
    assert found.of_table
    assert (low <= true).all()
    assert (true <= high).all()


def test_numbers_stay_those_of_the_bounded_rows_and_say_so(opened):
    found = opened.mean("x")
    assert not found.of_table
    assert "bounded rows" in found.limits[0]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"mechanism": {"kind": "copula"}}, "no row is released"),
        ({"columns": {**COLUMNS, "user": {"role": "drop"}}}, "which rows belong together"),
        ({"columns": {**COLUMNS, "user_weight": {"role": "keep"}}}, "has such a column"),
        ({"growing": True}, "growing table"),
    ],
)
def test_what_cannot_publish_them_is_refused(changed, said, table, tmp_path):
    if changed.get("mechanism"):
        columns = {name: each for name, each in COLUMNS.items() if each["role"] != "keep"}
        changed = {**changed, "columns": {"user": {"role": "drop"}, **columns}}
    with refused(said) as caught:
        load_job(write_job(tmp_path, table.head(50), **changed))
    assert caught.value.hint


def test_frames_do_not_publish_them():
    unit = dpdask.UnitColumn(column="user", max_rows=2, publish_counts=True)
    schema = dpdask.Schema.from_dict({"columns": COLUMNS})
    with refused("by jobs only"):
        dpdask.DIP(schema, epsilon=1.0, reference=dpdask.Histogram(), unit=unit)


def test_units_without_them_are_written_as_before():
    unit = dpdask.UnitColumn(column="user", max_rows=2)
    assert unit.model_dump(mode="json") == {"column": "user", "max_rows": 2}
    assert unit.weight is None
    told = dpdask.UnitColumn(column="user", max_rows=2, publish_counts=True)
    assert json.loads(told.model_dump_json())["publish_counts"] is True


def jackknife(estimate, units, *columns):
    """Return the error of an estimate that leaves out one unit at a time."""
    whole, n = estimate(*columns), units.max() + 1
    moved = [estimate(*(each[units != unit] for each in columns)) - whole for unit in range(n)]
    return np.sqrt(np.square(moved).sum(axis=0) * (n - 1) / n)


def test_errors_are_those_of_leaving_out_one_unit():
    rng = default_rng(3)
    units = np.concatenate([np.arange(60), rng.integers(0, 60, 400)])
    weights = rng.integers(1, 20, 60)[units] * 1.0
    groups, x = np.concatenate([np.zeros(60, int), rng.integers(0, 2, 400)]), rng.normal(size=460)
    rows = WeightedRows(units=units, weights=weights)
    ones = np.ones(len(x))
    value, error, wide = rows.average(x, ones, groups, 2)
    here = groups == 0  # where every unit has a row
    assert value[0] == pytest.approx(np.average(x[here], weights=weights[here]))
    assert error[0] == pytest.approx(
        jackknife(lambda x, w: np.average(x, weights=w), units[here], x[here], weights[here])
    )
    value, least, more = rows.share(x, groups, 2)
    assert least == pytest.approx(
        jackknife(
            lambda x, w, g: np.bincount(g, x * w, minlength=2) / w.sum(), units, x, weights, groups
        )
    )
    assert (wide >= error).all()
    assert (more >= least).all()
    y, design = x + rng.normal(size=460), np.column_stack([ones, x])
    value, error, _ = rows.solve(design[:, :, None] * design[:, None, :], design * y[:, None])

    def fit(x, y, w):
        return np.polyfit(x, y, 1, w=np.sqrt(w))[::-1]

    assert value == pytest.approx(fit(x, y, weights))
    assert error == pytest.approx(jackknife(fit, units, x, y, weights))


def test_one_unit_alone_has_no_error():
    rows = WeightedRows(units=np.zeros(5, int), weights=np.ones(5))
    found = rows.average(np.arange(5.0), np.ones(5), np.zeros(5, int), 1)
    assert found[0] == 2.0
    assert np.isnan(found[1]).all()
    with pytest.raises(np.linalg.LinAlgError):
        rows.solve(np.ones((5, 1, 1)), np.ones((5, 1)))
