"""Interval-differential privacy: DIP's own draws in the column's numbers, then a range of them, which cannot cost more."""

import math
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pyarrow as pa
import pytest
from e2e.helpers import continuous, discrete, mixed, schema_of
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mechanisms.containing import held_by
from scipy import stats

from dpdask.codec import LevelCodec, codec_for
from dpdask.documents import validate
from dpdask.errors import SpecError
from dpdask.kernels.channel import TOTAL_BITS
from dpdask.mechanisms.dip.columns import BinMechanism, LevelMechanism, RankMechanism
from dpdask.mechanisms.interval.design import ScipyDistribution
from dpdask.mechanisms.interval.fit import fit_perturbation
from dpdask.mechanisms.interval.release import (
    DipPerturbation,
    IntervalRelease,
    is_lattice,
    to_numbers,
)
from dpdask.mechanisms.interval.spec import IntervalSpec, RandomRangesMechanism, check_designs
from dpdask.privacy import Budget
from dpdask.privacy.events import LocalRelease, round_up_sum
from dpdask.schema import Column
from dpdask.streams import RunKey, stream, words

TINY = 1e-6  # the chance that a right mechanism fails a test
LEVELS = [1, 2, 3, 4, 5]
WEIGHTS = [0.1, 0.2, 0.4, 0.2, 0.1]
RATING = discrete(LEVELS)
PRICE = continuous([0.0, 1.0], outside="refuse")
AMOUNT = mixed(atoms=[0.0], bounds=[0.0, 100.0], outside="refuse")
AGE = continuous([0, 120], outside="refuse")
UNIT = {"name": "uniform", "loc": 0, "scale": 1}
KNOWN = {
    "rating": {"kind": "known", "probabilities": WEIGHTS},
    "price": {"kind": "known", **UNIT},
    "amount": {"kind": "known", "probabilities": [0.3], "name": "uniform", "loc": 0, "scale": 100},
    "age": {"kind": "known", "name": "randint", "low": 18, "high": 90},
}
CODECS = {
    name: codec_for(
        name,
        Column.model_validate(
            {**column, "levels": tuple(column["levels"])} if "levels" in column else column
        ),
        type_,
    )
    for name, column, type_ in (
        ("rating", RATING, pa.int16()),
        ("price", PRICE, pa.float64()),
        ("amount", AMOUNT, pa.float64()),
        ("age", AGE, pa.int32()),
    )
}
# whole anchors 0..5, each as likely as any other: the distribution of every range is known exactly
RATING_RANGE = {"design": "case1", "anchors": {"name": "uniform", "loc": 0, "scale": 6}}


def designs(**columns):
    return dict(validate(IntervalSpec, {"columns": columns}, "job").columns)


def perturbed(column, of, epsilon=1.0, **more):
    perturb = {"epsilon": epsilon, "reference": KNOWN[column], **more}
    return {"design": "interval-differential", "perturb": perturb, "of": of}


def release(column, of, epsilon=1.0, **more):
    return IntervalRelease.of(
        designs(**{column: perturbed(column, of, epsilon, **more)}), {column: CODECS[column]}
    )


def key(fragment="a"):
    return stream(RunKey.insecure(5), "interval/x", fragment)


def run(made, values, fragment="a"):
    [mechanism] = made.columns.values()
    return mechanism.randomise(
        values.astype(np.float64), np.zeros(len(values), dtype=bool), key(fragment)
    )


# the adapter


@pytest.mark.parametrize(
    ("column", "channel", "kind"),
    [
        ("rating", "laplace", LevelMechanism),
        ("rating", "optimal", LevelMechanism),
        ("price", "laplace-calibrated", RankMechanism),
        ("price", "optimal", BinMechanism),
        ("amount", "laplace", RankMechanism),
        ("amount", "optimal", BinMechanism),
        ("age", "laplace", RankMechanism),
    ],
)
def test_a_perturbation_draws_what_its_mechanism_draws(column, channel, kind):
    """The oracle is DIP itself, on Arrow arrays, from the same stream."""
    [design] = designs(x=perturbed(column, RATING_RANGE, channel=channel)).values()
    codec = CODECS[column]
    mechanism = fit_perturbation(design.perturb, codec)  # type: ignore[union-attr]  # of its kind
    assert isinstance(mechanism, kind)
    levels = to_numbers(codec, codec.levels)[0] if isinstance(codec, LevelCodec) else np.zeros(0)
    made = DipPerturbation(mechanism=mechanism, levels=levels, lattice=is_lattice(codec))
    rng = np.random.default_rng(2)
    drawn = {
        "rating": rng.choice(LEVELS, 2000),
        "price": rng.random(2000),
        "amount": rng.random(2000) * 100,
        "age": rng.integers(18, 90, 2000),
    }
    array = pa.array(
        np.where(rng.random(2000) < 0.3, 0.0, drawn[column])
        if column == "amount"
        else drawn[column]
    ).cast(codec.levels.type if isinstance(codec, LevelCodec) else codec.type)
    expected = mechanism.randomise(codec, array, key())  # type: ignore[arg-type]  # its own kind of codec
    found = made.perturb(to_numbers(codec, array)[0], words(key(), 2000, made.words_per_row))
    assert found.tolist() == [float(value) for value in expected.to_pylist()]
    assert made.epsilon == mechanism.epsilon <= 1.0
    assert 0.2 < made.mechanism.exact_epsilon <= made.epsilon


