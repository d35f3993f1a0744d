"""What is promised, in numbers and in words."""

from dpdask.privacy.budget import (
    COVERED,
    UNCOVERED,
    Budget,
    UnitColumn,
    attacker_power,
    cautions,
    central_guarantee_text,
    guarantee_text,
    noisy_counts_text,
    percent_above,
    split_epsilon,
)

__all__ = [
    "COVERED",
    "UNCOVERED",
    "Budget",
    "UnitColumn",
    "attacker_power",
    "cautions",
    "central_guarantee_text",
    "guarantee_text",
    "noisy_counts_text",
    "percent_above",
    "split_epsilon",
]
