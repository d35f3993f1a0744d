"""Noisy tables of persons and their rows, and what can be believed of them; denoising is post-processing."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

import numpy as np

from dpdask.archive import Json, require
from dpdask.arrays import Floats, freeze_class
from dpdask.kernels import marginals as kernel
from dpdask.kernels.channel import project
from dpdask.steps import step

Key = tuple[Any, ...]

_NEARLY_ALL = 0.999
_UNTOLD = 2.0  # standard deviations of the noise of a number of persons
_GRID = 201
_HALVED = 2.0**-0.5
_CORRECTIONS = 3
_LOUD = 0.25  # standard deviation of the noise of a covariance at which it is half believed
MOST_LEVELS = 2**16  # of all columns of a table: levels are numbered through


@freeze_class(eq=False)
class Persons:
    """Which columns persons and their rows have, and how many persons there are."""

    parent_sizes: tuple[int, ...]  # levels of each parent column; the last is the number of bands
    child_sizes: tuple[int, ...]  # levels of each child column
    # The least number of rows of each band, rising from 0; a band ends before the next one's least,
    # the last at `max_rows`.
    band_edges: tuple[int, ...]
    max_rows: int  # of a person
    n_persons: float  # exact where it is public, otherwise an estimate

    @property
    def sizes(self) -> Json:
        """These numbers by their names."""
        return {field.name: getattr(self, field.name) for field in fields(Persons)}

    def check_sizes(self) -> None:
        """Check that there are such columns and bands."""
        every = (self.parent_sizes, self.child_sizes, self.band_edges)
        is_whole = all(type(number) is int for sizes in every for number in (*sizes, self.max_rows))
        require(is_whole and all(every), "there is no parent or child column, or no whole number")
        for sizes in every[:2]:
            is_held = min(sizes) >= 1 and sum(sizes) <= MOST_LEVELS
            require(is_held, "a column has no level, or the columns have too many")
        n_edges = self.parent_sizes[-1] if self.band_edges[0] == 0 else -1
        require(len(self.band_edges) == n_edges, "there is not one edge for each band, from 0")
        rises = np.diff((*self.band_edges, self.max_rows + 1))
        require((rises >= 1).all() and self.max_rows >= 1, "the edges of bands do not rise")


@freeze_class(eq=False)
class PersonTables(Persons):
    """Noisy tables of persons and their rows; each person weighs at most 1 in every table.

    A person is one row of the parent table and at most `max_rows` rows of the child table. All
    columns are codes: levels or cells, 0 to the column's size less 1. The last parent column is the
    band in which the person's number of rows lies.

    Privacy
    -------
    Safe to publish: noise of the standard deviations `sigmas` is in every cell. Whoever counts the
    tables charges for them; see the notes for a person's part in each.

    Notes
    -----
    A person of k rows adds to the tables, for parent columns a < b and child columns c < d:

    - ``("PP", a, b)``, of shape (size of a, size of b): 1 in one cell. ``("PP", 0)``, if the band
      is the only parent column: 1 in one cell.
    - ``("CC", c, d)`` and ``("PC", a, c)``: 1/k in the cell of each row; nothing if k = 0.
      ``("CC", 0)``, if there is one child column.
    - ``("WW", c, d)`` and ``("WW", c, c)``: 1/(k(k-1)) in the cell of each ordered pair of two
      different rows, column c of the first and column d of the second; nothing if k < 2.
    - ``("H",)``, of shape (max_rows + 1,): 1 at k.
    - ``("F", c)``, of shape (number of bands,): 1 at the person's band if k >= 2 and all rows agree
      in column c. A band of persons with fewer rows stays 0.

    Not every table need be there but ``("H",)``, one with each parent column (PP) and one with each
    child column (CC or WW); pairs that are not measured follow from the model.
    """

    tables: Mapping[Key, Floats]  # float64 arrays; cells may be negative
    # The standard deviation of the noise in a cell, of each group of tables that is there: "PP",
    # "CC", "PC", "WW", "H" and "F".
    sigmas: Mapping[str, float]
    # Of each child column, a number for each level if levels have an order, such as the middle of a
    # cell (nan for null); None if they have none. Between-person variances and covariances of
    # these numbers are kept as measured.
    child_scores: tuple[Floats | None, ...] = ()

    def shape_of(self, key: Key) -> tuple[int, ...]:
        """Return the shape that a table has; KeyError if there is no such table."""
        group, *columns = key
        if key == ("H",):
            return (self.max_rows + 1,)
        sides = {
            "PP": (self.parent_sizes, self.parent_sizes),
            "CC": (self.child_sizes, self.child_sizes),
            "PC": (self.parent_sizes, self.child_sizes),
            "WW": (self.child_sizes, self.child_sizes),
            "F": (self.child_sizes,),
        }.get(group, ())
        is_lone = group in ("PP", "CC") and columns == [0] and len(sides[0]) == 1
        if len(columns) != len(sides) and not is_lone:
            raise KeyError(key)
        if not columns or not all(
            type(column) is int and 0 <= column < len(side)
            for side, column in zip(sides, columns, strict=False)
        ):
            raise KeyError(key)
        if len(columns) == 2 and group != "PC" and columns[0] + (group != "WW") > columns[1]:
            raise KeyError(key)
        if group == "F":
            return (len(self.band_edges),)
        return tuple(side[column] for side, column in zip(sides, columns, strict=False))

    def list_group(self, group: str) -> Iterator[tuple[Key, Floats]]:
        """Return the tables of a group, by their keys."""
        return ((key, table) for key, table in self.tables.items() if key[0] == group)

    def check(self) -> None:
        """Check that tables and their noise are those of the columns, and that there are enough."""
        self.check_sizes()
        for key, table in self.tables.items():
            is_typed = table.dtype == np.float64 and table.shape == self.shape_of(key)
            require(is_typed, "a table has another shape than its columns give it")
            require(np.isfinite(table).all(), "a table holds something else than numbers")
            noise = self.sigmas.get(key[0], -1.0)
            require(noise >= 0.0, "a table has no standard deviation of its noise")
        parents = {column for key, _ in self.list_group("PP") for column in key[1:]}
        children = {key[-1] for key, _ in self.list_group("PC")}
        children |= {column for key, _ in self.list_group("CC") for column in key[1:]}
        require(("H",) in self.tables, "there is no table of the persons' numbers of rows")
        n = len(self.parent_sizes), len(self.child_sizes)
        require((len(parents), len(children)) == n, "a column is in no table")
        scores = self.child_scores or (None,) * len(self.child_sizes)
        for own, size in zip(scores, self.child_sizes, strict=True):
            is_fit = own is None or (own.shape == (size,) and not np.isinf(own).any())
            require(is_fit, "a column has another number of levels than its numbers say")


@freeze_class(eq=False)
class DenoisedPersons:
    """What can be believed of noisy tables."""

    parents: list[Floats]  # of each parent column: its counts
    rows: list[Floats]  # of each child column: its counts, each person with rows weighing 1
    pairs: list[Floats]  # the same of persons with two rows or more
    counts: Floats  # float64 of shape (max_rows + 1,): persons of each number of rows
    tables: dict[Key, Floats]  # the denoised ones of PP, CC, PC and WW
    agreeing: Floats  # float64 of shape (n_bands, n_columns): shares of persons; nan if unknown
    # Float64 of shape (n_columns,): the share of persons who have but one level, however many rows.
    single: Floats


@step("fitting: the noisy tables")
def denoise_persons(noisy: PersonTables) -> DenoisedPersons:
    """Return consistent tables of persons.

    Notes
    -----
    As `denoise` of one table. Three totals: all persons, those with rows, and those with two or more.
    """
    n, edges = max(float(noisy.n_persons), 1.0), (*noisy.band_edges, noisy.max_rows + 1)
    parents = _average_sides(noisy, ("PP",), noisy.parent_sizes, n, of_persons=True)
    counts = _split_bands(noisy.tables[("H",)], edges, parents[-1])
    with_pairs = np.array(
        [counts[max(low, 2) : max(high, 2)].sum() for low, high in itertools.pairwise(edges)]
    )
    n_one, n_two = (max(float(counts[least:].sum()), 1.0) for least in (1, 2))
    # where all persons have rows, or two of them, as far as the noise tells, tables of rows tell of
    # all persons, too, and tables of pairs of rows of all rows
    little = _UNTOLD * noisy.sigmas["H"]
    have_one, have_two = (
        more - fewer <= max((1.0 - _NEARLY_ALL) * more, little)
        for more, fewer in ((n, n_one), (n_one, n_two))
    )
    if have_one:
        parents = _average_sides(noisy, ("PP", "PC"), noisy.parent_sizes, n, of_persons=True)
    rows = _average_sides(
        noisy, ("CC", "PC", "WW") if have_two else ("CC", "PC"), noisy.child_sizes, n_one
    )
    groups = ("WW", "CC", "PC") if have_two else ("WW",)
    pairs = _average_sides(noisy, groups, noisy.child_sizes, n_two)
    tables: dict[Key, Floats] = {}
    for key, table in noisy.list_group("PP"):
        if len(key) == 3:
            tables[key] = _denoise(table, parents[key[1]], parents[key[2]], noisy.sigmas["PP"])
    for key, table in noisy.list_group("CC"):
        if len(key) == 3:
            tables[key] = _denoise(table, rows[key[1]], rows[key[2]], noisy.sigmas["CC"])
    with_rows = [_keep_rows(tables, parents, a, edges, n_one) for a in range(len(parents))]
    for key, table in noisy.list_group("PC"):
        tables[key] = _denoise(table, with_rows[key[1]], rows[key[2]], noisy.sigmas["PC"])
    agreeing = _clean_flags(noisy, with_pairs)
    shares = np.nan_to_num(agreeing).T @ with_pairs / max(float(with_pairs.sum()), 1e-300)
    for key, _ in noisy.list_group("WW"):
        tables[key] = _denoise_pairs(noisy, key, tables, pairs, shares)
    single = np.zeros(len(noisy.child_sizes))
    for column in range(len(single)):
        if ("WW", column, column) in tables and not np.isnan(agreeing[:, column]).any():
            alike = float(np.trace(tables["WW", column, column])) / n_two
            single[column] = _find_single(agreeing[:, column], alike, counts, edges)
    return DenoisedPersons(
        parents=parents,
        rows=rows,
        pairs=pairs,
        counts=counts,
        tables=tables,
        agreeing=agreeing,
        single=single,
    )


def _average_sides(
    noisy: PersonTables,
    groups: tuple[str, ...],
    sizes: tuple[int, ...],
    total: float,
    *,
    of_persons: bool = False,
) -> list[Floats]:
    """Return the counts of each column by the sums of the tables it is in, weighted by inverse variance.

    A level whose cells are 0 in all of them is one that noise was not added to: it is impossible.
    """
    totals, weights = [np.zeros(size) for size in sizes], [0.0] * len(sizes)
    seen = [np.zeros(size, dtype=bool) for size in sizes]
    for group in groups:
        sigma = max(noisy.sigmas.get(group, 0.0), 1e-9)
        for key, table in noisy.list_group(group):
            for axis, column in enumerate(key[1:]):
                if group == "PC" and of_persons == bool(axis):
                    continue
                others = table.size // table.shape[axis]
                flat = np.moveaxis(table, axis, 0).reshape(len(seen[column]), -1)
                totals[column] += flat.sum(axis=1) / (sigma**2 * others)
                weights[column] += 1.0 / (sigma**2 * others)
                seen[column] |= (flat != 0.0).any(axis=1)
    found = []
    for own, weight, is_seen in zip(totals, weights, seen, strict=True):
        counts = np.zeros(len(own))
        is_possible = is_seen if is_seen.any() else ~is_seen
        counts[is_possible] = project(own[is_possible] / max(weight, 1e-300), total)
        found.append(counts)
    return found


def _split_bands(noisy: Floats, edges: tuple[int, ...], bands: Floats) -> Floats:
    """Return the persons of each number of rows, with the believed numbers of each band."""
    counts = np.zeros(len(noisy))
    for low, high, total in zip(edges[:-1], edges[1:], bands, strict=True):
        first = 1 if low == 0 and high > 1 and noisy[0] == 0.0 else low  # nobody without rows
        if total > 0.0:
            counts[first:high] = project(noisy[first:high], float(total))
    return counts


def _keep_rows(
    tables: Mapping[Key, Floats], parents: list[Floats], a: int, edges: tuple[int, ...], n: float
) -> Floats:
    """Return a parent column's counts of persons with rows."""
    last = len(parents) - 1
    own = parents[a]
    if edges[1] == 1:
        if a == last:
            own = np.concatenate([[0.0], own[1:]])
        elif ("PP", a, last) in tables:
            own = tables[("PP", a, last)][:, 1:].sum(axis=1)
    return own * (n / max(float(own.sum()), 1e-300))


