"""Channels on levels: which output level each input level may become, and with what probability."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dpdask.arrays import Floats, Indices, Words
from dpdask.codec import Codec, LevelCodec
from dpdask.domains import MAX_LEVELS
from dpdask.errors import SpecError
from dpdask.kernels import channel as kernel
from dpdask.kernels.window import RankWindow, bound_kept, bound_loss, find_design, make_window
from dpdask.steps import step

# ---- as published: Laplace noise on ranks, in closed form on levels

_BISECTIONS = 45
_LEAST_SCALE = 1e-3  # below it the noise vanishes for every ε that a budget allows


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LevelChannel:
    """A row-stochastic matrix on levels, held in whole numbers."""

    # Uint64 array of shape (s, s): Pr(output j | input k) = weights[k, j] / 2**63, exactly as it is
    # sampled.
    weights: Words
    epsilon: float  # Ε*, the channel's exact privacy loss under replace-one, rounded up

    @property
    def matrix(self) -> Floats:
        """The channel as probabilities, float64 array of shape (s, s)."""
        return self.weights.astype(np.float64) / 2.0**kernel.TOTAL_BITS


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Margins:
    """The distributions of a channel's input and output, on the levels that have positive probability."""

    n_levels: int  # how many levels there are in all
    rows: Indices  # the levels that go in and come out, increasing; indices among all
    columns: Indices
    source: Floats  # float64 arrays, their probabilities, each summing to 1
    target: Floats

    @classmethod
    def of(cls, probabilities: Floats, target: Floats | None) -> Self:
        """Return both margins; without a target they are equal."""
        rows, source = _seen(probabilities)
        columns, wanted = (rows, source) if target is None else _seen(target)
        return cls(
            n_levels=len(probabilities), rows=rows, columns=columns, source=source, target=wanted
        )


def _seen(probabilities: Floats) -> tuple[Indices, Floats]:
    seen = np.flatnonzero(probabilities > kernel.UNSEEN)
    return seen, probabilities[seen] / probabilities[seen].sum()


def laplace(
    probabilities: Floats,
    epsilon: float,
    *,
    ordered: bool,
    target: Floats | None = None,
) -> LevelChannel:
    """Return the channel of Laplace noise with scale 1/epsilon on ranks.

    Parameters
    ----------
    probabilities
        The distribution P of the level that goes in, float64 array of shape (s,), summing to 1;
        zeros are levels that were never seen.
    ordered
        Whether the levels have an order. If not, the paper's mechanism has none either: it then
        works on the order in which the levels are declared, which keeps the privacy and the
        invariance but makes that order matter.
    target
        The distribution Q that the released level is to have, float64 array of shape (s,), summing
        to 1; P if not given, and the channel then leaves the reference as it is.

    Privacy
    -------
    Unit: one value. Adjacency: replace-one. ε* is computed from the whole-number weights that are
    sampled, and holds whatever the distribution of the input is.

    Notes
    -----
    A level that P never saw takes the row of the nearest seen one (ordered; the lower of two) or Q
    itself (categorical). Both are rows that already satisfy ε, so ε* does not change.

    References
    ----------
    Bi and Shen, Distribution-invariant differential privacy, equations (3)-(4), as one closed-form
    channel; with a target, ranks under P are read through the quantiles of Q, as the text around
    (2) does from one conditional distribution to another.
    """
    margins = Margins.of(probabilities, target)
    weights = kernel.repair_weights(
        kernel.laplace_channel(margins.source, 1.0 / epsilon, margins.target),
        margins.target,
        epsilon,
    )
    return spread_over_unseen(weights, margins, epsilon, ordered=ordered)


def calibrate(
    probabilities: Floats,
    epsilon: float,
    *,
    ordered: bool,
    target: Floats | None = None,
) -> LevelChannel:
    """Return the channel of Laplace noise on ranks whose scale is as small as ε allows.

    With few levels, the published scale 1/ε leaves part of ε unspent: ε* is 0.92 ε on half-star
    ratings and 0.43 ε on a fair coin at ε = 1. Here the scale is bisected until ε* reaches ε, and
    never passes it.

    See `laplace` for the parameters, the result and the privacy.
    """
    margins = Margins.of(probabilities, target)
    weights = find_scale(margins.source.tobytes(), margins.target.tobytes(), float(epsilon))
    return spread_over_unseen(weights, margins, epsilon, ordered=ordered)


