"""What a released frame carries beside its rows: an index, categories, an order, and what stays in workers' memory."""

import cloudpickle
import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from distributed import Client
from e2e.helpers import categorical, continuous, discrete, lake, load, processes, write_job

import dpdask
from dpdask.engine import compute as engine_cluster
from dpdask.io.parquet import FOOTERS
from dpdask.jobs.run import run_job

RATING = discrete([1, 2, 3, 4, 5])
KNOWN = dpdask.Known(columns={"rating": {"probabilities": [0.2] * 5}})
REFUSED = r"its index would be published, but is neither row numbers \(a RangeIndex\) nor one column that the schema declares.*reset_index\(drop=True\)"
PLANTED = "planted-secret-name"


def schema(**columns):
    return dpdask.Schema.from_dict({"columns": {"rating": RATING, **columns}})


def dip(reference, **columns):
    return dpdask.DIP(schema(**columns), epsilon=2.0, reference=reference)


def ranges(**columns):
    return dpdask.IntervalMechanism(
        schema(**columns),
        columns={
            "rating": {"design": "case1", "anchors": {"name": "uniform", "loc": 0, "scale": 6}}
        },
    )


def rows(n=600, index=None):
    return pd.DataFrame(
        {"rating": np.random.default_rng(3).choice([1, 2, 3, 4, 5], n)}, index=index
    )


@pytest.fixture(scope="module")
def client(two_workers):
    with Client(two_workers) as found:
        yield found


NUMBERS = 123_456_789 + 7919 * np.random.default_rng(0).permutation(600)  # as of insured people


@pytest.mark.parametrize("reference", [KNOWN, dpdask.Histogram()], ids=lambda each: each.kind)
def test_an_index_that_nobody_declared_is_refused(reference):
    table = rows(index=pd.Index(NUMBERS))
    for frame in (table, rows()[rows()["rating"] > 2], rows().sample(frac=1, random_state=1)):
        with pytest.raises(dpdask.DataError, match=REFUSED) as caught:
            dip(reference).fit(frame)
        assert "123456789" not in str(caught.value)
    if reference is KNOWN:
        with pytest.raises(dpdask.DataError, match=REFUSED):
            dip(reference).fit(rows()).transform(table)
        with pytest.raises(dpdask.DataError, match=REFUSED):
            ranges().fit(table).transform(table)
    named = table.rename_axis("person")
    with pytest.raises(dpdask.DataError, match=r"index 'person'.*its role is not keep"):
        dip(reference, person={"role": "drop"}).fit(named)
    found = dip(reference, person={"role": "keep"}).fit(named).transform(named)
    assert set(found.index) <= set(NUMBERS)


def lazily(frame):
    return dip(KNOWN).fit(frame).transform(frame)


@pytest.mark.more
def test_every_partition_s_own_index_is_looked_at(client):
    """The empty frame that stands for a Dask frame says nothing of the partitions' indices."""
    whole = dd.from_pandas(rows(), npartitions=3)
    hidden = whole.map_partitions(lambda part: part.set_axis(NUMBERS[: len(part)]), meta=rows(0))
    named = whole.map_partitions(lambda part: part.rename_axis("person"), meta=rows(0))
    for frame in (
        dd.from_pandas(rows(index=pd.Index(np.sort(NUMBERS))), npartitions=3),
        whole[whole["rating"] > 2],
        hidden,
        named,
    ):
        with pytest.raises(dpdask.DataError, match=REFUSED) as caught:
            lazily(frame).compute(scheduler=client)
        assert "123456789" not in str(caught.value)
        if frame is not named:
            with pytest.raises(
                dpdask.DataError, match=REFUSED
            ):  # at the barrier, before ε is spent
                dip(dpdask.Histogram()).fit(frame)
        with pytest.raises(dpdask.DataError, match=REFUSED):
            ranges().fit(frame).transform(frame).compute(scheduler="synchronous")
        assert len(lazily(frame.reset_index(drop=True)).compute(scheduler="synchronous")) > 100


