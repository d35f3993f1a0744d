"""Delta tables as input: one version's files, deleted rows, renamed columns, and what is refused. Real tables, written by deltalake."""

import datetime as dt
import json
import shutil
import sys
from decimal import Decimal
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, WriterProperties, write_deltalake
from e2e.helpers import call_cli, error_line
from hypothesis import given
from hypothesis import strategies as st
from lakes.tables import commit, delete_rows, deletion_vector, live_files, log_of

from dpdask.errors import DataError, InputError, SpecError
from dpdask.io.fragment import count_deleted, pack, unpack
from dpdask.io.fragments import discover, read_batches, row_group_ranges
from dpdask.io.lakes import Delta
from dpdask.io.storage import absolute_url
from dpdask.schema import Schema

WITH_VECTORS = {"delta.enableDeletionVectors": "true"}
MAPPED = {
    "delta.columnMapping.mode": "name",
    "delta.minReaderVersion": "2",
    "delta.minWriterVersion": "5",
}


def found(folder, version=None, **columns):
    declared = {"x": {"role": "keep"}, **columns}
    return discover(
        absolute_url(str(folder)), Schema.from_dict({"columns": declared}), Delta(version)
    )


def read(table, *columns):
    names = list(columns or ["x"])
    rows = [
        tuple(row.values())
        for part in table.fragments
        for batch in read_batches(part, names, table.schema)
        for row in batch.to_pylist()
    ]
    return sorted((row[0] if len(row) == 1 else row for row in rows), key=repr)


def numbers(n, start=0):
    return pa.table({"x": pa.array(range(start, start + n), pa.int64())})


def in_groups(n_rows):
    return WriterProperties(max_row_group_size=n_rows)


def file_with(folder, value):
    """Return the path of the file whose first row holds a value."""
    paths = [unquote(path) for path in live_files(folder)]
    return next(
        path
        for path in paths
        if pq.read_table(folder / path, columns=["x"])["x"][0].as_py() == value
    )


# ---- versions and files


def test_only_the_files_of_the_version_are_read(tmp_path):
    write_deltalake(tmp_path, numbers(3))
    write_deltalake(tmp_path, numbers(3, 10), mode="append")
    write_deltalake(tmp_path, numbers(2, 20), mode="overwrite")
    assert read(found(tmp_path)) == [20, 21]
    assert read(found(tmp_path, 0)) == [0, 1, 2]
    assert read(found(tmp_path, 1)) == [0, 1, 10, 11, 12, 2]
    table = found(tmp_path, 1)
    assert (table.format, table.version, table.n_files, table.n_rows) == ("delta", 1, 2, 6)
    assert found(tmp_path).version == 2


def test_ids_know_the_version_and_not_the_place(tmp_path):
    for folder in (tmp_path / "a", tmp_path / "a é" / "100 %"):
        folder.parent.mkdir(exist_ok=True)
        if folder.name == "a":
            write_deltalake(folder, numbers(3))
            commit(folder, {"commitInfo": {"operation": "nothing"}})
        else:
            shutil.copytree(tmp_path / "a", folder)
    first, moved, later = (
        found(tmp_path / "a", 0),
        found(tmp_path / "a é" / "100 %", 0),
        found(tmp_path / "a", 1),
    )
    assert first.fingerprint == moved.fingerprint
    assert [part.id for part in first.fragments] == [part.id for part in moved.fragments]
    assert {part.id for part in first.fragments}.isdisjoint(part.id for part in later.fragments)
    assert [part.version for part in first.fragments] == [
        part.version for part in later.fragments
    ]  # the file is the same
    assert read(moved) == read(first) == [0, 1, 2]


def test_versions_of_a_table_without_rows_have_fingerprints_of_their_own(tmp_path):
    write_deltalake(tmp_path, numbers(0))
    commit(tmp_path, {"commitInfo": {"operation": "nothing"}})
    first, later = found(tmp_path, 0), found(tmp_path)
    assert (first.n_rows, first.schema) == (0, pa.schema([("x", pa.int64())]))
    assert first.fingerprint != later.fingerprint


# ---- partition values


