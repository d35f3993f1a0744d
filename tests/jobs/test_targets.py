"""`plan --target`: the least ε whose noise meets an error, from public facts alone."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from e2e.helpers import call_cli, load, run_here

import dpdask
from dpdask.conditions import Rule
from dpdask.errors import SpecError
from dpdask.jobs.plan import find_epsilon, plan_job, warn_of_targets
from dpdask.jobs.spec import Job
from dpdask.privacy.noise import margin_95
from dpdask.schema import Column, Schema
from pipelines.benchmarks import coverage, coverage_tables

NO_TABLE = "no table that is released has the column"
CELLS = {"kind": "histogram", "bins": 4, "threshold": "none", "output": "cells"}


def excess(job, epsilon, rows):
    """Return how many times the rows the largest margin of a published count is at an ε."""
    budget = job.mechanism.budget.model_copy(update={"epsilon": epsilon})
    counted = replace(job.mechanism, budget=budget).counted
    return max(margin_95(event) / parts for event, parts in counted) / rows


@pytest.mark.parametrize("rows", [8, 60, 900])
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("homes, copula", {}),
        ("homes, tables", {}),
        ("homes, tables", {"privacy__adjacency": "add-remove", "privacy__epsilon": 30.0}),
        ("homes, cells", {"mechanism": CELLS}),
    ],
)
def test_the_least_epsilon_is_found(name, changes, rows, shelf, tmp_path):
    job = load(shelf.job(name, tmp_path, **changes))
    found = find_epsilon(job, {"count_margin": str(rows)})
    assert excess(job, found, rows) <= 1.0
    grid = found * np.linspace(0.5, 0.98, 7)
    assert min(excess(job, each, rows) for each in grid) > 1.0
    share = {"share": repr(rows / 20_000), "count_margin": str(10 * rows)}
    if job.mechanism.budget.adjacency == "replace-one":
        assert find_epsilon(job, share) == pytest.approx(found, rel=0.02)
    else:
        with pytest.raises(SpecError, match="share: the number of rows is private"):
            find_epsilon(job, share)


def test_a_plan_says_the_epsilon_and_the_margin_holds(shelf, tmp_path):
    """Of 20 x 60 counts, no more than chance allows are off by more than the margin; a half of it would be too small."""
    job = shelf.job("homes, tables", tmp_path)
    found = call_cli("plan", job, "--target", "count_margin=40", "--json")
    assert found.returncode == 0
    told = json.loads(found.stdout)
    target = told["target"]
    assert target["count_margin"] == 40
    assert max(each["margin_95"] for each in told["noise"]) <= 40
    shown = call_cli("plan", job, "--target", "count_margin=40").stdout
    assert f"target    count_margin 40: met from privacy.epsilon {target['epsilon']!r}" in shown
    assert "target" not in call_cli("plan", job).stdout
    tables = []
    for seed in range(20):
        out = tmp_path / f"out {seed}"
        run_here(job, privacy__epsilon=target["epsilon"], output__path=out, insecure_seed=seed)
        tables.append(dpdask.open(str(out)).to_pandas())
    counts = np.array([table["count"].to_numpy(dtype=float) for table in tables])
    truth = exact(shelf, tables[0])
    off = np.abs(counts - truth)
    assert (off > 40).mean() < 0.05 + 4 * np.sqrt(0.05 * 0.95 / off.size)
    assert (off > 20).mean() > 0.1


def exact(shelf, table):
    """Return the exact counts of a released table's cells."""
    import pyarrow.parquet as pq

    rows = pq.read_table(shelf.lake("homes")).to_pandas()
    counts = rows.groupby(["town", "rating"]).size()
    ends = np.digitize(rows["price"], np.linspace(0, 200, 21)[1:-1])
    prices = np.bincount(ends, minlength=20)
    found, place = [], 0
    for town, rating in zip(table["town"], table["rating"], strict=True):
        if town is None or town != town:
            found.append(prices[place])
            place += 1
        else:
            found.append(counts[(town, int(rating))])
    return np.array(found)


