"""Folders named `key=value`: their columns, types and nulls, what is refused, and that their values are never shown."""

import datetime as dt

import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest
from e2e.helpers import categorical, continuous, discrete
from hypothesis import given
from hypothesis import strategies as st

from dpdask.errors import DataError, DpdaskError, InputError
from dpdask.io.filesystems import mask
from dpdask.io.folders import split_folders
from dpdask.io.fragments import discover, read_batches, row_group_ranges
from dpdask.io.storage import absolute_url
from dpdask.schema import Schema

SECRET = "Zebulon"


def write(path, **columns):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns or {"x": [1, 2, 3]}), path)


def found(folder, **columns):
    declared = {"x": discrete([1, 2, 3]), **columns}
    return discover(absolute_url(str(folder)), Schema.from_dict({"columns": declared}))


def read(table, *columns):
    return [
        row
        for part in table.fragments
        for batch in read_batches(part, list(columns), table.schema)
        for row in batch.to_pylist()
    ]


def levels(*values):
    return categorical(list(values), nulls="level")


def test_partition_columns_follow_those_of_the_files(tmp_path):
    write(tmp_path / "year=2024" / "sex=f" / "a.parquet", x=[1, 2])
    write(tmp_path / "year=2025" / "sex=m" / "a.parquet", x=[3])
    table = found(tmp_path, year={"role": "keep", "type": "int32"}, sex=levels("f", "m"))
    assert table.schema == pa.schema(
        [("x", pa.int64()), ("year", pa.int32()), ("sex", pa.string())]
    )
    assert read(table, "sex", "x", "year") == [
        {"sex": "f", "x": 1, "year": 2024},
        {"sex": "f", "x": 2, "year": 2024},
        {"sex": "m", "x": 3, "year": 2025},
    ]
    assert read(table, "year") == [
        {"year": 2024},
        {"year": 2024},
        {"year": 2025},
    ]  # no column of the file is needed
    assert (table.n_rows, table.n_files) == (3, 2)


@pytest.mark.parametrize(
    ("text", "column", "value"),
    [
        ("7", levels(1, 7), 7),
        ("007", levels("007"), "007"),
        ("0.5", continuous([0, 1]), 0.5),
        ("2026-01-31", levels(dt.date(2026, 1, 31)), dt.date(2026, 1, 31)),
        ("true", levels(False, True), True),
        ("12", {"role": "keep"}, "12"),
        ("12", {"role": "keep", "type": "int8"}, 12),
        ("a%20b%2Fc%3Dd%25", {"role": "keep"}, "a b/c=d%"),
        ("a+b=c", {"role": "keep"}, "a+b=c"),
        ("", {"role": "keep"}, ""),
        ("__HIVE_DEFAULT_PARTITION__", {"role": "keep", "type": "int32"}, None),
        ("%D1%8F数", {"role": "drop"}, "я数"),
    ],
)
def test_the_schema_gives_the_type(text, column, value, tmp_path):
    write(tmp_path / f"key={text}" / "a.parquet", x=[1])
    assert read(found(tmp_path, key=column), "key") == [{"key": value}]


def test_keys_are_decoded_and_may_begin_with_an_underscore(tmp_path):
    write(tmp_path / "_day%20one=1" / "a.parquet", x=[1])
    write(tmp_path / "_temporary" / "_day%20one=1" / "a.parquet", x=[2])
    assert read(found(tmp_path, **{"_day one": {"role": "keep"}}), "_day one", "x") == [
        {"_day one": "1", "x": 1}
    ]


def test_csv_files_have_partition_columns_too(tmp_path):
    (tmp_path / "sex=f").mkdir()
    pa_csv.write_csv(pa.table({"x": [1, 2]}), tmp_path / "sex=f" / "a.csv")
    table = found(tmp_path, sex=levels("f"))
    assert read(table, "sex", "x") == [{"sex": "f", "x": 1}, {"sex": "f", "x": 2}]
    assert read(table, "sex") == [{"sex": "f"}] * 2


def test_a_glob_keeps_the_columns_that_it_matches(tmp_path):
    for year in (2024, 2025):
        write(tmp_path / f"year={year}" / "a.parquet", x=[1])
    assert read(found(f"{tmp_path}/year=*/*.parquet", year={"role": "keep"}), "year") == [
        {"year": "2024"},
        {"year": "2025"},
    ]
    inside = found(tmp_path / "year=2024")
    assert inside.schema.names == ["x"]


