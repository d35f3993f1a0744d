"""The rough duration in a plan: more bytes take longer, more workers less, and nothing is said of workers nobody counted.

And its warning where persons are not the unit.
"""

import json
import re

import pyarrow as pa
import pytest
from e2e.bad_input import COLUMNS, command, job

from dpdask.mechanisms.expectations import describe_seconds


def plan(folder, **changed):
    return dict(json.loads(command(*job(folder, verb="plan", **changed), "--json").out))


def test_each_stage_has_a_duration(tmp_path):
    found = plan(tmp_path, cluster={"kind": "synchronous"})
    assert len(found["seconds"]) == len(found["stages"])
    assert min(found["seconds"]) >= 1
    assert all(
        each == int(each) for each in found["seconds"]
    )  # so the stages add up to the total as it is shown
    assert found["n_workers"] == 1


def test_more_workers_take_less_time(tmp_path, monkeypatch):
    monkeypatch.setattr("dpdask.jobs.plan._WRITE_BYTES", 1.0)
    slow, fast = (
        plan(tmp_path / str(workers), cluster={"kind": "threads", "workers": workers})
        for workers in (1, 4)
    )
    assert sum(slow["seconds"]) > 3 * sum(fast["seconds"])


def test_levels_to_find_count_as_many(tmp_path, monkeypatch):
    monkeypatch.setattr("dpdask.jobs.plan._RECORD_LEVELS", 1e3)
    took = []
    for given in ({"levels": ["a"]}, {"levels": "discover"}):
        note = {"role": "privatise", "kind": "categorical", "other": "a", **given}
        columns = {**COLUMNS, "userId": {"role": "drop"}, "note": note}
        words = {"columns": columns, "privacy__delta": 1e-6, "mechanism": {"kind": "copula"}}
        took.append(plan(tmp_path / str(len(took)), **words)["seconds"])
    assert took[1][-2] > 10 * took[0][-2]


def test_levels_to_find_are_not_planned_as_the_most_that_may_be(tmp_path):
    # four such columns took 74 s
    note = {"role": "privatise", "kind": "categorical", "levels": "discover", "other": "a"}
    rows = pa.table(dict.fromkeys("abcd", ["a"] * 1000))
    words = {"columns": dict.fromkeys("abcd", note), "mechanism": {"kind": "copula"}}
    took = plan(tmp_path, parts={"part.parquet": rows}, **words, privacy__delta=1e-6)["seconds"]
    assert 60 < sum(took) < 180


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({}, "userId"),
        ({"columns": COLUMNS | {"userId": {"role": "drop"}}}, "userId"),
        ({"privacy__unit": {"column": "userId", "max_rows": 3}}, None),
        ({"parts": "id"}, None),  # of the row itself
        ({"parts": "is_mobile"}, None),
    ],
)
def test_an_identifier_that_is_no_unit_is_named(changes, named, tmp_path):
    if name := changes.get("parts"):
        columns = {name: COLUMNS["userId"], "rating": COLUMNS["rating"]}
        part = pa.table({name: range(200), "rating": [1.0, 2.0] * 100})
        changes = {"parts": {"part.parquet": part}, "columns": columns}
    said = [each for each in plan(tmp_path, **changes)["warnings"] if "the unit is the row" in each]
    assert [f"({named} may, by the name)" in each for each in said] == ([True] if named else [])


def test_a_plan_says_which_rows_of_a_unit_count(tmp_path):
    given = {"privacy__unit": {"column": "userId", "max_rows": 3}}
    said = [
        plan(tmp_path / role, **given, columns=COLUMNS | {"note": {"role": role}})["stages"][0]
        for role in ("keep", "drop")
    ]
    assert "rows of each userId, by a keyed hash" in said[0]
    assert "rows of each userId, the first ones: no column is kept" in said[1]


def test_nothing_is_said_of_workers_whose_number_is_not_known(tmp_path):
    words = job(tmp_path, verb="plan", cluster={"kind": "address", "address": "tcp://localhost:1"})
    ended = command(*words)
    assert ended.code == 0
    assert "takes" not in ended.out
    assert re.search(r"\n  stage +what is done\n", ended.out)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0, "1 s"), (89.0, "89 s"), (120.0, "2 min"), (7200.0, "2 h")]
)
def test_durations_in_words(seconds, text):
    assert describe_seconds(seconds) == text
