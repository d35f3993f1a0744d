"""Interval mechanisms: every range is true, tells nothing but itself, and is as wide as promised."""

from functools import cache

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mechanisms.containing import held_by
from numpy.random import default_rng
from numpy.testing import assert_allclose, assert_array_equal
from scipy import integrate, stats

from dpdask.codec import codec_for
from dpdask.documents import validate
from dpdask.errors import DataError, SpecError
from dpdask.mechanisms.interval import release
from dpdask.mechanisms.interval.design import ScipyDistribution
from dpdask.mechanisms.interval.fit import range_randomiser
from dpdask.mechanisms.interval.ranges import (
    Ranges,
    Selection,
    compute_released_coverages,
    coverage,
    coverages,
)
from dpdask.mechanisms.interval.release import IntervalRelease
from dpdask.mechanisms.interval.spec import IntervalSpec
from dpdask.schema import Column
from dpdask.streams import RunKey, stream, words

N01, NORMAL = {"name": "norm"}, ScipyDistribution(name="norm")
WIDE = {"name": "norm", "scale": 2}
TINY = 1e-6  # the chance that a right mechanism fails a test

DESIGNS = {
    "case1": {"design": "case1", "anchors": {"name": "logistic", "scale": 2}},
    "case2": {"design": "case2", "anchors": {"name": "uniform", "loc": -3, "scale": 6}},
    "canonical": {
        "design": "canonical",
        "n_anchors": 4,
        "anchors": WIDE,
        "acceptable": [[-0.2, 0.3], [1.0, 1.2]],
    },
    "exact ranges": {"design": "canonical", "n_anchors": 2, "anchors": WIDE, "exact_ranges": [2]},
    "ring": {"design": "ring", "anchors": WIDE},
    "at least": {"design": "canonical", "n_anchors": 3, "at_least": 0.15, "reference": N01},
    "ring at least": {"design": "ring", "at_least": 0.3, "reference": N01},
    "optimal": {"design": "case1", "anchors": {"optimal_for": "mean", "reference": N01}},
    "covering": {
        "design": "case2",
        "anchors": {"coverage": 0.4, "family": {"name": "logistic"}},
        "reference": N01,
    },
    "progressive": {
        "design": "progressive",
        "anchors": WIDE,
        "tau": 0.2,
        "reference": N01,
        "rounds": 5,
    },
    "own tau": {
        "design": "progressive",
        "anchors": WIDE,
        "tau": {"name": "beta", "a": 2, "b": 5},
        "reference": N01,
    },
    "published progressive": {
        "design": "progressive",
        "anchors": WIDE,
        "tau": 0.2,
        "reference": N01,
        "stop": "own",
    },
    "selective": {
        "design": "selective",
        "of": {"design": "case2", "anchors": WIDE},
        "tau": 0.5,
        "reference": N01,
    },
    "ensemble": {
        "design": "ensemble",
        "of": [
            {"design": "case1", "anchors": N01},
            {"design": "canonical", "n_anchors": 2, "anchors": WIDE, "acceptable": [[0.0, 1.0]]},
        ],
    },
}
ACCEPTABLE = {"canonical": ((-0.2, 0.3), (1.0, 1.2)), "ensemble": ((0.0, 1.0),)}


def document(design):
    return validate(IntervalSpec, {"columns": {"income": design}}, "job").columns["income"]


def mechanism(design, **more):
    return range_randomiser("income", document(design), **more)


@cache
def designed(name):
    return mechanism(DESIGNS[name])


every_design = pytest.mark.parametrize("name", list(DESIGNS))


def keyed(fragment="a"):
    return stream(RunKey.insecure(3), "interval/income", fragment)


def run(made, values, fragment="a"):
    return made.randomise(values, np.zeros(len(values), dtype=bool), keyed(fragment))


def normal(n, seed=0):
    return default_rng(seed).normal(size=n)


# truth


@every_design
@given(
    values=st.lists(st.floats(-(2.0**1021), 2.0**1021), min_size=1, max_size=20),
    fragment=st.text(max_size=3),
)
@settings(max_examples=15)
def test_a_range_contains_its_value(name, values, fragment):
    released = run(designed(name), np.array(values), fragment)
    assert held_by(released, np.array(values)).all()
    assert not (np.isnan(released.lower) | np.isnan(released.upper)).any()


