"""Fitting a copula to noisy tables alone: post-processing, from the counts to the factor and the offsets."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal, cast

import numpy as np
import scipy  # its modules are imported when they are first used
from pydantic import Field

from dpdask.arrays import Codes, Floats, Ints, Shorts, Singles, freeze_class
from dpdask.cells import Cells
from dpdask.documents import Document
from dpdask.errors import InternalError
from dpdask.kernels import correlation as latent
from dpdask.kernels import decode, normal
from dpdask.kernels import marginals as kernel
from dpdask.kernels.hashing import permutation
from dpdask.mechanisms.columns import CHUNK_ROWS
from dpdask.mechanisms.copula import model as raking
from dpdask.mechanisms.copula.model import (
    MOST_CELLS,
    CopulaModel,
    Node,
    check_kept,
    draw_latents,
    draw_uniforms,
    n_latents_of,
)
from dpdask.mechanisms.copula.places import fit_places
from dpdask.mechanisms.marginals.noise import (
    MEAN_OF_NOISE,
    Denoised,
    NoisyMarginals,
    denoise,
    dependence_tree,
    measure_chosen,
)
from dpdask.privacy import noise
from dpdask.privacy.noise import deviation
from dpdask.rules import CellRules
from dpdask.stats import Clique, Domain, MarginalCounts
from dpdask.steps import step
from dpdask.streams import Rng, RunKey, stream, words

Records = Literal["raked", "copula"]
"""Where records come from: the copula's, weighted to the denoised tables and drawn again, or the copula's own."""

_FLOOR = 1e-3  # of the correlations' eigenvalues: what the float32 factor resolves, with room
_EMPTY = 1e-9  # a level's share below which it is never drawn
_MOST_REFINED = 1200  # latent variables: beyond, a refinement costs more than the fit
_REFINEMENT_GAIN = 0.7


class CopulaOptions(Document):
    """Steps of the fit that can be switched off, to measure what each of them contributes; by default all are on.

    Examples
    --------
    >>> import dpdask
    >>> dpdask.CopulaOptions(tree=False).refinements
    3
    """

    consistency: bool = True
    """Whether one-way counts are averaged with the sums of the two-way tables."""
    shrinkage: bool = True
    """Whether the singular values of each two-way table are denoised."""
    significance: bool = True
    """Whether a cell's correlation is kept only where its departure from independence exceeds the
    noise's standard deviation.
    """
    tree: bool = True
    """Whether attributes are decoded along the tree of the strongest dependence, each given its
    parent.
    """
    refinements: int = Field(default=3, ge=0)
    """How many times the correlations are corrected after comparing a sample of the model with the
    tables. There are no corrections if records are raked to every pair or every column has at
    most two levels, where none are needed, or beyond 1,200 latent variables, where they would
    take longer than the fit.
    """


@freeze_class
class FitReport:
    """Measures of the fit; computed from noisy tables, so safe to publish."""

    n_latents: int
    kept_share: float  # the part of the correlations that are kept as significant
    # The root mean square by which the nearest correlation matrix differs from the wanted one.
    moved: float
    n_iterations: int  # the iterations and the residual of the last search for that matrix
    residual: float


def fit_copula(
    noisy: NoisyMarginals,
    rng: Rng,
    options: CopulaOptions | None = None,
    *,
    records: Records = "raked",
    cells: Mapping[str, Cells] | None = None,
    rules: CellRules | None = None,
) -> tuple[CopulaModel, FitReport]:
    """Return the copula that fits noisy one- and two-way tables.

    Parameters
    ----------
    rng
        A stream, for the sample on which the offsets are calibrated.
    cells
        The public cells of each column, if numbers will be drawn in them.
    rules
        What all records will keep.

    Notes
    -----
    1. `denoise`: margins, tables, and which cells' dependence is more than noise. 2. The correlation of two levels' latent
    variables is the one at which two standard normals exceed their thresholds Φ⁻¹(1-μ) together as often as the levels
    meet (tetrachoric); 0 where nothing significant is there, and between the levels of one attribute. 3. The nearest
    correlation matrix and its Cholesky factor. 4. On a sample of latent variables, attribute after attribute along the
    tree: offsets at which a record takes each level as often as its parent's level asks for. 5. Where a pair's table in
    that sample is not what it should be, its wanted probabilities are moved by the difference, and 2-4 are done again. 6. The
    tables that records are raked to, if they are.

    References
    ----------
    Asghar et al., section 3.3. The calibrated choice of one level is not in the paper
    (docs/explanation/math.md, Decoding).
    """
    options = options or CopulaOptions()
    cleaned = denoise(
        noisy,
        consistency=options.consistency,
        shrinkage=options.shrinkage,
        significance=options.significance,
        rules=rules,
    )
    tree = [(attribute, -1) for attribute in range(noisy.domain.n_attributes)]
    if options.tree:
        tree = dependence_tree(cleaned)
    fit = _Fit(cleaned, tree)
    wanted = [group.tables for group in cleaned.groups]
    model, report, codes = fit.model(wanted, rng)
    sizes = np.array(noisy.domain.sizes, dtype=np.int64)
    room = raking.MOST_TABLES - sum(len(clique) == 3 for clique in noisy.cliques)
    # raking meets every pair, as do thresholds of single latent variables
    is_raked = records == "raked" and sum(map(len, wanted)) <= room
    is_met = is_raked or all(len(levels) <= 2 for levels in fit.levels)
    if not is_met and report.n_latents <= _MOST_REFINED:
        for _ in range(options.refinements):
            found = kernel.count_pairs(codes, sizes)
            wanted = [
                group.correct(tables, found, codes.shape[1], _REFINEMENT_GAIN)
                for group, tables in zip(cleaned.groups, wanted, strict=True)
            ]
            model, report, codes = fit.model(wanted, rng)
    model = replace(model, places=None if cells is None else fit_places(cleaned, cells))
    if rules:
        is_kept = rules.keep(codes)
        check_kept(int(is_kept.sum()), len(is_kept))
        codes = cast("Codes", np.compress(is_kept, codes, axis=1))
    if records == "copula" or noisy.noise.pairs is None:
        return model, report
    found = kernel.count_pairs(codes, sizes)
    targets = raking.choose_targets(cleaned, found, codes.shape[1], noisy)
    return replace(model, targets=targets), report


class _Fit:
    """What does not change between refinements: the levels in use, their latent variables, the tree."""

    def __init__(self, cleaned: Denoised, tree: list[tuple[int, int]]) -> None:
        self.cleaned, self.tree = cleaned, tree
        shares = [counts / cleaned.n_rows for counts in cleaned.one_way]
        self.levels = [np.flatnonzero(share > _EMPTY).astype(np.uint16) for share in shares]
        # of each level: its latent variable, or none
        self._latent = np.full(sum(cleaned.domain.sizes), -1, dtype=np.int64)
        self._starts = np.cumsum(cleaned.domain.sizes) - cleaned.domain.sizes
        self._n_latents = 0
        for attribute, _ in tree:
            levels = self.levels[attribute]
            numbers = self._n_latents + np.arange(n_latents_of(len(levels)))
            of_latents = levels[len(levels) - len(numbers) :]
            self._latent[self._starts[attribute] + of_latents] = numbers
            self._n_latents += len(numbers)
        self._offsets: dict[int, Singles] = {}
        self._cuts = scipy.special.ndtri(1.0 - np.clip(np.concatenate(shares), 1e-12, 1.0 - 1e-12))

    def model(self, wanted: list[Floats], rng: Rng) -> tuple[CopulaModel, FitReport, Codes]:
        """Return the model whose latent variables have the wanted pair counts, the measures of the fit, and its calibration sample."""
        matrix, kept = self._correlations(wanted)
        firsts, order = self._arrange(matrix)
        matrix = matrix[np.ix_(order, order)]
        factor = np.zeros((0, 0), dtype=np.float32)
        n = self._n_latents
        report = FitReport(n_latents=n, kept_share=kept, moved=0.0, n_iterations=0, residual=0.0)
        if n:
            nearest = latent.nearest_correlation(matrix, floor=_FLOOR, tolerance=1e-6)
            exact = np.asarray(np.linalg.cholesky(nearest.matrix), dtype=np.float64)
            factor = latent.thin(exact).astype(np.float32)
            report = replace(
                report,
                moved=nearest.distance / n,
                n_iterations=nearest.n_iterations,
                residual=nearest.residual,
            )
        nodes, codes = self._calibrate(factor, firsts, rng)
        domain, n_rows = self.cleaned.domain, self.cleaned.n_rows
        model = CopulaModel(domain=domain, n_rows=n_rows, nodes=tuple(nodes), factor=factor)
        return model, report, codes

    @step("fitting: correlations")
    def _correlations(self, wanted: list[Floats]) -> tuple[Floats, float]:
        matrix = np.eye(self._n_latents)
        n_cells = n_kept = 0
        for group, tables in zip(self.cleaned.groups, wanted, strict=True):
            _, m, n = tables.shape
            rows = self._starts[group.first][:, None] + np.arange(m)
            columns = self._starts[group.second][:, None] + np.arange(n)
            latents, cuts = (
                np.broadcast_arrays(of[rows][:, :, None], of[columns][:, None, :])
                for of in (self._latent, self._cuts)
            )
            (i, j), (h, k) = latents, cuts
            possible = (i >= 0) & (j >= 0)
            kept = possible & group.significant
            met = group.shrink_towards_independence(tables)[kept] / self.cleaned.n_rows
            values = normal.tetrachoric(h[kept], k[kept], met, n_threads=os.cpu_count() or 1)
            matrix[i[kept], j[kept]] = matrix[j[kept], i[kept]] = values
            n_cells, n_kept = n_cells + int(possible.sum()), n_kept + int(kept.sum())
        return matrix, n_kept / max(1, n_cells)

    def _arrange(self, matrix: Floats) -> tuple[list[int], Ints]:
        """Return the first latent variable of each attribute of the tree, and the latent variables in the order of the factor.

        Attributes whose levels depend least on others come first: the factor's rows of later ones
        then have fewer parts that are not small.
        """
        counts = np.array([n_latents_of(len(self.levels[attribute])) for attribute, _ in self.tree])
        starts = np.concatenate([[0], np.cumsum(counts)])
        strengths = np.concatenate([[0.0], np.cumsum((matrix**2).sum(axis=1) - 1.0)])
        means = np.diff(strengths[starts]) / np.maximum(counts, 1)
        ranked = np.argsort(means, kind="stable")
        firsts = np.zeros(len(counts), dtype=np.int64)
        firsts[ranked] = np.cumsum(counts[ranked]) - counts[ranked]
        order = [np.arange(starts[place], starts[place + 1]) for place in ranked]
        return firsts.tolist(), np.concatenate(order)

    @step("fitting: the calibration of levels")
    def _calibrate(self, factor: Singles, firsts: list[int], rng: Rng) -> tuple[list[Node], Codes]:
        n = CHUNK_ROWS
        drawn = latent.room_for(self._n_latents, n)
        draw_latents(latent.pack(factor), n, rng, drawn)
        place = {attribute: index for index, (attribute, _) in enumerate(self.tree)}
        nodes: list[Node] = []
        found: list[Shorts] = []
        codes = np.empty((len(self.tree), n), dtype=self.cleaned.domain.code_dtype)
        for first, (attribute, parent) in zip(firsts, self.tree, strict=True):
            levels = self.levels[attribute]
            probabilities = self._conditionals(attribute, parent)
            offsets = self._offsets.get(attribute)  # calibration begins at what it found last
            if offsets is None:
                shares = np.clip(probabilities, 1e-7, 1.0 - 1e-7)
                offsets = scipy.special.ndtri(shares).astype(np.float32)
            draft = Node(
                attribute=attribute,
                parent=place[parent] if parent >= 0 else -1,
                levels=levels,
                first=first,
                probabilities=probabilities,
                offsets=offsets,
            )
            groups = np.zeros(n, dtype=np.uint16) if draft.parent < 0 else found[draft.parent]
            utilities = draft.utilities(drawn)
            offsets = decode.calibrate_groups(utilities, probabilities, groups, offsets)
            nodes.append(replace(draft, offsets=offsets))
            self._offsets[attribute] = offsets
            uniforms = draw_uniforms(rng, len(probabilities))
            found.append(decode.decode(utilities, offsets, probabilities, groups, uniforms))
            codes[attribute] = levels[found[-1]]
        return nodes, codes

    def _conditionals(self, attribute: int, parent: int) -> Floats:
        """Return the probabilities of an attribute's levels given each level of its parent, shape (n_groups, n_levels)."""
        own = self.cleaned.one_way[attribute][self.levels[attribute]]
        share: Floats = (own / own.sum()).reshape(1, -1)
        if parent < 0:
            return share
        cells = np.ix_(self.levels[parent], self.levels[attribute])
        table = self.cleaned.table(parent, attribute)[cells]
        sums = table.sum(axis=1, keepdims=True)
        return np.where(sums > 0.0, table / np.where(sums > 0.0, sums, 1.0), share)


