"""The errors of a synthetic table against loops over its rows, and the paper's comparisons: copulas without a decoder, and its noise."""

from itertools import combinations, product

import numpy as np
import pytest

from dpdask.mechanisms.marginals.noise import measure
from dpdask.privacy.events import epsilon as cost
from dpdask.stats import Domain, MarginalCounts
from pipelines.papers.asghar_copula import (
    cop,
    cop_id,
    cop_one,
    dpc,
    dummy_answers,
    independent_three_way,
    independent_two_way,
    laplace_answers,
    paper_noise,
    table_epsilon,
    valid_share,
)
from pipelines.papers.asghar_utility import (
    Answers,
    ErrorProfile,
    compare_answers,
    errors_of_answers,
    one_way_counts,
    one_way_total_variation,
    three_way_counts,
    three_way_queries,
    two_way_counts,
)

N = 40_000
SIZES = (3, 2, 4, 1)
DUMMIES = [(attribute, level) for attribute, size in enumerate(SIZES) for level in range(size)]
DTYPES = (np.uint8, np.int8, np.uint16, np.int32, np.int64, np.uint64)


def table(n_rows, seed, sizes=SIZES, dtype=np.uint8):
    rng = np.random.default_rng(seed)
    first = rng.integers(
        0, 12, n_rows
    )  # shared by all attributes, so that they depend on one another
    return np.stack(
        [
            np.where(rng.random(n_rows) < 0.6, first, rng.integers(0, 12, n_rows)) % size
            for size in sizes
        ]
    ).astype(dtype)


def brute(codes, *dummies, all_dummies=DUMMIES):
    """Rows that have all the dummies, one by one."""
    return sum(
        all(int(row[all_dummies[d][0]]) == all_dummies[d][1] for d in dummies) for row in codes.T
    )


def pairs():
    cells = []
    for (a, first), (b, second) in combinations(enumerate(SIZES), 2):
        cells += [
            (DUMMIES.index((a, x)), DUMMIES.index((b, y)))
            for x, y in product(range(first), range(second))
        ]
    return cells


def rng(seed=0):
    return np.random.default_rng(seed)


@pytest.mark.parametrize("dtype", DTYPES)
def test_counts_agree_with_loops(dtype):
    codes = table(97, 1, dtype=dtype)
    queries = three_way_queries(SIZES, n_queries=50, rng=rng())
    assert one_way_counts(codes, SIZES).tolist() == [brute(codes, d) for d in range(len(DUMMIES))]
    assert two_way_counts(codes, SIZES).tolist() == [brute(codes, *cell) for cell in pairs()]
    assert three_way_counts(codes, SIZES, queries).tolist() == [
        brute(codes, *query) for query in queries
    ]


def test_errors_agree_with_loops_and_scale_the_released_counts():
    original, released = table(90, 1), table(40, 2)

    def error(*dummies):
        return abs(brute(original, *dummies) - 90 / 40 * brute(released, *dummies))

    report = compare_answers(
        *(Answers.of_codes(each, SIZES, queries()) for each in (original, released)), SIZES
    )
    asked = {
        "one_way": [(d,) for d in range(len(DUMMIES))],
        "two_way": pairs(),
        "three_way": queries(),
    }
    for name, dummies in asked.items():
        wanted = ErrorProfile.of([error(*each) for each in dummies])
        found = getattr(report, name)
        np.testing.assert_allclose(found.average + found.maximum, wanted.average + wanted.maximum)


def test_total_variation_agrees_with_loops():
    original, released = table(90, 1), table(40, 2)

    def variation(*attributes):
        cells = product(
            *([d for d, (a, _) in enumerate(DUMMIES) if a == attribute] for attribute in attributes)
        )
        return (
            sum(abs(brute(original, *cell) / 90 - brute(released, *cell) / 40) for cell in cells)
            / 2
        )

    np.testing.assert_allclose(
        one_way_total_variation(original, released, SIZES), [variation(a) for a in range(4)]
    )
    answers = (Answers.of_codes(each, SIZES, queries()) for each in (original, released))
    assert compare_answers(*answers, SIZES).mean_total_variation == pytest.approx(
        np.mean([variation(a, b) for a, b in combinations(range(4), 2)])
    )


