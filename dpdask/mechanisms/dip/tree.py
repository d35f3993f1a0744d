"""Distribution-invariant privatisation along a tree: each column is randomised given the released value of its parent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field, replace
from functools import cached_property, lru_cache
from typing import Any, ClassVar, Self, cast

import numpy as np
import pyarrow as pa

from dpdask.archive import Archive, Contents, Json, Named
from dpdask.arrays import Flags, Floats, Indices, Int32s, Shorts, Words, freeze_class
from dpdask.cells import Cells, CutColumns, FoundBins
from dpdask.channels import (
    MAX_OPTIMAL_LEVELS,
    LevelChannel,
    calibrate,
    compute_rank,
    laplace,
    level_cost,
    optimal,
)
from dpdask.codec import Codec, Codecs
from dpdask.errors import SpecError
from dpdask.kernels import channel as channel_kernel
from dpdask.kernels.channel import TOTAL_BITS
from dpdask.mechanisms.dip.spec import (
    ChannelKind,
    Cost,
    DipDescription,
    DipMechanism,
    check_costs,
    list_audit,
)
from dpdask.mechanisms.expectations import CellSearch
from dpdask.mechanisms.marginals.noise import (
    MarginalNoise,
    NoisyMarginals,
    denoise,
    dependence_tree,
    draft,
    measure,
    measure_chosen,
    scale_drafts,
    share_of_cells,
)
from dpdask.mechanisms.marginals.spec import list_noisy_tables
from dpdask.mechanisms.mechanism import WHOLE_ROW, Columns, RandomisedRows, Sentences
from dpdask.privacy import Budget, delta_warnings
from dpdask.privacy.audit import channel_epsilon, read_weights, within_digits
from dpdask.privacy.events import Composed, LocalRelease, round_up_sum, to_dict
from dpdask.privacy.events import epsilon as least_epsilon
from dpdask.references import Tree
from dpdask.references.histogram import list_adaptive, warn_of_far_cells
from dpdask.stats import Clique, Domain, MarginalCounts
from dpdask.stats.marginals import TableStatistic, domain_of
from dpdask.streams import Noise, Rng, RunKey, stream, words

_SCALARS = ("parent", "epsilon", "solved")
_ARRAYS = ("weights", "edges", "possible", "fine_edges", "masses")


MAX_SHOWN = 2**17  # probabilities of a tree's channels: some megabytes of card
MAX_WEIGHTS = 2**24  # 300 megabytes of channels and their tables, in each process

Channels = Mapping[str, tuple[str | None, Words]]

_STAND_IN_ROWS = 2**14
_EMPTY = 1e-9  # a conditional probability below which a level is not released
_LEAST_SHARE = 1e-3  # of rows: for a rarer parent level an optimal channel is not worth its program
_MOST_WORK = 2e9  # Σ (m·n)² over the programs: some minutes


@freeze_class(eq=False)
class TreeColumn:
    """A column's channels, one for each released level of its parent."""

    # The column that it is given, or None: then there is one channel.
    parent: str | None
    # Of shape (n_parent_levels, n, n), n the possible cells of the column: Pr(output j | own level
    # k, released parent b) = weights[b, k, j] / 2**63.
    weights: Words
    # The column's public cells, as in `Cells`.
    edges: Floats
    possible: Flags
    # What values inside a cell follow, as in `FoundBins`; all 0: they are uniform.
    fine_edges: Floats
    masses: Floats
    # ε*, the largest exact privacy loss of any of its channels, rounded up.
    epsilon: float
    # The share of rows, by the fitted tables, that have the requested channel; the others have
    # rare parent levels (see `fit_tree`).
    solved: float
    tables: channel_kernel.Tables = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tables", channel_kernel.make_tables(self.weights))

    @property
    def n_levels(self) -> int:
        """How many cells a value may fall in."""
        return int(self.possible.sum())

    def randomise(
        self, codec: Codec, array: pa.Array, parents: Shorts, rng: Rng
    ) -> tuple[pa.Array, Shorts]:
        """Return a released value for each value of `array`, and its level, given the parent's.

        One word a row, two where cells have an inside.
        """
        if codec.has_levels:
            own = codec.encode(array)
            released = self._sample(parents, own, words(rng, len(own)))
            return codec.decode(released), released
        fine = FoundBins(cuts=self.edges, edges=self.fine_edges, masses=self.masses)
        found = fine if self.masses.any() else None
        cells = Cells(codec=codec, edges=self.edges, possible=self.possible, found=found)
        own = cells.codes(array).astype(np.int32)
        drawn = words(rng, len(own), 2)
        released = self._sample(parents, own, np.ascontiguousarray(drawn[:, 0]))
        return cells.draw(released, drawn[:, 1]), released

    def _sample(self, parents: Any, own: Int32s, drawn: Any) -> Shorts:
        return channel_kernel.sample(parents, own, drawn, self.n_levels, self.tables)


