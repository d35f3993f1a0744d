"""Denoise noisy tables: consistent margins, shrunken dependence, no negative counts; all of it is post-processing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpdask.kernels import marginals as kernel
from dpdask.kernels import projections
from dpdask.mechanisms.marginals.noise import NoisyMarginals, measure_chosen, pair_cells
from dpdask.privacy.noise import deviation
from dpdask.stats import Clique, Domain, MarginalCounts
from dpdask.steps import step
from dpdask.streams import Rng

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_CHANCE = 2.0  # standard deviations, the usual 95 %
MEAN_OF_NOISE = math.sqrt(2.0 / math.pi)  # of the absolute value, in standard deviations
_DOUBT = 0.5  # standard deviations of a cell's noise: three cells in five are farther off


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PairGroup:
    """All pairs of attributes with tables of one shape (m, n) and one size of noise."""

    first: Ints  # of shape (k,): the attributes of each pair
    second: Ints
    starts: Ints  # of shape (k,): where each table begins among all two-way tables
    tables: Floats  # of shape (k, m, n): the denoised counts
    # of that shape: where the departure from independence is more than noise
    significant: NDArray[np.bool_]
    # of shape (k,): which tables depart from independence by more than noise does
    dependent: NDArray[np.bool_]
    sigma: float  # the standard deviation of the noise in a cell of the noisy tables

    def stack(self, flat: NDArray[Any]) -> Floats:
        """Return the group's tables from all two-way tables, one after another."""
        cells = np.arange(math.prod(self.tables.shape[1:]))
        stacked: Floats = flat[self.starts[:, None] + cells].reshape(self.tables.shape)
        return stacked.astype(np.float64)

    def shrink_towards_independence(self, wanted: Floats) -> Floats:
        """Return wanted counts moved towards independence by half of sigma, and not beyond: float64 of shape (k, m, n).

        The noisy tables do not contradict counts moved by so little. Next to a Fréchet bound a
        fraction of a count can move a correlation to ±1, and many such correlations are
        inconsistent with each other.
        """
        rows, columns = self.tables.sum(axis=2), self.tables.sum(axis=1)
        independent = rows[:, :, None] * columns[:, None, :] / rows.sum(axis=1)[:, None, None]
        departure = wanted - independent
        moved: Floats = independent + np.sign(departure) * np.maximum(
            np.abs(departure) - _DOUBT * self.sigma, 0.0
        )
        return moved

    def correct(
        self, wanted: Floats, found: NDArray[np.int64], n_sampled: int, gain: float
    ) -> Floats:
        """Return wanted counts moved against what a sample shows too much or too little of, within their Fréchet bounds.

        A difference that the sample's own chance explains (two standard deviations of a count) is
        left alone.
        """
        rows, columns, total = (
            self.tables.sum(axis=axis, keepdims=True) for axis in (2, 1, (1, 2))
        )
        shown, scale = self.stack(found), total / n_sampled
        missing = self.tables - shown * scale
        missing[np.abs(missing) <= _CHANCE * np.sqrt(np.maximum(shown, 1.0)) * scale] = 0.0
        lower, upper = np.maximum(rows + columns - total, 0.0), np.minimum(rows, columns)
        moved: Floats = np.minimum(np.maximum(wanted + gain * missing, lower), upper)
        return moved


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Denoised:
    """Consistent one-way counts and two-way tables."""

    domain: Domain
    n_rows: float
    # For each attribute, float64 array of its levels' counts, non-negative.
    one_way: tuple[Floats, ...]
    groups: tuple[PairGroup, ...]

    def table(self, first: int, second: int) -> Floats:
        """Return the table of two attributes, float64 with an axis for each."""
        low, high = min(first, second), max(first, second)
        for group in self.groups:
            place = np.flatnonzero((group.first == low) & (group.second == high))
            if len(place):
                table: Floats = group.tables[place[0]]
                return table if first < second else table.T
        raise KeyError((first, second))


