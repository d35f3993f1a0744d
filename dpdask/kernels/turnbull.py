"""The maximum likelihood distribution of values known only by ranges that contain them, with its certificate.

Ranges are sets of cells of the line, as `dpdask.stats.ranges` counts them: cells left ... right,
or, where left > right, the ring of the cells 0 ... right and left ... last.
"""

from __future__ import annotations

from contextlib import suppress
from typing import NamedTuple

import numpy as np
from scipy import linalg, sparse

from dpdask.arrays import Flags, Floats, Ints, freeze_class
from dpdask.kernels import one_thread
from dpdask.kernels.jit import jit

MAX_ATOMS = 6000
"""Newton's steps hold two square matrices of this size: 0.6 GB."""

_NEWTON_STEPS = 200
_EM_STEPS = 10
_BEYOND = 0.1  # of the tolerance: how far Newton goes, so that there is room for the zeros
# of an atom's slack: the masses that may be zeros, as many as there is room for
_ZEROS = (1.0, 1e-2, 1e-4, 1e-6)
_TO_BOUNDARY = 0.995
_BACKTRACKS = 40


@freeze_class(eq=False)
class Solution:
    """The estimate's support and masses."""

    # Int64 arrays of shape (m,): the maximal intersections, as cells, increasing and disjoint.
    first: Ints
    last: Ints
    masses: Floats  # float64 array of shape (m,): non-negative, of sum 1
    # Max_j g_j - 1, with g_j the mean, over rows whose range does not hold all atoms, of 1{j in
    # range} / P(range); at least 0, 0 at the maximum. By concavity no distribution has a
    # log-likelihood higher by more than the rows times this.
    duality_gap: float
    log_likelihood: float  # Σ over rows of log P(range), in nats
    n_iterations: int  # newton steps; 0 where the solution is explicit (Case I)
    # By how much at most a stretch of the cdf may be shifted as a whole without a loss of
    # likelihood: 0 if the masses are unique, as they always are where no range is a ring.
    drift: float


class _Ranges(NamedTuple):
    """Distinct ranges over atoms: those of start ... stop - 1, or for a ring all the others."""

    start: Ints
    stop: Ints
    ring: Flags
    share: Floats  # of the informative rows; of sum 1


def maximal_intersections(left: Ints, right: Ints, n_cells: int) -> tuple[Ints, Ints]:
    """Return the sets of cells to which a maximum likelihood estimate may give mass.

    Notes
    -----
    They run from where a range starts to the first place where one ends, with no start between
    (Turnbull). A ring is cut where the line ends: it starts at `left` and at 0 and ends at `right`
    and at the last cell.
    """
    starts, ends = np.zeros(n_cells, dtype=bool), np.zeros(n_cells, dtype=bool)
    starts[left], ends[right] = True, True
    if (left > right).any():
        starts[0], ends[-1] = True, True
    places = np.concatenate([2 * np.flatnonzero(starts), 2 * np.flatnonzero(ends) + 1])
    places.sort()
    here = (places[:-1] % 2 == 0) & (places[1:] % 2 == 1)
    return places[:-1][here] // 2, places[1:][here] // 2


