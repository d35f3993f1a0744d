"""The competitors of the paper's tables: their laws, their ε by density ratios or enumeration, and what they refuse."""

import math

import numpy as np
import pytest
from scipy import stats

from dpdask.errors import DataError, SpecError
from pipelines.papers.dip import baselines

EPSILON = 0.8
TINY = 1e-6  # of the statistical tests, seeds fixed


def rng(seed=1):
    return np.random.default_rng(seed)


def laplace_scale_fits(noise, scale):
    return bool(stats.kstest(noise, stats.laplace(scale=scale).cdf).pvalue > TINY)


def test_lrm_adds_laplace_noise_of_the_width_over_epsilon_and_no_other():
    values = rng().uniform(-1.0, 2.0, 40_000)
    noise = baselines.lrm(values, 3.0, EPSILON, rng=rng(2)) - values
    assert laplace_scale_fits(noise, 3.0 / EPSILON)
    assert not laplace_scale_fits(noise, 3.0 / EPSILON * 1.1)
    assert not laplace_scale_fits(noise, 3.0 / EPSILON / 1.1)


@pytest.mark.parametrize(
    ("k", "expected"), [(1, 2.0 * 500), (3, 2.0 * 500 ** (1 / 3)), (math.inf, 2.0)]
)
def test_truncation_has_the_published_rate(k, expected):
    assert baselines.truncation(2.0, k, 10_000, 5.0) == pytest.approx(expected)


@pytest.mark.parametrize("non_negative", [False, True])
def test_opm_of_a_moment_cuts_and_then_adds_noise_of_the_cut_range(non_negative):
    values = np.concatenate([np.full(20_000, 7.0), np.full(20_000, 1e6)])
    bound = baselines.truncation(3.0, 4, len(values), EPSILON)
    assert 7.0 < bound < 1e6
    released = baselines.opm_moment(values, 3.0, 4, EPSILON, non_negative=non_negative, rng=rng(3))
    scale = bound / EPSILON * (1 if non_negative else 2)
    assert laplace_scale_fits(released[:20_000] - 7.0, scale)
    assert laplace_scale_fits(released[20_000:] - bound, scale)
    assert not laplace_scale_fits(released[20_000:] - bound, scale * 1.1)


def test_opm_of_a_ball_is_unbiased_and_stays_on_its_sphere():
    vector, radius, generator = np.array([0.3, -0.6, 0.9]), 1.5, rng(5)
    draws = np.array(
        [baselines.opm_ball(vector, radius, EPSILON, rng=generator) for _ in range(20_000)]
    )
    length = radius * baselines.ball_radius(3, EPSILON)
    np.testing.assert_allclose(np.linalg.norm(draws, axis=1), length, rtol=1e-12)
    error = 5 * length / math.sqrt(3 * len(draws))
    np.testing.assert_allclose(draws.mean(axis=0), vector, atol=error)
    assert (
        np.abs(draws.mean(axis=0) - 1.3 * vector).max() > error
    )  # the test would see a wrong radius


@pytest.mark.parametrize(("d", "exact"), [(1, 1.0), (2, math.pi / 2), (3, 2.0)])
def test_the_sphere_of_a_ball_has_the_published_radius(d, exact):
    assert baselines.ball_radius(d, EPSILON) == pytest.approx(
        exact * (math.exp(EPSILON) + 1) / (math.exp(EPSILON) - 1)
    )
    published = (
        math.sqrt(math.pi)
        / 2
        * d
        * math.gamma((d - 1) / 2 + 1)
        / math.gamma(d / 2 + 1)
        / math.tanh(EPSILON / 2)
    )
    assert baselines.ball_radius(d, EPSILON) == pytest.approx(published)


def sides(vector, generator, n=15_000):
    """Return how often the view of a vector on a line lies on the positive side."""
    return float(
        np.mean([baselines.opm_ball(vector, 1.0, EPSILON, rng=generator)[0] > 0 for _ in range(n)])
    )


