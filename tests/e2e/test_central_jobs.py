"""Jobs that release nobody's row: records, tables and cells from noisy counts."""

import datetime as dt
import itertools
import json
import math

import duckdb
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.parquet as pq
import pytest
from e2e.helpers import (
    GENRES,
    LEVELS,
    MIXED_SCHEMA,
    charged_kinds,
    charging_entries,
    digests,
    holds_number,
    lake,
    load,
    read_card,
    read_rows,
    run_here,
    write_job,
)

from dpdask.codec import codec_for
from dpdask.engine.account import open_ledger
from dpdask.errors import BudgetError, SpecError
from dpdask.jobs.plan import plan_job
from dpdask.mechanisms.marginals.noise import margin_95
from dpdask.privacy.events import Composed, epsilon, from_dict, leaves, to_dict
from dpdask.schema import Schema

SCHEMA = {**MIXED_SCHEMA, "userId": {"role": "drop", "type": "int64"}}
PRIVATISED = [name for name, column in SCHEMA.items() if column["role"] == "privatise"]
SIZES = [150, 90, 1700, 40, 300]
N_ROWS = sum(SIZES)
DELTA = 1e-6
CLIQUES = [["rating"], ["genre", "rating"], ["amount", "age", "genre"]]
COPULA = {"kind": "copula", "bins": 8}
MARGINALS = {"kind": "marginals", "cliques": CLIQUES, "bins": 4}
CELLS = {"kind": "histogram", "bins": 2, "threshold": "none"}
DRAWN = {"kind": "histogram", "bins": 2, "output": "rows"}
MECHANISMS = {"copula": COPULA, "marginals": MARGINALS, "cells": CELLS, "rows": DRAWN}
each_mechanism = pytest.mark.parametrize("mechanism", MECHANISMS.values(), ids=MECHANISMS)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return lake(tmp_path_factory.mktemp("source") / "in", SIZES, schema=SCHEMA)


pytestmark = pytest.mark.usefixtures("here")


def job(folder, source, mechanism=COPULA, **changed):
    given = {"schema": SCHEMA, "mechanism": mechanism, "privacy__delta": DELTA, **changed}
    return write_job(folder / "job", source, folder / "out", **given)


def run(folder, source, mechanism=COPULA, **changed):
    run_here(job(folder, source, mechanism, **changed))
    return read(folder / "out")


def read(folder):
    return read_rows(folder, "")


def check_valid(records, source, columns):
    """Check that records have the source's types and order of columns, and no value outside the domains."""
    schema = Schema.from_dict({"columns": columns})
    expected = schema.select_released(source.schema)
    assert records.schema.equals(expected)
    for name in schema.privatised:
        codec = codec_for(name, schema.columns[name], expected.field(name).type)
        for chunk in records.column(name).chunks:
            codec.encode(chunk)


# ---- what is released


def test_records_are_valid_and_nobodys_and_the_card_says_what_was_done(source, tmp_path):
    records, given = run(tmp_path, source), read(source)
    check_valid(records, given, SCHEMA)
    assert records.column_names == PRIVATISED
    assert not set(given["price"].to_pylist()) & set(records["price"].to_pylist())
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["_SUCCESS", "_dpdask", *(f"part-0000{n}.parquet" for n in range(5))]
    for name in ("rating", "genre"):
        shares = [
            table.to_pandas()[name].value_counts(normalize=True, dropna=False).sort_index()
            for table in (records, given)
        ]
        # sampling gives 0.02 to 0.03, noise of deviation 6.5 in 2,280 less
        assert np.abs(shares[0] - shares[1]).sum() / 2 < 0.08
    found, loaded = read_card(tmp_path), load(tmp_path / "job/job.yaml")
    assert found["guarantee"]["text"].startswith("INSECURE: ")
    assert found["guarantee"]["text"].endswith(loaded.mechanism.description.guarantee("shuffled"))
    for words in ("ε = 4 ", "δ = 1e-6", "replace-one", "unit: one row", "every row of the table"):
        assert words in found["guarantee"]["text"]
    event = from_dict(found["accounting"]["events"])
    assert to_dict(loaded.mechanism.event) == found["accounting"]["events"]
    assert 0.99 * 4.0 < found["accounting"]["epsilon_exact"] == epsilon(event, DELTA) <= 4.0
    assert found["n_rows"] == {"value": records.num_rows, "exact": True}
    assert found["columns"]["genre"]["levels"] == [None, *GENRES]
    assert found["columns"]["price"]["edges"] == [k / 8 for k in range(9)]
    assert {name for name, _ in found["mechanism"]["tree"]} == set(PRIVATISED)
    assert json.dumps(found, allow_nan=False)


