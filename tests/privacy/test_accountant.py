"""The accountant against exact sums, and against the numbers measured before the project began."""

import itertools
import math
from dataclasses import replace
from fractions import Fraction

import mpmath
import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as pld
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import signal

from dpdask.errors import SpecError
from dpdask.privacy import events as accountant
from dpdask.privacy.events import (
    Composed,
    DiscreteGaussian,
    DiscreteLaplace,
    KeySelection,
    LocalRelease,
    compose,
    epsilon,
    scale_events,
    to_dict,
)
from dpdask.privacy.ledger import Charge
from dpdask.privacy.ledger_entries import Book

DELTA = 2.0**-30


def laplace(scale, sensitivity=1, count=1, adjacency="add-remove"):
    return DiscreteLaplace(scale=scale, sensitivity=sensitivity, adjacency=adjacency, count=count)


def gaussian(sigma, sensitivity=1.0, count=1, adjacency="add-remove"):
    return DiscreteGaussian(sigma=sigma, sensitivity=sensitivity, adjacency=adjacency, count=count)


def noise_scale(kind, n, target, delta, sensitivity, adjacency):
    """The smallest scale of the noise of n vectors that costs at most the target."""
    [found] = scale_events(
        [(gaussian if kind == "gaussian" else laplace)(1.0, sensitivity, n, adjacency)],
        target,
        delta,
    )
    return found.sigma if isinstance(found, DiscreteGaussian) else found.scale


def randomised_responses_delta(rate, n, at):
    """The exact δ(ε) of n randomised responses, at 40 digits."""
    with mpmath.workdps(40):
        p = 1 / (1 + mpmath.exp(-mpmath.mpf(rate)))
        terms = (
            mpmath.binomial(n, k)
            * (p ** (n - k) * (1 - p) ** k - mpmath.exp(at) * p**k * (1 - p) ** (n - k))
            for k in range(n + 1)
        )
        return float(sum(term for term in terms if term > 0))


def gaussian_delta(sigma, shifts, at):
    """The exact δ(ε) of a vector moved by whole shifts under discrete Gaussian noise: its loss, summed over every outcome."""
    x = np.arange(-math.ceil(14 * sigma), math.ceil(14 * sigma) + 1)
    distribution = np.exp(-(x**2) / (2 * sigma**2))
    distribution /= distribution.sum()
    moved = np.array([1.0])  # the distribution of Σ shift · noise: all that the loss depends on
    for shift in shifts:
        spread = np.zeros((len(x) - 1) * abs(shift) + 1)
        spread[:: abs(shift)] = distribution
        moved = np.maximum(signal.fftconvolve(moved, spread), 0.0)
    position = np.arange(len(moved)) - (len(moved) - 1) / 2
    loss = (2 * position + sum(shift**2 for shift in shifts)) / (2 * sigma**2)
    return float((moved * np.maximum(-np.expm1(at - loss), 0.0))[loss > at].sum())


@pytest.mark.parametrize(
    ("kind", "n", "sensitivity", "adjacency", "expected"),
    [
        ("laplace", 105, 1, "add-remove", 77.6),
        ("laplace", 105, 2, "replace-one", 155.0),
        ("laplace", 210, 1, "replace-one", 111.6),  # a replaced row as two unit changes
        ("gaussian", 105, 1.0, "add-remove", 56.4),
        ("gaussian", 105, math.sqrt(2), "replace-one", 79.8),
    ],
)
def test_the_noise_of_105_histograms_is_as_measured(kind, n, sensitivity, adjacency, expected):
    scale = noise_scale(kind, n, 1.0, DELTA, sensitivity, adjacency)
    assert scale * (math.sqrt(2) if kind == "laplace" else 1.0) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(("rate", "n"), [(0.018, 105), (0.1, 20), (1.0, 5), (0.003, 400)])