def npmle(
    left: Ints, right: Ints, counts: Ints, n_cells: int, *, tolerance: float = 1e-8
) -> Solution:
    """Return the nonparametric maximum likelihood estimate of the distribution of values in ranges.

    Parameters
    ----------
    left, right
        int64 arrays of shape (c,), in [0, n_cells): distinct ranges of cells, rings where left >
        right + 1.
    counts
        int64 array of shape (c,), positive: how many rows have each.
    tolerance
        The duality gap at which to stop. If 200 Newton steps do not reach it, the gap that they
        reached is returned.

    Notes
    -----
    Maximises Σ_i s_i log P_i(p) - Σ_j p_j over p >= 0, s the shares of the ranges, whose maximum
    has Σ p = 1. P_i is a difference of two prefix sums of p. Gradients are prefix sums of s_i /
    P_i, and the Hessian, Σ s_i/P_i² over the ranges with both atoms j <= k in them, is a
    two-dimensional prefix sum: a step costs the ranges plus m², and one Cholesky of m × m, whatever
    the number of rows. Primal-dual interior steps of Newton converge however the ranges overlap,
    where EM and ICM slow down; EM gives the start. Where the masses are not unique, the analytic
    centre of all solutions is approached. Ranges that all have one end open are Case I data, which
    pooling solves.

    References
    ----------
    Turnbull, The empirical distribution function with arbitrarily grouped, censored and truncated
    data (1976); Gentleman and Geyer, Maximum likelihood for interval censored data: consistency and
    computation (1994), section 3; Groeneboom and Wellner (1992), section 2.2 (the conditions behind
    the gap); Koenker and Mizera, Convex optimization, shape constraints, compound decisions, and
    empirical Bayes rules (2014), section 3 (interior points for mixtures).
    """
    if ((left == 0) & (right == n_cells - 1)).all():
        raise ValueError("no range says anything")
    first, last = maximal_intersections(left, right, n_cells)
    ranges, n_informative = _over_atoms(left, right, counts, first, last)
    n_atoms = len(first)
    if not n_informative:  # every atom lies in every range
        masses, n_iterations = np.full(n_atoms, 1.0 / n_atoms), 0
    elif not ranges.ring.any() and bool(((ranges.start == 0) | (ranges.stop == n_atoms)).all()):
        masses, n_iterations = _pool(ranges, n_atoms, n_informative), 0
    elif n_atoms > MAX_ATOMS:
        raise ValueError(f"{n_atoms} maximal intersections are above {MAX_ATOMS}")
    else:
        # threads of a BLAS library on busy cores wait for each other in turns: one is faster, and
        # sums in one order
        with one_thread():
            masses, n_iterations = _interior(ranges, n_atoms, _BEYOND * tolerance)
        masses = _empty(ranges, masses, tolerance)
    gradient, likelihood = _gradient(ranges, masses)
    return Solution(
        first=first,
        last=last,
        masses=masses,
        duality_gap=max(float(gradient.max()) - 1.0, 0.0) if n_informative else 0.0,
        log_likelihood=likelihood * n_informative,
        n_iterations=n_iterations,
        drift=_drift(ranges, masses),
    )


def deviation(
    left: Ints, right: Ints, counts: Ints, atoms: tuple[Ints, Ints, Floats], values: Floats
) -> float:
    """Return the standard deviation of Σ_j p_j φ_j over drawing the rows, the support held fixed.

    Parameters
    ----------
    left, right, counts
        As for `npmle`.
    atoms
        First and last cells and masses p of the atoms with mass, m of them.
    values
        float64 array of shape (m,): φ at each.

    Notes
    -----
    The score of a row is 1{j in range} / P, the information H their mean outer product. With a the
    solution of H a + μ 1 = φ, 1'a = 0, the row moves the functional by Σ_j in range a_j / P.
    """
    first, last, masses = atoms
    ranges, n_rows = _over_atoms(left, right, counts, first, last)
    size = len(masses)
    if n_rows <= size or size < 2:
        return 0.0
    place = np.arange(size)
    inside = (ranges.start[:, None] <= place) & (place < ranges.stop[:, None])
    scores = (inside ^ ranges.ring[:, None]).astype(np.float64)
    scores /= (scores @ masses)[:, None]
    with one_thread():
        information = np.ones((size + 1, size + 1))
        information[:size, :size] = (scores * ranges.share[:, None]).T @ scores
        information[size, size] = 0.0
        wanted = np.append(values - masses @ values, 0.0)
        slope = np.linalg.lstsq(information, wanted, rcond=1e-12)[0][:size]
    moves = scores @ slope
    return float(np.sqrt(ranges.share @ moves**2 / (n_rows - size)))


def _over_atoms(
    left: Ints, right: Ints, counts: Ints, first: Ints, last: Ints
) -> tuple[_Ranges, int]:
    """Return the distinct ranges over the atoms with their shares, without those that have all atoms, and of how many rows."""
    size = len(first)
    begin = np.searchsorted(first, left, side="left")
    end = np.searchsorted(last, right, side="right")
    ring = left > right
    start, stop = np.where(ring, end, begin), np.where(ring, begin, end)
    kept = np.where(ring, start < stop, (start > 0) | (stop < size))
    keys, inverse = np.unique(
        (ring * (size + 1) + start)[kept] * (size + 1) + stop[kept], return_inverse=True
    )
    rows = np.zeros(len(keys), dtype=np.int64)
    np.add.at(rows, inverse, counts[kept])
    total = int(rows.sum())
    first_key = keys // (size + 1)
    return _Ranges(
        first_key % (size + 1), keys % (size + 1), first_key > size, rows / max(total, 1)
    ), total


