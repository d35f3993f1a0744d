"""Copula and marginals jobs: valid records, honest cards, one charge, and tables that every reader reads."""

from __future__ import annotations

import datetime as dt
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dask
import duckdb
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.parquet as pq
import pytest
from e2e.bad_input import command
from e2e.helpers import (
    GENRES,
    LEVELS,
    MIXED_SCHEMA,
    charging_entries,
    digests,
    hidden,
    holds_number,
    lake,
    load,
    run_here,
    write_job,
)

from dpdask.codec import codec_for
from dpdask.engine.account import open_ledger
from dpdask.errors import BudgetError
from dpdask.jobs.plan import audit_job, plan_job
from dpdask.mechanisms.marginals.noise import margin_95
from dpdask.privacy.accountant import epsilon
from dpdask.privacy.events import (
    Composed,
    DiscreteGaussian,
    DiscreteLaplace,
    from_dict,
    leaves,
    to_dict,
)
from dpdask.schema import Schema

SCHEMA: dict[str, Any] = {**MIXED_SCHEMA, "userId": {"role": "drop", "type": "int64"}}
SIZES = [150, 90, 1700, 40, 300]
N_ROWS = sum(SIZES)
DELTA = 1e-6
COPULA: dict[str, Any] = {"kind": "copula", "bins": 8}
CLIQUES = [["rating"], ["genre", "rating"], ["amount", "age", "genre"]]
MARGINALS: dict[str, Any] = {"kind": "marginals", "cliques": CLIQUES, "bins": 4}
PRIVATISED = [name for name, column in SCHEMA.items() if column["role"] == "privatise"]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lake(tmp_path_factory.mktemp("source") / "in", SIZES, schema=SCHEMA)


@pytest.fixture(autouse=True)
def _here() -> Iterator[None]:
    with dask.config.set(scheduler="synchronous"):
        yield


def job(folder: Path, source: Path, mechanism: dict[str, Any] = COPULA, **changed: Any) -> Path:
    return write_job(
        folder / "job",
        source,
        folder / "out",
        **{"schema": SCHEMA, "mechanism": mechanism, "privacy__delta": DELTA, **changed},
    )


def run(folder: Path, source: Path, mechanism: dict[str, Any] = COPULA, **changed: Any) -> pa.Table:
    run_here(job(folder, source, mechanism, **changed))
    return read(folder / "out")


def read(folder: Path) -> pa.Table:
    return pads.dataset(folder, exclude_invalid_files=False).to_table()


def card(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "out" / "_dpdask" / "release.json").read_text())
    return found


def check_valid(records: pa.Table, source: pa.Table, columns: dict[str, Any]) -> None:
    """Check that records could stand in the source: its types, its order of columns, no value outside the declared domains."""
    schema = Schema.from_dict({"columns": columns})
    expected = schema.select_released(source.schema)
    assert records.schema.equals(expected)
    assert records.num_rows > 0
    for name in schema.privatised:
        codec = codec_for(name, schema.columns[name], expected.field(name).type)
        for chunk in records.column(name).chunks:
            codec.encode(chunk)


def events(folder: Path) -> list[Any]:
    return list(leaves(from_dict(card(folder)["accounting"]["events"])))


# ---- the records


def test_records_are_valid_and_nobodys(source: Path, tmp_path: Path) -> None:
    records = run(tmp_path, source)
    check_valid(records, read(source), SCHEMA)
    assert records.column_names == PRIVATISED
    assert records.num_rows == N_ROWS
    assert set(records["genre"].to_pylist()) == {*GENRES, None}
    assert {0.0, 50.0} < set(records["amount"].to_pylist())
    real = set(read(source)["price"].to_pylist())
    assert not real & set(records["price"].to_pylist())
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "_SUCCESS",
        "_dpdask",
        *(f"part-0000{n}.parquet" for n in range(5)),
    ]


def test_one_way_tables_are_kept(source: Path, tmp_path: Path) -> None:
    found, given = run(tmp_path, source).to_pandas(), read(source).to_pandas()
    for name in ("rating", "genre"):
        shares = [
            frame[name].value_counts(normalize=True, dropna=False).sort_index()
            for frame in (found, given)
        ]
        assert (
            np.abs(shares[0] - shares[1]).sum() / 2 < 0.08
        )  # sampling gives 0.02 to 0.03, noise of deviation 6.5 in 2,280 less
    assert abs((found["amount"] == 0.0).mean() - (given["amount"] == 0.0).mean()) < 0.06