@lru_cache(maxsize=64)
def find_scale(source_bytes: bytes, target_bytes: bytes, epsilon: float) -> Words:
    """Return the weights of the calibrated channel, which has the least scale.

    Parameters
    ----------
    source_bytes, target_bytes
        The bytes of both float64 margins, by which it is remembered.
    """
    source, target = np.frombuffer(source_bytes), np.frombuffer(target_bytes)
    low, high = min(_LEAST_SCALE, 1.0 / epsilon), 1.0 / epsilon  # ε* is not above ε at high
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        weights = kernel.integer_weights(kernel.laplace_channel(source, middle, target))
        low, high = (low, middle) if kernel.is_private(weights, epsilon) else (middle, high)
    return kernel.repair_weights(kernel.laplace_channel(source, high, target), target, epsilon)


def spread_over_unseen(
    small: Words, margins: Margins, epsilon: float, *, ordered: bool
) -> LevelChannel:
    """Return the channel on all levels, from a channel on the levels of the margins; see the notes of `laplace`.

    Parameters
    ----------
    ordered
        Whether a level that was never seen takes the nearest seen level's row; otherwise it takes
        Q.
    """
    n_levels = margins.n_levels
    weights = np.zeros((n_levels, n_levels), dtype=np.uint64)
    nearest = np.abs(np.arange(n_levels)[:, None] - margins.rows[None, :]).argmin(axis=1)
    rows = small[nearest]
    if not ordered:
        unseen = np.setdiff1d(np.arange(n_levels), margins.rows)
        rows[unseen] = kernel.integer_weights(margins.target[None, :])
    weights[:, margins.columns] = rows
    bound = kernel.exact_epsilon(weights)
    # the target's own row, rounded, may stand a unit outside the others'
    if bound > Decimal(epsilon):
        weights[:, margins.columns] = small[nearest]
        bound = kernel.exact_epsilon(weights)
    return LevelChannel(
        weights=weights, epsilon=min(np.nextafter(float(bound), np.inf), epsilon) if bound else 0.0
    )


# ---- the optimal invariant one: of all that leave the reference unchanged, the one of least cost

MAX_OPTIMAL_LEVELS = 100
_LARGE = 1_000  # variables of a program
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
            "declare the column continuous, which bins it, set its `cost` to zero-one, or take the channel laplace-calibrated",
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
    # the channel nearest to the solver's, in the sense of proportional fitting, whose joint
    # distribution has margins P and Q
    joint = source[:, None] * _solve(source, target, epsilon, cost) * target[None, :] + 1e-300
    for _ in range(100):
        joint *= (source / joint.sum(axis=1))[:, None]
        joint *= (target / joint.sum(axis=0))[None, :]
        if np.abs(joint.sum(axis=1) - source).max() <= 1e-17:
            break
    channel: Floats = joint / joint.sum(axis=1, keepdims=True)
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
    # a large program takes a third of the time by interior points, whose crossover ends at a vertex,
    # too; the presolver finds some programs infeasible that are not
    ways = (("highs-ipm", True), ("highs", True), ("highs", False))
    for method, presolve in ways if len(objective) > _LARGE else ways[1:]:
        solution = linprog(
            objective,
            A_ub=private,
            b_ub=np.zeros(private.shape[0]),
            A_eq=equal,
            b_eq=np.ones(equal.shape[0]) if right is None else right,
            bounds=(0, None),
            method=method,
            options={
                "presolve": presolve,
                "primal_feasibility_tolerance": _TOLERANCE,
                "dual_feasibility_tolerance": _TOLERANCE,
            },
        )
        found = solution.x
        if found is not None and (method == "highs" or solution.success):
            break
    return found


# ---- very many levels: the one of a closed form that keeps most, in numbers for each level


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WindowChannel:
    """A window of ranks on a circle, beside levels that stand alone; its matrix is never made."""

    window: RankWindow
    epsilon: float  # an upper bound on its privacy loss under replace-one
    kept: (
        float  # the share of rows that stay as they are, if they have the reference's distribution
    )
    kept_at_most: float  # by any channel that keeps the distribution and costs no more


