"""What a card says about batches of frames: each batch has its own noise, so a row in several batches spends ε in each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

EPSILON = "a row in k batches is protected by k·ε, not by ε"
RANGES = "if a row is in several batches, its ranges narrow each other"


def with_batches(card: dict[str, Any], names: Sequence[str | None], *, epsilon: bool, ranges: bool = False) -> dict[str, Any]:
    """Return a card that lists the batches.

    Parameters
    ----------
    card
        The card of one batch.
    names
        The batches in the order in which they were taken; None is the frame without a name.
    epsilon, ranges
        Whether a batch releases values that have an ε, and ranges that have none.
    """
    told = "; ".join(text for text, holds in ((EPSILON, epsilon), (RANGES, ranges)) if holds)
    text = f"Each batch is a separate release with its own noise: {told}."
    guarantee = dict(card["guarantee"])
    if len(names) > 1:
        guarantee["text"] = f"{guarantee['text']} {text}"
    return {**card, "guarantee": guarantee, "batches": {"names": list(names), "text": text}}
