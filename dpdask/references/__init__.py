"""Where the reference distribution comes from, and therefore who is protected."""

from dpdask.references.histogram import Histogram, Tree
from dpdask.references.reference import (
    Distribution,
    LevelDistribution,
    RankDistribution,
    from_statistic,
)
from dpdask.references.sources import Chain, Holdout, Known, Public

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
