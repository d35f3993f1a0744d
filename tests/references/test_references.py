"""References from statistics and from declarations, and every refusal."""

from __future__ import annotations

import datetime as dt
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from scipy import stats

from dpdask.codec import LevelCodec, ValueCodec
from dpdask.documents import validate
from dpdask.errors import DataError, SpecError
from dpdask.references import (
    Holdout,
    Known,
    LevelDistribution,
    Public,
    RankDistribution,
    from_statistic,
)
from dpdask.stats import LevelCounts, RankSummary


def value_codec(**changes: Any) -> ValueCodec:
    return ValueCodec(
        **{"name": "v", "type": pa.float64(), "bounds": None, "atoms": (), "nulls": True, **changes}
    )


def level_codec(
    levels: list[Any], *, ordered: bool = True, type_: pa.DataType | None = None
) -> LevelCodec:
    return LevelCodec(name="v", levels=pa.array(levels, type=type_), ordered=ordered)


def known(codec: LevelCodec | ValueCodec, **column: Any) -> LevelDistribution | RankDistribution:
    return validate(Known, {"columns": {"v": column}}, "reference").distribution(codec)


def summary(codec: ValueCodec, rows: list[Any]) -> RankSummary:
    return RankSummary.of_batch(codec, pa.array(rows, type=codec.type))


def test_level_counts_become_frequencies() -> None:
    codec = level_codec([None, 1, 2])
    result = from_statistic(codec, LevelCounts.of_batch(codec, pa.array([1, 1, None, 1])))
    assert isinstance(result, LevelDistribution)
    assert result.probabilities.tolist() == [0.25, 0.75, 0.0]


def test_a_rank_summary_becomes_a_continualised_cdf_with_atoms_and_nulls() -> None:
    codec = value_codec(atoms=(0.0,), bounds=(-1.0, 10.0))
    result = from_statistic(codec, summary(codec, [None, 0.0, 0.0, 2.0, 4.0]))
    assert isinstance(result, RankDistribution)
    assert result.x.tolist() == [0.0, 0.0, 0.0, 2.0, 4.0]
    assert result.c == pytest.approx([0.2, 0.2, 0.6, 0.8, 1.0])
    assert (result.c[-1], result.rank_error) == (1.0, 0.0)


def test_the_gap_below_the_smallest_value_ends_at_the_bound() -> None:
    codec = value_codec(bounds=(2.0, 10.0))
    result = from_statistic(codec, summary(codec, [3.0, 6.0]))
    assert isinstance(result, RankDistribution)
    assert result.x.tolist() == [2.0, 3.0, 6.0]


@pytest.mark.parametrize("rows", [[], [1.0], [None]])
def test_fewer_than_two_rows_are_refused(rows: list[Any]) -> None:
    codec = value_codec()
    with pytest.raises(DataError, match="fewer than 2 rows"):
        from_statistic(codec, summary(codec, rows))
    levels = level_codec([None, 1.0])
    with pytest.raises(DataError, match="fewer than 2 rows"):
        from_statistic(levels, LevelCounts.of_batch(levels, pa.array(rows, type=pa.float64())))


def test_nothing_but_nulls_is_refused() -> None:
    codec = value_codec()
    with pytest.raises(DataError, match="every row of the reference is null"):
        from_statistic(codec, summary(codec, [None, None]))


def test_a_rank_error_above_the_promise_is_refused() -> None:
    codec = value_codec()
    rough = RankSummary(np.arange(100.0), np.full(100, 10), np.zeros(0, dtype=np.int64), 0, error=1)
    with pytest.raises(DataError, match="rank error"):
        from_statistic(codec, rough)


@pytest.mark.parametrize(("rows", "expected"), [([3, 3], [2.0, 3.0]), ([3, 5], [2.0, 3.0, 5.0])])
def test_whole_numbers_step_down_by_one(rows: list[int], expected: list[float]) -> None:
    codec = value_codec(type=pa.int64(), bounds=(3.0, 9.0))
    result = from_statistic(codec, summary(codec, rows))
    assert isinstance(result, RankDistribution)
    assert result.x.tolist() == expected


