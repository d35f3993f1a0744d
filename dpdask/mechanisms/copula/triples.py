"""Three-way tables that are chosen under privacy: those that records of the two-way tables miss most."""

from __future__ import annotations

import itertools
import math

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from dpdask.errors import InternalError
from dpdask.mechanisms.copula.fit import fit_copula
from dpdask.mechanisms.marginals.denoise import MEAN_OF_NOISE
from dpdask.mechanisms.marginals.noise import NoisyMarginals
from dpdask.privacy import noise
from dpdask.privacy.noise import deviation
from dpdask.stats import Clique, Domain, MarginalCounts
from dpdask.streams import RunKey, stream

MOST_CANDIDATES = 512  # tables that a pass over the rows counts, and whose scores share the noise
MOST_CELLS = 5_000  # of a candidate
_POOL_ROWS = 2**17


def count_candidates(n_columns: int, target: str | None) -> int:
    """Return how many three-way tables have a score, at most: what the noise of the scores is made for.

    Parameters
    ----------
    n_columns
        The number of columns.
    target
        The column that every candidate has, or None.
    """
    return min(MOST_CANDIDATES, math.comb(n_columns, 3) if target is None else math.comb(n_columns - 1, 2))


def list_candidates(domain: Domain, target: str | None) -> tuple[Clique, ...]:
    """Return the three-way tables that may be chosen: public, of at most 5,000 cells, the smallest 512.

    Parameters
    ----------
    domain
        The columns and their cells.
    target
        The column that every candidate has, or None.
    """
    every = (clique for clique in itertools.combinations(domain.names, 3) if target is None or target in clique)
    sizes = sorted((domain.size_of(clique), place, clique) for place, clique in enumerate(every))
    return tuple(clique for size, _, clique in sizes[:MOST_CANDIDATES] if size <= MOST_CELLS)


def choose_triples(first: NoisyMarginals, counts: MarginalCounts, rng: Generator | None = None) -> tuple[Clique, ...]:
    """Return the three-way tables to measure: those by which records of the two-way tables are off most, by noisy scores.

    Parameters
    ----------
    first
        The noisy one- and two-way tables.
    counts
        Exact tables of the candidates.
    rng
        None: secure noise. A stream: INSECURE, for runs marked so; see `privacy.noise`.

    Privacy
    -------
    Scores: the sum over a table's cells of |count - expected|. What is expected is a function of `first`, so a row added or removed
    changes each score by at most 1, and a row replaced by at most 2. Unit, event: `scores` of `MarginalNoise`. Exact scores stay here.

    Notes
    -----
    A table of noise of standard deviation σ is itself off by √(2/π)·σ in each cell. A table is chosen if its score is larger than
    that, the largest differences first, as many as the event `triples` counts.
    """
    planned = first.noise
    if planned.scores is None or planned.triples is None:
        raise InternalError("three-way tables are chosen that nobody pays for", None, "report it")
    expected = _expect(first, tuple(counts.cliques))
    exact = np.array([np.abs(table - expected[clique]).sum() for clique, table in counts.cliques.items()], dtype=np.int64)
    scores = noise.perturb(exact, planned.scores, rng=rng)
    explained = MEAN_OF_NOISE * deviation(planned.triples) * np.array([len(table) for table in counts.cliques.values()])
    gains = scores - explained
    cliques = list(counts.cliques)
    return tuple(cliques[place] for place in np.argsort(-gains, kind="stable")[: planned.triples.count] if gains[place] > 0.0)


def _expect(first: NoisyMarginals, cliques: tuple[Clique, ...]) -> dict[Clique, NDArray[np.int64]]:
    """Return the tables that records of the two-way tables have, in whole rows: a function of the noisy tables alone."""
    rng = stream(RunKey.insecure(0), "copula/expected", "")  # no secret: it decides only which sample stands for the model
    model, _ = fit_copula(first, rng)
    pool = model.sample(_POOL_ROWS, rng)
    weights = np.full(_POOL_ROWS, first.n_rows / _POOL_ROWS) if model.targets is None else model.targets.weigh(pool, first.domain, rng)
    found = {}
    for clique in cliques:
        cells = np.ravel_multi_index(tuple(pool[list(first.domain.positions(clique))].astype(np.intp)), first.domain.shape_of(clique))
        found[clique] = np.rint(np.bincount(cells, weights=weights, minlength=first.domain.size_of(clique))).astype(np.int64)
    return found
