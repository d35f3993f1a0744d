"""The card of ranges: what they reveal, in words and as coverage under a public reference; safe to publish."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from dpdask.codec import Codec
from dpdask.mechanisms.interval_coverage import coverage
from dpdask.mechanisms.interval_design import Design, Law
from dpdask.mechanisms.interval_fit import outline
from dpdask.mechanisms.interval_release import IntervalRelease, ends_of, unit_of
from dpdask.schema import Schema
from dpdask.streams import STREAM_FORMAT
from dpdask.version import __version__

CARD_FORMAT = 1
CONVENTION = (
    "lower < upper: the value lies in (lower, upper], open-ended at -inf and inf; lower = upper: the exact value; "
    "lower > upper: a ring's outer range, the value is at most upper or above lower; null: missing"
)
_LIBRARIES = ("numpy", "pyarrow", "randomgen", "scipy")


def protected_text(designs: Mapping[str, Design]) -> str:
    """Return what is protected, in words."""
    return outline(*next(iter(designs.items()))).protected


def unprotected_text(designs: Mapping[str, Design]) -> str:
    """Return what is not protected of each column, in words."""
    by_text: dict[str, list[str]] = {}
    for name, design in designs.items():
        by_text.setdefault(outline(name, design).unprotected, []).append(name)
    return "; ".join(f"of {', '.join(names)}: {text}" for text, names in by_text.items())


def interval_guarantee(designs: Mapping[str, Design]) -> str:
    """Return the promise in words, with what is not covered in the same breath."""
    return (
        f"Of each private value ({', '.join(designs)}) a random range is released that contains it. There is no ε: interval privacy bounds "
        "what is told, not how much likelier an output gets. Given all that is listed as not protected, the value is distributed as it "
        f"was before. Protected: {protected_text(designs)}. Not protected: {unprotected_text(designs)}. "
        "What is released is true of every row. Releasing the same rows again tells more: the ranges intersect, their leakages add up, and "
        "no ledger counts them. Kept columns, the number of rows, their order and which rows are there are published as they are."
    )


def interval_card(*, name: str, release: IntervalRelease, schema: Schema, codecs: Mapping[str, Codec], insecure: bool) -> bytes:
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

    Privacy
    -------
    Holds designs and what follows from them under their own public references; nothing of any row.
    """
    warning = "INSECURE: the anchors are reproducible from a seed, so whoever knows it may rule out more than a range says. " if insecure else ""
    card: dict[str, Any] = {
        "format": CARD_FORMAT,
        "name": name,
        "guarantee": {
            "text": warning + interval_guarantee(release.designs),
            "epsilon": None,
            "delta": None,
            "unit": "value",
            "protected": {"what": protected_text(release.designs)},
            "unprotected": {"what": unprotected_text(release.designs)},
        },
        "mechanism": {"kind": "interval", "columns": "independent", "convention": CONVENTION, "true_of_every_row": True},
        "columns": {column: _column(column, release, schema, codecs.get(column)) for column in release.designs}
        | {column: {"role": "kept"} for column in schema.kept},
        "accounting": {"epsilon_exact": None, "composition": "none in ε: leakages of repeated releases add up at most"},
        "order": "rows keep the order of the input, which is public",
        "insecure": insecure,
        "versions": {"dpdask": __version__, "streams": STREAM_FORMAT, **{library: version(library) for library in _LIBRARIES}},
    }
    return (json.dumps(card, indent=1, ensure_ascii=False) + "\n").encode()


def _column(name: str, release: IntervalRelease, schema: Schema, codec: Codec | None) -> dict[str, Any]:
    design, mechanism = release.designs[name], release.columns[name]
    found: dict[str, Any] = {
        "role": "privatised",
        "kind": schema.columns[name].kind,
        "released_as": list(ends_of(name)),
        "design": _plain(design.model_dump(mode="python", exclude_none=True)),
        "protected": mechanism.protected,
        "unprotected": mechanism.unprotected,
        "nulls": design.nulls,
    }
    if codec is not None:
        found["numbers"] = unit_of(codec)
    reference = _reference(design)
    if reference is not None:
        mean = round(coverage(mechanism, reference), 4)
        found |= {"reference": _plain(reference.model_dump(mode="python")), "mean_coverage": mean, "leakage": round(1.0 - mean, 4)}
    return found


def _reference(design: Design) -> Law | None:
    """Return the public reference of a design, its own or that of the design inside."""
    inner = getattr(design, "of", None)
    return design.reference or (_reference(inner) if inner is not None and not isinstance(inner, tuple) else None)


def _plain(value: object) -> object:
    """Return plain values that JSON has: infinite ends are texts."""
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
