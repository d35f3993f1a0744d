"""Counts on a fine public grid, level by level: the grid, its sensitivity, and what the noisy counts are worth."""

import datetime as dt
import math
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import default_rng
from scipy import stats
from strategies import random_words, value_codec, zeros_and_a_tail

from dpdask.cells import DEFAULT_BINS, FoundBins, cells, cells_of_edges
from dpdask.privacy.events import Composed, DiscreteGaussian, DiscreteLaplace
from dpdask.privacy.events import epsilon as paid
from dpdask.privacy.noise import perturb
from dpdask.references.hierarchy import N_LEVELS, Hierarchy, find_bins, make_grid
from dpdask.references.histogram import CellCounts, Histogram, cut_with_found
from dpdask.schema import Column
from dpdask.streams import RunKey, stream

ALPHA = 1e-10
NOISE = DiscreteLaplace(
    scale=60.0, sensitivity=2, adjacency="replace-one", count=N_LEVELS
)  # ε 0.1 on three levels


FLOAT = pa.float64()


def codec_of(bounds, type_=FLOAT, **changes):
    return value_codec(type_=type_, bounds=bounds, **changes)


def keyed(seed, name="hierarchy"):
    return stream(RunKey.insecure(seed), name, "")


CODECS = [
    codec_of((0.0, 1e6)),
    codec_of((-1e6, 1e6), atoms=(5.0,), nulls=True),
    codec_of((2.0, 3.0)),
    codec_of((0.0, 2.0**100), pa.float32()),
    codec_of((0.0, 74.0), pa.int32()),
    codec_of((-(2.0**31), 2.0**31 - 1.0), pa.int32(), atoms=(0.0, 999.0)),
    codec_of((0.0, 1e9), pa.int64(), nulls=True),
    codec_of((0.0, 30_000.0), pa.date32()),
    codec_of((7.0, 7.0), pa.int8()),
]


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: f"{codec.type} {codec.bounds}")
def test_a_grid_covers_the_bounds_with_about_4096_cells_and_the_bounds_and_zero_are_cells(codec):
    grid = make_grid(codec)
    low, high = codec.bounds
    if pa.types.is_date(codec.type):
        pytest.skip("dates have even cells")
    assert 1 <= grid.n_cells <= 4096 + 8
    assert (np.diff(grid.edges) > 0).all()
    special = [value for value in (low, 0.0, high) if low <= value <= high]
    near = (
        [min(low + 1.0, high), max(high - 1.0, low)]
        if codec.lattice
        else [float(np.nextafter(np.float32(low), np.float32(high)))]
    )
    cells_of = grid.codes(
        codec.decode(np.array([*special, *near]), np.zeros(len(special) + len(near), dtype=bool))
    )
    places = dict(zip([*special, *near], cells_of.tolist(), strict=True))
    assert len(set(places.values())) == len(places)


@given(st.sampled_from(CODECS), st.integers(0, 2**32))
@settings(max_examples=40)
def test_replacing_a_row_moves_one_count_of_each_level(codec, seed):
    grid = make_grid(codec)
    hierarchy = Hierarchy(grid)
    rng = default_rng(seed)
    first, second = rng.choice(np.flatnonzero(grid.possible), 2)
    one, other = (
        hierarchy.count(CellCounts(np.bincount([cell], minlength=grid.n_cells)))
        for cell in (first, second)
    )
    assert one.shape == (hierarchy.size,)
    assert one.sum() == other.sum() == N_LEVELS
    assert np.abs(one - other).sum() <= 2 * N_LEVELS


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: f"{codec.type} {codec.bounds}")
def test_without_noise_the_estimate_is_the_counts(codec):
    grid = make_grid(codec)
    counts = np.zeros(grid.n_cells, dtype=np.int64)
    chosen = default_rng(1).choice(np.flatnonzero(grid.possible), 5)
    np.add.at(counts, chosen, 1000)
    hierarchy = Hierarchy(grid)
    tiny = DiscreteLaplace(scale=1e-3, sensitivity=2, adjacency="replace-one", count=N_LEVELS)
    for n_rows in (5000, None):
        np.testing.assert_allclose(
            hierarchy.estimate(hierarchy.count(CellCounts(counts)), tiny, n_rows), counts, atol=1e-6
        )