def test_a_null_of_levels_below_0_is_drawn_like_a_level_and_blanked():
    """A null comes as 0, above them all: the tables have no row for that."""
    codec = codec_for(
        "rating",
        Column(role="privatise", kind="discrete", levels=(-3, -2, -1), nulls="level"),
        pa.int64(),
    )
    design = {
        **perturbed(
            "rating", {"design": "case1", "anchors": {"name": "uniform", "loc": -4, "scale": 4}}
        ),
        "nulls": "public",
    }
    design["perturb"]["reference"] = {"kind": "known", "probabilities": [0.2, 0.3, 0.5]}
    made = IntervalRelease.of(designs(rating=design), {"rating": codec})
    [perturbation], drawn = made.perturbations.values(), words(key(), 3000, 1)
    assert (
        perturbation.perturb(np.zeros(3000), drawn).tolist()
        == perturbation.perturb(np.full(3000, -1.0), drawn).tolist()
    )
    released, filled = (
        made.randomise(
            pa.record_batch({"rating": pa.array([-1, null, -2] * 1000)}),
            {"rating": codec},
            {"rating": key()},
        )
        for null in (None, -3)
    )
    known = np.tile([True, False, True], 1000)
    for end in ("rating_lower", "rating_upper"):
        found, expected = (
            batch.column(end).to_numpy(zero_copy_only=False) for batch in (released, filled)
        )
        assert (np.isnan(found) == ~known).all()
        assert found[known].tolist() == expected[known].tolist()  # a null consumes its words


# the distribution of what is released


def channel_of(made):
    """Return Pr(level | level), exactly: it is drawn in whole numbers."""
    [perturbation] = made.perturbations.values()
    return [
        [Fraction(weight, 2**TOTAL_BITS) for weight in row]
        for row in perturbation.mechanism.channel.weights.tolist()
    ]


ANCHORS = range(6)  # of RATING_RANGE


def range_distribution(level, anchors=ANCHORS, *, exact=False):
    """Return the distribution of case1's range of a level, all anchors being equally likely; `exact`: every level is told as it is."""
    distribution = {}
    for anchor in anchors:
        ends = (
            (float(level), float(level))
            if exact
            else (-math.inf, float(anchor))
            if level <= anchor
            else (float(anchor), math.inf)
        )
        distribution[ends] = distribution.get(ends, Fraction(0)) + Fraction(1, len(anchors))
    return distribution


def composed(channel, anchors=ANCHORS, *, exact=False):
    """Return for each level the exact distribution of its released range."""
    distributions = []
    for row in channel:
        distribution = {}
        for share, level in zip(row, LEVELS, strict=True):
            for ends, probability in range_distribution(level, anchors, exact=exact).items():
                distribution[ends] = distribution.get(ends, Fraction(0)) + share * probability
        distributions.append(distribution)
    return distributions


def most_ratio(distributions):
    outcomes = {ends for distribution in distributions for ends in distribution}
    return max(
        max(distribution.get(ends, Fraction(0)) for distribution in distributions)
        / min(distribution.get(ends, Fraction(0)) for distribution in distributions)
        for ends in outcomes
    )


@pytest.mark.parametrize("channel", ["laplace", "laplace-calibrated", "optimal"])
@pytest.mark.parametrize("epsilon", [0.1, 4.0])
def test_a_range_cannot_cost_more_than_the_perturbation(channel, epsilon):
    """Exact, in fractions: ranges that tell single levels apart cost what the channel costs, coarser ones less, none of them more."""
    made = release("rating", RATING_RANGE, epsilon, channel=channel)
    matrix = channel_of(made)
    own = max(max(column) / min(column) for column in zip(*matrix, strict=True))
    assert most_ratio(composed(matrix, exact=True)) == own
    assert 1 < most_ratio(composed(matrix)) <= own
    coarse = most_ratio(composed(matrix, range(2, 4)))
    assert 1 < coarse <= own
    assert coarse < own or channel == "optimal"  # which may know two outcomes only
    assert (
        float(own)
        <= math.exp(made.perturbations["rating"].epsilon) * (1 + 1e-12)
        <= math.exp(epsilon) * (1 + 2e-12)
    )
    if channel != "laplace":
        assert math.log(own) > 0.95 * epsilon  # nothing of it is wasted


