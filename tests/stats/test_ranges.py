"""Counts of ranges on a grid: rounding keeps containment, merge laws, grids, and what is refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpdask.errors import DataError, SpecError
from dpdask.stats.ranges import RangeCounts, check_grid, grid_of_ranges

GRID = np.array([-1.0, 0.0, 0.5, 3.0])
ENDS = st.one_of(st.sampled_from([-1.0, 0.0, 0.5, 3.0]), st.floats(-5, 5))
ROWS = st.lists(
    st.tuples(st.one_of(st.just(-np.inf), ENDS), st.one_of(st.just(np.inf), ENDS)), max_size=12
)


def contains(lower, upper, y):
    if lower == upper:
        return y == lower
    return lower < y <= upper if lower < upper else y <= upper or y > lower


def cell_of(y):
    at = np.searchsorted(GRID, y)
    return 2 * at + (at < len(GRID) and GRID[at] == y)


def counted(rows):
    lower, upper = np.array(rows, dtype=float).reshape(-1, 2).T
    return RangeCounts.of_batch(GRID, lower, upper)


def plain(counts):
    return counts.keys.tolist(), counts.counts.tolist(), counts.n_rounded, counts.n_rows


@given(st.tuples(st.one_of(st.just(-np.inf), ENDS), st.one_of(st.just(np.inf), ENDS)), ENDS)
def test_a_rounded_range_contains_what_the_range_did(row, y):
    counts = counted([row])
    left, right, cell = int(counts.left[0]), int(counts.right[0]), cell_of(y)
    inside = left <= cell <= right if left <= right else cell <= right or cell >= left
    if contains(*row, y):
        assert inside
    ends_are_knots = all(end in GRID or np.isinf(end) for end in row)
    assert counts.n_rounded == (not ends_are_knots)
    if ends_are_knots and y in GRID:
        assert inside == contains(*row, y)  # and nothing is enlarged that need not be


@given(st.lists(ROWS, min_size=1, max_size=4))
def test_merged_counts_are_those_of_all_rows_in_any_order_and_grouping(batches):
    parts = [counted(rows) for rows in batches]
    identity = RangeCounts.identity(GRID)
    everything = plain(counted([row for rows in batches for row in rows]))
    assert plain(identity.merge(*parts)) == everything
    assert plain(parts[-1].merge(*parts[-2::-1])) == everything
    nested = identity
    for part in parts:
        nested = part.merge(nested, identity)
    assert plain(nested) == everything
    assert identity.n_rows == 0


def test_other_grids_do_not_merge():
    with pytest.raises(ValueError, match="different grids"):
        RangeCounts.identity(GRID).merge(RangeCounts.identity(GRID[1:]))


def test_a_grid_of_all_ends_rounds_nothing():
    rng = np.random.default_rng(0)
    lower = rng.normal(size=500)
    upper = lower + rng.choice([-1.0, 0.5, 2.0], 500)
    lower[:50], upper[50:100] = -np.inf, np.inf
    assert RangeCounts.of_batch(grid_of_ranges(lower, upper, 2000), lower, upper).n_rounded == 0
    coarse = grid_of_ranges(lower, upper, 30)
    ends = np.concatenate([lower, upper])
    assert len(coarse) <= 30
    assert (coarse[0], coarse[-1]) == (ends[np.isfinite(ends)].min(), ends[np.isfinite(ends)].max())
    assert np.isin(coarse, ends).all()


@pytest.mark.parametrize("knots", [[], [1.0, 1.0], [2.0, 1.0], [np.nan], [0.0, np.inf], [[1.0]]])
def test_what_is_no_grid_is_refused(knots):
    with pytest.raises(SpecError, match="grid is made of finite knots"):
        check_grid(np.array(knots))


def test_too_few_knots_or_ends_are_refused():
    with pytest.raises(SpecError, match="at least 2 knots"):
        grid_of_ranges(np.zeros(2), np.ones(2), 1)
    with pytest.raises(SpecError, match="no range has a finite end"):
        grid_of_ranges(np.array([-np.inf]), np.array([np.inf]))


@pytest.mark.parametrize(
    ("lower", "upper", "words"),
    [
        ([0.0], [0.0, 1.0], "one lower"),
        ([np.nan], [1.0], "missing"),
        ([np.inf], [1.0], "empty"),
        ([0.0], [-np.inf], "empty"),
    ],
)
def test_what_is_no_range_is_refused(lower, upper, words):
    with pytest.raises(DataError, match=words):
        RangeCounts.of_batch(GRID, np.array(lower), np.array(upper))
