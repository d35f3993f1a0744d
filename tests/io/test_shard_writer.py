"""One shard: its bytes are a function of its rows, however they come; it is there whole or not at all."""

import gc
import hashlib

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dpdask.io import shards
from dpdask.io.shards import ROW_GROUP_ROWS, ShardWriter
from dpdask.io.storage import Folder

SCHEMA = pa.schema([("id", pa.int64()), ("x", pa.string())])


def batch(start, n_rows):
    return pa.record_batch(
        {
            "id": range(start, start + n_rows),
            "x": [f"{row % 5}" for row in range(start, start + n_rows)],
        },
        schema=SCHEMA,
    )


@pytest.fixture
def folder(tmp_path):
    return Folder(f"file://{tmp_path}")


def test_the_bytes_do_not_depend_on_the_batches(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "ROW_GROUP_ROWS", 9_000)
    n_rows = 10_000
    digests = set()
    for sizes in ([n_rows], [1, n_rows - 1], [700] * 14 + [200], [0, n_rows, 0]):
        writer = ShardWriter(folder, "a.parquet", SCHEMA)
        start = 0
        for size in sizes:
            writer.write(batch(start, size))
            start += size
        assert not (tmp_path / "a.parquet").exists()
        shard = writer.close()
        data = (tmp_path / "a.parquet").read_bytes()
        assert (shard.name, shard.n_rows, shard.n_bytes) == ("a.parquet", n_rows, len(data))
        assert shard.sha256 == hashlib.sha256(data).hexdigest()
        digests.add(shard.sha256)
        table = pq.read_table(tmp_path / "a.parquet")
        sizes_found = [
            pq.read_metadata(tmp_path / "a.parquet").row_group(group).num_rows for group in range(2)
        ]
        (tmp_path / "a.parquet").unlink()
    assert len(digests) == 1
    assert table.column("id").to_pylist() == list(range(n_rows))
    assert sizes_found == [9_000, 1000]


def test_an_empty_shard_has_its_schema(folder, tmp_path):
    assert ShardWriter(folder, "a.parquet", SCHEMA).close().n_rows == 0
    assert pq.read_schema(tmp_path / "a.parquet").remove_metadata().equals(SCHEMA)


def test_a_discarded_shard_leaves_nothing_and_says_nothing(folder, tmp_path, capfd):
    writer = ShardWriter(folder, "a.parquet", SCHEMA)
    writer.write(batch(0, ROW_GROUP_ROWS + 5))
    error = ValueError("x")
    writer.discard(error)
    del writer
    gc.collect(1)  # pyarrow's own writer would write its footer now, into a closed file
    assert list(tmp_path.iterdir()) == []
    assert capfd.readouterr().err == ""