EVERY_TYPE: dict[str, Any] = {
    "id": {"role": "drop"},
    "day": {"role": "privatise", "kind": "continuous", "bounds": [18262, 20000], "nulls": "level"},
    "when": {"role": "privatise", "kind": "continuous", "bounds": [1.6e15, 1.7e15]},
    "flag": {"role": "privatise", "kind": "categorical", "levels": [True, False], "nulls": "level"},
    "small": {"role": "privatise", "kind": "continuous", "bounds": [-100, 100], "nulls": "level"},
    "single": {
        "role": "privatise",
        "kind": "mixed",
        "atoms": [0.1],
        "bounds": [0.0, 0.7],
        "nulls": "level",
    },
    "word": {"role": "privatise", "kind": "categorical", "levels": ["a", "b", "never"]},
    "code": {"role": "privatise", "kind": "discrete", "levels": [1, 2, 5], "nulls": "level"},
    "one": {"role": "privatise", "kind": "categorical", "levels": ["only"]},
}


DATES = [dt.date(2020, 1, 1), dt.date(2020, 1, 2)]


def every_type(n_rows: int) -> pa.Table:
    rng = np.random.default_rng(4)
    missing = rng.random(n_rows) < 0.2
    return pa.table(
        {
            "id": np.arange(n_rows),
            "day": pa.array(rng.integers(18262, 20001, n_rows), pa.int32(), mask=missing).cast(
                pa.date32()
            ),
            "when": pa.array(rng.integers(16 * 10**14, 17 * 10**14, n_rows)).cast(
                pa.timestamp("us", tz="UTC")
            ),
            "flag": pa.array(rng.random(n_rows) < 0.3, mask=missing),
            "small": pa.array(rng.integers(-100, 101, n_rows), pa.int8(), mask=missing),
            "single": pa.array(
                np.where(rng.random(n_rows) < 0.3, 0.1, rng.uniform(0, 0.7, n_rows)).astype(
                    np.float32
                ),
                mask=missing,
            ),
            "word": pa.array(rng.choice(["a", "b"], n_rows)).dictionary_encode(),
            "code": pa.array(rng.choice([1, 2, 5], n_rows), pa.uint16(), mask=missing),
            "one": pa.array(["only"] * n_rows, pa.large_string()),
        }
    )


