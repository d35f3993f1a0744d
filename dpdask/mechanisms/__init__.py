"""Mechanisms: from parameters and a reference to a fitted release, which then randomises batch by batch."""

from dpdask.mechanisms.dip import DipRelease, RankMechanism, fit_dip

__all__ = ["DipRelease", "RankMechanism", "fit_dip"]
