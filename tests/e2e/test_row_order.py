"""The order of released rows: shuffled by default, kept on request, and what a place tells either way."""

import hashlib
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from e2e.helpers import (
    LEVELS,
    call_cli,
    categorical,
    continuous,
    digests,
    discrete,
    hidden,
    lake,
    load,
    read_card,
    run_here,
    write_job,
)
from scipy import stats

from dpdask.errors import TemporaryError
from dpdask.io.storage import Folder
from dpdask.jobs.plan import plan_job

GENRES = ["comedy", "drama", "horror"]
LEVEL_SCHEMA = {
    "userId": {"role": "keep", "type": "int64"},
    "rating": discrete(LEVELS, type="float64"),
    "genre": categorical(GENRES, nulls="level", type="string"),
}
INCOME_SCHEMA = {
    "who": {"role": "keep", "type": "int64"},
    "income": continuous([0, 1_000_000], type="float64", outside="refuse"),
}
HISTOGRAM = {"kind": "histogram", "bins": 16}
ROWS = 3000


def level_lake(folder, sizes, first=0):
    """Write rows that are made by arithmetic alone, so that they are the same with any version of any library."""
    folder.mkdir(parents=True)
    for number, size in enumerate(sizes):
        codes = [(row * row * 31 + 7 * row) % 1009 for row in range(first, first + size)]
        genres = [[*GENRES, None][code // 10 % 4] for code in codes]
        table = pa.table(
            {
                "userId": codes,
                "rating": [LEVELS[code % 10] for code in codes],
                "genre": pa.array(genres, pa.string()),
            }
        )
        pq.write_table(table, folder / f"part.{number}.parquet", row_group_size=400)
        first += size
    return folder


# made by the version before rows were shuffled: sha256 of the released values, shard by shard and in order
KNOWN_DIGESTS = {
    ("holdout", "laplace"): "440ee9ecda54008b41cc3c87a7cbfe6f",
    ("histogram", "laplace-calibrated"): "6cc72e070ed4a7eea04043ee28664d93",
    ("public", "laplace"): "72f0149e08d52b78974d346ed6d33bb6",
    ("known", "laplace-calibrated"): "c1f245f72ac10b4668144823009c31e8",
}


@pytest.mark.parametrize(("kind", "channel"), KNOWN_DIGESTS)
def test_kept_rows_are_what_they_always_were(kind, channel, tmp_path):
    reference = {
        "holdout": {"kind": "holdout", "fraction": 0.25},
        "histogram": HISTOGRAM,
        "public": {"kind": "public", "path": str(tmp_path / "public")},
        "known": {
            "kind": "known",
            "columns": {
                "rating": {"probabilities": [0.1] * 10},
                "genre": {"probabilities": [0.25] * 4},
            },
        },
    }[kind]
    level_lake(tmp_path / "public", [500, 700], first=5000)
    mechanism = {"kind": "dip", "reference": reference, "channel": channel}
    job = write_job(
        tmp_path,
        level_lake(tmp_path / "in", [150, 90, 1700, 40, 300]),
        tmp_path / "keep",
        schema=LEVEL_SCHEMA,
        mechanism=mechanism,
    )
    run_here(job, output__order="keep")
    shards = [
        pq.read_table(shard).to_pydict() for shard in sorted((tmp_path / "keep").glob("*.parquet"))
    ]
    assert (
        hashlib.sha256(json.dumps(shards).encode()).hexdigest()[:32] == KNOWN_DIGESTS[kind, channel]
    )
    run_here(job, output__path=tmp_path / "shuffled")
    kept, shuffled = (pq.read_table(tmp_path / name) for name in ("keep", "shuffled"))
    assert kept != shuffled
    assert in_order(kept) == in_order(shuffled)  # the noise is the same, row by row


def in_order(table):
    return sorted(zip(*(column.to_pylist() for column in table.columns), strict=True), key=repr)


def incomes(folder, rows=ROWS, *, row_group=None, numbered=False, sort=True):
    """Write a table that lies sorted by its private column; the rows' ids say nothing of their place, unless they number it."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    values = np.minimum(rng.lognormal(10, 0.8, rows), 9e5)
    values = np.sort(values) if sort else values
    who = np.arange(rows) if numbered else rng.permutation(rows)
    pq.write_table(
        pa.table({"who": who, "income": values}),
        folder / "part.parquet",
        row_group_size=row_group or rows,
    )
    return folder


def income_job(folder, source, **changed):
    mechanism = {"kind": "dip", "channel": "laplace", "reference": HISTOGRAM}
    options = {
        "schema": INCOME_SCHEMA,
        "privacy__epsilon": 0.5,
        "mechanism": mechanism,
        "output__rows_per_shard": 1_000_000,
        **changed,
    }
    return write_job(folder, source, folder / "out", **options)


def errors(source, output):
    """Return the median relative errors of the released values, and of an attacker who takes the i-th row's for the i-th smallest."""
    truth = pq.read_table(source)
    true = dict(zip(truth["who"].to_pylist(), truth["income"].to_pylist(), strict=True))
    table = pq.read_table(output)
    own = np.array([true[who] for who in table["who"].to_pylist()])
    released = table["income"].to_numpy()
    return float(np.median(np.abs(released - own) / own)), float(
        np.median(np.abs(np.sort(released) - own) / own)
    )


def test_a_place_tells_nothing_of_a_sorted_table_unless_rows_are_kept_in_order(tmp_path):
    source = incomes(tmp_path / "in")
    distribution = {"name": "lognorm", "s": 0.8, "loc": 0.0, "scale": float(np.exp(10))}
    reference = {"kind": "known", "columns": {"income": distribution}}
    schema = {
        **INCOME_SCHEMA,
        "income": continuous(type="float64"),
    }
    job = income_job(
        tmp_path,
        source,
        schema=schema,
        mechanism={"kind": "dip", "channel": "laplace", "reference": reference},
    )
    run_here(job)
    value, guess = errors(source, tmp_path / "out")
    assert guess > 0.9 * value
    run_here(job, output__path=tmp_path / "kept", output__order="keep")
    value, guess = errors(source, tmp_path / "kept")
    assert guess < 0.3 * value  # power: kept in order, the place tells far more than the value


def test_of_many_row_groups_the_shards_numbers_tell_nothing_either(tmp_path):
    source = incomes(tmp_path / "in", row_group=100)
    run_here(income_job(tmp_path, source, output__rows_per_shard=100))
    shards = sorted((tmp_path / "out").glob("*.parquet"))
    truth = pq.read_table(source)
    place = dict(zip(truth["who"].to_pylist(), range(ROWS), strict=True))
    places = [[place[who] for who in pq.read_table(shard)["who"].to_pylist()] for shard in shards]
    assert len(shards) == ROWS // 100
    middles = [np.median(found) for found in places]
    assert abs(stats.spearmanr(range(len(shards)), middles).statistic) < 0.5
    assert len({shard.stat().st_mtime_ns for shard in shards}) == 1
    inside = [stats.spearmanr(range(100), found).statistic for found in places]
    assert abs(np.mean(inside)) < 0.1
    assert (
        max(max(found) - min(found) for found in places) < 100
    )  # power, and what is left: neighbours share a shard
    card = read_card(tmp_path)
    assert "come from neighbouring fragments" in card["order"]
    assert "no ε covers that" in card["order"]
    assert "the rows of one shard were close together in the input" in card["guarantee"]["text"]
    assert "the order of the rows" not in card["guarantee"]["text"]
    manifest = json.loads((tmp_path / "out" / "_dpdask" / "manifest.json").read_text())
    assert [shard["name"] for shard in manifest["shards"]] == [shard.name for shard in shards]


@pytest.mark.parametrize("order", ["keep", "shuffled"])
def test_the_card_of_ranges_says_what_holds(order, tmp_path):
    design = {"design": "case1", "anchors": {"name": "uniform", "loc": 0, "scale": 200_000}}
    source = incomes(tmp_path / "in", 500, row_group=100)
    job = income_job(
        tmp_path,
        source,
        mechanism={"kind": "interval", "columns": {"income": design}},
        output__rows_per_shard=100,
        privacy=None,
    )
    outcome = run_here(job, output__order=order)
    card = read_card(tmp_path)
    kept = order == "keep"
    assert ("the order of the rows" in card["guarantee"]["text"]) is kept
    assert card["order"].startswith(
        "rows keep the order of the input, which is published" if kept else "rows are shuffled"
    )
    who = pq.read_table(source)["who"].to_pylist()
    released = pq.read_table(tmp_path / "out")["who"].to_pylist()
    assert (released == who) is kept
    assert sorted(released) == sorted(who)
    assert sum("'income' is sorted" in warning for warning in outcome.warnings) == 1


@pytest.mark.parametrize("order", ["keep", "shuffled"])
def test_the_steward_is_warned_of_a_sorted_column(order, tmp_path):
    source = incomes(tmp_path / "in", row_group=1000, numbered=True)
    job = income_job(tmp_path, source, output__order=order, output__rows_per_shard=2000)
    planned = plan_job(load(job)).warnings
    assert [warning.split(":")[0] for warning in planned] == [
        "the row groups of the input are sorted by column 'income'"
    ]
    found = call_cli("run", job)
    assert found.returncode == 0, found.stderr
    warnings = [line.strip() for line in found.stdout.splitlines() if "WARNING" in line]
    assert warnings[0].startswith("WARNING   column 'income' is sorted in the input: ")
    assert ("output.order: shuffled" in warnings[0]) is (order == "keep")
    assert warnings[1].startswith(
        "WARNING   the kept column 'who' is sorted in the input, and so is 'income'"
    )
    assert len(warnings) == 2
    values = [f"{value:.0f}" for value in pq.read_table(source)["income"].to_pylist()[:: ROWS - 1]]
    assert not any(value in "".join([*warnings, *planned]) for value in values)


def test_a_table_that_lies_in_no_order_is_not_warned_of(tmp_path):
    job = income_job(tmp_path, incomes(tmp_path / "in", row_group=1000, numbered=True, sort=False))
    assert plan_job(load(job)).warnings == ()
    assert run_here(job).warnings == ()


def test_categories_are_sorted_as_files_are_and_a_constant_is_not(tmp_path):
    columns = {
        "kind": categorical(["z", "a", "m"], nulls="level"),
        "same": discrete([1, 2, 3]),
    }
    (tmp_path / "in").mkdir()
    table = pa.table(
        {"kind": ["a"] * 30 + ["m"] * 30 + [None] * 10 + ["z"] * 30, "same": [2] * 100}
    )
    pq.write_table(table, tmp_path / "in" / "part.parquet", row_group_size=35)
    mechanism = {"kind": "dip", "reference": HISTOGRAM}
    job = write_job(
        tmp_path,
        tmp_path / "in",
        tmp_path / "out",
        schema=columns,
        mechanism=mechanism,
        output__order="keep",
    )
    [planned] = [
        warning for warning in plan_job(load(job)).warnings if "sorted" in warning
    ]  # so few rows are warned of, too
    [found] = [warning for warning in run_here(job).warnings if "sorted" in warning]
    assert "column 'kind' is sorted" in found
    assert "sorted by column 'kind'" in planned


def test_a_resumed_run_still_knows_what_to_tell(tmp_path, monkeypatch):
    source = incomes(tmp_path / "in", row_group=1000)
    job = income_job(tmp_path, source, output__rows_per_shard=1000)

    def crash(*_):
        raise TemporaryError("crash")

    with monkeypatch.context() as struck:
        struck.setattr(Folder, "move_to", crash)
        with pytest.raises(TemporaryError):
            run_here(job)
    records = list(hidden(tmp_path / "out").glob("actions-*/*.json"))
    assert len(records) == 3
    assert {record.stat().st_mode & 0o777 for record in records} == {0o600}
    records[0].write_text("[]")  # torn: its task is done again, and tells the same
    outcome = run_here(job)
    assert [warning.split(":")[0] for warning in outcome.warnings] == [
        "column 'income' is sorted in the input"
    ]
    run_here(job, output__path=tmp_path / "whole")
    here, there = digests(tmp_path / "out"), digests(tmp_path / "whole")
    assert here == there


def test_shards_hold_no_more_than_is_shuffled_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr("dpdask.engine.write.WINDOW_BYTES", 2**12)  # 256 rows of 16 bytes
    source = incomes(tmp_path / "in", 2000)
    job = income_job(tmp_path, source)
    planned = plan_job(load(job))
    run_here(job)
    sizes = sorted(
        pq.read_metadata(shard).num_rows for shard in (tmp_path / "out").glob("*.parquet")
    )
    assert sizes == [2000 - 7 * 256] + [256] * 7
    assert planned.n_shards is not None
    assert len(sizes) <= planned.n_shards
    run_here(job, output__order="keep", output__path=tmp_path / "kept")
    assert len(list((tmp_path / "kept").glob("*.parquet"))) == 1


def test_central_releases_have_no_order(tmp_path):
    source = lake(tmp_path / "in", [300, 200], schema=LEVEL_SCHEMA)
    columns = {**LEVEL_SCHEMA, "userId": {"role": "drop", "type": "int64"}}
    mechanism = {"kind": "marginals", "cliques": [["rating", "genre"]]}
    job = write_job(tmp_path, source, tmp_path / "out", schema=columns, mechanism=mechanism)
    run_here(job)
    run_here(job, output__path=tmp_path / "kept", output__order="keep")
    assert digests(tmp_path / "out") == digests(tmp_path / "kept")
