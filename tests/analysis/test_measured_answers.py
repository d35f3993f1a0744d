"""Noisy counts that a release publishes: drawn with the noise that the card states, in every kind of output, and what `dpdask.open` answers from them."""

import hashlib
import io
import json
from pathlib import Path

import dask.dataframe as dd
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from e2e.helpers import (
    RATINGS_SCHEMA,
    categorical,
    continuous,
    lake,
    mixed,
    refused,
    release_of,
    run_here,
    says,
    write_job,
)
from numpy.random import default_rng
from numpy.testing import assert_allclose
from scipy import stats

import dpdask
from dpdask.analysis.measured import MeasuredAnswers, average_margin, place_in_cells
from dpdask.analysis.points import Points
from dpdask.analysis.results import Result
from dpdask.codec import codec_for
from dpdask.inference.measured import MeasuredColumn
from dpdask.privacy.events import DiscreteGaussian
from dpdask.references.counts import (
    AGAIN,
    COUNTS,
    IN_CELLS,
    label_table,
    list_table_counts,
    read_counts,
    write_counts,
)
from dpdask.references.hierarchy import N_LEVELS, Hierarchy, make_grid
from dpdask.schema import Schema
from dpdask.stats.statistic import CellCounts

ALPHA = 1e-9
NUMBERS = {
    "town": categorical(["a", "b", "c"]),
    "pay": continuous([0, 1e9]),
    "kids": mixed(bounds=[0, 40], atoms=[0, 9], nulls="level"),
}
MECHANISMS = {
    "histogram": {"kind": "dip", "reference": {"kind": "histogram"}, "channel": "laplace"},
    "tree": {"kind": "dip", "reference": {"kind": "tree"}, "channel": "laplace"},
    "copula": {"kind": "copula"},
    "marginals": {"kind": "marginals", "cliques": [["town", "pay"], ["town", "kids"]]},
}
ADD_REMOVE = {"epsilon": 4.0, "delta": 1e-6, "adjacency": "add-remove", "unit": "row"}


def table():
    n, rng = 20_000, default_rng(9)
    town = rng.choice(["a", "b", "c"], n, p=[0.5, 0.3, 0.2])
    pay = np.round(np.exp(rng.normal(7.0, 0.6, n) + 0.5 * (town == "a")), 2)
    kids = np.where(rng.random(n) < 0.5, 0.0, rng.integers(1, 10, n))
    kids[rng.random(n) < 0.3] = np.nan
    return pd.DataFrame({"town": town, "pay": pay, "kids": pd.array(kids, dtype="Int32")})


