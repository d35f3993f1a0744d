"""What the order of the released rows reveals, in words."""

from __future__ import annotations

from typing import Literal

RowOrder = Literal["shuffled", "keep"]

_KEPT = (
    "rows keep the order of the input, which is published: if the input is sorted by a private column, the position of a row reveals "
    "roughly what its value was, whatever the noise, and no ε covers that"
)
_SHUFFLED = (
    "rows are shuffled: the rows of one shard come from neighbouring fragments of the input (files or row groups), in random order "
    "(in parts of 128 MiB, if they are larger), and the shards are numbered at random; a shard's size can reveal that it holds the end of "
    "the input, and the release reveals which rows were in the same part of the input: if the input is sorted by a private column, such "
    "rows had similar values, their released values together reveal roughly which, whatever the noise of each, and no ε covers that"
)


def order_text(order: RowOrder) -> str:
    """Return what a release card says about the order of its rows."""
    return _KEPT if order == "keep" else _SHUFFLED


def describe_published(order: RowOrder) -> str:
    """Return what is published besides the private columns, as a sentence without its full stop."""
    if order == "keep":
        return "The kept columns, the number and the order of the rows, and the presence of each row are published as they are"
    shuffled = "rows are shuffled, but the rows of one shard were close together in the input"
    return f"The kept columns, the number of rows and the presence of each row are published as they are; {shuffled}"
