import copy
import json
import math
import pickle
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpdask.documents import parse_yaml, validate
from dpdask.errors import SpecError
from dpdask.privacy import (
    Budget,
    UnitColumn,
    attacker_power,
    guarantee_text,
    list_cautions,
    noisy_counts_text,
    split_epsilon,
)
from dpdask.privacy.budget import say_part, wrap_promise


def budget(text):
    return validate(Budget, parse_yaml(text, "job.yaml"), "job.yaml")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(
            ("epsilon", value)
            for value in (
                "text",
                "'1'",
                "true",
                "null",
                "[1]",
                ".nan",
                ".inf",
                "-.inf",
                "0",
                "-1",
                "-1e-9",
                "100.1",
            )
        ),
        *(
            ("delta", value)
            for value in (
                "1",
                "1.5",
                "-1",
                "-1e-300",
                ".nan",
                ".inf",
                "-.inf",
                "true",
                "'0'",
                "[0]",
                "text",
                "null",
            )
        ),
        *(("adjacency", value) for value in ("add_remove", "replace_one", "1", "null")),
        *(("unit", value) for value in ("user", "null")),
        ("unit.max_rows", "{column: userId, max_rows: 0}"),
    ],
)
def test_a_budget_that_cannot_be_kept_is_refused_at_its_key(key, value):
    text = (
        f"{key}: {value}" if key == "epsilon" else f"epsilon: 1\n{key.partition('.')[0]}: {value}"
    )
    with pytest.raises(SpecError) as caught:
        budget(text)
    assert caught.value.exit_code == 64
    assert caught.value.where == f"job.yaml, {key}"
    assert " expected" in caught.value.what


def test_a_budget_says_what_it_is_of():
    with pytest.raises(SpecError, match="the key 'epsilon' is missing; add it"):
        budget("delta: 0")
    assert budget("epsilon: 1e-5\ndelta: 5e-324\nadjacency: add-remove") == Budget(
        epsilon=1e-5, delta=5e-324, adjacency="add-remove", unit="row"
    )


@pytest.mark.parametrize("written", ["", "delta: 0", "delta: 0.0", "delta: -0.0"])
def test_no_delta_is_one_text(written):
    """Cards and the digests of jobs are made of it."""
    made = budget(f"epsilon: 1\n{written}")
    assert repr(made.delta) == "0"
    assert (
        json.dumps(made.model_dump(mode="json"))
        == '{"epsilon": 1.0, "delta": 0, "adjacency": "replace-one", "unit": "row"}'
    )


@pytest.mark.parametrize(
    ("weights", "what"),
    [
        ({"a": 1.0}, r"exactly the privatised columns \(without a weight: 'b'\)$"),
        (
            {"a": 1.0, "b": 1.0, "c": 1.0},
            r"exactly the privatised columns \(not privatised: 'c'\)$",
        ),
        (
            {"a": 1.0, "c": 1.0},
            r"exactly the privatised columns \(without a weight: 'b'; not privatised: 'c'\)$",
        ),
        ({}, r"exactly the privatised columns \(without a weight: 'a', 'b'\)$"),
        ({"a": 1.0, "b": 0.0}, "positive and finite"),
        ({"a": 1.0, "b": -1.0}, "positive and finite"),
        ({"a": 1.0, "b": math.nan}, "positive and finite"),
        ({"a": 1.0, "b": math.inf}, "positive and finite"),
        ({"a": 1e300, "b": 1e-300}, "too small"),
    ],
)
def test_weights_that_leave_a_column_without_a_part_are_refused(weights, what):
    with pytest.raises(SpecError) as caught:
        split_epsilon(1.0, ("a", "b"), weights)
    assert re.search(what, caught.value.what)
    assert caught.value.exit_code == 64
    assert caught.value.where == "`weights`"
    assert caught.value.hint


def bound(epsilon, delta=0.0):
    """Return the attacker's power in percent."""
    return min(
        100.0,
        5 * math.exp(epsilon) + 100 * delta,
        100 - max(0.0, 95 - 100 * delta) * math.exp(-epsilon),
    )