def choose_pairs(noisy: NoisyMarginals, n: int, target: str | None = None) -> tuple[Clique, ...]:
    """Return the pairs with the largest expected gain from a second measurement, as cliques.

    Notes
    -----
    The error of a denoised table is about as large as the noise, or as its whole departure from
    independence if that is smaller. The expected gain is the smaller of two sums over cells: of
    |departure|, and of the mean absolute value of the noise.
    """
    cleaned, names = denoise(noisy), noisy.domain.names
    gains = []
    for group in cleaned.groups:
        rows, columns = group.tables.sum(axis=2), group.tables.sum(axis=1)
        independent = kernel.independence(rows, columns, cleaned.n_rows)
        departures = np.abs(group.tables - independent).sum(axis=(1, 2))
        most = MEAN_OF_NOISE * group.sigma * group.tables[0].size
        gains.append(np.minimum(departures, most))
    first = np.concatenate([group.first for group in cleaned.groups])
    second = np.concatenate([group.second for group in cleaned.groups])
    place = -1 if target is None else names.index(target)
    is_other = (first != place) & (second != place)
    best = np.lexsort((second, first, -np.concatenate(gains), is_other))[:n]
    return tuple((names[a], names[b]) for a, b in zip(first[best], second[best], strict=True))


def measure_pairs_again(
    noisy: NoisyMarginals,
    counts: MarginalCounts,
    target: str | None = None,
    *,
    rng: Rng | None = None,
) -> NoisyMarginals:
    """Return noisy tables with a second measurement of as many pairs as are paid for; unchanged if none are.

    Privacy
    -------
    Unit, sensitivity, event: `chosen` of `MarginalNoise`. The choice is a function of the first
    noisy tables.
    """
    if noisy.noise.chosen is None:
        return noisy
    return measure_chosen(
        noisy, counts, choose_pairs(noisy, noisy.noise.chosen.count, target), rng=rng
    )


