"""The maximum likelihood masses against brute force: dense EM over all cells, a general solver, pooling and counting."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize

from dpdask.kernels import turnbull

N_CELLS = 9
RANGES = st.lists(
    st.tuples(st.integers(0, N_CELLS - 1), st.integers(0, N_CELLS - 1), st.integers(1, 20)),
    min_size=1,
    max_size=12,
)


def dense(left, right, n_cells):
    """Return the 0/1 matrix of ranges × cells."""
    cells = np.arange(n_cells)
    ordinary = (left[:, None] <= cells) & (cells <= right[:, None])
    return np.where(
        (left <= right)[:, None], ordinary, (cells <= right[:, None]) | (cells >= left[:, None])
    ).astype(float)


def cleaned(triples, rings=True):
    found = {}
    for left, right, count in triples:
        if left > right and not (rings and left > right + 1):
            left, right = right, left
        if (left, right) != (0, N_CELLS - 1):
            found[left, right] = found.get((left, right), 0) + count
    left, right = np.array(list(found), dtype=np.int64).reshape(-1, 2).T
    return left, right, np.array(list(found.values()), dtype=np.int64)


def spread(solution, n_cells):
    masses = np.zeros(n_cells)
    masses[solution.last] = solution.masses
    return masses


@settings(max_examples=80)
@given(RANGES)
def test_an_independent_certificate_holds_over_all_cells(triples):
    left, right, counts = cleaned(triples)
    if not len(left):
        return
    solution = turnbull.npmle(left, right, counts, N_CELLS)
    matrix = dense(left, right, N_CELLS)
    masses = spread(solution, N_CELLS)
    assert masses.min() >= 0
    assert masses.sum() == pytest.approx(1, abs=1e-12)
    probabilities = matrix @ masses
    gap = (
        matrix.T @ (counts / probabilities)
    ).max() / counts.sum() - 1  # of the full problem, no cell left out
    assert gap <= 1e-6
    assert solution.duality_gap == pytest.approx(
        max(gap, 0), abs=1e-8
    )  # of masses before their sum is made 1
    assert solution.log_likelihood == pytest.approx(
        float(counts @ np.log(probabilities)), abs=1e-8 * counts.sum()
    )


@given(RANGES)
def test_line_data_have_one_solution(triples):
    left, right, counts = cleaned(triples, rings=False)
    if len(left):
        assert turnbull.npmle(left, right, counts, N_CELLS).drift == 0


def test_rings_may_leave_the_cdf_open():
    # half in 2..4, half in its ring of 0..1 and 5..8: nothing tells the two ends apart
    found = turnbull.npmle(np.array([2, 5]), np.array([4, 1]), np.ones(2, dtype=np.int64), N_CELLS)
    assert found.drift == pytest.approx(0.5)
    # one range that begins at an end of the line does
    assert (
        turnbull.npmle(
            np.array([2, 5, 0]), np.array([4, 1, 1]), np.ones(3, dtype=np.int64), N_CELLS
        ).drift
        == 0
    )


@given(RANGES)
def test_what_does_not_drift_is_the_only_solution(triples):
    left, right, counts = cleaned(triples)
    if not len(left):
        return
    found = turnbull.npmle(left, right, counts, N_CELLS, tolerance=1e-12)
    matrix = dense(left, right, N_CELLS)[:, found.last]
    # the largest and smallest cdf over all masses with the same probabilities, by linear programming
    best = 0.0
    for k in range(len(found.last)):
        cost = (np.arange(len(found.last)) <= k).astype(float)
        spans = [
            optimize.linprog(
                sign * cost,
                A_eq=np.vstack([matrix, np.ones(len(cost))]),
                b_eq=np.append(matrix @ found.masses, 1.0),
            ).fun
            for sign in (1, -1)
        ]
        if None not in spans:
            best = max(best, -spans[1] - spans[0])
    if found.drift == 0:
        assert best < 1e-4
    else:
        assert best <= 3 * found.drift + 1e-4


@pytest.mark.parametrize("seed", range(3))
def test_newton_agrees_with_pooling_on_case_one_data(seed):
    rng = np.random.default_rng(seed)
    size = 40
    below, above = rng.binomial(20, np.linspace(0.1, 0.9, size)), rng.integers(1, 20, size)
    borders = np.arange(size)
    left = np.concatenate([np.zeros(size, dtype=np.int64), borders + 1])
    right = np.concatenate([borders, np.full(size, size)])
    counts = np.concatenate([below, above]).astype(np.int64)
    seen = counts > 0
    pooled = turnbull.npmle(left[seen], right[seen], counts[seen], size + 1)
    assert pooled.n_iterations == 0
    assert pooled.duality_gap <= 1e-9
    ranges, _ = turnbull._over_atoms(
        left[seen], right[seen], counts[seen], pooled.first, pooled.last
    )
    masses, steps = turnbull._interior(ranges, len(pooled.first), 1e-12)
    assert steps > 0
    np.testing.assert_allclose(masses, pooled.masses, atol=1e-6)


def test_a_singular_system_is_lifted():
    found = turnbull._solve_step(
        np.full((60, 60), 2.0), np.ones(60)
    )  # of rank one, and the right side in its range
    assert 2.0 * found.sum() == pytest.approx(1.0, abs=1e-3)


def test_many_uneven_problems_are_all_solved():
    for seed in range(30):
        rng = np.random.default_rng(seed)
        n_cells, n_ranges = int(rng.integers(3, 120)), int(rng.integers(1, 300))
        left, right = rng.integers(0, n_cells, (2, n_ranges))
        if seed % 3:  # the rest are rings
            left, right = np.minimum(left, right), np.maximum(left, right)
        keys = np.unique((left * n_cells + right)[(left <= right) | (left > right + 1)])
        keys = keys[keys != n_cells - 1]
        counts = np.exp(rng.uniform(0, 15, len(keys))).astype(np.int64)
        if len(keys):
            solution = turnbull.npmle(keys // n_cells, keys % n_cells, counts, n_cells)
            assert solution.duality_gap <= 1e-8
            assert solution.n_iterations < 50


def test_what_says_nothing_or_is_too_large_is_refused(monkeypatch):
    none, cells = np.zeros(0, dtype=np.int64), np.array([1, 3, 7])
    assert turnbull.npmle(cells[:1], cells[:1], np.array([3]), N_CELLS).masses.tolist() == [
        1.0
    ]  # this says all
    for left, right in [(none, none), (np.array([0]), np.array([8]))]:
        with pytest.raises(ValueError, match="no range says anything"):
            turnbull.npmle(left, right, np.ones(len(left), dtype=np.int64), N_CELLS)
    monkeypatch.setattr(turnbull, "MAX_ATOMS", 2)
    with pytest.raises(ValueError, match="3 maximal intersections are above 2"):
        turnbull.npmle(cells, cells, np.ones(3, dtype=np.int64), N_CELLS)


def test_too_few_steps_report_the_gap_they_reached(monkeypatch):
    monkeypatch.setattr(turnbull, "_NEWTON_STEPS", 1)
    left, right, counts = cleaned(
        [(1, 3, 2), (3, 5, 1), (1, 1, 1), (5, 5, 2), (7, 7, 3), (3, 7, 4)]
    )
    assert turnbull.npmle(left, right, counts, N_CELLS).duality_gap > 1e-6