def test_every_type_comes_out_as_it_went_in(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    pq.write_table(every_type(1500), tmp_path / "in" / "part.parquet")
    records = run(tmp_path, tmp_path / "in", schema=EVERY_TYPE)
    check_valid(records, pq.read_table(tmp_path / "in"), EVERY_TYPE)
    for name, column in EVERY_TYPE.items():
        if column["role"] == "privatise":
            share = records[name].null_count / 1500
            assert 0.1 < share < 0.3 if column.get("nulls") == "level" else share == 0, name
    tables = run(
        tmp_path / "tables",
        tmp_path / "in",
        {"kind": "marginals", "cliques": [[name] for name in records.column_names]},
        schema=EVERY_TYPE,
    )
    assert tables.num_rows == sum(
        column["cells"] for column in card(tmp_path / "tables")["columns"].values()
    )


@pytest.mark.parametrize(
    "column",
    [{"kind": "discrete", "levels": DATES}, {"kind": "categorical", "levels": DATES}],
    ids=["discrete", "categorical"],
)
def test_dates_as_levels(column: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    dates = pa.array(np.random.default_rng(4).choice([18262, 18263], 500), pa.int32()).cast(
        pa.date32()
    )
    pq.write_table(pa.table({"date": dates}), tmp_path / "in" / "part.parquet")
    schema = {"date": {"role": "privatise", **column}}
    check_valid(run(tmp_path, tmp_path / "in", schema=schema), pa.table({"date": dates}), schema)


@pytest.mark.parametrize("delta", [0, DELTA], ids=["laplace", "gaussian"])
def test_under_add_remove_nothing_tells_the_number_of_rows(
    delta: float, source: Path, tmp_path: Path
) -> None:
    numbers = set()
    for seed in range(3):
        folder = tmp_path / str(seed)
        records = run(
            folder,
            source,
            privacy__adjacency="add-remove",
            privacy__delta=delta,
            privacy__epsilon=1.0,
            insecure_seed=seed,
        )
        check_valid(records, read(source), SCHEMA)
        found = card(folder)
        assert found["n_rows"]["exact"] is False
        assert (
            found["mechanism"]["records"]
            == records.num_rows
            == max(1, round(found["n_rows"]["value"]))
        )
        assert "add-remove" in found["guarantee"]["text"]
        assert "The number of rows is private" in found["guarantee"]["text"]
        numbers.add(records.num_rows)
        kind = DiscreteGaussian if delta else DiscreteLaplace
        assert {type(event) for event in events(folder)} == {kind}
        assert {event.sensitivity for event in events(folder)} == {1}
    assert len(numbers) > 1
    assert all(abs(number - N_ROWS) < 0.2 * N_ROWS for number in numbers)
    published = "\n".join(
        path.read_text() for path in (tmp_path / "0" / "out" / "_dpdask").iterdir()
    )
    assert holds_number(published, card(tmp_path / "0")["mechanism"]["records"])
    assert N_ROWS in numbers or not holds_number(published, N_ROWS)


def test_a_number_of_records(source: Path, tmp_path: Path) -> None:
    made = job(tmp_path, source, {**COPULA, "n_rows": 5000}, output__rows_per_shard=1000)
    manifest = run_here(made).manifest
    assert [shard.n_rows for shard in manifest.shards] == [1000] * 5
    records = read(tmp_path / "out")
    check_valid(records, read(source), SCHEMA)
    assert records.num_rows == card(tmp_path)["mechanism"]["records"] == 5000
    assert len(set(records["price"].to_pylist())) == 5000  # no shard repeats another
    assert plan_job(load(made)).n_shards == 5


# ---- the card


def test_the_card_says_what_was_promised_and_done(source: Path, tmp_path: Path) -> None:
    run(tmp_path, source)
    found = card(tmp_path)
    loaded = load(tmp_path / "job" / "job.yaml")
    insecure = "INSECURE: the noise is reproducible from a seed, so this release protects nobody. "
    assert found["guarantee"]["text"] == insecure + loaded.mechanism.guarantee("shuffled")
    for words in (
        "ε = 4 ",
        "δ = 1e-6",
        "replace-one",
        "unit: one row",
        "Protected: every row of the table",
        "is published as it is",
    ):
        assert words in found["guarantee"]["text"]
    assert (found["guarantee"]["adjacency"], found["guarantee"]["unit"], found["insecure"]) == (
        "replace-one",
        "row",
        True,
    )
    accounting = found["accounting"]
    assert 0.99 * 4.0 < accounting["epsilon_exact"] <= 4.0
    assert accounting["events"] == to_dict(loaded.mechanism.event)
    event = from_dict(accounting["events"])
    assert isinstance(event, Composed)
    assert [each.count for each in events(tmp_path)] == [5, 10, 3]  # type: ignore[attr-defined]  # central events have one
    assert accounting["epsilon_exact"] == epsilon(event, DELTA)
    assert found["n_rows"] == {"value": N_ROWS, "exact": True}
    assert list(found["columns"]) == PRIVATISED
    assert found["columns"]["genre"]["levels"] == [None, *GENRES]
    assert found["columns"]["price"]["edges"] == [k / 8 for k in range(9)]
    assert {name for name, _ in found["mechanism"]["tree"]} == set(PRIVATISED)
    assert json.dumps(found, allow_nan=False)


def test_without_a_seed_runs_differ_and_no_card_is_insecure(source: Path, tmp_path: Path) -> None:
    found = [run(tmp_path / name, source, insecure_seed=None) for name in ("a", "b")]
    assert not found[0].equals(found[1])
    assert card(tmp_path / "a")["insecure"] is False
    assert card(tmp_path / "a")["guarantee"]["text"].startswith("Everything that is released")


def test_laplace_noise_spends_epsilon_alone(source: Path, tmp_path: Path) -> None:
    run(tmp_path, source, privacy__delta=0)
    assert card(tmp_path)["guarantee"]["delta"] == 0
    assert 4.0 * (1 - 1e-9) <= card(tmp_path)["accounting"]["epsilon_exact"] <= 4.0
    assert {type(event) for event in events(tmp_path)} == {DiscreteLaplace}


def test_weights_share_the_budget(source: Path, tmp_path: Path) -> None:
    run(tmp_path, source, {**COPULA, "weights": {"one_way": 4.0, "two_way": 1.0}})
    one_way, two_way, again = events(tmp_path)
    assert two_way.sigma / one_way.sigma == pytest.approx(2.0)
    spent = [event.count / event.sigma**2 for event in (one_way, two_way, again)]
    assert spent[2] / sum(spent) == pytest.approx(0.4, rel=1e-6)
    assert card(tmp_path)["accounting"]["epsilon_exact"] <= 4.0
    pairs_alone = load(
        job(tmp_path / "two", source, {**COPULA, "weights": {"one_way": 0}, "measured_again": 0})
    )
    [only] = leaves(pairs_alone.mechanism.event)
    assert getattr(only, "count", None) == 10
    run_here(tmp_path / "two" / "job" / "job.yaml")
    check_valid(read(tmp_path / "two" / "out"), read(source), SCHEMA)


def test_bins_as_a_list_and_as_a_number(source: Path, tmp_path: Path) -> None:
    bins = {"price": [0.0, 0.25, 0.5], "age": [0, 18, 65], "amount": 3}
    check_valid(run(tmp_path, source, {"kind": "copula", "bins": bins}), read(source), SCHEMA)
    found = card(tmp_path)
    assert found["mechanism"]["bins"] == bins
    assert found["columns"]["age"]["edges"] == [-1.0, 17.0, 64.0, 120.0]
    assert found["columns"]["price"]["cells"] == 3
    usual = run(tmp_path / "some", source, {"kind": "copula", "bins": {"price": 3}})
    check_valid(usual, read(source), SCHEMA)
    found = card(tmp_path / "some")
    assert (
        len(found["mechanism"]["bins"]["age"]) == len(found["columns"]["age"]["edges"]) - 1 <= 41
    )  # found


# ---- units


def test_a_unit_scales_the_noise_and_its_column_may_be_dropped(
    source: Path, tmp_path: Path
) -> None:
    unit = {"column": "userId", "max_rows": 3}
    run(tmp_path / "row", source)
    records = run(tmp_path / "unit", source, privacy__unit=unit)
    check_valid(records, read(source), SCHEMA)
    given = read(source).to_pandas().groupby("userId").size()
    assert records.num_rows == np.minimum(given, 3).sum() < N_ROWS
    rows, units = events(tmp_path / "row"), events(tmp_path / "unit")
    for row, of_unit in zip(rows, units, strict=True):
        assert of_unit.sensitivity == pytest.approx(3 * row.sensitivity)
        assert of_unit.sigma == pytest.approx(
            3 * row.sigma, rel=0.01
        )  # the accountant rounds up, and larger noise otherwise than smaller
    assert "at most 3 are used" in card(tmp_path / "unit")["guarantee"]["text"]
    assert card(tmp_path / "unit")["guarantee"]["unit"] == unit
    assert plan_job(load(tmp_path / "unit" / "job" / "job.yaml")).stages[0].startswith("units: ")
    tables = run(
        tmp_path / "tables",
        source,
        {"kind": "marginals", "cliques": [["rating"]]},
        privacy__unit=unit,
    ).to_pandas()
    margin = tables["margin_95"].iloc[0]
    assert abs(tables["count"].sum() - np.minimum(given, 3).sum()) < 3 * math.sqrt(10) * margin


# ---- again, and the ledger


@pytest.mark.parametrize("mechanism", [COPULA, MARGINALS], ids=["copula", "marginals"])
def test_again_is_a_no_op(mechanism: dict[str, Any], source: Path, tmp_path: Path) -> None:
    made = job(tmp_path, source, mechanism)
    assert run_here(made).status == "released"
    before = {
        path: path.stat().st_mtime_ns for path in [tmp_path / "out", *(tmp_path / "out").rglob("*")]
    }
    assert run_here(made).status == "already released"
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert not hidden(tmp_path / "out").exists()


@pytest.mark.parametrize("mechanism", [COPULA, MARGINALS], ids=["copula", "marginals"])
def test_two_runs_compose_and_the_third_is_refused_with_nothing_written(
    mechanism: dict[str, Any], source: Path, tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    ledger = open_ledger(url)
    ledger.init("people", 3.4, 1e-5)
    place = {"url": url, "dataset": "people"}
    for number in range(3):
        made = job(
            tmp_path / str(number),
            source,
            mechanism,
            ledger=place,
            name=f"job {number}",
            privacy__epsilon=2.0,
        )
        planned = plan_job(load(made)).ledger
        assert planned is not None
        assert planned["fits"] is (number < 2)
        if number < 2:
            run_here(made)
            run_here(made)
            continue
        with pytest.raises(
            BudgetError, match="the budget of the dataset 'people' is too small"
        ) as caught:
            run_here(made)
        assert caught.value.exit_code == 77
        assert sorted(path.name for path in (tmp_path / "2").iterdir()) == ["job"]
    entries = ledger.show("people").entries
    entries = charging_entries(url, "people")
    assert [entry.kind for entry in entries] == ["intend", "commit"] * 2
    assert (entries[0].charge.epsilon, entries[0].charge.delta) == (2.0, DELTA)
    assert entries[0].charge.event == {
        **card(tmp_path / "0")["accounting"]["events"],
        "unit": "row",
        "uncovered": [],
    }
    spent = ledger.read_balance("people").epsilon_spent
    assert 2.0 < spent <= 3.4  # composed at the ledger's δ, not added up
    both = Composed(
        events=tuple(leaves(load(tmp_path / "0" / "job" / "job.yaml").mechanism.event)) * 2
    )
    assert spent >= epsilon(both, 1e-5)


@pytest.mark.few(2)
@pytest.mark.parametrize("mechanism", [COPULA, MARGINALS], ids=["copula", "marginals"])
@pytest.mark.parametrize("delta", [0, DELTA], ids=["laplace", "gaussian"])
def test_an_audit_finds_it_sound(
    mechanism: dict[str, Any], delta: float, source: Path, tmp_path: Path
) -> None:
    made = job(tmp_path, source, mechanism, privacy__delta=delta)
    found = audit_job(load(made), n_runs=2000)
    assert found["sound"] is True
    assert found["columns"] == {}
    assert len(found["measurements"]) == (2 if mechanism is COPULA and not delta else 3)
    assert all(0 < one["claimed"] <= 4.0 for one in found["measurements"])


def test_the_verbs(source: Path, tmp_path: Path) -> None:
    made = str(job(tmp_path, source, {**COPULA, "n_rows": 700}))
    assert command("validate", made).out == f"test: valid; privatises {', '.join(PRIVATISED)}\n"
    planned = json.loads(command("plan", made, "--json").out)
    assert (
        planned["released_rows"],
        planned["n_shards"],
        planned["warnings"],
        planned["epsilons"],
    ) == (700, 2, [], {})
    assert planned["dropped"] == ["userId", "timestamp"]
    assert "count 5 one-way and 10 two-way tables" in planned["stages"][0]
    assert json.loads(command("status", str(tmp_path / "out"), "--json").out)["stage"] == "absent"
    ran = command("run", made)
    assert ran.code == 0, ran.err
    assert "synthetic records of 5 columns, from a Gaussian copula" in ran.out
    steps = [json.loads(line) for line in ran.err.splitlines()]
    assert {step["stage"] for step in steps if "stage" in step} == {"tabulate", "write"}
    assert json.loads(command("status", str(tmp_path / "out"), "--json").out) == {
        "stage": "released",
        "n_releases": 1,
        "n_shards": 2,
        "n_missing": 0,
    }
    audited = command("audit", made, "--runs", "1000")
    assert audited.code == 0
    assert "sound" in audited.out


def test_csv_files(source: Path, tmp_path: Path) -> None:
    text = lake(tmp_path / "in", SIZES, schema=SCHEMA, csv=True)
    schema = {
        name: column | ({"role": "drop"} if name == "genre" else {})
        for name, column in SCHEMA.items()
    }
    schema["genre"] = {"role": "drop", "type": "string"}
    records = run(tmp_path, text, schema=schema)
    check_valid(records, read(source).cast(read(source).schema), schema)
    assert records.num_rows == N_ROWS
    assert plan_job(load(tmp_path / "job" / "job.yaml")).n_rows is None
    same = run(tmp_path / "parquet", source, schema=schema)
    assert records.equals(same)  # the tables are the same, and nothing else is looked at
    tables = run(
        tmp_path / "tables",
        text,
        {"kind": "marginals", "cliques": [["rating", "age"]], "bins": 3},
        schema=schema,
    )
    assert tables.num_rows == 30


# ---- noisy tables


def truth(source: Path, clique: list[str]) -> pd.Series:
    """Return the exact counts by label, with pandas."""
    frame = read(source).to_pandas()
    labels = pd.DataFrame(index=frame.index)
    labels["rating"] = frame["rating"].map(str)
    labels["genre"] = frame["genre"].fillna("null")
    labels["age"] = pd.cut(
        frame["age"], [-1, 29, 59, 89, 120], labels=["0..29", "30..59", "60..89", "90..120"]
    ).astype(str)
    quarters = ["(0.0, 25.0]", "(25.0, 50.0]", "(50.0, 75.0]", "(75.0, 100.0]"]
    amount = pd.cut(frame["amount"], [0, 25, 50, 75, 100], labels=quarters)
    labels["amount"] = amount.astype(str).where(
        ~frame["amount"].isin([0.0, 50.0]), frame["amount"].map(str)
    )
    return labels.groupby(clique).size()


def by_duckdb(out: Path) -> pd.DataFrame:
    with duckdb.connect() as connection:
        return connection.sql(f"SELECT * FROM read_parquet('{out}/*.parquet')").df()


@pytest.mark.parametrize("reader", [pd.read_parquet, by_duckdb], ids=["pandas", "duckdb"])
def test_tables_are_read_labelled_and_near_the_truth(
    reader: Any, source: Path, tmp_path: Path
) -> None:
    run_here(job(tmp_path, source, MARGINALS, output__rows_per_shard=50))
    assert len(list((tmp_path / "out").glob("*.parquet"))) == 3  # 10 + 40 + 6 x 4 x 4 cells
    # pandas would read the manifest too, if it were given the folder's name alone
    found = (
        reader(tmp_path / "out")
        if reader is by_duckdb
        else pd.concat(map(reader, sorted((tmp_path / "out").glob("*.parquet"))))
    )
    assert list(found.columns) == [
        "table",
        "rating",
        "genre",
        "amount",
        "age",
        "count",
        "margin_95",
    ]
    assert found["table"].drop_duplicates().tolist() == [
        "rating",
        "genre x rating",
        "amount x age x genre",
    ]
    assert found["count"].dtype == np.int64
    for clique, event in zip(CLIQUES, events(tmp_path), strict=True):
        rows = found[found["table"] == " x ".join(clique)]
        assert (
            rows[[name for name in ("rating", "genre", "amount", "age") if name not in clique]]
            .isna()
            .all()
            .all()
        )
        assert not rows[clique].isna().any().any()
        assert not rows.duplicated(clique).any()
        assert (
            set(rows["margin_95"])
            == {margin_95(event)}
            == {card(tmp_path)["accounting"]["noise"][" x ".join(clique)]["margin_95"]}
        )
        exact = truth(source, clique)
        cells = rows.set_index(clique)["count"]
        off = cells - exact.reindex(cells.index, fill_value=0)
        assert set(exact.index) <= set(cells.index)
        assert off.abs().max() <= 3 * margin_95(event)  # six standard deviations
        assert (off.abs() <= margin_95(event)).mean() > 0.85
        assert (off != 0).mean() > 0.5  # there is noise
    labels = set(found["rating"].dropna())
    assert labels == set(map(str, LEVELS))
    assert set(found["genre"].dropna()) == {"null", *GENRES}


def test_the_card_of_tables(source: Path, tmp_path: Path) -> None:
    run(tmp_path, source, MARGINALS | {"weights": [1, 4, 16]}, privacy__adjacency="add-remove")
    found = card(tmp_path)
    assert found["mechanism"] == {"kind": "marginals", "cliques": CLIQUES}
    assert found["accounting"]["epsilon_exact"] <= 4.0
    sigmas = [event.sigma for event in events(tmp_path)]
    assert [sigmas[0] / sigma for sigma in sigmas] == pytest.approx([1, 2, 4])
    assert found["n_rows"]["exact"] is False
    assert not holds_number(json.dumps(found), N_ROWS)
    assert load(tmp_path / "job" / "job.yaml").mechanism.event == from_dict(
        found["accounting"]["events"]
    )


def test_tables_without_a_seed_are_drawn_anew(source: Path, tmp_path: Path) -> None:
    found = [
        run(tmp_path / name, source, MARGINALS, insecure_seed=None)["count"].to_numpy()
        for name in ("a", "b")
    ]
    assert (found[0] != found[1]).mean() > 0.5
    assert digests(tmp_path / "a" / "out") != digests(tmp_path / "b" / "out")
