"""Distinct records: the merge laws, and a subsample that no partition and no order of merging changes."""

from collections import Counter

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stats.counting import records_of_rows
from strategies import level_codec, random_words, value_codec

from dpdask.errors import DataError
from dpdask.kernels.hashing import leading_zeros
from dpdask.stats.records import from_numbers, numbers


def entries(records):
    """The summed counts of each record and grade."""
    assert len(records.counts) <= records.max_records
    found = Counter()
    for key, grade, count in zip(
        records.keys.tolist(), records.grades.tolist(), records.counts.tolist(), strict=True
    ):
        found[(*key, grade)] += count
    return found


def rows(n, n_values, seed):
    rng = np.random.default_rng(seed)
    return rng.integers(0, n_values, (n, 2)).astype(np.uint64), random_words(rng, n)


def records_of(keys, words, max_records):
    return records_of_rows([np.ascontiguousarray(column) for column in keys.T], words, max_records)


def expected(keys, words, max_records):
    """What the statistic must be, by its definition."""
    grades = [64 - int(word).bit_length() for word in words]
    for least in range(65):
        found = Counter(
            (*key, grade)
            for key, grade in zip(keys.tolist(), grades, strict=True)
            if grade >= least
        )
        if len(found) <= max_records:
            return found, least
    raise AssertionError


@given(
    n=st.integers(0, 300),
    n_values=st.sampled_from([1, 3, 40]),
    seed=st.integers(0, 999),
    max_records=st.sampled_from([1, 16, 100, 10_000]),
    cuts=st.lists(st.integers(0, 300), max_size=6),
    shuffle=st.randoms(),
)
def test_any_partition_merged_in_any_order_is_the_definition(
    n, n_values, seed, max_records, cuts, shuffle
):
    keys, words = rows(n, n_values, seed)
    wanted, least = expected(keys, words, max_records)
    places = np.split(np.arange(n), sorted(min(cut, n) for cut in cuts))
    parts = [records_of(keys[:0], words[:0], max_records)] + [
        records_of(keys[place], words[place], max_records) for place in places
    ]
    while len(parts) > 1:
        shuffle.shuffle(parts)
        n_merged = shuffle.randint(2, 4)
        parts = [parts[0].merge(*parts[1:n_merged]), *parts[n_merged:]]
    assert (entries(parts[0]), parts[0].least) == (wanted, least)


@pytest.mark.parametrize("max_records", [500, 10**6], ids=["a sample", "all"])
def test_more_rows_than_are_added_at_once_are_the_definition(max_records):
    keys, words = rows(150_000, 300, 4)
    found = records_of(keys, words, max_records)
    assert (entries(found), found.least) == expected(keys, words, max_records)
    assert (found.least > 0) == (max_records == 500)


@pytest.mark.parametrize(
    ("n_values", "max_records", "joined"),
    [(2**40, 2**16, True), (2**40, 15_000, False), (2**40, 5_000, False), (100, 2**16, False)],
    ids=[
        "all differ",
        "all differ, and are too many together",
        "each part is a sample",
        "many are the same",
    ],
)
def test_parts_whose_entries_differ_are_joined_and_no_more_is_found_out(
    n_values, max_records, joined
):
    """To look for equal entries would be in vain; a few that are the same anyway stand twice, and the statistic is what it was."""
    keys, words = rows(20_000, n_values, 6)
    keys[15_000:15_100], words[15_000:15_100] = keys[:100], words[:100]
    parts = [
        records_of(keys[start : start + 5_000], words[start : start + 5_000], max_records)
        for start in range(0, 20_000, 5_000)
    ]
    merged = parts[0].merge(*parts[1:])
    found = entries(merged)
    assert (found, merged.least) == expected(keys, words, max_records)
    assert (len(merged.counts) == len(found) + 100) == joined
    again = merged.merge(parts[0])
    assert (entries(again), again.least) == expected(
        np.concatenate([keys, keys[:5_000]]), np.concatenate([words, words[:5_000]]), max_records
    )


def test_joined_parts_of_different_samples_are_the_definition():
    """What one part has left out by its grade is left out of the others, too."""
    keys, words = rows(20_000, 2**40, 7)
    first, last = (
        records_of(keys[:12_000], words[:12_000], 10_000),
        records_of(keys[12_000:13_000], words[12_000:13_000], 10_000),
    )
    assert (first.least, last.least) == (1, 0)
    merged = last.merge(first)
    assert (entries(merged), merged.least) == expected(keys[:13_000], words[:13_000], 10_000)


def test_a_grade_is_the_number_of_leading_zeros_of_any_word():
    powers = [2**bit for bit in range(64)]
    words = [
        0,
        *powers,
        *(power - 1 for power in powers),
        *(power | (power >> 1) for power in powers),
        2**64 - 1,
        2**54 - 1,
        2**63 - 2**9,
    ]
    words += [
        word >> shift
        for shift, word in enumerate(random_words(np.random.default_rng(3), 64).tolist())
    ]
    assert leading_zeros(np.array(words, dtype=np.uint64)).tolist() == [
        64 - word.bit_length() for word in words
    ]


LEVELS = level_codec([None, "x", "y"], "a", ordered=False)
LINE = value_codec("b", bounds=(-5.0, 5.0), atoms=(0.0,), nulls=True)


@pytest.mark.parametrize(
    ("codec", "values", "expected_numbers"),
    [
        (LEVELS, ["y", None, "x"], [2.0, 0.0, 1.0]),
        (LINE, [1.5, None, 0.0, -5.0], [1.5, -np.inf, 0.0, -5.0]),
    ],
    ids=["levels", "line"],
)
def test_numbers_and_back(codec, values, expected_numbers):
    array = pa.array(values)
    found = numbers(codec, array)
    assert found.tolist() == expected_numbers
    assert from_numbers(codec, found).to_pylist() == values


def test_a_value_outside_the_domain_is_refused():
    with pytest.raises(DataError, match="outside its bounds"):
        numbers(LINE, pa.array([5.5]))
