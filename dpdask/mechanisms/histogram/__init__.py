"""What a perturbed histogram is good for: its weighted points, or rows drawn from it."""

from __future__ import annotations

from dpdask.mechanisms.card import (
    Card,
    Guidance,
    Margin,
    ask_columns,
    counts_margin,
    describe_smallest,
    name_count,
    warn_of_means,
)

_IN_A_CELL = ", even in a single cell: the noise of its count is as large. In a group of m cells the noise is about √m times that."


def _uses(card: Card) -> tuple[list[str], list[str]]:
    stated = card.mechanism.details
    cut = stated.get("cut")
    rare = (
        "hold mostly noise"
        if cut is None
        else f"hold mostly noise, and weights up to {cut:,} were set to 0"
    )
    listed = (
        f" {stated['cells_listed']:,} of {stated['cells']:,} cells have a weight."
        if "cells_listed" in stated
        else ""
    )
    return [
        "Statistics that take weights (tables, quantiles, regressions), up to the width of the cells."
    ], [
        "Values inside a cell, which are not told apart.",
        f"Rare combinations: cells with few rows {rare}.{listed}",
        *warn_of_means(card),
        *describe_smallest(card, _IN_A_CELL),
    ]


def _margin(column: str, card: Card, _n_read: int, _n_rows: int) -> Margin:
    stated = card.mechanism.details
    # of the joint histogram, in one bar
    n_cells = stated.get("cells", 1) / max(1, card.columns[column].details.get("cells", 1))
    return counts_margin(card, "cells", stated.get("records"), n_cells)


GUIDANCE = Guidance(
    title="A joint histogram with noisy weights",
    shape=lambda card: "cells" if card.mechanism.details.get("output") == "cells" else "records",
    uses=_uses,
    questions=ask_columns,
    margins=lambda _: (
        "Margins hold the noise of the counts of all cells in a bar, with probability 95 %; small cells that were set to 0 may add to them."
    ),
    margin=_margin,
    attenuates=lambda _: False,
    counts=name_count,
    glossary={},
)