@pytest.mark.parametrize(
    "event",
    [NOISE, DiscreteGaussian(sigma=85.0, sensitivity=1.0, adjacency="add-remove", count=N_LEVELS)],
)
def test_noise_alone_gives_no_negative_count_and_the_right_sum(event):
    hierarchy = Hierarchy(make_grid(CODECS[1]))
    noisy = perturb(
        np.zeros(hierarchy.size, dtype=np.int64),
        event,
        rng=keyed(5),
    )
    for n_rows in (2, 10_000, None):
        found = hierarchy.estimate(noisy, event, n_rows)
        assert (found >= 0).all()
        assert (found[~hierarchy.cells.possible] == 0).all()
        if n_rows is not None:
            assert found.sum() == pytest.approx(n_rows)


@pytest.mark.parametrize(
    "codec",
    [
        codec_of((0.0, 1e9)),
        codec_of((0.0, 1e9), nulls=True),
        codec_of((-(2.0**31), 2.0**31 - 1.0), pa.int32()),
    ],
)
def test_rows_that_noise_took_are_not_put_far_out_where_there_are_none(codec):
    """The number of rows is public: what the noisy counts lack is shared by the blocks that have rows, and their neighbours."""
    hierarchy = Hierarchy(make_grid(codec))
    values = default_rng(2).integers(1, 1000, 100_000).astype(codec.type.to_pandas_dtype())
    exact = hierarchy.count(CellCounts.of_batch(hierarchy.cells, pa.array(values)))
    middles = np.append(
        np.zeros(hierarchy.cells.n_cells - len(hierarchy.cells.edges) + 1),
        hierarchy.cells.edges[1:],
    )
    for seed in range(5):
        noisy = perturb(exact, NOISE, rng=keyed(seed))
        for n_rows in (99_000, 100_000, 101_000):
            found = hierarchy.estimate(noisy, NOISE, n_rows)
            assert found.sum() == pytest.approx(n_rows)
            assert found[np.abs(middles) > 1e6].sum() == 0.0


TAILS = {  # the lower bound over the upper one, the codec, and the column
    "floats": (0.0, {}, lambda values: values),
    "whole": (0.0, {"type_": pa.int64()}, lambda values: values.astype(np.int64)),
    "an atom": (
        0.0,
        {"type_": pa.int64(), "atoms": (0.0,)},
        lambda values: values.astype(np.int64),
    ),
    "nulls": (0.0, {"nulls": True}, lambda values: np.where(values == 0.0, np.nan, values)),
    "below": (-1.0, {}, lambda values: -values),
    "on both sides": (
        -1.0,
        {},
        lambda values: values * np.where(np.arange(len(values)) % 2, 1.0, -1.0),
    ),
}
GAUSSIAN = DiscreteGaussian(sigma=85.0, sensitivity=1.0, adjacency="add-remove", count=N_LEVELS)


@pytest.mark.parametrize(
    ("event", "n_rows", "factor"), [(NOISE, 50_000, 1.0), (GAUSSIAN, None, 100.0)]
)
@pytest.mark.parametrize("kind", TAILS)
def test_a_tail_beside_what_most_rows_share_is_kept(kind, event, n_rows, factor):
    """Its 2,000 rows are spread over many blocks, few of which have more than noise alone. Emptying the others misplaces 1,900."""
    low, changes, make = TAILS[kind]
    hierarchy = Hierarchy(make_grid(codec_of((low * 1e5 * factor, 1e5 * factor), **changes)))
    edges, n_singles = (
        np.abs(hierarchy.cells.edges),
        hierarchy.cells.n_cells - len(hierarchy.cells.edges) + 1,
    )
    ranges = np.searchsorted(
        [1.0, 1e3, 5e3, 2e4], np.append(np.zeros(n_singles), np.maximum(edges[1:], edges[:-1]))
    )
    misplaced = []
    for seed in range(5):
        exact = CellCounts.of_batch(
            hierarchy.cells, pa.array(make(zeros_and_a_tail(seed)), from_pandas=True)
        )
        found = hierarchy.estimate(
            perturb(hierarchy.count(exact), event, rng=keyed(seed, "h")),
            event,
            n_rows,
        )
        misplaced.append(np.abs(np.bincount(ranges, found - exact.counts)).sum() / 2)
    assert 10.0 < np.median(misplaced) <= 500.0


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_outermost_block_has_no_more_than_a_falling_tail(sign):
    """A block beyond the tail keeps noise alone; rows that are there, and stand out, stay."""
    high = 1e6 * sign
    hierarchy = Hierarchy(make_grid(codec_of((min(high, 0.0), max(high, 0.0)))))
    rng = default_rng(3)
    values = np.clip(np.exp(rng.normal(10.0, 0.6, 400_000)), 0.0, 3e5)
    event = DiscreteGaussian(sigma=26.0, sensitivity=1.0, adjacency="add-remove", count=N_LEVELS)
    for n_far, least, most in ((0, 0.0, 1.0), (2000, 1990.0, 2010.0)):
        rows = np.concatenate([values, np.full(n_far, 9e5)]) * sign
        exact = hierarchy.count(CellCounts.of_batch(hierarchy.cells, pa.array(rows)))
        far = []
        for seed in range(60):
            noisy = perturb(exact, event, rng=keyed(seed))
            found = hierarchy.estimate(noisy, event, None)
            beyond = np.abs(hierarchy.cells.edges[1 if sign > 0 else 0 :][: len(found)]) > 4.1e5
            far.append(found[beyond].sum())
        assert least <= np.mean(far) <= most