@pytest.mark.filterwarnings("ignore:The inplace keyword")  # Dask's own, while it reads Parquet
def test_the_usual_ways_to_a_dask_frame_are_usable(tmp_path):
    for name, index in (("pandas", None), ("plain", False)):
        (tmp_path / name).mkdir()
        for number in range(3):
            rows().iloc[200 * number : 200 * (number + 1)].to_parquet(
                tmp_path / name / f"part.{number}.parquet", index=index
            )
    rows().to_csv(tmp_path / "rows.csv", index=False)
    frame = dd.from_pandas(rows(), npartitions=3)
    with dask.config.set(scheduler="synchronous"):
        usual = [
            dd.read_parquet(tmp_path / "pandas"),
            dd.read_parquet(tmp_path / "plain"),
            dd.read_csv(tmp_path / "rows.csv"),
            dd.concat([frame, frame]),
            frame.repartition(npartitions=2),
            frame[frame["rating"] > 2].reset_index(drop=True),
        ]
        for each in usual:
            assert len(dip(dpdask.Histogram()).fit(each).transform(each)) == len(each)


def people(n=600):
    """Everybody's name is a category of its own, but for some that stand many times."""
    return rows(n).assign(name=pd.Categorical([f"{PLANTED}-{number:04d}" for number in range(n)]))


KEPT = {"role": "keep"}


def carried(frame):
    """The numbers of the people whose names a frame carries, wherever."""
    data = cloudpickle.dumps(frame)
    return {number for number in range(600) if f"{PLANTED}-{number:04d}".encode() in data}


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", ["category", "dictionary", "index"])
@pytest.mark.parametrize("bounded", [False, True], ids=["holdout", "unit"])
def test_categories_of_rows_that_are_not_released_do_not_come_along(bounded, dtype, client):
    table = people().assign(user=np.arange(600) % 100)
    if dtype == "dictionary":
        table["name"] = (
            table["name"]
            .astype(str)
            .astype(pd.ArrowDtype(pa.string()))
            .astype(pd.ArrowDtype(pa.dictionary(pa.int32(), pa.string())))
        )
    if dtype == "index":
        table = table.set_index("name")
        assert isinstance(table.index, pd.CategoricalIndex)
    unit = dpdask.UnitColumn(column="user", max_rows=3) if bounded else "row"
    reference = KNOWN if bounded else dpdask.Holdout(fraction=0.5)
    made = dpdask.DIP(schema(name=KEPT, user=KEPT), epsilon=2.0, reference=reference, unit=unit)
    released = made.fit(table).transform(table)
    frame = dd.from_pandas(table, npartitions=3, sort=False)
    lazy = made.fit(frame).transform(frame)
    assert carried(lazy._meta) == set()
    for found in (
        released,
        lazy.compute(scheduler="threads"),
        lazy.compute(scheduler=client),
        lazy.partitions[1].compute(scheduler="synchronous"),
    ):
        names = pd.Series(found.index) if dtype == "index" else found["name"]
        shown = {int(str(name)[-4:]) for name in names}
        assert len(shown) == len(found) < 600
        assert carried(found) == shown
        assert not isinstance(names.dtype, pd.CategoricalDtype)
    plain = lazy.compute(scheduler="synchronous")
    assert (
        plain.dtypes.astype(str).to_dict()
        == lazy.dtypes.astype(str).to_dict()
        == released.dtypes.astype(str).to_dict()
    )


OBJECTS = {
    "objects": lambda cell: cell,
    "in lists": lambda cell: [cell],
    "in dicts": lambda cell: {"name": cell},
    "in arrays": lambda cell: ([0], np.array([None, cell], dtype=object)),
    "behind masks": lambda cell: np.ma.MaskedArray([str(cell[0])], mask=[True]),
}


