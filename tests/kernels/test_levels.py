"""The codes of floats among few levels: evenly spaced or not, in any order, and what is no level."""

import numpy as np
import pyarrow as pa
import pytest

from dpdask.codec import LevelCodec
from dpdask.kernels.channel import find_codes
from dpdask.stats.statistic import encode

STARS = [0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0]


@pytest.mark.parametrize(
    "levels",
    [
        STARS,
        STARS[::-1],
        [7.0],
        [0.1, 0.2, 0.4, 100.0, -3.0],
        [-0.0, 1e300, -1e300],
        [float("inf"), 1.0],
    ],
)
@pytest.mark.parametrize("type_", [pa.float32(), pa.float64()])
def test_codes_are_those_of_the_codec_and_lead_back(levels, type_):
    if type_ == pa.float32() and 1e300 in levels:
        pytest.skip("not a float32")
    codec = LevelCodec(name="x", levels=pa.array(levels, type_), ordered=True)
    array = codec.levels.take(pa.array(np.random.default_rng(1).integers(0, len(levels), 500)))
    codes = encode(codec, array)
    assert codes.dtype == np.int32
    np.testing.assert_array_equal(codes, codec.encode(array))
    assert codec.decode(codes).equals(pa.array(array.to_numpy() + 0, type_))


@pytest.mark.parametrize(
    "levels", [STARS, [0.5, 1.0, 5.0]], ids=["evenly spaced", "unevenly spaced"]
)
@pytest.mark.parametrize(
    "other",
    [0.0, 0.75, 5.5, float("nan"), float("inf"), -float("inf"), -1e300, np.nextafter(0.5, 1)],
)
def test_a_value_that_is_no_level_is_noticed(other, levels):
    codes, complete = find_codes(
        np.array([1.0, other, 5.0]), np.array(levels), np.arange(len(levels), dtype=np.int32)
    )
    assert (codes[[0, 2]].tolist(), complete) == ([1, len(levels) - 1], False)
