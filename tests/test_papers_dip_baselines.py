"""The competitors of the paper's tables: their laws, their ε by density ratios or enumeration, and what they refuse."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from dpdask.errors import DataError, SpecError
from pipelines.papers.dip import baselines

EPSILON = 0.8
TINY = 1e-6  # of the statistical tests, seeds fixed


def rng(seed: int = 1) -> np.random.Generator:
    return np.random.default_rng(seed)


def laplace_scale_fits(noise: np.ndarray, scale: float) -> bool:
    return bool(stats.kstest(noise, stats.laplace(scale=scale).cdf).pvalue > TINY)


def test_lrm_adds_laplace_noise_of_the_width_over_epsilon_and_no_other() -> None:
    values = rng().uniform(-1.0, 2.0, 40_000)
    noise = baselines.lrm(values, 3.0, EPSILON, rng=rng(2)) - values
    assert laplace_scale_fits(noise, 3.0 / EPSILON)
    assert not laplace_scale_fits(noise, 3.0 / EPSILON * 1.1)
    assert not laplace_scale_fits(noise, 3.0 / EPSILON / 1.1)


def test_the_density_of_lrm_changes_by_epsilon_over_the_width_and_by_less_if_closer() -> None:
    outputs = np.linspace(-30, 30, 4001)
    law = stats.laplace(scale=3.0 / EPSILON)
    loss = law.logpdf(outputs - 2.0) - law.logpdf(outputs + 1.0)
    assert np.abs(loss).max() == pytest.approx(EPSILON, rel=1e-12)
    with pytest.raises(DataError, match="differ by more"):
        baselines.lrm(np.array([-1.0, 2.1]), 3.0, EPSILON, rng=rng())


@pytest.mark.parametrize(
    ("k", "expected"), [(1, 2.0 * 500), (3, 2.0 * 500 ** (1 / 3)), (math.inf, 2.0)]
)
def test_truncation_has_the_published_rate(k: float, expected: float) -> None:
    assert baselines.truncation(2.0, k, 10_000, 5.0) == pytest.approx(expected)


@pytest.mark.parametrize("non_negative", [False, True])
def test_opm_of_a_moment_cuts_and_then_adds_noise_of_the_cut_range(non_negative: bool) -> None:
    values = np.concatenate([np.full(20_000, 7.0), np.full(20_000, 1e6)])
    bound = baselines.truncation(3.0, 4, len(values), EPSILON)
    assert 7.0 < bound < 1e6
    released = baselines.opm_moment(values, 3.0, 4, EPSILON, non_negative=non_negative, rng=rng(3))
    scale = bound / EPSILON * (1 if non_negative else 2)
    assert laplace_scale_fits(released[:20_000] - 7.0, scale)
    assert laplace_scale_fits(released[20_000:] - bound, scale)
    assert not laplace_scale_fits(released[20_000:] - bound, scale * 1.1)


def test_opm_of_a_moment_has_expectation_of_the_cut_values_and_its_exact_variance() -> None:
    values = np.array([-9.0, -1.0, 0.5, 40.0])
    bound = baselines.truncation(2.0, 2, 4, 2.0)
    draws = np.array(
        [
            baselines.opm_moment(values, 2.0, 2, 2.0, rng=generator).mean()
            for generator in [rng(4)]
            for _ in range(20_000)
        ]
    )
    exact = 2 * (2 * bound / 2.0) ** 2 / 4
    assert draws.mean() == pytest.approx(
        np.clip(values, -bound, bound).mean(), abs=5 * math.sqrt(exact / len(draws))
    )
    assert draws.var() == pytest.approx(exact, rel=0.06)


def test_opm_of_a_ball_is_unbiased_and_stays_on_its_sphere() -> None:
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
def test_the_sphere_of_a_ball_has_the_published_radius(d: int, exact: float) -> None:
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


def sides(vector: np.ndarray, generator: np.random.Generator, n: int = 15_000) -> float:
    """Return how often the view of a vector on a line lies on the positive side."""
    return float(
        np.mean([baselines.opm_ball(vector, 1.0, EPSILON, rng=generator)[0] > 0 for _ in range(n)])
    )


def test_opm_on_a_line_is_randomised_response_whose_epsilon_is_exact() -> None:
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


def test_opm_in_the_plane_puts_epsilon_between_its_half_circles_and_nothing_inside() -> None:
    generator, up = rng(10), np.array([0.0, 1.0])
    draws = np.array([baselines.opm_ball(up, 1.0, EPSILON, rng=generator) for _ in range(15_000)])
    upper = draws[draws[:, 1] > 0]
    kept = 1 / (1 + math.exp(-EPSILON))
    assert len(upper) / len(draws) == pytest.approx(
        kept, abs=5 * math.sqrt(kept * (1 - kept) / len(draws))
    )
    angles = np.arctan2(upper[:, 1], upper[:, 0])
    assert stats.kstest(angles, stats.uniform(0, math.pi).cdf).pvalue > TINY
    assert stats.kstest(angles, stats.uniform(0, math.pi * 0.95).cdf).pvalue < TINY


def test_exm_enumerated_costs_epsilon_when_scores_move_by_the_sensitivity() -> None:
    """Two neighbouring tables of counts: one row moves from level 0 to level 2; sensitivity 1."""
    one, other = np.array([5.0, 2.0, 9.0]), np.array([4.0, 2.0, 10.0])
    loss = np.log(baselines.exm(one, 1.0, EPSILON) / baselines.exm(other, 1.0, EPSILON))
    assert 0.6 * EPSILON < np.abs(loss).max() <= EPSILON
    rises = np.append(1.0, np.zeros(10_000))
    worst = np.log(baselines.exm(rises, 1.0, EPSILON) / baselines.exm(1.0 - rises, 1.0, EPSILON))
    assert 0.99 * EPSILON < np.abs(worst).max() <= EPSILON
    too_little = np.log(baselines.exm(one, 0.5, EPSILON) / baselines.exm(other, 0.5, EPSILON))
    assert np.abs(too_little).max() > EPSILON


def test_exm_is_proportional_to_exponentials_and_survives_large_scores() -> None:
    scores = np.array([0.0, 1.0, 3.0])
    expected = np.exp(EPSILON * scores / 2)
    np.testing.assert_allclose(baselines.exm(scores, 1.0, EPSILON), expected / expected.sum())
    np.testing.assert_allclose(baselines.exm(scores + 1e6, 1.0, EPSILON), expected / expected.sum())


def test_the_naive_mechanisms_share_epsilon_among_the_columns() -> None:
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


def test_draws_repeat_with_their_generator() -> None:
    vector = np.array([0.1, 0.2])
    for draw in (
        lambda g: baselines.lrm(vector, 1.0, 1.0, rng=g),
        lambda g: baselines.opm_ball(vector, 1.0, 1.0, rng=g),
    ):
        assert draw(rng(13)).tolist() == draw(rng(13)).tolist() != draw(rng(14)).tolist()


@pytest.mark.parametrize(
    "call",
    [
        lambda g: baselines.lrm(np.zeros(2), 1.0, 0.0, rng=g),
        lambda g: baselines.lrm(np.zeros(2), math.inf, 1.0, rng=g),
        lambda g: baselines.truncation(0.0, 2, 5, 1.0),
        lambda g: baselines.truncation(1.0, 0.5, 5, 1.0),
        lambda g: baselines.truncation(1.0, math.nan, 5, 1.0),
        lambda g: baselines.truncation(1.0, 2, 0, 1.0),
        lambda g: baselines.opm_moment(np.zeros(2), 1.0, 2, math.nan, rng=g),
        lambda g: baselines.opm_ball(np.zeros(2), -1.0, 1.0, rng=g),
        lambda g: baselines.opm_ball(np.zeros(0), 1.0, 1.0, rng=g),
        lambda g: baselines.opm_ball(np.zeros((2, 2)), 1.0, 1.0, rng=g),
        lambda g: baselines.exm(np.zeros(3), 0.0, 1.0),
        lambda g: baselines.exm(np.array([0.0, math.nan]), 1.0, 1.0),
        lambda g: baselines.exm(np.zeros(0), 1.0, 1.0),
        lambda g: baselines.nlrm(np.zeros((4, 2)), np.ones(3), 1.0, rng=g),
        lambda g: baselines.nopm(np.zeros(4), np.ones(1), 1.0, rng=g),
    ],
)
def test_impossible_parameters_are_refused(call) -> None:
    with pytest.raises(SpecError):
        call(rng())


def test_values_that_break_the_promise_are_refused() -> None:
    with pytest.raises(DataError, match="negative"):
        baselines.opm_moment(np.array([-1.0, 2.0]), 1.0, 2, 1.0, non_negative=True, rng=rng())
    with pytest.raises(DataError, match="outside the ball"):
        baselines.opm_ball(np.array([3.0, 4.0]), 4.9, 1.0, rng=rng())
