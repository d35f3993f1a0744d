"""The reference `tree` end to end: its pairs, its price, kills, what its card, plan and audit say, bad input, and frames."""

import hashlib
import json
import math
import shutil
from dataclasses import replace
from fractions import Fraction

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from e2e.helpers import (
    categorical,
    charged_kinds,
    continuous,
    discrete,
    load,
    mixed,
    read_card,
    read_rows,
    run_here,
    write_job,
)
from scipy import stats

import dpdask
from dpdask.engine.account import open_ledger
from dpdask.errors import BudgetError
from dpdask.io.shards import MANIFEST_NAME, Manifest
from dpdask.io.storage import Folder
from dpdask.jobs.plan import audit_job, plan_job
from dpdask.privacy import events as accountant
from dpdask.privacy.events import from_dict
from dpdask.terminal.texts import describe_audit

ALPHA = 1e-9
DELTA = 2.0**-30
TREE = {"kind": "tree", "bins": {"c": 8, "d": [0.0, 2.0, 5.0], "e": 10}}
SCHEMA = {
    "user": {"role": "keep"},
    "a": discrete([0, 1, 2]),
    "b": categorical(["x", "y"], nulls="level"),
    "c": continuous([-2.0, 4.0]),
    "d": mixed(atoms=[0.0], bounds=[0.0, 10.0], nulls="level"),
    "e": continuous([18, 97], type="int64"),
    "note": {"role": "drop"},
}
PRIVATE = ("a", "b", "c", "d", "e")
N_ROWS = 12_000


def people(n_rows=N_ROWS, seed=3):
    """Return rows with one column of every kind: b, c and d follow a, and e stands alone."""
    rng = np.random.default_rng(seed)
    a = rng.choice(3, n_rows, p=[0.5, 0.2, 0.3])
    d = np.where(rng.random(n_rows) < 0.2 + 0.3 * a, 0.0, rng.uniform(0.0, 10.0, n_rows))
    d[rng.random(n_rows) < 0.1] = np.nan
    return pd.DataFrame(
        {
            "user": rng.integers(0, 600, n_rows),
            "a": a,
            "b": np.where(rng.random(n_rows) < 0.9, np.array(["x", "y", None])[a], "y"),
            "c": np.clip(a + 0.3 * rng.normal(size=n_rows), -2.0, 4.0),
            "d": d,
            "e": rng.integers(18, 98, n_rows),
            "note": "n",
        }
    )


def arrow(rows):
    return pa.Table.from_pandas(rows, preserve_index=False)


def written(folder, rows, n_files=3):
    folder.mkdir(parents=True)
    for number, part in enumerate(np.array_split(np.arange(len(rows)), n_files)):
        pq.write_table(arrow(rows.iloc[part]), folder / f"{number}.parquet", row_group_size=1500)
    return folder


def job(folder, source, **changed):
    given = {
        "schema": SCHEMA,
        "privacy__epsilon": 3.0,
        "mechanism__reference": TREE,
        "output__rows_per_shard": 5000,
    }
    given |= {"output__order": "keep", **changed}  # rows are compared with their originals
    return write_job(folder, source, folder / "out", **given)


def out(folder):
    return read_rows(folder).to_pandas()


def released(folder, source, **changed):
    run_here(job(folder, source, **changed))
    return out(folder)


def cell(rows, name):
    """Return the public cells of a column, those of the job."""
    values = rows[name]
    if name == "c":
        return np.clip(np.ceil((values + 2.0) / 0.75), 1, 8)
    if name == "d":
        return values.case_when(
            [
                (values.isna(), -2),
                (values == 0, -1),
                (values < 2, 0),
                (values < 5, 1),
                (values >= 5, 2),
            ]
        )
    return values.sub(18) // 8 if name == "e" else values.fillna("null") if name == "b" else values


