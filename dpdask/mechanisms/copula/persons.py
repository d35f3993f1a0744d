"""Persons with their rows: the noisy tables of two linked tables, and the two-level copula that fits them."""

from __future__ import annotations

import itertools
import math
from dataclasses import fields, replace
from typing import NamedTuple, Self

import numpy as np
import scipy  # its modules are imported when they are first used

from dpdask.archive import Contents, Json, Named, check_array, require
from dpdask.arrays import Bytes, Floats, Ints, Shorts, Singles, freeze_class
from dpdask.kernels import correlation as latent
from dpdask.kernels import decode, normal
from dpdask.kernels import persons as person_kernel
from dpdask.kernels import raking as raking_kernel
from dpdask.kernels.hashing import permutation
from dpdask.mechanisms.columns import CHUNK_ROWS
from dpdask.mechanisms.copula.model import (
    MAX_LATENTS,
    MIN_POOL,
    ROUNDING,
    Node,
    Targets,
    _order,
    check_kept,
    draw_latents,
    draw_uniforms,
    n_latents_of,
    read_factor,
    read_nodes,
    write_factor,
    write_nodes,
)
from dpdask.mechanisms.marginals.noise import check_n_rows
from dpdask.mechanisms.marginals.persons import (
    DenoisedPersons,
    Persons,
    PersonTables,
    denoise_persons,
)
from dpdask.privacy import noise
from dpdask.rules import CellRules
from dpdask.stats import Domain
from dpdask.steps import step
from dpdask.streams import Rng, RunKey, stream, words

_POOL = 4  # persons for each that is drawn
_MOST_TIMES, _LEAST_CANDIDATES = 4, 24  # candidates for each row, and for each person with rows
_SWEEPS = 8
_REDRAWN = 20  # times, of a row that breaks rules
_EMPTY = 1e-9  # a level's share below which it is never drawn
_LEAST_SHARED, _MOST_SHARED = 0.02, 0.98  # of a row's latent variable: the person's part
_FLOOR = 2e-3  # of eigenvalues
_SOME = 0.05  # of persons: so many have but one level that others are uneven
_UNEVEN = 0.8
_FIRMNESS = 40.0  # as of `Targets`


class Wanted(NamedTuple):
    """The tables that rows are settled by: shares of persons, levels of all columns numbered through; nan where nothing was measured."""

    rows: Floats
    """float64 of shape (n_levels, n_levels): of two columns of a row."""
    parents: Floats
    """float64 of shape (n_parent_levels, n_levels): of a parent column and a column of a row."""
    pairs: Floats
    """float64 of shape (n_levels, n_levels): of two different rows of a person."""

    def open_gaps(self, n_one: int, n_two: int) -> person_kernel.Gaps:
        """Return what is wanted of so many persons with rows, and with two or more, as gaps before any row is chosen."""
        parts = []
        for shares, n in ((self.rows, n_one), (self.parents, n_one), (self.pairs, n_two)):
            counts = np.nan_to_num(shares) * n
            weights = np.where(np.isnan(shares), 0.0, 1.0 / (counts + _SMALL))
            parts += [-counts, weights]
        return person_kernel.Gaps(*parts)


_SMALL = 1.0  # persons


