"""The best and the second best level of each row, against numpy's."""

import numpy as np
import pytest

from dpdask.kernels.decode import find_rivals


def rivals(utilities, offsets, groups):
    n = len(groups)
    chosen, seconds, gaps = (
        np.full(n, 9, np.uint16),
        np.full(n, 9, np.uint16),
        np.full(n, 9, np.float32),
    )
    find_rivals(utilities, offsets, groups, chosen, seconds, gaps)
    return chosen, seconds, gaps


@pytest.mark.parametrize(
    ("n_levels", "n_groups", "n", "n_more"),
    [
        (2, 1, 1, 0),
        (3, 2, 16, 0),
        (4, 7, 531, 3),
        (5, 3, 1024, 16),
        (33, 50, 2065, 0),
        (97, 9, 15, 1),
    ],
)
@pytest.mark.parametrize("whole", [False, True])
def test_rivals_are_those_of_a_sort(n_levels, n_groups, n, n_more, whole):
    rng = np.random.default_rng(n)
    utilities, offsets = (
        rng.normal(size=shape).astype(np.float32)
        for shape in ((n_levels, n + n_more), (n_groups, n_levels))
    )
    if whole:  # many equal sums: the first level is the better one
        utilities, offsets = np.round(utilities), np.round(offsets)
    offsets[:, n_levels // 2] -= np.float32(1e9)  # a level that is never chosen
    groups = rng.integers(0, n_groups, n).astype(np.uint16)
    chosen, seconds, gaps = rivals(utilities, offsets, groups)
    sums = utilities[:, :n] + offsets[groups].T
    ranked = np.argsort(-sums, axis=0, kind="stable")
    assert (chosen == ranked[0]).all()
    assert (seconds == ranked[1]).all()
    best, after = -np.sort(-sums, axis=0)[:2]
    assert (sums[seconds, np.arange(n)] == after).all()
    assert (gaps == best - after).all()


def test_a_single_level_wins():
    chosen, seconds, gaps = rivals(
        np.zeros((1, 20), np.float32), np.zeros((1, 1), np.float32), np.zeros(20, np.uint16)
    )
    assert not (chosen | seconds).any()
    assert (gaps > 1e38).all()