DATES = [dt.date(2020, 1, 1), dt.date(2020, 1, 2)]
EVERY_TYPE = {
    "day": {"kind": "continuous", "bounds": [18262, 20000], "nulls": "level"},
    "when": {"kind": "continuous", "bounds": [1.6e15, 1.7e15]},
    "flag": {"kind": "categorical", "levels": [True, False], "nulls": "level"},
    "small": {"kind": "continuous", "bounds": [-100, 100], "nulls": "level"},
    "single": {"kind": "mixed", "atoms": [0.1], "bounds": [0.0, 0.7], "nulls": "level"},
    "word": {"kind": "categorical", "levels": ["a", "b", "never"]},
    "code": {"kind": "discrete", "levels": [1, 2, 5], "nulls": "level"},
    "one": {"kind": "categorical", "levels": ["only"]},
    "date": {"kind": "discrete", "levels": DATES},
    "date_name": {"kind": "categorical", "levels": DATES},
    "clock": {"kind": "continuous", "bounds": [0, 86_399_999]},
    "fine_clock": {"kind": "continuous", "bounds": [0, 86_399_999_999], "nulls": "level"},
    "span": {"kind": "continuous", "bounds": [-10, 10**6], "nulls": "level"},
    "zoned": {"kind": "continuous", "bounds": DATES},
    "bytes": {"kind": "categorical", "levels": ["é", "b"], "encoding": "utf-8", "nulls": "level"},
    "fixed": {"kind": "categorical", "levels": ["é ", "b "], "encoding": "utf-16-le"},
}
EVERY_TYPE = {name: {"role": "privatise", **column} for name, column in EVERY_TYPE.items()}


def every_type(n_rows):
    rng = np.random.default_rng(4)
    missing = rng.random(n_rows) < 0.2
    single = np.where(rng.random(n_rows) < 0.3, 0.1, rng.uniform(0, 0.7, n_rows))
    when = pa.array(rng.integers(16 * 10**14, 17 * 10**14, n_rows))
    dates = pa.array(rng.choice(DATES, n_rows), pa.date32())
    columns = {
        "day": pa.array(rng.integers(18262, 20001, n_rows), pa.int32(), mask=missing).cast(
            pa.date32()
        ),
        "when": when.cast(pa.timestamp("us", tz="UTC")),
        "flag": pa.array(rng.random(n_rows) < 0.3, mask=missing),
        "small": pa.array(rng.integers(-100, 101, n_rows), pa.int8(), mask=missing),
        "single": pa.array(single.astype(np.float32), mask=missing),
        "word": pa.array(rng.choice(["a", "b"], n_rows)).dictionary_encode(),
        "code": pa.array(rng.choice([1, 2, 5], n_rows), pa.uint16(), mask=missing),
        "one": pa.array(["only"] * n_rows, pa.large_string()),
    }
    seconds = rng.integers(0, 86_400, n_rows)
    of_days = {
        "date": dates,
        "date_name": dates,
        "clock": pa.array(seconds * 1000, pa.int32()).cast(pa.time32("ms")),
        "fine_clock": pa.array(seconds * 10**9 + 1, mask=missing).cast(pa.time64("ns")),
        "span": pa.array(seconds, mask=missing).cast(pa.duration("ms")),
        "zoned": pa.array((1_577_836_800 + seconds) * 1000).cast(
            pa.timestamp("ms", "Europe/Zurich")
        ),
    }
    texts = rng.choice(["é", "b"], n_rows).tolist()
    of_bytes = {
        "bytes": pa.array([each.encode() for each in texts], mask=missing).dictionary_encode(),
        "fixed": pa.array([(each + " ").encode("utf-16-le") for each in texts], pa.binary(4)),
    }
    return pa.table({**columns, **of_days, **of_bytes})


@each_mechanism
def test_every_type_comes_out_as_it_went_in(mechanism, tmp_path):
    given = every_type(1500)
    (tmp_path / "in").mkdir()
    pq.write_table(given, tmp_path / "in" / "part.parquet")
    if mechanism is MARGINALS:
        mechanism = {"kind": "marginals", "cliques": [[name] for name in EVERY_TYPE]}
    found = run(tmp_path, tmp_path / "in", mechanism, schema=EVERY_TYPE)
    if mechanism["kind"] == "marginals":
        assert found.num_rows == sum(
            column["cells"] for column in read_card(tmp_path)["columns"].values()
        )
        return
    if mechanism is CELLS:
        released = Schema.from_dict({"columns": EVERY_TYPE}).select_released(given.schema)
        numbers = {"small": pa.float64(), "single": pa.float64()}
        types = {name: numbers.get(name, released.field(name).type) for name in EVERY_TYPE}
        assert found.schema.equals(pa.schema({**types, "weight": pa.float64()}))
        assert {float(np.float32(0.1)), None} < set(found["single"].to_pylist())
    else:
        check_valid(found, given, EVERY_TYPE)
        assert found.num_rows == 1500
    for name, column in EVERY_TYPE.items():
        assert (found[name].null_count > 0) is (column.get("nulls") == "level"), name


