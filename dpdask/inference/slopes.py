"""Least-squares slopes with a released column in them, from moments of kept columns by what rows were released as."""

from __future__ import annotations

import math

import numpy as np

from dpdask.errors import SpecError
from dpdask.inference.pseudo_values import PseudoValues
from dpdask.inference.tallies import Floats, Moments


def regress_on_kept(found: Moments, pseudo: PseudoValues) -> tuple[Floats, Floats, Floats]:
    """Return the slopes of f(Z) on kept columns, their standard errors and their worst biases.

    Parameters
    ----------
    found
        The moments of the kept columns.
    pseudo
        g, in the place of f.

    Raises
    ------
    SpecError
        If a kept column is determined by others.
    """
    g = pseudo.g[0].ravel()
    gram = found.products.sum(axis=2)
    _refuse_collinear(gram)
    inverse = np.linalg.inv(gram)
    beta = inverse @ (found.products[:, 0] @ g)
    s0, s1, s2 = found.weigh(-beta, found.n_columns)
    meat = s2.sum(axis=2) + 2 * s1 @ g + s0 @ g**2
    covariance = inverse @ meat @ inverse * found.n_rows / (found.n_rows - found.n_columns)
    bias = pseudo.bias[0] * np.sqrt(found.n_rows * np.diag(inverse))  # Cauchy-Schwarz over the rows
    beta, error, bias = (part[1:] / found.scale for part in (beta, np.sqrt(np.diag(covariance)), bias))
    return beta, error, bias


def regress_kept_on(found: Moments, first: PseudoValues, second: PseudoValues) -> tuple[Floats, Floats, Floats]:
    """Return the slopes of the last kept column on f(Z) and the others, their standard errors, and their worst biases: 0 or infinite.

    Parameters
    ----------
    found
        The moments of the kept columns.
    first, second
        g and h, in the places of f and f².

    Raises
    ------
    SpecError
        If a kept column is determined by others, or the variance of f(Z) cannot be distinguished from zero.
    """
    g, h = first.g[0].ravel(), second.g[0].ravel()
    q, y = found.n_columns - 1, found.n_columns - 1  # the constant and the covariates; the response stands last
    by_level, n_levels = found.products, found.products[0, 0]
    gram = by_level[:q, :q].sum(axis=2)
    _refuse_collinear(gram)
    cross = by_level[0, :q] @ g
    bread = np.block([[np.array([[n_levels @ h]]), cross[None, :]], [cross[:, None], gram]])
    spread = bread[0, 0] - cross @ np.linalg.solve(gram, cross)
    if spread <= 3 * math.sqrt(n_levels @ (h - n_levels @ h / n_levels.sum()) ** 2):
        what = "the variance of its original values cannot be distinguished from zero"
        raise SpecError(what, found.outcomes.where, "use more rows or a larger ε")
    inverse = np.linalg.inv(bread)
    beta = inverse @ np.append(by_level[0, y] @ g, by_level[:q, y].sum(axis=1))
    slope, rest = beta[0], beta[1:]
    s0, s1, s2 = found.weigh(np.append(-rest, 1.0), q)  # e = y - its kept part
    meat = np.empty_like(bread)  # of the scores (g e - h slope, w (e - g slope))
    meat[0, 0] = s2[0, 0] @ g**2 - 2 * slope * s1[0, 0] @ (g * h) + slope**2 * s0[0, 0] @ h**2
    meat[0, 1:] = meat[1:, 0] = s2[0] @ g - slope * s1[0] @ (g**2 + h) + slope**2 * s0[0] @ (g * h)
    meat[1:, 1:] = s2.sum(axis=2) - 2 * slope * s1 @ g + slope**2 * s0 @ g**2
    error = np.sqrt(np.diag(inverse @ meat @ inverse) * found.n_rows / (found.n_rows - q - 1))
    scale, keep = found.scale[-1] / np.append(1.0, found.scale[:-1]), np.r_[0, 2 : q + 1]
    bias = np.full(q, math.inf if first.bias[0] or second.bias[0] else 0.0)
    return beta[keep] * scale, error[keep] * scale, bias


def _refuse_collinear(gram: Floats) -> None:
    """Refuse kept covariates (standardised) if one is a linear combination of the others."""
    if np.linalg.cond(gram) > 1e10:
        raise SpecError("the covariates are collinear", "slope", "leave out one that the others determine")
