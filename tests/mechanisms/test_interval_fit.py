"""Interval designs: what may be written, what is refused, and that designed anchors meet their target."""

import numpy as np
import pytest
from mechanisms.containing import held_by
from scipy import integrate, stats

from dpdask.documents import validate
from dpdask.errors import SpecError
from dpdask.kernels.ranges import TABLE_ERROR
from dpdask.mechanisms.interval.design import ScipyDistribution
from dpdask.mechanisms.interval.fit import can_inform, optimal, range_randomiser
from dpdask.mechanisms.interval.ranges import Partition, coverage, coverages, table
from dpdask.mechanisms.interval.spec import IntervalSpec
from dpdask.streams import RunKey, stream

N01 = {"name": "norm"}
CASE1 = {"design": "case1", "anchors": N01}


def mechanism(design, **more):
    return range_randomiser(
        "income",
        validate(IntervalSpec, {"columns": {"income": design}}, "job").columns["income"],
        **more,
    )


def refusal(design, **more):
    with pytest.raises(SpecError) as caught:
        mechanism(design, **more)
    return str(caught.value)


@pytest.mark.parametrize(
    ("design", "says"),
    [
        ({"design": "case1"}, "either `anchors` or `at_least`"),
        ({**CASE1, "at_least": 0.2}, "either `anchors` or `at_least`"),
        ({"design": "case2", "at_least": 0.4, "reference": N01}, "up to 1/3"),
        ({"design": "ring", "at_least": 0.6, "reference": N01}, "up to 1/2"),
        ({"design": "ring", "at_least": 0.4}, "needs a public reference"),
        (
            {"design": "ring", "at_least": 0.4, "reference": {"name": "poisson", "mu": 3}},
            "no continuous distribution",
        ),
        (
            {"design": "case1", "anchors": {"name": "poisson", "mu": 3}},
            "no continuous distribution",
        ),
        (
            {"design": "case1", "anchors": {"name": "norm", "scale": -1}},
            "no continuous distribution",
        ),
        ({"design": "case1", "anchors": {"name": "norm", "scale": "wide"}}, "finite numbers"),
        ({"design": "case1", "anchors": {"name": "pareto", "b": 0.01}}, "too wide to be tabulated"),
        ({"design": "case1", "anchors": {"optimal_for": "median", "reference": N01}}, "mean"),
        ({"design": "case1", "anchors": {"optimal_for": "mean"}}, "needs a public reference"),
        (
            {
                "design": "case1",
                "anchors": {"optimal_for": "mean", "reference": {"name": "cauchy"}},
            },
            "no density",
        ),
        (
            {
                "design": "case1",
                "anchors": {"optimal_for": "second_moment", "reference": {"name": "t", "df": 3}},
            },
            "no density",
        ),
        (
            {"design": "case1", "anchors": {"optimal_for": "log", "reference": N01}},
            "positive numbers",
        ),
        (
            {"design": "case1", "anchors": {"coverage": 0.5, "family": N01}, "reference": N01},
            "between 0.5 and 1, not 0.5",
        ),
        (
            {"design": "case2", "anchors": {"coverage": 0.3, "family": N01}, "reference": N01},
            "between 0.3333 and 1, not 0.3",
        ),
        (
            {"design": "ring", "anchors": {"coverage": 0.4, "family": N01}, "reference": N01},
            "between 0.5 and 1, not 0.4",
        ),
        (
            {"design": "case1", "anchors": {"coverage": 0.6, "family": N01}},
            "needs a public reference",
        ),
        (
            {
                "design": "case1",
                "anchors": {"coverage": 0.6, "family": N01},
                "reference": {"name": "bernoulli", "p": 0.1},
            },
            "between 0.82",
        ),  # 0.9² + 0.1²
        (
            {
                "design": "canonical",
                "n_anchors": 1,
                "acceptable": [[-1, 1]],
                "anchors": {"coverage": 0.9, "family": N01},
                "reference": N01,
            },
            "not 0.9",
        ),
        ({"design": "canonical", "n_anchors": 0, "anchors": N01}, "at least 1"),
        (
            {"design": "canonical", "n_anchors": 2, "anchors": N01, "acceptable": [[1, 1]]},
            "lower end below",
        ),
        (
            {"design": "canonical", "n_anchors": 2, "anchors": N01, "acceptable": [[0, 2], [1, 3]]},
            "without overlaps",
        ),
        (
            {"design": "canonical", "n_anchors": 2, "anchors": N01, "exact_ranges": [4]},
            "from 1 to 3",
        ),
        (
            {"design": "canonical", "n_anchors": 2, "anchors": N01, "exact_ranges": [1, 1]},
            "distinct",
        ),
        (
            {"design": "progressive", "anchors": {"coverage": 0.8, "family": N01}, "tau": 0.2},
            "cannot be designed for by rounds",
        ),
        ({"design": "progressive", "anchors": N01, "tau": 0.2}, "needs a public reference"),
        ({"design": "progressive", "anchors": N01, "tau": 1.2, "reference": N01}, "at most 1"),
        (
            {"design": "selective", "of": CASE1, "tau": 0.9, "rho": 0.9, "reference": N01},
            "not ignorable",
        ),
        (
            {
                "design": "selective",
                "of": {"design": "case2", "at_least": 0.3},
                "tau": 0.9,
                "reference": N01,
            },
            "no range of this design",
        ),
        ({"design": "selective", "of": CASE1, "tau": 0.5}, "needs a public reference"),
        (
            {
                "design": "selective",
                "of": CASE1,
                "tau": 0.5,
                "reference": {"name": "randint", "low": 0, "high": 2**30},
            },
            "too many values",
        ),
        ({"design": "ensemble", "of": [CASE1]}, "at least 2"),
        ({"design": "ensemble", "of": [CASE1, {"design": "ring", "anchors": N01}]}, "ring"),
        (
            {
                "design": "interval-differential",
                "of": CASE1,
                "perturb": {"epsilon": 1.0, "reference": {"kind": "known", "name": "norm"}},
            },
            "needs a fitted perturbation",
        ),
    ],
)
def test_what_is_refused(design, says):
    assert says in refusal(design)


