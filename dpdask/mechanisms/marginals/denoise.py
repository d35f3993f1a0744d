"""Denoise noisy tables: consistent margins, shrunken dependence, no negative counts; all of it is post-processing."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dpdask.kernels import marginals as tables_kernel
from dpdask.kernels import projections as simplex
from dpdask.mechanisms.marginals.noise import NoisyMarginals, measure_chosen, pair_cells
from dpdask.privacy.noise import deviation
from dpdask.stats import Clique, Domain, MarginalCounts
from dpdask.steps import step
from dpdask.streams import Rng

Floats = NDArray[np.float64]

_CHANCE = 2.0  # standard deviations, the usual 95 %
MEAN_OF_NOISE = math.sqrt(2.0 / math.pi)  # of the absolute value, in standard deviations
_DOUBT = 0.5  # standard deviations of a cell's noise: three cells in five are farther off


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PairGroup:
    """All pairs of attributes with tables of one shape (m, n) and one size of noise."""

    first: NDArray[np.int64]  # int64 arrays of shape (k,): the attributes of each pair
    second: NDArray[np.int64]
    # Int64 array of shape (k,): where each table begins among all two-way tables.
    starts: NDArray[np.int64]
    tables: Floats  # float64 array of shape (k, m, n): the denoised counts
    # Bool array of that shape: where the departure from independence is more than noise.
    significant: NDArray[np.bool_]
    # Bool array of shape (k,): which tables depart from independence by more than noise does.
    dependent: NDArray[np.bool_]
    sigma: float  # the standard deviation of the noise in a cell of the noisy tables

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
        rows, columns = (
            self.tables.sum(axis=2, keepdims=True),
            self.tables.sum(axis=1, keepdims=True),
        )
        total = self.tables.sum(axis=(1, 2), keepdims=True)
        shown = stack_tables(found, self.starts, self.tables.shape[1:])
        missing = self.tables - shown * (total / n_sampled)
        missing[
            np.abs(missing) <= _CHANCE * np.sqrt(np.maximum(shown, 1.0)) * (total / n_sampled)
        ] = 0.0
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


def stack_tables(
    flat: NDArray[np.float64] | NDArray[np.int64], starts: NDArray[np.int64], shape: tuple[int, ...]
) -> Floats:
    """Return the tables of one shape that begin at `starts` in a flat array, as a float64 stack."""
    m, n = shape
    result: Floats = (
        flat[starts[:, None] + np.arange(m * n)].reshape(len(starts), m, n).astype(np.float64)
    )
    return result


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
    rows. *Shrinkage*: `kernels.tables.estimate` with the known noise: in each table, the mixture of
    two estimates with the least estimated risk. *Raking* to those margins bounds every cell as
    Fréchet does. *Significance*: a cell's departure from independence is kept where it exceeds the
    standard deviation of a cell's noise: the rule that loses least among those that keep or kill
    one coefficient at a time (the departure squared against the noise's variance).

    References
    ----------
    Donoho and Johnstone, Ideal spatial adaptation by wavelet shrinkage (1994), section 2.1, for the
    rule.
    """
    pairs, deviations = average_pairs(noisy)
    layout = _groups(noisy.domain, deviations)
    one_way = _margins(noisy, pairs, layout, consistency=consistency)
    groups = []
    for first, second, starts, shape, sigma in layout:
        rows, columns = (np.stack([one_way[a] for a in side]) for side in (first, second))
        observed = stack_tables(pairs, starts, shape)
        believed = (
            tables_kernel.estimate(observed, rows, columns, noisy.n_rows, sigma)
            if shrinkage
            else observed
        )
        believed = tables_kernel.rake(believed, rows, columns)
        departure = np.abs(believed - tables_kernel.independence(rows, columns, noisy.n_rows))
        kept = departure > sigma if significance else np.ones(departure.shape, dtype=bool)
        told = (
            tables_kernel.tell_dependence(observed, rows, columns, noisy.n_rows, sigma)
            if shrinkage
            else np.ones(len(first), dtype=bool)
        )
        groups.append(
            PairGroup(
                first=first,
                second=second,
                starts=starts,
                tables=believed,
                significant=kept,
                dependent=told,
                sigma=sigma,
            )
        )
    return Denoised(domain=noisy.domain, n_rows=noisy.n_rows, one_way=one_way, groups=tuple(groups))


