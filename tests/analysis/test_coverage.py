"""The contract of estimates by name: an interval of 95 % holds the truth in 95 % of the runs and is not much wider than that needs, or it is refused.

`pipelines/benchmarks/coverage.py` simulates and judges.
`RECORDED` holds the cells of whole runs. A cell of it that breaks the contract is known to do so.
"""

import contextlib
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from numpy.random import default_rng

import dpdask
from pipelines.benchmarks import coverage, coverage_tables
from pipelines.benchmarks.coverage import Cell, judge

RECORDED = Path(__file__).with_name("coverage.csv")
PAGE = Path(__file__).parents[2] / "docs/reference/cost.md"
RUNS = 200
NEVER_REFUSED = (
    "share of levels",
    "share of texts",
    "mean of levels",
    "crosstab with town",
    "crosstab of two",
    "mean within",
    "counts of ranges",
    "quantiles",
)
PAIRS = [
    (kind, name)
    for kind in coverage.KINDS_OF_RELEASE
    for name in coverage.TABLES
    if coverage.is_possible(kind, coverage.table(name))
]


def read_recorded():
    return {key(cell): cell for cell in coverage.read_cells(RECORDED)}


def key(cell):
    return cell.release, cell.table, cell.question


def must_answer(cell):
    """Tell whether a cell may not be a refusal."""
    return cell.question in NEVER_REFUSED or (
        cell.question == "mean of levels by town" and "optimal-unbiased" in cell.release
    )


def breaks(cell):
    """Return what is wrong with a cell, a refusal of what must be answered included."""
    return judge(cell) or ("is refused" if cell.refusal and must_answer(cell) else "")


def simulate(kind, name, runs, folder, **changes):
    source = coverage.table(name)
    opened = coverage.releases(kind, source, runs, folder, **changes)
    return coverage.simulate(kind, source, opened)


# ---- a few cells, again


@pytest.mark.parametrize(
    ("kind", "name"), [("dip holdout optimal-unbiased", "zeros"), ("marginals 20", "sparse")]
)
def test_some_cells_keep_the_contract(kind, name, tmp_path):
    cells = simulate(kind, name, 12, tmp_path, n_rows=3_000)
    known = {key for key, cell in read_recorded().items() if breaks(cell)}
    answered = [cell for cell in cells if not cell.refusal]
    assert answered
    assert [
        (cell.question, judge(cell)) for cell in answered if judge(cell) and key(cell) not in known
    ] == []


def list_pairs(cells):
    return {(cell.release, cell.table) for cell in cells}


def test_the_record_is_whole_and_the_page_tells_it():
    cells = list(read_recorded().values())
    assert {cell.asked for cell in cells} == {RUNS}
    asked = [
        (kind, name, label)
        for kind, name in PAIRS
        if (kind, name) in list_pairs(cells)
        for label in coverage.asked(kind, coverage.table(name))
    ]
    assert sorted(asked) == sorted(map(key, cells))
    page = PAGE.read_text(encoding="utf-8")
    for kind in {kind for kind, _ in list_pairs(cells)}:
        own = [cell for cell in cells if cell.release == kind]
        if list_pairs(own) == {pair for pair in PAIRS if pair[0] == kind}:
            assert coverage.write_table(own).splitlines()[-1] in page


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("kind", "name"), sorted(list_pairs(read_recorded().values())), ids=lambda part: part
)
def test_each_cell_keeps_the_contract_or_is_recorded_to_break_it(kind, name, tmp_path):
    recorded = read_recorded()
    for cell in simulate(kind, name, RUNS, tmp_path):
        assert bool(breaks(cell)) == bool(breaks(recorded[key(cell)])), (cell, breaks(cell))


# ---- power


PLANTED = {
    "nothing": lambda found: found,
    "standard errors halved": lambda found: replace(
        found,
        standard_error=found.standard_error / 2.0,
        find_ends=found.find_ends and (lambda z: found.find_ends(z / 2.0)),
    ),
    "bias hidden": lambda found: replace(found, bias_bound=0.0),
    # a share among the rows with a value, with the error of one among all rows
    "nulls ignored": lambda found: replace(
        found,
        standard_error=found.standard_error * math.sqrt(0.1),
        find_ends=found.find_ends and (lambda z: found.find_ends(z * math.sqrt(0.1))),
    ),
}


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """Forty releases of each of two populations, opened."""
    folder = tmp_path_factory.mktemp("tables")

    def release(name, seed):
        place = folder / name / str(seed)
        place.mkdir(parents=True)
        return coverage.run("marginals 20", coverage.table(name), seed, place, n_rows=6_000)

    return {name: [release(name, seed) for seed in range(1, 41)] for name in ("sparse", "zeros")}


