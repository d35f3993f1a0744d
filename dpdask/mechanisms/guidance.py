"""What a release is good for, from its card alone: each mechanism registers the answers, and every reader of cards asks here."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import ROUND_UP, Context, Decimal
from importlib import import_module
from typing import Literal

from dpdask.errors import list_names
from dpdask.mechanisms.card import OWN_NUMBERS, Card
from dpdask.privacy.budget import percent_above
from dpdask.privacy.events import write_digits

Shape = Literal["rows", "records", "cells", "tables", "ranges", "other"]
Margin = Callable[[float], float | None]

MARGIN_95 = 1.96  # standard deviations
_BUILT_IN = ("copula", "dip", "histogram", "interval", "marginals")
_COUNTS = {
    "cells": "of a cell of the histogram",
    "n_rows": "of all rows",
    "fine_counts": "of a narrow cell, counted first to choose the cells of a column",
    "one_way": "of a cell of one column",
    "two_way": "of a cell of two columns",
    "measured_again": "of a cell of two columns that were counted a second time",
    "three_way": "of a cell of three columns",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Guidance:
    """What readers of a mechanism's releases are told. No field has a default, so that none is left out in silence."""

    title: str
    """What is released, in one line."""
    shape: Callable[[Card], Shape]
    """The table's rows randomised, synthetic records, weighted points of cells, tables of counts, ranges in place of values, or none of these."""
    uses: Callable[[Card], tuple[list[str], list[str]]]
    """What the release is good for, and what it is not good for, in sentences."""
    questions: Callable[[Card], list[str]]
    """What to ask an opened release first: calls of its methods, as Python."""
    margins: Callable[[Card], str]
    """What the margins of shares hold and what they do not, in words."""
    margin: Callable[[str, Card, int, int], Margin]
    """The 95 % margin of a share of a column's values, given the column, how many released rows were read and how many there are."""
    attenuates: Callable[[Card], bool]
    """Whether the noise of each row weakens what released columns show of each other."""
    counts: Callable[[str], str]
    """Which noisy counts a name in the card's accounting stands for."""
    glossary: Mapping[str, str]
    """Terms that only this mechanism uses, and what they mean."""


_registered: dict[str, Guidance] = {}


def register_guidance(kind: str, guidance: Guidance) -> None:
    """Add the guidance of a mechanism of this kind."""
    _registered[kind] = guidance


def find_guidance(card: Card) -> Guidance:
    """Return the guidance of the card's mechanism; of one that nobody registered, one that says so."""
    kind = card.mechanism.kind
    if kind not in _registered:
        if kind not in _BUILT_IN:
            return Guidance(
                title=kind,
                shape=lambda _: "other",
                uses=lambda _: ([], ["This page has no advice for this mechanism; read its card."]),
                questions=lambda _: [],
                margins=lambda _: "Margins hold the noise of each count, with probability 95 %.",
                margin=lambda *_: no_margin,
                attenuates=lambda _: False,
                counts=name_count,
                glossary={},
            )
        # the mechanism itself is not imported: reading a card needs none of its code
        _registered[kind] = import_module(f"dpdask.mechanisms.{kind}").GUIDANCE
    return _registered[kind]


# what several mechanisms say


def no_margin(_: float) -> None:
    """Return that a share's margin is not known."""


def name_count(name: str) -> str:
    """Return which noisy counts a name stands for."""
    return _COUNTS.get(name, f"of the table {name}")


def list_numeric(card: Card) -> list[str]:
    """Return the private columns with bounds: their values are numbers, dates or times."""
    return [
        name
        for name, part in card.columns.items()
        if part.role == "privatised" and "levels" not in part.details
    ]


def ask_columns(
    card: Card,
    *,
    numbers: bool = True,
    means: bool = False,
    levels: bool = True,
    remark: str = "  # with its standard error",
) -> list[str]:
    """Return a question about a column of numbers, rather than of dates, and one about a column of levels."""
    units = {name: part.details.get("numbers") for name, part in card.columns.items()}
    asked = [
        json.dumps(name, ensure_ascii=False)
        for name in sorted(
            list_numeric(card), key=lambda name: units[name] not in (None, OWN_NUMBERS)
        )[:1]
    ]
    of_levels = [
        name
        for name, part in card.columns.items()
        if part.role == "privatised" and "levels" in part.details
    ][:1]
    return [
        *(f"quantile({name}, 0.5){remark}" for name in asked if numbers),
        *(f"mean({name})" for name in asked if numbers and means),
        *(f"share({json.dumps(name, ensure_ascii=False)})" for name in of_levels if levels),
    ]


def vary(share: float, n_rows: float | None) -> float:
    """Return the variance of a share in a sample of rows; 0 without one."""
    return share * (1.0 - share) / n_rows if n_rows else 0.0


def counts_margin(card: Card, name: str, n_read: int | None, n_cells: float = 1.0) -> Margin:
    """Return the margin of a share that is a sum of noisy counts, and of records drawn from them."""
    noise = card.accounting.details.get("noise", {})
    n_rows = None if card.n_rows is None else card.n_rows.value
    if not n_rows or n_rows <= 0 or name not in noise:
        return no_margin
    of_counts = noise[name]["standard_deviation"] ** 2 * n_cells / n_rows**2
    return lambda share: MARGIN_95 * math.sqrt(of_counts + vary(share, n_read))


def list_cliques(cliques: list[list[str]]) -> str:
    """Return tables by their columns."""
    texts = [" × ".join(map(str, clique)) for clique in cliques[:20]]
    return "; ".join(texts) + (f"; and {len(cliques) - 20} more" if len(cliques) > 20 else "")


def warn_of_means(card: Card) -> list[str]:
    """Return a sentence on means of columns whose counts had noise; none if no column has bounds."""
    names = list_numeric(card)
    why = "the noise of the counts hides the few rows of a tail, so the mean of a heavy tail cannot be estimated"
    if not names:
        return []
    return [
        f"Means, if bounds are far beyond most values ({list_names(names, 8)}): {why}. Use quantiles, or means of clipped values."
    ]


def describe_smallest(card: Card, reason: str = ": the noise of a count is as large.") -> list[str]:
    """Return a sentence on the smallest count that can be distinguished from noise."""
    noise = card.accounting.details.get("noise", {})
    margins = [each["margin_95"] for name, each in noise.items() if name != "fine_counts"]
    if not margins:
        return []
    n_rows = None if card.n_rows is None else card.n_rows.value
    share = f" ({write_digits(100 * max(margins) / n_rows, 1)} % of the rows)" if n_rows else ""
    return [f"Groups of fewer than about {math.ceil(max(margins)):,} rows{share}{reason}"]


def bound_belief(prior: float, epsilon: float) -> str:
    """Return, as a percentage rounded up, the most that a belief can become after an ε-private release: its odds grow by exp(ε) at most."""
    return percent_above(prior / (prior + (1.0 - prior) * math.exp(-epsilon)))


def round_up(number: float, digits: int = 6) -> str:
    """Return a number in a few digits, rounded up because it is a bound."""
    shown = Context(prec=digits, rounding=ROUND_UP).plus(Decimal(repr(number))).normalize()
    return f"{shown:e}" if 0 < shown < Decimal("0.001") else f"{shown:f}"