def _pool(ranges: _Ranges, size: int, n_rows: int) -> Floats:
    """Return the masses where every range is all atoms up to a place, or all from it (Case I data).

    Notes
    -----
    Maximises Σ_j b_j log F(u_j) + (n_j - b_j) log(1 - F(u_j)) over all F: the isotonic regression
    of b_j / n_j with weights n_j does, exactly.

    References
    ----------
    Ayer, Brunk, Ewing, Reid and Silverman (1955), theorem 2.1; Groeneboom and Wellner, Information
    bounds and nonparametric maximum likelihood estimation (1992), proposition 1.2; Barlow,
    Bartholomew, Bremner and Brunk, Statistical inference under order restrictions (1972), section
    1.2 (pool adjacent violators).
    """
    from scipy import optimize  # slow to import

    below = ranges.start == 0
    rows = np.rint(ranges.share * n_rows)
    asked = np.bincount(
        np.where(below, ranges.stop, ranges.start), weights=rows, minlength=size + 1
    )[1:size]
    under = np.bincount(ranges.stop[below], weights=rows[below], minlength=size + 1)[1:size]
    seen = asked > 0
    fitted = optimize.isotonic_regression(under[seen] / asked[seen], weights=asked[seen]).x
    cdf = np.concatenate([[0.0], fitted])[np.cumsum(seen)]
    return np.diff(np.concatenate([[0.0], cdf, [1.0]]))


def _gradient(ranges: _Ranges, masses: Floats) -> tuple[Floats, float]:
    """Return Σ_i s_i 1{j in i} / P_i for each atom j, and Σ_i s_i log P_i."""
    slope = np.zeros(len(masses) + 1)
    likelihood, base = _add_slopes(ranges, _prefix(masses), slope)
    gradient: Floats = np.cumsum(slope)[:-1] + base
    return gradient, likelihood


def _prefix(masses: Floats) -> Floats:
    return np.concatenate([[0.0], np.cumsum(masses)])


@jit
def _add_slopes(ranges: _Ranges, prefix: Floats, slope: Floats) -> tuple[float, float]:
    start, stop, ring, share = ranges
    likelihood, base, total = 0.0, 0.0, prefix[-1]
    for i in range(len(start)):
        probability = prefix[stop[i]] - prefix[start[i]]
        if ring[i]:
            probability = total - probability
        # only where a step or rounding emptied a range: such masses are turned down
        if probability <= 0.0:
            return -np.inf, np.inf
        weight = share[i] / probability
        likelihood += share[i] * np.log(probability)
        if ring[i]:
            base += weight
            weight = -weight
        slope[start[i]] += weight
        slope[stop[i]] -= weight
    return likelihood, base


@jit
def _hessian(ranges: _Ranges, prefix: Floats, slack: Floats, root: Floats, matrix: Floats) -> None:
    """Overwrite the upper triangle of `matrix` with √p_j H_jk √p_k + 1{j = k} z_j."""
    start, stop, ring, share = ranges
    size, base, total = len(root), 0.0, prefix[-1]
    outer = np.zeros(size + 1)  # Σ s/P² over the rings whose gap holds an atom
    for j in range(size):
        for k in range(size):
            matrix[j, k] = 0.0
    for i in range(len(start)):
        probability = prefix[stop[i]] - prefix[start[i]]
        if ring[i]:
            probability = total - probability
        weight = share[i] / (probability * probability)
        matrix[start[i], stop[i] - 1] += weight
        if ring[i]:
            base += weight
            outer[start[i]] += weight
            outer[stop[i]] -= weight
    for j in range(1, size):
        outer[j] += outer[j - 1]
        for k in range(size):
            matrix[j, k] += matrix[j - 1, k]
    for j in range(size):
        running = 0.0
        for k in range(size - 1, j - 1, -1):
            running += matrix[j, k]  # of ranges that start at j or before and end at k or after
            matrix[j, k] = running
    for j in range(size):
        for k in range(j, size):
            matrix[j, k] = (matrix[j, k] + base - outer[j] - outer[k]) * root[j] * root[k]
        matrix[j, j] += slack[j]