def test_what_may_lie_beyond_the_kept_blocks_is_told():
    """Without noise exactly, with noise as its standard deviation says."""
    hierarchy = Hierarchy(make_grid(codec_of((-1e9, 1e9))))
    values = np.append(default_rng(2).uniform(1.0, 1000.0, 100_000), [1e8] * 5)
    exact = hierarchy.count(CellCounts.of_batch(hierarchy.cells, pa.array(values)))
    told = hierarchy.describe_support(exact, NOISE)
    assert told["kept"][0] < 1.0
    assert 1000.0 < told["kept"][1] < 1e8
    assert (told["beyond"]["below"]["count"], told["beyond"]["above"]["count"]) == (0.0, 5.0)
    off = []
    for seed in range(100):
        side = hierarchy.describe_support(perturb(exact, NOISE, rng=keyed(seed, "h")), NOISE)[
            "beyond"
        ]["above"]
        off.append((side["count"] - 5.0) / side["standard_deviation"])
    assert 0.7 < np.std(off) < 1.3
    assert (
        hierarchy.describe_support(np.zeros(hierarchy.size, dtype=np.int64), NOISE) == {}
    )  # no block stands out: rows may be anywhere


def skewed(n):
    """Return amounts: a third of them 0, the rest log-normal."""
    rng = default_rng(3)
    return np.where(rng.random(n) < 0.33, 0.0, np.round(rng.lognormal(2.5, 0.8, n), 2))


def distribution_of(values, high, bins):
    codec = codec_of((0.0, high))
    reference = Histogram(bins=bins)
    events = reference.events(
        {"v": 0.1},
        {"v": Column(role="privatise", kind="continuous", bounds=(0.0, high))},
        "replace-one",
        1,
    )
    codecs = {"v": codec}
    counter = reference.statistic(codecs).counter()
    counter.add(pa.record_batch({"v": values}), None, None)
    drawn = reference.draw(
        counter.result(), codecs, events, lambda name: stream(RunKey.insecure(7), name, "")
    )
    return reference.distributions(drawn, codecs)["v"]


@pytest.mark.parametrize("factor", [1, 10_000])
def test_quantiles_survive_bounds_that_are_far_too_wide(factor):
    """At ε = 0.1 for the counts and 200,000 rows; 1,024 cells of one width miss by far, so the test would see them."""
    values = skewed(200_000)
    low, high = np.quantile(values, [0.01, 0.99])
    found, even = (distribution_of(values, 1000.0 * factor, bins) for bins in ("adaptive", 1024))
    for share in (0.5, 0.75, 0.95):
        wanted = np.quantile(values, share)
        assert abs(np.interp(share, found.c, found.x) - wanted) < 0.02 * (high - low)
    if factor > 1:
        assert abs(np.interp(0.5, even.c, even.x) - np.quantile(values, 0.5)) > 0.05 * (high - low)
    zeros = (
        found.c[np.searchsorted(found.x, 0.0, side="right") - 1]
        - found.c[np.searchsorted(found.x, 0.0, side="left")]
    )
    assert abs(zeros - (values == 0.0).mean()) < 0.003


def test_the_bounds_are_jumps_that_are_never_left():
    values = np.full(1000, 3.0)
    found = distribution_of(values, 3.0, "adaptive")
    assert found.x[0] == 0.0
    assert found.x[-1] == 3.0
    assert found.c[-1] - found.c[np.searchsorted(found.x, 3.0, side="left")] > 0.5


