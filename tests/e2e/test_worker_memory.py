"""Row groups that are large for a worker: many long texts, and very many columns."""

import dask
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from distributed import Client, LocalCluster
from e2e.helpers import discrete, load, write_job

from dpdask.jobs.run import run_job

LEVELS = list(range(100))
PRIVATE = discrete(LEVELS)


@pytest.fixture(scope="module")
def small_worker():
    options = {"dashboard_address": "127.0.0.1:0", "scheduler_kwargs": {"dashboard": False}}
    options |= {"host": "127.0.0.1", "memory_limit": "1GiB"}
    spawned = dask.config.set(
        {"distributed.worker.multiprocessing-method": "spawn"}
    )  # with the memory that a user's worker has
    with (
        spawned,
        LocalCluster(n_workers=1, threads_per_worker=1, **options) as cluster,
        Client(cluster),
    ):
        yield cluster


def long_texts():
    letters = np.random.default_rng(1).integers(97, 123, (300_000, 1000), dtype=np.uint8)
    return pa.table(
        {
            "text": pa.array([row.tobytes().decode() for row in letters]),
            "x": np.arange(300_000) % 100,
        }
    )


def repeated_texts():
    return pa.table({"text": pa.array(["y" * 1000] * 300_000), "x": np.arange(300_000) % 100})


def many_columns():
    rng = np.random.default_rng(2)
    return pa.table(
        {f"c{place}": rng.integers(0, 100, 131_072).astype(np.int8) for place in range(2000)}
    )


@pytest.mark.slow
@pytest.mark.parametrize("order", ["shuffled", "keep"])
@pytest.mark.parametrize("make", [long_texts, repeated_texts, many_columns])
def test_a_worker_of_one_gibibyte_releases_a_large_row_group(make, order, small_worker, tmp_path):
    rows = make()
    pq.write_table(rows, tmp_path / "in.parquet", row_group_size=len(rows))
    schema = {name: {"role": "keep"} for name in rows.schema.names} | {
        rows.schema.names[-1]: PRIVATE
    }
    job = write_job(
        tmp_path,
        tmp_path / "in.parquet",
        tmp_path / "out",
        schema=schema,
        output__order=order,
        output__rows_per_shard=1_000_000,
    )
    outcome = run_job(load(job, insecure_seed="7"))
    assert outcome.status == "released"
    assert (
        0.7
        < pq.ParquetDataset(tmp_path / "out").read([rows.schema.names[-1]]).num_rows / len(rows)
        < 0.8
    )
