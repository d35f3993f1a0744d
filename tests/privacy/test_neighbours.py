"""Tiny neighbouring tables through the public entry points: nothing that an outsider sees tells them apart beyond the claim.

Each job runs on both tables with many seeds. An event of what is seen (values, counts, card, manifest, file names and sizes, how
the run ended) that is far more likely on one than ε and δ allow fails the test: the two rates must differ by 0.7 to be looked at, by
less in the slow version. So this finds exact leaks, as planted breaks show; noise of a wrong size is found by `test_neighbours_distributions.py`.
"""

import dataclasses

import pyarrow as pa
import pytest
from privacy.neighbour_cases import (
    EPSILON,
    central_cases,
    dip_cases,
    interval_cases,
    person_cases,
    table,
    write_public,
)
from privacy.outsider import Bench, Effort, released, tell_apart

from dpdask.errors import DataError
from dpdask.io import parquet
from dpdask.mechanisms.marginals import spec as tables

PUBLIC = "(the public table)"
CASES = {
    case.name: case
    for case in (*dip_cases(PUBLIC), *central_cases(), *interval_cases(), *person_cases())
}
THOROUGH = Effort(looked=300, gap=0.15, judged=1500)
EXACT = Effort(
    judged=40
)  # proves ε > 0.23 of an event with rates 1 and 0, as those of planted breaks; 38 would prove 0.17


def audit(folder, case, effort=Effort()):  # noqa: B008 - frozen
    """Return what tells a case's neighbours apart."""
    left, right = case.tables()
    bench = Bench.of(folder, case.schema, **placed(case, folder))

    def draw(parts):
        def views(seeds):
            if not case.held:
                return bench.views(parts, seeds)
            return released(
                bench.views(parts, range(2 * seeds.start, 2 * seeds.stop)), case.changed
            )

        return views

    return tell_apart(draw(left), draw(right), effort, delta=case.delta)


def placed(case, folder):
    """Return a case's changes with its public table in a folder."""
    changes = case.changes
    reference = changes["mechanism"].get("reference", {})
    if reference.get("path") == PUBLIC:
        changes["mechanism"]["reference"] = {
            **reference,
            "path": str(write_public(folder / "public")),
        }
    return changes


SOLVED = "histogram-continuous-optimal"  # each run solves a large linear program of its own


def is_like_another(case):
    """Return whether a case's mechanism is also tried with the other unit, and its unit and adjacency with other mechanisms."""
    if case.name in ("marginals-delta-unit", "copula-delta-row", "copula-target-add-remove-row"):
        return True  # marginals-delta-row, copula-delta-unit and both other cases of a target are tried
    if case.name in ("marginals-found-unit", "cells-found-unit", "rows-found-row"):
        return True  # their cells are found by the same code: copula-found-unit, rows-found-unit and the other two by rows are tried
    if case.mechanism["kind"] == "dip":
        return case.unit != "row" and case.name not in (
            "histogram-unit",
            "holdout-unit",
            "known-laplace-unit",
            "tree-unit",
        )
    return case.delta == 0.0 and (case.adjacency == "replace-one") == (case.unit != "row")


@pytest.mark.few(6)
@pytest.mark.slow_with("copula-target-replace-one-row")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=pytest.mark.slow if name == SOLVED or is_like_another(case) else ()
        )
        for name, case in CASES.items()
    ],
)
def test_neighbours_look_alike(name, tmp_path):
    found = audit(tmp_path, CASES[name])
    assert found.epsilon <= EPSILON, found.event
    assert found.n_released > Effort().looked / 2


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", CASES)
def test_neighbours_look_alike_in_many_runs(name, tmp_path):
    found = audit(tmp_path, CASES[name], THOROUGH)
    assert found.epsilon <= EPSILON, found.event


# ---- refusals


def told_apart(folder, case, left, right, **changes):
    """Return what tells two tables apart, one file each."""
    bench = Bench.of(folder, case.schema, **placed(case, folder), **changes)
    return tell_apart(
        lambda seeds: bench.views([left], seeds),
        lambda seeds: bench.views([right], seeds),
        delta=case.delta,
    )


