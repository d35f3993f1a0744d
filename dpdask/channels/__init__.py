"""Channels on levels: which output level each input level may become, and with what probability."""

from dpdask.channels.laplace import LevelChannel, laplace

__all__ = ["LevelChannel", "laplace"]
