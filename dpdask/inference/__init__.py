"""Estimates from a release and its card, without private data.

`dpdask.open` chooses among them by a release's card. `IntervalRegressor` needs the extra
`dpdask[inference]`; it is imported when it is first asked for.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpdask.inference.debias import ReleasedColumn
    from dpdask.inference.interval_regression import IntervalRegressor
    from dpdask.inference.m_estimators import (
        Contrast,
        NoiseError,
        WeightedSample,
        huber,
        least_squares,
        logistic,
        minimise,
        noise_error,
        poisson,
        quantile,
        quantile_regression,
    )
    from dpdask.inference.pseudo_values import MAX_CONDITION
    from dpdask.inference.range_estimates import NPMLE, RangeEstimate, bootstrap, npmle
    from dpdask.inference.redraw import make_redraw
    from dpdask.inference.tallies import Estimate
    from dpdask.stats.ranges import RangeCounts

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


_MODULES = {
    "inference.debias": ("ReleasedColumn",),
    "inference.interval_regression": ("IntervalRegressor",),
    "inference.pseudo_values": ("MAX_CONDITION",),
    "inference.range_estimates": ("NPMLE", "RangeEstimate", "bootstrap", "npmle"),
    "inference.redraw": ("make_redraw",),
    "inference.tallies": ("Estimate",),
    "stats.ranges": ("RangeCounts",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


if not TYPE_CHECKING:  # a checker takes the names from above

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = _MODULE_OF.get(name, "inference.m_estimators")
        return getattr(importlib.import_module(f"dpdask.{module}"), name)
