"""What can be wrong with a DIP job along a tree, or odd, through the command line; and chains and trees of any form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from e2e.bad_input import COLUMNS, Case, command, table
from e2e.bad_input import job as bad_job
from e2e.test_bad_input import check_case, ids
from e2e.test_tree_jobs import PRIVATE, job, out, people, written

from dpdask.engine.account import open_ledger


def _case(
    name: str, code: int, says: str, parts: Any = None, columns: Any = COLUMNS, **changed: Any
) -> Case:
    reference = {"mechanism__reference": {"kind": "tree"} | changed.pop("tree", {}), **changed}
    return Case(
        name=f"tree: {name}",
        code=code,
        says=says,
        prepare=lambda folder: bad_job(folder, parts, columns=columns, **reference),
    )


_UNBOUNDED = COLUMNS | {"price": {"role": "privatise", "kind": "continuous"}}
_MANY = COLUMNS | {
    "rating": COLUMNS["rating"] | {"levels": [float(level) for level in range(1, 801)]}
}
_ONE_VALUE = {"a.parquet": table(rating=pa.array([2.0] * 200), price=pa.array([50.0] * 200))}
_EMPTY = {"a.parquet": table(0)}
_OUTSIDE = {"a.parquet": table(rating=pa.array([7.0] * 200))}
_HALF_NULL = {
    "a.parquet": table(
        userId=pa.array([None if row == 77 else row % 50 for row in range(200)], pa.int64())
    )
}

CASES = (
    _case(
        "weights that name another column",
        64,
        r"weights must name exactly",
        mechanism__weights={"rating": 1.0, "note": 1.0},
    ),
    _case(
        "a weight of 0",
        64,
        r"weights must be positive",
        mechanism__weights={"rating": 1.0, "price": 0.0},
    ),
    _case(
        "a continuous column without bounds", 64, r"column 'price': .*bounds", columns=_UNBOUNDED
    ),
    _case(
        "too many cells for the channels",
        64,
        r"column 'rating': its 800 cells, given the 900 of .*reference\.bins",
        columns=_MANY,
        tree={"bins": 900},
    ),
    _case(
        "too many cells for the optimal channel",
        64,
        r"column 'price': has 101 cells, .*at most 100",
        tree={"bins": 101},
        mechanism__channel="optimal",
    ),
    _case(
        "a δ with another reference",
        64,
        r"privacy\.delta: .*; set it to 0, or take the reference tree",
        tree={"kind": "histogram"},
        privacy__delta=1e-9,
    ),
    _case(
        "whether a row is there",
        64,
        r"privacy\.adjacency: .*; set it to replace-one",
        privacy__adjacency="add-remove",
    ),
    _case("a δ of 1", 64, r"privacy\.delta", privacy__delta=1.0),
    _case(
        "all of ε on the tables", 64, r"mechanism\.reference\.share: .*below 1", tree={"share": 1.0}
    ),
    _case(
        "nothing on the tables", 64, r"mechanism\.reference\.share: .*above 0", tree={"share": 0}
    ),
    _case("no bins", 64, r"mechanism\.reference\.bins: .*whole number from 1", tree={"bins": 0}),
    _case(
        "bins of levels",
        64,
        r"mechanism\.reference\.bins\.rating: is not a continuous or mixed column",
        tree={"bins": {"rating": 3}},
    ),
    _case(
        "bins of an unknown column",
        64,
        r"mechanism\.reference\.bins\.prise: is not a continuous",
        tree={"bins": {"prise": 3}},
    ),
    _case(
        "bins that go back",
        64,
        r"bins: column 'price': the first values of the cells must increase",
        tree={"bins": {"price": [0.0, 5.0, 3.0]}},
    ),
    _case("a hold-out's fraction", 64, r"mechanism\.reference\.fraction", tree={"fraction": 0.25}),
    _case(
        "a cost with another channel",
        64,
        r"mechanism\.cost\.rating: a cost belongs to the channel optimal",
        mechanism__cost={"rating": "value"},
    ),
    _case(
        "a cost of values of cells",
        64,
        r"mechanism\.cost\.price: the cost of a continuous or mixed column is always rank",
        mechanism__channel="optimal",
        mechanism__cost={"price": "value"},
    ),
    _case("no rows", 65, r"no row would be released|no rows", _EMPTY),
    _case("a value outside its levels", 65, r"column 'rating'", _OUTSIDE),
    _case(
        "a unit that is unknown",
        65,
        r"column 'userId': holds a null",
        _HALF_NULL,
        privacy__unit={"column": "userId", "max_rows": 3},
    ),
    _case(
        "a unit's column that is private",
        64,
        r"privacy\.unit\.column 'rating'",
        privacy__unit={"column": "rating", "max_rows": 3},
    ),
    _case("so little ε that a part is 0", 64, r"", privacy__epsilon=5e-324),
    _case("columns of one value", 0, "", _ONE_VALUE),
    _case("one row", 0, "", {"a.parquet": table(1)}),
    _case("a weight each", 0, "", mechanism__weights={"rating": 1.0, "price": 3.0}),
    _case("a δ", 0, "", privacy__delta=1e-9),
    _case(
        "a cost",
        0,
        "",
        mechanism__channel="optimal",
        mechanism__cost={"rating": "zero-one", "price": "rank"},
    ),
    _case("a large ε", 0, "", privacy__epsilon=90.0),
    _case("one cell", 0, "", tree={"bins": 1}),
    _case("a unit", 0, "", privacy__unit={"column": "userId", "max_rows": 2}, privacy__delta=1e-9),
)


@pytest.mark.few(8)
@pytest.mark.parametrize("case", CASES, ids=ids)
def test_what_is_wrong_is_said_in_one_line_and_what_is_odd_works(
    case: Case, tmp_path: Path
) -> None:
    check_case(case, tmp_path)


def test_too_many_cells_are_refused_before_the_ledger_is_charged(tmp_path: Path) -> None:
    case = next(case for case in CASES if "too many cells for the channels" in case.name)
    words = case.prepare(tmp_path)
    assert open_ledger(f"sqlite:///{tmp_path / 'ledger.db'}").init("people", 3.0)
    ended = command(*words, "--set", "ledger={url: 'sqlite:///ledger.db', dataset: people}")
    assert ended.code == 64, ended.err
    assert open_ledger(f"sqlite:///{tmp_path / 'ledger.db'}").show("people").entries == ()


def test_columns_of_one_value_keep_it_as_far_as_the_noise_lets_them(tmp_path: Path) -> None:
    words = next(case for case in CASES if "columns of one value" in case.name).prepare(tmp_path)
    assert command(*words, "--set", "privacy.epsilon=50").code == 0
    found = out(tmp_path)
    assert (found["rating"] == 2.0).mean() > 0.95
    assert found["price"].between(45.0, 55.0).mean() > 0.9  # one of twenty cells of five


def test_what_works_is_planned_and_valid(tmp_path: Path) -> None:
    for number, case in enumerate(case for case in CASES if not case.code):
        words = (
            case.prepare(tmp_path / str(number)) if (tmp_path / str(number)).mkdir() is None else []
        )
        for verb in ("validate", "plan"):
            ended = command(verb, *words[1:])
            assert (ended.code, ended.lines) == (0, []), case.name
            assert ended.out


# ---- every word of a job that fits is planned: chain and tree


def _drawn(rng: np.random.Generator) -> dict[str, Any]:
    """Return a reference, a channel and a budget of any form."""

    def pick(values: list[Any]) -> Any:
        return values[int(rng.integers(len(values)))]

    if rng.random() < 0.5:
        reference = {
            "kind": "chain",
            "fraction": pick([0.1, 0.25, 0.5, 1.0]),
            "by": pick([None, None, "user", "a"]),
        }
        reference |= {"min_rows": pick([1, 2, 10, 50]), "max_records": pick([8, 16, 1000, 10_000])}
        reference |= {"order": pick([None, "random", ["e", "d", "c", "b", "a"], ["a"]])}
    else:
        reference = {"kind": "tree", "share": pick([0.0, 0.1, 0.6, 0.9])}
        reference |= {
            "bins": pick([1, 20, 0, {"c": 5}, {"c": [-2.0, 1.0], "e": 3}, {"a": 3}, "rule"])
        }
    return {
        "mechanism__reference": {
            key: value for key, value in reference.items() if value is not None
        },
        "mechanism__channel": pick(["laplace", "laplace-calibrated", "optimal"]),
        "mechanism__weights": pick([None, None, dict.fromkeys(PRIVATE, 2.0), {"a": 1.0}]),
        "privacy__epsilon": pick([0.5, 3.0, 30.0]),
        "privacy__delta": pick([0, 0, 0, 1e-9]),
        "privacy__unit": pick(["row", {"column": "user", "max_rows": 2}]),
    }


@pytest.mark.parametrize("n_jobs", [20, pytest.param(120, marks=pytest.mark.slow)])
def test_any_chain_or_tree_is_planned_or_refused_in_a_line_for_each_problem(
    n_jobs: int, tmp_path: Path
) -> None:
    source = written(tmp_path / "in", people(900))
    rng = np.random.default_rng(8)
    codes = []
    for number in range(n_jobs):
        made = job(tmp_path / str(number), source, **_drawn(rng))
        checked, planned = (command(verb, str(made)) for verb in ("validate", "plan"))
        assert checked.code in (0, 64), checked.err
        assert planned.code in (checked.code, 64), planned.err
        for ended in (checked, planned):
            assert bool(ended.lines) == (ended.code != 0), ended.err
            assert all(line.startswith("dpdask: ") for line in ended.lines), (
                ended.err
            )  # a line for each problem
            assert "defect" not in ended.err
        if not planned.code:
            assert "promise" in planned.out
            assert planned.out.count("Not protected: ") == 1
        codes.append(planned.code)
    assert 0.125 * n_jobs < codes.count(0) < 0.875 * n_jobs
