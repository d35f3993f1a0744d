"""Correlated normals in single precision, and the nearest correlation matrix to noisy pairwise correlations."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
from llvmlite import binding, ir  # type: ignore[import-untyped]  # llvmlite ships no types; numba brings it
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from dpdask.arrays import Floats, Int32s, Ints, Singles, Words, freeze_class
from dpdask.kernels.jit import jit

BLOCK_ROWS = 128
_PANEL = 6  # latent variables that are summed at once
_LANES = 16  # rows of a vector: one AVX-512 register, two of AVX2
# of rows that are summed at once: as many as registers hold
_VECTORS = 4 if binding.get_host_cpu_features().get("avx512f") else 1

_MOST_CUT, _CUTS = 0.1, 14
_CHANGE = 0.003  # of the correlations, root mean square, when their factor is thinned


Latents = Singles


class Panels(NamedTuple):  # numba takes named tuples apart, not dataclasses
    """A lower triangular factor, six rows at a time: the columns in which one of them is not zero."""

    starts: Ints
    """int64 of shape (n_panels + 1,): where the columns of each panel begin."""
    columns: Int32s
    """int32: the columns of each panel, rising."""
    values: Singles
    """float32 of shape (len(columns) * 6,): the six rows' values in each column."""
    n_latents: int
    """How many rows the factor has; the last panel is filled up with zeros."""


