"""The ends of the range of every type come out as they went in, from every source, as kept and as private columns."""

import contextlib
import datetime as dt
from decimal import Decimal

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest
from deltalake import write_deltalake
from e2e.helpers import call_cli, categorical, discrete, error_line, run_here, write_job
from lakes.tables import live_files, sql_catalog
from strategies import as_array

import dpdask
from dpdask.errors import SpecError

UNITS = ("s", "ms", "us", "ns")
FIRST, LAST = dt.date(1, 1, 1), dt.date(9999, 12, 31)
UNKNOWN_ZONES = ("utc", "Mars/Base", "+25:00")
OLDEST = -210_866_716_800_000_000  # microseconds: day 1 of INT96; day 0 is taken for 1970


RATING = discrete([1, 2])
KNOWN = {"kind": "known", "columns": {"r": {"probabilities": [0.5, 0.5]}}}


def counts(type_, *values):
    """Return an array of a type that counts something, from its counts."""
    return pa.array(values, pa.int32() if type_.bit_width == 32 else pa.int64()).view(type_)


def ends(type_, room=1):
    """Return the ends of the counts of a type, or what is left of them if it has less room."""
    most = 2 ** (type_.bit_width - 1) // room
    return counts(type_, -most, most - 1)


NUMBERS = {
    **{
        str(type_): pa.array(np.array([np.iinfo(type_).min, np.iinfo(type_).max], type_))
        for type_ in ("int8", "int16", "int32", "int64")
    },
    **{
        str(type_): pa.array(np.array([0, np.iinfo(type_).max], type_))
        for type_ in ("uint8", "uint16", "uint32", "uint64")
    },
    **{
        str(type_): pa.array(
            [np.finfo(type_).min, np.finfo(type_).smallest_subnormal], pa.from_numpy_dtype(type_)
        )
        for type_ in ("float32", "float64")
    },
    "bool": pa.array([True, False]),
}
HALVES = {"float16": pa.array(np.array([-65504, 6e-8], np.float16))}
DECIMALS = {
    "decimal128": pa.array([Decimal("9" * 38), Decimal(-1)]),
    "decimal128 scaled": pa.array([Decimal("-9.99"), None]),
}
TEXTS = {"string": pa.array(["\U0010ffff\0", "a" * 100]), "binary": pa.array([b"", b"\xff\0"])}
LAYOUTS = {
    **{
        f"string {type_}": TEXTS["string"].cast(type_)
        for type_ in (pa.large_string(), pa.string_view())
    },
    **{
        f"binary {type_}": TEXTS["binary"].cast(type_)
        for type_ in (pa.large_binary(), pa.binary_view())
    },
    "fixed": pa.array([b"\0\0", b"\xff\0"], pa.binary(2)),
    "decimal256": pa.array([Decimal("9" * 76), Decimal(-1)]),
    "uuid": pa.array([bytes(16), b"\xff" * 16], pa.uuid()),
    "json": pa.array(["{}", "[]"], pa.json_()),
}
DATES = {"date32": ends(pa.date32())}
CLOCKS = {
    f"time32[{unit}]": counts(pa.time32(unit), 0, 86_400 * 10**power - 1)
    for unit, power in (("s", 0), ("ms", 3))
} | {
    f"time64[{unit}]": counts(pa.time64(unit), 0, 86_400 * 10**power - 1)
    for unit, power in (("us", 6), ("ns", 9))
}
TIMES = {
    f"timestamp[{unit}] {zone}": ends(pa.timestamp(unit, zone))
    for unit in UNITS[1:]
    for zone in (None, "UTC", "Europe/Berlin")
}
SECONDS = {
    f"timestamp[s] {zone}": ends(pa.timestamp("s", zone), room=1000) for zone in (None, "UTC")
}  # as Parquet's milliseconds
DURATIONS = {f"duration[{unit}]": ends(pa.duration(unit)) for unit in UNITS}
MICRO = {name: TIMES[name] for name in ("timestamp[us] None", "timestamp[us] UTC")}
OLD = {name: counts(array.type, OLDEST, 2**63 - 1) for name, array in MICRO.items()}


