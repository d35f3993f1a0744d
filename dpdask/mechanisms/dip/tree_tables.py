"""The noisy tables of a tree of columns: a coarse measurement of all pairs chooses the tree, a finer one measures its edges."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from dpdask.errors import SpecError
from dpdask.kernels import tables as tables_kernel
from dpdask.mechanisms.marginals.denoise import Denoised, denoise, dependence_tree
from dpdask.mechanisms.marginals.noise import MarginalNoise, NoisyMarginals, draft, measure, share_of_cells
from dpdask.privacy import Budget, noise
from dpdask.privacy.accountant import epsilon as least_epsilon
from dpdask.privacy.accountant import scale_events
from dpdask.privacy.events import Adjacency, CentralEvent, Composed, LocalRelease
from dpdask.privacy.noise import deviation
from dpdask.stats import Clique, MarginalCounts

Floats = NDArray[np.float64]

# how the tables' part is shared: Laplace noise shares ε so, Gaussian noise the inverse of its variance
_ONE_WAY, _CHOOSING, _EDGES = 0.15, 0.15, 0.7
_FIRST_STEP = 1e-9  # relative: by how much noise grows until the accountant agrees that everything fits


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeNoise:
    """The noise of every table, decided before any is drawn.

    Attributes
    ----------
    one_way
        The noise of each column's own table.
    choosing
        The noise of each two-way table from which the tree is chosen; None if there is nothing to choose.
    cells
        The noise of the fine counts that cells are found from; None if no cells are found.
    edges
        The noise of the tree's own pairs, which are measured once more: at most one fewer than columns; None for a single column.

    Privacy
    -------
    Unit and adjacency: the budget's. Sensitivity of one table: as for `MarginalNoise`. Which pairs `edges` is drawn for
    depends on what `choosing` gave, but how many and with which noise does not, so the events compose as if it did not.
    """

    one_way: CentralEvent
    choosing: CentralEvent | None
    edges: CentralEvent | None
    cells: CentralEvent | None = None

    @property
    def event(self) -> Composed:
        """What will happen."""
        return Composed(events=tuple(event for event in (self.cells, self.one_way, self.choosing, self.edges) if event is not None))

    @property
    def first(self) -> MarginalNoise:
        """What is drawn before the tree is known."""
        return MarginalNoise(one_way=self.one_way, pairs=self.choosing, cliques={})

    def with_edges(self, edges: tuple[Clique, ...]) -> MarginalNoise:
        """Return the noise of all tables, the tree's edges among them."""
        once = {} if self.edges is None else dict.fromkeys(edges, replace(self.edges, count=1))
        return MarginalNoise(one_way=self.one_way, pairs=self.choosing, cliques=once)

    def scale_by(self, factor: float) -> TreeNoise:
        """Return the noise with all scales multiplied by a factor."""
        more = [None if event is None else _scale(event, factor) for event in (self.one_way, self.choosing, self.edges, self.cells)]
        assert more[0] is not None
        return TreeNoise(one_way=more[0], choosing=more[1], edges=more[2], cells=more[3])


def _scale(event: CentralEvent, factor: float) -> CentralEvent:
    name = "scale" if hasattr(event, "scale") else "sigma"
    return replace(event, **{name: getattr(event, name) * factor})


def plan_tree_noise(budget: Budget, n_columns: int, n_found: int = 0) -> TreeNoise:
    """Return the noise that spends a budget on the tables of a tree: Gaussian if there is a δ, otherwise Laplace.

    Parameters
    ----------
    budget
        ε and δ of the tables, adjacency and unit.
    n_columns
        How many columns there are, at least one.
    n_found
        The number of columns whose cells are found; as for `plan_noise`.

    Notes
    -----
    15 % goes to the one-way tables, as much to choosing, and the rest to the tree's edges, each of which has then far less
    noise than if all pairs had as much: on the 14 columns of Adult, little is gained or lost by shares near these.
    """
    rows = budget.unit_column.max_rows if budget.unit_column is not None else 1
    return _plan(budget.epsilon, budget.delta, budget.adjacency, rows, n_columns, n_found)