@freeze_class(eq=False)
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

    archive: ClassVar = Archive(kind="dip-tree", format=3, noun="fitted release along a tree")
    mechanism_id: ClassVar = "dip/tree"

    # The channels of each privatised column, every column after its parent.
    columns: Mapping[str, TreeColumn]

    @property
    def epsilon(self) -> float:
        """ε* of a whole row, rounded up: never more than the sum over its columns."""
        total = round_up_sum(column.epsilon for column in self.columns.values())
        return min(worst_row(self.channels), total)

    @property
    def channels(self) -> Channels:
        """The parent and the weights of each column."""
        return {name: (column.parent, column.weights) for name, column in self.columns.items()}

    @property
    def edges(self) -> tuple[tuple[str, str], ...]:
        """(parent, column) for each column that is given another."""
        return tuple(
            (column.parent, name)
            for name, column in self.columns.items()
            if column.parent is not None
        )

    def randomise(
        self, batch: pa.RecordBatch, codecs: Codecs, rngs: Mapping[str, Rng]
    ) -> pa.RecordBatch:
        """Return the batch with every privatised column randomised and the others untouched; see `RowRelease.randomise`."""
        arrays = list(batch.columns)
        released: dict[str, Shorts] = {}
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
    def _of_contents(cls, header: Named, arrays: Named) -> Self:
        columns = {}
        for index, column in enumerate(header["columns"]):
            scalars = {part: column[part] for part in _SCALARS}
            tables = {part: arrays[f"{index}_{part}"] for part in _ARRAYS}
            columns[column["name"]] = TreeColumn(**scalars, **tables)
        return cls(columns=columns)


def worst_row(channels: Channels) -> float:
    """Return the greatest privacy loss of any released row, rounded up; every column after its parent."""
    below: dict[str | None, Floats | float] = {}
    for name, (parent, weights) in reversed(list(channels.items())):
        inside = channel_kernel.losses(weights) + below.get(name, 0.0)
        below[parent] = np.nextafter(below.get(parent, 0.0) + inside.max(axis=1), np.inf)
    return float(np.asarray(below[None])[0])


# ---- the noisy tables: a coarse measurement of all pairs chooses the tree, a finer one its edges


@lru_cache(maxsize=64)
def plan_tree_noise(budget: Budget, n_columns: int, n_found: int = 0) -> MarginalNoise:
    """Return the noise that spends a budget on a tree's tables: Gaussian with a δ, else Laplace.

    All pairs are measured, if there is something to choose, and then the tree's own once more:
    these are the chosen tables.

    Notes
    -----
    15 % goes to the one-way tables, as much to choosing, and the rest to the tree's edges, each of
    which has then far less noise than if all pairs had as much: on the 14 columns of Adult, little
    is gained or lost by shares near these. Laplace noise shares ε so, Gaussian noise the inverse of
    its variance.
    """
    n = n_columns
    n_pairs = n * (n - 1) // 2 if n > 2 else 0
    shares = {"one_way": (0.15, n), "pairs": (0.15, n_pairs), "chosen": (0.7, n - 1)}
    share = sum(share for share, count in shares.values() if count)
    weight, n_vectors = share_of_cells(share, n_found, budget.delta)
    shares["cells"] = weight * n_vectors, n_vectors
    drafts = {
        name: draft(budget, share / max(1, count), count) for name, (share, count) in shares.items()
    }
    events: Json = {"one_way": None, "pairs": None, **scale_drafts(budget, drafts)}
    return MarginalNoise(**events)