def test_partition_values_come_from_the_log(tmp_path):
    rows = pa.table(
        {
            "x": [1, 2, 3, 4],
            "text": ["a b", "c/d=%", None, "Zebulon"],
            "day": pa.array([dt.date(2026, 1, 1), None, dt.date(1900, 1, 1), dt.date(2026, 1, 1)]),
            "code": pa.array([1, -2, None, 4], pa.int32()),
            "money": pa.array(
                [Decimal("1.50"), None, Decimal("2.25"), Decimal("0.00")], pa.decimal128(9, 2)
            ),
            "time": pa.array([0, 1_500_000, None, 3], pa.timestamp("us", "UTC")),
            "truth": [True, False, None, True],
        }
    )
    write_deltalake(tmp_path, rows, partition_by=rows.column_names[1:])
    columns = {name: {"role": "keep"} for name in rows.column_names[1:]}
    table = found(tmp_path, **columns)
    assert table.schema == rows.schema
    assert read(table, *rows.column_names) == [tuple(row.values()) for row in rows.to_pylist()]
    assert "Zebulon" not in repr(table)
    for part in table.fragments:
        assert "Zebulon" not in part.where


def test_a_file_does_not_overrule_the_log(tmp_path):
    write_deltalake(tmp_path, pa.table({"x": [1], "p": ["log"]}), partition_by=["p"])
    [path] = live_files(tmp_path)
    pq.write_table(pa.table({"x": [1], "p": ["file"]}), tmp_path / path)
    assert read(found(tmp_path, p={"role": "keep"}), "p") == ["log"]


# ---- deleted rows


@pytest.mark.parametrize("inline", [False, True])
def test_deleted_rows_are_not_read(inline, tmp_path):
    write_deltalake(tmp_path, numbers(10), configuration=WITH_VECTORS)
    version = delete_rows(tmp_path, {file_with(tmp_path, 0): [0, 3, 9]}, inline=inline)
    table = found(tmp_path)
    assert (table.version, table.n_rows) == (version, 7)
    assert read(table) == [1, 2, 4, 5, 6, 7, 8]
    assert read(found(tmp_path, 0)) == list(range(10))


def test_deletions_meet_their_row_groups(tmp_path):
    write_deltalake(
        tmp_path, numbers(300_000), configuration=WITH_VECTORS, writer_properties=in_groups(140_000)
    )  # of two batches each
    gone = [0, 139_999, 140_000, 271_072, 299_999, *range(281_000, 281_100)]
    delete_rows(tmp_path, {".parquet": gone})
    table = found(tmp_path)
    assert [part.n_rows for part in table.fragments] == [139_998, 139_998, 19_899]
    kept = [
        value
        for part in table.fragments
        for batch in read_batches(part, ["x"], table.schema)
        for value in batch.column(0).to_pylist()
    ]
    assert kept == sorted(set(range(300_000)) - set(gone))


def test_a_row_group_without_rows_is_no_fragment(tmp_path):
    write_deltalake(
        tmp_path, numbers(10), configuration=WITH_VECTORS, writer_properties=in_groups(4)
    )
    delete_rows(tmp_path, {".parquet": [0, 1, 2, 3, 9]})
    assert [(part.row_group, part.n_rows, part.number) for part in found(tmp_path).fragments] == [
        (1, 4, 0),
        (2, 1, 1),
    ]
    delete_rows(tmp_path, {".parquet": list(range(10))})
    assert found(tmp_path).n_rows == 0


def test_footers_that_count_deleted_rows_tell_no_ranges(tmp_path):
    write_deltalake(tmp_path, numbers(10), configuration=WITH_VECTORS)
    assert row_group_ranges(found(tmp_path), ["x"]) == {"x": [(0, 9)]}
    delete_rows(tmp_path, {".parquet": [9]})
    assert row_group_ranges(found(tmp_path), ["x"]) == {}


def test_a_vector_that_deletes_what_the_file_does_not_have_is_refused(tmp_path):
    write_deltalake(tmp_path, numbers(10), configuration=WITH_VECTORS)
    [path] = live_files(tmp_path)
    delete_rows(tmp_path, {path: [9]})
    pq.write_table(numbers(9), tmp_path / path)  # the log says ten rows
    with pytest.raises(
        InputError,
        match=r"part-.*: the table deletes rows that this file does not have; restore the table",
    ):
        found(tmp_path)
    delete_rows(tmp_path, {path: [12]})
    with pytest.raises(InputError, match="version 2: a deletion vector cannot be read"):
        found(tmp_path)