@pytest.mark.parametrize(
    ("paths", "columns", "says"),
    [
        (
            [f"key={SECRET}/a.parquet", "b.parquet"],
            {"key": {"role": "keep"}},
            "column 'key': some files have a folder for this column",
        ),
        (
            [f"key={SECRET}/a.parquet", "other=1/b.parquet"],
            {"key": {"role": "keep"}},
            "some files have a folder for this column",
        ),
        (
            [f"key={SECRET}/key=1/a.parquet"],
            {"key": {"role": "keep"}},
            "column 'key': two folders of one path hold this column",
        ),
        (
            [f"key={SECRET}/a.parquet"],
            {"key": levels(1, 2)},
            "column 'key': the name of a folder cannot be read as this column's declared type",
        ),
        (
            [f"key={SECRET}/a.parquet"],
            {"key": {"role": "keep", "type": "int32"}},
            "cannot be read as this column's declared type",
        ),
    ],
)
def test_folders_that_are_refused(paths, columns, says, tmp_path):
    for path in paths:
        write(tmp_path / path)
    with pytest.raises(DataError, match=says) as caught:
        found(tmp_path, **columns)
    assert SECRET not in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("values", [[5, None], [5, 6], [4, 4]])
def test_a_file_that_could_differ_from_its_folder_is_refused(values, tmp_path):
    write(tmp_path / "key=5" / "a.parquet", x=[1, 2], key=values)
    with pytest.raises(DataError, match="could disagree"):
        found(tmp_path, key={"role": "keep"})


@pytest.mark.parametrize("type_", [pa.int64(), pa.int8(), pa.string()])
def test_a_file_that_agrees_with_its_folder_is_read(type_, tmp_path):
    write(tmp_path / "key=5" / "a.parquet", x=[1, 2], key=pa.array([5, 5]).cast(type_))
    table = found(tmp_path, key={"role": "keep"})
    assert table.schema == pa.schema([("x", pa.int64()), ("key", type_)])
    assert [str(row["key"]) for row in read(table, "key")] == ["5", "5"]


def test_csv_that_holds_the_column_is_refused(tmp_path):
    (tmp_path / "key=5").mkdir()
    pa_csv.write_csv(pa.table({"x": [1], "key": [5]}), tmp_path / "key=5" / "a.csv")
    with pytest.raises(DataError, match="could disagree"):
        found(tmp_path, key={"role": "keep", "type": "int64"})


def test_messages_show_the_key_and_not_the_value(tmp_path):
    write(tmp_path / f"name={SECRET}" / "b=1" / "a.parquet")
    table = found(tmp_path, name={"role": "keep"}, b={"role": "drop"})
    [fragment] = table.fragments
    assert fragment.where == "name=…/b=…/a.parquet, row group 0"
    assert SECRET not in repr(fragment) + repr(table)
    path = tmp_path / f"name={SECRET}" / "b=1" / "a.parquet"
    for spoil in (lambda: write(path, x=[9, 9]), lambda: path.write_bytes(b"nothing"), path.unlink):
        spoil()
        with pytest.raises(InputError, match=r"name=…/b=…/a.parquet") as caught:
            read(table, "x")
        assert SECRET not in str(caught.value)
    path.write_bytes(b"PAR1")
    with pytest.raises(DpdaskError) as caught:
        found(tmp_path, name={"role": "keep"}, b={"role": "drop"})
    assert SECRET not in str(caught.value)


def test_ids_are_made_of_the_values_too_and_not_of_the_place(tmp_path):
    for folder in ("one", "two"):
        for sex in ("f", "m"):
            write(tmp_path / folder / f"sex={sex}" / "a.parquet")
    one, two = (found(tmp_path / folder, sex=levels("f", "m")) for folder in ("one", "two"))
    assert one.fingerprint == two.fingerprint
    assert len({fragment.id for fragment in one.fragments}) == 2
    (tmp_path / "two" / "sex=m").rename(tmp_path / "two" / "sex=n")
    assert found(tmp_path / "two", sex=levels("f", "n")).fingerprint != one.fingerprint


def test_partition_columns_have_no_ranges(tmp_path):
    for code in (1, 2):
        write(tmp_path / f"code={code}" / "a.parquet", x=[1, 3])
    assert row_group_ranges(found(tmp_path, code=levels(1, 2)), ["code", "x"]) == {
        "x": [(1, 3), (1, 3)]
    }


@given(
    st.dictionaries(st.text("abc_ é%=/", min_size=1), st.text("xyz =/%é.") | st.none(), max_size=3)
)
def test_quoted_names_come_back_and_masks_hide_them(columns):
    from urllib.parse import quote

    columns = {
        key: value for key, value in columns.items() if value != "__HIVE_DEFAULT_PARTITION__"
    }
    folders = [
        f"{quote(key, safe='')}={'__HIVE_DEFAULT_PARTITION__' if value is None else quote(value, safe='')}"
        for key, value in columns.items()
    ]
    name = "/".join([*folders, "part=0.parquet"])
    assert split_folders(name) == columns
    assert mask(name) == "/".join(
        [*(f"{quote(key, safe='')}=…" for key in columns), "part=0.parquet"]
    )