def test_whole_numbers_that_are_few_are_cells_of_their_own():
    grid = make_grid(codec_of((0.0, 4000.0), pa.int32()))
    assert grid.n_cells == 4001
    days = codec_of((0.0, 10.0), pa.date32())
    assert make_grid(days).index(
        pa.array([dt.date(1970, 1, 1), dt.date(1970, 1, 11)])
    ).tolist() == [0, 10]
    assert math.isclose(Hierarchy(make_grid(days)).size, 3 + 9 + 27)


# ---- cells that are found


@given(
    st.sampled_from([codec for codec in CODECS if codec.bounds != (7.0, 7.0)]),
    st.integers(0, 2**32),
    st.integers(1, 30),
    st.booleans(),
)
@settings(max_examples=60)
def test_found_cells_are_cuts_of_the_grid_of_about_equal_counts(codec, seed, n_bins, tails):
    grid = make_grid(codec)
    rng = default_rng(seed)
    counts = rng.gamma(0.05, 1.0, grid.n_cells) * 1000.0
    found = find_bins(grid, counts, n_bins, 1.0, tails=tails)
    assert set(found.cuts) <= set(found.edges)
    assert (found.cuts[0], found.cuts[-1]) == (found.edges[0], found.edges[-1])
    assert len(found.cuts) - 1 <= 2 * n_bins + (5 if tails and n_bins > 1 else 1)
    part = found.masses.sum() / n_bins
    inside = np.add.reduceat(found.masses, np.searchsorted(found.edges, found.cuts[:-1]))
    several = np.diff(np.searchsorted(found.edges, found.cuts)) > 1
    assert (
        inside[several] <= part * (1 + 1e-9) + found.masses.max() * (found.masses.max() < part)
    ).all()
    own = cells(codec, found)
    declared = cells(codec, own.firsts.tolist())  # as a card gives them
    values = grid.draw(rng.integers(0, grid.size, 200), random_words(rng, 200))
    assert declared.index(values).tolist() == own.index(values).tolist()


def test_the_rest_of_a_column_that_is_mostly_zero_is_cut_as_finely_as_noise_allows():
    grid = make_grid(codec_of((0.0, 1000.0)))
    counts = np.full(grid.n_cells, 10.0)
    counts[0] = 400_000.0  # the value 0
    rest = counts[1:].sum()
    for noise, part in (
        (rest / 1e6, rest / 19),
        (rest / 50, rest / 10),
        (rest, (rest + 400_000.0) / 20),
    ):
        found = find_bins(grid, counts, 20, noise)
        inside = np.add.reduceat(found.masses, np.searchsorted(found.edges, found.cuts[:-1]))
        assert inside[0] == 400_000.0
        assert 0.8 * part < np.median(inside[1:]) <= part + 10.0


def test_tails_are_cut_off_as_far_as_they_have_more_rows_than_the_noise():
    grid = make_grid(codec_of((0.0, 1000.0)))
    counts = np.full(grid.n_cells, 10.0)
    part = counts.sum() / 20
    for noise, cuts in ((part / 20, 2), (part / 10, 1), (part / 2, 0)):
        plain, found = (find_bins(grid, counts, 20, noise, tails=tails) for tails in (False, True))
        added = sorted(set(found.cuts) - set(plain.cuts))
        assert len(added) == 2 * cuts
        if cuts:
            above = found.masses[np.searchsorted(found.edges, added[-1]) :].sum()
            assert above == pytest.approx(part / 4**cuts, abs=11.0)
    assert len(find_bins(grid, counts, 1, 1.0, tails=True).cuts) == 2


def test_a_frequent_value_is_a_cell_of_its_own():
    grid = make_grid(codec_of((0.0, 1000.0)))
    counts = np.full(grid.n_cells, 1.0)
    counts[0] = 5000.0  # the value 0
    own = cells(grid.codec, find_bins(grid, counts, 20, 1.0))
    assert own.index(pa.array([0.0, 1e-9])).tolist() == [0, 1]
    assert own.labels()[0] == "0.0"


