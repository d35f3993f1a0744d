"""The only room that imports dask: map-reduce statistics, the driver's barrier, writing shards, frames."""
