"""A run that is interrupted while rows are counted goes on from what its driver kept: the same bytes, and less to do."""

import numpy as np
import pytest
from e2e.helpers import HOLDOUT, MIXED_SCHEMA, digests, hidden, lake, run_here, write_job
from services.stores import everything_ever_written

from dpdask.engine import compute, scan
from dpdask.errors import TemporaryError
from dpdask.io.encrypted import EncryptedFile
from dpdask.jobs.run import abort

NUMBERS = {name: column for name, column in MIXED_SCHEMA.items() if name in ("rating", "genre")}
CASES = [
    pytest.param({"kind": "dip", "reference": HOLDOUT}, MIXED_SCHEMA, {}, id="ranks and levels"),
    pytest.param(
        {"kind": "dip", "reference": {"kind": "tree"}},
        NUMBERS,
        {"privacy__delta": 1e-6},
        id="tables",
    ),
    pytest.param({"kind": "copula", "bins": 4}, NUMBERS, {"privacy__delta": 1e-6}, id="records"),
    pytest.param(
        {"kind": "dip", "reference": HOLDOUT},
        MIXED_SCHEMA,
        {"privacy__unit": {"column": "userId", "max_rows": 2}},
        id="units",
    ),
]


@pytest.fixture(autouse=True)
def often(monkeypatch):
    """Keep counts after each window, and have several windows in a small table."""
    monkeypatch.setattr(scan, "KEEP_SECONDS", 0.0)
    monkeypatch.setattr(scan, "_KEEP_SHARE", 1e9)
    monkeypatch.setattr(compute, "_LARGEST_BATCH", 8)


def interrupt_at(place):
    """Return a progress that stops the first counting pass at a task."""

    def interrupt(name, done, _):
        if name != "units" and done == place:
            raise TemporaryError("crash")

    return interrupt


@pytest.mark.few(1)
@pytest.mark.parametrize(("mechanism", "schema", "changes"), CASES)
def test_counts_are_resumed(mechanism, schema, changes, tmp_path):
    source = lake(tmp_path / "in", [300] * 20, row_group=300, schema=schema)
    job = write_job(
        tmp_path, source, tmp_path / "out", schema=schema, mechanism=mechanism, **changes
    )
    kept = hidden(tmp_path / "out") / "counts-0"
    with pytest.raises(TemporaryError):
        run_here(job, interrupt_at(18), cluster="{kind: synchronous}")
    assert kept.stat().st_mode & 0o077 == 0
    steps = []

    def watch(name, done, total):
        steps.append((name, done, total))
        assert name != "write" or not kept.exists()

    run_here(job, watch, cluster="{kind: synchronous}")
    counted = next(name for name, _, _ in steps if name != "units")
    assert [step for step in steps if step[0] == counted][:5] == [
        (counted, done, 20) for done in range(16, 21)
    ]
    run_here(job, output__path=tmp_path / "quiet")
    assert digests(tmp_path / "out") == digests(tmp_path / "quiet")


@pytest.mark.few(1)
@pytest.mark.parametrize("harm", ["cut", "changed", "of another run", "other content"])
def test_counts_that_are_not_the_runs_own_are_counted_again(harm, tmp_path):
    job = write_job(tmp_path, lake(tmp_path / "in", [100] * 20, row_group=100), tmp_path / "out")
    kept = hidden(tmp_path / "out") / "counts-0"

    def crash():
        with pytest.raises(TemporaryError):
            run_here(job, interrupt_at(18), cluster="{kind: synchronous}")
        return kept.read_bytes()

    before = crash()
    if harm == "of another run":
        abort(str(tmp_path / "out"))
        assert not kept.exists()
        job = write_job(tmp_path, tmp_path / "in", tmp_path / "out", insecure_seed=8)
        assert crash() != before
        kept.write_bytes(before)  # by a driver of the first run that slept
    else:
        kept.write_bytes(
            {
                "cut": before[:-20],
                "changed": before[:100] + bytes([before[100] ^ 1]) + before[101:],
                "other content": b"counts",
            }[harm]
        )
    steps = []
    run_here(
        job,
        lambda name, done, _: steps.append(done) if name != "write" else None,
        cluster="{kind: synchronous}",
    )
    assert steps[:2] == [0, 1]
    run_here(job, output__path=tmp_path / "quiet")
    assert digests(tmp_path / "out") == digests(tmp_path / "quiet")


def is_uniform(data):
    """Return whether all bytes are about as frequent, as those of an encrypted file are."""
    frequencies = np.bincount(np.frombuffer(data, dtype=np.uint8), minlength=256)
    return bool(np.ptp(frequencies) < 16 * np.sqrt(len(data) / 256))


def test_what_is_kept_shows_neither_counts_nor_values(tmp_path):
    job = write_job(tmp_path, lake(tmp_path / "in", [100] * 20, row_group=100), tmp_path / "out")
    with pytest.raises(TemporaryError):
        run_here(job, interrupt_at(18), cluster="{kind: synchronous}")
    assert is_uniform((hidden(tmp_path / "out") / "counts-0").read_bytes())


@pytest.mark.slow_with("azurite")
@pytest.mark.parametrize("place", ["versioned radosgw", "azurite"])
def test_counts_are_resumed_in_a_store(place, open_store, tmp_path):
    job = write_job(tmp_path, lake(tmp_path / "in", [100] * 20, row_group=100), tmp_path / "quiet")
    quiet = run_here(job).manifest
    *versioned, name = place.split()
    with open_store(name, versioned=bool(versioned)) as store:
        with pytest.raises(TemporaryError):
            run_here(
                job, interrupt_at(18), cluster="{kind: synchronous}", output__path=store.folder.url
            )
        kept = [data for path, data in everything_ever_written(store) if path.endswith("/counts-0")]
        assert kept
        assert all(is_uniform(data) for data in kept)
        steps = []
        again = run_here(
            job,
            lambda _, done, __: steps.append(done),
            cluster="{kind: synchronous}",
            output__path=store.folder.url,
        )
        assert steps[:5] == [16, 17, 18, 19, 20]
        assert [shard.sha256 for shard in again.manifest.shards] == [
            shard.sha256 for shard in quiet.shards
        ]
        assert store.folder.sibling(".", ".dpdask").names() == []
        assert not any(
            "counts-" in path or data in kept for path, data in everything_ever_written(store)
        )


def test_short_passes_keep_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(scan, "KEEP_SECONDS", 3600.0)
    job = write_job(tmp_path, lake(tmp_path / "in", [100] * 20, row_group=100), tmp_path / "out")
    with pytest.raises(TemporaryError):
        run_here(job, interrupt_at(18), cluster="{kind: synchronous}")
    assert not (hidden(tmp_path / "out") / "counts-0").exists()


def test_a_pass_does_without_what_it_cannot_keep(tmp_path, monkeypatch):
    source = lake(tmp_path / "in", [300] * 20, row_group=300, schema=MIXED_SCHEMA)
    job = write_job(
        tmp_path,
        source,
        tmp_path / "out",
        schema=MIXED_SCHEMA,
        mechanism={"kind": "dip", "reference": HOLDOUT},
    )
    tried = []

    def fail(file, *_):
        tried.append(file.name)
        raise TemporaryError("no space left on the device")

    with monkeypatch.context() as patch:
        patch.setattr(EncryptedFile, "write", fail)
        run_here(job, cluster="{kind: synchronous}")
    assert set(tried) == {"counts-0"}
    run_here(job, output__path=tmp_path / "quiet")
    assert digests(tmp_path / "out") == digests(tmp_path / "quiet")