@pytest.mark.parametrize(
    ("name", "target", "what"),
    [
        ("homes, tables", "count_margin=0", "a number above 0 is expected"),
        ("homes, tables", "count_margin=few", "a number above 0 is expected"),
        ("homes, tables", "count_margn=3", "is not a target; did you mean 'count_margin'?"),
        ("homes, copula", "count_margin=0.5", "even ε = 100 does not meet it"),
        ("homes, tables", "mean=0.02", "no privatised column; write mean.COLUMN=NUMBER"),
        ("homes, tables", "mean.ratng=0.02", "did you mean 'rating'?"),
        ("homes, tables", "mean.price=0.02", "depends on where the rows lie"),
        ("homes, tables", "mean.town=0.02", "its levels are no numbers"),
        ("homes, tables", "mean.kind=0.02", "no table that is released has the column"),
        ("homes, tables", "mean.rating=-1", "a number above 0 is expected"),
        ("homes, tables", "kept.rating=0.5", "no row is released with noise of its own"),
        ("homes, interval", "kept.price=0.5", "no row is released with noise of its own"),
        ("homes, dip", "kept=0.5", "no privatised column; write kept.COLUMN=NUMBER"),
        ("homes, dip", "kept.town=0.5", "it names no privatised column"),
        ("homes, dip", "kept.rating=1", "a number below 1 is expected"),
        ("homes, dip", "count_margin=20", "it publishes no counts"),
        ("homes, interval", "count_margin=20", "it publishes no counts"),
    ],
)
def test_what_no_epsilon_can_promise_is_refused(name, target, what, shelf, tmp_path):
    found = call_cli("plan", shelf.job(name, tmp_path), "--target", target)
    assert found.returncode == SpecError.exit_code
    assert what in found.stderr
    assert found.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("channel", "kept"), [("laplace", 0.1), ("laplace-calibrated", 0.9), ("optimal", 0.5)]
)
def test_how_much_a_row_keeps_may_be_asked_for(channel, kept, shelf, tmp_path):
    """Of every column; together, of the one that needs most; and the plan says the same figure."""
    loaded = load(shelf.job("homes, dip", tmp_path, mechanism__channel=channel))

    def read(column, epsilon):
        job = load(
            shelf.job("homes, dip", tmp_path, mechanism__channel=channel, privacy__epsilon=epsilon)
        )
        lines = (line.partition(" about ") for line in plan_job(job).expectations)
        [told] = [kept for what, _, kept in lines if kept and what.startswith(f"{column}:")]
        return float(told)

    found = {}
    for column in loaded.schema.privatised:
        epsilon = find_epsilon(loaded, {f"kept.{column}": repr(kept)})
        assert read(column, epsilon) >= kept - 0.005
        assert read(column, 0.97 * epsilon) <= kept + 0.005
        assert read(column, 0.7 * epsilon) < kept
        found[f"kept.{column}"] = epsilon
    every = find_epsilon(loaded, dict.fromkeys(found, repr(kept)))
    assert every == pytest.approx(max(found.values()), rel=0.02)
    assert warn_of_targets(loaded, [*found, "count_margin"]) == [
        f"the target kept.{column} is met if all levels are equally frequent; of a column in which most rows share a level, a released row keeps less"
        for column in loaded.schema.privatised
        if loaded.schema.columns[column].has_levels
    ]
    shown = call_cli("plan", shelf.job("homes, dip", tmp_path), "--target", "kept.rating=0.3")
    assert "equally frequent" in shown.stdout
    assert "target    kept.rating 0.3: met from privacy.epsilon" in shown.stdout


@pytest.mark.parametrize("name", ["homes, tables", "homes, copula"])
def test_the_error_of_a_mean_of_levels_may_be_asked_for(name, shelf, tmp_path):
    job = shelf.job(name, tmp_path)
    found = call_cli("plan", job, "--target", "mean.rating=0.02", "--json")
    told = json.loads(found.stdout)["target"]
    assert told["mean.rating"] == 0.02
    loaded = load(job)
    levels = loaded.schema.columns["rating"].levels
    part = 0.02 / min(levels)
    assert min(levels) > 0
    assert find_epsilon(loaded, {"relative.rating": repr(part)}) == told["epsilon"]
    assert find_epsilon(loaded, {"mean.rating": "0.01"}) > 1.3 * told["epsilon"]


