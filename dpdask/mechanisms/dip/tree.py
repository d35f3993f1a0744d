"""Distribution-invariant privatisation along a tree: each column is randomised given the released value of its parent."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dpdask.archive import Archive, Contents
from dpdask.cells import Cells, FoundBins
from dpdask.channels import LevelChannel, calibrate, costs, laplace, optimal
from dpdask.channels.optimal import MAX_OPTIMAL_LEVELS
from dpdask.codec import Codec, LevelCodec
from dpdask.errors import SpecError
from dpdask.kernels import channel as channel_kernel
from dpdask.kernels import channel as tree_kernel
from dpdask.kernels.channel import TOTAL_BITS
from dpdask.mechanisms.dip.spec import ChannelKind, Cost, DipDescription, DipMechanism, check_costs
from dpdask.mechanisms.expectations import CellSearch
from dpdask.mechanisms.marginals.denoise import denoise, dependence_tree
from dpdask.mechanisms.marginals.noise import (
    MarginalNoise,
    NoisyMarginals,
    draft,
    measure,
    measure_chosen,
    share_of_cells,
)
from dpdask.mechanisms.marginals.spec import list_noisy_tables
from dpdask.mechanisms.mechanism import WHOLE_ROW, Columns, RandomisedRows
from dpdask.privacy import Budget, delta_warnings
from dpdask.privacy.accountant import epsilon as least_epsilon
from dpdask.privacy.accountant import scale_events
from dpdask.privacy.audit import channel_epsilon, read_weights, within_digits
from dpdask.privacy.events import Adjacency, CentralEvent, Composed, LocalRelease, to_dict
from dpdask.privacy.rounding import round_up_sum
from dpdask.references import Tree
from dpdask.references.histogram import Found, list_adaptive, warn_of_far_cells
from dpdask.stats import Clique, Domain, MarginalCounts
from dpdask.stats.marginals import TableStatistic, domain_of
from dpdask.streams import Noise, Rng, RunKey, stream, words

_SCALARS, _ARRAYS = (
    ("parent", "epsilon", "solved"),
    ("weights", "edges", "possible", "fine_edges", "masses"),
)

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TreeColumn:
    """A column's channels, one for each released level of its parent."""

    parent: str | None  # the column that it is given, or None: then there is one channel
    # Uint64 array of shape (n_parent_levels, n, n), n the possible cells of the column: Pr(output j
    # | own level k, released parent b) = weights[b, k, j] / 2**63.
    weights: NDArray[np.uint64]
    tables: tree_kernel.GivenTables  # the exact tables that are drawn from
    edges: Floats  # the column's public cells, as in `Cells`
    possible: NDArray[np.bool_]
    # What values inside a cell follow, as in `FoundBins`; all 0: they are uniform.
    fine_edges: Floats
    masses: Floats
    epsilon: float  # Ε*, the largest exact privacy loss of any of its channels, rounded up
    # The share of rows, by the fitted tables, that have the requested channel; the others have rare
    # parent levels (see `fit_tree`).
    solved: float

    @property
    def n_levels(self) -> int:
        """How many cells a value may fall in."""
        return int(self.possible.sum())

    def randomise(
        self, codec: Codec, array: pa.Array, parents: NDArray[np.uint16], rng: Rng
    ) -> tuple[pa.Array, NDArray[np.uint16]]:
        """Return a released value for each value of `array`, and its level; one word a row, two where cells have an inside."""
        if isinstance(codec, LevelCodec):
            own = codec.encode(array)
            released = self._sample(parents, own, words(rng, len(own)))
            return codec.decode(released), released
        found = (
            FoundBins(cuts=self.edges, edges=self.fine_edges, masses=self.masses)
            if self.masses.any()
            else None
        )
        cells = Cells(codec=codec, edges=self.edges, possible=self.possible, found=found)
        own = cells.codes(array).astype(np.int32)
        drawn = words(rng, len(own), 2)
        released = self._sample(parents, own, np.ascontiguousarray(drawn[:, 0]))
        return cells.draw(released, drawn[:, 1]), released

    def _sample(
        self, parents: NDArray[np.uint16], own: NDArray[np.int32], drawn: NDArray[np.uint64]
    ) -> NDArray[np.uint16]:
        return tree_kernel.sample_given(parents, own, drawn, self.n_levels, self.tables)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TreeRelease(RandomisedRows):
    """A fitted release along a tree of columns.

    Privacy
    -------
    Unit: a row. Adjacency: replace-one. Protected: the values of all rows, given tables that carry
    their own noise and ε. Row-level noise, so there is no sensitivity. Event: one local release of
    every row.

    Notes
    -----
    A released row has probability Π_l T[l][b_l][k_l, j_l], its own levels k and the released ones
    j, b_l that of the parent. Which own row is worst can be chosen column by column, so ε* = max
    over released rows of Σ_l log(max_k / min_k), which is found from the leaves to the roots.

    References
    ----------
    Bi and Shen, Distribution-invariant differential privacy, equation (2): the chain rule, of which
    this keeps one condition for each column; Chow and Liu (1968), Approximating discrete
    probability distributions with dependence trees.
    """

    archive: ClassVar[Archive] = Archive(
        kind="dip-tree", format=3, noun="fitted release along a tree"
    )
    mechanism_id: ClassVar[str] = "dip/tree"

    # The channels of each privatised column, every column after its parent.
    columns: Mapping[str, TreeColumn]

    @property
    def epsilon(self) -> float:
        """ε* of a whole row, rounded up: never more than the sum over its columns."""
        worst = worst_row(
            {name: (column.parent, column.weights) for name, column in self.columns.items()}
        )
        return min(worst, round_up_sum(column.epsilon for column in self.columns.values()))

    @property
    def edges(self) -> tuple[tuple[str, str], ...]:
        """(parent, column) for each column that is given another."""
        return tuple(
            (column.parent, name)
            for name, column in self.columns.items()
            if column.parent is not None
        )

    def randomise(
        self, batch: pa.RecordBatch, codecs: Mapping[str, Codec], rngs: Mapping[str, Rng]
    ) -> pa.RecordBatch:
        """Return the batch with every privatised column randomised and the others untouched; see `RowRelease.randomise`."""
        arrays = list(batch.columns)
        released: dict[str, NDArray[np.uint16]] = {}
        root = np.zeros(batch.num_rows, dtype=np.uint16)
        for name, column in self.columns.items():
            position = batch.schema.get_field_index(name)
            parents = root if column.parent is None else released[column.parent]
            arrays[position], released[name] = column.randomise(
                codecs[name], batch.column(position), parents, rngs[name]
            )
        return pa.RecordBatch.from_arrays(arrays, names=batch.schema.names)

    def _contents(self) -> Contents:
        """Return what the bytes hold.

        Privacy
        -------
        A function of noisy tables, which have their own ε: safe to publish, unlike the run key
        beside it.
        """
        columns = [
            {"name": name, **{part: getattr(column, part) for part in _SCALARS}}
            for name, column in self.columns.items()
        ]
        arrays = {
            f"{index}_{part}": getattr(column, part)
            for index, column in enumerate(self.columns.values())
            for part in _ARRAYS
        }
        return {"columns": columns}, arrays

    @classmethod
    def _of_contents(cls, header: Mapping[str, Any], arrays: Mapping[str, Any]) -> Self:
        return cls(
            columns={
                column["name"]: _column(column, arrays, index)
                for index, column in enumerate(header["columns"])
            }
        )