def test_the_guarantee_says_who_is_not_covered_in_the_same_breath():
    text = guarantee_text(Budget(epsilon=1.0), "the released rows", "the held-out rows")
    assert (
        "ε = 1 differentially private (δ = 0, replace-one, unit: one row). Protected: the released rows; a person with k released rows is protected by k·ε. Not protected: the held-out rows."
        in text
    )
    assert "at most 13.6 %;" in text
    assert "hardly any protection" not in text
    assert guarantee_text(Budget(epsilon=3.0), "a", "b").endswith(
        "at most 95.3 %; blind guessing detects 5 %. This is hardly any protection."
    )
    assert text.endswith("at most 13.6 %; blind guessing detects 5 %.")
    row, central_ = (
        text[text.index("An attacker") :]
        for text in (text.replace("a released row", "a row"), central(epsilon=1.0))
    )
    assert row == central_  # without delta both give the attacker the same power
    partly = guarantee_text(
        Budget(epsilon=1.0), "the released rows", "the held-out rows", everyone=False
    )
    assert partly == text + " No such bound holds for the rows that are not protected."
    text = guarantee_text(
        Budget(epsilon=1.0, delta=1e-2, unit=UnitColumn(column="user", max_rows=3)),
        "all rows",
        "nobody",
    )
    assert (
        "(δ = 0.01, replace-one, unit: the rows of one user, of which at most 3 are released)"
        in text
    )
    assert "a person with several user values is protected by ε and δ for each." in text
    assert "at most 14.6 %;" in text  # 5 % · e + 1 %, rounded up


def central(**budget):
    return noisy_counts_text(validate(Budget, budget, "job.yaml"))


def test_a_central_guarantee_says_all_of_the_promise():
    assert central(epsilon=1.0, delta=2.0**-30) == (
        "Everything that is released is computed from noisy statistics, which are ε = 1 differentially private "
        "(δ = 9.32e-10, replace-one: one row's values change, unit: one row). "
        "Protected: every row of the table; a person with k rows is protected by k·ε and k·exp((k-1)·ε)·δ. "
        "Not protected: none; everything that is released comes from noisy counts of all rows. The number of rows is published as it is. "
        "An attacker who tests whether a row had one value rather than another, at a false-alarm rate of 5 %, "
        "detects it with probability at most 13.6 %; blind guessing detects 5 %."
    )
    assert central(epsilon=3.0, adjacency="add-remove") == (
        "Everything that is released is computed from noisy statistics, which are ε = 3 differentially private "
        "(δ = 0, add-remove: one row is present or absent, unit: one row). "
        "Protected: every row of the table; a person with k rows is protected by k·ε. "
        "Not protected: none; everything that is released comes from noisy counts of all rows. The number of rows is private. "
        "An attacker who tests whether a row is there, at a false-alarm rate of 5 %, detects it with probability at most 95.3 %, "
        "and one who tests whether it had one value rather than another (counted twice: 2ε) with probability at most 99.8 %; "
        "blind guessing detects 5 %. This is hardly any protection."
    )


def test_a_central_guarantee_of_a_unit_names_the_unit_and_its_bound():
    unit = UnitColumn(column="userId", max_rows=20)
    text = central(epsilon=0.5, delta=1e-6, unit=unit)
    assert (
        "(δ = 1e-6, replace-one: one userId's values change, unit: the rows of one userId, of which at most 20 are used)"
        in text
    )
    assert "a person with several userId values is protected by ε and δ for each." in text
    assert "whether a userId's rows had one value rather than another" in text
    text = central(epsilon=0.5, unit=unit, adjacency="add-remove")
    assert "add-remove: one userId is present or absent" in text
    assert "protected by ε for each. " in text
    assert "whether a userId's rows are there, at a false-alarm rate" in text


@settings(max_examples=80, derandomize=True, deadline=None, database=None)
@given(
    st.floats(1e-9, 100),
    st.floats(0, 1, exclude_max=True),
    st.sampled_from(["replace-one", "add-remove"]),
)
def test_a_central_guarantee_never_prints_less_than_is_paid(epsilon, delta, adjacency):
    text = central(epsilon=epsilon, delta=delta, adjacency=adjacency)
    assert float(text.split("ε = ")[1].split(" ")[0]) == epsilon
    assert delta <= float(text.split("δ = ")[1].split(",")[0]) <= delta * 1.01 + 1e-323
    percent = float(text.split("with probability at most ")[1].split(" %")[0])
    exact = bound(epsilon, delta)
    assert exact - 1e-12 <= percent <= exact + 0.1 + 1e-9
    row = guarantee_text(Budget(epsilon=epsilon, delta=delta), "the released rows", "the hold-out")
    assert float(row.split("ε = ")[1].split(" ")[0]) == epsilon
    assert (
        exact - 1e-12
        <= float(row.split("with probability at most ")[1].split(" %")[0])
        <= exact + 0.1 + 1e-9
    )
    twice = adjacency == "add-remove"
    if twice:
        percent = float(
            text.split("(counted twice: 2ε) with probability at most ")[1].split(" %")[0]
        )
        exact = bound(2 * epsilon, min(1.0, (1 + math.exp(epsilon)) * delta))
        assert exact - 1e-9 <= percent <= exact + 0.1 + 1e-9
    assert text.endswith(" This is hardly any protection.") == ((2 if twice else 1) * epsilon >= 3)