@pytest.mark.parametrize(
    "spoil", [Path.unlink, lambda path: path.write_bytes(path.read_bytes()[:-6] + b"123456")]
)
def test_a_vector_that_is_missing_or_corrupt_is_refused(spoil, tmp_path):
    write_deltalake(tmp_path, numbers(10), configuration=WITH_VECTORS)
    delete_rows(tmp_path, {".parquet": [3]})
    spoil(next(tmp_path.glob("deletion_vector_*.bin")))
    with pytest.raises(
        InputError, match="version 1: a deletion vector cannot be read: it is missing or corrupt"
    ):
        found(tmp_path)


def test_a_log_that_cannot_be_parsed_is_refused(tmp_path):
    write_deltalake(tmp_path, pa.table({"x": [1], "p": [7]}), partition_by=["p"])
    log_of(tmp_path, 0).write_text(
        log_of(tmp_path, 0)
        .read_text()
        .replace('"partitionValues":{"p":"7"}', '"partitionValues":{"p":"Zebulon"}')
    )
    with pytest.raises(InputError, match="its log cannot be read") as caught:
        found(tmp_path, p={"role": "keep"})
    assert "Zebulon" not in str(caught.value)


@given(st.lists(st.booleans(), max_size=80), st.integers(0, 100), st.integers(0, 100))
def test_masks_come_back_in_parts(deleted, start, n_rows):
    mask = np.array(deleted, dtype=bool)
    packed = pack(mask)
    assert count_deleted(packed) == mask.sum()
    whole = np.concatenate([mask, np.zeros(300, dtype=bool)])
    assert (unpack(packed, start, n_rows) == whole[start : start + n_rows]).all()


# ---- columns


def test_names_that_differ_in_case_only_are_the_cause(tmp_path):
    write_deltalake(tmp_path / "t", pa.table({"id": [1], "other": [2]}))
    log = tmp_path / "t" / "_delta_log" / f"{0:020}.json"
    log.write_text(log.read_text().replace('\\"other\\"', '\\"ID\\"'))
    ended = call_cli("init", tmp_path / "t", "--format", "delta")
    assert ended.returncode == 65
    assert "two columns have names that differ in upper and lower case only" in error_line(ended)


def test_renamed_dropped_and_added_columns(tmp_path):
    write_deltalake(
        tmp_path,
        pa.table({"x": [1, 2], "old": ["a", "b"], "p": ["u", "v"]}),
        partition_by=["p"],
        configuration=MAPPED,
    )
    metadata = next(
        json.loads(line)["metaData"]
        for line in log_of(tmp_path, 0).read_text().splitlines()
        if "metaData" in line
    )
    schema = json.loads(metadata["schemaString"])
    x, old, _ = schema["fields"]
    old["name"], x["name"] = (
        "x",
        "old",
    )  # each column takes the other's name: only the physical names tell
    schema["fields"].append(
        {
            "name": "new",
            "type": "long",
            "nullable": True,
            "metadata": {"delta.columnMapping.id": 9, "delta.columnMapping.physicalName": "col-9"},
        }
    )
    commit(tmp_path, {"metaData": {**metadata, "schemaString": json.dumps(schema)}})
    columns = {name: {"role": "keep"} for name in ("old", "p", "new")}
    assert read(found(tmp_path, **columns), "x", "old", "p", "new") == [
        ("a", 1, "u", None),
        ("b", 2, "v", None),
    ]
    assert read(found(tmp_path, 0, **columns), "x", "old", "p") == [(1, "a", "u"), (2, "b", "v")]
    ranges = row_group_ranges(found(tmp_path, **columns), ["old", "p", "new"])
    assert {name: sorted(pairs) for name, pairs in ranges.items()} == {"old": [(1, 1), (2, 2)]}


