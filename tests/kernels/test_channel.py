"""The Laplace channel against integration, simulation and exact whole numbers."""

import math
from decimal import Decimal, localcontext
from fractions import Fraction

import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from dpdask.kernels import channel as kernel

MOVIELENS = np.array(
    [393068, 776815, 399490, 1640868, 1262797, 4896928, 3177318, 6639798, 2200539, 3612474],
    dtype=float,
)


def frequencies(counts):
    return counts / counts.sum()


@st.composite
def references(draw):
    """Random probabilities of 1 to 300 levels, some tiny, none below the 2**-44 from which a level counts as unseen."""
    n_levels = draw(st.integers(1, 300))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    masses = rng.gamma(draw(st.sampled_from([0.05, 0.5, 5.0])), size=n_levels) + 1e-300
    masses[rng.random(n_levels) < draw(st.sampled_from([0.0, 0.2]))] = 0.0
    return frequencies(np.maximum(masses, masses.sum() * 1e-13 + 1e-300))


@pytest.mark.parametrize("b", [1e-2, 1.0, 1e3, 1e6, 1e9])
def test_uniform_laplace_quantile_inverts_the_cdf(b):
    x = np.linspace(0.01, 0.99, 50)
    c = x + b * math.exp(-1 / (2 * b)) * np.sinh((0.5 - x) / b)
    slope = -b * np.exp(-1 / (2 * b)) * np.cosh((0.5 - x) / b) / b + 1
    assert_allclose(
        kernel.uniform_laplace_quantile(c, b), x, rtol=0, atol=float(np.max(4e-16 / slope))
    )
    ends = kernel.uniform_laplace_quantile(np.array([0.0, 1.0]), b)
    assert ends.tolist() == [-math.inf, math.inf]


@pytest.mark.parametrize(
    "rows",
    [
        [[1.0]],
        [[0.5, 0.5], [1.0, 0.0]],
        [[1 / 3, 1 / 3, 1 / 3], [0.1, 0.2, 0.7], [1e-18, 1.0, 1e-30]],
    ],
)
def test_integer_weights_sum_exactly_to_their_total_and_stay_near(rows):
    channel = np.array(rows)
    weights = kernel.integer_weights(channel)
    assert [sum(row) for row in weights.tolist()] == [2**63] * len(rows)
    assert_allclose(weights / 2.0**63, channel, rtol=0, atol=1e-15)


def test_exact_epsilon_of_known_ratios_is_rounded_up_at_the_fiftieth_digit():
    for low, high in [(1, 3), (2**61, 2**62 + 1), (10**18, 10**18 + 1)]:
        weights = np.array([[low, 2**63 - low], [high, 2**63 - high]], dtype=np.uint64)
        with mpmath.workdps(80):
            exact = max(
                mpmath.log(mpmath.mpf(high) / low),
                mpmath.log(mpmath.mpf(2**63 - low) / (2**63 - high)),
            )
            excess = mpmath.mpf(str(kernel.exact_epsilon(weights))) - exact
        assert 0 <= excess <= mpmath.mpf("2.1e-50")


def test_exact_epsilon_does_not_depend_on_the_callers_decimal_context():
    weights = kernel.integer_weights(kernel.laplace_channel(np.array([0.3, 0.7]), 1.0))
    expected = kernel.exact_epsilon(weights)
    with localcontext(prec=3):
        assert kernel.exact_epsilon(weights) == expected


def test_exact_epsilon_is_infinite_when_only_some_rows_give_a_level_and_zero_when_rows_agree():
    half = 2**62
    assert kernel.exact_epsilon(
        np.array([[half, half], [2 * half, 0]], dtype=np.uint64)
    ) == Decimal("Infinity")
    assert kernel.exact_epsilon(np.array([[half, half, 0], [half, half, 0]], dtype=np.uint64)) == 0
    assert kernel.exact_epsilon(np.array([[2 * half]], dtype=np.uint64)) == 0


@pytest.mark.parametrize("excess", [1e-12, 1e-6, 0.3])
def test_repaired_weights_mend_a_channel_above_epsilon_and_stay_near_it(excess):
    p = frequencies(MOVIELENS)
    channel = kernel.laplace_channel(p, 1.0)
    before = kernel.exact_epsilon(kernel.integer_weights(channel))
    epsilon = float(before) * (1 - excess)
    weights = kernel.repair_weights(channel, p, epsilon)
    assert before > Decimal(epsilon) >= kernel.exact_epsilon(weights)
    assert np.abs(weights / 2.0**63 - channel).max() <= 4 * excess
    assert_allclose(p @ (weights / 2.0**63), p, rtol=0, atol=1e-14)


def test_repaired_weights_mend_an_infinite_exact_epsilon():
    p = np.array([0.25, 0.75])
    weights = kernel.repair_weights(np.eye(2), p, 2.0)
    assert kernel.exact_epsilon(weights) <= 2
    assert_allclose(p @ (weights / 2.0**63), p, rtol=0, atol=1e-14)


def reconstructed(thresholds, aliases):
    """Return the whole-number weights that alias tables stand for."""
    rows, cells = thresholds.shape
    capacity = 2**63 // cells
    result = [[0] * cells for _ in range(rows)]
    for row in range(rows):
        for cell in range(cells):
            threshold = int(thresholds[row, cell])
            assert threshold <= capacity
            result[row][cell] += threshold
            result[row][int(aliases[row, cell])] += capacity - threshold
    return result


@given(probabilities=references())
def test_alias_tables_stand_for_exactly_the_weights(probabilities):
    rng = np.random.default_rng(len(probabilities))
    channel = np.stack(
        [probabilities, rng.permutation(probabilities), np.eye(len(probabilities))[0]]
    )
    weights = kernel.integer_weights(channel)
    for row, exact in zip(
        reconstructed(*kernel.alias_tables(weights)), weights.tolist(), strict=True
    ):
        assert row == exact + [0] * (len(row) - len(exact))


def test_alias_tables_stand_for_exactly_the_weights_of_the_widest_row():
    weights = np.zeros((1, 2**16), dtype=np.uint64)
    weights[0, [0, 2**16 - 1]] = [1, 2**63 - 1]
    (row,) = reconstructed(*kernel.alias_tables(weights))
    assert row == weights[0].tolist()


def test_sample_reads_words_as_the_tables_say():
    weights = np.array([[2**60, 3 * 2**60, 2**63 - 2**62]], dtype=np.uint64)
    root, tables = np.zeros(1, dtype=np.uint16), kernel.make_tables(weights)
    counts = np.zeros(3, dtype=int)
    for cell in range(4):
        for step in range(64):
            word = ((step * 2**55) << 2 | cell) << 1
            words = np.array([word], dtype=np.uint64)
            out = kernel.sample(root, root.astype(np.int32), words, 3, tables)
            counts[out[0]] += 1
    assert counts.tolist() == [
        round(256 * Fraction(weight, 2**63)) for weight in weights[0].tolist()
    ]