def _interior(ranges: _Ranges, size: int, tolerance: float) -> tuple[Floats, int]:
    """Return positive masses and how many Newton steps they took; `slack` is z, 1 - g at the maximum."""
    masses = np.full(size, 1.0 / size)
    for _ in range(_EM_STEPS):
        masses *= _gradient(ranges, masses)[0]
    masses = np.maximum(masses, 1e-3 / size)
    slack, matrix, centring = np.full(size, 0.1), np.zeros((size, size)), 0.3
    for iteration in range(_NEWTON_STEPS):
        gradient, likelihood = _gradient(ranges, masses)
        if gradient.max() * masses.sum() - 1.0 <= tolerance:
            return masses / masses.sum(), iteration
        target = max(centring * float(masses @ slack) / size, 0.05 * tolerance / size)
        root = np.sqrt(masses)
        _hessian(ranges, _prefix(masses), slack, root, matrix)
        ascent = gradient - 1.0 + target / masses
        move = root * _solve_step(matrix, root * ascent)
        slack_move = (target - masses * slack - slack * move) / masses
        # a step at which the likelihood with its barrier is higher, up to rounding
        height = likelihood - masses.sum() + target * np.log(masses).sum()
        height -= 1e-13 * (1.0 + abs(height))
        step, slope = min(1.0, _TO_BOUNDARY * _longest(masses, move)), float(ascent @ move)
        for _ in range(_BACKTRACKS):
            tried = masses + step * move
            value = _gradient(ranges, tried)[1] - tried.sum() + target * np.log(tried).sum()
            if value >= height + 1e-4 * step * slope:
                break
            step *= 0.5
        slack = slack + min(1.0, _TO_BOUNDARY * _longest(slack, slack_move)) * slack_move
        masses = masses + step * move
        centring = 0.1 if step > 0.9 else 0.5
    return masses / masses.sum(), _NEWTON_STEPS


def _solve_step(matrix: Floats, right: Floats) -> Floats:
    """Return matrix⁻¹ right of a positive semidefinite matrix given by its upper triangle, slightly lifted if it is singular."""
    diagonal = np.diag(matrix).copy()
    for lift in (0.0, 1e-13, 1e-10, 1e-7):
        np.fill_diagonal(matrix, diagonal * (1.0 + lift) + lift)
        with suppress(np.linalg.LinAlgError):
            factor = linalg.cho_factor(matrix, check_finite=False)
            return linalg.cho_solve(factor, right, check_finite=False)
    return right / np.maximum(diagonal, 1e-300)


def _longest(values: Floats, move: Floats) -> float:
    """Return how far positive values can move before one is 0, at most infinitely far."""
    falling = move < 0
    return float(np.min(values[falling] / -move[falling], initial=np.inf))


def _empty(ranges: _Ranges, masses: Floats, tolerance: float) -> Floats:
    """Return the masses with exact zeros where the limit has them, as far as the gap stays within the tolerance."""
    # not Newton's z, which means nothing where EM alone was enough
    slack = 1.0 - _gradient(ranges, masses)[0]
    for share in _ZEROS:
        result = np.where(masses < share * slack, 0.0, masses)
        result /= result.sum()
        if float(_gradient(ranges, result)[0].max()) - 1.0 <= tolerance:
            return result
    return masses


def _drift(ranges: _Ranges, masses: Floats) -> float:
    """Return how far the cdf may shift on a set of borders between atoms that the ranges do not tie to the ends of the line.

    The ranges' probabilities are unique. Each ties two borders: it gives the difference of the cdf.
    So does an atom without mass. Borders tied to the ends, over however many ranges, are
    determined. An island of others may move up by the least mass that follows one of its borders,
    and down by the least that leads to one. Islands are moved one by one, and all together.
    """
    size = len(masses)
    empty = np.flatnonzero(masses == 0.0)
    one = np.concatenate([ranges.start, empty, [0]])
    other = np.concatenate([ranges.stop, empty + 1, [size]])
    graph = sparse.coo_array(
        (np.ones(len(one), dtype=np.int8), (one, other)), shape=(size + 1, size + 1)
    )
    n_islands, island = sparse.csgraph.connected_components(graph, directed=False)
    if n_islands == 1:
        return 0.0
    return max(
        _room(island, masses, n_islands), _room((island != island[0]).astype(np.int64), masses, 2)
    )


def _room(island: Ints, masses: Floats, n_islands: int) -> float:
    """Return how far the least constrained island may move; island[0], at the line's ends, is fixed."""
    up, down = np.full(n_islands, np.inf), np.full(n_islands, np.inf)
    crossed = island[:-1] != island[1:]
    np.minimum.at(up, island[:-1][crossed], masses[crossed])
    np.minimum.at(down, island[1:][crossed], masses[crossed])
    room = up + down
    room[island[0]] = 0.0
    return float(room.max())