def test_columns_found_by_id(tmp_path):
    write_deltalake(tmp_path, numbers(2), configuration=MAPPED)
    text = log_of(tmp_path, 0).read_text()
    log_of(tmp_path, 0).write_text(
        text.replace('"delta.columnMapping.mode":"name"', '"delta.columnMapping.mode":"id"')
    )
    [path] = live_files(tmp_path)
    pq.write_table(
        pa.table(
            [[7, 8]],
            schema=pa.schema([pa.field("another", pa.int64(), metadata={"PARQUET:field_id": "1"})]),
        ),
        tmp_path / path,
    )
    assert read(found(tmp_path)) == [7, 8]


def test_a_column_that_the_table_got_later_is_null_in_older_files(tmp_path):
    write_deltalake(tmp_path, numbers(1))
    write_deltalake(tmp_path, pa.table({"x": [5], "y": ["b"]}), mode="append", schema_mode="merge")
    table = found(tmp_path, y={"role": "keep"})
    assert read(table, "x", "y") == [(0, None), (5, "b")]
    assert read(table, "y") == ["b", None]


@pytest.mark.parametrize(
    ("stored", "fits"),
    [
        (pa.array([1, 2], pa.uint32()), True),
        (pa.array([1, 2], pa.uint64()), False),
        (pa.array(["1", "2"]), False),
    ],
)
def test_types_of_files_become_those_of_the_table(stored, fits, tmp_path):
    write_deltalake(tmp_path, numbers(2))
    [path] = live_files(tmp_path)
    pq.write_table(pa.table({"x": stored}), tmp_path / path)
    if fits:
        assert read(found(tmp_path)) == [1, 2]
    else:
        with pytest.raises(
            DataError,
            match=r"part-.*, column 'x': its type is \w+ in this file, and int64 in the table",
        ):
            found(tmp_path)


def test_a_dropped_column_may_have_any_type_until_it_is_read(tmp_path):
    write_deltalake(tmp_path, pa.table({"x": [1], "user": [7]}))
    [path] = live_files(tmp_path)
    pq.write_table(pa.table({"x": [1], "user": [7.5]}), tmp_path / path)
    table = found(tmp_path, user={"role": "drop"})
    assert read(table) == [1]
    with pytest.raises(
        DataError, match="column 'user': its type in one file is not the table's"
    ):  # as the unit, for instance
        read(table, "user")


def test_old_timestamps_and_nested_columns(tmp_path):
    moment = dt.datetime(2026, 1, 31, 12, tzinfo=dt.UTC)
    rows = pa.table(
        {
            "x": pa.array([moment], pa.timestamp("us", "UTC")),
            "l": [[1, 2]],
            "s": [{"a": 1}],
            "m": pa.array([[("k", 1)]], pa.map_("string", "int64")),
        }
    )
    write_deltalake(tmp_path, rows)
    [path] = live_files(tmp_path)
    pq.write_table(rows, tmp_path / path, use_deprecated_int96_timestamps=True)
    columns = {name: {"role": "keep"} for name in "lsm"}
    assert read(found(tmp_path, **columns), "x", "l", "s", "m") == [
        (moment, [1, 2], {"a": 1}, [("k", 1)])
    ]
    pq.write_table(rows.set_column(2, "s", [[{"b": 1}]]), tmp_path / path)
    with pytest.raises(
        DataError,
        match=r"column 's': its type is struct<b: int64> in this file, and struct<a: int64> in the table",
    ):
        found(tmp_path, **columns)
    assert read(found(tmp_path, **{**columns, "s": {"role": "drop"}}), "l") == [[1, 2]]


# ---- what is refused


def test_as_plain_files_it_is_refused(tmp_path):
    table = tmp_path / "tables" / "t"
    table.mkdir(parents=True)
    write_deltalake(table, pa.table({"x": [1, 2], "p": ["a", "b"]}), partition_by=["p"])
    schema = Schema.from_dict({"columns": {"x": {"role": "keep"}, "p": {"role": "keep"}}})
    for path in (
        table,
        tmp_path,
        table / "p=a",
        f"{table}/*/*.parquet",
        f"{tmp_path}/*/t/p=*/*",
        next(table.glob("p=a/*")),
        f"{table}/**/*.parquet",
    ):
        with pytest.raises(
            SpecError,
            match=r"this is a Delta table, or a part of one.*with `format: delta` beside `path`",
        ) as caught:
            discover(absolute_url(str(path)), schema)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("feature", "says"),
    [
        ("fancyFeature", "this table needs a reader feature that is not supported"),
        (
            "typeWidening",
            "version 0: this table needs the reader feature 'typeWidening', which is not supported",
        ),
    ],
)
def test_unknown_reader_features_are_refused(feature, says, tmp_path):
    write_deltalake(tmp_path, numbers(1), configuration=WITH_VECTORS)
    text = log_of(tmp_path, 0).read_text()
    log_of(tmp_path, 0).write_text(text.replace('"deletionVectors"', f'"{feature}"'))
    with pytest.raises(DataError, match=says):
        found(tmp_path)


