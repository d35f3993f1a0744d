"""What a release card says about ranges: what they reveal, in words and as coverage under a public reference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dpdask.codec import Codec
from dpdask.mechanisms.card import OWN_NUMBERS, Section, tell_numbers
from dpdask.mechanisms.card_parts import CoveredContent
from dpdask.mechanisms.interval.coverage import coverage
from dpdask.mechanisms.interval.design import (
    Canonical,
    Design,
    Ensemble,
    IntervalDifferential,
    Progressive,
    Selective,
    find_perturbed,
    find_reference,
    make_local_release,
)
from dpdask.mechanisms.interval.release import IntervalRelease, name_released
from dpdask.privacy import Budget, guarantee_text
from dpdask.privacy.events import Composed, to_dict
from dpdask.privacy.order import RowOrder, describe_published, order_text
from dpdask.schema import Schema

CONVENTION = (
    "lower < upper: the value, or the perturbed value where the column is perturbed, lies in (lower, upper], open-ended at -inf and inf; "
    "lower = upper: it is exactly that; lower > upper: a ring's outer range, it is at most upper or above lower; null: missing"
)
COVERAGE = (
    "; coverage: the probability of the range under its design's public reference, 0 of an exact value: a function of the range and of what is public"
)
TRUE = "What is released is true of every row, after values outside their column's domain were replaced. "


def describe_protected(design: Design) -> str:
    """Return what a design protects, in words."""
    if isinstance(design, IntervalDifferential):
        return "the value, by the ε of its perturbation"
    return "where inside its released range a value lies; the cuts between ranges were drawn at random, without looking at the value"


def describe_unprotected(design: Design) -> str:
    """Return what a design does not protect, in words."""
    always = "that the value lies in its released range"
    if isinstance(design, IntervalDifferential):
        always = "what the range says of the perturbed value; its ε bounds what that says of the value"
    nulls = ["which values are missing"] if design.nulls == "public" else []
    return "; ".join([always, *list_revealed(design), *nulls])


def list_revealed(design: Design) -> tuple[str, ...]:
    """Return what a design reveals apart from the released range, each thing once."""
    if isinstance(design, Canonical) and (design.acceptable or design.exact_ranges):
        return ("the exact values inside the acceptable set, and of all others that they are not in it",)
    if isinstance(design, Progressive) and design.stop == "own":
        tells = "by stopping where its own next range would be too narrow, that a value is likelier near an end of its range"
        return (f"{tells} (interval privacy does not hold)",)
    if isinstance(design, Selective):
        narrow = "of a row released as the whole line, that its range was too narrow"
        return (*list_revealed(design.of), f"{narrow}, with a probability of at most one half (under the public reference)")
    if isinstance(design, Ensemble):
        return tuple(dict.fromkeys(text for part in design.of for text in list_revealed(part)))
    if isinstance(design, IntervalDifferential):
        return tuple(f"of perturbed values, {text}" for text in list_revealed(design.of))
    return ()


def describe_all_protected(designs: Mapping[str, Design]) -> str:
    """Return what is protected, in words; of each column, where columns differ."""
    by_text: dict[str, list[str]] = {}
    for name, design in designs.items():
        by_text.setdefault(describe_protected(design), []).append(name)
    return next(iter(by_text)) if len(by_text) == 1 else "; ".join(f"of {', '.join(names)}: {text}" for text, names in by_text.items())


def describe_all_unprotected(designs: Mapping[str, Design]) -> str:
    """Return what is not protected of each column, in words."""
    by_text: dict[str, list[str]] = {}
    for name, design in designs.items():
        by_text.setdefault(describe_unprotected(design), []).append(name)
    return "; ".join(f"of {', '.join(names)}: {text}" for text, names in by_text.items())


def interval_guarantee(designs: Mapping[str, Design], budget: Budget | None = None, order: RowOrder = "keep") -> str:
    """Return the promise in words, including what is not covered.

    Parameters
    ----------
    designs
        By column.
    budget
        What is promised of the perturbed columns; None if there are none.
    order
        Whether the rows are shuffled or keep the order of the input.
    """
    perturbed = {name: design for name, design in designs.items() if name in find_perturbed(designs)}
    pure = {name: design for name, design in designs.items() if name not in perturbed}
    if budget is None:
        return _pure_guarantee(pure, order)
    columns = ", ".join(perturbed)
    epsilon = guarantee_text(budget, f"the values of {columns} in all rows", describe_all_unprotected(perturbed), order)
    told = f"For each value of {columns} a random range is released that contains what a perturbation made of it, and need not contain the value. "
    return f"{told}For {columns}: {epsilon}" + (f" For {', '.join(pure)} that ε says nothing. {_pure_guarantee(pure, order)}" if pure else "")


def _pure_guarantee(designs: Mapping[str, Design], order: RowOrder) -> str:
    return (
        f"For each private value ({', '.join(designs)}) a random range is released that contains it. There is no ε: interval privacy bounds "
        "what is told, not how much likelier an output gets. Beyond what is listed as not protected, the ranges tell nothing. "
        f"Protected: {describe_all_protected(designs)}. Not protected: {describe_all_unprotected(designs)}. "
        f"{TRUE}Releasing the same rows again tells more: the ranges intersect, their leakages add up, and "
        f"no ledger counts them. {describe_published(order)}."
    )


def interval_section(
    *,
    release: IntervalRelease,
    schema: Schema,
    codecs: Mapping[str, Codec],
    budget: Budget | None = None,
    order: RowOrder = "keep",
) -> Section:
    """Return what the card says about ranges.

    Parameters
    ----------
    release
        The designs, tabulated.
    schema, codecs
        The declared columns, and the codec of each private one as far as its type is known.
    budget
        What is promised of the perturbed columns; None if there are none.
    order
        Whether the rows are shuffled or keep the order of the input.

    Privacy
    -------
    Holds designs and what follows from them under their own public references; nothing of any row.
    """
    designs, perturbed = release.designs, list(release.perturbations)
    pure = [name for name in designs if name not in release.perturbations]
    noise = "the anchors are" if budget is None else "anchors and perturbations are"
    return Section(
        budget=budget,
        text=interval_guarantee(designs, budget, order),
        protected=CoveredContent(what=describe_all_protected(designs)),
        unprotected=CoveredContent(what=describe_all_unprotected(designs)),
        mechanism={
            "kind": "interval",
            "columns": "independent",
            "convention": CONVENTION + (COVERAGE if release.coverage else ""),
            "true_of_every_row": not release.perturbations and all(schema.columns[column].outside == "refuse" for column in designs),
        },
        columns={column: _column(column, release, schema, codecs.get(column)) for column in designs}
        | {column: {"role": "kept"} for column in schema.kept},
        accounting=_accounting(release, budget),
        order=order_text(order),
        guarantee={} if budget is None else {"epsilon_private": perturbed, "interval_private_only": pure},
        seeded=f"INSECURE: {noise} reproducible from a seed, so whoever knows it may rule out more than a range says. ",
    )


def _accounting(release: IntervalRelease, budget: Budget | None) -> dict[str, Any]:
    if budget is None:
        return {"epsilon_exact": None, "composition": "there is no ε; what several releases of the same rows tell adds up at most"}
    return {
        "composition": "ε is a sum over the perturbed columns; what several releases tell of the others adds up at most",
        "epsilon_exact": release.epsilon,
        "events": to_dict(Composed(events=(make_local_release(release.designs),))),
    }


def _column(name: str, release: IntervalRelease, schema: Schema, codec: Codec | None) -> dict[str, Any]:
    design, mechanism = release.designs[name], release.columns[name]
    found: dict[str, Any] = {
        "role": "privatised",
        "kind": schema.columns[name].kind,
        "released_as": list(name_released(name, coverage=release.coverage)),
        "design": design.model_dump(mode="python", exclude_none=True),
        "protected": describe_protected(design),
        "unprotected": describe_unprotected(design),
        "nulls": design.nulls,
        "outside": schema.columns[name].outside_in_words,
    }
    if schema.columns[name].bounds is not None:
        found["bounds"] = schema.columns[name].bounds
    if codec is not None:
        found |= {"numbers": OWN_NUMBERS} | tell_numbers(codec)
    perturbation = release.perturbations.get(name)
    if perturbation is not None:
        found |= {"epsilon": find_perturbed(release.designs)[name].epsilon, "epsilon_exact": perturbation.epsilon, "ranges_of": "perturbed values"}
    reference = find_reference(design)
    if reference is not None:
        mean = round(coverage(mechanism, reference), 4)
        found |= {"reference": reference.model_dump(mode="python"), "mean_coverage": mean}
        found |= {"leakage": round(1.0 - mean, 4)} if perturbation is None else {}
    return found
