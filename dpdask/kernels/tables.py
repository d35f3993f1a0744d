"""Post-processing of noisy two-way tables: shrinkage of the noise, and raking to margins.

Every function works on a stack of tables of one shape, so that two million tables of binary attributes are a few calls.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_RAKING_STEPS = 2000  # what is nearly deterministic converges slowly; the other tables are left alone long before
_RAKING_TOLERANCE = 1e-7
_CHUNK_CELLS = 2**22


def independence(rows: Floats, columns: Floats, total: float) -> Floats:
    """Return the tables of independent attributes: rows (k, m) and columns (k, n) -> (k, m, n), summing to `total`.

    Parameters
    ----------
    rows
        float64 array of shape (k, m): the row margins.
    columns
        float64 array of shape (k, n): the column margins.
    total
        What each table sums to.
    """
    return rows[:, :, None] * columns[:, None, :] / total


def shrink(tables: Floats, rows: Floats, columns: Floats, total: float, sigma: float) -> Floats:
    """Return noisy tables with the noise taken out of their dependence, in Frobenius norm as well as singular values allow.

    Parameters
    ----------
    tables
        float64 array of shape (k, m, n): each cell a count plus independent noise.
    rows, columns
        float64 arrays of shapes (k, m) and (k, n): the margins that are believed, each summing to `total`.
    total
        How many rows were counted.
    sigma
        The noise's standard deviation per cell.

    Returns
    -------
    float64 array of shape (k, m, n): independence plus the shrunken departure from it; cells may be negative.

    Notes
    -----
    The departure is centred in both directions, which leaves a matrix of (m-1)(n-1) free entries, m <= n, whose noise has
    singular values up to σ(√(m-1) + √(n-1)). With y a singular value over σ√(n-1) and β = (m-1)/(n-1), it becomes
    √((y²-β-1)² - 4β) / y where y > 1 + √β, and 0 below: the best possible function of the singular values for squared
    error as the matrix grows. Low rank is what dependence looks like: one number per level pair would be drowned.

    References
    ----------
    Gavish and Donoho, Optimal shrinkage of singular values (2017), equation 7.
    """
    _, m, n = tables.shape
    if min(m, n) < 2:
        return independence(rows, columns, total)
    if m > n:
        return shrink(tables.transpose(0, 2, 1), columns, rows, total, sigma).transpose(0, 2, 1)
    step = max(1, _CHUNK_CELLS // (m * n))
    result = independence(rows, columns, total)
    scale, beta = sigma * np.sqrt(n - 1.0), (m - 1.0) / (n - 1.0)
    for start in range(0, len(tables), step):
        part = slice(start, start + step)
        departure = tables[part] - result[part]
        departure -= departure.mean(axis=1, keepdims=True)
        departure -= departure.mean(axis=2, keepdims=True)
        left, values, right = np.linalg.svd(departure / scale, full_matrices=False)
        kept = np.sqrt(np.maximum((values**2 - beta - 1.0) ** 2 - 4.0 * beta, 0.0)) / np.maximum(values, 1.0)
        kept[values <= 1.0 + np.sqrt(beta)] = 0.0
        result[part] += (left * kept[:, None, :]) @ right * scale
    return result


def rake(tables: Floats, rows: Floats, columns: Floats) -> Floats:
    """Return the tables with the wanted margins that are nearest, in relative entropy, to the given ones' positive parts.

    Parameters
    ----------
    tables
        float64 array of shape (k, m, n); negative cells count as almost empty, so that a margin can always be met.
    rows, columns
        float64 arrays of shapes (k, m) and (k, n), non-negative, with one sum for a table's two margins.

    Returns
    -------
    float64 array of shape (k, m, n), non-negative. Row sums are met to rounding, column sums to 1e-7 of the
    total, or as far as 2,000 steps come. Every cell is thereby within its Fréchet bounds.

    Notes
    -----
    Iterative proportional fitting (Deming and Stephan 1940). An emptied cell keeps a billionth of its share under
    independence.
    """
    total = np.maximum(rows.sum(axis=1), 1e-300)
    result: Floats = np.maximum(tables, 0.0) + 1e-9 * independence(rows, columns, 1.0) / total[:, None, None]
    left = np.arange(len(tables))
    for _ in range(_RAKING_STEPS):
        part = _rake_once(result[left], rows[left], columns[left])
        result[left] = part
        missed = np.abs(part.sum(axis=1) - columns[left]).max(axis=1)
        left = left[missed > _RAKING_TOLERANCE * total[left]]
        if not len(left):
            break
    return result


def _rake_once(tables: Floats, rows: Floats, columns: Floats) -> Floats:
    found = tables.sum(axis=1)
    tables = tables * np.divide(columns, found, out=np.zeros_like(columns), where=found > 0.0)[:, None, :]
    found = tables.sum(axis=2)
    scaled: Floats = tables * np.divide(rows, found, out=np.zeros_like(rows), where=found > 0.0)[:, :, None]
    return scaled


def mutual_information(tables: Floats) -> Floats:
    """Return the mutual information, in nats, of each table's two attributes: (k, m, n) -> (k,), non-negative."""
    share = tables / np.maximum(tables.sum(axis=(1, 2), keepdims=True), 1e-300)
    independent = share.sum(axis=2, keepdims=True) * share.sum(axis=1, keepdims=True)
    ratio = np.divide(share, independent, out=np.ones_like(share), where=(share > 0.0) & (independent > 0.0))
    information: Floats = np.maximum((share * np.log(ratio)).sum(axis=(1, 2)), 0.0)
    return information
