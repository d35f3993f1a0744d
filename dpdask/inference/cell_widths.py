"""The widths of the cells behind a perturbed histogram's centres, from its card."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dpdask.errors import SpecError
from dpdask.mechanisms.card import Card

Floats = NDArray[np.float64]


def cell_widths(card: Mapping[str, Any], features: pd.DataFrame, weights: Floats) -> Floats:
    """Return the width of the cell of each feature, float64 array of the frame's shape; 0 where its centre needs no correction.

    Parameters
    ----------
    card
        The card of a perturbed histogram.
    features
        The centres of its cells, by column.
    weights
        The cells' weights.

    Raises
    ------
    InputError
        If this is no release card.
    SpecError
        If it is not that of a perturbed histogram, or a number lies outside its column's cells.

    Notes
    -----
    Columns whose cells were found are not corrected: their points have the cells' means, so their variance is not too large. Nor is a column
    where Σ w h²/12 is below twice the noise's standard deviation of Σ w (x - mean)², as with the threshold `none` at many cells.
    """
    content = Card.read(card, "card").to_dict()
    mechanism, columns = content["mechanism"], content["columns"]
    if mechanism["kind"] != "histogram":
        raise SpecError("belongs to another mechanism", "card", "give the card of the perturbed histogram")
    widths = np.zeros(features.shape)
    if mechanism["points"] == "spread":
        return widths
    deviation = float(content["accounting"]["noise"]["cells"]["standard_deviation"])
    for place, name in enumerate(map(str, features.columns)):
        column = columns.get(name, {})
        if name in mechanism["found"] or not column.get("edges") or column["bounds"] is None:
            continue  # means of cells that were found, levels, indicators, the whole line
        x, edges = features.iloc[:, place].to_numpy(dtype=np.float64), np.array(column["edges"])
        if (x < edges[0]).any() or (x > edges[-1]).any():
            raise SpecError("holds a number outside the cells of its card", f"column {name!r}", "use the frame that the card was written for")
        cell = np.clip(np.searchsorted(edges, x, side="left") - 1, 0, len(edges) - 2)
        step = column["bounds"][0] - edges[0]  # of whole numbers: k of them have the variance (k² - 1) step² / 12
        width = np.sqrt(np.maximum(np.diff(edges) ** 2 - step**2, 0.0))
        own = np.where(np.isin(x, np.array(column["atoms"], dtype=np.float64)), 0.0, width[cell])
        mean = weights @ x / weights.sum()
        hidden = 2.0 * deviation * float(np.sqrt(((x - mean) ** 4).sum()))
        widths[:, place] = own if weights @ own**2 / 12.0 > hidden else 0.0
    return widths
