"""The trie of records against brute force: its ranks, its way back, its cells, and how uniform its ranks are."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import default_rng

from dpdask.kernels import chain
from dpdask.kernels.chain import build, find_slots, find_values, grid

LOWEST, HIGHEST = np.uint64(0), np.uint64(2**64 - 1)
NONE = np.zeros(0)


def trie_of(records, counts=None, groups=None, grids=None):
    """The trie of records, shape (n, columns); repeated ones are one node."""
    records = np.asarray(records, dtype=np.float64)
    counts = np.ones(len(records), dtype=np.int64) if counts is None else counts
    groups = np.zeros(len(records), dtype=np.int64) if groups is None else groups
    columns = [np.ascontiguousarray(column) for column in records.T]
    return build(columns, counts, groups, grids or [None] * len(columns))


def interval(value, node, trie):
    """The interval of ranks of one value, and its child."""
    nodes, ranks = np.full(2, node), np.empty(2)
    chain.find_ranks(np.full(2, float(value)), nodes, np.array([LOWEST, HIGHEST]), trie, ranks)
    assert nodes[0] == nodes[1]
    return *ranks, nodes[0]


def values_at(ranks, nodes, trie, slots, lattice):
    """The values, and the children that they come from."""
    values, found = np.empty(len(ranks)), nodes.copy()
    find_values(ranks, found, trie, slots, lattice, values)
    return values, found


small = st.lists(
    st.tuples(st.integers(-2, 3), st.integers(0, 3), st.integers(0, 2)), min_size=1, max_size=30
)


@settings(max_examples=80)
@given(rows=small, value=st.tuples(st.integers(-4, 5), st.integers(-1, 4), st.integers(-1, 3)))
def test_ranks_equal_a_count_among_the_records_that_share_the_prefix(rows, value):
    records = np.array(rows, dtype=np.float64)
    trie, node, prefix = trie_of(records), 0, np.ones(len(records), dtype=bool)
    for place, number in enumerate(value):
        among = records[prefix, place]
        below, ties = (among < number).sum(), (among == number).sum()
        low, high, node = interval(number, node, trie)
        assert low == pytest.approx(below / (len(among) + 1), abs=1e-12)
        assert high == pytest.approx((below + ties + 1) / (len(among) + 1), abs=1e-12)
        nearest = min(set(among), key=lambda key, at=number: (abs(key - at), key))
        assert trie.keys[node] == nearest
        prefix &= records[:, place] == nearest
    assert trie.cumulative[node] >= prefix.sum() >= 1


@pytest.mark.parametrize("columns", [1, 2, 3])
def test_the_rank_of_a_row_that_is_exchangeable_with_the_records_is_exactly_uniform(columns):
    rows = default_rng(columns).integers(0, 3, (40, columns)).astype(float)
    edges = np.linspace(0, 1, 8)
    masses = {}
    for left_out in range(len(rows)):
        trie, node = trie_of(np.delete(rows, left_out, axis=0)), 0
        for place, value in enumerate(rows[left_out]):
            low, high, node = interval(value, node, trie)
            drawn = np.diff(np.clip((edges - low) / (high - low), 0, 1))
            masses.setdefault(tuple(rows[left_out, :place]), []).append(drawn)
            if trie.keys[node] != value:
                break  # no other row has this prefix: what follows is no rank given it
    for prefix, found in masses.items():
        same = int((rows[:, : len(prefix)] == prefix).all(axis=1).sum())
        if same == len(found):
            assert np.mean(found, axis=0) == pytest.approx(np.full(7, 1 / 7), abs=1e-9), prefix
    assert len(masses[()]) == len(rows)


CELLS = [
    # values, atoms, start, step, keys, lows
    ([3.0, 5.0, 5.0, 9.0], [], None, None, [3, 5, 9], [1, 3, 5]),
    ([3.0, 5.0, 9.0], [], 2.0, None, [3, 5, 9], [2, 3, 5]),
    ([3.0, 5.0, 9.0], [], 0.0, 1.0, [3, 5, 9], [2, 3, 5]),
    ([-np.inf, 3.0, 5.0], [], None, None, [-np.inf, 3, 5], [-np.inf, 1, 3]),
    ([0.0, 3.0, 5.0], [0.0, 5.0, 7.0], 0.0, None, [0, 3, 5], [0, 0, 5]),
    ([4.0], [], None, None, [4], [3]),
    ([-np.inf], [], None, None, [-np.inf], [-np.inf]),
]


@pytest.mark.parametrize(("values", "atoms", "start", "step", "keys", "lows"), CELLS)
def test_cells(values, atoms, start, step, keys, lows):
    found = grid(np.array(values), np.array(atoms), start, step)
    assert [part.tolist() for part in found] == [keys, lows]


def test_a_value_goes_to_the_record_in_whose_cell_it_lies_and_to_the_nearest_elsewhere():
    records = np.array([[1.0, 10.0], [2.0, 40.0], [2.0, 20.0], [-np.inf, 30.0]])
    grids = [grid(column, NONE, None, None) for column in records.T]
    trie = trie_of(records, grids=grids)
    _, _, node = interval(1.5, 0, trie)  # (1, 2]
    assert trie.keys[node] == 2.0
    seen = {
        value: trie.keys[interval(value, node, trie)[2]]
        for value in (5.0, 15.0, 20.0, 24.0, 26.0, 35.0, 99.0)
    }
    assert seen == {5.0: 20, 15.0: 20, 20.0: 20, 24.0: 20, 26.0: 40, 35.0: 40, 99.0: 40}
    assert trie.keys[interval(-np.inf, 0, trie)[2]] == -np.inf
    assert trie.keys[interval(-1e300, 0, trie)[2]] == 1.0
    assert trie.keys[interval(-np.inf, node, trie)[2]] == 20.0


def test_values_inside_a_cell():
    records = np.array([[3.0], [7.0], [7.0]])
    numbers = trie_of(records, grids=[grid(records[:, 0], NONE, None, None)])
    ranks = np.array([1e-12, 1 / 6, 1 / 3, 2 / 3, 1 - 1e-12])
    found, _ = values_at(ranks, np.zeros(5, dtype=np.int64), numbers, find_slots(numbers), False)
    assert found == pytest.approx([-1, 1, 3, 5, 7])
    whole = trie_of(records, grids=[grid(records[:, 0], NONE, None, 1.0)])
    ranks = (np.arange(3000) + 0.5) / 3000
    found, _ = values_at(ranks, np.zeros(3000, dtype=np.int64), whole, find_slots(whole), True)
    assert np.unique(found, return_counts=True)[1].tolist() == [1000, 500, 500, 500, 500]
    assert set(found) == {3, 4, 5, 6, 7}


def test_the_largest_numbers_have_room():
    records = np.array([[-(2.0**1021)], [2.0**1021]])
    trie = trie_of(records, grids=[grid(records[:, 0], NONE, None, None)])
    found, _ = values_at(
        np.array([0.25, 0.75]), np.zeros(2, dtype=np.int64), trie, find_slots(trie), False
    )
    assert np.isfinite(found).all()
    assert found[1] == 0.0


@pytest.mark.parametrize("skewed", [False, True])
def test_a_rank_is_found_from_its_slot_as_by_a_search(skewed):
    rng = default_rng(8)
    counts = (
        2 ** rng.integers(0, 40, size=300) if skewed else rng.integers(1, 4, size=300)
    ).astype(np.int64)
    trie = build([np.arange(300.0)], counts, np.zeros(300, dtype=np.int64), [None])
    total = np.cumsum(counts)
    ranks = np.concatenate(
        [
            rng.random(3_000),
            np.arange(1, 300) / 300,
            np.nextafter(np.arange(1, 300) / 300, 0.0),
            total[:-1] / total[-1],
        ]
    )
    found, _ = values_at(ranks, np.zeros(len(ranks), dtype=np.int64), trie, find_slots(trie), False)
    expected = np.minimum(np.searchsorted(total, np.floor(ranks * total[-1]), side="right"), 299)
    assert found.tolist() == expected.tolist()


@pytest.mark.parametrize(
    "n_values", [3, 1000, 2**40], ids=["cells", "sorted", "too many codes for a word"]
)
def test_a_trie_holds_each_distinct_record_once_however_its_records_are_sorted(n_values):
    rng = default_rng(n_values)
    records = np.repeat(rng.integers(0, n_values, (2000, 6)), 2, axis=0).astype(np.float64)
    records[:, 0] -= n_values < 2**40  # a number below 0 is no code
    counts, groups = rng.integers(1, 9, len(records)), np.repeat(rng.permutation(2000) % 7, 2)
    found = []
    trie = trie_of(records, counts, groups)
    paths = [[node] for node in range(7)]
    for _ in range(6):
        paths = [
            [*path, child]
            for path in paths
            for child in range(trie.first[path[-1]], trie.first[path[-1] + 1])
        ]
    before = {parent: int(trie.first[parent]) for *_, parent, _ in paths}
    for path in paths:
        own = int(
            trie.cumulative[path[-1]]
            - (trie.cumulative[path[-1] - 1] if path[-1] > before[path[-2]] else 0)
        )
        found.append([path[0], *trie.keys[path[1:]], own])
    in_group = groups > 0
    under_roots = np.concatenate(
        [np.column_stack([0 * groups, records]), np.column_stack([groups, records])[in_group]]
    )
    distinct, places = np.unique(under_roots, axis=0, return_inverse=True)
    weights = np.concatenate([counts, counts[in_group]])
    np.testing.assert_array_equal(
        found, np.column_stack([distinct, np.bincount(places.ravel(), weights=weights)])
    )
