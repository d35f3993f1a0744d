"""The errors of a synthetic table: each against a loop over the rows, and against tables whose errors are known."""

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.papers import asghar_baselines as baselines
from pipelines.papers import asghar_utility as utility
from pipelines.papers.asghar_utility import (
    ErrorProfile,
    UtilityReport,
    compare,
    errors_of_answers,
    one_way_counts,
    one_way_errors,
    one_way_total_variation,
    three_way_counts,
    three_way_errors,
    three_way_queries,
    total_variation,
    two_way_counts,
    two_way_errors,
)

SIZES = (2, 3, 4, 1)
DUMMIES = [(attribute, level) for attribute, size in enumerate(SIZES) for level in range(size)]
DTYPES = (np.uint8, np.int8, np.uint16, np.int32, np.int64, np.uint64)


def table(
    n_rows: int, seed: int, sizes: Sequence[int] = SIZES, dtype: Any = np.uint8
) -> np.ndarray:
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


def brute(
    codes: np.ndarray, *dummies: int, all_dummies: Sequence[tuple[int, int]] = DUMMIES
) -> int:
    """Rows that have all the dummies, one by one."""
    return sum(
        all(int(row[all_dummies[d][0]]) == all_dummies[d][1] for d in dummies) for row in codes.T
    )


def pairs() -> list[tuple[int, int]]:
    cells = []
    for (a, first), (b, second) in combinations(enumerate(SIZES), 2):
        cells += [
            (DUMMIES.index((a, x)), DUMMIES.index((b, y)))
            for x, y in product(range(first), range(second))
        ]
    return cells


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@st.composite
def coded_tables(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, tuple[int, ...]]:
    sizes = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=5)))
    dtype = draw(st.sampled_from(DTYPES))
    return (
        table(draw(st.integers(1, 150)), draw(st.integers(0, 99)), sizes, dtype),
        table(draw(st.integers(1, 150)), 100, sizes),
        sizes,
    )


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

    def error(*dummies: int) -> float:
        return abs(brute(original, *dummies) - 90 / 40 * brute(released, *dummies))

    queries = three_way_queries(SIZES, n_queries=30, rng=rng(7))
    np.testing.assert_allclose(
        one_way_errors(original, released, SIZES), [error(d) for d in range(len(DUMMIES))]
    )
    np.testing.assert_allclose(
        two_way_errors(original, released, SIZES), [error(*cell) for cell in pairs()]
    )
    np.testing.assert_allclose(
        three_way_errors(original, released, SIZES, n_queries=30, rng=rng(7)),
        [error(*query) for query in queries],
    )


def test_total_variation_agrees_with_loops():
    original, released = table(90, 1), table(40, 2)

    def variation(*attributes: int) -> float:
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
    np.testing.assert_allclose(
        total_variation(original, released, SIZES),
        [variation(a, b) for a, b in combinations(range(4), 2)],
    )
    report = compare(original, released, SIZES, n_queries=5, rng=rng())
    assert report.mean_total_variation == pytest.approx(
        np.mean([variation(a, b) for a, b in combinations(range(4), 2)])
    )


def test_blocks_of_rows_add_up(monkeypatch):
    codes = table(1000, 3)
    queries = three_way_queries(SIZES, rng=rng())
    whole = three_way_counts(codes, SIZES, queries)
    for rows in (64, 100, 999, 1000):
        monkeypatch.setattr(utility, "_BLOCK_ROWS", rows)
        assert three_way_counts(codes, SIZES, queries).tolist() == whole.tolist()


@given(coded_tables())
def test_laws_of_the_errors(tables):
    original, released, sizes = tables
    n = original.shape[1]
    assert not any(
        errors.any()
        for errors in (
            one_way_errors(original, original, sizes),
            two_way_errors(original, original, sizes),
        )
    )
    assert two_way_counts(original, sizes).sum() == n * len(sizes) * (len(sizes) - 1) // 2
    one_way, variation = (
        one_way_total_variation(original, released, sizes),
        total_variation(original, released, sizes),
    )
    assert ((variation >= 0) & (variation <= 1 + 1e-12)).all()
    for place, (a, b) in enumerate(
        combinations(range(len(sizes)), 2)
    ):  # merging cells never adds distance
        assert variation[place] >= max(one_way[a], one_way[b]) - 1e-12
    np.testing.assert_allclose(total_variation(released, original, sizes), variation, atol=1e-12)


def test_equal_tables_have_no_error_and_the_order_of_rows_does_not_matter():
    original = table(500, 1)
    for released in (
        original.copy(),
        original[:, rng().permutation(500)],
        np.concatenate([original, original], axis=1),
    ):
        report = compare(original, released, SIZES, rng=rng())
        none = ErrorProfile(average=(0.0, 0.0, 0.0), maximum=(0.0, 0.0, 0.0))
        assert report == UtilityReport(
            one_way=none, two_way=none, three_way=none, mean_total_variation=0.0
        )


