"""dpdask releases privacy-protected versions of tables too big for one machine's memory, on Dask."""

from dpdask import local
from dpdask.errors import BudgetError, DataError, DpdaskError, InputError, OutputError, SpecError, TemporaryError
from dpdask.frames import DIP, Release
from dpdask.histograms import HistogramRelease, PerturbedHistogram
from dpdask.intervals import IntervalMechanism
from dpdask.mechanisms.copula_fit import CopulaOptions
from dpdask.privacy import UnitColumn
from dpdask.references import Chain, Histogram, Holdout, Known, Public, Tree
from dpdask.schema import Column, Schema
from dpdask.survey import Survey
from dpdask.synthesis import CopulaRelease, GaussianCopula, marginals
from dpdask.version import __version__

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
    "local",
    "marginals",
]
