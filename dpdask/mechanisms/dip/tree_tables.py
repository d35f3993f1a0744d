"""The noisy tables of a tree of columns: a coarse measurement of all pairs chooses the tree, a finer one measures its edges."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from dpdask.errors import SpecError
from dpdask.mechanisms.marginals.denoise import denoise, dependence_tree
from dpdask.mechanisms.marginals.noise import NoisyMarginals, measure, measure_chosen
from dpdask.mechanisms.marginals.plan import MarginalNoise, draft, share_of_cells
from dpdask.privacy import Budget
from dpdask.privacy.accountant import epsilon as least_epsilon
from dpdask.privacy.accountant import scale_events
from dpdask.privacy.events import Adjacency, CentralEvent, Composed, LocalRelease
from dpdask.stats import Clique, MarginalCounts
from dpdask.streams import Rng

Floats = NDArray[np.float64]

# how the tables' part is shared: Laplace noise shares ε so, Gaussian noise the inverse of its variance
_ONE_WAY, _CHOOSING, _EDGES = 0.15, 0.15, 0.7
_FIRST_STEP = 1e-9  # relative: by how much noise grows until the accountant agrees that everything fits


def plan_tree_noise(budget: Budget, n_columns: int, n_found: int = 0) -> MarginalNoise:
    """Return the noise that spends a budget on the tables of a tree: Gaussian if there is a δ, otherwise Laplace.

    All pairs are measured, if there is something to choose, and then the tree's own once more: these are the chosen tables.

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
def _plan(epsilon: float, delta: float, adjacency: Adjacency, rows: int, n: int, n_found: int) -> MarginalNoise:
    counted = [(_ONE_WAY, n), (_CHOOSING if n > 2 else 0.0, n * (n - 1) // 2), (_EDGES, n - 1)]
    weight, n_vectors = share_of_cells(sum(share for share, count in counted if count), n_found, delta)
    counted.append((weight * n_vectors, n_vectors))
    drafts = [draft(delta, adjacency, rows, share / count, count) if share > 0.0 and count else None for share, count in counted]
    found = iter(scale_events([each for each in drafts if each is not None], epsilon, delta))
    one_way, pairs, edges, cells = (next(found) if each is not None else None for each in drafts)
    return MarginalNoise(one_way=one_way, pairs=pairs, chosen=edges, cells=cells)


def fit_tree_noise(budget: Budget, tables: float, n_columns: int, rows: LocalRelease, n_found: int = 0) -> MarginalNoise:
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
        noise, step = scale_noise(noise, 1.0 + step), 2.0 * step
    raise SpecError(f"an ε of {rows.epsilon:g} a row cannot be composed with a δ", "`epsilon`", "lower it, or set `delta` to 0")


def scale_noise(noise: MarginalNoise, factor: float) -> MarginalNoise:
    """Return the noise of a tree's tables with all scales multiplied by a factor.

    Parameters
    ----------
    noise
        The noise.
    factor
        Positive.
    """
    one_way, pairs, chosen, cells = (_scale_event(event, factor) for event in (noise.one_way, noise.pairs, noise.chosen, noise.cells))
    return MarginalNoise(one_way=one_way, pairs=pairs, chosen=chosen, cells=cells)


def _scale_event(event: CentralEvent | None, factor: float) -> CentralEvent | None:
    if event is None:
        return None
    name = "scale" if hasattr(event, "scale") else "sigma"
    return replace(event, **{name: getattr(event, name) * factor})


def compose_events(noise: MarginalNoise, rows: LocalRelease | None) -> Composed:
    """Return what will happen: noise on every table, and the rows' own releases, unless they depend on no value.

    Parameters
    ----------
    noise
        The noise of the tables.
    rows
        The release of a unit's rows, or None.
    """
    return Composed(events=noise.event.events) if rows is None else Composed(events=(*noise.event.events, rows), unit=rows.unit)


def measure_tree(counts: MarginalCounts, planned: MarginalNoise, *, rng: Rng | None = None) -> NoisyMarginals:
    """Return the tables with their noise, the tree's edges (parent, column) as chosen ones: on the driver, once, after the charge.

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
    Unit, sensitivity, event: `MarginalNoise`. Protected: every row counted. Their number is public (replace-one).

    Notes
    -----
    The tree joins the pairs with the most mutual information, as far as the first look tells it from noise. A column that
    shows none stands alone.
    """
    noisy = measure(counts, planned, n_rows_public=True, rng=rng)
    return noisy if planned.chosen is None else measure_chosen(noisy, counts, _choose_edges(noisy), rng=rng)


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
    """
    cleaned = denoise(noisy)
    position = noisy.domain.position
    return dict(zip(noisy.domain.names, cleaned.one_way, strict=True)), {
        edge: cleaned.table(position(edge[0]), position(edge[1])) for edge in noisy.cliques
    }
