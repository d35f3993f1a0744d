"""The public cells of a column: every value in one of them, every draw back in its own, and what cannot be cut."""

import datetime as dt
import math

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import stats

from dpdask.cells import FoundBins, cells, cells_of_edges
from dpdask.codec import LevelCodec, ValueCodec, codec_for
from dpdask.errors import SpecError
from dpdask.schema import Column

ALPHA = 1e-10
WORDS = np.array([0, 1, 2**11 - 1, 2**11, 2**53, 2**63, 2**64 - 2**11, 2**64 - 1], dtype=np.uint64)
INT, DAY, MICRO, F32 = pa.int32(), pa.date32(), pa.timestamp("us", tz="UTC"), pa.float32()
MIXED = Column(role="privatise", kind="mixed", bounds=(0.0, 10.0), atoms=(0.0, 6.0), nulls="level")


def value_codec(**changes):
    return ValueCodec(
        **{
            "name": "v",
            "type": pa.float64(),
            "bounds": (0.0, 10.0),
            "atoms": (),
            "nulls": False,
            **changes,
        }
    )


def level_codec(levels, type_=None):
    return LevelCodec(name="v", levels=pa.array(levels, type_), ordered=True)


GRIDS = {
    "levels": cells(level_codec(["a", "b", "c"]), 7),
    "null level": cells(level_codec([None, 1, 2]), 7),
    "floats": cells(value_codec(), 7),
    "one cell": cells(value_codec(), 1),
    "no round edges": cells(value_codec(bounds=(-0.1, 0.7)), 13),
    "float32": cells(value_codec(type=F32, bounds=(0.0, 1.0)), 10),
    "float16": cells(value_codec(type=pa.float16(), bounds=(0.0, 1.0)), 7),
    "null floats": cells(value_codec(nulls=True), 4),
    "mixed": cells(value_codec(atoms=(0.0, 6.0, 10.0), nulls=True), 3),
    "mixed float32": cells(value_codec(type=F32, bounds=(0.0, 1.0), atoms=(0.0, 0.5)), 3),
    "whole": cells(value_codec(type=INT, bounds=(-5.0, 90.0)), 7),
    "each whole": cells(value_codec(type=INT, bounds=(1.0, 4.0)), 100),
    "mixed whole": cells(value_codec(type=INT, bounds=(0.0, 9.0), atoms=(0.0, 5.0)), 2),
    "atoms fill it": cells(
        value_codec(type=INT, bounds=(0.0, 3.0), atoms=(0.0, 1.0, 3.0), nulls=True), 2
    ),
    "days": cells(value_codec(type=DAY, bounds=(-400.0, 400.0), atoms=(100.0,), nulls=True), 5),
    "widest": cells(value_codec(type=pa.int64(), bounds=(-(2.0**53) + 2, 2.0**53)), 3),
    "huge": cells(value_codec(bounds=(-(2.0**1021), 2.0**1021)), 3),
    "narrowest": cells(value_codec(bounds=(1.0, math.nextafter(1.0, 2.0))), 5),
    "declared": cells(value_codec(), [0.0, 0.005, 0.1, 0.3, 7.0]),
    "declared to the end": cells(value_codec(), [0.0, 5.0, 10.0]),
    "declared whole": cells(value_codec(type=INT, bounds=(1.0, 9.0)), [1, 4, 9]),
    "declared float32": cells(value_codec(type=F32, bounds=(0.0, 1.0)), [0.0, 0.1, 0.3, 0.7]),
    "declared at atoms": cells(value_codec(atoms=(0.0, 5.0, 10.0)), [0.0, 5.0, 7.0, 10.0]),
    "declared days": cells(value_codec(type=DAY, bounds=(0.0, 400.0)), [0, 31, 59]),
}
EVERY = pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS.keys())
CUT = {name: grid for name, grid in GRIDS.items() if len(grid.edges)}
LINES = pytest.mark.parametrize("grid", CUT.values(), ids=CUT.keys())


def crossed(grid, words):
    """Every code with every word."""
    return np.repeat(np.arange(grid.size), len(words)), np.tile(words, grid.size)


