"""What released rows are good for, by the reference that their card names."""

from __future__ import annotations

import math

from dpdask.errors import list_names
from dpdask.mechanisms.card import (
    MARGIN_95,
    Card,
    Guidance,
    Margin,
    ask_columns,
    list_cliques,
    list_numeric,
    name_count,
    no_margin,
    vary,
    warn_of_means,
)
from dpdask.privacy.budget import bound_belief, write_above

_NOISY = ("histogram", "tree")  # references that are noisy counts
_IN_MARGINS = {
    "holdout": " and the size of the hold-out",
    "chain": " and the size of the hold-out",
    "histogram": " and the noise of the counts in the reference",
}
_NOT_IN_MARGINS = {
    "histogram": " They are given for columns with levels alone.",
    "tree": " They are given for columns with levels alone. The noise of the tables in the reference is not in them.",
    "known": " How far the declared distribution is from the table is not in them.",
    "public": " How far the public table is from this one is not in them.",
}


_MUCH = 0.01  # of the rows


def _reference(card: Card) -> str:
    return str(card.mechanism.details.get("reference", {}).get("kind", ""))


def _uses(card: Card) -> tuple[list[str], list[str]]:
    kind, noisy = _reference(card), _reference(card) in _NOISY
    what = "shares and quantiles" if noisy and list_numeric(card) else "shares, means and quantiles"
    good = [f"The distribution of each private column: {what} can be read off the released rows."]
    bad = [
        "Statements about a single row or person: its values are random.",
        *(warn_of_means(card) if noisy else ()),
        *(
            f"Shares and quantiles of {name} near values that many rows share: up to {100 * spread:.2g} % of the rows may be off."
            for name, spread in _find_spreads(card).items()
            if spread >= _MUCH
        ),
    ]
    if card.mechanism.details.get("columns") == "tree":
        pairs = card.mechanism.details.get("edges", [])
        good.append(
            f"The tables of the {len(pairs)} pairs of columns along the tree: {list_cliques(pairs)}."
        )
        bad.append(
            "Pairs of columns that the tree does not join, and what only three columns together show: they keep what follows along the tree."
        )
    elif kind == "chain":
        good.append(
            "The private columns together: their joint distribution is that of the reference."
        )
        bad.append(
            "Hiding the reference: if it is a part of the table, its records are republished without any ε."
        )
    elif _attenuates(card):
        bad.append(
            "How the private columns depend on each other: the noise of each row weakens it. Correlations of released columns are too small."
        )
    unit = card.guarantee.unit
    weight = None if isinstance(unit, str) else unit.weight
    kept = [name for name, part in card.columns.items() if part.role == "kept" and name != weight]
    if weight is not None:
        good.append(
            f"The table itself, not its bounded rows, by columns of levels: each row counts as often as {weight} says."
        )
    if kept:
        good.append(
            f"Joins and groups by the kept columns ({list_names(kept, 8)}), which are unchanged."
        )
        bad.append(
            "Differences between groups, read off the rows as they are: the noise of each row shrinks them. "
            "dpdask's estimators correct this for columns of levels, unless there are very many."
        )
    epsilons = {name: part.epsilon for name, part in card.columns.items() if part.epsilon}
    if epsilons:
        name = min(epsilons, key=epsilons.__getitem__)
        bad.append(
            f"Small groups: with ε = {write_above(epsilons[name], 3)} for {name}, one released value tells which of two values it was in at most "
            f"{bound_belief(0.5, epsilons[name])} of the cases, and guessing in 50 %. Estimates for groups need many rows."
        )
    return good, bad


def _attenuates(card: Card) -> bool:
    """Return whether several columns were randomised, each on its own."""
    apart = card.mechanism.details.get("columns") != "tree" and _reference(card) != "chain"
    return apart and sum(bool(part.epsilon) for part in card.columns.values()) > 1


def _margin(column: str, card: Card, n_read: int, n_rows: int) -> Margin:
    """Return the margin of rows that were randomised one by one: the rows' noise, and that of the reference where it is known."""
    accounting, kind = card.accounting.details, _reference(card)
    has_levels = "levels" in card.columns[column].details
    if card.columns[column].epsilon is None or (not has_levels and kind in _NOISY):
        return no_margin  # bars are not the cells that were counted
    counted = accounting.get("epsilon_reference", {}).get(column) if has_levels else None
    fraction = (
        card.mechanism.details["reference"].get("fraction")
        if kind in ("holdout", "chain")
        else None
    )
    n_held_out = None if fraction is None else n_rows * fraction / (1.0 - fraction)
    noise = (
        0.0
        if counted is None
        else (math.sqrt(2.0) * 2.0 * accounting.get("rows_per_unit", 1) / counted / n_rows) ** 2
    )
    spread = _find_spreads(card).get(column, 0.0)
    return lambda share: min(
        1.0, spread + MARGIN_95 * math.sqrt(vary(share, n_read) + vary(share, n_held_out) + noise)
    )


def _find_spreads(card: Card) -> dict[str, float]:
    """Return, by column of numbers, which share of the rows may lie at one value and be spread over the gap below it."""
    found = {}
    for name, part in card.columns.items():
        spread = part.details.get("reference", {}).get("spread_rank_at_most", 0.0)
        if spread > 0.0:
            found[name] = float(spread)
    return found


def _margins(card: Card) -> str:
    kind = _reference(card)
    spread = ", and how far values that many rows share are spread" if _find_spreads(card) else ""
    return f"Margins hold the randomness of the rows{_IN_MARGINS.get(kind, '')}{spread}, with probability 95 %.{_NOT_IN_MARGINS.get(kind, '')}"


GUIDANCE = Guidance(
    title="Rows with randomised private values (distribution-invariant privatisation)",
    shape=lambda _: "rows",
    uses=_uses,
    # with a reference from elsewhere numbers lean by an amount that nobody knows
    questions=lambda card: ask_columns(
        card,
        numbers=_reference(card) not in ("known", "public"),
        means=_reference(card) not in _NOISY,
    ),
    margins=_margins,
    margin=_margin,
    attenuates=_attenuates,
    counts=name_count,
    glossary={
        "Reference": "The distribution that the released values of a column keep. Where it is made of noisy counts of the private rows, they are a part of ε."
    },
)
