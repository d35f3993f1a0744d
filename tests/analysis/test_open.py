"""`dpdask.open`: answers are right within their own errors, where plain answers are not; what a release cannot answer is refused."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import dask
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from e2e.helpers import open_once, refusing

import dpdask
from dpdask.analysis.opened import Result
from dpdask.inference import NPMLE, logistic

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "analyse-a-release.md"
N = 20_000
FEW = 5_000  # for ranges, which take longest
Z = 4.5  # standard errors
TOWNS = ["A", "B", "C"]
KINDS = ["flat", "house", "other"]
SCHEMA: dict[str, Any] = {
    "town": {"role": "keep"},
    "years": {"role": "keep"},
    "rating": {"role": "privatise", "kind": "discrete", "levels": [1, 2, 3, 4, 5]},
    "kind": {"role": "privatise", "kind": "categorical", "levels": KINDS},
    "price": {"role": "privatise", "kind": "continuous", "bounds": [0.0, 200.0]},
}
NOTHING_KEPT = {
    "town": SCHEMA["kind"] | {"levels": TOWNS},
    "years": SCHEMA["rating"] | {"levels": list(range(1, 9))},
} | {name: SCHEMA[name] for name in ("rating", "kind", "price")}
COUNTED: dict[str, Any] = {"epsilon": 4.0, "delta": 1e-9, "adjacency": "replace-one", "unit": "row"}
CELLS = {
    name: NOTHING_KEPT[name] if name in ("years", "price", "kind") else {"role": "drop"}
    for name in NOTHING_KEPT
}


def make_table() -> pd.DataFrame:
    rng = np.random.default_rng(5)
    town = rng.choice(TOWNS, N, p=[0.5, 0.3, 0.2])
    years = rng.integers(1, 9, N)
    score = (
        0.35 * (years - 4.5)
        + np.select([town == "A", town == "B"], [0.7, -0.5], 0.0)
        + rng.normal(size=N)
    )
    rating = 1 + np.digitize(score, [-1.2, -0.4, 0.4, 1.2])
    price = np.clip(60.0 + 6.0 * (years - 4.5) + 18.0 * rng.normal(size=N), 0.0, 200.0)
    kind = np.array(KINDS)[
        np.where(rng.random(N) < 0.6, (rating > 3).astype(int), rng.integers(0, 3, N))
    ]
    return pd.DataFrame(
        {"town": town, "years": years, "rating": rating, "kind": kind, "price": price}
    )


@pytest.fixture(scope="module")
def original() -> pd.DataFrame:
    return make_table()


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory, original: pd.DataFrame) -> Any:
    """Return what opens the release of a job by its name; each job runs once."""
    folder = tmp_path_factory.mktemp("opened")
    (folder / "in").mkdir()
    (folder / "few").mkdir()
    for name, rows in (("in", original), ("few", original[:FEW])):
        pq.write_table(
            pa.Table.from_pandas(rows, preserve_index=False),
            folder / name / "table.parquet",
            row_group_size=5_000,
        )
    holdout = {
        "kind": "dip",
        "reference": {"kind": "holdout", "fraction": 0.25},
        "channel": "optimal",
    }
    price = {"design": "case1", "anchors": {"name": "uniform", "loc": 0, "scale": 120}}
    jobs: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "dip": (
            SCHEMA | {"kind": {"role": "drop"}},
            {"mechanism": holdout, "privacy__epsilon": 6.0},
        ),
        "pairs": (
            SCHEMA | {"price": {"role": "drop"}},
            {"mechanism": holdout, "privacy__epsilon": 6.0},
        ),
        "known": (
            SCHEMA | {n: {"role": "drop"} for n in ("rating", "kind")},
            {"mechanism": holdout | {"reference": KNOWN}},
        ),
        "interval": (
            refusing(SCHEMA | {name: {"role": "keep"} for name in ("rating", "kind")}),
            {"mechanism": {"kind": "interval", "columns": {"price": price}}, "privacy": None},
        ),
        "copula": (NOTHING_KEPT, {"mechanism": {"kind": "copula"}, "privacy": COUNTED}),
        "cells": (
            CELLS,
            {"mechanism": {"kind": "histogram", "output": "cells", "bins": {"price": 40}}},
        ),
        "tables": (
            NOTHING_KEPT,
            {
                "mechanism": {
                    "kind": "marginals",
                    "cliques": [["town", "rating"], ["price"]],
                    "bins": {"price": 20},
                }
            },
        ),
    }

    def open_(name: str) -> Any:
        schema, changes = jobs[name]
        input_ = folder / ("few" if name == "interval" else "in")
        return open_once(
            folder, name, input_, schema=schema, output__rows_per_shard=6_000, **changes
        )

    return open_


KNOWN: dict[str, Any] = {
    "kind": "known",
    "columns": {"price": {"name": "uniform", "loc": 0.0, "scale": 200.0}},
}


def agrees(found: Result, truth: Any, *, at_most: float) -> None:
    """Check that the truth lies within some standard errors and the bias, and that the standard error is as small as it should be."""
    estimate, error = (
        np.asarray(found.estimate, dtype=float),
        np.asarray(found.standard_error, dtype=float),
    )
    bias = np.zeros(1) if found.bias_bound is None else np.asarray(found.bias_bound, dtype=float)
    assert (np.abs(estimate - np.asarray(truth, dtype=float)) <= Z * error + bias).all(), (
        found,
        truth,
    )
    assert (error > 0).all()
    assert error.max() <= at_most


def slope_of(frame: pd.DataFrame, y: str, x: str) -> float:
    return float(np.polyfit(frame[x], frame[y], 1)[0])


# ---- rows of a channel


def test_means_of_randomised_levels_are_corrected(release: Any, original: pd.DataFrame) -> None:
    opened = release("dip")
    agrees(opened.mean("rating"), original["rating"].mean(), at_most=0.05)
    truth = original.groupby("town")["rating"].mean()
    found = opened.mean("rating", by="town")
    assert found.estimate.index.tolist() == TOWNS
    agrees(found, truth, at_most=0.1)
    naive = opened.to_pandas().groupby("town")["rating"].mean()
    assert (
        abs(naive["A"] - truth["A"])
        > Z * found.standard_error["A"]
        > abs(found.estimate["A"] - truth["A"])
    )


def test_slopes_of_randomised_levels_are_not_attenuated(
    release: Any, original: pd.DataFrame
) -> None:
    opened = release("dip")
    for y, x in (("rating", "years"), ("years", "rating")):
        found, truth = opened.slope(y, x), slope_of(original, y, x)
        assert abs(found.estimate[x] - truth) <= Z * found.standard_error[x] <= 0.5 * abs(truth)
        naive = slope_of(opened.to_pandas(), y, x)
        assert abs(naive) < abs(truth) - Z * found.standard_error.iloc[0]


def test_shares_and_tables_of_randomised_levels(release: Any, original: pd.DataFrame) -> None:
    opened = release("pairs")
    agrees(
        opened.share("kind"),
        original["kind"].value_counts(normalize=True).sort_index(),
        at_most=0.05,
    )
    truth = pd.crosstab(original["town"], original["kind"])
    found = opened.crosstab("town", "kind")
    scale = len(original) / opened.n_rows
    agrees(
        Result(estimate=found.estimate * scale, standard_error=found.standard_error * scale),
        truth,
        at_most=900,
    )
    pd.testing.assert_frame_equal(opened.crosstab("kind", "town").estimate, found.estimate.T)
    both = opened.crosstab("kind", "rating")  # two columns with noise of their own
    truth = pd.crosstab(original["kind"], original["rating"])
    assert both.estimate.shape == (3, 5)
    assert both.estimate.to_numpy().sum() == pytest.approx(opened.n_rows)
    told = scale * both.bias_bound.to_numpy() if both.bias_bound is not None else 0.0
    assert (
        (np.abs(scale * both.estimate - truth) <= Z * scale * both.standard_error + told)
        .to_numpy()
        .all()
    )
    released = opened.to_pandas()
    naive = scale * pd.crosstab(released["kind"], released["rating"])
    assert (
        np.abs(scale * both.estimate - truth).to_numpy().sum()
        < 0.6 * np.abs(naive - truth).to_numpy().sum()
    )


def test_numbers_keep_their_distribution_and_say_what_they_do_not(
    release: Any, original: pd.DataFrame
) -> None:
    opened = release("dip")
    agrees(opened.mean("price"), original["price"].mean(), at_most=0.6)
    agrees(opened.quantile("price", 0.9), original["price"].quantile(0.9), at_most=1.5)
    edges = [0.0, 40.0, 60.0, 80.0, 200.0]
    truth = np.histogram(original["price"], edges)[0] * opened.n_rows / N
    agrees(opened.histogram("price", edges), truth, at_most=200)
    with pytest.raises(dpdask.SpecError, match="only its own distribution is kept"):
        opened.mean("price", by="town")
    with pytest.raises(dpdask.SpecError, match="one private column, which has levels"):
        opened.slope("price", "years")


def test_a_declared_reference_gives_no_mean_of_numbers(release: Any) -> None:
    with pytest.raises(dpdask.SpecError, match="lean to by an unknown amount"):
        release("known").mean("price")


def test_kept_columns_are_those_of_the_table(release: Any, original: pd.DataFrame) -> None:
    opened = release("known")
    assert opened.mean("years").estimate == pytest.approx(original["years"].mean())
    agrees(opened.mean("years", by="town"), original.groupby("town")["years"].mean(), at_most=0.05)
    np.testing.assert_allclose(
        opened.crosstab("town", "years").estimate, pd.crosstab(original["town"], original["years"])
    )


# ---- ranges


def test_ranges_give_distributions_and_regressions(release: Any, original: pd.DataFrame) -> None:
    opened, original = release("interval"), original[:FEW]
    found = opened.mean("price")
    agrees(found, original["price"].mean(), at_most=1.0)
    rows = opened.to_pandas()
    middles = rows.assign(
        price=(rows["price_lower"].clip(lower=0.0) + rows["price_upper"].clip(upper=200.0)) / 2
    )
    assert (
        abs(middles["price"].mean() - original["price"].mean())
        > Z * found.standard_error + found.bias_bound
    )
    assert isinstance(opened.npmle("price"), NPMLE)
    assert opened.quantile("price").estimate == pytest.approx(original["price"].median(), abs=6.0)
    assert opened.quantile("price").standard_error is None
    slope = opened.slope("price", "years")
    truth = slope_of(original, "price", "years")
    agrees(slope, [truth], at_most=0.4)
    assert (
        abs(slope_of(middles, "price", "years") - truth)
        > 4.0 * slope.standard_error["years"]
        > abs(slope.estimate["years"] - truth)
    )
    assert opened.regress("price", "years").estimator_.coef_[0] == pytest.approx(
        slope.estimate.iloc[0]
    )
    with pytest.raises(dpdask.SpecError, match="a range cannot explain"):
        opened.slope("years", "price")


# ---- records, cells, tables


def test_records_know_the_noise_of_their_tables(release: Any, original: pd.DataFrame) -> None:
    opened = release("copula")
    agrees(opened.mean("rating"), original["rating"].mean(), at_most=0.06)
    agrees(
        opened.share("kind"),
        original["kind"].value_counts(normalize=True).sort_index(),
        at_most=0.02,
    )
    agrees(
        opened.crosstab("kind", "rating"),
        pd.crosstab(original["kind"], original["rating"]),
        at_most=200,
    )
    agrees(opened.slope("rating", "years"), [slope_of(original, "rating", "years")], at_most=0.02)
    agrees(opened.mean("rating", by="town"), original.groupby("town")["rating"].mean(), at_most=0.1)
    found = opened.mean("rating")
    plain = float(opened.to_pandas()["rating"].std() / np.sqrt(opened.n_rows))
    assert (
        found.standard_error > 1.4 * plain
    )  # what a standard error that knows of no noise would be
    for unknown in (
        opened.slope("rating", "years"),
        opened.mean("rating", by="town"),
        opened.crosstab("kind", "rating"),
    ):
        with pytest.raises(
            dpdask.SpecError,
            match=r"no bound on the bias is known.*; see `limits`; interval\(ignore_bias=True\)",
        ):
            unknown.interval()
        assert np.all(np.diff(unknown.interval(ignore_bias=True), axis=0) > 0)
    agrees(
        opened.quantile("price", 0.5), original["price"].median(), at_most=2.0
    )  # its cells' widths bound the bias
    two = opened.slope("rating", "years", "price")
    assert two.estimate.index.tolist() == ["years", "price"]


def test_cells_take_m_estimators(release: Any, original: pd.DataFrame) -> None:
    opened = release("cells")
    agrees(opened.mean("price"), original["price"].mean(), at_most=0.3)
    agrees(opened.quantile("price"), original["price"].median(), at_most=1.0)
    agrees(opened.slope("price", "years"), [slope_of(original, "price", "years")], at_most=0.15)
    found = opened.fit(least_over_60, "years", "price")
    assert found.estimate.index.tolist() == ["intercept", "price"]
    truth = least_over_60_of(original)
    agrees(found, truth, at_most=0.2)


def least_over_60(sample: Any) -> Any:
    """Return a logistic regression of having more than 4 years on the price."""
    return logistic(
        type(sample)(
            features=sample.features,
            response=(sample.response > 4).astype(float),
            weights=sample.weights,
            names=sample.names,
        )
    )


def least_over_60_of(original: pd.DataFrame) -> Any:
    from dpdask.inference import WeightedSample

    return least_over_60(
        WeightedSample(
            features=original[["price"]].to_numpy(),
            response=original["years"].to_numpy(float),
            weights=np.ones(N),
        )
    )


def test_tables_answer_for_their_own_columns(release: Any, original: pd.DataFrame) -> None:
    opened = release("tables")
    agrees(opened.mean("rating"), original["rating"].mean(), at_most=0.03)
    agrees(
        opened.crosstab("town", "rating"),
        pd.crosstab(original["town"], original["rating"]),
        at_most=100,
    )
    agrees(opened.mean("price"), original["price"].mean(), at_most=0.5)
    with pytest.raises(
        dpdask.SpecError,
        match="no released table has these columns; use one of the tables town x rating, price",
    ):
        opened.crosstab("rating", "price")


# ---- the folder


def test_the_table_the_card_and_the_columns(release: Any, original: pd.DataFrame) -> None:
    opened = release("dip")
    assert repr(opened).startswith("OpenedRows(dip, ")
    assert len(repr(opened)) < 120
    assert opened.card["mechanism"]["kind"] == "dip"
    opened.card["columns"].clear()
    assert list(opened.columns.index) == ["rating", "price", "town", "years"]
    assert opened.columns.loc["price", "answers"] == "mean, histogram, quantile"
    assert opened.columns.loc["town", "answers"] == "share, crosstab"
    rows = opened.to_pandas()
    pd.testing.assert_frame_equal(
        opened.to_pandas(name for name in ("town", "rating")), rows[["town", "rating"]]
    )  # type: ignore[arg-type]
    assert len(rows) == opened.n_rows == pytest.approx(0.75 * N, rel=0.05)
    with dask.config.set(scheduler="synchronous"):
        lazy = opened.to_dask()
        assert lazy.npartitions == len(opened.shards) > 1
        pd.testing.assert_frame_equal(lazy.compute().reset_index(drop=True), rows)


def test_large_tables_are_counted_lazily(release: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = release("dip")
    expected = opened.mean("rating", by="town")
    monkeypatch.setattr("dpdask.analysis.rows._IN_MEMORY", 10)
    with dask.config.set(scheduler="synchronous"):
        pd.testing.assert_series_equal(opened.mean("rating", by="town").estimate, expected.estimate)


def test_results_are_short_and_widen_by_their_bias() -> None:
    found = Result(estimate=3.0, standard_error=0.5, bias_bound=0.25)
    assert repr(found) == "3 (standard error 0.5, bias at most 0.25)"
    assert found.interval() == pytest.approx((3 - 0.98 - 0.25, 3 + 0.98 + 0.25), abs=1e-3)
    assert (
        repr(Result(estimate=3.0, standard_error=None, bias_bound=None))
        == "3 (no standard error, no bound on its bias)"
    )
    with pytest.raises(dpdask.SpecError, match="no standard error is known"):
        Result(estimate=3.0, standard_error=None).interval()
    for confidence in (95, 0.0, 1.0, "0.9"):
        with pytest.raises(dpdask.SpecError, match="between 0 and 1"):
            found.interval(confidence)  # type: ignore[arg-type]
    table = Result(estimate=pd.Series(range(20)), standard_error=pd.Series([0.1] * 20))
    assert repr(table).endswith("… 8 more")


def test_the_documentation_runs(
    release: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Every block of the page runs, one after the other, on releases of these names."""
    (tmp_path / "out").mkdir()
    for end, name in {
        "": "dip",
        "-interval": "interval",
        "-synthetic": "copula",
        "-cells": "cells",
        "-tables": "tables",
    }.items():
        (tmp_path / "out" / f"homes{end}").symlink_to(release(name).folder.local_path)
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(
        r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, PAGE.name, "exec"), names)
    assert len(blocks) == 7
    assert "use crosstab(), or the mechanism `copula`" in capsys.readouterr().out
    assert 0.0 < names["share_below_50"] < 1.0