@step("fitting: the noisy tables")
def denoise(
    noisy: NoisyMarginals,
    *,
    consistency: bool = True,
    shrinkage: bool = True,
    significance: bool = True,
) -> Denoised:
    """Return the tables that noisy ones make believable.

    Parameters
    ----------
    consistency, shrinkage, significance
        Whether to do each step; all are free of privacy cost.

    Notes
    -----
    The two tables of a pair that was measured twice are averaged, weighted by inverse variance.
    *Consistency*: an attribute's counts are the mean, weighted in the same way, of its own table
    and of the sums of its two-way tables, projected to non-negative ones that sum to the number of
    rows. *Shrinkage*: `kernels.marginals.estimate` with the known noise: in each table, the mixture of
    two estimates with the least estimated risk. *Raking* to those margins bounds every cell as
    Fréchet does. *Significance*: a cell's departure from independence is kept where it exceeds the
    standard deviation of a cell's noise: the rule that loses least among those that keep or kill
    one coefficient at a time (the departure squared against the noise's variance).

    References
    ----------
    Donoho and Johnstone, Ideal spatial adaptation by wavelet shrinkage (1994), section 2.1, for the
    rule.
    """
    observed = _group_pairs(noisy)
    with_pairs = consistency or noisy.noise.one_way is None
    one_way = _average_margins(noisy, observed if with_pairs else [])
    groups = []
    for group in observed:
        rows, columns = (
            np.stack([one_way[a] for a in side]) for side in (group.first, group.second)
        )
        known = rows, columns, noisy.n_rows
        believed, dependent, significant = group.tables, group.dependent, group.significant
        if shrinkage:
            believed = kernel.estimate(group.tables, *known, group.sigma)
            dependent = kernel.tell_dependence(group.tables, *known, group.sigma)
        believed = kernel.rake(believed, rows, columns)
        if significance:
            significant = np.abs(believed - kernel.independence(*known)) > group.sigma
        groups.append(replace(group, tables=believed, dependent=dependent, significant=significant))
    return Denoised(domain=noisy.domain, n_rows=noisy.n_rows, one_way=one_way, groups=tuple(groups))


def average_pairs(noisy: NoisyMarginals) -> tuple[Floats, Floats]:
    """Return all two-way tables and their noise; the two tables of a pair that was measured twice are averaged.

    Returns
    -------
    tables
        float64 array: the tables in the domain's order of pairs, one after another; zeros where a
        pair was not measured.
    deviations
        float64 array of shape (n_pairs,): the standard deviation of the noise in a cell; infinite
        where a pair was not measured.
    """
    domain, cells, event = noisy.domain, pair_cells(noisy.domain), noisy.noise.pairs
    starts, n = np.concatenate([[0], np.cumsum(cells)]), domain.n_attributes
    tables = np.zeros(starts[-1]) if event is None else noisy.pairs.astype(np.float64)
    precisions = np.full(len(cells), 0.0 if event is None else deviation(event) ** -2.0)
    for clique, table in noisy.cliques.items():
        if len(clique) == 2:
            a, b = sorted(domain.positions(clique))
            place = a * n - a * (a + 1) // 2 + b - a - 1
            again = table if domain.position(clique[0]) == a else table.T
            part, one = slice(starts[place], starts[place + 1]), precisions[place]
            precision = deviation(noisy.noise_of(clique)) ** -2.0
            tables[part] = (one * tables[part] + precision * again.ravel()) / (one + precision)
            precisions[place] += precision
    with np.errstate(divide="ignore"):
        deviations: Floats = precisions**-0.5
    return tables, deviations


def _group_pairs(noisy: NoisyMarginals) -> list[PairGroup]:
    """Return the measured pairs as they are, by shape and noise."""
    pairs, deviations = average_pairs(noisy)
    places = np.flatnonzero(np.isfinite(deviations))
    if not len(places):
        return []
    sizes, cells = np.array(noisy.domain.sizes, dtype=np.int64), pair_cells(noisy.domain)
    first, second = (side.astype(np.int64)[places] for side in np.triu_indices(len(sizes), k=1))
    starts = (np.cumsum(cells) - cells)[places]
    sigmas, of = np.unique(deviations[places], return_inverse=True)
    kinds, members = np.unique(
        np.stack([sizes[first], sizes[second], of], axis=1), axis=0, return_inverse=True
    )
    order = np.argsort(members, kind="stable")
    parts = np.split(order, np.flatnonzero(np.diff(members[order])) + 1)
    groups = []
    for (m, n, sigma), part in zip(kinds, parts, strict=True):
        shape = (len(part), int(m), int(n))
        group = PairGroup(
            first=first[part],
            second=second[part],
            starts=starts[part],
            tables=np.empty(shape),
            significant=np.ones(shape, dtype=bool),
            dependent=np.ones(len(part), dtype=bool),
            sigma=float(sigmas[sigma]),
        )
        groups.append(replace(group, tables=group.stack(pairs)))
    return groups