def variation(one, other, *names):
    """Return the total variation between two tables' counts of some columns."""
    parts = [
        pd.concat([cell(rows, name).rename(name) for name in names], axis=1).value_counts(
            normalize=True
        )
        for rows in (one, other)
    ]
    counted = pd.concat(parts, axis=1).fillna(0.0)
    return float(np.abs(counted.iloc[:, 0] - counted.iloc[:, 1]).sum() / 2)


def chance(rows, *names):
    """Return about the most variation that a second sample of the same distribution has: E + 6 standard deviations, with room for noisy tables."""
    p = (
        pd.concat([cell(rows, name).rename(name) for name in names], axis=1)
        .value_counts(normalize=True)
        .to_numpy()
    )
    n = len(rows)
    return float(np.sqrt(p * (1 - p) / (np.pi * n)).sum() * 1.0 + 6 * np.sqrt(1.0 / (4 * n)) + 0.01)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return written(tmp_path_factory.mktemp("tree") / "in", people())


@pytest.fixture(scope="module")
def plain(source, tmp_path_factory):
    """Return the folder of the job with nothing changed, whose release is there to be read."""
    folder = tmp_path_factory.mktemp("plain")
    run_here(job(folder, source))
    return folder


# ---- the distribution


def test_pairs_on_the_tree_keep_their_tables_where_margins_lose_them(plain, source, tmp_path):
    given, kept = people(), out(plain)
    lost = released(tmp_path / "margins", source, mechanism__reference={"kind": "histogram"})
    assert list(kept.columns) == ["user", *PRIVATE]
    assert len(kept) == N_ROWS
    assert (kept["user"].to_numpy() == given["user"].to_numpy()).all()  # kept, in the same order
    edges = [tuple(edge) for edge in read_card(plain)["mechanism"]["edges"]]
    assert {frozenset(edge) for edge in edges} >= {
        frozenset("ab"),
        frozenset("ac"),
        frozenset("ad"),
    }
    strong = [edge for edge in edges if "e" not in edge]
    for edge in strong:
        assert variation(given, kept, *edge) < chance(given, *edge), edge
        assert variation(given, lost, *edge) > 2 * chance(given, *edge), edge
    for name in PRIVATE:
        assert variation(given, kept, name) < chance(given, name), name
    assert (
        np.mean(
            [
                (cell(kept, name).to_numpy() == cell(given, name).to_numpy()).mean()
                for name in PRIVATE
            ]
        )
        < 0.9
    )  # and rows did change


def test_values_are_valid_and_drawn_inside_their_cells(plain):
    found = out(plain)
    assert set(found["a"]) == {0, 1, 2}
    assert set(found["b"].dropna()) == {"x", "y"}
    assert found["b"].isna().any()
    assert found["c"].between(-2, 4).all()
    assert found["c"].nunique() > 0.99 * N_ROWS
    assert found["d"].dropna().between(0, 10).all()
    assert (found["d"] == 0).mean() > 0.1
    assert found["d"].isna().any()
    assert found["e"].dtype == np.int64
    assert found["e"].between(18, 97).all()
    assert (
        stats.kstest((found["c"] + 2.0) % 0.75 / 0.75, "uniform").pvalue > ALPHA
    )  # cells are 0.75 wide, and their first edge is -2


@pytest.mark.parametrize(
    ("names", "delta"), [(["a"], DELTA), (["a", "b"], 0)], ids=["one-column", "two-columns"]
)
def test_few_columns(names, delta, source, tmp_path):
    schema = {
        name: column if name in names or column["role"] != "privatise" else {"role": "drop"}
        for name, column in SCHEMA.items()
    }
    made = job(
        tmp_path, source, schema=schema, mechanism__reference={"kind": "tree"}, privacy__delta=delta
    )
    assert ("first look" in plan_job(load(made)).stages[1]) is False
    run_here(made)
    assert list(out(tmp_path).columns) == ["user", *names]
    assert variation(people(), out(tmp_path), *names) < chance(people(), *names)
    assert read_card(tmp_path)["mechanism"]["edges"] == ([["a", "b"]] if len(names) == 2 else [])


