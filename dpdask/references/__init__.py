"""Where the reference distribution comes from, and therefore who is protected."""

from dpdask.references.chain import Chain
from dpdask.references.distribution import Distribution, LevelDistribution, RankDistribution, from_statistic
from dpdask.references.histogram import Histogram
from dpdask.references.sources import Holdout, Known, Public
from dpdask.references.tree import Tree

Reference = Holdout | Public | Known | Histogram | Chain | Tree

__all__ = [
    "Chain",
    "Distribution",
    "Histogram",
    "Holdout",
    "Known",
    "LevelDistribution",
    "Public",
    "RankDistribution",
    "Reference",
    "Tree",
    "from_statistic",
]
