"""Mechanisms: from parameters and a reference to a fitted release, which then randomises batch by batch."""

from dpdask.mechanisms.dip import BinMechanism, DipRelease, LevelMechanism, RankMechanism
from dpdask.mechanisms.fit import ChannelKind, Cost, fit_dip

__all__ = ["BinMechanism", "ChannelKind", "Cost", "DipRelease", "LevelMechanism", "RankMechanism", "fit_dip"]
