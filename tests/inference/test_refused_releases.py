"""Releases from which nothing can be learnt: refused in one line that says why, never answered with a number."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from dpdask.errors import DataError, DpdaskError, SpecError
from dpdask.inference import m_estimators as me
from dpdask.inference.m_estimators import WeightedSample
from dpdask.inference.range_estimates import npmle
from dpdask.mechanisms.interval.design import Case1, Case2, Design, Ring, ScipyDistribution
from dpdask.mechanisms.interval.fit import range_randomiser
from dpdask.mechanisms.interval.ranges import Ranges
from dpdask.stats.ranges import RangeCounts, grid_of_ranges
from dpdask.streams import RunKey, stream

INF = math.inf
GRID = np.array([0.2, 0.5, 0.8])


def released(design: Design, values: np.ndarray) -> Ranges:
    made = range_randomiser("y", design)
    return made.randomise(
        values, np.zeros(len(values), dtype=bool), stream(RunKey.insecure(2), "interval/y", "a")
    )


def uniform(low: float, high: float) -> ScipyDistribution:
    return ScipyDistribution(name="uniform", loc=low, scale=high - low)


def estimate(found: Ranges, **options: Any) -> Any:
    return npmle(
        RangeCounts.of_batch(
            grid_of_ranges(found.lower, found.upper, 500), found.lower, found.upper
        ),
        **options,
    )


def one_line(error: DpdaskError, code: int) -> None:
    assert error.exit_code == code
    assert "\n" not in str(error)
    assert error.hint


@pytest.mark.parametrize(("low", "high"), [(2.0, 3.0), (-3.0, -2.0), (0.9, 3.0)])
def test_anchors_that_do_not_reach_the_values_do_not_identify_their_distribution(
    low: float, high: float
) -> None:
    values = np.random.default_rng(1).uniform(0, 0.8, 4000)
    for design in (
        Case1(design="case1", anchors=uniform(low, high)),
        Case2(design="case2", anchors=uniform(low, high)),
    ):
        with pytest.raises(
            SpecError,
            match=r"npmle: the ranges do not determine where the mass lies.*; use a mechanism whose anchors reach everywhere",
        ) as caught:
            estimate(released(design, values), support=(-3.0, 3.0))
        one_line(caught.value, 64)
    reaching = estimate(
        released(Case1(design="case1", anchors=uniform(-0.2, 1.0)), values), support=(-3.0, 3.0)
    )
    assert reaching.moment(1) == pytest.approx(0.4, abs=0.05)


def test_rings_that_tell_no_half_from_the_other() -> None:
    """Their gaps lie away from the values: every outer range is one, on both sides."""
    found = released(
        Ring(design="ring", anchors=uniform(2.0, 3.0)), np.random.default_rng(1).uniform(0, 1, 2000)
    )
    with pytest.raises(SpecError) as caught:
        estimate(found)
    one_line(caught.value, 64)


def test_ranges_without_ends_say_nothing() -> None:
    with pytest.raises(
        SpecError, match="no range has a finite end, so the ranges carry no information"
    ) as caught:
        grid_of_ranges(np.full(5, -INF), np.full(5, INF))
    one_line(caught.value, 64)


@pytest.mark.parametrize(
    ("lower", "upper", "words"),
    [
        (INF, 1.0, "a range is empty"),
        (0.0, -INF, "a range is empty"),
        (math.nan, 1.0, "is missing"),
    ],
)
def test_ranges_that_hold_no_value_are_wrong_data(lower: float, upper: float, words: str) -> None:
    with pytest.raises(DataError, match=words) as caught:
        RangeCounts.of_batch(GRID, np.array([0.0, lower]), np.array([0.5, upper]))
    one_line(caught.value, 65)


def test_crossed_ends_are_a_rings_outer_range_and_no_empty_one() -> None:
    counts = RangeCounts.of_batch(GRID, np.array([0.8, 0.2, -INF]), np.array([0.2, 0.5, 0.5]))
    assert npmle(counts, max_ambiguity=1.0).masses.sum() == pytest.approx(1.0)


def sample(weights: np.ndarray) -> WeightedSample:
    x = np.linspace(0.0, 1.0, len(weights))
    return WeightedSample(features=x[:, None], response=2.0 * x, weights=weights)


@pytest.mark.parametrize(
    "weights",
    [np.zeros(8), np.zeros(0), np.array([1.0, -1.0, 0.0])],
    ids=["zero", "none", "cancelling"],
)
def test_weights_that_a_threshold_left_nothing_of(weights: np.ndarray) -> None:
    with pytest.raises(
        SpecError,
        match=r"weights: the weights sum to 0, so they hold no sample; release with a larger epsilon",
    ) as caught:
        sample(weights)
    one_line(caught.value, 64)
    assert me.least_squares(sample(np.ones(8)))[-1] == pytest.approx(2.0)


@pytest.mark.parametrize("where", ["at once", "later"])
def test_a_contrast_that_gives_nan(where: str) -> None:
    def contrast(points: np.ndarray, theta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        off = theta[0] - points[:, 0]
        good = where == "later" and theta[0] < 0.25  # on the way to the minimum, at 1
        return (off**2 if good else np.full(len(points), np.nan)), 2.0 * off[:, None]

    with pytest.raises(
        SpecError, match=r"the contrast: gives NaN; define it at every point and every θ"
    ) as caught:
        me.minimise(contrast, np.ones((5, 1)), np.ones(5), np.zeros(1))
    one_line(caught.value, 64)