# ---- units


def test_a_units_rows_are_bounded_and_pay_together(source, tmp_path):
    unit = {"column": "user", "max_rows": 9}
    kept = released(tmp_path, source, privacy__unit=unit, privacy__delta=DELTA)
    assert kept.groupby("user").size().max() == 9
    assert len(kept) == people().groupby("user").size().clip(upper=9).sum()
    card = read_card(tmp_path)
    spent = card["accounting"]
    assert spent["rows_per_unit"] == 9
    assert spent["epsilon_tables"] + 9 * spent["epsilon_row_exact"] <= 3.0 * (1 + 1e-12)
    assert spent["epsilon_exact"] <= 3.0
    assert card["guarantee"]["released_percent_of_rows"] == round(100 * len(kept) / N_ROWS)
    events = from_dict(spent["events"]).events  # type: ignore[union-attr]  # they are composed
    assert [event.sensitivity for event in events[:-1]] == [pytest.approx(9 * 2**0.5)] * 3
    assert events[-1].n == 9


def test_a_ledger_is_charged_once_what_the_job_declares(source, tmp_path):
    url, unit = f"sqlite:///{tmp_path / 'ledger.db'}", {"column": "user", "max_rows": 9}
    ledger = open_ledger(url)
    ledger.init("people", 3.5, 2 * DELTA)
    place = {"url": url, "dataset": "people"}
    made = job(tmp_path, source, privacy__delta=DELTA, privacy__unit=unit, ledger=place)
    planned = plan_job(load(made)).ledger
    assert planned is not None
    assert (planned["before"], planned["fits"]) == (0.0, True)
    for _ in range(2):
        run_here(made)
    shown = ledger.show("people")
    assert charged_kinds(url, "people") == ["intend", "commit"]
    assert (shown.entries[0].charge.epsilon, shown.entries[0].charge.delta) == (3.0, DELTA)
    assert shown.balance.epsilon_spent == planned["after"] <= 3.0
    assert shown.entries[0].charge.event["unit"] == "column user"
    with pytest.raises(BudgetError):
        run_here(made, output__path=tmp_path / "again")


# ---- what is said


def test_the_plan_the_card_and_the_audit_say_the_same(source, tmp_path):
    made = job(tmp_path, source, privacy__delta=DELTA, mechanism__channel="laplace-calibrated")
    planned = plan_job(load(made))
    text = planned.guarantee
    assert [stage.split(":")[0] for stage in planned.stages] == ["survey", "fit", "write", "commit"]
    assert "noise on the tables (ε = 1.8, and all of δ)" in planned.stages[1]
    assert "a row: ε = 1.2" in planned.stages[1]
    assert "5 one-way and 10 two-way tables of all rows" in planned.stages[0]
    assert planned.released_rows == N_ROWS
    assert "ε = 3 differentially private (δ = 9.32e-10, replace-one" in text
    assert "k·exp((k-1)·ε)·δ" in text
    assert [warning.partition(" (")[0] for warning in planned.warnings] == [
        "ε = 3 is large: an attacker may tell two values of one row apart almost every time",
        "A released row keeps almost nothing of a, b, c, d, e",
    ]
    run_here(made)
    card = read_card(tmp_path)
    assert card["guarantee"]["text"].endswith(planned.guarantee)
    assert (card["guarantee"]["delta"], card["guarantee"]["unprotected"]["fraction"]) == (DELTA, 0)
    mechanism, spent = card["mechanism"], card["accounting"]
    assert set(mechanism) == {"kind", "channel", "columns", "joint", "edges", "reference"}
    assert set(spent) == {
        "composition",
        "epsilon_exact",
        "epsilon_tables",
        "epsilon_row_exact",
        "rows_per_unit",
        "events",
    }
    shared = {
        "role",
        "kind",
        "outside",
        "parent",
        "epsilon",
        "epsilon_exact",
        "cells",
        "channel_as_asked",
        "channels",
    }
    assert set(card["columns"]["a"]) == shared | {"levels"}
    assert set(card["columns"]["d"]) == shared | {"bounds", "atoms", "nulls", "cell_edges"}
    assert mechanism["reference"] == {"kind": "tree", "share": 0.6, "bins": TREE["bins"]}
    assert {frozenset(edge) for edge in mechanism["edges"]} == {
        frozenset((column["parent"], name)) for name, column in private(card) if column["parent"]
    }
    assert spent["epsilon_tables"] == pytest.approx(1.8)
    assert Fraction(spent["epsilon_tables"]) + sum(map(Fraction, planned.epsilons.values())) <= 3
    assert spent["epsilon_row_exact"] <= math.fsum(planned.epsilons.values())
    assert spent["epsilon_tables"] < spent["epsilon_exact"] <= 3.0
    assert accountant.epsilon(from_dict(spent["events"]), DELTA) <= 3.0
    for name, column in private(card):
        assert 0 < column["epsilon_exact"] <= column["epsilon"] == planned.epsilons[name]
        assert np.shape(column["channels"]) == (
            1 if column["parent"] is None else card["columns"][column["parent"]]["cells"],
            *[column["cells"]] * 2,
        )
    assert card["columns"]["c"]["cell_edges"][0] == -2.0
    assert card["columns"]["b"]["levels"] == [None, "x", "y"]