UNDER_ADD_REMOVE = {
    "copula, laplace": (COPULA, {"privacy__delta": 0}),
    "copula, gaussian": (COPULA, {}),
    "rows, a private threshold": (DRAWN, {"privacy__delta": 0}),
    "rows, no number of rows": ({**DRAWN, "threshold": "positive"}, {"privacy__delta": 0}),
}


@pytest.mark.parametrize(("mechanism", "changed"), UNDER_ADD_REMOVE.values(), ids=UNDER_ADD_REMOVE)
def test_under_add_remove_nothing_tells_the_number_of_rows(mechanism, changed, source, tmp_path):
    numbers = set()
    for seed in range(2):
        folder, given = tmp_path / str(seed), {"privacy__epsilon": 1.0, **changed}
        if mechanism is not COPULA:
            given |= {"schema": {**SCHEMA, "age": {"role": "drop"}, "amount": {"role": "drop"}}}
        records = run(
            folder, source, mechanism, privacy__adjacency="add-remove", insecure_seed=seed, **given
        )
        found = read_card(folder)
        assert found["n_rows"]["exact"] is False
        assert (found["n_rows"]["value"] is None) is (mechanism.get("threshold") == "positive")
        assert "The number of rows is private" in found["guarantee"]["text"]
        assert {
            event.sensitivity for event in leaves(from_dict(found["accounting"]["events"]))
        } == {1}
        if mechanism is COPULA:
            assert found["mechanism"]["records"] == records.num_rows
        assert records.num_rows == N_ROWS or not holds_number(json.dumps(found), N_ROWS)
        numbers.add(records.num_rows)
    assert len(numbers) == 2
    assert all(abs(number - N_ROWS) < 0.2 * N_ROWS for number in numbers)


@pytest.mark.parametrize("mechanism", [COPULA, DRAWN], ids=["copula", "rows"])
def test_a_number_of_records(mechanism, source, tmp_path):
    made = job(tmp_path, source, {**mechanism, "n_rows": 5000}, output__rows_per_shard=1000)
    assert plan_job(load(made)).n_shards == 5
    assert [shard.n_rows for shard in run_here(made).manifest.shards] == [1000] * 5
    records = read(tmp_path / "out")
    check_valid(records, read(source), SCHEMA)
    assert records.num_rows == read_card(tmp_path)["mechanism"]["records"] == 5000
    assert len(set(records["price"].to_pylist())) == 5000  # no shard repeats another


def test_bins_as_a_list_and_as_a_number(source, tmp_path):
    bins = {"price": [0.0, 0.25, 0.5], "age": [0, 18, 65]}
    check_valid(run(tmp_path, source, {"kind": "copula", "bins": bins}), read(source), SCHEMA)
    found = read_card(tmp_path)
    assert found["mechanism"]["bins"] | bins == found["mechanism"]["bins"]
    assert found["columns"]["age"]["edges"] == [-1.0, 17.0, 64.0, 120.0]
    amount = found["mechanism"]["bins"]["amount"]  # no cells were given, so they were found
    assert len(amount) == len(found["columns"]["amount"]["edges"]) - 1 <= 41


def test_a_cell_is_near_its_count(source, tmp_path):
    schema = {**SCHEMA, "age": {"role": "drop"}, "amount": {"role": "drop"}}
    mechanism = {**CELLS, "bins": 5}
    cells = run(tmp_path, source, mechanism, schema=schema, privacy__epsilon=1.0, privacy__delta=0)
    columns = ["rating", "genre", "price"]

    def by_cell(frame):
        price = np.ceil(frame["price"] * 5).clip(1, 5).astype(int)
        return frame.assign(genre=frame["genre"].fillna("null"), price=price)

    every = pd.MultiIndex.from_product([LEVELS, [*GENRES, "null"], range(1, 6)], names=columns)
    truth = by_cell(read(source).to_pandas()).groupby(columns).size().reindex(every, fill_value=0)
    found = by_cell(cells.to_pandas()).set_index(columns)["weight"]
    assert found.index.is_unique
    assert (found < 0).any()
    off = found.reindex(every, fill_value=0.0) - truth  # a cell of weight 0 is not listed
    alpha = math.exp(-1 / 2.0)  # scale 2/ε
    deviation = math.sqrt(2 * alpha) / (1 - alpha)
    assert len(off) == read_card(tmp_path)["mechanism"]["cells"] == 200
    assert 0.75 * deviation < off.std() < 1.3 * deviation  # neither too little noise nor too much


