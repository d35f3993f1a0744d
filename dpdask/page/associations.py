"""How released columns depend on each other: Cramér's V of every two columns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dpdask.mechanisms.card import Card
from dpdask.page.histograms import find_weights, read_numbers
from dpdask.page.sample import Sample

MAX_ASSOCIATED = 16
_MAX_CODES = 10

Floats = NDArray[np.float64]
Codes = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Associations:
    """Cramér's V of every two columns.

    Attributes
    ----------
    columns
        The columns.
    table
        A symmetric matrix in [0, 1], with 1 on its diagonal.
    """

    columns: tuple[str, ...]
    table: Floats

    def list_strongest(self, n_pairs: int) -> list[tuple[str, str, float]]:
        """Return the pairs that depend most on each other, the strongest first."""
        first, second = np.triu_indices(len(self.columns), 1)
        order = np.argsort(-self.table[first, second], kind="stable")[:n_pairs]
        return [(self.columns[first[pair]], self.columns[second[pair]], float(self.table[first[pair], second[pair]])) for pair in order]


def associate(columns: Sequence[str], sample: Sample, card: Card) -> Associations | None:
    """Return the associations of released columns; None for fewer than two.

    Parameters
    ----------
    columns
        The columns; at most `MAX_ASSOCIATED` are taken.
    sample
        Released rows.
    card
        The release card.

    Notes
    -----
    Numbers are cut into at most 10 cells with equal counts; of levels, the 9 most frequent are kept and the others joined. The
    estimate is corrected for its bias, so that independent columns have 0 on average.

    References
    ----------
    Bergsma 2013, A bias-correction for Cramér's V and Tschuprow's T.
    """
    chosen = tuple(columns[:MAX_ASSOCIATED])
    if len(chosen) < 2:
        return None
    weights = find_weights(card, sample)
    coded = [_encode(sample.rows[name].combine_chunks(), weights) for name in chosen]
    table = np.eye(len(chosen))
    for i in range(len(chosen)):
        for j in range(i):
            table[i, j] = table[j, i] = _correlate(coded[i], coded[j], weights)
    return Associations(columns=chosen, table=table)


def _encode(values: pa.Array, weights: Floats) -> Codes:
    """Return a small number for each row: a cell's or a level's."""
    encoded = values.dictionary_encode(null_encoding="encode")
    indices: Codes = encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
    n_values = len(encoded.dictionary)
    if n_values <= _MAX_CODES:
        return indices
    if pa.types.is_string(values.type) or pa.types.is_large_string(values.type) or pa.types.is_boolean(values.type):
        counts = np.bincount(indices, weights, minlength=n_values)
        codes = np.full(n_values, _MAX_CODES - 1)
        codes[np.argsort(-counts, kind="stable")[: _MAX_CODES - 1]] = np.arange(_MAX_CODES - 1)
        return codes[indices]
    numbers = read_numbers(values)
    edges = np.unique(np.nanquantile(numbers, np.arange(1, _MAX_CODES) / _MAX_CODES))
    return np.where(np.isnan(numbers), len(edges) + 1, np.searchsorted(edges, numbers, side="left"))


def _correlate(one: Codes, other: Codes, weights: Floats) -> float:
    """Return Cramér's V with its bias corrected."""
    n_columns = int(other.max()) + 1
    counts = np.bincount(one * n_columns + other, weights, minlength=(int(one.max()) + 1) * n_columns).reshape(-1, n_columns)
    counts = counts[counts.sum(axis=1) > 0][:, counts.sum(axis=0) > 0]
    n_rows, (rows, columns) = counts.sum(), counts.shape
    if min(rows, columns) < 2 or n_rows <= 1:
        return 0.0
    expected = np.outer(counts.sum(axis=1), counts.sum(axis=0)) / n_rows
    phi = float(((counts - expected) ** 2 / expected).sum()) / n_rows
    corrected = max(0.0, phi - (rows - 1) * (columns - 1) / (n_rows - 1))
    least = min(rows - (rows - 1) ** 2 / (n_rows - 1), columns - (columns - 1) ** 2 / (n_rows - 1)) - 1
    return min(1.0, math.sqrt(corrected / least)) if least > 0 else 0.0
