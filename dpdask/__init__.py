"""dpdask releases privacy-protected versions of tables too big for one machine's memory, on Dask.

Importing it does no work: a name's module, or a submodule, is imported when it is first asked for
(PEP 562).
"""

import importlib
from typing import TYPE_CHECKING, Any

from dpdask.version import __version__

if TYPE_CHECKING:
    from dpdask import local
    from dpdask.analysis.opening import open  # noqa: A004 - `dpdask.open`, as `Image.open`
    from dpdask.engine.account import LedgerPlace
    from dpdask.errors import (
        BudgetError,
        DataError,
        DpdaskError,
        InputError,
        OutputError,
        SpecError,
        TemporaryError,
    )
    from dpdask.estimators.families import (
        DIP,
        CopulaRelease,
        GaussianCopula,
        HistogramRelease,
        IntervalMechanism,
        Marginals,
        MarginalsRelease,
        PerturbedHistogram,
    )
    from dpdask.estimators.release import Release
    from dpdask.evaluation.measures import exact_marginals
    from dpdask.mechanisms.copula.fit import CopulaOptions
    from dpdask.page import write_page
    from dpdask.privacy import UnitColumn
    from dpdask.references import Chain, Histogram, Holdout, Known, Public, Tree
    from dpdask.schema import Column, Schema
    from dpdask.survey import Survey

__all__ = [
    "DIP",
    "BudgetError",
    "Chain",
    "Column",
    "CopulaOptions",
    "CopulaRelease",
    "DataError",
    "DpdaskError",
    "GaussianCopula",
    "Histogram",
    "HistogramRelease",
    "Holdout",
    "InputError",
    "IntervalMechanism",
    "Known",
    "LedgerPlace",
    "Marginals",
    "MarginalsRelease",
    "OutputError",
    "PerturbedHistogram",
    "Public",
    "Release",
    "Schema",
    "SpecError",
    "Survey",
    "TemporaryError",
    "Tree",
    "UnitColumn",
    "__version__",
    "exact_marginals",
    "local",
    "open",
    "write_page",
]

_MODULES = {
    "analysis.opening": ("open",),
    "errors": (
        "BudgetError",
        "DataError",
        "DpdaskError",
        "InputError",
        "OutputError",
        "SpecError",
        "TemporaryError",
    ),
    "engine.account": ("LedgerPlace",),
    "estimators.families": (
        "DIP",
        "CopulaRelease",
        "GaussianCopula",
        "HistogramRelease",
        "IntervalMechanism",
        "Marginals",
        "MarginalsRelease",
        "PerturbedHistogram",
    ),
    "estimators.release": ("Release",),
    "evaluation.measures": ("exact_marginals",),
    "mechanisms.copula.fit": ("CopulaOptions",),
    "page": ("write_page",),
    "privacy": ("UnitColumn",),
    "references": ("Chain", "Histogram", "Holdout", "Known", "Public", "Tree"),
    "schema": ("Column", "Schema"),
    "survey": ("Survey",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


# a checker takes the names from above, and so still finds those that do not exist
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name in _MODULE_OF:
            return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
        submodule = f"{__name__}.{name}"
        try:
            if not name.startswith("_"):
                return importlib.import_module(submodule)
        except ModuleNotFoundError as missing:
            if missing.name != submodule:
                raise
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