def fits(found, distribution):
    """Return the p-value of released ranges under a distribution; 0 if a range is none of its."""
    seen = list(zip(found.lower.tolist(), found.upper.tolist(), strict=True))
    outcomes = sorted(distribution)
    if not set(seen) <= set(outcomes):
        return 0.0
    counts = np.array([seen.count(ends) for ends in outcomes])
    return float(
        stats.chisquare(
            counts, np.array([float(distribution[ends]) for ends in outcomes]) * len(seen)
        ).pvalue
    )


def test_ranges_have_the_composed_law_and_no_other():
    made = release("rating", RATING_RANGE, 2.0)
    matrix = channel_of(made)
    distributions, n = composed(matrix), 60_000
    twice = [
        [
            sum((a * b for a, b in zip(row, column, strict=True)), Fraction(0))
            for column in zip(*matrix, strict=True)
        ]
        for row in matrix
    ]
    less, more = composed(twice), [range_distribution(level) for level in LEVELS]
    wider = composed(channel_of(release("rating", RATING_RANGE, 2.2)))
    for index, level in enumerate(LEVELS):
        found = run(made, np.full(n, level), f"level {level}")
        assert fits(found, distributions[index]) > TINY
        if level != 3:  # the middle level's distribution hardly changes
            assert fits(found, less[index]) < TINY  # perturbed twice
            assert fits(found, more[index]) < TINY  # not perturbed at all
    found = run(made, np.full(20 * n, 1), "many")
    assert fits(found, distributions[0]) > TINY
    assert fits(found, wider[0]) < TINY  # of another ε


@pytest.mark.parametrize("channel", ["laplace", "optimal"])
def test_ranges_of_numbers_have_the_law_of_the_reference_and_keep_epsilon(channel):
    made = release("price", {"design": "case1", "anchors": UNIT}, 2.0, channel=channel)
    values, n = np.random.default_rng(8).random(60_000), 60_000

    def anchor_given_below(found):
        return found.upper[
            np.isneginf(found.lower)
        ]  # of Ỹ even on (0, 1) and an even anchor: density 2u

    even = run(made, values)
    assert stats.kstest(anchor_given_below(even), lambda u: u**2).pvalue > TINY
    assert (
        stats.kstest(anchor_given_below(run(made, np.sqrt(values))), lambda u: u**2).pvalue < TINY
    )  # others do not keep it
    within_range = held_by(even, values).mean()
    assert (
        0.55 < within_range < 0.9
    )  # a range need not contain the value; by chance alone two thirds do
    counts = [
        int((run(made, np.full(n, value), f"{value}").upper < 0.1).sum()) for value in (1e-9, 1.0)
    ]  # Ỹ below an anchor below 0.1
    ratio = math.log(counts[0] / counts[1])
    doubt = 6 * math.sqrt(1 / counts[0] + 1 / counts[1])
    assert ratio - doubt > 1.0  # far from no perturbation's infinity, and from 0
    assert ratio - doubt <= made.perturbations["price"].epsilon <= 2.0


@pytest.mark.parametrize(
    ("design", "expected"),
    [
        ({"design": "case1", "anchors": UNIT}, None),
        ({"design": "case1", "anchors": {"optimal_for": "mean", "reference": UNIT}}, UNIT),
        (
            {
                "design": "case1",
                "anchors": {"coverage": 0.7, "family": {"name": "norm"}, "reference": UNIT},
                "reference": {"name": "norm"},
            },
            {"name": "norm"},
        ),
        (
            {
                "design": "selective",
                "tau": 0.3,
                "of": {"design": "case2", "at_least": 0.1, "reference": UNIT},
            },
            UNIT,
        ),
        (
            {
                "design": "ensemble",
                "of": [{"design": "case1", "anchors": UNIT, "reference": UNIT}] * 2,
            },
            None,
        ),
        ({"design": "progressive", "anchors": UNIT, "tau": 0.1, "reference": UNIT}, UNIT),
        (perturbed("price", {"design": "case1", "anchors": UNIT, "reference": UNIT}), UNIT),
    ],
)
def test_the_reference_that_a_design_names(design, expected):
    [made] = designs(price=design).values()
    assert made.public_reference == (None if expected is None else ScipyDistribution(**expected))
    schema = schema_of({"price": PRICE})
    check_designs(schema, {"price": made})
    if expected is None:
        with pytest.raises(
            SpecError, match=r"column 'price': coverage needs a public reference.*; add `reference"
        ):
            check_designs(schema, {"price": made}, coverage=True)
    else:
        check_designs(schema, {"price": made}, coverage=True)


