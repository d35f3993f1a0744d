"""What the place of a released row tells, in words."""

from __future__ import annotations

from typing import Literal

RowOrder = Literal["shuffled", "keep"]

_KEPT = (
    "rows keep the order of the input, which is published: where the input lies sorted by a private column, a row's place tells about "
    "what its value was, whatever the noise, and no ε covers that"
)
_SHUFFLED = (
    "rows are shuffled: those that stand in one shard come from neighbouring fragments of the input (files or row groups), in random order "
    "(in parts of 256 MiB, where they are larger), and the shards' numbers are random; who stood in the same part of the input is still "
    "told: where the input lies sorted by a private column such rows had similar values, their released values together tell about "
    "which, whatever the noise of each, and no ε covers that"
)


def order_text(order: RowOrder) -> str:
    """Return what a release card says of the order of its rows."""
    return _KEPT if order == "keep" else _SHUFFLED


def published_text(order: RowOrder) -> str:
    """Return what is published of the rows beside the private columns, in a sentence without its full stop."""
    if order == "keep":
        return "Kept columns, the number of rows, their order and which rows are there are published as they are"
    shuffled = "rows are shuffled, but those of one shard were neighbours in the input"
    return f"Kept columns, the number of rows and which rows are there are published as they are; {shuffled}"