@pytest.mark.parametrize(
    "codec",
    [
        codec_of((0.0, 1000.0)),
        codec_of((0.0, 1000.0), pa.int32()),
        codec_of((-1e9, 1e9), pa.int64(), atoms=(7.0,)),
    ],
)
def test_values_inside_a_found_cell_follow_the_fine_counts(codec):
    """Power both ways: uniform values inside the cells fail, the fine counts pass."""
    grid = make_grid(codec)
    counts = np.zeros(grid.n_cells)
    fine = np.flatnonzero(grid.possible)[np.linspace(10, grid.size - 10, 60).astype(int)]
    counts[fine] = default_rng(2).integers(1, 50, len(fine))
    found = find_bins(grid, counts, 4, 1.0)
    own = cells(codec, found)
    drawn = random_words(default_rng(3), 40_000)
    masses = np.add.reduceat(found.masses, np.searchsorted(found.edges, found.cuts[:-1]))
    chosen = int(np.argmax(masses)) + (own.n_cells - len(own.edges) + 1)
    code = int((np.cumsum(own.possible) - 1)[chosen])
    values = own.draw(np.full(len(drawn), code), drawn)
    assert set(own.codes(values).tolist()) == {code}
    hit = np.bincount(grid.index(values), minlength=grid.n_cells)
    low, high = (
        own.edges[chosen - (own.n_cells - len(own.edges) + 1)],
        own.edges[chosen - (own.n_cells - len(own.edges) + 1) + 1],
    )
    line = grid.n_cells - len(grid.edges) + 1
    inside = np.flatnonzero((grid.edges[:-1] >= low) & (grid.edges[1:] <= high)) + line
    expected = counts[inside] / counts[inside].sum() * len(drawn)
    assert hit[inside][expected == 0].sum() == 0
    there = expected > 0
    assert stats.chisquare(hit[inside][there], expected[there]).pvalue > ALPHA
    uniform = replace(own, found=None).draw(np.full(len(drawn), code), drawn)
    assert np.bincount(grid.index(uniform), minlength=grid.n_cells)[inside][expected == 0].sum() > 0


@pytest.mark.parametrize("width", [6.0, 2.0**20])
@pytest.mark.parametrize("type_", [pa.int64(), pa.date32()])
def test_whole_numbers_inside_a_fine_cell_are_all_released_alike(width, type_):
    codec = codec_of((0.0, 4.0 * width), type_)
    edges = np.array([-1.0, 0.0, width, 2.0 * width, 4.0 * width])
    found = FoundBins(
        cuts=np.array([-1.0, 4.0 * width]), edges=edges, masses=np.array([0.0, 1.0, 3.0, 0.0])
    )
    words = random_words(default_rng(5), 60_000)
    values = np.asarray(
        cells(codec, found)
        .draw(np.zeros(len(words), dtype=int), words)
        .cast(pa.int32() if type_ == pa.date32() else pa.int64())
    )
    assert values.min() >= 1
    assert values.max() <= 2 * width
    assert stats.binomtest(int((values > width).sum()), len(values), 0.75).pvalue > ALPHA
    few = np.bincount(
        (values - 1) % int(min(width, 16)), minlength=int(min(width, 16))
    )  # the last digits show every stride
    assert stats.chisquare(few).pvalue > ALPHA


NUMBERS = [0.25, 2.75, 9.0, 40.5]


def priced(n, is_whole):
    """Amounts of which two fifths are one of four numbers."""
    rng = default_rng(8)
    amounts = rng.lognormal(2.0, 0.8, n)
    chosen = rng.random(n) < 0.4
    amounts[chosen] = rng.choice(NUMBERS, chosen.sum())
    return np.round(amounts * 100).astype(np.int64) * 10 if is_whole else amounts


@pytest.mark.parametrize("is_whole", [False, True])
def test_numbers_that_many_rows_share_are_found_and_come_out_as_themselves(is_whole):
    unit, n = 1000 if is_whole else 1, 100_000
    codec = codec_of((0.0, 1000.0 * unit), pa.int64() if is_whole else FLOAT)
    grid, values = make_grid(codec), priced(n, is_whole)
    counts = np.bincount(grid.index(pa.array(values)), minlength=grid.n_cells).astype(float)
    noisy = np.maximum(counts + default_rng(1).normal(0.0, 60.0, len(counts)), 0.0)
    found = find_bins(grid, noisy, 20, 60.0)
    # 250 is a fine cell of its own
    assert found.numbers.tolist() == [number * unit for number in NUMBERS[is_whole:]]
    own = cells(codec, found)
    codes = own.codes(pa.array(values))
    words = random_words(default_rng(5), n)
    for place in (None, (words >> np.uint64(32)).astype(np.uint32)):
        drawn = own.draw(codes, words[::-1], place)
        assert (own.codes(drawn) == codes).all()
        for number in found.numbers:
            share = (drawn.to_numpy() == number).mean()
            assert share == pytest.approx((values == number).mean(), abs=0.004)
    plain = cells(codec, replace(found, numbers=np.zeros(0))).draw(codes, words)
    assert (plain.to_numpy() == found.numbers[1]).mean() < 0.05


