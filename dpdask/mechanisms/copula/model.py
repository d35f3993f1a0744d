"""The Gaussian copula with valid records: correlated latent variables, decoded along a tree into one level per attribute."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Self

import numpy as np

from dpdask.archive import Named, check_array, require
from dpdask.arrays import Codes, Flags, Floats, Ints, Shorts, Singles, freeze_class
from dpdask.errors import SpecError
from dpdask.kernels import correlation as latent_kernel
from dpdask.kernels import decode as decode_kernel
from dpdask.kernels import marginals as table_kernel
from dpdask.kernels import raking as raking_kernel
from dpdask.kernels.hashing import permutation
from dpdask.mechanisms.columns import CHUNK_ROWS
from dpdask.mechanisms.copula.places import Places
from dpdask.mechanisms.marginals.noise import Denoised, NoisyMarginals, PairGroup
from dpdask.privacy import noise
from dpdask.privacy.noise import deviation
from dpdask.rules import MOST_MET, CellRules
from dpdask.stats import Domain
from dpdask.steps import step
from dpdask.streams import Rng, RunKey, Stream, stream, words

Weights = Singles

SWEEPS, FEW_SWEEPS = 6, 4  # visits of each table, and of each of many tables
_MANY_TABLES = 300
MIN_POOL = 2**14  # records: fewer cannot tell the cells of a table apart
# that are raked: the sweeps of them take about 5 microseconds for each record that is drawn
MOST_TABLES = 2**10
_DENSE = 16  # records of a pool for each cell of a table: more leave hardly a cell empty
MOST_CELLS = 5_000  # of a three-way table
_FEW_LATENTS = (
    512  # so many latent variables cost less than raking: the pool may be larger than what is drawn
)
_RAKED = ("tables", "counts", "strengths")
_FIRMNESS = 40.0  # a cell as large as a fortieth of the noise's variance is half believed


@freeze_class(eq=False)
class Targets:
    """The tables that records are raked to.

    Privacy
    -------
    A function of the noisy tables and of a sample of the copula that was fitted to them.
    """

    total: float  # the number of rows, as the noisy tables say
    # Int64 array of shape (n_tables, 3): the attributes of each table, rising; the third one is -1
    # for a two-way table.
    tables: Ints
    # Float64 array: the denoised counts of two-way tables, and the noisy ones of three-way tables,
    # table after table.
    counts: Floats
    # Float64 array of shape (n_tables,): how strongly records are raked to each, per count.
    strengths: Floats

    def check(self, domain: Domain) -> None:
        """Check targets from outside: raking indexes by their numbers without a check."""
        tables, counts, n = self.tables, self.counts, len(self.tables)
        check_array(tables, np.int64, (n, 3), -1, domain.n_attributes - 1)
        require(
            1 <= n <= MOST_TABLES and self.total > 0.0, "too many tables, or no rows to rake to"
        )
        first, second, third = tables.T
        of_three = third >= 0
        rise = (first >= 0) & (first < second) & ((second < third) | ~of_three)
        require(rise.all(), "a raked table's attributes do not rise")
        require(len(np.unique(tables, axis=0)) == n, "a table is raked twice")
        cells = _count_cells(tables, domain)
        require((cells[of_three] <= MOST_CELLS).all(), "a three-way table has too many cells")
        check_array(counts, np.float64, (int(cells.sum()),), -noise.MAX_COUNT, noise.MAX_COUNT)
        two_way = np.repeat(~of_three, cells)
        require((counts[two_way] >= 0.0).all(), "a two-way table holds something else than counts")
        check_array(self.strengths, np.float64, (n,), math.ulp(0.0), _FIRMNESS)

    def to_arrays(self) -> Named:
        """Return the arrays as files hold them."""
        return {f"raked_{name}": getattr(self, name) for name in _RAKED}

    @classmethod
    def from_arrays(cls, arrays: Named, total: float, domain: Domain) -> Self:
        """Return checked targets from arrays that `to_arrays` returned."""
        made = cls(total=total, **{name: arrays[f"raked_{name}"] for name in _RAKED})
        made.check(domain)
        return made

    def n_pool(self, n: int, n_latents: int) -> int:
        """Return how many records are weighted so that n can be drawn: twice as many where they are cheap, and always enough to tell cells apart."""
        doubled = n_latents <= _FEW_LATENTS and 2 * len(self.tables) <= MOST_TABLES
        return max(2 * n if doubled else n, MIN_POOL)

    @property
    def n_sweeps(self) -> int:
        """How often each table is visited."""
        return SWEEPS if len(self.tables) <= _MANY_TABLES else FEW_SWEEPS

    def weigh(self, pool: Codes, domain: Domain, rng: Rng, shares: Floats | None = None) -> Weights:
        """Return weights at which a pool meets the tables, float32 of shape (m,); their sum is about the number of rows.

        Parameters
        ----------
        rng
            A stream: it decides the order in which tables are visited.
        shares
            How much each record of the pool stands for; all as much if None.
        """
        sizes = np.array(domain.sizes, dtype=np.int64)
        cells = _count_cells(self.tables, domain)
        visits = [permutation(words(rng, len(self.tables))) for _ in range(self.n_sweeps)]
        order = np.concatenate(visits).astype(np.int64)
        return raking_kernel.rake(
            pool,
            sizes,
            self.tables,
            np.cumsum(cells) - cells,
            self._move_rows(pool, domain),
            self.total,
            self.strengths,
            order,
            shares,
        )

    def _move_rows(self, pool: Codes, domain: Domain) -> Floats:
        """Return the counts, the rows of two-way cells that a pool lacks moved to those that it has, so that levels keep theirs."""
        cells, counts = _count_cells(self.tables, domain), self.counts.copy()
        starts, is_thin = np.cumsum(cells) - cells, _DENSE * cells > pool.shape[1]
        for place in np.flatnonzero(is_thin & (self.tables[:, 2] < 0)):
            first, second, _ = self.tables[place].tolist()
            part = slice(starts[place], starts[place] + cells[place])
            table = counts[part].reshape(1, domain.sizes[first], domain.sizes[second])
            has = np.zeros(table.shape, dtype=bool)
            has[0, pool[first], pool[second]] = True
            # levels that the pool lacks leave their rows to the others
            rows, columns = (table.sum(axis=axis) * has.any(axis=axis) for axis in (2, 1))
            columns *= rows.sum() / max(columns.sum(), 1e-300)
            counts[part] = table_kernel.rake(table, rows, columns, has).ravel()
        return counts

    def redraw(self, pool: Codes, n: int, domain: Domain, walk: list[int], rng: Rng) -> Codes:
        """Return n records of a pool, drawn by weights at which the pool meets the tables.

        Parameters
        ----------
        pool
            uint8 or uint16 array of shape (n_attributes, m), every code below its attribute's size.
        walk
            The attributes by which neighbours in the systematic sample are alike, the first one
            first.
        rng
            A stream: it decides the order in which tables are visited, where the systematic sample
            begins, and the order of the records, so that it says nothing.

        Notes
        -----
        The weights hold for this pool alone and are thrown away.
        """
        return _resample(pool, self.weigh(pool, domain, rng), n, domain, walk, rng)


@step("fitting: the tables to rake to")
def choose_targets(
    cleaned: Denoised, found: Ints, n_sampled: int, noisy: NoisyMarginals
) -> Targets | None:
    """Return the tables to rake to: all, or of more than 1,024 those that the copula surely misses, 1,024 at most; None without any.

    Three-way tables are always among them.

    Parameters
    ----------
    found
        int64 array: all two-way tables of a sample of the copula, in the domain's order.

    Notes
    -----
    A table is missed by the sum of |found - wanted| over its cells, each less what noise and the
    sample's own chance explain: their standard deviation times √(2 log(cells of all tables)), which
    the largest of so many chances rarely exceeds. The most missed of half a million tables would
    otherwise be those with the most noise.

    References
    ----------
    Donoho and Johnstone, Ideal spatial adaptation by wavelet shrinkage (1994), for the universal
    threshold.
    """
    triples = [(clique, table) for clique, table in noisy.cliques.items() if len(clique) == 3]
    if not cleaned.groups:
        return None
    first = np.concatenate([group.first for group in cleaned.groups])
    second = np.concatenate([group.second for group in cleaned.groups])
    best, room = np.arange(len(first)), MOST_TABLES - len(triples)
    if len(best) > room:
        factor = math.sqrt(2.0 * math.log(len(found)))
        parts = [_missed(group, found, n_sampled, factor) for group in cleaned.groups]
        missed = np.concatenate(parts)
        best = np.argsort(-missed, kind="stable")[: min(room, np.count_nonzero(missed))]
    if not len(best) and not triples:
        return None
    best = best[np.lexsort((second[best], first[best]))]
    lengths = np.array([len(group.first) for group in cleaned.groups])
    owners, places = np.repeat(np.arange(len(lengths)), lengths), np.arange(len(first))
    places -= np.repeat(np.cumsum(lengths) - lengths, lengths)  # in the group
    counts, sigmas = [], []
    for pair in best:
        group = cleaned.groups[owners[pair]]
        counts.append(group.tables[places[pair]].ravel())
        sigmas.append(group.sigma)
    tables = np.stack([first[best], second[best], np.full(len(best), -1)], axis=1)
    for clique, table in triples:
        positions = np.array(cleaned.domain.positions(clique))
        tables = np.append(tables, np.sort(positions)[None], axis=0)
        counts.append(table.transpose(np.argsort(positions)).ravel().astype(np.float64))
        sigmas.append(deviation(noisy.noise_of(clique)))
    return Targets(
        total=cleaned.n_rows,
        tables=tables,
        counts=np.concatenate(counts),
        strengths=np.array([_FIRMNESS / max(sigma, 1.0) ** 2 for sigma in sigmas]),
    )


def _missed(group: PairGroup, found: Ints, n_sampled: int, factor: float) -> Floats:
    scale = group.tables[0].sum() / n_sampled
    shown = group.stack(found)
    explained = factor * np.sqrt(group.sigma**2 + scale**2 * shown)
    missed = np.maximum(np.abs(scale * shown - group.tables) - explained, 0.0)
    return missed.sum(axis=(1, 2))


def _count_cells(tables: Ints, domain: Domain) -> Ints:
    """Return how many cells each table has."""
    sizes = np.array((*domain.sizes, 1), dtype=np.int64)  # the last one: no third attribute
    return sizes[tables].prod(axis=1)


def _resample(
    pool: Codes, weights: Weights, n: int, domain: Domain, walk: list[int], rng: Rng
) -> Codes:
    """Return n records of a pool, drawn by their weights; see `Targets.redraw`."""
    begin = float(words(rng, 1)[0] >> np.uint64(11)) * 2.0**-53
    order = _order(pool, np.array(domain.sizes, dtype=np.int64), walk)
    chosen = raking_kernel.resample(weights, order, n, begin)
    return np.take(pool, chosen[permutation(words(rng, n))], axis=1)


def _order(pool: Codes, sizes: Ints, walk: list[int]) -> Ints:
    """Return the pool's records sorted by as many attributes of the walk as a 64-bit key holds."""
    key, room = np.zeros(pool.shape[1], dtype=np.int64), 2**62
    for attribute in walk:
        room //= int(sizes[attribute])
        if room < 1:
            break
        key = key * sizes[attribute] + pool[attribute]
    return np.argsort(key, kind="stable").astype(np.int64)


