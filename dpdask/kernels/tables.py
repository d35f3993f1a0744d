"""Post-processing of noisy two-way tables: estimates without the noise, and raking to margins.

Every function works on a stack of tables of one shape, so that two million tables of binary attributes are a few calls.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dpdask.kernels import simplex

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


def estimate(tables: Floats, rows: Floats, columns: Floats, total: float, sigma: float) -> Floats:
    """Return noisy tables with the noise taken out, by two estimates mixed in each table as its own risk asks for.

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
    float64 array of shape (k, m, n); cells may be negative.

    Notes
    -----
    With the believed margins Z is the table: independence plus the departure from it, centred in both directions, whose
    noise has d = (m-1)(n-1) dimensions. `shrink_values` takes the noise out of the departure's singular values: best where
    dependence has low rank. `project_stack` takes the nearest table without negative counts: best where most cells are
    empty, as when one attribute says the other, a diagonal of full rank. Stein's estimate of the expected squared error of an
    estimate E is |E - Z|² + 2σ²·div(E) - dσ², unbiased, with div(E) the sum of the derivatives of E in Z. For a mixture
    w·E₁ + (1 - w)·E₂ it is quadratic in w, and the w in [0, 1] where it is least is taken.

    References
    ----------
    Stein, Estimation of the mean of a multivariate normal distribution (1981), theorem 1.
    """
    _, m, n = tables.shape
    if min(m, n) < 2:
        return independence(rows, columns, total)
    if m > n:
        return estimate(tables.transpose(0, 2, 1), columns, rows, total, sigma).transpose(0, 2, 1)
    step = max(1, _CHUNK_CELLS // (m * n))
    result = independence(rows, columns, total)
    for start in range(0, len(tables), step):
        part = slice(start, start + step)
        departure = tables[part] - result[part]
        departure -= departure.mean(axis=1, keepdims=True)
        departure -= departure.mean(axis=2, keepdims=True)
        shrunken, shrunken_divergence = shrink_values(departure, sigma)
        centred = result[part] + departure
        projected, divergence = project_stack(centred, total)
        projected -= result[part]
        apart = projected - shrunken
        gain = (apart * (departure - shrunken)).sum(axis=(1, 2)) - sigma**2 * (divergence - shrunken_divergence)
        share = np.clip(gain / np.maximum((apart**2).sum(axis=(1, 2)), 1e-300), 0.0, 1.0)
        result[part] += shrunken + share[:, None, None] * apart
    return result


def tell_dependence(tables: Floats, rows: Floats, columns: Floats, total: float, sigma: float) -> NDArray[np.bool_]:
    """Return which tables depart from independence by more than noise alone does: bool array of shape (k,).

    Parameters
    ----------
    tables, rows, columns, total, sigma
        As for `estimate`.

    Notes
    -----
    The largest singular value of the centred departure is compared with σ(√(m-1) + √(n-1)), the edge of the noise's own.
    """
    _, m, n = tables.shape
    if min(m, n) < 2:
        return np.zeros(len(tables), dtype=np.bool_)
    departure = tables - independence(rows, columns, total)
    departure -= departure.mean(axis=1, keepdims=True)
    departure -= departure.mean(axis=2, keepdims=True)
    largest = np.linalg.svd(departure, compute_uv=False)[:, 0]
    told: NDArray[np.bool_] = largest > sigma * (np.sqrt(m - 1.0) + np.sqrt(n - 1.0))
    return told


def shrink_values(departures: Floats, sigma: float) -> tuple[Floats, Floats]:
    """Return departures from independence with shrunken singular values, and the divergence of that map at each of them.

    Parameters
    ----------
    departures
        float64 array of shape (k, m, n), 2 <= m <= n, centred in both directions.
    sigma
        The noise's standard deviation per cell.

    Returns
    -------
    float64 arrays of shapes (k, m, n) and (k,).

    Notes
    -----
    A centred departure is a matrix of p·q free entries, p = m-1 and q = n-1, whose noise has singular values up to
    σ(√p + √q). With y a singular value over σ√q and β = p/q, it becomes f(y) = √((y²-β-1)² - 4β) / y where y > 1 + √β, and 0
    below: the best possible function of the singular values for squared error as the matrix grows. Low rank is what dependence
    looks like: one number per level pair would be drowned. The divergence is Σ f'(yᵢ) + (q - p)·Σ f(yᵢ)/yᵢ +
    2·Σ_{i<j} (yᵢf(yᵢ) - yⱼf(yⱼ)) / (yᵢ² - yⱼ²).

    References
    ----------
    Gavish and Donoho, Optimal shrinkage of singular values (2017), equation 7. Candès, Sing-Long and Trzasko, Unbiased risk
    estimates for singular value thresholding (2013), theorem IV.3, for the divergence.
    """
    _, m, n = departures.shape
    p, q = m - 1, n - 1
    scale, beta = sigma * np.sqrt(q), p / q
    left, values, right = np.linalg.svd(departures / scale, full_matrices=False)
    values = np.maximum(values[:, :p], 1e-12)
    above = values > 1.0 + np.sqrt(beta)
    kept = np.where(above, np.sqrt(np.maximum((values**2 - beta - 1.0) ** 2 - 4.0 * beta, 0.0)) / values, 0.0)
    shrunken: Floats = (left[:, :, :p] * kept[:, None, :]) @ right[:, :p] * scale
    slopes = np.divide(2.0 * (values**2 - beta - 1.0), kept * values, out=np.zeros_like(values), where=kept > 0.0) - kept / values
    gaps = values[:, :, None] ** 2 - values[:, None, :] ** 2
    rises = (values * kept)[:, :, None] - (values * kept)[:, None, :]
    mixed = np.divide(rises, gaps, out=np.zeros_like(gaps), where=np.abs(gaps) > 1e-9)
    divergence: Floats = slopes.sum(axis=1) + (q - p) * (kept / values).sum(axis=1) + mixed.sum(axis=(1, 2))
    return shrunken, divergence


def project_stack(tables: Floats, total: float) -> tuple[Floats, Floats]:
    """Return for each table the nearest without negative counts and with the total, and the divergence of that map.

    Parameters
    ----------
    tables
        float64 array of shape (k, m, n).
    total
        What the projected tables sum to.

    Returns
    -------
    float64 arrays of shapes (k, m, n) and (k,). The divergence is that in directions centred by rows and by columns: the
    margins are known.

    Notes
    -----
    As `simplex.project`, for a stack. Near a table with support S the map is the projection to {zero outside S, sum 0}. Its trace
    against the centring C is Σ_S C_ss - (1/|S|)·Σ_{s,t in S} C_st.
    """
    k, m, n = tables.shape
    flat = tables.reshape(k, -1)
    projected = simplex.project_each(flat, np.full(k, total)).reshape(k, m, n)
    support = projected > 0.0
    size = np.maximum(support.sum(axis=(1, 2)), 1)
    along_rows, along_columns = (support.sum(axis=axis) ** 2.0 for axis in (2, 1))
    spread = size - along_rows.sum(axis=1) / n - along_columns.sum(axis=1) / m + size**2 / (m * n)
    divergence: Floats = size * (1.0 - 1.0 / m) * (1.0 - 1.0 / n) - spread / size
    return projected, divergence


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