@EVERY
def test_what_is_drawn_lies_in_its_cell_for_every_word(grid):
    words = np.concatenate(
        [WORDS, np.random.default_rng(0).integers(0, 2**64, 200, dtype=np.uint64)]
    )
    codes, crossed_words = crossed(grid, words)
    drawn = grid.draw(codes, crossed_words)
    assert drawn.type == (
        grid.codec.levels.type if isinstance(grid.codec, LevelCodec) else grid.codec.type
    )
    assert (grid.codes(drawn) == codes).all()  # encoding refuses what is outside the bounds
    assert grid.draw(codes, crossed_words).equals(drawn)
    assert len(set(grid.labels())) == len(grid.labels()) == grid.size


@LINES
def test_the_cell_is_the_half_open_interval_that_holds_the_value(grid):
    codec = grid.codec
    assert isinstance(codec, ValueCodec)
    values, is_null = codec.encode(grid.draw(*crossed(grid, WORDS)))
    index = grid.index(codec.decode(values, is_null))
    singles = int(codec.nulls) + len(codec.atoms)
    for value, null, cell in zip(values.tolist(), is_null.tolist(), index.tolist(), strict=True):
        if null:
            assert cell == 0
        elif value in codec.atoms:
            assert cell == int(codec.nulls) + codec.atoms.index(value)
        else:
            low, high = grid.edges[cell - singles], grid.edges[cell - singles + 1]
            assert low < value <= high or (cell == singles and value == low)


@LINES
def test_edges_increase_and_cover_the_bounds(grid):
    assert (np.diff(grid.edges) > 0).all()
    low, high = grid.codec.bounds
    assert (grid.edges[0], grid.edges[-1]) == (low - 1 if grid.codec.lattice else low, high)
    assert (
        len(grid.possible)
        == grid.n_cells
        == int(grid.codec.nulls) + len(grid.codec.atoms) + len(grid.edges) - 1
    )
    assert set(grid.codec.atoms) <= set(grid.edges.tolist())


@pytest.mark.parametrize("name", ["each whole", "atoms fill it"])
def test_single_values_come_back_as_they_are(name):
    grid = GRIDS[name]
    values = [
        *([None] if grid.codec.nulls else []),
        *range(int(grid.codec.bounds[0]), int(grid.codec.bounds[1]) + 1),
    ]
    array = pa.array(values, INT)
    assert grid.size == len(values)
    assert sorted(grid.codes(array).tolist()) == list(range(grid.size))
    assert grid.draw(grid.codes(array), WORDS[: len(values)]).to_pylist() == values


@pytest.mark.parametrize(
    ("grid", "values", "codes"),
    [
        (GRIDS["null level"], pa.array([2, None, 1, 2]), [2, 0, 1, 2]),
        # a declared value is the first of its cell, even without a finite binary form
        (
            cells(value_codec(bounds=(0.0, 1.0)), [0.0, 0.005, 0.3]),
            [math.nextafter(0.005, -1), 0.005, math.nextafter(0.3, -1), 0.3, 1.0],
            [0, 1, 1, 2, 2],
        ),
        # 0.1 is above, and 0.7 below the nearest float32; a column holds neither
        (
            cells(value_codec(type=F32, bounds=(float(np.float32(0.1)), 1.0)), [0.1, 0.7]),
            pa.array([0.1, 0.69, 0.7, 1.0], F32),
            [0, 0, 1, 1],
        ),
        (
            cells(value_codec(), [2.0, 7.0]),
            [0.0, 1.9, 2.0, 6.9, 7.0, 10.0],
            [0, 0, 1, 1, 2, 2],
        ),  # before the first one, too
        (
            GRIDS["declared to the end"],
            [0.0, 4.9, 5.0, math.nextafter(10, 0), 10.0],
            [0, 0, 1, 1, 2],
        ),
        (GRIDS["declared whole"], pa.array([1, 3, 4, 8, 9], INT), [0, 0, 1, 1, 2]),
        (
            GRIDS["declared at atoms"],
            [0.0, 5.0, 10.0, 0.1, 4.9, 5.1, 6.9, 7.0, 9.9],
            [0, 1, 2, 3, 3, 4, 4, 5, 5],
        ),  # no cell of nothing
        (
            GRIDS["mixed whole"],
            pa.array([0, 5, 1, 4, 6, 9], INT),
            [0, 1, 2, 2, 3, 3],
        ),  # of (4, 5) nothing is left
        (
            cells(codec_for("v", MIXED, pa.float64()), 2),
            [None, 0.0, 6.0, 5.0, 5.5, 10.0],
            [0, 1, 2, 3, 4, 5],
        ),
        (GRIDS["declared days"], pa.array([dt.date(1970, 1, 31), dt.date(1970, 2, 1)]), [0, 1]),
    ],
)
def test_values_have_the_codes_of_their_cells(grid, values, codes):
    assert grid.codes(pa.array(values)).tolist() == codes