@pytest.mark.parametrize("delta", [1e-11, 1e-6, 1e-2])
def test_randomised_responses_cost_what_the_exact_sum_says_and_not_less(rate, n, delta):
    for event in (LocalRelease(epsilon=rate, n=n), laplace(1 / rate, count=n)):
        found = epsilon(event, delta)
        assert randomised_responses_delta(rate, n, found) <= delta
        assert found == 0 or randomised_responses_delta(rate, n, 0.998 * found) > delta


@pytest.mark.parametrize(
    ("sigma", "sensitivity", "worst"),
    [
        (1.5, 1.0, [(1,)]),
        (7.0, math.sqrt(2), [(1, -1), (1,)]),
        (3.0, math.sqrt(3), [(1, 1, 1)]),
        (20.0, 2.0, [(2,), (1, 1, 1, 1)]),
        (12.0, 3.0, [(3,), (2, 2, 1), (1,) * 9, (2, 1, 1, 1, 1, 1)]),
        (80.0, 1.0, [(1,)]),
        (70.0, 20 * math.sqrt(2), [(20, -20)]),
        (1.2, 2.0, [(2,), (1, 1, 1, 1)]),
    ],
)
@pytest.mark.parametrize("delta", [1e-9, 1e-5, 1e-2])
def test_the_discrete_gaussian_costs_no_less_than_the_exact_sum_and_little_more(
    sigma, sensitivity, worst, delta
):
    found = epsilon(gaussian(sigma, sensitivity), delta)
    assert all(gaussian_delta(sigma, shifts, found) <= delta for shifts in worst)
    room = (
        0.6 if sigma < 2 and sensitivity >= 2 else 1 - 2.1 / sigma**2 - 0.002
    )  # what the stand-in's σ² - 2 gives away
    assert found < 1e-12 or any(
        gaussian_delta(sigma, shifts, room * found) > delta for shifts in worst
    )


def test_a_scale_that_is_a_power_of_two_is_found():
    """The next smaller number of as many bits is half as far as the next larger one."""
    assert noise_scale("laplace", 3, 3.0, 5e-7, 1, "add-remove") == 1.0
    steps = [accountant._shorten(2.0, step) for step in (-1, 0, 1)]
    assert steps == [2.0 - 2.0**-24, 2.0, 2.0 + 2.0**-23]
    assert accountant._shorten(steps[0], 1) == 2.0


@settings(deadline=None, max_examples=25)
@given(st.lists(st.tuples(st.floats(0.01, 3), st.integers(1, 30)), min_size=1, max_size=4))
def test_pure_epsilons_add_up_rounded_up(parts):
    events = [LocalRelease(epsilon=rate, n=n) for rate, n in parts]
    exact = sum(Fraction(rate) * n for rate, n in parts)
    found = epsilon(events, 0)
    assert exact <= Fraction(found) <= exact * (1 + Fraction(1, 2**50))
    assert epsilon(events, 1e-6) <= found
    assert epsilon(Composed(events=tuple(events)), 1e-6) == epsilon(events, 1e-6)


def test_less_delta_more_events_or_less_noise_never_cost_less():
    deltas = [
        epsilon(gaussian(10.0, count=5), delta)
        for delta in (0.0, 1e-300, 1e-15, 1e-9, 1e-6, 1e-2, 0.5)
    ]
    assert deltas[0] == math.inf
    assert all(tight >= loose for tight, loose in itertools.pairwise(deltas))
    assert math.isfinite(
        deltas[1]
    )  # where doubles resolve no distribution, concentrated privacy still bounds it
    scales = [
        epsilon(gaussian(sigma, math.sqrt(2), 105, "replace-one"), DELTA)
        for sigma in (1.0, 2.0, 30.0, 63.9, 64.1, 200.0)
    ]
    assert all(less >= more for less, more in itertools.pairwise(scales))
    counts = [epsilon(laplace(40.0, count=n), DELTA) for n in (1, 2, 10, 100)]
    assert all(few <= many for few, many in itertools.pairwise(counts))
    parts = [
        gaussian(50.0, math.sqrt(2), 3, "replace-one"),
        LocalRelease(epsilon=0.5),
        laplace(8.0, 2, 3, "replace-one"),
    ]
    assert (
        max(epsilon(part, 1e-9) for part in parts)
        < epsilon(parts, 1e-9)
        < sum(epsilon(part, 1e-9 / 3) for part in parts)
    )
    assert epsilon([], 0) == epsilon([], 1e-6) == epsilon(Composed(events=()), 1e-6) == 0