@pytest.mark.parametrize(
    ("planted", "question", "wrong"),
    [
        ("nothing", "share of levels", ""),
        ("nothing", "quantiles", ""),
        # an edge cuts a cell, whose rows may all lie on either side
        ("nothing", "counts of ranges", "times as wide as its error"),
        ("standard errors halved", "share of levels", "covers.*standard error"),
        ("standard errors halved", "quantiles", "standard error"),
        ("bias hidden", "counts of ranges", "covers"),
        ("nulls ignored", "quantiles", "standard error"),
    ],
)
def test_planted_errors_are_found(tables, planted, question, wrong):
    # nearly all zeros lie on one side of the edge that cuts their cell
    name = "zeros" if planted == "bias hidden" else "sparse"
    [cell] = coverage.simulate(
        "marginals 20",
        coverage.table(name),
        tables[name],
        only=[question],
        plant=PLANTED[planted],
    )
    assert re.fullmatch(wrong and f".*{wrong}.*", judge(cell)), cell


def test_what_is_estimated_from_bounded_rows_says_so_and_is_not_of_the_table(tmp_path):
    source, kind = coverage.table("units"), "marginals 20"
    opened = []
    for seed in range(1, 13):
        (tmp_path / str(seed)).mkdir()
        opened.append(coverage.run(kind, source, seed, tmp_path / str(seed), n_rows=6_000))
    asked = {"only": ["mean of levels"]}
    [told] = coverage.simulate(kind, source, opened, **asked)
    assert judge(told) == ""
    [silent] = coverage.simulate(
        kind, source, opened, plant=lambda found: replace(found, limits=()), **asked
    )
    assert "covers" in judge(silent)
    for question in coverage.asked(kind, source).values():
        with contextlib.suppress(dpdask.SpecError, TypeError):
            assert coverage.BOUNDED in question.ask(opened[0]).limits[0]


def make_cell(**changes):
    good = Cell("r", "t", "q", 200, coverage=0.95, average=0.95, width=1.0, error=1.0, answered=1.0)
    return replace(good, **changes)


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({}, ""),
        ({"coverage": 0.90}, ""),  # by chance
        ({"coverage": 0.80}, "covers 0.80"),
        ({"coverage": 0.80, "on_average": 1}, ""),
        ({"coverage": 0.70, "average": 0.80, "on_average": 1}, "covers 0.80"),
        ({"coverage": 1.0, "width": 3.0}, "3.0 times as wide as its error"),
        ({"error": 0.5}, "standard error 0.50 of the spread"),
        ({"error": 2.0}, "standard error 2.00 of the spread"),
        ({"error": math.nan}, ""),
        ({"refusal": "cannot be known", "coverage": math.nan}, ""),
    ],
)
def test_a_cell_is_judged_by_three_figures(changes, wrong):
    assert judge(make_cell(**changes)) == wrong


def test_few_runs_say_less():
    assert judge(make_cell(coverage=0.75, runs=12)) == ""
    assert judge(make_cell(coverage=0.75)) != ""


def test_an_answer_is_measured_over_its_runs():
    rng = default_rng(1)
    truth = np.array([1.0, 2.0])
    answers = []
    for _ in range(400):
        found = truth + rng.normal(size=2)
        answers.append(coverage.Answer(truth, found, np.ones(2), found - 1.96, found + 1.96))
    names = {"release": "r", "table": "t", "question": "q"}
    cell = coverage.measure(answers, **names)
    assert cell.average == pytest.approx(0.95, abs=0.03)
    assert cell.coverage <= cell.average
    assert (cell.width, cell.error) == (pytest.approx(1.0, abs=0.1), pytest.approx(1.0, abs=0.1))
    assert coverage.measure(["no"] * 3 + answers[:2], **names).refusal == "no"
    assert coverage.measure([*answers, "no"], **names).answered == pytest.approx(400 / 401)


