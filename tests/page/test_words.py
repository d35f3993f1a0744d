"""What a page says in words: gains of an attacker, what a second release costs, and what a ledger leaves."""

import math
import re

import numpy as np
import pytest

from dpdask.errors import SpecError
from dpdask.mechanisms.card import Card, find_guidance
from dpdask.page import make_page, render
from dpdask.privacy import Budget, UnitColumn, noisy_counts_text
from dpdask.privacy.budget import guarantee_text


def make_card(*, left_out=0.0, insecure=False, **changed):
    covered = {"who": "x", "fraction": 1.0, "of": "rows"}
    promise = {
        "text": "",
        "epsilon": 1.0,
        "delta": 0,
        "adjacency": "replace-one",
        "unit": "row",
        "protected": covered,
        "cautions": [],
    }
    guarantee = (
        promise | {"unprotected": {**covered, "fraction": left_out}} | changed.pop("guarantee", {})
    )
    content = {
        "format": 2,
        "name": "x",
        "guarantee": guarantee,
        "mechanism": {"kind": "dip", "reference": {"kind": "holdout", "fraction": left_out}}
        if left_out
        else {"kind": "histogram"},
        "columns": {},
        "accounting": {"composition": "", "epsilon_exact": 1.0},
        "order": "",
        "insecure": insecure,
        "versions": {"dpdask": "0"},
    }
    return Card.model_validate(content | changed)


def test_the_gain_is_told_in_words():
    told = "To someone who knows everything else, a belief of 50 % that a row has one value rather than another becomes one of at most 73.2 %."
    assert render.describe_gain(make_card()) == told
    assert "that a protected row has" in render.describe_gain(make_card(left_out=0.1))
    assert "that a user has" in render.describe_gain(
        make_card(guarantee={"unit": {"column": "user", "max_rows": 2}})
    )
    both = render.describe_gain(make_card(guarantee={"adjacency": "add-remove", "delta": 1e-9}))
    assert "that a row is in the table becomes one of at most 73.2 %, and one of 50 %" in both
    assert both.endswith("becomes one of at most 88.1 %, apart from δ.")
    assert (
        render.describe_gain(make_card(insecure=True))
        == render.describe_again(make_card(insecure=True))
        == ""
    )


@pytest.mark.parametrize(("epsilon", "delta"), [(0.5, 0.0), (1.0, 1e-3), (3.0, 0.1), (200.0, 0.0)])
def test_no_guess_is_right_more_often_than_a_page_says(epsilon, delta):
    """The worst mechanism of all: it tells the value with probability δ, and else answers at random as ε allows."""
    odds = math.exp(min(epsilon, 100.0))
    told = (1.0 - delta) * np.array([odds, 1.0]) / (1.0 + odds)
    one, other = np.append(told, [delta, 0.0]), np.append(told[::-1], [0.0, delta])
    right = np.maximum(one, other).sum() / 2
    assert render.bound_guess(epsilon, delta) == pytest.approx(right, rel=1e-12)
    assert render.bound_guess(epsilon, delta) >= render.bound_guess(epsilon, 0.0)


def test_a_unit_has_the_name_that_people_give_it():
    named = UnitColumn(column="pid", max_rows=3, name="patient")
    plain = UnitColumn(column="pid", max_rows=3)
    for text in (guarantee_text, noisy_counts_text):
        budgets = [Budget(epsilon=1.0, unit=unit) for unit in (named, plain)]
        words = ("the values", "none") if text is guarantee_text else ()
        told, untold = (str(text(budget, *words)) for budget in budgets)
        assert "of one patient (one value of pid), of which at most 3" in told
        assert "a person with several pid values" in told
        assert "patient" not in untold
    assert "name" not in plain.model_dump()
    page = make_page(make_card(guarantee={"unit": named.model_dump()}))[0].decode()
    for said in (
        "<h1>X, released with ε = 1 for every patient</h1>",
        "which of two values a patient had",
        "The unit is one patient: all rows that share a value of pid; at most 3 of them are used.",
        "Each value of pid is one patient, and none of them has two values.",
    ):
        assert said in page
    with pytest.raises(SpecError, match="UnitColumn, name"):
        UnitColumn(column="pid", max_rows=3, name="<b>")