def _denoise(
    table: Floats,
    rows: Floats,
    columns: Floats,
    sigma: float,
    known: Floats | float = 0.0,
) -> Floats:
    """Return a table with the noise taken out, and with the believed margins.

    Parameters
    ----------
    known
        A part of its departure from independence that is believed as it is.
    """
    margins = rows[None], columns[None]
    total, sigma, noisy = float(rows.sum()), max(sigma, 1e-9), (table - known)[None]
    # what is left of the noise by shrinkage is more than a dependence below it
    believed = kernel.independence(*margins, total)
    if kernel.tell_dependence(noisy, *margins, total, sigma)[0]:
        believed = kernel.estimate(noisy, *margins, total, sigma)
    return kernel.rake(believed + known, *margins)[0]


def _depart(table: Floats) -> Floats:
    """Return a table's departure from independence."""
    total = max(float(table.sum()), 1e-300)
    return table - np.outer(table.sum(axis=1), table.sum(axis=0)) / total


def _denoise_pairs(
    noisy: PersonTables,
    key: Key,
    cleaned: Mapping[Key, Floats],
    pairs: list[Floats],
    agreeing: Floats,
) -> Floats:
    """Return a table of pairs of rows with the noise taken out.

    Notes
    -----
    Persons whose rows all agree in both columns give the table of one row, which is diagonal for one
    column: of full rank, where `kernel.estimate` looks for low rank. How much of it there is (least
    squares, at most twice the share of such persons, because others agree nearly) is believed
    first. Last, the sum of products of the levels' numbers is made the noisy table's own: between-person
    variances would be lost with the weak part of a table.
    """
    _, c, d = key
    table, rows, columns = noisy.tables[key], pairs[c], pairs[d]
    total, sigma = float(rows.sum()), max(noisy.sigmas["WW"], 1e-9)
    likest = _depart(np.diag(rows)) if c == d else np.zeros_like(table)
    if c == d:
        table, sigma = (table + table.T) / 2.0, sigma * _HALVED
    elif ("CC", c, d) in cleaned:
        of_rows = cleaned[("CC", c, d)]
        likest = _depart(of_rows) * (total / max(float(of_rows.sum()), 1e-300))
    part = float((likest * table).sum()) / max(float((likest * likest).sum()), 1e-300)
    both = float(min(agreeing[c], agreeing[d]))
    likest *= min(max(part, 0.0), 2.0 * both, 1.0)
    believed = _denoise(table, rows, columns, sigma, likest)
    if c == d:
        believed = _drop_dislikes(believed, rows, sigma)
    if noisy.child_scores and not any(noisy.child_scores[e] is None for e in (c, d)):
        x, y = (_standardise(noisy.child_scores[e], pairs[e]) for e in (c, d))
        believed = _correct_moment(believed, table, sigma, (x, y), is_one=c == d)
    return (believed + believed.T) / 2.0 if c == d else believed


