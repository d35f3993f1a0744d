"""Fitting a tree of channels to noisy tables alone: post-processing, from the counts to what each column is drawn from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dpdask.cells import Cells
from dpdask.channels import LevelChannel, calibrated, costs, laplace, optimal
from dpdask.channels.optimal import MAX_OPTIMAL_LEVELS
from dpdask.codec import LevelCodec
from dpdask.errors import SpecError
from dpdask.kernels import channel as channel_kernel
from dpdask.mechanisms.dip.fit import ChannelKind, Cost, check_costs, level_cost
from dpdask.mechanisms.dip.tree import TreeColumn, TreeRelease
from dpdask.mechanisms.dip.tree_tables import believed, tree_of
from dpdask.mechanisms.marginals.noise import NoisyMarginals

Floats = NDArray[np.float64]

MAX_WEIGHTS = 2**24  # 300 megabytes of channels and their tables, in each process

_EMPTY = 1e-9  # a conditional probability below which a level is not released
_LEAST_SHARE = 1e-3  # of rows: for a rarer parent level the optimal channel is not worth its program
_MOST_WORK = 2e9  # Σ (m·n)² over the programs: some minutes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    """How channels are made: their kind, and for each column its cells, ε and cost."""

    channel: ChannelKind
    cells: Mapping[str, Cells]
    epsilons: Mapping[str, float]
    given_costs: Mapping[str, Cost]


def check_tree(cells: Mapping[str, Cells], channel: ChannelKind, given_costs: Mapping[str, Cost] | None = None) -> None:
    """Check, before any row is read, that a tree of these columns can be fitted whichever of them are joined.

    Parameters
    ----------
    cells
        The public cells of each privatised column.
    channel, given_costs
        As for `fit_tree`.

    Raises
    ------
    SpecError
        If the channels may be too many to hold, the optimal channel has too many levels, or a cost does not fit; the line
        names the column.
    """
    sizes = {name: column.size for name, column in cells.items()}
    for name, size in sizes.items():
        most = max((other for parent, other in sizes.items() if parent != name), default=1)
        if most * _table_cells(size) > MAX_WEIGHTS:
            what = f"its {size:,} cells, given the {most:,} of another column, need more channels than can be held"
            raise SpecError(what, f"column {name!r}", "lower mechanism.reference.bins for them, or declare fewer levels")
        if channel == "optimal" and size > MAX_OPTIMAL_LEVELS:
            what = f"has {size:,} cells, and the optimal channel is solved for at most {MAX_OPTIMAL_LEVELS}"
            raise SpecError(what, f"column {name!r}", "lower mechanism.reference.bins for it, or take the channel laplace-calibrated")
    total = sum(_table_cells(size) * max((other for parent, other in sizes.items() if parent != name), default=1) for name, size in sizes.items())
    if total > MAX_WEIGHTS:
        widest = max(sizes, key=sizes.__getitem__)
        what = "the channels of all columns, each given the widest other one, may be more than can be held"
        raise SpecError(what, f"column {widest!r}", "lower mechanism.reference.bins, declare fewer levels, or drop a column")
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
    noisy
        From `measure_tree`; nothing else is looked at.
    cells
        The public cells of each attribute, in the order of the tables' domain.
    epsilons
        What each column of a row may cost.
    channel
        `laplace`: the published noise on ranks. `laplace-calibrated`: the same noise, as small as ε allows. `optimal`: of
        all channels between the two laws the one of least expected cost. Parent levels with less than a thousandth of the
        rows take the calibrated one in its place, and so do the rarest ones where all programs together would take more
        than some minutes.
    given_costs
        What the optimal channel minimises, by column, as for `fit_dip`.

    Raises
    ------
    SpecError
        As `check_tree`.

    Privacy
    -------
    Post-processing of the tables. Every channel's ε* is computed from the whole numbers that are drawn from, and is at most
    its column's ε whatever the tables are.

    Notes
    -----
    1. The tables that are believed (`tree_tables.believed`), and from them P(k | a) along the tree. 2. From the roots on:
    W(a, b) is the probability that a row's own parent level is a and the released one b; V(k, b) = Σ_a W(a, b) P(k | a) is
    that of own level k beside released parent level b, whose margin is P(b). The channel of b takes the law V(·, b) / P(b)
    to P(· | b), so a released pair has its fitted table exactly, for rows that follow the tree. 3. With the channels T[b],
    W(k, j) = Σ_b V(k, b) T[b][k, j] is what the column's own children need.
    """
    check_tree(cells, channel, given_costs)
    options = _Options(channel=channel, cells=cells, epsilons=epsilons, given_costs=given_costs or {})
    tree, tables = tree_of(noisy), _conditionals(noisy)
    solved = _solved(tree, tables) if channel == "optimal" else {name: np.ones(len(table), dtype=np.bool_) for name, table in tables.items()}
    columns: dict[str, TreeColumn] = {}
    joint: dict[str | None, Floats] = {None: np.ones((1, 1))}
    for name, parent in tree:
        beside = tables[name].T @ joint[parent]
        parts = _channels(name, beside, tables[name], solved[name], options)
        weights = np.stack([part.weights for part in parts])
        joint[name] = np.einsum("kb,bkj->kj", beside, weights * 2.0**-channel_kernel.TOTAL_BITS)
        share = min(1.0, float(beside.sum(axis=0)[solved[name]].sum()))
        columns[name] = _column(parent, weights, cells[name], float(max(part.epsilon for part in parts)), share)
    return TreeRelease(columns=columns)