def private(card):
    return [
        (name, column) for name, column in card["columns"].items() if column["role"] == "privatised"
    ]


def test_an_audit_is_sound_before_and_after_a_run(source, tmp_path):
    made = load(job(tmp_path, source, mechanism__channel="optimal"))
    before = audit_job(made, n_runs=500)
    run_here(tmp_path / "job.yaml")
    after = audit_job(made, n_runs=500)
    card = read_card(tmp_path)
    for found, source_ in ((before, "a simulated table"), (after, "the released channels")):
        assert found["sound"] is True
        assert list(found["columns"]) == list(PRIVATE)
        assert len(found["measurements"]) == 3
        assert 0 < found["row"]["epsilon_exact"] <= found["row"]["claimed"]
        assert found["row"]["claimed"] == pytest.approx(1.2, rel=1e-12)
        for name, column in found["columns"].items():
            assert column["claimed"] == made.mechanism.spending.row[name]
            assert 0 < column["epsilon_exact"] <= column["claimed"]
            assert column["reference"] == source_
        assert f"a whole row: ε* = {found['row']['epsilon_exact']!r} of" in describe_audit(found)
    for name, column in after["columns"].items():
        assert column["epsilon_exact"] == pytest.approx(
            card["columns"][name]["epsilon_exact"], rel=1e-6
        )
    assert after["row"]["epsilon_exact"] == pytest.approx(
        card["accounting"]["epsilon_row_exact"], rel=1e-6
    )


def test_a_released_channel_of_one_parent_level_that_is_too_weak_is_not_sound(
    plain, source, tmp_path
):
    made = job(tmp_path, source)
    shutil.copytree(plain / "out", tmp_path / "out")
    card = read_card(tmp_path)
    name = next(name for name, column in private(card) if column["parent"] == "a")
    column = card["columns"][name]
    column["channels"][1] = np.eye(column["cells"]).tolist()
    data = json.dumps(card).encode()
    (tmp_path / "out" / "_dpdask" / "release.json").write_bytes(data)
    assert (
        audit_job(load(made), n_runs=1000)["columns"][name]["reference"] == "a simulated table"
    )  # a card that was changed is no card
    changed = replace(
        Manifest.read(Folder(str(tmp_path / "out"))), card_sha256=hashlib.sha256(data).hexdigest()
    )
    Folder(str(tmp_path / "out")).write(MANIFEST_NAME, changed.to_bytes())
    found = audit_job(load(made), n_runs=1000)
    assert found["sound"] is False
    assert found["columns"][name]["epsilon_exact"] > found["columns"][name]["claimed"]
    assert found["row"]["epsilon_exact"] > found["row"]["claimed"]
    assert all(
        other["epsilon_exact"] <= other["claimed"]
        for key, other in found["columns"].items()
        if key != name
    )