def fit_tree_noise(
    budget: Budget, tables: float, n_columns: int, rows: LocalRelease, n_found: int = 0
) -> MarginalNoise:
    """Return the noise of tables that cost so much and compose with the rows' releases to the budget.

    Raises
    ------
    SpecError
        If a row's part is so large that the accountant proves nothing beside δ.

    Notes
    -----
    ε = ε_tables + max_rows · Σ ε_row, a sum that holds at any δ. The accountant composes the very
    events, and could round them to more than the sum: then the tables get as much more noise as it
    takes.
    """
    noise = plan_tree_noise(budget.model_copy(update={"epsilon": tables}), n_columns, n_found)
    step = 1e-9
    while step < 1.0:
        if least_epsilon(compose_events(noise, rows), budget.delta) <= budget.epsilon:
            return noise
        noise, step = scale_noise(noise, 1.0 + step), 2.0 * step
    what = f"an ε of {rows.epsilon:g} a row cannot be composed with a δ"
    raise SpecError(what, "`epsilon`", "lower it, or set `delta` to 0")


def scale_noise(noise: MarginalNoise, factor: float) -> MarginalNoise:
    """Return the noise of a tree's tables with all scales multiplied by a factor."""
    scaled: Json = {}
    for part in ("one_way", "pairs", "chosen", "cells"):
        event = getattr(noise, part)
        if event is not None:
            name = "scale" if hasattr(event, "scale") else "sigma"
            scaled[part] = replace(event, **{name: getattr(event, name) * factor})
    return replace(noise, **scaled)


def compose_events(noise: MarginalNoise, rows: LocalRelease | None) -> Composed:
    """Return the noise on every table, and the rows' own releases, unless they depend on no value."""
    events = noise.event.events
    return (
        Composed(events=events)
        if rows is None
        else Composed(events=(*events, rows), unit=rows.unit)
    )


