"""The Python classes: a mechanism by keyword arguments, fitted to a Dask or pandas frame."""
