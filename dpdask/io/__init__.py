"""Fragments in, shards and manifests out, on any fsspec file system; no dask, no mathematics."""
