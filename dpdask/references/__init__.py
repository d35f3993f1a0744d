"""Where the reference distribution comes from, and therefore who is protected."""

from dpdask.references.distribution import Distribution, LevelDistribution, RankDistribution, from_statistic
from dpdask.references.histogram import CellCounts, Histogram, noisy_distribution
from dpdask.references.sources import Holdout, Known, Public

Reference = Holdout | Public | Known | Histogram

__all__ = [
    "CellCounts",
    "Distribution",
    "Histogram",
    "Holdout",
    "Known",
    "LevelDistribution",
    "Public",
    "RankDistribution",
    "Reference",
    "from_statistic",
    "noisy_distribution",
]