@functools.lru_cache(maxsize=64)
def _plan(epsilon: float, delta: float, adjacency: Adjacency, rows: int, n: int, n_found: int) -> TreeNoise:
    counted = [(_ONE_WAY, n), (_CHOOSING if n > 2 else 0.0, n * (n - 1) // 2), (_EDGES, n - 1)]
    weight, n_vectors = share_of_cells(sum(share for share, count in counted if count), n_found, delta)
    counted.append((weight * n_vectors, n_vectors))
    drafts = [draft(delta, adjacency, rows, share / count, count) if share > 0.0 and count else None for share, count in counted]
    found = iter(scale_events([each for each in drafts if each is not None], epsilon, delta))
    one_way, choosing, edges, cells = (next(found) if each is not None else None for each in drafts)
    assert one_way is not None
    return TreeNoise(one_way=one_way, choosing=choosing, edges=edges, cells=cells)


def fit_tree_noise(budget: Budget, tables: float, n_columns: int, rows: LocalRelease, n_found: int = 0) -> TreeNoise:
    """Return the noise of the tables that composes with the rows' own releases to the budget.

    Parameters
    ----------
    budget
        What is promised to the unit.
    tables
        What the tables may cost, with all of δ.
    n_columns
        How many columns there are.
    rows
        The release of a unit's rows.
    n_found
        The number of columns whose cells are found.

    Raises
    ------
    SpecError
        If a row's part is so large that the accountant proves nothing beside δ.

    Notes
    -----
    ε = ε_tables + max_rows · Σ ε_row, a sum that holds at any δ. The accountant composes the very events, and could round
    them to more than the sum: then the tables get as much more noise as it takes.
    """
    noise = plan_tree_noise(budget.model_copy(update={"epsilon": tables}), n_columns, n_found)
    step = _FIRST_STEP
    while step < 1.0:
        if least_epsilon(compose_events(noise, rows), budget.delta) <= budget.epsilon:
            return noise
        noise, step = noise.scale_by(1.0 + step), 2.0 * step
    raise SpecError(f"an ε of {rows.epsilon:g} a row cannot be composed with a δ", "`epsilon`", "lower it, or set `delta` to 0")


def compose_events(noise: TreeNoise, rows: LocalRelease | None) -> Composed:
    """Return what will happen: noise on every table, and the rows' own releases, unless they depend on no value.

    Parameters
    ----------
    noise
        The noise of the tables.
    rows
        The release of a unit's rows, or None.
    """
    return Composed(events=noise.event.events) if rows is None else Composed(events=(*noise.event.events, rows), unit=rows.unit)


def measure_tree(counts: MarginalCounts, planned: TreeNoise, *, rng: Generator | None = None) -> NoisyMarginals:
    """Return the tables with their noise, the tree's edges (parent, column) as cliques: on the driver, once, after the charge.

    Parameters
    ----------
    counts
        Exact one-way and two-way tables of all released rows.
    planned
        The noise.
    rng
        None: secure noise. A stream: INSECURE, for runs marked so; see `privacy.noise`.

    Privacy
    -------
    Unit, sensitivity, event: `TreeNoise`. Protected: every row counted. Their number is public (replace-one).

    Notes
    -----
    The tree joins the pairs with the most mutual information, as far as the first look tells it from noise. A column that
    shows none stands alone.
    """
    noisy = measure(counts, planned.first, n_rows_public=True, rng=rng)
    edges = _choose_edges(noisy)
    measured = {} if planned.edges is None else {edge: noise.perturb(counts.table(edge), replace(planned.edges, count=1), rng=rng) for edge in edges}
    return NoisyMarginals(
        domain=noisy.domain, n_rows=noisy.n_rows, noise=planned.with_edges(edges), one_way=noisy.one_way, pairs=noisy.pairs, cliques=measured
    )


def _choose_edges(noisy: NoisyMarginals) -> tuple[Clique, ...]:
    names = noisy.domain.names
    if len(names) == 2:
        return ((names[0], names[1]),)
    return tuple((names[parent], names[attribute]) for attribute, parent in dependence_tree(denoise(noisy)) if parent >= 0)


def find_tree(noisy: NoisyMarginals) -> list[tuple[str, str | None]]:
    """Return (column, parent) for each column of a measured tree, each after its parent; those without one first."""
    edges = list(noisy.cliques)
    given = {child for _, child in edges}
    return [*((name, None) for name in noisy.domain.names if name not in given), *((child, parent) for parent, child in edges)]


def clean_tables(noisy: NoisyMarginals) -> tuple[Mapping[str, Floats], Mapping[Clique, Floats]]:
    """Return the cleaned counts of each column and each edge of the tree: post-processing.

    Returns
    -------
    one_way
        For each column, float64 array, non-negative, summing to the number of rows.
    edges
        For each edge (parent, column), float64 array of shape (n_parent_levels, n_levels), non-negative, with the two
        columns' counts as margins.

    Notes
    -----
    A column's counts are averaged, by inverse variance, with the sums of its edges' tables, and both looks at an edge
    likewise; then as in `denoise`: consistency, the noise taken out, and raking.
    """
    cleaned = denoise(replace(noisy, noise=replace(noisy.noise, cliques={}), one_way=_with_edges(noisy), cliques={}))
    one_way = dict(zip(noisy.domain.names, cleaned.one_way, strict=True))
    return one_way, {edge: _edge(noisy, cleaned, edge) for edge in noisy.cliques}


def _with_edges(noisy: NoisyMarginals) -> NDArray[np.int64]:
    """Return the one-way tables, averaged with the sums of the tree's edges and rounded to whole counts."""
    assert noisy.noise.one_way is not None
    names, sizes = noisy.domain.names, noisy.domain.sizes
    precision = deviation(noisy.noise.one_way) ** -2.0
    totals = dict(zip(names, np.split(noisy.one_way * precision, np.cumsum(sizes)[:-1]), strict=True))
    weights = dict.fromkeys(names, precision)
    for edge, table in noisy.cliques.items():
        for axis, name in enumerate(edge):
            precision = deviation(noisy.noise.cliques[edge]) ** -2.0 / table.shape[1 - axis]
            totals[name], weights[name] = totals[name] + precision * table.sum(axis=1 - axis), weights[name] + precision
    means: NDArray[np.int64] = np.rint(np.concatenate([totals[name] / weights[name] for name in names])).astype(np.int64)
    return means


def _edge(noisy: NoisyMarginals, cleaned: Denoised, edge: Clique) -> Floats:
    precision = deviation(noisy.noise.cliques[edge]) ** -2.0
    table, total = noisy.cliques[edge] * precision, precision
    if noisy.noise.pairs is not None:
        precision = deviation(noisy.noise.pairs) ** -2.0
        table, total = table + replace(noisy, cliques={}).table(edge) * precision, total + precision
    rows, columns = (cleaned.one_way[noisy.domain.position(name)][None, :] for name in edge)
    found = tables_kernel.estimate(table[None] / total, rows, columns, noisy.n_rows, total**-0.5)
    raked: Floats = tables_kernel.rake(found, rows, columns)[0]
    return raked
