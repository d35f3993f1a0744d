"""The scripts of pipelines/movielens: the correlation table's numbers, and the recommender on a small table of known make."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from dpdask.channels import laplace, optimal
from pipelines.movielens import correlations, recommender

pytestmark = pytest.mark.more

EPSILONS = (1.0, 2.0, 3.0, 4.0)


@pytest.fixture(scope="module")
def rows() -> list[dict[str, float | str]]:
    return correlations.table()


def of(rows: list[dict[str, float | str]], kind: str) -> np.ndarray:
    return np.array([row["correlation"] for row in rows if row["channel"] == kind])


def test_correlations_reproduce_the_measured_ones(rows) -> None:
    np.testing.assert_allclose(of(rows, "laplace"), [0.205, 0.374, 0.506, 0.604], atol=1e-3)
    assert (of(rows, "optimal") >= [0.300, 0.538, 0.735, 0.857]).all()
    assert (of(rows, "laplace-calibrated") > of(rows, "laplace")).all()
    assert (of(rows, "optimal") > of(rows, "laplace-calibrated")).all()
    assert (of(rows, "optimal") > of(rows, "optimal-unbiased")).all()
    assert (of(rows, "optimal-unbiased") >= [0.19, 0.40, 0.61, 0.76]).all()


def test_no_channel_of_the_table_spends_more_than_epsilon(rows) -> None:
    assert all(row["epsilon_exact"] <= row["epsilon"] for row in rows)
    assert {row["epsilon"] for row in rows} == set(EPSILONS)


def test_correlation_is_that_of_drawn_values() -> None:
    rng = np.random.default_rng(1)
    probabilities, levels = np.array([0.2, 0.5, 0.3]), np.array([1.0, 2.0, 5.0])
    matrix = np.array([[0.7, 0.2, 0.1], [0.1, 0.6, 0.3], [0.2, 0.2, 0.6]])  # not invariant
    codes = rng.choice(3, 400_000, p=probabilities)
    out = (rng.random(len(codes))[:, None] > matrix.cumsum(axis=1)[codes, :-1]).sum(axis=1)
    drawn = np.corrcoef(levels[codes], levels[out])[0, 1]
    assert correlations.correlation(probabilities, matrix, levels) == pytest.approx(drawn, abs=0.01)
    assert correlations.correlation(probabilities, np.eye(3), levels) == pytest.approx(1.0)


def test_correlations_print_a_table_and_json(capsys) -> None:
    correlations.main([])
    printed = capsys.readouterr().out
    assert "laplace-calibrated" in printed
    assert "0.2050" in printed
    correlations.main(["--json"])
    assert len(json.loads(capsys.readouterr().out)["rows"]) == 16


def made(
    n_users: int = 150, n_movies: int = 60, share: float = 0.5, seed: int = 3
) -> recommender.Table:
    """Return whole ratings of mean, biases and two factors."""
    rng = np.random.default_rng(seed)
    users, movies = np.nonzero(rng.random((n_users, n_movies)) < share)
    signal = 3.4 + rng.normal(0, 0.4, n_users)[users] + rng.normal(0, 0.5, n_movies)[movies]
    signal += 0.7 * (
        rng.normal(size=(n_users, 2))[users] * rng.normal(size=(n_movies, 2))[movies]
    ).sum(axis=1)
    return recommender.Table(
        users=users,
        movies=movies,
        ratings=np.clip(np.rint(signal + rng.normal(0, 0.4, len(users))), 1, 5),
        shape=(n_users, n_movies),
    )


def test_alternating_least_squares_solves_each_ridge_regression() -> None:
    rng = np.random.default_rng(4)
    keys, others, values = rng.integers(0, 5, 80), rng.integers(0, 7, 80), rng.normal(size=80)
    fixed, solved = rng.normal(size=(7, 3)), np.zeros((6, 3))
    recommender.solve_side(*recommender.grouped(keys, others, values, 6), solved, fixed, 0.7)
    for key in range(5):
        design = fixed[others[keys == key]]
        np.testing.assert_allclose(
            solved[key],
            np.linalg.solve(design.T @ design + 0.7 * np.eye(3), design.T @ values[keys == key]),
        )
    np.testing.assert_array_equal(solved[5], 0.0)  # rated nothing


def test_factors_improve_on_biases_which_improve_on_the_mean() -> None:
    table = made()
    aside = np.random.default_rng(5).random(len(table.ratings)) < 0.25
    inner, outer = table.rows(~aside), table.rows(aside)
    model, penalties = recommender.tuned(inner, np.random.default_rng(6))
    biases = recommender.fit_biases(inner, 5.0, 5.0)
    assert penalties["factors"] is not None
    assert model.error(outer) < 0.8 * biases.error(outer) < 0.8 * np.var(outer.ratings)


def test_released_codes_follow_the_channel() -> None:
    matrix = laplace(np.full(5, 0.2), 2.0, ordered=True).matrix
    ratings = np.repeat(recommender.RATINGS, 40_000)
    table = recommender.Table(users=ratings, movies=ratings, ratings=ratings, shape=(1, 1))
    out = recommender.released(table, matrix, np.random.default_rng(7)).reshape(5, -1)
    found = np.array([np.bincount(row, minlength=5) for row in out]) / 40_000
    np.testing.assert_allclose(found, matrix, atol=0.015)


def test_pseudo_ratings_are_unbiased_where_the_channel_allows_and_moderate_where_it_does_not() -> (
    None
):
    mild = 0.6 * np.eye(5) + 0.08
    np.testing.assert_allclose(mild @ recommender.pseudo_ratings(mild), recommender.RATINGS)
    law = np.array([0.056, 0.108, 0.261, 0.349, 0.226])
    law /= law.sum()
    for matrix in (
        laplace(law, 1.0, ordered=True).matrix,
        optimal(law, 1.0, (recommender.RATINGS[:, None] - recommender.RATINGS) ** 2).matrix,
    ):
        g = recommender.pseudo_ratings(matrix)
        assert law @ g == pytest.approx(law @ recommender.RATINGS)
        assert np.abs(g - law @ g).max() < 10


def test_noisy_histograms_are_probabilities_with_the_noise_they_should_have() -> None:
    table, rng = made(), np.random.default_rng(8)
    draws = np.array([recommender.noisy_shares(table, 1.0, rng) for _ in range(3000)])
    np.testing.assert_allclose(draws.sum(axis=1), 1.0)
    assert (draws >= 0).all()
    q = np.exp(-0.5)
    law = recommender.shares(table)
    expected = np.sqrt(2 * q / (1 - q) ** 2 * ((1 - law) ** 2 + law**2 * 4)) / len(
        table.ratings
    )  # the sum is noisy too
    np.testing.assert_allclose(draws.std(axis=0), expected, rtol=0.15)


def test_the_experiment_runs_on_a_file_and_reports(tmp_path: Path, capsys) -> None:
    table = made()
    path = tmp_path / "ratings.parquet"
    pd.DataFrame(
        {
            "UserID": table.users + 1,
            "MovieID": 3 * table.movies,
            "Rating": table.ratings.astype("int8"),
        }
    ).to_parquet(path)
    recommender.main([str(path), "--epsilons", "4", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert len(found["results"]) == 10
    by = {(row["reference"], row["channel"], row["debiased"]): row for row in found["results"]}
    assert by["holdout", "none", False]["rows"] < by["histogram", "none", False]["rows"]
    for (reference, channel, _), row in by.items():
        assert row["rows"] == by[reference, "none", False]["rows"]
        assert (row["excess"] > 0) == (channel != "none")
    assert by["holdout", "optimal", True]["excess"] < by["holdout", "laplace", False]["excess"]
    [summary] = found["acceptance"]
    assert summary["closed"] == pytest.approx(
        1 - by["holdout", "optimal", True]["excess"] / by["holdout", "laplace", False]["excess"]
    )
    recommender.main([str(path), "--epsilons", "3", "--rows", "1500"])
    assert "optimal + debias closes" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(
    "DPDASK_ML_1M" not in os.environ,
    reason="DPDASK_ML_1M names no MovieLens-1M ratings file, which may not be passed on",
)
def test_the_recommender_on_movielens_1m_keeps_its_promise(capsys) -> None:
    recommender.main([os.environ["DPDASK_ML_1M"], "--epsilons", "1", "4", "--json"])
    low, high = json.loads(capsys.readouterr().out)["acceptance"]
    assert low["closed"] >= 0.30
    assert high["closed"] >= 0.60
    assert max(low["histogram_over_holdout"], high["histogram_over_holdout"]) <= 0.02