def measure_tree(
    counts: MarginalCounts, planned: MarginalNoise, *, rng: Rng | None = None
) -> NoisyMarginals:
    """Return the tables with their noise, the tree's edges (parent, column) as chosen ones.

    On the driver, once, after the charge; `rng` is as in `privacy.noise`.

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
    if planned.chosen is None:
        return noisy
    names = noisy.domain.names
    edges = [(1, 0)] if len(names) == 2 else dependence_tree(denoise(noisy))
    chosen = tuple((names[parent], names[column]) for column, parent in edges if parent >= 0)
    return measure_chosen(noisy, counts, chosen, rng=rng)


def clean_tables(
    noisy: NoisyMarginals,
) -> tuple[Mapping[str, Floats], Mapping[Clique, Floats]]:
    """Return the cleaned counts of each column and each edge (parent, column): post-processing.

    Non-negative; one-way ones sum to the number of rows, and are the margins of the others.
    """
    cleaned, place = denoise(noisy), noisy.domain.position
    one_way = dict(zip(noisy.domain.names, cleaned.one_way, strict=True))
    return one_way, {edge: cleaned.table(place(edge[0]), place(edge[1])) for edge in noisy.cliques}


# ---- the fit: from the noisy tables alone


def check_tree(
    cells: CutColumns,
    channel: ChannelKind,
    given_costs: Mapping[str, Cost] | None = None,
) -> None:
    """Check, before any row is read, that a tree of these columns can be fitted whatever it joins.

    Raises
    ------
    SpecError
        If the channels may be too many to hold, the optimal channel has too many levels, or a cost
        does not fit; the line names the column.
    """
    sizes = {name: column.size for name, column in cells.items()}
    total = 0
    for name, size in sizes.items():
        widest = max((other for parent, other in sizes.items() if parent != name), default=1)
        n_weights = widest * (size << max(1, (size - 1).bit_length()))
        total += n_weights
        if n_weights > MAX_WEIGHTS:
            others = f"given the {widest:,} of another column"
            what = f"its {size:,} cells, {others}, need more channels than can be held"
            mend = "lower `reference.bins` for them, or declare fewer levels"
            raise SpecError(what, f"column {name!r}", mend)
        if channel == "optimal" and size > MAX_OPTIMAL_LEVELS:
            most = f"the optimal channel is solved for at most {MAX_OPTIMAL_LEVELS}"
            mend = "lower `reference.bins` for it, or take the channel laplace-calibrated"
            raise SpecError(f"has {size:,} cells, and {most}", f"column {name!r}", mend)
    if total > MAX_WEIGHTS:
        each = "the channels of all columns, each given the widest other one"
        mend = "lower `reference.bins`, declare fewer levels, or drop a column"
        where = f"column {max(sizes, key=sizes.__getitem__)!r}"
        raise SpecError(f"{each}, may be more than can be held", where, mend)
    wanted = given_costs or {}
    check_costs(wanted, cells, channel)
    for name, cost in wanted.items():
        _cost(cells[name], np.full(sizes[name], 1.0 / sizes[name]), cost)


def fit_tree(
    noisy: NoisyMarginals,
    cells: CutColumns,
    epsilons: Mapping[str, float],
    channel: ChannelKind = "laplace",
    given_costs: Mapping[str, Cost] | None = None,
) -> TreeRelease:
    """Return the release along a tree whose tables were measured; nothing else is used of the rows.

    Parent levels with less than a thousandth of the rows take the calibrated channel in place of
    the optimal one, and so do the rarest ones where all programs together would take more than some
    minutes.

    Privacy
    -------
    Post-processing of the tables. Every channel's ε* is computed from the whole numbers that are
    drawn from, and is at most its column's ε whatever the tables are.

    Notes
    -----
    1. The cleaned tables (`clean_tables`), and from them P(k | a) along the tree. 2. From the roots
    on: W(a, b) is the probability that a row's own parent level is a and the released one b; V(k, b)
    = Σ_a W(a, b) P(k | a) is that of own level k beside released parent level b, whose margin is
    P(b). The channel of b takes the distribution V(·, b) / P(b) to P(· | b), so a released pair has
    its fitted table exactly, for rows that follow the tree. 3. With the channels T[b], W(k, j) =
    Σ_b V(k, b) T[b][k, j] is used for the column's own children.
    """
    check_tree(cells, channel, given_costs)
    tables, names = _conditionals(noisy), noisy.domain.names
    parents = {child: parent for parent, child in noisy.cliques}
    # each column after its parent, those without one first
    tree = [*((name, None) for name in names if name not in parents), *parents.items()]
    solved = {name: np.ones(len(table), dtype=np.bool_) for name, table in tables.items()}
    if channel == "optimal":
        solved = _choose_solved(tree, tables)
    columns: dict[str, TreeColumn] = {}
    joint: dict[str | None, Floats] = {None: np.ones((1, 1))}
    for name, parent in tree:
        own, cut = tables[name].T @ joint[parent], cells[name]
        cost = (given_costs or {}).get(name)
        parts = _fit_channels(cut, own, tables[name], solved[name], epsilons[name], channel, cost)
        weights = np.stack([part.weights for part in parts])
        joint[name] = np.einsum("kb,bkj->kj", own, weights * 2.0**-TOTAL_BITS)
        found = cut.found
        columns[name] = TreeColumn(
            parent=parent,
            weights=weights,
            edges=cut.edges,
            possible=cut.possible,
            fine_edges=cut.edges if found is None else found.edges,
            masses=np.zeros(max(len(cut.edges) - 1, 0)) if found is None else found.masses,
            epsilon=float(max(part.epsilon for part in parts)),
            solved=min(1.0, float(own.sum(axis=0)[solved[name]].sum())),
        )
    return TreeRelease(columns=columns)


def _conditionals(noisy: NoisyMarginals) -> dict[str, Floats]:
    """Return the distribution of each column's levels, a row for each level of its parent."""
    one_way, edges = clean_tables(noisy)
    parents = {child: parent for parent, child in edges}
    tables: dict[str, Floats] = {}
    for name, counts in one_way.items():
        own = counts[None, :]
        found = edges[parents[name], name] if name in parents else own
        # no row is released with a parent of probability 0
        shares = np.where(found.sum(axis=1, keepdims=True) > 0.0, found, own)
        shares = shares / shares.sum(axis=1, keepdims=True)
        shares[shares < _EMPTY] = 0.0
        tables[name] = shares / shares.sum(axis=1, keepdims=True)
    return tables