SELECTED = KeySelection(
    noise=DiscreteLaplace(scale=2.0, sensitivity=1, adjacency="add-remove"), keys=1, delta=1e-9
)
REFUSED = {
    "a δ below 0": lambda: epsilon(LocalRelease(epsilon=1.0), -1e-9),
    "a δ below 0 with keys": lambda: epsilon([SELECTED], -1e-9),
    "a δ of NaN with keys": lambda: epsilon([SELECTED], math.nan),
    "a δ of 1": lambda: epsilon(LocalRelease(epsilon=1.0), 1.0),
    "a δ of NaN": lambda: epsilon(LocalRelease(epsilon=1.0), math.nan),
    "two adjacencies": lambda: epsilon([laplace(2.0), laplace(2.0, adjacency="replace-one")], 0),
    "an adjacency and rows": lambda: epsilon([laplace(2.0), LocalRelease(epsilon=1.0)], 0),
    "Gaussian noise without δ": lambda: noise_scale("gaussian", 1, 1.0, 0.0, 1.0, "add-remove"),
    "half a count": lambda: noise_scale("laplace", 1, 1.0, 0.0, 1.5, "add-remove"),
    "no ε": lambda: noise_scale("laplace", 1, 0.0, 0.0, 1, "add-remove"),
    "an infinite ε": lambda: noise_scale("laplace", 1, math.inf, 0.0, 1, "add-remove"),
    "a δ of 1 for noise": lambda: noise_scale("laplace", 1, 1.0, 1.0, 1, "add-remove"),
    "no vector": lambda: noise_scale("laplace", 0, 1.0, 1e-6, 1, "add-remove"),
    "an unknown adjacency": lambda: noise_scale("laplace", 1, 1.0, 0.0, 1, "both"),
    "an event of another format": lambda: compose(
        [charge(1.0, 0.0, {"format": 2, "kind": "local-release", "epsilon": 1.0, "n": 1})], 0.0
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_is_refused(what):
    with pytest.raises(SpecError):
        REFUSED[what]()


@pytest.mark.parametrize(
    ("kind", "n", "target", "delta", "sensitivity"),
    [
        ("laplace", 3, 0.7, 0.0, 2),
        ("laplace", 40, 0.7, 1e-7, 2),
        ("gaussian", 1, 3.0, 1e-9, 1.0),
        ("gaussian", 7, 0.1, 1e-6, 5.0),
        ("gaussian", 2, 20.0, 1e-6, 2.0),
    ],
)
def test_the_scale_is_enough_and_hardly_more(kind, n, target, delta, sensitivity):
    scale = noise_scale(kind, n, target, delta, sensitivity, "replace-one")
    event = laplace if kind == "laplace" else gaussian
    assert epsilon(event(scale, sensitivity, n, "replace-one"), delta) <= target
    assert epsilon(event(scale * (1 - 1e-5), sensitivity, n, "replace-one"), delta) > target


def charge(epsilon, delta=0.0, event=None):
    return Charge(epsilon=epsilon, delta=delta, event=event or {})


def test_charges_with_events_compose_by_their_events():
    event = gaussian(56.5, count=35)
    charges = [charge(0.6, DELTA, to_dict(event))] * 3
    spent = compose(charges, DELTA)
    assert (
        epsilon([event] * 3, DELTA) < spent < 1.25
    )  # the jobs are chosen one after the other: no PLD, a concentrated bound
    assert compose(charges, 0.0) == math.inf


def test_charges_are_plain_sums_as_long_as_their_deltas_fit_half_of_the_limit():
    noise = gaussian(56.5)
    small, pure = charge(0.6, 1e-7, to_dict(noise)), charge(1.0, 0.0, to_dict(laplace(1.0)))
    assert epsilon([noise], 1e-7) <= 0.6
    for charges in ([small, pure], [pure, small], [pure, pure, small, small]):
        total, deltas = (
            sum(each.epsilon for each in charges),
            sum(Fraction(each.delta) for each in charges),
        )
        assert compose(charges, float(2 * deltas) * (1 + 1e-9)) == pytest.approx(total, rel=1e-12)
        assert compose(charges, float(2 * deltas) * (1 - 1e-9)) > 2 * total
    declared_too_little = charge(0.01, 1e-7, to_dict(noise))
    assert compose([pure, declared_too_little], 1e-6) > 2.0
    other = charge(1.0, 6e-7, to_dict(LocalRelease(epsilon=1.0)))
    with pytest.raises(SpecError, match="cannot be added up"):
        compose([small, charge(1.0, 6e-7), other], 1e-6)
    large = charge(0.6, 6e-7, to_dict(noise))  # more than half of the limit
    assert compose([large], 1e-6) <= 0.6
    assert compose([large, pure, pure], 1e-6) > 4.0


def test_the_order_of_charges_changes_nothing():
    """A run that is voided and intended again stands where it stood first."""
    charges = [
        charge(0.6, 6e-7, to_dict(gaussian(56.5))),
        charge(1.0, 0.0, to_dict(laplace(1.0))),
        charge(0.2, 1e-7, to_dict(gaussian(150.0))),
    ]
    for delta in (5e-7, 1e-6, 2e-6):
        assert len({compose(order, delta) for order in itertools.permutations(charges)}) == 1
        totals = [compose(charges[:n], delta) for n in range(1, 4)]
        assert totals == sorted(totals)


@pytest.mark.parametrize("adjacency", ["replace-one", "add-remove"])
def test_what_a_refusal_costs_covers_its_event(adjacency):
    """Otherwise one charged refusal would end the plain sums of its dataset."""
    rng = np.random.default_rng(6)
    for _ in range(50):
        cost, limit = rng.uniform(1e-4, 0.01), rng.uniform(1.1, 9.0)
        event = Composed(events=(laplace(1.0 / cost, adjacency=adjacency),), unit="row")
        exact = epsilon([event], 0.0)
        book = Book(
            dataset="people",
            epsilon=limit,
            delta=0.0,
            created="",
            head="",
            entries=(),
            compose=compose,
        )
        priced = book.price_refusal(charge(exact, 0.0, to_dict(event)))
        assert priced.epsilon == limit / 100
        assert accountant._is_believed(priced)


def test_what_plain_sums_may_leave_uncovered_is_taken_from_the_concentrated_bound():
    """A sequence of jobs may end under either bound, whichever the outputs make the shorter one, so both together have the limit's δ."""
    many = [charge(0.6, 1e-8, to_dict(gaussian(56.5)))] * 40
    one = [
        charge(0.6, 0.5, to_dict(gaussian(56.5, count=40)))
    ]  # the same noise as one charge, whose declared δ leaves the concentrated bound
    assert compose(many, 1e-6) == pytest.approx(compose(one, 5e-7), rel=1e-9)
    assert compose(many, 1e-6) < sum(each.epsilon for each in many)


def test_charges_without_events_are_any_mechanism_of_their_epsilon_and_delta():
    charges = [charge(0.3, 1e-7), charge(0.4, 2e-7)]
    assert compose(charges, 5e-7) == math.inf  # half of the limit does not cover their deltas
    assert compose(charges, 7e-7) == pytest.approx(0.7, rel=1e-6)
    assert compose([charge(0.0, 1e-7)], 1e-6) == 0
    assert compose([charge(5.0, 0.0, to_dict(Composed(events=())))], 0.0) == 5.0
    assert (
        compose([charge(1.0, 0.0, to_dict(laplace(1.0)))] * 2, 5e-324) == 2.0
    )  # no limit is too small to be halved
    known = charge(0.6, 0.0, to_dict(LocalRelease(epsilon=0.6)))
    assert (
        compose([known] * 9 + [charge(0.0, 6e-7)], 1e-6) == math.inf
    )  # a concentrated bound knows no δ without an event
    assert compose([charge(0.25), charge(0.5)], 0.0) == 0.75
    spent = compose([charge(0.01)] * 1000 + [charge(1.0, 5e-7)], 1e-6)
    assert spent >= epsilon([LocalRelease(epsilon=0.01, n=1000), LocalRelease(epsilon=1.0)], 1e-6)


def test_what_different_units_pay_is_not_added_up():
    row, user, other = (
        to_dict(LocalRelease(epsilon=1.0, unit=unit))
        for unit in ("row", "column user", "column film")
    )
    assert compose([charge(1.0, 0.0, user)] * 2, 0.0) == 2.0
    for event in (row, other):
        with pytest.raises(SpecError, match="different units"):
            compose([charge(1.0, 0.0, user), charge(1.0, 0.0, event)], 0.0)
    assert compose([charge(1.0, 0.0, user), charge(0.5)], 0.0) == 1.5


LARGE_DELTAS = [
    (0.01, 0.3),
    (2.0, 0.99),
    *(pytest.param(1e-3, delta, marks=pytest.mark.slow) for delta in (0.05, 0.3)),
]


@pytest.mark.few(1)
@pytest.mark.parametrize(("epsilon", "delta"), LARGE_DELTAS)
def test_a_large_delta_that_makes_noise_free_ends_the_search(epsilon, delta):
    """Beside a large δ some scales cost nothing, whose logarithm no secant may take."""
    drafts = [
        DiscreteGaussian(sigma=1.0, sensitivity=1.0, adjacency="add-remove", count=count)
        for count in (4, 6)
    ]
    found = scale_events(drafts, epsilon, delta)
    assert accountant.epsilon(Composed(events=found), delta) <= epsilon
    less = [
        replace(event, sigma=event.sigma * (1 - 1e-6))
        for event in found
        if isinstance(event, DiscreteGaussian)
    ]
    assert accountant.epsilon(Composed(events=tuple(less)), delta) > epsilon


def test_the_last_bits_of_a_cost_which_processors_differ_in_do_not_change_the_scale(monkeypatch):
    """A copula's noise, by which all records follow: its scale is searched with costs that are wrong by some units in their last place."""
    events, rng = (
        [gaussian(1.7, math.sqrt(2), 7, "replace-one"), gaussian(4.1, 7.746, 1, "replace-one")],
        np.random.default_rng(1),
    )
    exact, wrong = accountant._epsilon, {}

    def elsewhere(atoms, delta):
        return wrong.setdefault(atoms, exact(atoms, delta) * (1.0 + 2.0**-50 * rng.integers(-4, 5)))

    expected = scale_events(events, 4.0, 1e-6)
    monkeypatch.setattr(accountant, "_epsilon", elsewhere)
    assert scale_events(events, 4.0, 1e-6) == expected
    assert len(wrong) > 3
    assert exact(tuple(expected), 1e-6) <= 4.0 * (1.0 + 1e-12)
    assert (
        exact(tuple(replace(event, sigma=event.sigma * (1.0 - 1e-7)) for event in expected), 1e-6)
        > 4.0
    )


@pytest.mark.parametrize("sigma", [1.5, 10.0, 40.0])
def test_noise_on_a_fine_lattice_costs_what_continuous_noise_does(sigma):
    """Many counts may change by little there, and each of them adds nothing that can be seen."""
    fine = pld.from_gaussian_mechanism(sigma, value_discretization_interval=1e-5)
    continuous = fine.get_epsilon_for_delta(1e-9)
    for whole in (2.0**10, 2.0**20, 2.0**26):
        found = epsilon(gaussian(sigma * whole, sensitivity=whole, count=1), 1e-9)
        assert continuous * (1 - 1e-3) <= found <= continuous * (1 + 1e-3)