def test_queries_beyond_all_triples_are_all_triples_once():
    attributes = [attribute for attribute, _ in DUMMIES]
    every = {
        triple
        for triple in combinations(range(len(DUMMIES)), 3)
        if len({attributes[d] for d in triple}) == 3
    }
    queries = three_way_queries(SIZES, rng=rng())
    assert queries.shape == (len(every), 3)
    assert {tuple(query) for query in queries.tolist()} == every


def test_independent_answers_agree_with_loops():
    codes = table(90, 1)
    queries = three_way_queries(SIZES, rng=rng())
    share = [brute(codes, d) / 90 for d in range(len(DUMMIES))]
    np.testing.assert_allclose(
        independent_two_way(codes, SIZES), [90 * share[a] * share[b] for a, b in pairs()]
    )
    np.testing.assert_allclose(
        independent_three_way(codes, SIZES, queries),
        [90 * share[a] * share[b] * share[c] for a, b, c in queries],
    )


def test_a_profile_covers_at_least_its_percentage_and_no_query_more():
    for n in range(1, 401):
        for percent, maximum in zip(
            (95, 99, 100), ErrorProfile.of(np.arange(1.0, n + 1)).maximum, strict=True
        ):
            assert 100 * maximum >= percent * n > 100 * (maximum - 1)


def one_hot(codes):
    return np.concatenate(
        [row == np.arange(size)[:, None] for row, size in zip(codes, SIZES, strict=True)]
    ).astype(np.uint8)


def queries():
    return three_way_queries(SIZES, rng=rng())


def test_answers_of_dummies_are_those_of_the_records():
    codes = table(70_001, 1)
    found, wanted = (
        dummy_answers(one_hot(codes), SIZES, queries()),
        Answers.of_codes(codes, SIZES, queries()),
    )
    assert found.n_rows == wanted.n_rows == 70_001
    for name in ("one_way", "two_way", "three_way"):
        np.testing.assert_array_equal(getattr(found, name), getattr(wanted, name))
    assert valid_share(one_hot(codes), SIZES) == 1.0


@pytest.mark.parametrize("make", [cop, cop_id, cop_one])
def test_means_are_those_of_the_rows(make):
    codes = table(N, 1)
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
    codes = table(N, 1)
    share, meet = one_way_counts(codes, SIZES) / N, two_way_counts(codes, SIZES) / N
    first, second = np.array(pairs()).T
    found = {
        make: dummy_answers(make(codes, SIZES, rng=rng(4)), SIZES, queries()).two_way / N
        for make in (cop, cop_id, cop_one)
    }
    tolerance = 6 * np.sqrt(0.25 / N)
    assert np.abs(found[cop_id] - share[first] * share[second]).max() < tolerance
    assert np.abs(found[cop_one] - np.minimum(share[first], share[second])).max() < tolerance
    assert np.abs(found[cop] - meet).mean() < np.abs(found[cop_id] - meet).mean()


@pytest.mark.parametrize("adjacency", ["replace-one", "add-remove"])
def test_dpc_is_close_and_its_number_of_rows_is_public_or_noisy(adjacency):
    codes = table(N, 1)
    domain = Domain(names=tuple("abcd"), sizes=SIZES)
    planned = paper_noise(4, epsilon=1.0, delta=2.0**-30, adjacency=adjacency)
    exact, is_public = MarginalCounts.of_codes(domain, codes), adjacency == "replace-one"
    noisy = measure(exact, planned, n_rows_public=is_public, rng=rng(7))
    makes = [dpc(noisy, rng=rng(8)) for _ in range(2)]
    np.testing.assert_array_equal(*makes)
    assert (makes[0].shape[1] == N) == is_public
    assert abs(makes[0].shape[1] - N) < 300
    report = compare_answers(
        Answers.of_codes(codes, SIZES, queries()), dummy_answers(makes[0], SIZES, queries()), SIZES
    )
    assert report.mean_total_variation is not None
    assert report.mean_total_variation < 0.15


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