def test_cells_in_which_no_value_can_be_have_no_code():
    grid = GRIDS["mixed whole"]
    assert (grid.edges.tolist(), grid.possible.tolist()) == (
        [-1.0, 0.0, 4.0, 5.0, 9.0],
        [True, True, False, True, False, True],
    )
    assert grid.labels() == ["0", "5", "1..4", "6..9"]
    assert GRIDS["mixed"].labels()[:4] == ["null", "0.0", "6.0", "10.0"]


@pytest.mark.parametrize(
    ("edges", "labels"),
    [
        ([0.0, 1171.857421875, 2e5], ["[0.0, 1171.86]", "(1171.86, 200000.0]"]),
        ([0.0, 12.25, 20.5], ["[0.0, 12.25]", "(12.25, 20.5]"]),
        ([-5e-324, np.nextafter(2.0, 0.0), 3.0], ["[0.0, 2.0)", "[2.0, 3.0]"]),
        ([1.0, 1.00000001, 1.00000002], ["[1.0, 1.00000001]", "(1.00000001, 1.00000002]"]),
    ],
)
def test_labels_have_six_digits_unless_more_tell_cells_apart(edges, labels):
    codec = value_codec(bounds=(edges[0], edges[-1]))
    assert cells_of_edges(codec, np.array(edges)).labels() == labels


@pytest.mark.parametrize(
    ("codec", "bins", "message"),
    [
        *(
            (value_codec(), bins, "increase within")
            for bins in ([], [3.0, 3.0], [5.0, 2.0], [-0.1, 5.0], [0.0, 10.1], [0.0, math.nan])
        ),
        *((value_codec(type=type_), [0, 2.5], "whole") for type_ in (INT, DAY, MICRO)),
        *((value_codec(bounds=None), bins, "bounds") for bins in (4, [0.0, 1.0])),
    ],
)
def test_cells_that_cannot_be_are_refused(codec, bins, message):
    with pytest.raises(SpecError, match=message):
        cells(codec, bins)


@settings(max_examples=100)
@given(
    bounds=st.lists(st.floats(-1e6, 1e6, width=32), min_size=2, max_size=2, unique=True).map(
        sorted
    ),
    type_=st.sampled_from([pa.float32(), pa.float64()]),
    cuts=st.lists(st.floats(0, 1), max_size=5),
    seed=st.integers(0, 2**32 - 1),
)
def test_declared_values_begin_cells_whatever_they_are(bounds, type_, cuts, seed):
    low, high = bounds
    kind = type_.to_pandas_dtype()
    firsts = sorted(
        {float(kind(np.clip(low + (high - low) * cut, low, high))) for cut in cuts} | {low}
    )
    assume(
        len(firsts) == 1 or firsts[1] > np.nextafter(kind(low), kind(np.inf))
    )  # a cell of the lower bound alone cannot be told
    grid = cells(value_codec(type=type_, bounds=(low, high)), firsts)
    found = grid.codes(pa.array(np.array(firsts).astype(kind)))
    assert found.tolist() == list(
        range(len(firsts))
    )  # each value is in a cell of its own, the cell it begins
    words = np.random.default_rng(seed).integers(0, 2**64, 16, dtype=np.uint64)
    codes, crossed_words = crossed(grid, np.concatenate([WORDS, words]))
    drawn = grid.draw(codes, crossed_words)
    assert (grid.codes(drawn) == codes).all()
    begins = np.array(firsts)[codes]
    assert (np.asarray(drawn).astype(float) >= begins).all()


