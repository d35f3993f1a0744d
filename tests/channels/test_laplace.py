"""The Laplace channel of a reference: its exact epsilon, its invariance, and levels that were never seen."""

import math
from decimal import Decimal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpdask.channels import calibrate, find_scale, laplace
from dpdask.engine.compute import forget_here
from dpdask.kernels.channel import exact_epsilon, laplace_channel

TOTAL = 2**63


@st.composite
def references(draw):
    """Random probabilities of 1 to 120 levels, some unseen, some tiny."""
    counts = np.array(
        draw(
            st.lists(st.sampled_from([0, 0, 1, 3, 10**3, 10**6, 10**12]), min_size=1, max_size=120)
        ),
        dtype=float,
    )
    counts[draw(st.integers(0, len(counts) - 1))] += 1
    return counts / counts.sum()


@given(
    probabilities=references(),
    log_epsilon=st.floats(math.log(1e-6), math.log(100)),
    ordered=st.booleans(),
)
def test_exact_epsilon_is_below_epsilon_and_the_reference_is_left_as_it_is(
    probabilities, log_epsilon, ordered
):
    epsilon = math.exp(log_epsilon)
    channel = laplace(probabilities, epsilon, ordered=ordered)
    assert exact_epsilon(channel.weights) <= Decimal(channel.epsilon) <= Decimal(epsilon)
    assert {sum(row) for row in channel.weights.tolist()} == {TOTAL}
    np.testing.assert_allclose(probabilities @ channel.matrix, probabilities, rtol=0, atol=1e-12)
    assert not channel.weights[:, probabilities == 0].any()


def test_seen_levels_have_the_closed_form_channel():
    probabilities = np.array([0.2, 0.5, 0.3])
    channel = laplace(probabilities, 1.5, ordered=True)
    np.testing.assert_allclose(channel.matrix, laplace_channel(probabilities, 1 / 1.5), rtol=1e-12)


def test_an_unseen_ordered_level_takes_the_row_of_the_nearest_seen_one_the_lower_of_two():
    channel = laplace(np.array([0.0, 0.4, 0.0, 0.6, 0.0, 0.0]), 1.0, ordered=True)
    expected = channel.weights[[1, 1, 1, 3, 3, 3]]
    assert channel.weights.tolist() == expected.tolist()


def test_an_unseen_category_takes_the_reference_itself():
    probabilities = np.array([0.0, 0.4, 0.0, 0.6])
    channel = laplace(probabilities, 1.0, ordered=False)
    np.testing.assert_allclose(channel.matrix[[0, 2]], [probabilities] * 2, rtol=1e-15)
    assert channel.epsilon == laplace(probabilities, 1.0, ordered=True).epsilon


@pytest.mark.parametrize("ordered", [True, False])
def test_a_reference_with_one_seen_level_costs_nothing(ordered):
    channel = laplace(np.array([0.0, 1.0, 0.0]), 1.0, ordered=ordered)
    assert channel.epsilon == 0.0
    assert channel.weights.tolist() == [[0, TOTAL, 0]] * 3


def test_a_thousand_levels_are_resolved():
    probabilities = np.random.default_rng(2).dirichlet(np.full(1024, 0.3))
    channel = laplace(probabilities, 2.0, ordered=True)
    assert exact_epsilon(channel.weights) <= 2
    np.testing.assert_allclose(probabilities @ channel.matrix, probabilities, rtol=0, atol=1e-12)


def test_what_a_reference_made_is_forgotten_with_the_run():
    """The margins, by which a scale is remembered, may be those of held-out rows."""
    calibrate(np.array([0.2, 0.3, 0.5]), 1.0, ordered=True)
    assert find_scale.cache_info().currsize > 0
    forget_here()
    assert find_scale.cache_info().currsize == 0
