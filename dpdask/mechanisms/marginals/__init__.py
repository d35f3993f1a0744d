"""Contingency tables with noise: a release of their own, and the input of other mechanisms."""