def _drop_dislikes(table: Floats, counts: Floats, sigma: float) -> Floats:
    """Return a symmetric table without the negative eigenvalues of its departure from independence that noise explains.

    Rows that a person's taste makes alike, and nothing else, have none.
    """
    independent = np.outer(counts, counts) / max(float(counts.sum()), 1e-300)
    departure = table - independent
    values, vectors = np.linalg.eigh((departure + departure.T) / 2.0)
    values[(values < 0.0) & (values > -2.0 * sigma * math.sqrt(len(counts)))] = 0.0
    left = independent + (vectors * values) @ vectors.T
    return kernel.rake(left[None], counts[None], counts[None])[0]


def _standardise(scores: Floats | None, counts: Floats) -> Floats:
    """Return the numbers of a column's levels with the mean 0 and the variance 1; 0 where there is none."""
    assert scores is not None
    is_known = ~np.isnan(scores)
    shares = counts * is_known / max(float(counts[is_known].sum()), 1e-300)
    values = np.where(is_known, scores, 0.0)
    values = np.where(is_known, values - float(shares @ values), 0.0)
    return values / max(math.sqrt(float(shares @ values**2)), 1e-300)


def _correct_moment(
    believed: Floats, table: Floats, sigma: float, scores: tuple[Floats, Floats], *, is_one: bool
) -> Floats:
    """Return a table with the covariance that the noisy one shows for numbers of mean 0 and variance 1.

    Notes
    -----
    The margins are those believed, so a mean that is taken off the numbers changes nothing but the
    noise. Where the noise of the covariance is not small beside 1, the believed one is kept in part; it
    stays above the least possible one and below 1. The variance of one column between persons is
    hardly ever 0, but most of the covariances of two columns are: of these what noise explains is left out.
    """
    x, y = scores
    rows, columns = believed.sum(axis=1), believed.sum(axis=0)
    total = float(rows.sum())
    u, v = x - x.mean(), y - y.mean()
    error = sigma * math.sqrt(float(u @ u) * float(v @ v)) / total
    direction = np.outer(rows * x, columns * y) / total
    spread = float(x @ direction @ y)
    before = float(x @ believed @ y) / total
    shift = float(u @ (table - believed) @ v) / total
    trust = 1.0 / (1.0 + (error / _LOUD) ** 2)
    if not is_one:
        trust = 1.0 - (error / shift) ** 2 if abs(shift) > error else 0.0
    wanted = min(max(before + trust * shift, 0.0 if is_one else -1.0), 1.0)
    for _ in range(_CORRECTIONS if spread > 0.0 else 0):
        missing = wanted * total - float(x @ believed @ y)
        believed = believed + missing / spread * direction
        believed = kernel.rake(believed[None], rows[None], columns[None])[0]
    return believed