def test_opm_on_a_line_is_randomised_response_whose_epsilon_is_exact():
    """For d = 1 the density is constant on two points, so ε is the log ratio of their probabilities."""
    kept = 1 / (1 + math.exp(-EPSILON))
    assert math.log(kept / (1 - kept)) == pytest.approx(EPSILON)
    error = 5 * math.sqrt(kept * (1 - kept) / 15_000)
    assert sides(np.array([1.0]), rng(6)) == pytest.approx(kept, abs=error)
    assert sides(np.array([-1.0]), rng(7)) == pytest.approx(1 - kept, abs=error)
    assert sides(np.array([0.5]), rng(8)) == pytest.approx(
        0.75 * kept + 0.25 * (1 - kept), abs=error
    )
    assert sides(np.array([0.0]), rng(9)) == pytest.approx(0.5, abs=error)


def test_exm_enumerated_costs_epsilon_when_scores_move_by_the_sensitivity():
    """Two neighbouring tables of counts: one row moves from level 0 to level 2; sensitivity 1."""
    one, other = np.array([5.0, 2.0, 9.0]), np.array([4.0, 2.0, 10.0])
    loss = np.log(baselines.exm(one, 1.0, EPSILON) / baselines.exm(other, 1.0, EPSILON))
    assert 0.6 * EPSILON < np.abs(loss).max() <= EPSILON
    rises = np.append(1.0, np.zeros(10_000))
    worst = np.log(baselines.exm(rises, 1.0, EPSILON) / baselines.exm(1.0 - rises, 1.0, EPSILON))
    assert 0.99 * EPSILON < np.abs(worst).max() <= EPSILON
    too_little = np.log(baselines.exm(one, 0.5, EPSILON) / baselines.exm(other, 0.5, EPSILON))
    assert np.abs(too_little).max() > EPSILON


def test_the_naive_mechanisms_share_epsilon_among_the_columns():
    table = np.column_stack([np.linspace(0, 1, 20_000), np.linspace(0, 50, 20_000)])
    noise = baselines.nlrm(table, np.array([1.0, 50.0]), EPSILON, rng=rng(11)) - table
    assert laplace_scale_fits(noise[:, 0], 2 * 1.0 / EPSILON)
    assert laplace_scale_fits(noise[:, 1], 2 * 50.0 / EPSILON)
    assert not laplace_scale_fits(noise[:, 0], 1.0 / EPSILON)
    radii = np.linalg.norm(table, axis=0)
    released = baselines.nopm(table, radii, EPSILON, rng=rng(12))
    np.testing.assert_allclose(
        np.linalg.norm(released, axis=0), radii * baselines.ball_radius(20_000, EPSILON / 2)
    )


ZEROS, ONE = np.zeros(2), {"rng": rng()}
IMPOSSIBLE = [
    *(
        (baselines.lrm, (ZEROS, width, epsilon), ONE)
        for width, epsilon in ((1.0, 0.0), (math.inf, 1.0))
    ),
    *(
        (baselines.truncation, given, {})
        for given in (
            (0.0, 2, 5, 1.0),
            (1.0, 0.5, 5, 1.0),
            (1.0, math.nan, 5, 1.0),
            (1.0, 2, 0, 1.0),
        )
    ),
    (baselines.opm_moment, (ZEROS, 1.0, 2, math.nan), ONE),
    *(
        (baselines.opm_ball, (vector, radius, 1.0), ONE)
        for vector, radius in ((ZEROS, -1.0), (ZEROS[:0], 1.0), (np.eye(2), 1.0))
    ),
    *(
        (baselines.exm, (scores, width, 1.0), {})
        for scores, width in ((ZEROS, 0.0), (ZEROS * math.nan, 1.0), (ZEROS[:0], 1.0))
    ),
    (baselines.nlrm, (np.eye(2), np.ones(3), 1.0), ONE),
    (baselines.nopm, (ZEROS, np.ones(1), 1.0), ONE),
]


def test_impossible_parameters_are_refused():
    for call, given, more in IMPOSSIBLE:
        with pytest.raises(SpecError):
            call(*given, **more)


def test_values_that_break_the_promise_are_refused():
    for call, message in (
        (
            lambda g: baselines.opm_moment(
                np.array([-1.0, 2.0]), 1.0, 2, 1.0, non_negative=True, rng=g
            ),
            "negative",
        ),
        (lambda g: baselines.opm_ball(np.array([3.0, 4.0]), 4.9, 1.0, rng=g), "outside the ball"),
        (lambda g: baselines.lrm(np.array([-1.0, 2.1]), 3.0, EPSILON, rng=g), "differ by more"),
    ):
        with pytest.raises(DataError, match=message):
            call(rng())
