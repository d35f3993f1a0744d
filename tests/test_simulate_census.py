"""The simulated census: its shape, its distribution, its structural zeros, its files, its schema and its refusals."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray
from scipy.stats import chi2, chi2_contingency

from dpdask import simulate as census
from dpdask.codec import codec_for
from dpdask.errors import OutputError, UsageError
from dpdask.schema import Schema
from dpdask.simulate import CENSUS_ATTRIBUTES, CENSUS_LEVELS, simulate_census

N_ROWS = 300_000
SHAPES = [(27, 674), (1, 2), (1, 64), (2, 4), (2, 128), (5, 11), (1000, 2000), (40, 2560)]


def read(folder: Path) -> pa.Table:
    return pa.concat_tables(pq.read_table(path) for path in sorted(folder.iterdir()))


def probabilities(attribute: census._Attribute) -> NDArray[np.float64]:
    """P(level | parent's level), from the edges that are drawn from."""
    n_parent = len(attribute.edges)
    return np.diff(
        attribute.edges.astype(np.float64) / 2**32,
        axis=1,
        prepend=np.zeros((n_parent, 1)),
        append=np.ones((n_parent, 1)),
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("simulated") / "lake" / "people"
    simulate_census(str(out), n_rows=N_ROWS, seed=1)
    return out


@pytest.fixture(scope="module")
def columns(folder: Path) -> list[NDArray[np.int8]]:
    return [column.to_numpy() for column in read(folder).columns]


@pytest.fixture(scope="module")
def model() -> list[census._Attribute]:
    return census._model(census._sizes(CENSUS_ATTRIBUTES, CENSUS_LEVELS), 1)


# ---- sizes


@pytest.mark.parametrize(("n_attributes", "n_levels"), SHAPES)
def test_sizes_add_up(n_attributes: int, n_levels: int):
    sizes = census._sizes(n_attributes, n_levels)
    assert (len(sizes), sum(sizes)) == (n_attributes, n_levels)
    assert min(sizes) >= 2
    assert max(sizes) < 400


def test_sizes_of_the_benchmark():
    sizes = census._sizes(CENSUS_ATTRIBUTES, CENSUS_LEVELS)
    assert min(sizes) == 2
    assert 80 < max(sizes) <= 100
    assert 10 < np.median(sizes) < 20
    assert sizes not in (sorted(sizes), sorted(sizes, reverse=True))
    assert set(census._sizes(50, 100)) == {2}


# ---- distribution


def test_drawing_inverts_the_edges():
    rng = np.random.default_rng(0)
    for n_levels in (2, 3, 4, 7, 64):
        edges = np.sort(
            rng.integers(0, 2**32, (5, n_levels - 1), endpoint=True).astype(np.uint64), axis=1
        )
        edges[0, 0], edges[1], edges[2] = (
            0,
            2**32,
            edges[2, :1],
        )  # impossible: the first level, all but the first, those between
        uniform = np.concatenate([rng.integers(0, 2**32, 2_000), [0, 2**32 - 1]]).astype(np.uint32)
        given = rng.integers(0, 5, len(uniform)).astype(np.int8)
        out = np.zeros(len(uniform), np.int16)
        census._draw(uniform, given, edges, out)
        assert (out == (edges[given] <= uniform[:, None]).sum(axis=1)).all()
        assert not (out[given == 0] == 0).any()
        assert not out[given == 1].any()


def test_rows_follow_the_distribution_given_the_parent(
    columns: list[NDArray[np.int8]], model: list[census._Attribute]
):
    for column, attribute in zip(columns, model, strict=True):
        given = (
            columns[attribute.parent] if attribute is not model[0] else np.zeros(N_ROWS, np.int8)
        )
        table = probabilities(attribute)
        counts = np.zeros(table.shape)
        np.add.at(counts, (given, column), 1)
        expected = table * counts.sum(axis=1, keepdims=True)
        assert not counts[table == 0].any()
        seen = expected > 5
        statistic = ((counts - expected)[seen] ** 2 / expected[seen]).sum()
        assert chi2.sf(statistic, seen.sum()) > 1e-6


def test_there_are_strong_weak_independent_and_exclusive_pairs(
    columns: list[NDArray[np.int8]], model: list[census._Attribute]
):
    dependence: dict[census._Relation, list[float]] = {
        relation: [] for relation in census._Relation
    }
    for column, attribute in list(zip(columns, model, strict=True))[1:]:
        counts = np.zeros(probabilities(attribute).shape)
        np.add.at(counts, (columns[attribute.parent], column), 1)
        counts = counts[counts.sum(axis=1) > 0][:, counts.sum(axis=0) > 0]
        p_value = chi2_contingency(counts).pvalue
        if attribute.relation is census._Relation.INDEPENDENT:
            assert p_value > 1e-6
        else:
            assert p_value < 1e-6
        joint = counts / counts.sum()
        dependence[attribute.relation].append(
            np.abs(joint - np.outer(joint.sum(axis=1), joint.sum(axis=0))).sum() / 2
        )
    kinds = census._Relation
    strong, weak, exclusive, independent = (
        np.median(dependence[kind])
        for kind in (kinds.STRONG, kinds.WEAK, kinds.EXCLUSIVE, kinds.INDEPENDENT)
    )
    assert strong > 0.2
    assert exclusive > 0.1
    assert 0.01 < weak < 0.1
    assert independent < 0.02


@pytest.mark.parametrize("shape", [(27, 674), (20, 40)])
def test_exclusive_pairs_cannot_occur(shape: tuple[int, int]):
    sizes = census._sizes(*shape)
    exclusive = 0
    for size, attribute in zip(sizes, census._model(sizes, 0), strict=True):
        table = probabilities(attribute)
        barred = np.zeros(table.shape, bool)
        if attribute.relation is census._Relation.EXCLUSIVE:
            exclusive += 1
            barred[: -(-len(table) // 3), -(-size // 3) :] = True
        assert ((table == 0) == barred).all()
    assert exclusive >= shape[0] // 4


def test_marginals_are_skewed(columns: list[NDArray[np.int8]]):
    excess = [np.bincount(column).max() / N_ROWS * (int(column.max()) + 1) for column in columns]
    assert min(excess) > 1.1
    assert np.median(excess) > 2.5


# ---- files


def test_columns_types_and_row_groups(tmp_path: Path, folder: Path):
    table = read(folder)
    assert table.schema.equals(
        pa.schema([(f"a{number:02}", pa.int8()) for number in range(27)]), check_metadata=True
    )
    assert len(table) == N_ROWS
    assert sum(column.null_count for column in table.columns) == 0
    [path] = folder.iterdir()
    footer = pq.read_metadata(path)
    assert [footer.row_group(k).num_rows for k in range(footer.num_row_groups)] == [
        131_072,
        131_072,
        37_856,
    ]
    assert footer.metadata is None
    simulate_census(str(tmp_path / "wide"), n_rows=10, n_attributes=101, n_levels=6_000)
    wide = read(tmp_path / "wide")
    assert (wide.column_names[0], wide.column_names[-1]) == ("a000", "a100")
    assert set(wide.schema.types) == {pa.int16()}


@pytest.mark.few(2)
@pytest.mark.parametrize("rows_per_file", [70_000, 131_072, 131_073, 299_999])
def test_the_split_into_files_changes_no_row(tmp_path: Path, folder: Path, rows_per_file: int):
    summary = simulate_census(
        str(tmp_path / "out"), n_rows=N_ROWS, seed=1, rows_per_file=rows_per_file
    )
    assert read(tmp_path / "out").equals(read(folder))
    lengths = [pq.read_metadata(path).num_rows for path in sorted((tmp_path / "out").iterdir())]
    assert summary["files"] == len(lengths) == -(-N_ROWS // rows_per_file)
    assert set(lengths[:-1]) == {rows_per_file}


def test_a_seed_fixes_every_byte_and_another_changes_them(tmp_path: Path):
    for name, seed in (("one", 1), ("same", 1), ("other", 2)):
        simulate_census(str(tmp_path / name), n_rows=1_000, seed=seed)
    one, same, other = (
        (tmp_path / name / "people-00000.parquet").read_bytes() for name in ("one", "same", "other")
    )
    assert one == same != other


def test_blocks_are_drawn_apart(columns: list[NDArray[np.int8]]):
    first, second = columns[25][:131_072], columns[25][131_072:262_144]
    assert (first == second).mean() < 0.9


def test_the_distribution_does_not_depend_on_the_number_of_rows(tmp_path: Path, folder: Path):
    simulate_census(str(tmp_path / "more"), n_rows=N_ROWS + 200_000, seed=1)
    assert read(tmp_path / "more")[:262_144].equals(read(folder)[:262_144])


def test_summary_and_progress(tmp_path: Path):
    seen: list[tuple[int, int]] = []
    summary = simulate_census(
        str(tmp_path / "out"),
        n_rows=2_500,
        n_attributes=3,
        n_levels=9,
        rows_per_file=1_000,
        on_file=lambda *at: seen.append(at),
    )
    size = sum(path.stat().st_size for path in (tmp_path / "out").iterdir())
    place = str(tmp_path / "out-schema.yaml")
    assert summary == {
        "rows": 2_500,
        "attributes": 3,
        "levels": 9,
        "files": 3,
        "bytes": size,
        "schema": place,
    }
    assert seen == [(1, 3), (2, 3), (3, 3)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out-schema.yaml"]


@pytest.mark.parametrize(("n_attributes", "n_levels"), [(1, None), (2, None), (54, 1348)])
def test_levels_are_in_proportion(tmp_path: Path, n_attributes: int, n_levels: int | None):
    summary = simulate_census(str(tmp_path / "out"), n_rows=1, n_attributes=n_attributes)
    assert summary["levels"] == (n_levels or n_attributes * 674 // 27)


# ---- schema


@pytest.mark.parametrize(
    "shape", [{}, {"n_attributes": 40, "n_levels": 80}, {"n_attributes": 4, "n_levels": 256}]
)
def test_the_schema_declares_every_value(tmp_path: Path, shape: dict[str, int]):
    simulate_census(str(tmp_path / "out"), n_rows=20_000, **shape)
    schema = Schema.from_yaml(tmp_path / "out-schema.yaml")
    table = ds.dataset(tmp_path / "out").to_table()
    schema.check_names(table.column_names)
    assert list(schema.privatised) == table.column_names
    sizes = []
    for name, column in schema.columns.items():
        codes = codec_for(name, column, table.schema.field(name).type).encode(
            table[name].combine_chunks()
        )
        assert (codes == table[name].to_numpy()).all()
        sizes.append(len(column.levels or ()))
    assert sizes == census._sizes(len(sizes), sum(sizes))
    assert {column.kind for column in schema.columns.values()} == (
        {"categorical"} if max(sizes) == 2 else {"categorical", "discrete"}
    )


def test_a_schema_is_never_overwritten(tmp_path: Path):
    (tmp_path / "out-schema.yaml").write_text("mine")
    with pytest.raises(OutputError, match=r"out-schema\.yaml: exists"):
        simulate_census(str(tmp_path / "out"), n_rows=10)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]


def test_a_place_may_end_with_a_slash(tmp_path: Path):
    assert simulate_census(f"{tmp_path}/out/", n_rows=10)["schema"] == str(
        tmp_path / "out-schema.yaml"
    )


# ---- refusals


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n_rows", 0),
        ("n_rows", 10**400),
        ("n_attributes", 0),
        ("n_attributes", 10_001),
        ("n_levels", 53),
        ("n_levels", 64 * 27 + 1),
        ("seed", -1),
        ("seed", 1 << 64),
        ("rows_per_file", 0),
        ("rows_per_file", (1 << 26) + 1),
    ],
)
def test_numbers_out_of_range_are_refused(tmp_path: Path, name: str, value: int):
    with pytest.raises(UsageError, match=f"^{name}: "):
        simulate_census(str(tmp_path / "out"), **{"n_rows": 10, name: value})
    assert list(tmp_path.iterdir()) == []


def test_a_url_is_refused():
    with pytest.raises(UsageError, match="local folders only"):
        simulate_census("s3://lake/people", n_rows=1)


def test_an_occupied_output_is_refused_and_left_alone(tmp_path: Path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("kept")
    with pytest.raises(OutputError, match="not empty"):
        simulate_census(str(tmp_path / "out"), n_rows=10)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]
    assert not (tmp_path / "out-schema.yaml").exists()


def test_a_failed_write_is_an_output_error_and_leaves_no_partial_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def full_disk(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pq.ParquetWriter, "write_table", full_disk)
    with pytest.raises(OutputError, match="cannot be written"):
        simulate_census(str(tmp_path / "out"), n_rows=10)
    assert list((tmp_path / "out").iterdir()) == []
    assert not (tmp_path / "out-schema.yaml").exists()