MECHANISM_ID = "copula"
_LEAST_KEPT = 1e-3  # of the records that are drawn
_WHOLE = 2**15  # records beside which they are weighted
_LEAST_MET, _SEEN = 1e-6, 2**22  # of so many records of the copula
_JUDGED = 10_000  # records; of fewer, none may be kept by chance
MAX_LATENTS = (
    6000  # an eigendecomposition of minutes, and 800 MB of latent variables in a chunk of records
)

BLOCK_ROWS = 2**17
_FEW_ATTRIBUTES = 256


@freeze_class(eq=False)
class Node:
    """One attribute in the tree."""

    attribute: int
    parent: int  # the place in the order of its parent, or -1
    # Uint16 array: the levels that a record can have; an empty level has no latent variable.
    levels: Shorts
    # Its first latent variable; attributes have theirs in any order. There is one for each level;
    # for two levels, one, of the second.
    first: int
    # Float64 array of shape (n_groups, len(levels)): the levels' probabilities given each level of
    # the parent.
    probabilities: Floats
    # Float32 array of the same shape: what calibration adds to the latent variables.
    offsets: Singles

    @property
    def n_latents(self) -> int:
        """How many latent variables it has."""
        return n_latents_of(len(self.levels))

    def utilities(self, latents: latent_kernel.Latents) -> latent_kernel.Latents:
        """Return its latent variables, float32 of shape (n_latents, ...), a view."""
        return latents[self.first : self.first + self.n_latents]


