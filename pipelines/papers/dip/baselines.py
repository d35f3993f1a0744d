"""The competitors in Bi and Shen's tables (LRM, OPM, EXM, NLRM, NOPM), for comparison and not recommendation.

They are as the cited papers define them; none leaves a distribution as it was. They draw floating-point noise, whose low
bits tell of the value (Mironov 2012), so a table that they made protects less than its ε says: nothing here is for release.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from scipy.special import gammaln

from dpdask.errors import DataError, SpecError

Floats = NDArray[np.float64]

_SLACK = 1e-9  # sums of squares round


def lrm(values: Floats, width: float, epsilon: float, *, rng: Generator) -> Floats:
    """Return values + Laplace noise of scale width / epsilon: the Laplace randomised mechanism.

    Parameters
    ----------
    values
        float64 array of any shape, each protected on its own.
    width
        By how much two values can differ; positive.
    epsilon
        Privacy parameter of one value, positive and finite.
    rng
        Where the noise comes from.

    Returns
    -------
    float64 array of the same shape.

    Raises
    ------
    SpecError
        If `width` or `epsilon` is not positive and finite.
    DataError
        If two values differ by more than `width`: then ε would not hold.

    Privacy
    -------
    Unit: one value. Adjacency: replace-one. Sensitivity: `width`. Comparison only, see the module. Bi and Shen take the
    width from the sample where the support is unbounded; their ε then holds for no value outside it.

    References
    ----------
    Dwork, McSherry, Nissim and Smith, Calibrating noise to sensitivity in private data analysis, TCC 2006.
    """
    _positive(epsilon, "epsilon")
    _positive(width, "width")
    if values.size and float(values.max()) - float(values.min()) > width * (1 + _SLACK):
        raise DataError(
            "two values differ by more than the width", "LRM", "give the width of the whole range"
        )
    return values + rng.laplace(0.0, width / epsilon, values.shape)


def truncation(moment: float, k: float, n: int, epsilon: float) -> float:
    """Return T = r (n ε²)^(1 / 2k), where `opm_moment` cuts values of k-th absolute moment at most r^k.

    Parameters
    ----------
    moment
        r, positive: a bound on E(|X|^k)^(1/k); of the largest |X| where k is infinite.
    k
        The moment's order, at least 1; `math.inf` for bounded values, which are not cut.
    n
        How many values there are.
    epsilon
        Privacy parameter of one value.

    Raises
    ------
    SpecError
        If one of them is out of range.

    References
    ----------
    Duchi, Jordan and Wainwright, Minimax optimal procedures for locally private estimation, JASA 2018, section 3.2.1.
    """
    _positive(epsilon, "epsilon")
    _positive(moment, "moment")
    if not k >= 1 or n < 1:
        raise SpecError("k and n must be at least 1", "OPM", "correct them")
    return float(moment * (n * epsilon**2) ** (1 / (2 * k)))


def opm_moment(
    values: Floats,
    moment: float,
    k: float,
    epsilon: float,
    *,
    non_negative: bool = False,
    rng: Generator,
) -> Floats:
    """Return values, cut to ±T, with Laplace noise; their average is the minimax optimal procedure for a mean.

    Parameters
    ----------
    values
        float64 array of shape (n,), each protected on its own.
    moment, k
        As for `truncation`, which gives T.
    epsilon
        Privacy parameter of one value.
    non_negative
        Whether values are known not to be negative: then two cut ones differ by T at most and not by 2 T.
    rng
        Where the noise comes from.

    Returns
    -------
    float64 array of shape (n,).

    Raises
    ------
    SpecError
        As for `truncation`.
    DataError
        If a value is negative and `non_negative` was said.

    Privacy
    -------
    Unit: one value. Adjacency: replace-one. Sensitivity: 2 T, or T. Comparison only, see the module.

    References
    ----------
    Duchi, Jordan and Wainwright, Minimax optimal procedures for locally private estimation, JASA 2018, section 3.2.1.
    """
    bound = truncation(moment, k, max(len(values), 1), epsilon)
    if non_negative and bool((values < 0).any()):
        raise DataError("a value is negative", "OPM", "set non_negative to False")
    scale = (bound if non_negative else 2 * bound) / epsilon
    return np.clip(values, -bound, bound) + rng.laplace(0.0, scale, values.shape)


def opm_ball(vector: Floats, radius: float, epsilon: float, *, rng: Generator) -> Floats:
    """Return an unbiased private view of a whole vector of Euclidean norm at most `radius`.

    Parameters
    ----------
    vector
        float64 array of shape (d,).
    radius
        r, positive.
    epsilon
        Privacy parameter of the vector, positive and finite.
    rng
        Where the draw comes from.

    Returns
    -------
    float64 array of shape (d,), of norm B, with expectation `vector`.

    Raises
    ------
    SpecError
        If `radius` or `epsilon` is not positive and finite, or the vector is empty.
    DataError
        If the vector's norm is above `radius`.

    Privacy
    -------
    Unit: the vector. Adjacency: any two vectors of the ball. Bi and Shen make one vector of a whole column, so their ε
    covers all rows together, which is far more than the row by row ε of the methods beside it; each coordinate then has
    noise of order r. Comparison only.

    Notes
    -----
    ±r v / |v| is drawn with probability 1/2 ± |v| / 2r, then a uniform point of the sphere of radius B on its side with
    probability e^ε / (1 + e^ε), on the other side otherwise. B = r (e^ε + 1) / (e^ε - 1) · √π Γ((d+1)/2) / Γ(d/2).

    References
    ----------
    Duchi, Jordan and Wainwright, Minimax optimal procedures for locally private estimation, JASA 2018, section 4.2.3.
    """
    _positive(epsilon, "epsilon")
    _positive(radius, "radius")
    if vector.ndim != 1 or not len(vector):
        raise SpecError("is no vector", "OPM", "give an array of shape (d,), d at least 1")
    norm = float(np.linalg.norm(vector))
    if norm > radius * (1 + _SLACK):
        raise DataError("the vector lies outside the ball", "OPM", "enlarge the radius")
    point = rng.standard_normal(len(vector))
    point *= ball_radius(len(vector), epsilon) * radius / float(np.linalg.norm(point))
    towards = 1.0 if rng.random() < 0.5 + norm / (2 * radius) else -1.0
    same_side = 1.0 if rng.random() < 1 / (1 + math.exp(-epsilon)) else -1.0
    along = float(point @ vector) if norm else float(point[0])
    return point if along * towards * same_side > 0 else -point


def ball_radius(d: int, epsilon: float) -> float:
    """Return B / r of `opm_ball`: which sphere makes the view of a vector of d coordinates unbiased."""
    return (
        math.sqrt(math.pi)
        * math.exp(float(gammaln((d + 1) / 2) - gammaln(d / 2)))
        / math.tanh(epsilon / 2)
    )


def exm(scores: Floats, sensitivity: float, epsilon: float) -> Floats:
    """Return the probabilities ∝ exp(ε score / 2 sensitivity) of the exponential mechanism.

    Parameters
    ----------
    scores
        float64 array of shape (s,), finite: how good each level is. Bi and Shen take the levels' frequencies, so that a
        released value depends on the table and not on the row that it stands for.
    sensitivity
        By how much one row can change a score; positive.
    epsilon
        Privacy parameter of one draw, positive and finite.

    Returns
    -------
    float64 array of shape (s,), summing to 1.

    Raises
    ------
    SpecError
        If a parameter is not positive and finite, or a score not finite.

    Privacy
    -------
    Unit: a row, for one draw, if `sensitivity` is right; n draws cost n ε. Bi and Shen's "sensitivity", the largest value
    of the sample, is right for frequencies in [0, 1] but has nothing to do with them. Comparison only.

    References
    ----------
    McSherry and Talwar, Mechanism design via differential privacy, FOCS 2007.
    """
    _positive(epsilon, "epsilon")
    _positive(sensitivity, "sensitivity")
    if scores.ndim != 1 or not len(scores) or not np.isfinite(scores).all():
        raise SpecError("the scores must be finite, one per level", "EXM", "correct them")
    weights = np.exp(epsilon * (scores - scores.max()) / (2 * sensitivity))
    probabilities: Floats = weights / weights.sum()
    return probabilities


def nlrm(table: Floats, widths: Floats, epsilon: float, *, rng: Generator) -> Floats:
    """Return a table whose columns went through `lrm` one by one: the naive Laplace randomised mechanism.

    Parameters
    ----------
    table
        float64 array of shape (n, p).
    widths
        float64 array of shape (p,): by how much two values of each column can differ.
    epsilon
        Privacy parameter of a row; each column gets ε / p.
    rng
        Where the noise comes from.

    Returns
    -------
    float64 array of shape (n, p).

    Raises
    ------
    SpecError, DataError
        As for `lrm`, or if there is not one width per column.

    Privacy
    -------
    Unit: a row. Adjacency: replace-one. Comparison only, see the module.

    References
    ----------
    Bi and Shen, Distribution-invariant differential privacy, appendix S2, "Gaussian graphical models".
    """
    return _by_column(lrm, table, widths, epsilon, "NLRM", rng)


def nopm(table: Floats, radii: Floats, epsilon: float, *, rng: Generator) -> Floats:
    """Return a table whose columns went through `opm_ball` one by one: the naive minimax optimal procedure.

    Parameters
    ----------
    table
        float64 array of shape (n, p).
    radii
        float64 array of shape (p,): a bound on each column's norm.
    epsilon
        Privacy parameter; each column gets ε / p.
    rng
        Where the draws come from.

    Returns
    -------
    float64 array of shape (n, p).

    Raises
    ------
    SpecError, DataError
        As for `opm_ball`, or if there is not one radius per column.

    Privacy
    -------
    Unit: the table, as `opm_ball` says of a column. Comparison only.

    References
    ----------
    Bi and Shen, Distribution-invariant differential privacy, appendix S2, "Gaussian graphical models".
    """
    return _by_column(opm_ball, table, radii, epsilon, "NOPM", rng)


def _by_column(
    mechanism: Callable[..., Floats],
    table: Floats,
    numbers: Floats,
    epsilon: float,
    where: str,
    rng: Generator,
) -> Floats:
    if table.ndim != 2 or numbers.shape != (table.shape[1],):
        raise SpecError(
            "there must be one number per column of a table",
            where,
            "give arrays of shapes (n, p) and (p,)",
        )
    share = epsilon / table.shape[1]
    columns = zip(table.T, numbers, strict=True)
    return np.column_stack(
        [mechanism(column, float(number), share, rng=rng) for column, number in columns]
    )


def _positive(value: float, name: str) -> None:
    if not (math.isfinite(value) and value > 0):
        raise SpecError("must be positive and finite", name, "correct it")