def _column(column: Mapping[str, Any], arrays: Mapping[str, Any], index: int) -> TreeColumn:
    parts = {part: arrays[f"{index}_{part}"] for part in _ARRAYS}
    return TreeColumn(
        **{part: column[part] for part in _SCALARS},
        **parts,
        tables=tree_kernel.make_given_tables(parts["weights"]),
    )


def worst_row(channels: Mapping[str, tuple[str | None, NDArray[np.uint64]]]) -> float:
    """Return the greatest privacy loss of any released row, rounded up.

    Parameters
    ----------
    channels
        For each column its parent and the channels' weights, as in `TreeColumn`; every column after
        its parent.
    """
    below: dict[str | None, Floats | float] = {}
    for name, (parent, weights) in reversed(list(channels.items())):
        inside = tree_kernel.losses(weights) + below.get(name, 0.0)
        worst = inside.max(axis=1)
        below[parent] = np.nextafter(below.get(parent, 0.0) + worst, np.inf)
    found = np.asarray(below[None])
    return float(found[0])


# how the tables' part is shared: Laplace noise shares ε so, Gaussian noise the inverse of its variance
_ONE_WAY, _CHOOSING, _EDGES = 0.15, 0.15, 0.7
_FIRST_STEP = (
    1e-9  # relative: by how much noise grows until the accountant agrees that everything fits
)


