"""Exact sums, rounded against the releaser."""

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpdask.privacy.events import round_down, round_up, round_up_sum, shorten, write_digits

POSITIVE = st.floats(min_value=1e-300, max_value=1e300)


@given(POSITIVE, st.integers(1, 10**9))
def test_a_share_is_the_nearest_float_on_its_side(value, parts):
    exact = Fraction(value) / parts
    down, up = round_down(exact), round_up(exact)
    assert Fraction(down) <= exact <= Fraction(up)
    assert up == down or up == math.nextafter(down, math.inf)


@given(POSITIVE)
def test_a_number_for_people_is_rounded_to_its_side(value):
    assert (
        value * (1 - 1e-7)
        <= float(shorten(value, up=False))
        <= value
        <= float(shorten(value, up=True))
        <= value * (1 + 1e-7)
    )


@given(st.lists(POSITIVE, min_size=1, max_size=9))
def test_a_sum_is_never_below_the_exact_one(parts):
    exact, found = sum(map(Fraction, parts)), round_up_sum(parts)
    assert Fraction(found) >= exact
    assert Fraction(math.nextafter(found, 0.0)) < exact


def test_plain_sums_would_fall_short():
    assert [shorten(value, up=True) for value in (2.4999999999999996, 1.0, 0.0, math.inf)] == [
        "2.5",
        "1.0",
        "0.0",
        "inf",
    ]
    assert pytest.approx(0.8) == 0.7 + 0.1
    assert Fraction(0.7 + 0.1) < Fraction(0.7) + Fraction(0.1) <= Fraction(round_up_sum([0.7, 0.1]))
    assert round_up_sum([]) == 0.0
    assert round_up(Fraction(10) ** 400) == math.inf
    assert Fraction(round_down(Fraction(-1, 3))) <= Fraction(-1, 3)


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (10.4, 1, "10"),
        (99.6, 1, "100"),
        (6812.0, 2, "6,800"),
        (0.00012345, 2, "0.00012"),
        (0.0, 2, "0"),
        (2.5e7, 2, "25,000,000"),
        (-340.0, 2, "-340"),
    ],
)
def test_numbers_for_people_have_no_exponent(value, digits, text):
    assert write_digits(value, digits) == text