def keep_most(probabilities: Floats, epsilon: float) -> WindowChannel:
    """Return the channel that keeps most values of many levels without an order, and their distribution.

    Parameters
    ----------
    probabilities
        The distribution P of the level that goes in and comes out, float64 array of shape (s,),
        summing to 1; zeros are levels that were never seen, which are not released.

    Privacy
    -------
    Unit: one value. Adjacency: replace-one. The bound on ε* is computed from the whole numbers that
    are drawn from, and holds whatever the distribution of the input is.

    Notes
    -----
    Memory and time grow with the number of levels, not with its square. See
    docs/explanation/math.md, Channels.
    """
    margins = Margins.of(probabilities, None)
    seen = np.zeros(len(probabilities))
    seen[margins.rows] = margins.source
    design = find_design(np.sort(margins.source)[::-1], epsilon)
    window = make_window(seen, design, epsilon)
    return WindowChannel(
        window=window,
        epsilon=min(window_epsilon(window), epsilon),
        kept=design.kept,
        kept_at_most=bound_kept(margins.source, epsilon),
    )


def window_epsilon(window: RankWindow) -> float:
    """Return the upper bound on ε* of a window, as the least float that is not below it."""
    bound = bound_loss(window)
    found = float(bound)
    return found if Decimal(found) >= bound else math.nextafter(found, math.inf)


def has_window(n_levels: int, n_seen: int, cost: object) -> bool:
    """Return whether the channel optimal of a column is the window: the program is not solved for so many levels."""
    return cost == "zero-one" and (n_seen > MAX_OPTIMAL_LEVELS or n_levels > MAX_LEVELS)


# ---- the optimal unbiased one: the released value is, on average, a known straight line of the original one

_LEAST_FACTOR = 1e-6  # below it the released values tell nothing that rounding does not hide


@dataclass(frozen=True, slots=True, kw_only=True)
class Attenuation:
    """What a channel does to means: E[Z̃ | Z = z] = m + c·(z - m), so that m + (Z̃ - m)/c is unbiased."""

    factor: float
    centre: float  # M, in the units of the values
    # The largest |E[m + (Z̃ - m)/c | Z = z] - z| over all levels z, rounded up: what whole numbers
    # leave of the bias.
    bias_at_most: float


def optimal_unbiased(probabilities: Floats, epsilon: float, values: Floats) -> LevelChannel:
    """Return the ε-private channel with P·T = P and E[Z̃ | Z = z] = m + c·(z - m) that has the largest c.

    Parameters
    ----------
    probabilities
        The distribution P of the level, float64 array of shape (s,), summing to 1; zeros are levels
        never seen.
    values
        The values of the levels, float64 array of shape (s,), finite and distinct.

    Returns
    -------
    LevelChannel
        With P·T = P, ε* <= epsilon, and the line for every level, also for those that P never saw.
        Where no c above a millionth can be had, as under a P with a single level, it is 1·Pᵀ, the
        channel with c = 0: P may be noisy counts that were paid for.

    Privacy
    -------
    Unit: one value. Adjacency: replace-one. The solver is not trusted: what it returns is projected
    onto the channels that satisfy the equations, and mixed with 1·Pᵀ until ε*, computed in whole
    numbers, is at most ε. Mixing keeps all equations, c apart. c and m are functions of the channel
    and the public values; they reveal nothing else.

    Notes
    -----
    m is the mean under P, because the released values have it too. The unbiased estimate m + (Z̃ -
    m)/c has the variance var(Z)/c² under P, so the largest c is the best; it is also the
    correlation of Z and Z̃, and its squared cost is the least.
    """
    check_values(values)
    margins = Margins.of(probabilities, None)
    small = (
        solve_unbiased(probabilities.tobytes(), float(epsilon), values.tobytes())
        if len(margins.rows) > 1
        else None
    )
    if small is None:
        return LevelChannel(
            weights=kernel.integer_weights(np.tile(probabilities, (len(values), 1))), epsilon=0.0
        )
    weights = np.zeros((len(values), len(values)), dtype=np.uint64)
    weights[:, margins.columns] = small
    bound = float(kernel.exact_epsilon(weights))
    return LevelChannel(weights=weights, epsilon=min(np.nextafter(bound, np.inf), epsilon))


