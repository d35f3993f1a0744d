"""dpdask releases privacy-protected versions of tables too big for one machine's memory, on Dask."""

from dpdask.errors import DataError, DpdaskError, InputError, OutputError, SpecError, TemporaryError
from dpdask.frames import DIP, Release
from dpdask.references import Holdout, Known, Public
from dpdask.schema import Column, Schema
from dpdask.version import __version__

__all__ = [
    "DIP",
    "Column",
    "DataError",
    "DpdaskError",
    "Holdout",
    "InputError",
    "Known",
    "OutputError",
    "Public",
    "Release",
    "Schema",
    "SpecError",
    "TemporaryError",
    "__version__",
]