def _conditionals(noisy: NoisyMarginals) -> dict[str, Floats]:
    """Return for each column the law of its levels given each level of its parent: (n_parent_levels, n_levels)."""
    one_way, edges = believed(noisy)
    parents = {child: parent for parent, child in edges}
    tables: dict[str, Floats] = {}
    for name, counts in one_way.items():
        own = counts[None, :]
        found = edges[parents[name], name] if name in parents else own
        law = np.where(found.sum(axis=1, keepdims=True) > 0.0, found, own)  # no row is released with a parent of probability 0
        law = law / law.sum(axis=1, keepdims=True)
        law[law < _EMPTY] = 0.0
        tables[name] = law / law.sum(axis=1, keepdims=True)
    return tables


def _solved(tree: list[tuple[str, str | None]], tables: Mapping[str, Floats]) -> dict[str, NDArray[np.bool_]]:
    """Return which parent levels' programs are solved: the most frequent ones, as long as the work is bounded."""
    shares: dict[str | None, Floats] = {None: np.ones(1)}
    parts: list[tuple[float, str, int, float]] = []
    for name, parent in tree:
        shares[name] = shares[parent] @ tables[name]
        work = (np.count_nonzero(shares[name]) * np.count_nonzero(tables[name], axis=1).astype(np.float64)) ** 2
        parts += [(-float(share), name, level, float(work[level])) for level, share in enumerate(shares[parent]) if share >= _LEAST_SHARE]
    chosen = {name: np.zeros(len(table), dtype=np.bool_) for name, table in tables.items()}
    left = _MOST_WORK
    for _, name, level, work_of in sorted(parts):
        left -= work_of
        chosen[name][level] = left >= 0.0
    return chosen


def _channels(name: str, beside: Floats, table: Floats, solved: NDArray[np.bool_], options: _Options) -> list[LevelChannel]:
    """Return the channel of each released parent level b: from the law beside[:, b] of the own level to the law table[b]."""
    column = options.cells[name]
    order = _in_order(column)
    own = beside.sum(axis=1)
    cost = _cost(column, own[order] / own.sum(), options.given_costs.get(name)) if options.channel == "optimal" else np.zeros((0, 0))
    found = []
    for level, target in enumerate(table):
        total = beside[:, level].sum()
        if total == 0.0:  # never released: no row draws from it
            found.append(LevelChannel(weights=channel_kernel.integer_weights(np.tile(target, (column.size, 1))), epsilon=0.0))
            continue
        kind: ChannelKind = options.channel if solved[level] else "laplace-calibrated"
        source = beside[order, level] / total
        part = _channel(source, target[order], options.epsilons[name], kind, cost, ordered=_is_ordered(column))
        weights = np.empty_like(part.weights)
        weights[np.ix_(order, order)] = part.weights
        found.append(LevelChannel(weights=weights, epsilon=part.epsilon))
    return found


def _channel(source: Floats, target: Floats, epsilon: float, kind: ChannelKind, cost: Floats, *, ordered: bool) -> LevelChannel:
    if kind == "laplace":
        return laplace(source, epsilon, ordered=ordered, target=target)
    if kind == "laplace-calibrated":
        return calibrated(source, epsilon, ordered=ordered, target=target)
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
        return level_cost(column.codec, probabilities, cost or ("value" if column.codec.ordered else "zero-one"))
    if cost not in (None, "rank"):
        raise SpecError("the cost of a continuous or mixed column is that of ranks", f"cost of {column.codec.name!r}", "remove it")
    return costs.rank(probabilities)


def _column(parent: str | None, weights: NDArray[np.uint64], cells: Cells, epsilon: float, solved: float) -> TreeColumn:
    n_parents, n, _ = weights.shape
    thresholds, aliases = channel_kernel.alias_tables(weights.reshape(n_parents * n, n))
    return TreeColumn(
        parent=parent,
        weights=weights,
        thresholds=thresholds,
        aliases=aliases,
        edges=cells.edges,
        possible=cells.possible,
        epsilon=epsilon,
        solved=solved,
    )