def _choose_solved(
    tree: Sequence[tuple[str, str | None]], tables: Mapping[str, Floats]
) -> dict[str, Flags]:
    """Return which parent levels' programs are solved: the most frequent, as the work allows."""
    shares: dict[str | None, Floats] = {None: np.ones(1)}
    parts: list[tuple[float, str, int, float]] = []
    for name, parent in tree:
        shares[name] = shares[parent] @ tables[name]
        targets = np.count_nonzero(tables[name], axis=1).astype(np.float64)
        work = (np.count_nonzero(shares[name]) * targets) ** 2
        parts += [
            (-float(share), name, level, float(work[level]))
            for level, share in enumerate(shares[parent])
            if share >= _LEAST_SHARE
        ]
    chosen = {name: np.zeros(len(table), dtype=np.bool_) for name, table in tables.items()}
    left = _MOST_WORK
    for _, name, level, part in sorted(parts):
        left -= part
        chosen[name][level] = left >= 0.0
    return chosen


def _fit_channels(
    column: Cells,
    own: Floats,
    table: Floats,
    solved: Flags,
    epsilon: float,
    channel: ChannelKind,
    cost: Cost | None,
) -> list[LevelChannel]:
    """Return the channel of each released parent level b: from own[:, b] to table[b]."""
    codec, order = column.codec, _in_order(column)
    ordered = codec.ordered
    shares = own.sum(axis=1)
    minimised = None
    if channel == "optimal":
        minimised = _cost(column, shares[order] / shares.sum(), cost)
    found = []
    for level, target in enumerate(table):
        total = own[:, level].sum()
        if total == 0.0:  # never released: no row draws from it
            weights = channel_kernel.integer_weights(np.tile(target, (column.size, 1)))
            found.append(LevelChannel(weights=weights, epsilon=0.0))
            continue
        source, to = own[order, level] / total, target[order]
        if minimised is not None and solved[level]:
            part = optimal(source, epsilon, minimised, ordered=ordered, target=to)
        else:
            make = laplace if channel == "laplace" else calibrate
            part = make(source, epsilon, ordered=ordered, target=to)
        weights = np.empty_like(part.weights)
        weights[np.ix_(order, order)] = part.weights
        found.append(LevelChannel(weights=weights, epsilon=part.epsilon))
    return found


def _in_order(column: Cells) -> Indices:
    """Return the possible cells as their values lie on the line, null first.

    An atom stands after the cell that it ends.
    """
    if column.codec.has_levels:
        return np.arange(column.size)
    nulls, atoms = int(column.codec.nulls), np.array(column.codec.atoms)
    ends = np.concatenate([np.full(nulls, -np.inf), atoms, column.edges[1:]])[column.possible]
    is_atom = (np.arange(len(column.possible)) < nulls + len(atoms))[column.possible]
    return np.lexsort((is_atom, ends))


