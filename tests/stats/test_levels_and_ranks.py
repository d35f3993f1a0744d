"""Statistics of batches against numpy, their merge laws, and the rank error of a merged tree."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import level_codec, value_codec

from dpdask.errors import DataError
from dpdask.references.reference import ColumnStatistic
from dpdask.stats import LevelCounts, RankSummary
from dpdask.stats import statistic as univariate
from dpdask.streams import RunKey, Streams

LEVELS = level_codec([None, 1, 2, 3], "level")
MIXED = value_codec("mixed", bounds=(-100.0, 100.0), atoms=(0.0, 5.0), nulls=True)
PLAIN = value_codec("plain", bounds=None)

LEVEL_ROWS = st.lists(st.sampled_from([None, 1, 2, 3]), max_size=30)
MIXED_ROWS = st.lists(
    st.one_of(st.none(), st.sampled_from([0.0, -0.0, 5.0, 1.5]), st.floats(-100, 100)), max_size=30
)


def counts_of(rows):
    return LevelCounts.of_batch(LEVELS, pa.array(rows, type=pa.int64()))


def summary_of(rows):
    return RankSummary.of_batch(MIXED, pa.array(rows, type=pa.float64()))


def plain(statistic):
    if isinstance(statistic, LevelCounts):
        return statistic.counts.tolist()
    return (
        statistic.values.tolist(),
        statistic.weights.tolist(),
        statistic.atom_counts.tolist(),
        statistic.n_nulls,
        statistic.error,
    )


@given(rows=LEVEL_ROWS)
def test_level_counts_of_a_batch_equal_a_count_of_each_level(rows):
    counts = counts_of(rows)
    assert counts.counts.tolist() == [rows.count(level) for level in (None, 1, 2, 3)]
    assert counts.counts.dtype == np.int64
    assert counts.n_rows == len(rows)


@given(rows=MIXED_ROWS)
def test_rank_summary_of_a_batch_equals_numpy_unique_apart_from_atoms_and_nulls(rows):
    summary = summary_of(rows)
    numbers = [row for row in rows if row is not None]
    found, counts = np.unique(
        [row for row in numbers if row not in MIXED.atoms], return_counts=True
    )
    assert plain(summary) == (
        found.tolist(),
        counts.tolist(),
        [numbers.count(atom) for atom in MIXED.atoms],
        rows.count(None),
        0,
    )
    assert summary.n_rows == len(rows)


@given(parts=st.lists(LEVEL_ROWS, min_size=1, max_size=5))
def test_merged_level_counts_are_those_of_all_rows_in_any_grouping(parts):
    check_merge_laws(
        [counts_of(part) for part in parts],
        LevelCounts.identity(LEVELS),
        counts_of([row for part in parts for row in part]),
    )


@given(parts=st.lists(MIXED_ROWS, min_size=1, max_size=5))
def test_merged_rank_summaries_are_those_of_all_rows_in_any_grouping(parts):
    check_merge_laws(
        [summary_of(part) for part in parts],
        RankSummary.identity(MIXED),
        summary_of([row for part in parts for row in part]),
    )


def check_merge_laws(parts, identity, expected):
    forward, backward = identity, identity
    for part in parts:
        forward = forward.merge(part)
    for part in reversed(parts):
        backward = part.merge(backward)
    assert (
        plain(forward)
        == plain(backward)
        == plain(identity.merge(*parts))
        == plain(parts[0].merge(*parts[1:]))
        == plain(expected)
    )


@pytest.mark.parametrize("chosen", [[True, False, True, False], [False] * 4])
def test_only_chosen_rows_count(chosen):
    mask = np.array(chosen)
    rows = [None, 0.0, 7.0, 7.0]
    expected = summary_of([row for row, choice in zip(rows, chosen, strict=True) if choice])
    assert plain(RankSummary.of_batch(MIXED, pa.array(rows), mask)) == plain(expected)
    levels = [None, 1, 3, 3]
    counts = counts_of([level for level, choice in zip(levels, chosen, strict=True) if choice])
    assert plain(LevelCounts.of_batch(LEVELS, pa.array(levels), mask)) == plain(counts)


@pytest.mark.parametrize("bad", [np.inf, 1000.0])
def test_rows_that_are_not_chosen_are_checked_too(bad):
    nobody = np.zeros(2, dtype=bool)
    with pytest.raises(DataError, match="mixed"):
        RankSummary.of_batch(MIXED, pa.array([1.0, bad]), nobody)
    with pytest.raises(DataError, match="level"):
        LevelCounts.of_batch(LEVELS, pa.array([1, 17]), nobody)


def test_a_check_refuses_what_the_statistic_refuses_and_counts_no_row():
    statistic = ColumnStatistic(codecs={"level": LEVELS, "mixed": MIXED})
    streams = Streams(lambda: RunKey.insecure(3), "part")
    rows = pa.record_batch({"level": pa.array([1, None, 3]), "mixed": pa.array([0.0, None, 7.0])})
    counted, checked = statistic.counter(), univariate.Check(statistic).counter()
    for counter in (counted, checked):
        counter.add(rows, None, streams)
    found, nothing, some = (
        [plain(each) for each in counter.result().columns.values()]
        for counter in (checked, statistic.counter(), counted)
    )
    assert found == nothing != some
    with pytest.raises(DataError, match="level"):
        univariate.Check(statistic).counter().add(
            rows.set_column(0, "level", pa.array([1, 17, 3])), None, streams
        )


def tree(parts, fan_in=8):
    """Return the summaries merged in a tree, and how many levels it has."""
    depth = 0
    while len(parts) > 1:
        parts = [parts[i].merge(*parts[i + 1 : i + fan_in]) for i in range(0, len(parts), fan_in)]
        depth += 1
    return parts[0], depth


def measured_error(summary, everything):
    """Return by how many rows the rank of any row is wrong."""
    everything = np.sort(everything)
    exact = np.searchsorted(everything, everything, side="right")
    cumulative = np.concatenate([[0], np.cumsum(summary.weights)])
    return int(
        np.abs(cumulative[np.searchsorted(summary.values, everything, side="right")] - exact).max()
    )


@pytest.mark.parametrize("shape", ["real", "sorted", "tied", "heavy"])
def test_the_rank_error_of_a_compressed_tree_stays_within_what_it_states(shape, monkeypatch):
    monkeypatch.setattr(univariate, "MAX_POINTS", 512)
    rng = np.random.default_rng(3)
    rows = rng.lognormal(size=200 * 700)
    if shape == "sorted":
        rows.sort()
    elif shape == "tied":
        rows = np.round(rows, 2)
    elif shape == "heavy":
        rows[rng.random(len(rows)) < 0.4] = 1.0
    parts = [RankSummary.of_batch(PLAIN, pa.array(part)) for part in np.split(rows, 200)]
    summary, depth = tree(parts)
    assert len(summary.values) <= 512
    assert summary.n_rows == len(rows)
    assert (summary.values[0], summary.values[-1]) == (rows.min(), rows.max())
    assert measured_error(summary, rows) <= summary.error <= depth * len(rows) / 511
    assert summary.error > 0


def test_the_rank_error_of_many_rows_is_below_2_to_the_minus_15():
    rng = np.random.default_rng(4)
    batches = [rng.lognormal(size=300_000) for _ in range(8)]
    summary = RankSummary.identity(PLAIN).merge(
        *(RankSummary.of_batch(PLAIN, pa.array(batch)) for batch in batches)
    )
    assert len(summary.values) <= univariate.MAX_POINTS
    cut = summary.compress(univariate.MAX_KNOTS)
    assert len(cut.values) <= univariate.MAX_KNOTS
    everything = np.concatenate(batches)
    assert (
        0
        < measured_error(cut, everything)
        <= cut.error
        <= univariate.MAX_RANK_ERROR * len(everything)
    )