def nested(leaf):
    """Return lists, structs and maps of values, some of them null."""
    keys, starts = pa.array(["a", "b"]), pa.array([0, 1, 2], pa.int32())
    return {
        f"{leaf.type} list": pa.ListArray.from_arrays(starts, leaf),
        f"{leaf.type} struct": pa.StructArray.from_arrays(
            [leaf, keys, counts(pa.timestamp("ms"), -1, 1)], ["a", "b", "c"]
        ),
        f"{leaf.type} map": pa.MapArray.from_arrays(starts, keys, leaf),
        f"{leaf.type} null": pa.array([None, leaf[1]], leaf.type),
    }


NESTED = nested(NUMBERS["int64"]) | nested(MICRO["timestamp[us] None"])
SIGNED = {name: array for name, array in NUMBERS.items() if "uint" not in name}
SMALL = SIGNED | {name: NUMBERS[name] for name in ("uint8", "uint16")}
WRITTEN = {
    "date32": pa.array([FIRST, LAST]),
    **{
        name: counts(TIMES[name].type, -62_135_596_800_000_000, 253_402_300_799_999_999)
        for name in MICRO
    },  # what can be written: 0001 to 9999
}
KEPT = {
    "parquet": NUMBERS
    | HALVES
    | DECIMALS
    | TEXTS
    | LAYOUTS
    | DATES
    | CLOCKS
    | TIMES
    | SECONDS
    | DURATIONS
    | NESTED
    | {"null": pa.nulls(2)},
    "int96": OLD | nested(OLD["timestamp[us] None"]) | NUMBERS,
    "csv": NUMBERS
    | DECIMALS
    | CLOCKS
    | DURATIONS
    | {
        "string": TEXTS["string"],
        "date32": WRITTEN["date32"],
        "timestamp[us]": WRITTEN["timestamp[us] None"],
    },
    "delta": SIGNED | DECIMALS | TEXTS | WRITTEN | nested(NUMBERS["int64"]),
    "iceberg": SMALL | DECIMALS | TEXTS | WRITTEN | nested(NUMBERS["int64"]),
    "arrow": NUMBERS
    | HALVES
    | DECIMALS
    | TEXTS
    | DATES
    | CLOCKS
    | TIMES
    | SECONDS
    | DURATIONS
    | NESTED,
    "numpy": NUMBERS | HALVES | TIMES | SECONDS | DURATIONS,
}
LEVELS = {
    **{name: (array.type, array.to_pylist()) for name, array in NUMBERS.items()},
    "decimal128(5, 2)": (pa.decimal128(5, 2), [-999.99, 0.01]),
    "string": (pa.string(), ["", "\U0010ffff"]),
    **{
        f"bytes: {type_}": (type_, ["\0a", "é"])
        for type_ in (
            *(pa.binary(), pa.large_binary(), pa.binary_view(), pa.binary(2)),
            pa.dictionary(pa.int32(), pa.binary()),
        )
    },
    "date32": (pa.date32(), [FIRST, LAST]),
    **{f"timestamp[{unit}]": (pa.timestamp(unit), [FIRST, LAST]) for unit in ("ms", "us")},
    "timestamp[ns]": (pa.timestamp("ns"), [dt.date(1678, 1, 1), dt.date(2262, 1, 1)]),
}
OTHER_BYTES = [name for name in LEVELS if name.startswith("bytes")][1:]
NOT_PRIVATE = {
    "int96": ("timestamp[ms]", "timestamp[ns]"),
    "csv": ("timestamp[ms]", "timestamp[ns]", *OTHER_BYTES),
    "delta": (
        "uint8",
        "uint16",
        "uint32",
        "uint64",
        "timestamp[ms]",
        "timestamp[ns]",
        OTHER_BYTES[3],
    ),
    "iceberg": ("uint32", "uint64", "timestamp[ms]", "timestamp[ns]", OTHER_BYTES[3]),
    "arrow": (OTHER_BYTES[1], OTHER_BYTES[3]),
    "numpy": ("string", "date32", "decimal128(5, 2)", *OTHER_BYTES),
}


def make(source):
    """Return a table of what a source can hold, its schema, and a distribution of its private columns."""
    private = {
        f"private {name}": levels
        for name, levels in LEVELS.items()
        if name not in NOT_PRIVATE.get(source, ())
    }
    table = pa.table(
        KEPT[source] | {name: as_array(levels, type_) for name, (type_, levels) in private.items()}
    )
    schema = {name: {"role": "keep"} for name in KEPT[source]}
    schema |= {
        name: categorical(levels, **({"encoding": "utf-8"} if "bytes" in name else {}))
        for name, (_, levels) in private.items()
    }
    return (
        table,
        schema,
        {"kind": "known", "columns": {name: {"probabilities": [0.5, 0.5]} for name in private}},
    )