def _cost(column: Cells, probabilities: Floats, cost: Cost | None) -> Floats:
    """Return what the optimal channel minimises, for the cells in the order of `_in_order`."""
    codec = column.codec
    if codec.has_levels:
        usual: Cost = "value" if codec.ordered else "zero-one"
        return level_cost(codec, probabilities, cost or usual)
    if cost not in (None, "rank"):
        what = "the cost of a continuous or mixed column is always rank"
        raise SpecError(what, f"`cost.{codec.name}`", "remove it")
    return compute_rank(probabilities)


@freeze_class
class TreeMechanism(DipMechanism):
    """Distribution-invariant privatisation along a tree: noisy tables of all rows, then each column given its parent."""

    release_type: ClassVar = TreeRelease

    @property
    def reference(self) -> Tree:
        """How the tables are cut, and which share of ε they take."""
        return cast("Tree", self.spec.reference)

    def check_epsilons(self) -> None:
        """Check that tables and rows compose to the budget; levels take any ε."""
        _ = self.noise

    @cached_property
    def noise(self) -> MarginalNoise:
        """The noise of every table."""
        n, rows = len(self.schema.privatised), self.row_event(self.row_total)
        return fit_tree_noise(self.budget, self.table_epsilon, n, rows, len(self._adaptive))

    @property
    def table_epsilon(self) -> float:
        """What the tables cost, with all of δ."""
        return self.reference.split(self.budget.epsilon)[0]

    @property
    def search(self) -> CellSearch | None:
        """What finds the cells of columns in a first round; see `Mechanism.search`."""
        event = None if self.found is not None else self.noise.cells
        if event is None:
            return None
        return CellSearch(names=self._adaptive, event=event, n_rows_public=True)

    @property
    def _adaptive(self) -> tuple[str, ...]:
        return list_adaptive(self.schema, self.reference.bins)

    @cached_property
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

    def cells(self, columns: Columns) -> CutColumns:
        """Return the cells of each privatised column; before they are found, as many as there may be."""
        return self.reference.cells(columns.codecs, self.found)

    def draw(self, counts: MarginalCounts, columns: Columns, noise: Noise) -> NoisyMarginals:
        """Draw the noise of the tables; see `Mechanism.draw`."""
        return measure_tree(counts, self.noise, rng=noise("marginals/noise"))

    def read_drawn(self, data: bytes, columns: Columns) -> NoisyMarginals:
        """Return the noisy tables that an earlier driver kept; see `Mechanism.read_drawn`."""
        found = NoisyMarginals.from_bytes(data, "the run's noisy tables")
        found.check(domain_of(self.cells(columns)), self.noise)
        return found

    def fit(self, counts: NoisyMarginals, columns: Columns, key: RunKey) -> TreeRelease:
        """Return the fitted release; see `Mechanism.fit`."""
        return fit_tree(
            counts, self.cells(columns), self.spending.row, self.spec.channel, self.spec.cost
        )

    def list_counts(self, drawn: NoisyMarginals, columns: Columns) -> Iterable[pa.Table]:
        """Return the noisy tables as they are published; see `Mechanism.list_counts`."""
        return drawn.list_counts(self.cells(columns))

    def accounting(self, release: TreeRelease) -> Json:
        """Return what was spent, for the card: never more than was promised."""
        if self.continued:
            return DipMechanism.accounting(self, release)
        # 0 where every column has one level
        rows = self.row_event(release.epsilon) if release.epsilon else None
        return {
            "composition": "noisy tables of all rows, and the rows of a unit; a row's ε* is the worst over all released rows",
            "epsilon_exact": least_epsilon(compose_events(self.noise, rows), self.budget.delta),
            "epsilon_tables": self.table_epsilon,
            "epsilon_row_exact": release.epsilon,
            "rows_per_unit": self.budget.rows_per_unit,
            "events": to_dict(self.event),
        }

    def audit(self, columns: Columns, card: Named | None) -> dict[str, Json]:
        """Return what is claimed and found, also of a whole row: of the released channels, or those of a simulated table; see `Mechanism.audit`."""
        channels: Channels = {}
        shown = (card or {}).get("columns", {})
        private = {name: each for name, each in shown.items() if each["role"] == "privatised"}
        source = "the released channels"
        if all("channels" in each for each in private.values()):
            channels = {
                name: (each["parent"], read_weights(each["channels"]))
                for name, each in private.items()
            }
        if not channels:  # not released, or too many to be shown
            cells, source = self.cells(columns), "a simulated table"
            rng = stream(RunKey.insecure(0), "audit/noise", "")
            noisy = measure_tree(_simulate(domain_of(cells)), self.noise, rng=rng)
            channels = self.fit(noisy, columns, RunKey.insecure(0)).channels
        claims = {**self.spending.row, WHOLE_ROW: self.row_total}
        exact = {name: max(map(channel_epsilon, each)) for name, (_, each) in channels.items()}
        exact[WHOLE_ROW] = worst_row(channels)
        digits = {name: within_digits(exact[name], claim) for name, claim in claims.items()}
        return list_audit(claims, digits, source)

    @property
    def description(self) -> TreeDescription:
        """What is said of it."""
        return TreeDescription(self)


