import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpdask.documents import parse_yaml, validate
from dpdask.errors import SpecError
from dpdask.privacy import Budget, guarantee_text, split_epsilon


def budget(text: str) -> Budget:
    return validate(Budget, parse_yaml(text, "job.yaml"), "job.yaml")


@pytest.mark.parametrize(("written", "epsilon"), [("1", 1.0), ("0.5", 0.5), ("100", 100.0), ("1e-5", 1e-5), ("2.5e0", 2.5)])
def test_a_positive_epsilon_is_accepted(written, epsilon):
    assert budget(f"epsilon: {written}") == Budget(epsilon=epsilon, delta=0, adjacency="replace-one", unit="row")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("epsilon", value) for value in ("text", "'1'", "true", "null", "[1]", ".nan", ".inf", "-.inf", "0", "-1", "-1e-9", "100.1", "1e400")),
        *(("delta", value) for value in ("1e-9", "1", "-1", ".nan", "text", "null")),
        *(("adjacency", value) for value in ("add-remove", "replace_one", "1", "null")),
        *(("unit", value) for value in ("user", "null")),
        ("unit.max_rows", "{column: userId, max_rows: 0}"),
    ],
)
def test_a_budget_that_cannot_be_kept_is_refused_at_its_key(key, value):
    text = f"{key}: {value}" if key == "epsilon" else f"epsilon: 1\n{key.partition('.')[0]}: {value}"
    with pytest.raises(SpecError) as caught:
        budget(text)
    assert caught.value.exit_code == 64
    assert caught.value.where == f"job.yaml, {key}"
    assert caught.value.what.startswith("Input should be ")


def test_a_budget_without_epsilon_is_refused():
    with pytest.raises(SpecError, match="the key 'epsilon' is missing; add it"):
        budget("delta: 0")


@settings(max_examples=200, derandomize=True, deadline=None, database=None)
@given(
    st.floats(1e-6, 100),
    st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=12),
)
def test_the_parts_never_sum_to_more_than_epsilon_nor_lose_more_than_rounding(epsilon, weights):
    names = tuple(f"x{i}" for i in range(len(weights)))
    parts = split_epsilon(epsilon, names, dict(zip(names, weights, strict=True)))
    assert list(parts) == list(names)
    total = sum(map(Fraction, parts.values()))
    assert Fraction(epsilon) * (1 - Fraction(1, 10**15)) <= total <= Fraction(epsilon)
    for name, weight in zip(names, weights, strict=True):
        assert parts[name] == pytest.approx(epsilon * weight / math.fsum(weights), rel=1e-12)


def test_parts_are_equal_unless_weighted():
    assert split_epsilon(1.0, ("a", "b")) == {"a": 0.5, "b": 0.5}
    assert split_epsilon(1.0, ("a",)) == {"a": 1.0}
    assert split_epsilon(1.0, ()) == {}
    thirds = split_epsilon(1.0, ("a", "b", "c"))
    assert len(set(thirds.values())) == 1
    assert sum(map(Fraction, thirds.values())) <= 1


@pytest.mark.parametrize(
    ("weights", "what"),
    [
        ({"a": 1.0}, "exactly the privatised columns"),
        ({"a": 1.0, "b": 1.0, "c": 1.0}, "exactly the privatised columns"),
        ({}, "exactly the privatised columns"),
        ({"a": 1.0, "b": 0.0}, "positive and finite"),
        ({"a": 1.0, "b": -1.0}, "positive and finite"),
        ({"a": 1.0, "b": math.nan}, "positive and finite"),
        ({"a": 1.0, "b": math.inf}, "positive and finite"),
        ({"a": 1e300, "b": 1e-300}, "too small"),
    ],
)
def test_weights_that_leave_a_column_without_a_part_are_refused(weights, what):
    with pytest.raises(SpecError, match=what) as caught:
        split_epsilon(1.0, ("a", "b"), weights)
    assert caught.value.exit_code == 64
    assert caught.value.where == "mechanism.weights"
    assert caught.value.mend


@settings(max_examples=200, derandomize=True, deadline=None, database=None)
@given(st.floats(1e-9, 100))
def test_the_guarantee_never_prints_less_than_is_paid(epsilon):
    text = guarantee_text(Budget(epsilon=epsilon), "the released rows", "the hold-out")
    assert float(text.split("ε = ")[1].split(" ")[0]) == epsilon
    percent = float(text.split("with probability at most ")[1].split(" %")[0])
    exact = min(100.0, 5 * math.exp(epsilon))
    assert exact <= percent <= exact + 0.1 + 1e-9


def test_the_guarantee_says_who_is_not_covered_in_the_same_breath():
    text = guarantee_text(Budget(epsilon=1.0), "the released rows", "the held-out rows")
    assert "ε = 1 differentially private (δ = 0, replace-one, unit: one row). Protected: the released rows. Not protected: the held-out rows." in text
    assert "a person with k released rows is protected by k·ε" in text
    assert "at most 13.6 %." in text
    assert "worth the name" not in text
    assert guarantee_text(Budget(epsilon=3.0), "a", "b").endswith("at most 100.0 %, which is no protection worth the name.")
