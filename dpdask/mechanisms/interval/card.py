"""What a release card and a plan say about ranges: what they reveal, in words and as coverage under a public reference, and how wide they are."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from dpdask.codec import Codec
from dpdask.mechanisms.card import OWN_NUMBERS, Section, microseconds_of, tell_numbers
from dpdask.mechanisms.card_parts import CoveredContent
from dpdask.mechanisms.interval.coverage import PublicReference, coverage, quasi_run
from dpdask.mechanisms.interval.design import (
    Canonical,
    CoverageAnchors,
    Design,
    Ensemble,
    IntervalDifferential,
    Progressive,
    ScipyDistribution,
    Selective,
    find_perturbed,
    find_reference,
    make_local_release,
)
from dpdask.mechanisms.interval.ranges import RangeRandomiser
from dpdask.mechanisms.interval.release import IntervalRelease, find_ends, is_lattice, name_released, tabulate, write_design
from dpdask.privacy import Budget, guarantee_text
from dpdask.privacy.events import Composed, to_dict
from dpdask.privacy.order import RowOrder, describe_published, order_text
from dpdask.privacy.rounding import write_digits
from dpdask.schema import Schema

_LITTLE = 0.01  # of the values, that a range rules out on average
_SHOWN = 5  # columns whose width is said
_DAY = 86_400_000_000  # microseconds
CONVENTION = (
    "lower < upper: the value, or the perturbed value where the column is perturbed, lies in (lower, upper], open-ended at -inf and inf; "
    "lower = upper: it is exactly that; lower > upper: a ring's outer range, it is at most upper or above lower; null: missing"
)
COVERAGE = (
    "; coverage: the probability of the range under its design's public reference, 0 of an exact value: a function of the range and of what is public"
)
TRUE = "What is released is true of every row. "


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
            "true_of_every_row": not release.perturbations,
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
        asked = _Asked(write_design(design), release.lattice[name], name, design, reference)
        mean = round(_hold(asked) if perturbation is None else coverage(mechanism, reference), 4)
        found |= {"reference": reference.model_dump(mode="python"), "mean_coverage": mean}
        found |= {"leakage": round(1.0 - mean, 4)} if perturbation is None else {}
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Width:
    """How wide a column's ranges are on average.

    Attributes
    ----------
    held
        The share of the values that a range holds, if they are distributed as the design's reference says; None without one.
    of_bounds
        The width of the ranges of values that are spread evenly over the declared domain, as a share of it; None without a domain.
    span
        This width, in words; None without a domain.
    """

    held: float | None
    of_bounds: float | None
    span: str | None


def expect_held(name: str, design: Design, codec: Codec) -> float | None:
    """Return the share of the values that a range holds on average, if they are distributed as the design's reference says; None without one.

    Parameters
    ----------
    name
        The column.
    design
        As the user wrote it.
    codec
        Its codec.
    """
    reference = find_reference(design)
    return None if reference is None else _hold(_Asked(write_design(design), is_lattice(codec), name, design, reference))


@dataclass(frozen=True, slots=True)
class _Asked:
    """What the mean coverage of a column is a function of, and beside it what is not compared."""

    key: str
    lattice: bool
    name: str = field(compare=False)
    design: Design = field(compare=False)
    reference: ScipyDistribution = field(compare=False)


@lru_cache(maxsize=2048)  # of many columns with few designs, and of a plan and its run
def _hold(asked: _Asked) -> float:
    return coverage(_tabulate(asked.name, asked.design, asked.lattice), asked.reference)


def expect_width(name: str, design: Design, codec: Codec) -> Width:
    """Return how wide the ranges of a column will be on average; of a perturbed one, those of the perturbed values.

    Parameters
    ----------
    name, design, codec
        As for `expect_held`.
    """
    held, ends = expect_held(name, design, codec), find_ends(codec)
    if ends is None or not ends[0] < ends[1]:
        return Width(held=held, of_bounds=None, span=None)
    (low, high), where = ends, f"column {name!r}"
    uniform = ScipyDistribution(name="uniform", loc=low, scale=high - low).freeze(where)
    even = PublicReference(distribution=uniform, lattice=is_lattice(codec), where=where)
    lower, upper, _ = quasi_run(_tabulate(name, design, is_lattice(codec)).step, even)
    widths = np.clip(upper, low, high) - np.clip(lower, low, high) + np.where(lower > upper, high - low, 0.0)
    width = float(widths.mean())
    return Width(held=held, of_bounds=width / (high - low), span=_describe_span(width, tell_numbers(codec).get("numbers")))


def _tabulate(name: str, design: Design, lattice: bool) -> RangeRandomiser:
    """Return what makes a column's ranges, without what perturbs its values."""
    cut: Design = design
    if isinstance(design, IntervalDifferential):
        cut = design.of.model_copy(update={"reference": design.of.reference or design.reference})
    return tabulate(name, cut, lattice=lattice)


def describe_widths(designs: Mapping[str, Design], codecs: Mapping[str, Codec]) -> tuple[str, ...]:
    """Return how wide the ranges will be, a sentence for each of the first columns, and one about those without a reference.

    Parameters
    ----------
    designs, codecs
        By column.
    """
    sentences, unknown = [], []
    for name, width in _list_widths(designs, codecs):
        parts = (
            [] if width.held is None else [f"holds {_percent(width.held)} of the values on average, if they are distributed as the reference says"]
        )
        if width.of_bounds is not None:
            parts.append(f"is {width.span} wide on average, {_percent(width.of_bounds)} of the domain, if values are spread evenly over the domain")
        if parts:
            sentences.append(f"{name}: a range {'; it '.join(parts)}")
        if width.held is None:
            unknown.append(name)
    if unknown:
        told = f"{', '.join(unknown)}: without a `reference` nothing says how much of the values a range holds"
        sentences.append(f"{told}; if most of them lie much closer together than ranges are wide, it holds nearly all, and the release tells little")
    return (*sentences, *([f"{len(designs) - _SHOWN:,} more columns of ranges"] if len(designs) > _SHOWN else []))


def warn_of_wide_ranges(designs: Mapping[str, Design], codecs: Mapping[str, Codec]) -> tuple[str, ...]:
    """Return a warning of columns whose ranges tell next to nothing under their reference, unless the user chose how much they hold.

    Parameters
    ----------
    designs, codecs
        By column.
    """
    open_ = [name for name, design in designs.items() if not isinstance(getattr(design, "anchors", None), CoverageAnchors)]
    wide = [name for name in open_ if (held := expect_held(name, designs[name], codecs[name])) is not None and 1.0 - held < _LITTLE]
    if not wide:
        return ()
    told = (
        f"{', '.join(wide)}: a range rules out less than {_percent(_LITTLE)} of the values on average, if they are distributed as the reference says"
    )
    return (f"{told}, so the release tells next to nothing; use anchors where the values are",)


def _list_widths(designs: Mapping[str, Design], codecs: Mapping[str, Codec]) -> Iterator[tuple[str, Width]]:
    for name in list(designs)[:_SHOWN]:
        yield name, expect_width(name, designs[name], codecs[name])


def _describe_span(width: float, numbers: str | None) -> str:
    micro = microseconds_of(numbers)
    return write_digits(width) if micro is None else f"{write_digits(width * micro / _DAY)} days"


def _percent(share: float) -> str:
    """Return a share in per cent, with two digits of what it lacks of all."""
    digits = 0 if share < 0.99 else 1 - math.floor(math.log10(max(100.0 * (1.0 - share), 1e-4)))
    return f"{100.0 * share:.{digits}f} %"
