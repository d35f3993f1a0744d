"""The scripts of pipelines/movielens: the correlation table's numbers, and the recommender on a small table of known make."""

import json
import os

import numpy as np
import pandas as pd
import pytest

from dpdask.channels import laplace, optimal
from pipelines.movielens import correlations, persons, recommender

pytestmark = pytest.mark.more


@pytest.fixture(scope="module")
def rows():
    return correlations.table()


def of(rows, kind):
    return np.array([row["correlation"] for row in rows if row["channel"] == kind])


def test_correlations_reproduce_the_measured_ones(rows):
    np.testing.assert_allclose(of(rows, "laplace"), [0.205, 0.374, 0.506, 0.604], atol=1e-3)
    assert (of(rows, "optimal") >= [0.300, 0.538, 0.735, 0.857]).all()
    assert (of(rows, "laplace-calibrated") > of(rows, "laplace")).all()
    assert (of(rows, "optimal") > of(rows, "laplace-calibrated")).all()
    assert (of(rows, "optimal") > of(rows, "optimal-unbiased")).all()
    assert (of(rows, "optimal-unbiased") >= [0.19, 0.40, 0.61, 0.76]).all()
    assert all(row["epsilon_exact"] <= row["epsilon"] for row in rows)


def made(n_users=150, n_movies=60, share=0.5, seed=3):
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


def test_pseudo_ratings_are_unbiased_where_the_channel_allows_and_moderate_where_it_does_not():
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


def test_the_experiment_runs_on_a_file_and_reports(tmp_path, capsys):
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


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(
    "DPDASK_ML_1M" not in os.environ,
    reason="DPDASK_ML_1M names no MovieLens-1M ratings file, which may not be passed on",
)
def test_the_recommender_on_movielens_1m_keeps_its_promise(capsys):
    recommender.main([os.environ["DPDASK_ML_1M"], "--epsilons", "1", "4", "--json"])
    low, high = json.loads(capsys.readouterr().out)["acceptance"]
    assert low["closed"] >= 0.30
    assert high["closed"] >= 0.60
    assert max(low["histogram_over_holdout"], high["histogram_over_holdout"]) <= 0.02


def test_persons_are_released_and_measured(tmp_path, capsys):
    """Simulated users: the release is nearer than independent columns where a user's ratings are alike."""
    rng, n = np.random.default_rng(4), 800
    user = np.repeat(np.arange(1, n + 1), 12)
    taste = np.repeat(rng.normal(size=n), 12)
    ratings = pd.DataFrame(
        {
            "UserID": user,
            "MovieID": rng.geometric(0.05, len(user)),
            "Rating": np.clip(np.rint(3 + taste + rng.normal(size=len(user))), 1, 5),
            "Timestamp": 9.6e8 + 3_600 * np.repeat(rng.integers(0, 9_000, n), 12),
        }
    )
    ratings.loc[::5, "Timestamp"] = np.nan
    users = pd.DataFrame(
        {
            "UserID": np.arange(1, n + 1),
            "Gender": rng.choice(["F", "M"], n),
            "Age": rng.choice([1, 18, 25, 35, 45, 50, 56], n),
            "Occupation": rng.integers(0, 21, n),
        }
    )
    for name, frame in (("ratings", ratings), ("users", users)):
        frame.to_parquet(tmp_path / f"{name}.parquet")
    paths = [str(tmp_path / name) for name in ("ratings.parquet", "users.parquet", "out")]
    persons.main([*paths, "--epsilon", "8", "--max-rows", "10", "--seeds", "1"])
    shown = capsys.readouterr().out
    line = next(each for each in shown.splitlines() if "a column of one row and one of" in each)
    found, independent = (
        float(line.split(f"{side} ")[1].split()[0].strip(","))
        for side in ("release", "independent")
    )
    assert found < 0.5 * independent
    assert "variances, Rating" in shown
