"""Random permutations: exact against whole numbers, and uniform."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dpdask.kernels.hashing import MAX_ROWS, below, permutation

WORDS = st.integers(0, 2**64 - 1) | st.sampled_from([0, 1, 2**32 - 1, 2**32, 2**63, 2**64 - 1])


@given(WORDS, st.integers(1, MAX_ROWS) | st.just(MAX_ROWS))
def test_a_number_below_is_the_whole_part_of_the_product(word, n):
    assert below(np.uint64(word), n) == word * n >> 64


@given(st.lists(WORDS, max_size=40))
def test_it_is_fisher_and_yates_shuffle(given_words):
    expected = list(range(len(given_words)))
    for last in range(len(expected) - 1, 0, -1):
        chosen = given_words[last] * (last + 1) >> 64
        expected[last], expected[chosen] = expected[chosen], expected[last]
    assert permutation(np.array(given_words, dtype=np.uint64)).tolist() == expected
