"""The nearest correlation matrix to noisy pairwise correlations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MAX_DIMENSION = 20_000
_NEWTON_STEPS = 100
_CG_STEPS = 200
_SIZES = tuple(0.5**halvings for halvings in range(20))
_DESCENT = 1e-4  # Armijo's share of the predicted descent
_FORCING = 0.05  # the share of the gradient that conjugate gradients may leave: less costs more than it saves
_ALMOST = 0.999  # the share of the floor at which nothing is to be done, so that a result is its own nearest
_RIDGE = 1e-8  # keeps the generalised Hessian invertible where a variable has left every kept eigenvector

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NearestCorrelation:
    """The correlation matrix nearest to a given matrix.

    Attributes
    ----------
    matrix
        float64 array of shape (n, n): exactly symmetric, its diagonal exactly 1, its entries in [-1, 1].
    distance
        The Frobenius norm of the change.
    residual
        The stopping residual: the largest difference from 1 on the diagonal before it was scaled to 1. If it is above the tolerance, the
        matrix is a correlation matrix, but not the nearest, and its smallest eigenvalue may be below the floor by the factor that the
        residual was scaled away with.
    n_iterations
        How many Newton steps were taken; 0 if the input was a correlation matrix already.
    """

    matrix: Floats
    distance: float
    residual: float
    n_iterations: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Spectrum:
    """The dual function at a point y, from the eigendecomposition of A + diag(y): one evaluation."""

    values: Floats
    vectors: Floats
    dual: float
    gradient: Floats


def nearest_correlation(matrix: Floats, *, floor: float = 1e-6, tolerance: float = 1e-7) -> NearestCorrelation:
    """Return the correlation matrix with eigenvalues of at least `floor` that is nearest in the Frobenius norm.

    Parameters
    ----------
    matrix
        float64 array of shape (n, n), symmetric to 1e-8. Its diagonal does not matter: a correlation matrix cannot follow it.
    floor
        In [0, 1). Above 0, a Cholesky factor of the result exists.
    tolerance
        The residual at which to stop, in [1e-12, 1).

    Returns
    -------
    The nearest correlation matrix. One whose eigenvalues reach the floor already is returned as it is. The smallest
    eigenvalue of another is `floor` up to the residual and rounding. The last bits depend on the linear algebra library and
    on its number of threads.

    Raises
    ------
    ValueError
        If the matrix is not square, symmetric and finite, or is larger than 20,000, or a setting is out of its range.

    Notes
    -----
    With A = matrix - floor·I, the result is floor·I plus the nearest positive semidefinite matrix X to A with diagonal
    b = 1 - floor. Its dual is to minimise ½‖(A + diag y)₊‖² - bᵀy over y, where ₊ keeps the positive eigenvalues: convex,
    with gradient diag((A + diag y)₊) - b, and X = (A + diag y)₊ at the minimum. Newton's method on it converges
    quadratically and needs about ten eigendecompositions, where alternating projections need hundreds, or with Anderson
    acceleration still dozens. Each Newton system is solved by conjugate gradients, without forming the Hessian. What is
    left on the diagonal when the iterations stop is scaled away, which keeps the matrix positive definite.

    The cost is that of the eigendecompositions. Where other processes keep the cores busy, threads of the linear algebra
    library wait for each other, and a single one (OPENBLAS_NUM_THREADS=1) can be ten times faster than two.

    References
    ----------
    Higham, Computing the nearest correlation matrix - a problem from finance (2002); Qi and Sun, A quadratically convergent
    Newton method for computing the nearest correlation matrix (2006), algorithm 5.1; Borsdorf and Higham, A preconditioned
    Newton algorithm for the nearest correlation matrix (2010).
    """
    _check(matrix)
    if not (0 <= floor < 1 and 1e-12 <= tolerance < 1):
        raise ValueError("a nearest correlation matrix needs a floor in [0, 1) and a tolerance in [1e-12, 1)")
    given = np.asarray((matrix + matrix.T) / 2, dtype=np.float64)
    np.fill_diagonal(given, 1.0)
    if _reaches(given, _ALMOST * floor):
        return NearestCorrelation(matrix=given, distance=0.0, residual=0.0, n_iterations=0)
    shifted = given - floor * np.eye(len(given))
    point, n_iterations, residual = _minimise(shifted, 1 - floor, tolerance)
    found = _unit_diagonal(_positive_part(point) + floor * np.eye(len(given)))
    return NearestCorrelation(matrix=found, distance=float(np.linalg.norm(found - given)), residual=residual, n_iterations=n_iterations)


def cholesky(matrix: Floats) -> Floats:
    """Return the lower triangular L with L Lᵀ = matrix.

    Parameters
    ----------
    matrix
        float64 array of shape (n, n): symmetric and positive definite.

    Returns
    -------
    float64 array of shape (n, n).

    Raises
    ------
    ValueError
        If the matrix is not square, symmetric, finite and positive definite.
    """
    _check(matrix)
    try:
        return np.linalg.cholesky(np.asarray(matrix, dtype=np.float64))
    except np.linalg.LinAlgError as error:
        raise ValueError("a Cholesky factor needs a positive definite matrix") from error


def _check(matrix: Floats) -> None:
    if matrix.ndim != 2 or len(matrix) != matrix.shape[1] or not 0 < len(matrix) <= MAX_DIMENSION:
        raise ValueError(f"a correlation matrix is square, with 1 to {MAX_DIMENSION} rows")
    if not np.isfinite(matrix).all():
        raise ValueError("a correlation matrix is finite")
    if np.abs(matrix - matrix.T).max() > 1e-8:
        raise ValueError("a correlation matrix is symmetric")


def _reaches(matrix: Floats, floor: float) -> bool:
    """Return whether every eigenvalue is at least `floor`: a Cholesky factor costs a twentieth of the eigenvalues."""
    try:
        np.linalg.cholesky(matrix - floor * np.eye(len(matrix)))
    except np.linalg.LinAlgError:
        return False
    return True


def _minimise(shifted: Floats, target: float, tolerance: float) -> tuple[_Spectrum, int, float]:
    """Return the minimum of the dual, the number of Newton steps that led there, and the largest gradient left."""
    y = np.zeros(len(shifted))
    point = _evaluate(shifted, y, target)
    residual = float(np.abs(point.gradient).max())
    for iteration in range(_NEWTON_STEPS):
        if residual <= tolerance:
            return point, iteration, residual
        direction = _newton_direction(point)
        slope = float(point.gradient @ direction)
        for size in _SIZES:
            trial = _evaluate(shifted, y + size * direction, target)
            # the allowance is for rounding: next to the minimum, the dual no longer shows the descent
            if trial.dual <= point.dual + _DESCENT * size * slope + 1e-13 * abs(point.dual):
                break
        y, point = y + size * direction, trial
        residual = float(np.abs(point.gradient).max())
    return point, _NEWTON_STEPS, residual


def _evaluate(shifted: Floats, y: Floats, target: float) -> _Spectrum:
    moved = shifted.copy()
    moved[np.diag_indices_from(moved)] += y
    values, vectors = np.linalg.eigh(moved)  # not scipy's: its BLAS brings threads of its own, which fight numpy's
    positive = np.maximum(values, 0.0)
    diagonal = np.square(vectors) @ positive
    dual = 0.5 * float(positive @ positive) - target * float(y.sum())
    return _Spectrum(values=values, vectors=vectors, dual=dual, gradient=diagonal - target)


def _newton_direction(point: _Spectrum) -> Floats:
    """Return the approximate solution d of V d = -gradient by conjugate gradients with a diagonal preconditioner."""
    apply, diagonal = _hessian(point)
    scale = 1.0 / np.maximum(diagonal, _RIDGE)
    direction = np.zeros_like(point.gradient)
    rest = -point.gradient
    goal = _FORCING * float(np.linalg.norm(rest))
    preconditioned = scale * rest
    search, inner = preconditioned, float(rest @ preconditioned)
    for _ in range(_CG_STEPS):
        image = apply(search)
        size = inner / float(search @ image)
        direction = direction + size * search
        rest = rest - size * image
        if float(np.linalg.norm(rest)) <= goal:
            break
        preconditioned = scale * rest
        before, inner = inner, float(rest @ preconditioned)
        search = preconditioned + (inner / before) * search
    return direction


def _hessian(point: _Spectrum) -> tuple[Callable[[Floats], Floats], Floats]:
    """Return d -> V d for the generalised Hessian V of the dual, and V's diagonal.

    Notes
    -----
    V d = diag(P (W ∘ (Pᵀ diag(d) P)) Pᵀ), where P are the eigenvectors and W is 1 between two positive eigenvalues, 0
    between two others and λᵢ / (λᵢ - λⱼ) between a positive and another. As 1 - W is of the same form with the signs
    exchanged, and the identity contributes d itself, only the smaller side of the spectrum enters the products.
    """
    positive = point.values > 0
    flipped = 2 * int(positive.sum()) > len(positive)
    kept = ~positive if flipped else positive
    near, far = point.vectors[:, kept], point.vectors[:, ~kept]
    levels = point.values[kept][:, None]
    share = np.abs(levels / (levels - point.values[~kept]))  # no division by zero: all zeros are on one side

    def products(d: Floats) -> Floats:
        scaled = near.T * d
        half = 0.5 * (scaled @ near) @ near.T + (share * (scaled @ far)) @ far.T
        total: Floats = 2.0 * np.einsum("ki,ik->i", half, near)
        return (d - total if flipped else total) + _RIDGE * d

    near2, far2 = np.square(near), np.square(far)
    total = near2.sum(axis=1) ** 2 + 2.0 * np.einsum("ik,ik->i", near2, far2 @ share.T)
    return products, (1.0 - total if flipped else total) + _RIDGE


def _positive_part(point: _Spectrum) -> Floats:
    kept = point.values > 0
    scaled = point.vectors[:, kept] * np.sqrt(point.values[kept])
    result: Floats = scaled @ scaled.T
    return result


def _unit_diagonal(matrix: Floats) -> Floats:
    """Return the matrix scaled to a diagonal of exactly 1, symmetric to the last bit, its entries within [-1, 1]."""
    scale = 1.0 / np.sqrt(np.diagonal(matrix))
    scaled = matrix * scale[:, None] * scale
    result: Floats = np.clip((scaled + scaled.T) / 2, -1.0, 1.0)
    np.fill_diagonal(result, 1.0)
    return result