def job_of(folder, table, source, schema, **changes):
    """Write a table as a source, and a job that releases it with so large an ε that private values stay as they are."""
    place = {
        "path": str(folder / "in"),
        "format": source if source in ("delta", "iceberg") else "files",
    }
    (folder / "in").mkdir(parents=True)
    if source == "csv":
        pa_csv.write_csv(table, folder / "in" / "a.csv")
        schema = {
            name: {**column, "type": str(table.schema.field(name).type)}
            for name, column in schema.items()
        }
    elif source == "delta":
        write_deltalake(folder / "in", table)
    elif source == "iceberg":
        lake = sql_catalog(folder / "lake").create_table("db.t", schema=table.schema)
        lake.append(table)
        place["path"] = lake.metadata_location
    else:
        pq.write_table(
            table, folder / "in" / "a.parquet", use_deprecated_int96_timestamps=source == "int96"
        )
    options = {
        "channel": "optimal",
        "privacy__epsilon": 100.0,
        "insecure_seed": 7,
        "output__order": "keep",
    } | changes
    return write_job(
        folder,
        folder / "in",
        folder / "out",
        input=place,
        schema=schema,
        mechanism__channel=options.pop("channel"),
        **options,
    )


def list_changed(found, given):
    """Return the columns that did not come out as they went in; only the layout of their values may differ."""
    changed = []
    for name in given.column_names:
        out, array = (table[name].combine_chunks() for table in (found, given))
        if isinstance(out, pa.ExtensionArray):
            out, array = out.storage, array.storage
        changed += [] if out.cast(array.type).equals(array) else [f"{name}: {out.type}"]
    return changed


@pytest.mark.parametrize("source", ["parquet", "int96", "csv", "delta", "iceberg"])
def test_a_job_changes_no_value(source, tmp_path):
    table, schema, known = make(source)
    run_here(job_of(tmp_path, table, source, schema, mechanism__reference=known))
    [shard] = (tmp_path / "out").glob("part-*.parquet")
    released = pq.read_table(shard)
    # a table's files have random names, and so their rows other noise in every run: of 26 private values each takes the other level with chance .0005
    swapped = [name for name in known["columns"] if list_changed(released, table.select([name]))]
    assert all(set(released[name].to_pylist()) <= set(table[name].to_pylist()) for name in swapped)
    assert len(swapped) <= 3
    assert list_changed(released, table.drop_columns(swapped)) == []


@pytest.mark.filterwarnings("ignore:A released row keeps", "ignore:ε = ", "ignore:.*is large")
@pytest.mark.parametrize("lazy", [False, True], ids=["pandas", "dask"])
@pytest.mark.parametrize("source", ["arrow", "numpy"])
def test_a_frame_changes_no_value(source, lazy):
    table, schema, known = make(source)
    if source == "numpy" and lazy:  # Dask makes texts of Python's bytes
        table = table.drop(["private bytes: binary"])
        del schema["private bytes: binary"], known["columns"]["private bytes: binary"]
    given = table.to_pandas(types_mapper=pd.ArrowDtype if source == "arrow" else None)
    frame = dd.from_pandas(given, npartitions=2) if lazy else given
    options = {
        "reference": dpdask.Known(columns=known["columns"]),
        "channel": "optimal",
        "insecure_seed": 7,
    }
    dip = dpdask.DIP(dpdask.Schema.from_dict({"columns": schema}), epsilon=100.0, **options)
    with dask.config.set(scheduler="synchronous"), dip.fit(frame) as release:
        [found] = dask.compute(release.transform(frame))
    assert found.dtypes.equals(given.dtypes)
    assert (
        list_changed(*(pa.Table.from_pandas(each, preserve_index=False) for each in (found, given)))
        == []
    )


