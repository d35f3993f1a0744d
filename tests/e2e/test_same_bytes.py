"""One job, one seed: the same bytes on every scheduler, with any number of workers."""

import functools

import dask
import pyarrow.parquet as pq
import pytest
from distributed import Client
from e2e.helpers import (
    HOLDOUT,
    KNOWN,
    MIXED_SCHEMA,
    RATINGS_SCHEMA,
    digests,
    hidden,
    lake,
    load,
    processes,
    read_card,
    run_cli,
    run_here,
    write_job,
)

from dpdask.engine.write import lay_out
from dpdask.io.fragments import discover
from dpdask.jobs.run import run_job

ROWS = [150, 90, 1700, 40, 300, 30, 20, 900]  # fragments far below, near and far above 500 rows


@pytest.fixture(scope="module")
def lakes(tmp_path_factory):
    base = tmp_path_factory.mktemp("lakes")
    return {
        "parquet": lake(base / "parquet", ROWS, row_group=1200),
        "csv": lake(base / "csv", ROWS, csv=True),
        "public": lake(base / "public", [500, 700], seed=2),
    }


def reference(kind, lakes):
    public = str(lakes["public"])
    chain = {
        "kind": "chain",
        "fraction": 0.25,
        "by": "userId",
        "min_rows": 2,
        "max_records": 400,
        "order": "random",
    }
    return {
        "holdout": HOLDOUT,
        "known": KNOWN,
        "public": {"kind": "public", "path": public},
        "chain": chain,
        "chain of a public table": {"kind": "chain", "path": public},
        "tree": {"kind": "tree", "bins": 6},
    }[kind]


@pytest.fixture(scope="module")
def cluster():
    with processes(1) as started:
        yield started


CASES = [
    ("parquet", "holdout"),
    ("parquet", "known"),
    ("parquet", "public"),
    ("csv", "holdout"),
    ("csv", "known"),
]
CASES += [("parquet", "chain"), ("csv", "chain"), ("parquet", "chain of a public table")]
CASES += [("parquet", "tree"), ("csv", "tree")]
FEW = [
    ("parquet", "holdout"),
    ("csv", "known"),
    ("parquet", "public"),
    ("csv", "chain"),
    ("parquet", "tree"),
]


@pytest.fixture(scope="module")
def expected(lakes, tmp_path_factory):
    """Return what the synchronous scheduler publishes, by case."""

    @functools.cache
    def published(format_, kind):
        base = tmp_path_factory.mktemp("expected")
        run_here(
            write_job(
                base, lakes[format_], base / "out", mechanism__reference=reference(kind, lakes)
            )
        )
        assert not hidden(base / "out").exists()
        return digests(base / "out")

    return published


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=() if case in FEW else pytest.mark.slow, id="-".join(case))
        for case in CASES
    ],
)
def test_threads(case, lakes, expected, tmp_path):
    job = load(
        write_job(
            tmp_path,
            lakes[case[0]],
            tmp_path / "out",
            mechanism__reference=reference(case[1], lakes),
        )
    )
    with dask.config.set(scheduler="threads", num_workers=4):
        run_job(job)
    assert digests(tmp_path / "out") == expected(*case)


def check_on(cluster, workers, cases, lakes, expected, folder):
    with Client(cluster) as client:
        client.wait_for_workers(workers)
        for case in cases:
            out = folder / "-".join(case)
            run_job(
                load(
                    write_job(
                        folder, lakes[case[0]], out, mechanism__reference=reference(case[1], lakes)
                    )
                )
            )
            assert digests(out) == expected(*case)


def test_two_processes(two_workers, lakes, expected, tmp_path):
    check_on(two_workers, 2, FEW[:3], lakes, expected, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_any_number_of_processes(workers, cluster, lakes, expected, tmp_path):
    cluster.scale(workers)
    check_on(cluster, workers, CASES, lakes, expected, tmp_path)


def test_the_lake_is_cut_and_joined(lakes, expected, tmp_path):
    fragments = discover(
        str(lakes["parquet"]), load(write_job(tmp_path, lakes["parquet"], tmp_path / "out")).schema
    ).fragments
    tasks = lay_out(fragments, tuple(fragment.n_rows or 0 for fragment in fragments), 500)
    assert max(len(task.fragments) for task in tasks) >= 3
    assert max(len(task.names) for task in tasks) >= 3
    assert sum(name.endswith(".parquet") for name in expected("parquet", "holdout")) >= 5


def test_the_place_of_input_and_output_changes_only_the_job_digest(lakes, expected, tmp_path):
    moved = tmp_path / "moved"
    moved.symlink_to(lakes["parquet"])
    run_here(write_job(tmp_path, moved, tmp_path / "out"))
    there, here = expected("parquet", "holdout"), digests(tmp_path / "out")
    assert {name for name in there if there[name] != here[name]} <= {"_dpdask/manifest.json"}


def test_without_a_seed_two_runs_differ(lakes, tmp_path):
    job = write_job(tmp_path, lakes["parquet"], tmp_path / "out", insecure_seed=None)
    found = []
    for name in ("one", "two"):
        run_here(job, output__path=tmp_path / name)
        found.append(pq.read_table(tmp_path / name))
        assert read_card(tmp_path, name)["insecure"] is False
    for column in set(MIXED_SCHEMA) - {"userId", "timestamp"}:
        assert not found[0][column].equals(found[1][column]), column


@pytest.mark.slow
def test_at_scale(tmp_path):
    source = lake(tmp_path / "in", [60_000] * 20, row_group=25_000, schema=RATINGS_SCHEMA)
    options = {"schema": RATINGS_SCHEMA, "output__rows_per_shard": 40_000}
    found = set()
    for kind, workers in (
        ("synchronous", 1),
        ("threads", 2),
        ("local", 1),
        ("local", 2),
        ("local", 3),
    ):
        out, cluster = (
            tmp_path / f"{kind}{workers}",
            {"kind": kind, **({"workers": workers} if kind == "local" else {})},
        )
        result = run_cli(
            "run", write_job(tmp_path, source, out, cluster=cluster, **options), timeout=280
        )
        assert result.returncode == 0, result.stderr
        found.add(tuple(digests(out).items()))
    assert len(found) == 1
