"""The rough duration in a plan: more bytes take longer, more workers less, and nothing is said of workers nobody counted."""

import json
import re

import pytest
from e2e.bad_input import command, job

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