def refused(message, call, *arguments, **more):
    with pytest.raises(ValueError, match=message):
        call(*arguments, **more)


GOOD = table(20, 1)
BAD_TABLES = [GOOD[0], GOOD.astype(float), GOOD.astype(bool), GOOD[:3], GOOD[:, :0], GOOD[:0]]
BAD_TABLES += [GOOD.astype(int) - 1, GOOD + np.uint8(2)]


def test_bad_tables_are_refused():
    message = r"table|attribute"
    for bad in BAD_TABLES:
        for two in ((GOOD, bad), (bad, GOOD)):
            refused(message, one_way_total_variation, *two, SIZES)
        for count in (one_way_counts, two_way_counts):
            refused(message, count, bad, SIZES)
        refused(message, three_way_counts, bad, SIZES, np.array([[0, 3, 5]]))
        refused(message, independent_two_way, bad, SIZES)
        refused(message, independent_three_way, bad, SIZES, np.array([[0, 3, 5]]))
    for make in (cop, cop_id, cop_one):
        refused("outside its levels", make, GOOD + np.uint8(2), SIZES, rng=rng())
    dummies = one_hot(GOOD)
    for bad in (
        dummies[0],
        dummies[:9],
        dummies[:, :0],
        dummies.astype(bool),
        dummies * np.uint8(2),
    ):
        refused("dumm", dummy_answers, bad, SIZES, queries())
        refused("dumm", valid_share, bad, SIZES)
    secret = GOOD.astype(int) + 271828 * (np.arange(4)[:, None] == 2)
    refused("^attribute 2 holds a code outside its levels$", two_way_counts, secret, SIZES)


def test_bad_arguments_are_refused():
    for query in (
        [0, 3, 5],
        [[0, 3]],
        [[0, 3, -1]],
        [[0, 3, 10]],
        [[0, 3, 4]],
        [[9, 0, 1]],
        [[0.0, 3.0, 5.0]],
    ):
        for answers in (three_way_counts, independent_three_way):
            refused("three-way query", answers, GOOD, SIZES, np.array(query))
    refused("three-way query", dummy_answers, one_hot(GOOD), SIZES, np.array([[0, 1, 5]]))
    for sizes in (SIZES[:3], (3, 2, 4, 0), (*SIZES, 1), (3, 2, 4, 65_537), ()):
        refused("levels", one_way_counts, GOOD, sizes)
    for sizes, n in ((SIZES, 0), (SIZES, -1), ((2, 0, 2), 5)):
        refused("three-way queries", three_way_queries, sizes, n_queries=n, rng=rng())
    for errors in ([], [1.0, -1.0], [np.nan], [np.inf, 1.0]):
        refused("profile", ErrorProfile.of, np.array(errors))
    for true, answers in (([1, 2], [1.0]), ([1, 2], [1.0, np.nan]), ([np.inf], [1.0])):
        refused(
            "one true count and one answer", errors_of_answers, np.array(true), np.array(answers)
        )
    for n, epsilon, delta in (
        (0, 1, 0.1),
        (1, 0, 0.1),
        (1, np.inf, 0.1),
        (1, np.nan, 0.1),
        (1, 1, 0),
        (1, 1, 1),
    ):
        refused("advanced composition", table_epsilon, n, epsilon=epsilon, delta=delta)
    for scale in (0.0, -1.0, np.inf, np.nan):
        refused("scale", laplace_answers, np.array([1]), scale=scale, rng=rng())
