"""Random permutations: exact against whole numbers, and uniform."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from dpdask.kernels.hashing import MAX_ROWS, below, permutation
from dpdask.streams import RunKey, stream, words

WORDS = st.integers(0, 2**64 - 1) | st.sampled_from([0, 1, 2**32 - 1, 2**32, 2**63, 2**64 - 1])


@given(WORDS, st.integers(1, MAX_ROWS) | st.just(MAX_ROWS))
def test_a_number_below_is_the_whole_part_of_the_product(word: int, n: int) -> None:
    assert below(np.uint64(word), n) == word * n >> 64


@given(st.lists(WORDS, max_size=40))
def test_it_is_fisher_and_yates_shuffle(given_words: list[int]) -> None:
    expected = list(range(len(given_words)))
    for last in range(len(expected) - 1, 0, -1):
        chosen = given_words[last] * (last + 1) >> 64
        expected[last], expected[chosen] = expected[chosen], expected[last]
    assert permutation(np.array(given_words, dtype=np.uint64)).tolist() == expected


def p_value(orders: list[tuple[int, ...]]) -> float:
    counts = Counter(orders)
    observed = [counts[order] for order in counts] + [0] * (
        math.factorial(len(orders[0])) - len(counts)
    )
    return float(stats.chisquare(observed).pvalue)


def test_every_order_is_as_likely() -> None:
    drawn = words(stream(RunKey.insecure(11), "test", ""), 24_000, 4)
    assert p_value([tuple(permutation(row).tolist()) for row in drawn]) > 1e-6
    skewed = np.where(drawn < 2**59, drawn, drawn >> 1)  # power: a word a little too small
    assert p_value([tuple(permutation(row).tolist()) for row in skewed]) < 1e-6


@pytest.mark.parametrize("n", [0, 1, 100_003])
def test_every_row_is_there_once(n: int) -> None:
    found = permutation(words(stream(RunKey.insecure(1), "test", ""), n))
    assert np.array_equal(np.sort(found), np.arange(n))
