"""What can be wrong with a DIP job along a tree, or odd, through the command line; and chains and trees of any form."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from e2e.bad_input import COLUMNS, Case, command, table
from e2e.bad_input import job as bad_job
from e2e.helpers import continuous, load, run_here, write_job
from e2e.test_bad_input import check_case, ids
from e2e.test_tree_jobs import out

from dpdask.engine.account import open_ledger
from dpdask.errors import SpecError
from dpdask.jobs.plan import plan_job

MANY = COLUMNS | {
    "rating": COLUMNS["rating"] | {"levels": [float(level) for level in range(1, 801)]}
}

# what the reference has, what else the job changes, and what is said; found in the job and its schema alone, or by a plan
REFUSED = {
    "a δ with another reference": (
        {"kind": "histogram"},
        {"privacy__delta": 1e-9},
        r"privacy\.delta: .*; set it to 0, or take the reference tree",
    ),
    "whether a row is there": (
        {},
        {"privacy__adjacency": "add-remove"},
        r"privacy\.adjacency: .*; set it to replace-one",
    ),
    "all of ε on the tables": ({"share": 1.0}, {}, r"mechanism\.reference\.share: .*below 1"),
    "bins of levels": (
        {"bins": {"rating": 3}},
        {},
        r"mechanism\.reference\.bins\.rating: is not a continuous or mixed column",
    ),
    "bins of an unknown column": (
        {"bins": {"prise": 3}},
        {},
        r"mechanism\.reference\.bins\.prise: is not a continuous",
    ),
    "bins that go back": (
        {"bins": {"price": [0.0, 5.0, 3.0]}},
        {},
        r"column 'price': the first values of the cells must increase",
    ),
    "a hold-out's fraction": ({"fraction": 0.25}, {}, r"mechanism\.reference\.fraction"),
    "a cost with another channel": (
        {},
        {"mechanism__cost": {"rating": "value"}},
        r"mechanism\.cost\.rating: a cost belongs to the channel optimal",
    ),
    "a cost of values of cells": (
        {},
        {"mechanism__channel": "optimal", "mechanism__cost": {"price": "value"}},
        r"mechanism\.cost\.price: the cost of a continuous or mixed column is always rank",
    ),
    "a unit's column that is private": (
        {},
        {"privacy__unit": {"column": "rating", "max_rows": 3}},
        r"privacy\.unit\.column 'rating'",
    ),
    "so little ε that a part is 0": (
        {},
        {"privacy__epsilon": 5e-324},
        r"its column's part of ε is 0",
    ),
    "a continuous column without bounds": (
        {},
        {"schema": COLUMNS | {"price": continuous()}},
        r"'price': .*bounds",
    ),
    "too many cells": (
        {"bins": 900},
        {"schema": MANY},
        r"column 'rating': its 800 cells, given the 900 of .*reference\.bins",
    ),
    "too many cells for the optimal channel": (
        {"bins": 101},
        {"mechanism__channel": "optimal"},
        r"column 'price': has 101 cells, .*at most 100",
    ),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tree")
    pq.write_table(table(), folder / "a.parquet")
    return folder


@pytest.mark.parametrize("name", REFUSED)
def test_a_job_is_refused_in_one_line(name, source, tmp_path):
    reference, changed, says = REFUSED[name]
    given = {"schema": COLUMNS, "mechanism__reference": {"kind": "tree"} | reference, **changed}
    path = write_job(tmp_path, source, tmp_path / "out", **given)
    with pytest.raises(SpecError, match=says) as caught:
        plan_job(load(path))
    assert "\n" not in str(caught.value)


def _case(name, code, says, rows=None, **changed):
    parts = None if rows is None else {"a.parquet": rows}
    given = {"mechanism__reference": {"kind": "tree"} | changed.pop("tree", {}), **changed}
    return Case(
        name=name, code=code, says=says, prepare=lambda folder: bad_job(folder, parts, **given)
    )


HALF_NULL = table(
    userId=pa.array([None if row == 77 else row % 50 for row in range(200)], pa.int64())
)
CASES = (
    _case("no rows", 65, r"no row would be released|no rows", table(0)),
    _case(
        "a value outside its levels", 65, r"column 'rating'", table(rating=pa.array([7.0] * 200))
    ),
    _case(
        "a unit that is unknown",
        65,
        r"column 'userId': holds a null",
        HALF_NULL,
        privacy__unit={"column": "userId", "max_rows": 3},
    ),
    _case("one row", 0, "", table(1)),
    _case(
        "a cost",
        0,
        "",
        mechanism__channel="optimal",
        mechanism__cost={"rating": "zero-one", "price": "rank"},
    ),
    _case(
        "a large ε, one cell, a weight each",
        0,
        "",
        tree={"bins": 1},
        privacy__epsilon=90.0,
        mechanism__weights={"rating": 1.0, "price": 3.0},
    ),
    _case(
        "a unit and a δ",
        0,
        "",
        privacy__unit={"column": "userId", "max_rows": 2},
        privacy__delta=1e-9,
    ),
)


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_what_is_wrong_is_said_in_one_line_and_what_is_odd_works(case, tmp_path):
    check_case(case, tmp_path)


def test_too_many_cells_are_refused_before_the_ledger_is_charged(source, tmp_path):
    ledger = open_ledger(f"sqlite:///{tmp_path / 'ledger.db'}")
    ledger.init("people", 5.0)
    place = {"url": f"sqlite:///{tmp_path / 'ledger.db'}", "dataset": "people"}
    tree = {"kind": "tree", "bins": 900}
    with pytest.raises(SpecError, match="its 800 cells"):
        run_here(
            write_job(
                tmp_path,
                source,
                tmp_path / "out",
                schema=MANY,
                mechanism__reference=tree,
                ledger=place,
            )
        )
    assert ledger.show("people").entries == ()


def test_columns_of_one_value_keep_it_as_far_as_the_noise_lets_them(tmp_path):
    case = _case(
        "",
        0,
        "",
        table(rating=pa.array([2.0] * 200), price=pa.array([50.0] * 200)),
        privacy__epsilon=50.0,
    )
    assert command(*case.prepare(tmp_path)).code == 0
    found = out(tmp_path)
    assert (found["rating"] == 2.0).mean() > 0.95
    assert found["price"].between(45.0, 55.0).mean() > 0.9  # one of twenty cells of five
