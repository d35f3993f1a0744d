"""Fragments: their order, their identities, their fingerprint, and what is refused."""

import gzip
import os
import shutil
import time
from hashlib import blake2b
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from e2e.helpers import categorical, continuous, discrete, mixed
from hypothesis import given
from hypothesis import strategies as st

from dpdask.errors import InputError
from dpdask.io import fragments, parquet
from dpdask.io.csv import csv_type
from dpdask.io.files import DataFile, Listing
from dpdask.io.fragments import discover, read_batches, takes_in
from dpdask.io.parquet import BATCH_ROWS
from dpdask.io.storage import absolute_url
from dpdask.schema import Column, Schema

SCHEMA = Schema.from_dict(
    {
        "columns": {
            "id": {"role": "keep"},
            "x": discrete([1, 2]),
            "note": {"role": "drop"},
        }
    }
)


def part(n_rows=3, start=0):
    return pa.table(
        {
            "id": range(start, start + n_rows),
            "x": [1 + row % 2 for row in range(n_rows)],
            "note": ["n"] * n_rows,
        }
    )


def write(path, table=None, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(part() if table is None else table, path, **options)
    return path


def found(path):
    return discover(absolute_url(str(path)), SCHEMA)


def names(path):
    return [fragment.name for fragment in found(path).fragments]


def ids(path):
    return [fragment.id for fragment in found(path).fragments]


def read(table, columns=("id",)):
    batches = [
        batch
        for fragment in table.fragments
        for batch in read_batches(
            fragment, list(columns), table.types if hasattr(table, "types") else table.schema
        )
    ]
    return [value for batch in batches for value in batch.column(0).to_pylist()]


# ---- order and names


def test_files_come_in_natural_order_with_folders(tmp_path):
    for name in (
        "part.10.parquet",
        "part.2.parquet",
        "part.1.parquet",
        "b/part.1.parquet",
        "a10/x.parquet",
        "a9/x.parquet",
        "1²3.parquet",
    ):
        write(tmp_path / name)
    assert names(tmp_path) == [
        "1²3.parquet",
        "a9/x.parquet",
        "a10/x.parquet",
        "b/part.1.parquet",
        "part.1.parquet",
        "part.2.parquet",
        "part.10.parquet",
    ]


def test_a_file_a_folder_and_a_glob(tmp_path):
    for name in ("a1.parquet", "a2.parquet", "b1.parquet", "deep/a3.parquet"):
        write(tmp_path / name)
    assert names(tmp_path / "a1.parquet") == ["a1.parquet"]
    assert names(tmp_path / "a*.parquet") == ["a1.parquet", "a2.parquet"]
    assert names(tmp_path / "?1.parquet") == ["a1.parquet", "b1.parquet"]
    assert names(tmp_path / "[b]1.parquet") == ["b1.parquet"]
    assert names(tmp_path / "**" / "*3.parquet") == ["deep/a3.parquet"]
    assert names(tmp_path / "*") == [
        "a1.parquet",
        "a2.parquet",
        "b1.parquet",
    ]  # no folder is taken for a file


@pytest.mark.parametrize("name", ["ä%20é 数据", "100 % x#y"])
def test_spaces_percent_signs_and_letters_of_all_the_world(name, tmp_path):
    write(tmp_path / name / f"{name}.parquet")
    assert names(tmp_path / name) == [f"{name}.parquet"]
    assert read(found(tmp_path / name)) == [0, 1, 2]


def test_absolute_urls(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.chdir(tmp_path)
    assert absolute_url("data/", Path("/base")) == "file:///base/data"
    assert absolute_url("../data", Path("/base/jobs")) == "file:///base/data"
    assert absolute_url("~/data") == "file:///home/somebody/data"
    assert absolute_url("data") == f"file://{tmp_path}/data"
    assert absolute_url("file:///a/../b/") == absolute_url("local:///b") == "file:///b"
    assert absolute_url("s3://bucket/data/") == "s3://bucket/data"
    assert absolute_url("memory://") == "memory://"


def test_a_symbolic_link_is_the_place_it_leads_to(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert absolute_url(str(tmp_path / "link")) == absolute_url(str(tmp_path / "real"))


@pytest.mark.parametrize(
    ("url", "folder", "expected"),
    [
        ("file:///a", "file:///a", True),
        ("file:///a", "file:///a/b/c", True),
        ("file:///a", "file:///ab", False),
        ("file:///a/b", "file:///a", False),
        ("s3://bucket", "s3://bucket/out", True),
        ("s3://bucket/a", "s3://other/a/b", False),
        ("file:///a/*.parquet", "file:///a/out", False),
        ("file:///a/*/*.parquet", "file:///a/out", True),
        ("file:///a/**/*.parquet", "file:///a/b/c/out", True),
        ("file:///a/**/*.csv", "file:///a/out", False),
        ("file:///a/out/part-0000?.parquet", "file:///a/out", True),
    ],
)
def test_what_a_table_takes_in(url, folder, expected):
    assert takes_in(url, folder) == expected


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("file:///a/*/*.parquet", False),
        ("file:///a/*/*/*/*.parquet", True),
        ("file:///a/*/day=1/*/*.parquet", True),
        ("file:///b/*/day=1/*/*.parquet", False),
        ("file:///a/**/*.parquet", True),
        ("file:///a/**/*.csv", False),
    ],
)
def test_a_table_takes_in_folders_of_values(url, expected):
    assert takes_in(url, "file:///a/out", 2) == expected


# ---- identities


def test_ids_are_of_the_content_and_not_of_the_place(tmp_path):
    write(tmp_path / "one" / "a.parquet", part(10), row_group_size=4)
    write(tmp_path / "one" / "b.parquet", part(10, start=5), row_group_size=4)
    before = ids(tmp_path / "one")
    assert len(set(before)) == 6
    shutil.copytree(tmp_path / "one", tmp_path / "else" / "where")
    assert ids(tmp_path / "else" / "where") == before
    assert found(tmp_path / "else" / "where").fingerprint == found(tmp_path / "one").fingerprint
    memory = fsspec.filesystem("memory")
    memory.put(str(tmp_path / "one"), "/ids", recursive=True)
    assert [fragment.id for fragment in discover("memory://ids", SCHEMA).fragments] == before
    memory.rm("/ids", recursive=True)


def test_a_glob_and_its_folder_give_the_same_ids(tmp_path):
    write(tmp_path / "a.parquet")
    assert ids(tmp_path / "*.parquet") == ids(tmp_path) == ids(tmp_path / "a.parquet")


def test_the_fingerprint_notices_what_is_added_removed_renamed_or_changed(tmp_path):
    write(tmp_path / "a.parquet", part(5))
    write(tmp_path / "b.parquet", part(6))
    seen = [found(tmp_path).fingerprint]
    for change in (
        lambda: write(tmp_path / "c.parquet", part(7)),
        lambda: (tmp_path / "a.parquet").unlink(),
        lambda: (tmp_path / "c.parquet").rename(tmp_path / "d.parquet"),
        lambda: write(tmp_path / "b.parquet", part(6, start=100)),
    ):
        change()
        seen.append(found(tmp_path).fingerprint)
    assert len(set(seen)) == len(seen)
    assert found(tmp_path).fingerprint == seen[-1]


def test_a_changed_csv_file_is_noticed_by_its_time_and_its_id_stays(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("id,x,note\n1,1,n\n")
    before = found(tmp_path)
    os.utime(path, ns=(1, 1))
    after = found(tmp_path)
    assert after.fragments[0].id == before.fragments[0].id
    assert after.fingerprint != before.fingerprint
    with pytest.raises(InputError, match="this file changed since the run began"):
        list(read_batches(before.fragments[0], ["id"], before.schema))


def test_a_rewritten_parquet_file_is_noticed_when_it_is_read(tmp_path):
    write(tmp_path / "a.parquet", part(5))
    table = found(tmp_path)
    write(tmp_path / "a.parquet", part(5, start=100))
    with pytest.raises(InputError, match="changed since the run began"):
        read(table)
    (tmp_path / "a.parquet").unlink()
    with pytest.raises(InputError, match="this file is missing"):
        read(table)


# ---- reading


def test_a_footer_is_parsed_once_for_all_row_groups_and_again_when_the_file_changes(
    tmp_path, monkeypatch
):
    """The time of a pass is linear in the row groups: each is read without reading and parsing the whole footer again."""
    path = write(tmp_path / "a.parquet", part(300), row_group_size=1)
    os.utime(path, (1, 1))
    time.sleep(
        2 * parquet._SETTLED_SECONDS
    )  # a change right before could leave the file's times as they are
    parsed, digested = [], []
    parse, digest = parquet.parse_footer, parquet.digest_footer
    monkeypatch.setattr(
        parquet, "parse_footer", lambda *given: (parsed.append(1), parse(*given))[1]
    )
    monkeypatch.setattr(
        parquet, "digest_footer", lambda *given: (digested.append(1), digest(*given))[1]
    )
    table = found(tmp_path)
    assert read(table) == list(range(300))
    assert (len(parsed), len(digested)) == (1, 1)
    parquet.FOOTERS.cache_clear()  # as in a worker of another process
    assert read(table) == list(range(300))
    assert (len(parsed), len(digested)) == (2, 2)
    raw = path.read_bytes()
    path.write_bytes(
        raw[:-40] + bytes(byte ^ 1 for byte in raw[-40:-30]) + raw[-30:]
    )  # as long as before, and with its times
    os.utime(path, (1, 1))
    with pytest.raises(InputError, match="this file changed since the run began"):
        read(table)


def test_footers_that_are_kept_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "_KEPT_BYTES", 2000)
    for number in range(5):
        write(tmp_path / f"{number}.parquet", part(3))
    table = found(tmp_path)
    sizes = [kept.n_bytes for kept in parquet.FOOTERS._kept.values()]
    assert 1 <= len(sizes) < 5
    assert sum(sizes) <= 2000
    monkeypatch.setattr(parquet, "_KEPT_BYTES", 1)
    assert read(table) == [0, 1, 2] * 5
    assert len(parquet.FOOTERS._kept) == 1  # the newest is kept whatever its size


@pytest.mark.parametrize(
    ("name", "together"),
    [("event.text", True), ("event.a.b", False), ("event", True), (".", False)],
)
def test_a_name_with_dots_is_a_name(name, together, tmp_path, monkeypatch):
    """A column `event.text` is no field of a column `event`, and its bytes bound a batch as those of any other."""
    monkeypatch.setattr(parquet, "BATCH_BYTES", 2**16)
    if not together:
        monkeypatch.setattr(parquet, "_HELD_BYTES", 1)
    texts = [f"{row:0500}" for row in range(1000)]
    fields = pa.array([{"text": row, "a": {"b": [row]}} for row in range(1000)])
    other = "event" if name != "event" else "event.text"
    rows = pa.table(
        {
            other: fields,
            "x": [1] * 1000,
            name: texts,
            "map": pa.array(
                [[("k", row)] for row in range(1000)], pa.map_(pa.string(), pa.int64())
            ),
        }
    )
    pq.write_table(rows, tmp_path / "a.parquet")
    table = discover(
        tmp_path.as_uri(),
        Schema.from_dict({"columns": {column: {"role": "keep"} for column in rows.column_names}}),
    )
    for columns in ([name], [name, "x"], [other], ["map", name, other]):
        batches = list(read_batches(table.fragments[0], columns, table.schema, public=columns))
        assert pa.Table.from_batches(batches).equals(rows.select(columns))
        assert name not in columns or max(batch.nbytes for batch in batches) <= 2 * 2**16


def test_a_footer_about_as_long_as_the_first_read(tmp_path):
    """The footer is read by one request of 64 KiB, and by a second one if it is longer: both sides of the edge."""
    for length in range(2**16 - 40, 2**16 + 41, 8):
        table = part(1).replace_schema_metadata({"k": "v" * 64_000})
        path = write(tmp_path / "a.parquet", table)
        size = pq.read_metadata(path).serialized_size
        write(
            path, part(1).replace_schema_metadata({"k": "v" * (64_000 + (length - size) // 2)})
        )  # it stands there twice, once in Base64
        assert read(found(tmp_path)) == [0]


def test_batches_are_bounded_and_hold_the_columns_in_the_order_wanted(tmp_path):
    n_rows = BATCH_ROWS + 10
    write(
        tmp_path / "a.parquet",
        pa.table({"id": range(n_rows), "x": [1] * n_rows, "note": [""] * n_rows}),
    )
    table = found(tmp_path)
    batches = list(read_batches(table.fragments[0], ["x", "id"], table.schema))
    assert [batch.num_rows for batch in batches] == [BATCH_ROWS, 10]
    assert batches[0].schema.names == ["x", "id"]
    assert batches[1].column(1).to_pylist() == list(range(BATCH_ROWS, n_rows))


def test_batches_of_long_texts_are_bounded_by_bytes(tmp_path, monkeypatch):
    """Texts that a dictionary holds once count as often as they occur; so do whole numbers that pages hold in a few bits."""
    monkeypatch.setattr(parquet, "BATCH_BYTES", 2**16)
    texts = [f"{row:0500}" for row in range(1000)]
    same = ["x" * 500] * 1000
    write(tmp_path / "a.parquet", pa.table({"id": [7] * 1000, "x": texts, "note": same}))
    table = found(tmp_path)
    for columns, most in (
        (["x"], 2**16),
        (["note"], 2**16),
        (["id", "note"], 2**16),
        (["id"], 8200),
    ):
        batches = list(read_batches(table.fragments[0], columns, table.schema, public=columns))
        assert most / 2 < max(batch.nbytes for batch in batches) <= most
        assert sum(batch.num_rows for batch in batches) == 1000
    assert read(table, ("x",)) == texts


def test_a_reader_of_many_narrow_columns_stays_in_its_bytes(tmp_path, monkeypatch):
    """Arrow holds some 14 bytes for a value of one byte, and rounds its buffers to powers of two."""
    monkeypatch.setattr(parquet, "_READER_BYTES", 2**24)
    n_columns, n_rows = 400, 2**14 + 10
    column = pa.array([row % 2 for row in range(n_rows)], pa.int8())
    write(tmp_path / "a.parquet", pa.table({f"x{number}": column for number in range(n_columns)}))
    table = found(tmp_path)
    columns = [f"x{number}" for number in range(n_columns)]
    before, held, read_rows = pa.total_allocated_bytes(), 0, 0
    for batch in read_batches(table.fragments[0], columns, table.schema):
        held, read_rows = max(held, pa.total_allocated_bytes() - before), read_rows + batch.num_rows
    assert read_rows == n_rows
    assert 2**22 < held <= 2**24


def test_a_row_group_of_many_pages_is_read_column_by_column(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "_HELD_BYTES", 2**10)
    monkeypatch.setattr(parquet, "BATCH_BYTES", 2**12)
    rows = pa.table(
        {
            "id": range(1000),
            "x": [row / 7 for row in range(1000)],
            "note": pa.array([None, "a"] * 500).dictionary_encode(),
        }
    )
    write(tmp_path / "a.parquet", rows, row_group_size=600)
    table = found(tmp_path)
    batches = [
        batch
        for fragment in table.fragments
        for batch in read_batches(fragment, ["note", "id"], table.schema)
    ]
    assert batches[0].schema.names == ["note", "id"]
    assert 2 < len(batches) < 20
    assert [value for batch in batches for value in batch.column(1).to_pylist()] == list(
        range(1000)
    )
    assert [value for batch in batches for value in batch.column(0).to_pylist()] == [
        None,
        "a",
    ] * 500


def test_a_dropped_column_may_be_of_another_type_in_each_file(tmp_path):
    write(tmp_path / "a.parquet")
    write(tmp_path / "b.parquet", part().set_column(2, "note", pa.nulls(3)))
    assert read(found(tmp_path)) == [0, 1, 2, 0, 1, 2]


# ---- CSV


@pytest.mark.parametrize("compressed", [False, True], ids=["plain", "gzip"])
def test_a_csv_file_is_one_fragment_without_a_row_count(compressed, tmp_path):
    text = "\ufeffid,x,note\n1,1,a\n2,2,\n,1,c\n"
    data = text.encode()
    (tmp_path / ("a.csv.gz" if compressed else "a.csv")).write_bytes(
        gzip.compress(data) if compressed else data
    )
    table = found(tmp_path)
    assert table.n_rows is None
    [fragment] = table.fragments
    assert (fragment.format, fragment.row_group, fragment.where) == ("csv", 0, fragment.name)
    assert read(table) == ["1", "2", None]
    assert read(table, ("x",)) == [1, 2, 1]


def test_csv_quotes_lines_and_blocks(tmp_path):
    rows = 300_000
    (tmp_path / "a.csv").write_text("id,x,note\n" + '"1,5",1,"two ""words"""\n' * rows)
    table = found(tmp_path)
    batches = list(read_batches(table.fragments[0], ["id", "x"], table.schema))
    assert sum(batch.num_rows for batch in batches) == rows
    assert max(batch.num_rows for batch in batches) <= BATCH_ROWS
    assert len(batches) > 2
    assert batches[0].column(0)[0].as_py() == "1,5"


def test_an_empty_text_in_quotes_is_no_null(tmp_path):
    (tmp_path / "a.csv").write_text('id,x,note\n"",1,n\n,1,n\n')
    assert read(found(tmp_path)) == ["", None]


@pytest.mark.parametrize(
    ("declared", "type_"),
    [
        ({"role": "keep"}, pa.string()),
        ({"role": "keep", "type": "int16"}, pa.int16()),
        (discrete([1, 2]), pa.int64()),
        (discrete([1, 2.5]), pa.float64()),
        (categorical(["a"]), pa.string()),
        (categorical([True, False]), pa.bool_()),
        (continuous(), pa.float64()),
        (mixed(atoms=[0]), pa.float64()),
    ],
)
def test_csv_types_follow_from_the_schema(declared, type_):
    assert csv_type(Column.model_validate(declared)) == type_


# ---- refusals


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda path: (path / "a.parquet").write_bytes(b"PAR1" * 3), InputError, "Parquet"),
        (
            lambda path: (path / "a.parquet").write_bytes(b"x" * 100 + b"\xff\xff\xff\x7fPAR1"),
            InputError,
            "not a complete Parquet file",
        ),
        (
            lambda path: (path / "a.parquet").write_bytes(
                b"PAR1" + b"\x00" * 60 + (60).to_bytes(4, "little") + b"PAR1"
            ),
            InputError,
            "footer cannot be read",
        ),
        (
            lambda path: (path / "a.parquet").write_bytes(
                b"PAR1" + b"\x00" * 60 + (60).to_bytes(4, "little") + b"PARE"
            ),
            InputError,
            "Parquet",
        ),
        (
            lambda path: (path / "a.csv.gz").write_bytes(b"\x1f\x8bnothing"),
            InputError,
            "cannot be decompressed",
        ),
        (
            lambda path: (path / "a.csv.gz").write_text("id,x,note\n"),
            InputError,
            "cannot be decompressed",
        ),
    ],
)
def test_what_is_no_table_is_refused_in_one_line(make, error, says, tmp_path):
    make(tmp_path)
    with pytest.raises(error, match=says) as caught:
        found(tmp_path)
    assert "\n" not in str(caught.value)


# ---- ids


PLACES = st.tuples(
    st.text("ab/=:0", max_size=4),
    st.sampled_from(["0" * 32, "1" * 32]),
    st.integers(0, 11),
    st.integers(0, 11),
    st.dictionaries(
        st.text("ab", max_size=2),
        st.text("ab'", max_size=2) | st.none() | st.integers(0, 1),
        max_size=2,
    ),
    st.binary(max_size=2),
)


def name_fragment(place, kind):
    name, digest, row_group, version, constants, deleted = place
    file = DataFile(url="", name=name, format="parquet", constants=constants)
    return fragments._id(
        file, Listing(files=(), format=kind, version=version), digest, row_group, deleted
    )


@given(PLACES, PLACES)
def test_ids_differ_where_anything_does(one, other):
    for kind in ("delta", "iceberg"):
        assert (name_fragment(one, kind) == name_fragment(other, kind)) == (one == other)
    assert name_fragment(one, "delta") != name_fragment(one, "iceberg")


@given(PLACES)
def test_ids_of_plain_files_stay_as_they_are(place):
    name, digest, row_group, *_ = place
    assert (
        name_fragment(place, "files")
        == blake2b(f"{len(name)}:{name}:{digest}:{row_group}".encode(), digest_size=16).hexdigest()
    )
