"""Averages over all rows: the distribution is kept, so they are the released ones, with errors that are neither too small nor too large."""

from __future__ import annotations

import datetime as dt
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from e2e.helpers import open_once

import dpdask
from dpdask.analysis.opened import Result, find_scales
from dpdask.analysis.points import Points
from dpdask.errors import SpecError

N = 6_000
N_COLUMNS = 8
SHARES = np.array([0.4, 0.3, 0.15, 0.1, 0.05])
STAY = 0.6  # how often a column has the level of the one before it
LEVELS: dict[str, Any] = {"role": "privatise", "kind": "discrete", "levels": [1, 2, 3, 4, 5]}
NAMES = [f"c{place}" for place in range(N_COLUMNS)]
SCHEMA: dict[str, Any] = dict.fromkeys(NAMES, LEVELS) | {"side": {"role": "keep"}}
JOBS: dict[str, dict[str, Any]] = {
    "holdout": {
        "mechanism": {
            "kind": "dip",
            "reference": {"kind": "holdout", "fraction": 0.25},
            "channel": "laplace-calibrated",
        }
    },
    "histogram": {
        "mechanism": {"kind": "dip", "reference": {"kind": "histogram"}, "channel": "optimal"},
        "privacy__epsilon": 4.0,
    },
    "tree": {
        "mechanism": {
            "kind": "dip",
            "reference": {"kind": "tree"},
            "channel": "laplace-calibrated",
        },
        "privacy": {"epsilon": 4.0, "delta": 1e-6, "adjacency": "replace-one", "unit": "row"},
    },
}


def make_table() -> pd.DataFrame:
    rng = np.random.default_rng(11)
    table = {"side": rng.choice(["l", "r"], N)}
    before = rng.choice(5, N, p=SHARES)
    for name in NAMES:
        table[name] = 1 + before
        before = np.where(rng.random(N) < STAY, before, rng.choice(5, N, p=SHARES))
    return pd.DataFrame(table)


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("plain")
    (folder / "in").mkdir()
    pq.write_table(
        pa.Table.from_pandas(make_table(), preserve_index=False), folder / "in" / "table.parquet"
    )

    def open_(name: str) -> Any:
        return open_once(
            folder, name, folder / "in", schema=SCHEMA, output__rows_per_shard=N, **JOBS[name]
        )

    return open_


def errors(found: Result, truth: Any) -> Any:
    """Return the errors of the estimates in standard errors."""
    error = np.asarray(found.standard_error, dtype=float)
    assert (error > 0).all()
    return np.ravel(
        (np.asarray(found.estimate, dtype=float) - np.asarray(truth, dtype=float)) / error
    )


def check(z: Any) -> None:
    """Check that errors are as large as their standard errors say, neither larger nor smaller."""
    assert np.abs(z).max() <= 4.0
    assert 0.6 <= rms(z) <= 1.4


def rms(z: Any) -> float:
    return float(np.sqrt(np.mean(z**2)))


@pytest.mark.parametrize("name", ["holdout", "histogram", "tree"])
def test_shares_and_means_of_all_rows_are_the_released_ones(release: Any, name: str) -> None:
    opened = release(name)
    rows = opened.to_pandas()
    z = [errors(opened.share(column), SHARES) for column in NAMES]
    z += [errors(opened.mean(column), SHARES @ np.arange(1, 6)) for column in NAMES]
    check(
        np.concatenate(
            [
                *z,
                *(
                    errors(opened.mean(column, values=[0, 0, 0, 0, 1]), SHARES[4])
                    for column in NAMES
                ),
            ]
        )
    )
    if name == "histogram":  # without the noise of the counts they would be too small
        assert (
            rms(
                np.concatenate(
                    [
                        (opened.share(column).estimate - SHARES)
                        / np.sqrt(2 * SHARES * (1 - SHARES) / N)
                        for column in NAMES
                    ]
                )
            )
            > 1.5
        )
    for column in NAMES:
        assert opened.mean(column).estimate == pytest.approx(rows[column].mean())
        share = opened.share(column)
        np.testing.assert_allclose(
            share.estimate,
            rows[column].value_counts(normalize=True).reindex(range(1, 6), fill_value=0.0),
        )
        assert (share.estimate >= 0).all()
        of_rows = np.sqrt(SHARES * (1 - SHARES) / opened.n_rows)
        assert (
            share.standard_error > 1.1 * of_rows
        ).all()  # the draw of the reference, and its noise
        assert (share.standard_error < 4.0 * of_rows).all()


