"""Fitting a tree of channels to noisy tables alone: post-processing, from the counts to the tables that each column is drawn from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self, cast

import numpy as np
from numpy.typing import NDArray

from dpdask.cells import Cells
from dpdask.channels import LevelChannel, calibrate, costs, laplace, optimal
from dpdask.channels.optimal import MAX_OPTIMAL_LEVELS
from dpdask.codec import LevelCodec
from dpdask.errors import SpecError
from dpdask.kernels import channel as channel_kernel
from dpdask.kernels import tree as tree_kernel
from dpdask.kernels.channel import TOTAL_BITS
from dpdask.mechanisms.cell_search import CellSearch
from dpdask.mechanisms.dip.spec import ChannelKind, Cost, DipMechanism, check_costs
from dpdask.mechanisms.dip.tree import TreeColumn, TreeRelease, worst_row
from dpdask.mechanisms.dip.tree_tables import clean_tables, compose_events, find_tree, fit_tree_noise, measure_tree
from dpdask.mechanisms.marginals.noise import NoisyMarginals
from dpdask.mechanisms.marginals.plan import MarginalNoise
from dpdask.mechanisms.marginals.tables import list_noisy_tables
from dpdask.mechanisms.mechanism import WHOLE_ROW, Columns
from dpdask.privacy import delta_warnings
from dpdask.privacy.accountant import epsilon as least_epsilon
from dpdask.privacy.audit import channel_epsilon, read_weights, within_digits
from dpdask.privacy.events import Composed, to_dict
from dpdask.references import Tree
from dpdask.references.bins import Found, list_adaptive, warn_of_far_cells
from dpdask.stats import Domain, MarginalCounts
from dpdask.stats.tables import TableStatistic, domain_of
from dpdask.streams import Noise, RunKey, stream

Floats = NDArray[np.float64]

MAX_SHOWN = 2**17  # probabilities of a tree's channels: some megabytes of card
MAX_WEIGHTS = 2**24  # 300 megabytes of channels and their tables, in each process

Channels = Mapping[str, tuple[str | None, NDArray[np.uint64]]]

_STAND_IN_ROWS = 2**14
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
            raise SpecError(what, f"column {name!r}", "lower `reference.bins` for them, or declare fewer levels")
        if channel == "optimal" and size > MAX_OPTIMAL_LEVELS:
            what = f"has {size:,} cells, and the optimal channel is solved for at most {MAX_OPTIMAL_LEVELS}"
            raise SpecError(what, f"column {name!r}", "lower `reference.bins` for it, or take the channel laplace-calibrated")
    total = sum(_table_cells(size) * max((other for parent, other in sizes.items() if parent != name), default=1) for name, size in sizes.items())
    if total > MAX_WEIGHTS:
        widest = max(sizes, key=sizes.__getitem__)
        what = "the channels of all columns, each given the widest other one, may be more than can be held"
        raise SpecError(what, f"column {widest!r}", "lower `reference.bins`, declare fewer levels, or drop a column")
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
        The tables from `measure_tree`; nothing else is used.
    cells
        The public cells of each attribute, in the order of the tables' domain.
    epsilons
        What each column of a row may cost.
    channel
        `laplace`: the published noise on ranks. `laplace-calibrated`: the same noise, as small as ε allows. `optimal`: of
        all channels between the two distributions the one of least expected cost. Parent levels with less than a thousandth of the
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
    1. The cleaned tables (`tree_tables.clean_tables`), and from them P(k | a) along the tree. 2. From the roots on:
    W(a, b) is the probability that a row's own parent level is a and the released one b; V(k, b) = Σ_a W(a, b) P(k | a) is
    that of own level k beside released parent level b, whose margin is P(b). The channel of b takes the distribution V(·, b) / P(b)
    to P(· | b), so a released pair has its fitted table exactly, for rows that follow the tree. 3. With the channels T[b],
    W(k, j) = Σ_b V(k, b) T[b][k, j] is used for the column's own children.
    """
    check_tree(cells, channel, given_costs)
    options = _Options(channel=channel, cells=cells, epsilons=epsilons, given_costs=given_costs or {})
    tree, tables = find_tree(noisy), _conditionals(noisy)
    solved = _solve(tree, tables) if channel == "optimal" else {name: np.ones(len(table), dtype=np.bool_) for name, table in tables.items()}
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
    """Return for each column the distribution of its levels given each level of its parent: (n_parent_levels, n_levels)."""
    one_way, edges = clean_tables(noisy)
    parents = {child: parent for parent, child in edges}
    tables: dict[str, Floats] = {}
    for name, counts in one_way.items():
        own = counts[None, :]
        found = edges[parents[name], name] if name in parents else own
        distribution = np.where(found.sum(axis=1, keepdims=True) > 0.0, found, own)  # no row is released with a parent of probability 0
        distribution = distribution / distribution.sum(axis=1, keepdims=True)
        distribution[distribution < _EMPTY] = 0.0
        tables[name] = distribution / distribution.sum(axis=1, keepdims=True)
    return tables


