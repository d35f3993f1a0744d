"""The channels that a card holds: how likely each released value is, given the original one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dpdask.mechanisms.card import Card
from dpdask.mechanisms.card_parts import ColumnPart
from dpdask.mechanisms.expectations import LITTLE, correlate_ranks
from dpdask.page.histograms import MISSING, label_level

MAX_CHANNELS = 6
_MOST_KEPT = 50  # columns
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
    is_ordered
        Whether the labels have an order.
    """

    column: str
    labels: tuple[str, ...]
    matrix: Floats
    of_ranks: bool
    is_ordered: bool

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
        """How much of a value a released row keeps, in a sentence."""
        if self.of_ranks:
            return _say_correlation(self.column, self.kept)
        kept, chance = float(self._shares @ np.diag(self.matrix)), float(self._shares @ self._shares)
        told = f"{self.column}: a row keeps its value in {100 * kept:.1f} % of the cases"
        return f"{told}; values drawn apart from it would agree in {100 * chance:.1f} %."

    @property
    def kept(self) -> float:
        """How much of a value a released row keeps: of ordered values the correlation, else the share of values kept beyond chance."""
        shares = self._shares
        if not self.is_ordered:
            chance = float(shares @ shares)
            return (float(shares @ np.diag(self.matrix)) - chance) / (1.0 - chance) if chance < 1.0 else 1.0
        places = np.arange(len(shares)) - float(shares @ np.arange(len(shares)))
        spread = float(shares @ places**2)
        return float(shares * places @ self.matrix @ places / spread) if spread > 0.0 else 1.0

    @property
    def _shares(self) -> Floats:
        """The frequencies that the channel itself keeps."""
        return np.linalg.matrix_power(self.matrix, _MANY).mean(axis=0)  # type: ignore[no-any-return]  # numpy's stub


def list_channels(card: Card, limit: int = MAX_CHANNELS) -> list[ChannelView]:
    """Return the channels that a card holds.

    Parameters
    ----------
    card
        The release card.
    limit
        The most of them that are returned.
    """
    found = (_read(name, part) for name, part in card.columns.items())
    return [view for view in found if view is not None][:limit]


def describe_kept(card: Card) -> tuple[list[str], list[str]]:
    """Return how much of a value a released row keeps, a sentence for each column, and the columns of which it keeps almost nothing."""
    sentences, little = [], []
    views = {view.column: view for view in list_channels(card, _MOST_KEPT)}
    for name, part in list(card.columns.items())[:_MOST_KEPT]:
        if name in views:
            sentences.append(views[name].quality)
            kept = views[name].kept
        elif _has_rank_noise(card, part):
            kept = correlate_ranks(part.epsilon or 0.0)
            sentences.append(_say_correlation(name, kept))
        else:
            continue
        little += [name] if kept < LITTLE else []
    return sentences, little


def _has_rank_noise(card: Card, part: ColumnPart) -> bool:
    """Return whether noise was added to a column's ranks in the whole table; those of a chain are ranks among rows alike."""
    chained = (card.mechanism.model_extra or {}).get("reference", {}).get("kind") == "chain"
    return "ranks" in (part.model_extra or {}) and part.epsilon is not None and not chained


def _say_correlation(column: str, correlation: float) -> str:
    return f"{column}: a row's released and original ranks have a correlation of {correlation:.2f}."


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
    is_ordered = of_ranks or (part.kind == "discrete" and len(told.get("levels", ())) == len(matrix))
    return ChannelView(column=column, labels=tuple(levels), matrix=matrix, of_ranks=of_ranks, is_ordered=is_ordered)
