"""The nearest correlation matrix against Higham's published example, his own algorithm and the optimality conditions."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from dpdask.kernels import correlation
from dpdask.kernels.correlation import nearest_correlation

FLOOR = 1e-6


def noisy(n, noise, seed):
    """A factor model's correlations, disturbed and clipped to [-1, 1]."""
    rng = np.random.default_rng(seed)
    loadings = rng.normal(size=(n, 3))
    matrix = loadings @ loadings.T + np.diag(rng.uniform(0.2, 1, n))
    scale = 1 / np.sqrt(np.diagonal(matrix))
    disturbance = np.triu(rng.normal(size=(n, n)) * noise, 1)
    matrix = np.clip(matrix * scale * scale[:, None] + disturbance + disturbance.T, -1, 1)
    np.fill_diagonal(matrix, 1)
    return (matrix + matrix.T) / 2


def projected(matrix, floor, steps):
    """Higham's alternating projections with Dykstra's correction, as published: the oracle."""
    current, correction = matrix.copy(), np.zeros_like(matrix)
    diagonal = np.diagonal(matrix).copy()
    for _ in range(steps):
        moved = current - correction
        values, vectors = np.linalg.eigh(moved)
        inside = (vectors * np.maximum(values, floor)) @ vectors.T
        correction = inside - moved
        current = inside.copy()
        np.fill_diagonal(current, diagonal)
    return current


def assert_is_correlation(found, floor=FLOOR):
    assert (found == found.T).all()
    assert (np.diagonal(found) == 1).all()
    assert np.abs(found).max() <= 1
    assert np.linalg.eigvalsh(found)[0] >= floor * (1 - 1e-5) - 1e-13


def test_highams_example():
    found = nearest_correlation(np.array([[1.0, 1, 0], [1, 1, 1], [0, 1, 1]]), floor=0)
    assert_allclose(
        found.matrix, [[1, 0.7607, 0.1573], [0.7607, 1, 0.7607], [0.1573, 0.7607, 1]], atol=5e-5
    )
    assert found.distance == pytest.approx(0.5278, abs=5e-5)
    assert found.residual <= 1e-7


@pytest.mark.parametrize("floor", [0, 1e-6, 0.05])
@pytest.mark.parametrize("seed", range(2))
def test_it_agrees_with_alternating_projections(seed, floor):
    given = noisy(12, 0.3, seed)
    found = nearest_correlation(given, floor=floor, tolerance=1e-11)
    assert found.n_iterations > 0
    assert_allclose(found.matrix, projected(given, floor, 3000), atol=1e-7)


@pytest.mark.parametrize("seed", range(3))
def test_a_wanted_diagonal_is_kept(seed):
    rng, given = np.random.default_rng(seed), noisy(12, 0.3, seed)
    diagonal = rng.uniform(0.05, 1.0, 12)
    np.fill_diagonal(given, diagonal)
    found = nearest_correlation(given, floor=0.01, tolerance=1e-11, diagonal=diagonal)
    assert found.n_iterations > 0
    assert (np.diagonal(found.matrix) == diagonal).all()
    assert_allclose(found.matrix, projected(given, 0.01, 4000), atol=1e-6)
    again = nearest_correlation(found.matrix, floor=0.01, diagonal=diagonal)
    assert again.n_iterations == 0


@given(
    st.integers(2, 25),
    st.floats(0.05, 2),
    st.integers(0, 2**32 - 1),
    st.sampled_from([1e-6, 1e-3, 0.2]),
)
def test_the_result_meets_the_conditions_of_the_nearest_matrix(n, noise, seed, floor):
    given = noisy(n, noise, seed)
    found = nearest_correlation(given, floor=floor, tolerance=1e-10)
    assert found.residual <= 1e-7
    assert_is_correlation(found.matrix, floor)
    assert found.distance == pytest.approx(np.linalg.norm(found.matrix - given), abs=1e-12)
    if found.n_iterations:
        # found - given = diag(y) + S with S >= 0 and S (found - floor·I) = 0: y is read off the rows that S leaves
        inside = found.matrix - floor * np.eye(n)
        y = np.diagonal((found.matrix - given) @ inside) / np.diagonal(inside)
        slack = found.matrix - given - np.diag(y)
        assert np.linalg.eigvalsh(slack)[0] >= -1e-6
        assert np.abs(slack @ inside).max() <= 1e-6


@pytest.mark.parametrize(
    "matrix", [np.eye(1), np.eye(5), noisy(20, 0, 1), np.array([[1, -0.999], [-0.999, 1]])]
)
def test_a_correlation_matrix_stays_to_the_bit(matrix):
    found = nearest_correlation(matrix)
    assert (found.matrix == matrix).all()
    assert (found.distance, found.residual, found.n_iterations) == (0, 0, 0)


@pytest.mark.parametrize("n", [2, 3, 60])
def test_levels_that_exclude_each_other_share_the_correlation_evenly(n):
    found = nearest_correlation(2 * np.eye(n) - np.ones((n, n)))
    assert found.residual <= 1e-7
    assert_is_correlation(found.matrix)
    assert_allclose(found.matrix[~np.eye(n, dtype=bool)], (FLOOR - 1) / (n - 1), rtol=1e-6)


def test_a_few_hundred_very_noisy_variables_converge():
    given = noisy(120, 0.7, 5)
    found = nearest_correlation(given)
    assert found.residual <= 1e-7
    assert found.n_iterations <= 15
    assert_is_correlation(found.matrix)
    assert (nearest_correlation(given).matrix == found.matrix).all()


def test_a_search_cut_short_says_so_and_gives_a_correlation_matrix(monkeypatch):
    given = noisy(50, 0.5, 6)
    with monkeypatch.context() as patch:
        patch.setattr(correlation, "_NEWTON_STEPS", 1)
        found = nearest_correlation(given)
    assert found.residual > 1e-7
    assert found.n_iterations == 1
    assert_is_correlation(found.matrix, FLOOR / 10)
    assert found.distance >= nearest_correlation(given).distance
