"""The channel of very many levels: what is drawn, its privacy, its invariance and what it keeps, all exact."""

import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import default_rng
from scipy import stats

from dpdask.channels import compute_zero_one, keep_most, optimal
from dpdask.kernels import window as kernel
from dpdask.kernels.channel import alias_tables
from dpdask.mechanisms.dip.columns import WindowMechanism

TOTAL = 2**63


def zipf(n, power, seed=0):
    shares = 1.0 / np.arange(1, n + 1) ** power
    return default_rng(seed).permutation(shares / shares.sum())


def draw(window, codes, words):
    tables = alias_tables(window.apart[None, :])
    return kernel.sample(
        np.asarray(codes, dtype=np.int32),
        np.asarray(words, dtype=np.uint64),
        np.uint64(window.chance),
        *tables,
        window.stays,
        window.masses,
        window.bits,
    )


def n_pairs(x, m, s):
    """How many of the sums of 0..m-1 and 0..s-1 are below x."""
    low, high = min(m, s), max(m, s)
    x = max(0, min(x, m + s - 1))
    left = m + s - 1 - x
    if x <= low:
        return x * (x + 1) // 2
    return low * (low + 1) // 2 + (x - low) * low if x <= high else m * s - left * (left + 1) // 2


def make_matrix(window):
    """T[k][j] in fractions: of the tables, with sums of places counted in whole numbers."""
    n, masses, width = len(window.apart), [int(m) for m in window.masses], 1 << window.bits
    circle, ends = sum(masses), np.cumsum([0, *masses], dtype=object)
    chance = Fraction(window.chance, TOTAL)
    matrix = []
    for k in range(n):
        stay, row = Fraction(int(window.stays[k]), TOTAL), []
        for j in range(n):
            if masses[k]:
                start = ends[j] - ends[k] + width // 2
                hits = sum(
                    n_pairs(start + masses[j] + turn, masses[k], width)
                    - n_pairs(start + turn, masses[k], width)
                    for turn in (-circle, 0, circle)
                )
                moved = Fraction(hits, masses[k] * width)
            else:
                moved = (1 - stay) * Fraction(masses[j], circle) + stay * (j == k)
            row.append(chance * Fraction(int(window.apart[j]), TOTAL) + (1 - chance) * moved)
        matrix.append(row)
    return matrix


def worst(matrix):
    """The largest ratio of two probabilities of one level."""
    columns = [each for each in zip(*matrix, strict=True) if max(each)]
    return max(max(each) / min(each) for each in columns)


@st.composite
def distributions(draw):
    n = draw(st.integers(1, 12))
    rng = default_rng(draw(st.integers(0, 2**32)))
    found = rng.dirichlet(np.full(n, draw(st.sampled_from([0.1, 0.7, 5.0]))))
    found[rng.random(n) < draw(st.sampled_from([0.0, 0.3]))] = 0.0
    return found / found.sum() if found.sum() else np.eye(n)[0]


@settings(max_examples=30)
@given(shares=distributions(), epsilon=st.sampled_from([0.01, 0.3, 1.0, 2.0, 4.0, 8.0, 30.0]))
def test_epsilon_and_the_distribution_are_kept_exactly(shares, epsilon):
    channel = keep_most(shares, epsilon)
    matrix = make_matrix(channel.window)
    assert {sum(row) for row in matrix} == {1}
    ratio = worst(matrix)
    spent = Decimal(ratio.numerator).ln() - Decimal(ratio.denominator).ln()
    assert spent <= kernel.bound_loss(channel.window) + Decimal("1e-25")
    assert kernel.bound_loss(channel.window) <= Decimal(epsilon)
    assert channel.epsilon <= epsilon
    seen = np.flatnonzero(shares > 2.0**-44)
    exact = [Fraction(float(share)) / Fraction(float(shares[seen].sum())) for share in shares]
    for j in range(len(shares)):
        kept = sum(exact[k] * matrix[k][j] for k in seen)
        assert abs(kept - (exact[j] if j in seen else 0)) < Fraction(1, 10**15)
    stays = float(sum(exact[k] * matrix[k][k] for k in seen))
    assert stays == pytest.approx(channel.kept, rel=1e-6)
    assert channel.kept <= channel.kept_at_most * (1 + 1e-9)


