"""The five measured facts about Dask that the design rests on: if an upgrade changes one, it is seen here."""

import os
import signal
import threading
import time
from pathlib import Path

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from dask.distributed import Client, LocalCluster
from e2e.helpers import discrete, lake, load, processes, write_job

import dpdask
from dpdask.jobs import run
from dpdask.mechanisms.dip import columns

pytestmark = pytest.mark.more

FRAME = pd.DataFrame({"x": np.zeros(80)})
CALLS = {"noise": 0}
LOCK = threading.Lock()


@pytest.fixture(scope="module")
def cluster():
    with dask.config.set({"distributed.scheduler.allowed-failures": 100}), processes(2) as started:
        yield started


def noisy_reference(_):
    with LOCK:
        CALLS["noise"] += 1
    return pd.DataFrame({"r": [np.random.default_rng().random()]})


def take_reference(part, reference):
    return part.assign(r=reference["r"].iloc[0])


def add_noise(part):
    return part + np.random.default_rng().random(part.shape)


def test_1_fusion_redraws_central_noise():
    CALLS["noise"] = 0
    noisy = dd.from_pandas(FRAME, npartitions=1).map_partitions(
        noisy_reference, meta=pd.DataFrame({"r": [0.0]})
    )
    rows = dd.from_pandas(FRAME, npartitions=8)
    with dask.config.set(scheduler="threads"):
        persisted = rows.map_partitions(take_reference, noisy, meta=FRAME.assign(r=0.0)).persist()
        assert CALLS["noise"] == 8
        assert persisted["r"].compute().nunique() == 8


def test_1_ours_fits_once_on_the_driver(tmp_path, monkeypatch):
    fits = []
    fit = columns.fit_dip

    def counted(*args):
        fits.append((os.getpid(), threading.current_thread() is threading.main_thread()))
        return fit(*args)

    monkeypatch.setattr(columns, "fit_dip", counted)
    with dask.config.set(scheduler="threads"):
        run.run_job(load(write_job(tmp_path, lake(tmp_path / "in", [300] * 8), tmp_path / "out")))
    assert fits == [(os.getpid(), True)]


def kill_one(cluster):
    os.kill(next(nanny.pid for nanny in cluster.workers.values() if nanny.pid), signal.SIGKILL)


def test_2_a_lost_worker_redraws_unseeded_noise(cluster):
    with Client(cluster) as client:
        client.wait_for_workers(2)
        parts = [
            dask.delayed(lambda: np.random.default_rng().random(), pure=False)(
                dask_key_name=f"fact-2-{number}"
            )
            for number in range(8)
        ]
        futures = client.compute(parts, workers=None)
        before = client.gather(futures)
        kill_one(cluster)
        time.sleep(0.5)
        after = client.gather(futures)
    assert 1 <= sum(one != other for one, other in zip(before, after, strict=True)) <= 8


def test_2_ours_draws_the_same(cluster):
    schema = dpdask.Schema.from_dict({"columns": {"x": discrete([0.0, 1.0, 2.0, 3.0])}})
    frame = pd.DataFrame({"x": np.random.default_rng(0).integers(0, 4, 800).astype(float)})
    with Client(cluster) as client:
        client.wait_for_workers(2)
        rows = dd.from_pandas(frame, npartitions=8)
        release = dpdask.DIP(schema, epsilon=1.0, reference=dpdask.Holdout(fraction=0.25)).fit(rows)
        private = release.transform(rows).persist()
        before = private.compute()
        kill_one(cluster)
        time.sleep(0.5)
        after = private.compute()
    pd.testing.assert_frame_equal(before, after)


def test_3_same_code_same_token_same_noise():
    rows = dd.from_pandas(FRAME, npartitions=4)
    one, other = (rows.map_partitions(add_noise, meta=FRAME) for _ in range(2))
    with dask.config.set(scheduler="synchronous"):
        assert (one - other).compute().to_numpy().max() == 0.0


def test_4_read_parquet_joins_files(tmp_path):
    twenty = lake(tmp_path / "in", [50] * 20)
    assert (dd.read_parquet(twenty)["rating"] + 1).optimize().npartitions == 4
    with dask.config.set({"optimization.tune.active": False}):
        assert (dd.read_parquet(twenty)["rating"] + 1).optimize().npartitions == 20


def test_4_a_partition_number_is_no_identity():
    def number(part, partition_info=None):
        return part.assign(number=-1 if partition_info is None else partition_info["number"])

    whole = dd.from_pandas(FRAME, npartitions=8)
    meta = FRAME.assign(number=0)
    with dask.config.set(scheduler="synchronous"):
        assert set(whole.partitions[5:8].map_partitions(number, meta=meta).compute()["number"]) == {
            0,
            1,
            2,
        }


def test_5_a_broadcast_decays():
    quiet = {"dashboard": False, "dashboard_address": "127.0.0.1:0"}
    threads = LocalCluster(
        n_workers=4,
        threads_per_worker=1,
        processes=False,
        dashboard_address="127.0.0.1:0",
        scheduler_kwargs=quiet,
    )
    with threads as cluster, Client(cluster) as client:
        client.wait_for_workers(4)
        client.amm.stop()  # else it may drop the first copies before they are counted
        future = client.scatter(np.arange(1000), broadcast=True)
        [holders] = client.who_has(future).values()
        assert len(holders) == 4
        client.amm.start()
        until = time.monotonic() + 30
        while len(holders) > 1 and time.monotonic() < until:
            time.sleep(0.2)
            [holders] = client.who_has(future).values()
        assert len(holders) == 1


def test_5_ours_hands_out_paths():
    assert [
        path
        for path in Path(dpdask.__file__).parent.rglob("*.py")
        if ".scatter(" in path.read_text()
    ] == []