def nested(kind):
    """A kept column whose cells hold dictionaries or the like of everybody's names."""
    names = [f"{PLANTED}-{number:04d}" for number in range(600)]
    ends, words = pa.array(range(601), pa.int32()), pa.array(names).dictionary_encode()
    if kind in OBJECTS:
        return pd.Series(
            [OBJECTS[kind](pd.Categorical([name], categories=names)) for name in names],
            dtype=object,
        )
    found = {
        "list": lambda: pa.ListArray.from_arrays(ends, words),
        "fixed": lambda: pa.FixedSizeListArray.from_arrays(words, 1),
        "map": lambda: pa.MapArray.from_arrays(ends, pa.array(range(600)), words),
        "deep": lambda: pa.StructArray.from_arrays(
            [pa.ListArray.from_arrays(ends, words)], ["names"]
        ),
        "view": lambda: pa.ListArray.from_arrays(ends, pa.array(names, pa.string_view())),
        "runs": lambda: pa.StructArray.from_arrays(
            [pa.RunEndEncodedArray.from_arrays(pa.array(range(1, 601), pa.int32()), names)],
            ["name"],
        ),
    }[kind]()
    return pd.Series(pd.arrays.ArrowExtensionArray(pa.chunked_array([found])))


@pytest.mark.few(3)
@pytest.mark.parametrize("kind", ["list", "fixed", "map", "deep", "view", "runs", *OBJECTS])
def test_kept_values_that_hold_those_of_other_rows_are_refused(kind, tmp_path):
    table = rows().assign(name=nested(kind))
    table = (
        table.head(100).copy() if kind in OBJECTS else table
    )  # each cell holds all names, and a graph all cells
    made = dip(dpdask.Holdout(fraction=0.5), name=KEPT)
    with pytest.raises(
        dpdask.DataError,
        match=r"column 'name': its (values|cells) .* which may hold values of rows that are not released",
    ) as caught:
        made.fit(table, secrets=str(tmp_path))
    assert PLANTED not in str(caught.value)
    assert list(tmp_path.rglob("*.npz")) == []  # nothing was fitted
    if kind in OBJECTS:
        with pytest.raises(
            dpdask.DataError,
            match=r"column 'name': its cells .* which may hold values of rows that are not released",
        ):
            lazily_kept(table.set_index("name"))

    meta = rows(0).assign(
        name=pd.Series(dtype=object if kind in OBJECTS else pd.ArrowDtype(pa.list_(pa.string())))
    )
    with dask.config.set({"dataframe.convert-string": False}):
        lazy = dd.from_map(lambda _: table, [0], meta=meta)
    with (
        dask.config.set(scheduler="synchronous"),
        pytest.raises(
            dpdask.DataError, match="which may hold values of rows that are not released"
        ),
    ):
        dip(KNOWN, name=KEPT).fit(lazy).transform(lazy).compute()


def lazily_kept(frame):
    return dip(KNOWN, name=KEPT).fit(frame).transform(frame)


def test_kept_cells_of_plain_collections_are_released():
    cells = [[number, ("a", {"b": {number}})] for number in range(600)]
    assert lazily_kept(rows().assign(name=pd.Series(cells, dtype=object)))["name"].tolist() == cells
    cell = 0
    for _ in range(20):
        cell = [cell]
    with pytest.raises(dpdask.DataError, match="nested too deeply"):
        lazily_kept(rows().assign(name=pd.Series([cell] * 600, dtype=object)))


@pytest.mark.parametrize("kind", ["str", "list", "struct"])
def test_kept_values_are_copied_from_beside_those_that_are_not_released(kind):
    """A slice of an Arrow array is a view: what is written of it, and what lies in memory, may hold its neighbours."""
    make = {
        "str": lambda name: name,
        "list": lambda name: [name],
        "struct": lambda name: {"name": name},
    }[kind]
    names = pa.chunked_array([pa.array([make(f"{PLANTED}-{number:04d}") for number in range(600)])])
    whole = rows().assign(name=pd.arrays.ArrowExtensionArray(names)).iloc[100:300]
    for frame in (
        whole.reset_index(drop=True),
        *([whole.set_index("name")] if kind == "str" else []),
    ):
        found = lazily_kept(frame)
        values = found.index.array if found.index.name else found["name"].array
        held = b"".join(
            buffer.to_pybytes()
            for chunk in values.__arrow_array__().chunks
            for buffer in chunk.buffers()
            if buffer is not None
        )
        assert {
            number for number in range(600) if f"{PLANTED}-{number:04d}".encode() in held
        } == set(range(100, 300))