def test_the_attackers_power_is_the_tighter_of_two_bounds_and_is_reached():
    """Randomised response reaches both: the most powerful test of one answer against the other, by enumeration."""
    for epsilon in (0.1, 1.0, 2.9, 2.95, 4.0, 8.0):
        truth = math.exp(epsilon) / (1 + math.exp(epsilon))
        lie = 1 - truth
        # reject on the answer "a" first (likelier under the alternative), then, with what is left of the level, on the other one
        power = truth * min(1.0, 0.05 / lie) + (lie * (0.05 - lie) / truth if lie < 0.05 else 0.0)
        assert attacker_power(epsilon, 0.0) == pytest.approx(power, rel=1e-12)
    assert attacker_power(math.inf, 0.0) == 1.0
    assert attacker_power(0.0, 0.01) == pytest.approx(0.06)
    assert attacker_power(1.0, 0.99) == 1.0


def test_little_protection_is_said_of_where_the_number_of_rows_is_public():
    assert list_cautions(Budget(epsilon=2.9, delta=1e-6), 10**5) == []
    [large] = list_cautions(Budget(epsilon=3.0), 10**9)
    assert large.startswith("ε = 3 is large")
    [twice] = list_cautions(Budget(epsilon=1.5, adjacency="add-remove"), None)
    assert twice.startswith("ε = 1.5 is large and counts twice for values under add-remove: ")
    [verbatim] = list_cautions(Budget(epsilon=1.0, delta=1e-3), 1000)
    assert "publishing one random row verbatim would satisfy the same guarantee" in verbatim
    assert list_cautions(Budget(epsilon=1.0, delta=1e-3), None) == []


PARTS = ["promise", "protected", "not protected", "published", "attacker"]


@pytest.mark.parametrize("adjacency", ["replace-one", "add-remove"])
@pytest.mark.parametrize(
    "unit", ["row", UnitColumn(column="user", max_rows=3)], ids=["row", "unit"]
)
def test_a_promise_is_its_parts(adjacency, unit):
    budget = Budget(epsilon=1.0, delta=1e-6, adjacency=adjacency, unit=unit)
    for promise in (guarantee_text(budget, "all rows", "none"), noisy_counts_text(budget)):
        assert [part for part, _ in promise.parts] == PARTS
        assert " ".join(map(say_part, promise.parts)) == promise
        assert (
            copy.deepcopy(promise).parts
            == pickle.loads(pickle.dumps(promise)).parts
            == promise.parts
        )
        told = promise.list_parts("INSECURE: ")
        assert told[0]["text"] == f"INSECURE: {promise.parts[0][1]}"
        assert [each["text"] for each in told[1:]] == [text for _, text in promise.parts[1:]]


def test_a_promise_is_wrapped_and_each_part_begins_a_line():
    promise = guarantee_text(Budget(epsilon=1.0), "the released rows", "the held-out rows")
    lines = list(wrap_promise(promise))
    assert max(map(len, lines)) <= 100
    assert lines[0].startswith("  promise   Each released row's")
    assert all(line.startswith(" " * 12 + line.strip()[0]) for line in lines[1:])
    assert " ".join(line.removeprefix("  promise").strip() for line in lines) == promise
    starts = {line.strip() for line in lines}
    for text in map(say_part, promise.parts):
        assert any(text.startswith(start.removeprefix("promise").strip()) for start in starts)
    # of an extension, which may tell its promise as a text without parts
    assert " ".join(line.strip() for line in wrap_promise("a promise " * 30)).split()[1:] == (
        ["a", "promise"] * 30
    )
