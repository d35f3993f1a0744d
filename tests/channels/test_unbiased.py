"""The optimal unbiased channel: its line for every level, enumerated in exact fractions; what it keeps; what it refuses."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpdask.channels import calibrate, measure_attenuation, optimal_unbiased
from dpdask.kernels.channel import TOTAL_BITS, exact_epsilon, integer_weights
from dpdask.simulate import ML25M_RATING_COUNTS

MOVIELENS = np.array(ML25M_RATING_COUNTS) / sum(ML25M_RATING_COUNTS)
STARS = np.arange(1, 11) / 2


def biases(channel, values, factor, centre):
    """Return E[m + (Z̃ - m)/c | Z = z] - z for every level z, from the whole-number weights, in exact fractions."""
    c, m = Fraction(factor), Fraction(centre)
    found = []
    for row, own in zip(channel.weights.tolist(), values.tolist(), strict=True):
        assert sum(row) == 2**TOTAL_BITS
        mean = sum(
            Fraction(weight, 2**TOTAL_BITS) * Fraction(value)
            for weight, value in zip(row, values.tolist(), strict=True)
        )
        found.append(float(m + (mean - m) / c - Fraction(own)))
    return found


@pytest.mark.parametrize(
    ("epsilon", "least", "most"),
    [(1.0, 0.19, 0.30), (2.0, 0.40, 0.54), (3.0, 0.61, 0.74), (4.0, 0.76, 0.86)],
)
def test_half_stars_keep_their_share_without_bias(epsilon, least, most):
    channel = optimal_unbiased(MOVIELENS, epsilon, STARS)
    line = measure_attenuation(channel.weights, STARS)
    assert least <= line.factor <= most  # the optimal channel's correlation
    assert (
        max(map(abs, biases(channel, STARS, line.factor, line.centre)))
        <= line.bias_at_most
        <= 1e-12 * 4.5
    )
    assert line.centre == pytest.approx(MOVIELENS @ STARS, abs=1e-12)
    assert np.abs(MOVIELENS @ channel.matrix - MOVIELENS).max() <= 1e-12
    assert epsilon - 1e-9 < float(exact_epsilon(channel.weights)) <= channel.epsilon <= epsilon
    assert (
        max(map(abs, biases(channel, STARS, line.factor * 1.1, line.centre))) > 0.01
    )  # a wrong share is seen


@st.composite
def problems(draw):
    s = draw(st.integers(2, 16))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    probabilities = rng.dirichlet(np.full(s, draw(st.sampled_from([0.5, 2.0]))))
    if s > 3 and draw(st.booleans()):
        probabilities[rng.integers(s)] = 0.0
    values = np.sort(rng.choice(1000, s, replace=False)) * draw(
        st.sampled_from([1.0, -0.01, 1e6])
    ) + draw(st.sampled_from([0.0, 1e4]))
    return probabilities / probabilities.sum(), draw(st.floats(0.2, 6.0)), values


@given(problems())
def test_the_line_holds_for_every_level_seen_or_not(problem):
    probabilities, epsilon, values = problem
    channel = optimal_unbiased(probabilities, epsilon, values)
    line = measure_attenuation(channel.weights, values)
    assert 0 < line.factor < 1
    assert (
        max(map(abs, biases(channel, values, line.factor, line.centre)))
        <= line.bias_at_most
        <= 1e-12 * np.ptp(values) / line.factor
    )
    assert np.abs(probabilities @ channel.matrix - probabilities).max() <= 1e-12
    assert channel.epsilon <= epsilon
    assert (channel.weights[:, probabilities == 0] == 0).all()


def test_other_channels_have_no_line_and_a_changed_weight_is_seen():
    calibrated = calibrate(MOVIELENS, 1.0, ordered=True)
    assert measure_attenuation(calibrated.weights, STARS).bias_at_most > 0.1
    weights = optimal_unbiased(MOVIELENS, 1.0, STARS).weights.copy()
    moved = weights[4, 9] // np.uint64(10)  # a tenth of one probability
    weights[4, 9] -= moved
    weights[4, 0] += moved
    assert measure_attenuation(weights, STARS).bias_at_most > 0.01


def test_a_channel_that_keeps_nothing_has_no_line():
    assert (
        measure_attenuation(np.full((2, 2), 2**62, dtype=np.uint64), np.array([0.0, 1.0])) is None
    )


@pytest.mark.parametrize(
    "probabilities",
    [np.array([1.0, 0.0]), np.array([1.0 - 1e-12, 1e-12])],
    ids=["one level", "almost one"],
)
def test_a_reference_that_leaves_no_mean_is_released_itself(probabilities):
    channel = optimal_unbiased(probabilities, 1.0, np.array([0.0, 1.0]))
    np.testing.assert_allclose(channel.matrix, [probabilities] * 2, atol=1e-15)
    assert (channel.epsilon, measure_attenuation(channel.weights, np.array([0.0, 1.0]))) == (
        0.0,
        None,
    )


@pytest.mark.parametrize("epsilon", [36.0, 43.0, 60.0, 100.0])
@pytest.mark.parametrize("size", [3, 6, 10])
def test_at_a_large_epsilon_rows_are_still_distributions(size, epsilon):
    """The projection leaves negative ratios there; as whole numbers they would wrap to weights of more than everything."""
    rng = np.random.default_rng(size)
    for probabilities in (np.full(size, 1.0 / size), rng.dirichlet(np.ones(size))):
        channel = optimal_unbiased(probabilities, epsilon, np.sort(rng.normal(size=size)))
        assert [sum(map(int, row)) for row in channel.weights] == [2**TOTAL_BITS] * size
        assert np.abs(probabilities @ channel.matrix - probabilities).max() < 1e-12
        assert exact_epsilon(channel.weights) <= epsilon


def test_a_rare_level_does_not_make_the_program_infeasible():
    probabilities = np.array([0.0022, 0.609, 0.151, 0.237, 0.00011, 2.9e-8])
    channel = optimal_unbiased(probabilities / probabilities.sum(), 2.0, np.arange(6.0))
    assert measure_attenuation(channel.weights, np.arange(6.0)).factor > 0.05


def test_a_channel_with_a_negative_probability_is_no_channel():
    with pytest.raises(ValueError, match="negative probability"):
        integer_weights(np.array([[1.5, -0.5], [0.5, 0.5]]))