@pytest.mark.parametrize(
    ("name", "question", "words"),
    [
        ("dip", ("npmle", "price"), "holds values, not ranges; use"),
        ("dip", ("share", "price"), "use histogram"),
        ("dip", ("histogram", "rating"), "use share"),
        ("dip", ("fit", None, "rating"), "not weighted cells"),
        ("dip", ("mean", "raitng"), "did you mean 'rating'"),
        ("dip", ("quantile", "price", 90), "lies between 0 and 1"),
        ("interval", ("share", "price"), "known as ranges"),
        ("interval", ("npmle", "years"), "was kept"),
        ("copula", ("fit", None, "rating"), "carry no weights"),
        ("copula", ("mean", "kind"), "does not hold numbers"),
        ("cells", ("regress", "price", "years"), "weighted cells"),
        ("tables", ("slope", "rating"), "a regression needs a column that explains"),
        ("tables", ("slope", "rating", "rating"), "named twice"),
        (
            "dip",
            ("quantile", ["price"]),
            "a list: one column is expected; give a name such as 'price'",
        ),
        (
            "dip",
            ("mean", ["rating"]),
            "mean, a list: one column is expected; give a name such as 'rating'",
        ),
        (
            "dip",
            ("crosstab", "town", {"rating"}),
            "crosstab, a set: one column is expected; give its name, a text",
        ),
        (
            "dip",
            ("slope", "rating", ["years", "town"]),
            "slope, a list: one column is expected; give a name such as 'years'",
        ),
        ("interval", ("mean", ["price"]), "one column is expected"),
        ("copula", ("mean", ["rating"]), "one column is expected"),
        (
            "copula",
            ("share", ("kind", "town")),
            "a tuple: one column is expected; give a name such as 'kind'",
        ),
        ("cells", ("mean", ["price"]), "one column is expected"),
        ("cells", ("fit", logistic, "price", ["years"]), "one column is expected"),
        ("tables", ("mean", ["rating"]), "one column is expected"),
        ("dip", ("to_pandas", "rating"), "must be a list of names"),
        (
            "dip",
            ("to_pandas", ["rating", "twon"]),
            "column 'twon': no released column has this name; did you mean 'town'?",
        ),
        ("copula", ("histogram", "kind"), "does not hold numbers; use share()"),
        ("cells", ("fit", "price", "years", "price"), "must be a function"),
        ("cells", ("slope", "price"), "slope: a regression needs"),
    ],
)
def test_what_is_not_supported_is_one_line(
    release: Any, name: str, question: tuple[Any, ...], words: str
) -> None:
    with pytest.raises(dpdask.SpecError) as refused:
        getattr(release(name), question[0])(*question[1:])
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["dip", "copula", "cells", "interval"])
def test_several_columns_make_no_groups(release: Any, name: str) -> None:
    with pytest.raises(
        dpdask.SpecError, match=r"a list: one column is expected; give a name such as 'years'$"
    ):
        release(name).mean("price", by=["years", "kind"])


