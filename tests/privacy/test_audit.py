"""The audit: right mechanisms pass, mechanisms with half the noise are caught, and exact ε* agrees with brute force."""

import math
from dataclasses import replace
from decimal import Decimal

import numpy as np
import pytest

from dpdask.channels import laplace as laplace_channel
from dpdask.errors import SpecError
from dpdask.kernels import channel as channel_kernel
from dpdask.kernels import rank as rank_kernel
from dpdask.privacy.audit import audit_event, channel_epsilon, lower_bound, rank_epsilon
from dpdask.privacy.events import DiscreteGaussian, DiscreteLaplace
from dpdask.privacy.noise import perturb
from dpdask.streams import RunKey, stream


def keyed(name):
    return stream(RunKey.insecure(11), "audit", name)


EVENTS = [
    (DiscreteLaplace(scale=2.0, sensitivity=2, adjacency="replace-one"), 0.0),
    (DiscreteLaplace(scale=1.0, sensitivity=1, adjacency="add-remove"), 0.0),
    (DiscreteLaplace(scale=2.0, sensitivity=1, adjacency="replace-one", count=2), 0.0),
    (DiscreteLaplace(scale=6.0, sensitivity=6, adjacency="replace-one"), 0.0),
    (DiscreteLaplace(scale=4.0, sensitivity=1, adjacency="add-remove", count=4), 1e-6),
    (DiscreteGaussian(sigma=2.0, sensitivity=math.sqrt(2), adjacency="replace-one"), 1e-2),
    (DiscreteGaussian(sigma=2.0, sensitivity=1.0, adjacency="add-remove"), 1e-2),
    (DiscreteGaussian(sigma=6.0, sensitivity=3.0, adjacency="add-remove", count=2), 1e-2),
]


def is_consistent(found):
    """Whether the runs do not contradict the claim."""
    return found.lower_bound <= found.claimed


def halved(event):
    key = "scale" if isinstance(event, DiscreteLaplace) else "sigma"
    return replace(event, **{key: getattr(event, key) / 2})


@pytest.mark.parametrize(("event", "delta"), EVENTS)
def test_the_right_noise_passes_and_half_of_it_is_caught(event, delta):
    right = audit_event(event, delta=delta, n_runs=40_000, rng=keyed("right"))
    assert is_consistent(right)
    assert right.lower_bound > 0.5 * right.claimed  # the audit sees most of what is paid
    rng = keyed("half")
    half = audit_event(
        event,
        delta=delta,
        n_runs=40_000,
        measure=lambda counts: perturb(counts, halved(event), rng=rng),
    )
    assert half.claimed == right.claimed
    assert not is_consistent(half)
    assert (
        audit_event(event, delta=delta, n_runs=10_000, measure=lambda counts: counts).lower_bound
        > 4
    )  # no noise at all


def test_noise_that_is_shared_between_counts_is_caught():
    """One draw for both counts of a pair: their difference is then exact."""
    rng = keyed("shared")
    event = EVENTS[0][0]
    assert not is_consistent(
        audit_event(
            event,
            measure=lambda counts: (
                counts + perturb(np.zeros((len(counts), 1), dtype=np.int64), event, rng=rng)
            ),
        )
    )


def test_the_bound_holds_as_often_as_it_says():
    """On inputs that do not differ in distribution the true ε is 0: the bound may pass it in 1 - confidence of the audits only."""
    rng = keyed("coverage")
    event = DiscreteLaplace(scale=3.0, sensitivity=1, adjacency="add-remove")
    fresh = lambda counts: perturb(np.zeros_like(counts), event, rng=rng)  # noqa: E731 - a measurement that ignores its input
    above = sum(
        lower_bound(fresh, np.array([1]), np.array([0]), delta=0.0, n_runs=400, confidence=0.9) > 0
        for _ in range(200)
    )
    assert above <= 40  # 20 expected at most; 40 happens in one of 10**5