def n_latents_of(n_levels: int) -> int:
    """Return how many latent variables an attribute of so many possible levels has: two levels are one question."""
    return n_levels if n_levels > 2 else n_levels - 1


def check_latents(domain: Domain) -> None:
    """Check that a copula of these attributes can be fitted."""
    n_latents = sum(map(n_latents_of, domain.sizes))
    if n_latents > MAX_LATENTS:
        widest = domain.names[domain.sizes.index(max(domain.sizes))]
        what = f"its levels and cells and those of the others are {n_latents:,} latent variables; the limit is {MAX_LATENTS:,}"
        raise SpecError(
            what, f"column {widest!r}", "lower `bins`, declare fewer levels, or drop a column"
        )


_ENTRY = 2.0  # rows of the factor of correlations are at most 1 long; with room for rounding
ROUNDING = 1e-6  # of probabilities that sum to 1
_PARTS = {"levels": np.uint16, "probabilities": np.float64, "offsets": np.float32}


def write_nodes(nodes: Sequence[Node]) -> Named:
    """Return what nodes have for each level, one node after the other, as files hold it."""
    return {
        name: np.concatenate([np.empty(0, dtype), *(getattr(node, name).ravel() for node in nodes)])
        for name, dtype in _PARTS.items()
    }


def read_nodes(
    tree: Iterable[Sequence[int]], arrays: Named, sizes: Sequence[int]
) -> tuple[Node, ...]:
    """Return the nodes, or raise ValueError: drawing indexes by their numbers without a check.

    Parameters
    ----------
    tree
        Of each node its attribute, its parent, its first latent variable, and how many groups and
        levels it has.
    """
    parts = {name: arrays[name] for name in _PARTS}
    for name, dtype in _PARTS.items():
        is_typed = parts[name].dtype == dtype and parts[name].ndim == 1
        require(is_typed and np.isfinite(parts[name]).all(), "another type, or no finite number")
    nodes: list[Node] = []
    level = cell = 0
    for attribute, parent, first, n_groups, n_levels in tree:
        is_known = -1 <= parent < len(nodes) and 0 <= attribute < len(sizes)
        require(is_known, "a node comes before its parent, or is of no attribute")
        n_wanted = 1 if parent < 0 else len(nodes[parent].levels)
        require(n_groups == n_wanted and n_levels > 0, "other groups than the parent has levels")
        end = cell + n_groups * n_levels
        probabilities, offsets = (
            parts[name][cell:end].reshape(n_groups, n_levels)
            for name in ("probabilities", "offsets")
        )
        levels = parts["levels"][level : level + n_levels]
        is_inside = len(levels) == n_levels and levels[-1] < sizes[attribute]
        require(is_inside and (levels[1:] > levels[:-1]).all(), "levels that do not rise")
        off = np.abs(probabilities.sum(axis=1) - 1.0)
        sums = (probabilities >= 0.0).all() and (off <= ROUNDING).all()
        require(sums, "a node's probabilities do not sum to 1")
        node = Node(
            attribute=attribute,
            parent=parent,
            levels=levels,
            first=first,
            probabilities=probabilities,
            offsets=offsets,
        )
        nodes.append(node)
        level, cell = level + n_levels, end
    require([level, cell, cell] == list(map(len, parts.values())), "arrays of other nodes")
    own = sorted(node.attribute for node in nodes)
    require(own == list(range(len(sizes))), "the nodes are not one for each attribute")
    n_latents = 0
    for node in sorted(nodes, key=by_latents):
        require(node.first == n_latents, "latent variables of another node, or of none")
        n_latents += node.n_latents
    return tuple(nodes)