def test_what_is_refused_of_whole_numbers_and_perturbations():
    assert "whole numbers" in refusal(
        {"design": "case2", "at_least": 0.2, "reference": N01}, lattice=True
    )
    assert "no other" in refusal(CASE1, perturbation=object())


@pytest.mark.parametrize(
    ("design", "targets"),
    [
        ({"design": "case1"}, (0.505, 0.99)),
        ({"design": "case2"}, (0.34, 0.95)),
        ({"design": "canonical", "n_anchors": 5}, (0.2, 0.7)),
        ({"design": "ring"}, (0.51, 0.9)),
        ({"design": "canonical", "n_anchors": 2, "acceptable": [[0.0, 0.5]]}, (0.4,)),
    ],
    ids=["case1", "case2", "canonical", "ring", "acceptable"],
)
def test_the_designed_coverage_is_reached(design, targets):
    """Theorem 1, checked on rows; the reference is skew and the family symmetric."""
    reference, rng = {"name": "gamma", "a": 2.0}, np.random.default_rng(0)
    values, none = rng.gamma(2.0, size=20_000), np.zeros(20_000, dtype=bool)
    for target in targets:
        made = mechanism(
            {
                **design,
                "anchors": {"coverage": target, "family": {"name": "logistic"}},
                "reference": reference,
            }
        )
        found = coverages(
            made.randomise(values, none, stream(RunKey.insecure(1), "m", "f")),
            ScipyDistribution(**reference),
            acceptable=((0.0, 0.5),) if "acceptable" in design else (),
        )
        assert found.mean() == pytest.approx(
            target, abs=0.005 + 5 * found.std() / np.sqrt(len(values))
        )
        assert coverage(made, ScipyDistribution(**reference)) == pytest.approx(target, abs=0.005)


def test_a_coverage_on_whole_numbers():
    reference = {"name": "poisson", "mu": 30}
    design = {
        "design": "case1",
        "anchors": {"coverage": 0.8, "family": {"name": "uniform"}},
        "reference": reference,
    }
    made = mechanism(design, lattice=True)
    values = np.random.default_rng(0).poisson(30, size=50_000).astype(float)
    released = made.randomise(
        values, np.zeros(50_000, dtype=bool), stream(RunKey.insecure(1), "m", "f")
    )
    assert held_by(released, values).all()
    assert coverages(
        released, ScipyDistribution(**reference), lattice=True
    ).mean() == pytest.approx(0.8, abs=0.01)


@pytest.mark.parametrize(
    ("functional", "slope", "distribution"),
    [
        ("mean", lambda u: 1.0, stats.norm()),
        ("second_moment", lambda u: 2 * abs(u), stats.norm()),
        ("third_moment", lambda u: 3 * u**2, stats.gamma(2.0)),
        ("fourth_moment", lambda u: 4 * abs(u) ** 3, stats.logistic()),
        ("log", lambda u: 1 / u, stats.lognorm(1.0)),
    ],
)
def test_the_optimal_density(functional, slope, distribution):
    """Theorem 2, by numerical integration."""

    def density(u):
        return float(np.sqrt(distribution.cdf(u) * distribution.sf(u)) * slope(u))

    low, high = distribution.ppf(1e-16), distribution.isf(1e-16)
    cuts = optimal(distribution, functional, "here")
    knots = np.interp([0.1, 0.3, 0.5, 0.7, 0.9], cuts.p, cuts.x)
    total = integrate.quad(density, low, high, points=knots, limit=500)[0]
    below = (
        np.array(
            [
                integrate.quad(density, low, knot, points=knots[knots < knot], limit=500)[0]
                for knot in knots
            ]
        )
        / total
    )
    np.testing.assert_allclose(below, [0.1, 0.3, 0.5, 0.7, 0.9], atol=5e-4)


