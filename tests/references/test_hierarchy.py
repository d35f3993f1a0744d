"""Counts on a fine public grid, level by level: the grid, its sensitivity, and what the noisy counts are worth."""

from __future__ import annotations

import datetime as dt
import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpdask.codec import LevelCodec, ValueCodec
from dpdask.errors import SpecError
from dpdask.privacy.accountant import epsilon as paid
from dpdask.privacy.events import Composed, DiscreteGaussian, DiscreteLaplace
from dpdask.privacy.noise import perturb
from dpdask.references import RankDistribution
from dpdask.references.hierarchy import N_LEVELS, Hierarchy, make_grid
from dpdask.references.histogram import CellCounts, Histogram, histogram_event
from dpdask.schema import Column
from dpdask.streams import RunKey, stream

NOISE = DiscreteLaplace(scale=60.0, sensitivity=2, adjacency="replace-one", count=N_LEVELS)  # ε 0.1 on three levels


FLOAT = pa.float64()


def codec_of(bounds: tuple[float, float] | None, type_: pa.DataType = FLOAT, **changes: Any) -> ValueCodec:
    return ValueCodec(**{"name": "v", "type": type_, "bounds": bounds, "atoms": (), "nulls": False, **changes})


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
    near = [min(low + 1.0, high), max(high - 1.0, low)] if codec.lattice else [float(np.nextafter(np.float32(low), np.float32(high)))]
    cells_of = grid.codes(codec.decode(np.array([*special, *near]), np.zeros(len(special) + len(near), dtype=bool)))
    places = dict(zip([*special, *near], cells_of.tolist(), strict=True))
    assert len(set(places.values())) == len(places)


def test_a_fine_grid_is_about_as_fine_relative_to_a_value_however_wide_its_bounds():
    for high in (1e3, 1e5, 1e7):
        edges = make_grid(codec_of((0.0, high))).edges
        beyond = edges[edges > high / 1e4]
        assert (np.diff(beyond) / beyond[:-1]).max() < 0.005


def test_a_column_without_bounds_has_no_grid():
    with pytest.raises(SpecError, match="no public cells"):
        make_grid(codec_of(None))


def test_dates_have_even_cells():
    edges = make_grid(codec_of((0.0, 30_000.0), pa.date32())).edges
    assert set(np.diff(edges)) == {7.0, 8.0}


@given(st.sampled_from(CODECS), st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_replacing_a_row_moves_one_count_of_each_level(codec, seed):
    grid = make_grid(codec)
    hierarchy = Hierarchy(grid)
    rng = np.random.default_rng(seed)
    first, second = rng.choice(np.flatnonzero(grid.possible), 2)
    one, other = (hierarchy.count(CellCounts(np.bincount([cell], minlength=grid.n_cells))) for cell in (first, second))
    assert one.shape == (hierarchy.size,)
    assert one.sum() == other.sum() == N_LEVELS
    assert np.abs(one - other).sum() <= 2 * N_LEVELS


def test_the_event_costs_what_is_given_for_it_and_no_less():
    for epsilon in (0.1, 1.0):
        event = histogram_event(epsilon, "replace-one", 3, N_LEVELS)
        assert (event.sensitivity, event.count) == (6, 3)
        assert 0.999 * epsilon < paid(Composed(events=(event,)).events, 0) <= epsilon


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: f"{codec.type} {codec.bounds}")
def test_without_noise_the_estimate_is_the_counts(codec):
    grid = make_grid(codec)
    counts = np.zeros(grid.n_cells, dtype=np.int64)
    chosen = np.random.default_rng(1).choice(np.flatnonzero(grid.possible), 5)
    np.add.at(counts, chosen, 1000)
    hierarchy = Hierarchy(grid)
    tiny = DiscreteLaplace(scale=1e-3, sensitivity=2, adjacency="replace-one", count=N_LEVELS)
    for n_rows in (5000, None):
        np.testing.assert_allclose(hierarchy.estimate(hierarchy.count(CellCounts(counts)), tiny, n_rows), counts, atol=1e-6)


@pytest.mark.parametrize("event", [NOISE, DiscreteGaussian(sigma=85.0, sensitivity=1.0, adjacency="add-remove", count=N_LEVELS)])
def test_noise_alone_gives_no_negative_count_and_the_right_sum(event):
    hierarchy = Hierarchy(make_grid(CODECS[1]))
    noisy = perturb(np.zeros(hierarchy.size, dtype=np.int64), event, rng=stream(RunKey.insecure(5), "hierarchy", ""))
    for n_rows in (2, 10_000, None):
        found = hierarchy.estimate(noisy, event, n_rows)
        assert (found >= 0).all()
        assert (found[~hierarchy.cells.possible] == 0).all()
        if n_rows is not None:
            assert found.sum() == pytest.approx(n_rows)


def skewed(n: int) -> np.ndarray:
    """Return amounts: a third of them 0, the rest log-normal."""
    rng = np.random.default_rng(3)
    return np.where(rng.random(n) < 0.33, 0.0, np.round(rng.lognormal(2.5, 0.8, n), 2))


def distribution_of(values: np.ndarray, high: float, bins: Any) -> RankDistribution:
    codec = codec_of((0.0, high))
    reference = Histogram(bins=bins)
    events = reference.events({"v": 0.1}, {"v": Column(role="privatise", kind="continuous", bounds=(0.0, high))}, "replace-one", 1)
    codecs = {"v": codec}
    counter = reference.statistic(codecs).counter()
    counter.add(pa.record_batch({"v": values}), None, None)
    drawn = reference.draw(counter.result(), codecs, events, lambda name: stream(RunKey.insecure(7), name, ""))
    found = reference.distributions(drawn, codecs)["v"]
    assert isinstance(found, RankDistribution)
    return found


@pytest.mark.parametrize("factor", [1, 100, 10_000])
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
    zeros = found.c[np.searchsorted(found.x, 0.0, side="right") - 1] - found.c[np.searchsorted(found.x, 0.0, side="left")]
    assert abs(zeros - (values == 0.0).mean()) < 0.003


def test_the_bounds_are_jumps_that_are_never_left():
    values = np.full(1000, 3.0)
    found = distribution_of(values, 3.0, "adaptive")
    assert found.x[0] == 0.0
    assert found.x[-1] == 3.0
    assert found.c[-1] - found.c[np.searchsorted(found.x, 3.0, side="left")] > 0.5


def test_levels_are_counted_once():
    reference = Histogram()
    column = Column(role="privatise", kind="categorical", levels=["a", "b"])
    assert reference.events({"v": 0.1}, {"v": column}, "replace-one", 1)["v"].count == 1
    codec = LevelCodec(name="v", levels=pa.array(["a", "b"]), ordered=False)
    assert reference.sizes({"v": codec}) == {"v": 2}


def test_whole_numbers_that_are_few_are_cells_of_their_own():
    grid = make_grid(codec_of((0.0, 4000.0), pa.int32()))
    assert grid.n_cells == 4001
    days = codec_of((0.0, 10.0), pa.date32())
    assert make_grid(days).index(pa.array([dt.date(1970, 1, 1), dt.date(1970, 1, 11)])).tolist() == [0, 10]
    assert math.isclose(Hierarchy(make_grid(days)).size, 3 + 9 + 27)
