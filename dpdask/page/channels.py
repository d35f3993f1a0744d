"""The channels that a card holds: how likely each released value is, given the original one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dpdask.mechanisms.card import Card
from dpdask.mechanisms.card_parts import ColumnPart
from dpdask.page.histograms import MISSING, label_level

MAX_CHANNELS = 6
_MANY = 2**20  # steps, after which a channel has forgotten where it began

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelView:
    """A channel of a column.

    Attributes
    ----------
    column
        The column.
    labels
        The levels, or the cells of ranks.
    matrix
        Row-stochastic: a row for each original value.
    of_ranks
        Whether it is about ranks, not levels.
    """

    column: str
    labels: tuple[str, ...]
    matrix: Floats
    of_ranks: bool

    @property
    def summary(self) -> str:
        """The channel in a sentence."""
        what = "rank cell" if self.of_ranks else "level"
        kept = np.diag(self.matrix)
        return (
            f"{self.column}: {len(self.labels)} {what}s. A {what} stays as it is with a probability between {100 * kept.min():.1f} % and "
            f"{100 * kept.max():.1f} %; the largest entry of the table is {self.matrix.max():.2f}."
        )

    @property
    def quality(self) -> str:
        """How much of a value a released row keeps, in a sentence; the frequencies are those that the channel itself keeps."""
        shares = np.linalg.matrix_power(self.matrix, _MANY).mean(axis=0)
        if self.of_ranks:
            ranks = np.arange(len(shares)) - float(shares @ np.arange(len(shares)))
            correlation = float(shares * ranks @ self.matrix @ ranks / (shares @ ranks**2))
            return f"{self.column}: a row's released and original ranks have a correlation of {correlation:.2f}."
        kept, chance = float(shares @ np.diag(self.matrix)), float(shares @ shares)
        told = f"{self.column}: a row keeps its value in {100 * kept:.1f} % of the cases"
        return f"{told}; values drawn apart from it would agree in {100 * chance:.1f} %."


def list_channels(card: Card) -> list[ChannelView]:
    """Return the channels of a card, of at most `MAX_CHANNELS` columns."""
    found = (_read(name, part) for name, part in card.columns.items())
    return [view for view in found if view is not None][:MAX_CHANNELS]


def _read(column: str, part: ColumnPart) -> ChannelView | None:
    told = part.model_extra or {}
    several = told.get("channels", ())
    entries = told.get("channel", several[0] if len(several) == 1 else None)  # several: one for each level of another column
    if not isinstance(entries, list) or ("parent" in told and told["parent"] is not None):
        return None
    matrix = np.array(entries, dtype=np.float64)
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
        return None
    levels = [label_level(level) for level in told.get("levels", ())]
    of_ranks = "rank_edges" in told
    if not of_ranks and len(levels) == len(matrix) - 1:
        levels.append(MISSING)
    if of_ranks:
        levels = [f"{100 * rank:.0f} %" for rank in told["rank_edges"][1:]]
    if len(levels) != len(matrix):
        levels = [str(place + 1) for place in range(len(matrix))]
    return ChannelView(column=column, labels=tuple(levels), matrix=matrix, of_ranks=of_ranks)