def release(folder, mechanism, **changed):
    own = MECHANISMS[mechanism] if isinstance(mechanism, str) else mechanism
    return release_of(folder, table(), **{"schema": NUMBERS, "mechanism": own, **changed})


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    made = {}

    def give(mechanism):
        if mechanism not in made:
            private = {"privacy": ADD_REMOVE} if mechanism == "copula" else {}
            made[mechanism] = release(tmp_path_factory.mktemp("measured"), mechanism, **private)
        return made[mechanism]

    return give


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_published_counts_are_the_exact_ones_with_the_noise_that_was_accounted_for(
    opened, mechanism
):
    found, rows = opened(mechanism), table()
    counts, events = found._measured, found.card["accounting"]["events"]["events"]
    paid = {
        round(each.get("sigma") or np.sqrt(0.5) / np.sinh(0.5 / each["scale"]), 9)
        for each in events
        if "scale" in each or "sigma" in each
    }
    schema, residuals = Schema.from_dict({"columns": NUMBERS}), []
    arrow = pq.read_table(found.folder.local_path.parent / "in")
    for part in counts.values():
        assert part.schema.names == COUNTS.names
        assert {round(each, 9) for each in part["standard_deviation"].unique().to_pylist()} <= paid
    for name in ("pay", "kids"):
        part = counts[label_table(name)]
        codec = codec_for(name, schema.columns[name], arrow.schema.field(name).type)
        hierarchy = Hierarchy(make_grid(codec))
        exact = hierarchy.count(CellCounts.of_batch(hierarchy.cells, arrow[name].combine_chunks()))
        noise = part["count"].to_numpy() - exact
        residuals.append(noise / part["standard_deviation"].to_numpy())
        assert set(part["level"].to_pylist()) == set(range(1, N_LEVELS + 1))
    if label_table("town", "pay") in counts:
        both = counts[label_table("town", "pay")]
        assert both["count"].to_numpy().sum() == pytest.approx(
            len(rows), abs=6.0 * both["standard_deviation"][0].as_py() * np.sqrt(len(both))
        )
    z = np.concatenate(residuals)
    assert (z != 0.0).any()
    # Laplace noise has a kurtosis of 6, Gaussian noise one of 3
    spread = np.sqrt((6.0 - 1.0) / len(z))
    assert abs(np.mean(z**2) - 1.0) < stats.norm.isf(ALPHA) * spread
    assert abs(np.mean((z / 1.5) ** 2) - 1.0) > stats.norm.isf(ALPHA) * spread


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_answers_come_from_the_counts_and_hold_the_truth(opened, mechanism):
    found, rows = opened(mechanism), table()
    clipped = rows["pay"].clip(0.0, 8000.0).mean()
    z = []
    mean = found.mean("pay", within=(0, 8000))
    assert mean.interval()[1] - mean.interval()[0] < clipped
    z.append((mean.estimate - clipped) / mean.standard_error)
    kids = found.mean("kids", within=(0, 9))
    z.append((kids.estimate - rows["kids"].mean()) / kids.standard_error)
    edges = [0.0, 500.0, 1500.0, 3000.0, 1e9]
    counts = found.histogram("pay", edges)
    exact = np.histogram(rows["pay"], edges)[0]
    z += list((counts.estimate - exact) / (counts.standard_error + counts.bias_bound))
    for p in (0.2, 0.5):
        low, high = found.quantile("pay", p).interval(1.0 - 1e-6)
        assert low <= rows["pay"].quantile(p) <= high
    assert np.abs(z).max() < 4.5
    if found.content["mechanism"]["kind"] in ("copula", "marginals"):
        groups = found.mean("pay", by="town", within=(0, 8000))
        truth = rows.assign(pay=rows["pay"].clip(0, 8000)).groupby("town")["pay"].mean()
        assert (np.abs(groups.estimate - truth) < 0.06 * truth).all()
        low, high = groups.interval()
        assert ((low <= truth) & (truth <= high)).all()
        # between an atom and the whole number below it there is no cell
        kids = found.mean("kids", by="town")
        truth = rows.groupby("town")["kids"].mean()
        assert (np.abs(kids.estimate - truth) < 4.5 * kids.standard_error + kids.bias_bound).all()


def test_levels_are_averaged_over_all_tables_that_have_them_by_inverse_variance():
    one, two = (DiscreteGaussian(sigma=s, sensitivity=1.0, adjacency="add-remove") for s in (2, 1))
    measured = {
        '["a"]': list_table_counts('["a"]', np.array([10, 20]), one),
        '["b", "a"]': list_table_counts('["b", "a"]', np.array([[4, 7], [5, 6], [6, 9]]), two),
    }
    found = average_margin(measured, "a", {"a": 2, "b": 3}, None)
    # variance 4 of its own counts, and 3 of sums of 3
    assert found.counts == pytest.approx(
        [(10 / 4 + 15 / 3) / (7 / 12), (20 / 4 + 22 / 3) / (7 / 12)]
    )
    assert found.deviation**2 == pytest.approx(12 / 7)
    assert average_margin({}, "a", {"a": 2, "b": 3}, None) is None


