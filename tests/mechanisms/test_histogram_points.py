"""The points that stand for cells: moments against integrals and one-line formulas, every kind of column, refusals."""

import math
import warnings
from functools import partial

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from strategies import level_codec, value_codec

from dpdask.cells import FoundBins, cells
from dpdask.inference import WeightedSample, least_squares
from dpdask.mechanisms.histogram.noise import NoisyHistogram, plan
from dpdask.mechanisms.histogram.release import centres, points_per_cell, spread
from dpdask.privacy import Budget
from dpdask.references.hierarchy import make_grid
from dpdask.stats.marginals import Domain

floats = partial(value_codec, bounds=(0.0, 1.0))
TOWN = level_codec(["A", "B"], "town", ordered=False)


def released(table, columns):
    """Return a histogram with the weights given, as if noise had made them."""
    weights = np.asarray(table, dtype=np.int64)
    assert weights.shape == tuple(column.size for column in columns.values())
    keys = np.flatnonzero(weights)
    domain = Domain(names=tuple(columns), sizes=weights.shape)
    planned = plan(Budget(epsilon=1.0), threshold="none")
    return NoisyHistogram(
        domain=domain, plan=planned, n_rows=10.0, cut=None, keys=keys, weights=weights.ravel()[keys]
    )


def points(table, columns):
    given = released(table, columns)
    values, weights = spread(given, columns, 0, len(given.keys))
    return pd.DataFrame({name: array.to_pandas() for name, array in values.items()}).assign(
        weight=weights
    )


def test_two_points_have_the_moments_of_the_formula():
    n = np.array([10, 40, 90, 70, 60, -3])
    found = points(n, {"x": cells(floats(), 6)})
    h = 1 / 6
    centre = (np.arange(6) + 0.5) * h
    offsets = np.tile([-1, 1], 6) * h / math.sqrt(12)
    assert found["x"].to_numpy() == pytest.approx(np.repeat(centre, 2) + offsets)
    pairs = found["weight"].to_numpy().reshape(6, 2)
    assert pairs.sum(axis=1) == pytest.approx(n)
    ends = -3 * 10 + 4 * 40 - 90, 3 * -3 - 4 * 60 + 70
    slopes = np.array([ends[0], 90 - 10, 70 - 40, 60 - 90, -3 - 70, ends[1]]) / 24
    share = np.clip(slopes * math.sqrt(12) / n, -1, 1)
    assert (np.abs(share) == 1).sum() == 1  # the last
    assert pairs[:, 1] - pairs[:, 0] == pytest.approx(share * n)


def test_cells_of_other_widths_follow_the_density_too():
    column = cells(floats(), [0.0, 0.1, 0.3, 0.35, 0.7])
    # density 2x: its slope is 2 everywhere
    counts = np.rint(1e12 * np.diff(column.edges**2))
    found = points(counts, {"x": column})
    assert float((found["weight"] * found["x"]).sum()) / 1e12 == pytest.approx(2 / 3, abs=1e-9)
    one = points([8], {"x": cells(floats(), 1)})
    assert one["weight"].tolist() == [4, 4]


def test_levels_atoms_nulls_and_whole_numbers_keep_their_values():
    mixed = cells(floats(atoms=(0.0, 0.5), nulls=True), 4)
    found = points(np.full(mixed.size, 6), {"x": mixed})
    assert found["x"].isna().tolist() == [True] * 2 + [False] * 12
    assert found["x"].tolist()[2:6] == [0.0, 0.0, 0.5, 0.5]
    assert (found["weight"] == 3).all()
    codec = floats("n", pa.int32(), bounds=(1.0, 9.0), atoms=(5.0,))
    whole = cells(codec, [1.0, 2.0, 5.0])
    given = points(np.full(whole.size, 2), {"n": whole})
    for values in ([5.0], [1.0], [2.0, 3.0, 4.0], [6.0, 7.0, 8.0, 9.0]):
        mean, deviation = np.mean(values), np.std(values)
        pair = given["n"][np.abs(given["n"] - mean) <= deviation + 1e-9]
        assert sorted(pair) == pytest.approx([mean - deviation, mean + deviation])
    codec = floats("day", pa.date32(), bounds=(0.0, 19.0), nulls=True)
    days = points([0, 2, 2], {"day": cells(codec, 2)})["day"]
    assert [str(day)[5:] for day in days] == ["01-03", "01-08", "01-13", "01-18"]