def test_no_cell_that_stands_out_is_an_empty_table(source, tmp_path):
    cells = run(tmp_path, source, {**CELLS, "threshold": "enhanced", "factor": 1e4})
    assert cells.num_rows == 0
    assert cells.column_names == [*PRIVATISED, "weight"]


def count_exactly(source, clique):
    """Return the exact counts by label, with pandas."""
    frame = read(source).to_pandas()
    labels = pd.DataFrame(index=frame.index)
    labels["rating"] = frame["rating"].map(str)
    labels["genre"] = frame["genre"].fillna("null")
    ages = ["0..29", "30..59", "60..89", "90..120"]
    labels["age"] = pd.cut(frame["age"], [-1, 29, 59, 89, 120], labels=ages).astype(str)
    quarters = ["(0.0, 25.0]", "(25.0, 50.0]", "(50.0, 75.0]", "(75.0, 100.0]"]
    amount = pd.cut(frame["amount"], [0, 25, 50, 75, 100], labels=quarters).astype(str)
    is_atom = frame["amount"].isin([0.0, 50.0])
    labels["amount"] = amount.where(~is_atom, frame["amount"].map(str))
    return labels.groupby(clique).size()


def test_tables_are_labelled_and_near_the_truth(source, tmp_path):
    run_here(job(tmp_path, source, MARGINALS, output__rows_per_shard=50))
    assert len(list((tmp_path / "out").glob("*.parquet"))) == 3  # 10 + 40 + 6 x 4 x 4 cells
    with duckdb.connect() as connection:
        found = connection.sql(f"SELECT * FROM read_parquet('{tmp_path}/out/*.parquet')").df()
    columns = ["rating", "genre", "amount", "age"]
    assert list(found.columns) == ["table", *columns, "count", "margin_95"]
    assert found["table"].drop_duplicates().tolist() == [" x ".join(clique) for clique in CLIQUES]
    assert found["count"].dtype == np.int64
    accounting = read_card(tmp_path)["accounting"]
    events = leaves(from_dict(accounting["events"]))
    for clique, event in zip(CLIQUES, events, strict=True):
        name, margin = " x ".join(clique), margin_95(event)
        rows = found[found["table"] == name]
        assert rows[[column for column in columns if column not in clique]].isna().all(axis=None)
        assert not rows.duplicated(clique).any()
        assert set(rows["margin_95"]) == {margin} == {accounting["noise"][name]["margin_95"]}
        exact, cells = count_exactly(source, clique), rows.set_index(clique)["count"]
        off = cells - exact.reindex(cells.index, fill_value=0)
        assert set(exact.index) <= set(cells.index)
        assert off.abs().max() <= 3 * margin  # six standard deviations
        assert (off.abs() <= margin).mean() > 0.85
        assert (off != 0).mean() > 0.5  # there is noise


# ---- the same bytes


def rewritten(folder, source, sizes, row_group):
    """Write the same rows in other files and row groups."""
    folder.mkdir(parents=True)
    files = sorted(source.iterdir(), key=lambda path: int(path.name.split(".")[1]))
    table = pa.concat_tables([pads.dataset(file).to_table() for file in files])
    for number, (start, stop) in enumerate(itertools.pairwise(np.cumsum([0, *sizes]).tolist())):
        path = folder / f"part-{number}.parquet"
        pq.write_table(table.slice(start, stop - start), path, row_group_size=row_group)
    assert stop == table.num_rows
    return folder


@pytest.mark.few(3)
@pytest.mark.parametrize("unit", ["row", {"column": "userId", "max_rows": 2}], ids=["row", "user"])
@each_mechanism
def test_files_and_row_groups_do_not_matter(unit, mechanism, source, tmp_path):
    cuts = {"one": ([2280], 5000), "groups": ([2280], 70), "files": ([1, 2000, 200, 79], 400)}
    found = []
    for name, (sizes, row_group) in cuts.items():
        folder = tmp_path / name
        lake_ = rewritten(folder / "in", source, sizes, row_group)
        run_here(job(folder, lake_, mechanism, privacy__unit=unit))
        written = digests(folder / "out").items()
        found.append({name: digest for name, digest in written if "manifest" not in name})
    assert found[0] == found[1] == found[2]
    assert "_dpdask/release.json" in found[0]


