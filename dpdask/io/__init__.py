"""Fragments in, shards and manifests out, on any fsspec file system; no dask, no mathematics."""

from dpdask.io.fragment import Fragment
from dpdask.io.fragments import InputTable, discover, read_batches
from dpdask.io.shards import Manifest, Shard, ShardWriter
from dpdask.io.storage import Folder

__all__ = [
    "Folder",
    "Fragment",
    "InputTable",
    "Manifest",
    "Shard",
    "ShardWriter",
    "discover",
    "read_batches",
]
