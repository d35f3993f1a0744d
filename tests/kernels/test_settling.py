"""Rows that are chosen among a person's candidates: the tables are those of the chosen rows, and come nearer to the wanted ones."""

import itertools

import numpy as np
import pytest
from numpy.random import default_rng

from dpdask.kernels.persons import CONSTANT, FREE, SEVERAL, Gaps, choose_levels, settle

SIZES = (3, 4, 2)
FIRST = np.cumsum(SIZES) - SIZES
N_LEVELS, PARENT_LEVELS = sum(SIZES), 5


def candidates(rng, counts, times=4):
    """Each person's candidates, levels numbered through, and where they begin."""
    starts = np.concatenate([[0], np.cumsum(counts * times)]).astype(np.int64)
    rows = np.stack([rng.integers(0, size, starts[-1]) for size in SIZES], axis=1)
    return (rows + FIRST).astype(np.uint16), starts


def chosen(rows, starts, counts):
    return [rows[start : start + k] for start, k in zip(starts[:-1], counts, strict=True)]


def found(rows, starts, counts, parents):
    """The three tables of the chosen rows, one row and one pair of rows after the other."""
    own, of_parents, pairs = (
        np.zeros(shape)
        for shape in ((N_LEVELS, N_LEVELS), (PARENT_LEVELS, N_LEVELS), (N_LEVELS, N_LEVELS))
    )
    for person, (k, group) in enumerate(zip(counts, chosen(rows, starts, counts), strict=True)):
        for i, one in enumerate(group):
            for c, level in enumerate(one):
                for parent in parents[person]:
                    of_parents[parent, level] += 1 / k
                for d, other in enumerate(one):
                    own[level, other] += (c != d) / k
            for j, two in enumerate(group):
                if i != j:
                    pairs[np.ix_(one, two)] += 1 / (k * (k - 1))
    return own, of_parents, pairs


def open_gaps(wanted, weights=(1.0, 1.0, 1.0)):
    parts = []
    for table, weight in zip(wanted, weights, strict=True):
        parts += [-table, np.full(table.shape, weight)]
    return Gaps(*parts)


def squares(gaps):
    """What exchanges make smaller: each gap of two levels stands twice in a symmetric table."""
    return float(
        (gaps.rows**2 * gaps.row_weights).sum() / 2
        + (gaps.parents**2 * gaps.parent_weights).sum()
        + (gaps.pairs**2 * gaps.pair_weights).sum() / 2
    )


def keep_constant(rows, starts, counts, column):
    """Let all candidates of each person with two rows or more agree in a column."""
    for person in np.flatnonzero(counts > 1):
        own = slice(starts[person], starts[person + 1])
        rows[own, column] = rows[starts[person], column]


def settled(rng, counts, n_sweeps, wanted, kinds=None, weights=(1.0, 1.0, 1.0), times=4):
    n = len(counts)
    rows, starts = candidates(rng, counts, times)
    parents = rng.integers(0, PARENT_LEVELS, (n, 2)).astype(np.uint16)
    kinds = np.full((n, 3), FREE, dtype=np.uint8) if kinds is None else kinds
    for column in np.flatnonzero((kinds == CONSTANT).any(axis=0)):
        keep_constant(rows, starts, counts, column)
    gaps, before = open_gaps(wanted, weights), rows.copy()
    seeds = rng.integers(0, 2**63, n).astype(np.uint64)
    settle(rows, starts, counts, parents, kinds, seeds, n_sweeps, gaps)
    return rows, before, starts, parents, gaps


def kinds_of(counts, constant):
    kinds = np.full((len(counts), 3), FREE, dtype=np.uint8)
    kinds[np.ix_(counts > 1, constant)] = CONSTANT
    return kinds


@pytest.fixture
def rng():
    return default_rng(3)


NOTHING = (
    np.zeros((N_LEVELS, N_LEVELS)),
    np.zeros((PARENT_LEVELS, N_LEVELS)),
    np.zeros((N_LEVELS, N_LEVELS)),
)


