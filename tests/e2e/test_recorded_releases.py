"""Seeded jobs release what they released when `recorded_releases.json` was recorded.

The jobs cover every mechanism, every reference and the main options. Each is compared by the content of its released table:
the rows of each shard and, for each column, its name, its Arrow type and a digest of its values in order. Files are not
compared byte by byte, because another version of pyarrow writes other bytes.

Whole numbers, texts, dates and nulls are compared exactly; so are floats that are kept or are declared levels. Other floats
are rounded to 9 significant digits first, because the last bits of exp and log differ between processors.

A Parquet file's footer names the version of pyarrow that wrote it, the footer is part of a fragment's id, and the noise of
released rows depends on that id. With another version of pyarrow, the jobs that release rows of Parquet files are skipped.

A change that is meant to alter releases records them again, all or by name, and its changelog entry says so:

    PYTHONPATH=.:tests python -m e2e.test_recorded_releases [--cards FILE] [JOB ...]

Only this command writes the file; the tests never do. `--cards` also writes the jobs' release cards, without the versions
of libraries, and their digests to a file of your choice, so that two versions' cards can be compared.
"""

import argparse
import hashlib
import json
import tempfile
from pathlib import Path

import dask
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from e2e.recorded import JOBS, SCHEMA, run_recorded, write_lakes

RECORDED = Path(__file__).with_name("recorded_releases.json")


# ---- what is compared


def depends_on_pyarrow(name):
    """Return whether a job releases rows of Parquet files, whose footers name their writer."""
    return (
        JOBS[name]["mechanism"]["kind"] in ("dip", "interval")
        and JOBS[name].get("input", "parquet") == "parquet"
    )


def content(output, exact):
    """Return the rows of each shard and the digest of each column; floats are rounded but those of the columns `exact`."""
    shards = [pq.read_table(path) for path in sorted(output.glob("*.parquet"))]
    whole = pa.concat_tables(shards)
    return {
        "rows": " ".join(str(shard.num_rows) for shard in shards),
        "columns": {
            field.name: f"{field.type} {digest(whole[field.name], exact=field.name in exact)}"
            for field in whole.schema
        },
    }


def digest(column, *, exact):
    """Return a digest of a column's values in order."""

    def written(value):
        if isinstance(value, float):
            return value.hex() if exact else f"{value:.8e}"
        return value if value is None or isinstance(value, int | str) else str(value)

    return hashlib.sha256(
        json.dumps([written(value) for value in column.to_pylist()]).encode()
    ).hexdigest()[:32]


def content_of(name, output):
    """Return the content of a job's output."""
    schema = JOBS[name].get("schema", SCHEMA)
    return content(
        output,
        {
            column
            for column, declared in schema.items()
            if declared["role"] == "keep" or "levels" in declared
        },
    )


def card_of(output):
    """Return a release card without the versions of libraries."""
    card = json.loads((output / "_dpdask" / "release.json").read_text(encoding="utf-8"))
    return {key: value for key, value in card.items() if key != "versions"}


# ---- the tests


@pytest.fixture(scope="module")
def recorded():
    return json.loads(RECORDED.read_text(encoding="utf-8"))


@pytest.mark.few(8)
@pytest.mark.parametrize("name", JOBS)
def test_a_job_releases_what_it_released(name, shelf, recorded):
    if depends_on_pyarrow(name) and recorded["pyarrow"] != pa.__version__:
        pytest.skip(
            f"recorded with pyarrow {recorded['pyarrow']}: the fragments of files that another version wrote have other ids"
        )
    assert content_of(name, shelf.release(name)) == recorded["jobs"][name]


FEW_BATCHES = [
    "dip holdout, unit, optimal, keep",
    "dip chain by user",
    "dip tree, delta, unit, keep",
    "interval, coverage, keep",
    "interval, perturbed",
]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in FEW_BATCHES else pytest.mark.slow) for name in JOBS],
)
def test_a_release_does_not_depend_on_the_batches(name, shelf, recorded, tmp_path, monkeypatch):
    """Every random stream goes on from batch to batch; the first pass may cut a fragment otherwise than the second."""
    if depends_on_pyarrow(name) and recorded["pyarrow"] != pa.__version__:
        pytest.skip(
            f"recorded with pyarrow {recorded['pyarrow']}: the fragments of files that another version wrote have other ids"
        )
    monkeypatch.setattr("dpdask.io.parquet.BATCH_BYTES", 2**12)
    monkeypatch.setattr("dpdask.io.csv._BATCH_ROWS", 100)
    assert (
        content_of(name, run_recorded(name, shelf.recorded_lakes, tmp_path))
        == recorded["jobs"][name]
    )


def test_every_recorded_job_is_run_and_no_two_release_the_same(recorded):
    assert list(recorded["jobs"]) == list(JOBS)
    assert len({json.dumps(job) for job in recorded["jobs"].values()}) == len(JOBS)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([1, None], [1, 0]),
        ([0.0, 1.0], [-0.0, 1.0]),
        ([None, 1.0], [float("nan"), 1.0]),
        ([None], ["None"]),
    ],
)
def test_a_digest_tells_values_apart(one, other):
    assert digest(pa.chunked_array([one]), exact=False) != digest(
        pa.chunked_array([other]), exact=False
    )


# ---- recording


def record(names, cards):
    """Run jobs, all if none is named, and write what they release; other jobs' records stay."""
    unknown = [name for name in names if name not in JOBS]
    if unknown:
        raise SystemExit(f"there is no job {unknown[0]!r}; the jobs are: {'; '.join(JOBS)}")
    known = (
        json.loads(RECORDED.read_text(encoding="utf-8"))
        if RECORDED.exists()
        else {"pyarrow": pa.__version__, "jobs": {}}
    )
    if names and known["pyarrow"] != pa.__version__:
        raise SystemExit(
            f"the other jobs were recorded with pyarrow {known['pyarrow']}: record all, or use that version"
        )
    found = {}
    found_cards = {}
    with tempfile.TemporaryDirectory() as base, dask.config.set({"temporary-directory": base}):
        lakes = write_lakes(Path(base) / "lakes")
        for number, name in enumerate(names or JOBS):
            output = run_recorded(name, lakes, Path(base) / str(number))
            found[name], found_cards[name] = content_of(name, output), card_of(output)
    jobs = {
        name: found.get(name, known["jobs"].get(name))
        for name in JOBS
        if name in found or name in known["jobs"]
    }
    RECORDED.write_text(
        json.dumps({"pyarrow": pa.__version__, "jobs": jobs}, indent=1) + "\n", encoding="utf-8"
    )
    if cards is not None:
        digests = {
            name: hashlib.sha256(json.dumps(card, sort_keys=True).encode()).hexdigest()[:32]
            for name, card in found_cards.items()
        }
        cards.write_text(
            json.dumps({"digests": digests, "cards": found_cards}, indent=1, ensure_ascii=False)
            + "\n",
            encoding="utf-8",
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Record again what seeded jobs release.")
    parser.add_argument("jobs", nargs="*", metavar="JOB", help="a job's name; all if none is given")
    parser.add_argument(
        "--cards",
        type=Path,
        metavar="FILE",
        help="also write the release cards and their digests there",
    )
    given = parser.parse_args()
    record(given.jobs, given.cards)