def test_rows_of_a_cell_are_where_fine_counts_say_and_in_doubt_where_these_are_noise():
    schema = Schema.from_dict({"columns": {"pay": NUMBERS["pay"]}})
    codec = codec_for("pay", schema.columns["pay"], pa.float64())
    hierarchy, rng = Hierarchy(make_grid(codec)), default_rng(0)
    x = rng.uniform(1000.0, 1200.0, 50_000)
    exact = hierarchy.count(CellCounts.of_batch(hierarchy.cells, pa.array(x)))
    low, high = np.array([500.0, 1500.0, 7.0]), np.array([1500.0, 1e9, 7.0])
    for sigma, doubt in ((1e-3, 1.0), (1e6, 125.0)):
        event = DiscreteGaussian(sigma=sigma, sensitivity=1.5, adjacency="replace-one", count=3)
        noisy = exact + np.rint(rng.normal(0.0, sigma, exact.size)).astype(np.int64)
        fine = MeasuredColumn.read(hierarchy.list_counts("pay", noisy, event), 50_000.0)
        usual = np.array([750.0, 2500.0, 7.0])
        values, doubts, beyond = place_in_cells(fine, low, high, usual, (0.0, 1e6))
        if sigma < 1.0:
            assert values[0] == pytest.approx(x.mean(), rel=3e-3)
            assert doubts[0] < doubt
            assert beyond[0] == 0.0
        else:  # half of the distance to the nearer end
            assert values.tolist() == usual.tolist()
            assert doubts[0] == pytest.approx(doubt)
            assert beyond[0] > doubt
        assert doubts[1] == pytest.approx(500.0)  # nobody is there
        assert (values[2], doubts[2]) == (7.0, 0.0)


def measure_pay(values, sigma):
    """Return the fine counts of a column from 0 to 1000."""
    schema = Schema.from_dict({"columns": {"pay": continuous([0, 1000])}})
    codec = codec_for("pay", schema.columns["pay"], pa.float64())
    hierarchy, rng = Hierarchy(make_grid(codec)), default_rng(5)
    exact = hierarchy.count(CellCounts.of_batch(hierarchy.cells, pa.array(values)))
    event = DiscreteGaussian(sigma=sigma, sensitivity=1.5, adjacency="replace-one", count=3)
    noisy = exact + np.rint(rng.normal(0.0, sigma, exact.size)).astype(np.int64)
    return MeasuredColumn.read(hierarchy.list_counts("pay", noisy, event), float(len(values)))


def test_points_of_one_cell_err_together():
    """A point that is told as a hundred with its weight says the same of each group."""
    fine = measure_pay(default_rng(4).uniform(0, 1000, 5_000), 60.0)

    def ask(n_parts):
        low = np.tile([0.0, 100.0, 0.0, 100.0], n_parts)
        high = np.where(low == 0.0, 100.0, 200.0)
        town = np.tile(["a", "a", "b", "b"], n_parts)
        points = Points(
            frame=pd.DataFrame({"pay": (low + high) / 2.0, "town": town}),
            weights=np.full(4 * n_parts, 1_250.0 / n_parts),
            n_rows=5_000,
            sampling=1e-12,
            levels={"town": ["a", "b"]},
            ends={"pay": (low, high)},
            fine={"pay": fine},
            bounds={"pay": (0.0, 1_000.0)},
        )
        return points.mean("pay", by="town", within=(0.0, 1_000.0))

    one, many = ask(1), ask(100)
    assert one.standard_error.min() > 1.0
    assert many.standard_error.to_numpy() == pytest.approx(one.standard_error.to_numpy())
    assert many.estimate.to_numpy() == pytest.approx(one.estimate.to_numpy())


