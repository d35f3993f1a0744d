"""Channels on levels: which output level each input level may become, and with what probability."""

from dpdask.channels.laplace import LevelChannel, calibrate, laplace
from dpdask.channels.optimal import optimal
from dpdask.channels.unbiased import (
    Attenuation,
    check_values,
    measure_attenuation,
    optimal_unbiased,
)

__all__ = [
    "Attenuation",
    "LevelChannel",
    "calibrate",
    "check_values",
    "laplace",
    "measure_attenuation",
    "optimal",
    "optimal_unbiased",
]