@pytest.mark.parametrize(
    ("categories", "dtype"),
    [
        (np.arange(10, 40, 10, dtype=np.uint8), "UInt8"),
        (np.array([False, True]), "boolean"),
        (np.array([0.5, 1.5, 2.5]), "float64"),
        (pd.to_datetime(["2026-01-01", "2026-02-01"]), None),
        (pd.interval_range(0, 3), "interval[float64, right]"),
    ],
    ids=["uint8", "bool", "float64", "datetime", "interval"],
)
def test_kept_categories_become_plain_values_nulls_included(categories, dtype):
    codes = np.random.default_rng(1).integers(-1, len(categories), 600)
    table = rows().assign(name=pd.Categorical.from_codes(codes, categories=pd.Index(categories)))
    found = lazily_kept(table)["name"]
    assert str(found.dtype) == (dtype or str(table["name"].cat.categories.dtype))
    assert found.isna().equals(table["name"].isna())
    assert (found.dropna().astype(object) == table["name"].dropna().astype(object)).all()
    frame = dd.from_pandas(table, npartitions=3)
    pd.testing.assert_series_equal(
        lazily_kept(frame).compute(scheduler="synchronous")["name"], found
    )


def test_unknown_categories_are_texts_or_refused():
    texts = dd.from_pandas(people().astype({"name": str}), npartitions=2).astype(
        {"name": "category"}
    )
    assert not texts["name"].cat.known
    found = lazily_kept(texts).compute(scheduler="synchronous")
    assert list(found["name"]) == list(people()["name"])
    numbers = dd.from_pandas(rows().assign(name=NUMBERS), npartitions=2).astype(
        {"name": "category"}
    )
    with pytest.raises(
        dpdask.DataError, match="column 'name': a partition's values do not fit the frame's dtypes"
    ) as caught:
        lazily_kept(numbers).compute(scheduler="synchronous")
    assert "123456789" not in str(caught.value)


PRIVATE = {
    "rating": RATING,
    "colour": categorical(["red", "green", "blue"], nulls="level"),
    "price": continuous([0, 1], nulls="level", outside="refuse"),
}


def shuffled(n=300):
    rng = np.random.default_rng(4)
    columns = {
        "rating": rng.choice([1, 2, 3, 4, 5], n),
        "colour": rng.choice(["red", "green", "blue", None], n),
    }
    return pd.DataFrame({**columns, "price": np.where(rng.random(n) < 0.1, np.nan, rng.random(n))})


@pytest.mark.parametrize(
    ("name", "ascending"), [("rating", True), ("colour", False), ("price", False)]
)
def test_a_table_sorted_by_a_private_column_is_warned_of(name, ascending):
    table = shuffled().sort_values(name, ascending=ascending, ignore_index=True)
    made = dpdask.Schema.from_dict({"columns": PRIVATE})
    told = (
        rf"which is sorted by '{name}': a row's position reveals its value; shuffle the rows first"
    )
    with pytest.warns(UserWarning, match=told):
        dpdask.DIP(made, epsilon=6.0, reference=dpdask.Histogram()).fit(table)
    release = dpdask.DIP(made, epsilon=2.0, reference=dpdask.Public()).fit(shuffled(200))
    with pytest.warns(UserWarning, match=told):
        release.transform(table)
    if name == "rating":
        intervals = ranges().fit(table[["rating"]])
        with pytest.warns(UserWarning, match=told):
            intervals.transform(table[["rating"]])