@pytest.mark.parametrize(
    ("bound", "is_known"), [(1e4, True), (1e5, True), (1e7, False), (1e9, False)]
)
def test_whether_a_mean_is_answered_is_not_chosen_by_its_noise(bound, is_known):
    """Of a heavy tail, all seeds answer or none, and what is answered holds the truth."""
    given = continuous([0, bound])
    codec = codec_for(
        "pay", Schema.from_dict({"columns": {"pay": given}}).columns["pay"], pa.float64()
    )
    hierarchy, rng = Hierarchy(make_grid(codec)), default_rng(3)
    x = np.minimum(np.exp(rng.normal(6.0, 1.0, 20_000)), 9999.0)
    exact = hierarchy.count(CellCounts.of_batch(hierarchy.cells, pa.array(x)))
    event = DiscreteGaussian(sigma=40.0, sensitivity=1.5, adjacency="replace-one", count=3)
    answered, held, seeds = 0, 0, 60
    for _ in range(seeds):
        noisy = exact + np.rint(rng.normal(0.0, 40.0, exact.size)).astype(np.int64)
        column = MeasuredColumn.read(hierarchy.list_counts("pay", noisy, event), 20_000.0)
        answers = MeasuredAnswers(column=column, levels=None, dates={})
        low, high = answers.mean("pay", within=(0.0, 5e3)).interval()
        assert 0.0 <= low < np.minimum(x, 5e3).mean() + 100.0
        assert high <= 5e3
        if answers.knows_mean("pay"):
            low, high = answers.mean("pay").interval()
            answered, held = answered + 1, held + (low <= x.mean() <= high)
    assert answered == (seeds if is_known else 0)
    assert stats.binom.cdf(held, answered, 0.95) > ALPHA if answered else held == 0


@pytest.mark.parametrize("mechanism", ["copula", "marginals"])
def test_columns_say_where_only_clipped_means_are_answered(opened, mechanism):
    answers = opened(mechanism).columns["answers"]
    assert answers["pay"].split(", ")[0] == "mean(within=)"
    assert answers["kids"].split(", ")[0] == "mean"
    assert opened(mechanism).mean("kids").interval()


@pytest.mark.parametrize("mechanism", ["copula", "marginals"])
def test_means_of_groups_stay_within_what_they_are_clipped_to(opened, mechanism):
    found = opened(mechanism)
    groups, ends = found.mean("pay", by="town", within=(1400.0, 1500.0)), (1400.0, 1500.0)
    for part in (groups.estimate, *groups.interval()):
        assert part.between(*ends).all()
    truth = table().assign(pay=table()["pay"].clip(*ends)).groupby("town")["pay"].mean()
    low, high = groups.interval(1.0 - ALPHA)
    assert ((low <= truth) & (truth <= high)).all()
    assert not says(groups, "half of the mean")
    with refused("within="):
        found.quantile("pay", by="town")


@pytest.mark.parametrize("mechanism", ["histogram", "marginals"])
def test_a_mean_that_wide_bounds_hide_is_refused_and_the_way_out_is_named(opened, mechanism):
    found = opened(mechanism)
    with refused(r"use mean\('pay', within=\(low, high\)\)"):
        found.mean("pay")
    for wrong in ((5, 1), (0, 1, 2), "ab", (0, float("inf")), (1, 1)):
        with refused("two values that increase"):
            found.mean("pay", within=wrong)


def test_means_within_bounds_are_those_of_clipped_values_elsewhere_too(shelf):
    found = shelf.opened("homes, dip")
    rows = found.to_pandas()
    plain = rows["years"].clip(3, 6).mean()
    assert found.mean("years", within=(3, 6)).estimate == pytest.approx(plain)
    groups = found.mean("years", by="town", within=(3, 6)).estimate
    plain = rows[rows["town"] == "B"]["years"].clip(3, 6).mean()
    assert groups["B"] == pytest.approx(plain)
    assert found.mean("rating", within=(2, 3)).estimate == pytest.approx(
        rows["rating"].clip(2, 3).mean()
    )
    for asked in ({}, {"by": "town"}):
        found_of_levels = found.mean("rating", **asked, within=(2, 3))
        assert found_of_levels.possible == (2.0, 3.0)
        low, high = (np.ravel(end) for end in found_of_levels.interval())
        assert (low >= 2.0).all()
        assert (high <= 3.0).all()
    cells = shelf.opened("homes, cells")
    assert cells.mean("price", within=(0, 50)).bias_bound < cells.mean("price").bias_bound


