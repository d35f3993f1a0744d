"""Least-squares slopes with a released column in them, whose noise is taken out by pseudo-values: corrected scores."""

from __future__ import annotations

import math

import numpy as np

from dpdask.arrays import Floats, Pair, Triple
from dpdask.errors import SpecError
from dpdask.inference.measured import NORMAL_95
from dpdask.inference.pseudo_values import PseudoValues, find_half_width
from dpdask.inference.tallies import Moments

_SURELY = 3.0  # standard errors


def regress_on_kept(
    found: Moments,
    pseudo: PseudoValues,
    known: PseudoValues | None = None,
    *,
    doubts: Pair | None = None,
) -> Triple:
    """Return the slopes of f(Z) on kept columns, their standard errors and their worst biases.

    g takes the place of f, and `known` that of 1 where Z is not null, None if no row is.
    Averages of `doubts`, functions of the outcome, bound the biases of g and of `known` over
    any rows; without them their largest biases are taken.

    Raises
    ------
    SpecError
        If a kept column is determined by others, or the rows with a value cannot be told from the
        noise.
    """
    g, k = pseudo.g[0].ravel(), _weigh_known(found, known)
    gram = found.products @ k
    refuse_collinear(gram)
    inverse = np.linalg.inv(gram).astype(float)
    n = found.n_columns
    beta = inverse @ (found.products[:, 0] @ g)
    s0, s1, s2 = found.weigh(beta, n)
    # of the scores w (g - fitted · known)
    meat = s0 @ g**2 - 2 * s1 @ (g * k) + s2 @ k**2
    covariance = inverse @ meat @ inverse * found.n_rows / (found.n_rows - n)
    error = np.sqrt(np.diag(covariance))
    if doubts is not None:
        of_g, of_known = found.weigh_sizes(inverse, beta)
        bias = np.maximum(of_g @ doubts[0] + of_known @ doubts[1], 0.0)
    else:  # Cauchy-Schwarz over the rows
        reach: Floats = np.sqrt(np.diag(inverse @ found.products.sum(axis=2) @ inverse))
        rows = 0.0 if known is None else known.bias[0] * math.sqrt(float(s2[0, 0].sum()))
        bias = (pseudo.bias[0] * math.sqrt(found.n_rows) + rows) * reach
        if known is None and pseudo.likely is not None and pseudo.probability is not None:
            root = math.sqrt(found.n_rows) * reach
            half = find_half_width(error, pseudo.likely[:, :1] * root, pseudo.probability)
            bias = np.minimum(bias, half - NORMAL_95 * error)
    beta, error, bias = (part[1:] / found.scale for part in (beta, error, bias))
    return beta, error, bias


def _weigh_known(found: Moments, known: PseudoValues | None) -> Floats:
    """Return what a row of each outcome counts as, among the rows with a value."""
    counts = found.products[0, 0]
    if known is None:
        return np.ones(len(counts))
    k: Floats = known.g[0].ravel()
    mean = counts @ k / found.n_rows
    doubt = math.sqrt(counts @ (k - mean) ** 2) / found.n_rows
    least = float(np.linalg.eigvalsh(found.products @ k / found.n_rows)[0])
    if not min(mean, least) > _SURELY * doubt:
        what = "its rows with a value cannot be told from the noise"
        raise SpecError(what, found.outcomes.where, "use more rows or a larger ε")
    return k


def regress_kept_on(
    found: Moments,
    first: PseudoValues,
    second: PseudoValues,
    known: PseudoValues | None = None,
) -> Triple:
    """Return the slopes of the last kept column on f(Z) and the others, their standard errors, and their worst biases: 0 or infinite.

    g and h take the places of f and f².

    Raises
    ------
    SpecError
        If a kept column is determined by others, or the variance of f(Z) or the rows with a value
        cannot be distinguished from zero.
    """
    g, h, k = first.g[0].ravel(), second.g[0].ravel(), _weigh_known(found, known)
    q = found.n_columns - 1  # the constant and the covariates; the response stands last
    by_level, n_levels = found.products, found.products[0, 0]
    gram = by_level[:q, :q] @ k
    refuse_collinear(gram)
    cross = by_level[0, :q] @ g
    bread = np.block([[np.array([[n_levels @ h]]), cross[None, :]], [cross[:, None], gram]])
    spread = bread[0, 0] - cross @ np.linalg.solve(gram, cross)
    if spread <= 3 * math.sqrt(n_levels @ (h - n_levels @ h / n_levels.sum()) ** 2):
        what = "the variance of its original values cannot be distinguished from zero"
        raise SpecError(what, found.outcomes.where, "use more rows or a larger ε")
    inverse = np.linalg.inv(bread)
    beta = inverse @ np.append(by_level[0, q] @ g, by_level[:q, q] @ k)
    slope, rest = beta[0], beta[1:]
    s0, s1, s2 = found.weigh(np.append(-rest, 1.0), q)  # e = y - its kept part
    meat = np.empty_like(bread)  # of the scores (g e - h slope, w (k e - g slope))
    meat[0, 0] = s2[0, 0] @ g**2 - 2 * slope * s1[0, 0] @ (g * h) + slope**2 * s0[0, 0] @ h**2
    meat[0, 1:] = s2[0] @ (g * k) - slope * s1[0] @ (g**2 + h * k) + slope**2 * s0[0] @ (g * h)
    meat[1:, 0] = meat[0, 1:]
    meat[1:, 1:] = s2 @ k**2 - 2 * slope * s1 @ (g * k) + slope**2 * s0 @ g**2
    error = np.sqrt(np.diag(inverse @ meat @ inverse) * found.n_rows / (found.n_rows - q - 1))
    scale, keep = found.scale[-1] / np.append(1.0, found.scale[:-1]), np.r_[0, 2 : q + 1]
    is_biased = any(part.bias[0] for part in (first, second, known) if part is not None)
    bias = np.full(q, math.inf if is_biased else 0.0)
    return beta[keep] * scale, error[keep] * scale, bias


def refuse_collinear(gram: Floats) -> None:
    """Refuse kept covariates (standardised) if one is a linear combination of the others."""
    if np.linalg.cond(gram) > 1e10:
        raise SpecError(
            "the covariates are collinear", "slope", "leave out one that the others determine"
        )
