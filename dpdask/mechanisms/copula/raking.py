"""Raking: a block's records are weighted to match noisy tables, and resampled by their weights."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dpdask.kernels import raking as raking_kernel
from dpdask.kernels.permutation import permutation
from dpdask.mechanisms.marginals.denoise import Denoised, PairGroup, stack_tables
from dpdask.mechanisms.marginals.noise import NoisyMarginals
from dpdask.privacy import noise
from dpdask.privacy.noise import deviation
from dpdask.stats import Domain
from dpdask.steps import step
from dpdask.streams import Rng, words

Codes = NDArray[np.uint8] | NDArray[np.uint16]
Floats = NDArray[np.float64]
Weights = NDArray[np.float32]
Ints = NDArray[np.int64]

SWEEPS, FEW_SWEEPS = 6, 4  # visits of each table, and of each of many tables
_MANY_TABLES = 300
MIN_POOL = 2**14  # records: fewer cannot tell the cells of a table apart
MOST_TABLES = 2**10  # that are raked: the sweeps of them take about 5 microseconds for each record that is drawn
MOST_CELLS = 5_000  # of a three-way table
_FEW_LATENTS = 512  # so many latent variables cost less than raking: the pool may be larger than what is drawn
_FIRMNESS = 40.0  # a cell as large as a fortieth of the noise's variance is half believed


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Targets:
    """The tables that records are raked to.

    Attributes
    ----------
    total
        The number of rows, as the noisy tables say.
    tables
        int64 array of shape (n_tables, 3): the attributes of each table, rising; the third one is -1 for a two-way table.
    counts
        float64 array: the denoised counts of two-way tables, and the noisy ones of three-way tables, table after table.
    strengths
        float64 array of shape (n_tables,): how strongly records are raked to each, per count.

    Privacy
    -------
    A function of the noisy tables and of a sample of the copula that was fitted to them.
    """

    total: float
    tables: Ints
    counts: Floats
    strengths: Floats

    def check(self, domain: Domain) -> None:
        """Check targets from outside: raking indexes by their numbers without a check.

        Raises
        ------
        ValueError
            If they are not tables of two or three of the domain's attributes, none of them twice.
        """
        tables, counts, strengths = self.tables, self.counts, self.strengths
        if tables.dtype != np.int64 or tables.ndim != 2 or tables.shape[1] != 3 or not 1 <= len(tables) <= MOST_TABLES:
            raise ValueError("the raked tables are not pairs or triples, or are too many")
        of_three = tables[:, 2] >= 0
        if (tables[:, :2] < 0).any() or (tables[:, 2] < -1).any() or (tables >= domain.n_attributes).any():
            raise ValueError("a raked table is none of the domain's")
        if (tables[:, 0] >= tables[:, 1]).any() or (of_three & (tables[:, 1] >= tables[:, 2])).any():
            raise ValueError("a raked table's attributes do not rise")
        if len(np.unique(tables, axis=0)) != len(tables):
            raise ValueError("a table is raked twice")
        if not self.total > 0.0:
            raise ValueError("no rows to rake to")
        if (_cells(tables[of_three], domain) > MOST_CELLS).any():
            raise ValueError("a raked three-way table has too many cells")
        if counts.dtype != np.float64 or counts.shape != (int(_cells(tables, domain).sum()),):
            raise ValueError("the raked tables have other cells than the domain")
        least = np.repeat(np.where(of_three, -noise.MAX_COUNT, 0), _cells(tables, domain))
        if not (np.isfinite(counts) & (counts >= least) & (counts <= noise.MAX_COUNT)).all():
            raise ValueError("a raked table holds something else than counts")
        if strengths.dtype != np.float64 or strengths.shape != (len(tables),) or not ((strengths > 0.0) & (strengths <= _FIRMNESS)).all():
            raise ValueError("no noise asks for such raking")

    def n_pool(self, n: int, n_latents: int) -> int:
        """Return how many records are weighted so that n can be drawn: twice as many where they are cheap, and always enough to tell cells apart.

        Parameters
        ----------
        n
            How many records are drawn.
        n_latents
            The latent variables of the copula.
        """
        doubled = n_latents <= _FEW_LATENTS and 2 * len(self.tables) <= MOST_TABLES
        return max(2 * n if doubled else n, MIN_POOL)

    @property
    def n_sweeps(self) -> int:
        """How often each table is visited."""
        return SWEEPS if len(self.tables) <= _MANY_TABLES else FEW_SWEEPS

    def weigh(self, pool: Codes, domain: Domain, rng: Rng) -> Weights:
        """Return weights at which a pool meets the tables, float32 of shape (m,); their sum is about the number of rows.

        Parameters
        ----------
        pool, domain
            As for `redraw`.
        rng
            A stream: it decides the order in which tables are visited.
        """
        sizes = np.array(domain.sizes, dtype=np.int64)
        cells = _cells(self.tables, domain)
        starts = np.concatenate([[0], np.cumsum(cells)[:-1]]).astype(np.int64)
        order = np.concatenate([permutation(words(rng, len(self.tables))) for _ in range(self.n_sweeps)]).astype(np.int64)
        return raking_kernel.rake(pool, sizes, self.tables, starts, self.counts, self.total, self.strengths, order)

    def redraw(self, pool: Codes, n: int, domain: Domain, walk: list[int], rng: Rng) -> Codes:
        """Return n records of a pool, drawn by weights at which the pool meets the tables.

        Parameters
        ----------
        pool
            uint8 or uint16 array of shape (n_attributes, m), every code below its attribute's size.
        n
            How many, at least 1.
        domain
            The attributes.
        walk
            The attributes by which neighbours in the systematic sample are alike, the first one first.
        rng
            A stream: it decides the order in which tables are visited, where the systematic sample begins, and the order of
            the records, so that it says nothing.

        Notes
        -----
        The weights hold for this pool alone and are thrown away.
        """
        weights, sizes = self.weigh(pool, domain, rng), np.array(domain.sizes, dtype=np.int64)
        begin = float(words(rng, 1)[0] >> np.uint64(11)) * 2.0**-53
        chosen = raking_kernel.resample(weights, _order(pool, sizes, walk), n, begin)
        result: Codes = np.take(pool, chosen[permutation(words(rng, n))], axis=1)
        return result


@step("fitting: the tables to rake to")
def choose_targets(cleaned: Denoised, found: Ints, n_sampled: int, noisy: NoisyMarginals) -> Targets | None:
    """Return the tables to rake to: all, or of more than 1,024 those that the copula surely misses, 1,024 at most; None without any.

    Three-way tables are always among them.

    Parameters
    ----------
    cleaned
        The denoised tables.
    found
        int64 array: all two-way tables of a sample of the copula, in the domain's order.
    n_sampled
        The sample's records.
    noisy
        The noisy tables, for those of three columns.

    Notes
    -----
    A table is missed by the sum of |found - wanted| over its cells, each less what noise and the sample's own chance explain: their
    standard deviation times √(2 log(cells of all tables)), which the largest of so many chances rarely exceeds. The most missed of
    half a million tables would otherwise be those with the most noise.

    References
    ----------
    Donoho and Johnstone, Ideal spatial adaptation by wavelet shrinkage (1994), for the universal threshold.
    """
    triples = [(clique, table) for clique, table in noisy.cliques.items() if len(clique) == 3]
    if not cleaned.groups:
        return None
    pairs = np.concatenate([np.stack([group.first, group.second], axis=1) for group in cleaned.groups])
    best = np.arange(len(pairs))
    room = MOST_TABLES - len(triples)
    if len(pairs) > room:
        factor = math.sqrt(2.0 * math.log(len(found)))
        missed = np.concatenate([_missed(group, found, n_sampled, factor) for group in cleaned.groups])
        best = np.argsort(-missed, kind="stable")[: min(room, np.count_nonzero(missed))]
    if not len(best) and not triples:
        return None
    best = best[np.lexsort((pairs[best, 1], pairs[best, 0]))]
    lengths = [len(group.first) for group in cleaned.groups]
    owners, firsts = np.repeat(np.arange(len(lengths)), lengths), np.concatenate([[0], np.cumsum(lengths)[:-1]])
    counts = [cleaned.groups[owners[place]].tables[place - firsts[owners[place]]].ravel() for place in best]
    strengths = [_strength(cleaned.groups[owners[place]].sigma) for place in best]
    tables = np.insert(pairs[best], 2, -1, axis=1)
    for clique, table in triples:
        positions = np.array(cleaned.domain.positions(clique))
        tables = np.append(tables, np.sort(positions)[None], axis=0)
        counts.append(table.transpose(np.argsort(positions)).ravel().astype(np.float64))
        strengths.append(_strength(deviation(noisy.noise_of(clique))))
    return Targets(total=cleaned.n_rows, tables=tables, counts=np.concatenate(counts), strengths=np.array(strengths))


def _strength(sigma: float) -> float:
    return _FIRMNESS / max(sigma, 1.0) ** 2


def _missed(group: PairGroup, found: Ints, n_sampled: int, factor: float) -> Floats:
    scale = group.tables[0].sum() / n_sampled
    shown = stack_tables(found, group.starts, group.tables.shape[1:])
    explained = factor * np.sqrt(group.sigma**2 + scale**2 * shown)
    missed: Floats = np.maximum(np.abs(scale * shown - group.tables) - explained, 0.0).sum(axis=(1, 2))
    return missed


def _cells(tables: Ints, domain: Domain) -> Ints:
    """Return how many cells each table has."""
    sizes = np.array((*domain.sizes, 1), dtype=np.int64)  # the last one stands for no third attribute
    cells: Ints = sizes[tables].prod(axis=1)
    return cells


def _order(pool: Codes, sizes: Ints, walk: list[int]) -> Ints:
    """Return the pool's records sorted by as many attributes of the walk as a 64-bit key holds."""
    key, room = np.zeros(pool.shape[1], dtype=np.int64), 2**62
    for attribute in walk:
        room //= int(sizes[attribute])
        if room < 1:
            break
        key = key * sizes[attribute] + pool[attribute]
    return np.argsort(key, kind="stable").astype(np.int64)