def test_dates_are_clipped_by_dates(shelf):
    found = shelf.opened("rides, tree")
    rows = found.to_pandas()
    ends = pd.Timestamp("2026-02-01"), pd.Timestamp("2026-03-01")
    seen = pd.to_datetime(rows["seen"]).clip(*ends)
    clipped = found.mean("seen", within=tuple(map(str, ends))).estimate
    assert abs(clipped - seen.mean()) < pd.Timedelta(milliseconds=1)
    day = found.mean("day", within=("2026-02-01", "2026-03-01"))
    low, high = day.interval()
    assert ends[0] < low < day.estimate < high < ends[1]
    for wrong in ((0, 1), ("2026-03-01", "2026-02-01")):
        with refused(r"are dates|two values that increase"):
            found.mean("day", within=wrong)


OUTPUTS = {
    "folder": {},
    "delta": {"output__format": "delta"},
    "iceberg": {"output__format": "iceberg", "output__table": "db.t"},
}


@pytest.mark.parametrize("kind", OUTPUTS)
def test_every_kind_of_output_has_the_counts_beside_the_card(tmp_path, kind):
    changed = dict(OUTPUTS[kind])
    source = lake(tmp_path / "lake", [600, 400], schema=RATINGS_SCHEMA)
    if kind == "delta":
        pytest.importorskip("deltalake")
    if kind == "iceberg":
        from lakes.tables import sql_catalog

        (tmp_path / "warehouse").mkdir()
        sql_catalog(tmp_path / "warehouse")
        uri = f"sqlite:///{tmp_path / 'warehouse'}/catalog.db"
        changed["output__catalog"] = {
            "name": "lake",
            "type": "sql",
            "uri": uri,
            "warehouse": (tmp_path / "warehouse").as_uri(),
        }
    check_output(tmp_path, source, tmp_path / "out", **changed)


@pytest.mark.few(1)
def test_a_store_has_the_counts_beside_the_card(tmp_path, remote_store):
    source = lake(tmp_path / "lake", [600, 400], schema=RATINGS_SCHEMA)
    check_output(tmp_path, source, remote_store.folder.url + "/measured")


def check_output(folder, source, out, **changed):
    given = {"schema": RATINGS_SCHEMA, "mechanism__reference": {"kind": "histogram"}}
    run_here(write_job(folder, source, out, **given, **changed))
    found = dpdask.open(str(out))
    [counts] = found._measured.values()
    assert counts.num_rows == len(found.card["columns"]["rating"]["levels"])
    excess = counts["count"].to_numpy() - found.share("rating").estimate.to_numpy() * found.n_rows
    assert_allclose(excess, excess[0], atol=1e-6)  # least squares, with the known n


def altered(shelf, tmp_path, change, name="levels, histogram"):
    """Return a release whose card, counts or both a test has changed, its manifest in order."""
    folder = shelf.copy(name, tmp_path / "copy")
    meta = folder / "_dpdask"
    card = json.loads((meta / "release.json").read_bytes())
    change(card, meta)
    data = json.dumps(card).encode()
    (meta / "release.json").write_bytes(data)
    manifest = json.loads((meta / "manifest.json").read_bytes())
    manifest["card_sha256"] = hashlib.sha256(data).hexdigest()
    (meta / "manifest.json").write_bytes(json.dumps(manifest).encode())
    return dpdask.open(str(folder))


def test_a_release_without_counts_answers_from_its_rows(shelf, tmp_path):
    def forget(card, meta):
        del card["sha256"]
        (meta / "measured.arrow").unlink()

    old, new = altered(shelf, tmp_path, forget), shelf.opened("levels, histogram")
    rows = old.to_pandas()
    assert old.mean("c0").estimate == pytest.approx(rows["c0"].mean())
    assert old.mean("c0").standard_error > new.mean("c0").standard_error


def test_counts_of_another_release_are_refused(shelf, tmp_path):
    def swap(card, meta):
        counts = read_counts((meta / "measured.arrow").read_bytes())
        (meta / "measured.arrow").write_bytes(write_counts(list(counts.values())[:1]))

    found = altered(shelf, tmp_path, swap)
    with refused("not those that the card names", dpdask.InputError):
        found.share("c0")


