"""Channels on levels: which output level each input level may become, and with what probability."""

from dpdask.channels.laplace import LevelChannel, calibrated, laplace
from dpdask.channels.optimal import optimal

__all__ = ["LevelChannel", "calibrated", "laplace", "optimal"]