CENTRAL = [
    name for name, case in CASES.items() if case.adjacency == "add-remove" and case.unit == "row"
]


@pytest.mark.few(2)
@pytest.mark.slow_with("copula-target")
@pytest.mark.parametrize("name", CENTRAL)
def test_an_empty_table_looks_like_one_with_a_row(name, tmp_path):
    found = told_apart(tmp_path, CASES[name], table(0), table(1))
    assert found.epsilon <= EPSILON, found.event
    assert found.n_released > 0


BOUNDED = [
    "known-continuous",
    "histogram-continuous-laplace",
    pytest.param(SOLVED, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("name", BOUNDED)
def test_a_number_outside_its_bounds_looks_like_one_inside(name, tmp_path):
    inside = table(4)
    outside = inside.set_column(4, "p", pa.array([0.1, 0.1, 0.1, 7.0]))
    found = told_apart(tmp_path, CASES[name], inside, outside)
    assert found.epsilon <= EPSILON, found.event
    assert found.n_released > 0


UNKNOWN = table(4).set_column(2, "x", pa.array([0, 0, 0, 99], pa.int64()))


@pytest.mark.parametrize(
    "name", ["histogram-row", "marginals-replace-one-row", "cells-add-remove-row"]
)
def test_a_budget_that_cannot_pay_answers_no_question(name, tmp_path):
    """One row has a level that the schema does not declare: only who may read it is told so."""
    found = told_apart(tmp_path, CASES[name], table(4), UNKNOWN, budget=EPSILON / 2)
    assert found.epsilon == 0.0, found.event


def test_a_strict_ledger_charges_a_refusal_that_tells_of_a_value(tmp_path):
    """An unknown level ends the run, which tells that it is there: with a strict ledger that costs what the release would have."""
    case = CASES["marginals-replace-one-row"]
    bench = Bench.of(tmp_path, case.schema, **case.changes, budget=1.0, strict=True)
    [refused], [paid] = bench.views([UNKNOWN], [0]), bench.views([table(4)], [0])
    assert str(refused["ends"]).startswith("65: ")
    assert refused["spent"] == paid["spent"] == EPSILON


# ---- planted breaks


@pytest.mark.more
@pytest.mark.parametrize(
    "name",
    [
        "histogram-row",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("known-laplace-unit", "marginals-replace-one-row")
        ),
    ],
)
def test_a_refusal_that_depends_on_a_value_is_found(name, tmp_path, monkeypatch):
    read = parquet.read_batches

    def strict(*arguments, **options):
        for batch in read(*arguments, **options):
            if "x" in batch.schema.names and 2 in batch.column("x").to_pylist():
                raise DataError("planted", "x")
            yield batch

    monkeypatch.setattr(parquet, "read_batches", strict)
    found = audit(tmp_path, CASES[name], EXACT)
    assert found.epsilon > EPSILON, found.event


@pytest.mark.more
@pytest.mark.parametrize(
    "name",
    ["marginals-add-remove-row", pytest.param("copula-add-remove-unit", marks=pytest.mark.slow)],
)
def test_the_exact_number_of_rows_is_found(name, tmp_path, monkeypatch):
    measure = tables.measure

    def exact(counts, planned, **options):
        return measure(counts, planned, **{**options, "n_rows_public": True})

    monkeypatch.setattr(tables, "measure", exact)
    found = audit(tmp_path, CASES[name], EXACT)
    assert found.epsilon > EPSILON, found.event


@pytest.mark.more
def test_rows_that_keep_their_place_when_one_is_gone_are_found(tmp_path):
    """The published number of rows of a replace-one release, taken for an add-remove one."""
    case = dataclasses.replace(CASES["known-laplace-row"], adjacency="add-remove")
    left, right = case.tables()
    bench = Bench.of(tmp_path, case.schema, **CASES["known-laplace-row"].changes)
    found = tell_apart(
        lambda seeds: bench.views(left, seeds), lambda seeds: bench.views(right, seeds), EXACT
    )
    assert found.epsilon > EPSILON, found.event