def test_the_bound_is_reached_and_a_smaller_chance_breaks_it():
    channel = keep_most(zipf(40, 1.0), 1.0)
    ratio = worst(make_matrix(channel.window))
    assert 1.0 - 1e-9 < math.log(ratio) <= 1.0
    less = channel.window._replace(chance=channel.window.chance - TOTAL // 1000)
    assert math.log(worst(make_matrix(less))) > 1.0005
    assert kernel.bound_loss(less) > Decimal("1.0005")
    with_zero = channel.window._replace(apart=channel.window.apart * (np.arange(40) > 0))
    assert kernel.bound_loss(with_zero) == Decimal("Infinity")


def test_the_rounding_of_a_place_counts_for_rare_levels_too():
    c = TOTAL // 10**8  # so that the frequent level alone has the greater loss, by less than that
    window = kernel.RankWindow(
        chance=TOTAL // 2,
        apart=np.array([TOTAL - 2**19 - c, 2**19, c], dtype=np.uint64),
        stays=np.array([0, 0, 1], dtype=np.uint64),
        masses=np.array([2**61, 2**17, 0], dtype=np.uint64),
        bits=61,
    )
    assert kernel.bound_loss(window) >= (2 + Decimal(2) ** -20).ln()


def test_every_place_goes_where_the_window_says():
    window = kernel.RankWindow(
        TOTAL // 3,
        np.array([2**61, 2**61, 2**61, 2**60, 2**60], dtype=np.uint64),
        np.array([0, 2**62, 0, 0, 0], dtype=np.uint64),
        np.array([3, 0, 7, 0, 5], dtype=np.uint64),
        3,
    )
    places, ends = [0] * 3 + [2] * 7 + [4] * 5, {0: 0, 2: 3, 4: 10}
    for level, start in ends.items():
        mass = int(window.masses[level])
        words = [
            (2**64 - 1, -(-(2**64) * place // mass), offset << 61)
            for place in range(mass)
            for offset in range(8)
        ]
        wanted = [
            places[(start + place + offset - 4) % 15]
            for place in range(mass)
            for offset in range(8)
        ]
        assert draw(window, [level] * len(words), words).tolist() == wanted
        last = draw(window, [level], [(2**64 - 1, 2**64 - 1, 2**64 - 1)])
        assert last.tolist() == [places[(start + mass - 1 + 3) % 15]]
    # a level alone stays, or goes anywhere; one that was never seen goes anywhere
    anywhere = [(2**64 - 1, -(-(2**64) * place // 15), 2**64 - 1) for place in range(15)]
    assert draw(window, [1] * 15, anywhere).tolist() == places
    assert draw(window, [3] * 15, anywhere).tolist() == places
    assert draw(window, [1], [(2**64 - 1, 5, 2**63 - 1)]).tolist() == [1]
    # the coin falls below a third of all words
    seconds = [high * 2**60 + 2 * cell for high in range(16) for cell in range(8)]
    apart = [(2 * (TOTAL // 3) - 1, second, 0) for second in seconds]
    counts = np.bincount(draw(window, [1] * 128, apart))
    assert counts.tolist() == [32, 32, 32, 16, 16]
    assert draw(window, [1], [(2 * (TOTAL // 3), 0, 0)]).tolist() == [1]


def test_draws_follow_the_matrix():
    shares = zipf(30, 1.2, 3)
    window = keep_most(shares, 2.0).window
    matrix = np.array([[float(each) for each in row] for row in make_matrix(window)])
    rng = default_rng(5)
    for level in (int(shares.argmax()), int(shares.argmin())):
        words = rng.integers(0, 2**64, (100_000, 3), dtype=np.uint64)
        counts = np.bincount(draw(window, np.full(100_000, level), words), minlength=30)
        assert stats.chisquare(counts, 100_000 * matrix[level]).pvalue > 1e-4
        other = np.roll(matrix[level], 1)
        assert stats.chisquare(counts, 100_000 * other).pvalue < 1e-12


@pytest.mark.parametrize(("epsilon", "least"), [(0.2, 0.95), (1.0, 0.95), (2.0, 0.95), (4.0, 0.8)])
@pytest.mark.parametrize(
    "shares",
    [zipf(4_000, 0.8), zipf(4_000, 1.0), zipf(700, 1.1), np.full(3_000, 1 / 3_000)],
    ids=["codes", "steep", "few", "flat"],
)
def test_nearly_as_much_is_kept_as_can_be(shares, epsilon, least):
    channel = keep_most(shares, epsilon)
    assert least * channel.kept_at_most <= channel.kept <= channel.kept_at_most
    even = channel.window.masses
    assert channel.kept > float(shares @ shares)
    assert 0 < np.count_nonzero(even) <= len(shares)


@pytest.mark.parametrize("epsilon", [1.0, 8.0, 10.0, 12.0])
def test_very_rare_levels_cost_little(epsilon):
    """Only a window of nearly one width has room for them."""
    shares = np.repeat([1.0, 1e-7], [200, 50])
    found = keep_most(shares / shares.sum(), epsilon)
    assert found.kept > 0.99 * found.kept_at_most


@pytest.mark.parametrize(("epsilon", "least"), [(1.0, 0.99), (4.0, 0.9)])
def test_it_is_near_the_program_where_that_can_be_solved(epsilon, least):
    shares = zipf(40, 1.0)
    solved = optimal(shares, epsilon, compute_zero_one(40), ordered=False)
    kept = float(shares @ np.diag(solved.matrix))
    assert least * kept <= keep_most(shares, epsilon).kept <= kept * (1 + 1e-6)


def test_a_card_tells_the_window_to_its_digits():
    channel = keep_most(zipf(300, 1.0), 1.5)
    told = WindowMechanism(channel=channel).shown["window"]
    read = kernel.read_window(told)
    assert float(kernel.bound_loss(read)) == pytest.approx(channel.epsilon, rel=1e-9)
    assert read.bits == channel.window.bits
