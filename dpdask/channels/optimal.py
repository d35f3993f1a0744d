"""The optimal invariant channel: of all ε-private channels that leave the reference unchanged, the one of least cost."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from scipy.optimize import linprog

from dpdask.channels.laplace import LevelChannel, calibrated, spread_over_unseen
from dpdask.errors import SpecError
from dpdask.kernels import channel as kernel

MAX_OPTIMAL_LEVELS = 100
_TOLERANCE = 1e-10  # of the solver; HiGHS accepts no finer one

Floats = NDArray[np.float64]


def optimal(probabilities: Floats, epsilon: float, cost: Floats, *, ordered: bool = True) -> LevelChannel:
    """Return the ε-private channel with P·T = P that has the least expected cost.

    Parameters
    ----------
    probabilities
        The reference P, float64 array of shape (s,), summing to 1; zeros are levels that the reference never saw.
    epsilon
        Privacy parameter, positive and finite.
    cost
        float64 array of shape (s, s): what it costs to release level j for level k; finite, not negative.
    ordered
        Whether a level that was never seen takes the row of the nearest seen one; otherwise it takes P itself.

    Returns
    -------
    LevelChannel
        With P·T = P and ε* <= epsilon; its expected cost is never above that of the calibrated Laplace channel.

    Raises
    ------
    SpecError
        If P or the cost is no such thing, or more than 100 levels have positive probability.

    Privacy
    -------
    Unit: one value. Adjacency: replace-one. The solver is not trusted: whatever it returns is brought back to the
    invariant channels, mixed with 1·Pᵀ until ε*, computed in whole numbers, is at most ε, and only then used.

    Notes
    -----
    The linear program is solved in the likelihood ratios R[k, j] = T[k, j] / P_j, which are of order one however rare a
    level is: minimise Σ P_k P_j cost[k, j] R[k, j] subject to Σ_j P_j R[k, j] = 1, Σ_k P_k R[k, j] = 1, and
    t_j <= R[k, j] <= exp(ε) t_j.
    """
    _check(probabilities, epsilon, cost)
    seen = np.flatnonzero(probabilities > kernel.UNSEEN)
    if len(seen) > MAX_OPTIMAL_LEVELS:
        raise SpecError(
            f"the optimal channel is solved for at most {MAX_OPTIMAL_LEVELS} levels, and more have positive probability",
            "channel optimal",
            "declare the column continuous, which bins it, or take the channel laplace-calibrated",
        )
    reference = probabilities[seen] / probabilities[seen].sum()
    inner_cost = np.ascontiguousarray(cost[np.ix_(seen, seen)])
    weights = _solved(reference.tobytes(), float(epsilon), inner_cost.tobytes()).copy()
    best = spread_over_unseen(weights, reference, seen, len(probabilities), epsilon, ordered=ordered)
    fallback = calibrated(probabilities, epsilon, ordered=ordered)
    return best if _expected(best, probabilities, cost) <= _expected(fallback, probabilities, cost) else fallback


def _expected(channel: LevelChannel, probabilities: Floats, cost: Floats) -> float:
    return float((probabilities[:, None] * channel.matrix * cost).sum())


def _check(probabilities: Floats, epsilon: float, cost: Floats) -> None:
    s = len(probabilities)
    if not np.isfinite(probabilities).all() or (probabilities < 0).any() or abs(probabilities.sum() - 1) > 1e-9:
        raise SpecError("the reference must be probabilities that sum to 1", "channel optimal", "correct the reference")
    if not (math.isfinite(epsilon) and epsilon > 0):
        raise SpecError("ε must be positive and finite", "channel optimal", "correct privacy.epsilon")
    if cost.shape != (s, s) or not np.isfinite(cost).all() or (cost < 0).any():
        raise SpecError("the cost must be a finite, non-negative matrix with one row and column per level", "channel optimal", "correct the cost")


@lru_cache(maxsize=64)
def _solved(reference_bytes: bytes, epsilon: float, cost_bytes: bytes) -> NDArray[np.uint64]:
    """Return the repaired whole-number weights of one program; cached by its very content."""
    reference = np.frombuffer(reference_bytes)
    s = len(reference)
    cost = np.frombuffer(cost_bytes).reshape(s, s)
    if s == 1:
        return kernel.integer_weights(np.ones((1, 1)))
    channel = _invariant(_solve(reference, epsilon, cost), reference)
    return kernel.repaired_weights(channel, reference, epsilon)


def _solve(reference: Floats, epsilon: float, cost: Floats) -> Floats:
    """Return the program's likelihood ratios, float64 of shape (s, s); the constant channel if the solver gives up."""
    s = len(reference)
    n = s * s
    scale = max(float(cost.max()), np.finfo(np.float64).tiny)
    objective = np.concatenate([(np.outer(reference, reference) * (cost / scale)).ravel() * s, np.zeros(s)])
    row = reference[None, :]
    margins = sparse.vstack([sparse.kron(sparse.eye_array(s), row), sparse.kron(row, sparse.eye_array(s))])
    equal = sparse.hstack([margins, sparse.csr_array((2 * s, s))]).tocsr()
    entries, bounds = sparse.eye_array(n), sparse.kron(np.ones((s, 1)), sparse.eye_array(s))
    private = sparse.vstack([sparse.hstack([-entries, bounds]), sparse.hstack([entries * math.exp(-epsilon), -bounds])]).tocsr()
    solution = linprog(
        objective,
        A_ub=private,
        b_ub=np.zeros(2 * n),
        A_eq=equal,
        b_eq=np.ones(2 * s),
        bounds=(0, None),
        method="highs",
        options={"primal_feasibility_tolerance": _TOLERANCE, "dual_feasibility_tolerance": _TOLERANCE},
    )
    ratios: Floats = np.ones((s, s)) if solution.x is None else np.clip(solution.x[:n].reshape(s, s), 0.0, None)
    return ratios


def _invariant(ratios: Floats, reference: Floats) -> Floats:
    """Return the channel nearest to the solver's, in the sense of proportional fitting, whose joint law has both margins P."""
    joint = reference[:, None] * ratios * reference[None, :] + 1e-300
    for _ in range(100):
        joint *= (reference / joint.sum(axis=1))[:, None]
        joint *= (reference / joint.sum(axis=0))[None, :]
        if np.abs(joint.sum(axis=1) - reference).max() <= 1e-17:
            break
    channel: Floats = joint / joint.sum(axis=1, keepdims=True)
    return channel
