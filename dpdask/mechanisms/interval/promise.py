"""What an interval design protects, and what it does not, in words: functions of the design alone."""

from __future__ import annotations

from dpdask.mechanisms.interval.design import Canonical, Design, Ensemble, IntervalDifferential, Progressive, Selective


def protected(design: Design) -> str:
    """Return what a design protects, in words."""
    if isinstance(design, IntervalDifferential):
        return "the value, by the ε of its perturbation"
    return "where inside its released range a value lies; every released range was drawn at random, apart from the values"


def unprotected(design: Design) -> str:
    """Return what a design does not protect, in words."""
    always = "that the value lies in its released range"
    if isinstance(design, IntervalDifferential):
        always = "what the range says of the perturbed value; its ε bounds what that says of the value"
    nulls = ["which values are missing"] if design.nulls == "public" else []
    return "; ".join([always, *revealed(design), *nulls])


def revealed(design: Design) -> tuple[str, ...]:
    """Return what a design reveals apart from the released range, each thing once."""
    if isinstance(design, Canonical) and (design.acceptable or design.exact_ranges):
        return ("the exact values inside the acceptable set, and of all others that they are not in it",)
    if isinstance(design, Progressive) and design.stop == "own":
        tells = "by stopping where its own next range would be too narrow, that a value is likelier near an end of its range"
        return (f"{tells} (interval privacy does not hold)",)
    if isinstance(design, Selective):
        narrow = "of a row released as the whole line, that its range was too narrow"
        return (*revealed(design.of), f"{narrow}, with a probability of at most one half (under the public reference)")
    if isinstance(design, Ensemble):
        return tuple(dict.fromkeys(text for part in design.of for text in revealed(part)))
    if isinstance(design, IntervalDifferential):
        return tuple(f"of perturbed values, {text}" for text in revealed(design.of))
    return ()
