"""The calibrated and the optimal channel: their distributions, their figures, and what they refuse."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpdask.channels import (
    calibrate,
    check_declared,
    compute_rank,
    compute_squared,
    compute_zero_one,
    laplace,
    optimal,
)
from dpdask.errors import SpecError

MOVIELENS = (
    np.array(
        [393068, 776815, 399490, 1640868, 1262797, 4896928, 3177318, 6639798, 2200539, 3612474]
    )
    / 25000095
)
STARS = np.arange(1, 11) / 2


def correlation(matrix):
    mean = MOVIELENS @ STARS
    centred = STARS - mean
    return float(
        (MOVIELENS[:, None] * matrix * np.outer(centred, centred)).sum() / (MOVIELENS @ centred**2)
    )


def expected_cost(probabilities, matrix, cost):
    return float((probabilities[:, None] * matrix * cost).sum())


@pytest.mark.parametrize(
    ("epsilon", "least"), [(1.0, 0.300), (2.0, 0.538), (3.0, 0.735), (4.0, 0.857)]
)
def test_optimal_reaches_the_figures_of_movielens(epsilon, least):
    assert correlation(optimal(MOVIELENS, epsilon, compute_squared(STARS)).matrix) >= least
    assert correlation(calibrate(MOVIELENS, epsilon, ordered=True).matrix) > correlation(
        laplace(MOVIELENS, epsilon, ordered=True).matrix
    )


def test_calibration_makes_a_fair_coin_the_optimal_randomised_response():
    coin = np.array([0.5, 0.5])
    kept = np.exp(1) / (1 + np.exp(1))
    assert calibrate(coin, 1.0, ordered=True).matrix[0, 0] == pytest.approx(kept, abs=1e-9)
    assert optimal(coin, 1.0, compute_zero_one(2)).matrix[0, 0] == pytest.approx(kept, abs=1e-9)
    assert laplace(coin, 1.0, ordered=True).matrix[0, 0] == pytest.approx(0.607, abs=1e-3)


@st.composite
def problems(draw):
    s = draw(st.integers(2, 40))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    probabilities = rng.dirichlet(np.full(s, draw(st.sampled_from([0.05, 0.3, 2.0]))))
    probabilities[rng.random(s) < draw(st.sampled_from([0.0, 0.3]))] = 0.0
    if probabilities.sum() == 0:
        probabilities[0] = 1.0
    cost = rng.random((s, s)) * 10.0 ** draw(st.integers(-3, 0))
    return (
        probabilities / probabilities.sum(),
        draw(st.floats(0.05, 8.0)),
        cost,
        draw(st.booleans()),
    )


@given(problems())
def test_optimal_is_stochastic_invariant_private_and_never_dearer_than_calibrated(problem):
    probabilities, epsilon, cost, ordered = problem
    channel = optimal(probabilities, epsilon, cost, ordered=ordered)
    assert (channel.weights.astype(object).sum(axis=1) == 2**63).all()
    assert np.abs(probabilities @ channel.matrix - probabilities).max() <= 1e-9
    assert channel.epsilon <= epsilon
    other = calibrate(probabilities, epsilon, ordered=ordered)
    assert other.epsilon <= epsilon
    assert np.abs(probabilities @ other.matrix - probabilities).max() <= 1e-12
    assert (
        expected_cost(probabilities, channel.matrix, cost)
        <= expected_cost(probabilities, other.matrix, cost) + 1e-9
    )


def test_a_level_never_seen_takes_the_row_of_its_neighbour_or_the_reference():
    probabilities = np.array([0.5, 0.0, 0.5])
    ordered = optimal(probabilities, 1.0, compute_squared(np.arange(3.0)))
    assert (ordered.weights[1] == ordered.weights[0]).all()
    unordered = optimal(probabilities, 1.0, compute_zero_one(3), ordered=False)
    assert unordered.matrix[1] == pytest.approx(probabilities)
    assert (unordered.matrix[:, 1] == 0).all()


def test_the_same_program_is_solved_once():
    from dpdask.channels import solve_weights

    cost = compute_squared(np.arange(7.0))
    probabilities = np.full(7, 1 / 7)
    optimal(probabilities, 0.7, cost)
    before = solve_weights.cache_info()
    first = optimal(probabilities, 0.7, cost)
    assert solve_weights.cache_info().hits == before.hits + 1
    first.weights[:] = 0
    assert optimal(probabilities, 0.7, cost).weights.any()


def test_a_declared_cost_is_checked():
    assert check_declared([[0, 1], [2, 0]], 2, "cost").tolist() == [[0, 1], [2, 0]]
    for wrong in (
        [[0, 1]],
        [[0, 1], [1]],
        [[0, -1], [1, 0]],
        [[0, float("nan")], [1, 0]],
        [["a", "b"], ["c", "d"]],
    ):
        with pytest.raises(SpecError):
            check_declared(wrong, 2, "cost")  # type: ignore[arg-type]  # wrong on purpose


def test_rank_costs_are_those_of_mid_ranks():
    probabilities = np.array([0.2, 0.3, 0.5])
    assert compute_rank(probabilities)[0, 2] == pytest.approx((0.75 - 0.1) ** 2)
    assert compute_zero_one(3).sum() == 6