def test_a_column_permuted_on_its_own_keeps_one_way_counts_alone():
    original = table(500, 1)
    released = original.copy()
    released[1] = released[1, rng().permutation(500)]
    report = compare(original, released, SIZES, rng=rng())
    assert report.one_way.maximum[-1] == 0
    assert report.two_way is not None
    assert report.two_way.maximum[-1] > 0
    assert report.three_way is not None
    assert report.three_way.maximum[-1] > 0
    variation = total_variation(original, released, SIZES)
    assert (variation[[0, 3]] > 0).all()  # pairs with the permuted attribute
    assert (
        variation[[1, 2, 5]] == 0
    ).all()  # pairs without it, or with the attribute of a single level
    assert report.mean_total_variation == variation.mean()


def test_disjoint_tables_are_at_distance_one():
    original, released = np.zeros((3, 10), dtype=int), np.ones((3, 7), dtype=int)
    assert total_variation(original, released, (2, 2, 2)).tolist() == [1.0, 1.0, 1.0]
    assert one_way_errors(original, released, (2, 2, 2)).tolist() == [10.0] * 6


def test_profiles_of_known_errors():
    errors = rng().permutation(np.arange(1.0, 101.0))
    assert ErrorProfile.of(errors) == ErrorProfile(
        average=(48.0, 50.0, 50.5), maximum=(95.0, 99.0, 100.0)
    )
    assert ErrorProfile.of(np.array([3.0])) == ErrorProfile(
        average=(3.0, 3.0, 3.0), maximum=(3.0, 3.0, 3.0)
    )
    assert ErrorProfile.of(np.array([5.0, 1.0])).maximum == (
        5.0,
        5.0,
        5.0,
    )  # at least 95 % of two queries are both


@pytest.mark.parametrize("n", range(1, 401))
def test_a_profile_covers_at_least_its_percentage_and_no_query_more(n):
    for percent, maximum in zip(
        (95, 99, 100), ErrorProfile.of(np.arange(1.0, n + 1)).maximum, strict=True
    ):
        assert 100 * maximum >= percent * n > 100 * (maximum - 1)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=60))
def test_profiles_rise_with_the_percentage(errors):
    profile = ErrorProfile.of(np.array(errors))
    assert list(profile.maximum) == sorted(profile.maximum)
    assert profile.maximum[-1] == max(errors)
    assert all(
        average <= maximum * (1 + 1e-12)
        for average, maximum in zip(profile.average, profile.maximum, strict=True)
    )


def test_a_report_reads_as_the_tables_do():
    one_way = ErrorProfile(average=(92.2, 107.4, 106.0), maximum=(389.0, 482.0, 773.0))
    two_way = ErrorProfile(average=(0.724, 8.23, 19.96), maximum=(10.0, 62.4, 808.0))
    report = UtilityReport(
        one_way=one_way, two_way=two_way, three_way=None, mean_total_variation=0.04163
    )
    assert str(one_way) == "92/389 · 107/482 · 106/773"
    assert (
        report.to_markdown_row("dpc")
        == "| dpc | 92/389 · 107/482 · 106/773 | 0.72/10 · 8.2/62 · 20.0/808 | – | 0.0416 |"
    )


@pytest.mark.parametrize("sizes", [(3,), (3, 2), (3, 2, 2)])
def test_tables_with_few_attributes(sizes):
    report = compare(table(50, 1, sizes), table(50, 2, sizes), sizes, rng=rng())
    assert (
        report.two_way is None,
        report.mean_total_variation is None,
        report.three_way is None,
    ) == (len(sizes) < 2, len(sizes) < 2, len(sizes) < 3)
    assert report.to_markdown_row("x").count("–") == 2 * (len(sizes) < 2) + (len(sizes) < 3)


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


def test_queries_are_uniform_over_triples_and_follow_the_generator():
    n_draws, n_triples = 4000, 24 + 6 + 8 + 12
    drawn = [
        tuple(three_way_queries(SIZES, n_queries=1, rng=generator)[0])
        for generator in [rng(3)]
        for _ in range(n_draws)
    ]
    counts = np.array([drawn.count(triple) for triple in set(drawn)])
    assert len(counts) == n_triples
    expected = n_draws / n_triples
    assert (
        (counts - expected) ** 2 / expected
    ).sum() < 94  # the 99.99 % quantile of χ² with 49 degrees of freedom
    assert (
        three_way_queries((9,) * 9, n_queries=99, rng=rng(5)).tolist()
        == three_way_queries((9,) * 9, n_queries=99, rng=rng(5)).tolist()
    )
    assert (
        three_way_queries((9,) * 9, n_queries=99, rng=rng(5)).tolist()
        != three_way_queries((9,) * 9, n_queries=99, rng=rng(6)).tolist()
    )


def test_errors_of_answers():
    assert errors_of_answers(np.array([5, 3, 0]), np.array([4.5, 3.0, -2.0])).tolist() == [
        0.5,
        0.0,
        2.0,
    ]