def _average_margins(noisy: NoisyMarginals, groups: Sequence[PairGroup]) -> tuple[Floats, ...]:
    """Return each attribute's counts: its own table and the sums of these, by inverse variance."""
    sizes = np.array(noisy.domain.sizes, dtype=np.int64)
    starts = np.cumsum(sizes) - sizes
    total, weight = np.zeros(sizes.sum()), np.zeros(sizes.sum())
    if noisy.noise.one_way is not None:
        weight += deviation(noisy.noise.one_way) ** -2.0
        total += weight * noisy.one_way
    for group in groups:
        _, m, n = group.tables.shape
        for side, axis, length, other in ((group.first, 2, m, n), (group.second, 1, n, m)):
            cells, precision = starts[side][:, None] + np.arange(length), group.sigma**-2.0 / other
            np.add.at(total, cells, group.tables.sum(axis=axis) * precision)
            np.add.at(weight, cells, precision)
    means = np.split(total / weight, starts[1:])
    return tuple(projections.project(mean, noisy.n_rows) for mean in means)


def choose_pairs(noisy: NoisyMarginals, n: int, target: str | None = None) -> tuple[Clique, ...]:
    """Return the pairs with the largest expected gain from a second measurement, as cliques.

    Notes
    -----
    The error of a denoised table is about as large as the noise, or as its whole departure from
    independence if that is smaller. The expected gain is the smaller of two sums over cells: of
    |departure|, and of the mean absolute value of the noise.
    """
    cleaned, names = denoise(noisy), noisy.domain.names
    gains = []
    for group in cleaned.groups:
        rows, columns = group.tables.sum(axis=2), group.tables.sum(axis=1)
        independent = kernel.independence(rows, columns, cleaned.n_rows)
        departures = np.abs(group.tables - independent).sum(axis=(1, 2))
        most = MEAN_OF_NOISE * group.sigma * group.tables[0].size
        gains.append(np.minimum(departures, most))
    first = np.concatenate([group.first for group in cleaned.groups])
    second = np.concatenate([group.second for group in cleaned.groups])
    place = -1 if target is None else names.index(target)
    is_other = (first != place) & (second != place)
    best = np.lexsort((second, first, -np.concatenate(gains), is_other))[:n]
    return tuple((names[a], names[b]) for a, b in zip(first[best], second[best], strict=True))


def measure_pairs_again(
    noisy: NoisyMarginals,
    counts: MarginalCounts,
    target: str | None = None,
    *,
    rng: Rng | None = None,
) -> NoisyMarginals:
    """Return noisy tables with a second measurement of as many pairs as are paid for; unchanged if none are.

    Privacy
    -------
    Unit, sensitivity, event: `chosen` of `MarginalNoise`. The choice is a function of the first
    noisy tables.
    """
    if noisy.noise.chosen is None:
        return noisy
    return measure_chosen(
        noisy, counts, choose_pairs(noisy, noisy.noise.chosen.count, target), rng=rng
    )


def dependence_tree(cleaned: Denoised) -> list[tuple[int, int]]:
    """Return the attributes, each after its parent, along the maximum spanning forest of their mutual information.

    Notes
    -----
    Prim's algorithm, from the attribute with the most mutual information in all. Chow and Liu
    (1968): of all trees, this one's distribution is nearest to the tables'.
    """
    n = cleaned.domain.n_attributes
    shared = np.zeros((n, n))
    for group in cleaned.groups:
        # the rest may be noise
        mutual = np.where(group.dependent, kernel.mutual_information(group.tables), 0.0)
        shared[group.first, group.second] = shared[group.second, group.first] = mutual
    shared[shared < 1e-12] = 0.0  # independence, up to rounding
    best, parent, outside = shared.sum(axis=1), np.full(n, -1), np.ones(n, dtype=bool)
    tree: list[tuple[int, int]] = []
    near = np.zeros(n)
    while outside.any():
        scores = np.where(outside, near, -1.0)
        if scores.max() <= 0.0:  # what is left depends on nothing before
            scores = np.where(outside, best, -1.0)
        attribute = int(np.argmax(scores))
        tree.append((attribute, int(parent[attribute])))
        outside[attribute] = False
        closer = outside & (shared[attribute] > near)
        near[closer], parent[closer] = shared[attribute][closer], attribute
    return tree
