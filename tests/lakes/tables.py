"""Real Delta and Iceberg tables, written by their own packages; deletion vectors are written as the protocol says."""

import json
import struct
import uuid
import zlib
from pathlib import Path
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
from pyroaring import BitMap64

_MAGIC = 1681511377
_Z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"


def log_of(table, version):
    return table / "_delta_log" / f"{version:020}.json"


def live_files(table):
    """Return the add actions of the latest version, by path."""
    found = {}
    for version in range(len(list((table / "_delta_log").glob("*.json")))):
        for action in map(json.loads, log_of(table, version).read_text().splitlines()):
            if "remove" in action:
                found.pop(action["remove"]["path"], None)
            if "add" in action:
                found[action["add"]["path"]] = action["add"]
    return found


def commit(table, *actions):
    """Write one more version of a Delta table, and return its number."""
    version = len(list((table / "_delta_log").glob("*.json")))
    log_of(table, version).write_text("".join(json.dumps(action) + "\n" for action in actions))
    return version


def delete_rows(table, rows, *, inline=False):
    """Delete rows of files of a Delta table by deletion vectors, and return the new version; a file is named by a part of its path."""
    actions = []
    for part, positions in rows.items():
        [add] = [add for path, add in live_files(table).items() if part in path]
        removed = {"path": add["path"], "deletionTimestamp": 0, "dataChange": True}
        if "deletionVector" in add:
            removed["deletionVector"] = add["deletionVector"]
        actions += [
            {"remove": removed},
            {"add": {**add, "deletionVector": deletion_vector(table, positions, inline=inline)}},
        ]
    return commit(table, *actions)


def deletion_vector(table, positions, *, inline=False):
    """Write a deletion vector, and return its descriptor."""
    data = struct.pack("<I", _MAGIC) + BitMap64(positions).serialize()
    common = {"sizeInBytes": len(data), "cardinality": len(positions)}
    if inline:
        return {
            "storageType": "i",
            "pathOrInlineDv": _z85(data + b"\0" * (-len(data) % 4)),
            **common,
        }
    name = uuid.uuid4()
    framed = b"\1" + struct.pack(">I", len(data)) + data + struct.pack(">I", zlib.crc32(data))
    (table / f"deletion_vector_{name}.bin").write_bytes(framed)
    return {"storageType": "u", "pathOrInlineDv": _z85(name.bytes), "offset": 1, **common}


def _z85(data):
    text = ""
    for start in range(0, len(data), 4):
        value, digits = int.from_bytes(data[start : start + 4], "big"), ""
        for _ in range(5):
            value, digit = divmod(value, 85)
            digits = _Z85[digit] + digits
        text += digits
    return text


def sql_catalog(folder, name="lake"):
    """Return a catalog of Iceberg tables in a folder."""
    from pyiceberg.catalog.sql import SqlCatalog

    folder.mkdir(parents=True, exist_ok=True)
    catalog = SqlCatalog(name, uri=f"sqlite:///{folder}/catalog.db", warehouse=folder.as_uri())
    catalog.create_namespace_if_not_exists("db")
    return catalog


def delete_positions(table, positions):
    """Delete rows of an unpartitioned Iceberg table by a positional delete file, as engines that merge on read do."""
    deleted = [(path, position) for path, found in positions.items() for position in found]
    _commit_deletes(
        table,
        "POSITION_DELETES",
        pa.table(
            {
                "file_path": [path for path, _ in deleted],
                "pos": [position for _, position in deleted],
            }
        ),
    )


def delete_equal(table, rows):
    """Delete rows of an unpartitioned Iceberg table by an equality delete file."""
    _commit_deletes(table, "EQUALITY_DELETES", rows)


def _commit_deletes(table, content, rows):
    """pyiceberg writes no delete files: let it append a data file, and call it and its manifest what they are."""
    from pyiceberg.manifest import (
        DataFile,
        DataFileContent,
        FileFormat,
        ManifestContent,
        ManifestWriterV2,
    )
    from pyiceberg.typedef import Record

    path = (
        Path(table.location().removeprefix("file://")) / "data" / f"deletes-{uuid.uuid4()}.parquet"
    )
    pq.write_table(rows, path)
    file = DataFile.from_args(
        _table_format_version=2,
        content=DataFileContent[content],
        file_path=path.as_uri(),
        file_format=FileFormat.PARQUET,
        partition=Record(),
        record_count=rows.num_rows,
        file_size_in_bytes=path.stat().st_size,
        equality_ids=[1] if content == "EQUALITY_DELETES" else None,
    )
    file.spec_id = 0
    with (
        mock.patch.object(ManifestWriterV2, "content", return_value=ManifestContent.DELETES),
        table.transaction() as transaction,
        transaction.update_snapshot().fast_append() as append,
    ):
        append.append_data_file(file)


def rewrite_files(table):
    """Compact an Iceberg table into one file, as engines do, by a snapshot that replaces."""
    from pyiceberg.io.pyarrow import _dataframe_to_data_files
    from pyiceberg.table.snapshots import Operation, Summary
    from pyiceberg.table.update import snapshot

    summarize = snapshot.update_snapshot_summaries

    def replacing(summary, **more):
        found = summarize(summary, **more)
        return Summary(Operation.REPLACE, **found.additional_properties)

    table.refresh()
    rows, old = table.scan().to_arrow(), [task.file for task in table.scan().plan_files()]
    with (
        mock.patch.object(snapshot, "update_snapshot_summaries", replacing),
        table.transaction() as transaction,
        transaction.update_snapshot().overwrite() as rewrite,
    ):
        for file in old:
            rewrite.delete_data_file(file)
        for file in _dataframe_to_data_files(table.metadata, rows, table.io):
            rewrite.append_data_file(file)