@pytest.mark.parametrize("noise", [1.0, 60.0])
def test_no_number_is_found_where_none_is_shared(noise):
    rng = default_rng(8)
    codec = codec_of((0.0, 1000.0))
    grid = make_grid(codec)
    values = rng.lognormal(2.0, 0.8, 100_000)
    counts = np.bincount(grid.index(pa.array(values)), minlength=grid.n_cells)
    for _ in range(20):
        noisy = np.maximum(counts + rng.normal(0.0, noise, len(counts)), 0.0)
        assert not len(find_bins(grid, noisy, 20, noise).numbers)


def test_what_is_one_number_already_or_has_no_digits_is_no_number_that_many_share():
    """Whole numbers of their own cell, atoms, the cells about 0, dates."""
    for bounds, type_, atoms in [
        ((0.0, 50.0), pa.int64(), ()),
        ((0.0, 1000.0), FLOAT, (2.75,)),
        ((18262.0, 19000.0), pa.date32(), ()),
    ]:
        codec = codec_of(bounds, type_, atoms=atoms)
        grid = make_grid(codec)
        counts = np.zeros(grid.n_cells)
        line = grid.n_cells - len(grid.edges) + 1
        wanted = 2.75 if atoms else (bounds[0] + bounds[1]) / 2
        counts[line + np.searchsorted(grid.edges, wanted) - 1] = 1e5
        assert not len(find_bins(grid, counts, 20, 1.0).numbers)
    about = cells_of_edges(codec_of((-10.0, 10.0)), np.array([-10.0, -1.0, 1.0, 10.0]))
    assert not len(find_bins(about, np.array([0.0, 1e6, 0.0]), 2, 1.0).numbers)


def test_a_number_at_an_end_of_its_fine_cell_splits_it_once():
    codec = codec_of((0.0, 8.0), pa.int64())
    edges, masses = np.array([-1.0, 3.0, 6.0, 8.0]), np.array([10.0, 90.0, 30.0])
    for number, ends, rows in [
        (4.0, [3.0, 4.0, 6.0], [76.666667, 13.333333]),
        (5.0, [3.0, 4.0, 5.0, 6.0], [6.666667, 76.666667, 6.666667]),
        (6.0, [3.0, 5.0, 6.0], [13.333333, 76.666667]),
    ]:
        found = FoundBins(
            cuts=edges[[0, -1]], edges=edges, masses=masses, numbers=np.array([number])
        ).split(codec)
        assert found.edges.tolist() == [-1.0, *ends, 8.0]
        np.testing.assert_allclose(found.masses, [10.0, *rows, 30.0])
        assert not len(found.numbers)


@given(
    st.lists(st.integers(0, 409), unique=True, max_size=60), st.integers(0, 2**32), st.booleans()
)
@settings(max_examples=80)
def test_no_more_cells_are_found_than_were_planned(atoms, seed, whole):
    codec = codec_of(
        (0.0, 409.0),
        pa.int32() if whole else FLOAT,
        atoms=tuple(map(float, sorted(atoms))),
        nulls=True,
    )
    grid = make_grid(codec)
    counts = default_rng(seed).gamma(0.05, 1.0, grid.n_cells)
    found = cut_with_found(
        {"v": codec}, "adaptive", {"v": find_bins(grid, counts, DEFAULT_BINS, 0.01)}
    )
    assert found["v"].size <= cut_with_found({"v": codec}, "adaptive", None)["v"].size


@pytest.mark.parametrize("high", [1e8, 1e12, 2.0**53])
def test_small_whole_numbers_are_cells_of_their_own_under_any_bounds(high):
    codec = codec_of((0.0, high), pa.int64())
    assert len(set(make_grid(codec).index(pa.array(range(50))).tolist())) == 50


def test_a_column_pays_for_the_vectors_that_are_drawn_of_it_and_no_less():
    columns = {
        "numbers": Column(role="privatise", kind="continuous", bounds=(0.0, 1e6)),
        "levels": Column(role="privatise", kind="categorical", levels=["a", "b"]),
    }
    for epsilon in (0.1, 1.0):
        events = Histogram().events(dict.fromkeys(columns, epsilon), columns, "replace-one", 3)
        for name, count in {"numbers": N_LEVELS, "levels": 1}.items():
            assert (events[name].sensitivity, events[name].count) == (6, count)
            assert 0.999 * epsilon < paid(Composed(events=(events[name],)).events, 0) <= epsilon
