"""Gaussian graphical models: the networks of tables 1 and 6, the graphical lasso, and the entropy loss."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
from sklearn.covariance import GraphicalLassoCV
from sklearn.exceptions import ConvergenceWarning

Array = Any
NETWORKS = ("Chain", "Exp decay")


def covariance(network: str, p: int, rng: np.random.Generator) -> Array:
    """Return Σ, float64 array of shape (p, p): of an autoregressive chain with random steps, or with Ω_kl = exp(-2|k-l|)."""
    if network == "Chain":
        places = np.concatenate([[0.0], np.cumsum(rng.uniform(0.5, 1.0, p - 1))])
        return np.exp(-0.5 * np.abs(places[:, None] - places))
    index = np.arange(p)
    return np.linalg.inv(np.exp(-2.0 * np.abs(index[:, None] - index)))


def precision(rows: Array, alphas: int | list[float] = 4) -> Array:
    """Return the graphical lasso's Ω̂, its penalty chosen by 5-fold cross-validation."""
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", ConvergenceWarning
        )  # penalties that are too small for the data lose by themselves
        warnings.simplefilter("ignore", RuntimeWarning)
        return GraphicalLassoCV(alphas=alphas, cv=5, max_iter=100).fit(rows).precision_


def entropy_loss(sigma: Array, omega: Array) -> float:
    """Return tr(ΣΩ̂) - log |ΣΩ̂| - p."""
    product = sigma @ omega
    if not np.isfinite(product).all():
        return float("nan")
    sign, log_determinant = np.linalg.slogdet(product)
    return float(np.trace(product) - log_determinant - len(sigma)) if sign > 0 else float("inf")
