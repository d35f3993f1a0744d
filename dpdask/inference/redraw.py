"""The counts of thresholded cells, corrected for what the threshold left out, and the same with rows and noise drawn again."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.random import Generator

from dpdask.arrays import Floats
from dpdask.inference.m_estimators import WeightedSample
from dpdask.inference.pseudo_values import estimate_prior
from dpdask.inference.tallies import Codes, add_up

_MOST = 64  # the count up to which others tell what a noisy one stands for
_TOLD = 2.5  # standard deviations of the noise that the rows up to a place have, from which on they are told from it
_ROUNDS = 100  # of expectation and maximisation


@dataclass(frozen=True, kw_only=True, eq=False)
class ThresholdedCells:
    """Cells whose noisy count reached a threshold, and the cells of some of their columns in which they lie.

    Notes
    -----
    Noise alone raises some empty cells to the threshold. What they are expected to have is taken
    from those that are not listed: (cut + α / (1 - α)) p / (1 - p) each, with p = α^cut / (1 + α).
    As the noise has no memory, with the cut 1 that corrects every sum, whatever rows the cells
    have, without bias. With a larger cut, rows of small cells are lost: as many as the known number
    of rows has more; they are taken to be where the others are.
    """

    counts: Floats  # of the cells listed
    place: Codes  # in which cell of some columns each of them lies
    others: Floats  # how many cells that are not listed lie in each cell of these columns
    scale: float  # of the noise
    cut: int | None  # None if all cells are listed
    n_rows: float | None  # None if it is not known
    n_records: int | None = None  # of rows that were drawn from the cells, if they were

    @property
    def corrected(self) -> Floats:
        """The count of each cell of the columns: of those that are listed, and what others stand for."""
        return self._add_up(self.counts, self.others)

    def _add_up(self, counts: Floats, others: Floats) -> Floats:
        return self._complete(add_up(counts, self.place, len(self.others)), others)

    def _complete(self, found: Floats, others: Floats) -> Floats:
        """Return the counts of the cells of the columns from those that reached the threshold, and how many cells did not."""
        if self.cut is None:
            return found
        alpha = math.exp(-1.0 / self.scale)
        raised = alpha**self.cut / (1.0 + alpha)
        found = found - (self.cut + alpha / (1.0 - alpha)) * raised / (1.0 - raised) * others
        positive = np.maximum(found, 0.0)
        if self.cut > 1 and self.n_rows is not None and positive.any():
            found = found + (self.n_rows - found.sum()) * positive / positive.sum()
        return found

    @cached_property
    def rows(self) -> tuple[Floats, float]:
        """How many rows each cell has, listed ones and one of the others: the mean given its noisy count, as the counts of all cells tell."""
        n_others = float(self.others.sum())
        if self.cut is None or self.n_records is not None:
            return np.maximum(self.counts, 0.0), 0.0
        small = self.counts <= _MOST
        listed = np.bincount(self.counts[small].astype(np.int64), minlength=_MOST + 1)
        seen = np.append(n_others, listed).astype(float)
        t, v = np.arange(_MOST + 1)[:, None], np.arange(_MOST + 1)[None, :]
        alpha = math.exp(-1.0 / self.scale)
        chance = (1.0 - alpha) / (1.0 + alpha) * alpha ** np.abs(t - v)
        chance[:, : self.cut] = 0.0
        below = np.maximum(1.0 - chance.sum(axis=1) - alpha ** (_MOST + 1.0 - t[:, 0]) / 2.0, 1e-12)
        chance = np.column_stack([below, chance])
        start = np.full(_MOST + 1, 1.0 / (_MOST + 1))
        prior = estimate_prior(chance, start, seen, _ROUNDS)
        mean = (np.arange(_MOST + 1) @ (prior[:, None] * chance)) / np.maximum(
            prior @ chance, 1e-300
        )
        found = np.maximum(self.counts, 0.0)
        found[small] = mean[1:][self.counts[small].astype(np.int64)]
        return found, float(mean[0])

    @property
    def expected(self) -> Floats:
        """How many rows the cells of the columns have by these means: what `draw` takes for the truth."""
        listed, other = self.rows
        return add_up(listed, self.place, len(self.others)) + self.others * other

    def draw(self, rng: Generator) -> Floats:
        """Return the counts of the cells of the columns: rows, noise, threshold and records drawn again."""
        (rows, of_other), share = self.rows, -math.expm1(-1.0 / self.scale)
        again = rng.poisson(rows)
        again += rng.geometric(share, len(rows)) - rng.geometric(share, len(rows))
        if self.cut is None:
            return self._add_up(again.astype(float), self.others)
        listed, alpha = again >= self.cut, 1.0 - share
        # the rows of one of the others are few: it has none, or reaches the threshold from one row
        reach = [alpha ** max(0, self.cut - t) / (1.0 + alpha) for t in (0, 1)]
        if self.cut <= 1:
            reach[1] = 1.0 - alpha / (1.0 + alpha)
        chance = (1.0 - min(of_other, 1.0)) * reach[0] + min(of_other, 1.0) * reach[1]
        n_new = rng.binomial(np.maximum(np.rint(self.others), 0.0).astype(np.int64), chance)
        more = np.where(n_new > 0, rng.negative_binomial(np.maximum(n_new, 1), share), 0)
        new = (self.cut * n_new + more).astype(float)
        kept = np.where(listed, again, 0).astype(float)
        found = new + add_up(kept, self.place, len(self.others))
        total = float(found.sum())
        if self.n_records is not None and total > 0.0:
            drawn = rng.multinomial(self.n_records, found / total)
            found = drawn.astype(float) * (total / self.n_records)
        left = np.bincount(self.place[~listed], minlength=len(self.others))
        return self._complete(found, np.maximum(self.others - n_new, 0.0) + left)


def keep_tails(counts: Floats, axis: int, deviation: float) -> Floats:
    """Return counts without negative ones: along an axis, ends that are not told from noise go to the next cells, and then what a cell has below 0 is taken from the next one towards the middle.

    Parameters
    ----------
    counts, axis
        float64 array, and the axis along which its cells follow each other.
    deviation
        That of the noise of one count.
    """
    found = np.moveaxis(counts.copy(), axis, 0)
    n = len(found)
    margin = found.reshape(n, -1)
    limit = _TOLD * deviation * np.sqrt(np.arange(1.0, n + 1.0) * margin.shape[1])
    for step in (1, -1):
        line = found[::step]
        told = np.cumsum(margin.sum(axis=1)[::step]) > limit
        first = int(np.argmax(told)) if told.any() else 0
        line[first] += line[:first].sum(axis=0)
        line[:first] = 0.0
        for here, then in pairwise(range(first, n // 2 + 1)):
            if then < n:
                below = np.minimum(line[here], 0.0)
                line[then] += below
                line[here] -= below
    return np.maximum(np.moveaxis(found, 0, axis), 0.0)


def make_redraw(
    sample: WeightedSample, scale: float, cut: int | None = None
) -> Callable[[Generator], WeightedSample]:
    """Return a function for `noise_error` that adds discrete Laplace noise to every weight of a sample, and applies the threshold.

    Parameters
    ----------
    sample
        All cells of the histogram, also those of weight 0, which had noise like the others.
    scale, cut
        The scale of the noise and the least count that was kept (None: all), from the card.
    """
    share = -math.expm1(-1.0 / scale)

    def redraw(rng: Generator) -> WeightedSample:
        first, second = (rng.geometric(share, len(sample.weights)) for _ in range(2))
        weights = sample.weights + (first - second)
        return replace(
            sample, weights=weights if cut is None else np.where(weights >= cut, weights, 0.0)
        )

    return redraw