def test_folders_that_hold_no_release_or_another_card_are_refused(
    release: Any, tmp_path: Path
) -> None:
    with pytest.raises(dpdask.InputError, match="no finished release"):
        dpdask.open(str(tmp_path))
    copy = tmp_path / "copy"
    shutil.copytree(release("tables").folder.local_path, copy)
    card = copy / "_dpdask" / "release.json"
    card.write_text(json.dumps(json.loads(card.read_text()) | {"name": "other"}))
    with pytest.raises(dpdask.InputError, match="not the one that the manifest names"):
        dpdask.open(str(copy))
    shutil.copy(copy / "_dpdask" / "manifest.json", copy / "_dpdask" / "manifest-00001.json")
    with pytest.raises(dpdask.SpecError, match="holds 2 releases"):
        dpdask.open(str(copy))


def test_a_manifest_names_no_file_outside_of_its_folder(release: Any, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(release("tables").folder.local_path, copy)
    pq.write_table(pa.table({"secret": [1]}), tmp_path / "secret.parquet")
    manifest = copy / "_dpdask" / "manifest.json"
    content = json.loads(manifest.read_text())
    content["shards"][0]["name"] = "../secret.parquet"
    manifest.write_text(json.dumps(content))
    with pytest.raises(dpdask.OutputError, match="the manifest cannot be read"):
        dpdask.open(str(copy))


def test_a_release_in_a_store_is_opened_by_its_url(release: Any) -> None:
    import fsspec

    local = release("tables").folder.local_path
    memory = fsspec.filesystem("memory")
    memory.put(str(local), "/opened/tables", recursive=True)
    assert (
        dpdask.open("memory://opened/tables").mean("rating").estimate
        == release("tables").mean("rating").estimate
    )
