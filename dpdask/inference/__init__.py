"""Estimates from a release and its card, without private data.

`dpdask.open` chooses among them by a release's card. `IntervalRegressor` needs the extra
`dpdask[inference]`; it is imported when it is first asked for.
"""

import importlib
from typing import TYPE_CHECKING, Any

from dpdask.inference.debias import ReleasedColumn
from dpdask.inference.m_estimators import (
    Contrast,
    NoiseError,
    WeightedSample,
    huber,
    least_squares,
    logistic,
    make_redraw,
    minimise,
    noise_error,
    poisson,
    quantile,
    quantile_regression,
)
from dpdask.inference.pseudo_values import MAX_CONDITION
from dpdask.inference.range_estimates import NPMLE, RangeEstimate, bootstrap, npmle
from dpdask.inference.tallies import Estimate
from dpdask.stats.ranges import RangeCounts

if TYPE_CHECKING:
    from dpdask.inference.interval_regression import IntervalRegressor

__all__ = [
    "MAX_CONDITION",
    "NPMLE",
    "Contrast",
    "Estimate",
    "IntervalRegressor",
    "NoiseError",
    "RangeCounts",
    "RangeEstimate",
    "ReleasedColumn",
    "WeightedSample",
    "bootstrap",
    "huber",
    "least_squares",
    "logistic",
    "make_redraw",
    "minimise",
    "noise_error",
    "npmle",
    "poisson",
    "quantile",
    "quantile_regression",
]


def __getattr__(name: str) -> Any:
    if name == "IntervalRegressor":
        return importlib.import_module("dpdask.inference.interval_regression").IntervalRegressor
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
