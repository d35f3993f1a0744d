"""Pure arrays in, arrays out: numpy, scipy and numba; no dask, no I/O, no randomness of their own."""