# the budget


def two(first, second):
    pure = {"design": "case1", "anchors": UNIT}
    return designs(
        rating=perturbed("rating", RATING_RANGE, first),
        price=perturbed("price", RATING_RANGE, second),
        age=pure,
    )


def bound(first, second, **budget):
    schema = schema_of({"id": {"role": "keep"}, "rating": RATING, "price": PRICE, "age": AGE})
    return RandomRangesMechanism(
        spec=IntervalSpec(columns=two(first, second)),
        schema=schema,
        budget=Budget.model_validate(budget),
    )


cents = st.integers(1, 5000)


@given(first=cents, second=cents)
@example(first=236, second=1001)  # as floats they sum to less than 1.237
@settings(max_examples=30)
def test_decimals_that_fit_a_decimal_budget_never_spend_more(first, second):
    promised = float(Decimal(first + second) / 1000)
    made = bound(first / 1000, second / 1000, epsilon=promised)
    spent = made.spending.row
    assert sum(map(Fraction, spent.values())) <= Fraction(promised)
    [event] = made.event.events
    assert event == LocalRelease(epsilon=round_up_sum(spent.values()))
    assert round_up_sum(spent.values()) <= promised
    assert spent["rating"] == pytest.approx(first / 1000, rel=1e-15)
    assert made.designs["age"] == two(1, 1)["age"]
    least = made.spec.least_budget
    assert least.epsilon == pytest.approx(promised)
    assert replace(made, budget=least).spending.row == {
        "rating": first / 1000,
        "price": second / 1000,
    }
    with pytest.raises(
        SpecError,
        match=rf"`epsilon`: is .*, and the perturbed columns spend {promised:g} together; set it to at least {promised:g}, or",
    ):
        bound(first / 1000, second / 1000, epsilon=promised * (1 - 1e-9))


# refusals


@pytest.mark.parametrize(
    ("column", "changed", "says"),
    [
        (
            "price",
            {"reference": {"kind": "holdout", "fraction": 0.25}},
            "the perturbation needs a declared distribution",
        ),
        ("price", {"reference": UNIT}, "the key 'columns.price.perturb.reference.kind' is missing"),
        (
            "price",
            {"reference": {"kind": "known", "name": "unifrom"}},
            "scipy.stats has no distribution 'unifrom'",
        ),
        (
            "rating",
            {"reference": {"kind": "known", "probabilities": [0.5, 0.5]}},
            "one probability per level",
        ),
        ("amount", {"reference": {"kind": "known", **UNIT}}, "one probability per atom"),
        ("price", {"epsilon": 101.0}, "at most 100"),
        (
            "price",
            {"epsilon": 17.0},
            "`columns.price.perturb.epsilon`: is 17, but a continuous column takes an ε in [1e-06, 16]; change it",
        ),
        ("price", None, "the key 'columns.price.perturb' is missing; add it"),
        (
            "price",
            {"channel": "gaussian"},
            "'laplace', 'laplace-calibrated', 'optimal' or 'optimal-unbiased'",
        ),
        (
            "price",
            {"chanel": "laplace"},
            "unknown key 'columns.price.perturb.chanel'; did you mean 'channel'?",
        ),
    ],
)
def test_what_is_refused(column, changed, says):
    design = perturbed(column, {"design": "case1", "anchors": UNIT})
    perturb = {} if changed is None else {"perturb": {**design["perturb"], **changed}}
    made = {key: value for key, value in design.items() if key != "perturb"} | perturb

    def build():
        found = designs(**{column: made})
        check_designs(
            schema_of({column: {"rating": RATING, "price": PRICE, "amount": AMOUNT}[column]}),
            found,
        )
        IntervalRelease.of(found, {column: CODECS[column]})

    with pytest.raises(SpecError) as caught:
        build()
    assert says in str(caught.value)


def test_a_large_epsilon_needs_levels_or_the_optimal_channel():
    assert release("rating", RATING_RANGE, 20.0).epsilon <= 20.0
    assert (
        16
        < release("price", {"design": "case1", "anchors": UNIT}, 20.0, channel="optimal").epsilon
        <= 20.0
    )