_Layout = list[
    tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], tuple[int, int], float]
]


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
    domain, cells = noisy.domain, pair_cells(noisy.domain)
    starts, n = np.concatenate([[0], np.cumsum(cells)]), domain.n_attributes
    measured = noisy.noise.pairs is not None
    tables = noisy.pairs.astype(np.float64) if measured else np.zeros(starts[-1])
    precisions = np.full(
        len(cells), deviation(noisy.noise.pairs) ** -2.0 if noisy.noise.pairs is not None else 0.0
    )
    for clique, table in noisy.cliques.items():
        if len(clique) == 2:
            a, b = sorted(domain.positions(clique))
            place = a * n - a * (a + 1) // 2 + b - a - 1
            again = table if domain.position(clique[0]) == a else table.T
            part, precision = (
                slice(starts[place], starts[place + 1]),
                deviation(noisy.noise_of(clique)) ** -2.0,
            )
            tables[part] = (precisions[place] * tables[part] + precision * again.ravel()) / (
                precisions[place] + precision
            )
            precisions[place] += precision
    with np.errstate(divide="ignore"):
        deviations: Floats = precisions**-0.5
    return tables, deviations


def _groups(domain: Domain, deviations: Floats) -> _Layout:
    """Return the measured pairs by shape and noise: their attributes and where their tables begin."""
    places = np.flatnonzero(np.isfinite(deviations))
    if not len(places):
        return []
    sizes = np.array(domain.sizes, dtype=np.int64)
    first, second = (side.astype(np.int64)[places] for side in np.triu_indices(len(sizes), k=1))
    starts = np.concatenate([[0], np.cumsum(pair_cells(domain))[:-1]])[places]
    noises, of = np.unique(deviations[places], return_inverse=True)
    kinds, members = np.unique(
        np.stack([sizes[first], sizes[second], of], axis=1), axis=0, return_inverse=True
    )
    order = np.argsort(members, kind="stable")
    parts = np.split(order, np.flatnonzero(np.diff(members[order])) + 1)
    return [
        (first[part], second[part], starts[part], (int(m), int(n)), float(noises[noise]))
        for (m, n, noise), part in zip(kinds, parts, strict=True)
    ]


def _margins(
    noisy: NoisyMarginals, pairs: Floats, layout: _Layout, *, consistency: bool
) -> tuple[Floats, ...]:
    sizes = noisy.domain.sizes
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int64)
    total, weight = np.zeros(sum(sizes)), np.zeros(sum(sizes))
    if noisy.noise.one_way is not None:
        weight += deviation(noisy.noise.one_way) ** -2.0
        total += weight * noisy.one_way
    for first, second, begins, (m, n), sigma in (
        layout if consistency or noisy.noise.one_way is None else ()
    ):
        tables = stack_tables(pairs, begins, (m, n))
        for side, axis, length, other in ((first, 2, m, n), (second, 1, n, m)):
            cells = starts[side][:, None] + np.arange(length)
            np.add.at(total, cells, tables.sum(axis=axis) * (sigma**-2.0 / other))
            np.add.at(weight, cells, sigma**-2.0 / other)
    means = total / weight
    return tuple(
        simplex.project(means[start : start + size], noisy.n_rows)
        for start, size in zip(starts, sizes, strict=True)
    )


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
        independent = tables_kernel.independence(
            group.tables.sum(axis=2), group.tables.sum(axis=1), cleaned.n_rows
        )
        departures = np.abs(group.tables - independent).sum(axis=(1, 2))
        most = MEAN_OF_NOISE * group.sigma * group.tables[0].size
        gains.append(np.minimum(departures, most))
    first, second = (
        np.concatenate([getattr(group, side) for group in cleaned.groups])
        for side in ("first", "second")
    )
    others = (
        np.ones(len(first), dtype=bool)
        if target is None
        else (first != names.index(target)) & (second != names.index(target))
    )
    best = np.lexsort((second, first, -np.concatenate(gains), others))[:n]
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
        told = np.where(
            group.dependent, tables_kernel.mutual_information(group.tables), 0.0
        )  # the rest may be noise
        shared[group.first, group.second] = shared[group.second, group.first] = told
    shared[shared < 1e-12] = 0.0  # independence, up to rounding
    best, parent, outside = shared.sum(axis=1), np.full(n, -1), np.ones(n, dtype=bool)
    tree: list[tuple[int, int]] = []
    near = np.zeros(n)
    while outside.any():
        candidates = np.where(outside, near, -1.0)
        attribute = (
            int(np.argmax(candidates))
            if candidates.max() > 0.0
            else int(np.argmax(np.where(outside, best, -1.0)))
        )
        tree.append((attribute, int(parent[attribute])))
        outside[attribute] = False
        closer = outside & (shared[attribute] > near)
        near[closer], parent[closer] = shared[attribute][closer], attribute
    return tree