def pack(factor: Singles) -> Panels:
    """Return a lower triangular factor as `latents` reads it."""
    n = len(factor)
    padded = np.zeros((-(-n // _PANEL) * _PANEL, n), dtype=np.float32)
    padded[:n] = np.tril(factor)
    blocks = padded.reshape(len(padded) // _PANEL, _PANEL, n).transpose(0, 2, 1)
    panel, column = np.nonzero((blocks != 0.0).any(axis=2))
    starts = np.searchsorted(panel, np.arange(len(blocks) + 1))
    return Panels(
        starts.astype(np.int64),
        column.astype(np.int32),
        np.ascontiguousarray(blocks[panel, column]).reshape(-1),
        n,
    )


def thin(factor: Floats) -> Floats:
    """Return a Cholesky factor of correlations with small parts set to zero, so that `latents` skips them.

    Parameters
    ----------
    factor
        float64 array of shape (n, n), lower triangular, each row of length 1.

    Notes
    -----
    Parts are six rows of one column. The largest part that is set to zero is as large as it can be,
    in steps of a factor √2, for correlations that change by at most 0.003 (root mean square): a
    probability then changes by less than 0.0005. Rows keep their length 1.
    """
    n = len(factor)
    padded = np.zeros((-(-n // _PANEL) * _PANEL, n))
    padded[:n] = factor
    norms = np.sqrt((padded.reshape(-1, _PANEL, n) ** 2).sum(axis=1))
    wanted = factor @ factor.T
    for cut in _MOST_CUT * 0.5 ** (np.arange(_CUTS) / 2.0):
        thinned = np.where(np.repeat(norms > cut, _PANEL, axis=0)[:n], factor, 0.0)
        lengths = np.sqrt((thinned**2).sum(axis=1, keepdims=True))
        if not lengths.all():
            continue
        thinned /= lengths
        if np.sqrt(((thinned @ thinned.T - wanted) ** 2).mean()) <= _CHANGE:
            return thinned
    return factor


def _sums_code(
    _context: Any,
    values: Any,
    columns: Any,
    _start: Any,
    _stop: Any,
    z: Any,
    _first: Any,
    _step: Any,
    out: Any,
    _place: Any,
    _stride: Any,
) -> Any:
    """Return the type and the code that writes six latent variables of some vectors of rows: sums of columns start..stop-1 of a panel."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        value, column, z_data, out_data = (
            context.make_array(signature.args[i])(context, builder, arguments[i]).data
            for i in (0, 1, 4, 7)
        )
        vector, word = ir.VectorType(ir.FloatType(), _LANES), arguments[2].type
        undefined, zeros = (
            ir.Constant(vector, ir.Undefined),
            ir.Constant(ir.VectorType(ir.IntType(32), _LANES), [0] * _LANES),
        )
        fma = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(vector, [vector] * 3), f"llvm.fma.v{_LANES}f32"
        )
        zero = ir.Constant(vector, [0.0] * _LANES)
        sums = [
            [cgutils.alloca_once_value(builder, zero) for _ in range(_VECTORS)]
            for _ in range(_PANEL)
        ]
        for each in itertools.chain.from_iterable(sums):
            builder.store(zero, each)
        with cgutils.for_range(builder, arguments[3], start=arguments[2], intp=word) as loop:
            at = builder.sext(builder.load(builder.gep(column, [loop.index])), word)
            lanes = builder.add(arguments[5], builder.mul(at, ir.Constant(word, _LANES)))
            places = [
                builder.add(lanes, builder.mul(arguments[6], ir.Constant(word, number)))
                for number in range(_VECTORS)
            ]
            terms = [
                builder.load(
                    builder.bitcast(builder.gep(z_data, [place]), vector.as_pointer()), align=4
                )
                for place in places
            ]
            begin = builder.mul(loop.index, ir.Constant(word, _PANEL))
            for row, rows in enumerate(sums):
                one = builder.load(builder.gep(value, [builder.add(begin, ir.Constant(word, row))]))
                every = builder.shuffle_vector(
                    builder.insert_element(undefined, one, ir.Constant(ir.IntType(32), 0)),
                    undefined,
                    zeros,
                )
                for term, each in zip(terms, rows, strict=True):
                    builder.store(builder.call(fma, [every, term, builder.load(each)]), each)
        for row, number in itertools.product(range(_PANEL), range(_VECTORS)):
            place = builder.add(arguments[8], builder.mul(arguments[9], ir.Constant(word, row)))
            address = builder.gep(
                out_data, [builder.add(place, ir.Constant(word, number * _LANES))]
            )
            builder.store(
                builder.load(sums[row][number]),
                builder.bitcast(address, vector.as_pointer()),
                align=4,
            )
        return context.get_dummy_value()

    return types.void(
        values,
        columns,
        types.intp,
        types.intp,
        z,
        types.intp,
        types.intp,
        out,
        types.intp,
        types.intp,
    ), build


_sums: Callable[..., None] = intrinsic(_sums_code)

_F = np.float32
_LOG = tuple(
    map(_F, (7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1))
)
_LOG_ON = tuple(map(_F, (-1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1)))


@jit
def _log(u: np.float32) -> np.float32:
    """Return the natural logarithm of a positive number that is not denormal, by the polynomial of Cephes."""
    bits = np.float32(u).view(np.int32)
    # so that the rest is within a factor √2 of 1
    exponent = np.int32(bits - np.int32(0x3F3504F3)) >> np.int32(23)
    x = np.int32(bits - np.int32(exponent << np.int32(23))).view(np.float32) - _F(1.0)
    e, square = _F(exponent), x * x
    y = (((_LOG[0] * x + _LOG[1]) * x + _LOG[2]) * x + _LOG[3]) * x + _LOG[4]
    y = (((y * x + _LOG_ON[0]) * x + _LOG_ON[1]) * x + _LOG_ON[2]) * x + _LOG_ON[3]
    y = y * x * square + e * _F(-2.12194440e-4) - _F(0.5) * square
    return (x + y) + e * _F(0.693359375)


@jit
def normals(words: Words) -> Singles:
    """Return four independent standard normal numbers for each word.

    Notes
    -----
    Box and Muller's polar form: r·cos φ and r·sin φ for r = √(-2 log u), with u at the middle of one
    of 2²⁰ equal intervals and φ one of 4,096 equally spaced angles: their characteristic function is
    that of two independent normals up to 2e-6. The largest value is 5.4.

    References
    ----------
    Box and Muller, A note on the generation of random normal deviates (1958).
    """
    halves = words.reshape(-1).view(np.uint32)
    out = np.empty(2 * len(halves), dtype=np.float32)
    first, second = out[: len(halves)], out[len(halves) :]
    for i in range(len(halves)):
        half = halves[i]
        u = (_F(np.int32(half >> np.uint32(12))) + _F(0.5)) * _F(2.0**-20)
        radius = np.sqrt(_F(-2.0) * _log(u))
        place, quarter = np.int32(half & np.uint32(1023)), (half >> np.uint32(10)) & np.uint32(3)
        angle = (_F(place) - _F(511.5)) * _F(np.pi / 2048.0)
        square = angle * angle
        sine = angle + angle * square * (
            (_F(-1.9515295891e-4) * square + _F(8.3321608736e-3)) * square + _F(-1.6666654611e-1)
        )
        cosine = (_F(2.443315711809948e-5) * square + _F(-1.388731625493765e-3)) * square + _F(
            4.166664568298827e-2
        )
        cosine = _F(1.0) - _F(0.5) * square + square * square * cosine
        turned = (quarter & np.uint32(1)) != 0
        x = radius * (sine if turned else cosine)
        y = radius * (cosine if turned else sine)
        first[i] = -x if quarter == np.uint32(1) or quarter == np.uint32(2) else x
        second[i] = -y if quarter >= np.uint32(2) else y
    return out


@jit
def latents(panels: Panels, words: Words, out: Singles, start: int) -> None:
    """Write one block of rows of correlated normals: the factor times `normals`."""
    z = normals(words)
    stride, n = out.shape[1], panels.n_latents
    flat = out.reshape(-1)
    for panel in range(len(panels.starts) - 1):
        low, high = panels.starts[panel], panels.starts[panel + 1]
        for tile in range(0, BLOCK_ROWS, _LANES * _VECTORS):
            place = panel * _PANEL * stride + start + tile
            _sums(
                panels.values,
                panels.columns,
                low,
                high,
                z,
                tile * n,
                _LANES * n,
                flat,
                place,
                stride,
            )


def words_per_block(n_latents: int) -> int:
    """Return how many random words a block of rows takes."""
    return n_latents * BLOCK_ROWS // 4


def room_for(n_latents: int, n: int) -> Singles:
    """Return an array for the latent variables of n rows, and a few more rows and variables: whole blocks and panels."""
    # no power of two: rows meet in one set of the cache
    return np.empty(
        (-(-n_latents // _PANEL) * _PANEL, -(-n // BLOCK_ROWS) * BLOCK_ROWS + _LANES),
        dtype=np.float32,
    )


_NEWTON_STEPS = 100
_CG_STEPS = 200
_SIZES = tuple(0.5**halvings for halvings in range(20))
_DESCENT = 1e-4  # Armijo's share of the predicted descent
_FORCING = 0.05  # the share of the gradient that conjugate gradients may leave: less costs more than it saves
_ALMOST = 0.999  # the share of the floor at which nothing is to be done, so that a result is its own nearest
_RIDGE = 1e-8  # keeps the generalised Hessian invertible where a variable has left every kept eigenvector


@freeze_class(eq=False)
class NearestCorrelation:
    """The correlation matrix nearest to a given matrix."""

    # Float64 array of shape (n, n): exactly symmetric, its diagonal exactly 1, its entries in [-1,
    # 1].
    matrix: Floats
    distance: float
    # The stopping residual: the largest difference from 1 on the diagonal before it was scaled to
    # 1. If it is above the tolerance, the matrix is a correlation matrix, but not the nearest, and
    # its smallest eigenvalue may be below the floor by the factor that the residual was scaled away
    # with.
    residual: float
    # How many Newton steps were taken; 0 if the input was a correlation matrix already.
    n_iterations: int


@freeze_class(eq=False)
class _Spectrum:
    """The dual function at a point y, from the eigendecomposition of A + diag(y): one evaluation."""

    values: Floats
    vectors: Floats
    dual: float
    gradient: Floats


def nearest_correlation(
    matrix: Floats,
    *,
    floor: float = 1e-6,
    tolerance: float = 1e-7,
    diagonal: Floats | None = None,
) -> NearestCorrelation:
    """Return the correlation matrix with eigenvalues of at least `floor` that is nearest in the Frobenius norm.

    Parameters
    ----------
    matrix
        float64 array of shape (n, n), symmetric to 1e-8. Its diagonal does not matter: a
        correlation matrix cannot follow it.
    floor
        In [0, 1). Above 0, a Cholesky factor of the result exists.
    diagonal
        float64 array of shape (n,), each entry above `floor` and at most 1: the diagonal of a
        covariance matrix that is wanted instead. All 1 if None.

    Notes
    -----
    With A = matrix - floor·I, the result is floor·I plus the nearest positive semidefinite matrix X
    to A with diagonal b = 1 - floor. Its dual is to minimise ½‖(A + diag y)₊‖² - bᵀy over y, where
    ₊ keeps the positive eigenvalues: convex, with gradient diag((A + diag y)₊) - b, and X = (A +
    diag y)₊ at the minimum. Newton's method on it converges quadratically and needs about ten
    eigendecompositions, where alternating projections need hundreds, or with Anderson acceleration
    still dozens. Each Newton system is solved by conjugate gradients, without forming the Hessian.
    What is left on the diagonal when the iterations stop is scaled away, which keeps the matrix
    positive definite.

    The cost is that of the eigendecompositions. Where other processes keep the cores busy, threads
    of the linear algebra library wait for each other, and a single one (OPENBLAS_NUM_THREADS=1) can
    be ten times faster than two.

    References
    ----------
    Higham, Computing the nearest correlation matrix - a problem from finance (2002); Qi and Sun, A
    quadratically convergent Newton method for computing the nearest correlation matrix (2006),
    algorithm 5.1; Borsdorf and Higham, A preconditioned Newton algorithm for the nearest
    correlation matrix (2010).
    """
    given = np.asarray((matrix + matrix.T) / 2, dtype=np.float64)
    wanted = np.ones(len(given)) if diagonal is None else diagonal
    np.fill_diagonal(given, wanted)
    with suppress(np.linalg.LinAlgError):  # a Cholesky factor costs a twentieth of the eigenvalues
        np.linalg.cholesky(given - _ALMOST * floor * np.eye(len(given)))
        return NearestCorrelation(matrix=given, distance=0.0, residual=0.0, n_iterations=0)
    shifted = given - floor * np.eye(len(given))
    point, n_iterations, residual = _minimise(shifted, wanted - floor, tolerance)
    kept = point.values > 0
    scaled = point.vectors[:, kept] * np.sqrt(point.values[kept])
    found = scaled @ scaled.T + floor * np.eye(len(given))
    # the wanted diagonal exactly, symmetric to the last bit, entries within [-1, 1]
    scale = np.sqrt(wanted) / np.sqrt(np.diagonal(found))
    found = found * scale[:, None] * scale
    found = np.clip((found + found.T) / 2, -1.0, 1.0)
    np.fill_diagonal(found, wanted)
    return NearestCorrelation(
        matrix=found,
        distance=float(np.linalg.norm(found - given)),
        residual=residual,
        n_iterations=n_iterations,
    )


def _minimise(shifted: Floats, target: Floats, tolerance: float) -> tuple[_Spectrum, int, float]:
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


def _evaluate(shifted: Floats, y: Floats, target: Floats) -> _Spectrum:
    moved = shifted.copy()
    moved[np.diag_indices_from(moved)] += y
    # not scipy's: its BLAS brings threads of its own, which fight numpy's
    values, vectors = np.linalg.eigh(moved)
    positive = np.maximum(values, 0.0)
    diagonal = np.square(vectors) @ positive
    dual = 0.5 * float(positive @ positive) - float(target @ y)
    return _Spectrum(values=values, vectors=vectors, dual=dual, gradient=diagonal - target)


def _newton_direction(point: _Spectrum) -> Floats:
    """Return the approximate solution d of V d = -gradient by conjugate gradients with a diagonal preconditioner.

    Notes
    -----
    V is the dual's generalised Hessian: V d = diag(P (W ∘ (Pᵀ diag(d) P)) Pᵀ), where P are the
    eigenvectors and W is 1 between two positive eigenvalues, 0 between two others and λᵢ / (λᵢ - λⱼ)
    between a positive and another. As 1 - W is of the same form with the signs exchanged, and the
    identity contributes d itself, only the smaller side of the spectrum enters the products.
    """
    positive = point.values > 0
    flipped = 2 * int(positive.sum()) > len(positive)
    kept = ~positive if flipped else positive
    near, far = point.vectors[:, kept], point.vectors[:, ~kept]
    levels = point.values[kept][:, None]
    # no division by zero: all zeros are on one side
    share = np.abs(levels / (levels - point.values[~kept]))

    def multiply(d: Floats) -> Floats:
        scaled = near.T * d
        half = 0.5 * (scaled @ near) @ near.T + (share * (scaled @ far)) @ far.T
        total: Floats = 2.0 * np.einsum("ki,ik->i", half, near)
        return (d - total if flipped else total) + _RIDGE * d

    near2, far2 = np.square(near), np.square(far)
    diagonal = near2.sum(axis=1) ** 2 + 2.0 * np.einsum("ik,ik->i", near2, far2 @ share.T)
    diagonal = (1.0 - diagonal if flipped else diagonal) + _RIDGE
    scale = 1.0 / np.maximum(diagonal, _RIDGE)
    direction = np.zeros_like(point.gradient)
    rest = -point.gradient
    goal = _FORCING * float(np.linalg.norm(rest))
    preconditioned = scale * rest
    search, inner = preconditioned, float(rest @ preconditioned)
    for _ in range(_CG_STEPS):
        image = multiply(search)
        size = inner / float(search @ image)
        direction = direction + size * search
        rest = rest - size * image
        if float(np.linalg.norm(rest)) <= goal:
            break
        preconditioned = scale * rest
        before, inner = inner, float(rest @ preconditioned)
        search = preconditioned + (inner / before) * search
    return direction