def test_a_mean_that_may_be_0_has_no_relative_error(shelf, tmp_path):
    levels = [0, 1, 2, 3, 4, 5]
    path = shelf.job("homes, tables", tmp_path)
    loaded = load(path)
    columns = {
        **loaded.schema.columns,
        "rating": loaded.schema.columns["rating"].model_copy(update={"levels": levels}),
    }
    loaded = Job(loaded.file, loaded.schema.model_copy(update={"columns": columns}), tmp_path)
    with pytest.raises(SpecError, match="the mean may be 0"):
        find_epsilon(loaded, {"relative.rating": "0.1"})
    private = load(path, privacy__adjacency="add-remove")
    with pytest.raises(SpecError, match="number of rows is private"):
        find_epsilon(private, {"mean.rating": "0.1"})


@pytest.mark.parametrize(
    ("changes", "rules", "target", "what"),
    [
        ({"price": {"bounds": None}}, [Rule(derived={"price": "rating"})], "mean.price", NO_TABLE),
        (
            {"rating": {"kind": "categorical", "levels": "discover", "other": 0}},
            [],
            "mean.rating",
            "its levels are found in the run",
        ),
    ],
)
def test_a_mean_that_no_table_tells_before_the_run_is_refused(
    changes, rules, target, what, shelf, tmp_path
):
    """Of a column that is computed, and of one whose levels are yet to be found."""
    loaded = load(shelf.job("homes, copula", tmp_path))
    columns = {
        name: Column(**{**column.model_dump(exclude_none=True), **changes.get(name, {})})
        for name, column in loaded.schema.columns.items()
    }
    loaded = Job(loaded.file, Schema(columns=columns, rules=tuple(rules)), tmp_path)
    with pytest.raises(SpecError, match=what):
        find_epsilon(loaded, {target: "0.1"})


def test_margins_hold_and_no_less_epsilon_would_do():
    """The small version of `coverage_tables --targets`; a margin of half as many rows would be found."""
    table = coverage.table("plain")
    table = replace(table, rows=table.rows[:2_000])
    for found in coverage_tables.measure_targets(table, 4):
        assert found.is_least
        if found.name == "count_margin":
            n = 4 * (5 + 15)
            assert found.held > 0.95 - 4 * np.sqrt(0.05 * 0.95 / n)
            assert found.held_half < 0.9
        else:
            assert found.held >= 0.5


def test_a_job_may_name_the_error_in_place_of_the_epsilon(shelf, tmp_path):
    asked = {"target": {"count_margin": 60}}
    job = shelf.job("homes, copula", tmp_path, privacy__epsilon=asked)
    loaded = load(job)
    promised = loaded.file.privacy.epsilon
    assert promised == loaded.mechanism.budget.epsilon
    assert promised == pytest.approx(find_epsilon(loaded, {"count_margin": "60"}), rel=0.02)
    numbered = load(job, privacy__epsilon=repr(promised))
    assert numbered.digest == loaded.digest
    assert f"ε = {promised:g}" in call_cli("plan", job).stdout


@pytest.mark.parametrize(
    ("asked", "what"),
    [
        ({"target": {"count_margin": "few"}}, "a number above 0 is expected, or `{target:"),
        ({"target": {"share": 0.1}}, "a number above 0 is expected, or `{target:"),
        ({"target": 20}, "a number above 0 is expected, or `{target:"),
        ({"target": {"count_margin": True}}, "a number above 0 is expected, or `{target:"),
        ({"target": {"count_margin": 20}, "at": 1}, "a number above 0 is expected, or `{target:"),
        ({"target": {"count_margin": -1}}, "a number above 0 is expected, or `{target:"),
    ],
)
def test_a_target_that_is_none_is_refused_with_its_line(asked, what, shelf, tmp_path):
    found = call_cli("validate", shelf.job("homes, copula", tmp_path, privacy__epsilon=asked))
    assert found.returncode == SpecError.exit_code
    assert what in found.stderr
    assert "privacy.epsilon" in found.stderr
    assert found.stderr.count("\n") == 1