def test_known_probabilities_of_levels_are_rescaled_to_one() -> None:
    result = known(
        level_codec([None, "a", "b"], ordered=False), probabilities=[0.2, 0.3, 0.5000005]
    )
    assert isinstance(result, LevelDistribution)
    assert result.probabilities.sum() == pytest.approx(1.0, abs=1e-15)


def test_a_known_discrete_distribution_gives_the_levels_probabilities() -> None:
    result = known(level_codec([0, 1, 2]), name="binom", n=2, p=0.3)
    assert isinstance(result, LevelDistribution)
    assert result.probabilities == pytest.approx([0.49, 0.42, 0.09])


@pytest.mark.parametrize(
    "column",
    [
        {"probabilities": [0.5, 0.5]},
        {"probabilities": [0.5, 0.6, -0.1]},
        {"probabilities": [0.5, 0.5, 0.1]},
        {"probabilities": [0.5, 0.5, float("nan")]},
        {"name": "norm"},
        {"name": "binom", "n": 9, "p": 0.5},
        {"name": "binom"},
        {"name": "binom", "n": 2, "p": 0.3, "q": 1},
        {"name": "binom", "n": "two", "p": 0.3},
        {"name": "binom", "n": 2, "p": 7.0},
        {"name": "no_such_law"},
        {"name": "rv_continuous"},
        {"name": "kstest"},
        {},
    ],
)
def test_a_declaration_that_does_not_fit_the_levels_is_refused(column: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match="'v'"):
        known(level_codec([0, 1, 2]), **column)


@pytest.mark.parametrize(
    "codec",
    [
        level_codec(["a", "b"], ordered=False),
        level_codec([0, 1], ordered=False),
        level_codec([None, 0, 1]),
        level_codec([dt.date(2020, 1, 1), dt.date(2020, 1, 2)]),
    ],
)
def test_a_distribution_on_numbers_is_refused_for_levels_that_are_none(codec: LevelCodec) -> None:
    with pytest.raises(SpecError, match="probabilities"):
        known(codec, name="bernoulli", p=0.5)


def read(reference: Any, points: np.ndarray) -> np.ndarray:
    return np.interp(points, reference.x, reference.c)


@pytest.mark.parametrize(
    ("distribution", "column"),
    [
        (stats.norm(2.0, 3.0), {"name": "norm", "loc": 2.0, "scale": 3.0}),
        (stats.expon(scale=5), {"name": "expon", "scale": 5}),
        (stats.lognorm(1.5), {"name": "lognorm", "s": 1.5}),
        (stats.cauchy(), {"name": "cauchy"}),
        (stats.beta(0.5, 0.5), {"name": "beta", "a": 0.5, "b": 0.5}),
    ],
)
def test_the_cdf_of_a_known_distribution_is_followed_within_its_stated_error(
    distribution: Any, column: dict[str, Any]
) -> None:
    reference = known(value_codec(nulls=False), **column)
    assert isinstance(reference, RankDistribution)
    points = distribution.ppf(np.random.default_rng(1).random(5000))
    worst = np.abs(read(reference, points) - distribution.cdf(points)).max()
    assert worst <= reference.rank_error == 2.0**-15
    assert len(reference.x) <= 2**16


def test_the_cdf_of_a_known_distribution_of_whole_numbers_is_exact_at_whole_numbers() -> None:
    reference = known(value_codec(type=pa.int32()), name="poisson", mu=40.0)
    points = np.arange(10.0, 80.0)
    np.testing.assert_allclose(
        read(reference, points), stats.poisson(40.0).cdf(points), rtol=0, atol=1e-11
    )


