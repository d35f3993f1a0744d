"""References from statistics and from declarations, and every refusal."""

import datetime as dt
from functools import partial

import numpy as np
import pyarrow as pa
import pytest
import strategies
from scipy import stats
from strategies import level_codec

from dpdask.codec import LevelCodec
from dpdask.documents import validate
from dpdask.errors import DataError, SpecError
from dpdask.references import Holdout, Known, from_statistic
from dpdask.stats import LevelCounts, RankSummary

value_codec = partial(strategies.value_codec, bounds=None, nulls=True)


def known(codec, **column):
    return validate(Known, {"columns": {"v": column}}, "reference").distribution(codec)


def counted(codec, rows):
    if isinstance(codec, LevelCodec):
        return from_statistic(
            codec, LevelCounts.of_batch(codec, pa.array(rows, type=codec.levels.type))
        )
    return from_statistic(codec, RankSummary.of_batch(codec, pa.array(rows, type=codec.type)))


WHOLE = value_codec(type_=pa.int64(), bounds=(3.0, 9.0))
LEVELS = level_codec([0, 1, 2])


@pytest.mark.parametrize(
    ("codec", "rows", "x", "c"),
    [
        (
            value_codec(atoms=(0.0,), bounds=(-1.0, 10.0)),
            [None, 0.0, 0.0, 2.0, 4.0],
            [0.0, 0.0, 0.0, 2.0, 4.0],
            [0.2, 0.2, 0.6, 0.8, 1.0],
        ),
        (
            value_codec(bounds=(2.0, 10.0)),
            [3.0, 6.0],
            [2.0, 3.0, 6.0],
            [0.0, 0.5, 1.0],
        ),  # the gap below the least value ends at the bound
        (WHOLE, [3, 3], [2.0, 3.0], [0.0, 1.0]),
        (WHOLE, [3, 5], [2.0, 3.0, 5.0], [0.0, 0.5, 1.0]),
    ],
)
def test_a_rank_summary_becomes_a_continualised_cdf(codec, rows, x, c):
    result = counted(codec, rows)
    assert result.x.tolist() == x
    assert result.c == pytest.approx(c)
    assert (result.c[-1], result.rank_error) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("result", "probabilities"),
    [
        (counted(level_codec([None, 1, 2]), [1, 1, None, 1]), [0.25, 0.75, 0.0]),
        (
            known(
                level_codec([None, "a", "b"], ordered=False), probabilities=[0.2, 0.3, 0.5000005]
            ),
            [0.2, 0.3, 0.5],
        ),
        (known(LEVELS, name="binom", n=2, p=0.3), [0.49, 0.42, 0.09]),
    ],
    ids=["counted", "rescaled to one", "of a distribution"],
)
def test_levels_have_probabilities(result, probabilities):
    assert result.probabilities == pytest.approx(probabilities, abs=1e-6)
    assert result.probabilities.sum() == pytest.approx(1.0, abs=1e-15)


@pytest.mark.parametrize("rows", [[], [1.0], [None]])
@pytest.mark.parametrize(
    "codec", [value_codec(), level_codec([None, 1.0])], ids=["values", "levels"]
)
def test_fewer_than_two_rows_are_refused(codec, rows):
    with pytest.raises(DataError, match="fewer than 2 rows"):
        counted(codec, rows)


def test_nothing_but_nulls_and_a_rank_error_above_the_promise_are_refused():
    with pytest.raises(DataError, match="every row of the reference is null"):
        counted(value_codec(), [None, None])
    rough = RankSummary(np.arange(100.0), np.full(100, 10), np.zeros(0, dtype=np.int64), 0, error=1)
    with pytest.raises(DataError, match="rank error"):
        from_statistic(value_codec(), rough)


