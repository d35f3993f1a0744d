"""The noise that is really drawn, against its exact distribution: too little fails, too much fails, and the secure and the keyed agree."""

import math
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache

import numpy as np
import pytest
from opendp import measurements
from opendp.mod import OpenDPException
from scipy import stats

from dpdask.errors import SpecError
from dpdask.privacy import noise
from dpdask.privacy.events import DiscreteGaussian, DiscreteLaplace, epsilon, scale_events
from dpdask.streams import RunKey, stream

ALPHA = 1e-10  # how often a right sampler may fail, per test
N = 20_000

Distribution = tuple[np.ndarray, np.ndarray]


def laplace_distribution(scale):
    x = np.arange(-math.ceil(45 * scale) - 1, math.ceil(45 * scale) + 2)
    return x, np.exp(-np.abs(x) / scale) * math.tanh(1 / (2 * scale))


def gaussian_distribution(sigma):
    x = np.arange(-math.ceil(14 * sigma) - 1, math.ceil(14 * sigma) + 2)
    mass = np.exp(-(x**2) / (2 * sigma**2))
    return x, mass / mass.sum()


def spread_fits(draws, distribution):
    """A two-sided test of the mean square."""
    x, mass = distribution
    variance, fourth = (x**2 * mass).sum(), (x.astype(float) ** 4 * mass).sum()
    z = ((draws.astype(float) ** 2).mean() - variance) / math.sqrt(
        (fourth - variance**2) / len(draws)
    )
    return bool(2 * stats.norm.sf(abs(z)) > ALPHA)


def shape_fits(draws, distribution):
    """A chi-square test on about 24 intervals of equal probability."""
    x, mass = distribution
    part = np.minimum((np.cumsum(mass) - mass / 2) * 24, 23).astype(int)
    _, part = np.unique(part, return_inverse=True)
    expected = np.bincount(part, weights=mass) * len(draws)
    inside = np.clip(draws - x[0], 0, len(x) - 1)
    observed = np.bincount(part[inside], minlength=len(expected))
    return bool(
        stats.chi2.sf(((observed - expected) ** 2 / expected).sum(), len(expected) - 1) > ALPHA
    )


def fits(draws, distribution):
    return spread_fits(draws, distribution) and shape_fits(draws, distribution)


def keyed(name):
    return stream(RunKey.insecure(7), "test", name)


def lone(draws):
    """Whether neighbouring draws are uncorrelated."""
    return bool(
        abs(np.corrcoef(np.clip(draws[:-1], -99, 99), np.clip(draws[1:], -99, 99))[0, 1])
        < 7 / math.sqrt(len(draws))
    )


SAMPLERS = [
    (noise.discrete_laplace, laplace_distribution),
    (noise.discrete_gaussian, gaussian_distribution),
]
KINDS = pytest.mark.parametrize(("sample", "distribution"), SAMPLERS, ids=["laplace", "gaussian"])


@KINDS
@pytest.mark.parametrize(("secure", "scale"), [(True, 0.4), (True, 57.2), (False, 3.3)])
def test_the_noise_has_its_distribution_and_neither_half_nor_twice_of_it(
    sample, distribution, secure, scale
):
    def drawn(at):
        return sample(
            np.zeros(N, dtype=np.int64),
            at,
            rng=None if secure else keyed(f"{sample.__name__} {at}"),
        )

    right = drawn(scale)
    assert right.dtype == np.int64
    assert spread_fits(right, distribution(scale))
    assert shape_fits(right, distribution(scale))
    assert lone(right)
    for factor in (0.5, 2.0):
        wrong = drawn(scale * factor)
        assert not spread_fits(wrong, distribution(scale))
        assert not shape_fits(wrong, distribution(scale))


@KINDS
@pytest.mark.parametrize("secure", [True, False], ids=["secure", "keyed"])
def test_noise_is_added_to_each_count_in_its_place(sample, distribution, secure):
    counts = np.array([[0, 2**53], [-(2**53), 12345]]).repeat(6000, axis=1)  # several chunks
    noisy = sample(counts, 2.0, rng=None if secure else keyed("place"))
    assert noisy.shape == counts.shape
    assert np.abs(noisy - counts).max() < 200
    assert fits((noisy - counts).ravel()[:N], distribution(2.0))
    assert sample(np.empty((0, 3), dtype=np.int64), 2.0).shape == (0, 3)
    assert (
        sample(counts[0, :64], 1e6, rng=keyed("a")) == sample(counts[0, :64], 1e6, rng=keyed("a"))
    ).all()
    for other in (None, keyed("b")):  # secure noise never repeats
        assert not (
            sample(counts[0, :64], 1e6, rng=other)
            == sample(counts[0, :64], 1e6, rng=None if other is None else keyed("a"))
        ).all()