def test_a_csv_file_has_the_same_tables(source, tmp_path):
    # a missing text of a CSV file is the empty text, so there is no such column
    schema = {**SCHEMA, "genre": {"role": "drop", "type": "string"}}
    text = lake(tmp_path / "in", SIZES, schema=SCHEMA, csv=True)
    made = job(tmp_path / "text", text, schema=schema)
    assert plan_job(load(made)).n_rows is None
    run_here(made)
    assert read(tmp_path / "text/out").equals(run(tmp_path / "parquet", source, schema=schema))


@pytest.mark.parametrize("records", ["raked", "copula"])
def test_rows_per_shard_do_not_matter(records, source, tmp_path, monkeypatch):
    """Neither for shards inside a block of records nor for those of several blocks."""
    monkeypatch.setattr("dpdask.mechanisms.copula.model.BLOCK_ROWS", 1000)
    mechanism = {**COPULA, "n_rows": 2600, "records": records}
    found = []
    for rows in (300, 1700, 1_000_000):
        folder = tmp_path / str(rows)
        run_here(job(folder, source, mechanism, output__rows_per_shard=rows))
        shards = sorted((folder / "out").glob("*.parquet"))
        assert len(shards) == -(-2600 // rows)
        found.append(pa.concat_tables([pq.read_table(shard) for shard in shards]))
    assert all(table.equals(found[0]) for table in found[1:])
    blocks = [found[0].slice(start, 600) for start in (0, 1000, 2000)]
    assert not blocks[0].equals(blocks[1])
    assert not blocks[1].equals(blocks[2])


@each_mechanism
def test_without_a_seed_runs_differ(mechanism, source, tmp_path):
    a, b = (run(tmp_path / name, source, mechanism, insecure_seed=None) for name in "ab")
    assert not a.equals(b)
    assert read_card(tmp_path / "a")["insecure"] is False


# ---- the ledger


def test_runs_compose_and_the_third_is_refused_with_nothing_written(source, tmp_path):
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    ledger, place = open_ledger(url), {"url": url, "dataset": "people"}
    ledger.init("people", 3.4, 1e-5)
    for number in range(3):
        folder = tmp_path / str(number)
        given = {"ledger": place, "name": f"job {number}", "privacy__epsilon": 2.0}
        made = job(folder, source, **given)
        planned = plan_job(load(made)).ledger
        assert planned is not None
        assert planned["fits"] is (number < 2)
        if number < 2:
            assert run_here(made).status == "released"
            before = {path: path.stat().st_mtime_ns for path in (folder / "out").rglob("*")}
            assert run_here(made).status == "already released"
            assert {path: path.stat().st_mtime_ns for path in before} == before
            continue
        with pytest.raises(BudgetError, match="'people' is too small") as caught:
            run_here(made)
        assert caught.value.exit_code == 77
        assert [path.name for path in folder.iterdir()] == ["job"]
    entries = charging_entries(url, "people")
    assert [entry.kind for entry in entries] == ["intend", "commit"] * 2
    events = read_card(tmp_path / "0")["accounting"]["events"]
    assert entries[0].charge.event == {**events, "unit": "row", "uncovered": []}
    spent = ledger.read_balance("people").epsilon_spent
    both = Composed(events=tuple(leaves(from_dict(events))) * 2)
    assert 2.0 < epsilon(both, 1e-5) <= spent <= 3.4  # composed at the ledger's δ, not added up


def test_rows_of_nothing_are_refused_and_the_charge_stays(source, tmp_path):
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    ledger, place = open_ledger(url), {"url": url, "dataset": "people"}
    ledger.init("people", 5.0, 0.0)
    made = job(tmp_path, source, {**DRAWN, "factor": 1e4}, ledger=place, privacy__delta=0)
    words = r"no cell has a positive weight.*lower mechanism\.bins"
    with pytest.raises(SpecError, match=words) as caught:
        run_here(made)
    assert caught.value.exit_code == 64
    assert not (tmp_path / "out").exists()
    assert charged_kinds(url, "people") == ["intend", "refuse"]
    with pytest.raises(BudgetError):  # another try would draw anew, and is another charge
        run_here(made)
    # to be told so is to be told of the noise
    assert ledger.read_balance("people").epsilon_spent == pytest.approx(4.0)
