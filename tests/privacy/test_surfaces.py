"""A team's cluster with its dashboard open, while jobs run and fail on it: planted values stand nowhere.

A task that carries the same values in its name, its arguments and its error is found by the same search, on every surface.
"""

import gc
import math
import struct
import threading

import dask
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from distributed import Client, LocalCluster
from e2e.helpers import categorical, continuous, discrete, hidden, load, refusing, write_job
from privacy.surfaces import Surfaces, forms

from dpdask.connect import open_cluster
from dpdask.errors import DataError
from dpdask.jobs.run import run_job

pytest.importorskip("bokeh", reason="the dashboard's plots need bokeh")
pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:coroutine 'WSHandler.send_message' was never awaited:RuntimeWarning"
    ),  # plots that are closed
    pytest.mark.filterwarnings(
        "ignore:Exception ignored in. <socket.socket:pytest.PytestUnraisableExceptionWarning"
    ),  # of a cluster that stops
]

INCOME, USER, NAME, UNDECLARED = (
    481_516.234210815,
    77_131_317_713,
    "Melpomene of Lindos",
    "Erato of Samos",
)
PLANTED = {
    "income": [*forms(INCOME), struct.pack("<d", INCOME)],
    "user": [*forms(USER), struct.pack("<q", USER)],
}
PLANTED |= {"name": forms(NAME), "undeclared level": forms(UNDECLARED)}
SCHEMA = {
    "user": {"role": "keep", "type": "int64"},
    "name": {"role": "drop", "type": "string"},
    "rating": discrete([1, 2, 3, 4, 5], type="int64"),
    "note": categorical(["x", "y"], type="string"),
    "income": continuous([0.0, 1e6], type="float64"),
}
WITHOUT_KEPT = SCHEMA | {"user": {"role": "drop", "type": "int64"}}
ANCHORS = {"design": "case2", "anchors": {"name": "uniform", "loc": 0, "scale": 1e6}}
JOBS = {
    "holdout": {},
    "by user": {"privacy__unit": {"column": "user", "max_rows": 50}},
    "chain": {"mechanism__reference": {"kind": "chain", "fraction": 0.25}},
    "histogram": {"mechanism__reference": {"kind": "histogram"}},
    "copula": {"schema": WITHOUT_KEPT, "mechanism": {"kind": "copula"}, "privacy__delta": 1e-6},
    "interval": {
        "schema": refusing(
            SCHEMA
            | {
                "rating": {"role": "drop", "type": "int64"},
                "note": {"role": "drop", "type": "string"},
            }
        ),
        "mechanism": {"kind": "interval", "columns": {"income": ANCHORS}},
        "privacy": None,
    },
}
LEVELS_ARE_READ = [name for name in JOBS if name != "interval"]


def written(folder, n_rows, *, undeclared):
    """Write people of whom one in twenty has the planted values; at the end, one has a level that is not declared."""
    folder.mkdir()
    rng = np.random.default_rng(5)
    for number in range(3):
        planted = rng.random(n_rows) < 0.05
        note = rng.choice(["x", "y"], n_rows).astype(object)
        if undeclared and number == 2:
            note[-1], planted[-1] = UNDECLARED, True
        columns = {
            "user": np.where(planted, USER, rng.integers(0, 500, n_rows)),
            "name": np.where(planted, NAME, "somebody"),
            "rating": rng.integers(1, 6, n_rows),
            "note": note,
            "income": np.where(planted, INCOME, rng.uniform(0, 1e6, n_rows)),
        }
        pq.write_table(pa.table(columns), folder / f"{number}.parquet", row_group_size=5_000)
    return folder


@pytest.fixture
def cluster(tmp_path):
    settings = {
        "distributed.deploy.lost-worker-timeout": "1h",
        "distributed.admin.log-length": 100_000,
        "temporary-directory": str(tmp_path / "dask"),
        "distributed.worker.multiprocessing-method": "spawn",  # as users' workers start
    }
    options = {
        "host": "127.0.0.1",
        "dashboard_address": "127.0.0.1:0",
        "worker_dashboard_address": "127.0.0.1:0",
    }
    with (
        dask.config.set(settings),
        LocalCluster(n_workers=2, threads_per_worker=1, **options) as started,
    ):
        yield started
    gc.collect()  # what bokeh left, while its warnings are expected


@pytest.fixture
def surfaces(cluster):
    with Client(cluster, set_as_default=False) as client:
        found = Surfaces(client)
        found.open_plots()
        yield found
        found.close()