def test_other_tables_are_not_warned_of():
    """Warnings are errors here: shuffled rows, a constant column, few rows, and a public table in order."""
    made = dpdask.DIP(
        dpdask.Schema.from_dict({"columns": PRIVATE}), epsilon=2.0, reference=dpdask.Public()
    )
    release = made.fit(shuffled(200).sort_values("price", ignore_index=True))
    release.transform(shuffled())
    release.transform(shuffled().assign(price=0.5, rating=3, colour="red"), batch="constant")
    release.transform(shuffled(9).sort_values("price", ignore_index=True), batch="few")


def held():
    """What this process's caches hold; runs on workers."""
    lru = [cache for cache in engine_cluster._CACHES if cache is not FOOTERS]
    return {cache.__name__: cache.cache_info().currsize for cache in lru} | {
        "footers": len(FOOTERS._kept)
    }


def test_a_job_leaves_the_workers_memory_at_its_commit(client, tmp_path):
    job = write_job(
        tmp_path,
        lake(tmp_path / "in", [900, 900, 900]),
        tmp_path / "out",
        output__rows_per_shard=300,
    )
    seen = []

    def look(stage, done, total):
        if stage == "write" and done == total:
            seen.extend(found["load"] for found in client.run(held).values())

    with client.as_current():
        run_job(load(job), look)
    assert sum(seen) >= 1  # it was there while the job wrote
    assert all(not any(found.values()) for found in [held(), *client.run(held).values()])


def test_closed_frames_leave_the_workers_memory(client):
    table = rows().assign(user=np.arange(600) % 100)
    frame = dd.from_pandas(table, npartitions=4)
    made = dpdask.DIP(
        schema(user=KEPT),
        epsilon=2.0,
        reference=dpdask.Histogram(),
        unit=dpdask.UnitColumn(column="user", max_rows=3),
    )
    release = made.fit(frame)
    release.transform(frame).compute()
    before = [client.run(held)]
    intervals = ranges(user=KEPT).fit(frame)
    intervals.transform(frame).compute()
    before.append(client.run(held))
    for cache in ("load_bounds", "load"):
        assert sum(found[cache] for found in before[0].values()) >= 1
    first, second = (sum(found["load"] for found in each.values()) for each in before)
    assert second > first  # the designs
    intervals.close()
    assert all(not any(found.values()) for found in client.run(held).values())
    release.transform(frame).compute()  # what is still open reads again
    release.close()
    assert all(not any(found.values()) for found in [held(), *client.run(held).values()])


def test_a_cluster_that_has_gone_away_is_let_go(tmp_path):
    cluster = processes(1)
    with Client(cluster) as gone:
        gone.wait_for_workers(1)
        release = dip(dpdask.Histogram()).fit(dd.from_pandas(rows(), npartitions=2))

        def leave(stage, done, total):
            if stage == "write" and done == total:
                cluster.close()

        job = write_job(tmp_path, lake(tmp_path / "in", [900]), tmp_path / "out")
        assert run_job(load(job), leave).status == "released"
        release.close()
    assert (tmp_path / "out" / "_SUCCESS").exists()
    assert not (tmp_path / ".out.dpdask").exists()
    assert not any(held().values())


def test_whole_numbers_whose_null_is_a_level_come_back_with_their_nulls(tmp_path):
    """`dd.read_parquet` says int64, and its partitions hold floats where there are nulls."""
    pq.write_table(
        pa.table({"x": pa.array([1, 2, None, 4] * 500, pa.int64())}), tmp_path / "a.parquet"
    )
    frame = dd.read_parquet(tmp_path / "a.parquet")
    schema = dpdask.Schema.from_dict(
        {
            "columns": {
                "x": {
                    "role": "privatise",
                    "nulls": "level",
                    "kind": "continuous",
                    "bounds": [0, 10],
                }
            }
        }
    )
    lazy = dpdask.DIP(schema, epsilon=4.0, reference=dpdask.Histogram()).fit(frame).transform(frame)
    released = lazy.compute()
    assert released["x"].dtype == lazy["x"].dtype == "Int64"
    assert 200 < released["x"].isna().sum() < 900


