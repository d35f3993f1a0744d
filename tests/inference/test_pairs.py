"""The table of two columns with noise of their own, also where the noise merges levels: its intervals hold, and follow how dependent the columns seem."""

import numpy as np
import pytest
from numpy.random import default_rng
from scipy import stats

from dpdask.inference.pairs import Margin, estimate_pairs

N = 20_000
MERGES = np.array([[0.7, 0.15, 0.15], [0.1, 0.45, 0.45], [0.1, 0.45, 0.45]])
LINE = np.kron(0.7 * np.eye(2) + 0.15, np.full((2, 2), 0.5))


def release(joint, one, two, rng, *, numbers=(None, None)):
    """Return what `estimate_pairs` says of rows that are drawn from a joint distribution and released."""
    channel = np.kron(one, two)
    counts = rng.multinomial(N, joint.ravel() @ channel).reshape(joint.shape)
    margins = []
    for matrix, share, values in zip(
        (one, two), (joint.sum(1), joint.sum(0)), numbers, strict=True
    ):
        error = np.sqrt(share * (1 - share) / N)
        drawn = rng.multinomial(N, share) / N
        margins.append(Margin(matrix=matrix, share=drawn, error=error, numbers=values))
    return estimate_pairs(*margins, counts.astype(float))


def draw_joint(rng, spread, axes=None):
    """Return a joint distribution whose logarithm has random interactions, or one of the numbers' product."""
    if axes is not None:
        found = np.exp(spread * rng.normal() * np.outer(*axes))
    else:
        found = np.exp(spread * rng.normal(size=(3, 3)))
    return found / found.sum()


def test_a_channel_that_determines_the_pair_gives_it():
    rng, one = default_rng(1), 0.8 * np.eye(3) + 0.2 / 3
    found = []
    joint = draw_joint(rng, 0.8)
    for _ in range(100):
        value, error, bias = release(joint, one, one, rng)
        found.append((value, error, bias))
    value, error, bias = map(np.array, zip(*found, strict=True))
    spread = value.std(axis=0)
    assert (np.abs(value.mean(axis=0) - joint) < 0.5 * spread).all()
    ratio = np.sqrt((error**2).mean(axis=0)) / spread
    assert 0.8 < np.median(ratio) < 1.25
    assert (bias < 0.6 * error).all()


@pytest.mark.parametrize("spread", [0.2, 0.8])
def test_intervals_hold_where_levels_are_merged_and_the_error_alone_does_not(spread):
    rng = default_rng(2)
    held, alone, widths = [], [], []
    for _ in range(60):
        joint = draw_joint(rng, spread)
        value, error, bias = release(joint, MERGES, MERGES, rng)
        off = np.abs(value - joint)
        held.append(off <= 1.96 * error + bias)
        alone.append(off <= 1.96 * error)
        widths.append((1.96 * error + bias) / np.minimum.outer(joint.sum(1), joint.sum(0)))
    assert np.mean(held) > 0.93
    assert np.mean(alone) < 0.85
    assert np.mean(widths) < (0.35 if spread < 0.5 else 0.6)


def test_numbers_of_both_columns_say_how_merged_levels_differ():
    rng, values = default_rng(3), np.array([-1.5, -0.5, 0.5, 1.5])
    off, plain = [], []
    for _ in range(40):
        joint = draw_joint(rng, 0.3, (values, values))
        found = release(joint, LINE, LINE, rng, numbers=(values, values))
        off.append(np.abs(found[0] - joint).mean())
        plain.append(np.abs(release(joint, LINE, LINE, rng)[0] - joint).mean())
    assert np.mean(off) < 0.6 * np.mean(plain)


def test_levels_that_cannot_be_released_have_no_error():
    rng = default_rng(4)
    counts = rng.multinomial(N, [0.3, 0.2, 0.1, 0.4]).reshape(2, 2).astype(float)
    known = Margin(matrix=np.eye(2), share=np.array([0.5, 0.5]), error=np.full(2, 0.003))
    absent = Margin(matrix=np.eye(2), share=np.array([1.0, 0.0]), error=np.array([0.003, np.nan]))
    value, error, bias = estimate_pairs(known, absent, counts)
    assert (value[:, 1] == 0.0).all()
    assert (error[:, 1] == 0.0).all()
    assert (bias[:, 1] == 0.0).all()
    assert (error[:, 0] > 0.0).all()


def test_the_error_of_independent_columns_is_that_of_the_margins():
    rng, one = default_rng(5), np.full((3, 3), 1.0 / 3.0) * 0.999 + 0.001 * np.eye(3)
    joint = np.outer([0.5, 0.3, 0.2], [0.2, 0.2, 0.6])
    z = [
        (value - joint) / error
        for value, error, _ in (release(joint, one, one, rng) for _ in range(200))
    ]
    assert 0.85 < np.sqrt(np.mean(np.square(z))) < 1.15
    assert stats.kstest(np.ravel(z)[::9], "norm").pvalue > 1e-4