def _clean_flags(noisy: PersonTables, with_pairs: Floats) -> Floats:
    """Return the share of each band's persons with two rows or more whose rows all agree in each column."""
    shares = np.full((len(with_pairs), len(noisy.child_sizes)), np.nan)
    for (_, column), table in noisy.list_group("F"):
        known = np.where(with_pairs > 0.0, table, 0.0) / np.where(with_pairs > 0.0, with_pairs, 1.0)
        shares[:, column] = np.clip(known, 0.0, 1.0)
    return shares


def _find_single(agreeing: Floats, alike: float, counts: Floats, edges: tuple[int, ...]) -> float:
    """Return the share of persons who have but one level, by how many agree among those with few rows and with many.

    Parameters
    ----------
    alike
        How often two rows of a person agree.

    Notes
    -----
    Two rows of the other persons agree with the probability r, so that all k rows of one of them do
    so by chance with about r^(k - 1). The share is the one of a grid with the least squares.
    """
    single = np.linspace(0.0, alike, _GRID)
    by_chance = (alike - single) / np.maximum(1.0 - single, 1e-9)
    missed = np.zeros(_GRID)
    for band, (low, high) in enumerate(itertools.pairwise(edges)):
        numbers = np.arange(max(low, 2), max(high, 2))
        persons = counts[numbers]
        expected = by_chance[:, None] ** (numbers - 1.0) @ persons
        found = agreeing[band] * float(persons.sum())
        missed += (single * float(persons.sum()) + (1.0 - single) * expected - found) ** 2
    return float(single[np.argmin(missed)])