def test_independent_answers_agree_with_loops():
    codes = table(90, 1)
    queries = three_way_queries(SIZES, rng=rng())
    share = [brute(codes, d) / 90 for d in range(len(DUMMIES))]
    np.testing.assert_allclose(
        baselines.independent_two_way(codes, SIZES), [90 * share[a] * share[b] for a, b in pairs()]
    )
    np.testing.assert_allclose(
        baselines.independent_three_way(codes, SIZES, queries),
        [90 * share[a] * share[b] * share[c] for a, b, c in queries],
    )


def test_independent_answers_are_exact_for_independent_attributes():
    codes = np.array(list(product(range(2), range(3), range(4), range(1)))).T
    queries = three_way_queries(SIZES, rng=rng())
    assert (
        errors_of_answers(
            two_way_counts(codes, SIZES), baselines.independent_two_way(codes, SIZES)
        ).max()
        < 1e-12
    )
    assert (
        errors_of_answers(
            three_way_counts(codes, SIZES, queries),
            baselines.independent_three_way(codes, SIZES, queries),
        ).max()
        < 1e-12
    )


GOOD_TABLE = table(20, 1)
BAD_TABLES = [
    GOOD_TABLE[0],
    GOOD_TABLE.astype(float),
    GOOD_TABLE.astype(bool),
    GOOD_TABLE[:3],
    GOOD_TABLE[:, :0],
    GOOD_TABLE[:0],
    GOOD_TABLE.astype(int) - 1,
    GOOD_TABLE + np.uint8(1),
]


@pytest.mark.parametrize("bad", BAD_TABLES, ids=lambda bad: f"{bad.dtype}{bad.shape}")
def test_bad_tables_are_refused(bad):
    for original, released in ((GOOD_TABLE, bad), (bad, GOOD_TABLE)):
        for measure in (one_way_errors, two_way_errors, one_way_total_variation, total_variation):
            with pytest.raises(ValueError, match=r"table|attribute"):
                measure(original, released, SIZES)
        with pytest.raises(ValueError, match=r"table|attribute"):
            three_way_errors(original, released, SIZES, rng=rng())
        with pytest.raises(ValueError, match=r"table|attribute"):
            compare(original, released, SIZES, rng=rng())
    for answers in (
        baselines.independent_two_way,
        lambda codes, sizes: baselines.independent_three_way(codes, sizes, np.array([[0, 2, 5]])),
    ):
        with pytest.raises(ValueError, match=r"table|attribute"):
            answers(bad, SIZES)


@pytest.mark.parametrize("sizes", [(2, 3, 4), (2, 3, 4, 0), (2, 3, 4, 1, 1), (2, 3, 4, 65_537), ()])
def test_sizes_that_do_not_fit_are_refused(sizes):
    with pytest.raises(ValueError, match="levels"):
        one_way_counts(GOOD_TABLE, sizes)


def test_the_refusal_names_the_attribute_and_no_value():
    codes = GOOD_TABLE.astype(np.int64)
    codes[2, 5] = 271828
    with pytest.raises(ValueError, match=r"^attribute 2 holds a code outside its levels$"):
        two_way_counts(codes, SIZES)


@pytest.mark.parametrize(
    "queries",
    [[0, 2, 5], [[0, 2]], [[0, 2, -1]], [[0, 2, 10]], [[0, 2, 4]], [[9, 0, 1]], [[0.0, 2.0, 5.0]]],
)
def test_bad_queries_are_refused(queries):
    for answers in (three_way_counts, baselines.independent_three_way):
        with pytest.raises(ValueError, match="three-way query"):
            answers(GOOD_TABLE, SIZES, np.array(queries))


@pytest.mark.parametrize(("sizes", "n_queries"), [(SIZES, 0), (SIZES, -1), ((2, 0, 2), 5)])
def test_bad_draws_are_refused(sizes, n_queries):
    with pytest.raises(ValueError, match="three-way queries"):
        three_way_queries(sizes, n_queries=n_queries, rng=rng())


@pytest.mark.parametrize("errors", [[], [1.0, -1.0], [np.nan], [np.inf, 1.0]])
def test_bad_errors_have_no_profile(errors):
    with pytest.raises(ValueError, match="profile"):
        ErrorProfile.of(np.array(errors))


@pytest.mark.parametrize(
    ("true", "answers"), [([1, 2], [1.0]), ([1, 2], [1.0, np.nan]), ([np.inf], [1.0])]
)
def test_bad_answers_are_refused(true, answers):
    with pytest.raises(ValueError, match="one true count and one answer"):
        errors_of_answers(np.array(true), np.array(answers))


def test_every_measure_of_private_rows_says_that_it_is_confidential():
    for module in (utility, baselines):
        assert module.__doc__ is not None
        assert "CONFIDENTIAL" in module.__doc__.splitlines()[0]
        for name, member in vars(module).items():
            public = (
                not name.startswith("_") and getattr(member, "__module__", "") == module.__name__
            )
            if public and name not in ("three_way_queries", "check_queries"):
                assert "confidential" in member.__doc__.splitlines()[0], name