def test_tables_along_a_tree_hold_the_noise_of_their_counts(release: Any) -> None:
    opened = release("tree")
    edges = opened.card["mechanism"]["edges"]
    z = []
    for one, two in edges:
        stay = STAY ** abs(int(one[1:]) - int(two[1:]))
        truth = N * (stay * np.diag(SHARES) + (1 - stay) * np.outer(SHARES, SHARES))
        found = opened.crosstab(one, two)
        z.append(errors(found, truth))
        assert (
            found.standard_error.to_numpy() > 1.01 * np.sqrt(2 * truth * (1 - truth / N))
        ).mean() > 0.8
    check(np.concatenate(z))


def test_later_releases_of_a_growing_table_are_corrected(release: Any) -> None:
    """Their reference is made of earlier rows: their cards tell of no noise of counts, and of no held-out rows."""
    for name in ("histogram", "holdout"):
        content = release(name).card
        content["accounting"]["events"]["events"] = content["accounting"]["events"]["events"][-1:]
        content["guarantee"]["unprotected"]["fraction"] = 0.0
        found = replace(release(name), content=content).share("c0")
        assert not np.allclose(found.estimate, release(name).share("c0").estimate)
        bias = 0.0 if found.bias_bound is None else found.bias_bound
        assert (np.abs(found.estimate - SHARES) <= 4 * found.standard_error + bias).all()


def test_a_level_without_rows_is_not_known_to_be_absent(release: Any) -> None:
    opened = release("holdout")
    shares = pd.Series([1.0, 0.0])
    found = opened._points("side")
    assert found.sampling == 1 / opened.n_rows
    assert (found._share_error(shares.to_numpy(), None, None) > 0).all()


def test_two_columns_with_noise_of_their_own_are_refused_where_nothing_is_left(
    release: Any,
) -> None:
    opened = release("histogram")
    with pytest.raises(
        dpdask.SpecError, match="the bound on the bias is larger than the estimate in"
    ):
        opened.crosstab("c0", "c1")


def test_a_group_of_equal_values_has_no_standard_error() -> None:
    frame = pd.DataFrame({"x": [0.1, 0.1, 0.1, 2.0, 3.0], "g": ["a", "a", "a", "b", "b"]})
    points = Points(
        frame=frame, weights=np.ones(5), n_rows=5.0, sampling=0.2, levels={"g": ["a", "b", "c"]}
    )
    found = points.mean("x", by="g")
    assert found.estimate.loc["a"] == pytest.approx(0.1)
    assert found.standard_error.isna().tolist() == [True, False, True]
    assert found.standard_error.loc["b"] > 0.0
    assert any("all equal have no standard error" in limit for limit in found.limits)
    assert not any("all equal" in limit for limit in points.mean("x").limits)


@pytest.mark.parametrize(
    "values",
    [[1.0, 1.0, np.nan], [dt.date(2020, 1, 1), dt.date(2020, 1, 1), None]],
    ids=["numbers", "dates"],
)
@pytest.mark.parametrize("weight", [0.0, -1.0])
def test_rows_that_weigh_nothing_have_no_mean(values: list[Any], weight: float) -> None:
    """Noise may weigh them less than nothing, and all other rows are null."""
    frame = pd.DataFrame({"x": pd.Series(values), "g": ["a", "a", "a"]})
    given = {
        "weights": np.array([weight, weight, 9.0]),
        "n_rows": 7.0,
        "sampling": 0.1,
        "levels": {"g": ["a"]},
        "dates": find_scales(frame),
    }
    points = Points(frame=frame, **given)
    with pytest.raises(
        SpecError, match="column 'x': no weight above 0 is left for rows with a value; release with"
    ):
        points.mean("x")
    assert points.mean("x", by="g").standard_error.isna().all()
    repr(points.mean("x", by="g"))