def test_real_tables_are_asked_as_far_as_they_are_there(tmp_path, monkeypatch, capsys):
    rng, n = default_rng(3), 3_000
    late = rng.normal(5.0, 20.0, n).round()
    rows = {"ArrDelay": np.where(rng.random(n) < 0.02, np.nan, late), "DepDelay": late + 1.0}
    rows |= {"UniqueCarrier": rng.choice(["AA", "CO"], n), "Origin": rng.choice(["HOU", "IAH"], n)}
    pd.DataFrame(rows | {"Month": rng.integers(1, 13, n)}).to_parquet(
        tmp_path / "hflights_2011.parquet"
    )
    monkeypatch.setenv("DPDASK_DATA", str(tmp_path))
    out = tmp_path / "out.csv"
    coverage_tables.main(["--runs", "1", "--releases", "interval case2", "--csv", str(out)])
    cells = coverage.read_cells(out)
    assert {cell.table for cell in cells} == {"flights"}
    assert "of the intervals of" in capsys.readouterr().out
    told = [cell for cell in cells if cell.question == "counts of ranges"]
    assert told[0].average > 0.5
    monkeypatch.delenv("DPDASK_DATA")
    with pytest.raises(SystemExit):
        coverage_tables.main([])


def test_the_truth_of_bounded_rows_weighs_rows():
    source = coverage.table("units")
    per_unit = pd.Series(source.weights).groupby(source.rows["user"].to_numpy()).sum()
    assert per_unit.max() == pytest.approx(coverage.MAX_ROWS)
    assert (source.weights > 0).all()
    assert (source.weights <= 1).all()


def test_an_interrupted_file_is_continued(tmp_path, capsys):
    """What it has with as many runs is not run again; what it lacks is; and the page has a line for each release."""
    out, page = tmp_path / "cells.csv", tmp_path / "page.md"
    page.write_text(
        f"before\n{coverage.BEGIN}\nlast year\n{coverage.END}\nafter\n", encoding="utf-8"
    )
    chosen = ["--runs", "2", "--releases", "dip known laplace", "--csv", str(out), "--tables"]
    coverage.main([*chosen, "plain"])
    cells = coverage.read_cells(out)
    assert {cell.asked for cell in cells} == {2}
    kinds = list(dict.fromkeys(cell.release for cell in cells))
    marked = [replace(cell, average=0.5) for cell in cells if cell.release == kinds[0]]
    coverage.write_cells(out, marked[:-1])  # one question less, and other releases are not there
    assert coverage.list_work(kinds[:1], ["plain"], 2, marked) == []
    assert coverage.list_work(kinds[:1], ["plain"], 3, marked) == [(kinds[0], "plain", 3)]
    assert coverage.list_work(kinds[:1], ["plain"], 2, marked[:-1]) == [(kinds[0], "plain", 2)]
    coverage.write_cells(out, marked)
    capsys.readouterr()
    coverage.main([*chosen, "plain", "--page", str(page)])
    assert f"{kinds[0]} " not in capsys.readouterr().out
    found = coverage.read_cells(out)
    kept = [cell for cell in found if cell.release == kinds[0]]
    assert [cell.average for cell in kept] == [0.5] * len(marked)
    assert {cell.release for cell in found} == set(kinds)
    text = page.read_text(encoding="utf-8")
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "last year" not in text
    assert all(text.count(f"| {kind} |") == 1 for kind in kinds)


def test_the_table_of_all_cells_is_short():
    cells = [
        make_cell(release=kind, table=name, question=label, asked=200)
        for kind, name in PAIRS
        for label in coverage.asked(kind, coverage.table(name))
    ]
    lines = coverage.write_table(cells).splitlines()
    assert len(lines) <= 50
    assert len({line.count("|") for line in lines[2:]}) == 1
    wrong = [replace(cells[0], coverage=0.5), replace(cells[1], refusal="no"), *cells[2:]]
    text = coverage.write_table(wrong)
    assert "**0.50" in text
    assert "refused" in text
    assert "1 are refusals, and 1 of the others" in text
    assert coverage.write_table([]) == "No whole run is recorded."
