"""The card of ranges: what they reveal, in words and as coverage under a public reference; safe to publish."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from dpdask.codec import Codec
from dpdask.mechanisms.interval.coverage import coverage
from dpdask.mechanisms.interval.design import Design, reference_of
from dpdask.mechanisms.interval.differential import perturbed_columns, spending_of
from dpdask.mechanisms.interval.promise import protected, unprotected
from dpdask.mechanisms.interval.release import IntervalRelease, released_as, unit_of
from dpdask.privacy import Budget, cautions, guarantee_text
from dpdask.privacy.events import to_dict
from dpdask.privacy.order import RowOrder, order_text, published_text
from dpdask.schema import Schema
from dpdask.streams import STREAM_FORMAT
from dpdask.version import __version__

CARD_FORMAT = 1
CONVENTION = (
    "lower < upper: the value, or the perturbed value where the column is perturbed, lies in (lower, upper], open-ended at -inf and inf; "
    "lower = upper: it is exactly that; lower > upper: a ring's outer range, it is at most upper or above lower; null: missing"
)
COVERAGE = (
    "; coverage: the probability of the range under its design's public reference, 0 of an exact value: a function of the range and of what is public"
)
TRUE = "What is released is true of every row; for a value outside its column's domain, it is true of the value that replaces it. "
_LIBRARIES = ("numpy", "pyarrow", "randomgen", "scipy")


def protected_text(designs: Mapping[str, Design]) -> str:
    """Return what is protected, in words; of each column, where columns differ."""
    by_text: dict[str, list[str]] = {}
    for name, design in designs.items():
        by_text.setdefault(protected(design), []).append(name)
    return next(iter(by_text)) if len(by_text) == 1 else "; ".join(f"of {', '.join(names)}: {text}" for text, names in by_text.items())


def unprotected_text(designs: Mapping[str, Design]) -> str:
    """Return what is not protected of each column, in words."""
    by_text: dict[str, list[str]] = {}
    for name, design in designs.items():
        by_text.setdefault(unprotected(design), []).append(name)
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
    perturbed = {name: design for name, design in designs.items() if name in perturbed_columns(designs)}
    pure = {name: design for name, design in designs.items() if name not in perturbed}
    if budget is None:
        return _pure_guarantee(pure, order)
    columns = ", ".join(perturbed)
    epsilon = guarantee_text(budget, f"the values of {columns} in all rows", unprotected_text(perturbed), order)
    told = f"Of each value of {columns} a random range is released that contains what a perturbation made of it, and need not contain the value. "
    return f"{told}For {columns}: {epsilon}" + (f" For {', '.join(pure)} that ε says nothing. {_pure_guarantee(pure, order)}" if pure else "")


def _pure_guarantee(designs: Mapping[str, Design], order: RowOrder) -> str:
    return (
        f"Of each private value ({', '.join(designs)}) a random range is released that contains it. There is no ε: interval privacy bounds "
        "what is told, not how much likelier an output gets. Given all that is listed as not protected, the value is distributed as it "
        f"was before. Protected: {protected_text(designs)}. Not protected: {unprotected_text(designs)}. "
        f"{TRUE}Releasing the same rows again tells more: the ranges intersect, their leakages add up, and "
        f"no ledger counts them. {published_text(order)}."
    )


def interval_card(
    *,
    name: str,
    release: IntervalRelease,
    schema: Schema,
    codecs: Mapping[str, Codec],
    insecure: bool,
    budget: Budget | None = None,
    order: RowOrder = "keep",
) -> bytes:
    """Return the card as canonical JSON: the same release, the same bytes.

    Parameters
    ----------
    name
        The job's name.
    release
        The designs, tabulated.
    schema, codecs
        The declared columns, and the codec of each private one as far as its type is known.
    insecure
        Whether the anchors came from a seed.
    budget
        What is promised of the perturbed columns; None if there are none.
    order
        Whether the rows are shuffled or keep the order of the input.

    Privacy
    -------
    Holds designs and what follows from them under their own public references; nothing of any row.
    """
    noise = "the anchors are" if budget is None else "anchors and perturbations are"
    warning = f"INSECURE: {noise} reproducible from a seed, so whoever knows it may rule out more than a range says. " if insecure else ""
    card: dict[str, Any] = {
        "format": CARD_FORMAT,
        "name": name,
        "guarantee": {
            "text": warning + interval_guarantee(release.designs, budget, order),
            **_promise(release, budget),
            "protected": {"what": protected_text(release.designs)},
            "unprotected": {"what": unprotected_text(release.designs)},
        },
        "mechanism": {
            "kind": "interval",
            "columns": "independent",
            "convention": CONVENTION + (COVERAGE if release.coverage else ""),
            "true_of_every_row": not release.perturbations and all(schema.columns[column].outside == "refuse" for column in release.designs),
        },
        "columns": {column: _column(column, release, schema, codecs.get(column)) for column in release.designs}
        | {column: {"role": "kept"} for column in schema.kept},
        "accounting": _accounting(release, budget),
        "order": order_text(order),
        "insecure": insecure,
        "versions": {"dpdask": __version__, "streams": STREAM_FORMAT, **{library: version(library) for library in _LIBRARIES}},
    }
    return (json.dumps(card, indent=1, ensure_ascii=False) + "\n").encode()


def _promise(release: IntervalRelease, budget: Budget | None) -> dict[str, Any]:
    """Return the promise in numbers, and which columns it is of."""
    if budget is None:
        return {"epsilon": None, "delta": None, "unit": "value"}
    return {
        "epsilon": budget.epsilon,
        "delta": budget.delta,
        "adjacency": budget.adjacency,
        "unit": "row",
        "cautions": list(cautions(budget, None)),
        "epsilon_private": list(release.perturbations),
        "interval_private_only": [name for name in release.designs if name not in release.perturbations],
    }


def _accounting(release: IntervalRelease, budget: Budget | None) -> dict[str, Any]:
    if budget is None:
        return {"epsilon_exact": None, "composition": "none in ε: leakages of repeated releases add up at most"}
    return {
        "composition": "ε: sum over the perturbed columns; leakages of repeated releases of the others add up at most",
        "epsilon_exact": release.epsilon,
        "events": to_dict(spending_of(release.designs).events(budget)),
    }


def _column(name: str, release: IntervalRelease, schema: Schema, codec: Codec | None) -> dict[str, Any]:
    design, mechanism = release.designs[name], release.columns[name]
    found: dict[str, Any] = {
        "role": "privatised",
        "kind": schema.columns[name].kind,
        "released_as": list(released_as(name, coverage=release.coverage)),
        "design": _plain(design.model_dump(mode="python", exclude_none=True)),
        "protected": protected(design),
        "unprotected": unprotected(design),
        "nulls": design.nulls,
        "outside": schema.columns[name].outside_in_words,
    }
    if codec is not None:
        found["numbers"] = unit_of(codec)
    perturbation = release.perturbations.get(name)
    if perturbation is not None:
        found |= {"epsilon": perturbed_columns(release.designs)[name].epsilon, "epsilon_exact": perturbation.epsilon, "ranges_of": "perturbed values"}
    reference = reference_of(design)
    if reference is not None:
        mean = round(coverage(mechanism, reference), 4)
        found |= {"reference": _plain(reference.model_dump(mode="python")), "mean_coverage": mean}
        found |= {"leakage": round(1.0 - mean, 4)} if perturbation is None else {}
    return found


def _plain(value: object) -> object:
    """Return plain values that JSON has: infinite ends are texts."""
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