def test_other_file_systems_are_refused():
    with pytest.raises(SpecError, match="Delta tables are not read from memory://"):
        found("memory://tables/x")


def test_what_cannot_be_read_is_refused_in_one_line(tmp_path):
    with pytest.raises(InputError, match="there is no Delta table here"):
        found(tmp_path)
    with pytest.raises(InputError, match="there is no Delta table here"):
        found(tmp_path / "nothing")
    write_deltalake(tmp_path / "t", numbers(1))
    with pytest.raises(
        InputError, match="version 7 cannot be read; name a version that the table still has"
    ):
        found(tmp_path / "t", 7)
    log_of(tmp_path / "t", 0).write_text("{nothing")
    with pytest.raises(InputError, match="its log cannot be read") as caught:
        found(tmp_path / "t")
    assert "\n" not in str(caught.value)


def test_a_table_with_a_checkpoint(tmp_path):
    for start in (0, 10, 20):
        write_deltalake(tmp_path, numbers(2, start), mode="append", configuration=WITH_VECTORS)
    delete_rows(tmp_path, {file_with(tmp_path, 10): [1]})
    DeltaTable(tmp_path).create_checkpoint()
    for version in range(3):
        log_of(tmp_path, version).unlink()
    assert read(found(tmp_path)) == [0, 1, 10, 20, 21]
    with pytest.raises(InputError, match="there is no Delta table with version 1 here"):
        found(tmp_path, 1)


@pytest.mark.parametrize("place", ["file://{}/t/{}", "file:{}/t/{}", "{}/t/{}", "../t/{1}"])
def test_a_shallow_clone_is_refused(place, tmp_path):
    write_deltalake(tmp_path / "t", numbers(1))
    shutil.copytree(tmp_path / "t" / "_delta_log", tmp_path / "clone" / "_delta_log")
    log = log_of(tmp_path / "clone", 0)
    [path] = live_files(tmp_path / "clone")
    log.write_text(log.read_text().replace(f'"{path}"', f'"{place.format(tmp_path, path)}"'))
    with pytest.raises(DataError, match="files outside the table's folder"):
        found(tmp_path / "clone")


@pytest.mark.parametrize("written", ["./{}", "a/.//{}", "/{}"])
def test_a_file_under_two_names_is_refused(written, tmp_path):
    """Its rows would be released twice for one charge."""
    write_deltalake(tmp_path / "t", numbers(1))
    log = log_of(tmp_path / "t", 0)
    [path] = live_files(tmp_path / "t")
    log.write_text(log.read_text().replace(f'"{path}"', f'"{written.format(path)}"'))
    with pytest.raises(DataError, match=r"in an unusual way|outside the table's folder"):
        found(tmp_path / "t")


def test_without_its_package_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "deltalake", None)
    with pytest.raises(
        SpecError, match=r"deltalake, which is not installed; install dpdask\[delta\]"
    ):
        found(tmp_path)


def test_the_vectors_of_the_tests_are_those_of_the_protocol(tmp_path):
    write_deltalake(tmp_path, numbers(10), configuration=WITH_VECTORS)
    delete_rows(tmp_path, {".parquet": [2, 5]})
    [row] = (
        pa.RecordBatchReader.from_stream(DeltaTable(tmp_path).deletion_vectors())
        .read_all()
        .to_pylist()
    )
    assert [place for place, kept in enumerate(row["selection_vector"]) if not kept] == [2, 5]
    assert deletion_vector(tmp_path, [1])["cardinality"] == 1