def test_private_texts_in_several_chunks_are_released():
    table = pd.concat([pd.DataFrame({"k": ["a", "b"] * 500})] * 2, ignore_index=True)
    schema = dpdask.Schema.from_dict({"columns": {"k": categorical(["a", "b"])}})
    released = (
        dpdask.DIP(schema, epsilon=1.0, reference=dpdask.Histogram()).fit(table).transform(table)
    )
    assert set(released["k"]) == {"a", "b"}
    assert len(released) == 2000


SECRET = b"\x01pq7" * 8
N_COVERED = 12


def cover(array):
    """Put a null over the row of the secret, as a mask does, and leave what is in the buffers."""
    if isinstance(array.type, pa.BaseExtensionType):
        return array.type.wrap_array(cover(array.storage))
    validity = pa.array([row != 1 for row in range(len(array))]).buffers()[1]
    fields = (
        [array.field(number) for number in range(array.type.num_fields)]
        if pa.types.is_struct(array.type)
        else []
    )
    children = fields or ([array.values] if pa.types.is_nested(array.type) else None)
    return pa.Array.from_buffers(
        array.type,
        len(array),
        [validity, *array.buffers()[1 : array.type.num_buffers]],
        children=children,
    )


def bare(type_, first=SECRET):
    """A column whose second row has the bytes of the secret."""
    if isinstance(type_, pa.BaseExtensionType):
        return type_.wrap_array(bare(type_.storage_type))
    if pa.types.is_fixed_size_list(type_):
        return pa.FixedSizeListArray.from_arrays(bare(type_.value_type), 1)
    if (
        pa.types.is_primitive(type_)
        or pa.types.is_fixed_size_binary(type_)
        or pa.types.is_decimal(type_)
    ):
        width = type_.bit_width // 8
        return pa.Array.from_buffers(
            type_,
            N_COVERED,
            [None, pa.py_buffer(bytes(width) + first[:width] + bytes(width * (N_COVERED - 2)))],
        )
    return pa.array(["", first.decode()] + [""] * (N_COVERED - 2)).cast(type_)