@pytest.mark.parametrize("fault", ["columns", "no noise", "twice", "cells", "no Arrow file"])
def test_files_of_counts_that_fit_the_card_alone_are_refused_in_one_line(shelf, tmp_path, fault):
    def spoil(card, meta):
        path = meta / "measured.arrow"
        counts = read_counts(path.read_bytes())
        first = next(iter(counts))
        spread = pa.repeat(0.0, counts[first].num_rows)
        place = COUNTS.get_field_index("standard_deviation")
        changed = {
            "no noise": [counts[first].set_column(place, COUNTS.field(place), spread)],
            "twice": [counts[first], counts[first]],
            "cells": [each.slice(0, 1) for each in counts.values()],
        }
        data = write_counts(changed.get(fault, counts.values()))
        if fault == "columns":
            file = io.BytesIO()
            with pa.ipc.new_file(file, pa.schema([("x", pa.int64())])):
                pass
            data = file.getvalue()
        path.write_bytes(b"PAR1" if fault == "no Arrow file" else data)
        card["sha256"]["measured.arrow"] = hashlib.sha256(path.read_bytes()).hexdigest()

    with refused("not those that the card names", dpdask.InputError):
        altered(shelf, tmp_path, spoil, "levels, tree").share("c0")


def test_columns_and_tables_have_names_of_their_own():
    names = [label_table(*each) for each in (("a",), ("b",), ("a", "b"), ("a x b",), ('a", "b',))]
    ends = [name + end for name in names for end in ("", AGAIN, IN_CELLS)]
    assert len(set(ends)) == len(ends)


@pytest.mark.filterwarnings("ignore:The inplace keyword")  # Dask's
def test_readers_of_the_folder_see_rows_alone(shelf):
    folder = shelf.release("levels, tree")
    n_rows = len(dpdask.open(folder).to_pandas())
    for read in (pd.read_parquet, lambda path: dd.read_parquet(path).compute()):
        assert len(read(str(folder))) == n_rows


def test_files_of_counts_come_back_and_are_the_same_bytes(shelf):
    path = Path(shelf.release("levels, tree")) / "_dpdask" / "measured.arrow"
    counts = read_counts(path.read_bytes())
    again = write_counts(list(counts.values()))
    assert write_counts(list(counts.values())) == again
    back = read_counts(again)
    assert list(back) == list(counts)
    assert all(back[name].equals(counts[name]) for name in counts)
    assert '["c0"]' in counts
    assert any(name.endswith("], again") for name in counts)
    pairs = [
        part.num_rows
        for name, part in counts.items()
        if len(json.loads(name.partition("]")[0] + "]")) == 2
    ]
    assert set(pairs) == {25}


# ---- the joint table of a perturbed histogram


@pytest.mark.parametrize("output", ["cells", "rows"])
@pytest.mark.parametrize("adjacency", ["replace-one", "add-remove"])
def test_declared_cells_of_few_rows_are_answered_from_all_noisy_counts(tmp_path, output, adjacency):
    kind = {"kind": "histogram", "bins": 40, "output": output}
    columns = {"town": NUMBERS["town"], "pay": continuous([0, 20_000]), "kids": NUMBERS["kids"]}
    private = {"epsilon": 1.0, "delta": 0, "adjacency": adjacency}
    rows = table()
    found = release(tmp_path, kind, schema=columns, privacy=private)
    n_cells = found.card["mechanism"]["cells"]
    assert len(rows) < 5.0 * n_cells
    assert found.card["mechanism"]["cells_listed"] < n_cells / 2.0
    share = found.share("town")
    z = list((share.estimate - rows["town"].value_counts(normalize=True)) / share.standard_error)
    tally = found.histogram("pay", [0, 1000, 2000, 20_000])
    exact = np.histogram(rows["pay"].clip(0, 20_000), [0, 1000, 2000, 20_000])[0]
    z += list((tally.estimate - exact) / (tally.standard_error + tally.bias_bound))
    mean = found.mean("pay", within=(0, 8000))
    truth = rows["pay"].clip(0, 8000).mean()
    z.append((mean.estimate - truth) / (mean.standard_error + mean.bias_bound))
    groups = found.mean("kids", by="town")
    truth = rows.groupby("town")["kids"].mean()
    z += list((groups.estimate - truth) / (groups.standard_error + groups.bias_bound))
    assert np.abs(z).max() < 4.5
    for each in (share, tally, mean, groups, found.quantile("pay", 0.5)):
        low, high = each.interval()
        assert np.all(np.asarray(low) < np.asarray(high))


