"""The simulated MovieLens: its counts, its marginal distribution, its skew, its files and its refusals."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numpy.random import PCG64, Generator
from numpy.typing import NDArray

from dpdask import simulate as movielens
from dpdask.errors import OutputError, UsageError
from dpdask.simulate import (
    ML25M_MOVIES,
    ML25M_RATING_COUNTS,
    ML25M_ROWS,
    ML25M_USERS,
    simulate_movielens,
)

N_ROWS = 300_000
SHARES = np.array(ML25M_RATING_COUNTS) / ML25M_ROWS
LEVELS = np.arange(1, 11) / 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("simulated") / "lake" / "ratings"
    simulate_movielens(str(out), n_rows=N_ROWS, seed=1, rows_per_file=70_000)
    return out


@pytest.fixture(scope="module")
def table(folder: Path) -> pa.Table:
    return pa.concat_tables(pq.read_table(path) for path in sorted(folder.iterdir()))


def total_variation(ratings: NDArray[np.float32]) -> float:
    levels, counts = np.unique(ratings, return_counts=True)
    assert set(levels) <= set(LEVELS)
    return float(
        np.abs(
            np.bincount(np.searchsorted(LEVELS, levels), counts, 10) / len(ratings) - SHARES
        ).sum()
        / 2
    )


def test_published_counts_add_up():
    assert sum(ML25M_RATING_COUNTS) == ML25M_ROWS


def test_rows_files_types_and_order(folder: Path, table: pa.Table):
    paths = sorted(folder.iterdir())
    assert [path.name for path in paths] == [f"ratings-{k:05d}.parquet" for k in range(5)]
    assert [pq.read_metadata(path).num_rows for path in paths] == [70_000] * 4 + [20_000]
    assert table.schema.equals(
        pa.schema(
            [
                ("userId", pa.int32()),
                ("movieId", pa.int32()),
                ("rating", pa.float32()),
                ("timestamp", pa.int64()),
            ]
        ),
        check_metadata=True,
    )
    assert sum(column.null_count for column in table.columns) == 0
    user, movie, seconds = (table[name].to_numpy() for name in ("userId", "movieId", "timestamp"))
    assert (np.diff(user) >= 0).all()
    assert (np.unique(user) == np.arange(1, N_ROWS * ML25M_USERS // ML25M_ROWS + 1)).all()
    assert movie.min() >= 1
    assert np.datetime64(int(seconds.min()), "s") >= np.datetime64("1995-01-09")
    assert np.datetime64(int(seconds.max()), "s") < np.datetime64("2019-11-22")


def test_footers_hold_one_zstd_row_group_and_no_metadata(folder: Path):
    for path in folder.iterdir():
        footer = pq.read_metadata(path)
        assert footer.num_row_groups == 1
        assert footer.metadata is None
        assert {footer.row_group(0).column(k).compression for k in range(4)} == {"ZSTD"}


def test_ratings_follow_the_published_frequencies(table: pa.Table):
    assert total_variation(table["rating"].to_numpy()) < 0.01


@pytest.mark.parametrize(
    "shape",
    [
        {"n_users": 1},
        {"n_movies": 1},
        {"n_users": 1, "n_movies": 1},
        {"n_users": 3, "n_movies": 10},
    ],
)
def test_frequencies_hold_for_few_users_and_movies(tmp_path: Path, shape: dict[str, int]):
    simulate_movielens(str(tmp_path / "out"), n_rows=100_000, **shape)
    assert (
        total_variation(
            pq.read_table(tmp_path / "out" / "ratings-00000.parquet")["rating"].to_numpy()
        )
        < 0.015
    )


def test_users_and_movies_explain_their_part_of_the_ratings(table: pa.Table):
    rating = table["rating"].to_numpy().astype(float)
    rating -= rating.mean()
    explained = {}
    for name in ("userId", "movieId"):
        ids = table[name].to_numpy()
        counts, sums, squares = (np.bincount(ids, weights) for weights in (None, rating, rating**2))
        pairs = (counts * (counts - 1)).sum()
        explained[name] = (
            (sums**2 - squares).sum() / pairs / rating.var()
        )  # correlation of two ratings of one user or movie
    assert 0.1 < explained["userId"] < 0.3
    assert 0.15 < explained["movieId"] < 0.35
    assert explained["userId"] < explained["movieId"]


def test_activity_is_skewed_at_a_scaled_size(table: pa.Table):
    counts = np.bincount(table["userId"].to_numpy())[1:]
    assert counts.sum() == N_ROWS
    assert counts.min() >= 20
    assert 65 < np.median(counts) < 77
    assert 150 < counts.mean() < 158
    assert counts.max() > 3_000


def test_popularity_is_skewed_at_a_scaled_size(table: pa.Table):
    counts = np.bincount(table["movieId"].to_numpy())[1:]
    assert 0.0028 < counts.max() / N_ROWS < 0.0048
    assert len(counts) <= round(ML25M_MOVIES * (N_ROWS / ML25M_ROWS) ** 0.6)
    assert np.median(counts) < 0.3 * counts.mean()


def test_shape_at_the_scale_of_the_original():
    counts = movielens._activity(ML25M_ROWS, ML25M_USERS, Generator(PCG64(0)))
    assert counts.sum() == ML25M_ROWS
    assert counts.min() >= 20
    assert 69 <= np.median(counts) <= 73
    assert 10_000 < counts.max() < 40_000
    expected = movielens._movie_shares(ML25M_MOVIES) * ML25M_ROWS
    assert expected.sum() == pytest.approx(ML25M_ROWS)
    assert expected[0] / ML25M_ROWS == pytest.approx(0.0033, abs=1e-4)
    assert 4 < np.median(expected) < 9


def test_movies_are_drawn_in_their_shares():
    shares = movielens._movie_shares(500)
    n = 1_000_000
    drawn = np.bincount(movielens._movie_rank((np.arange(n) + 0.5) / n, 500), minlength=500)
    assert np.abs(drawn - n * shares).max() < 2


def test_effects_are_standardised_under_their_weights():
    weights = movielens._movie_shares(5_000)
    effects, variance = movielens._effects(weights, 0.25, Generator(PCG64(0)))
    assert abs(np.average(effects, weights=weights)) < 1e-6
    assert variance == pytest.approx(0.25, rel=0.01)
    assert abs(np.corrcoef(effects, np.arange(5_000))[0, 1]) < 0.06


def test_a_seed_fixes_every_byte_and_another_changes_them(tmp_path: Path, folder: Path):
    for name, seed in (("same", 1), ("other", 2)):
        simulate_movielens(str(tmp_path / name), n_rows=N_ROWS, seed=seed, rows_per_file=70_000)
    for path in folder.iterdir():
        assert (tmp_path / "same" / path.name).read_bytes() == path.read_bytes()
        assert (tmp_path / "other" / path.name).read_bytes() != path.read_bytes()


def test_files_are_drawn_apart(folder: Path):
    ratings = [pq.read_table(path)["movieId"].to_numpy() for path in sorted(folder.iterdir())]
    for one, other in pairwise(ratings):
        assert (one[: len(other)] == other).mean() < 0.01


def test_the_split_into_files_leaves_users_as_they_are(tmp_path: Path, table: pa.Table):
    simulate_movielens(str(tmp_path / "out"), n_rows=N_ROWS, seed=1)
    assert pq.read_table(tmp_path / "out" / "ratings-00000.parquet")["userId"].equals(
        table["userId"]
    )


def test_summary_and_progress(tmp_path: Path):
    seen: list[tuple[int, int]] = []
    summary = simulate_movielens(
        str(tmp_path),
        n_rows=2_500,
        n_users=7,
        n_movies=3,
        rows_per_file=1_000,
        on_file=lambda *at: seen.append(at),
    )
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert summary == {"rows": 2_500, "users": 7, "movies": 3, "files": 3, "bytes": size}
    assert seen == [(1, 3), (2, 3), (3, 3)]


@pytest.mark.parametrize(
    ("n_rows", "n_users"), [(1, None), (1, 1), (5, 5), (100, None), (1_000, 999)]
)
def test_tiny_tables(tmp_path: Path, n_rows: int, n_users: int | None):
    summary = simulate_movielens(str(tmp_path), n_rows=n_rows, n_users=n_users, rows_per_file=3)
    users = np.concatenate(
        [pq.read_table(path)["userId"].to_numpy() for path in sorted(tmp_path.iterdir())]
    )
    assert len(users) == n_rows
    assert (np.unique(users) == np.arange(1, summary["users"] + 1)).all()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n_rows", 0),
        ("n_rows", -5),
        ("n_rows", 10**400),
        ("n_users", 0),
        ("n_users", 11),
        ("n_movies", 0),
        ("n_movies", 1 << 31),
        ("seed", -1),
        ("seed", 1 << 64),
        ("rows_per_file", 0),
        ("rows_per_file", (1 << 26) + 1),
    ],
)
def test_numbers_out_of_range_are_refused(tmp_path: Path, name: str, value: int):
    with pytest.raises(UsageError, match=f"^{name}: ") as caught:
        simulate_movielens(str(tmp_path / "out"), **{"n_rows": 10, name: value})
    assert caught.value.exit_code == 2
    assert not (tmp_path / "out").exists()


def test_a_url_is_refused():
    with pytest.raises(UsageError, match="local folders only"):
        simulate_movielens("s3://lake/ratings", n_rows=1)


def test_an_occupied_output_is_refused_and_left_alone(tmp_path: Path):
    (tmp_path / "mine").write_text("kept")
    with pytest.raises(OutputError, match="not empty") as caught:
        simulate_movielens(str(tmp_path), n_rows=10)
    assert caught.value.exit_code == 73
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    with pytest.raises(OutputError, match="not a folder"):
        simulate_movielens(str(tmp_path / "mine"), n_rows=10)


def test_a_failed_write_is_an_output_error_and_leaves_no_partial_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def full_disk(table: pa.Table, where: Path, **_: object) -> None:
        where.write_bytes(b"PAR1")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pq, "write_table", full_disk)
    with pytest.raises(OutputError, match="cannot be written"):
        simulate_movielens(str(tmp_path), n_rows=10)
    assert list(tmp_path.iterdir()) == []