@pytest.mark.parametrize("name", ["floats", "whole", "days", "float32"])
def test_draws_are_uniform_inside_a_cell(name):
    grid = GRIDS[name]
    code, n = grid.size - 1, 40_000
    values, _ = grid.codec.encode(
        grid.draw(np.full(n, code), np.random.default_rng(1).integers(0, 2**64, n, dtype=np.uint64))
    )
    low, high = grid.edges[-2:]
    share = (values - low) / (high - low)
    if grid.codec.lattice:
        counts = np.bincount((values - low - 1).astype(int), minlength=int(high - low))
        assert stats.chisquare(counts).pvalue > ALPHA
    else:
        assert stats.kstest(share, "uniform").pvalue > ALPHA


@LINES
def test_values_rise_with_their_places_and_stay_in_their_cells(grid):
    """The words decide only what a place leaves open."""
    n = 200
    places = np.linspace(0, 2**32 - 1, n).astype(np.uint32)
    words = np.random.default_rng(1).integers(0, 2**64 - 1, n, dtype=np.uint64)
    singles = int(grid.codec.nulls) + len(grid.codec.atoms)
    for code in range(grid.size):
        drawn = grid.draw(np.full(n, code), words, places)
        assert (grid.codes(drawn) == code).all()
        if code >= singles:
            values, _ = grid.codec.encode(drawn)
            assert (np.diff(values) >= 0).all()
            first, last = (
                grid.codec.encode(grid.draw(np.full(len(WORDS), code), WORDS))[0].min(),
                grid.codec.encode(grid.draw(np.full(len(WORDS), code), WORDS))[0].max(),
            )
            assert values[0] <= first + 0.01 * (last - first)
            assert values[-1] >= last - 0.01 * (last - first)


def test_places_follow_the_fine_cells():
    edges = np.array([0.0, 1.0, 2.0, 10.0])
    found = FoundBins(cuts=np.array([0.0, 10.0]), edges=edges, masses=np.array([1.0, 2.0, 1.0]))
    places = (np.array([0.125, 0.25, 0.5, 0.75, 0.875]) * 2.0**32).astype(np.uint32)
    none = np.zeros(5, dtype=np.uint64)
    drawn = cells(value_codec(), found).draw(np.zeros(5, dtype=np.int64), none, places)
    np.testing.assert_allclose(drawn.to_numpy(), [0.5, 1.0, 1.5, 2.0, 6.0], atol=1e-6)
    whole = cells(value_codec(type=INT, bounds=(0.0, 10.0)), 1)
    drawn = whole.draw(np.zeros(5, dtype=np.int64), none, places)
    assert drawn.to_pylist() == [1, 2, 5, 8, 9]


def test_a_found_cell_of_one_floating_number_gives_that_number_alone():
    """Between 0 and its neighbour below lies no number: neither that neighbour nor -0.0 may be drawn."""
    edges = np.array([-1.0, -np.nextafter(0.0, 1.0), 0.0, 1.0])
    found = FoundBins(cuts=np.array([-1.0, 1.0]), edges=edges, masses=np.array([0.2, 0.6, 0.2]))
    codec = ValueCodec(name="v", type=pa.float64(), bounds=(-1.0, 1.0), atoms=(), nulls=False)
    words = np.random.default_rng(1).integers(0, 2**64 - 1, 20_000, dtype=np.uint64)
    values = cells(codec, found).draw(np.zeros(20_000, dtype=np.int64), words).to_numpy()
    assert (values == 0.0).mean() == pytest.approx(0.6, abs=0.02)
    assert not np.signbit(values[values == 0.0]).any()
    assert not ((values != 0.0) & (np.abs(values) < 1e-300)).any()
    assert ((values < 0.0).mean(), (values > 0.0).mean()) == (
        pytest.approx(0.2, abs=0.02),
        pytest.approx(0.2, abs=0.02),
    )