def test_columns_multiply_and_neighbours_share_all_other_columns():
    columns = {"x": cells(floats(), 3), "town": cells(TOWN, 1), "y": cells(floats("y"), 4)}
    table = np.random.default_rng(0).integers(20, 60, (3, 2, 4))
    table[1, 1, 2] = 0  # not listed: counts as empty
    whole = points(table, columns)
    assert len(whole) == 4 * 23
    assert points_per_cell(columns, "spread") == 4
    at = whole.groupby(["x", "town"])["weight"].sum()
    for town, slab in (("A", table[:, 0].sum(axis=1)), ("B", table[:, 1].sum(axis=1))):
        assert at.xs(town, level="town").to_numpy().reshape(3, 2).sum(axis=1) == pytest.approx(slab)
    for j, town in enumerate("AB"):  # along y, at x and town fixed: as if alone
        for i in range(3):
            alone = points(table[i, j], {"y": columns["y"]})
            low, high = i / 3, (i + 1) / 3
            here = whole[(whole["town"] == town) & whole["x"].between(low, high)]
            assert here.groupby("y")["weight"].sum().to_numpy() == pytest.approx(
                alone["weight"].to_numpy()
            )


def test_least_squares_is_no_longer_attenuated():
    rng = np.random.default_rng(2)
    n, bins = 400_000, 10
    x = rng.normal(0.5, 0.15, n).clip(0, 1)
    y = (0.2 + 0.6 * x + rng.normal(0, 0.1, n)).clip(0, 1)
    columns = {"x": cells(floats(), bins), "y": cells(floats("y"), 10)}
    table = np.zeros((bins, 10), dtype=np.int64)
    np.add.at(table, (columns["x"].codes(pa.array(x)), columns["y"].codes(pa.array(y))), 1)
    given = released(table, columns)
    frame = points(table, columns)
    codes = given.codes_at(0, len(given.keys))
    values = {
        name: centres(column).take(pa.array(code))
        for (name, column), code in zip(columns.items(), codes, strict=True)
    }
    centre = pd.DataFrame({**values, "weight": given.weights})
    true, spread_, centred = (
        least_squares(WeightedSample.of_frame(f, "y", ["x"]))[1]
        for f in (pd.DataFrame({"x": x, "y": y, "weight": 1.0}), frame, centre)
    )
    assert centred / true == pytest.approx(1 / (1 + bins**-2 / 12 / x.var()), abs=0.005)
    assert abs(centred / true - 1) > 0.03
    assert abs(spread_ / true - 1) < 0.02


def test_extreme_cells_have_finite_points_within_them_and_no_warning():
    types = {
        "float64": (
            (-(2.0**1020), 2.0**1020),
            (1e300, math.nextafter(1e300, math.inf)),
            (0.0, 2.3e-308),
            (1.0, math.nextafter(1.0, 2.0)),
        )
    }
    types |= {
        name: ((0.0, most), (-most, most))
        for name in ("float16", "float32")
        if (most := float(np.finfo(name).max))
    }
    for name, bounds in ((name, bounds) for name, several in types.items() for bounds in several):
        grid = make_grid(floats(type_=pa.type_for_alias(name), bounds=bounds))
        found = FoundBins(
            cuts=grid.edges[[0, *range(1, len(grid.edges) - 1, 500), -1]],
            edges=grid.edges,
            masses=np.ones(len(grid.edges) - 1),
        )
        for bins in (2, 20, found):
            column = cells(grid.codec, bins)
            with warnings.catch_warnings(action="error"):
                x = points(np.arange(1, column.size + 1), {"x": column})
            assert x["x"].dropna().between(*bounds).all()
            assert np.isfinite(x["weight"]).all()