ATOM = value_codec(atoms=(0.0,))
BERNOULLI = {"name": "bernoulli", "p": 0.5}
REFUSED = [
    (LEVELS, {"probabilities": [0.5, 0.5]}, "'v'"),
    (LEVELS, {"probabilities": [0.5, 0.6, -0.1]}, "'v'"),
    (LEVELS, {"probabilities": [0.5, 0.5, 0.1]}, "'v'"),
    (LEVELS, {"probabilities": [0.5, 0.5, float("nan")]}, "'v'"),
    (LEVELS, {"name": "norm"}, "'v'"),
    (LEVELS, {"name": "binom", "n": 9, "p": 0.5}, "'v'"),
    (LEVELS, {"name": "binom"}, "'v'"),
    (LEVELS, {"name": "binom", "n": 2, "p": 0.3, "q": 1}, "'v'"),
    (LEVELS, {"name": "binom", "n": "two", "p": 0.3}, "'v'"),
    (LEVELS, {"name": "binom", "n": 2, "p": 7.0}, "'v'"),
    (LEVELS, {"name": "no_such_law"}, "'v'"),
    (LEVELS, {"name": "rv_continuous"}, "'v'"),
    (LEVELS, {"name": "kstest"}, "'v'"),
    (LEVELS, {}, "'v'"),
    (level_codec(["a", "b"], ordered=False), BERNOULLI, "probabilities"),
    (level_codec([0, 1], ordered=False), BERNOULLI, "probabilities"),
    (level_codec([None, 0, 1]), BERNOULLI, "probabilities"),
    (level_codec([dt.date(2020, 1, 1), dt.date(2020, 1, 2)]), BERNOULLI, "probabilities"),
    (value_codec(), {"probabilities": [0.1], "name": "norm"}, "'v'"),
    (ATOM, {"name": "norm"}, "'v'"),
    (ATOM, {"probabilities": [-0.1], "name": "norm"}, "'v'"),
    (ATOM, {"probabilities": [1.1], "name": "norm"}, "'v'"),
    (ATOM, {"probabilities": [0.6], "null": 0.5, "name": "norm"}, "'v'"),
    (ATOM, {"probabilities": [float("nan")], "name": "norm"}, "'v'"),
    (value_codec(nulls=False), {"null": 0.1, "name": "norm"}, "'v'"),
    (value_codec(bounds=(0.0, 9.0)), {"name": "norm"}, "'v'"),
    (
        value_codec(atoms=(0.0, 1.0), type_=pa.int64()),
        {"probabilities": [0.3, 0.3], "name": "bernoulli", "p": 0.5},
        "'v'",
    ),
    (value_codec(), {"name": "norm", "scale": -1.0}, "'v'"),
    (value_codec(), {"name": "norm", "scale": [1.0, 2.0]}, "'v'"),
    (value_codec(), {"name": "norm", "sclae": 1.0}, "'v'"),
    (value_codec(), {}, "'v'"),
    (value_codec(type_=pa.int8()), {"name": "poisson", "mu": 500}, "cannot hold"),
    (value_codec(type_=pa.uint16()), {"name": "norm", "loc": 0.0, "scale": 9.0}, "cannot hold"),
    (value_codec(type_=pa.float16()), {"name": "norm", "scale": 1e6}, "cannot hold"),
]


@pytest.mark.parametrize(("codec", "column", "says"), REFUSED)
def test_a_declaration_that_does_not_fit_the_column_is_refused(codec, column, says):
    with pytest.raises(SpecError, match=says):
        known(codec, **column)


@pytest.mark.parametrize(
    ("spec", "wrong", "says"),
    [
        *(
            (Holdout, {"fraction": fraction}, "fraction")
            for fraction in (0.0, 1.0, -0.5, float("nan"), "half")
        ),
        *(
            (Known, {"columns": {"v": {"name": "norm", "null": null}}}, "null")
            for null in (-0.1, 1.0)
        ),
    ],
)
def test_a_parameter_outside_its_interval_is_refused(spec, wrong, says):
    with pytest.raises(SpecError, match=says):
        validate(spec, wrong, "reference")
    with pytest.raises(SpecError, match="no declared distribution"):
        Known(columns={}).distribution(value_codec())


def read(reference, points):
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
def test_the_cdf_of_a_known_distribution_is_followed_within_its_stated_error(distribution, column):
    reference = known(value_codec(nulls=False), **column)
    points = distribution.ppf(np.random.default_rng(1).random(5000))
    worst = np.abs(read(reference, points) - distribution.cdf(points)).max()
    assert worst <= reference.rank_error == 2.0**-15
    assert len(reference.x) <= 2**16


def test_the_cdf_of_a_known_distribution_of_whole_numbers_is_exact_at_whole_numbers():
    reference = known(value_codec(type_=pa.int32()), name="poisson", mu=40.0)
    points = np.arange(10.0, 80.0)
    np.testing.assert_allclose(
        read(reference, points), stats.poisson(40.0).cdf(points), rtol=0, atol=1e-11
    )


def test_known_atoms_and_nulls_have_their_own_probabilities():
    codec = value_codec(atoms=(0.0, 1.0), bounds=(-9.0, 9.0))
    reference = known(codec, probabilities=[0.25, 0.125], null=0.125, name="norm")
    assert reference.c[0] == pytest.approx(0.125)
    for atom, probability in [(0.0, 0.25), (1.0, 0.125)]:
        jump = reference.c[reference.x == atom]
        assert jump[-1] - jump[0] == pytest.approx(probability, abs=1e-12)
    assert read(reference, np.array([-1.0])) == pytest.approx(
        0.125 + 0.5 * stats.norm.cdf(-1), abs=2.0**-15
    )


def test_atoms_that_sum_to_one_but_for_rounding_are_accepted():
    codec = value_codec(atoms=(0.0, 1.0, 2.0), nulls=False)
    masses = [0.7, 0.1, 0.2000000000000003]
    assert sum(masses) > 1
    reference = known(codec, probabilities=masses, name="norm")
    assert set(reference.x) == {0.0, 1.0, 2.0}
    assert reference.c[-1] == 1.0
