"""The paper's comparisons: dummies of the copula without a decoder, their counts, and the noise that the paper's theorem asks for."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from dpdask.privacy.accountant import epsilon as cost
from pipelines.papers import asghar_copula
from pipelines.papers.asghar_copula import (
    cop,
    cop_id,
    cop_one,
    dpc,
    dummy_answers,
    laplace_answers,
    paper_noise,
    table_epsilon,
    valid_share,
)
from pipelines.papers.asghar_utility import (
    Answers,
    compare,
    compare_answers,
    errors_of_answers,
    one_way_counts,
    three_way_queries,
    two_way_counts,
)

SIZES = (3, 2, 4, 1)
N = 40_000


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def table(n: int = N, seed: int = 1) -> np.ndarray:
    draw = rng(seed)
    first = draw.integers(0, 12, n)
    return np.stack(
        [np.where(draw.random(n) < 0.6, first, draw.integers(0, 12, n)) % size for size in SIZES]
    ).astype(np.uint8)


def one_hot(codes: np.ndarray) -> np.ndarray:
    return np.concatenate(
        [row == np.arange(size)[:, None] for row, size in zip(codes, SIZES, strict=True)]
    ).astype(np.uint8)


def pair_dummies() -> tuple[np.ndarray, np.ndarray]:
    """The two dummies of each two-way cell."""
    starts = np.cumsum([0, *SIZES])
    cells = [
        (i, j)
        for a, b in combinations(range(4), 2)
        for i in range(starts[a], starts[a + 1])
        for j in range(starts[b], starts[b + 1])
    ]
    first, second = np.array(cells).T
    return first, second


def queries() -> np.ndarray:
    return three_way_queries(SIZES, rng=rng())


def test_answers_of_dummies_are_those_of_the_records():
    codes = table(70_001)
    found, wanted = (
        dummy_answers(one_hot(codes), SIZES, queries()),
        Answers.of_codes(codes, SIZES, queries()),
    )
    assert found.n_rows == wanted.n_rows == 70_001
    for name in ("one_way", "two_way", "three_way"):
        np.testing.assert_array_equal(getattr(found, name), getattr(wanted, name))
    assert valid_share(one_hot(codes), SIZES) == 1.0


def test_answers_of_dummies_agree_with_loops_where_rows_are_no_records():
    dummies = rng(2).integers(0, 2, (10, 50)).astype(np.uint8)
    found = dummy_answers(dummies, SIZES, queries())
    owners = np.repeat(range(4), SIZES)
    assert found.one_way.tolist() == [int(row.sum()) for row in dummies]
    assert found.two_way.tolist() == [
        int((dummies[i] & dummies[j]).sum()) for i, j in zip(*pair_dummies(), strict=True)
    ]
    assert found.three_way.tolist() == [
        int((dummies[i] & dummies[j] & dummies[k]).sum()) for i, j, k in queries()
    ]
    records = [all(dummies[owners == a, row].sum() == 1 for a in range(4)) for row in range(50)]
    assert valid_share(dummies, SIZES) == pytest.approx(np.mean(records))


def test_comparing_answers_is_comparing_tables_and_scales_them():
    codes, other = table(900), table(350, 5)
    report = compare(codes, other, SIZES, rng=rng())
    assert (
        compare_answers(
            Answers.of_codes(codes, SIZES, queries()),
            dummy_answers(one_hot(other), SIZES, queries()),
            SIZES,
        )
        == report
    )
    unanswered = Answers(
        n_rows=900,
        one_way=one_way_counts(codes, SIZES),
        two_way=two_way_counts(codes, SIZES),
        three_way=None,
    )
    report = compare_answers(Answers.of_codes(codes, SIZES, queries()), unanswered, SIZES)
    assert report.three_way is None
    assert report.mean_total_variation == 0.0


@pytest.mark.parametrize("make", [cop, cop_id, cop_one])
def test_means_are_those_of_the_rows(make):
    codes = table()
    dummies = make(codes, SIZES, rng=rng(3))
    assert dummies.shape == (10, N)
    counts = one_way_counts(codes, SIZES)
    assert (
        np.abs(dummies.sum(axis=1, dtype=np.int64) - counts)
        <= 6 * np.sqrt(counts * (1 - counts / N) + 1e-9)
    ).all()
    assert valid_share(dummies, SIZES) < 1
    np.testing.assert_array_equal(dummies, make(codes, SIZES, rng=rng(3)))


def test_pairs_meet_as_the_correlations_say():
    codes = table()
    share, meet = one_way_counts(codes, SIZES) / N, two_way_counts(codes, SIZES) / N
    first, second = pair_dummies()
    found = {
        make: dummy_answers(make(codes, SIZES, rng=rng(4)), SIZES, queries()).two_way / N
        for make in (cop, cop_id, cop_one)
    }
    tolerance = 6 * np.sqrt(0.25 / N)
    assert np.abs(found[cop_id] - share[first] * share[second]).max() < tolerance
    assert np.abs(found[cop_one] - np.minimum(share[first], share[second])).max() < tolerance
    assert (
        np.abs(cop_independent(codes) - meet).max() < 0.05
    )  # the nearest correlation matrix moves them
    assert np.abs(found[cop] - meet).mean() < np.abs(found[cop_id] - meet).mean()


def cop_independent(codes: np.ndarray) -> np.ndarray:
    return (
        dummy_answers(cop(codes, SIZES, within="independent", rng=rng(4)), SIZES, queries()).two_way
        / N
    )


def test_levels_of_an_attribute_meet_less_if_they_are_disjoint():
    codes = table()
    together = {
        within: cop(codes, SIZES, within=within, rng=rng(6))[[0, 1]].all(axis=0).mean()
        for within in ("disjoint", "independent")
    }
    assert together["disjoint"] < 0.5 * together["independent"]


@pytest.mark.parametrize("adjacency", ["replace-one", "add-remove"])
def test_dpc_is_close_and_its_number_of_rows_is_public_or_noisy(adjacency):
    codes = table()
    makes = [
        dpc(
            codes,
            SIZES,
            epsilon=1.0,
            delta=2.0**-30,
            adjacency=adjacency,
            noise_rng=rng(7),
            rng=rng(8),
        )
        for _ in range(2)
    ]
    np.testing.assert_array_equal(*makes)
    assert (makes[0].shape[1] == N) == (adjacency == "replace-one")
    assert abs(makes[0].shape[1] - N) < 300
    report = compare_answers(
        Answers.of_codes(codes, SIZES, queries()), dummy_answers(makes[0], SIZES, queries()), SIZES
    )
    assert report.mean_total_variation is not None
    assert report.mean_total_variation < 0.15


def test_dpc_without_a_stream_is_not_reproducible():
    codes = table(2000)
    first, second = (
        dpc(codes, SIZES, epsilon=1.0, delta=1e-9, adjacency="replace-one", rng=rng(1))
        for _ in range(2)
    )
    assert (first != second).any()


def test_noise_is_the_papers():
    n_tables = 14 + 91
    share = table_epsilon(n_tables, epsilon=1.0, delta=2.0**-30)
    assert share == pytest.approx(0.014783, abs=1e-6)
    total = share * np.sqrt(2 * n_tables * 30 * np.log(2)) + n_tables * share * np.expm1(share)
    assert 1 - 1e-12 < total <= 1
    for adjacency, sensitivity in (("replace-one", 2), ("add-remove", 1)):
        planned = paper_noise(14, epsilon=1.0, delta=2.0**-30, adjacency=adjacency)
        assert planned.one_way.scale == planned.pairs.scale == pytest.approx(sensitivity / share)
        assert (planned.one_way.count, planned.pairs.count) == (14, 91)
        assert (
            0.5 < cost(planned.event, 2.0**-30) <= 1
        )  # our accountant finds it cheaper, and never dearer
    assert paper_noise(1, epsilon=1.0, delta=1e-9, adjacency="add-remove").pairs is None


@pytest.mark.parametrize(
    ("n_tables", "epsilon", "delta"),
    [
        (0, 1.0, 0.1),
        (1, 0.0, 0.1),
        (1, np.inf, 0.1),
        (1, np.nan, 0.1),
        (1, 1.0, 0.0),
        (1, 1.0, 1.0),
    ],
)
def test_bad_budgets_are_refused(n_tables, epsilon, delta):
    with pytest.raises(ValueError, match="advanced composition"):
        table_epsilon(n_tables, epsilon=epsilon, delta=delta)


def test_laplace_answers_have_the_scale_and_are_clipped_on_demand():
    counts = np.repeat([0, 1000], 20_000)
    noisy = laplace_answers(counts, scale=20.0, clip=False, rng=rng(1))
    errors = errors_of_answers(counts, noisy)
    assert abs(errors.mean() - 20.0) < 0.5  # five standard errors
    assert abs(np.median(errors) - 20.0 * np.log(2)) < 0.5
    assert abs((noisy - counts).mean()) < 0.75
    clipped = laplace_answers(counts, scale=20.0, rng=rng(1))
    assert clipped.tolist() == np.maximum(noisy, 0).tolist()
    assert clipped.min() == 0


@pytest.mark.parametrize("scale", [0.0, -1.0, np.inf, np.nan])
def test_bad_scales_are_refused(scale):
    with pytest.raises(ValueError, match="scale"):
        laplace_answers(np.array([1]), scale=scale, rng=rng())


GOOD = one_hot(table(20))


@pytest.mark.parametrize(
    "bad",
    [GOOD[0], GOOD[:9], GOOD[:, :0], GOOD.astype(bool), GOOD * np.uint8(2)],
    ids=lambda bad: f"{bad.dtype}{bad.shape}",
)
def test_bad_dummies_are_refused(bad):
    for measure in (lambda: dummy_answers(bad, SIZES, queries()), lambda: valid_share(bad, SIZES)):
        with pytest.raises(ValueError, match="dumm"):
            measure()


def test_bad_queries_and_tables_are_refused():
    with pytest.raises(ValueError, match="three-way query"):
        dummy_answers(GOOD, SIZES, np.array([[0, 1, 5]]))
    for make in (cop, cop_id, cop_one):
        with pytest.raises(ValueError, match="outside its levels"):
            make(table(20) + np.uint8(1), SIZES, rng=rng())


def test_every_function_says_whether_it_is_confidential():
    for name, member in vars(asghar_copula).items():
        if (
            not name.startswith("_")
            and callable(member)
            and getattr(member, "__module__", "") == asghar_copula.__name__
        ):
            assert "confidential" in member.__doc__.splitlines()[0], name