FAR = 2**53 + 1
RANGES = pd.IntervalIndex.from_tuples([(FAR, FAR + 2)])
CATEGORIES = {
    "int64": pd.Index([-(2**63), 2**63 - 1, FAR]),
    "uint64": pd.Index([0, 2**64 - 1, FAR], dtype="uint64"),
    "Int64": pd.Index([-(2**63), 2**63 - 1, FAR], dtype="Int64"),
    "arrow": pd.Index([-(2**63), 2**63 - 1, FAR], dtype=pd.ArrowDtype(pa.int64())),
    "bool": pd.Index([True, False]),
    "str": pd.Index(["", "\U0010ffff"]),
    "datetime64[ns]": pd.DatetimeIndex(np.array([-(2**63) + 1, 2**63 - 1]).view("datetime64[ns]")),
    "interval": pd.IntervalIndex.from_tuples([(-(2**53), 2**53)]),
}


def release_frame(column, *, lazy):
    """Return a kept column, which is the index too, as a release has it."""
    given = pd.DataFrame({"c": column, "r": [1] * len(column)}).set_index(
        pd.Index(column, name="i")
    )
    frame = dd.from_map(lambda rows: rows, [given], meta=given.head(0)) if lazy else given
    schema = dpdask.Schema.from_dict(
        {"columns": {"i": {"role": "keep"}, "c": {"role": "keep"}, "r": RATING}}
    )
    with (
        dask.config.set(scheduler="synchronous"),
        dpdask.DIP(schema, epsilon=1.0, reference=dpdask.Known(columns=KNOWN["columns"])).fit(
            frame
        ) as release,
    ):
        [found] = dask.compute(release.transform(frame))
    assert pd.Index(found["c"]).equals(pd.Index(found.index))
    return found["c"]


@pytest.mark.parametrize("lazy", [False, True], ids=["pandas", "dask"])
@pytest.mark.parametrize("name", CATEGORIES)
def test_categories_beside_a_null_come_out_as_they_went_in(name, lazy):
    categories = CATEGORIES[name]
    codes = [*range(len(categories)), -1]
    found = release_frame(pd.Categorical.from_codes(codes, categories), lazy=lazy)
    assert found.tolist()[:-1] == categories.tolist()
    assert found.isna().tolist() == [code < 0 for code in codes]


@pytest.mark.parametrize(
    ("column", "says"),
    [
        (
            pd.Categorical.from_codes([0, -1], RANGES),
            "its categories are ranges whose ends float64 does not hold",
        ),
        (pd.arrays.SparseArray([0, 2**63 - 1]), "its dtype Sparse.* has no Arrow type"),
        (np.array([1 + 1e-300j, 2]), "its dtype complex128 has no Arrow type"),
    ],
)
def test_dtypes_that_cannot_be_released_exactly_are_refused(column, says):
    with pytest.raises(dpdask.DataError, match=f"column '[ci]': {says}"):
        release_frame(column, lazy=False)


# ---- what a type cannot hold


def refuse(job, folder):
    """Run a job whose input is refused, and return its line."""
    result = call_cli("run", job)
    assert result.returncode == 65, result.stderr
    assert not (folder / "out").exists()
    return error_line(result)


