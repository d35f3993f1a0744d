"""The simulated census and MovieLens: their distributions, their files, their schema and what they refuse."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from e2e.bad_input import command
from scipy.stats import chi2

from dpdask import simulate as census
from dpdask import simulate as movielens
from dpdask.codec import codec_for
from dpdask.errors import OutputError, UsageError
from dpdask.schema import Schema
from dpdask.simulate import (
    CENSUS_ATTRIBUTES,
    CENSUS_LEVELS,
    ML25M_MOVIES,
    ML25M_RATING_COUNTS,
    ML25M_ROWS,
    ML25M_USERS,
    simulate_census,
    simulate_movielens,
)

N_ROWS = 300_000
BOTH = pytest.mark.parametrize("simulate", [simulate_census, simulate_movielens])


def read(folder):
    return pa.concat_tables(pq.read_table(path) for path in sorted(folder.iterdir()))


@pytest.fixture(scope="module")
def people(tmp_path_factory):
    out = tmp_path_factory.mktemp("simulated") / "lake" / "people"
    simulate_census(str(out), n_rows=N_ROWS, seed=1)
    return read(out)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("simulated") / "lake" / "ratings"
    simulate_movielens(str(out), n_rows=N_ROWS, seed=1, rows_per_file=70_000)
    return out


@pytest.fixture(scope="module")
def ratings(folder):
    return read(folder)


# The census


@pytest.mark.parametrize("shape", [(27, 674), (1, 2), (1, 64), (5, 11), (1000, 2000), (40, 2560)])
def test_sizes_of_the_census_add_up(shape):
    sizes = census._sizes(*shape)
    assert (len(sizes), sum(sizes)) == shape
    assert min(sizes) >= 2
    assert max(sizes) < 400
    assert shape != (27, 674) or (80 < max(sizes) <= 100 and 10 < np.median(sizes) < 20)


def test_people_follow_the_distribution_given_the_parent_and_some_pairs_are_strong_weak_or_impossible(
    people,
):
    columns = [column.to_numpy() for column in people.columns]
    kinds = census._Relation
    dependence = {kind: [] for kind in kinds}
    for number, attribute in enumerate(
        census._model(census._sizes(CENSUS_ATTRIBUTES, CENSUS_LEVELS), 1)
    ):
        edges = np.pad(
            attribute.edges.astype(float) / 2**32,
            ((0, 0), (1, 1)),
            constant_values=((0, 0), (0.0, 1.0)),
        )
        table = np.diff(edges, axis=1)
        counts = np.zeros(table.shape)
        np.add.at(
            counts,
            (columns[attribute.parent] if number else np.zeros(N_ROWS, np.int8), columns[number]),
            1,
        )
        barred = np.zeros(table.shape, bool)
        if attribute.relation is kinds.EXCLUSIVE:
            barred[: -(-len(table) // 3), -(-table.shape[1] // 3) :] = True
        assert ((table == 0) == barred).all()
        assert not counts[barred].any()
        expected = table * counts.sum(axis=1, keepdims=True)
        seen = expected > 5
        assert chi2.sf(((counts - expected)[seen] ** 2 / expected[seen]).sum(), seen.sum()) > 1e-6
        joint = counts / N_ROWS
        if number:
            dependence[attribute.relation].append(
                np.abs(joint - np.outer(joint.sum(axis=1), joint.sum(axis=0))).sum() / 2
            )
    strong, weak, exclusive, independent = (
        np.median(dependence[k])
        for k in (kinds.STRONG, kinds.WEAK, kinds.EXCLUSIVE, kinds.INDEPENDENT)
    )
    assert strong > 0.2
    assert exclusive > 0.1
    assert 0.01 < weak < 0.1
    assert independent < 0.02
    excess = [np.bincount(column).max() / N_ROWS * (int(column.max()) + 1) for column in columns]
    assert min(excess) > 1.1
    assert np.median(excess) > 2.5
    assert (
        columns[25][:131_072] == columns[25][131_072:262_144]
    ).mean() < 0.9  # blocks are drawn apart


@pytest.mark.parametrize("rows_per_file", [70_000, 131_073])
def test_neither_files_nor_the_number_of_rows_change_a_row_of_the_census(
    tmp_path, people, rows_per_file
):
    summary = simulate_census(
        str(tmp_path / "out"), n_rows=N_ROWS, seed=1, rows_per_file=rows_per_file
    )
    assert read(tmp_path / "out").equals(people)
    lengths = [pq.read_metadata(path).num_rows for path in sorted((tmp_path / "out").iterdir())]
    assert summary["files"] == len(lengths) == -(-N_ROWS // rows_per_file)
    assert set(lengths[:-1]) == {rows_per_file}
    simulate_census(str(tmp_path / "fewer"), n_rows=131_072, seed=1)
    assert read(tmp_path / "fewer").equals(people[:131_072])


@pytest.mark.parametrize(
    ("shape", "n_levels"),
    [
        ({}, 674),
        ({"n_attributes": 54}, 1348),
        ({"n_attributes": 40, "n_levels": 80}, 80),
        ({"n_attributes": 4, "n_levels": 256}, 256),
    ],
)
def test_the_schema_declares_every_value_of_the_census(tmp_path, shape, n_levels):
    place = str(tmp_path / "out-schema.yaml")
    assert (
        simulate_census(f"{tmp_path}/out/", n_rows=9_000, **shape).items()
        >= {"schema": place, "levels": n_levels}.items()
    )
    schema, table = Schema.from_yaml(place), read(tmp_path / "out")
    schema.check_names(table.column_names)
    assert list(schema.privatised) == table.column_names
    sizes = []
    for name, column in schema.columns.items():
        codes = codec_for(name, column, table.schema.field(name).type).encode(
            table[name].combine_chunks()
        )
        assert (codes == table[name].to_numpy()).all()
        sizes.append(len(column.levels or ()))
    assert sizes == census._sizes(len(sizes), n_levels)
    assert {column.kind for column in schema.columns.values()} == (
        {"categorical"} if max(sizes) == 2 else {"categorical", "discrete"}
    )
    assert set(table.schema.types) == {pa.int16() if max(sizes) > 128 else pa.int8()}
    assert table.schema.metadata is None


# MovieLens


def total_variation(ratings):
    counts = np.bincount((ratings * 2).astype(int) - 1, minlength=10)
    return float(
        np.abs(counts / len(ratings) - np.array(ML25M_RATING_COUNTS) / ML25M_ROWS).sum() / 2
    )


def test_rows_files_types_and_order_of_ratings(folder, ratings):
    footers = [pq.read_metadata(path) for path in sorted(folder.iterdir())]
    assert [path.name for path in sorted(folder.iterdir())] == [
        f"ratings-{k:05d}.parquet" for k in range(5)
    ]
    assert [footer.num_rows for footer in footers] == [70_000] * 4 + [20_000]
    assert {
        (footer.num_row_groups, footer.metadata, footer.row_group(0).column(3).compression)
        for footer in footers
    } == {(1, None, "ZSTD")}
    types = [
        ("userId", pa.int32()),
        ("movieId", pa.int32()),
        ("rating", pa.float32()),
        ("timestamp", pa.int64()),
    ]
    assert ratings.schema.equals(pa.schema(types), check_metadata=True)
    user, movie, seconds = (ratings[name].to_numpy() for name in ("userId", "movieId", "timestamp"))
    assert (np.diff(user) >= 0).all()
    assert (np.unique(user) == np.arange(1, N_ROWS * ML25M_USERS // ML25M_ROWS + 1)).all()
    assert movie.min() >= 1
    assert np.datetime64(int(seconds.min()), "s") >= np.datetime64("1995-01-09")
    assert np.datetime64(int(seconds.max()), "s") < np.datetime64("2019-11-22")
    assert (movie[:70_000] == movie[70_000:140_000]).mean() < 0.01  # files are drawn apart


@pytest.mark.parametrize("shape", [{"n_users": 1}, {"n_movies": 1}, {"n_users": 3, "n_movies": 10}])
def test_the_published_frequencies_hold(tmp_path, ratings, shape):
    assert total_variation(ratings["rating"].to_numpy()) < 0.01
    simulate_movielens(str(tmp_path / "out"), n_rows=100_000, **shape)
    assert total_variation(read(tmp_path / "out")["rating"].to_numpy()) < 0.015


def test_users_and_movies_are_skewed_and_explain_their_part_of_the_ratings(ratings):
    rating = ratings["rating"].to_numpy().astype(float)
    rating -= rating.mean()
    explained = []
    for name in ("userId", "movieId"):
        ids = ratings[name].to_numpy()
        counts, sums, squares = (np.bincount(ids, weights) for weights in (None, rating, rating**2))
        explained.append(
            (sums**2 - squares).sum() / (counts * (counts - 1)).sum() / rating.var()
        )  # correlation of two ratings of one
    assert 0.1 < explained[0] < 0.3
    assert 0.15 < explained[1] < 0.35
    of_users, of_movies = (
        np.bincount(ratings[name].to_numpy())[1:] for name in ("userId", "movieId")
    )
    assert of_users.min() >= 20
    assert 65 < np.median(of_users) < 77
    assert of_users.max() > 3_000
    assert 0.0028 < of_movies.max() / N_ROWS < 0.0048
    assert len(of_movies) <= round(ML25M_MOVIES * (N_ROWS / ML25M_ROWS) ** 0.6)
    expected = movielens._movie_shares(ML25M_MOVIES) * ML25M_ROWS  # at the scale of the original
    assert expected[0] / ML25M_ROWS == pytest.approx(0.0033, abs=1e-4)
    assert 4 < np.median(expected) < 9


@pytest.mark.parametrize(("n_rows", "n_users"), [(1, None), (5, 5), (100, None), (1_000, 999)])
def test_tiny_tables(tmp_path, n_rows, n_users):
    summary = simulate_movielens(str(tmp_path), n_rows=n_rows, n_users=n_users, rows_per_file=3)
    users = read(tmp_path)["userId"].to_numpy()
    assert len(users) == n_rows
    assert (np.unique(users) == np.arange(1, summary["users"] + 1)).all()


# Both


@BOTH
def test_a_seed_fixes_every_byte_and_another_changes_them(tmp_path, simulate):
    bytes_ = []
    for name, seed in (("one", 1), ("same", 1), ("other", 2)):
        simulate(str(tmp_path / name), n_rows=1_000, seed=seed)
        bytes_.append(next((tmp_path / name).iterdir()).read_bytes())
    assert bytes_[0] == bytes_[1] != bytes_[2]


OUT_OF_RANGE = {"n_rows": (0, 10**400), "seed": (-1, 1 << 64), "rows_per_file": (0, (1 << 26) + 1)}
OF_ONE = {
    simulate_census: {"n_attributes": (0, 10_001), "n_levels": (53, 64 * 27 + 1)},
    simulate_movielens: {"n_users": (0, 11), "n_movies": (0, 1 << 31)},
}


@BOTH
def test_numbers_out_of_range_and_urls_are_refused(tmp_path, simulate):
    for name, values in (OUT_OF_RANGE | OF_ONE[simulate]).items():
        for value in values:
            with pytest.raises(UsageError, match=f"^{name}: ") as caught:
                simulate(str(tmp_path / "out"), **{"n_rows": 10, name: value})
            assert caught.value.exit_code == 2
    with pytest.raises(UsageError, match="local folders only"):
        simulate("s3://lake/people", n_rows=1)
    assert list(tmp_path.iterdir()) == []


@BOTH
@pytest.mark.parametrize(
    ("mine", "message"),
    [("out/mine", "not empty"), ("out", "not a folder"), ("out-schema.yaml", "exists")],
)
def test_an_occupied_output_is_refused_and_left_alone(tmp_path, simulate, mine, message):
    if message == "exists" and simulate is simulate_movielens:
        return
    place = tmp_path / mine
    place.parent.mkdir(exist_ok=True)
    place.write_text("kept")
    with pytest.raises(OutputError, match=message) as caught:
        simulate(str(tmp_path / "out"), n_rows=10)
    assert caught.value.exit_code == 73
    assert [path.read_text() for path in tmp_path.rglob("*") if path.is_file()] == ["kept"]


@BOTH
def test_a_failed_write_is_an_output_error_and_leaves_no_partial_file(
    tmp_path, simulate, monkeypatch
):
    def full_disk(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pq.ParquetWriter, "write_table", full_disk)
    with pytest.raises(OutputError, match="cannot be written"):
        simulate(str(tmp_path / "out"), n_rows=10)
    assert list(tmp_path.rglob("*")) == [tmp_path / "out"]


def test_the_command_for_the_census(tmp_path):
    out = str(tmp_path / "people")
    given = ("simulate", "census", "--rows", "1000", "--attributes", "5", "--out", out)
    ended = command(*given, "--levels", "40", "--rows-per-file", "400")
    assert (ended.code, ended.out) == (
        0,
        f"{out}: 1,000 simulated people, 5 attributes of 40 levels, in 3 files; schema {out}-schema.yaml\n",
    )
    last = json.loads(ended.err.splitlines()[-1])
    assert (last["stage"], last["done"], last["total"]) == ("simulate", 3, 3)
    assert command(*given).code == 73
    assert (
        command(
            "simulate",
            "census",
            "--rows",
            "100",
            "--attributes",
            "9",
            "--binary",
            "--seed",
            "3",
            "--out",
            f"{out}2",
        ).code
        == 0
    )
    assert {
        column.levels for column in Schema.from_yaml(f"{out}2-schema.yaml").columns.values()
    } == {(0, 1)}
    for wrong in (
        ["--rows", "-1"],
        ["--rows", "many"],
        ["--rows", "9", "--levels", "5"],
        ["--rows", "9", "--binary", "--levels", "54"],
    ):
        ended = command("simulate", "census", *wrong, "--out", f"{out}3")
        assert (ended.code, len(ended.err.splitlines())) == (2, 1)
    assert not Path(f"{out}3").exists()
