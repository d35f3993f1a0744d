"""The rank noise's probabilities, case by case: what the draws of `kernels.rank` are compared with."""

import math


def cell_interval(w, rate, n_cells):
    """Pr(i + e < w) and Pr(i + e <= w) for i uniform on 0..n_cells-1 and e discrete Laplace with rate -log(α)."""
    a = math.exp(-rate)
    k = a / (-math.expm1(-rate) * (1.0 + a))
    tail = k * -math.expm1(-rate * n_cells) / n_cells
    if w < 0:
        high = tail * math.exp(rate * (w + 1))
        return high * a, high
    if w >= n_cells:
        rest = tail * math.exp(rate * (n_cells - w))
        return 1.0 - rest, 1.0 - rest * a
    rising, falling = math.exp(-rate * w), math.exp(-rate * (n_cells - 1 - w))
    return (w + k * (rising - falling * a)) / n_cells, (
        w + 1 + k * (rising * a - falling)
    ) / n_cells
