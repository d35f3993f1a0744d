"""The optimal unbiased channel: the released value is, on average, a known straight line of the original one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from dpdask.channels.laplace import LevelChannel, Margins
from dpdask.channels.optimal import MAX_OPTIMAL_LEVELS, constrain, solve_program
from dpdask.errors import SpecError
from dpdask.kernels import channel as kernel
from dpdask.kernels.jit import Floats, Words

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
    seen: NDArray[np.intp],
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