def test_channels_that_are_too_many_are_not_shown(source, tmp_path, monkeypatch):
    monkeypatch.setattr("dpdask.mechanisms.dip.tree.MAX_SHOWN", 10)
    made = job(tmp_path, source)
    run_here(made)
    assert not any("channels" in column for _, column in private(read_card(tmp_path)))
    found = audit_job(load(made), n_runs=1000)
    assert found["sound"] is True
    assert {column["reference"] for column in found["columns"].values()} == {"a simulated table"}


# ---- frames


def dip(**changed):
    given = {
        "epsilon": 3.0,
        "reference": dpdask.Tree(bins=TREE["bins"]),
        "insecure_seed": 7,
        **changed,
    }
    return dpdask.DIP(dpdask.Schema.from_dict({"columns": SCHEMA}), **given)


@pytest.mark.parametrize(
    ("unit", "delta"),
    [("row", 0), (dpdask.UnitColumn(column="user", max_rows=15), DELTA)],
    ids=["row", "unit"],
)
def test_frames(unit, delta):
    rows = people()
    with dask.config.set(scheduler="synchronous"):
        for frame in (rows, dd.from_pandas(rows, npartitions=4)):
            release = dip(delta=delta, unit=unit).fit(frame)
            lazy, again = release.transform(frame), release.transform(frame)
            found = lazy if isinstance(lazy, pd.DataFrame) else lazy.compute()
            pd.testing.assert_frame_equal(
                found, again if isinstance(again, pd.DataFrame) else again.compute()
            )
            assert list(found.columns) == ["user", *PRIVATE]
            assert (found["user"] == rows.loc[found.index, "user"]).all()
            assert found["e"].dtype == rows["e"].dtype
            edges = [tuple(edge) for edge in release.card["mechanism"]["edges"]]
            assert release.card["guarantee"]["delta"] == delta
            assert release.card["accounting"]["epsilon_exact"] <= 3.0
            if unit == "row":
                assert len(found) == N_ROWS
                assert {frozenset(edge) for edge in edges} >= {frozenset("ab"), frozenset("ac")}
                for edge in (edge for edge in edges if "e" not in edge):
                    assert variation(rows, found, *edge) < chance(rows, *edge), edge
            else:
                assert found.groupby("user").size().max() == 15
            release.close()


def test_secure_frames_keep_no_noisy_table():
    with dask.config.set(scheduler="synchronous"):
        rows = people(1000)
        release = dip(insecure_seed=None, delta=DELTA).fit(rows)
        one = release.transform(rows)
        other = dip(insecure_seed=None, delta=DELTA).fit(rows).transform(rows)
    assert set(release.folder.names()) == {"run.key", "release.npz", "seals", "batches"}
    assert not one.equals(other)
    assert "INSECURE" not in release.card["guarantee"]["text"]
    release.close()


def test_frames_that_cannot_be_are_refused():
    with pytest.raises(dpdask.SpecError, match=r"`delta`: .*take the reference tree"):
        dip(reference=dpdask.Histogram(), delta=1e-9)
    with dask.config.set(scheduler="synchronous"):
        with pytest.raises(dpdask.SpecError, match="need more channels than can be held"):
            dip(reference=dpdask.Tree(bins=2000)).fit(people(100))
        with pytest.raises(dpdask.SpecError, match=r"`reference\.bins\.a`: is not a continuous"):
            dip(reference=dpdask.Tree(bins={"a": 3})).fit(people(100))
        with pytest.warns(UserWarning, match="is not below 1"):
            release = dip(delta=0.02).fit(people(100))
        with pytest.raises(dpdask.SpecError, match="released together"):
            dpdask.local.export(release)
        with pytest.raises(dpdask.DataError, match="differ from those of the fitted frame"):
            release.transform(people(100).astype({"a": "int32"}))
