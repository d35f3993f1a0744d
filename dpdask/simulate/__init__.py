"""Simulated tables of the papers' shapes at any scale, for demos and benchmarks; they hold no person's data."""

from dpdask.simulate.census import CENSUS_ATTRIBUTES, CENSUS_LEVELS, CENSUS_ROWS, simulate_census
from dpdask.simulate.movielens import ML25M_MOVIES, ML25M_RATING_COUNTS, ML25M_ROWS, ML25M_USERS, simulate_movielens

__all__ = [
    "CENSUS_ATTRIBUTES",
    "CENSUS_LEVELS",
    "CENSUS_ROWS",
    "ML25M_MOVIES",
    "ML25M_RATING_COUNTS",
    "ML25M_ROWS",
    "ML25M_USERS",
    "simulate_census",
    "simulate_movielens",
]