@every_design
@pytest.mark.parametrize("end", ["lower", "upper"])
def test_a_value_at_an_anchor_lies_left_of_it(name, end):
    """The ends of the first release become values: with the same words, the same anchors are drawn."""
    first = run(designed(name), normal(2000))
    at = getattr(first, end)
    values = np.where(np.isfinite(at), at, 0.0)
    again = run(designed(name), values)
    assert held_by(again, values).all()
    moved = np.isfinite(at) & (again.lower < again.upper)
    if end == "upper" and name in ("case1", "case2", "optimal", "at least"):
        assert moved.sum() > 500
        assert_array_equal(again.upper[moved], values[moved])


# nothing but the range (Definition 1)


def places(released, values, accepted=()):
    """Where inside its range each value lies, in probability of the prior: even on (0, 1) if the range tells nothing else."""

    def mass(u):
        inside = stats.norm.cdf(u)
        for low, high in accepted:
            inside = inside - (stats.norm.cdf(np.clip(u, low, high)) - stats.norm.cdf(low))
        return inside

    low, high, at = mass(released.lower), mass(released.upper), mass(values)
    wraps = released.lower > released.upper
    whole = np.where(wraps, mass(np.array(np.inf)) - low + high, high - low)
    place = np.where(
        wraps & (values <= released.upper), mass(np.array(np.inf)) - low + at, at - low
    )
    told = released.lower == released.upper
    return (place / np.where(told, 1.0, whole))[~told]


def tells_more(released, values, accepted=()):
    """Whether places inside the ranges are not even: overall, about the middle, and among narrow, medium and wide ranges."""
    found = places(released, values, accepted)
    ranges = Ranges(lower=released.lower, upper=released.upper, is_null=released.is_null)
    widths = coverages(ranges, NORMAL, acceptable=accepted)[released.lower != released.upper]
    groups = [
        found,
        np.abs(2 * found - 1),
        *(found[part] for part in np.array_split(np.argsort(widths, kind="stable"), 3)),
    ]
    return min(stats.kstest(group, "uniform").pvalue for group in groups) < TINY


private_designs = pytest.mark.parametrize(
    "name", [name for name in DESIGNS if name not in ("published progressive", "selective")]
)


@private_designs
def test_a_range_tells_nothing_else(name):
    values = normal(60_000)
    assert not tells_more(run(designed(name), values), values, ACCEPTABLE.get(name, ()))


def test_a_released_range_of_a_selective_design_tells_nothing_else():
    values = normal(100_000)
    released = run(designed("selective"), values)
    shown = np.isfinite(released.lower) | np.isfinite(released.upper)
    part = Ranges(
        lower=released.lower[shown], upper=released.upper[shown], is_null=released.is_null[shown]
    )
    assert not tells_more(part, values[shown])


def test_cheating_mechanisms_are_found_out():
    """Anchors that depend on the value, a forgotten acceptable set, and Example 4 as published."""
    values, rng = normal(60_000), default_rng(1)
    none = np.zeros(len(values), dtype=bool)
    ends = np.sort(rng.normal(size=(2, len(values))) * 2, axis=0)
    near = Ranges(
        lower=values - rng.exponential(size=len(values)),
        upper=values + 0.5 * rng.exponential(size=len(values)),
        is_null=none,
    )
    assert tells_more(near, values)
    nudged = np.where(rng.random(len(values)) < 0.05, values + 0.01, ends[0])
    assert tells_more(
        Ranges(
            lower=np.where(values <= nudged, -np.inf, nudged),
            upper=np.where(values <= nudged, nudged, np.inf),
            is_null=none,
        ),
        values,
    )
    assert tells_more(run(designed("canonical"), values), values)
    assert tells_more(run(designed("published progressive"), values), values)
    published = document(DESIGNS["published progressive"])
    assert "interval privacy does not hold" in published.unprotected


# coverage


@every_design
def test_the_expected_coverage_is_that_of_many_rows(name):
    made, values = designed(name), normal(30_000, seed=5)
    found = coverages(run(made, values), NORMAL, acceptable=ACCEPTABLE.get(name, ()))
    assert coverage(made, NORMAL) == pytest.approx(
        found.mean(), abs=0.002 + 5 * found.std() / np.sqrt(len(values))
    )
    assert ((found >= 0) & (found <= 1)).all()