LONGS = bare(pa.int64())
STEPS = pa.array(range(N_COVERED + 1), pa.int32())
TENSOR = pa.fixed_shape_tensor(pa.int64(), [1])
PAIRS = pa.StructArray.from_arrays([LONGS, bare(pa.string())], ["a", "b"])
FLAT = [
    *(
        pa.int64(),
        pa.float64(),
        pa.timestamp("us", "UTC"),
        pa.duration("us"),
        pa.time64("us"),
        pa.date64(),
    ),
    *(
        pa.decimal128(38, 3),
        pa.decimal256(76, 3),
        pa.binary(16),
        pa.string(),
        pa.large_binary(),
        TENSOR,
    ),
]
COVERED = {
    **{str(type_): cover(bare(type_)) for type_ in FLAT},
    "struct": cover(PAIRS),
    "struct in a struct": pa.StructArray.from_arrays([cover(PAIRS)], ["pair"]),
    "struct in lists": pa.ListArray.from_arrays(STEPS, cover(PAIRS)),
    "struct in fixed lists": pa.FixedSizeListArray.from_arrays(cover(PAIRS), 1),
    "struct in a map": pa.MapArray.from_arrays(STEPS, pa.array(range(N_COVERED)), cover(PAIRS)),
    "list": cover(pa.ListArray.from_arrays(STEPS, LONGS)),
    "fixed list": cover(pa.FixedSizeListArray.from_arrays(LONGS, 1)),
    "map": cover(pa.MapArray.from_arrays(STEPS, pa.array(range(N_COVERED)), LONGS)),
    "lists in a struct": cover(
        pa.StructArray.from_arrays(
            [pa.ListArray.from_arrays(STEPS, LONGS), pa.FixedSizeListArray.from_arrays(LONGS, 1)],
            ["l", "f"],
        )
    ),
    "tensor in a struct": pa.StructArray.from_arrays([cover(bare(TENSOR))], ["t"]),
    "dictionary": pa.DictionaryArray.from_arrays(
        cover(pa.array([*range(N_COVERED - 1), 0], pa.int32())),
        pa.array([*map(str, range(N_COVERED - 1)), SECRET.decode()]),
    ),
    "Int64": pd.arrays.IntegerArray(LONGS.to_numpy(), np.arange(N_COVERED) == 1),
    "Float64": pd.arrays.FloatingArray(LONGS.to_numpy().view("float64"), np.arange(N_COVERED) == 1),
    "boolean": pd.arrays.BooleanArray(np.arange(N_COVERED) == 1, np.arange(N_COVERED) == 1),
    "category": pd.Categorical.from_codes(
        [0, -1] + [0] * (N_COVERED - 2), [7, int(LONGS[1].as_py())]
    ),
    "period": pd.array(pd.PeriodIndex(["2020-01", None] * (N_COVERED // 2), freq="M")),
    "dates with a zone": pd.array(
        pd.DatetimeIndex(["2020-01-01", None] * (N_COVERED // 2), tz="UTC")
    ),
}


@pytest.mark.few(12)
@pytest.mark.parametrize("kind", COVERED)
def test_what_lies_behind_a_null_of_a_kept_column_is_not_released(kind):
    given = COVERED[kind]
    table = rows(N_COVERED).assign(
        name=given
        if not isinstance(given, pa.Array)
        else pd.arrays.ArrowExtensionArray(pa.chunked_array([given]))
    )
    assert SECRET[:8] in cloudpickle.dumps(table) or not isinstance(given, pa.Array)
    frames = (
        [table, table.set_index("name")] if isinstance(given, pd.arrays.IntegerArray) else [table]
    )
    for frame in frames:
        released = lazily_kept(frame)
        lazy = lazily_kept(dd.from_pandas(frame, npartitions=1, sort=False)).compute(
            scheduler="synchronous"
        )
        for found in (released, lazy):
            assert SECRET[:8] not in cloudpickle.dumps(found)
            name = found.index.to_series() if found.index.name else found["name"]
            assert name.isna().tolist() == table["name"].isna().tolist()
            if kind == "boolean":
                assert not name.array._data[1]
            if kind not in ("category", "dictionary"):
                assert found is lazy or name.dtype == table["name"].dtype
                assert [str(value) for value in name] == [str(value) for value in table["name"]]


@pytest.mark.parametrize("dtype", ["Int64", "Float64", "int64[pyarrow]", "double[pyarrow]"])
def test_what_lies_behind_a_null_of_a_private_column_decides_nothing(dtype):
    column = continuous([0, 10], nulls="level")
    released = []
    for secret in (SECRET[:8], SECRET[8:16][::-1]):
        array = cover(
            bare(pa.float64() if dtype in ("Float64", "double[pyarrow]") else pa.int64(), secret)
        )
        own = pd.arrays.ArrowExtensionArray(pa.chunked_array([array]))
        if "pyarrow" not in dtype:
            masked = pd.arrays.FloatingArray if dtype == "Float64" else pd.arrays.IntegerArray
            own = masked(
                np.frombuffer(array.buffers()[1], array.type.to_pandas_dtype()), own.isna()
            )
        values = pd.concat([pd.Series(own)] * 50, ignore_index=True)
        table = pd.DataFrame({"x": values})
        assert secret in cloudpickle.dumps(table)
        mechanism = dpdask.DIP(
            dpdask.Schema.from_dict({"columns": {"x": column}}),
            epsilon=1.0,
            reference=dpdask.Histogram(),
            insecure_seed=1,
        )
        released.append(cloudpickle.dumps(mechanism.fit(table).transform(table)))
        assert secret not in released[-1]
    assert released[0] == released[1]
