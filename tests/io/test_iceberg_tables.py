"""Iceberg tables as input: one snapshot's files, columns by field id, positional deletes, and what is refused. Real tables, written by pyiceberg."""

import datetime as dt
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from lakes.tables import delete_equal, delete_positions, sql_catalog
from pyiceberg.types import LongType

from dpdask.errors import DataError, InputError, SpecError, TemporaryError
from dpdask.io.fragments import discover, read_batches
from dpdask.io.lakes import Iceberg
from dpdask.io.storage import absolute_url
from dpdask.schema import Schema

ROWS = pa.table({"x": pa.array([1, 2, 3, 4], pa.int64()), "s": ["a", "b", "a", None]})


@pytest.fixture
def catalog(tmp_path):
    return sql_catalog(tmp_path / "warehouse")


def created(catalog, rows=ROWS, *, by="", name="db.t", **properties):
    table = catalog.create_table(name, schema=rows.schema, properties=properties)
    if by:
        with table.update_spec() as update:
            update.add_identity(by)
    table.append(rows)
    return table


def found(table, snapshot=None, **columns):
    """Return the table as its latest metadata file tells it."""
    declared = {"x": {"role": "keep"}, "s": {"role": "keep"}, **columns}
    return discover(
        table.metadata_location, Schema.from_dict({"columns": declared}), Iceberg(snapshot)
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


def files_of(table):
    return sorted(task.file.file_path for task in table.scan().plan_files())


def test_only_the_files_of_the_snapshot_are_read(catalog):
    table = created(catalog)
    first = table.current_snapshot().snapshot_id
    table.append(ROWS)
    table.overwrite(ROWS.slice(0, 1))
    latest = found(table)
    assert read(latest) == [1]
    assert (latest.format, latest.version, latest.n_files, latest.n_rows) == (
        "iceberg",
        table.current_snapshot().snapshot_id,
        1,
        1,
    )
    assert read(found(table, first)) == [1, 2, 3, 4]
    assert latest.schema == ROWS.schema
    assert found(table, first).fingerprint != latest.fingerprint
    with pytest.raises(
        InputError, match="the table has no snapshot 5; name a snapshot that the table still has"
    ):
        found(table, 5)


def test_a_catalog_opens_the_table(catalog, tmp_path):
    created(catalog)
    settings = {"name": "lake", "type": "sql", "uri": f"sqlite:///{tmp_path}/warehouse/catalog.db"}
    schema = Schema.from_dict({"columns": {"x": {"role": "keep"}, "s": {"role": "keep"}}})
    table = discover("db.t", schema, Iceberg(catalog=settings))
    assert read(table) == [1, 2, 3, 4]
    assert table.location == (tmp_path / "warehouse" / "db" / "t").as_uri()
    for name in ("db.nothing", "nothing.t"):
        with pytest.raises(InputError, match="the catalog has no such table"):
            discover(name, schema, Iceberg(catalog=settings))
    with pytest.raises(SpecError, match="the catalog cannot be opened as it is given"):
        discover("db.t", schema, Iceberg(catalog={"name": "nowhere"}))
    with pytest.raises(TemporaryError, match="the catalog failed"):
        discover(
            "db.t", schema, Iceberg(catalog={**settings, "uri": "sqlite:////nowhere/at/all.db"})
        )


def test_a_table_without_a_snapshot_has_no_rows(catalog):
    table = catalog.create_table("db.empty", schema=ROWS.schema)
    assert (found(table).n_rows, found(table).version) == (0, None)


def test_columns_are_found_by_their_ids(catalog):
    table = created(catalog)
    with table.update_schema() as update:
        update.rename_column("x", "was_x")
    with table.update_schema() as update:
        update.rename_column("s", "x")
    with table.update_schema() as update:
        update.add_column("s", LongType())
    table.append(
        pa.table({"was_x": pa.array([9], pa.int64()), "x": ["new"], "s": pa.array([7], pa.int64())})
    )
    columns = {"was_x": {"role": "keep"}}
    assert read(found(table, **columns), "was_x", "x", "s") == [
        (1, "a", None),
        (2, "b", None),
        (3, "a", None),
        (4, None, None),
        (9, "new", 7),
    ]
    first = table.snapshots()[0].snapshot_id
    assert found(table, first).schema.names == ["x", "s"]  # the snapshot's own schema
    assert read(found(table, first), "x", "s") == [(1, "a"), (2, "b"), (3, "a"), (4, None)]


def test_files_that_were_added_without_ids(catalog, tmp_path):
    folder = tmp_path / "elsewhere" / "day=2026-01-31"
    folder.mkdir(parents=True)
    pq.write_table(pa.table({"x": pa.array([5, 6], pa.int64())}), folder / "a.parquet")
    rows = pa.table({"x": pa.array([1], pa.int64()), "s": [dt.date(2026, 1, 1)]})
    table = created(catalog, rows)
    table.add_files([f"file://{folder}/a.parquet"])
    assert read(found(table), "x", "s") == [(1, dt.date(2026, 1, 1)), (5, None), (6, None)]
    assert "day=2026" not in " ".join(part.where for part in found(table).fragments)
    with table.transaction() as transaction:
        transaction.remove_properties("schema.name-mapping.default")
    with pytest.raises(
        DataError, match="the file has no field ids, and the table no names for its columns"
    ):
        found(table)


def test_a_file_that_lacks_its_partition_column_has_the_value_of_the_metadata(catalog, tmp_path):
    table = created(
        catalog, pa.table({"x": pa.array([1], pa.int64()), "s": [dt.date(2026, 1, 1)]}), by="s"
    )
    path = Path(files_of(table)[0].removeprefix("file://"))
    pq.write_table(pq.read_table(path, partitioning=None).select(["x"]), path)
    assert read(found(table), "x", "s") == [(1, dt.date(2026, 1, 1))]


def test_positional_deletes_are_applied(catalog):
    table = created(catalog)
    table.append(pa.table({"x": pa.array([5, 6, 7], pa.int64()), "s": ["c", "d", "e"]}))
    before = table.current_snapshot().snapshot_id
    first, second = sorted(
        files_of(table),
        key=lambda path: pq.read_table(path.removeprefix("file://"))["x"][0].as_py(),
    )
    delete_positions(table, {first: [0, 3], second: [1]})
    delete_positions(table, {second: [2]})
    opened = found(table)
    assert read(opened) == [2, 3, 5]
    assert opened.n_rows == 3
    assert read(found(table, before)) == [1, 2, 3, 4, 5, 6, 7]
    assert sorted(table.scan().to_arrow()["x"].to_pylist()) == [2, 3, 5]  # pyiceberg reads the same
    table.append(pa.table({"x": pa.array([8, 9], pa.int64()), "s": ["c", "d"]}))
    assert read(found(table)) == [2, 3, 5, 8, 9]


def test_a_corrupt_or_missing_delete_file_is_refused(catalog):
    table = created(catalog)
    delete_positions(table, {files_of(table)[0]: [0]})
    [path] = Path(table.location().removeprefix("file://")).glob("data/deletes-*")
    path.write_bytes(b"nothing")
    with pytest.raises(
        InputError, match=r"delete file deletes-.*: this is not a complete Parquet file"
    ):
        found(table)
    path.unlink()
    with pytest.raises(InputError, match="this file is missing"):
        found(table)


def test_equality_deletes_are_refused(catalog):
    table = created(catalog)
    delete_equal(
        table,
        pa.table(
            [[1]], schema=pa.schema([pa.field("x", pa.int64(), metadata={"PARQUET:field_id": "1"})])
        ),
    )
    with pytest.raises(
        DataError,
        match="this snapshot has equality deletes, which are not supported; compact the table",
    ) as caught:
        found(table)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_listed_twice_is_refused(catalog, tmp_path):
    table = created(catalog)
    pq.write_table(ROWS, tmp_path / "a.parquet")
    for _ in range(2):
        table.add_files([(tmp_path / "a.parquet").as_uri()], check_duplicate_files=False)
    with pytest.raises(DataError, match="the table lists a file twice"):
        found(table)


def test_a_row_group_that_a_footer_lists_twice_is_refused(tmp_path):
    pq.write_table(ROWS, tmp_path / "a.parquet")
    whole = (tmp_path / "a.parquet").read_bytes()
    metadata = pq.read_metadata(tmp_path / "a.parquet")
    metadata.append_row_groups(pq.read_metadata(tmp_path / "a.parquet"))
    metadata.write_metadata_file(tmp_path / "footer")
    length = int.from_bytes(whole[-8:-4], "little")
    (tmp_path / "a.parquet").write_bytes(
        whole[: -8 - length] + (tmp_path / "footer").read_bytes()[4:]
    )
    assert pq.read_table(tmp_path / "a.parquet").num_rows == 2 * len(ROWS)  # which Arrow reads
    columns = {name: {"role": "drop"} for name in ROWS.schema.names}
    with pytest.raises(InputError, match="its Parquet footer cannot be read: it is corrupt"):
        discover(str(tmp_path / "a.parquet"), Schema.from_dict({"columns": columns}))


def test_a_file_that_expired_is_missed(catalog):
    table = created(catalog)
    Path(files_of(table)[0].removeprefix("file://")).unlink()
    with pytest.raises(InputError, match=r"data/.*parquet: this file is missing"):
        found(table)


def test_as_plain_files_it_is_refused(catalog, tmp_path):
    table = created(catalog, by="s")
    folder = tmp_path / "warehouse" / "db" / "t"
    schema = Schema.from_dict({"columns": {"x": {"role": "keep"}, "s": {"role": "keep"}}})
    for path in (
        folder,
        folder / "data",
        folder / "data" / "s=a",
        f"{folder}/data/*/*.parquet",
        tmp_path,
        files_of(table)[0],
    ):
        with pytest.raises(
            SpecError,
            match=r"this is an Iceberg table, or a part of one.*with `format: iceberg` beside `path`",
        ):
            discover(absolute_url(str(path)), schema)


def test_what_is_no_metadata_file_is_refused(catalog, tmp_path, monkeypatch):
    schema = Schema.from_dict({"columns": {"x": {"role": "keep"}}})
    with pytest.raises(
        SpecError,
        match=r"this is not a metadata file of an Iceberg table; name one \(….metadata.json\), or set `input.catalog`",
    ):
        discover(tmp_path.as_uri(), schema, Iceberg())
    with pytest.raises(InputError, match="this file is missing"):
        discover(f"{tmp_path.as_uri()}/v1.metadata.json", schema, Iceberg())
    (tmp_path / "v1.metadata.json").write_text("{}")
    with pytest.raises(InputError, match="its metadata cannot be read"):
        discover(f"{tmp_path.as_uri()}/v1.metadata.json", schema, Iceberg())
    monkeypatch.setitem(sys.modules, "pyiceberg.catalog", None)
    with pytest.raises(SpecError, match=r"install dpdask\[iceberg\]"):
        discover(f"{tmp_path.as_uri()}/v1.metadata.json", schema, Iceberg())