def test_known_atoms_and_nulls_have_their_own_probabilities() -> None:
    codec = value_codec(atoms=(0.0, 1.0), bounds=(-9.0, 9.0))
    reference = known(codec, probabilities=[0.25, 0.125], null=0.125, name="norm")
    assert isinstance(reference, RankDistribution)
    assert reference.c[0] == pytest.approx(0.125)
    for atom, probability in [(0.0, 0.25), (1.0, 0.125)]:
        jump = reference.c[reference.x == atom]
        assert jump[-1] - jump[0] == pytest.approx(probability, abs=1e-12)
    assert read(reference, np.array([-1.0])) == pytest.approx(
        0.125 + 0.5 * stats.norm.cdf(-1), abs=2.0**-15
    )


def test_atoms_that_sum_to_one_but_for_rounding_are_accepted() -> None:
    codec = value_codec(atoms=(0.0, 1.0, 2.0), nulls=False)
    masses = [0.7, 0.1, 0.2000000000000003]
    assert sum(masses) > 1
    reference = known(codec, probabilities=masses, name="norm")
    assert isinstance(reference, RankDistribution)
    assert set(reference.x) == {0.0, 1.0, 2.0}
    assert reference.c[-1] == 1.0


@pytest.mark.parametrize(
    ("changes", "column"),
    [
        ({}, {"probabilities": [0.1], "name": "norm"}),
        ({"atoms": (0.0,)}, {"name": "norm"}),
        ({"atoms": (0.0,)}, {"probabilities": [-0.1], "name": "norm"}),
        ({"atoms": (0.0,)}, {"probabilities": [1.1], "name": "norm"}),
        ({"atoms": (0.0,)}, {"probabilities": [0.6], "null": 0.5, "name": "norm"}),
        ({"atoms": (0.0,)}, {"probabilities": [float("nan")], "name": "norm"}),
        ({"nulls": False}, {"null": 0.1, "name": "norm"}),
        ({"bounds": (0.0, 9.0)}, {"name": "norm"}),
        (
            {"atoms": (0.0, 1.0), "type": pa.int64()},
            {"probabilities": [0.3, 0.3], "name": "bernoulli", "p": 0.5},
        ),
        ({}, {"name": "norm", "scale": -1.0}),
        ({}, {"name": "norm", "scale": [1.0, 2.0]}),
        ({}, {"name": "norm", "sclae": 1.0}),
        ({}, {}),
    ],
)
def test_a_declaration_that_does_not_fit_the_values_is_refused(
    changes: dict[str, Any], column: dict[str, Any]
) -> None:
    with pytest.raises(SpecError, match="'v'"):
        known(value_codec(**changes), **column)


def test_a_column_without_a_declaration_is_refused() -> None:
    with pytest.raises(SpecError, match="no declared distribution"):
        Known(columns={}).distribution(value_codec())


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.5, float("nan"), "half"])
def test_a_holdout_fraction_outside_the_open_unit_interval_is_refused(fraction: Any) -> None:
    with pytest.raises(SpecError, match="fraction"):
        validate(Holdout, {"fraction": fraction}, "reference")


@pytest.mark.parametrize("null", [-0.1, 1.0])
def test_a_null_probability_outside_the_unit_interval_is_refused(null: float) -> None:
    with pytest.raises(SpecError, match="null"):
        validate(Known, {"columns": {"v": {"name": "norm", "null": null}}}, "reference")


def test_every_reference_says_who_is_protected_and_who_is_not() -> None:
    for reference in (Holdout(fraction=0.25), Public(), Known(columns={})):
        assert reference.protected
        assert reference.unprotected
    assert "0.25" in Holdout(fraction=0.25).unprotected


@pytest.mark.parametrize(
    ("type_", "column"),
    [
        (pa.int8(), {"name": "poisson", "mu": 500}),
        (pa.uint16(), {"name": "norm", "loc": 0.0, "scale": 9.0}),
        (pa.float16(), {"name": "norm", "scale": 1e6}),
    ],
)
def test_a_distribution_whose_values_the_columns_type_cannot_hold_is_refused(
    type_: pa.DataType, column: dict[str, Any]
) -> None:
    with pytest.raises(SpecError, match="cannot hold"):
        known(value_codec(type=type_), **column)