@freeze_class(eq=False)
class PersonModel(Persons):
    """A fitted copula of persons and their rows: everything that drawing needs; all of it is a function of the noisy tables.

    Privacy
    -------
    Post-processing of `PersonTables`: it costs nothing more, may be published, and any number of
    persons may be drawn.

    Notes
    -----
    A person's latent variables are normal: one part for the parent columns, one part U for the
    child columns. A row's are U + E, with E new in each row. The covariance of U is what rows of
    one person share; that of E is the rest of a row's own correlations.
    """

    # One for each parent column, then one for each child column; latent variables in this order.
    nodes: tuple[Node, ...]
    # Float32 arrays, lower triangular: the Cholesky factors of a person's latent variables, and of a
    # row's own part.
    person_factor: Singles
    row_factor: Singles
    counts: Floats  # float64 of shape (max_rows + 1,): persons of each number of rows
    # As of `DenoisedPersons`: the persons whose rows agree, and those who have but one level.
    agreeing: Floats
    single: Floats
    targets: Targets | None  # the tables of parent columns that persons are raked to
    wanted: Wanted

    @property
    def n_latents(self) -> int:
        """How many latent variables rows have."""
        return len(self.row_factor)

    def draw(self, rng: Rng, n: int, rules: CellRules | None = None) -> tuple[Shorts, Shorts, Ints]:
        """Return a block of persons and their rows.

        Parameters
        ----------
        rng
            A stream; the block is a function of it and of `n`.
        n
            How many persons, at most 16,384.
        rules
            What each row keeps beside its person's own columns, of which the number of rows is none.

        Returns
        -------
        parents
            uint16 array of shape (n, n_parents): each person's levels.
        children
            uint16 array of shape (n_rows, n_columns): each row's levels.
        owners
            int64 array of shape (n_rows,), rising: each row's person.
        """
        persons, shared = self._draw_persons(n, rng, rules)
        numbers = self._draw_numbers(persons[-1], rng)
        times = np.maximum(_MOST_TIMES, -(-_LEAST_CANDIDATES // np.maximum(numbers, 1)))
        starts = np.concatenate([[0], np.cumsum(numbers * times)]).astype(np.int64)
        of_rows = np.repeat(np.arange(n, dtype=np.int64), np.diff(starts))
        scales = _draw_scales(n, self.single, rng)
        rows = self._draw_candidates(shared, of_rows, scales, rng)
        if rules:
            self._redraw(rows, persons[:-1], shared, of_rows, scales, rules, rng)
        kinds = self._agree(rows, starts, numbers, persons[-1], rng)
        if rules:
            broken = _find_broken(rules, persons[:-1], rows, of_rows, np.arange(len(rows)))
            rows[broken] = rows[starts[of_rows[broken]]]  # which has all levels that agree
            named = [place - len(persons) + 1 for place in rules.attributes]
            ruled = np.isin(np.arange(kinds.shape[1]), named)
            # of such columns no level is changed alone; candidates agree there without it
            kinds[(kinds == person_kernel.CONSTANT) & ruled] = person_kernel.FREE
        first_levels, first_parents = (
            (np.cumsum(sizes) - sizes).astype(np.uint16)
            for sizes in (np.array(self.child_sizes), np.array(self.parent_sizes))
        )
        rows += first_levels
        parents = np.ascontiguousarray(persons.T)
        person_kernel.settle(
            rows,
            starts,
            numbers,
            parents + first_parents,
            kinds,
            words(rng, n),
            _SWEEPS,
            self.wanted.open_gaps(int((numbers > 0).sum()), int((numbers > 1).sum())),
        )
        owners = np.repeat(np.arange(n, dtype=np.int64), numbers)
        within = np.arange(len(owners)) - np.repeat(np.cumsum(numbers) - numbers, numbers)
        children: Shorts = rows[starts[owners] + within] - first_levels
        return parents, children, owners

    def _draw_pool(self, n: int, rng: Rng) -> tuple[Shorts, Singles]:
        """Return persons of the copula: their levels, uint16 of shape (n_parents, n), and all latent variables."""
        n_parents = len(self.parent_sizes)
        drawn = latent.room_for(len(self.person_factor), n)
        draw_latents(latent.pack(self.person_factor), n, rng, drawn)
        pool = np.empty((n_parents, n), dtype=np.uint16)
        group = np.zeros(n, dtype=np.uint16)
        for node in self.nodes[:n_parents]:
            found = decode.decode(
                node.utilities(drawn),
                node.offsets,
                node.probabilities,
                group,
                draw_uniforms(rng, 1),
            )
            pool[node.attribute] = node.levels[found]
        return pool, drawn

    def _draw_persons(
        self, n: int, rng: Rng, rules: CellRules | None = None
    ) -> tuple[Shorts, Singles]:
        """Return persons' own levels, uint16 of shape (n_parents, n), and what their rows share, float32 of shape (n_latents, n)."""
        n_pool, n_parents = max(_POOL * n, MIN_POOL), len(self.parent_sizes)
        pool, drawn = self._draw_pool(n_pool, rng)
        own = rules.limit(n_parents - 1) if rules else None
        if own:
            is_kept = own.keep(pool)
            parts, n_drawn = [(pool[:, is_kept], drawn[:, :n_pool][:, is_kept])], n_pool
            while (n_kept := sum(part.shape[1] for part, _ in parts)) < n_pool:
                check_kept(n_kept, n_drawn)
                pool, drawn = self._draw_pool(n_pool, rng)
                is_kept = own.keep(pool)
                parts.append((pool[:, is_kept], drawn[:, :n_pool][:, is_kept]))
                n_drawn += n_pool
            pool, drawn = (
                np.ascontiguousarray(np.concatenate(each, axis=1)[:, :n_pool])
                for each in zip(*parts, strict=True)
            )
        weights = np.ones(n_pool, dtype=np.float32)
        if self.targets is not None:
            weights = self.targets.weigh(pool, _domain(self.parent_sizes), rng)
        order = _order(pool, np.array(self.parent_sizes), list(range(n_parents))[::-1])
        chosen = raking_kernel.resample(weights, order, n, float(draw_uniforms(rng, 1)[0]))
        chosen = chosen[permutation(words(rng, n))]
        first = len(self.person_factor) - self.n_latents
        last = first + self.n_latents
        return pool[:, chosen], np.ascontiguousarray(drawn[first:last, chosen])

    def _draw_numbers(self, bands: Shorts, rng: Rng) -> Ints:
        """Return each person's number of rows, int64 of shape (n,)."""
        numbers = np.zeros(len(bands), dtype=np.int64)
        edges = (*self.band_edges, self.max_rows + 1)
        for band, (low, high) in enumerate(itertools.pairwise(edges)):
            own = np.flatnonzero(bands == band)
            begin = draw_uniforms(rng, 1)[0]
            if not len(own):
                continue
            places = (permutation(words(rng, len(own))) + begin) / len(own)
            sums = np.cumsum(self.counts[low:high])
            if sums[-1] > 0.0:
                found = np.searchsorted(sums / sums[-1], places, side="right")
                numbers[own] = low + np.minimum(found, high - low - 1)
            else:
                numbers[own] = low
        return numbers

    def _redraw(
        self,
        rows: Shorts,
        persons: Shorts,
        shared: Singles,
        owners: Ints,
        scales: Singles,
        rules: CellRules,
        rng: Rng,
    ) -> None:
        """Let all candidates keep rules: others are drawn again, and at last become those of other persons."""
        broken = _find_broken(rules, persons, rows, owners, np.arange(len(rows)))
        check_kept(len(rows) - len(broken), len(rows))
        kept = np.setdiff1d(np.arange(len(rows)), broken)
        for attempt in range(2 * _REDRAWN):
            if not len(broken):
                return
            if attempt < _REDRAWN:
                rows[broken] = self._draw_candidates(shared, owners[broken], scales, rng)
            else:
                rows[broken] = rows[kept[(draw_uniforms(rng, len(broken)) * len(kept)).astype(int)]]
            broken = _find_broken(rules, persons, rows, owners, broken)
        if len(broken):
            check_kept(0, len(rows))

    def _draw_candidates(self, shared: Singles, owners: Ints, scales: Singles, rng: Rng) -> Shorts:
        """Return the levels of candidates of persons, uint16 of shape (n_rows, n_columns)."""
        n_rows, n_parents = len(owners), len(self.parent_sizes)
        rows = np.empty((n_rows, len(self.child_sizes)), dtype=np.uint16)
        panels = latent.pack(self.row_factor)
        room = latent.room_for(self.n_latents, min(CHUNK_ROWS, max(n_rows, 1)))
        before = len(self.person_factor) - self.n_latents
        for begin in range(0, n_rows, CHUNK_ROWS):
            part = slice(begin, min(begin + CHUNK_ROWS, n_rows))
            draw_latents(panels, part.stop - begin, rng, room)
            for node in self.nodes[n_parents:]:
                person_kernel.choose_levels(
                    shared,
                    room,
                    owners[part],
                    scales[node.attribute - n_parents],
                    node.first - before,
                    node.n_latents,
                    node.offsets[0],
                    node.levels,
                    rows[part, node.attribute - n_parents],
                )
        return rows

    def _agree(self, rows: Shorts, starts: Ints, numbers: Ints, bands: Shorts, rng: Rng) -> Bytes:
        """Return which persons' rows are to agree in which columns, and let the candidates of these do so.

        Notes
        -----
        In each band as many as were measured, in this order: persons all of whose candidates agree;
        those who have but one level, drawn at random, but the same ones in each column as far as
        there are as many, because rows that agree in one column are often of one occasion; those
        whose first rows agree by chance; others. They have the level of their first candidate.
        """
        n = len(numbers)
        kinds = np.full((n, len(self.child_sizes)), person_kernel.FREE, dtype=np.uint8)
        owners = np.repeat(np.arange(n, dtype=np.int64), np.diff(starts))
        is_first = np.arange(len(rows)) - starts[owners] < numbers[owners]
        order = draw_uniforms(rng, n)
        for column in range(len(self.child_sizes)):
            if np.isnan(self.agreeing[:, column]).any():
                continue
            own = rows[starts[owners], column]
            differs = rows[:, column] != own
            n_all, n_first = (
                np.bincount(owners[which], minlength=n) for which in (differs, differs & is_first)
            )
            is_single = order < self.single[column]
            ranks = np.where(n_all == 0, 0, np.where(is_single, 1, np.where(n_first == 0, 2, 3)))
            kinds[:, column] = person_kernel.SEVERAL
            for band in range(len(self.band_edges)):
                several = np.flatnonzero((bands == band) & (numbers > 1))
                wanted = self.agreeing[band, column] * len(several) + draw_uniforms(rng, 1)[0]
                ranked = several[np.lexsort((order[several], ranks[several]))]
                kinds[ranked[: int(wanted)], column] = person_kernel.CONSTANT
            agree = kinds[owners, column] == person_kernel.CONSTANT
            rows[agree, column] = own[agree]
        return kinds

    def to_archive(self) -> Contents:
        """Return the model as a header that JSON can hold, and arrays."""
        header = {**self.sizes, "raked": self.targets is not None}
        arrays: Json = {
            "n_levels": np.array([len(node.levels) for node in self.nodes], dtype=np.int64),
            **write_nodes(self.nodes),
            "counts": self.counts,
            "agreeing": self.agreeing,
            "single": self.single,
            **{name: write_factor(getattr(self, name)) for name in _FACTORS},
            **{f"wanted_{name}": table for name, table in self.wanted._asdict().items()},
        }
        if self.targets is not None:
            arrays |= self.targets.to_arrays()
        return header, arrays

    @classmethod
    def from_archive(cls, header: Named, arrays: Named) -> Self:
        """Return the model that `to_archive` wrote, or raise: drawing indexes by its numbers without a check."""
        given = {field.name: header[field.name] for field in fields(Persons)}
        own: Json = {
            name: tuple(each) if isinstance(each, list) else each for name, each in given.items()
        }
        people = Persons(**own)
        people.check_sizes()
        check_n_rows(people.n_persons)
        n, n_parents = len(people.child_sizes), len(people.parent_sizes)
        n_p, n_c = sum(people.parent_sizes), sum(people.child_sizes)
        shapes = {
            "agreeing": (len(people.band_edges), n),
            "single": (n,),
            "wanted_rows": (n_c, n_c),
            "wanted_parents": (n_p, n_c),
            "wanted_pairs": (n_c, n_c),
        }
        for name, shape in shapes.items():
            check_array(np.nan_to_num(arrays[name]), np.float64, shape, 0.0, 1.0 + ROUNDING)
        wanted = Wanted(*(arrays[f"wanted_{name}"] for name in Wanted._fields))
        for table in (wanted.rows, wanted.pairs):
            is_even = np.array_equal(table, table.T, equal_nan=True)
            require(is_even, "a table of two levels depends on their order")
        counts, n_levels = arrays["counts"], arrays["n_levels"]
        check_array(counts, np.float64, (people.max_rows + 1,), 0.0, noise.MAX_COUNT)
        sizes = (*people.parent_sizes, *people.child_sizes)
        check_array(n_levels, np.int64, (len(sizes),), 1, max(sizes))
        n_latents = list(map(n_latents_of, n_levels.tolist()))
        require(sum(n_latents) <= MAX_LATENTS, "there are too many latent variables")
        firsts = itertools.accumulate(n_latents, initial=0)
        tree = [(place, -1, next(firsts), 1, each) for place, each in enumerate(n_levels.tolist())]
        targets = None
        if header["raked"]:
            domain = _domain(people.parent_sizes)
            targets = Targets.from_arrays(arrays, float(people.n_persons), domain)
        return cls(
            **own,
            nodes=read_nodes(tree, arrays, sizes),
            person_factor=read_factor(arrays["person_factor"], sum(n_latents)),
            row_factor=read_factor(arrays["row_factor"], sum(n_latents[n_parents:])),
            counts=counts,
            agreeing=arrays["agreeing"],
            single=arrays["single"],
            targets=targets,
            wanted=wanted,
        )


_FACTORS = ("person_factor", "row_factor")


def _find_broken(
    rules: CellRules, persons: Shorts, rows: Shorts, owners: Ints, which: Ints
) -> Ints:
    """Return which of some rows break rules, each beside its person's own levels."""
    codes = np.concatenate([persons[:, owners[which]], rows[which].T])
    return which[~rules.keep(codes)]


def _domain(sizes: tuple[int, ...]) -> Domain:
    return Domain(names=tuple(str(place) for place in range(len(sizes))), sizes=sizes)


def fit_persons(noisy: PersonTables) -> PersonModel:
    """Return the two-level copula that fits noisy tables of persons and their rows.

    Raises
    ------
    ValueError
        If a table or its noise is missing, or is not one of the columns.

    Privacy
    -------
    Post-processing: a function of the noisy tables alone.

    Notes
    -----
    1. `denoise_persons`. 2. The correlations of a person's latent variables from PP, PC and WW, and of
    a row's from CC, as of the one-table copula; persons who have but one level in a column are
    left out of WW. 3. The nearest covariance of a person's variables with the diagonal that WW gives, and the
    nearest of a row's own part with the rest of it. 4. Offsets at which levels come as often as
    they should, on a sample. 5. The tables that persons are raked to and rows are settled by
    (docs/explanation/math.md, Persons with their rows).
    """
    noisy.check()
    cleaned = denoise_persons(noisy)
    nodes = _lay_nodes(cleaned)
    n_parents = len(noisy.parent_sizes)
    person, row = _fit_covariances(cleaned, nodes, n_parents)
    person_factor, row_factor = (
        np.linalg.cholesky(matrix).astype(np.float32)
        if len(matrix)
        else np.zeros((0, 0), np.float32)
        for matrix in (person, row)
    )
    nodes = _calibrate(nodes, person_factor, row_factor, cleaned.single)
    return PersonModel(
        **noisy.sizes,
        nodes=nodes,
        person_factor=person_factor,
        row_factor=row_factor,
        counts=cleaned.counts,
        agreeing=cleaned.agreeing,
        single=cleaned.single,
        targets=_choose_targets(noisy, cleaned),
        wanted=_want(noisy, cleaned),
    )


def _lay_nodes(cleaned: DenoisedPersons) -> tuple[Node, ...]:
    """Return the columns with their levels in use and latent variables, one column after the other."""
    nodes, first = [], 0
    for attribute, counts in enumerate((*cleaned.parents, *cleaned.rows)):
        shares = counts / counts.sum()
        levels = np.flatnonzero(shares > _EMPTY).astype(np.uint16)
        own = shares[levels] / shares[levels].sum()
        clipped = np.clip(own, 1e-7, 1.0 - 1e-7)
        node = Node(
            attribute=attribute,
            parent=-1,
            levels=levels,
            first=first,
            probabilities=own[None],
            offsets=scipy.special.ndtri(clipped).astype(np.float32)[None],
        )
        nodes.append(node)
        first += node.n_latents
    return tuple(nodes)


@step("fitting: correlations")
def _fit_covariances(
    cleaned: DenoisedPersons, nodes: tuple[Node, ...], n_parents: int
) -> tuple[Floats, Floats]:
    """Return the covariances of a person's latent variables, and of a row's own part."""
    parents, children = nodes[:n_parents], nodes[n_parents:]
    before = sum(node.n_latents for node in parents)
    n = before + sum(node.n_latents for node in children)
    person, row = np.eye(n), np.eye(n - before)
    for (group, one, two), table in cleaned.tables.items():
        if group == "WW":
            table = _leave_out_single(cleaned, one, two)
        first = parents[one] if group in ("PP", "PC") else children[one]
        second = parents[two] if group == "PP" else children[two]
        found = _correlate(table, first, second)
        skipped, into = (before, row) if group == "CC" else (0, person)
        i, j = (np.arange(node.n_latents) + node.first - skipped for node in (first, second))
        into[np.ix_(i, j)], into[np.ix_(j, i)] = found, found.T
    shared = slice(before, n)
    own = np.diagonal(person)[shared].copy()
    measured = [("WW", c, c) in cleaned.tables for c in range(len(children))]
    own[~np.repeat(measured, [node.n_latents for node in children])] = _LEAST_SHARED
    own = np.clip(own, _LEAST_SHARED, _MOST_SHARED)
    diagonal = np.concatenate([np.ones(before), own])
    if n:
        person = latent.nearest_correlation(
            person, floor=_FLOOR, tolerance=1e-6, diagonal=diagonal
        ).matrix
    if len(row):
        rest = row - person[shared, shared]
        row = latent.nearest_correlation(
            rest, floor=_FLOOR, tolerance=1e-6, diagonal=1.0 - own
        ).matrix
    return person, row


def _leave_out_single(cleaned: DenoisedPersons, c: int, d: int) -> Floats:
    """Return a table of pairs of rows without persons who have but one level in both columns: pairs of their rows are as one row."""
    table = cleaned.tables["WW", c, d]
    rows, total = np.diag(table.sum(axis=1)), float(table.sum())
    if c != d:
        rows = cleaned.tables.get(("CC", c, d), np.zeros_like(table))
        rows = rows * (total / max(float(rows.sum()), 1e-300))
    share = min(float(cleaned.single[[c, d]].min()), _MOST_SHARED)
    return np.maximum(table - share * rows, 0.0)


def _correlate(table: Floats, first: Node, second: Node) -> Floats:
    """Return the tetrachoric correlations of two columns' latent variables."""
    total = max(float(table.sum()), 1e-300)
    sides = []
    for node, axis in ((first, 1), (second, 0)):
        levels = node.levels[len(node.levels) - node.n_latents :]
        shares = np.clip(table.sum(axis=axis)[levels] / total, 1e-12, 1.0 - 1e-12)
        sides.append((levels, scipy.special.ndtri(1.0 - shares)))
    (rows, h), (columns, k) = sides
    return normal.tetrachoric(h[:, None], k[None, :], table[np.ix_(rows, columns)] / total)


def _draw_scales(n: int, single: Floats, rng: Rng) -> Singles:
    """Return by what each person's rows vary more or less than others' in each column, float32 of shape (n_columns, n).

    Where some persons have but one level, the others are uneven, too: with one scale for all, too
    few of them have two levels, and too few have many.
    """
    is_steady = draw_uniforms(rng, n) < 0.5
    scales = np.where(is_steady, math.sqrt(1.0 - _UNEVEN), math.sqrt(1.0 + _UNEVEN))
    return np.where(single[:, None] > _SOME, scales, 1.0).astype(np.float32)


@step("fitting: the calibration of levels")
def _calibrate(
    nodes: tuple[Node, ...], person_factor: Singles, row_factor: Singles, single: Floats
) -> tuple[Node, ...]:
    """Return the columns with offsets at which their levels come as often as they should."""
    # no secret: it decides only which sample stands for the model
    rng = stream(RunKey.insecure(0), "copula/persons", "")
    n, n_parents = CHUNK_ROWS, len(nodes) - len(single)
    drawn = latent.room_for(len(person_factor), n)
    own = latent.room_for(len(row_factor), n)
    draw_latents(latent.pack(person_factor), n, rng, drawn)
    draw_latents(latent.pack(row_factor), n, rng, own)
    scales = _draw_scales(n, single, rng)
    before = len(person_factor) - len(row_factor)
    found = []
    for node in nodes:
        utilities = np.ascontiguousarray(node.utilities(drawn)[:, :n])
        if node.attribute >= n_parents:
            first = node.first - before
            utilities += (
                own[first : first + node.n_latents, :n] * scales[node.attribute - n_parents]
            )
        offsets = decode.calibrate(utilities, node.probabilities[0], node.offsets[0])
        found.append(replace(node, offsets=offsets[None]))
    return tuple(found)


def _choose_targets(noisy: PersonTables, cleaned: DenoisedPersons) -> Targets | None:
    """Return the tables of parent columns, for raking; None if there is but one column."""
    keys = sorted(key for key in cleaned.tables if key[0] == "PP")
    if not keys:
        return None
    return Targets(
        total=float(cleaned.counts.sum()),
        tables=np.array([(one, two, -1) for _, one, two in keys], dtype=np.int64),
        counts=np.concatenate([cleaned.tables[key].ravel() for key in keys]),
        strengths=np.full(len(keys), _FIRMNESS / max(noisy.sigmas["PP"], 1.0) ** 2),
    )


def _want(noisy: PersonTables, cleaned: DenoisedPersons) -> Wanted:
    """Return the denoised tables of rows and of pairs of rows as shares."""
    own, others = (
        np.concatenate([[0], np.cumsum(sizes)]) for sizes in (noisy.child_sizes, noisy.parent_sizes)
    )
    rows, pairs = (np.full((own[-1], own[-1]), np.nan) for _ in range(2))
    parents = np.full((others[-1], own[-1]), np.nan)
    for (group, one, two), table in cleaned.tables.items():
        shares = table / max(float(table.sum()), 1e-300)
        j = slice(own[two], own[two + 1]) if group != "PP" else None
        if group == "PC":
            parents[others[one] : others[one + 1], j] = shares
        elif group != "PP":
            i = slice(own[one], own[one + 1])
            into = rows if group == "CC" else pairs
            into[i, j], into[j, i] = shares, shares.T
    return Wanted(rows, parents, pairs)
