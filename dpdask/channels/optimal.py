"""The optimal invariant channel: of all ε-private channels that leave the reference unchanged, the one of least cost."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np

from dpdask.channels.laplace import LevelChannel, Margins, calibrate, spread_over_unseen
from dpdask.errors import SpecError
from dpdask.kernels import channel as kernel
from dpdask.kernels.jit import Floats, Words
from dpdask.steps import step

MAX_OPTIMAL_LEVELS = 100
_TOLERANCE = 1e-10  # of the solver; HiGHS accepts no finer one


def optimal(
    probabilities: Floats,
    epsilon: float,
    cost: Floats,
    *,
    ordered: bool = True,
    target: Floats | None = None,
) -> LevelChannel:
    """Return the ε-private channel with P·T = Q that has the least expected cost; Q is P if no target is given.

    Parameters
    ----------
    probabilities
        The distribution P of the level that goes in, float64 array of shape (s,), summing to 1;
        zeros are levels never seen.
    cost
        float64 array of shape (s, s): the cost of releasing level j for level k; finite, not
        negative.
    ordered
        Whether a level that was never seen takes the row of the nearest seen one; otherwise it
        takes Q itself.
    target
        The distribution Q that the released level is to have, float64 array of shape (s,), summing
        to 1.

    Returns
    -------
    LevelChannel
        With P·T = Q and ε* <= epsilon; its expected cost is never above that of the calibrated
        Laplace channel.

    Privacy
    -------
    Unit: one value. Adjacency: replace-one. The solver is not trusted: whatever it returns is
    brought back to the channels with P·T = Q, mixed with 1·Qᵀ until ε*, computed in whole numbers,
    is at most ε, and only then used.

    Notes
    -----
    The linear program is solved in the likelihood ratios R[k, j] = T[k, j] / Q_j, which are of
    order one however rare a level is: minimise Σ P_k Q_j cost[k, j] R[k, j] subject to Σ_j Q_j R[k,
    j] = 1, Σ_k P_k R[k, j] = 1, and t_j <= R[k, j] <= exp(ε) t_j.
    """
    margins = Margins.of(probabilities, target)
    if max(len(margins.rows), len(margins.columns)) > MAX_OPTIMAL_LEVELS:
        raise SpecError(
            f"the optimal channel is solved for at most {MAX_OPTIMAL_LEVELS} levels, and more have positive probability",
            "channel optimal",
            "declare the column continuous, which bins it, or take the channel laplace-calibrated",
        )
    inner_cost = np.ascontiguousarray(cost[np.ix_(margins.rows, margins.columns)])
    weights = solve_weights(
        margins.source.tobytes(), margins.target.tobytes(), float(epsilon), inner_cost.tobytes()
    ).copy()
    best = spread_over_unseen(weights, margins, epsilon, ordered=ordered)
    fallback = calibrate(probabilities, epsilon, ordered=ordered, target=target)
    return (
        best
        if _expect_cost(best, probabilities, cost) <= _expect_cost(fallback, probabilities, cost)
        else fallback
    )


def _expect_cost(channel: LevelChannel, probabilities: Floats, cost: Floats) -> float:
    return float((probabilities[:, None] * channel.matrix * cost).sum())


@lru_cache(maxsize=64)
def solve_weights(
    source_bytes: bytes, target_bytes: bytes, epsilon: float, cost_bytes: bytes
) -> Words:
    """Return the repaired whole-number weights of one linear program; cached by its content.

    Parameters
    ----------
    source_bytes
        P on its seen levels, as the bytes of a float64 array.
    """
    source, target = np.frombuffer(source_bytes), np.frombuffer(target_bytes)
    cost = np.frombuffer(cost_bytes).reshape(len(source), len(target))
    if 1 in cost.shape:  # the constant channel is the only one
        return kernel.integer_weights(np.tile(target, (len(source), 1)))
    channel = _couple(_solve(source, target, epsilon, cost), source, target)
    return kernel.repair_weights(channel, target, epsilon)


@step("computing a channel")
def _solve(source: Floats, target: Floats, epsilon: float, cost: Floats) -> Floats:
    """Return the program's likelihood ratios, float64 of shape (m, n); the constant channel if the solver gives up."""
    m, n = cost.shape
    scale = max(float(cost.max()), np.finfo(np.float64).tiny)
    objective = np.concatenate(
        [(np.outer(source, target) * (cost / scale)).ravel() * n, np.zeros(n)]
    )
    solution = solve_program(objective, *constrain(source, target, epsilon))
    ratios: Floats = (
        np.ones((m, n)) if solution is None else np.clip(solution[: m * n].reshape(m, n), 0.0, None)
    )
    return ratios


def constrain(source: Floats, target: Floats, epsilon: float) -> tuple[Any, Any]:
    """Return the sparse matrices A and B of the program: A x = 1 gives both margins, B x <= 0 is ε-private.

    Parameters
    ----------
    source, target
        P and Q, float64 of shapes (m,) and (n,). x holds the m·n likelihood ratios, row by row, and
        the n bounds t_j.
    """
    from scipy import sparse  # slow to import, and only these channels need it

    m, n = len(source), len(target)
    margins = sparse.vstack(
        [
            sparse.kron(sparse.eye_array(m), target[None, :]),
            sparse.kron(source[None, :], sparse.eye_array(n)),
        ]
    )
    equal = sparse.hstack([margins, sparse.csr_array((m + n, n))]).tocsr()
    entries, bounds = sparse.eye_array(m * n), sparse.kron(np.ones((m, 1)), sparse.eye_array(n))
    private = sparse.vstack(
        [sparse.hstack([-entries, bounds]), sparse.hstack([entries * math.exp(-epsilon), -bounds])]
    ).tocsr()
    return equal, private


def solve_program(
    objective: Floats, equal: Any, private: Any, right: Floats | None = None
) -> Floats | None:
    """Return the x >= 0 of least objective with `equal` x = 1 (or `right`) and `private` x <= 0; None if the solver gives up."""
    from scipy.optimize import linprog

    found: Floats | None = None
    for presolve in (True, False):  # which finds some programs infeasible that are not
        solution = linprog(
            objective,
            A_ub=private,
            b_ub=np.zeros(private.shape[0]),
            A_eq=equal,
            b_eq=np.ones(equal.shape[0]) if right is None else right,
            bounds=(0, None),
            method="highs",
            options={
                "presolve": presolve,
                "primal_feasibility_tolerance": _TOLERANCE,
                "dual_feasibility_tolerance": _TOLERANCE,
            },
        )
        found = solution.x
        if found is not None:
            break
    return found


def _couple(ratios: Floats, source: Floats, target: Floats) -> Floats:
    """Return the channel nearest to the solver's, in the sense of proportional fitting, whose joint distribution has margins P and Q."""
    joint = source[:, None] * ratios * target[None, :] + 1e-300
    for _ in range(100):
        joint *= (source / joint.sum(axis=1))[:, None]
        joint *= (target / joint.sum(axis=0))[None, :]
        if np.abs(joint.sum(axis=1) - source).max() <= 1e-17:
            break
    channel: Floats = joint / joint.sum(axis=1, keepdims=True)
    return channel