def test_what_delta_allows_is_not_held_against_a_measurement():
    """It gives all away in 3 runs of 10 and nothing in the others: (0, 0.3)-private, and no better."""
    rng = np.random.default_rng(3)
    leaky = lambda counts: np.where(rng.random(counts.shape) < 0.3, counts, 5)  # noqa: E731 - a measurement in one line
    inputs = np.array([9]), np.array([0])
    assert lower_bound(leaky, *inputs, delta=0.3, n_runs=4000, confidence=1 - 1e-9) == 0
    assert lower_bound(leaky, *inputs, delta=0.2, n_runs=4000, confidence=1 - 1e-9) > 1


def test_what_cannot_be_audited_is_refused():
    with pytest.raises(SpecError, match="no finite"):
        audit_event(EVENTS[5][0])
    for wrong in ({"n_runs": 199}, {"confidence": 0.0}, {"confidence": 1.0}):
        with pytest.raises(SpecError, match="audit needs"):
            audit_event(EVENTS[0][0], **wrong)


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 4.0])
def test_a_channel_is_audited_by_the_weights_that_are_sampled(epsilon):
    channel = laplace_channel(np.array([0.1, 0.2, 0.3, 0.4]), epsilon, ordered=True)
    found = channel_epsilon(channel.weights)
    assert found <= channel.epsilon <= epsilon
    assert Decimal(found) >= channel_kernel.exact_epsilon(channel.weights)
    stronger = laplace_channel(np.array([0.1, 0.2, 0.3, 0.4]), 2 * epsilon, ordered=True)
    assert channel_epsilon(stronger.weights) > channel.epsilon
    assert channel_epsilon(channel_kernel.integer_weights(np.eye(2))) == math.inf


def every_pair(noise):
    """ε* by the whole matrix Pr(w | i)."""
    n, margin = noise.n_cells, noise.margin
    size = 256 ** len(noise.weights)
    distribution = np.ones(size)
    for k, row in enumerate(noise.weights):
        distribution *= row.astype(float)[(np.arange(size) >> (8 * k)) & 255] / 2.0**63
    up = noise.sign / 2.0**63
    matrix = np.zeros((n, n + 2 * margin))
    for i in range(n):
        for part, e in (
            (distribution * up, np.arange(size)),
            (distribution * (1 - up), -1 - np.arange(size)),
        ):
            np.add.at(matrix[i], np.clip(i + e, -margin, n - 1 + margin) + margin, part)
    return float(np.log(matrix.max(axis=0) / matrix.min(axis=0)).max())


@pytest.mark.parametrize(
    ("epsilon", "n_cells"), [(0.5, 16), (1.0, 64), (3.0, 33), (8.0, 128), (4.0, 2)]
)
def test_rank_noise_is_audited_like_its_whole_matrix(epsilon, n_cells):
    noise = rank_kernel.rank_noise(epsilon, n_cells)
    assert rank_epsilon(noise) == pytest.approx(every_pair(noise), rel=1e-9)
    assert rank_epsilon(noise) <= noise.epsilon * (1 + 1e-9)


@pytest.mark.parametrize("epsilon", [0.2, 1.0, 16.0])
def test_the_rank_noise_that_jobs_use_keeps_its_claim_and_wastes_little(epsilon):
    noise = rank_kernel.rank_noise(epsilon)
    assert 0.999 * epsilon < rank_epsilon(noise) <= epsilon * (1 + 1e-9)


def test_tables_that_are_not_those_of_the_claim_are_caught():
    noise, stronger = rank_kernel.rank_noise(1.0), rank_kernel.rank_noise(2.0)
    assert rank_epsilon(replace(stronger, epsilon=noise.epsilon)) > 1.9
    biased = replace(noise, sign=noise.sign + noise.sign // 2)
    assert rank_epsilon(biased) > 1.5


def test_rank_noise_too_wide_to_enumerate_keeps_its_own_bound():
    noise = rank_kernel.rank_noise(1e-3)
    assert rank_epsilon(noise) == noise.epsilon