def test_overlapping_acceptable_intervals_are_taken_out_once():
    whole = Ranges(
        lower=np.array([0.0, -np.inf, 0.3]),
        upper=np.array([1.0, np.inf, 0.3]),
        is_null=np.zeros(3, dtype=bool),
    )
    uniform = ScipyDistribution(name="uniform")
    assert coverages(
        whole, uniform, acceptable=((0.4, 0.6), (0.1, 0.5), (0.2, 0.3))
    ) == pytest.approx([0.5, 0.5, 0.0])
    parts = [
        {"design": "canonical", "n_anchors": 1, "anchors": WIDE, "acceptable": [ends]}
        for ends in ([0.1, 0.5], [0.4, 0.6])
    ]
    made = mechanism({"design": "ensemble", "of": parts})
    assert compute_released_coverages(made, whole, uniform) == pytest.approx([0.5, 0.5, 0.0])
    with pytest.raises(
        SpecError, match=r"reference of column 'income': .*no distribution 'unifrom'"
    ):
        compute_released_coverages(made, whole, ScipyDistribution(name="unifrom"))


def test_the_coverage_of_the_uniform_case_in_closed_form():
    """Y and U uniform: E(U² + (1-U)²) = 2/3; sorted pairs: E(gaps²) = 3 · 2/12; ring: E(g² + (1-g)²) with g ~ Beta(1, 2)."""
    uniform = ScipyDistribution(name="uniform")
    for design, expected in (("case1", 2 / 3), ("case2", 1 / 2), ("ring", 1 / 6 + 1 / 2)):
        made = mechanism({"design": design, "anchors": {"name": "uniform"}})
        assert coverage(made, uniform) == pytest.approx(expected, abs=2e-3)
    law = stats.beta(2, 3)
    expected, _ = integrate.quad(lambda u: law.cdf(u) ** 2 + law.sf(u) ** 2, 0, 1)
    one = mechanism({"design": "case1", "anchors": {"name": "uniform"}})
    assert coverage(one, ScipyDistribution(name="beta", a=2, b=3)) == pytest.approx(
        expected, abs=2e-3
    )


# what single designs promise


@pytest.mark.parametrize(
    ("name", "least"), [("at least", 0.15), ("ring at least", 0.3), ("progressive", 0.2)]
)
def test_no_range_is_below_its_tau(name, least):
    found = coverages(run(designed(name), normal(50_000)), NORMAL)
    assert least <= found.min() < least + 0.01  # and ranges go down to it


def test_progressive_rounds_narrow_further():
    covered = [
        coverage(
            mechanism({**DESIGNS["progressive"], "tau": 0.05, "rounds": rounds}),
            NORMAL,
        )
        for rounds in (1, 2, 5)
    ]
    assert covered[0] > covered[1] + 0.02 > covered[2] + 0.03
    assert (
        coverage(mechanism({**DESIGNS["progressive"], "tau": 0.6}), NORMAL) == 1.0
    )  # two ranges of 0.6 do not exist


def test_a_selective_design_is_ignorable():
    """Of the rows without a range at least half lost the coin (Proposition 2); the coin is read from the words."""
    made = designed("selective")
    values = normal(100_000)
    drawn = words(keyed(), len(values), made.step.words_per_row)
    lower, _ = made.step.ranges(values, drawn)
    lost = (drawn[:, -1] >> np.uint64(11)).astype(np.float64) * 2.0**-53 >= made.step.rho
    hidden = np.isneginf(lower) & np.isposinf(made.step.ranges(values, drawn)[1])
    assert lost[hidden].mean() > 0.5
    assert lost.mean() == pytest.approx(1 - made.step.rho, abs=0.01)
    found = coverages(run(made, values), NORMAL)
    assert found.min() >= 0.5
    greedy = Selection(
        step=made.step.step, cdf=made.step.cdf, tau=0.5, rho=0.9
    )  # what the design refuses
    hidden = np.isneginf(greedy.ranges(values, drawn)[0]) & np.isposinf(
        greedy.ranges(values, drawn)[1]
    )
    assert ((drawn[:, -1] >> np.uint64(11)).astype(np.float64) * 2.0**-53 >= 0.9)[
        hidden
    ].mean() < 0.5


# whole numbers, nulls, streams


def test_ranges_of_whole_numbers_end_at_whole_numbers():
    design = {"design": "case2", "anchors": {"name": "uniform", "loc": -1, "scale": 12}}
    values = default_rng(0).integers(0, 10, size=50_000).astype(float)
    whole, plain = run(mechanism(design, lattice=True), values), run(mechanism(design), values)
    assert held_by(whole, values).all()
    assert_array_equal(whole.lower, np.floor(plain.lower))
    assert_array_equal(whole.upper, np.floor(plain.upper))
    found = coverages(whole, ScipyDistribution(name="randint", low=0, high=10), lattice=True)
    expected = coverage(
        mechanism(design, lattice=True), ScipyDistribution(name="randint", low=0, high=10)
    )
    assert expected == pytest.approx(found.mean(), abs=0.005)
    single = np.clip(whole.upper, None, 9) - np.clip(whole.lower, -1, None) == 1
    assert_allclose(found[single], 0.1)
    # the value is even among the whole numbers of its range
    inside = (whole.lower == 2) & (whole.upper == 6)
    counts = np.bincount(values[inside].astype(int), minlength=10)
    assert counts[[0, 1, 2, 7, 8, 9]].sum() == 0
    assert stats.chisquare(counts[3:7]).pvalue > TINY


