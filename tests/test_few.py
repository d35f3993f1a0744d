"""Which cases of a test the test command runs: `few.py`."""

from itertools import product

import pytest
from few import choose_few


@pytest.mark.parametrize(
    ("n_cases", "n_few", "expected"),
    [(10, 1, {0}), (10, 2, {0, 5}), (11, 4, {0, 2, 5, 8}), (3, 3, {0, 1, 2}), (3, 5, {0, 1, 2})],
)
def test_so_many_cases_are_evenly_spaced(n_cases, n_few, expected):
    assert choose_few([{"case": number} for number in range(n_cases)], n_few) == expected


def test_each_value_of_each_parameter_is_there_and_no_case_is_for_nothing():
    cases = [
        {"column": column, "noise": noise, "unit": unit}
        for column, noise, unit in product(range(5), range(3), range(2))
    ]
    chosen = choose_few(cases)
    assert {value for number in chosen for value in cases[number].items()} == {
        value for case in cases for value in case.items()
    }
    assert len(chosen) == 5


def test_every_case_of_a_test_with_one_parameter_is_there():
    assert choose_few([{"case": number} for number in range(4)]) == {0, 1, 2, 3}
