"""dpdask releases privacy-protected versions of tables too big for one machine's memory, on Dask."""

from dpdask.errors import BudgetError, DataError, DpdaskError, InputError, OutputError, SpecError, TemporaryError
from dpdask.frames import DIP, Release
from dpdask.privacy import UnitColumn
from dpdask.references import Histogram, Holdout, Known, Public
from dpdask.schema import Column, Schema
from dpdask.synthesis import CopulaRelease, GaussianCopula, marginals
from dpdask.version import __version__

__all__ = [
    "DIP",
    "BudgetError",
    "Column",
    "CopulaRelease",
    "DataError",
    "DpdaskError",
    "GaussianCopula",
    "Histogram",
    "Holdout",
    "InputError",
    "Known",
    "OutputError",
    "Public",
    "Release",
    "Schema",
    "SpecError",
    "TemporaryError",
    "UnitColumn",
    "__version__",
    "marginals",
]