@pytest.mark.parametrize(
    "nest",
    [lambda times: times, lambda times: pa.ListArray.from_arrays([0, 1, 2], times)],
    ids=["plain", "list"],
)
@pytest.mark.parametrize(
    "times",
    [
        counts(pa.timestamp("ns"), 0, 1),
        counts(pa.timestamp("s"), 0, 2**63 // 10**6 + 1),
        counts(pa.timestamp("s"), 0, 2**31 * 86_400),
    ],
)
def test_a_time_of_int96_that_microseconds_cannot_hold_is_refused(nest, times, tmp_path):
    table = pa.table({"when": nest(times), "r": [1, 2]})
    job = job_of(
        tmp_path,
        table,
        "int96",
        {"when": {"role": "keep"}, "r": RATING},
        mechanism__reference=KNOWN,
    )
    assert (
        "column 'when': holds a time in the old format INT96 that timestamp[us] cannot hold"
        in refuse(job, tmp_path)
    )


@pytest.mark.parametrize("role", ["keep", "drop"])
@pytest.mark.parametrize(
    ("source", "values"),
    [("delta", pa.array([b"a", b"\xff"])), ("iceberg", pa.array([0.1, 1e300]))],
)
def test_values_of_partitions_that_the_metadata_hold_otherwise_are_refused(
    source, values, role, tmp_path
):
    table, place = (
        pa.table({"p": values, "r": [1, 2]}),
        {"path": str(tmp_path / "in"), "format": source},
    )
    if source == "delta":
        write_deltalake(tmp_path / "in", table, partition_by=["p"])
    else:
        lake = sql_catalog(tmp_path / "lake").create_table("db.t", schema=table.schema)
        with lake.update_spec() as spec:
            spec.add_identity("p")
        lake.append(table)
        for task in lake.scan().plan_files():  # as files that were added, which need not hold it
            path = task.file.file_path.removeprefix("file://")
            pq.write_table(pq.ParquetFile(path).read().drop(["p"]), path)
        place["path"] = lake.metadata_location
    job = write_job(
        tmp_path,
        tmp_path / "in",
        tmp_path / "out",
        input=place,
        schema={"p": {"role": role}, "r": RATING},
        mechanism__reference=KNOWN,
    )
    if role == "drop":
        run_here(job)
    else:
        assert (
            f"column 'p': its values stand in the table's metadata alone, from which a value of type {values.type} cannot"
            in refuse(job, tmp_path)
        )


# ---- files of different types


INTS = pa.array([1, 2])
ITEMS = pa.array([[1], [2]], pa.list_(pa.field("element", pa.int32(), nullable=False)))
WIDENED = {
    "null": (pa.nulls(2), INTS, "int64"),
    "null list": (pa.nulls(2), ITEMS, "list<element: int32 not null>"),
    "whole": (INTS.cast("int8"), INTS, "int64"),
    "signs": (INTS.cast("int32"), INTS.cast("uint32"), "int64"),
    "floats": (pa.array([0.5, 1.5], pa.float32()), pa.array([0.1, 1.1]), "double"),
    "texts": (pa.array(["a", "b"]), pa.array(["c", "d"], pa.large_string()), "large_string"),
    "codes": (pa.array(["a", "b"]).dictionary_encode(), pa.array(["c", "d"]), "string"),
    "bytes": (pa.array([b"a", b"b"], pa.binary(1)), pa.array([b"c", b"dd"]), "binary"),
    "decimals": (
        pa.array([Decimal("9.5"), None]),
        pa.array([Decimal("123.25"), None]),
        "decimal128(5, 2)",
    ),
    "long decimals": (
        pa.array([Decimal("9.5"), None]),
        pa.array([Decimal("9" * 38), None]),
        "decimal256(39, 1)",
    ),
    "times": (
        pa.array([FIRST, LAST]).cast(pa.timestamp("ms")),
        counts(pa.timestamp("us"), -1, 1),
        "timestamp[us]",
    ),
    "zones": (
        counts(pa.timestamp("ms", "UTC"), -1, 1),
        counts(pa.timestamp("us", "+00:00"), -1, 1),
        "timestamp[us, tz=UTC]",
    ),
    "lists": (ITEMS, pa.array([[3], None], pa.large_list(pa.int64())), "large_list<item: int64>"),
    "structs": (
        pa.array([{"a": [1]}] * 2),
        pa.array([{"a": None}] * 2),
        "struct<a: list<item: int64>>",
    ),
    "maps": (
        pa.array([[("a", 1)]] * 2, pa.map_("string", "int8")),
        pa.array([[("b", 2**40)]] * 2, pa.map_("string", "int64")),
        "map<string, int64>",
    ),
}


def write_files(folder, *arrays, **changes):
    """Write each array as the column of a file, and a job that keeps it."""
    (folder / "in").mkdir(parents=True)
    for number, array in enumerate(arrays):
        pq.write_table(pa.table({"c": array, "r": [1, 2]}), folder / "in" / f"{number}.parquet")
    schema = {"c": {"role": "keep"}, "r": RATING}
    return write_job(
        folder,
        folder / "in",
        folder / "out",
        schema=schema,
        mechanism__reference=KNOWN,
        output__order="keep",
        **changes,
    )


@pytest.mark.parametrize("name", WIDENED)
def test_types_of_files_widen_to_one_that_holds_all_values(name, tmp_path):
    narrow, wide, type_ = WIDENED[name]
    arrays = [narrow, wide] if len(name) % 2 else [wide, narrow]  # either may come first
    run_here(write_files(tmp_path, *arrays))
    found = pq.read_table(tmp_path / "out" / "part-00000.parquet")["c"]
    assert str(found.type).replace(" ('c')", "").replace("element", "item") == type_.replace(
        "element", "item"
    )
    assert found.to_pylist() == [value for array in arrays for value in array.to_pylist()]


def test_a_growing_table_takes_files_of_narrower_types(tmp_path):
    job = write_files(tmp_path, INTS, growing=True)
    run_here(job)
    for number, array in enumerate((pa.nulls(2), INTS.cast("int8")), start=1):
        pq.write_table(pa.table({"c": array, "r": [2, 1]}), tmp_path / "in" / f"{number}.parquet")
        run_here(job)
    shards = [
        pq.read_table(path)["c"]
        for path in sorted(
            (tmp_path / "out").glob("part-*.parquet"), key=lambda path: (len(path.name), path.name)
        )
    ]
    assert [(str(shard.type), shard.to_pylist()) for shard in shards] == [
        ("int64", values) for values in ([1, 2], [None, None], [1, 2])
    ]
    pq.write_table(
        pa.table({"c": pa.array(["a", "b"]), "r": [1, 2]}), tmp_path / "in" / "3.parquet"
    )
    assert (
        "3.parquet, column 'c': its type is string in this file, and int64 in 0.parquet"
        in error_line(call_cli("run", job))
    )


ZONED = pa.timestamp("us", "Europe/Berlin")
REFUSED = {
    "text": (INTS, pa.array(["1", "2"])),
    "fractions": (INTS, pa.array([1.0, 2.0])),  # float64 holds whole numbers to 2**53 only
    "zones": (counts(pa.timestamp("us"), 0, 1), counts(pa.timestamp("us", "UTC"), 0, 1)),
    "dates": (pa.array([FIRST, LAST]), pa.array([FIRST, LAST]).cast(pa.timestamp("us"))),
    "fields": (pa.array([{"a": 1}] * 2), pa.array([{"b": 1}] * 2)),
    "shapes": (pa.array([[1], [2]]), INTS),
    "digits": (
        pa.array([Decimal("9" * 76), None], pa.decimal256(76, 0)),
        pa.array([Decimal("0.1"), None]),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_types_are_refused_with_both_types_and_files(name, tmp_path):
    one, other = REFUSED[name]
    line = refuse(write_files(tmp_path, pa.nulls(2), one, other), tmp_path)
    types = [
        str(pq.read_schema(tmp_path / "in" / f"{number}.parquet").field("c").type)
        for number in (1, 2)
    ]
    assert (
        f"2.parquet, column 'c': its type is {types[1]} in this file, and {types[0]} in 1.parquet; write all files with one type"
        in line
    )


@pytest.mark.parametrize("source", ["delta", "iceberg"])
def test_nanoseconds_in_a_file_of_a_lake_are_not_cut(source, tmp_path):
    job = make_lake(
        tmp_path, source, counts(pa.timestamp("us"), 0, 1), counts(pa.timestamp("ns"), 0, 1)
    )
    assert (
        "column 'c': a value whose type in its file is timestamp[ns] does not fit the table's type timestamp[us]"
        in refuse(job, tmp_path)
    )


def test_a_far_time_that_the_finer_unit_cannot_hold_is_refused(tmp_path):
    line = refuse(
        write_files(
            tmp_path,
            pa.array([FIRST, LAST]).cast(pa.timestamp("us")),
            counts(pa.timestamp("ns"), 0, 1),
        ),
        tmp_path,
    )
    assert (
        "column 'c': a value whose type in its file is timestamp[us] does not fit the table's type timestamp[ns]"
        in line
    )


@pytest.mark.parametrize("name", ["null", "texts", "decimals", "lists"])
@pytest.mark.parametrize("source", ["delta", "iceberg"])
def test_files_of_a_lake_widen_by_the_same_rule(source, name, tmp_path):
    narrow, wide, _ = WIDENED[name]
    run_here(
        make_lake(
            tmp_path, source, wide.cast(pa.decimal128(5, 2)) if name == "decimals" else wide, narrow
        )
    )
    assert (
        pq.read_table(tmp_path / "out" / "part-00000.parquet")["c"].to_pylist()
        == narrow.to_pylist()
    )


def make_lake(folder, source, wide, narrow):
    """Make a table of one file, put other values of another type into the file, and write a job that keeps them."""
    table = pa.table({"c": wide, "r": [1, 2]})
    job = job_of(
        folder, table, source, {"c": {"role": "keep"}, "r": RATING}, mechanism__reference=KNOWN
    )
    [path] = (
        [folder / "in" / path for path in live_files(folder / "in")]
        if source == "delta"
        else folder.rglob("lake/**/*.parquet")
    )
    fields = pq.read_schema(path)  # with the ids of Iceberg
    pq.write_table(
        pa.table(
            [narrow, [1, 2]],
            pa.schema([fields.field("c").with_type(narrow.type), fields.field("r")]),
        ),
        path,
    )
    return job


@pytest.mark.parametrize("lazy", [False, True], ids=["pandas", "dask"])
def test_an_opened_release_rounds_no_whole_number_beside_a_null(lazy, tmp_path):
    """Of two shards, one has a null."""
    for type_, values in (
        ("int64", [2**53 + 1, -(2**63), 7, None]),
        ("uint64", [2**64 - 1, 0, 7, None]),
    ):
        array = pa.array(values, getattr(pa, type_)())
        folder = tmp_path / type_
        run_here(write_files(folder, array[:2], array[2:], output__rows_per_shard=2))
        opened = dpdask.open(str(folder / "out"))
        with dask.config.set(scheduler="synchronous"):
            found = opened.to_dask().compute() if lazy else opened.to_pandas()
        assert [None if pd.isna(value) else int(value) for value in found["c"]] == values


FAR = pa.array([7, -(10**7), 10**7, None], pa.int32()).cast(pa.date32())
HELD_BY_ARROW_ALONE = {
    "nanoseconds": pa.array([1_000, 1_001, None, 2_002], pa.time64("ns")),
    "days": FAR,
    "dates in lists": pa.array([[None], [], [10**7], None], pa.list_(pa.int32())).cast(
        pa.list_(pa.date32())
    ),
    **{
        zone: pa.array([0, 1, 10**12, None]).cast(pa.timestamp("ms", zone))
        for zone in UNKNOWN_ZONES
    },
    "far times": pa.array([0, 10**14, -(10**14), None]).cast(pa.timestamp("s", "America/New_York")),
}


@pytest.mark.parametrize("name", HELD_BY_ARROW_ALONE)
def test_kept_values_that_python_cannot_hold_are_opened_and_reported(name, tmp_path):
    """Of two shards, the first may hold none of them."""
    values = HELD_BY_ARROW_ALONE[name]
    run_here(write_files(tmp_path, values[:2], values[2:], output__rows_per_shard=2))
    opened = dpdask.open(str(tmp_path / "out"))
    with dask.config.set(scheduler="synchronous"):
        for frame in (opened.to_pandas(), opened.to_dask().compute()):
            assert pa.chunked_array([values]) == pa.chunked_array(
                pa.Table.from_pandas(frame)["c"].chunks
            ).cast(values.type)
    assert opened.share("r").estimate.sum() == pytest.approx(1.0)
    for ask in (
        lambda: opened.mean("c"),
        lambda: opened.share("c"),
        lambda: opened.crosstab("r", "c"),
        lambda: opened.mean("r", by="c"),
    ):
        with contextlib.suppress(SpecError):
            ask()
    done = call_cli(
        "report", tmp_path / "out", "--original", tmp_path / "in", "--to", tmp_path / "page.html"
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("zone", "domain"),
    list(
        zip(UNKNOWN_ZONES, [{"levels": [FIRST, LAST]}, {"bounds": [FIRST, LAST]}, {}], strict=True)
    ),
)
def test_a_private_time_of_an_unknown_zone_is_refused(zone, domain, tmp_path):
    table = pa.table({"c": pa.array([0, 1]).cast(pa.timestamp("ms", zone)), "r": [1, 2]})
    job = job_of(
        tmp_path,
        table,
        "parquet",
        {
            "c": {
                "role": "privatise",
                "kind": "categorical" if "levels" in domain else "continuous",
                **domain,
            },
            "r": RATING,
        },
    )
    for verb in ("plan", "run"):
        ended = call_cli(verb, job)
        assert ended.returncode == 65, ended.stderr
        assert "column 'c': its time zone is not known" in error_line(ended)
    assert not (tmp_path / "out").exists()