def test_the_keyed_noise_does_not_change_unnoticed():
    counts = np.zeros(8, dtype=np.int64)
    assert noise.discrete_laplace(counts, 10.0, rng=keyed("pinned")).tolist() == PINNED_LAPLACE
    assert noise.discrete_gaussian(counts, 10.0, rng=keyed("pinned")).tolist() == PINNED_GAUSSIAN


REFUSED = [
    *(
        (np.zeros(1, dtype=np.int64), scale, "scale")
        for scale in (0.0, -1.0, math.inf, math.nan, 2.0**48 * (1 + 2**-52), 1e300)
    ),
    *(
        (np.array([0, count]), 1.0, "count")
        for count in (2**53 + 1, -(2**53) - 1, 2**63 - 1, -(2**63))
    ),  # it could saturate
    *((np.zeros(2, dtype=type_), 1.0, "int64") for type_ in (float, np.int32, np.uint64)),
]


@KINDS
@pytest.mark.parametrize(("counts", "scale", "words"), REFUSED)
def test_what_could_not_be_noise_is_refused_without_showing_a_count(
    sample, distribution, counts, scale, words
):
    with pytest.raises(SpecError, match=words) as caught:
        sample(counts, scale)
    assert len(counts) == 1 or str(counts[1]) not in str(caught.value) or not counts[1]


def test_the_largest_scale_does_not_saturate():
    drawn = np.abs(noise.discrete_laplace(np.full(200, 2**53), noise.MAX_SCALE) - 2**53)
    assert drawn.max() < 2**56
    assert np.median(drawn) == pytest.approx(noise.MAX_SCALE * math.log(2), rel=0.9)


def test_a_failure_of_the_library_is_not_hidden(monkeypatch):
    def broken(counts):
        raise OpenDPException("FailedFunction", "no entropy", "")

    monkeypatch.setattr(measurements, "make_laplace", lambda *_, **__: broken)
    with pytest.raises(OpenDPException):
        noise.discrete_laplace(np.zeros(3, dtype=np.int64), 1.0)


@pytest.mark.parametrize("sensitivity", [1, 2, 40])
@pytest.mark.parametrize("target", [1e-9, 0.1, 1 / 3, 1.0, 7.7, 100.0])
def test_the_scale_of_an_epsilon_is_rounded_up(sensitivity, target):
    scale = noise.laplace_scale(sensitivity, target)
    assert Fraction(sensitivity) / Fraction(scale) <= Fraction(target)
    assert Fraction(sensitivity) / Fraction(math.nextafter(scale, 0)) > Fraction(target)


# The event and the noise that it tells of: neither can change alone.

LAPLACE = DiscreteLaplace(
    scale=noise.laplace_scale(2, 0.25), sensitivity=2, adjacency="replace-one"
)
GAUSSIAN = DiscreteGaussian(sigma=11.0, sensitivity=math.sqrt(2), adjacency="replace-one")


@lru_cache
def distribution_of(event):
    """The distribution of the noise that would cost what the accountant says of the event, found without asking for its scale."""
    if isinstance(event, DiscreteLaplace):
        return laplace_distribution(
            2 / epsilon(event, 0)
        )  # 2 is the sensitivity of a histogram, counted in tests/references
    [found] = scale_events([replace(GAUSSIAN, sigma=1.0)], epsilon(event, 1e-6), 1e-6)
    assert isinstance(found, DiscreteGaussian)
    return gaussian_distribution(found.sigma)


@pytest.mark.few(2)
@pytest.mark.parametrize("event", [LAPLACE, GAUSSIAN], ids=["laplace", "gaussian"])
@pytest.mark.parametrize("secure", [True, False], ids=["secure", "keyed"])
def test_what_is_drawn_is_what_the_accountant_is_told(event, secure, monkeypatch):
    def drawn():
        return noise.perturb(
            np.zeros(N, dtype=np.int64), event, rng=None if secure else keyed("event")
        )

    assert fits(drawn(), distribution_of(event))
    key = "scale" if isinstance(event, DiscreteLaplace) else "sigma"
    for factor in (0.5, 2.0):
        assert not fits(
            drawn(), distribution_of(replace(event, **{key: getattr(event, key) * factor}))
        )  # the event changed alone
    if isinstance(event, DiscreteLaplace):
        assert not fits(drawn(), distribution_of(replace(event, sensitivity=1)))
    name = f"discrete_{'laplace' if isinstance(event, DiscreteLaplace) else 'gaussian'}"
    honest = getattr(noise, name)
    for factor in (0.5, 2.0):
        with monkeypatch.context() as patch:  # the noise changed alone
            patch.setattr(
                noise,
                name,
                lambda counts, scale, rng=None, factor=factor: honest(
                    counts, scale * factor, rng=rng
                ),
            )
            assert not fits(drawn(), distribution_of(event))


PINNED_LAPLACE = [5, 8, -1, -3, -3, -9, 1, 2]
PINNED_GAUSSIAN = [-1, -3, 2, -19, -9, 4, -2, 4]