def test_whole_numbers_are_narrowed_and_selected():
    anchors, values = (
        {"name": "uniform", "loc": 8, "scale": 24},
        default_rng(0).poisson(20, size=20_000).astype(float),
    )
    poisson, normal_ = {"name": "poisson", "mu": 20}, {"name": "norm", "loc": 20, "scale": 4.5}
    for design in (
        {"design": "progressive", "anchors": anchors, "reference": poisson},
        {
            "design": "selective",
            "of": {"design": "case2", "anchors": anchors},
            "reference": poisson,
        },
        {"design": "progressive", "anchors": anchors, "reference": normal_},
    ):
        released = run(mechanism({**design, "tau": 0.2}, lattice=True), values)
        assert held_by(released, values).all()
        assert (np.isfinite(released.lower) | np.isfinite(released.upper)).mean() > 0.3
        assert (
            coverages(released, ScipyDistribution(**design["reference"]), lattice=True).min()
            >= 0.2 - 1e-9
        )


def test_nulls_are_refused_or_public():
    values, is_null = np.array([1.0, np.nan, 2.0]), np.array([False, True, False])
    with pytest.raises(DataError, match="a null"):
        designed("case1").randomise(values, is_null, keyed())
    public = mechanism({**DESIGNS["case1"], "nulls": "public"})
    released = public.randomise(values, is_null, keyed())
    assert released.is_null.tolist() == [False, True, False]
    assert (
        np.isnan(released.lower).tolist()
        == np.isnan(released.upper).tolist()
        == [False, True, False]
    )
    assert np.isnan(coverages(released, NORMAL)).tolist() == [
        False,
        True,
        False,
    ]
    filled = public.randomise(np.array([1.0, 0.0, 2.0]), np.zeros(3, dtype=bool), keyed())
    assert (released.lower[[0, 2]] == filled.lower[[0, 2]]).all()  # a null consumes its words


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_is_refused(bad):
    with pytest.raises(DataError, match="NaN or an infinity"):
        run(designed("case1"), np.array([0.0, bad]))


@every_design
def test_the_same_stream_gives_the_same_ranges_however_it_is_cut(name, monkeypatch):
    made, values = designed(name), normal(1000)
    whole = run(made, values)
    rng, none = keyed(), np.zeros(1000, dtype=bool)
    parts = [
        made.randomise(values[cut], none[cut], rng)
        for cut in (slice(0, 1), slice(1, 700), slice(700, 1000))
    ]
    assert_array_equal(whole.lower, np.concatenate([part.lower for part in parts]))
    assert_array_equal(whole.upper, np.concatenate([part.upper for part in parts]))
    monkeypatch.setattr("dpdask.mechanisms.interval.ranges._CHUNK", 7)
    assert_array_equal(whole.lower, run(made, values).lower)
    other = run(made, values, "b")
    assert not np.array_equal(whole.lower, other.lower)
    rest = keyed()
    words(rest, 1000, made.step.words_per_row)
    assert words(rest, 1)[0] == words(rng, 1)[0]  # exactly so many words


def test_the_tables_of_many_columns_are_made_once(monkeypatch):
    """Each batch asks for the tables of all columns in turn: a cache that holds fewer would never have them."""
    names = [f"c{number}" for number in range(200)]
    types = pa.schema([(name, pa.float64()) for name in names])
    codecs = {
        name: codec_for(name, Column(role="privatise", kind="continuous"), pa.float64())
        for name in names
    }
    made = IntervalRelease.of({name: document(DESIGNS["case1"]) for name in names}, codecs)
    batch = pa.RecordBatch.from_arrays([pa.array(normal(5))] * 200, schema=types)

    def again(*_, **__):
        raise AssertionError

    monkeypatch.setattr(release, "range_randomiser", again)
    rngs = made.streams(RunKey.insecure(3), "a")
    for _ in range(2):
        assert made.randomise(batch, codecs, rngs).num_columns == 400