MOST_CANDIDATES = 512  # tables that a pass over the rows counts, and whose scores share the noise


def count_candidates(n_columns: int, target: str | None) -> int:
    """Return the largest number of three-way tables that get a score; it sets the noise of the scores."""
    n_tables = math.comb(n_columns, 3) if target is None else math.comb(n_columns - 1, 2)
    return min(MOST_CANDIDATES, n_tables)


def list_candidates(domain: Domain, target: str | None) -> tuple[Clique, ...]:
    """Return the three-way tables that may be chosen: at most 512, each of at most 5,000 cells; the list is public.

    Notes
    -----
    If there are more than 512, tables of the columns with the fewest cells are taken; a fixed order
    mixes columns of one size. Only as many columns are considered as are needed for enough tables.
    """
    rng = stream(RunKey.insecure(0), "copula/candidates", "")  # public: the same order in every run
    mixed = permutation(words(rng, domain.n_attributes))
    by_size = mixed[np.argsort(np.array(domain.sizes)[mixed], kind="stable")].tolist()
    columns = [place for place in by_size if domain.names[place] != target]
    fixed = () if target is None else (domain.position(target),)
    n_others = 3 - len(fixed)
    n_looked = next(
        (n for n in range(len(columns)) if math.comb(n, n_others) >= 4 * MOST_CANDIDATES),
        len(columns),
    )
    every = [
        tuple(sorted((*fixed, *others)))
        for others in itertools.combinations(columns[:n_looked], n_others)
    ]
    cells = [math.prod(domain.sizes[place] for place in places) for places in every]
    sizes, order = np.array(cells, dtype=np.int64), permutation(words(rng, len(every)))
    smallest = order[np.argsort(sizes[order], kind="stable")][:MOST_CANDIDATES]
    return tuple(
        tuple(domain.names[place] for place in every[found])
        for found in sorted(smallest)
        if sizes[found] <= MOST_CELLS
    )