def _solve(tree: list[tuple[str, str | None]], tables: Mapping[str, Floats]) -> dict[str, NDArray[np.bool_]]:
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
    """Return the channel of each released parent level b: from the distribution beside[:, b] of the own level to the distribution table[b]."""
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
        return costs.level_cost(column.codec, probabilities, cost or ("value" if column.codec.ordered else "zero-one"))
    if cost not in (None, "rank"):
        raise SpecError("the cost of a continuous or mixed column is always rank", f"`cost.{column.codec.name}`", "remove it")
    return costs.compute_rank(probabilities)


def _column(parent: str | None, weights: NDArray[np.uint64], cells: Cells, epsilon: float, solved: float) -> TreeColumn:
    return TreeColumn(
        parent=parent,
        weights=weights,
        tables=tree_kernel.make_given_tables(weights),
        edges=cells.edges,
        possible=cells.possible,
        fine_edges=cells.edges if cells.found is None else cells.found.edges,
        masses=np.zeros(max(len(cells.edges) - 1, 0)) if cells.found is None else cells.found.masses,
        epsilon=epsilon,
        solved=solved,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeMechanism(DipMechanism):
    """Distribution-invariant privatisation along a tree: noisy tables of all rows, then each column given its parent.

    Attributes
    ----------
    found
        The cells that the first round found; None before, or if there are none to find.
    """

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
    def how(self) -> str:
        """What is done, in a few words."""
        return f"{DipMechanism.how.fget(self)} along a tree of noisy tables"  # type: ignore[attr-defined]  # a property

    @property
    def noise(self) -> MarginalNoise:
        """The noise of every table.

        Raises
        ------
        SpecError
            If a row's part is so large that the accountant proves nothing beside δ.
        """
        tables = self.reference.split(self.budget.epsilon)[0]
        return fit_tree_noise(self.budget, tables, len(self.schema.privatised), self.row_event(self.row_total), len(self._adaptive))

    @property
    def search(self) -> CellSearch | None:
        """What finds the cells of columns in a first round; see `Mechanism.search`."""
        event = None if self.found is not None else self.noise.cells
        return None if event is None else CellSearch(names=self._adaptive, event=event, n_rows_public=True)

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
        return fit_tree(counts, self.cells(columns), self.spending.row, self.spec.channel, self.spec.cost)

    def describe_joint(self, release: TreeRelease) -> dict[str, Any]:
        """Return what the card says about the columns' joint distribution."""
        return {"columns": "tree", "joint": self.reference.joint, "edges": [list(edge) for edge in release.edges]}

    def describe_columns(self, release: TreeRelease, columns: Columns) -> dict[str, dict[str, Any]]:
        """Return each column's parent, exact ε*, cells and channels; see `DipMechanism.describe_columns`.

        Returns
        -------
        `cells` is how many a value may fall in, `cell_edges` where the line is cut (absent for levels). `channel_as_asked` is
        the share of rows whose channel is of the kind asked for; a rare parent's may be calibrated Laplace. `channels[b][k][j]`
        is the probability of output j if the parent was released as b and the own cell is k; absent if all columns' together
        are more than `MAX_SHOWN` numbers.
        """
        del columns
        shown = sum(column.weights.size for column in release.columns.values()) <= MAX_SHOWN
        found: dict[str, dict[str, Any]] = {}
        for name, column in release.columns.items():
            found[name] = {"parent": column.parent, "epsilon_exact": column.epsilon, "cells": column.n_levels, "channel_as_asked": column.solved}
            found[name] |= {"cell_edges": column.edges.tolist()} if column.edges.size else {}
            found[name] |= {"channels": (column.weights * 2.0**-TOTAL_BITS).tolist()} if shown else {}
        return found

    def accounting(self, release: TreeRelease) -> dict[str, Any]:
        """Return what was spent, for the card: never more than was promised."""
        if self.continued:
            return DipMechanism.accounting(self, release)
        rows = self.row_event(release.epsilon) if release.epsilon else None  # 0 where every column has one level
        return {
            "composition": "noisy tables of all rows, and the rows of a unit; a row's ε* is the worst over all released rows",
            "epsilon_exact": least_epsilon(compose_events(self.noise, rows), self.budget.delta),
            "epsilon_tables": self.reference.split(self.budget.epsilon)[0],
            "epsilon_row_exact": release.epsilon,
            "rows_per_unit": self.rows_per_unit,
            "events": to_dict(self.event),
        }

    def stages(self, columns: Columns, *, uncounted: bool) -> tuple[str, ...]:
        """Return what a run does between the units' bounds and the commit, in words; see `Mechanism.stages`."""
        del columns, uncounted
        names = self.schema.privatised
        n = len(names)
        tables = f"count {n} one-way and {n * (n - 1) // 2} two-way tables of all rows"
        noise = f"noise on the tables (ε = {self.reference.split(self.budget.epsilon)[0]:.6g}" + (", and all of δ)" if self.budget.delta else ")")
        looks = "; a first look at all pairs chooses the tree, a second one measures its pairs" if n > 2 else ""
        rows = "a row" if self.rows_per_unit == 1 else f"each of {self.rows_per_unit} rows"
        channels = f"the channels of each column, given its parent on the tree ({rows}: ε = {self.row_total:.6g})"
        survey = f"survey: read {', '.join(names)} once; {tables}, merged in a tree"
        search = () if self.search is None else (self.search.stage,)
        return (
            *search,
            survey,
            f"fit: {noise}{looks}; {channels}; on the driver, written once",
            "write: randomise each fragment and stage its shards",
        )

    def cautions(self, columns: Columns, n_rows: int | None) -> tuple[str, ...]:
        """Return what a steward should think of before a run, a δ that is too large for so many rows included; see `Mechanism.cautions`."""
        far = warn_of_far_cells(columns.codecs, self.reference.bins)
        found = (*delta_warnings(self.budget, n_rows), *DipMechanism.cautions(self, columns, n_rows), *far)
        if not n_rows or self.continued:
            return found
        measured = MarginalNoise(one_way=self.noise.one_way, pairs=self.noise.chosen)  # any pair may be an edge
        return (*found, *list_noisy_tables(measured, {name: cells.size for name, cells in self.cells(columns).items()}, n_rows))

    def audit(self, columns: Columns, card: Mapping[str, Any] | None) -> dict[str, dict[str, Any]]:
        """Return what is claimed and found, also of a whole row: of the released channels, or those of a simulated table; see `Mechanism.audit`."""
        shown = _read_channels(card)
        if shown:
            return self._audit(shown, "the released channels")
        cells = self.cells(columns)
        noisy = measure_tree(_simulate(domain_of(cells)), self.noise, rng=stream(RunKey.insecure(0), "audit/noise", ""))
        fitted = fit_tree(noisy, cells, self.spending.row, self.spec.channel, self.spec.cost)
        return self._audit({name: (column.parent, column.weights) for name, column in fitted.columns.items()}, "a simulated table")

    def _audit(self, channels: Channels, reference: str) -> dict[str, dict[str, Any]]:
        exact = {name: max(map(channel_epsilon, weights)) for name, (_, weights) in channels.items()} | {WHOLE_ROW: worst_row(channels)}
        claims = {**self.spending.row, WHOLE_ROW: self.row_total}
        return {
            name: {"claimed": claim, "epsilon_exact": within_digits(exact[name], claim), "reference": reference} for name, claim in claims.items()
        }


def _read_channels(card: Mapping[str, Any] | None) -> Channels:
    """Return the channels that a finished job's card shows; empty if it is not released, or they are too many to be shown."""
    columns = {} if card is None else {name: column for name, column in card.get("columns", {}).items() if column["role"] == "privatised"}
    if not all("channels" in column for column in columns.values()):
        return {}
    return {name: (column["parent"], read_weights(column["channels"])) for name, column in columns.items()}


def _simulate(domain: Domain) -> MarginalCounts:
    """Return the tables of rows whose columns depend on one another: each is by halves a trait of the row, or even."""
    rng = stream(RunKey.insecure(0), "audit/rows", "").seed_generator()
    trait = rng.random(_STAND_IN_ROWS)
    codes = np.empty((domain.n_attributes, _STAND_IN_ROWS), dtype=domain.code_dtype)
    for own, size in zip(codes, domain.sizes, strict=True):
        own[:] = size * np.where(rng.random(_STAND_IN_ROWS) < 0.5, trait, rng.random(_STAND_IN_ROWS))
    return MarginalCounts.of_codes(domain, codes)