@pytest.mark.parametrize("constant", [(), (1,), (0, 2)])
@pytest.mark.parametrize("n_sweeps", [0, 1, 6])
def test_gaps_are_those_of_the_chosen_rows(rng, n_sweeps, constant):
    counts = rng.integers(0, 6, 60)
    kinds = kinds_of(counts, constant)
    rows, _, starts, parents, gaps = settled(rng, counts, n_sweeps, NOTHING, kinds)
    for left, own in zip(gaps[::2], found(rows, starts, counts, parents), strict=True):
        np.testing.assert_allclose(left, own, atol=1e-9)


def test_no_row_moves_between_persons(rng):
    counts = rng.integers(0, 6, 60)
    rows, before, starts, *_ = settled(rng, counts, 5, NOTHING)
    assert (rows != before).any()
    for start, stop in itertools.pairwise(starts):
        np.testing.assert_array_equal(
            np.unique(rows[start:stop], axis=0, return_counts=True)[1],
            np.unique(before[start:stop], axis=0, return_counts=True)[1],
        )


@pytest.mark.parametrize("weights", [(1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0), (1.0,) * 3])
def test_each_table_comes_nearer_to_what_another_choice_shows(weights):
    counts = default_rng(0).integers(1, 6, 300)
    other = settled(default_rng(5), counts, 0, NOTHING)
    rng = default_rng(6)
    wanted = found(*other[0:1], other[2], counts, other[3])
    far = squares(settled(default_rng(6), counts, 0, wanted, weights=weights)[-1])
    near = squares(settled(rng, counts, 20, wanted, weights=weights)[-1])
    assert near < 0.1 * far


def test_rows_that_shall_not_agree_do_not(rng):
    counts = rng.integers(0, 5, 400)
    kinds = np.full((400, 3), SEVERAL, dtype=np.uint8)
    kinds[:200] = FREE
    want_agreement = list(NOTHING)
    want_agreement[2] = np.eye(N_LEVELS) * 400
    rows, _, starts, *_ = settled(rng, counts, 10, want_agreement, kinds, times=20)
    agree = np.array(
        [
            len(group) > 1 and (group == group[0]).all(axis=0).any()
            for group in chosen(rows, starts, counts)
        ]
    )
    assert not agree[200:].any()
    assert agree[:200].mean() > 0.3


def test_constant_levels_come_nearer_together(rng):
    counts = rng.integers(2, 6, 300)
    kinds = kinds_of(counts, (1,))
    own, wanted, weights = (
        slice(FIRST[1], FIRST[2]),
        [*NOTHING[:2], np.zeros((9, 9))],
        np.zeros((9, 9)),
    )
    wanted[2][own, own] = np.diag([180.0, 40.0, 40.0, 40.0])
    weights[own, own] = 1.0
    left = [settled(default_rng(1), counts, n, wanted, kinds, (0.0, 0.0, weights)) for n in (0, 9)]
    assert squares(left[1][-1]) < 0.01 * squares(left[0][-1])
    rows, _, starts, *_ = left[1]
    firsts = rows[starts[:-1], 1]
    for person, (start, stop) in enumerate(itertools.pairwise(starts)):
        assert (rows[start:stop, 1] == firsts[person]).all()
    assert 175 <= (firsts == FIRST[1]).sum() <= 185


@pytest.mark.parametrize("n_latents", [3, 4])
def test_a_row_has_the_level_of_the_largest_sum(rng, n_latents):
    shared, own = (rng.normal(size=(6, n)).astype(np.float32) for n in (5, 64))
    owners = np.sort(rng.integers(0, 5, 60)).astype(np.int64)
    offsets, levels = rng.normal(size=4).astype(np.float32), np.array([1, 3, 4, 9], np.uint16)
    out = np.zeros(60, dtype=np.uint16)
    scales = rng.uniform(0.5, 2.0, 5).astype(np.float32)
    choose_levels(shared, own, owners, scales, 2, n_latents, offsets, levels, out)
    own_part = own[2 : 2 + n_latents, :60] * scales[owners]
    sums = shared[2 : 2 + n_latents, owners] + own_part
    sums = np.concatenate([np.zeros((4 - n_latents, 60), np.float32), sums]) + offsets[:, None]
    np.testing.assert_array_equal(out, levels[sums.argmax(axis=0)])