@freeze_class(kw_only=False)
class TreeDescription(DipDescription):
    """What is said of rows that are randomised along a tree."""

    mechanism: TreeMechanism

    @property
    def how(self) -> str:
        """What is done, in a few words."""
        return f"{DipDescription.how.fget(self)} along a tree of noisy tables"  # type: ignore[attr-defined]  # a property

    def describe_joint(self, release: TreeRelease) -> Json:
        """Return what the card says about the columns' joint distribution."""
        return {
            "columns": "tree",
            "joint": self.mechanism.reference.joint,
            "edges": [list(edge) for edge in release.edges],
        }

    def describe_columns(self, release: TreeRelease, columns: Columns) -> dict[str, Json]:
        """Return each column's parent, exact ε*, cells and channels; see `DipMechanism.describe_columns`."""
        shown = sum(column.weights.size for column in release.columns.values()) <= MAX_SHOWN
        found: dict[str, Json] = {}
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

    def stages(self, columns: Columns) -> Sentences:
        """Return what a run does between the units' bounds and the commit, in words."""
        bound, names = self.mechanism, self.mechanism.schema.privatised
        n, per_unit = len(names), bound.budget.rows_per_unit
        spent = f"ε = {bound.table_epsilon:.6g}" + (", and all of δ" if bound.budget.delta else "")
        looks = "; a first look at all pairs chooses the tree, a second one measures its pairs"
        rows = "a row" if per_unit == 1 else f"each of {per_unit} rows"
        channels = f"the channels of each column, given its parent on the tree ({rows}: ε = {bound.row_total:.6g})"
        return (
            *(() if bound.search is None else (bound.search.stage,)),
            f"survey: read {', '.join(names)} once; count {n} one-way and {n * (n - 1) // 2} two-way tables of all rows, merged in a tree",
            f"fit: noise on the tables ({spent}){looks if n > 2 else ''}; {channels}; on the driver, written once",
            "write: randomise each fragment and stage its shards",
        )

    def cautions(self, columns: Columns, n_rows: int | None) -> Sentences:
        """Return what a steward should think of before a run, a δ that is too large for so many rows included."""
        bound = self.mechanism
        found = [
            *delta_warnings(bound.budget, n_rows),
            *DipDescription.cautions(self, columns, n_rows),
            *warn_of_far_cells(columns.codecs, bound.reference.bins),
        ]
        if n_rows and not bound.continued:
            # any pair may be an edge
            measured = MarginalNoise(one_way=bound.noise.one_way, pairs=bound.noise.chosen)
            sizes = {name: cells.size for name, cells in bound.cells(columns).items()}
            found += list_noisy_tables(measured, sizes, n_rows)
        return tuple(found)


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
