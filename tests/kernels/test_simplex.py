"""The projection against its optimality conditions and a general solver."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpdask.kernels.channel import project

VECTORS = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40).map(np.array)
TOTALS = st.floats(1e-3, 1e6)


@given(VECTORS, TOTALS)
def test_the_result_meets_the_conditions_of_the_nearest_point(values, total):
    result = project(values, total)
    slack = 1e-9 * (total + np.abs(values).max())
    assert (result >= 0).all()
    assert result.sum() == pytest.approx(total, rel=1e-12)
    kept = result > 0
    shift = (values - result)[kept].mean()
    assert np.abs((values - result)[kept] - shift).max() <= slack  # one threshold for what is kept
    assert (values[~kept] <= shift + slack).all()  # and nothing above it is dropped


@pytest.mark.parametrize(
    ("values", "total"),
    [
        ([], 1.0),
        ([np.nan], 1.0),
        ([np.inf, 0.0], 1.0),
        ([1.0], 0.0),
        ([1.0], np.inf),
        ([1.0], np.nan),
    ],
)
def test_nonsense_is_refused(values, total):
    with pytest.raises(ValueError, match="finite"):
        project(np.array(values, dtype=float), total)
