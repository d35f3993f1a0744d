"""Channels from one distribution to another: P·T = Q, their exact epsilon, and that one distribution is the case of two equal ones."""

from decimal import Decimal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats

from dpdask.channels import calibrate, compute_squared, laplace, optimal, optimal_unbiased
from dpdask.errors import SpecError
from dpdask.kernels import channel as kernel


@st.composite
def pairs_of_distributions(draw):
    s = draw(st.integers(1, 14))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))

    def distribution():
        found = rng.dirichlet(np.full(s, draw(st.sampled_from([0.05, 0.3, 2.0]))))
        found[rng.random(s) < draw(st.sampled_from([0.0, 0.4]))] = 0.0
        if found.sum() == 0:
            found[int(rng.integers(s))] = 1.0
        return found / found.sum()

    return distribution(), distribution()


def made(kind, source, target, epsilon, *, ordered):
    if kind == "optimal":
        return optimal(
            source,
            epsilon,
            compute_squared(np.arange(float(len(source)))),
            ordered=ordered,
            target=target,
        )
    return (laplace if kind == "laplace" else calibrate)(
        source, epsilon, ordered=ordered, target=target
    )


@pytest.mark.parametrize("kind", ["laplace", "calibrated", "optimal"])
@settings(max_examples=25)
@given(
    distributions=pairs_of_distributions(),
    epsilon=st.sampled_from([0.05, 0.7, 5.0]),
    ordered=st.booleans(),
)
def test_the_target_is_met_and_epsilon_kept(kind, distributions, epsilon, ordered):
    source, target = distributions
    channel = made(kind, source, target, epsilon, ordered=ordered)
    assert {sum(row) for row in channel.weights.tolist()} == {2**63}
    assert kernel.exact_epsilon(channel.weights) <= Decimal(channel.epsilon) <= Decimal(epsilon)
    np.testing.assert_allclose(
        source @ channel.matrix, target, rtol=0, atol=1e-9 if kind == "optimal" else 1e-12
    )
    assert not channel.weights[:, target == 0].any()


@pytest.mark.parametrize("kind", ["laplace", "calibrated", "optimal"])
@settings(max_examples=15)
@given(
    distributions=pairs_of_distributions(),
    epsilon=st.sampled_from([0.1, 2.0]),
    ordered=st.booleans(),
)
def test_two_equal_distributions_give_the_channel_of_one_bit_for_bit(
    kind, distributions, epsilon, ordered
):
    one, two = (
        made(kind, distributions[0], None, epsilon, ordered=ordered),
        made(kind, distributions[0], distributions[0].copy(), epsilon, ordered=ordered),
    )
    assert one.epsilon == two.epsilon
    assert one.weights.tolist() == two.weights.tolist()


def test_optimal_costs_no_more_than_calibrated_between_distributions():
    rng = np.random.default_rng(4)
    cost = compute_squared(np.arange(8.0))
    gains = []
    for _ in range(5):
        source, target = rng.dirichlet(np.ones(8)), rng.dirichlet(np.ones(8))
        best, other = (
            made(kind, source, target, 1.0, ordered=True).matrix
            for kind in ("optimal", "calibrated")
        )
        gains.append(float((source[:, None] * (other - best) * cost).sum()))
    assert min(gains) >= -1e-12
    assert max(gains) > 1e-2


def test_the_laplace_channel_is_the_integral_over_ranks_of_both_distributions():
    source, target, b = np.array([0.2, 0.5, 0.3]), np.array([0.6, 0.1, 0.2, 0.1]), 0.8
    found = kernel.laplace_channel(source, b, target)
    cuts = np.concatenate(
        [[-np.inf], kernel.uniform_laplace_quantile(np.cumsum(target)[:-1], b), [np.inf]]
    )
    ranks = np.concatenate([[0.0], np.cumsum(source)])
    for k in range(3):
        for j in range(4):
            inside = integrate.quad(
                lambda c, j=j: (
                    stats.laplace.cdf(cuts[j + 1], c, b) - stats.laplace.cdf(cuts[j], c, b)
                ),
                ranks[k],
                ranks[k + 1],
                epsabs=1e-13,
            )
            assert found[k, j] == pytest.approx(
                inside[0] / source[k], abs=1e-9
            )  # quadrature over a kink


@given(
    distributions=pairs_of_distributions(),
    epsilon=st.sampled_from([0.01, 1.0, 9.0]),
    nudge=st.sampled_from([-1e-9, -1e-15, 0.0, 1e-15, 1e-9]),
)
def test_the_quick_decision_is_the_exact_one(distributions, epsilon, nudge):
    source, target = (
        distribution[distribution > kernel.UNSEEN]
        / distribution[distribution > kernel.UNSEEN].sum()
        for distribution in distributions
    )
    weights = kernel.integer_weights(kernel.laplace_channel(source, 1 / epsilon, target))
    exact = kernel.exact_epsilon(weights)
    for bound in (float(exact) * (1 + nudge), epsilon):
        assert kernel.is_private(weights, bound) == (exact <= Decimal(bound))
    some = np.array([[2**62, 2**62], [2**63, 0]], dtype=np.uint64)
    assert not kernel.is_private(some, 1e9)


EVEN = np.full(101, 1 / 101)


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (optimal, (EVEN, 1.0, np.ones((101, 101))), "at most 100 levels"),
        (optimal_unbiased, (EVEN, 1.0, np.arange(101.0)), "at most 100 levels"),
        *(
            (optimal_unbiased, (EVEN[:2], 1.0, np.array([0.0, bad])), "distinct finite values")
            for bad in (0.0, np.inf)
        ),
    ],
)
def test_what_cannot_be_solved_is_refused_in_one_line(make, arguments, message):
    with pytest.raises(SpecError, match=message) as caught:
        make(*arguments)
    assert "\n" not in str(caught.value)
