"""What a card says of the batches of frames: each is released with noise of its own, so a row in several of them pays for each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

EPSILON = "a row that stands in k batches is protected by k·ε, not by ε"
RANGES = "the ranges of a row that stands in several batches narrow each other"


def with_batches(card: dict[str, Any], names: Sequence[str | None], *, epsilon: bool, ranges: bool = False) -> dict[str, Any]:
    """Return a card that lists the batches.

    Parameters
    ----------
    card
        The card of one batch.
    names
        The batches in the order in which they were taken; None is the frame without a name.
    epsilon, ranges
        What a batch releases: values that have an ε, ranges that have none.
    """
    told = "; ".join(text for text, holds in ((EPSILON, epsilon), (RANGES, ranges)) if holds)
    text = f"Each batch is a release of its own, with noise of its own: {told}."
    guarantee = dict(card["guarantee"])
    if len(names) > 1:
        guarantee["text"] = f"{guarantee['text']} {text}"
    return {**card, "guarantee": guarantee, "batches": {"names": list(names), "text": text}}