def check_values(values: Floats) -> None:
    """Check the values of the levels, which are public: before anything is charged."""
    if not np.isfinite(values).all() or len(np.unique(values)) < len(values):
        raise SpecError(
            "the levels must have distinct finite values",
            "channel optimal-unbiased",
            "correct the levels",
        )
    if len(values) > MAX_OPTIMAL_LEVELS:
        what = f"the optimal-unbiased channel is solved for at most {MAX_OPTIMAL_LEVELS} levels, but there are {len(values):,}"
        raise SpecError(
            what,
            "channel optimal-unbiased",
            "declare fewer levels, or take the channel laplace-calibrated",
        )


@lru_cache(maxsize=64)
def solve_unbiased(probability_bytes: bytes, epsilon: float, value_bytes: bytes) -> Words | None:
    """Return the repaired whole-number weights of one linear program, from all levels to the seen ones; cached by its content.

    None if the channel would keep less than a millionth of the values.

    Parameters
    ----------
    probability_bytes, value_bytes
        P and the values of all levels, as the bytes of float64 arrays.
    """
    from scipy import sparse  # slow to import, and only these channels need it

    probabilities, values = np.frombuffer(probability_bytes), np.frombuffer(value_bytes)
    margins = Margins.of(probabilities, None)
    target, m, n = margins.source, len(values), len(margins.rows)
    source = np.zeros(m)
    source[margins.rows] = target
    centred = values - target @ values[margins.rows]
    line = centred / math.sqrt(target @ centred[margins.rows] ** 2)  # of mean 0 and variance 1
    equal, private = constrain(source, target, epsilon)
    means = sparse.hstack(
        [
            sparse.kron(sparse.eye_array(m), (target * line[margins.rows])[None, :]),
            sparse.csr_array((m, n)),
            -line[:, None],
        ]
    )
    equal = sparse.vstack([sparse.hstack([equal, sparse.csr_array((m + n, 1))]), means]).tocsr()
    private = sparse.hstack([private, sparse.csr_array((2 * m * n, 1))]).tocsr()
    objective = np.append(np.zeros(m * n + n), -1.0)
    solution = solve_program(objective, equal, private, np.append(np.ones(m + n), np.zeros(m)))
    if solution is None or not solution[-1] > _LEAST_FACTOR:
        return None
    ratios = _project(
        solution[: m * n].reshape(m, n), source, target, line, margins.rows, float(solution[-1])
    )
    return kernel.repair_weights(ratios * target, target, epsilon)


def _project(
    ratios: Floats,
    source: Floats,
    target: Floats,
    line: Floats,
    seen: Indices,
    factor: float,
) -> Floats:
    """Return the nearest ratios R with Σ_j Q_j R = 1, Σ_k P_k R = 1 and Σ_j Q_j v_j R = c·v_k: rows, columns and means of the channel."""
    v = line[seen]
    for _ in range(4):  # each leaves what rounding left of the last
        of_rows = 1.0 - ratios @ target
        of_means = factor * line - ratios @ (target * v)
        of_columns = 1.0 - source @ ratios
        ratios = (
            ratios
            + of_rows[:, None]
            + of_means[:, None] * v
            + (of_columns - source @ of_rows - (source @ of_means) * v)
        )
    return ratios


def measure_attenuation(weights: Words, values: Floats) -> Attenuation | None:
    """Return the line that a channel makes of means, with what is left of its bias, enumerated in exact fractions.

    None if the released values are on average the same, whatever the original ones are.
    """
    v = [Fraction(float(value)) for value in values]
    means = [
        sum((int(weight) * value for weight, value in zip(row, v, strict=True)), Fraction(0))
        / 2**kernel.TOTAL_BITS
        for row in weights
    ]
    low, high = int(np.argmin(values)), int(np.argmax(values))
    slope = (means[high] - means[low]) / (v[high] - v[low])
    if not _LEAST_FACTOR / 2 < slope < 1:
        return None
    factor, centre = float(slope), float((means[low] - slope * v[low]) / (1 - slope))
    c, m = Fraction(factor), Fraction(centre)
    bias = max(abs(m + (mean - m) / c - value) for mean, value in zip(means, v, strict=True))
    return Attenuation(
        factor=factor, centre=centre, bias_at_most=math.nextafter(float(bias), math.inf)
    )


