"""Channels on levels: which output level each input level may become, and with what probability."""

from dpdask.channels.laplace import LevelChannel, calibrate, laplace
from dpdask.channels.optimal import optimal

__all__ = ["LevelChannel", "calibrate", "laplace", "optimal"]
