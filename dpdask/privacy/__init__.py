"""The privacy promise, in numbers and in words."""

from dpdask.privacy.budget import (
    COVERED,
    UNCOVERED,
    Budget,
    UnitColumn,
    attacker_power,
    bound_values,
    delta_caution,
    delta_warnings,
    guarantee_text,
    list_cautions,
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
    "bound_values",
    "delta_caution",
    "delta_warnings",
    "guarantee_text",
    "list_cautions",
    "noisy_counts_text",
    "percent_above",
    "split_epsilon",
]
