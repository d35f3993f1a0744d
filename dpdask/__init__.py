"""dpdask releases privacy-protected versions of tables too big for one machine's memory, on Dask."""

from dpdask.version import __version__

__all__ = ["__version__"]
