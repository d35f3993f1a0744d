"""Mergeable statistics: identity, of_batch or of_codes, merge; exact whole numbers, no randomness, no noise.

They are computed on workers and merged in a tree. They are private: nothing of them leaves the run
but through a mechanism.
"""

from dpdask.stats.marginals import Clique, Domain, MarginalCounter, MarginalCounts
from dpdask.stats.statistic import LevelCounts, RankSummary

__all__ = ["Clique", "Domain", "LevelCounts", "MarginalCounter", "MarginalCounts", "RankSummary"]
