"""How far a synthetic table is from the original: errors of its conjunction counts. CONFIDENTIAL: read from private rows, never to be published.

The queries are positive conjunctions of one, two or three dummies, where a dummy is one level of one attribute: attribute
a with s_a levels has dummies s_1 + … + s_{a-1} up to that plus s_a - 1, and the dummies of a query belong to distinct
attributes. The error of a query is the absolute difference of its counts, in rows of the original: the counts of a
released table with another number of rows are scaled first. Only the arguments `sizes` and the queries are public.

References
----------
Asghar, Ding, Rakotoarivelo, Mrabet and Kaafar, Differentially private release of high-dimensional datasets using the
Gaussian copula (2019), section 4.1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Self, TypeAlias

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from dpdask.kernels.marginals import MAX_LEVELS, count_pairs

Codes: TypeAlias = NDArray[np.integer[Any]]
Counts: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]

PERCENTS = (95, 99, 100)
N_QUERIES = 10_000

_BLOCK_ROWS = 1 << 16  # the packed dummies of one block stay in the processor's cache
_ABSENT = "–"


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorProfile:
    """Average and maximum absolute error over the queries with the smallest errors, in rows; confidential: measured on private rows.

    Attributes
    ----------
    average, maximum
        Over the best 95, 99 and 100 percent of the queries, in this order; of n queries the best ⌈percent · n / 100⌉.

    References
    ----------
    Asghar et al. (2019), section 4.1, (α, β)-utility, and table 2.
    """

    average: tuple[float, float, float]
    maximum: tuple[float, float, float]

    @classmethod
    def of(cls, errors: Floats) -> Self:
        """Return the profile of errors; confidential, as the errors are.

        Parameters
        ----------
        errors
            float64 array of shape (n,), n >= 1, finite and non-negative.

        Raises
        ------
        ValueError
            If there is no error, or one is negative or not finite.
        """
        ascending = np.sort(np.asarray(errors, dtype=np.float64), axis=None)
        if not len(ascending) or not np.isfinite(ascending).all() or ascending[0] < 0:
            raise ValueError("a profile needs at least one error, all finite and not negative")
        best = [
            ascending[: -(-percent * len(ascending) // 100)] for percent in PERCENTS
        ]  # in integers: 0.95 is no binary fraction
        average = float(best[0].mean()), float(best[1].mean()), float(best[2].mean())
        return cls(
            average=average, maximum=(float(best[0][-1]), float(best[1][-1]), float(best[2][-1]))
        )

    def __str__(self) -> str:
        both = zip(self.average, self.maximum, strict=True)
        return " · ".join(f"{_short(average)}/{maximum:.0f}" for average, maximum in both)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Answers:
    """Answers to the queries, in counts of `n_rows` rows; confidential where they come from private rows.

    Attributes
    ----------
    n_rows
        How many rows the counts are of.
    one_way, two_way
        Integer or float64 arrays in the order of `one_way_counts` and `two_way_counts`.
    three_way
        The same in the order of the queries; None where they are not answered.
    """

    n_rows: float
    one_way: Counts | Floats
    two_way: Counts | Floats
    three_way: Counts | Floats | None

    @classmethod
    def of_codes(cls, codes: Codes, sizes: Sequence[int], queries: Counts) -> Self:
        """Return the answers of a table; confidential for private rows.

        Parameters
        ----------
        codes, sizes, queries
            As of `three_way_counts`.

        Raises
        ------
        ValueError
            As of `three_way_counts`.
        """
        return cls(
            n_rows=codes.shape[1],
            one_way=one_way_counts(codes, sizes),
            two_way=two_way_counts(codes, sizes),
            three_way=three_way_counts(codes, sizes, queries),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class UtilityReport:
    """Errors of a released table against the original; confidential: read from private rows.

    Attributes
    ----------
    one_way, two_way, three_way
        Profiles of the errors of all one-way counts, all two-way conjunctions and some three-way ones; None where the
        table has too few attributes for such queries.
    mean_total_variation
        The mean total variation distance of the two-way tables, in [0, 1]; None for a single attribute.
    """

    one_way: ErrorProfile
    two_way: ErrorProfile | None
    three_way: ErrorProfile | None
    mean_total_variation: float | None

    def to_markdown_row(self, name: str) -> str:
        """Return the report as a row of a Markdown table, confidential: name, the three profiles, mean total variation.

        A profile reads average/maximum for the best 95 · 99 · 100 percent, as in "92/389 · 107/482 · 106/773".
        """
        profiles = [
            _ABSENT if profile is None else str(profile)
            for profile in (self.one_way, self.two_way, self.three_way)
        ]
        variation = (
            _ABSENT if self.mean_total_variation is None else f"{self.mean_total_variation:.4f}"
        )
        return f"| {name} | {' | '.join(profiles)} | {variation} |"


def compare_answers(true: Answers, given: Answers, sizes: Sequence[int]) -> UtilityReport:
    """Return how far answers are from the true counts, whether or not any table of records gives them; confidential: the counts are private.

    Parameters
    ----------
    true, given
        Answers to the same queries; those of another number of rows are scaled first.
    sizes
        How many levels each attribute has, s_1 .. s_m.

    Returns
    -------
    UtilityReport
        A profile is None where nothing was asked, or three-way where nothing was answered. Where the cells of a two-way
        table do not sum to the number of rows, its total variation is still half the sum of the differences.

    Raises
    ------
    ValueError
        As of `errors_of_answers`.
    """
    factor = np.float64(true.n_rows / given.n_rows)
    one_way = errors_of_answers(true.one_way, given.one_way * factor)
    two_way = errors_of_answers(true.two_way, given.two_way * factor)
    is_answered = true.three_way is not None and given.three_way is not None
    three_way = errors_of_answers(true.three_way, given.three_way * factor) if is_answered else ()
    variation = _variations(two_way, [a * b for a, b in combinations(sizes, 2)], true.n_rows)
    return UtilityReport(
        one_way=ErrorProfile.of(one_way),
        two_way=ErrorProfile.of(two_way) if len(two_way) else None,
        three_way=ErrorProfile.of(three_way) if len(three_way) else None,
        mean_total_variation=float(variation.mean()) if len(variation) else None,
    )


def one_way_total_variation(original: Codes, released: Codes, sizes: Sequence[int]) -> Floats:
    """Return the total variation distance of each attribute's distribution, shape (m,); confidential: reads private rows.

    Parameters
    ----------
    original, released
        Integer arrays of shapes (m, n) and (m, n'), as of `one_way_counts`.
    sizes
        How many levels each attribute has, s_1 .. s_m.

    Raises
    ------
    ValueError
        As of `one_way_counts`.
    """
    # this checks both tables
    true, given = one_way_counts(original, sizes), one_way_counts(released, sizes)
    factor = np.float64(original.shape[1] / released.shape[1])
    return _variations(errors_of_answers(true, given * factor), sizes, original.shape[1])


def errors_of_answers(true_counts: Counts | Floats, answers: Counts | Floats) -> Floats:
    """Return |answer - true count| of each query, also for answers that no table of records gives; confidential: the counts are private.

    Parameters
    ----------
    true_counts
        The exact answers, shape (q,).
    answers
        The answers to judge, shape (q,).

    Raises
    ------
    ValueError
        If the shapes differ, or a number is not finite.
    """
    true, given = np.asarray(true_counts, dtype=np.float64), np.asarray(answers, dtype=np.float64)
    if true.shape != given.shape or not np.isfinite(true).all() or not np.isfinite(given).all():
        raise ValueError("each query needs one true count and one answer, both finite")
    errors: Floats = np.abs(given - true)
    return errors


def one_way_counts(codes: Codes, sizes: Sequence[int]) -> Counts:
    """Return how many rows have each dummy, shape (Σ s_a,); confidential for private rows.

    Parameters
    ----------
    codes
        Integer array of shape (m, n), m, n >= 1: row a holds the codes 0 .. s_a - 1 of attribute a.
    sizes
        The number of levels of each attribute, 1 to 65,536.

    Raises
    ------
    ValueError
        If the table is not such a matrix, or a code is outside its attribute's levels.
    """
    _check(codes, sizes)
    return np.concatenate(
        [
            np.bincount(row.astype(np.intp), minlength=size)
            for row, size in zip(codes, sizes, strict=True)
        ]
    )


def two_way_counts(codes: Codes, sizes: Sequence[int]) -> Counts:
    """Return the cells of all two-way tables, shape (Σ_{a<b} s_a s_b,); confidential for private rows.

    The tables are in lexicographic order of their pairs; in one, the second attribute's level varies fastest.

    For the parameters and errors see `one_way_counts`.
    """
    _check(codes, sizes)
    narrow = np.ascontiguousarray(codes, dtype=np.min_scalar_type(max(sizes) - 1))
    return count_pairs(narrow, np.array(sizes, dtype=np.int64))


def three_way_counts(codes: Codes, sizes: Sequence[int], queries: Counts) -> Counts:
    """Return how many rows have all three dummies of each query, shape (q,); confidential for private rows.

    Parameters
    ----------
    codes, sizes
        As of `one_way_counts`.
    queries
        int64 array of shape (q, 3): dummies, as `three_way_queries` draws them.

    Raises
    ------
    ValueError
        As of `one_way_counts` and of `check_queries`.
    """
    _check(codes, sizes)
    check_queries(queries, sizes)
    counts = np.zeros(len(queries), dtype=np.int64)
    for bits in _pack_dummies(codes, sizes):
        for place, (first, second, third) in enumerate(queries):
            counts[place] += np.bitwise_count(bits[first] & bits[second] & bits[third]).sum(
                dtype=np.int64
            )
    return counts


def three_way_queries(
    sizes: Sequence[int], *, n_queries: int = N_QUERIES, rng: Generator
) -> Counts:
    """Return distinct three-way conjunctions, uniform over all triples of dummies of distinct attributes; reads no rows.

    Parameters
    ----------
    sizes
        The number of levels of each attribute.
    n_queries
        How many conjunctions to draw.
    rng
        Chooses the conjunctions.

    Returns
    -------
    int64 array of shape (q, 3), the dummies ascending: q is `n_queries`, or the number of all triples if there are
    fewer (0 for fewer than three attributes).

    Raises
    ------
    ValueError
        If n_queries or a size is not positive.

    Notes
    -----
    A triple's rank among all is drawn, then split: attributes a < b < c own s_a s_b s_c ranks in a row, so no draw is
    ever rejected and none comes twice.
    """
    if n_queries < 1 or any(size < 1 for size in sizes):
        raise ValueError(
            "three-way queries need a positive number of queries and of each attribute's levels"
        )
    attributes = np.array(list(combinations(range(len(sizes)), 3)), dtype=np.int64).reshape(-1, 3)
    levels = np.array(sizes, dtype=np.int64)[attributes]
    ends = np.cumsum(levels.prod(axis=1))
    n_triples = int(ends[-1]) if len(ends) else 0
    ranks = (
        rng.choice(n_triples, size=min(n_queries, n_triples), replace=False)
        if n_triples
        else np.zeros(0, dtype=np.int64)
    )
    owner = np.searchsorted(ends, ranks, side="right")
    rest, third = np.divmod(ends[owner] - 1 - ranks, levels[owner, 2])
    first, second = np.divmod(rest, levels[owner, 1])
    queries: Counts = _starts(sizes)[attributes[owner]] + np.stack([first, second, third], axis=1)
    return queries


def check_queries(queries: Counts, sizes: Sequence[int]) -> None:
    """Check that an array holds three-way queries on attributes of these sizes; reads no rows.

    Parameters
    ----------
    queries
        Three dummies per query, shape (q, 3).
    sizes
        The number of levels of each attribute.

    Raises
    ------
    ValueError
        If it is no integer array of shape (q, 3), or a query names a dummy that is not there, or two of one attribute.
    """
    if (
        queries.ndim != 2
        or queries.shape[1] != 3
        or queries.dtype.kind not in "iu"
        or (queries < 0).any()
        or (queries >= sum(sizes)).any()
    ):
        raise ValueError("a three-way query names three dummies of the table's attributes")
    owners = np.sort(np.searchsorted(np.cumsum(sizes), queries, side="right"), axis=1)
    if (
        np.diff(owners, axis=1) == 0
    ).any():  # its count is 0 by structure, its independent answer is not
        raise ValueError("a three-way query names dummies of three distinct attributes")


def _check(codes: Codes, sizes: Sequence[int]) -> None:
    """Check that a matrix holds codes of these sizes; the message holds no value."""
    if codes.ndim != 2 or codes.dtype.kind not in "iu" or codes.shape[0] < 1 or codes.shape[1] < 1:
        raise ValueError(
            "a table is an integer matrix of shape (attributes, rows), with at least one of each"
        )
    if len(sizes) != codes.shape[0] or any(not 1 <= size <= MAX_LEVELS for size in sizes):
        raise ValueError(f"each attribute of a table needs its number of levels, 1 to {MAX_LEVELS}")
    for place, (row, size) in enumerate(zip(codes, sizes, strict=True)):
        if row.min() < 0 or row.max() >= size:
            raise ValueError(f"attribute {place} holds a code outside its levels")


def _starts(sizes: Sequence[int]) -> Counts:
    """Return the first dummy of each attribute."""
    return np.cumsum(np.array([0, *sizes], dtype=np.int64))[:-1]


def _variations(errors: Floats, n_cells: Sequence[int], n_rows: float) -> Floats:
    """Return half the absolute difference of the frequencies, summed over each table's cells."""
    if not len(n_cells):
        return np.zeros(0)
    variations: Floats = np.add.reduceat(errors, _starts(n_cells)) / (2 * n_rows)
    return variations


def _pack_dummies(codes: Codes, sizes: Sequence[int]) -> Iterator[NDArray[np.uint64]]:
    """Yield, by block of rows, each dummy's indicator as bits: a conjunction is then a word-wise and."""
    for start in range(0, codes.shape[1], _BLOCK_ROWS):
        block = codes[:, start : start + _BLOCK_ROWS]
        bits = np.zeros((sum(sizes), -(-block.shape[1] // 64)), dtype=np.uint64)
        bytes_ = bits.view(np.uint8)[:, : -(-block.shape[1] // 8)]
        for first, row, size in zip(_starts(sizes), block, sizes, strict=True):
            bytes_[first : first + size] = np.packbits(
                row == np.arange(size)[:, np.newaxis], axis=1
            )
        yield bits


def _short(average: float) -> str:
    """Return an average as the tables print it: two decimals below 1, one below 20."""
    return f"{average:.{2 if average < 1 else 1 if average < 20 else 0}f}"