@pytest.mark.parametrize(
    ("changed", "title", "covered", "not_covered"),
    [
        ({}, "X, released with ε = 1 for every row", "Every row", "General conclusions only"),
        ({"left_out": 0.1}, "X, released with ε = 1 for 90 % of the rows", "90 %", "10 % of the"),
        (
            {"insecure": True},
            "X, released for tests: it protects nobody",
            "Nobody",
            "General conclusions only",
        ),
        (
            {
                "guarantee": {"epsilon": None, "protected": {"what": "x"}, "unit": "value"},
                "accounting": {"composition": "", "epsilon_exact": None},
            },
            "X, released as ranges, with no ε",
            "Every value, by a range",
            "General conclusions only",
        ),
        (
            {"columns": {"y": {"role": "kept"}}},
            "X, released with ε = 1 for every row",
            "Every row",
            "1 copied column",
        ),
    ],
)
def test_the_first_screen_says_how_much_who_and_what_not(changed, title, covered, not_covered):
    left_out = changed.get("left_out", 0.0)
    who = {"who": "x", "fraction": 1.0 - left_out, "of": "rows"}
    changed = {"guarantee": {"protected": who}} | changed
    page = make_page(make_card(**changed))[0].decode()
    assert f"<h1>{title}</h1>" in page
    large = re.findall(r'<p class="large">(.*?)</p>', page)
    assert len(large) == 3
    assert large[1].startswith(covered)
    assert large[2].startswith(not_covered)
    bound = "no bound" if changed.get("insecure") or "ranges" in title else "at most 73.2 %"
    assert f"<span>with this release</span><span>{bound}</span>" in page


@pytest.mark.parametrize(
    ("adjacency", "detected"), [("replace-one", "37.0 %"), ("add-remove", "98.3 %")]
)
def test_a_second_release_is_priced(adjacency, detected):
    told = render.describe_again(make_card(guarantee={"adjacency": adjacency, "delta": 1e-9}))
    assert "at most ε = 2 and δ = 2e-9 together: a test of one value rather than another" in told
    assert told.endswith(f"would detect it with probability at most {detected}.")


def test_no_price_is_told_for_rows_that_a_second_release_would_hold_out():
    """Without a ledger it draws a hold-out of its own, and no ε covers those rows."""
    assert render.describe_again(make_card(left_out=0.1)) == ""
    ledger = {
        "dataset": "people",
        "entry": "ab",
        "n_earlier": 0,
        "earlier": [],
        "epsilon": 1.0,
        "delta": 0.0,
        "epsilon_limit": 4.0,
        "delta_limit": 0.0,
    }
    assert render.describe_again(make_card(left_out=0.1, ledger=ledger)).startswith(
        "This release and a second one like it, of a row that both protect,"
    )
    page = make_page(make_card(left_out=0.1))[0].decode()
    assert "a person with k protected rows is protected" in page


@pytest.mark.parametrize(("delta_limit", "left"), [(0.0, "ε = 2"), (1e-6, "")])
def test_what_a_ledger_leaves_is_told_where_it_is_a_difference(delta_limit, left):
    spent = {
        "epsilon": 1.9999999999999998,
        "delta": 0.0,
        "epsilon_limit": 4.0,
        "delta_limit": delta_limit,
    }
    assert (
        render.describe_left(
            make_card(
                ledger={"dataset": "people", "entry": "ab", "n_earlier": 0, "earlier": [], **spent}
            )
        )
        == left
    )


@pytest.mark.parametrize(("n_rows", "share"), [(30_000.0, "0.02 %"), (60.0, "10 %")])
def test_a_small_group_is_not_larger_than_it_is(n_rows, share):
    noise = {"cells": {"standard_deviation": 2.8, "margin_95": 6.0}}
    card = make_card(
        n_rows={"value": n_rows, "exact": True},
        accounting={"composition": "", "epsilon_exact": 1.0, "noise": noise},
    )
    told = render.list_uses(card)[1][-1]
    assert told.startswith(
        f"Groups of fewer than about 6 rows ({share} of the rows), even in a single cell"
    )


@pytest.mark.parametrize("kind", ["histogram", "tree", "known"])
def test_numbers_of_noisy_counts_have_no_margin(kind):
    columns = {
        "x": {"role": "privatised", "epsilon": 1.0},
        "y": {"role": "privatised", "epsilon": 1.0, "levels": [1, 2]},
    }
    card = make_card(columns=columns, mechanism={"kind": "dip", "reference": {"kind": kind}})
    of_number, of_levels = (
        find_guidance(card).margin(name, card, 100, 100)(0.5) for name in columns
    )
    assert of_levels == pytest.approx(1.96 * 0.05, rel=0.01)
    assert of_number == (of_levels if kind == "known" else None)
