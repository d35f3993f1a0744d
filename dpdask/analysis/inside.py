"""What a table of cells says of values inside its cells: how groups lean there, and slopes, by a normal copula of the table's columns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from dpdask.analysis.values import find_levels, to_numbers
from dpdask.errors import SpecError
from dpdask.inference.placed import UNRESOLVED, Axis, PlacedTable, count_points, find_slope
from dpdask.inference.tallies import Codes, Floats, add_up

Points = Any  # those of `analysis.points`, which imports this
MODEL = "inside a cell, columns are assumed to depend on each other as in a normal copula; the bound on the bias is half the difference to no dependence there"
NOT_TOLD = "a large part of the spread of a column lies inside one cell, or many of its rows at one place of it: the cells do not show how it depends on others, so no bound on the bias of a slope is known"
NO_VARIANCE = "the variance of the feature cannot be told from the noise"
_SPIKES = 0.25  # the share of the rows that stand out of the cells beside theirs
_SURE = 4.0  # standard deviations of its noise that the variance of a feature has at least


def lay_out(points: Points, names: Sequence[str]) -> tuple[PlacedTable, list[Codes]]:
    """Return the table of the cells of some columns, and the cell of each point in each of them; -1 of those without a number.

    Texts are in the order of the mean score of the first column, which holds numbers.
    """
    codes, cells = list[Codes](), list[Floats]()
    for name in names:
        x = _read(points, name)
        ends = np.column_stack(points.ends.get(name, (x, x)))
        known = np.isfinite(ends).all(axis=1)
        found, inverse = np.unique(ends[known], axis=0, return_inverse=True)
        code = np.full(len(ends), -1, dtype=np.int64)
        code[known] = inverse.ravel()
        total = add_up(x[known], code[known], len(found))
        codes.append(code)
        cells.append(np.column_stack([total / np.bincount(code[known]), found]))
    here = (np.column_stack(codes) >= 0).all(axis=1)
    shape = tuple(len(each) for each in cells)
    flat = np.ravel_multi_index([code[here] for code in codes], shape)
    counts = add_up(points.weights[here], flat, math.prod(shape)).reshape(shape)
    axes = list[Axis]()
    for place, (name, n_each) in enumerate(zip(names, count_points(shape), strict=True)):
        others = tuple(k for k in range(len(names)) if k != place)
        values = cells[place]
        if axes and _is_of_texts(points, name):
            score = axes[0].means(axes[0].scores)
            table = np.maximum(counts.sum(axis=tuple(k for k in others if k != 0)), 0.0)
            key = (score @ table) / np.maximum(table.sum(axis=0), 1.0)
            values = np.repeat(key[:, None], 3, axis=1)
        rows, fine = counts.sum(axis=others), points.fine.get(name)
        mean, low, high = values.T
        axes.append(Axis.of(mean, low, high, rows, n_each=n_each, fine=fine))
    return PlacedTable(axes=axes, counts=counts), codes


def _is_of_texts(points: Points, name: str) -> bool:
    return any(isinstance(level, str) for level in points.levels.get(name, ()))


def _read(points: Points, name: str) -> Floats:
    """Return the number of each point, of a column of texts the place of its level."""
    if _is_of_texts(points, name):
        return find_levels(points.frame[name], points.levels[name], name).astype(np.float64)
    return to_numbers(points.frame[name], name)


def lean(
    points: Points, name: str, by: str, within: tuple[float, float], beyond: Floats | float
) -> tuple[Floats, Floats] | None:
    """Return how far the mean of each point's rows is from that of its cell, in its group; and how far more it may be. None if no model says so."""
    table, (code, group) = lay_out(points, [name, by])
    here = (code >= 0) & (group >= 0)
    values = table.at_points(0, np.clip(table.axes[0].values, *within))
    even = table.average(values, table.even)
    moved, more = np.zeros(len(code)), np.zeros(len(code))
    spikes = find_spikes(points, name, table.counts.sum(axis=1))
    if table.axes[0].unresolved <= UNRESOLVED and spikes.sum() <= _SPIKES:
        moved[here] = (table.average(values, table.leaning) - even)[code[here], group[here]]
        low, high = (np.clip(each, *within) for each in points.ends[name])
        rows = np.maximum(table.counts.sum(axis=1) / table.counts.sum(), 1e-9)
        part = np.minimum(spikes / rows, 1.0)
        more[here] = ((high - low)[here] / 2.0) * part[code[here]]
        off, of_cells = np.broadcast_to(beyond, here.shape), np.zeros(table.axes[0].n_cells)
        of_cells[code[here]] = off[here]
        return moved, more + off if is_far(of_cells, table.axes[0]) else more
    if name not in points.fine:
        return None
    # the mean of a part q of rows with the standard deviation s is at most s √((1 - q) / q) off
    spread = np.sqrt(np.maximum(table.average(values**2, table.even) - even**2, 0.0))
    every = np.maximum(table.counts.sum(axis=1, keepdims=True), 1.0)
    q = np.clip(table.counts / every, 1e-6, 1.0)
    low, high = (np.clip(each, *within) for each in points.ends[name])
    most = (spread * np.sqrt((1.0 - q) / q))[code[here], group[here]]
    more[here] = np.minimum(most + np.broadcast_to(beyond, here.shape)[here], (high - low)[here])
    return moved, more


