"""Three-way tables that are chosen under privacy: those in which records of the two-way tables have the largest errors."""

from __future__ import annotations

import itertools
import math

import numpy as np
from numpy.typing import NDArray

from dpdask.errors import InternalError
from dpdask.kernels.permutation import permutation
from dpdask.mechanisms.copula.fit import CopulaOptions, fit_copula
from dpdask.mechanisms.copula.raking import MOST_CELLS
from dpdask.mechanisms.marginals.denoise import MEAN_OF_NOISE
from dpdask.mechanisms.marginals.noise import NoisyMarginals
from dpdask.privacy import noise
from dpdask.privacy.noise import deviation
from dpdask.stats import Clique, Domain, MarginalCounts
from dpdask.streams import Rng, RunKey, stream, words

MOST_CANDIDATES = 512  # tables that a pass over the rows counts, and whose scores share the noise


def count_candidates(n_columns: int, target: str | None) -> int:
    """Return the largest number of three-way tables that get a score; it sets the noise of the scores.

    Parameters
    ----------
    n_columns
        The number of columns.
    target
        The column that every candidate has, or None.
    """
    return min(MOST_CANDIDATES, math.comb(n_columns, 3) if target is None else math.comb(n_columns - 1, 2))


def list_candidates(domain: Domain, target: str | None) -> tuple[Clique, ...]:
    """Return the three-way tables that may be chosen: at most 512, each of at most 5,000 cells; the list is public.

    Parameters
    ----------
    domain
        The columns and their cells.
    target
        The column that every candidate has, or None.

    Notes
    -----
    If there are more than 512, tables of the columns with the fewest cells are taken; a fixed order mixes columns of one size. Only as
    many columns are considered as are needed for enough tables.
    """
    rng = stream(RunKey.insecure(0), "copula/candidates", "")  # public: the same order in every run
    mixed = permutation(words(rng, domain.n_attributes))
    columns = [int(place) for place in mixed[np.argsort(np.array(domain.sizes)[mixed], kind="stable")] if domain.names[place] != target]
    n_looked = next((n for n in range(len(columns)) if math.comb(n, 2 if target else 3) >= 4 * MOST_CANDIDATES), len(columns))
    fixed = () if target is None else (domain.position(target),)
    every = [tuple(sorted((*fixed, *others))) for others in itertools.combinations(columns[:n_looked], 3 - len(fixed))]
    sizes = np.array([math.prod(domain.sizes[place] for place in places) for places in every], dtype=np.int64)
    order = permutation(words(rng, len(every)))
    smallest = order[np.argsort(sizes[order], kind="stable")][:MOST_CANDIDATES]
    return tuple(tuple(domain.names[place] for place in every[found]) for found in sorted(smallest) if sizes[found] <= MOST_CELLS)


def choose_triples(
    first: NoisyMarginals, counts: MarginalCounts, options: CopulaOptions | None = None, *, rng: Rng | None = None
) -> tuple[Clique, ...]:
    """Return the three-way tables to measure: those with the largest noisy scores, in which records of the two-way tables are most wrong.

    Parameters
    ----------
    first
        The noisy one- and two-way tables.
    counts
        Exact tables of the candidates.
    options
        The steps of the fit that are switched off.
    rng
        None: secure noise. A stream: INSECURE, for runs marked so; see `privacy.noise`.

    Privacy
    -------
    Score: the sum over a table's cells of |count - expected|. The expected counts are a function of `first`, so a row added or removed
    changes each score by at most 1, and a row replaced by at most 2. Unit, event: `scores` of `MarginalNoise`. Exact scores are not returned.

    Notes
    -----
    If a table is measured with noise of standard deviation σ, the mean absolute value of the noise is √(2/π)·σ in each cell. A table is
    chosen if its score exceeds the sum of this over its cells by more than √(2·log C) standard deviations of the scores' noise, about the
    largest noise of C scores. The largest differences come first, up to the count of the event `triples`.
    """
    planned = first.noise
    if planned.scores is None or planned.triples is None:
        raise InternalError("three-way tables are chosen that nobody pays for", None, "report it")
    of_one_table = planned.triples.sensitivity * (math.sqrt(2.0) if planned.scores.adjacency == "replace-one" else 1.0)  # and so of one score
    if len(counts.cliques) > round((planned.scores.sensitivity / of_one_table) ** 2) or any(len(clique) == 3 for clique in first.chosen):
        raise InternalError("more three-way tables have scores than are paid for", None, "report it")
    expected = _expect(first, tuple(counts.cliques), options)
    exact = np.array([np.abs(table - expected[clique]).sum() for clique, table in counts.cliques.items()], dtype=np.int64)
    scores = noise.perturb(exact, planned.scores, rng=rng)
    explained = MEAN_OF_NOISE * deviation(planned.triples) * np.array([len(table) for table in counts.cliques.values()])
    explained += math.sqrt(2.0 * math.log(max(len(scores), 1))) * deviation(planned.scores)
    gains = scores - explained
    cliques = list(counts.cliques)
    return tuple(cliques[place] for place in np.argsort(-gains, kind="stable")[: planned.triples.count] if gains[place] > 0.0)


def _expect(first: NoisyMarginals, cliques: tuple[Clique, ...], options: CopulaOptions | None) -> dict[Clique, NDArray[np.int64]]:
    """Return the expected tables, in whole rows, of records that match the two-way tables: a function of the noisy tables alone."""
    rng = stream(RunKey.insecure(0), "copula/expected", "")  # no secret: it decides only which sample stands for the model
    model, _ = fit_copula(first, rng, options)
    n = model.block_rows
    pool = model.sample(n, rng)
    weights = np.full(n, first.n_rows / n) if model.targets is None else model.targets.weigh(pool, first.domain, rng)
    found = {}
    for clique in cliques:
        cells = np.ravel_multi_index(tuple(pool[list(first.domain.positions(clique))].astype(np.intp)), first.domain.shape_of(clique))
        found[clique] = np.rint(np.bincount(cells, weights=weights, minlength=first.domain.size_of(clique))).astype(np.int64)
    return found
