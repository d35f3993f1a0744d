"""The order of a column's values: what it says, and the laws of merging it."""

import datetime as dt
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpdask.stats.statistic import ColumnOrder

VALUES = st.lists(st.integers(0, 4), max_size=6)
PARTS = VALUES.map(lambda values: ColumnOrder.of_batch(np.array(values)))
PARTS |= st.tuples(st.integers(0, 4), st.integers(0, 4)).map(
    lambda ends: ColumnOrder.of_range(min(ends), max(ends))
)


@given(st.lists(VALUES, max_size=6))
def test_merged_parts_say_what_the_whole_says(parts):
    whole = np.array([value for part in parts for value in part])
    found = ColumnOrder.identity().merge(*(ColumnOrder.of_batch(np.array(part)) for part in parts))
    assert found == ColumnOrder.of_batch(whole)
    steps = np.diff(whole)
    assert (found.rises, found.falls) == (bool((steps > 0).any()), bool((steps < 0).any()))


@given(PARTS, PARTS, PARTS)
def test_merging_is_associative_with_an_identity(a, b, c):
    assert a.merge(b).merge(c) == a.merge(b.merge(c)) == a.merge(b, c)
    assert a.merge(ColumnOrder.identity()) == ColumnOrder.identity().merge(a) == a


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1, 2, 2, 3], True),
        ([3, 3, 1], True),
        ([1.0, 1.0], False),
        ([5], False),
        ([], False),
        ([1, 3, 2], False),
        ([2, 1, 1, 2], False),
    ],
)
def test_what_lies_sorted(values, expected):
    assert ColumnOrder.of_batch(np.array(values)).is_sorted is expected


DAYS = [dt.date(2026, 1, day) for day in range(1, 9)]


@pytest.mark.parametrize(
    ("ranges", "expected"),
    [
        ([(0, 5), (5, 9), (9, 12)], True),
        ([(9, 12), (5, 9), (0, 5)], True),
        ([("a", "c"), ("d", "d"), ("d", "f")], True),
        (list(itertools.pairwise(DAYS)), True),
        ([(0, 5), (4, 9)], False),
        ([(0, 5), (0, 5)], False),
        ([(0, 5), (6, 7), (1, 2)], False),
        ([(3, 3), (3, 3)], False),
        ([(0, 5)], False),
    ],
)
def test_which_ranges_follow_one_another(ranges, expected):
    assert (
        ColumnOrder.identity().merge(*(ColumnOrder.of_range(*pair) for pair in ranges)).is_sorted
        is expected
    )


def test_it_is_never_printed_and_forgets_values_that_it_does_not_need():
    assert "4711" not in repr(ColumnOrder.of_batch(np.array([4711, 4712])))
    assert ColumnOrder.of_batch(np.array([4711, 4712, 4711])).first is None