def plan_tree_noise(budget: Budget, n_columns: int, n_found: int = 0) -> MarginalNoise:
    """Return the noise that spends a budget on the tables of a tree: Gaussian if there is a δ, otherwise Laplace.

    All pairs are measured, if there is something to choose, and then the tree's own once more:
    these are the chosen tables.

    Parameters
    ----------
    n_found
        The number of columns whose cells are found; as for `plan_noise`.

    Notes
    -----
    15 % goes to the one-way tables, as much to choosing, and the rest to the tree's edges, each of
    which has then far less noise than if all pairs had as much: on the 14 columns of Adult, little
    is gained or lost by shares near these.
    """
    rows = budget.unit_column.max_rows if budget.unit_column is not None else 1
    return _plan(budget.epsilon, budget.delta, budget.adjacency, rows, n_columns, n_found)


@functools.lru_cache(maxsize=64)
def _plan(
    epsilon: float, delta: float, adjacency: Adjacency, rows: int, n: int, n_found: int
) -> MarginalNoise:
    counted = [(_ONE_WAY, n), (_CHOOSING if n > 2 else 0.0, n * (n - 1) // 2), (_EDGES, n - 1)]
    weight, n_vectors = share_of_cells(
        sum(share for share, count in counted if count), n_found, delta
    )
    counted.append((weight * n_vectors, n_vectors))
    drafts = [
        draft(delta, adjacency, rows, share / count, count) if share > 0.0 and count else None
        for share, count in counted
    ]
    found = iter(scale_events([each for each in drafts if each is not None], epsilon, delta))
    one_way, pairs, edges, cells = (next(found) if each is not None else None for each in drafts)
    return MarginalNoise(one_way=one_way, pairs=pairs, chosen=edges, cells=cells)


def fit_tree_noise(
    budget: Budget, tables: float, n_columns: int, rows: LocalRelease, n_found: int = 0
) -> MarginalNoise:
    """Return the noise of the tables that composes with the rows' own releases to the budget.

    Notes
    -----
    ε = ε_tables + max_rows · Σ ε_row, a sum that holds at any δ. The accountant composes the very
    events, and could round them to more than the sum: then the tables get as much more noise as it
    takes.
    """
    noise = plan_tree_noise(budget.model_copy(update={"epsilon": tables}), n_columns, n_found)
    step = _FIRST_STEP
    while step < 1.0:
        if least_epsilon(compose_events(noise, rows), budget.delta) <= budget.epsilon:
            return noise
        noise, step = scale_noise(noise, 1.0 + step), 2.0 * step
    raise SpecError(
        f"an ε of {rows.epsilon:g} a row cannot be composed with a δ",
        "`epsilon`",
        "lower it, or set `delta` to 0",
    )


def scale_noise(noise: MarginalNoise, factor: float) -> MarginalNoise:
    """Return the noise of a tree's tables with all scales multiplied by a factor."""
    one_way, pairs, chosen, cells = (
        _scale_event(event, factor)
        for event in (noise.one_way, noise.pairs, noise.chosen, noise.cells)
    )
    return MarginalNoise(one_way=one_way, pairs=pairs, chosen=chosen, cells=cells)


def _scale_event(event: CentralEvent | None, factor: float) -> CentralEvent | None:
    if event is None:
        return None
    name = "scale" if hasattr(event, "scale") else "sigma"
    return replace(event, **{name: getattr(event, name) * factor})


def compose_events(noise: MarginalNoise, rows: LocalRelease | None) -> Composed:
    """Return what will happen: noise on every table, and the rows' own releases, unless they depend on no value."""
    return (
        Composed(events=noise.event.events)
        if rows is None
        else Composed(events=(*noise.event.events, rows), unit=rows.unit)
    )


def measure_tree(
    counts: MarginalCounts, planned: MarginalNoise, *, rng: Rng | None = None
) -> NoisyMarginals:
    """Return the tables with their noise, the tree's edges (parent, column) as chosen ones: on the driver, once, after the charge.

    Parameters
    ----------
    rng
        None: secure noise. A stream: INSECURE, for runs marked so; see `privacy.noise`.

    Privacy
    -------
    Unit, sensitivity, event: `MarginalNoise`. Protected: every row counted. Their number is public
    (replace-one).

    Notes
    -----
    The tree joins the pairs with the most mutual information, as far as the first look tells it
    from noise. A column that shows none stands alone.
    """
    noisy = measure(counts, planned, n_rows_public=True, rng=rng)
    return (
        noisy
        if planned.chosen is None
        else measure_chosen(noisy, counts, _choose_edges(noisy), rng=rng)
    )


def _choose_edges(noisy: NoisyMarginals) -> tuple[Clique, ...]:
    names = noisy.domain.names
    if len(names) == 2:
        return ((names[0], names[1]),)
    return tuple(
        (names[parent], names[attribute])
        for attribute, parent in dependence_tree(denoise(noisy))
        if parent >= 0
    )


def find_tree(noisy: NoisyMarginals) -> list[tuple[str, str | None]]:
    """Return (column, parent) for each column of a measured tree, each after its parent; those without one first."""
    edges = list(noisy.cliques)
    given = {child for _, child in edges}
    return [
        *((name, None) for name in noisy.domain.names if name not in given),
        *((child, parent) for parent, child in edges),
    ]


def clean_tables(noisy: NoisyMarginals) -> tuple[Mapping[str, Floats], Mapping[Clique, Floats]]:
    """Return the cleaned counts of each column and each edge of the tree: post-processing.

    Returns
    -------
    one_way
        For each column, float64 array, non-negative, summing to the number of rows.
    edges
        For each edge (parent, column), float64 array of shape (n_parent_levels, n_levels),
        non-negative, with the two columns' counts as margins.
    """
    cleaned = denoise(noisy)
    position = noisy.domain.position
    return dict(zip(noisy.domain.names, cleaned.one_way, strict=True)), {
        edge: cleaned.table(position(edge[0]), position(edge[1])) for edge in noisy.cliques
    }


MAX_SHOWN = 2**17  # probabilities of a tree's channels: some megabytes of card
MAX_WEIGHTS = 2**24  # 300 megabytes of channels and their tables, in each process

Channels = Mapping[str, tuple[str | None, NDArray[np.uint64]]]

_STAND_IN_ROWS = 2**14
_EMPTY = 1e-9  # a conditional probability below which a level is not released
_LEAST_SHARE = (
    1e-3  # of rows: for a rarer parent level the optimal channel is not worth its program
)
_MOST_WORK = 2e9  # Σ (m·n)² over the programs: some minutes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    """How channels are made: their kind, and for each column its cells, ε and cost."""

    channel: ChannelKind
    cells: Mapping[str, Cells]
    epsilons: Mapping[str, float]
    given_costs: Mapping[str, Cost]


def check_tree(
    cells: Mapping[str, Cells], channel: ChannelKind, given_costs: Mapping[str, Cost] | None = None
) -> None:
    """Check, before any row is read, that a tree of these columns can be fitted whichever of them are joined."""
    sizes = {name: column.size for name, column in cells.items()}
    for name, size in sizes.items():
        most = max((other for parent, other in sizes.items() if parent != name), default=1)
        if most * _table_cells(size) > MAX_WEIGHTS:
            what = f"its {size:,} cells, given the {most:,} of another column, need more channels than can be held"
            raise SpecError(
                what, f"column {name!r}", "lower `reference.bins` for them, or declare fewer levels"
            )
        if channel == "optimal" and size > MAX_OPTIMAL_LEVELS:
            what = f"has {size:,} cells, and the optimal channel is solved for at most {MAX_OPTIMAL_LEVELS}"
            raise SpecError(
                what,
                f"column {name!r}",
                "lower `reference.bins` for it, or take the channel laplace-calibrated",
            )
    total = sum(
        _table_cells(size)
        * max((other for parent, other in sizes.items() if parent != name), default=1)
        for name, size in sizes.items()
    )
    if total > MAX_WEIGHTS:
        widest = max(sizes, key=sizes.__getitem__)
        what = "the channels of all columns, each given the widest other one, may be more than can be held"
        raise SpecError(
            what,
            f"column {widest!r}",
            "lower `reference.bins`, declare fewer levels, or drop a column",
        )
    wanted = given_costs or {}
    check_costs(wanted, cells, channel)
    for name, cost in wanted.items():
        _cost(cells[name], np.full(cells[name].size, 1.0 / cells[name].size), cost)


def _table_cells(size: int) -> int:
    return size << max(1, (size - 1).bit_length())


def fit_tree(
    noisy: NoisyMarginals,
    cells: Mapping[str, Cells],
    epsilons: Mapping[str, float],
    channel: ChannelKind = "laplace",
    given_costs: Mapping[str, Cost] | None = None,
) -> TreeRelease:
    """Return the release along a tree whose tables were measured.

    Parameters
    ----------
    cells
        The public cells of each attribute, in the order of the tables' domain.
    channel
        `laplace`: the published noise on ranks. `laplace-calibrated`: the same noise, as small as ε
        allows. `optimal`: of all channels between the two distributions the one of least expected
        cost. Parent levels with less than a thousandth of the rows take the calibrated one in its
        place, and so do the rarest ones where all programs together would take more than some
        minutes.

    Privacy
    -------
    Post-processing of the tables. Every channel's ε* is computed from the whole numbers that are
    drawn from, and is at most its column's ε whatever the tables are.

    Notes
    -----
    1. The cleaned tables (`tree_tables.clean_tables`), and from them P(k | a) along the tree. 2. From the roots on:
    W(a, b) is the probability that a row's own parent level is a and the released one b; V(k, b) = Σ_a W(a, b) P(k | a) is
    that of own level k beside released parent level b, whose margin is P(b). The channel of b takes the distribution V(·, b) / P(b)
    to P(· | b), so a released pair has its fitted table exactly, for rows that follow the tree. 3. With the channels T[b],
    W(k, j) = Σ_b V(k, b) T[b][k, j] is used for the column's own children.
    """
    check_tree(cells, channel, given_costs)
    options = _Options(
        channel=channel, cells=cells, epsilons=epsilons, given_costs=given_costs or {}
    )
    tree, tables = find_tree(noisy), _conditionals(noisy)
    solved = (
        _solve(tree, tables)
        if channel == "optimal"
        else {name: np.ones(len(table), dtype=np.bool_) for name, table in tables.items()}
    )
    columns: dict[str, TreeColumn] = {}
    joint: dict[str | None, Floats] = {None: np.ones((1, 1))}
    for name, parent in tree:
        beside = tables[name].T @ joint[parent]
        parts = _channels(name, beside, tables[name], solved[name], options)
        weights = np.stack([part.weights for part in parts])
        joint[name] = np.einsum("kb,bkj->kj", beside, weights * 2.0**-channel_kernel.TOTAL_BITS)
        share = min(1.0, float(beside.sum(axis=0)[solved[name]].sum()))
        columns[name] = _make_column(
            parent, weights, cells[name], float(max(part.epsilon for part in parts)), share
        )
    return TreeRelease(columns=columns)


def _conditionals(noisy: NoisyMarginals) -> dict[str, Floats]:
    """Return for each column the distribution of its levels given each level of its parent: (n_parent_levels, n_levels)."""
    one_way, edges = clean_tables(noisy)
    parents = {child: parent for parent, child in edges}
    tables: dict[str, Floats] = {}
    for name, counts in one_way.items():
        own = counts[None, :]
        found = edges[parents[name], name] if name in parents else own
        distribution = np.where(
            found.sum(axis=1, keepdims=True) > 0.0, found, own
        )  # no row is released with a parent of probability 0
        distribution = distribution / distribution.sum(axis=1, keepdims=True)
        distribution[distribution < _EMPTY] = 0.0
        tables[name] = distribution / distribution.sum(axis=1, keepdims=True)
    return tables


def _solve(
    tree: list[tuple[str, str | None]], tables: Mapping[str, Floats]
) -> dict[str, NDArray[np.bool_]]:
    """Return which parent levels' programs are solved: the most frequent ones, as long as the work is bounded."""
    shares: dict[str | None, Floats] = {None: np.ones(1)}
    parts: list[tuple[float, str, int, float]] = []
    for name, parent in tree:
        shares[name] = shares[parent] @ tables[name]
        work = (
            np.count_nonzero(shares[name])
            * np.count_nonzero(tables[name], axis=1).astype(np.float64)
        ) ** 2
        parts += [
            (-float(share), name, level, float(work[level]))
            for level, share in enumerate(shares[parent])
            if share >= _LEAST_SHARE
        ]
    chosen = {name: np.zeros(len(table), dtype=np.bool_) for name, table in tables.items()}
    left = _MOST_WORK
    for _, name, level, work_of in sorted(parts):
        left -= work_of
        chosen[name][level] = left >= 0.0
    return chosen


def _channels(
    name: str, beside: Floats, table: Floats, solved: NDArray[np.bool_], options: _Options
) -> list[LevelChannel]:
    """Return the channel of each released parent level b: from the distribution beside[:, b] of the own level to the distribution table[b]."""
    column = options.cells[name]
    order = _in_order(column)
    own = beside.sum(axis=1)
    cost = (
        _cost(column, own[order] / own.sum(), options.given_costs.get(name))
        if options.channel == "optimal"
        else np.zeros((0, 0))
    )
    found = []
    for level, target in enumerate(table):
        total = beside[:, level].sum()
        if total == 0.0:  # never released: no row draws from it
            found.append(
                LevelChannel(
                    weights=channel_kernel.integer_weights(np.tile(target, (column.size, 1))),
                    epsilon=0.0,
                )
            )
            continue
        kind: ChannelKind = options.channel if solved[level] else "laplace-calibrated"
        source = beside[order, level] / total
        part = _channel(
            source, target[order], options.epsilons[name], kind, cost, ordered=_is_ordered(column)
        )
        weights = np.empty_like(part.weights)
        weights[np.ix_(order, order)] = part.weights
        found.append(LevelChannel(weights=weights, epsilon=part.epsilon))
    return found


def _channel(
    source: Floats,
    target: Floats,
    epsilon: float,
    kind: ChannelKind,
    cost: Floats,
    *,
    ordered: bool,
) -> LevelChannel:
    if kind == "laplace":
        return laplace(source, epsilon, ordered=ordered, target=target)
    if kind == "laplace-calibrated":
        return calibrate(source, epsilon, ordered=ordered, target=target)
    return optimal(source, epsilon, cost, ordered=ordered, target=target)


def _is_ordered(column: Cells) -> bool:
    return not isinstance(column.codec, LevelCodec) or column.codec.ordered


def _in_order(column: Cells) -> NDArray[np.intp]:
    """Return the possible cells as their values lie on the line, null first: an atom stands after the cell that it ends."""
    if isinstance(column.codec, LevelCodec):
        return np.arange(column.size)
    nulls, atoms = int(column.codec.nulls), np.array(column.codec.atoms)
    ends = np.concatenate([np.full(nulls, -np.inf), atoms, column.edges[1:]])[column.possible]
    is_atom = (np.arange(len(column.possible)) < nulls + len(atoms))[column.possible]
    return np.lexsort((is_atom, ends))


def _cost(column: Cells, probabilities: Floats, cost: Cost | None) -> Floats:
    """Return what the optimal channel minimises, for the cells in the order of `_in_order`."""
    if isinstance(column.codec, LevelCodec):
        return costs.level_cost(
            column.codec, probabilities, cost or ("value" if column.codec.ordered else "zero-one")
        )
    if cost not in (None, "rank"):
        raise SpecError(
            "the cost of a continuous or mixed column is always rank",
            f"`cost.{column.codec.name}`",
            "remove it",
        )
    return costs.compute_rank(probabilities)


def _make_column(
    parent: str | None, weights: NDArray[np.uint64], cells: Cells, epsilon: float, solved: float
) -> TreeColumn:
    return TreeColumn(
        parent=parent,
        weights=weights,
        tables=tree_kernel.make_given_tables(weights),
        edges=cells.edges,
        possible=cells.possible,
        fine_edges=cells.edges if cells.found is None else cells.found.edges,
        masses=np.zeros(max(len(cells.edges) - 1, 0))
        if cells.found is None
        else cells.found.masses,
        epsilon=epsilon,
        solved=solved,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeMechanism(DipMechanism):
    """Distribution-invariant privatisation along a tree: noisy tables of all rows, then each column given its parent."""

    # The cells that the first round found; None before, or if there are none to find.
    found: Found | None = None

    release_type: ClassVar[type[TreeRelease]] = TreeRelease

    @property
    def reference(self) -> Tree:
        """How the tables are cut, and which share of ε they take."""
        return cast("Tree", self.spec.reference)

    def check_epsilons(self) -> None:
        """Check that tables and rows compose to the budget; levels take any ε."""
        _ = self.noise

    @property
    def noise(self) -> MarginalNoise:
        """The noise of every table."""
        tables = self.reference.split(self.budget.epsilon)[0]
        return fit_tree_noise(
            self.budget,
            tables,
            len(self.schema.privatised),
            self.row_event(self.row_total),
            len(self._adaptive),
        )

    @property
    def search(self) -> CellSearch | None:
        """What finds the cells of columns in a first round; see `Mechanism.search`."""
        event = None if self.found is not None else self.noise.cells
        return (
            None
            if event is None
            else CellSearch(names=self._adaptive, event=event, n_rows_public=True)
        )

    def with_found(self, found: Found) -> Self:
        """Return the mechanism with the cells that were found; see `Mechanism.with_found`."""
        return replace(self, found=found)

    @property
    def _adaptive(self) -> tuple[str, ...]:
        return list_adaptive(self.schema, self.reference.bins)

    @property
    def event(self) -> Composed:
        """The noise of every table, and the rows' own releases."""
        rows = self.row_event(self.row_total)
        return Composed(events=(rows,)) if self.continued else compose_events(self.noise, rows)

    def check(self, columns: Columns) -> None:
        """Check the bins, and the sizes of tables and channels; see `Mechanism.check`."""
        statistic = self.statistic(columns)
        check_tree(statistic.cells, self.spec.channel, self.spec.cost)
        statistic.check_size("reference.bins")

    def statistic(self, columns: Columns) -> TableStatistic:
        """Return what is counted: the tables of all columns and pairs."""
        return TableStatistic(cells=self.cells(columns))

    def cells(self, columns: Columns) -> dict[str, Cells]:
        """Return the cells of each privatised column; before they are found, as many as there may be."""
        return self.reference.cells(columns.codecs, self.found)

    def draw(self, counts: MarginalCounts, columns: Columns, noise: Noise) -> NoisyMarginals:
        """Draw the noise of the tables; see `Mechanism.draw`."""
        del columns
        return measure_tree(counts, self.noise, rng=noise("marginals/noise"))

    def read_drawn(self, data: bytes, columns: Columns) -> NoisyMarginals:
        """Return the noisy tables that an earlier driver kept; see `Mechanism.read_drawn`."""
        found = NoisyMarginals.from_bytes(data, "the run's noisy tables")
        found.check(domain_of(self.cells(columns)), self.noise)
        return found

    def fit(self, counts: NoisyMarginals, columns: Columns, key: RunKey) -> TreeRelease:
        """Return the fitted release; see `Mechanism.fit`."""
        del key
        return fit_tree(
            counts, self.cells(columns), self.spending.row, self.spec.channel, self.spec.cost
        )

    def accounting(self, release: TreeRelease) -> dict[str, Any]:
        """Return what was spent, for the card: never more than was promised."""
        if self.continued:
            return DipMechanism.accounting(self, release)
        rows = (
            self.row_event(release.epsilon) if release.epsilon else None
        )  # 0 where every column has one level
        return {
            "composition": "noisy tables of all rows, and the rows of a unit; a row's ε* is the worst over all released rows",
            "epsilon_exact": least_epsilon(compose_events(self.noise, rows), self.budget.delta),
            "epsilon_tables": self.reference.split(self.budget.epsilon)[0],
            "epsilon_row_exact": release.epsilon,
            "rows_per_unit": self.rows_per_unit,
            "events": to_dict(self.event),
        }

    def audit(self, columns: Columns, card: Mapping[str, Any] | None) -> dict[str, dict[str, Any]]:
        """Return what is claimed and found, also of a whole row: of the released channels, or those of a simulated table; see `Mechanism.audit`."""
        shown = _read_channels(card)
        if shown:
            return self._audit(shown, "the released channels")
        cells = self.cells(columns)
        noisy = measure_tree(
            _simulate(domain_of(cells)),
            self.noise,
            rng=stream(RunKey.insecure(0), "audit/noise", ""),
        )
        fitted = fit_tree(noisy, cells, self.spending.row, self.spec.channel, self.spec.cost)
        return self._audit(
            {name: (column.parent, column.weights) for name, column in fitted.columns.items()},
            "a simulated table",
        )

    def _audit(self, channels: Channels, reference: str) -> dict[str, dict[str, Any]]:
        exact = {
            name: max(map(channel_epsilon, weights)) for name, (_, weights) in channels.items()
        } | {WHOLE_ROW: worst_row(channels)}
        claims = {**self.spending.row, WHOLE_ROW: self.row_total}
        return {
            name: {
                "claimed": claim,
                "epsilon_exact": within_digits(exact[name], claim),
                "reference": reference,
            }
            for name, claim in claims.items()
        }

    @property
    def description(self) -> TreeDescription:
        """What is said of it."""
        return TreeDescription(self)


@dataclass(frozen=True, slots=True)
class TreeDescription(DipDescription):
    """What is said of rows that are randomised along a tree."""

    mechanism: TreeMechanism

    @property
    def how(self) -> str:
        """What is done, in a few words."""
        return f"{DipDescription.how.fget(self)} along a tree of noisy tables"  # type: ignore[attr-defined]  # a property

    def describe_joint(self, release: TreeRelease) -> dict[str, Any]:
        """Return what the card says about the columns' joint distribution."""
        return {
            "columns": "tree",
            "joint": self.mechanism.reference.joint,
            "edges": [list(edge) for edge in release.edges],
        }

    def describe_columns(self, release: TreeRelease, columns: Columns) -> dict[str, dict[str, Any]]:
        """Return each column's parent, exact ε*, cells and channels; see `DipMechanism.describe_columns`."""
        del columns
        shown = sum(column.weights.size for column in release.columns.values()) <= MAX_SHOWN
        found: dict[str, dict[str, Any]] = {}
        for name, column in release.columns.items():
            found[name] = {
                "parent": column.parent,
                "epsilon_exact": column.epsilon,
                "cells": column.n_levels,
                "channel_as_asked": column.solved,
            }
            found[name] |= {"cell_edges": column.edges.tolist()} if column.edges.size else {}
            found[name] |= (
                {"channels": (column.weights * 2.0**-TOTAL_BITS).tolist()} if shown else {}
            )
        return found

    def stages(self, columns: Columns, *, uncounted: bool) -> tuple[str, ...]:
        """Return what a run does between the units' bounds and the commit, in words."""
        del columns, uncounted
        mechanism, names = self.mechanism, self.mechanism.schema.privatised
        n, of_tables = len(names), mechanism.reference.split(mechanism.budget.epsilon)[0]
        tables = f"count {n} one-way and {n * (n - 1) // 2} two-way tables of all rows"
        noise = f"noise on the tables (ε = {of_tables:.6g}"
        noise += ", and all of δ)" if mechanism.budget.delta else ")"
        looks = "; a first look at all pairs chooses the tree, a second one measures its pairs"
        rows = (
            "a row" if mechanism.rows_per_unit == 1 else f"each of {mechanism.rows_per_unit} rows"
        )
        channels = f"the channels of each column, given its parent on the tree ({rows}: ε = {mechanism.row_total:.6g})"
        return (
            *(() if mechanism.search is None else (mechanism.search.stage,)),
            f"survey: read {', '.join(names)} once; {tables}, merged in a tree",
            f"fit: {noise}{looks if n > 2 else ''}; {channels}; on the driver, written once",
            "write: randomise each fragment and stage its shards",
        )

    def cautions(self, columns: Columns, n_rows: int | None) -> tuple[str, ...]:
        """Return what a steward should think of before a run, a δ that is too large for so many rows included."""
        far = warn_of_far_cells(columns.codecs, self.mechanism.reference.bins)
        found = (
            *delta_warnings(self.mechanism.budget, n_rows),
            *DipDescription.cautions(self, columns, n_rows),
            *far,
        )
        if not n_rows or self.mechanism.continued:
            return found
        measured = MarginalNoise(
            one_way=self.mechanism.noise.one_way, pairs=self.mechanism.noise.chosen
        )  # any pair may be an edge
        return (
            *found,
            *list_noisy_tables(
                measured,
                {name: cells.size for name, cells in self.mechanism.cells(columns).items()},
                n_rows,
            ),
        )


def _read_channels(card: Mapping[str, Any] | None) -> Channels:
    """Return the channels that a finished job's card shows; empty if it is not released, or they are too many to be shown."""
    columns = (
        {}
        if card is None
        else {
            name: column
            for name, column in card.get("columns", {}).items()
            if column["role"] == "privatised"
        }
    )
    if not all("channels" in column for column in columns.values()):
        return {}
    return {
        name: (column["parent"], read_weights(column["channels"]))
        for name, column in columns.items()
    }


def _simulate(domain: Domain) -> MarginalCounts:
    """Return the tables of rows whose columns depend on one another: each is by halves a trait of the row, or even."""
    rng = stream(RunKey.insecure(0), "audit/rows", "").seed_generator()
    trait = rng.random(_STAND_IN_ROWS)
    codes = np.empty((domain.n_attributes, _STAND_IN_ROWS), dtype=domain.code_dtype)
    for own, size in zip(codes, domain.sizes, strict=True):
        own[:] = size * np.where(
            rng.random(_STAND_IN_ROWS) < 0.5, trait, rng.random(_STAND_IN_ROWS)
        )
    return MarginalCounts.of_codes(domain, codes)