# ---- ends of the intervals of shares and numbers of rows


@pytest.mark.parametrize("n_in", [0, 1, 5, 60, 199, 200])
def test_an_interval_of_rows_that_are_drawn_without_noise_is_that_of_their_score(n_in):
    n = 200
    share = n_in / n
    error = np.sqrt(max(share * (1.0 - share), (n - 1.0) / n**2) / n)
    found = Result(
        estimate=pd.Series([share, np.nan]),
        standard_error=pd.Series([error, np.nan]),
        drawn=(n, 1.0),
    )
    own = stats.binomtest(n_in, n).proportion_ci(0.95, "wilson")
    low, high = found.interval()
    assert_allclose([low[0], high[0]], own, atol=1e-9)
    assert low.isna()[1]
    assert high.isna()[1]


@pytest.mark.parametrize("estimate", [-30.0, 0.0, 4.0, 500.0, 1000.0])
@pytest.mark.parametrize("error", [0.5, 3.0, 25.0])
def test_ends_of_a_number_of_rows_are_as_far_from_the_estimate_as_their_own_errors_say(
    estimate, error
):
    n = 1000.0
    found = Result(estimate=pd.Series([estimate]), standard_error=pd.Series([error]), drawn=(n, n))
    deviations = stats.norm.ppf(0.975)
    y = min(max(estimate, 0.0), n)
    least = min(max(y, 1.0), n - 1.0)
    rate = min(1.0 / n, error**2 / (least * (n - least)))
    noise = error**2 - rate * least * (n - least)
    for end, side in zip(found.interval(), (-1.0, 1.0), strict=True):
        own = rate * end[0] * (n - end[0]) + noise
        assert (end[0] - y) ** 2 == pytest.approx(deviations**2 * own, abs=1e-6)
        assert side * (end[0] - y) >= -1e-6


@pytest.mark.parametrize("is_told", [True, False])
def test_bounds_of_means_by_group_hold_for_what_is_no_copula(monkeypatch, is_told):
    """A group is rare in the middle of the numbers and frequent in the tail, as flat fares are."""
    if not is_told:  # power: half of what the copula adds is too little
        monkeypatch.setattr("dpdask.analysis.points.APART", 0.0)
    rng = default_rng(3)
    pay = rng.lognormal(2.5, 0.7, 400_000).clip(0.0, 1_000.0)
    share_of_a = np.select([pay < 12.0, pay < 40.0], [0.4, 0.25], pay / 160.0)
    edges = np.concatenate([[0.0], np.quantile(pay, np.arange(1, 20) / 20.0), [1_000.0]])
    table = pd.DataFrame({"pay": pay, "cell": np.digitize(pay, edges[1:-1])})
    table["town"] = np.where(rng.random(len(pay)) < share_of_a, "a", "b")
    rows = table.groupby(["cell", "town"]).size().reset_index(name="rows")
    at = rows["cell"].to_numpy()
    points = Points(
        frame=pd.DataFrame({"pay": (edges[at] + edges[at + 1]) / 2.0, "town": rows["town"]}),
        weights=rows["rows"].to_numpy(float),
        n_rows=len(pay),
        sampling=1.0 / len(pay),
        levels={"town": ["a", "b"]},
        ends={"pay": (edges[at], edges[at + 1])},
        fine={"pay": measure_pay(pay, 5.0)},
        bounds={"pay": (0.0, 1_000.0)},
    )
    found = points.mean("pay", by="town", within=(0.0, 1_000.0))
    low, high = found.interval()
    truth = table.groupby("town")["pay"].mean()
    assert ((low < truth) & (truth < high)).all() == is_told
    assert (high - low < 2.0).all()