def find_spikes(points: Points, name: str, rows: Floats) -> Floats:
    """Return the share of the rows of each cell that stands out of the line through the cells beside it, beyond the noise.

    Of a column whose cells were found, fine counts say where rows are; of others, a peak in one
    cell says that many may have one value, anywhere in it.
    """
    found = np.zeros(len(rows))
    if name in points.fine or name not in points.ends or len(rows) < 3:
        return found
    ends = np.column_stack(points.ends[name])
    cells = np.unique(ends[np.isfinite(ends).all(axis=1)], axis=0)
    line = np.flatnonzero(cells[:, 0] < cells[:, 1])
    share, around = rows[line] / rows.sum(), np.zeros(len(line))
    if len(line) < 3:
        found[line] = share
        return found
    around[1:-1] = (share[:-2] + share[2:]) / 2.0
    around[[0, -1]] = 2.0 * share[[1, -2]]
    noise = points.noise([name]) if points.noise is not None else None
    n_each = 1.0 if noise is None else noise.n_cells / len(rows)
    doubt = 2.0 * math.sqrt((noise.variance if noise else 0.0) * n_each * 1.5)
    found[line] = np.maximum(np.abs(share - around) - doubt, 0.0) * (share > 0.0)
    return found


def is_resolved(points: Points, table: PlacedTable, place: int, name: str) -> bool:
    """Return whether cells tell what a column depends on."""
    axis = table.axes[place]
    others = tuple(k for k in range(len(table.axes)) if k != place)
    spikes = find_spikes(points, name, table.counts.sum(axis=others))
    return axis.unresolved <= UNRESOLVED and float(spikes.sum()) <= _SPIKES


def is_far(beyond: Floats, axis: Axis) -> bool:
    """Return whether the places of cells, each as much further off as it may be, would have a large part of the variance of a column."""
    rows = np.bincount(axis.cell, weights=axis.masses)
    centre = float(axis.masses @ axis.values)
    every = float(axis.masses @ (axis.values - centre) ** 2)
    return bool((rows * beyond**2).max() > UNRESOLVED * every)


def find_slope_of_table(
    points: Points, response: str, feature: str
) -> tuple[float, float, float | None, str]:
    """Return the slope of a table of two columns, its standard error, the bound on its bias and what limits it."""
    names = [response, feature]
    table, codes = lay_out(points, names)
    found = find_slope(table)
    here = (codes[0] >= 0) & (codes[1] >= 0)
    rows = table.counts / table.counts.sum()
    known = float(table.counts.sum() / points.weights.sum())
    cells = points.noise(names) if points.noise is not None else None
    each = 0.0 if cells is None else cells.variance / known**2

    def at_rows(influence: Floats) -> Floats:
        return np.where(here, influence[codes[0], codes[1]], 0.0)

    doubt = math.sqrt(each * float((at_rows(found.of_variance) ** 2).sum()))
    if not found.variance > _SURE * doubt:
        raise SpecError(
            NO_VARIANCE,
            f"slope({response}, {feature})",
            "use other columns, or release with a larger epsilon",
        )
    drawn = points.sampling / known * max(0.0, float((rows * found.influence**2).sum()))
    noise, is_told = each * float((at_rows(found.influence) ** 2).sum()), True
    # a variance that only the noise made large enough to be told makes the slope too flat; it may
    # be a standard error less, besides the errors (Fieller, 1954, has the whole set)
    bias = found.bias_bound + abs(found.estimate) * doubt / (found.variance - doubt)
    for place, (name, axis) in enumerate(zip(names, table.axes, strict=True)):
        _, doubts, beyond = points.place(name, (-math.inf, math.inf))
        of_cells = np.zeros((2, axis.n_cells))
        of_cells[:, codes[place][here]] = [
            np.broadcast_to(part, here.shape)[here] for part in (doubts, beyond)
        ]
        # the mean of a cell at an end is off to one side, the outer one: noise far out draws it
        moved = math.sqrt(float(((of_cells[0] * found.of_means[place]) ** 2).sum()))
        noise, bias = noise + moved**2, bias + moved
        is_told &= is_resolved(points, table, place, name) and not is_far(of_cells[1], axis)
    error = math.sqrt(drawn + noise)
    if not is_told:
        return found.estimate, error, None, NOT_TOLD
    return found.estimate, error, bias, MODEL