@pytest.mark.parametrize(
    "distribution",
    [
        stats.norm(3, 2),
        stats.logistic(),
        stats.cauchy(),
        stats.beta(0.3, 2.0),
        stats.uniform(-1, 4),
    ],
)
def test_the_drawn_distribution_is_within_the_stated_error(distribution):
    cuts = table(distribution, "here")
    at = np.concatenate(
        [distribution.ppf(np.linspace(1e-6, 1 - 1e-6, 50_001)), distribution.ppf([1e-12, 1e-9])]
    )
    np.testing.assert_allclose(
        np.interp(at, cuts.x, cuts.p), distribution.cdf(at), atol=TABLE_ERROR
    )
    assert (np.diff(cuts.x) >= 0).all()
    design = {"design": "case1", "anchors": {"name": distribution.dist.name, **distribution.kwds}}
    if distribution.args:
        design["anchors"] |= dict(
            zip(
                ("a", "b") if distribution.dist.name == "beta" else ("loc", "scale"),
                distribution.args,
                strict=True,
            )
        )
    n = 100_000
    released = mechanism(design).randomise(
        np.full(n, distribution.ppf(0.5)),
        np.zeros(n, dtype=bool),
        stream(RunKey.insecure(2), "m", distribution.dist.name),
    )
    anchors = np.where(np.isfinite(released.upper), released.upper, released.lower)
    assert stats.kstest(anchors, distribution.cdf).pvalue > 1e-6
    assert stats.kstest(anchors, lambda u: np.clip(distribution.cdf(u) * 1.03, 0, 1)).pvalue < 1e-6


def test_references_of_a_selective_design_and_of_an_ensemble_stand_in():
    inner = {"design": "case2", "at_least": 0.1}
    made = mechanism({"design": "selective", "of": inner, "tau": 0.3, "reference": N01})
    assert made.step.words_per_row == 3
    assert isinstance(
        mechanism({"design": "ensemble", "of": [inner, inner], "reference": N01}).step.steps[0],
        Partition,
    )


def test_the_laws_of_tau_are_clipped():
    made = mechanism(
        {"design": "progressive", "anchors": N01, "tau": {"name": "norm"}, "reference": N01}
    )
    assert made.step.tau.x.min() == 0.0
    assert made.step.tau.x.max() == 1.0


UNIT = {"name": "uniform", "loc": 10, "scale": 5}


@pytest.mark.parametrize(
    ("design", "low", "high", "says"),
    [
        ({"design": "case1", "anchors": UNIT}, 0.0, 10.0, False),
        ({"design": "case1", "anchors": UNIT}, 0.0, 10.5, True),
        ({"design": "case2", "anchors": UNIT}, 14.9, 20.0, True),
        ({"design": "case2", "anchors": UNIT}, 15.0, 20.0, False),
        (
            {"design": "case2", "anchors": UNIT},
            20.0,
            20.0,
            True,
        ),  # one value: there is nothing to tell
        ({"design": "ring", "anchors": UNIT}, 20.0, 30.0, False),
        (
            {"design": "case1", "anchors": N01},
            20.0,
            30.0,
            False,
        ),  # a normal anchor never reaches 20: no word stands for it
        (
            {"design": "canonical", "n_anchors": 1, "anchors": UNIT, "acceptable": [[0, 1]]},
            0.0,
            9.0,
            True,
        ),
        (
            {
                "design": "selective",
                "of": {"design": "case1", "anchors": UNIT},
                "tau": 0.2,
                "reference": UNIT,
            },
            0.0,
            9.0,
            False,
        ),
        (
            {"design": "ensemble", "of": [{"design": "case1", "anchors": UNIT}, CASE1]},
            0.0,
            9.0,
            True,
        ),
        ({"design": "ensemble", "of": [{"design": "case1", "anchors": UNIT}] * 2}, 0.0, 9.0, False),
        (
            {"design": "progressive", "anchors": UNIT, "tau": 0.1, "reference": UNIT},
            0.0,
            9.0,
            False,
        ),
    ],
)
def test_ranges_say_something_where_an_anchor_may_fall_between_two_values(design, low, high, says):
    made = mechanism(design)
    assert can_inform(made, low, high) is says
    values = np.linspace(low, high, 20_000)
    released = made.randomise(
        values,
        np.zeros(len(values), dtype=bool),
        stream(RunKey.insecure(1), "interval/income", "a"),
    )
    if not says:
        assert held_by(released, np.full(len(values), low)).all()
        assert held_by(released, np.full(len(values), high)).all()
    elif low < high:
        assert not (
            held_by(released, np.full(len(values), low))
            & held_by(released, np.full(len(values), high))
        ).all()