def choose_triples(
    first: NoisyMarginals,
    counts: MarginalCounts,
    options: CopulaOptions | None = None,
    *,
    rng: Rng | None = None,
) -> tuple[Clique, ...]:
    """Return the three-way tables to measure: those with the largest noisy scores, in which records of the two-way tables are most wrong.

    Parameters
    ----------
    rng
        None: secure noise. A stream: INSECURE, for runs marked so; see `privacy.noise`.

    Privacy
    -------
    Score: the sum over a table's cells of |count - expected|. The expected counts are a function of
    `first`, so a row added or removed changes each score by at most 1, and a row replaced by at
    most 2. Unit, event: `scores` of `MarginalNoise`. Exact scores are not returned.

    Notes
    -----
    If a table is measured with noise of standard deviation σ, the mean absolute value of the noise
    is √(2/π)·σ in each cell. A table is chosen if its score exceeds the sum of this over its cells
    by more than √(2·log C) standard deviations of the scores' noise, about the largest noise of C
    scores. The largest differences come first, up to the count of the event `triples`.
    """
    planned = first.noise
    if planned.scores is None or planned.triples is None:
        raise InternalError("three-way tables are chosen that nobody pays for", None, "report it")
    # what a row changes in a score, as in one table
    step_ = math.sqrt(2.0) if planned.scores.adjacency == "replace-one" else 1.0
    most = round((planned.scores.sensitivity / (planned.triples.sensitivity * step_)) ** 2)
    cliques = tuple(counts.cliques)
    if len(cliques) > most or any(len(clique) == 3 for clique in first.chosen):
        what = "more three-way tables have scores than are paid for"
        raise InternalError(what, None, "report it")
    expected, tables = _expect(first, cliques, options), counts.cliques
    exact = [np.abs(tables[clique] - expected[clique]).sum() for clique in cliques]
    scores = noise.perturb(np.array(exact, dtype=np.int64), planned.scores, rng=rng)
    sizes = np.array([len(tables[clique]) for clique in cliques])
    explained = MEAN_OF_NOISE * deviation(planned.triples) * sizes
    explained += math.sqrt(2.0 * math.log(max(len(scores), 1))) * deviation(planned.scores)
    gains = scores - explained
    best = np.argsort(-gains, kind="stable")[: planned.triples.count]
    return tuple(cliques[place] for place in best if gains[place] > 0.0)


def _expect(
    first: NoisyMarginals, cliques: tuple[Clique, ...], options: CopulaOptions | None
) -> dict[Clique, Ints]:
    """Return the expected tables, in whole rows, of records that match the two-way tables: a function of the noisy tables alone."""
    # no secret: it decides only which sample stands for the model
    rng = stream(RunKey.insecure(0), "copula/expected", "")
    model, _ = fit_copula(first, rng, options)
    domain, n = first.domain, model.block_rows
    pool = model.sample(n, rng)
    weights = np.full(n, first.n_rows / n)
    if model.targets is not None:
        weights = model.targets.weigh(pool, domain, rng)
    found = {}
    for clique in cliques:
        codes = tuple(pool[list(domain.positions(clique))].astype(np.intp))
        cells = np.ravel_multi_index(codes, domain.shape_of(clique))
        table = np.bincount(cells, weights=weights, minlength=domain.size_of(clique))
        found[clique] = np.rint(table).astype(np.int64)
    return found