def by_latents(node: Node) -> tuple[int, int]:
    """Return what puts nodes in the order of their latent variables; a node without any comes before the one with the same first."""
    return node.first, node.n_latents


def write_factor(factor: Singles) -> Singles:
    """Return the lower triangle of a factor, row after row."""
    return factor[np.tril_indices(len(factor))]


def read_factor(triangle: Singles, n: int) -> Singles:
    """Return the factor of n latent variables from its lower triangle."""
    check_array(triangle, np.float32, (n * (n + 1) // 2,), -_ENTRY, _ENTRY)
    factor = np.zeros((n, n), dtype=np.float32)
    factor[np.tril_indices(n)] = triangle
    return factor


class Met(NamedTuple):
    """Records that meet a condition."""

    codes: Codes
    """The records."""
    beside: Codes
    """Records of the whole model, weighted by the same tables."""
    share: float
    """Which part of the model's records meets the condition."""


class Workspace(NamedTuple):
    """What drawing needs beside the model; one thread may use it for one block after the other."""

    panels: latent_kernel.Panels
    """The factor, packed."""
    latents: latent_kernel.Latents
    """Room for the latent variables of a chunk of records; its pages cost as much as the raking, unless they are used again."""


@freeze_class(eq=False)
class CopulaModel:
    """A fitted copula: everything that sampling needs; all of it is a function of the noisy tables.

    Privacy
    -------
    Post-processing of `NoisyMarginals`: it costs nothing more, may be published, and any number of
    records may be drawn.

    References
    ----------
    Asghar, Ding, Rakotoarivelo, Mrabet and Kaafar, Differentially private release of
    high-dimensional datasets using the Gaussian copula, section 3.3; its thresholds, one for each
    dummy, are here one choice for each attribute.
    """

    domain: Domain
    n_rows: float  # how many rows the table has: exact where it is public, otherwise an estimate
    nodes: tuple[Node, ...]
    # Float32 array of shape (n_latents, n_latents): the Cholesky factor of the latent variables'
    # correlations.
    factor: Singles
    # The tables that records are raked to; None if records are the copula's own.
    targets: Targets | None = None
    # How places inside cells depend on each other; None if no two numbers do.
    places: Places | None = None

    @property
    def block_rows(self) -> int:
        """How many records are drawn together; what the memory of a worker depends on."""
        return BLOCK_ROWS if self.domain.n_attributes <= _FEW_ATTRIBUTES else CHUNK_ROWS

    @property
    def n_latents(self) -> int:
        """How many latent variables there are."""
        return len(self.factor)

    def workspace(self, n: int) -> Workspace:
        """Return what it takes to draw n records, or fewer."""
        most = n if self.targets is None else self.targets.n_pool(n, self.n_latents)
        return Workspace(
            latent_kernel.pack(self.factor),
            latent_kernel.room_for(self.n_latents, min(CHUNK_ROWS, most)),
        )

    def draw(
        self,
        n: int,
        rng: Rng,
        workspace: Workspace | None = None,
        rules: CellRules | None = None,
    ) -> Codes:
        """Return a block of records, raked to the tables if there are any; otherwise those of `sample`.

        Parameters
        ----------
        rng
            A stream; the records are a function of it and of `n`.
        rules
            What all records keep.
        """
        if self.targets is None:
            return self._sample_kept(n, rng, workspace, rules)
        n_pool = self.targets.n_pool(n, self.n_latents)
        pool = self._sample_kept(n_pool, rng, workspace, rules)
        return self.targets.redraw(
            pool, n, self.domain, [node.attribute for node in self.nodes], rng
        )

    def _sample_kept(
        self, n: int, rng: Rng, workspace: Workspace | None, rules: CellRules | None
    ) -> Codes:
        """Return records of the copula that keep rules: others are drawn again."""
        found = self.sample(n, rng, workspace)
        if not rules:
            return found
        parts: list[Any] = [found[:, rules.keep(found)]]
        drawn = n
        while (kept := sum(part.shape[1] for part in parts)) < n:
            if drawn >= _JUDGED:
                check_kept(kept, drawn)
            again = min(n, math.ceil(1.1 * (n - kept) * drawn / kept)) if kept else _JUDGED
            part = self.sample(again, rng, workspace)
            parts.append(part[:, rules.keep(part)])
            drawn += again
        return np.concatenate(parts, axis=1)[:, :n]

    def draw_met(
        self,
        n: int,
        rng: Rng,
        meets: Callable[[Codes], Flags],
        workspace: Workspace | None = None,
        rules: CellRules | None = None,
    ) -> Met:
        """Return records that meet a condition, as if `draw` drew until so many of its records met it.

        Parameters
        ----------
        meets
            Returns which of some records meet it.

        Notes
        -----
        Records of the copula are drawn until enough meet the condition. Of the first 32,768 all are
        kept, of further ones those that meet it: the pool is weighted to the tables as a whole, each
        record by how many it stands for, and the wanted records are drawn by these weights.
        """
        whole = self._sample_kept(_WHOLE, rng, workspace, rules)
        is_met = meets(whole)
        parts, seen, n_first = [whole[:, is_met]], whole.shape[1], int(is_met.sum())
        n_met = n_first
        while n_met < n:
            check_met(n_met, seen, _SEEN)
            found = self.sample(CHUNK_ROWS, rng, workspace)
            found = found[:, rules.keep(found)] if rules else found
            parts.append(found[:, meets(found)])
            seen, n_met = seen + found.shape[1], n_met + parts[-1].shape[1]
        pool = np.concatenate([*parts, whole[:, ~is_met]], axis=1)
        shares = np.full(pool.shape[1], 1.0 / whole.shape[1])
        stands_for = whole.shape[1] / seen  # fewer, of those that were drawn further on
        shares[:n_met] *= stands_for
        if self.targets is None:
            return Met(pool[:, :n], whole, n_met / seen)
        weights = self.targets.weigh(pool, self.domain, rng, shares / shares.sum())
        walk = [node.attribute for node in self.nodes]
        codes = _resample(pool[:, :n_met], weights[:n_met], n, self.domain, walk, rng)
        share = float(weights[:n_met].sum() / weights.sum())
        some = np.r_[0:n_first, n_met : pool.shape[1]]
        weights[:n_first] /= np.float32(stands_for)
        beside = _resample(pool[:, some], weights[some], MOST_MET, self.domain, walk, rng)
        return Met(codes, beside, share)

    def sample(self, n: int, rng: Rng, workspace: Workspace | None = None) -> Codes:
        """Return records of the copula alone.

        Parameters
        ----------
        rng
            A stream; the records are a function of it and of `n`.
        """
        panels, room = workspace or self.workspace(n)
        result = np.empty((self.domain.n_attributes, n), dtype=self.domain.code_dtype)
        for start in range(0, n, CHUNK_ROWS):
            part = result[:, start : start + CHUNK_ROWS]
            draw_latents(panels, part.shape[1], rng, room)
            self._decode(room, part, rng)
        return result

    def _decode(self, drawn: latent_kernel.Latents, out: Codes, rng: Rng) -> None:
        """Write the records of some rows of latent variables."""
        found: list[Shorts] = []
        root = np.zeros(out.shape[1], dtype=np.uint16)
        for node in self.nodes:
            groups = root if node.parent < 0 else found[node.parent]
            uniforms = draw_uniforms(rng, len(node.offsets))
            found.append(
                decode_kernel.decode(
                    node.utilities(drawn), node.offsets, node.probabilities, groups, uniforms
                )
            )
            every = len(node.levels) == self.domain.sizes[node.attribute]
            out[node.attribute] = found[-1] if every else node.levels[found[-1]]

    def stream(self, key: RunKey, partition: str) -> Stream:
        """Return the random stream of one partition of synthetic records, at its start."""
        return stream(key, MECHANISM_ID, partition)


def check_kept(kept: int, drawn: int) -> None:
    """Check that rules leave enough of the copula's records to draw from."""
    if kept < _LEAST_KEPT * drawn:
        what = "fewer than 1 in 1,000 of the copula's records keep the rules"
        raise SpecError(
            what, "schema, rules", "see which of them the table breaks, or spend more ε"
        )


def check_met(met: float, seen: int, enough: int) -> None:
    """Check that enough of the model's records meet a condition, once enough were seen."""
    if seen >= enough and met < _LEAST_MET * seen:
        what = "fewer than 1 in 1,000,000 of the model's records meet the condition"
        raise SpecError(what, "`where`", "ask for more levels, or a wider range")


def draw_latents(
    panels: latent_kernel.Panels, n: int, rng: Rng, room: latent_kernel.Latents
) -> None:
    """Draw rows of correlated latent variables.

    Parameters
    ----------
    room
        float32 array from `room_for`, for at least n rows; its first n columns are overwritten, and
        up to a block more.
    """
    for start in range(0, n if panels.n_latents else 0, latent_kernel.BLOCK_ROWS):
        latent_kernel.latents(
            panels, words(rng, latent_kernel.words_per_block(panels.n_latents)), room, start
        )


def draw_uniforms(rng: Rng, n: int) -> Floats:
    """Return n uniform numbers in [0, 1)."""
    return (words(rng, n) >> np.uint64(11)).astype(np.float64) * 2.0**-53