# ---- what a column's levels are worth: costs of changing a level, and the values whose mean is kept


def compute_squared(positions: Floats) -> Floats:
    """Return cost[k, j] = (positions[k] - positions[j])², for levels that lie on a line."""
    return np.square(positions[:, None] - positions[None, :])


def compute_rank(probabilities: Floats) -> Floats:
    """Return the squared differences of the levels' mid-ranks under a reference."""
    return compute_squared(np.cumsum(probabilities) - probabilities / 2)


def compute_zero_one(n_levels: int) -> Floats:
    """Return 1 for every change of level, for unordered levels."""
    return 1.0 - np.eye(n_levels)


def check_declared(matrix: Sequence[Sequence[float]], n_levels: int, where: str) -> Floats:
    """Check a user's matrix of costs and return it as an array.

    Parameters
    ----------
    matrix
        cost[k][j] of releasing level j for level k; null first, when null is a level.
    """
    try:
        cost = np.array(matrix, dtype=np.float64)
    except (TypeError, ValueError):
        raise SpecError(
            "the cost must be a matrix of numbers", where, "one row and one column per level"
        ) from None
    if cost.shape != (n_levels, n_levels):
        raise SpecError(
            f"the cost must have {n_levels} rows and columns",
            where,
            "one per level (null first, when null is a level)",
        )
    if not np.isfinite(cost).all() or (cost < 0).any():
        raise SpecError("the costs must be finite and not negative", where, "correct the matrix")
    return cost


def level_cost(
    codec: LevelCodec, probabilities: Floats, cost: str | Sequence[Sequence[float]]
) -> Floats:
    """Return what each change of a level costs, float64 of shape (n_levels, n_levels)."""
    if not isinstance(cost, str):
        return check_declared(cost, codec.n_levels, f"`cost.{codec.name}`")
    if cost == "zero-one":
        return compute_zero_one(codec.n_levels)
    if not codec.ordered:
        raise SpecError(
            f"categories have no {cost}", f"`cost.{codec.name}`", "take zero-one, or a matrix"
        )
    if cost == "rank":
        return compute_rank(probabilities)
    return _value_cost(codec.levels)


def level_values(codec: Codec) -> Floats:
    """Return the values of a column's levels, whose mean the channel optimal-unbiased keeps; dates and times count from 1970-01-01."""
    if not codec.has_levels or not codec.ordered or codec.levels.null_count:
        what = "the channel optimal-unbiased takes levels that are numbers or dates, without null"
        raise SpecError(
            what, f"column {codec.name!r}", "declare such levels, or set `channel` to optimal"
        )
    return _numbers(codec.levels)


def _numbers(levels: pa.Array) -> Floats:
    """Return levels as numbers, 0 for null; dates and times in their own unit since 1970-01-01."""
    whole = (
        levels.cast(pa.int32() if pa.types.is_date32(levels.type) else pa.int64())
        if pa.types.is_temporal(levels.type)
        else levels
    )
    return np.asarray(
        pc.cast(whole, pa.float64(), safe=False).fill_null(0.0).to_numpy(zero_copy_only=False),
        dtype=np.float64,
    )


def _value_cost(levels: pa.Array) -> Floats:
    """Return squared differences of level values; null is as far from every value as the farthest two are."""
    cost = compute_squared(_numbers(levels))
    if levels.null_count:
        cost[0, :] = cost[:, 0] = cost[1:, 1:].max() if len(cost) > 2 else 1.0
        cost[0, 0] = 0.0
    return cost


def check_cost(codec: Codec, cost: str | Sequence[Sequence[float]]) -> None:
    """Check that a column can have a cost."""
    if cost == "zero-one" and codec.has_levels:
        return  # without a matrix of very many levels
    if codec.has_levels:
        level_cost(codec, np.full(codec.n_levels, 1.0 / codec.n_levels), cost)
    elif cost != "rank":
        raise SpecError(
            "the cost of a continuous or mixed column is always rank",
            f"`cost.{codec.name}`",
            "remove it",
        )
