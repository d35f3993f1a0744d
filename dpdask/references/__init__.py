"""Where the reference distribution comes from, and therefore who is protected."""

from dpdask.references.distribution import Distribution, LevelDistribution, RankDistribution, from_statistic
from dpdask.references.sources import Holdout, Known, Public, Reference

__all__ = ["Distribution", "Holdout", "Known", "LevelDistribution", "Public", "RankDistribution", "Reference", "from_statistic"]
