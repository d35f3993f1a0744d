"""Where the reference distribution comes from, and therefore who is protected."""

from dpdask.privacy.coverage import Uncovered
from dpdask.references.chain import Chain
from dpdask.references.distribution import Distribution, LevelDistribution, RankDistribution, from_statistic
from dpdask.references.histogram import CellCounts, Histogram, noisy_distribution
from dpdask.references.sources import Holdout, Known, Public
from dpdask.references.tree import Tree

Reference = Holdout | Public | Known | Histogram | Chain | Tree


def held_out(reference: Reference | None) -> float | None:
    """Return which part of the rows a reference holds out, or None."""
    return reference.fraction if isinstance(reference, Holdout | Chain) else None


def uncovered_by(reference: Reference) -> tuple[Uncovered, ...]:
    """Return the samples of a table's rows that have no ε under a reference: the hold-out, if there is one."""
    fraction = held_out(reference)
    if fraction is None:
        return ()
    return (Uncovered(fraction=fraction, fate="republished" if isinstance(reference, Chain) else "held out"),)


def is_public_table(reference: Reference | None) -> bool:
    """Return whether a reference is computed from a public table."""
    return isinstance(reference, Public) or (isinstance(reference, Chain) and reference.fraction is None)


__all__ = [
    "CellCounts",
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
    "held_out",
    "is_public_table",
    "noisy_distribution",
    "uncovered_by",
]