def run_watched(job, out, cluster, surfaces, keys):
    """Run a job on the cluster while somebody looks at everything, again and again; return its error."""
    errors = []

    def run():
        try:
            with open_cluster(load(job).file.cluster, cluster.scheduler_address):
                run_job(
                    load(job),
                    lambda *_: keys.update(
                        path.read_bytes() for path in [hidden(out) / "run.key"] if path.exists()
                    ),
                )
        except DataError as error:
            errors.append(error)

    running = threading.Thread(target=run)
    running.start()
    while running.is_alive():
        surfaces.look()
        running.join(timeout=1.0)
    surfaces.look_back()
    return errors[0] if errors else None


def run_all(names, sources, folder, cluster, surfaces):
    """Run the jobs on good and on bad data; return their run keys."""
    keys = set()
    for quality, source in sources.items():
        for name in (
            names if quality == "good" else [name for name in names if name in LEVELS_ARE_READ]
        ):
            out = folder / f"out-{quality}-{name}"
            job = write_job(
                folder / f"job-{quality}-{name}",
                source,
                out,
                **{"schema": SCHEMA, "insecure_seed": None, **JOBS[name]},
            )
            error = run_watched(job, out, cluster, surfaces, keys)
            assert (error is None) == (quality == "good")
            assert UNDECLARED not in str(error)
    return keys


@pytest.mark.parametrize(
    ("names", "n_rows"),
    [
        pytest.param(["holdout"], 30_000, id="some"),
        pytest.param(
            [*JOBS], 30_000, id="all", marks=[pytest.mark.slow, pytest.mark.timeout(1200)]
        ),
    ],
)
def test_planted_values_stand_nowhere(names, n_rows, cluster, surfaces, tmp_path):
    sources = {
        quality: written(tmp_path / quality, n_rows, undeclared=quality == "bad")
        for quality in ("good", "bad")
    }
    keys = set()
    surfaces.with_report(lambda: keys.update(run_all(names, sources, tmp_path, cluster, surfaces)))
    surfaces.look_at_plots()
    assert len(keys) >= len(names)
    assert (
        surfaces.found(
            PLANTED | {f"run key {number}": forms(key) for number, key in enumerate(keys)}
        )
        == {}
    )
    shown = {name: b"".join(texts) for name, texts in surfaces.shown.items()}
    for name in (
        "task names",
        "task stream",
        "story",
        "scheduler state",
        "plot individual-task-stream",
        "performance report",
        "dump",
    ):
        assert b"dpdask-write-" in shown[name] or b"dpdask-survey-" in shown[name], (
            name
        )  # there was something to see
    assert b"Compute Failed" in shown["worker logs"]
    assert b"outside its levels" in shown["worker logs"]
    assert b"dpdask" in shown["call stacks"]
    assert b"dpdask" in shown["profile"]


LEAK = f"""
def {NAME.replace(" ", "_")}(value, seen):
    import os, time
    for _ in range(1200):
        if not os.path.exists(seen):
            time.sleep(0.1)
    raise ValueError(f"{{value}} is bad")
"""
WHILE_IT_RUNS = ("call stacks", "page info/call-stacks/{}.html")


@pytest.mark.more
def test_values_that_a_task_carries_are_found(cluster, surfaces, tmp_path):
    space = {}
    exec(LEAK, space)  # call stacks and profiles show the names of functions alone
    leaky, name = space[NAME.replace(" ", "_")], NAME.replace(" ", "_").encode()

    def leak():
        future = surfaces.client.submit(
            leaky, INCOME, str(tmp_path / "seen"), key=f"leak-{USER}", pure=False
        )
        while not future.done():
            surfaces.look()
            if all(
                any(name in text for text in surfaces.shown[surface]) for surface in WHILE_IT_RUNS
            ):
                (tmp_path / "seen").touch()
        surfaces.look()
        surfaces.look_back()
        surfaces.look_at_plots()
        assert isinstance(future.exception(), ValueError)

    surfaces.with_report(leak)
    found = surfaces.found(PLANTED | {"name": [name]})
    on_all = [
        "scheduler state",
        "worker state",
        "worker logs",
        "dump",
        "plot individual-exceptions",
    ]
    on_all += ["page info/task/{}.html", "page info/main/exceptions.html", "page info/logs/{}.html"]
    by_name = [
        "task names",
        "task stream",
        "story",
        "performance report",
        "plot individual-task-stream",
        "plot individual-graph",
    ]
    for surfaces_, value in (
        (on_all, "income"),
        ([*on_all, *by_name], "user"),
        ((*WHILE_IT_RUNS, "profile"), "name"),
    ):
        for surface in surfaces_:
            assert value in found.get(surface, ()), (surface, value)


def test_every_form_of_a_value_is_searched_for():
    assert forms(b"\x00key") == [b"\x00key", b"006b6579", rb"\x00key"]
    assert math.isclose(struct.unpack("<d", PLANTED["income"][-1])[0], INCOME)
